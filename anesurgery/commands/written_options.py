"""Read the parameters of public calls, and the options of passes and recipes, from the text of their files.

So `--help` and `explain` import neither torch nor coremltools. Defaults are literals, or arithmetic on
constants of the same file or of a file of this project that it imports them from; `an.option` holds such a
default beside its limits. What is written in another way is None: then the pass must be imported.
"""

from __future__ import annotations

import ast
import copy
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from anesurgery import registry

BASES = ("Pass", "Rewrite", "Repair", "LayerPass", "LayerRewrite")
"""Classes of passes without options of their own."""

Options = dict[str, dict[str, Any]]
"""Pass -> option -> value."""

SIMPLE = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant, ast.Tuple, ast.Load)


class _Unread(Exception):  # noqa: N818 - ends the reading, and is not an error
    """Something is written in a way that is not read here."""


def written_options(name: str) -> Options | None:
    """Read the options of a pass, or of each step of a recipe, from its file; None if it must be imported."""
    try:
        if name in registry.recipe_names():
            return dict(_step(call) for call in _steps_of(registry.file_of(name), name))
        return {name: _defaults(registry.file_of(name), registry.camel(name))}
    except _Unread:
        return None


@cache
def _body(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text(encoding="utf-8")).body


@cache
def _assigned(path: Path, name: str) -> ast.expr | None:
    """Return what a file assigns to a name at its top level; only that statement is parsed."""
    text = rf"^{name}(?:: .+?)? = (.*(?:\n[ )\]}}].*)*)"
    found = re.search(text, path.read_text(encoding="utf-8"), re.MULTILINE)
    return None if found is None else ast.parse(found[1], mode="eval").body


@cache
def _imports(path: Path) -> list[ast.ImportFrom]:
    """Return the statements by which a file imports names."""
    lines = re.findall(r"^from .+? import (?:\([^)]*\)|.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return [node for node in ast.parse("\n".join(lines)).body if isinstance(node, ast.ImportFrom)]


def _steps_of(path: Path, name: str) -> list[ast.Call]:
    """Return the calls in the `steps` of a recipe."""
    recipe = _assigned(path, name)
    arguments = {k.arg: k.value for k in recipe.keywords} if isinstance(recipe, ast.Call) else {}
    steps = [one for step in getattr(arguments.get("steps"), "elts", []) for one in _spread(path, step)]
    calls = [step for step in steps if isinstance(step, ast.Call) and not step.args]
    if not calls or len(calls) < len(steps):
        raise _Unread
    return calls


def _spread(path: Path, step: ast.expr) -> list[ast.expr]:
    """Return a step; for `*FREE` those of the tuple of that name in this file, or in one beside it."""
    if not isinstance(step, ast.Starred):
        return [step]
    name = getattr(step.value, "id", "")
    beside = [
        path.with_name(f"{(node.module or '').rpartition('.')[2]}.py")
        for node in _imports(path)
        if any(alias.name == name for alias in node.names)
    ]
    several = next((m for f in (path, *beside) if f.is_file() and (m := _assigned(f, name)) is not None), None)
    return list(getattr(several, "elts", [step]))


def _step(call: ast.Call) -> tuple[str, dict[str, Any]]:
    """Return the name and options of a step of a recipe, `passes.SplitHead(most=64)`."""
    cls = getattr(call.func, "attr", "")
    name = next((n for n in registry.pass_names() if registry.camel(n) == cls), None)
    if name is None:
        raise _Unread
    path = registry.file_of(name)
    return name, _defaults(path, registry.camel(name)) | {
        str(k.arg): value_of(path, k.value) for k in call.keywords
    }


def _defaults(path: Path, cls: str) -> dict[str, Any]:
    """Return the fields of a dataclass with their defaults."""
    node = next((n for n in _body(path) if isinstance(n, ast.ClassDef) and n.name == cls), None)
    if node is None or not all(getattr(base, "id", "") in BASES for base in node.bases):
        raise _Unread
    noted = [n for n in node.body if isinstance(n, ast.AnnAssign) and n.value is not None]
    fields = [n for n in noted if "ClassVar" not in ast.unparse(n.annotation)]
    return {getattr(n.target, "id", ""): value_of(path, _default(n.value)) for n in fields if n.value}


def _default(node: ast.expr) -> ast.expr:
    """Return the default of a field: the value assigned to it, or the first argument of `an.option`."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "an.option" and node.args:
        return node.args[0]
    return node


def value_of(path: Path, node: ast.expr) -> Any:
    """Return the value of an expression of literals and constants."""
    node = _Words(path).visit(copy.deepcopy(node))
    names = {n.id: _constant(path, n.id) for n in ast.walk(node) if isinstance(n, ast.Name)}
    if not all(isinstance(n, (*SIMPLE, ast.Name)) for n in ast.walk(node)):
        raise _Unread
    return eval(compile(ast.Expression(node), str(path), "eval"), {"__builtins__": {}}, names)


def _constant(path: Path, name: str) -> Any:
    """Return the value of a constant of a file, or of one that it imports."""
    if (assigned := _assigned(path, name)) is not None:
        return value_of(path, assigned)
    for node in _imports(path):
        if any(alias.name == name for alias in node.names):
            parts = (node.module or "").split(".")
            source = registry.ROOT.joinpath(*parts[1:]).with_suffix(".py")
            if parts[0] == "anesurgery" and source.is_file():
                return _constant(source, name)
    raise _Unread


class _Words(ast.NodeTransformer):
    """Puts the values of constants in the place of what is read from modules, as `an.fp16.LARGEST`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        *modules, name = ast.unparse(node).split(".")
        path = self.path
        for module in modules:
            path = _module(path, module)
        return ast.copy_location(ast.Constant(_constant(path, name)), node)


def _module(path: Path, name: str) -> Path:
    """Return the file of a module that a file imports from this package."""
    for node in _imports(path):
        for alias in (a for a in node.names if (a.asname or a.name) == name):
            package, *folders = (node.module or "").split(".")
            file = registry.ROOT.joinpath(*folders, f"{alias.name}.py")
            if package == "anesurgery" and file.is_file():
                return file
    raise _Unread


PLAIN: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}
HEAD = '^def {name}\\(.*?^    """.*?"""$'
"""A function up to the end of its docstring."""


