"""Fit the table of times to published measurements.

They are rows (`time_rows.json`), what their models ask for (`time_features.json`), and pairs of two forms of
one thing (`time_pairs.json` of the product, which holds them against each other for `compress` too).

The logarithm of a time is off by a deviation that all rows share. Factors of the generations lie near a line
over the generations, fixed costs near what was published of a dispatch; with these the most likely numbers
solve a least squares problem, with far rows counted less (Gauss and Newton's steps). How far numbers are off
is judged on rows that were left out.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from anesurgery.compressing.weight_forms import PAIRS, form_ratio
from anesurgery.mil import Array
from anesurgery.placement.calibration import Row, load_from
from anesurgery.placement.durations import change
from anesurgery.placement.target import Target, family_of
from anesurgery.placement.timing import FEW, FORMAT, OpLoad, Rates, Spent, deviation, microseconds, time_of

HERE = Path(__file__).parent
ROWS, FEATURES = (HERE / f"time_{name}.json" for name in ("rows", "features"))
READS_WEIGHTS = "lm_head"
"""One product of a row: its rows say at which rate weights are read."""

NOISE, APART, LINE, DISPATCH = 0.15, 0.2, (1.0, 0.3), 0.5
"""Deviations of logarithms: of a row, of a generation from the line, of the line's middle and slope, and of a
fixed cost from what was published of a dispatch. A few other values were
tried, and not all of them together."""
MIDDLE = 15
"""The generation at which the line has its middle."""
GUESSES = {"long": (2.0, 1.0), "notch": (2.0, 0.5)}
"""Value and deviation of the logarithm before a row is seen: a factor that is not much above 1 or 10."""
OFF = {"long": 0.4, "weights": 0.15, "dispatch": 0.4, "CPU": 0.6}
"""Deviations of what sources of cost take. CPU: DenseNet-121 takes 1.45 times the estimate on an M1 Max."""
OP_OFF = (0.15, 0.2, 0.3, 0.4, 0.5)
"""Tried for op types of the engine; the likeliest for rows that were left out is taken."""
COVERAGE = 0.8
"""Share of rows that were left out that a band shall hold. A choice: of five new figures one may not."""
GROWS = frozenset({"palette"})
"""Forms that were measured at several numbers of positions, and differ with it."""
UNLIKE = tuple(n / 4 for n in range(25))
"""Tried, until 80 % of the ratios of two models lie in their band: `durations.Time.unlike`."""
STEPS, SMALL = 60, 1e-7
"""Rounds of a fit at most, and the gain of its loss below which it ends. A choice: rows have 3 or 4 digits."""


def is_whole(row: Row) -> bool:
    """Is a row a model, and no measurement of the rate at which weights are read?"""
    return not row.model.startswith(READS_WEIGHTS)


@dataclass(frozen=True)
class LeftOut:
    """A row, the logarithm of measured over estimated by a fit without it, and its stated deviation."""

    row: Row
    error: float
    off: float
    deviations: Mapping[str, float] = field(repr=False)
    """Of the factors of that fit."""

    @property
    def z(self) -> float:
        """The error in deviations."""
        return self.error / self.off


def key_of(model: str, chip: str) -> str:
    """The key of the features of a model on a chip."""
    return f"{model} H{family_of(chip)}"


def read_json(path: Path) -> Any:
    """What a file holds."""
    return json.loads(path.read_text(encoding="utf-8"))


def usable(plain: Mapping[str, Any]) -> bool:
    """Is a row of the Neural Engine, or of a phone whose source does not say which units it asked for?"""
    return plain["units"] in ("CPU_AND_NE", "not stated")


def read_rows() -> list[Row]:
    """The published rows whose models were built."""
    features = read_json(FEATURES)
    return [
        Row(r["model"], r["chip"], r["ms"], r["source"], r["units"], load_from(features[key]))
        for r in read_json(ROWS)
        if usable(r) and (key := key_of(r["model"], r["chip"])) in features
    ]


def base(rows: Sequence[Row], pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A table of what needs no fit: rates of reading, forms of weights, costs of pairs, and first guesses."""
    families = sorted({row.family for row in rows})
    floor, off = _between([_each(p) for p in pairs if p["what"] == "floor"])
    near = _by_family([p for p in pairs if p["what"] == "dispatch"], families)
    switch, apart = _switches([p for p in pairs if p["what"] == "switch"], families)
    guesses = {name: value for name, (value, _) in GUESSES.items()}
    return {
        "format": FORMAT,
        "factor": {str(f): 0.7 for f in families},
        "fixed_us": {str(f): near[f] for f in families},
        "switch_us": switch,
        "floor_us": floor,
        "long": guesses["long"],
        "notch": {str(f): guesses["notch"] for f in families if f == family_of("M4")},
        "bandwidth": _bandwidths(rows, pairs),
        "forms": {name: _form(name, pairs) for name in sorted({p["what"] for p in pairs if "rows" in p})},
        "off": {**OFF, "op": OP_OFF[2], "switches": apart, "waiting": off},
    }


