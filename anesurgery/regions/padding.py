"""How padding of the last axis goes through ops: which weights make it, who carries it, what it then holds.

The number in the padded lanes is followed, so that no infinity or NaN ever meets a zero weight: 0 where
weights made the padding, then what each op makes of it, or "finite, not known". Dynamic values count as
finite; where a product of the model overflows, a padded sum may be NaN in place of infinite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from anesurgery.mil import Array, Maker, Operation, Var, constant, is_stored
from anesurgery.ops import ARITHMETIC, OVERFLOWING, SINGULAR, UNARY, ZERO_PRESERVING
from anesurgery.regions.compressed_weights import edit_weight
from anesurgery.regions.weight_edits import Edit
from anesurgery.semantics.computed import results_at
from anesurgery.semantics.constant_ends import LARGEST, NORMAL

CARRIERS = UNARY - SINGULAR - {"logical_not"}
"""Elementwise ops of one value, which carry padding; at 0 an epsilon decides what the singular ones make."""

BINARY = ARITHMETIC - {"floor_div", "mod"}
"""Elementwise ops of two values, which carry padding."""

WILD = OVERFLOWING | {"pow", "real_div"}
"""Carriers that may make an infinity or NaN of an ordinary number: they need a number that is known."""

DIVISOR = 0.01
"""Smallest number of a lane that is divided by: rounding cannot make a 0 of it."""

FILL = {("real_div", "y"): 1.0}
"""What pads a constant operand: 0, but where that would divide by zero."""


def padded_constant(mb: Maker, weight: Var, axis: int, size: int, fill: float = 0.0) -> Var:
    """A stored weight padded at the end of one axis, once for all who ask; compressed if it was.

    Args:
        mb: the builder of the edit.
        weight: the weight.
        axis: which axis, not negative.
        size: its new length.
        fill: what it is padded with; other than 0 for plain constants only.
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


def product_axis(op: Operation) -> tuple[Var, int] | None:
    """The stored weight of a product and the axis of it that becomes the last axis of the result."""
    if op.op_type == "linear" and is_stored(op.weight):
        bias = op.inputs.get("bias")
        fits = bias is None or (constant(bias) is not None and bias.shape == (op.weight.shape[0],))
        return (op.weight, 0) if fits else None
    if op.op_type == "matmul" and is_stored(op.y) and op.y.rank >= 2:
        return op.y, op.y.rank - (2 if constant(op.transpose_y) else 1)
    return None


def contracted_axis(op: Operation, value: Var) -> tuple[Var, int] | None:
    """The stored weight of a product and the axis of it that meets the last axis of `value`."""
    product = product_axis(op)
    if product is None or op.x is not value:
        return None
    if op.op_type == "linear":
        return op.weight, 1
    if constant(op.transpose_x):
        return None
    return op.y, op.y.rank - (1 if constant(op.transpose_y) else 2)


def contracts_both(op: Operation) -> bool:
    """Does a product of two run-time values sum over the last axis of both?"""
    if op.op_type != "matmul" or is_stored(op.x) or is_stored(op.y):
        return False
    flags = bool(constant(op.transpose_y)), bool(constant(op.transpose_x))
    return flags == (True, False) and min(op.x.rank, op.y.rank) >= 2


def is_pointwise_conv(op: Operation) -> bool:
    """A convolution whose kernel is 1 in every axis, with stride 1 and no padding: it works lane by lane."""
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
    """The values that must be padded for `op` to make a padded result; None when it cannot, whatever they hold.

    Args:
        op: an op that is not a product with a constant weight.
        length: of the last axis of its result.
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
    """What the padded lanes of an op's result hold; None: finite, not known; NaN: it must not be padded.

    Args:
        op: an op that is `lanewise` or a product with a constant weight.
        lanes: what the lanes of padded values hold.
        length: of the last axis before padding.
    """
    if product_axis(op) is not None:
        return 0.0  # its weight and its bias are padded with zeros
    if op.op_type == "matmul":
        return 0.0 if lanes[op.y] == 0 else None
    if op.op_type == "conv":
        return 0.0 if lanes[op.x] == 0 and op.inputs.get("bias") is None else None
    numbers = {k: _number(op, k, lanes, length) for k in ("x", "y") if op.inputs.get(k) is not None}
    if any(n is not None and not math.isfinite(n) for n in numbers.values()):
        return math.nan
    if op.op_type == "mul" and 0.0 in numbers.values():
        return 0.0
    if None in numbers.values() or not _is_safe(op, numbers):
        divided = op.op_type == "real_div" and _is_safe(op, numbers)
        return math.nan if op.op_type in WILD and not divided else None
    return _apply(op, numbers)


def _number(op: Operation, name: str, lanes: Mapping[Var, Any], length: int) -> float | None:
    """What an operand holds in the padded lanes; None: not known; not finite when a constant is not."""
    value: Var = op.inputs[name]
    if value in lanes:
        return lanes[value]
    if value.rank and value.shape[-1] == length:
        return FILL.get((op.op_type, name), 0.0)
    held = constant(value)
    if held is None:
        return None
    array = np.asarray(held, np.float64)
    if not np.isfinite(array).all():
        return math.nan
    return float(array.flat[0]) if bool((array == array.flat[0]).all()) else None


def _is_safe(op: Operation, numbers: Mapping[str, float | None]) -> bool:
    """Is the op finite also where a number is a little off, by rounding?"""
    y = numbers.get("y")
    if op.op_type == "real_div":
        divisor = constant(op.y) if y is None else y
        return divisor is not None and bool(np.min(np.abs(divisor)) >= DIVISOR)
    if op.op_type == "pow":
        x = numbers["x"]
        return x is not None and y is not None and (x >= DIVISOR or (y > 0 and y == int(y)))
    return True


def _apply(op: Operation, numbers: Mapping[str, float | None]) -> float | None:
    """The op's meaning, on one lane."""
    if op.op_type in ZERO_PRESERVING and numbers["x"] == 0:
        return 0.0
    results = results_at(op, {k: [n] for k, n in numbers.items() if n is not None})
    if results is None:
        return None
    (lane,) = results
    if not abs(lane) <= LARGEST:
        return math.nan
    return lane if lane == 0 or abs(lane) >= NORMAL else None
