"""Layers that read or write at indices, and layers that find indices: gather, scatter, the largest, sorting.

Indices are blobs too, so whole floats; the ops take and give int32. Negative ones count from the end here, but
lie outside for MIL's ops of iOS 17: they are made positive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from anesurgery.mil import Array, Var, mb, producer
from anesurgery.neuralnetwork.context import Context
from anesurgery.neuralnetwork.layers.blob_axes import Numbers, joined, lengths, sizes, squeezed, whole, within
from anesurgery.neuralnetwork.layers.layer_table import Build, layer_nd
from anesurgery.neuralnetwork.spec import DAMAGED

F = np.float32
MODES = ("update", "add", "sub", "mul", "div", "max", "min")
"""What a scatter does with what is there, by the number of `ScatterMode`."""


COUNTS = ("argsort", "non_zero", "reduce_argmax", "reduce_argmin", "shape", "topk")
"""Ops that never give a negative index."""


# -- read and write ----------------------------------------------------------------------------------------


def _indices(ctx: Context, indices: Var, x: Var, axes: Sequence[int]) -> Numbers:
    """Indices of some axes of `x` as int32, those that count from the end made positive.

    Args:
        ctx: the network.
        indices: the blob; where there are several axes, its last axis holds one index of each.
        x: what is read or written.
        axes: the axes.
    """
    ends = lengths(x, *(within(ctx, a, x.rank) % x.rank for a in axes))
    if indices.val is not None and not isinstance(ends, Var):
        known_ = np.asarray(indices.val, np.float64).astype(np.int32)
        _check_places(ctx, known_, ends)
        return np.where(known_ < 0, known_ + ends, known_).astype(np.int32)
    integers = whole(ctx, indices)
    if producer(integers, *COUNTS):
        return integers
    later = mb.add(x=integers, y=ends)
    return mb.select(cond=mb.less(x=integers, y=np.int32(0)), a=later, b=integers)


def _check_places(ctx: Context, places: Array, ends: Array) -> None:
    """Refuse a constant index outside its axis."""
    at, sizes_ = np.broadcast_arrays(places, ends)
    outside = (at < -sizes_) | (at >= sizes_)
    if outside.any():
        size = sizes_[outside][0]
        raise ctx.error(
            f"has the index {at[outside][0]} on an axis of {size}, expected {-size} to {size - 1}; {DAMAGED}"
        )


@layer_nd("gather", inputs=2)
def gather(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """The slices along an axis that the second input lists; its shape replaces the axis."""
    x = inputs[0]
    indices = _indices(ctx, inputs[1], x, [params.axis])
    return mb.gather(x=x, indices=indices, axis=params.axis)


@layer_nd("gatherND", inputs=2)
def gather_nd(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """The slices at indices of several axes, given along the last axis of the second input."""
    x = inputs[0]
    (count,) = ctx.shape(inputs[1], [-1])
    return mb.gather_nd(x=x, indices=_indices(ctx, inputs[1], x, range(count)))


@layer_nd("gatherAlongAxis", inputs=2)
def gather_along_axis(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """For each place the number along an axis that the second input says there."""
    x = inputs[0]
    indices = _indices(ctx, inputs[1], x, [params.axis])
    return mb.gather_along_axis(x=x, indices=indices, axis=params.axis)


def _scatter(op: str) -> Build:
    def build(ctx: Context, params: Any, inputs: list[Var]) -> Var:
        data, indices, updates = inputs[0], inputs[1], inputs[2]
        along = {} if op == "scatter_nd" else {"axis": params.axis}
        axes = list(along.values()) or range(*ctx.shape(indices, [-1]))
        return getattr(mb, op)(
            data=data,
            indices=_indices(ctx, indices, data, axes),
            updates=updates,
            mode=MODES[params.mode],
            **along,
        )

    return build


layer_nd("scatter", inputs=3)(_scatter("scatter"))
layer_nd("scatterAlongAxis", inputs=3)(_scatter("scatter_along_axis"))
layer_nd("scatterND", inputs=3)(_scatter("scatter_nd"))


@layer_nd("embeddingND")
def embedding_nd(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """The row of a table for each index; the last axis, of size 1, becomes that of the row."""
    x = inputs[0]
    if ctx.shape(x, [-1]) != (1,):
        raise ctx.error(f"takes indices with a last axis of size 1, not {x.shape[-1]}")
    size, count = int(params.embeddingSize), int(params.vocabSize)
    table = ctx.weights(params.weights, (size, count)).T
    if params.hasBias:
        table = table + ctx.weights(params.bias, (size,), "bias")
    indices = whole(ctx, squeezed(x, [-1]) if x.rank > 1 else x)
    rows: Var = mb.gather(x=np.ascontiguousarray(table), indices=indices, axis=0)
    return rows if x.rank > 1 else mb.squeeze(x=rows, axes=[0])


@layer_nd("oneHot", inputs=(1, 2))
def one_hot(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """One number at each index, another one elsewhere, along a new axis."""
    size: Var | np.int32 = np.int32(params.oneHotVectorSize)
    if len(inputs) == 2:
        lengths = sizes(ctx, inputs[1])
        size = mb.squeeze(x=lengths) if isinstance(lengths, Var) else np.int32(lengths[0])
    return mb.one_hot(
        indices=whole(ctx, inputs[0]),
        one_hot_vector_size=size,
        axis=within(ctx, params.axis, inputs[0].rank + 1),
        on_value=F(params.onValue),
        off_value=F(params.offValue),
    )


# -- find --------------------------------------------------------------------------------------------------


@layer_nd("topK", inputs=(1, 2))
def top_k(ctx: Context, params: Any, inputs: list[Var]) -> list[Var]:
    """The K largest (or smallest) numbers along an axis, sorted, and their indices.

    Where K is dynamic, all numbers are sorted, and cut off.
    """
    k = sizes(ctx, inputs[1]) if len(inputs) == 2 else np.array([params.K], np.int32)
    x, axis = inputs[0], within(ctx, params.axis, inputs[0].rank)
    count = ctx.shape(x, [axis])[0] if isinstance(k, Var) else int(k[0])
    if count < 1:
        raise ctx.error(f"takes the {count} largest, expected at least 1; {DAMAGED}")
    best = mb.topk(x=x, k=count, axis=axis, ascending=params.useBottomK)
    if isinstance(k, Var):
        best = [_first(v, k, axis % x.rank) for v in best]
    return list(best)[: len(ctx.layer.output)]


def _first(x: Var, count: Var, axis: int) -> Var:
    """The first slices along an axis."""
    before, after = np.zeros(axis, np.int32), np.zeros(x.rank - 1 - axis, np.int32)
    return mb.slice_by_index(
        x=x,
        begin=np.zeros(x.rank, np.int32),
        end=joined(before, count, after),
        end_mask=[a != axis for a in range(x.rank)],
    )


@layer_nd("argSort")
def arg_sort(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """The indices that sort along an axis."""
    x = inputs[0]
    return mb.argsort(x=x, axis=within(ctx, params.axis, x.rank), ascending=not params.descending)


def _extreme(op: str) -> Build:
    def build(ctx: Context, params: Any, inputs: list[Var]) -> Var:
        axis = within(ctx, params.axis, inputs[0].rank)
        return getattr(mb, op)(x=inputs[0], axis=axis, keep_dims=not params.removeDim)

    return build


layer_nd("argMax")(_extreme("reduce_argmax"))
layer_nd("argMin")(_extreme("reduce_argmin"))


@layer_nd("cumSum", inputs=(1, 2))
def cum_sum(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Sums of all numbers up to each along an axis, with or without itself, from either end."""
    x = inputs[0]
    axis = sizes(ctx, inputs[1]) if len(inputs) == 2 else np.array([params.axis], np.int32)

    def along(a: int) -> Var:
        return mb.cumsum(x=x, axis=a, exclusive=params.excludeFinalSum, reverse=params.reverse)

    if not isinstance(axis, Var):
        return along(within(ctx, int(axis[0]), x.rank) % x.rank)
    sums = along(0)
    for a in range(1, x.rank):  # MIL takes a constant axis only: of the sums along all axes, one is chosen
        chosen = mb.equal(x=mb.mod(x=axis, y=np.int32(x.rank)), y=np.int32(a))
        sums = mb.select(cond=chosen, a=along(a), b=sums)
    return sums
