"""Ops that trade space against channels or batches, a block of height and width at a time.

`coreai` gives these functions tensors of a file, and writes what they do with them.

Where a block turns into channels, "first" names what the outer part of the channel number counts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from anesurgery.interpret.table import impl, ints

Tensor = torch.Tensor


@impl("depth_to_space")
def depth_to_space(x: Tensor, block_size: int) -> Tensor:
    """Channels spread over blocks: [n, b b c, h, w] -> [n, c, h b, w b], the block first."""
    n, c, h, w = x.shape
    b = int(block_size)
    y = x.reshape(n, b, b, c // (b * b), h, w).permute(0, 3, 4, 1, 5, 2)
    return y.reshape(n, c // (b * b), h * b, w * b)


@impl("space_to_depth")
def space_to_depth(x: Tensor, block_size: int) -> Tensor:
    """Blocks gathered into channels: [n, c, h b, w b] -> [n, b b c, h, w], the block first."""
    n, c, h, w = x.shape
    b = int(block_size)
    y = x.reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4)
    return y.reshape(n, c * b * b, h // b, w // b)


@impl("pixel_shuffle")
def pixel_shuffle(x: Tensor, upscale_factor: int) -> Tensor:
    """Channels spread over blocks: [n, c b b, h, w] -> [n, c, h b, w b], the channel first."""
    n, c, h, w = x.shape
    b = int(upscale_factor)
    y = x.reshape(n, c // (b * b), b, b, h, w).permute(0, 1, 4, 2, 5, 3)
    return y.reshape(n, c // (b * b), h * b, w * b)


@impl("pixel_unshuffle")
def pixel_unshuffle(x: Tensor, downscale_factor: int) -> Tensor:
    """Blocks gathered into channels: [n, c, h b, w b] -> [n, c b b, h, w], the channel first."""
    n, c, h, w = x.shape
    b = int(downscale_factor)
    y = x.reshape(n, c, h // b, b, w // b, b).permute(0, 1, 3, 5, 2, 4)
    return y.reshape(n, c * b * b, h // b, w // b)


@impl("space_to_batch")
def space_to_batch(x: Tensor, block_shape: Any, paddings: Any) -> Tensor:
    """Padded with zeros, then places of a block to batches: [n, c, h a, w b] -> [a b n, c, h, w]."""
    (top, bottom), (left, right) = (ints(pair) for pair in paddings)
    a, b = ints(block_shape)
    x = F.pad(x, [left, right, top, bottom])
    n, c, h, w = x.shape
    y = x.reshape(n, c, h // a, a, w // b, b).permute(3, 5, 0, 1, 2, 4)
    return y.reshape(a * b * n, c, h // a, w // b)


@impl("batch_to_space")
def batch_to_space(x: Tensor, block_shape: Any, crops: Any) -> Tensor:
    """Batches to places of a block, then cropped: [a b n, c, h, w] -> [n, c, h a, w b]."""
    (top, bottom), (left, right) = (ints(pair) for pair in crops)
    a, b = ints(block_shape)
    n, c, h, w = x.shape
    y = x.reshape(a, b, n // (a * b), c, h, w).permute(2, 3, 4, 0, 5, 1)
    y = y.reshape(n // (a * b), c, h * a, w * b)
    return y[:, :, top : h * a - bottom, left : w * b - right]
