"""A convolution over patches that do not overlap becomes space_to_depth and a 1x1 convolution.

Before::

    main(%x: 1x3x64x64) {
      %y: 1x8x2x2 = conv(x=%x, weight=const<8x3x32x32>, strides=[32, 32])
      return %y
    }

After::

    main(%x: 1x3x64x64) {
      %x_patches: 1x3072x2x2 = space_to_depth(x=%x, block_size=32)
      %y: 1x8x2x2 = conv(x=%x_patches, weight=const<8x3072x1x1>)
      return %y
    }

Each output is the same sum as before; a kernel may add its terms in another order. If the sides of the image
are not multiples of the patch, the image is cut first: a convolution without padding ignores the rest.

Refuses when strides differ from the kernel or the kernel is not square, for padding, dilation and groups, when
the weight or a shape is dynamic, and when a compressed weight cannot be brought into the new order. Kernels
below `least` stay.

Why it helps: kernels beyond the tables of the chip stay off the engine (measured: M4, macOS 27.0.1, above 15x31
(width x height) except 16x16; reported for M1 above 13x29), and patch embeddings of 32x32 with them;
space_to_depth and a 1x1 convolution are legal. What that gains in time was not measured.

Grade: proved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb


@dataclass(frozen=True)
class PatchConvolution(Rewrite):
    """Patches to channels, and a product of channels."""

    name = "patch_convolution"
    kinds = frozenset({"conv"})
    tolerance = an.REASSOCIATED
    least: int = 14
    """Smallest kernel that is rewritten: the first that the M1 does not take."""

    def check(self, m: Match) -> Match | Refusal:
        """Is the kernel large and square, and are its strides its own lengths?"""
        op, shape = m.root, an.static_shape(m.root.x)
        kernel = [int(k) for k in op.weight.shape[2:]]
        if len(kernel) != 2 or max(kernel) < self.least:
            return an.NO_MATCH
        strides, dilations = an.ints(op, "strides"), an.ints(op, "dilations")
        pads = an.constant(op.pad_type)
        rest = shape is None or any(n % k for n, k in zip(shape[2:], kernel, strict=True))
        padded = any(an.ints(op, "pad")) if pads == "custom" else pads != "valid" and rest
        reasons = {
            f"the kernel {kernel} is not square": kernel[0] != kernel[1],
            f"the strides {strides} are not the kernel {kernel}": strides != kernel,
            f"the dilation is {dilations}": any(d != 1 for d in dilations),
            f"there are {an.constant(op.groups)} groups": (an.constant(op.groups) or 1) != 1,
            f"the edges are padded ({pads})": padded,
            f"the weight %{op.weight.name} is dynamic": not an.is_stored(op.weight),
            f"%{op.x.name} has a dynamic shape": shape is None,
        }
        if reason := next((words for words, holds in reasons.items() if holds), None):
            return Refusal(reason, op)
        return m.bind(side=kernel[0])

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Cut to whole patches, patches to channels, channels to outputs."""
        op, side = m.root, m.side
        x, shape = op.x, an.static_shape(op.x) or ()
        whole = [*shape[:2], *(n // side * side for n in shape[2:])]
        if whole != list(shape):
            x = mb.slice_by_index(x=x, begin=[0] * 4, end=whole)
        patches = mb.space_to_depth(x=x, block_size=side, name=f"{op.x.name}_patches")
        kernel = an.Edit.of(op.weight.shape).transposed([0, 2, 3, 1]).merged(1, 3).expanded(2).expanded(3)
        weight = an.edit_weight(mb, op.weight, kernel, f"{op.weight.name}_patches")
        bias = {} if op.bias is None else {"bias": op.bias}
        return mb.conv(x=patches, weight=weight, **bias)


@an.example((1, 3, 64, 64))
def example(x: Var) -> Var:
    """The patch embedding of an image of 64x64 in patches of 32x32."""
    weight = np.random.default_rng(0).standard_normal((8, 3, 32, 32)).astype(np.float32)
    return mb.conv(x=x, weight=weight, strides=[32, 32], pad_type="valid", name="y")
