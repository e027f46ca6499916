"""Rows of ops that work element by element: unary, binary, activations, and a choice between two values."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np

from anesurgery.mil import Operation, Var, is_constant, np_dtype, producer
from anesurgery.ops import BROADCASTING, MONOTONE, UNARY, names
from anesurgery.semantics.computed import image
from anesurgery.semantics.constant_ends import ANY, NORMAL, Interval
from anesurgery.semantics.meaning import ALWAYS, OF_WHOLE, Meaning, Operand, Ranges, aligned, times
from anesurgery.semantics.reading import clipped_divisor, exponential, number, scaled
from anesurgery.semantics.row_lengths import epsilon_of, mean_square, spans_rows, squared

DIP = -0.2785
"""Below the least value of x * sigmoid(x), -0.27846; that of gelu is -0.17."""
LEAST = 2.0**-24
"""The smallest number above 0 of fp16."""
OVERFLOWS = 700.0
"""Where an exponential of fp64 is no number any more, less what is left for rounding."""
STEP = 2.0**-9
"""How far, relatively, fp16 may round a sum and a quotient of it."""


def _monotone(op: Operation, ranges: Ranges) -> Interval:
    return image(op, ranges.at(op.x)) or ANY


def _abs(op: Operation, ranges: Ranges) -> Interval:
    low, high = ranges.at(op.x)
    return (0.0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))


def _cosh(op: Operation, ranges: Ranges) -> Interval:
    """Least where the magnitude is; a step of fp16 added."""
    low, high = (math.cosh(v) if v < OVERFLOWS else math.inf for v in _abs(op, ranges))
    return low * (1 - STEP), high * (1 + STEP)


def _square(op: Operation, ranges: Ranges) -> Interval:
    return _squares(ranges.at(op.x))


def _squares(ends: Interval) -> Interval:
    low, high = sorted(abs(end) for end in ends)
    return (0.0 if ends[0] <= 0 <= ends[1] else low * low), high * high


def _pow(op: Operation, ranges: Ranges) -> Interval:
    """A square, or one power of numbers above 0; what fp16 rounds of it is left out."""
    if squared(op) is not None:
        return _square(op, ranges)
    if exponential(op) is not None:
        return _power_of_number(op, ranges)
    (low, high), exponent = ranges.at(op.x), number(op.y)
    if exponent is None or low <= 0:
        return ANY
    with np.errstate(over="ignore"):
        ends = [float(np.float64(v) ** exponent) for v in (low, high)]
    return min(ends) * (1 - STEP), max(ends) * (1 + STEP)


def _power_of_number(op: Operation, ranges: Ranges) -> Interval:
    """Between the powers with the least and the largest exponent, as it rises or falls; a step is added."""
    base = np.float64(number(op.x))
    with np.errstate(over="ignore"):
        ends = [float(base**exponent) for exponent in ranges.at(op.y)]
    return (min(ends) * (1 - STEP) if min(ends) >= NORMAL else 0.0), max(ends) * (1 + STEP)


def _log(op: Operation, ranges: Ranges) -> Interval:
    """Of numbers below 6e-8 nothing is said from below, of what is stored below 6e-5; a step of fp16 is added.

    What is above -epsilon has a logarithm too.
    """
    low, high = (max(v + epsilon_of(op), 0.0) for v in ranges.at(op.x))
    enough = low >= (NORMAL if ranges.stored else LEAST)
    least = math.log(min(low, sys.float_info.max)) if enough else -math.inf
    return least - max(abs(least), 1.0) * STEP, (math.log(high) if high > 0 else -math.inf) + STEP


def _bent(op: Operation, ranges: Ranges) -> Interval:
    """Below 0 it rises by another slope, unless that is negative."""
    slope = number(op.inputs.get("alpha"))
    return _monotone(op, ranges) if slope is None or slope >= 0 else ANY


def _sqrt(op: Operation, ranges: Ranges) -> Interval:
    low, high = ranges.at(op.x)
    return math.sqrt(max(low, 0.0)), math.sqrt(max(high, 0.0))


def _cast(op: Operation, ranges: Ranges) -> Interval:
    """To an integer, the fraction is cut off, and NaN is 0."""
    low, high = ranges.at(op.x)
    if np_dtype(op.outputs[0]).kind in "iu":
        low, high = (math.trunc(v) if math.isfinite(v) else v for v in (low, high))
        if np_dtype(op.x).kind == "f":
            low, high = min(low, 0.0), max(high, 0.0)
        if np_dtype(op.x).kind in "iu" and np_dtype(op.x).itemsize <= np_dtype(op.outputs[0]).itemsize:
            limits = np.iinfo(np_dtype(op.x))
            low, high = max(low, float(limits.min)), min(high, float(limits.max))
    return low, high


def _add(op: Operation, ranges: Ranges) -> Interval:
    (a, b), (c, d) = ranges.at(op.x), ranges.at(op.y)
    low, high = a + c, b + d
    return ANY if math.isnan(low) or math.isnan(high) else (low, high)


def _sub(op: Operation, ranges: Ranges) -> Interval:
    top = producer(op.y)
    while top is not None and top.op_type == "maximum":
        top = producer(top.x)
    if top is not None and top.op_type == "reduce_max" and top.x is op.x and spans_rows(top):
        return -math.inf, 0.0
    (a, b), (c, d) = ranges.at(op.x), ranges.at(op.y)
    low, high = a - d, b - c
    return ANY if math.isnan(low) or math.isnan(high) else (low, high)


def _mul(op: Operation, ranges: Ranges) -> Interval:
    if op.x is op.y:
        return _square(op, ranges)
    for one, other in ((op.x, op.y), (op.y, op.x)):
        factor = mean_square(other)
        most = factor.largest(stored=ranges.stored) if factor is not None and factor.x is one else math.inf
        if math.isfinite(most):
            return (-most, most)
    left, right = ranges.at(op.x), ranges.at(op.y)
    ends = [end for factor in left for end in times(factor, right)]
    low, high = min(ends), max(ends)
    by = _multiple_of_square(op) or math.nan
    return (max(low, 0.0) if by > 0 else low), (min(high, 0.0) if by < 0 else high)


def _multiple_of_square(op: Operation) -> float | None:
    """The c of `(c * x) * x`."""
    for one, other in ((op.x, op.y), (op.y, op.x)):
        maker = producer(other, "mul", "real_div")
        times_number = None if maker is None else scaled(maker)
        if times_number is not None and times_number[0] is one:
            return times_number[1]
    return None


def _divide(op: Operation, ranges: Ranges) -> Interval:
    """By what is never 0, or by no less than the largest magnitude of the same value."""
    if _no_less_than_size(op.y, op.x, ranges):
        return -1.0, 1.0
    if not ranges.stored and (most := _quiet(op.y, op.x, ranges)) is not None:
        return -most, most
    (a, b), (c, d) = ranges.at(op.x), ranges.at(op.y)
    if (bounds := clipped_divisor(op)) is not None and a > 0 and bounds[0] > 0:
        return a / min(max(a, bounds[0]), bounds[1]), _quotient(b, min(max(b, bounds[0]), bounds[1]))
    if number(op.y) or (c > 0 and np_dtype(op.y).kind == "f"):
        ends = [_quotient(top, down) for top in (a, b) for down in (c, d)]
        return min(ends), max(ends)
    return ANY


def _quiet(unit: Var, x: Var, ranges: Ranges) -> float | None:
    """The most of x over a unit `m / clip(m)` by its own largest magnitude m; None for other divisors."""
    division = producer(unit, "real_div")
    bounds = None if division is None else clipped_divisor(division)
    if division is None or bounds is None or not _no_less_than_size(division.x, x, ranges):
        return None
    return bounds[1]


def _quotient(top: float, down: float) -> float:
    """By an infinity what is finite becomes 0; of two infinities nothing is known but the sign."""
    if math.isinf(top) and math.isinf(down):
        return top
    return top / down


def _no_less_than_size(var: Var, x: Var, ranges: Ranges, steps: int = 8) -> bool:
    """Is a value nowhere below the magnitude of x in the same place?"""
    op = producer(var)
    if op is None or not steps:
        return False
    if op.op_type == "abs":
        return op.x is x
    if op.op_type == "reduce_max":
        return spans_rows(op) and _no_less_than_size(op.x, x, ranges, steps - 1)
    if op.op_type == "maximum" and _no_less_than_size(op.y, x, ranges, steps - 1):
        return True
    return _is_no_less(op, ranges) and _no_less_than_size(op.x, x, ranges, steps - 1)


def _is_no_less(op: Operation, ranges: Ranges) -> bool:
    """Is what the op makes nowhere below its `x`?"""
    if op.op_type == "add":
        return ranges.at(op.y)[0] >= 0
    if op.op_type == "clip":
        return ranges.at(op.x)[1] <= (number(op.beta) or 0.0)
    return bool(op.op_type == "maximum")


def _mod(op: Operation, ranges: Ranges) -> Interval:
    """The remainder takes the sign of the divisor, and of integers is smaller."""
    low, high = ranges.at(op.y)
    less = 1 if np_dtype(op.y).kind in "iu" else 0
    return min(low + less, 0.0), max(high - less, 0.0)


def _floor_div(op: Operation, ranges: Ranges) -> Interval:
    """Integers by a positive constant, or numbers that are not negative; a divisor of -0 would make -inf."""
    (a, b), (c, _) = ranges.at(op.x), ranges.at(op.y)
    whole, by = np_dtype(op.y).kind in "iu", number(op.y) or 0
    if whole and by > 0:
        low, high = (math.floor(v / by) if math.isfinite(v) else v for v in (a, b))
        return low, high
    return ANY if a < 0 or c < (0.0 if whole else math.ulp(0.0)) else (0.0, b if c >= 1 else math.inf)


def _maximum(op: Operation, ranges: Ranges) -> Interval:
    (a, b), (c, d) = ranges.at(op.x), ranges.at(op.y)
    return max(a, c), max(b, d)


def _minimum(op: Operation, ranges: Ranges) -> Interval:
    (a, b), (c, d) = ranges.at(op.x), ranges.at(op.y)
    return min(a, c), min(b, d)


def _select(op: Operation, ranges: Ranges) -> Interval:
    """Both sides; where the condition is `a >= 0` itself, `a` counts from 0 on."""
    (a, b), (c, d) = ranges.at(op.a), ranges.at(op.b)
    test = producer(op.cond, "greater_equal")
    if test is not None and test.x is op.a and is_constant(test.y, 0):
        a, b = max(a, 0.0), max(b, 0.0)
    return min(a, c), max(b, d)


def _gate(op: Operation, ranges: Ranges) -> Interval:
    """A value times a share of it: gelu and silu dip below 0 by at most 0.28, and nowhere exceed the value."""
    low, high = ranges.at(op.x)
    return (0.0 if low >= 0 else max(low, DIP)), max(high, 0.0)


def _guarded(op: Operation, ranges: Ranges) -> Interval | None:
    """What an op with an epsilon reads, the epsilon added; None where fp16 may make it 0 or subnormal."""
    low, high = ranges.at(op.x)
    epsilon = epsilon_of(op)
    return None if low < 0 or low + epsilon < NORMAL else (low + epsilon, high + epsilon)


def _inverse(op: Operation, ranges: Ranges) -> Interval:
    """At most what the least operand gives, a step of fp16 added."""
    ends = _guarded(op, ranges)
    if ends is None:
        return ANY
    low, high = (math.sqrt(v) for v in ends) if op.op_type == "rsqrt" else ends
    return (1 - STEP) / high, (1 + STEP) / low


def _by_channel(op: Operation) -> tuple[Operand, ...]:
    """Activations with a parameter for each channel."""
    stored = [Operand(k, op.inputs[k], (1,)) for k in ("alpha", "beta") if op.inputs.get(k) is not None]
    return Operand("x", op.x, tuple(range(op.x.rank))), *stored


RANGES: dict[str, Interval | Callable[[Operation, Ranges], Interval]] = {
    **dict.fromkeys(MONOTONE, _monotone),
    "sigmoid_hard": (0.0, 1.0),
    **dict.fromkeys(names("sin cos sign"), (-1.0, 1.0)),
    **dict.fromkeys(names("elu leaky_relu"), _bent),
    "log": _log,
    "relu6": (0.0, 6.0),
    "atan": (-1.58, 1.58),
    **dict.fromkeys(names("gelu silu"), _gate),
    **dict.fromkeys(names("inverse rsqrt"), _inverse),
    "abs": _abs,
    "add": _add,
    "cast": _cast,
    "cosh": _cosh,
    "floor_div": _floor_div,
    "identity": lambda op, ranges: ranges.at(op.x),
    "maximum": _maximum,
    "minimum": _minimum,
    "mod": _mod,
    "mul": _mul,
    "pow": _pow,
    "real_div": _divide,
    "select": _select,
    "sqrt": _sqrt,
    "square": _square,
    "sub": _sub,
}

LIMITS = {"sigmoid": (0.0, 1.0), **dict.fromkeys(names("tanh erf softsign"), (-1.0, 1.0))}
"""Where ops saturate."""

WHOLE = {
    **dict.fromkeys(names("ceil floor round sign floor_div"), ALWAYS),
    **dict.fromkeys(names("abs add maximum minimum mod mul relu select sub"), OF_WHOLE),
}

ROWS: dict[str, Meaning] = {
    **{
        t: Meaning(RANGES.get(t), aligned, whole=WHOLE.get(t), limits=LIMITS.get(t, ANY))
        for t in sorted(UNARY | BROADCASTING)
    },
    **dict.fromkeys(("prelu", "softplus_parametric"), Meaning(axes=_by_channel)),
}
