"""Random programs that become Core AI models and MIL programs again, many in one file."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from random_ops import Sample, numbers, plain_numbers, promised
from test_random_programs import RESPELLED, STEPS

import anesurgery as ane
from anesurgery.interpret import Predictor
from anesurgery.loading import load
from anesurgery.mil import Array, Program, ct, mb


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


def chain(steps: Sequence[Any]) -> Program:
    """Steps one after another, each of which may read the second input."""
    return mb.program(
        input_specs=[mb.TensorSpec((4, 4)), mb.TensorSpec((4, 4))], opset_version=ct.target.iOS18
    )(lambda x, y: mb.identity(x=reduce(lambda value, step: step(value, y), steps, x), name="out"))


def chains(count: int) -> Program:
    """Functions of 2 to 7 random steps each."""
    rng, program, steps = random.Random(1), Program(), [*STEPS.values(), *RESPELLED.values()]
    for number in range(count):
        made = chain(rng.choices(steps, k=rng.randint(2, 7)))
        program.add_function(f"f{number}", made.functions["main"])
    return program


def chains_that_differ(program: Program, folder: Path) -> list[str]:
    """Functions that give other bits when they come back."""
    ane.to_coreai(program, folder / "chains.aimodel")
    models = load(program), load(folder / "chains.aimodel")
    apart = []
    for number, name in enumerate(program.functions):
        rng = np.random.default_rng(number)
        values = {key: rng.uniform(0.5, 2, (4, 4)).astype(np.float32) for key in ("x", "y")}
        before, after = (np.asarray(Predictor(model, function=name)(values)["out"]) for model in models)
        apart += [] if np.array_equal(before, after, equal_nan=True) else [name]
    return apart
