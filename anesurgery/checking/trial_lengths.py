"""Which lengths an edit or a model is tried at, and whether what is shown there holds for every length."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from anesurgery.checking.adversarial import constants_of
from anesurgery.checking.length_use import LengthUse, Use, use_of
from anesurgery.checking.lengths import (
    FARTHEST,
    NOTHING,
    SYMBOL_LENGTH,
    Declared,
    Lengths,
    least_length,
    length_of,
    sizes_of,
    symbols_of,
    with_lengths,
)
from anesurgery.mil import Operation, Var

APART_LENGTHS = (4, 2, 7, 5)
"""Lengths of the symbolic dimensions after the first one, each with one of its own, in turn."""
LONG = 17
"""Length of all of them in the end: what holds up to a limit only is seen there."""
EVERY = 48
"""Ranges of up to this many lengths are tried whole: so many short trials cost less than one long one."""
MOST_PERIOD = 16
"""Remainders of a length that are tried: strides of four layers that halve it. So far all lengths are."""
MOST_ADDED = 4
"""Constants that are added to lengths of which all sums and differences are tried: 81 of them. A choice."""
LONGEST = 20.0
"""The logarithm of more than any length."""
MOST = 1 << 22
"""Elements of all values, over all lengths beside the first few, up to which these are tried: a proof looks at
some 10 million in a second."""
MOST_TRIALS = 128
"""Lengths of an edit at most: a check by numbers takes some 10 ms at each, however small it is."""


@dataclass(frozen=True)
class Plan:
    """The lengths to try."""

    first: tuple[Lengths, ...] = ({},)
    """Each dimension with a length of its own, long ones, and 1: with all kinds of numbers."""
    others: tuple[Lengths, ...] = ()
    """The ends of what is declared, and the neighbours of what the length may meet."""
    alike: bool = True
    """Is the length used alike, whatever it is, so that a proof needs the first lengths alone?"""
    gap: str = ""
    """Why these say nothing about every length; empty where they do."""

    @property
    def all(self) -> tuple[Lengths, ...]:
        """All of them, the first ones first."""
        return *self.first, *self.others


def apart_lengths(symbols: Iterable[Any]) -> Lengths:
    """A length of its own for each symbol."""
    return dict(zip(symbols, itertools.cycle(APART_LENGTHS), strict=False))


def span(lengths: Iterable[Lengths]) -> tuple[int, int]:
    """The least and the largest among some lengths."""
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
    """The lengths to try of an edit or a model.

    Args:
        inputs: what has the dimensions.
        sides: the ops of both sides, in order.
        results: what others read of the ops.
        declared: what the model declares.
        most: elements of all values, over all lengths beside the first ones.
        twins: symbol of the second side -> the symbol of the inputs that is as long, where these differ.
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
        chosen = _distinct([_inside(one, declared) for one in plain])
        wanted, gap = _wanted(symbols, use, declared)
    left = [one for one in _distinct(wanted) if one not in chosen]
    kept = _affordable(left, cost, most)
    if len(kept) < len(left):
        gap = "longer lengths take too many numbers"
    return Plan(tuple(chosen), tuple(kept), alike, gap)


def _distinct(lengths: Iterable[Lengths]) -> list[Lengths]:
    return list({tuple(one.items()): one for one in lengths}.values())


def _inside(lengths: Lengths, declared: Declared) -> Lengths:
    """The nearest lengths that are declared."""
    ranges = {s: declared.range_of(s) for s in lengths}
    return {s: max(ranges[s][0], min(n, ranges[s][1] or n)) for s, n in lengths.items()}


