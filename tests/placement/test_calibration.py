"""Measured files become rows, the fit moves, and files that tell nothing are refused in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_core_ml import install
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands.app import app
from anesurgery.errors import LoadError, SurgeryError
from anesurgery.mil import Program
from anesurgery.placement import timing
from anesurgery.placement.calibration import calibrate, estimate, fit
from anesurgery.placement.measured_rows import Row, chip_of, read_row
from anesurgery.placement.timing import Load, OpLoad

RUN = CliRunner()


@pytest.fixture
def fake_core_ml(monkeypatch: pytest.MonkeyPatch) -> Program:
    """Core ML of a Mac that is not there: plans, compiling, loads and predictions."""
    return install(monkeypatch)


@pytest.fixture
def measured(fake_core_ml: Program, tmp_path: Path) -> Path:
    """What `measure` writes of a model with the fake Core ML: 2 ms on an M4."""
    package, folder = tmp_path / "m.mlpackage", tmp_path / "sent"
    folder.mkdir()
    ane.save(ane.load(fake_core_ml), package)
    written = RUN.invoke(
        app, ["measure", str(package), "--out", str(folder / "m.json"), "--target", "M4", "--runs", "20"]
    )
    assert written.exit_code == 0, written.output
    return folder


def test_a_measurement_is_a_row(measured: Path) -> None:
    row = read_row(measured / "m.json")
    assert (row.model, row.chip, row.family) == ("m.mlpackage", "M4", 16)
    assert row.ms == pytest.approx(2)
    assert [op.op_type for op in row.load.ops] == ["relu", "conv"]
    assert sum(op.count for op in row.load.ops) == 6


def test_calibrate_writes_a_table_that_inspect_uses(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "times.json"
    shown = RUN.invoke(app, ["calibrate", str(measured), "--out", str(out)])
    assert shown.exit_code == 0, shown.output
    assert "m.mlpackage" in shown.output
    assert f"{timing.VARIABLE}=" in shown.output
    plain = ane.inspect(tmp_path / "m.mlpackage", "M4").time
    monkeypatch.setenv(timing.VARIABLE, str(out))
    mine = ane.inspect(tmp_path / "m.mlpackage", "M4").time
    assert plain is not None
    assert mine is not None
    assert plain.ms < mine.ms < 2.5  # the row is 2 ms: the table moved towards it
    assert "docs/measurements: m.json" in mine.source
    again = RUN.invoke(app, ["calibrate", str(measured), "--out", str(out)])
    assert "exists" in str(again.exception)


def test_what_changed_is_said_as_data(measured: Path) -> None:
    (measured / "other.json").write_text("{}", encoding="utf-8")
    found = calibrate(measured).to_json()
    (added,) = found["added"]
    assert abs(added["after"] - 2) < abs(added["before"] - 2)
    fixed = found["changed"]["fixed cost of H16, us"]
    assert fixed["after"] > 1.5 * fixed["before"]  # 2 ms, of which the ops explain a few microseconds
    alone = found["changed"]["each model of yours left out: median error"]
    assert alone["before"] == alone["after"]  # of one model nothing is left to fit to
    (why,) = found["skipped"]
    assert "other.json is no measurement" in why


def rows(chip: str, ms_of_us: float, us: list[float], fixed: float = 0.1) -> list[Row]:
    loads = [Load((OpLoad("conv", one),)) for one in us]
    return [
        Row(f"m{i}", chip, fixed + ms_of_us * one, "made here", "CPU_AND_NE", load)
        for i, (one, load) in enumerate(zip(us, loads, strict=True))
    ]


def test_many_rows_decide_and_one_row_does_not() -> None:
    """One row at a fifth of the rest: a free factor would follow it, and so would the next model."""
    published = timing.table()
    odd = fit(rows("M4", 0.0001, [90_000.0]), published)
    assert odd["factor"]["16"] > 2 * 0.1
    many = fit(rows("M4", 0.0002, [1000.0 * n for n in range(20, 60)]), published)
    assert many["factor"]["16"] == pytest.approx(0.2, rel=0.25)
    assert many["deviation"]["16"] < odd["deviation"]["16"] < published["deviation"]["16"]
    assert {k: many["factor"][k] for k in ("13", "17")} == {k: published["factor"][k] for k in ("13", "17")}


def test_a_model_that_was_left_out_is_nearer_after() -> None:
    published, mine = timing.table(), rows("M4", 0.0003, [2000.0 * n for n in range(1, 12)])
    kept, (out,) = mine[:-1], mine[-1:]
    off = [abs(out.ms - (estimate(out, numbers) or 0)) for numbers in (published, fit(kept, published))]
    assert off[1] < 0.6 * off[0]


def test_a_generation_that_the_table_lacks_gets_numbers() -> None:
    published = timing.table()
    less = {**published, "factor": {k: v for k, v in published["factor"].items() if k != "17"}}
    mine = rows("M5", 0.0004, [2000.0 * n for n in range(1, 12)])
    assert estimate(mine[0], less) is None
    assert fit(mine, less)["factor"]["17"] == pytest.approx(0.4, rel=0.15)


def setting(plain: dict[str, Any]) -> dict[str, Any]:
    return next(row for row in plain["settings"] if row["compute_units"] == "CPU_AND_NE")


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "schema": (lambda p: p.update(format="other/1"), "its format is 'other/1'"),
    "NaN": (lambda p: setting(p)["timing"]["predictions"].update(median=float("nan")), "no time above 0"),
    "infinite": (
        lambda p: setting(p)["timing"]["predictions"].update(median=float("inf")),
        "its median is inf",
    ),
    "text": (lambda p: setting(p)["timing"]["predictions"].update(median="fast"), "could not convert"),
    "chip": (lambda p: p.update(host="Intel(R) Core(TM) i7, macOS 15.3"), "names no chip that is known"),
    "no time": (lambda p: setting(p).update(timing=None, error="it does not load"), "it does not load"),
    "no setting": (lambda p: p.update(settings=[]), "it was not measured"),
    "no model": (lambda p: p.update(asks=None), "measure an ML Program with this version"),
    "no ops": (lambda p: p["asks"].update(ops=[]), "has no ops"),
    "negative": (lambda p: p["asks"]["ops"][0].__setitem__(1, -1.0), "negative"),
    "other plan": (
        lambda p: [op.update(unit="cpu") for op in setting(p)["ops"]],
        "gives 0 of 6 ops to the Neural Engine",
    ),
}


@pytest.mark.one_of(6)
@pytest.mark.parametrize("name", WRONG)
def test_files_that_tell_nothing_are_refused(name: str, measured: Path) -> None:
    path = measured / "m.json"
    plain = json.loads(path.read_text(encoding="utf-8"))
    change, words = WRONG[name]
    change(plain)
    path.write_text(json.dumps(plain), encoding="utf-8")
    with pytest.raises(LoadError, match=words):
        read_row(path)
    with pytest.raises(SurgeryError, match="nothing to calibrate with"):
        calibrate(measured)


def test_a_folder_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SurgeryError, match="is no folder"):
        calibrate(tmp_path / "none")
    with pytest.raises(SurgeryError, match=r"it holds no \.json"):
        calibrate(tmp_path)


@pytest.mark.parametrize(
    ("host", "chip"),
    [
        ("Apple M4 Pro, macOS 26.1", "M4 Pro"),
        ("Apple M1, macOS 15.3", "M1"),
        ("x86_64, macOS 14.4", None),
        ("Apple M99", None),
    ],
)
def test_the_chip_of_a_host(host: str, chip: str | None) -> None:
    assert chip_of(host) == chip
