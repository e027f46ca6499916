"""Each rule of placement says where it is known from: chips and OS in words, a grade, a source."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from anesurgery.placement.evidence import Grade, Rule, Scope
from anesurgery.placement.rules.legality import QUANTIZED_TABLE

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "placement" / "citations.py"


@pytest.fixture(scope="module")
def citations() -> ModuleType:
    spec = importlib.util.spec_from_file_location("placement_citations", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lacks(rule: Rule) -> str:
    """What a rule does not say of its evidence; "" for nothing."""
    if not rule.source.strip() or not re.search(r"\w{3}", rule.source):
        return "source"
    if not rule.because.strip():
        return "sentence"
    measured = rule.grade is Grade.MEASURED and rule.scope.via == "Core ML" and rule.kind == "legality"
    if measured and not re.search(r"macOS|iOS", rule.scope.os) and not re.search(r"\b[AM]\d", rule.scope.os):
        return "chip and OS"
    return ""


def test_each_rule_tells_its_evidence(citations: ModuleType) -> None:
    rules = [rule for rows in citations.every_rule().values() for rule in rows]
    assert len(rules) > 120
    assert not {rule.id: lacks(rule) for rule in rules if lacks(rule)}


@pytest.mark.parametrize(("field", "value"), [("source", " "), ("because", ""), ("scope", Scope())])
def test_a_rule_that_tells_nothing_is_noticed(field: str, value: object) -> None:
    seen = dataclasses.replace(QUANTIZED_TABLE, grade=Grade.MEASURED, kind="legality")
    assert not lacks(seen)
    assert lacks(dataclasses.replace(seen, **{field: value}))  # type: ignore[arg-type]


def test_the_table_has_a_line_for_each_row(citations: ModuleType) -> None:
    rows = sum(map(len, citations.every_rule().values()))
    table = list(citations.lines())
    assert len(table) == rows + 2
    assert all(line.count("|") == 6 for line in table)


FROM: dict[str, tuple[str, str]] = {
    "comp-joint": ("ROUND8_INT8_LUT_PROBE", "M3 Air, macOS 26.0.1"),
    "comp-lut-axis": ("TERNARY_BONSAI", "unnamed Mac"),
    "conv-depthwise-step": ("LFM2_CONVERSION_FINDINGS", "by a script"),
    "topk-m2": ("RCAS", "M2, macOS 15"),
    "control-flow": ("02-execution-model", "compiler"),
}


@pytest.mark.parametrize("name", FROM)
def test_citations_that_were_read_again(citations: ModuleType, name: str) -> None:
    source, scope = FROM[name]
    (rule,) = citations.every_rule()[name]
    assert source in rule.source + rule.because
    assert scope in str(rule.scope)


def test_quantized_tables_say_nothing_of_where_a_product_runs() -> None:
    assert (QUANTIZED_TABLE.kind, QUANTIZED_TABLE.legal) == ("speed", None)
