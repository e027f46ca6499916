"""Pad the last axis of a region of values, and follow which number each op puts into the padded lanes.

`find_region(product, size)` collects the values that must be padded together: from products with constant
weights, through elementwise ops, to products that absorb the padding (zeros in their weight) or to values that
are cut again. `build` writes the region anew. A *lane* is an index along the last axis. Lanes hold 0 where
weights made the padding, then whatever each op makes of that, or None for "finite, but unknown": no infinity or
NaN may ever meet a zero weight. Dynamic values count as finite; where a product of the model overflows, a
padded sum may be NaN where the original is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from anesurgery import fp16
from anesurgery.mil import (
    Array,
    Maker,
    Operation,
    Var,
    constant,
    consumers,
    is_output,
    is_stored,
    next_op,
    np_dtype,
    op_inputs,
    operands,
    static_shape,
)
from anesurgery.ops import ARITHMETIC, OVERFLOWING, SINGULAR, UNARY, ZERO_PRESERVING
from anesurgery.regions.compressed_weights import edit_weight
from anesurgery.regions.weight_edits import Edit
from anesurgery.semantics.rows import results_at

CARRIERS = UNARY - SINGULAR - {"logical_not"}
"""Elementwise ops of one value that carry padding.

Singular ones do not, as an epsilon decides what they give at 0.
"""

BINARY = ARITHMETIC - {"floor_div", "mod"}
"""Elementwise ops of two values that carry padding."""

MAY_OVERFLOW = OVERFLOWING | {"pow", "real_div"}
"""Carriers that may turn an ordinary number into an infinity or NaN: their lanes must be known."""

LEAST_DIVISOR = 0.01
"""The smallest divisor allowed in a lane: rounding cannot make it 0."""

FILL = {("real_div", "y"): 1.0}
"""(op type, parameter) -> the fill of a constant operand where 0 would divide by zero."""


def padded_constant(mb: Maker, weight: Var, axis: int, size: int, fill: float = 0.0) -> Var:
    """Build a stored weight padded at the end of one axis, once for all who ask; compressed if it was.

    Args:
        mb: the builder of the edit.
        weight: the weight.
        axis: the axis, not negative.
        size: its new length.
        fill: the padding; other than 0 for plain constants only.
    """
    if weight.shape[axis] == size:
        return weight
    if not fill:
        return edit_weight(mb, weight, Edit.of(weight.shape).padded(axis, size), f"{weight.name}_padded")
    shape = list(weight.shape)
    shape[axis] = size - shape[axis]

    def make() -> Array:
        value = np.asarray(constant(weight))
        return np.concatenate([value, np.full(shape, fill, value.dtype)], axis)

    return mb.shared(("padded", weight, axis, size, fill), make, f"{weight.name}_padded")


class ProductAxis(NamedTuple):
    """An axis of the stored weight of a product."""

    weight: Var
    axis: int


def product_axis(op: Operation) -> ProductAxis | None:
    """Return the axis of a product's stored weight that is the last axis of the result; None for other ops."""
    if op.op_type == "linear" and is_stored(op.weight):
        bias = op.inputs.get("bias")
        fits = bias is None or (constant(bias) is not None and bias.shape == (op.weight.shape[0],))
        return ProductAxis(op.weight, 0) if fits else None
    if op.op_type == "matmul" and is_stored(op.y) and op.y.rank >= 2:
        return ProductAxis(op.y, op.y.rank - (2 if constant(op.transpose_y) else 1))
    return None


def contracted_axis(op: Operation, value: Var) -> ProductAxis | None:
    """Return the axis of a product's stored weight that meets the last axis of `value`; else None."""
    product = product_axis(op)
    if product is None or op.x is not value:
        return None
    if op.op_type == "linear":
        return ProductAxis(op.weight, 1)
    if constant(op.transpose_x):
        return None
    return ProductAxis(op.y, op.y.rank - (1 if constant(op.transpose_y) else 2))


def contracts_both(op: Operation) -> bool:
    """Does a product of two dynamic values sum over the last axis of both?"""
    if op.op_type != "matmul" or is_stored(op.x) or is_stored(op.y) or min(op.x.rank, op.y.rank) < 2:
        return False
    return bool(constant(op.transpose_y)) and not constant(op.transpose_x)


