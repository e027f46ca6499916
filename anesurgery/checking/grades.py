"""Grades and metrics of checks: how sure a check is, what it found, and how far two results are apart.

First half: `Grade`, `Tolerance`, `Promise` (what a pass says about its edits) and `SiteCheck` (what the check
of one edit found), with the words for reports. Second half: `compare_arrays` measures two outputs (PSNR,
errors, KL divergence, top-k).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np

from anesurgery.display import finite
from anesurgery.doors import check_fields
from anesurgery.errors import InterfaceError, SurgeryError
from anesurgery.mil import Array


class Grade(IntEnum):
    """How sure a check is, from the weakest grade to the strongest."""

    NUMBERS = 1
    """Both sides gave the same on many numbers, adversarial ones among them."""
    EXHAUSTIVE = 2
    """Both sides gave the same on every value of a small domain."""
    PROVED = 3
    """Both sides are the same function of real numbers (over a prime field at random points)."""
    BITS = 4
    """Both sides compute each element in the same way, so the bits are equal."""

    @property
    def words(self) -> str:
        """The grade in the words of reports."""
        return {1: "checked", 2: "exhaustive", 3: "proved", 4: "bit for bit"}[self.value]


REQUIRED = {
    "checked": Grade.NUMBERS,
    "exhaustive": Grade.EXHAUSTIVE,
    "proved": Grade.PROVED,
    "bits": Grade.BITS,
}
"""The values of `require=`."""


@dataclass(frozen=True)
class Tolerance:
    """What a pass promises at its own sites, computed in fp32.

    Raises:
        SurgeryError: `rtol` is no number from 0 on.
    """

    rtol: float = 0.0
    """Largest difference, relative to the largest magnitude of the old value; 0 means bit-exact.

    Where sums cancel, a difference that fp64 shows to be rounding is relative to what flows through it."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.rtol >= 0:
            raise SurgeryError(f"Tolerance: rtol={self.rtol:g}; a difference is 0 or more")

    def __str__(self) -> str:
        return "bit-exact" if self.rtol == 0 else f"within {self.rtol:g} of the largest value"


EXACT = Tolerance()
REASSOCIATED = Tolerance(1e-5)
"""The tolerance for sums in another order: fp32 rounding of a few thousand terms stays below it."""


class AtMost(float):
    """A limit of numbers above 0 only: those below may be of any magnitude."""


@dataclass(frozen=True)
class Promise:
    """What a pass promises about its edits."""

    tolerance: Tolerance = EXACT
    tolerates_nonfinite: bool = True
    """Does the promise hold for infinities and NaN, too? False is a declared exception that reports name."""
    magnitude: float = math.inf
    """The largest magnitude of an edit's operands for which it holds: a precondition that reports name."""
    limits: Mapping[Any, float] = field(default_factory=dict)
    """Value -> the largest magnitude of it, in place of `magnitude`."""


PLAIN = Promise()
"""The promise of bit-equal results everywhere."""


