"""Forms of arithmetic that keep few or no digits in fp16, although no value overflows.

`lost_digits(op, bits)` looks up the rules for the type of the last op of a form (`RULES`); `overflow_regions`
turns what they find into regions that are widened to fp32. The forms: the fraction of a large number,
differences and rounded quotients of integers, differences of two elements of a running sum, `1 - p / (p + r)`,
`1 - cos(x)`, variances, `x^p - 1`, arc functions next to 1, roots of products of probabilities, and running
counts above 2048.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

from anesurgery import fp16
from anesurgery.mil import Operation, Var, constant, is_stored, np_dtype, op_inputs, operands, producer
from anesurgery.ops import CARRIERS, MOVING, names
from anesurgery.semantics.analysis_cache import cached
from anesurgery.semantics.bounds import squared_operand
from anesurgery.semantics.intervals import interval, magnitude
from anesurgery.semantics.reading import number, scaled, value_and_number

MEAN_OPS = names("reduce_mean avg_pool conv")
"""Ops that take means; a convolution is one if its weights add up to 1."""
SQUARES = names("mul square pow")
"""Ops that may compute x * x, or a product."""
NEAR_ONE = 1e-2
"""How far from 1 the weights of a mean may sum up: weights of a bell curve are cut off at its ends."""


def difference_of_means(op: Operation) -> tuple[list[Var], tuple[Operation, ...]]:
    """Return (values, ops) of `mean(a b) - mean(a) mean(b)`; the values are [a, b], or [x] for a variance.

    The subtraction and the first mean come first among the ops. Both are empty for other ops.
    """
    first = producer(op.x, *MEAN_OPS) if op.op_type == "sub" else None
    second = producer(op.y, *SQUARES) if first is not None else None
    product = producer(first.x, *SQUARES) if first is not None else None
    if first is None or second is None or product is None or not _is_mean(first):
        return [], ()
    values, means = _factors(product), [producer(v, first.op_type) for v in _factors(second)]
    if not values or len(means) != len(values) or {m and m.x for m in means} != set(values):
        return [], ()
    if not all(m is not None and _same_windows(first, m) for m in means):
        return [], ()
    return values, tuple(dict.fromkeys((op, first, product, second, *(m for m in means if m is not None))))


def _is_mean(op: Operation) -> bool:
    """Is each result of the op a mean of some numbers?"""
    weight = constant(op.weight) if op.op_type == "conv" and is_stored(op.weight) else None
    if op.op_type != "conv":
        return True
    if weight is None or op.inputs.get("bias") is not None or np.min(weight) < 0:
        return False
    sums = np.asarray(weight, np.float64).reshape(len(weight), -1).sum(1)
    return bool(np.all(np.abs(sums - 1) < NEAR_ONE))


def _same_windows(first: Operation, second: Operation) -> bool:
    """Do two ops take means over the same rows or windows, with the same weights?"""
    one, other = (op_inputs(op, "x") for op in (first, second))
    return one.keys() == other.keys() and all(
        one[k] is other[k] or np.array_equal(constant(one[k]), constant(other[k])) for k in one
    )


def _factors(op: Operation) -> list[Var]:
    """Return the values that an op multiplies, one for a square; empty for other ops."""
    one = squared_operand(op)
    return [one] if one is not None else [op.x, op.y] if op.op_type == "mul" else []


LARGE = 64.0
"""Above this, neighbouring numbers of fp16 are 1/16 apart or more: a fraction is off by up to a thirtieth."""
EXACT_SCALE = 2.0**4
"""A power of two up to this is taken to bring no value of unknown size out of fp16's range."""
MOST = 48
"""The most ops of one form."""
MAKERS = MOVING | names(
    "add sub mul real_div linear matmul concat stack sigmoid exp square sqrt inverse pow cumsum"
)
"""Ops that may compute an angle, or a number with a fraction."""
TURNED = MAKERS | names(
    "rsqrt reduce_sum reduce_sum_square reduce_l2_norm reduce_mean maximum minimum clip abs tanh erf sin cos"
)
"""Ops that may compute the cosine between two directions."""
HANDS_ON = MOVING | names("add sub mul maximum minimum clip")
"""Ops between a count and the cast to an integer."""
POLES = {"acos": 1.0, "asin": 1.0, "atanh": 1.0}
"""Arc functions -> the magnitude at which they are steep."""
BESIDE = 2.0**-6
"""How near to 1 a number may come before fp16 keeps fewer than three digits of its arc cosine."""


