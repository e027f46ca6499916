"""An estimated time with its band, and the comparison of two times.

`timing.py` makes a `Time` of a function: the sum of several sources of cost ("products", "memory", ...), each
per op type, with the deviation of its error. `change` gives the ratio of two times and its band; errors that
both times share cancel, so the band of a ratio is narrower than the bands of the times.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Key = tuple[str, str]
"""(source of cost, op type or ""). The sources are those of `Time.parts`."""

EQUAL_WITHIN = 1.03
"""Times whose ratio is below this are equal. A choice: runs of one model on one device differ as much."""
AS_BEFORE = "as fast as before"
"""The verdict on such times."""
SHORTEST = 0.001
"""Milliseconds below which no digits are shown: a dispatch alone takes a hundred times as long."""
NEAR_RATIO = 1.1
"""A ratio below this is shown with three digits instead of two."""


@dataclass(frozen=True)
class Time:
    """Milliseconds of one prediction with CPU_AND_NE; an estimate, not a measurement."""

    ms: float
    """The estimate."""
    low: float
    high: float
    """`low` to `high` should hold 80 % of measurements."""
    measurements: int
    """Number of published times behind the factor of the generation; 0 for a model that runs on the CPU alone,
    whose time is Core ML's own estimate."""
    source: str
    """Who published these times."""
    parts: Mapping[str, float]
    """Milliseconds by source of cost: products, memory (ops that only move numbers), weights (reading them),
    waiting (of small ops for one another), CPU, switches, dispatch."""
    by_op: Mapping[Key, float] = field(repr=False)
    """Milliseconds by key; two times are assumed to have the same error in one key."""
    off: Mapping[Key, float] = field(default_factory=dict, repr=False)
    """Key -> standard deviation of the logarithm of its milliseconds."""
    reach: float = 1.0
    """The half width of the band in standard deviations."""
    unlike: float = 1.0
    """The error of work that only one of two times has, as a multiple of the error of its key."""

    @classmethod
    def of(cls, by_op: Mapping[Key, float], off: Mapping[Key, float], common: float, **rest: Any) -> Time:
        """Return the sum of several sources of cost, with its band.

        Args:
            by_op: milliseconds by key.
            off: key -> deviation of the logarithm.
            common: the deviation of an error that all keys share: that of the generation's factor.
            rest: the other attributes, `reach` among them.
        """
        ms, parts = sum(by_op.values()), defaultdict[str, float](float)
        for (kind, _), part in by_op.items():
            parts[kind] += part
        band = math.exp(
            rest["reach"] * math.hypot(common, *(part / ms * off[key] for key, part in by_op.items()))
        )
        return cls(ms, ms / band, ms * band, parts=dict(parts), by_op=by_op, off=off, **rest)

    @property
    def rest(self) -> dict[str, Any]:
        """The arguments of `of` besides the sources of cost."""
        return {name: getattr(self, name) for name in ("measurements", "source", "reach", "unlike")}

    def spanning(self, other: Time) -> Time:
        """Return the time if it is either this or another one: their geometric mean, and a band over both."""
        ms, by_op = math.sqrt(self.ms * other.ms), _mean_by_key(self.by_op, other.by_op)
        scale = ms / sum(by_op.values())
        by_op, off = {key: part * scale for key, part in by_op.items()}, {**other.off, **self.off}
        half_distance = abs(math.log(self.ms / other.ms)) / 2
        widened = {key: math.hypot(value, half_distance) for key, value in off.items()}
        spanned = Time.of(by_op, off, 0.0, **self.rest)
        low, high = min(self.low, other.low), max(self.high, other.high)
        return replace(spanned, low=low, high=high, off=widened)

    def __str__(self) -> str:
        if self.high < SHORTEST:
            return f"less than {SHORTEST} ms"
        ms, low, high = (rounded(value, 3) for value in (self.ms, self.low, self.high))
        return f"{ms} ms (likely {low} to {high})"

    def to_json(self) -> dict[str, Any]:
        """Return plain data, without the attributes that only comparing needs."""
        return {k: v for k, v in vars(self).items() if k not in ("by_op", "off", "reach", "unlike")}


def _mean_by_key(one: Mapping[Key, float], other: Mapping[Key, float]) -> dict[Key, float]:
    return {key: (one.get(key, 0.0) + other.get(key, 0.0)) / 2 for key in {**one, **other}}


