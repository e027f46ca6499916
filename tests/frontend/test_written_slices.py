"""Slices that a model writes to: joined, unless a cache; an empty one, and numbers of another dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from closeness import assert_close
from conversion import Function, convert

from anesurgery import frontend
from anesurgery.interpret import run

X = torch.arange(24.0).reshape(2, 3, 4).sin()


@pytest.mark.one_of(3)
@pytest.mark.parametrize(("how", "target"), [("trace", "iOS17"), ("export", "iOS17"), ("trace", "iOS18")])
def test_slices_that_are_written_are_joined_and_not_scattered(how: str, target: str) -> None:
    """A wrong order of the parts, or a slice too short, would not agree."""
    frontend.register()

    def write(x: torch.Tensor) -> torch.Tensor:
        y = x.new_zeros(2, 4, 4)
        y[:, :-1, 1:3] = x[..., :2]
        y[:, -1, 2:] = x[:, 0, 1:3] * 2
        y[1, 1:3] = 7.0
        return y

    module = Function(write)
    model = convert(module, {"x": X}, how, target, "FLOAT32")
    kinds = {op.op_type for op in model._mil_program.functions["main"].operations}
    assert "concat" in kinds
    assert not kinds & {"scatter", "scatter_nd", "slice_update"}
    (found,) = run(model, {"x": -X.numpy()}).values()
    assert_close(found, write(-X).numpy(), rtol=1e-6)


def test_a_cache_is_updated_from_ios_18_on() -> None:
    """An input that is written twice: it may become a state, whose updates the Neural Engine takes."""
    frontend.register()

    def write(cache: torch.Tensor) -> torch.Tensor:
        cache[:, :1] = 7.0
        cache[:, 1:] = cache[:, :1] * 2
        return cache

    model = convert(Function(write), {"cache": X.clone()}, "trace", "iOS18", "FLOAT16")
    kinds = [op.op_type for op in model._mil_program.functions["main"].operations]
    assert kinds.count("slice_update") == 2


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
