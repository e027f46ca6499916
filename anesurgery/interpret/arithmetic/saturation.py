"""Sums of products with a ceiling: matmul, linear and conv whose partial sums may not reach 32768.

Three looks, each dearer than the one before, and each only where the one before leaves a doubt: a bound for the
whole result, or for a column of it, from norms; one for each element from the sums of magnitudes; and the
partial sums themselves. What is known of a constant is remembered with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from anesurgery.interpret.ops.conv import CONV, pad_axes, padding
from anesurgery.interpret.table import TABLE, ints

Tensor = torch.Tensor

CEILING = 32768.0
"""Magnitude at which a sum of products becomes infinite (see `neural_engine.ELEMENTS`)."""
AT_ONCE = 1 << 22
"""Products that are looked at together: 16 MiB of fp32."""

RESULTS = frozenset({"conv_transpose", "einsum", "conv_quantized"})
"""Ops whose result is held against the ceiling, and not their partial sums."""


@dataclass(frozen=True)
class Sum:
    """A sum of products, and the ways to bound it."""

    total: Callable[[], Tensor]
    """The result, in fp32."""
    roughly: Callable[[], float]
    """No partial sum of any element is larger than this."""
    magnitudes: Callable[[], Tensor]
    """For each element, the sum of the magnitudes of its terms: no partial sum is larger."""
    risky: Callable[[], Tensor]
    """For each element, may a partial sum reach the ceiling?"""
    terms: Callable[[Tensor], Tensor]
    """Places [count, rank] -> the terms of each, in order [count, terms]."""
    length: int
    """Number of terms."""


def overflowed(total: Tensor) -> Tensor:
    """The result, infinite where its magnitude reaches the ceiling."""
    if total.numel() == 0 or float(total.abs().amax()) < CEILING:
        return total
    return torch.where(total.abs() >= CEILING, torch.copysign(torch.full_like(total, math.inf), total), total)


def limited(op_type: str, flush: float = 0.0) -> Callable[..., Tensor]:
    """The op as an engine computes it: infinite where a partial sum reaches the ceiling, whatever comes after.

    Args:
        op_type: of `SUMS`.
        flush: operands below this magnitude count as 0.
    """
    make = SUMS[op_type]

    def compute(**arguments: Any) -> Tensor:
        if not arguments["x"].is_floating_point():
            return TABLE[op_type].function(**arguments)
        if flush:
            arguments = {k: _flushed(v, flush) for k, v in arguments.items()}
        return held(make(**arguments))

    return compute


def held(summed: Sum) -> Tensor:
    """The result of a sum with the ceiling."""
    total = summed.total()
    if summed.length < 2 or total.numel() == 0 or summed.roughly() < CEILING:
        return total
    risky = summed.risky().nonzero()
    for places in torch.split(risky, max(1, AT_ONCE // summed.length)):
        if len(places):
            partial = summed.terms(places).cumsum(-1)
            over = partial.abs() >= CEILING
            first = partial.gather(-1, over.int().argmax(-1, keepdim=True))[:, 0]
            at = tuple(places.T)
            total[at] = torch.where(
                over.any(-1), torch.copysign(torch.full_like(first, math.inf), first), total[at]
            )
    return total


def bound(op_type: str, arguments: dict[str, Any]) -> float:
    """The largest magnitude that a partial sum of an op can reach, in whatever order its terms are added."""
    magnitudes = SUMS[op_type](**arguments).magnitudes()
    return float(magnitudes.amax()) if magnitudes.numel() else 0.0


def _flushed(value: Any, least: float) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return torch.where(value.abs() < least, 0.0, value)


def _matmul(
    x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False, start: float = 0.0
) -> Sum:
    """X times y; `start` is the largest magnitude from which a sum begins."""
    transpose_y = transpose_y and y.ndim > 1
    columns = remembered(y, ("columns", transpose_y), lambda: _columns(y, transpose_y))
    x = x.transpose(-1, -2) if transpose_x and x.ndim > 1 else x
    y = y.transpose(-1, -2) if transpose_y else y
    left, right = (x[None] if x.ndim == 1 else x), (y[:, None] if y.ndim == 1 else y)
    batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    shape = torch.matmul(torch.empty(x.shape, device="meta"), torch.empty(y.shape, device="meta")).shape

    def terms(places: Tensor) -> Tensor:
        full = [*batch, left.shape[-2], right.shape[-1]]
        flat = torch.zeros(len(places), dtype=torch.long)
        for axis, size in enumerate(shape):
            flat = flat * size + places[:, axis]
        *lead, i, j = torch.unravel_index(flat, full)
        rows = left.expand(*batch, *left.shape[-2:])[(*lead, i)]
        columns = right.expand(*batch, *right.shape[-2:]).transpose(-1, -2)[(*lead, j)]
        return rows * columns

    def risky() -> Tensor:
        if y.ndim == 1:
            return torch.matmul(x.abs(), y.abs()) + start >= CEILING
        risk = torch.zeros(shape, dtype=torch.bool)
        some = (largest_of(x) * columns + start >= CEILING).nonzero()[:, 0]
        risk[..., some] = torch.matmul(x.abs(), y[..., some].abs()) + start >= CEILING
        return risk

    return Sum(
        lambda: TABLE["matmul"].function(x=x, y=y),
        lambda: largest_of(left) * largest_of(columns) + start,
        lambda: torch.matmul(x.abs(), y.abs()),
        risky,
        terms,
        left.shape[-1],
    )


def _columns(y: Tensor, transposed: bool) -> Tensor:
    """The sum of magnitudes of each column, the largest of all batches."""
    if y.ndim == 1:
        return y.abs().sum()[None]
    sums = torch.linalg.vector_norm(y, 1, -1 if transposed else -2)
    return sums if sums.ndim == 1 else sums.flatten(0, -2).amax(0)


_KNOWN: Any = WeakTensorKeyDictionary()


def remembered(tensor: Tensor, key: Any, compute: Callable[[], Any]) -> Any:
    """What was computed of a tensor under a key, kept as long as the tensor lives; nobody writes into one."""
    held = _KNOWN.setdefault(tensor, {})
    if key not in held:
        held[key] = compute()
    return held[key]


def largest_of(value: Tensor) -> float:
    """The largest magnitude of some numbers; 0 of none."""
    return float(torch.linalg.vector_norm(value, math.inf)) if value.numel() else 0.0


def _linear(x: Tensor, weight: Tensor, bias: Any = None) -> Sum:
    start = torch.zeros(weight.shape[0]) if bias is None else torch.as_tensor(bias).to(weight.dtype)
    product = _matmul(x, weight, transpose_y=True, start=largest_of(start))

    def terms(places: Tensor) -> Tensor:  # the bias is the value that the sum starts from
        return torch.cat([start[places[:, -1]][:, None], product.terms(places)], -1)

    return Sum(
        lambda: TABLE["linear"].function(x=x, weight=weight, bias=bias),
        product.roughly,
        lambda: product.magnitudes() + start.abs(),
        product.risky,
        terms,
        product.length,
    )


def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    strides: Any = None,
    pad_type: str = "valid",
    pad: Any = None,
    dilations: Any = None,
    groups: int = 1,
) -> Sum:
    n = x.ndim - 2
    s, d = ([1] * n if v is None else ints(v) for v in (strides, dilations))
    padded = pad_axes(x, padding(pad_type, pad, list(x.shape[2:]), list(weight.shape[2:]), s, d))
    start = torch.zeros(weight.shape[0]) if bias is None else bias

    def terms(places: Tensor) -> Tensor:
        per_group, inside = weight.shape[0] // int(groups), weight.shape[1]
        channels = (places[:, 1] // per_group * inside)[:, None] + torch.arange(inside)
        flat = torch.zeros(len(places), 1, dtype=torch.long)
        for axis in range(n):
            taps = torch.arange(weight.shape[2 + axis]) * d[axis]
            along = (places[:, 2 + axis] * s[axis])[:, None] + taps
            flat = flat[:, :, None] * padded.shape[2 + axis] + along[:, None, :]
            flat = flat.flatten(1)
        patches = padded.flatten(2)[places[:, 0][:, None, None], channels[:, :, None], flat[:, None, :]]
        products = (patches * weight.flatten(2)[places[:, 1]]).flatten(1)
        return torch.cat([start[places[:, 1]][:, None], products], -1)

    def magnitudes() -> Tensor:
        return CONV[n](padded.abs(), weight.abs(), start.abs(), s, 0, d, int(groups))

    norm = remembered(weight, "norm", lambda: largest_of(torch.linalg.vector_norm(weight.flatten(1), 1, -1)))
    return Sum(
        lambda: TABLE["conv"].function(x, weight, bias, strides, pad_type, pad, dilations, groups),
        lambda: largest_of(x) * norm + largest_of(start),
        magnitudes,
        lambda: magnitudes() >= CEILING,
        terms,
        math.prod(weight.shape[1:]),
    )


SUMS: dict[str, Callable[..., Sum]] = {"matmul": _matmul, "linear": _linear, "conv": _conv}
"""Op type -> its sum."""
