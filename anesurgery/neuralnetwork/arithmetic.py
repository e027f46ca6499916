"""Arithmetic of the first specification: sums, products, unary functions, reductions, scale and bias."""

from __future__ import annotations

from functools import reduce as fold
from typing import Any

import numpy as np

from anesurgery.mil import Var, mb
from anesurgery.neuralnetwork.context import Context
from anesurgery.neuralnetwork.layers import layer

F = np.float32
MANY = (1, None)


@layer("add", inputs=MANY)
def add(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """The sum of the inputs; of one input, plus alpha."""
    if len(inputs) == 1:
        return mb.add(x=inputs[0], y=F(params.alpha))
    return fold(lambda a, b: mb.add(x=a, y=b), inputs)


@layer("multiply", inputs=MANY)
def multiply(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """The product of the inputs; of one input, times alpha."""
    if len(inputs) == 1:
        return mb.mul(x=inputs[0], y=F(params.alpha))
    return fold(lambda a, b: mb.mul(x=a, y=b), inputs)


@layer("softmax")
def softmax(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Softmax over the channels."""
    ctx.needs_rank(inputs[0], 3)
    return mb.softmax(x=inputs[0], axis=-3)