@dataclass(frozen=True)
class Parameter:
    """A parameter that can be an option of the command line."""

    name: str
    """The name in the signature."""
    kind: Any
    """What the command line reads: a type of Python, or a list of one."""
    default: Any
    """The default of the signature; None for an empty tuple."""
    words: str
    """The first sentence about it in the docstring, and what the default means."""


def parameters_of(call: str) -> dict[str, Parameter]:
    """Return the parameters of a call, by name, that have a default and can be written on a command line.

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
    """Return the type that the command line reads for an annotation; None if no word can be one."""
    words = annotation.removesuffix(" | None")
    if several := re.fullmatch(r"(?:str \| )?Sequence\[(int|str)\]", words):
        return list[int] if several[1] == "int" else list[str]
    if "PathLike" in words:
        return Path
    return PLAIN.get(words, str if "str" in words.split(" | ") else None)


def default_of(path: Path, value: ast.expr) -> Any:
    """Return a default, with the constants of its file."""
    default = value_of(path, value)
    return None if default == () else default


def entries(docstring: str) -> dict[str, str]:
    """Return {parameter: the first sentence about it, and the one about its default}."""
    block = re.search(r"^Args:\n((?:    .*\n|\n)+)", docstring + "\n", re.MULTILINE)
    listed = re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", block[1] if block else "", re.MULTILINE)
    return {name: sentence(" ".join(words.split())) for name, words in listed}


def sentence(words: str) -> str:
    """Return the first sentence, and those that begin with "Default"."""
    first, *more = re.split(r"(?<=\.) (?=[A-Z])", words)
    return " ".join([first[:1].upper() + first[1:], *(one for one in more if one.startswith("Default"))])
