"""Lower ops on each element by itself: arithmetic, comparisons, functions, activations."""

from __future__ import annotations

from anesurgery.coreai.dtypes import numpy_of
from anesurgery.coreai.modes import Mode
from anesurgery.coreai.table import BINARY, GELU, TABLE, UNARY, as_interpreted, lowers
from anesurgery.coreai.toolkit import ops
from anesurgery.coreai.values import Value, binary_op, call, in_floats, truncated, unary_op, where
from anesurgery.ops import names

TABLE |= {name: unary_op(name) for name in (*UNARY, "relu")}
TABLE |= {name: binary_op(op) for name, op in BINARY.items()}
as_interpreted(*names("identity clip threshold linear_activation scaled_tanh sigmoid_hard"))


def sign(x: Value) -> Value:
    """Return -1, 0 or 1; NaN stays NaN."""
    steps = (x > 0).cast(x.dtype) - (x < 0).cast(x.dtype)
    return where(x.equal(x), steps, x) if x.is_float else steps


def softplus(x: Value) -> Value:
    """Return log(1 + exp x), in the form "shift exponentials" (`modes.FORMS`)."""
    return call("relu", x) + call("log", call("exp", -x.abs()) + 1)


def _leaky(x: Value, alpha: float = 0.01) -> Value:
    return where(x < 0, x * alpha, x)


def _per_channel(x: Value, numbers: Value) -> Value:
    """Reshape a vector to one number for each channel (axis 1)."""
    return numbers.reshape([1, -1, *[1] * (x.ndim - 2)])


def _plus_epsilon(x: Value, epsilon: float) -> Value:
    return x + epsilon if numpy_of(x.dtype).type(epsilon) else x


TABLE |= {
    "sub": lambda x, y: x - y,
    "less": lambda x, y: x < y,
    "less_equal": lambda x, y: x <= y,
    "greater_equal": lambda x, y: x >= y,
    "mod": lambda x, y: x.fmod(y),
    "logical_not": lambda x: ~x,
    "floor": lambda x: x.floor(),
    "ceil": lambda x: -(-x).floor(),
    "sign": sign,
    "square": lambda x: x * x,
    "exp2": in_floats(lambda x: x.like(2.0).binary("pow", x)),
    "inverse": lambda x, epsilon=1e-4: 1.0 / _plus_epsilon(x, epsilon),
    "log": lambda x, epsilon=1e-45: call("log", _plus_epsilon(x, epsilon)),
    "rsqrt": lambda x, epsilon=1e-12: call("rsqrt", _plus_epsilon(x, epsilon)),
    "select": lambda cond, a, b: where(cond.cast("bool"), a, b),
    "relu6": lambda x: call("relu", x).minimum(6.0),
    "softplus": softplus,
    "softplus_parametric": lambda x, alpha, beta: _per_channel(x, alpha) * softplus(x * _per_channel(x, beta)),
    "gelu": lambda x, mode="EXACT": Value(ops.gelu(x.node, approximate=GELU[mode])),
    "softsign": lambda x: x / (x.abs() + 1.0),
    "elu": lambda x, alpha=1.0: where(x < 0, (call("exp", x) - 1.0) * alpha, x),
    "leaky_relu": _leaky,
    "clamped_relu": lambda x, alpha, beta: _leaky(x, alpha).minimum(beta),
    "prelu": lambda x, alpha: where(x < 0, x * _per_channel(x, alpha), x),
    "thresholded_relu": lambda x, alpha=1.0: where(x < alpha, 0.0, x),
}


@lowers("cast")
def cast(x: Value, dtype: str, mode: Mode) -> Value:
    """Write a cast; floats are truncated before they become integers, in the form "round before a cast"."""
    if x.is_float and "int" in dtype:
        x = truncated(x)
    return x.binary("not_equal", 0) if dtype == "bool" else x.cast(mode.dtype(dtype))
