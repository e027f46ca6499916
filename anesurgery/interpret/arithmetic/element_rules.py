"""The arithmetic over prime fields (`algebraic`): its functions, and how it computes elementwise ops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.interpret.arithmetic import field
from anesurgery.interpret.arithmetic.field import Image, add, divide, multiply, negated
from anesurgery.interpret.arithmetic.precision import narrows
from anesurgery.interpret.arithmetic.symbolic import LARGEST, Rule, Symbolic
from anesurgery.mil import Operation, np_dtype, operands
from anesurgery.ops import JOINING, MOVING, PADDING, names


class Algebraic(Symbolic):
    """Elements are residues; sums, products and quotients are exact, and other functions random ones.

    `algebraic` joins the rules of all ops.
    """

    name = "field"
    span: Callable[[Any], tuple[float, float]] = staticmethod(lambda var: (-math.inf, math.inf))
    """Returns the range of an integer value, if the caller knows one."""

    def __init__(self, seed: int = 0, largest: int = LARGEST) -> None:
        super().__init__(seed, largest)
        self.primes = field.drawn(seed)
        self._whole: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        """Names of integers that were rounded, sorted, and the integers."""

    def within(self, var: Any, limit: float) -> bool:
        """Are all integers of a value known to be at most this large?"""
        low, high = self.span(var)
        return -limit <= low and high <= limit

    def lift(self, value: Any) -> Image:
        """Return the residues of constants."""
        return Image(field.exact(self.primes, value), self.primes, 0)

    def rounded(self, dtype: str, x: Image) -> Image:
        """Return integers as floats that may not hold them: a random function that can be undone."""
        image = self.function(("rounded", dtype), x)
        order = field.packed(image).reshape(-1).sort()
        self._whole.append((order.values, [v.reshape(-1)[order.indices] for v in x.lanes]))
        return image

    def unrounded(self, x: Any) -> Any:
        """Return the integers that a value was rounded from, if all elements were; else the value itself."""
        if not isinstance(x, Image) or not x.numel():
            return x
        names = field.packed(x)
        for rounded, lanes in self._whole:
            at = torch.searchsorted(rounded, names.reshape(-1)).clamp(max=len(rounded) - 1).reshape(names.shape)
            if torch.equal(rounded[at], names):
                return Image([v[at] for v in lanes], x.primes, x.degree)
        return x

    def even(self, name: Any, x: Image) -> Image:
        """Apply a random function with f(-x) = f(x)."""
        return self.function(name, field.signed(x)[0])

    def odd(self, name: Any, x: Image) -> Image:
        """Apply a random function with f(-x) = -f(x)."""
        positive, negative = field.signed(x)
        return field.with_sign(self.function(name, positive), negative)

    def choose(self, cond: Image, x: Image, y: Image) -> Image:
        """Return x where the condition is 1, y where it is 0: y + condition * (x - y)."""
        return add(y, multiply(cond, add(x, negated(y))))

    def minus(self, x: Any, y: Any) -> Image:
        """Return x - y."""
        return add(self.image(x), negated(self.image(y)))

    def times(self, x: Any, y: Any) -> Image:
        """Return x * y."""
        return multiply(self.image(x), self.image(y))

    def plus(self, x: Any, y: Any) -> Image:
        """Return x + y."""
        return add(self.image(x), self.image(y))

    def larger(self, x: Any, y: Any) -> Image:
        """Return the larger one: (x + y + |x - y|) / 2."""
        return self.shared(add(self.plus(x, y), self.even("abs", self.minus(x, y))), 2)

    def smaller(self, x: Any, y: Any) -> Image:
        """Return the smaller one: (x + y - |x - y|) / 2."""
        return self.shared(add(self.plus(x, y), negated(self.even("abs", self.minus(x, y)))), 2)

    def shared(self, x: Image, counts: Any) -> Image:
        """Return x / counts, for whole numbers above 0, which do not make it a fraction."""
        return Image(divide(x, self.lift(counts)).lanes, x.primes, x.degree, x.fraction)

    def root(self, x: Image) -> Image:
        """Return the square root, a random function."""
        return self.function("sqrt", x)

    def mean(self, x: Image, axes: list[int]) -> Image:
        """Return the mean over some axes, which stay with length 1."""
        count = math.prod(x.shape[a] for a in axes)
        return self.shared(field.summed(x, axes, True), count)

    def normalized(self, x: Image, axes: list[int], epsilon: float) -> Image:
        """Return x with zero mean and unit variance over some axes."""
        centered = add(x, negated(self.mean(x, axes)))
        variance = self.mean(multiply(centered, centered), axes)
        return divide(centered, self.root(self.plus(variance, float(epsilon))))


MOST_FACTORS = 8
"""The largest whole exponent that is computed as a product. Models raise to 2, 3 and 4; a larger one raises the
degree, which makes a proof weaker."""


WHOLE = {2: fp16.LAST_INTEGER, 4: 2.0**24, 8: 2.0**53}
"""Bytes of a float -> the largest integer up to which it holds all."""
AROUND = names("add sub mul square pow reduce_sum reduce_prod reduce_sum_square cumsum matmul linear einsum")
"""Ops whose integers may wrap around."""
PASSING_ON = (
    MOVING | JOINING | PADDING | names("cast select slice_update scatter scatter_nd scatter_along_axis")
)
"""Ops that pass on integers which wrapped around before."""


def _in_order(rule: Rule) -> Rule:
    """Return a rule that depends on the order of numbers, for all but integers that may have wrapped around."""

    def ruled(a: Algebraic, op: Operation, **arguments: Any) -> Any:
        if any(_wraps(a, v) for _, v in operands(op)):
            return a.uninterpreted(op, arguments)
        return rule(a, op, **arguments)

    return ruled


def _compared(rule: Rule) -> Rule:
    """Return a rule that compares rounded integers as the integers: rounding keeps their order."""

    def ruled(a: Algebraic, op: Operation, x: Any, y: Any) -> Any:
        limit = WHOLE.get(np_dtype(op.inputs["x"]).itemsize, 0.0) - 1
        if np_dtype(op.inputs["x"]).kind == "f":
            first = a.unrounded(x) if a.within(op.inputs["y"], limit) else x
            second = a.unrounded(y) if a.within(op.inputs["x"], limit) else y
            x, y = first, second
        return rule(a, op, x=x, y=y)

    return _in_order(ruled)


def absolute(a: Algebraic, var: Any, x: Image) -> Image:
    """Return the absolute value. For integers that may have wrapped around it is a function of its own."""
    return a.even("abs of wrapped" if _wraps(a, var) else "abs", x)


def _wraps(a: Algebraic, var: Any) -> bool:
    """May integers of a value have wrapped around?"""
    if var.op is None or np_dtype(var).kind not in "iu" or a.within(var, np.iinfo(np_dtype(var)).max):
        return False
    if var.op.op_type in AROUND:
        return True
    return var.op.op_type in PASSING_ON and any(_wraps(a, v) for _, v in operands(var.op))


def _real_div(a: Algebraic, op: Operation, x: Any, y: Any) -> Image:
    """Return x / y; division by a constant does not make it a fraction."""
    if np_dtype(op.inputs["x"]).kind != "f":
        return a.uninterpreted(op, {"x": x, "y": y})
    quotient = divide(a.image(x), a.image(y))
    if isinstance(y, Image):
        return quotient
    return Image(quotient.lanes, a.primes, a.image(x).degree, a.image(x).fraction)


def _pow(a: Algebraic, op: Operation, x: Any, y: Any) -> Image:
    """Return a power with a small whole exponent, or a square root; else a random function."""
    exponent = None
    if not isinstance(y, Image) and bool((y == y.reshape(-1)[0]).all()):
        exponent = float(y.reshape(-1)[0])
    if exponent == 0.5:
        return a.root(a.image(x))
    if exponent is None or exponent % 1 or not 1 <= exponent <= MOST_FACTORS:
        return a.uninterpreted(op, {"x": x, "y": y})
    power = a.image(x)
    for _ in range(int(exponent) - 1):
        power = a.times(power, x)
    return power


def _affine(a: Algebraic, op: Operation, x: Any, alpha: float, beta: float = 0.0) -> Image:
    return a.plus(a.times(x, float(alpha)), float(beta))


def _odd(a: Algebraic, op: Operation, x: Any) -> Image:
    return a.odd(op.op_type, a.image(x))


def _clip(a: Algebraic, op: Operation, x: Any, alpha: float, beta: float) -> Image:
    clipped = a.image(x) if math.isinf(alpha) else a.larger(x, float(alpha))
    return clipped if math.isinf(beta) else a.smaller(clipped, float(beta))


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


def _softplus_parametric(a: Algebraic, op: Operation, x: Any, alpha: Any, beta: Any) -> Image:
    """Compute alpha * softplus(beta * x), with one alpha and beta for each channel (axis 1)."""
    image = a.image(x)
    each = (-1, *[1] * (image.ndim - 2))
    factor, steep = (a.image(v).map(lambda t: t.reshape(each)) for v in (alpha, beta))
    return a.times(factor, a.function("softplus", a.times(image, steep)))


RULES: dict[str, Rule] = {
    "add": lambda a, op, x, y: a.plus(x, y),
    "sub": lambda a, op, x, y: a.minus(x, y),
    "mul": lambda a, op, x, y: a.times(x, y),
    "real_div": _real_div,
    "square": lambda a, op, x: a.times(x, x),
    "inverse": lambda a, op, x, epsilon=1e-4: divide(a.lift(1.0), a.plus(x, float(epsilon))),
    "log": lambda a, op, x, epsilon=1e-45: a.function("log", a.plus(x, float(epsilon))),
    "sqrt": lambda a, op, x: a.root(a.image(x)),
    "rsqrt": lambda a, op, x, epsilon=1e-12: divide(a.lift(1.0), a.root(a.plus(x, float(epsilon)))),
    "pow": _pow,
    "abs": lambda a, op, x: absolute(a, op.inputs["x"], a.image(x)),
    "relu": _in_order(lambda a, op, x: a.larger(x, 0)),
    "relu6": _in_order(lambda a, op, x: a.smaller(a.larger(x, 0), 6)),
    "maximum": _in_order(lambda a, op, x, y: a.larger(x, y)),
    "minimum": _in_order(lambda a, op, x, y: a.smaller(x, y)),
    "clip": _in_order(_clip),
    "threshold": _in_order(lambda a, op, x, alpha: a.larger(x, float(alpha))),
    "leaky_relu": lambda a, op, x, alpha=0.01: add(a.larger(x, 0), a.times(a.smaller(x, 0), float(alpha))),
    "linear_activation": _affine,
    "sigmoid_hard": lambda a, op, x, alpha=0.2, beta=0.5: a.smaller(
        a.larger(_affine(a, op, x, alpha, beta), 0), 1
    ),
    "silu": lambda a, op, x: a.times(x, a.function("sigmoid", x)),
    # by the names under which the rules of other ops know these functions
    **dict.fromkeys(("exp", "sigmoid", "softplus"), lambda a, op, x: a.function(op.op_type, x)),
    **dict.fromkeys(("cos", "cosh"), lambda a, op, x: a.even(op.op_type, a.image(x))),
    "softplus_parametric": _softplus_parametric,
    "scaled_tanh": lambda a, op, x, alpha=1.0, beta=1.0: a.times(
        a.odd("tanh", a.times(x, float(beta))), float(alpha)
    ),
    "softsign": lambda a, op, x: divide(a.image(x), a.plus(a.even("abs", a.image(x)), 1)),
    **dict.fromkeys(("tanh", "erf", "sin", "sinh", "tan", "atan", "asin", "atanh"), _odd),
    "sign": _in_order(_odd),
    "equal": _compared(lambda a, op, x, y: a.even("equal", a.minus(x, y))),
    "not_equal": _compared(lambda a, op, x, y: a.minus(1, a.even("equal", a.minus(x, y)))),
    "greater": _compared(lambda a, op, x, y: a.function("positive", a.minus(x, y))),
    "less": _compared(lambda a, op, x, y: a.function("positive", a.minus(y, x))),
    "greater_equal": _compared(lambda a, op, x, y: a.minus(1, a.function("positive", a.minus(y, x)))),
    "less_equal": _compared(lambda a, op, x, y: a.minus(1, a.function("positive", a.minus(x, y)))),
    "logical_not": lambda a, op, x: a.minus(1, x),
    "logical_and": lambda a, op, x, y: a.times(x, y),
    "logical_or": lambda a, op, x, y: a.minus(a.plus(x, y), a.times(x, y)),
    "logical_xor": lambda a, op, x, y: a.minus(a.plus(x, y), a.times(2, a.times(x, y))),
    "cast": _cast,
}
"""Op type -> computes it: (arithmetic, op, operands by name) -> the result."""
