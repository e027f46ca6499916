"""Largest and smallest elements as sets: maximum, relu, clip, pooling and reductions are one operation.

An extreme is known by its members and by the bounds that constants put around it, whichever op took it and
in whichever order: max(max(a, b), a) is max(a, b), and clip(clip(x, 0, 6), -1, 7) is relu6(x). The smallest of
some elements is the negative of the largest of their negatives. Every such op hands NaN on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from anesurgery.interpret.arithmetic import field
from anesurgery.interpret.arithmetic.field import PRIMES, Image, key, opaque, packed
from anesurgery.mil import Array

Tensor = torch.Tensor

MOST_MEMBERS = 512
"""Members of a set, at most: all numbers of a range of 9 bits. A choice, as what two sets make has the product
of their members."""
SMALL = 64
"""Constants of up to this many elements are known as bounds: limits are; weights are bounded by their ends."""
KEPT = 1 << 22
"""Members that are remembered, the last ones made: 32 MiB of names."""
NOBODY = (1 << 62) - 1
"""Stands where a set has no more members; no name is as large."""


class Sets(NamedTuple):
    """For some elements: the largest member (the smallest, where `is_min`), put between two bounds."""

    members: Tensor
    """[n, k] names as one number each, sorted; none for a constant, whose bounds are equal."""
    low: Tensor
    high: Tensor
    is_min: Tensor


class _Made(NamedTuple):
    """Names of extremes, sorted, and what they are."""

    names: Tensor
    sets: Sets


class Lattice:
    """What is known of the extremes and of the constants of one arithmetic."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._made: list[_Made] = []
        self._constants: dict[int, float] = {}
        self._ranges: list[tuple[Tensor, float, float]] = []

    def know(self, names: Image, values: Array) -> None:
        """Remember the names of constants, and those of their negatives."""
        if values.size > SMALL or np.isnan(values).any():
            return
        for sign, signed in ((1, names), (-1, field.negated(names))):
            numbers = (sign * float(v) for v in values.reshape(-1))
            self._constants |= zip(field.packed(signed).reshape(-1).tolist(), numbers, strict=True)

    def within(self, names: Image, low: float, high: float) -> None:
        """Remember that some elements lie in a range."""
        for sign, (a, b) in ((names, (low, high)), (field.negated(names), (-high, -low))):
            self._ranges.append((field.packed(sign).reshape(-1).sort().values, a, b))

    def largest(self, names: Image) -> Image:
        """The largest of the elements along the last axis."""
        rows = names.map(lambda v: v.reshape(-1, v.shape[-1]))
        sets, turned = _canonical(self._tight(self._union(field.packed(rows))))
        image = self._named(sets)
        self._remember(image, sets)
        return field.with_sign(image, turned).map(lambda v: v.reshape(names.shape[:-1]))

    def smallest(self, names: Image) -> Image:
        """The smallest of the elements along the last axis."""
        return field.negated(self.largest(field.negated(names)))

    def _union(self, rows: Tensor) -> Sets:
        """The union of what each row stands for; members that bounds keep apart stand for themselves."""
        count, width = rows.shape
        sets = self._lookup(rows.reshape(-1))
        low, high, is_min = (v.reshape(count, width) for v in sets[1:])
        members = sets.members.reshape(count, width, -1)
        constant = (members == NOBODY).all(-1)
        others = (~constant).sum(1)
        is_min = (is_min & ~constant).any(1)
        top = torch.where(constant, -math.inf, high).amax(1)
        apart = ((high != top[:, None]) & ~constant).any(1) | (is_min & (others > 1))
        least = torch.where(constant, low, -math.inf).amax(1)
        bottom = torch.where(constant, -math.inf, low).amax(1)
        if apart.any():
            alone = torch.full_like(members, NOBODY)
            alone[..., 0] = torch.where(constant, NOBODY, rows)
            members = torch.where(apart[:, None, None], alone, members)
        members = members.reshape(count, -1)
        top, bottom = torch.where(apart, math.inf, top), torch.where(apart, -math.inf, bottom)
        return Sets(_unique(members), torch.maximum(bottom, least), torch.maximum(top, least), is_min & ~apart)

    def _tight(self, sets: Sets) -> Sets:
        """Drops the bounds that one member keeps by itself."""
        low, high = sets.low.clone(), sets.high.clone()
        alone = (sets.members != NOBODY).sum(1) == 1
        for bounded, least, most in self._ranges:
            at = torch.searchsorted(bounded, sets.members[:, 0]).clamp(max=len(bounded) - 1)
            here = alone & (bounded[at] == sets.members[:, 0])
            low[here & (low <= least)] = -math.inf
            high[here & (high >= most)] = math.inf
        return sets._replace(low=low, high=high)

    def _lookup(self, names: Tensor) -> Sets:
        """What names stand for: an extreme, the negative of one, a constant, or themselves."""
        width = max((m.sets.members.shape[1] for m in self._made), default=1)
        members = torch.full((len(names), width), NOBODY)
        members[:, 0] = names
        low = torch.full((len(names),), -math.inf, dtype=torch.float64)
        sets = Sets(members, low, -low, torch.zeros(len(names), dtype=torch.bool))
        negatives = _negative(names) if self._made else names
        for extreme in self._made:
            _enter(sets, names, extreme.names, extreme.sets)
            _enter(sets, negatives, extreme.names, extreme.sets, _turned)
        if self._constants:
            constants = torch.tensor(sorted(self._constants))
            values = torch.tensor([self._constants[k] for k in constants.tolist()], dtype=torch.float64)
            nobody = torch.full((len(constants), 1), NOBODY)
            _enter(
                sets,
                names,
                constants,
                Sets(nobody, values, values, torch.zeros_like(constants, dtype=torch.bool)),
            )
        return sets

    def _named(self, sets: Sets) -> Image:
        """The name of a set: its one member if nothing bounds it, or a hash of members and bounds."""
        hashed = field.opaque(PRIMES, key(self.seed, "member"), sets.members)
        there = sets.members != NOBODY
        total = hashed.of_residues(lambda v: torch.where(there, v, 0).sum(1))
        bounded = field.opaque(
            PRIMES, key(self.seed, "extreme"), field.packed(total), _bits(sets.low), _bits(sets.high)
        )
        free = (there.sum(1) == 1) & (sets.low == -math.inf) & (sets.high == math.inf)
        first = _unpacked(sets.members[:, 0])
        return field.together([first, bounded], lambda each: torch.where(free, each[0], each[1]))

    def _remember(self, names: Image, sets: Sets) -> None:
        packed, first = map(torch.from_numpy, np.unique(field.packed(names).numpy(), return_index=True))
        if len(first) * sets.members.shape[1] <= KEPT:
            # A loop makes the same names in each round, and what is looked up is looked for in all.
            self._made = [m for m in self._made if not torch.equal(m.names, packed)]
            self._made.append(_Made(packed, Sets(*(v[first] for v in sets))))
        while sum(m.sets.members.numel() for m in self._made) > KEPT:
            self._made.pop(0)


