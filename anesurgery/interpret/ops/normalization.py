"""Normalizations over axes, channels and batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from anesurgery.interpret.table import impl, ints

Tensor = torch.Tensor


@impl("layer_norm")
def layer_norm(
    x: Tensor, axes: Any = None, gamma: Tensor | None = None, beta: Tensor | None = None, epsilon: float = 1e-5
) -> Tensor:
    """Zero mean and unit variance over `axes`, then times gamma plus beta (of the axes' shape)."""
    chosen = sorted(a % x.ndim for a in (range(x.ndim) if axes is None else ints(axes)))
    if chosen == list(range(x.ndim - len(chosen), x.ndim)):
        return F.layer_norm(x, [x.shape[a] for a in chosen], gamma, beta, float(epsilon))
    shape = [x.shape[a] if a in chosen else 1 for a in range(x.ndim)]
    mean = x.mean(chosen, keepdim=True)
    variance = ((x - mean) ** 2).mean(chosen, keepdim=True)
    y = (x - mean) / torch.sqrt(variance + epsilon)
    y = y if gamma is None else y * gamma.reshape(shape)
    return y if beta is None else y + beta.reshape(shape)


@impl("batch_norm")
def batch_norm(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-5,
) -> Tensor:
    """Each channel (axis 1) by its stored mean and variance."""
    return F.batch_norm(x, mean, variance, gamma, beta, False, 0.0, float(epsilon))


@impl("instance_norm")
def instance_norm(
    x: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None, epsilon: float = 1e-5
) -> Tensor:
    """Each channel of each sample by its own mean and variance."""
    axes, shape = tuple(range(2, x.ndim)), (-1, *(1,) * (x.ndim - 2))
    variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    y = (x - mean) * torch.rsqrt(variance + epsilon)
    y = y if gamma is None else y * gamma.reshape(shape)
    return y if beta is None else y + beta.reshape(shape)


@impl("l2_norm")
def l2_norm(x: Tensor, epsilon: float = 1e-6) -> Tensor:
    """X over the root of its sum of squares (plus epsilon) over the last three axes."""
    axes = tuple(range(-min(3, x.ndim), 0))
    return x / torch.sqrt((x * x).sum(axes, keepdim=True) + epsilon)


@impl("local_response_norm")
def local_response_norm(
    x: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Tensor:
    """X over (k + alpha / size * the sum of squares of `size` neighbours on axis -3) ** beta."""
    flat = x.reshape(-1, *x.shape[-3:])
    return F.local_response_norm(flat, int(size), float(alpha), float(beta), float(k)).reshape(x.shape)
