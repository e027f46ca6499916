"""The promises of the layout: what a reader may rely on without looking."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType, MappingProxyType

import networkx
import pytest

import anesurgery as ane
from anesurgery import registry
from anesurgery.mil import ct, mb
from anesurgery.surgery import Recipe, find_recipe

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
        regions
        facts
        semantics
        interpret
        loading
        neuralnetwork
        files
        frontend
        display
        text
        mil
        ops
        doors
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


def test_files_say_what_they_are() -> None:
    assert [ids(path) for path in sources() if not ast.get_docstring(tree(path))] == []


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The signature and the docstring are the documentation of the options, and are not counted."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_functions_stay_short() -> None:
    found = [(ids(path), f.name, body_lines(f)) for path in sources() for f in functions(path)]
    assert [row for row in found if row[-1] > FUNCTION_LINES] == []


def documented(path: Path) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    """What must have a docstring: public classes, and public functions at the top level."""
    for node in nodes(path):
        if isinstance(node, ast.ClassDef) and path.name != "mil.py":
            yield node  # the classes of mil.py are coremltools', with types
    for top in tree(path).body:
        decorators = {getattr(d, "id", "") for d in getattr(top, "decorator_list", ())}
        if isinstance(top, ast.FunctionDef) and "overload" not in decorators:
            yield top


def test_public_things_have_docstrings() -> None:
    public = [(ids(p), node) for p in sources() for node in documented(p) if not node.name.startswith("_")]
    assert [(place, node.name) for place, node in public if not ast.get_docstring(node)] == []


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


READERS = {
    "checking.comparison._single": "one side of `compare`",
    "coreai.running.run_model": "the model of `run`, where Apple's runtime runs it",
    "interpret.predictor._read": "the model of `run` and of `Predictor`",
    "rewriting.both_formats._compared": "what `save_both` wrote, read back",
    "rewriting.ml_program.MLProgram.read": "the model of `apply`",
    "shipping.building._read_stage": "a stage of `build`, which a stopped build finds on disk",
    "shipping.onnx_models._converted": "what the conversion of an ONNX file leaves on disk",
    "shipping.several_sizes._converted": "what a function converts at each size, for `sizes`",
    "testing.apply_pass": "of authors, who give programs",
}
"""Helpers of doors that read a model, and whose they are."""


def readers(path: Path) -> Iterator[str]:
    """The functions of a file that load a model, by module and name."""
    if not any(module == "anesurgery.loading" for module, _ in imported(path)):
        return
    module = module_name(path).removeprefix("anesurgery.")
    owners = [("", node) for node in tree(path).body]
    owners += [(f"{c.name}.", node) for c in tree(path).body if isinstance(c, ast.ClassDef) for node in c.body]
    for owner, node in owners:
        calls = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
        if not isinstance(node, ast.ClassDef) and any(
            isinstance(f, ast.Name) and f.id == "load" for f in calls
        ):
            yield f"{module}.{owner}{getattr(node, 'name', '')}"


def test_only_doors_load_models() -> None:
    """Below what is public everything takes what is loaded, so that no file is read twice in one call."""
    doors = {f"{home}.{name}" for name, home in ane._HOMES.items()}
    inner = [path for path in sources() if not path.is_relative_to(ENGINE / "commands")]
    below = {reader for path in inner for reader in readers(path)} - doors
    assert below == set(READERS)


UNREAD = {
    "readers": """
        checking.comparison._single rewriting.ml_program.read_chunks rewriting.ml_program.read_subject
        interpret.decoding._decoder interpret.predictor._read loading._load loading._words loading.load_as_is
        loading.load_graph loading.load_member network_editing.neural_network.NeuralNetwork._given
        network_editing.neural_network.NeuralNetwork.read network_editing.upgrade._specification
        rewriting.ml_program.MLProgram.read rewriting.ml_program.Subject.read shipping.building._read_stage
    """,
    "what kind of model it is, before anything reads it": """
        files.sequence.is_chunked placement.models._Programs.__init__ placement.models._is_program
        placement.models._label placement.models.inspect_other placement.models.kind_of
        placement.models.of_layers placement.models.spec_of registry.converter_of
    """,
    "an MLModel or a path that Core ML or coremltools gets, whose types are Any": """
        compressing.assignment.Proposal.apply compressing.modes.apply_configs
        network_editing.upgrade._keep_notes
        placement.compute_plan._compiled placement.compute_plan.ask placement.compute_plan.plan
        placement.inspector._beside placement.core_ml_runs._setting placement.core_ml_runs.measure
        rewriting.ml_program._layers
    """,
    "a part of one door, which reads the model or opens it again where it was edited": """
        checking.ranges._spread coreai.running.run_model interpret.decoder_calls.tables_of
        interpret.decoding.Decoder.__init__
        interpret.decoding.replay interpret.predictor.Predictor.__init__ interpret.predictor.run
        rewriting.both_formats.in_format show.pictures._units surgery._Job.of surgery.Recipe.__call__
    """,
    "how a comparison calls a model whose interface a pass changed": """
        passes.fix_shapes._call passes.position_function.called
    """,
}
"""Functions below the doors whose model may be anything, by what they do with it."""


def given_any_model(path: Path) -> Iterator[str]:
    """The functions of a file whose model may be anything, by module and name."""
    module = module_name(path).removeprefix("anesurgery.")
    owners = [("", node) for node in tree(path).body]
    owners += [(f"{c.name}.", node) for c in tree(path).body if isinstance(c, ast.ClassDef) for node in c.body]
    for owner, node in owners:
        if isinstance(node, ast.FunctionDef):
            named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if any(a.arg == "model" and getattr(a.annotation, "id", "") == "Any" for a in named):
                yield f"{module}.{owner}{node.name}"


def test_only_doors_take_models_of_every_kind() -> None:
    """What is below them takes what is loaded; what does not says which of few things it does."""
    doors = {f"{home}.{name}" for name, home in ane._HOMES.items()}
    outside = (ENGINE / "commands", ENGINE / "testing.py")
    inner = [path for path in sources() if not any(map(path.is_relative_to, outside))]
    below = {name for path in inner for name in given_any_model(path)} - doors
    assert below == {name for names in UNREAD.values() for name in names.split()}


def test_a_function_that_loads_is_noticed() -> None:
    assert "splitting.merge.extract" in set(readers(ENGINE / "splitting" / "merge.py"))


def handles_refused(node: ast.AST) -> bool:
    return isinstance(node, ast.ExceptHandler) and node.type is not None and "Refused" in ast.unparse(node.type)


def raises_refused(node: ast.AST) -> bool:
    return isinstance(node, ast.Raise) and node.exc is not None and "Refused" in ast.unparse(node.exc)


def test_a_reason_that_is_raised_is_caught_by_the_driver() -> None:
    """And by the check of a site, which hands it to the driver; where a weight may be encoded again, or a pass
    or what follows lengths walks by itself, it becomes another reason or a refusal."""
    caught = {ids(path) for path in sources() if any(map(handles_refused, nodes(path)))}
    drivers = {"anesurgery/rewriting/driver.py", "anesurgery/checking/site.py"}
    drivers |= {"anesurgery/network_editing/layer_pass.py"}
    own = {
        "anesurgery/regions/compressed_weights.py",
        "anesurgery/shipping/resized.py",
        "passes/fold_constants.py",
    }
    assert caught == drivers | own


def test_passes_and_recipes_return_their_reasons() -> None:
    written = [path for path in sources() if not path.is_relative_to(ENGINE)]
    own = [p for p in written if p.parent in (ROOT / "recipes", ROOT / "passes") or p.name == "__init__.py"]
    # The parts of a pass may raise, and passes over layers do, as `Site` does.
    assert [ids(path) for path in own if any(map(raises_refused, nodes(path)))] == []


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


HOPS = 14
"""Most files between `ane.apply` and the saved package, along any one chain of calls."""

PROJECT = (f"{ENGINE}/", f"{PASSES}/", f"{RECIPES}/")
DECORATORS = ("<module>", "asked", "at_the_door")
"""Functions that call what they stand around."""


def chain(frame: FrameType | None) -> list[str]:
    """The files of the project on a stack, the outermost first; a decorator is no stop."""
    found: list[str] = []
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(PROJECT) and function not in DECORATORS:
            name = module_name(Path(file).resolve())
            if not found or found[-1] != name:
                found.append(name)
        frame = frame.f_back
    return found[::-1]


def operated(folder: Path) -> set[tuple[str, ...]]:
    """Every chain of files from `apply`, given a path, to the saved package."""
    inputs = [mb.TensorSpec((2, 3))]
    program = mb.program(input_specs=inputs, opset_version=ct.target.iOS16)(
        lambda x: mb.sub(x=x, y=mb.abs(x=x))
    )
    path = ane.apply(program, [], quiet=True).save(folder / "before.mlpackage")
    recipe = Recipe("own", (registry.make_pass("negate_subtract"),))
    chains: set[tuple[str, ...]] = set()

    def watch(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PROJECT):
            chains.add(tuple(chain(frame)))

    sys.setprofile(watch)
    try:
        ane.apply(path, recipe, quiet=True).save(folder / "after.mlpackage")
    finally:
        sys.setprofile(None)
    return chains


def test_calls_lead_to_the_saved_package_in_few_hops_and_never_upwards(tmp_path: Path) -> None:
    """Upwards the engine calls the pass alone, which the check of a site asks (`sample`) what to draw.

    `analysis_cache` holds a decorator, which calls what it decorates.
    """
    chains = operated(tmp_path)
    assert any("anesurgery.files.writing" in c for c in chains)
    longest = max(chains, key=lambda c: len(set(c)))
    assert len(set(longest)) <= HOPS, longest
    calls = {call for c in chains for call in pairwise(c) if not call[1].startswith("anesurgery.passes")}
    order = {name: ROOMS.index(room(name)) for call in calls for name in call if room(name)}
    calls = {(a, b) for a, b in calls if a != "anesurgery.semantics.analysis_cache"}
    upward = [(a, b) for a, b in calls if order.get(a, -1) > order.get(b, len(ROOMS))]
    assert not [(a, b) for a, b in upward if (room(a), b) != ("checking", "anesurgery.rewriting.rewrite")]


CLOCK = re.compile(
    r"\btime\.(?:time|perf_counter|process_time|monotonic|thread_time)(?:_ns)?\b|\bfrom time import"
    r"|\btimeit\b|datetime\.(?:now|today)|\bgetrusage\b|\bru_\w+|timeout=\d"
)
"""Whatever a machine at work gives another number for; a child that hangs is stopped by `children.HUNG`."""
BY_THE_CLOCK = {"test_kills_and_savers.py": "a child is killed at moments of one save; none is judged"}
"""Test files that look at a clock, and why that decides nothing."""


def clocks(text: str) -> list[str]:
    """What a file of tests judges by the clock, or by the memory of a process; code in strings counts."""
    return [line.strip() for line in text.splitlines() if CLOCK.search(line)]


def test_no_test_judges_by_the_clock() -> None:
    """Growth is shown by counting (`counting.assert_linear`); times belong in tests/benchmarks."""
    files = [p for p in TESTS.rglob("*.py") if "benchmarks" not in p.parts and p != Path(__file__)]
    by_clock = {p.name: clocks(p.read_text(encoding="utf-8")) for p in files if p.name not in BY_THE_CLOCK}
    assert {name: found for name, found in by_clock.items() if found} == {}


@pytest.mark.parametrize(
    "line",
    [
        "assert time.process_time() - start < 2",
        "start = time.monotonic_ns()",
        "from time import perf_counter",
        "seconds = timeit.timeit(work)",
        'CHILD = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"',
        "subprocess.run(command, timeout=60)",
    ],
)
def test_a_clock_in_a_test_is_noticed(line: str) -> None:
    assert clocks(f"x = 1\n{line}\n") == [line]


def pass_files() -> list[Path]:
    """The files of all passes over ops, and of the templates; the parts of a large pass are left out."""
    files = [registry.file_of(name).resolve() for name in registry.op_pass_names()]
    return sorted([*files, PASSES / "_template.py"])


def pass_of(path: Path) -> str:
    """The name of the pass that a file holds."""
    return path.parent.name if path.name == "__init__.py" else path.stem


@pytest.mark.parametrize("path", pass_files(), ids=ids)
def test_a_pass_file_is_one_pass(path: Path) -> None:
    name = pass_of(path)
    classes = [n.name for n in tree(path).body if isinstance(n, ast.ClassDef)]
    public = [c for c in classes if not c.startswith("_")]
    assert public == [registry.camel(name.lstrip("_"))]
    words = (ast.get_docstring(tree(path)) or "") if name.startswith("_") else registry.documentation(name)
    for word in ("Before::", "After::", "Refuses when", "Why it helps"):
        assert word in words, f"{name}: the docstring has no {word!r}"
    made = [n.name for n in tree(path).body if isinstance(n, ast.FunctionDef)]
    shared = [
        t.id for n in tree(path).body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)
    ]
    assert "example" in (*made, *shared)


IMPORT_LINES = 8
"""Ceiling of the lines of imports in the median pass: what a stranger copies before the first own line."""
LIGHT = 60
"""Ceiling of the modules of this project that a plain pass brings."""
FEW_PASSES = 6
"""A word of `authoring` has more users than this, or stands in the tutorial."""
TAUGHT = {"is_constant", "PassError", "PatternError"}


def test_the_words_of_the_authors_are_those_that_most_passes_use() -> None:
    from anesurgery import authoring

    texts = [path.read_text(encoding="utf-8") for path in PASSES.rglob("*.py")]
    used = {word: sum(bool(re.search(rf"\b{word}\b", t)) for t in texts) for word in authoring.__all__}
    assert {word for word, count in used.items() if count <= FEW_PASSES} <= TAUGHT


def unquoted(value: ast.expr | None) -> ast.expr | None:
    """An annotation that may be written as a string."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str) and " | " in value.value:
        return ast.parse(value.value, mode="eval").body
    return value


