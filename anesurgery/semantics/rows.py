"""What is stated of every op type: where the axes of one op go, and how much it reads, writes and computes.

Dynamic lengths count as 1; an inspection of such a program says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from anesurgery.mil import Operation, Var, is_stored, operands
from anesurgery.semantics import elementwise_rows, moving_rows, reduction_rows, window_rows
from anesurgery.semantics.meaning import Axes, Meaning
from anesurgery.semantics.reading import elements, size_of
from anesurgery.semantics.unedited import kept

MEANINGS: dict[str, Meaning] = {
    **elementwise_rows.ROWS,
    **moving_rows.ROWS,
    **reduction_rows.PRODUCT_ROWS,
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


@dataclass(frozen=True)
class Work:
    """The work of one op.

    Attributes:
        read: bytes of the operands that are not stored.
        constant: bytes of the constant operands with more than one element.
        written: bytes of the results that somebody reads.
        flop: floating point operations, multiply and add counted as two; 0 for what only moves data.
    """

    read: int
    constant: int
    written: int
    flop: int

    @property
    def moved(self) -> int:
        """Bytes read and written while the model runs."""
        return self.read + self.written

    def times(self, count: int) -> Work:
        """Of so many runs of the op; its constants are there once."""
        if count == 1:
            return self
        return Work(self.read * count, self.constant, self.written * count, self.flop * count)


@kept
def runtime(op: Operation) -> list[Var]:
    """The operands that are not stored, each once."""
    return list(dict.fromkeys(v for _, v in operands(op) if not is_stored(v)))


def read_results(op: Operation) -> list[Var]:
    """The results that somebody reads; all of them where nobody does."""
    used = [v for v in op.outputs if v.child_ops or v.consuming_blocks]
    return used or list(op.outputs)


def work_of(op: Operation) -> Work:
    """What an op reads, writes and computes."""
    stored = [v for _, v in operands(op) if is_stored(v) and elements(v) > 1]
    row = MEANINGS.get(op.op_type)
    return Work(
        sum(map(size_of, runtime(op))),
        sum(map(size_of, stored)),
        sum(map(size_of, read_results(op))),
        0 if row is None or row.work is None else row.work(op),
    )
