"""Ops that work on each element by itself: arithmetic, comparisons, functions, activations."""

from __future__ import annotations

from collections.abc import Callable

from anesurgery.coreai.modes import Mode
from anesurgery.coreai.table import lowers, written
from anesurgery.coreai.toolkit import ops
from anesurgery.coreai.values import Value, as_numpy, call, where

SAME = {
    **{
        name: name
        for name in ["acos", "asin", "atan", "atanh", "cos", "cosh", "erf", "exp", "relu", "sigmoid", "silu"]
    },
    **{name: name for name in ["sin", "sinh", "sqrt", "tan", "tanh"]},
    "abs": "abs_",
    "logical_not": "not_",
    "round": "round_",
}
"""Op type of x -> Core AI's builder of the same meaning."""

BINARY: dict[str, str] = {
    "add": "add",
    "mul": "mul",
    "real_div": "divide",
    "floor_div": "floor_divide",
    "pow": "pow",
    "maximum": "maximum",
    "minimum": "minimum",
    "equal": "equal",
    "not_equal": "not_equal",
    "greater": "greater",
    "logical_and": "and",
    "logical_or": "or",
    "logical_xor": "xor",
}
"""Op type of (x, y) -> Core AI's builder of the same meaning, without its prefix."""


def _same(builder: str) -> Callable[[Value], Value]:
    return lambda x: call(builder, x)


def _binary(builder: str) -> Callable[[Value, Value], Value]:
    return lambda x, y: x.with_(builder, y)


written({name: _same(builder) for name, builder in SAME.items()})
written({name: _binary(builder) for name, builder in BINARY.items()})


def floor(x: Value) -> Value:
    """The next whole number below, by "floor by round" (`modes.FORMS`); halves may be rounded either way."""
    near = call("round_", x)
    return near - (near > x).cast(x.dtype)


def truncated(x: Value) -> Value:
    """Without the part behind the point."""
    return where(x < 0, -floor(-x), floor(x))


def in_floats(function: Callable[..., Value]) -> Callable[..., Value]:
    """A function of real numbers: of integers computed in fp32, then truncated."""
    return lambda x, *more: (
        function(x, *more) if x.is_float else truncated(function(x.cast("fp32"), *more)).cast(x.dtype)
    )


def sign(x: Value) -> Value:
    """-1, 0 or 1; NaN stays."""
    steps = (x > 0).cast(x.dtype) - (x < 0).cast(x.dtype)
    return where(x.equal(x), steps, x) if x.is_float else steps


def softplus(x: Value) -> Value:
    """log(1 + exp x), by "shifted exponentials" (`modes.FORMS`)."""
    return call("relu", x) + call("log", call("exp", -abs(x)) + 1)


def _modulo(x: Value, y: Value) -> Value:
    """The remainder with the sign of the divisor; Core AI's has that of x."""
    rest = x.with_("modulo", y)
    other_side = (rest > 0) ^ (y > rest.like(0))
    return where(rest.with_("not_equal", 0) & other_side, rest + y, rest)


def _leaky(x: Value, alpha: float = 0.01) -> Value:
    return where(x < 0, x * alpha, x)


def _per_channel(x: Value, numbers: Value) -> Value:
    """One number for each channel (axis 1)."""
    return numbers.reshape([1, -1, *[1] * (x.rank - 2)])


def _shifted(x: Value, epsilon: float) -> Value:
    return x + epsilon if as_numpy(x.dtype)(epsilon) else x


written(
    {
        "identity": lambda x: x,
        "sub": lambda x, y: x - y,
        "less": lambda x, y: x < y,
        "less_equal": lambda x, y: x <= y,
        "greater_equal": lambda x, y: x >= y,
        "mod": _modulo,
        "floor": floor,
        "ceil": lambda x: -floor(-x),
        "sign": sign,
        "square": lambda x: x * x,
        "exp2": in_floats(lambda x: x.like(2.0).with_("pow", x)),
        "inverse": lambda x, epsilon=1e-4: 1.0 / _shifted(x, epsilon),
        "log": lambda x, epsilon=1e-45: call("log", _shifted(x, epsilon)),
        "rsqrt": lambda x, epsilon=1e-12: call("rsqrt", _shifted(x, epsilon)),
        "clip": lambda x, alpha, beta: x.at_least(alpha).at_most(beta),
        "threshold": lambda x, alpha: x.at_least(alpha),
        "select": lambda cond, a, b: where(cond.cast("bool"), a, b),
        "relu6": lambda x: call("relu", x).at_most(6.0),
        "softplus": softplus,
        "softsign": lambda x: x / (abs(x) + 1.0),
        "elu": lambda x, alpha=1.0: where(x < 0, (call("exp", x) - 1.0) * alpha, x),
        "leaky_relu": _leaky,
        "clamped_relu": lambda x, alpha, beta: _leaky(x, alpha).at_most(beta),
        "linear_activation": lambda x, alpha, beta=0.0: x * alpha + beta,
        "prelu": lambda x, alpha: where(x < 0, x * _per_channel(x, alpha), x),
        "scaled_tanh": lambda x, alpha=1.0, beta=1.0: call("tanh", x * beta) * alpha,
        "sigmoid_hard": lambda x, alpha=0.2, beta=0.5: (x * alpha + beta).at_least(0.0).at_most(1.0),
        "thresholded_relu": lambda x, alpha=1.0: where(x < alpha, 0.0, x),
    }
)

GELU = {"EXACT": "none", "TANH_APPROXIMATION": "tanh", "SIGMOID_APPROXIMATION": "sigmoid"}
"""Mode of gelu -> its name in Core AI."""


@lowers("gelu")
def gelu(x: Value, mode: str = "EXACT") -> Value:
    """One op in all three forms."""
    return Value(ops.gelu(x.node, approximate=GELU[mode]))


@lowers("softplus_parametric")
def softplus_parametric(x: Value, alpha: Value, beta: Value) -> Value:
    """Alpha log(1 + exp(beta x)), with one alpha and beta for each channel."""
    return _per_channel(x, alpha) * softplus(x * _per_channel(x, beta))


@lowers("cast")
def cast(x: Value, dtype: str, forms: Mode) -> Value:
    """Floats become whole before they become integers: "whole before integer" (`modes.FORMS`)."""
    if x.is_float and "int" in dtype:
        x = truncated(x)
    return x.with_("not_equal", 0) if dtype == "bool" else x.cast(forms.dtype(dtype))