def _each(pair: Mapping[str, Any]) -> float:
    """Microseconds of one of what a pair counts."""
    return 1000 * (pair["after"] - pair["before"]) / pair["count"]


def _middle(values: Sequence[float]) -> tuple[float, float]:
    """The geometric mean of values, and the deviation of their logarithms."""
    logs = [math.log(v) for v in values]
    return round(math.exp(fmean(logs)), 4), round(float(np.std(logs)), 3)


def _between(bounds: Sequence[float]) -> tuple[float, float]:
    """The middle of the least and the most that something may be, which lie two deviations away."""
    least, most = math.log(min(bounds)), math.log(max(bounds))
    return round(math.exp((least + most) / 2), 4), round((most - least) / 4, 3)


def _by_family(pairs: Sequence[Mapping[str, Any]], families: Sequence[int]) -> dict[int, float]:
    """Microseconds by generation, with those between and beyond the measured ones taken from the nearest."""
    logs: dict[int, list[float]] = {}
    for pair in pairs:
        logs.setdefault(family_of(pair["chip"]), []).append(math.log(_each(pair)))
    at = sorted(logs)
    return {f: round(float(np.exp(np.interp(f, at, [fmean(logs[k]) for k in at]))), 1) for f in families}


def _switches(pairs: Sequence[Mapping[str, Any]], families: Sequence[int]) -> tuple[dict[str, float], float]:
    """Microseconds of a change of the unit, as measured or the middle of all; and how far that may be off."""
    own: dict[int, list[float]] = {}
    for pair in pairs:
        own.setdefault(family_of(pair["chip"]), []).append(_each(pair))
    means = {f: _middle(values)[0] for f, values in own.items() if len(values) > 1}
    middle, off = _middle([_middle(values)[0] for values in own.values()])
    return {str(f): round(means.get(f, middle), 1) for f in families}, off


