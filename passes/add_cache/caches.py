"""What a cache of keys and values needs to know: what to keep, and how masks and tables follow a position.

The maker's ops read `position`, an int32 input of one element: the number of tokens that came before.

A ring of `size` slots keeps the token at position p in slot p modulo its size. A query at p sees in a slot the
token that is (p - slot) modulo size back, so its mask depends on that distance, once the ring has been around.
The size leaves room for one call, so that a call overwrites no token that one of its own sees, and what lies
ahead of a token seems to be farther back than the window reaches. Rows after the ring take what a write at its
end runs over, which is then moved to the first slots.
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
    """What is kept of keys or values: the smallest value that they are a rearrangement of."""

    value: Var
    axis: int
    """The axis of the tokens."""
    way: tuple[Operation, ...]
    """The ops from it to the product that reads keys or values."""

    @property
    def others(self) -> list[int]:
        """The axes that hold no tokens."""
        return [a for a in range(self.value.rank) if a != self.axis]

    @property
    def width(self) -> int:
        """The numbers of each vector that is kept."""
        return int(self.value.shape[self.others[-1]])

    @property
    def heads(self) -> int:
        """How many vectors are kept for each token."""
        return math.prod(int(self.value.shape[a]) for a in self.others[:-1])

    @property
    def is_plain(self) -> bool:
        """Is it `1 x heads x tokens x width` as it stands?"""
        return self.value.rank == 4 and self.value.shape[0] == 1 and self.axis == 2

    @property
    def order(self) -> list[int]:
        """The axes of the value, the last but one holding the tokens."""
        return [*self.others[:-1], self.axis, self.others[-1]]


def kept_for(operand: Var, tokens: Tokens) -> Kept:
    """What to keep of an operand that is looked at: before heads are repeated, say, but after rotation."""
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
    """The value that is kept as `1 x heads x tokens x width`."""
    rows = kept.value
    if kept.order != sorted(kept.order):
        rows = mb.transpose(x=rows, perm=kept.order)
    wanted = (1, kept.heads, length, kept.width)
    if static_shape(rows) != wanted:
        rows = mb.reshape(x=rows, shape=list(wanted), name=f"{kept.value.name}_rows")
    return rows


def from_rows(mb: Maker, kept: Kept, rows: Var, length: int) -> Var:
    """The value as it was, for `length` tokens, from `1 x heads x tokens x width`."""
    shape = [length if a == kept.axis else int(kept.value.shape[a]) for a in kept.order]
    if static_shape(rows) != tuple(shape):
        rows = mb.reshape(x=rows, shape=shape, name=f"{kept.value.name}_seen")
    back = [kept.order.index(a) for a in range(len(shape))]
    return rows if back == sorted(back) else mb.transpose(x=rows, perm=back)


@dataclass
class Tables:
    """The constants of a function that have a row for each token, cut at the position as it runs."""

    mb: Maker
    """The builder of the ops that cut; it may become another one further downstream."""
    position: Var
    length: int
    """Tokens in a call."""
    context: int
    """The most tokens that are looked at."""
    most: int
    """The most tokens that are kept; rings are made for those."""
    _cuts: dict[tuple[Any, ...], Var] = field(default_factory=dict)
    _begins: dict[tuple[int, int, Var], Var] = field(default_factory=dict)
    _starts: dict[tuple[str, Ring | None], Var] = field(default_factory=dict)
    _blends: dict[tuple[Ring | None, str], tuple[Var, Var]] = field(default_factory=dict)
    _lasts: dict[tuple[Ring | None, int, str], Var] = field(default_factory=dict)

    def cut(self, table: Var, axes: Axes, ring: Ring | None = None) -> Var | None:
        """The rows and columns of a table for this call; None where it cannot be evaluated.

        Args:
            table: a constant, or made of constants.
            axes: the labels of its axes.
            ring: what holds the tokens that are looked at; all of them are kept by default.
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
        """The place in `diagonals` of the first row."""
        return self._whole("sub", [self.context - 1], self.position, "diagonal")

    def slot(self, ring: Ring | None) -> Var:
        """Where the first token is kept."""
        if ring is None:
            return self.position
        if ("slot", ring) not in self._starts:
            self._starts["slot", ring] = self._whole("mod", self.position, [ring.size], "slot")
        return self._starts["slot", ring]

    def turn(self, ring: Ring) -> Var:
        """The place in the table of a ring of its first slot: that of the position, less all rounds but one."""
        if ("turn", ring) not in self._starts:
            rounds = self._whole("floor_div", self.position, [ring.size], "rounds")
            rounds = self._whole("maximum", self._whole("sub", rounds, [1], "rounds"), [0], "rounds")
            past = self._whole("mul", rounds, [ring.size], "rounds")
            turn = self._whole("sub", self.position, past, "turn")
            self._starts["turn", ring] = self._whole("sub", [ring.start(self.length)], turn, "turn")
        return self._starts["turn", ring]

    def ran_over(self, ring: Ring) -> Var:
        """Which of the first slots a write at the end of a ring was meant for."""
        if ("over", ring) not in self._starts:
            steps = (np.arange(ring.size + self.length) < self.length)[None, None, :, None]
            stored = self._constant(steps, "over")
            at = self._whole("sub", [ring.size], self.slot(ring), "over_from")
            self._starts["over", ring] = self._slice("over", stored, 2, at, [1, 1, self.length, 1])
        return self._starts["over", ring]

    def blend(self, ring: Ring | None, dtype: str) -> tuple[Var, Var]:
        """Which slots keep what they hold, and for each token of a call a column of zeros with 1 at its slot.

        Args:
            ring: what holds the tokens; all of them are kept by default.
            dtype: of what is kept: "fp16" or "fp32".
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
        """Return one-hot rows: for each of the last tokens before a call, and its own, 1 at the token's slot.

        Rows of tokens before the first one are all zeros.

        Args:
            ring: what holds the tokens; all of them are kept by default.
            reach: how many before the call.
            dtype: of what is kept: "fp16" or "fp32".
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

    def _whole(self, op_type: str, x: Var | list[int], y: Var | list[int], name: str) -> Var:
        """An op of whole numbers."""
        operands = {k: np.array(v, np.int32) if isinstance(v, list) else v for k, v in (("x", x), ("y", y))}
        return getattr(self.mb, op_type)(**operands, name=name)

    def _slice(self, name: str, stored: Var, axis: int, start: Var, shape: Sequence[int]) -> Var:
        """A part of a constant that begins at a dynamic place of one axis."""
        key = (axis, stored.rank, start)
        if key not in self._begins:
            after = [0] * (stored.rank - axis - 1)
            self._begins[key] = place(self.mb, [0] * axis, start, after, name=f"{start.name}_{axis}")
        begin = self._begins[key]
        return self.mb.slice_by_size(x=stored, begin=begin, size=list(shape), name=f"{name}_at_position")

    def _constant(self, value: Array, name: str) -> Var:
        return self.mb.const(val=np.asarray(value, order="C"), name=name)


