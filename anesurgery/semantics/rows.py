"""The table of op types: for each one, the range of its results, where its axes go, and its work.

`SPECS` has a row (`OpSpec`) for each op type; a row leaves out what is not known. `intervals` reads the ranges,
`places_of` gives the axes to all who follow rows or tokens through ops, and `work_of` counts bytes and flop for
the cost estimate. Tests compare every row with the interpreter on random programs. Dynamic lengths count as 1.

The sections: what rows are made of; pools and resizing (`WINDOW_SPECS`); moves (`MOVE_SPECS`); elementwise ops
(`ELEMENTWISE_SPECS`); products (`PRODUCT_SPECS`); reductions and norms (`REDUCTION_SPECS`); `SPECS` and what is
read from it. Functions that end in `_range`, `_axes`, `_work` and `_terms` fill the fields of these names.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.interpret.table import TABLE
from anesurgery.mil import (
    Operation,
    Var,
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
    broadcasts_back,
    constant_range,
    epsilon_of,
    mean_square,
    norm_gain_and_offset,
    normalised_length,
    row_length,
    squared_operand,
    weight_norms,
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


def results_at(op: Operation, numbers: Mapping[str, Sequence[float]]) -> list[float] | None:
    """Return what an elementwise op makes of some numbers for each parameter, as the interpreter computes it.

    None if another parameter is dynamic.
    """
    fixed = {k: constant(v) for k, v in op_inputs(op, *numbers).items()}
    if any(v is None for v in fixed.values()):
        return None
    arguments: dict[str, Any] = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in fixed.items()}
    given = {k: arguments[k] for k in ("x", "y") if k in arguments} | dict(numbers)
    arguments |= {k: torch.tensor(n, dtype=torch.float64) for k, n in given.items()}
    results: list[float] = TABLE[op.op_type].function(**arguments).double().tolist()
    return results


BROADCAST, CONTRACTED, MIXED = "broadcast", "contracted", "mixed"

Place: TypeAlias = "int | str"
"""Where one axis of an operand goes:

* an int, an axis of the result: slice i of the result depends, of this operand, on slice i alone, and does so
  in the same way for all i.
* `BROADCAST`: it has length 1 and is repeated.
* `CONTRACTED`: it is summed or reduced over, in any order.
* `MIXED`: results depend on its slices in another way, which is the same along each axis of the result to
  which another axis goes.

An axis of the result to which no axis goes is new, or made of mixed ones. The sum of x (2, 3, 4) over axis 1 is
(2, 4): the places of x are (0, `CONTRACTED`, 1).
"""


@dataclass(frozen=True)
class Operand:
    """One operand of an op: its parameter, its value, and where each of its axes goes."""

    name: str
    var: Var
    places: tuple[Place, ...]


PlacedOperands: TypeAlias = "tuple[Operand, ...]"


class Ranges(Protocol):
    """What a row can ask about operands; `intervals.Intervals` implements it."""

    products: int
    """How many products with stored weights to look through; each row of such a product counts it down."""
    stored: bool
    """Bound the numbers as computed in the dtypes of the program? Else real numbers."""

    def at(self, var: Any) -> Interval:
        """Return the interval of a value."""

    def rounded(self, op: Operation, ends: Interval, roundings: float) -> Interval:
        """Return the interval of intermediate numbers of an op, rounded in its dtype."""


ALWAYS, OF_WHOLE = "always", "of whole numbers"


@dataclass(frozen=True)
class OpSpec:
    """The row of one op type."""

    range: Interval | Callable[[Operation, Ranges], Interval] | None = None
    """The interval of all results before rounding, or the function that gives it; None: nothing is known."""
    axes: Callable[[Operation], PlacedOperands | None] | None = None
    """Gives where the axes of the operands go, for all results alike; None: nothing is known."""
    work: Callable[[Operation], int] | None = None
    """Gives floating point operations, multiply and add counted as two; None: no products are summed."""
    whole: str | None = None
    """Are results integers `ALWAYS`, or `OF_WHOLE` operands? Floats can then be followed like integers."""
    positions: int | None = None
    """Index of the result that holds indices or lengths, which are never negative; None: there is none."""
    terms: Callable[[Operation], float] | None = None
    """Gives how many numbers are summed for one result; None: no sums."""
    limits: Interval = ANY
    """The interval that no result leaves, however it is rounded."""


def range_of_x(op: Operation, ranges: Ranges) -> Interval:
    """Return the interval of `x`: results are its numbers, or lie between them."""
    return ranges.at(op.inputs.get("x"))


def _union_of_ranges(values: Sequence[Any], ranges: Ranges) -> Interval:
    """Return the least interval that holds all of some values."""
    ends = [ranges.at(v) for v in values]
    return min(low for low, _ in ends), max(high for _, high in ends)


def _interval_times(count: float, numbers: Interval) -> Interval:
    """Return an interval times a number, ends in order; 0 times infinity is 0."""
    low, high = (0.0 if 0 in (count, v) else v * count for v in numbers)
    return min(low, high), max(low, high)


def _range_of_means(op: Operation, numbers: Interval, count: float, ranges: Ranges) -> Interval:
    """Return the interval of means; infinite where the sum may overflow the dtype before it is divided."""
    if not ranges.stored:
        return numbers
    low, high = ranges.rounded(op, _interval_times(count, numbers), 2 * count)
    return numbers[0] if math.isfinite(low) else low, numbers[1] if math.isfinite(high) else high


def _axes_given(op: Operation, name: str, rank: int, default: Sequence[int] = ()) -> set[int]:
    """Return the axes in a parameter, not negative; `default` where it is absent or empty."""
    return {a % rank for a in ints(op, name) or default}


def _broadcast_axes(
    op: Operation, names: Sequence[str] = ("x", "y", "a", "b", "cond")
) -> PlacedOperands | None:
    """Return operands whose axes are aligned at the end, as broadcasting does; None if lengths do not match."""
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


def _single_operand(op: Operation, places: Sequence[Place], name: str = "x") -> PlacedOperands:
    """Return the places of a single operand."""
    return (Operand(name, op.inputs[name], tuple(places)),)


def _places_except(rank: int, mixed: set[int]) -> list[Place]:
    """Return the places of axes that all stay where they are, except the `mixed` ones."""
    return [MIXED if axis in mixed else axis for axis in range(rank)]


def _in_place_except(op: Operation, mixed: set[int]) -> PlacedOperands:
    """Return x with all axes in place except the `mixed` ones."""
    return _single_operand(op, _places_except(op.x.rank, mixed))


def _mixes_from(first: int, end: int | None = None) -> Callable[[Operation], PlacedOperands]:
    """Return the function that keeps x's axes in place but for a run of them, counted as a slice counts."""
    return lambda op: _in_place_except(op, {*range(op.x.rank)[first:end]})


_mixes_each_plane = _mixes_from(2)
"""Pools work on each channel of each image by itself."""
_mixes_last_two = _mixes_from(-2)
"""Resizing works on each image by itself, whatever its axes before the last two are."""


