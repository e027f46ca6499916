"""Models of today's sizes cut under a limit: their chunks, what passes, and whether the outputs stay the same.

Each model is made and cut in its full shape, and again with few tokens or small pictures at full width; that
one runs, whole and as a chain, in the arithmetic of its stored types, and the outputs are compared bit for bit.
Each runs in a process of its own. `--page FILE` writes the table into a page of the documentation.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from large_shapes import SHAPES, package
from pages import between, fill
from rich.console import Console

HEAD = "| model | weights, MB | chunks, MB | largest transfer | outputs |\n" + "| --- " * 5 + "|"
CALLS = 2


def values(program: Any) -> list[dict[str, Any]]:
    """Inputs for a few calls."""
    from anesurgery.mil import np_dtype, types

    rng, found = np.random.default_rng(0), list[dict[str, Any]]()
    for call in range(CALLS):
        one: dict[str, Any] = {}
        for name, var in program.functions["main"].inputs.items():
            if not types.is_state(var.sym_type):
                shape, kind = [int(n) for n in var.shape], np_dtype(var)
                draw = rng.integers(0, 1000, shape) if kind.kind == "i" else rng.standard_normal(shape)
                one[name] = np.full(shape, call, kind) if name == "place" else draw.astype(kind)
        found.append(one)
    return found


def equal(source: Path, limit: str) -> str:
    """Do the outputs of a chain and the whole agree in every bit, states kept between the calls?"""
    import anesurgery as ane
    from anesurgery.interpret import Predictor

    loaded = ane.load(source)
    inputs, found = values(loaded.program), list[list[Any]]()
    for model in (source, ane.split(source, max_bytes=limit)):
        predictor = Predictor(model, precision="fp16")
        state = predictor.make_state()
        found.append([predictor(one, state=state) for one in inputs])
        del predictor
    pairs = [(a[n], b[n]) for a, b in zip(*found, strict=True) for n in a]
    same = sum(a.tobytes() == b.tobytes() for a, b in pairs)
    alive = all(np.isfinite(a).all() and np.ptp(a.astype(np.float32)) > 0 for a, _ in pairs)
    return "bit-identical" if same == len(pairs) and alive else f"{same} of {len(pairs)} outputs equal"


def row(name: str, limit: str, folder: Path, toy: bool) -> dict[str, Any]:
    """Figures of one model."""
    import anesurgery as ane

    whole = package(name, folder / "whole.mlpackage", toy=toy)
    chain = ane.split(whole, max_bytes=limit)
    most = max(chain.borders, key=lambda b: b.bytes, default=None)
    passing = "" if most is None else f"{most.bytes / 1e3:.0f} kB: {', '.join(most.names)}"
    size = sum(f.stat().st_size for f in whole.rglob("weight.bin"))
    made = {"name": name, "size": size / 1e6, "chunks": [w / 1e6 for w in chain.weights], "passing": passing}
    del chain
    small = package(name, folder / "small.mlpackage", quick=True, toy=toy)
    return {**made, "equal": equal(small, limit)}


def measured(name: str, limit: str, place: Path | None, toy: bool) -> dict[str, Any]:
    """The same in a process of its own."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        command = [sys.executable, __file__, "--one", name, "--limit", limit, "--folder", folder]
        made = subprocess.run([*command, *["--toy"] * toy], capture_output=True, text=True, check=False)
    if made.returncode:
        raise RuntimeError(made.stderr[-2000:])
    found: dict[str, Any] = json.loads(made.stdout.splitlines()[-1])
    return found


def line(found: dict[str, Any]) -> str:
    """A row of the table."""
    chunks = ", ".join(f"{size:.0f}" for size in found["chunks"])
    return f"| {found['name']} | {found['size']:.0f} | {chunks} | {found['passing']} | {found['equal']} |"


def write(page: Path, rows: dict[str, str]) -> None:
    """Put rows into the table of a page; those of other models stay."""
    old = between(page.read_text(encoding="utf-8"), "chains")[1]
    known = {name: row for row in old.splitlines() for name in SHAPES if row.startswith(f"| {name} |")} | rows
    table = "\n".join([HEAD, *(known[name] for name in SHAPES if name in known)])
    fill(page, "chains", table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", default="700 MB")
    parser.add_argument("--only", default="", help="models whose name has this")
    parser.add_argument("--toy", action="store_true", help="a few narrow layers, to try this script")
    parser.add_argument("--folder", type=Path, help="where there is room; a temporary folder by default")
    parser.add_argument("--page", type=Path, help="a page between whose marks the table is written")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(row(chosen.one, chosen.limit, chosen.folder, chosen.toy)))
        return
    names = [name for name in SHAPES if chosen.only in name]
    rows = {n: line(measured(n, chosen.limit, chosen.folder, chosen.toy)) for n in names}
    Console(width=200).print("\n".join([HEAD, *rows.values()]), markup=False)
    if chosen.page is not None:
        write(chosen.page, rows)


if __name__ == "__main__":
    main()
