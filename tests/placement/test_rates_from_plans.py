"""Plans recorded on a Mac: what is recorded, what is learned from them, and what a table changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bad_networks import build
from fake_core_ml import FakeModel, convolutions, install
from statement import conv, of
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands.app import app
from anesurgery.errors import LoadError, SurgeryError
from anesurgery.interpret.predictor import Predictor, program_of
from anesurgery.mil import Program
from anesurgery.placement import compute_plan, core_ml_runs
from anesurgery.placement.calibration import cross_validated_errors, features_of, learn, read_plan
from anesurgery.placement.core_ml_runs import SETTINGS, measure
from anesurgery.placement.corrections import Correction, Corrections, read_corrections
from anesurgery.placement.target import Target

RECORDED = Path(__file__).resolve().parents[3] / "shared" / "placement" / "models_open.json"
RUN = CliRunner()


def plan_of(program: Program, factors: dict[str, float], host: str = "Apple M2, macOS 15.3") -> dict[str, Any]:
    """What `measure` would record where ops of some types take so many times the formula's time."""
    rows = ane.inspect(program, "M4/macOS 27").ops
    times = [factors.get(r.op_type, 1.0) * (r.estimate.ane or 0) for r in rows if r.estimate is not None]
    ops = [
        {
            "name": r.name,
            "op": r.op_type,
            "unit": "ane",
            "supported": ["ane", "cpu"],
            "cost": time / sum(times),
            "legal": r.legal,
            "expected": r.preferred,
            "ane_us": r.estimate and r.estimate.ane,
            "cpu_us": r.estimate and r.estimate.cpu,
        }
        for r, time in zip(rows, times, strict=True)
    ]
    return {
        "format": "anesurgery.plan/1",
        "host": host,
        "compute_units": "CPU_AND_NE",
        "model": "m",
        "ops": ops,
    }


def test_a_slower_op_is_learned_from_its_share() -> None:
    found = learn({"a": plan_of(convolutions(), {"conv": 3.0}), "b": plan_of(convolutions(32), {"conv": 3.0})})
    rates = found.corrections.rates
    assert rates["conv"]["ane"].factor == pytest.approx(3)
    assert rates["relu"]["ane"].factor == pytest.approx(1)
    assert rates["conv"]["ane"].cases == 6
    assert found.agree["a"] == found.asked["a"] == 6
    assert found.legal == {"a": (6, 6), "b": (6, 6)}


def test_shares_alone_tell_no_rate() -> None:
    """The wrong way: without ops of a known rate, three times slower convolutions look as fast as ever."""
    plain = plan_of(convolutions(), {"conv": 3.0})
    plain["ops"] = [op for op in plain["ops"] if op["op"] == "conv"]
    found = learn({"a": plain})
    assert not found.corrections.rates
    assert "unit of time" in found.skipped[0]


def test_one_case_teaches_nothing_and_cases_that_disagree_say_so() -> None:
    plain = plan_of(convolutions(), {})
    plain["ops"] = plain["ops"][:2]
    assert "conv on the ANE: one case" in learn({"a": plain}).skipped
    assert cross_validated_errors([1.0, 1.0, 4.0]) == pytest.approx([2.5, 2.5, 4.0])
    both = learn({"a": plan_of(convolutions(), {"conv": 1.0}), "b": plan_of(convolutions(32), {"conv": 2.0})})
    assert both.corrections.rates["conv"]["ane"].off == pytest.approx(2)


def test_a_table_changes_estimates_and_is_named() -> None:
    slower = Corrections(("Apple M2, macOS 15.3",), {"conv": {"ane": Correction(1000.0, 1.1, 9)}})
    target = replace(Target.parse("M2/macOS 15"), rates=slower)
    plain, learned = ane.inspect(convolutions(), "M2/macOS 15"), ane.inspect(convolutions(), target)
    assert plain.counts == {"ane": 6}
    assert learned.counts["cpu"] == 6
    before, after = plain.ops[1].estimate, learned.ops[1].estimate
    assert before is not None
    assert after is not None
    assert before.ane is not None
    assert after.ane == pytest.approx(1000 * before.ane)
    assert (after.cpu, after.off) == (before.cpu, (1.1, before.off[1]))
    assert any("learned from Apple M2, macOS 15.3" in note for note in learned.notes)


