"""Functions written as formulas of ops that the Neural Engine has, and the error of these formulas.

`written("sin", mb, x)` builds a formula; `relative_error` measures it on a grid, which decides whether a pass
may use it. The polynomials of asin, atan and erf are 4.4.45, 4.4.49 and 7.1.26 of Abramowitz and Stegun.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from anesurgery.mil import Var, np_dtype, types
from anesurgery.mil import mb as host

Formula = Callable[[Any, Var], Var]

GRID = 4097
"""The number of points at which an error is measured, more than fp16 numbers between two powers of two."""
PI_HIGH = 3.140625
"""pi in eight bits, so that small multiples are exact in fp16; `PI_LOW` is the rest."""
PI_LOW = math.pi - PI_HIGH

SINE = (-1 / 6, 1 / 120, -1 / 5040, 1 / 362880)
COSINE = (-1 / 2, 1 / 24, -1 / 720, 1 / 40320, -1 / 3628800)
ARC = (1.5707288, -0.2121144, 0.0742610, -0.0187293)
ARCTANGENT = (0.99986600, -0.33029950, 0.18014100, -0.08513300, 0.02083510)
ERROR = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
"""Taylor's of sine and cosine; of the others, those of Abramowitz and Stegun (4.4.45, 4.4.49, 7.1.26)."""

DOMAINS: dict[str, tuple[float, float]] = {
    "asin": (-1, 1),
    "acos": (-1, 1),
    "atanh": (-1 + 2**-10, 1 - 2**-10),
    "tan": (-1.375, 1.375),
}
"""Op type -> the interval in which it is defined and its formula is accurate enough."""


class _Numbers:
    """A maker that takes Python floats in the dtype of an operand."""

    def __init__(self, maker: Any, x: Var) -> None:
        self.maker, self.type = maker, np_dtype(x).type

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        make = getattr(self.maker, op_type)

        def build(**parameters: Any) -> Any:
            return make(**{k: self.type(v) if isinstance(v, float) else v for k, v in parameters.items()})

        return build

    def polynomial(self, x: Var, coefficients: Sequence[float]) -> Var:
        """Build c0 + x (c1 + x (c2 + ...))."""
        *lower, last = coefficients
        total: Any = float(last)
        for c in reversed(lower):
            total = self.add(x=self.mul(x=x, y=total), y=float(c))
        return total


def _reduced_angle(m: _Numbers, x: Var, shift: float) -> tuple[Var, Var]:
    """Build x - (n + shift) pi for the nearest integer n, and -1 to the power of n."""
    turns = m.mul(x=x, y=1 / math.pi)
    n = m.round(x=m.sub(x=turns, y=shift) if shift else turns)
    at = m.add(x=n, y=shift) if shift else n
    left = m.sub(x=m.sub(x=x, y=m.mul(x=at, y=PI_HIGH)), y=m.mul(x=at, y=PI_LOW))
    odd = m.sub(x=n, y=m.mul(x=m.floor(x=m.mul(x=n, y=0.5)), y=2.0))
    return left, m.sub(x=1.0, y=m.mul(x=odd, y=2.0))


def _odd_polynomial(m: _Numbers, x: Var, coefficients: Sequence[float]) -> Var:
    """Build x times a polynomial of x^2."""
    return m.mul(x=x, y=m.polynomial(m.square(x=x), coefficients))


def _circular(m: _Numbers, x: Var, shift: float, coefficients: Sequence[float]) -> Var:
    """Build a sine or cosine from the reduced angle."""
    left, sign = _reduced_angle(m, x, shift)
    return m.mul(x=_odd_polynomial(m, left, coefficients), y=sign)


def _acos_of(m: _Numbers, size: Var) -> Var:
    """Build the arc cosine of a number in [0, 1]."""
    root = m.sqrt(x=m.maximum(x=m.sub(x=1.0, y=size), y=0.0))
    return m.mul(x=root, y=m.polynomial(size, ARC))


def _asin(m: _Numbers, x: Var) -> Var:
    """Build the arc sine, from the arc cosine of the magnitude and the sign."""
    arc = m.sub(x=math.pi / 2, y=_acos_of(m, m.abs(x=x)))
    return m.mul(x=m.sign(x=x), y=arc)


def _atan(m: _Numbers, x: Var) -> Var:
    """Build the arc tangent from the smaller of |x| and 1 / |x|; above 1 it is pi/2 less that angle."""
    size = m.abs(x=x)
    large = m.cast(x=m.greater(x=size, y=1.0), dtype="fp16" if m.type is np.float16 else "fp32")
    ratio = m.real_div(x=m.minimum(x=size, y=1.0), y=m.maximum(x=size, y=1.0))
    angle = _odd_polynomial(m, ratio, ARCTANGENT)
    rest = m.mul(x=large, y=m.sub(x=math.pi / 2, y=m.mul(x=angle, y=2.0)))
    return m.mul(x=m.sign(x=x), y=m.add(x=angle, y=rest))


