"""Cut two rows out of a large edit: where both sides differ on these, they differ as a whole.

Most large edits treat every head, row or channel alike. A proof still looks at all of them; what is no proof is
found on two.
"""

from __future__ import annotations

from collections.abc import Sequence

from anesurgery.checking.both import Site
from anesurgery.mil import Operation, Var, is_stored, producer, reads, static_shape
from anesurgery.ops import POINTWISE, names
from anesurgery.semantics.rows import places_of, slices_read

ROWS = 2
"""Rows of an excerpt: one would be taken for an axis that broadcasts."""
SHAPED = names("reshape slice_by_index slice_by_size slice_update")
"""Ops that hold the number of rows in a parameter."""

Axes = dict[Var, int]
"""Value -> the axis of its rows."""


def row_axes(site: Site) -> Axes | None:
    """The axis of the rows in each value that has them, for the longest axis that both sides go along."""
    values = [v for pair in site.replaced for v in pair]
    shapes = {static_shape(v) for v in values}
    shape = shapes.pop() if len(shapes) == 1 else None
    if shape is None:
        return None
    for axis in sorted(range(len(shape)), key=lambda a: -shape[a]):
        axes = dict.fromkeys(values, axis)
        if shape[axis] > ROWS and _spread([*site.old_ops, *site.new_ops], axes):
            return axes
    return None


def _spread(ops: Sequence[Operation], axes: Axes) -> bool:
    """Follow the rows from results to what they are made of; does every op treat each row by itself?"""
    computed = [op for op in ops if op.op_type != "const"]
    for op in reversed(computed):
        rows = _rows(op, axes)
        if rows is None or any(axes.setdefault(v, at) != at for v, at in rows.items()):
            return False
    return all(axes.get(v) == _rows(op, axes).get(v) for op in computed for v in reads(op))  # type: ignore[union-attr]


def _rows(op: Operation, axes: Axes) -> Axes | None:
    """What an op reads row by row, which is nothing where its result has no rows; None: it mixes them."""
    wanted = [axes[v] for v in op.outputs if v in axes]
    if not wanted:
        return {}
    places = places_of(op) if len(op.outputs) == 1 and op.op_type not in SHAPED else None
    rows = None if places is None else slices_read(places, wanted[0])
    whole = rows is not None and (op.op_type in POINTWISE or not any(map(is_stored, rows)))
    return rows if whole else None


def constants_among(axes: Axes) -> Axes:
    """The constants that have rows."""
    return {v: at for v, at in axes.items() if producer(v, "const") is not None}
