"""How long cutting and merging take, and how much memory, against `cp -r` and coremltools' own tools.

A GPT-2 of a given shape with random weights is written to a folder, cut under a limit, and removed. Each
variant runs in a fresh process on one thread; ratios are those of one run on this machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path

from recipe import make, measure, spread
from rich.console import Console
from rich.table import Table

COPY = """
import subprocess
begin()
subprocess.run(["cp", "-r", source, target], check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
extra["children"] = used.ru_utime + used.ru_stime
"""
BISECT = """
import coremltools as ct
begin()
folder = target[:-10]
ct.models.utils.bisect_model(source, folder, merge_chunks_to_pipeline=False, check_output_correctness=False)
"""
SPLIT = """
import anesurgery as ane
ane.split
begin()
chain = ane.split(source, {options})
chain.save(target[:-10], overwrite=True)
extra["chunks"] = [round(size / 1e6, 1) for size in chain.weights]
extra["borders"] = [border.bytes for border in chain.borders]
"""
MERGE = """
import anesurgery as ane
ane.merge
begin()
ane.merge({"prefill": source, "decode": source}, target)
"""
MULTIFUNCTION = """
import coremltools as ct
begin()
both = ct.utils.MultiFunctionDescriptor()
for name in ("prefill", "decode"):
    both.add_function(source, "main", name)
both.default_function_name = "prefill"
ct.utils.save_multifunction(both, target)
"""


INSPECT = """
import anesurgery as ane
ane.inspect
begin()
found = ane.inspect(source, target="M1/macOS 14")
extra["ops"] = len(found.ops)
"""
RECIPE = """
import anesurgery as ane
ane.apply, ane.recipes.gpt2_ane
begin()
surgery = ane.apply(source, "gpt2_ane", quiet=True)
surgery.save(target)
extra["edits"] = len(surgery.changes)
"""
COMPARE = """
import torch
import anesurgery as ane
ane.compare
chain = ane.split(source, {options})
begin()
extra["psnr"] = str(ane.compare(source, chain, precision="fp16").psnr)
"""
OPS = """
import anesurgery as ane
from anesurgery.mil import walk_ops
begin()
extra["ops"] = sum(not op.op_type.startswith("const") for op in walk_ops(ane.load(source).program))
"""

OURS = {
    "split by a limit": SPLIT.format(options="max_bytes={limit!r}"),
    "split in {parts}": SPLIT.format(options="{parts}"),
    "merge": MERGE,
    "inspect": INSPECT,
    "gpt2_ane": RECIPE,
    "compare with its chunks": COMPARE.format(options="max_bytes={limit!r}"),
}
"""What is measured; a copy, and a second for a hundred ops, is the measure."""
PEERS = {"bisect_model": BISECT, "save_multifunction": MULTIFUNCTION}
COPIES, OPS_A_SECOND, MOST_MB = 3, 100, 2000
"""The goals: so many times the copy and a second for so many ops; so much resident memory."""


def row(name: str, body: str, source: Path, folder: Path, runs: int, goal: float | None) -> list[str]:
    """Time and memory of one variant, beside the goal in seconds."""
    measured = [measure(body, source, folder) for _ in range(runs)]
    seconds = [found["seconds"] + found.pop("children", 0.0) for found in measured]
    peaks = [found["peak_mb"] for found in measured]
    more = {k: v for k, v in measured[-1].items() if k not in ("seconds", "peak_mb")}
    met = ""
    if goal is not None:
        late, large = max(seconds) > goal, max(peaks) > MOST_MB
        met = f"{goal:.1f} s" + (", missed" if late or large else ", met")
    for left in (folder / "out.mlpackage", folder / "out"):
        shutil.rmtree(left, ignore_errors=True)
    return [name, spread(seconds), met, spread(peaks, 0), json.dumps(more)]


def filled(text: str, given: dict[str, str]) -> str:
    """A text with its blanks filled in."""
    for blank, words in given.items():
        text = text.replace(blank, words)
    return text


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--limit", default="700 MB")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--parts", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="rows whose names have one of these")
    parser.add_argument("--peers", action="store_true", help="coremltools' own tools too: 9 GB of memory")
    parser.add_argument("--folder", type=Path, help="where there is room; a temporary folder by default")
    chosen = parser.parse_args()
    table = Table("variant", "seconds of the processor", "goal", "peak MB", "more")
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        folder = Path(name)
        source = make(folder, chosen.layers, chosen.width, 50257, chosen.tokens)
        size = sum(f.stat().st_size for f in source.rglob("*") if f.is_file())
        copies = [measure(COPY, source, folder) for _ in range(chosen.runs)]
        copy = statistics.median(found["seconds"] + found["children"] for found in copies)
        ops = measure(OPS, source, folder)["ops"]
        goal = COPIES * copy + ops / OPS_A_SECOND
        table.add_row("cp -r", f"{copy:.2f}", "", "", f"{ops} ops")
        given = {"{limit!r}": repr(chosen.limit), "{parts}": str(chosen.parts)}
        ours = {filled(name, given): filled(body, given) for name, body in OURS.items()}
        for variant, body in (ours | (PEERS if chosen.peers else {})).items():
            if any(word in variant for word in chosen.only or [""]):
                timed = goal if variant in ours else None
                table.add_row(*row(variant, body, source, folder, chosen.runs, timed))
    Console(width=160).print(f"{chosen.layers} layers of width {chosen.width}, {size / 1e6:.0f} MB", table)


if __name__ == "__main__":
    main()
