"""Replace a softplus, sigmoid, softmax or logsumexp written out with exponentials by its stable form.

Before::

    main(%x: 2x3) {
      %e: 2x3 = exp(x=%x)
      %s: 2x3 = add(x=%e, y=1)
      %y: 2x3 = log(x=%s, epsilon=0)
      return %y
    }

After::

    main(%x: 2x3) {
      %y_fuse_exponential_minimum: 2x3 = minimum(x=%x, y=10)
      %y_fuse_exponential_softplus: 2x3 = softplus(x=%y_fuse_exponential_minimum)
      %y_fuse_exponential_sub: 2x3 = sub(x=%x, y=10)
      %y_fuse_exponential_relu: 2x3 = relu(x=%y_fuse_exponential_sub)
      %y: 2x3 = add(x=%y_fuse_exponential_softplus, y=%y_fuse_exponential_relu)
      return %y
    }

| written out | becomes |
|---|---|
| `log(1 + exp(x))` | `softplus(x)`, or `softplus(min(x, 10)) + max(x - 10, 0)` |
| `1 / (1 + exp(-x))`, `exp(x) / (1 + exp(x))` | `sigmoid(x)`; another numerator is multiplied with it |
| `exp(x) / sum(exp(x))` | `softmax(x)` |
| `log(sum(exp(x)))` | `m + log(sum(exp(x - m)))`, where m is the largest x |
| `log(exp(a) + exp(b))` | `max(a, b) + softplus(-abs(a - b))` |
| `(exp(x) - 1) / (exp(x) + 1)` | `tanh(x / 2)` |
| `sinh(x) / cosh(x)` | `tanh(x)` |
| `log(cosh(x))` | `abs(x) + log(0.5 + exp(-2 abs(x)) / 2)` |
| `log(softmax(x))` | `x - m - log(sum(exp(x - m)))` |
| `log(sigmoid(x))` | `-softplus(-x)` |

The plain softplus is for values that stay below 10.4; above that, engines were reported to give 0. If the
logarithm of a sum has an epsilon, m is at least 0. A number that is added before such a logarithm, or a lower
limit of its operand, is applied to the result.

With `form="digits"`, `1 / (1 + exp(-x))` stays written out, with exponents up to 11, and the logarithm of a
softmax output that is not small is taken directly. This form has more ops. It is for chips whose sigmoid is a
table, and for sums of small logarithms. A recipe takes it where the other form loses digits.

Refuses when the op is none of these forms, when an epsilon in it is larger than the result hides, or when the
largest number was already subtracted before the exponential of a sum.

Why it helps: the exponential overflows in fp16 from 11.09 on: the softplus is then infinite, and 11.09 in the
engine's arithmetic, and exp(x) / (1 + exp(x)) and exp(x) / sum(exp(x)) are NaN (computed by the interpreter).
The new form is right for every x. In exact arithmetic both are the same function, except for an epsilon of
`inverse`, which takes at most 1.1e-4 of the result, and one of `log`, at most 1e-7; the default epsilon of
`log`, 1e-45, is left out, and mattered only below -103 in fp32. What the pass gains in time was not measured.

Grade: checked: that a logarithm or a quotient of exponentials is the op is no identity of polynomials.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb
from anesurgery.checking.lengths import drawn_shape
from anesurgery.facts.written_exponentials import (
    ENDS,
    LOGS_OF_SHARES,
    NO_GUARD,
    WrittenExponential,
    negation_operand,
    written_exponential,
)
from anesurgery.interpret.arithmetic.engine_faults import SOFTPLUS_CLIFF
from anesurgery.regions import formulas

NEAR_ZERO = 30.0
"""With exponents up to here, softmax outputs are far above 1e-37, even over millions of elements."""
MOST_EXPONENT = 11.0
"""The largest exponent of which fp16 holds the exponential."""
LEAST_SHARE = 2.0**-9
"""Softmax outputs from here on have as many digits in fp16 as their logarithms."""
NEAR_ONE = 8.0
"""With exponents up to here, 1 - sigmoid(x) is larger than the rounding of numbers near 1 in fp32."""


@dataclass(frozen=True)
class FuseExponential(Rewrite):
    """`log(1 + exp(x))` becomes `softplus(x)`; sigmoid, softmax and logsumexp become stable too."""

    name = "fuse_exponential"
    mends = True
    kinds = frozenset(ENDS)
    tolerance = an.Tolerance(1e-3)
    tolerates_nonfinite = False
    """exp(x) / (1 + exp(x)) is NaN at infinity, where the sigmoid is 1."""
    form: str = an.option("op", among=("op", "digits"))
    """"op", or "digits" for no loss of them, by more ops."""

    def gentler(self) -> FuseExponential | None:
        """Return the form that loses no digits."""
        return FuseExponential(form="digits") if self.form == "op" else None

    def check(self, m: Match) -> Match | Refusal:
        """Match an op that ends one of the forms."""
        form = written_exponential(m.root)
        if form is None or (self.form == "digits" and _is_held(form)):
            return an.NO_MATCH
        return m.bind(ops=form.ops, form=form)

    def sample(self, m: Match, var: Var, rng: np.random.Generator) -> an.Array | None:
        """Draw exponents near 0 if a logarithm has a guard like the default 1e-45, which decides far from 0."""
        if m.root.op_type != "log" or not 0 < (an.number(m.root.epsilon) or 0.0) <= NO_GUARD:
            return None
        most = NEAR_ONE if m.form.opposite else NEAR_ZERO
        return rng.uniform(-most, most, drawn_shape(var)).astype(an.np_dtype(var))

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the stable form."""
        form: WrittenExponential = m.form
        kind, x = form.op_type, form.exponential.x
        if kind == "softmax":
            value = mb.softmax(x=x, axis=an.ints(m.form.total, "axes")[0])
        elif kind == "reduce_log_sum_exp":
            value = _log_of_sum(mb, m)
        elif kind == "log_add_exp":
            value = _log_of_two(mb, x, form.second)
        elif kind == "log_cosh":
            value = _log_of_cosh(mb, x)
        elif kind in LOGS_OF_SHARES:
            value = _log_of_share(mb, form, self.form == "digits")
        elif kind.startswith("tanh"):
            value = _tanh(mb, form)
        else:
            value = self.softplus_or_sigmoid(mb, form)
        return value

    def softplus_or_sigmoid(self, mb: Builder, form: WrittenExponential) -> Var:
        """Build the op, of the exponent or of its negation, times the numerator."""
        x = _negative(mb, form.exponential.x) if form.opposite else form.exponential.x
        if form.op_type == "softplus":
            value = _softplus(mb, x)
        else:
            value = mb.sigmoid(x=x) if self.form == "op" else _sigmoid(mb, x)
        return value if form.factor is None else mb.mul(x=form.factor, y=value)


