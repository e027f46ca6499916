"""Bits by sensitivity against 4 bits for every weight, at equal size, on two trained models.

The small trained GPT-2, trained on the prose of this repository, and a convolutional network trained on the
digits of scikit-learn. Costs are measured on some data, and both compressed models are compared with the
original on other data. `--page FILE` writes the table into a page of the documentation.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from pages import fill

import anesurgery as ane
from anesurgery.compressing.costs import Cost
from anesurgery.compressing.modes import apply_configs, read_mode
from anesurgery.interpret import Predictor
from anesurgery.mil import ct, quiet_host

ROOT = Path(__file__).resolve().parents[2]
MODES = ("palettize-2", "palettize-3", "palettize-4", "palettize-6", "palettize-8")
UNIFORM = "palettize-4"
SMALLEST = 512

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Trained:
    """A trained model, with data to measure on and other data to compare on."""

    name: str
    package: Path
    measured: Sequence[Values]
    compared: Sequence[Values]


def language_model(folder: Path, measured: int = 8, seed: int = 0) -> Trained:
    """The small trained GPT-2, and pieces of its text that share no letter, some of them to measure on."""
    sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))
    gpt2: Any = importlib.import_module("trained_gpt2")

    gpt2.BUILD.mkdir(parents=True, exist_ok=True)
    text = gpt2.Text()
    package = gpt2.converted(gpt2.trained(text, seed), folder / "gpt2.mlpackage")
    numbers, rng = np.array(text.encode(text.text), np.int32), np.random.default_rng(1)
    name = next(iter(ane.load(package).program.functions["main"].inputs))
    starts = rng.permutation(len(numbers) // gpt2.LENGTH)[: measured + 24] * gpt2.LENGTH
    pieces = [{name: numbers[None, at : at + gpt2.LENGTH]} for at in starts]
    return Trained("small trained GPT-2", package, pieces[:measured], pieces[measured:])


def digits(folder: Path, trained_on: int = 0, seed: int = 0) -> Trained:
    """A convolutional network on the digits of scikit-learn, measured on some batches of its training."""
    from sklearn.datasets import load_digits  # type: ignore[import-not-found,import-untyped,unused-ignore]

    torch.manual_seed(seed)
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.tensor(labels)
    order = torch.randperm(len(x))
    train, rest = order[:1400], order[1400:]
    layers = [
        torch.nn.Conv2d(1, 32, 3, padding=1),
        torch.nn.Conv2d(32, 64, 3, padding=1),
        torch.nn.Conv2d(64, 64, 3),
    ]
    body = [m for layer in layers for m in (layer, torch.nn.ReLU())]
    model = torch.nn.Sequential(*body, torch.nn.Flatten(), torch.nn.Linear(64 * 36, 64), torch.nn.ReLU())
    model.append(torch.nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(300):
        batch = train[torch.randint(len(train), (64,))]
        loss: Any = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = (model(x[rest]).argmax(-1) == y[rest]).float().mean().item()
    print(f"digits: {100 * right:.1f} % of {len(rest)} held out are right")
    size, trace = 32, cast(Any, torch.jit.trace)
    with quiet_host(), torch.no_grad():
        made = ct.convert(
            trace(model.eval(), x[:size]),
            inputs=[ct.TensorType("image", (size, 1, 8, 8))],
            minimum_deployment_target=ct.target.iOS18,
        )
        made.save(str(folder / "digits.mlpackage"))
    batches = [{"image": x[rest[i : i + size]].numpy()} for i in range(0, 384, size)]
    seen = [{"image": x[train[i * size : (i + 1) * size]].numpy()} for i in range(trained_on)]
    return Trained("digits", folder / "digits.mlpackage", seen or batches[:3], batches[0 if seen else 3 :])


def cost(plain: Path, compressed: Any, data: Sequence[Values]) -> Cost:
    """How far a compressed model is from the original."""
    found, both = Cost(), [Predictor(plain), Predictor(ane.load(compressed))]
    for values in data:
        found.add(*(model(values) for model in both))
    return found


def rows(model: Trained) -> list[list[str]]:
    """Uniform and mixed, at equal size."""
    measured = ane.sensitivity(model.package, model.measured, MODES, smallest=SMALLEST)
    for row in measured.rows:
        if row.skipped:
            print(f"{row.weight}: {dict(row.skipped)}")
    four = {row.weight: row.options[UNIFORM].bytes for row in measured.rows if UNIFORM in row.options}
    size = sum(four.get(row.weight, row.bytes) for row in measured.rows)
    proposal = measured.propose(max_bytes=size)
    plain = ct.models.MLModel(str(model.package), skip_model_load=True)
    uniform = apply_configs(plain, dict.fromkeys(four, read_mode(UNIFORM)), SMALLEST)
    mixed = proposal.apply(str(model.package))
    bits = Counter(mode.rpartition("-")[2] for mode in proposal.modes.values())
    words = ", ".join(f"{bits[b]} at {b} bits" for b in sorted(bits))
    made = []
    pairs = ((f"{UNIFORM} for all", uniform, size), (f"mixed weights: {words}", mixed, proposal.bytes))
    for what, compressed, held in pairs:
        found = cost(model.package, compressed, model.compared)
        made.append(
            [model.name, what, f"{held:,}", f"{found.kl:.4f}", f"{100 * found.top1:.1f} %", f"{found.psnr:.1f}"]
        )
    return made


HEADS = ("model", "weights", "bytes", "KL, nats", "same top-1", "PSNR, dB")


def table(found: list[list[str]], heads: Sequence[str] = HEADS) -> str:
    """The rows as Markdown."""
    lines = [heads, ["---"] * len(heads), *found]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, help="a page between whose marks the table is written")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = [row for make in (language_model, digits) for row in rows(make(Path(name)))]
    text = table(found)
    print(text)
    fill(chosen.page, "mixed bits", text)


if __name__ == "__main__":
    main()
