"""What holds for every pass over layers: a true sketch, checked sites, nothing done twice, words."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from typing import Any

import pytest
from sketches import example_of, network_of, sketch, words_of

from anesurgery import registry
from anesurgery.network_editing.layer_pass import LayerPass
from anesurgery.passes.layers._template import Template
from anesurgery.testing import apply_pass, assert_same_numbers, text_of

PASSES: dict[str, type | str] = {"template": Template, **{n: n for n in registry.layer_pass_names()}}
"""The template is no registered pass, but it must be as good as one."""


def step_of(name: str) -> LayerPass:
    step = Template() if name == "template" else registry.make_pass(name)
    assert isinstance(step, LayerPass)
    return step


def spec_of(name: str) -> Any:
    return network_of(sketch(Template, "Before")) if name == "template" else example_of(name)


@pytest.mark.one_of(5)
@pytest.mark.parametrize("name", PASSES)
def test_the_sketch_is_true_and_each_site_is_checked(name: str) -> None:
    spec = spec_of(name)
    assert sketch(PASSES[name], "Before") == text_of(spec)
    after, session = apply_pass(step_of(name), spec)
    assert sketch(PASSES[name], "After") == text_of(after)
    assert session.changes
    for change in session.changes:
        assert change.proof is not None or change.unchecked, change
    again, second = apply_pass(step_of(name), after)
    assert not second.changes, text_of(again)


@pytest.mark.one_of(5)
@pytest.mark.parametrize("name", PASSES)
def test_the_example_keeps_its_numbers(name: str) -> None:
    spec = spec_of(name)
    after, session = apply_pass(step_of(name), spec)
    if all(change.proof is not None for change in session.changes):
        assert_same_numbers(spec, after, rtol=step_of(name).tolerance.rtol)


@pytest.mark.parametrize("name", PASSES)
def test_names_options_and_words(name: str) -> None:
    cls = type(step_of(name))
    assert cls.name == name
    assert name == "template" or registry.pass_class(name) is cls
    for word in ("Before::", "After::", "Refuses when", "Why it helps"):
        assert word in words_of(PASSES[name]), word
    assert cls().options() == {f.name: f.default for f in dataclasses.fields(cls)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        cls().name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("name", PASSES)
def test_every_option_is_explained(name: str) -> None:
    """The line under a field is its explanation."""
    (cls,) = ast.parse(textwrap.dedent(inspect.getsource(type(step_of(name))))).body
    assert isinstance(cls, ast.ClassDef)
    for field, after in zip(cls.body, [*cls.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation):
            assert isinstance(after, ast.Expr), f"{name}: option {ast.unparse(field.target)} has no line"


def test_a_text_is_read_as_the_network_that_it_prints() -> None:
    """And another text as another network."""
    text = sketch("legacy_slice", "Before")
    assert text_of(network_of(text)) == text
    assert text_of(network_of(text.replace("endIds=[0, 0, -2, 7]", "endIds=[0, 0, -3, 7]"))) != text
