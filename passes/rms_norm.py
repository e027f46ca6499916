"""Compute a root mean square norm in a form whose squares cannot overflow in fp16.

The values of a norm are divided by a unit, so that fp16 holds their squares; epsilon is divided by the square
of the unit. The unit is 1 if the largest magnitude is neither so large that its square overflows nor so small
that it vanishes; then every number keeps all its digits. `form="layer_norm"` uses the layer norm of [x, -x]
instead, whose mean is 0, over one axis.

Refuses when the values are not of fp16, when intervals show that their squares do not overflow, when the
epsilon is 0 in fp16, when a shape is dynamic, and for a layer norm over several axes.

Why it helps: x * x overflows from 256 on in fp16; coremltools, too, converts torch's own `rms_norm` by the
largest magnitude. The written-out form with `rsqrt` was 13 % (256 channels) and 22 % (512) faster than the
layer norm of [x, -x] (measured, M4 Max: john-rocky/CoreML-LLM). What the seven extra ops cost was not measured,
so recipes use it only on request.

Grade: checked: that a factor goes through a root is no identity of polynomials.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Var, mb
from anesurgery.numeric import squares
from anesurgery.numeric.forms import Form
from anesurgery.rewriting.repairs import NormForm


@dataclass(frozen=True)
class RmsNorm(NormForm):
    """`x / sqrt(mean(x * x) + epsilon)` of numbers whose squares fp16 holds."""

    name = "rms_norm"
    hazard = squares.RMS_NORM
    tolerance = an.REASSOCIATED

    def check(self, m: Match) -> Match | Refusal:
        """Match a norm; as the layer norm of [x, -x] only one over a single axis."""
        match = super().check(m)
        if isinstance(match, Match) and self.form == "layer_norm" and len(match.site.axes) != 1:
            return Refusal(f"the mean is over the axes {match.site.axes}, not over one", m.root)
        return match

    def layer_norm(self, mb: Builder, norm: Form) -> Var:
        """Build the first half of the layer norm of [x, -x], whose mean is 0."""
        x, axis = norm.source, norm.axes[0]
        kind = an.np_dtype(x).type
        both = mb.concat(values=[x, mb.mul(x=x, y=kind(-1))], axis=axis)
        normed = mb.layer_norm(x=both, axes=[axis], epsilon=kind(norm.epsilon))
        return mb.slice_by_index(x=normed, begin=[0] * x.rank, end=list(x.shape))


@an.example((1, 2, 8), dtype="fp16", opset="iOS17")
def example(x: Var) -> Var:
    """A norm as today's decoders have it."""
    mean = mb.reduce_mean(x=mb.square(x=x, name="squares"), axes=[-1], keep_dims=True, name="mean")
    root = mb.rsqrt(x=mb.add(x=mean, y=np.float16(1e-5), name="sum"), name="root")
    return mb.mul(x=x, y=root, name="y")
