"""Slices that a model writes to: joined before iOS 18; an empty one, and numbers of another dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from closeness import assert_close
from conversion import Function, convert

from anesurgery import frontend
from anesurgery.interpret import run

X = torch.arange(24.0).reshape(2, 3, 4).sin()


@pytest.mark.one_of(2)
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

    module = Function(write)
    model = convert(module, {"x": X}, how, "iOS17", "FLOAT32")
    kinds = {op.op_type for op in model._mil_program.functions["main"].operations}
    assert "concat" in kinds
    assert not kinds & {"scatter", "scatter_nd"}
    (found,) = run(model, {"x": -X.numpy()}).values()
    assert_close(found, write(-X).numpy(), rtol=1e-6)


def empty(x: torch.Tensor) -> torch.Tensor:
    made = x + 1
    made[1, 3:] = made[0, 0]
    return made


def whole_numbers(x: torch.Tensor) -> torch.Tensor:
    made = x + 1
    made[:, 1] = torch.arange(4)
    return made


@pytest.mark.one_of(9)
@pytest.mark.parametrize("target", ["iOS17", "iOS18"])
@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize("write", [empty, whole_numbers])
def test_each_write_agrees_with_torch(
    write: Callable[[torch.Tensor], torch.Tensor], how: str, target: str
) -> None:
    frontend.register()
    model = convert(Function(write), {"x": X}, how, target, "FLOAT32")
    for x in (X, X / 7):
        (found,) = run(model, {"x": x.numpy()}).values()
        assert_close(found, write(x).numpy(), rtol=1e-6)
