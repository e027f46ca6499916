"""`torch.where` by the length of the text, as longrope chooses its frequencies: a conversion keeps one set.

A trace holds a fixed number of tokens, so that the choice is made when it is converted, and for every text that
the model will read. Where it falls on the numbers for longer texts, the conversion of a model of tokens stops
and says so. (A branch in Python, as the frequencies called `dynamic` take, leaves no trace of the choice.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from anesurgery.frontend.arguments import Convert, inputs_of, known_value
from anesurgery.mil import Function, Operation, Var, np_dtype, producer
from anesurgery.ops import MOVING, names

REACHED = {"greater": False, "greater_equal": True, "less": True, "less_equal": False}
"""Comparison of a length with a limit -> does a length that is the limit count as a longer one?"""

TURNED = {"greater": "less", "greater_equal": "less_equal", "less": "greater", "less_equal": "greater_equal"}
"""Comparison of a limit with a length -> the same with its sides exchanged."""

STEPS = MOVING | names("cast add sub")
"""Ops between the largest position and the comparison."""


class LengthError(NotImplementedError):
    """A choice by the length of the text, of which a conversion would keep one side."""


def limit_passed(cond: Var, number: Callable[[Var], float | None]) -> float | None:
    """The most tokens for which it would choose otherwise; None where it chooses as for short texts.

    Args:
        cond: of a `select`.
        number: gives the one number that a value holds, or None.
    """
    op = _behind(cond)
    if op is None or op.op_type not in REACHED:
        return None
    length, limit, kind = op.x, op.y, op.op_type
    if not _is_length(length):
        length, limit, kind = limit, length, TURNED[kind]
    if not _is_length(length):
        return None
    tokens, bound = number(length), number(limit)
    if tokens is None or bound is None:
        return None
    most = bound - 1 if REACHED[kind] else bound
    return most if tokens > most else None


def in_words(limit: float) -> str:
    """What is wrong, and what to do."""
    return (
        f"those for more than {limit:g} tokens, which shorter texts were not to get; use at most {limit:g} "
        "positions, or give both sets the same numbers (short_factor and long_factor of a longrope)"
    )


def _behind(var: Var) -> Operation | None:
    """The op that makes a value, moves, casts and negations apart."""
    op = var.op
    while op is not None and op.op_type in MOVING | {"cast", "logical_not"}:
        op = producer(op.inputs["x"])
    return op


def _is_length(var: Var) -> bool:
    """Is it made of the largest position?"""
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


def choosing(host: Convert) -> Convert:
    """`where(condition, a, b)`, unless it chooses constants by the length of the text."""

    def convert(context: Any, node: Any) -> None:
        arguments = inputs_of(context, node)
        if len(arguments) == 3 and _differ(*arguments[1:]) and _reads_tokens():
            limit = limit_passed(arguments[0], _number) if isinstance(arguments[0], Var) else None
            if limit is not None:
                raise LengthError(f"{node.name}: the length of the text chooses numbers: {in_words(limit)}")
        host(context, node)

    return convert


def _number(var: Var) -> float | None:
    """What is known of it while it is converted."""
    return float(var.val) if var.val is not None and np.size(var.val) == 1 else None


def _differ(a: Any, b: Any) -> bool:
    """Are both constants, and not the same?"""
    a, b = known_value(a), known_value(b)
    return a is not None and b is not None and not np.array_equal(a, b)


def _reads_tokens() -> bool:
    """Has the model that is being built an input of integers?"""
    from coremltools.converters.mil.mil.block import curr_block

    block = curr_block()
    while not isinstance(block, Function):
        block = block.outer_op.enclosing_block
    return any(np_dtype(v).kind in "iu" for v in block.inputs.values())
