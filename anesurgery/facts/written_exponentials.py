"""Match functions that are written out with an exponential, such as softplus as `log(1 + exp(x))`.

The exponential overflows in fp16 from 11.09 on, though the result is small; passes replace the ops by the
function. The forms: `log(1 + exp(x))`, `1 / (1 + exp(-x))` and `exp(x) / (1 + exp(x))`, in any order and with
any op of division, `(exp(x) - 1) / (exp(x) + 1)`, `sinh(x) / cosh(x)`, `log(cosh(x))`, `exp(x) / sum(exp(x))`,
`log(sum(exp(x)))` and `log(exp(x) + exp(y))`. In `log(softmax(x))` and `log(sigmoid(x))` it is the operand of
the logarithm that underflows, below -16.6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from anesurgery.mil import Operation, Var, np_dtype, operands, producer
from anesurgery.semantics.intervals import interval
from anesurgery.semantics.reading import flag, guard_of, ints, number

LOG_GUARD = 1e-7
"""The largest epsilon of a logarithm of 1 + exp(x) that changes nothing in fp32, as the sum is at least 1."""
NO_GUARD = 1e-37
"""The largest epsilon of a logarithm that guards nothing: a softmax that small is 0 in fp32, too."""
MOST_GUARD = 0.1
"""The largest number that counts as the guard of a logarithm, and not as a part of its operand."""
INVERSE_GUARD = 1.1e-4
"""The largest epsilon of an inverse of 1 + exp(x) that is ignored; converters add 1e-4 when they divide."""


@dataclass(frozen=True)
class WrittenExponential:
    """One function that is written out in several ops."""

    op_type: str
    """ "softplus", "sigmoid", "tanh", "tanh_of_half", "softmax", "reduce_log_sum_exp", "log_add_exp",
    "log_cosh", "log_softmax" or "log_sigmoid"."""
    exponential: Operation
    """The `exp`, `cosh` or `sinh`; for a logarithm of a probability, the softmax or sigmoid."""
    ops: tuple[Operation, ...]
    """All ops, the last one first."""
    opposite: bool = False
    """Is it the function of the negated exponent?"""
    factor: Var | None = None
    """The value that the result is multiplied with."""
    second: Var | None = None
    """For `log(exp(x) + exp(y))`, the second exponent."""
    total: Operation | None = None
    """The sum of the exponentials, where there is one."""
    guard: float = 0.0
    """The number that is added to the operand of a logarithm, or that it is at least."""
    clips: bool = False
    """Is the guard a lower limit, and not added?"""


LOGS_OF_SHARES = frozenset({"log_softmax", "log_sigmoid"})
"""Functions whose operand may underflow; none of their exponentials overflows."""

ENDS = frozenset({"log", "inverse", "real_div", "pow", "mul"})
"""Ops that such a form ends with."""


def written_exponential(op: Operation) -> WrittenExponential | None:
    """Return the written-out function that an op ends; None for other ops and for integers."""
    if op.op_type not in ENDS or np_dtype(op.outputs[0]).kind != "f":
        return None
    if op.op_type == "mul":
        return _exp_times_reciprocal(op, op.x, op.y) or _exp_times_reciprocal(op, op.y, op.x)
    if op.op_type == "log":
        return _softplus(op) or _log_of_two(op) or _log_of_cosh(op) or _log_of_sum(op) or _log_of_share(op)
    return _tanh(op) or _divided_by_one_plus_exp(op) or _softmax(op)


def _epsilon_within(op: Operation, limit: float) -> bool:
    return 0 <= (number(op.inputs.get("epsilon")) or 0) <= limit


def negation_operand(var: Var) -> Var | None:
    """Return the value that this one is the negation of; None if it is not written as a negation."""
    maker = producer(var, "mul", "real_div", "sub")
    if maker is None:
        return None
    if maker.op_type == "sub":
        source = maker.y if number(maker.x) == 0 else None
    elif number(maker.y) == -1:
        source = maker.x
    else:
        source = maker.y if maker.op_type == "mul" and number(maker.x) == -1 else None
    return source if source is not None and source.shape == var.shape else None


def _one_plus_exp(var: Var) -> tuple[Operation, Operation] | None:
    """Return the addition and the exponential of 1 + exp(x); None for other values."""
    add = producer(var, "add")
    if add is None:
        return None
    for one, other in ((add.x, add.y), (add.y, add.x)):
        exponential = producer(other, "exp")
        if number(one) == 1 and exponential is not None and var.shape == other.shape:
            return add, exponential
    return None


def _softplus(op: Operation) -> WrittenExponential | None:
    bare = producer(op.x, "exp")
    if bare is not None and number(op.inputs.get("epsilon")) == 1:  # as converters write log1p
        return WrittenExponential("softplus", bare, (op, bare))
    inner = _one_plus_exp(op.x)
    if inner is None or not _epsilon_within(op, LOG_GUARD):
        return None
    return WrittenExponential("softplus", inner[1], (op, *inner))


def _log_of_cosh(op: Operation) -> WrittenExponential | None:
    maker = producer(op.x, "cosh")
    if maker is None or not _epsilon_within(op, LOG_GUARD):
        return None
    return WrittenExponential("log_cosh", maker, (op, maker))


def _log_of_two(op: Operation) -> WrittenExponential | None:
    """Match the logarithm of the sum of two exponentials of one shape."""
    add = producer(op.x, "add")
    if add is None or not _epsilon_within(op, NO_GUARD) or add.x.shape != add.y.shape:
        return None
    first, second = producer(add.x, "exp"), producer(add.y, "exp")
    if first is None or second is None:
        return None
    return WrittenExponential("log_add_exp", first, (op, add, first, second), second=second.x)


def _sum_of_exponentials(var: Var) -> tuple[Operation, Operation] | None:
    """Return the sum and the exponential of `sum(exp(x))` where x may be above 0; None for other values."""
    total = producer(var, "reduce_sum")
    exponential = producer(total.x, "exp") if total is not None else None
    if total is None or exponential is None or not ints(total, "axes") or interval(exponential.x)[1] <= 0:
        return None
    return total, exponential


def _log_of_sum(op: Operation) -> WrittenExponential | None:
    inner = _sum_of_exponentials(op.x)  # it may be small, so a rewrite keeps the epsilon
    if inner is None or not _epsilon_within(op, LOG_GUARD):
        return None
    return WrittenExponential("reduce_log_sum_exp", inner[1], (op, *inner), total=inner[0])


def _log_of_share(op: Operation) -> WrittenExponential | None:
    """Match the logarithm of a softmax, of a sigmoid, or of 1 less a sigmoid, with or without a guard."""
    guard = _log_guard(op.x, number(op.inputs.get("epsilon")) or 0.0)
    if guard is None:
        return None
    share, before, opposite = guard.value, guard.ops, False
    if (less := producer(share, "sub")) is not None and number(less.x) == 1 and less.y.shape == share.shape:
        share, opposite, before = less.y, True, (*before, less)
    maker = producer(share, "sigmoid") if opposite else producer(share, "softmax", "sigmoid")
    if maker is None or (maker.op_type == "softmax" and number(maker.axis) is None):
        return None
    ops = (op, *before, maker)
    return WrittenExponential(
        f"log_{maker.op_type}", maker, ops, opposite, guard=guard.number, clips=guard.clips
    )


class _LogGuard(NamedTuple):
    """The operand of a logarithm without its guard, and the guard."""

    value: Var
    number: float
    """What is added to the value, or its least result."""
    clips: bool = False
    """Is the guard a lower limit, and not added?"""
    ops: tuple[Operation, ...] = ()
    """The op of the guard; none for an epsilon."""


def _log_guard(var: Var, epsilon: float) -> _LogGuard | None:
    """Return the guard of a logarithm's operand, 0 where there is none; None for one that is too large."""
    if epsilon > NO_GUARD:
        return _LogGuard(var, epsilon) if epsilon < MOST_GUARD else None
    op = producer(var, "add", "maximum", "clip")
    if op is None:
        return _LogGuard(var, 0.0)
    value, least, most = guard_of(op) or (var, 0.0, 0.0)
    return _LogGuard(value, least, op.op_type != "add", (op,)) if 0 < least < MOST_GUARD and most >= 1 else None


