"""Numbers that fp16 and the engine hold: the repairs of every numeric hazard that a model can reach.

Each step looks for one hazard, and leaves alone what intervals, constants and weights show to be safe; what it
changes is the same in exact arithmetic, or as near as the pass says. None is there for speed, and some cost
ops; the report gives the estimated time. A step is undone if it moves the outputs, for sampled inputs or
`inputs=`, further from what the model means::

    ane.apply("model.mlpackage", "safe_numbers", target="M1/macOS 14")

docs/hazards.md lists what goes wrong, how it is named, and which step repairs it.
"""

from __future__ import annotations

from anesurgery import passes
from anesurgery.surgery import Recipe

FREE = (
    passes.FuseExponential(),
    passes.SumToMean(most=4.0),  # a mean that is at most four times smaller keeps the digits of small sums
    passes.MeanQuotient(),
    passes.ScaleScores(),
)
"""Repairs that mostly add no op, and keep the digits of small numbers.

Recipes of model families always try these, and drop one that makes the model slower. Of `STEPS`, these recipes
and `auto` run only those whose hazard the given inputs reach.
"""

# A recipe sorts its steps; the order here only decides between steps that may go either way.
STEPS = (
    passes.ShiftScores(),
    passes.FuseExponential(),
    passes.ReplaceFaultyOps(),
    passes.SumToMean(),
    passes.MeanQuotient(most=65504),  # here a mean that is too small is better than a sum that overflows
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
    passes.DecomposeAttention(only_ignored=True),  # only where the engine was seen to ignore the mask
    passes.CausalMaskTensor(),
    passes.PaddingMaskTensor(equal=True),  # fully masked rows keep equal weights
    passes.CutRows(),
    passes.StableAngle(),
    passes.FlatGather(),
    passes.WidenToFp32(),
    passes.HoldGuards(),
)

safe_numbers = Recipe(
    name="safe_numbers",
    steps=STEPS,
    chosen=frozenset(step.name for step in STEPS),  # as if named by the user: kept whatever they cost
    exact=True,
)
