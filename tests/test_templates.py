"""A new pass is three new files and no list: the templates, filled in, in a copy of this checkout."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from children import run_child

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("anesurgery", "passes", "recipes", "tests", "docs", "pyproject.toml", "README.md")
FILES = {
    "passes/_template.py": "passes/double_relu.py",
    "tests/passes/_template.py": "tests/passes/test_double_relu.py",
    "anesurgery/placement/rules/_template.py": "anesurgery/placement/rules/finds_double_relu.py",
}
"""Template -> the new file."""

FOUND = """
import anesurgery as ane
from anesurgery import registry
from anesurgery.passes.double_relu import DoubleRelu, example
from anesurgery.surgery import steps_of

assert ane.__file__.startswith({root!r}), ane.__file__
assert "double_relu" in registry.op_pass_names()
assert "Before::" in registry.documentation("double_relu")
assert list(steps_of("double_relu")) == [DoubleRelu()]
named = {{f.rule: f.remedy for f in ane.inspect(example()).all_findings}}
assert named["double_relu-twice"] == "double_relu", named
assert ane.passes.DoubleRelu is DoubleRelu
print(ane.apply(example(), ["double_relu"]).changes)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what a pass author sees, with the three files of a new pass."""
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, tmp_path / part, symlinks=True)  # with its bytecode, which takes long
        else:
            shutil.copy(ROOT / part, tmp_path / part)
    for template, new in FILES.items():
        text = (ROOT / template).read_text(encoding="utf-8")
        assert not (tmp_path / new).exists()
        named = text.replace("_template import Template", "double_relu import DoubleRelu")
        filled = named.replace("Template", "DoubleRelu").replace("template", "double_relu")
        (tmp_path / new).write_text(filled, encoding="utf-8")
    return tmp_path


def run(checkout: Path, *arguments: str) -> str:
    command = [sys.executable, *arguments]
    done = run_child(command, cwd=checkout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_registry_inspect_and_the_command_line_find_it(checkout: Path) -> None:
    assert "relu y" in run(checkout, "-c", FOUND.format(root=str(checkout)))
    assert "double_relu" in run(checkout, "-m", "anesurgery", "list")
    assert "Before" in run(checkout, "-m", "anesurgery", "explain", "double_relu")


@pytest.mark.slow
def test_the_tests_of_all_passes_hold_for_it(checkout: Path) -> None:
    which = "double_relu or folders_on_disk or two_rooms or arrows or has_a_room or whole"
    tests = ["tests/passes/test_double_relu.py", "tests/passes/test_passes.py", "tests/test_layout.py"]
    made = run(checkout, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--write-results", "-k", which, *tests)
    assert "passed" in made


def test_a_rule_without_its_pass_would_be_found(checkout: Path) -> None:
    (checkout / FILES["passes/_template.py"]).unlink()
    with pytest.raises(AssertionError, match="double_relu"):
        run(checkout, "-c", FOUND.format(root=str(checkout)))
