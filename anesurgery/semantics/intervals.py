"""Where a value lies before any input is known: an interval from the ops that make it; how large products are.

The unknown is infinite: `(-inf, inf)` says nothing. `interval` is that of real numbers, which findings ask for:
what a value would be where its dtype ends. `stored_interval` is that of the numbers which the program computes,
rounded outwards in the dtype of each value; it is infinite where a value may overflow, and proofs rest on it.
Weights are read only where what they multiply is bounded, and those of more than `MOST` elements never.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.interpret.arithmetic.precision import as_tensor, forget
from anesurgery.mil import Array, Operation, Var, constant, is_symbolic, np_dtype, producer, static_shape
from anesurgery.ops import MOVING, PADDING, UNROUNDED, names
from anesurgery.semantics.analysis_cache import cached
from anesurgery.semantics.bounds import (
    ANY,
    CORRECT,
    EXACT,
    FUNCTION,
    MOST,
    Interval,
    found_of,
    of_constant,
    outwards,
    row_length,
)
from anesurgery.semantics.reading import axis_of, flag, ints, scaled
from anesurgery.semantics.rows import SPECS, OpSpec, reach

STEPS = 48
"""Ops that are looked at for one interval: more are seldom needed, and each question costs as many."""
DEEP = 100
"""The same where many questions share what is learned; Python calls five functions for each op, of 1,000."""

OF_TYPES: dict[str, Interval] = {"b": (0, 1), "u": (0, math.inf)}
"""What the kind of a type says: booleans are 0 or 1, and unsigned integers not negative."""

WRAPPING = names("abs add cast cumsum exp2 floor_div matmul mul pow real_div reduce_prod reduce_sum square sub")
"""Ops whose results, in integers, start again or stop at the ends of their type."""

UNCHANGED = UNROUNDED | MOVING | PADDING | names("max_pool resize_nearest_neighbor upsample_nearest_neighbor")
"""Ops whose results are numbers of their dtype before they are rounded; a cast to a narrower float is not."""
ROUNDED_ONCE = names("add sub mul real_div sqrt square")
"""Ops that IEEE arithmetic rounds correctly."""


class Intervals:
    """One question, and how far it may still look; or many questions that share what is learned."""

    def __init__(
        self, products: int = 0, assume: Mapping[str, Interval] | None = None, *, stored: bool = False
    ) -> None:
        self.products, self.assume, self.stored = products, assume or {}, stored
        self.steps = STEPS if assume is None else DEEP
        self.shared: dict[Var, Interval] | None = None if assume is None else {}

    def of(self, var: Var) -> Interval:
        """The answer to another question."""
        self.steps = DEEP
        return self.at(var)

    def at(self, var: Any) -> Interval:
        """The interval of a value."""
        if not isinstance(var, Var):
            return ANY
        if self.shared is None:
            return self._found(var)
        if var not in self.shared:
            interval = self._found(var)
            if self.steps <= 0:  # more could be learned
                return interval
            self.shared[var] = interval
        return self.shared[var]

    def _found(self, var: Var) -> Interval:
        op, kind = var.op, np_dtype(var).kind
        of_type = OF_TYPES.get(kind, ANY)
        if op is None:
            return self.assume.get(var.name, of_type)
        if self.steps <= 0 or kind == "b":
            return of_type
        if op.op_type == "const":
            return of_constant(var)
        self.steps -= 1
        low, high = self.result(op, var)
        if kind in "iu":  # what is computed in floats is cut off towards zero
            low, high = (math.trunc(v) if math.isfinite(v) else v for v in (low, high))
        if kind in "iu" and op.op_type in WRAPPING and not _holds(var, low, high):
            return of_type
        return max(low, of_type[0]), min(high, of_type[1])

    def result(self, op: Operation, var: Var) -> Interval:
        """In numbers without end, of operands as they are."""
        row = SPECS.get(op.op_type)
        if row is None:
            return ANY
        if row.positions is not None and var in op.outputs[row.positions :][:1]:
            return 0.0, _last_place(op)
        if row.range is None or isinstance(row.range, tuple):
            return row.range or ANY
        low, high = self.rounded(op, row.range(op, self), _roundings(op, row))
        return max(low, row.limits[0]), min(high, row.limits[1])

    def rounded(self, op: Operation, ends: Interval, roundings: float) -> Interval:
        """Where numbers lie that an op makes, its result or others on the way, after so many roundings."""
        dtype = np_dtype(op.outputs[0])
        return outwards(ends, dtype, roundings) if self.stored and dtype.kind == "f" else ends


def _last_place(op: Operation) -> float:
    """The largest place that an op may give: the last of its axis; infinite where no length is known."""
    shape = static_shape(op.x)
    if shape is None or op.op_type == "shape":
        return math.inf
    axis = None if op.op_type == "non_zero" else axis_of(op)
    return float(max(shape if axis is None else (shape[axis],), default=1) - 1)


def _roundings(op: Operation, row: OpSpec) -> float:
    """How often the result of an op is rounded, the sums on the way to it included."""
    if op.op_type in UNCHANGED:
        return EXACT
    if op.op_type in ROUNDED_ONCE:
        return CORRECT
    return FUNCTION + (0 if row.terms is None else 2 * row.terms(op))  # a product and a sum for each


def _holds(var: Var, low: float, high: float) -> bool:
    """Does the integer type of a value hold all of an interval?"""
    limits = np.iinfo(np_dtype(var))
    return bool(limits.min <= low and high <= limits.max)


def interval(var: Any, products: int = 0) -> Interval:
    """Where a value lies, whatever the inputs are; `ANY` where nothing can be said.

    Args:
        var: the value.
        products: through how many products with stored weights to look.
    """
    return _interval(var, products, stored=False) if isinstance(var, Var) else ANY


def stored_interval(var: Var) -> Interval:
    """Where a value lies as the program computes it, rounded in the dtype of each value on the way."""
    return _interval(var, 0, stored=True)


@cached
def _interval(var: Var, products: int, *, stored: bool) -> Interval:
    return Intervals(products, stored=stored).at(var)


def magnitude(var: Any, products: int = 0) -> float:
    """The largest magnitude of a value; infinite where nothing can be said."""
    low, high = interval(var, products)
    return max(abs(low), abs(high))


def product(op: Operation) -> float:
    """What a sum of a conv, linear or matmul with stored weights can reach; infinite where it is unbounded."""
    return reach(op, Intervals())


def is_half(var: Var) -> bool:
    """Is a value fp16?"""
    return np_dtype(var) == np.float16


VANISHES = 104.0
"""Exp of less than -104 is 0 in fp32."""
MASKED = -5000.0
"""An offset at or below this masks a score: exp(-5000) is 0 in fp16 and in fp32."""
LEAST_SCALE = 0.1
"""The smallest factor that may stand between mask and softmax: a tenth of a fill still masks."""


def masked_up_to(fill: float) -> float:
    """Up to which magnitude of scores a fill masks, and any other that does, and sums stay on the engine."""
    return min((-max(MASKED, fill) - VANISHES / LEAST_SCALE) / 2, fp16.CEILING + fill)


def score_limits(root: Operation, scores: Var, most: float) -> dict[Var, float]:
    """Scores with their largest magnitude; for fused attention, queries and keys with theirs."""
    if root.op_type == "softmax":
        return {scores: most}
    casts = [producer(v, "cast") for v in (root.query, root.key)]
    read = [v if cast is None else cast.x for v, cast in zip((root.query, root.key), casts, strict=True)]
    return dict.fromkeys((root.query, root.key, *read), math.sqrt(most / math.sqrt(root.query.shape[-1])))


def stored_score(var: Var, enough: float = 0.0) -> float:
    """The largest magnitude of scores as a program computes them: of a matmul, times numbers.

    Args:
        var: the scores.
        enough: a bound up to it is not made better.
    """
    growth = 1.0
    while var.op is not None and (factor := scaled(var.op)) is not None:
        var, growth = factor[0], growth * abs(factor[1]) * ROUNDED_HALVES
    if var.op is None or var.op.op_type != "matmul":
        return math.inf
    growth *= ROUNDED_HALVES
    return growth * _of_heads(var.op, enough / growth if growth else math.inf, stored=True)


def _of_heads(op: Operation, enough: float, *, stored: bool = False) -> float:
    """The largest product of two heads, with singular values only where what is found sooner is too much."""
    most = math.inf
    for roughly in (True, False):
        if most > enough:
            most = math.prod(head_length(v, axis, stored=stored, roughly=roughly) for v, axis in _sides(op))
    return most


def _sides(op: Operation) -> tuple[tuple[Var, int], tuple[Var, int]]:
    """Both operands of a matmul, with the axes over which it sums."""
    return (op.x, -2 if flag(op, "transpose_x") else -1), (op.y, -1 if flag(op, "transpose_y") else -2)


def largest_score(op: Operation, enough: float) -> float:
    """The largest magnitude that a matmul of two values can give; infinite where nothing bounds it.

    Args:
        op: the matmul.
        enough: a bound below it is not made better.
    """
    terms = op.x.shape[-2 if flag(op, "transpose_x") else -1]
    if is_symbolic(terms):
        return math.inf
    most = magnitude(op.x, products=2) * magnitude(op.y, products=2) * int(terms)
    if most < enough:
        return most
    return min(most, _of_heads(op, enough))


def head_length(value: Var, axis: int, *, stored: bool = False, roughly: bool = False) -> float:
    """The largest Euclidean length of a value along an axis that holds the numbers of one head.

    They come of a linear layer behind a norm. A head is no longer than a row of the norm times the largest
    singular value of its weights, and its bias: sums of magnitudes say several times as much, which no row
    reaches in all numbers at once. A layer that gives queries, keys and values is split behind it.

    Args:
        value: a head, or several.
        axis: along which its numbers lie.
        stored: as they are computed in their dtype? Else in real numbers.
        roughly: may singular values be bounded by more, which is found sooner?
    """
    at = axis % value.rank
    while (moved := producer(value, "transpose")) is not None:
        value, at = moved.x, ints(moved, "perm")[at] % value.rank
    if at != value.rank - 1:
        return math.inf
    size = static_shape(value)
    split = producer(value, "reshape")
    if split is not None and not _splits_last(static_shape(split.x), size):
        return math.inf
    whole = value if split is None else split.x
    parts = producer(whole, "split")
    if parts is not None and size is not None and _cuts_between_heads(parts, size[-1]):
        whole = parts.x
    layer = producer(whole, "linear")
    longest = None if layer is None or size is None else _longest(layer, size[-1], roughly)
    if layer is None or longest is None:
        return math.inf
    return (row_length(layer.x, stored=stored) * longest[0] + longest[1]) * (ROUNDED_HALVES if stored else 1)


def _cuts_between_heads(op: Operation, size: int) -> bool:
    """Does a split of the last axis leave heads of so many numbers whole?"""
    return axis_of(op) == op.x.rank - 1 and all(
        shape is not None and shape[-1] % size == 0 for shape in map(static_shape, op.outputs)
    )


def _splits_last(before: tuple[int, ...] | None, after: tuple[int, ...] | None) -> bool:
    """Does a reshape cut the last axis into two, and nothing else?"""
    return before is not None and after is not None and (*before[:-1], before[-1]) == _joined(after)


def _joined(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], math.prod(shape[-2:]))


def _longest(layer: Operation, size: int, roughly: bool) -> tuple[float, float] | None:
    """The largest singular value of weights of so many outputs, and the longest bias; None where not read."""
    weight, bias = constant(layer.weight), layer.inputs.get("bias")
    offset = None if bias is None else constant(bias)
    if weight is None or (bias is not None and offset is None) or np.size(weight) > MOST:
        return None
    found, key = found_of(weight), ("singular value", size, roughly)
    if key not in found:
        found[key] = _singular_value(weight, size, roughly) * ROUNDED
        forget(weight)
    shift = 0.0 if offset is None else np.linalg.norm(np.reshape(offset, (-1, size)), axis=1).max()
    return found[key], float(shift)


def _singular_value(weight: Array, size: int, roughly: bool) -> float:
    """The largest singular value of so many rows; roughly, by the products of a few rows with each other."""
    rows = math.gcd(size, FEW) if roughly else size
    parts = as_tensor(weight).float().reshape(-1, rows, weight.shape[-1])
    products = parts @ parts.mT
    if not roughly:
        squares = torch.linalg.eigvalsh(products)
    else:  # the largest eigenvalue of a sum is at most the sum of those, and each at most the root of squares
        squares = torch.linalg.matrix_norm(products).reshape(-1, size // rows).sum(1)
    return math.sqrt(max(float(squares.max()), 0.0))


FEW = 16
"""Rows of weights of which a rough bound is made at once: of 64, it takes a third of the time."""
ROUNDED = 1 + 1e-4
"""More than rounding does to a singular value in fp32."""
ROUNDED_HALVES = 1.1
"""What rounding in fp16 does to lengths and scores: a sum of 128 terms in a row is off by 6 %."""
