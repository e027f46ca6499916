"""Channels in another order, or some of them, by a convolution of 1x1 that has a single 1 in each kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from anesurgery.neuralnetwork.making import weights

CHANNELS = 512
"""Channels above which a pass does not write a matrix: C x C weights, and C x C products for each pixel, of
which 512 have 262,144."""


def picking(picks: Sequence[int], channels: int) -> dict[str, Any]:
    """The fields of a `convolution` whose channel i is channel picks[i] of its input.

    Each number is 1 times one number plus zeros, hence exact for finite ones; an infinite number makes the
    others of its pixel NaN.

    Args:
        picks: places of channels, from 0.
        channels: how many the input has.
    """
    matrix = np.zeros((len(picks), channels), np.float32)
    matrix[np.arange(len(picks)), list(picks)] = 1
    return {
        "outputChannels": len(picks),
        "kernelChannels": channels,
        "kernelSize": [1, 1],
        "valid": {},
        "weights": weights(matrix),
    }
