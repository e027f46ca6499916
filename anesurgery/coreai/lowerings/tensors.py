"""Lower ops that move, select or make elements: shapes, slices, joins, fills, ranges, and blocks of pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from anesurgery.coreai.lowerings import TABLE, Mode, as_interpreted, lowers
from anesurgery.coreai.lowerings.indexing import from_front, take
from anesurgery.coreai.values import LONGEST, Value, array, call, concat, indices, known_ints, stack, where
from anesurgery.errors import NotExpressible
from anesurgery.mil import Operation, dtype_name, static_shape
from anesurgery.ops import names


@lowers("reshape", "reshape_like", "flatten2d")
def reshape(x: Value, op: Operation, shape: Any = None, **_ignored: Any) -> Value:
    """Reshape to the lengths that MIL infers, or to computed ones.

    A 0 keeps the length of x on that axis; axes are counted from the last.
    """
    if (fixed := static_shape(op.outputs[0])) is not None:
        return x.reshape(fixed)
    if shape is None:
        raise NotExpressible(f"the shape {tuple(op.outputs[0].shape)} of the result is dynamic")
    if isinstance(shape, Value) and shape.known is None:
        return x.reshape(shape)
    wanted = known_ints(shape, "shape")
    if 0 not in wanted:
        return x.reshape(wanted)
    kept = [0] * max(len(wanted) - x.ndim, 0) + list(range(max(x.ndim - len(wanted), 0), x.ndim))
    of_x = x.lengths()
    parts = [of_x.along(0, at, at + 1) if n == 0 else indices([n]) for n, at in zip(wanted, kept, strict=True)]
    return x.reshape(concat(parts, 0))


@lowers("concat")
def _concat(values: Sequence[Value], axis: int = 0, interleave: bool = False) -> Value:
    values = [value if value.ndim else value.expand([0]) for value in values]  # a scalar counts as one element
    axis = axis % values[0].ndim
    if not interleave:
        return concat(values, axis)
    shape = values[0].shape
    shape[axis] *= len(values)
    return stack(values, axis + 1).reshape(shape)


@lowers("split")
def _split(x: Value, axis: int, num_splits: int = 1, split_sizes: Any = None) -> list[Value]:
    if split_sizes is None:
        return x.chunk(num_splits, axis)
    sizes = known_ints(split_sizes, "sizes")
    return [x.along(axis, end - size, end) for size, end in zip(sizes, np.cumsum(sizes).tolist(), strict=True)]


@lowers("tile")
def tile(x: Value, reps: Any) -> Value:
    """Write a repetition; its counts may be computed. Apple's compiler crashes where all counts are 1."""
    times = indices(reps)
    return x if times.known is not None and np.all(times.known == 1) else call("tile", x, times.cast("uint32"))


@lowers("pad")
def _pad(x: Value, pad: Any, mode: str = "constant", constant_val: float = 0.0) -> Value:
    amounts = known_ints(pad, "the padding")
    pairs = list(zip(amounts[::2], amounts[1::2], strict=True))
    if min(amounts, default=0) < 0:
        raise NotExpressible(f"the padding {amounts} is negative")
    return x.pad(pairs, constant_val if mode == "constant" else 0, mode)


def _known_bounds(
    x: Value, begin: list[int], end: list[int], stride: list[int], masks: Sequence[list[bool]]
) -> tuple[Value, list[list[int]]]:
    """Return x and begins, ends and positive strides; an axis that is read backwards is reversed first.

    A slice of Core AI does not reach index 0 backwards: x[7:2:-2] of length 10 takes the places 7, 5 and 3, and
    is written as the slice [2:7:2] of x reversed. The masks of an axis say whether its begin and its end are
    ignored, and whether one position is taken.
    """
    bounds, turned = [], []
    for axis, length in enumerate(x.shape):
        from_start, to_end, single = (mask[axis] for mask in masks)
        first, end_, step = 0 if from_start else begin[axis], end[axis], stride[axis]
        if single:
            bounds.append([first, first + 1 or LONGEST, 1])  # the end behind position -1 is not 0
            continue
        if step < 0:
            turned.append(axis)
        if length < 0:
            if step < 0 and not (from_start and to_end):
                raise NotExpressible(f"axis {axis} is read backwards, and its length is dynamic")
            bounds.append([first, LONGEST if to_end else end_, abs(step)])
        else:
            places = range(length)[slice(None if from_start else first, None if to_end else end_, step)]
            first = length - 1 - places.start if step < 0 else places.start
            reach = (len(places) - 1) * abs(step) + 1 if len(places) else 0
            bounds.append([first, first + reach, abs(step)])
    x = x.flip(turned) if turned else x
    return x, [list(numbers) for numbers in zip(*bounds, strict=True)]


def _computed_bounds(
    x: Value, begin: Value, end: Value, stride: list[int], masks: Sequence[list[bool]]
) -> list[Any]:
    """Return begins and ends counted from the front, where some are computed."""
    if min(stride) < 0:
        raise NotExpressible("an axis is read backwards between places that are computed")
    from_start, to_end, single = (array(mask, "bool") if any(mask) else None for mask in masks)
    lengths = x.lengths() if -1 in x.shape else indices(x.shape)
    begin, end = (from_front(places.cast("int32"), lengths) for places in (begin, end))
    begin = begin if from_start is None else where(from_start, 0, begin)
    end = end if to_end is None else where(to_end, lengths, end)
    return [begin, end if single is None else where(single, begin + 1, end), stride]


