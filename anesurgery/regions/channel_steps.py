"""One op of a channels-first region: what a rule is asked with, what it answers, and what it builds with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from anesurgery.mil import Array, Maker, Operation, Var
from anesurgery.regions.layouts import Groups, Layout


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
