"""Choose the lengths at which an edit or a model is tried, and say whether these decide for every length.

`plan_of` reads the ops of both sides (`use_of`): if they treat every length alike, a proof at a few lengths
holds for all. Else the plan has the ends of the declared range and the neighbours of each constant that a
length may meet (a window, a slice, a comparison), and a reason why other lengths remain unknown.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from anesurgery.checking.adversarial import constants_of
from anesurgery.checking.lengths import (
    LONGEST_DRAWN,
    NOTHING,
    SYMBOL_LENGTH,
    Declared,
    Lengths,
    least_length,
    length_of,
    sizes_of,
    symbols_of,
    united,
    with_lengths,
)
from anesurgery.interpret.sampling import LOOKUPS
from anesurgery.mil import (
    Array,
    Operation,
    Var,
    any_symbolic,
    constant,
    is_stored,
    is_symbolic,
    nested_ops,
    np_dtype,
    operands,
    reads,
    types,
)
from anesurgery.ops import BROADCASTING, COMPARISONS, JOINING, LOGICAL, POINTWISE, REDUCTIONS, VIEWS, names
from anesurgery.semantics.intervals import interval
from anesurgery.semantics.reading import ints
from anesurgery.semantics.rows import BROADCAST, CONTRACTED, MIXED, places_of

APART_LENGTHS = (4, 2, 7, 5)
"""The lengths of symbols when each one has its own."""
LONG = 17
"""A longer length for all symbols, which shows what holds only up to a limit."""
EVERY = 48
"""Ranges of up to this many lengths are tried completely: so many short trials cost less than one long one."""
MOST_PERIOD = 16
"""The most remainders of a length that are tried: four layers with stride 2 have 16. Up to there all are."""
MOST_ADDED = 4
"""The most constants added to lengths of which all sums and differences are tried (81). A choice."""
LONGEST = 20.0
"""The logarithm of more than any length."""
MOST = 1 << 22
"""The most elements of all values over all lengths beside the first: a proof takes some 10 million a second."""
MOST_TRIALS = 128
"""The most lengths of an edit: a check by numbers takes some 10 ms at each, however small it is."""


@dataclass(frozen=True)
class Plan:
    """The lengths to try."""

    first: tuple[Lengths, ...] = ({},)
    """Lengths that are tried with all kinds of numbers: one for each symbol, long ones, and 1."""
    others: tuple[Lengths, ...] = ()
    """The ends of the declared range, and the neighbours of constants that a length may meet."""
    alike: bool = True
    """Whether the ops treat every length alike, so that a proof needs the first lengths only."""
    gap: str = ""
    """Why these say nothing about every length; "" where they do."""

    @property
    def all(self) -> tuple[Lengths, ...]:
        """All lengths, the first ones first."""
        return *self.first, *self.others


def apart_lengths(symbols: Iterable[Any]) -> Lengths:
    """Return a different length for each symbol."""
    return dict(zip(symbols, itertools.cycle(APART_LENGTHS), strict=False))


def span(lengths: Iterable[Lengths]) -> tuple[int, int]:
    """Return the least and the largest of some lengths."""
    several = [n for one in lengths for n in one.values()]
    return min(several, default=SYMBOL_LENGTH), max(several, default=SYMBOL_LENGTH)


def plan_of(
    inputs: Iterable[Var],
    sides: Sequence[Sequence[Operation]],
    results: Sequence[Var] = (),
    declared: Declared = NOTHING,
    most: int = MOST,
    twins: Mapping[Any, Any] = MappingProxyType({}),
) -> Plan:
    """Return the lengths at which an edit or a model is tried.

    Args:
        inputs: the values with symbolic dimensions.
        sides: the ops of both sides, in order.
        results: the results that others read.
        declared: the lengths that the model declares.
        most: the most elements of all values, over all lengths beside the first ones.
        twins: symbol of the second side -> the equal symbol of the inputs, where these differ.
    """
    inputs = list(inputs)
    symbols = symbols_of(inputs)
    if not symbols:
        return Plan()
    use = use_of(sides, results)
    sizes, several = (tuple({d.subs(twins): None for d in those}) for those in (use.sizes, use.compared))
    use = replace(use, sizes=sizes, compared=several)
    apart = apart_lengths(symbols)
    plain = [dict.fromkeys(symbols, SYMBOL_LENGTH), apart, *(dict.fromkeys(symbols, n) for n in (LONG, 1))]
    computed = [op for ops in sides for op in ops]
    alike, cost = use.use is Use.ALIKE, counting(inputs, computed)
    if alike:
        chosen, (wanted, gap), most = plain, _farther(symbols, computed, declared), most // 4
    elif listed := declared.together(symbols):
        chosen, wanted, gap = [min(listed, key=cost)], listed, ""
    else:
        chosen = _distinct([_nearest_declared(one, declared) for one in plain])
        wanted, gap = _telling_lengths(symbols, use, declared)
    left = [one for one in _distinct(wanted) if one not in chosen]
    kept = _affordable(left, cost, most)
    if len(kept) < len(left):
        gap = "longer lengths take too many numbers"
    return Plan(tuple(chosen), tuple(kept), alike, gap)


def _distinct(lengths: Iterable[Lengths]) -> list[Lengths]:
    return list({tuple(one.items()): one for one in lengths}.values())


def _nearest_declared(lengths: Lengths, declared: Declared) -> Lengths:
    """Return the nearest lengths that are declared."""
    ranges = {s: declared.range_of(s) for s in lengths}
    return {s: max(ranges[s][0], min(n, ranges[s][1] or n)) for s, n in lengths.items()}


def _telling_lengths(symbols: Sequence[Any], use: LengthUse, declared: Declared) -> tuple[list[Lengths], str]:
    """Return the lengths that tell the most, and why they do not tell all."""
    inside = {s for d in use.sizes for s in d.free_symbols} & {*symbols}
    foreign = any(not d.free_symbols <= {*symbols} for d in use.sizes)
    met = list(symbols) if foreign or not inside else [s for s in symbols if s in inside]
    low, high = united([declared.range_of(s) for s in met])
    rest = _nearest_declared(dict.fromkeys(symbols, SYMBOL_LENGTH), declared)
    one_by_one = met if len(met) > 1 and (foreign or use.joint) else []
    least = {s: declared.range_of(s)[0] for s in met}

    def at(lengths: Iterable[int]) -> list[Lengths]:
        """Return declared lengths with each of these for all symbols, and for one of several alone."""
        kept = sorted({n for n in lengths if low <= n and (high is None or n <= high)})
        together = [dict.fromkeys(met, n) for n in kept]
        apart = [{**least, s: n} for s in one_by_one for n in kept]
        return [_nearest_declared({**rest, **lengths}, declared) for lengths in (*together, *apart)]

    gap = _gap(use, symbols, high) if use.use is not Use.LOCAL else ""
    if high is not None and high - low < EVERY:
        return at(range(low, high + 1)), gap if one_by_one else ""
    around = {n for c in (*use.constants, *_solved(use, symbols)) for n in (c - 1, c, c + 1, 2 * c)}
    if use.use is Use.LOCAL:
        beyond = range(use.reach + 1, use.reach + 1 + min(use.period, MOST_PERIOD))
        around |= {low, *beyond, *(range(1, use.reach + 1) if use.reach <= MOST_PERIOD else ())}
        gap = "strides leave too many remainders of the length" if use.period > MOST_PERIOD else ""
        return at({*around, *(() if high is None or high > beyond[-1] else (high,))}), gap
    around |= {n for c in use.constants for n in _shifted(c, use.offsets[:MOST_ADDED])}
    return at(around if high is None else {*around, low, low + 1, high - 1, high}), gap


def _gap(use: LengthUse, symbols: Sequence[Any], high: int | None) -> str:
    """Return why the lengths that constants meet do not tell all where numbers are made of lengths."""
    reasons = {
        "the model declares no largest length": high is None,
        "the length is multiplied or divided": use.use is Use.SCALED,
        "several lengths are compared with each other": use.joint,
        "a length that follows from others is compared": any(
            not d.free_symbols <= {*symbols} for d in use.compared
        ),
        "the length looks up other constants": use.unlike,
        "too many numbers are added to the length": len(use.offsets) > MOST_ADDED,
    }
    return next((words for words, holds in reasons.items() if holds), "")


def _shifted(constant: int, added: Sequence[int]) -> set[int]:
    """Return the lengths that meet a constant once some numbers are added or taken away: 9 with 2: 7, 9, 11."""
    met = {constant}
    for number in added:
        met |= {n + d for n in met for d in (-number, number)}
    return {abs(n) for n in met}


def _farther(symbols: Sequence[Any], ops: Sequence[Operation], declared: Declared) -> tuple[list[Lengths], str]:
    """Return lengths for what is alike and not proved: the ends, some beyond limits; and what they do not tell.

    Shares, sums of exponentials and norms of rows tell the length, and meet the constants of ops.
    """
    sizes = [abs(c) for c in constants_of(ops) if c]
    met = {2 * n for c in sizes for n in (c, 1 / c, c * c, math.exp(min(c, LONGEST)))}
    ranges = [declared.range_of(s) for s in symbols]
    ends = {low for low, _ in ranges} | {high for _, high in ranges if high is not None}
    wanted = [dict.fromkeys(symbols, round(n)) for n in sorted({*met, *ends}) if 1 <= n < LONGEST_DRAWN]
    endless = any(high is None for _, high in ranges)
    gap = "the model declares no largest length" if endless else ""
    return [_nearest_declared(lengths, declared) for lengths in wanted], gap


def _solved(use: LengthUse, symbols: Sequence[Any]) -> list[int]:
    """Return the lengths of a symbol at which a size made of it meets a constant: 2 s + 1 meets 9 at 4."""
    grown = [
        d for d in use.sizes if not d.is_Symbol and len(d.free_symbols) == 1 and d.free_symbols <= {*symbols}
    ]
    return [least_length(d, next(iter(d.free_symbols)), c) for d in grown for c in use.constants]


def _affordable(wanted: Sequence[Lengths], cost_of: Callable[[Lengths], int], most: int) -> list[Lengths]:
    """Return the lengths that cost at most `most` together; longer ones are kept first."""
    costs = [(cost_of(one), one) for one in wanted]
    total, kept = 0, list[Lengths]()
    for cost, one in sorted(costs, key=lambda pair: -pair[0]):
        if total + cost <= most and len(kept) < MOST_TRIALS:
            total += cost
            kept.append(one)
    return kept[::-1]


def counting(inputs: Sequence[Var], ops: Sequence[Operation]) -> Callable[[Lengths], int]:
    """Return a function that counts the elements of all values at some lengths.

    A symbol that is not among them is as long as the longest.
    """
    values = [*inputs, *(v for op in ops if op.op_type != "const" for v in op.outputs)]
    symbols, shapes = symbols_of(values), Counter(tuple(sizes_of(v)) for v in values)

    def elements(lengths: Lengths) -> int:
        with with_lengths(dict.fromkeys(symbols, max(lengths.values())) | dict(lengths)):
            return sum(count * math.prod(map(length_of, shape)) for shape, count in shapes.items())

    return elements


# How ops use the length of a dynamic axis: what is shown at a few lengths may then hold at every length.
#
# An op is *alike* at every length where each dynamic axis is one of these:
#
# * an axis of the result, of which each slice is made of the same slice of each operand, in the same way at
#   every place (the rows of `semantics.rows`: pointwise ops, broadcasts of length 1, permutations, lookups in
#   tables by rows, products and norms over other axes, slices and pads of other axes);
# * an axis that is reduced, or summed over with another dynamic axis (`reduce_sum`, `matmul`, attention);
# * an axis along which a `softmax`, an `instance_norm`, a `cumsum` or a `reverse` works.
#
# No constant meets the length in such an op. A site of such ops adds, moves and reduces in one way, whatever
# the length, so two sides that agree at several lengths, 1 among them, agree at all. What asks for a shape
# only to reshape by it, with the same elements before and after each dynamic axis, is alike too.
#
# An op is *local* where constants name places on the axis: windows, kernels, slices, pads, joins. Once the
# length is beyond all these constants together, nothing new happens, but for the remainder by the strides.
#
# Any other op makes *numbers* of the length (`shape`, `range_1d`, `fill`, a sum of what has known ends, as a
# mask has), an order, or steps: constants meet these by any arithmetic. Sums of them turn at the neighbours
# of the constants, and of these with the constants that are added; where they are multiplied or divided
# before they are compared (*scaled*; a length plus itself is twice as long), where several lengths are
# compared with each other (*joint*), or where one length looks up one row of a table that the other side has
# not (*unlike*), no such lengths are known.


SPREAD = names("softmax instance_norm reverse cumsum")
"""Ops that work along an axis in one way, whatever its length, with no constant for its elements."""
CONVOLUTIONS = names("conv conv_transpose")
LOCAL = CONVOLUTIONS | names("avg_pool l2_pool max_pool pad slice_by_index slice_by_size concat crop reshape")
LOCAL |= names("depth_to_space space_to_depth pixel_shuffle pixel_unshuffle")
"""Ops whose constants say which places along an axis they read or make."""
PERIODS = names("strides stride block_size upscale_factor downscale_factor")
"""Parameters by which the length is divided or multiplied: ops do other things at each remainder."""
NO_PLACES = names("axis axes perm groups batch_dims begin_mask end_mask squeeze_mask keep_dims")
"""Parameters of integers that no place along an axis meets."""
COUNTED = names("shape fill_like")
"""Ops that make numbers, or constants, of a shape alone."""
SHAPING = VIEWS | JOINING | names("gather slice_by_index cast identity split")
"""Ops through which lengths go from a shape to a reshape."""
SUMMING = SHAPING | COMPARISONS | LOGICAL | COUNTED
SUMMING |= names(
    "fill range_1d add sub select minimum maximum clip logical_not tile transpose slice_by_size abs"
)
SUMMING |= names("band_part one_hot reverse gather_along_axis gather_nd pad")
"""Ops of whose results the constants are at most added to the lengths in them."""
SUMS = names("reduce_sum reduce_l1_norm reduce_l2_norm reduce_sum_square cumsum matmul einsum")
"""Ops whose results tell how many numbers they sum, where these have known ends: the sum of a mask counts."""
EACH_AXIS = names("slice_by_index slice_by_size pad")
"""Ops with a parameter that has a number, or two, for each axis."""
ANGLES = names("cos sin")
"""Ops of whose results nothing tells a length."""
SMOOTH = ANGLES | names("add sub mul real_div exp identity select concat stack transpose expand_dims squeeze")
SMOOTH |= names("matmul linear")
"""Ops that do the same whatever number they read."""
MEETING = COMPARISONS | names("minimum maximum clip floor_div mod abs relu")
"""Ops that turn where a number that they read meets another one."""
OFFSETS = names("add sub range_1d")
"""Ops whose constants are added to a number."""
LOOKED_UP = {op: table for op, (_, table) in LOOKUPS.items()} | dict.fromkeys(EACH_AXIS, "x")
"""Op type -> the parameter whose numbers it looks up."""
WHERE_TO = names("shape size end")
"""Parameters by which a length says how many, not which ones."""
WEIGHTS = names(
    "weight bias gamma beta mean variance weight_ih weight_hh weight_ih_back weight_hh_back bias_back"
)
"""Parameters whose numbers no place and no length meets."""
LARGEST = 1 << 24
"""Numbers beyond this are not lengths."""
SMALL = 64
"""Constants of up to this many elements may hold a limit: parameters do, weights and tables do not."""


class Use(IntEnum):
    """How a length is used, from the least to the most."""

    ALIKE = 0
    LOCAL = 1
    NUMBERS = 2
    SCALED = 3


@dataclass(frozen=True)
class LengthUse:
    """How some ops use the lengths of their dynamic axes."""

    use: Use = Use.ALIKE
    constants: tuple[int, ...] = ()
    """The integers that a length may meet, ascending."""
    reach: int = 0
    """Beyond this length, windows and indices meet no constant."""
    period: int = 1
    """The length is used differently by its remainder modulo this."""
    sizes: tuple[Any, ...] = ()
    """The symbolic sizes that are used."""
    offsets: tuple[int, ...] = ()
    """Constants added to numbers computed from lengths, each as often as on the side that adds it most."""
    joint: bool = False
    """Whether several lengths are compared with each other."""
    compared: tuple[Any, ...] = ()
    """The sizes whose numbers are compared."""
    unlike: bool = False
    """Whether one side looks up a row of a table by length that the other side does not have."""


class _NumberFromLengths(NamedTuple):
    """How a value is computed from lengths."""

    scaled: bool
    """Whether a length was multiplied."""
    times: Mapping[Any, tuple[float, float]]
    """Size -> how often it is contained in the value, at least and at most."""


Numbers = dict[Var, _NumberFromLengths]
"""Values computed from lengths and constants only."""


def use_of(sides: Sequence[Iterable[Operation]], results: Sequence[Var] = ()) -> LengthUse:
    """Return how the ops of both sides use dynamic lengths.

    Args:
        sides: the ops of each side, in the order in which they run.
        results: the results that others read.
    """
    apart = [[op for op in ops if op.op_type != "const"] for ops in sides]
    computed = [op for ops in apart for op in ops]
    if not any(_is_dynamic(op) for op in computed):
        return LengthUse()
    numbers = _numbers_from_lengths(computed)
    if numbers and _only_shapes(computed, numbers, results):
        computed, numbers = [op for op in computed if not numbers.keys() & {*op.outputs}], {}
    met = [op for op in computed if not _alike(op)]
    if not met:
        return LengthUse()
    use = max(_worst(op) for op in met)
    use = Use.SCALED if any(_scales(op, numbers) for op in computed) else use
    counted = {op: _constants(op) for op in (met if use is Use.LOCAL else computed)}
    period = math.lcm(*(math.prod(_period(op) for op in ops if op in met) for ops in apart))
    reach = period * max(sum(sum(counted.get(op, ())) for op in ops) for ops in apart)
    sizes = {d: None for op in met for v in (*reads(op), *op.outputs) for d in sizes_of(v) if is_symbolic(d)}
    constants = sorted({n for several in counted.values() for n in several})
    offsets = [
        Counter(n for op in ops if numbers.keys() & {*op.outputs} for n in _offsets(op)) for ops in apart
    ]
    together = [_compared(op, numbers) for op in computed]
    return LengthUse(
        use=use,
        constants=tuple(constants),
        reach=reach,
        period=period,
        sizes=tuple(sizes),
        offsets=tuple(functools.reduce(operator.or_, offsets).elements()),
        joint=any(len(several) > 1 for several in together),
        compared=tuple({d: None for several in together for d in several}),
        unlike=_unlike(apart, numbers),
    )


def _is_dynamic(op: Operation) -> bool:
    """Return whether an op reads or computes a value of symbolic size."""
    inner = (v for one in nested_ops(op) for v in one.outputs)
    return any(any_symbolic(sizes_of(v)) for v in (*reads(op), *op.outputs, *inner))


def _numbers_from_lengths(ops: Sequence[Operation]) -> Numbers:
    """Return the values that are computed from lengths and constants only."""
    numbers: Numbers = {}
    for op in ops:
        read = [v for v in reads(op) if constant(v) is None and not is_stored(v)]
        counted = op.op_type in COUNTED and any_symbolic(sizes_of(read[0])) if read else False
        counted = counted or _counts(op)
        if op.op_type in ANGLES or not (counted or (read and all(v in numbers for v in read))):
            continue
        if op.op_type in COMPARISONS | LOGICAL:
            numbers |= dict.fromkeys(op.outputs, _NumberFromLengths(False, {}))
            continue
        times = _times(op, read, numbers, counted=counted)
        plain = op.op_type in SUMMING and not _steps_apart(op)
        scaled = not plain or any(v in numbers and numbers[v].scaled for v in read)
        scaled = scaled or any(max(-low, high) > 1 for low, high in times.values())
        numbers |= dict.fromkeys(op.outputs, _NumberFromLengths(scaled, times))
    return numbers


def _times(
    op: Operation, read: Sequence[Var], numbers: Numbers, *, counted: bool
) -> Mapping[Any, tuple[float, float]]:
    """Return how often each size is contained in what an op computes from numbers: (at least, at most)."""
    known = [d for d in np.ravel(np.asarray(op.outputs[0].sym_val, object)) if is_symbolic(d)]
    if known and op.outputs[0].rank == 0 and known[0].is_Symbol:
        return {known[0]: (1, 1)}
    if known or counted:
        return dict.fromkeys(known or [d for v in read for d in sizes_of(v) if is_symbolic(d)], (0, 1))
    given: dict[Var | None, Mapping[Any, tuple[float, float]]] = {v: numbers[v].times for v in read}
    sizes = {d for times in given.values() for d in times}
    x, y = (given.get(op.inputs.get(name), {}) for name in ("x", "y"))
    if op.op_type == "add":
        return {d: tuple(np.add(x.get(d, (0, 0)), y.get(d, (0, 0))).tolist()) for d in sizes}
    if op.op_type == "sub":
        return {d: tuple(np.subtract(x.get(d, (0, 0)), y.get(d, (0, 0))[::-1]).tolist()) for d in sizes}
    ends = {d: [0, *(end for times in given.values() for end in times.get(d, ()))] for d in sizes}
    return {d: (min(several), max(several)) for d, several in ends.items()}


def _offsets(op: Operation) -> list[int]:
    """Return what an op adds to a number, but for 1: the neighbours of all constants are tried in any case."""
    if op.op_type not in OFFSETS:
        return []
    values = (constant(v) for name, v in operands(op) if name != "step")
    return [
        abs(n) for value in values if value is not None for n in _whole(op, np.asarray(value)) if abs(n) > 1
    ]


def _compared(op: Operation, numbers: Numbers) -> set[Any]:
    """Return the sizes whose numbers an op compares."""
    read = [numbers[v] for v in reads(op) if v in numbers] if op.op_type in MEETING else []
    return {d for number in read for d, ends in number.times.items() if ends != (0, 0)}


def _unlike(sides: Sequence[Sequence[Operation]], numbers: Numbers) -> bool:
    """Return whether only one side has tables, or other large constants, that a single number looks up."""
    tables = [
        {
            hashlib.blake2b(np.ascontiguousarray(value).data, digest_size=16).digest()
            for op in ops
            if any(
                v in numbers and not any_symbolic(sizes_of(v))
                for name, v in operands(op)
                if name not in WHERE_TO
            )
            for name, v in operands(op)
            if (value := constant(v)) is not None
            and np.size(value) > (1 if name == LOOKED_UP.get(op.op_type) else SMALL)
        }
        for ops in sides
    ]
    return any(one != tables[0] for one in tables)


def _steps_apart(op: Operation) -> bool:
    """Return whether an op is a range with another step than 1."""
    return op.op_type == "range_1d" and constant(op.step) not in (1, 1.0)


def _scales(op: Operation, numbers: Numbers) -> bool:
    """Return whether an op compares, rounds or divides to integers what was multiplied or divided."""
    read = [v for v in reads(op) if v in numbers]
    if read and op.op_type in ("floor_div", "mod"):
        return True
    whole = op.op_type == "cast" and np_dtype(op.outputs[0]).kind != "f"
    return any(numbers[v].scaled for v in read) and (whole or op.op_type not in SMOOTH | {"cast"})


def _only_shapes(ops: Sequence[Operation], numbers: Numbers, results: Sequence[Var]) -> bool:
    """Return whether lengths are only read to reshape by them."""
    carried = all(op.op_type in SHAPING | {"shape"} for op in ops if numbers.keys() & {*op.outputs})
    readers = [op for op in ops if numbers.keys() & {*reads(op)} and not numbers.keys() & {*op.outputs}]
    apart = not numbers.keys() & {*results}
    return carried and apart and all(op.op_type == "reshape" and op.x not in numbers for op in readers)


def _alike(op: Operation) -> bool:
    """Return whether an op does the same at every place of each dynamic axis, whatever the length."""
    if not _is_dynamic(op):
        return True
    if op.blocks or _is_open(op):
        return False
    if op.op_type == "reshape":
        return _keeps(op.x.shape, op.outputs[0].shape)
    return _aligned(op) if op.op_type in POINTWISE else _by_places(op)


def _is_open(op: Operation) -> bool:
    """Return whether an op has a list, or a value of any number of axes."""
    values = [*reads(op), *op.outputs]
    variadic = (is_symbolic(d) and str(d).startswith("*") for v in values for d in sizes_of(v))
    return any(types.is_list(v.sym_type) for v in values) or any(variadic)


def _aligned(op: Operation) -> bool:
    """Return whether each size of an operand is dynamic where that of the result is, or 1."""
    out = op.outputs[0].shape
    aligned = [
        v for name, v in operands(op) if op.op_type not in BROADCASTING or name in ("x", "y", "a", "b", "cond")
    ]
    pairs = [pair for v in aligned for pair in zip(reversed(sizes_of(v)), reversed(out), strict=False)]
    differing = [size for size, length in pairs if is_symbolic(size) != is_symbolic(length)]
    return all(not is_symbolic(size) and size == 1 for size in differing)


def _keeps(old: Sequence[Any], new: Sequence[Any]) -> bool:
    """Return whether a reshape leaves as many elements as before around each dynamic axis.

    From (2, 3, s, 4) to (6, s, 2, 2) it does: 6 elements before the axis s, and 4 behind it.
    """
    (before, old_between), (after, new_between) = _dynamic_axes(old), _dynamic_axes(new)
    if len(before) != len(after) or (len(before) > 1 and before != after):
        return False
    return old_between == new_between


def _dynamic_axes(shape: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Return the dynamic sizes, and the elements before the first, between neighbours, and behind the last."""
    at = [i for i, size in enumerate(shape) if is_symbolic(size)]
    ends = zip([-1, *at], [*at, len(shape)], strict=True)
    return [shape[i] for i in at], [math.prod(shape[a + 1 : b]) for a, b in ends]


