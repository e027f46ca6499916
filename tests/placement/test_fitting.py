"""The fit of times: the table is what it gives, left-out rows keep the promises, and wrong fits do not."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from anesurgery.placement.measured_rows import Row, load_from, load_to
from anesurgery.placement.timing import Load, OpLoad, table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "latency.md"
sys.path.append(str(ROOT / "tests" / "benchmarks"))  # last: other folders have modules of the same names
fitting: Any = importlib.import_module("time_fit")
ROWS, PAIRS = fitting.read_rows(), fitting.read_json(fitting.PAIRS)


@pytest.fixture(scope="module")
def left() -> list[Any]:
    return fitting.left_out(ROWS, PAIRS, fitting.KINDS["model"])


def off(found: Sequence[Any]) -> list[float]:
    return [math.exp(abs(one.error)) for one in found]


def test_the_table_is_what_the_fit_gives() -> None:
    stored, fitted = table(), fitting.fit(ROWS, PAIRS, table()["off"]["op"])
    judged_later = {"reach", "unlike", "measurements", "source"}
    assert json.loads(json.dumps(fitted)) == {k: v for k, v in stored.items() if k not in judged_later}


def test_every_row_names_its_source_and_every_used_one_has_features() -> None:
    plain, features = fitting.read_json(fitting.ROWS), fitting.read_json(fitting.FEATURES)
    assert all(row["source"] for row in plain)
    missing = {fitting.key_of(r["model"], r["chip"]) for r in plain if fitting.usable(r)} - features.keys()
    assert not missing
    assert all(pair["source"] for pair in PAIRS)


@pytest.mark.slow
def test_rows_that_were_left_out_are_near(left: list[Any]) -> None:
    coverage = importlib.import_module("latency_page").coverage
    assert len(left) > 40
    assert median(off(left)) < 1.25
    assert np.quantile(off(left), 0.9) < 1.8
    assert 0.70 <= coverage(left, fitting.KINDS["model"]) <= 0.92
    assert fitting.ratios([one.row for one in left], table())[1] == 0


def test_a_table_without_generations_or_rates_of_reading_is_far_off() -> None:
    def errors(numbers: dict[str, Any], whole: bool) -> float:
        return median(off([fitting.judged(row, numbers) for row in ROWS if fitting.is_whole(row) is whole]))

    flat = {**table(), "factor": dict.fromkeys(table()["factor"], 1.5)}
    blind = {**table(), "bandwidth": dict.fromkeys(table()["bandwidth"], 1e9)}
    assert errors(table(), True) < 1.2 < 1.5 < errors(flat, True)
    assert errors(table(), False) < 1.05 < 1.5 < errors(blind, False)


@pytest.mark.slow
def test_bands_that_are_too_narrow_or_too_wide_are_seen(left: list[Any]) -> None:
    reach = fitting.reach_of(left)
    for factor, low, high in ((1.0, 0.70, 0.92), (0.1, 0.0, 0.5), (50.0, 0.95, 1.0)):
        inside = np.mean([abs(one.z) <= factor * reach for one in left])
        assert low <= inside <= high


def synthetic(chip: str, ms: float, us: float, model: str) -> Row:
    return Row(model, chip, ms, "made here", "CPU_AND_NE", Load((OpLoad("conv", us),)))


def test_a_generation_without_much_of_its_own_stays_near_the_line() -> None:
    """One row of M6 at a hundredth of the rest: a free factor would follow it, and so would the next model."""
    table_of = fitting.fit([*ROWS, synthetic("M6", 0.5, 90_000.0, "odd")], PAIRS)
    free, shrunk = 0.5 / 90.0, table_of["factor"]["18"]
    assert shrunk > 20 * free
    assert table_of["deviation"]["18"] > 2 * table_of["deviation"]["17"]


def test_many_rows_of_a_generation_move_its_factor() -> None:
    own = [synthetic("M6", 0.2 * n, 1000.0 * n, f"m{n}") for n in range(20, 40)]
    assert fitting.fit([*ROWS, *own], PAIRS)["factor"]["18"] == pytest.approx(0.2, rel=0.25)


def test_a_load_is_read_back_as_written() -> None:
    load = Load((OpLoad("conv", 2.5, weight=7, chain=True), OpLoad("conv", 2.5, weight=7, chain=True)), 3)
    read = load_from(json.loads(json.dumps(load_to(load))))
    assert read == load.merged()
    assert read.ops[0].count == 2


@pytest.mark.slow
def test_the_page_and_the_table_are_what_the_script_writes() -> None:
    page = importlib.import_module("latency_page").page
    fitted = fitting.fit_all(ROWS, PAIRS)
    assert json.loads(json.dumps(fitted.table)) == table()
    assert page(fitted, []) == PAGE.read_text(encoding="utf-8")
