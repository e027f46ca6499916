"""A part of `make conformance-coreai`: random ops through Apple's runtime, and the page of the whole run."""

from __future__ import annotations

import json
from pathlib import Path

import core_ai_agreement as agreement
import core_ai_judge as judge
import numpy as np
import pytest
from core_ai_models import needs_core_ai
from random_ops import RECIPES

PAGE = Path(__file__).parents[2] / "docs" / "core-ai-agreement.md"


@needs_core_ai
def test_random_ops_mean_the_same_to_apple(tmp_path: Path) -> None:
    judge.random_cases(tmp_path, 1, sorted(RECIPES)[::12])
    found = {"random": list(judge.verdicts(tmp_path, judge.run_all(tmp_path)))}
    assert sum(one.result == judge.AGREES for one in found["random"]) > 15
    assert agreement.unexplained(found) == []


def test_the_page_is_made_of_the_counts() -> None:
    counts = json.loads(agreement.COUNTS.read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == agreement.text(counts)
    assert not counts["rows"].get("unexplained")


@pytest.mark.parametrize("found", [[1.0, 2.1], [1.0, np.nan], [1.0, np.inf], [1.0], [[1.0, 2.0]]])
def test_another_number_is_no_agreement(found: list[float]) -> None:
    assert (
        judge.compared("case", ("add",), {"y": np.array([1.0, 2.0])}, {"y": np.array(found)}).result
        == "differs"
    )


def test_the_same_numbers_agree_nan_and_infinities_too() -> None:
    values = np.array([np.nan, np.inf, -np.inf, 1.0])
    assert judge.compared("case", ("add",), {"y": values}, {"y": values.copy()}).result == "agrees"
    assert judge.compared("case", ("add",), {"y": values}, {}).why == "no output y"
