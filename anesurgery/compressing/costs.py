"""What a change costs at the outputs of a model, over any number of runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from anesurgery.checking.metrics import psnr
from anesurgery.mil import Array

PROBABILITIES = 1e-2
"""How far rows may be from a sum of 1 to count as probabilities."""


@dataclass
class _Sums:
    """Of one output."""

    noise: float = 0.0
    count: int = 0
    peak: float = 0.0
    kl: float = 0.0
    agree: int = 0
    rows: int = 0
    broken: bool = False


@dataclass
class Cost:
    """How far outputs are from the reference; `add` takes in one more run."""

    sums: dict[str, _Sums] = field(default_factory=dict)

    def add(self, expected: Mapping[str, Array], found: Mapping[str, Array]) -> None:
        """Compare the outputs of one run."""
        for name, a in expected.items():
            if isinstance(a, np.ndarray) and a.dtype.kind == "f" and a.size:
                _measure(
                    self.sums.setdefault(name, _Sums()), a.astype(np.float64), found[name].astype(np.float64)
                )

    @property
    def psnr(self) -> float:
        """Of the worst output, in dB; minus infinite where one is not finite any more."""
        if any(s.broken for s in self.sums.values()):
            return -math.inf
        found = [psnr(s.peak, math.sqrt(s.noise / s.count)) for s in self.sums.values() if s.count]
        return min(found, default=math.inf)

    @property
    def rows(self) -> int:
        """Rows of finite numbers that KL and top-1 are of; without any they say nothing."""
        return sum(s.rows for s in self.sums.values())

    @property
    def kl(self) -> float:
        """Mean KL divergence of a row of the outputs, in nats."""
        if any(s.broken for s in self.sums.values()):
            return math.inf
        return max(0.0, sum(s.kl for s in self.sums.values()) / self.rows) if self.rows else 0.0

    @property
    def top1(self) -> float:
        """Share of rows whose largest entry is the same; 1 where no output has rows."""
        return sum(s.agree for s in self.sums.values()) / self.rows if self.rows else 1.0


def _measure(sums: _Sums, a: Array, b: Array) -> None:
    """Take in one output of one run; what the reference itself makes infinite is left out (masked scores)."""
    known = np.isfinite(a)
    sums.broken |= bool((known & ~np.isfinite(b)).any())
    sums.peak = max(sums.peak, float(np.abs(a[known]).max(initial=0.0)))
    sums.noise += float(((a[known] - b[known]) ** 2).sum()) if not sums.broken else 0.0
    sums.count += int(known.sum())
    if a.ndim == 0 or a.shape[-1] < 2 or not known.all() or sums.broken:
        return
    x, y = (v.reshape(-1, v.shape[-1]) for v in (a, b))
    log_p, log_q = (_logs(v, probabilities(x)) for v in (x, y))
    sums.kl += float((np.exp(log_p) * (log_p - log_q)).sum())
    sums.agree += int((x.argmax(-1) == y.argmax(-1)).sum())
    sums.rows += len(x)


def probabilities(rows: Array) -> bool:
    """Are the rows of the reference probabilities already, and no logits?"""
    return bool((rows >= 0).all() and (np.abs(rows.sum(-1) - 1) < PROBABILITIES).all())


def _logs(rows: Array, are_probabilities: bool) -> Array:
    """The logarithms of the probabilities of a row."""
    if are_probabilities:
        rows = np.maximum(rows, np.finfo(np.float32).tiny)
        return np.asarray(np.log(rows / rows.sum(-1, keepdims=True)))
    shifted = rows - rows.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
