"""Fit the table of times anew, to the published rows and to files that `anesurgery measure` wrote."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from anesurgery.errors import SurgeryError
from anesurgery.placement import fitting
from anesurgery.placement.fitting import Fitted, LeftOut, Row
from anesurgery.placement.measured_rows import read_folder


@dataclass(frozen=True)
class Added:
    """A measured model and its estimates by both tables, in milliseconds; None without a row of the engine."""

    model: str
    chip: str
    ms: float
    before: float | None
    after: float | None


@dataclass(frozen=True)
class Calibrated:
    """Both fits.

    Attributes:
        before, after: without the files, and with them.
        added: the rows of the files.
        skipped: why other files gave none.
        numbers: what is compared: (before, after) by name; None where it did not exist before.
    """

    before: Fitted
    after: Fitted
    added: Sequence[Added]
    skipped: Sequence[str]
    numbers: Mapping[str, tuple[float | None, float]]

    def to_json(self) -> dict[str, Any]:
        """Plain data: the new table, and what changed."""
        numbers = {name: {"before": pair[0], "after": pair[1]} for name, pair in self.numbers.items()}
        return {
            "table": self.after.table,
            "added": [asdict(one) for one in self.added],
            "skipped": list(self.skipped),
            "changed": numbers,
        }


def calibrate(folder: str | Path) -> Calibrated:
    """Fit to the published rows, and to them with the files of a folder.

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
    published = fitting.read_rows()
    before, after = fitting.fit_all(published), fitting.fit_all([*published, *rows])
    return Calibrated(before, after, [_added(r, before, after) for r in rows], skipped, _numbers(before, after))


def _added(row: Row, before: Fitted, after: Fitted) -> Added:
    return Added(row.model, row.chip, row.ms, _estimate(row, before), _estimate(row, after))


def _estimate(row: Row, fitted: Fitted) -> float | None:
    """Milliseconds; None where the table has nothing of the generation."""
    fitted_there = str(row.family) in fitted.table["factor"]
    return row.ms / math.exp(fitting.judged(row, fitted.table).error) if fitted_there else None


def _numbers(before: Fitted, after: Fitted) -> dict[str, tuple[float | None, float]]:
    rows: dict[str, tuple[float | None, float]] = {}
    for name, factor in after.table["factor"].items():
        rows[f"factor of H{name}"] = (before.table["factor"].get(name), factor)
    for name, fixed in after.table["fixed_us"].items():
        rows[f"fixed cost of H{name}, us"] = (before.table["fixed_us"].get(name), fixed)
    rows["reach of the band, deviations"] = (before.table["reach"], after.table["reach"])
    for kind, left in after.left.items():
        old = _errors(before.left[kind])
        for at, (words, value) in enumerate(_errors(left)):
            rows[f"each {kind} left out: {words}"] = (old[at][1], value)
    return rows


def _errors(left: Sequence[LeftOut]) -> list[tuple[str, float]]:
    off = [math.exp(abs(one.error)) for one in left]
    return [("median error", median(off)), ("90 % error", float(np.quantile(off, 0.9)))]
