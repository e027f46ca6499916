"""More wrong rewrites, each wrong in a detail that is easy to miss: epsilons, ties, signs, widths."""

from __future__ import annotations

from typing import Any

import numpy as np
from wrong_rewrites import IMAGE, INTS, NEAR, SCORES, TWO, B, F, W, Wrong, f, op, op2

from anesurgery.checking.grades import REASSOCIATED, Promise
from anesurgery.mil import Var, ct, mb, types

ROW = ((F, (2, 6)),)
IDS = ((types.int32, (3,)),)
SQUARE = ((F, (3, 3)),)
CUBE = ((F, (2, 3, 4)),)
ONE = np.float32(1)
GAMMA = np.array([1.0, 2.0, -0.5, 0.25], f)
MEAN = np.array([0.1, -0.2, 0.3, 0.0], f)
FINITE = Promise(REASSOCIATED, tolerates_nonfinite=False)


def batch_norm(x: Var, **how: Any) -> Var:
    options: dict[str, Any] = {
        "mean": MEAN,
        "variance": GAMMA**2,
        "gamma": GAMMA,
        "beta": MEAN,
        "epsilon": f(1e-3),
    }
    made: Var = mb.batch_norm(x=x, **(options | how))
    return made


def layer_norm(x: Var, axes: Any, gamma: Any = None, epsilon: float = 1e-5) -> Var:
    made: Var = mb.layer_norm(x=x, axes=axes, gamma=gamma, epsilon=f(epsilon))
    return made