@dataclass(frozen=True)
class SiteCheck:
    """What the comparison of the old and the new values of one edit found."""

    max_abs: float
    max_rel: float
    """`max_abs` over the largest finite magnitude of the old value, in the worst round; over what flows through
    the old side where that cancels and fp64 shows that the difference is rounding."""
    values: int
    """Number of elements compared."""
    grade: Grade = Grade.NUMBERS
    bound: float | None = None
    """The probability that a proof passes for two different computations is below this.

    None without a proof.
    """
    seed: int = 0
    finite_only: bool = False
    """The pass declares that it holds for finite numbers only."""
    magnitude: float = math.inf
    """The pass declares that it holds for numbers up to this magnitude."""
    left_out: int = 0
    """Elements that differ where the old side defines nothing, so that they were not compared: finite inputs
    give NaN, or infinity if the pass declares that it holds for finite numbers only."""
    untried: tuple[str, ...] = ()
    """Kinds of numbers that were not tried, as the site is large or the old side overflows on them."""
    overflow: float = math.inf
    """Inputs of this magnitude make the new side overflow in fp16 as stored, and not the old one."""
    underflow: float = 0.0
    """Inputs of this magnitude make the new side lose most digits in fp16 as stored, and not the old one."""
    loses: float = 0.0
    """Inputs of this magnitude make the new side lose digits in fp16 as stored that the old one keeps."""
    ranged: bool = False
    """Does the grade rest on ranges that the interval analysis shows?"""
    no_proof: str = ""
    """Why there is no proof."""
    counterexample: str = ""
    """Inputs on which both sides differ, to be pasted into Python."""
    lengths: tuple[int, ...] = ()
    """(least, largest) length of dynamic axes that was tried, where nothing is known about others."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {k: finite(v) for k, v in {**vars(self), "grade": self.words}.items()}

    @property
    def words(self) -> str:
        """The grade as reports say it, with the lengths on which it was reached."""
        return on_lengths(self.lengths) if self.lengths else self.grade.words

    def on_lengths(self, least: int, most: int, gap: str) -> SiteCheck:
        """Return the check with a grade that holds only for the lengths that were tried.

        Args:
            least: the least length of dynamic axes that was tried.
            most: the largest one.
            gap: why nothing is known about others.
        """
        grade = min(self.grade, Grade.NUMBERS)
        return replace(self, grade=grade, bound=None, no_proof=self.no_proof or gap, lengths=(least, most))

    @property
    def preconditions(self) -> str:
        """What the pass declares that the edit needs, in words; "" for nothing."""
        what = f"numbers of magnitude up to {self.magnitude:g}" if math.isfinite(self.magnitude) else ""
        return f"finite {what or 'numbers'}" if self.finite_only else what

    def within(self, tolerance: Tolerance) -> bool:
        """Is the difference within a tolerance?"""
        return self.max_abs == 0 if tolerance.rtol == 0 else self.max_rel <= tolerance.rtol


def on_lengths(lengths: Sequence[int]) -> str:
    """Return the words for a grade that was reached on some lengths only."""
    least, most = lengths
    return f"checked on length {most}" if least == most else f"checked on lengths {least} to {most}"


def combined_check(one: SiteCheck, other: SiteCheck) -> SiteCheck:
    """Return what two checks of one edit, at different sizes, show together."""
    worse = max(one, other, key=lambda c: (c.max_rel, c.max_abs, -c.grade))
    bounds = [c.bound for c in (one, other) if c.bound is not None]
    return replace(
        worse,
        grade=min(one.grade, other.grade),
        values=one.values + other.values,
        bound=sum(bounds) if len(bounds) == 2 else None,
        left_out=one.left_out + other.left_out,
        untried=tuple(dict.fromkeys((*one.untried, *other.untried))),
        overflow=min(one.overflow, other.overflow),
        underflow=max(one.underflow, other.underflow),
        loses=min((n for n in (one.loses, other.loses) if n), default=0.0),
        ranged=one.ranged or other.ranged,
        no_proof=one.no_proof or other.no_proof,
        counterexample=one.counterexample or other.counterexample,
    )


def summary(checks: Iterable[SiteCheck], *, fine: bool = True) -> str:
    """Return how many edits reached which grade: ``3 bit for bit, 2 proved, 1 checked on 4096 numbers``.

    Args:
        checks: the checks of the edits.
        fine: add what each grade rests on, and what speaks against a higher one?
    """
    by_grade: dict[tuple[Grade, tuple[int, ...]], list[SiteCheck]] = {}
    for check in checks:
        by_grade.setdefault((check.grade, check.lengths), []).append(check)
    said = list[str]()
    for (grade, lengths), reached in sorted(by_grade.items(), key=lambda item: item[0], reverse=True):
        if grade is Grade.NUMBERS and not lengths:
            said += _on_numbers(reached)
        else:
            said.append(f"{len(reached)} {reached[0].words}")
    every = [check for reached in by_grade.values() for check in reached]
    return ", ".join(said + (_fine_print(every) if fine else []))


def _on_numbers(checks: Sequence[SiteCheck]) -> Iterator[str]:
    """Yield how many edits were checked on how many numbers, and how many on none."""
    counts = [check.values for check in checks if check.values]
    if counts:
        at_least = "at least " if min(counts) < max(counts) else ""
        each = " each" if len(counts) > 1 else ""
        yield f"{len(counts)} {checks[0].words} on {at_least}{min(counts)} numbers{each}"
    if nothing := len(checks) - len(counts):
        yield f"{nothing} not checked: the ops before it give NaN on all inputs that were tried"


def _fine_print(checks: Sequence[SiteCheck]) -> list[str]:
    """Return what the grades rest on, and what speaks against a higher one, as clauses."""
    needs = Counter(c.preconditions for c in checks if c.preconditions)
    said = [f"{n} {'holds' if n == 1 else 'hold'} for {what} only" for what, n in needs.items()]
    if ranged := sum(c.ranged for c in checks):
        said.append(
            f"{ranged} {'rests' if ranged == 1 else 'rest'} on ranges that the interval analysis shows"
            + " with rounding, and numbers upstream keep"
        )
    said += _fp16_clauses(checks)
    unproved = Counter(c.no_proof for c in checks if c.no_proof)
    said += [f"{n} not proved: {why}" for why, n in unproved.items()]
    gaps = Counter(f"not tried on {' or '.join(c.untried)}" for c in checks if c.untried)
    said += [f"{n} {what}" for what, n in gaps.items()]
    if left_out := sum(c.left_out for c in checks):
        said.append(f"{left_out} elements that differ left out, where the old side defines nothing")
    return said


def _fp16_clauses(checks: Sequence[SiteCheck]) -> list[str]:
    """Return clauses about new sides that do worse than old ones in fp16, with the magnitudes of inputs."""
    over = [c.overflow for c in checks if math.isfinite(c.overflow)]
    under = [c.underflow for c in checks if c.underflow]
    loses = [c.loses for c in checks if c.loses]
    said = []
    for magnitudes, one, several, at in (
        (over, "overflows fp16 where the old side does not", "overflow fp16 where the old side does not", min),
        (
            under,
            "underflows fp16 where the old side does not",
            "underflow fp16 where the old side does not",
            max,
        ),
        (
            loses,
            "loses digits in fp16 that the old side keeps",
            "lose digits in fp16 that the old side keeps",
            min,
        ),
    ):
        if magnitudes:
            words = one if len(magnitudes) == 1 else several
            said.append(f"{len(magnitudes)} {words}, for numbers of about {at(magnitudes):g}")
    return said


# Measure how far two arrays are apart: PSNR, errors, KL divergence, top-k.


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

    Infinite when equal; NaN where there is no such element, so that nothing was measured. Of integers, booleans
    and labels -10 log10 of the share of elements that differ: how far one is from another says nothing."""
    max_abs: float
    max_rel: float
    """`max_abs` over the largest |a|."""
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
    logits: bool = False
    """Are the values logits of classes or tokens? For other values `kl` and `top_k` mean nothing."""

    @property
    def is_vacuous(self) -> bool:
        """Are there elements, but none that is finite on both sides?"""
        return self.compared == 0 and 0 not in self.shape

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


def compare_arrays(name: str, a: Array, b: Array, meant: Array | None = None) -> OutputComparison:
    """Return the measures of one output.

    Args:
        name: the name of the output.
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
    difference = np.asarray(x - y if compared == a.size else x[finite] - y[finite])
    peak = _peak(x if compared == a.size else x[finite])
    max_abs = _peak(difference)
    is_integer = a.dtype.kind in "biu"
    kl, top_k = (None, None) if is_integer or compared < a.size else _rows(x, y)
    if is_integer:
        ratio = psnr(1.0, math.sqrt(float(np.mean(a != b)))) if a.size else math.inf
    else:
        ratio = (
            psnr(peak, math.sqrt(float(np.mean(np.square(difference, out=difference)))))
            if compared
            else math.inf
        )
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
    """Return the largest magnitude of finite numbers."""
    return max(float(x.max(initial=0.0)), -float(x.min(initial=0.0)))


def _not_finite(x: Array, y: Array, finite: Array, meant: Array | None) -> tuple[int, int]:
    """Return the number of non-finite elements that differ, and of those that agree without being meant."""
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
