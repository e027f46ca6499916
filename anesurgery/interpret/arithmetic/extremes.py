"""Largest and smallest elements as sets: maximum, relu, clip, pooling and reductions are one operation.

The arithmetic of bits names each element by a hash. An extreme is known by its members and by the bounds that
constants put around it, whichever op took it and in whichever order: max(max(a, b), a) is max(a, b), and
clip(clip(x, 0, 6), -1, 7) is relu6(x). The smallest of some elements is the negative of the largest of their
negatives. Every such op hands NaN on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from anesurgery.interpret.arithmetic import field
from anesurgery.interpret.arithmetic.field import PRIMES, Image, hash_of, opaque, packed
from anesurgery.mil import Array

Tensor = torch.Tensor

MOST_MEMBERS = 512
"""The most members of a set: all numbers of a range of 9 bits. A choice: the extreme of two sets costs the
product of their members."""
MOST_BOUNDS = 64
"""Constants of up to so many elements are known as bounds, as limits of clips are; weights are larger."""
MOST_REMEMBERED = 1 << 22
"""The most members of sets that are remembered, the latest ones: 34 MB of names."""
MOST_INTEGERS = 1 << 20
"""The most extremes of integers that are remembered, the latest ones: 17 MB."""
NOBODY = (1 << 62) - 1
"""Fills the row of a set that has fewer members; no name is as large."""


class Sets(NamedTuple):
    """A set for each element: its largest member (the smallest, where `is_min`), limited by two bounds."""

    members: Tensor
    """[n, k]: the sorted names of the members; none for a constant, whose bounds are equal."""
    low: Tensor
    """[n], float64: the lower bound."""
    high: Tensor
    """[n], float64: the upper bound."""
    is_min: Tensor
    """[n], bool: is it the smallest member?"""


class _KnownExtremes(NamedTuple):
    """The sorted names of extremes that were computed, and the sets that they are extremes of."""

    names: Tensor
    sets: Sets


class _KnownRange(NamedTuple):
    """The sorted names of elements that lie in a range."""

    names: Tensor
    low: float
    high: float


class Lattice:
    """The extremes and the constants that one arithmetic knows."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._extremes: list[_KnownExtremes] = []
        self._constants: dict[int, float] = {}
        self._ranges: list[_KnownRange] = []

    def know(self, names: Image, values: Array) -> None:
        """Remember the names of constants, and those of their negatives."""
        if values.size > MOST_BOUNDS or np.isnan(values).any():
            return
        for sign, signed in ((1, names), (-1, field.negated(names))):
            numbers = (sign * float(v) for v in values.reshape(-1))
            self._constants |= zip(packed(signed).reshape(-1).tolist(), numbers, strict=True)

    def within(self, names: Image, low: float, high: float) -> None:
        """Remember that elements lie in a range."""
        if not math.prod(names.shape):
            return
        for signed, least, most in ((names, low, high), (field.negated(names), -high, -low)):
            self._ranges.append(_KnownRange(packed(signed).reshape(-1).sort().values, least, most))

    def largest(self, names: Image) -> Image:
        """Return the largest of the elements along the last axis."""
        rows = names.map(lambda v: v.reshape(-1, v.shape[-1]))
        sets, negative = _canonical(self._without_idle_bounds(self._union(packed(rows))))
        image = self._name(sets)
        self._remember(image, sets)
        return field.with_sign(image, negative).map(lambda v: v.reshape(names.shape[:-1]))

    def smallest(self, names: Image) -> Image:
        """Return the smallest of the elements along the last axis."""
        return field.negated(self.largest(field.negated(names)))

    def _union(self, rows: Tensor) -> Sets:
        """Return the union of the sets that the names of each row stand for: {a, b, c} for a and max(b, c).

        Sets with different upper bounds, or two of which one is a minimum, cannot be merged: their names are
        members then.
        """
        count, width = rows.shape
        sets = self._lookup(rows.reshape(-1))
        low, high, is_min = (v.reshape(count, width) for v in sets[1:])
        members = sets.members.reshape(count, width, sets.members.shape[1])
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
        members = members.flatten(1)
        top, bottom = torch.where(apart, math.inf, top), torch.where(apart, -math.inf, bottom)
        return Sets(_unique(members), torch.maximum(bottom, least), torch.maximum(top, least), is_min & ~apart)

    def _without_idle_bounds(self, sets: Sets) -> Sets:
        """Drop the bounds that a single member never exceeds."""
        low, high = sets.low.clone(), sets.high.clone()
        is_single = (sets.members != NOBODY).sum(1) == 1
        for known in self._ranges:
            at = torch.searchsorted(known.names, sets.members[:, 0]).clamp(max=len(known.names) - 1)
            here = is_single & (known.names[at] == sets.members[:, 0])
            low[here & (low <= known.low)] = -math.inf
            high[here & (high >= known.high)] = math.inf
        return sets._replace(low=low, high=high)

    def _lookup(self, names: Tensor) -> Sets:
        """Return the set that each name stands for: of an extreme, its negative, a constant, or itself."""
        negatives = _negative(names) if self._extremes else names
        found: list[tuple[Tensor, Sets]] = []
        for known in self._extremes:
            found += [_found(names, known), _found(negatives, known, _negated_sets)]
        if self._constants:
            constants = torch.tensor(sorted(self._constants))
            values = torch.tensor([self._constants[k] for k in constants.tolist()], dtype=torch.float64)
            nobody = torch.full((len(constants), 1), NOBODY)
            is_min = torch.zeros_like(constants, dtype=torch.bool)
            found.append(_found(names, _KnownExtremes(constants, Sets(nobody, values, values, is_min))))
        width = max((picked.members.shape[1] for _, picked in found), default=1)
        members = _widened(names[:, None], width)
        low = torch.full((len(names),), -math.inf, dtype=torch.float64)
        sets = Sets(members, low, -low, torch.zeros(len(names), dtype=torch.bool))
        for here, picked in found:
            sets.members[here] = _widened(picked.members, width)
            for entered, values in zip(sets[1:], picked[1:], strict=True):
                entered[here] = values
        return sets

    def _name(self, sets: Sets) -> Image:
        """Return the name of each set: its one member if nothing bounds it, else a hash of both."""
        hashed = opaque(PRIMES, hash_of(self.seed, "member"), sets.members)
        is_member = sets.members != NOBODY
        total = hashed.of_residues(lambda v: torch.where(is_member, v, 0).sum(1))
        bounded = opaque(
            PRIMES, hash_of(self.seed, "extreme"), packed(total), _bits(sets.low), _bits(sets.high)
        )
        is_free = (is_member.sum(1) == 1) & (sets.low == -math.inf) & (sets.high == math.inf)
        first = Image.of(sets.members[:, 0], PRIMES)
        return field.where(is_free, first, bounded)

    def _remember(self, names: Image, sets: Sets) -> None:
        """Remember the sets of extremes by name, and forget the oldest ones beyond `MOST_REMEMBERED`."""
        if not len(sets.low):
            return
        known = _KnownExtremes(*_in_order(packed(names).reshape(-1), sets))
        if known.sets.members.numel() <= MOST_REMEMBERED:
            while self._extremes and _may_be_joined(self._extremes[-1], known):
                known = _joined(self._extremes.pop(), known)
            self._extremes.append(known)
        while sum(known.sets.members.numel() for known in self._extremes) > MOST_REMEMBERED:
            self._extremes.pop(0)


