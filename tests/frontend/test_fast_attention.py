"""Layers of torch.nn that torch runs as one operation in inference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conversion import convert
from torch import nn

from anesurgery import frontend
from anesurgery.interpret import run

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
OTHER = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
LATER = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
PADDED = torch.arange(5)[None] >= torch.tensor([[5], [3]])


class Called(nn.Module):
    """A layer and how it is called."""

    def __init__(self, layer: nn.Module, call: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.layer, x)


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    made = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, **options)
    for weight in made.parameters():
        nn.init.normal_(weight, std=0.5)
    return made


def attention() -> nn.Module:
    torch.manual_seed(0)
    made = nn.MultiheadAttention(8, 2, batch_first=True)
    nn.init.normal_(made.in_proj_bias)
    return made


CASES: dict[str, tuple[nn.Module, Callable[[Any, torch.Tensor], torch.Tensor]]] = {
    "layer": (layer(), lambda m, x: m(x)),
    "gelu, norm first": (layer(activation="gelu", norm_first=True, layer_norm_eps=1e-3), lambda m, x: m(x)),
    "causal": (layer(), lambda m, x: m(x, src_mask=LATER)),
    "padded": (layer(), lambda m, x: m(x, src_key_padding_mask=PADDED)),
    "causal and padded": (layer(), lambda m, x: m(x, src_mask=LATER, src_key_padding_mask=PADDED)),
    "attention": (attention(), lambda m, x: m(x, x, x, need_weights=False)[0]),
    "weights": (attention(), lambda m, x: m(x, x, x)[1]),
    "weights of each head": (attention(), lambda m, x: m(x, x, x, average_attn_weights=False)[1]),
    "masked": (attention(), lambda m, x: m(x, x, x, attn_mask=LATER)[0]),
}


@pytest.mark.one_of(9)
@pytest.mark.parametrize("name", CASES)
def test_it_gives_what_torch_gives(name: str) -> None:
    frontend.register()
    module = Called(*CASES[name]).eval()
    with torch.no_grad():
        expected = module(OTHER).numpy()
    model = convert(module, {"x": X}, "trace", "iOS17", "FLOAT32")
    (found,) = run(model, {"x": OTHER.numpy()}).values()
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_encoders_that_leave_padding_out() -> None:
    """torch stores rows without padding. The wrong version: no converter for `_nested_tensor_from_mask`."""
    frontend.register()
    encoder = nn.TransformerEncoder(layer(), 2).eval()

    class Encoder(nn.Module):
        def forward(self, x: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = encoder(x, src_key_padding_mask=padded > 0)
            return made

    module, others = Encoder(), PADDED.flip(0).int()
    module.encoder = encoder
    model = convert(module.eval(), {"x": X, "padded": PADDED.int()}, "trace", "iOS17", "FLOAT32")
    (found,) = run(model, {"x": OTHER.numpy(), "padded": others.numpy()}).values()
    with torch.no_grad():
        expected = module(OTHER, others).numpy()
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
