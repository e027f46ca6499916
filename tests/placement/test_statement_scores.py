"""The score of public statements: a representative part is answered, and answered right."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from statements_of_models import DYNAMIC, PLACED, SIZES
from statements_of_ops import WINDOWS

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "placement" / "statement_scores.py"
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


def test_a_part_of_the_statements(scores: ModuleType) -> None:
    score = scores.scored(PART)
    assert score.precision >= 0.97, score.wrong
    assert score.coverage >= 0.72


def test_a_wrong_answer_is_counted(scores: ModuleType) -> None:
    row = next(row for row in WINDOWS if row.seen is False and row.sure)
    score = scores.scored([row, dataclasses.replace(row, seen=True)])
    assert (score.answered, score.precision, score.wrong) == (2, 0.5, (row.name,))
