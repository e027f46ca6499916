"""Masks of attention: how deep they cut, whether they are causal, and whether a row may be shut out whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from anesurgery.facts import intervals as bounds
from anesurgery.facts.attention import SHUT
from anesurgery.facts.masks import causal
from anesurgery.facts.reading import behind
from anesurgery.facts.work import is_stored
from anesurgery.mil import (
    Array,
    Function,
    Operation,
    Var,
    constant,
    np_dtype,
    operands,
    producer,
    static_shape,
    walk_ops,
)
from anesurgery.ops import CARRIERS, LOGICAL, ORDERINGS
from anesurgery.placement.target import Target

DEEPEST = -3.2e4
"""A mask below this is beyond what a sum of products can hold."""
MASKING = CARRIERS | LOGICAL | {"add", "mul", "sub", "select", "maximum", "logical_not"}
"""What may stand between a mask and its softmax."""


def to_softmax(var: Var) -> Iterator[Operation]:
    """The ops that read a value, or what mask arithmetic makes of it."""
    return behind(var, MASKING)


def fill(op: Operation) -> tuple[float, Var] | None:
    """The lowest number that a mask op puts into scores, with the operand that holds it."""
    if not bounds.is_half(op.outputs[0]) or op.op_type not in ("add", "sub", "select", "mul"):
        return None
    lowest: tuple[float, Var] | None = None
    for name, var in operands(op):
        if name == "cond" or not is_stored(var) or np_dtype(var).kind != "f":
            continue
        low, high = bounds.of_constant(var)
        low = -high if op.op_type == "sub" and name == "y" else low
        if high < math.inf and low < DEEPEST and (lowest is None or low < lowest[0]):
            lowest = (low, var)
    if lowest is None or (op.op_type == "mul" and not math.isfinite(bounds.magnitude(_other(op)))):
        return None
    return lowest if any(r.op_type == "softmax" for r in to_softmax(op.outputs[0])) else None


def _other(op: Operation) -> Var:
    return op.x if is_stored(op.y) else op.y


def causal_mask(op: Operation, target: Target) -> str:
    """A fill that is too deep, in a mask that is causal or made from positions."""
    found = fill(op)
    return "" if found is None or not _is_causal(op, found[1]) else _deep(found)


def other_mask(op: Operation, target: Target) -> str:
    """A fill that is too deep, in any other mask."""
    found = fill(op)
    return "" if found is None or _is_causal(op, found[1]) else _deep(found)


def _deep(found: tuple[float, Var]) -> str:
    return f"%{found[1].name} masks scores with {found[0]:.4g}"


def _is_causal(op: Operation, value: Var) -> bool:
    """Is the mask a causal one, or one that is compared or cut out of positions at run time?"""
    keep = _kept(op, value)
    if keep is not None:
        return keep.ndim > 1 and not causal(keep)
    maker = producer(op.inputs.get("cond"))
    return maker is not None and _from_positions(maker)


def _kept(op: Operation, value: Var) -> Array | None:
    """Which scores a mask keeps, where that is a constant."""
    if op.op_type == "select":
        cond = constant(op.cond)
        return None if cond is None else np.asarray(cond == (value is op.b))
    given = constant(value)
    if np.size(given) < 2:
        return None
    return np.asarray((-given if op.op_type == "sub" else given) > SHUT)


POSITIONS = frozenset({"range_1d", "band_part", "cumsum", "non_zero"})


def _from_positions(op: Operation, steps: int = 24) -> bool:
    """Is a condition compared from constants or ranges on both sides, or cut out by `band_part`?"""
    stack, seen = [op], 0
    while stack and seen < steps:
        seen += 1
        found = stack.pop()
        if found.op_type in POSITIONS:
            return True
        inputs = [v for name, v in operands(found) if name in ("x", "y", "a", "b", "cond")]
        if any(_is_triangle(constant(v)) for v in inputs):
            return True
        sided = found.op_type in ORDERINGS
        if sided and all(v.op is not None and _unmoved(v) for v in inputs):
            return True
        stack += [v.op for v in inputs if v.op is not None and v.op.op_type != "const"]
    return False


def _is_triangle(value: Any) -> bool:
    """Is a boolean constant a causal mask?"""
    keep = np.asarray(value) if value is not None else np.zeros(0)
    return keep.dtype == np.bool_ and keep.ndim > 1 and not causal(keep)


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


def empty_rows(op: Operation, target: Target) -> str:
    """A softmax whose row may be shut out as a whole by minus infinity."""
    found = fill(op)
    if found is None or found[0] != -math.inf:
        return ""
    keep = _kept(op, found[1])
    if keep is not None:
        rows = keep.reshape(-1, keep.shape[-1]) if keep.ndim else keep.reshape(1, 1)
        lost = int((~rows.any(-1)).sum())
        return f"{lost} rows of %{found[1].name} keep nothing" if lost else ""
    cond = op.inputs.get("cond")
    if not isinstance(cond, Var) or _is_causal(op, found[1]) or _unmoved(cond):
        return ""
    return f"%{cond.name} is known only at run time, and a row without a score to keep is all -inf"


JOINS = frozenset({"add", "sub", "select", "logical_and", "mul", "scaled_dot_product_attention"})
"""Ops that read a mask."""


def is_decoder(function: Function) -> bool:
    """Does a mask let each position see only those before it? Masks that are inputs are not known."""
    return any(_looks_back(op) for op in walk_ops(function))


def _looks_back(op: Operation) -> bool:
    if op.op_type == "band_part":
        return True
    if op.op_type in ORDERINGS:
        return _is_range(op.x) and _is_range(op.y)
    return op.op_type in JOINS and any(_is_triangular(v) for _, v in operands(op))


def _is_triangular(var: Var) -> bool:
    """Is it a constant that shuts out what lies ahead, or (for a select) what does not?"""
    shape = static_shape(var) or ()
    if len(shape) < 2 or min(shape[-2:]) < 2 or math.prod(shape) > bounds.MOST:
        return False
    given = constant(var)
    if given is None or isinstance(given, str):
        return False
    keep = np.asarray(given if np.asarray(given).dtype == np.bool_ else given > SHUT)
    return not causal(keep) or not causal(~keep)


def _is_range(var: Var | None, steps: int = 8) -> bool:
    """Are these positions: a range, or a constant one?"""
    for _ in range(steps):
        op = var.op if var is not None else None
        if op is None or op.op_type == "range_1d":
            return op is not None
        if op.op_type == "const":
            given = np.asarray(constant(var)).ravel()
            return given.size > 1 and given.dtype.kind in "if" and bool((np.diff(given) > 0).all())
        if op.op_type not in CARRIERS | {"tile", "add", "sub"}:
            return False
        sides = [op.inputs.get(name) for name in ("x", "y")]
        var = next((v for v in sides if isinstance(v, Var) and v.rank > 0), None)
    return False
