"""The pieces of a channels-first region: the interface of rules, and how values enter and leave it.

A rule of `channel_ops` looks at an op and at the layouts known so far (`Layouts`), and returns a `Step`. When
the region is built, the step gets the twins built so far (`Twins`). The pass `channels_first` implements both.
`entering_twin` builds the twin of a value from outside, `leaving_value` brings a twin back to the old form.
Twins, layouts, atoms and groups: see `layouts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

from anesurgery.mil import Array, Maker, Operation, Var, constant, fixed_shape, operands, producer, static_shape
from anesurgery.ops import BROADCASTING, UNARY, VIEWS
from anesurgery.regions.layouts import Groups, Layout
from anesurgery.regions.views import seen_as
from anesurgery.semantics.reading import axis_of, permutation


class Layouts(Protocol):
    """The layouts that are known so far, for use by a rule."""

    def get(self, var: Var) -> Layout | None:
        """Return the layout of a value; None if it has none yet."""

    def request(self, var: Var, layout: Layout | None) -> bool:
        """Request that a value enters the region with a layout; return False if it has another layout."""


class Twins(Protocol):
    """The twins that are built so far, for use by a step."""

    mb: Maker

    def in_shape(self, var: Var, shape: Sequence[int]) -> Var:
        """Return the twin of a value in the given shape."""

    def get(self, var: Var) -> Var:
        """Return the twin of a value in its own shape, which has four axes or more."""

    def constant(self, var: Var, layout: Layout, groups: Groups) -> Var:
        """Return the twin of a constant that is broadcast to a value of the layout."""

    def derived_constant(self, var: Var, what: str, make: Callable[[Array], Array]) -> Var:
        """Return a constant that `make` computes from another one; `what` is the key for sharing it."""

    def old_value(self, var: Var) -> Var:
        """Return a value without a twin in its old form."""


@dataclass(frozen=True)
class Step:
    """How one op of a region is built on the twins of its operands."""

    layouts: tuple[Layout | None, ...]
    """The layouts of the results; None for a result without a twin, which keeps its form."""
    build: Callable[[Twins], Sequence[Var | None]]
    """Builds the twins of the results; None for one that is the twin of the operand x, as for a view."""
    gaining_products: int = 0
    """The number of products that become faster with channels first."""
    replaced_upstream: tuple[Operation, ...] = ()
    """Ops upstream that the step replaces too.

    Such a step is checked by itself, since it computes the result in another way.
    """


Rule: TypeAlias = "Callable[[Operation, Layouts], Step | None]"


def operand_layouts(op: Operation, layout: Layout) -> dict[Var, Layout] | None:
    """Return operand -> the layout that it needs for the result to have `layout`; None if impossible."""
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


MOVES_NOTHING = VIEWS | {"transpose"}
"""Ops that need no op on twins: only the layout changes."""


class NamingMaker:
    """A maker that gives all ops that it builds the name "<value>_twin"."""

    def __init__(self, mb: Maker, value: Var) -> None:
        self._mb, self._name = mb, f"{value.name}_twin"

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._mb, name)
        if name in ("block", "before", "shared", "shared_value", "stored_like"):
            return attribute
        return partial(attribute, name=self._name)


def upstream_views(var: Var, layout: Layout) -> Iterator[tuple[Var, Layout]]:
    """Yield a value and the values that it is a view or transposition of, with their layouts."""
    while True:
        yield var, layout
        maker = producer(var, *MOVES_NOTHING)
        wished = None if maker is None else operand_layouts(maker, layout)
        if wished is None:
            return
        ((var, layout),) = wished.items()


def entering_twin(mb: Maker, var: Var, layout: Layout) -> Var:
    """Return the twin of a value from outside; it is built once for all readers."""

    def make(maker: Maker) -> Var:
        return build_twin(NamingMaker(maker, var), var, layout, layout.groups)

    if layout.is_view:
        return make(mb)
    return mb.shared_value(("twin", var, layout), [var], make)


def build_twin(mb: Maker, var: Var, layout: Layout, groups: Groups) -> Var:
    """Build the twin of a value with axes of the given groups, by one transposition at most."""
    if layout.is_view:
        return view(mb, var, twin_shape(layout, groups))
    if (perm := permutation_to_groups(layout, groups)) is not None:
        return mb.transpose(x=var, perm=perm)
    shape, perm = _atom_axes(layout)
    moved = mb.transpose(x=seen_as(mb, var, shape), perm=perm)
    return view(mb, moved, twin_shape(layout, groups))


def leaving_value(mb: Maker, twin: Var, old: Var, layout: Layout) -> Var:
    """Bring a twin back to the value's old form."""
    if layout.is_view:
        return view(mb, twin, fixed_shape(old))
    shape, perm = _atom_axes(layout)
    moved = view(mb, twin, [shape[p] for p in perm])
    moved = mb.transpose(x=moved, perm=[perm.index(i) for i in range(len(perm))])
    return view(mb, moved, fixed_shape(old))


def view(mb: Maker, var: Var, shape: Sequence[int]) -> Var:
    """Build a view; one axis of length 1 at position 2 is added or removed by expand_dims or squeeze."""
    old, new = fixed_shape(var), tuple(shape)
    seen: Var
    if new == (*old[:2], 1, *old[2:]):
        seen = mb.expand_dims(x=var, axes=[2])
    elif old == (*new[:2], 1, *new[2:]):
        seen = mb.squeeze(x=var, axes=[2])
    else:
        seen = seen_as(mb, var, new)
    return seen


def twin_shape(layout: Layout, groups: Groups) -> list[int]:
    """Return the shape of a twin with axes of these groups."""
    return [layout.length(group) for group in groups]


def permutation_to_groups(layout: Layout, groups: Groups) -> list[int] | None:
    """Return the permutation of the value's axes that gives these groups; None where there is none."""
    remaining, perm = list(range(len(layout.axes))), list[int]()
    for group in groups:
        fits = [axis for axis in remaining if layout.axes[axis] == group]
        if not fits:
            return None
        perm.append(fits[0])
        remaining.remove(fits[0])
    return perm if not remaining else None


def _atom_axes(layout: Layout) -> tuple[list[int], list[int]]:
    """Return the value's shape with one axis for each atom, and the order of these axes in the twin.

    A value of (2, 6) whose axes have the atoms (0,) and (1, 2) gives [2, 2, 3] and [0, 1, 2].
    """
    axes: list[tuple[int, ...]] = [(a,) for axis in layout.axes for a in axis]
    if all(len(axis) < 2 for axis in layout.axes):
        axes = list(layout.axes)  # axes of length 1 have no atom; they come first in the twin
    perm = sorted(range(len(axes)), key=lambda i: axes[i] or (-1,))
    return twin_shape(layout, tuple(axes)), perm
