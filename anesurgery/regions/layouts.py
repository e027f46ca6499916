"""Layouts: how the axes of a value are arranged in its channels-first twin.

The twin of a value holds the same numbers in the order batch, channels, tokens, usually as (batch, channels, 1,
tokens). Its axes consist of *atoms*. For example a value (batch, tokens, 12 heads, 64) has the atoms 12 and 64,
which are separate axes of the value but together the 768 channels of the twin. So splitting, merging and
transposing axes of the value changes the layout only, and moves nothing in the twin.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from anesurgery.mil import Array

BATCH, CHANNELS, TOKENS = ROLES = "bct"

Groups = tuple[tuple[int, ...], ...]
"""The axes of a twin: the atoms of each, in order; an empty group is an axis of length 1."""


@dataclass(frozen=True)
class Layout:
    """The atoms of a twin in their order, and which of them make up each axis of the value.

    Build it with the methods below only: they leave out atoms of length 1, and merge atoms that are never
    apart.
    """

    sizes: tuple[int, ...]
    roles: str
    """One of `ROLES` for each atom, in that order."""
    axes: tuple[tuple[int, ...], ...]
    """For each axis of the value its atoms, the most significant first; none for an axis of length 1."""

    @classmethod
    def of(cls, shape: Sequence[int], roles: str) -> Layout:
        """Return the layout of a value whose axes are one atom each: `Layout.of((1, 16, 64), "btc")`."""
        order = sorted((a for a, d in enumerate(shape) if d > 1), key=lambda a: (ROLES.index(roles[a]), a))
        axes = tuple((order.index(a),) if a in order else () for a in range(len(shape)))
        return cls(tuple(shape[a] for a in order), "".join(roles[a] for a in order), axes).normal()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return tuple(self.length(axis) for axis in self.axes)

    def length(self, atoms: Iterable[int]) -> int:
        """Return the length of an axis that consists of these atoms."""
        return math.prod(self.sizes[a] for a in atoms)

    def having(self, role: str) -> tuple[int, ...]:
        """Return the atoms of a role."""
        return tuple(a for a, r in enumerate(self.roles) if r == role)

    @property
    def is_view(self) -> bool:
        """Does the value hold its numbers in the order of the twin?"""
        return [a for axis in self.axes for a in axis] == list(range(len(self.sizes)))

    @property
    def groups(self) -> Groups:
        """The axes of the twin: batch, channels, 1, tokens; tokens on two axes of the value keep both."""
        tokens = [axis for axis in self.axes if any(self.roles[a] == TOKENS for a in axis)]
        has_two_axes = len(tokens) == 2 and sum(tokens, ()) == self.having(TOKENS)
        last = tuple(tokens) if has_two_axes else ((), self.having(TOKENS))
        return self.having(BATCH), self.having(CHANNELS), *last

    def normal(self) -> Layout:
        """Return the layout with atoms merged that are neighbours in the twin and in the value."""
        follows = {b for axis in self.axes for a, b in pairwise(axis) if b == a + 1}
        joined = [a in follows and self.roles[a] == self.roles[a - 1] for a in range(len(self.sizes))]
        number = (np.cumsum([not j for j in joined]) - 1).tolist()
        sizes = [1] * (number[-1] + 1 if number else 0)
        for atom, place in enumerate(number):
            sizes[place] *= self.sizes[atom]
        roles = "".join(r for r, j in zip(self.roles, joined, strict=True) if not j)
        axes = tuple(tuple(number[a] for a in axis if not joined[a]) for axis in self.axes)
        return Layout(tuple(sizes), roles, axes)

    def cut(self, parts: dict[int, Sequence[int]]) -> Layout:
        """Return the layout with some atoms cut into parts, most significant first, without merging."""
        runs, sizes, roles = [], list[int](), ""
        for atom, size in enumerate(self.sizes):
            new = [n for n in parts.get(atom, (size,)) if n > 1]
            runs.append(range(len(sizes), len(sizes) + len(new)))
            sizes += new
            roles += self.roles[atom] * len(new)
        axes = tuple(tuple(new for a in axis for new in runs[a]) for axis in self.axes)
        return Layout(tuple(sizes), roles, axes)

    def kept(self, atoms: Iterable[int], axes: Iterable[tuple[int, ...]]) -> Layout:
        """Return the layout of a value that has only some of the atoms, on the given axes."""
        kept_atoms = sorted(atoms)
        new = {a: i for i, a in enumerate(kept_atoms)}
        sizes = tuple(self.sizes[a] for a in kept_atoms)
        moved = tuple(tuple(new[a] for a in axis if a in new) for axis in axes)
        return Layout(sizes, "".join(self.roles[a] for a in kept_atoms), moved).normal()

    def without(self, axes: Sequence[int], keep_dims: bool) -> Layout:
        """Return the layout after a reduction over axes."""
        removed = {a for axis in axes for a in self.axes[axis]}
        axes_left = [axis for i, axis in enumerate(self.axes) if keep_dims or i not in axes]
        return self.kept(set(range(len(self.sizes))) - removed, axes_left)

    def resized(self, axis: int, size: int) -> Layout:
        """Return the layout with another length of an axis that is a single atom."""
        (atom,) = self.axes[axis]
        sizes = (*self.sizes[:atom], size, *self.sizes[atom + 1 :])
        layout = Layout(sizes, self.roles, self.axes)
        return layout.normal() if size > 1 else layout.cut({atom: ()}).normal()

    def transposed(self, perm: Sequence[int]) -> Layout:
        """Return the layout with the axes of the value in another order."""
        return Layout(self.sizes, self.roles, tuple(self.axes[p] for p in perm)).normal()

    def reshaped(self, shape: Sequence[int]) -> Layout | None:
        """Return the layout of the value at another shape; None where its axes cut across atoms."""
        parts: dict[int, list[int]] = {}
        flat = [a for axis in self.axes for a in axis]
        atoms_left, rest = list(flat), 1
        for size in shape:
            while size > 1:
                if rest == 1:
                    if not atoms_left:
                        return None
                    atom = atoms_left.pop(0)
                    rest = self.sizes[atom]
                if size % rest and rest % size:
                    return None
                part = min(size, rest)
                parts.setdefault(atom, []).append(part)
                size, rest = size // part, rest // part
        if rest > 1 or atoms_left:
            return None
        fine = self.cut({**parts})
        order, axes = iter([a for axis in fine.axes for a in axis]), []
        for size in shape:
            axis: list[int] = []
            while fine.length(axis) < size:
                axis.append(next(order))
            axes.append(tuple(axis))
        return Layout(fine.sizes, fine.roles, tuple(axes)).normal()

    def restricted(self, shape: Sequence[int]) -> Layout | None:
        """Return the layout of an operand that is broadcast to this value; None if its shape does not fit."""
        first = len(self.axes) - len(shape)
        if first < 0:
            return None
        kept_axes = [self.axes[first + i] if size > 1 else () for i, size in enumerate(shape)]
        if [self.length(axis) for axis in kept_axes] != list(shape):
            return None
        return self.kept({a for axis in kept_axes for a in axis}, kept_axes)

    def raised(self, rank: int) -> Layout:
        """Return the layout with axes of length 1 in front, up to a rank."""
        return Layout(self.sizes, self.roles, ((),) * (rank - len(self.axes)) + self.axes)

    def divided(self, axis: int, sizes: Sequence[int]) -> Layout | None:
        """Return the layout with the atoms of an axis cut into lengths `sizes`; None if that is impossible."""
        parts, sizes_left = dict[int, Sequence[int]](), list(sizes)
        for atom in self.axes[axis]:
            lengths: list[int] = []
            while math.prod(lengths) < self.sizes[atom] and sizes_left:
                lengths.append(sizes_left.pop(0))
            if math.prod(lengths) != self.sizes[atom]:
                return None
            parts[atom] = lengths
        return self.cut(parts)

    def column_order(self, axis: int) -> Array | None:
        """Return where the twin's channels stand in an axis of the value; None for the same order."""
        atoms = self.axes[axis]
        if list(atoms) == sorted(atoms):
            return None
        places = np.arange(self.length(atoms)).reshape([self.sizes[a] for a in atoms])
        return places.transpose(np.argsort(atoms)).reshape(-1)


