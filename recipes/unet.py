"""Networks from picture to picture: the UNet and the VAE of Stable Diffusion.

`unet_ane` folds what depends on no input, and writes norms of groups, paddings, pools and thresholds at a rank
and in a form that the Neural Engine takes::

    recipes.unet_ane("unet.mlpackage", target="M1/macOS 14").save("unet_ane.mlpackage")

Refuses models without convolutions, and models that do not give a picture back.
"""

from __future__ import annotations

from anesurgery import passes
from anesurgery.errors import Refusal
from anesurgery.facts.makeup import makeup
from anesurgery.mil import Program
from anesurgery.recipes.safety import FREE, STEPS
from anesurgery.surgery import Recipe


def gives_pictures(program: Program) -> Refusal | None:
    """Refuse what has no convolutions, or does not lead from picture to picture."""
    model = makeup(program)
    if not model.convolutions:
        return Refusal(f"the model has no convolution; {model}")
    if not model.pictures or not model.drawn:
        return Refusal(
            f"no {'output' if model.pictures else 'input'} is a picture (rank 4 or 5, floats); {model}"
        )
    return None


unet_ane = Recipe(
    name="unet_ane",
    steps=(
        passes.FoldConstants(),
        *FREE,
        passes.GatherToMoves(),
        passes.LongConvolution(),
        passes.FoldBatchNorm(),
        passes.ReflectPadSlices(),
        passes.ThresholdToMaximum(),
        passes.ChainPools(),
        passes.Rerank(),
        passes.SequenceLayout(layout="as_given"),
        passes.GroupByUnit(),
    ),
    applies_to=gives_pictures,
    strict=True,
    repairs=STEPS,
)
