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
    Wrong("swapped operands of sub", lambda x, y: mb.sub(x=x, y=y), lambda x, y: mb.sub(x=y, y=x), TWO),
    Wrong(
        "swapped operands of div", lambda x, y: mb.real_div(x=x, y=y), lambda x, y: mb.real_div(x=y, y=x), TWO
    ),
    Wrong("swapped operands of matmul", lambda x: mb.matmul(x=x, y=W), lambda x: mb.matmul(x=x, y=W.T.copy())),
    Wrong("slice off by one", lambda x: cut(x, 0, 2), lambda x: cut(x, 1, 3)),
    Wrong("negative index off by one", lambda x: cut(x, -3, -1), lambda x: cut(x, -4, -2)),
    Wrong(
        "begin masked away",
        lambda x: cut(x, 1, 4),
        lambda x: mb.slice_by_index(x=x, begin=[0, 0], end=[2, 3], begin_mask=[True, True]),
    ),
    Wrong(
        "stride ignored",
        lambda x: mb.slice_by_index(x=x, begin=[0, 0], end=[2, 4], stride=[1, 2]),
        lambda x: cut(x, 0, 2),
    ),
    Wrong("wrong axis of a softmax", lambda x: mb.softmax(x=x, axis=1), lambda x: mb.softmax(x=x, axis=0)),
    Wrong(
        "wrong axis of a cumulative sum",
        lambda x: mb.cumsum(x=x, axis=1),
        lambda x: mb.cumsum(x=x, axis=0),
        promise=NEAR,
    ),
    Wrong(
        "wrong axis of a concat",
        lambda x: mb.concat(values=[x, x], axis=0),
        lambda x: mb.reshape(x=mb.concat(values=[x, x], axis=1), shape=[4, 4]),
    ),
    Wrong("wrong axis of a reverse", lambda x: mb.reverse(x=x, axes=[1]), lambda x: mb.reverse(x=x, axes=[0])),
    Wrong("transposed weight", lambda x: mb.linear(x=x, weight=W), lambda x: mb.linear(x=x, weight=W.T.copy())),
    Wrong("dropped bias", lambda x: mb.linear(x=x, weight=W, bias=BIAS), lambda x: mb.linear(x=x, weight=W)),
    Wrong(
        "one bias 0",
        lambda x: mb.linear(x=x, weight=W, bias=BIAS),
        lambda x: mb.linear(x=x, weight=W, bias=BIAS * np.array([1, 1, 0, 1], f)),
        promise=NEAR,
    ),
    Wrong(
        "one weight times 1.0001",
        lambda x: mb.linear(x=x, weight=W),
        lambda x: mb.linear(x=x, weight=W * np.where(np.eye(4) > 0, f(1.0001), f(1))),
        promise=NEAR,
    ),
    Wrong("stale shared constant", lambda x: mb.add(x=x, y=BIAS), lambda x: mb.add(x=x, y=np.roll(BIAS, 1))),
    Wrong(
        "epsilon outside the root", lambda x: norm(x, 1e-2), lambda x: norm(x, 1e-2, outside=True), promise=NEAR
    ),
    Wrong("another epsilon", lambda x: norm(x, 1e-3), lambda x: norm(x, 1e-5), promise=NEAR),
    Wrong("unbiased variance", lambda x: norm(x, 1e-5), lambda x: norm(x, 1e-5, biased=False), promise=NEAR),
    Wrong("relu6 to relu", lambda x: mb.relu6(x=x), lambda x: mb.relu(x=x)),
    Wrong("clip dropped", lambda x: mb.clip(x=x, alpha=f(-8), beta=f(8)), lambda x: mb.identity(x=x)),
    Wrong(
        "lower bound dropped", lambda x: mb.clip(x=x, alpha=f(-1), beta=f(9)), lambda x: mb.minimum(x=x, y=f(9))
    ),
    Wrong("maximum dropped", lambda x: mb.maximum(x=x, y=f(-10)), lambda x: mb.identity(x=x)),
    Wrong("minimum for maximum", lambda x, y: mb.maximum(x=x, y=y), lambda x, y: mb.minimum(x=x, y=y), TWO),
    Wrong(
        "bounds of a clip negated",
        lambda x: mb.clip(x=x, alpha=f(-1), beta=f(2)),
        lambda x: mb.clip(x=x, alpha=f(-2), beta=f(1)),
    ),
    Wrong("mod dropped", lambda x: mb.mod(x=x, y=np.int32(4)), lambda x: mb.identity(x=x), INTS),
    Wrong("abs of integers dropped", lambda x: mb.abs(x=x), lambda x: mb.identity(x=x), INTS),
    Wrong(
        "floor_div to 0", lambda x: mb.floor_div(x=x, y=np.int32(2)), lambda x: mb.mul(x=x, y=np.int32(0)), INTS
    ),
    Wrong(
        "floor_div of negatives as a truncation",
        lambda x: mb.floor_div(x=x, y=np.int32(2)),
        lambda x: mb.mul(x=mb.sign(x=x), y=mb.floor_div(x=mb.abs(x=x), y=np.int32(2))),
        INTS,
    ),
    Wrong(
        "saturation forgotten",
        lambda x: mb.cast(x=mb.cast(x=x, dtype="int8"), dtype="int32"),
        lambda x: mb.identity(x=x),
        INTS,
    ),
    Wrong(
        "integers compared off by one",
        lambda x: mb.greater(x=x, y=np.int32(3)),
        lambda x: mb.greater_equal(x=x, y=np.int32(3)),
        INTS,
    ),
    Wrong("floor for round", lambda x: mb.round(x=x), lambda x: mb.floor(x=x)),
    Wrong(
        "halves away from zero",
        lambda x: mb.round(x=x),
        lambda x: mb.mul(x=mb.sign(x=x), y=mb.floor(x=mb.add(x=mb.abs(x=x), y=f(0.5)))),
    ),
    Wrong(
        "truncation for floor",
        lambda x: mb.cast(x=mb.floor(x=x), dtype="int32"),
        lambda x: mb.cast(x=x, dtype="int32"),
        promise=Promise(EXACT, False, 1e6),
    ),
    Wrong(
        "cumsum as a product with zeros",
        lambda x: mb.cumsum(x=x, axis=1),
        lambda x: mb.matmul(x=x, y=np.triu(np.ones((4, 4), f))),
        promise=NEAR,
    ),
    Wrong("cumsum reversed", lambda x: mb.cumsum(x=x, axis=1), lambda x: mb.cumsum(x=x, axis=1, reverse=True)),
    Wrong(
        "cumsum exclusive", lambda x: mb.cumsum(x=x, axis=1), lambda x: mb.cumsum(x=x, axis=1, exclusive=True)
    ),
    Wrong(
        "padding on the wrong side",
        lambda x: mb.pad(x=x, pad=[0, 0, 1, 0], mode="constant"),
        lambda x: mb.pad(x=x, pad=[0, 0, 0, 1], mode="constant"),
    ),
    Wrong(
        "padded with another value",
        lambda x: mb.pad(x=x, pad=[0, 0, 1, 0], mode="constant", constant_val=f(0)),
        lambda x: mb.pad(x=x, pad=[0, 0, 1, 0], mode="constant", constant_val=f(1e-3)),
    ),
    Wrong(
        "edge for mirror",
        lambda x: mb.pad(x=x, pad=[1, 1], mode="reflect"),
        lambda x: mb.pad(x=x, pad=[1, 1], mode="replicate"),
    ),
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
    Wrong("mean for sum", lambda x: mb.reduce_sum(x=x, axes=[1]), lambda x: mb.reduce_mean(x=x, axes=[1])),
    Wrong("max for mean", lambda x: mb.reduce_mean(x=x, axes=[1]), lambda x: mb.reduce_max(x=x, axes=[1])),
    Wrong(
        "mean over another count",
        lambda x: mb.reduce_mean(x=x, axes=[1]),
        lambda x: mb.mul(x=mb.reduce_sum(x=x, axes=[1]), y=f(1 / 3)),
        promise=NEAR,
    ),
    Wrong(
        "padding counted in the mean",
        lambda x: mb.avg_pool(
            x=x,
            kernel_sizes=[3, 3],
            strides=[1, 1],
            pad_type="custom",
            pad=[1, 1, 1, 1],
            exclude_padding_from_average=True,
        ),
        lambda x: mb.avg_pool(
            x=x,
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
        lambda x: mb.max_pool(x=x, kernel_sizes=[3, 3], strides=[1, 1], pad_type="custom", pad=[1, 1, 1, 1]),
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
    Wrong(
        "reshape for transpose",
        lambda x: mb.transpose(x=x, perm=[0, 2, 1]),
        lambda x: mb.reshape(x=x, shape=[1, 8, 6]),
        HEADS,
    ),
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
        lambda x: mb.mul(x=x, y=KEEP.astype(f)),
        SCORES,
    ),
    Wrong(
        "tanh for exact gelu",
        lambda x: mb.gelu(x=x),
        lambda x: mb.gelu(x=x, mode="TANH_APPROXIMATION"),
        promise=NEAR,
    ),
    Wrong(
        "sigmoid for exact gelu",
        lambda x: mb.gelu(x=x),
        lambda x: mb.gelu(x=x, mode="SIGMOID_APPROXIMATION"),
        promise=NEAR,
    ),
    Wrong(
        "leaky slope changed",
        lambda x: mb.leaky_relu(x=x, alpha=f(0.01)),
        lambda x: mb.leaky_relu(x=x, alpha=f(0.011)),
        promise=NEAR,
    ),
    Wrong("scale .1250001 for .125", lambda x: mb.mul(x=x, y=f(0.125)), lambda x: mb.mul(x=x, y=f(0.1250001))),
    Wrong("sign of a product lost", lambda x: mb.mul(x=x, y=f(-2)), lambda x: mb.mul(x=x, y=f(2))),
    Wrong("square root of the negative", lambda x: mb.sqrt(x=mb.square(x=x)), lambda x: mb.identity(x=x)),
    Wrong(
        "NaN swallowed", lambda x: mb.relu(x=x), lambda x: mb.select(cond=mb.greater(x=x, y=f(0)), a=x, b=f(0))
    ),
    Wrong(
        "inf lost", lambda x: mb.sub(x=x, y=x), lambda x: mb.mul(x=mb.clip(x=x, alpha=f(-1), beta=f(1)), y=f(0))
    ),
    Wrong(
        "tie order",
        lambda x: mb.reduce_argmax(x=x, axis=1),
        lambda x: mb.sub(x=np.int32(3), y=mb.reduce_argmax(x=mb.reverse(x=x, axes=[1]), axis=1)),
    ),
    Wrong(
        "argmin for argmax", lambda x: mb.reduce_argmax(x=x, axis=1), lambda x: mb.reduce_argmin(x=x, axis=1)
    ),
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
        lambda x: mb.gather(x=x, indices=np.array([1, 0], np.int32), axis=0),
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
    Wrong(
        "and for or",
        lambda c, d: mb.logical_or(x=c, y=d),
        lambda c, d: mb.logical_and(x=c, y=d),
        ((B, (2, 4)), (B, (2, 4))),
    ),
    Wrong(
        "strictness of a comparison",
        lambda x, y: mb.greater(x=x, y=y),
        lambda x, y: mb.greater_equal(x=x, y=y),
        TWO,
    ),
    Wrong(
        "dtype narrowed",
        lambda x: mb.mul(x=x, y=f(3)),
        lambda x: mb.cast(x=mb.mul(x=mb.cast(x=x, dtype="fp16"), y=np.float16(3)), dtype="fp32"),
    ),
    Wrong(
        "overflow moved",
        lambda x: mb.mul(x=mb.reduce_sum(x=mb.mul(x=x, y=f(2.0**-20)), axes=[1]), y=f(2.0**20)),
        lambda x: mb.reduce_sum(x=mb.mul(x=mb.mul(x=x, y=f(2.0**20)), y=f(2.0**-20)), axes=[1]),
        promise=Promise(Tolerance(0.0)),
    ),
]
