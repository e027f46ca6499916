"""The command line: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery import surgery
from anesurgery.commands import app as cli
from anesurgery.commands import applying
from anesurgery.commands.options import BAD_INPUT, DEFECT
from anesurgery.files.package import save
from anesurgery.loading import load
from anesurgery.mil import Program, ct, mb
from anesurgery.text import to_text


def subtraction(factor: float = 2.0) -> Program:
    return mb.program(
        input_specs=[mb.TensorSpec((2, 3)), mb.TensorSpec((2, 3))], opset_version=ct.target.iOS16
    )(lambda x, z: mb.mul(x=mb.sub(x=x, y=z, name="difference"), y=np.float32(factor), name="y"))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return save(load(subtraction()), tmp_path / "model.mlpackage")


LEFT = ("--set", "negate_subtract=false", "--set", "explicit_broadcast=false")


def call(monkeypatch: pytest.MonkeyPatch, capsys: Any, *words: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["anesurgery", *map(str, words)])
    code: object = 0
    try:
        cli.main()
    except SystemExit as ended:
        code = ended.code or 0
    out, err = capsys.readouterr()
    assert isinstance(code, int)
    return code, out, err


def test_list_needs_neither_coremltools_nor_torch() -> None:
    script = (
        "import sys; sys.argv = ['anesurgery', 'list', '--json']\n"
        "import anesurgery.commands.app\n"
        "try: anesurgery.commands.app.main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'coremltools'} & set(sys.modules)"
    )
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert made.stderr == ""
    names = {row["name"]: row["kind"] for row in json.loads(made.stdout)}
    assert names["gpt2_ane"] == "recipe"
    assert names["pad_last_axis"] == "pass"


@pytest.mark.slow
def test_importing_prints_nothing() -> None:
    script = "import anesurgery as ane; import anesurgery.mil; ane.apply; ane.run; ane.recipes.gpt2_ane"
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (made.stdout, made.stderr) == ("", "")


def test_explain_shows_documentation_and_options(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    code, out, _ = call(monkeypatch, capsys, "explain", "pad_last_axis")
    assert code == 0
    assert "Refuses when" in out
    assert "pad_last_axis.multiple = 64" in out
    code, out, _ = call(monkeypatch, capsys, "explain", "gpt2_ane", "--json")
    assert next(iter(json.loads(out)["options"])) == "fold_constants"


def test_apply_writes_a_package(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out_path = tmp_path / "out.mlpackage"
    code, out, _ = call(monkeypatch, capsys, "apply", package, "negate_subtract", "--out", out_path)
    assert code == 0
    assert "Every edit gives the same bits" in out
    assert f"wrote {out_path}" in " ".join(out.split())
    assert "= sub(" not in to_text(load(out_path).program)


def test_apply_takes_inputs_of_files_and_folders(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    asked: list[Any] = []
    real = surgery.apply

    def apply(*words: Any, inputs: Any, **more: Any) -> Any:
        asked.append(inputs)
        return real(*words, **more)

    monkeypatch.setattr(surgery, "apply", apply)
    folder = tmp_path / "samples"
    folder.mkdir()
    words = ("apply", package, "negate_subtract", "--dry-run", "--quiet", "--inputs", folder)
    code, _, err = call(monkeypatch, capsys, *words)
    assert (code, "holds no .npz file" in err) == (BAD_INPUT, True)
    for k in (2, 1):
        np.savez(folder / f"{k}.npz", x=np.full(3, k))
    assert call(monkeypatch, capsys, *words, "--inputs", folder / "2.npz")[0] == 0
    assert [values["x"][0] for values in asked[0]] == [1, 2, 2]


def test_steps_before_the_model_still_work_and_say_so(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out_path = tmp_path / "out.mlpackage"
    code, _, err = call(monkeypatch, capsys, "apply", "negate_subtract", package, out_path)
    assert code == 0
    assert "the model comes first now" in err
    assert out_path.exists()


def test_dry_run_writes_nothing_and_json_is_json(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    words = ("apply", package, "negate_subtract", "--dry-run", "--json", "--target", "M1")
    code, out, err = call(monkeypatch, capsys, *words)
    found = json.loads(out)
    assert code == 0
    assert err == ""
    assert found["edits"] == {"negate_subtract": 1}
    assert found["target"] == "M1"
    assert found["changes"][0]["proof"]["max_abs"] == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.mlpackage"]


def test_quiet_prints_nothing(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    words = ("apply", package, "negate_subtract", "--out", tmp_path / "out.mlpackage", "--quiet")
    assert call(monkeypatch, capsys, *words) == (0, "", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("apply", "IN", "gpt2_anee", "OUT"), "unknown pass or recipe 'gpt2_anee'; did you mean 'gpt2_ane'"),
        (("apply", "IN", "gpt2_ane", "OUT", *LEFT), "gpt2_ane changed nothing: no attention was recognized"),
        (("inspect", "TEXT"), "is not a Core ML model, or is damaged"),
        (("run", "NOWHERE"), "does not exist; in its folder: model.mlpackage"),
    ],
)
def test_bad_input_is_one_line_and_its_own_exit_code(
    package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    words: tuple[str, ...],
    said: str,
) -> None:
    """What else may be wrong is in test_mistakes.py."""
    places = {"IN": package, "OUT": tmp_path / "new.mlpackage"}
    places |= {"TEXT": tmp_path / "text.mlmodel", "NOWHERE": tmp_path / "nowhere.mlpackage"}
    places["TEXT"].write_text("no model", encoding="utf-8")
    code, out, err = call(monkeypatch, capsys, *(places.get(w, w) for w in words))
    assert (code, out) == (BAD_INPUT, "")
    assert err.startswith("anesurgery: ")
    assert said in err
    assert err.count("\n") == 1
    assert not places["OUT"].exists()


def test_compare_and_diff_end_with_1_where_models_differ(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    other = save(load(subtraction(2.02)), tmp_path / "other.mlpackage")
    assert call(monkeypatch, capsys, "compare", package, package, "--quiet")[0] == 0
    code, out, _ = call(monkeypatch, capsys, "compare", package, other, "--json")
    assert code == 1
    assert json.loads(out)["first_divergence"].startswith("mul y")
    assert call(monkeypatch, capsys, "diff", package, package, "--quiet")[0] == 0
    code, out, _ = call(monkeypatch, capsys, "diff", package, other)
    assert code == 1
    assert "-  %y: 2x3 = mul(x=%difference, y=2)" in out
    assert "+  %y: 2x3 = mul(x=%difference, y=2.02)" in out
    assert "interface: the same" in out


@pytest.mark.slow
def test_no_progress_bar_without_a_terminal(package: Path, tmp_path: Path) -> None:
    words = ["apply", str(package), "negate_subtract", str(tmp_path / "out.mlpackage")]
    command = [sys.executable, "-m", "anesurgery", *words]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0
    assert made.stderr == ""


def test_a_step_is_left_out_in_either_spelling(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    words = ("apply", package, "negate_subtract,pad_last_axis", "--dry-run", "--json", "--set")
    for value, left in (("False", 1), ("false", 1), ("true", 2)):
        _, out, _ = call(monkeypatch, capsys, *words, f"pad_last_axis={value}")
        assert len(json.loads(out)["steps"]) == left


def test_unforeseen_errors_are_one_line_and_debug_shows_them(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def lost(*_: Any) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(applying, "chosen_steps", lost)
    words = ("apply", package, "negate_subtract", "--dry-run")
    code, _, err = call(monkeypatch, capsys, *words)
    assert (code, err) == (DEFECT, "anesurgery: KeyError: 'lost' (--debug shows where)\n")
    with pytest.raises(KeyError, match="lost"):
        call(monkeypatch, capsys, *words, "--debug")


def test_a_warning_is_a_line_of_ours(package: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The wrong version: a file of the command line's library, a line number, and the class."""
    words = ("apply", package, "negate_subtract", "--dry-run", "--target", "M1/macOS 14")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        _, out, err = call(monkeypatch, capsys, *words)
    said = [line for line in err.splitlines() if "asked for" in line]
    assert len(said) == 1
    assert said[0].startswith("warning: negate_subtract: asked for, and done although")
    assert "SurgeryWarning" not in out + err


