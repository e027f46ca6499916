"""Numbers that fp16 and the engine hold: the repairs of every numeric hazard that a model can reach.

Each step looks for one hazard, and leaves alone what intervals, constants and weights show to be safe; what it
changes is the same in exact arithmetic, or as near as the pass says. None is there for speed, and some cost
ops; the report says what the estimate makes of it. A step is undone after which the outputs of sampled inputs,
or of `inputs=`, are further from what the model means than before it::

    ane.apply("model.mlpackage", "safe_numbers", target="M1/macOS 14")

docs/hazards.md lists what goes wrong, how it is named, and which step repairs it.
"""

from __future__ import annotations

from anesurgery import passes
from anesurgery.surgery import Recipe

FREE = (passes.FuseExponential(), passes.SumToMean(most=4.0), passes.MeanQuotient(), passes.ScaleScores())
"""Repairs that mostly add no op, and lose nothing of small numbers. The recipes of families run them always,
and drop what makes the model slower; of `STEPS` they and `auto` run what the inputs at hand need."""

STEPS = (
    passes.ShiftScores(),
    passes.FuseExponential(),
    passes.ReplaceFaultyOps(),
    passes.SumToMean(),
    passes.MeanQuotient(most=65504),
    passes.ScaleScores(),
    passes.ScaleResidual(),
    passes.CentreVariance(),
    passes.RmsNorm(),
    passes.GroupNorm(),
    passes.ScaleCosines(),
    passes.ScaleRoots(),
    passes.ScaleSpectra(),
    passes.ScalePowers(),
    passes.HalveExponent(),
    passes.MeanOfMeans(),
    passes.ScaleProducts(),
    passes.ScaleShares(),
    passes.ClipProduct(),
    passes.DecomposeAttention(only_ignored=True),
    passes.CausalMaskTensor(),
    passes.PaddingMaskTensor(equal=True),
    passes.CutRows(),
    passes.StableAngle(),
    passes.FlatGather(),
    passes.WidenToFp32(),
    passes.HoldGuards(),
)

safe_numbers = Recipe(
    name="safe_numbers",
    steps=STEPS,
    psnr=60.0,
    chosen=frozenset(step.name for step in STEPS),  # right numbers may cost time, which is said
    exact=True,
)
