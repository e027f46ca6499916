"""The arithmetic of fp64, in which every operand may be off by a little: what rounding is, and what it can do.

In fp64 a difference that is only rounding is 2^-29 of what it is in fp32; any other difference stays. With
operands that are off, a run shows what errors of that size do to a result, sums that cancel included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anesurgery.interpret.table import Implementation
from anesurgery.mil import Operation
from anesurgery.ops import CARRIERS, UNROUNDED, names

STEADY = UNROUNDED | CARRIERS
"""Ops that make no float by rounding."""
ROUNDED_ONCE = names("add sub")
"""Ops that round their result and nothing else: two numbers that are alike have an exact difference."""
EXPONENT = ("pow", "y")
"""An operand that is not off: a negative number has a power for whole exponents only."""


class Double:
    """Floats are fp64 between ops.

    Args:
        off: each float that an op reads is off by this share of it, up or down; of a sum of two numbers,
            the result is.
        seed: of the directions.
    """

    floats = torch.float64

    def __init__(self, off: float = 0.0, seed: int = 0) -> None:
        self.off, self.generator = off, torch.Generator().manual_seed(seed)

    def meaning(self, op: Operation, row: Implementation) -> Callable[..., Any]:
        """The function on fp64 operands."""
        if op.op_type in ROUNDED_ONCE:
            return lambda **operands: self._wide(row.function(**{k: _double(v) for k, v in operands.items()}))

        def function(**operands: Any) -> Any:
            return row.function(
                **{k: (_double if (op.op_type, k) == EXPONENT else self._wide)(v) for k, v in operands.items()}
            )

        return function

    def _wide(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._wide, value))
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if not self.off:
            return value.double()
        up = torch.randint(0, 2, value.shape, generator=self.generator)
        return value.double() * (1 + self.off * (2 * up - 1))


class Unsteady(Double):
    """The arithmetic of fp64 in which the floats that an op makes by rounding are off; what it is given is not.

    A tie among inputs stays a tie, and a bound that they meet is met.
    """

    def meaning(self, op: Operation, row: Implementation) -> Callable[..., Any]:
        """The function, whose results are off."""
        if row.moves or op.op_type in STEADY:
            return Double().meaning(op, row)
        return lambda **operands: self._wide(row.function(**{k: _double(v) for k, v in operands.items()}))


def _double(value: Any) -> Any:
    return Double()._wide(value)