def _optional_operands(op: Operation, names: Sequence[str], places: Sequence[Place]) -> list[Operand]:
    """Return those of some operands that an op has, with the same places for each."""
    values = [(name, op.inputs.get(name)) for name in names]
    return [Operand(name, var, tuple(places)) for name, var in values if var is not None]


def _with_zero(numbers: Interval) -> Interval:
    """Return the least interval that holds another one and 0."""
    return min(numbers[0], 0.0), max(numbers[1], 0.0)


def _average_pool_range(op: Operation, ranges: Ranges) -> Interval:
    """Return the range of an average pool: zeros of the padding and beyond the data may count."""
    valid = constant(op.inputs.get("pad_type")) == "valid" and not flag(op, "ceil_mode")
    is_unpadded = valid or flag(op, "exclude_padding_from_average")
    numbers = ranges.at(op.x) if is_unpadded else _with_zero(ranges.at(op.x))
    return _range_of_means(op, numbers, _window_size(op), ranges)


def _window_size(op: Operation) -> float:
    """Return the number of elements in a window of a pool."""
    return float(math.prod(ints(op, "kernel_sizes")))


def _max_pool_range(op: Operation, ranges: Ranges) -> Interval:
    """Return the range of a max pool; a window that lies wholly in the padding gives -inf."""
    low, high = ranges.at(op.x)
    kernel, pad = ints(op, "kernel_sizes"), ints(op, "pad")
    may_pass_end = flag(op, "ceil_mode") and any(
        s > k for s, k in zip(ints(op, "strides"), kernel, strict=False)
    )
    may_be_padding = any(p >= k for i, k in enumerate(kernel) for p in pad[2 * i : 2 * i + 2])
    return (-math.inf if may_pass_end or may_be_padding else low), high


WINDOW_SPECS: dict[str, OpSpec] = {
    "avg_pool": OpSpec(_average_pool_range, _mixes_each_plane, terms=_window_size),
    "l2_pool": OpSpec(axes=_mixes_each_plane),
    "max_pool": OpSpec(_max_pool_range, _mixes_each_plane),
    **dict.fromkeys(
        names("resize_nearest_neighbor upsample_nearest_neighbor"), OpSpec(range_of_x, _mixes_last_two)
    ),
    **dict.fromkeys(names("resize_bilinear upsample_bilinear"), OpSpec(axes=_mixes_last_two)),
}


def _transpose_axes(op: Operation) -> PlacedOperands | None:
    perm = permutation(op)
    return _single_operand(op, [perm.index(a) for a in range(op.x.rank)]) if perm or not op.x.rank else None


def _expand_dims_axes(op: Operation) -> PlacedOperands:
    rank = op.outputs[0].rank
    new = _axes_given(op, "axes", rank)
    return _single_operand(op, [a for a in range(rank) if a not in new])


def squeezed_axes(op: Operation) -> list[int]:
    """Return the axes that a squeeze removes: those it names, or all of length 1."""
    if op.inputs.get("axes") is None:
        return [a for a, d in enumerate(op.x.shape) if d == 1]
    return sorted(_axes_given(op, "axes", op.x.rank))


def _squeeze_axes(op: Operation) -> PlacedOperands:
    removed = squeezed_axes(op)
    kept = [a for a in range(op.x.rank) if a not in removed]
    return _single_operand(op, [MIXED if a in removed else kept.index(a) for a in range(op.x.rank)])


def reshape_axes(op: Operation) -> PlacedOperands | None:
    """An axis keeps its place if its length and the product of the lengths before it stay the same."""
    old, new = static_shape(op.x), static_shape(op.outputs[0])
    if old is None or new is None or not math.prod(new):
        return None
    # (2, 3, 4) to (6, 4): only the 4 has the same product before it, 6, and goes to axis 1. Neighbours of
    # length 1 have one key, and all go to the last of them, which has one slice as well.
    starts = {(math.prod(new[:a]), length): a for a, length in enumerate(new)}
    return _single_operand(
        op, [starts.get((math.prod(old[:a]), length), MIXED) for a, length in enumerate(old)]
    )


def axes_not_squeezed(op: Operation) -> list[int]:
    """Return the axes of a slice's operand that the result still has."""
    single = each_axis(op, "squeeze_mask", False) if op.op_type == "slice_by_index" else [False] * op.x.rank
    return [a for a in range(op.x.rank) if not single[a]]


def _slice_axes(op: Operation) -> PlacedOperands | None:
    """An axis keeps its place if all of it is taken, in order."""
    places = {a: i for i, a in enumerate(axes_not_squeezed(op))}
    for axis in list(places):
        if not _takes_all(op, axis, op.outputs[0].shape[places[axis]]):
            del places[axis]
    return _single_operand(op, [places.get(axis, MIXED) for axis in range(op.x.rank)])


def _takes_all(op: Operation, axis: int, length: Any) -> bool:
    """Does a slice whose result has this length, a number or a symbol, take all of an axis, in order?"""
    if op.inputs.get("stride") is not None and each_axis(op, "stride", 0)[axis] != 1:
        return False
    begins_at_start, ends_at_end = (each_axis(op, name, False)[axis] for name in ("begin_mask", "end_mask"))
    size, begins = op.x.shape[axis], ints(op, "begin")
    if is_symbolic(size) or (begins_at_start and ends_at_end):
        return begins_at_start and ends_at_end
    is_at_start = bool(begins) and begins[axis] in (0, -size)
    return (begins_at_start or is_at_start) and bool(length == size)


def _slice_by_size_axes(op: Operation) -> PlacedOperands | None:
    shape = op.outputs[0].shape
    return _single_operand(op, [a if shape[a] == op.x.shape[a] else MIXED for a in range(op.x.rank)])


def _slice_update_axes(op: Operation) -> PlacedOperands | None:
    """An axis keeps its place if the update is as long and written in order; None if an end is dynamic."""
    plain = not any(each_axis(op, "squeeze_mask", False)) and op.update.rank == op.x.rank
    if not plain or any(constant(op.inputs[name]) is None for name in ("begin", "end")):
        return None
    stride = each_axis(op, "stride", 1)
    places = [a if op.update.shape[a] == n and stride[a] == 1 else MIXED for a, n in enumerate(op.x.shape)]
    return tuple(_optional_operands(op, ("x", "update"), places))


def _tile_axes(op: Operation) -> PlacedOperands | None:
    reps = ints(op, "reps")
    return _in_place_except(op, {a for a, n in enumerate(reps) if n != 1}) if reps else None


