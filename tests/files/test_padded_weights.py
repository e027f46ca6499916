"""A stored weight that gains rows of zeros is a map of its file: not read, not copied, written once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.errors import LoadError
from anesurgery.files.package import save
from anesurgery.files.weights import WeightWriter, followed_by_zeros, source_of
from anesurgery.interpret import run
from anesurgery.interpret.arithmetic.constant_memory import release_pages
from anesurgery.loading import load
from anesurgery.mil import Array, Program, Var, constant, ct, mb, types, walk_ops
from anesurgery.regions.weight_edits import Edit

ROWS, WIDTH, PADDED = 5000, 256, 5056  # several pages of memory are added
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"


@mb.program(input_specs=[mb.TensorSpec((1, 7), dtype=types.int32)], opset_version=ct.target.iOS17)
def lookups(ids: Var) -> tuple[Var, ...]:
    rng = np.random.default_rng(0)
    first, last = (rng.standard_normal((ROWS, WIDTH)).astype(np.float16) for _ in range(2))
    return tuple(mb.gather(x=t, indices=ids, axis=0, name=n) for t, n in ((first, "a"), (last, "b")))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(load(lookups), tmp_path / "lookups.mlpackage")


def tables(program: Program) -> list[Array]:
    values = (constant(op.outputs[0]) for op in walk_ops(program) if op.op_type == "const")
    return [v for v in values if isinstance(v, np.ndarray) and v.shape == (ROWS, WIDTH)]


def padded(table: Array) -> Array:
    return Edit.of(table.shape).padded(0, PADDED).apply(table)


def test_rows_of_zeros_follow_whatever_stands_there_in_the_file(path: Path) -> None:
    first, last = tables(load(path).program)
    expected = np.pad(first, ((0, PADDED - ROWS), (0, 0)))
    for table, is_mapped in ((first, True), (last, False)):  # the file ends with the last one
        longer = padded(table)
        assert np.array_equal(longer, np.pad(table, ((0, PADDED - ROWS), (0, 0))))
        assert (source_of(longer) is not None) is is_mapped
    longer = padded(first)
    release_pages(longer)
    release_pages(longer[ROWS - 8 :])
    assert np.array_equal(longer, expected), "the zeros are in no file, and were given back"
    assert not longer.flags.writeable
    assert np.array_equal(first, longer[:ROWS])


def test_only_whole_rows_after_a_stored_weight_are_mapped(path: Path) -> None:
    first, _ = tables(load(path).program)
    assert followed_by_zeros(first.copy(), (PADDED, WIDTH)) is None
    assert followed_by_zeros(first.T, (WIDTH, PADDED)) is None
    assert followed_by_zeros(padded(first), (PADDED + 8, WIDTH)) is None
    whole = Edit.of(first.shape)
    for edit in (
        whole.padded(1, 320),
        whole.taken(0, range(1, ROWS)).padded(0, ROWS),
        whole.taken(0, range(ROWS)[::-1]).padded(0, PADDED),
    ):
        longer = edit.apply(first)
        index = [axis.index for axis in edit.axes]
        numbers = np.where(np.ix_(*index)[0] < 0, 0, first[np.ix_(*(np.maximum(i, 0) for i in index))])
        numbers = np.where(index[1][None] < 0, 0, numbers)
        assert np.array_equal(longer, numbers)


def test_the_saved_file_holds_the_zeros_and_each_table_once(path: Path, tmp_path: Path) -> None:
    surgery = ane.apply(path, ["embedding_matmul"], quiet=True)
    saved = surgery.save(tmp_path / "edited.mlpackage")
    ids = np.arange(7, dtype=np.int32)[None] * 800
    expected = run(load(path), {"ids": ids})
    for name, value in run(load(saved), {"ids": ids}).items():
        assert np.array_equal(value, expected[name])
    bytes_of_tables = 2 * 2 * ROWS * WIDTH
    assert (saved / WEIGHTS).stat().st_size - (path / WEIGHTS).stat().st_size < bytes_of_tables // 2


def test_equal_maps_are_written_once(path: Path, tmp_path: Path) -> None:
    first, _ = tables(load(path).program)

    @mb.program(input_specs=[mb.TensorSpec((1,))], opset_version=ct.target.iOS17)
    def twice(x: Var) -> Var:
        return mb.relu(x=x)

    (function,) = twice.functions.values()
    with function:
        same = [mb.const(val=padded(first)) for _ in range(2)]
    with open(tmp_path / "weight.bin", "w+b") as file:
        writer = WeightWriter(file)
        places = [writer.add(var) for var in same]
        writer.finish()
    assert places[0] == places[1]
    written = np.fromfile(tmp_path / "weight.bin", np.float16, PADDED * WIDTH, offset=places[0] + 64)
    assert np.array_equal(written, padded(first).ravel())


def test_a_file_that_was_written_to_is_no_longer_copied(path: Path, tmp_path: Path) -> None:
    surgery = ane.apply(path, ["embedding_matmul"], quiet=True)
    with open(path / WEIGHTS, "r+b") as file:
        file.truncate(2000)
    with pytest.raises(LoadError, match="changed|cut short"):
        surgery.save(tmp_path / "edited.mlpackage")
