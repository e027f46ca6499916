"""Windows of convolutions and pools along one axis: where they lie, and whether they look back only.

`token_axes` asks whether a convolution along the tokens looks back only, as in state-space models and LFM2:
then each result depends on its own token and the `reach` before it, with zeros before the first token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery.errors import Refusal
from anesurgery.mil import Array, Operation, constant
from anesurgery.semantics.reading import ints, number


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
        WindowAxis(
            2 + i,
            size=size,
            stride=strides[i],
            length=int(shapes[i][0]),
            count=int(shapes[i][1]),
            before=pads[2 * i],
        )
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
    """Return the parameters with which a convolution pads this axis no more."""
    pads = window_pads(op)
    pads[2 * (axis - 2) : 2 * (axis - 1)] = [0, 0]
    return {"pad_type": "custom", "pad": np.array(pads, np.int32)}


def zeros_before(op: Operation, axis: int) -> int | Refusal:
    """Return how many zeros a `pad` puts before an axis, and nowhere else; or what it does."""
    pads = ints(op, "pad")
    if not pads or str(constant(op.inputs.get("mode")) or "constant") != "constant":
        return Refusal("it pads the tokens with other tokens")
    if number(op.inputs.get("constant_val")) not in (None, 0):
        return Refusal("it pads the tokens with another number than 0")
    every = [0] * (2 * op.x.rank - len(pads)) + pads
    if any(every[2 * axis + 1 :]) or any(every[: 2 * axis]):
        return Refusal("it adds padding that is not before the first token")
    return every[2 * axis]


def _pads(op: Operation, at: int) -> list[int]:
    return window_pads(op)[2 * at : 2 * at + 2]