def union(value: ast.expr | None, unions: Mapping[str, ast.expr]) -> set[str]:
    """The kinds of an annotation, those of the named unions in it included."""
    value = unquoted(value)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr):
        return union(value.left, unions) | union(value.right, unions)
    if isinstance(value, ast.Name) and value.id in unions:
        return union(unions[value.id], unions)
    return set() if value is None else {ast.unparse(value)}


def unions_of(source: ast.Module, elsewhere: Mapping[str, Mapping[str, ast.expr]]) -> dict[str, ast.expr]:
    """The unions that a file names, and those of other files that it imports."""
    unions = {
        alias.asname or alias.name: elsewhere[node.module][alias.name]
        for node in source.body
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module in elsewhere
        for alias in node.names
        if alias.name in elsewhere[node.module]
    }
    for statement in source.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            name = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
            if isinstance(name, ast.Name) and isinstance(unquoted(statement.value), ast.BinOp):
                unions[name.id] = statement.value
    return unions


@cache
def unions_of_all() -> dict[str, dict[str, ast.expr]]:
    return {module_name(path): unions_of(tree(path), {}) for path in sources()}


def of_three_kinds(
    source: ast.Module, elsewhere: Mapping[str, Mapping[str, ast.expr]] = MappingProxyType({})
) -> list[str]:
    """The functions with three kinds of result or more whose `Returns:` leaves out one of them."""
    unions, lacking = unions_of(source, elsewhere), list[str]()
    for node in ast.walk(source):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        kinds = union(node.returns, unions)
        returns = (ast.get_docstring(node) or "").partition("Returns:")[2].lower()
        words = {kind.split("[")[0].split(".")[-1].lower() for kind in kinds}
        if len(kinds) > 2 and not all(word in returns for word in words):
            lacking.append(f"{node.name} -> {' | '.join(sorted(kinds))}")
    return lacking


