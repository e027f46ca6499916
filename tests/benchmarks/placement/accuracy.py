"""How often `inspect` is right: against placements that Core ML reported on real Macs.

Two data sets lie beside the checkout (`shared/placement`): single ops and small graphs on an M4, whole models
on an M4 Pro. Each case is built, saved as Core ML receives it, inspected, and compared with what was measured.
Not scored, as the data says: the last relu of a graph (nearly always a tie), ops folded away, and the preferred
unit where only limits are known.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import left_out
import numpy as np
from rich.console import Console
from rich.table import Table

import anesurgery as ane
from anesurgery.errors import LoadError
from anesurgery.mil import Var, ct, mb, types
from anesurgery.placement import verdicts

DATA = Path(__file__).resolve().parents[4] / "shared" / "placement"
M4, M4_PRO = "M4/macOS 27", "M4 Pro/macOS 26"
LETTERS = {"A": "ane", "C": "cpu"}


@dataclass(frozen=True)
class Verdict:
    """One comparison."""

    kind: str
    """ "legal", "preferred alone", "preferred in a graph", "graphs"."""
    case: str
    expected: Any
    found: Any

    @property
    def right(self) -> bool:
        """Are both the same?"""
        return bool(self.expected == self.found)


def builder() -> ModuleType:
    """The module that makes programs of the records."""
    spec = importlib.util.spec_from_file_location("build_case", DATA / "build_case.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def graphs() -> dict[str, dict[str, Any]]:
    """The graphs of which each op was recorded, by name."""
    return left_out.recorded(DATA)


def cases(every: int = 1) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records, or every n-th of them."""
    records = json.loads((DATA / "open.json").read_text(encoding="utf-8"))["cases"]
    for record in records[::every]:
        if record["ane_supported"] is not None:
            yield record["case"], record


def convert(build: ModuleType, record: dict[str, Any], **options: Any) -> Any:
    """The model of a record, as Core ML receives it; coremltools' progress bars are dropped."""
    with contextlib.redirect_stderr(io.StringIO()):
        return build.convert(build.build_program(record, **options), "mlprogram")


def judge(
    build: ModuleType, case: str, record: dict[str, Any], points: list[Any] | None = None
) -> Iterator[Verdict]:
    """What is right and wrong about one record; estimates are put beside the published ones in `points`."""
    found = ane.inspect(convert(build, record), M4)
    if points is not None:
        points += left_out.of_case(record, found)
    row = found.ops[record.get("tested_op_index", 0)]
    yield Verdict("legal", case, record["ane_supported"], row.legal)
    if record["basis"] != "notes":
        yield Verdict("preferred alone", case, record["preferred"], row.preferred)
    for i, op in enumerate(record.get("ops", [])):
        if i != record.get("tested_op_index", 0) and op["ane"] is not None:
            yield Verdict("legal", f"{case}[{i}] {op['op']}", op["ane"], found.ops[i].legal)
    placed = (record.get("ctx") or {}).get("placement")
    if placed:
        yield from _context(build, case, record, [LETTERS[letter] for letter in placed], points)


def _context(
    build: ModuleType, case: str, record: dict[str, Any], expected: list[str], points: list[Any] | None
) -> Iterator[Verdict]:
    whole = ane.inspect(convert(build, record, ctx=True), M4)
    if points is not None:
        points += left_out.of_graph(graphs().get(f"{case}@ctx"), whole)
    found = [row.preferred for row in whole.ops]
    if len(expected) != len(found):
        yield Verdict("graphs", case, len(expected), len(found))
        return
    yield Verdict("graphs", case, expected[:-1], found[:-1])
    for i, (a, b) in enumerate(zip(expected[:-1], found[:-1], strict=True)):
        yield Verdict("preferred in a graph", f"{case}[{i}]", a, b)


def accuracy(verdicts: list[Verdict]) -> Table:
    """Share of right verdicts by kind."""
    table = Table("verdict", "right", "of", "share", title=f"single ops and small graphs, {M4}")
    for kind in dict.fromkeys(v.kind for v in verdicts):
        own = [v for v in verdicts if v.kind == kind]
        right = sum(v.right for v in own)
        table.add_row(kind, str(right), str(len(own)), f"{right / len(own):.1%}")
    return table


def misses(verdicts: list[Verdict]) -> Table:
    """Every wrong verdict about an op or a graph."""
    table = Table("wrong", "case", "measured", "predicted", title="misses")
    for v in verdicts:
        if not v.right and v.kind != "preferred in a graph":
            table.add_row(v.kind, v.case, _short(v.expected), _short(v.found))
    return table


def _short(value: Any) -> str:
    return "".join((u or "?")[0].upper() for u in value) if isinstance(value, list) else str(value)


