"""Forms of arithmetic that keep few or no digits in fp16, although no value overflows.

`lost_digits(op, bits)` tries the rules for the type of the last op of a form (`RULES`); `overflow_regions`
turns the losses into regions that are widened to fp32. Most forms are small differences of nearly equal
numbers, such as `|x|^2 + |y|^2 - 2 x y`, `exp(x) - 1`, `sqrt(x + 1) - sqrt(x)`, `1 - cos(x)` and variances.
Others round a number whose small part is needed: the fraction of a large number, an angle, a place in an image,
an integer above 2048. Each rule says in its docstring what it matches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np

from anesurgery import fp16
from anesurgery.facts.written_exponentials import written_exponential
from anesurgery.mil import (
    Operation,
    Var,
    constant,
    consumers,
    is_stored,
    np_dtype,
    op_inputs,
    operands,
    producer,
)
from anesurgery.ops import CARRIERS, MOVING, names
from anesurgery.semantics.analysis_cache import cached
from anesurgery.semantics.bounds import squared_operand
from anesurgery.semantics.intervals import interval, magnitude
from anesurgery.semantics.reading import exponential, flag, number, scaled, value_and_number, weight

HALF = 16
"""Bits of fp16."""
MOST = 48
"""The most ops of a form or of a region: a choice, since a larger one would run most of a model in fp32."""
MAKERS = MOVING | names(
    "add sub mul real_div linear matmul concat stack sigmoid exp square sqrt inverse pow cumsum"
)
"""Ops that may compute an angle, or a number with a fraction."""
EXACT_SCALE = 2.0**4
"""A power of two up to this is taken to bring no value of unknown size out of fp16's range."""
ALIKE = 2.0
"""The spread of values within which only the last digits cancel."""
PROBABILITIES = names("softmax sigmoid")
"""Ops whose results are probabilities, which may underflow to 0."""
MAY_BE_NEAR_ONE = PROBABILITIES | names("exp tanh erf cos")
"""Ops whose result may lie next to 1."""


@dataclass(frozen=True)
class Loss:
    """Ops whose numbers lose their digits in fp16."""

    ops: tuple[Operation, ...]
    """The last op of the form first."""
    widest: Operation
    why: str
    """What goes wrong, in words."""


def lost_digits(op: Operation, bits: int) -> Loss | None:
    """Return the loss of a form that ends with an op, which computes in floats of `bits` bits; else None."""
    losses = (rule(op, bits) for rule in RULES.get(op.op_type, ()))
    return next((loss for loss in losses if loss is not None), None)


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


@cached
def floats_of(op: Operation) -> tuple[Var, ...]:
    """Return the floats that an op reads and that are computed."""
    return tuple(v for _, v in operands(op) if np_dtype(v).kind == "f" and not is_stored(v))


def is_rounded_before(op: Operation, makers: list[Operation]) -> bool:
    """Do the upstream ops round what an op reads, or is it cast from a type other than fp16?"""
    casts = [producer(v, "cast") for o in (op, *makers) for v in floats_of(o)]
    return not all(map(_is_exact, makers)) or any(
        cast is not None and np_dtype(cast.x) not in (np.float16, np.bool_) for cast in casts
    )


def _is_exact(op: Operation) -> bool:
    """Does an op move numbers, or multiply them by a small power of two, so that none is rounded?"""
    _, times = scaled(op) or (None, 0.0)
    return op.op_type in MOVING or (math.frexp(abs(times))[0] == 0.5 and abs(times) <= EXACT_SCALE)


# Differences of means and of squares.


MEAN_OPS = names("reduce_mean avg_pool conv")
"""Ops that take means; a convolution is one if its weights add up to 1."""
SQUARES = names("mul square pow")
"""Ops that may compute x * x, or a product."""
MEAN_WEIGHTS = 1e-2
"""How far from 1 the weights of a mean may sum up: weights of a bell curve are cut off at its ends."""