def is_pointwise_conv(op: Operation) -> bool:
    """Is an op a 1x1 convolution with stride 1 and no padding, which works on each lane separately?"""
    if op.op_type != "conv" or not is_stored(op.weight) or is_stored(op.x):
        return False
    spatial = op.weight.shape[2:]
    strides, pad = constant(op.inputs.get("strides")), constant(op.inputs.get("pad"))
    return (
        all(k == 1 for k in spatial)
        and (strides is None or bool(np.all(np.asarray(strides) == 1)))
        and (constant(op.pad_type) != "custom" or pad is None or not np.any(pad))
    )


def lanewise(op: Operation, length: int) -> list[Var] | None:
    """Return the values that must be padded for `op` to give a padded result; None where it cannot.

    Args:
        op: an op that is not a product with a constant weight.
        length: the length of the last axis of its result.
    """
    if op.op_type in CARRIERS:
        return [op.x]
    if op.op_type in BINARY:
        both = [v for v in (op.x, op.y) if constant(v) is None]
        return [v for v in both if v.rank and v.shape[-1] == length]
    if is_pointwise_conv(op):
        return [op.x]
    if op.op_type == "matmul" and not is_stored(op.y) and not constant(op.transpose_y):
        return [op.y] if op.y.rank >= 2 else None
    return None


def lane_after(op: Operation, lanes: Mapping[Var, float | None], length: int) -> float | None:
    """Return what padded lanes of an op's result hold; None: finite, unknown; NaN: it must not be padded.

    Args:
        op: an op that is `lanewise` or a product with a constant weight.
        lanes: padded value -> what its lanes hold.
        length: the length of the last axis before padding.
    """
    if product_axis(op) is not None:
        return 0.0  # its weight and its bias are padded with zeros
    if op.op_type == "matmul":
        return 0.0 if lanes[op.y] == 0 else None
    if op.op_type == "conv":
        return 0.0 if lanes[op.x] == 0 and op.inputs.get("bias") is None else None
    numbers = {k: _lane_of_operand(op, k, lanes, length) for k in ("x", "y") if op.inputs.get(k) is not None}
    if any(n is not None and not math.isfinite(n) for n in numbers.values()):
        return math.nan
    if op.op_type == "mul" and 0.0 in numbers.values():
        return 0.0
    is_safe = _is_safe(op, numbers)
    if None not in numbers.values() and is_safe:
        return _lane_result(op, numbers)
    if op.op_type == "real_div" and is_safe:  # an unknown number over a divisor that is not near 0
        return None
    return math.nan if op.op_type in MAY_OVERFLOW else None


def _lane_of_operand(op: Operation, name: str, lanes: Mapping[Var, Any], length: int) -> float | None:
    """Return what an operand holds in the padded lanes; None: unknown; NaN: a constant is not finite."""
    value: Var = op.inputs[name]
    if value in lanes:
        return lanes[value]
    if value.rank and value.shape[-1] == length:
        return FILL.get((op.op_type, name), 0.0)
    stored = constant(value)
    if stored is None:
        return None
    array = np.asarray(stored, np.float64)
    if not np.isfinite(array).all():
        return math.nan
    return float(array.flat[0]) if bool((array == array.flat[0]).all()) else None


def _is_safe(op: Operation, numbers: Mapping[str, float | None]) -> bool:
    """Is the result finite even if a number is a little off by rounding?"""
    y = numbers.get("y")
    if op.op_type == "real_div":
        divisor = constant(op.y) if y is None else y
        return divisor is not None and bool(np.min(np.abs(divisor)) >= LEAST_DIVISOR)
    if op.op_type == "pow":
        x = numbers["x"]
        return x is not None and y is not None and (x >= LEAST_DIVISOR or (y > 0 and y == int(y)))
    return True


def _lane_result(op: Operation, numbers: Mapping[str, float | None]) -> float | None:
    """Compute the op on one lane; None where the result may be subnormal or is unknown."""
    if op.op_type in ZERO_PRESERVING and numbers["x"] == 0:
        return 0.0
    results = results_at(op, {k: [n] for k, n in numbers.items() if n is not None})
    if results is None:
        return None
    (lane,) = results
    if not abs(lane) <= fp16.LARGEST:
        return math.nan
    return lane if lane == 0 or abs(lane) >= fp16.NORMAL else None