def place(mb: Maker, before: Sequence[int], at: Var, after: Sequence[int], name: str) -> Var:
    """A vector of indices, one of them dynamic; `at` itself where there is no other."""
    first, last = ([np.array(indices, np.int32)] if indices else [] for indices in (before, after))
    return mb.concat(values=(*first, at, *last), axis=0, name=name) if before or after else at


def diagonals(value: Array, length: int) -> Array:
    """Rows from which a slice at `last - position` takes the rows of a Toeplitz matrix from a position on."""
    row = np.concatenate([value[..., :0:-1, 0], value[..., 0, :]], axis=-1)  # by column - row, ascending
    return np.stack([np.roll(row, r, axis=-1) for r in range(length)], axis=-2)


def through(mb: Maker, way: Sequence[Operation], value: Var, tokens: Tokens, length: int) -> Var:
    """The ops of a way again, for keys or values of another number of tokens."""
    for op in way:
        changed = lengthened(op, tokens.axes[op.outputs[0]], {NEW: length})
        value = again(mb, op, **changed, x=value, name=f"{op.name}_seen")
    return value


MULTIPLE = 32
"""What the rows of a ring are a multiple of: rows of 32 numbers of fp16 are the 64 bytes in which the engine
stores them."""


@dataclass(frozen=True)
class Ring:
    """Slots for the keys or values of the last tokens."""

    size: int
    rows: int
    """The slots, and what a write at the end runs over."""

    def table(self, matrix: Array, length: int) -> Array:
        """A matrix by distance, for every place of a call: `length` rows, from which `size` columns are cut.

        Column `start - turn` is that of slot 0, `turn` being the position, less all rounds but one.
        """
        distance = np.arange(self.start(length), -self.size, -1)
        ahead = matrix[..., 0, np.maximum(-distance, 0)]
        row = np.where(distance < 0, ahead, matrix[..., distance % self.size, 0])
        return np.stack([np.roll(row, r, axis=-1) for r in range(length)], axis=-2)

    def start(self, length: int) -> int:
        """The farthest distance in `table`."""
        return 2 * self.size + length - 2


def ring(window: int, call: int, context: int, *, runs_over: bool = True) -> Ring | None:
    """The ring for a window, written by calls of so many tokens; None where all of the context takes less.

    Args:
        window: the most tokens that are looked at.
        call: the most tokens that are written at once.
        context: the most tokens that are kept elsewhere.
        runs_over: is a write at the end of the ring one slice, which runs over it?
    """
    over = call if call > 1 and runs_over else 0
    rows = -(-(window - 1 + call + over) // MULTIPLE) * MULTIPLE
    return Ring(rows - over, rows) if rows < context else None


def windows(tokens: Tokens, kept: Mapping[tuple[Operation, str], Var]) -> dict[Operation, int]:
    """The ops between keys, masks, weights and values of attentions -> the most tokens that they look at.

    Attentions that share keys or values have one window. Those with a table that is not by distance have none.

    Args:
        tokens: where the values of a function hold the tokens.
        kept: what is kept of each operand that is looked at.
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