def _difference_of_means(op: Operation) -> tuple[list[Var], tuple[Operation, ...]]:
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
    if op.op_type != "conv":
        return True
    weight = constant(op.weight) if is_stored(op.weight) else None
    if weight is None or op.inputs.get("bias") is not None or np.min(weight) < 0:
        return False
    sums = np.asarray(weight, np.float64).reshape(len(weight), -1).sum(1)
    return bool(np.all(np.abs(sums - 1) < MEAN_WEIGHTS))


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


@cached
def covariance(op: Operation, bits: int = HALF) -> Loss | None:
    """Match `mean(a b) - mean(a) mean(b)`, unless the pass `centre_variance` subtracts the mean first."""
    values, ops = _difference_of_means(op)
    squares = len(values) == 1 and ops[1].op_type == "reduce_mean"
    if squares or all(np.ptp(interval(v)) <= ALIKE for v in values):
        return None
    why = f"%{op.x.name} and %{op.y.name} are nearly equal where %{values[0].name} is far from 0"
    return Loss(ops, op, why)


WEIGHED = names("mul square pow softmax real_div")
"""Ops between the sum and the values that it weighs, or their weights, which must sum up to 1."""


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


CHOICES = names("reduce_argmin reduce_argmax")
BEFORE_CHOICE = MOVING | {"mul"}
"""Ops between the distances and the choice."""
PROPORTIONAL = 0.02
"""How far, relatively, squared lengths of fp16 rows may be from the offsets that were computed in fp32."""


def _choice_in_words(choice: Operation, distances: Operation) -> str:
    """Say that an argmin or argmax of rounded distances may find another row."""
    kind = choice.op_type.removeprefix("reduce_")
    return f"fp16 rounds %{distances.outputs[0].name}: {kind} may take a neighbour of the nearest row"


def _least_distance(op: Operation, bits: int) -> Loss | None:
    """Match the argmin of `|x|^2 + |c|^2 - 2 x c`, or the argmax of its negative."""
    ops, maker = [op], producer(op.x)
    while maker is not None and maker.op_type in BEFORE_CHOICE and len(floats_of(maker)) == 1:
        ops.append(maker)
        maker = producer(floats_of(maker)[0])
    loss = _distances(maker, bits) if maker is not None and maker.op_type in ("add", "sub") else None
    return None if loss is None else Loss((*ops, *loss.ops), loss.widest, _choice_in_words(op, loss.widest))


def _nearest_row(op: Operation, bits: int) -> Loss | None:
    """Match the argmin of `|c|^2 - 2 x c` over the rows c of a table: the same row is nearest without |x|^2."""
    total = producer(op.x, "linear", "add", "sub")
    if total is None:
        return None
    ops, product, offsets = [op, total], producer(op.x, "linear"), total.inputs.get("bias")
    if product is None:
        offsets, value = (total.x, total.y) if is_stored(total.x) else (total.y, total.x)
        times = None if value.op is None else scaled(value.op)
        product = producer(value if times is None else times.value, "linear", "matmul")
        ops += [maker for maker in (value.op, product) if maker is not None]
    table, numbers = None if product is None else constant(weight(product)), constant(offsets)
    if product is None or table is None or numbers is None or np.ndim(table) != 2:
        return None
    by_rows = product.op_type == "linear" or flag(product, "transpose_y")
    lengths = np.square(table, dtype=np.float64).sum(axis=1 if by_rows else 0)
    numbers = np.asarray(numbers, np.float64).reshape(-1)
    if len(numbers) != len(lengths) or len(lengths) < 2 or not np.all(lengths > 0):
        return None
    ratios = numbers / lengths
    if not np.all(np.abs(ratios / ratios[0] - 1) < PROPORTIONAL):
        return None
    return Loss(tuple(dict.fromkeys(ops)), total, _choice_in_words(op, total))


DISTANCES = MOVING | names("add sub mul real_div reduce_sum reduce_sum_square square pow matmul linear")
"""Ops that a squared distance is written with."""