def test_list_shows_one_kind(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    _, out, _ = call(monkeypatch, capsys, "list", "recipes", "--json")
    assert {row["kind"] for row in json.loads(out)} == {"recipe"}


def test_compress_draws_inputs_with_a_warning_and_looks_for_matplotlib_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    ane.example("tiny")
    words = ("compress", "tiny.mlpackage", "--bits", 8, "-o", "small.mlpackage")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, out, err = call(monkeypatch, capsys, *words)
    assert code == 0
    assert "wrote small.mlpackage" in out
    assert "warning: no --inputs: weights are corrected by 16 random samples" in err
    assert "np.savez('1.npz', input_ids=...)" in err
    quiet = call(
        monkeypatch, capsys, "compress", "tiny.mlpackage", "--bits", 8, "-o", "s2.mlpackage", "--quiet"
    )
    assert quiet == (0, "", "")
    code, _, err = call(monkeypatch, capsys, "compress", "tiny.mlpackage", "--bits", 99, "-o", "s3.mlpackage")
    assert err.startswith("anesurgery: --bits 99")
    monkeypatch.setattr("anesurgery.files.plot_files.importlib.util.find_spec", lambda _: None)
    code, _, err = call(monkeypatch, capsys, *words, "--overwrite", "--plot", "a.png")
    assert code == BAD_INPUT
    assert err == 'anesurgery: plots are drawn by matplotlib: pip install "anesurgery[plot]"\n'
