"""Where an op with large weights can be cut along its outputs, so that it is computed a block at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from anesurgery.interpret.arithmetic.field import Image
from anesurgery.mil import Operation

BLOCK = 1 << 19
"""Weights that are looked at at a time, where an op can be cut along its outputs."""

CUTS: dict[str, tuple[Mapping[str, int], int]] = {
    "linear": ({"weight": 0, "bias": 0}, -1),
    "conv": ({"weight": 0, "bias": 0}, 1),
    "matmul": ({"y": 1}, -1),
    "gather": ({"x": 1}, -1),
}
"""Op type -> the axis along which each constant can be cut, the largest first, and that of the result."""


def cut_of(op: Operation, arguments: Mapping[str, Any]) -> tuple[Mapping[str, int], int] | None:
    """Where to cut an op whose weights are large: the axis of each operand, and that of the result."""
    if op.op_type not in CUTS:
        return None
    cut, axis = CUTS[op.op_type]
    weight = arguments.get(next(iter(cut)))
    if (
        not isinstance(weight, torch.Tensor)
        or weight.numel() <= BLOCK
        or weight.shape[cut[next(iter(cut))]] < 2
    ):
        return None
    if any(isinstance(arguments.get(name), Image) for name in cut):
        return None
    plain = {
        "conv": int(arguments.get("groups") or 1) == 1,
        "matmul": weight.ndim == 2 and not arguments.get("transpose_y"),
        "gather": weight.ndim == 2 and int(arguments.get("axis") or 0) == 0 and not arguments.get("batch_dims"),
    }
    return (cut, axis) if plain.get(op.op_type, True) else None
