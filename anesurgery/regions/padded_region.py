"""Find the values whose last axis is padded together, and build them anew.

A region begins at products with constant weights, goes on through elementwise ops, and ends where a product
takes the padding up (zeros in its weight) or where a value is cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from anesurgery.mil import (
    Maker,
    Operation,
    Var,
    constant,
    consumers,
    is_output,
    next_op,
    np_dtype,
    op_inputs,
    operands,
    static_shape,
)
from anesurgery.regions.padding import (
    BINARY,
    FILL,
    contracted_axis,
    contracts_both,
    lane_after,
    lanewise,
    padded_constant,
    product_axis,
)


@dataclass
class Region:
    """The values whose last axis is padded together, from `length` to `size`."""

    length: int
    size: int
    entry: Var | None = None
    """A value that is padded by an op of its own, for convolutions to read."""
    lanes: dict[Var, float | None] = field(default_factory=dict)
    """What the padded lanes of each value hold; None: finite, not known."""
    taken_up: dict[Operation, None] = field(default_factory=dict)
    """Products that sum over the padded axis (in order, as a set)."""

    @property
    def ops(self) -> list[Operation]:
        """The ops that are built anew, each after those whose results it reads."""
        makers = [v.op for v in self.lanes if v.op is not None and v is not self.entry]
        return in_order([*makers, *self.taken_up])

    @property
    def edges(self) -> list[Var]:
        """The values that something outside the region reads."""
        inside = set(self.ops)
        return [
            v
            for v in self.lanes
            if v is not self.entry and (is_output(v) or any(op not in inside for op in consumers(v)))
        ]


def find_region(root: Operation, size: int) -> Region:
    """The region around a product, or downstream of the input of a convolution.

    Args:
        root: the product.
        size: what the last axis of its result is padded to.
    """
    region = Region(root.outputs[0].shape[-1], size, root.x if root.op_type == "conv" else None)
    finder = _Finder(region, root)
    reached = finder.reach()
    if region.entry is not None:
        region.lanes[region.entry] = 0.0
    for op in in_order(v.op for v in reached if v.op is not None and v is not region.entry):
        wanted = [] if product_axis(op) is not None else lanewise(op, region.length) or []
        if all(v in region.lanes for v in wanted):
            lane = lane_after(op, region.lanes, region.length)
            if lane is None or not math.isnan(lane):
                region.lanes[op.outputs[0]] = lane
    region.taken_up = finder.takers()
    return region


def in_order(ops: Iterable[Operation]) -> list[Operation]:
    """The ops, each after those among them whose results it reads."""
    wanted, done = dict.fromkeys(ops), dict[Operation, None]()
    stack = [(op, False) for op in reversed(wanted)]
    while stack:
        op, ready = stack.pop()
        if ready:
            done[op] = None
        elif op not in done:
            stack.append((op, True))
            stack += [(v.op, False) for _, v in operands(op) if v.op is not None and v.op in wanted]
    return list(done)


class _Finder:
    """Follows padding from value to value."""

    def __init__(self, region: Region, root: Operation) -> None:
        self._region, self._root, self._block = region, root, root.enclosing_block

    def reach(self) -> dict[Var, None]:
        """Everything connected with the root, whatever its lanes would hold."""
        seeds = [self._region.entry] if self._region.entry is not None else self._root.outputs
        reached, queue = dict.fromkeys(seeds), list(seeds)
        while queue:
            for near in self._near(queue.pop()):
                if near not in reached:
                    reached[near] = None
                    queue.append(near)
        return reached

    def _near(self, value: Var) -> list[Var]:
        """The values that are padded together with this one."""
        near: list[Var] = []
        if value is not self._region.entry and value.op is not None:
            near += self._needed(value.op) or []
        for reader in consumers(value):
            if reader.enclosing_block is not self._block:
                continue
            if contracts_both(reader):
                near += [v for v in (reader.x, reader.y) if self._can_be_padded(v)]
            elif value in (self._needed(reader) or []):
                near += reader.outputs
        return near

    def _needed(self, op: Operation) -> list[Var] | None:
        """What must be padded for the op's result to be; None when that is not possible."""
        if product_axis(op) is not None or not self._fits(op.outputs[0]):
            return None
        needed = lanewise(op, self._region.length)
        return needed if needed and all(self._can_be_padded(v) for v in needed) else None

    def _fits(self, value: Var) -> bool:
        shape = static_shape(value)
        length = shape[-1] if shape else 0
        return length == self._region.length and np_dtype(value).kind == "f"

    def _can_be_padded(self, value: Var) -> bool:
        """Is the value made by an op of the block that makes or carries padding?"""
        if value is self._region.entry:
            return True
        op = value.op
        if op is None or op.enclosing_block is not self._block or not self._fits(value):
            return False
        return product_axis(op) is not None or bool(lanewise(op, self._region.length))

    def takers(self) -> dict[Operation, None]:
        """The products that sum over the last axis of what is padded."""
        readers = (op for value in self._region.lanes for op in consumers(value))
        return dict.fromkeys(op for op in readers if op.enclosing_block is self._block and self._takes_up(op))

    def _takes_up(self, op: Operation) -> bool:
        lanes = self._region.lanes
        if contracts_both(op):
            return op.x in lanes and op.y in lanes and 0.0 in (lanes[op.x], lanes[op.y])
        return product_axis(op) is not None and op.x in lanes and contracted_axis(op, op.x) is not None


