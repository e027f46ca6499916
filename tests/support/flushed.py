"""An arithmetic in which every subnormal number of fp16 counts as 0, whatever op reads or makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anesurgery.interpret.table import Meaning
from anesurgery.mil import Operation

NORMAL = 2.0**-14
"""The smallest number of fp16 that is not subnormal."""


class Flushed:
    """The arithmetic of fp16 as a unit computes that holds no subnormal numbers."""

    def meaning(self, op: Operation, row: Meaning) -> Callable[..., Any]:
        """The function, of operands and to a result of which what is below the normal numbers is 0."""
        return lambda **operands: _flushed(row.function(**{k: _flushed(v) for k, v in operands.items()}))


def _flushed(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_flushed, value))
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    rounded = value.half().float()
    return torch.where(rounded.abs() < NORMAL, 0.0, rounded)
