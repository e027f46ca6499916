"""How the arithmetic of a prime field computes elementwise ops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from anesurgery.interpret.arithmetic.field import Image, add, divide
from anesurgery.interpret.arithmetic.narrowing import narrows
from anesurgery.interpret.arithmetic.polynomials import Algebraic
from anesurgery.interpret.arithmetic.symbolic import Rule
from anesurgery.mil import Operation, np_dtype, operands
from anesurgery.ops import MOVING, names

MOST_FACTORS = 8
"""Whole exponents up to which a power is a product."""


WHOLE = {2: 2.0**11, 4: 2.0**24, 8: 2.0**53}
"""Bytes of a float -> up to where it holds every integer."""
AROUND = names("add sub mul square pow reduce_sum reduce_prod reduce_sum_square cumsum matmul linear einsum")
"""Ops whose integers may wrap around."""


def _in_order(rule: Rule) -> Rule:
    """A rule that rests on the order of numbers: not for integers that may have wrapped around."""

    def ruled(a: Algebraic, op: Operation, **arguments: Any) -> Any:
        if any(_wraps(a, v) for _, v in operands(op)):
            return a.uninterpreted(op, arguments)
        return rule(a, op, **arguments)

    return ruled


def _compared(rule: Rule) -> Rule:
    """A comparison of integers that were rounded is that of the integers: rounding keeps the order."""

    def ruled(a: Algebraic, op: Operation, x: Any, y: Any) -> Any:
        limit = WHOLE.get(np_dtype(op.inputs["x"]).itemsize, 0.0) - 1
        if np_dtype(op.inputs["x"]).kind == "f":
            first = a.unrounded(x) if a.within(op.inputs["y"], limit) else x
            x, y = first, a.unrounded(y) if a.within(op.inputs["x"], limit) else y
        return rule(a, op, x=x, y=y)

    return _in_order(ruled)


def _wraps(a: Algebraic, var: Any) -> bool:
    """May integers of a value have wrapped around?"""
    if var.op is None or np_dtype(var).kind not in "iu" or a.within(var, np.iinfo(np_dtype(var)).max):
        return False
    moves = var.op.op_type in MOVING
    return var.op.op_type in AROUND or (moves and any(_wraps(a, v) for _, v in operands(var.op)))


def _add(a: Algebraic, op: Operation, x: Any, y: Any) -> Image:
    return a.plus(x, y)


def _sub(a: Algebraic, op: Operation, x: Any, y: Any) -> Image:
    return a.minus(x, y)


def _mul(a: Algebraic, op: Operation, x: Any, y: Any) -> Image:
    return a.times(x, y)


def _real_div(a: Algebraic, op: Operation, x: Any, y: Any) -> Image:
    if np_dtype(op.inputs["x"]).kind != "f":
        return a.uninterpreted(op, {"x": x, "y": y})
    quotient = divide(a.image(x), a.image(y))
    constant = not isinstance(y, Image)
    return Image(quotient.lanes, a.image(x).degree, a.image(x).fraction) if constant else quotient


def _square(a: Algebraic, op: Operation, x: Any) -> Image:
    return a.times(x, x)


def _inverse(a: Algebraic, op: Operation, x: Any, epsilon: float = 1e-4) -> Image:
    return divide(a.lift(1.0), a.plus(x, float(epsilon)))


def _log(a: Algebraic, op: Operation, x: Any, epsilon: float = 1e-45) -> Image:
    return a.function("log", a.plus(x, float(epsilon)))


def _sqrt(a: Algebraic, op: Operation, x: Any) -> Image:
    return a.root(a.image(x))


def _rsqrt(a: Algebraic, op: Operation, x: Any, epsilon: float = 1e-12) -> Image:
    return divide(a.lift(1.0), a.root(a.plus(x, float(epsilon))))


def _pow(a: Algebraic, op: Operation, x: Any, y: Any) -> Image:
    exponent = (
        None if isinstance(y, Image) or not bool((y == y.reshape(-1)[0]).all()) else float(y.reshape(-1)[0])
    )
    if exponent == 0.5:
        return a.root(a.image(x))
    if exponent is None or exponent % 1 or not 1 <= exponent <= MOST_FACTORS:
        return a.uninterpreted(op, {"x": x, "y": y})
    power = a.image(x)
    for _ in range(int(exponent) - 1):
        power = a.times(power, x)
    return power


def _abs(a: Algebraic, op: Operation, x: Any) -> Image:
    return a.even("abs", a.image(x))


def _relu(a: Algebraic, op: Operation, x: Any) -> Image:
    return a.larger(x, 0)


def _relu6(a: Algebraic, op: Operation, x: Any) -> Image:
    return a.smaller(a.larger(x, 0), 6)


def _maximum(a: Algebraic, op: Operation, x: Any, y: Any) -> Image:
    return a.larger(x, y)


def _minimum(a: Algebraic, op: Operation, x: Any, y: Any) -> Image:
    return a.smaller(x, y)


def _clip(a: Algebraic, op: Operation, x: Any, alpha: float, beta: float) -> Image:
    clipped = a.image(x) if math.isinf(alpha) else a.larger(x, float(alpha))
    return clipped if math.isinf(beta) else a.smaller(clipped, float(beta))


def _threshold(a: Algebraic, op: Operation, x: Any, alpha: float) -> Image:
    return a.larger(x, float(alpha))


def _leaky_relu(a: Algebraic, op: Operation, x: Any, alpha: float = 0.01) -> Image:
    return add(a.larger(x, 0), a.times(a.smaller(x, 0), float(alpha)))


def _linear_activation(a: Algebraic, op: Operation, x: Any, alpha: float, beta: float = 0.0) -> Image:
    return a.plus(a.times(x, float(alpha)), float(beta))


def _sigmoid_hard(a: Algebraic, op: Operation, x: Any, alpha: float = 0.2, beta: float = 0.5) -> Image:
    return a.smaller(a.larger(a.plus(a.times(x, float(alpha)), float(beta)), 0), 1)


def _silu(a: Algebraic, op: Operation, x: Any) -> Image:
    return a.times(x, a.function("sigmoid", x))


def _named(a: Algebraic, op: Operation, x: Any) -> Image:
    """A function by the name under which the rules of other ops know it."""
    return a.function(op.op_type, x)


def _even(a: Algebraic, op: Operation, x: Any) -> Image:
    return a.even(op.op_type, a.image(x))


def _scaled_tanh(a: Algebraic, op: Operation, x: Any, alpha: float = 1.0, beta: float = 1.0) -> Image:
    return a.times(a.odd("tanh", a.times(x, float(beta))), float(alpha))


def _softsign(a: Algebraic, op: Operation, x: Any) -> Image:
    return divide(a.image(x), a.plus(a.even("abs", a.image(x)), 1))


def _odd(a: Algebraic, op: Operation, x: Any) -> Image:
    return a.odd(op.op_type, a.image(x))


def _equal(a: Algebraic, op: Operation, x: Any, y: Any) -> Image:
    return a.even("equal", a.minus(x, y))


def _not(a: Algebraic, op: Operation, x: Any) -> Image:
    return a.minus(1, x)


def _not_equal(a: Algebraic, op: Operation, x: Any, y: Any) -> Image:
    return a.minus(1, _equal(a, op, x, y))


def _greater(a: Algebraic, op: Operation, x: Any, y: Any) -> Image:
    return a.function("positive", a.minus(x, y))


def _less(a: Algebraic, op: Operation, x: Any, y: Any) -> Image:
    return _greater(a, op, y, x)


def _greater_equal(a: Algebraic, op: Operation, x: Any, y: Any) -> Image:
    return a.minus(1, _greater(a, op, y, x))


def _less_equal(a: Algebraic, op: Operation, x: Any, y: Any) -> Image:
    return a.minus(1, _greater(a, op, x, y))


def _or(a: Algebraic, op: Operation, x: Any, y: Any) -> Image:
    return a.minus(a.plus(x, y), a.times(x, y))


def _xor(a: Algebraic, op: Operation, x: Any, y: Any) -> Image:
    return a.minus(a.plus(x, y), a.times(2, a.times(x, y)))


def _cast(a: Algebraic, op: Operation, x: Any, dtype: str) -> Image:
    old, new = np_dtype(op.inputs["x"]), np_dtype(op.outputs[0])
    if new.kind == "b" and old.kind != "b":
        return a.minus(1, a.even("equal", a.image(x)))
    wider = new.itemsize >= old.itemsize and new.kind == old.kind
    held = old.kind == new.kind == "f" and not narrows(op)
    if old.kind == "b" or held or (wider and not (new != old and _wraps(a, op.inputs["x"]))):
        return a.image(x)
    if new.kind == "f" and old.kind in "iu" and a.within(op.inputs["x"], WHOLE[new.itemsize]):
        return a.image(x)
    if new.kind == "f" and old.kind in "iu":
        return a.rounded(dtype, a.image(x))
    return a.function(("narrowed" if narrows(op) else "cast", dtype), x)


RULES: dict[str, Rule] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "real_div": _real_div,
    "square": _square,
    "inverse": _inverse,
    "log": _log,
    "sqrt": _sqrt,
    "rsqrt": _rsqrt,
    "pow": _pow,
    "abs": _abs,
    "relu": _in_order(_relu),
    "relu6": _in_order(_relu6),
    "maximum": _in_order(_maximum),
    "minimum": _in_order(_minimum),
    "clip": _in_order(_clip),
    "threshold": _in_order(_threshold),
    "leaky_relu": _leaky_relu,
    "linear_activation": _linear_activation,
    "sigmoid_hard": _sigmoid_hard,
    "silu": _silu,
    **dict.fromkeys(("exp", "sigmoid"), _named),
    **dict.fromkeys(("cos", "cosh"), _even),
    "scaled_tanh": _scaled_tanh,
    "softsign": _softsign,
    **dict.fromkeys(("tanh", "erf", "sin", "sinh", "tan", "atan", "asin", "atanh"), _odd),
    "sign": _in_order(_odd),
    "equal": _compared(_equal),
    "not_equal": _compared(_not_equal),
    "greater": _compared(_greater),
    "less": _compared(_less),
    "greater_equal": _compared(_greater_equal),
    "less_equal": _compared(_less_equal),
    "logical_not": _not,
    "logical_and": _mul,
    "logical_or": _or,
    "logical_xor": _xor,
    "cast": _cast,
}
