"""Products with matrices, and layers that rearrange whole blobs: shape, order, channels, sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anesurgery.mil import Array, Var, is_symbolic, mb
from anesurgery.neuralnetwork.context import Context, layer
from anesurgery.neuralnetwork.layers.blob_axes import squeezed, whole

CHANNEL_LAST = 1
MIL_AXES = {0: -5, 1: -3, 2: -2, 3: -1}
"""Axis of a permutation (sequence, channel, height, width) -> axis from the end."""


def _flat(ctx: Context, x: Var) -> Var:
    """(..., channel, height, width) -> (..., channel * height * width)."""
    if all(not is_symbolic(d) and d == 1 for d in x.shape[-2:]):
        return mb.squeeze(x=x, axes=[x.rank - 2, x.rank - 1])
    sizes = ctx.shape(x, [-3, -2, -1])
    return ctx.reshape(x, [*x.shape[:-3], sizes[0] * sizes[1] * sizes[2]])


@layer("innerProduct")
def inner_product(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build a matrix times vectors: the last axis, or (channel, height, width) of four and five axes."""
    x = inputs[0]
    weight = ctx.weights(params.weights, [params.outputChannels, params.inputChannels])
    form = {"weight": weight}
    if params.hasBias:
        form["bias"] = ctx.weights(params.bias, [params.outputChannels], "bias")
    _tell_dynamic(ctx, params)
    if x.rank < 4:
        return mb.linear(x=x, **form)
    rank = x.rank
    return mb.expand_dims(x=mb.linear(x=_flat(ctx, x), **form), axes=[rank - 2, rank - 1])


def _tell_dynamic(ctx: Context, params: Any) -> None:
    if params.int8DynamicQuantize:
        ctx.note("rounds its input to 8 bits at run time; the ML Program computes with the exact input")


@layer("batchedMatmul", inputs=(1, 2))
def batched_matmul(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build a product of matrices on the last two axes; of one input, with a stored matrix."""
    if len(inputs) == 1:
        return _stored_product(ctx, params, inputs[0])
    x, y = inputs
    if x.rank == 1:
        x = mb.expand_dims(x=x, axes=[0])
    if y.rank == 1:
        y = mb.expand_dims(x=y, axes=[1])
    return mb.matmul(x=x, y=y, transpose_x=params.transposeA, transpose_y=params.transposeB)


def _stored_product(ctx: Context, params: Any, x: Var) -> Var:
    """The matrix [in, out] is stored by columns, hence as MIL's linear takes it."""
    shape = [params.weightMatrixSecondDimension, params.weightMatrixFirstDimension]
    weight = ctx.weights(params.weights, shape)
    bias: Array | None = None
    if params.hasBias:
        bias = ctx.weights(params.bias, shape[:1], "bias")
    _tell_dynamic(ctx, params)
    if x.rank <= 3:
        return mb.linear(x=x, weight=weight, **({} if bias is None else {"bias": bias}))
    y = mb.matmul(x=x, y=weight, transpose_y=True)
    return y if bias is None else mb.add(x=y, y=bias)


@layer("embedding")
def embedding(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build rows of a table for whole numbers: (..., 1, 1, 1) -> (..., channel, 1, 1)."""
    x = inputs[0]
    ctx.needs_rank(x, 4)
    table = ctx.weights(params.weights, [params.outputChannels, params.inputDim]).T
    if params.hasBias:
        table = table + ctx.weights(params.bias, [params.outputChannels], "bias")
    last = [x.rank - 3, x.rank - 2, x.rank - 1]
    rows = mb.gather(x=table, indices=whole(ctx, squeezed(x, last)), axis=0)
    return mb.expand_dims(x=rows, axes=last[1:])


@layer("flatten")
def flatten(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """(..., channel, height, width) -> (..., channel * height * width, 1, 1)."""
    x = inputs[0]
    ctx.needs_rank(x, 3)
    if params.mode == CHANNEL_LAST:
        x = _moved(x, [-2, -1, -3])
    sizes = ctx.shape(x, [-3, -2, -1])
    return ctx.reshape(x, [*x.shape[:-3], sizes[0] * sizes[1] * sizes[2], 1, 1])


def _moved(x: Var, order: Sequence[int]) -> Var:
    """Return the last axes in another order, given from the end."""
    lead = list(range(x.rank - len(order)))
    return mb.transpose(x=x, perm=[*lead, *(x.rank + a for a in order)])


@layer("reshape")
def reshape(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build another shape of (channel, height, width), or of the sequence too where four sizes are given."""
    target = [int(n) for n in params.targetShape]
    if len(target) not in (3, 4):
        raise ctx.error(f"has a target of {len(target)} sizes, expected 3 or 4; export it again")
    x = inputs[0]
    ctx.needs_rank(x, 3)
    if len(target) == 3:
        lead = list(x.shape[:-3])
    else:
        x = ctx.five(x)
        lead = [target[0], 1]
        if ctx.shape(x, [1]) != (1,):
            raise ctx.limit("changes the sequence of a batch of more than 1, which is not defined")
    channel, height, width = target[-3:]
    if params.mode != CHANNEL_LAST:
        return ctx.reshape(x, [*lead, channel, height, width])
    flat = ctx.reshape(_moved(x, [-2, -1, -3]), [*lead, height, width, channel])
    return _moved(flat, [-1, -3, -2])


@layer("permute")
def permute(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Sequence, channel, height and width in another order; the batch stays."""
    order = [int(a) for a in params.axis] or [0, 1, 2, 3]
    if sorted(order) != [0, 1, 2, 3]:
        raise ctx.error(f"has the order {order}, which is none of 0, 1, 2, 3; export it again")
    x = inputs[0]
    if order[0] == 0 and x.rank >= 3:
        return _moved(x, [MIL_AXES[a] for a in order[1:]])
    from_end = [MIL_AXES[a] for a in order]
    return _moved(ctx.five(x), [from_end[0], -4, *from_end[1:]])


@layer("concat", inputs=(2, None))
def concat(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build the inputs, concatenated along the channels or along the sequence."""
    if params.sequenceConcat or len({x.rank for x in inputs}) > 1:
        inputs = [ctx.five(x) for x in inputs]
    return mb.concat(values=inputs, axis=-5 if params.sequenceConcat else -3)


@layer("split")
def split(ctx: Context, params: Any, inputs: list[Var]) -> list[Var]:
    """Parts of equally many channels."""
    ctx.needs_rank(inputs[0], 3)
    count = int(params.nOutputs)
    parts = mb.split(x=inputs[0], num_splits=count, axis=-3)
    return list(parts) if isinstance(parts, (tuple, list)) else [parts]


@layer("sequenceRepeat")
def sequence_repeat(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build the sequence, repeated."""
    x = ctx.five(inputs[0])
    reps = [1] * x.rank
    reps[-5] = int(params.nRepetitions) or 1
    return mb.tile(x=x, reps=reps)


@layer("loadConstant", inputs=0)
def load_constant(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build a constant of shape (1, 1, channel, height, width)."""
    shape = [int(n) for n in params.shape]
    if len(shape) != 3:
        raise ctx.error(f"has a constant of {len(shape)} axes, expected 3; export it again")
    lead = [1] if ctx.legacy else [1, 1]
    return mb.const(val=ctx.weights(params.data, shape, "data").reshape([*lead, *shape]))
