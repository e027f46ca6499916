"""Convolutions along the tokens that look back only, as state-space models and LFM2 have them.

Each result then depends on its own token and the `reach` before it; before the first token stand zeros. Where
a convolution pads its end too, its last results look ahead, and are cut off by what reads them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anesurgery.errors import Refusal
from anesurgery.facts.window_pads import window_pads
from anesurgery.mil import Operation, constant
from anesurgery.semantics.reading import ints, number


def pointwise(op: Operation, axis: int) -> bool:
    """Does a convolution treat every place of an axis of its input alone?"""
    at = axis - 2
    strides = ints(op, "strides") or [1] * (op.x.rank - 2)
    return at >= 0 and op.weight.shape[axis] == strides[at] == 1 and not any(_pads(op, at))


def reach(op: Operation, axis: int, zeros: int) -> int | Refusal:
    """How many tokens before its own each result of a convolution looks at; or why it is not causal.

    Args:
        op: the convolution, of static shape.
        axis: of its input, which holds the tokens.
        zeros: how many zeros stand before the first token already.
    """
    at = axis - 2
    strides, dilations = (ints(op, n) or [1] * (op.x.rank - 2) for n in ("strides", "dilations"))
    if at < 0 or strides[at] != 1:
        return Refusal("it sums over the tokens" if at < 0 else f"its window moves by {strides[at]} tokens")
    found: int = (int(op.weight.shape[axis]) - 1) * dilations[at]
    before = zeros + _pads(op, at)[0]
    if before != found:
        word = "looks ahead of a token" if before < found else "leaves out the token itself"
        return Refusal(
            f"its window is {found + 1} tokens wide, with {before} zeros before the first: it {word}"
        )
    return found


def without_pads(op: Operation, axis: int) -> dict[str, Any]:
    """The parameters with which a convolution pads this axis no more."""
    pads = window_pads(op)
    pads[2 * (axis - 2) : 2 * (axis - 1)] = [0, 0]
    return {"pad_type": "custom", "pad": np.array(pads, np.int32)}


def zeros_before(op: Operation, axis: int) -> int | Refusal:
    """How many zeros a `pad` puts before an axis, and nowhere else; or what it does."""
    pads = ints(op, "pad")
    if not pads or str(constant(op.inputs.get("mode")) or "constant") != "constant":
        return Refusal("it pads the tokens with other tokens")
    if number(op.inputs.get("constant_val")) not in (None, 0):
        return Refusal("it pads the tokens with another number than 0")
    every = [0] * (2 * op.x.rank - len(pads)) + pads
    if any(every[2 * axis + 1 :]) or any(every[: 2 * axis]):
        return Refusal("it pads more than what stands before the first token")
    return every[2 * axis]


def _pads(op: Operation, at: int) -> list[int]:
    return window_pads(op)[2 * at : 2 * at + 2]
