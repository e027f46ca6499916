"""Rows of ops that reduce axes, or work along some: reductions, sums so far, orders, norms."""

from __future__ import annotations

import math

import numpy as np

from anesurgery.mil import Operation, np_dtype, producer, static_shape
from anesurgery.ops import ALONG, REDUCTIONS, names
from anesurgery.semantics.constant_ends import ANY, CORRECT, NORMAL, Interval, gain
from anesurgery.semantics.meaning import (
    CONTRACTED,
    MIXED,
    OF_WHOLE,
    Axes,
    Meaning,
    Operand,
    Place,
    Ranges,
    axes_given,
    mixing,
    only,
    same,
    times,
    unless_summed,
)
from anesurgery.semantics.reading import axis_of, flag, ints, number
from anesurgery.semantics.row_lengths import epsilon_of, longest


def _softmax(op: Operation, ranges: Ranges) -> Interval:
    """Of scores that lie near each other no share is near 0."""
    (low, high), shape, axis = ranges.at(op.x), static_shape(op.x), number(op.axis)
    if not shape or axis is None or not math.isfinite(high - low):
        return 0.0, 1.0
    least = math.exp(min(low - high, 0.0)) / shape[int(axis)] / 2  # half of it is left to rounding
    return (least if least >= NORMAL else 0.0), 1.0


def _reduced(op: Operation, word: str = CONTRACTED) -> Axes | None:
    """Axes that become one number each; of the others, the order stays."""
    name = "axes" if op.op_type in REDUCTIONS else "axis"
    if op.inputs.get(name) is not None and not ints(op, name):
        return None
    default = range(op.x.rank) if name == "axes" else (-1,)
    gone = axes_given(op, name, op.x.rank, default) if op.x.rank else set()
    places: list[Place] = []
    for axis in range(op.x.rank):
        before = 0 if flag(op, "keep_dims") else sum(a < axis for a in gone)
        places.append(word if axis in gone else axis - before)
    return only(op, places)


def _along(op: Operation) -> Axes | None:
    """Each place of the axes that are not named works by itself; by default the last is."""
    name = ALONG[op.op_type]
    if op.inputs.get(name) is not None and not ints(op, name):
        return None
    default = range(op.x.rank) if name == "axes" else (0 if op.op_type == "cumsum" else -1,)
    return mixing(op, axes_given(op, name, op.x.rank, default)) if op.x.rank else None


def _normalized(op: Operation) -> Axes | None:
    """A norm with a factor and an offset for each element of the axes that it takes together."""
    x = _along(op)
    stored = [op.inputs.get(k) for k in ("gamma", "beta")]
    return x and (*x, *(Operand("gamma", v, (MIXED,) * v.rank) for v in stored if v is not None))


def _channels(op: Operation) -> Axes:
    """Parameters for each channel; an instance norm takes each plane together."""
    rank, mixed = op.x.rank, op.op_type == "instance_norm"
    x = Operand("x", op.x, (0, 1, *(MIXED if mixed else a for a in range(2, rank))))
    stored = [(k, op.inputs.get(k)) for k in ("mean", "variance", "gamma", "beta")]
    return x, *(Operand(k, v, (1,)) for k, v in stored if v is not None)


def _pictures(op: Operation) -> Axes:
    """The last three axes are taken together."""
    return mixing(op, {*range(op.x.rank - 3, op.x.rank)})


def summed(op: Operation) -> float:
    """How many elements a reduction takes together; infinite where the shape is symbolic."""
    shape, axes = static_shape(op.x), ints(op, "axes")
    if shape is None:
        return math.inf
    return float(math.prod(shape[a] for a in axes) if axes else math.prod(shape))


def _sum(op: Operation, ranges: Ranges) -> Interval:
    low, high = times(summed(op), ranges.at(op.x))
    return (max(low, 0.5), high) if _holds_a_one(op) else (low, high)  # half of it is left to rounding


def _length(op: Operation, ranges: Ranges) -> Interval:
    """Of the sum of squares the root, unless the sum itself is asked for; squares of integers start again."""
    if np_dtype(op.x).kind != "f":
        return ANY
    low, high = ranges.at(op.x)
    least = 0.0 if low <= 0 <= high else min(abs(low), abs(high))
    squares = ranges.rounded(op, (least**2, max(low * low, high * high)), CORRECT)
    ends = times(summed(op), squares)
    if op.op_type == "reduce_sum_square":
        return ends
    low, high = ranges.rounded(op, ends, 2 * summed(op))
    return math.sqrt(low), math.sqrt(high)


