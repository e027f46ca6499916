"""GPT-2 and its relatives: one causal decoder with a vocabulary head.

`gpt2_ane` sorts its passes by what each declares (`precedes`, `follows`). Token ids come from a
tokenizer and are never negative, so the guard and the casts before lookups go. Lookups become products of
one-hot rows; where the gate finds that a product costs more on the target than it gains, the lookup stays on
the CPU, as the first op, and the surgery says so.
"""

from __future__ import annotations

from anesurgery import passes
from anesurgery.errors import Refusal
from anesurgery.interpret.attentions import attentions
from anesurgery.mil import Program
from anesurgery.recipes.safety import FREE, STEPS
from anesurgery.surgery import Recipe


def has_attention(program: Program) -> Refusal | None:
    """Refuse programs without attention: no fused op, and no softmax between two products of dynamic values."""
    if next(attentions(program), None) is not None:
        return None
    return Refusal("no attention was recognized (a softmax between two matrix products)")


gpt2_ane = Recipe(
    name="gpt2_ane",
    steps=(
        passes.FoldConstants(),
        *FREE,
        passes.TokenIdGuard(nonnegative=True),
        passes.IndexCasts(),
        passes.SelectLastToken(),
        passes.CausalMaskTensor(),
        passes.SplitHead(),
        passes.EmbeddingMatmul(nonnegative_ids=True, pad_tied=True),
        passes.PadLastAxis(),
        passes.NegateSubtract(),
        passes.ExplicitBroadcast(),
    ),
    applies_to=has_attention,
    repairs=STEPS,
)
