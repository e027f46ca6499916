"""Products whose sums or operands leave the range of fp16 or of the engine."""

from __future__ import annotations

import math

import numpy as np

from anesurgery import fp16
from anesurgery.facts.attention import attention_of
from anesurgery.mil import Maker, Operation, Var, constant, is_compressed, is_stored, np_dtype, producer
from anesurgery.numeric.hazard import Found, Hazard, Size
from anesurgery.ops import PRODUCTS
from anesurgery.regions.small_builds import again
from anesurgery.semantics.intervals import interval, largest_score, magnitude, product
from anesurgery.semantics.reading import axes_of, axis_of, flag, number, scaled, weight


def _weighted(op: Operation) -> Found | str | None:
    stored = weight(op)
    if stored is None or np_dtype(stored) != np.float16:
        return None
    if math.isinf(most := product(op)):
        return f"a sum reaches at most {most:g}; the ceiling is {fp16.CEILING:g}"
    places = {n: v for n, v in op.inputs.items() if v is stored or (n == "bias" and v is not None)}
    shift = 1 + math.floor(math.log2(most / fp16.CEILING)) if most else 0
    return Found(op, weight=stored, places=places, most=most, shift=shift)


def _loses_digits(at: Found) -> str:
    """A weight that fp16 holds in full may become subnormal."""
    if any(constant(v) is None or is_compressed(v) for v in at.places.values()):
        return f"%{at.weight.name} is compressed, or no constant"
    for name, var in at.places.items():
        size = np.abs(np.asarray(constant(var), np.float64))
        if lost := int(np.sum((size > 0) & (size < fp16.NORMAL * 2**at.shift))):
            return f"{lost} numbers of {name} would lose digits by 2^-{at.shift}"
    return ""


def _with_smaller_weights(mb: Maker, at: Found) -> Var:
    values = {n: np.asarray(constant(v)) * np.float16(2.0**-at.shift) for n, v in at.places.items()}
    return mb.mul(x=again(mb, at.op, **values), y=2.0**at.shift)


SUM = Hazard(
    PRODUCTS,
    _weighted,
    "for some input a partial sum reaches {most:.3g}; the ceiling is 32768",
    _with_smaller_weights,
    reach=lambda at, size: at.most,
    limit=math.nextafter(fp16.CEILING, 0),
    safe="a sum reaches at most {most:g}; the ceiling is 32768",
    unable=_loses_digits,
)


SMALL = 0.05
"""A factor below this is shared by both sides, lest one becomes subnormal; that of a head of 400 is 0.05."""


def _scaled_product(op: Operation) -> Found | str | None:
    value, times = scaled(op) or (None, 0.0)
    inner = producer(value, "matmul")
    if inner is None or is_stored(inner.x) or is_stored(inner.y):
        return None
    if not 0 < abs(times) < 1:
        return f"the scores are multiplied by {times:g}, and do not become smaller"
    what = "sums" if attention_of(inner) is None else "scores"
    return Found(op, inner, product=inner, times=times, size=abs(times), what=what)


def _of_smaller_sides(mb: Maker, at: Found) -> Var:
    """The side that has fewer numbers is scaled, or both, one by a power of two."""
    sides, factors = (at.product.x, at.product.y), [at.times, 1.0]
    if at.what == "sums" and at.size < SMALL:
        half = 2.0 ** round(math.log2(at.size) / 2)
        factors = [half, at.times / half]
    elif math.prod(sides[0].shape) > math.prod(sides[1].shape):
        factors.reverse()
    x, y = (v if f == 1 else mb.mul(x=v, y=f) for v, f in zip(sides, factors, strict=True))
    return again(mb, at.product, x=x, y=y)


SCORES = Hazard(
    frozenset({"mul", "real_div"}),
    _scaled_product,
    "the {at.what} are multiplied by {at.size:.4g} only after the product (%{at.out.name})",
    _of_smaller_sides,
    reach=lambda at, size: largest_score(at.product, fp16.CEILING),
    limit=math.nextafter(fp16.CEILING, 0),
    safe="the scores are at most {most:g}, below 32768",
    idle=True,
)


UNKNOWN = 2048.0
"""The assumed size of an unbounded value, as in `facts.overflow_regions`."""