def group_norm(x: Var, groups: int) -> Var:
    parts = mb.reshape(x=x, shape=[1, groups, 4 // groups, 5, 5])
    made: Var = mb.reshape(x=layer_norm(parts, [2, 3, 4]), shape=[1, 4, 5, 5])
    return made


def top(x: Var, **how: Any) -> Any:
    return mb.topk(x=x, **({"k": 2, "axis": 1, "ascending": False} | how))


def attention(x: Var, scale: float, axis: int = -1) -> Var:
    scores = mb.mul(x=mb.matmul(x=x, y=x, transpose_y=True), y=f(scale))
    made: Var = mb.matmul(x=mb.softmax(x=scores, axis=axis), y=x)
    return made


def through(x: Var, dtype: str, back: str = "fp32") -> Var:
    made: Var = mb.cast(x=mb.cast(x=x, dtype=dtype), dtype=back)
    return made


HOSTILE = [
    Wrong("rounded up", op("ceil"), lambda x: mb.add(x=mb.floor(x=x), y=ONE)),
    Wrong("round by a floor", op("round"), lambda x: mb.floor(x=mb.add(x=x, y=f(0.5)))),
    Wrong("floor by a cast", op("floor"), lambda x: through(x, "int32"), promise=FINITE),
    Wrong(
        "integers doubled in floats",
        lambda i: mb.add(x=i, y=i),
        lambda i: mb.cast(x=mb.mul(x=mb.cast(x=i, dtype="fp32"), y=f(2)), dtype="int32"),
        INTS,
    ),
    Wrong("integers through fp32", op("identity"), lambda i: through(i, "fp32", "int32"), INTS),
    Wrong("integers through fp16", op("identity"), lambda i: through(i, "fp16", "int32"), INTS),
    Wrong("integers through int16", op("identity"), lambda i: through(i, "int16", "int32"), INTS),
    Wrong(
        "product of integers overflows",
        lambda i: mb.cast(x=mb.mul(x=i, y=i), dtype="fp32"),
        lambda i: mb.square(x=mb.cast(x=i, dtype="fp32")),
        INTS,
        NEAR,
    ),
    Wrong(
        "quotient, then product of integers",
        lambda i: mb.mul(x=mb.floor_div(x=i, y=np.int32(3)), y=np.int32(3)),
        op("identity"),
        INTS,
    ),
    Wrong(
        "mod by the sign of the divisor",
        op("mod", y=np.int32(3)),
        lambda i: mb.sub(x=i, y=mb.mul(x=mb.floor_div(x=i, y=np.int32(3)), y=np.int32(3))),
        INTS,
    ),
    Wrong("narrowed in between", op("mul", y=f(2)), lambda x: mb.mul(x=through(x, "fp16"), y=f(2))),
    Wrong(
        "bool of a small number",
        lambda x: through(x, "bool"),
        lambda x: mb.cast(x=mb.greater(x=mb.abs(x=x), y=f(1e-6)), dtype="fp32"),
    ),
    Wrong(
        "sum in fp16",
        op("reduce_sum", axes=[1]),
        lambda x: mb.cast(x=mb.reduce_sum(x=mb.cast(x=x, dtype="fp16"), axes=[1]), dtype="fp32"),
        promise=NEAR,
    ),
    Wrong(
        "epsilon of rsqrt",
        lambda x: mb.rsqrt(x=mb.square(x=x), epsilon=f(1e-12)),
        lambda x: mb.rsqrt(x=mb.square(x=x), epsilon=f(1e-6)),
        promise=NEAR,
    ),
    Wrong(
        "epsilon of inverse", op("inverse", epsilon=f(1e-4)), lambda x: mb.real_div(x=ONE, y=x), promise=NEAR
    ),
    Wrong(
        "epsilon of log",
        lambda x: mb.log(x=mb.abs(x=x), epsilon=f(1e-5)),
        lambda x: mb.log(x=mb.abs(x=x), epsilon=f(1e-45)),
        promise=NEAR,
    ),
    Wrong("epsilon of a batch norm", batch_norm, lambda x: batch_norm(x, epsilon=f(1e-5)), IMAGE, NEAR),
    Wrong(
        "gamma of the wrong channel", batch_norm, lambda x: batch_norm(x, gamma=np.roll(GAMMA, 1)), IMAGE, NEAR
    ),
    Wrong("deviation for variance", batch_norm, lambda x: batch_norm(x, variance=np.abs(GAMMA)), IMAGE, NEAR),
    Wrong(
        "layer norm over other axes", lambda x: layer_norm(x, [1, 2]), lambda x: layer_norm(x, [2]), CUBE, NEAR
    ),
    Wrong(
        "gamma transposed",
        lambda x: layer_norm(x, [1, 2], np.arange(12, dtype=f).reshape(3, 4)),
        lambda x: layer_norm(x, [1, 2], np.arange(12, dtype=f).reshape(4, 3).T.copy()),
        CUBE,
        NEAR,
    ),
    Wrong("groups of a group norm", lambda x: group_norm(x, 2), lambda x: group_norm(x, 4), IMAGE, NEAR),
    Wrong(
        "instance norm for layer norm",
        op("instance_norm", epsilon=f(1e-5)),
        lambda x: layer_norm(x, [1, 2, 3]),
        IMAGE,
        NEAR,
    ),
    Wrong("softmax over columns of a square", op("softmax", axis=1), op("softmax", axis=0), SQUARE),
    Wrong(
        "softmax before the scale",
        lambda x: mb.softmax(x=mb.mul(x=x, y=f(0.5)), axis=1),
        lambda x: mb.mul(x=mb.softmax(x=x, axis=1), y=f(0.5)),
    ),
    Wrong(
        "attention over queries", lambda x: attention(x, 0.5), lambda x: attention(x, 0.5, axis=1), SCORES, NEAR
    ),
    Wrong("scale of another width", lambda x: attention(x, 0.5), lambda x: attention(x, 0.25), SCORES, NEAR),
    Wrong("values of the smallest", lambda x: top(x)[0], lambda x: top(x, ascending=True)[0], ROW),
    Wrong("places of a sort", lambda x: top(x, k=6)[1], op("argsort", axis=1, ascending=True), ROW),
    Wrong(
        "first of equal ones",
        op("reduce_argmax", axis=1),
        lambda x: mb.sub(x=np.int32(5), y=mb.reduce_argmax(x=mb.reverse(x=x, axes=[1]), axis=1)),
        ROW,
    ),
    Wrong("argmin for the argmax of a row", op("reduce_argmax", axis=1), op("reduce_argmin", axis=1), ROW),
    Wrong(
        "argmax of magnitudes",
        op("reduce_argmax", axis=1),
        lambda x: mb.reduce_argmax(x=mb.abs(x=x), axis=1),
        ROW,
    ),
    Wrong(
        "cumsum from the end",
        op("cumsum", axis=1, reverse=True),
        lambda x: mb.reverse(x=mb.cumsum(x=x, axis=1), axes=[1]),
        ROW,
        NEAR,
    ),
    Wrong(
        "exclusive by a subtraction",
        op("cumsum", axis=1, exclusive=True),
        lambda x: mb.sub(x=mb.cumsum(x=x, axis=1), y=x),
        ROW,
        NEAR,
    ),
    Wrong(
        "negative rows taken as positive",
        lambda i: mb.gather(x=W, indices=i, axis=0),
        lambda i: mb.gather(x=W, indices=mb.abs(x=i), axis=0),
        IDS,
        opset=ct.target.iOS15,
    ),
    Wrong(
        "columns for rows",
        lambda i: mb.gather(x=W, indices=i, axis=0),
        lambda i: mb.gather(x=W.T.copy(), indices=i, axis=0),
        IDS,
    ),
    Wrong(
        "gather along the other axis",
        op("gather_along_axis", indices=np.zeros((3, 3), np.int32), axis=0),
        op("gather_along_axis", indices=np.zeros((3, 3), np.int32), axis=1),
        SQUARE,
    ),
    Wrong(
        "last rows for first",
        op("gather", indices=np.array([0, -1], np.int32), axis=0),
        op("gather", indices=np.array([0, 1], np.int32), axis=0),
        SQUARE,
    ),
    Wrong(
        "added along rows",
        op("add", y=np.array([1, 2, 3], f)),
        op("add", y=np.array([[1], [2], [3]], f)),
        SQUARE,
    ),
    Wrong(
        "x times its transpose",
        lambda x: mb.matmul(x=x, y=x, transpose_y=True),
        lambda x: mb.matmul(x=x, y=x, transpose_x=True),
        SQUARE,
        NEAR,
    ),
    Wrong(
        "sum of squares for a square of sums",
        op("reduce_sum_square", axes=[1]),
        lambda x: mb.square(x=mb.reduce_sum(x=x, axes=[1])),
        promise=NEAR,
    ),
    Wrong(
        "logsumexp without its shift",
        op("reduce_log_sum_exp", axes=[1]),
        lambda x: mb.log(x=mb.reduce_sum(x=mb.exp(x=x), axes=[1])),
        promise=NEAR,
    ),
    Wrong(
        "norm of one for norm of two",
        op("reduce_l2_norm", axes=[1]),
        op("reduce_l1_norm", axes=[1]),
        promise=NEAR,
    ),
    Wrong("x - x to zeros", lambda x: mb.sub(x=x, y=x), op("clip", alpha=f(-0.0), beta=f(1e-30))),
    Wrong(
        "a product with zeros dropped",
        lambda x: mb.add(x=mb.mul(x=x, y=f(0)), y=ONE),
        op("clip", alpha=f(1), beta=f(1.0000001)),
    ),
    Wrong(
        "not greater for less or equal",
        lambda x, y: mb.logical_not(x=mb.greater(x=x, y=y)),
        op2("less_equal"),
        TWO,
    ),
    Wrong(
        "the sign of minus zero",
        lambda x: mb.real_div(x=ONE, y=mb.mul(x=x, y=f(-1))),
        lambda x: mb.real_div(x=ONE, y=mb.sub(x=f(0), y=x)),
    ),
    Wrong(
        "the negative by 0 - x",
        lambda x: mb.atan(x=mb.real_div(x=ONE, y=mb.mul(x=x, y=f(-1)))),
        lambda x: mb.atan(x=mb.real_div(x=ONE, y=mb.sub(x=f(0), y=x))),
    ),
    Wrong("quotient by a rounded reciprocal", op("real_div", y=f(3)), op("mul", y=f(1 / 3))),
    Wrong(
        "power of a negative number",
        op("pow", y=f(2)),
        lambda x: mb.exp(x=mb.mul(x=mb.log(x=x), y=f(2))),
        promise=NEAR,
    ),
    Wrong("odd root", op("pow", y=f(3)), lambda x: mb.mul(x=mb.abs(x=x), y=mb.square(x=x)), promise=NEAR),
    Wrong(
        "silu by a hard sigmoid",
        op("silu"),
        lambda x: mb.mul(x=x, y=mb.sigmoid_hard(x=x, alpha=f(1 / 6), beta=f(0.5))),
        promise=NEAR,
    ),
    Wrong("elu of another alpha", op("elu", alpha=f(1)), op("elu", alpha=f(0.99)), promise=NEAR),
    Wrong(
        "prelu of the next channel",
        op("prelu", alpha=np.array([0.1, 0.2, 0.3, 0.4], f)),
        op("prelu", alpha=np.array([0.2, 0.3, 0.4, 0.1], f)),
        IMAGE,
        NEAR,
    ),
    Wrong(
        "leaky slope on the wrong side",
        op("leaky_relu", alpha=f(0.1)),
        lambda x: mb.minimum(x=x, y=mb.mul(x=x, y=f(0.1))),
    ),
    Wrong("xor for or", op2("logical_or"), op2("logical_xor"), ((B, (2, 2)), (B, (2, 2)))),
    Wrong(
        "branches of a select swapped",
        lambda c, x: mb.select(cond=c, a=x, b=f(0)),
        lambda c, x: mb.select(cond=c, a=f(0), b=x),
        ((B, (2, 4)), (F, (2, 4))),
    ),
    Wrong(
        "one-hot on another axis",
        lambda i: mb.one_hot(indices=i, one_hot_vector_size=3, axis=-1),
        lambda i: mb.one_hot(indices=i, one_hot_vector_size=3, axis=0),
        IDS,
    ),
    Wrong(
        "one-hot values swapped",
        lambda i: mb.one_hot(indices=i, one_hot_vector_size=3),
        lambda i: mb.one_hot(indices=i, one_hot_vector_size=3, on_value=np.int32(0), off_value=np.int32(1)),
        IDS,
    ),
]
"""Each must be caught by default settings."""
