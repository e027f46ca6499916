"""How long gpt2_ane takes, and how much memory, against coremltools' own null round trip of the same package.

Each variant runs in a fresh process on one thread, alternating; its seconds are those of the processor (user
and system), without imports. Only ratios within a round mean anything: the median of several rounds, and the
spread.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent

HOST = """
import coremltools as ct
from coremltools.models.utils import _apply_graph_pass
begin()
model = ct.models.MLModel(source, skip_model_load=True)
_apply_graph_pass(model, []).save(target)
"""
OURS = """
import torch, coremltools
import anesurgery as ane
ane.apply, ane.recipes.gpt2_ane, ane.run
begin()
surgery = ane.apply(source, {recipe!r}, prove={prove!r}, target={target!r}, quiet=True)
surgery.save(target)
extra["edits"] = len(surgery.changes)
extra["ops"] = sum(surgery.before.values())
"""
FRAME = """
import json, resource, sys, time
source, target = sys.argv[1:]
extra, started = {{}}, [0.0]
def begin(): started[0] = time.process_time()
{body}
spent = time.process_time() - started[0]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps(dict(seconds=spent, peak_mb=peak, **extra)))
"""


Row = dict[str, Any]


def measure(body: str, source: Path, folder: Path) -> Row:
    """One run of a variant."""
    target = folder / "out.mlpackage"
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-c", FRAME.format(body=body), str(source), str(target)]
    threads = {"OMP_NUM_THREADS": "1"}
    made = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | threads)
    found: Row = json.loads(made.stdout.splitlines()[-1])
    return found


def spread(figures: Sequence[float], digits: int = 2) -> str:
    """The median of some figures, and the least and the largest of them."""
    low, middle, high = (f"{f:.{digits}f}" for f in (min(figures), statistics.median(figures), max(figures)))
    return f"{middle} ({low} to {high})"


def make(folder: Path, layers: int, width: int, vocabulary: int, length: int) -> Path:
    """A package, made in a process of its own so that its memory is not counted here."""
    path = folder / f"gpt2-{layers}x{width}.mlpackage"
    sizes = {"layers": layers, "width": width, "vocabulary": vocabulary, "length": length}
    options = [f"--{name}={value}" for name, value in sizes.items()]
    subprocess.run([sys.executable, str(HERE / "gpt2.py"), str(path), *options], check=True)
    shutil.rmtree(path.with_suffix(".weights"), ignore_errors=True)
    return path


def ours(recipe: str = "gpt2_ane", prove: str | None = "sites", target: str | None = None) -> str:
    """The code of one variant."""
    return OURS.format(recipe=recipe, prove=prove, target=target)


BODIES = {"host": HOST, "ours": ours(prove=None), "sites": ours(), "auto": ours("auto")}
GOALS = (
    ("ours", "seconds", 0.2),
    ("ours", "peak_mb", 0.6),
    ("sites", "seconds", 0.35),
    ("sites", "peak_mb", 0.6),
    ("auto", "seconds", 0.8),
)
WORDS = {"ours": "gpt2_ane", "sites": "gpt2_ane with site checks", "auto": "auto with site checks"}
AIM = "M1/macOS 14"
"""One chip for all sizes: where none is named, as many are asked as it takes until one gains."""
SIZES = (12, 48, 192)
"""Layers."""


def against_host(folder: Path, runs: int) -> Iterator[tuple[str, str, str]]:
    """Time and memory on GPT-2 124M."""
    small = make(folder, 12, 768, 50257, 512)
    rounds = [{name: measure(body, small, folder) for name, body in BODIES.items()} for _ in range(runs)]
    for variant, what, goal in GOALS:
        figures = [row[variant][what] / row["host"][what] for row in rounds]
        yield f"{WORDS[variant]} / null round trip, {what}", spread(figures), f"at most {goal}"
    more = [row["sites"]["peak_mb"] - row["ours"]["peak_mb"] for row in rounds]
    yield "site checks add, MB", spread(more, 0), "at most 300"


def by_size(folder: Path, runs: int) -> Iterator[tuple[str, str, str]]:
    """How the time of an op grows with their number."""
    packages = [make(folder, layers, 64, 257, 64) for layers in SIZES]
    rounds = [
        [measure(ours(prove=None, target=AIM), package, folder) for package in packages] for _ in range(runs)
    ]
    each = [[row["seconds"] / row["ops"] for row in rows] for rows in rounds]
    for i, layers in enumerate(SIZES[1:], 1):
        figures = [row[i] / row[0] for row in each]
        yield f"{layers} layers of width 64, time per op / that of 12", spread(figures), "at most 1.1"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--large", action="store_true", help="also 48 layers of width 1600, 3 GB")
    chosen = parser.parse_args()
    table = Table("what", "figure", "goal")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for row in (*against_host(folder, chosen.runs), *by_size(folder, chosen.runs)):
            table.add_row(*row)
        if chosen.large:
            peak = measure(BODIES["ours"], make(folder, 48, 1600, 50257, 512), folder)["peak_mb"]
            table.add_row("48 layers of width 1600, peak memory in MB", f"{peak:.0f}", "under 2000")
    Console().print(table)


if __name__ == "__main__":
    main()
