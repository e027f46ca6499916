"""What holds for every pass: a true sketch, checked sites, nothing done twice, options with words."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType

import pytest
from sketches import sketch, words_of

from anesurgery import registry
from anesurgery.mil import Program
from anesurgery.rewriting.passes import Pass
from anesurgery.surgery import steps_of
from anesurgery.testing import apply_pass, assert_same_numbers
from anesurgery.text import to_text

NAMES = [*registry.op_pass_names(), "_template"]
"""The template is no registered pass, but it must be as good as one."""


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"anesurgery.passes.{name}")


def class_of(name: str) -> type[Pass]:
    found: type[Pass] = getattr(module_of(name), registry.camel(name.lstrip("_")))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_sketch_is_true_and_each_site_is_checked(name: str) -> None:
    program: Program = module_of(name).example()
    assert sketch(module_of(name), "Before") == to_text(program)
    after, session = apply_pass(class_of(name)(), program)
    assert sketch(module_of(name), "After") == to_text(after)
    assert session.changes
    for change in session.changes:
        assert change.proof is not None or change.unchecked, change
    again, second = apply_pass(class_of(name)(), after)
    assert not second.changes, to_text(again)


@pytest.mark.parametrize("name", NAMES)
def test_the_example_keeps_its_numbers_and_stays_after_the_default_pipeline(
    name: str, settled: Callable[[Program], Program]
) -> None:
    program: Program = module_of(name).example()
    step = class_of(name)()
    after, session = apply_pass(step, program)
    rtol = max(step.tolerance.rtol, 1e-6)
    if all(change.unchecked.startswith("the numbers change on purpose") for change in session.changes):
        program = after
    assert_same_numbers(program, after, rtol=rtol, session=session)
    later = settled(after)
    assert_same_numbers(program, later, rtol=rtol, session=session)
    assert not apply_pass(step, later)[1].changes, to_text(later)


@pytest.mark.parametrize("name", NAMES)
def test_names_options_and_words(name: str) -> None:
    cls = class_of(name)
    assert cls.name == name.lstrip("_")
    assert cls.__doc__
    assert dataclasses.is_dataclass(cls)
    assert cls().options() == {f.name: f.default for f in dataclasses.fields(cls)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        cls().name = "other"  # type: ignore[misc]
    text = words_of(module_of(name))
    for word in ("Before::", "After::", "Refuses when", "Why it helps"):
        assert word in text, f"{name}: no {word!r}"
    assert text.split("\n\n")[0].rstrip().endswith((".", ")"))


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_explained(name: str) -> None:
    """The line under a field is its explanation."""
    tree = ast.parse(inspect.getsource(class_of(name)).strip())
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    for field, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation):
            said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            assert said, f"{name}: option {ast.unparse(field.target)} has no line about it"


@pytest.mark.parametrize("name", registry.op_pass_names())
def test_it_is_known_by_name(name: str) -> None:
    assert [type(step) for step in steps_of(name)] == [class_of(name)]
    assert registry.summary(name)
