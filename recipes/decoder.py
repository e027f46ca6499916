"""Causal language models: Llama, Qwen, Mistral, Gemma, Phi, SmolLM, OPT, GPT-NeoX.

`decoder_ane` gives the logits of the last position only, folds values that depend on no input, makes the causal
mask one tensor, and splits a head that the target cannot hold; where products of one row stay on the CPU, the
head becomes convolutions. Routers of experts compare their choice in fp16, slices that are written into a
buffer are joined, and running sums, as in the scans of hybrid models, become products. Lookups stay on the CPU,
as the first op. The guards before them go, since token ids come from a tokenizer and are never negative::

    recipes.decoder_ane("llama.mlpackage", target="M1/macOS 14").save("llama_ane.mlpackage")

`select_last_token=False` keeps the logits of every position. `gpt2_ane` replaces lookups by products as well.
A model with a table of 151669 rows was reported on the CPU as a whole, and on the engine without it: after the
recipe, `passes.EmbeddingMatmul(mode="input")` takes the lookup out, and leaves the table to the caller.

Refuses models without attention, and encoders, whose attention sees ahead (`encoder_ane`, `vit_ane`).
"""

from __future__ import annotations

from anesurgery import passes
from anesurgery.errors import Refusal
from anesurgery.facts.makeup import described, makeup
from anesurgery.mil import Program
from anesurgery.recipes.safety import FREE, STEPS
from anesurgery.surgery import Recipe


def is_causal(program: Program) -> Refusal | None:
    """Refuse what is plainly not a causal decoder; masks that are inputs may be causal."""
    model = makeup(program)
    if model.pictures and model.convolutions:
        return Refusal(f"the input {described(model.pictures[0])} is a picture: see vit_ane; {model}")
    if model.attentions and model.open == model.attentions and not model.states:
        return Refusal(f"no attention is causal, as in an encoder: see encoder_ane; {model}")
    return model.without_attention


decoder_ane = Recipe(
    name="decoder_ane",
    steps=(
        passes.FoldConstants(),
        *FREE,
        passes.GatherToMoves(),
        passes.ReplaceScatter(),
        passes.TokenIdGuard(nonnegative=True),
        passes.IndexCasts(),
        passes.IntegersAsFloats(of_inputs=False),
        passes.SelectLastToken(),
        passes.CausalMaskTensor(),
        passes.PaddingMaskTensor(),
        passes.SplitHead(),
        passes.PointwiseConvolution(),
        passes.SequenceLayout(layout="as_given"),
        passes.DecomposeOps(),
        passes.GroupByUnit(),
    ),
    applies_to=is_causal,
    strict=True,
    repairs=STEPS,
)
