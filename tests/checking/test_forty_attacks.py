"""Wrong rewrites by somebody who knows the checks: each is refused, or has the weak grade that it deserves.

Four kinds: lengths, ranges, repairs at the edges of numbers, and addresses, integers and constants. Each is a
rewrite that is applied, or two models that are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from coremltools.converters.mil.mil import get_new_symbol

from anesurgery.checking.comparison import compare
from anesurgery.checking.grades import EXACT, Grade, SiteCheck, Tolerance
from anesurgery.errors import NO_MATCH, ProofError, Refusal
from anesurgery.files.interface import new_spec
from anesurgery.files.package import Loaded
from anesurgery.interpret.arithmetic import field
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.pattern import Match, OpPattern, Ops, var
from anesurgery.rewriting.rewrite import Rewrite
from anesurgery.surgery import apply

f, h, i = np.float32, np.float16, np.int32
F, H, INT = types.fp32, types.fp16, types.int32
Body = Callable[..., Any]
Inputs = Sequence[tuple[Any, tuple[int | str, ...]]]
NEAR, LOOSE = Tolerance(1e-5), Tolerance(1e-3)


class Case(NamedTuple):
    """Two computations of some inputs, or of what is made of them first."""

    old: Body
    new: Body
    inputs: Inputs = ((F, (2, 4)),)
    lengths: Mapping[str, tuple[int, int]] = {}
    """The lengths that are declared for sizes with a name."""
    first: Body | None = None
    """Makes the value that both sides read."""
    tolerance: Tolerance = EXACT
    nonfinite: bool = True
    magnitude: float = float("inf")


def model(body: Body, case: Case) -> Loaded | Program:
    """The program of one side; with a specification where lengths are declared."""
    symbols: dict[str, Any] = {}
    specs = [
        mb.TensorSpec(
            tuple(symbols.setdefault(d, get_new_symbol()) if isinstance(d, str) else d for d in shape), dtype=t
        )
        for t, shape in case.inputs
    ]

    def whole(*values: Var) -> Any:
        if case.first is not None:
            values = (case.first(mb, *values),)
            values[0].name = "shared"
        return mb.identity(x=body(mb, *values), name="y")

    takes = {1: lambda a: whole(a), 2: lambda a, b: whole(a, b)}[len(specs)]
    program: Program = mb.program(input_specs=specs, opset_version=ct.target.iOS17)(takes)
    if not case.lengths:
        return program
    spec = new_spec(program, 8)
    for feature, (_, shape) in zip(spec.description.input, case.inputs, strict=True):
        array = feature.type.multiArrayType
        array.ClearField("shapeRange")
        for d in shape:
            low, high = case.lengths[d] if isinstance(d, str) else (d, d)
            array.shapeRange.sizeRanges.add(lowerBound=low, upperBound=high)
    return Loaded(program, spec)


def rewrite_of(case: Case) -> Rewrite:
    """A pass whose only edit turns the old side into the new one."""

    @dataclass(frozen=True)
    class Becomes(Rewrite):
        name: ClassVar[str] = "becomes"
        tolerance: ClassVar[Tolerance] = case.tolerance
        tolerates_nonfinite: ClassVar[bool] = case.nonfinite
        magnitude: ClassVar[float] = case.magnitude

        def pattern(self, op: Ops) -> OpPattern:
            return op.identity(x=var("x"))

        def check(self, m: Match) -> Match | Refusal | None:
            return m if m.root.outputs[0].name == "y" else NO_MATCH

        def rewrite(self, mb: Builder, m: Match) -> Any:
            shared = [v for op in m.block.operations for v in op.outputs if v.name == "shared"]
            return case.new(mb, *(shared or m.block.inputs.values()))

    return Becomes()


def edited(case: Case) -> str:
    """The grade of the edit in words; "" where it is refused."""
    try:
        changes = apply(model(case.old, case), rewrite_of(case), quiet=True).changes
    except ProofError:
        return ""
    (check,) = [change.proof for change in changes]
    assert isinstance(check, SiteCheck), check
    return check.words


def compared(case: Case) -> str:
    """The grade of the second model in words; "" where it is another one."""
    found = compare(model(case.old, case), model(case.new, case), prove=True)
    assert found.proof is not None
    return str(found.proof.to_json()["grade"] or "") if found.ok else ""


def count(b: Any, x: Var) -> Any:
    return b.gather(x=b.shape(x=x), indices=i(1), axis=i(0))


def where(b: Any, x: Var, condition: Any) -> Any:
    return b.mul(x=x, y=b.cast(x=condition, dtype="fp32"))


def same(b: Any, x: Var, *others: Var) -> Any:
    return b.mul(x=x, y=x.val.dtype.type(1) if x.val is not None else ONE[x.dtype])


ONE = {F: f(1), H: h(1), INT: i(1)}
RNG = np.random.default_rng(0)
ROWS: Inputs = ((F, (1, "s", 2)),)
TWO_ROWS: Inputs = (*ROWS, (F, (1, "t", 2)))
LONG, SHORT = {"s": (1, 900), "t": (1, 900)}, {"s": (1, 30), "t": (1, 30)}
SCALES = RNG.standard_normal(900).astype(f)
ONE_SCALE_OFF = np.where(np.arange(50) == 33, SCALES[:50] + 1, SCALES[:50]).astype(f)
OTHER_SCALES = np.where(np.arange(900) == 777, SCALES + 1, SCALES).astype(f)


def limited(inner: Body, **limit: Any) -> tuple[Body, Body]:
    """A value with a limit that no short rows reach, and without."""
    (op, y), *_ = limit.items()
    return lambda b, x: getattr(b, op)(x=inner(b, x), y=f(y)), inner


def added(*numbers: int) -> Body:
    """The rows, unless their count is 700 with some numbers added."""

    def body(b: Any, x: Var) -> Any:
        n = count(b, x)
        for number in numbers:
            n = b.add(x=n, y=i(number))
        return where(b, x, b.not_equal(x=n, y=i(700)))

    return body


def apart(by: int) -> Body:
    """The rows, unless there are so many more of them than of the others."""
    return lambda b, x, z: where(b, x, b.not_equal(x=b.sub(x=count(b, x), y=count(b, z)), y=i(by)))


def scaled(table: Any) -> Body:
    return lambda b, x: b.mul(x=x, y=b.gather(x=table, indices=b.sub(x=count(b, x), y=i(1)), axis=i(0)))


def doubled(b: Any, x: Var) -> Any:
    return where(b, x, b.not_equal(x=b.add(x=count(b, x), y=count(b, x)), y=i(1000)))


def halves(b: Any, x: Var) -> Any:
    made = b.fill(shape=b.slice_by_index(x=b.shape(x=x), begin=[1], end=[2]), value=f(0.5))
    total = b.reduce_sum(x=made, axes=[0], keep_dims=False)
    return where(b, x, b.not_equal(x=total, y=f(321.5)))


def by_last(table: Any) -> Body:
    """A factor for each length up to that of a small table, and the last one for all others."""
    last = i(len(table) - 1)
    return lambda b, x: b.mul(x=x, y=b.gather(x=table, indices=b.minimum(x=count(b, x), y=last), axis=i(0)))


def counted_rows(made: Body) -> Body:
    """The rows, unless 600 of others are made of them."""
    return lambda b, x: where(b, x, b.not_equal(x=count(b, made(b, x)), y=i(600)))


def joined(b: Any, x: Var, z: Var) -> Any:
    return where(b, x, b.not_equal(x=count(b, b.concat(values=[x, z], axis=1)), y=i(701)))


def remainder(b: Any, x: Var) -> Any:
    return where(b, x, b.not_equal(x=b.mod(x=count(b, x), y=i(640)), y=i(345)))


LENGTHS = {
    "a length and 100": Case(added(100), same, ROWS, LONG),
    "a length, 90 and 55": Case(added(90, 55), same, ROWS, LONG),
    "twice a length": Case(doubled, same, ROWS, LONG),
    "a factor for each length": Case(scaled(SCALES), scaled(OTHER_SCALES), ROWS, LONG),
    "two lengths, 500 apart": Case(apart(500), same, TWO_ROWS, LONG),
    "two short lengths, 5 apart": Case(apart(5), same, TWO_ROWS, SHORT),
    "two lengths that are joined": Case(joined, same, TWO_ROWS, LONG),
    "a row of a small table": Case(by_last(SCALES[:50]), by_last(ONE_SCALE_OFF), ROWS, LONG),
    "rows and 50 others": Case(
        counted_rows(lambda b, x: b.concat(values=[x, np.ones((1, 50, 2), f)], axis=1)), same, ROWS, LONG
    ),
    "rows three times": Case(counted_rows(lambda b, x: b.tile(x=x, reps=[1, 3, 1])), same, ROWS, LONG),
    "rows with padding": Case(
        counted_rows(lambda b, x: b.pad(x=x, pad=[0, 0, 0, 50, 0, 0], mode="constant", constant_val=f(0))),
        same,
        ROWS,
        LONG,
    ),
    "a remainder of the length": Case(remainder, same, ROWS, LONG),
    "a sum of halves": Case(halves, same, ROWS, LONG),
    "a norm of long rows": Case(
        *limited(lambda b, x: b.instance_norm(x=b.transpose(x=x, perm=[0, 2, 1]), epsilon=f(1e-5)), minimum=20),
        ROWS,
        LONG,
    ),
    "a norm of long rows, below": Case(
        *limited(
            lambda b, x: b.instance_norm(x=b.transpose(x=x, perm=[0, 2, 1]), epsilon=f(1e-5)), maximum=-20
        ),
        ROWS,
        LONG,
    ),
    "the mean of shares": Case(
        *limited(lambda b, x: b.reduce_mean(x=b.softmax(x=x, axis=1), axes=[1]), maximum=1 / 60),
        ROWS,
        {"s": (1, 200)},
    ),
    "the largest share": Case(
        *limited(lambda b, x: b.reduce_max(x=b.softmax(x=x, axis=1), axes=[1]), maximum=1 / 60),
        ROWS,
        {"s": (1, 200)},
    ),
    "a sum of exponentials": Case(
        *limited(lambda b, x: b.reduce_log_sum_exp(x=b.tanh(x=x), axes=[1]), minimum=5.0), ROWS, LONG
    ),
    "a product": Case(
        *limited(
            lambda b, x: b.reduce_prod(x=b.clip(x=x, alpha=f(0.5), beta=f(0.75)), axes=[1]), maximum=1e-20
        ),
        ROWS,
        LONG,
    ),
}


def unclipped(first: Body, low: float, high: float, shape: tuple[int, ...] = (2, 8), dtype: Any = H) -> Case:
    """A clip of a value is left out."""
    number = h if dtype is H else f
    return Case(
        lambda b, x: b.clip(x=x, alpha=number(low), beta=number(high)), same, ((dtype, shape),), first=first
    )


def over_rows(op: str) -> Body:
    return lambda b, x: getattr(b, f"reduce_{op}")(x=x, axes=[-1], keep_dims=True)


def share(b: Any, x: Var) -> Any:
    return b.softmax(x=x, axis=-1)


def between(b: Any, x: Var, low: float = 0.1, high: float = 0.3) -> Any:
    return b.clip(x=x, alpha=h(low), beta=h(high))


def over_largest(b: Any, x: Var) -> Any:
    return b.real_div(x=x, y=b.add(x=over_rows("max")(b, b.abs(x=x)), y=h(-1e-3)))


RANGES = {
    "an l2 norm without epsilon": unclipped(lambda b, x: b.l2_norm(x=x, epsilon=h(1e-12)), -1, 1, (1, 2, 2, 2)),
    "a norm whose epsilon is 0 in fp16": unclipped(
        lambda b, x: b.layer_norm(x=x, axes=[-1], epsilon=h(1e-8)), -2.7, 2.7
    ),
    "an instance norm in real numbers": unclipped(
        lambda b, x: b.instance_norm(x=x, epsilon=h(1e-5)), -2.645, 2.645, (1, 2, 8)
    ),
    "sums so far of shares": unclipped(lambda b, x: b.cumsum(x=share(b, x), axis=1), 0, 1, (2, 300)),
    "the sum of shares": unclipped(lambda b, x: over_rows("sum")(b, share(b, x)), 0, 1, (2, 300)),
    "a mean that is rounded": unclipped(lambda b, x: over_rows("mean")(b, between(b, x)), 0.1, 0.3, (2, 300)),
    "an average that is rounded": unclipped(
        lambda b, x: b.avg_pool(x=between(b, x), kernel_sizes=[7], strides=[1], pad_type="valid"),
        0.1,
        0.3,
        (1, 2, 30),
    ),
    "sine and cosine": unclipped(lambda b, x: b.add(x=b.square(x=b.sin(x=x)), y=b.square(x=b.cos(x=x))), 0, 1),
    "what is rounded to 0": unclipped(
        lambda b, x: b.mul(x=share(b, x), y=share(b, b.mul(x=x, y=h(-1)))), 1e-7, 1
    ),
    "what is rounded to 1": unclipped(lambda b, x: b.sub(x=h(1), y=b.sigmoid(x=x)), 1e-4, 1),
    "a slope above 1": unclipped(lambda b, x: b.mul(x=b.tanh(x=x), y=h(1.001)), -1, 1),
    "a difference of means": unclipped(
        lambda b, x: b.sub(x=over_rows("mean")(b, b.square(x=x)), y=b.square(x=over_rows("mean")(b, x))), 0, 6e4
    ),
    "over less than the largest": unclipped(over_largest, -1, 1),
    "a threshold below 0": unclipped(
        lambda b, x: b.thresholded_relu(x=between(b, x, -5, -1), alpha=h(-3)), -1, 0
    ),
    "tanh that falls": unclipped(lambda b, x: b.scaled_tanh(x=b.relu(x=x), alpha=h(-1), beta=h(2)), 0, 2),
    "a narrow cast that overflows": Case(
        lambda b, x: b.minimum(x=x, y=h(65504)),
        same,
        first=lambda b, x: b.cast(x=b.clip(x=x, alpha=f(0), beta=f(70000)), dtype="fp16"),
    ),
    "the magnitude of the least integer": Case(
        lambda b, x: b.maximum(x=x, y=i(0)), same, ((INT, (2, 4)),), first=lambda b, x: b.abs(x=x)
    ),
    "a saturated byte": Case(
        lambda b, x: b.minimum(x=b.cast(x=x, dtype="int32"), y=i(254)),
        lambda b, x: b.cast(x=x, dtype="int32"),
        first=lambda b, x: b.cast(x=x, dtype="uint8"),
    ),
}

TWO: Inputs = ((F, (2, 4)), (F, (2, 4)))
EVEN = np.vstack([np.ones((9, 8)), 1e-6 * np.ones((1, 8))]).astype(f)


def linear(weight: Any) -> Body:
    return lambda b, x: b.linear(x=x, weight=weight)


def by_largest(b: Any, x: Var) -> Any:
    """A root of squares of shares of the largest; of zeros, 0 over 0."""
    most = over_rows("max")(b, b.abs(x=x))
    return b.mul(x=over_rows("l2_norm")(b, b.real_div(x=x, y=most)), y=most)


def by_exponentials(b: Any, x: Var) -> Any:
    powers = b.exp(x=b.sub(x=x, y=over_rows("max")(b, b.abs(x=x))))
    return b.real_div(x=powers, y=over_rows("sum")(b, powers))


def flushed(number: Any, least: float) -> tuple[Body, Body]:
    """Twice a number, and twice what is left where small ones become 0."""

    def body(b: Any, x: Var) -> Any:
        kept = b.select(cond=b.less(x=b.abs(x=x), y=number(least)), a=number(0), b=x)
        return b.mul(x=kept, y=number(2))

    return lambda b, x: b.mul(x=x, y=number(2)), body


def turned(b: Any, x: Var, y: Var, test: str) -> Any:
    return b.select(cond=getattr(b, test)(x=x, y=f(0)), a=y, b=b.mul(x=y, y=f(-1)))


def finite(old: Body, new: Body, *inputs: Any, magnitude: float = float("inf")) -> Case:
    return Case(old, new, inputs or ((F, (2, 4)),), tolerance=NEAR, nonfinite=False, magnitude=magnitude)


REPAIRS = {
    "the smaller one, for NaN": Case(
        lambda b, x, y: b.minimum(x=x, y=y), lambda b, x, y: b.select(cond=b.less(x=x, y=y), a=x, b=y), TWO
    ),
    "the larger one by a sum": finite(
        lambda b, x, y: b.maximum(x=x, y=y),
        lambda b, x, y: b.mul(x=b.add(x=b.add(x=x, y=y), y=b.abs(x=b.sub(x=x, y=y))), y=f(0.5)),
        *TWO,
    ),
    "the sign of subnormals": finite(
        lambda b, x: b.sign(x=x), lambda b, x: b.real_div(x=x, y=b.maximum(x=b.abs(x=x), y=f(1e-38)))
    ),
    "the sign of small numbers": finite(
        lambda b, x: b.sign(x=x), lambda b, x: b.clip(x=b.mul(x=x, y=f(1e20)), alpha=f(-1), beta=f(1))
    ),
    "turned at 0": finite(
        lambda b, x, y: turned(b, x, y, "greater_equal"), lambda b, x, y: turned(b, x, y, "greater"), *TWO
    ),
    "the sign of -0": finite(
        lambda b, x: b.sign(x=b.real_div(x=f(1), y=x)),
        lambda b, x: b.sub(x=b.mul(x=b.cast(x=b.greater_equal(x=x, y=f(0)), dtype="fp32"), y=f(2)), y=f(1)),
    ),
    "by a reciprocal": finite(
        lambda b, x, y: b.real_div(x=x, y=y), lambda b, x, y: b.mul(x=x, y=b.inverse(x=y, epsilon=f(0))), *TWO
    ),
    "half of a sum that overflows": Case(
        lambda b, x, y: b.add(x=b.mul(x=x, y=f(0.5)), y=b.mul(x=y, y=f(0.5))),
        lambda b, x, y: b.mul(x=b.add(x=x, y=y), y=f(0.5)),
        TWO,
    ),
    "a root of squares of zeros": finite(over_rows("l2_norm"), by_largest),
    "shares by the largest magnitude": finite(share, by_exponentials),
    "a clip inside the magnitude": finite(
        lambda b, x: b.mul(x=x, y=f(2)),
        lambda b, x: b.mul(x=b.clip(x=x, alpha=f(-99.99), beta=f(99.99)), y=f(2)),
        magnitude=100.0,
    ),
    "subnormals of fp32": Case(*flushed(f, 1e-38)),
    "subnormals of fp16": Case(*flushed(h, 6.1e-5), ((H, (2, 4)),)),
    "a maximum for an addend": finite(
        lambda b, x: b.log(x=b.add(x=b.abs(x=x), y=f(1e-6)), epsilon=f(1e-45)),
        lambda b, x: b.log(x=b.maximum(x=b.abs(x=x), y=f(1e-6)), epsilon=f(1e-45)),
    ),
    "a small row": Case(
        linear(EVEN), linear(np.where(EVEN < 1, 0, EVEN).astype(f)), ((F, (2, 8)),), tolerance=LOOSE
    ),
}

IDS: Inputs = ((INT, (3,)),)
TABLE = RNG.standard_normal((20_000, 2)).astype(f)
ONE_OFF = TABLE.copy()
ONE_OFF[13_333, 1] += 1
ENTRIES = RNG.standard_normal(64).astype(f)
P = [int(p) for p in field.draw_primes(0)]


def looked_up(table: Any) -> Body:
    return lambda b, x: b.gather(x=table, indices=x, axis=0, validate_indices=False)


def by_coordinates(table: Any) -> Body:
    return lambda b, x: b.gather_nd(
        x=table, indices=b.expand_dims(x=x, axes=[1]), batch_dims=0, validate_indices=False
    )


def in_columns(table: Any) -> Body:
    return lambda b, x: b.concat(
        values=[looked_up(TABLE[:, :1].copy())(b, x), looked_up(table[:, 1:].copy())(b, x)], axis=1
    )


def in_shards(table: Any) -> Body:
    def body(b: Any, x: Var) -> Any:
        first = looked_up(table[:10_000].copy())(b, b.minimum(x=x, y=i(9_999)))
        second = looked_up(table[10_000:].copy())(b, b.maximum(x=b.sub(x=x, y=i(10_000)), y=i(0)))
        return b.select(cond=b.expand_dims(x=b.less(x=x, y=i(10_000)), axes=[1]), a=first, b=second)

    return body


def but_for(test: Body) -> Body:
    """Rows of a table, but zeros for one id."""
    return lambda b, x: b.mul(
        x=looked_up(TABLE)(b, x), y=b.expand_dims(x=b.cast(x=test(b, x), dtype="fp32"), axes=[1])
    )


def entry(b: Any, x: Var, most: int | None = None) -> Any:
    begin = x if most is None else b.minimum(x=x, y=i(most))
    return b.slice_by_size(x=ENTRIES, begin=begin, size=[2])


def exactly(number: int) -> list[float]:
    """An integer as a sum of numbers of fp32."""
    parts: list[float] = []
    while number:
        part = f(number) if int(f(number)) <= number else np.nextafter(f(number), f(0))
        parts.append(float(part))
        number -= int(part)
    return parts


def prime_terms(b: Any, x: Var, y: Var) -> Any:
    """Terms whose factors add up to the product of the primes of the first point of seed 0."""
    for factor in exactly(P[0] * P[1] * P[2]):
        y = b.add(x=y, y=b.mul(x=x, y=f(factor * 2.0**-85)))
    return y


def counted(body: Body) -> Body:
    return lambda b, *values: b.cast(x=body(b, *values), dtype="int32")


def past(b: Any, x: Var, most: int | None = None) -> Any:
    """The sum of places up to a number."""
    end = b.squeeze(x=x) if most is None else b.minimum(x=b.squeeze(x=x), y=i(most))
    return b.reduce_sum(x=b.range_1d(start=i(0), end=end, step=i(1)), axes=[0], keep_dims=True)


INTEGERS = {
    "a row by its coordinates": Case(by_coordinates(TABLE), by_coordinates(ONE_OFF), IDS),
    "a row of a table that is doubled": Case(
        lambda b, x: b.mul(x=looked_up(TABLE)(b, x), y=f(2)), looked_up(2 * ONE_OFF), IDS
    ),
    "a row of columns": Case(looked_up(TABLE), in_columns(ONE_OFF), IDS),
    "a row of a shard": Case(looked_up(TABLE), in_shards(ONE_OFF), IDS),
    "a row of shards": Case(in_shards(TABLE), in_shards(ONE_OFF), IDS),
    "an id by a difference": Case(
        looked_up(TABLE), but_for(lambda b, x: b.not_equal(x=b.sub(x=x, y=i(7_000)), y=i(6_543))), IDS
    ),
    "an id by a quotient": Case(
        looked_up(TABLE), but_for(lambda b, x: b.not_equal(x=b.floor_div(x=x, y=i(2)), y=i(7_777))), IDS
    ),
    "an id by a remainder": Case(
        looked_up(TABLE), but_for(lambda b, x: b.not_equal(x=b.mod(x=x, y=i(19_000)), y=i(8_123))), IDS
    ),
    "a far place": Case(entry, lambda b, x: entry(b, x, 40), ((INT, (1,)),)),
    "a place that is a number": Case(
        lambda b, x: b.add(x=entry(b, x), y=b.cast(x=x, dtype="fp32")),
        lambda b, x: b.add(x=entry(b, x), y=b.cast(x=b.minimum(x=x, y=i(40)), dtype="fp32")),
        ((INT, (1,)),),
    ),
    "a far end": Case(past, lambda b, x: past(b, x, 20), ((INT, (1,)),)),
    "the remainder for one-hot": Case(
        lambda b, x: b.one_hot(indices=x, one_hot_vector_size=5),
        lambda b, x: b.one_hot(indices=b.mod(x=x, y=i(5)), one_hot_vector_size=5),
        IDS,
    ),
    "the last of 16 bits": Case(
        lambda b, x: b.cast(x=b.cast(x=b.add(x=x, y=i(1)), dtype="int16"), dtype="int32"),
        lambda b, x: b.add(x=b.cast(x=b.cast(x=x, dtype="int16"), dtype="int32"), y=i(1)),
        IDS,
    ),
    "compared by a difference": Case(
        counted(lambda b, x, y: b.less(x=b.sub(x=x, y=y), y=i(0))),
        counted(lambda b, x, y: b.less(x=x, y=y)),
        (*IDS, *IDS),
    ),
    "the negative of the least": Case(
        counted(lambda b, x: b.less(x=b.mul(x=x, y=i(-1)), y=i(5))),
        counted(lambda b, x: b.greater(x=x, y=i(-5))),
        IDS,
    ),
    "a saturated float by a remainder": Case(
        lambda b, x: b.cast(x=b.cast(x=x, dtype="uint8"), dtype="int32"),
        lambda b, x: b.mod(x=b.cast(x=x, dtype="int32"), y=i(256)),
    ),
    "factors that add up to primes": finite(prime_terms, lambda b, x, y: b.mul(x=y, y=f(1)), *TWO),
}
WRONG = {**LENGTHS, **RANGES, **REPAIRS, **INTEGERS}
WEAK = dict.fromkeys(
    [
        "twice a length",
        "a factor for each length",
        "a sum of halves",
        "a row of a small table",
        "rows and 50 others",
        "rows three times",
    ],
    "checked on lengths 1 to 900",
)
"""What is accepted with the lengths that were tried."""
BY_CHANCE = {"factors that add up to primes", "the largest share"}
"""Models that differ on few numbers, or by about the gate: "checked" is no proof, and does not say more."""


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_edit_is_refused(name: str) -> None:
    assert edited(WRONG[name]) == WEAK.get(name, "")


@pytest.mark.parametrize("name", [*LENGTHS, *INTEGERS])
def test_a_wrong_model_is_refused(name: str) -> None:
    words = compared(WRONG[name])
    assert words == WEAK.get(name, "") or (name in BY_CHANCE and words == "checked")


def in_brackets(b: Any, x: Var, y: Var) -> Any:
    return b.mul(x=b.add(x=x, y=y), y=f(3))


def guarded(b: Any, x: Var) -> Any:
    most = b.maximum(x=over_rows("max")(b, b.abs(x=x)), y=f(1e-10))
    return b.mul(x=over_rows("l2_norm")(b, b.real_div(x=x, y=most)), y=most)


def less_than(first: int, second: int) -> Body:
    """The rows where 900 less their count is above a number."""
    return lambda b, x: where(b, x, b.greater(x=b.sub(x=i(first), y=count(b, x)), y=i(second)))


RIGHT: dict[str, tuple[Case, str]] = {
    "a limit moved to the other side": (
        Case(less_than(900, 100), less_than(800, 0), ROWS, LONG),
        "bit for bit",
    ),
    "shares of shares of rows": (
        Case(
            lambda b, x: b.mul(x=b.softmax(x=x, axis=1), y=f(2)),
            lambda b, x: b.add(x=b.softmax(x=x, axis=1), y=b.softmax(x=x, axis=1)),
            ROWS,
            LONG,
        ),
        "proved",
    ),
    "rows of two lengths, joined": (
        Case(
            lambda b, x, z: b.reduce_max(x=b.relu(x=b.concat(values=[x, z], axis=1)), axes=[1]),
            lambda b, x, z: b.reduce_max(x=b.concat(values=[b.relu(x=x), b.relu(x=z)], axis=1), axes=[1]),
            TWO_ROWS,
            LONG,
        ),
        "bit for bit",
    ),
    "the same factor for each length": (
        Case(scaled(SCALES), lambda b, x: b.mul(x=f(1), y=scaled(SCALES)(b, x)), ROWS, LONG),
        "bit for bit",
    ),
    "a mean as a sum over the count": (
        Case(
            lambda b, x: b.reduce_mean(x=x, axes=[1]),
            lambda b, x: b.real_div(x=b.reduce_sum(x=x, axes=[1]), y=b.cast(x=count(b, x), dtype="fp32")),
            ROWS,
            LONG,
            tolerance=NEAR,
        ),
        "proved",
    ),
    "shares within 0 and 1": (unclipped(share, 0, 1.01), "bit for bit"),
    "a norm with a large epsilon": (
        unclipped(lambda b, x: b.layer_norm(x=x, axes=[-1], epsilon=h(1e-2)), -3, 3),
        "bit for bit",
    ),
    "the largest of a window of shares": (
        unclipped(
            lambda b, x: b.max_pool(x=b.sigmoid(x=x), kernel_sizes=[2], strides=[1], pad_type="valid"),
            0,
            1,
            (1, 2, 8),
        ),
        "bit for bit",
    ),
    "a mean of what lies between, with room": (
        unclipped(lambda b, x: over_rows("mean")(b, between(b, x)), 0.05, 0.4, (2, 30)),
        "bit for bit",
    ),
    "out of brackets": (
        finite(in_brackets, lambda b, x, y: b.add(x=b.mul(x=x, y=f(3)), y=b.mul(x=y, y=f(3))), *TWO),
        "proved",
    ),
    "a root of squares, guarded": (finite(over_rows("l2_norm"), guarded, magnitude=1e5), "checked"),
    "the smaller one by negatives": (
        Case(
            lambda b, x, y: b.minimum(x=x, y=y),
            lambda b, x, y: b.mul(x=b.maximum(x=b.mul(x=x, y=f(-1)), y=b.mul(x=y, y=f(-1))), y=f(-1)),
            TWO,
        ),
        "bit for bit",
    ),
    "columns of a table": (Case(looked_up(TABLE), in_columns(TABLE), IDS), "bit for bit"),
    "shards of a table": (Case(looked_up(TABLE), in_shards(TABLE), IDS), "checked"),
    "a place that is clipped where it ends": (
        Case(entry, lambda b, x: entry(b, x, 62), ((INT, (1,)),)),
        "checked",
    ),
    "an integer there and back": (Case(lambda b, x: b.sub(x=b.add(x=x, y=i(7)), y=i(7)), same, IDS), "proved"),
    "a saturated byte as an integer": (
        Case(
            lambda b, x: b.minimum(x=b.cast(x=x, dtype="int32"), y=i(255)),
            lambda b, x: b.cast(x=x, dtype="int32"),
            first=lambda b, x: b.cast(x=x, dtype="uint8"),
        ),
        "checked",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_edit_keeps_its_grade(name: str) -> None:
    case, words = RIGHT[name]
    assert edited(case) == words


def test_there_are_enough_of_each_kind() -> None:
    assert min(map(len, (LENGTHS, RANGES, REPAIRS, INTEGERS))) >= 10
    assert len(RIGHT) >= 15
    assert not set(WEAK) - set(WRONG)
    assert Grade.NUMBERS < Grade.PROVED


COLORS = {"RGB": 20, "BGR": 30}


def described(**how: Any) -> Loaded:
    """A model of one input that a specification describes so."""
    program: Program = mb.program(input_specs=[mb.TensorSpec((1, 3, 8, 8))])(lambda x: mb.relu(x=x, name="y"))
    spec = new_spec(program, 8)
    kind = spec.description.input[0].type
    if "color" in how:
        kind.imageType.width = kind.imageType.height = 8
        kind.imageType.colorSpace = COLORS[how["color"]]
    if "default" in how:
        kind.isOptional, kind.multiArrayType.floatDefaultValue = True, how["default"]
    return Loaded(program, spec)


def given(dtype: Any) -> Program:
    made: Program = mb.program(input_specs=[mb.TensorSpec((2, 4), dtype=dtype)], opset_version=ct.target.iOS17)(
        lambda x: mb.cast(x=x, dtype="fp32", name="y")
    )
    return made


def rows_up_to(most: int) -> Loaded:
    case = Case(same, same, ROWS, {"s": (1, most)})
    loaded = model(case.old, case)
    assert isinstance(loaded, Loaded)
    return loaded


INTERFACES = {
    "another order of colors": (described(color="RGB"), described(color="BGR"), "another order of colors"),
    "an array for a picture": (described(color="RGB"), described(), "another form"),
    "another default": (described(default=1.0), described(default=2.0), "another default"),
    "fewer lengths": (rows_up_to(900), rows_up_to(100), "takes 1 to 900 along axis 1, then 1 to 100"),
    "an integer of 16 bits": (given(types.int32), given(types.int16), "int16 in the second"),
}


@pytest.mark.parametrize("name", INTERFACES)
def test_another_interface_is_no_match(name: str) -> None:
    a, b, words = INTERFACES[name]
    found = compare(a, b, prove=True)
    assert not found.ok
    assert words in found.verdict
    assert found.proof is not None
    assert found.proof.grade is None
    assert compare(a, a, prove=True).ok
