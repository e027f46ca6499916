"""How long gpt2_ane takes, and how much memory, against coremltools' own null round trip of the same package.

Each variant runs in a fresh process, alternating; the best of several runs counts. Only ratios mean anything.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
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
surgery = ane.apply(source, "gpt2_ane", prove={prove!r}, quiet=True)
surgery.save(target)
extra["edits"] = len(surgery.changes)
extra["ops"] = sum(surgery.before.values())
"""
FRAME = """
import json, resource, sys, time
source, target = sys.argv[1:]
extra, started = {{}}, [0.0]
def begin(): started[0] = time.perf_counter()
{body}
spent = time.perf_counter() - started[0]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps(dict(seconds=spent, peak_mb=peak, **extra)))
"""


def measure(body: str, source: Path, folder: Path, runs: int) -> dict[str, Any]:
    """The best of several runs of one variant."""
    found = []
    for _ in range(runs):
        target = folder / "out.mlpackage"
        shutil.rmtree(target, ignore_errors=True)
        command = [sys.executable, "-c", FRAME.format(body=body), str(source), str(target)]
        made = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(json.loads(made.stdout.splitlines()[-1]))
    return min(found, key=lambda row: row["seconds"]) | {"peak_mb": min(r["peak_mb"] for r in found)}


def make(folder: Path, layers: int, width: int, vocabulary: int, length: int) -> Path:
    """A package, made in a process of its own so that its memory is not counted here."""
    path = folder / f"gpt2-{layers}x{width}.mlpackage"
    sizes = {"layers": layers, "width": width, "vocabulary": vocabulary, "length": length}
    options = [f"--{name}={value}" for name, value in sizes.items()]
    subprocess.run([sys.executable, str(HERE / "gpt2.py"), str(path), *options], check=True)
    shutil.rmtree(path.with_suffix(".weights"), ignore_errors=True)
    return path


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--large", action="store_true", help="also 48 layers of width 1600, 3 GB")
    chosen = parser.parse_args()
    table = Table("what", "figure", "goal")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = make(folder, 12, 768, 50257, 512)
        host, ours, checked = (
            measure(body, small, folder, chosen.runs)
            for body in (HOST, OURS.format(prove=None), OURS.format(prove="sites"))
        )
        for what, goal in (("seconds", "0.7"), ("peak_mb", "0.7")):
            table.add_row(
                f"gpt2_ane / null round trip, {what}", f"{ours[what] / host[what]:.2f}", f"at most {goal}"
            )
        share, more = checked["seconds"] / host["seconds"], checked["peak_mb"] - ours["peak_mb"]
        table.add_row("with site checks / null round trip, seconds", f"{share:.2f}", "at most 0.6")
        table.add_row("site checks add, MB", f"{more:.0f}", "at most 300")
        per_op = []
        for layers in (12, 48, 192):
            row = measure(OURS.format(prove=None), make(folder, layers, 64, 257, 64), folder, chosen.runs)
            per_op.append(row["seconds"] / row["ops"])
            table.add_row(
                f"{layers} layers of width 64, time per op / that of 12",
                f"{per_op[-1] / per_op[0]:.2f}",
                "at most 1.3",
            )
        if chosen.large:
            row = measure(OURS.format(prove=None), make(folder, 48, 1600, 50257, 512), folder, 1)
            table.add_row("48 layers of width 1600, peak memory in MB", f"{row['peak_mb']:.0f}", "under 2000")
    Console().print(table)


if __name__ == "__main__":
    main()
