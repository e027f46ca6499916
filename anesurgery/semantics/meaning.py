"""What is stated of an op type: where its results lie, where the axes of its operands go, and its work.

A row leaves out what is not known. Every row is held against the interpreter on random programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from anesurgery.mil import Operation, Var, operands
from anesurgery.semantics.constant_ends import ANY, Interval
from anesurgery.semantics.reading import ints

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
class Meaning:
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
