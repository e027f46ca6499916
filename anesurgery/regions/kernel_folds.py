"""Long kernels as short ones: neighbours as channels, or pieces that read the input shifted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anesurgery.mil import Array, Maker, Var
from anesurgery.regions.axis_phases import framed
from anesurgery.regions.weight_edits import Edit


@dataclass(frozen=True)
class Fold:
    """How one axis of a convolution is folded."""

    axis: int
    stride: int
    dilation: int
    reach: int
    """Elements from the first to the last tap."""
    phases: int
    """Neighbouring results that become channels."""

    @property
    def frame(self) -> int:
        """Elements of the input that become channels."""
        return self.stride * self.phases

    @property
    def taps(self) -> int:
        """Width of the folded kernel."""
        return math.ceil((self.stride * (self.phases - 1) + self.reach) / self.frame)

    def weight(self, old: Array) -> Array:
        """The taps of the axis go to the channels: that of a frame's elements, times that of the phases."""
        flat = np.moveaxis(old, self.axis, -1)
        outputs, inputs, *others, width = flat.shape
        new = np.zeros((outputs, self.phases, inputs, self.frame, *others, self.taps), old.dtype)
        for phase in range(self.phases):
            for k in range(width):
                tap, place = divmod(self.stride * phase + self.dilation * k, self.frame)
                new[:, phase, :, place, ..., tap] = flat[..., k]
        folded = new.reshape(outputs * self.phases, inputs * self.frame, *others, self.taps)
        return np.moveaxis(folded, -1, self.axis)

    def edit(self, shape: Sequence[int]) -> Edit:
        """Which axes the new weight has: for the taps, which are mixed, any of the old ones."""
        outputs, inputs = (
            np.repeat(np.arange(int(shape[a])), n) for a, n in ((0, self.phases), (1, self.frame))
        )
        folded = Edit.of(shape).taken(0, outputs).taken(1, inputs)
        return folded.taken(self.axis, np.zeros(self.taps, np.intp))


@dataclass(frozen=True)
class Pieces:
    """How a kernel is cut along one axis: each piece reads the input shifted by those before it."""

    axis: int
    stride: int
    dilation: int
    width: int
    """Taps of the whole kernel."""
    count: int

    @property
    def taps(self) -> int:
        """Taps of a piece; the last has zeros at its end."""
        return math.ceil(self.width / self.count)

    def weight(self, old: Array) -> Array:
        """The pieces beside each other among the channels of each group."""
        more = [(0, 0)] * old.ndim
        more[self.axis] = (0, self.taps * self.count - self.width)
        parts = np.split(np.pad(old, more), self.count, axis=self.axis)
        return np.concatenate(parts, axis=1)

    def edit(self, shape: Sequence[int]) -> Edit:
        """Which axes the new weight has: for the taps, which are mixed, any of the old ones."""
        tiled = Edit.of(shape).taken(1, np.tile(np.arange(int(shape[1])), self.count))
        return tiled.taken(self.axis, np.zeros(self.taps, np.intp))

    def shifted(self, mb: Maker, x: Var, pads: Sequence[int], results: int, groups: int) -> Var:
        """The input of each piece, from one end of the padded axis to the other, side by side in each group."""
        step = self.taps * self.dilation
        length = (results - 1) * self.stride + self.dilation * (self.taps - 1) + 1
        x = framed(mb, x, self.axis, 1, length + step * (self.count - 1), pads[0])
        batch, channels, *rest = (int(d) for d in x.shape)
        rest[self.axis - 2] = length
        inner = [batch, channels] if groups == 1 else [batch, groups, channels // groups]
        parts = []
        for piece in range(self.count):
            begin = [0] * x.rank
            begin[self.axis] = piece * step
            part = mb.slice_by_size(x=x, begin=begin, size=[batch, channels, *rest])
            parts.append(part if groups == 1 else mb.reshape(x=part, shape=[*inner, *rest]))
        both: Var = mb.concat(values=parts, axis=len(inner) - 1)
        return both if groups == 1 else mb.reshape(x=both, shape=[batch, channels * self.count, *rest])
