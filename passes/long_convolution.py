"""Turn a convolution whose kernel is too wide or too high into a small one over frames, stored as channels.

Before::

    main(%x: 1x1x96) {
      %y: 1x4x5 = conv(x=%x, weight=const<4x1x32>, strides=[16])
      return %y
    }

After::

    main(%x: 1x1x96) {
      %y_long_convolution_reshape: 1x6x16 = reshape(x=%x, shape=[1, 6, 16])
      %y_long_convolution_transpose: 1x16x6 = transpose(x=%y_long_convolution_reshape, perm=[0, 2, 1])
      %y: 1x4x5 = conv(x=%y_long_convolution_transpose, weight=const<4x16x2>, pad_type="custom")
      return %y
    }

The long axis is cut into frames of `stride * phases` elements, and each frame becomes channels. `phases`
neighbouring results are computed as channels too, and are unfolded at the end. The new weights are the old
ones, shifted for each phase, with zeros between them, so the new kernel is about `phases` times shorter. A
dilation is written into the weights. The added zeros are multiplied with values that the pass takes to be
finite. A kernel that is both too wide and too high is folded twice. If the weights of all phases would be too
many, the kernel is cut into pieces instead: the input, shifted by one piece at a time, becomes channels, and
the number of weights stays the same.

Refuses when lengths are symbolic, when the weight is dynamic, or compressed in a form that cannot hold the
added zeros (a full palette without a zero; `compressed=` allows it), and when no number of phases up to
`most_phases` makes the kernel small enough. Pieces are used when the phases would need more than 16 million
numbers.

Why it helps: kernels up to 15 wide and 31 high are taken on M4 (measured through Core ML, macOS 27), up to 13
and 29 on M1 and A14 and up to 16 and 32 on M2 and M3 (tables of the compiler); larger ones run on the CPU. The
same products are summed in another order: proved algebraically, and checked at each site in fp32.

Grade: proved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb
from anesurgery.facts import windows
from anesurgery.mil import Maker
from anesurgery.regions import small_builds

MOST_NUMBERS = 1 << 24
"""Most numbers of a weight that repeats the kernel for each phase: 32 MB, which are read each time."""


@dataclass(frozen=True)
class LongConvolution(Rewrite):
    """Large kernels of 1-D and 2-D convolutions become small ones over frames."""

    name = "long_convolution"
    kinds = frozenset({"conv"})
    tolerance = an.REASSOCIATED
    tolerates_nonfinite = False
    """Taps that were not there multiply by 0 what may be infinite."""
    most_width: int = an.option(13, least=1, of_target="kernel_w")
    """Widest kernel that stays, and that a folded one may have (13 on M1, 15 from M4 on)."""
    most_height: int = an.option(29, least=1, of_target="kernel_h")
    """The highest kernel that is kept (29 on M1, 31 from M4 on)."""
    most_phases: int = an.option(64, least=1)
    """Most neighbouring results that become channels; weights grow by about that factor."""
    longest: int = an.option(0, least=0, of_target="axis")
    """The longest axis: where only the input of a convolution that steps is longer, it is cut (0: never)."""

    def check(self, m: Match) -> Match | Refusal:
        """Match a large kernel of stored numbers over known lengths."""
        op, shape = m.root, an.static_shape(m.weight)
        if shape is None or len(shape) not in (3, 4):
            return an.NO_MATCH
        limits = {len(shape) - 1: ("wide", self.most_width), len(shape) - 2: ("high", self.most_height)}
        axis = next((a for a, (_, most) in limits.items() if a > 1 and shape[a] > most), self.long_input(op))
        if axis is None:
            return an.NO_MATCH
        words, most = limits[axis]
        if not an.is_stored(m.weight):
            made_by = "an input" if m.weight.op is None else m.weight.op.op_type
            return Refusal(f"the kernel is {shape[axis]} {words}, but its weight is made by {made_by}", op)
        if an.static_shape(m.x) is None:
            return Refusal(f"%{m.x.name} has the symbolic shape {tuple(m.x.shape)}", op)
        stride, dilation = ((an.ints(op, n) or [1, 1])[axis - 2] for n in ("strides", "dilations"))
        reach = dilation * (shape[axis] - 1) + 1
        folds = (_Fold(axis, stride, dilation, reach, n) for n in range(1, self.most_phases + 1))
        fold = next((f for f in folds if f.taps <= most), None)
        if fold is None:
            return Refusal(f"{self.most_phases} phases leave a kernel {reach} {words} above {most}", op)
        numbers = math.prod(shape) // shape[axis] * fold.phases * fold.frame * fold.taps
        if numbers > MOST_NUMBERS and shape[axis] > most:
            pieces = math.ceil(shape[axis] / most)
            return m.bind(plan=_Pieces(axis, stride, dilation, shape[axis], pieces))
        return m.bind(plan=fold)

    def long_input(self, op: an.Operation) -> int | None:
        """Return the axis that is too long only before the convolution, which steps along it."""
        before, after = an.static_shape(op.x), an.static_shape(op.outputs[0])
        if not self.longest or before is None or after is None:
            return None
        for axis in range(2, len(before)):
            stride, dilation = ((an.ints(op, n) or [1, 1])[axis - 2] for n in ("strides", "dilations"))
            frames = after[axis] + dilation * (int(op.weight.shape[axis]) - 1) // stride
            if before[axis] > self.longest >= frames and stride > 1:
                return axis
        return None

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the small convolution of frames as channels, or of pieces as channels."""
        op, plan = m.root, m.plan
        pad, results = windows.window_pads(op)[2 * (plan.axis - 2)], int(op.outputs[0].shape[plan.axis])
        if isinstance(plan, _Pieces):
            x = plan.shifted(mb, m.x, pad, results, _groups(op))
            return self.small(mb, m, x, phases=1, strides=plan.stride, dilations=plan.dilation)
        rows = math.ceil(results / plan.phases)
        x = small_builds.framed(mb, m.x, plan.axis, plan.frame, rows + plan.taps - 1, pad)
        small = self.small(mb, m, x, phases=plan.phases, strides=1, dilations=1)
        return small_builds.unfolded(mb, small, plan.axis, plan.phases, results)

    def small(self, mb: Builder, m: Match, x: Var, phases: int, **steps: int) -> Var:
        """Build the small convolution of an input that is padded along the axis, with new steps along it."""
        op, plan, place = m.root, m.plan, m.plan.axis - 2
        key, name = (m.weight, str(plan)), f"{m.weight.name}_folded"
        edit = plan.edit(m.weight.shape)
        weight = mb.stored_like(
            m.weight, lambda: plan.weight(an.decoded(m.weight)), key, name, edit, exact=True
        )
        bias = an.constant(op.inputs.get("bias"))
        options: dict[str, Any] = {} if bias is None else {"bias": np.repeat(np.asarray(bias), phases)}
        for name, step in steps.items():
            options[name] = an.ints(op, name) or [1] * (x.rank - 2)
            options[name][place] = step
        pads = windows.window_pads(op)
        pads[2 * place : 2 * place + 2] = [0, 0]
        return mb.conv(x=x, weight=weight, pad_type="custom", pad=pads, groups=_groups(op), **options)


