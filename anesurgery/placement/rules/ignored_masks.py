"""Fused attention: what Core ML's plan says of it, and masks that it does not apply."""

from __future__ import annotations

from anesurgery.facts.work import is_stored, runtime
from anesurgery.mil import Operation, dtype_name
from anesurgery.ops import names
from anesurgery.placement.evidence import Grade, Rule, Scope
from anesurgery.placement.target import Target

FUSED = names("scaled_dot_product_attention")
SOURCE = "ironblock/sidekick: docs/MODELS.md, docs/DECISIONS.md (D24, D25, D27)"
ON_27 = (("macOS", 27), ("iOS", 27))
EXPLICIT = "write it as matmul, softmax, matmul: convert for iOS 17, or with the math kernel of torch"

NO_DEVICE = Rule(
    "sdpa-no-device",
    FUSED,
    "the plan named no device for the 12 fused attentions of one model, while a lone one was legal on an M4",
    SOURCE,
    grade=Grade.REPORTED,
    scope=Scope(frozenset({13}), "seen on M1 Max, macOS 27.0", since=ON_27),
    advice=EXPLICIT,
)


def outside_mask(op: Operation, target: Target) -> str:
    """A mask that no op of the engine's own makes: an input, a constant, or what integer arithmetic gives."""
    mask = op.inputs.get("attn_mask")
    if mask is None:
        return ""
    if mask.op is None:
        return f"the mask %{mask.name} is an input"
    if is_stored(mask):
        return f"the mask %{mask.name} is a constant"
    whole = [v for v in runtime(mask.op) if dtype_name(v).startswith(("int", "uint"))]
    return f"the mask %{mask.name} is made of integers (%{whole[0].name})" if whole else ""


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