@dataclass(frozen=True)
class Loss:
    """Ops whose numbers lose their digits in fp16."""

    ops: tuple[Operation, ...]
    """The last op of the form first."""
    widest: Operation
    why: str
    """What goes wrong, in words."""


def lost_digits(op: Operation, bits: int) -> Loss | None:
    """The loss of a form that ends with an op which computes in floats of `bits` bits; None without one."""
    rule = RULES.get(op.op_type)
    return None if rule is None else rule(op, bits)


@cached
def computes_in(op: Operation, bits: int) -> bool:
    """Does an op compute with floats of `bits` bits?"""
    values = [v for _, v in operands(op) if not is_stored(v) and np_dtype(v).kind == "f"]
    return bool(values) and all(8 * np_dtype(v).itemsize == bits for v in values)


def makers_of(var: Var, through: frozenset[str], bits: int) -> list[Operation]:
    """Return the upstream ops of some types that compute a value with floats of `bits` bits."""
    ops, pending = list[Operation](), [var]
    while pending and len(ops) <= MOST:
        maker = producer(pending.pop(), *through)
        if maker is not None and maker not in ops and computes_in(maker, bits):
            ops.append(maker)
            pending += floats_of(maker)
    return ops


def floats_of(op: Operation) -> list[Var]:
    """Return the floats that an op reads and that are computed."""
    return [v for _, v in operands(op) if np_dtype(v).kind == "f" and not is_stored(v)]


def is_rounded_before(op: Operation, makers: list[Operation]) -> bool:
    """Do the upstream ops round what an op reads, or is it cast from a type other than fp16?"""
    casts = [producer(v, "cast") for o in (op, *makers) for v in floats_of(o)]
    return not all(map(_is_exact, makers)) or any(
        cast is not None and np_dtype(cast.x) not in (np.float16, np.bool_) for cast in casts
    )


def is_given(var: Var) -> bool:
    """Is a value an input of the function, directly or through ops that do not round?"""
    while var.op is not None and _is_exact(var.op):
        values = floats_of(var.op)
        if len(values) != 1:
            return False
        var = values[0]
    return var.op is None


def _is_exact(op: Operation) -> bool:
    """Does an op move numbers, or multiply them by a small power of two, so that none is rounded?"""
    _, times = scaled(op) or (None, 0.0)
    return op.op_type in MOVING or (math.frexp(abs(times))[0] == 0.5 and abs(times) <= EXACT_SCALE)


def _fraction(op: Operation, bits: int) -> Loss | None:
    """Match `x - floor(x)` or `mod(x, n)` of a large x that was rounded."""
    floor = producer(op.y, "floor") if op.op_type == "sub" else None
    value = op.x
    if op.op_type == "sub" and (floor is None or floor.x is not value):
        return None
    makers = makers_of(value, MAKERS, bits)
    most = magnitude(value, products=1)
    if most <= LARGE or (bits == HALF and not is_rounded_before(op, makers)):
        return None
    ops = (op, *makers) if floor is None else (op, floor, *makers)
    return Loss(
        ops,
        op,
        f"above {LARGE:g} fp16 holds %{value.name} to {LARGE * fp16.HALF_STEP:.2g}, and a fraction is left",
    )


HALF = 16
"""Bits of fp16."""


def _difference(op: Operation, bits: int) -> Loss | None:
    """Try all forms that end with a subtraction."""
    rules = (
        _fraction,
        _difference_of_integers,
        _difference_in_running_sum,
        _complement_of_share,
        _versed_sine,
        _weighted_variance,
        _flat_power,
    )
    return next((loss for rule in rules if (loss := rule(op, bits)) is not None), None)


def _moved_from(var: Var, bits: int) -> tuple[Var, list[Operation]]:
    """Return the value before ops that move numbers, and these ops."""
    ops = list[Operation]()
    while (maker := producer(var, *(MOVING | CARRIERS) - {"cast"})) is not None and computes_in(maker, bits):
        ops.append(maker)
        var = maker.x
    return var, ops


def _difference_of_integers(op: Operation, bits: int) -> Loss | None:
    """Match the difference of two integers that fp16 may not hold, or of an integer and a multiple of one."""
    (one, first), (other, second) = (_integer_of(v, bits) for v in (op.x, op.y))
    casts = [producer(v, "cast") for v in (one, other)]
    if any(cast is None or np_dtype(cast.x).kind not in "iu" for cast in casts):
        return None
    if max(magnitude(cast.x) for cast in casts if cast is not None) <= fp16.LAST_INTEGER:
        return None
    why = f"%{one.name} and %{other.name} are integers, and fp16 skips some above {fp16.LAST_INTEGER:.0f}"
    return Loss((op, *dict.fromkeys((*first, *second))), op, why)


