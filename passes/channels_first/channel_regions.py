"""Find the regions of a block that can be computed channels first, and rebuild them.

The twin of a value is the same numbers in channels-first order: the twin of `(batch, tokens, channels)` is
`(batch, channels, 1, tokens)`. A `Layout` says where the axes of a value stand in its twin, and a `Step` how
an op is computed on twins (`channel_ops` has the table). A region begins where a product or a norm reads a
sequence. It grows downstream through every op that has a step, and upstream as long as that needs no more
transposes. Values are transposed where they enter and leave a region; inside, reshapes and transposes of the
old axes disappear.
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
"""The most ops of a region that one edit rebuilds and checks: a layer or two."""


@dataclass(frozen=True)
class Region:
    """Ops that become channels first together."""

    steps: dict[Operation, Step]
    """How each op is computed on twins, in the order in which they run."""
    layouts: dict[Var, Layout]
    """The layout of the twin of each value."""

    @property
    def ops(self) -> list[Operation]:
        """The ops in the order in which they run."""
        return list(self.steps)

    def read(self, op: Operation) -> list[Var]:
        """The values that an op reads as twins."""
        return list(dict.fromkeys(v for _, v in operands(op) if v in self.layouts))

    def made(self, op: Operation) -> list[Var]:
        """The values that an op makes as twins."""
        return [v for v, x in zip(op.outputs, self.steps[op].layouts, strict=True) if x is not None]

    @property
    def entries(self) -> list[Var]:
        """The values with twins that come from outside the region."""
        inside = {v for op in self.steps for v in self.made(op)}
        return [v for v in dict.fromkeys(v for op in self.steps for v in self.read(op)) if v not in inside]

    @property
    def entry_views(self) -> set[Var]:
        """The entries and their reshapes: readers outside the region can keep reading the old values."""
        views = set(self.entries)
        for op in self.steps:
            if op.op_type in MOVES_NOTHING and op.x in views:
                views |= set(op.outputs)
        return views

    @property
    def exits(self) -> list[Var]:
        """The values made in the region that are read outside."""
        views = self.entry_views
        return [v for op in self.steps for v in self.made(op) if v not in views and self.is_read_outside(v)]

    def is_read_outside(self, var: Var) -> bool:
        """Does an op outside the region, or the caller, read a value?"""
        return is_output(var) or any(op not in self.steps for op in consumers(var))

    def need_transpose(self, values: Iterable[Var]) -> list[Var]:
        """Return the values that need a transpose to enter or leave."""
        return [v for v in values if not self.layouts[v].is_view]

    @property
    def products(self) -> int:
        """The number of products in the region."""
        return sum(step.gaining_products for step in self.steps.values())

    @property
    def removed_transposes(self) -> int:
        """The number of transposes that the region no longer needs."""
        kept = {v for v in self.entry_views if self.is_read_outside(v)}
        return sum(op.op_type == "transpose" and op.outputs[0] not in kept for op in self.steps)

    @property
    def pays(self) -> bool:
        """Are the transposes at the ends outweighed by products that gain and transposes that go?"""
        gains = self.products or any(op in _EXIT_LAYOUTS for op in self.steps)  # it continues another region
        return self.end_transposes <= self.products + self.removed_transposes - (not gains)

    @property
    def end_transposes(self) -> int:
        """The number of transposes at the ends of the region."""
        return len(self.need_transpose(self.entries)) + len(self.need_transpose(self.exits))

    def first(self, count: int) -> Region:
        """Return the part of the region to rebuild first.

        It is an op that has to be checked alone, if the region begins with one; else about `count` ops before
        that op. Reshapes do not count.
        """
        single = next((op for op, step in self.steps.items() if step.replaced_upstream), None)
        inner = set(self.steps[single].replaced_upstream) if single is not None else set()
        before = list(self.steps)[: None if single is None else list(self.steps).index(single)]
        others = [op for op in before if op not in inner]
        if single is not None and all(op.op_type in MOVES_NOTHING for op in others):
            return Region({op: self.steps[op] for op in [*before, single]}, self.layouts)
        return Region({op: self.steps[op] for op in self._up_to(others, count)}, self.layouts)

    def _up_to(self, ops: Sequence[Operation], count: int) -> Sequence[Operation]:
        """Return the first ops, cut where few values are alive, so that equal layers are cut at the same op."""
        cost = list(accumulate(op.op_type not in MOVES_NOTHING for op in ops))
        if not ops or cost[-1] <= count // 2:
            return ops
        alive = self._live_counts(ops)
        if cost[-1] > count and self.need_transpose(self.entries):
            ends = [i for i, n in enumerate(alive) if n == 1 and 0 < cost[i] < count // 2]
            if ends:  # the ops after it are the same in all layers
                return ops[: ends[0] + 1]
        ends = [i for i in range(len(ops)) if count // 2 <= cost[i] <= count]
        return ops[: min(ends, key=alive.__getitem__) + 1]

    def _live_counts(self, ops: Sequence[Operation]) -> list[int]:
        """Return how many values are alive after each op, at least 1."""
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
    """Assigns layouts to the values of a block, and steps to its ops."""

    block: Block
    layouts: dict[Var, Layout] = field(default_factory=dict)
    """The layouts that are decided."""
    steps: dict[Operation, Step] = field(default_factory=dict)
    """The ops that are taken."""
    asked: dict[Var, Layout] = field(default_factory=dict)
    """The layouts that the op at hand would need from values that have none yet."""
    new_layouts: list[Var] = field(default_factory=list)
    """The values whose readers have not been visited since they got a layout."""
    ops: list[Operation] = field(default_factory=list)
    """The ops of the block when they were last visited."""
    index: dict[Operation, int] = field(default_factory=dict)
    """Their positions."""
    regions: list[Region] = field(default_factory=list)
    """The regions of these ops."""

    def get(self, var: Var) -> Layout | None:
        """Return the layout of a value, or None."""
        return self.layouts.get(var) or self.asked.get(var)

    def request(self, var: Var, layout: Layout | None) -> bool:
        """Ask for a layout of a value; is it free to have it?"""
        if layout is None or not layout.sizes or np_dtype(var).kind != "f" or static_shape(var) is None:
            return False
        if current := self.get(var):
            return current == layout
        self.asked[var] = layout
        return True

    def update(self) -> None:
        """Find all regions after an edit: visit new ops, and old ones that read their results; else all ops."""
        ops = list(self.block.operations)
        there = set(ops)
        to_visit = there.difference(self.ops)
        self.steps = {op: step for op, step in self.steps.items() if op in there}
        again = {op for op, step in self.steps.items() if step.replaced_upstream or _reads(op, to_visit)}
        used = {v for op in self.steps for v in (*op.outputs, *(v for _, v in operands(op)))}
        self.layouts = {v: x for v, x in self.layouts.items() if v in used}
        for op in again:
            del self.steps[op]
        self.ops, self.index = ops, {op: i for i, op in enumerate(ops)}
        exits = [op for op in ops if op in _EXIT_LAYOUTS]
        self.layouts |= {op.outputs[i]: x for op in exits for i, x in _EXIT_LAYOUTS[op].items()}
        self.grow_downstream([op for op in ops if op in to_visit or op in again] or ops)
        while self.grow_upstream():
            self.grow_downstream([op for v in self.new_layouts for op in consumers(v)])
        steps = {op: self.steps[op] for op in ops if op in self.steps}
        self.regions = [_without_costly_ends(part) for part in connected(Region(steps, self.layouts))]

    def grow_downstream(self, ops: Iterable[Operation]) -> None:
        """Take every op that has a step for the known layouts, and then readers of its results, in order."""
        waiting = [self.index[op] for op in ops if op in self.index]
        heapify(waiting)
        while waiting:
            op = self.ops[heappop(waiting)]
            self.new_layouts.clear()
            if op not in self.steps and self.take(op, {}):
                readers = {
                    r for v in self.new_layouts for r in consumers(v) if r in self.index and r not in self.steps
                }
                for reader in readers:
                    heappush(waiting, self.index[reader])
        self.new_layouts.clear()

    def take(self, op: Operation, asked: dict[Var, Layout]) -> bool:
        """Take an op if it has a step whose results have the layouts that are decided; was it taken?"""
        self.asked = dict(asked)
        step = step_of(op, self)
        if step is None:
            return False
        outs = {v: x for v, x in zip(op.outputs, step.layouts, strict=True) if x is not None}
        if op.op_type not in MOVES_NOTHING and self.is_channels_first(op, outs):
            return False
        if any(self.layouts.get(v, x) != x for v, x in outs.items()):
            return False
        if any(v in self.layouts and v not in outs for v in op.outputs):
            return False
        self.new_layouts += [v for v in (*self.asked, *outs) if v not in self.layouts]
        self.layouts |= self.asked | outs
        self.steps[op] = step
        return True

    def is_channels_first(self, op: Operation, outs: dict[Var, Layout]) -> bool:
        """Does an op already work channels first, on values from outside any region?"""
        read = {v: x for _, v in operands(op) if (x := self.get(v)) is not None}
        views = all(x.is_view for x in (*read.values(), *outs.values()))
        return views and not any(map(self.is_in_region, read))

    def is_in_region(self, var: Var) -> bool:
        """Does an op of a region compute a value, reshapes aside?"""
        while var.op in self.steps and var.op.op_type in MOVES_NOTHING:
            var = var.op.x
        return var.op in self.steps

    def grow_upstream(self) -> bool:
        """Take ops that make entering values, if that needs no more transposes; was any taken?"""
        taken = False
        for var in list(self.layouts):
            op, layout = var.op, self.layouts[var]
            if op is None or op in self.steps or op.enclosing_block is not self.block:
                continue
            if layout.is_view and op.op_type not in MOVES_NOTHING:
                continue
            needed = operand_layouts(op, layout)
            new = None if needed is None else {v: x for v, x in needed.items() if v not in self.layouts}
            if new is None:
                continue
            if sum(_needs_transpose(v, x) for v, x in new.items()) <= _needs_transpose(var, layout):
                taken = self.take(op, new) or taken
        return taken


def _reads(op: Operation, ops: set[Operation]) -> bool:
    """Does an op read a result of one of the ops?"""
    return any(v.op in ops for _, v in operands(op))


def _needs_transpose(var: Var, layout: Layout) -> bool:
    """Does a value need a transpose to get a layout? Not if it was transposed from that layout."""
    return not any(earlier.is_view for _, earlier in upstream_views(var, layout))


def connected(region: Region) -> list[Region]:
    """Split a region into parts that share no twin."""
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


def _without_costly_ends(region: Region) -> Region:
    """Drop last ops that enlarge the exits: the smaller values before them are transposed instead."""
    steps = dict(region.steps)
    for op in reversed(region.ops):
        rest = Region(steps, region.layouts)
        results = rest.made(op)
        if not results or any(reader in steps for v in results for reader in consumers(v)):
            continue
        others = [v for v in rest.read(op) if v.op in steps and not rest.is_read_outside(v)]
        saved = sum(np.prod(fixed_shape(v)) for v in rest.need_transpose(results))
        added = sum(np.prod(fixed_shape(v)) for v in rest.need_transpose(others))
        if added < saved:
            del steps[op]
    return Region(steps, region.layouts)


_EXIT_LAYOUTS: WeakKeyDictionary[Any, dict[int, Layout]] = WeakKeyDictionary()
"""Last op of a rebuilt region -> the layouts of its results by index; another region continues from them."""

_FINDERS: dict[Block, _Finder] = {}


def regions(block: Block) -> list[Region]:
    """Return the regions of a block; they are updated after an edit, and cached until `forget`."""
    finder = _FINDERS.setdefault(block, _Finder(block))
    if finder.ops != list(block.operations):
        finder.update()
    return finder.regions


def forget() -> None:
    """Drop the cached regions of all blocks."""
    _FINDERS.clear()


class RegionBuilder:
    """Builds the twins of a region, each right before the op that it replaces."""

    def __init__(self, mb: Maker, region: Region) -> None:
        self._start, self._region = mb, region
        self.mb: Any = mb
        self._twins: dict[Var, Var] = {}
        self._reshaped: dict[tuple[Var, tuple[int, ...]], Var] = {}
        self._replaced: dict[Var, Var] = {}

    def run(self) -> dict[Var, Var]:
        """Build all ops in order; return the new value for each value that leaves the region."""
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
                    _EXIT_LAYOUTS.setdefault(twin.op, {})[twin.op.outputs.index(twin)] = layout
        return self._replaced

    def _twin(self, var: Var) -> Var:
        if var not in self._twins:
            self._twins[var] = entering_twin(self.mb, var, self._region.layouts[var])
        return self._twins[var]

    def in_shape(self, var: Var, shape: Sequence[int]) -> Var:
        """Return the twin of a value, reshaped; each shape is built once."""
        key = self._twin(var), tuple(shape)
        if key not in self._reshaped:
            self._reshaped[key] = seen_as(self.mb, *key)
        return self._reshaped[key]

    def get(self, var: Var) -> Var:
        """Return the twin of a value, with at least four axes."""
        twin, layout = self._twin(var), self._region.layouts[var]
        return twin if twin.rank >= 4 else self.in_shape(var, twin_shape(layout, layout.groups))

    def constant(self, var: Var, layout: Layout, groups: Groups) -> Var:
        """Return the twin of a constant that is broadcast to a value of the layout."""
        key = ("twin", var, layout, groups)
        return self.mb.shared(key, lambda: twin_of(np.asarray(constant(var)), layout, groups), var.name)

    def derived_constant(self, var: Var, what: str, make: Callable[[Array], Array]) -> Var:
        """Return a constant that `make` computes from another one; `what` names it."""
        return self.mb.shared((what, var), lambda: make(np.asarray(constant(var))), var.name)

    def old_value(self, var: Var) -> Var:
        """Return a value without a twin, as it is now."""
        return self._replaced.get(var, var)