def _pad_axes(op: Operation) -> PlacedOperands | None:
    pad = ints(op, "pad")
    if not pad:
        return None
    # (begin, end) of each of the last axes: of x (A, B, C), pad [0, 0, 1, 0] pads C only
    pairs = zip(pad[::2], pad[1::2], strict=True)
    return _in_place_except(op, {a for a, pair in enumerate(pairs, op.x.rank - len(pad) // 2) if any(pair)})


def _reverse_axes(op: Operation) -> PlacedOperands | None:
    default: Sequence[int] = range(op.x.rank) if op.inputs.get("axes") is None else ()
    return _in_place_except(op, _axes_given(op, "axes", op.x.rank, default)) if op.x.rank else None


def _concat_axes(op: Operation) -> PlacedOperands | None:
    rank = op.values[0].rank
    places = _places_except(rank, _axes_given(op, "axis", rank))
    return tuple(Operand("values", v, tuple(places)) for v in op.values)


def _stack_axes(op: Operation) -> PlacedOperands:
    (axis,) = _axes_given(op, "axis", op.outputs[0].rank)
    return tuple(
        Operand("values", v, tuple(a if a < axis else a + 1 for a in range(v.rank))) for v in op.values
    )


def _gather_axes(op: Operation) -> PlacedOperands | None:
    """Rows of `x` are looked up by indices; the axes of the indices stand in the place of the axis."""
    if ints(op, "batch_dims") not in ([], [0]) or not op.x.rank:
        return None
    (axis,), rank = _axes_given(op, "axis", op.x.rank, (0,)), op.indices.rank
    # x (A, B, C), axis 1, indices (I, J): the result (A, I, J, C) has x's axes at 0, none and 3
    x_places = [*range(axis), MIXED, *range(axis + rank, op.x.rank + rank - 1)]
    return (*_single_operand(op, x_places), *_single_operand(op, range(axis, axis + rank), "indices"))


def _gather_along_axis_axes(op: Operation) -> PlacedOperands | None:
    (axis,) = _axes_given(op, "axis", op.x.rank, (0,))
    if any(op.x.shape[a] != op.indices.shape[a] for a in range(op.x.rank) if a != axis):
        return None
    return (*_in_place_except(op, {axis}), *_single_operand(op, range(op.indices.rank), "indices"))


def _scatter_along_axis_axes(op: Operation) -> PlacedOperands | None:
    """Other axes keep their places if data, indices and updates have the same lengths there."""
    (axis,) = _axes_given(op, "axis", op.data.rank, (0,))
    values = (op.data, op.indices, op.updates)
    if any(v.shape[a] != op.data.shape[a] for v in values for a in range(v.rank) if a != axis):
        return None
    places = _places_except(op.data.rank, {axis})
    return tuple(_optional_operands(op, ("data", "indices", "updates"), places))


def _one_hot_axes(op: Operation) -> PlacedOperands:
    (axis,) = _axes_given(op, "axis", op.outputs[0].rank, (-1,))
    return _single_operand(op, [a if a < axis else a + 1 for a in range(op.indices.rank)], "indices")


def _pad_range(op: Operation, ranges: Ranges) -> Interval:
    fill = op.inputs.get("constant_val")
    return ANY if fill is None else _union_of_ranges([op.x, fill], ranges)


def _concat_range(op: Operation, ranges: Ranges) -> Interval:
    return _union_of_ranges(list(op.inputs["values"]), ranges)


def _range_1d_range(op: Operation, ranges: Ranges) -> Interval:
    step = number(op.step)
    return (ranges.at(op.start)[0], ranges.at(op.end)[1]) if step is not None and step > 0 else ANY


def _fill_range(op: Operation, ranges: Ranges) -> Interval:
    """Return the range of the one number that fills a tensor, 0 by default."""
    return (0.0, 0.0) if op.inputs.get("value") is None else ranges.at(op.value)


_MOVE_AXES: dict[str, Callable[[Operation], PlacedOperands | None]] = {
    "transpose": _transpose_axes,
    "expand_dims": _expand_dims_axes,
    "squeeze": _squeeze_axes,
    "reshape": lambda op: None if constant(op.shape) is None else reshape_axes(op),
    "reverse": _reverse_axes,
    "slice_by_index": _slice_axes,
    "slice_by_size": _slice_by_size_axes,
    "split": lambda op: _in_place_except(op, _axes_given(op, "axis", op.x.rank)),
    "tile": _tile_axes,
    "gather": _gather_axes,
    "gather_along_axis": _gather_along_axis_axes,
}

MOVE_SPECS: dict[str, OpSpec] = {
    **{op_type: OpSpec(range_of_x, _MOVE_AXES.get(op_type)) for op_type in sorted(MOVING - {"identity"})},
    **dict.fromkeys(
        names("depth_to_space space_to_depth pixel_shuffle pixel_unshuffle"),
        OpSpec(range_of_x, _mixes_from(1, 4)),
    ),
    "crop": OpSpec(range_of_x, _mixes_from(2, 4)),
    "pad": OpSpec(_pad_range, _pad_axes),
    "space_to_batch": OpSpec(lambda op, ranges: _with_zero(ranges.at(op.x))),
    "concat": OpSpec(_concat_range, _concat_axes),
    "stack": OpSpec(_concat_range, _stack_axes),
    "slice_update": OpSpec(axes=_slice_update_axes),
    "band_part": OpSpec(axes=_mixes_last_two),
    "scatter_along_axis": OpSpec(axes=_scatter_along_axis_axes),
    "one_hot": OpSpec(lambda op, ranges: _union_of_ranges([op.on_value, op.off_value], ranges), _one_hot_axes),
    "range_1d": OpSpec(_range_1d_range),
    **dict.fromkeys(names("fill fill_like"), OpSpec(_fill_range)),
    **dict.fromkeys(names("non_zero shape"), OpSpec(positions=0)),
}


DIP = -0.2785
"""A number below the least value of x * sigmoid(x), -0.27846, and of gelu, -0.17."""
OVERFLOWS = 700.0
"""Exponents above this may overflow fp64 (ln of its largest number is 709.8).

The rest is a margin for rounding.
"""
STEP = 2.0**-9
"""The largest relative rounding error in fp16 of a sum and a quotient of it."""


def _monotone_range(op: Operation, ranges: Ranges) -> Interval:
    """Return the results at both ends; `ANY` where one is NaN or unknown."""
    ends = results_at(op, {"x": ranges.at(op.x)})
    return ANY if ends is None or any(map(math.isnan, ends)) else (ends[0], ends[1])


def _magnitudes(ends: Interval) -> Interval:
    """Return the interval of the magnitudes of numbers in an interval."""
    least, most = sorted(map(abs, ends))
    return (0.0 if ends[0] <= 0 <= ends[1] else least), most


def _cosh_range(op: Operation, ranges: Ranges) -> Interval:
    """The result grows with the magnitude; one step of fp16 is added on either side."""
    low, high = (math.cosh(v) if v < OVERFLOWS else math.inf for v in _magnitudes(ranges.at(op.x)))
    return low * (1 - STEP), high * (1 + STEP)


def _square_range(op: Operation, ranges: Ranges) -> Interval:
    least, most = _magnitudes(ranges.at(op.x))
    return least * least, most * most


def _pow_range(op: Operation, ranges: Ranges) -> Interval:
    """Squares, powers of a constant, and constant powers of numbers above 0 have a range, with rounding."""
    if squared_operand(op) is not None:
        return _square_range(op, ranges)
    if exponential(op) is not None:
        return _constant_to_power_range(op, ranges)
    (low, high), exponent = ranges.at(op.x), number(op.y)
    if exponent is None or low <= 0:
        return ANY
    with np.errstate(over="ignore"):
        ends = [float(np.float64(v) ** exponent) for v in (low, high)]
    return min(ends) * (1 - STEP), max(ends) * (1 + STEP)


def _constant_to_power_range(op: Operation, ranges: Ranges) -> Interval:
    """Return the range of a constant to a power, one step of fp16 added on either side."""
    base = np.float64(number(op.x))
    with np.errstate(over="ignore"):
        ends = [float(base**exponent) for exponent in ranges.at(op.y)]
    return (min(ends) * (1 - STEP) if min(ends) >= fp16.NORMAL else 0.0), max(ends) * (1 + STEP)


def _log_range(op: Operation, ranges: Ranges) -> Interval:
    """Return the range of log(x + epsilon), one step of fp16 added on either side.

    It has no lower end where x + epsilon may be subnormal in fp16 (stored numbers) or below its least number.
    """
    low, high = (max(v + epsilon_of(op), 0.0) for v in ranges.at(op.x))
    enough = low >= (fp16.NORMAL if ranges.stored else fp16.LEAST)
    least = math.log(min(low, sys.float_info.max)) if enough else -math.inf
    return least - max(abs(least), 1.0) * STEP, (math.log(high) if high > 0 else -math.inf) + STEP


def _leaky_range(op: Operation, ranges: Ranges) -> Interval:
    """Return the range of leaky_relu and elu, which are monotone unless their slope below 0 is negative."""
    slope = number(op.inputs.get("alpha"))
    return _monotone_range(op, ranges) if slope is None or slope >= 0 else ANY


def _prelu_range(op: Operation, ranges: Ranges) -> Interval:
    """Return the range of prelu, where each channel has its own slope below 0."""
    low, high = ranges.at(op.x)
    if low >= 0:
        return low, high
    negative_ends = [
        end for slope in constant_range(op.alpha) for end in _interval_times(slope, (low, min(high, 0.0)))
    ]
    return min(negative_ends), max(*negative_ends, high)


def _sqrt_range(op: Operation, ranges: Ranges) -> Interval:
    low, high = ranges.at(op.x)
    return math.sqrt(max(low, 0.0)), math.sqrt(max(high, 0.0))


def _cast_range(op: Operation, ranges: Ranges) -> Interval:
    """A cast to an integer truncates, and turns NaN into 0."""
    low, high = ranges.at(op.x)
    if np_dtype(op.outputs[0]).kind in "iu":
        low, high = (math.trunc(v) if math.isfinite(v) else v for v in (low, high))
        if np_dtype(op.x).kind == "f":
            low, high = _with_zero((low, high))
        if np_dtype(op.x).kind in "iu" and np_dtype(op.x).itemsize <= np_dtype(op.outputs[0]).itemsize:
            limits = np.iinfo(np_dtype(op.x))
            low, high = max(low, float(limits.min)), min(high, float(limits.max))
    return low, high


def _sum_of_ends(x: Interval, y: Interval) -> Interval:
    """Return the interval of sums; `ANY` where infinities cancel."""
    low, high = x[0] + y[0], x[1] + y[1]
    return ANY if math.isnan(low) or math.isnan(high) else (low, high)


def _sub_range(op: Operation, ranges: Ranges) -> Interval:
    """A value less its own largest element is never above 0; else ends are subtracted."""
    top = producer(op.y)
    while top is not None and top.op_type == "maximum":
        top = producer(top.x)
    if top is not None and top.op_type == "reduce_max" and top.x is op.x and broadcasts_back(top):
        return -math.inf, 0.0
    low, high = ranges.at(op.y)
    return _sum_of_ends(ranges.at(op.x), (-high, -low))


def _mul_range(op: Operation, ranges: Ranges) -> Interval:
    """Squares, root mean square norms and `(c * x) * x` have tighter ranges than other products."""
    if op.x is op.y:
        return _square_range(op, ranges)
    for one, other in ((op.x, op.y), (op.y, op.x)):
        factor = mean_square(other)
        most = factor.largest(stored=ranges.stored) if factor is not None and factor.x is one else math.inf
        if math.isfinite(most):
            return (-most, most)
    left, right = ranges.at(op.x), ranges.at(op.y)
    ends = [end for factor in left for end in _interval_times(factor, right)]
    low, high = min(ends), max(ends)
    by = _factor_of_square(op) or math.nan
    return (max(low, 0.0) if by > 0 else low), (min(high, 0.0) if by < 0 else high)


def _factor_of_square(op: Operation) -> float | None:
    """Return the c of `(c * x) * x`; None for other products."""
    for one, other in ((op.x, op.y), (op.y, op.x)):
        maker = producer(other, "mul", "real_div")
        times_number = None if maker is None else scaled(maker)
        if times_number is not None and times_number.value is one:
            return times_number.factor
    return None


def _divide_range(op: Operation, ranges: Ranges) -> Interval:
    """A quotient is bounded if the divisor is never 0, or never below the magnitude of the dividend."""
    if _bounds_magnitude_of(op.y, op.x, ranges):
        return -1.0, 1.0
    if not ranges.stored and (most := _quotient_by_clipped_unit(op.y, op.x, ranges)) is not None:
        return -most, most
    dividends, divisors = ranges.at(op.x), ranges.at(op.y)
    if (clip := clipped_divisor(op)) is not None and dividends[0] > 0 and clip.least > 0:
        low, high = (_quotient(m, min(max(m, clip.least), clip.most)) for m in dividends)
        return low, high  # m / clip(m) grows with m
    if number(op.y) or (divisors[0] > 0 and np_dtype(op.y).kind == "f"):
        ends = [_quotient(top, bottom) for top in dividends for bottom in divisors]
        return min(ends), max(ends)
    return ANY


def _quotient_by_clipped_unit(unit: Var, x: Var, ranges: Ranges) -> float | None:
    """Return the largest |x| / unit for a unit `m / clip(m)`, where m bounds |x|; None for other divisors."""
    division = producer(unit, "real_div")
    clip = None if division is None else clipped_divisor(division)
    if clip is None or not _bounds_magnitude_of(clip.value, x, ranges):
        return None
    return clip.most


def _quotient(top: float, bottom: float) -> float:
    """Divide; of two infinities only the sign is known."""
    if math.isinf(top) and math.isinf(bottom):
        return top
    return top / bottom


def _bounds_magnitude_of(var: Var, x: Var, ranges: Ranges, depth: int = 8) -> bool:
    """Is a value everywhere at least the magnitude of x in the same place?

    Looks back through at most `depth` ops: a choice.
    """
    op = producer(var)
    if op is None or not depth:
        return False
    if op.op_type == "abs":
        return op.x is x
    if op.op_type == "reduce_max":
        return broadcasts_back(op) and _bounds_magnitude_of(op.x, x, ranges, depth - 1)
    if op.op_type == "maximum" and _bounds_magnitude_of(op.y, x, ranges, depth - 1):
        return True
    return _is_never_below_x(op, ranges) and _bounds_magnitude_of(op.x, x, ranges, depth - 1)


def _is_never_below_x(op: Operation, ranges: Ranges) -> bool:
    """Is the result of an op nowhere below its `x`?"""
    if op.op_type == "add":
        return ranges.at(op.y)[0] >= 0
    if op.op_type == "clip":
        return ranges.at(op.x)[1] <= (number(op.beta) or 0.0)
    return bool(op.op_type == "maximum")


def _mod_range(op: Operation, ranges: Ranges) -> Interval:
    """The remainder has the sign of the dividend; it is smaller than the divisor, of integers by 1 at least."""
    (low, high), by = ranges.at(op.x), max(map(abs, ranges.at(op.y)))
    most = max(by - 1, 0.0) if np_dtype(op.y).kind in "iu" else by
    return max(min(low, 0.0), -most), min(max(high, 0.0), most)


def _floor_div_range(op: Operation, ranges: Ranges) -> Interval:
    """Return the range of integers by a positive constant, or of nonnegative numbers; else `ANY`."""
    (low, high), (least_divisor, _) = ranges.at(op.x), ranges.at(op.y)
    are_integers, by = np_dtype(op.y).kind in "iu", number(op.y) or 0
    if are_integers and by > 0:
        low, high = (math.floor(v / by) if math.isfinite(v) else v for v in (low, high))
        return low, high
    if low < 0 or least_divisor < 0 or (least_divisor == 0 and not are_integers):
        return ANY  # a float divisor of -0 would give -inf
    return 0.0, high if least_divisor >= 1 else math.inf


def _chosen_range(choose: Callable[..., float], op: Operation, ranges: Ranges) -> Interval:
    """Return the range of the larger or the smaller of two values."""
    x, y = ranges.at(op.x), ranges.at(op.y)
    return choose(x[0], y[0]), choose(x[1], y[1])


def _select_range(op: Operation, ranges: Ranges) -> Interval:
    """Return the union of both sides; where the condition is `a >= 0`, side `a` counts from 0 on."""
    (low, high), other = ranges.at(op.a), ranges.at(op.b)
    test = producer(op.cond, "greater_equal")
    if test is not None and test.x is op.a and is_constant(test.y, 0):
        low, high = max(low, 0.0), max(high, 0.0)
    return min(low, other[0]), max(high, other[1])


def _gelu_silu_range(op: Operation, ranges: Ranges) -> Interval:
    """Return the range of gelu and silu: at least `DIP`, and nowhere above x where x is above 0."""
    low, high = ranges.at(op.x)
    return (0.0 if low >= 0 else max(low, DIP)), max(high, 0.0)


def _range_with_epsilon(op: Operation, ranges: Ranges) -> Interval | None:
    """Return the range of x + epsilon; None where fp16 may make it 0 or subnormal."""
    low, high = ranges.at(op.x)
    epsilon = epsilon_of(op)
    return None if low < 0 or low + epsilon < fp16.NORMAL else (low + epsilon, high + epsilon)


def _inverse_range(op: Operation, ranges: Ranges) -> Interval:
    """Return the range of 1 / (x + epsilon) or its root, one step of fp16 added on either side."""
    ends = _range_with_epsilon(op, ranges)
    if ends is None:
        return ANY
    low, high = (math.sqrt(v) for v in ends) if op.op_type == "rsqrt" else ends
    return (1 - STEP) / high, (1 + STEP) / low


def _channelwise_activation_axes(op: Operation) -> tuple[Operand, ...]:
    """Return the axes of activations with one parameter for each channel."""
    return (*_single_operand(op, range(op.x.rank)), *_optional_operands(op, ("alpha", "beta"), (1,)))


_RANGES: dict[str, Interval | Callable[[Operation, Ranges], Interval]] = {
    **dict.fromkeys(MONOTONE, _monotone_range),
    "sigmoid_hard": (0.0, 1.0),
    **dict.fromkeys(names("sin cos sign"), (-1.0, 1.0)),
    **dict.fromkeys(names("elu leaky_relu"), _leaky_range),
    "log": _log_range,
    "relu6": (0.0, 6.0),
    "atan": (-1.58, 1.58),
    **dict.fromkeys(names("gelu silu"), _gelu_silu_range),
    **dict.fromkeys(names("inverse rsqrt"), _inverse_range),
    "abs": lambda op, ranges: _magnitudes(ranges.at(op.x)),
    "add": lambda op, ranges: _sum_of_ends(ranges.at(op.x), ranges.at(op.y)),
    "cast": _cast_range,
    "cosh": _cosh_range,
    "floor_div": _floor_div_range,
    "identity": range_of_x,
    "maximum": partial(_chosen_range, max),
    "minimum": partial(_chosen_range, min),
    "mod": _mod_range,
    "mul": _mul_range,
    "pow": _pow_range,
    "real_div": _divide_range,
    "select": _select_range,
    "sqrt": _sqrt_range,
    "square": _square_range,
    "sub": _sub_range,
}

LIMITS = {"sigmoid": (0.0, 1.0), **dict.fromkeys(names("tanh erf softsign"), (-1.0, 1.0))}
"""The intervals that saturating ops never leave."""

WHOLE_RESULTS = {
    **dict.fromkeys(names("ceil floor round sign floor_div"), ALWAYS),
    **dict.fromkeys(names("abs add maximum minimum mod mul relu select sub"), OF_WHOLE),
}

ELEMENTWISE_SPECS: dict[str, OpSpec] = {
    **{
        t: OpSpec(_RANGES.get(t), _broadcast_axes, whole=WHOLE_RESULTS.get(t), limits=LIMITS.get(t, ANY))
        for t in sorted(UNARY | BROADCASTING)
    },
    "prelu": OpSpec(_prelu_range, _channelwise_activation_axes),
    "softplus_parametric": OpSpec(axes=_channelwise_activation_axes),
}


GUARD = 1024.0
"""Values known only to be within more than this get no bound from weights. A wide clip guards against overflow
and says nothing about usual numbers; clips that describe them (relu6, hard sigmoids, coordinates) end lower.
"""


def largest_sum(op: Operation, ranges: Ranges) -> float:
    """Return the largest magnitude of a product's sums; infinite where weight or x has no bound.

    It comes from the largest length of x's rows (Cauchy-Schwarz, which is tighter), else from x's largest
    element.
    """
    if channels(op) is None or flag(op, "transpose_x"):
        return math.inf
    x = op.inputs.get("x")
    length = row_length(x, stored=ranges.stored) if op.op_type != "conv" else math.inf
    low, high = ranges.at(x) if math.isinf(length) else (0.0, length)
    most = max(abs(low), abs(high))
    weight = weight_norms(op) if most <= GUARD else None
    if weight is None:
        return math.inf
    bias = op.inputs.get("bias")
    largest_bias = 0.0 if bias is None else max(map(abs, constant_range(bias)))
    return most * (weight.length if math.isfinite(length) else weight.sum) + largest_bias


def _weighted_range(op: Operation, ranges: Ranges) -> Interval:
    """Return the range by stored weights, through as many products as the question allows."""
    if ranges.products <= 0:
        return -math.inf, math.inf
    ranges.products -= 1
    most = largest_sum(op, ranges)
    return -most, most


def _matmul_range(op: Operation, ranges: Ranges) -> Interval:
    """Return the range by a stored weight, or by the largest numbers of two values and the number of terms."""
    if is_stored(op.x) or is_stored(op.y):
        return _weighted_range(op, ranges)
    ends = [x * y for x in ranges.at(op.x) for y in ranges.at(op.y)]
    if math.isinf(_matmul_terms(op)) or any(map(math.isnan, ends)):
        return ANY
    return _interval_times(_matmul_terms(op), (min(ends), max(ends)))


def _matmul_terms(op: Operation) -> float:
    """Return how many products one result of a matmul sums; infinite where the length is dynamic."""
    length = op.x.shape[-2 if flag(op, "transpose_x") else -1]
    return math.inf if is_symbolic(length) else int(length)


def _product_terms(op: Operation) -> float:
    """Return how many products a conv or linear adds up for one result, the bias counted as one more."""
    size = channels(op)
    return math.inf if size is None else size.inputs * size.taps + 1


def _linear_axes(op: Operation) -> PlacedOperands:
    last = op.outputs[0].rank - 1
    return (
        Operand("x", op.x, (*range(op.x.rank - 1), CONTRACTED)),
        Operand("weight", op.weight, (last, CONTRACTED)),
        *_optional_operands(op, ("bias",), (last,)),
    )


def _places_with_batch(var: Var, out: Var, last: tuple[Place, ...]) -> tuple[Place, ...]:
    """Return places of an operand with batch axes aligned at the end, in front of the places `last`."""
    shift = out.rank - var.rank
    batch = [
        a + shift if n == out.shape[a + shift] else BROADCAST
        for a, n in enumerate(var.shape[: -len(last) or None])
    ]
    return (*batch, *last)


def _matmul_axes(op: Operation) -> PlacedOperands | None:
    """Rows of x and columns of y go to the last two axes of the result; the axes between are summed over."""
    out, rank = op.outputs[0], op.outputs[0].rank
    if min(op.x.rank, op.y.rank) < 2:
        return None
    last_of_x: tuple[Place, ...] = (rank - 2, CONTRACTED)
    last_of_y: tuple[Place, ...] = (CONTRACTED, rank - 1)
    if flag(op, "transpose_x"):
        last_of_x = last_of_x[::-1]
    if flag(op, "transpose_y"):
        last_of_y = last_of_y[::-1]
    return (
        Operand("x", op.x, _places_with_batch(op.x, out, last_of_x)),
        Operand("y", op.y, _places_with_batch(op.y, out, last_of_y)),
    )


def _einsum_axes(op: Operation) -> PlacedOperands | None:
    """Each axis goes to the place of its letter in the result; a letter that is not there is summed over."""
    read, result = _einsum_letters(op)
    if any(len(set(letters)) < len(letters) for letters in (*read, result)):
        return None
    values = []
    for letters, var in zip(read, op.values, strict=True):
        places: list[Place] = []
        for letter, length in zip(letters, var.shape, strict=True):
            axis = result.find(letter)
            if axis < 0:
                places.append(CONTRACTED)
            else:
                places.append(axis if length == op.outputs[0].shape[axis] else BROADCAST)
        values.append(Operand("values", var, tuple(places)))
    return tuple(values)


def _einsum_letters(op: Operation) -> tuple[list[str], str]:
    """Return the letters of each operand and of the result in an einsum's equation."""
    read, result = str(op.equation.val).replace(" ", "").split("->")
    return read.split(","), result


def _attention_axes(op: Operation) -> PlacedOperands:
    out, mask, rank = op.outputs[0], op.inputs.get("attn_mask"), op.outputs[0].rank
    mask_places = () if mask is None else _mask_places(mask, op)
    return (
        Operand("query", op.query, _places_with_batch(op.query, out, (rank - 2, CONTRACTED))),
        Operand("key", op.key, _places_with_batch(op.key, out, (CONTRACTED, CONTRACTED))),
        Operand("value", op.value, _places_with_batch(op.value, out, (CONTRACTED, rank - 1))),
        *_optional_operands(op, ("attn_mask",), mask_places),
    )


def _mask_places(mask: Var, op: Operation) -> tuple[Place, ...]:
    """Return the places of an attention mask's axes; a row axis of length 1 broadcasts."""
    rank, rows = op.outputs[0].rank, op.query.shape[-2]
    if mask.rank < 2:
        return (CONTRACTED,) * mask.rank
    last: tuple[Place, ...] = (rank - 2 if mask.shape[-2] == rows else BROADCAST, CONTRACTED)
    return _places_with_batch(mask, op.outputs[0], last)


def _conv_axes(op: Operation) -> PlacedOperands:
    """Images keep their place; so does a spatial axis whose kernel has length 1, stride 1 and no padding."""
    x = op.x
    strides, pads = ints(op, "strides") or [1] * (x.rank - 2), ints(op, "pad")
    custom = str(constant(op.inputs.get("pad_type"))) == "custom"
    padded = [custom and any(pads[2 * i : 2 * i + 2]) for i in range(x.rank - 2)]  # pairs (begin, end)
    spatial = [
        a if op.weight.shape[a] == 1 and strides[a - 2] == 1 and not padded[a - 2] else MIXED
        for a in range(2, x.rank)
    ]
    groups = (ints(op, "groups") or [1])[0]
    depthwise = groups == x.shape[1] == op.outputs[0].shape[1]
    inputs: Place = MIXED if groups > 1 else CONTRACTED
    outputs: Place = 1 if depthwise or groups == 1 else MIXED
    return (
        Operand("x", x, (0, 1 if depthwise else inputs, *spatial)),
        Operand("weight", op.weight, (outputs, inputs, *(MIXED for _ in spatial))),
        *_optional_operands(op, ("bias",), (outputs,)),
    )


def _batch_axis_only(op: Operation) -> PlacedOperands:
    """Only the batch axis keeps its place; about the others nothing is stated."""
    rest = [Operand(k, v, (MIXED,) * v.rank) for k, v in operands(op) if k in ("weight", "bias")]
    return (Operand("x", op.x, (0, *[MIXED] * (op.x.rank - 1))), *rest)


def _conv_work(op: Operation) -> int:
    """Return 2 * outputs * channels of a group * kernel; gaps of a dilated kernel do not count."""
    return 2 * elements(op.outputs[0]) * math.prod(shape_of(op.weight)[1:])


def _conv_transpose_work(op: Operation) -> int:
    """Return 2 * outputs * channels of a group * kernel, whatever the strides, as the compiler counts it."""
    weight, groups = shape_of(op.weight), int(np.asarray(op.groups.val)) if op.groups else 1
    return 2 * elements(op.outputs[0]) * max(weight[0] // groups, 1) * math.prod(weight[2:])


def _matmul_work(op: Operation) -> int:
    shape = shape_of(op.x)
    turned = flag(op, "transpose_x") and len(shape) > 1
    return 2 * elements(op.outputs[0]) * shape[-2 if turned else -1]


def _einsum_work(op: Operation) -> int:
    """Return 2 * outputs * the lengths that are summed over."""
    read, result = _einsum_letters(op)
    lengths = {
        letter: size
        for letters, var in zip(read, op.values, strict=True)
        for letter, size in zip(letters, shape_of(var), strict=True)
    }
    return 2 * elements(op.outputs[0]) * math.prod(n for name, n in lengths.items() if name not in result)


def _attention_work(op: Operation) -> int:
    query, key, value = map(shape_of, (op.query, op.key, op.value))
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _recurrent_work(op: Operation) -> int:
    """Return 2 * steps * rows * the elements of all matrices, in both directions."""
    steps, rows = shape_of(op.x)[:2]
    matrices = [v for name, v in op.inputs.items() if name.startswith("weight") and v is not None]
    return 2 * steps * rows * sum(map(elements, matrices))


PRODUCT_SPECS: dict[str, OpSpec] = {
    "conv": OpSpec(_weighted_range, _conv_axes, _conv_work, terms=_product_terms),
    "conv_transpose": OpSpec(axes=_batch_axis_only, work=_conv_transpose_work),
    "einsum": OpSpec(axes=_einsum_axes, work=_einsum_work),
    "linear": OpSpec(
        _weighted_range,
        _linear_axes,
        lambda op: 2 * elements(op.outputs[0]) * shape_of(op.weight)[-1],
        terms=_product_terms,
    ),
    "matmul": OpSpec(_matmul_range, _matmul_axes, _matmul_work, terms=_matmul_terms),
    "scaled_dot_product_attention": OpSpec(axes=_attention_axes, work=_attention_work),
    **dict.fromkeys(("gru", "lstm", "rnn"), OpSpec(work=_recurrent_work)),
}


def _softmax_range(op: Operation, ranges: Ranges) -> Interval:
    """Return [0, 1], or a lower end above 0 where all scores lie near each other."""
    (low, high), shape, axis = ranges.at(op.x), static_shape(op.x), number(op.axis)
    if not shape or axis is None or not math.isfinite(high - low):
        return 0.0, 1.0
    least = math.exp(min(low - high, 0.0)) / shape[int(axis)] / 2  # rounding may halve it
    return (least if least >= fp16.NORMAL else 0.0), 1.0


def _reduction_axes(op: Operation, reduced: Place = CONTRACTED) -> PlacedOperands | None:
    """Return the places of a reduction: reduced axes get the place `reduced`, the others keep their order."""
    name = "axes" if op.op_type in REDUCTIONS else "axis"
    if op.inputs.get(name) is not None and not ints(op, name):
        return None
    default = range(op.x.rank) if name == "axes" else (-1,)
    removed = _axes_given(op, name, op.x.rank, default) if op.x.rank else set()
    axes = range(op.x.rank)
    kept = list(axes) if flag(op, "keep_dims") else [axis for axis in axes if axis not in removed]
    return _single_operand(op, [reduced if axis in removed else kept.index(axis) for axis in axes])


def _axes_beside_named(op: Operation) -> PlacedOperands | None:
    """Axes that the op does not name keep their places; by default it works along the last (cumsum: first)."""
    name = ALONG[op.op_type]
    if op.inputs.get(name) is not None and not ints(op, name):
        return None
    default = range(op.x.rank) if name == "axes" else (0 if op.op_type == "cumsum" else -1,)
    return _in_place_except(op, _axes_given(op, name, op.x.rank, default)) if op.x.rank else None


def _layer_norm_axes(op: Operation) -> PlacedOperands | None:
    """Return the axes of a layer norm, with a gamma and beta for each element of the normalised axes."""
    x, rank = _axes_beside_named(op), len(ints(op, "axes")) or op.x.rank
    return x and (*x, *_optional_operands(op, ("gamma", "beta"), (MIXED,) * rank))


def _channel_norm_axes(op: Operation) -> PlacedOperands:
    """Return the axes of norms with parameters for each channel; an instance norm mixes each plane."""
    x = _mixes_each_plane(op) if op.op_type == "instance_norm" else _in_place_except(op, set())
    return (*x, *_optional_operands(op, ("mean", "variance", "gamma", "beta"), (1,)))


def reduced_size(op: Operation) -> float:
    """Return how many elements a reduction combines into one; infinite where the shape is symbolic."""
    shape, axes = static_shape(op.x), ints(op, "axes")
    if shape is None:
        return math.inf
    return float(math.prod(shape[a] for a in axes) if axes else math.prod(shape))


def _sum_range(op: Operation, ranges: Ranges) -> Interval:
    low, high = _interval_times(reduced_size(op), ranges.at(op.x))
    return (max(low, 0.5), high) if _has_exp_of_zero(op) else (low, high)  # rounding may halve it


def _sum_of_squares_range(op: Operation, ranges: Ranges) -> Interval:
    """Return the range of reduce_l2_norm and reduce_sum_square; integer squares wrap, and have none."""
    if np_dtype(op.x).kind != "f":
        return ANY
    squares = ranges.rounded(op, _square_range(op, ranges), CORRECT)
    ends = _interval_times(reduced_size(op), squares)
    if op.op_type == "reduce_sum_square":
        return ends
    low, high = ranges.rounded(op, ends, 2 * reduced_size(op))
    return math.sqrt(low), math.sqrt(high)


def _log_sum_exp_range(op: Operation, ranges: Ranges) -> Interval:
    """The result is above the numbers by at most log(count); one step of fp16 is added on either side."""
    count = reduced_size(op)
    if math.isinf(count):
        return ANY
    low, high = (end + math.log(count) for end in ranges.at(op.x))
    return low - fp16.EPSILON * max(abs(low), 1.0), high + fp16.EPSILON * max(abs(high), 1.0)


def _has_exp_of_zero(op: Operation) -> bool:
    """Is one of the summed numbers exp(0), as in exp(x - max(x))?"""
    exponential = producer(op.x, "exp")
    left = None if exponential is None else producer(exponential.x, "sub")
    largest = None if left is None else producer(left.y, "reduce_max")
    if left is None or largest is None or largest.x is not left.x or not flag(largest, "keep_dims"):
        return False
    axes_of_max, axes_of_sum = (
        _axes_given(reduction, "axes", reduction.x.rank, range(reduction.x.rank)) for reduction in (largest, op)
    )
    return axes_of_max <= axes_of_sum


def _product_range(op: Operation, ranges: Ranges) -> Interval:
    """Return the range of a product of nonnegative numbers; others have no known sign."""
    (low, high), count = ranges.at(op.x), reduced_size(op)
    if low < 0 or math.isinf(count):
        return ANY
    with np.errstate(over="ignore"):
        ends = np.float64(low) ** count, np.float64(high) ** count
    return float(ends[0]), float(ends[1])


def _cumsum_range(op: Operation, ranges: Ranges) -> Interval:
    """Return the range of a cumsum: sums of any number of elements, up to the whole axis."""
    numbers = ranges.at(op.x)
    length = (static_shape(op.x) or (math.inf,) * op.x.rank)[int(number(op.inputs.get("axis")) or 0)]
    low, high = _interval_times(length, numbers)
    first = numbers[0] if numbers[0] > 0 and not flag(op, "exclusive") else 0.0
    return min(low, numbers[0], first), max(high, numbers[1], 0.0)


def _axis_length(op: Operation) -> float:
    """Return the length of the axis that an op works along; infinite where the shape is symbolic."""
    shape = static_shape(op.x)
    return math.inf if not shape else float(shape[axis_of(op)])


def _l2_norm_range(op: Operation, ranges: Ranges) -> Interval:
    """No number is larger than the length of all, which is 1."""
    most = normalised_length(op.x, 1, epsilon_of(op), stored=ranges.stored)
    return -most, most


def _norm_range(op: Operation, ranges: Ranges) -> Interval:
    """Return the range of a layer or instance norm.

    Of n numbers with mean 0 and mean square 1 none exceeds sqrt(n - 1); if the mean was rounded, sqrt(n).
    """
    shape, axes = static_shape(op.x), ints(op, "axes") or [-1]
    if op.op_type == "instance_norm":
        axes = list(range(2, op.x.rank))
    if shape is None:
        return ANY
    count = math.prod(shape[a] for a in axes)
    scale, shift = norm_gain_and_offset(op)
    bound_count = count if ranges.stored else max(count - 1, 1)
    normal = normalised_length(op.x, bound_count, epsilon_of(op), stored=ranges.stored)
    most = normal * scale + shift if math.isfinite(normal) else math.inf
    return -most, most


REDUCTION_SPECS: dict[str, OpSpec] = {
    **dict.fromkeys(REDUCTIONS, OpSpec(axes=_reduction_axes)),
    **dict.fromkeys(names("reduce_max reduce_min"), OpSpec(range_of_x, _reduction_axes, whole=OF_WHOLE)),
    "reduce_mean": OpSpec(
        lambda op, ranges: _range_of_means(op, ranges.at(op.x), reduced_size(op), ranges),
        _reduction_axes,
        terms=reduced_size,
    ),
    "reduce_sum": OpSpec(_sum_range, _reduction_axes, whole=OF_WHOLE, terms=reduced_size),
    **dict.fromkeys(
        names("reduce_sum_square reduce_l2_norm"),
        OpSpec(_sum_of_squares_range, _reduction_axes, terms=reduced_size),
    ),
    "reduce_prod": OpSpec(_product_range, _reduction_axes, terms=reduced_size),
    "reduce_log_sum_exp": OpSpec(_log_sum_exp_range, _reduction_axes),
    **dict.fromkeys(
        names("reduce_argmax reduce_argmin"), OpSpec(axes=lambda op: _reduction_axes(op, MIXED), positions=0)
    ),
    "argsort": OpSpec(axes=_axes_beside_named, positions=0),
    "topk": OpSpec(range_of_x, _axes_beside_named, positions=1),
    "cumsum": OpSpec(_cumsum_range, _axes_beside_named, whole=OF_WHOLE, terms=_axis_length),
    "softmax": OpSpec(_softmax_range, _axes_beside_named, terms=_axis_length, limits=(0.0, 1.0)),
    "layer_norm": OpSpec(_norm_range, _layer_norm_axes),
    "batch_norm": OpSpec(axes=_channel_norm_axes),
    "instance_norm": OpSpec(_norm_range, _channel_norm_axes),
    "l2_norm": OpSpec(_l2_norm_range, _mixes_from(-3)),
}


SPECS: dict[str, OpSpec] = {
    **ELEMENTWISE_SPECS,
    **MOVE_SPECS,
    **PRODUCT_SPECS,
    **REDUCTION_SPECS,
    **WINDOW_SPECS,
}
"""Op type -> its row."""


def places_of(op: Operation) -> PlacedOperands | None:
    """Return where the axes of an op's operands go; None where that is not known."""
    row = SPECS.get(op.op_type)
    return None if row is None or row.axes is None else row.axes(op)


def slices_read(axes: PlacedOperands, axis: int) -> dict[Var, int] | None:
    """Return operand -> the axis of it whose slice i is read for slice i of the result along `axis`.

    Returns:
        None where slices depend on one another, or a value is read in two ways.
    """
    own_axes = [(o.var, o.places.index(axis) if axis in o.places else None) for o in axes]
    sliced = {var: own_axis for var, own_axis in own_axes if own_axis is not None}
    is_read_in_one_way = all(sliced[var] == own_axis for var, own_axis in own_axes if var in sliced)
    return sliced if sliced and is_read_in_one_way else None


@dataclass(frozen=True)
class Work:
    """The work of one op: bytes of its operands and results, and floating point operations."""

    read: int
    """Bytes of the operands that are not stored."""
    constant: int
    """Bytes of the constant operands with more than one element."""
    written: int
    """Bytes of the results that have consumers."""
    flop: int
    """Floating point operations, multiply and add counted as two; 0 for ops that only move data."""

    @property
    def moved(self) -> int:
        """Bytes read and written while the model runs."""
        return self.read + self.written

    def times(self, count: int) -> Work:
        """Return the work of `count` runs of the op; its constants are read once."""
        return Work(
            read=self.read * count, constant=self.constant, written=self.written * count, flop=self.flop * count
        )


@cached
def runtime(op: Operation) -> list[Var]:
    """Return the operands that are not stored, each once."""
    return list(dict.fromkeys(v for _, v in operands(op) if not is_stored(v)))


def read_results(op: Operation) -> list[Var]:
    """Return the results that have consumers; all of them where none has."""
    used = [v for v in op.outputs if v.child_ops or v.consuming_blocks]
    return used or list(op.outputs)


def work_of(op: Operation) -> Work:
    """Return what an op reads, writes and computes."""
    stored = [v for _, v in operands(op) if is_stored(v) and elements(v) > 1]
    row = SPECS.get(op.op_type)
    return Work(
        read=sum(map(size_of, runtime(op))),
        constant=sum(map(size_of, stored)),
        written=sum(map(size_of, read_results(op))),
        flop=0 if row is None or row.work is None else row.work(op),
    )
