"""Arithmetic: element by element, with and without broadcasting, functions, reductions and normalizations.

Blobs are broadcast as in numpy: axes are counted from the end, sizes of 1 are repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce as fold
from typing import Any, cast

import numpy as np

from anesurgery.mil import Array, Var, is_symbolic, mb
from anesurgery.neuralnetwork.context import Build, Context, layer, layer_nd
from anesurgery.neuralnetwork.layers.blob_axes import broadcast, each_within, shape_value, within
from anesurgery.neuralnetwork.spec import DAMAGED

F = np.float32
MANY = (1, None)


def _folded(op: str, alpha: bool = False) -> Build:
    """Return an op over all inputs; with `alpha`, the parameter is the other side of a single one."""

    def build(ctx: Context, params: Any, inputs: list[Any]) -> Var:
        values = [*inputs, F(params.alpha)] if alpha and len(inputs) == 1 else inputs
        return fold(lambda a, b: getattr(mb, op)(x=a, y=b), values)

    return build


layer("add", inputs=MANY)(_folded("add", alpha=True))
layer("multiply", inputs=MANY)(_folded("mul", alpha=True))
layer("max", inputs=MANY)(_folded("maximum"))
layer("min", inputs=MANY)(_folded("minimum"))


@layer("softmax")
def softmax(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Softmax over the channels."""
    ctx.needs_rank(inputs[0], 3)
    return mb.softmax(x=inputs[0], axis=-3)


