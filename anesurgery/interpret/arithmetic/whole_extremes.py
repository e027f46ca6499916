"""Largest and smallest integers: they are known by their order alone, and not by their negatives.

The negative of the least integer is itself, so max(-x, -y) is not -min(x, y). An integer enters the lattice
under a name of its own, whose negative stands for the same integer in the reverse order and for no result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from anesurgery.interpret.arithmetic.field import PRIMES, Image, key, opaque, packed
from anesurgery.interpret.arithmetic.lattice import SMALL, Lattice
from anesurgery.mil import Array

Tensor = torch.Tensor

KEPT = 1 << 20
"""Extremes whose names are remembered, the last ones made: 16 MiB."""


class WholeExtremes:
    """What is known of the extremes of integers in one arithmetic."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._lattice = Lattice(seed)
        self._made: list[tuple[Tensor, Tensor]] = []
        """Names of extremes, sorted, and their names in the lattice."""

    def know(self, names: Image, values: Array) -> None:
        """Remember the names of constants."""
        if values.size <= SMALL:
            self._lattice.know(self._entered(names), values)

    def largest(self, names: Image) -> Image:
        """The largest of the integers along the last axis."""
        return self._extreme(names, self._lattice.largest)

    def smallest(self, names: Image) -> Image:
        """The smallest of the integers along the last axis."""
        return self._extreme(names, self._lattice.smallest)

    def _extreme(self, names: Image, extreme: Callable[[Image], Image]) -> Image:
        """The extreme: one of the integers where no other counts, else a name of its own."""
        entered = self._entered(names)
        inside = packed(extreme(entered))
        named = packed(opaque(PRIMES, key(self.seed, "whole extreme"), inside))
        self._remember(named.reshape(-1), inside.reshape(-1))
        same = packed(entered) == inside.unsqueeze(-1)
        first = packed(names).gather(-1, same.int().argmax(-1, keepdim=True)).squeeze(-1)
        return Image.of(torch.where(same.any(-1), first, named), PRIMES)

    def _entered(self, names: Image) -> Image:
        """The names in the lattice."""
        outside = packed(names)
        inside = packed(opaque(PRIMES, key(self.seed, "whole"), outside))
        for extremes, entered in self._made:
            at = torch.searchsorted(extremes, outside).clamp(max=len(extremes) - 1)
            inside = torch.where(extremes[at] == outside, entered[at], inside)
        return Image.of(inside, PRIMES)

    def _remember(self, named: Tensor, inside: Tensor) -> None:
        if not len(named):
            return
        order = named.sort()
        self._made = [pair for pair in self._made if not torch.equal(pair[0], order.values)]
        self._made.append((order.values, inside[order.indices]))
        while len(self._made) > 1 and sum(len(names) for names, _ in self._made) > KEPT:
            self._made.pop(0)