@pytest.mark.parametrize("units", [("ane",), ("cpu",), ("ane", "cpu")])
def test_a_corrected_unit_leaves_the_doubt_about_the_other(units: tuple[str, ...]) -> None:
    table = Corrections(("Apple M2, macOS 15.3",), {"conv": {u: Correction(3.0, 1.1, 9) for u in units}})
    program = of(conv(14, 14, 3, 3), (1, 14, 64, 64))()  # 62 operations per byte lie at the cut
    target = Target.parse("M4/macOS 27")
    before, after = (ane.inspect(program, t).ops[0].estimate for t in (target, replace(target, rates=table)))
    assert before is not None
    assert after is not None
    ((ane_before, cpu_before),) = before.or_else
    row = (after.ane if "ane" in units else ane_before, after.cpu if "cpu" in units else cpu_before)
    assert after.or_else == (() if len(units) == 2 else (row,))


def test_what_an_m4_recorded_agrees_with_the_formulas() -> None:
    """Shares that Core ML reported, with estimates of the same ops: convolutions need no correction."""
    if not RECORDED.is_file():
        pytest.skip("the recorded plans are not beside this checkout")
    models = {m["model"]: m for m in json.loads(RECORDED.read_text(encoding="utf-8"))["models"]}
    plain = plan_of(convolutions(32), {})
    template = {op["op"]: op for op in plain["ops"]}
    ops = [
        {**template[op["op"]], "unit": op["preferred"], "cost": op["w"]}
        for op in models["relu@ctx"]["ops"]
        if op["op"] in template
    ]
    found = learn({"relu@ctx": {**plain, "host": "M4 (Mac16,12), macOS 27.0.1", "ops": ops}})
    rate = found.corrections.rates["conv"]["ane"]
    assert rate.factor == pytest.approx(1, rel=0.01)
    assert rate.cases == 4


@pytest.fixture
def fake_core_ml(monkeypatch: pytest.MonkeyPatch) -> Program:
    """Core ML of a Mac that is not there: plans, compiling, loads and predictions."""
    return install(monkeypatch)


def test_what_core_ml_says_is_recorded_and_learned_from(fake_core_ml: Program, tmp_path: Path) -> None:
    package = tmp_path / "m.mlpackage"
    ane.save(ane.load(fake_core_ml), package)
    plan, table = tmp_path / "plan.json", tmp_path / "rates.json"
    made = RUN.invoke(app, ["measure", str(package), "--out", str(plan), "--target", "M4", "--runs", "20"])
    assert made.exit_code == 0, made.output
    assert "the GPU is taken" in made.output
    recorded = read_plan(plan)
    assert [op["op"] for op in recorded["ops"]] == ["relu", "conv"] * 3
    assert {(op["unit"], op["cost"], tuple(op["supported"])) for op in recorded["ops"]} == {
        ("ane", 1 / 6, ("ane", "cpu"))
    }
    assert "weight" not in plan.read_text(encoding="utf-8")
    told = RUN.invoke(app, ["learn", str(plan), "--out", str(table), "--json"])
    assert json.loads(told.stdout)["plans"][str(plan)] == {"agree": 6, "asked": 6, "legal": [6, 6]}
    assert read_corrections(table).hosts == ("Apple M4, macOS 15.3",)
    shown = RUN.invoke(app, ["inspect", str(package), "--rates", str(table), "--json"])
    assert any("Apple M4, macOS 15.3" in note for note in json.loads(shown.stdout)["notes"])
    assert "exists" in str(RUN.invoke(app, ["learn", str(plan), "--out", str(table)]).exception)


def test_loads_and_predictions_are_timed_for_each_setting(fake_core_ml: Program, tmp_path: Path) -> None:
    package = tmp_path / "m.mlpackage"
    ane.save(ane.load(fake_core_ml), package)
    plain = measure(str(package), Target.parse("M4/macOS 15"), runs=20)
    rows = {row["compute_units"]: row for row in plain["settings"]}
    assert list(rows) == list(SETTINGS)
    assert (rows["CPU_AND_GPU"]["timing"], rows["CPU_AND_GPU"]["error"]) == (
        None,
        "CPU_AND_GPU: the GPU is taken",
    )
    timing = rows["CPU_AND_NE"]["timing"]
    assert (timing["first_load"], timing["later_load"]) == (100.0, 3.0)
    predictions = timing["predictions"]
    # The five that warm up do not count, and two slow ones of twenty move no median.
    assert predictions["count"] == 20
    assert predictions["median"] == pytest.approx(2)
    assert predictions["least"] == pytest.approx(2)
    assert predictions["high"] > 2
    assert rows["CPU_ONLY"]["timing"]["predictions"]["median"] == pytest.approx(8)
    assert [op["flop"] for op in rows["ALL"]["ops"]] == [op.flop for op in ane.inspect(fake_core_ml).ops]
    assert all(set(given) == {"x"} for given in FakeModel.given)


