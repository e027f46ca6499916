"""Recurrent layers, which torch.export writes in a form of their own."""

from __future__ import annotations

import pytest
import torch
from closeness import assert_close
from conversion import convert

from anesurgery import frontend
from anesurgery.interpret import run

X = torch.arange(24.0).reshape(2, 3, 4).sin()
KINDS = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn": torch.nn.RNN}


class All(torch.nn.Sequential):
    """Each layer on the same input: what it gives, and its last states."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = []
        for layer in self:
            made, last = layer(x)
            parts += [made.flatten(), (last[1] if isinstance(layer, torch.nn.LSTM) else last).flatten()]
        return torch.cat(parts)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize("kind", ["lstm", "rnn", pytest.param("gru", marks=pytest.mark.slow)])
def test_outputs_and_last_states(kind: str, how: str) -> None:
    """Both directions where coremltools has them, and the last states; names of two layers must not meet."""
    frontend.register()
    torch.manual_seed(0)
    count = 2 if kind == "lstm" else 1
    layers = [KINDS[kind](4, 5, bidirectional=kind != "rnn", batch_first=True) for _ in range(count)]
    module = All(*layers).eval()
    model = convert(module, {"x": X}, how, "iOS17", "FLOAT32")
    (found,) = run(model, {"x": -X.numpy()}).values()
    with torch.no_grad():
        assert_close(found, module(-X).numpy(), rtol=1e-5)


class Stepped(torch.nn.Module):
    """A step of several layers, whose states go into the next step."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x[:, :1], x[:, 1:2]
        state = tuple(torch.stack([part, part]) for part in (x[:, 2, :3], x[:, 0, :3]))
        made, state = self.layer(first, state)
        again, state = self.layer(second, state)
        return torch.cat([made.flatten(), again.flatten(), *(s.flatten() for s in state)])


@pytest.mark.parametrize("how", ["trace", "export"])
def test_states_of_two_layers_go_into_the_next_step(how: str) -> None:
    """The wrong version: "Cannot delete op", by the host's pass for stacks that are split."""
    frontend.register()
    torch.manual_seed(0)
    module = Stepped(torch.nn.LSTM(4, 3, 2, batch_first=True)).eval()
    model = convert(module, {"x": X}, how, "iOS17", "FLOAT32")
    (found,) = run(model, {"x": -X.numpy()}).values()
    with torch.no_grad():
        assert_close(found, module(-X).numpy(), rtol=1e-5)
