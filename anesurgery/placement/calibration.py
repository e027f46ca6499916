"""Fit the table of times to files that `anesurgery measure` wrote.

What was published is known before. The factor and the fixed cost of each measured generation move from the
table as far as the files are surer than it; everything else stays. Logarithms of times are fitted, and rows
that are far off count less.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from anesurgery.errors import SurgeryError
from anesurgery.files import arrays
from anesurgery.mil import Array
from anesurgery.placement.measured_rows import Row, read_folder
from anesurgery.placement.timing import Rates, microseconds, table

NOISE, FIXED, UNSEEN = 0.15, 0.5, 0.4
"""Deviations of logarithms: of a row, of a fixed cost, and of the factor
of a generation that the table lacks. The first two are those of the published fit
(`tests/benchmarks/time_fit.py`); the last is twice what a generation lies off the line over the generations
there."""
STEPS, SMALL = 50, 1e-6
"""Steps of a fit at most, and the length of a step that ends it. A choice: rows have 3 or 4 digits."""

Numbers = Mapping[str, tuple[float | None, float]]
"""What is compared: (before, after) by name; None where it did not exist before."""


@dataclass(frozen=True)
class Added:
    """A measured model and its estimates by both tables, in milliseconds; None without its generation."""

    model: str
    chip: str
    ms: float
    before: float | None
    after: float | None


@dataclass(frozen=True)
class Calibrated:
    """A fit.

    Attributes:
        table: the table with the numbers of the measured generations.
        added: the rows of the files.
        skipped: why other files gave none.
        numbers: what changed.
    """

    table: dict[str, Any]
    added: Sequence[Added]
    skipped: Sequence[str]
    numbers: Numbers

    def to_json(self) -> dict[str, Any]:
        """Plain data: the new table, and what changed."""
        numbers = {name: {"before": pair[0], "after": pair[1]} for name, pair in self.numbers.items()}
        added = [asdict(one) for one in self.added]
        return {"table": self.table, "added": added, "skipped": list(self.skipped), "changed": numbers}


def calibrate(folder: str | Path) -> Calibrated:
    """Fit the table to the files of a folder.

    Raises:
        SurgeryError: there is no such folder, or no file in it gives a row; the reasons are named.
    """
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise SurgeryError(f"{folder} is no folder; give one with files that `anesurgery measure` wrote")
    rows, skipped = read_folder(place)
    if not rows:
        why = "; ".join(skipped) or "it holds no .json"
        raise SurgeryError(
            f"nothing to calibrate with in {folder}: {why}; write files with `anesurgery measure`"
        )
    before, after = table(), fit(rows, table())
    added = [Added(r.model, r.chip, r.ms, estimate(r, before), estimate(r, after)) for r in rows]
    return Calibrated(after, added, skipped, _numbers(rows, before, after))


def fit(rows: Sequence[Row], published: Mapping[str, Any]) -> dict[str, Any]:
    """A table with the most likely factor and fixed cost of each generation that rows are of."""
    fitted = copy.deepcopy(dict(published))
    for family in sorted({row.family for row in rows}):
        mine, key = [row for row in rows if row.family == family], str(family)
        if key not in published["factor"]:
            _begin(fitted, published, key)
        x, off = _solve(mine, fitted, key)
        fitted["factor"][key], fitted["fixed_us"][key] = (float(f"{v:.4g}") for v in np.exp(x))
        fitted["deviation"][key] = round(off, 3)
        fitted["measurements"][key] += len(mine)
        sources = dict.fromkeys([*filter(None, [fitted["source"][key]]), *(row.source for row in mine)])
        fitted["source"][key] = "; ".join(sources)
    return fitted


def _begin(fitted: dict[str, Any], published: Mapping[str, Any], key: str) -> None:
    """Give a generation that the table lacks the numbers of the nearest one."""
    nearest = min(published["factor"], key=lambda other: abs(int(other) - int(key)))
    for name in ("factor", "fixed_us", "switch_us"):
        fitted[name][key] = published[name][nearest]
    fitted["deviation"][key], fitted["measurements"][key], fitted["source"][key] = UNSEEN, 0, ""


def _solve(rows: Sequence[Row], numbers: Mapping[str, Any], key: str) -> tuple[Array, float]:
    """Logarithms of factor and fixed cost (Gauss and Newton's steps), and the deviation of the first."""
    known = np.log([numbers["factor"][key], numbers["fixed_us"][key]])
    sure = np.diag([1 / numbers["deviation"][key], 1 / FIXED])

    def errors(at: Array) -> Array:
        factor, fixed = np.exp(at)
        tried = {
            **numbers,
            "factor": {**numbers["factor"], key: factor},
            "fixed_us": {**numbers["fixed_us"], key: fixed},
        }
        return np.array([math.log(row.ms / (estimate(row, tried) or row.ms)) / NOISE for row in rows])

    def look(at: Array) -> tuple[float, Array, Array]:
        """What is minimised, the matrix of the next step, and the way down."""
        now, left = errors(at), sure @ (known - at)
        slopes = np.stack([(now - errors(at + step)) / step.sum() for step in 1e-5 * np.eye(2)], axis=1)
        weights = 1 / np.sqrt(1 + now**2)  # a row that is far off counts less
        loss = float(2 * (1 / weights - 1).sum() + (left**2).sum())
        return (
            loss,
            slopes.T @ (weights[:, None] * slopes) + sure @ sure,
            slopes.T @ (weights * now) + sure @ left,
        )

    x = known
    loss, normal, down = look(x)
    for _ in range(STEPS):
        step = np.linalg.solve(normal, down)
        while (then := look(x + step))[0] > loss and np.abs(step).max() > SMALL:
            step = step / 2
        x, (loss, normal, down) = x + step, then
        if np.abs(step).max() <= SMALL:
            break
    return x, float(np.sqrt(np.linalg.inv(normal)[0, 0]))


def estimate(row: Row, numbers: Mapping[str, Any]) -> float | None:
    """Milliseconds; None where the table has nothing of the generation."""
    if str(row.family) not in numbers["factor"]:
        return None
    return sum(microseconds(row.load, Rates.of(numbers, row.family, row.chip)).values()) / 1000


def _numbers(rows: Sequence[Row], before: Mapping[str, Any], after: Mapping[str, Any]) -> Numbers:
    found: dict[str, tuple[float | None, float]] = {}
    for key in sorted({str(row.family) for row in rows}, key=int):
        found[f"factor of H{key}"] = (before["factor"].get(key), after["factor"][key])
        found[f"fixed cost of H{key}, us"] = (before["fixed_us"].get(key), after["fixed_us"][key])
    unseen = {model: fit([r for r in rows if r.model != model], before) for model in {r.model for r in rows}}
    old, new = _errors(rows, lambda row: before), _errors(rows, lambda row: unseen[row.model])
    if new:
        found["each model of yours left out: median error"] = (median(old) if old else None, median(new))
    return found


def _errors(rows: Sequence[Row], table_of: Any) -> list[float]:
    """How many times longer or shorter each row took than its table says."""
    told = [(row, ms) for row in rows if (ms := estimate(row, table_of(row))) is not None]
    return [math.exp(abs(math.log(row.ms / ms))) for row, ms in told]


def write_table(numbers: Mapping[str, Any], path: Path) -> Path:
    """Write a table, atomically; an existing file is replaced.

    Raises:
        SurgeryError: it cannot be written.
    """
    return arrays.write_text(path, json.dumps(numbers, indent=1) + "\n")