def _groups(op: an.Operation) -> int:
    return int(an.number(op.inputs.get("groups")) or 1)


@dataclass(frozen=True)
class _Fold:
    """A kernel along one axis, folded: neighbouring elements and results become channels.

    Example: a kernel of 32 with a stride of 16 and 1 phase has frames of 16 elements, and 2 taps.
    """

    axis: int
    stride: int
    dilation: int
    reach: int
    """Elements from the first to the last tap."""
    phases: int
    """Neighbouring results that become channels."""

    @property
    def frame(self) -> int:
        """The elements of the input that become channels."""
        return self.stride * self.phases

    @property
    def taps(self) -> int:
        """The width of the folded kernel."""
        return math.ceil((self.stride * (self.phases - 1) + self.reach) / self.frame)

    def weight(self, old: an.Array) -> an.Array:
        """Return the folded weight [out * phases, in * frame, ..., taps].

        Example: stride 2, 1 phase and 4 taps a b c d give frames of 2 elements: a c for the first, b d for the
        second.
        """
        flat = np.moveaxis(old, self.axis, -1)
        outputs, inputs, *others, width = flat.shape
        new = np.zeros((outputs, self.phases, inputs, self.frame, *others, self.taps), old.dtype)
        for phase in range(self.phases):
            for k in range(width):
                tap, place = divmod(self.stride * phase + self.dilation * k, self.frame)
                new[:, phase, :, place, ..., tap] = flat[..., k]
        folded = new.reshape(outputs * self.phases, inputs * self.frame, *others, self.taps)
        return np.moveaxis(folded, -1, self.axis)

    def edit(self, shape: Sequence[int]) -> an.Edit:
        """Which axes the new weight has: for the taps, which are mixed, any of the old ones."""
        outputs, inputs = (
            np.repeat(np.arange(int(shape[a])), n) for a, n in ((0, self.phases), (1, self.frame))
        )
        folded = an.Edit.of(shape).taken(0, outputs).taken(1, inputs)
        return folded.taken(self.axis, np.zeros(self.taps, np.intp))


@dataclass(frozen=True)
class _Pieces:
    """A kernel cut into pieces along one axis; each reads the input shifted by the pieces before it.

    Example: a kernel of 20 in 2 pieces has 10 taps in each, and the second reads the input 10 elements later.
    """

    axis: int
    stride: int
    dilation: int
    width: int
    """Taps of the whole kernel."""
    count: int

    @property
    def taps(self) -> int:
        """The taps of a piece; the last piece has zeros at its end."""
        return math.ceil(self.width / self.count)

    def weight(self, old: an.Array) -> an.Array:
        """Return the pieces side by side among the input channels of each group."""
        more = [(0, 0)] * old.ndim
        more[self.axis] = (0, self.taps * self.count - self.width)
        parts = np.split(np.pad(old, more), self.count, axis=self.axis)
        return np.concatenate(parts, axis=1)

    def edit(self, shape: Sequence[int]) -> an.Edit:
        """Which axes the new weight has: for the taps, which are mixed, any of the old ones."""
        tiled = an.Edit.of(shape).taken(1, np.tile(np.arange(int(shape[1])), self.count))
        return tiled.taken(self.axis, np.zeros(self.taps, np.intp))

    def shifted(self, mb: Maker, x: Var, pad: int, results: int, groups: int) -> Var:
        """Build the input of each piece, shifted by the pieces before it, side by side in each group."""
        step = self.taps * self.dilation
        length = (results - 1) * self.stride + self.dilation * (self.taps - 1) + 1
        x = small_builds.framed(mb, x, self.axis, 1, length + step * (self.count - 1), pad)
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


@an.example((1, 1, 96))
def example(x: Var) -> Var:
    """Frames of 32 elements, 16 apart."""
    weight = np.random.default_rng(0).standard_normal((4, 1, 32)).astype(np.float32)
    return mb.conv(x=x, weight=weight, strides=[16], name="y")
