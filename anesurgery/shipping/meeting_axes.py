"""Which axes of an op's operands are of one length: those that are aligned, and those that are summed over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from anesurgery.mil import Operation, Var
from anesurgery.ops import POINTWISE, RECURRENT, names
from anesurgery.semantics.reading import flag, ints

Operand: TypeAlias = tuple[str, int]
"""A parameter, and the place in it of one of several values."""
Place: TypeAlias = tuple[Var, Operand, int]
"""An axis of an operand."""


def operand_of(op: Operation, operand: Operand) -> Var:
    """The value of an operand."""
    value = op.inputs[operand[0]]
    return value[operand[1]] if isinstance(value, (list, tuple)) else value


def placed(op: Operation) -> list[tuple[Operand, Var]]:
    """The operands, each with its place."""
    return [
        ((name, i), var)
        for name, value in op.inputs.items()
        for i, var in enumerate(value if isinstance(value, (list, tuple)) else (value,))
        if isinstance(var, Var)
    ]


def groups(op: Operation) -> list[tuple[list[Place], bool]]:
    """Axes of operands that are of one length, and whether it is summed over."""
    way = GROUPS.get(op.op_type)
    if way is not None:
        return way(op)
    return _aligned(op) if op.op_type in POINTWISE else []


def _aligned(
    op: Operation, only: Sequence[str] = ("x", "y", "a", "b", "cond")
) -> list[tuple[list[Place], bool]]:
    """Axes that are aligned at the end; those of length 1 are repeated."""
    rank = op.outputs[0].rank
    meeting = []
    for axis in range(rank):
        places = [
            (var, operand, axis - rank + var.rank)
            for operand, var in placed(op)
            if operand[0] in only and axis - rank + var.rank >= 0 and var.shape[axis - rank + var.rank] != 1
        ]
        meeting.append((places, False))
    return meeting


def _matmul(op: Operation) -> list[tuple[list[Place], bool]]:
    x, y = op.x, op.y
    inner = [
        (x, ("x", 0), x.rank - (2 if flag(op, "transpose_x") and x.rank > 1 else 1)),
        (y, ("y", 0), y.rank - (1 if flag(op, "transpose_y") or y.rank < 2 else 2)),
    ]
    rank = max(x.rank, y.rank)
    batch = [
        [
            (v, (n, 0), a - rank + v.rank)
            for n, v in (("x", x), ("y", y))
            if a - rank + v.rank >= 0 and v.shape[a - rank + v.rank] != 1
        ]
        for a in range(rank - 2)
    ]
    return [(inner, True), *((places, True) for places in batch)]


def _channels(op: Operation) -> list[tuple[list[Place], bool]]:
    """Channels are fixed by the weights; where groups make them fewer, by those."""
    weights = [(v, o, v.rank - 1) for o, v in placed(op) if o[0] in ("mean", "gamma", "beta", "bias")]
    own = [(op.weight, ("weight", 0), 1)] if op.inputs.get("weight") is not None else weights
    return [([(op.x, ("x", 0), 1), *own], True)]


def _normed(op: Operation) -> list[tuple[list[Place], bool]]:
    """The axes that are normalised meet their factors."""
    axes = [a % op.x.rank for a in ints(op, "axes")] or [*range(op.x.rank)]
    factors = [(v, o) for o, v in placed(op) if o[0] in ("gamma", "beta")]
    return [([(op.x, ("x", 0), a), *((v, o, i) for v, o in factors)], True) for i, a in enumerate(axes)]


def _einsum(op: Operation) -> list[tuple[list[Place], bool]]:
    read, result = str(op.equation.val).replace(" ", "").split("->")
    by_letter: dict[str, list[Place]] = {}
    for i, (letters, var) in enumerate(zip(read.split(","), op.values, strict=True)):
        for axis, letter in enumerate(letters):
            by_letter.setdefault(letter, []).append((var, ("values", i), axis))
    return [(places, letter not in result) for letter, places in by_letter.items()]


def _attention(op: Operation) -> list[tuple[list[Place], bool]]:
    q, k, v, mask = op.query, op.key, op.value, op.inputs.get("attn_mask")
    rank = op.outputs[0].rank
    query, keys = [(q, ("query", 0), q.rank - 2)], [(k, ("key", 0), k.rank - 2), (v, ("value", 0), v.rank - 2)]
    if mask is not None:
        query += [(mask, ("attn_mask", 0), mask.rank - 2)] if mask.rank > 1 and mask.shape[-2] != 1 else []
        keys += [(mask, ("attn_mask", 0), mask.rank - 1)] if mask.shape[-1] != 1 else []
    batch = [
        [
            (w, (n, 0), a - rank + w.rank)
            for n, w in (("query", q), ("key", k), ("value", v), ("attn_mask", mask))
            if w is not None and a - rank + w.rank >= 0 and w.shape[a - rank + w.rank] != 1
        ]
        for a in range(rank - 2)
    ]
    return [(query, False), (keys, False), *((places, False) for places in batch)]


def _joined(op: Operation) -> list[tuple[list[Place], bool]]:
    (axis,) = ints(op, "axis") or [0]
    values, stack = op.inputs["values"], op.op_type == "stack"
    along = None if stack else axis % values[0].rank
    return [
        ([(v, ("values", i), a) for i, v in enumerate(values)], False)
        for a in range(values[0].rank)
        if a != along
    ]


def _recurrent(op: Operation) -> list[tuple[list[Place], bool]]:
    states = [(v, o, 0) for o, v in placed(op) if o[0] in ("initial_h", "initial_c") and v.rank > 1]
    return [([(op.x, ("x", 0), 1), *states], False)]


def _along_axis(op: Operation) -> list[tuple[list[Place], bool]]:
    axis = (ints(op, "axis") or [0])[0] % op.x.rank
    pair = ((op.x, ("x", 0)), (op.indices, ("indices", 0)))
    return [([(v, o, a) for v, o in pair], False) for a in range(op.x.rank) if a != axis]


GROUPS: dict[str, Callable[[Operation], list[tuple[list[Place], bool]]]] = {
    "matmul": _matmul,
    "linear": lambda op: [([(op.x, ("x", 0), op.x.rank - 1), (op.weight, ("weight", 0), 1)], True)],
    **dict.fromkeys(names("conv conv_transpose batch_norm instance_norm"), _channels),
    "prelu": lambda op: [([(op.x, ("x", 0), 1), (op.alpha, ("alpha", 0), 0)], True)],
    "layer_norm": _normed,
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(names("concat stack"), _joined),
    **dict.fromkeys(RECURRENT, _recurrent),
    "gather_along_axis": _along_axis,
}
"""Ops whose operands meet in another way than single elements do."""
