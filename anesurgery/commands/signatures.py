"""Read the parameters of a public call: their names, types, defaults, and sentences of the docstring.

All is read from the text of its file, so that `--help` imports neither torch nor coremltools.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anesurgery import registry
from anesurgery.commands.written_options import value_of

PLAIN: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}
HEAD = '^def {name}\\(.*?^    """.*?"""$'
"""A function up to the end of its docstring."""


@dataclass(frozen=True)
class Parameter:
    """A parameter that can be an option of the command line.

    Attributes:
        name: in the signature.
        kind: what the command line reads: a type of Python, or a list of one.
        default: of the signature; None for an empty tuple.
        words: the first sentence about it in the docstring, and what the default means.
    """

    name: str
    kind: Any
    default: Any
    words: str


def parameters_of(call: str) -> dict[str, Parameter]:
    """The parameters of a call that have a default and can be written on a command line, by name.

    Args:
        call: module below `anesurgery` and function, as "splitting.split:split".
    """
    module, _, name = call.partition(":")
    path = registry.ROOT.joinpath(*module.split(".")).with_suffix(".py")
    head = re.search(HEAD.format(name=name), path.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert head is not None, call
    (function,) = ast.parse(head[0]).body
    assert isinstance(function, ast.FunctionDef)
    declared, words = function.args, entries(ast.get_docstring(function) or "")
    optional = zip(declared.args[len(declared.args) - len(declared.defaults) :], declared.defaults, strict=True)
    named = zip(declared.kwonlyargs, declared.kw_defaults, strict=True)
    parameters = [
        Parameter(one.arg, kind, default_of(path, value), words.get(one.arg, ""))
        for one, value in (*optional, *named)
        if value is not None and (kind := kind_of(ast.unparse(one.annotation or value))) is not None
    ]
    return {one.name: one for one in parameters}


def kind_of(annotation: str) -> Any:
    """What the command line reads for an annotation; None where it cannot be written in a word."""
    words = annotation.removesuffix(" | None")
    if several := re.fullmatch(r"(?:str \| )?Sequence\[(int|str)\]", words):
        return list[int] if several[1] == "int" else list[str]
    if "PathLike" in words:
        return Path
    return PLAIN.get(words, str if "str" in words.split(" | ") else None)


def default_of(path: Path, value: ast.expr) -> Any:
    """A default, with the constants of its file."""
    default = value_of(path, value)
    return None if default == () else default


def entries(docstring: str) -> dict[str, str]:
    """Parameter -> the first sentence about it, and the one about its default."""
    block = re.search(r"^Args:\n((?:    .*\n|\n)+)", docstring + "\n", re.MULTILINE)
    listed = re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", block[1] if block else "", re.MULTILINE)
    return {name: sentence(" ".join(words.split())) for name, words in listed}


def sentence(words: str) -> str:
    """The first sentence, and those that begin with "Default"."""
    first, *more = re.split(r"(?<=\.) (?=[A-Z])", words)
    return " ".join([first[:1].upper() + first[1:], *(one for one in more if one.startswith("Default"))])
