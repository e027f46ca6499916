"""A hazard of numbers as one row of a table: where it is, when it does harm, what to say, and the repair.

From a row two things are derived: a rule of `inspect` (`placement.rules.numeric`) and the pass that repairs the
hazard (`rewriting.repairs.Repair`). Both ask the same questions, so a pass repairs exactly what a rule reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from anesurgery.errors import NO_MATCH, Refusal
from anesurgery.mil import Maker, Operation, Var
from anesurgery.semantics.intervals import is_half, magnitude

MagnitudeBound = Callable[[Var], float]
"""Returns the largest magnitude that a value may have; infinite where no bound is known."""


class Site(Protocol):
    """The ops in which a hazard was found."""

    @property
    def ops(self) -> tuple[Operation, ...]:
        """All ops of the site, the last one first."""


class Found:
    """A site that is described by named parts: `found.scores` is the part given as `scores=...`.

    The last op is always `op`, and its result `out`.
    """

    def __init__(self, op: Operation, *others: Operation | None, **parts: Any) -> None:
        self.ops = (op, *(other for other in others if other is not None))
        self.parts = {"op": op, "out": op.outputs[0], **parts}

    def __getattr__(self, name: str) -> Any:
        if name == "parts" or name not in self.parts:  # `parts` is missing while the object is copied
            raise AttributeError(name)
        return self.parts[name]


S = TypeVar("S", bound=Site)


def magnitude_words(most: float) -> str:
    """Return how large a value may be, in words."""
    return "has no known bound" if math.isinf(most) else f"may reach {most:.4g}"


@dataclass(frozen=True)
class Hazard(Generic[S]):
    """One row of the table of hazards.

    The texts are format strings: `{at}` is the site, with its parts, and `{most}` the largest value there.
    """

    kinds: frozenset[str]
    """Types of the op that a site ends with."""
    match: Callable[[Operation], S | str | None]
    """Returns the site that ends with an op; a text that says why this one does no harm; or None."""
    message: str | Callable[[S, MagnitudeBound], str]
    """What `inspect` says of a site that may do harm."""
    repair: Callable[[Maker, S], Var]
    """Builds ops that compute the same without the hazard, and returns their result."""
    largest: Callable[[S, MagnitudeBound], float] = lambda site, bound: math.inf
    """Returns the largest value inside a site, from bounds of the values that it reads."""
    limit: float = 0.0
    """A site does no harm if its largest value is at most this."""
    harmless: str = ""
    """Why a site below the limit does no harm."""
    not_repairable: Callable[[S], str] = lambda site: ""
    """Returns why the repair does not apply to a harmful site; "" where it does."""
    fp16_only: bool = True
    """Does the hazard exist in fp16 alone?"""
    quiet: bool = False
    """Do reports leave out the sites that do no harm?"""

    def finding(self, op: Operation, bound: MagnitudeBound = magnitude) -> str:
        """Return what `inspect` says of an op; "" where no site ends with it, or where it does no harm."""
        site, most = self._site_at(op, bound)
        if site is None or isinstance(site, str) or most <= self.limit:
            return ""
        if isinstance(self.message, str):
            return self.message.format(at=site, most=most)
        return self.message(site, bound)

    def site_to_repair(self, op: Operation) -> S | Refusal:
        """Return the site that ends with an op, or why there is nothing to repair."""
        site, most = self._site_at(op, magnitude)
        if site is None:
            return NO_MATCH
        if isinstance(site, str):
            return Refusal(site, op, idle=self.quiet)
        if most <= self.limit:
            return Refusal(self.harmless.format(at=site, most=most), op, idle=self.quiet)
        reason = self.not_repairable(site)
        return Refusal(reason, op) if reason else site

    def _site_at(self, op: Operation, bound: MagnitudeBound) -> tuple[S | str | None, float]:
        """Return what `match` finds at an op, and the largest value there; 0 where it finds no site."""
        if op.op_type not in self.kinds or (self.fp16_only and not is_half(op.outputs[0])):
            return None, 0.0
        site = self.match(op)
        return site, 0.0 if site is None or isinstance(site, str) else self.largest(site, bound)
