"""Layers that read or write at indices, and layers that find indices: gather, scatter, the largest, sorting.

Indices are blobs too, so whole floats; the ops take and give int32. Negative ones count from the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anesurgery.mil import Var, mb
from anesurgery.neuralnetwork.axes import at_least_one, full, known, sizes, whole
from anesurgery.neuralnetwork.context import Context
from anesurgery.neuralnetwork.layers import Build, layer

F = np.float32
MODES = ("update", "add", "sub", "mul", "div", "max", "min")
"""What a scatter does with what is there, by the number of `ScatterMode`."""


# -- read and write ----------------------------------------------------------------------------------------


@layer("gather", inputs=2)
def gather(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """The slices along an axis that the second input lists, whose shape takes the place of the axis."""
    x, indices = full(ctx, inputs[0]), whole(ctx, inputs[1])
    return at_least_one(mb.gather(x=x, indices=indices, axis=params.axis))


@layer("gatherND", inputs=2)
def gather_nd(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """The slices at indices of several axes, which stand in the last axis of the second input."""
    return at_least_one(mb.gather_nd(x=full(ctx, inputs[0]), indices=whole(ctx, inputs[1])))


@layer("gatherAlongAxis", inputs=2)
def gather_along_axis(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """For each place the number along an axis that the second input says there."""
    x, indices = full(ctx, inputs[0]), whole(ctx, full(ctx, inputs[1]))
    made: Var = mb.gather_along_axis(x=x, indices=indices, axis=params.axis)
    return made


def _scatter(op: str, axis: bool) -> Build:
    def build(ctx: Context, params: Any, inputs: list[Var]) -> Var:
        x, indices, updates = inputs
        along = {"axis": params.axis} if axis else {}
        made: Var = getattr(mb, op)(
            data=full(ctx, x), indices=whole(ctx, indices), updates=full(ctx, updates),
            mode=MODES[params.mode], **along,
        )  # fmt: skip
        return made

    return build


layer("scatter", inputs=3)(_scatter("scatter", True))
layer("scatterAlongAxis", inputs=3)(_scatter("scatter_along_axis", True))
layer("scatterND", inputs=3)(_scatter("scatter_nd", False))


@layer("embeddingND")
def embedding_nd(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """The row of a table for each index; the last axis, of size 1, becomes that of the row."""
    x = full(ctx, inputs[0])
    if ctx.shape(x, [-1]) != (1,):
        raise ctx.error(f"takes indices with a last axis of size 1, not {x.shape[-1]}")
    size, count = int(params.embeddingSize), int(params.vocabSize)
    table = ctx.weights(params.weights, (size, count)).T
    if params.hasBias:
        table = table + ctx.weights(params.bias, (size,), "bias")
    indices = mb.squeeze(x=whole(ctx, x), axes=[-1]) if x.rank > 1 else whole(ctx, x)
    made: Var = mb.gather(x=np.ascontiguousarray(table), indices=indices, axis=0)
    return made if x.rank > 1 else mb.squeeze(x=made, axes=[0])


@layer("oneHot", inputs=(1, 2))
def one_hot(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """One number at each index, another one elsewhere, along a new axis."""
    size = np.int32(params.oneHotVectorSize)
    if len(inputs) == 2:
        found = sizes(ctx, inputs[1])
        size = mb.squeeze(x=found) if isinstance(found, Var) else np.int32(found[0])
    made: Var = mb.one_hot(
        indices=whole(ctx, inputs[0]), one_hot_vector_size=size, axis=params.axis,
        on_value=F(params.onValue), off_value=F(params.offValue),
    )  # fmt: skip
    return made


# -- find --------------------------------------------------------------------------------------------------


@layer("topK", inputs=(1, 2))
def top_k(ctx: Context, params: Any, inputs: list[Var]) -> list[Var]:
    """The K largest (or smallest) numbers along an axis, sorted, and their indices."""
    k = int(known(ctx, inputs[1], "K")[0]) if len(inputs) == 2 else int(params.K)
    x = full(ctx, inputs[0])
    values, indices = mb.topk(x=x, k=k, axis=params.axis, ascending=params.useBottomK)
    return [values, indices][: len(ctx.layer.output)]


@layer("argSort")
def arg_sort(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """The indices that sort along an axis."""
    x = full(ctx, inputs[0])
    made: Var = mb.argsort(x=x, axis=params.axis, ascending=not params.descending)
    return made


def _extreme(op: str) -> Build:
    def build(ctx: Context, params: Any, inputs: list[Var]) -> Var:
        x = full(ctx, inputs[0])
        return at_least_one(getattr(mb, op)(x=x, axis=params.axis, keep_dims=not params.removeDim))

    return build


layer("argMax")(_extreme("reduce_argmax"))
layer("argMin")(_extreme("reduce_argmin"))


@layer("cumSum", inputs=(1, 2))
def cum_sum(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Sums of all numbers up to each along an axis, with or without itself, from either end."""
    axis = int(known(ctx, inputs[1], "the axis")[0]) if len(inputs) == 2 else int(params.axis)
    made: Var = mb.cumsum(
        x=full(ctx, inputs[0]),
        axis=axis,
        exclusive=params.excludeFinalSum,
        reverse=params.reverse,
    )
    return made
