"""Where the windows of a convolution or a pool lie: what they pad, and which tokens or frames they read.

A convolution along the tokens that looks back only, as state-space models and LFM2 have it: each result depends
on its own token and the `reach` before it; before the first token stand zeros. Where it pads its end too, its
last results look ahead, and are cut off by what reads them.

Along an axis that is filled up, a window that ends at its own place, behind padding at the beginning, reads
nothing of what was filled up. One that reaches further reads, at the shorter length, the zeros of its padding;
it reads the same where what was filled up is zero there, as behind a multiplication by a mask.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery.errors import Refusal
from anesurgery.facts.padded_ends import End
from anesurgery.mil import Array, Operation, Var, constant, consumers, is_output, is_stored
from anesurgery.semantics.reading import ints, number, sliced


@dataclass(frozen=True)
class WindowAxis:
    """The windows along one axis."""

    at: int
    size: int
    stride: int
    length: int
    count: int
    before: int

    @property
    def around(self) -> tuple[int, int]:
        """What is read before the beginning and beyond the end."""
        return self.before, max(self.after, 0)

    @property
    def after(self) -> int:
        """What is read beyond the end; negative where the last elements are not read."""
        return (self.count - 1) * self.stride + self.size - self.length - self.before

    @property
    def whole(self) -> bool:
        """Does one window cover everything?"""
        return self.count == 1 and self.after >= 0

    def counted(self, exclude: bool) -> Array:
        """For each window, how many of its elements count."""
        begin = np.arange(self.count) * self.stride - self.before
        if not exclude:
            return np.full(self.count, self.size)
        return np.minimum(begin + self.size, self.length) - np.maximum(begin, 0)


def window_pads(op: Operation) -> list[int]:
    """The padding of a conv or pool of static shape: before and after each spatial axis in turn."""
    kind, spatial = str(constant(op.inputs.get("pad_type")) or "valid"), len(op.x.shape) - 2
    if kind == "custom":
        return ints(op, "pad") or [0] * 2 * spatial
    if kind == "valid":
        return [0] * 2 * spatial
    window = ints(op, "kernel_sizes") or [int(d) for d in op.weight.shape[2:]]
    strides, dilations = (ints(op, n) or [1] * spatial for n in ("strides", "dilations"))
    found = []
    for i in range(spatial):
        reach = dilations[i] * (window[i] - 1) + 1
        length, made = int(op.x.shape[2 + i]), int(op.outputs[0].shape[2 + i])
        total = max((made - 1) * strides[i] + reach - length, 0)
        less, more = total // 2, total - total // 2
        found += [more, less] if kind == "same_lower" else [less, more]
    return found


def window_axes(op: Operation) -> list[WindowAxis]:
    """The windows along each axis."""
    window, pads = ints(op, "kernel_sizes"), window_pads(op)
    strides = ints(op, "strides") or [1] * len(window)
    shapes = list(zip(op.x.shape[2:], op.outputs[0].shape[2:], strict=True))
    return [
        WindowAxis(2 + i, size, strides[i], int(shapes[i][0]), int(shapes[i][1]), pads[2 * i])
        for i, size in enumerate(window)
    ]


def pointwise(op: Operation, axis: int) -> bool:
    """Does a convolution treat every place of an axis of its input alone?"""
    at = axis - 2
    strides = ints(op, "strides") or [1] * (op.x.rank - 2)
    return at >= 0 and op.weight.shape[axis] == strides[at] == 1 and not any(_pads(op, at))


def reach(op: Operation, axis: int, zeros: int) -> int | Refusal:
    """How many tokens before its own each result of a convolution looks at; or why it is not causal.

    Args:
        op: the convolution, of static shape.
        axis: of its input, which holds the tokens.
        zeros: how many zeros stand before the first token already.
    """
    at = axis - 2
    strides, dilations = (ints(op, n) or [1] * (op.x.rank - 2) for n in ("strides", "dilations"))
    if at < 0 or strides[at] != 1:
        return Refusal("it sums over the tokens" if at < 0 else f"its window moves by {strides[at]} tokens")
    found: int = (int(op.weight.shape[axis]) - 1) * dilations[at]
    before = zeros + _pads(op, at)[0]
    if before != found:
        word = "looks ahead of a token" if before < found else "leaves out the token itself"
        return Refusal(
            f"its window is {found + 1} tokens wide, with {before} zeros before the first: it {word}"
        )
    return found


def without_pads(op: Operation, axis: int) -> dict[str, Any]:
    """The parameters with which a convolution pads this axis no more."""
    pads = window_pads(op)
    pads[2 * (axis - 2) : 2 * (axis - 1)] = [0, 0]
    return {"pad_type": "custom", "pad": np.array(pads, np.int32)}


def zeros_before(op: Operation, axis: int) -> int | Refusal:
    """How many zeros a `pad` puts before an axis, and nowhere else; or what it does."""
    pads = ints(op, "pad")
    if not pads or str(constant(op.inputs.get("mode")) or "constant") != "constant":
        return Refusal("it pads the tokens with other tokens")
    if number(op.inputs.get("constant_val")) not in (None, 0):
        return Refusal("it pads the tokens with another number than 0")
    every = [0] * (2 * op.x.rank - len(pads)) + pads
    if any(every[2 * axis + 1 :]) or any(every[: 2 * axis]):
        return Refusal("it pads more than what stands before the first token")
    return every[2 * axis]


def _pads(op: Operation, at: int) -> list[int]:
    return window_pads(op)[2 * at : 2 * at + 2]


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
