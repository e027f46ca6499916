"""Choose the lengths at which an edit or a model is tried, and say whether these decide for every length.

`lengths_to_try` reads the ops of both sides (`length_use`): if they treat every length alike, a proof at a few
lengths holds for all. Else it returns the ends of the declared range and the neighbours of each constant that
a length may meet (a window, a slice, a comparison), and a reason why other lengths remain unknown.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from anesurgery.checking.adversarial import constants_of
from anesurgery.checking.length_use import LengthUse, Use, use_of
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
from anesurgery.mil import Operation, Var

APART_LENGTHS = (4, 2, 7, 5)
"""The lengths of symbols when each one has its own."""
LONG_LENGTH = 17
"""A longer length for all symbols, which shows what holds only up to a limit."""
MOST_LENGTHS_IN_FULL = 48
"""Ranges of up to this many lengths are tried completely: so many short trials cost less than one long one."""
MOST_PERIOD = 16
"""The most remainders of a length that are tried: four layers with stride 2 have 16. Up to there all are."""
MOST_SUMS = 3**5
"""The most sums and differences of constants that are tried: so many have five different ones. A choice."""
MOST_ELEMENTS = 1 << 22
"""The most elements of all values over all lengths beside the first: a proof takes some 10 million a second."""
MOST_ELEMENTS_ALIKE = MOST_ELEMENTS // 4
"""The same where the ops treat every length alike: a proof needs no other length, so less time is spent."""
MOST_TRIALS = 128
"""The most lengths of an edit: a check by numbers takes some 10 ms at each, however small it is."""


@dataclass(frozen=True)
class TrialLengths:
    """The lengths to try."""

    first: tuple[Lengths, ...] = ({},)
    """Lengths that are tried with all kinds of numbers: one for each symbol, long ones, and 1."""
    others: tuple[Lengths, ...] = ()
    """All declared lengths where they are few; else the ends of their range, and the neighbours of constants
    that a length may meet."""
    alike: bool = True
    """Whether the ops treat every length alike, so that a proof needs the first lengths only."""
    gap: str = ""
    """Why other lengths remain unknown; "" where these decide for every length."""

    @property
    def all(self) -> tuple[Lengths, ...]:
        """All lengths, the first ones first."""
        return *self.first, *self.others


def apart_lengths(symbols: Iterable[Any]) -> Lengths:
    """Return a different length for each symbol."""
    return dict(zip(symbols, itertools.cycle(APART_LENGTHS), strict=False))


def lengths_to_try(
    inputs: Iterable[Var],
    sides: Sequence[Sequence[Operation]],
    results: Sequence[Var] = (),
    declared: Declared = NOTHING,
    renamed_symbols: Mapping[Any, Any] = MappingProxyType({}),
) -> TrialLengths:
    """Return the lengths at which an edit or a model is tried.

    Args:
        inputs: the values with symbolic dimensions.
        sides: the ops of both sides, in order.
        results: the results that others read.
        declared: the lengths that the model declares.
        renamed_symbols: symbol of the second side -> the equal symbol of the inputs, where these differ.
    """
    inputs = list(inputs)
    symbols = symbols_of(inputs)
    if not symbols:
        return TrialLengths()
    use = use_of(sides, results).renamed(renamed_symbols)
    ops = [op for side in sides for op in side]
    elements_at = _element_counter(inputs, ops)
    first = [
        dict.fromkeys(symbols, SYMBOL_LENGTH),
        apart_lengths(symbols),
        dict.fromkeys(symbols, LONG_LENGTH),
        dict.fromkeys(symbols, 1),
    ]
    if use.kind is Use.ALIKE:
        others, gap = _lengths_of_alike_ops(symbols, ops, declared)
    elif listed := declared.together(symbols):
        first, others, gap = [min(listed, key=elements_at)], listed, ""
    else:
        first = _distinct(map(declared.nearest, first))
        others, gap = _lengths_near_constants(symbols, use, declared)
    others = [lengths for lengths in _distinct(others) if lengths not in first]
    most = MOST_ELEMENTS_ALIKE if use.kind is Use.ALIKE else MOST_ELEMENTS
    affordable = _affordable(others, elements_at, most)
    if len(affordable) < len(others):
        gap = gap or "longer lengths take too many numbers"
    return TrialLengths(tuple(first), tuple(affordable), use.kind is Use.ALIKE, gap)


def _distinct(lengths: Iterable[Lengths]) -> list[Lengths]:
    return list({tuple(by_symbol.items()): by_symbol for by_symbol in lengths}.values())


def _lengths_near_constants(
    symbols: Sequence[Any], use: LengthUse, declared: Declared
) -> tuple[list[Lengths], str]:
    """Return the lengths that decide near constants, or all that are declared; and why they do not tell all.

    All symbols that ops use get each length together. Where ops may compare several, all combinations are tried
    if they are few; else each symbol gets each length alone, too: {s: n}, and all others at their least.
    """
    in_sizes = {s for d in use.sizes for s in d.free_symbols}
    has_unknown = not in_sizes <= {*symbols}  # a size that the inputs do not determine
    # all symbols, if it is not known from which of them the sizes come
    used = [*symbols] if has_unknown or not in_sizes else [s for s in symbols if s in in_sizes]
    each_alone = len(used) > 1 and (has_unknown or use.joint)
    low, high = united([declared.range_of(s) for s in used])
    if high is not None and high - low < MOST_LENGTHS_IN_FULL:
        numbers = {*range(low, high + 1)}  # all, so nothing is unknown but combinations of several lengths
        gap = ""
    else:
        numbers = _numbers_of_local_ops(use, low, high) | _numbers_near_constants(use, symbols)
        if use.kind is not Use.LOCAL and high is not None:
            numbers |= {low + 1, high - 1, high}
        gap = _gap(use, symbols, high)
    kept = sorted(n for n in numbers if low <= n and (high is None or n <= high))
    lengths = [dict.fromkeys(used, n) for n in kept]
    if each_alone and len(kept) ** len(used) <= MOST_TRIALS:
        lengths = [dict(zip(used, chosen, strict=True)) for chosen in itertools.product(kept, repeat=len(used))]
    elif each_alone:
        gap = gap or _gap(use, symbols, high) or "several lengths are compared with each other"
        least = {s: declared.range_of(s)[0] for s in used}
        lengths += [{**least, s: n} for s in used for n in kept]
    ordinary = dict.fromkeys(symbols, SYMBOL_LENGTH)
    return [declared.nearest({**ordinary, **by_symbol}) for by_symbol in lengths], gap


def _numbers_near_constants(use: LengthUse, symbols: Sequence[Any]) -> set[int]:
    """Return the neighbours and doubles of constants, and of the lengths at which a size meets one of them.

    The size 2 s + 1 meets 9 at the length 4. Constants are also shifted by those that are added to lengths.
    """
    of_one = [d for d in use.sizes if not d.is_Symbol and len(d.free_symbols) == 1]
    computed = [(d, s) for d in of_one for s in d.free_symbols if s in symbols]
    solved = [least_length(d, s, c) for d, s in computed for c in use.constants]
    met = {*use.constants, *solved}
    return {2 * c for c in met} | _neighbours({abs(c + n) for c in met for n in _sums(use.offsets)})


def _numbers_of_local_ops(use: LengthUse, low: int, high: int | None) -> set[int]:
    """Return the lengths at which places of local ops meet, and one for each remainder beyond their reach."""
    start = max(use.reach + 1, low)
    beyond = range(start, start + min(use.period, MOST_PERIOD))
    if use.reach <= MOST_LENGTHS_IN_FULL:
        within = {*range(1, use.reach + 1)}
    else:
        within = _neighbours({abs(n) for side in use.places for n in _sums(side, use.period)})
    # an end that is farther out has the remainder of a length that is tried
    last = {high} if high is not None and high <= beyond[-1] else set[int]()
    return {low, *within, *beyond} | last


def _neighbours(numbers: Iterable[int]) -> set[int]:
    """Return some numbers and those beside them."""
    return {n + d for n in numbers for d in (-1, 0, 1)}


def _sums(added: Iterable[int], period: int = 1) -> set[int]:
    """Return all sums and differences of some numbers, 0 among them; those of the first ones if there are many.

    Each number may be multiplied by a divisor of the period: 3 places behind a stride of 2 are 6 before it.
    """
    factors = [d for d in range(-period, period + 1) if d == 0 or period % d == 0]
    sums = {0}
    for number in added:
        sums = {n + d * number for n in sums for d in factors}
        if len(sums) > MOST_SUMS:
            break
    return sums


def _gap(use: LengthUse, symbols: Sequence[Any], high: int | None) -> str:
    """Return why the lengths near constants do not tell all."""
    far = use.reach > MOST_LENGTHS_IN_FULL
    reasons = {
        "strides leave too many remainders of the length": use.period > MOST_PERIOD,
        "too many constants name places along the length": far
        and any(len(_sums(side, use.period)) > MOST_SUMS for side in use.places),
    }
    if use.kind is not Use.LOCAL:
        reasons |= _reasons_of_numbers(use, symbols, high)
    return next((words for words, holds in reasons.items() if holds), "")


def _reasons_of_numbers(use: LengthUse, symbols: Sequence[Any], high: int | None) -> dict[str, bool]:
    """Return why the lengths near constants may not tell all where numbers are made of lengths, and whether."""
    return {
        "the model declares no largest length": high is None,
        "the length is multiplied or divided": use.kind is Use.SCALED,
        "several lengths are compared with each other": use.joint,
        "a length that follows from others is compared": any(
            not d.free_symbols <= {*symbols} for d in use.compared
        ),
        "the length looks up other constants": use.other_tables,
        "too many numbers are added to the length": len(_sums(use.offsets)) > MOST_SUMS,
    }


def _lengths_of_alike_ops(
    symbols: Sequence[Any], ops: Sequence[Operation], declared: Declared
) -> tuple[list[Lengths], str]:
    """Return lengths for what is alike and not proved: the ends, some beyond limits; and what they do not tell.

    Results of n numbers meet a constant c: a share 1 / n at n = 1 / c, a norm of ones sqrt(n) at c * c, the
    logarithm of a sum of exponentials log(n) at exp(c), a sum of ones at c.
    """
    constants = [abs(c) for c in constants_of(ops) if c]
    limits = {2 * n for c in constants for n in (c, 1 / c, c * c, math.exp(min(c, math.log(LONGEST_DRAWN))))}
    ranges = [declared.range_of(s) for s in symbols]
    ends = {low for low, _ in ranges} | {high for _, high in ranges if high is not None}
    numbers = [round(n) for n in sorted({*limits, *ends}) if 1 <= n < LONGEST_DRAWN]
    gap = "the model declares no largest length" if any(high is None for _, high in ranges) else ""
    return [declared.nearest(dict.fromkeys(symbols, n)) for n in numbers], gap


def _affordable(wanted: Sequence[Lengths], elements_at: Callable[[Lengths], int], most: int) -> list[Lengths]:
    """Return the lengths that have at most `most` elements together, longer ones first; in ascending order."""
    counts = [(elements_at(lengths), lengths) for lengths in wanted]
    total, kept = 0, list[Lengths]()
    for count, lengths in sorted(counts, key=lambda pair: -pair[0]):
        if total + count <= most and len(kept) < MOST_TRIALS:
            total += count
            kept.append(lengths)
    return kept[::-1]


def _element_counter(inputs: Sequence[Var], ops: Sequence[Operation]) -> Callable[[Lengths], int]:
    """Return a function that counts the elements of all values at some lengths.

    A symbol that is not among them is as long as the longest.
    """
    values = [*inputs, *(v for op in ops if op.op_type != "const" for v in op.outputs)]
    symbols, shapes = symbols_of(values), Counter(tuple(sizes_of(v)) for v in values)

    def elements(lengths: Lengths) -> int:
        with with_lengths(dict.fromkeys(symbols, max(lengths.values())) | dict(lengths)):
            return sum(count * math.prod(map(length_of, shape)) for shape, count in shapes.items())

    return elements
