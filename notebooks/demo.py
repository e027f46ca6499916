"""Train a small GPT-2, convert it, rewrite it, check it, and let it write before and after.

Leaves gpt2.mlpackage, gpt2_ane.mlpackage, report.txt and report.json in build/demo.
`--svg FILE` draws the report as a picture.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

import anesurgery as ane
from anesurgery import frontend, registry
from anesurgery.interpret import Executable
from anesurgery.mil import ct, quiet_host
from anesurgery.show import surgeries, terminal
from anesurgery.show.console import WIDTH, PlainConsole

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "demo"
LENGTH = 64
STEPS = 400
"""Training is counted in steps, so that a busy machine writes the same text as an idle one."""
TARGET = "iPhone 13/iOS 17"
VOCABULARY = 50257
"""Of GPT-2: more than an engine before the A17 takes in one axis."""
NEXT = """
  .venv/bin/anesurgery inspect {folder}/gpt2.mlpackage --target "{target}"
  .venv/bin/anesurgery plan {folder}/gpt2.mlpackage gpt2_ane --target "{target}"
  .venv/bin/anesurgery explain causal_mask_tensor
  .venv/bin/anesurgery apply {folder}/gpt2.mlpackage auto --target "{target}" --out build/mine.mlpackage"""
PROMPT = "Redistributions of source code must retain the above copyright notice, this list of "


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

    def decode(self, numbers: list[int]) -> str:
        """Numbers to characters."""
        return "".join(self.letters[i - 1] if 0 < i <= len(self.letters) else "?" for i in numbers)


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


def widened(small: GPT2LMHeadModel) -> GPT2LMHeadModel:
    """The same model with GPT-2's vocabulary: words without a letter say what the unknown one says."""
    config = GPT2Config(**{**small.config.to_dict(), "vocab_size": VOCABULARY})
    model = GPT2LMHeadModel(config)
    weights = small.state_dict()
    table = weights["transformer.wte.weight"]
    more = table[:1].expand(VOCABULARY - len(table), -1)
    weights["transformer.wte.weight"] = weights["lm_head.weight"] = torch.cat([table, more])
    model.load_state_dict(weights)
    return model.eval()


def converted(model: GPT2LMHeadModel, path: Path) -> Path:
    """The model as an .mlpackage, converted the plain way."""
    frontend.register()
    example = torch.zeros((1, LENGTH), dtype=torch.long)
    with quiet_host(), torch.no_grad():
        traced = torch.jit.trace(Logits(model).eval(), example)
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


def written(program: Any, text: Text, count: int = 80) -> str:
    """What a model writes after the prompt, always taking the most likely character."""
    model, numbers = Executable(program, precision="fp16"), text.encode(PROMPT)
    for _ in range(count):
        ids = np.array([numbers[-LENGTH:]], np.int32)  # the prompt fills the window
        numbers.append(int(model({"ids": ids})["logits"][0, -1].argmax()))
    return text.decode(numbers)


def inspected(before: Path, after: Path) -> None:
    """What `inspect` expects before and after, as bars and numbers."""
    found = [ane.inspect(os.path.relpath(model), target=TARGET) for model in (before, after)]
    PlainConsole(width=WIDTH).print(terminal.difference_group(*found))


def main() -> None:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--svg", type=Path, help="draw the report into this file")
    arguments = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    text = Text()
    before = converted(widened(trained(text)), BUILD / "gpt2.mlpackage")
    surgery = ane.apply(before, "gpt2_ane", target=TARGET, prove="both")
    surgery.save(BUILD / "gpt2_ane.mlpackage", overwrite=True)
    console = Console(width=WIDTH, record=True)
    console.print(surgeries.surgery_group(surgery))
    if arguments.svg is not None:
        console.save_svg(
            str(arguments.svg),
            title=f'anesurgery apply gpt2.mlpackage gpt2_ane --target "{TARGET}"',
            clear=False,
        )
    (BUILD / "report.txt").write_text(console.export_text(), encoding="utf-8")
    (BUILD / "report.json").write_text(json.dumps(surgery.to_json(), indent=2), encoding="utf-8")
    for name, model in (("before", before), ("after", BUILD / "gpt2_ane.mlpackage")):
        print(f"\n{name}:\n{written(ane.load(model).program, text)}")
    print()
    inspected(before, BUILD / "gpt2_ane.mlpackage")
    folder = BUILD.relative_to(ROOT)
    names = ", ".join(sorted(p.name for p in BUILD.iterdir() if p.suffix != ".pt"))
    print(f"\nwritten to {folder}: {names}")
    print(f"to try next:{NEXT.format(folder=folder, target=TARGET)}")


if __name__ == "__main__":
    main()
