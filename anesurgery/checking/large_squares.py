"""Squares of norms that fp16 does not hold: the model runs in fp16 on the inputs given, or on sampled ones."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from anesurgery.errors import InterpretError
from anesurgery.interpret import Listener, Predictor
from anesurgery.mil import Array, Function, Operation, Program, Var, static_shape, types, walk_ops
from anesurgery.regions.root_norms import cannot_overflow, root_norm
from anesurgery.semantics.constant_ends import LARGEST

Values = Mapping[str, Array]
MARGIN = 4.0
"""Other inputs may square to so many times what the sampled ones do: numbers of twice the size. A choice."""
MOST_NUMBERS = 1 << 29
"""Stored numbers up to which a model is run for this: one run reads each, in seconds."""


def large_squares(program: Program, seed: int = 0, inputs: Sequence[Values] = ()) -> dict[str, float]:
    """Names of the squares of root norms that may overflow, with the largest that was seen; in fp16 infinite.

    Norms whose squares intervals bound are not looked at. Nothing is run where there is no other, where the
    model stores more than `MOST_NUMBERS`, or where it cannot be run on the inputs.

    Args:
        program: of one function or several.
        seed: of the sampled inputs.
        inputs: sets of arrays by input name, for programs of one function; one is sampled by default.
    """
    inputs = inputs if len(program.functions) == 1 else ()
    largest: dict[str, float] = {}
    for name, function in program.functions.items():
        if (squares := repairs_of_squares(function)) and stored(function) <= MOST_NUMBERS:
            largest |= _seen(program, name, squares, seed, inputs)
    return {name: value for name, value in largest.items() if not value < LARGEST / MARGIN}


def repairs_of_squares(function: Function) -> dict[Var, str]:
    """The squares in root norms that nothing bounds, each with the pass that writes the norm otherwise."""
    repairs = {}
    for op in walk_ops(function):
        norm = root_norm(op) if op.op_type in ("mul", "real_div") else None
        if norm is not None and cannot_overflow(norm) is None:
            mean = next(o for o in norm.ops if o.op_type == "reduce_mean")
            repairs[mean.x] = "group_norm" if norm.centred else "rms_norm"
    return repairs


def stored(function: Function) -> int:
    """How many numbers the constants of a function hold."""
    constants = (op.outputs[0] for op in walk_ops(function) if op.op_type == "const")
    return sum(math.prod(static_shape(v) or ()) for v in constants if types.is_tensor(v.sym_type))


def _seen(
    program: Program, function: str, squares: Collection[Var], seed: int, inputs: Sequence[Values]
) -> Mapping[str, float]:
    watch = _Watch(squares)
    try:
        predictor = Predictor(program, function=function, precision="fp16", fuse=False)
        for values in inputs or [predictor.sample(seed)]:
            predictor(values, listener=watch)
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
                self.largest[var.name] = max(self.largest.get(var.name, 0.0), float(value.abs().max()))
