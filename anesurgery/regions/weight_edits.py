"""Edits of a weight that only move elements: transpose, cut, reorder, pad at the end, merge axes.

An `Edit` says of which old axes each new axis consists and which of their elements it takes, for example
`Edit.of((4, 6)).taken(0, range(2)).transposed([1, 0])`. The same edit can be derived for numbers that belong to
blocks of elements, as scales and tables do (`of_blocks`), so that compressed weights are edited alike.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from anesurgery.files.weights import followed_by_zeros
from anesurgery.interpret.arithmetic.constant_memory import release_pages
from anesurgery.mil import Array, Operation, static_shape
from anesurgery.ops import VIEWS
from anesurgery.semantics.reading import axis_slice, permutation

PAD = -1
"""The index of an element of the padding."""

PARTS = 16
"""The number of parts in which a weight is copied: for a table of embeddings a few megabytes each. A choice."""


@dataclass(frozen=True, eq=False)
class Axis:
    """A new axis: elements of some old axes, merged in this order."""

    sources: tuple[int, ...]
    index: Array
    """For each new element the index of the old one among the merged axes, or `PAD`."""


@dataclass(frozen=True, eq=False)
class Edit:
    """A rearrangement of a weight; each old axis is part of exactly one new axis."""

    shape: tuple[int, ...]
    """The shape before the edit."""
    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> Edit:
        """Return the edit that changes nothing."""
        lengths = tuple(int(n) for n in shape)
        return cls(lengths, tuple(Axis((i,), np.arange(n)) for i, n in enumerate(lengths)))

    @classmethod
    def reshaped(cls, old: Sequence[int], new: Sequence[int]) -> Edit | None:
        """Return the edit that gives a weight another shape; None where an axis would be split."""
        axes, at = list[Axis](), 0
        for length in new:
            first, size = at, 1
            while size < length and at < len(old):
                size, at = size * old[at], at + 1
            if size != length:
                return None
            axes.append(Axis(tuple(range(first, at)), np.arange(size)))
        full = next((i for i in reversed(range(len(axes))) if axes[i].sources), None)
        if at < len(old):  # axes of length 1 at the end go to one that has others
            if full is None:
                return None
            axes[full] = Axis((*axes[full].sources, *range(at, len(old))), axes[full].index)
        return cls(tuple(map(int, old)), tuple(axes))

    @property
    def result(self) -> tuple[int, ...]:
        """The shape after the edit."""
        return tuple(len(axis.index) for axis in self.axes)

    @property
    def key(self) -> Hashable:
        """A hashable that is equal for equal edits."""
        return self.shape, tuple((axis.sources, axis.index.tobytes()) for axis in self.axes)

    @property
    def keeps(self) -> bool:
        """Does it change nothing?"""
        places = enumerate(zip(self.axes, self.shape, strict=False))
        return len(self.axes) == len(self.shape) and all(
            a.sources == (i,) and np.array_equal(a.index, np.arange(n)) for i, (a, n) in places
        )

    @property
    def pads(self) -> bool:
        """Does it add elements?"""
        return any((axis.index == PAD).any() for axis in self.axes)

    def transposed(self, perm: Sequence[int]) -> Edit:
        """Return the edit, followed by a transposition of the new axes."""
        return replace(self, axes=tuple(self.axes[i] for i in perm))

    def taken(self, axis: int, index: Array | Sequence[int] | range) -> Edit:
        """Return the edit, followed by taking some elements of an axis, in the order given."""
        old = self.axes[axis]
        return self._with(axis, Axis(old.sources, old.index[np.asarray(index, np.intp)]))

    def padded(self, axis: int, size: int) -> Edit:
        """Return the edit, followed by padding an axis at its end."""
        old = self.axes[axis]
        more = np.full(size - len(old.index), PAD)
        return self._with(axis, Axis(old.sources, np.concatenate([old.index, more])))

    def expanded(self, at: int) -> Edit:
        """Return the edit, followed by a new axis of length 1."""
        return replace(self, axes=(*self.axes[:at], Axis((), np.zeros(1, np.intp)), *self.axes[at:]))

    def merged(self, first: int, last: int) -> Edit:
        """Return the edit, followed by merging the axes from `first` to `last`, both included."""
        parts = self.axes[first : last + 1]
        index = np.zeros(1, np.intp)
        for part in parts:
            size = self._length(part)
            both = index[:, None] * size + part.index
            index = np.where((index[:, None] == PAD) | (part.index == PAD), PAD, both).ravel()
        joint = Axis(tuple(s for part in parts for s in part.sources), index)
        return replace(self, axes=(*self.axes[:first], joint, *self.axes[last + 1 :]))

    def squeezed(self, axis: int) -> Edit:
        """Return the edit, followed by leaving out an axis of length 1.

        Raises:
            ValueError: it is longer, or the only axis.
        """
        if len(self.axes[axis].index) != 1 or len(self.axes) == 1:
            raise ValueError(f"axis {axis} of {self.result} cannot be dropped")
        order = list(range(len(self.axes)))
        first = max(axis - 1, 0)  # the axis of length 1 goes before its neighbour, whose elements stay together
        order[first : first + 2] = [axis, first if axis else 1]
        return self.transposed(order).merged(first, first + 1)

    def _with(self, at: int, axis: Axis) -> Edit:
        return replace(self, axes=(*self.axes[:at], axis, *self.axes[at + 1 :]))

    def _length(self, axis: Axis) -> int:
        """Return the number of elements of the old axes of a new one."""
        return math.prod(self.shape[s] for s in axis.sources)

    def apply(self, array: Array, fill: float = 0) -> Array:
        """Return an array of the old shape after the edit."""
        order = [s for axis in self.axes for s in axis.sources]
        edited = array.transpose(order).reshape([self._length(axis) for axis in self.axes])
        kept_indices = [np.flatnonzero(axis.index != PAD) for axis in self.axes]
        for number, (axis, indices) in enumerate(zip(self.axes, kept_indices, strict=True)):
            edited = _taken_along(edited, number, axis.index[indices])
        if self.pads:
            edited = self._filled(edited, kept_indices, fill)
        return np.asarray(edited, order="C").view(array.dtype)  # numpy drops the marks of types below a byte

    def _filled(self, inner: Array, kept_indices: Sequence[Array], fill: float) -> Array:
        """Return the array of the new shape with `inner` at the indices that are kept, and `fill` elsewhere."""
        only_rows_follow = inner.shape[1:] == self.result[1:] and _as_slice(kept_indices[0]).start == 0
        if not fill and only_rows_follow and not _scattered(kept_indices[0]):
            mapped = followed_by_zeros(inner, self.result)
            if mapped is not None:
                return mapped
        filled = np.full(self.result, fill, inner.dtype) if fill else np.zeros(self.result, inner.dtype)
        if any(map(_scattered, kept_indices)):
            filled[np.ix_(*kept_indices)] = inner
        else:  # in parts: a table of embeddings is the largest weight of many models
            _copy(inner, filled[tuple(map(_as_slice, kept_indices))])
        return filled

    def padding(self) -> Array:
        """Return a bool array of the new shape, True for elements of the padding."""
        padded = np.zeros(self.result, bool)
        for at, axis in enumerate(self.axes):
            padded[(slice(None),) * at + (axis.index == PAD,)] = True
        return padded

    def of_blocks(self, blocks: Sequence[int], *, apart: bool = False) -> Edit:
        """Return the edit of numbers that belong to blocks of elements; new blocks are as large as possible.

        Args:
            blocks: the number of blocks along each old axis; each divides the length.
            apart: must padding stand in blocks of its own? Otherwise it joins any block.
        """
        axes = []
        for axis in self.axes:
            numbers = np.append(self.numbers(axis, blocks), PAD)[axis.index]
            rows = numbers.reshape(-1, _block_length(numbers, apart)).max(axis=1)
            axes.append(Axis(axis.sources, rows if apart else np.maximum(rows, 0)))
        return Edit(tuple(map(int, blocks)), tuple(axes))

    def numbers(self, axis: Axis, blocks: Sequence[int]) -> Array:
        """Return for each element of the old axes of a new one the number of its block."""
        numbers = np.zeros(1, np.intp)
        for s in axis.sources:
            own = np.arange(self.shape[s]) // (self.shape[s] // int(blocks[s]))
            numbers = (numbers[:, None] * int(blocks[s]) + own).ravel()
        return numbers

    def of_vectors(self, axis: int, width: int) -> tuple[Edit, int] | None:
        """Return the edit of vectors of elements along an old axis, and the axis of vectors afterwards.

        None where the edit cuts a vector, or reorders its elements.
        """
        at = next(i for i, new in enumerate(self.axes) if axis in new.sources)
        new = self.axes[at]
        if new.sources[-1] != axis or len(new.index) % width:
            return None
        rows = new.index.reshape(-1, width)
        is_vector = (rows[:, :1] % width == 0) & (rows == rows[:, :1] + np.arange(width))
        if not (is_vector.all(axis=1) | (rows == PAD).all(axis=1)).all():
            return None
        lengths = tuple(n // width if i == axis else n for i, n in enumerate(self.shape))
        index = np.where(rows[:, 0] == PAD, PAD, rows[:, 0] // width)
        edited = replace(self, shape=lengths)._with(at, Axis(new.sources, index))
        return edited, at

    def followed_by(self, lengths: Sequence[int]) -> Edit:
        """Return the same edit of an array with more axes at the end, which do not change."""
        rank = len(self.shape)
        more = tuple(Axis((rank + i,), np.arange(n)) for i, n in enumerate(lengths))
        return Edit((*self.shape, *map(int, lengths)), (*self.axes, *more))

    def spread(self, values: Array) -> Array:
        """Repeat values of blocks of the result for each of their elements."""
        for at, (few, many) in enumerate(zip(values.shape, self.result, strict=False)):
            values = np.repeat(values, many // few, axis=at) if few != many else values
        return values


def _copy(source: Array, target: Array) -> None:
    """Copy an array in parts, so that memory need not hold all of a mapped one."""
    for part, target_part in zip(np.array_split(source, PARTS), np.array_split(target, PARTS), strict=True):
        target_part[...] = part
        release_pages(part)


def _scattered(indices: Array) -> bool:
    """Are indices not consecutive?"""
    return len(indices) > 1 and bool((np.diff(indices) != 1).any())


def _as_slice(indices: Array) -> slice:
    """Return consecutive indices as a slice."""
    first = int(indices[0]) if len(indices) else 0
    return slice(first, first + len(indices))


def _taken_along(array: Array, axis: int, indices: Array) -> Array:
    """Return some elements of an axis; a view if they are consecutive."""
    if _scattered(indices):
        return np.take(array, indices, axis)
    return array[(slice(None),) * axis + (_as_slice(indices),)]


def _block_length(numbers: Array, apart: bool) -> int:
    """Return the largest length of pieces that each hold one number and padding."""
    count = len(numbers)
    for size in sorted((n for n in range(1, count + 1) if count % n == 0), reverse=True):
        rows = numbers.reshape(-1, size)
        most = rows.max(axis=1)
        pads = rows == PAD
        has_one_number = (np.where(pads, most[:, None], rows) == most[:, None]).all()
        if has_one_number and (not apart or (pads.all(axis=1) | ~pads.any(axis=1)).all()):
            return size
    return 1


def pieces(shape: Sequence[int], axis: int, edges: Sequence[int]) -> list[Edit]:
    """Return the edits that cut an axis at `edges`, the first and the last of which are its ends."""
    return [Edit.of(shape).taken(axis % len(shape), range(a, b)) for a, b in pairwise(edges)]


def edit_of(op: Operation) -> Edit | None:
    """Return what an op does to its operand as an edit; None where it is not one."""
    old, new = (static_shape(v) for v in (op.inputs.get("x"), op.outputs[0]) if v is not None)
    if old is None or new is None:
        return None
    if op.op_type == "transpose":
        return Edit.of(old).transposed(permutation(op))
    if op.op_type in VIEWS:
        return Edit.reshaped(old, new)
    cut = axis_slice(op) if op.op_type == "slice_by_index" else None
    if cut is None or (cut.dropped and len(old) == 1):
        return None
    taken = Edit.of(old).taken(cut.axis, range(cut.begin, cut.end, cut.stride))
    return taken.squeezed(cut.axis) if cut.dropped else taken