def _halves(m: _Numbers, x: Var) -> dict[str, Var]:
    """Build exp(x) / 2 as x and exp(-x) / 2 as y; they overflow only where cosh does."""
    half = math.log(2)
    return {"x": m.exp(x=m.sub(x=x, y=half)), "y": m.exp(x=m.sub(x=-half, y=x))}


def _atanh(m: _Numbers, x: Var) -> Var:
    """Build (log(1 + x) - log(1 - x)) / 2."""
    both = m.sub(x=m.log(x=m.add(x=x, y=1.0)), y=m.log(x=m.sub(x=1.0, y=x)))
    return m.mul(x=both, y=0.5)


def _erf(m: _Numbers, x: Var) -> Var:
    size = m.abs(x=x)
    t = m.real_div(x=1.0, y=m.add(x=m.mul(x=size, y=0.3275911), y=1.0))
    tail = m.mul(x=m.mul(x=t, y=m.polynomial(t, ERROR)), y=m.exp(x=m.mul(x=m.square(x=x), y=-1.0)))
    return m.mul(x=m.sign(x=x), y=m.sub(x=1.0, y=tail))


def _softplus(m: _Numbers, x: Var) -> Var:
    tail = m.log(x=m.add(x=m.exp(x=m.mul(x=m.abs(x=x), y=-1.0)), y=1.0))
    return m.add(x=m.relu(x=x), y=tail)


FORMULAS: dict[str, Formula] = {
    "sin": lambda m, x: _circular(m, x, 0.0, (1.0, *SINE)),
    "cos": lambda m, x: _circular(m, x, 0.5, (-1.0, *(-c for c in SINE))),
    "tan": lambda m, x: m.real_div(
        x=_odd_polynomial(m, x, (1.0, *SINE)), y=m.polynomial(m.square(x=x), (1.0, *COSINE))
    ),
    "asin": _asin,
    "acos": lambda m, x: m.sub(x=math.pi / 2, y=_asin(m, x)),
    "atan": _atan,
    "sinh": lambda m, x: m.sub(**_halves(m, x)),
    "cosh": lambda m, x: m.add(**_halves(m, x)),
    "atanh": _atanh,
    "erf": _erf,
    "exp2": lambda m, x: m.exp(x=m.mul(x=x, y=math.log(2))),
    "softplus": _softplus,
}
"""Op type -> its formula."""


def written(kind: str, maker: Any, x: Var) -> Var:
    """Build an op type of x by its formula."""
    return FORMULAS[kind](_Numbers(maker, x), x)


FARTHEST = 10.0
"""The point up to which softplus was right on every chip; beyond it, softplus is its operand to 5e-6."""


def safe_softplus(maker: Any, x: Var) -> Var:
    """Build softplus(min(x, 10)) + max(x - 10, 0): the op where engines get it right, a line above.

    max(x, 0) + log(1 + exp(-|x|)) would lose the digits of negative numbers: in fp16 it is 0 from -7.7 on.
    """
    m = _Numbers(maker, x)
    low = m.softplus(x=m.minimum(x=x, y=FARTHEST))
    return m.add(x=low, y=m.relu(x=m.sub(x=x, y=FARTHEST)))


def log_sum_exp(maker: Any, x: Var, axes: Sequence[int], keep: bool, epsilon: float = 0.0) -> Var:
    """Build the largest number plus the logarithm of the sum of exp(x - largest).

    Args:
        maker: builds the ops.
        x: the exponents.
        axes: the axes that are summed over.
        keep: keep these axes with length 1?
        epsilon: the epsilon of the logarithm; if above 0, the largest number counts as 0 at least.
    """
    largest = maker.reduce_max(x=x, axes=axes, keep_dims=True)
    if epsilon:
        largest = maker.maximum(x=largest, y=0.0)
    total = maker.reduce_sum(x=maker.exp(x=maker.sub(x=x, y=largest)), axes=axes, keep_dims=keep)
    share: Var = maker.log(x=total, epsilon=epsilon)
    return maker.add(x=share, y=largest if keep else maker.squeeze(x=largest, axes=axes))


@lru_cache(maxsize=256)
def relative_error(kind: str, low: float, high: float, dtype: str) -> float:
    """Return the largest error of a formula on a grid over [low, high], relative to the largest result.

    The formula is computed in the arithmetic of `dtype`, the exact result in fp32.
    """
    from anesurgery.interpret.predictor import run

    spec = host.TensorSpec((GRID,), dtype=types.fp16 if dtype == "fp16" else types.fp32)

    @host.program(input_specs=[spec])
    def program(x: Var) -> Var:
        return written(kind, host, x)

    @host.program(input_specs=[host.TensorSpec((GRID,))])
    def exact(x: Var) -> Var:
        return getattr(host, kind)(x=x)

    numbers = np.linspace(low, high, GRID).astype(np.float16 if dtype == "fp16" else np.float32)
    (results,) = run(program, {"x": numbers}, precision=dtype).values()
    (expected,) = run(exact, {"x": numbers.astype(np.float32)}).values()
    error = np.abs(results.astype(np.float64) - expected.astype(np.float64)).max()
    return float(error / max(np.abs(expected).max(), np.finfo(np.float32).tiny))
