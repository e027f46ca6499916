"""Images, and one image op at a time, against a reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from closeness import assert_close

from anesurgery.interpret import evaluate
from anesurgery.mil import Array, Var, ct, mb

MODES = ["STRICT_ALIGN_CORNERS", "ALIGN_CORNERS", "DEFAULT", "OFFSET_CORNERS", "UNALIGN_CORNERS"]


IOS15, IOS16, IOS17 = ct.target.iOS15, ct.target.iOS16, ct.target.iOS17


X = np.random.default_rng(0).standard_normal((2, 3, 5, 7)).astype(np.float32)


T = torch.from_numpy(X)


def call(op_type: str, opset: Any = IOS16, **inputs: Any) -> Array:
    """The numbers of one op, whose shape must be the one that coremltools infers."""
    made: list[Var] = []

    @mb.program(input_specs=[mb.TensorSpec((1,))], opset_version=opset)
    def program(unused: Var) -> Var:
        made.append(getattr(mb, op_type)(**inputs))
        return mb.identity(x=unused)

    found: Array = evaluate([made[0].op], {}, made)[0].numpy()  # type: ignore[list-item]
    assert found.shape == tuple(int(n) for n in made[0].shape)
    return found


def close(found: Array, expected: Any, rtol: float = 5e-6) -> None:
    assert_close(found, expected, rtol)


def place(mode: str, size: float, n: int, i: int) -> float:
    """The documented place of sample i of n in an axis of a size."""
    if mode == "ALIGN_CORNERS" and n == 1:
        at = (size - 1) / 2
    elif mode in ("STRICT_ALIGN_CORNERS", "ALIGN_CORNERS"):
        at = float(np.linspace(0, size - 1, n)[i])
    elif mode == "DEFAULT":
        at = float(np.linspace(0, size - size / n, n)[i])
    elif mode == "OFFSET_CORNERS":
        delta = max(1, size - 1) / n
        at = float(np.linspace(delta / 2, delta / 2 + (n - 1) * delta, n)[i])
    else:
        at = i * size / n + 0.5 * size / n - 0.5
    return min(size - 1, max(0, at))


def blend(image: Array, h: float, w: float) -> Array:
    """[..., height, width] at a place inside: the four pixels around it."""
    top, left = int(np.floor(h)), int(np.floor(w))
    bottom, right = min(top + 1, image.shape[-2] - 1), min(left + 1, image.shape[-1] - 1)
    a, b = h - top, w - left
    return (1 - a) * ((1 - b) * image[..., top, left] + b * image[..., top, right]) + a * (
        (1 - b) * image[..., bottom, left] + b * image[..., bottom, right]
    )


def pick(image: Array, h: float, w: float) -> Array:
    rows, columns = image.shape[-2:]
    return image[..., min(int(h + 0.5 + 1e-9), rows - 1), min(int(w + 0.5 + 1e-9), columns - 1)]


def resized(image: Array, height: int, width: int, mode: str, nearest: bool = False) -> Array:
    made = np.zeros((*image.shape[:-2], height, width))
    for i, j in np.ndindex(height, width):
        h, w = place(mode, image.shape[-2], height, i), place(mode, image.shape[-1], width, j)
        made[..., i, j] = pick(image, h, w) if nearest else blend(image, h, w)
    return made
