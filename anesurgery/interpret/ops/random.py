"""Random numbers: the same for the same seed, and others at each call without one (seed -1).

They have the documented distributions, and are not the numbers that Core ML draws. Without a seed they come
from torch's global generator, so `torch.manual_seed` makes a run repeatable.
"""

from __future__ import annotations

from typing import Any

import torch

from anesurgery.interpret.table import impl, ints

Tensor = torch.Tensor


def _generator(seed: int) -> torch.Generator | None:
    return None if int(seed) == -1 else torch.Generator().manual_seed(int(seed))


@impl("random_uniform")
def random_uniform(shape: Any, low: float = 0.0, high: float = 1.0, seed: int = -1) -> Tensor:
    """Numbers from [low, high), all equally likely."""
    return torch.empty(ints(shape)).uniform_(float(low), float(high), generator=_generator(seed))


@impl("random_normal")
def random_normal(shape: Any, mean: float = 0.0, stddev: float = 1.0, seed: int = -1) -> Tensor:
    """Numbers from a normal distribution."""
    return torch.empty(ints(shape)).normal_(float(mean), float(stddev), generator=_generator(seed))


@impl("random_bernoulli")
def random_bernoulli(shape: Any, prob: float = 0.5, seed: int = -1) -> Tensor:
    """1 with the given probability, else 0."""
    return torch.empty(ints(shape)).bernoulli_(float(prob), generator=_generator(seed))


@impl("random_categorical")
def random_categorical(x: Tensor, mode: str = "logits", size: int = 1, seed: int = -1) -> Tensor:
    """Places drawn with replacement from the last axis of x: [..., n] -> [..., size]."""
    weights = torch.softmax(x, -1) if mode == "logits" else x
    flat = weights.reshape(-1, x.shape[-1])
    drawn = torch.multinomial(flat, int(size), replacement=True, generator=_generator(seed))
    return drawn.reshape(*x.shape[:-1], int(size))
