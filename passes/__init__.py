"""Passes by class name: `passes.PadLastAxis(multiple=32)`. A pass is imported when it is first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anesurgery import registry

if TYPE_CHECKING:
    from anesurgery.passes.causal_mask_tensor import CausalMaskTensor
    from anesurgery.passes.embedding_matmul import EmbeddingMatmul
    from anesurgery.passes.explicit_broadcast import ExplicitBroadcast
    from anesurgery.passes.negate_subtract import NegateSubtract
    from anesurgery.passes.pad_last_axis import PadLastAxis
    from anesurgery.passes.rerank import Rerank
    from anesurgery.passes.select_last_token import SelectLastToken

    __all__ = [
        "CausalMaskTensor", "EmbeddingMatmul", "ExplicitBroadcast", "NegateSubtract", "PadLastAxis",
        "Rerank", "SelectLastToken",
    ]  # fmt: skip


def __getattr__(name: str) -> Any:
    known = {registry.camel(n): n for n in registry.pass_names()}
    if name in known:
        return registry.pass_class(known[name])
    raise AttributeError(f"there is no pass {name!r}; known: {', '.join(known)}")


def __dir__() -> list[str]:
    return [registry.camel(n) for n in registry.pass_names()]