def _log_sum_exp(op: Operation, ranges: Ranges) -> Interval:
    """As much above the numbers as the logarithm of their count; a step of fp16 is added on either side."""
    count = summed(op)
    if math.isinf(count):
        return ANY
    low, high = (end + math.log(count) for end in ranges.at(op.x))
    return low - ROUNDED * max(abs(low), 1.0), high + ROUNDED * max(abs(high), 1.0)


ROUNDED = 2.0**-10
"""A step of fp16 at 1."""


def _holds_a_one(op: Operation) -> bool:
    """Is one of the numbers exp(0), since they are exponentials of what is left without the largest?"""
    exponential = producer(op.x, "exp")
    left = None if exponential is None else producer(exponential.x, "sub")
    largest = None if left is None else producer(left.y, "reduce_max")
    if left is None or largest is None or largest.x is not left.x or not flag(largest, "keep_dims"):
        return False
    axes = [axes_given(of, "axes", of.x.rank, range(of.x.rank)) for of in (largest, op)]
    return axes[0] <= axes[1]


def _product(op: Operation, ranges: Ranges) -> Interval:
    """Numbers that are not negative have such a product; that of others has no known sign."""
    (low, high), count = ranges.at(op.x), summed(op)
    if low < 0 or math.isinf(count):
        return ANY
    with np.errstate(over="ignore"):
        ends = np.float64(low) ** count, np.float64(high) ** count
    return float(ends[0]), float(ends[1])


def _running(op: Operation, ranges: Ranges) -> Interval:
    """Sums of none up to all elements of an axis."""
    numbers = ranges.at(op.x)
    length = (static_shape(op.x) or (math.inf,) * op.x.rank)[int(number(op.inputs.get("axis")) or 0)]
    low, high = times(length, numbers)
    first = numbers[0] if numbers[0] > 0 and not flag(op, "exclusive") else 0.0
    return min(low, numbers[0], first), max(high, numbers[1], 0.0)


def _mean(op: Operation, ranges: Ranges) -> Interval:
    return unless_summed(op, ranges.at(op.x), summed(op), ranges)


def _axis_length(op: Operation) -> float:
    """How long the axis is that an op works along; infinite where that is symbolic."""
    shape = static_shape(op.x)
    return math.inf if not shape else float(shape[axis_of(op)])


def _l2_norm(op: Operation, ranges: Ranges) -> Interval:
    """No number is above the length of all."""
    most = longest(op.x, 1, epsilon_of(op), stored=ranges.stored)
    return -most, most


def _layer_norm(op: Operation, ranges: Ranges) -> Interval:
    """A normalised element is at most sqrt(n - 1), for n elements; rounded means leave sqrt(n)."""
    shape, axes = static_shape(op.x), ints(op, "axes") or [-1]
    if op.op_type == "instance_norm":
        axes = list(range(2, op.x.rank))
    if shape is None:
        return ANY
    count = math.prod(shape[a] for a in axes)
    scale, shift = gain(op)
    together = count if ranges.stored else max(count - 1, 1)
    normal = longest(op.x, together, epsilon_of(op), stored=ranges.stored)
    most = normal * scale + shift if math.isfinite(normal) else math.inf
    return -most, most


ROWS: dict[str, Meaning] = {
    **dict.fromkeys(REDUCTIONS, Meaning(axes=_reduced)),
    **dict.fromkeys(names("reduce_max reduce_min"), Meaning(same, _reduced, whole=OF_WHOLE)),
    "reduce_mean": Meaning(_mean, _reduced, terms=summed),
    "reduce_sum": Meaning(_sum, _reduced, whole=OF_WHOLE, terms=summed),
    **dict.fromkeys(names("reduce_sum_square reduce_l2_norm"), Meaning(_length, _reduced, terms=summed)),
    "reduce_prod": Meaning(_product, _reduced, terms=summed),
    "reduce_log_sum_exp": Meaning(_log_sum_exp, _reduced),
    **dict.fromkeys(
        names("reduce_argmax reduce_argmin"), Meaning(axes=lambda op: _reduced(op, MIXED), positions=0)
    ),
    "argsort": Meaning(axes=_along, positions=0),
    "topk": Meaning(same, _along, positions=1),
    "cumsum": Meaning(_running, _along, whole=OF_WHOLE, terms=_axis_length),
    "softmax": Meaning(_softmax, _along, terms=_axis_length, limits=(0.0, 1.0)),
    "layer_norm": Meaning(_layer_norm, _normalized),
    "batch_norm": Meaning(axes=_channels),
    "instance_norm": Meaning(_layer_norm, _channels),
    "l2_norm": Meaning(_l2_norm, _pictures),
}