def total(times: Iterable[Time]) -> Time:
    """Return the time of models that run one after the other on one chip; they share their errors."""
    parts = list(times)
    by_op, off = defaultdict[Key, float](float), dict[Key, float]()
    for time in parts:
        off |= time.off
        for key, part in time.by_op.items():
            by_op[key] += part
    summed = Time.of(by_op, off, 0.0, **max(parts, key=lambda time: time.measurements).rest)
    return replace(summed, low=sum(t.low for t in parts), high=sum(t.high for t in parts))


def total_of(times: Sequence[Time | None]) -> Time | None:
    """Return the total of several times; None if one is unknown, or if there are none."""
    known = [time for time in times if time is not None]
    return total(known) if known and len(known) == len(times) else None


@dataclass(frozen=True)
class Change:
    """The times before and after, and the band of their ratio."""

    before: Time
    after: Time
    ratio: float
    """After / before; below 1 is faster."""
    low: float
    high: float
    """`low` to `high` should hold 80 % of measured ratios; errors that both sides share cancel."""

    def __str__(self) -> str:
        return f"time {self.before} -> {self.after}, {self.verdict}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        numbers = {"ratio": self.ratio, "low": self.low, "high": self.high, "verdict": self.verdict}
        return {"before": self.before.to_json(), "after": self.after.to_json(), **numbers}

    @property
    def better(self) -> bool | None:
        """Is it faster? None if 1 lies in the band of the ratio, so that it is not known."""
        if self.low <= 1 <= self.high:
            return None
        return self.high < 1

    @property
    def verdict(self) -> str:
        """How many times as fast or slow, with the band; "perhaps" if 1 lies in the band."""
        if 1 / EQUAL_WITHIN < self.ratio < EQUAL_WITHIN:
            return AS_BEFORE
        certainty, is_faster = "perhaps" if self.better is None else "about", self.ratio < 1
        values = (self.ratio, self.low, self.high)
        if is_faster:
            values = (1 / self.ratio, 1 / self.high, 1 / self.low)
        times, low, high = (rounded(value, 3 if 1 / NEAR_RATIO < value < NEAR_RATIO else 2) for value in values)
        return f"{certainty} {times} times as {'fast' if is_faster else 'slow'} (likely {low} to {high})"


def rounded(value: float, digits: int = 2) -> str:
    """Return a number with some significant digits, never with an exponent: "2.8", "130"."""
    exact = f"{float(f'{value:.{digits}g}'):.12f}"
    return exact.rstrip("0").rstrip(".")


def from_to(before: float, after: float, unit: str = " ms") -> str:
    """Return two numbers with as many digits as make them differ: "2.031 ms -> 2.034 ms"."""
    old, new = as_different(before, after)
    return f"{old}{unit} -> {new}{unit}"


def as_different(before: float, after: float) -> tuple[str, str]:
    """Return two numbers in words, each with as many digits as make them differ."""
    most_digits = 9  # enough for any difference that matters
    for digits in range(3, most_digits):
        words = rounded(before, digits), rounded(after, digits)
        if words[0] != words[1] or before == after:
            break
    return words


def change(before: Time, after: Time) -> Change:
    """Return the ratio of two times and its band.

    A key has the same relative error on both sides. If it takes the share p of the time before and q of the
    time after, the ratio keeps only q - p of that error. Work that only one side has adds an error of its own.
    If the bands of the two times do not overlap, the ratio's band excludes 1.
    """
    off = {**before.off, **after.off}
    errors = [part * off.get(key, 0.0) for key in off for part in _remaining_shares(key, before, after)]
    ratio, band = after.ms / before.ms, math.exp(max(before.reach, after.reach) * math.hypot(*errors))
    low, high = ratio / band, ratio * band
    measured = before.measurements and after.measurements
    if ratio > 1 or not measured:
        low = max(low, after.low / before.high)
    if ratio < 1 or not measured:
        high = min(high, after.high / before.low)
    return Change(before, after, ratio, low, high)


def _remaining_shares(key: Key, before: Time, after: Time) -> tuple[float, float]:
    """Return the shares of a key's error that the ratio keeps: from common work, and from work of one side."""
    old, new = before.by_op.get(key, 0.0), after.by_op.get(key, 0.0)
    of_common_work = new / after.ms - old / before.ms
    of_other_work = max(before.unlike, after.unlike) * abs(new - old) / max(before.ms, after.ms)
    return of_common_work, of_other_work