def silent(source: ast.Module) -> list[str]:
    """The functions for others that may return `NO_MATCH`, which reports leave out, and do not say so."""
    lacking = []
    for node in ast.walk(source):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        if "NO_MATCH" not in (ast.get_docstring(node) or ""):
            returned = [n.value for n in ast.walk(node) if isinstance(n, ast.Return) and n.value is not None]
            if any("NO_MATCH" in ast.unparse(value) for value in returned):
                lacking.append(node.name)
    return lacking


def test_functions_with_three_kinds_of_result_name_them_all() -> None:
    lacking = {ids(path): rows for path in sources() if (rows := of_three_kinds(tree(path), unions_of_all()))}
    assert lacking == {}


def test_what_no_report_has_is_said_where_it_is_returned() -> None:
    """`Rewrite.check` says it for the checks of passes, and the parts of these."""
    helpers = [path for path in sources() if path.is_relative_to(ENGINE)]
    lacking = {ids(path): set(rows) - {"check"} for path in helpers if (rows := silent(tree(path)))}
    assert {place: rows for place, rows in lacking.items() if rows} == {}


@pytest.mark.parametrize(
    ("lines", "lacks"),
    [
        ('def f() -> A | Refusal | None:\n    """Of it."""', True),
        ('def f() -> "A | B | None":\n    """Words.\n\n    Returns:\n        An a; a b.\n    """', True),
        ('def f() -> A | B | C:\n    """Words.\n\n    Returns:\n        An a, a b or a c.\n    """', False),
        ('Found = A | Refusal\ndef f() -> Found | None:\n    """Of it."""', True),
        ('def f() -> A | None:\n    """Of it."""', False),
    ],
)
def test_a_third_kind_of_result_is_noticed(lines: str, lacks: bool) -> None:
    assert bool(of_three_kinds(ast.parse(lines))) == lacks


