"""What the docstrings of public calls, and of the classes that authors subclass, have to say."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import anesurgery as ane

FUNCTIONS = sorted(
    name for name in ane.__all__ if inspect.isfunction(getattr(ane, name)) and name not in ("passes", "recipes")
)
CLASSES = sorted(name for name in ane.__all__ if inspect.isclass(getattr(ane, name)))
SUBCLASSED = (ane.Pass, ane.Rewrite)
"""What authors write subclasses of."""


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
