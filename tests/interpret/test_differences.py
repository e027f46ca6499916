"""Where Core ML and PyTorch differ: the interpreter gives Core ML's numbers, PyTorch what the table says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch_differences import DIFFERENCES, Difference

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, types

TORCH: dict[str, Callable[[Any], Any]] = {
    "avg_pool, ceil_mode": lambda x: F.avg_pool2d(x, (1, 2), (1, 2), ceil_mode=True),
    "cast to int8": lambda x: x.to(torch.int32).to(torch.int8),
    "cast to uint8": lambda x: x.to(torch.int32).to(torch.uint8),
    "log": torch.log,
    "rsqrt": torch.rsqrt,
    "inverse": torch.reciprocal,
    "mod": lambda x: torch.remainder(x, 3.0),
    "real_div of integers": lambda x: x / 2,
    "upsample_bilinear": lambda x: F.interpolate(x, scale_factor=(1, 2), mode="bilinear", align_corners=False),
    "softplus": lambda x: F.softplus(x, threshold=0.5),
}
"""The function of PyTorch of each row; a cast of what int32 does not hold is the processor's."""


def program(row: Difference) -> Program:
    array = np.asarray(row.x)
    dtype = types.int32 if array.dtype.kind == "i" else types.fp32

    @mb.program(input_specs=[mb.TensorSpec(array.shape, dtype=dtype)], opset_version=ct.target.iOS17)
    def built(x: Var) -> Any:
        more = {k: np.float32(v) if isinstance(v, float) else v for k, v in row.inputs.items()}
        return getattr(mb, row.op)(x=x, **more)

    return built


@pytest.mark.parametrize("row", DIFFERENCES, ids=lambda row: row.name)
def test_the_interpreter_follows_core_ml(row: Difference) -> None:
    array = np.asarray(row.x)
    x = array.astype(np.int32 if array.dtype.kind == "i" else np.float32)
    (got,) = ane.run(program(row), {"x": x}).values()
    np.testing.assert_allclose(got.astype(np.float64).ravel(), row.gives, rtol=1e-5)
    assert not np.allclose(row.gives, row.torch_gives, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("row", [row for row in DIFFERENCES if row.name in TORCH], ids=lambda row: row.name)
def test_pytorch_gives_what_the_table_says(row: Difference) -> None:
    array = np.asarray(row.x)
    x = torch.from_numpy(array.astype(np.int32 if array.dtype.kind == "i" else np.float32))
    np.testing.assert_allclose(TORCH[row.name](x).double().numpy().ravel(), row.torch_gives, rtol=1e-5)


def test_the_page_has_every_row() -> None:
    page = (Path(__file__).parents[2] / "docs" / "interpreter.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", page, re.MULTILINE)
    found = {cells[0]: cells for cells in rows}
    for row in DIFFERENCES:
        source = row.source if row.decided else f"{row.source}, so still open"
        assert found[row.name][1:] == (row.core_ml, row.torch, source)


def ones(kernel: int, stride: int, size: int, pad: tuple[int, int], exclude: bool) -> Any:
    @mb.program(input_specs=[mb.TensorSpec((1, 1, size))], opset_version=ct.target.iOS16)
    def built(x: Var) -> Any:
        return mb.avg_pool(
            x=x,
            kernel_sizes=[kernel],
            strides=[stride],
            pad_type="custom",
            pad=list(pad),
            exclude_padding_from_average=exclude,
            ceil_mode=True,
        )

    (value,) = ane.run(built, {"x": np.ones((1, 1, size), np.float32)}).values()
    return value.ravel().tolist()


@pytest.mark.parametrize(
    ("kernel", "stride", "size", "pad", "included"),
    [
        (2, 2, 3, (0, 0), [1, 1 / 2]),
        (3, 2, 6, (0, 0), [1, 1, 2 / 3]),
        (3, 3, 7, (0, 0), [1, 1, 1 / 3]),
        (3, 2, 4, (1, 1), [2 / 3, 1, 1 / 3]),
        (2, 2, 4, (0, 0), [1, 1]),
    ],
)
def test_the_last_window_of_a_mean(
    kernel: int, stride: int, size: int, pad: tuple[int, int], included: list[float]
) -> None:
    assert ones(kernel, stride, size, pad, False) == pytest.approx(included)
    assert ones(kernel, stride, size, pad, True) == pytest.approx([1.0] * len(included))


@pytest.mark.usefixtures("hosts_own_converters")
def test_a_pool_of_torch_is_found_to_differ() -> None:
    """The model of the report, as coremltools converts it: the module is blamed, and not the one behind it."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool = torch.nn.AvgPool2d(2, 2, ceil_mode=True)
            self.tail = torch.nn.Conv2d(3, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tail(self.pool(x))

    torch.manual_seed(0)
    net, x = Net().eval(), torch.rand(1, 3, 7, 7) + 1
    traced = torch.jit.trace(net, x)  # type: ignore[no-untyped-call]
    model = ct.convert(
        traced,
        inputs=[ct.TensorType("x", x.shape)],
        convert_to="milinternal",
        minimum_deployment_target=ct.target.iOS16,
    )
    found = ane.against_torch(net, model, {"x": x.numpy()})
    assert found.first is not None
    assert found.first.name == "pool"
