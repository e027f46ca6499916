"""Language models that write: a causal decoder becomes `prefill` and `decode`, which share a cache.

`llm_ane` folds what depends on no input, selects what routers of experts scatter, makes the causal mask one
tensor, splits the head where the target cannot hold it, and adds the cache::

    recipes.llm_ane("llama.mlpackage", context=2048, target="M1/macOS 15").save("llama_llm.mlpackage")

Masks, tables and places of writing come from the functions `prefill_inputs` and `decode_inputs`, which read the
position, and what is new is blended in: no integers are left between the layers. `position_function=False` and
`writes="slice"` leave the position as an input, and write slices.

Its options are those of its steps: `context`, `prefill`, `cache`, `writes`, `fixed`. Token ids come from a
tokenizer, and are never negative. Where values leave fp16, run `scale_ranges` with calibration data first.

Refuses models that `decoder_ane` refuses, and fails where no cache can be added, with the op.
"""

from __future__ import annotations

from anesurgery import passes
from anesurgery.recipes.decoder import is_causal
from anesurgery.recipes.safety import FREE, STEPS
from anesurgery.surgery import Recipe

llm_ane = Recipe(
    name="llm_ane",
    steps=(
        passes.FoldConstants(),
        *FREE,
        passes.GatherToMoves(),
        passes.ReplaceScatter(),
        passes.TokenIdGuard(nonnegative=True),
        passes.CausalMaskTensor(),
        passes.SplitHead(),
        passes.AddCache(required=True, writes="blend"),
        passes.PositionFunction(),
    ),
    applies_to=is_causal,
    strict=True,
    repairs=STEPS,
)
