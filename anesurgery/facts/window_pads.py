"""Where the windows of a convolution or a pool of static shape lie, and what they pad."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery.mil import Array, Operation, constant
from anesurgery.semantics.reading import ints


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