def broadcast(one: Layout, other: Layout) -> Layout | None:
    """Return the layout of the value to which two are broadcast; None where their twins do not fit."""
    rank = max(len(one.axes), len(other.axes))
    pair = [one.raised(rank), other.raised(rank)]
    for axis in range(rank):
        if pair[0].axes[axis] and pair[1].axes[axis]:
            sizes = _common([[x.sizes[a] for a in x.axes[axis]] for x in pair])
            cut = [sizes and x.divided(axis, sizes) for x in pair]
            if not cut[0] or not cut[1]:
                return None
            pair = [cut[0], cut[1]]
    keys = [{a: (i, n) for i, axis in enumerate(x.axes) for n, a in enumerate(axis)} for x in pair]
    order: list[tuple[tuple[int, int], str, int]] = []
    for role in ROLES:
        rows = [[(k[a], role, x.sizes[a]) for a in x.having(role)] for x, k in zip(pair, keys, strict=True)]
        long, short = sorted(rows, key=len, reverse=True)
        if [row for row in long if row in short] != short:
            return None
        order += long
    places = [place for place, _, _ in order]
    if len(set(places)) < len(places):
        return None  # an atom has two roles
    axes = tuple(
        tuple(i for i, p in sorted(enumerate(places), key=lambda item: item[1]) if p[0] == axis)
        for axis in range(rank)
    )
    return Layout(tuple(n for _, _, n in order), "".join(r for _, r, _ in order), axes).normal()


