"""A part of the conformance run on neural networks: coremltools' own tests of the older format."""

from __future__ import annotations

from typing import Any

import pytest
import report
import run

pytestmark = pytest.mark.first


@pytest.fixture(scope="module", params=["11", pytest.param("1", marks=pytest.mark.slow)])
def networks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Their rows; of many networks of one test, every so-many-th is rewritten too."""
    options = ["--sample", "12", "--every", "5", "--passes", "neuralnetwork_ane"]
    options += ["--passes-stride", request.param]
    folder = tmp_path_factory.mktemp("networks")
    return run.run_suites(["neural_network", "network_ops"], folder, options)


@pytest.mark.parametrize(("name", "most"), [("neural_network", 45), ("network_ops", 80)])
def test_neural_networks_are_imported_and_computed(networks: Any, name: str, most: int) -> None:
    groups = [report.group(row) for row in networks[name]]
    wrong = [r for r in networks[name] if report.group(r) in ("failed", "before a prediction")]
    reasons = "\n".join(f"{row['test']}: {row['reason']}" for row in wrong)
    assert groups.count("passed") > most
    assert len(wrong) <= 0.05 * (len(wrong) + groups.count("passed")), reasons


def test_no_layer_pass_makes_a_network_wrong(networks: Any) -> None:
    rewritten = [one for rows in networks.values() for row in rows for one in row["rewriting"]]
    assert [one for one in rewritten if one["outcome"] in ("wrong", "crash")] == []
    assert sum(one["changes"] for one in rewritten) > 50


def test_networks_are_compared_closely(networks: Any) -> None:
    print(report.table(networks))
    rows = [row for rows in networks.values() for row in rows if report.group(row) == "passed"]
    assert sum(row["compared"] > 0 for row in rows) > 0.8 * len(rows)
    loose = [row["test"] for row in rows if report.loose(row) and not report.known_loose(row)]
    assert len(loose) <= 0.05 * len(rows), loose
