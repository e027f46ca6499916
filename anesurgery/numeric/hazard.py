"""A hazard of numbers as one row: where it is, when nothing goes wrong, what `inspect` says, and the repair."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from anesurgery.errors import NO_MATCH, Refusal
from anesurgery.mil import Maker, Operation, Var
from anesurgery.semantics.intervals import is_half, magnitude

Size = Callable[[Var], float]
"""The largest magnitude of a value."""


class Site(Protocol):
    """Where a hazard is."""

    @property
    def ops(self) -> tuple[Operation, ...]:
        """All that it is written with."""


class Found:
    """A site whose parts are attributes: the last op is `op`, its result is `out`."""

    def __init__(self, op: Operation, *others: Operation | None, **parts: Any) -> None:
        self.ops = (op, *(other for other in others if other is not None))
        self.parts = {"op": op, "out": op.outputs[0], **parts}

    def __getattr__(self, name: str) -> Any:
        if name == "parts" or name not in self.parts:  # the first while it is copied
            raise AttributeError(name)
        return self.parts[name]


S = TypeVar("S", bound=Site)


def in_words(most: float) -> str:
    """How large a value may be."""
    return "has no known bound" if math.isinf(most) else f"may be {most:.4g}"


@dataclass(frozen=True)
class Hazard(Generic[S]):
    """A row: the rule of `inspect` and the pass that repairs it are both made of it.

    In words, `{at}` is the site, with its parts, and `{most}` what it reaches.
    """

    kinds: frozenset[str]
    """What ends it."""
    match: Callable[[Operation], S | str | None]
    """What an op of fp16 ends; or why nothing can go wrong there; None where it is something else."""
    says: str | Callable[[S, Size], str]
    """What `inspect` says where something may."""
    build: Callable[[Maker, S], Var]
    """The same, where nothing goes wrong."""
    reach: Callable[[S, Size], float] = lambda site, size: math.inf
    """What values come to at most, where `size` bounds those that are read."""
    limit: float = 0.0
    """Up to which nothing goes wrong."""
    safe: str = ""
    """Why nothing goes wrong, where nothing does."""
    unable: Callable[[S], str] = lambda site: ""
    """Why the repair does not apply, though something may go wrong; "" where it does."""
    half: bool = True
    """Does it concern fp16 alone?"""
    idle: bool = False
    """Do reports leave out where nothing goes wrong?"""

    def told(self, op: Operation, size: Size = magnitude) -> str:
        """What a rule says of an op; "" where nothing goes wrong."""
        site, most = self.at(op, size)
        if site is None or isinstance(site, str) or most <= self.limit:
            return ""
        return self.says.format(at=site, most=most) if isinstance(self.says, str) else self.says(site, size)

    def found(self, op: Operation) -> S | Refusal:
        """The site that a pass repairs, or why there is none."""
        site, most = self.at(op, magnitude)
        if site is None:
            return NO_MATCH
        if isinstance(site, str):
            return Refusal(site, op, idle=self.idle)
        if most <= self.limit:
            return Refusal(self.safe.format(at=site, most=most), op, idle=self.idle)
        unable = self.unable(site)
        return Refusal(unable, op) if unable else site

    def at(self, op: Operation, size: Size) -> tuple[S | str | None, float]:
        """Return what `match` finds at an op, and the largest value there; 0 where it finds no site."""
        concerned = op.op_type in self.kinds and (is_half(op.outputs[0]) or not self.half)
        site = self.match(op) if concerned else None
        return site, 0.0 if site is None or isinstance(site, str) else self.reach(site, size)
