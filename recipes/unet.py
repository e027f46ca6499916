"""Networks from picture to picture: the UNet and the VAE of Stable Diffusion.

`unet_ane` folds what depends on no input, and writes norms of groups, paddings, pools and thresholds at a rank
and in a form that the Neural Engine takes::

    recipes.unet_ane("unet.mlpackage", target="M1/macOS 14").save("unet_ane.mlpackage")

Refuses models without convolutions, and models that do not give a picture back.
"""

from __future__ import annotations

from anesurgery.errors import Refusal
from anesurgery.facts.makeup import makeup
from anesurgery.mil import Program
from anesurgery.passes.chain_pools import ChainPools
from anesurgery.passes.fold_batch_norm import FoldBatchNorm
from anesurgery.passes.fold_constants import FoldConstants
from anesurgery.passes.gather_to_moves import GatherToMoves
from anesurgery.passes.group_by_unit import GroupByUnit
from anesurgery.passes.long_convolution import LongConvolution
from anesurgery.passes.reflect_pad_slices import ReflectPadSlices
from anesurgery.passes.rerank import Rerank
from anesurgery.passes.sequence_layout import SequenceLayout
from anesurgery.passes.threshold_to_maximum import ThresholdToMaximum
from anesurgery.recipes.safety import FREE
from anesurgery.surgery import Recipe


def gives_pictures(program: Program) -> Refusal | None:
    """Refuse what has no convolutions, or does not lead from picture to picture."""
    found = makeup(program)
    if not found.convolutions:
        return Refusal(f"the model has no convolution; {found}")
    if not found.pictures or not found.drawn:
        return Refusal(
            f"no {'output' if found.pictures else 'input'} is a picture (rank 4 or 5, floats); {found}"
        )
    return None


unet_ane = Recipe(
    name="unet_ane",
    steps=(
        FoldConstants(),
        *FREE,
        GatherToMoves(),
        LongConvolution(),
        FoldBatchNorm(),
        ReflectPadSlices(),
        ThresholdToMaximum(),
        ChainPools(),
        Rerank(),
        SequenceLayout(layout="as_given"),
        GroupByUnit(),
    ),
    applies_to=gives_pictures,
    strict=True,
    psnr=60.0,
)
