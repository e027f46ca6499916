"""Bound values before any input is known: the interval of a value follows from the ops that compute it.

There are two kinds. `interval` is in real numbers, as if no dtype ended; findings about overflow ask for it.
`stored_interval` is of the numbers that the program computes, rounded outwards in the dtype of each value; it
is infinite where a value may overflow, and proofs rest on it. `ANY`, (-inf, inf), means that nothing is known.
What each op does to intervals is in `rows`. Weights of more than `MOST_READ` elements are never read.

The second half bounds attention scores by the lengths of heads, which decides whether a mask's fill still
masks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.interpret.arithmetic.constant_memory import as_tensor, release_pages
from anesurgery.mil import Array, Operation, Var, constant, is_symbolic, np_dtype, producer, static_shape
from anesurgery.ops import MOVING, PADDING, UNROUNDED, names
from anesurgery.semantics.analysis_cache import cached
from anesurgery.semantics.bounds import (
    ANY,
    CORRECT,
    EXACT,
    FUNCTION,
    MOST_READ,
    Interval,
    constant_range,
    facts_of_array,
    row_length,
    widened_by_rounding,
)
from anesurgery.semantics.reading import axis_of, flag, ints, scaled
from anesurgery.semantics.rows import SPECS, OpSpec, largest_sum

STEPS = 48
"""The most ops that one question looks at: more are seldom needed, and every question would pay for them."""
DEEP = 100
"""The same for questions that share results, and the most ops that are nested in one question.

