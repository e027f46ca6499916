"""Replace the rare ops crop, flatten2d, reshape_like and clamped_relu by common ones.

Before::

    main(%x: 1x2x4x5) {
      %y: 1x2x3x3 = crop(x=%x, crop_height=[1, 0], crop_width=[0, 2])
      return %y
    }

After::

    main(%x: 1x2x4x5) {
      %y: 1x2x3x3 = slice_by_size(x=%x, begin=[0, 0, 1, 0], size=[1, 2, 3, 3])
      return %y
    }

A crop becomes a slice, `flatten2d` and `reshape_like` become reshapes, and `clamped_relu` becomes the minimum
of a leaky relu and its limit. A converted transposed convolution with output padding ends in a crop.

Refuses when a new shape is symbolic, or when a limit is stored in a wider type than x and x rounds it.

Why it helps: no placement of these ops was found, while slices, reshapes, `leaky_relu` and `minimum` were
placed on the ANE of an M4 (measured through Core ML, macOS 27).

Grade: bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb


def _crop(mb: Builder, op: an.Operation) -> Var:
    """Cut the edges of the last two axes off."""
    firsts = [an.ints(op, name)[0] for name in ("crop_height", "crop_width")]
    begin = [0] * (op.x.rank - 2) + firsts
    return mb.slice_by_size(x=op.x, begin=begin, size=list(op.outputs[0].shape))


def _view(mb: Builder, op: an.Operation) -> Var:
    return mb.reshape(x=op.x, shape=list(op.outputs[0].shape))


def _limit(op: an.Operation) -> an.Array:
    """Return the limit in the type of x, which may differ from the stored type."""
    return np.asarray(an.constant(op.beta)).astype(an.np_dtype(op.x))


COMMON: dict[str, Callable[[Builder, an.Operation], Var]] = {
    "crop": _crop,
    "flatten2d": _view,
    "reshape_like": _view,
    "clamped_relu": lambda mb, op: mb.minimum(x=mb.leaky_relu(x=op.x, alpha=op.alpha), y=_limit(op)),
}
"""How each rare op is written with common ones."""


@dataclass(frozen=True)
class ReplaceRareOps(Rewrite):
    """crop, flatten2d, reshape_like and clamped_relu become slices, reshapes and minima."""

    name = "replace_rare_ops"
    kinds = frozenset(COMMON)

    def check(self, m: Match) -> Match | Refusal:
        """Match an op of static shape whose limit the type of x holds."""
        out = m.root.outputs[0]
        if an.static_shape(out) is None:
            return Refusal(f"%{out.name} has the symbolic shape {tuple(out.shape)}", m.root)
        if m.root.op_type == "clamped_relu" and _limit(m.root) != (beta := an.constant(m.root.beta)):
            return Refusal(f"the limit {beta:g} is no number of {an.dtype_name(m.root.x)}", m.root)
        return m

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the common op, or two of them."""
        return COMMON[m.root.op_type](mb, m.root)


@an.example((1, 2, 4, 5))
def example(x: Var) -> Var:
    """A picture without its first row and its last two columns."""
    return mb.crop(x=x, crop_height=[1, 0], crop_width=[0, 2], name="y")
