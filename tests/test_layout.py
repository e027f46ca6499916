"""The promises of the layout: what a reader may rely on without looking."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import networkx
import pytest

from anesurgery import registry
from anesurgery.surgery import find_recipe

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - Python 3.10
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[1]
ENGINE = ROOT / "anesurgery"
PASSES, RECIPES, TESTS = ROOT / "passes", ROOT / "recipes", ROOT / "tests"

ROOMS = tuple(
    line.strip()
    for line in """
        __main__
        commands
        serving
        explorer
        coreai
        examples
        shipping
        show
        recipes
        passes
        authoring
        surgery
        testing
        network_editing
        compressing
        splitting
        rewriting
        placement
        checking
        numeric
        regions
        facts
        semantics
        interpret
        loading
        neuralnetwork
        files
        frontend
        text
        mil
        ops
        doors
        display
        fp16
        registry
        errors
    """.strip().splitlines()
)
"""The rooms from the top of the house to its ground: a file imports from its own room or from those below."""

FUNCTION_LINES = 40


@cache
def sources() -> list[Path]:
    """Our Python files, each once (the links in `anesurgery/` lead to the same files)."""
    engine = [p for p in ENGINE.rglob("*.py") if p.relative_to(ENGINE).parts[0] not in ("passes", "recipes")]
    return sorted([*engine, *PASSES.rglob("*.py"), *RECIPES.glob("*.py")])


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file; most tests here look at each."""
    return list(ast.walk(tree(path)))


@pytest.fixture(scope="module", autouse=True)
def _trees_go() -> Iterator[None]:
    """What stays in memory slows the conversions of later tests: coremltools collects garbage in each."""
    yield
    tree.cache_clear()
    nodes.cache_clear()


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """The modules that a file imports, and the number of leading dots."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.level


def python(code: str) -> str:
    """What a fresh interpreter prints, on both channels."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The signature and the docstring are the documentation of the options, and are not counted."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_functions_stay_short() -> None:
    found = [(ids(path), f.name, body_lines(f)) for path in sources() for f in functions(path)]
    assert [row for row in found if row[-1] > FUNCTION_LINES] == []


def test_imports_are_absolute_and_through_the_package() -> None:
    found = [(ids(p), *row) for p in sources() if p.name != "__init__.py" for row in imported(p)]
    assert [row for row in found if row[2]] == []
    assert [row for row in found if row[1].split(".")[0] in ("passes", "recipes")] == []
    around = re.compile(r"^\s*(?:from|import) (?:passes|recipes)\b", re.MULTILINE)
    tests = (path for path in TESTS.rglob("*.py") if around.search(path.read_text(encoding="utf-8")))
    assert [ids(path) for path in tests] == []


def test_the_engine_knows_no_pass() -> None:
    """Only the registry and the command line reach for passes and recipes, by name."""
    engine = [path for path in sources() if path.is_relative_to(ENGINE) and path.name != "registry.py"]
    found = [(ids(path), module) for path in engine for module, _ in imported(path)]
    assert [row for row in found if re.match(r"anesurgery\.(passes|recipes)", row[1])] == []


def module_name(path: Path) -> str:
    """The name under which a file is imported."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    parts = parts if parts[0] == "anesurgery" else ["anesurgery", *parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, modules: Collection[str]) -> Iterator[str]:
    """The modules of this project that a file imports, inside functions and for types only included."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name if name in modules else node.module for name in found]
        else:
            continue
        yield from (name for name in found if name in modules)


def house() -> networkx.DiGraph:
    """The import graph of the project, file by file, without the public face (`anesurgery/__init__.py`)."""
    files = {module_name(path): path for path in sources()}
    graph = networkx.DiGraph()
    graph.add_nodes_from(files)
    for name, path in files.items():
        graph.add_edges_from((name, other) for other in imports_of(path, files) if other != name)
    graph.remove_node("anesurgery")
    return graph