Python allows 1,000 nested calls, and an op takes five."""

OF_TYPES: dict[str, Interval] = {"b": (0, 1), "u": (0, math.inf)}
"""Kind of a dtype -> what it says: booleans are 0 or 1, unsigned integers are not negative."""

WRAPPING = names("abs add cast cumsum exp2 floor_div matmul mul pow real_div reduce_prod reduce_sum square sub")
"""Ops whose integer results wrap or saturate at the ends of their type."""

UNCHANGED = UNROUNDED | MOVING | PADDING | names("max_pool resize_nearest_neighbor upsample_nearest_neighbor")
"""Ops that make no rounding error. A cast to a narrower float is none of them."""
ROUNDED_ONCE = names("add sub mul real_div sqrt square")
"""Ops that IEEE arithmetic rounds correctly."""


class Intervals:
    """Answers one question about intervals, or, with `assume`, many questions that share their results.

    Args:
        products: how many products with stored weights to look through; 0: products are unbounded.
        assume: name of an input -> its interval. None: one question only, with nothing shared.
        stored: whether to bound the numbers as computed in each dtype, rather than real numbers.
    """

    def __init__(
        self, products: int = 0, assume: Mapping[str, Interval] | None = None, *, stored: bool = False
    ) -> None:
        self.products, self.assume, self.stored = products, assume or {}, stored
        self.steps = STEPS if assume is None else DEEP
        self.shared: dict[Var, Interval] | None = None if assume is None else {}
        self.nested = 0
        self.stopped_at: Var | None = None
        """The value at which the question ended because `DEEP` ops were nested."""

    def of(self, var: Var) -> Interval:
        """Return the interval of a value as a new question, which may look at `DEEP` ops again.

        A shared answer is kept even if it came to the last of these ops: asked again, it would be the same, and
        the next value of a long chain needs one step from here.
        """
        self.steps = DEEP
        interval = self.at(var)
        if self.shared is not None:
            self.shared[var] = interval
        return interval

    def at(self, var: Any) -> Interval:
        """Return the interval of a value within the current question."""
        if not isinstance(var, Var):
            return ANY
        if self.shared is None:
            return self._compute(var)
        if var not in self.shared:
            interval = self._compute(var)
            if self.steps <= 0:  # more could be learned
                return interval
            self.shared[var] = interval
        return self.shared[var]

    def _compute(self, var: Var) -> Interval:
        """Return the interval of a value from the op that computes it, cut to what its dtype holds."""
        op, kind = var.op, np_dtype(var).kind
        type_range = OF_TYPES.get(kind, ANY)
        if op is None:
            return self.assume.get(var.name, type_range)
        # a constant costs no step: `min(x, 10)` has a bound, however many ops x comes from
        if op.op_type == "const" and kind != "b":
            return constant_range(var)
        if self.steps <= 0 or kind == "b":
            return type_range
        if self.nested == DEEP:
            self.steps, self.stopped_at = 0, var
            return type_range
        self.steps, self.nested = self.steps - 1, self.nested + 1
        low, high = self.result(op, var)
        self.nested -= 1
        if kind in "iu":  # floats are truncated
            low, high = (math.trunc(v) if math.isfinite(v) else v for v in (low, high))
        if kind in "iu" and op.op_type in WRAPPING and not _fits_integer_type(var, low, high):
            return type_range
        return max(low, type_range[0]), min(high, type_range[1])

    def result(self, op: Operation, var: Var) -> Interval:
        """Return the interval of one result of an op, before an integer dtype cuts it."""
        row = SPECS.get(op.op_type)
        if row is None:
            return ANY
        if row.positions is not None and var in op.outputs[row.positions :][:1]:
            return 0.0, _largest_index(op)
        if row.range is None or isinstance(row.range, tuple):
            return row.range or ANY
        low, high = self.rounded(op, row.range(op, self), _roundings(op, row))
        return max(low, row.limits[0]), min(high, row.limits[1])

    def rounded(self, op: Operation, ends: Interval, roundings: float) -> Interval:
        """Return the interval of numbers that an op computes, results or sums, after some roundings."""
        dtype = np_dtype(op.outputs[0])
        return widened_by_rounding(ends, dtype, roundings) if self.stored and dtype.kind == "f" else ends


def _largest_index(op: Operation) -> float:
    """Return the largest index or length that an op may give; infinite for a dynamic shape."""
    shape = static_shape(op.x)
    if shape is None:
        return math.inf
    if op.op_type == "shape":
        return float(max(shape, default=0))
    axis = None if op.op_type == "non_zero" else axis_of(op)
    return float(max(shape if axis is None else (shape[axis],), default=1) - 1)


def _roundings(op: Operation, row: OpSpec) -> float:
    """Return how often the result of an op is rounded, the sums on the way to it included."""
    if op.op_type in UNCHANGED:
        return EXACT
    if op.op_type in ROUNDED_ONCE:
        return CORRECT
    return FUNCTION + (0 if row.terms is None else 2 * row.terms(op))  # one product and one sum per term


def _fits_integer_type(var: Var, low: float, high: float) -> bool:
    """Return whether the integer type of a value can hold all of an interval."""
    limits = np.iinfo(np_dtype(var))
    return bool(limits.min <= low and high <= limits.max)


def interval(var: Any, products: int = 0) -> Interval:
    """Return the interval of a value for all inputs, in real numbers; `ANY` where nothing is known.

    It looks through so many products with stored weights.
    """
    return _interval(var, products, stored=False) if isinstance(var, Var) else ANY


def stored_interval(var: Var) -> Interval:
    """Return the interval of a value as the program computes it, rounded in each dtype on the way."""
    return _interval(var, 0, stored=True)


@cached
def _interval(var: Var, products: int, *, stored: bool) -> Interval:
    return Intervals(products, stored=stored).at(var)


def magnitude(var: Any, products: int = 0) -> float:
    """Return the largest magnitude of a value; infinite where nothing is known."""
    low, high = interval(var, products)
    return max(abs(low), abs(high))


def product(op: Operation) -> float:
    """Return the largest sum of a conv, linear or matmul with stored weights; infinite if it is unbounded."""
    return largest_sum(op, Intervals())


def is_half(var: Var) -> bool:
    """Return whether a value is fp16."""
    return np_dtype(var) == np.float16


VANISHES = 104.0
"""Exp of less than -104 is 0 in fp32."""
MASKED = -5000.0
"""An offset at or below this masks a score: exp(-5000) is 0 in fp16 and in fp32."""
LEAST_SCALE = 0.1
"""The smallest factor that may stand between mask and softmax: a tenth of a fill still masks."""
FEW = 16
"""The rows of weights in one group of a rough bound: groups of 64 take three times as long."""
ROUNDED = 1 + 1e-4
"""A margin for singular values in fp32, larger than their rounding error."""
ROUNDED_HALVES = 1.1
"""A margin for lengths and scores in fp16: a running sum of 128 terms is off by up to 6 %."""


def masked_up_to(fill: float) -> float:
    """Return the largest magnitude of scores that a fill still masks.

    It masks like any other fill that does, and the sum of score and fill stays within the engine's fp16 range.
    """
    return min((-max(MASKED, fill) - VANISHES / LEAST_SCALE) / 2, fp16.CEILING + fill)


def score_limits(root: Operation, scores: Var, most: float) -> dict[Var, float]:
    """Return values -> largest magnitude at which scores stay within `most`: the scores, or queries and keys.

    For fused attention (which has no value with the scores) these are the queries and keys, also before a cast.
    """
    if root.op_type == "softmax":
        return {scores: most}
    casts = [producer(v, "cast") for v in (root.query, root.key)]
    read = [v if cast is None else cast.x for v, cast in zip((root.query, root.key), casts, strict=True)]
    return dict.fromkeys((root.query, root.key, *read), math.sqrt(most / math.sqrt(root.query.shape[-1])))


def stored_score(var: Var, enough: float = 0.0) -> float:
    """Return the largest magnitude of scores as computed: a matmul's results, perhaps times numbers.

    A bound up to `enough` is not made tighter.
    """
    growth = 1.0
    while var.op is not None and (factor := scaled(var.op)) is not None:
        var, growth = factor[0], growth * abs(factor[1]) * ROUNDED_HALVES
    if var.op is None or var.op.op_type != "matmul":
        return math.inf
    growth *= ROUNDED_HALVES
    return growth * _product_of_head_lengths(var.op, enough / growth if growth else math.inf, stored=True)


def _product_of_head_lengths(op: Operation, enough: float, *, stored: bool = False) -> float:
    """Return the largest product of two heads, by exact singular values if a rough bound exceeds `enough`."""
    most = math.inf
    for roughly in (True, False):
        if most > enough:
            most = math.prod(
                head_length(v, axis, stored=stored, roughly=roughly)
                for v, axis in _operands_and_summed_axes(op)
            )
    return most


def _operands_and_summed_axes(op: Operation) -> tuple[tuple[Var, int], tuple[Var, int]]:
    """Return both operands of a matmul, each with the axis over which it sums."""
    return (op.x, -2 if flag(op, "transpose_x") else -1), (op.y, -1 if flag(op, "transpose_y") else -2)


def largest_score(op: Operation, enough: float) -> float:
    """Return the largest magnitude that a matmul of two values can give; infinite where nothing bounds it.

    A bound below `enough` is not made tighter.
    """
    terms = op.x.shape[-2 if flag(op, "transpose_x") else -1]
    if is_symbolic(terms):
        return math.inf
    most = magnitude(op.x, products=2) * magnitude(op.y, products=2) * int(terms)
    if most < enough:
        return most
    return min(most, _product_of_head_lengths(op, enough))


def head_length(value: Var, axis: int, *, stored: bool = False, roughly: bool = False) -> float:
    """Return the largest Euclidean length of one attention head; infinite where it is not of the form below.

    The form is a norm, a linear layer and a reshape into heads, perhaps with a split into queries, keys and
    values and with transposes. A head is no longer than a row of the norm times the largest singular value of
    its weights, plus its bias. Sums of magnitudes would bound it several times higher, which no row reaches
    everywhere at once.

    Args:
        value: one or several heads.
        axis: the axis that holds the numbers of one head.
        stored: whether to bound the numbers as computed in their dtype, rather than real numbers.
        roughly: whether to use an upper bound of the singular value that is found faster.
    """
    head_axis = axis % value.rank
    while (moved := producer(value, "transpose")) is not None:
        value, head_axis = moved.x, ints(moved, "perm")[head_axis] % value.rank
    if head_axis != value.rank - 1:
        return math.inf
    size = static_shape(value)
    head_split = producer(value, "reshape")
    if head_split is not None and not _only_splits_last_axis(static_shape(head_split.x), size):
        return math.inf
    rows = value if head_split is None else head_split.x
    qkv_split = producer(rows, "split")
    if qkv_split is not None and size is not None and _keeps_heads_whole(qkv_split, size[-1]):
        rows = qkv_split.x
    layer = producer(rows, "linear")
    if layer is None or size is None or (bounds := _singular_value_and_bias(layer, size[-1], roughly)) is None:
        return math.inf
    singular_value, bias = bounds
    length = row_length(layer.x, stored=stored) * singular_value + bias
    return length * ROUNDED_HALVES if stored else length


def _keeps_heads_whole(op: Operation, size: int) -> bool:
    """Return whether a split of the last axis leaves heads of `size` numbers in one piece."""
    return axis_of(op) == op.x.rank - 1 and all(
        shape is not None and shape[-1] % size == 0 for shape in map(static_shape, op.outputs)
    )


def _only_splits_last_axis(before: tuple[int, ...] | None, after: tuple[int, ...] | None) -> bool:
    """Return whether a reshape splits the last axis into two and changes nothing else."""
    return before is not None and after is not None and before == (*after[:-2], math.prod(after[-2:]))


def _singular_value_and_bias(layer: Operation, size: int, roughly: bool) -> tuple[float, float] | None:
    """Return the largest singular value of a head's weights and its longest bias; None for large weights."""
    weight, bias = constant(layer.weight), layer.inputs.get("bias")
    offset = None if bias is None else constant(bias)
    if weight is None or (bias is not None and offset is None) or np.size(weight) > MOST_READ:
        return None
    facts, key = facts_of_array(weight), ("singular value", size, roughly)
    if key not in facts:
        facts[key] = _largest_singular_value(weight, size, roughly) * ROUNDED
        release_pages(weight)
    shift = 0.0 if offset is None else np.linalg.norm(np.reshape(offset, (-1, size)), axis=1).max()
    return facts[key], float(shift)


def _largest_singular_value(weight: Array, size: int, roughly: bool) -> float:
    """Return the largest singular value over all groups of `size` rows of a weight.

    Roughly: an upper bound from the products of `FEW` rows with each other.
    """
    rows = math.gcd(size, FEW) if roughly else size
    groups = as_tensor(weight).float().reshape(-1, rows, weight.shape[-1])
    products = groups @ groups.mT
    if not roughly:
        squares = torch.linalg.eigvalsh(products)
    else:  # an eigenvalue is at most the Frobenius norm, and that of a sum at most the sum of theirs
        squares = torch.linalg.matrix_norm(products).reshape(-1, size // rows).sum(1)
    return math.sqrt(max(float(squares.max()), 0.0))
