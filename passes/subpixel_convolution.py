"""A transposed convolution becomes a convolution with more channels, which are then unfolded into pixels.

Before::

    main(%x: 1x2x5x5) {
      %y: 1x1x12x12 = conv_transpose(x=%x, weight=const<2x1x4x4>, strides=[2, 2])
      return %y
    }

After::

    main(%x: 1x2x5x5) {
      %y_phases: 1x4x6x6 = conv(x=%x, weight=const<4x2x2x2>, pad_type="custom", pad=[1, 1, 1, 1])
      %y: 1x1x12x12 = pixel_shuffle(x=%y_phases, upscale_factor=2)
      return %y
    }

Each output element is a sum over the few inputs that reach it, and which inputs these are repeats with the
stride. So the outputs within one stride become channels of a convolution over the input. Its weights are the
taps of the old kernel, with zeros where a tap does not reach. If the op crops its output or adds to its end,
the taps are shifted accordingly.

Refuses when lengths are symbolic, for 3-D ones, when the weight is compressed or dynamic, and when the new
weight would hold more than 16 million numbers.

Why it helps: the convolution works on the short axis; if only the result is longer than the chip takes (16384
on M1 to M3, reported; 65536 on M4, measured), the products stay on the engine. Kernels get shorter by the
stride. What the pass gains in time was not measured.

Grade: proved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb
from anesurgery.placement.rules.loading import LONG_STEP
from anesurgery.regions import small_builds

LARGEST = 1 << 24
"""Most numbers of the new weight: 34 MB of fp16, which are read each time."""
SHUFFLED = frozenset({2, 3, 4, 8})
"""Strides of both axes for which pixel_shuffle is used."""


@dataclass(frozen=True)
class _Phases:
    """One axis of a transposed convolution: result `stride * q + phase` reads input `q - shift` at a tap.

    Example: with a stride of 2 the taps 0, 1, 2, 3 have the shifts 0, 0, 1, 1 and the phases 0, 1, 0, 1. So
    even results are a convolution with the taps 2 and 0, and odd ones with 3 and 1.
    """

    axis: int
    stride: int
    dilation: int
    taps: int
    cut: int
    """Elements of the full result before the first one that is kept."""
    length: int
    """The length of the input."""
    results: int
    """The length of the result."""

    def place(self, tap: int) -> tuple[int, int]:
        """Return the shift of the input and the phase of the result at a tap."""
        return divmod(self.dilation * tap - self.cut, self.stride)

    @property
    def first(self) -> int:
        """The largest shift: that of the first tap of the new kernel."""
        return self.place(self.taps - 1)[0]

    @property
    def width(self) -> int:
        """The taps of the new kernel."""
        return self.first - self.place(0)[0] + 1

    @property
    def rows(self) -> int:
        """The results of the convolution along the axis."""
        return math.ceil(self.results / self.stride)

    @property
    def around(self) -> tuple[int, int]:
        """The zeros before and after the input; negative where elements are cut off."""
        return self.first, self.rows - self.place(0)[0] - self.length

    def weight(self, old: an.Array) -> an.Array:
        """Return a weight whose last axis, the taps, is split into [phases, new taps]."""
        new = np.zeros((*old.shape[:-1], self.stride, self.width), old.dtype)
        for tap in range(self.taps):
            shift, phase = self.place(tap)
            new[..., phase, self.first - shift] = old[..., tap]
        return new


@dataclass(frozen=True)
class SubpixelConvolution(Rewrite):
    """conv_transpose becomes conv and pixel_shuffle, or reshapes and a transpose."""

    name = "subpixel_convolution"
    kinds = frozenset({"conv_transpose"})
    tolerance = an.REASSOCIATED
    tolerates_nonfinite = False
    """Taps that were not there multiply by 0 what may be infinite."""
    longer_than: int = an.option(0, least=0, of_target="axis")
    """Only where the result is longer than this on an axis, and the input is not."""
    uneven_from: int = an.option(0, least=0)
    """Only where a stride is at least this, and not the same on both axes."""

    @classmethod
    def variants(cls, target: an.Target) -> tuple[an.Pass, ...]:
        """Long results, and the uneven strides that were reported to fail."""
        return *super().variants(target), cls(uneven_from=LONG_STEP)

    def check(self, m: Match) -> Match | Refusal:
        """Match a stored weight over known lengths."""
        op, shape = m.root, an.static_shape(m.weight)
        if an.static_shape(m.x) is None or shape is None:
            return Refusal(f"%{m.x.name} has the symbolic shape {tuple(m.x.shape)}", op)
        if len(shape) > 4:
            return Refusal("it has three spatial axes", op)
        if an.producer(m.weight, "const") is None:
            made_by = "an input" if m.weight.op is None else m.weight.op.op_type
            return Refusal(f"its weight is made by {made_by}", op)
        phases = _phases(op)
        before, after = max(p.length for p in phases), max(p.results for p in phases)
        if self.longer_than and not before <= self.longer_than < after:
            return an.NO_MATCH
        strides = [p.stride for p in phases]
        if self.uneven_from and (max(strides) < self.uneven_from or len({*strides}) == 1):
            return an.NO_MATCH
        if any(min(p.width, p.rows + p.width - 1) < 1 for p in phases):
            return Refusal("it makes nothing", op)
        numbers = math.prod(shape[:2]) * math.prod(p.stride * p.width for p in phases)
        if numbers > LARGEST:
            return Refusal(f"the new weight would hold {numbers} numbers, above {LARGEST}", op)
        return m.bind(phases=phases)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the convolution, and turn its channels into neighbours."""
        op, phases = m.root, m.phases
        groups = int(an.number(op.inputs.get("groups")) or 1)
        old = np.asarray(an.constant(m.weight))
        key = (m.weight, "subpixel", str(phases), groups)
        weight = mb.shared(key, lambda: _weight(old, phases, groups), f"{m.weight.name}_subpixel")
        options: dict[str, Any] = {"weight": weight, "groups": groups}
        bias = an.constant(op.inputs.get("bias"))
        if bias is not None:
            options["bias"] = np.repeat(np.asarray(bias), math.prod(p.stride for p in phases))
        pads = [max(n, 0) for p in phases for n in p.around]
        options |= {"pad_type": "custom", "pad": pads} if any(pads) else {}
        x = _cut(mb, m.x, phases)
        convolved = mb.conv(x=x, name=f"{op.outputs[0].name}_phases", **options)
        return _neighbours(mb, convolved, phases)