def _by_places(op: Operation) -> bool:
    """Return whether an op is alike by where its axes go (`semantics.rows`); see the rules above `SPREAD`."""
    placed = places_of(op)
    stated = {o.var for o in placed or ()}
    if not placed or any(v not in stated and constant(v) is None for v in reads(op)):
        return False
    fed, summed = set[int](), list[Any]()
    for size, place in ((d, at) for o in placed for d, at in zip(o.var.shape, o.places, strict=True)):
        dynamic = is_symbolic(size)
        if isinstance(place, int):
            if any(is_symbolic(v.shape[place]) != dynamic for v in op.outputs):
                return False
            fed |= {place} if dynamic else set()
        elif place == BROADCAST and (dynamic or size != 1):
            return False
        elif place == CONTRACTED:
            summed.append(size)
        elif dynamic and op.op_type not in SPREAD:
            return False
    dynamic_axes = {a for v in op.outputs for a, d in enumerate(v.shape) if is_symbolic(d)}
    alone = op.op_type in REDUCTIONS or _in_pairs(summed)
    return (dynamic_axes <= fed or op.op_type in SPREAD) and alone and not _counts(op)


def _counts(op: Operation) -> bool:
    """Return whether an op sums what has known ends along a dynamic axis, so that the sum tells the length."""
    placed = places_of(op) if op.op_type in SUMS and not _is_open(op) else None
    summed = any(
        is_symbolic(d) and at in (CONTRACTED, MIXED)
        for o in placed or ()
        for d, at in zip(o.var.shape, o.places, strict=True)
    )
    return summed and all(math.isfinite(end) for o in placed or () for end in interval(o.var))


