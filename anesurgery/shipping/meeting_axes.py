"""Say which axes of an op's operands must have the same length.

`length_edits` calls `equal_axes` on each op while it follows a model at several lengths. Axes must be equal
where an op aligns them (`add` of (1, 64, 8) and (64, 8): axis 1 and axis 0) or sums over them (`matmul`: the
last axis of x and the second-to-last of y). An axis of length 1 that broadcasts is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from anesurgery.mil import Operation, Var
from anesurgery.ops import POINTWISE, RECURRENT, names
from anesurgery.semantics.reading import flag, ints

Operand: TypeAlias = tuple[str, int]
"""(name of a parameter, index): ("values", 1) is the second value of a `concat`; the index is 0 for a single
one."""
OperandAxis: TypeAlias = tuple[Var, Operand, int]
"""One axis of an operand: (value, operand, axis)."""
AxisGroups: TypeAlias = list[tuple[list[OperandAxis], bool]]
"""Groups of axes of equal length, each with True where the op sums over that axis."""


def operand_of(op: Operation, operand: Operand) -> Var:
    """Return the value that an op reads at an operand."""
    value = op.inputs[operand[0]]
    return value[operand[1]] if isinstance(value, (list, tuple)) else value


def indexed_operands(op: Operation) -> list[tuple[Operand, Var]]:
    """Return the op's operands in order, with the value of each."""
    return [
        ((name, i), var)
        for name, value in op.inputs.items()
        for i, var in enumerate(value if isinstance(value, (list, tuple)) else (value,))
        if isinstance(var, Var)
    ]


def equal_axes(op: Operation) -> AxisGroups:
    """Return the axes of the op's operands that must have equal lengths, in groups."""
    rule = GROUPS.get(op.op_type)
    if rule is not None:
        return rule(op)
    return _broadcast_axes(op) if op.op_type in POINTWISE else []


def _broadcast_axes(op: Operation, parameters: Sequence[str] = ("x", "y", "a", "b", "cond")) -> AxisGroups:
    """Align axes from the last one, as broadcasting does; axes of length 1 are left out."""
    rank = op.outputs[0].rank
    groups = []
    for axis in range(rank):
        places = [
            (var, operand, axis - rank + var.rank)
            for operand, var in indexed_operands(op)
            if operand[0] in parameters
            and axis - rank + var.rank >= 0
            and var.shape[axis - rank + var.rank] != 1
        ]
        groups.append((places, False))
    return groups


def _matmul_axes(op: Operation) -> AxisGroups:
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


def _channel_axes(op: Operation) -> AxisGroups:
    """The channels of x equal those of the weight, or else those of the per-channel parameters."""
    if op.inputs.get("weight") is not None:
        partners = [(op.weight, ("weight", 0), 1)]
    else:
        per_channel = ("mean", "gamma", "beta", "bias")
        partners = [(v, o, v.rank - 1) for o, v in indexed_operands(op) if o[0] in per_channel]
    return [([(op.x, ("x", 0), 1), *partners], True)]


def _normalized_axes(op: Operation) -> AxisGroups:
    """Each normalised axis equals the matching axis of gamma and beta."""
    axes = [a % op.x.rank for a in ints(op, "axes")] or [*range(op.x.rank)]
    factors = [(v, o) for o, v in indexed_operands(op) if o[0] in ("gamma", "beta")]
    return [([(op.x, ("x", 0), a), *((v, o, i) for v, o in factors)], True) for i, a in enumerate(axes)]


def _einsum_axes(op: Operation) -> AxisGroups:
    read, result = str(op.equation.val).replace(" ", "").split("->")
    by_letter: dict[str, list[OperandAxis]] = {}
    for i, (letters, var) in enumerate(zip(read.split(","), op.values, strict=True)):
        for axis, letter in enumerate(letters):
            by_letter.setdefault(letter, []).append((var, ("values", i), axis))
    return [(places, letter not in result) for letter, places in by_letter.items()]


def _attention_axes(op: Operation) -> AxisGroups:
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


def _concat_axes(op: Operation) -> AxisGroups:
    (axis,) = ints(op, "axis") or [0]
    values, stack = op.inputs["values"], op.op_type == "stack"
    along = None if stack else axis % values[0].rank
    return [
        ([(v, ("values", i), a) for i, v in enumerate(values)], False)
        for a in range(values[0].rank)
        if a != along
    ]


def _recurrent_axes(op: Operation) -> AxisGroups:
    states = [(v, o, 0) for o, v in indexed_operands(op) if o[0] in ("initial_h", "initial_c") and v.rank > 1]
    return [([(op.x, ("x", 0), 1), *states], False)]


def _gather_along_axes(op: Operation) -> AxisGroups:
    axis = (ints(op, "axis") or [0])[0] % op.x.rank
    pair = ((op.x, ("x", 0)), (op.indices, ("indices", 0)))
    return [([(v, o, a) for v, o in pair], False) for a in range(op.x.rank) if a != axis]


GROUPS: dict[str, Callable[[Operation], AxisGroups]] = {
    "matmul": _matmul_axes,
    "linear": lambda op: [([(op.x, ("x", 0), op.x.rank - 1), (op.weight, ("weight", 0), 1)], True)],
    **dict.fromkeys(names("conv conv_transpose batch_norm instance_norm"), _channel_axes),
    "prelu": lambda op: [([(op.x, ("x", 0), 1), (op.alpha, ("alpha", 0), 0)], True)],
    "layer_norm": _normalized_axes,
    "einsum": _einsum_axes,
    "scaled_dot_product_attention": _attention_axes,
    **dict.fromkeys(names("concat stack"), _concat_axes),
    **dict.fromkeys(RECURRENT, _recurrent_axes),
    "gather_along_axis": _gather_along_axes,
}
"""Op type -> its rule, for ops that are not element-wise."""