def test_a_silent_answer_is_noticed() -> None:
    assert silent(ast.parse('def f(m):\n    """Of it."""\n    return m if m else an.NO_MATCH')) == ["f"]


def is_number(value: ast.expr) -> bool:
    """Is an expression a number written out, a sum or product of such, or several of them?"""
    if isinstance(value, ast.Constant):
        return isinstance(value.value, (int, float)) and not isinstance(value.value, bool)
    if isinstance(value, ast.BinOp):
        return is_number(value.left) and is_number(value.right)
    if isinstance(value, ast.UnaryOp):
        return is_number(value.operand)
    return isinstance(value, ast.Tuple) and bool(value.elts) and all(map(is_number, value.elts))


def _named(statement: ast.Assign) -> bool:
    return all(isinstance(name, (ast.Name, ast.Tuple)) for name in statement.targets)


def unexplained(source: ast.Module) -> list[str]:
    """The numbers that a file names, without a word below them, or below the lines that follow at once."""
    lacking, body = [], source.body
    for at, statement in enumerate(body):
        if not (isinstance(statement, ast.Assign) and is_number(statement.value) and _named(statement)):
            continue
        last = at
        while last + 1 < len(body) and isinstance(body[last + 1], (ast.Assign, ast.AnnAssign)):
            if body[last + 1].lineno != (body[last].end_lineno or 0) + 1:
                break
            last += 1
        below = body[last + 1] if last + 1 < len(body) else None
        words = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if not words or below is None or below.lineno != (body[last].end_lineno or 0) + 1:
            lacking.append(ast.unparse(statement))
    return lacking