def _log_of_sum(mb: Builder, m: Match) -> Var:
    """Build max(x) plus the logarithm of the sum of exp(x - max(x))."""
    x, total = m.form.exponential.x, m.form.total
    axes, keep_dims = an.ints(total, "axes"), an.flag(total, "keep_dims")
    epsilon = float(an.np_dtype(x).type(an.number(m.root.epsilon) or 0.0))
    return formulas.log_sum_exp(mb, x, axes, keep_dims, epsilon if epsilon > NO_GUARD else 0.0)


def _log_of_cosh(mb: Builder, x: Var) -> Var:
    """Build log((exp(x) + exp(-x)) / 2) without log(2), which fp16 rounds, and which cancels near 0."""
    size = mb.abs(x=x)
    share = mb.mul(x=mb.exp(x=mb.mul(x=size, y=-2.0)), y=0.5)
    return mb.add(x=size, y=mb.log(x=mb.add(x=share, y=0.5), epsilon=0.0))


def _log_of_two(mb: Builder, x: Var, y: Any) -> Var:
    """Build the logarithm of exp(x) + exp(y)."""
    apart = mb.mul(x=mb.abs(x=mb.sub(x=x, y=y)), y=-1.0)
    return mb.add(x=mb.maximum(x=x, y=y), y=_softplus(mb, apart))


