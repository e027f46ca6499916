"""Hazards of attention masks in fp16: the number ("fill") by which a mask pushes scores out of a softmax.

In `scores + select(keep, 0, -inf)` the fill is -inf. A fill below -32000 may become minus infinity in a sum
of products, and a row whose scores are all minus infinity has no softmax. The rules `num-mask*` of
`numeric.py` call the functions here with (op, target); each returns what it found in words, or "".
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from anesurgery import fp16
from anesurgery.errors import Refusal
from anesurgery.facts.attention import MASKED, mask_chain, softmaxes_after
from anesurgery.facts.masks import against_causal_attention
from anesurgery.mil import Array, Operation, Var, constant, consumers, is_stored, np_dtype, operands
from anesurgery.placement.target import Target
from anesurgery.semantics import intervals as bounds
from anesurgery.semantics.bounds import constant_range

LEAST_SAFE_FILL = -3.2e4
"""The lowest fill that a sum of products can hold; the accumulator ends at -32768."""

FILLING_OPS = frozenset({"add", "sub", "select", "mul", "minimum"})
"""Ops that write a fill into a mask, or into the scores."""


class Fill(NamedTuple):
    """The lowest number of an operand that fills a mask."""

    number: float
    operand: Var


def mask_fill(op: Operation) -> Fill | None:
    """Return the lowest fill of an fp16 op if it is below `LEAST_SAFE_FILL`; else None."""
    return _fill_of_any_dtype(op) if bounds.is_half(op.outputs[0]) else None


def _fill_of_any_dtype(op: Operation) -> Fill | None:
    """Return the lowest fill of an op if it is below `LEAST_SAFE_FILL`, and a softmax reads the mask."""
    if op.op_type not in FILLING_OPS:
        return None
    lowest: Fill | None = None
    for name, var in operands(op):
        if name == "cond" or not is_stored(var) or np_dtype(var).kind != "f":
            continue
        low, high = constant_range(var)
        low = -high if op.op_type == "sub" and name == "y" else low
        if high < math.inf and low < LEAST_SAFE_FILL and (lowest is None or low < lowest.number):
            lowest = Fill(low, var)
    if lowest is None or (op.op_type == "mul" and not math.isfinite(bounds.magnitude(_dynamic_factor(op)))):
        return None
    return lowest if any(softmaxes_after(op.outputs[0])) else None


def _dynamic_factor(product: Operation) -> Var:
    return product.x if is_stored(product.y) else product.y


def causal_mask(op: Operation, target: Target) -> str:
    """Report a fill that is too low, in a mask that is causal or computed from positions."""
    fill = mask_fill(op)
    return "" if fill is None or not _is_causal(op) else _fill_in_words(fill)


def other_mask(op: Operation, target: Target) -> str:
    """Report a fill that is too low, in any other mask."""
    fill = mask_fill(op)
    return "" if fill is None or _is_causal(op) else _fill_in_words(fill)


def infinite_product(op: Operation, target: Target) -> str:
    """Report a dynamic mask that is multiplied by an infinity before it is added to scores."""
    if not bounds.is_half(op.outputs[0]):
        return ""
    for factor, mask in ((op.x, op.y), (op.y, op.x)):
        fill = constant(factor) if factor.rank == 0 and not is_stored(mask) else None
        if fill is not None and math.isinf(fill):
            words = f"%{factor.name} is {fill:g}, and 0 * {fill:g} is NaN"
            return words if any(softmaxes_after(op.outputs[0])) else ""
    return ""


def repair_of_fill(op: Operation, target: Target) -> str | None:
    """Return the pass that makes a fill finite; None where it tells scores from masks in no attention."""
    chains = map(mask_chain, softmaxes_after(op.outputs[0]))
    return "padding_mask_tensor" if any(not isinstance(chain, Refusal) for chain in chains) else None


def _fill_in_words(fill: Fill) -> str:
    result = ": may give NaN" if fill.number < -fp16.LARGEST else ""
    return f"%{fill.operand.name} masks scores with {fill.number:.4g}{result}"


def _is_causal(op: Operation) -> bool:
    """Is each attention that reads the mask causal, as the pass `causal_mask_tensor` requires?"""
    served = list(softmaxes_after(op.outputs[0]))
    return bool(served) and all(against_causal_attention(softmax) is None for softmax in served)


def _kept_scores(op: Operation, value: Var) -> Array | None:
    """Return a boolean array, true where the mask keeps a score; None where that is dynamic or one number."""
    if op.op_type == "select":
        cond = constant(op.cond)
        return None if cond is None else np.asarray(cond == (value is op.b))
    numbers = constant(value)
    if np.size(numbers) < 2:
        return None
    return np.asarray((-numbers if op.op_type == "sub" else numbers) > MASKED)


def _depends_on_no_input(var: Var, steps: int = 24) -> bool:
    """Does a value depend on no input? False also where more than `steps` values had to be followed."""
    stack = [var]
    for _ in range(steps):
        if not stack:
            return True
        op = stack.pop().op
        if op is None:
            return False
        stack += [] if op.op_type == "const" else [v for _, v in operands(op)]
    return False


def _is_cast_to_half(op: Operation) -> bool:
    """Does an op cast to fp16?"""
    return op.op_type == "cast" and bounds.is_half(op.outputs[0])


def empty_rows(op: Operation, target: Target) -> str:
    """Report a mask that may fill a whole row with minus infinity, in fp16 or after a cast to fp16."""
    becomes_half = bounds.is_half(op.outputs[0]) or any(map(_is_cast_to_half, consumers(op.outputs[0])))
    fill = _fill_of_any_dtype(op) if becomes_half else None
    if fill is None or fill.number >= -fp16.LARGEST:
        return ""
    keep = _kept_scores(op, fill.operand)
    if keep is not None:
        rows = keep.reshape(-1, keep.shape[-1]) if keep.ndim else keep.reshape(1, 1)
        empty = int((~rows.any(-1)).sum())
        return f"{empty} rows of %{fill.operand.name} keep nothing" if empty else ""
    cond = op.inputs.get("cond")
    if not isinstance(cond, Var) or _is_causal(op) or _depends_on_no_input(cond):
        return ""
    why = "" if math.isinf(fill.number) else f": {fill.number:g} is -inf in fp16"
    return f"a row that keeps no score gives NaN{why}"
