"""What the interpreter makes of a few numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from anesurgery.interpret.table import TABLE
from anesurgery.mil import Operation, constant, op_inputs
from anesurgery.semantics.constant_ends import Interval


def image(op: Operation, numbers: Interval) -> Interval | None:
    """What a unary op makes of two numbers; None where a parameter is dynamic, or a result is not a number."""
    ends = results_at(op, {"x": numbers})
    return None if ends is None or any(map(math.isnan, ends)) else (ends[0], ends[1])


def results_at(op: Operation, numbers: Mapping[str, Sequence[float]]) -> list[float] | None:
    """What an elementwise op makes of some numbers, by its meaning; None where a parameter is dynamic."""
    fixed = {k: constant(v) for k, v in op_inputs(op, *numbers).items()}
    if any(v is None for v in fixed.values()):
        return None
    arguments: dict[str, Any] = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in fixed.items()}
    arguments |= {k: torch.tensor(n, dtype=torch.float64) for k, n in numbers.items()}
    results: list[float] = TABLE[op.op_type].function(**arguments).double().tolist()
    return results