def _multiplied_scores(op: Operation) -> Found | str | None:
    """A softmax of what a number makes larger, unless the largest of each row was taken away before."""
    value, times = (None, 0.0) if op.x.op is None else scaled(op.x.op) or (None, 0.0)
    if value is None or abs(times) <= 1:
        return None
    less = producer(value, "sub")
    end = None if less is None else producer(less.y, "reduce_max" if times > 0 else "reduce_min")
    if less is not None and end is not None and end.x is less.x and axes_of(end) == [axis_of(op)]:
        return f"%{op.x.name} is {times:g} times %{value.name}, and does not overflow"
    return Found(op, op.x.op, value=value, times=times, bound=fp16.LARGEST / abs(times))


def _reached_scores(at: Found, size: Size) -> float:
    most = magnitude(at.value, products=1)
    return min(interval(at.op.x)[1], abs(at.times) * (UNKNOWN if math.isinf(most) else most))


def _less_the_largest(mb: Maker, at: Found) -> Var:
    """The largest of `c x` is that of x, or the smallest where c is negative."""
    axis = axis_of(at.op)
    end = (mb.reduce_max if at.times > 0 else mb.reduce_min)(x=at.value, axes=[axis], keep_dims=True)
    return mb.softmax(x=mb.mul(x=mb.sub(x=at.value, y=end), y=at.times), axis=axis)


LARGE_SCORES = Hazard(
    frozenset({"softmax"}),
    _multiplied_scores,
    "%{at.op.x.name} is {at.times:.4g} times %{at.value.name}, and overflows above {at.bound:.3g}",
    _less_the_largest,
    reach=_reached_scores,
    limit=fp16.LARGEST,
    safe="%{at.op.x.name} is {at.times:g} times %{at.value.name}, and does not overflow",
    unable=lambda at: (
        "" if at.value.shape == at.op.x.shape else f"%{at.value.name} has another shape than the scores"
    ),
    idle=True,
)


KEYS = 2048
"""Half of the keys over which such a product was measured to be wrong: others may be wrong somewhat earlier."""
FACTOR = 64.0
"""With which a product was 0.06 % off on the engine, and 3.95 % without."""


def _shared_values(op: Operation) -> Found | None:
    shares = producer(op.x, "softmax")
    static = shares is not None and isinstance(op.x.shape[-1], int) and not is_stored(op.y)
    return Found(op, shares, shares=shares, keys=op.x.shape[-1], each=1 / op.x.shape[-1]) if static else None


def _along_another_axis(at: Found) -> str:
    along = not flag(at.op, "transpose_x") and number(at.shares.axis) in (-1, at.op.x.rank - 1)
    return "" if along else "the softmax is not over the axis that is summed"


SHARES = Hazard(
    frozenset({"matmul"}),
    _shared_values,
    "the weights %{at.op.x.name} of {at.keys} keys are about {at.each:.1g} each",
    lambda mb, at: mb.mul(x=again(mb, at.op, x=mb.mul(x=at.op.x, y=FACTOR)), y=1 / FACTOR),
    reach=lambda at, size: at.keys,
    limit=KEYS - 1,
    safe="{at.keys} keys, below 2048",
    unable=_along_another_axis,
)


def _quantized_again(op: Operation) -> Found | None:
    product = producer(op.input, "mul")
    if product is None or not any(producer(v, "dequantize") for v in (product.x, product.y)):
        return None
    return Found(op, product, product=product)


def _clipped_to_codes(mb: Maker, at: Found) -> Var:
    codes, scale = np.iinfo(np_dtype(at.out)), number(at.op.scale) or 0.0
    zero = number(at.op.inputs.get("zero_point")) or 0.0
    low, high = ((code - zero) * scale for code in (codes.min, codes.max))
    return again(mb, at.op, input=mb.clip(x=again(mb, at.product), alpha=low, beta=high))


def _of_channels(at: Found) -> str:
    point = at.op.inputs.get("zero_point")
    single = number(at.op.scale) is not None and (point is None or number(point) is not None)
    return "" if single else "the product is quantized by a scale for each channel"


QUANTIZED = Hazard(
    frozenset({"quantize"}),
    _quantized_again,
    "%{at.product.outputs[0].name} has a quantized factor, and is quantized by another scale",
    _clipped_to_codes,
    unable=_of_channels,
    half=False,
)
