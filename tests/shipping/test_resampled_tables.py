"""Positions that are interpolated to each size are computed from one table where storing them costs much."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anesurgery as ane
from anesurgery.checking.exactness import nearness
from anesurgery.frontend.resampling import Resampled
from anesurgery.mil import Program, ct, mb, types
from anesurgery.shipping.position_tables import compute_tables
from anesurgery.shipping.several_sizes import SizedModel

SHAPES = [(1, 3, 8, 12), (1, 3, 16, 16), (1, 3, 24, 20)]


class Pictures(nn.Module):
    """Patches of 4 and a class token, whose positions are interpolated; or, of channels first, none."""

    def __init__(self, wide: int, first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.places = first, nn.Parameter(torch.randn(1, 17, 16))
        self.patches, self.out = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, wide)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patches(x)
        grid = self.places[:, 1:].reshape(1, 4, 4, 16).permute(0, 3, 1, 2)
        grid = nn.functional.interpolate(grid, size=y.shape[-2:], mode="bicubic", align_corners=False)
        if self.first:
            return self.out((y + grid).flatten(2).transpose(1, 2))
        whole = torch.cat([self.places[:, :1], grid.permute(0, 2, 3, 1).reshape(1, -1, 16)], 1)
        tokens = torch.cat([torch.zeros(1, 1, 16), y.flatten(2).transpose(1, 2)], 1)
        return self.out(tokens + whole)


def stored(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("weight.bin"))


@pytest.mark.one_of(2)
@pytest.mark.parametrize("first", [False, True])
def test_small_models_compute_their_positions(first: bool, tmp_path: Path) -> None:
    module = Pictures(24, first).eval()
    sized = ane.sizes(module, {"x": SHAPES})
    assert len(sized.computed) == 3
    assert sum("bit for bit" in words for words in sized.computed) == 1  # at 16 x 16 nothing is resampled
    assert all(words in str(sized) for words in sized.computed)
    folder = sized.save(tmp_path / "sized")
    for shape in SHAPES:
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        one = next(iter(ane.sizes(module, {"x": [shape]}).models.values()))
        expected = ane.run(one, {"x": x}, precision="fp16")
        assert nearness(expected, ane.run(folder, {"x": x}, precision="fp16")) > 72


def test_large_models_store_them() -> None:
    sized = ane.sizes(Pictures(4000, False).eval(), {"x": SHAPES})
    assert isinstance(sized, SizedModel)
    assert sized.computed == ()


SOURCE = np.random.default_rng(0).standard_normal((1, 8, 4, 4)).astype(np.float32)
ROWS = np.kron(np.eye(4), np.ones((2, 1)))


def added(table: np.ndarray) -> Program:
    return mb.program(
        input_specs=[mb.TensorSpec(table.shape, dtype=types.fp32)], opset_version=ct.target.iOS17
    )(lambda x: mb.add(x=x, y=table, name="y"))


@pytest.mark.parametrize("wrong", ["", "matrix", "table"])
def test_a_table_that_is_not_what_was_resampled_stays(wrong: str) -> None:
    """Neither numbers that differ by a bit are taken for it, nor a matrix that gives others."""
    whole = ROWS @ SOURCE @ ROWS.T
    matrix = ROWS[::-1].copy() if wrong == "matrix" else ROWS
    tables = {"small": SOURCE, "large": whole.astype(np.float32)}
    seen = {
        "small": [Resampled(SOURCE, np.eye(4), np.eye(4), SOURCE)],
        "large": [Resampled(SOURCE, matrix, ROWS, tables["large"].copy())],
    }
    if wrong == "table":
        tables["large"][0, 0, 0, 0] = np.nextafter(tables["large"][0, 0, 0, 0], np.float32(9))
    functions = {name: added(table).functions["main"] for name, table in tables.items()}
    said = compute_tables(functions, seen)
    computes = {name: any(op.op_type == "matmul" for op in f.operations) for name, f in functions.items()}
    assert computes == {"small": False, "large": not wrong}
    assert any("large" in words for words in said) == (not wrong)
