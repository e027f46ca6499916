"""What is stated of every op type: where the axes of one op go, and how much it reads, writes and computes.

The ranges of results, the places of axes and the work of an op: pools and resizing, moves, elementwise ops,
products, reductions and norms. A row leaves out what is not known. Every row is held against the interpreter on
random programs. Dynamic lengths count as 1; an inspection of such a program says so.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.interpret.table import TABLE
from anesurgery.mil import (
    Operation,
    Var,
    any_symbolic,
    constant,
    is_constant,
    is_stored,
    is_symbolic,
    np_dtype,
    op_inputs,
    operands,
    producer,
    static_shape,
)
from anesurgery.ops import ALONG, BROADCASTING, MONOTONE, MOVING, REDUCTIONS, UNARY, names
from anesurgery.semantics.analysis_cache import cached
from anesurgery.semantics.bounds import (
    ANY,
    CORRECT,
    Interval,
    epsilon_of,
    gain,
    longest,
    mean_square,
    norms,
    of_constant,
    row_length,
    spans_rows,
    squared,
)
from anesurgery.semantics.reading import (
    axis_of,
    channels,
    clipped_divisor,
    each_axis,
    elements,
    exponential,
    flag,
    ints,
    number,
    permutation,
    scaled,
    shape_of,
    size_of,
)


def image(op: Operation, numbers: Interval) -> Interval | None:
    """What a unary op makes of two numbers; None where a parameter is dynamic, or a result is not a number."""
    ends = results_at(op, {"x": numbers})
    return None if ends is None or any(map(math.isnan, ends)) else (ends[0], ends[1])


def results_at(op: Operation, numbers: Mapping[str, Sequence[float]]) -> list[float] | None:
    """What an elementwise op makes of some numbers, by its meaning; None where a parameter is dynamic."""
    fixed = {k: constant(v) for k, v in op_inputs(op, *numbers).items()}
    if any(v is None for v in fixed.values()):
        return None
    arguments: dict[str, Any] = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in fixed.items()}
    arguments |= {k: torch.tensor(n, dtype=torch.float64) for k, n in numbers.items()}
    results: list[float] = TABLE[op.op_type].function(**arguments).double().tolist()
    return results


BROADCAST, CONTRACTED, MIXED = "broadcast", "contracted", "mixed"
ALWAYS, OF_WHOLE = "always", "of whole numbers"

Place: TypeAlias = "int | str"
"""Where an axis of an operand goes.

