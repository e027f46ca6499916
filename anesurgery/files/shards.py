"""Shares of a piece of work, for several processes or machines: "3/8" is the third of eight."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from anesurgery.errors import SurgeryError

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """Every `count`-th piece of work, beginning with the `number`-th (from 1)."""

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise SurgeryError(f"shard {self.words}: the first number goes from 1 to the second")

    @property
    def words(self) -> str:
        """The share as it is written: "3/8"."""
        return f"{self.number}/{self.count}"

    def of(self, work: Sequence[T]) -> list[T]:
        """The pieces of this share, in order: neighbours are in different shares."""
        return list(work[self.number - 1 :: self.count])

    def share(self, number: int, count: int) -> Shard:
        """A share of this share."""
        return Shard((number - 1) * self.count + self.number, self.count * count)


def share(asked: Shard | str | tuple[int, int] | None) -> Shard:
    """A share, given as "3/8" or (3, 8); all of the work when absent.

    Raises:
        SurgeryError: it is something else.
    """
    if asked is None or isinstance(asked, Shard):
        return asked or Shard()
    if isinstance(asked, str):
        parts = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", asked)
        if parts is None:
            raise SurgeryError(f"shard {asked!r}: write it as 3/8, the third of eight")
        return Shard(int(parts[1]), int(parts[2]))
    return Shard(*asked)
