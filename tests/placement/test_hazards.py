"""Numeric hazards: each is named, its twin is not, and what repairs it brings the numbers back."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from hazard_graphs import HAZARDS, Hazard
from hazard_page import GOOD, decibels, exact, page, repaired
from published_values import PUBLISHED, Published, ours

import anesurgery as ane
from anesurgery.interpret import run
from anesurgery.mil import Program

MOVE_THE_LIMIT = {"halve_exponent", "scale_powers"}
"""Repairs after which what is not bounded overflows later, and not never."""
PAGE = Path(__file__).resolve().parents[2] / "docs" / "hazards.md"


def named(hazard: Hazard, program: Program) -> set[str]:
    """The numeric findings of a program."""
    found = ane.inspect(program, target=hazard.target)
    return {f.rule for f in found.all_findings if f.kind == "numeric"}


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda h: h.name)
def test_it_is_named_with_its_repair(hazard: Hazard) -> None:
    found = [f for f in ane.inspect(hazard.graph, target=hazard.target).all_findings if f.rule == hazard.rule]
    assert found
    if hazard.repair and found[0].remedy:
        assert found[0].remedy == hazard.repair


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda h: h.name)
def test_nothing_is_said_where_it_cannot_happen(hazard: Hazard) -> None:
    assert named(hazard, hazard.twin) == set()


@pytest.mark.parametrize("hazard", [h for h in HAZARDS if h.arithmetic], ids=lambda h: h.name)
def test_the_arithmetic_shows_it(hazard: Hazard) -> None:
    assert decibels(hazard.graph, hazard, hazard.arithmetic) < GOOD


@pytest.mark.parametrize("hazard", [h for h in HAZARDS if h.repair], ids=lambda h: h.name)
def test_the_repair_brings_the_numbers_back(hazard: Hazard) -> None:
    """Also in exact arithmetic, and where no arithmetic here shows the hazard."""
    after = repaired(hazard)
    if not np.isfinite(exact(hazard)).all():  # a row that is masked whole means nothing
        (value,) = run(after, {"x": hazard.inputs}, precision="fp16").values()
        assert np.isfinite(value).all()
        return
    for arithmetic in dict.fromkeys(("fp32", "fp16", "ane", hazard.arithmetic or "ane:M1")):
        assert decibels(after, hazard, arithmetic) >= GOOD, arithmetic


@pytest.mark.parametrize("hazard", [h for h in HAZARDS if h.repair], ids=lambda h: h.name)
def test_safe_numbers_repairs_it_and_leaves_no_finding(hazard: Hazard) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ane.SurgeryWarning)  # it says what the repair costs
        surgery = ane.apply(hazard.graph, "safe_numbers", target=hazard.target, prove="sites", quiet=True)
    assert hazard.repair in {change.pass_name for change in surgery.changes}
    found = {f.rule for f in ane.inspect(surgery.model, target=hazard.target).all_findings}
    assert (hazard.rule in found) is (hazard.repair in MOVE_THE_LIMIT)


def without_decibels(text: str) -> str:
    """A page without what the vector width of a processor may change."""
    return re.sub(r"[\d.]+ % off", "N % off", re.sub(r"\d+ dB", "N dB", text))


def test_the_page_says_what_a_run_gives() -> None:
    assert without_decibels(PAGE.read_text(encoding="utf-8")) == without_decibels(page())


@pytest.mark.parametrize("value", PUBLISHED, ids=lambda v: f"{v.what} {v.measured}")
def test_published_values_are_reproduced_or_said_not_to_be(value: Published) -> None:
    assert (ours(value) == value.measured) is value.reproduced
