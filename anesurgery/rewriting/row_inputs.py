"""A constant with a row for each position becomes an input, and its rows are left beside the package."""

from __future__ import annotations

import numpy as np

from anesurgery.files.interface import InterfaceChange
from anesurgery.mil import Array, Var
from anesurgery.rewriting.builder import Builder


def table_as_input(mb: Builder, wish: str, table: Array, axis: int) -> Var:
    """Declare a table as an input; edits that give an equal one share it.

    Args:
        mb: of the edit.
        wish: for the name of the input.
        table: the constant.
        axis: of its positions.
    """
    name = mb.leave_beside(wish, np.moveaxis(table, axis, 0).reshape(table.shape[axis], -1))
    held = table.astype(mb.input_dtype(table.dtype))
    words = f"give {name}: the rows of <package>.{name}.npy at the positions of the tokens ({held.dtype})"
    change = InterfaceChange(words, (name,), inputs=lambda values: {**values, name: held})
    return mb.add_float_input(held.shape, table.dtype, change)