def _tanh(op: Operation) -> WrittenExponential | None:
    """Match (exp(x) - exp(-x)) / (exp(x) + exp(-x)), sinh(x) / cosh(x), or (exp(x) - 1) / (exp(x) + 1)."""
    if op.op_type != "real_div":
        return None
    sine, cosine = producer(op.x, "sinh"), producer(op.y, "cosh")
    if sine is not None and cosine is not None:
        return WrittenExponential("tanh", cosine, (op, sine, cosine)) if sine.x is cosine.x else None
    top, bottom = producer(op.x, "sub"), producer(op.y, "add")
    if top is None or bottom is None:
        return None
    if {bottom.x, bottom.y} != {top.x, top.y} and not _same_and_one(top, bottom):
        return None
    first, second = producer(top.x, "exp"), producer(top.y, "exp")
    shape = op.outputs[0].shape
    if first is not None and second is not None:
        if first.x.shape != shape or negation_operand(second.x) is not first.x:
            return None
        return WrittenExponential("tanh", first, (op, top, bottom, first, second))
    exponential, one = (first, top.y) if first is not None else (second, top.x)
    if exponential is None or number(one) != 1 or exponential.x.shape != shape:
        return None
    return WrittenExponential("tanh_of_half", exponential, (op, top, bottom, exponential), first is None)


