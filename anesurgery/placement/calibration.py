"""Learn from what a Mac measured: rates of ops from Core ML's plans, and the table of times from its times.

A plan gives each op its share of the model's whole cost, on the chosen unit (`learn`). Memory-bound ops
(`SEEN_ELSEWHERE`) had the same rates on every chip that was compared, so the formula's microseconds for them
turn the shares of a plan into microseconds. The other ops of the plan then show how far their formulas are off,
by op type and unit.

`anesurgery calibrate` fits two numbers of each measured generation of the engine to the files of `anesurgery
measure`: the factor on all its times and the fixed cost of a prediction. The published table is the prior: the
numbers move away from it only as far as the files are more certain. The fit is robust least squares on
logarithms of times: rows that are far off count less.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from anesurgery.errors import LoadError, SurgeryError
from anesurgery.files import arrays
from anesurgery.files.package import Loaded
from anesurgery.files.source import read_json
from anesurgery.mil import Array
from anesurgery.placement.corrections import Correction, Corrections
from anesurgery.placement.cost import SEEN_ELSEWHERE
from anesurgery.placement.target import CHIPS, Target, family_of
from anesurgery.placement.timing import Load, OpLoad, Rates, load_of, microseconds, table
from anesurgery.placement.verdicts import choose, judge_shaped

_FORMAT = "anesurgery.plan/1"
"""The format of a file with a plan only, as earlier versions recorded it."""
MEASUREMENT_FORMAT = "anesurgery.measurement/1"
"""The format of `anesurgery measure`: a plan and times for each setting of compute units."""
_LEAST_CASES = 2
"""Cases needed to learn a factor: a single one could not be checked by another."""

_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""The exceptions that reading a file of another form may raise."""


class _Case(NamedTuple):
    """An op of a plan: its type and unit, and Core ML's cost as a multiple of the formula's."""

    op: str
    unit: str
    ratio: float


@dataclass(frozen=True)
class _Learned:
    """The result of `learn`."""

    agree: Mapping[str, int]
    """File -> number of ops on the unit that was predicted."""
    asked: Mapping[str, int]
    """File -> number of ops for which both the plan and the prediction name a unit."""
    legal: Mapping[str, tuple[int, int]]
    """File -> (ops whose support by the ANE was predicted right, ops for which both say it)."""
    corrections: Corrections
    """The learned factors."""
    skipped: tuple[str, ...]
    """What was not learned, and why."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        files = {
            name: {"agree": self.agree[name], "asked": self.asked[name], "legal": list(self.legal[name])}
            for name in self.asked
        }
        return {"plans": files, "table": self.corrections.to_json(), "skipped": list(self.skipped)}


def _read_measurement(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check a file that `anesurgery measure` wrote.

    Raises:
        LoadError: the file cannot be read, or holds something else.
    """
    try:
        plain = read_json(Path(path).expanduser())
        if plain["format"] != MEASUREMENT_FORMAT:
            raise ValueError(f"its format is {plain['format']!r}, expected {MEASUREMENT_FORMAT!r}")
        _ = plain["host"].strip(), plain["model"].strip()
        for row in plain["settings"]:
            _ = row["compute_units"].strip(), row["error"]
            if row["timing"] is not None and not float(row["timing"]["predictions"]["median"]) > 0:
                raise ValueError(f"{row['compute_units']} has no time above 0")
            _check_ops(row["ops"] or [])
        return dict(plain)
    except _UNREADABLE as error:
        raise LoadError(f"{path} is no measurement: {error}; write one with `anesurgery measure`") from error


