"""A surgery is saved as an .aimodel where the name ends so."""

from __future__ import annotations

from pathlib import Path

import pytest

import anesurgery as ane
from anesurgery.commands.app import app
from anesurgery.errors import LoadError
from anesurgery.loading import to_text

pytest.importorskip("coreai", reason="the extra [coreai] is not installed")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    ane.example("tiny", tmp_path / "tiny.mlpackage")
    return tmp_path / "tiny.mlpackage"


def test_both_formats_come_of_one_surgery(package: Path, tmp_path: Path) -> None:
    surgery = ane.apply(package, ["select_last_token"], quiet=True)
    old, new = (surgery.save(tmp_path / f"out{suffix}") for suffix in (".mlpackage", ".aimodel"))
    assert ane.compare(old, new).ok
    assert ane.compare(old, new, engine="coreai").ok
    assert "select_last_token" not in to_text(package)
    with pytest.raises(LoadError, match="exists; choose another name"):
        surgery.save(tmp_path / "out.aimodel")


def test_a_model_that_stays_as_it_is_is_written_too(package: Path, tmp_path: Path) -> None:
    out = tmp_path / "same.aimodel"
    assert not app(["apply", str(package), "negate_subtract", str(out), "--quiet"], standalone_mode=False)
    assert ane.compare(package, out).ok
