"""A part of the measured placements: every sixth record of the open data set."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.first

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "placement" / "accuracy.py"


@pytest.fixture(scope="module")
def accuracy() -> ModuleType:
    """The benchmark, whose data may be absent."""
    spec = importlib.util.spec_from_file_location("placement_accuracy", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    if str(SCRIPT.parent) not in sys.path:
        sys.path.append(str(SCRIPT.parent))  # its neighbour `left_out`
    spec.loader.exec_module(module)
    if not module.DATA.is_dir():
        pytest.skip(f"the measured placements are not beside this checkout ({module.DATA.name}/ absent)")
    return module


@pytest.mark.slow
def test_measured_placements(accuracy: Any) -> None:
    build = accuracy.builder()
    verdicts = [v for case, record in accuracy.cases(6) for v in accuracy.judge(build, case, record)]
    for kind, least in (("legal", 0.98), ("preferred alone", 0.95), ("preferred in a graph", 0.95)):
        own = [v for v in verdicts if v.kind == kind]
        wrong = [v for v in own if not v.right]
        assert len(own) >= 20
        assert len(wrong) <= (1 - least) * len(own), wrong


PAGE = SCRIPT.parents[3] / "docs" / "accuracy.md"


def test_the_page_is_written_by_the_script(accuracy: Any) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.startswith(accuracy.HEAD)
    titles = [line for line in page.splitlines() if line.startswith("## ")]
    assert titles == ["## " + title for title in TITLES]


TITLES = (
    "Single ops and small graphs, M4/macOS 27",
    "Misses",
    "Time estimates: largest error factor",
    "Corpus, M4/macOS 27",
    "Zoo, M4 Pro/macOS 26",
)


@pytest.mark.slow
def test_the_figures_of_the_page_are_those_of_the_script(accuracy: Any) -> None:
    """All but those of the zoo, which takes minutes to build."""
    build, points, page = accuracy.builder(), list[Any](), PAGE.read_text(encoding="utf-8")
    verdicts = [v for case, record in accuracy.cases() for v in accuracy.judge(build, case, record, points)]
    tables = [accuracy.accuracy(verdicts), accuracy.misses(verdicts), accuracy.left_out.estimates(points)]
    for table in (*tables, accuracy.corpus()):
        assert accuracy.markdown(table) in page


def test_estimates_are_checked_on_cases_that_were_left_out(accuracy: Any) -> None:
    """Three cases of one rate and one twice as slow: each is judged by the others, none by itself."""
    module = accuracy.left_out
    made = [
        module.Point("conv", "ane", 16.0, published, 1.0 + i / 100) for i, published in enumerate((1, 1, 1, 2))
    ]
    made += [module.Point("linear", "cpu", 0.3, 5.0, 5.0), made[0]]
    rows = list(zip(*(column.cells for column in module.estimates(made).columns), strict=True))
    assert [row[:3] for row in rows] == [("conv", "ANE", "4"), ("linear", "CPU", "1")]
    inside, outside = float(rows[0][3]), float(rows[0][4])
    assert 1.9 < inside < outside < 2.1
    assert rows[1][4:] == ("-", "1")  # one case alone is not checked