def read_plan(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the plan in a file of `anesurgery measure`: that of CPU_AND_NE, or of the first setting with one.

    Raises:
        LoadError: the file cannot be read, or holds something else.
    """
    try:
        plain = read_json(Path(path).expanduser())
        if plain["format"] == MEASUREMENT_FORMAT:
            plain = _plan_in(_read_measurement(path))
        if plain["format"] != _FORMAT:
            raise ValueError(f"its format is {plain['format']!r}, expected {MEASUREMENT_FORMAT!r}")
        plain["host"].strip()
        _check_ops(plain["ops"])
        return dict(plain)
    except _UNREADABLE as error:
        raise LoadError(f"{path} is no recorded plan: {error}; record one with `anesurgery measure`") from error


def _plan_in(measured: Mapping[str, Any]) -> dict[str, Any]:
    rows = sorted(measured["settings"], key=lambda row: row["compute_units"] != "CPU_AND_NE")
    for row in rows:
        if row["ops"]:
            own = {"format": _FORMAT, "compute_units": row["compute_units"], "ops": row["ops"]}
            return {**own, "host": measured["host"], "model": measured["model"]}
    raise ValueError("Core ML made no plan of the model")


def _check_ops(ops: Iterable[Mapping[str, Any]]) -> None:
    for op in ops:
        _ = op["name"], op["op"], op["unit"], op["expected"]


def learn(plans: Mapping[str, Mapping[str, Any]]) -> _Learned:
    """Compare plans with predictions, and learn rates.

    Args:
        plans: file name -> plan, as `read_plan` returns it.
    """
    cases: list[_Case] = []
    skipped: list[str] = []
    for name, plain in plans.items():
        cases_of_plan = _cases(plain["ops"])
        if not cases_of_plan:
            skipped.append(f"{name}: no op whose rate is known gives its shares a unit of time")
        cases += cases_of_plan
    rates, rare = _fit(cases)
    answered = {n: [op for op in p["ops"] if op["unit"] and op["expected"]] for n, p in plans.items()}
    hosts = tuple(sorted({str(plain["host"]) for plain in plans.values()}))
    return _Learned(
        agree={name: sum(op["unit"] == op["expected"] for op in ops) for name, ops in answered.items()},
        asked={name: len(ops) for name, ops in answered.items()},
        legal={name: _legality_score(plain["ops"]) for name, plain in plans.items()},
        corrections=Corrections(hosts, rates),
        skipped=(*skipped, *rare),
    )


def _legality_score(ops: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Return (ops whose support by the ANE was predicted right, ops for which plan and prediction say it)."""
    asked = [op for op in ops if op.get("supported") and op.get("legal") is not None]
    return sum(("ane" in op["supported"]) == op["legal"] for op in asked), len(asked)


def _cases(ops: Sequence[Mapping[str, Any]]) -> list[_Case]:
    """Return the cases of a plan; none if it has no anchor, so that its whole cost in µs is unknown."""
    priced = [(op, float(op.get(f"{op['unit']}_us") or 0), float(op.get("cost") or 0)) for op in ops]
    priced = [(op, formula, share) for op, formula, share in priced if formula > 0 and share > 0]
    whole_by_anchor = [formula / share for op, formula, share in priced if op["op"] in SEEN_ELSEWHERE]
    if not whole_by_anchor:
        return []
    whole = median(whole_by_anchor)
    return [_Case(op["op"], op["unit"], whole * share / formula) for op, formula, share in priced]


def _fit(cases: Iterable[_Case]) -> tuple[dict[str, dict[str, Correction]], list[str]]:
    """Return op type -> unit -> correction (the median ratio), and in words the keys with too few cases."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for op, unit, ratio in cases:
        ratios.setdefault((op, unit), []).append(ratio)
    rates: dict[str, dict[str, Correction]] = {}
    for (op, unit), factors in sorted(ratios.items()):
        if len(factors) >= _LEAST_CASES:
            rates.setdefault(op, {})[unit] = Correction(
                median(factors), max(cross_validated_errors(factors)), len(factors)
            )
    names = sorted(key for key, factors in ratios.items() if len(factors) < _LEAST_CASES)
    rare = [f"{op} on the {unit.upper()}: one case" for op, unit in names]
    return rates, rare


def cross_validated_errors(ratios: Sequence[float]) -> list[float]:
    """Return the error of each case as a ratio of at least 1, with the factor learned from the other cases."""
    factors = [median([*ratios[:i], *ratios[i + 1 :]]) for i in range(len(ratios))]
    return [math.exp(abs(math.log(ratio / factor))) for ratio, factor in zip(ratios, factors, strict=True)]


# The files.

UNITS = "CPU_AND_NE"
LEAST_AGREEMENT = 0.9
"""Core ML's plan must give this share of the ops that are predicted on the Neural Engine to it: otherwise the
measured time belongs to another division of the model."""
CHIP = re.compile(r"\b([AM]\d+)( Pro| Max| Ultra)?\b")


@dataclass(frozen=True)
class Row:
    """A measured time."""

    model: str
    """Its name; with the generation of the chip it identifies `load`."""
    chip: str
    """The chip as it is sold: "M4 Pro"."""
    ms: float
    """Milliseconds of one prediction with CPU_AND_NE."""
    source: str
    """Who measured it."""
    units: str
    """The compute units that the source names, or "not stated"."""
    load: Load = field(repr=False)
    """The work of the model's ops."""

    @property
    def family(self) -> int:
        """The generation of the engine."""
        return family_of(self.chip)


def load_from(plain: Mapping[str, Any]) -> Load:
    """Return the load that `load_to` wrote."""
    return Load(tuple(OpLoad(*op) for op in plain["ops"]), plain["switches"])


def load_to(load: Load) -> dict[str, Any]:
    """Return a load as plain data, equal ops merged."""
    merged = load.merged()
    ops = [[round(v, 4) if isinstance(v, float) else v for v in op] for op in merged.ops]
    return {"switches": merged.switches, "ops": ops}


def features_of(loaded: Loaded, function: str | None, host: str) -> dict[str, Any] | None:
    """Return the load of a model on a host's chip, as plain data; None if the chip is unknown."""
    chip = chip_of(host)
    if chip is None:
        return None
    target = Target.parse(chip)
    judged = judge_shaped(loaded, function, target, ()).judged
    return load_to(load_of(judged, choose(judged, target)[0]))


def chip_of(host: str) -> str | None:
    """Return the chip as it is sold ("M4 Pro") from a host in words ("Apple M4 Pro, macOS 15.3"); else None."""
    chip = CHIP.search(host)
    return None if chip is None or chip[1] not in CHIPS else chip[1] + (chip[2] or "")


def read_row(path: str | os.PathLike[str]) -> Row:
    """Return the time with `UNITS` in a file that `measure` wrote.

    Raises:
        LoadError: the file cannot be read, or has no time of the Neural Engine to fit to.
    """
    plain = _read_measurement(path)
    try:
        return _row(plain, Path(path).name)
    except _UNREADABLE as error:
        raise LoadError(f"{path} gives no time to fit: {error}") from error


def _row(plain: Mapping[str, Any], name: str) -> Row:
    chip = chip_of(plain["host"])
    if chip is None:
        raise ValueError(f"its host {plain['host']!r} names no chip that is known ({', '.join(CHIPS)})")
    setting = next((row for row in plain["settings"] if row["compute_units"] == UNITS), None)
    if setting is None or setting["timing"] is None:
        why = "it was not measured" if setting is None else setting["error"]
        raise ValueError(f"it has no time for {UNITS}: {why}")
    if plain.get("asks") is None:
        raise ValueError("it does not say what the model asks for; measure an ML Program with this version")
    ms = float(setting["timing"]["predictions"]["median"])
    if not math.isfinite(ms):
        raise ValueError(f"its median is {ms}")
    _check_plan(setting["ops"] or [])
    label = plain["model"] if plain["function"] is None else f"{plain['model']} {plain['function']}"
    return Row(
        model=label,
        chip=chip,
        ms=ms,
        source=f"docs/measurements: {name}",
        units=UNITS,
        load=_load(plain["asks"]),
    )


def _load(plain: Mapping[str, Any]) -> Load:
    load = load_from(plain)
    if not load.ops or not all(math.isfinite(op.us) and op.us >= 0 and op.weight >= 0 for op in load.ops):
        raise ValueError("what the model asks for has no ops, or a number that is negative or none")
    return load


def _check_plan(ops: Iterable[Mapping[str, Any]]) -> None:
    expected = [op for op in ops if op["expected"] == "ane" and op["unit"]]
    agreeing = sum(op["unit"] == "ane" for op in expected)
    if expected and agreeing < LEAST_AGREEMENT * len(expected):
        raise ValueError(
            f"Core ML's plan gives {agreeing} of {len(expected)} ops to the Neural Engine that were expected "
            "there: its time is that of another division"
        )


def read_folder(folder: Path) -> tuple[list[Row], list[str]]:
    """Return the rows of the JSON files of a folder, ordered by file name, and why other files have none."""
    rows, skipped = list[Row](), list[str]()
    for path in sorted(folder.glob("*.json")):
        try:
            rows.append(read_row(path))
        except LoadError as error:
            skipped.append(str(error))
    return rows, skipped


# The fit.

ROW_DEVIATION, FIXED_COST_DEVIATION, NEW_FACTOR_DEVIATION = 0.15, 0.5, 0.4
"""Standard deviations of logarithms: of a measured time, of a fixed cost, and of the factor of a generation
that the table lacks. The first two are those of the published fit (`tests/benchmarks/time_fit.py`); the last is
twice the distance of a generation from the line over the generations there."""
MOST_STEPS, LAST_STEP = 50, 1e-6
"""The fit ends after so many steps, or after a step shorter than this. A choice: times have 3 or 4 digits."""


class Changed(NamedTuple):
    """A number of the table before and after; None if the table did not have it before."""

    before: float | None
    after: float


Numbers = Mapping[str, Changed]
"""Name of a number -> its change."""


@dataclass(frozen=True)
class Added:
    """A measured model and its estimates in ms by both tables; None if a table lacks its generation."""

    model: str
    chip: str
    ms: float
    before: float | None
    after: float | None


@dataclass(frozen=True)
class Calibrated:
    """The result of `calibrate`."""

    table: dict[str, Any]
    """The table with new numbers for the measured generations."""
    added: Sequence[Added]
    """The rows of the files."""
    skipped: Sequence[str]
    """Why other files have no row."""
    numbers: Numbers
    """The numbers that changed."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data: the new table, and what changed."""
        numbers = {name: {"before": before, "after": after} for name, (before, after) in self.numbers.items()}
        added = [asdict(row) for row in self.added]
        return {"table": self.table, "added": added, "skipped": list(self.skipped), "changed": numbers}


def calibrate(folder: str | Path) -> Calibrated:
    """Fit the table to the files of a folder.

    Raises:
        SurgeryError: there is no such folder, or no file in it gives a row; the reasons are named.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise SurgeryError(f"{folder} is no folder; give one with files that `anesurgery measure` wrote")
    rows, skipped = read_folder(path)
    if not rows:
        why = "; ".join(skipped) or "it holds no .json"
        raise SurgeryError(
            f"nothing to calibrate with in {folder}: {why}; write files with `anesurgery measure`"
        )
    before, after = table(), fit(rows, table())
    added = [
        Added(model=r.model, chip=r.chip, ms=r.ms, before=estimate(r, before), after=estimate(r, after))
        for r in rows
    ]
    return Calibrated(after, added, skipped, _changed_numbers(rows, before, after))


def fit(rows: Sequence[Row], published: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table with the most likely factor and fixed cost of each generation among the rows."""
    fitted = copy.deepcopy(dict(published))
    for family in sorted({row.family for row in rows}):
        of_family, key = [row for row in rows if row.family == family], str(family)
        if key not in published["factor"]:
            _add_generation(fitted, published, key)
        logarithms, deviation = _most_likely(of_family, fitted, key)
        fitted["factor"][key], fitted["fixed_us"][key] = (float(f"{v:.4g}") for v in np.exp(logarithms))
        fitted["deviation"][key] = round(deviation, 3)
        fitted["measurements"][key] += len(of_family)
        sources = dict.fromkeys([*filter(None, [fitted["source"][key]]), *(row.source for row in of_family)])
        fitted["source"][key] = "; ".join(sources)
    return fitted


def _add_generation(fitted: dict[str, Any], published: Mapping[str, Any], key: str) -> None:
    """Give a generation that the table lacks the numbers of the nearest generation."""
    nearest = min(published["factor"], key=lambda other: abs(int(other) - int(key)))
    for name in ("factor", "fixed_us", "switch_us"):
        fitted[name][key] = published[name][nearest]
    fitted["deviation"][key], fitted["measurements"][key], fitted["source"][key] = NEW_FACTOR_DEVIATION, 0, ""


def _most_likely(rows: Sequence[Row], numbers: Mapping[str, Any], key: str) -> tuple[Array, float]:
    """Return log([factor, fixed cost]) by Gauss-Newton steps, and the deviation of the first."""
    prior = np.log([numbers["factor"][key], numbers["fixed_us"][key]])
    prior_weight = np.diag([1 / numbers["deviation"][key], 1 / FIXED_COST_DEVIATION])

    def residuals(at: Array) -> Array:
        factor, fixed = np.exp(at)
        table_at = {
            **numbers,
            "factor": {**numbers["factor"], key: factor},
            "fixed_us": {**numbers["fixed_us"], key: fixed},
        }
        return np.array(
            [math.log(row.ms / (estimate(row, table_at) or row.ms)) / ROW_DEVIATION for row in rows]
        )

    def normal_equations(at: Array) -> tuple[float, Array, Array]:
        """Return the loss, and the matrix and right side of the equations for the next step."""
        errors, from_prior = residuals(at), prior_weight @ (prior - at)
        slopes = np.stack([(errors - residuals(at + d)) / d.sum() for d in 1e-5 * np.eye(2)], axis=1)
        weights = 1 / np.sqrt(1 + errors**2)  # a row that is far off counts less
        loss = float(2 * (1 / weights - 1).sum() + (from_prior**2).sum())
        return (
            loss,
            slopes.T @ (weights[:, None] * slopes) + prior_weight @ prior_weight,
            slopes.T @ (weights * errors) + prior_weight @ from_prior,
        )

    x = prior
    loss, matrix, right = normal_equations(x)
    for _ in range(MOST_STEPS):
        step = np.linalg.solve(matrix, right)
        while (following := normal_equations(x + step))[0] > loss and np.abs(step).max() > LAST_STEP:
            step = step / 2
        x, (loss, matrix, right) = x + step, following
        if np.abs(step).max() <= LAST_STEP:
            break
    return x, float(np.sqrt(np.linalg.inv(matrix)[0, 0]))


def estimate(row: Row, numbers: Mapping[str, Any]) -> float | None:
    """Return the milliseconds of a row by a table; None if the table lacks its generation."""
    if str(row.family) not in numbers["factor"]:
        return None
    return sum(microseconds(row.load, Rates.of(numbers, row.family, row.chip)).values()) / 1000


def _changed_numbers(rows: Sequence[Row], before: Mapping[str, Any], after: Mapping[str, Any]) -> Numbers:
    """Return the fitted numbers before and after, and the median error on models left out of the fit."""
    numbers: dict[str, Changed] = {}
    for key in sorted({str(row.family) for row in rows}, key=int):
        numbers[f"factor of H{key}"] = Changed(before["factor"].get(key), after["factor"][key])
        numbers[f"fixed cost of H{key}, us"] = Changed(before["fixed_us"].get(key), after["fixed_us"][key])
    without = {model: fit([r for r in rows if r.model != model], before) for model in {r.model for r in rows}}
    old, new = _error_ratios(rows, lambda row: before), _error_ratios(rows, lambda row: without[row.model])
    if new:
        numbers["each model of yours left out: median error"] = Changed(
            median(old) if old else None, median(new)
        )
    return numbers


def _error_ratios(rows: Sequence[Row], table_of: Any) -> list[float]:
    """Return the error of each row as a ratio of at least 1, by the table that `table_of(row)` returns."""
    estimated = [(row, ms) for row in rows if (ms := estimate(row, table_of(row))) is not None]
    return [math.exp(abs(math.log(row.ms / ms))) for row, ms in estimated]


def write_table(numbers: Mapping[str, Any], path: Path) -> Path:
    """Write a table, atomically; an existing file is replaced.

    Raises:
        SurgeryError: it cannot be written.
    """
    return arrays.write_text(path, json.dumps(numbers, indent=1) + "\n")
