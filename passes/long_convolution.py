"""A convolution whose kernel is too wide becomes a narrow one over frames: width is folded into channels.

Before::

    main(%x: 1x1x96) {
      %y: 1x4x5 = conv(x=%x, weight=const<4x1x32>, strides=[16])
      return %y
    }

After::

    main(%x: 1x1x96) {
      %y_long_convolution_reshape: 1x1x6x16 = reshape(x=%x, shape=[1, 1, 6, 16])
      %y_long_convolution_transpose: 1x1x16x6 = transpose(x=%y_long_convolution_reshape, perm=[0, 1, 3, 2])
      %y_long_convolution_reshape_1: 1x16x6 = reshape(x=%y_long_convolution_transpose, shape=[1, 16, 6])
      %y: 1x4x5 = conv(x=%y_long_convolution_reshape_1, weight=const<4x16x2>, pad_type="custom")
      return %y
    }

The last axis is cut into frames of `stride * phases` elements, which become channels; `phases` neighbouring
results become channels too and are unfolded at the end. The weights are the old ones, shifted for each phase,
with zeros between them, so the folded kernel is about `phases` times narrower. A dilation is written into the
weights. Taps that were not there are multiplied with zeros; values are taken to be finite.

Refuses when lengths are symbolic, when the weight is compressed or dynamic, when the kernel is higher than 29,
and when no number of phases up to `most_phases` makes the kernel narrow enough or keeps the weights below 16
million numbers.

Why it helps: kernels up to 15 wide are taken on M4 (measured through Core ML, macOS 27), up to 13 on M1 and A14
and up to 16 on M2 and M3 (tables of the compiler); wider ones run on the CPU. The same products are summed in
another order: proved algebraically, and checked at each site in fp32.

Grade: proved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from anesurgery.checking.grades import REASSOCIATED, Tolerance
from anesurgery.errors import PassError, Refusal
from anesurgery.facts.reading import ints, number
from anesurgery.mil import Array, Operation, Program, Var, constant, mb, producer, static_shape
from anesurgery.placement.target import Target
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.pattern import Match, OpPattern, Ops, var
from anesurgery.rewriting.rewrite import Rewrite

HIGHEST = 29
"""The highest kernel that every chip takes."""
LARGEST = 1 << 24
"""Most numbers of a folded weight."""


@dataclass(frozen=True)
class _Fold:
    """How the last axis of a convolution is folded."""

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
        """[outputs * phases, inputs * frame, ..., taps] of [outputs, inputs, ..., width]."""
        outputs, inputs, *high, width = old.shape
        new = np.zeros((outputs, self.phases, inputs, self.frame, *high, self.taps), old.dtype)
        for phase in range(self.phases):
            for k in range(width):
                tap, place = divmod(self.stride * phase + self.dilation * k, self.frame)
                new[:, phase, :, place, ..., tap] = old[..., k]
        return new.reshape(outputs * self.phases, inputs * self.frame, *high, self.taps)


@dataclass(frozen=True)
class LongConvolution(Rewrite):
    """Wide kernels of 1-D and 2-D convolutions become narrow ones over frames."""

    name: ClassVar[str] = "long_convolution"
    tolerance: ClassVar[Tolerance] = REASSOCIATED
    tolerates_nonfinite: ClassVar[bool] = False
    """Taps that were not there multiply by 0 what may be infinite."""
    most_width: int = 13
    """Widest kernel that stays, and that a folded one may have (13 on M1, 15 from M4 on)."""
    most_phases: int = 64
    """Most neighbouring results that become channels; weights grow by about that factor."""

    def __post_init__(self) -> None:
        for name in ("most_width", "most_phases"):
            if getattr(self, name) < 1:
                raise PassError(f"{self.name}: {name}={getattr(self, name)}; it must be at least 1")

    @classmethod
    def variants(cls, target: Target) -> tuple[Pass, ...]:
        """Kernels as wide as the target takes them."""
        return (cls(most_width=int(target.least("kernel_w")[0])),)

    def pattern(self, op: Ops) -> OpPattern:
        """Every convolution."""
        return op.conv(x=var("x"), weight=var("weight"))

    def check(self, m: Match) -> Match | Refusal | None:
        """A wide kernel of stored numbers over known lengths."""
        op, shape = m.root, static_shape(m.weight)
        if shape is None or len(shape) not in (3, 4) or shape[-1] <= self.most_width:
            return None
        if producer(m.weight, "const") is None:
            made_by = "an input" if m.weight.op is None else m.weight.op.op_type
            return Refusal(f"the kernel is {shape[-1]} wide, but its weight is made by {made_by}", op)
        if static_shape(m.x) is None:
            return Refusal(f"%{m.x.name} has the symbolic shape {tuple(m.x.shape)}", op)
        if max(shape[2:-1], default=1) > HIGHEST:
            return Refusal(f"the kernel is {shape[2]} high, above {HIGHEST}", op)
        stride, dilation = (ints(op, n) or [1] for n in ("strides", "dilations"))
        reach = dilation[-1] * (shape[-1] - 1) + 1
        folds = (_Fold(stride[-1], dilation[-1], reach, n) for n in range(1, self.most_phases + 1))
        fold = next((f for f in folds if f.taps <= self.most_width), None)
        if fold is None:
            return Refusal(f"{self.most_phases} phases leave a kernel {reach} wide above {self.most_width}", op)
        numbers = math.prod(shape[:-1]) * fold.phases * fold.frame * fold.taps
        if numbers > LARGEST:
            return Refusal(f"the folded weight would hold {numbers} numbers, above {LARGEST}", op)
        return m.bind(fold=fold)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Frames to channels, the narrow convolution, channels to neighbours."""
        op, fold = m.root, m.fold
        pads, results = _pads(op), int(op.outputs[0].shape[-1])
        rows = math.ceil(results / fold.phases)
        x = _framed(mb, m.x, fold.frame, rows + fold.taps - 1, pads[-2])
        old = np.asarray(constant(m.weight))
        weight = mb.shared((m.weight, str(fold)), lambda: fold.weight(old), f"{m.weight.name}_folded")
        bias, more = constant(op.inputs.get("bias")), {}
        if bias is not None:
            more["bias"] = np.repeat(np.asarray(bias), fold.phases)
        narrow = mb.conv(
            x=x,
            weight=weight,
            strides=[*ints(op, "strides")[:-1], 1] if op.inputs.get("strides") else [1] * (x.rank - 2),
            dilations=[*ints(op, "dilations")[:-1], 1] if op.inputs.get("dilations") else [1] * (x.rank - 2),
            pad_type="custom",
            pad=[*pads[:-2], 0, 0],
            groups=int(number(op.inputs.get("groups")) or 1),
            **more,
        )
        return _unfolded(mb, narrow, fold.phases, results)