def build(mb: Maker, region: Region) -> dict[Var, Var]:
    """Build a region anew with padding; what replaces what: cut values, and results of what took it up."""
    maker = _Maker(mb, region)
    for op in region.ops:
        maker.make(op)
    for value in region.edges:
        maker.cut(value)
    return maker.replaced


class _Maker:
    """Makes the padded twins of a region's values, each right before the op that it replaces."""

    def __init__(self, mb: Maker, region: Region) -> None:
        self._mb, self._region = mb, region
        self._twins: dict[Var, Var] = {}
        self.replaced: dict[Var, Var] = {}
        if region.entry is not None:
            self._twins[region.entry] = self._entry(region.entry)

    def make(self, op: Operation) -> None:
        """Build one op anew."""
        at, out = self._mb.before(op), op.outputs[0]
        wanted = self._wanted(op)
        inputs = {k: self._twins[v] if k in wanted else self._plain(v) for k, v in op_inputs(op).items()}
        twin: Var = getattr(at, op.op_type)(**inputs | self._constants(at, op))
        (self._twins if out in self._region.lanes else self.replaced)[out] = twin

    def _wanted(self, op: Operation) -> set[str]:
        """The inputs of which an op reads the padded twin."""
        lanes = self._region.lanes
        if op in self._region.taken_up:
            return {"x", "y"} if contracts_both(op) else {"x"}
        if product_axis(op) is not None:
            return set()
        needed = lanewise(op, self._region.length) or []
        return {k for k, v in op.inputs.items() if isinstance(v, Var) and v in needed and v in lanes}

    def _constants(self, at: Maker, op: Operation) -> dict[str, Var]:
        """The constant inputs that are padded."""
        region, size, weighs = self._region, self._region.size, product_axis(op)
        if weighs is None:
            return self._operands(at, op) if op.op_type in BINARY else {}
        weight, padded = weighs[0], {}
        if op.outputs[0] in region.lanes:
            weight = padded_constant(at, weight, weighs[1], size)
            if (bias := op.inputs.get("bias")) is not None:
                padded["bias"] = padded_constant(at, bias, 0, size)
        if op in region.taken_up:
            contracted = contracted_axis(op, op.x)
            assert contracted is not None
            weight = padded_constant(at, weight, contracted[1], size)
        return padded | {"weight" if op.op_type == "linear" else "y": weight}

    def _operands(self, at: Maker, op: Operation) -> dict[str, Var]:
        """Constants of the region's length in elementwise ops."""
        operands, region = {}, self._region
        for name in ("x", "y"):
            value: Var = op.inputs[name]
            if constant(value) is not None and value.rank and value.shape[-1] == region.length:
                fill = FILL.get((op.op_type, name), 0.0)
                operands[name] = padded_constant(at, value, value.rank - 1, region.size, fill)
        return operands

    def _plain(self, value: Any) -> Any:
        """A value without padding, as a new op may read it."""
        if not isinstance(value, Var) or value in self.replaced or value is self._region.entry:
            return self.replaced.get(value, value) if isinstance(value, Var) else value
        return self.cut(value) if value in self._region.lanes else value

    def cut(self, value: Var) -> Var:
        """A padded value without its padding, cut once."""
        if value not in self.replaced:
            assert value.op is not None
            at, end = self._mb.before(value.op), list(value.shape)
            twin = self._twins[value]
            self.replaced[value] = at.slice_by_index(x=twin, begin=[0] * value.rank, end=end)
        return self.replaced[value]

    def _entry(self, value: Var) -> Var:
        """A value padded by an op, right where it becomes known in the block."""
        block, op = self._mb.block, value.op
        here = op is not None and op.enclosing_block is block
        first = next_op(op) if op is not None and here else next(iter(block.operations))
        amounts = [0] * (2 * value.rank - 1) + [self._region.size - self._region.length]
        zero = np_dtype(value).type(0)
        return self._mb.before(first).pad(x=value, pad=amounts, mode="constant", constant_val=zero)
