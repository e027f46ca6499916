"""Lift matrix products, convolutions and pooling.

Core AI writes a convolution's padding as an op of its own, and a convolution over one axis as one over two;
both are merged back here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anesurgery.coreai.lifts import LiftedOp, Unliftable, Value, as_var, lift, like, made_by, pad_arguments
from anesurgery.mil import Var, is_stored, mb

LINEAR = 3
"""The largest rank that MIL's `linear` takes."""


@lift("batch_matmul")
def batch_matmul(o: LiftedOp) -> Value:
    """Build a matrix product; with a transposed stored matrix, a linear layer."""
    x, weight = o[0], _matrix_behind_transpose(o[1])
    if weight is None or not 1 < len(x.shape) <= LINEAR:
        return mb.matmul(x=x, y=o[1])
    return mb.linear(x=x, weight=weight)


def _matrix_behind_transpose(value: Value) -> Var | None:
    """Return the stored matrix of which a value is the transpose; None for others."""
    op = made_by(value, "expand_dims")
    if op is not None and sorted(op.axes.val) == list(range(len(op.axes.val))):
        value = op.x
    op = made_by(value, "transpose")
    return op.x if op is not None and op.x.rank == 2 and is_stored(op.x) else None


def _input_and_padding(o: LiftedOp, given: Value, value: float) -> tuple[Var, list[int]]:
    """Return the operand of a constant padding of spatial axes, and the padding; else (operand, zeros)."""
    x = as_var(given)
    op, sides = made_by(x, "pad"), [0] * 2 * x.rank
    if op is None or x in o.scope.stated or op.mode.val != "constant" or float(op.constant_val.val) != value:
        return x, sides[4:]
    if len(op.pad.val) == len(sides) and not any(op.pad.val[:4]):
        x, sides = op.x, [int(n) for n in op.pad.val]
    return x, sides[4:]


def _without_last_axis(value: Value) -> Value | None:
    """Return a value before it got a last axis of size 1; None where it has none."""
    if isinstance(value, np.ndarray):
        return value[..., 0] if value.shape[-1] == 1 else None
    op = made_by(value, "expand_dims", "reshape")
    return op.x if op is not None and (*op.x.shape, 1) == tuple(value.shape) else None


@lift("conv2d", "conv3d")
def conv(o: LiftedOp) -> Value:
    """Build a convolution with its padding; over one spatial axis if the other has size 1."""
    narrow = [one for i in (0, 1) if len(o.shape) == 4 and (one := _without_last_axis(o[i])) is not None]
    flat = len(narrow) == 2
    given, weight = narrow if flat else (o[0], o[1])
    x, sides = _input_and_padding(o, given, 0.0)
    axes = x.rank - 2
    how = {"strides": o.ints(2)[:axes], "dilations": o.ints(3)[:axes], "groups": o.integer(4)}
    y = mb.conv(x=x, weight=weight, **how, **pad_arguments(sides))
    return mb.expand_dims(x=y, axes=[-1]) if flat else y


@lift("conv_transpose2d", "conv_transpose3d")
def _conv_transpose(o: LiftedOp) -> Value:
    if None in o.shape:
        raise Unliftable("the size of its result is not fixed")
    sides = o.ints(3)
    sides = [n for n in sides for _ in range(2)] if len(sides) == len(o.shape) - 2 else sides
    ends = zip(sides[::2], sides[1::2], o.ints(5), strict=True)
    cut = [end for low, high, extra in ends for end in (low, high - extra)]
    how = {"strides": o.ints(2), "dilations": o.ints(4), "groups": o.integer(6)}
    if all(n >= 0 for n in cut):
        return mb.conv_transpose(x=o[0], weight=o[1], pad_type="custom", pad=cut, **how)
    shape = np.array(o.shape, np.int32)
    return mb.conv_transpose(x=o[0], weight=o[1], pad_type="custom", pad=sides, output_shape=shape, **how)


def _pool_arguments(o: LiftedOp, kernel: int, strides: int, dilation: int) -> dict[str, Any]:
    if set(o.ints(dilation)) != {1}:
        raise Unliftable("its windows have gaps, which those of MIL have not")
    return {"kernel_sizes": o.ints(kernel), "strides": o.ints(strides)}


@lift("max_pool_2d", "max_pool_3d")
def max_pool(o: LiftedOp) -> Value:
    """Build max pooling, with its padding of -inf."""
    x, sides = _input_and_padding(o, o[0], -np.inf)
    ceil = {"ceil_mode": True} if o.integer(4) else {}
    return mb.max_pool(x=x, **_pool_arguments(o, 1, 2, 3), **pad_arguments(sides), **ceil)


@lift("sum_pool_2d", "sum_pool_3d")
def sum_pool(o: LiftedOp) -> Value:
    """Build sum pooling: the mean times the size of the window."""
    x, sides = _input_and_padding(o, o[0], 0.0)
    how = _pool_arguments(o, 1, 2, 3)
    mean = mb.avg_pool(x=x, **how, **pad_arguments(sides), exclude_padding_from_average=False)
    return mb.mul(x=mean, y=like(mean, float(np.prod(how["kernel_sizes"]))))