def _wanted(symbols: Sequence[Any], use: LengthUse, declared: Declared) -> tuple[list[Lengths], str]:
    """The lengths that tell the most, and why they do not tell all."""
    inside = {s for d in use.sizes for s in d.free_symbols} & {*symbols}
    foreign = any(not d.free_symbols <= {*symbols} for d in use.sizes)
    met = list(symbols) if foreign or not inside else [s for s in symbols if s in inside]
    ranges = [declared.range_of(s) for s in met]
    low, ends = min(r[0] for r in ranges), [r[1] for r in ranges if r[1] is not None]
    high = max(ends) if len(ends) == len(ranges) else None
    rest = _inside(dict.fromkeys(symbols, SYMBOL_LENGTH), declared)

    alone = met if len(met) > 1 and (foreign or use.joint) else []
    least = {s: declared.range_of(s)[0] for s in met}

    def at(lengths: Iterable[int]) -> list[Lengths]:
        kept = sorted({n for n in lengths if low <= n and (high is None or n <= high)})
        together = [dict.fromkeys(met, n) for n in kept]
        one_by_one = [{**least, s: n} for s in alone for n in kept]
        return [_inside({**rest, **lengths}, declared) for lengths in (*together, *one_by_one)]

    gap = _gap(use, symbols, high) if use.use is not Use.LOCAL else ""
    if high is not None and high - low < EVERY:
        return at(range(low, high + 1)), gap if alone else ""
    around = {n for c in (*use.constants, *_solved(use, symbols)) for n in (c - 1, c, c + 1, 2 * c)}
    if use.use is Use.LOCAL:
        beyond = range(use.reach + 1, use.reach + 1 + min(use.period, MOST_PERIOD))
        around |= {low, *beyond, *(range(1, use.reach + 1) if use.reach <= MOST_PERIOD else ())}
        gap = "strides leave too many remainders of the length" if use.period > MOST_PERIOD else ""
        return at({*around, *(() if high is None or high > beyond[-1] else (high,))}), gap
    around |= {n for c in use.constants for n in _shifted(c, use.offsets[:MOST_ADDED])}
    return at(around if high is None else {*around, low, low + 1, high - 1, high}), gap


def _gap(use: LengthUse, symbols: Sequence[Any], high: int | None) -> str:
    """Why the lengths that constants meet do not tell all where numbers are made of lengths."""
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
    """A constant, and what else a length may be that meets it once some numbers are added or taken away."""
    met = {constant}
    for number in added:
        met |= {n + d for n in met for d in (-number, number)}
    return {abs(n) for n in met}


def _farther(symbols: Sequence[Any], ops: Sequence[Operation], declared: Declared) -> tuple[list[Lengths], str]:
    """Lengths for what is alike and not proved, and why they do not tell all: the ends, and beyond limits.

    Shares, sums of exponentials and norms of rows tell the length, and meet the constants of ops.
    """
    sizes = [abs(c) for c in constants_of(ops) if c]
    met = {2 * n for c in sizes for n in (c, 1 / c, c * c, math.exp(min(c, LONGEST)))}
    ranges = [declared.range_of(s) for s in symbols]
    ends = {low for low, _ in ranges} | {high for _, high in ranges if high is not None}
    wanted = [dict.fromkeys(symbols, round(n)) for n in sorted({*met, *ends}) if 1 <= n < FARTHEST]
    endless = any(high is None for _, high in ranges)
    gap = "the model declares no largest length" if endless else ""
    return [_inside(lengths, declared) for lengths in wanted], gap


def _solved(use: LengthUse, symbols: Sequence[Any]) -> list[int]:
    """The lengths of a symbol at which a size that is made of it meets a constant: 2 s + 1 meets 9 at 4."""
    grown = [
        d for d in use.sizes if not d.is_Symbol and len(d.free_symbols) == 1 and d.free_symbols <= {*symbols}
    ]
    return [least_length(d, next(iter(d.free_symbols)), c) for d in grown for c in use.constants]


def _affordable(wanted: Sequence[Lengths], cost_of: Callable[[Lengths], int], most: int) -> list[Lengths]:
    """The lengths that cost little, the longest of them first to be kept."""
    costs = [(cost_of(one), one) for one in wanted]
    total, kept = 0, list[Lengths]()
    for cost, one in sorted(costs, key=lambda pair: -pair[0]):
        if total + cost <= most and len(kept) < MOST_TRIALS:
            total += cost
            kept.append(one)
    return kept[::-1]


def counting(inputs: Sequence[Var], ops: Sequence[Operation]) -> Callable[[Lengths], int]:
    """Counts the elements of all values at some lengths; a symbol not among them is as long as the longest."""
    values = [*inputs, *(v for op in ops if op.op_type != "const" for v in op.outputs)]
    symbols, shapes = symbols_of(values), Counter(tuple(sizes_of(v)) for v in values)

    def elements(lengths: Lengths) -> int:
        with with_lengths(dict.fromkeys(symbols, max(lengths.values())) | dict(lengths)):
            return sum(count * math.prod(map(length_of, shape)) for shape, count in shapes.items())

    return elements
