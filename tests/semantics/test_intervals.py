"""Intervals hold: what a program makes of any input lies in the interval that was found before it ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from anesurgery.facts.whole_numbers import never_negative
from anesurgery.interpret import run
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.semantics.bounds import ANY, Interval
from anesurgery.semantics.intervals import interval, product, stored_interval

Body = Callable[[Any], Any]
SHAPE = (1, 2, 4, 4)
LOW, HIGH = -3.0, 5.0


def program(body: Body, dtype: Any = types.fp32, shape: tuple[int, ...] = SHAPE) -> Program:
    specs = [mb.TensorSpec(shape, dtype)]
    made: Program = mb.program(input_specs=specs, opset_version=ct.target.iOS17)(lambda x: body(x))
    return made


def bounded(x: Any, low: float = LOW, high: float = HIGH) -> Any:
    return mb.clip(x=x, alpha=np.float32(low), beta=np.float32(high))


def result(made: Program) -> Var:
    (out,) = made.functions["main"].outputs
    return out


def holds(made: Program, found: Interval, draws: int = 6) -> bool:
    """Do the results of random inputs, the ends among them, lie in an interval?"""
    rng = np.random.default_rng(0)
    for i in range(draws):
        x = rng.uniform(-1, 1, SHAPE) * (0, 1, 4, 8, 100, 3e4)[i % 6]
        (value,) = run(made, {"x": x.astype(np.float32)}).values()
        kept = np.asarray(value, np.float64)
        kept = kept[~np.isnan(kept)]
        slack = 1e-6 * max(1.0, np.abs(kept).max(initial=0.0))
        if kept.size and (kept.min() < found[0] - slack or kept.max() > found[1] + slack):
            return False
    return True


def two(op_type: str) -> Body:
    return lambda x: getattr(mb, op_type)(x=bounded(x), y=bounded(mb.reverse(x=x, axes=[-1]), 0.5, 2.0))


def one(op_type: str, **more: Any) -> Body:
    return lambda x: getattr(mb, op_type)(x=bounded(x), **more)


def halved_square(x: Any) -> Any:
    """-x^2 / 2, as the exponent of a bell curve is written."""
    return mb.mul(x=mb.mul(x=x, y=np.float32(-0.5)), y=x)


def integers(x: Any, low: float = LOW, high: float = HIGH) -> Any:
    return mb.cast(x=bounded(x, low, high), dtype="int32")


def over_clip(x: Any) -> Any:
    """1 between 1/2 and 2."""
    return mb.real_div(x=x, y=mb.clip(x=x, alpha=np.float32(0.5), beta=np.float32(2)))


POOL: dict[str, Any] = {"kernel_sizes": [3, 3], "strides": [1, 1], "pad_type": "same"}
BODIES: dict[str, Body] = {
    **{
        name: one(name) for name in ("abs", "ceil", "exp", "exp2", "floor", "relu", "round", "sinh", "softplus")
    },
    **{name: one(name) for name in ("square", "sigmoid", "tanh", "erf", "atan", "softsign", "sign", "relu6")},
    **{name: two(name) for name in ("add", "sub", "mul", "maximum", "minimum", "mod")},
    "floor_div": lambda x: mb.floor_div(x=bounded(x, 0.0), y=bounded(x, 0.5, 2.0)),
    "sqrt": lambda x: mb.sqrt(x=bounded(x, 1.0, 4.0)),
    "log": lambda x: mb.log(x=bounded(x, 1.0, 4.0)),
    "inverse": lambda x: mb.inverse(x=mb.abs(x=x), epsilon=np.float32(1e-3)),
    "rsqrt": lambda x: mb.rsqrt(x=bounded(x, 0.5, 4.0)),
    "silu": one("silu"),
    "gelu": one("gelu"),
    "gelu by tanh": one("gelu", mode="TANH_APPROXIMATION"),
    "gelu by sigmoid": one("gelu", mode="SIGMOID_APPROXIMATION"),
    "silu of what is not negative": lambda x: mb.silu(x=mb.abs(x=x)),
    "instance_norm": lambda x: mb.instance_norm(x=x, epsilon=np.float32(1e-5)),
    "real_div": lambda x: mb.real_div(x=bounded(x), y=np.float32(-2)),
    "a magnitude over its clip": lambda x: over_clip(bounded(x, 0.25, 5.0)),
    "a value over the unit of its magnitude": lambda x: mb.real_div(
        x=x, y=over_clip(mb.maximum(x=mb.abs(x=x), y=np.float32(0.25)))
    ),
    "cast": integers,
    "cast of a fraction": lambda x: mb.cast(x=bounded(x, 0.25, 0.75), dtype="int32"),
    "select": lambda x: mb.select(cond=mb.greater(x=x, y=np.float32(0)), a=bounded(x), b=np.float32(7)),
    "concat": lambda x: mb.concat(values=[bounded(x), mb.tanh(x=x)], axis=1),
    "stack": lambda x: mb.stack(values=[bounded(x), mb.tanh(x=x)], axis=1),
    "pad": one("pad", pad=[1, 1], constant_val=np.float32(9)),
    "avg_pool": lambda x: mb.avg_pool(x=bounded(x, 2.0, 3.0), **POOL),
    "avg_pool of what is there": lambda x: mb.avg_pool(
        x=bounded(x, 2.0, 3.0), exclude_padding_from_average=True, **POOL
    ),
    "max_pool": lambda x: mb.max_pool(x=bounded(x, -3.0, -2.0), **POOL),
    "one_hot": lambda x: mb.one_hot(
        indices=integers(x, 0, 3), one_hot_vector_size=4, on_value=np.float32(5), off_value=np.float32(-2)
    ),
    "reduce_sum": one("reduce_sum", axes=[-1]),
    "reduce_mean": one("reduce_mean", axes=[-1]),
    "reduce_max": one("reduce_max", axes=[-1]),
    "gather": one("gather", indices=np.array([1, 0], np.int32), axis=2),
    "transpose": one("transpose", perm=[0, 2, 3, 1]),
    "layer_norm": one("layer_norm", axes=[-1], epsilon=np.float32(1e-5)),
    "softmax": one("softmax", axis=-1),
    "a square above 0": lambda x: mb.square(x=bounded(x, -3.0, -2.0)),
    "reduce_l2_norm": one("reduce_l2_norm", axes=[-1]),
    "reduce_sum_square": lambda x: mb.reduce_sum_square(x=bounded(x, 1.0, 2.0), axes=[-1]),
    "half of a square, negative": lambda x: halved_square(bounded(x)),
    "fill_like": lambda x: mb.fill_like(ref_tensor=x, value=np.float32(3)),
    "a count of ones": lambda x: mb.cumsum(x=mb.fill_like(ref_tensor=x, value=np.float32(1)), axis=2),
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", BODIES)
def test_what_is_made_lies_in_the_interval(name: str) -> None:
    made = program(BODIES[name])
    found = interval(result(made))
    assert found != ANY
    assert holds(made, found)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("avg_pool", (2.0, 3.0)),
        ("one_hot", (0.0, 1.0)),
        ("fill_like", (0.0, 0.0)),
        ("a count of ones", (0.0, 2.0)),
        ("cast of a fraction", (0.25, 0.75)),
        ("exp", (0.0, 100.0)),
        ("a value over the unit of its magnitude", (-1.0, 1.0)),
    ],
)
def test_a_wrong_interval_is_caught(name: str, wrong: Interval) -> None:
    """What rules once said, or nearly said: zeros that pad, the numbers of one_hot, the fraction."""
    assert not holds(program(BODIES[name]), wrong)


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("relu", (0.0, 5.0)),
        ("round", (-3.0, 5.0)),
        ("cast of a fraction", (0.0, 0.0)),
        ("avg_pool of what is there", (2.0, 3.0)),
        ("avg_pool", (0.0, 3.0)),
        ("one_hot", (-2.0, 5.0)),
        ("fill_like", (3.0, 3.0)),
        ("a count of ones", (1.0, 4.0)),
        ("sub", (-5.0, 4.5)),
        ("half of a square, negative", (-12.5, 0.0)),
        ("a square above 0", (4.0, 9.0)),
        ("floor_div", (0.0, np.inf)),
        ("a magnitude over its clip", (0.5, 2.5)),
        ("a value over the unit of its magnitude", (-2.0, 2.0)),
    ],
)
def test_intervals_are_tight(name: str, exact: Interval) -> None:
    assert interval(result(program(BODIES[name]))) == exact


def norm(x: Any, epsilon: float, dtype: Any) -> Any:
    """A root mean square norm of rows of four, written out."""
    mean = mb.reduce_mean(x=mb.square(x=x), axes=[-1], keep_dims=True)
    return mb.mul(x=x, y=mb.rsqrt(x=mb.add(x=mean, y=dtype(epsilon)), epsilon=dtype(0)))


def within(x: Any, low: float, high: float, dtype: Any = np.float16) -> Any:
    return mb.clip(x=x, alpha=dtype(low), beta=dtype(high))


half, single = np.float16, np.float32
UP = 2.0**-10
"""A step of fp16 at 1."""
STORED: dict[str, tuple[Body, Any, Interval, Interval]] = {
    "a clip": (lambda x: within(x, -3, 5), types.fp16, (-3, 5), (-3, 5)),
    "a sum that fp16 holds": (lambda x: mb.add(x=within(x, 0, 1), y=half(2)), types.fp16, (2, 3), (2, 3)),
    "a sum that it does not": (
        lambda x: mb.add(x=within(x, 1, 2), y=half(2049)),
        types.fp16,
        (2049, 2050),
        (2048, 2050),
    ),
    "a third": (
        lambda x: mb.real_div(x=within(x, 0, 1), y=half(3)),
        types.fp16,
        (0, 1 / 3),
        (0, 0.33349609375),
    ),
    "a square that overflows": (lambda x: mb.square(x=within(x, 0, 300)), types.fp16, (0, 90000), (0, np.inf)),
    "a square that vanishes": (
        lambda x: mb.square(x=within(x, 2.0**-10, 1)),
        types.fp16,
        (2.0**-20, 1),
        (0, 1),
    ),
    "a sigmoid": (lambda x: mb.sigmoid(x=x), types.fp16, (0, 1), (0, 1)),
    "a cast to fp16": (
        lambda x: mb.cast(x=within(x, -1e5, 1 + UP / 4, single), dtype="fp16"),
        types.fp32,
        (-1e5, 1 + UP / 4),
        (-np.inf, 1 + UP),
    ),
    "a mean whose sum overflows": (
        lambda x: mb.reduce_mean(x=within(x, 0, 32768), axes=[-1]),
        types.fp16,
        (0, 32768),
        (0, np.inf),
    ),
    "an epsilon that fp16 does not hold": (lambda x: norm(x, 1e-12, half), types.fp16, (-2, 2), ANY),
    "no epsilon": (lambda x: norm(x, 0, single), types.fp32, (-2, 2), ANY),
    "a negative epsilon": (lambda x: norm(x, -1e-5, single), types.fp32, ANY, ANY),
    "a length that vanishes": (
        lambda x: mb.reduce_l2_norm(x=within(x, 2.0**-10, 1), axes=[-1]),
        types.fp16,
        (2.0**-9, 2),
        (0, 2.017578125),
    ),
}


@pytest.mark.parametrize("name", STORED)
def test_what_is_stored_is_rounded_outwards(name: str) -> None:
    """In real numbers values lie in the first interval, as they are stored in the second."""
    body, dtype, real, stored = STORED[name]
    var = result(program(body, dtype))
    assert interval(var) == real
    assert stored_interval(var) == stored


NORMS: dict[str, tuple[Body, Any, float]] = {
    "root mean square": (lambda x: norm(x, 1e-5, single), types.fp32, 2),
    "root mean square of fp16": (lambda x: norm(x, 1e-5, half), types.fp16, 2),
    "an epsilon of one step": (lambda x: norm(x, 6e-8, half), types.fp16, 2 * 2**0.5),
    "layer norm": (lambda x: mb.layer_norm(x=x, axes=[-1], epsilon=half(1e-5)), types.fp16, 2),
    "instance norm": (lambda x: mb.instance_norm(x=x, epsilon=single(1e-5)), types.fp32, 4),
    "l2 norm": (lambda x: mb.l2_norm(x=x, epsilon=single(1e-6)), types.fp32, 1),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_with_an_epsilon_stay_near_their_real_bounds(name: str) -> None:
    body, dtype, most = NORMS[name]
    low, high = stored_interval(result(program(body, dtype)))
    assert low == -high
    assert most < high < most * (1 + 32 * UP)


def natural(x: Any, below: int | None = None) -> Any:
    """Ids from 0 on, perhaps with an end."""
    x = mb.maximum(x=x, y=np.int32(0))
    return x if below is None else mb.minimum(x=x, y=np.int32(below))


IDS: dict[str, tuple[Body, bool]] = {
    "an input": (lambda x: mb.identity(x=x), False),
    "a sum may start again": (lambda x: mb.add(x=natural(x), y=np.int32(1)), False),
    "a small sum": (lambda x: mb.add(x=natural(x, 9), y=np.int32(1)), True),
    "a guard": (lambda x: mb.select(cond=mb.greater_equal(x=x, y=np.int32(0)), a=x, b=np.int32(0)), True),
    "no guard": (lambda x: mb.select(cond=mb.less(x=x, y=np.int32(9)), a=x, b=np.int32(0)), False),
    "a remainder": (lambda x: mb.mod(x=natural(x), y=np.int32(-7)), True),
    "a negative dividend": (lambda x: mb.mod(x=x, y=np.int32(7)), False),
    "places": (lambda x: mb.reduce_argmax(x=x, axis=-1), True),
    "a narrowing cast": (lambda x: mb.cast(x=natural(x), dtype="int8"), False),
    "a cast that holds": (lambda x: mb.cast(x=natural(x, 100), dtype="int8"), True),
    "unsigned": (lambda x: mb.cast(x=x, dtype="uint8"), True),
    "bytes made wide": (lambda x: mb.cast(x=mb.cast(x=x, dtype="uint8"), dtype="int32"), True),
}


@pytest.mark.parametrize("scaled_late", [False, True])
def test_a_constant_that_lengthens_rows_lengthens_their_bound(scaled_late: bool) -> None:
    """Rows of one number each, repeated by a constant: behind a norm, or inside the norm as its epsilons."""

    def layer(x: Any) -> Any:
        if scaled_late:
            normal = mb.layer_norm(
                x=x, axes=[-1], gamma=np.ones(1, np.float32), beta=np.full(1, 30, np.float32)
            )
            normal = mb.mul(x=normal, y=np.ones((1, 64), np.float32))
        else:
            mean = mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[-1], keep_dims=True)
            normal = mb.mul(x=x, y=mb.rsqrt(x=mb.add(x=mean, y=np.full((1, 64), 1e-3, np.float32))))
        return mb.linear(x=normal, weight=np.full((64, 64), 40, np.float32))

    made = program(layer, shape=(4, 1))
    (y,) = run(made, {"x": np.full((4, 1), 9, np.float32)}).values()
    (linear,) = made.functions["main"].find_ops(op_type="linear")
    assert np.abs(y).max() <= product(linear)


@pytest.mark.parametrize("name", IDS)
def test_ids_that_are_never_negative(name: str) -> None:
    body, certain = IDS[name]
    assert never_negative(result(program(body, types.int32))) == certain


def test_a_bound_holds_behind_a_long_chain() -> None:
    @mb.program(input_specs=[mb.TensorSpec((4,))], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        for _ in range(40):
            x = mb.sub(x=mb.exp(x=x), y=mb.log(x=x))
        return mb.minimum(x=x, y=10.0)

    assert interval(result(program))[1] == 10


def test_a_topk_without_indices_has_a_range() -> None:
    @mb.program(input_specs=[mb.TensorSpec((4,))], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        return mb.topk(x=mb.clip(x=x, alpha=-1.0, beta=2.0), k=2, axis=0, return_indices=False)

    assert interval(result(program)) == (-1.0, 2.0)


PLACES: dict[str, tuple[Callable[[Var], Var], int]] = {
    "topk": (lambda x: mb.topk(x=x, k=2, axis=-1)[1], 6),
    "argsort": (lambda x: mb.argsort(x=x, axis=0), 2),
    "reduce_argmax": (lambda x: mb.reduce_argmax(x=x, axis=1), 6),
    "reduce_argmin": (lambda x: mb.reduce_argmin(x=x, axis=-2), 2),
    "non_zero": (lambda x: mb.non_zero(x=x), 6),
}


@pytest.mark.parametrize("name", PLACES)
def test_places_end_where_their_axis_does(name: str) -> None:
    """Of experts that a topk chose it was said that their numbers reach 65535, and wrap around in int16."""
    body, last = PLACES[name]

    @mb.program(input_specs=[mb.TensorSpec((3, 7))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        return body(x)

    assert interval(result(program)) == (0, last)


@pytest.mark.parametrize(
    ("windows", "low"),
    [
        (
            {"kernel_sizes": [1], "strides": [2], "ceil_mode": True},
            -np.inf,
        ),  # the last one lies beyond the data
        ({"kernel_sizes": [1], "strides": [1], "pad": [1, 0]}, -np.inf),  # the first one lies in the padding
        ({"kernel_sizes": [2], "strides": [1], "pad": [1, 1]}, LOW),
        ({"kernel_sizes": [2], "strides": [2], "ceil_mode": True}, LOW),
    ],
)
def test_the_largest_of_an_empty_window_is_minus_infinity(windows: dict[str, Any], low: float) -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 1, 4))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        return mb.max_pool(x=bounded(x), **{"pad": [0, 0], **windows, "pad_type": "custom"})

    (values,) = run(program, {"x": np.ones((1, 1, 4), np.float32)}).values()
    assert bool(np.isinf(values).any()) == np.isinf(low)
    assert interval(result(program)) == (low, HIGH)


def test_a_logarithm_of_what_an_epsilon_makes_positive() -> None:
    """The wrong version cuts at 0 first, and says that log(x + 0.01) is at least log(0.01)."""
    made = program(lambda x: mb.log(x=bounded(x, -0.0099, 0.1), epsilon=np.float32(0.01)))
    low, high = interval(result(made))
    (value,) = run(made, {"x": np.linspace(-1, 1, 32, dtype=np.float32).reshape(SHAPE)}).values()
    assert low <= value.min() < np.log(0.01) - 1
    assert np.log(0.11) <= high