def _phases(op: an.Operation) -> list[_Phases]:
    """Return the phases of each spatial axis."""
    spatial, kind = op.x.rank - 2, str(an.constant(op.inputs.get("pad_type")) or "valid")
    strides, dilations = (an.ints(op, n) or [1] * spatial for n in ("strides", "dilations"))
    pads = (an.ints(op, "pad") if kind == "custom" else []) or [0] * 2 * spatial
    phases = []
    for i in range(spatial):
        taps, length, result = (int(v.shape[2 + i]) for v in (op.weight, op.x, op.outputs[0]))
        total = max((length - 1) * strides[i] + dilations[i] * (taps - 1) + 1 - result, 0)
        cut = total // 2 if kind == "same" else pads[2 * i]
        phases.append(_Phases(2 + i, strides[i], dilations[i], taps, cut, length, result))
    return phases


def _weight(old: an.Array, phases: list[_Phases], groups: int) -> an.Array:
    """Return the weight [in, out / groups, taps...] as [out * phases, in / groups, new taps...]."""
    inputs, outputs, *_ = old.shape
    new = old.reshape(groups, inputs // groups, outputs, *old.shape[2:])
    for p in phases:  # the next axis of taps to the end, and there in two
        new = p.weight(np.moveaxis(new, 3, -1))
    n = len(phases)  # [groups, in, out, phase, taps, phase, taps]
    order = [0, 2, *range(3, 3 + 2 * n, 2), 1, *range(4, 4 + 2 * n, 2)]
    turned = new.transpose(order)
    return turned.reshape(-1, inputs // groups, *(p.width for p in phases))


def _cut(mb: Builder, x: Var, phases: list[_Phases]) -> Var:
    """Return the input without the elements that no result reads."""
    ends = [(max(-before, 0), max(-after, 0)) for before, after in (p.around for p in phases)]
    if not any(map(any, ends)):
        return x
    size = [int(d) - sum(end) for d, end in zip(x.shape, [(0, 0), (0, 0), *ends], strict=True)]
    return mb.slice_by_size(x=x, begin=[0, 0, *(before for before, _ in ends)], size=size)


def _neighbours(mb: Builder, x: Var, phases: list[_Phases]) -> Var:
    """Turn the phases among the channels into neighbours, and keep as many results as there were."""
    strides = {p.stride for p in phases}
    if len(phases) == 2 and len(strides) == 1 and strides <= SHUFFLED:
        x = mb.pixel_shuffle(x=x, upscale_factor=phases[0].stride)
        size = [int(d) for d in x.shape[:2]] + [p.results for p in phases]
        return x if size == list(x.shape) else mb.slice_by_size(x=x, begin=[0] * 4, size=size)
    for p in reversed(phases):
        x = small_builds.unfolded(mb, x, p.axis, p.stride, p.results)
    return x


@an.example((1, 2, 5, 5))
def example(x: Var) -> Var:
    """An image of twice the size."""
    weight = np.random.default_rng(0).standard_normal((2, 1, 4, 4)).astype(np.float32)
    return mb.conv_transpose(x=x, weight=weight, strides=[2, 2], name="y")
