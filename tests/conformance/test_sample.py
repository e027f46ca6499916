"""A part of the conformance run: coremltools' own tests, with the numbers that they compare on a Mac.

And of the equivalence run: every pass on some of the programs that they build, compared.
"""

from __future__ import annotations

from typing import Any

import pytest
import report
import run

pytestmark = [pytest.mark.first, pytest.mark.slow]
"""A child that imports and collects all takes half a minute; tests/interpret compares each op in every run."""


@pytest.fixture(scope="module", params=[144, 12])
def every(request: pytest.FixtureRequest) -> int:
    """Of the tests, every so-many-th."""
    return int(request.param)


@pytest.fixture(scope="module")
def suites(every: int, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Their rows; passes are tried on every 144th test. To find the tests of others than ops takes long."""
    options = ["--sample", "12", "--every", str(every), "--both-sources"]
    options += ["--passes", "all", "--passes-every", str(144 // every)]
    names = ["ops", *(["passes", "torch"] if every < 24 else [])]
    return run.run_suites(names, tmp_path_factory.mktemp("conformance"), options)


def test_nearly_all_pass(suites: Any, every: int) -> None:
    print(report.table(suites))
    rows = [row for rows in suites.values() for row in rows]
    failed = [row for row in rows if report.group(row) == "failed"]
    passed = [row for row in rows if report.group(row) == "passed"]
    assert len(passed) > 1200 * len(suites) / every
    assert len(failed) <= 0.01 * len(passed), "\n".join(f"{r['test']}: {r['reason']}" for r in failed)


def test_they_do_compare_numbers_and_closely(suites: Any, every: int) -> None:
    rows = [row for rows in suites.values() for row in rows if report.group(row) == "passed"]
    assert sum(row["predictions"] > 0 for row in rows) > 800 * len(suites) / every
    loose = [row["test"] for row in rows if report.loose(row)]
    assert len(loose) <= 0.01 * len(rows), loose


def test_what_only_passes_as_half_floats_is_counted_and_rare(suites: Any) -> None:
    rows = [row for rows in suites.values() for row in rows if report.group(row) == "passed"]
    held = [row["test"] for row in rows if report.held_to_half(row)]
    assert len(held) <= 0.01 * len(rows), held
    shown = report.listing({"held": [{**rows[0], "half": 2, "error": 2 * report.HALF}]})
    assert "off by 2.0 units in the last place of fp16" in shown
    assert rows[0]["test"] in shown


def test_no_pass_of_ours_makes_a_program_wrong(suites: Any) -> None:
    rewritten = [one for rows in suites.values() for row in rows for one in row["rewriting"]]
    assert [one for one in rewritten if one["outcome"] in ("wrong", "crash")] == []
    assert sum(one["changes"] for one in rewritten) > 0
