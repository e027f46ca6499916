"""Ops that compute: elementwise ones, products, reductions, softmax, running sums and normalizations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from anesurgery.interpret.table import TABLE, Implementation, enter_all, impl, ints, to_int32, wrapped

Tensor = torch.Tensor


def _steady(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that gives a number the same bits anywhere in a tensor: in fp64, rounded once.

    In fp32 torch uses one routine for whole vectors and another for the rest at the end. They differ by one
    unit in the last place, so a value would depend on its position, on the layout and on the processor.
    """

    def compute(*values: Tensor, **more: Any) -> Tensor:
        wide = [v.double() if v.is_floating_point() else v for v in values]
        result = function(*wide, **more)
        double = any(isinstance(v, Tensor) and v.dtype == torch.float64 for v in values)
        return result.float() if result.dtype == torch.float64 and not double else result

    return compute


def _divisor(y: Tensor) -> Tensor:
    """Return a divisor with 1 for integer zeros: division by these is undefined, not an error."""
    return y if y.is_floating_point() else torch.where(y == 0, 1, y)


def quotient(x: Tensor, y: Tensor) -> Tensor:
    """Return the quotient; of integers truncated toward zero, and exact, which fp32 is not beyond 2^24."""
    if x.is_floating_point() or y.is_floating_point():
        return torch.true_divide(x, y)
    return torch.div(x.long(), _divisor(y).long(), rounding_mode="trunc").to(torch.int32)


_any_power = _steady(torch.pow)


def _pow(x: Tensor, y: Tensor) -> Tensor:
    """Return the power; a square is one product, whose rounding is that of the power in double precision."""
    has_shape_of_x = x.ndim >= y.ndim and y.numel() == 1
    if has_shape_of_x and x.is_floating_point() and y.item() == 2:
        return torch.square(x)
    return _any_power(x, y)


def _sign(x: Tensor) -> Tensor:
    """Return -1, 0 or 1; NaN stays."""
    return torch.where(torch.isnan(x), x, torch.sign(x))


BINARY: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "real_div": quotient,
    "floor_div": lambda x, y: torch.div(x, _divisor(y), rounding_mode="floor"),
    "mod": lambda x, y: torch.fmod(x, _divisor(y)),
    "pow": _pow,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "equal": torch.eq,
    "not_equal": torch.ne,
    "greater": torch.gt,
    "greater_equal": torch.ge,
    "less": torch.lt,
    "less_equal": torch.le,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
}
"""Op type -> function of (x, y), which broadcast."""

# `_steady` where the bits of a result depend on its position; the others had the same bits anywhere in an
# array of 1,003 numbers
UNARY: dict[str, Callable[..., Tensor]] = {
    "abs": torch.abs,
    "acos": torch.acos,
    "asin": torch.asin,
    "atan": torch.atan,
    "atanh": _steady(torch.atanh),
    "ceil": torch.ceil,
    "cos": torch.cos,
    "cosh": _steady(torch.cosh),
    "erf": torch.erf,
    "exp": torch.exp,
    "exp2": _steady(torch.exp2),
    "floor": torch.floor,
    "logical_not": torch.logical_not,
    "round": torch.round,
    "sign": _sign,
    "sin": torch.sin,
    "sinh": _steady(torch.sinh),
    "sqrt": torch.sqrt,
    "square": torch.square,
    "tan": _steady(torch.tan),
    "tanh": torch.tanh,
    "relu": torch.relu,
    "relu6": F.relu6,
    "sigmoid": _steady(torch.sigmoid),
    "silu": _steady(F.silu),
    "softplus": _steady(F.softplus),
    "softsign": _steady(F.softsign),
}
"""Op type -> function of x."""


_GELU, _ELU = _steady(F.gelu), _steady(F.elu)
_TANH_GELU = _steady(lambda x: x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)))
"""With (1 + tanh(u)) / 2 as sigmoid(2u), since the sum cancels: even in fp64 its bits depend on the place."""


