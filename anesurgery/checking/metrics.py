"""Measure how far two arrays are apart: PSNR, errors, KL divergence, top-k."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from anesurgery.errors import InterfaceError
from anesurgery.mil import Array

TOP_K = 5
"""How many of the best entries count for top-k containment."""


@dataclass(frozen=True)
class OutputComparison:
    """The difference of one output; `a` is the reference."""

    name: str
    shape: tuple[int, ...]
    psnr: float
    """20 log10(largest |a| / root mean square of a - b), in dB; infinite when equal; NaN where no element is
    finite on both sides, so that nothing was measured."""
    max_abs: float
    max_rel: float
    """`max_abs` over the largest |a|."""
    kl: float | None
    """Mean KL(softmax a || softmax b) over the last axis in nats; None for an output without rows."""
    top_k: float | None
    """Share of rows whose best entry in `a` is among the five best of `b`."""
    bad: int
    """Elements that are NaN or infinite on one side only, or in different ways."""
    compared: int
    """Elements that are finite on both sides: all that the other numbers speak about."""

    @property
    def is_vacuous(self) -> bool:
        """Are there elements, and none of them finite on both sides?"""
        return self.compared == 0 and 0 not in self.shape

    @property
    def failure(self) -> str:
        """What is wrong whatever the gate is, in words; empty if nothing is."""
        if self.bad:
            what = "element is" if self.bad == 1 else "elements are"
            return f"{self.name}: {self.bad:,} {what} NaN or infinite on one side only"
        return f"{self.name}: no finite value was compared" if self.is_vacuous else ""


def compare_arrays(name: str, a: Array, b: Array) -> OutputComparison:
    """The measures of one output.

    Raises:
        InterfaceError: the shapes differ.
    """
    if a.shape != b.shape:
        raise InterfaceError(f"output {name!r} has shape {a.shape} in one model and {b.shape} in the other")
    x, y = a.astype(np.float64), b.astype(np.float64)
    agree = (x == y) | (np.isnan(x) & np.isnan(y))
    finite = np.isfinite(x) & np.isfinite(y)
    apart = np.where(agree | ~finite, 0.0, np.abs(np.where(finite, x, 0) - np.where(finite, y, 0)))
    peak = float(np.abs(np.where(np.isfinite(x), x, 0)).max(initial=0.0))
    max_abs = float(apart.max(initial=0.0))
    kl, top_k = _rows(x, y)
    compared = int(finite.sum())
    ratio = psnr(peak, float(np.sqrt(np.mean(apart**2))) if apart.size else 0.0)
    return OutputComparison(
        name,
        tuple(a.shape),
        ratio if compared or not apart.size else math.nan,
        max_abs,
        max_abs / peak if peak else max_abs,
        kl,
        top_k,
        int((~agree & ~finite).sum()),
        compared,
    )


def psnr(peak: float, rms: float) -> float:
    """Peak signal to noise ratio in dB; infinite without noise, minus infinite without signal."""
    if rms == 0:
        return math.inf
    return 20 * math.log10(peak / rms) if peak else -math.inf


def _rows(x: Array, y: Array) -> tuple[float | None, float | None]:
    """KL divergence and top-k containment over the last axis."""
    if x.ndim == 0 or x.shape[-1] < 2 or not x.size or not (np.isfinite(x).all() and np.isfinite(y).all()):
        return None, None
    a, b = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    log_p, log_q = _log_softmax(a), _log_softmax(b)
    kl = float(np.mean(np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)))
    k = min(TOP_K, a.shape[-1])
    best = np.argpartition(-b, k - 1, axis=-1)[:, :k]
    return max(kl, 0.0), float(np.mean((best == a.argmax(-1)[:, None]).any(-1)))


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
