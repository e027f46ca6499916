"""A package whose weights were not fetched: its graph is looked at, what needs numbers is refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.errors import LoadError
from anesurgery.files.package import placeholder_weight, save
from anesurgery.files.source import not_fetched
from anesurgery.loading import load, load_graph
from anesurgery.mil import Program, Var, ct, mb, types

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 123456\n".format("4d" * 32)
WEIGHTS = Path("Data") / "com.apple.CoreML" / "weights" / "weight.bin"


def attention() -> Program:
    """A table of tokens, a mask and a product, each of which is stored."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((64, 32)).astype(np.float16)
    mask = np.where(np.tril(np.ones((8, 8))) > 0, 0, -1e4).astype(np.float16)

    @mb.program(input_specs=[mb.TensorSpec((8,), dtype=types.int32)], opset_version=ct.target.iOS16)
    def program(ids: Var) -> Any:
        x = mb.gather(x=table, indices=ids, axis=0, name="embedded")
        scores = mb.add(x=mb.matmul(x=x, y=x, transpose_y=True, name="products"), y=mask, name="scores")
        mixed = mb.matmul(x=mb.softmax(x=scores, axis=-1, name="shares"), y=x, name="mixed")
        return mb.linear(x=mixed, weight=table, name="logits")

    return program


@pytest.fixture(params=["pointer", "none"])
def bare(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A package with a pointer in the place of its weights, or with nothing there."""
    package = save(load(attention()), tmp_path / "model.mlpackage")
    (package / WEIGHTS).unlink()
    if request.param == "pointer":
        (package / WEIGHTS).write_text(POINTER)
    return package


def test_the_graph_is_placed_as_with_the_weights(bare: Path, tmp_path: Path) -> None:
    whole = save(load(attention()), tmp_path / "whole.mlpackage")
    with_them, without = (ane.inspect(p, target="M1/macOS 14") for p in (whole, bare))
    placed = [
        [(row.name, row.legal, row.preferred, row.flop) for row in found.ops] for found in (with_them, without)
    ]
    assert placed[0] == placed[1]
    assert str(with_them.time) == str(without.time)


def test_it_says_that_nothing_is_known_of_numbers(bare: Path) -> None:
    found = ane.inspect(bare, target="M1/macOS 14")
    assert "numbers are not checked" in found.notes[0]
    assert not any(f.rule.startswith("num-") for row in found.ops for f in row.findings)


@pytest.mark.parametrize(
    "use",
    [
        lambda model: ane.apply(model, "auto"),
        lambda model: ane.run(model, {"ids": np.zeros(8, np.int32)}),
        lambda model: ane.compare(model, model),
        lambda model: ane.inspect(model, inputs={"ids": np.zeros(8, np.int32)}),
    ],
    ids=["apply", "run", "compare", "inspect with inputs"],
)
def test_what_needs_numbers_is_refused(use: Any, bare: Path) -> None:
    fetched = "lfs pull" if (bare / WEIGHTS).exists() else "copy the package again"
    with pytest.raises(LoadError, match=fetched):
        use(bare)


def test_a_graph_without_weights_is_never_saved(bare: Path, tmp_path: Path) -> None:
    """The wrong way would be a package whose weights are all NaN."""
    loaded = load_graph(bare)
    assert all(
        np.isnan(op.val.val).all()
        for op in loaded.program.functions["main"].find_ops(op_type="const")
        if op.val.val is not None and np.size(op.val.val) > 10
    )
    with pytest.raises(LoadError):
        save(loaded, tmp_path / "wrong.mlpackage")
    assert not (tmp_path / "wrong.mlpackage").exists()


def test_a_specification_that_is_a_pointer_is_named(tmp_path: Path) -> None:
    package = save(load(attention()), tmp_path / "model.mlpackage")
    spec = package / "Data" / "com.apple.CoreML" / "model.mlmodel"
    spec.write_text(POINTER)
    with pytest.raises(LoadError, match="pointer of Git LFS to 123,456 bytes"):
        ane.inspect(package)


def test_only_pointers_are_pointers(tmp_path: Path) -> None:
    file = tmp_path / "weight.bin"
    assert not_fetched(file) is None
    file.write_text(POINTER)
    assert "123,456 bytes" in str(not_fetched(file))
    file.write_text(POINTER.replace("size", "sizes"))
    assert not_fetched(file) is None
    file.write_bytes(np.arange(999, dtype=np.float16).tobytes())
    assert not_fetched(file) is None


def test_stand_ins_take_no_memory_and_are_of_the_type() -> None:
    for element in (types.fp16, types.fp32, types.int32, types.int8, types.bool):
        value = placeholder_weight(element, (6, 1000, 1000))
        assert value.shape == (6, 1000, 1000)
        assert value.dtype == types.nptype_from_builtin(element)
        assert value.strides[1:] == (0, 0)
    assert np.isnan(placeholder_weight(types.fp16, (3, 2))).all()