def _distances(op: Operation, bits: int) -> Loss | None:
    """Match `|x|^2 + |y|^2 - 2 x y`, at the last of its additions."""
    if any(reader.op_type in ("add", "sub") for reader in op.outputs[0].child_ops):
        return None
    ops, pending = [op], [op.x, op.y]
    squared, products = list[Var](), list[Operation]()
    while pending and len(ops) <= MOST:
        maker = producer(pending.pop(), *DISTANCES)
        if maker is None:
            continue
        ops.append(maker)
        if maker.op_type in ("matmul", "linear"):
            products.append(maker)
        elif (x := maker.x if maker.op_type == "reduce_sum_square" else squared_operand(maker)) is not None:
            squared.append(x)
        else:
            pending += floats_of(maker)
    if len(squared) not in (1, 2) or len(products) != 1 or all(np.ptp(interval(x)) <= ALIKE for x in squared):
        return None
    if not any(_reads_source(products[0], x) for x in squared):
        return None
    why = f"%{op.outputs[0].name} is the small difference of large squares and products"
    return Loss(tuple(dict.fromkeys(ops)), op, why)


def _reads_source(product: Operation, source: Var) -> bool:
    """Does a product read a value, perhaps scaled or transposed?"""
    pending = list(floats_of(product))
    for _ in range(8):
        if source in pending:
            return True
        makers = [producer(v, "mul", "transpose", *MOVING) for v in pending]
        pending = [v for m in makers if m is not None for v in floats_of(m)]
    return False


# Differences of exponentials and of other smooth functions.


NEAR = 0.05
"""The exponent up to which exp(x) - 1 keeps fewer than six binary digits of fp16."""
TERMS = 4
"""The most additions of one sum that are searched for terms that cancel."""


def _exp_minus_one(op: Operation, bits: int) -> Loss | None:
    """Match `exp(x) - 1` where x may be near 0, with further terms of the sum; also `exp(x) - 1 - x`."""
    terms, ops = _terms_of(op)
    ones = [sign * one for sign, v in terms if abs(one := number(v) or 0.0) == 1]
    for sign, value in terms:
        grows = exponential(value.op)
        if value.op is None or grows is None or -sign not in ones:
            continue
        low, high = interval(grows.value)
        joined = any(number(v) is not None or v in (value, grows.value) for v in (op.x, op.y))
        if joined and low < NEAR and high > -NEAR and high - low > 2 * ALIKE and not _is_tanh(op):
            why = f"%{op.outputs[0].name} is %{value.name}, an exponential, less 1: it loses its digits near 0"
            return Loss((*ops, value.op), op, why)
    return None


def _terms_of(op: Operation) -> tuple[list[tuple[float, Var]], list[Operation]]:
    """Return (sign, value) for each term of a sum, and the ops that add them."""
    terms, ops, pending = list[tuple[float, Var]](), list[Operation](), [(1.0, op.outputs[0])]
    while pending:
        sign, var = pending.pop()
        maker = producer(var, "add", "sub")
        if maker is None or len(ops) > TERMS:
            terms.append((sign, var))
            continue
        ops.append(maker)
        pending += [(sign, maker.x), (-sign if maker.op_type == "sub" else sign, maker.y)]
    return terms, ops


def _is_tanh(op: Operation) -> bool:
    """Is the difference divided as in a tanh that is written out?"""
    form = (written_exponential(r) for r in consumers(op.outputs[0]))
    return any(f is not None and op in f.ops for f in form)


SMOOTH = names("sqrt log pow rsqrt inverse atan")
"""Ops that give nearly equal results for large neighbouring numbers."""
FAR = 16.0
"""How many times their distance numbers must be for five binary digits to be lost."""


