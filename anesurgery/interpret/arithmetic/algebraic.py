"""The arithmetic of a prime field: both sides of an edit are evaluated at random points (Schwartz, Zippel).

Sums, products, quotients and what is made of them are exact, and so are constants, which are m * 2^e. The
absolute value stands for all that is made of it (relu, clip, max), so that its identities hold. Every other
function is a random one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from anesurgery.interpret.arithmetic import field
from anesurgery.interpret.arithmetic.field import HALF, Image, P, add, divide, multiply, negated, product
from anesurgery.interpret.arithmetic.products import contraction
from anesurgery.interpret.arithmetic.symbolic import Symbolic, narrows
from anesurgery.interpret.ops.conv import conv, conv_transpose
from anesurgery.interpret.ops.pooling import avg_pool
from anesurgery.interpret.table import TABLE, Unsupported, ints
from anesurgery.mil import Operation, np_dtype

MOST_FACTORS = 8
"""Whole exponents up to which a power is a product."""


class Algebraic(Symbolic):
    """See the module."""

    name = "field"

    def lift(self, value: Any) -> Image:
        """Numbers are themselves."""
        return Image([field.exact(value)] * field.LANES, 0)

    def even(self, name: Any, x: Image) -> Image:
        """A random function with f(-x) = f(x)."""
        return self.function(name, field.signed(x)[0])

    def odd(self, name: Any, x: Image) -> Image:
        """A random function with f(-x) = -f(x)."""
        one, turned = field.signed(x)
        return field.with_sign(self.function(name, one), turned)

    def choose(self, cond: Image, x: Image, y: Image) -> Image:
        """The condition is 0 or 1."""
        return add(y, multiply(cond, add(x, negated(y))))

    def minus(self, x: Any, y: Any) -> Image:
        """X - y."""
        return add(self.image(x), negated(self.image(y)))

    def times(self, x: Any, y: Any) -> Image:
        """X y."""
        return multiply(self.image(x), self.image(y))

    def plus(self, x: Any, y: Any) -> Image:
        """X + y."""
        return add(self.image(x), self.image(y))

    def larger(self, x: Any, y: Any) -> Image:
        """(x + y + |x - y|) / 2."""
        return self.scaled(add(self.plus(x, y), self.even("abs", self.minus(x, y))), HALF)

    def smaller(self, x: Any, y: Any) -> Image:
        """(x + y - |x - y|) / 2."""
        return self.scaled(add(self.plus(x, y), negated(self.even("abs", self.minus(x, y)))), HALF)

    def scaled(self, x: Image, factor: int) -> Image:
        """X times a number of the field."""
        return x.map(lambda v: v * factor % P)

    def root(self, x: Image) -> Image:
        """The square root, a random function."""
        return self.function("sqrt", x)

    def mean(self, x: Image, axes: list[int]) -> Image:
        """The mean over some axes, which stay."""
        count = math.prod(x.shape[a] for a in axes)
        return self.scaled(field.summed(x, axes, True), pow(count, P - 2, P))

    def normalized(self, x: Image, axes: list[int], epsilon: float) -> Image:
        """Zero mean and unit variance over some axes."""
        centered = add(x, negated(self.mean(x, axes)))
        variance = self.mean(multiply(centered, centered), axes)
        return divide(centered, self.root(self.plus(variance, float(epsilon))))


A = Algebraic


def _add(a: A, op: Operation, x: Any, y: Any) -> Image:
    return a.plus(x, y)


def _sub(a: A, op: Operation, x: Any, y: Any) -> Image:
    return a.minus(x, y)


def _mul(a: A, op: Operation, x: Any, y: Any) -> Image:
    return a.times(x, y)


def _real_div(a: A, op: Operation, x: Any, y: Any) -> Image:
    if np_dtype(op.inputs["x"]).kind != "f":
        return a.uninterpreted(op, {"x": x, "y": y})
    made = divide(a.image(x), a.image(y))
    constant = not isinstance(y, Image)
    return Image(made.lanes, a.image(x).degree, a.image(x).fraction) if constant else made


def _square(a: A, op: Operation, x: Any) -> Image:
    return a.times(x, x)


def _inverse(a: A, op: Operation, x: Any, epsilon: float = 1e-4) -> Image:
    return divide(a.lift(1.0), a.plus(x, float(epsilon)))


def _log(a: A, op: Operation, x: Any, epsilon: float = 1e-45) -> Image:
    return a.function("log", a.plus(x, float(epsilon)))


def _sqrt(a: A, op: Operation, x: Any) -> Image:
    return a.root(a.image(x))


def _rsqrt(a: A, op: Operation, x: Any, epsilon: float = 1e-12) -> Image:
    return divide(a.lift(1.0), a.root(a.plus(x, float(epsilon))))


def _pow(a: A, op: Operation, x: Any, y: Any) -> Image:
    exponent = (
        None if isinstance(y, Image) or not bool((y == y.reshape(-1)[0]).all()) else float(y.reshape(-1)[0])
    )
    if exponent == 0.5:
        return a.root(a.image(x))
    if exponent is None or exponent % 1 or not 1 <= exponent <= MOST_FACTORS:
        return a.uninterpreted(op, {"x": x, "y": y})
    made = a.image(x)
    for _ in range(int(exponent) - 1):
        made = a.times(made, x)
    return made


def _abs(a: A, op: Operation, x: Any) -> Image:
    return a.even("abs", a.image(x))


def _relu(a: A, op: Operation, x: Any) -> Image:
    return a.larger(x, 0)


def _relu6(a: A, op: Operation, x: Any) -> Image:
    return a.smaller(a.larger(x, 0), 6)


def _maximum(a: A, op: Operation, x: Any, y: Any) -> Image:
    return a.larger(x, y)


def _minimum(a: A, op: Operation, x: Any, y: Any) -> Image:
    return a.smaller(x, y)


def _clip(a: A, op: Operation, x: Any, alpha: float, beta: float) -> Image:
    made = a.image(x) if math.isinf(alpha) else a.larger(x, float(alpha))
    return made if math.isinf(beta) else a.smaller(made, float(beta))


def _threshold(a: A, op: Operation, x: Any, alpha: float) -> Image:
    return a.larger(x, float(alpha))


def _leaky_relu(a: A, op: Operation, x: Any, alpha: float = 0.01) -> Image:
    return add(a.larger(x, 0), a.times(a.smaller(x, 0), float(alpha)))


def _linear_activation(a: A, op: Operation, x: Any, alpha: float, beta: float = 0.0) -> Image:
    return a.plus(a.times(x, float(alpha)), float(beta))


def _sigmoid_hard(a: A, op: Operation, x: Any, alpha: float = 0.2, beta: float = 0.5) -> Image:
    return a.smaller(a.larger(a.plus(a.times(x, float(alpha)), float(beta)), 0), 1)


def _silu(a: A, op: Operation, x: Any) -> Image:
    return a.times(x, a.function("sigmoid", x))


def _sigmoid(a: A, op: Operation, x: Any) -> Image:
    return a.function("sigmoid", x)


def _scaled_tanh(a: A, op: Operation, x: Any, alpha: float = 1.0, beta: float = 1.0) -> Image:
    return a.times(a.odd("tanh", a.times(x, float(beta))), float(alpha))


def _softsign(a: A, op: Operation, x: Any) -> Image:
    return divide(a.image(x), a.plus(a.even("abs", a.image(x)), 1))


def _odd(a: A, op: Operation, x: Any) -> Image:
    return a.odd(op.op_type, a.image(x))


def _equal(a: A, op: Operation, x: Any, y: Any) -> Image:
    return a.even("equal", a.minus(x, y))


def _not(a: A, op: Operation, x: Any) -> Image:
    return a.minus(1, x)


def _not_equal(a: A, op: Operation, x: Any, y: Any) -> Image:
    return a.minus(1, _equal(a, op, x, y))


def _greater(a: A, op: Operation, x: Any, y: Any) -> Image:
    return a.function("positive", a.minus(x, y))


def _less(a: A, op: Operation, x: Any, y: Any) -> Image:
    return _greater(a, op, y, x)


def _greater_equal(a: A, op: Operation, x: Any, y: Any) -> Image:
    return a.minus(1, _greater(a, op, y, x))


def _less_equal(a: A, op: Operation, x: Any, y: Any) -> Image:
    return a.minus(1, _greater(a, op, x, y))


def _or(a: A, op: Operation, x: Any, y: Any) -> Image:
    return a.minus(a.plus(x, y), a.times(x, y))


def _xor(a: A, op: Operation, x: Any, y: Any) -> Image:
    return a.minus(a.plus(x, y), a.times(2, a.times(x, y)))


def _cast(a: A, op: Operation, x: Any, dtype: str) -> Image:
    old, new = np_dtype(op.inputs["x"]), np_dtype(op.outputs[0])
    if new.kind == "b" and old.kind != "b":
        return a.minus(1, a.even("equal", a.image(x)))
    wider = new.itemsize >= old.itemsize and new.kind == old.kind
    if wider or old.kind == "b" or (old.kind != "f" and new.kind == "f"):
        return a.image(x)
    return a.function(("narrowed" if narrows(op) else "cast", dtype), x)


def _one_hot(
    a: A,
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
    made = a.plus(off_value, a.times(hit, a.minus(on_value, off_value)))
    return made.map(lambda v: v.movedim(-1, int(axis)))


def _matmul(a: A, op: Operation, x: Any, y: Any, transpose_x: Any = False, transpose_y: Any = False) -> Image:
    left, right = a.image(x), a.image(y)
    if min(left.ndim, right.ndim) < 2:
        raise Unsupported("a matmul of vectors")
    left = left.map(lambda v: v.transpose(-1, -2)) if transpose_x else left
    right = right.map(lambda v: v.transpose(-1, -2)) if transpose_y else right
    return product(left, right)


def _linear(a: A, op: Operation, x: Any, weight: Any, bias: Any = None) -> Image:
    made = product(a.image(x), a.image(weight).map(lambda v: v.transpose(-1, -2)))
    return made if bias is None else a.plus(made, bias)


def _conv(a: A, op: Operation, x: Any, weight: Any, bias: Any = None, **how: Any) -> Image:
    w = a.image(weight)
    made = field.bilinear(a.image(x), w, lambda v, u: conv(v, u, **how), math.prod(w.shape[1:]))
    return _with_bias(a, made, bias)


def _conv_transpose(a: A, op: Operation, x: Any, weight: Any, bias: Any = None, **how: Any) -> Image:
    w = a.image(weight)
    terms = math.prod([w.shape[0], *w.shape[2:]])
    made = field.bilinear(a.image(x), w, lambda v, u: conv_transpose(v, u, **how), terms)
    return _with_bias(a, made, bias)


def _with_bias(a: A, made: Image, bias: Any) -> Image:
    if bias is None:
        return made
    return a.plus(made, a.image(bias).map(lambda v: v.reshape(-1, *(1,) * (made.ndim - 2))))


def _einsum(a: A, op: Operation, values: list[Any], equation: Any) -> Image:
    return contraction([a.image(v) for v in values], str(equation))


def _axes(x: Image, axes: Any) -> list[int]:
    return list(range(x.ndim)) if axes is None else [i % x.ndim for i in ints(axes)]


def _reduced(a: A, op: Operation, x: Any, axes: Any = None, keep_dims: bool = False) -> Image:
    image = a.image(x)
    chosen, kind = _axes(image, axes), op.op_type.removeprefix("reduce_")
    if kind in ("l2_norm", "sum_square"):
        image = multiply(image, image)
    elif kind == "l1_norm":
        image = a.even("abs", image)
    elif kind == "log_sum_exp":
        image = a.function("exp", image)
    made = a.mean(image, chosen) if kind == "mean" else field.summed(image, chosen, True)
    if kind == "l2_norm":
        made = a.root(made)
    elif kind.startswith("log_sum"):
        made = a.function("log", made)
    return made if keep_dims else made.map(lambda v: v.squeeze(tuple(chosen)) if chosen else v)


def _extreme(a: A, op: Operation, x: Any, axes: Any = None, keep_dims: bool = False) -> Image:
    image = a.image(x)
    return a.function(op.op_type, field.summed(a.hashed(image), _axes(image, axes), bool(keep_dims)))


def _softmax(a: A, op: Operation, x: Any, axis: int = -1) -> Image:
    e = a.function("exp", x)
    return divide(e, field.summed(e, [int(axis)], True))


def _cumsum(a: A, op: Operation, **arguments: Any) -> Image:
    x = a.image(arguments.pop("x"))
    made = x.map(lambda v: TABLE["cumsum"].function(x=v, **arguments) % P)
    return Image(made.lanes, x.degree * (x.numel() if x.fraction else 1), x.fraction)


def _layer_norm(
    a: A, op: Operation, x: Any, axes: Any = None, gamma: Any = None, beta: Any = None, epsilon: float = 1e-5
) -> Image:
    image = a.image(x)
    chosen = _axes(image, axes)
    shape = [image.shape[i] if i in chosen else 1 for i in range(image.ndim)]
    return _affine(a, a.normalized(image, sorted(chosen), epsilon), gamma, beta, shape)


def _affine(a: A, made: Image, gamma: Any, beta: Any, shape: list[int]) -> Image:
    if gamma is not None:
        made = multiply(made, a.image(gamma).map(lambda v: v.reshape(shape)))
    return made if beta is None else add(made, a.image(beta).map(lambda v: v.reshape(shape)))


def _batch_norm(
    a: A,
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
    made = divide(add(image, negated(center)), a.root(a.plus(width, float(epsilon))))
    return _affine(a, made, gamma, beta, shape)


def _instance_norm(
    a: A, op: Operation, x: Any, gamma: Any = None, beta: Any = None, epsilon: float = 1e-5
) -> Image:
    image = a.image(x)
    made = a.normalized(image, list(range(2, image.ndim)), epsilon)
    return _affine(a, made, gamma, beta, [-1, *(1,) * (image.ndim - 2)])


def _l2_norm(a: A, op: Operation, x: Any, epsilon: float = 1e-6) -> Image:
    image = a.image(x)
    axes = list(range(-min(3, image.ndim), 0))
    return divide(image, a.root(a.plus(field.summed(multiply(image, image), axes, True), float(epsilon))))


def _attention(a: A, op: Operation, query: Any, key: Any, value: Any, attn_mask: Any = None) -> Image:
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


def _avg_pool(a: A, op: Operation, x: Any, **how: Any) -> Image:
    """Means are sums over counts: the counts come from pooling ones."""
    image = a.image(x)
    if how.get("ceil_mode"):
        raise Unsupported("windows that may reach beyond the padding")
    ones = torch.ones((1, 1, *image.shape[2:]), dtype=torch.float64)
    share = avg_pool(ones, **how)
    inside = avg_pool(ones, **{**how, "exclude_padding_from_average": True})
    size = math.prod(ints(how["kernel_sizes"]))
    if not bool((inside == 1).all()):
        raise Unsupported("a window that lies outside")
    counts = _counts(share, size, bool(how.get("exclude_padding_from_average")))
    inverse = torch.tensor([pow(int(c), P - 2, P) for c in counts.reshape(-1)]).reshape(counts.shape)
    lanes = [
        torch.round(avg_pool(v.double(), **how) * counts).to(torch.int64) % P * inverse % P for v in image.lanes
    ]
    return Image(lanes, image.degree * (size if image.fraction else 1), image.fraction)


def _counts(share: torch.Tensor, size: int, exclude: bool) -> torch.Tensor:
    """A multiple of what each window's sum was divided by."""
    if exclude and size > 16:
        raise Unsupported("a large window without its padding")
    return torch.full_like(share, math.lcm(*range(1, size + 1)) if exclude else size)