def _in_pairs(summed: Sequence[Any]) -> bool:
    """Return whether each size that is summed over belongs to two operands, if one of them is dynamic."""
    return not any_symbolic(summed) or all(summed.count(size) > 1 for size in summed)


def _worst(op: Operation) -> Use:
    """Return how an op that is not alike uses the length."""
    if op.blocks:
        return Use.SCALED  # what is in a loop may be multiplied in any round
    parameters = [v for name, v in operands(op) if name not in ("x", "values")]
    plain = op.op_type in LOCAL and all(constant(v) is not None or is_stored(v) for v in parameters)
    if op.op_type == "reshape":
        plain = plain and _ratio(op) is not None
    return Use.LOCAL if plain else Use.NUMBERS


def _ratio(op: Operation) -> int | None:
    """Return by what a reshape divides or multiplies a dynamic axis; None where that is no integer."""
    old, new = ([d for d in v.shape if is_symbolic(d)] for v in (op.x, op.outputs[0]))
    if not old or not new:
        return None
    ratio = math.prod(old) / math.prod(new)
    whole = [r for r in (ratio, 1 / ratio) if r.is_number and int(r) == r]
    return int(whole[0]) if whole else None


def _period(op: Operation) -> int:
    """Return by what an op divides or multiplies the length of an axis."""
    if op.op_type == "reshape":
        return _ratio(op) or 1
    steps = [abs(n) for name, _ in operands(op) if name in PERIODS for n in ints(op, name)]
    return max(steps, default=1)