def _difference_of_neighbours(op: Operation, bits: int) -> Loss | None:
    """Match `sqrt(x + c) - sqrt(x)` and the like, where both arguments may be large and near each other."""
    one, other = (producer(v, *SMOOTH) for v in (op.x, op.y))
    if one is None or other is None or one.op_type != other.op_type:
        return None
    if one.op_type == "pow" and number(one.y) != number(other.y):
        return None
    (source, more), (same, less) = _without_added_constant(one.x), _without_added_constant(other.x)
    if source is not same or more == less or magnitude(source) <= FAR * abs(more - less):
        return None
    why = f"%{op.x.name} and %{op.y.name} are nearly equal where %{source.name} is large"
    shifts = (producer(v, "add", "sub") for v in (one.x, other.x))
    return Loss((op, one, other, *(shift for shift in shifts if shift is not None)), op, why)


STEP = 2.0**-9
"""How far, relatively, an fp16 constant may be from the number that was meant."""


def _small_change_of_constant(op: Operation, bits: int) -> Loss | None:
    """Match `sqrt(x + c) - sqrt(c)` and the like, and `log(1 + x)`, where x may be near 0."""
    maker: Operation | None = op
    subtracted = 0.0
    if op.op_type != "log":
        value, constant_term = value_and_number(op) or (None, 0.0)
        maker, subtracted = producer(value, *SMOOTH), constant_term if op.op_type == "sub" else -constant_term
    if maker is None or written_exponential(op) is not None:
        return None
    source, shift = _without_added_constant(maker.x)
    low, high = interval(source)
    is_near = shift > 0 and abs(_smooth_result(maker, shift) - subtracted) <= STEP * max(abs(subtracted), STEP)
    if not is_near or low >= NEAR * shift or high <= -NEAR * shift or high - low <= 2 * ALIKE * shift:
        return None
    why = f"%{op.outputs[0].name} loses its digits where %{source.name} is small beside {shift:g}"
    return Loss(tuple(dict.fromkeys((op, maker, cast(Operation, maker.x.op)))), op, why)


def _smooth_result(op: Operation, x: float) -> float:
    """Return the result of an op of `SMOOTH` for a number above 0; NaN where it is unknown."""
    power = {"sqrt": 0.5, "rsqrt": -0.5, "inverse": -1.0}.get(op.op_type) or number(op.inputs.get("y"))
    if op.op_type in ("log", "atan"):
        return math.log(x) if op.op_type == "log" else math.atan(x)
    return math.nan if power is None else x**power


def _without_added_constant(var: Var) -> tuple[Var, float]:
    """Return a value and the constant that is added to it."""
    maker = producer(var, "add", "sub")
    if maker is not None and (more := number(maker.y)) is not None:
        return maker.x, -more if maker.op_type == "sub" else more
    if maker is not None and maker.op_type == "add" and (more := number(maker.x)) is not None:
        return maker.y, more
    return var, 0.0


SMALL = 0.1
"""The angle below which fp16 loses more than a tenth of 1 - cos(x)."""


def _versed_sine(op: Operation, bits: int) -> Loss | None:
    """Match `1 - cos(x)` where x may be near 0."""
    cosine = producer(op.y, "cos") if number(op.x) == 1 else None
    if cosine is None or interval(cosine.x)[0] > SMALL or interval(cosine.x)[1] < -SMALL:
        return None
    return Loss((op, cosine), op, f"%{op.outputs[0].name} is 1 - cos(%{cosine.x.name}), which is small near 0")


FLAT = 1 / 16
"""The largest power of interest: numbers of fp16 to it lie between 1/2 and 2."""


def _flat_power(op: Operation, bits: int) -> Loss | None:
    """Match `x^p - 1` with a small p, as in a Box-Cox transform: the power is next to 1 for all x of fp16."""
    value, one = value_and_number(op) or (op.x, 0.0)
    power = producer(value, "pow")
    exponent = None if power is None else number(power.y)
    if power is None or exponent is None or abs(exponent) > FLAT or one != (-1 if op.op_type == "add" else 1):
        return None
    why = f"%{op.outputs[0].name} is %{power.x.name} to the power {exponent:.3g} less 1, which is next to 1"
    return Loss((op, power), op, why)


