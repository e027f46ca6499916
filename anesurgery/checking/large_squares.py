"""Squares of norms that fp16 does not hold: the model runs once in fp16 on sampled inputs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from anesurgery.errors import InterpretError
from anesurgery.interpret import Listener, Predictor
from anesurgery.mil import Function, Operation, Program, Var, static_shape, types, walk_ops
from anesurgery.regions.root_norms import cannot_overflow, root_norm
from anesurgery.semantics.constant_ends import LARGEST

MARGIN = 4.0
"""Other inputs may square to so many times what the sampled ones do: numbers of twice the size. A choice."""
MOST_NUMBERS = 1 << 29
"""Stored numbers up to which a model is run for this: one run reads each, in seconds."""


def large_squares(program: Program, seed: int = 0) -> dict[str, float]:
    """Names of the squares of root norms that may overflow, with the largest that was seen; in fp16 infinite.

    Norms whose squares intervals bound are not looked at. Nothing is run where there is no other, where the
    model stores more than `MOST_NUMBERS`, or where it cannot be run on sampled inputs.
    """
    largest: dict[str, float] = {}
    for name, function in program.functions.items():
        squares = {square for op in walk_ops(function) if (square := _square(op)) is not None}
        if squares and stored(function) <= MOST_NUMBERS:
            largest |= _seen(program, name, squares, seed)
    return {name: value for name, value in largest.items() if not value < LARGEST / MARGIN}


def _square(op: Operation) -> Var | None:
    """The square in the norm that an op ends, where nothing bounds it."""
    norm = root_norm(op) if op.op_type in ("mul", "real_div") else None
    if norm is None or cannot_overflow(norm) is not None:
        return None
    mean = next(o for o in norm.ops if o.op_type == "reduce_mean")
    return mean.x


def stored(function: Function) -> int:
    """How many numbers the constants of a function hold."""
    constants = (op.outputs[0] for op in walk_ops(function) if op.op_type == "const")
    return sum(math.prod(static_shape(v) or ()) for v in constants if types.is_tensor(v.sym_type))


def _seen(program: Program, function: str, squares: Collection[Var], seed: int) -> Mapping[str, float]:
    watch = _Watch(squares)
    try:
        predictor = Predictor(program, function=function, precision="fp16", fuse=False)
        predictor(predictor.sample(seed), listener=watch)
    except InterpretError:
        return {}
    return watch.largest


class _Watch(Listener):
    """The largest magnitude of some values."""

    def __init__(self, wanted: Collection[Var]) -> None:
        self._wanted = wanted
        self.largest: dict[str, float] = {}

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Look at what is wanted."""
        for var, value in zip(op.outputs, outputs, strict=True):
            if var in self._wanted:
                self.largest[var.name] = float(value.abs().max())
