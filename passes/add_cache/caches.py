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
from functools import cached_property
from typing import Any

import networkx
import numpy as np

from anesurgery.facts.masks import evaluate_static
from anesurgery.facts.token_axes import NEW, SEEN, WEIGHTS, Axes, Tokens, lengthened
from anesurgery.mil import Array, Maker, Operation, Var, constant, consumers, np_dtype, static_shape
from anesurgery.ops import CARRIERS
from anesurgery.regions.small_builds import again


@dataclass(frozen=True)
class Kept:
    """A value to keep in the cache: the smallest one from which keys or values are only rearranged.

    Attributes:
        value: the value, with the tokens of this call.
        axis: the axis of the tokens.
        way: the ops from the value to the product that reads keys or values.
    """

    value: Var
    axis: int
    way: tuple[Operation, ...]

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
    way: list[Operation] = []
    best = Kept(operand, tokens.new_axis(operand), ())
    var = operand
    while (op := var.op) is not None and op.op_type in CARRIERS | {"tile"} and op.x in tokens.axes:
        way.insert(0, op)
        var = op.x
        kept = Kept(var, tokens.new_axis(var), tuple(way))
        if (_size(var), not kept.is_plain) < (_size(best.value), not best.is_plain):
            best = kept
    return best


def _size(var: Var) -> int:
    return math.prod(static_shape(var) or ())


def as_rows(mb: Maker, kept: Kept, length: int) -> Var:
    """Arrange a kept value as `1 x heads x tokens x width`."""
    rows = kept.value
    if kept.order != sorted(kept.order):
        rows = mb.transpose(x=rows, perm=kept.order)
    wanted = (1, kept.heads, length, kept.width)
    if static_shape(rows) != wanted:
        rows = mb.reshape(x=rows, shape=list(wanted), name=f"{kept.value.name}_rows")
    return rows


def from_rows(mb: Maker, kept: Kept, rows: Var, length: int) -> Var:
    """Arrange `1 x heads x tokens x width` as the kept value was, now of `length` tokens."""
    shape = [length if a == kept.axis else int(kept.value.shape[a]) for a in kept.order]
    if static_shape(rows) != tuple(shape):
        rows = mb.reshape(x=rows, shape=shape, name=f"{kept.value.name}_seen")
    back = [kept.order.index(a) for a in range(len(shape))]
    return rows if back == sorted(back) else mb.transpose(x=rows, perm=back)


@dataclass
class Tables:
    """Slices the constants with a row for each token at the position, at run time.

    Attributes:
        mb: the builder of the slices; the caller moves it downstream.
        position: the input.
        length: the number of tokens in a call.
        context: the most tokens that the function reads.
        most: the most tokens that the cache holds; rings are sized for it.
    """

    mb: Maker
    position: Var
    length: int
    context: int
    most: int
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
            value = constant(table)
            value = evaluate_static(table) if value is None else np.asarray(value)
            if value is None:
                return None
            self._cuts[key] = self._cut(table.name, value, axes, ring)
        return self._cuts[key]

    def _cut(self, name: str, value: Array, axes: Axes, ring: Ring | None) -> Var:
        rows = next((a for a, label in axes.items() if label == NEW), None)
        columns = [a for a in axes if a != rows]
        for axis in axes:  # rows alone are those of all contexts, and stored once
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

        The position counts from the start of the last full round; all earlier rounds are subtracted.
        """
        if ("turn", ring) not in self._starts:
            rounds = self._integers("floor_div", self.position, [ring.size], "rounds")
            rounds = self._integers("maximum", self._integers("sub", rounds, [1], "rounds"), [0], "rounds")
            past = self._integers("mul", rounds, [ring.size], "rounds")
            turn = self._integers("sub", self.position, past, "turn")
            self._starts["turn", ring] = self._integers("sub", [ring.start(self.length)], turn, "turn")
        return self._starts["turn", ring]

    def ran_over(self, ring: Ring) -> Var:
        """Return a mask of the first slots that the extra rows have to be copied to."""
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
            each = np.arange(slots, dtype=np.int32)[:, None] - np.arange(self.length, dtype=np.int32)
            each = (each if ring is None else each % slots)[None, None]
            here = self.mb.equal(x=each, y=self.slot(ring), name="here")
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
            each = np.arange(slots, dtype=np.int32) - np.arange(rows, dtype=np.int32)[:, None] + reach
            each = (each if ring is None else each % slots)[None, None]
            here = self.mb.equal(x=self.slot(ring), y=each, name="last")
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
    """Return shifted copies of the diagonals of a Toeplitz matrix.

    A slice at `last - position` holds the `length` rows of the matrix from `position` on.
    """
    row = np.concatenate([value[..., :0:-1, 0], value[..., 0, :]], axis=-1)  # by column - row, ascending
    return np.stack([np.roll(row, r, axis=-1) for r in range(length)], axis=-2)


def through(mb: Maker, way: Sequence[Operation], value: Var, tokens: Tokens, length: int) -> Var:
    """Repeat the ops of a way on a value of another number of tokens."""
    for op in way:
        changed = lengthened(op, tokens.axes[op.outputs[0]], {NEW: length})
        value = again(mb, op, **changed, x=value, name=f"{op.name}_seen")
    return value


MULTIPLE = 32
"""A ring has a multiple of this as rows: 32 numbers of fp16 fill the 64 bytes of the engine's rows."""


