"""The source of a model changes at each phase of loading and saving: what was read is saved, or nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from faults import calls
from saved import model, scratches, state

from anesurgery.errors import SurgeryError
from anesurgery.files.package import save
from anesurgery.loading import load

WEIGHTS = Path("Data/com.apple.CoreML/weights/weight.bin")
SPECIFICATION = Path("Data/com.apple.CoreML/model.mlmodel")


class Sources:
    """A package, and another that takes its place or its content."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.source = folder, folder / "in.mlpackage"
        self.originals = [save(model(i), folder / f"original{i}.mlpackage") for i in range(2)]
        self.whole = [state(p) for p in self.originals]

    def prepare(self) -> None:
        for name in ("in.mlpackage", "out.mlpackage"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        shutil.copytree(self.originals[0], self.source)

    def replace(self, name: str) -> None:
        shutil.rmtree(self.source)
        shutil.copytree(self.originals[1], self.source)

    def replace_in_place(self, name: str) -> None:
        for part in (SPECIFICATION, WEIGHTS):
            (self.source / part).write_bytes((self.originals[1] / part).read_bytes())

    def truncate(self, name: str) -> None:
        os.truncate(self.source / WEIGHTS, 100)

    def truncate_specification(self, name: str) -> None:
        os.truncate(self.source / SPECIFICATION, 100)

    def delete(self, name: str) -> None:
        shutil.rmtree(self.source)

    def copy(self) -> None:
        save(load(self.source), self.folder / "out.mlpackage")


def change_each(folder: Path, change: Callable[[Sources, str], None], every: int, offset: int = 0) -> set[str]:
    sources = Sources(folder)
    sources.prepare()
    with calls() as told:
        sources.copy()
    seen = set()
    for at in range(1 + offset, len(told.names) + 1, every):
        seen.add(_change(sources, change, at))
    return seen


def _change(sources: Sources, change: Callable[[Sources, str], None], at: int) -> str:
    """What comes of a copy whose source changes at a call: an error, or which model was saved."""
    sources.prepare()
    try:
        with calls(at, lambda name: change(sources, name)):
            sources.copy()
    except SurgeryError:
        assert not (sources.folder / "out.mlpackage").exists()
        assert not scratches(sources.folder)
        return "error"
    return str(sources.whole.index(state(sources.folder / "out.mlpackage")))


CHANGES = [
    Sources.replace,
    Sources.replace_in_place,
    Sources.truncate,
    Sources.truncate_specification,
    Sources.delete,
]


@pytest.mark.one_of(3)
@pytest.mark.parametrize("change", CHANGES)
def test_a_source_that_changes(tmp_path: Path, change: Callable[[Sources, str], None]) -> None:
    change_each(tmp_path, change, 10, offset=3)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_source_that_changes_at_every_phase(tmp_path: Path, change: Callable[[Sources, str], None]) -> None:
    seen = change_each(tmp_path, change, 1)
    wanted = {"0", "error"} | ({"1"} if change in (Sources.replace, Sources.replace_in_place) else set())
    assert seen == wanted