def _in_order(names: Tensor, sets: Sets) -> tuple[Tensor, Sets]:
    """Return the names sorted and each once, and their sets."""
    ordered, first = map(torch.from_numpy, np.unique(names.numpy(), return_index=True))
    return ordered, Sets(*(v[first] for v in sets))


def _may_be_joined(old: _KnownExtremes, new: _KnownExtremes) -> bool:
    """Are two of about one size and width, and small?

    A lookup searches each list of names. Since lists of one size are joined, there are few of them, and a name
    is moved about as often as the number of names can be halved.
    """
    size = (len(old.names) + len(new.names)) * max(known.sets.members.shape[1] for known in (old, new))
    is_dense = size <= 2 * (old.sets.members.numel() + new.sets.members.numel())
    return is_dense and len(old.names) <= 2 * len(new.names) and size <= MOST_REMEMBERED // 8


def _joined(old: _KnownExtremes, new: _KnownExtremes) -> _KnownExtremes:
    """Return the extremes of both; a loop computes the same names in each round, and these are kept once."""
    width = max(known.sets.members.shape[1] for known in (new, old))
    parts = [known.sets._replace(members=_widened(known.sets.members, width)) for known in (new, old)]
    sets = Sets(*(torch.cat(pair) for pair in zip(*parts, strict=True)))
    return _KnownExtremes(*_in_order(torch.cat([new.names, old.names]), sets))


def _widened(members: Tensor, width: int) -> Tensor:
    """Return rows of names filled up to a width."""
    rows = torch.full((len(members), width), NOBODY)
    rows[:, : members.shape[1]] = members
    return rows


