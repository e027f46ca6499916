"""Every rule that keeps an op off the engine has a remedy or a written reason: docs/remedies.md tells which."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import types

import anesurgery as ane
from anesurgery import registry
from anesurgery.mil import Program, Var, mb, np_dtype, walk_ops
from anesurgery.placement import rules
from anesurgery.placement.inspector import inspect
from anesurgery.placement.rules import layer_rules
from anesurgery.placement.rules.legality import FORBIDDEN

TABLE = Path(__file__).resolve().parents[2] / "docs" / "remedies.md"
OPEN = ("none can exist", "not written")


UPGRADE = "ane.upgrade"
PREFIX = f"{rules.__name__}."


def rows(layers: bool = False) -> dict[str, tuple[str, str]]:
    """Rule -> (remedy or why there is none, words), of ops or of layers."""
    found: dict[str, tuple[str, str]] = {}
    of_ops, of_layers = TABLE.read_text(encoding="utf-8").split("## Layers")
    for line in (of_layers if layers else of_ops).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| `"):
            continue
        for rule in re.findall(r"`([^`]+)`", cells[0]):
            assert rule not in found, f"{rule} has two rows"
            found[rule] = (cells[1].strip("`"), cells[2])
    return found


@pytest.mark.parametrize("rule", sorted({rule.id for rule in FORBIDDEN}))
def test_each_rule_ends_with_a_remedy_or_a_reason(rule: str) -> None:
    remedy, words = rows()[rule]
    named = {row.remedy for row in FORBIDDEN if row.id == rule}
    if remedy in OPEN:
        assert named == {None}, f"{rule} names {named}; the table says {remedy}"
        assert len(words) > 20, f"{rule}: give the reason"
    else:
        assert remedy in registry.op_pass_names()
        assert named == {remedy}


def test_the_table_has_no_row_of_a_rule_that_is_gone() -> None:
    assert rows().keys() == {rule.id for rule in FORBIDDEN}


LAYER_RULES = {rule.id for rule in layer_rules.RULES if rule.legal is False}


@pytest.mark.parametrize("rule", sorted(LAYER_RULES))
def test_each_rule_of_layers_ends_with_a_remedy_or_a_reason(rule: str) -> None:
    remedy, words = rows(layers=True)[rule]
    named = {row.remedy for row in layer_rules.RULES if row.id == rule and row.remedy}
    told = set(re.findall(r"(\w+)", remedy.replace("`", ""))) if remedy not in (*OPEN, UPGRADE) else set()
    assert told == named, f"{rule} names {named}; the table says {remedy}"
    assert told <= set(registry.layer_pass_names())
    if remedy in (*OPEN, UPGRADE):
        assert len(words) > 20, f"{rule}: give the reason"
    for name in re.findall(r"then `(\w+)`", words):
        assert name in registry.op_pass_names()


def test_the_table_of_layers_has_no_row_of_a_rule_that_is_gone() -> None:
    assert rows(layers=True).keys() == LAYER_RULES


def names_passes(value: object) -> bool:
    """Is it a table that says which pass repairs what?"""
    passes = {*registry.op_pass_names(), *registry.layer_pass_names()}
    words = [*value, *value.values()] if isinstance(value, dict) else []
    return not passes.isdisjoint(word for word in words if isinstance(word, str))


def test_a_remedy_stands_in_the_row_of_its_rule() -> None:
    modules = [importlib.import_module(m.name) for m in pkgutil.iter_modules(rules.__path__, PREFIX)]
    tables = [f"{m.__name__}.{name}" for m in modules for name, value in vars(m).items() if names_passes(value)]
    assert tables == []


@pytest.mark.parametrize("table", [{"fp32": "compute_fp16"}, {"rerank": "rank"}, {"gather": "legacy_gather"}])
def test_a_table_beside_the_rules_would_be_found(table: dict[str, str]) -> None:
    assert names_passes(table)


def test_a_remedy_that_the_rules_do_not_name_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The wrong table: it promises a pass for random numbers."""
    wrong = tmp_path / "remedies.md"
    text = TABLE.read_text(encoding="utf-8")
    promised = "`op-random_categorical` | `compute_fp16`"
    wrong.write_text(text.replace("`op-random_categorical` | none can exist", promised), encoding="utf-8")
    monkeypatch.setattr(f"{__name__}.TABLE", wrong)
    with pytest.raises(AssertionError):
        test_each_rule_ends_with_a_remedy_or_a_reason("op-random_categorical")


