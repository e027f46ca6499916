"""Forms that lose digits: silent where numbers are given, small, or not what is asked about."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from anesurgery.facts.lost_digits import lost_digits
from anesurgery.mil import Program, Var, mb, types

HALF = np.float16
Body = Callable[[Var], Var]


def fraction(x: Var) -> Var:
    rest: Var = mb.sub(x=x, y=mb.floor(x=x), name="y")
    return rest


def places(x: Var, total: Var) -> Var:
    a, b = mb.split(x=total, num_splits=2, axis=-1)
    gap: Var = mb.sub(x=a, y=b, name="y")
    return gap


def seventh(x: Var) -> Var:
    part: Var = mb.real_div(x=x, y=HALF(7))
    return part


def share(x: Var, noise: float) -> Var:
    return mb.sub(x=HALF(1), y=mb.real_div(x=x, y=mb.add(x=x, y=HALF(noise))), name="y")


def bounded(x: Var) -> Var:
    value: Var = mb.tanh(x=x)
    return value


LOSSES: dict[str, Body] = {
    "fraction": lambda x: fraction(seventh(x)),
    "remainder": lambda x: mb.mod(x=seventh(x), y=HALF(1), name="y"),
    "places": lambda x: places(x, mb.cumsum(x=x, axis=1)),
    "count": lambda x: mb.cumsum(x=x, axis=1, name="y"),
    "position": lambda x: mb.cast(x=mb.cumsum(x=mb.sigmoid(x=x), axis=1), dtype="int32", name="y"),
    "share": lambda x: share(x, 0.01),
    "versed sine": lambda x: mb.sub(x=HALF(1), y=mb.cos(x=x), name="y"),
    "root of shares": lambda x: mb.sqrt(x=mb.mul(x=mb.sigmoid(x=x), y=mb.softmax(x=x, axis=1)), name="y"),
    "flat power": lambda x: mb.add(x=mb.pow(x=x, y=HALF(0.01)), y=HALF(-1), name="y"),
    "arc cosine": lambda x: mb.acos(x=mb.tanh(x=x), name="y"),
}
SILENT: dict[str, Body] = {
    "fraction of an input": fraction,
    "fraction of a small number": lambda x: fraction(seventh(bounded(x))),
    "floor of another": lambda x: mb.sub(x=seventh(x), y=mb.floor(x=x), name="y"),
    "places of two sums": lambda x: mb.sub(x=mb.cumsum(x=x, axis=1), y=mb.cumsum(x=x, axis=0), name="y"),
    "short count": lambda x: mb.cumsum(x=mb.sigmoid(x=x), axis=0, name="y"),
    "versed sine of a large angle": lambda x: mb.sub(
        x=HALF(1), y=mb.cos(x=mb.add(x=mb.sigmoid(x=x), y=HALF(1))), name="y"
    ),
    "root of one share": lambda x: mb.sqrt(x=mb.mul(x=mb.sigmoid(x=x), y=x), name="y"),
    "flat power less 2": lambda x: mb.sub(x=mb.pow(x=x, y=HALF(0.01)), y=HALF(2), name="y"),
    "root less 1": lambda x: mb.sub(x=mb.pow(x=x, y=HALF(0.5)), y=HALF(1), name="y"),
    "no position": lambda x: mb.cast(x=x, dtype="int32", name="y"),
    "share of much noise": lambda x: share(mb.sigmoid(x=x), 0.5),
    "arc cosine of a half": lambda x: mb.acos(x=mb.mul(x=mb.tanh(x=x), y=HALF(0.5)), name="y"),
    "arc cosine of an input": lambda x: mb.acos(x=x, name="y"),
}


def built(body: Body) -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 4096), dtype=types.fp16)])(lambda x: body(x))


@pytest.mark.parametrize("name", [*LOSSES, *SILENT])
def test_each_form(name: str) -> None:
    program = built({**LOSSES, **SILENT}[name])
    (output,) = program.functions["main"].outputs
    assert output.op is not None
    assert (lost_digits(output.op, 16) is not None) is (name in LOSSES)