def _bounds(
    x: Value, begin: Value, end: Value, stride: Any = None, **flags: Any
) -> tuple[Value, list[Any], list[int]]:
    """Return x, perhaps reversed; begins, ends and strides of a slice of it; and the axes that are dropped."""
    steps = [1] * x.ndim if stride is None else known_ints(stride, "stride")
    given = (flags.get(name) for name in ("begin_mask", "end_mask", "squeeze_mask"))
    masks = [[bool(m) for m in mask or [False] * x.ndim] for mask in given]
    dropped = [axis for axis in range(x.ndim) if masks[2][axis]]
    if begin.known is None or end.known is None:
        return x, _computed_bounds(x, begin, end, steps, masks), dropped
    x, bounds = _known_bounds(x, begin.tolist(), end.tolist(), steps, masks)
    return x, bounds, dropped


@lowers("slice_by_index")
def slice_by_index(x: Value, begin: Value, end: Value, **masks: Any) -> Value:
    """Write a slice; single positions drop their axis."""
    x, bounds, dropped = _bounds(x, begin, end, **masks)
    return x.slice(*bounds).refined([1 if a in dropped else -1 for a in range(x.ndim)]).squeeze(dropped)


@lowers("slice_by_size")
def slice_by_size(x: Value, begin: Value, size: Any) -> Value:
    """Write a slice of known size; -1 reaches to the end."""
    sizes = known_ints(size, "size")
    if begin.known is None:
        first = from_front(begin.cast("int32"), x.lengths() if -1 in x.shape else indices(x.shape))
    else:
        first = indices([b + n if b < 0 < n else b for b, n in zip(begin.tolist(), x.shape, strict=True)])
    if first.known is None:
        last = first + indices(sizes)
    else:  # the end behind the last of a dynamic length is not 0
        ends = ((b, b + n) for b, n in zip(first.tolist(), sizes, strict=True))
        last = indices([LONGEST if b < 0 <= end else end for b, end in ends])
    return slice_by_index(x, first, last, end_mask=[n == -1 for n in sizes])


@lowers("slice_update")
def slice_update(x: Value, update: Value, begin: Value, end: Value, **masks: Any) -> Value:
    """Write x with a slice replaced."""
    turned, bounds, dropped = _bounds(x, begin, end, **masks)
    if turned is not x:
        raise NotExpressible("a slice is written backwards")
    return call("slice_update", x, *map(indices, bounds), update.expand(dropped))


@lowers("band_part")
def _band_part(x: Value, lower: int = -1, upper: int = -1) -> Value:
    rows, columns = x.fixed_lengths(-2)
    below = np.arange(rows)[:, None] - np.arange(columns)
    keep = ((lower < 0) | (below <= lower)) & ((upper < 0) | (-below <= upper))
    return where(array(keep, "bool"), x, 0)


@lowers("one_hot")
def _one_hot(
    indices: Value, one_hot_vector_size: Any, op: Operation, mode: Mode, axis: int = -1, **numbers: Any
) -> Value:
    (size,) = known_ints(one_hot_vector_size, "the number of classes")
    axis = axis % (indices.ndim + 1)
    classes = array(np.arange(size).reshape([-1 if a == axis else 1 for a in range(indices.ndim + 1)]), "int32")
    hit, dtype = indices.expand([axis]).cast("int32").equal(classes), mode.dtype(dtype_name(op.outputs[0]))
    on, off = numbers.get("on_value", 1), numbers.get("off_value", 0)
    return where(hit, *(v if isinstance(v, Value) else array(v, dtype) for v in (on, off)))


@lowers("fill", "fill_like")
def fill(op: Operation, shape: Any = None, ref_tensor: Value | None = None, value: Any = 0.0) -> Value:
    """Write one number for all elements, in a shape that may be computed, or that of a tensor."""
    one = value if isinstance(value, Value) else array(value, "fp32")
    if (fixed := static_shape(op.outputs[0])) is not None:
        return one.broadcast(list(fixed))
    return one.broadcast(indices(shape) if ref_tensor is None else ref_tensor.lengths())


@lowers("sliding_windows")
def _sliding_windows(x: Value, axis: int, size: int, stride: int = 1) -> Value:
    count = (x.length(axis) - size) // stride + 1
    return take(x, indices(np.arange(count)[:, None] * stride + np.arange(size)), axis % x.ndim)


TABLE |= {
    "squeeze": lambda x, axes=None: x.squeeze(
        sorted(a % x.ndim for a in axes) if axes else [a for a, n in enumerate(x.shape) if n == 1]
    ),
    "expand_dims": lambda x, axes: x.expand(sorted(a % (x.ndim + len(axes)) for a in axes)),
    "transpose": lambda x, perm: x.permute([a % x.ndim for a in perm]),
    "stack": lambda values, axis=0: stack(values, axis % (values[0].ndim + 1)),
    "range_1d": lambda start, end, step: call("range", start, end, step),
    "shape": lambda x: x.lengths(),
    "non_zero": lambda x: call("non_zero", x),
}


as_interpreted(
    *names(
        "reverse crop depth_to_space space_to_depth pixel_shuffle pixel_unshuffle space_to_batch batch_to_space"
    )
)