def _integer_of(var: Var, bits: int) -> tuple[Var, list[Operation]]:
    """Return the value before ops that move numbers and at most one product with an integer, and these ops."""
    value, ops = _moved_from(var, bits)
    product = producer(value, "mul")
    whole, times = (product and value_and_number(product)) or (None, 0.5)
    if product is None or whole is None or times % 1:
        return value, ops
    below, moves = _moved_from(whole, bits)
    return below, [*ops, product, *moves]


def _quotient_of_integers(op: Operation, bits: int) -> Loss | None:
    """Match the rounded quotient of an integer that fp16 may not hold, as the row of a place in a flat map."""
    value, moves = _moved_from(op.x, bits)
    cast = producer(value, "cast")
    if cast is None or np_dtype(cast.x).kind not in "iu" or magnitude(cast.x) <= fp16.LAST_INTEGER:
        return None
    why = f"%{cast.x.name} may hold integers above {fp16.LAST_INTEGER:.0f}, and fp16 skips some of them"
    return Loss((op, *moves), op, why)


def _difference_in_running_sum(op: Operation, bits: int) -> Loss | None:
    """Match the difference of two elements of a running sum, which are nearly equal where that is large."""
    (one, first), (other, second) = (_moved_from(v, bits) for v in (op.x, op.y))
    total = producer(one, "cumsum")
    if (
        one is not other
        or total is None
        or not (first or second)
        or magnitude(one, products=1) <= fp16.LAST_INTEGER
    ):
        return None
    why = f"%{op.outputs[0].name} is the difference of two places of the running sum %{one.name}"
    return Loss((op, *dict.fromkeys((*first, *second, total))), op, why)


def _complement_of_share(op: Operation, bits: int) -> Loss | None:
    """Match `1 - p / (p + r)`, which is small where r is."""
    share = producer(op.y, "real_div", "mul") if number(op.x) == 1 else None
    if share is None:
        return None
    inverse = producer(share.y, "inverse") if share.op_type == "mul" else None
    total = producer(inverse.x if inverse is not None else share.y, "add")
    if total is None or share.x not in (total.x, total.y) or is_stored(share.x):
        return None
    (low, high), least = interval(share.x), interval(total.y if total.x is share.x else total.x)[0]
    if low >= 0 and least > 0 and high < math.inf and high / (high + least) < 1 - BESIDE:
        return None
    why = f"%{op.outputs[0].name} is what %{share.outputs[0].name} leaves of 1, and it may be next to 1"
    return Loss((op, share, *([inverse] if inverse is not None else []), total), op, why)


def _versed_sine(op: Operation, bits: int) -> Loss | None:
    """Match `1 - cos(x)` where x may be near 0."""
    cosine = producer(op.y, "cos") if number(op.x) == 1 else None
    if cosine is None or interval(cosine.x)[0] > SMALL or interval(cosine.x)[1] < -SMALL:
        return None
    return Loss((op, cosine), op, f"%{op.outputs[0].name} is 1 - cos(%{cosine.x.name}), which is small near 0")


SMALL = 0.1
"""The angle below which fp16 loses more than a tenth of 1 - cos(x)."""


def _weighted_variance(op: Operation, bits: int) -> Loss | None:
    """Match the weighted mean of squares less the square of the weighted mean."""
    square = producer(op.y, "mul", "square", "pow")
    mean = producer(squared_operand(square), "reduce_sum", "matmul") if square is not None else None
    first = producer(op.x, mean.op_type) if mean is not None else None
    if square is None or mean is None or first is None or first is mean:
        return None
    inner = [makers_of(total.x, WEIGHED, bits) for total in (first, mean)]
    weighed = [
        {total.x, *(v for o in ops for v in floats_of(o))}
        for total, ops in zip((first, mean), inner, strict=True)
    ]
    if not weighed[0] & weighed[1] or magnitude(mean.outputs[0]) <= 1:
        return None
    why = f"%{op.x.name} and %{op.y.name} are nearly equal where what is weighed is far from 0"
    return Loss((op, square, first, mean, *dict.fromkeys((*inner[0], *inner[1]))), op, why)


WEIGHED = names("mul square pow softmax real_div")
"""Ops between the sum and the values that it weighs, or their weights, which must sum up to 1."""


