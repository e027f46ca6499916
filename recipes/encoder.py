"""Text encoders: BERT, RoBERTa, DistilBERT, MiniLM, ModernBERT, the encoder of T5.

`encoder_ane` folds what depends on no input, writes the masks and gathers that are left as moves, and takes the
guards and casts away that stand before lookups: token ids come from a tokenizer and are never negative. Masks
and counted positions are computed in fp16, and positions and token types are looked up by a product, so that
the word lookup and a cast of each input are all that stays on the CPU. A head over a vocabulary is split where
the target asks for it::

    recipes.encoder_ane("bert.mlpackage", target="M1/macOS 14").save("bert_ane.mlpackage")

Where that was measured to help text encoders, on M1, M1 Max and A15, the model goes channels first, and
attention head by head (`sequence_layout`); `layout="as_given"` prevents it, and `layout="channels_first"` asks
for it anywhere.

Refuses models without attention, models of pictures, and causal decoders (`decoder_ane`).
"""

from __future__ import annotations

from anesurgery.errors import Refusal
from anesurgery.facts.makeup import described, makeup
from anesurgery.mil import Program
from anesurgery.passes.decompose_ops import DecomposeOps
from anesurgery.passes.embedding_matmul import EmbeddingMatmul
from anesurgery.passes.fold_constants import FoldConstants
from anesurgery.passes.gather_to_moves import GatherToMoves
from anesurgery.passes.group_by_unit import GroupByUnit
from anesurgery.passes.index_casts import IndexCasts
from anesurgery.passes.integers_as_floats import IntegersAsFloats
from anesurgery.passes.padding_mask_tensor import PaddingMaskTensor
from anesurgery.passes.rerank import Rerank
from anesurgery.passes.sequence_layout import SequenceLayout
from anesurgery.passes.split_head import SplitHead
from anesurgery.passes.token_id_guard import TokenIdGuard
from anesurgery.recipes.safety import FREE
from anesurgery.surgery import Recipe

SHORT = 1024
"""Tables up to here, of positions and token types, are multiplied; the words are looked up on the CPU."""


def is_encoder(program: Program) -> Refusal | None:
    """Refuse what is plainly not a text encoder."""
    found = makeup(program)
    if found.pictures and found.convolutions:
        return Refusal(f"the input {described(found.pictures[0])} is a picture: see vit_ane; {found}")
    if found.causal and not found.open and found.head is not None:
        return Refusal(f"a causal decoder with the head {described(found.head)}: see decoder_ane; {found}")
    return found.without_attention


encoder_ane = Recipe(
    name="encoder_ane",
    steps=(
        FoldConstants(),
        *FREE,
        GatherToMoves(),
        TokenIdGuard(nonnegative=True),
        IndexCasts(),
        EmbeddingMatmul(most_rows=SHORT, nonnegative_ids=True),
        PaddingMaskTensor(),
        IntegersAsFloats(masks=True),
        DecomposeOps(),
        Rerank(),
        SplitHead(),
        SequenceLayout(layout="by_evidence"),
        GroupByUnit(),
    ),
    applies_to=is_encoder,
    strict=True,
    psnr=60.0,
)
