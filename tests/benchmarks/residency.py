"""What share of each model is on the Neural Engine before and after `auto`, and whether the outputs agree.

Every ML Program of the corpus, its graphs with random weights, a small transformers model of each family, and
models written by hand: vision, audio, sequences, tables. The bars: no share falls on any; the share of ops or
flop rises on at least 80 % of those with something to repair (an op off the engine that is no cast of the
interface, in a model that is not too small for the engine as it is), or, of models that Core ML would leave
on the CPU whatever is done, the share of ops that are legal on the ANE; outputs agree (in fp32 within 1e-4 of
the largest value, or, where `compute_fp16` rounded weights, in fp16 to 60 dB).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hand_written
import numpy as np
import small_models
from rich.console import Console
from rich.table import Table

import anesurgery as ane
from anesurgery.errors import InterpretError, SurgeryError
from anesurgery.files.interface_change import adapt_inputs, adapt_outputs
from anesurgery.interpret import run
from anesurgery.interpret.sampling import sample_function, sample_inputs
from anesurgery.loading import load
from anesurgery.mil import Array, Program, function_of, is_output, quiet_host, walk_ops
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.standing import Standing, stand
from anesurgery.placement.target import Target

CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus"
TARGETS = ("M1/macOS 14", "M4/macOS 15", "A15/iOS 17")
NEARLY_ALL = 0.99
BAR = 0.8
"""Of the models below `NEARLY_ALL`."""
RELATIVE, PSNR = 1e-4, 60.0


@dataclass(frozen=True)
class Row:
    """One model on one target."""

    model: str
    target: str
    before: Standing
    after: Standing
    passes: tuple[str, ...]
    fp32: float
    """Largest difference, relative to the largest value."""
    fp16: float
    """PSNR in dB of fp16 after against fp16 before."""
    seconds: float
    repairable: int = 1
    """Ops that a pass could bring onto the engine, casts of inputs and outputs left out."""
    uncompared: str = ""
    """Why the given model cannot be run, so that there is nothing to compare with."""

    @property
    def falls(self) -> bool:
        """Is a share lower than before? Where there was no flop, that of the ops counts alone."""
        shares = ("ops", "flop") if self.before.flop else ("ops",)
        return any(self.after.share[k] < self.before.share[k] for k in shares)

    @property
    def rises(self) -> bool:
        """Is a share higher than before?"""
        return any(self.after.share[k] > self.before.share[k] for k in ("ops", "flop"))

    @property
    def frees(self) -> bool:
        """Does Core ML leave it on the CPU, with more ops legal on the ANE than before?"""
        alone = not self.before.on_ops and not self.after.on_ops
        return alone and self.after.legal_share > self.before.legal_share

    @property
    def agrees(self) -> bool:
        """Do the outputs agree?"""
        rounded = "compute_fp16" in self.passes
        if self.uncompared:
            return True
        return not self.passes or (self.fp16 >= PSNR if rounded else self.fp32 <= RELATIVE)

    @property
    def counts(self) -> bool:
        """Is there something to gain?"""
        return min(self.before.share.values()) < NEARLY_ALL and self.repairable > 0


def models(folder: Path, names: list[str]) -> Iterator[tuple[str, Path]]:
    """Name and place of each model; those that are made lie in the folder, and are taken from it later."""
    for path in sorted(CORPUS.glob("*.mlpackage")):
        yield path.stem, path
    for path in sorted((CORPUS / "graphs").glob("*.mlpackage")):
        target = folder / "graphs" / path.name
        if not target.exists() and (not names or path.stem in names):
            target.parent.mkdir(exist_ok=True)
            fill = [sys.executable, "fill_weights.py", path.name, str(target)]
            subprocess.run(fill, cwd=path.parent, check=True, capture_output=True)
        yield path.stem, target
    for family in (small_models, hand_written):
        for name in family.names():
            if not names or name in names:
                yield name, family.package(name, folder)


def measure(name: str, path: Path, target: str) -> Row:
    """Apply `auto` without proofs, inspect before and after, run both."""
    loaded, aim = load(str(path)), Target.parse(target)
    started = time.perf_counter()
    surgery = ane.apply(loaded, "auto", target=target, prove=None, quiet=True)
    seconds = time.perf_counter() - started
    passes = tuple(dict.fromkeys(change.pass_name for change in surgery.changes))
    fp32, fp16, uncompared = float("nan"), float("nan"), ""
    if passes:
        try:
            for function in loaded.program.functions:
                run(loaded, sample_inputs(loaded.program, function=function), function=function)
        except InterpretError as error:
            uncompared = str(error).splitlines()[0]
        else:
            fp32, fp16 = differences(loaded.program, surgery)
    before, inspections = stand(loaded.program, aim)
    after = stand(surgery.program, aim)[0]
    return Row(
        name,
        target,
        before,
        after,
        passes,
        fp32,
        fp16,
        seconds,
        repairable(loaded.program, inspections),
        uncompared,
    )


def repairable(program: Program, inspections: Sequence[Inspection]) -> int:
    """How many ops a pass could bring onto the engine without another interface."""
    found = 0
    for function, part in zip(program.functions.values(), inspections, strict=True):
        ends = {
            v.name
            for op in walk_ops(function)
            if op.op_type == "cast" and (op.x.op is None or is_output(op.outputs[0]))
            for v in op.outputs
        }
        placed = any(row.preferred == "ane" for row in part.ops)
        off = [row for row in part.ops if (row.preferred != "ane" if placed else row.legal is False)]
        found += sum(row.name not in ends for row in off)
    return found


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
    return relative, psnr


def compared(old: Array, new: Array) -> tuple[float, float, float]:
    """Largest difference, largest value and root of the mean square difference; where the old one is finite."""
    defined = np.isfinite(old.astype(np.float64))
    a, b = old.astype(np.float64)[defined], new.astype(np.float64)[defined]
    if not a.size:
        return 0.0, 0.0, 0.0
    return float(np.abs(a - b).max()), float(np.abs(a).max()), float(np.sqrt(np.square(a - b).mean()))


def show(rows: list[Row], failed: dict[str, str]) -> bool:
    """Print the table and the bars; are they met?"""
    table = Table("model", "target", "ops", "flop", "legal", "estimate µs", "passes", "fp32", "fp16 dB", "s")
    for r in rows:
        ops, flop = (f"{r.before.share[k]:.3f} → {r.after.share[k]:.3f}" for k in ("ops", "flop"))
        legal = f"{r.before.legal_share:.3f} → {r.after.legal_share:.3f}"
        estimate = f"{r.before.estimate:.0f} → {r.after.estimate:.0f}"
        cells = (r.model, r.target, ops, flop, legal, estimate, ", ".join(r.passes))
        table.add_row(*cells, f"{r.fp32:.1e}", f"{r.fp16:.0f}", f"{r.seconds:.1f}")
    console = Console(width=200)
    console.print(table)
    good = True
    for target in dict.fromkeys(r.target for r in rows):
        mine = [r for r in rows if r.target == target]
        low = [r for r in mine if r.counts]
        risen, freed = sum(r.rises for r in low), sum(r.frees and not r.rises for r in low)
        fallen = [r.model for r in mine if r.falls]
        apart = [r.model for r in mine if not r.agrees]
        console.print(
            f"{target}: {len(mine)} models, of which {len(low)} have something to repair: raised on {risen}, "
            f"and more made legal on {freed} that stay on the CPU (bar {BAR:.0%} together); "
            f"lowered on {fallen or 'none'}; outputs differ on {apart or 'none'}"
        )
        good &= not fallen and not apart and risen + freed >= BAR * len(low)
    for r in rows:
        if r.uncompared:
            console.print(f"{r.model}, {r.target}: not compared, the model given cannot be run: {r.uncompared}")
    for name, reason in failed.items():
        console.print(f"{name}: {reason}")
    return good


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models; all by default")
    parser.add_argument("--folder", type=Path, help="keep converted models there")
    parser.add_argument("--json", type=Path, help="write the figures there")
    chosen = parser.parse_args()
    rows, failed = list[Row](), dict[str, str]()
    with tempfile.TemporaryDirectory() as name, quiet_host():
        folder = chosen.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        for model, path in models(folder, chosen.names):
            for target in TARGETS if not chosen.names or model in chosen.names else ():
                try:
                    rows.append(measure(model, path, target))
                except SurgeryError as error:
                    failed[f"{model}, {target}"] = str(error).splitlines()[0]
    good = show(rows, failed)
    if chosen.json is not None:
        figures = [
            {
                "model": r.model,
                "target": r.target,
                "before": r.before.share,
                "after": r.after.share,
                "fp32": r.fp32,
                "fp16": r.fp16,
                "passes": r.passes,
                "seconds": r.seconds,
            }
            for r in rows
        ]
        chosen.json.write_text(json.dumps(figures, indent=1))
    sys.exit(0 if good and not failed else 1)


if __name__ == "__main__":
    main()
