"""How `algebraic` computes products, contractions, reductions, norms and pooling over prime fields."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch

from anesurgery.interpret.arithmetic import field
from anesurgery.interpret.arithmetic.element_rules import Algebraic, absolute
from anesurgery.interpret.arithmetic.field import Image, add, divide, multiply, negated, product
from anesurgery.interpret.arithmetic.symbolic import Rule
from anesurgery.interpret.ops.windows import AVERAGE, conv, conv_transpose, counted, pad_axes, windows
from anesurgery.interpret.table import TABLE, Unsupported, ints
from anesurgery.mil import Operation, np_dtype
from anesurgery.ops import REDUCTIONS


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


def contraction(values: list[Image], equation: str) -> Image:
    """Return the sum of products over named axes of two tensors.

    Raises:
        Unsupported: another form of an equation.
    """
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
    return a.plus(sums, a.image(bias).map(lambda v: v.reshape(-1, *(1,) * (sums.ndim - 2))))


def _axes(x: Image, axes: Any) -> list[int]:
    return list(range(x.ndim)) if axes is None else [i % x.ndim for i in ints(axes)]


def _reduced(a: Algebraic, op: Operation, x: Any, axes: Any = None, keep_dims: bool = False) -> Image:
    image = a.image(x)
    chosen, kind = _axes(image, axes), op.op_type.removeprefix("reduce_")
    if kind == "mean" and np_dtype(op.inputs["x"]).kind != "f":
        return a.uninterpreted(op, {"x": x, "axes": axes, "keep_dims": keep_dims})
    if kind in ("l2_norm", "sum_square"):
        image = multiply(image, image)
    elif kind == "l1_norm":
        image = absolute(a, op.inputs["x"], image)
    elif kind == "log_sum_exp":
        image = a.function("exp", image)
    reduced = a.mean(image, chosen) if kind == "mean" else field.summed(image, chosen, True)
    if kind == "l2_norm":
        reduced = a.root(reduced)
    elif kind.startswith("log_sum"):
        reduced = a.function("log", reduced)
    return reduced if keep_dims else reduced.map(lambda v: v.squeeze(tuple(chosen)) if chosen else v)


def _product_along(a: Algebraic, op: Operation, x: Any, axes: Any = None, keep_dims: bool = False) -> Image:
    """Compute the product of the elements along some axes, one factor after the other."""
    image = a.image(x)
    chosen = _axes(image, axes)
    for axis in chosen:
        parts = [image.map(lambda v, i=i: v.narrow(axis, i, 1)) for i in range(image.shape[axis])]  # type: ignore[misc]  # noqa: B023
        image = functools.reduce(multiply, parts)
    return image if keep_dims else image.map(lambda v: v.squeeze(tuple(chosen)) if chosen else v)


def _extreme(a: Algebraic, op: Operation, x: Any, axes: Any = None, keep_dims: bool = False) -> Image:
    image = a.image(x)
    return a.function(op.op_type, field.summed(a.hashed(image), _axes(image, axes), bool(keep_dims)))


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
    chosen = _axes(image, axes)
    shape = [image.shape[i] if i in chosen else 1 for i in range(image.ndim)]
    return _affine(a, a.normalized(image, sorted(chosen), epsilon), gamma, beta, shape)


def _affine(a: Algebraic, normal: Image, gamma: Any, beta: Any, shape: list[int]) -> Image:
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
    return _affine(a, normal, gamma, beta, shape)


def _instance_norm(
    a: Algebraic, op: Operation, x: Any, gamma: Any = None, beta: Any = None, epsilon: float = 1e-5
) -> Image:
    image = a.image(x)
    normal = a.normalized(image, list(range(2, image.ndim)), epsilon)
    return _affine(a, normal, gamma, beta, [-1, *(1,) * (image.ndim - 2)])


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
    total, counts = _window_sums(a.image(x), op, how)
    return a.shared(total, counts.numpy())


def _l2_pool(a: Algebraic, op: Operation, x: Any, **how: Any) -> Image:
    image = a.image(x)
    return a.root(_window_sums(multiply(image, image), op, how)[0])


def _window_sums(image: Image, op: Operation, how: dict[str, Any]) -> tuple[Image, torch.Tensor]:
    """Return the sum of each window, and the number of its elements that count."""
    options = (how.get(k) for k in ("strides", "pad_type", "pad", "ceil_mode"))
    strides, pad_type, pad, ceil_mode = options
    w = windows(image.lanes[0], how["kernel_sizes"], strides, pad_type or "valid", pad, bool(ceil_mode))
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


RULES: dict[str, Rule] = {
    "one_hot": _one_hot,
    "matmul": lambda a, op, x, y, **transposes: product(*matrices(a.image(x), a.image(y), **transposes)),
    "linear": _linear,
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "einsum": lambda a, op, values, equation: contraction([a.image(v) for v in values], str(equation)),
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