An axis of the result: each slice of the result depends, of this operand, on the same slice alone, in the same
way at every place. `BROADCAST`: it is of length 1 and repeated. `CONTRACTED`: it is reduced or summed over, in
any order. `MIXED`: results depend on its slices in another way, but alike along the axes of the result to which
others go. An axis of the result to which none goes is new, or made of mixed ones.
"""


@dataclass(frozen=True)
class Operand:
    """One operand: the parameter, the value, and where each of its axes goes."""

    name: str
    var: Var
    places: tuple[Place, ...]


Axes: TypeAlias = "tuple[Operand, ...]"


class Ranges(Protocol):
    """What a row asks about its operands."""

    products: int
    """Through how many products with stored weights to look."""
    stored: bool
    """Are these the numbers that are computed in the dtypes of the program? Else real numbers without end."""

    def at(self, var: Any) -> Interval:
        """Where a value lies."""

    def rounded(self, op: Operation, ends: Interval, roundings: float) -> Interval:
        """Where numbers lie that an op makes on the way to its result."""


@dataclass(frozen=True)
class OpSpec:
    """The row of an op type."""

    range: Interval | Callable[[Operation, Ranges], Interval] | None = None
    """Of every result, but for its rounding; None: anything."""
    axes: Callable[[Operation], Axes | None] | None = None
    """The same for all results; None: nothing is known."""
    work: Callable[[Operation], int] | None = None
    """Floating point operations, multiply and add counted as two; None: it sums no products."""
    whole: str | None = None
    """Are its results whole, `ALWAYS` or `OF_WHOLE` operands? Floats then tell the same as integers."""
    positions: int | None = None
    """The result that holds positions or lengths, which are never negative."""
    terms: Callable[[Operation], float] | None = None
    """How many numbers it sums for one result; None: none."""
    limits: Interval = ANY
    """What no result leaves, however it is rounded."""


def same(op: Operation, ranges: Ranges) -> Interval:
    """The results are numbers of `x`, or between those."""
    return ranges.at(op.inputs.get("x"))


def union(values: Sequence[Any], ranges: Ranges) -> Interval:
    """The results are numbers of some values."""
    ends = [ranges.at(v) for v in values]
    return min(low for low, _ in ends), max(high for _, high in ends)


def times(count: float, numbers: Interval) -> Interval:
    """A number times others, ends in order; 0 times infinity is 0."""
    low, high = (0.0 if 0 in (count, v) else v * count for v in numbers)
    return min(low, high), max(low, high)


def unless_summed(op: Operation, numbers: Interval, count: float, ranges: Ranges) -> Interval:
    """The means of numbers; infinite where their sum may leave the dtype before it is divided."""
    if not ranges.stored:
        return numbers
    low, high = ranges.rounded(op, times(count, numbers), 2 * count)
    return numbers[0] if math.isfinite(low) else low, numbers[1] if math.isfinite(high) else high


def axes_given(op: Operation, name: str, rank: int, default: Sequence[int] = ()) -> set[int]:
    """The axes in a parameter, counted from the front; `default` where it is absent."""
    return {a % rank for a in ints(op, name) or default}


def aligned(op: Operation, names: Sequence[str] = ("x", "y", "a", "b", "cond")) -> Axes | None:
    """Operands whose axes are aligned at the end."""
    out, placed = op.outputs[0], []
    for name, var in operands(op):
        if name not in names:
            continue
        shift, places = out.rank - var.rank, list[Place]()
        for a, length in enumerate(var.shape):
            if length != out.shape[a + shift] and length != 1:
                return None
            places.append(a + shift if length == out.shape[a + shift] else BROADCAST)
        placed.append(Operand(name, var, tuple(places)))
    return tuple(placed)


def only(op: Operation, places: Sequence[Place], name: str = "x") -> Axes:
    """One operand alone."""
    return (Operand(name, op.inputs[name], tuple(places)),)


def mixing(op: Operation, mixed: set[int], word: str = MIXED) -> Axes:
    """Axes that stay where they are, but some that are mixed."""
    return only(op, [word if a in mixed else a for a in range(op.x.rank)])


def _planes(op: Operation) -> Axes:
    """Each channel of each image by itself."""
    return mixing(op, set(range(2, op.x.rank)))


def _pictures(op: Operation) -> Axes:
    """The last two axes are a picture."""
    return mixing(op, {op.x.rank - 2, op.x.rank - 1})


def _average(op: Operation, ranges: Ranges) -> Interval:
    """Zeros that pad an edge may count, and those beyond the data."""
    low, high = ranges.at(op.x)
    unpadded = constant(op.inputs.get("pad_type")) == "valid" and not flag(op, "ceil_mode")
    bare = unpadded or flag(op, "exclude_padding_from_average")
    return unless_summed(op, (low, high) if bare else (min(low, 0.0), max(high, 0.0)), _window(op), ranges)


def _window(op: Operation) -> float:
    return float(math.prod(ints(op, "kernel_sizes")))


def _largest(op: Operation, ranges: Ranges) -> Interval:
    """Of a window that lies in the padding, or beyond the data, the largest number is -inf."""
    low, high = ranges.at(op.x)
    kernel, pad = ints(op, "kernel_sizes"), ints(op, "pad")
    beyond = flag(op, "ceil_mode") and any(s > k for s, k in zip(ints(op, "strides"), kernel, strict=False))
    bare = any(p >= k for i, k in enumerate(kernel) for p in pad[2 * i : 2 * i + 2])
    return (-math.inf if beyond or bare else low), high


WINDOWS: dict[str, OpSpec] = {
    "avg_pool": OpSpec(_average, _planes, terms=_window),
    "l2_pool": OpSpec(axes=_planes),
    "max_pool": OpSpec(_largest, _planes),
    **dict.fromkeys(names("resize_nearest_neighbor upsample_nearest_neighbor"), OpSpec(same, _pictures)),
    **dict.fromkeys(names("resize_bilinear upsample_bilinear"), OpSpec(axes=_pictures)),
}


def _transpose(op: Operation) -> Axes | None:
    perm = permutation(op)
    return only(op, [perm.index(a) for a in range(op.x.rank)]) if perm or not op.x.rank else None


def _expand_dims(op: Operation) -> Axes:
    rank = op.outputs[0].rank
    new = axes_given(op, "axes", rank)
    return only(op, [a for a in range(rank) if a not in new])


def squeezed(op: Operation) -> list[int]:
    """The axes that a squeeze takes away: those it names, or all of length 1."""
    if op.inputs.get("axes") is None:
        return [a for a, d in enumerate(op.x.shape) if d == 1]
    return sorted(axes_given(op, "axes", op.x.rank))


def _squeeze(op: Operation) -> Axes:
    gone = squeezed(op)
    return only(op, [MIXED if a in gone else a - sum(b < a for b in gone) for a in range(op.x.rank)])


def reshaped(op: Operation) -> Axes | None:
    """An axis stays the same where as many elements as before stand before it, and it is as long."""
    old, new = static_shape(op.x), static_shape(op.outputs[0])
    if old is None or new is None or not math.prod(new):
        return None
    starts = {(math.prod(new[:a]), length): a for a, length in enumerate(new)}
    return only(op, [starts.get((math.prod(old[:a]), length), MIXED) for a, length in enumerate(old)])


def staying(op: Operation) -> list[int]:
    """The axes of what is sliced that the result has."""
    single = each_axis(op, "squeeze_mask", False) if op.op_type == "slice_by_index" else [False] * op.x.rank
    return [a for a in range(op.x.rank) if not single[a]]


def _slice(op: Operation) -> Axes | None:
    """All of an axis, from its start."""
    places = {a: i for i, a in enumerate(staying(op))}
    whole = [a in places and _takes_all(op, a, op.outputs[0].shape[places[a]]) for a in range(op.x.rank)]
    return only(op, [places[a] if whole[a] else MIXED for a in range(op.x.rank)])


def _takes_all(op: Operation, axis: int, length: object) -> bool:
    """Does a slice take all of an axis, in order?"""
    if op.inputs.get("stride") is not None and each_axis(op, "stride", 0)[axis] != 1:
        return False
    masked = [each_axis(op, name, False)[axis] for name in ("begin_mask", "end_mask")]
    known = static_shape(op.x) is not None or not any_symbolic([op.x.shape[axis]])
    begins = constant(op.inputs.get("begin"))
    start = masked[0] or (begins is not None and int(begins[axis]) in (0, _minus(op.x.shape[axis])))
    return start and (all(masked) or (known and bool(length == op.x.shape[axis])))


def _minus(length: object) -> int:
    return -length if isinstance(length, int) else 0


def _slice_by_size(op: Operation) -> Axes | None:
    shape = op.outputs[0].shape
    return only(op, [a if shape[a] == op.x.shape[a] else MIXED for a in range(op.x.rank)])


def _slice_update(op: Operation) -> Axes | None:
    """What is written is as long as an axis, and goes there in order."""
    plain = not any(each_axis(op, "squeeze_mask", False)) and op.update.rank == op.x.rank
    if not plain or any(constant(op.inputs[name]) is None for name in ("begin", "end")):
        return None
    stride = each_axis(op, "stride", 1)
    places: list[Place] = [
        a if op.update.shape[a] == n and stride[a] == 1 else MIXED for a, n in enumerate(op.x.shape)
    ]
    return Operand("x", op.x, tuple(places)), Operand("update", op.update, tuple(places))


def _unrepeated(op: Operation) -> Axes | None:
    reps = ints(op, "reps")
    return mixing(op, {a for a, n in enumerate(reps) if n != 1}) if reps else None


def _unpadded(op: Operation) -> Axes | None:
    pad = ints(op, "pad")
    if not pad:
        return None
    first = op.x.rank - len(pad) // 2
    return mixing(op, {first + i for i in range(len(pad) // 2) if any(pad[2 * i : 2 * i + 2])})


def _unturned(op: Operation) -> Axes | None:
    default: Sequence[int] = range(op.x.rank) if op.inputs.get("axes") is None else ()
    return mixing(op, axes_given(op, "axes", op.x.rank, default)) if op.x.rank else None


def _concat(op: Operation) -> Axes | None:
    mixed = axes_given(op, "axis", op.values[0].rank)
    places = [MIXED if a in mixed else a for a in range(op.values[0].rank)]
    return tuple(Operand("values", v, tuple(places)) for v in op.values)


def _stack(op: Operation) -> Axes:
    (axis,) = axes_given(op, "axis", op.outputs[0].rank)
    return tuple(
        Operand("values", v, tuple(a if a < axis else a + 1 for a in range(v.rank))) for v in op.values
    )


def _gather(op: Operation) -> Axes | None:
    """Rows of `x` by indices."""
    if ints(op, "batch_dims") not in ([], [0]) or not op.x.rank:
        return None
    axis, more = (ints(op, "axis") or [0])[0] % op.x.rank, op.indices.rank - 1
    kept = [MIXED if a == axis else a if a < axis else a + more for a in range(op.x.rank)]
    picks = Operand("indices", op.indices, tuple(a + axis for a in range(op.indices.rank)))
    return Operand("x", op.x, tuple(kept)), picks


def _gather_along_axis(op: Operation) -> Axes | None:
    axis = (ints(op, "axis") or [0])[0] % op.x.rank
    if any(op.x.shape[a] != op.indices.shape[a] for a in range(op.x.rank) if a != axis):
        return None
    x = Operand("x", op.x, tuple(MIXED if a == axis else a for a in range(op.x.rank)))
    return x, Operand("indices", op.indices, tuple(range(op.indices.rank)))


def _scatter_along_axis(op: Operation) -> Axes | None:
    """Rows are written by themselves, where data, places and updates have the same ones."""
    axis = (ints(op, "axis") or [0])[0] % op.data.rank
    given = [(name, op.inputs[name]) for name in ("data", "indices", "updates")]
    if any(v.shape[a] != op.data.shape[a] for _, v in given for a in range(v.rank) if a != axis):
        return None
    places: tuple[Place, ...] = tuple(MIXED if a == axis else a for a in range(op.data.rank))
    return tuple(Operand(name, var, places) for name, var in given)


def _one_hot(op: Operation) -> Axes:
    (axis,) = axes_given(op, "axis", op.outputs[0].rank, (-1,))
    return only(op, [a if a < axis else a + 1 for a in range(op.indices.rank)], "indices")


def _leading(count: int, mixed: int) -> OpSpec:
    """The first axes of four by themselves, the others mixed."""
    return OpSpec(same, lambda op: mixing(op, {*range(count, count + mixed)}))


def _padded(op: Operation, ranges: Ranges) -> Interval:
    fill = op.inputs.get("constant_val")
    return ANY if fill is None else union([op.x, fill], ranges)


def _zero_padded(op: Operation, ranges: Ranges) -> Interval:
    low, high = ranges.at(op.x)
    return min(low, 0.0), max(high, 0.0)


def _joined(op: Operation, ranges: Ranges) -> Interval:
    return union(list(op.inputs["values"]), ranges)


def _range(op: Operation, ranges: Ranges) -> Interval:
    step = number(op.step)
    return (ranges.at(op.start)[0], ranges.at(op.end)[1]) if step is not None and step > 0 else ANY


def _filled(op: Operation, ranges: Ranges) -> Interval:
    """One number everywhere, 0 by default."""
    return (0.0, 0.0) if op.inputs.get("value") is None else ranges.at(op.value)


AXES: dict[str, Callable[[Operation], Axes | None]] = {
    "transpose": _transpose,
    "expand_dims": _expand_dims,
    "squeeze": _squeeze,
    "reshape": lambda op: None if constant(op.shape) is None else reshaped(op),
    "reverse": _unturned,
    "slice_by_index": _slice,
    "slice_by_size": _slice_by_size,
    "split": lambda op: mixing(op, axes_given(op, "axis", op.x.rank)),
    "tile": _unrepeated,
    "gather": _gather,
    "gather_along_axis": _gather_along_axis,
}

MOVES: dict[str, OpSpec] = {
    **{op_type: OpSpec(same, AXES.get(op_type)) for op_type in sorted(MOVING - {"identity"})},
    **dict.fromkeys(names("depth_to_space space_to_depth pixel_shuffle pixel_unshuffle"), _leading(1, 3)),
    "crop": _leading(2, 2),
    "pad": OpSpec(_padded, _unpadded),
    "space_to_batch": OpSpec(_zero_padded),
    "concat": OpSpec(_joined, _concat),
    "stack": OpSpec(_joined, _stack),
    "slice_update": OpSpec(axes=_slice_update),
    "band_part": OpSpec(axes=lambda op: mixing(op, {op.x.rank - 2, op.x.rank - 1})),
    "scatter_along_axis": OpSpec(axes=_scatter_along_axis),
    "one_hot": OpSpec(lambda op, ranges: union([op.on_value, op.off_value], ranges), _one_hot),
    "range_1d": OpSpec(_range),
    **dict.fromkeys(names("fill fill_like"), OpSpec(_filled)),
    **dict.fromkeys(names("non_zero shape"), OpSpec(positions=0)),
}


DIP = -0.2785
"""Below the least value of x * sigmoid(x), -0.27846; that of gelu is -0.17."""
OVERFLOWS = 700.0
"""Where an exponential of fp64 is no number any more, less what is left for rounding."""
STEP = 2.0**-9
"""How far, relatively, fp16 may round a sum and a quotient of it."""


def _monotone(op: Operation, ranges: Ranges) -> Interval:
    return image(op, ranges.at(op.x)) or ANY


def _abs(op: Operation, ranges: Ranges) -> Interval:
    low, high = ranges.at(op.x)
    return (0.0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))


def _cosh(op: Operation, ranges: Ranges) -> Interval:
    """Least where the magnitude is; a step of fp16 added."""
    low, high = (math.cosh(v) if v < OVERFLOWS else math.inf for v in _abs(op, ranges))
    return low * (1 - STEP), high * (1 + STEP)


def _square(op: Operation, ranges: Ranges) -> Interval:
    return _squares(ranges.at(op.x))


def _squares(ends: Interval) -> Interval:
    low, high = sorted(abs(end) for end in ends)
    return (0.0 if ends[0] <= 0 <= ends[1] else low * low), high * high


def _pow(op: Operation, ranges: Ranges) -> Interval:
    """A square, or one power of numbers above 0; what fp16 rounds of it is left out."""
    if squared(op) is not None:
        return _square(op, ranges)
    if exponential(op) is not None:
        return _power_of_number(op, ranges)
    (low, high), exponent = ranges.at(op.x), number(op.y)
    if exponent is None or low <= 0:
        return ANY
    with np.errstate(over="ignore"):
        ends = [float(np.float64(v) ** exponent) for v in (low, high)]
    return min(ends) * (1 - STEP), max(ends) * (1 + STEP)


def _power_of_number(op: Operation, ranges: Ranges) -> Interval:
    """Between the powers with the least and the largest exponent, as it rises or falls; a step is added."""
    base = np.float64(number(op.x))
    with np.errstate(over="ignore"):
        ends = [float(base**exponent) for exponent in ranges.at(op.y)]
    return (min(ends) * (1 - STEP) if min(ends) >= fp16.NORMAL else 0.0), max(ends) * (1 + STEP)


def _log(op: Operation, ranges: Ranges) -> Interval:
    """Of numbers below 6e-8 nothing is said from below, of what is stored below 6e-5; a step of fp16 is added.

    What is above -epsilon has a logarithm too.
    """
    low, high = (max(v + epsilon_of(op), 0.0) for v in ranges.at(op.x))
    enough = low >= (fp16.NORMAL if ranges.stored else fp16.LEAST)
    least = math.log(min(low, sys.float_info.max)) if enough else -math.inf
    return least - max(abs(least), 1.0) * STEP, (math.log(high) if high > 0 else -math.inf) + STEP


def _bent(op: Operation, ranges: Ranges) -> Interval:
    """Below 0 it rises by another slope, unless that is negative."""
    slope = number(op.inputs.get("alpha"))
    return _monotone(op, ranges) if slope is None or slope >= 0 else ANY


def _bent_by_channel(op: Operation, ranges: Ranges) -> Interval:
    """Below 0 each channel rises by a slope of its own."""
    low, high = ranges.at(op.x)
    if low >= 0:
        return low, high
    below = [end for slope in of_constant(op.alpha) for end in times(slope, (low, min(high, 0.0)))]
    return min(below), max(*below, high)


def _sqrt(op: Operation, ranges: Ranges) -> Interval:
    low, high = ranges.at(op.x)
    return math.sqrt(max(low, 0.0)), math.sqrt(max(high, 0.0))


def _cast(op: Operation, ranges: Ranges) -> Interval:
    """To an integer, the fraction is cut off, and NaN is 0."""
    low, high = ranges.at(op.x)
    if np_dtype(op.outputs[0]).kind in "iu":
        low, high = (math.trunc(v) if math.isfinite(v) else v for v in (low, high))
        if np_dtype(op.x).kind == "f":
            low, high = min(low, 0.0), max(high, 0.0)
        if np_dtype(op.x).kind in "iu" and np_dtype(op.x).itemsize <= np_dtype(op.outputs[0]).itemsize:
            limits = np.iinfo(np_dtype(op.x))
            low, high = max(low, float(limits.min)), min(high, float(limits.max))
    return low, high


def _add(op: Operation, ranges: Ranges) -> Interval:
    (a, b), (c, d) = ranges.at(op.x), ranges.at(op.y)
    low, high = a + c, b + d
    return ANY if math.isnan(low) or math.isnan(high) else (low, high)


def _sub(op: Operation, ranges: Ranges) -> Interval:
    top = producer(op.y)
    while top is not None and top.op_type == "maximum":
        top = producer(top.x)
    if top is not None and top.op_type == "reduce_max" and top.x is op.x and spans_rows(top):
        return -math.inf, 0.0
    (a, b), (c, d) = ranges.at(op.x), ranges.at(op.y)
    low, high = a - d, b - c
    return ANY if math.isnan(low) or math.isnan(high) else (low, high)


def _mul(op: Operation, ranges: Ranges) -> Interval:
    if op.x is op.y:
        return _square(op, ranges)
    for one, other in ((op.x, op.y), (op.y, op.x)):
        factor = mean_square(other)
        most = factor.largest(stored=ranges.stored) if factor is not None and factor.x is one else math.inf
        if math.isfinite(most):
            return (-most, most)
    left, right = ranges.at(op.x), ranges.at(op.y)
    ends = [end for factor in left for end in times(factor, right)]
    low, high = min(ends), max(ends)
    by = _multiple_of_square(op) or math.nan
    return (max(low, 0.0) if by > 0 else low), (min(high, 0.0) if by < 0 else high)


def _multiple_of_square(op: Operation) -> float | None:
    """The c of `(c * x) * x`."""
    for one, other in ((op.x, op.y), (op.y, op.x)):
        maker = producer(other, "mul", "real_div")
        times_number = None if maker is None else scaled(maker)
        if times_number is not None and times_number[0] is one:
            return times_number[1]
    return None


def _divide(op: Operation, ranges: Ranges) -> Interval:
    """By what is never 0, or by no less than the largest magnitude of the same value."""
    if _no_less_than_size(op.y, op.x, ranges):
        return -1.0, 1.0
    if not ranges.stored and (most := _quiet(op.y, op.x, ranges)) is not None:
        return -most, most
    (a, b), (c, d) = ranges.at(op.x), ranges.at(op.y)
    if (bounds := clipped_divisor(op)) is not None and a > 0 and bounds[0] > 0:
        return a / min(max(a, bounds[0]), bounds[1]), _quotient(b, min(max(b, bounds[0]), bounds[1]))
    if number(op.y) or (c > 0 and np_dtype(op.y).kind == "f"):
        ends = [_quotient(top, down) for top in (a, b) for down in (c, d)]
        return min(ends), max(ends)
    return ANY


def _quiet(unit: Var, x: Var, ranges: Ranges) -> float | None:
    """The most of x over a unit `m / clip(m)` by its own largest magnitude m; None for other divisors."""
    division = producer(unit, "real_div")
    bounds = None if division is None else clipped_divisor(division)
    if division is None or bounds is None or not _no_less_than_size(division.x, x, ranges):
        return None
    return bounds[1]


def _quotient(top: float, down: float) -> float:
    """By an infinity what is finite becomes 0; of two infinities nothing is known but the sign."""
    if math.isinf(top) and math.isinf(down):
        return top
    return top / down


def _no_less_than_size(var: Var, x: Var, ranges: Ranges, steps: int = 8) -> bool:
    """Is a value nowhere below the magnitude of x in the same place?"""
    op = producer(var)
    if op is None or not steps:
        return False
    if op.op_type == "abs":
        return op.x is x
    if op.op_type == "reduce_max":
        return spans_rows(op) and _no_less_than_size(op.x, x, ranges, steps - 1)
    if op.op_type == "maximum" and _no_less_than_size(op.y, x, ranges, steps - 1):
        return True
    return _is_no_less(op, ranges) and _no_less_than_size(op.x, x, ranges, steps - 1)


def _is_no_less(op: Operation, ranges: Ranges) -> bool:
    """Is what the op makes nowhere below its `x`?"""
    if op.op_type == "add":
        return ranges.at(op.y)[0] >= 0
    if op.op_type == "clip":
        return ranges.at(op.x)[1] <= (number(op.beta) or 0.0)
    return bool(op.op_type == "maximum")


def _mod(op: Operation, ranges: Ranges) -> Interval:
    """The remainder takes the sign of the divisor, and of integers is smaller."""
    low, high = ranges.at(op.y)
    less = 1 if np_dtype(op.y).kind in "iu" else 0
    return min(low + less, 0.0), max(high - less, 0.0)


def _floor_div(op: Operation, ranges: Ranges) -> Interval:
    """Integers by a positive constant, or numbers that are not negative; a divisor of -0 would make -inf."""
    (a, b), (c, _) = ranges.at(op.x), ranges.at(op.y)
    whole, by = np_dtype(op.y).kind in "iu", number(op.y) or 0
    if whole and by > 0:
        low, high = (math.floor(v / by) if math.isfinite(v) else v for v in (a, b))
        return low, high
    return ANY if a < 0 or c < (0.0 if whole else math.ulp(0.0)) else (0.0, b if c >= 1 else math.inf)


def _maximum(op: Operation, ranges: Ranges) -> Interval:
    (a, b), (c, d) = ranges.at(op.x), ranges.at(op.y)
    return max(a, c), max(b, d)


def _minimum(op: Operation, ranges: Ranges) -> Interval:
    (a, b), (c, d) = ranges.at(op.x), ranges.at(op.y)
    return min(a, c), min(b, d)


def _select(op: Operation, ranges: Ranges) -> Interval:
    """Both sides; where the condition is `a >= 0` itself, `a` counts from 0 on."""
    (a, b), (c, d) = ranges.at(op.a), ranges.at(op.b)
    test = producer(op.cond, "greater_equal")
    if test is not None and test.x is op.a and is_constant(test.y, 0):
        a, b = max(a, 0.0), max(b, 0.0)
    return min(a, c), max(b, d)


def _gate(op: Operation, ranges: Ranges) -> Interval:
    """A value times a share of it: gelu and silu dip below 0 by at most 0.28, and nowhere exceed the value."""
    low, high = ranges.at(op.x)
    return (0.0 if low >= 0 else max(low, DIP)), max(high, 0.0)


def _guarded(op: Operation, ranges: Ranges) -> Interval | None:
    """What an op with an epsilon reads, the epsilon added; None where fp16 may make it 0 or subnormal."""
    low, high = ranges.at(op.x)
    epsilon = epsilon_of(op)
    return None if low < 0 or low + epsilon < fp16.NORMAL else (low + epsilon, high + epsilon)


def _inverse(op: Operation, ranges: Ranges) -> Interval:
    """At most what the least operand gives, a step of fp16 added."""
    ends = _guarded(op, ranges)
    if ends is None:
        return ANY
    low, high = (math.sqrt(v) for v in ends) if op.op_type == "rsqrt" else ends
    return (1 - STEP) / high, (1 + STEP) / low


def _by_channel(op: Operation) -> tuple[Operand, ...]:
    """Activations with a parameter for each channel."""
    stored = [Operand(k, op.inputs[k], (1,)) for k in ("alpha", "beta") if op.inputs.get(k) is not None]
    return Operand("x", op.x, tuple(range(op.x.rank))), *stored


RANGES: dict[str, Interval | Callable[[Operation, Ranges], Interval]] = {
    **dict.fromkeys(MONOTONE, _monotone),
    "sigmoid_hard": (0.0, 1.0),
    **dict.fromkeys(names("sin cos sign"), (-1.0, 1.0)),
    **dict.fromkeys(names("elu leaky_relu"), _bent),
    "log": _log,
    "relu6": (0.0, 6.0),
    "atan": (-1.58, 1.58),
    **dict.fromkeys(names("gelu silu"), _gate),
    **dict.fromkeys(names("inverse rsqrt"), _inverse),
    "abs": _abs,
    "add": _add,
    "cast": _cast,
    "cosh": _cosh,
    "floor_div": _floor_div,
    "identity": lambda op, ranges: ranges.at(op.x),
    "maximum": _maximum,
    "minimum": _minimum,
    "mod": _mod,
    "mul": _mul,
    "pow": _pow,
    "real_div": _divide,
    "select": _select,
    "sqrt": _sqrt,
    "square": _square,
    "sub": _sub,
}

LIMITS = {"sigmoid": (0.0, 1.0), **dict.fromkeys(names("tanh erf softsign"), (-1.0, 1.0))}
"""Where ops saturate."""

WHOLE = {
    **dict.fromkeys(names("ceil floor round sign floor_div"), ALWAYS),
    **dict.fromkeys(names("abs add maximum minimum mod mul relu select sub"), OF_WHOLE),
}

ELEMENTWISE: dict[str, OpSpec] = {
    **{
        t: OpSpec(RANGES.get(t), aligned, whole=WHOLE.get(t), limits=LIMITS.get(t, ANY))
        for t in sorted(UNARY | BROADCASTING)
    },
    "prelu": OpSpec(_bent_by_channel, _by_channel),
    "softplus_parametric": OpSpec(axes=_by_channel),
}


# Rows of ops that sum or reduce: products, convolutions, reductions, sums so far, orders, norms.


GUARD = 1024.0
"""A value that is only known to be within more than this is guarded by a clip, and not described by it: clips
that bound what a network computes (relu6, hard sigmoids, coordinates) end lower."""


def reach(op: Operation, ranges: Ranges) -> float:
    """The largest magnitude of a sum: by the length of what is multiplied, or by its largest element."""
    if channels(op) is None or flag(op, "transpose_x"):
        return math.inf
    x = op.inputs.get("x")
    length = row_length(x, stored=ranges.stored) if op.op_type != "conv" else math.inf
    low, high = ranges.at(x) if math.isinf(length) else (0.0, length)
    most = max(abs(low), abs(high))
    weight = norms(op) if most <= GUARD else None
    if weight is None:
        return math.inf
    bias = op.inputs.get("bias")
    start = 0.0 if bias is None else max(map(abs, of_constant(bias)))
    return most * (weight.length if math.isfinite(length) else weight.sum) + start


def _bounded(op: Operation, ranges: Ranges) -> Interval:
    """By stored weights, through as many products as the question allows."""
    if ranges.products <= 0:
        return -math.inf, math.inf
    ranges.products -= 1
    most = reach(op, ranges)
    return -most, most


def _of_values(op: Operation, ranges: Ranges) -> Interval:
    """A stored weight bounds it; two values do by the largest of both and the number of terms."""
    if is_stored(op.x) or is_stored(op.y):
        return _bounded(op, ranges)
    length = op.x.shape[-2 if flag(op, "transpose_x") else -1]
    if is_symbolic(length):
        return ANY
    ends = [a * b for a in ranges.at(op.x) for b in ranges.at(op.y)]
    return ANY if any(map(math.isnan, ends)) else times(int(length), (min(ends), max(ends)))


def _terms(op: Operation) -> float:
    """How many products are added up for one result, and the bias."""
    if op.op_type == "matmul":
        length = op.x.shape[-2 if flag(op, "transpose_x") else -1]
        return math.inf if is_symbolic(length) else int(length)
    size = channels(op)
    return math.inf if size is None else size[1] * size[2] + 1


def _linear_axes(op: Operation) -> Axes:
    last = op.outputs[0].rank - 1
    bias = op.inputs.get("bias")
    return (
        Operand("x", op.x, (*range(op.x.rank - 1), CONTRACTED)),
        Operand("weight", op.weight, (last, CONTRACTED)),
        *([] if bias is None else [Operand("bias", bias, (last,))]),
    )


def _batched(var: Var, out: Var, last: tuple[Place, ...]) -> tuple[Place, ...]:
    """Axes aligned at the end, before the last two, of which one of length 1 broadcasts."""
    shift = out.rank - var.rank
    batch = [
        a + shift if n == out.shape[a + shift] else BROADCAST
        for a, n in enumerate(var.shape[: -len(last) or None])
    ]
    return (*batch, *last)


def _matmul_axes(op: Operation) -> Axes | None:
    out, rank = op.outputs[0], op.outputs[0].rank
    if min(op.x.rank, op.y.rank) < 2:
        return None
    rows: tuple[Place, ...] = (rank - 2, CONTRACTED)
    columns: tuple[Place, ...] = (CONTRACTED, rank - 1)
    return (
        Operand("x", op.x, _batched(op.x, out, rows[::-1] if flag(op, "transpose_x") else rows)),
        Operand("y", op.y, _batched(op.y, out, columns[::-1] if flag(op, "transpose_y") else columns)),
    )


def _einsum_axes(op: Operation) -> Axes | None:
    read, result = _letters(op)
    if any(len(set(letters)) < len(letters) for letters in (*read, result)):
        return None
    values = []
    for letters, var in zip(read, op.values, strict=True):
        places: list[Place] = []
        for letter, length in zip(letters, var.shape, strict=True):
            at = result.find(letter)
            same = at < 0 or length == op.outputs[0].shape[at]
            places.append(CONTRACTED if at < 0 else at if same else BROADCAST)
        values.append(Operand("values", var, tuple(places)))
    return tuple(values)


def _letters(op: Operation) -> tuple[list[str], str]:
    """The letters of each operand and of the result."""
    read, result = str(op.equation.val).replace(" ", "").split("->")
    return read.split(","), result


def _attention_axes(op: Operation) -> Axes:
    out, mask, rank = op.outputs[0], op.inputs.get("attn_mask"), op.outputs[0].rank
    return (
        Operand("query", op.query, _batched(op.query, out, (rank - 2, CONTRACTED))),
        Operand("key", op.key, _batched(op.key, out, (CONTRACTED, CONTRACTED))),
        Operand("value", op.value, _batched(op.value, out, (CONTRACTED, rank - 1))),
        *([] if mask is None else [Operand("attn_mask", mask, _mask_places(mask, op))]),
    )


def _mask_places(mask: Var, op: Operation) -> tuple[Place, ...]:
    rank, rows = op.outputs[0].rank, op.query.shape[-2]
    if mask.rank < 2:
        return (CONTRACTED,) * mask.rank
    last: tuple[Place, ...] = (rank - 2 if mask.shape[-2] == rows else BROADCAST, CONTRACTED)
    return _batched(mask, op.outputs[0], last)


def _conv_axes(op: Operation) -> Axes:
    """Each image by itself; a spatial axis too, where the window is 1 wide and moves by 1."""
    x, out, bias = op.x, op.outputs[0], op.inputs.get("bias")
    strides, pads = ints(op, "strides") or [1] * (x.rank - 2), ints(op, "pad")
    groups = (ints(op, "groups") or [1])[0]
    custom = str(constant(op.inputs.get("pad_type"))) == "custom"
    padded = [custom and any(pads[2 * i : 2 * i + 2]) for i in range(x.rank - 2)]
    alone = [
        a if op.weight.shape[a] == 1 and strides[a - 2] == 1 and not padded[a - 2] else MIXED
        for a in range(2, x.rank)
    ]
    deep = groups == x.shape[1] == out.shape[1]
    summed = 1 if deep else MIXED if groups > 1 else CONTRACTED
    inner: Place = MIXED if groups > 1 else CONTRACTED
    return (
        Operand("x", x, (0, summed, *alone)),
        Operand("weight", op.weight, (1 if deep or groups == 1 else MIXED, inner, *(MIXED for _ in alone))),
        *([] if bias is None else [Operand("bias", bias, (1 if deep or groups == 1 else MIXED,))]),
    )


def _images(op: Operation) -> Axes:
    """Each image by itself; how the rest goes together is not stated."""
    rest = [Operand(k, v, (MIXED,) * v.rank) for k, v in operands(op) if k in ("weight", "bias")]
    return Operand("x", op.x, (0, *(MIXED for _ in range(1, op.x.rank)))), *rest


def _conv(op: Operation) -> int:
    """2 * outputs * channels of a group * kernel; the gaps of a dilated kernel are not counted twice."""
    return 2 * elements(op.outputs[0]) * math.prod(shape_of(op.weight)[1:])


def _conv_transpose(op: Operation) -> int:
    """As the compiler counts it: 2 * outputs * channels of a group * kernel, whatever the strides."""
    weight, groups = shape_of(op.weight), int(np.asarray(op.groups.val)) if op.groups else 1
    return 2 * elements(op.outputs[0]) * max(weight[0] // groups, 1) * math.prod(weight[2:])


def _matmul(op: Operation) -> int:
    shape = shape_of(op.x)
    turned = flag(op, "transpose_x") and len(shape) > 1
    return 2 * elements(op.outputs[0]) * shape[-2 if turned else -1]


def _einsum(op: Operation) -> int:
    """2 * outputs * the lengths that are summed over."""
    read, result = _letters(op)
    lengths = {
        letter: size
        for letters, var in zip(read, op.values, strict=True)
        for letter, size in zip(letters, shape_of(var), strict=True)
    }
    return 2 * elements(op.outputs[0]) * math.prod(n for name, n in lengths.items() if name not in result)


def _attention(op: Operation) -> int:
    query, key, value = map(shape_of, (op.query, op.key, op.value))
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _recurrent(op: Operation) -> int:
    """2 * steps * rows * the numbers of every matrix, in both directions."""
    steps, rows = shape_of(op.x)[:2]
    matrices = [v for name, v in op.inputs.items() if name.startswith("weight") and v is not None]
    return 2 * steps * rows * sum(map(elements, matrices))


PRODUCTS: dict[str, OpSpec] = {
    "conv": OpSpec(_bounded, _conv_axes, _conv, terms=_terms),
    "conv_transpose": OpSpec(axes=_images, work=_conv_transpose),
    "einsum": OpSpec(axes=_einsum_axes, work=_einsum),
    "linear": OpSpec(
        _bounded, _linear_axes, lambda op: 2 * elements(op.outputs[0]) * shape_of(op.weight)[-1], terms=_terms
    ),
    "matmul": OpSpec(_of_values, _matmul_axes, _matmul, terms=_terms),
    "scaled_dot_product_attention": OpSpec(axes=_attention_axes, work=_attention),
    **dict.fromkeys(("gru", "lstm", "rnn"), OpSpec(work=_recurrent)),
}


def _softmax(op: Operation, ranges: Ranges) -> Interval:
    """Of scores that lie near each other no share is near 0."""
    (low, high), shape, axis = ranges.at(op.x), static_shape(op.x), number(op.axis)
    if not shape or axis is None or not math.isfinite(high - low):
        return 0.0, 1.0
    least = math.exp(min(low - high, 0.0)) / shape[int(axis)] / 2  # half of it is left to rounding
    return (least if least >= fp16.NORMAL else 0.0), 1.0


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


def _separate_pictures(op: Operation) -> Axes:
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
    return low - fp16.EPSILON * max(abs(low), 1.0), high + fp16.EPSILON * max(abs(high), 1.0)


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


SUMS_AND_ORDERS: dict[str, OpSpec] = {
    **dict.fromkeys(REDUCTIONS, OpSpec(axes=_reduced)),
    **dict.fromkeys(names("reduce_max reduce_min"), OpSpec(same, _reduced, whole=OF_WHOLE)),
    "reduce_mean": OpSpec(_mean, _reduced, terms=summed),
    "reduce_sum": OpSpec(_sum, _reduced, whole=OF_WHOLE, terms=summed),
    **dict.fromkeys(names("reduce_sum_square reduce_l2_norm"), OpSpec(_length, _reduced, terms=summed)),
    "reduce_prod": OpSpec(_product, _reduced, terms=summed),
    "reduce_log_sum_exp": OpSpec(_log_sum_exp, _reduced),
    **dict.fromkeys(
        names("reduce_argmax reduce_argmin"), OpSpec(axes=lambda op: _reduced(op, MIXED), positions=0)
    ),
    "argsort": OpSpec(axes=_along, positions=0),
    "topk": OpSpec(same, _along, positions=1),
    "cumsum": OpSpec(_running, _along, whole=OF_WHOLE, terms=_axis_length),
    "softmax": OpSpec(_softmax, _along, terms=_axis_length, limits=(0.0, 1.0)),
    "layer_norm": OpSpec(_layer_norm, _normalized),
    "batch_norm": OpSpec(axes=_channels),
    "instance_norm": OpSpec(_layer_norm, _channels),
    "l2_norm": OpSpec(_l2_norm, _separate_pictures),
}


SPECS: dict[str, OpSpec] = {**ELEMENTWISE, **MOVES, **PRODUCTS, **SUMS_AND_ORDERS, **WINDOWS}
"""Op type -> its row."""


def places_of(op: Operation) -> Axes | None:
    """Where the axes of an op's operands go; None where that is not known."""
    row = SPECS.get(op.op_type)
    return None if row is None or row.axes is None else row.axes(op)


