"""Take the logarithm of bands of a power spectrum after dividing each frame by a unit.

The unit is 1 if the largest number of a frame is at least 1 and no band of it sums to more than 16376; then
every number keeps all its digits. The number added before the logarithm, and a lower limit of its operand, are
divided by the square of the unit. In a frame that is divided, numbers below 2^-12, or 72 dB below the largest
one, become 0 when they are squared.

Refuses when the values are not of fp16, when intervals show that neither the squares nor the bands overflow,
when a weight is negative, and when a shape is dynamic.

Why it helps: squares overflow in fp16 from 256 on, even if the logarithm is small: a log-mel front end had a
cosine of 0.046 (measured, M1 Max: findit-studio/coremlit). What the extra ops cost in time was not measured.

Grade: checked: that a factor goes out of a logarithm is no identity of polynomials.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Var, mb
from anesurgery.numeric import squares
from anesurgery.rewriting.repairs import Repair


@dataclass(frozen=True)
class ScaleSpectra(Repair):
    """`log(W @ (a * a + b * b))` becomes `log(W @ ((a / u)^2 + (b / u)^2)) + 2 log(u)`."""

    name = "scale_spectra"
    hazard = squares.SPECTRUM
    static = True
    tolerance = an.REASSOCIATED
    magnitude = an.fp16.LARGEST


@an.example((1, 8, 4), dtype="fp16")
def example(x: Var) -> Var:
    """Three bands of eight bins, over four frames."""
    weights = np.linspace(0, 1, 24, dtype=np.float16).reshape(3, 8)
    bands = mb.matmul(x=weights, y=mb.square(x=x, name="power"), name="bands")
    least = mb.maximum(x=bands, y=np.float16(1e-5), name="least")
    return mb.log(x=least, epsilon=np.float16(0), name="y")
