"""Small builders that many passes share: an op with other inputs, a slice, a reshape, a cast to another dtype.

Each returns its operand unchanged if there is nothing to do: `reshaped(mb, x, x.shape)` is x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from anesurgery.facts.row_tails import Tail
from anesurgery.mil import Maker, Operation, Var, consumers, is_output, np_dtype, op_inputs
from anesurgery.semantics.reading import each_axis
from anesurgery.semantics.rows import axes_not_squeezed, squeezed_axes


def again(mb: Maker, op: Operation, **changed: Any) -> Var:
    """Build the same op with some inputs changed; `name=` asks for a name. For ops with one result."""
    return getattr(mb, op.op_type)(**{**op_inputs(op), **changed})


def cut(mb: Maker, x: Var, axis: int, start: int, length: int, stride: int = 1, **named: str) -> Var:
    """Return every `stride`-th of the next `length` elements of an axis from `start` on.

    Returns:
        `x` itself if that is all.
    """
    if length == x.shape[axis] and stride == 1:
        return x
    begin, end = [0] * x.rank, [int(d) for d in x.shape]
    begin[axis], end[axis] = start, start + length
    steps = {} if stride == 1 else {"stride": [stride if a == axis else 1 for a in range(x.rank)]}
    return mb.slice_by_index(x=x, begin=begin, end=end, **steps, **named)


def parted(mb: Maker, x: Var, axis: int, sizes_or_count: Sequence[int] | int, **named: str) -> list[Var]:
    """Split an axis into parts of the given sizes, or into so many equal parts; one part is `x` itself."""
    parts: Any
    if isinstance(sizes_or_count, int):
        parts = [x] if sizes_or_count == 1 else mb.split(x=x, num_splits=sizes_or_count, axis=axis, **named)
    elif len(sizes_or_count) == 1:
        parts = [x]
    else:
        parts = mb.split(x=x, split_sizes=list(sizes_or_count), axis=axis, **named)
    return list(parts)


def joined(mb: Maker, parts: Sequence[Var], axis: int, **named: str) -> Var:
    """Concatenate values along an axis; a single value is returned unchanged."""
    return parts[0] if len(parts) == 1 else mb.concat(values=tuple(parts), axis=axis, **named)


def reshaped(mb: Maker, x: Var, shape: Sequence[int], **named: str) -> Var:
    """Return the same elements in another shape; `x` itself where that is its own."""
    return x if tuple(x.shape) == tuple(shape) else mb.reshape(x=x, shape=list(shape), **named)


def tail_on_row(mb: Maker, tail: Tail, row: Var) -> Var:
    """Build the ops of a tail again on `row`, one position of the tail's source."""
    new: dict[Var, Var] = {tail.source: row}

    def swap(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [swap(v) for v in value]
        return new.get(value, value)

    for op, axis in tail.ops:
        inputs = {name: swap(v) for name, v in op_inputs(op).items()}
        if op.op_type == "reshape":
            inputs["shape"] = [1 if a == axis else d for a, d in enumerate(op.outputs[0].shape)]
        if op.op_type == "squeeze":  # without the axis of the rows, which now has length 1
            inputs["axes"] = squeezed_axes(op)
        if op.op_type == "slice_by_index":
            inputs |= _masks_for_full_axis(op, axis)
        new[op.outputs[0]] = getattr(mb, op.op_type)(**inputs, name=f"{op.name}_row")
    return new[tail.ops[-1][0].outputs[0]] if tail.ops else row


def _masks_for_full_axis(op: Operation, axis: int) -> dict[str, list[bool]]:
    """Return masks that make a slice take all of an axis of its result, whatever its new length is."""
    full_axis = axes_not_squeezed(op)[axis]
    return {
        name: [m or a == full_axis for a, m in enumerate(each_axis(op, name, False))]
        for name in ("begin_mask", "end_mask")
    }


def framed(mb: Maker, x: Var, axis: int, frame: int, count: int, left: int) -> Var:
    """Split an axis into `count` frames of `frame` elements after `left` zeros; these elements become channels.

    Elements beyond the last frame are cut off. Example: axis 3 of (1, 1, 1, 6) with frame 2 and count 3 gives
    (1, 2, 1, 3).
    """
    shape = [int(d) for d in x.shape]
    right = frame * count - left - shape[axis]
    if right < 0:
        shape[axis] += right
        x, right = mb.slice_by_size(x=x, begin=[0] * x.rank, size=shape), 0
    if left or right:
        pad = [0] * 2 * x.rank
        pad[2 * axis : 2 * axis + 2] = [left, right]
        x = mb.pad(x=x, pad=pad)
    before, after = shape[:axis], shape[axis + 1 :]
    if before[1:] == [1]:  # axis 2 of one channel: a reshape less
        x = mb.reshape(x=x, shape=[before[0], count, frame, *after])
        return mb.transpose(x=x, perm=[0, 2, 1, *range(3, x.rank)])
    x = mb.reshape(x=x, shape=[*before, count, frame, *after])
    x = mb.transpose(x=x, perm=[0, 1, axis + 1, *(a for a in range(2, x.rank) if a != axis + 1)])
    return mb.reshape(x=x, shape=[before[0], before[1] * frame, *before[2:], count, *after])


def unfolded(mb: Maker, x: Var, axis: int, phases: int, results: int) -> Var:
    """Undo `framed`: interleave `phases` groups of channels into an axis, and keep `results` elements of it."""
    b, channels, *spatial = (int(d) for d in x.shape)
    if phases > 1:
        if channels == phases:
            x = mb.transpose(x=x, perm=[0, *range(2, axis + 1), 1, *range(axis + 1, x.rank)])
        else:
            x = mb.reshape(x=x, shape=[b, channels // phases, phases, *spatial])
            x = mb.transpose(x=x, perm=[0, 1, *range(3, axis + 2), 2, *range(axis + 2, x.rank)])
        spatial[axis - 2] *= phases
        x = mb.reshape(x=x, shape=[b, channels // phases, *spatial])
    if spatial[axis - 2] != results:
        spatial[axis - 2] = results
        x = mb.slice_by_size(x=x, begin=[0] * x.rank, size=[b, channels // phases, *spatial])
    return x


def for_readers(mb: Maker, old: Var, new: Var) -> dict[Var, Var]:
    """Return old -> new value, cast back if the new one is narrower.

    If the only reader of the old value casts it to that narrower dtype, the reader's result is replaced
    instead.
    """
    readers = consumers(old)
    if len(readers) == 1 and not is_output(old) and np_dtype(old) != np_dtype(new):
        narrowed: Var = readers[0].outputs[0]
        if readers[0].op_type == "cast" and np_dtype(narrowed) == np_dtype(new):
            return {narrowed: new}
    return {old: as_dtype(mb, new, np_dtype(old))}


def dtype_word(dtype: np.dtype[np.generic]) -> str:
    """Return a float dtype as `cast` names it."""
    return "fp16" if dtype == np.float16 else "fp32"


def as_dtype(mb: Maker, var: Var, dtype: np.dtype[np.generic]) -> Var:
    """Return a value in a float dtype: fp16 or fp32."""
    if np_dtype(var) == dtype:
        return var
    return mb.cast(x=var, dtype=dtype_word(dtype))
