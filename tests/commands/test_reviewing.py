"""`anesurgery review` between two commits of a repository, and the script of the action that calls it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands import app as cli
from anesurgery.mil import Program, Var, ct, mb, types

ROOT = Path(__file__).resolve().parents[2]
TARGET = "M1/macOS 14"


def program(window: int = 3, scale: float = 1.0) -> Program:
    """Convolutions around a pool, which is too wide for the engine above 8."""

    @mb.program(input_specs=[mb.TensorSpec((1, 64, 64, 64), dtype=types.fp16)], opset_version=ct.target.iOS16)
    def built(x: Var) -> Var:
        weight = (scale * np.random.default_rng(0).standard_normal((64, 64, 3, 3)) / 24).astype(np.float16)
        x = mb.conv(x=x, weight=weight, pad_type="same")
        x = mb.max_pool(x=x, kernel_sizes=[window, window], strides=[1, 1], pad_type="same", name="pool|`wide`")
        return mb.conv(x=x, weight=weight, pad_type="same", name="y")

    return built


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=someone", "-c", "user.email=someone@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One commit with a model of which every op is on the engine."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch", "main")
    ane.save(ane.load(program()), folder / "model.mlpackage")
    git(folder, "add", "-A")
    git(folder, "commit", "--quiet", "-m", "a model")
    monkeypatch.chdir(folder)
    return folder


def commit(folder: Path, changed: Program) -> None:
    ane.save(ane.load(changed), folder / "model.mlpackage", overwrite=True)
    git(folder, "add", "-A")
    git(folder, "commit", "--quiet", "-m", "another")


def review(*words: object) -> Any:
    given = ["review", "model.mlpackage", "--base", "HEAD~1", "--target", TARGET, *map(str, words)]
    return CliRunner().invoke(cli.app, given)


def test_a_model_that_loses_share_is_worse_and_the_op_is_named(repository: Path) -> None:
    commit(repository, program(window=9))
    shown = review()
    assert shown.exit_code == 1, shown.output
    assert "worse: share of the ops on the Neural Engine 100.0% -> " in shown.output
    assert "| max_pool |" in shown.output
    assert "the outputs differ" in shown.output
    assert "| op that is not expected on the Neural Engine now |" in shown.output
    assert git(repository, "worktree", "list").count("\n") == 0


def test_the_same_model_is_not_worse(repository: Path) -> None:
    git(repository, "commit", "--quiet", "--allow-empty", "-m", "nothing")
    shown = review()
    assert shown.exit_code == 0, shown.output
    assert "**not worse**" in shown.output


def test_other_numbers_are_worse_unless_nobody_asked(repository: Path) -> None:
    commit(repository, program(scale=1.1))
    assert "the outputs differ" in review().output
    assert review("--no-numbers").exit_code == 0


def test_a_path_from_a_folder_below_is_the_same_model(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(repository, program(scale=1.1))
    (repository / "below").mkdir()
    monkeypatch.chdir(repository / "below")
    shown = CliRunner().invoke(cli.app, ["review", "../model.mlpackage", "--base", "HEAD~1"])
    assert shown.exit_code == 1, shown.output
    assert "the outputs differ" in shown.output
    outside = CliRunner().invoke(cli.app, ["review", "../../other.mlpackage", "--base", "HEAD~1"])
    assert "is not in the repository" in str(outside.exception)


def test_a_new_model_is_new_and_a_script_makes_models(repository: Path) -> None:
    (repository / "make.py").write_text(
        "import shutil; shutil.copytree('model.mlpackage', 'made.mlpackage', dirs_exist_ok=True)"
    )
    commit(repository, program(window=9))
    ane.save(ane.load(program()), repository / "new.mlpackage")
    words = ["review", "new.mlpackage", "--base", "HEAD~1", "--target", TARGET]
    shown = CliRunner().invoke(cli.app, words)
    assert shown.exit_code == 0, shown.output
    assert "**new**" in shown.output
    copy = f"\"{sys.executable}\" -c \"import shutil; shutil.copytree('model.mlpackage', 'made.mlpackage')\""
    words = ["review", "made.mlpackage", "--base", "HEAD~1", "--target", TARGET, "--script", copy]
    shown = CliRunner().invoke(cli.app, words)
    assert shown.exit_code == 1, shown.output


def test_what_cannot_be_done_is_said(repository: Path) -> None:
    words = ["review", "model.mlpackage", "--base", "nowhere"]
    shown = CliRunner().invoke(cli.app, words)
    assert "fetch the commit" in str(shown.exception)
    words = ["review", "model.mlpackage", "--base", "HEAD", "--script", "exit 3"]
    shown = CliRunner().invoke(cli.app, words)
    assert "'exit 3' ended with 3" in str(shown.exception)


@pytest.mark.slow
def test_the_script_of_the_action_fails_with_the_table_in_the_summary(repository: Path, tmp_path: Path) -> None:
    commit(repository, program(window=9))
    environment = os.environ | {
        "MODELS": "model.mlpackage\n\n",
        "BASE": "HEAD~1",
        "TARGET": TARGET,
        "SCRIPT": "",
        "POINTS": "0.1",
        "COMMENT": "false",
        "RUNNER_TEMP": str(tmp_path),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    script = ROOT / ".github/actions/review/review.sh"
    done = subprocess.run(
        ["bash", str(script)], cwd=repository, env=environment, check=False, capture_output=True
    )
    assert done.returncode == 1, done.stderr
    assert "### model.mlpackage on M1/macOS 14" in (tmp_path / "summary.md").read_text(encoding="utf-8")
    environment["BASE"] = "HEAD"
    done = subprocess.run(
        ["bash", str(script)], cwd=repository, env=environment, check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr
