"""Ops that work on each element by itself: arithmetic, comparisons, functions, activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from anesurgery.interpret.table import TABLE, Implementation, enter_all, impl, to_int32

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
    if y.numel() == 1 and x.is_floating_point() and x.ndim >= y.ndim and y.item() == 2:
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


_SIGMOID, _GELU, _ELU, _SOFTPLUS = (_steady(f) for f in (torch.sigmoid, F.gelu, F.elu, F.softplus))


def _binary(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function with the parameters x and y."""
    return _with_plain(lambda x, y: function(x, y), function)


def _unary(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function with the parameter x."""
    return _with_plain(lambda x: function(x), function)


def _with_plain(implementation: Callable[..., Tensor], plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an implementation with its torch function as `plain`, which `core` may call directly."""
    implementation.plain = plain  # type: ignore[attr-defined]
    return implementation


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
    "thresholded_relu": lambda x, alpha=1.0: torch.where(x < alpha, torch.zeros_like(x), x),
}
"""Op type -> function of its parameters; alpha of prelu has a number for each channel (axis 1)."""


TABLE.update({name: Implementation(_binary(f), False) for name, f in BINARY.items()})
TABLE.update({name: Implementation(_unary(f), False) for name, f in UNARY.items()})
enter_all(PARAMETRIC)


@impl("cast")
def cast(x: Tensor, dtype: str) -> Tensor:
    """Return x in another dtype; floats become integers by `to_int32` and saturate, wider integers wrap."""
    if dtype == "bool":
        return x != 0
    if not dtype.startswith(("int", "uint")):
        return x if x.dtype == torch.float64 else x.float()
    bits, is_unsigned = int("".join(filter(str.isdigit, dtype))), dtype.startswith("u")
    whole = to_int32(x).long() if x.is_floating_point() else x.to(torch.int64)
    if bits < 32:
        span = 1 << bits
        low, high = (0, span - 1) if is_unsigned else (-span // 2, span // 2 - 1)
        if x.is_floating_point():
            return whole.clamp(low, high).to(torch.int32)
        whole = whole % span
        whole = torch.where(whole > high, whole - span, whole)
    return whole.to(torch.int32)


@impl("gelu")
def gelu(x: Tensor, mode: str = "EXACT") -> Tensor:
    """Return the Gaussian error linear unit, exact or in one of its two approximations."""
    if mode == "SIGMOID_APPROXIMATION":
        return x * _SIGMOID(1.702 * x)
    return _GELU(x, approximate="tanh" if mode == "TANH_APPROXIMATION" else "none")


@impl("softplus_parametric")
def softplus_parametric(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Return alpha * log(1 + exp(beta * x)), with one alpha and beta for each channel (axis 1)."""
    shape = (1, -1, *(1,) * (x.ndim - 2))
    a, b = (torch.as_tensor(v).float().reshape(shape) for v in (alpha, beta))
    return a * _SOFTPLUS(b * x, threshold=math.inf)
