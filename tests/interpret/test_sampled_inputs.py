"""Inputs that are drawn: what becomes an index is one, and sizes are those that the description allows."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import anesurgery as ane
from anesurgery.interpret import Predictor
from anesurgery.interpret.sampling import sample_inputs
from anesurgery.mil import Program, Var, ct, mb, quiet_host, types

ROWS = 1000
TABLE = np.random.default_rng(0).standard_normal((ROWS, 4)).astype(np.float32)


def cast(ids: Var) -> Var:
    return mb.cast(x=ids, dtype="int32")


PATHS: dict[str, Any] = {
    "cast": cast,
    "reshaped": lambda ids: cast(mb.reshape(x=ids, shape=(8, 1))),
    "rounded": lambda ids: cast(mb.floor(x=ids)),
    "clipped": lambda ids: cast(mb.clip(x=ids, alpha=np.float32(0), beta=np.float32(ROWS - 1))),
    "shifted": lambda ids: cast(mb.sub(x=mb.add(x=ids, y=np.float32(2)), y=np.float32(2))),
    "guarded": lambda ids: mb.select(
        cond=mb.greater_equal(x=cast(ids), y=0), a=cast(ids), b=mb.add(x=cast(ids), y=np.int32(ROWS))
    ),
}


def lookup(path: str, table: Any = TABLE, dtype: Any = types.fp32) -> Program:
    return mb.program(input_specs=[mb.TensorSpec((1, 8), dtype=dtype)], opset_version=ct.target.iOS16)(
        lambda ids: mb.gather(x=table, indices=PATHS[path](ids), axis=0, name="rows")
    )


@pytest.mark.parametrize("path", PATHS)
def test_ids_that_come_as_floats_are_drawn_from_the_rows(path: str) -> None:
    """The wrong version: normal numbers, -2 to 1, so that 990 wrong rows of 1000 pass."""
    ids = sample_inputs(lookup(path))["ids"]
    assert ids.dtype == np.float32
    assert (ids == np.floor(ids)).all()
    assert 0 <= ids.min() < 100 < ids.max() < ROWS
    wrong = TABLE.copy()
    wrong[10:] += 1
    assert ane.compare(lookup(path), lookup(path)).ok
    assert not ane.compare(lookup(path), lookup(path, wrong)).ok


def test_each_call_that_draws_inputs_draws_indices() -> None:
    ids = Predictor(lookup("cast")).sample(3)["ids"]
    assert ids.max() > 100
    (row,) = [r for r in ane.ranges(lookup("cast")).rows if r.name == "rows"]
    assert row.maximum > TABLE[:10].max()


def test_fp16_ids_are_numbers_that_fp16_tells_apart() -> None:
    large = np.zeros((5000, 2), np.float32)
    ids = sample_inputs(lookup("cast", large, types.fp16))["ids"]
    assert ids.dtype == np.float16
    assert 100 < ids.max() < 2049


def test_floats_that_no_table_reads_are_normal_numbers() -> None:
    program = mb.program(input_specs=[mb.TensorSpec((1, 64))], opset_version=ct.target.iOS16)(
        lambda x: mb.add(x=x, y=mb.gather(x=x, indices=np.array([0] * 64, np.int32), axis=1))
    )

    x = sample_inputs(program)["x"]
    assert x.min() < -1
    assert not (x == np.floor(x)).any()


class Patches(torch.nn.Module):
    """It takes pictures of 48 pixels and more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Conv2d(3, 4, 7, stride=4), torch.nn.Conv2d(4, 4, 9)

    def forward(self, x: torch.Tensor) -> Any:
        """The mean of each channel."""
        return self.second(self.first(x)).mean((2, 3))


SIZES = {
    "enumerated": lambda: ct.EnumeratedShapes([(1, 3, 64, 64), (1, 3, 96, 64)], default=(1, 3, 64, 64)),
    "ranged": lambda: ct.Shape((1, 3, *(ct.RangeDim(48, 128, default=64) for _ in range(2)))),
}


@cache
def converted(sizes: str, kind: str) -> Any:
    traced = torch.jit.trace(Patches().eval(), torch.rand(1, 3, 64, 64))  # type: ignore[no-untyped-call]
    with quiet_host():
        return ct.convert(
            traced,
            inputs=[getattr(ct, kind)(name="x", shape=SIZES[sizes]())],
            minimum_deployment_target=ct.target.iOS16,
            skip_model_load=True,
        )


@pytest.mark.one_of(2)
@pytest.mark.parametrize("kind", ["ImageType", "TensorType"])
@pytest.mark.parametrize("sizes", SIZES)
def test_sizes_are_those_of_the_description(sizes: str, kind: str) -> None:
    """The wrong version: a size of 4 pixels, which the model cannot take."""
    model = converted(sizes, kind)
    assert ane.compare(model, model).ok
    assert ane.compare(model, model, prove=True).ok
    assert ane.ranges(model).samples == 1
