"""docs/hazards.md from the catalogue of hazards and from published values; `make hazards` writes it."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
from hazard_graphs import HAZARDS, Hazard
from narrow_arithmetics import Flushed, OneByOne
from published_values import tables

from anesurgery import registry
from anesurgery.checking.output_comparison import psnr
from anesurgery.interpret import run
from anesurgery.interpret.arithmetic.precision import Double
from anesurgery.mil import Array, Program
from anesurgery.testing import apply_pass

OWN = {"flushed": Flushed(), "one by one": OneByOne()}
"""Arithmetics of the catalogue that the interpreter does not offer."""
_REPAIRED: dict[str, Program] = {}

GOOD = 60.0
"""dB from which numbers are right."""
HEAD = """# Numerical problems and their repairs

Each row is a small graph that gives wrong results in fp16 or on the Neural Engine. `inspect` reports it, and
the recipe `safe_numbers` repairs it. `auto` and the recipes of model families repair only what fails on your
inputs. [Numbers](numbers.md) shows how.

* **shown**: the PSNR against fp64, before and after the repair, in the arithmetic that shows it (`ane`: the
  engine).
* **`flushed`**: fp16 in which subnormal numbers become 0. No chip is known to flush them in every op.
* **`one by one`**: fp16 in which a running sum is rounded at each step.
* **ops**: the number of ops, before and after.
* **751K**: 751K/Apple-Neural-Engine-Microarchitecture-Study-M6 on GitHub.

`make hazards` writes this page. A test checks that `inspect` reports each hazard but not its
harmless variant, and that the repair reaches 60 dB. We have not timed the repairs on a Mac.

| hazard | what goes wrong | shown | rule | repair | ops | seen on a device |
|---|---|---|---|---|---|---|
"""


def exact(hazard: Hazard) -> Array:
    """What the model means, in fp64."""
    (value,) = run(hazard.graph, {"x": hazard.inputs}, precision=Double()).values()  # type: ignore[arg-type]
    return np.asarray(value, np.float64)


def decibels(program: Program, hazard: Hazard, arithmetic: str) -> float:
    """How near a program comes to what the model means; NaN and infinities are minus infinity."""
    precision: Any = OWN.get(arithmetic, arithmetic)
    (value,) = run(program, {"x": hazard.inputs}, precision=precision).values()
    wanted, found = exact(hazard), np.asarray(value, np.float64)
    if not np.isfinite(found).all():
        return -math.inf
    return psnr(float(np.abs(wanted).max()), float(np.sqrt(np.mean((wanted - found) ** 2))))


def repaired(hazard: Hazard) -> Program:
    """The graph after its repair, made once."""
    if hazard.name not in _REPAIRED:
        _REPAIRED[hazard.name] = apply_pass(registry.make_pass(hazard.repair), hazard.graph)[0]
    return _REPAIRED[hazard.name]


def in_words(value: float) -> str:
    """Decibels for a table."""
    if math.isinf(value):
        return "identical" if value > 0 else "inf or NaN"
    return f"{value:.0f} dB"


def _ops(program: Program) -> int:
    return sum(op.op_type != "const" for op in program.functions["main"].operations)


def row(hazard: Hazard) -> str:
    """A line of the table."""
    shown, ops = "", str(_ops(hazard.graph))
    after = repaired(hazard) if hazard.repair else None
    if hazard.arithmetic:
        shown = f"`{hazard.arithmetic}`: {in_words(decibels(hazard.graph, hazard, hazard.arithmetic))}"
        shown += f" → {in_words(decibels(after, hazard, hazard.arithmetic))}" if after is not None else ""
    ops += f" → {_ops(after)}" if after is not None else ""
    repair = f"`{hazard.repair}`" if hazard.repair else "no single pass"
    cells = (
        hazard.name,
        hazard.because,
        shown or "our arithmetics do not show it",
        f"`{hazard.rule}`",
        repair,
        ops,
    )
    return f"| {' | '.join(cells)} | {hazard.measured} |\n"


def page() -> str:
    """The whole page."""
    return HEAD + "".join(map(row, HAZARDS)) + tables()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, required=True)
    parser.parse_args().page.write_text(page(), encoding="utf-8")
