"""One op of a channels-first region: what a rule is asked, and how values get the layouts that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

from anesurgery.mil import Array, Maker, Operation, Var, constant, fixed_shape, operands, static_shape
from anesurgery.ops import BROADCASTING, UNARY, VIEWS
from anesurgery.regions.layouts import Groups, Layout
from anesurgery.regions.views import seen_as
from anesurgery.semantics.reading import axis_of, permutation


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


def wishes(op: Operation, layout: Layout) -> dict[Var, Layout] | None:
    """For each operand that needs one, its layout; None where there is none, or the op has no such form."""
    if any(static_shape(v) is None for _, v in operands(op)):
        return None
    wished: dict[Var, Layout | None] = {}
    if op.op_type in VIEWS:
        wished = {op.x: layout.reshaped(fixed_shape(op.x))}
    elif op.op_type == "transpose":
        perm = permutation(op)
        wished = {op.x: layout.transposed([perm.index(i) for i in range(len(perm))])}
    elif op.op_type in (UNARY | BROADCASTING):
        named = [op.inputs[k] for k in ("x", "y", "cond", "a", "b") if isinstance(op.inputs.get(k), Var)]
        moving = [v for v in named if constant(v) is None and np.prod(v.shape) > 1]
        wished = {v: layout.restricted(fixed_shape(v)) for v in moving}
    elif op.op_type == "concat" and len(layout.axes[axis := axis_of(op)]) == 1:
        moving = [v for v in op.values if constant(v) is None]
        wished = {v: layout.resized(axis, int(v.shape[axis])) for v in moving}
    if not wished or any(x is None or not x.sizes for x in wished.values()):
        return None
    return {v: x for v, x in wished.items() if x is not None}


FREE = VIEWS | {"transpose"}
"""Ops of which a twin knows nothing."""


class Named:
    """A maker that names what it makes after a value."""

    def __init__(self, mb: Maker, value: Var) -> None:
        self._mb, self._name = mb, f"{value.name}_twin"

    def __getattr__(self, name: str) -> Any:
        maker = getattr(self._mb, name)
        return (
            maker
            if name in ("block", "before", "shared", "shared_value", "stored_like")
            else partial(maker, name=self._name)
        )


def upstream(var: Var, layout: Layout) -> Iterator[tuple[Var, Layout]]:
    """A value and the values that it is a view or a transposition of, with their layouts."""
    while True:
        yield var, layout
        wished = wishes(var.op, layout) if var.op is not None and var.op.op_type in FREE else None
        if wished is None:
            return
        ((var, layout),) = wished.items()


def entered(mb: Maker, var: Var, layout: Layout) -> Var:
    """The twin of a value from outside, made once for all who ask."""

    def make(maker: Maker) -> Var:
        return twin(Named(maker, var), var, layout, layout.groups)

    if layout.is_view:
        return make(mb)
    return mb.shared_value(("twin", var, layout), [var], make)


def twin(mb: Maker, var: Var, layout: Layout, groups: Groups) -> Var:
    """A value in the order of a layout, with axes of these groups, by one transposition at most."""
    if layout.is_view:
        return view(mb, var, lengths(layout, groups))
    if (perm := straight(layout, groups)) is not None:
        return mb.transpose(x=var, perm=perm)
    shape, perm = _old_axes(layout)
    moved = mb.transpose(x=seen_as(mb, var, shape), perm=perm)
    return view(mb, moved, lengths(layout, groups))


def left(mb: Maker, twin: Var, old: Var, layout: Layout) -> Var:
    """A value in its old form, made from its twin."""
    if layout.is_view:
        return view(mb, twin, fixed_shape(old))
    shape, perm = _old_axes(layout)
    moved = view(mb, twin, [shape[p] for p in perm])
    moved = mb.transpose(x=moved, perm=[perm.index(i) for i in range(len(perm))])
    return view(mb, moved, fixed_shape(old))


def view(mb: Maker, var: Var, shape: Sequence[int]) -> Var:
    """A view; an axis of length 1 between the others is put in or taken out by name."""
    old, new = fixed_shape(var), tuple(shape)
    seen: Var
    if new == (*old[:2], 1, *old[2:]):
        seen = mb.expand_dims(x=var, axes=[2])
    elif old == (*new[:2], 1, *new[2:]):
        seen = mb.squeeze(x=var, axes=[2])
    else:
        seen = seen_as(mb, var, new)
    return seen


def lengths(layout: Layout, groups: Groups) -> list[int]:
    """The shape of a twin with axes of these groups."""
    return [layout.length(group) for group in groups]


def straight(layout: Layout, groups: Groups) -> list[int] | None:
    """The order of the value's axes that gives these groups, if there is one."""
    left, perm = list(range(len(layout.axes))), list[int]()
    for group in groups:
        fits = [axis for axis in left if layout.axes[axis] == group]
        if not fits:
            return None
        perm.append(fits[0])
        left.remove(fits[0])
    return perm if not left else None


def _old_axes(layout: Layout) -> tuple[list[int], list[int]]:
    """The value with an axis for each atom, and the order of these axes in the twin."""
    axes: list[tuple[int, ...]] = [(a,) for axis in layout.axes for a in axis]
    if all(len(axis) < 2 for axis in layout.axes):
        axes = list(layout.axes)  # its own, those of length 1 in front
    perm = sorted(range(len(axes)), key=lambda i: axes[i] or (-1,))
    return lengths(layout, tuple(axes)), perm