A.rules = {
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
    "relu": _relu,
    "relu6": _relu6,
    "maximum": _maximum,
    "minimum": _minimum,
    "clip": _clip,
    "threshold": _threshold,
    "leaky_relu": _leaky_relu,
    "linear_activation": _linear_activation,
    "sigmoid_hard": _sigmoid_hard,
    "silu": _silu,
    "sigmoid": _sigmoid,
    "scaled_tanh": _scaled_tanh,
    "softsign": _softsign,
    **dict.fromkeys(("tanh", "erf", "sin", "sinh", "tan", "atan", "asin", "atanh", "sign"), _odd),
    "equal": _equal,
    "not_equal": _not_equal,
    "greater": _greater,
    "less": _less,
    "greater_equal": _greater_equal,
    "less_equal": _less_equal,
    "logical_not": _not,
    "logical_and": _mul,
    "logical_or": _or,
    "logical_xor": _xor,
    "cast": _cast,
    "one_hot": _one_hot,
    "matmul": _matmul,
    "linear": _linear,
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "einsum": _einsum,
    **dict.fromkeys(
        (
            "reduce_sum",
            "reduce_mean",
            "reduce_sum_square",
            "reduce_l1_norm",
            "reduce_l2_norm",
            "reduce_log_sum",
            "reduce_log_sum_exp",
        ),
        _reduced,
    ),
    **dict.fromkeys(("reduce_max", "reduce_min"), _extreme),
    "softmax": _softmax,
    "cumsum": _cumsum,
    "layer_norm": _layer_norm,
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "l2_norm": _l2_norm,
    "scaled_dot_product_attention": _attention,
    "avg_pool": _avg_pool,
}
