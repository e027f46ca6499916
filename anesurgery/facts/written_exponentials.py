"""Which function was written out with an exponential: softplus, sigmoid, softmax, or a logarithm of such sums.

`log(1 + exp(x))`, `1 / (1 + exp(-x))` and `exp(x) / (1 + exp(x))`, in whichever order and with whichever op of
division, `exp(x) / sum(exp(x))` and `log(sum(exp(x)))`: the exponential overflows in fp16 from 11.09 on, though
the result is small. Of `log(softmax(x))` it vanishes below -16.6.
"""

from __future__ import annotations

from dataclasses import dataclass

from anesurgery.mil import Operation, Var, np_dtype, producer
from anesurgery.semantics.intervals import interval
from anesurgery.semantics.reading import flag, ints, number

LOG_GUARD = 1e-7
"""The largest epsilon of a logarithm that 1 + exp(x), which is at least 1, hides in fp32 too."""
NO_GUARD = 1e-37
"""The largest epsilon of a logarithm that guards nothing: a softmax so small is 0 in fp32 too."""
INVERSE_GUARD = 1.1e-4
"""As for `LOG_GUARD`: what a converter adds when it divides, and less than half a step of fp16 at 1."""


@dataclass(frozen=True)
class WrittenExponential:
    """One function in several ops."""

    op_type: str
    """ "softplus", "sigmoid", "softmax", "reduce_log_sum_exp", "log_add_exp" or "log_softmax"."""
    exponential: Operation
    ops: tuple[Operation, ...]
    """All that is written out, the last op first."""
    opposite: bool = False
    """Is it the function of the negated exponent?"""
    factor: Var | None = None
    """What is multiplied with the result; of a logarithm of two exponentials, the second exponent."""
    total: Operation | None = None
    """The sum of the exponentials, where there is one."""


def written_exponential(op: Operation) -> WrittenExponential | None:
    """What an op ends, if it is one of these forms of floats; None for all others."""
    if np_dtype(op.outputs[0]).kind != "f":
        return None
    if op.op_type == "mul":
        return _quotient(op, op.x, op.y) or _quotient(op, op.y, op.x)
    if op.op_type == "log":
        return _softplus(op) or _log_of_two(op) or _log_of_sum(op) or _log_of_softmax(op)
    return _divided(op) or _softmax(op)


def negated(var: Var) -> Var | None:
    """The value of which this is the negation, if it was written so."""
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


def _one_more(var: Var) -> tuple[Operation, Operation] | None:
    """The addition and the exponential of 1 + exp(x)."""
    add = producer(var, "add")
    if add is None:
        return None
    for one, other in ((add.x, add.y), (add.y, add.x)):
        exponential = producer(other, "exp")
        if number(one) == 1 and exponential is not None and var.shape == other.shape:
            return add, exponential
    return None


def _softplus(op: Operation) -> WrittenExponential | None:
    inner = _one_more(op.x)
    epsilon = number(op.inputs.get("epsilon"))
    if inner is None or not 0 <= (epsilon or 0) <= LOG_GUARD:
        return None
    return WrittenExponential("softplus", inner[1], (op, *inner))


def _log_of_two(op: Operation) -> WrittenExponential | None:
    """The logarithm of the sum of two exponentials of one shape."""
    add = producer(op.x, "add")
    both = [] if add is None else [producer(v, "exp") for v in (add.x, add.y)]
    epsilon = number(op.inputs.get("epsilon"))
    if add is None or None in both or not 0 <= (epsilon or 0) <= NO_GUARD or add.x.shape != add.y.shape:
        return None
    first, second = both
    assert first is not None
    assert second is not None
    return WrittenExponential("log_add_exp", first, (op, add, first, second), factor=second.x)


def _summed(var: Var) -> tuple[Operation, Operation] | None:
    """The sum and the exponential of a sum of exponentials that may be large."""
    total = producer(var, "reduce_sum")
    exponential = producer(total.x, "exp") if total is not None else None
    if total is None or exponential is None or not ints(total, "axes") or interval(exponential.x)[1] <= 0:
        return None
    return total, exponential


def _log_of_sum(op: Operation) -> WrittenExponential | None:
    inner = _summed(op.x)
    epsilon = number(op.inputs.get("epsilon"))
    if inner is None or not 0 <= (epsilon or 0) <= LOG_GUARD:
        return None
    return WrittenExponential("reduce_log_sum_exp", inner[1], (op, *inner), total=inner[0])


def _log_of_softmax(op: Operation) -> WrittenExponential | None:
    inner = producer(op.x, "softmax")
    axis, epsilon = (None, None) if inner is None else (number(inner.axis), number(op.inputs.get("epsilon")))
    if inner is None or axis is None or not 0 <= (epsilon or 0) <= NO_GUARD:
        return None
    return WrittenExponential("log_softmax", inner, (op, inner))


def _softmax(op: Operation) -> WrittenExponential | None:
    inner = _summed(op.y) if op.op_type == "real_div" else None
    top = producer(op.x, "exp")
    if inner is None or top is None or top.x is not inner[1].x:
        return None
    if len(ints(inner[0], "axes")) != 1 or not flag(inner[0], "keep_dims"):
        return None
    return WrittenExponential("softmax", inner[1], (op, *inner), total=inner[0])


def _divided(op: Operation) -> WrittenExponential | None:
    """Something divided by 1 + exp(x)."""
    if op.op_type == "real_div":
        inner, factor = _one_more(op.y), None if number(op.x) == 1 else op.x
    else:
        guarded = op.op_type == "inverse" and 0 <= (number(op.inputs.get("epsilon")) or 0) <= INVERSE_GUARD
        whole = guarded or (op.op_type == "pow" and number(op.y) == -1)
        inner, factor = (_one_more(op.x) if whole else None), None
    if inner is None:
        return None
    exponential = inner[1]
    if factor is None:
        plain = op.outputs[0].shape == exponential.x.shape
        return WrittenExponential("sigmoid", exponential, (op, *inner), True) if plain else None
    if factor is exponential.outputs[0]:
        return WrittenExponential("sigmoid", exponential, (op, *inner))
    return WrittenExponential("sigmoid", exponential, (op, *inner), True, factor)


def _quotient(op: Operation, top: Var, bottom: Var) -> WrittenExponential | None:
    """exp(x) times the reciprocal of 1 + exp(x), or times the sigmoid of -x that it has become."""
    exponential = producer(top, "exp")
    maker = producer(bottom, "inverse", "pow", "real_div", "sigmoid")
    if exponential is None or maker is None:
        return None
    if maker.op_type == "sigmoid":
        same = negated(maker.x) is exponential.x or negated(exponential.x) is maker.x
        return WrittenExponential("sigmoid", exponential, (op, maker, exponential)) if same else None
    inner = _divided(maker)
    if inner is None or inner.exponential is not exponential or inner.factor is not None:
        return None
    return WrittenExponential("sigmoid", exponential, (op, *inner.ops))
