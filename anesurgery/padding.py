"""How padding of the last axis travels: what makes it for free, carries it, takes it up, and what it holds.

A region begins at products with constant weights (pad the weight), goes on through elementwise ops, and ends
where a product with a constant weight takes the lanes up (pad the weight with zeros) or where they are cut.
The number in the padded lanes is followed, so that no infinity or NaN ever meets a zero weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from anesurgery.builder import Builder
from anesurgery.interpret.table import TABLE
from anesurgery.mil import (
    Array,
    Operation,
    Var,
    constant,
    consumers,
    next_op,
    np_dtype,
    static_shape,
)

UNARY = frozenset(
    {"abs", "atan", "ceil", "clip", "cos", "elu", "erf", "exp", "exp2", "floor", "gelu", "identity"}
    | {"leaky_relu", "linear_activation", "relu", "relu6", "round", "scaled_tanh", "sigmoid", "cast"}
    | {"sigmoid_hard", "sign", "silu", "sin", "softplus", "softsign", "sqrt", "square", "tanh"}
    | {"threshold", "thresholded_relu", "clamped_relu"}
)  # fmt: skip
"""Elementwise ops of one value, which carry padding. (Not log, rsqrt, inverse: at 0 epsilon decides.)"""

BINARY = frozenset({"add", "sub", "mul", "real_div", "pow", "maximum", "minimum"})
"""Elementwise ops of two values, which carry padding."""

BOUNDED = frozenset(
    {"add", "sub", "mul", "maximum", "minimum", "relu", "relu6", "gelu", "sigmoid", "tanh", "silu"}
    | {"clip", "erf", "softsign", "identity", "cast"}
)
"""Carriers that make no infinity or NaN of ordinary numbers: for lanes whose number is not known."""

LARGEST = 65504.0
"""The largest fp16 number: lanes stay within it also in an fp32 program."""

FILL = {("real_div", "y"): 1.0}
"""What pads a constant operand: 0, but where that would divide by zero."""


def padded_constant(mb: Builder, weight: Var, axis: int, size: int, fill: float = 0.0) -> Var:
    """A constant padded at the end of one axis, once for all who ask.

    Args:
        mb: the builder of the edit.
        weight: the constant.
        axis: which axis, not negative.
        size: its new length.
        fill: what it is padded with.
    """
    if weight.shape[axis] == size:
        return weight
    shape = list(weight.shape)
    shape[axis] = size - shape[axis]

    def make() -> Array:
        value = np.asarray(constant(weight))
        return np.concatenate([value, np.full(shape, fill, value.dtype)], axis)

    key = ("padded", weight, axis, size) if fill == 0 else ("padded", weight, axis, size, fill)
    return mb.shared(key, make, f"{weight.name}_padded")


def product_axis(op: Operation) -> tuple[Var, int] | None:
    """The constant weight of a product and the axis of it that becomes the last axis of the result."""
    if op.op_type == "linear" and constant(op.weight) is not None:
        return op.weight, 0
    if op.op_type == "matmul" and constant(op.y) is not None and op.y.rank >= 2:
        return op.y, op.y.rank - (2 if constant(op.transpose_y) else 1)
    return None


def contracted_axis(op: Operation, value: Var) -> tuple[Var, int] | None:
    """The constant weight of a product and the axis of it that meets the last axis of `value`."""
    found = product_axis(op)
    if found is None or op.x is not value:
        return None
    if op.op_type == "linear":
        return op.weight, 1
    if constant(op.transpose_x):
        return None
    return op.y, op.y.rank - (1 if constant(op.transpose_y) else 2)


def is_pointwise_conv(op: Operation) -> bool:
    """A convolution whose kernel is 1 in every axis, with stride 1 and no padding: it works lane by lane."""
    if op.op_type != "conv" or constant(op.weight) is None:
        return False
    spatial = op.weight.shape[2:]
    strides, pad = constant(op.inputs.get("strides")), constant(op.inputs.get("pad"))
    return (
        all(k == 1 for k in spatial)
        and (strides is None or bool(np.all(strides == 1)))
        and (constant(op.pad_type) != "custom" or pad is None or not np.any(pad))
    )


@dataclass
class Region:
    """The values whose last axis is padded together, from `length` to `size`."""

    length: int
    size: int
    lanes: dict[Var, float | None] = field(default_factory=dict)
    """What the padded lanes of each value hold; None: finite, but not known."""
    taken_up: dict[Operation, Var] = field(default_factory=dict)
    """Products that read a value of the region along the axis that they sum over."""

    entries: list[Var] = field(default_factory=list)
    """Values that are padded by an op of its own, for convolutions to read."""

    def grow(self, root: Operation) -> None:
        """Take in everything that can be reached from one product, or from the input of a convolution.

        A padded product holds zeros: its weight and its bias are padded with them.
        """
        queue = [root.x if root.op_type == "conv" else root.outputs[0]]
        self.lanes[queue[0]] = 0.0
        self.entries += queue if root.op_type == "conv" else []
        while queue:
            for reader in consumers(queue.pop()):
                if reader.enclosing_block is root.enclosing_block and reader not in self.taken_up:
                    queue += self._take(reader)

    def _take(self, op: Operation) -> list[Var]:
        """Let one reader carry or take up the padding; the values that the region gained."""
        if any(v in self.lanes for v in op.outputs):
            return []
        inside = [v for v in _run_time(op) if v in self.lanes]
        for value in inside:
            weight = contracted_axis(op, value)
            if weight is not None and weight[0].shape[weight[1]] == self.length:
                self.taken_up[op] = value
                return []
        if is_pointwise_conv(op) and inside:
            self.lanes[op.outputs[0]] = None  # its bias, which differs from channel to channel
            return [op.outputs[0]]
        gained = self._partners(op) if op.op_type in BINARY else []
        if gained is None or not self._carries(op):
            return self._undo(gained)
        lane = self._lane(op)
        if lane is not None and not abs(lane) <= LARGEST:
            return self._undo(gained)
        self.lanes[op.outputs[0]] = lane
        return [*gained, op.outputs[0]]

    def _undo(self, gained: list[Var] | None) -> list[Var]:
        for value in gained or []:
            del self.lanes[value]
        return []

    def _carries(self, op: Operation) -> bool:
        if op.op_type not in UNARY | BINARY or static_shape(op.outputs[0]) is None:
            return False
        return np_dtype(op.outputs[0]).kind == "f" and op.outputs[0].shape[-1] == self.length

    def _partners(self, op: Operation) -> list[Var] | None:
        """Values that `op` also needs padded and that a product can give so; None when one cannot."""
        gained: list[Var] = []
        for value in (op.x, op.y):
            if (
                constant(value) is not None
                or value in self.lanes
                or not value.rank
                or value.shape[-1] == 1
            ):
                continue
            maker = value.op
            if maker is None or product_axis(maker) is None or value.shape[-1] != self.length:
                return self._undo(gained) or None
            self.lanes[value] = 0.0
            gained.append(value)
        return gained

    def _lane(self, op: Operation) -> float | None:
        """What the padded lanes hold behind an op; infinite or NaN when they must not go through it."""
        arguments, known = self._arguments(op)
        if op.op_type == "mul" and any(self.lanes.get(v) == 0 for v in _run_time(op)):
            return 0.0  # zero times a finite number
        if not known:
            return None if op.op_type in BOUNDED else math.nan
        return float(TABLE[op.op_type].function(**arguments).reshape(-1)[0])

    def _arguments(self, op: Operation) -> tuple[dict[str, Any], bool]:
        """The inputs of an op as one lane sees them, and whether all are known."""
        arguments: dict[str, Any] = {}
        for name, value in op.inputs.items():
            if value is None:
                continue
            number = constant(value)
            if value in self.lanes:
                number = self.lanes[value]
            elif name in ("x", "y") and value.rank and value.shape[-1] == self.length > 1:
                number = FILL.get((op.op_type, name), 0.0)
            elif name in ("x", "y"):
                number = _only(number)
            else:
                arguments[name] = number.tolist() if hasattr(number, "tolist") else number
                continue
            if number is None:
                return {}, False
            arguments[name] = torch.tensor([float(number)])
        return arguments, True


def _run_time(op: Operation) -> list[Var]:
    values = [op.inputs.get(k) for k in ("x", "y")]
    return [v for v in values if isinstance(v, Var) and constant(v) is None]


def _only(value: Any) -> float | None:
    """The number that a constant holds everywhere, or None."""
    if value is None:
        return None
    array = np.asarray(value)
    return float(array.flat[0]) if array.size and bool((array == array.flat[0]).all()) else None


def build(mb: Builder, region: Region) -> dict[Var, Var]:
    """Build a region anew with padding; what replaces what: cut values, and results of what took it up."""
    maker = _Maker(mb, region)
    for value in region.lanes:
        maker.padded(value)
    replaced = {op.outputs[0]: maker.taken_up(op, value) for op, value in region.taken_up.items()}
    made = [v for v in region.lanes if v not in region.entries]
    return replaced | {v: maker.cut(v) for v in made if _leaves(v, region)}


def _leaves(value: Var, region: Region) -> bool:
    """Does anything outside the region read the value?"""
    inside = {v.op for v in region.lanes} | set(region.taken_up)
    return bool(value.consuming_blocks) or any(op not in inside for op in consumers(value))


class _Maker:
    """Makes the padded twins of a region's values, each right before the op that it replaces."""

    def __init__(self, mb: Builder, region: Region) -> None:
        self._mb, self._region = mb, region
        self._twins: dict[Var, Var] = {}

    def padded(self, value: Var) -> Var:
        """The padded twin of a value."""
        if value in self._region.entries and value not in self._twins:
            self._twins[value] = self._entry(value)
        if value not in self._twins:
            op = value.op
            assert op is not None
            product = product_axis(op)
            self._twins[value] = (
                self._carrier(op) if product is None else self._product(op, *product)
            )
        return self._twins[value]

    def _entry(self, value: Var) -> Var:
        """A value padded by an op, right where it becomes known."""
        ops = self._mb.block.operations
        first = next_op(value.op) if value.op is not None else next(iter(ops))
        amounts = [0] * (2 * value.rank - 1) + [self._region.size - self._region.length]
        zero = np_dtype(value).type(0)
        made: Var = self._mb.before(first).pad(
            x=value, pad=amounts, mode="constant", constant_val=zero
        )
        return made

    def _product(self, op: Operation, weight: Var, axis: int) -> Var:
        """A product with more columns."""
        at, size = self._mb.before(op), self._region.size
        inputs = _inputs(op)
        inputs["weight" if op.op_type == "linear" else "y"] = padded_constant(
            at, weight, axis, size
        )
        if (bias := op.inputs.get("bias")) is not None:
            inputs["bias"] = padded_constant(at, bias, 0, size)
        return _make(at, op, inputs)

    def _carrier(self, op: Operation) -> Var:
        """An elementwise op on padded operands."""
        at, region = self._mb.before(op), self._region
        inputs = _inputs(op)
        for name in ("x", "y"):
            value = op.inputs.get(name)
            if value is None:
                continue
            if value in region.lanes:
                inputs[name] = self.padded(value)
            elif (
                constant(value) is not None and value.rank and value.shape[-1] == region.length > 1
            ):
                fill = FILL.get((op.op_type, name), 0.0)
                inputs[name] = padded_constant(at, value, value.rank - 1, region.size, fill)
        return _make(at, op, inputs)

    def taken_up(self, op: Operation, value: Var) -> Var:
        """A product that sums over the padded axis, with zeros in its weight for the padding."""
        at = self._mb.before(op)
        found = contracted_axis(op, value)
        assert found is not None
        inputs = _inputs(op) | {"x": self.padded(value)}
        name = "weight" if op.op_type == "linear" else "y"
        inputs[name] = padded_constant(at, found[0], found[1], self._region.size)
        return _make(at, op, inputs)

    def cut(self, value: Var) -> Var:
        """The value without its padding."""
        assert value.op is not None
        at = self._mb.before(value.op)
        begin: Sequence[int] = [0] * value.rank
        result: Var = at.slice_by_index(x=self.padded(value), begin=begin, end=list(value.shape))
        return result


def _inputs(op: Operation) -> dict[str, Any]:
    return {k: v for k, v in op.inputs.items() if v is not None}


def _make(at: Builder, op: Operation, inputs: dict[str, Any]) -> Var:
    made: Var = getattr(at, op.op_type)(**inputs)
    return made
