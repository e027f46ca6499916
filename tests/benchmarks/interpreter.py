"""The interpreter against the original torch modules in eager mode, fp32, the same number of threads.

All rows of a model are measured in one run, by turns; a time ratio is the median over the rounds. At one thread
the time is that of the processor, which other jobs on the machine hardly change; else it is that of the clock.
Memory is that of fresh processes: with what they import, and beyond that. Only ratios mean anything.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import MODELS, example, module, package, values
from recipe import make
from rich.console import Console
from rich.table import Table

from anesurgery.interpret import Executable, Predictor
from anesurgery.interpret.arithmetic.precision import PRECISIONS
from anesurgery.mil import Array, Program, Var, ct, mb

HERE = Path(__file__).resolve().parent
ROWS = {
    "fp32 package": (False, "fp32", "torch", 1.1),
    "fp16 package": (True, "fp32", "torch", 1.1),
    'precision="fp16"': (True, "fp16", "torch", None),
    'precision="ane"': (True, "ane", "fp16 package", 5.0),
}
"""Row -> is the package fp16, the arithmetic, against which row or torch it is timed, the most it may take."""
OPS = 1000
MEMORY = 1.2
PER_OP = 15e-6


def clock() -> Callable[[], float]:
    """The clock to read: see above."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def rounds(calls: dict[str, Callable[[], Any]], count: int) -> list[dict[str, float]]:
    """Seconds of each call, by turns, after one call of each that does not count."""
    read, found = clock(), []
    for i in range(count + 1):
        row = {}
        for name, call in calls.items():
            started = read()
            call()
            row[name] = read() - started
        if i:
            found.append(row)
    return found


def ratio(found: list[dict[str, float]], name: str, against: str) -> float:
    """The median over the rounds."""
    return statistics.median(row[name] / row[against] for row in found)


def peak(*arguments: str) -> dict[str, int]:
    """Memory of a fresh process that runs a model."""
    command = [sys.executable, str(HERE / "peak.py"), *arguments]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {made.stderr[-2000:]}")
    return json.loads(made.stdout.splitlines()[-1])


def judged(value: float, most: float | None) -> str:
    """A ratio, marked where it is over the goal."""
    return f"{value:.2f}" + ("" if most is None or value <= most else f" (goal {most})")


def measure(name: str, count: int, folder: Path, table: Table) -> None:
    """Add the rows of one model."""
    packages = {half: package(name, half, folder) for half in (False, True)}
    rows = {row: how for row, how in ROWS.items() if how[1] in PRECISIONS}
    memory = {row: peak(str(packages[half]), precision) for row, (half, precision, _, _) in rows.items()}
    memory["torch"] = peak("torch", name)
    model, x, given = module(name), example(name), values(name)
    predictors = {row: Predictor(packages[how[0]], precision=how[1]) for row, how in rows.items()}
    calls: dict[str, Callable[[], Any]] = {r: partial(p, given) for r, p in predictors.items()}
    calls["torch"] = lambda: model(x)
    with torch.inference_mode():
        expected = model(x).numpy()
        errors = {row: error(p(given), expected) for row, p in predictors.items()}
        found = rounds(calls, count)
    for row, (_, _, against, most) in rows.items():
        whole, beyond = ratios(memory[row], memory["torch"])
        time_ratio = judged(ratio(found, row, against), most)
        goal = MEMORY if row == "fp32 package" else None
        table.add_row(name, row, f"{time_ratio} x {against}", judged(whole, goal), f"{beyond:.2f}", errors[row])
    for row in ROWS.keys() - rows.keys():
        table.add_row(name, row, "skipped: the interpreter does not know this arithmetic")


def ratios(ours: dict[str, int], theirs: dict[str, int]) -> tuple[float, float]:
    """Peak resident memory of two processes: whole, and beyond what they imported."""
    whole = ours["resident"] / theirs["resident"]
    return whole, (ours["resident"] - ours["base"]) / (theirs["resident"] - theirs["base"])


def error(found: dict[str, Any], expected: Array) -> str:
    """The largest difference, of the largest number."""
    (made,) = found.values()
    return f"{np.abs(made - expected).max() / np.abs(expected).max():.1e}"


def chain() -> Program:
    """A program of trivial ops."""

    @mb.program(input_specs=[mb.TensorSpec((1,))] * 2, opset_version=ct.target.iOS16)
    def made(x: Var, y: Var) -> Var:
        for i in range(OPS):
            x = mb.add(x=x, y=y) if i % 2 else mb.relu(x=x)
        return x

    return made


def overhead(precision: str) -> float:
    """Seconds spent on an op beside computing it: those of the same calls of torch are taken off."""
    executable = Executable(chain(), precision=precision)
    given = {name: np.ones(1, np.float32) for name in executable.function.inputs}
    one = torch.ones(1)

    def bare() -> torch.Tensor:
        x = one
        for i in range(OPS):
            x = torch.add(x, one) if i % 2 else torch.relu(x)
        return x

    with torch.inference_mode():
        found = rounds({"ours": lambda: executable(given), "torch": bare}, 30)
    return min(row["ours"] for row in found) / OPS - min(row["torch"] for row in found) / OPS


def large(folder: Path) -> str:
    """Memory for a package of 3 GB, in sizes of the package."""
    path = make(folder, 48, 1600, 50257, 512)
    size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    found = peak(str(path), "fp32")
    shares = {k: f"{found[k] / size:.2f}" for k in ("resident", "anonymous", "own")}
    return (
        f"fp16 package of {size / 1e9:.1f} GB, memory in sizes of it: peak {shares['resident']}, "
        f"of it not mapped from files {shares['anonymous']}; private after {shares['own']}; goal 1.5"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="only models with this in their name")
    parser.add_argument("--large", action="store_true", help="also a package of 3 GB")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    table = Table("model", "row", "time", "memory", "beyond imports", "largest relative error")
    with tempfile.TemporaryDirectory() as name:
        for model in (m for m in MODELS if chosen.only in m):
            measure(model, chosen.runs, Path(name), table)
        Console(width=140).print(table)
        for precision in PRECISIONS:
            spent = overhead(precision)
            held = "held" if spent < PER_OP else "missed"
            print(f"{precision}: {spent * 1e6:.1f} microseconds per op, goal 15: {held}")
        if chosen.large:
            print(large(Path(name)))


if __name__ == "__main__":
    main()
