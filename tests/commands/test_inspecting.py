"""The command `inspect`: what it prints, what it writes, how it ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anesurgery.commands import app as cli
from anesurgery.commands import inspecting
from anesurgery.commands.options import BAD_INPUT
from anesurgery.files.package import save
from anesurgery.loading import load
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement import Inspection, OpRow, Segment, Target

Call = Callable[..., tuple[int, str, str]]


def cumulative() -> Program:
    return mb.program(
        input_specs=[mb.TensorSpec((1, 4, 8, 8), dtype=ct.converters.mil.mil.types.fp16)],
        opset_version=ct.target.iOS16,
    )(lambda x: mb.cumsum(x=mb.relu(x=x, name="relu"), axis=1, name="y"))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return save(load(cumulative()), tmp_path / "model.mlpackage")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Call:
    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["anesurgery", "inspect", *map(str, words)])
        code: object = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        out, err = capsys.readouterr()
        assert isinstance(code, int)
        return code, out, err

    return run


def inspection(*units: str | None, model: str = "m") -> Inspection:
    """Ops that prefer these units, each a segment."""
    rows = [OpRow(i, f"op{i}", "relu", "4", "fp16", True, u, i) for i, u in enumerate(units)]
    parts = [
        Segment(i, u, (f"op{i}",), {f"i{i}": (1, 3, 8, 9)}, {f"o{i}": (3, 8, 9)}) for i, u in enumerate(units)
    ]
    return Inspection(model, Target.parse("M1"), tuple(rows), tuple(parts))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, Any, dict[str, Any]]]:
    """Calls of `inspect`, which gives "ane" and "cpu" for `half`, and what the file name says for others."""
    calls: list[tuple[Any, Any, dict[str, Any]]] = []
    answers = {"none": ("cpu",), "all": ("ane",), "half": ("ane", "cpu", "ane"), "empty": ()}

    def look(model: Any, target: Any, **options: Any) -> Inspection:
        calls.append((model, target, options))
        return inspection(*answers.get(Path(model).stem, ("ane", "cpu")), model=str(model))

    for name in (*answers, "m"):
        (tmp_path / f"{name}.mlpackage").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("anesurgery.placement.inspector.inspect", look)
    return calls


def test_a_report_of_a_real_model(call: Call, package: Path) -> None:
    code, out, err = call(package, "--target", "M1/macOS 14")
    assert (code, err) == (0, "")
    assert "M1/macOS 14" in out
    assert "cumsum" in out


def test_json_is_json(call: Call, package: Path) -> None:
    code, out, _ = call(package, "--json")
    found = json.loads(out)
    assert code == 0
    assert {row["op_type"]: row["legal"] for row in found["ops"]}["cumsum"] is False
    assert found["target"] == "any"


def test_options_reach_the_inspection(call: Call, seen: list[Any], tmp_path: Path) -> None:
    for name in ("a.npz", "b.npz"):
        np.savez(tmp_path / name, x=np.ones(2))
    code, _, err = call(
        "m.mlpackage",
        "--target",
        "M4",
        "--compute-units",
        "ALL",
        "--function",
        "prefill",
        "--inputs",
        tmp_path / "a.npz",
        "--inputs",
        tmp_path / "b.npz",
        "--measured",
    )
    assert (code, err) == (0, "")
    ((model, target, options),) = seen
    assert (model, target) == ("m.mlpackage", Target.parse("M4", "ALL"))
    assert (options["function"], options["measured"], len(options["inputs"])) == ("prefill", True, 2)
    assert options["inputs"][0]["x"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("all", 0, "0: fully on the ANE (1 ane; M1)"),
        ("half", 1, "1: partly on the ANE (2 ane, 1 cpu; M1)"),
        ("none", 2, "2: not on the ANE (1 cpu; M1)"),
        ("empty", 2, "2: not on the ANE (no ops; M1)"),
    ],
)
@pytest.mark.usefixtures("seen")
def test_status_is_a_line_and_the_exit_code(call: Call, name: str, code: int, words: str) -> None:
    assert call(f"{name}.mlpackage", "--status") == (code, f"{words}\n", "")
    assert call(f"{name}.mlpackage", "--status", "--quiet") == (code, "", "")
    ended, out, _ = call(f"{name}.mlpackage", "--status", "--json")
    assert (ended, json.loads(out)["status"]) == (code, code)


@pytest.mark.usefixtures("seen")
def test_without_status_the_exit_code_is_0(call: Call) -> None:
    assert call("none.mlpackage")[0] == 0


@pytest.mark.usefixtures("seen")
def test_segments_are_json_lines(call: Call) -> None:
    code, out, _ = call("half.mlpackage", "--segments")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [line["isegment"] for line in lines] == [0, 1]
    assert lines[1]["inputs"] == {"i2": {"shape": [9, 8, 1, 3, 1]}}
    assert call("half.mlpackage", "--segments", "--quiet")[1] == ""
    assert json.loads(call("half.mlpackage", "--segments", "--json")[1]) == lines


def test_a_second_model_is_compared(call: Call, seen: list[Any]) -> None:
    code, out, _ = call("half.mlpackage", "all.mlpackage")
    assert code == 0
    assert [c[0] for c in seen] == ["half.mlpackage", "all.mlpackage"]
    assert "before" in out
    _, out, _ = call("half.mlpackage", "all.mlpackage", "--json")
    found = json.loads(out)
    assert (found["before"]["status"], found["after"]["status"]) == (1, 0)


@pytest.mark.usefixtures("seen")
def test_a_page_is_written(call: Call, tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    assert call("half.mlpackage", "--html", page)[0] == 0
    assert page.read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html>")
    code, _, err = call("half.mlpackage", "--html", page)
    assert code == BAD_INPUT
    assert "exists; choose another name, or use --overwrite" in err
    assert call("half.mlpackage", "all.mlpackage", "--html", page, "--overwrite")[0] == 0


def test_fix_says_what_callers_must_change(call: Call, tmp_path: Path) -> None:
    weight = np.zeros((64, 64, 3, 3), np.float16)

    @mb.program(input_specs=[mb.TensorSpec((1, 64, 128, 128))], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        y = mb.cast(x=x, dtype="fp16")
        for _ in range(4):
            y = mb.relu(x=mb.conv(x=y, weight=weight, pad_type="same"))
        return mb.cast(x=y, dtype="fp32", name="y")

    package = save(load(program), tmp_path / "ends.mlpackage")
    code, _, err = call(package, "--fix", tmp_path / "fixed.mlpackage", "--target", "M1/macOS 14")
    assert not code
    assert "interface: give x as fp16" in err
    assert "interface: y is fp16" in err


def test_fix_applies_the_recipe_and_shows_both(
    call: Call, seen: list[Any], package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anesurgery import surgery as operate

    asked: list[Any] = []
    real = operate.apply

    def apply(model: Any, passes: Any, **options: Any) -> Any:
        units, inputs = passes.steps[0].compute_units, options.pop("inputs")
        asked.append((model, passes.name, units, options["target"], [list(values) for values in inputs]))
        return real(model, "negate_subtract", **options)

    monkeypatch.setattr(operate, "apply", apply)
    out = tmp_path / "fixed" / "all.mlpackage"
    out.parent.mkdir()
    np.savez(tmp_path / "in.npz", x=np.ones(2))
    given = ("--inputs", tmp_path / "in.npz", "--target", "M1", "--compute-units", "ALL")
    code, shown, err = call(package, "--fix", out, *given, "--json")
    assert (code, err) == (0, "")
    assert asked == [(str(package), "auto", "ALL", "M1", [["x"]])]
    assert [Path(c[0]).name for c in seen] == ["model.mlpackage", "all.mlpackage"]
    assert json.loads(shown)["after"]["status"] == 0
    assert load(out).program.functions["main"].outputs[0].name == "y"


@pytest.mark.parametrize(("size", "status"), [(300.0, 1), (0.25, 0)])
def test_fix_ends_with_1_where_outputs_stay_wrong(call: Call, tmp_path: Path, size: float, status: int) -> None:
    """The wrong version: 0, and no word of it."""

    program = mb.program(input_specs=[mb.TensorSpec((2, 8), dtype=types.fp16)])(
        lambda x: mb.mul(
            x=mb.pow(x=mb.add(x=x, y=np.float16(1)), y=np.float16(9)), y=np.float16(1e-3), name="y"
        )
    )

    package = save(load(program), tmp_path / "m.mlpackage")
    np.savez(tmp_path / "in.npz", x=np.full((2, 8), size, np.float16))
    given = ("--inputs", tmp_path / "in.npz", "--target", "M1/macOS 14")
    code, shown, _ = call(package, "--fix", tmp_path / "fixed.mlpackage", *given)
    assert code == status
    assert shown.startswith("outputs are wrong still") == bool(status)
    assert (tmp_path / "fixed.mlpackage").exists()


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("waifu2x_anime_noise0.mlmodel", "every op runs on the Neural Engine"),
        ("custom_swish_mcneural.mlmodel", "layer type custom"),
        ("silero_unified.mlpackage", "lstm"),
        ("anemll_multifunction.mlpackage", "Neural Engine"),
    ],
)
def test_real_models(call: Call, corpus: Path, name: str, words: str) -> None:
    code, out, err = call(corpus / name)
    assert (code, err) == (0, "")
    assert words in out
    assert call(corpus / name, "--quiet") == (0, "", "")


def test_a_damaged_model_is_an_error(call: Call, corpus: Path) -> None:
    code, _, err = call(corpus / "nnv2_simple_layer.mlmodel")
    assert code == BAD_INPUT
    assert "is not a Core ML model, or is damaged" in err


def test_a_pipeline_whose_parts_with_ops_are_pipelines_has_no_next_check() -> None:
    target = Target.parse("M4/macOS 27", "CPU_AND_NE")
    inner = Inspection("inner", target, (OpRow(0, "y", "relu", "4", "fp16", True, "ane", 0, ()),))
    pipeline = Inspection("pipeline", target, (), parts={"0": inner})
    empty = Inspection("empty", target, ())
    outcomes = inspecting._Outcomes("m.mlpackage", "", None, (), inspecting._Repair())
    first = Inspection("whole", target, (), parts={"0": pipeline, "1": empty})
    assert outcomes.check_command(first) == ""
    first = Inspection("whole", target, (), parts={"0": pipeline, "1": empty, "2": inner})
    assert "--member 2" in outcomes.check_command(first)
