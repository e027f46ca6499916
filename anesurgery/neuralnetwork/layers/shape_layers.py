"""Layers that move numbers without changing them, and layers that make numbers.

The former reshape, join, split, repeat and reverse; the latter are constants, fills, ranges and random
numbers. A seed below 0 asks for other random numbers at each run, in both formats.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anesurgery.mil import Var, is_symbolic, mb
from anesurgery.neuralnetwork.context import Build, Context, layer, layer_nd
from anesurgery.neuralnetwork.layers.blob_axes import (
    ShapeOf,
    broadcast,
    each_within,
    joined,
    of_rank,
    said_shapes,
    scalar,
    shape_value,
    sizes,
    within,
)
from anesurgery.neuralnetwork.spec import DAMAGED

MANY = (2, None)
ONE_OR_TWO = (1, 2)
"""Numbers of inputs: at least, and at most."""


layer_nd("reshapeStatic")(lambda ctx, params, inputs: ctx.reshape(inputs[0], list(params.targetShape)))
layer_nd("reshapeLike", inputs=2)(
    lambda ctx, params, inputs: mb.reshape(x=inputs[0], shape=shape_value(inputs[1]))
)
layer_nd("reshapeDynamic", inputs=2)(
    lambda ctx, params, inputs: mb.reshape(x=inputs[0], shape=sizes(ctx, inputs[1]))
)


@layer_nd("rankPreservingReshape")
def rank_preserving_reshape(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Reshape to as many axes as before; a size of 0 is that of the input, -1 is what remains."""
    wanted = list(params.targetShape)
    x = of_rank(inputs[0], len(wanted))
    if len(wanted) != x.rank:
        raise ctx.error(f"states {len(wanted)} sizes for an input of {x.rank} axes; state one each")
    return mb.reshape(x=x, shape=wanted)


