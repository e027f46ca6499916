"""Encoders with decoders that give text: T5, BART, Marian, Pegasus, M2M100, NLLB; of pictures TrOCR, Donut.

`seq2seq_ane` removes guards and casts before lookups: token ids come from a tokenizer and are never negative.
It makes the causal masks of the decoder one tensor, and computes padding masks and counted positions in fp16.
Patch embeddings of a picture with a kernel that the target does not take become moves and a 1x1 convolution.
The model gives the logits of the last position only, and a head that is too long for the target is cut; where
products of one row stay on the CPU, the head becomes convolutions::

    recipes.seq2seq_ane("t5.mlpackage", target="M1/macOS 14").save("t5_ane.mlpackage")

Refuses models that do not look up two sequences, or one beside a picture, or whose attentions are all causal,
or all open (`encoder_ane`, `decoder_ane`), sound (`whisper_ane`), and pictures without text (`vit_ane`).
"""

from __future__ import annotations

from anesurgery import passes
from anesurgery.errors import Refusal
from anesurgery.facts.attention import runtime_inputs
from anesurgery.facts.makeup import described, is_picture, makeup
from anesurgery.interpret.attentions import attentions
from anesurgery.mil import Function, Program, np_dtype
from anesurgery.recipes.safety import FREE, STEPS
from anesurgery.surgery import Recipe


def is_seq2seq(program: Program) -> Refusal | None:
    """Refuse what does not read ids as a decoder does, beside other ids or a picture as an encoder does."""
    model = makeup(program)
    signals = (*model.pictures, *model.signals)
    describes_pictures = bool(model.causal) and any(map(_reads_pictures, program.functions.values()))
    if signals and model.convolutions and not describes_pictures:
        return Refusal(
            f"the input {described(signals[0])} is sound or a picture: see whisper_ane, vit_ane; {model}"
        )
    ids = [v for f in program.functions.values() for v in f.inputs.values() if np_dtype(v).kind in "iu"]
    if model.attentions and not describes_pictures and (len(ids) < 2 or model.lookups < 2):
        return Refusal(f"it does not look up two sequences: see encoder_ane and decoder_ane; {model}")
    if model.attentions and model.causal == model.attentions:
        return Refusal(f"every attention is causal, so that no encoder reads ahead: see decoder_ane; {model}")
    if model.attentions and model.open >= model.attentions:
        return Refusal(f"no attention has a mask that may be causal: see encoder_ane; {model}")
    return model.without_attention


def _reads_pictures(function: Function) -> bool:
    """Does an attention depend on ids and on a picture, as in a decoder that reads an encoder of pictures?"""
    for attention in attentions(function):
        inputs = runtime_inputs(attention.weights.outputs)
        if any(map(is_picture, inputs)) and any(np_dtype(v).kind in "iu" for v in inputs):
            return True
    return False


seq2seq_ane = Recipe(
    name="seq2seq_ane",
    steps=(
        passes.FoldConstants(),
        *FREE,
        passes.GatherToMoves(),
        passes.PatchConvolution(),
        passes.TokenIdGuard(nonnegative=True),
        passes.IndexCasts(),
        passes.EmbeddingMatmul(most_rows=1024, nonnegative_ids=True),
        passes.SelectLastToken(),
        passes.CausalMaskTensor(),
        passes.PaddingMaskTensor(),
        passes.IntegersAsFloats(masks=True),
        passes.DecomposeOps(),
        passes.Rerank(),
        passes.SplitHead(),
        passes.PointwiseConvolution(),
        passes.SequenceLayout(layout="as_given"),
        passes.GroupByUnit(),
    ),
    applies_to=is_seq2seq,
    strict=True,
    repairs=STEPS,
)
