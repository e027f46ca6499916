"""The score of public statements: a representative part is answered, and answered right."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from statements_of_models import DYNAMIC, PLACED, SIZES
from statements_of_ops import WINDOWS
from statements_of_reports import REPORTS, Report

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "placement" / "statement_scores.py"
LATER = Path(__file__).resolve().parents[3] / "shared" / "placement" / "reports2_open.json"
PART = [*PLACED[::3], *DYNAMIC[::3], *SIZES[::3], *WINDOWS[::6]]


@pytest.fixture(scope="module")
def scores() -> ModuleType:
    spec = importlib.util.spec_from_file_location("statement_scores", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_part_of_the_statements(scores: ModuleType) -> None:
    score = scores.scored(PART)
    assert score.precision >= 0.97, score.wrong
    assert score.coverage >= 0.72


def test_a_wrong_answer_is_counted(scores: ModuleType) -> None:
    row = next(row for row in WINDOWS if row.seen is False and row.sure)
    score = scores.scored([row, dataclasses.replace(row, seen=True)])
    assert (score.answered, score.precision, score.wrong) == (2, 0.5, (row.name,))


def test_later_reports_are_not_contradicted_and_what_is_not_known_has_a_reason(scores: ModuleType) -> None:
    answers = list(scores.of_reports(REPORTS))
    assert [a.name for a in answers if a.verdict == "contradicted"] == []
    assert [a.name for a in answers if a.verdict == "unknown" and not a.why] == []
    assert sum(a.verdict == "agreed" for a in answers) >= 36


def test_each_later_report_has_a_row() -> None:
    if not LATER.is_file():
        pytest.skip("the later reports are not beside this checkout")
    rows = json.loads(LATER.read_text(encoding="utf-8"))
    assert sorted(report.id for report in REPORTS) == sorted(row["id"] for row in rows)


def test_a_row_asks_or_says_why_not() -> None:
    assert all(bool(r.asked) + bool(r.silent) + bool(r.outside) == 1 for r in REPORTS)


def test_a_report_that_is_contradicted_is_noticed(scores: ModuleType) -> None:
    """The wrong version: another answer is expected."""
    row = next(r.asked[0] for r in REPORTS if r.id == "R049")
    wrong = Report("wrong", (dataclasses.replace(row, seen="ane"),))
    (answer,) = scores.of_reports([wrong])
    assert answer.verdict == "contradicted"
