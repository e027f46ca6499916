"""Does a recipe leave a model at least as exact as it was? Each model of the corpus, before and after.

    python tests/benchmarks/as_exact.py [MODEL ...] [--folder FOLDER]

Exact is the given model in fp32, as it is stored, of samples that are drawn for it; a row says how near the
least exact output is in each arithmetic, before and after (`anesurgery.checking.exactness` says what counts),
and how the expected time and the size change.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import residency
import torch

import anesurgery as ane
from anesurgery.checking.exactness import Yardstick, less_exact
from anesurgery.errors import InterpretError, SurgeryError
from anesurgery.loading import load
from anesurgery.mil import Program, quiet_host
from anesurgery.placement.certifying import arithmetic_of

RECIPES = ("safe_numbers", "auto")
TARGETS = ("M1/macOS 14", "M4/macOS 15")


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
    costs: str = ""
    """How the expected time, the ops and the weights change, in words."""

    @property
    def kept(self) -> bool:
        """Is it at least as exact?"""
        return not less_exact({self.arithmetic: self.before}, {self.arithmetic: self.after})

    def __str__(self) -> str:
        words = "" if self.kept else "  LESS EXACT"
        figures = f"{self.before:6.1f} -> {self.after:6.1f}"
        what = f"{self.model:32} {self.target:12} {self.recipe:13} {self.arithmetic:7}"
        return f"{what} {figures}  {', '.join(self.passes)}; {self.costs}{words}"


@dataclass
class Before:
    """A model as it is stored, measured once for all recipes and targets."""

    name: str
    model: Any
    seeds: int = 6
    _measured: dict[str, tuple[Yardstick, dict[str, float] | None]] = field(default_factory=dict)

    def exactness(self, recipe: str, target: str) -> list[Exactness]:
        """A row for each arithmetic; none where the recipe changes nothing."""
        surgery = ane.apply(self.model, recipe, target=target, prove=None, quiet=True)
        passes = tuple(dict.fromkeys(change.pass_name for change in surgery.changes))
        if not passes:
            return []
        measured, was = self._of(arithmetic_of(target))
        now = None if was is None else measured.measure(surgery.program, surgery.contract)
        if was is None or now is None:
            raise SurgeryError("it cannot be run on drawn inputs")
        costs = costs_of(surgery)
        return [Exactness(self.name, target, recipe, a, was[a], now[a], passes, costs) for a in was]

    def _of(self, arithmetic: str) -> tuple[Yardstick, dict[str, float] | None]:
        if arithmetic not in self._measured:
            program: Program = load(self.model).program
            measured = Yardstick(program, arithmetic, seeds=self.seeds, most_flop=math.inf)
            self._measured[arithmetic] = measured, measured.measure(program)
        return self._measured[arithmetic]


SAYING = ("although", "would rise", "for which the model grew")
"""What notes and warnings say of a recipe that costs something."""


def costs_of(surgery: ane.Surgery) -> str:
    """How a model stands after a recipe: time, ops, weights; and whether a loss is said."""
    start, end = surgery.scores
    if start is None or end is None:
        return "cost not estimated"
    costs = f"{end.takes(start)}, ops {start.ops} -> {end.ops}, weights {start.weights} -> {end.weights} B"
    if not (loss := end.loss(start)):
        return costs
    said = any(words in note for note in surgery.notes for words in SAYING)
    return f"{costs}; {loss} ({'said' if said else 'NOT SAID'})"


def main() -> None:
    """Print a row for each model that a recipe changes; an error where one is less exact."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models; all of the corpus by default")
    parser.add_argument("--folder", type=Path, help="keep the graphs with random weights there")
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--seeds", type=int, default=6, help="samples for each model")
    parser.add_argument("--families", action="store_true", help="small models of each family too")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    worse, tried, changed = 0, 0, 0
    with tempfile.TemporaryDirectory() as scratch, quiet_host():
        models = residency.models if chosen.families else residency.corpus
        for name, make in models(chosen.folder or Path(scratch), everything=True):
            if chosen.names and name not in chosen.names:
                continue
            before = Before(name, make(), chosen.seeds)
            for target in chosen.targets:
                for recipe in RECIPES:
                    tried += 1
                    try:
                        rows = before.exactness(recipe, target)
                    except (SurgeryError, InterpretError) as error:
                        print(
                            f"{name:32} {target:12} {recipe:13} not tried: {str(error).splitlines()[0]}",
                            flush=True,
                        )
                        continue
                    changed += bool(rows)
                    for row in rows:
                        worse += not row.kept
                        print(row, flush=True)
    print(f"{tried} runs, {changed} changed the model, {worse} left it less exact in an arithmetic")
    sys.exit(1 if worse else 0)


if __name__ == "__main__":
    main()
