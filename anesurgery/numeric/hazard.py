"""A hazard of numbers as one row: where it is, when nothing goes wrong, what `inspect` says, and the repair."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from anesurgery.errors import Refusal
from anesurgery.mil import Maker, Operation, Var
from anesurgery.semantics.intervals import is_half, magnitude

Size = Callable[[Var], float]
"""The largest magnitude of a value."""


class Site(Protocol):
    """Where a hazard is."""

    @property
    def ops(self) -> tuple[Operation, ...]:
        """All that it is written with."""


S = TypeVar("S", bound=Site)


def in_words(most: float) -> str:
    """How large a value may be."""
    return "has no known bound" if math.isinf(most) else f"may be {most:.4g}"


@dataclass(frozen=True)
class Hazard(Generic[S]):
    """A row: the rule of `inspect` and the pass that repairs it are both made of it."""

    kinds: frozenset[str]
    """What ends it."""
    match: Callable[[Operation], S | None]
    """What an op ends; None where it is something else."""
    safe: Callable[[S, Size], str]
    """Why nothing goes wrong, with the value that shows it; "" where it may."""
    says: Callable[[S, Size], str]
    """What `inspect` says where it may."""
    build: Callable[[Maker, S], Var]
    """The same, where nothing goes wrong."""
    unable: Callable[[S], Refusal | None] = lambda site: None
    """Why the repair does not apply, though the hazard is there."""

    def told(self, op: Operation, size: Size = magnitude) -> str:
        """What a rule says of an op; "" where nothing goes wrong."""
        site = self.match(op) if op.op_type in self.kinds and is_half(op.outputs[0]) else None
        return "" if site is None or self.safe(site, size) else self.says(site, size)