def _constants(op: Operation) -> list[int]:
    """Return the integers of an op that a place, or a number made of a length, may meet."""
    met: list[Any] = []
    for one in (op, *nested_ops(op)):
        for name, var in operands(one):
            if name in NO_PLACES or name in WEIGHTS:
                met += _kernel(one) if one.op_type in CONVOLUTIONS and name == "weight" else []
            elif not is_stored(var):
                beside = one.op_type in JOINING or not (one.op_type in LOCAL or _alike(one))
                met += sizes_of(var) if beside else ()
            elif (value := constant(var)) is not None and not isinstance(value, str):
                met += _whole(one, np.asarray(value))
            else:
                met += sizes_of(var)
    return [abs(int(n)) for n in met if not is_symbolic(n) and abs(n) > 1]


def _kernel(op: Operation) -> list[int]:
    """Return how far the kernel of a convolution reaches along each axis."""
    sizes, apart = [1 if is_symbolic(d) else d for d in op.weight.shape[2:]], ints(op, "dilations")
    return [(int(n) - 1) * d + 1 for n, d in zip(sizes, apart or [1] * len(sizes), strict=True)]


def _whole(op: Operation, numbers: Array) -> list[int]:
    """Return the whole numbers of a small constant, and its lengths.

    Of a parameter with a number for each axis, only those of dynamic axes are returned.
    """
    local = op.op_type in LOCAL
    lengths = list[int]() if local else list(numbers.shape)
    if numbers.dtype.kind not in ("iu" if local else "fiu") or not numbers.size:
        return lengths
    if numbers.size > SMALL:
        return [*lengths, int(numbers.max())] if numbers.dtype.kind in "iu" else lengths
    if op.op_type in EACH_AXIS and numbers.ndim == 1 and len(numbers) in (op.x.rank, 2 * op.x.rank):
        each = len(numbers) // op.x.rank
        numbers = np.array([n for i, n in enumerate(numbers) if is_symbolic(op.x.shape[i // each])])
    kept = [n for n in map(float, numbers.ravel()) if abs(n) < LARGEST]
    return lengths + [int(n) for n in kept if n == int(n)]
