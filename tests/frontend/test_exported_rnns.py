"""Recurrent layers: torch.export writes them in a form of its own, and packed rows end at their lengths."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from closeness import assert_close
from conversion import convert
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

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
    """Both directions, and the last states; names of two layers must not meet."""
    frontend.register()
    torch.manual_seed(0)
    layers = [KINDS[kind](4, 5, bidirectional=True, batch_first=True)]
    layers += [KINDS[kind](4, 5, 2, bidirectional=True)] if kind != "gru" else []
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


class Lengths(torch.nn.Module):
    """A layer on rows of several lengths: what it gives, padded, and its last states."""

    def __init__(self, layer: torch.nn.RNNBase, number: float, *, with_first: bool) -> None:
        super().__init__()
        self.number, self.with_first = number, with_first
        self.layer: torch.nn.RNNBase = layer

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = self.layer.batch_first
        rows = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=False)
        shape = (self.layer.num_layers * (1 + self.layer.bidirectional), 3, 5)
        state = torch.full(shape, 0.3)
        is_lstm = isinstance(self.layer, torch.nn.LSTM)
        made, last = self.layer(rows, ((state, 2 * state) if is_lstm else state) if self.with_first else None)
        padded, _ = pad_packed_sequence(made, batch_first=first, total_length=4, padding_value=self.number)
        return (padded, *(last if is_lstm else (last,)))


PACKED: dict[str, Callable[[], Lengths]] = {
    "lstm": lambda: Lengths(torch.nn.LSTM(4, 5, 2, batch_first=True), 0.0, with_first=True),
    "lstm_both": lambda: Lengths(torch.nn.LSTM(4, 5, 2, bidirectional=True), -1.0, with_first=False),
    "gru": lambda: Lengths(torch.nn.GRU(4, 5, bidirectional=True, bias=False), 0.0, with_first=True),
    "rnn": lambda: Lengths(torch.nn.RNN(4, 5, 2, batch_first=True), 0.5, with_first=True),
    "relu": lambda: Lengths(torch.nn.RNN(4, 5, nonlinearity="relu"), 0.0, with_first=False),
}


@pytest.mark.parametrize("kind", PACKED)
def test_packed_rows_end_at_their_lengths(kind: str) -> None:
    """The wrong versions: an LSTM that reads the padding, and "'list' object has no attribute 'val'"."""
    frontend.register()
    torch.manual_seed(0)
    module = PACKED[kind]().eval()
    x = torch.randn((3, 4, 4))
    examples = {"x": x if module.layer.batch_first else x.transpose(0, 1), "lengths": torch.tensor([4, 4, 4])}
    model = convert(module, examples, "trace", "iOS17", "FLOAT32")
    for lengths in ([4, 2, 1], [1, 4, 3], [2, 2, 2]):
        given = {"x": -examples["x"], "lengths": torch.tensor(lengths)}
        found = run(model, {name: np.asarray(value) for name, value in given.items()}).values()
        with torch.no_grad():
            for value, expected in zip(found, module(**given), strict=True):
                assert_close(value, expected.numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("layer", "words"), [(torch.nn.LSTM, "an LSTM with a first"), (torch.nn.RNN, "a plain")]
)
def test_packed_rows_read_from_their_ends_are_refused(
    layer: Callable[..., torch.nn.RNNBase], words: str
) -> None:
    frontend.register()
    module = Lengths(layer(4, 5, bidirectional=True, batch_first=True), 0.0, with_first=True).eval()
    examples = {"x": torch.randn(3, 4, 4), "lengths": torch.tensor([4, 4, 4])}
    with pytest.raises(NotImplementedError, match=f"packed rows, which {words}"):
        convert(module, examples, "trace", "iOS17", "FLOAT32")