def corpus() -> Table:
    """Ops without a unit in public models, where they are beside the checkout."""
    table = Table("format", "models", "ops", "without a unit", "share", title=f"corpus, {M4}")
    folder = DATA.parent / "corpus"
    every: list[list[str | None]] = []
    for kind, pattern in {"ML Program": "*.mlpackage", "neural network": "*.mlmodel"}.items():
        found = [units for path in sorted(folder.glob(pattern)) if (units := _units(path))]
        table.add_row(kind, *_without_unit(found))
        every += found
    table.add_row("all", *_without_unit(every))
    return table


def _without_unit(models: list[list[str | None]]) -> tuple[str, ...]:
    """Models, ops, those without a unit, and their share."""
    units = [unit for model in models for unit in model]
    unknown = units.count(None)
    share = f"{unknown / len(units):.1%}" if units else "-"
    return str(len(models)), str(len(units)), str(unknown), share


def _units(path: Path) -> list[str | None]:
    """The unit of each op; none of a file that cannot be read."""
    with contextlib.suppress(LoadError):
        return [row.preferred for row in ane.inspect(path, M4).ops]
    return []


def zoo() -> Table:
    """ANE share of whole models."""
    table = Table("model", "units", "measured", "predicted", "apart", title=f"zoo, {M4_PRO}")
    models = json.loads((DATA / "zoo.json").read_text(encoding="utf-8"))["models"]
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            package = Path(folder) / f"{model['model']}.mlpackage"
            if not package.exists():
                command = [*model["rebuild"].split(), "--save", str(package)]
                subprocess.run(
                    [sys.executable, str(DATA / command[0]), *command[1:]], check=True, capture_output=True
                )
            found = ane.inspect(package, M4_PRO, compute_units=model["units"])
            share = model["ops_per_device"].get("ane", 0) / model["n_ops"]
            predicted = found.residency["ops"]
            table.add_row(
                model["model"],
                model["units"],
                f"{share:.1%}",
                f"{predicted:.1%}",
                f"{100 * abs(predicted - share):.1f} points",
            )
    return table


def speed(count: int = 10_000) -> Table:
    """How long a long program takes, here and now."""
    half = np.ones((64, 64, 1, 1), np.float16)

    @mb.program(input_specs=[mb.TensorSpec((1, 64, 32, 32), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        for _ in range(count // 4):
            y = mb.layer_norm(x=mb.relu(x=mb.conv(x=x, weight=half)), axes=[1])
            x = mb.add(x=x, y=y)
        return x

    started = time.perf_counter()
    found = ane.inspect(program, M4)
    whole = time.perf_counter() - started
    steps = [(r.estimate.cpu or 0.0, r.estimate.ane or 0.0) for r in found.ops if r.estimate]
    started = time.perf_counter()
    verdicts.cheapest_path(steps)
    table = Table("ops", "inspect", "of it the shortest path", title="time on this machine")
    table.add_row(str(len(found.ops)), f"{whole:.2f} s", f"{time.perf_counter() - started:.3f} s")
    return table


HEAD = """# How often inspect is right

`make placement` writes this page.

* **Verdicts**: we compare `inspect` with Core ML's own plans for single ops and small graphs on an M4 (macOS
  27.0.1; 751K/Apple-Neural-Engine-Microarchitecture-Study-M6). We fitted our cost model to the same cases, so
  this score is in-sample. "Legal": can the engine run the op? "Preferred": which unit runs it? "Graphs": do
  all ops of a graph match? A stands for the engine, C for the CPU.
* **Time estimates**: the largest factor by which one is off, in-sample and held out. "Alone" counts classes
  of ops with only one case, so none is left to hold out.
* **Zoo**: the share of ops on the ANE in whole models (M4 Pro, macOS 26.5.1;
  erwinzhang7/coreml-compute-placement).
* **Corpus**: ops of public models for which `inspect` names no unit.

We have no such data for other chips.
"""


def markdown(table: Table) -> str:
    """A table as text."""
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    lines = [[str(column.header) for column in table.columns], ["---"] * len(table.columns), *rows]
    return "\n".join([f"## {str(table.title)[:1].upper()}{str(table.title)[1:]}", "", *map(_line, lines)])


def _line(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def page(tables: Iterable[Table]) -> str:
    """docs/accuracy.md."""
    return "\n\n".join([HEAD.strip(), *map(markdown, tables)]) + "\n"


def main() -> None:
    """Print the tables, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--every", type=int, default=1, help="every n-th case")
    parser.add_argument("--without-zoo", action="store_true", help="leave the whole models out")
    parser.add_argument("--page", type=Path, help="write the tables there, as Markdown")
    given = parser.parse_args()
    if not DATA.is_dir():
        sys.exit(f"the measured placements are not beside this checkout ({DATA.name}/ absent)")
    build = builder()
    points: list[Any] = []
    verdicts = [v for case, record in cases(given.every) for v in judge(build, case, record, points)]
    console = Console()
    tables = [accuracy(verdicts), misses(verdicts), left_out.estimates(points), corpus()]
    if not given.without_zoo:
        tables.append(zoo())
    console.print(*tables, speed())
    if given.page:
        given.page.write_text(page(tables), encoding="utf-8")


if __name__ == "__main__":
    main()
