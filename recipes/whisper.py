"""Speech: Whisper's encoder and decoder, together or each by itself.

`whisper_ane` folds what depends on no input, makes the causal masks of the decoder one tensor, gives the logits
of the last position only, and cuts heads and kernels that are too long for the target; where products of one
row stay on the CPU, the head becomes convolutions::

    recipes.whisper_ane("whisper.mlpackage", target="M1/macOS 14").save("whisper_ane.mlpackage")

Refuses models without attention, and models whose inputs are pictures, or token ids alone.
"""

from __future__ import annotations

from anesurgery import passes
from anesurgery.errors import Refusal
from anesurgery.facts.makeup import described, makeup
from anesurgery.mil import Program
from anesurgery.recipes.safety import FREE, STEPS
from anesurgery.surgery import Recipe


def is_speech(program: Program) -> Refusal | None:
    """Refuse what takes neither sound nor what an encoder made of it."""
    model = makeup(program)
    if model.pictures and model.convolutions and not model.signals:
        return Refusal(f"the input {described(model.pictures[0])} is a picture: see vit_ane; {model}")
    if model.attentions and not model.signals:
        return Refusal(f"no input is sound, or the output of an encoder; {model}")
    return model.without_attention


whisper_ane = Recipe(
    name="whisper_ane",
    steps=(
        passes.FoldConstants(),
        *FREE,
        passes.GatherToMoves(),
        passes.TokenIdGuard(nonnegative=True),
        passes.IndexCasts(),
        passes.SelectLastToken(),
        passes.CausalMaskTensor(),
        passes.PaddingMaskTensor(),
        passes.IntegersAsFloats(masks=True),
        passes.LongConvolution(),
        passes.SplitHead(),
        passes.PointwiseConvolution(),
        passes.SequenceLayout(layout="as_given"),
        passes.GroupByUnit(),
    ),
    applies_to=is_speech,
    strict=True,
    repairs=STEPS,
)
