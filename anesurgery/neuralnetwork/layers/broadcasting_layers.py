"""Element by element: arithmetic, comparisons and logic with broadcasting, and functions of one number.

Blobs are broadcast as in numpy: axes are counted from the end, sizes of 1 are repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from anesurgery.mil import Array, Var, is_symbolic, mb
from anesurgery.neuralnetwork.context import Context
from anesurgery.neuralnetwork.layers.blob_axes import broadcast, shape_value
from anesurgery.neuralnetwork.layers.layer_table import Build, layer, layer_nd

F = np.float32
ONE_OR_TWO = (1, 2)
ASINH_SMALL = F(1)
"""Size of a number up to which asinh is computed by atanh, which keeps the digits near 0."""

ARITHMETIC = {
    "addBroadcastable": "add",
    "multiplyBroadcastable": "mul",
    "maxBroadcastable": "maximum",
    "minBroadcastable": "minimum",
    "subtractBroadcastable": "sub",
    "divideBroadcastable": "real_div",
    "floorDivBroadcastable": "floor_div",
    "modBroadcastable": "mod",
    "powBroadcastable": "pow",
}
"""Layer type -> op of two inputs."""

COMPARISONS = {
    "equal": "equal",
    "notEqual": "not_equal",
    "lessThan": "less",
    "lessEqual": "less_equal",
    "greaterThan": "greater",
    "greaterEqual": "greater_equal",
}
"""Layer type -> op; of one input, with the parameter alpha."""

LOGIC = {"logicalAnd": "logical_and", "logicalOr": "logical_or", "logicalXor": "logical_xor"}

FUNCTIONS = {
    **{n: n for n in ("ceil", "floor", "round", "sign", "exp2", "erf", "atanh")},
    **{n: n for n in ("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh")},
}
"""Layer type -> op of one input."""


def _made(op: str, **operands: Var | Array | np.float32) -> Var:
    return getattr(mb, op)(**operands)


def _arithmetic(op: str) -> Build:
    return lambda ctx, params, inputs: _made(op, x=inputs[0], y=inputs[1])


def _comparison(op: str) -> Build:
    def build(ctx: Context, params: Any, inputs: list[Var]) -> Var:
        other = inputs[1] if len(inputs) == 2 else F(params.alpha)
        return _made(op, x=inputs[0], y=other)

    return build


def _logic(op: str) -> Build:
    return lambda ctx, params, inputs: _made(op, x=ctx.truth(inputs[0]), y=ctx.truth(inputs[1]))


def _function(op: str) -> Build:
    return lambda ctx, params, inputs: _made(op, x=inputs[0])


def _register(table: dict[str, str], how: Callable[[str], Build], inputs: Any) -> None:
    for kind, op in table.items():
        layer(kind, inputs=inputs)(how(op))


_register(ARITHMETIC, _arithmetic, 2)
_register(COMPARISONS, _comparison, ONE_OR_TWO)
_register(LOGIC, _logic, 2)
_register(FUNCTIONS, _function, 1)


layer("logicalNot")(lambda ctx, params, inputs: _made("logical_not", x=ctx.truth(inputs[0])))
# MIL has no such op: sign(x) log(|x| + sqrt(x² + 1)), and near 0 atanh(x / sqrt(x² + 1))
layer("asinh")(lambda ctx, params, inputs: _asinh(inputs[0]))


@layer("acosh")
def acosh(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """MIL has no such op: 2 asinh(sqrt((x - 1) / 2)), which keeps the digits near 1."""
    half = mb.mul(x=mb.sub(x=inputs[0], y=F(1)), y=F(0.5))
    return _made("mul", x=_asinh(mb.sqrt(x=half)), y=F(2))


def _asinh(x: Var) -> Var:
    root = mb.sqrt(x=mb.add(x=mb.square(x=x), y=F(1)))
    size = mb.abs(x=x)
    large = mb.mul(x=mb.sign(x=x), y=mb.log(x=mb.add(x=size, y=root), epsilon=F(0)))
    small = mb.atanh(x=mb.real_div(x=x, y=root))
    return _made("select", cond=mb.less(x=size, y=ASINH_SMALL), a=small, b=large)


@layer("whereBroadcastable", inputs=3)
def where(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """The second input where the first is not 0, else the third."""
    condition, a, b = inputs
    if not _covers(a, b, condition):
        a = broadcast(ctx, broadcast(ctx, a, shape_value(condition)), shape_value(b))
    return _made("select", cond=ctx.truth(condition), a=a, b=b)


def _covers(a: Var, b: Var, condition: Var) -> bool:
    """Is the shape of a and b together that of the result? MIL's op takes it for that."""
    shapes = [tuple(v.shape) for v in (a, b, condition)]
    if any(is_symbolic(d) for shape in shapes for d in shape):
        return shapes[0] == shapes[1] == shapes[2]
    return np.broadcast_shapes(*shapes[:2]) == np.broadcast_shapes(*shapes)


# the indices of all numbers that are not 0: [count, rank]
layer_nd("whereNonZero")(lambda ctx, params, inputs: _made("non_zero", x=inputs[0]))
