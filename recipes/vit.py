"""Transformers over pictures: ViT, DINO, CLIP, SigLIP, SAM, DETR.

`vit_ane` folds what depends on no input, makes patch embeddings of pictures and films whose kernels the target
does not take into moves and a 1x1 convolution, and writes windows, shifts and paddings in forms that the
Neural Engine takes::

    recipes.vit_ane("dinov2.mlpackage", target="M1/macOS 14").save("dinov2_ane.mlpackage")

Refuses models without attention, linear attention among them (`auto` takes any model), and models without a
picture or a film among the inputs.
"""

from __future__ import annotations

from anesurgery.errors import Refusal
from anesurgery.facts.makeup import makeup
from anesurgery.mil import Program
from anesurgery.passes.absorb_transpose import AbsorbTranspose
from anesurgery.passes.chain_pools import ChainPools
from anesurgery.passes.fold_batch_norm import FoldBatchNorm
from anesurgery.passes.fold_constants import FoldConstants
from anesurgery.passes.gather_to_moves import GatherToMoves
from anesurgery.passes.group_by_unit import GroupByUnit
from anesurgery.passes.long_convolution import LongConvolution
from anesurgery.passes.patch_convolution import PatchConvolution
from anesurgery.passes.reflect_pad_slices import ReflectPadSlices
from anesurgery.passes.rerank import Rerank
from anesurgery.passes.sequence_layout import SequenceLayout
from anesurgery.passes.split_conv3d import SplitConv3d
from anesurgery.passes.threshold_to_maximum import ThresholdToMaximum
from anesurgery.recipes.safety import FREE
from anesurgery.surgery import Recipe


def sees_pictures(program: Program) -> Refusal | None:
    """Refuse what has no attention, or no picture to look at."""
    found = makeup(program)
    if found.attentions and not found.pictures:
        return Refusal(f"no input is a picture (rank 4 or 5, floats); {found}")
    if found.pictures and not found.attentions:
        words = "the model has no attention (no softmax between two matrix products; linear attention is none)"
        return Refusal(f"{words}: auto takes any model; {found}")
    return found.without_attention


vit_ane = Recipe(
    name="vit_ane",
    steps=(
        FoldConstants(),
        *FREE,
        GatherToMoves(),
        SplitConv3d(),
        PatchConvolution(),
        LongConvolution(),
        FoldBatchNorm(),
        ReflectPadSlices(),
        ThresholdToMaximum(),
        ChainPools(),
        AbsorbTranspose(),
        Rerank(),
        SequenceLayout(layout="as_given"),
        GroupByUnit(),
    ),
    applies_to=sees_pictures,
    strict=True,
    psnr=60.0,
)
