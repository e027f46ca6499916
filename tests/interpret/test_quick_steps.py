"""What runs often gives the bits of its first run, and says what is wrong in the same words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from anesurgery.errors import InterpretError
from anesurgery.interpret import Executable, attentions, steps
from anesurgery.interpret.core import OFTEN
from anesurgery.interpret.table import TABLE, Implementation
from anesurgery.mil import ct, mb, types


def program(half: bool) -> Any:
    """Products, moves, sums, a list of values with a constant, and attention with a mask."""
    kind, dtype = (types.fp16, np.float16) if half else (types.fp32, np.float32)
    draw = np.random.default_rng(0)
    weight, bias = (draw.standard_normal(s).astype(dtype) for s in ((8, 8), (8,)))
    wide = draw.standard_normal((300, 300)).astype(dtype)
    mask = np.where(np.arange(6)[None, :] <= np.arange(4)[:, None], 0, -np.inf).astype(dtype)

    @mb.program(
        input_specs=[mb.TensorSpec((1, 4, 8), kind), mb.TensorSpec((300, 300), kind)],
        opset_version=ct.target.iOS18,
    )
    def made(x: Any, y: Any) -> Any:
        a = mb.linear(x=x, weight=weight, bias=bias)
        b = mb.mul(x=mb.silu(x=a), y=dtype(0.7))
        heads = mb.transpose(x=mb.reshape(x=b, shape=[1, 4, 2, 4]), perm=[0, 2, 1, 3])
        keys = mb.concat(values=[heads, draw.standard_normal((1, 2, 2, 4)).astype(dtype)], axis=2)
        scores = mb.add(x=mb.matmul(x=heads, y=keys, transpose_y=True), y=mask)
        seen = mb.matmul(x=mb.softmax(x=scores), y=keys)
        first = mb.slice_by_index(x=seen, begin=[0, 0, 1, 0], end=[1, 2, 3, 4])
        last = mb.slice_by_index(x=seen, begin=[0, 1, 0, 3], end=[1, 2, 4, 0], stride=[1, 1, 2, -1])
        turned = mb.reduce_mean(x=mb.transpose(x=seen, perm=[3, 1, 0, 2]), axes=[0], keep_dims=True)
        return first, last, turned, mb.squeeze(x=mb.expand_dims(x=a, axes=[0])), mb.linear(x=y, weight=wide)

    return made


def values() -> dict[str, Any]:
    """Inputs of that program."""
    draw = np.random.default_rng(1)
    return {n: draw.standard_normal(s).astype(np.float32) for n, s in (("x", (1, 4, 8)), ("y", (300, 300)))}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "ane"])
def test_every_run_gives_the_bits_of_the_first(half: bool, precision: str) -> None:
    executable = Executable(program(half), precision=precision)
    first = executable(values())
    for _ in range(OFTEN + 2):
        again = executable(values())
        for name, array in first.items():
            np.testing.assert_array_equal(again[name], array)
    bound = executable.plan.bound_steps
    assert bound is not None
    assert sum(b is not None for b in bound) > len(bound) / 2


def test_a_wrong_shortcut_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = steps._bind_view
    monkeypatch.setattr(
        steps,
        "_bind_view",
        lambda step, fixed: (
            (lambda env: torch.zeros(step.op.outputs[0].shape))
            if step.op.op_type == "transpose"
            else right(step, fixed)
        ),
    )
    with pytest.raises(AssertionError):
        test_every_run_gives_the_bits_of_the_first(False, "fp32")


def test_a_meaning_that_a_user_gives_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLE, "mul", Implementation(lambda x, y: x * y + 1, False))
    monkeypatch.setitem(TABLE, "transpose", Implementation(lambda x, perm: x.permute(perm) * 2, True))
    test_every_run_gives_the_bits_of_the_first(False, "fp32")


def test_an_error_is_told_as_in_the_first_run() -> None:
    @mb.program(input_specs=[mb.TensorSpec((1,), types.int32), mb.TensorSpec((1, 4, 8), types.fp32)])
    def made(shape: Any, x: Any) -> Any:
        return mb.reshape(x=x, shape=mb.concat(values=[shape, np.array([8], np.int32)], axis=0), name="bent")

    executable, x = Executable(made), np.ones((1, 4, 8), np.float32)
    for _ in range(OFTEN + 2):
        assert executable({"shape": np.array([4], np.int32), "x": x})["bent"].shape == (4, 8)
    with pytest.raises(InterpretError, match="op bent failed"):
        executable({"shape": np.array([3], np.int32), "x": x})


@pytest.mark.parametrize("spoilt", [np.nan, np.inf])
def test_hidden_keys_are_left_out_only_where_they_are_finite(spoilt: float) -> None:
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, n, 4, generator=draw) for n in (3, 6, 6))
    mask = torch.where(torch.arange(6) < 4, 0.0, -torch.inf).expand(3, 6)
    whole = torch.softmax(query @ key.transpose(-1, -2) + mask, -1) @ value
    torch.testing.assert_close(attentions.attend(query, key, value, mask, key_is_transposed=True), whole)
    shorter = attentions.attend(
        query, key[..., :4, :], value[..., :4, :], mask[..., :4], key_is_transposed=True
    )
    assert torch.equal(attentions.attend(query, key, value, mask, key_is_transposed=True), shorter)
    value[0, 0, 5, 0] = spoilt  # 0 times this is NaN
    assert attentions.attend(query, key, value, mask, key_is_transposed=True)[0, 0].isnan().any()
    hidden = torch.full((3, 6), -torch.inf)
    assert attentions.attend(query, key, key, hidden, key_is_transposed=True).isnan().all()
    unknown = torch.where(torch.arange(6) < 5, 0.0, torch.nan).expand(3, 6)
    assert attentions.attend(query, key, key, unknown, key_is_transposed=True).isnan().all()