def _pads(op: Operation) -> list[int]:
    """Zeros before and after each spatial axis."""
    kind, spatial = str(constant(op.inputs.get("pad_type")) or "valid"), len(op.x.shape) - 2
    if kind == "custom":
        return ints(op, "pad") or [0] * 2 * spatial
    if kind == "valid":
        return [0] * 2 * spatial
    found = []
    strides, dilations = (ints(op, n) or [1] * spatial for n in ("strides", "dilations"))
    for i in range(spatial):
        reach = dilations[i] * (int(op.weight.shape[2 + i]) - 1) + 1
        length, made = int(op.x.shape[2 + i]), int(op.outputs[0].shape[2 + i])
        total = max((made - 1) * strides[i] + reach - length, 0)
        less, more = total // 2, total - total // 2
        found += [more, less] if kind == "same_lower" else [less, more]
    return found


def _framed(mb: Builder, x: Var, frame: int, count: int, left: int) -> Var:
    """[b, c * frame, ..., count] of [b, c, ..., length], `left` zeros first."""
    b, c, *high, length = (int(d) for d in x.shape)
    right = frame * count - left - length
    if right < 0:
        x, right = mb.slice_by_size(x=x, begin=[0] * x.rank, size=[b, c, *high, length + right]), 0
    if left or right:
        x = mb.pad(x=x, pad=[0, 0] * (x.rank - 1) + [left, right])
    last = 2 + len(high)
    x = mb.reshape(x=x, shape=[b, c, *high, count, frame])
    x = mb.transpose(x=x, perm=[0, 1, last + 1, *range(2, last + 1)])
    made: Var = mb.reshape(x=x, shape=[b, c * frame, *high, count])
    return made


def _unfolded(mb: Builder, x: Var, phases: int, results: int) -> Var:
    """[b, c, ..., results] of [b, c * phases, ..., rows]."""
    b, channels, *high, rows = (int(d) for d in x.shape)
    if phases > 1:
        c, last = channels // phases, 2 + len(high)
        x = mb.reshape(x=x, shape=[b, c, phases, *high, rows])
        x = mb.transpose(x=x, perm=[0, 1, *range(3, last + 2), 2])
        x = mb.reshape(x=x, shape=[b, c, *high, rows * phases])
    if int(x.shape[-1]) != results:
        x = mb.slice_by_size(x=x, begin=[0] * x.rank, size=[*x.shape[:-1], results])
    return x


def example() -> Program:
    """Frames of 32 elements, 16 apart."""
    weight = np.random.default_rng(0).standard_normal((4, 1, 32)).astype(np.float32)

    @mb.program(input_specs=[mb.TensorSpec((1, 1, 96))])
    def program(x: Var) -> Var:
        return mb.conv(x=x, weight=weight, strides=[16], name="y")

    return program
