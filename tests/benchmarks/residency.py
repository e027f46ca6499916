"""What share of each model is on the Neural Engine before and after `auto`, and whether the outputs agree.

Every model of the corpus, its graphs with random weights, a small transformers model of each family, and models
written by hand: vision, audio, sequences, tables. With `--recipes`, every recipe that takes a model, and with
`--cases` the small graphs of measured placements too.

The bars: no share falls on any, no output is lost, nothing but an error in words stops a run; `auto` raises the
share of ops or flop on at least 80 % of the ML Programs with something to repair, or, of models that Core ML
would leave on the CPU whatever is done, the share of ops that are legal on the ANE; outputs agree (in fp32
within 1e-4 of the largest value, or, where values were rounded, in fp16 to 60 dB). What is saved is read again.

Each run is a process of its own with a time limit. Rows are JSON lines; those that are there are not run again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import hand_written
import numpy as np
import public_blocks
import public_pictures
import public_scenes
import public_sound
import public_words
import small_models
from rich.console import Console
from rich.table import Table

import anesurgery as ane
from anesurgery import registry
from anesurgery.errors import InterpretError, IsPipeline, SurgeryError
from anesurgery.files.interface import adapt_inputs, adapt_outputs
from anesurgery.interpret import run
from anesurgery.interpret.sampling import sample_function, sample_inputs
from anesurgery.loading import load
from anesurgery.mil import Array, function_of, quiet_host, walk_ops
from anesurgery.placement.inspection import Inspection, OpRow

SHARED = Path(__file__).resolve().parents[3] / "shared"
CORPUS = SHARED / "corpus"
TARGETS = ("M1/macOS 14", "M4/macOS 15", "M4/macOS 27", "A15/iOS 17")
NEARLY_ALL = 0.99
BAR = 0.8
"""Of the models below `NEARLY_ALL`."""
RELATIVE, PSNR = 1e-4, 60.0
ROUNDING = {"compute_fp16", "interface_fp16"}
MADE = (small_models, hand_written, public_pictures, public_scenes, public_sound, public_words, public_blocks)
REFUSED, LATE = "refused", "time limit"


@dataclass(frozen=True)
class Figures:
    """Where the ops of a model are."""

    ops: float
    """Share on the ANE."""
    flop: float
    legal: float
    """Share of the ops that the ANE can run, whether or not Core ML would choose it."""
    placed: int
    """Ops on the ANE."""
    off: int
    """Ops off it that could be on it: in a model that Core ML leaves on the CPU, those that are not legal."""
    has_flop: bool
    estimate: float

    @classmethod
    def of(cls, found: Sequence[Inspection]) -> Figures:
        """From the inspections of the functions or parts of a model."""
        rows = [row for part in found for row in _rows(part)]
        on, legal = [r for r in rows if r.preferred == "ane"], [r for r in rows if r.legal]
        flop, count = sum(r.flop for r in rows), max(len(rows), 1)
        off = [r for r in rows if (r.preferred != "ane" if on else r.legal is False)]
        share = sum(r.flop for r in on) / flop if flop else 1.0
        cost = sum(part.cost or 0.0 for part in found)
        return cls(len(on) / count, share, len(legal) / count, len(on), len(off), flop > 0, cost)


def _rows(part: Inspection) -> list[OpRow]:
    return [*part.ops, *(row for inner in part.parts.values() for row in _rows(inner))]


@dataclass(frozen=True)
class Row:
    """One recipe on one model for one target."""

    model: str
    target: str
    recipe: str
    before: Figures | None = None
    after: Figures | None = None
    passes: tuple[str, ...] = ()
    fp32: float = float("nan")
    """Largest difference, relative to the largest value."""
    fp16: float = float("nan")
    """PSNR in dB of fp16 after against fp16 before."""
    seconds: float = float("nan")
    uncompared: str = ""
    """Why there is nothing to compare with: the given model cannot be run, or is random."""
    failure: str = ""
    """Why there is no result; what begins with `REFUSED` is an error in words."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What was run."""
        return self.model, self.target, self.recipe

    @property
    def falls(self) -> bool:
        """Is a share lower than before? Where there was no flop, that of the ops counts alone."""
        a, b = self.before, self.after
        return a is not None and b is not None and (b.ops < a.ops or (a.has_flop and b.flop < a.flop))

    @property
    def rises(self) -> bool:
        """Is a share higher than before?"""
        a, b = self.before, self.after
        return a is not None and b is not None and (b.ops > a.ops or b.flop > a.flop)

    @property
    def frees(self) -> bool:
        """Does Core ML leave it on the CPU, with more ops legal on the ANE than before?"""
        a, b = self.before, self.after
        return a is not None and b is not None and not (a.placed or b.placed) and b.legal > a.legal

    @property
    def agrees(self) -> bool:
        """Do the outputs agree?"""
        if self.uncompared or not self.passes:
            return True
        return self.fp16 >= PSNR if ROUNDING & set(self.passes) else self.fp32 <= RELATIVE

    @property
    def counts(self) -> bool:
        """Is there something to gain?"""
        return (
            self.before is not None
            and min(self.before.ops, self.before.flop) < NEARLY_ALL
            and self.before.off > 0
        )

    def to_json(self) -> str:
        """A line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Row:
        """From a line."""
        found = json.loads(line)
        for name in ("before", "after"):
            found[name] = None if found[name] is None else Figures(**found[name])
        return cls(**{**found, "passes": tuple(found["passes"])})


Model = tuple[str, Callable[[], Path]]
"""Name, and what gives the place; it is called in the process of a run, since threads do not survive a fork."""


def models(folder: Path, everything: bool) -> Iterator[Model]:
    """Name and place of each model; those that are made lie in the folder, and are taken from it later."""
    yield from corpus(folder, everything)
    for family in MADE:
        for name in family.names():
            yield name, partial(family.package, name, folder)


def corpus(folder: Path, everything: bool) -> Iterator[Model]:
    """The public models, and the graphs with random weights."""
    suffixes = ("mlpackage", "mlmodel", "mlmodelc") if everything else ("mlpackage",)
    for path in sorted(p for suffix in suffixes for p in CORPUS.glob(f"*.{suffix}")):
        yield path.name if everything else path.stem, partial(Path, path)
    for path in sorted((CORPUS / "graphs").glob("*.mlpackage")):
        yield path.stem, partial(_filled, path, folder / "graphs" / path.name)


def _filled(graph: Path, target: Path) -> Path:
    """A graph with random weights."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        fill = [sys.executable, "fill_weights.py", graph.name, str(target)]
        subprocess.run(fill, cwd=graph.parent, check=True, capture_output=True)
    return target