def long_ops(kind: str) -> Program:
    """One op whose result, or whose input too, has an axis of 20000."""

    @mb.program(
        input_specs=[mb.TensorSpec((1, 4 if kind == "linear" else 20000), types.fp16)],
        opset_version=ct.target.iOS17,
    )
    def made(x: Var) -> Var:
        if kind == "linear":
            return mb.linear(x=x, weight=np.ones((20000, 4), np.float16), name="y")
        if kind == "conv_transpose":
            y = mb.reshape(x=x, shape=(1, 2, 10000))
            return mb.conv_transpose(x=y, weight=np.ones((2, 1, 4), np.float16), strides=[2], name="y")
        if kind == "linear of a long row":
            return mb.linear(x=x, weight=np.ones((4, 20000), np.float16), name="y")
        return getattr(mb, kind)(x=x, name="y") if kind == "relu" else mb.softmax(x=x, axis=-1, name="y")

    return made


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("linear", "split_head"),
        ("relu", "fold_long_axis"),
        ("conv_transpose", "subpixel_convolution"),
        ("linear of a long row", None),
        ("softmax", None),
    ],
)
def test_a_long_axis_names_the_pass_that_changes_the_op(kind: str, remedy: str | None) -> None:
    """The wrong version: one pass for every op, which does nothing to a head."""
    program = long_ops(kind)
    found = {f.rule: f.remedy for f in inspect(program, "iPhone 13").all_findings if f.op == "y"}
    assert found["axis"] == remedy
    for name in ("split_head", "fold_long_axis", "subpixel_convolution"):
        changes = ane.apply(program, name, target="iPhone 13", prove=None, quiet=True).changes
        assert bool(changes) == (name == remedy), name


@pytest.mark.parametrize(("perm", "absorbed"), [([0, 2, 3, 1], True), ([0, 2, 1, 3], False)])
def test_a_transpose_is_named_where_its_reader_can_do_without(perm: list[int], absorbed: bool) -> None:
    """Heads that are put together again stay: a row takes from each of them."""

    @mb.program(input_specs=[mb.TensorSpec((1, 2, 3, 3), types.fp16)], opset_version=ct.target.iOS17)
    def made(x: Var) -> Var:
        turned = mb.transpose(x=x, perm=perm, name="turned")
        rows = [1, 18] if absorbed else [1, 3, 6]
        return mb.linear(
            x=mb.reshape(x=turned, shape=rows), weight=np.ones((4, rows[-1]), np.float16), name="y"
        )

    rules_found = {f.rule for f in inspect(made, "M1").all_findings}
    assert ("transpose-absorbed" in rules_found) == absorbed
    assert bool(ane.apply(made, "absorb_transpose", prove=None, quiet=True).changes) == absorbed


def test_constants_of_layers_name_a_pass_that_changes_them(tmp_path: Path) -> None:
    """The example has constants of one and of three axes, and a product with one of them."""
    network = ane.example("network", tmp_path / "n.mlmodel")
    named = {
        f.remedy for f in ane.inspect(network, "iPhone 13").all_findings if f.remedy and f.rule in LAYER_RULES
    }
    assert "legacy_add_multiply" in named
    for name in named:
        assert ane.apply(network, name, prove=None, quiet=True).changes, name


@pytest.mark.parametrize(("by_mask", "remedy"), [(True, "mask_to_select"), (False, "replace_scatter")])
def test_the_pass_for_a_scatter_works(by_mask: bool, remedy: str) -> None:
    """The wrong version: replace_scatter for places whose number varies, which it refuses."""
    spec = mb.TensorSpec((4, 6), dtype=types.fp16)

    @mb.program(input_specs=[spec], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        listed = mb.non_zero(x=mb.greater(x=x, y=np.float16(0)))
        places = listed if by_mask else np.array([[0, 1], [2, 3]], np.int32)
        updates = mb.mul(x=mb.gather_nd(x=x, indices=places), y=np.float16(2))
        return mb.scatter_nd(data=x, indices=places, updates=updates, mode="update", name="y")

    (found,) = (f for f in inspect(program, "M4").all_findings if f.rule == "op-scatter_nd")
    assert found.remedy == remedy
    repaired = ane.apply(program, remedy, quiet=True).program
    assert "scatter_nd" not in {op.op_type for op in repaired.functions["main"].operations}


@pytest.mark.parametrize(("lists", "remedy"), [(True, "mask_to_select"), (False, "integers_as_floats")])
def test_the_pass_for_a_cast_of_a_mask_works(lists: bool, remedy: str) -> None:
    """The wrong version: the pass for integers, which leaves the cast of a mask whose places are listed."""
    spec = mb.TensorSpec((4, 6), dtype=types.fp16)

    @mb.program(input_specs=[spec], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        mask = mb.cast(x=mb.greater(x=x, y=np.float16(0)), dtype="int32", name="mask")
        if not lists:
            return mb.cast(x=mb.add(x=mask, y=mask), dtype="fp16", name="y")
        places = mb.non_zero(x=mask)
        updates = mb.mul(x=mb.gather_nd(x=x, indices=places), y=np.float16(2))
        return mb.scatter_nd(data=x, indices=places, updates=updates, mode="update", name="y")

    (found,) = (f for f in inspect(program, "M4").all_findings if (f.rule, f.op) == ("int32", "mask"))
    assert found.remedy == remedy
    repaired = ane.apply(program, remedy, quiet=True).program
    assert not any(np_dtype(op.outputs[0]).kind == "i" for op in walk_ops(repaired) if op.op_type != "const")
