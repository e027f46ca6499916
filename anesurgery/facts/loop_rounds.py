"""How often the body of a `while_loop` runs, where a counter with constant ends says it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from anesurgery.mil import Operation, Var, constant

STEPS = {"add": 1, "sub": -1}
BOUNDS = {"less": (1, 0), "less_equal": (1, 1), "greater": (-1, 0), "greater_equal": (-1, 1)}
"""Comparison -> the direction of the counter, and whether the bound itself is one more round."""
SWAPPED = {"less": "greater", "greater": "less", "less_equal": "greater_equal", "greater_equal": "less_equal"}


def rounds(op: Operation) -> int | None:
    """The number of rounds; None where anything but a counter decides."""
    condition, body = op.blocks
    test = condition.outputs[0].op
    if test is None or test.op_type not in BOUNDS:
        return None
    kind, counter, bound = test.op_type, test.x, _number(test.y)
    if bound is None:
        kind, counter, bound = SWAPPED[kind], test.y, _number(test.x)
    if bound is None or counter not in condition.inputs:
        return None
    place = list(condition.inputs).index(counter)
    start, step = _number(op.loop_vars[place]), _step(body.inputs[place], body.outputs[place])
    direction, closed = BOUNDS[kind]
    if start is None or step is None or step * direction <= 0:
        return None
    distance = (bound - start) * direction
    made = math.floor(distance / abs(step)) + 1 if closed else math.ceil(distance / abs(step))
    return max(made, 0)


def _step(before: Var, after: Var) -> float | None:
    """What a round adds to the counter."""
    made = after.op
    if made is None or made.op_type not in STEPS:
        return None
    if made.x is before and (step := _number(made.y)) is not None:
        return step * STEPS[made.op_type]
    return _number(made.x) if made.op_type == "add" and made.y is before else None


def _number(var: Var) -> float | None:
    """The value of a constant of one element."""
    value: Any = constant(var)
    return None if value is None or np.size(value) != 1 else float(np.ravel(value)[0])
