"""Scale values beyond the fp16 range by a power of two, and undo it in the norm or weight after them.

Calibration finds the regions: the model runs on `inputs` (sampled ones by default). The limit is half of 65504,
or half of 32768 for sums of products. A value above its limit marks its region: all values that sums and moves
connect to it, such as a residual stream. The scale goes into the constants that make the region (weights,
biases, tables of factors). It is removed by the epsilon of the norm, the weight or the factor that reads the
region, or else by one multiplication. A norm whose squares need another scale reads a copy of its own.
Activations that saturate (gelu, silu, tanh) read their operand clipped to 32 on both sides; if the function
approaches x, the part beyond 32 is added back. All factors are powers of two, so in fp32 only epsilons change,
which stay above 1e-7 in fp16. The pass compares both models in fp32 and fails below 90 dB. The report has each
region with its exponent and its largest value before.

Refuses when nothing exceeds the limit, when a region needs more than 2^-20, and when scaling gains nothing: as
many values exceed their limits after it. An output, or an operand of an op that cannot pass a scale on, is
scaled back beyond the limit, and the report says so. Infinities in masks are for `causal_mask_tensor`.

Why it helps: fp16 ends at 65504, and sums of products of the ANE at 32768 (measured: M1, M2, M2 Pro, M4, M5,
M6); squares overflow from 256 on.

Grade: none: epsilons are rounded; whole models are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Pass, Program, Refusal, Session, Var, mb
from anesurgery.checking.comparison import compare
from anesurgery.checking.ranges import Ranges, ranges
from anesurgery.files.copying import copy_program
from anesurgery.rewriting import scaled_regions
from anesurgery.rewriting.passes import against_several

WHOLE = "regions reach through the whole model, which is compared in fp32"
GATE = 90.0
"""PSNR in dB in fp32: no more than epsilons may change."""
MOST = 20
"""Beyond this exponent small values of a region vanish."""


@dataclass(frozen=True)
class ScaleRanges(Pass):
    """Regions that overflow are scaled by powers of two."""

    name = "scale_ranges"
    precedes: ClassVar[tuple[str, ...]] = ("add_cache",)
    copies: ClassVar[bool] = True
    """Whether a norm may read a copy with a scale of its own."""
    inputs: Any = None
    """Calibration: inputs by name, or several such sets; one sampled set by default."""
    chip: str | None = None
    """Whose arithmetic is watched, as "M1"; what holds on every chip by default."""

    def requires(self, program: Program) -> Refusal | None:
        """Refuse programs of several functions."""
        return against_several(program, "scale before they are made")

    def run(self, program: Program, session: Session) -> None:
        """Observe the ranges, choose regions, scale them, and observe again; undo where nothing is gained."""
        ((name, function),) = program.functions.items()
        samples = self.samples(session)
        before, original = ranges(program, samples, chip=self.chip), copy_program(program)
        plan = self.observed(session, function, before)
        beyond = plan.beyond()
        if self.copies:
            plan.copy_before_norms()
        regions = plan.choose()
        refusal = self.against(regions)
        if refusal is not None:
            plan.drop_copies()
            an.GraphEdits(self, session, function).remove()
            session.refuse(self.name, refusal)
            return
        plan.apply()
        plan.drop_copies()
        an.GraphEdits(self, session, function).remove()
        after = ranges(program, samples, chip=self.chip)
        session.refusals += [(self.name, r) for r in plan.refusals]
        left = self.observed(session, function, after).beyond()
        if why := self.useless(beyond, left, plan.refusals):
            session.refuse(self.name, why, regions[0].seed)
            program.functions[name] = original.functions[name]
            return
        self.verify(original, program, samples)
        sets = "1 set" if before.samples == 1 else f"{before.samples} sets"
        session.notes.append(
            f"{self.name}: values beyond their limits on {sets} of inputs: {beyond} before, {left} after"
        )
        for region in regions:
            words = f"2^{region.exponent}, largest value {region.largest:.4g}"
            an.GraphEdits(self, session, function).record(region.seed.name, words, unchecked=WHOLE)

    def samples(self, session: Session) -> Sequence[Mapping[str, an.Array]] | None:
        """Return the calibration as a list."""
        return as_list(self.inputs)

    def observed(
        self, session: Session, function: an.Function, observed: Ranges
    ) -> scaled_regions.ScaledRegions:
        """Return the plan of the regions for observed ranges."""
        return scaled_regions.ScaledRegions(session, function, {row.name: row for row in observed.rows})

    def useless(self, before: int, after: int, refusals: Sequence[Refusal]) -> str:
        """Return why what was scaled is taken back; "" where it stays."""
        if after < before:
            return ""
        return f"{before} values exceed their limits before and {after} after: scaling would gain nothing"

    def against(self, regions: Sequence[scaled_regions.Region]) -> Refusal | None:
        """Return why nothing is scaled, or None."""
        if not regions:
            return Refusal("no value exceeds the limits: half of 65504, and of 32768 for sums of products")
        beyond = next((r for r in regions if -r.exponent > MOST), None)
        if beyond is None:
            return None
        words = f"a value of {beyond.largest:.3g} needs 2^{beyond.exponent}; most is 2^-{MOST}"
        return Refusal(words, beyond.seed)

    def verify(self, before: Program, after: Program, samples: Sequence[Mapping[str, an.Array]] | None) -> None:
        """Check that nothing but epsilons changed.

        Raises:
            an.PassError: the models differ in fp32.
        """
        for values in samples or (None,):
            result = compare(before, after, values, precision="fp32", gate=GATE)
            if not result.ok:
                raise an.PassError(f"{self.name}: scaled and unscaled model differ in fp32: {result.verdict}")


def as_list(inputs: Any) -> Sequence[Mapping[str, an.Array]] | None:
    """Return sets of inputs as a list; None if there are none."""
    return None if inputs is None else [inputs] if isinstance(inputs, Mapping) else list(inputs)


@an.example((1, 4), dtype="fp16")
def example(x: Var) -> Var:
    """A residual stream with large values before a root mean square norm."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((4, 4)).astype(np.float16)
    large = mb.mul(x=mb.tanh(x=x, name="t"), y=np.float16(20000), name="large")
    stream = mb.add(x=large, y=mb.linear(x=x, weight=weight, name="p"), name="stream")
    mean = mb.reduce_mean(x=mb.square(x=stream, name="sq"), axes=[-1], keep_dims=True, name="mean")
    return mb.mul(x=stream, y=mb.rsqrt(x=mean, epsilon=np.float16(1e-3), name="r"), name="y")
