"""Windows of convolutions and pools: their padding, and which elements along an axis they read.

Two uses. `token_axes` asks whether a convolution along the tokens looks back only, as in state-space models and
LFM2: then each result depends on its own token and the `reach` before it, with zeros before the first token.
`shipping.padded_rows` asks whether windows along a filled-up axis read what was filled up (`windows_kept`):
they do not if they end at their own index; those that reach further must find zeros there, as the padding of
the shorter length would give.
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
    """The windows along one axis; lengths in elements."""

    at: int
    """The axis."""
    size: int
    stride: int
    length: int
    """The length of the input's axis."""
    count: int
    """The number of windows."""
    before: int
    """The padding before the first element."""

    @property
    def around(self) -> tuple[int, int]:
        """The numbers of padded elements that are read before the beginning and beyond the end."""
        return self.before, max(self.after, 0)

    @property
    def after(self) -> int:
        """The number of elements read beyond the end; negative where the last elements are not read."""
        return (self.count - 1) * self.stride + self.size - self.length - self.before

    @property
    def whole(self) -> bool:
        """Does one window cover the whole axis?"""
        return self.count == 1 and self.after >= 0

    def counted(self, exclude: bool) -> Array:
        """Return how many elements of each window count in an average; with `exclude`, padding does not."""
        begin = np.arange(self.count) * self.stride - self.before
        if not exclude:
            return np.full(self.count, self.size)
        return np.minimum(begin + self.size, self.length) - np.maximum(begin, 0)


def window_pads(op: Operation) -> list[int]:
    """Return the padding of a conv or pool of static shape: before and after each spatial axis in turn."""
    kind, spatial = str(constant(op.inputs.get("pad_type")) or "valid"), len(op.x.shape) - 2
    if kind == "custom":
        return ints(op, "pad") or [0] * 2 * spatial
    if kind == "valid":
        return [0] * 2 * spatial
    window = ints(op, "kernel_sizes") or [int(d) for d in op.weight.shape[2:]]
    strides, dilations = (ints(op, n) or [1] * spatial for n in ("strides", "dilations"))
    pads = []
    for i in range(spatial):
        reach = dilations[i] * (window[i] - 1) + 1
        length, made = int(op.x.shape[2 + i]), int(op.outputs[0].shape[2 + i])
        total = max((made - 1) * strides[i] + reach - length, 0)
        less, more = total // 2, total - total // 2
        pads += [more, less] if kind == "same_lower" else [less, more]
    return pads


def window_axes(op: Operation) -> list[WindowAxis]:
    """Return the windows along each spatial axis of a pool."""
    window, pads = ints(op, "kernel_sizes"), window_pads(op)
    strides = ints(op, "strides") or [1] * len(window)
    shapes = list(zip(op.x.shape[2:], op.outputs[0].shape[2:], strict=True))
    return [
        WindowAxis(2 + i, size, strides[i], int(shapes[i][0]), int(shapes[i][1]), pads[2 * i])
        for i, size in enumerate(window)
    ]


def is_pointwise_along(op: Operation, axis: int) -> bool:
    """Does a convolution treat every index along an axis of its input separately?"""
    at = axis - 2
    strides = ints(op, "strides") or [1] * (op.x.rank - 2)
    return at >= 0 and op.weight.shape[axis] == strides[at] == 1 and not any(_pads(op, at))


def reach(op: Operation, axis: int, zeros: int) -> int | Refusal:
    """Return how many tokens before its own a result of a convolution looks at; or why it is not causal.

    Args:
        op: the convolution, of static shape.
        axis: the axis of its input that holds the tokens.
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
    return before.x if before is not None and is_pad_of_convs(before) else op.x


def is_pad_of_convs(op: Operation) -> bool:
    """Is an op a `pad` with constants whose result only convolutions read?"""
    if op.op_type != "pad" or is_output(op.outputs[0]) or not is_stored(op.pad):
        return False
    if str(constant(op.inputs.get("mode")) or "constant") != "constant":
        return False
    return all(reader.op_type == "conv" and reader.x is op.outputs[0] for reader in consumers(op.outputs[0]))


def is_cut_to_input(op: Operation) -> bool:
    """Do all readers of a convolution cut its result to the length of its input, from the first index on?"""
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
        and all(begins_at_zero(r, range(made.rank)) for r in cut)
    )


def begins_at_zero(op: Operation, axes: Iterable[int]) -> bool:
    """Does a slice begin at index 0 of some axes?"""
    parts = sliced(op)
    return all(parts[axis].begin == 0 for axis in axes)


def windows_kept(op: Operation, axis: int, end: End) -> Refusal | None:
    """Return why windows along an axis would read what was filled up; None where they do not, or read zeros.

    Args:
        op: a convolution of static shape. Its result is as long as `unpadded` along the axis, divided by the
            stride; lengths are multiples of the stride.
        axis: the axis of its input.
        end: the elements beyond the length there.
    """
    at = axis - 2
    if at < 0:
        return Refusal(f"{op.op_type} reads across the padded axis", op)
    before, behind = _pad_before_conv(op, axis)
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
    """Return the stride of a convolution along an axis of its input."""
    return int((ints(op, "strides") or [1] * (op.x.rank - 2))[axis - 2])


def _pad_before_conv(op: Operation, axis: int) -> tuple[int, int]:
    """Return how much a `pad` before a convolution adds at the beginning and the end of an axis."""
    if unpadded(op) is op.x:
        return 0, 0
    pads = ints(op.x.op, "pad")
    first = op.x.rank - len(pads) // 2
    return (pads[2 * (axis - first)], pads[2 * (axis - first) + 1]) if axis >= first else (0, 0)