# Probabilities next to 0 or 1, and other numbers next to 1.


def _log_of_complement(op: Operation, bits: int) -> Loss | None:
    """Match a logarithm of 1 - p, p / (1 - p) or p / q, where probabilities may be next to 1 or 0."""
    inner = producer(op.x, "sub", "real_div", "mul")
    if inner is None:
        return None
    ops, shares = [op, inner], list[Operation]()
    pending = list(floats_of(inner))
    while pending and len(ops) <= MOST:
        maker = producer(pending.pop(), "add", "sub", "real_div", "mul", *MOVING, *MAY_BE_NEAR_ONE)
        if maker is None or maker in ops:
            continue
        ops.append(maker)
        if maker.op_type in MAY_BE_NEAR_ONE:
            shares.append(maker)
        else:
            pending += floats_of(maker)
    if not shares or not any(_next_to_an_end(s) for s in shares):
        return None
    if inner.op_type == "mul" and len(shares) < 2:
        return None
    why = f"%{inner.outputs[0].name}, whose logarithm is taken, is made of shares that fp16 rounds to 0 or 1"
    return Loss(tuple(ops), inner, why)


def _next_to_an_end(share: Operation) -> bool:
    """May a probability be next to 0, or (for a sigmoid) next to 1?"""
    low, high = interval(share.outputs[0])
    return low < 1e-3 or (share.op_type != "softmax" and 0.99 < high <= 1.01)


POLES = names("acos asin atanh")
"""Arc functions that are steep at 1 and -1."""
BESIDE = 2.0**-6
"""How near to 1 a number may come before fp16 keeps fewer than three digits of its arc cosine."""
TURNED = MAKERS | names(
    "rsqrt reduce_sum reduce_sum_square reduce_l2_norm reduce_mean maximum minimum clip abs tanh erf sin cos"
)
"""Ops that may compute the cosine between two directions."""


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


def _near_pole(op: Operation, bits: int) -> Loss | None:
    """Match an arc function of a cosine or sine that may be next to 1, where rounding moves the angle much."""
    low, high = interval(op.x)
    end = 1 - BESIDE
    makers = makers_of(op.x, TURNED, bits)
    if (high < end and low > -end) or (bits == HALF and not is_rounded_before(op, makers)):
        return None
    near, steep = fp16.HALF_STEP, math.sqrt(fp16.EPSILON)
    why = f"next to 1 fp16 holds %{op.x.name} to {near:.1g}, and its {op.op_type} to {steep:.1g}"
    return Loss((op, *makers), op, why)


FEW = 2.0**-10
"""The least probability of interest: a product of two such has four binary digits left in fp16."""


def _root_of_probabilities(op: Operation, bits: int) -> Loss | None:
    """Match the root of a product of two probabilities: the product may become 0 where its root is not."""
    product = producer(op.x, "mul")
    shares = [] if product is None else [producer(v, *PROBABILITIES) for v in (product.x, product.y)]
    if product is None or any(s is None or interval(s.outputs[0])[0] >= FEW for s in shares):
        return None
    ops = (op, product, *(s for s in shares if s is not None))
    return Loss(ops, product, f"%{product.outputs[0].name} is a product of two shares, whose root is larger")


# Large numbers whose fraction, angle or place is needed.


LARGE = 64.0
"""Above this, neighbouring numbers of fp16 are 1/16 apart or more: a fraction is off by up to a thirtieth."""


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


ANGLE = 64.0
"""Above this, fp16 holds an angle only to a thirtieth."""


def inexact_angle(op: Operation, bits: int) -> Loss | None:
    """Match the sine or cosine of a large angle, with the ops that compute and round the angle."""
    if (
        op.op_type not in ("sin", "cos")
        or magnitude(op.x, products=1) <= ANGLE
        or producer(op.x, "mod", "atan")
    ):
        return None
    makers = makers_of(op.x, MAKERS, bits)
    if bits == HALF and not is_rounded_before(op, makers):
        return None
    return Loss(
        (op, *makers), op, f"above {ANGLE:g} fp16 holds the angle %{op.x.name} to {ANGLE * fp16.HALF_STEP:.2g}"
    )