def test_numbers_that_decide_say_why_they_are_these() -> None:
    assert {ids(path): rows for path in sources() if (rows := unexplained(tree(path)))} == {}


def test_a_number_without_a_word_is_noticed() -> None:
    source = 'MOST = 48\n\nLEAST, SLACK = 2, 16.0\nEND = -1\n"""Why."""\nNAME = "x"\n'
    assert unexplained(ast.parse(source)) == ["MOST = 48"]


BY_HAND = re.compile(
    r"replace_uses_of_var_after_op|replace_block_output_var|set_outputs|remove_ops|remove_dead"
    r"|an\.(?:add_input|remove_input|Change)\(|\.operations = |changes(?:\.append| \+=)"
)
"""What only the engine does to a graph and to the record of its edits."""


def test_passes_edit_through_the_engine() -> None:
    assert {pass_of(path): words for path in pass_files() if (words := BY_HAND.findall(path.read_text()))} == {}


@pytest.mark.parametrize(
    "line",
    [
        "function.set_outputs([made])",
        "block.replace_uses_of_var_after_op(anchor_op=op, old_var=old, new_var=new)",
        "session.changes.append(an.Change(self.name, name, (), ()))",
        "new = an.add_input(function, name, shape, dtype)",
    ],
)
def test_an_edit_by_hand_would_be_found(line: str) -> None:
    assert BY_HAND.search(line)


