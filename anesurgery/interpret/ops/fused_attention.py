"""Fused attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from anesurgery.interpret.table import impl

Tensor = torch.Tensor


@impl("scaled_dot_product_attention")
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
) -> Tensor:
    """softmax(query keyᵀ / sqrt(width) + mask) value; a boolean mask keeps where it is true."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask)
