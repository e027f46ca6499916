"""Wrong rewrites that ordinary numbers do not show, each beside a right one: digits, guards, layouts, edges."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from wrong_rewrites import FINITE, INT, NEAR, TWO, B, F, Wrong, f, normal, op, op2

from anesurgery.checking.grades import Grade, Promise, Tolerance
from anesurgery.mil import Var, mb, types

LOOSE = Promise(Tolerance(1e-3))
H, h = types.fp16, np.float16
RNG = np.random.default_rng(1)
M = [RNG.standard_normal((48, 48)).astype(f).T for _ in range(3)]
COLUMN, ROW = normal(4, 1), normal(1, 4)
WIDE = ((F, (2, 48)),)
ROWS = ((F, (4, 64)),)
HALVES = ((H, (4, 8)),)
INTEGERS = ((INT, (3, 4)),)
BITS, PROVED, CHECKED = Grade.BITS, Grade.PROVED, Grade.NUMBERS


class Twins(NamedTuple):
    """A wrong rewrite, and a right one of the same old computation."""

    wrong: Wrong
    right: Any
    grade: Grade
    """That of the right one."""


def twins(
    name: str, old: Any, new: Any, right: Any, grade: Grade, inputs: Any = ROWS, promise: Any = LOOSE
) -> Twins:
    return Twins(Wrong(name, old, new, inputs, promise), right, grade)


def three(a: Any, b: Any, c: Any) -> Any:
    def body(x: Var) -> Any:
        product = mb.mul(x=mb.linear(x=x, weight=b), y=mb.linear(x=x, weight=c))
        return mb.sub(x=mb.linear(x=x, weight=a), y=product)

    return body


def mean(x: Var) -> Any:
    return mb.reduce_mean(x=x, axes=[-1], keep_dims=True)


def at(number: float, otherwise: Any = None) -> Any:
    """Twice as much at one number."""

    def body(x: Var) -> Any:
        there = mb.equal(x=x, y=f(number))
        return mb.select(cond=there, a=otherwise(x) if otherwise else mb.mul(x=x, y=f(2)), b=x)

    return body


def same(x: Var) -> Any:
    return mb.identity(x=x)


def when(op: str, number: float) -> Any:
    return lambda x: mb.select(cond=getattr(mb, op)(x=x, y=f(number)), a=x, b=mb.sub(x=x, y=f(1)))


def unless(op: str, number: float) -> Any:
    return lambda x: mb.select(cond=getattr(mb, op)(x=x, y=f(number)), a=mb.sub(x=x, y=f(1)), b=x)


def variance(x: Var) -> Any:
    return mean(mb.square(x=mb.sub(x=x, y=mean(x))))


def variance_in_order(x: Var) -> Any:
    z = mb.sub(x=mean(x), y=x)
    return mean(mb.mul(x=z, y=z))


def of_squares(x: Var) -> Any:
    return mb.sub(x=mean(mb.square(x=x)), y=mb.square(x=mean(x)))


def as_float(x: Var) -> Any:
    return mb.cast(x=x, dtype="fp32")


def as_integer(x: Var) -> Any:
    return mb.cast(x=x, dtype="int32")


def plus_integer(number: int) -> Any:
    return lambda x: mb.add(x=x, y=np.int32(number))


def clipped(low: float, high: float) -> Any:
    return lambda x: mb.clip(x=x, alpha=f(low), beta=f(high))


def columns(first: int) -> Any:
    return lambda x: mb.slice_by_index(x=x, begin=[0, first], end=[4, 64], stride=[1, 2])


def halves_less(times: float) -> Any:
    """X as so many times it less one fewer, in fp16."""
    return lambda x: mb.sub(x=mb.mul(x=x, y=h(times)), y=mb.mul(x=x, y=h(times - 1)))


LAST = np.array([[0], [0], [0], [1e-2]], f)
NUMBERS = [
    twins(
        "transposed weights exchanged", three(*M), three(M[2], M[1], M[0]), three(M[0], M[2], M[1]), BITS, WIDE
    ),
    twins(
        "transposed weights rotated",
        three(*M),
        three(M[1], M[2], M[0]),
        three(*(m.copy() for m in M)),
        BITS,
        WIDE,
    ),
    twins("one transposed weight twice", three(*M), three(M[0], M[1], M[1]), three(*M), BITS, WIDE, NEAR),
    twins(
        "transposed matrix",
        op("matmul", y=M[0]),
        op("matmul", y=M[0].T),
        op("linear", weight=M[0].T),
        BITS,
        WIDE,
    ),
    twins("at 5", at(5), same, at(5, lambda x: mb.add(x=x, y=x)), PROVED),
    twins("at -300", at(-300), same, at(-300, lambda x: mb.add(x=x, y=x)), PROVED),
    twins("at 1e-5", at(1e-5), same, at(1e-5, lambda x: mb.add(x=x, y=x)), PROVED, promise=NEAR),
    twins(
        "at 5 in a large value",
        at(5),
        same,
        at(5, lambda x: mb.add(x=x, y=x)),
        PROVED,
        ((F, (200, 200)),),
        NEAR,
    ),
    twins("below or equal", when("less", 7), when("less_equal", 7), unless("greater_equal", 7), PROVED),
    twins(
        "above or equal", when("greater", -40), when("greater_equal", -40), unless("less_equal", -40), PROVED
    ),
    twins(
        "a sum at 40",
        lambda x: at(40)(mb.add(x=x, y=f(3))),
        op("add", y=f(3)),
        lambda x: at(40)(mb.sub(x=x, y=f(-3))),
        BITS,
    ),
    twins("variance of squares", variance, of_squares, variance_in_order, PROVED, promise=NEAR),
    twins(
        "deviation of squares",
        lambda x: mb.sqrt(x=variance(x)),
        lambda x: mb.sqrt(x=of_squares(x)),
        lambda x: mb.sqrt(x=variance_in_order(x)),
        PROVED,
    ),
    twins(
        "difference of squares",
        lambda x, y: mb.mul(x=mb.sub(x=x, y=y), y=mb.add(x=x, y=y)),
        lambda x, y: mb.sub(x=mb.square(x=x), y=mb.square(x=y)),
        lambda x, y: mb.mul(x=mb.add(x=y, y=x), y=mb.sub(x=x, y=y)),
        BITS,
        TWO,
        NEAR,
    ),
    twins(
        "one and a little",
        lambda x: mb.log(x=mb.add(x=mb.abs(x=x), y=f(1))),
        lambda x: mb.log(x=mb.add(x=mb.abs(x=x), y=f(1.0001))),
        lambda x: mb.log(x=mb.add(x=f(1), y=mb.abs(x=x))),
        BITS,
        promise=NEAR,
    ),
    twins("digits lost in fp16", halves_less(1), halves_less(60), op("identity"), PROVED, HALVES, FINITE),
    twins(
        "squares that are 0 in fp16",
        lambda x: mb.abs(x=mb.mul(x=x, y=h(3))),
        lambda x: mb.sqrt(x=mb.mul(x=mb.square(x=mb.mul(x=x, y=h(300))), y=h(1e-4))),
        lambda x: mb.mul(x=mb.abs(x=x), y=h(3)),
        CHECKED,
        HALVES,
        FINITE,
    ),
    twins(
        "truncated quotient",
        op("floor_div", y=np.int32(3)),
        lambda x: as_integer(mb.real_div(x=as_float(x), y=f(3))),
        lambda x: plus_integer(0)(mb.floor_div(x=plus_integer(0)(x), y=np.int32(3))),
        PROVED,
        INTEGERS,
    ),
    twins(
        "remainder of the other sign",
        op("mod", y=np.int32(-3)),
        op("mod", y=np.int32(3)),
        lambda x: mb.sub(x=x, y=mb.mul(x=mb.floor_div(x=x, y=np.int32(-3)), y=np.int32(-3))),
        CHECKED,
        INTEGERS,
    ),
    twins("another integer", plus_integer(1), plus_integer(2), op("sub", y=np.int32(-1)), PROVED, INTEGERS),
    twins(
        "off by one beside a million",
        plus_integer(10**6),
        plus_integer(10**6 + 1),
        lambda x: plus_integer(10**6 - 1)(plus_integer(1)(x)),
        PROVED,
        INTEGERS,
    ),
    twins(
        "a large integer as a float",
        op("equal", y=np.int32(16777217)),
        lambda x: mb.equal(x=as_float(x), y=f(16777217)),
        lambda x: mb.equal(x=mb.sub(x=x, y=np.int32(16777217)), y=np.int32(0)),
        CHECKED,
        INTEGERS,
    ),
    twins(
        "ties away from zero",
        op("round"),
        lambda x: mb.floor(x=mb.add(x=x, y=f(0.5))),
        lambda x: mb.mul(x=mb.round(x=mb.mul(x=x, y=f(-1))), y=f(-1)),
        CHECKED,
    ),
    twins(
        "sign of zero",
        op("sign"),
        lambda x: mb.select(cond=mb.greater_equal(x=x, y=f(0)), a=f(1), b=f(-1)),
        lambda x: mb.mul(x=mb.sign(x=mb.mul(x=x, y=f(-1))), y=f(-1)),
        PROVED,
    ),
    twins(
        "epsilon of a root",
        lambda x: mb.rsqrt(x=mb.square(x=x), epsilon=f(1e-6)),
        lambda x: mb.rsqrt(x=mb.square(x=x), epsilon=f(1e-12)),
        lambda x: mb.rsqrt(x=mb.mul(x=x, y=x), epsilon=f(1e-6)),
        BITS,
        promise=NEAR,
    ),
    twins(
        "epsilon of a logarithm",
        lambda x: mb.log(x=mb.abs(x=x), epsilon=f(1e-3)),
        lambda x: mb.log(x=mb.abs(x=x), epsilon=f(1e-4)),
        lambda x: mb.log(x=mb.abs(x=mb.mul(x=x, y=f(-1))), epsilon=f(1e-3)),
        PROVED,
        promise=NEAR,
    ),
    twins("the last row", same, op("add", y=LAST), op("add", y=LAST * 0), BITS),
    twins(
        "broadcast the other way",
        op("add", y=ROW),
        op("add", y=COLUMN),
        op("add", y=np.tile(ROW, (4, 1))),
        BITS,
        ((F, (4, 4)),),
    ),
    twins(
        "every other column",
        columns(0),
        columns(1),
        lambda x: mb.squeeze(
            x=mb.slice_by_index(x=mb.reshape(x=x, shape=[4, 32, 2]), begin=[0, 0, 0], end=[4, 32, 1]), axes=[2]
        ),
        BITS,
    ),
    twins(
        "another bound",
        clipped(-3e3, 3e3),
        clipped(-3e3, 3.01e3),
        lambda x: mb.maximum(x=mb.minimum(x=x, y=f(3e3)), y=f(-3e3)),
        BITS,
    ),
    twins(
        "a mask the other way",
        lambda x, y: mb.select(cond=y, a=x, b=f(-1e4)),
        lambda x, y: mb.select(cond=mb.logical_not(x=y), a=x, b=f(-1e4)),
        lambda x, y: mb.select(cond=mb.logical_not(x=y), a=f(-1e4), b=x),
        PROVED,
        ((F, (2, 4)), (B, (2, 4))),
    ),
    twins(
        "a relu of NaN",
        lambda x: mb.select(cond=mb.greater(x=x, y=f(0)), a=x, b=f(0)),
        op("relu"),
        lambda x: mb.select(cond=mb.less(x=f(0), y=x), a=x, b=f(0)),
        BITS,
    ),
    twins(
        "infinities that are equal",
        op2("equal"),
        lambda x, y: mb.equal(x=mb.sub(x=x, y=y), y=f(0)),
        lambda x, y: mb.equal(x=y, y=x),
        BITS,
        TWO,
    ),
]
"""By default each is promised within 1e-3 for infinities and NaN too."""
