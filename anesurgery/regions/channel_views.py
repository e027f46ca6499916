"""Bring a value into the order of its twin, and a twin back into the order of the value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from anesurgery.mil import Maker, Var, fixed_shape
from anesurgery.ops import VIEWS
from anesurgery.regions.channel_wishes import wishes
from anesurgery.regions.layouts import Groups, Layout
from anesurgery.regions.views import seen_as

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