def _same_and_one(top: Operation, bottom: Operation) -> bool:
    """Do a difference and a sum have one operand in common, and 1 as the other?"""
    wholes = [[v for v in (op.x, op.y) if number(v) != 1] for op in (top, bottom)]
    return len(wholes[0]) == len(wholes[1]) == 1 and wholes[0][0] is wholes[1][0]


def _softmax(op: Operation) -> WrittenExponential | None:
    inner = _sum_of_exponentials(op.y) if op.op_type == "real_div" else None
    top = producer(op.x, "exp")
    if inner is None or top is None or top.x is not inner[1].x:
        return None
    if len(ints(inner[0], "axes")) != 1 or not flag(inner[0], "keep_dims"):
        return None
    return WrittenExponential("softmax", inner[1], (op, *inner), total=inner[0])


def _divided_by_one_plus_exp(op: Operation) -> WrittenExponential | None:
    """Match something divided by 1 + exp(x)."""
    if op.op_type == "real_div":
        denominator, factor = op.y, None if number(op.x) == 1 else op.x
    elif number(op.y) == -1 if op.op_type == "pow" else _epsilon_within(op, INVERSE_GUARD):
        denominator, factor = op.x, None
    else:
        return None
    if (inner := _one_plus_exp(denominator)) is None:
        return None
    exponential = inner[1]
    if factor is None:
        plain = op.outputs[0].shape == exponential.x.shape
        return WrittenExponential("sigmoid", exponential, (op, *inner), True) if plain else None
    top = producer(factor, "exp")
    if top is not None and top.x is exponential.x:  # the same `exp`, or an equal one
        return WrittenExponential("sigmoid", exponential, tuple(dict.fromkeys((op, *inner, top))))
    if _depends_on(factor, exponential):  # it overflows too, and infinity times 0 is NaN
        return None
    return WrittenExponential("sigmoid", exponential, (op, *inner), True, factor)


def _depends_on(var: Var, op: Operation) -> bool:
    """Is a value computed from an op's result, within a few ops?"""
    reached = [var]
    for _ in range(NEAR):
        makers = [v.op for v in reached if v.op is not None]
        if op in makers:
            return True
        reached = [v for maker in makers for _, v in operands(maker)]
    return False


NEAR = 4
"""The most ops between an exponential and a numerator: `1 - 2 * exp(x)` has two, and casts make it four."""


def _exp_times_reciprocal(op: Operation, top: Var, bottom: Var) -> WrittenExponential | None:
    """Match exp(x) times the reciprocal of 1 + exp(x), or times the sigmoid of -x that it has become."""
    exponential = producer(top, "exp")
    maker = producer(bottom, "inverse", "pow", "real_div", "sigmoid")
    if exponential is None or maker is None:
        return None
    if maker.op_type == "sigmoid":
        same = negation_operand(maker.x) is exponential.x or negation_operand(exponential.x) is maker.x
        return WrittenExponential("sigmoid", exponential, (op, maker, exponential)) if same else None
    inner = _divided_by_one_plus_exp(maker)
    if inner is None or not inner.opposite:  # exp(x) / (1 + exp(x)) is a sigmoid by itself
        return None
    if inner.exponential.x is not exponential.x or inner.factor is not None:
        return None
    return WrittenExponential("sigmoid", exponential, tuple(dict.fromkeys((op, *inner.ops, exponential))))