LONG_SIDE = 512
"""Pixels of a side from which on a point in [-1, 1] lies a sixteenth of a pixel off in fp16. A choice."""


def inexact_points(op: Operation, bits: int) -> Loss | None:
    """Match points between -1 and 1 in a large image, with the ops that compute and round them."""
    sides = [n for n in op.x.shape[-2:] if isinstance(n, int)]
    mode = str(constant(op.inputs.get("coordinates_mode")))
    if mode != "normalized_minus_one_to_one" or max(sides, default=0) < LONG_SIDE:
        return None
    makers = makers_of(op.coordinates, MAKERS, bits)
    if bits == HALF and not is_rounded_before(op, makers):
        return None
    why = f"%{op.coordinates.name} lies up to {pixels_off(op):.2g} pixels off in an image of {max(sides)}"
    return Loss((op, *makers), op, why)


def pixels_off(op: Operation) -> float:
    """Return how many pixels a point of a resample lies off in fp16, along the longest side."""
    sides = [n for n in op.x.shape[-2:] if isinstance(n, int)]
    return max(sides) / 4 * fp16.HALF_STEP  # half of the steps between 0.5 and 1


# Integers above 2048.


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


def _moved_from(var: Var, bits: int) -> tuple[Var, list[Operation]]:
    """Return the value before ops that move numbers, and these ops."""
    ops = list[Operation]()
    while (maker := producer(var, *(MOVING | CARRIERS) - {"cast"})) is not None and computes_in(maker, bits):
        ops.append(maker)
        var = maker.x
    return var, ops


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


def _running_count(op: Operation, bits: int) -> Loss | None:
    """Match a running sum that may pass 2048, above which fp16 skips integers."""
    if magnitude(op.outputs[0]) <= fp16.LAST_INTEGER:
        return None
    return Loss(
        (op,), op, f"above {fp16.LAST_INTEGER:.0f} the running sum %{op.outputs[0].name} skips integers"
    )


HANDS_ON = MOVING | names("add sub mul maximum minimum clip")
"""Ops between a count and the cast to an integer."""


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


# Sums of reciprocals, whose inverse is wanted.


ADDING = names("reduce_sum reduce_mean add")
"""Ops that add up numbers."""
MEANS = ADDING | names("mul real_div inverse")
"""Ops of a harmonic mean."""


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


def _divisor(op: Operation) -> Var | None:
    """Return the divisor of `inverse(x)` or of a number over x; None for other ops."""
    if op.op_type == "inverse":
        return cast(Var, op.x)
    return op.y if op.op_type == "real_div" and number(op.x) is not None else None


RULES: dict[str, tuple[Callable[[Operation, int], Loss | None], ...]] = {
    "sub": (
        _distances,
        covariance,
        _exp_minus_one,
        _difference_of_neighbours,
        _small_change_of_constant,
        _fraction,
        _difference_of_integers,
        _difference_in_running_sum,
        _complement_of_share,
        _versed_sine,
        _weighted_variance,
        _flat_power,
    ),
    "add": (_distances, _exp_minus_one, _small_change_of_constant, _flat_power),
    "log": (_small_change_of_constant, _log_of_complement),
    "mod": (_fraction,),
    "floor_div": (_quotient_of_integers,),
    "cumsum": (_running_count,),
    "cast": (_integer_from_count,),
    "sqrt": (_root_of_probabilities,),
    **dict.fromkeys(CHOICES, (_least_distance, _nearest_row)),
    **dict.fromkeys(POLES, (_near_pole,)),
}
"""Op type -> the rules for forms that end with it, in the order in which they are tried.

A rule gets the op and the bits of its floats, and returns the loss, or None where the op ends no such form.
"""
