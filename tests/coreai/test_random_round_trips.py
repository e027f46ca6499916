"""Random programs become Core AI models and come back: the same numbers in every bit."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import core_ai_trips
import pytest
from core_ai_models import needs_core_ai
from random_ops import RECIPES, Sample, dtypes_of, latest, sample

from anesurgery.coreai import values
from anesurgery.coreai.lowerings import TABLE, elementwise

pytestmark = needs_core_ai

FEW, MANY = 40, 3
"""Op types that are tried in every run, and programs of each op in the long one: 400."""


def groups(op_types: list[str], count: int) -> list[list[Sample]]:
    """Programs of an opset each; an input of Core ML is no scalar."""
    found: dict[Any, list[Sample]] = defaultdict(list)
    for op_type in op_types:
        for i in range(count):
            fp32 = ("fp32",) if "fp32" in dtypes_of(op_type, latest(op_type)) else ()
            one = sample(op_type, f"trip.{i}", fp32)
            if all(operand.shape for operand in one.operands.values()):
                found[one.function.opset_version].append(one)
    return list(found.values())


def test_some_come_back(tmp_path: Path) -> None:
    op_types = sorted(RECIPES)[:: len(RECIPES) // FEW]
    apart = [words for some in groups(op_types, 1) for words in core_ai_trips.differing(some, tmp_path)]
    assert apart == []


@pytest.mark.slow
@pytest.mark.parametrize("op_type", sorted(RECIPES))
def test_they_come_back(op_type: str, tmp_path: Path) -> None:
    apart = [words for some in groups([op_type], MANY) for words in core_ai_trips.differing(some, tmp_path)]
    assert apart == []


def test_a_wrong_meaning_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLE, "sign", lambda x: -elementwise.sign(x))
    (some, *_) = groups(["sign"], 2)
    assert list(core_ai_trips.differing(some, tmp_path))


def test_chains_of_ops_come_back(tmp_path: Path) -> None:
    assert core_ai_trips.chains_that_differ(core_ai_trips.chains(200), tmp_path) == []


def test_constants_that_are_joined_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_would_be_fused", lambda *_: False)
    assert core_ai_trips.chains_that_differ(core_ai_trips.chains(5), tmp_path)
