"""Split a product over a very long axis into products over parts of it, and add these.

Before::

    main(%x: 1x40000, %w: 40000x2) {
      %y: 1x2 = matmul(x=%x, y=%w)
      return %y
    }

After::

    main(%x: 1x40000, %w: 40000x2) {
      %x_part_0: 1x20000, %x_part_1: 1x20000 = split(x=%x, split_sizes=[20000, 20000], axis=-1)
      %w_part_0: 20000x2, %w_part_1: 20000x2 = split(x=%w, split_sizes=[20000, 20000], axis=-2)
      %y_split_inner_axis_matmul: 1x2 = matmul(x=%x_part_0, y=%w_part_0)
      %y_split_inner_axis_matmul_1: 1x2 = matmul(x=%x_part_1, y=%w_part_1)
      %y: 1x2 = add(x=%y_split_inner_axis_matmul, y=%y_split_inner_axis_matmul_1)
      return %y
    }

The parts have nearly equal lengths. Stored weights are cut when the pass runs, compressed ones in their form.
Rows that a reshape flattens (for example the channels of an image) are cut before the reshape, so that no long
row is made.

Refuses when the summed length is symbolic, and when a palette's vectors would be cut.

Why it helps: a product of more than 32768 terms does not fit into the memory for kernels (65536 bytes) and was
not placed on the ANE (measured through Core ML on M4, macOS 27); axes beyond 16384 keep an op off the engine of
M1 to M3 (reported). The same products are summed in another order: proved algebraically, and checked at each
site in fp32. What the pass gains in time was not measured.

Grade: proved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Pass, Refusal, Rewrite, Var, mb
from anesurgery.regions.weight_edits import pieces


class _Flattened(NamedTuple):
    """The value that a reshape flattens to rows, and the first of its axes within a row.

    Example: (2, 8, 5, 5) flattened to (2, 200) has the axis 1, so that a row is 8 units of 25 elements.
    """

    source: Var
    axis: int

    def unit(self, length: int) -> int:
        """Return how many elements of a row of some length an index of the axis has."""
        return length // int(self.source.shape[self.axis])


@dataclass(frozen=True)
class SplitInnerAxis(Rewrite):
    """`matmul` and `linear` of long rows become sums of several."""

    name = "split_inner_axis"
    kinds = frozenset({"matmul", "linear"})
    tolerance = an.Tolerance(1e-4)
    """The tolerance of sums of tens of thousands of terms in another order."""
    most: int = an.option(32768, least=1)
    """Most terms of a sum."""

    @classmethod
    def variants(cls, target: an.Target) -> tuple[Pass, ...]:
        """Return the pass for rows as long as the target takes."""
        return (cls(most=min(cls.most, int(target.least("axis")[0]))),)

    def check(self, m: Match) -> Match | Refusal:
        """Match a long axis that can be cut on both sides."""
        op, linear = m.root, m.root.op_type == "linear"
        other = op.weight if linear else op.y
        axis = -2 if not linear and an.flag(op, "transpose_x") and m.x.rank > 1 else -1
        against = -1 if linear or an.flag(op, "transpose_y") or other.rank == 1 else -2
        if an.is_symbolic(m.x.shape[axis]):
            return Refusal(f"%{m.x.name} has the symbolic length {m.x.shape[axis]} along the summed axis", op)
        if (length := int(m.x.shape[axis])) <= self.most:
            return an.NO_MATCH
        flat = _flattened(m.x, self.most) if axis == -1 else None
        unit = 1 if flat is None else flat.unit(length)
        units, parts = length // unit, math.ceil(length // unit / (self.most // unit))
        edges = [unit * (units * i // parts) for i in range(parts + 1)]
        return m.bind(other=other, axis=axis, against=against, edges=edges, flat=flat)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the products of the parts, and their sum."""
        op, linear = m.root, m.root.op_type == "linear"
        lefts = _rows(mb, m.x, m.flat, m.edges) if m.flat is not None else _parts(mb, m.x, m.axis, m.edges)
        rights = _parts(mb, m.other, m.against, m.edges)
        rest = an.op_inputs(op, "x", "y", "weight")
        total: Var | None = None
        for left, right in zip(lefts, rights, strict=True):
            both: dict[str, Any] = {"x": left, "weight" if linear else "y": right}
            product = getattr(mb, op.op_type)(**both, **rest)
            rest.pop("bias", None)  # the first product has it
            total = product if total is None else mb.add(x=total, y=product)
        assert total is not None
        return total


def _flattened(x: Var, most: int) -> _Flattened | None:
    """Return the value that a reshape flattens to the rows of `x`, if only one op reads these; else None."""
    reshape = an.producer(x, "reshape")
    old, new = (an.static_shape(reshape.x), an.static_shape(x)) if reshape is not None else (None, None)
    if reshape is None or old is None or new is None or len(an.consumers(x)) > 1 or an.is_output(x):
        return None
    axis = next((a for a in range(len(old)) if math.prod(old[a:]) == new[-1] and old[a] > 1), None)
    if axis is None or math.prod(old[:axis]) != math.prod(new[:-1]) or new[-1] // old[axis] > most:
        return None
    return _Flattened(reshape.x, axis)


def _rows(mb: Builder, x: Var, flat: _Flattened, edges: Sequence[int]) -> list[Var]:
    """Build parts of the rows from parts of the value that they are flattened from."""
    unit = flat.unit(int(x.shape[-1]))
    sizes = [(b - a) // unit for a, b in pairwise(edges)]
    parts = mb.split(x=flat.source, split_sizes=sizes, axis=flat.axis, name=f"{flat.source.name}_part")
    lead = [int(d) for d in x.shape[:-1]]
    return [
        mb.reshape(x=part, shape=[*lead, size * unit], name=f"{x.name}_part")
        for part, size in zip(parts, sizes, strict=True)
    ]


def _parts(mb: Builder, v: Var, axis: int, edges: Sequence[int]) -> list[Var]:
    """Return the parts of an axis; those of a constant are constants."""
    if not an.is_stored(v):
        sizes = [b - a for a, b in pairwise(edges)]
        return list(mb.split(x=v, split_sizes=sizes, axis=axis, name=f"{v.name}_part"))
    cut = pieces(v.shape, axis, edges)
    return [an.edit_weight(mb, v, edit, f"{v.name}_part") for edit in cut]


@an.example((1, 40000), (40000, 2))
def example(x: Var, w: Var) -> Var:
    """Sums of 40000 terms."""
    return mb.matmul(x=x, y=w, name="y")
