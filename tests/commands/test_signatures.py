"""The options of commands are read from public calls: the same defaults, and a word on each."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from anesurgery import commands
from anesurgery.commands.app import app
from anesurgery.commands.written_options import entries, kind_of, parameters_of

FILES = Path(commands.__file__).parent.glob("*.py")
CALLS = sorted({call for file in FILES for call in re.findall(r'"([\w.]+:\w+)"', file.read_text())})


@pytest.mark.parametrize("call", CALLS)
def test_defaults_are_those_of_the_call(call: str) -> None:
    """The wrong version reads a constant of another file, or none."""
    module, _, name = call.partition(":")
    parameters = inspect.signature(getattr(importlib.import_module(f"anesurgery.{module}"), name)).parameters
    found = {one.name: one.default for one in parameters_of(call).values()}
    assert found == {key: None if (value := parameters[key].default) == () else value for key in found}
    assert all(one.words for one in parameters_of(call).values())


@pytest.mark.parametrize(
    ("annotation", "kind"),
    [
        ("str | None", str),
        ("int", int),
        ("Target | str | None", str),
        ("int | str | None", str),
        ("str | os.PathLike[str] | None", Path),
        ("str | Sequence[str] | None", list[str]),
        ("Sequence[int]", list[int]),
        ("Mapping[str, str] | None", None),
        ("Sequence[InterfaceChange]", None),
    ],
)
def test_what_the_command_line_reads_for_an_annotation(annotation: str, kind: Any) -> None:
    assert kind_of(annotation) == kind


def test_the_first_sentence_and_the_default_are_the_help() -> None:
    args = "Args:\n    a: one thing, as\n        M1. More of it. Default: none.\n    b: two.\n"
    text = f"Do it.\n\n{args}\nReturns:\n    c: no.\n"
    assert entries(text) == {"a": "One thing, as M1. Default: none.", "b": "Two."}


def test_every_option_says_what_it_does() -> None:
    listed = get_command(app).commands  # type: ignore[attr-defined]
    silent = [
        f"{name} {one.name}" for name, command in listed.items() for one in command.params if not one.help
    ]
    assert silent == []
