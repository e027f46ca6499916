"""Write a remainder, product, running sum, one-hot row or parametric softplus with ops of the Neural Engine.

Before::

    main(%x: 2x3) {
      %p: 1x3 = reduce_prod(x=%x, axes=[0], keep_dims=True)
      %y: 1x3 = cumsum(x=%p, axis=1)
      return %y
    }

After::

    main(%x: 2x3) {
      %p_decompose_ops_split_0: 1x3, %p_decompose_ops_split_1: 1x3 = split(x=%x, num_splits=2, axis=0)
      %p: 1x3 = mul(x=%p_decompose_ops_split_0, y=%p_decompose_ops_split_1)
      %y: 1x3 = matmul(x=%p, y=const<3x3>)
      return %y
    }

| op | becomes |
|---|---|
| `mod` | x - floor(x / y) * y, of the magnitude and with the sign of x if x may be negative: -5 mod 3 is -2 |
| `reduce_prod` | slices, multiplied one after another |
| `cumsum` | a product with a triangular matrix of ones |
| `one_hot` | a comparison with 0, 1, 2, ... |
| `softplus_parametric` | alpha * softplus(beta * x) |

Refuses:

* a symbolic length;
* a `mod` whose divisor is not a constant power of two from 2^-15 to 2^14, unless both sides are whole numbers
  up to 2048: otherwise rounding may give the divisor itself;
* a product of more than `most_factors` numbers;
* a running sum of more than `most_length` numbers: the triangular matrix grows with the square;
* more than 2048 classes, which fp16 cannot count;
* a softplus whose factors are not constants;
* running sums and remainders of integers: `integers_as_floats` converts them to floats first.

Why it helps: none of these ops was placed on the ANE in any form (measured through Core ML on M4, macOS 27),
while the ops that replace them were; `softplus_parametric`, to which `F.softplus(x, beta=2)` of four axes is
converted, was not tried. For inputs from 10.4 on some engines were reported to give 0 for softplus, which
`replace_faulty_ops` repairs afterwards; of `softplus_parametric` nothing was reported. What the pass gains in
time was not measured. A running sum as a product needs finite numbers: 0 times infinity is NaN.

Grade: proved.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb
from anesurgery.facts import whole_numbers
from anesurgery.semantics.intervals import magnitude


def _is_power_of_two(number: float) -> bool:
    return math.frexp(number)[0] == 0.5


def _why_no_remainder(step: DecomposeOps, op: an.Operation) -> str:
    if an.np_dtype(op.x).kind != "f":
        return "it is computed of integers; integers_as_floats makes them floats where that is exact"
    by = an.number(op.y)
    if by is None or by <= 0:
        return f"the divisor %{op.y.name} is no positive constant"
    if _is_power_of_two(by):
        return "" if 2**-15 <= by <= 2**14 else f"1 / {by:g} is not among the normal numbers of fp16"
    if not (by.is_integer() and whole_numbers.is_whole(op.x)):
        return f"the divisor is {by:g}, no power of two, and %{op.x.name} may be no whole number"
    most, limit = max(magnitude(op.x), by), an.fp16.LAST_INTEGER
    return "" if most <= limit else f"%{op.x.name} reaches {most:g}, above {limit}"


def _remainder(mb: Builder, op: an.Operation) -> Var:
    """Build the remainder of the magnitude, with the sign of x if x may be negative."""
    by, signed = an.np_dtype(op.x).type(an.number(op.y)), not whole_numbers.never_negative(op.x)
    x = mb.abs(x=op.x) if signed else op.x
    if by < 1:  # x / by may overflow; the whole part of x is a multiple of by
        x = mb.sub(x=x, y=mb.floor(x=x))
    whole = mb.floor(x=mb.mul(x=x, y=1 / by)) if _is_power_of_two(by) else mb.floor_div(x=x, y=by)
    rest = mb.sub(x=x, y=mb.mul(x=whole, y=by))
    return mb.mul(x=mb.sign(x=op.x), y=rest) if signed else rest


def _why_no_product(step: DecomposeOps, op: an.Operation) -> str:
    count = math.prod(op.x.shape[a] for a in an.reading.axes_of(op))
    if an.np_dtype(op.x).kind != "f":
        return "it multiplies integers"
    return (
        ""
        if 0 < count <= step.most_factors
        else f"it multiplies {count:,} numbers, above {step.most_factors:,}"
    )


def _product(mb: Builder, op: an.Operation) -> Var:
    """Multiply slices along one axis after another, in the order of the op: products of subnormals round."""
    product: Var = op.x
    for axis in sorted(an.reading.axes_of(op), reverse=True):
        if (count := int(product.shape[axis])) > 1:
            first, *rest = mb.split(x=product, num_splits=count, axis=axis)
            for factor in rest:
                first = mb.mul(x=first, y=factor)
            product = first
    if not an.flag(op, "keep_dims"):
        return mb.squeeze(x=product, axes=an.reading.axes_of(op)) if op.x.rank else product
    return product if product is not op.x else mb.identity(x=product)


def _why_no_running_sum(step: DecomposeOps, op: an.Operation) -> str:
    length = int(op.x.shape[int(an.number(op.axis) or 0)])
    if an.np_dtype(op.x).kind != "f":
        return "it is a sum of integers; integers_as_floats makes them floats where that is exact"
    return "" if length <= step.most_length else f"it runs over {length:,} numbers, above {step.most_length:,}"


def _triangle(length: int, exclusive: bool, reverse: bool, dtype: Any) -> an.Array:
    """Return a matrix whose element (i, j) says whether element i is part of the sum at j."""
    i, j = np.ogrid[:length, :length]
    i, j = (j, i) if reverse else (i, j)
    return np.asarray(i < j if exclusive else i <= j, dtype)


def _running_sum(mb: Builder, op: an.Operation) -> Var:
    """Multiply the last axis by a triangle of ones; another axis is transposed there and back."""
    x, axis = op.x, int(an.number(op.axis) or 0) % op.x.rank
    what = (int(x.shape[axis]), an.flag(op, "exclusive"), an.flag(op, "reverse"), an.np_dtype(x))
    ones = mb.shared(("triangle", *what), lambda: _triangle(*what), f"ones_{what[0]}")
    if x.rank == 1:
        row = mb.matmul(x=mb.expand_dims(x=x, axes=[0]), y=ones)
        return mb.squeeze(x=row, axes=[0])
    if axis == x.rank - 1:
        return mb.matmul(x=x, y=ones)
    perm = [a for a in range(x.rank) if a != axis] + [axis]
    product = mb.matmul(x=mb.transpose(x=x, perm=perm), y=ones)
    return mb.transpose(x=product, perm=[int(a) for a in np.argsort(perm)])


def _why_no_classes(step: DecomposeOps, op: an.Operation) -> str:
    size = int(an.constant(op.one_hot_vector_size) or 0)
    if not 0 < size <= an.fp16.LAST_INTEGER:
        return f"it has {size or 'a dynamic number of'} classes; fp16 counts up to {an.fp16.LAST_INTEGER}"
    if an.np_dtype(op.outputs[0]).kind != "f":
        return "its result is of integers; the ops that read it would still be off the engine"
    on, off = _values(op)
    if on is None or off is None:
        return "its values are dynamic"
    return "" if (on - off) + off == on else f"{on:g} - {off:g} is rounded"


def _values(op: an.Operation) -> tuple[Any, Any]:
    """What stands at the index and elsewhere, in the type of the result; None where it is dynamic."""
    both = (an.number(op.on_value), an.number(op.off_value))
    on, off = (None if v is None else an.np_dtype(op.outputs[0]).type(v) for v in both)
    return on, off


def _classes(mb: Builder, op: an.Operation) -> Var:
    """Compare the index with the numbers of all classes along the new axis."""
    out, size = op.outputs[0], int(an.constant(op.one_hot_vector_size))
    axis, dtype = int(an.constant(op.axis)) % out.rank, an.np_dtype(out)
    place = [-1 if a == axis else 1 for a in range(out.rank)]
    half = np.float16
    at = mb.expand_dims(x=mb.cast(x=op.indices, dtype="fp16"), axes=[axis])
    here = mb.equal(x=at, y=np.arange(size, dtype=half).reshape(place))
    on, off = _values(op)
    classes: Var = mb.cast(x=here, dtype="fp16" if dtype == half else "fp32")
    classes = classes if on - off == 1 else mb.mul(x=classes, y=on - off)
    return mb.add(x=classes, y=off) if off else classes


def _why_no_factors(step: DecomposeOps, op: an.Operation) -> str:
    dynamic = [v.name for v in (op.alpha, op.beta) if an.constant(v) is None]
    return f"%{dynamic[0]} is not a constant" if dynamic else ""


def _softplus(mb: Builder, op: an.Operation) -> Var:
    """Multiply by factors for each channel, or by one for all."""

    def factors(name: str) -> Any:
        values = np.asarray(an.constant(op.inputs[name])).astype(an.np_dtype(op.x))
        alike = bool((values == values.flat[0]).all())
        return values.flat[0] if alike else values.reshape(-1, *[1] * (op.x.rank - 2))

    return mb.mul(x=mb.softplus(x=mb.mul(x=op.x, y=factors("beta"))), y=factors("alpha"))


class _Form(NamedTuple):
    """How an op is written with others."""

    why_not: Callable[[DecomposeOps, an.Operation], str]
    """Why an op has no such form; "" if it has."""
    build: Callable[[Builder, an.Operation], Var]


FORMS = {
    "mod": _Form(_why_no_remainder, _remainder),
    "reduce_prod": _Form(_why_no_product, _product),
    "cumsum": _Form(_why_no_running_sum, _running_sum),
    "one_hot": _Form(_why_no_classes, _classes),
    "softplus_parametric": _Form(_why_no_factors, _softplus),
}


@dataclass(frozen=True)
class DecomposeOps(Rewrite):
    """`mod`, `reduce_prod`, `cumsum`, `one_hot` and `softplus_parametric` in ops that the engine has."""

    name = "decompose_ops"
    kinds = frozenset(FORMS)
    tolerance = an.REASSOCIATED
    tolerates_nonfinite = False
    """A running sum by a product multiplies by 0 what may be infinite; beta * x may be infinite."""
    most_factors: int = an.option(32, least=1)
    """Most numbers that a `reduce_prod` multiplies."""
    most_length: int = an.option(1024, least=1)
    """Longest running sum."""

    def check(self, m: Match) -> Match | Refusal:
        """Match an op of static shape that has a form."""
        op = m.root
        read = op.inputs.get("x") or op.indices
        if an.static_shape(op.outputs[0]) is None or an.static_shape(read) is None:
            return Refusal(f"%{op.outputs[0].name} has the symbolic shape {tuple(op.outputs[0].shape)}", op)
        reason = FORMS[op.op_type].why_not(self, op)
        return Refusal(reason, op) if reason else m

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the form of the op."""
        return FORMS[m.root.op_type].build(mb, m.root)


@an.example((2, 3))
def example(x: Var) -> Var:
    """A product of two numbers, and a running sum of three."""
    return mb.cumsum(x=mb.reduce_prod(x=x, axes=[0], keep_dims=True, name="p"), axis=1, name="y")
