"""What is saved is what was read: a source that changes after loading is noticed, or makes no difference."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import run_child

import anesurgery as ane
from anesurgery.errors import LoadError
from anesurgery.files.package import Loaded, save, to_mlmodel
from anesurgery.files.source import SourceFile
from anesurgery.interpret import run
from anesurgery.loading import load
from anesurgery.mil import Program, constant, ct, mb, types, walk_ops

WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"


def network(seed: int, rows: int = 4096) -> Program:
    table = np.random.default_rng(seed).standard_normal((rows, 8)).astype(np.float16)

    return mb.program(input_specs=[mb.TensorSpec((2, 8), dtype=types.fp16)], opset_version=ct.target.iOS16)(
        lambda x: mb.linear(x=mb.sub(x=np.float16(1), y=mb.relu(x=x)), weight=table, name="y")
    )


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return save(load(network(1)), tmp_path / "network.mlpackage")


def table(model: Path | Program) -> bytes:
    program = load(model).program
    values = [constant(op.outputs[0]) for op in walk_ops(program) if op.op_type == "const"]
    return next(bytes(v) for v in values if getattr(v, "shape", ()) == (4096, 8))


def replaced(package: Path) -> None:
    """Another model under the same name, as exporters write it."""
    shutil.rmtree(package)
    save(load(network(2)), package)


def renamed_over(package: Path) -> None:
    save(load(network(2)), package.with_name("other.mlpackage"))
    os.replace(package.with_name("other.mlpackage") / WEIGHTS, package / WEIGHTS)


def deleted(package: Path) -> None:
    shutil.rmtree(package)


@pytest.mark.parametrize("happens", [replaced, renamed_over, deleted])
def test_a_new_file_of_the_name_changes_nothing(
    package: Path, tmp_path: Path, happens: Callable[[Path], None]
) -> None:
    """The file that was read stays open: its weights are saved, run and given to coremltools."""
    loaded = load(package)
    expected = run(loaded.program, {"x": np.full((2, 8), 3, np.float16)})["y"]
    happens(package)
    np.testing.assert_array_equal(run(loaded.program, {"x": np.full((2, 8), 3, np.float16)})["y"], expected)
    assert table(save(loaded, tmp_path / "saved.mlpackage")) == table(network(1))
    assert table(Path(to_mlmodel(loaded).package_path)) == table(network(1))


def rewritten(package: Path) -> None:
    """The content of another model, in the same file."""
    save(load(network(2)), package.with_name("other.mlpackage"))
    (package / WEIGHTS).write_bytes((package.with_name("other.mlpackage") / WEIGHTS).read_bytes())


def rewritten_with_the_old_date(package: Path) -> None:
    before = (package / WEIGHTS).stat()
    rewritten(package)
    os.utime(package / WEIGHTS, ns=(before.st_atime_ns, before.st_mtime_ns))


def truncated(package: Path) -> None:
    os.truncate(package / WEIGHTS, 4096)


def emptied(package: Path) -> None:
    os.truncate(package / WEIGHTS, 0)


def grown(package: Path) -> None:
    with (package / WEIGHTS).open("ab") as file:
        file.write(bytes(64))


IN_PLACE = [rewritten, rewritten_with_the_old_date, truncated, emptied, grown]


@pytest.mark.parametrize("happens", IN_PLACE)
@pytest.mark.parametrize("use", ["save", "model", "run"])
def test_a_file_that_is_written_to_is_refused(
    package: Path, tmp_path: Path, happens: Callable[[Path], None], use: str
) -> None:
    uses: dict[str, Callable[[Loaded], object]] = {
        "save": lambda loaded: save(loaded, tmp_path / "saved.mlpackage"),
        "model": to_mlmodel,
        "run": lambda loaded: run(loaded.program, {"x": np.full((2, 8), 3, np.float16)}),
    }
    loaded = load(package)
    happens(package)
    with pytest.raises(LoadError, match=r"weight\.bin was changed after it was read .*; load it again"):
        uses[use](loaded)
    assert not (tmp_path / "saved.mlpackage").exists()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_running_model_says_so_too(package: Path) -> None:
    predictor = ane.Predictor(package)
    values = predictor.sample(0)
    predictor(values)
    truncated(package)
    with pytest.raises(LoadError, match="was changed after it was read"):
        predictor(values)


def test_apply_says_so_between_passes(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass reads weights: the file is checked before each."""
    from anesurgery.rewriting.passes import run_pass

    def then_truncate(*given: Any) -> None:
        run_pass(*given)
        truncated(package)

    monkeypatch.setattr("anesurgery.rewriting.passes.run_pass", then_truncate)
    with pytest.raises(LoadError, match="was changed after it was read"):
        ane.apply(package, ["negate_subtract", "negate_subtract"], prove=None, quiet=True)


