"""Lift element-wise ops and reductions."""

from __future__ import annotations

from functools import partial

import numpy as np

from anesurgery.coreai.lifts import (
    TABLE,
    LiftedOp,
    Unliftable,
    Value,
    as_var,
    cast,
    kind_of,
    lift,
    like,
    made_by,
    mil_type,
    numbers_of,
)
from anesurgery.coreai.names import BINARY, GELU, REDUCTIONS, UNARY, name_of
from anesurgery.frontend.elementary import acosh_of, asinh_of
from anesurgery.mil import Var, mb
from anesurgery.ops import names

LOGICAL = names("and or xor bitwise_and bitwise_or bitwise_xor")
ONE_TO_ONE = {k: k for k in UNARY} | BINARY | {"sub": "sub", "logical_not": "not"}
GELU_MODE = {approximation: mode for mode, approximation in GELU.items()}


def _same(op_type: str, o: LiftedOp) -> Value:
    """Build an op of one or two operands that means the same in MIL."""
    return getattr(mb, op_type)(x=o[0], **({"y": o[1]} if len(o.operands) > 1 else {}))


def _without_epsilon(op_type: str, o: LiftedOp) -> Value:
    return getattr(mb, op_type)(x=o[0], epsilon=like(o[0], 0.0))


def _reduced(op_type: str, o: LiftedOp) -> Value:
    return getattr(mb, op_type)(x=o[0], axes=o.axes(1), keep_dims=True) if o.ints(1) else o[0]


def _logical(op_type: str, o: LiftedOp) -> Value:
    if {kind_of(o[0]), kind_of(o[1])} != {"b"}:
        raise Unliftable("MIL has no bitwise operations of integers")
    return getattr(mb, op_type)(x=o[0], y=o[1])


TABLE |= {
    **{kind: partial(_same, op_type) for op_type, kind in ONE_TO_ONE.items()},
    **{kind: partial(_logical, f"logical_{kind.removeprefix('bitwise_')}") for kind in LOGICAL},
    **{kind: partial(_without_epsilon, kind) for kind in names("log rsqrt")},  # MIL's add an epsilon
    **{f"reduce_{kind}": partial(_reduced, op_type) for op_type, kind in REDUCTIONS.items()},
    "relu": lambda o: mb.relu(x=o[0]) if kind_of(o[0]) == "f" else mb.maximum(x=o[0], y=like(o[0], 0)),
    "gelu": lambda o: mb.gelu(x=o[0], mode=GELU_MODE[o.attribute("approximate")]),
    "modulo": partial(_same, "mod"),
    "asinh": lambda o: asinh_of(as_var(o[0])),
    "acosh": lambda o: acosh_of(as_var(o[0])),
    "softmax": lambda o: mb.softmax(x=o[0], axis=o.integer(1)),
    "argmax": lambda o: mb.reduce_argmax(x=o[0], axis=o.axes(1)[0], keep_dims=True),
}


@lift("equal", "not_equal")
def equal(o: LiftedOp) -> Value:
    """Build a comparison; of booleans by logic, as MIL compares numbers only."""
    kind = o.op["kind"].removeprefix("broadcasting_")
    if kind_of(o[0]) != "b":
        return _same(kind, o)
    apart = mb.logical_xor(x=o[0], y=o[1])
    return apart if kind == "not_equal" else mb.logical_not(x=apart)


@lift("add")
def add(o: LiftedOp) -> Value:
    """Build a sum; a row added to a convolution or linear layer without a bias becomes its bias."""
    for x, y in ((o[0], o[1]), (o[1], o[0])):
        op, row = made_by(x, "linear", "conv"), numbers_of(y)
        if op is None or row is None or (op.inputs.get("bias") is not None and np.any(op.bias.val)):
            continue
        axis = 1 - len(x.shape) if op.op_type == "conv" else -1
        if row.shape[axis:][:1] == (row.size,) == (x.shape[axis],):
            return getattr(mb, op.op_type)(**op.inputs | {"bias": row.reshape(-1)})
    return mb.add(x=o[0], y=o[1])


@lift("divide")
def divide(o: LiftedOp) -> Value:
    """Build a quotient; integers truncate toward 0, and a sum over windows divided by their size is a mean."""
    x, y = o[0], o[1]
    if kind_of(x) != "f":
        size = mb.floor_div(x=mb.abs(x=x), y=mb.abs(x=y))
        return mb.mul(x=mb.mul(x=mb.sign(x=x), y=size), y=mb.sign(x=y))
    mean = _mean_of_windows(x, y, 1.0)
    return mb.real_div(x=x, y=y) if mean is None else mean


@lift("mul")
def mul(o: LiftedOp) -> Value:
    """Build a product; a sum over windows times 1/size is their mean."""
    for x, y in ((o[0], o[1]), (o[1], o[0])):
        if (mean := _mean_of_windows(x, y, -1.0)) is not None:
            return mean
    return mb.mul(x=o[0], y=o[1])


def _mean_of_windows(total: Value, by: Value, power: float) -> Var | None:
    """Return the mean of windows, if `total` is that mean times their size, and `by` undoes it."""
    op = made_by(total, "mul")
    pool, number = None if op is None else made_by(op.x, "avg_pool"), numbers_of(by)
    if op is None or pool is None or number is None or number.size != 1:
        return None
    count = float(np.asarray(op.y.val))
    return op.x if np.isclose(float(number.reshape(-1)[0]) ** power, count, rtol=1e-3) else None


NARROW = names("int8 uint8 int16 uint16")
"""Integers of Core AI that MIL can cast to."""


@lift("cast")
def cast_(o: LiftedOp) -> Value:
    """Build a cast; all integers are int32 in MIL, and a cast to a narrow one wraps around here too."""
    name, given = (name_of(t["dtype"]) for t in (o.result, o.stored(0)))
    if name not in NARROW or given in (name, "bool") or not isinstance(o[0], Var):
        return cast(o[0], mil_type(o.result["dtype"]))
    return mb.cast(x=mb.cast(x=o[0], dtype=name), dtype="int32")


@lift("all", "any")
def quantified(o: LiftedOp) -> Value:
    """Build all or any: the least or largest of 0 and 1."""
    reduce = mb.reduce_min if o.op["kind"] == "all" else mb.reduce_max
    return cast(reduce(x=cast(o[0], "int32"), axes=o.axes(1), keep_dims=True), "bool")


@lift("scan")
def _scan(o: LiftedOp) -> Value:
    if o.attribute("scan_op") not in (0, "sum"):
        raise Unliftable("of running totals MIL has only sums")
    return mb.cumsum(x=o[0], axis=o.axes(1)[0], reverse=bool(o.integer(2)), exclusive=False)