@dataclass
class Region:
    """The values whose last axis is padded together, from `length` to `size`."""

    length: int
    size: int
    entry: Var | None = None
    """The value that an op of its own pads, for convolutions to read."""
    lanes: dict[Var, float | None] = field(default_factory=dict)
    """Padded value -> what its padded lanes hold; None: finite, unknown."""
    absorbing_products: dict[Operation, None] = field(default_factory=dict)
    """Products that sum over the padded axis, so that padding of zeros disappears in them (an ordered set)."""

    @property
    def ops(self) -> list[Operation]:
        """The ops that are built again, each after those whose results it reads."""
        makers = [v.op for v in self.lanes if v.op is not None and v is not self.entry]
        return in_reading_order([*makers, *self.absorbing_products])

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
    """Return the region around a product, or downstream of the input of a convolution.

    Args:
        root: the product.
        size: the padded length of the last axis of its result.
    """
    region = Region(root.outputs[0].shape[-1], size, root.x if root.op_type == "conv" else None)
    finder = _Finder(region, root)
    reached = finder.reach()
    if region.entry is not None:
        region.lanes[region.entry] = 0.0
    for op in in_reading_order(v.op for v in reached if v.op is not None and v is not region.entry):
        needed = [] if product_axis(op) is not None else lanewise(op, region.length) or []
        if all(v in region.lanes for v in needed):
            lane = lane_after(op, region.lanes, region.length)
            if lane is None or not math.isnan(lane):
                region.lanes[op.outputs[0]] = lane
    region.absorbing_products = finder.absorbing_products()
    return region


def in_reading_order(ops: Iterable[Operation]) -> list[Operation]:
    """Return the ops in an order in which each follows those among them whose results it reads."""
    chosen, done = dict.fromkeys(ops), dict[Operation, None]()
    stack = [(op, False) for op in reversed(chosen)]
    while stack:
        op, ready = stack.pop()
        if ready:
            done[op] = None
        elif op not in done:
            stack.append((op, True))
            stack += [(v.op, False) for _, v in operands(op) if v.op is not None and v.op in chosen]
    return list(done)


class _Finder:
    """Finds the values that are padded together."""

    def __init__(self, region: Region, root: Operation) -> None:
        self._region, self._root, self._block = region, root, root.enclosing_block

    def reach(self) -> dict[Var, None]:
        """Return everything connected with the root, whatever its lanes would hold."""
        seeds = [self._region.entry] if self._region.entry is not None else self._root.outputs
        reached, queue = dict.fromkeys(seeds), list(seeds)
        while queue:
            for neighbour in self._near(queue.pop()):
                if neighbour not in reached:
                    reached[neighbour] = None
                    queue.append(neighbour)
        return reached

    def _near(self, value: Var) -> list[Var]:
        """Return the values that must be padded together with this one."""
        neighbours: list[Var] = []
        if value is not self._region.entry and value.op is not None:
            neighbours += self._needed(value.op) or []
        for reader in consumers(value):
            if reader.enclosing_block is not self._block:
                continue
            if contracts_both(reader):
                neighbours += [v for v in (reader.x, reader.y) if self._can_be_padded(v)]
            elif value in (self._needed(reader) or []):
                neighbours += reader.outputs
        return neighbours

    def _needed(self, op: Operation) -> list[Var] | None:
        """Return what must be padded for the op's result to be padded; None where that is not possible."""
        if product_axis(op) is not None or not self._fits(op.outputs[0]):
            return None
        needed = lanewise(op, self._region.length)
        return needed if needed and all(self._can_be_padded(v) for v in needed) else None

    def _fits(self, value: Var) -> bool:
        """Is a value a float whose last axis has the region's length?"""
        shape = static_shape(value)
        length = shape[-1] if shape else 0
        return length == self._region.length and np_dtype(value).kind == "f"

    def _can_be_padded(self, value: Var) -> bool:
        """Does an op of the block that makes or carries padding compute the value?"""
        if value is self._region.entry:
            return True
        op = value.op
        if op is None or op.enclosing_block is not self._block or not self._fits(value):
            return False
        return product_axis(op) is not None or bool(lanewise(op, self._region.length))

    def absorbing_products(self) -> dict[Operation, None]:
        """Return the products that sum over the last axis of padded values."""
        readers = (op for value in self._region.lanes for op in consumers(value))
        return dict.fromkeys(
            op for op in readers if op.enclosing_block is self._block and self._absorbs_padding(op)
        )

    def _absorbs_padding(self, op: Operation) -> bool:
        """Does a product sum over the padded axis, with lanes that add 0?"""
        lanes = self._region.lanes
        if contracts_both(op):
            return op.x in lanes and op.y in lanes and 0.0 in (lanes[op.x], lanes[op.y])
        return product_axis(op) is not None and op.x in lanes and contracted_axis(op, op.x) is not None


