"""Which runs of a recipe edit a model for nothing, by what its user sees: `make gains`.

    python tests/benchmarks/for_nothing.py [--only NAME ...] [--limit N] [--sources examples corpus]

`auto` and the recipes for its family are applied to each example, model of the corpus and architecture, without
site proofs, and the saved result is inspected beside the file as given. An edited model gained nothing where
less than 2 % of its time is gained, no segment or switch fewer is left, no finding that numbers or a conversion
are wrong has gone, and it loaded before. A run whose row is there is not run again.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path

import matrix
import residency
import torch
from architectures import Architecture
from families import ARCHITECTURES
from residency import Model

import anesurgery as ane
from anesurgery import frontend, registry
from anesurgery.errors import SurgeryError, SurgeryWarning
from anesurgery.examples.example_models import EXAMPLES
from anesurgery.files.package import save
from anesurgery.loading import load
from anesurgery.mil import quiet_host
from anesurgery.placement.durations import change
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.score import Expected
from anesurgery.show.summary import gone_and_new, sections
from anesurgery.surgery import Surgery, find_recipe

TARGETS = ("M1/macOS 14", "M4/macOS 15")
FOLDER = Path("build/gains").resolve()
EXAMPLE = "example "
"""Before the names of examples."""
LITTLE = 0.02
"""A share of the time that counts for nothing."""
SLOWER, LARGER = 1.001, 1.01
"""Times the time, and the bytes, from which on a result is slower, or larger."""
WRONG = ("conversion", "numeric")
"""Kinds of findings that results are wrong, or may be."""
RATIO = re.compile(r"[\d.]+ times as (?:fast|slow)|(?:faster|slower) by [\d.]+")


@dataclass(frozen=True)
class Run:
    """One recipe on one model for one target, as its user sees it.

    Attributes:
        model, target, recipe: what was run.
        passes: those that changed something; none where nothing was edited.
        time: the expected time after, as a multiple of that before.
        known: is that in milliseconds, on both sides? Else it is of what Core ML counts.
        segments, switches: how many fewer there are.
        repaired: rules of which there are fewer findings that results are wrong.
        loads: did the OS refuse the model as given, and not the result?
        bytes: of the result, as a multiple of those of the model as given.
        ratio: a ratio of times that the report names.
        why: what the report gives as the reason, or the passes.
        failure: why there is no result.
    """

    model: str
    target: str
    recipe: str
    passes: tuple[str, ...] = ()
    time: float = 1.0
    known: bool = False
    segments: int = 0
    switches: int = 0
    repaired: tuple[str, ...] = ()
    loads: bool = False
    bytes: float = 1.0
    ratio: str = ""
    why: str = ""
    failure: str = ""
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str, str]:
        """What was run."""
        return self.model, self.target, self.recipe

    @property
    def for_nothing(self) -> bool:
        """Was it edited, and is nothing better?"""
        better = self.time <= 1 - LITTLE or self.segments > 0 or self.switches > 0
        return bool(self.passes) and not (better or self.repaired or self.loads)

    @property
    def faults(self) -> list[str]:
        """The names of `FAULTS` that it has."""
        return [name for name, has in FAULTS.items() if has(self)]


FAULTS: dict[str, Callable[[Run], bool]] = {
    "for nothing": lambda run: run.for_nothing,
    "slower": lambda run: bool(run.passes) and run.time > SLOWER,
    "larger": lambda run: bool(run.passes) and run.bytes > LARGER,
    "ratio without a time": lambda run: bool(run.ratio) and not run.known,
}


def fitting(name: str, path: Path) -> list[str]:
    """`auto`, the recipe that was made for the model, and those for its family that take it."""
    own = EXAMPLES[name.removeprefix(EXAMPLE)].recipe if name.startswith(EXAMPLE) else "auto"
    try:
        program = load(path).program
    except SurgeryError:  # layers, or a pipeline
        return ["auto", "neuralnetwork_ane"]
    strict = [recipe for recipe in map(find_recipe, registry.recipe_names()) if recipe.strict]
    fit = [recipe.name for recipe in strict if recipe.applies_to(program) is None]
    return list(dict.fromkeys(["auto", own, *fit]))


def examples(folder: Path) -> Iterator[Model]:
    """The models that `anesurgery example` makes."""
    for name, one in EXAMPLES.items():
        path = folder / "examples" / f"{name}{one.suffix}"
        yield f"{EXAMPLE}{name}", partial(_made, path, partial(ane.example, name, path))


def architectures(folder: Path) -> Iterator[Model]:
    """The rows of the matrix, at their smallest sizes, converted by trace."""
    for name, row in ARCHITECTURES.items():
        path = folder / "architectures" / f"{name}.mlpackage"

        def make(row: Architecture = row, path: Path = path) -> Path:
            return save(load(matrix.converted(row, row.module(), "trace", "FLOAT16")), path)

        yield name, partial(_made, path, make)


def _made(path: Path, make: Callable[[], Path]) -> Path:
    """A model that is made once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with redirect_stderr(io.StringIO()):  # progress bars
        return path if path.exists() else make()


