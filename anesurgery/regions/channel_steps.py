"""One op of a channels-first region: what a rule is asked with, what it answers, and what it builds with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from anesurgery.mil import Array, Maker, Operation, Var, fixed_shape
from anesurgery.regions.layouts import Groups, Layout
from anesurgery.semantics.reading import ints


class Layouts(Protocol):
    """The layouts that are known, as a rule sees them."""

    def get(self, var: Var) -> Layout | None:
        """The layout of a value, or None."""

    def ask(self, var: Var, layout: Layout | None) -> bool:
        """Let a value enter the region with a layout, unless it has another one."""


class Twins(Protocol):
    """The twins that are built so far."""

    mb: Maker

    def seen(self, var: Var, shape: Sequence[int]) -> Var:
        """The twin of a value in some shape."""

    def now(self, var: Var) -> Var:
        """The twin of a value in the shape that it has, which has four axes or more."""

    def constant(self, var: Var, layout: Layout, groups: Groups) -> Var:
        """The twin of a constant that is broadcast to a value of the layout."""

    def stored(self, var: Var, what: str, make: Callable[[Array], Array]) -> Var:
        """A constant made of another one."""

    def plain(self, var: Var) -> Var:
        """A value that has no twin."""


@dataclass(frozen=True)
class Step:
    """An op of a region."""

    outs: tuple[Layout | None, ...]
    """The layouts of its results; None for one that keeps its form."""
    build: Callable[[Twins], Sequence[Var | None]]
    """Makes its results; None where the twin of `x` is that of the result as well."""
    products: int = 0
    """1 for a product that gains from it."""
    alone: tuple[Operation, ...] = ()
    """Ops upstream that it stands for, where it computes otherwise and is checked by itself."""


Rule: TypeAlias = "Callable[[Operation, Layouts], Step | None]"


def same_shape(var: Var, layout: Layout | None) -> bool:
    """Is it a layout of this value?"""
    return layout is not None and layout.shape == fixed_shape(var)


def axis_of(op: Operation) -> int:
    """The axis that an op works along, not negative."""
    rank = op.outputs[0].rank
    return (ints(op, "axis") or [-1])[0] % rank


def axes_of(op: Operation) -> list[int]:
    """The axes that an op works over, not negative; all where it names none."""
    rank = op.x.rank
    return [axis % rank for axis in ints(op, "axes") or range(rank)]


def permutation(op: Operation) -> list[int]:
    """The axes of a transpose, not negative."""
    return [axis % op.x.rank for axis in ints(op, "perm")]
