"""For which chips and models the layout of Apple's transformers was measured to help."""

from __future__ import annotations

from pathlib import Path

import pytest

from anesurgery.errors import Refusal
from anesurgery.placement.evidence import Grade
from anesurgery.placement.rules.finds_sequence_layout import MEASUREMENTS, deciding_measurements
from anesurgery.placement.target import Target

PAGE = Path(__file__).resolve().parents[2] / "docs" / "remedies.md"


@pytest.mark.parametrize("text", ["M1", "M1/macOS 14", "M1 Max/macOS 15", "A15/iOS 17", "m1 max"])
def test_rows_decide_for_the_chips_that_they_name(text: str) -> None:
    rows = deciding_measurements(Target.parse(text))
    assert not isinstance(rows, Refusal)
    assert all(row.source and row.grade in (Grade.MEASURED, Grade.DOCUMENTED) for row in rows)
    assert ("DistilBERT went from 55 to 8.7 ms" in str(rows[0])) == text.lower().startswith("m1")


@pytest.mark.parametrize(
    ("text", "chip"),
    [
        ("M1 Pro", "M1 Pro"),
        ("M1 Ultra/macOS 14", "M1 Ultra"),
        ("A14", "A14"),
        ("M2", "M2"),
        ("M4 Pro/macOS 26", "M4 Pro"),
        ("M1-M3", "M2 and"),
        ("any", "A12 and"),
        ("iPhone/iOS 17", "A12 and"),
    ],
)
def test_what_one_chip_did_says_nothing_of_others(text: str, chip: str) -> None:
    found = deciding_measurements(Target.parse(text))
    assert isinstance(found, Refusal)
    assert found.reason.startswith(f"no measurement says that the layout helps on {chip}")


@pytest.mark.parametrize("units", ["ALL", "CPU_AND_GPU", "CPU_ONLY"])
def test_it_is_for_the_neural_engine_alone(units: str) -> None:
    found = deciding_measurements(Target.parse("M1", units))
    assert isinstance(found, Refusal)
    assert "slower on the GPU" in found.reason


def test_the_page_has_each_row() -> None:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    for row in MEASUREMENTS:
        given = f"| {row.kind} | {row.figure} | {row.where} | {row.grade.value}: {row.source} | "
        (line,) = [line for line in lines if line.startswith(given)]
        decides = line.removeprefix(given)
        assert decides == f"{', '.join(row.chips)} |" if row.chips else decides.startswith("no chip: ")
