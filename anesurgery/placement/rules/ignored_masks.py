"""Fused attention: what Core ML's plan says of it, and masks that it does not apply."""

from __future__ import annotations

from anesurgery.mil import Operation, Var, dtype_name, is_stored
from anesurgery.ops import CARRIERS, POINTWISE, names
from anesurgery.placement.evidence import Grade, Rule, Scope
from anesurgery.placement.target import Target
from anesurgery.semantics.rows import runtime

FUSED = names("scaled_dot_product_attention")
SOURCE = "ironblock/sidekick: docs/MODELS.md, docs/DECISIONS.md (D24, D25, D27)"
ON_27 = (("macOS", 27), ("iOS", 27))
ENGINE_READS = frozenset({"fp16", "bool"})
EXPLICIT = "write it as matmul, softmax, matmul: convert for iOS 17, or with the math kernel of torch"

NO_DEVICE = Rule(
    "sdpa-no-device",
    FUSED,
    "the plan named no device for the 12 fused attentions of one model, while a lone one was legal on an M4",
    SOURCE,
    grade=Grade.REPORTED,
    scope=Scope(frozenset({13}), "seen on M1 Max, macOS 27.0", since=ON_27),
    advice=EXPLICIT,
    remedy="decompose_attention",
)


MASK_STEPS = 32
"""Ops between an input and a mask that are looked at; masks of transformers take up to ten."""
MAKES_MASKS = POINTWISE | CARRIERS | names("slice_by_index tile")
"""Light ops, which go where the op before them goes."""


def outside_mask(op: Operation, target: Target) -> str:
    """A mask that no op of the engine's own makes: an input, a constant, or what a cast on the CPU begins."""
    mask = op.inputs.get("attn_mask")
    if mask is None:
        return ""
    if mask.op is None:
        return f"the mask %{mask.name} is an input"
    if is_stored(mask):
        return f"the mask %{mask.name} is a constant"
    return cast_mask(op, target)


def cast_mask(op: Operation, target: Target) -> str:
    """A mask that light ops make of integers or fp32, which the engine does not read."""
    mask = op.inputs.get("attn_mask")
    waiting, path = [] if mask is None or mask.op is None else [mask.op], list[Operation]()
    outside: list[Var] = []
    while waiting and len(path) < MASK_STEPS:
        now = waiting.pop()
        if now.op_type not in MAKES_MASKS:
            return ""  # an op that may be on the engine has a part in it
        path.append(now)
        outside += [v for v in runtime(now) if dtype_name(v) not in ENGINE_READS and v not in outside]
        waiting += [v.op for v in runtime(now) if v.op is not None and v not in outside and v.op not in path]
    if mask is None or not outside or waiting:
        return ""
    steps = ", ".join(dict.fromkeys(maker.op_type for maker in reversed(path)))
    return f"the mask %{mask.name} is made of %{outside[0].name} ({dtype_name(outside[0])}) through {steps}"


CAST_MASK = Rule(
    "sdpa-mask-cast",
    FUSED,
    "the plan named no device for fused attentions whose mask came from integers, by cast, subtraction and "
    "product; with an fp16 mask beside it a lone one was legal on an M4",
    SOURCE,
    test=cast_mask,
    grade=Grade.REPORTED,
    scope=Scope(frozenset({13, 14, 15, 17, 18}), "seen on M1 Max, macOS 27.0", since=ON_27),
    advice=EXPLICIT,
    remedy="decompose_attention",
    far="any",
)
MASK_IGNORED = Rule(
    "sdpa-mask",
    FUSED,
    "fused attention did not apply a mask unless an op of the same part of the engine's program made it: wrong "
    "numbers, and no error",
    SOURCE,
    test=outside_mask,
    grade=Grade.REPORTED,
    kind="numeric",
    scope=Scope(os="seen on M1 Max, macOS 27.0", since=ON_27),
    remedy="decompose_attention",
)
SILU = Rule(
    "num-silu",
    names("silu"),
    "in one embedder the native SiLU was what lost most precision on the engine",
    "ironblock/sidekick",
    test=lambda op, target: f"%{op.outputs[0].name} is a silu",
    grade=Grade.REPORTED,
    kind="numeric",
    scope=Scope(frozenset({13}), "seen on M1 Max, macOS 27.0", since=ON_27),
    advice="compare with x * sigmoid(x) on the device",
)
RULES = (MASK_IGNORED, SILU)
