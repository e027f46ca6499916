"""Windows, repeats, recurrent layers and assertions: each conversion against torch, on another input too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from closeness import assert_close
from conversion import convert

from anesurgery import frontend
from anesurgery.interpret import run

pytestmark = pytest.mark.first

X = torch.arange(24.0).reshape(2, 3, 4).sin()
KINDS = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn": torch.nn.RNN}


class Module(torch.nn.Module):
    """A function, and a layer that it may call."""

    def __init__(self, function: Callable[..., torch.Tensor], layer: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x) if self.layer is None else self.function(x, self.layer)


def long(x: torch.Tensor) -> torch.Tensor:
    """More windows than are sliced one by one."""
    return torch.cat([x.flatten()] * 4).unfold(0, 5, 1)


CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "unfold_shared": lambda x: x.unfold(2, 2, 1),
    "unfold_apart": lambda x: x.unfold(-1, 1, 2),
    "unfold_uneven": lambda x: x.flatten().unfold(0, 7, 3),
    "unfold_middle": lambda x: x.unfold(1, 2, 1),
    "unfold_twice": lambda x: x.unfold(1, 2, 1).unfold(2, 3, 1),
    "unfold_many": long,
    "strided_windows": lambda x: (x + 0).as_strided((2, 5, 4), (12, 2, 1)),
    "strided_turned": lambda x: (x + 0).transpose(0, 2).as_strided((2, 3, 3), (2, 4, 1)),
    "strided_diagonal": lambda x: (x + 0).as_strided((3, 2), (5, 1)),
    "strided_every_third": lambda x: (x + 0).as_strided((2, 1, 4), (12, 7, 3)),
    "repeat_by_size": lambda x: x.repeat_interleave(4 // x.shape[0], dim=0),
    "repeat_last": lambda x: x.repeat_interleave(3, dim=-1),
    "repeat_flat": lambda x: x.repeat_interleave(2),
    "repeat_uneven": lambda x: x.repeat_interleave(torch.tensor([1, 0, 2]), dim=1),
    "flip_known": lambda x: x + torch.tril(x.new_ones(3, 4)).flip(dims=[0]).to(torch.float32),
}


@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize("name", CASES)
def test_each_conversion_agrees_with_torch(name: str, how: str) -> None:
    frontend.register()
    module = Module(CASES[name])
    model = convert(module, {"x": X}, how, "iOS17", "FLOAT32")
    for x in (X, X.flip(0, 1, 2) * 2):
        (found,) = run(model, {"x": x.numpy()}).values()
        assert_close(found, module(x).numpy(), rtol=1e-6)


@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize("kind", ["lstm", "rnn", pytest.param("gru", marks=pytest.mark.slow)])
def test_recurrent_layers(kind: str, how: str) -> None:
    """Both directions where coremltools has them, and the last states; names of two layers must not meet."""
    frontend.register()
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(
        [
            KINDS[kind](4, 5, bidirectional=kind != "rnn", batch_first=True)
            for _ in range(2 if kind == "lstm" else 1)
        ]
    )

    def call(x: torch.Tensor, layers: Any) -> torch.Tensor:
        parts = []
        for layer in layers:
            made, last = layer(x)
            parts += [made.flatten(), (last[1] if kind == "lstm" else last).flatten()]
        return torch.cat(parts)

    module = Module(call, layers).eval()
    model = convert(module, {"x": X}, how, "iOS17", "FLOAT32")
    (found,) = run(model, {"x": -X.numpy()}).values()
    with torch.no_grad():
        assert_close(found, module(-X).numpy(), rtol=1e-5)


@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            lambda x: x[:, 1:].as_strided((2, 2), (12, 1)),
            "a view of a part|lies in memory in a way that is not known",
        ),
        (lambda x: (x + 0).as_strided((2, 2), (1, 1), 3), "lies in memory in a way that is not known"),
        (lambda x: (x + 0).as_strided((3, 2), (0, 1)), r"as_strided to size \[3, 2\] with strides \[0, 1\]"),
    ],
)
def test_what_is_not_covered_is_refused(function: Callable[..., Any], said: str, how: str) -> None:
    frontend.register()
    with pytest.raises(NotImplementedError, match=said):
        convert(Module(function), {"x": X}, how, "iOS17", "FLOAT32")


def test_a_branch_on_data_that_draft_export_takes() -> None:
    """Its assertions are dropped; which branch was taken is that of the example, as in a trace."""
    frontend.register()

    def branch(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if (x > 5).any().item() else x - 1

    model = convert(Module(branch), {"x": X}, "draft_export", "iOS17", "FLOAT32")
    (found,) = run(model, {"x": X.numpy()}).values()
    assert_close(found, branch(X).numpy(), rtol=1e-6)


@pytest.mark.parametrize("how", ["trace", "export"])
def test_slices_that_are_written_are_joined_and_not_scattered(how: str) -> None:
    """Before iOS 18; a wrong order of the parts, or a slice too short, would not agree."""
    frontend.register()

    def write(x: torch.Tensor) -> torch.Tensor:
        y = x.new_zeros(2, 4, 4)
        y[:, :-1, 1:3] = x[..., :2]
        y[:, -1, 2:] = x[:, 0, 1:3] * 2
        y[1, 1:3] = 7.0
        return y

    module = Module(write)
    model = convert(module, {"x": X}, how, "iOS17", "FLOAT32")
    kinds = {op.op_type for op in model._mil_program.functions["main"].operations}
    assert "concat" in kinds
    assert not kinds & {"scatter", "scatter_nd"}
    (found,) = run(model, {"x": -X.numpy()}).values()
    assert_close(found, write(-X).numpy(), rtol=1e-6)
