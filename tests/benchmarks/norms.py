"""What a factor and a shift for each channel of its norms would gain a model whose weights are compressed.

The small trained GPT-2, one form for all weights: what each norm makes is brought as near as possible to
what it makes in the plain model on the texts of the calibration. Texts that share no letter with them judge it.
The second table has the norms that `compress` itself fitted, and whether it kept them.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from mixed_bits import SMALLEST, Values, language_model, table

import anesurgery as ane
from anesurgery.interpret.core import Executable
from anesurgery.interpret.listener import Listener
from anesurgery.mil import Operation, Program

Made = Mapping[str, torch.Tensor]


class Norms(Listener):
    """Keeps what norms make: [number, channels] each."""

    def __init__(self) -> None:
        self.made: dict[str, list[torch.Tensor]] = {}

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """An op has run."""
        if op.op_type == "layer_norm":
            rows = outputs[0].reshape(-1, outputs[0].shape[-1])
            self.made.setdefault(op.name, []).append(rows.double())


def made(program: Program, texts: Sequence[Values]) -> Made:
    """What the norms of a program make of texts."""
    norms, executable = Norms(), Executable(program, fuse=False)
    for values in texts:
        executable(values, listener=norms)
    return {name: torch.cat(parts) for name, parts in norms.made.items()}


def gained(fitted_on: tuple[Made, Made], judged_on: tuple[Made, Made]) -> dict[str, tuple[float, float]]:
    """The share of the squared error that the best factors and shifts take away, on both.

    Args:
        fitted_on: what the norms of the compressed model and of the plain one make of some texts.
        judged_on: the same of others.
    """
    found = {}
    for name, here in fitted_on[0].items():
        there = fitted_on[1][name]
        about = here - here.mean(0)
        factor = (about * there).sum(0) / about.square().sum(0)
        shift = (there - factor * here).mean(0)
        shares = []
        for ours, plain in (fitted_on, judged_on):
            left = (factor * ours[name] + shift - plain[name]).square().sum()
            shares.append(float(1 - left / (ours[name] - plain[name]).square().sum()))
        found[name] = (shares[0], shares[1])
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", type=int, nargs="+", default=[4], choices=(1, 2, 4, 6, 8))  # 3: iOS 18
    rows: list[list[str]] = []
    fitted_norms: list[list[str]] = []
    for bits in parser.parse_args().bits:
        with tempfile.TemporaryDirectory() as folder:
            model = language_model(Path(folder), 32)
            plain = ane.load(model.package).program
            options: dict[str, Any] = {"for_": "size", "mixed": False, "smallest": SMALLEST}
            small = ane.compress(plain, bits, inputs=model.measured, **options)
            for one in small.norms:
                falls = [
                    "" if pair is None else f"{pair[0]:.3g} -> {pair[1]:.3g}" for pair in (one.error, one.loss)
                ]
                fitted_norms.append([f"{bits}", one.norm, *falls, "yes" if one.kept else "no"])
            programs = small.subject.loaded.program, plain
            fitted, judged = (
                tuple(made(program, texts) for program in programs)
                for texts in (model.measured, model.compared)
            )
            for name, shares in gained((fitted[0], fitted[1]), (judged[0], judged[1])).items():
                rows.append([f"{bits}", name, *(f"{100 * share:.1f} %" for share in shares)])
    print(table(rows, ("bits", "norm", "taken away, calibration", "taken away, other text")))
    print()
    print(table(fitted_norms, ("bits", "norm", "squared error", "loss at the outputs", "kept")))


if __name__ == "__main__":
    main()
