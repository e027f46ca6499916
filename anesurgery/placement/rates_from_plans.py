"""Compare recorded plans with what was expected, and learn rates from them.

A plan tells for each op the share of the whole cost that it has on the unit that was chosen. Ops that cost what
they move have the same rates on every chip that was looked at, so they give the shares of a plan a unit of
time. The other ops of the same plan then show how far the formulas are off, by op type and unit.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from anesurgery.errors import LoadError
from anesurgery.files.source import read_text
from anesurgery.placement.corrections import Correction, Corrections
from anesurgery.placement.cost import MEMORY_CLASS

FORMAT = "anesurgery.plan/1"
"""A plan alone, as earlier versions recorded it."""
MEASURED = "anesurgery.measurement/1"
"""What `measure` writes: a plan and times for each setting of compute units."""
ANCHORS = MEMORY_CLASS | {"relu"}
"""Ops whose rates were the same on an M4 (macOS 27.0.1) and in a dump of an M1 (macOS 14.6)."""
LEAST = 2
"""Cases from which on something is learned: one could not be checked by another."""

UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading a file of another form raises."""

Case = tuple[str, str, float]
"""Op type, unit, and how many times larger than the formula's its estimate is."""


@dataclass(frozen=True)
class Learned:
    """What recorded plans say.

    Attributes:
        agree: ops on the unit that was expected, by file.
        asked: ops for which the plan and the expectation name a unit, by file.
        legal: ops that the ANE supports, against what was expected: (agree, asked), by file.
        corrections: the table.
        skipped: what was not learned, and why.
    """

    agree: Mapping[str, int]
    asked: Mapping[str, int]
    legal: Mapping[str, tuple[int, int]]
    corrections: Corrections
    skipped: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        files = {
            name: {"agree": self.agree[name], "asked": self.asked[name], "legal": list(self.legal[name])}
            for name in self.asked
        }
        return {"plans": files, "table": self.corrections.to_json(), "skipped": list(self.skipped)}


def read_measurement(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `measure` wrote.

    Raises:
        LoadError: the file cannot be read, or holds something else.
    """
    try:
        plain = json.loads(read_text(Path(path).expanduser()))
        if plain["format"] != MEASURED:
            raise ValueError(f"its format is {plain['format']!r}, expected {MEASURED!r}")
        _ = plain["host"].strip(), plain["model"].strip()
        for row in plain["settings"]:
            _ = row["compute_units"].strip(), row["error"]
            if row["timing"] is not None and not float(row["timing"]["predictions"]["median"]) > 0:
                raise ValueError(f"{row['compute_units']} has no time above 0")
            _check_ops(row["ops"] or [])
        return dict(plain)
    except UNREADABLE as error:
        raise LoadError(f"{path} is no measurement: {error}; write one with `anesurgery measure`") from error


def read_plan(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The plan in what `measure` wrote: that of CPU_AND_NE, or of the first setting that has one.

    Raises:
        LoadError: the file cannot be read, or holds something else.
    """
    try:
        plain = json.loads(read_text(Path(path).expanduser()))
        if plain["format"] == MEASURED:
            plain = _plan_in(read_measurement(path))
        if plain["format"] != FORMAT:
            raise ValueError(f"its format is {plain['format']!r}, expected {MEASURED!r}")
        plain["host"].strip()
        _check_ops(plain["ops"])
        return dict(plain)
    except UNREADABLE as error:
        raise LoadError(f"{path} is no recorded plan: {error}; record one with `anesurgery measure`") from error


def _plan_in(measured: Mapping[str, Any]) -> dict[str, Any]:
    rows = sorted(measured["settings"], key=lambda row: row["compute_units"] != "CPU_AND_NE")
    for row in rows:
        if row["ops"]:
            own = {"format": FORMAT, "compute_units": row["compute_units"], "ops": row["ops"]}
            return {**own, "host": measured["host"], "model": measured["model"]}
    raise ValueError("Core ML made no plan of the model")


def _check_ops(ops: Iterable[Mapping[str, Any]]) -> None:
    for op in ops:
        _ = op["name"], op["op"], op["unit"], op["expected"]


def learn(plans: Mapping[str, Mapping[str, Any]]) -> Learned:
    """Compare plans with what was expected, and learn rates.

    Args:
        plans: by name, as `read_plan` gives them.
    """
    cases: list[Case] = []
    skipped: list[str] = []
    for name, plain in plans.items():
        own = _cases(plain["ops"])
        if not own:
            skipped.append(f"{name}: no op whose rate is known gives its shares a unit of time")
        cases += own
    rates, rare = _fit(cases)
    answered = {n: [op for op in p["ops"] if op["unit"] and op["expected"]] for n, p in plans.items()}
    hosts = tuple(sorted({str(plain["host"]) for plain in plans.values()}))
    return Learned(
        {name: sum(op["unit"] == op["expected"] for op in ops) for name, ops in answered.items()},
        {name: len(ops) for name, ops in answered.items()},
        {name: _legal(plain["ops"]) for name, plain in plans.items()},
        Corrections(hosts, rates),
        (*skipped, *rare),
    )


def _legal(ops: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    asked = [op for op in ops if op.get("supported") and op.get("legal") is not None]
    return sum(("ane" in op["supported"]) == op["legal"] for op in asked), len(asked)


def _cases(ops: Sequence[Mapping[str, Any]]) -> list[Case]:
    """The ops of a plan in its own unit of time; none where nothing gives one."""
    pairs = [(op, float(op.get(f"{op['unit']}_us") or 0), float(op.get("cost") or 0)) for op in ops]
    pairs = [(op, formula, share) for op, formula, share in pairs if formula > 0 and share > 0]
    anchors = [formula / share for op, formula, share in pairs if op["op"] in ANCHORS]
    if not anchors:
        return []
    unit = median(anchors)
    return [(op["op"], op["unit"], unit * share / formula) for op, formula, share in pairs]


def _fit(cases: Iterable[Case]) -> tuple[dict[str, dict[str, Correction]], list[str]]:
    ratios: dict[tuple[str, str], list[float]] = {}
    for op, unit, ratio in cases:
        ratios.setdefault((op, unit), []).append(ratio)
    rates: dict[str, dict[str, Correction]] = {}
    for (op, unit), factors in sorted(ratios.items()):
        if len(factors) >= LEAST:
            rates.setdefault(op, {})[unit] = Correction(median(factors), max(left_out(factors)), len(factors))
    names = sorted(key for key, factors in ratios.items() if len(factors) < LEAST)
    rare = [f"{op} on the {unit.upper()}: one case" for op, unit in names]
    return rates, rare


def left_out(ratios: Sequence[float]) -> list[float]:
    """How many times each case is off when the factor is learned from the others."""
    rest = [median([*ratios[:i], *ratios[i + 1 :]]) for i in range(len(ratios))]
    return [math.exp(abs(math.log(ratio / factor))) for ratio, factor in zip(ratios, rest, strict=True)]
