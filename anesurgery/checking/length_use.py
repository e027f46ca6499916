"""How ops use the length of a dynamic axis (`use_of`): what is shown at a few lengths may hold at every length.

`trial_lengths` says which lengths follow from each use. With x of shape (1, s, 4):

* *alike* (`softmax` over s): no constant meets the length. Each dynamic axis is reduced, or summed over with
  another one; or the op works along all of it (`WHOLE_AXIS_OPS`); or it is an axis of the result, of which each
  slice is made of the same slice of each operand, in the same way at every place (`semantics.rows`). Two sides
  of such ops that agree at several lengths, 1 among them, agree at all. What asks for a shape only to reshape
  by it, with the same elements before and after each dynamic axis, is alike too.
* *local* (`x[:, 3:]`, a window of 3): constants name places on the axis. The places of several ops add up. Once
  the length is beyond the sum of these constants, nothing new happens, but for the remainder by the strides.
* *numbers* (`shape`, `range_1d`, `fill`, the sum of a mask): constants meet these by any arithmetic. What
  compares them (`s + 2 > 9`) changes within 1 of a constant, or of a constant plus those that are added.

No lengths that decide are known in three cases:

* *scaled*: numbers are multiplied or divided before they are compared; a length plus itself is twice as long;
* *joint*: several lengths are compared with each other;
* *other tables*: one length looks up one row of a table that the other side has not.

Each set of ops below has one of two marks. If one that *may lack ops* lacks one, more lengths are tried than
needed. If one that *must be complete* lacks one, too few are tried, and a proof may be wrong.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from anesurgery.checking.lengths import LONGEST_DRAWN, sizes_of
from anesurgery.mil import (
    Array,
    Operation,
    Var,
    any_symbolic,
    array_digest,
    constant,
    is_stored,
    is_symbolic,
    nested_ops,
    np_dtype,
    operands,
    reads,
    types,
)
from anesurgery.ops import (
    BROADCASTING,
    COMPARISONS,
    JOINING,
    LOGICAL,
    LOOKUPS,
    POINTWISE,
    REDUCTIONS,
    VIEWS,
    names,
)
from anesurgery.semantics.intervals import interval
from anesurgery.semantics.reading import ints
from anesurgery.semantics.rows import BROADCAST, CONTRACTED, MIXED, places_of


class Use(IntEnum):
    """How a length is used, from the least to the most."""

    ALIKE = 0  # in one way at every length
    LOCAL = 1  # constants name places along the axis
    NUMBERS = 2  # numbers are made of it, and constants may be added
    SCALED = 3  # such numbers are multiplied or divided


@dataclass(frozen=True)
class LengthUse:
    """How some ops use the lengths of their dynamic axes."""

    kind: Use = Use.ALIKE
    constants: tuple[int, ...] = ()
    """The integers that a length may meet, ascending."""
    places: tuple[tuple[int, ...], ...] = ()
    """The constants of the local ops of each side, as often as they occur: 2 places on one axis may add up."""
    period: int = 1
    """For local ops: two lengths are used alike if they have the same remainder modulo this."""
    sizes: tuple[Any, ...] = ()
    """The symbolic sizes that are used."""
    offsets: tuple[int, ...] = ()
    """Constants added to numbers computed from lengths, each as often as on the side that adds it most."""
    joint: bool = False
    """Whether several lengths are compared with each other."""
    compared: tuple[Any, ...] = ()
    """The sizes whose numbers are compared."""
    other_tables: bool = False
    """Whether one side looks up a row of a table by length that the other side does not have."""

    @property
    def reach(self) -> int:
        """The length beyond which the places of local ops meet nothing new.

        It is an upper bound, as if all strides came first: behind a stride of 2, a kernel of 3 reaches over 6.
        """
        return self.period * max(map(sum, self.places), default=0)

    def renamed(self, symbols: Mapping[Any, Any]) -> LengthUse:
        """Return the use with other symbols in its sizes: old symbol -> new symbol."""
        sizes, compared = ({d.subs(symbols): None for d in old} for old in (self.sizes, self.compared))
        return replace(self, sizes=tuple(sizes), compared=tuple(compared))


def use_of(sides: Sequence[Iterable[Operation]], results: Sequence[Var] = ()) -> LengthUse:
    """Return how the ops of both sides use dynamic lengths.

    Args:
        sides: the ops of each side, in the order in which they run.
        results: the results that others read.
    """
    by_side = [[op for op in ops if op.op_type != "const"] for ops in sides]
    all_ops = [op for ops in by_side for op in ops]
    if not any(_is_dynamic(op) for op in all_ops):
        return LengthUse()
    computed, numbers = _without_shapes(all_ops, _numbers_from_lengths(all_ops), results)
    other_ops = {op: None for op in computed if not _is_alike(op)}  # a dict keeps the order
    if not other_ops:
        return LengthUse()
    uses = {op: _use_of_op(op) for op in other_ops}
    kind = max([*uses.values(), *(Use.SCALED for op in computed if _scales(op, numbers))])
    # numbers made of lengths meet the constants of any op; the places of local ops meet only their own
    constants = {n for op in (other_ops if kind is Use.LOCAL else computed) for n in _constants(op)}
    local = {op for op, use in uses.items() if use is Use.LOCAL}
    # strides of one side multiply; both sides are alike after a common multiple of their periods
    period = math.lcm(*(math.prod(_period(op) for op in ops if op in other_ops) for ops in by_side))
    used = [v for op in other_ops for v in (*reads(op), *op.outputs)]
    compared = [_compared_sizes(op, numbers) for op in computed]
    offsets = [Counter(n for op in ops if _makes_number(op, numbers) for n in _offsets(op)) for ops in by_side]
    return LengthUse(
        kind=kind,
        constants=tuple(sorted(constants)),
        places=tuple(tuple(n for op in ops if op in local for n in _constants(op)) for ops in by_side),
        period=period,
        sizes=tuple({d: None for v in used for d in sizes_of(v) if is_symbolic(d)}),
        # `|` of two counters keeps the larger count of each number
        offsets=tuple(functools.reduce(operator.or_, offsets).elements()),
        joint=any(len(sizes) > 1 for sizes in compared),
        compared=tuple({d: None for sizes in compared for d in sizes}),
        other_tables=_has_other_tables(by_side, numbers),
    )


def _is_dynamic(op: Operation) -> bool:
    """Return whether an op reads or computes a value of symbolic size."""
    inner = (v for nested in nested_ops(op) for v in nested.outputs)
    return any(any_symbolic(sizes_of(v)) for v in (*reads(op), *op.outputs, *inner))


SHAPE_OPS = names("shape fill_like")
"""Ops that make numbers, or constants, of a shape alone. Must be complete."""
SHAPE_CARRIERS = VIEWS | JOINING | names("gather slice_by_index cast identity split")
"""Ops through which lengths go from a shape to a reshape. May lack ops."""
ADDING_OPS = (SHAPE_CARRIERS | COMPARISONS | LOGICAL | SHAPE_OPS) | names(
    "fill range_1d add sub select minimum maximum clip logical_not tile transpose slice_by_size abs "
    "band_part one_hot reverse gather_along_axis gather_nd pad"
)
"""Ops whose constants are at most added to the lengths that are in their results. May lack ops."""
ANGLE_OPS = names("cos sin")
"""Ops of whose results nothing tells a length. May lack ops."""
Times: TypeAlias = Mapping[Any, tuple[float, float]]
"""Size -> how often it is contained in a value, at least and at most."""


class _Number(NamedTuple):
    """How a value is computed from lengths."""

    scaled: bool
    """Whether a length was multiplied, or is contained more than once: s + s is twice as long."""
    times: Times
    """How often each length is contained in it: s once in s + 2."""


Numbers = dict[Var, _Number]
"""The values that are computed from lengths and constants only."""


def _makes_number(op: Operation, numbers: Numbers) -> bool:
    """Return whether an op computes a number of lengths."""
    return any(v in numbers for v in op.outputs)


def _numbers_from_lengths(ops: Sequence[Operation]) -> Numbers:
    """Return what the ops compute from lengths and constants only."""
    numbers: Numbers = {}
    for op in ops:
        read = [v for v in reads(op) if constant(v) is None and not is_stored(v)]
        # the first operand has the shape; a second one, of fill_like, is the value
        of_shape = op.op_type in SHAPE_OPS and any(any_symbolic(sizes_of(v)) for v in read[:1])
        tells_length = of_shape or _sums_bounded(op)
        of_numbers = bool(read) and all(v in numbers for v in read)
        if op.op_type in ANGLE_OPS or not (tells_length or of_numbers):
            continue
        if op.op_type in COMPARISONS | LOGICAL:  # true and false contain no length
            numbers |= dict.fromkeys(op.outputs, _Number(False, {}))
            continue
        times = _times_contained(op, read, numbers, tells_length=tells_length)
        scaled = (
            op.op_type not in ADDING_OPS
            or (op.op_type == "range_1d" and constant(op.step) != 1)
            or any(v in numbers and numbers[v].scaled for v in read)
            or any(max(-low, high) > 1 for low, high in times.values())
        )
        numbers |= dict.fromkeys(op.outputs, _Number(scaled, times))
    return numbers


def _times_contained(op: Operation, read: Sequence[Var], numbers: Numbers, *, tells_length: bool) -> Times:
    """Return how often each size is contained in what an op computes from numbers: (at least, at most).

    The sum of a length s and s - 1 contains s twice: {s: (2, 2)}.
    """
    symbolic = [d for d in np.ravel(np.asarray(op.outputs[0].sym_val, object)) if is_symbolic(d)]
    in_operands = {d for v in read if v in numbers for d in numbers[v].times}
    if not (tells_length or in_operands.issuperset(symbolic)):  # coremltools' name for a value, not a size
        symbolic = []
    if symbolic and op.outputs[0].rank == 0 and symbolic[0].is_Symbol:
        return {symbolic[0]: (1, 1)}  # coremltools says that the value is this length
    if symbolic:  # each element may be one of these sizes
        return dict.fromkeys(symbolic, (0, 1))
    if tells_length:  # or less: a mask may leave out some
        return dict.fromkeys((d for v in read for d in sizes_of(v) if is_symbolic(d)), (0, 1))
    return _times_in_operands(op, {v: numbers[v].times for v in read})


def _times_in_operands(op: Operation, of_operand: Mapping[Var, Times]) -> Times:
    """Return how often each size is contained in a result, from how often it is in the operands."""
    sizes = {d for times in of_operand.values() for d in times}
    if op.op_type in ("add", "sub"):
        x, y = ({d: of_operand.get(v, {}).get(d, (0, 0)) for d in sizes} for v in (op.x, op.y))
        if op.op_type == "sub":  # x - y is x + (-y)
            y = {d: (-most, -least) for d, (least, most) in y.items()}
        return {d: (x[d][0] + y[d][0], x[d][1] + y[d][1]) for d in sizes}
    # each element of any other result comes from one operand, or from none
    ends = {d: [0, *(end for times in of_operand.values() for end in times.get(d, ()))] for d in sizes}
    return {d: (min(of_size), max(of_size)) for d, of_size in ends.items()}


SUM_OPS = names("reduce_sum reduce_l1_norm reduce_l2_norm reduce_sum_square cumsum matmul einsum")
"""Ops whose result tells how many bounded values they sum: the sum of a mask counts. Must be complete."""


def _sums_bounded(op: Operation) -> bool:
    """Return whether an op sums bounded values along a dynamic axis, so that the sum tells the length."""
    if op.op_type not in SUM_OPS or _has_list_or_any_rank(op):
        return False
    placed = places_of(op) or ()
    axes = [axis for o in placed for axis in zip(o.var.shape, o.places, strict=True)]
    is_summed = any(is_symbolic(size) and place in (CONTRACTED, MIXED) for size, place in axes)
    return is_summed and all(math.isfinite(end) for o in placed for end in interval(o.var))


def _offsets(op: Operation) -> list[int]:
    """Return what an op adds to a number."""
    if op.op_type not in ("add", "sub", "range_1d"):  # must be complete
        return []
    values = (constant(v) for name, v in operands(op) if name != "step")
    whole = (n for value in values if value is not None for n in _whole_numbers(op, np.asarray(value)))
    return [abs(n) for n in whole if n]


SMOOTH_OPS = ANGLE_OPS | names(
    "add sub mul real_div exp identity select concat stack transpose expand_dims squeeze matmul linear cast"
)
"""Ops that do the same whatever number they read. May lack ops."""
APART_OPS = (SMOOTH_OPS | SHAPE_CARRIERS | SHAPE_OPS | LOGICAL) | names(
    "fill tile slice_by_size logical_not reverse reduce_sum reduce_mean reduce_prod"
)
"""Ops whose result neither jumps nor bends where a number that they read meets another one. May lack ops."""


def _compared_sizes(op: Operation, numbers: Numbers) -> set[Any]:
    """Return the sizes whose numbers an op compares."""
    to_boolean = op.op_type == "cast" and np_dtype(op.outputs[0]).kind == "b"  # compares with 0
    is_apart = op.op_type in APART_OPS and not to_boolean
    # a range compares its two ends only
    is_apart |= op.op_type == "range_1d" and not (op.start in numbers and op.end in numbers)
    read = [] if is_apart else [numbers[v] for v in reads(op) if v in numbers]
    return {d for number in read for d, ends in number.times.items() if ends != (0, 0)}


def _scales(op: Operation, numbers: Numbers) -> bool:
    """Return whether an op compares or rounds what was multiplied or divided, or divides to integers at all."""
    read = [v for v in reads(op) if v in numbers]
    if read and op.op_type in ("floor_div", "mod"):
        return True
    to_integers = op.op_type == "cast" and np_dtype(op.outputs[0]).kind != "f"
    return any(numbers[v].scaled for v in read) and (to_integers or op.op_type not in SMOOTH_OPS)


def _without_shapes(
    ops: Sequence[Operation], numbers: Numbers, results: Sequence[Var]
) -> tuple[Sequence[Operation], Numbers]:
    """Return the ops and numbers, but without those that make numbers if all of these are only reshaped by."""
    makers = [op for op in ops if _makes_number(op, numbers)]
    others = [op for op in ops if not _makes_number(op, numbers)]
    are_carried = all(op.op_type in SHAPE_CARRIERS | {"shape"} for op in makers)
    readers = [op for op in others if any(v in numbers for v in reads(op))]
    are_reshapes = all(op.op_type == "reshape" and op.x not in numbers for op in readers)
    only_shapes = are_carried and are_reshapes and not any(v in numbers for v in results)
    return (others, {}) if only_shapes else (ops, numbers)


PER_AXIS_OPS = names("slice_by_index slice_by_size pad")
"""Ops with a parameter that has a number, or two, for each axis. Must be complete."""
SMALL_CONSTANT = 64
"""Constants of up to this many elements may hold a limit: parameters do, weights and tables do not."""


def _has_other_tables(sides: Sequence[Sequence[Operation]], numbers: Numbers) -> bool:
    """Return whether only one side has tables, or other large constants, that a single number looks up."""
    of_first, *of_others = ({d for op in ops if _looks_up(op, numbers) for d in _tables(op)} for ops in sides)
    return any(of_side != of_first for of_side in of_others)


def _looks_up(op: Operation, numbers: Numbers) -> bool:
    """Return whether a number says at which place an op reads."""
    counts = ("shape", "size", "end")  # by these, a length says how many, not which ones
    places = (v for name, v in operands(op) if name not in counts and v in numbers)
    return any(not any_symbolic(sizes_of(v)) for v in places)


def _tables(op: Operation) -> Iterator[bytes]:
    """Yield digests of the constants of which an op may read one place."""
    for name, var in operands(op):
        # between two elements that are looked up, a number chooses
        least_size = 2 if name == "x" and op.op_type in LOOKUPS | PER_AXIS_OPS else SMALL_CONSTANT + 1
        if (value := constant(var)) is not None and np.size(value) >= least_size:
            yield array_digest(np.asarray(value))


def _is_alike(op: Operation) -> bool:
    """Return whether an op does the same at every place of each dynamic axis, whatever the length."""
    if not _is_dynamic(op):
        return True
    if op.blocks or _has_list_or_any_rank(op):
        return False
    if op.op_type == "reshape":
        return _keeps_dynamic_axes(op.x.shape, op.outputs[0].shape)
    return _aligned(op) if op.op_type in POINTWISE else _by_places(op)


def _has_list_or_any_rank(op: Operation) -> bool:
    """Return whether an op has a list, or a value of any number of axes."""
    values = [*reads(op), *op.outputs]
    variadic = (is_symbolic(d) and str(d).startswith("*") for v in values for d in sizes_of(v))
    return any(types.is_list(v.sym_type) for v in values) or any(variadic)


def _aligned(op: Operation) -> bool:
    """Return whether each axis of an operand is dynamic where the result's is, and else 1 long."""
    out = op.outputs[0].shape
    all_align = op.op_type not in BROADCASTING
    aligned = [v for name, v in operands(op) if all_align or name in ("x", "y", "a", "b", "cond")]
    pairs = [pair for v in aligned for pair in zip(reversed(sizes_of(v)), reversed(out), strict=False)]
    return all(size == 1 for size, length in pairs if is_symbolic(size) != is_symbolic(length))