SOURCES: dict[str, Callable[[Path], Iterator[Model]]] = {
    "examples": examples,
    "corpus": lambda folder: residency.corpus(folder, everything=True),
    "architectures": architectures,
}


@lru_cache(maxsize=2)
def inspected(path: Path, target: str) -> Inspection:
    """The file as given; once for all recipes."""
    return ane.inspect(path, target=target)


def measure(name: str, path: Path, target: str, recipe: str) -> Run:
    """Apply, save, inspect, and set both inspections side by side."""
    started = time.perf_counter()
    try:
        before = inspected(path, target)
        surgery = ane.apply(path, recipe, target=target, prove=None, quiet=True)
    except SurgeryError as error:
        return Run(name, target, recipe, failure=str(error).splitlines()[0])
    except Exception as error:  # a defect, which the list shows
        return Run(name, target, recipe, failure=f"DEFECT: {type(error).__name__} {error}")
    passes = tuple(dict.fromkeys(one.pass_name for one in surgery.changes))
    ratio = next(iter(RATIO.findall(" ".join(str(surgery).split()))), "")
    if not passes:
        return Run(name, target, recipe, ratio=ratio, seconds=time.perf_counter() - started)
    with tempfile.TemporaryDirectory() as folder:
        saved = surgery.save(Path(folder) / f"m{surgery.subject.suffix}")
        after = ane.inspect(saved, target=target)
        sizes = size(path), size(saved)
    times, known = ratio_of(before, after)
    return Run(
        name,
        target,
        recipe,
        passes,
        times,
        known,
        _segments(before) - _segments(after),
        before.switches - after.switches,
        tuple(group.finding.rule for group, _ in gone_and_new(before, after)[0] if group.finding.kind in WRONG),
        bool(before.refused) and not after.refused,
        sizes[1] / sizes[0],
        ratio,
        reason(surgery),
        seconds=time.perf_counter() - started,
    )


def _segments(inspection: Inspection) -> int:
    return sum(len(part.segments) for _, part in sections(inspection))


def ratio_of(before: Inspection, after: Inspection) -> tuple[float, bool]:
    """The time after as a multiple of that before, and whether both are known in milliseconds."""
    if before.time is not None and after.time is not None:
        return change(before.time, after.time).ratio, True
    costs = [Expected.of([part for _, part in sections(one)]).cost for one in (before, after)]
    return (costs[1] / costs[0] if all(costs) else 1.0), False


def size(path: Path) -> int:
    """Bytes of a file, or of all in a folder."""
    return sum(p.stat().st_size for p in (path.rglob("*") if path.is_dir() else (path,)) if p.is_file())