def room(module: str) -> str:
    """The room of a module: the longest entry of `ROOMS` that holds it."""
    inside = module.removeprefix("anesurgery.")
    return max((r for r in ROOMS if inside == r or inside.startswith(f"{r}.")), key=len, default="")


def test_every_file_has_a_room() -> None:
    assert not [name for name in house() if not room(name)]


def test_no_files_import_each_other_in_a_circle() -> None:
    assert not [sorted(c) for c in networkx.strongly_connected_components(house()) if len(c) > 1]


def test_a_circle_would_be_found() -> None:
    graph = house()
    above, below = next(iter(graph.edges))
    graph.add_edge(below, above)
    assert [c for c in networkx.strongly_connected_components(graph) if len(c) > 1]


def test_arrows_point_downwards() -> None:
    upward = [(a, b) for a, b in house().edges if ROOMS.index(room(a)) > ROOMS.index(room(b))]
    assert not upward


BUILDING = frozenset({"Maker", "mb", "Builder", "add_input"})
"""What builds ops, by the name under which it is imported."""


def builders_in(source: ast.Module) -> set[str]:
    """What a file imports that builds ops."""
    froms = [node for node in ast.walk(source) if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in froms for alias in node.names} & BUILDING


def test_facts_and_semantics_build_nothing() -> None:
    asked = [
        p for p in sources() if p.is_relative_to(ENGINE / "facts") or p.is_relative_to(ENGINE / "semantics")
    ]
    assert asked
    assert [ids(path) for path in asked if builders_in(tree(path))] == []


def test_a_builder_would_be_found() -> None:
    assert builders_in(ast.parse("from anesurgery.mil import Operation, mb")) == {"mb"}


@pytest.mark.parametrize("name", registry.recipe_names())
def test_recipes_name_registered_passes(name: str) -> None:
    recipe = find_recipe(name)
    assert recipe.name == name
    for step in recipe.steps:
        assert step.name in registry.pass_names()
        assert type(step) is registry.pass_class(step.name)


def test_the_package_list_is_the_folders_on_disk() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = settings["tool"]["setuptools"]["packages"]
    inits = [path for path in sources() if path.name == "__init__.py"]
    folders = [module_name(path) for path in inits]
    assert sorted(listed) == sorted(folders)
    assert settings["tool"]["setuptools"]["package-dir"] == {
        "anesurgery": "anesurgery",
        "anesurgery.passes": "passes",
        "anesurgery.recipes": "recipes",
    }
    assert (ENGINE / "py.typed").is_file()


@pytest.mark.parametrize("room", ["passes", "recipes"])
def test_the_links_point_right(room: str) -> None:
    link = ENGINE / room
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{room}"
    assert (ROOT / room / "__init__.py").is_file()


LIGHT = 61
"""Ceiling of the modules of this project that a plain pass brings."""


def test_a_pass_brings_little_with_it() -> None:
    """What runs ops, judges models and reads files is imported when it is first asked for."""
    code = "import sys, anesurgery.passes.{}; print(sum(m.startswith('anesurgery') for m in sys.modules))\n"
    counts = python(code.format("negate_subtract") + code.format("apply_remedies")).split()
    assert int(counts[0]) <= LIGHT < int(counts[1])


def test_importing_is_silent_and_light() -> None:
    code = "import sys, anesurgery; print(*(m for m in ('torch', 'coremltools') if m in sys.modules))"
    assert python(code).strip() == ""


def test_listing_needs_neither_coremltools_nor_torch() -> None:
    names = python(
        "import sys\n"
        "sys.modules['coremltools'] = sys.modules['torch'] = None\n"  # importing either now raises
        "from anesurgery import registry\n"
        "for name in [*registry.pass_names(), *registry.recipe_names()]:\n"
        "    print(name, '|', registry.summary(name))\n"
    ).splitlines()
    assert len(names) == len(registry.pass_names()) + len(registry.recipe_names())
    assert all(re.fullmatch(r"\w+ \| .+\.", line) for line in names), names


def test_every_public_name_exists() -> None:
    import anesurgery

    for name in anesurgery.__all__:
        assert getattr(anesurgery, name) is not None
