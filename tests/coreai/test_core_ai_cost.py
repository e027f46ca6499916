"""Translating GPT-2 with 124 million weights takes little memory; `benchmarks/core_ai_cost.py` times it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from core_ai_models import needs_core_ai

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
import core_ai_cost

pytestmark = [needs_core_ai, pytest.mark.slow]

SHARE = 1.5
"""Resident memory beside that of the imports, as a share of the weights; pages that map the package count."""


def test_gpt2_is_translated_in_little_memory(tmp_path: Path) -> None:
    package = tmp_path / "gpt2.mlpackage"
    weights = core_ai_cost.gpt2(package)
    assert weights > 2 * 123e6
    assert core_ai_cost.translating(package, tmp_path / "gpt2.aimodel")["bytes"] <= SHARE * weights
