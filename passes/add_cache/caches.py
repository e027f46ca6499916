"""The parts of a cache: which values to keep, rings for sliding windows, and tables sliced at the position.

The ops built here read `position`, an int32 input of one element: the number of tokens before this call.

A ring of `size` slots keeps the token at position p in slot p modulo size. A query at position p finds in a
slot the token that is (p - slot) modulo size back, so its mask depends on that distance as soon as the ring is
full. The size leaves room for one call: no call overwrites a token that one of its own tokens still sees, and a
token that lies ahead appears farther back than the window reaches. A write near the end of the ring runs into
extra rows after it, which are then copied to the first slots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import networkx
import numpy as np

from anesurgery.facts.masks import evaluate_static
from anesurgery.facts.token_axes import NEW, SEEN, WEIGHTS, Axes, Tokens, lengthened
from anesurgery.mil import Array, Maker, Operation, Var, constant, consumers, np_dtype, static_shape
from anesurgery.ops import CARRIERS
from anesurgery.regions.small_builds import again
from anesurgery.semantics.reading import elements


@dataclass(frozen=True)
class Kept:
    """A value to keep in the cache: the smallest one from which keys or values are only rearranged."""

    value: Var
    """The value, with the tokens of this call."""
    axis: int
    """The axis of the tokens."""
    path: tuple[Operation, ...]
    """The ops from the value to the product that reads keys or values."""

    @property
    def others(self) -> list[int]:
        """The axes that hold no tokens."""
        return [a for a in range(self.value.rank) if a != self.axis]

    @property
    def width(self) -> int:
        """The length of each cached vector."""
        return int(self.value.shape[self.others[-1]])

    @property
    def heads(self) -> int:
        """The number of vectors that are cached for each token."""
        return math.prod(int(self.value.shape[a]) for a in self.others[:-1])

    @property
    def is_plain(self) -> bool:
        """Is the value already `1 x heads x tokens x width`?"""
        return self.value.rank == 4 and self.value.shape[0] == 1 and self.axis == 2

    @property
    def order(self) -> list[int]:
        """The permutation of the axes that puts the tokens last but one."""
        return [*self.others[:-1], self.axis, self.others[-1]]


def kept_for(operand: Var, tokens: Tokens) -> Kept:
    """Return the value to keep for an operand of all tokens: before heads are repeated, after rotation."""
    path: list[Operation] = []
    candidates = [Kept(operand, tokens.new_axis(operand), ())]
    var = operand
    while (op := var.op) is not None and op.op_type in CARRIERS | {"tile"} and op.x in tokens.axes:
        path.insert(0, op)
        var = op.x
        candidates.append(Kept(var, tokens.new_axis(var), tuple(path)))
    return min(candidates, key=lambda kept: (elements(kept.value), not kept.is_plain))


def as_rows(mb: Maker, kept: Kept, length: int) -> Var:
    """Arrange a kept value of `length` tokens as `1 x heads x tokens x width`.

    Example: tokens x heads x width (5, 2, 8) with the axis 0 is transposed to (2, 5, 8) and becomes
    (1, 2, 5, 8).
    """
    rows = kept.value
    if kept.order != sorted(kept.order):
        rows = mb.transpose(x=rows, perm=kept.order)
    wanted = (1, kept.heads, length, kept.width)
    if static_shape(rows) != wanted:
        rows = mb.reshape(x=rows, shape=list(wanted), name=f"{kept.value.name}_rows")
    return rows


def from_rows(mb: Maker, kept: Kept, rows: Var, length: int) -> Var:
    """Undo `as_rows`, for `length` tokens."""
    shape = [length if a == kept.axis else int(kept.value.shape[a]) for a in kept.order]
    if static_shape(rows) != tuple(shape):
        rows = mb.reshape(x=rows, shape=shape, name=f"{kept.value.name}_seen")
    back = [kept.order.index(a) for a in range(len(shape))]
    return rows if back == sorted(back) else mb.transpose(x=rows, perm=back)


@dataclass
class Tables:
    """Slices the constants with a row for each token at the position, at run time."""

    mb: Maker
    """The builder of the slices; the caller moves it downstream."""
    position: Var
    """The input."""
    length: int
    """The number of tokens in a call."""
    context: int
    """The most tokens that the function reads."""
    most: int
    """The most tokens that the cache holds; rings are sized for it."""
    _cuts: dict[tuple[Any, ...], Var] = field(default_factory=dict)
    _begins: dict[tuple[int, int, Var], Var] = field(default_factory=dict)
    _starts: dict[tuple[str, Ring | None], Var] = field(default_factory=dict)
    _blends: dict[tuple[Ring | None, str], tuple[Var, Var]] = field(default_factory=dict)
    _lasts: dict[tuple[Ring | None, int, str], Var] = field(default_factory=dict)

    def cut(self, table: Var, axes: Axes, ring: Ring | None = None) -> Var | None:
        """Return the rows and columns of a table for this call; None if the table cannot be evaluated.

        Args:
            table: a constant, or computed from constants.
            axes: the labels of its axes.
            ring: the ring that holds the tokens; None: the cache holds all of them.
        """
        key = (table, tuple(sorted(axes.items())), ring)
        if key not in self._cuts:
            if (value := _evaluated(table)) is None:
                return None
            self._cuts[key] = self._cut(table.name, value, axes, ring)
        return self._cuts[key]

    def _cut(self, name: str, value: Array, axes: Axes, ring: Ring | None) -> Var:
        """Return the part of an array for this call; rows are tokens of the call, columns are tokens seen."""
        rows = next((a for a, label in axes.items() if label == NEW), None)
        columns = [a for a in axes if a != rows]
        for axis in axes:  # a table of rows alone keeps all of them: functions of all contexts share it
            value = value.take(range(self.context if columns and ring is None else self.most), axis=axis)
        if rows is not None and not columns and (value == value.take([0], axis=rows)).all():
            return self._constant(value.take(range(self.length), axis=rows), f"{name}_alike")
        if ring is not None and rows is None:
            value = value.take(range(ring.size), axis=columns[0])
        if rows is None:
            return self._constant(value, f"{name}_columns")
        shape = [self.length if a == rows else d for a, d in enumerate(value.shape)]
        if ring is not None and columns:
            shape[columns[0]] = ring.size
            stored = self._constant(ring.table(value, self.length), f"{name}_ring")
            return self._slice(name, stored, columns[0], self.turn(ring), shape)
        if sorted(axes) == [value.ndim - 2, value.ndim - 1] == [rows, rows + 1] and is_toeplitz(value):
            value = diagonals(value, self.length)
            return self._slice(name, self._constant(value, f"{name}_diagonals"), rows + 1, self.diagonal, shape)
        return self._slice(name, self._constant(value, f"{name}_rows"), rows, self.position, shape)

    @cached_property
    def diagonal(self) -> Var:
        """The index in `diagonals` at which the slice for this call starts."""
        return self._integers("sub", [self.context - 1], self.position, "diagonal")

    def slot(self, ring: Ring | None) -> Var:
        """Return the slot of the first token of this call."""
        if ring is None:
            return self.position
        if ("slot", ring) not in self._starts:
            self._starts["slot", ring] = self._integers("mod", self.position, [ring.size], "slot")
        return self._starts["slot", ring]

    def turn(self, ring: Ring) -> Var:
        """Return the column of slot 0 in `Ring.table`.

        All full rounds but one are left out of the position: in a ring of 4 slots, position 9 counts as 5.
        """
        if ("turn", ring) not in self._starts:
            rounds = self._integers("floor_div", self.position, [ring.size], "rounds")
            rounds = self._integers("maximum", self._integers("sub", rounds, [1], "rounds"), [0], "rounds")
            past = self._integers("mul", rounds, [ring.size], "rounds")
            turn = self._integers("sub", self.position, past, "turn")
            self._starts["turn", ring] = self._integers("sub", [ring.start(self.length)], turn, "turn")
        return self._starts["turn", ring]

    def ran_over(self, ring: Ring) -> Var:
        """Return which of the first slots this call wrote as extra rows, after the end of the ring."""
        if ("over", ring) not in self._starts:
            steps = (np.arange(ring.size + self.length) < self.length)[None, None, :, None]
            stored = self._constant(steps, "over")
            at = self._integers("sub", [ring.size], self.slot(ring), "over_from")
            self._starts["over", ring] = self._slice("over", stored, 2, at, [1, 1, self.length, 1])
        return self._starts["over", ring]

    def blend(self, ring: Ring | None, dtype: str) -> tuple[Var, Var]:
        """Return 1 for each slot that keeps its content, and the one-hot columns of the slots to write.

        Args:
            ring: the ring that holds the tokens; None: the cache holds all of them.
            dtype: of the cache: "fp16" or "fp32".
        """
        if (ring, dtype) not in self._blends:
            slots = self.context if ring is None else ring.size
            # Token j of this call goes to slot s if the first token goes to slot s - j.
            first_slot = np.arange(slots, dtype=np.int32)[:, None] - np.arange(self.length, dtype=np.int32)
            first_slot = (first_slot if ring is None else first_slot % slots)[None, None]
            here = self.mb.equal(x=first_slot, y=self.slot(ring), name="here")
            places = self.mb.cast(x=here, dtype=dtype, name="places")
            taken = places if self.length == 1 else self.mb.reduce_sum(x=places, axes=[-1], keep_dims=True)
            stays = self.mb.sub(x=np.ones((1, 1, 1, 1), np_dtype(places)), y=taken, name="stays")
            self._blends[ring, dtype] = stays, places
        return self._blends[ring, dtype]

    def last(self, ring: Ring | None, reach: int, dtype: str) -> Var:
        """Return one-hot rows of slots: of the last `reach` tokens before this call, and of its own tokens.

        Rows that would stand for tokens before the first one are zeros.

        Args:
            ring: the ring that holds the tokens; None: the cache holds all of them.
            reach: the number of tokens before the call.
            dtype: of the cache: "fp16" or "fp32".
        """
        key = (ring, reach, dtype)
        if key not in self._lasts:
            slots, rows = self.context if ring is None else ring.size, reach + self.length
            # Row r is token r - reach of this call, in slot s if the first token is in s - (r - reach).
            first_slot = np.arange(slots, dtype=np.int32) - np.arange(rows, dtype=np.int32)[:, None] + reach
            first_slot = (first_slot if ring is None else first_slot % slots)[None, None]
            here = self.mb.equal(x=self.slot(ring), y=first_slot, name="last")
            if ring is not None:
                since = reach - np.arange(rows, dtype=np.int32)[None, None, :, None]
                read = self.mb.greater_equal(x=self.position, y=since, name="read")
                here = self.mb.logical_and(x=here, y=read, name="last")
            self._lasts[key] = self.mb.cast(x=here, dtype=dtype, name="last_places")
        return self._lasts[key]

    def _integers(self, op_type: str, x: Var | list[int], y: Var | list[int], name: str) -> Var:
        """Build an op on int32; lists are constants."""
        operands = {k: np.array(v, np.int32) if isinstance(v, list) else v for k, v in (("x", x), ("y", y))}
        return getattr(self.mb, op_type)(**operands, name=name)

    def _slice(self, name: str, stored: Var, axis: int, start: Var, shape: Sequence[int]) -> Var:
        """Slice a constant from a run-time index of one axis."""
        key = (axis, stored.rank, start)
        if key not in self._begins:
            after = [0] * (stored.rank - axis - 1)
            self._begins[key] = index_vector(self.mb, [0] * axis, start, after, name=f"{start.name}_{axis}")
        begin = self._begins[key]
        return self.mb.slice_by_size(x=stored, begin=begin, size=list(shape), name=f"{name}_at_position")

    def _constant(self, value: Array, name: str) -> Var:
        return self.mb.const(val=np.asarray(value, order="C"), name=name)


def index_vector(mb: Maker, before: Sequence[int], at: Var, after: Sequence[int], name: str) -> Var:
    """Build a vector of indices with one run-time index `at` among constant ones."""
    first, last = ([np.array(indices, np.int32)] if indices else [] for indices in (before, after))
    return mb.concat(values=(*first, at, *last), axis=0, name=name) if before or after else at


def diagonals(value: Array, length: int) -> Array:
    """Return the diagonals of a Toeplitz matrix, one under another, each row shifted by one more column.

    Example: a causal mask of 3 tokens, with 1 where a token may look, has the diagonals 1 1 1 0 0, from column
    less row -2 to 2. Row 1 of the mask, 1 1 0, is the slice of three at 2 - 1. With length 2 the second row is
    0 1 1 1 0, so that the same slice also holds row 2 of the mask: 1 1 1.
    """
    row = np.concatenate([value[..., :0:-1, 0], value[..., 0, :]], axis=-1)
    return np.stack([np.roll(row, r, axis=-1) for r in range(length)], axis=-2)


def through(mb: Maker, path: Sequence[Operation], value: Var, tokens: Tokens, length: int) -> Var:
    """Build the ops of a path again on a value of another number of tokens."""
    for op in path:
        changed = lengthened(op, tokens.axes[op.outputs[0]], {NEW: length})
        value = again(mb, op, **changed, x=value, name=f"{op.name}_seen")
    return value


MULTIPLE = 32
"""A ring has a multiple of this as rows: 32 numbers of fp16 fill the 64 bytes of the engine's rows."""


