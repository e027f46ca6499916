"""A norm that takes the mean away is computed in a form whose squares cannot overflow in fp16.

Before::

    main(%x: 1x2x8xfp16) {
      %mean: 1x2x1xfp16 = reduce_mean(x=%x, axes=[-1], keep_dims=True)
      %rest: 1x2x8xfp16 = sub(x=%x, y=%mean)
      %squares: 1x2x8xfp16 = square(x=%rest)
      %variance: 1x2x1xfp16 = reduce_mean(x=%squares, axes=[-1], keep_dims=True)
      %sum: 1x2x1xfp16 = add(x=%variance, y=1.00136e-05)
      %root: 1x2x1xfp16 = sqrt(x=%sum)
      %y: 1x2x8xfp16 = real_div(x=%rest, y=%root)
      return %y
    }

After::

    main(%x: 1x2x8xfp16) {
      %y_group_norm_mul: 1x2x8xfp16 = mul(x=%x, y=0.5)
      %y_group_norm_reduce_mean: 1x2x1xfp16 = reduce_mean(x=%y_group_norm_mul, axes=[2], keep_dims=True)
      %y_group_norm_sub: 1x2x8xfp16 = sub(x=%y_group_norm_mul, y=%y_group_norm_reduce_mean)
      %y_group_norm_reduce_mean_1: 1x2x1xfp16 = reduce_mean(x=%y_group_norm_sub, axes=[2], keep_dims=True)
      %y_group_norm_sub_1: 1x2x8xfp16 = sub(x=%y_group_norm_sub, y=%y_group_norm_reduce_mean_1)
      %y_group_norm_abs: 1x2x8xfp16 = abs(x=%y_group_norm_sub_1)
      %y_group_norm_reduce_max: 1x2x1xfp16 = reduce_max(x=%y_group_norm_abs, axes=[2], keep_dims=True)
      %y_group_norm_maximum: 1x2x1xfp16 = maximum(x=%y_group_norm_reduce_max, y=0.000976562)
      %y_group_norm_clip: 1x2x1xfp16 = clip(x=%y_group_norm_maximum, alpha=0.03125, beta=64)
      %y_group_norm_real_div: 1x2x1xfp16 = real_div(x=%y_group_norm_maximum, y=%y_group_norm_clip)
      %y_group_norm_real_div_1: 1x2x8xfp16 = real_div(x=%y_group_norm_sub_1, y=%y_group_norm_real_div)
      %y_group_norm_real_div_2: 1x2x1xfp16 = real_div(x=0.03125, y=%y_group_norm_real_div)
      %y_group_norm_square: 1x2x1xfp16 = square(x=%y_group_norm_real_div_2)
      %y_group_norm_mul_1: 1x2x1xfp16 = mul(x=%y_group_norm_square, y=0.00256348)
      %y_group_norm_square_1: 1x2x8xfp16 = square(x=%y_group_norm_real_div_1)
      %y_group_norm_reduce_mean_2: 1x2x1xfp16 = reduce_mean(x=%y_group_norm_square_1, axes=[2], keep_dims=True)
      %y_group_norm_add: 1x2x1xfp16 = add(x=%y_group_norm_reduce_mean_2, y=%y_group_norm_mul_1)
      %y_group_norm_rsqrt: 1x2x1xfp16 = rsqrt(x=%y_group_norm_add)
      %y: 1x2x8xfp16 = mul(x=%y_group_norm_real_div_1, y=%y_group_norm_rsqrt)
      return %y
    }

Halves of the values lose their mean and are divided by a unit, so that fp16 holds their squares; it is 1 where
the largest that is left in a group is neither too large nor too small to be squared. The mean of what is left
is taken away too: it is what rounding did to the first one. `form="layer_norm"` gives
one layer norm over the same axes instead.

Refuses when the values are not of fp16, when intervals show that their squares do not overflow, when the
epsilon is 0 in fp16, and when a shape is dynamic.

Why it helps: group norms are converted to their parts, where the square of a difference above 255 overflows in
fp16. What the further ops cost, and whether the compiler's own layer norm overflows over so many axes, was not
measured, so it runs on request.

Grade: checked: that a factor goes through a root is no identity of polynomials.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Var, mb


@dataclass(frozen=True)
class GroupNorm(an.NormForm):
    """`(x - mean(x)) / sqrt(variance(x) + epsilon)` of numbers whose squares fp16 holds."""

    name = "group_norm"
    centred = True
    tolerance = an.Tolerance(1e-4)
    """Where the mean is much larger than what is left, its rounding is that much of the old form's result."""

    def layer_norm(self, mb: Builder, norm: an.RootNorm) -> Var:
        """Over the same axes."""
        return mb.layer_norm(x=norm.x, axes=list(norm.axes), epsilon=an.np_dtype(norm.x).type(norm.epsilon))


@an.example((1, 2, 8), dtype="fp16", opset="iOS17")
def example(x: Var) -> Var:
    """Two groups, as coremltools converts their norm."""
    over = {"axes": [-1], "keep_dims": True}
    rest = mb.sub(x=x, y=mb.reduce_mean(x=x, **over, name="mean"), name="rest")
    variance = mb.reduce_mean(x=mb.square(x=rest, name="squares"), **over, name="variance")
    root = mb.sqrt(x=mb.add(x=variance, y=np.float16(1e-5), name="sum"), name="root")
    return mb.real_div(x=rest, y=root, name="y")
