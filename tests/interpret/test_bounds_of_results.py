"""What an op makes of little is bounded, a tile repeats at least once, ids of any type lie in their table."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anesurgery as ane
from anesurgery.errors import InterpretError, SurgeryError
from anesurgery.files import arrays, protobuf
from anesurgery.interpret import table
from anesurgery.mil import Program, Var, ct, mb, types

INTS = types.int32


def fill() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2,), dtype=INTS)], opset_version=ct.target.iOS17)(
        lambda n: mb.fill(shape=n, value=1.0, name="y")
    )


def tile() -> Program:
    return mb.program(
        input_specs=[mb.TensorSpec((1, 3)), mb.TensorSpec((2,), dtype=INTS)], opset_version=ct.target.iOS17
    )(lambda x, n: mb.tile(x=x, reps=n, name="y"))


def counted() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((1,), dtype=INTS)], opset_version=ct.target.iOS17)(
        lambda n: mb.range_1d(start=0, end=mb.squeeze(x=n), step=1, name="y")
    )


ROW = np.ones((1, 3), np.float32)
LARGE: dict[str, tuple[Program, dict[str, Any], str]] = {
    "fill": (fill(), {"n": np.array([100_000, 25_000], np.int32)}, "10,000,000,000 bytes"),
    "tile": (tile(), {"x": ROW, "n": np.array([100_000, 10_000], np.int32)}, "12,000,000,000 bytes"),
    "range_1d": (counted(), {"n": np.array([2_000_000_000], np.int32)}, "8,000,000,000 bytes"),
}


@pytest.mark.parametrize("op_type", LARGE)
def test_a_result_of_ten_gigabytes_is_an_error_in_words(op_type: str) -> None:
    program, values, words = LARGE[op_type]
    with pytest.raises(
        InterpretError, match=f"op y failed: its result of the shape .* takes {words}, more than"
    ):
        ane.run(program, values)


def test_what_is_not_too_large_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "LARGEST_RESULT", 24)
    (made,) = ane.run(fill(), {"n": np.array([2, 3], np.int32)}).values()
    np.testing.assert_array_equal(made, np.ones((2, 3)))
    with pytest.raises(InterpretError, match="takes 28 bytes, more than 24"):
        ane.run(fill(), {"n": np.array([1, 7], np.int32)})


def test_a_large_fill_is_not_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @mb.program(input_specs=[mb.TensorSpec((200, 3))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        ones = mb.fill(shape=[200, 3], value=1.0, name="ones")
        return mb.add(x=x, y=mb.exp(x=ones), name="y")

    path = ane.save(ane.load(program), tmp_path / "m.mlpackage")
    monkeypatch.setattr(protobuf, "LARGEST_VALUE", 399)
    monkeypatch.setattr(table, "LARGEST_RESULT", 399)
    surgery = ane.apply(path, "fold_constants", quiet=True)
    assert not surgery.changes
    assert any(
        "not computed: op ones failed: its result of the shape [200, 3]" in str(r) for _, r in surgery.refusals
    )


def test_a_tile_without_copies_is_empty() -> None:
    """`x[mask] = 0` asks for it where the mask keeps nothing."""
    assert ane.run(tile(), {"x": ROW, "n": np.array([0, 1], np.int32)})["y"].shape == (0, 3)


@pytest.mark.parametrize("reps", [[1, 0], [2, -1]])
def test_a_tile_that_repeats_less_than_once_is_an_error_in_words(reps: list[int]) -> None:
    with pytest.raises(InterpretError, match="op y failed: reps is .*, and each must be 1 or more") as caught:
        ane.run(tile(), {"x": ROW, "n": np.array(reps, np.int32)})
    assert str(reps) in str(caught.value)
    assert "an expand with -1: convert it again" in str(caught.value)


class Expanding(torch.nn.Module):
    """A style for each frame: `expand(n, 1, -1)`, whose last length stays."""

    def forward(self, x: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
        return x + style.expand(x.shape[1], 1, -1).transpose(0, 1)


def test_an_expand_to_a_computed_shape_with_minus_one_converts_rightly() -> None:
    examples = {"x": torch.randn(1, 5, 8), "style": torch.randn(1, 8)}
    graph = torch.jit.trace(Expanding(), tuple(examples.values()))  # type: ignore[no-untyped-call]
    model = ct.convert(
        graph,
        inputs=[ct.TensorType("x", (1, ct.RangeDim(2, 50, 5), 8)), ct.TensorType("style", (1, 8))],
        minimum_deployment_target=ct.target.iOS17,
        compute_precision=ct.precision.FLOAT32,
        skip_model_load=True,
    )
    longer = torch.randn(1, 7, 8)
    (found,) = ane.run(model, {"x": longer.numpy(), "style": examples["style"].numpy()}).values()
    np.testing.assert_array_equal(found, Expanding()(longer, examples["style"]).numpy())


@pytest.mark.parametrize("kind", [np.int32, np.float32, np.float16])
@pytest.mark.parametrize("use", [ane.run, lambda model, values: ane.Predictor(model)(values)])
def test_ids_of_any_type_outside_their_table_are_an_error(kind: Any, use: Any) -> None:
    mil_kind = types.numpy_type_to_builtin_type(kind)

    @mb.program(input_specs=[mb.TensorSpec((1, 3), dtype=mil_kind)], opset_version=ct.target.iOS17)
    def program(ids: Var) -> Var:
        whole = ids if kind is np.int32 else mb.cast(x=ids, dtype="int32")
        return mb.gather(x=np.arange(16, dtype=np.float32).reshape(8, 2), indices=whole, axis=0, name="y")

    (rows,) = use(program, {"ids": np.array([[0, 7, 2]], kind)}).values()
    np.testing.assert_array_equal(rows[0, :, 0], [0, 14, 4])
    for wrong in (8, -9):
        with pytest.raises(
            InterpretError, match=f"ids holds {wrong}, and indexes a table of 8 rows; give ids from 0"
        ):
            use(program, {"ids": np.array([[0, wrong, 2]], kind)})


def test_an_archive_whose_member_is_too_large_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "values.npz"
    np.savez_compressed(path, small=np.zeros(4), large=np.zeros(100_000))
    assert path.stat().st_size < 10_000
    assert set(arrays.read(path)) == {"small", "large"}
    monkeypatch.setattr(arrays, "LARGEST_ARRAY", 100_000)
    monkeypatch.setattr(zipfile.ZipFile, "open", None)  # nothing is unpacked
    with pytest.raises(SurgeryError, match=r"its member large.npy has 800,128 bytes, more than 100,000"):
        arrays.read(path)