def test_a_result_is_saved_with_the_weights_that_were_checked(package: Path, tmp_path: Path) -> None:
    done = ane.apply(package, ["negate_subtract"], prove="both", quiet=True)
    replaced(package)
    again = ane.load(done.save(tmp_path / "done.mlpackage"))
    values = {"x": np.full((2, 8), 3, np.float16)}
    np.testing.assert_array_equal(run(again.program, values)["y"], run(load(network(1)).program, values)["y"])


CUT_IN_MID_SAVE = """
import os, sys
import anesurgery.files.weights as w
from anesurgery.errors import LoadError
from anesurgery.files.package import save
from anesurgery.loading import load
copy, cut = w._copy_range, []
def short(source, target, count, at, to):
    if not cut:
        cut.append(os.truncate(sys.argv[1] + "/Data/com.apple.CoreML/weights/weight.bin", 4096))
    return copy(source, target, min(count, 1024), at, to)
w._copy_range = short
try:
    save(load(sys.argv[1]), sys.argv[2])
except LoadError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_source_that_is_cut_short_in_mid_save_ends_the_save(package: Path, tmp_path: Path) -> None:
    """In a process of its own: it went on for ever."""
    command = [sys.executable, "-c", CUT_IN_MID_SAVE, str(package), str(tmp_path / "saved.mlpackage")]
    done = run_child(command, check=True)
    assert "was cut short after it was read" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["network.mlpackage"]


def test_a_package_that_is_replaced_while_it_is_read_is_refused(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its specification would be that of one model, its weights those of another."""
    read = SourceFile.read

    def then_replace(self: SourceFile, *given: int) -> bytes:
        content = read(self, *given)
        replaced(package)
        return content

    monkeypatch.setattr(SourceFile, "read", then_replace)
    with pytest.raises(LoadError, match="was replaced while the model was read; load it again"):
        load(package)


def test_a_change_of_rights_or_links_elsewhere_is_no_change(package: Path, tmp_path: Path) -> None:
    """A second name for the file, as a backup makes it, leaves the content as it was."""
    loaded = load(package)
    os.link(package / WEIGHTS, tmp_path / "backup.bin")
    save(loaded, tmp_path / "saved.mlpackage")
    (tmp_path / "backup.bin").unlink()
    (package / WEIGHTS).chmod(0o444)
    save(loaded, tmp_path / "again.mlpackage")


def test_files_are_closed_with_the_model(package: Path) -> None:
    def count() -> int:
        gc.collect()  # a program and its ops refer to each other
        return len(list(Path("/proc/self/fd").iterdir()))

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("the system does not list open files")
    load(package)
    before = count()
    for _ in range(5):
        load(package)
    assert count() <= before


def test_an_unchanged_network_is_saved_as_it_was_read(tmp_path: Path) -> None:
    from bad_networks import build

    file = tmp_path / "network.mlmodel"
    file.write_bytes(build().SerializeToString())
    content = file.read_bytes()
    done = ane.apply(file, ["fold_batchnorm"], prove=None, quiet=True)
    other = build()
    other.description.metadata.author = "somebody else"
    file.unlink()
    file.write_bytes(other.SerializeToString())
    assert done.save(tmp_path / "same.mlmodel").read_bytes() == content

    done = ane.apply(file, ["fold_batchnorm"], prove=None, quiet=True)
    file.write_bytes(content)
    with pytest.raises(LoadError, match="was changed after it was read"):
        done.save(tmp_path / "other.mlmodel")
