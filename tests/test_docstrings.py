"""What the docstrings of public calls, and of the classes that authors subclass, have to say."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

import anesurgery as ane
from anesurgery import errors
from anesurgery.doors import door
from anesurgery.errors import InterpretError

FUNCTIONS = sorted(
    name for name in ane.__all__ if inspect.isfunction(getattr(ane, name)) and name not in ("passes", "recipes")
)
CLASSES = sorted(name for name in ane.__all__ if inspect.isclass(getattr(ane, name)))
PACKAGE = Path(ane.__file__).parent
WITH_EXAMPLES = sorted(
    {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for folder in (PACKAGE, PACKAGE / "passes", PACKAGE / "recipes")
        for path in folder.rglob("*.py")
        if ">>> " in path.read_text(encoding="utf-8")
    }
)
"""The modules whose docstrings show what a call gives."""
SUBCLASSED = (ane.Pass, ane.Rewrite)
"""What authors write subclasses of."""


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_give_what_they_show(name: str) -> None:
    tried = doctest.testmod(importlib.import_module(name))
    assert tried.attempted
    assert not tried.failed


def unsaid(function: Callable[..., Any]) -> Iterator[str]:
    """The sections and the parameters that a docstring lacks: Args with each parameter, Returns, Raises."""
    words, signature = inspect.getdoc(function) or "", inspect.signature(function)
    sections = {*re.findall(r"^(Args|Returns|Yields|Raises):$", words, re.MULTILINE)}
    names = [name for name in signature.parameters if name not in ("self", "cls")]
    if signature.return_annotation not in (None, "None", "Never") and not sections & {"Returns", "Yields"}:
        yield "Returns"
    if "Raises" not in sections:
        yield "Raises"
    yield from (name for name in names if not re.search(rf"^\s+\*{{0,2}}{name}: ", words, re.MULTILINE))


def methods(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public methods of a class, which take something."""
    for name, value in vars(cls).items():
        function = getattr(value, "__func__", value)
        if inspect.isfunction(function) and not name.startswith("_"):
            yield name, function


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_call_says_what_it_takes_gives_and_raises(name: str) -> None:
    assert list(unsaid(getattr(ane, name))) == []


def errors_said(function: Callable[..., Any]) -> set[type[Exception]]:
    """The errors that a docstring names under Raises."""
    words = (inspect.getdoc(function) or "").partition("Raises:")[2]
    known = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    return {known[name] for name in re.findall(r"^\s+(\w+): ", words, re.MULTILINE) if name in known}


def errors_of(function: Callable[..., Any]) -> set[type[Exception]]:
    """The errors that a call raises by itself, at its door, or where it reads a model."""
    source = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    raised = [n.exc for n in ast.walk(source) if isinstance(n, ast.Raise) and n.exc is not None]
    names = {ast.unparse(value.func if isinstance(value, ast.Call) else value) for value in raised}
    found = {getattr(errors, name) for name in names if hasattr(errors, name)}
    found |= {errors.SurgeryError} if "check_fields(" in ast.unparse(source) else set()
    at = function
    while hasattr(at, "__wrapped__"):
        found |= {errors.SurgeryError} if at.__code__.co_name == "at_the_door" else set()
        at = at.__wrapped__
    return found | ({errors.LoadError} if "model" in inspect.signature(function).parameters else set())


def unnamed(function: Callable[..., Any]) -> list[str]:
    """The errors that neither Raises names, nor a parent of them there."""
    said = tuple(errors_said(function))
    return sorted(error.__name__ for error in errors_of(function) if not issubclass(error, said))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_call_names_what_it_raises(name: str) -> None:
    """What is of another type than the call takes is a `SurgeryError` at its door."""
    assert unnamed(getattr(ane, name)) == []


@pytest.mark.parametrize("name", CLASSES)
def test_a_public_class_names_what_making_one_raises(name: str) -> None:
    """In its own words, or in those of `__init__`; of exceptions the first sentence does."""
    cls = getattr(ane, name)
    start = vars(cls).get("__post_init__" if is_dataclass(cls) else "__init__")
    if inspect.isfunction(start) and not issubclass(cls, Exception):
        said = tuple(errors_said(cls) | errors_said(start))
        assert [error.__name__ for error in errors_of(start) if not issubclass(error, said)] == []


def test_an_error_that_is_not_named_is_noticed() -> None:
    @door()
    def call(model: Any) -> None:
        """Words.

        Raises:
            UnknownName: never.
        """
        if model is None:
            raise InterpretError("none")

    assert unnamed(call) == ["InterpretError", "LoadError", "SurgeryError"]


@pytest.mark.parametrize("cls", SUBCLASSED, ids=lambda cls: cls.__name__)
def test_a_method_of_a_pass_says_what_it_takes_gives_and_raises(cls: type) -> None:
    """Raises alone may be left out: a method that authors write gives its reasons back."""
    lacking = {name: [w for w in unsaid(function) if w != "Raises"] for name, function in methods(cls)}
    assert {name: words for name, words in lacking.items() if words} == {}


@pytest.mark.parametrize("name", CLASSES)
def test_a_public_class_says_what_each_field_is(name: str) -> None:
    """In Args or Attributes, or under the field; of exceptions the first sentence does."""
    cls = getattr(ane, name)
    if issubclass(cls, Exception):
        return
    words, source = inspect.getdoc(cls) or "", inspect.getsource(cls)
    fields = [n for n in getattr(cls, "__dataclass_fields__", {}) if n in inspect.get_annotations(cls)]
    for field in (n for n in fields if not n.startswith("_")):
        under = re.search(
            rf'^    {field}: [^\n]*(?:\n    (?:   [^\n]*|\)|\])*)*\n    """', source, re.MULTILINE
        )
        assert under or re.search(rf"^\s+{field}: ", words, re.MULTILINE), f"{name}.{field} is not explained"


def test_a_docstring_that_lacks_something_is_noticed() -> None:
    def call(one: int, two: int) -> int:
        """Adds.

        Args:
            one: a number.

        Raises:
            ValueError: never.
        """
        return one + two

    assert list(unsaid(call)) == ["Returns", "two"]
