"""Logarithms of powers that were mixed by stored weights, as front ends of speech models take them of bands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from anesurgery import fp16
from anesurgery.facts.sums_of_squares import SumOfSquares, added_squares
from anesurgery.facts.written_exponentials import log_guard
from anesurgery.mil import Array, Operation, Var, constant, producer, static_shape
from anesurgery.semantics.reading import flag, ints, number


@dataclass(frozen=True)
class Spectrum:
    """`log(weights @ (a * a + b * b))`, with a number that is added before the logarithm or is its least."""

    squares: SumOfSquares
    """Of the real and the imaginary part, or of one value."""
    mix: Operation
    """The product with the weights, none of which is negative."""
    operand: str
    """Which parameter of it reads the powers."""
    axis: int
    """Of the powers, which the product sums over; it has the same place in the result."""
    weights: float
    """The largest sum of the weights of a band."""
    guard: float
    clips: bool
    """Is the guard the least, and not added?"""
    ops: tuple[Operation, ...]

    def reaches(self, size: Callable[[Var], float]) -> float:
        """What powers and bands come to at most, where `size` bounds each value."""
        return self.squares.reaches(size) * max(1.0, self.weights)


def spectrum(op: Operation) -> Spectrum | None:
    """What a logarithm is, if it is one."""
    if op.op_type != "log":
        return None
    guarded = log_guard(op.x, number(op.inputs.get("epsilon")) or 0.0)
    if guarded is None or any(
        o.op_type == "clip" and (number(o.beta) or 0.0) < fp16.LARGEST for o in guarded[3]
    ):
        return None
    mixed, guard, clips, before = guarded
    mixing = _mixing(producer(mixed, "matmul", "linear", "conv"))
    if mixing is None or (guard and not before):
        return None
    mix, operand, axis, weights = mixing
    squares = added_squares(mix.inputs[operand], 1)
    if squares is None or weights.size == 0 or weights.min() < 0:
        return None
    most = float(np.abs(weights.astype(np.float64)).sum(axis=0).max())
    return Spectrum(squares, mix, operand, axis, most, guard, clips, (op, *before, mix, *squares.ops))


def _mixing(op: Operation | None) -> tuple[Operation, str, int, Array] | None:
    """A product with stored weights: what reads the powers, their axis, and the weights as (bins, bands)."""
    if op is None or _has_bias(op):
        return None
    if op.op_type == "linear":
        weights = constant(op.weight)
        return None if weights is None else (op, "x", op.x.rank - 1, weights.T)
    if op.op_type == "conv":
        weights, shape = constant(op.weight), static_shape(op.weight)
        plain = shape is not None and set(shape[2:]) == {1} and set(ints(op, "strides")) <= {1}
        plain = plain and (number(op.inputs.get("groups")) or 1) == 1 and not any(ints(op, "pad"))
        return (op, "x", 1, weights.reshape(weights.shape[:2]).T) if plain and weights is not None else None
    first, second = constant(op.x), constant(op.y)
    if second is not None and second.ndim == 2 and not flag(op, "transpose_x"):
        return op, "x", op.x.rank - 1, second.T if flag(op, "transpose_y") else second
    if first is not None and first.ndim == 2 and op.y.rank >= 2 and not flag(op, "transpose_y"):
        return op, "y", op.y.rank - 2, first if flag(op, "transpose_x") else first.T
    return None


def _has_bias(op: Operation) -> bool:
    bias = constant(op.inputs.get("bias"))
    return op.inputs.get("bias") is not None and (bias is None or bool(np.any(bias)))
