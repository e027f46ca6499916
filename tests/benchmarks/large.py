"""How long cutting and merging take, and how much memory, against `cp -r` and coremltools' own tools.

A GPT-2 of a given shape with random weights is written to a folder, cut under a limit, and removed. Each
variant runs in a fresh process on one thread; ratios are those of one run on this machine.
"""

from __future__ import annotations

import argparse
import json
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--limit", default="700 MB")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where there is room; a temporary folder by default")
    chosen = parser.parse_args()
    variants = {
        "cp -r": COPY,
        "split by a limit": SPLIT.format(options=f"max_bytes={chosen.limit!r}"),
        "bisect_model": BISECT,
        "split in two": SPLIT.format(options="2"),
        "save_multifunction": MULTIFUNCTION,
        "merge": MERGE,
    }
    table = Table("variant", "seconds of the processor", "peak MB", "more")
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        folder = Path(name)
        source = make(folder, chosen.layers, chosen.width, 50257, 64)
        size = sum(f.stat().st_size for f in source.rglob("*") if f.is_file())
        for variant, body in variants.items():
            rows = [measure(body, source, folder) for _ in range(chosen.runs)]
            seconds = [row["seconds"] + row.pop("children", 0.0) for row in rows]
            more = {k: v for k, v in rows[-1].items() if k not in ("seconds", "peak_mb")}
            table.add_row(variant, spread(seconds), spread([r["peak_mb"] for r in rows], 0), json.dumps(more))
    Console().print(f"{chosen.layers} layers of width {chosen.width}, {size / 1e6:.0f} MB", table)


if __name__ == "__main__":
    main()