def _keeps_dynamic_axes(old: Sequence[Any], new: Sequence[Any]) -> bool:
    """Return whether a reshape leaves as many elements as before around each dynamic axis.

    From (2, 3, s, 4) to (6, s, 2, 2) it does: 6 elements before the axis s, and 4 behind it.
    """
    (before, old_between), (after, new_between) = _dynamic_axes(old), _dynamic_axes(new)
    same_axes = before == after or len(before) == len(after) == 1
    return same_axes and old_between == new_between


def _dynamic_axes(shape: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Return the dynamic sizes, and the elements before the first, between neighbours, and behind the last."""
    at = [i for i, size in enumerate(shape) if is_symbolic(size)]
    ends = zip([-1, *at], [*at, len(shape)], strict=True)
    return [shape[i] for i in at], [math.prod(shape[a + 1 : b]) for a, b in ends]


WHOLE_AXIS_OPS = names("softmax instance_norm reverse cumsum")
"""Ops that work along an axis in one way at any length, without a constant by place. May lack ops."""


def _by_places(op: Operation) -> bool:
    """Return whether an op is alike by where its axes go (`semantics.rows`).

    Each dynamic axis of the result must come from a dynamic axis of an operand. Any other dynamic axis must be
    reduced, or summed over with that of a second operand; or the op works along whole axes.
    """
    placed = places_of(op) or ()
    axes = [axis for o in placed for axis in zip(o.var.shape, o.places, strict=True)]
    stated = {o.var for o in placed}
    if not placed or any(v not in stated and constant(v) is None for v in reads(op)):
        return False  # it is unknown where the axes of an operand go
    kept = [(size, place) for size, place in axes if isinstance(place, int)]
    if any(is_symbolic(v.shape[place]) != is_symbolic(size) for size, place in kept for v in op.outputs):
        return False  # an axis is dynamic on one side only
    if any(place == BROADCAST and size != 1 for size, place in axes):
        return False  # whether an axis is repeated depends on its length
    if op.op_type not in WHOLE_AXIS_OPS:
        kept_dynamic = {place for size, place in kept if is_symbolic(size)}
        made_dynamic = {i for v in op.outputs for i, size in enumerate(v.shape) if is_symbolic(size)}
        is_mixed = any(place == MIXED and is_symbolic(size) for size, place in axes)
        if is_mixed or made_dynamic - kept_dynamic:
            return False  # slices of a dynamic axis depend on each other, or come from no operand
    summed = [size for size, place in axes if place == CONTRACTED]
    are_summed_in_pairs = not any_symbolic(summed) or all(summed.count(size) > 1 for size in summed)
    return (are_summed_in_pairs or op.op_type in REDUCTIONS) and not _sums_bounded(op)


CONVOLUTIONS = names("conv conv_transpose")
"""Ops whose kernels reach over several places. Must be complete."""
LOCAL_OPS = CONVOLUTIONS | names(
    "avg_pool l2_pool max_pool pad slice_by_index slice_by_size concat crop reshape "
    "depth_to_space space_to_depth pixel_shuffle pixel_unshuffle"
)
"""Ops whose constants say which places along an axis they read or make. May lack ops."""
STRIDE_PARAMETERS = names("strides stride block_size upscale_factor downscale_factor")
"""Parameters that divide or multiply the length: the remainder by them matters. Must be complete."""
STEPS = STRIDE_PARAMETERS | names("dilations")
"""Parameters that say how far apart places are: by 1, they change none."""
WITHOUT_LIMITS = names(
    "axis axes perm groups batch_dims begin_mask end_mask squeeze_mask keep_dims "
    "weight bias gamma beta mean variance weight_ih weight_hh weight_ih_back weight_hh_back bias_back"
)
"""Parameters whose numbers no place and no length meets. May lack ops."""


def _use_of_op(op: Operation) -> Use:
    """Return how an op that is not alike uses the length."""
    if op.blocks:
        return Use.SCALED  # what is in a loop may be multiplied in any round
    parameters = [v for name, v in operands(op) if name not in ("x", "values")]
    is_local = op.op_type in LOCAL_OPS and all(constant(v) is not None or is_stored(v) for v in parameters)
    divides = op.op_type != "reshape" or _reshape_ratio(op) is not None
    return Use.LOCAL if is_local and divides else Use.NUMBERS


def _reshape_ratio(op: Operation) -> int | None:
    """Return by what a reshape divides or multiplies a dynamic axis; None where that is no integer."""
    old, new = ([d for d in v.shape if is_symbolic(d)] for v in (op.x, op.outputs[0]))
    if not old or not new:
        return None
    ratio = math.prod(old) / math.prod(new)
    integers = [r for r in (ratio, 1 / ratio) if r.is_number and int(r) == r]
    return int(integers[0]) if integers else None


def _period(op: Operation) -> int:
    """Return by what an op divides or multiplies the length of an axis."""
    if op.op_type == "reshape":
        return _reshape_ratio(op) or 1
    steps = [abs(n) for name, _ in operands(op) if name in STRIDE_PARAMETERS for n in ints(op, name)]
    return math.lcm(*steps)


def _constants(op: Operation) -> list[int]:
    """Return the integers of an op that a place, or a number made of a length, may meet."""
    integers: list[Any] = []
    for inner in (op, *nested_ops(op)):
        if inner.op_type in CONVOLUTIONS:
            integers += _kernel_reach(inner)
        integers += [n for name, v in operands(inner) for n in _integers_of(inner, name, v)]
    return [abs(int(n)) for n in integers if not is_symbolic(n) and n]


def _integers_of(op: Operation, name: str, var: Var) -> Iterable[Any]:
    """Return the integers of one operand that a place or a number may meet, or sizes, which may be symbolic."""
    value = constant(var)
    if name in WITHOUT_LIMITS or isinstance(value, str):
        return []
    if is_stored(var) and value is not None:
        integers = _whole_numbers(op, np.asarray(value))
        return [n for n in integers if n != 1] if name in STEPS else integers
    # joined parts shift each other; an op that is neither local nor alike may compare any size
    takes_sizes = op.op_type in JOINING or not (op.op_type in LOCAL_OPS or _is_alike(op))
    return sizes_of(var) if takes_sizes or is_stored(var) else []


def _kernel_reach(op: Operation) -> list[int]:
    """Return how far the kernel of a convolution reaches along each axis."""
    sizes = [1 if is_symbolic(d) else d for d in op.weight.shape[2:]]
    dilations = ints(op, "dilations") or [1] * len(sizes)
    return [(int(n) - 1) * d + 1 for n, d in zip(sizes, dilations, strict=True)]


def _whole_numbers(op: Operation, values: Array) -> list[int]:
    """Return the numbers of a constant, rounded down and up, and its lengths.

    Of a parameter with a number for each axis, only those of dynamic axes are returned.
    """
    local, are_integers = op.op_type in LOCAL_OPS, values.dtype.kind in "iu"
    # a parameter of a local op is as long as there are axes, and holds places, which are integers
    lengths = list[int]() if local else list(values.shape)
    if not values.size or not (are_integers or (values.dtype.kind == "f" and not local)):
        return lengths
    if values.size > SMALL_CONSTANT:  # of a table of indices, the largest may be a limit; weights are none
        return [*lengths, int(values.max())] if are_integers else lengths
    if op.op_type in PER_AXIS_OPS and values.ndim == 1 and len(values) in (op.x.rank, 2 * op.x.rank):
        per_axis = len(values) // op.x.rank
        values = np.array([n for i, n in enumerate(values) if is_symbolic(op.x.shape[i // per_axis])])
    kept = [n for n in map(float, values.ravel()) if abs(n) < LONGEST_DRAWN]  # no axis is longer
    return lengths + [whole for n in kept for whole in dict.fromkeys((math.floor(n), math.ceil(n)))]
