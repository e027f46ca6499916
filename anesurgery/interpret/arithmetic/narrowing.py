"""Which casts lose digits: those to a narrower float, unless the value was widened from it."""

from __future__ import annotations

from anesurgery.mil import Operation, Var, np_dtype
from anesurgery.ops import CARRIERS


def narrows(op: Operation) -> bool:
    """Does the op cast floats to a dtype that does not hold them?"""
    if op.op_type != "cast" or np_dtype(op.inputs["x"]).kind != "f":
        return False
    return not _fits(op.inputs["x"], np_dtype(op.outputs[0]).itemsize)


def _fits(var: Var, size: int) -> bool:
    """Does a float of some bytes hold what a value holds, since it is no wider or was widened?"""
    if np_dtype(var).kind != "f" or np_dtype(var).itemsize <= size:
        return np_dtype(var).kind == "f"
    made_by = var.op
    if made_by is None or made_by.op_type not in CARRIERS:
        return False
    return _fits(made_by.inputs["x"], size)