def _root_of_probabilities(op: Operation, bits: int) -> Loss | None:
    """Match the root of a product of two probabilities: the product may become 0 where its root is not."""
    product = producer(op.x, "mul")
    shares = [] if product is None else [producer(v, *SHARES) for v in (product.x, product.y)]
    if product is None or any(s is None or interval(s.outputs[0])[0] >= FEW for s in shares):
        return None
    ops = (op, product, *(s for s in shares if s is not None))
    return Loss(ops, product, f"%{product.outputs[0].name} is a product of two shares, whose root is larger")


FEW = 2.0**-10
"""The least probability of interest: a product of two such has four binary digits left in fp16."""
SHARES = names("softmax sigmoid")
"""Ops whose results are probabilities, which may underflow to 0."""


def _flat_power(op: Operation, bits: int) -> Loss | None:
    """Match `x^p - 1` with a small p, as in a Box-Cox transform: the power is next to 1 for all x of fp16."""
    value, one = value_and_number(op) or (op.x, 0.0)
    power = producer(value, "pow")
    exponent = None if power is None else number(power.y)
    if power is None or exponent is None or abs(exponent) > FLAT or one != (-1 if op.op_type == "add" else 1):
        return None
    why = f"%{op.outputs[0].name} is %{power.x.name} to the power {exponent:.3g} less 1, which is next to 1"
    return Loss((op, power), op, why)


FLAT = 1 / 16
"""The largest power of interest: numbers of fp16 to it lie between 1/2 and 2."""


def _near_pole(op: Operation, bits: int) -> Loss | None:
    """Match an arc function of a cosine or sine that may be next to 1, where rounding moves the angle much."""
    low, high = interval(op.x)
    end = POLES[op.op_type] * (1 - BESIDE)
    makers = makers_of(op.x, TURNED, bits)
    if (high < end and low > -end) or (bits == HALF and not is_rounded_before(op, makers)):
        return None
    near, steep = fp16.HALF_STEP, math.sqrt(fp16.EPSILON)
    why = f"next to 1 fp16 holds %{op.x.name} to {near:.1g}, and its {op.op_type} to {steep:.1g}"
    return Loss((op, *makers), op, why)


def _running_count(op: Operation, bits: int) -> Loss | None:
    """Match a running sum that may pass 2048, above which fp16 skips integers."""
    if magnitude(op.outputs[0]) <= fp16.LAST_INTEGER:
        return None
    return Loss(
        (op,), op, f"above {fp16.LAST_INTEGER:.0f} the running sum %{op.outputs[0].name} skips integers"
    )


def _integer_from_count(op: Operation, bits: int) -> Loss | None:
    """Match a cast to an integer of a running sum that may pass 2048."""
    if np_dtype(op.outputs[0]).kind not in "iu":
        return None
    makers = makers_of(op.x, HANDS_ON | {"cumsum"}, bits)
    total = next(
        (m for m in makers if m.op_type == "cumsum" and magnitude(m.outputs[0]) > fp16.LAST_INTEGER), None
    )
    if total is None:
        return None
    return Loss((op, *makers), total, f"%{total.outputs[0].name} counts beyond {fp16.LAST_INTEGER:.0f}")


def _divisor(op: Operation) -> Var | None:
    """Return the divisor of `inverse(x)` or of a number over x; None for other ops."""
    if op.op_type == "inverse":
        return cast(Var, op.x)
    return op.y if op.op_type == "real_div" and number(op.x) is not None else None


def reciprocals(op: Operation) -> list[Operation]:
    """Return the reciprocals of possibly small numbers in `n / sum(1 / x)`, as in a harmonic mean."""
    start = _divisor(op)
    pending, small = [] if start is None else [start], list[Operation]()
    while pending and len(small) < MOST:
        maker = producer(pending.pop(), *MEANS)
        divisor = None if maker is None else _divisor(maker)
        if maker is not None and divisor is not None:
            small += [maker] if max(interval(divisor)[0], 0.0) < 1 / fp16.LARGEST else []
        elif maker is not None and (maker.op_type in ADDING or scaled(maker) is not None):
            pending += floats_of(maker)
    return small


ADDING = names("reduce_sum reduce_mean add")
"""Ops that add up numbers."""
MEANS = ADDING | names("mul real_div inverse")
"""Ops of a harmonic mean."""

RULES: dict[str, Callable[[Operation, int], Loss | None]] = {
    "sub": _difference,
    "add": _flat_power,
    "mod": _fraction,
    "floor_div": _quotient_of_integers,
    "cumsum": _running_count,
    "cast": _integer_from_count,
    "sqrt": _root_of_probabilities,
    **dict.fromkeys(POLES, _near_pole),
}
"""Op type -> the rule for forms that end with it."""
