"""Transformers over pictures: ViT, DINO, CLIP, SigLIP, SAM, DETR.

`vit_ane` folds what depends on no input, makes patch embeddings of pictures and videos whose kernels the target
does not take into moves and a 1x1 convolution, and writes windows, shifts and paddings in forms that the
Neural Engine takes::

    recipes.vit_ane("dinov2.mlpackage", target="M1/macOS 14").save("dinov2_ane.mlpackage")

A picture may come as patches that were cut before (1 x patches x numbers), as towers of many sizes take them.

Refuses models without attention, linear attention among them (`auto` takes any model), and models without a
picture, a video or patches among the inputs.
"""

from __future__ import annotations

from anesurgery import passes
from anesurgery.errors import Refusal
from anesurgery.facts.makeup import makeup
from anesurgery.mil import Program
from anesurgery.recipes.safety import FREE, STEPS
from anesurgery.surgery import Recipe


def refuse_without_pictures(program: Program) -> Refusal | None:
    """Refuse a model without attention, or without a picture to look at."""
    model = makeup(program)
    if model.pictures and not model.attentions:
        words = "no attention was recognized (a softmax between two matrix products; linear attention is none)"
        return Refusal(f"{words}: auto takes any model; {model}")
    if not model.attentions:
        return model.without_attention
    all_causal = model.causal == model.attentions  # then vectors that a product reads are tokens, not patches
    if model.pictures or (model.patches and not all_causal):
        return None
    return Refusal(f"no input is a picture (rank 4 or 5, floats) or patches of one; {model}")


vit_ane = Recipe(
    name="vit_ane",
    steps=(  # the engine sorts them by what each declares
        passes.FoldConstants(),
        *FREE,
        # windows and shifts
        passes.GatherToMoves(),
        # patch embeddings, and convolutions of stems and necks
        passes.SplitConv3d(),
        passes.PatchConvolution(),
        passes.LongConvolution(),
        passes.FoldBatchNorm(),
        passes.ReflectPadSlices(),
        passes.ThresholdToMaximum(),
        passes.ChainPools(),
        # layout
        passes.AbsorbTranspose(),
        passes.Rerank(),
        passes.SequenceLayout(layout="as_given"),
        passes.GroupByUnit(),
    ),
    applies_to=refuse_without_pictures,
    strict=True,  # refused for other models, not tried
    repairs=STEPS,
)
