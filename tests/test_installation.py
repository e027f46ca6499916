"""The package that Python finds where people start it: that of the environment, whatever lies around."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FIND = "import anesurgery; print(anesurgery.__file__ or 'a folder without code')"


@pytest.mark.parametrize("way", [["-c", FIND], ["-m", "anesurgery", "--version"]], ids=["import", "module"])
def test_a_folder_of_the_same_name_does_not_hide_it(way: list[str], tmp_path: Path) -> None:
    """The folder above a clone has one: an editable installation by a finder is hidden by it."""
    (tmp_path / "anesurgery").mkdir()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    found = subprocess.run(
        [sys.executable, *way], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert "without code" not in found.stdout
