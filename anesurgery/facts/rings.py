"""Which attentions look back a few tokens only, so that a ring holds their keys and values.

A ring of `size` slots keeps the token at position p in slot p modulo its size. A query at p sees in a slot the
token that is (p - slot) modulo size back, so its mask depends on that distance, once the ring has been around.

The size leaves room for one call, so that a call overwrites no token that one of its own sees, and what lies
ahead of a token seems to be farther back than the window reaches. Rows after the ring take what a write at its
end runs over, which is then moved to the first slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import networkx
import numpy as np

from anesurgery.facts.masks import evaluate_static
from anesurgery.facts.token_axes import NEW, SEEN, WEIGHTS, Axes, Tokens
from anesurgery.mil import Array, Operation, Var, constant, consumers

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
