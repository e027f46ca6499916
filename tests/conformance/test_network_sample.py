"""A part of the conformance run on neural networks: coremltools' own tests of the older format."""

from __future__ import annotations

from typing import Any

import pytest
import report
import run

pytestmark = [pytest.mark.first, pytest.mark.slow]
"""A thousand predictions take half a minute; the tests of layers compare each layer in every run."""


MOST = {"neural_network": 225, "network_ops": 400}
"""Suite -> more tests than this pass; on each run the first alone, since to collect another takes as long."""


@pytest.fixture(scope="module", params=[20, 5])
def every(request: pytest.FixtureRequest) -> int:
    """Of the tests, every so-many-th."""
    return int(request.param)


@pytest.fixture(scope="module")
def networks(every: int, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Their rows; where they are few, of many networks of one test every 11th is rewritten too."""
    options = ["--sample", "12", "--every", str(every), "--passes", "neuralnetwork_ane"]
    options += ["--passes-stride", "11" if every > 5 else "1"]
    folder = tmp_path_factory.mktemp("networks")
    return run.run_suites(list(MOST)[: 1 if every > 5 else None], folder, options)


def test_neural_networks_are_imported_and_computed(networks: Any, every: int) -> None:
    for name, rows in networks.items():
        groups = [report.group(row) for row in rows]
        wrong = [r for r in rows if report.group(r) in ("failed", "before a prediction")]
        reasons = "\n".join(f"{row['test']}: {row['reason']}" for row in wrong)
        assert groups.count("passed") > MOST[name] / every
        assert len(wrong) <= 0.05 * (len(wrong) + groups.count("passed")), reasons


def test_no_layer_pass_makes_a_network_wrong(networks: Any, every: int) -> None:
    rewritten = [one for rows in networks.values() for row in rows for one in row["rewriting"]]
    assert [one for one in rewritten if one["outcome"] in ("wrong", "crash")] == []
    assert sum(one["changes"] for one in rewritten) > 250 / every


def test_networks_are_compared_closely(networks: Any) -> None:
    print(report.table(networks))
    rows = [row for rows in networks.values() for row in rows if report.group(row) == "passed"]
    assert sum(row["compared"] > 0 for row in rows) > 0.8 * len(rows)
    loose = [row["test"] for row in rows if report.loose(row) and not report.known_loose(row)]
    assert len(loose) <= 0.05 * len(rows), loose