def reason(surgery: Surgery) -> str:
    """Why it was edited, as the report says it; else the passes."""
    kept = [note for note in surgery.notes if note.startswith("kept ") or "measured" in note]
    passes = dict.fromkeys(one.pass_name for one in surgery.changes)
    return "; ".join(filter(None, [surgery.wrong, *kept])) or ", ".join(passes)


def show(runs: Sequence[Run]) -> None:
    """The table of counts, and the offenders with the reason of each."""
    print(f"| target | recipe | runs | edited | {' | '.join(FAULTS)} |")
    print(f"|---|---|{'---:|' * (2 + len(FAULTS))}")
    for target, recipe in sorted({(run.target, run.recipe) for run in runs}):
        mine = [run for run in runs if (run.target, run.recipe) == (target, recipe) and not run.failure]
        counts = [sum(fault(run) for run in mine) for fault in FAULTS.values()]
        figures = [len(mine), sum(bool(run.passes) for run in mine), *counts]
        print(f"| {target} | {recipe} | {' | '.join(map(str, figures))} |")
    print()
    for run in (run for run in runs if run.faults):
        unit = "time" if run.known else "cost"
        said = f"{unit} x{run.time:.3f}, bytes x{run.bytes:.3f}, segments {-run.segments:+d}"
        print(f"{', '.join(run.key)}: {', '.join(run.faults).upper()}: {said}")
        print(f"    {run.why or 'not edited'}" + (f" [says: {run.ratio}]" if run.ratio else ""))
    for run in (run for run in runs if run.failure):
        print(f"{', '.join(run.key)}: not applied: {run.failure}")


def source() -> str:
    """A digest of the library's source: rows of another one say nothing of this one."""
    root = Path(ane.__file__).resolve().parent
    digest = hashlib.blake2b(digest_size=6)
    for folder in (root, root.parent / "passes", root.parent / "recipes"):
        for file in sorted(folder.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def read(file: Path) -> dict[tuple[str, str, str], Run]:
    """The runs whose rows are there."""
    lines = map(json.loads, file.read_text().splitlines() if file.exists() else ())
    runs = [Run(**{**row, "passes": tuple(row["passes"]), "repaired": tuple(row["repaired"])}) for row in lines]
    return {run.key: run for run in runs}


def measure_missing(chosen: argparse.Namespace, file: Path) -> dict[tuple[str, str, str], Run]:
    """Run what has no row yet; the rows of what was chosen."""
    runs, wanted = read(file), dict[tuple[str, str, str], Run]()
    models = [one for source in chosen.sources for one in SOURCES[source](chosen.folder)]
    named = [(n, make) for n, make in models if not chosen.only or any(word in n for word in chosen.only)]
    for name, make in named[: chosen.limit]:
        try:
            path = make()
        except Exception as error:  # the rows of all others shall stand
            print(f"{name}: not made: {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
            continue
        for target in chosen.targets:
            for recipe in fitting(name, path):
                key = name, target, recipe
                if key not in runs:
                    runs[key] = measure(name, path, target, recipe)
                    with file.open("a") as lines:
                        print(json.dumps(asdict(runs[key])), file=lines)
                    print(f"{', '.join(key)}: {runs[key].seconds:.0f} s", flush=True)
                wanted[key] = runs[key]
    return wanted


def main() -> None:
    """Measure what is missing, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="models whose name holds one of these words")
    parser.add_argument("--limit", type=int, help="that many models at most")
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="keep models that are made there")
    parser.add_argument("--rows", type=Path, help="JSON lines; by default a file in the folder for this source")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore", SurgeryWarning)
    kernels = matrix.torchvision_without_kernels()
    frontend.register()
    frontend.register_experts()
    with quiet_host():
        runs = measure_missing(chosen, chosen.rows or chosen.folder / f"rows-{source()}.jsonl")
    show(list(runs.values()))
    del kernels


if __name__ == "__main__":
    main()
