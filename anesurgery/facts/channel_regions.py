"""Find the regions of a block that can go channels first, and build them anew.

A region begins at rows of channels that a product or a norm reads, and grows through all ops that have a form
on twins, downstream as far as it goes and upstream where that needs no more transpositions. What enters and
what leaves is transposed there; inside, views and transpositions of the old axes are nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from anesurgery.facts.channel_ops import step_of
from anesurgery.facts.channel_steps import Step, shape_of
from anesurgery.facts.channel_wishes import wishes
from anesurgery.facts.layouts import Groups, Layout, twin_of
from anesurgery.facts.views import seen_as
from anesurgery.mil import (
    Array,
    Block,
    Maker,
    Operation,
    Var,
    constant,
    consumers,
    is_output,
    np_dtype,
    operands,
    static_shape,
)
from anesurgery.ops import VIEWS

LARGEST = 80
"""Ops of a region that are rebuilt, and checked, in one edit."""

FREE = VIEWS | {"transpose"}
"""Ops of which a twin knows nothing."""


@dataclass(frozen=True)
class Region:
    """Ops that go channels first together, in order."""

    steps: dict[Operation, Step]
    layouts: dict[Var, Layout]

    @property
    def ops(self) -> list[Operation]:
        """In the order in which they run."""
        return list(self.steps)

    def read(self, op: Operation) -> list[Var]:
        """The values that an op reads as twins."""
        return list(dict.fromkeys(v for _, v in operands(op) if v in self.layouts))

    def made(self, op: Operation) -> list[Var]:
        """The values that an op makes as twins."""
        return [v for v, x in zip(op.outputs, self.steps[op].outs, strict=True) if x is not None]

    @property
    def entries(self) -> list[Var]:
        """The values that come from outside."""
        inside = {v for op in self.steps for v in self.made(op)}
        return [v for v in dict.fromkeys(v for op in self.steps for v in self.read(op)) if v not in inside]

    @property
    def outer(self) -> set[Var]:
        """What enters and the views of it, which something outside can go on reading."""
        free = set(self.entries)
        for op in self.steps:
            if op.op_type in FREE and op.x in free:
                free |= set(op.outputs)
        return free

    @property
    def exits(self) -> list[Var]:
        """The values that something outside reads."""
        free = self.outer
        return [v for op in self.steps for v in self.made(op) if v not in free and self.leaves(v)]

    def leaves(self, var: Var) -> bool:
        """Does something outside read a value?"""
        return is_output(var) or any(op not in self.steps for op in consumers(var))

    def moved(self, values: Iterable[Var]) -> list[Var]:
        """Those of some values that need a transposition to enter or leave."""
        return [v for v in values if not self.layouts[v].is_view]

    @property
    def products(self) -> int:
        """How many products it has."""
        return sum(step.products for step in self.steps.values())

    @property
    def transposes(self) -> int:
        """How many transpositions it makes superfluous."""
        kept = {v for v in self.outer if self.leaves(v)}
        return sum(op.op_type == "transpose" and op.outputs[0] not in kept for op in self.steps)

    @property
    def pays(self) -> bool:
        """Are there no more transpositions than products that gain from it and transpositions that go?"""
        return self.cut <= self.products + self.transposes - (not self.products)

    @property
    def cut(self) -> int:
        """How many transpositions stand at its ends."""
        return len(self.moved(self.entries)) + len(self.moved(self.exits))

    def first(self, count: int) -> Region:
        """Its first ops; views and transpositions, of which nothing is left, do not count."""
        left, steps = count, dict[Operation, Step]()
        for op, step in self.steps.items():
            left -= op.op_type not in FREE
            if left < 0:
                break
            steps[op] = step
        return Region(steps, self.layouts)


@dataclass
class _Finder:
    """Gives layouts to the values of a block."""

    block: Block
    layouts: dict[Var, Layout] = field(default_factory=dict)
    steps: dict[Operation, Step] = field(default_factory=dict)
    asked: dict[Var, Layout] = field(default_factory=dict)

    def get(self, var: Var) -> Layout | None:
        """The layout of a value, or None."""
        return self.layouts.get(var) or self.asked.get(var)

    def ask(self, var: Var, layout: Layout | None) -> bool:
        """Let a value enter with a layout, unless it has another one."""
        if layout is None or not layout.sizes or np_dtype(var).kind != "f" or static_shape(var) is None:
            return False
        return self.get(var) == layout if self.get(var) else not self.asked.update({var: layout})

    def find(self) -> list[Region]:
        """All regions, each one of ops that share twins."""
        self.downstream()
        while self.upstream():
            self.downstream()
        steps = {op: self.steps[op] for op in self.block.operations if op in self.steps}
        return [trimmed(region) for region in connected(Region(steps, self.layouts))]

    def downstream(self) -> None:
        """Take every op that has a form on the twins that are known."""
        for op in self.block.operations:
            if op not in self.steps:
                self.take(op, {})

    def take(self, op: Operation, wished: dict[Var, Layout]) -> bool:
        """Take an op, if it has a form, and gives the layouts that its results must have."""
        self.asked = dict(wished)
        step = step_of(op, self)
        if step is None:
            return False
        made = {v: x for v, x in zip(op.outputs, step.outs, strict=True) if x is not None}
        if op.op_type not in FREE and self.settled(op, made):
            return False
        if any(self.layouts.get(v, x) != x for v, x in made.items()):
            return False
        if any(v in self.layouts and v not in made for v in op.outputs):
            return False
        self.layouts |= self.asked | made
        self.steps[op] = step
        return True

    def settled(self, op: Operation, made: dict[Var, Layout]) -> bool:
        """Does an op work on twins already?"""
        read = [x for _, v in operands(op) if (x := self.get(v)) is not None]
        return all(x.is_view for x in (*read, *made.values()))

    def upstream(self) -> bool:
        """Take the makers of what enters, where that needs no more transpositions; was there one?"""
        found = False
        for var in list(self.layouts):
            op, layout = var.op, self.layouts[var]
            if op is None or op in self.steps or op.enclosing_block is not self.block:
                continue
            if layout.is_view and op.op_type not in FREE:
                continue
            wished = wishes(op, layout)
            new = None if wished is None else {v: x for v, x in wished.items() if v not in self.layouts}
            if new is not None and sum(_moves(v, x) for v, x in new.items()) <= _moves(var, layout):
                found = self.take(op, new) or found
        return found


def _moves(var: Var, layout: Layout) -> bool:
    """Does a value need a transposition to get a layout? Not if it was transposed from there."""
    while not layout.is_view:
        wished = wishes(var.op, layout) if var.op is not None and var.op.op_type in FREE else None
        if wished is None:
            return True
        ((var, layout),) = wished.items()
    return False


def connected(region: Region) -> list[Region]:
    """The parts of a region that share no twin."""
    parent: dict[Any, Any] = {}

    def root(item: Any) -> Any:
        while parent.setdefault(item, item) is not item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    for op in region.steps:
        for var in (*region.read(op), *region.made(op)):
            parent[root(op)] = root(var)
    parts: dict[Any, dict[Operation, Step]] = {}
    for op, step in region.steps.items():
        parts.setdefault(root(op), {})[op] = step
    return [Region(steps, region.layouts) for steps in parts.values()]


def trimmed(region: Region) -> Region:
    """Without ops at its end that make what leaves longer: it is transposed before them."""
    steps = dict(region.steps)
    for op in reversed(region.ops):
        left = Region(steps, region.layouts)
        made = left.made(op)
        if not made or any(reader in steps for v in made for reader in consumers(v)):
            continue
        others = [v for v in left.read(op) if v.op in steps and not left.leaves(v)]
        saved = sum(np.prod(shape_of(v)) for v in left.moved(made))
        added = sum(np.prod(shape_of(v)) for v in left.moved(others))
        if added < saved:
            del steps[op]
    return Region(steps, region.layouts)


_FOUND: WeakKeyDictionary[Block, tuple[list[Operation], list[Region]]] = WeakKeyDictionary()


def regions(block: Block) -> list[Region]:
    """The regions of a block, found once for each state of it."""
    ops = list(block.operations)
    known = _FOUND.get(block)
    if known is None or known[0] != ops:
        known = _FOUND[block] = ops, _Finder(block).find()
    return known[1]


def build(mb: Maker, region: Region) -> dict[Var, Var]:
    """Build a region anew; what replaces what: the values that leave it."""
    return _Build(mb, region).run()


class _Named:
    """A maker that names what it makes after a value."""

    def __init__(self, mb: Maker, value: Var) -> None:
        self._mb, self._name = mb, f"{value.name}_twin"

    def __getattr__(self, name: str) -> Any:
        made = getattr(self._mb, name)
        return made if name in ("block", "before", "shared", "shared_value") else partial(made, name=self._name)


class _Build:
    """Makes the twins, each right before the op that it replaces."""

    def __init__(self, mb: Maker, region: Region) -> None:
        self._start, self._region = mb, region
        self.mb: Any = mb
        self._twins: dict[Var, Var] = {}
        self._seen: dict[tuple[Var, tuple[int, ...]], Var] = {}
        self._replaced: dict[Var, Var] = {}

    def run(self) -> dict[Var, Var]:
        """All ops in order."""
        exits = set(self._region.exits)
        for op, step in self._region.steps.items():
            self.mb = _Named(self._start.before(op), op.outputs[0])
            for var, layout, made in zip(op.outputs, step.outs, step.build(self), strict=True):
                if layout is None:
                    assert made is not None
                    self._replaced[var] = made
                    continue
                self._twins[var] = self._twin(op.x) if made is None else made
                if var in exits:
                    self._replaced[var] = self._leave(var, layout)
        return self._replaced

    def _twin(self, var: Var) -> Var:
        if var not in self._twins:
            self._twins[var] = self._enter(var, self._region.layouts[var])
        return self._twins[var]

    def seen(self, var: Var, shape: Sequence[int]) -> Var:
        """The twin of a value in some shape."""
        key = self._twin(var), tuple(shape)
        if key not in self._seen:
            self._seen[key] = seen_as(self.mb, *key)
        return self._seen[key]

    def now(self, var: Var) -> Var:
        """The twin of a value in the shape that it has, which has four axes or more."""
        twin, layout = self._twin(var), self._region.layouts[var]
        return twin if twin.rank >= 4 else self.seen(var, _lengths(layout, layout.groups))

    def constant(self, var: Var, layout: Layout, groups: Groups) -> Var:
        """The twin of a constant that is broadcast to a value of the layout."""
        key = ("twin", var, layout, groups)
        return self.mb.shared(key, lambda: twin_of(np.asarray(constant(var)), layout, groups), var.name)

    def stored(self, var: Var, what: str, make: Callable[[Array], Array]) -> Var:
        """A constant made of another one."""
        return self.mb.shared((what, var), lambda: make(np.asarray(constant(var))), var.name)

    def plain(self, var: Var) -> Var:
        """A value that has no twin."""
        return self._replaced.get(var, var)

    def _enter(self, var: Var, layout: Layout) -> Var:
        """The twin of a value from outside."""

        def make(maker: Maker) -> Var:
            mb: Any = _Named(maker, var)
            shape, perm = _old_axes(layout)
            moved = seen_as(mb, var, shape)
            if perm != list(range(len(perm))):
                moved = mb.transpose(x=moved, perm=perm)
            return _view(mb, moved, _lengths(layout, layout.groups))

        if layout.is_view:
            return make(self.mb)
        made: Var = self.mb.shared_value(("twin", var, layout), [var], make)
        return made

    def _leave(self, var: Var, layout: Layout) -> Var:
        """A value in its old form, made from its twin."""
        shape, perm = _old_axes(layout)
        moved = _view(self.mb, self._twin(var), [shape[p] for p in perm])
        if perm != list(range(len(perm))):
            moved = self.mb.transpose(x=moved, perm=[perm.index(i) for i in range(len(perm))])
        return _view(self.mb, moved, shape_of(var))


def _view(mb: Maker, var: Var, shape: Sequence[int]) -> Var:
    """A view; an axis of length 1 between the others is put in or taken out by name."""
    old, new = shape_of(var), tuple(shape)
    made: Var
    if new == (*old[:2], 1, *old[2:]):
        made = mb.expand_dims(x=var, axes=[2])
    elif old == (*new[:2], 1, *new[2:]):
        made = mb.squeeze(x=var, axes=[2])
    else:
        made = seen_as(mb, var, new)
    return made


def _lengths(layout: Layout, groups: Groups) -> list[int]:
    return [layout.length(group) for group in groups]


def _old_axes(layout: Layout) -> tuple[list[int], list[int]]:
    """The value with an axis for each atom, and the order of these axes in the twin."""
    axes: list[tuple[int, ...]] = [(a,) for axis in layout.axes for a in axis]
    if all(len(axis) < 2 for axis in layout.axes):
        axes = list(layout.axes)  # its own, those of length 1 in front
    perm = sorted(range(len(axes)), key=lambda i: axes[i] or (-1,))
    if layout.is_view:
        return _lengths(layout, tuple(axes)), list(range(len(axes)))
    return _lengths(layout, tuple(axes)), perm
