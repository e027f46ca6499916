"""Layers that take or write parts of arrays: slices, windows, margins, gather, scatter, the largest, sorting.

Indices are blobs too, so whole floats; the ops take and give int32. Negative ones count from the end here, but
lie outside for MIL's ops of iOS 17: they are made positive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from anesurgery.mil import Array, Var, is_symbolic, mb, producer
from anesurgery.neuralnetwork.context import Build, Context, layer_nd
from anesurgery.neuralnetwork.layers.blob_axes import (
    Numbers,
    joined,
    known,
    lengths,
    of_each,
    of_rank,
    sizes,
    squeezed,
    whole,
    within,
)
from anesurgery.neuralnetwork.spec import DAMAGED

Flags = list[list[int]]
MASKS = ("beginMasks", "endMasks", "squeezeMasks")
"""Which beginnings and ends are those of the axis, and which axes are taken away."""


def _slice(ctx: Context, x: Var, begin: Numbers, end: Numbers, stride: Sequence[int], flags: Flags) -> Var:
    _check_parts(ctx, x, begin, end, stride, flags)
    no_begin, no_end, drop = (np.array(f, bool) for f in flags)
    last = drop & no_begin & (np.array(stride) < 0)
    if last.any():  # the first element, backwards: MIL's op with one element begins at 0
        no_begin = no_begin & ~last
        back = np.full(last.shape, -1, np.int32)
        begin = mb.select(cond=last, a=back, b=begin) if isinstance(begin, Var) else np.where(last, back, begin)
    if drop.all() and x.val is None and x.sym_val is not None and not isinstance(begin, Var):
        return _element(x, np.where(no_begin, 0, begin))
    return mb.slice_by_index(
        x=x,
        begin=begin,
        end=end,
        stride=np.array(stride, np.int32),
        begin_mask=no_begin,
        end_mask=no_end,
        squeeze_mask=drop,
    )


def _check_parts(
    ctx: Context, x: Var, begin: Numbers, end: Numbers, stride: Sequence[int], flags: Flags
) -> None:
    """Refuse a slice with stride 0, or one that is empty where size and ends are static."""
    if 0 in stride:
        raise ctx.error(f"has the strides {list(stride)}, expected none that is 0; {DAMAGED}")
    ends = [[None] * x.rank if isinstance(v, Var) else [int(n) for n in v] for v in (begin, end)]
    for name, numbers in zip(("begin", "end"), ends, strict=True):
        if len(numbers) != x.rank:
            raise ctx.error(
                f"has the {name} {numbers} for an input of {x.rank} axes, expected one number each; {DAMAGED}"
            )
    for axis, (size, first, last, step) in enumerate(zip(x.shape, *ends, stride, strict=True)):
        no_begin, no_end, drop = (bool(f[axis]) for f in flags)
        unknown = (not no_begin and first is None) or (not (no_end or drop) and last is None)
        if is_symbolic(size) or not size or unknown:
            continue
        begins, stops = None if no_begin else first, None if no_end else last
        if drop:  # one element; of 0 to the size, or from the end
            taken, there = str(begins), begins is None or -size <= begins < size
        else:
            part = slice(begins, stops, step)
            taken, there = f"{begins}:{stops}:{step}", bool(range(*part.indices(size)))
        if not there:
            raise ctx.error(
                f"takes [{taken}] of axis {axis}, whose size is {size}: expected a part that is not empty; "
                f"{DAMAGED}"
            )


def _element(x: Var, place: Array) -> Var:
    """Return one number, without axes, of dynamic sizes.

    Of such numbers MIL's slice cannot take away all axes: coremltools keeps a symbol as the result's value, and
    then asks it for an array.
    """
    part = mb.slice_by_index(x=x, begin=place, end=place + 1, end_mask=place == -1)
    return mb.squeeze(x=part)


@layer_nd("sliceStatic")
def slice_static(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """[begin : end : stride] of each axis."""
    x = of_rank(inputs[0], len(params.beginIds))
    begin, end = (np.array(ids, np.int32) for ids in (params.beginIds, params.endIds))
    flags = [of_each(getattr(params, m), x.rank, False) for m in MASKS]
    return _slice(ctx, x, begin, end, of_each(params.strides, x.rank, 1), flags)


@layer_nd("sliceDynamic", inputs=(2, 7))
def slice_dynamic(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build `slice_static` of inputs: data, begin, and if need be end, strides and the three masks."""
    begin = sizes(ctx, inputs[1])
    x = of_rank(inputs[0], int(begin.shape[0]))
    end = sizes(ctx, inputs[2]) if len(inputs) > 2 else np.array(params.endIds, np.int32)
    strides = of_each(_fixed(ctx, inputs, 3, "strides", params.strides), x.rank, 1)
    flags = [
        of_each(_fixed(ctx, inputs, 4 + i, name, getattr(params, name)), x.rank, False)
        for i, name in enumerate(MASKS)
    ]
    return _slice(ctx, x, begin, end, strides, flags)


def _fixed(ctx: Context, inputs: list[Var], at: int, what: str, stated: Sequence[Any]) -> Any:
    """Return what MIL's op takes as a constant only: from an input, else as the layer states it."""
    return known(ctx, inputs[at], f"its {what}") if len(inputs) > at else stated


