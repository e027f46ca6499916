"""Record what a pass promises of its edits (`Promise`), and what the check of an edit found (`SiteCheck`).

`Grade` says how sure a check is; `summary` writes the checks of many edits as one line of a report.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

from anesurgery.display import finite
from anesurgery.doors import check_fields
from anesurgery.errors import Refusal, SurgeryError


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


REQUIRED = dict(zip(("checked", "exhaustive", "proved", "bits"), Grade, strict=True))
"""The values of `require=`; "bits" is short for bit for bit."""


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
        return "bit-exact" if self.is_exact else f"within {self.rtol:g} of the largest value"

    @property
    def is_exact(self) -> bool:
        """Whether results must be equal bit for bit."""
        return self.rtol == 0

    def allows(self, max_abs: float, max_rel: float) -> bool:
        """Return whether a largest difference, absolute and as a share of the largest value, is within it."""
        return max_abs == 0 if self.is_exact else max_rel <= self.rtol


EXACT = Tolerance()
REASSOCIATED = Tolerance(1e-5)
"""The tolerance for sums in another order: fp32 rounding of a few thousand terms stays below it."""


class UpperLimit(float):
    """A value of `Promise.limits` that bounds from above only: for 4.0, -1e9 is allowed and 5 is not."""


@dataclass(frozen=True)
class Promise:
    """What a pass promises about its edits."""

    tolerance: Tolerance = EXACT
    tolerates_nonfinite: bool = True
    """Whether the promise holds for infinities and NaN, too; reports name the exceptions."""
    magnitude: float = math.inf
    """The largest magnitude of an edit's operands for which it holds: a precondition that reports name."""
    limits: Mapping[Any, float] = field(default_factory=dict)
    """MIL variable -> its largest magnitude, in place of `magnitude`; an `UpperLimit` has no lower end."""


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
    """Elements that were not compared: on the old side, finite inputs give NaN there, or an infinity if
    `finite_only`."""
    untried: tuple[str, ...] = ()
    """Kinds of numbers that were not tried, as the site is large or the old side overflows on them."""
    overflow: float = math.inf
    """The least inputs on which the new side overflows in fp16 as stored, and not the old one; inf for none."""
    underflow: float = 0.0
    """The largest inputs on which the new side loses most digits in fp16, as they are small; 0 for none."""
    loses: float = 0.0
    """The least inputs on which the new side loses digits in fp16 that the old one keeps; 0 for none."""
    ranged: bool = False
    """Whether the grade rests on ranges that the interval analysis shows."""
    no_proof: str = ""
    """Why there is no proof."""
    counterexample: str = ""
    """Inputs on which both sides differ, to be pasted into Python."""
    lengths: tuple[int, int] | tuple[()] = ()
    """(least, largest) length of dynamic axes that was tried, where nothing is known about others."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {k: finite(v) for k, v in {**vars(self), "grade": self.words}.items()}

    @property
    def words(self) -> str:
        """The grade as reports say it, with the lengths on which it was reached."""
        return length_words(self.lengths) if self.lengths else self.grade.words

    def on_lengths(self, least: int, most: int, gap: str) -> SiteCheck:
        """Return the check with a grade that holds only for the lengths that were tried.

        Args:
            least: the least length of dynamic axes that was tried.
            most: the largest one.
            gap: why nothing is known about others.
        """
        no_proof = self.no_proof or gap
        return replace(self, grade=Grade.NUMBERS, bound=None, no_proof=no_proof, lengths=(least, most))

    @property
    def preconditions(self) -> str:
        """What the pass declares that the edit needs, in words; "" for nothing."""
        what = f"numbers of magnitude up to {self.magnitude:g}" if math.isfinite(self.magnitude) else ""
        return f"finite {what or 'numbers'}" if self.finite_only else what

    def within(self, tolerance: Tolerance) -> bool:
        """Return whether the difference is within a tolerance."""
        return tolerance.allows(self.max_abs, self.max_rel)


@dataclass
class EarlierChecks:
    """The checks of one pass, each by the fingerprint of its edit: the same computation is checked once."""

    results: dict[Hashable, SiteCheck | Refusal] = field(default_factory=dict)
    proofs: dict[Hashable, SiteCheck | None] = field(default_factory=dict)
    """The proofs of edits with any weights; None where there is none."""
    shapes: set[Hashable] = field(default_factory=set)
    """The edits with very many weights, whatever these are."""


def length_words(lengths: Sequence[int]) -> str:
    """Return the words for a grade that was reached on some lengths only."""
    least, most = lengths
    return f"checked on length {most}" if least == most else f"checked on lengths {least} to {most}"


def combined_check(one: SiteCheck, other: SiteCheck) -> SiteCheck:
    """Return what two checks of one edit, at different sizes, show together.

    The promise is the same in both, so what it declares (`finite_only`, `magnitude`) comes from either one.
    """
    worse = max(one, other, key=lambda c: (c.max_rel, c.max_abs, -c.grade))
    grade = min(one.grade, other.grade)
    bounds = [c.bound for c in (one, other) if c.bound is not None]
    return replace(
        worse,
        grade=grade,
        values=one.values + other.values,
        bound=sum(bounds) if bounds and grade is Grade.PROVED else None,
        left_out=one.left_out + other.left_out,
        untried=tuple(dict.fromkeys((*one.untried, *other.untried))),
        overflow=min(one.overflow, other.overflow),
        underflow=max(one.underflow, other.underflow),
        loses=min((n for n in (one.loses, other.loses) if n), default=0.0),
        ranged=one.ranged or other.ranged,
        no_proof=one.no_proof or other.no_proof,
        counterexample=one.counterexample or other.counterexample,
    )


def summary(checks: Iterable[SiteCheck], *, details: bool = True) -> str:
    """Return how many edits reached which grade: ``3 bit for bit, 2 proved, 1 checked on 4096 numbers``.

    Args:
        checks: the checks of the edits.
        details: whether to add what each grade rests on, and why it is not higher.
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
    return ", ".join(said + (_details(every) if details else []))


