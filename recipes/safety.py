"""Numbers that fp16 and the engine hold: the repairs of every numeric hazard that a model can reach.

Each step looks for one hazard, and leaves alone what intervals, constants and weights show to be safe; what it
changes is the same in exact arithmetic, or as near as the pass says. None is there for speed, and some cost
ops; the report says what the estimate makes of it::

    ane.apply("model.mlpackage", "safe_numbers", target="M1/macOS 14")

docs/hazards.md lists what goes wrong, how it is named, and which step repairs it.
"""

from __future__ import annotations

from anesurgery.passes.causal_mask_tensor import CausalMaskTensor
from anesurgery.passes.centre_variance import CentreVariance
from anesurgery.passes.clip_product import ClipProduct
from anesurgery.passes.cut_rows import CutRows
from anesurgery.passes.fuse_exponential import FuseExponential
from anesurgery.passes.group_norm import GroupNorm
from anesurgery.passes.halve_exponent import HalveExponent
from anesurgery.passes.mean_of_means import MeanOfMeans
from anesurgery.passes.mean_quotient import MeanQuotient
from anesurgery.passes.padding_mask_tensor import PaddingMaskTensor
from anesurgery.passes.rms_norm import RmsNorm
from anesurgery.passes.scale_cosines import ScaleCosines
from anesurgery.passes.scale_powers import ScalePowers
from anesurgery.passes.scale_products import ScaleProducts
from anesurgery.passes.scale_roots import ScaleRoots
from anesurgery.passes.scale_scores import ScaleScores
from anesurgery.passes.scale_shares import ScaleShares
from anesurgery.passes.scale_spectra import ScaleSpectra
from anesurgery.passes.sum_to_mean import SumToMean
from anesurgery.passes.widen_to_fp32 import WidenToFp32
from anesurgery.surgery import Recipe

FREE = (FuseExponential(), SumToMean(most=4.0), MeanQuotient(), ScaleScores())
"""Repairs that mostly add no op, and lose nothing of small numbers. The recipes of families run them, and drop
what makes the model slower."""

STEPS = (
    FuseExponential(),
    SumToMean(),
    MeanQuotient(most=65504),
    ScaleScores(),
    CentreVariance(),
    RmsNorm(),
    GroupNorm(),
    ScaleCosines(),
    ScaleRoots(),
    ScaleSpectra(),
    ScalePowers(),
    HalveExponent(),
    MeanOfMeans(),
    ScaleProducts(),
    ScaleShares(),
    ClipProduct(),
    CausalMaskTensor(),
    PaddingMaskTensor(),
    CutRows(),
    WidenToFp32(),
)

safe_numbers = Recipe(
    name="safe_numbers",
    steps=STEPS,
    psnr=60.0,
    chosen=frozenset(step.name for step in STEPS),  # right numbers may cost time, which is said
)
