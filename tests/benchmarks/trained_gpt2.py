"""A small GPT-2 trained on the prose of this repository, for benchmarks that need weights with a meaning."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

from anesurgery import frontend, registry
from anesurgery.mil import ct, quiet_host

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "demo"
LENGTH = 64
STEPS = 400
"""Training is counted in steps, so that a busy machine makes the same model as an idle one."""


class Text:
    """The prose of this repository as numbers, one for each character, and one for what is unknown."""

    def __init__(self) -> None:
        prose = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "LICENSE")]
        names = [*registry.pass_names(), *registry.recipe_names()]
        prose += [registry.documentation(name).split("\n\n")[-1] for name in names]
        self.text = re.sub(r"[ \n]+", " ", " ".join(prose))
        self.letters = sorted(set(self.text))
        self.number = {c: i + 1 for i, c in enumerate(self.letters)}

    @property
    def size(self) -> int:
        """Size of the vocabulary: odd, as GPT-2's own is."""
        return (len(self.letters) + 1) | 1

    def encode(self, text: str) -> list[int]:
        """Characters to numbers."""
        return [self.number.get(c, 0) for c in text]


class Logits(torch.nn.Module):
    """A language model that takes ids and gives logits."""

    def __init__(self, model: GPT2LMHeadModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids [1, length] to logits [1, length, vocabulary]."""
        logits: torch.Tensor = self.model(ids, use_cache=False).logits
        return logits


def trained(text: Text, seed: int = 0) -> GPT2LMHeadModel:
    """A small GPT-2, trained for `STEPS` steps, or as the last run left it."""
    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=3,
        n_head=4,
        n_embd=256,
        n_positions=LENGTH,
        vocab_size=text.size,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    cache = BUILD / f"weights-{text.size}-{config.n_embd}-{STEPS}{f'-{seed}' if seed else ''}.pt"
    if cache.exists():
        model.load_state_dict(torch.load(cache, weights_only=True))
        return model.eval()
    data = torch.tensor(text.encode(text.text))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    bar = tqdm(range(STEPS), desc="training", unit=" steps", disable=None)
    for _ in bar:
        at = torch.randint(0, len(data) - LENGTH, (16,)).tolist()
        batch = torch.stack([data[i : i + LENGTH] for i in at])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.2f}")
    torch.save(model.state_dict(), cache)
    return model.eval()


def converted(model: GPT2LMHeadModel, path: Path) -> Path:
    """The model as an .mlpackage, converted the plain way."""
    frontend.register()
    example = torch.zeros((1, LENGTH), dtype=torch.long)
    with quiet_host(), torch.no_grad():
        trace: Any = torch.jit.trace
        traced = trace(Logits(model).eval(), example)
        package: Any = ct.convert(
            traced,
            inputs=[ct.TensorType("ids", shape=example.shape, dtype=np.int32)],
            outputs=[ct.TensorType("logits")],
            minimum_deployment_target=ct.target.iOS16,
            skip_model_load=True,
        )
    shutil.rmtree(path, ignore_errors=True)
    package.save(str(path))
    return path
