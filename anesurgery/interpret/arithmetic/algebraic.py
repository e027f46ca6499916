"""The arithmetic that proves identities: values are residues at a random point of prime fields, not floats.

If both sides of an edit are polynomials or quotients of them, and give the same residues at a random point,
they are equal but for a tiny probability (Schwartz, Zippel). Sums, products, quotients and constants, which are
m * 2^e, are exact. relu, clip, max and the like are written with the absolute value, so that their identities
hold. Every other function is a random one: equal arguments give equal results, and nothing else is known of it.

The rules stand in three parts: elementwise ops; products, contractions, reductions, norms and pooling; and
recurrent ops, which are computed step by step. `Algebraic.rules` joins them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.interpret.arithmetic import field, symbolic
from anesurgery.interpret.arithmetic.field import Image, add, divide, joined, multiply, negated, product
from anesurgery.interpret.arithmetic.precision import narrows
from anesurgery.interpret.arithmetic.symbolic import LARGEST, Rule, Symbolic
from anesurgery.interpret.ops.recurrent import BACKWARD
from anesurgery.interpret.ops.windows import AVERAGE, Windows, conv, conv_transpose, counted, pad_axes, windows
from anesurgery.interpret.table import TABLE, Unsupported, ints
from anesurgery.mil import Operation, np_dtype, operands
from anesurgery.ops import JOINING, MOVING, PADDING, REDUCTIONS, names


class Algebraic(Symbolic):
    """Elements are residues; sums, products and quotients are exact, and other functions random ones."""

    name = "field"
    span: Callable[[Any], tuple[float, float]] = staticmethod(lambda var: (-math.inf, math.inf))
    """Returns the range of an integer value, if the caller knows one."""

    def __init__(self, seed: int = 0, largest: int = LARGEST) -> None:
        super().__init__(seed, largest)
        self.primes = field.draw_primes(seed)
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


def _absolute(a: Algebraic, op: Operation, x: Any) -> Image:
    """Return the absolute value. For integers that may have wrapped around it is a function of its own."""
    return a.even("abs of wrapped" if _wraps(a, op.inputs["x"]) else "abs", a.image(x))


def _wraps(a: Algebraic, var: Any) -> bool:
    """May integers of a value have wrapped around?"""
    values = [var]
    for value in values:
        op, dtype = value.op, np_dtype(value)
        if op is None or dtype.kind not in "iu" or a.within(value, np.iinfo(dtype).max):
            continue
        if op.op_type in AROUND:
            return True
        if op.op_type in PASSING_ON:
            values += [v for _, v in operands(op) if v not in values]
    return False


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
    factor, steep = (field.per_channel(a.image(v), image.ndim) for v in (alpha, beta))
    return a.times(factor, a.function("softplus", a.times(image, steep)))


_ELEMENT_RULES: dict[str, Rule] = {
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
    "abs": _absolute,
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


class Axes(NamedTuple):
    """The axes of an einsum of two operands, a letter each."""

    first: str
    second: str
    result: str
    """The axes of the result."""
    inner: str
    """The axes that are summed over, in the order of the first operand."""


def axes_of(equation: str) -> Axes:
    """Return the axes of an equation such as ``ab,bc->ac``.

    Raises:
        Unsupported: another form of an equation.
    """
    left, arrow, out = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    if not arrow or len(parts) != 2 or "." in equation or any(len(set(p)) < len(p) for p in (*parts, out)):
        raise Unsupported(f"einsum {equation!r}")
    inner = "".join(c for c in parts[0] if c in parts[1] and c not in out)
    if set(out) | set(inner) != set(left) - {","}:
        raise Unsupported(f"einsum {equation!r}")
    return Axes(parts[0], parts[1], out, inner)


def _contraction(values: list[Image], equation: str) -> Image:
    """Return the sum of products over named axes of two tensors."""
    axes, (x, y) = axes_of(equation), values
    terms = math.prod(x.shape[axes.first.index(c)] for c in axes.inner)
    return field.bilinear(x, y, lambda v, w: torch.einsum(equation, v, w), terms)


def _one_hot(
    a: Algebraic,
    op: Operation,
    indices: Any,
    one_hot_vector_size: Any,
    axis: int = -1,
    on_value: Any = 1,
    off_value: Any = 0,
) -> Image:
    size = ints(one_hot_vector_size)[0]
    places = a.lift(np.arange(size))
    hit = a.even("equal", a.minus(a.image(indices).map(lambda v: v.unsqueeze(-1)), places))
    image = a.plus(off_value, a.times(hit, a.minus(on_value, off_value)))
    return image.map(lambda v: v.movedim(-1, int(axis)))


def matrices(
    left: Image, right: Image, transpose_x: Any = False, transpose_y: Any = False
) -> tuple[Image, Image]:
    """Return the two sides of a matmul as [..., rows, sum] and [..., sum, columns]."""
    if min(left.ndim, right.ndim) < 2:
        raise Unsupported("a matmul of vectors")
    left = left.map(lambda v: v.transpose(-1, -2)) if transpose_x else left
    return left, right.map(lambda v: v.transpose(-1, -2)) if transpose_y else right


def _linear(a: Algebraic, op: Operation, x: Any, weight: Any, bias: Any = None) -> Image:
    sums = product(a.image(x), a.image(weight).map(lambda v: v.transpose(-1, -2)))
    return sums if bias is None else a.plus(sums, bias)


def _conv(a: Algebraic, op: Operation, x: Any, weight: Any, bias: Any = None, **how: Any) -> Image:
    w = a.image(weight)
    sums = field.bilinear(a.image(x), w, lambda v, u: conv(v, u, **how), math.prod(w.shape[1:]))
    return _with_bias(a, sums, bias)


def _conv_transpose(a: Algebraic, op: Operation, x: Any, weight: Any, bias: Any = None, **how: Any) -> Image:
    w = a.image(weight)
    terms = math.prod([w.shape[0], *w.shape[2:]])
    sums = field.bilinear(a.image(x), w, lambda v, u: conv_transpose(v, u, **how), terms)
    return _with_bias(a, sums, bias)


def _with_bias(a: Algebraic, sums: Image, bias: Any) -> Image:
    if bias is None:
        return sums
    return a.plus(sums, field.per_channel(a.image(bias), sums.ndim))


def _reduced(a: Algebraic, op: Operation, x: Any, axes: Any = None, keep_dims: bool = False) -> Image:
    image = a.image(x)
    chosen, kind = field.axes_or_all(image, axes), op.op_type.removeprefix("reduce_")
    if kind == "mean" and np_dtype(op.inputs["x"]).kind != "f":
        return a.uninterpreted(op, {"x": x, "axes": axes, "keep_dims": keep_dims})
    if kind in ("l2_norm", "sum_square"):
        image = multiply(image, image)
    elif kind == "l1_norm":
        image = _absolute(a, op, image)
    elif kind == "log_sum_exp":
        image = a.function("exp", image)
    reduced = a.mean(image, chosen) if kind == "mean" else field.summed(image, chosen, True)
    if kind == "l2_norm":
        reduced = a.root(reduced)
    elif kind.startswith("log_sum"):
        reduced = a.function("log", reduced)
    return field.without_axes(reduced, chosen, keep_dims)


def _product_along(a: Algebraic, op: Operation, x: Any, axes: Any = None, keep_dims: bool = False) -> Image:
    """Compute the product of the elements along some axes, one factor after the other."""
    image = a.image(x)
    chosen = field.axes_or_all(image, axes)
    for axis in chosen:
        parts = [image.map(lambda v, i=i: v.narrow(axis, i, 1)) for i in range(image.shape[axis])]  # type: ignore[misc]  # noqa: B023
        image = functools.reduce(multiply, parts)
    return field.without_axes(image, chosen, keep_dims)


def _extreme(a: Algebraic, op: Operation, x: Any, axes: Any = None, keep_dims: bool = False) -> Image:
    image = a.image(x)
    return a.function(
        op.op_type, field.summed(a.hashed(image), field.axes_or_all(image, axes), bool(keep_dims))
    )


def _softmax(a: Algebraic, op: Operation, x: Any, axis: int = -1) -> Image:
    e = a.function("exp", x)
    return divide(e, field.summed(e, [int(axis)], True))


def _cumsum(a: Algebraic, op: Operation, **arguments: Any) -> Image:
    x = a.image(arguments.pop("x"))
    sums = x.of_residues(lambda v: TABLE["cumsum"].function(x=v, **arguments))
    sums.degree *= x.numel() if x.fraction else 1
    return sums


def _layer_norm(
    a: Algebraic,
    op: Operation,
    x: Any,
    axes: Any = None,
    gamma: Any = None,
    beta: Any = None,
    epsilon: float = 1e-5,
) -> Image:
    image = a.image(x)
    chosen = field.axes_or_all(image, axes)
    shape = [image.shape[i] if i in chosen else 1 for i in range(image.ndim)]
    return _scaled_and_moved(a, a.normalized(image, sorted(chosen), epsilon), gamma, beta, shape)


def _scaled_and_moved(a: Algebraic, normal: Image, gamma: Any, beta: Any, shape: list[int]) -> Image:
    if gamma is not None:
        normal = multiply(normal, a.image(gamma).map(lambda v: v.reshape(shape)))
    return normal if beta is None else add(normal, a.image(beta).map(lambda v: v.reshape(shape)))


def _batch_norm(
    a: Algebraic,
    op: Operation,
    x: Any,
    mean: Any,
    variance: Any,
    gamma: Any = None,
    beta: Any = None,
    epsilon: float = 1e-5,
) -> Image:
    image = a.image(x)
    shape = [1, -1, *(1,) * (image.ndim - 2)]
    center, width = (a.image(v).map(lambda t: t.reshape(shape)) for v in (mean, variance))
    normal = divide(add(image, negated(center)), a.root(a.plus(width, float(epsilon))))
    return _scaled_and_moved(a, normal, gamma, beta, shape)


def _instance_norm(
    a: Algebraic, op: Operation, x: Any, gamma: Any = None, beta: Any = None, epsilon: float = 1e-5
) -> Image:
    image = a.image(x)
    normal = a.normalized(image, list(range(2, image.ndim)), epsilon)
    return _scaled_and_moved(a, normal, gamma, beta, [-1, *(1,) * (image.ndim - 2)])


def _l2_norm(a: Algebraic, op: Operation, x: Any, epsilon: float = 1e-6) -> Image:
    image = a.image(x)
    axes = list(range(-min(3, image.ndim), 0))
    return divide(image, a.root(a.plus(field.summed(multiply(image, image), axes, True), float(epsilon))))


def _attention(a: Algebraic, op: Operation, query: Any, key: Any, value: Any, attn_mask: Any = None) -> Image:
    q, k, v = a.image(query), a.image(key), a.image(value)
    width = q.shape[-1]
    whole = math.isqrt(width)
    size = a.lift(whole) if whole * whole == width else a.root(a.lift(width))
    scores = divide(product(q, k.map(lambda t: t.transpose(-1, -2))), size)
    if attn_mask is not None:
        if np_dtype(op.inputs["attn_mask"]).kind == "b":
            raise Unsupported("a mask of conditions")
        scores = a.plus(scores, attn_mask)
    return product(_softmax(a, op, scores), v)


def _avg_pool(a: Algebraic, op: Operation, x: Any, **how: Any) -> Image:
    """Compute means as sums over counts."""
    total, counts = _window_sums(a.image(x), how)
    return a.shared(total, counts.numpy())


def _l2_pool(a: Algebraic, op: Operation, x: Any, **how: Any) -> Image:
    image = a.image(x)
    return a.root(_window_sums(multiply(image, image), how)[0])


def windows_of(image: Image, how: dict[str, Any], ceil_mode: Any) -> Windows:
    """Return the windows of a pool from its other parameters."""
    strides, pad_type, pad = (how.get(name) for name in ("strides", "pad_type", "pad"))
    return windows(
        image.lanes[0].shape[2:], how["kernel_sizes"], strides, pad_type or "valid", pad, bool(ceil_mode)
    )


def _window_sums(image: Image, how: dict[str, Any]) -> tuple[Image, torch.Tensor]:
    """Return the sum of each window, and the number of its elements that count."""
    w = windows_of(image, how, how.get("ceil_mode"))
    average, size = AVERAGE[len(w.kernel)], math.prod(w.kernel)

    def sums(v: torch.Tensor) -> torch.Tensor:
        return torch.round(average(v.double(), w.kernel, w.strides) * size).to(torch.int64)

    sizes = list(image.shape[2:])
    counts = counted(w, sizes, bool(how.get("exclude_padding_from_average"))).to(torch.int64)
    if bool((counted(w, sizes, True) == 0).any()):
        raise Unsupported("a window that lies outside")
    total = image.of_residues(lambda v: sums(pad_axes(v, w.used)))
    total.degree *= size if image.fraction else 1
    return total, counts


_SUM_RULES: dict[str, Rule] = {
    "one_hot": _one_hot,
    "matmul": lambda a, op, x, y, **transposes: product(*matrices(a.image(x), a.image(y), **transposes)),
    "linear": _linear,
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "einsum": lambda a, op, values, equation: _contraction([a.image(v) for v in values], str(equation)),
    **dict.fromkeys(REDUCTIONS - {"reduce_prod", "reduce_max", "reduce_min"}, _reduced),
    "reduce_prod": _product_along,
    **dict.fromkeys(("reduce_max", "reduce_min"), _extreme),
    "softmax": _softmax,
    "cumsum": _cumsum,
    "layer_norm": _layer_norm,
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "l2_norm": _l2_norm,
    "scaled_dot_product_attention": _attention,
    "avg_pool": _avg_pool,
    "l2_pool": _l2_pool,
}
"""Op type -> (arithmetic, op, operands by name) -> the result."""


LONGEST_SEQUENCE = 64
"""The longest sequence that is computed step by step; a longer one is a random function of all that the op
reads."""

States = tuple[Image, ...]
Step = Callable[[Image, States], States]
"""(what the input adds to the gates, the states) -> the new states, of which the first is the output."""


@dataclass(frozen=True)
class _Op:
    """A recurrent op, with its operands as residues."""

    a: Algebraic
    op: Operation
    given: Mapping[str, Any]
    """Parameter -> its value."""

    def image(self, name: str) -> Image | None:
        """Return an operand; None where it is absent."""
        value = self.given.get(name)
        return None if value is None else self.a.image(value)

    def transposed(self, name: str) -> Image:
        """Return a matrix with its axes swapped."""
        matrix = self.image(name)
        assert matrix is not None
        return matrix.map(lambda v: v.transpose(-1, -2))

    def activate(self, parameter: str, default: str, x: Image) -> Image:
        """Apply the activation that an attribute of the op names."""
        kind = str(self.given.get(parameter) or default).lower()
        if kind in ("tanh", "scaled_tanh"):
            return self.a.odd("tanh", x)
        if kind == "sigmoid":
            return self.a.function("sigmoid", x)
        if kind in ("hard_sigmoid", "sigmoid_hard"):
            alpha, beta = (float(np_dtype(self.op.outputs[0]).type(n)) for n in (0.2, 0.5))
            return self.a.smaller(self.a.larger(self.a.plus(self.a.times(x, alpha), beta), 0), 1)
        if kind == "relu":
            return self.a.larger(x, 0)
        if kind == "linear":
            return x
        raise Unsupported(f"recurrent activation {kind!r} is not known")


def _chunks(x: Image, count: int) -> list[Image]:
    """Return equal parts along the last axis."""
    width = x.shape[-1] // count
    return [x.map(lambda v, i=i: v.narrow(-1, i * width, width)) for i in range(count)]  # type: ignore[misc]


def _rnn(of: _Op, suffix: str) -> Step:
    recurrent = of.transposed("weight_hh")

    def step(row: Image, states: States) -> States:
        return (of.activate("activation", "tanh", add(row, product(states[0], recurrent))),)

    return step


def _gru(of: _Op, suffix: str) -> Step:
    reset, output, update = _chunks(of.transposed("weight_hh"), 3)
    after, bias = bool(of.given.get("reset_after")), of.image("bias")
    inside = None if bias is None or not after else _chunks(bias, 3)[1]

    def step(row: Image, states: States) -> States:
        (h,) = states
        x_r, x_o, x_z = _chunks(row, 3)
        r = of.activate("recurrent_activation", "sigmoid", add(x_r, product(h, reset)))
        z = of.activate("recurrent_activation", "sigmoid", add(x_z, product(h, update)))
        if after:
            kept = product(h, output)
            new = add(x_o, multiply(r, kept if inside is None else add(kept, inside)))
        else:
            new = add(x_o, product(multiply(r, h), output))
        new = of.activate("activation", "tanh", new)
        return (add(new, multiply(z, of.a.minus(h, new))),)

    return step


def _lstm(of: _Op, suffix: str) -> Step:
    recurrent, peephole = of.transposed(f"weight_hh{suffix}"), of.image(f"peephole{suffix}")
    peeps = None if peephole is None else _chunks(peephole, 3)
    limit = of.given.get("clip")

    def gate(x: Image, cell: Image, which: int) -> Image:
        x = x if peeps is None else add(x, multiply(cell, peeps[which]))
        return of.activate("recurrent_activation", "sigmoid", x)

    def step(row: Image, states: States) -> States:
        h, c = states
        i, f, o, z = _chunks(add(row, product(h, recurrent)), 4)
        z = of.activate("cell_activation", "tanh", z)
        new = add(multiply(gate(f, c, 1), c), multiply(gate(i, c, 0), z))
        if limit is not None:
            new = of.a.smaller(of.a.larger(new, -float(limit)), float(limit))
        return multiply(gate(o, new, 2), of.activate("activation", "tanh", new)), new

    return step


STEPS: dict[str, Callable[[_Op, str], Step]] = {"rnn": _rnn, "gru": _gru, "lstm": _lstm}
"""Op type -> builds its step from the op, and "" or "_back", the ending of the weights of a direction."""


def _input_bias(of: _Op, suffix: str) -> Image | None:
    """Return what is added to the gates besides the products; without what `reset_after` adds inside."""
    bias, more = of.image(f"bias{suffix}"), of.image("input_bias")
    if bias is not None and of.given.get("reset_after"):
        parts = _chunks(bias, 3)
        parts[1] = parts[1].map(torch.zeros_like)
        bias = _concat(parts)
    if bias is None or more is None:
        return more if bias is None else bias
    return add(bias, more)


def _concat(parts: Sequence[Image], axis: int = -1) -> Image:
    """Return tensors joined along an axis."""
    return joined(parts, lambda each: torch.cat(each, axis))


def _walk(of: _Op, x: Image, suffix: str, states: States, back: bool) -> tuple[list[Image], States]:
    """Run one direction; return the outputs in the order in which they are computed, and the last states."""
    rows, bias = product(x, of.transposed(f"weight_ih{suffix}")), _input_bias(of, suffix)
    rows = rows if bias is None else add(rows, bias)
    order = range(x.shape[0])
    step, outputs = STEPS[of.op.op_type](of, suffix), []
    for at in reversed(order) if back else order:
        states = step(rows.map(lambda v, at=at: v[at]), states)  # type: ignore[misc]
        outputs.append(states[0])
    return outputs, states


def _recurrent(a: Algebraic, op: Operation, **arguments: Any) -> Any:
    """Compute a recurrent op: the sequence or its last output, and the last states."""
    x, direction = a.image(arguments["x"]), str(arguments.get("direction") or "forward")
    if x.shape[0] > LONGEST_SEQUENCE or x.shape[0] < 1 or direction not in BACKWARD:
        return a.uninterpreted(op, arguments)
    of, ways = _Op(a, op, arguments), BACKWARD[direction]
    initial = [of.image(name) for name in ("initial_h", "initial_c")]
    split = [_chunks(state, len(ways)) for state in initial if state is not None]
    outputs, lasts = [], []
    for i, back in enumerate(ways):
        steps, last = _walk(of, x, "_back" if i else "", tuple(half[i] for half in split), back)
        outputs.append(steps[::-1] if i else steps)
        lasts.append(last)
    ends = [_concat(each) for each in zip(*lasts, strict=True)]
    one = ends[0].map(lambda v: v[None])
    if arguments.get("output_sequence"):
        rows = [_concat(each).map(lambda v: v[None]) for each in zip(*outputs, strict=True)]
        one = _concat(rows, 0)
    return (one, *ends)


RULES: dict[str, Rule] = dict.fromkeys(STEPS, _recurrent)

Algebraic.rules = _ELEMENT_RULES | _SUM_RULES | symbolic.LIST_RULES | RULES
