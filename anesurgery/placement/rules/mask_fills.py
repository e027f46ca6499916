"""Masks of attention: how low their fills are, whether they are causal, whether all of a row may be masked."""

from __future__ import annotations

import math

import numpy as np

from anesurgery.facts.attention import MASKED, softmaxes_after
from anesurgery.facts.masks import against_causal_attention
from anesurgery.mil import Array, Operation, Var, constant, consumers, is_stored, np_dtype, operands
from anesurgery.placement.target import Target
from anesurgery.semantics import intervals as bounds
from anesurgery.semantics.constant_ends import LARGEST, of_constant

DEEPEST = -3.2e4
"""A mask below this is beyond what a sum of products can hold."""

FILLING = frozenset({"add", "sub", "select", "mul", "minimum"})
"""Ops that bring a fill into a mask, or into the scores."""


def fill(op: Operation) -> tuple[float, Var] | None:
    """The lowest number that a mask op of fp16 puts into scores, with the operand that holds it."""
    return _fill(op) if bounds.is_half(op.outputs[0]) else None


def _fill(op: Operation) -> tuple[float, Var] | None:
    if op.op_type not in FILLING:
        return None
    lowest: tuple[float, Var] | None = None
    for name, var in operands(op):
        if name == "cond" or not is_stored(var) or np_dtype(var).kind != "f":
            continue
        low, high = of_constant(var)
        low = -high if op.op_type == "sub" and name == "y" else low
        if high < math.inf and low < DEEPEST and (lowest is None or low < lowest[0]):
            lowest = (low, var)
    if lowest is None or (op.op_type == "mul" and not math.isfinite(bounds.magnitude(_other(op)))):
        return None
    return lowest if any(softmaxes_after(op.outputs[0])) else None


def _other(op: Operation) -> Var:
    return op.x if is_stored(op.y) else op.y


def causal_mask(op: Operation, target: Target) -> str:
    """A fill that is too deep, in a mask that is causal or made from positions."""
    filled = fill(op)
    return "" if filled is None or not _is_causal(op) else _deep(filled)


def other_mask(op: Operation, target: Target) -> str:
    """A fill that is too deep, in any other mask."""
    filled = fill(op)
    return "" if filled is None or _is_causal(op) else _deep(filled)


def infinite_product(op: Operation, target: Target) -> str:
    """A dynamic mask that is multiplied with an infinity before it is added to scores."""
    if not bounds.is_half(op.outputs[0]):
        return ""
    for var, other in ((op.x, op.y), (op.y, op.x)):
        least = constant(var) if var.rank == 0 and not is_stored(other) else None
        if least is not None and math.isinf(least):
            return f"%{var.name} is {least:g}" if any(softmaxes_after(op.outputs[0])) else ""
    return ""


def _deep(filled: tuple[float, Var]) -> str:
    return f"%{filled[1].name} masks scores with {filled[0]:.4g}"


def _is_causal(op: Operation) -> bool:
    """Are the attentions that a mask op serves causal, as the pass asks?"""
    served = list(softmaxes_after(op.outputs[0]))
    return bool(served) and all(against_causal_attention(softmax) is None for softmax in served)


def _kept(op: Operation, value: Var) -> Array | None:
    """Which scores a mask keeps, where that is a constant."""
    if op.op_type == "select":
        cond = constant(op.cond)
        return None if cond is None else np.asarray(cond == (value is op.b))
    numbers = constant(value)
    if np.size(numbers) < 2:
        return None
    return np.asarray((-numbers if op.op_type == "sub" else numbers) > MASKED)


def _unmoved(var: Var, steps: int = 24) -> bool:
    """Does a value depend on no input?"""
    stack = [var]
    for _ in range(steps):
        if not stack:
            return True
        op = stack.pop().op
        if op is None:
            return False
        stack += [] if op.op_type == "const" else [v for _, v in operands(op)]
    return False


def _narrows(op: Operation) -> bool:
    """Is it a cast to fp16?"""
    return op.op_type == "cast" and bounds.is_half(op.outputs[0])


def empty_rows(op: Operation, target: Target) -> str:
    """A softmax whose whole row may be masked with minus infinity, or what a cast to fp16 makes one."""
    half = bounds.is_half(op.outputs[0])
    filled = _fill(op) if half or any(map(_narrows, consumers(op.outputs[0]))) else None
    if filled is None or filled[0] >= -LARGEST:
        return ""
    keep = _kept(op, filled[1])
    if keep is not None:
        rows = keep.reshape(-1, keep.shape[-1]) if keep.ndim else keep.reshape(1, 1)
        lost = int((~rows.any(-1)).sum())
        return f"{lost} rows of %{filled[1].name} keep nothing" if lost else ""
    cond = op.inputs.get("cond")
    if not isinstance(cond, Var) or _is_causal(op) or _unmoved(cond):
        return ""
    return f"%{cond.name} is dynamic, and a row without a score to keep is all -inf"
