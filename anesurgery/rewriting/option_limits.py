"""Limits of the options of a pass: said where the option stands, and held when the pass is made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable
from numbers import Integral, Real
from typing import Any, TypeVar

from anesurgery.errors import PassError, UnknownName
from anesurgery.mil import Program, walk_ops

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Limits:
    """What an option may be, beside what it is by default."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    among: tuple[Any, ...] = ()

    @property
    def whole(self) -> bool:
        """Are its ends integers, so that it must be one too?"""
        return any(isinstance(end, int) for end in (self.least, self.most))

    def hold(self, value: Any) -> bool:
        """Does a value keep to them?"""
        if self.among:
            return set(value) <= {*self.among} if isinstance(value, (tuple, list)) else value in self.among
        if not isinstance(value, Real):
            return False
        if self.whole and (not isinstance(value, Integral) or isinstance(value, bool)):
            return False
        return self.least <= float(value) <= self.most and float(value) > self.above

    def __str__(self) -> str:
        """What a value has to be."""
        if self.among:
            return f"may be {' or '.join(map(repr, self.among))}"
        if self.whole and self.most == math.inf:
            words = "a positive integer" if self.least == 1 else f"an integer of at least {self.least}"
            return f"must be {words}"
        if self.whole:
            return f"must be an integer from {self.least} to {self.most}"
        if math.isfinite(self.least) and math.isfinite(self.most):
            return f"must lie in [{self.least:g}, {self.most:g}]"
        ends = {"above": self.above, "at least": self.least, "at most": self.most}
        return "must be " + " and ".join(f"{word} {end:g}" for word, end in ends.items() if math.isfinite(end))


def option(
    default: T,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    above: float = -math.inf,
    among: Collection[Any] = (),
    of_target: str = "",
) -> T:
    """A field of a pass that has limits; its default is always allowed.

    Args:
        default: the value where none is given.
        least: the smallest value; an integer asks for integers.
        most: the largest one.
        above: what it must be larger than.
        among: all that it may be, in place of these; all that its elements may be, if it is a tuple.
        of_target: the limit of the target that `auto` gives it, as "axis" or "kernel_w".
    """
    limits = Limits(least, most, above, tuple(among))
    return dataclasses.field(default=default, metadata={"limits": limits, "of_target": of_target})


NAMES = ("tuple[str, ...]", "Sequence[str]")
"""The types of options that list names, which the command line gives as one word with commas."""


def check_named(names: Iterable[str], program: Program) -> None:
    """See that a program has ops or values of some names.

    Raises:
        UnknownName: it has none of one of them; lists near ones.
    """
    known = {name for op in walk_ops(program) for name in (op.name, *(v.name for v in op.outputs))}
    for name in names:
        if name not in known:
            raise UnknownName("op or value", name, known)


def keep_to_limits(step: Any) -> None:
    """See that the options of a pass keep to their limits; one name may stand for a list of names.

    Raises:
        PassError: one does not; says which, and what it may be.
    """
    for field in dataclasses.fields(step):
        if field.type in NAMES and isinstance(one := getattr(step, field.name), str):
            object.__setattr__(step, field.name, tuple(map(str.strip, one.split(","))))
        limits, value = field.metadata.get("limits"), getattr(step, field.name)
        if limits is None or value is field.default or limits.hold(value):
            continue
        raise PassError(f"{step.name}: {field.name}={value!r}; it {limits}")
