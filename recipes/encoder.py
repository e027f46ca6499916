"""Text encoders: BERT, RoBERTa, DistilBERT, MiniLM, ModernBERT, the encoder of T5.

`encoder_ane` folds values that depend on no input, writes other gathers as moves, and removes guards and casts
before lookups: token ids come from a tokenizer and are never negative. Masks and counted positions are computed
in fp16, and positions and token types are looked up by a product, so that only the word lookup and a cast of
each input stay on the CPU. A head over a vocabulary is split if the target asks for it::

    recipes.encoder_ane("bert.mlpackage", target="M1/macOS 14").save("bert_ane.mlpackage")

On M1, M1 Max and A15, where it was measured to help text encoders, the model goes channels first, and attention
head by head (`sequence_layout`); `layout="as_given"` prevents it, and `layout="channels_first"` asks for it on
any chip.

Refuses models without attention, models of pictures, and causal decoders (`decoder_ane`).
"""

from __future__ import annotations

from anesurgery import passes
from anesurgery.errors import Refusal
from anesurgery.facts.makeup import described, makeup
from anesurgery.mil import Program
from anesurgery.recipes.safety import FREE, STEPS
from anesurgery.surgery import Recipe

SHORT = 1024
"""Tables up to here, of positions and token types, are multiplied; the words are looked up on the CPU."""


def is_encoder(program: Program) -> Refusal | None:
    """Refuse what is plainly not a text encoder."""
    model = makeup(program)
    if model.pictures and model.convolutions:
        return Refusal(f"the input {described(model.pictures[0])} is a picture: see vit_ane; {model}")
    if model.causal and not model.open and model.head is not None:
        return Refusal(f"a causal decoder with the head {described(model.head)}: see decoder_ane; {model}")
    return model.without_attention


encoder_ane = Recipe(
    name="encoder_ane",
    steps=(
        passes.FoldConstants(),
        *FREE,
        passes.GatherToMoves(),
        passes.TokenIdGuard(nonnegative=True),
        passes.IndexCasts(),
        passes.EmbeddingMatmul(most_rows=SHORT, nonnegative_ids=True),
        passes.PaddingMaskTensor(),
        passes.IntegersAsFloats(masks=True),
        passes.DecomposeOps(),
        passes.Rerank(),
        passes.SplitHead(),
        passes.SequenceLayout(layout="by_evidence"),
        passes.GroupByUnit(),
    ),
    applies_to=is_encoder,
    strict=True,
    repairs=STEPS,
)
