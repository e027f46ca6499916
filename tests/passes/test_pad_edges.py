"""Where padding ends: what is cut, what broadcasts against padded lanes, and what lanes may hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from padded_axes import EVEN, ODD, RTOL, STEP, check, hidden, kinds, lengths, program_of, taken, weight
from pass_cases import rewrites, table

from anesurgery.interpret import run
from anesurgery.mil import Var, consumers, mb

# Edges


EDGES: dict[str, Callable[[Var], Var]] = {
    "softmax": lambda h: mb.softmax(x=h, axis=-1),
    "softmax_over_rows": lambda h: mb.softmax(x=h, axis=0),
    "layer_norm": lambda h: mb.layer_norm(x=h, axes=[-1], epsilon=1e-5),
    "reduce_sum": lambda h: mb.reduce_sum(x=h, axes=[-1]),
    "reduce_max": lambda h: mb.reduce_max(x=h, axes=[0]),
    "reduce_argmax": lambda h: mb.reduce_argmax(x=h, axis=-1),
    "reshape": lambda h: mb.reshape(x=h, shape=[ODD, 2]),
    "transpose": lambda h: mb.transpose(x=h, perm=[1, 0]),
    "concat": lambda h: mb.concat(values=[h, h], axis=-1),
    "expand_dims": lambda h: mb.expand_dims(x=h, axes=[-1]),
    "log": lambda h: mb.log(x=mb.abs(x=h)),
    "inverse": lambda h: mb.inverse(x=mb.abs(x=h)),
    "rsqrt": lambda h: mb.rsqrt(x=mb.abs(x=h)),
    "greater": lambda h: mb.cast(x=mb.greater(x=h, y=np.float32(0)), dtype="fp32"),
    "to_integers": lambda h: mb.cast(x=h, dtype="int32"),
    "topk": lambda h: mb.topk(x=h, k=3, axis=-1)[0],
    "slice": lambda h: mb.slice_by_index(x=h, begin=[0, 30], end=[2, 37]),
}


@pytest.mark.one_of(12)
@pytest.mark.parametrize("name", EDGES)
def test_these_never_see_the_padding(name: str) -> None:
    program = program_of(lambda x: (EDGES[name](h := hidden(x)), taken(mb.relu(x=h))))
    before, after = ([op.outputs[0].shape for op in kinds(p, name)] for p in (program, check(program)))
    assert before == after
    for op in kinds(check(program, 1), name):
        assert EVEN not in op.x.shape if op.op_type != "concat" else True


def test_an_output_and_two_readers_share_one_cut() -> None:
    def body(x: Var) -> Any:
        h = hidden(x, name="h")
        return h, mb.softmax(x=h, axis=-1), mb.reduce_mean(x=h, axes=[-1]), taken(h)

    after = check(program_of(body), 1)
    (cut,) = kinds(after, "slice_by_index")
    assert cut.outputs[0].name == "h"
    assert len(consumers(cut.outputs[0])) == 2
    assert after.functions["main"].outputs[0] is cut.outputs[0]


def test_a_vocabulary_is_cut_before_the_output() -> None:
    def body(x: Var) -> Any:
        return mb.linear(x=x, weight=weight(50257, 4), name="logits")

    after = check(program_of(body, (1, 4)), 1)
    assert lengths(after, "linear", "slice_by_index") == [50304, 50257]
    assert list(run(after, {"x": np.ones((1, 4), np.float32)})) == ["logits"]


# Operands that broadcast


@pytest.mark.one_of(15)
@pytest.mark.parametrize(
    "shape", [(), (1,), (1, 1), (ODD,), (1, ODD), (2, 1), (2, ODD), (3, 1, ODD), (3, 2, 1)]
)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "real_div", "maximum", "minimum"])
def test_constants_that_broadcast(op: str, shape: tuple[int, ...]) -> None:
    value: Any = np.asarray(weight(*shape, 1)[..., 0] + np.float32(3), np.float32)

    def body(x: Var) -> Any:
        return taken(getattr(mb, op)(x=mb.sigmoid(x=hidden(x)), y=value))

    check(program_of(body), 0)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("shape", [(2, 1), (1, 1), (3, 1, 1), (1,)])
@pytest.mark.parametrize("op", ["add", "mul"])
def test_dynamic_values_that_broadcast(op: str, shape: tuple[int, ...]) -> None:
    def body(x: Var, y: Var) -> Any:
        return taken(mb.tanh(x=getattr(mb, op)(x=y, y=hidden(x))))

    check(program_of(body, (2, 8), shape), 0)


# What must not go on


UNSOUND: dict[str, Callable[[Var, Var], Var]] = {
    "zero by zero": lambda h, g: mb.real_div(x=h, y=g),
    "one by zero": lambda h, g: mb.real_div(x=np.float32(1), y=h),
    "zero by a value": lambda h, g: mb.real_div(x=h, y=mb.reduce_sum(x=g, axes=[-1], keep_dims=True)),
    "zero to a negative power": lambda h, g: mb.pow(x=mb.abs(x=h), y=np.float32(-1)),
    "zero to a broken power": lambda h, g: mb.pow(x=mb.abs(x=h), y=np.float32(0.5)),
    "too large": lambda h, g: mb.exp(x=mb.add(x=mb.mul(x=h, y=np.float32(0.01)), y=np.float32(20))),
    "too small": lambda h, g: mb.real_div(x=h, y=mb.exp(x=mb.sub(x=g, y=np.float32(15)))),
    "root of less than zero": lambda h, g: mb.sqrt(x=mb.sub(x=mb.exp(x=mb.exp(x=h)), y=np.float32(3))),
    "by little": lambda h, g: mb.real_div(x=h, y=mb.mul(x=mb.exp(x=g), y=np.float32(1e-3))),
    "a row times infinity": lambda h, g: mb.mul(x=h, y=np.array([[np.inf], [1]], np.float32)),
    "times infinity": lambda h, g: mb.mul(x=h, y=np.float32(np.inf)),
    "exponent of the unknown": lambda h, g: mb.exp(
        x=mb.add(x=h, y=mb.reduce_sum(x=g, axes=[-1], keep_dims=True))
    ),
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", UNSOUND)
def test_no_infinity_or_nan_meets_a_zero_weight(name: str) -> None:
    def body(x: Var) -> Any:
        return taken(UNSOUND[name](hidden(x, seed=1), hidden(x, seed=2)))

    after = check(program_of(body))
    last = kinds(after, "linear")[-1]
    assert last.x.shape[-1] == ODD
    assert last.weight.shape == (EVEN, ODD)


def each_edge_value_is_cut_once(x: Var) -> Any:
    h = hidden(x)
    g, t = mb.gelu(x=h, mode="EXACT"), mb.tanh(x=h)
    ends = [mb.softmax(x=v, axis=-1) for v in (h, g, t, h, g)]
    return (*ends, taken(mb.add(x=g, y=t)))


def a_factor_that_a_reduction_of_the_region_made(x: Var) -> Any:
    h = hidden(x)
    return taken(mb.sub(x=h, y=mb.reduce_max(x=h, axes=[-1], keep_dims=True)))


def a_number_divided_by_lanes_that_are_not_zero(x: Var) -> Any:
    return taken(mb.real_div(x=np.float32(1), y=mb.exp(x=hidden(x))))


def an_operand_padded_for_an_op_that_is_refused_is_cut(x: Var) -> Any:
    a, b = hidden(x, seed=1), hidden(x, seed=2)
    return mb.real_div(x=a, y=b), taken(mb.relu(x=b))


def lanes_are_tracked_as_numbers(x: Var) -> Any:
    e = mb.exp(x=hidden(x))
    r = mb.sqrt(x=mb.relu(x=mb.sub(x=e, y=np.float32(1))))
    return taken(mb.add(x=mb.pow(x=r, y=np.float32(2)), y=mb.square(x=e)))


test_cases, test_surroundings = table(
    STEP,
    rewrites(program_of, each_edge_value_is_cut_once, rtol=RTOL),
    rewrites(program_of, lambda x, y: mb.add(x=hidden(x), y=y), (2, 8), (2, ODD), rtol=RTOL),
    rewrites(program_of, a_factor_that_a_reduction_of_the_region_made, rtol=RTOL),
    rewrites(program_of, a_number_divided_by_lanes_that_are_not_zero, rtol=RTOL),
    rewrites(program_of, an_operand_padded_for_an_op_that_is_refused_is_cut, rtol=RTOL),
    # exp(0) = 1 is taken up by zeros; sqrt(exp(0) - 1) = 0 too; pow(0, 2) too.
    rewrites(program_of, lanes_are_tracked_as_numbers, rtol=RTOL),
)