def _on_numbers(checks: Sequence[SiteCheck]) -> Iterator[str]:
    """Yield how many edits were checked on how many numbers, and how many on none."""
    counts = [check.values for check in checks if check.values]
    if counts:
        at_least = "at least " if min(counts) < max(counts) else ""
        each = " each" if len(counts) > 1 else ""
        yield f"{len(counts)} {checks[0].words} on {at_least}{min(counts)} numbers{each}"
    if nothing := len(checks) - len(counts):
        yield f"{nothing} not checked: the ops before it give NaN on all inputs that were tried"


def _details(checks: Sequence[SiteCheck]) -> list[str]:
    """Return what the grades rest on, and what speaks against a higher one, as clauses."""
    needs = Counter(c.preconditions for c in checks if c.preconditions)
    said = [f"{n} {'holds' if n == 1 else 'hold'} for {what} only" for what, n in needs.items()]
    if ranged := sum(c.ranged for c in checks):
        said.append(
            f"{ranged} {'rests' if ranged == 1 else 'rest'} on ranges that the interval analysis shows"
            + " for the values upstream, rounding included"
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
    lost = [c.loses for c in checks if c.loses]
    clauses = (
        _clause(over, "overflow", "fp16 where the old side does not", min),
        _clause(under, "underflow", "fp16 where the old side does not", max),
        _clause(lost, "lose", "digits in fp16 that the old side keeps", min),
    )
    return [clause for clause in clauses if clause]


def _clause(inputs: Sequence[float], verb: str, what: str, nearest: Callable[[Sequence[float]], float]) -> str:
    """Return how many edits do something, and for which inputs: those nearest to ordinary numbers."""
    if not inputs:
        return ""
    subject = f"1 {verb}s" if len(inputs) == 1 else f"{len(inputs)} {verb}"
    return f"{subject} {what}, for numbers of about {nearest(inputs):g}"
