"""Whether convolutions along an axis that is filled up give its first places what the shorter input gives.

A window that ends at its own place, behind padding at the beginning, reads nothing of what was filled up. One
that reaches further reads, at the shorter length, the zeros of its padding; it reads the same where what was
filled up is zero there, as behind a multiplication by a mask.
"""

from __future__ import annotations

from collections.abc import Iterable

from anesurgery.errors import Refusal
from anesurgery.facts.padded_ends import End
from anesurgery.facts.window_pads import window_pads
from anesurgery.mil import Operation, Var, constant, consumers, is_output, is_stored
from anesurgery.semantics.reading import ints, sliced


def unpadded(op: Operation) -> Var:
    """What a convolution reads, before a `pad` of constants that only convolutions read."""
    before: Operation | None = op.x.op
    return before.x if before is not None and is_edge(before) else op.x


def is_edge(op: Operation) -> bool:
    """Is it a `pad` of constants, whose result is read by convolutions alone?"""
    if op.op_type != "pad" or is_output(op.outputs[0]) or not is_stored(op.pad):
        return False
    if str(constant(op.inputs.get("mode")) or "constant") != "constant":
        return False
    return all(reader.op_type == "conv" and reader.x is op.outputs[0] for reader in consumers(op.outputs[0]))


def is_cut(op: Operation) -> bool:
    """Is it a convolution of whose result all readers take as many places as it reads, from the first on?"""
    made, readers = op.outputs[0], consumers(op.outputs[0])
    if op.op_type != "conv" or is_output(made) or not readers or any(n > 1 for n in ints(op, "strides")):
        return False
    wanted = (*made.shape[:2], *unpadded(op).shape[2:])
    cut = [r for r in readers if r.op_type == "slice_by_index" and r.outputs[0].shape == wanted]
    steady = all(part.stride == 1 for r in cut for part in sliced(r))
    return (
        wanted != made.shape
        and cut == readers
        and steady
        and all(begins_first(r, range(made.rank)) for r in cut)
    )


def begins_first(op: Operation, axes: Iterable[int]) -> bool:
    """Does a slice begin at the first place of some axes?"""
    parts = sliced(op)
    return all(parts[axis].begin == 0 for axis in axes)


def windows_kept(op: Operation, axis: int, end: End) -> Refusal | None:
    """Why windows along an axis would read what was filled up; None where they do not, or read zeros.

    Args:
        op: a convolution of static shape whose result is as long as `unpadded` along the axis, or, where
            it moves by more than 1, as long as that part of it. Lengths are multiples of that.
        axis: of what it reads.
        end: what lies beyond the length there.
    """
    at = axis - 2
    if at < 0:
        return Refusal(f"{op.op_type} reads across the padded axis", op)
    before, behind = _edge(op, axis)
    if behind and constant(op.x.op.inputs.get("constant_val")) not in (None, 0):
        return Refusal(
            f"{op.op_type} reads across the padded axis: its edge is filled with another number than 0", op
        )
    window = (ints(op, "dilations") or [1] * (op.x.rank - 2))[at] * (int(op.weight.shape[axis]) - 1) + 1
    after = window - stride_along(op, axis) - window_pads(op)[2 * at] - before  # of the last window
    if after > 0 and not end.is_zero:
        reads = f"{op.op_type} reads across the padded axis: {after} places beyond its end, which are not zeros"
        return Refusal(reads, op)
    return None


def stride_along(op: Operation, axis: int) -> int:
    """By how much the windows of a convolution move along an axis of what it reads."""
    return int((ints(op, "strides") or [1] * (op.x.rank - 2))[axis - 2])


def _edge(op: Operation, axis: int) -> tuple[int, int]:
    """How much a `pad` before it adds at the beginning and the end of an axis."""
    if unpadded(op) is op.x:
        return 0, 0
    pads = ints(op.x.op, "pad")
    first = op.x.rank - len(pads) // 2
    return (pads[2 * (axis - first)], pads[2 * (axis - first) + 1]) if axis >= first else (0, 0)