@layer_nd("sliceBySize", inputs=2)
def slice_by_size(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """[begin : begin + size] of one axis, where the second input is begin."""
    x = inputs[0]
    axis = within(ctx, params.axis, x.rank) % x.rank
    begin = sizes(ctx, inputs[1])
    _check_run(ctx, begin, int(params.size), x.shape[axis])
    before, after = np.zeros(axis, np.int32), np.zeros(x.rank - 1 - axis, np.int32)
    size = [-1 if is_symbolic(d) else int(d) for d in x.shape]
    size[axis] = int(params.size)
    return mb.slice_by_size(x=x, begin=joined(before, begin, after), size=size)


def _check_run(ctx: Context, begin: Numbers, count: int, size: Any) -> None:
    """Refuse a run of numbers that leaves its axis; -1 is the length of all that follow."""
    if is_symbolic(size):
        return
    first = 0 if isinstance(begin, Var) else int(begin[0])
    first += size if first < 0 else 0
    if not 0 <= first < size or count < -1 or count == 0 or first + count > size:
        raise ctx.error(
            f"takes {count} numbers of an axis of {size} from place {first} on, expected a part of it; "
            f"{DAMAGED}"
        )


@layer_nd("slidingWindows")
def sliding_windows(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build all windows along an axis: their number takes its place, their numbers are a new axis after it."""
    axis, count = within(ctx, params.axis, inputs[0].rank), int(params.windowSize)
    size = inputs[0].shape[axis]
    if count < 1 or (not is_symbolic(size) and count > size):
        raise ctx.error(f"has windows of {count} numbers on an axis of {size}, expected 1 to {size}; {DAMAGED}")
    return mb.sliding_windows(x=inputs[0], axis=axis, size=count, stride=int(params.step) or 1)


@layer_nd("constantPad", inputs=(1, 2))
def constant_pad(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build a margin of one number; stated as (before, after) of each axis, or as the sizes of the result."""
    amounts = sizes(ctx, inputs[1]) if len(inputs) == 2 else np.array(params.padAmounts, np.int32)
    x = of_rank(inputs[0], int(amounts.shape[0]) // 2)
    if amounts.shape[0] != 2 * x.rank:
        raise ctx.error(
            f"has {amounts.shape[0]} amounts for an input of {x.rank} axes, expected {2 * x.rank}; {DAMAGED}"
        )
    if params.padToGivenOutputSizeMode:
        amounts = _missing(ctx, x, amounts)
    return mb.pad(x=x, pad=amounts, mode="constant", constant_val=np.float32(params.value))


def _missing(ctx: Context, x: Var, wanted: Numbers) -> Numbers:
    """What lacks of the wanted sizes, which go before or after each axis; 0 asks for nothing."""
    if isinstance(wanted, Var) or any(is_symbolic(d) for d in x.shape):
        twice = mb.concat(values=[mb.shape(x=x)] * 2, axis=0, interleave=True)
        return mb.maximum(x=mb.sub(x=wanted, y=twice), y=np.int32(0))
    lacks: Array = np.maximum(np.asarray(wanted) - np.repeat(ctx.shape(x), 2), 0)
    return lacks.astype(np.int32)


F = np.float32
MODES = ("update", "add", "sub", "mul", "div", "max", "min")
"""What a scatter does with what is there, by the number of `ScatterMode`."""


COUNTS = ("argsort", "non_zero", "reduce_argmax", "reduce_argmin", "shape", "topk")
"""Ops that never give a negative index."""


def _indices(ctx: Context, indices: Var, x: Var, axes: Sequence[int]) -> Numbers:
    """Return indices of some axes of `x` as int32, those that count from the end made positive.

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
    """Build the slices along an axis that the second input lists; its shape replaces the axis."""
    x = inputs[0]
    indices = _indices(ctx, inputs[1], x, [params.axis])
    return mb.gather(x=x, indices=indices, axis=params.axis)


@layer_nd("gatherND", inputs=2)
def gather_nd(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build the slices at indices of several axes, given along the last axis of the second input."""
    x = inputs[0]
    (count,) = ctx.shape(inputs[1], [-1])
    return mb.gather_nd(x=x, indices=_indices(ctx, inputs[1], x, range(count)))


@layer_nd("gatherAlongAxis", inputs=2)
def gather_along_axis(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Take for each place the number along an axis that the second input says there."""
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
    """Build the row of a table for each index; the last axis, of size 1, becomes that of the row."""
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
    """Build one number at each index, another one elsewhere, along a new axis."""
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


@layer_nd("topK", inputs=(1, 2))
def top_k(ctx: Context, params: Any, inputs: list[Var]) -> list[Var]:
    """Build the K largest (or smallest) numbers along an axis, sorted, and their indices.

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
    """Return the first slices along an axis."""
    before, after = np.zeros(axis, np.int32), np.zeros(x.rank - 1 - axis, np.int32)
    return mb.slice_by_index(
        x=x,
        begin=np.zeros(x.rank, np.int32),
        end=joined(before, count, after),
        end_mask=[a != axis for a in range(x.rank)],
    )


@layer_nd("argSort")
def arg_sort(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build the indices that sort along an axis."""
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
        chosen = mb.equal(x=mb.mod(x=mb.add(x=axis, y=np.int32(x.rank)), y=np.int32(x.rank)), y=np.int32(a))
        sums = mb.select(cond=chosen, a=along(a), b=sums)
    return sums