def _enter(
    entered: Sets, names: Tensor, ordered: Tensor, sets: Sets, change: Callable[[Sets], Sets] | None = None
) -> None:
    """Enter what is known of some names, after a change of it; `ordered` is sorted."""
    at = torch.searchsorted(ordered, names).clamp(max=len(ordered) - 1)
    here = ordered[at] == names
    if not here.any():
        return
    picked = Sets(*(v[at[here]] for v in sets))
    picked = picked if change is None else change(picked)
    rows = torch.full((len(picked.members), entered.members.shape[1]), NOBODY)
    rows[:, : picked.members.shape[1]] = picked.members
    entered.members[here] = rows
    for old, new in zip(entered[1:], picked[1:], strict=True):
        old[here] = new


def _turned(sets: Sets) -> Sets:
    """The negatives: the largest member is the smallest of the negatives, unless there is only one."""
    members = torch.where(sets.members == NOBODY, NOBODY, _negative(sets.members)).sort(1).values
    several = (members != NOBODY).sum(1) > 1
    return Sets(members, -sets.high, -sets.low, several & ~sets.is_min)


def _canonical(sets: Sets) -> tuple[Sets, Tensor]:
    """One of a set and its negative, the same for both, and where it is the negative."""
    one = (sets.members != NOBODY).sum(1) == 1
    turned = sets.is_min | (one & field.signed(_unpacked(sets.members[:, 0]))[1])
    if not turned.any():
        return sets, turned
    other = _turned(sets)
    there = turned[:, None]
    parts = (torch.where(there if a.ndim > 1 else turned, b, a) for a, b in zip(sets, other, strict=True))
    return Sets(*parts), turned


def _unique(members: Tensor) -> Tensor:
    """Sorted rows without repetitions, as narrow as they can be."""
    ordered = np.sort(members.numpy(), axis=1)  # several times as fast as torch, which finds the order too
    first = ordered != NOBODY
    first[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    counts = first.sum(1)
    unique = np.full((len(ordered), max(1, counts.max(initial=0))), NOBODY)
    unique[np.arange(unique.shape[1]) < counts[:, None]] = ordered[first]
    return torch.from_numpy(unique)


def _unpacked(names: Tensor) -> Image:
    """The residues of names that are one number each."""
    return Image.of(names, PRIMES)


def _negative(names: Tensor) -> Tensor:
    """The names of the negatives."""
    return field.packed(field.negated(_unpacked(names)))


def _bits(bounds: Tensor) -> Tensor:
    """Bounds as integers."""
    return bounds.contiguous().view(torch.int64)


KEPT_INTEGERS = 1 << 20
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
        while len(self._made) > 1 and sum(len(names) for names, _ in self._made) > KEPT_INTEGERS:
            self._made.pop(0)
