"""Where the interpreter computes: the processor, or a GPU where torch has one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from anesurgery.errors import InterpretError
from anesurgery.interpret import Predictor, core, run
from anesurgery.mil import Program, Var, ct, mb, types

RNG = np.random.default_rng(0)


def program() -> Program:
    """Constants, an index, a loop, a mask: whatever makes tensors of its own."""

    @mb.program(
        input_specs=[mb.TensorSpec((2, 3, 8)), mb.TensorSpec((4,), dtype=types.int32)],
        opset_version=ct.target.iOS17,
    )
    def made(x: Var, ids: Var) -> Any:
        weight = RNG.standard_normal((8, 8)).astype(np.float32)
        y = mb.linear(x=x, weight=weight, bias=weight[0])
        rows = mb.gather(x=weight, indices=ids, axis=0)
        steps = mb.range_1d(start=0, end=8, step=1)
        mask = mb.cast(x=mb.less(x=steps, y=5), dtype="fp32")

        def more(i: Var, total: Var) -> Var:
            return mb.less(x=i, y=3)

        def body(i: Var, total: Var) -> tuple[Var, Var]:
            return mb.add(x=i, y=1), mb.add(x=total, y=mb.mul(x=y, y=mask))

        _, total = mb.while_loop(_cond=more, _body=body, loop_vars=(np.int32(0), y))
        return mb.softmax(x=total, axis=-1, name="a"), mb.gelu(x=rows, name="b")

    return made


def test_a_device_that_torch_lacks_is_refused() -> None:
    values = {"x": np.zeros((2, 3, 8)), "ids": np.zeros(4, np.int32)}
    with pytest.raises(InterpretError, match="device='gpu' cannot be used .*leave it out"):
        run(program(), values, device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(InterpretError, match="device='cuda' cannot be used"):
            run(program(), values, device="cuda")


def test_the_processor_needs_no_moves() -> None:
    tensor = torch.ones(2)
    assert core.move(tensor, "cpu") is tensor
    assert core.move("text", "cuda") == "text"


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here")


@pytest.mark.parametrize("precision", ["fp32", "fp16", "ane", "ane:M1"])
@pytest.mark.parametrize("device", ["cpu:0", pytest.param("cuda", marks=GPU)])
def test_another_device_gives_the_same_numbers(precision: str, device: str) -> None:
    model = program()
    values = {"x": RNG.standard_normal((2, 3, 8)), "ids": np.array([0, 7, 3, 3], np.int32)}
    expected = Predictor(model, precision=precision)(values)
    found = Predictor(model, precision=precision, device=device)(values)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-3 if "f" not in precision else 1e-5, atol=1e-5)
