"""Divide weights whose sums may pass 32768 by a power of two, and multiply the result by it.

Before::

    main(%x: 2x16xfp16) {
      %t: 2x16xfp16 = tanh(x=%x)
      %y: 2x4xfp16 = linear(x=%t, weight=const<4x16xfp16>)
      return %y
    }

After::

    main(%x: 2x16xfp16) {
      %t: 2x16xfp16 = tanh(x=%x)
      %y_scale_products_linear: 2x4xfp16 = linear(x=%t, weight=const<4x16xfp16>)
      %y: 2x4xfp16 = mul(x=%y_scale_products_linear, y=4)
      return %y
    }

Refuses when the weights are not of fp16, compressed or not constant, when nothing bounds the sums or they stay
below 32768, and when a weight or bias that fp16 holds exactly would lose digits.

Why it helps: a result or partial sum of products of magnitude 32768 or more becomes infinite on the engine,
even if later terms cancel it (measured, M1 to M6: sbryngelson/ane-guide; 751K), while single numbers may reach
65504. The multiplication is one op more; what it costs in time was not measured.

Grade: proved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Var, mb
from anesurgery.numeric import products
from anesurgery.rewriting.repairs import Repair


@dataclass(frozen=True)
class ScaleProducts(Repair):
    """`linear(x, w)` becomes `linear(x, w / 2^k) * 2^k`."""

    name = "scale_products"
    hazard = products.SUM


@an.example((2, 16), dtype="fp16")
def example(x: Var) -> Var:
    """Sixteen numbers up to 1 times 4096."""
    weight = np.full((4, 16), 4096, np.float16)
    return mb.linear(x=mb.tanh(x=x, name="t"), weight=weight, name="y")
