"""What each pass keeps to: a true sketch, its example in the harness, its grade, options of a frozen class."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sketches
from pass_cases import EVERYWHERE, Case, apply_pass, check_there, rewrites
from sketches import network_of, sketch

from anesurgery import registry
from anesurgery.checking.grades import Grade
from anesurgery.mil import Program
from anesurgery.rewriting.passes import Pass
from anesurgery.surgery import steps_of
from anesurgery.testing import assert_same_numbers, text_of

LAYERS = [*registry.layer_pass_names(), "layers._template"]
NAMES = [*registry.op_pass_names(), "_template"]
"""The templates are no registered passes, but they must be as good as one."""


STATED = re.compile(r"^Grade: (bit for bit|proved|exhaustive|checked|none)(?:: (.+?))?\.$", re.MULTILINE)
"""The grade of a pass in its docstring, and the reason."""


def class_of(name: str) -> type[Pass]:
    if name in registry.pass_names():
        return registry.pass_class(name)
    found: type[Pass] = importlib.import_module(f"anesurgery.passes.{name}").Template
    return found


def described(name: str) -> ModuleType | type | str:
    """What has the sketch of a pass."""
    if name in registry.pass_names():
        return name
    return class_of(name) if name in LAYERS else importlib.import_module(f"anesurgery.passes.{name}")


def example_of(name: str) -> Any:
    if name == "layers._template":
        return network_of(sketch(described(name), "Before"))
    template: Any = importlib.import_module(f"anesurgery.passes.{name}") if name == "_template" else None
    return sketches.example_of(name) if template is None else template.example()


def stated(name: str) -> tuple[str, str]:
    """The grade and the reason in the words of a pass."""
    found = STATED.findall(registry.documentation(name))
    assert len(found) == 1, f'{name}: its docstring needs one line such as "Grade: proved."'
    grade, reason = found[0]
    return grade, reason


def on_purpose(step: Pass, example: Any) -> str:
    """Why a pass gives other numbers, where it does so on purpose."""
    changes = apply_pass(step, example)[1].changes
    words = "the numbers change on purpose"
    return words if all(change.unchecked.startswith(words) for change in changes) else ""


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(n, marks=pytest.mark.one_of(5)) for n in LAYERS)])
def test_the_sketch_is_true_and_each_site_is_checked(name: str) -> None:
    step, model = class_of(name)(), example_of(name)
    assert sketch(described(name), "Before") == text_of(model)
    after, session = apply_pass(step, model)
    assert sketch(described(name), "After") == text_of(after)
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
    step = class_of(name)()
    case: Case = rewrites(example_of, name, differs=on_purpose(step, example_of(name)))
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


@pytest.mark.parametrize("name", registry.pass_names())
def test_the_example_reaches_the_stated_grade(name: str) -> None:
    grade = stated(name)[0]
    _, session = apply_pass(registry.make_pass(name), example_of(name))
    checks = [change.proof for change in session.changes]
    reached = "none" if None in checks else min(c.grade for c in checks if c is not None).words
    assert reached == grade
    if grade in ("none", Grade.NUMBERS.words):
        assert stated(name)[1], f"{name}: say why it has no higher grade"
