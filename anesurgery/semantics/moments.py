"""Variances and covariances that are written as a difference of means, of rows or of windows."""

from __future__ import annotations

from anesurgery.mil import Operation, Var, producer
from anesurgery.ops import names
from anesurgery.semantics.row_lengths import squared

MEANS = names("reduce_mean avg_pool")
SQUARES = names("mul square pow")


def difference_of_means(op: Operation) -> tuple[list[Var], tuple[Operation, ...]]:
    """The values and ops of `mean(a b) - mean(a) mean(b)`, the subtraction and the first mean in front.

    One value for a variance; none, and no op, for all others.
    """
    first = producer(op.x, *MEANS) if op.op_type == "sub" else None
    second = producer(op.y, *SQUARES) if first is not None else None
    product = producer(first.x, *SQUARES) if first is not None else None
    if first is None or second is None or product is None:
        return [], ()
    values, means = _factors(product), [producer(v, first.op_type) for v in _factors(second)]
    if not values or len(means) != len(values) or {m and m.x for m in means} != set(values):
        return [], ()
    return values, tuple(dict.fromkeys((op, first, product, second, *(m for m in means if m is not None))))


def _factors(op: Operation) -> list[Var]:
    """The values that an op multiplies, each once: one for a square."""
    one = squared(op)
    return [one] if one is not None else [op.x, op.y] if op.op_type == "mul" else []
