"""What holds for every pass: a true sketch, its example as a case of the harness, options of a frozen class."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pass_cases import EVERYWHERE, Case, check_there, rewrites
from sketches import sketch

from anesurgery import registry
from anesurgery.mil import Program
from anesurgery.rewriting.passes import Pass
from anesurgery.surgery import steps_of
from anesurgery.testing import apply_pass, assert_same_numbers, text_of

LAYERS = [f"layers.{name}" for name in (*registry.layer_pass_names(), "_template")]
NAMES = [*registry.op_pass_names(), "_template"]
"""The templates are no registered passes, but they must be as good as one."""


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"anesurgery.passes.{name}")


def class_of(name: str) -> type[Pass]:
    found: type[Pass] = getattr(module_of(name), registry.camel(name.rpartition(".")[2].lstrip("_")))
    return found


def on_purpose(step: Pass, example: Any) -> str:
    """Why a pass gives other numbers, where it does so on purpose."""
    changes = apply_pass(step, example)[1].changes
    words = "the numbers change on purpose"
    return words if all(change.unchecked.startswith(words) for change in changes) else ""


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(n, marks=pytest.mark.one_of(5)) for n in LAYERS)])
def test_the_sketch_is_true_and_each_site_is_checked(name: str) -> None:
    step, model = class_of(name)(), module_of(name).example()
    assert sketch(module_of(name), "Before") == text_of(model)
    after, session = apply_pass(step, model)
    assert sketch(module_of(name), "After") == text_of(after)
    assert session.changes
    for change in session.changes:
        assert change.proof is not None or change.unchecked, change
    assert not apply_pass(step, after)[1].changes
    rtol = step.tolerance.rtol if not isinstance(model, Program) else max(step.tolerance.rtol, 1e-6)
    if not on_purpose(step, model) and all(c.proof for c in session.changes):
        assert_same_numbers(model, after, rtol=rtol, session=session)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("name", [*NAMES, *LAYERS])
def test_the_example_in_every_surrounding(
    name: str, where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    step, build = class_of(name)(), module_of(name).example
    case: Case = rewrites(build, differs=on_purpose(step, build()))
    check_there(step, case, where, monkeypatch, tmp_path)


@pytest.mark.parametrize("name", [*NAMES, *LAYERS])
def test_it_is_a_frozen_class_known_by_name(name: str) -> None:
    cls = class_of(name)
    plain = name.rpartition(".")[2]
    assert cls.name == plain.lstrip("_")
    assert cls().options() == {f.name: f.default for f in dataclasses.fields(cls)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        cls().name = "other"  # type: ignore[misc]
    if not plain.startswith("_"):
        assert [type(step) for step in steps_of(plain)] == [cls]
        assert registry.summary(plain)
