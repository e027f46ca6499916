"""Does a recipe leave a model at least as exact as it was? Each model of the corpus, before and after.

    python tests/benchmarks/as_exact.py [MODEL ...] [--folder FOLDER]

Exact is the given model in fp32, as it is stored, of samples that are drawn for it; a row says how near the
least exact output is in each arithmetic, before and after. Values are rounded in another order by any edit,
so `SLACK` dB are none.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import residency
import torch

import anesurgery as ane
from anesurgery.checking.metrics import psnr
from anesurgery.errors import InterpretError, SurgeryError
from anesurgery.files.interface_change import adapt_inputs, adapt_outputs
from anesurgery.interpret import run
from anesurgery.interpret.sampling import sample_function
from anesurgery.loading import load
from anesurgery.mil import Array, Program, function_of, quiet_host

RECIPES = ("safe_numbers", "auto")
TARGETS = ("M1/macOS 14", "M4/macOS 15")
SEEDS = tuple(range(6))
SLACK = 1.0
"""dB by which two orders of rounding differ."""
SAME = 90.0
"""dB from which fp16 is as near as it can be; nothing beyond is counted."""


@dataclass(frozen=True)
class Exactness:
    """One recipe on one model for one target, in one arithmetic, in dB."""

    model: str
    target: str
    recipe: str
    arithmetic: str
    before: float
    after: float
    passes: tuple[str, ...]

    @property
    def kept(self) -> bool:
        """Is it at least as exact?"""
        return self.after >= min(self.before, SAME) - SLACK

    def __str__(self) -> str:
        words = "" if self.kept else "  LESS EXACT"
        figures = f"{self.before:6.1f} -> {self.after:6.1f}"
        what = f"{self.model:32} {self.target:12} {self.recipe:13} {self.arithmetic:7}"
        return f"{what} {figures}  {', '.join(self.passes)}{words}"


def distance(wanted: Mapping[str, Any], outputs: Mapping[str, Any]) -> float:
    """The PSNR of the least exact output of floats; minus infinite where one is not finite."""
    return min(
        (_distance(np.asarray(v), np.asarray(outputs[n])) for n, v in wanted.items() if _floats(v)),
        default=math.inf,
    )


def _floats(value: Any) -> bool:
    return bool(np.asarray(value).dtype.kind == "f")


def _distance(wanted: Array, value: Array) -> float:
    defined = np.isfinite(wanted)
    a, b = wanted[defined].astype(np.float64), value[defined].astype(np.float64)
    if not a.size:
        return math.inf
    if not np.isfinite(b).all():
        return -math.inf
    return psnr(float(np.abs(a).max()), float(np.sqrt(np.mean((a - b) ** 2))))


def exactness(name: str, model: Any, recipe: str, target: str) -> list[Exactness]:
    """A row for each arithmetic; none where the recipe changes nothing."""
    before: Program = load(model).program
    surgery = ane.apply(model, recipe, target=target, prove=None, quiet=True)
    passes = tuple(dict.fromkeys(change.pass_name for change in surgery.changes))
    if not passes:
        return []
    found: dict[str, list[float]] = {}
    for function in before.functions:
        for seed in SEEDS:
            values = sample_function(function_of(before, function), seed=seed)
            exact = run(before, values, precision="fp32", function=function)
            for arithmetic in ("fp16", f"ane:{target.split('/')[0]}"):
                old = run(before, values, precision=arithmetic, function=function)
                new = run(
                    surgery.program,
                    adapt_inputs(surgery.contract, values),
                    precision=arithmetic,
                    function=function,
                )
                pair = distance(exact, old), distance(adapt_outputs(surgery.contract, exact, values), new)
                lowest = found.setdefault(arithmetic, [math.inf, math.inf])
                found[arithmetic] = [min(a, b) for a, b in zip(lowest, pair, strict=True)]
    return [Exactness(name, target, recipe, a, was, now, passes) for a, (was, now) in found.items()]


def main() -> None:
    """Print a row for each model that a recipe changes; an error where one is less exact."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models; all of the corpus by default")
    parser.add_argument("--folder", type=Path, help="keep the graphs with random weights there")
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--families", action="store_true", help="small models of each family too")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    worse, tried, changed = 0, 0, 0
    with tempfile.TemporaryDirectory() as scratch, quiet_host():
        models = residency.models if chosen.families else residency.corpus
        for name, make in models(chosen.folder or Path(scratch), everything=True):
            if chosen.names and name not in chosen.names:
                continue
            path = make()
            for target in chosen.targets:
                for recipe in RECIPES:
                    tried += 1
                    try:
                        rows = exactness(name, path, recipe, target)
                    except (SurgeryError, InterpretError) as error:
                        print(f"{name:32} {target:12} {recipe:13} not tried: {str(error).splitlines()[0]}")
                        continue
                    changed += bool(rows)
                    for row in rows:
                        worse += not row.kept
                        print(row, flush=True)
    print(f"{tried} runs, {changed} changed the model, {worse} left it less exact in an arithmetic")
    sys.exit(1 if worse else 0)


if __name__ == "__main__":
    main()
