"""Hold an estimated time and its band, and compare two of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Time:
    """Milliseconds of one prediction on the Neural Engine; an estimate, not a measurement.

    Attributes:
        ms: the estimate.
        low, high: the band that should hold 80 % of measurements.
        measurements: published times behind the factor of the generation.
        source: of these.
        parts: milliseconds by source of cost: products, memory, weights, CPU, switches, dispatch.
        by_op: milliseconds by source of cost and op type; the errors of one key are taken as common.
        forms: how weights are stored.
    """

    ms: float
    low: float
    high: float
    measurements: int
    source: str
    parts: Mapping[str, float]
    by_op: Mapping[tuple[str, str], float] = field(repr=False)
    forms: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.ms:.3g} ms ({self.low:.3g} to {self.high:.3g})"

    def to_json(self) -> dict[str, Any]:
        """Plain data; `by_op` and `forms` are left out."""
        return {k: v for k, v in vars(self).items() if k not in ("by_op", "forms")}


@dataclass(frozen=True)
class Change:
    """The times before and after, and the band of their ratio (after / before)."""

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
    def verdict(self) -> str:
        """Faster or slower, and by how much, where the band of the ratio leaves out 1."""
        if self.high < 1:
            return f"faster by {1 / self.high:.2g} to {1 / self.low:.2g} times"
        if self.low > 1:
            return f"slower by {self.low:.2g} to {self.high:.2g} times"
        return "no difference that this can tell"


def change(before: Time, after: Time) -> Change:
    """The ratio of two times and its band: each source of cost and op type errs alike on both sides."""
    off = max(before.high / before.ms, after.high / after.ms)
    keys = sorted({*before.by_op, *after.by_op})
    pairs = [(before.by_op.get(key, 0.0), after.by_op.get(key, 0.0)) for key in keys]
    high = _largest(pairs, off)
    low = 1 / _largest([(b, a) for a, b in pairs], off)
    return Change(before, after, after.ms / before.ms, low, high)


def _largest(pairs: Iterable[tuple[float, float]], off: float) -> float:
    """The largest ratio of sums of (below, above) when each pair may be `off` times smaller or larger."""
    ordered = sorted((p for p in pairs if any(p)), key=lambda p: p[1] / (p[0] + p[1]), reverse=True)
    found = []
    for cut in range(len(ordered) + 1):
        scaled = [(b * s, a * s) for n, (b, a) in enumerate(ordered) for s in [off if n < cut else 1 / off]]
        found.append(sum(a for _, a in scaled) / sum(b for b, _ in scaled))
    return max(found)
