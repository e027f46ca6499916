"""Times: the table is what the script writes, bands, reasons for none, ratios, and wrong versions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.mil import Program, ct, mb, types
from anesurgery.placement.durations import Time, change
from anesurgery.placement.target import Target
from anesurgery.placement.timing import Load, OpLoad, table, time_of

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import latency

M4 = Target.parse("M4")


def told(*ops: OpLoad, target: Target = M4) -> Time:
    time = time_of(Load(ops), target)
    assert isinstance(time, Time)
    return time


def program(decoded: bool = False) -> Program:
    weight = np.zeros((512, 512, 1, 1), np.float16)

    @mb.program(input_specs=[mb.TensorSpec((1, 512, 64, 64), types.fp16)], opset_version=ct.target.iOS16)
    def built(x: Any) -> Any:
        if not decoded:
            return mb.conv(x=x, weight=weight)
        codes = np.zeros(512 * 512 // 8, np.uint8)
        lut = mb.constexpr_lut_to_dense(
            indices=codes, lut=np.array([0, 1], np.float16), shape=np.array([512, 512, 1, 1], np.uint32)
        )
        return mb.conv(x=x, weight=lut)

    return built


def test_the_table_is_what_the_script_fits() -> None:
    features = latency.read_features()
    rows = [r for r in latency.read_rows() if latency.key_of(r) in features]
    stored = table()
    values = stored["long"], stored["fixed_us"]["13"], stored["fixed_us"]["17"]
    fitted = latency.fit_with(rows, features, latency.bandwidths(rows, features), *values)
    assert fitted == {k: stored[k] for k in fitted}


def off(factors: dict[str, Any], heads: bool = False) -> float:
    features = latency.read_features()
    rows = latency.usable(latency.read_rows(), features, factors)
    rows = [r for r in rows if r["model"].startswith(latency.READS_WEIGHTS) == heads]
    return float(np.exp(np.median(np.abs(latency.errors(rows, features, factors)))))


def test_wrong_tables_are_far_off() -> None:
    plain = table()
    dearer = {k: v * 1.5 for k, v in plain["factor"].items()}
    blind = dict.fromkeys(plain["bandwidth"], 1e9)
    assert off(plain) < 1.25 < off(plain | {"factor": dearer})
    assert off(plain, heads=True) < 1.05 < 1.5 < off(plain | {"bandwidth": blind}, heads=True)


def test_parts_add_up_and_weights_are_read() -> None:
    time = told(OpLoad("linear", 10.0, weight=64_190_000), OpLoad("relu", 100.0, count=3))
    assert time.low < time.ms < time.high
    assert sum(time.parts.values()) == pytest.approx(time.ms)
    assert time.parts["weights"] + time.parts["products"] == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    ("target", "units", "words"),
    [("any", None, "name one chip"), ("M4", "ALL", "CPU_AND_NE only"), ("A13", None, "no published time")],
)
def test_none_with_a_reason(target: str, units: str | None, words: str) -> None:
    inspection = ane.inspect(program(), target, compute_units=units)
    assert inspection.time is None
    assert any(note.startswith("no time: ") and words in note for note in inspection.notes)


def test_compressed_weights_have_no_time() -> None:
    inspection = ane.inspect(program(decoded=True), "M4")
    assert inspection.time is None
    assert any("constexpr_lut_to_dense" in note for note in inspection.notes)


def test_an_inspection_has_a_time_and_shows_it() -> None:
    inspection = ane.inspect(program(), "M4")
    assert inspection.time is not None
    assert inspection.to_json()["time"]["ms"] == inspection.time.ms
    assert f"time {inspection.time}" in str(inspection)


def test_equal_sides_have_a_ratio_of_one() -> None:
    side = told(OpLoad("conv", 900.0))
    same = change(side, side)
    assert (same.ratio, same.low, same.high) == pytest.approx((1, 1, 1))
    assert same.verdict == "no difference that this can tell"


def test_common_errors_cancel_and_others_do_not() -> None:
    whole, half = told(OpLoad("conv", 1000.0)), told(OpLoad("conv", 500.0))
    other = told(OpLoad("matmul", 900.0))
    assert change(whole, half).verdict.startswith("faster by 2")
    assert change(half, whole).verdict.startswith("slower by 2")
    assert change(whole, other).verdict == "no difference that this can tell"
    wide = change(whole, other)
    assert wide.low < wide.ratio < wide.high


def test_a_surgery_says_both_times() -> None:
    surgery = ane.apply(program(), "auto", target="M4")
    assert surgery.time is not None
    assert str(surgery.time) in " ".join(str(surgery).split())
