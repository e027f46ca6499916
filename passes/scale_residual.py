"""Scale a residual stream beyond 65504, if only norms read it, by a power of two where it is made.

Everything that adds to the stream is scaled by 2^-k: in its weights, or by one product if it has none. The
epsilons of the norms are scaled by 2^-2k, since a norm gives the same result for a scaled stream. In fp32
nothing changes; both models are compared, and the pass fails below 90 dB. Run `rms_norm` afterwards for the
squares inside the norms.

The stream is measured on `inputs`, those of the surgery, or random ones. `scale_ranges` does more: it also
scales values that other ops read, and lets norms read copies.

Refuses when no value passes half of 65504, when anything other than a norm reads the stream (an output does),
when the stream needs more than 2^-20, and when the weights do not hold the scaled numbers exactly.

Why it helps: fp16 ends at 65504, and a stream beyond it is infinite. Streams of Gemma 3 and Qwen pass it;
scaled ones ran on the engine (reported: sbryngelson/ANEForge, pull request 51). The pass adds no op, or one for
an embedding.

Grade: none: epsilons are rounded; whole models are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Refusal, Session, Var, mb
from anesurgery.checking.ranges import Ranges
from anesurgery.passes.scale_ranges import ScaleRanges, as_list
from anesurgery.rewriting import scaled_regions


class _Stream(scaled_regions.ScaledRegions):
    """Regions of values that pass fp16 themselves, and not by their squares."""

    def excess(self, var: Var) -> float:
        """Return the power of two by which a value passes its limit; squares and their sums do not count."""
        squared = scaled_regions.source_of(var) is not var
        return -np.inf if squared else super().excess(var)


@dataclass(frozen=True)
class ScaleResidual(ScaleRanges):
    """The stream of a decoder is scaled at its sources."""

    name = "scale_residual"
    precedes: ClassVar[tuple[str, ...]] = ("add_cache", "rms_norm", "group_norm")
    copies = False

    def samples(self, session: Session) -> Sequence[Mapping[str, an.Array]] | None:
        """Return the calibration, or the inputs of the surgery."""
        return as_list(session.inputs if self.inputs is None else self.inputs)

    def observed(
        self, session: Session, function: an.Function, observed: Ranges
    ) -> scaled_regions.ScaledRegions:
        """Return the plan of the streams for observed ranges."""
        return _Stream(session, function, {row.name: row for row in observed.rows})

    def useless(self, before: int, after: int, refusals: Sequence[Refusal]) -> str:
        """Why the scale is taken back: something but a norm reads the stream, or it still overflows."""
        return refusals[0].reason if refusals else super().useless(before, after, refusals)


@an.example((1, 4), dtype="fp16")
def example(x: Var) -> Var:
    """Two products that add up beyond fp16, and a norm of them."""
    weight = (np.eye(4) * 30000).astype(np.float16)
    stream = mb.add(
        x=mb.linear(x=x, weight=weight, name="first"),
        y=mb.linear(x=x, weight=weight, name="more"),
        name="stream",
    )
    mean = mb.reduce_mean(x=mb.mul(x=stream, y=stream, name="square"), axes=[-1], keep_dims=True, name="mean")
    return mb.mul(x=stream, y=mb.rsqrt(x=mean, epsilon=np.float16(1e-3), name="root"), name="y")
