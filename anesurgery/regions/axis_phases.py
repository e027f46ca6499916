"""Neighbours on an axis as channels, and back: an axis of frames is shorter than one of elements."""

from __future__ import annotations

from anesurgery.mil import Maker, Var


def framed(mb: Maker, x: Var, axis: int, frame: int, count: int, left: int) -> Var:
    """The axis in `count` frames, `left` zeros first; the elements of a frame are channels."""
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
    if before[1:] == [1]:  # one channel, and the first axis after it
        x = mb.reshape(x=x, shape=[before[0], count, frame, *after])
        return mb.transpose(x=x, perm=[0, 2, 1, *range(3, x.rank)])
    x = mb.reshape(x=x, shape=[*before, count, frame, *after])
    x = mb.transpose(x=x, perm=[0, 1, axis + 1, *(a for a in range(2, x.rank) if a != axis + 1)])
    return mb.reshape(x=x, shape=[before[0], before[1] * frame, *before[2:], count, *after])


def unfolded(mb: Maker, x: Var, axis: int, phases: int, results: int) -> Var:
    """The phases among the channels become neighbours on the axis; `results` of them stay."""
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
