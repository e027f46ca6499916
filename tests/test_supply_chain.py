"""What this project is built and tested with is pinned, and named where it is used."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PINNED = re.compile(r"uses: [\w./-]+@[0-9a-f]{40} # v[\d.]+$")


def loose(workflow: str) -> list[str]:
    """The actions of a workflow that are not pinned by a commit with its version beside it."""
    return [line for line in workflow.splitlines() if "uses:" in line and not PINNED.search(line)]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda p: p.name)
def test_actions_are_pinned_and_may_only_read(workflow: Path) -> None:
    text = workflow.read_text(encoding="utf-8")
    assert not loose(text)
    assert "\npermissions:\n  contents: read\n" in text
    assert text.count("permissions:") == 1


def test_the_action_for_pull_requests_uses_no_other() -> None:
    action = (ROOT / ".github/actions/review/action.yml").read_text(encoding="utf-8")
    assert "uses:" not in action
    assert "${{" not in "".join(line for line in action.splitlines() if "run:" in line), (
        "read from the environment"
    )


def test_a_tag_is_no_pin() -> None:
    assert loose("- uses: actions/checkout@v4") == ["- uses: actions/checkout@v4"]
    assert loose("- uses: actions/checkout@main # v4")


def dependencies() -> list[Requirement]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.M | re.S)
    assert listed
    return [Requirement(line) for line in re.findall(r'^ *"(.*?)"', listed[1], re.M)]


def test_the_oldest_versions_are_those_of_the_project() -> None:
    command = [sys.executable, str(ROOT / ".ci/oldest")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    lowest = {
        f"{wanted.name}=={bound.version}"
        for wanted in dependencies()
        for bound in wanted.specifier
        if bound.operator == ">="
    }
    assert set(said) == lowest
    assert len(said) == len(dependencies()), "each dependency has a lowest version"


def imported(folder: Path) -> set[str]:
    """The modules that the files of a folder import, by the first part of their names."""
    found = set[str]()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").split(".")[0])
    return found


def test_what_is_imported_is_named() -> None:
    modules = set.union(*(imported(ROOT / name) for name in ("anesurgery", "passes", "recipes")))
    named = {wanted.name for wanted in dependencies()} | {"anesurgery"}
    optional = {"PIL", "model_explorer", "tokenizers", "transformers", "typing_extensions", "IPython", "psutil"}
    optional |= {
        "starlette",
        "uvicorn",
        "safetensors",
        "dask",
        "matplotlib",
        "onnx",
        "onnx2coreml",
        "onnxruntime",
    }
    optional |= {"coreai", "ml_dtypes"}  # the second comes with the first
    assert modules - sys.stdlib_module_names - named - optional == set()
