"""The arithmetic of fp64: ops keep fp64, and operands that are off show what flows through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close

from anesurgery.interpret import Evaluator
from anesurgery.interpret.arithmetic.precision import Double
from anesurgery.mil import Program, Var, mb

W = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
THIRD = np.float32(1 / 3)
BODIES: dict[str, Callable[[Var], Any]] = {
    "linear": lambda x: mb.linear(x=x, weight=W),
    "matmul": lambda x: mb.matmul(x=x, y=W),
    "conv": lambda x: mb.conv(x=x, weight=W[..., None]),
    "softmax": lambda x: mb.softmax(x=x, axis=-1),
    "layer_norm": lambda x: mb.layer_norm(x=x, axes=[-1], epsilon=1e-5),
    "reduce_mean": lambda x: mb.reduce_mean(x=x, axes=[-1]),
    "gelu": lambda x: mb.gelu(x=x, mode="EXACT"),
    "tanh": lambda x: mb.tanh(x=x),
    "exp": lambda x: mb.exp(x=x),
    "cast": lambda x: mb.cast(x=mb.mul(x=x, y=THIRD), dtype="fp32"),
    "concat": lambda x: mb.concat(values=[mb.mul(x=x, y=THIRD), x], axis=0),
}


def value(body: Callable[[Var], Any], arithmetic: Any) -> torch.Tensor:
    program: Program = mb.program(input_specs=[mb.TensorSpec((1, 4, 4))])(body)
    function = program.functions["main"]
    (x,) = function.inputs.values()
    numbers = torch.from_numpy(np.random.default_rng(1).standard_normal((1, 4, 4)).astype(np.float32))
    return Evaluator(list(function.operations), function.outputs, arithmetic)({x: numbers})[0]


@pytest.mark.parametrize("name", BODIES)
def test_ops_keep_fp64(name: str) -> None:
    single, double = value(BODIES[name], "fp32"), value(BODIES[name], Double())
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
    assert_close(single, double, rtol=1e-5)
    assert not torch.equal(double, double.float().double()), "rounded to fp32 on the way"


def test_operands_that_are_off_show_what_flows_through() -> None:
    def cancelling(x: Var) -> Any:
        return mb.sub(x=mb.add(x=x, y=np.float32(1e4)), y=np.float32(1e4))

    moved = (value(cancelling, Double(1e-5)) - value(cancelling, Double())).abs().max()
    assert 0.05 < float(moved) < 1  # 1e-5 of 1e4, some times
