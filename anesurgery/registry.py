"""Names of passes and recipes, found without importing them; formats and engines that rooms above bring.

A pass over the ops of an ML Program lives in `passes/<name>.py` (or, with parts of its own, in the folder
`passes/<name>`), one over the layers of a neural network is a class with a `name` in a file of `passes/layers`,
a recipe stands in a file of `recipes/`; `keep` adds a user's own pass. Listing reads the docstrings in the
files, so it needs neither coremltools nor torch.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from anesurgery.errors import SurgeryError, UnknownName

LAYERS = "passes/layers"
"""The room of the passes over the layers of neural networks."""
ROOT = Path(__file__).resolve().parent

MODULES = {"torch.nn.modules.module.Module", "torch.export.exported_program.ExportedProgram"}
"""Classes of PyTorch whose models are converted where a call takes a model and inputs."""
INTERPRETER = "interpreter"
"""The engine that runs models unless another one is asked for."""
FORMATS = {".aimodel": "coreai.reading", ".onnx": "shipping.onnx_models"}
"""Suffix of a model of another format -> the module whose `read(path)` gives it as an ML Program."""
WRITERS = {".aimodel": "coreai.translating"}
"""Suffix of a format that an ML Program can be written in -> the module whose `to_coreai` does it, if its
`require` does not refuse."""
RULES = {".aimodel": "coreai.rules"}
"""Suffix of a format of Apple's -> what is known of models of that format."""
APPLES = "coreai"
"""The engine that is Apple's Core AI runtime."""
ENGINES = {APPLES: "coreai.running"}
"""Name of what runs models beside the interpreter -> the module whose `run_model` does it."""

_OWN: dict[str, type[Any]] = {}
"""Passes that users registered."""


def converter_of(model: Any) -> Callable[..., Any] | None:
    """What makes a model of Core ML of a model of PyTorch and its inputs; None for any other."""
    if not any(f"{cls.__module__}.{cls.__qualname__}" in MODULES for cls in type(model).__mro__):
        return None
    return importlib.import_module("anesurgery.frontend.modules").convert_module


def run_by_name(name: str, program: Any) -> None:
    """Run a pass with its default options on a MIL program, in place."""
    run_pass = importlib.import_module("anesurgery.rewriting.passes").run_pass
    run_pass(make_pass(name), program, importlib.import_module("anesurgery.rewriting.session").Session())


def pipeline_with(name: str) -> Any:
    """The default pipeline of coremltools with a pass of ours near its end, for `ct.convert`."""
    host = importlib.import_module("anesurgery.rewriting.host")
    return host.pass_pipeline([make_pass(name)])


def reader_of(path: Path) -> Callable[[Path], Any] | None:
    """What reads a model of another format into an ML Program; None where the path is not of one."""
    module = FORMATS.get(path.suffix.lower())
    return None if module is None else importlib.import_module(f"anesurgery.{module}").read


def writer_of(path: Path) -> Callable[..., Any] | None:
    """What writes an ML Program in the format of a path; None where that is Core ML's own.

    Raises:
        LoadError: it needs a package that is not installed.
    """
    if (name := WRITERS.get(path.suffix.lower())) is None:
        return None
    module = importlib.import_module(f"anesurgery.{name}")
    module.require()
    writer: Callable[..., Any] = module.to_coreai
    return writer


def rules_of(path: Path | None) -> ModuleType | None:
    """What is known of models of another format; None where the path is not of one."""
    module = None if path is None else RULES.get(path.suffix.lower())
    return None if module is None else importlib.import_module(f"anesurgery.{module}")


def engine(name: str) -> Callable[..., dict[str, Any]]:
    """What runs models in place of the interpreter: takes what `anesurgery.run` takes.

    Raises:
        UnknownName: there is none of that name.
    """
    if name not in ENGINES:
        raise UnknownName("engine", name, [INTERPRETER, *ENGINES])
    return importlib.import_module(f"anesurgery.{ENGINES[name]}").run_model


@cache
def _files(room: str) -> dict[str, Path]:
    """Name -> file; a pass with parts of its own is a folder, and its file the folder's `__init__.py`."""
    single = {p.stem: p for p in (ROOT / room).glob("*.py")}
    folders = {p.parent.name: p for p in (ROOT / room).glob("*/__init__.py") if p.parent != ROOT / LAYERS}
    return {name: path for name, path in sorted((single | folders).items()) if not name.startswith("_")}


@cache
def _layer_classes() -> dict[str, tuple[Path, ast.ClassDef]]:
    """Name of a pass over layers -> the file that holds it, and its class."""
    classes = {
        str(statement.value.value): (path, node)
        for path in _files(LAYERS).values()
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "name"
        if isinstance(statement.value, ast.Constant)
    }
    return dict(sorted(classes.items()))


def _pass_files() -> dict[str, Path]:
    """Pass name -> file, those over ops first."""
    return _files("passes") | {name: path for name, (path, _) in _layer_classes().items()}