@dataclass(frozen=True)
class Ring:
    """Slots for the keys or values of the last tokens."""

    size: int
    """The number of slots."""
    rows: int
    """The slots and the extra rows that a write near the end runs into."""

    def table(self, matrix: Array, length: int) -> Array:
        """Return a mask by distance with `length` rows, from which `size` columns are sliced at run time.

        `Tables.turn` gives the column of slot 0. Example: 4 slots and length 1 have the distances 7 down to -3.
        At position 9 slot 0 holds token 8. Its column is 7 - 5 = 2, whose distance is 5, and 5 modulo 4 is 1.
        """
        distance = np.arange(self.start(length), -self.size, -1)
        ahead = matrix[..., 0, np.maximum(-distance, 0)]
        row = np.where(distance < 0, ahead, matrix[..., distance % self.size, 0])
        return np.stack([np.roll(row, r, axis=-1) for r in range(length)], axis=-2)

    def start(self, length: int) -> int:
        """Return the largest distance in `table`."""
        return 2 * self.size + length - 2


def ring(window: int, call: int, context: int, *, runs_over: bool = True) -> Ring | None:
    """Return the ring for a sliding window; None if keeping the whole context takes less.

    Args:
        window: the most tokens that a query sees.
        call: the most tokens that one call writes.
        context: the most tokens that a cache without a ring holds.
        runs_over: is a write one slice, which may run past the end of the ring?
    """
    extra = call if call > 1 and runs_over else 0
    rows = -(-(window - 1 + call + extra) // MULTIPLE) * MULTIPLE
    return Ring(rows - extra, rows) if rows < context else None


def windows(tokens: Tokens, kept: Mapping[tuple[Operation, str], Var]) -> dict[Operation, int]:
    """Return the window of each op inside an attention: the most tokens that it reads.

    Attentions that share keys or values have one window. An attention has none if one of its tables (mask,
    bias) does not depend on the distance alone.

    Args:
        tokens: the token axes of the values of a function.
        kept: (op, operand) -> the value that is kept for it.
    """
    graph = networkx.Graph()  # of ops and values: attentions that share keys or values are connected
    for var, axes in tokens.axes.items():
        if {SEEN, WEIGHTS} & set(axes.values()):
            graph.add_edges_from((var, op) for op in (var.op, *consumers(var)))
    graph.add_edges_from((op, var) for (op, _), var in kept.items())
    by_distance = cache(_is_by_distance)
    window_of: dict[Operation, int] = {}
    for part in networkx.connected_components(graph):
        ops = [node for node in part if isinstance(node, Operation)]
        spans = [tokens.windows[op] for op in ops if op in tokens.windows]
        tables = [
            (var, tuple(sorted(axes.items())))
            for op in ops
            for var, axes in tokens.tables[op].items()
            if {SEEN, WEIGHTS} & set(axes.values())
        ]
        if spans and all(by_distance(*table) for table in tables):
            window_of |= dict.fromkeys(ops, max(spans))
    return window_of


def _is_by_distance(table: Var, labels: tuple[tuple[int, str], ...]) -> bool:
    """Does a table depend on the distance of two tokens only? `labels` are its axes of tokens, in order."""
    value, axes = _evaluated(table), dict(labels)
    if value is None:
        return False
    if NEW not in axes.values():
        return all(bool((value == value.take([0], axis)).all()) for axis in axes)
    last_two = [value.ndim - 2, value.ndim - 1]
    return list(axes) == last_two and axes[value.ndim - 2] == NEW and is_toeplitz(value)


def _evaluated(table: Var) -> Array | None:
    """Return the numbers of a constant, or of a value computed from constants; None for any other value."""
    value = constant(table)
    return evaluate_static(table) if value is None else np.asarray(value)


def is_toeplitz(value: Array) -> bool:
    """Is each diagonal of the last two axes constant, as in a mask that depends on distances?"""
    return np.array_equal(value[..., 1:, 1:], value[..., :-1, :-1], equal_nan=value.dtype.kind == "f")