def _bandwidths(rows: Iterable[Row], pairs: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """GB/s by chip, of the product of a row, and as published."""
    speeds: dict[str, list[float]] = {}
    for row in rows:
        if not is_whole(row):
            speeds.setdefault(row.chip, []).append(sum(op.weight for op in row.load.ops) / row.ms / 1e6)
    for pair in pairs:
        if pair["what"] == "bandwidth":
            speeds.setdefault(pair["chip"], []).append(pair["value"])
    return {chip: round(_middle(rates)[0], 2) for chip, rates in speeds.items()}


def _form(name: str, pairs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What a form of weights costs, of the pairs about it."""
    mine = [p for p in pairs if p["what"] == name]
    computing, reading = ([p for p in mine if p["of"] == of] for of in ("compute", "reading"))
    costs: dict[str, Any] = {"families": _span(mine), "computing_families": _span(computing)}
    left: list[float] = []
    if computing:
        slope, mean = _line(computing, name in GROWS)
        costs |= {"computing": round(math.exp(mean), 3), "grows": round(slope, 3)}
        left += [math.log(form_ratio(p)) - mean - slope * math.log(p["rows"] / FEW) for p in computing]
    if reading:
        streamed = [math.log(form_ratio(p) / p["stored"]) for p in reading if not p.get("folds")]
        costs["reading"] = round(math.exp(fmean(streamed)), 3)
        left += [value - fmean(streamed) for value in streamed]
        folded = {str(family_of(p["chip"])): form_ratio(p) / p["stored"] for p in reading if p.get("folds")}
        costs |= {"reading_on": folded} if folded else {}
    return {**costs, "off": round(float(np.std(left)), 3), "pairs": len(mine)}


def _line(pairs: Sequence[Mapping[str, Any]], grows: bool) -> tuple[float, float]:
    """Slope over the logarithm of positions, from 1 at `FEW` on, or none and the mean."""
    logs = [math.log(form_ratio(p)) for p in pairs]
    if not grows:
        return 0.0, fmean(logs)
    at = [math.log(p["rows"] / FEW) for p in pairs]
    return sum(x * y for x, y in zip(at, logs, strict=True)) / sum(x * x for x in at), 0.0


def _span(pairs: Iterable[Mapping[str, Any]]) -> list[int]:
    """The generations from the oldest to the newest that were measured."""
    families = {family_of(p["chip"]) for p in pairs}
    return list(range(min(families), max(families) + 1)) if families else []


class Problem:
    """The numbers to fit as a vector of logarithms, and what is known of them before rows are seen."""

    def __init__(self, rows: Sequence[Row], table: Mapping[str, Any]) -> None:
        self.rows, self.table = [row for row in rows if is_whole(row)], table
        self.families = [int(f) for f in table["factor"]]
        count = len(self.families)
        self.factors, self.fixed = slice(0, count), slice(count, 2 * count)
        self.others = ("long", "notch", "floor_us")
        self.size = 2 * count + len(self.others) + 2  # the middle and the slope of the line
        self.start = np.array(
            [
                *(math.log(table[name][str(f)]) for name in ("factor", "fixed_us") for f in self.families),
                *(math.log(self._value(name)) for name in self.others),
                math.log(0.7),
                0.0,
            ]
        )

    def _value(self, name: str) -> float:
        value = self.table[name]
        return float(next(iter(value.values()), GUESSES["notch"][0]) if isinstance(value, dict) else value)

    def as_table(self, x: Array) -> dict[str, Any]:
        """The table with the numbers of a vector."""
        values = np.exp(x).tolist()
        names = [str(f) for f in self.families]
        long, notch, floor = values[2 * len(names) : 2 * len(names) + 3]
        return {
            **self.table,
            "factor": dict(zip(names, (round(v, 4) for v in values[self.factors]), strict=True)),
            "fixed_us": dict(zip(names, (round(v, 1) for v in values[self.fixed]), strict=True)),
            "long": round(long, 3),
            "notch": dict.fromkeys(self.table["notch"], round(notch, 3)),
            "floor_us": round(floor, 4),
        }

    def known(self) -> tuple[Array, Array]:
        """What is known before: rows of a linear system, each over its deviation, and its right side."""
        count, lines, right = len(self.families), [], []

        def add(value: float, off: float, **at: float) -> None:
            line = np.zeros(self.size)
            for place, factor in at.items():
                line[int(place[1:])] = factor
            lines.append(line / off)
            right.append(value / off)

        for i, family in enumerate(self.families):
            add(0.0, APART, **{f"x{i}": 1.0, f"x{self.size - 2}": -1.0, f"x{self.size - 1}": MIDDLE - family})
            add(self.start[count + i], DISPATCH, **{f"x{count + i}": 1.0})
        offs = [GUESSES["long"][1], GUESSES["notch"][1], self.table["off"]["waiting"]]
        for i, off in enumerate(offs, 2 * count):
            add(self.start[i], off, **{f"x{i}": 1.0})
        add(self.start[-2], LINE[0], **{f"x{self.size - 2}": 1.0})
        add(0.0, LINE[1], **{f"x{self.size - 1}": 1.0})
        return np.array(lines), np.array(right)

    def linear(self, x: Array) -> tuple[Array, Array]:
        """Errors of the rows at a vector, and how each grows with each number, over `NOISE`."""
        table, errors, slopes = self.as_table(x), [], []
        for row in self.rows:
            us, slope = self._slopes(row, Rates.of(table, row.family, row.chip))
            errors.append(math.log(1000 * row.ms / us) / NOISE)
            slopes.append(slope / us / NOISE)
        return np.array(errors), np.array(slopes).reshape(-1, self.size)

    def _slopes(self, row: Row, rates: Rates) -> tuple[float, Array]:
        """Microseconds of a row, and how they grow with the logarithm of each number."""
        count, slope = len(self.families), np.zeros(self.size)
        place, us = self.families.index(row.family), row.load.switches * rates.switch
        if not row.load.on_cpu:
            us += rates.fixed
            slope[count + place] = rates.fixed
        for op in row.load.ops:
            spent = rates.spent(op)
            us += spent.total * op.count
            for at, part in self._moves(op, spent, place):
                slope[at] += part * op.count
        return us, slope

    def _moves(self, op: OpLoad, spent: Spent, place: int) -> list[tuple[int, float]]:
        """Which numbers an op's time grows with: what bounds it decides."""
        long, notch, floor = range(2 * len(self.families), 2 * len(self.families) + 3)
        if op.cpu:
            return [(notch, 0.0)]
        if spent.waiting:
            return [(floor, spent.total)]
        if spent.reading:
            return [(notch, spent.total)] if op.notch else []
        return [(place, spent.own), *([(long, spent.own)] if op.long else [])]


def solve(problem: Problem) -> tuple[Array, Array]:
    """The most likely numbers, as logarithms, and the deviations of these."""
    lines, right = problem.known()

    def look(at: Array) -> tuple[float, Array, Array]:
        """What is minimised, the matrix of the next step, and the way down."""
        errors, slopes = problem.linear(at)
        left, near = right - lines @ at, 1 / np.sqrt(1 + errors**2)  # a row that is far off counts less
        loss = float(2 * (1 / near - 1).sum() + (left**2).sum())
        return (
            loss,
            slopes.T @ (near[:, None] * slopes) + lines.T @ lines,
            slopes.T @ (near * errors) + lines.T @ left,
        )

    x, damping = problem.start.copy(), 1e-3
    now, normal, downhill = look(x)
    for _ in range(STEPS):
        step = np.linalg.solve(normal + damping * np.eye(len(x)), downhill)
        then = look(x + step)
        if then[0] >= now:
            if damping > 1:
                break
            damping *= 10
            continue
        gained, damping = now - then[0], max(damping / 10, 1e-6)
        x, (now, normal, downhill) = x + step, then
        if gained < SMALL:
            break
    return x, np.sqrt(np.diag(np.linalg.inv(normal)))


def fit(rows: Sequence[Row], pairs: Sequence[Mapping[str, Any]], op_off: float = OP_OFF[2]) -> dict[str, Any]:
    """The table without its reach: most likely numbers, and how far each generation's factor may be off."""
    first = base(rows, pairs)
    problem = Problem(rows, first | {"off": {**first["off"], "op": op_off}})
    x, off = solve(problem)
    table, names = problem.as_table(x), [str(f) for f in problem.families]
    table["deviation"] = dict(zip(names, (round(float(d), 3) for d in off[problem.factors]), strict=True))
    return table


def judged(row: Row, table: Mapping[str, Any]) -> LeftOut:
    """A row as a table estimates it."""
    rates = Rates.of(table, row.family, row.chip)
    spent = microseconds(row.load, rates)
    us = sum(spent.values())
    parts = (part / us * deviation(key, table) for key, part in spent.items())
    off = math.hypot(table["deviation"][str(row.family)], *parts)
    return LeftOut(row, math.log(1000 * row.ms / us), off, table["deviation"])


def left_out(
    rows: Sequence[Row], pairs: Sequence[Mapping[str, Any]], by: Callable[[Row], str], op_off: float = OP_OFF[2]
) -> list[LeftOut]:
    """Each row as a fit estimates it that saw no row of the same kind.

    There is none where no row of its generation is left. The product that gives rates of reading stays, unless
    its chip is what is left out.
    """
    judged_rows = []
    for value in dict.fromkeys(by(row) for row in rows):
        mine = [row for row in rows if by(row) == value]
        rest = [row for row in rows if by(row) != value]
        if not any(not is_whole(row) for row in rest):
            continue
        table = fit(rest, pairs, op_off)
        judged_rows += [judged(row, table) for row in mine if str(row.family) in table["factor"]]
    return judged_rows


KINDS: dict[str, Callable[[Row], str]] = {
    "model": lambda row: row.model,
    "chip": lambda row: row.chip,
    "source": lambda row: row.source,
}
"""What is left out."""


def reach_of(rows: Iterable[LeftOut]) -> float:
    """Deviations within which 80 % of left-out rows lie."""
    return float(np.quantile([abs(one.z) for one in rows], COVERAGE, method="higher"))


def likeliest(found_by_off: Mapping[float, Sequence[LeftOut]]) -> float:
    """The deviation of op types with which left-out rows are the most likely."""

    def likelihood(rows: Sequence[LeftOut]) -> float:
        return -sum(math.log(one.off) + math.log1p(one.z**2 / 3) * 2 for one in rows)  # Student's, 3 degrees

    return max(found_by_off, key=lambda off: likelihood(found_by_off[off]))


@dataclass(frozen=True)
class Fitted:
    """A table, and the rows by what was left out."""

    table: dict[str, Any]
    left: Mapping[str, Sequence[LeftOut]]


def fit_all(rows: Sequence[Row], pairs: Sequence[Mapping[str, Any]] | None = None) -> Fitted:
    """Fit, and judge the fit on rows that were left out by model, by chip and by source."""
    pairs = read_json(PAIRS) if pairs is None else pairs
    at = fit(rows, pairs)
    plain = {name: left_out(rows, pairs, by) for name, by in KINDS.items()}
    off = likeliest({op: [_restated(one, at, op) for one in plain["model"]] for op in OP_OFF})
    table = {**at, "off": {**at["off"], "op": off}}
    left = {name: [_restated(one, table, off) for one in judgements] for name, judgements in plain.items()}
    table["reach"] = round(reach_of([*left["model"], *left["chip"]]), 3)
    mine = {name: [row for row in rows if str(row.family) == name] for name in table["factor"]}
    table["measurements"] = {name: len(own) for name, own in mine.items()}
    table["source"] = {name: "; ".join(dict.fromkeys(row.source for row in own)) for name, own in mine.items()}
    table["unlike"] = next(
        (value for value in UNLIKE if ratios(rows, {**table, "unlike": value})[2] >= COVERAGE), UNLIKE[-1]
    )
    return Fitted(table, left)


def ratios(rows: Sequence[Row], table: Mapping[str, Any]) -> tuple[int, int, float]:
    """How ratios of two models fare that one source measured on one chip.

    Returns:
        How often it was stated which is the faster, how often wrongly, and the share of ratios in their band.
    """
    signs, inside = list[bool](), list[bool]()
    for one, other in itertools.combinations([row for row in rows if is_whole(row)], 2):
        if (one.chip, one.source) != (other.chip, other.source):
            continue
        before, after = (time_of(row.load, Target.parse(row.chip), table) for row in (one, other))
        if isinstance(before, str) or isinstance(after, str):
            continue
        told, measured = change(before, after), other.ms / one.ms
        inside.append(told.low <= measured <= told.high)
        if not told.low <= 1 <= told.high:
            signs.append((told.ratio > 1) == (measured > 1))
    return len(signs), signs.count(False), fmean(inside)


def _restated(one: LeftOut, table: Mapping[str, Any], op_off: float) -> LeftOut:
    """The same error with another deviation of op types, which does not move the fit."""
    stated = judged(one.row, {**table, "deviation": one.deviations, "off": {**table["off"], "op": op_off}})
    return replace(one, off=stated.off)