def pass_names() -> list[str]:
    """The names of all passes, the library's first."""
    return [*_pass_files(), *_OWN]


def op_pass_names() -> list[str]:
    """The names of the passes over the ops of ML Programs, the library's first."""
    own = [name for name, cls in _OWN.items() if cls.subject.converts]
    return [*_files("passes"), *own]


def layer_pass_names() -> list[str]:
    """The names of the library's passes over the layers of neural networks."""
    return list(_layer_classes())


def recipe_names() -> list[str]:
    """The names of all recipes."""
    return list(_recipe_files())


@cache
def _recipe_files() -> dict[str, Path]:
    """Recipe name -> file: the top-level names that a recipe file assigns `Recipe(...)` to."""
    files = {}
    for path in _files("recipes").values():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Call):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if isinstance(target, ast.Name) and getattr(node.value.func, "id", "") == "Recipe":
                    files[target.id] = path
    return files


def summary(name: str) -> str:
    """The first sentence about a pass or recipe."""
    return documentation(name).strip().split("\n\n")[0].replace("\n", " ")


def documentation(name: str) -> str:
    """The docstring of the file of a pass or recipe, or of the class of a pass over layers.

    The sketch of a pass follows its title, also where it stands in `sketches/<name>.txt` beside the passes.

    Raises:
        UnknownName: there is neither a pass nor a recipe of that name.
    """
    if name in _OWN:
        return _OWN[name].__doc__ or ""
    layers = _layer_classes()
    holder = layers[name][1] if name in layers else ast.parse(file_of(name).read_text(encoding="utf-8"))
    words = ast.get_docstring(holder) or ""
    sketch = ROOT / (LAYERS if name in layers else "passes") / "sketches" / f"{name}.txt"
    if not sketch.exists():
        return words
    title, rest = words.split("\n\n", 1)
    return "\n\n".join((title, sketch.read_text(encoding="utf-8").strip("\n"), rest))


def file_of(name: str) -> Path:
    """The file that holds a pass or recipe of the library.

    Raises:
        UnknownName: there is neither a pass nor a recipe of that name.
    """
    path = _pass_files().get(name) or _recipe_files().get(name)
    if path is None:
        known = [*pass_names(), *recipe_names()]
        raise UnknownName("pass or recipe", name, known, "`anesurgery list` lists them")
    return path


def pass_class(name: str) -> type[Any]:
    """The class of a pass.

    Raises:
        UnknownName: no such pass; near matches are listed.
        SurgeryError: its file has no class of its name.
    """
    if name in _OWN:
        return _OWN[name]
    if name not in _pass_files():
        raise UnknownName("pass", name, pass_names(), "`anesurgery list` lists them")
    layers = _layer_classes()
    module = f"layers.{layers[name][0].stem}" if name in layers else name
    made = getattr(importlib.import_module(f"anesurgery.passes.{module}"), camel(name), None)
    if made is None:
        raise SurgeryError(f"passes/{module.replace('.', '/')}.py has no class {camel(name)}; rename its class")
    found: type[Any] = made
    return found


def camel(name: str) -> str:
    """`pad_last_axis` -> `PadLastAxis`."""
    return "".join(part.capitalize() for part in name.split("_"))


def make_pass(name: str, **options: Any) -> Any:
    """A pass with options.

    Raises:
        UnknownName: no such pass or no such option.
    """
    cls = pass_class(name)
    check_options(name, options, [f.name for f in dataclasses.fields(cls)])
    return cls(**options)


def check_options(owner: str, options: dict[str, Any], options_there: list[str]) -> None:
    """Refuse options that do not exist.

    Raises:
        UnknownName: with near matches.
    """
    for option in options:
        if option not in options_there:
            raise UnknownName(f"option of {owner}:", option, options_there)


def recipe_module(name: str) -> ModuleType:
    """The module that holds a recipe.

    Raises:
        UnknownName: no such recipe; near matches are listed.
    """
    if name not in _recipe_files():
        raise UnknownName("recipe", name, recipe_names(), "`anesurgery list` lists them")
    return importlib.import_module(f"anesurgery.recipes.{_recipe_files()[name].stem}")


def keep(cls: type[Any]) -> None:
    """Know a user's own pass by its name.

    Raises:
        SurgeryError: it has none, or that of a pass of the library.
    """
    if not isinstance(getattr(cls, "name", None), str):
        raise SurgeryError(f"register: {cls!r} is no pass; give a class that derives from anesurgery.Pass")
    if cls.name in _pass_files():
        hint = "import it as anesurgery.passes (not plain passes), or choose another name"
        raise SurgeryError(f"pass {cls.name!r} is already registered by the library; {hint}")
    _OWN[cls.name] = cls


def unregister(name: str) -> None:
    """Forget a user's own pass; coremltools keeps its copy until the process ends."""
    _OWN.pop(name, None)
