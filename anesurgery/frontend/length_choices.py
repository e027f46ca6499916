"""Refuse a `torch.where` that chooses constants by the length of the text: a conversion would keep one side.

longrope chooses its frequencies so. A converted model has a fixed number of tokens, so the choice is made at
conversion for every text that the model will read. Where it falls on the numbers for longer texts, the
conversion stops with a `LengthError`. (A branch in Python, as in the frequencies called `dynamic`, leaves no
trace and is not found.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from anesurgery.frontend.arguments import Convert, inputs_of, known_value, wrapper
from anesurgery.mil import Function, Operation, Var, np_dtype, producer
from anesurgery.ops import MOVING, names

REACHED = {"greater": False, "greater_equal": True, "less": True, "less_equal": False}
"""Comparison of a length with a limit -> whether a length equal to the limit counts as longer."""

TURNED = {"greater": "less", "greater_equal": "less_equal", "less": "greater", "less_equal": "greater_equal"}
"""Comparison -> the same comparison with its sides exchanged."""

STEPS = MOVING | names("cast add sub")
"""Ops between the largest position and the comparison."""


class LengthError(NotImplementedError):
    """Raised for a choice by the length of the text, of which a conversion would keep one side."""


def limit_passed(cond: Var, number: Callable[[Var], float | None]) -> float | None:
    """Return the most tokens for which a condition would be otherwise; None where it is as for short texts.

    Args:
        cond: the condition of a `select`.
        number: returns the number that a scalar holds, or None.
    """
    op = _op_behind_moves(cond)
    if op is None or op.op_type not in REACHED:
        return None
    length, limit, kind = op.x, op.y, op.op_type
    if not _depends_on_length(length):
        length, limit, kind = limit, length, TURNED[kind]
    if not _depends_on_length(length):
        return None
    tokens, bound = number(length), number(limit)
    if tokens is None or bound is None:
        return None
    most = bound - 1 if REACHED[kind] else bound
    return most if tokens > most else None


def advice_for_limit(limit: float) -> str:
    """Return what is wrong with a choice for longer texts, and what to do."""
    return (
        f"the model has those for more than {limit:g} tokens, so shorter texts get wrong results; use at "
        f"most {limit:g} positions to get those for shorter texts, or give both sets the same values "
        "(short_factor and long_factor of a longrope)"
    )


def _op_behind_moves(var: Var) -> Operation | None:
    """Return the op that computes a value, upstream of moves, casts and negations."""
    op = var.op
    while op is not None and op.op_type in MOVING | {"cast", "logical_not"}:
        op = producer(op.inputs["x"])
    return op


def _depends_on_length(var: Var) -> bool:
    """Return whether a value is computed from the largest position."""
    pending, seen = [var], 0
    while pending and seen < 32:
        op, seen = pending.pop().op, seen + 1
        if op is None:
            continue
        if op.op_type == "reduce_max":
            return True
        if op.op_type in STEPS:
            pending += [v for name in ("x", "y") if isinstance(v := op.inputs.get(name), Var)]
    return False


@wrapper
def refusing_length_choices(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `where(condition, a, b)`: refuse a choice by the length of the text."""
    arguments = inputs_of(context, node)
    if len(arguments) == 3 and _are_different_constants(*arguments[1:]) and _has_integer_input():
        limit = limit_passed(arguments[0], _number) if isinstance(arguments[0], Var) else None
        if limit is not None:
            words = "the constants depend on the length of the text"
            raise LengthError(f"{node.name}: {words}: {advice_for_limit(limit)}")
    host(context, node)


def _number(var: Var) -> float | None:
    """Return the number that a scalar is known to hold at conversion; else None."""
    return float(var.val) if var.val is not None and np.size(var.val) == 1 else None


def _are_different_constants(a: Any, b: Any) -> bool:
    """Return whether both are constants, and differ."""
    a, b = known_value(a), known_value(b)
    return a is not None and b is not None and not np.array_equal(a, b)


def _has_integer_input() -> bool:
    """Return whether the model that is being built has an integer input, such as token ids."""
    from coremltools.converters.mil.mil.block import curr_block

    block = curr_block()
    while not isinstance(block, Function):
        block = block.outer_op.enclosing_block
    return any(np_dtype(v).kind in "iu" for v in block.inputs.values())
