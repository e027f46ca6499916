"""Wrong rewrites, one class each: what a check of a site must not let through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery.checking.grades import EXACT, PLAIN, REASSOCIATED, Promise, Tolerance
from anesurgery.mil import Var, ct, mb, types

RNG = np.random.default_rng(0)
F, INT, B = types.fp32, types.int32, types.bool
f = np.float32


def normal(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(f)


@dataclass(frozen=True)
class Wrong:
    """An old and a new computation that are not the same."""

    name: str
    old: Callable[..., Any]
    new: Callable[..., Any]
    inputs: Sequence[tuple[Any, tuple[int, ...]]] = ((F, (2, 4)),)
    promise: Promise = PLAIN
    opset: Any = ct.target.iOS17


NEAR = Promise(REASSOCIATED)
FINITE = Promise(REASSOCIATED, tolerates_nonfinite=False)
W, W2, BIAS = normal(4, 4), normal(6, 4), normal(4)
IMAGE = ((F, (1, 4, 5, 5)),)
KERNEL = normal(4, 4, 3, 3)
TABLE = normal(7, 3)
TWO = ((F, (2, 4)), (F, (2, 4)))
HEADS = ((F, (1, 6, 8)),)
INTS = ((INT, (3, 4)),)
KEEP = np.tril(np.ones((4, 4), bool))
SCORES = ((F, (1, 4, 4)),)


def op(kind: str, **more: Any) -> Callable[..., Any]:
    """One op of x."""
    return lambda x: getattr(mb, kind)(x=x, **more)


def op2(kind: str) -> Callable[..., Any]:
    """One op of x and y."""
    return lambda x, y: getattr(mb, kind)(x=x, y=y)


def conv(x: Var, **how: Any) -> Var:
    options = {
        "weight": KERNEL,
        "strides": [1, 1],
        "pad_type": "custom",
        "pad": [1, 1, 1, 1],
        "dilations": [1, 1],
    }
    made: Var = mb.conv(x=x, **{**options, "groups": 1, **how})
    return made


def cut(x: Var, begin: int, end: int) -> Var:
    made: Var = mb.slice_by_index(x=x, begin=[0, begin], end=[2, end])
    return made


def heads(x: Var, shape: Sequence[int], perm: Sequence[int]) -> Var:
    made: Var = mb.transpose(x=mb.reshape(x=x, shape=list(shape)), perm=list(perm))
    return made


def norm(x: Var, epsilon: float, outside: bool = False, biased: bool = True) -> Var:
    z = mb.sub(x=x, y=mb.reduce_mean(x=x, axes=[-1], keep_dims=True))
    squares = mb.reduce_sum(x=mb.square(x=z), axes=[-1], keep_dims=True)
    variance = mb.mul(x=squares, y=f(1 / 4 if biased else 1 / 3))
    if outside:
        return mb.real_div(x=z, y=mb.add(x=mb.sqrt(x=variance), y=f(epsilon)))
    return mb.real_div(x=z, y=mb.sqrt(x=mb.add(x=variance, y=f(epsilon))))


def rope(x: Var, swapped: bool = False, sign: float = 1.0) -> Var:
    a, b = cut(x, 0, 2), cut(x, 2, 4)
    cos, sin = np.array([0.5, 0.25], f), np.array([0.75, -0.5], f)
    first = mb.sub(x=mb.mul(x=a, y=cos), y=mb.mul(x=b, y=sin * f(sign)))
    second = mb.add(x=mb.mul(x=b, y=cos), y=mb.mul(x=a, y=sin))
    return mb.concat(values=[second, first] if swapped else [first, second], axis=1)


def masked(x: Var, keep: Any, fill: float = -1e4) -> Var:
    return mb.softmax(x=mb.select(cond=keep, a=x, b=f(fill)), axis=-1)


WRONG = [
    Wrong("swapped operands of sub", op2("sub"), lambda x, y: mb.sub(x=y, y=x), TWO),
    Wrong("swapped operands of div", op2("real_div"), lambda x, y: mb.real_div(x=y, y=x), TWO),
    Wrong("swapped operands of matmul", op("matmul", y=W), op("matmul", y=W.T.copy())),
    Wrong("slice off by one", lambda x: cut(x, 0, 2), lambda x: cut(x, 1, 3)),
    Wrong("negative index off by one", lambda x: cut(x, -3, -1), lambda x: cut(x, -4, -2)),
    Wrong(
        "begin masked away",
        lambda x: cut(x, 1, 4),
        op("slice_by_index", begin=[0, 0], end=[2, 3], begin_mask=[True, True]),
    ),
    Wrong(
        "stride ignored", op("slice_by_index", begin=[0, 0], end=[2, 4], stride=[1, 2]), lambda x: cut(x, 0, 2)
    ),
    Wrong("wrong axis of a softmax", op("softmax", axis=1), op("softmax", axis=0)),
    Wrong("wrong axis of a cumulative sum", op("cumsum", axis=1), op("cumsum", axis=0), promise=NEAR),
    Wrong(
        "wrong axis of a concat",
        lambda x: mb.concat(values=[x, x], axis=0),
        lambda x: mb.reshape(x=mb.concat(values=[x, x], axis=1), shape=[4, 4]),
    ),
    Wrong("wrong axis of a reverse", op("reverse", axes=[1]), op("reverse", axes=[0])),
    Wrong("transposed weight", op("linear", weight=W), op("linear", weight=W.T.copy())),
    Wrong("dropped bias", op("linear", weight=W, bias=BIAS), op("linear", weight=W)),
    Wrong(
        "one bias 0",
        op("linear", weight=W, bias=BIAS),
        op("linear", weight=W, bias=BIAS * np.array([1, 1, 0, 1], f)),
        promise=NEAR,
    ),
    Wrong(
        "one weight times 1.0001",
        op("linear", weight=W),
        op("linear", weight=W * np.where(np.eye(4) > 0, f(1.0001), f(1))),
        promise=NEAR,
    ),
    Wrong("stale shared constant", op("add", y=BIAS), op("add", y=np.roll(BIAS, 1))),
    Wrong(
        "epsilon outside the root", lambda x: norm(x, 1e-2), lambda x: norm(x, 1e-2, outside=True), promise=NEAR
    ),
    Wrong("another epsilon", lambda x: norm(x, 1e-3), lambda x: norm(x, 1e-5), promise=NEAR),
    Wrong("unbiased variance", lambda x: norm(x, 1e-5), lambda x: norm(x, 1e-5, biased=False), promise=NEAR),
    Wrong("relu6 to relu", op("relu6"), op("relu")),
    Wrong("clip dropped", op("clip", alpha=f(-8), beta=f(8)), op("identity")),
    Wrong("lower bound dropped", op("clip", alpha=f(-1), beta=f(9)), op("minimum", y=f(9))),
    Wrong("maximum dropped", op("maximum", y=f(-10)), op("identity")),
    Wrong("minimum for maximum", op2("maximum"), op2("minimum"), TWO),
    Wrong("bounds of a clip negated", op("clip", alpha=f(-1), beta=f(2)), op("clip", alpha=f(-2), beta=f(1))),
    Wrong("mod dropped", op("mod", y=np.int32(4)), op("identity"), INTS),
    Wrong("abs of integers dropped", op("abs"), op("identity"), INTS),
    Wrong("floor_div to 0", op("floor_div", y=np.int32(2)), op("mul", y=np.int32(0)), INTS),
    Wrong(
        "floor_div of negatives as a truncation",
        op("floor_div", y=np.int32(2)),
        lambda x: mb.mul(x=mb.sign(x=x), y=mb.floor_div(x=mb.abs(x=x), y=np.int32(2))),
        INTS,
    ),
    Wrong(
        "saturation forgotten",
        lambda x: mb.cast(x=mb.cast(x=x, dtype="int8"), dtype="int32"),
        op("identity"),
        INTS,
    ),
    Wrong(
        "integers compared off by one", op("greater", y=np.int32(3)), op("greater_equal", y=np.int32(3)), INTS
    ),
    Wrong("floor for round", op("round"), op("floor")),
    Wrong(
        "halves away from zero",
        op("round"),
        lambda x: mb.mul(x=mb.sign(x=x), y=mb.floor(x=mb.add(x=mb.abs(x=x), y=f(0.5)))),
    ),
    Wrong(
        "truncation for floor",
        lambda x: mb.cast(x=mb.floor(x=x), dtype="int32"),
        op("cast", dtype="int32"),
        promise=Promise(EXACT, False, 1e6),
    ),
    Wrong(
        "cumsum as a product with zeros",
        op("cumsum", axis=1),
        op("matmul", y=np.triu(np.ones((4, 4), f))),
        promise=NEAR,
    ),
    Wrong("cumsum reversed", op("cumsum", axis=1), op("cumsum", axis=1, reverse=True)),
    Wrong("cumsum exclusive", op("cumsum", axis=1), op("cumsum", axis=1, exclusive=True)),
    Wrong(
        "padding on the wrong side",
        op("pad", pad=[0, 0, 1, 0], mode="constant"),
        op("pad", pad=[0, 0, 0, 1], mode="constant"),
    ),
    Wrong(
        "padded with another value",
        op("pad", pad=[0, 0, 1, 0], mode="constant", constant_val=f(0)),
        op("pad", pad=[0, 0, 1, 0], mode="constant", constant_val=f(1e-3)),
    ),
    Wrong("edge for mirror", op("pad", pad=[1, 1], mode="reflect"), op("pad", pad=[1, 1], mode="replicate")),
    Wrong("convolution padded elsewhere", lambda x: conv(x, pad=[2, 0, 1, 1]), conv, IMAGE, NEAR),
    Wrong("dilation ignored", lambda x: conv(x, dilations=[2, 2], pad=[2, 2, 2, 2]), conv, IMAGE, NEAR),
    Wrong("kernel mirrored", conv, lambda x: conv(x, weight=KERNEL[:, :, ::-1].copy()), IMAGE, NEAR),
    Wrong("kernel turned", conv, lambda x: conv(x, weight=KERNEL.transpose(0, 1, 3, 2).copy()), IMAGE, NEAR),
    Wrong(
        "groups interleaved",
        lambda x: conv(x, weight=KERNEL[:, :2].copy(), groups=2),
        lambda x: conv(x, weight=KERNEL[[0, 2, 1, 3], :2].copy(), groups=2),
        IMAGE,
        NEAR,
    ),
    Wrong(
        "group count ignored",
        lambda x: conv(x, weight=KERNEL[:, :2].copy(), groups=2),
        lambda x: conv(x, weight=np.concatenate([KERNEL[:, :2], 0 * KERNEL[:, :2]], 1)),
        IMAGE,
        FINITE,
    ),
    Wrong("mean for sum", op("reduce_sum", axes=[1]), op("reduce_mean", axes=[1])),
    Wrong("max for mean", op("reduce_mean", axes=[1]), op("reduce_max", axes=[1])),
    Wrong(
        "mean over another count",
        op("reduce_mean", axes=[1]),
        lambda x: mb.mul(x=mb.reduce_sum(x=x, axes=[1]), y=f(1 / 3)),
        promise=NEAR,
    ),
    Wrong(
        "padding counted in the mean",
        op(
            "avg_pool",
            kernel_sizes=[3, 3],
            strides=[1, 1],
            pad_type="custom",
            pad=[1, 1, 1, 1],
            exclude_padding_from_average=True,
        ),
        op(
            "avg_pool",
            kernel_sizes=[3, 3],
            strides=[1, 1],
            pad_type="custom",
            pad=[1, 1, 1, 1],
            exclude_padding_from_average=False,
        ),
        IMAGE,
        NEAR,
    ),
    Wrong(
        "pooling with zeros for padding",
        op("max_pool", kernel_sizes=[3, 3], strides=[1, 1], pad_type="custom", pad=[1, 1, 1, 1]),
        lambda x: mb.max_pool(
            x=mb.pad(x=x, pad=[1, 1, 1, 1], mode="constant"),
            kernel_sizes=[3, 3],
            strides=[1, 1],
            pad_type="valid",
        ),
        IMAGE,
    ),
    Wrong(
        "heads interleaved",
        lambda x: heads(x, [1, 6, 2, 4], [0, 2, 1, 3]),
        lambda x: heads(x, [1, 6, 4, 2], [0, 3, 1, 2]),
        HEADS,
    ),
    Wrong(
        "heads swapped",
        lambda x: heads(x, [1, 6, 2, 4], [0, 2, 1, 3]),
        lambda x: mb.reverse(x=heads(x, [1, 6, 2, 4], [0, 2, 1, 3]), axes=[1]),
        HEADS,
    ),
    Wrong("reshape for transpose", op("transpose", perm=[0, 2, 1]), op("reshape", shape=[1, 8, 6]), HEADS),
    Wrong("rope halves swapped", rope, lambda x: rope(x, swapped=True), promise=NEAR),
    Wrong("rope turned the other way", rope, lambda x: rope(x, sign=-1), promise=NEAR),
    Wrong(
        "mask shifted by one",
        lambda x: masked(x, KEEP),
        lambda x: masked(x, np.tril(KEEP, -1) | np.eye(4, dtype=bool)[:, ::-1]),
        SCORES,
    ),
    Wrong("mask inverted", lambda x: masked(x, KEEP), lambda x: masked(x, ~KEEP), SCORES),
    Wrong("mask transposed", lambda x: masked(x, KEEP), lambda x: masked(x, KEEP.T.copy()), SCORES),
    Wrong("mask too weak", lambda x: masked(x, KEEP), lambda x: masked(x, KEEP, -10.0), SCORES, NEAR),
    Wrong(
        "mask of a multiplication",
        lambda x: mb.select(cond=KEEP, a=x, b=f(0)),
        op("mul", y=KEEP.astype(f)),
        SCORES,
    ),
    Wrong("tanh for exact gelu", op("gelu"), op("gelu", mode="TANH_APPROXIMATION"), promise=NEAR),
    Wrong("sigmoid for exact gelu", op("gelu"), op("gelu", mode="SIGMOID_APPROXIMATION"), promise=NEAR),
    Wrong(
        "leaky slope changed", op("leaky_relu", alpha=f(0.01)), op("leaky_relu", alpha=f(0.011)), promise=NEAR
    ),
    Wrong("scale .1250001 for .125", op("mul", y=f(0.125)), op("mul", y=f(0.1250001))),
    Wrong("sign of a product lost", op("mul", y=f(-2)), op("mul", y=f(2))),
    Wrong("square root of the negative", lambda x: mb.sqrt(x=mb.square(x=x)), op("identity")),
    Wrong("NaN swallowed", op("relu"), lambda x: mb.select(cond=mb.greater(x=x, y=f(0)), a=x, b=f(0))),
    Wrong(
        "inf lost", lambda x: mb.sub(x=x, y=x), lambda x: mb.mul(x=mb.clip(x=x, alpha=f(-1), beta=f(1)), y=f(0))
    ),
    Wrong(
        "tie order",
        op("reduce_argmax", axis=1),
        lambda x: mb.sub(x=np.int32(3), y=mb.reduce_argmax(x=mb.reverse(x=x, axes=[1]), axis=1)),
    ),
    Wrong("argmin for argmax", op("reduce_argmax", axis=1), op("reduce_argmin", axis=1)),
    Wrong(
        "smallest for largest",
        lambda x: mb.topk(x=x, k=2, axis=1)[0],
        lambda x: mb.topk(x=x, k=2, axis=1, ascending=True)[0],
    ),
    Wrong(
        "gather shifted by one",
        lambda i: mb.gather(x=TABLE, indices=i, axis=0),
        lambda i: mb.gather(x=np.roll(TABLE, 1, 0), indices=i, axis=0),
        ((INT, (5,)),),
    ),
    Wrong(
        "gather along the wrong axis",
        op("gather", indices=np.array([1, 0], np.int32), axis=0),
        lambda x: mb.slice_by_index(
            x=mb.gather(x=x, indices=np.array([1, 0, 2, 3], np.int32), axis=1), begin=[0, 0], end=[2, 4]
        ),
    ),
    Wrong(
        "branches swapped",
        lambda c, x: mb.select(cond=c, a=x, b=f(0)),
        lambda c, x: mb.select(cond=c, a=f(0), b=x),
        ((B, (2, 4)), (F, (2, 4))),
    ),
    Wrong("and for or", op2("logical_or"), op2("logical_and"), ((B, (2, 4)), (B, (2, 4)))),
    Wrong("strictness of a comparison", op2("greater"), op2("greater_equal"), TWO),
    Wrong(
        "dtype narrowed",
        op("mul", y=f(3)),
        lambda x: mb.cast(x=mb.mul(x=mb.cast(x=x, dtype="fp16"), y=np.float16(3)), dtype="fp32"),
    ),
    Wrong(
        "overflow moved",
        lambda x: mb.mul(x=mb.reduce_sum(x=mb.mul(x=x, y=f(2.0**-20)), axes=[1]), y=f(2.0**20)),
        lambda x: mb.reduce_sum(x=mb.mul(x=mb.mul(x=x, y=f(2.0**20)), y=f(2.0**-20)), axes=[1]),
        promise=Promise(Tolerance(0.0)),
    ),
]