@layer("average", inputs=MANY)
def average(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build the mean of the inputs."""
    return mb.mul(x=fold(lambda a, b: mb.add(x=a, y=b), inputs), y=F(1 / len(inputs)))


@layer("dot", inputs=2)
def dot(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build the dot product over the channels, or the cosine of the angle."""
    x, y = inputs
    product = _sum(mb.mul(x=x, y=y))
    if not params.cosineSimilarity:
        return product
    lengths = [mb.reduce_l2_norm(x=v, axes=[-3], keep_dims=True) for v in inputs]
    return mb.real_div(x=product, y=mb.mul(x=lengths[0], y=lengths[1]))


def _sum(x: Var) -> Var:
    return mb.reduce_sum(x=x, axes=[-3], keep_dims=True)


def _spread(ctx: Context, params: Any, shape: Any, name: str) -> Array:
    """Return a constant of shape [1], [C], [1, H, W] or [C, H, W], such that it broadcasts."""
    sizes = [int(n) for n in shape] or [1]
    if len(sizes) not in (1, 3):
        raise ctx.error(f"has a {name} of {len(sizes)} axes, expected 1 or 3; export it again")
    constant = ctx.weights(params, sizes, name)
    return constant if len(sizes) == 3 else constant.reshape(-1, 1, 1)


@layer("scale")
def scale(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """X times a constant, plus another one if wanted."""
    ctx.needs_rank(inputs[0], 3)
    x = mb.mul(x=inputs[0], y=_spread(ctx, params.scale, params.shapeScale, "scale"))
    return mb.add(x=x, y=_spread(ctx, params.bias, params.shapeBias, "bias")) if params.hasBias else x


@layer("bias")
def bias(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """X plus a constant."""
    ctx.needs_rank(inputs[0], 3)
    return mb.add(x=inputs[0], y=_spread(ctx, params.bias, params.shape, "bias"))


UNARY: tuple[Callable[[Var, Any], Var], ...] = (
    lambda x, p: mb.sqrt(x=x),
    lambda x, p: mb.rsqrt(x=x, epsilon=F(p.epsilon or 1e-6)),
    lambda x, p: mb.inverse(x=x, epsilon=F(p.epsilon or 1e-6)),
    lambda x, p: mb.pow(x=x, y=F(p.alpha)),
    lambda x, p: mb.exp(x=x),
    lambda x, p: mb.log(x=x, epsilon=F(p.epsilon)) if p.epsilon else mb.log(x=x),
    lambda x, p: mb.abs(x=x),
    lambda x, p: mb.maximum(x=x, y=F(p.alpha)),
)
"""By `type`: SQRT, RSQRT, INVERSE, POWER, EXP, LOG, ABS, THRESHOLD."""


@layer("unary")
def unary(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build a function of scale x + shift."""
    x, factor = inputs[0], params.scale or 1
    if factor != 1 or params.shift:
        x = mb.linear_activation(x=x, alpha=F(factor), beta=F(params.shift))
    return UNARY[params.type](x, params)


REDUCE = ("sum", "mean", "prod", "sum", "sum_square", "l1_norm", "l2_norm", "max", "min")
"""By `mode`: SUM, AVG, PROD, LOGSUM (a sum of logarithms), SUMSQUARE, L1, L2, MAX, MIN; then comes ARGMAX."""
LOGSUM, ARGMAX = 3, 9
AXES = ([-3, -2, -1], [-2, -1], [-3], [-2], [-1])
"""By `axis`: CHW, HW, C, H, W."""


@layer("reduce")
def reduce(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build a reduction over channel, height and width, or some of them, which stay as axes of 1."""
    x, axes = inputs[0], AXES[params.axis]
    if params.mode == ARGMAX and len(axes) > 1:
        raise ctx.limit("takes the place of a maximum over more than one axis; choose C, H or W")
    ctx.needs_rank(x, -axes[0])
    if params.mode == LOGSUM:
        x = mb.log(x=x, epsilon=F(params.epsilon or 1e-6))
    if params.mode == ARGMAX:
        return mb.reduce_argmax(x=x, axis=axes[0], keep_dims=True)
    return getattr(mb, f"reduce_{REDUCE[params.mode]}")(x=x, axes=axes, keep_dims=True)


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
"""Layer type -> op of two inputs, or of one and the parameter alpha."""
LOGIC = {"logicalAnd": "logical_and", "logicalOr": "logical_or", "logicalXor": "logical_xor"}
"""Layer type -> op of two conditions."""
FUNCTIONS = (
    *("ceil", "floor", "round", "sign", "exp2", "erf", "atanh"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
)
"""Layer types that are ops of one input, of the same name."""


def _made(op: str, **operands: Var | Array | np.float32) -> Var:
    return getattr(mb, op)(**operands)


def _elementwise(op: str, alpha: bool = False, conditions: bool = False) -> Build:
    """Return what builds an op of its inputs as x and y.

    Args:
        op: the op type.
        alpha: is the parameter of that name y, if there is one input only?
        conditions: are the inputs conditions?
    """

    def build(ctx: Context, params: Any, inputs: list[Var]) -> Var:
        values: list[Any] = [ctx.truth(x) for x in inputs] if conditions else list(inputs)
        if alpha and len(values) == 1:
            values.append(F(params.alpha))
        return _made(op, **dict(zip("xy", values, strict=False)))

    return build


for _kind, _op in ARITHMETIC.items():
    layer(_kind, inputs=2)(_elementwise(_op))
for _kind, _op in COMPARISONS.items():
    layer(_kind, inputs=(1, 2))(_elementwise(_op, alpha=True))
for _kind, _op in LOGIC.items():
    layer(_kind, inputs=2)(_elementwise(_op, conditions=True))
for _kind in FUNCTIONS:
    layer(_kind)(_elementwise(_kind))


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
    """Build the second input where the first is not 0, else the third."""
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


REDUCTIONS = {
    "reduceSum": "reduce_sum",
    "reduceMean": "reduce_mean",
    "reduceProd": "reduce_prod",
    "reduceMax": "reduce_max",
    "reduceMin": "reduce_min",
    "reduceL1": "reduce_l1_norm",
    "reduceL2": "reduce_l2_norm",
    "reduceSumSquare": "reduce_sum_square",
    "reduceLogSum": "reduce_log_sum",
    "reduceLogSumExp": "reduce_log_sum_exp",
}
"""Layer type -> op."""


def _reduction(op: str) -> Build:
    def build(ctx: Context, params: Any, inputs: list[Var]) -> Var:
        if not params.reduceAll and not params.axes:
            raise ctx.error("names no axes; list some, or set reduceAll")
        x = inputs[0]
        if not x.rank:  # converters write the product of a list of sizes, which may be one size
            x = mb.expand_dims(x=x, axes=[0])
            return cast(Var, getattr(mb, op)(x=x, axes=[0], keep_dims=False))
        stated = range(x.rank) if params.reduceAll else params.axes
        axes = each_within(ctx, stated, x.rank)
        return getattr(mb, op)(x=x, axes=axes, keep_dims=params.keepDims)

    return build


for _kind, _op in REDUCTIONS.items():
    layer_nd(_kind)(_reduction(_op))


@layer_nd("softmaxND")
def softmax_nd(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Softmax over one axis."""
    axis = within(ctx, params.axis, inputs[0].rank)
    return mb.softmax(x=inputs[0], axis=axis)


@layer("batchnorm")
def batchnorm(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Normalize each channel (axis -3) by a mean and variance: stored, of each sample, or of the batch."""
    ctx.needs_rank(inputs[0], 3)
    x, back = ctx.images(inputs[0])
    if not is_symbolic(x.shape[1]) and x.shape[1] != params.channels:
        raise ctx.error(f"normalizes {params.channels} channels, but its input has {x.shape[1]}; {DAMAGED}")
    names = ("gamma", "beta") if params.computeMeanVar else ("gamma", "beta", "mean", "variance")
    stored = {n: ctx.weights(getattr(params, n), [params.channels], n) for n in names}
    epsilon = F(params.epsilon or 1e-5)
    if not params.computeMeanVar:
        return back(mb.batch_norm(x=x, epsilon=epsilon, **stored))
    if params.instanceNormalization:
        return back(mb.instance_norm(x=x, epsilon=epsilon, **stored))
    gamma, beta = (stored[n].reshape(1, -1, 1, 1) for n in names)
    return back(mb.add(x=mb.mul(x=_standard(x, [0, 2, 3], epsilon), y=gamma), y=beta))


def _standard(x: Var, axes: list[int], epsilon: Any) -> Var:
    """Zero mean and unit variance over some axes."""
    centered = mb.sub(x=x, y=mb.reduce_mean(x=x, axes=axes, keep_dims=True))
    variance = mb.reduce_mean(x=mb.square(x=centered), axes=axes, keep_dims=True)
    return mb.mul(x=centered, y=mb.rsqrt(x=variance, epsilon=epsilon))


@layer("mvn")
def mvn(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Zero mean, and unit variance if wanted, of each channel or of all channels together."""
    x = inputs[0]
    ctx.needs_rank(x, 3)
    axes = [-3, -2, -1] if params.acrossChannels else [-2, -1]
    if params.normalizeVariance:
        return mb.layer_norm(x=x, axes=axes, epsilon=F(params.epsilon or 1e-6))
    return mb.sub(x=x, y=mb.reduce_mean(x=x, axes=axes, keep_dims=True))


@layer("l2normalize")
def l2normalize(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """X over the root of its sum of squares over the last three axes."""
    ctx.needs_rank(inputs[0], 3)
    return mb.l2_norm(x=inputs[0], epsilon=F(params.epsilon or 1e-6))


@layer("lrn")
def lrn(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """X over a power of the sum of squares of neighbouring channels."""
    ctx.needs_rank(inputs[0], 3)
    return mb.local_response_norm(
        x=inputs[0], size=int(params.localSize), alpha=F(params.alpha), beta=F(params.beta), k=F(params.k or 1)
    )


@layer("layerNormalization")
def layer_normalization(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Zero mean and unit variance over the last axes, times gamma plus beta."""
    shape = [int(n) for n in params.normalizedShape]
    gamma, beta = (ctx.weights(getattr(params, n), shape, n) for n in ("gamma", "beta"))
    axes = list(range(-len(shape), 0))
    return mb.layer_norm(x=inputs[0], axes=axes, gamma=gamma, beta=beta, epsilon=F(params.eps))
