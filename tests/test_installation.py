"""The package that Python finds where people start it: that of the environment, whatever lies around."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_environment import first_commands, missing, pasted

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


def test_the_commands_to_try_a_wheel_by_are_the_readmes() -> None:
    commands, shown = first_commands()
    assert [line.split()[:2] for line in commands.splitlines()] == [
        ["anesurgery", name] for name in ("example", "see", "fix", "prove")
    ]
    assert missing(f"before\n{shown}after") == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("14.9 ms", "14.8 ms"),
        ("1.89 ms", "14.9 ms"),
        ("about 7.9", "about 7.8"),
        ("N dB", "N bits"),
        ("90 bit", "89 bit"),
    ],
)
def test_another_line_is_missed(right: str, wrong: str) -> None:
    _, shown = first_commands()
    printed = re.sub(r"[\d.]+ dB", "N dB", shown)
    assert right in printed
    assert missing(printed) == []
    assert missing(printed.replace(right, wrong)) != []


def test_every_block_of_the_readme_is_pasted_but_for_the_suite() -> None:
    """The script that `make dist` runs in a new clone; the wrong version leaves out the installation."""
    script = pasted()
    for line in (
        "pip install .",
        "anesurgery see gpt2.mlpackage --target iPhone13",
        "make demo",
        "import anesurgery as ane",
    ):
        assert line in script
    assert "make test" not in script
    assert "<" not in script.replace("<<'END'", "").replace("-> ", ""), "a place that the reader has to fill"
    subprocess.run(["bash", "-n", "-c", script], check=True)
