"""Compare recorded plans of Core ML with the predictions of `inspect`, and learn rates from them.

A plan gives each op its share of the model's whole cost, on the chosen unit. Memory-bound ops (`ANCHORS`) had
the same rates on every chip that was compared, so the formula's microseconds for them turn the shares of a
plan into microseconds. The other ops of the plan then show how far their formulas are off, by op type and unit.
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
"""The format of a file with a plan only, as earlier versions recorded it."""
MEASUREMENT_FORMAT = "anesurgery.measurement/1"
"""The format of `anesurgery measure`: a plan and times for each setting of compute units."""
ANCHORS = MEMORY_CLASS | {"relu"}
"""Ops whose rates were the same on an M4 (macOS 27.0.1) and in a dump of an M1 (macOS 14.6)."""
LEAST_CASES = 2
"""Cases needed to learn a factor: a single one could not be checked by another."""

UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""The exceptions that reading a file of another form may raise."""

Case = tuple[str, str, float]
"""(op type, unit, Core ML's cost as a multiple of the formula's)."""


@dataclass(frozen=True)
class Learned:
    """The result of `learn`.

    Attributes:
        agree: file -> number of ops on the unit that was predicted.
        asked: file -> number of ops for which both the plan and the prediction name a unit.
        legal: file -> (ops whose support by the ANE was predicted right, ops for which both say it).
        corrections: the learned factors.
        skipped: what was not learned, and why.
    """

    agree: Mapping[str, int]
    asked: Mapping[str, int]
    legal: Mapping[str, tuple[int, int]]
    corrections: Corrections
    skipped: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        files = {
            name: {"agree": self.agree[name], "asked": self.asked[name], "legal": list(self.legal[name])}
            for name in self.asked
        }
        return {"plans": files, "table": self.corrections.to_json(), "skipped": list(self.skipped)}


def read_measurement(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check a file that `anesurgery measure` wrote.

    Raises:
        LoadError: the file cannot be read, or holds something else.
    """
    try:
        plain = json.loads(read_text(Path(path).expanduser()))
        if plain["format"] != MEASUREMENT_FORMAT:
            raise ValueError(f"its format is {plain['format']!r}, expected {MEASUREMENT_FORMAT!r}")
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
    """Return the plan in a file of `anesurgery measure`: that of CPU_AND_NE, or of the first setting with one.

    Raises:
        LoadError: the file cannot be read, or holds something else.
    """
    try:
        plain = json.loads(read_text(Path(path).expanduser()))
        if plain["format"] == MEASUREMENT_FORMAT:
            plain = _plan_in(read_measurement(path))
        if plain["format"] != FORMAT:
            raise ValueError(f"its format is {plain['format']!r}, expected {MEASUREMENT_FORMAT!r}")
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
    """Compare plans with predictions, and learn rates.

    Args:
        plans: file name -> plan, as `read_plan` returns it.
    """
    cases: list[Case] = []
    skipped: list[str] = []
    for name, plain in plans.items():
        cases_of_plan = _cases(plain["ops"])
        if not cases_of_plan:
            skipped.append(f"{name}: no op whose rate is known gives its shares a unit of time")
        cases += cases_of_plan
    rates, rare = _fit(cases)
    answered = {n: [op for op in p["ops"] if op["unit"] and op["expected"]] for n, p in plans.items()}
    hosts = tuple(sorted({str(plain["host"]) for plain in plans.values()}))
    return Learned(
        {name: sum(op["unit"] == op["expected"] for op in ops) for name, ops in answered.items()},
        {name: len(ops) for name, ops in answered.items()},
        {name: _legality_score(plain["ops"]) for name, plain in plans.items()},
        Corrections(hosts, rates),
        (*skipped, *rare),
    )


def _legality_score(ops: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Return (ops whose support by the ANE was predicted right, ops for which plan and prediction say it)."""
    asked = [op for op in ops if op.get("supported") and op.get("legal") is not None]
    return sum(("ane" in op["supported"]) == op["legal"] for op in asked), len(asked)


def _cases(ops: Sequence[Mapping[str, Any]]) -> list[Case]:
    """Return the cases of a plan; none if it has no anchor, so that its whole cost in µs is unknown."""
    priced = [(op, float(op.get(f"{op['unit']}_us") or 0), float(op.get("cost") or 0)) for op in ops]
    priced = [(op, formula, share) for op, formula, share in priced if formula > 0 and share > 0]
    whole_by_anchor = [formula / share for op, formula, share in priced if op["op"] in ANCHORS]
    if not whole_by_anchor:
        return []
    whole = median(whole_by_anchor)
    return [(op["op"], op["unit"], whole * share / formula) for op, formula, share in priced]


def _fit(cases: Iterable[Case]) -> tuple[dict[str, dict[str, Correction]], list[str]]:
    """Return op type -> unit -> correction (the median ratio), and in words the keys with too few cases."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for op, unit, ratio in cases:
        ratios.setdefault((op, unit), []).append(ratio)
    rates: dict[str, dict[str, Correction]] = {}
    for (op, unit), factors in sorted(ratios.items()):
        if len(factors) >= LEAST_CASES:
            rates.setdefault(op, {})[unit] = Correction(
                median(factors), max(cross_validated_errors(factors)), len(factors)
            )
    names = sorted(key for key, factors in ratios.items() if len(factors) < LEAST_CASES)
    rare = [f"{op} on the {unit.upper()}: one case" for op, unit in names]
    return rates, rare


def cross_validated_errors(ratios: Sequence[float]) -> list[float]:
    """Return the error of each case as a ratio of at least 1, with the factor learned from the other cases."""
    factors = [median([*ratios[:i], *ratios[i + 1 :]]) for i in range(len(ratios))]
    return [math.exp(abs(math.log(ratio / factor))) for ratio, factor in zip(ratios, factors, strict=True)]