def test_what_a_model_asks_is_told_of_the_model_that_was_read(
    fake_core_ml: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is replaced after it was read does not mix with what was measured of the first."""
    package = tmp_path / "m.mlpackage"
    ane.save(ane.load(fake_core_ml), package)
    expected = features_of(ane.load(package), None, compute_plan.host())

    def compiled(path: str) -> tuple[str, float]:
        package.rename(tmp_path / "away.mlpackage")
        return path, 0.5

    monkeypatch.setattr(core_ml_runs, "compile_model", compiled)
    plain = measure(str(package), Target.parse("M4/macOS 15"), runs=20)
    assert expected is not None
    assert plain["asks"] == expected


def test_a_network_asks_nothing(tmp_path: Path) -> None:
    path = tmp_path / "n.mlmodel"
    path.write_bytes(build().SerializeToString())
    assert program_of(Predictor(path)) is None


def test_a_slow_model_is_not_run_for_ever(fake_core_ml: Program) -> None:
    found = core_ml_runs.time_model("m.mlmodelc", "CPU_ONLY", {}, runs=1000, seconds=0.5)
    assert core_ml_runs.LEAST_PREDICTIONS <= found.predictions.count < 100


def test_nothing_measured_is_an_error(
    fake_core_ml: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ane.save(ane.load(fake_core_ml), tmp_path / "m.mlpackage")
    with pytest.raises(SurgeryError, match="measures nothing of .*the GPU is taken"):
        measure(str(tmp_path / "m.mlpackage"), Target.parse("M4"), settings=["CPU_AND_GPU"])


def test_off_a_mac_measuring_is_refused_in_words(tmp_path: Path) -> None:
    if compute_plan.available():
        pytest.skip("this is a Mac")
    with pytest.raises(SurgeryError, match=r"Core ML's plan needs macOS 14\.4"):
        measure(tmp_path / "m.mlpackage", Target.parse("M1"))


@pytest.mark.parametrize(
    ("unit", "correction", "words"),
    [
        ("ane", '"factor": 1.2, "off": 1.1, "cases": Infinity', "infinity"),
        ("ane", '"factor": 1.2, "off": 1.1, "cases": 0', "cases=0"),
        ("ane", '"factor": Infinity, "off": 1.1, "cases": 1', "factor=inf"),
        ("ane", '"factor": 1.2, "off": Infinity, "cases": 1', "off=inf"),
        ("gpuu", '"factor": 1.2, "off": 1.1, "cases": 1', "the unit 'gpuu' is not ane or cpu"),
    ],
)
def test_corrections_out_of_range_are_refused(tmp_path: Path, unit: str, correction: str, words: str) -> None:
    path = tmp_path / "r.json"
    rates = f'{{"conv": {{"{unit}": {{{correction}}}}}}}'
    path.write_text(f'{{"format": "anesurgery.rates/1", "hosts": [], "rates": {rates}}}', encoding="utf-8")
    with pytest.raises(LoadError, match=words):
        read_corrections(path)


@pytest.mark.parametrize(
    ("hosts", "op", "words"),
    [
        ('"Apple M2"', "conv", "its hosts are 'Apple M2', expected a list"),
        ("[]", "cnov", "unknown op type 'cnov'; did you mean 'conv'"),
        ("[]", "nosuchthing", "unknown op type 'nosuchthing'; "),
    ],
)
def test_tables_that_would_have_no_effect_are_refused(tmp_path: Path, hosts: str, op: str, words: str) -> None:
    path = tmp_path / "r.json"
    text = f'{{"format": "anesurgery.rates/1", "hosts": {hosts}, "rates": {{"{op}": {{}}}}}}'
    path.write_text(text, encoding="utf-8")
    with pytest.raises(LoadError, match=words) as told:
        read_corrections(path)
    assert len(str(told.value)) < 300


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": "other"}', '{"format": "anesurgery.plan/1", "host": "a"}']
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(LoadError, match="anesurgery measure"):
        read_plan(path)
    with pytest.raises(LoadError, match="anesurgery learn"):
        read_corrections(path)