UNCOMPARED = {"compress_weights": "ROUNDED", "compute_fp16": "ROUNDED", "scale_ranges": "WHOLE"}
"""Pass over ops -> the constant with the reason why its edits are not compared one by one."""


def test_passes_that_compare_no_edits_are_few_and_say_why() -> None:
    named = {pass_of(path): re.findall(r"unchecked=(\w+)", path.read_text()) for path in pass_files()}
    assert {name: found for name, (found,) in ((n, f) for n, f in named.items() if f)} == UNCOMPARED


AGAIN = re.compile(
    r"^def _?(?:per_axis|each_axis|shape_of|fixed_shape|op_inputs|is_constexpr|is_constant_op)\(|"
    r"op_type\.startswith\(\"constexpr|\.inputs\.items\(\) if \w+ is not None",
    re.MULTILINE,
)
"""An accessor of values and ops."""
ONCE = {"mil": 3, "semantics.reading": 2, "semantics.fingerprint": 1, "checking.proofs": 1}
"""Where they stand. What is compared as a whole has the host's own inputs too."""


def test_accessors_are_written_once() -> None:
    found = {path: len(AGAIN.findall(path.read_text(encoding="utf-8"))) for path in sources()}
    assert {module_name(p).removeprefix("anesurgery."): n for p, n in found.items() if n} == ONCE


@pytest.mark.parametrize(
    "line",
    [
        "def _per_axis(op, name, axis):",
        'if op.op_type.startswith("constexpr_"):',
        "given = {k: v for k, v in op.inputs.items() if v is not None}",
    ],
)
def test_an_accessor_that_is_written_again_is_noticed(line: str) -> None:
    assert AGAIN.search(line)


def import_lines(path: Path) -> int:
    """How many lines of a file are imports."""
    statements = [node for node in nodes(path) if isinstance(node, (ast.Import, ast.ImportFrom))]
    return sum((node.end_lineno or 0) - node.lineno + 1 for node in statements)


def test_a_pass_begins_soon() -> None:
    assert median(import_lines(path) for path in pass_files()) <= IMPORT_LINES


def test_every_word_of_the_authors_is_in_the_docs() -> None:
    from anesurgery import authoring

    page = (ROOT / "docs" / "authoring.md").read_text(encoding="utf-8")
    written = set(re.findall(r"`(?:facts\.|regions\.|semantics\.|mb\.|op\.|an\.)?([A-Za-z_]\w*)", page))
    assert not [word for word in authoring.__all__ if word not in written]


@pytest.mark.parametrize("name", registry.pass_names())
def test_a_pass_has_a_test_file(name: str) -> None:
    room = "passes/layers" if name in registry.layer_pass_names() else "passes"
    assert (TESTS / room / f"test_{name}.py").is_file()


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


def test_a_pass_brings_little_with_it() -> None:
    """What runs ops, judges models and reads files is imported when it is first asked for."""
    code = "import sys, anesurgery.passes.{}; print(sum(m.startswith('anesurgery') for m in sys.modules))"
    assert int(python(code.format("negate_subtract"))) <= LIGHT < int(python(code.format("apply_remedies")))


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


def test_no_test_folder_is_a_package() -> None:
    assert not list(TESTS.rglob("__init__.py"))
