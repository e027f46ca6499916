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
    spec.loader.exec_module(module)
    if not module.DATA.is_dir():
        pytest.skip(f"the measured placements are not beside this checkout ({module.DATA.name}/ absent)")
    return module


def test_measured_placements(accuracy: Any) -> None:
    build = accuracy.builder()
    verdicts = [v for case, record in accuracy.cases(6) for v in accuracy.judge(build, case, record)]
    for kind, least in (("legal", 0.98), ("preferred alone", 0.95), ("preferred in a graph", 0.95)):
        own = [v for v in verdicts if v.kind == kind]
        wrong = [v for v in own if not v.right]
        assert len(own) >= 20
        assert len(wrong) <= (1 - least) * len(own), wrong