def _softplus(mb: Builder, x: Var) -> Var:
    """Build a softplus in a form that no report calls wrong for the range of x."""
    below = an.intervals.interval(x)[1] < SOFTPLUS_CLIFF
    return mb.softplus(x=x) if below else formulas.safe_softplus(mb, x)


def _negative(mb: Builder, x: Var) -> Var:
    """Build -x; if x is a negation itself, return its operand."""
    source = negation_operand(x)
    return mb.mul(x=x, y=-1.0) if source is None else source


def _tanh(mb: Builder, form: WrittenExponential) -> Var:
    """Build the tanh of the exponent, or of half of it."""
    x = form.exponential.x
    if form.op_type == "tanh_of_half":
        x = mb.mul(x=x, y=-0.5 if form.opposite else 0.5)
    return mb.tanh(x=x)


def _is_held(form: WrittenExponential) -> bool:
    """Does fp16 hold a form as it is written: a sigmoid without overflow, or a logarithm of no small share?"""
    if form.op_type == "log_softmax":
        return form.clips and form.guard >= LEAST_SHARE
    return form.op_type == "sigmoid" and an.intervals.interval(form.exponential.x)[1] <= MOST_EXPONENT


def _sigmoid(mb: Builder, x: Var) -> Var:
    """Build exp(min(x, 0)) / (1 + exp(-|x|)), which is the sigmoid of x; no exponential is above 1."""
    share = mb.exp(x=mb.minimum(x=x, y=0.0))
    return mb.real_div(x=share, y=mb.add(x=mb.exp(x=_negative(mb, mb.abs(x=x))), y=1.0))


def _log_of_share(mb: Builder, form: WrittenExponential, digits: bool) -> Var:
    """Build the logarithm of a softmax or sigmoid from its exponents, with the effect of its guard."""
    x = form.exponential.x
    if form.op_type == "log_softmax":
        share = _log_softmax(mb, x, int(an.number(form.exponential.axis) or 0))
        share = _or_logarithm(mb, form.exponential.outputs[0], share) if digits else share
    else:
        share = mb.mul(x=_softplus(mb, x if form.opposite else _negative(mb, x)), y=-1.0)
    if not form.guard:
        return share
    if form.clips:
        return mb.maximum(x=share, y=math.log(form.guard))
    return _log_of_two(mb, share, math.log(form.guard))


def _or_logarithm(mb: Builder, share: Var, value: Var) -> Var:
    """Build the logarithm of a share if the share is not small, and `value` otherwise."""
    logarithm = mb.log(x=mb.maximum(x=share, y=LEAST_SHARE), epsilon=0.0)
    return mb.select(cond=mb.greater(x=share, y=LEAST_SHARE), a=logarithm, b=value)


def _log_softmax(mb: Builder, x: Var, axis: int) -> Var:
    """Build x - max(x), less the logarithm of the sum of the exponentials of that."""
    shifted = mb.sub(x=x, y=mb.reduce_max(x=x, axes=[axis], keep_dims=True))
    total = mb.reduce_sum(x=mb.exp(x=shifted), axes=[axis], keep_dims=True)
    return mb.sub(x=shifted, y=mb.log(x=total, epsilon=0.0))


@an.example((2, 3))
def example(x: Var) -> Var:
    """The softplus of six numbers, written out."""
    more = mb.add(x=mb.exp(x=x, name="e"), y=np.float32(1), name="s")
    return mb.log(x=more, epsilon=np.float32(0), name="y")
