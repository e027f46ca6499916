"""Wrong rewrites that differ at an edge only: one length, infinities on both sides, integers beyond fp16."""

from __future__ import annotations

from typing import Any

import numpy as np
from hostile_facts import ROWS, size
from wrong_rewrites import FINITE, INTS, NEAR, TWO, F, Wrong, f, op, op2

from anesurgery.mil import Var, mb

SQUARE = ((F, (4, 4)),)


def through_half(x: Var) -> Any:
    return mb.cast(x=mb.cast(x=x, dtype="fp16"), dtype="fp32")


def where_size(x: Var, compared: Any, limit: int) -> Any:
    """X where its length compares so, else zeros."""
    return mb.mul(x=x, y=mb.cast(x=compared(x=size(x), y=np.int32(limit)), dtype="fp32"))


EDGES = [
    Wrong("an integer through fp16", op("cast", dtype="fp32"), through_half, INTS),
    Wrong(
        "equal by a difference, for infinities",
        op2("equal"),
        lambda x, y: mb.equal(x=mb.sub(x=x, y=y), y=f(0)),
        TWO,
    ),
    Wrong(
        "the first 48 rows",
        op("reduce_sum", axes=[0]),
        lambda x: mb.reduce_sum(x=mb.slice_by_index(x=x, begin=[0, 0], end=[48, 4]), axes=[0]),
        ROWS,
        NEAR,
    ),
    Wrong("more than one row", op("mul", y=f(1)), lambda x: where_size(x, mb.greater, 1), ROWS, FINITE),
    Wrong("fewer than 20 rows", op("mul", y=f(1)), lambda x: where_size(x, mb.less, 20), ROWS, FINITE),
    Wrong(
        "a norm of zeros",
        lambda x: mb.rsqrt(x=mb.reduce_mean(x=mb.square(x=x), axes=[1], keep_dims=True), epsilon=f(1e-6)),
        lambda x: mb.rsqrt(
            x=mb.maximum(x=mb.reduce_mean(x=mb.square(x=x), axes=[1], keep_dims=True), y=f(1e-6)),
            epsilon=f(1e-12),
        ),
        SQUARE,
        FINITE,
    ),
    Wrong(
        "softplus above 6",
        op("softplus"),
        lambda x: mb.select(cond=mb.greater(x=x, y=f(6)), a=x, b=mb.softplus(x=x)),
        SQUARE,
        NEAR,
    ),
]
