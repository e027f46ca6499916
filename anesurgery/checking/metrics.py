"""Measure how far two arrays are apart: PSNR, errors, KL divergence, top-k."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from anesurgery.errors import InterfaceError
from anesurgery.mil import Array

TOP_K = 5
"""How many of the best entries count for top-k containment."""

AT_ONCE = 1 << 17
"""Elements of rows that are exponentiated together: what stays in a processor's cache."""


@dataclass(frozen=True)
class OutputComparison:
    """The difference of one output; `a` is the reference."""

    name: str
    shape: tuple[int, ...]
    psnr: float
    """20 log10(largest |a| / root mean square of a - b), in dB, over elements that are finite on both sides.

    Infinite when equal; NaN where there is no such element, so that nothing was measured. Of integers, booleans
    and labels -10 log10 of the share of elements that differ: how far one is from another says nothing."""
    max_abs: float
    max_rel: float
    """`max_abs` over the largest |a|."""
    kl: float | None
    """Mean KL(softmax a || softmax b) over the last axis in nats; None for integers, and without rows."""
    top_k: float | None
    """Share of rows whose best entry in `a` is among the five best of `b`, entries as good counted against it;
    None for rows of five or fewer, of which it would always be, and where `a` has no best entry."""
    bad: int
    """Elements that are NaN or infinite on one side only, or in different ways."""
    compared: int
    """Elements that are finite on both sides: all that the other numbers speak about."""
    undefined: int = 0
    """Elements that are NaN or infinite in the same way on both sides, and not by design."""
    logits: bool = False
    """Is it a choice among classes or tokens? Of other values `kl` and `top_k` mean nothing."""

    @property
    def is_vacuous(self) -> bool:
        """Are there elements, and none of them finite on both sides?"""
        return self.compared == 0 and 0 not in self.shape

    @property
    def failure(self) -> str:
        """What is wrong whatever the gate is, in words; empty if nothing is."""
        if self.bad:
            return f"{self.name}: {_elements(self.bad)} NaN or infinite on one side only"
        if self.is_vacuous:
            return f"{self.name}: no finite value was compared"
        if self.undefined:
            return (
                f"{self.name}: {_elements(self.undefined)} NaN or infinite on both sides, which shows nothing"
            )
        return ""


def _elements(count: int) -> str:
    return "1 element is" if count == 1 else f"{count:,} elements are"


def compare_arrays(name: str, a: Array, b: Array, meant: Array | None = None) -> OutputComparison:
    """The measures of one output.

    Args:
        name: of the output.
        a: the reference.
        b: the candidate, of the same shape.
        meant: the values that are infinite by design, in the place and with the sign that both sides should
            have, as in a mask with -inf that a model gives back; other elements do not matter. NaN is never
            meant.

    Raises:
        InterfaceError: the shapes differ.
    """
    if a.shape != b.shape:
        raise InterfaceError(f"output {name!r} has shape {a.shape} in one model and {b.shape} in the other")
    x, y = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(x) & np.isfinite(y)
    compared = int(finite.sum())
    bad, undefined = (0, 0) if compared == a.size else _not_finite(x, y, finite, meant)
    apart = np.asarray(x - y if compared == a.size else x[finite] - y[finite])
    peak = _peak(x if compared == a.size else x[finite])
    max_abs = _peak(apart)
    whole = a.dtype.kind in "biu"
    kl, top_k = (None, None) if whole or compared < a.size else _rows(x, y)
    if whole:
        ratio = psnr(1.0, math.sqrt(float(np.mean(a != b)))) if a.size else math.inf
    else:
        ratio = psnr(peak, math.sqrt(float(np.mean(np.square(apart, out=apart))))) if compared else math.inf
    return OutputComparison(
        name,
        tuple(a.shape),
        ratio if compared or not a.size else math.nan,
        max_abs,
        max_abs / peak if peak else max_abs,
        kl,
        top_k,
        bad,
        compared,
        undefined,
    )


def _peak(x: Array) -> float:
    """The largest magnitude, of finite numbers."""
    return max(float(x.max(initial=0.0)), -float(x.min(initial=0.0)))


def _not_finite(x: Array, y: Array, finite: Array, meant: Array | None) -> tuple[int, int]:
    """Elements that are not finite and differ, and those that agree and are not meant to be so."""
    agree = (x == y) | (np.isnan(x) & np.isnan(y))
    intended = np.isinf(x) & (x == meant) if meant is not None else np.zeros(x.shape, bool)
    return int((~agree & ~finite).sum()), int((agree & ~finite & ~intended).sum())


def psnr(peak: float, rms: float) -> float:
    """Peak signal to noise ratio in dB; infinite without noise, minus infinite without signal."""
    if rms == 0:
        return math.inf
    return 20 * math.log10(peak / rms) if peak and not math.isinf(rms) else -math.inf


def _rows(x: Array, y: Array) -> tuple[float | None, float | None]:
    """KL divergence and top-k containment over the last axis, of finite numbers."""
    if x.ndim == 0 or x.shape[-1] < 2 or not x.size:
        return None, None
    a, b = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    together = max(1, AT_ONCE // a.shape[-1])
    kl = sum(_kl(a[k : k + together], b[k : k + together]) for k in range(0, len(a), together)) / len(a)
    return max(kl, 0.0), _contained(a, b)


def _kl(a: Array, b: Array) -> float:
    """The sum of the KL divergences of rows."""
    log_p, log_q = _log_softmax(a), _log_softmax(b)
    return float(np.sum(np.exp(log_p) * (log_p - log_q)))


def _contained(a: Array, b: Array) -> float | None:
    """Share of the rows with a best entry in `a` that is among the best in `b`; None if that shows nothing."""
    rows = a[a.max(-1) > a.min(-1)], b[a.max(-1) > a.min(-1)]
    if a.shape[-1] <= TOP_K or not rows[0].size:
        return None
    best = np.take_along_axis(rows[1], rows[0].argmax(-1)[:, None], -1)
    return float(np.mean((rows[1] >= best).sum(-1) <= TOP_K))


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
