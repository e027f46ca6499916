"""The logarithm of bands of a power spectrum is taken of numbers that are divided by a unit of their frame.

The unit is 1 where the largest number of a frame is 1 or more and no band of it adds up to more than 16376:
then each number stays what it was, to the last digit. What is added before the logarithm, and the least that it
reads, are divided by the square of the unit. Numbers below 2^-12, or 72 dB below the largest of a frame that is
divided, square to 0.

Refuses when the values are not of fp16, when intervals show that neither the squares nor the bands overflow,
when a weight is negative, and when a shape is dynamic.

Why it helps: squares above 255 overflow in fp16, though the logarithm is small: a log-mel front end had a
cosine of 0.046 (measured, M1 Max: findit-studio/coremlit). What the further ops cost in time was not measured.

Grade: checked: that a factor goes out of a logarithm is no identity of polynomials.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Var, mb
from anesurgery.facts import log_mel
from anesurgery.regions.root_norms import Quiet, guard_of
from anesurgery.regions.small_builds import again
from anesurgery.rewriting.scaled_squares import ScaledSquares


@dataclass(frozen=True)
class ScaleSpectra(ScaledSquares):
    """`log(W @ (a * a + b * b))` becomes `log(W @ ((a / u)^2 + (b / u)^2)) + 2 log(u)`."""

    name = "scale_spectra"
    kinds = frozenset({"log"})

    def check(self, m: Match) -> Match | Refusal:
        """Accept the logarithm of mixed powers that may overflow."""
        spectrum = log_mel.spectrum(m.root)
        if spectrum is None or not self.applies(m.x, spectrum.squares.values):
            return an.NO_MATCH
        most = self.most(spectrum.squares.values, spectrum.squares.most)
        if most * max(1.0, spectrum.weights) <= an.fp16.LARGEST:
            return Refusal(f"the powers are at most {most:g}, and no band overflows", m.root)
        return m.bind(ops=spectrum.ops, spectrum=spectrum)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """A frame is divided by its unit, so that no band overflows."""
        spectrum = m.spectrum
        quiet, floor = _quiet(spectrum.squares.count * max(1.0, spectrum.weights)), self.floor(spectrum.guard)
        largest = self.largest(mb, spectrum.squares.values, [spectrum.axis])
        unit = quiet.unit(mb, mb.maximum(x=largest, y=floor))
        power = self.summed_squares(mb, spectrum.squares.values, unit)
        bands = again(mb, spectrum.mix, **{spectrum.operand: power})
        if spectrum.guard:
            share = guard_of(mb, spectrum.guard, floor / quiet.least, unit)
            bands = mb.maximum(x=bands, y=share) if spectrum.clips else mb.add(x=bands, y=share)
        twice = mb.mul(x=mb.log(x=unit, epsilon=0.0), y=2.0)
        return mb.add(x=mb.log(x=bands, epsilon=0.0), y=twice)


def _quiet(count: float) -> Quiet:
    """A frame whose largest number is 1 or more, of which no band overflows: quieter bins vanish below it."""
    quiet = Quiet.of(count)
    return Quiet(min(1.0, quiet.most), quiet.most)


@an.example((1, 8, 4), dtype="fp16")
def example(x: Var) -> Var:
    """Three bands of eight bins, over four frames."""
    weights = np.linspace(0, 1, 24, dtype=np.float16).reshape(3, 8)
    bands = mb.matmul(x=weights, y=mb.square(x=x, name="power"), name="bands")
    least = mb.maximum(x=bands, y=np.float16(1e-5), name="least")
    return mb.log(x=least, epsilon=np.float16(0), name="y")
