"""Variances and covariances that are written as a difference of means, of rows or of windows."""

from __future__ import annotations

import numpy as np

from anesurgery.mil import Operation, Var, constant, is_stored, op_inputs, producer
from anesurgery.ops import names
from anesurgery.semantics.row_lengths import squared

MEANS = names("reduce_mean avg_pool conv")
"""Ops that take means; a convolution does whose weights add up to 1."""
SQUARES = names("mul square pow")
NEAR_ONE = 1e-2
"""How far from 1 the weights of a mean may add up: those of a bell curve are cut off at its ends."""


def difference_of_means(op: Operation) -> tuple[list[Var], tuple[Operation, ...]]:
    """The values and ops of `mean(a b) - mean(a) mean(b)`, the subtraction and the first mean in front.

    One value for a variance; none, and no op, for all others.
    """
    first = producer(op.x, *MEANS) if op.op_type == "sub" else None
    second = producer(op.y, *SQUARES) if first is not None else None
    product = producer(first.x, *SQUARES) if first is not None else None
    if first is None or second is None or product is None or not _is_mean(first):
        return [], ()
    values, means = _factors(product), [producer(v, first.op_type) for v in _factors(second)]
    if not values or len(means) != len(values) or {m and m.x for m in means} != set(values):
        return [], ()
    if not all(m is not None and _as_wide(first, m) for m in means):
        return [], ()
    return values, tuple(dict.fromkeys((op, first, product, second, *(m for m in means if m is not None))))


def _is_mean(op: Operation) -> bool:
    """Is each result a mean of some numbers?"""
    weight = constant(op.weight) if op.op_type == "conv" and is_stored(op.weight) else None
    if op.op_type != "conv":
        return True
    if weight is None or op.inputs.get("bias") is not None or np.min(weight) < 0:
        return False
    sums = np.asarray(weight, np.float64).reshape(len(weight), -1).sum(1)
    return bool(np.all(np.abs(sums - 1) < NEAR_ONE))


def _as_wide(first: Operation, second: Operation) -> bool:
    """Do two ops take means over the same rows or windows, with the same weights?"""
    one, other = (op_inputs(op, "x") for op in (first, second))
    return one.keys() == other.keys() and all(
        one[k] is other[k] or np.array_equal(constant(one[k]), constant(other[k])) for k in one
    )


def _factors(op: Operation) -> list[Var]:
    """The values that an op multiplies, each once: one for a square."""
    one = squared(op)
    return [one] if one is not None else [op.x, op.y] if op.op_type == "mul" else []
