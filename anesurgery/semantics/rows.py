"""What is stated of every op type, and where the axes of one op go."""

from __future__ import annotations

from anesurgery.mil import Operation, Var
from anesurgery.semantics import elementwise_rows, moving_rows, product_rows, reduction_rows, window_rows
from anesurgery.semantics.meaning import Axes, Meaning

MEANINGS: dict[str, Meaning] = {
    **elementwise_rows.ROWS,
    **moving_rows.ROWS,
    **product_rows.ROWS,
    **reduction_rows.ROWS,
    **window_rows.ROWS,
}
"""Op type -> its row."""


def places_of(op: Operation) -> Axes | None:
    """Where the axes of an op's operands go; None where that is not known."""
    row = MEANINGS.get(op.op_type)
    return None if row is None or row.axes is None else row.axes(op)


def slices_read(axes: Axes, axis: int) -> dict[Var, int] | None:
    """What is read for one slice of the result along an axis: operand -> its axis with that slice.

    Returns:
        None where slices depend on one another, or a value is read in two ways.
    """
    ways = {(o.var, o.places.index(axis) if axis in o.places else None) for o in axes}
    read = {var: at for var, at in ways if at is not None}
    return read if read and sum(var in read for var, _ in ways) == len(read) else None