def slices_read(axes: Axes, axis: int) -> dict[Var, int] | None:
    """What is read for one slice of the result along an axis: operand -> its axis with that slice.

    Returns:
        None where slices depend on one another, or a value is read in two ways.
    """
    ways = {(o.var, o.places.index(axis) if axis in o.places else None) for o in axes}
    read = {var: at for var, at in ways if at is not None}
    return read if read and sum(var in read for var, _ in ways) == len(read) else None


@dataclass(frozen=True)
class Work:
    """The work of one op.

    Attributes:
        read: bytes of the operands that are not stored.
        constant: bytes of the constant operands with more than one element.
        written: bytes of the results that somebody reads.
        flop: floating point operations, multiply and add counted as two; 0 for what only moves data.
    """

    read: int
    constant: int
    written: int
    flop: int

    @property
    def moved(self) -> int:
        """Bytes read and written while the model runs."""
        return self.read + self.written

    def times(self, count: int) -> Work:
        """Of so many runs of the op; its constants are there once."""
        if count == 1:
            return self
        return Work(self.read * count, self.constant, self.written * count, self.flop * count)


@cached
def runtime(op: Operation) -> list[Var]:
    """The operands that are not stored, each once."""
    return list(dict.fromkeys(v for _, v in operands(op) if not is_stored(v)))


def read_results(op: Operation) -> list[Var]:
    """The results that somebody reads; all of them where nobody does."""
    used = [v for v in op.outputs if v.child_ops or v.consuming_blocks]
    return used or list(op.outputs)


def work_of(op: Operation) -> Work:
    """What an op reads, writes and computes."""
    stored = [v for _, v in operands(op) if is_stored(v) and elements(v) > 1]
    row = SPECS.get(op.op_type)
    return Work(
        sum(map(size_of, runtime(op))),
        sum(map(size_of, stored)),
        sum(map(size_of, read_results(op))),
        0 if row is None or row.work is None else row.work(op),
    )
