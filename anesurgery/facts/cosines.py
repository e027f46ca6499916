"""The cosine of two rows, written out: their product, divided by the lengths of both."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from anesurgery import fp16
from anesurgery.facts.sums_of_squares import sum_of_squares
from anesurgery.mil import Operation, Var, producer, static_shape
from anesurgery.semantics.reading import beside_number, flag, ints, number


@dataclass(frozen=True)
class Cosine:
    """`sum(a * b) / max(|a| * |b|, least)` over axes."""

    rows: tuple[Var, Var]
    """a and b, which may broadcast."""
    axes: tuple[int, ...]
    keep_dims: bool
    least: float
    """What the product of the lengths is at least; 0 where nothing says."""
    ops: tuple[Operation, ...]
    """All that it is written with."""
    count: int
    """The values of a row."""

    def reaches(self, size: Callable[[Var], float]) -> float:
        """What the squares of a row add up to at most, where `size` bounds each value."""
        return max(map(size, self.rows)) ** 2 * self.count


def cosine(op: Operation) -> Cosine | None:
    """What a division is, if it is one: the lengths multiplied, or one root of the product of their squares."""
    total = producer(op.x, "reduce_sum") if op.op_type == "real_div" else None
    product = None if total is None else producer(total.x, "mul")
    if total is None or product is None or product.x is product.y:
        return None
    axes, keep, shape = tuple(sorted(ints(total, "axes"))), flag(total, "keep_dims"), static_shape(total.x)
    lengths = _lengths(op.y)
    if shape is None or lengths is None or product.x.rank != product.y.rank:
        return None
    found, least, between = lengths
    rows = (product.x, product.y) if found[0].x is product.x else (product.y, product.x)
    if any(
        of.x is not row or of.axes != axes or of.keep_dims is not keep
        for of, row in zip(found, rows, strict=True)
    ):
        return None
    ops = (op, total, product, *between, *(op for of in found for op in of.ops))
    count = math.prod(shape[axis] for axis in axes)
    return Cosine((product.x, product.y), axes, keep, least, ops, count)


@dataclass(frozen=True)
class _Length:
    """The length of a row, or its square."""

    x: Var
    axes: tuple[int, ...]
    keep_dims: bool
    ops: tuple[Operation, ...]


def _lengths(var: Var) -> tuple[tuple[_Length, _Length], float, tuple[Operation, ...]] | None:
    """Two lengths, what their product is at least, and the ops between."""
    inner, least, between = _at_least(var)
    root = producer(inner, "sqrt")
    if root is not None:
        inner, square, more = _at_least(root.x)
        least, between = max(least, math.sqrt(square)), (*between, root, *more)
    product = producer(inner, "mul")
    pair = [] if product is None else [_length(v, squared=root is not None) for v in (product.x, product.y)]
    if product is None or pair[0] is None or pair[1] is None:
        return None
    return (pair[0], pair[1]), least, (*between, product)


def _at_least(var: Var) -> tuple[Var, float, tuple[Operation, ...]]:
    """A value without its lower bound, the bound, and the op that has it."""
    op = producer(var, "maximum", "clip")
    if op is None:
        return var, 0.0, ()
    if op.op_type == "clip":
        low, high = number(op.alpha) or 0.0, number(op.beta) or 0.0
        return (op.x, low, (op,)) if low > 0 and high >= fp16.LARGEST else (var, 0.0, ())
    guarded = beside_number(op)
    if guarded is None or guarded[1] <= 0 or guarded[0].shape != var.shape:
        return var, 0.0, ()
    return *guarded, (op,)


def _length(var: Var, squared: bool) -> _Length | None:
    """The length of a row, or the sum of its squares."""
    norm = None if squared else producer(var, "reduce_l2_norm")
    if norm is not None:
        return _Length(norm.x, tuple(sorted(ints(norm, "axes"))), flag(norm, "keep_dims"), (norm,))
    root = None if squared else producer(var, "sqrt")
    if not squared and root is None:
        return None
    found = sum_of_squares(var if root is None else root.x)
    if (
        found is None
        or found.total is None
        or found.epsilon
        or found.factor != 1
        or found.reduces != "reduce_sum"
    ):
        return None
    axes, keep = tuple(sorted(ints(found.total, "axes"))), flag(found.total, "keep_dims")
    return _Length(found.values[0], axes, keep, found.ops if root is None else (root, *found.ops))