def build(mb: Maker, region: Region) -> dict[Var, Var]:
    """Build a region with padding.

    Returns:
        Old value -> the value that replaces it: values without their padding, and results of products that
        absorb the padding.
    """
    maker = _RegionBuilder(mb, region)
    for op in region.ops:
        maker.make(op)
    for value in region.edges:
        maker.cut(value)
    return maker.replaced


class _RegionBuilder:
    """Builds the padded twins of a region's values, each right before the op that it replaces."""

    def __init__(self, mb: Maker, region: Region) -> None:
        self._mb, self._region = mb, region
        self._twins: dict[Var, Var] = {}
        self.replaced: dict[Var, Var] = {}
        if region.entry is not None:
            self._twins[region.entry] = self._entry(region.entry)

    def make(self, op: Operation) -> None:
        """Build one op on padded operands."""
        maker, out = self._mb.before(op), op.outputs[0]
        padded = self._padded_parameters(op)
        inputs = {k: self._twins[v] if k in padded else self._plain(v) for k, v in op_inputs(op).items()}
        twin: Var = getattr(maker, op.op_type)(**inputs | self._constants(maker, op))
        (self._twins if out in self._region.lanes else self.replaced)[out] = twin

    def _padded_parameters(self, op: Operation) -> set[str]:
        """Return the parameters of an op for which it reads the padded twin."""
        lanes = self._region.lanes
        if op in self._region.absorbing_products:
            return {"x", "y"} if contracts_both(op) else {"x"}
        if product_axis(op) is not None:
            return set()
        needed = lanewise(op, self._region.length) or []
        return {k for k, v in op.inputs.items() if isinstance(v, Var) and v in needed and v in lanes}

    def _constants(self, at: Maker, op: Operation) -> dict[str, Var]:
        """Return the constant inputs, padded."""
        region, size, product = self._region, self._region.size, product_axis(op)
        if product is None:
            return self._operands(at, op) if op.op_type in BINARY else {}
        weight, padded = product.weight, {}
        if op.outputs[0] in region.lanes:
            weight = padded_constant(at, weight, product.axis, size)
            if (bias := op.inputs.get("bias")) is not None:
                padded["bias"] = padded_constant(at, bias, 0, size)
        if op in region.absorbing_products:
            contracted = contracted_axis(op, op.x)
            assert contracted is not None
            weight = padded_constant(at, weight, contracted.axis, size)
        return padded | {"weight" if op.op_type == "linear" else "y": weight}

    def _operands(self, at: Maker, op: Operation) -> dict[str, Var]:
        """Return the padded constants of the region's length in elementwise ops."""
        operands, region = {}, self._region
        for name in ("x", "y"):
            value: Var = op.inputs[name]
            if constant(value) is not None and value.rank and value.shape[-1] == region.length:
                fill = FILL.get((op.op_type, name), 0.0)
                operands[name] = padded_constant(at, value, value.rank - 1, region.size, fill)
        return operands

    def _plain(self, value: Any) -> Any:
        """Return an input of an op as a new op may read it: of a padded value, the one without padding."""
        if not isinstance(value, Var):
            return value
        is_padded = value in self._region.lanes and value is not self._region.entry
        return self.cut(value) if is_padded else self.replaced.get(value, value)

    def cut(self, value: Var) -> Var:
        """Return a padded value without its padding; it is cut once."""
        if value not in self.replaced:
            assert value.op is not None
            at, end = self._mb.before(value.op), list(value.shape)
            twin = self._twins[value]
            self.replaced[value] = at.slice_by_index(x=twin, begin=[0] * value.rank, end=end)
        return self.replaced[value]

    def _entry(self, value: Var) -> Var:
        """Pad a value by an op, right after it is computed in the block."""
        block, op = self._mb.block, value.op
        here = op is not None and op.enclosing_block is block
        first = next_op(op) if op is not None and here else next(iter(block.operations))
        amounts = [0] * (2 * value.rank - 1) + [self._region.size - self._region.length]
        zero = np_dtype(value).type(0)
        return self._mb.before(first).pad(x=value, pad=amounts, mode="constant", constant_val=zero)
