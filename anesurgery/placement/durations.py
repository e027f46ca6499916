"""Hold an estimated time and its band, and compare two of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Key = tuple[str, str]
"""Source of cost (products, memory, weights, waiting, CPU, switches, dispatch), and op type or ""."""

ALIKE = 1.03
"""Times of which one is longer by less are equal. A choice: runs of one model on one device differ as much."""


SHORTEST = 0.001
"""Milliseconds below which a time is not told in digits: a dispatch alone takes a hundred times as long."""
NEAR = 1.1
"""A ratio below it is said with a digit more."""


@dataclass(frozen=True)
class Time:
    """Milliseconds of one prediction with CPU_AND_NE; an estimate, not a measurement.

    Attributes:
        ms: the estimate.
        low, high: the band that should hold 80 % of measurements.
        measurements: published times behind the factor of the generation; 0 of a model that runs on the CPU
            alone, whose time is Core ML's own estimate.
        source: of these.
        parts: milliseconds by source of cost: products, memory (ops that only move numbers), weights (until
            they are read), waiting (of small ops for one another), CPU, switches, dispatch.
        by_op: milliseconds by source of cost and op type; the errors of one key are taken as common to two
        times.
        off: by key, the deviation of the logarithm of what it takes.
        reach: deviations to both sides that the band reaches.
        unlike: how large the error of work is that only one of two times has, beside that of its key.
    """

    ms: float
    low: float
    high: float
    measurements: int
    source: str
    parts: Mapping[str, float]
    by_op: Mapping[Key, float] = field(repr=False)
    off: Mapping[Key, float] = field(default_factory=dict, repr=False)
    reach: float = 1.0
    unlike: float = 1.0

    @classmethod
    def of(cls, by_op: Mapping[Key, float], off: Mapping[Key, float], common: float, **rest: Any) -> Time:
        """The time that sources of cost add up to.

        Args:
            by_op: milliseconds by key.
            off: by key, the deviation of the logarithm.
            common: that of all keys together: the factor of the generation.
            rest: the other attributes; `reach` among them.
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
        """What `of` takes besides sources of cost."""
        return {name: getattr(self, name) for name in ("measurements", "source", "reach", "unlike")}

    def spanning(self, other: Time) -> Time:
        """This time or another one, as it is not known which: the middle of both, the band around both."""
        ms, by_op = math.sqrt(self.ms * other.ms), _middle(self.by_op, other.by_op)
        scale = ms / sum(by_op.values())
        by_op, off = {key: part * scale for key, part in by_op.items()}, {**other.off, **self.off}
        apart = abs(math.log(self.ms / other.ms)) / 2
        widened = {key: math.hypot(value, apart) for key, value in off.items()}
        spanned = Time.of(by_op, off, 0.0, **self.rest)
        low, high = min(self.low, other.low), max(self.high, other.high)
        return replace(spanned, low=low, high=high, off=widened)

    def __str__(self) -> str:
        if self.high < SHORTEST:
            return f"less than {SHORTEST} ms"
        ms, low, high = (rounded(value, 3) for value in (self.ms, self.low, self.high))
        return f"{ms} ms ({low} to {high})"

    def to_json(self) -> dict[str, Any]:
        """Plain data; what only comparing needs is left out."""
        return {k: v for k, v in vars(self).items() if k not in ("by_op", "off", "reach", "unlike")}


def _middle(one: Mapping[Key, float], other: Mapping[Key, float]) -> dict[Key, float]:
    return {key: (one.get(key, 0.0) + other.get(key, 0.0)) / 2 for key in {**one, **other}}


def total(times: Iterable[Time]) -> Time:
    """Of models that run one after the other on one chip; their errors are taken as common."""
    every = list(times)
    by_op, off = defaultdict[Key, float](float), dict[Key, float]()
    for time in every:
        off |= time.off
        for key, part in time.by_op.items():
            by_op[key] += part
    summed = Time.of(by_op, off, 0.0, **max(every, key=lambda one: one.measurements).rest)
    return replace(summed, low=sum(t.low for t in every), high=sum(t.high for t in every))


def total_of(times: Sequence[Time | None]) -> Time | None:
    """The total where each is known, and there is one at all."""
    stated = [time for time in times if time is not None]
    return total(stated) if stated and len(stated) == len(times) else None


@dataclass(frozen=True)
class Change:
    """The times before and after, and the band of their ratio.

    Attributes:
        before, after: both times.
        ratio: after / before; below 1 is faster.
        low, high: the band of the ratio that should hold 80 %: what both sides share cancels.
    """

    before: Time
    after: Time
    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"time {self.before} -> {self.after}, {self.verdict}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        numbers = {"ratio": self.ratio, "low": self.low, "high": self.high, "verdict": self.verdict}
        return {"before": self.before.to_json(), "after": self.after.to_json(), **numbers}

    @property
    def better(self) -> bool | None:
        """Is it faster? None where the band of the ratio does not leave out 1."""
        return True if self.high < 1 else False if self.low > 1 else None

    @property
    def verdict(self) -> str:
        """How many times as fast or slow, with the band; "perhaps" where that does not leave out 1."""
        if 1 / ALIKE < self.ratio < ALIKE:
            return "as fast as before"
        sure, faster = "perhaps" if self.better is None else "about", self.ratio < 1
        values = (1 / self.ratio, 1 / self.high, 1 / self.low) if faster else (self.ratio, self.low, self.high)
        best, low, high = (rounded(value, 3 if value < NEAR else 2) for value in values)
        return f"{sure} {best} times as {'fast' if faster else 'slow'} ({low} to {high})"


def rounded(value: float, digits: int = 2) -> str:
    """A number to some digits, never with an exponent: "2.8", "130"."""
    exact = f"{float(f'{value:.{digits}g}'):.12f}"
    return exact.rstrip("0").rstrip(".")


def from_to(before: float, after: float, unit: str = " ms") -> str:
    """Two numbers, with as many digits as tell them apart: "2.031 ms -> 2.034 ms"."""
    most = 9  # more than any two need that differ by what counts
    for digits in range(3, most):
        words = rounded(before, digits), rounded(after, digits)
        if words[0] != words[1] or before == after:
            break
    return f"{words[0]}{unit} -> {words[1]}{unit}"


def change(before: Time, after: Time) -> Change:
    """The ratio of two times and its band.

    A source of cost and op type errs alike on both sides, so of the shares p and q that it has of the times
    before and after, only q - p of its error is left in the ratio. Work that only one side has comes with an
    error of its own. Towards 1 the band goes no further than where the bands of the two times meet: times whose
    bands lie apart are told apart. Where no measurement is behind one of them, the other way neither.
    """
    off = {**before.off, **after.off}
    left = [part * off.get(key, 0.0) for key in off for part in _left(key, before, after)]
    ratio, band = after.ms / before.ms, math.exp(max(before.reach, after.reach) * math.hypot(*left))
    low, high = ratio / band, ratio * band
    measured = before.measurements and after.measurements
    if ratio > 1 or not measured:
        low = max(low, after.low / before.high)
    if ratio < 1 or not measured:
        high = min(high, after.high / before.low)
    return Change(before, after, ratio, low, high)


def _left(key: Key, before: Time, after: Time) -> tuple[float, float]:
    """How much of the error of a key is left in the ratio: of what both sides share, and of the rest."""
    old, new = before.by_op.get(key, 0.0), after.by_op.get(key, 0.0)
    return new / after.ms - old / before.ms, max(before.unlike, after.unlike) * abs(new - old) / max(
        before.ms, after.ms
    )
