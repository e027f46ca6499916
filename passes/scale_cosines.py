"""Compute a cosine similarity from rows that are scaled so that fp16 holds their squares.

Each row is divided by a unit, which is 1 if its largest magnitude is neither too large nor too small to be
squared. The lengths may be separate roots, or `reduce_l2_norm`; a lower limit of their product is divided by
both units. `scale_roots` repairs a length that stands alone.

Refuses when the values are not of fp16, when intervals show that neither the product nor the squares overflow,
and when a shape is dynamic.

Why it helps: the product of two rows overflows in fp16 where numbers are 256 or more, though the cosine is
at most 1 (computed). What the extra ops cost in time was not measured.

Grade: checked: that a factor goes through a root is no identity of polynomials.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Var, mb
from anesurgery.numeric import squares
from anesurgery.rewriting.repairs import Repair


@dataclass(frozen=True)
class ScaleCosines(Repair):
    """`sum(a * b) / (|a| * |b|)` becomes the same of `a / u` and `b / v`."""

    name = "scale_cosines"
    hazard = squares.COSINE
    static = True
    tolerance = an.REASSOCIATED
    magnitude = an.fp16.LARGEST


@an.example((2, 8), (2, 8), dtype="fp16")
def example(a: Var, b: Var) -> Var:
    """Build what `torch.nn.functional.cosine_similarity` is converted to."""
    product = mb.reduce_sum(x=mb.mul(x=a, y=b, name="products"), axes=[-1], name="product")
    first = mb.reduce_sum(x=mb.mul(x=a, y=a, name="squares"), axes=[-1], name="first")
    second = mb.reduce_sum(x=mb.mul(x=b, y=b, name="more_squares"), axes=[-1], name="second")
    both = mb.maximum(x=mb.mul(x=first, y=second, name="both"), y=np.float16(6e-8), name="least")
    return mb.real_div(x=product, y=mb.sqrt(x=both, name="lengths"), name="y")
