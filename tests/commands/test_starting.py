"""How the command line starts: light commands stay light, Ctrl-C ends it, and every error has its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from children import HUNG

from anesurgery import __version__, registry
from anesurgery.commands import app as cli
from anesurgery.commands.machines import Row, examine
from anesurgery.commands.options import BAD_INPUT
from anesurgery.commands.subcommand import Outcome
from anesurgery.commands.written_options import written_options
from anesurgery.surgery import find_recipe

ROOT = Path(__file__).resolve().parents[2]
MAIN = [sys.executable, "-m", "anesurgery"]


def call(monkeypatch: pytest.MonkeyPatch, capsys: Any, *words: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["anesurgery", *map(str, words)])
    code: Any = 0
    try:
        cli.main()
    except SystemExit as ended:
        code = ended.code or 0
    return int(code), *capsys.readouterr()


@pytest.mark.one_of(6)
@pytest.mark.parametrize(
    "words", ["list", "explain pad_last_axis", "explain gpt2_ane", "inspect --help", "--version", "doctor"]
)
def test_light_commands_need_neither_torch_nor_coremltools(words: str) -> None:
    script = (
        f"import sys; sys.argv = ['anesurgery', *{words.split()!r}]\n"
        "import anesurgery.commands.app\n"
        "try: anesurgery.commands.app.main()\n"
        "except SystemExit as ended: assert not ended.code, ended.code\n"
        "assert not {'torch', 'coremltools', 'numpy'} & set(sys.modules)"
    )
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert call(monkeypatch, capsys, "--version") == (0, f"anesurgery {__version__}\n", "")


@pytest.mark.one_of(5)
@pytest.mark.parametrize("name", [*registry.pass_names(), *registry.recipe_names()])
def test_options_read_from_a_file_are_those_of_the_class(name: str) -> None:
    steps = find_recipe(name).steps if name in registry.recipe_names() else (registry.make_pass(name),)
    found = written_options(name)
    assert found is None or found == {step.name: step.options() for step in steps}


def test_options_are_read_from_most_files() -> None:
    assert written_options("pad_last_axis") == {"pad_last_axis": {"multiple": 64}}
    assert (written_options("gpt2_ane") or {})["embedding_matmul"]["pad_tied"] is True


@pytest.mark.parametrize(
    "words",
    [
        ("--nonsense",),
        ("compare", "a"),
        ("inspcet", "a"),
        ("run", "a", "--seed", "-1"),
        ("run", "a", "--seed", "x"),
    ],
)
def test_usage_errors_end_with_their_own_code(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    code, out, err = call(monkeypatch, capsys, *words)
    assert (code, out) == (BAD_INPUT, "")
    assert err


@pytest.mark.quick_cases("None", "torch")
@pytest.mark.one_of(2)
@pytest.mark.parametrize("after", [None, "typer", "numpy", "torch", "coremltools", "anesurgery.surgery"])
def test_ctrl_c_ends_it_whenever_it_comes(after: str | None, tmp_path: Path) -> None:
    """Killed by the signal while it imports, 130 after that; never a traceback, and never a result.

    `after` is the module whose import has ended when Ctrl-C comes, or None where Python itself just starts.
    """
    model, out = tmp_path / "empty.mlpackage", tmp_path / "out.mlpackage"
    model.mkdir()
    started = subprocess.Popen(
        [sys.executable, "-X", "importtime", *MAIN[1:], "apply", str(model), "auto", str(out)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert started.stderr is not None
    while after is not None and imported(started.stderr.readline()) != after:
        assert started.poll() is None
    alive = started.poll() is None
    os.kill(started.pid, signal.SIGINT) if alive else None
    _, err = started.communicate(timeout=HUNG)
    if after is not None:
        assert "Traceback" not in err
        assert started.returncode in ((-signal.SIGINT, 130) if alive else (BAD_INPUT,))
    assert started.returncode != 0
    assert not out.exists()


def test_a_model_that_is_not_there_is_missed_before_torch_is_imported() -> None:
    command = [sys.executable, "-X", "importtime", *MAIN[1:], "inspect", "nowhere.mlpackage"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == BAD_INPUT
    assert "nowhere.mlpackage does not exist" in ended.stderr
    assert not {"torch", "coremltools", "numpy"} & {imported(line) for line in ended.stderr.splitlines()}


@pytest.mark.parametrize(
    "words", ["split . --out x", "merge m --out x", "sizes . --out x --size a=1x8 --size b=1x8"]
)
def test_wrong_usage_is_told_before_torch_is_imported(words: str) -> None:
    """The wrong version loads the engine first, which takes seconds."""
    command = [sys.executable, "-X", "importtime", *MAIN[1:], *words.split()]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == BAD_INPUT
    assert not {"torch", "coremltools"} & {imported(line) for line in ended.stderr.splitlines()}


def imported(line: str) -> str:
    """The module that a line of `-X importtime` is about; "" if it is about none."""
    return line.rpartition("|")[2].strip() if line.startswith("import time:") else ""


def test_the_doctor_finds_nothing_wrong_here(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    code, out, _ = call(monkeypatch, capsys, "doctor", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert {"Python", "coremltools", "torch", "numpy", "weight reader"} <= rows.keys()
    assert code == (1 if any(row["fits"] is False for row in rows.values()) else 0)
    assert rows["weight reader"]["fits"]


def test_the_doctor_finds_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from importlib import metadata

    real = metadata.version

    def version(name: str) -> str:
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return "1.0" if name == "coremltools" else real(name)

    monkeypatch.setattr(metadata, "version", version)
    rows = {row.name: row for row in examine()}
    assert rows["torch"] == Row("torch", "missing", ">=2.1", False)
    assert rows["coremltools"].fits is False
    assert call(monkeypatch, capsys, "doctor")[0] == 1


def test_json_holds_no_bare_infinity(capsys: Any) -> None:
    Outcome({"a": [float("inf"), 1.5], "b": {"c": float("nan")}}, then="").print(True, False)
    assert json.loads(capsys.readouterr().out) == {"a": ["inf", 1.5], "b": {"c": "nan"}}


@pytest.mark.parametrize("words", [(), ("inspect",), ("apply",), ("run",), ("compare",)])
def test_help_names_both_formats_and_fits_80_columns(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = call(monkeypatch, capsys, *words, "--help")
    assert max(map(len, out.splitlines())) <= 80
    assert not words or ".mlmodel" in out
