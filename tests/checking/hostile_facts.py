"""Wrong rewrites that hold for some lengths, ids, sizes of numbers or dtypes only, and their right twins."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import get_new_symbol
from wrong_rewrites import FINITE, INTS, NEAR, F, Wrong, f, op, op2

from anesurgery.mil import Var, ct, mb, types

H = types.fp16
N, M = get_new_symbol(), get_new_symbol()
ROWS, GRID = ((F, (N, 4)),), ((F, (N, M, 4)),)
HALVES = ((H, (2, 4)),)
IDS = ((types.int32, (3,)),)
PLACES = ((F, (2, 6)), (types.int32, (2,)))
EVEN = (2 * np.arange(10)).astype(np.int32)
LARGE = np.random.default_rng(9).standard_normal((3000, 4)).astype(f)
BOUNDS = np.linspace(50, 150, 100).astype(f)
ONE_OFF = LARGE.copy()
ONE_OFF[1234, 2] += 1
VERY_LARGE = np.random.default_rng(10).standard_normal((40_000, 2)).astype(f)
LAST_OFF = VERY_LARGE.copy()
LAST_OFF[-1, 1] += 1


def size(x: Var, axis: int = 0, dtype: str = "int32") -> Any:
    found = mb.gather(x=mb.shape(x=x), indices=np.int32(axis))
    return found if dtype == "int32" else mb.cast(x=found, dtype=dtype)


def summed(x: Var) -> Any:
    return mb.reduce_sum(x=x, axes=[0])


def wide(x: Var, function: Any) -> Any:
    """Computed in fp32 between casts."""
    return mb.cast(x=function(mb.cast(x=x, dtype="fp32")), dtype="fp16")


def mean_square(x: Var) -> Any:
    return mb.reduce_mean(x=mb.square(x=x), axes=[1])


def root_of_square(x: Var) -> Any:
    return mb.sqrt(x=mb.square(x=x))


def cut(x: Var, i: Var) -> Any:
    return mb.slice_by_size(x=x, begin=i, size=[2, 2])


def first_rows(x: Var) -> Any:
    """A running sum by a triangle of eight rows and columns, cut to size."""
    rows, eight, all_ = (
        mb.slice_by_index(x=mb.shape(x=x), begin=[0], end=[1]),
        np.array([8], np.int32),
        np.array([-1], np.int32),
    )
    square = mb.slice_by_size(
        x=np.tril(np.ones((8, 8), f)), begin=[0, 0], size=mb.concat(values=[rows, eight], axis=0)
    )
    square = mb.slice_by_size(x=square, begin=[0, 0], size=mb.concat(values=[all_, rows], axis=0))
    return mb.matmul(x=square, y=x)


def both_ways(x: Var, i: Var) -> Any:
    return mb.equal(x=mb.cast(x=x, dtype="fp32"), y=mb.cast(x=i, dtype="fp32"))


FACTS = [
    Wrong(
        "the other of two dynamic sizes",
        lambda x: mb.slice_by_index(x=mb.shape(x=x), begin=[0], end=[1]),
        lambda x: mb.slice_by_index(x=mb.shape(x=x), begin=[1], end=[2]),
        GRID,
    ),
    Wrong(
        "a mean over a fixed length",
        op("reduce_mean", axes=[0]),
        lambda x: mb.mul(x=summed(x), y=f(1 / 3)),
        ROWS,
        NEAR,
    ),
    Wrong(
        "a mean over the other length",
        op("reduce_mean", axes=[0]),
        lambda x: mb.real_div(x=summed(x), y=size(x, 1, "fp32")),
        GRID,
        NEAR,
    ),
    Wrong(
        "right for odd lengths",
        lambda x: mb.floor_div(x=size(x), y=np.int32(2)),
        lambda x: mb.floor_div(x=mb.sub(x=size(x), y=np.int32(1)), y=np.int32(2)),
        ROWS,
    ),
    Wrong("right up to a length of 8", op("cumsum", axis=0), first_rows, ROWS, FINITE),
    Wrong(
        "a table for what is computed", op("mul", y=np.int32(2)), lambda i: mb.gather(x=EVEN, indices=i), IDS
    ),
    Wrong(
        "one row of a large table",
        lambda i: mb.gather(x=LARGE, indices=i),
        lambda i: mb.gather(x=ONE_OFF, indices=i),
        IDS,
    ),
    Wrong(
        "last row of a very large table",
        lambda i: mb.gather(x=VERY_LARGE, indices=i),
        lambda i: mb.gather(x=LAST_OFF, indices=i),
        IDS,
    ),
    Wrong(
        "one-hot beyond its size",
        lambda i: mb.one_hot(indices=i, one_hot_vector_size=5),
        lambda i: mb.gather(
            x=np.eye(5, dtype=np.int32), indices=mb.minimum(x=mb.maximum(x=i, y=np.int32(0)), y=np.int32(4))
        ),
        IDS,
    ),
    Wrong("integers that are one in fp32", op2("equal"), both_ways, (*INTS, *INTS)),
    Wrong(
        "one bound of many, small beside the largest numbers",
        op("minimum", y=BOUNDS),
        op("minimum", y=np.where(np.arange(100) == 57, f(1e9), BOUNDS).astype(f)),
        ((F, (1, 100)),),
        NEAR,
    ),
    Wrong("a norm in fp16", lambda x: wide(x, mean_square), mean_square, HALVES, NEAR),
    Wrong("a root in fp16", lambda x: wide(x, root_of_square), root_of_square, HALVES),
    Wrong(
        "a narrow cast dropped", lambda x: mb.cast(x=mb.cast(x=x, dtype="fp16"), dtype="fp32"), op("identity")
    ),
    Wrong(
        "scaled beyond fp16 and back",
        op("relu"),
        lambda x: mb.mul(x=mb.relu(x=mb.mul(x=x, y=np.float16(1024))), y=np.float16(1 / 1024)),
        HALVES,
    ),
    Wrong(
        "a dynamic slice that begins one early",
        cut,
        lambda x, i: cut(x, mb.maximum(x=mb.sub(x=i, y=np.int32(1)), y=np.int32(0))),
        PLACES,
        opset=ct.target.iOS17,
    ),
]
"""What holds at a length of 3, for ids in a table, for small numbers, or in fp32 only."""

RIGHT = [
    Wrong(
        "a mean as a sum over its length",
        op("reduce_mean", axes=[0]),
        lambda x: mb.real_div(x=summed(x), y=size(x, 0, "fp32")),
        ROWS,
        NEAR,
    ),
    Wrong("a relu in fp16", lambda x: wide(x, lambda v: mb.relu(x=v)), op("relu"), HALVES),
    Wrong("widened and narrowed", lambda x: wide(x, lambda v: v), op("identity"), HALVES),
    Wrong(
        "a dynamic slice after a relu",
        lambda x, i: mb.relu(x=cut(x, i)),
        lambda x, i: cut(mb.relu(x=x), i),
        PLACES,
    ),
    Wrong("a doubled id from its table", lambda i: mb.gather(x=EVEN, indices=i), op("mul", y=np.int32(2)), IDS),
]
"""Rewrites of the same kinds that are right."""
