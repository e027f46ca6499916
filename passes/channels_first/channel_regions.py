"""Find the regions of a block that can go channels first, and build them anew.

A region begins at rows of channels that a product or a norm reads, and grows through all ops that have a form
on twins, downstream as far as it goes and upstream where that needs no more transpositions. What enters and
what leaves is transposed there; inside, views and transpositions of the old axes are nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from anesurgery.mil import (
    Array,
    Block,
    Maker,
    Operation,
    Var,
    constant,
    consumers,
    fixed_shape,
    is_output,
    np_dtype,
    operands,
    static_shape,
)
from anesurgery.regions.channel_ops import step_of
from anesurgery.regions.channel_steps import (
    MOVES_NOTHING,
    NamingMaker,
    Step,
    entering_twin,
    leaving_value,
    operand_layouts,
    twin_shape,
    upstream_views,
)
from anesurgery.regions.layouts import Groups, Layout, twin_of
from anesurgery.regions.views import seen_as

LARGEST = 24
"""Ops of a region that are rebuilt, and checked, in one edit: a layer or two."""


@dataclass(frozen=True)
class Region:
    """Ops that go channels first together, in order."""

    steps: dict[Operation, Step]
    layouts: dict[Var, Layout]

    @property
    def ops(self) -> list[Operation]:
        """List them in the order in which they run."""
        return list(self.steps)

    def read(self, op: Operation) -> list[Var]:
        """The values that an op reads as twins."""
        return list(dict.fromkeys(v for _, v in operands(op) if v in self.layouts))

    def made(self, op: Operation) -> list[Var]:
        """The values that an op makes as twins."""
        return [v for v, x in zip(op.outputs, self.steps[op].layouts, strict=True) if x is not None]

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
            if op.op_type in MOVES_NOTHING and op.x in free:
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
        """Return the values that need a transposition to enter or leave."""
        return [v for v in values if not self.layouts[v].is_view]

    @property
    def products(self) -> int:
        """How many products it has."""
        return sum(step.gaining_products for step in self.steps.values())

    @property
    def transposes(self) -> int:
        """How many transpositions it makes superfluous."""
        kept = {v for v in self.outer if self.leaves(v)}
        return sum(op.op_type == "transpose" and op.outputs[0] not in kept for op in self.steps)

    @property
    def pays(self) -> bool:
        """Are there no more transpositions than products that gain from it and transpositions that go?"""
        gains = self.products or any(op in _LEFT for op in self.steps)  # goes on where another one ended
        return self.cut <= self.products + self.transposes - (not gains)

    @property
    def cut(self) -> int:
        """How many transpositions stand at its ends."""
        return len(self.moved(self.entries)) + len(self.moved(self.exits))

    def first(self, count: int) -> Region:
        """Return its first ops, up to one that is checked by itself, or that one; views do not count."""
        single = next((op for op, step in self.steps.items() if step.replaced_upstream), None)
        inner = set(self.steps[single].replaced_upstream) if single is not None else set()
        before = list(self.steps)[: None if single is None else list(self.steps).index(single)]
        others = [op for op in before if op not in inner]
        if single is not None and all(op.op_type in MOVES_NOTHING for op in others):
            return Region({op: self.steps[op] for op in [*before, single]}, self.layouts)
        return Region({op: self.steps[op] for op in self._up_to(others, count)}, self.layouts)

    def _up_to(self, ops: Sequence[Operation], count: int) -> Sequence[Operation]:
        """The first of some ops, cut where few values go on, so that layers which are alike are cut alike."""
        cost = list(accumulate(op.op_type not in MOVES_NOTHING for op in ops))
        if not ops or cost[-1] <= count // 2:
            return ops
        going = self._going(ops)
        if cost[-1] > count and self.moved(self.entries):
            ends = [i for i, n in enumerate(going) if n == 1 and 0 < cost[i] < count // 2]
            if ends:  # what comes after it is alike in all layers
                return ops[: ends[0] + 1]
        ends = [i for i in range(len(ops)) if count // 2 <= cost[i] <= count]
        return ops[: min(ends, key=going.__getitem__) + 1]

    def _going(self, ops: Sequence[Operation]) -> list[int]:
        """How many values go on after each op; one at least."""
        last = {v: i for i, op in enumerate(self.steps) for v in self.read(op)}
        place = {op: i for i, op in enumerate(self.steps)}
        values: set[Var] = set()
        widths = []
        for op in ops:
            values = {v for v in (*values, *self.read(op), *self.made(op)) if last.get(v, -1) > place[op]}
            widths.append(max(1, len(values)))
        return widths


@dataclass
class _Finder:
    """Gives layouts to the values of a block."""

    block: Block
    layouts: dict[Var, Layout] = field(default_factory=dict)
    steps: dict[Operation, Step] = field(default_factory=dict)
    asked: dict[Var, Layout] = field(default_factory=dict)
    laid: list[Var] = field(default_factory=list)
    """Values that got a layout since it was last looked who reads them."""
    ops: list[Operation] = field(default_factory=list)
    place: dict[Operation, int] = field(default_factory=dict)

    def get(self, var: Var) -> Layout | None:
        """The layout of a value, or None."""
        return self.layouts.get(var) or self.asked.get(var)

    def request(self, var: Var, layout: Layout | None) -> bool:
        """Let a value enter with a layout, unless it has another one."""
        if layout is None or not layout.sizes or np_dtype(var).kind != "f" or static_shape(var) is None:
            return False
        return self.get(var) == layout if self.get(var) else not self.asked.update({var: layout})

    def find(self) -> list[Region]:
        """All regions, each one of ops that share twins."""
        return self.grown(list(self.block.operations), set())

    def renew(self) -> list[Region]:
        """All regions after new ops took the place of some: what reads their results is looked at again."""
        ops = list(self.block.operations)
        there = set(ops)
        fresh = there.difference(self.ops)
        self.steps = {op: step for op, step in self.steps.items() if op in there}
        again = {op for op, step in self.steps.items() if step.replaced_upstream or _reads(op, fresh)}
        used = {v for op in self.steps for v in (*op.outputs, *(v for _, v in operands(op)))}
        self.layouts = {v: x for v, x in self.layouts.items() if v in used}
        for op in again:
            del self.steps[op]
        fresh |= again
        return self.grown(ops, fresh)

    def grown(self, ops: list[Operation], fresh: set[Operation]) -> list[Region]:
        """The regions after those of some ops that have a form are taken, or of all."""
        self.ops, self.place = ops, {op: i for i, op in enumerate(ops)}
        some = [op for op in ops if op in fresh] if fresh else ops
        self.layouts |= {op.outputs[i]: x for op in ops if op in _LEFT for i, x in _LEFT[op].items()}
        self.downstream(some)
        while self.upstream():
            self.downstream([op for v in self.laid for op in consumers(v)])
        steps = {op: self.steps[op] for op in ops if op in self.steps}
        return [trimmed(region) for region in connected(Region(steps, self.layouts))]

    def downstream(self, ops: Iterable[Operation]) -> None:
        """Take every op that has a form on the twins that are known, in order."""
        waiting = [self.place[op] for op in ops if op in self.place]
        heapify(waiting)
        while waiting:
            op = self.ops[heappop(waiting)]
            self.laid.clear()
            if op not in self.steps and self.take(op, {}):
                readers = {
                    r for v in self.laid for r in consumers(v) if r in self.place and r not in self.steps
                }
                for reader in readers:
                    heappush(waiting, self.place[reader])
        self.laid.clear()

    def take(self, op: Operation, wished: dict[Var, Layout]) -> bool:
        """Take an op, if it has a form, and gives the layouts that its results must have."""
        self.asked = dict(wished)
        step = step_of(op, self)
        if step is None:
            return False
        outs = {v: x for v, x in zip(op.outputs, step.layouts, strict=True) if x is not None}
        if op.op_type not in MOVES_NOTHING and self.settled(op, outs):
            return False
        if any(self.layouts.get(v, x) != x for v, x in outs.items()):
            return False
        if any(v in self.layouts and v not in outs for v in op.outputs):
            return False
        self.laid += [v for v in (*self.asked, *outs) if v not in self.layouts]
        self.layouts |= self.asked | outs
        self.steps[op] = step
        return True

    def settled(self, op: Operation, outs: dict[Var, Layout]) -> bool:
        """Does an op work on twins already, of values from outside?"""
        read = {v: x for _, v in operands(op) if (x := self.get(v)) is not None}
        return all(x.is_view for x in (*read.values(), *outs.values())) and not any(map(self.makes, read))

    def makes(self, var: Var) -> bool:
        """Is a value computed in a region?"""
        while var.op in self.steps and var.op.op_type in MOVES_NOTHING:
            var = var.op.x
        return var.op in self.steps

    def upstream(self) -> bool:
        """Take the makers of what enters, where that needs no more transpositions; was there one?"""
        grown = False
        for var in list(self.layouts):
            op, layout = var.op, self.layouts[var]
            if op is None or op in self.steps or op.enclosing_block is not self.block:
                continue
            if layout.is_view and op.op_type not in MOVES_NOTHING:
                continue
            wished = operand_layouts(op, layout)
            new = None if wished is None else {v: x for v, x in wished.items() if v not in self.layouts}
            if new is not None and sum(_moves(v, x) for v, x in new.items()) <= _moves(var, layout):
                grown = self.take(op, new) or grown
        return grown


def _reads(op: Operation, ops: set[Operation]) -> bool:
    """Does an op read what some ops make?"""
    return any(v.op in ops for _, v in operands(op))


def _moves(var: Var, layout: Layout) -> bool:
    """Does a value need a transposition to get a layout? Not if it was transposed from there."""
    return not any(place.is_view for _, place in upstream_views(var, layout))


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
        rest = Region(steps, region.layouts)
        results = rest.made(op)
        if not results or any(reader in steps for v in results for reader in consumers(v)):
            continue
        others = [v for v in rest.read(op) if v.op in steps and not rest.leaves(v)]
        saved = sum(np.prod(fixed_shape(v)) for v in rest.moved(results))
        added = sum(np.prod(fixed_shape(v)) for v in rest.moved(others))
        if added < saved:
            del steps[op]
    return Region(steps, region.layouts)


_LEFT: WeakKeyDictionary[Any, dict[int, Layout]] = WeakKeyDictionary()
"""Op -> the layouts of its results that left a region: ops after them can go on from there."""

_FOUND: dict[Block, tuple[_Finder, list[Region]]] = {}


def regions(block: Block) -> list[Region]:
    """The regions of a block, found once for each state of it, and kept until `forget`."""
    if block not in _FOUND:
        finder = _Finder(block)
        _FOUND[block] = finder, finder.find()
    finder, current = _FOUND[block]
    if finder.ops != list(block.operations):
        current = finder.renew()
        _FOUND[block] = finder, current
    return current


def forget() -> None:
    """Let go of the blocks whose regions were found."""
    _FOUND.clear()


def build(mb: Maker, region: Region) -> dict[Var, Var]:
    """Build a region on twins; return {value that leaves it: its new value}."""
    return _RegionBuilder(mb, region).run()


class _RegionBuilder:
    """Builds the twins of a region (`channel_steps.Twins`), each right before the op that it replaces."""

    def __init__(self, mb: Maker, region: Region) -> None:
        self._start, self._region = mb, region
        self.mb: Any = mb
        self._twins: dict[Var, Var] = {}
        self._seen: dict[tuple[Var, tuple[int, ...]], Var] = {}
        self._replaced: dict[Var, Var] = {}

    def run(self) -> dict[Var, Var]:
        """Build all ops in order; return {value that leaves the region: its new value}."""
        exits = set(self._region.exits)
        for op, step in self._region.steps.items():
            self.mb = NamingMaker(self._start.before(op), op.outputs[0])
            for var, layout, twin in zip(op.outputs, step.layouts, step.build(self), strict=True):
                if layout is None:
                    assert twin is not None
                    self._replaced[var] = twin
                    continue
                self._twins[var] = self._twin(op.x) if twin is None else twin
                if var in exits:
                    twin = leaving_value(self.mb, self._twin(var), var, layout)
                    self._replaced[var] = twin
                    assert twin.op is not None
                    _LEFT.setdefault(twin.op, {})[twin.op.outputs.index(twin)] = layout
        return self._replaced

    def _twin(self, var: Var) -> Var:
        if var not in self._twins:
            self._twins[var] = entering_twin(self.mb, var, self._region.layouts[var])
        return self._twins[var]

    def in_shape(self, var: Var, shape: Sequence[int]) -> Var:
        """Return the twin of a value in the given shape; each is built once."""
        key = self._twin(var), tuple(shape)
        if key not in self._seen:
            self._seen[key] = seen_as(self.mb, *key)
        return self._seen[key]

    def get(self, var: Var) -> Var:
        """Return the twin of a value in its own shape, which has four axes or more."""
        twin, layout = self._twin(var), self._region.layouts[var]
        return twin if twin.rank >= 4 else self.in_shape(var, twin_shape(layout, layout.groups))

    def constant(self, var: Var, layout: Layout, groups: Groups) -> Var:
        """Return the twin of a constant that is broadcast to a value of the layout."""
        key = ("twin", var, layout, groups)
        return self.mb.shared(key, lambda: twin_of(np.asarray(constant(var)), layout, groups), var.name)

    def derived_constant(self, var: Var, what: str, make: Callable[[Array], Array]) -> Var:
        """Return a constant that `make` computes from another one; shared under `what`."""
        return self.mb.shared((what, var), lambda: make(np.asarray(constant(var))), var.name)

    def old_value(self, var: Var) -> Var:
        """Return a value without a twin in its old form."""
        return self._replaced.get(var, var)
