"""How often the body of a `while_loop` runs, where single numbers that depend on no input decide."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from anesurgery.mil import Operation, Var, constant, np_dtype, static_shape, types

MOST = 4096
"""Rounds that are counted."""
TWO: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "less": operator.lt,
    "less_equal": operator.le,
    "greater": operator.gt,
    "greater_equal": operator.ge,
    "equal": operator.eq,
    "not_equal": operator.ne,
    "logical_and": lambda a, b: bool(a and b),
    "logical_or": lambda a, b: bool(a or b),
}
ONE: dict[str, Callable[[Any], Any]] = {
    "abs": abs,
    "logical_not": operator.not_,
    **dict.fromkeys(("identity", "squeeze", "expand_dims", "reshape"), lambda a: a),
}
"""Ops of single numbers."""


def rounds(op: Operation) -> int | None:
    """The number of rounds; None where an input decides, or after `MOST`."""
    condition, body = op.blocks
    values = [_number(v, {}) for v in op.loop_vars]
    for count in range(MOST + 1):
        more = _number(condition.outputs[0], dict(zip(condition.inputs, values, strict=True)))
        if more is None or not more:
            return None if more is None else count
        known = dict(zip(body.inputs, values, strict=True))
        values = [_number(v, known) for v in body.outputs]
    return None


def _number(var: Var, known: dict[Var, Any]) -> Any:
    """A single number, computed of those that are known; None where that is not possible."""
    if var in known:
        return known[var]
    shape = None if types.is_list(var.sym_type) else static_shape(var)
    if shape is None or math.prod(shape) != 1:
        return None
    value, op = constant(var), var.op
    if value is not None:
        known[var] = np.ravel(value)[0].item()
    elif op is None or not (op.op_type == "cast" or op.op_type in ONE or op.op_type in TWO):
        known[var] = None
    else:
        given = [_number(v, known) for v in ((op.x, op.y) if op.op_type in TWO else (op.x,))]
        known[var] = None if None in given else _computed(op, given)
    return known[var]


def _computed(op: Operation, given: list[Any]) -> Any:
    if op.op_type == "cast":
        return np.asarray(given[0]).astype(np_dtype(op.outputs[0])).item()
    return TWO[op.op_type](*given) if op.op_type in TWO else ONE[op.op_type](*given)
