"""Speech: Whisper's encoder and decoder, together or each by itself.

`whisper_ane` folds what depends on no input, makes the causal masks of the decoder one tensor, gives the logits
of the last position only, and cuts heads and kernels that are too long for the target; where products of one
row stay on the CPU, the head becomes convolutions::

    recipes.whisper_ane("whisper.mlpackage", target="M1/macOS 14").save("whisper_ane.mlpackage")

Refuses models without attention, and models whose inputs are pictures, or token ids alone.
"""

from __future__ import annotations

from anesurgery.errors import Refusal
from anesurgery.facts.makeup import described, makeup
from anesurgery.mil import Program
from anesurgery.passes.causal_mask_tensor import CausalMaskTensor
from anesurgery.passes.fold_constants import FoldConstants
from anesurgery.passes.gather_to_moves import GatherToMoves
from anesurgery.passes.group_by_unit import GroupByUnit
from anesurgery.passes.index_casts import IndexCasts
from anesurgery.passes.integers_as_floats import IntegersAsFloats
from anesurgery.passes.long_convolution import LongConvolution
from anesurgery.passes.padding_mask_tensor import PaddingMaskTensor
from anesurgery.passes.pointwise_convolution import PointwiseConvolution
from anesurgery.passes.select_last_token import SelectLastToken
from anesurgery.passes.sequence_layout import SequenceLayout
from anesurgery.passes.split_head import SplitHead
from anesurgery.passes.token_id_guard import TokenIdGuard
from anesurgery.recipes.safety import FREE
from anesurgery.surgery import Recipe


def is_speech(program: Program) -> Refusal | None:
    """Refuse what takes neither sound nor what an encoder made of it."""
    found = makeup(program)
    if found.pictures and found.convolutions and not found.signals:
        return Refusal(f"the input {described(found.pictures[0])} is a picture: see vit_ane; {found}")
    if found.attentions and not found.signals:
        return Refusal(f"no input is sound or what an encoder made of it; {found}")
    return found.without_attention


whisper_ane = Recipe(
    name="whisper_ane",
    steps=(
        FoldConstants(),
        *FREE,
        GatherToMoves(),
        TokenIdGuard(nonnegative=True),
        IndexCasts(),
        SelectLastToken(),
        CausalMaskTensor(),
        PaddingMaskTensor(),
        IntegersAsFloats(masks=True),
        LongConvolution(),
        SplitHead(),
        PointwiseConvolution(),
        SequenceLayout(layout="as_given"),
        GroupByUnit(),
    ),
    applies_to=is_speech,
    strict=True,
    psnr=60.0,
)