def _found(
    names: Tensor, known: _KnownExtremes, change: Callable[[Sets], Sets] | None = None
) -> tuple[Tensor, Sets]:
    """Return True where a name is known, and the sets there after a change, as narrow as they can be."""
    at = torch.searchsorted(known.names, names).clamp(max=len(known.names) - 1)
    here = known.names[at] == names
    picked = Sets(*(v[at[here]] for v in known.sets))
    width = max(1, int((picked.members != NOBODY).any(0).sum()))
    picked = picked._replace(members=picked.members[:, :width])
    return here, picked if change is None else change(picked)


def _negated_sets(sets: Sets) -> Sets:
    """Return the sets of the negatives: the largest member becomes the smallest, unless there is only one."""
    members = torch.where(sets.members == NOBODY, NOBODY, _negative(sets.members)).sort(1).values
    has_several = (members != NOBODY).sum(1) > 1
    return Sets(members, -sets.high, -sets.low, has_several & ~sets.is_min)


def _canonical(sets: Sets) -> tuple[Sets, Tensor]:
    """Return one of each set and its negative, the same for both, and True where it is the negative."""
    is_single = (sets.members != NOBODY).sum(1) == 1
    negative = sets.is_min | (is_single & field.signed(Image.of(sets.members[:, 0], PRIMES))[1])
    if not negative.any():
        return sets, negative
    other, rows = _negated_sets(sets), negative[:, None]
    parts = (torch.where(rows if a.ndim > 1 else negative, b, a) for a, b in zip(sets, other, strict=True))
    return Sets(*parts), negative


def _unique(members: Tensor) -> Tensor:
    """Return rows sorted and without repetitions, as narrow as they can be."""
    ordered = np.sort(members.numpy(), axis=1)  # several times as fast as torch, which finds the order too
    first = ordered != NOBODY
    first[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    counts = first.sum(1)
    unique = np.full((len(ordered), max(1, counts.max(initial=0))), NOBODY)
    unique[np.arange(unique.shape[1]) < counts[:, None]] = ordered[first]
    return torch.from_numpy(unique)


def _negative(names: Tensor) -> Tensor:
    """Return the names of the negatives."""
    return packed(field.negated(Image.of(names, PRIMES)))


def _bits(bounds: Tensor) -> Tensor:
    """Return float64 bounds as int64, bit for bit."""
    return bounds.contiguous().view(torch.int64)


class WholeExtremes:
    """The extremes of integers that one arithmetic knows: integers have names of their own in a lattice."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._lattice = Lattice(seed)
        self._extremes: list[tuple[Tensor, Tensor]] = []
        """Names of extremes, sorted, and their names in the lattice."""

    def know(self, names: Image, values: Array) -> None:
        """Remember the names of constants."""
        if values.size <= MOST_BOUNDS:
            self._lattice.know(self._entered(names), values)

    def largest(self, names: Image) -> Image:
        """Return the largest of the integers along the last axis."""
        return self._extreme(names, self._lattice.largest)

    def smallest(self, names: Image) -> Image:
        """Return the smallest of the integers along the last axis."""
        return self._extreme(names, self._lattice.smallest)

    def _extreme(self, names: Image, extreme: Callable[[Image], Image]) -> Image:
        """Return the extreme: one of the integers if no other counts, else a name of its own."""
        entered = self._entered(names)
        inside = packed(extreme(entered))
        named = packed(opaque(PRIMES, hash_of(self.seed, "whole extreme"), inside))
        self._remember(named.reshape(-1), inside.reshape(-1))
        same = packed(entered) == inside.unsqueeze(-1)
        first = packed(names).gather(-1, same.int().argmax(-1, keepdim=True)).squeeze(-1)
        return Image.of(torch.where(same.any(-1), first, named), PRIMES)

    def _entered(self, names: Image) -> Image:
        """Return the names of integers in the lattice."""
        outside = packed(names)
        inside = packed(opaque(PRIMES, hash_of(self.seed, "whole"), outside))
        for extremes, entered in self._extremes:
            at = torch.searchsorted(extremes, outside).clamp(max=len(extremes) - 1)
            inside = torch.where(extremes[at] == outside, entered[at], inside)
        return Image.of(inside, PRIMES)

    def _remember(self, named: Tensor, inside: Tensor) -> None:
        if not len(named):
            return
        order = named.sort()
        self._extremes = [pair for pair in self._extremes if not torch.equal(pair[0], order.values)]
        self._extremes.append((order.values, inside[order.indices]))
        while len(self._extremes) > 1 and sum(len(names) for names, _ in self._extremes) > MOST_INTEGERS:
            self._extremes.pop(0)
