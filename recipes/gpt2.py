"""GPT-2 and its relatives: one causal decoder with a vocabulary head.

`gpt2_ane` runs seven passes, sorted by what each declares (`precedes`, `follows`).
"""

from __future__ import annotations

from anesurgery.errors import Refusal
from anesurgery.interpret.attentions import attentions
from anesurgery.mil import Program
from anesurgery.passes.causal_mask_tensor import CausalMaskTensor
from anesurgery.passes.embedding_matmul import EmbeddingMatmul
from anesurgery.passes.explicit_broadcast import ExplicitBroadcast
from anesurgery.passes.fold_constants import FoldConstants
from anesurgery.passes.negate_subtract import NegateSubtract
from anesurgery.passes.pad_last_axis import PadLastAxis
from anesurgery.passes.select_last_token import SelectLastToken
from anesurgery.surgery import Recipe


def has_attention(program: Program) -> Refusal | None:
    """Refuse programs without attention: no fused op, and no softmax between two products of dynamic values."""
    if next(attentions(program), None) is not None:
        return None
    return Refusal("the model has no attention (no softmax between two matrix products)")


gpt2_ane = Recipe(
    name="gpt2_ane",
    steps=(
        FoldConstants(),
        SelectLastToken(),
        CausalMaskTensor(),
        EmbeddingMatmul(pad_tied=True),
        PadLastAxis(),
        NegateSubtract(),
        ExplicitBroadcast(),
    ),
    applies_to=has_attention,
    psnr=60.0,
)
