"""Arithmetic in fp64, which tells rounding from a real difference: `Double` and `PerturbedRounding`.

In fp64 a difference that is only rounding shrinks to 2^-29 of what it is in fp32; any other difference stays.
With operands that are off by a relative error, a run shows what errors of that size do to a result, also where
sums cancel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anesurgery.interpret.table import Implementation
from anesurgery.mil import Operation
from anesurgery.ops import CARRIERS, UNROUNDED, names

EXACT = UNROUNDED | CARRIERS
"""Ops that make no float by rounding."""
ROUND_ONCE = names("add sub")
"""Ops that round their result and nothing else: two numbers that are alike have an exact difference."""
EXPONENT = ("pow", "y")
"""An operand that is never off: a negative number has a power for whole exponents only."""


class Double:
    """Floats are fp64 between ops.

    Args:
        relative_error: each float that an op reads is off by this share of it, up or down; of `ROUND_ONCE`,
            the result is.
        seed: of the directions.
    """

    floats = torch.float64

    def __init__(self, relative_error: float = 0.0, seed: int = 0) -> None:
        self.relative_error, self.generator = relative_error, torch.Generator().manual_seed(seed)

    def meaning(self, op: Operation, row: Implementation) -> Callable[..., Any]:
        """Return the function of an op whose operands are off, or whose result is."""
        if op.op_type in ROUND_ONCE:
            return self._with_result_off(row)

        def compute(**operands: Any) -> Any:
            exact = {k: _as_fp64(v) for k, v in operands.items() if (op.op_type, k) == EXPONENT}
            return row.function(**{k: self._off(v) for k, v in operands.items() if k not in exact}, **exact)

        return compute

    def _with_result_off(self, row: Implementation) -> Callable[..., Any]:
        """Return a function that computes on exact operands and puts the error on the result."""
        return lambda **operands: self._off(row.function(**{k: _as_fp64(v) for k, v in operands.items()}))

    def _off(self, value: Any) -> Any:
        """Return floats as fp64, each off by the relative error, up or down by chance."""
        value = _as_fp64(value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._off, value))
        if not self.relative_error or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        up = torch.randint(0, 2, value.shape, generator=self.generator, dtype=torch.int8)
        factor = up.double().mul_(2 * self.relative_error).add_(1 - self.relative_error)
        return factor.mul_(value)


class PerturbedRounding(Double):
    """The arithmetic of fp64 in which the floats that an op makes by rounding are off; what it is given is not.

    A tie among inputs stays a tie, and a bound that they meet is met.
    """

    def meaning(self, op: Operation, row: Implementation) -> Callable[..., Any]:
        """Return the function, whose results are off unless the op only moves or copies numbers."""
        if row.moves or op.op_type in EXACT:
            return Double().meaning(op, row)
        return self._with_result_off(row)


def _as_fp64(value: Any) -> Any:
    """Return floats, those in lists too, as fp64; anything else as it is."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_as_fp64, value))
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.double()
