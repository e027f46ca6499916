"""Two arithmetics that no measurement pins down: without subnormal numbers, and with running sums in fp16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from anesurgery.interpret.table import Implementation
from anesurgery.mil import Operation, np_dtype

NORMAL = 2.0**-14
"""The smallest number of fp16 that is not subnormal."""


class Flushed:
    """The arithmetic of fp16 as a unit computes that holds no subnormal numbers."""

    def meaning(self, op: Operation, row: Implementation) -> Callable[..., Any]:
        """The function, of operands and to a result of which what is below the normal numbers is 0."""
        return lambda **operands: _flushed(row.function(**{k: _flushed(v) for k, v in operands.items()}))


class OneByOne:
    """The arithmetic of fp16 in which a running sum of fp16 is rounded after each number."""

    def meaning(self, op: Operation, row: Implementation) -> Callable[..., Any]:
        """The function, whose result is rounded to the type of the op."""
        half = op.op_type != "const" and np_dtype(op.outputs[0]) == np.float16
        function = _running if half and op.op_type == "cumsum" else row.function
        return (lambda **operands: _half(function(**operands))) if half else function


def _running(x: torch.Tensor, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> torch.Tensor:
    assert not exclusive
    assert not reverse
    total, sums = torch.zeros(()), list[torch.Tensor]()
    for part in x.unbind(int(axis)):
        total = (total + part).half().float()
        sums.append(total)
    return torch.stack(sums, int(axis))


def _half(value: Any) -> Any:
    return value.half().float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _flushed(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_flushed, value))
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    rounded = value.half().float()
    return torch.where(rounded.abs() < NORMAL, 0.0, rounded)
