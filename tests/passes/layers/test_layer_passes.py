"""What holds for every pass over layers: a true sketch, checked sites, nothing done twice, words."""

from __future__ import annotations

import dataclasses
import importlib
from types import ModuleType
from typing import Any

import pytest
from sketches import sketch

from anesurgery import registry
from anesurgery.network_editing.layer_pass import LayerPass
from anesurgery.testing import apply_pass, assert_same_numbers, text_of

NAMES = [*registry.layer_pass_names(), "_template"]
"""The template is no registered pass, but it must be as good as one."""


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"anesurgery.passes.layers.{name}")


def step_of(name: str) -> LayerPass:
    step = getattr(module_of(name), registry.camel(name.lstrip("_")))()
    assert isinstance(step, LayerPass)
    return step


@pytest.mark.one_of(5)
@pytest.mark.parametrize("name", NAMES)
def test_the_sketch_is_true_and_each_site_is_checked(name: str) -> None:
    spec: Any = module_of(name).example()
    assert sketch(module_of(name), "Before") == text_of(spec)
    after, session = apply_pass(step_of(name), spec)
    assert sketch(module_of(name), "After") == text_of(after)
    assert session.changes
    for change in session.changes:
        assert change.proof is not None or change.unchecked, change
    again, second = apply_pass(step_of(name), after)
    assert not second.changes, text_of(again)


@pytest.mark.one_of(5)
@pytest.mark.parametrize("name", NAMES)
def test_the_example_keeps_its_numbers(name: str) -> None:
    spec: Any = module_of(name).example()
    after, session = apply_pass(step_of(name), spec)
    if all(change.proof is not None for change in session.changes):
        assert_same_numbers(spec, after, rtol=step_of(name).tolerance.rtol)


@pytest.mark.parametrize("name", NAMES)
def test_names_options_and_words(name: str) -> None:
    cls = type(step_of(name))
    assert cls.name == name.lstrip("_")
    assert name.startswith("_") or registry.pass_class(name) is cls
    assert cls.__doc__
    assert cls().options() == {f.name: f.default for f in dataclasses.fields(cls)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        cls().name = "other"  # type: ignore[misc]