@layer_nd("flattenTo2D")
def flatten_to_2d(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build the axes before one axis as rows, the others as columns."""
    x = inputs[0]
    return mb.flatten2d(x=x, axis=_up_to(ctx, params.axis, x.rank))


def _up_to(ctx: Context, axis: int, rank: int) -> int:
    """Return an axis, or the place after the last one."""
    return axis if axis == rank else within(ctx, axis, rank)


@layer_nd("squeeze")
def squeeze(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build the input without some axes of size 1, or all of them."""
    x = inputs[0]
    if params.squeezeAll:
        axes = [i for i, d in enumerate(x.shape) if not is_symbolic(d) and d == 1]
    else:
        axes = [a % x.rank for a in each_within(ctx, params.axes, x.rank)]
    for axis in axes:
        if not is_symbolic(x.shape[axis]) and x.shape[axis] != 1:
            raise ctx.error(f"removes axis {axis}, whose size is {x.shape[axis]}, not 1")
    return mb.squeeze(x=x, axes=sorted(axes)) if axes else x


@layer_nd("expandDims")
def expand_dims(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build the input with more axes of size 1, counted in the result."""
    x = inputs[0]
    rank = x.rank + len(params.axes)
    axes = sorted(a % rank for a in each_within(ctx, params.axes, rank))
    return mb.expand_dims(x=x, axes=axes)


layer_nd("getShape")(lambda ctx, params, inputs: mb.shape(x=inputs[0]))


@layer_nd("transpose")
def transpose(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build the axes in another order."""
    x = of_rank(inputs[0], len(params.axes))
    axes = each_within(ctx, params.axes, x.rank)
    if len(axes) != x.rank:
        raise ctx.error(f"orders {len(axes)} axes of {x.rank}, expected all; {DAMAGED}")
    return mb.transpose(x=x, perm=axes)


@layer_nd("concatND", inputs=MANY)
def concat_nd(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build the inputs, concatenated along an axis or interleaved slice by slice."""
    values = [x if x.rank else mb.expand_dims(x=x, axes=[0]) for x in inputs]
    axis = within(ctx, params.axis, values[0].rank)
    return mb.concat(values=values, axis=axis, interleave=params.interleave)


@layer_nd("stack", inputs=MANY)
def stack(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build the inputs along a new axis."""
    axis = within(ctx, params.axis, inputs[0].rank + 1)
    return mb.stack(values=inputs, axis=axis)


@layer_nd("splitND")
def split_nd(ctx: Context, params: Any, inputs: list[Var]) -> list[Var]:
    """Parts of stated sizes, or as equal as they can be, the first ones larger by one where needed."""
    x, axis = inputs[0], within(ctx, params.axis, inputs[0].rank)
    if params.splitSizes:
        parts = [int(n) for n in params.splitSizes]
    else:
        count = int(params.numSplits) or len(ctx.layer.output)
        (length,) = ctx.shape(x, [axis])
        parts = [len(part) for part in np.array_split(np.empty(length), count)]
    size = x.shape[axis]
    if min(parts) < 1 or (not is_symbolic(size) and sum(parts) != size):
        raise ctx.error(
            f"splits axis {axis} into parts of {', '.join(map(str, parts))}, expected numbers from 1 up that "
            f"add up to {size}; {DAMAGED}"
        )
    return list(mb.split(x=x, split_sizes=parts, axis=axis)) if len(parts) > 1 else [x]


@layer_nd("tile", inputs=ONE_OR_TWO)
def tile(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Repeated along the last axes, as often as stated or as the second input lists."""
    reps = sizes(ctx, inputs[1]) if len(inputs) == 2 else np.array(params.reps, np.int32)
    count = int(reps.shape[0])
    x = of_rank(inputs[0], count)
    if count < x.rank:
        ones = np.ones(x.rank - count, np.int32)
        reps = joined(ones, reps)
    elif count > x.rank:
        x = mb.expand_dims(x=x, axes=list(range(count - x.rank)))
    return mb.tile(x=x, reps=reps)


@layer_nd("reverse")
def reverse(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Reverse some axes."""
    x = of_rank(inputs[0], len(params.reverseDim))
    if len(params.reverseDim) != x.rank:
        raise ctx.error(
            f"has {len(params.reverseDim)} flags for an input of {x.rank} axes, expected one each; {DAMAGED}"
        )
    axes = [i for i, back in enumerate(params.reverseDim) if back]
    return mb.reverse(x=x, axes=axes) if axes else x


@layer_nd("reverseSeq", inputs=2)
def reverse_seq(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Reverse the first numbers of each sequence, as many as the second input says."""
    return mb.reverse_sequence(
        x=inputs[0],
        lengths=sizes(ctx, inputs[1]),
        seq_axis=within(ctx, params.sequenceAxis, inputs[0].rank, "sequence axis"),
        batch_axis=within(ctx, params.batchAxis, inputs[0].rank, "batch axis"),
    )


# of the last two axes as matrices, the diagonals near the main one; all of them at -1
layer("matrixBandPart")(
    lambda ctx, params, inputs: mb.band_part(x=inputs[0], lower=params.numLower, upper=params.numUpper)
)


@layer("lowerTriangular")
def lower_triangular(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Zeros above diagonal k, which counts from the main one to the right."""
    if params.k >= 0:
        return mb.band_part(x=inputs[0], lower=-1, upper=params.k)
    return _without(inputs[0], -1 - params.k, -1)


@layer("upperTriangular")
def upper_triangular(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Zeros below diagonal k, which counts from the main one to the right."""
    if params.k <= 0:
        return mb.band_part(x=inputs[0], lower=-params.k, upper=-1)
    return _without(inputs[0], -1, params.k - 1)


def _without(x: Var, lower: int, upper: int) -> Var:
    """Zeros in a band with the main diagonal, which `band_part` always keeps."""
    ones = mb.fill(shape=shape_value(x), value=np.float32(1))
    band = mb.band_part(x=ones, lower=lower, upper=upper)
    return mb.select(cond=mb.equal(x=band, y=np.float32(1)), a=np.float32(0), b=x)


F = np.float32


layer_nd("loadConstantND", inputs=0)(
    lambda ctx, params, inputs: mb.const(val=ctx.weights(params.data, list(params.shape), "data"))
)


def _filled(shape: ShapeOf) -> Build:
    """Return one number in a shape."""
    return lambda ctx, params, inputs: mb.fill(shape=shape(ctx, params, inputs), value=F(params.value))


def _repeated(shape: ShapeOf) -> Build:
    """Return the first input, repeated to a shape."""
    return lambda ctx, params, inputs: broadcast(ctx, inputs[0], shape(ctx, params, inputs[1:]))


for _how, (_count, _shape) in said_shapes("targetShape").items():
    layer_nd(f"fill{_how}", inputs=_count)(_filled(_shape))
    layer_nd(f"broadcastTo{_how}", inputs=_count + 1)(_repeated(_shape))
layer_nd("rangeStatic", inputs=0)(
    lambda ctx, params, inputs: _range(ctx, F(params.startValue), F(params.endValue), F(params.stepSizeValue))
)


@layer_nd("rangeDynamic", inputs=(1, 3))
def range_dynamic(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build `range_static` of inputs: end, start and step, the last two optional."""
    ends = [scalar(ctx, x) for x in inputs]
    start = ends[1] if len(ends) > 1 else F(params.startValue)
    step = ends[2] if len(ends) > 2 else F(params.stepSizeValue)
    return _range(ctx, start, ends[0], step)


def _range(ctx: Context, start: Any, end: Any, step: Any) -> Var:
    if not isinstance(step, Var) and step == 0:
        raise ctx.error("counts in steps of 0; state a step")
    return mb.range_1d(start=start, end=end, step=step)


FIELDS = {
    "Normal": ("random_normal", {"mean": "mean", "stddev": "stdDev"}),
    "Uniform": ("random_uniform", {"low": "minVal", "high": "maxVal"}),
    "Bernoulli": ("random_bernoulli", {"prob": "prob"}),
}
"""Kind -> op, and its parameters by field of the layer."""


def _random(op: str, fields: dict[str, str], shape: ShapeOf) -> Build:
    def build(ctx: Context, params: Any, inputs: list[Var]) -> Var:
        numbers = {name: F(getattr(params, field)) for name, field in fields.items()}
        return getattr(mb, op)(shape=shape(ctx, params, inputs), seed=np.int32(params.seed), **numbers)

    return build


for _kind, (_op, _fields) in FIELDS.items():
    for _how, (_count, _shape) in said_shapes("outputShape").items():
        layer_nd(f"random{_kind}{_how}", inputs=_count)(_random(_op, _fields, _shape))


@layer("categoricalDistribution")
def categorical(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build indices drawn by probabilities (or their logarithms) along the last axis, after a temperature."""
    x = inputs[0]
    if not params.isLogits:
        x = mb.log(x=mb.add(x=x, y=F(params.eps)), epsilon=F(0))
    if params.temperature not in (0, 1):
        x = mb.mul(x=x, y=F(1 / params.temperature))
    return mb.random_categorical(x=x, mode="logits", size=int(params.numSamples), seed=np.int32(params.seed))