def cases(folder: Path) -> Iterator[Model]:
    """The small graphs whose placement was measured."""
    sys.path.insert(0, str(SHARED / "placement"))
    build_case = importlib.import_module("build_case")
    for name, record in build_case.load(SHARED / "placement" / "open.json").items():
        for context in (False, True):
            target = folder / "cases" / f"{name}{'@ctx' * context}.mlpackage"
            yield target.stem, partial(_case, build_case, record, context, target)


def _case(builder: Any, record: Any, context: bool, target: Path) -> Path:
    """One of them, or the same op between others."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        builder.convert(builder.build_program(record, ctx=context), "mlprogram").save(str(target))
    return target


def measure(name: str, make: Callable[[], Path], target: str, recipe: str) -> Row:
    """Apply a recipe without proofs, save, inspect before and after, run both."""
    path = make()
    before, started = placed(path, target), time.perf_counter()
    try:
        surgery = ane.apply(path, recipe, target=target, prove=None, quiet=True)
    except SurgeryError as error:
        return Row(name, target, recipe, before, failure=f"{REFUSED}: {str(error).splitlines()[0]}")
    seconds = time.perf_counter() - started
    passes = tuple(dict.fromkeys(change.pass_name for change in surgery.changes))
    if not passes:
        return Row(name, target, recipe, before, before, seconds=seconds)
    with tempfile.TemporaryDirectory() as folder:
        saved = surgery.save(Path(folder) / f"m{surgery.subject.suffix}")
        after = placed(saved, target)
        fp32, fp16, uncompared = compared_outputs(path, saved, surgery)
    return Row(name, target, recipe, before, after, passes, fp32, fp16, seconds, uncompared)


def placed(model: Path, target: str) -> Figures:
    """Where the ops are, over all functions."""
    try:
        functions: list[str | None] = (
            list(load(model).program.functions) if model.suffix == ".mlpackage" else [None]
        )
    except IsPipeline:
        functions = [None]
    return Figures.of([ane.inspect(model, target, function=name) for name in functions])


def compared_outputs(path: Path, saved: Path, surgery: Any) -> tuple[float, float, str]:
    """The relative difference in fp32, the PSNR in fp16, and why there is neither."""
    try:
        if path.suffix == ".mlmodel":
            psnr = ane.compare(path, saved, contract=surgery.contract).psnr
            return 10 ** (-psnr / 20), psnr, ""
        loaded = load(path)
    except SurgeryError as error:
        return float("nan"), float("nan"), str(error).splitlines()[0]
    if any(op.op_type.startswith("random") for op in walk_ops(loaded.program)):
        return float("nan"), float("nan"), "its numbers are random"
    try:
        for function in loaded.program.functions:
            run(loaded.program, sample_inputs(loaded.program, function=function), function=function)
    except InterpretError as error:
        return float("nan"), float("nan"), str(error).splitlines()[0]
    return (*differences(loaded.program, surgery), "")


def differences(before: Any, surgery: Any) -> tuple[float, float]:
    """The relative difference in fp32 and the PSNR in fp16; the worst over outputs and functions."""
    relative, psnr = 0.0, float("inf")
    for function in before.functions:
        values = sample_function(function_of(before, function), seed=0)
        for precision in ("fp32", "fp16"):
            old: Any = adapt_outputs(
                surgery.contract, run(before, values, precision=precision, function=function), values
            )
            new = run(
                surgery.program, adapt_inputs(surgery.contract, values), precision=precision, function=function
            )
            for key, value in old.items():
                apart, scale, noise = compared(np.asarray(value), np.asarray(new[key]))
                if precision == "fp32":
                    relative = max(relative, apart / scale if scale else apart)
                elif noise:
                    psnr = min(psnr, 20 * np.log10(scale / noise) if scale else 0.0)
    return float(relative), float(psnr)


def compared(old: Array, new: Array) -> tuple[float, float, float]:
    """Largest difference, largest value and root of the mean square difference; where the old one is finite."""
    defined = np.isfinite(old.astype(np.float64))
    a, b = old.astype(np.float64)[defined], new.astype(np.float64)[defined]
    if not a.size:
        return 0.0, 0.0, 0.0
    return float(np.abs(a - b).max()), float(np.abs(a).max()), float(np.sqrt(np.square(a - b).mean()))


Job = tuple[str, Callable[[], Path], str, str]
"""Model, target and recipe."""


def alone(job: Job, limit: float) -> Row:
    """Run a job in a process of its own."""
    name, _, target, recipe = job
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(job, theirs))
    process.start()
    theirs.close()
    row: Row | None = None
    if ours.poll(limit):
        try:
            row = Row.from_json(ours.recv())
        except EOFError:
            row = Row(name, target, recipe, failure="the process died")
    process.kill()
    process.join()
    return row or Row(name, target, recipe, failure=f"{LATE}: {limit:g} s")


def _child(job: Job, answer: Any) -> None:
    name, _, target, recipe = job
    try:
        with quiet_host():
            row = measure(*job)
    except Exception as error:  # a defect, or a model that cannot be built: the row says which
        row = Row(name, target, recipe, failure=f"{type(error).__name__}: {error}")
    answer.send(row.to_json())


def show(rows: Sequence[Row]) -> bool:
    """Print what changed, and the bars; are they met?"""
    console = Console(width=200)
    table = Table(
        "model", "target", "recipe", "ops", "flop", "legal", "estimate µs", "passes", "fp32", "fp16 dB", "s"
    )
    for r in (r for r in rows if r.passes and r.before is not None and r.after is not None):
        a, b = r.before, r.after
        assert a is not None
        assert b is not None
        shares = [f"{getattr(a, k):.3f} → {getattr(b, k):.3f}" for k in ("ops", "flop", "legal")]
        cells = (*shares, f"{a.estimate:.0f} → {b.estimate:.0f}", ", ".join(r.passes))
        table.add_row(*r.key, *cells, f"{r.fp32:.1e}", f"{r.fp16:.0f}", f"{r.seconds:.1f}")
    console.print(table)
    met = [_bars(console, rows, target) for target in dict.fromkeys(r.target for r in rows)]
    for r in (r for r in rows if r.uncompared or r.failure):
        said = r.failure or f"not compared: {r.uncompared}"
        if not said.startswith(REFUSED) or r.recipe == "auto":
            console.print(f"{', '.join(r.key)}: {said}")
    return all(met) and all(not r.failure or r.failure.startswith(REFUSED) for r in rows)


def _bars(console: Console, rows: Sequence[Row], target: str) -> bool:
    mine = [r for r in rows if r.target == target]
    low = [r for r in mine if r.recipe == "auto" and r.counts and not r.failure]
    risen, freed = [r for r in low if r.rises], [r for r in low if r.frees and not r.rises]
    fallen = [f"{r.model} by {r.recipe}" for r in mine if r.falls]
    apart = [f"{r.model} by {r.recipe}" for r in mine if not r.agrees]
    console.print(
        f"{target}: {len({r.model for r in mine})} models, {len(low)} with something to repair: raised on "
        f"{len(risen)}, and more made legal on {len(freed)} that stay on the CPU (bar {BAR:.0%} together); "
        f"lowered on {fallen or 'none'}; outputs differ on {apart or 'none'}"
    )
    console.print(f"  not raised: {', '.join(r.model for r in low if not (r.rises or r.frees)) or 'none'}")
    return not fallen and not apart and len(risen) + len(freed) >= BAR * len(low)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models; all by default")
    parser.add_argument("--folder", type=Path, help="keep converted models there")
    parser.add_argument("--rows", type=Path, help="JSON lines: what is there is not run again")
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--recipes", action="store_true", help="every recipe, and models of every format")
    parser.add_argument("--cases", action="store_true", help="the small graphs of measured placements alone")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each run")
    chosen = parser.parse_args()
    recipes = registry.recipe_names() if chosen.recipes else ["auto"]
    with tempfile.TemporaryDirectory() as name:
        folder, file = chosen.folder or Path(name), chosen.rows or Path(name) / "rows.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        file.touch()
        rows = {row.key: row for row in map(Row.from_json, file.read_text().splitlines())}
        with quiet_host():
            given = cases(folder) if chosen.cases else models(folder, chosen.recipes)
            for model, make in (m for m in given if not chosen.names or m[0] in chosen.names):
                for target in chosen.targets:
                    for recipe in recipes:
                        if (model, target, recipe) in rows:
                            continue
                        row = alone((model, make, target, recipe), chosen.limit)
                        rows[row.key] = row
                        with file.open("a") as lines:
                            print(row.to_json(), file=lines)
    wanted = [r for r in rows.values() if r.target in chosen.targets and r.recipe in recipes]
    sys.exit(0 if show([r for r in wanted if not chosen.names or r.model in chosen.names]) else 1)


if __name__ == "__main__":
    main()
