"""A part of the equivalence run: every pass on programs that coremltools' own tests build, compared."""

from __future__ import annotations

from typing import Any

import pytest
import run

pytestmark = pytest.mark.first


@pytest.fixture(scope="module")
def suites(tmp_path_factory: pytest.TempPathFactory) -> Any:
    options = ["--sample", "12", "--every", "96", "--passes", "all"]
    return run.run_suites(["torch", "ops", "passes"], tmp_path_factory.mktemp("rewritten"), options)


def test_no_pass_of_ours_makes_a_program_wrong(suites: Any) -> None:
    rewritten = [one for rows in suites.values() for row in rows for one in row["rewriting"]]
    assert [one for one in rewritten if one["outcome"] in ("wrong", "crash")] == []
    assert sum(one["changes"] for one in rewritten) > 0