@dataclass(frozen=True)
class Ring:
    """Slots for the keys or values of the last tokens.

    Attributes:
        size: the number of slots.
        rows: the slots and the extra rows that a write near the end runs into.
    """

    size: int
    rows: int

    def table(self, matrix: Array, length: int) -> Array:
        """Return a mask by distance with `length` rows, from which `size` columns are sliced at run time.

        Column `start - turn` belongs to slot 0, where `turn` is the position less all full rounds but one.
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
    over = call if call > 1 and runs_over else 0
    rows = -(-(window - 1 + call + over) // MULTIPLE) * MULTIPLE
    return Ring(rows - over, rows) if rows < context else None


def windows(tokens: Tokens, kept: Mapping[tuple[Operation, str], Var]) -> dict[Operation, int]:
    """Return the window of each op inside an attention: the most tokens that it reads.

    Attentions that share keys or values have one window. An attention has none if one of its tables (mask,
    bias) does not depend on the distance alone.

    Args:
        tokens: the token axes of the values of a function.
        kept: (op, operand) -> the value that is kept for it.
    """
    graph = networkx.Graph()
    for var, axes in tokens.axes.items():
        if {SEEN, WEIGHTS} & set(axes.values()):
            graph.add_edges_from((var, op) for op in (var.op, *consumers(var)))
    graph.add_edges_from((op, var) for (op, _), var in kept.items())
    known: dict[tuple[Var, tuple[tuple[int, str], ...]], bool] = {}
    found: dict[Operation, int] = {}
    for part in networkx.connected_components(graph):
        ops = [node for node in part if isinstance(node, Operation)]
        spans = [tokens.windows[op] for op in ops if op in tokens.windows]
        if spans and all(_by_distance(op, tokens, known) for op in ops):
            found |= dict.fromkeys(ops, max(spans))
    return found


def _by_distance(
    op: Operation, tokens: Tokens, known: dict[tuple[Var, tuple[tuple[int, str], ...]], bool]
) -> bool:
    """Do the tables that an op reads depend on the distance of two tokens only?"""
    for var, axes in tokens.tables[op].items():
        if {SEEN, WEIGHTS} & set(axes.values()):
            key = (var, tuple(sorted(axes.items())))
            if key not in known:
                known[key] = _is_by_distance(var, axes)
            if not known[key]:
                return False
    return True


def _is_by_distance(var: Var, axes: Axes) -> bool:
    value = constant(var)
    value = evaluate_static(var) if value is None else np.asarray(value)
    if value is None:
        return False
    if NEW not in axes.values():
        return all(bool((value == value.take([0], axis)).all()) for axis in axes)
    return (
        sorted(axes) == [value.ndim - 2, value.ndim - 1] and axes[value.ndim - 2] == NEW and is_toeplitz(value)
    )


def is_toeplitz(value: Array) -> bool:
    """Is each diagonal of the last two axes constant, as in a mask that depends on distances?"""
    one, other = value[..., 1:, 1:], value[..., :-1, :-1]
    same = one == other
    return bool((same | ((one != one) & (other != other))).all())