def _binary(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function with the parameters x and y, as the op has them; torch's have other names."""
    return lambda x, y: function(x, y)


def _unary(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function with the parameter x, likewise."""
    return lambda x: function(x)


PARAMETRIC: dict[str, Callable[..., Any]] = {
    "inverse": lambda x, epsilon=1e-4: 1 / (x + epsilon),
    "log": lambda x, epsilon=1e-45: torch.log(x + epsilon),
    "rsqrt": lambda x, epsilon=1e-12: torch.rsqrt(x + epsilon),
    "clip": lambda x, alpha, beta: x.clamp(alpha, beta),
    "threshold": lambda x, alpha: x.clamp(min=alpha),
    "select": lambda cond, a, b: torch.where(cond.bool(), a, b),
    "identity": lambda x: x,
    "elu": lambda x, alpha=1.0: _ELU(x, alpha=alpha),
    "leaky_relu": lambda x, alpha=0.01: F.leaky_relu(x, alpha),
    "clamped_relu": lambda x, alpha, beta: torch.clamp(F.leaky_relu(x, alpha), max=beta),
    "linear_activation": lambda x, alpha, beta=0.0: alpha * x + beta,
    "prelu": lambda x, alpha: F.prelu(x, torch.as_tensor(alpha).to(x.dtype).reshape(-1)),
    "scaled_tanh": lambda x, alpha=1.0, beta=1.0: alpha * (beta * x).tanh(),
    "sigmoid_hard": lambda x, alpha=0.2, beta=0.5: (alpha * x + beta).clamp(0.0, 1.0),
    "softmax": lambda x, axis=-1: torch.softmax(x, dim=int(axis)),
    "thresholded_relu": lambda x, alpha=1.0: torch.where(x < alpha, torch.zeros_like(x), x),
}
"""Op type -> function of its parameters; alpha of prelu has a number for each channel (axis 1)."""


TABLE.update({name: Implementation(_binary(f), moves=False, plain=f) for name, f in BINARY.items()})
TABLE.update({name: Implementation(_unary(f), moves=False, plain=f) for name, f in UNARY.items()})
enter_all(PARAMETRIC)


@impl("cast")
def cast(x: Tensor, dtype: str) -> Tensor:
    """Return x as integers (from floats by `to_int32`, saturated; wider ones wrap), booleans or floats.

    Floats are not rounded here, to fp16 neither: the arithmetic rounds each result.
    """
    if dtype == "bool":
        return x != 0
    if not dtype.startswith(("int", "uint")):
        return x if x.dtype == torch.float64 else x.float()
    if not x.is_floating_point():
        return wrapped(x, dtype)
    limits = np.iinfo(dtype)
    return to_int32(x).clamp(limits.min, limits.max)


@impl("gelu")
def gelu(x: Tensor, mode: str = "EXACT") -> Tensor:
    """Return the Gaussian error linear unit, exact or in one of its two approximations."""
    if mode == "SIGMOID_APPROXIMATION":
        return x * UNARY["sigmoid"](1.702 * x)
    return _TANH_GELU(x) if mode == "TANH_APPROXIMATION" else _GELU(x)


@impl("softplus_parametric")
def softplus_parametric(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Return alpha * log(1 + exp(beta * x)), with one alpha and beta for each channel (axis 1)."""
    shape = (1, -1, *(1,) * (x.ndim - 2))
    a, b = (torch.as_tensor(v).float().reshape(shape) for v in (alpha, beta))
    return a * UNARY["softplus"](b * x)


WEIGHTS_AT_ONCE = 1 << 20
"""The number of weights that are widened at a time."""
LANES = 64
"""Outputs are computed in multiples of this number, so that BLAS sums all in the same order."""


@impl("linear")
def linear(x: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    """Return x times the transposed weight [out, in], plus the bias; exact for integers."""
    add = None if bias is None else torch.as_tensor(bias)
    if x.dtype == torch.int32:
        product = _integer_product(x, weight.T)
        return product if add is None else product + add
    add = None if add is None else add.to(x.dtype).expand(len(weight))
    if weight.dtype == x.dtype or weight.numel() <= WEIGHTS_AT_ONCE:
        return F.linear(x, weight.to(x.dtype), add)
    rows, whole = max(1, WEIGHTS_AT_ONCE // weight.shape[1] // LANES) * LANES, len(weight)
    wide = weight.new_empty((min(rows, whole), weight.shape[1]), dtype=x.dtype)  # new memory for each is slow
    parts = []
    for start in range(0, whole, rows):
        first = max(0, min(start, whole - rows))  # all parts have one size, so that BLAS sums in one order
        part, overlap = slice(first, first + rows), start - first  # the last one overlaps the one before
        product = F.linear(x, wide.copy_(weight[part]), None if add is None else add[part])
        parts.append(product[..., overlap:])
    return torch.cat(parts, -1)


LONG_SUM = 2048
"""For sums of so many terms it is checked if a matmul only picks rows. A choice: shorter ones cost little."""
ROW_PART = 256
"""The numbers of a row that are checked together for non-zeros."""


@impl("matmul")
def matmul(x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    """Return the matrix product over the last two axes, each operand transposed on request."""
    x = x.transpose(-1, -2) if transpose_x and x.ndim > 1 else x
    y = y.transpose(-1, -2) if transpose_y and y.ndim > 1 else y
    if x.dtype == torch.int32 and y.dtype == torch.int32:
        return _integer_product(x, y)
    if x.numel() and x.shape[-1] >= LONG_SUM and y.ndim == 2 and (rows := _picked_rows(x, y)) is not None:
        return rows
    floats = torch.float64 if torch.float64 in (x.dtype, y.dtype) else torch.float32
    return torch.matmul(x.to(floats), y.to(floats))


def _integer_product(x: Tensor, y: Tensor) -> Tensor:
    """Return the product of int32 matrices, which wraps as sums and products of int32 do.

    It is computed in fp64, which is fast, if no sum can reach 2^53, up to which that is exact.
    """
    largest = [int(v.long().abs().max()) if v.numel() else 0 for v in (x, y)]
    if largest[0] * largest[1] * x.shape[-1] < 2**53:
        return torch.matmul(x.double(), y.double()).long().to(torch.int32)
    return torch.matmul(x.long(), y.long()).to(torch.int32)


def _picked_rows(x: Tensor, y: Tensor) -> Tensor | None:
    """Return the product if each row of x has at most one non-zero, so that it only picks rows of y; else None.

    First the block of `width` numbers that is not all zeros is found, then the number in it.
    The numbers are those of the whole sum, since 0 times a finite number adds nothing.
    """
    width = math.gcd(x.shape[-1], ROW_PART)
    blocks = x.reshape(*x.shape[:-1], -1, width)
    has_nonzero = (blocks.amin(-1) != 0) | (blocks.amax(-1) != 0)
    if int(has_nonzero.sum(-1).max()) > 1:
        return None
    block_index = has_nonzero.to(torch.uint8).argmax(-1)
    block = torch.take_along_dim(blocks, block_index[..., None, None], -2).squeeze(-2)
    if int(torch.count_nonzero(block, dim=-1).max()) > 1 or not bool(torch.isfinite(y.sum())):
        return None
    column = block.abs().argmax(-1)
    rows = y[block_index * width + column]
    return torch.take_along_dim(block, column[..., None], -1) * rows + 0.0  # -0.0 + 0.0 is 0.0


@impl("einsum")
def einsum(values: list[Tensor], equation: Any) -> Tensor:
    """Return the sum of products over named axes."""
    return torch.einsum(str(equation), *values)


@impl("scaled_dot_product_attention")
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
) -> Tensor:
    """Return softmax(query keyᵀ / sqrt(width) + mask) value; a boolean mask keeps where it is true.

    A row whose mask hides every key is NaN, by this formula and in Apple's runtime (coreai-core 1.0.0b3 on
    Linux); torch gives 0.
    """
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask)
    if attn_mask is None:
        return attended
    keeps = attn_mask if attn_mask.dtype == torch.bool else attn_mask != -torch.inf
    return torch.where(keeps.any(-1, keepdim=True), attended, torch.nan)


def _mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    """Return the mean; of integers truncated toward zero, and exact, which fp32 is not beyond 2^24."""
    if x.is_floating_point():
        return torch.mean(x.float() if x.dtype == torch.float16 else x, dim=axes, keepdim=keep)
    count = torch.tensor(math.prod(x.shape[axis] for axis in axes))
    return quotient(torch.sum(x.long(), dim=axes, keepdim=keep), count)


def _prod(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((a % x.ndim for a in axes), reverse=True):
        x = torch.prod(x, dim=axis, keepdim=keep)
    return x


REDUCTIONS: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "reduce_sum": torch.sum,
    "reduce_mean": _mean,
    "reduce_max": torch.amax,
    "reduce_min": torch.amin,
    "reduce_prod": _prod,
    "reduce_l1_norm": lambda x, axes, keep: torch.sum(x.abs(), axes, keep),
    "reduce_l2_norm": lambda x, axes, keep: torch.sqrt(torch.sum(x * x, axes, keep)),
    "reduce_sum_square": lambda x, axes, keep: torch.sum(x * x, axes, keep),
    "reduce_log_sum": lambda x, axes, keep: torch.log(torch.sum(x, axes, keep)),
    "reduce_log_sum_exp": torch.logsumexp,
}
"""Op type -> function of (x, axes, keep_dims)."""


def _reduction(function: Callable[[Tensor, list[int], bool], Tensor]) -> Callable[..., Tensor]:
    """Return a function with the parameters of a reduction op; it reduces all axes by default, none of []."""

    def reduce(x: Tensor, axes: Any = None, keep_dims: bool = False) -> Tensor:
        chosen = list(range(x.ndim)) if axes is None else ints(axes)
        # torch takes [] for all axes
        return function(x, chosen, bool(keep_dims)) if x.ndim and chosen else function(x[None], [0], False)

    return reduce


TABLE.update({name: Implementation(_reduction(f), moves=False) for name, f in REDUCTIONS.items()})


@impl("cumsum")
def cumsum(x: Tensor, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """Return the running sum along an axis, from either end, with or without the element itself."""
    x = x.flip(axis) if reverse else x
    total = torch.cumsum(x, dim=axis).to(x.dtype)
    if exclusive and total.ndim:
        zero = torch.zeros_like(total.narrow(axis, 0, min(1, total.shape[axis])))
        total = torch.cat([zero, total], axis).narrow(axis, 0, total.shape[axis])
    return total.flip(axis) if reverse else total


# whoever runs the op casts the result to `output_dtype`
PLACES: dict[str, Callable[..., Any]] = {
    "reduce_argmax": lambda x, axis=-1, keep_dims=False, output_dtype="": torch.argmax(x, axis, keep_dims),
    "reduce_argmin": lambda x, axis=-1, keep_dims=False, output_dtype="": torch.argmin(x, axis, keep_dims),
}
"""Op type -> function of its parameters; of equal numbers the place of the first."""
enter_all(PLACES)


@impl("layer_norm")
def layer_norm(
    x: Tensor, axes: Any = None, gamma: Tensor | None = None, beta: Tensor | None = None, epsilon: float = 1e-5
) -> Tensor:
    """Return x with zero mean and unit variance over `axes`, times gamma plus beta (of the axes' shape)."""
    chosen = sorted(a % x.ndim for a in (range(x.ndim) if axes is None else ints(axes)))
    if chosen == list(range(x.ndim - len(chosen), x.ndim)):
        return F.layer_norm(x, [x.shape[a] for a in chosen], gamma, beta, float(epsilon))
    shape = [x.shape[a] if a in chosen else 1 for a in range(x.ndim)]
    mean = x.mean(chosen, keepdim=True)
    variance = ((x - mean) ** 2).mean(chosen, keepdim=True)
    y = (x - mean) / torch.sqrt(variance + epsilon)
    y = y if gamma is None else y * gamma.reshape(shape)
    return y if beta is None else y + beta.reshape(shape)


@impl("batch_norm")
def batch_norm(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-5,
) -> Tensor:
    """Normalize each channel (axis 1) by its stored mean and variance."""
    return F.batch_norm(x, mean, variance, gamma, beta, False, 0.0, float(epsilon))


@impl("instance_norm")
def instance_norm(
    x: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None, epsilon: float = 1e-5
) -> Tensor:
    """Normalize each channel of each sample by its own mean and variance."""
    axes, shape = tuple(range(2, x.ndim)), (-1, *(1,) * (x.ndim - 2))
    variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    y = (x - mean) * torch.rsqrt(variance + epsilon)
    y = y if gamma is None else y * gamma.reshape(shape)
    return y if beta is None else y + beta.reshape(shape)


@impl("l2_norm")
def l2_norm(x: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Return x over the root of its sum of squares (plus epsilon) over the last three axes."""
    axes = tuple(range(-min(3, x.ndim), 0))
    return x / torch.sqrt((x * x).sum(axes, keepdim=True) + epsilon)


@impl("local_response_norm")
def local_response_norm(
    x: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Tensor:
    """Return x over (k + alpha / size * the sum of squares of `size` neighbours on axis -3) ** beta."""
    flat = x.reshape(-1, *x.shape[-3:])
    return F.local_response_norm(flat, int(size), float(alpha), float(beta), float(k)).reshape(x.shape)