def _common(factors: Sequence[Sequence[int]]) -> list[int] | None:
    """Return lengths into which two products of equal value can both be cut."""
    ends = sorted({math.prod(f[i:]) for f in factors for i in range(len(f) + 1)}, reverse=True)
    pairs = list(pairwise(ends))
    if math.prod(factors[0]) != math.prod(factors[1]) or any(a % b for a, b in pairs):
        return None
    return [a // b for a, b in pairs]


def groups_for(layout: Layout, operands: Sequence[Sequence[int]]) -> Groups:
    """Return axes of a twin such that each operand has all of an axis, or has length 1 there.

    Args:
        layout: the layout of the result.
        operands: the shapes of the operands that are broadcast to it.
    """
    rank = len(layout.axes)
    shapes = [(1,) * (rank - len(s)) + tuple(s) for s in operands]
    at = {a: i for i, axis in enumerate(layout.axes) for a in axis}
    longer_in = {a: tuple(s[i] > 1 for s in shapes) for a, i in at.items()}
    if all(len({longer_in[a] for a in group}) < 2 for group in layout.groups):
        return layout.groups
    groups: list[list[int]] = []
    for atom in range(len(layout.sizes)):
        last = groups[-1][-1] if groups else None
        if last is not None and layout.roles[last] == layout.roles[atom] and longer_in[last] == longer_in[atom]:
            groups[-1].append(atom)
        else:
            groups.append([atom])
    return ((),) * (4 - len(groups)) + tuple(map(tuple, groups))


def groups_of(layout: Layout, shape: Sequence[int]) -> Groups | None:
    """Return the axes of a twin of the given shape; None where it cuts across atoms."""
    groups, atoms_left = [], list(range(len(layout.sizes)))
    for size in shape:
        group: list[int] = []
        while layout.length(group) < size and atoms_left:
            group.append(atoms_left.pop(0))
        if layout.length(group) != size:
            return None
        groups.append(tuple(group))
    return tuple(groups) if not atoms_left else None


def seen_shape(layout: Layout, groups: Groups, shape: Sequence[int]) -> list[int]:
    """Return the shape of an operand's twin if the result has these groups."""
    full_shape = (1,) * (len(layout.axes) - len(shape)) + tuple(shape)
    present = {a for i, axis in enumerate(layout.axes) if full_shape[i] > 1 for a in axis}
    return [math.prod(layout.sizes[a] for a in group if a in present) for group in groups]


def twin_of(value: Array, layout: Layout, groups: Groups) -> Array:
    """Return the twin of a constant that is broadcast to a value; it is repeated where an axis needs that."""
    padded_rank = value.reshape((1,) * (len(layout.axes) - value.ndim) + value.shape)
    sizes: list[int] = []
    for n, axis in zip(padded_rank.shape, layout.axes, strict=True):
        sizes += [layout.sizes[a] if n > 1 else 1 for a in axis]
    atoms = [a for axis in layout.axes for a in axis]
    moved = padded_rank.reshape(sizes).transpose(np.argsort(atoms))
    for group in groups:
        if len({moved.shape[a] > 1 for a in group}) > 1:
            full = [layout.sizes[a] if a in group else n for a, n in enumerate(moved.shape)]
            moved = np.broadcast_to(moved, full)
    return moved.reshape([math.prod(moved.shape[a] for a in group) for group in groups])
