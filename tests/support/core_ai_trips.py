"""Random programs that become Core AI models and MIL programs again, many in one file."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from random_ops import Sample, numbers, plain_numbers, promised

import anesurgery as ane
from anesurgery.interpret import Predictor
from anesurgery.loading import load
from anesurgery.mil import Array, Program


def drawn(one: Sample, seed: int) -> dict[str, Array]:
    """Inputs of a random program: ordinary numbers, or with an odd seed extreme ones."""
    if seed % 2 == 0:
        held = plain_numbers(one, np.random.default_rng(seed))
    else:
        rng = random.Random(seed)
        within = promised(one, rng)
        held = {var: numbers(operand, within[var], rng) for var, operand in one.operands.items()}
    return {var.name: value.numpy() for var, value in held.items()}


def joined(samples: Sequence[Sample]) -> Program:
    """One program with a function for each."""
    program = Program()
    for number, one in enumerate(samples):
        program.add_function(f"f{number}", one.function)
    return program


def differing(samples: Sequence[Sample], folder: Path) -> Iterator[str]:
    """What comes back otherwise, in words: every output in every bit, but for the sign of a zero and of NaN."""
    program = joined(samples)
    ane.to_coreai(program, folder / "trip.aimodel", overwrite=True)
    before, after = load(program), load(folder / "trip.aimodel")
    for number, one in enumerate(samples):
        values = drawn(one, number)
        old, new = (Predictor(model, function=f"f{number}")(values) for model in (before, after))
        for name, value in old.items():
            found, wanted = np.asarray(new[name]), np.asarray(value)
            if not np.array_equal(wanted, found, equal_nan=wanted.dtype.kind == "f"):
                yield f"{one}: {name} {wanted.reshape(-1)[:4]} became {found.reshape(-1)[:4]}"
