"""Hold corrections of the cost formulas, learned from Core ML's plans on the user's own devices.

`calibration.learn` makes them, and `cost.estimate` applies them. The file is JSON; `anesurgery learn`
writes it, `anesurgery inspect --rates` reads it:

    {"format": "anesurgery.rates/1", "hosts": ["Apple M2, macOS 15.3"],
     "rates": {"conv": {"ane": {"factor": 1.2, "off": 1.1, "cases": 14}}}}
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from anesurgery.errors import DAMAGED, LoadError, UnknownName
from anesurgery.files.source import read_json
from anesurgery.mil import op_types

FORMAT = "anesurgery.rates/1"
UNITS = ("ane", "cpu")


@dataclass(frozen=True)
class Correction:
    """The correction of the estimates of one op type on one unit."""

    factor: float
    """The corrected estimate is `factor` times the formula's."""
    off: float
    """The largest error of an estimate whose factor was learned from the other cases, as a ratio >= 1."""
    cases: int
    """The number of ops in the plans that it was learned from."""


@dataclass(frozen=True)
class Corrections:
    """The user's own table of corrections."""

    hosts: tuple[str, ...]
    """Chips and systems whose plans it comes from."""
    rates: Mapping[str, Mapping[str, Correction]]
    """Op type -> unit ("ane", "cpu") -> correction."""

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file as plain data."""
        rates = {op: {u: asdict(c) for u, c in units.items()} for op, units in self.rates.items()}
        return {"format": FORMAT, "hosts": list(self.hosts), "rates": rates}


def read_corrections(path: str | os.PathLike[str]) -> Corrections:
    """Read a table that `anesurgery learn` wrote.

    Raises:
        LoadError: the file cannot be read, or is no such table.
    """
    try:
        plain = read_json(Path(path).expanduser())
        if plain["format"] != FORMAT:
            raise ValueError(f"its format is {plain['format']!r}, expected {FORMAT!r}")
        if not isinstance(plain["hosts"], list):
            raise ValueError(f"its hosts are {plain['hosts']!r}, expected a list")
        if unknown := plain["rates"].keys() - op_types():
            raise UnknownName("op type", min(unknown), op_types(), "the op types of Core ML")
        rates = {op: {u: _correction(u, units[u]) for u in units} for op, units in plain["rates"].items()}
        return Corrections(tuple(map(str, plain["hosts"])), rates)
    except (*DAMAGED, UnknownName) as error:
        raise LoadError(f"{path} is no table of rates: {error}; write one with `anesurgery learn`") from error


def _correction(unit: str, plain: Any) -> Correction:
    if unit not in UNITS:
        raise ValueError(f"the unit {unit!r} is not {' or '.join(UNITS)}")
    correction = Correction(float(plain["factor"]), float(plain["off"]), int(plain["cases"]))
    if not (0 < correction.factor < math.inf and 1 <= correction.off < math.inf and correction.cases > 0):
        raise ValueError(f"out of range: {correction}")
    return correction
