"""Measure how far two outputs are apart: PSNR, largest errors, KL divergence and top-k."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from anesurgery.errors import InterfaceError
from anesurgery.mil import Array

TOP_K = 5
"""How many of the best entries count for top-k containment."""

AT_ONCE = 1 << 17
"""Elements of rows that are exponentiated at once: they stay in a processor's cache."""


@dataclass(frozen=True)
class OutputComparison:
    """The difference of one output; `a` is the reference."""

    name: str
    shape: tuple[int, ...]
    psnr: float
    """20 log10(largest |a| / root mean square of a - b), in dB, over elements that are finite on both sides.

    Infinite when equal; NaN where there is no such element, so that nothing was measured. Of integers and
    booleans -10 log10 of the share of elements that differ: how far one is from another says nothing. Callers
    turn labels into booleans."""
    max_abs: float
    max_rel: float
    """`max_abs` over the largest |a|; `max_abs` itself where a is 0 everywhere."""
    kl: float | None
    """Mean KL(softmax a || softmax b) over the last axis in nats; None for integers, and without rows."""
    top_k: float | None
    """Share of rows whose best entry in `a` is among the five best of `b`; ties count against it. None where a
    row has five entries or fewer, or `a` has no best entry."""
    bad: int
    """Elements that are NaN or infinite on one side only, or in different ways."""
    compared: int
    """Elements that are finite on both sides; the other numbers are about these only."""
    undefined: int = 0
    """Elements that are NaN or infinite in the same way on both sides, and not by design."""
    only_reference: int = 0
    """Elements, counted in `bad`, that are NaN or infinite in the reference and finite in the other."""
    logits: bool = False
    """Whether the values are logits of classes or tokens; for other values `kl` and `top_k` mean nothing."""

    @property
    def is_vacuous(self) -> bool:
        """Whether there are elements besides infinities by design, but none that is finite on both sides."""
        return self.compared == 0 and self.bad + self.undefined > 0

    @property
    def failure(self) -> str:
        """What is wrong whatever the gate is, in words; "" if nothing is."""
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


def compare_arrays(name: str, a: Array, b: Array, expected_infinities: Array | None = None) -> OutputComparison:
    """Return the measures of one output.

    Args:
        name: the name of the output.
        a: the reference.
        b: the candidate, of the same shape.
        expected_infinities: an array of the same shape with inf or -inf where both outputs should hold it, as
            in a mask that a model gives back; its other elements do not matter.

    Raises:
        InterfaceError: the shapes differ.
    """
    if a.shape != b.shape:
        raise InterfaceError(f"output {name!r} has shape {a.shape} in one model and {b.shape} in the other")
    x, y = a.astype(np.float64), b.astype(np.float64)
    is_finite = np.isfinite(x) & np.isfinite(y)
    compared = int(is_finite.sum())
    all_finite, is_integer = compared == a.size, a.dtype.kind in "biu"
    bad, undefined, only_reference = (
        (0, 0, 0) if all_finite else _count_not_finite(x, y, is_finite, expected_infinities)
    )
    kl, top_k = (None, None) if is_integer or not all_finite else _kl_and_top_k(x, y)
    difference = np.asarray(x - y if all_finite else x[is_finite] - y[is_finite])
    peak = _peak(x if all_finite else x[is_finite])
    max_abs = _peak(difference)
    if not compared:
        ratio = math.nan if bad or undefined else math.inf
    elif is_integer:
        ratio = psnr(1.0, math.sqrt(float(np.mean(a != b))))
    else:
        ratio = psnr(peak, math.sqrt(float(np.mean(np.square(difference, out=difference)))))
    return OutputComparison(
        name=name,
        shape=tuple(a.shape),
        psnr=ratio,
        max_abs=max_abs,
        max_rel=max_abs / peak if peak else max_abs,
        kl=kl,
        top_k=top_k,
        bad=bad,
        compared=compared,
        undefined=undefined,
        only_reference=only_reference,
    )


def _peak(x: Array) -> float:
    """Return the largest magnitude of finite numbers."""
    return max(float(x.max(initial=0.0)), -float(x.min(initial=0.0)))


def _count_not_finite(x: Array, y: Array, is_finite: Array, expected: Array | None) -> tuple[int, int, int]:
    """Return how many non-finite elements differ, agree but are not expected, and are finite in `y` alone."""
    agree = (x == y) | (np.isnan(x) & np.isnan(y))
    is_expected = np.isinf(x) & (x == expected) if expected is not None else np.zeros(x.shape, bool)
    differ, unexpected = ~agree & ~is_finite, agree & ~is_finite & ~is_expected
    return int(differ.sum()), int(unexpected.sum()), int((differ & np.isfinite(y)).sum())


def psnr(peak: float, rms: float) -> float:
    """Peak signal to noise ratio in dB; infinite without noise, minus infinite without signal."""
    if rms == 0:
        return math.inf
    return 20 * math.log10(peak / rms) if peak and not math.isinf(rms) else -math.inf


def _kl_and_top_k(x: Array, y: Array) -> tuple[float | None, float | None]:
    """Return KL divergence and top-k containment over the last axis, of finite numbers."""
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
    has_best = a.max(-1) > a.min(-1)
    reference, candidate = a[has_best], b[has_best]
    if a.shape[-1] <= TOP_K or not reference.size:
        return None
    best = np.take_along_axis(candidate, reference.argmax(-1)[:, None], -1)
    return float(np.mean((candidate >= best).sum(-1) <= TOP_K))


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
