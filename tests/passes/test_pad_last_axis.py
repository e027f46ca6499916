"""The last axis of products is padded by their weights, carried by elementwise ops, cut once at the edge."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close
from conversion import convert
from coremltools.converters.mil.mil import get_new_symbol
from hypothesis import given, settings
from hypothesis import strategies as st

from anesurgery.errors import PassError
from anesurgery.facts.slices import slice_back
from anesurgery.interpret import run
from anesurgery.mil import Operation, Program, Var, consumers, ct, mb, types, walk_ops
from anesurgery.passes.embedding_matmul import EmbeddingMatmul
from anesurgery.passes.pad_last_axis import PadLastAxis
from anesurgery.rewriting.passes import Pipeline
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers, reasons
from anesurgery.text import to_text

STEP = PadLastAxis()
RTOL = STEP.tolerance.rtol
FP16 = types.fp16
ODD, EVEN = 37, 64


def weight(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray[Any, Any]:
    values = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return (values / np.sqrt(shape[-1])).astype(dtype)


def program_of(
    body: Callable[..., Any], *shapes: tuple[Any, ...], dtype: Any = types.fp32, target: Any = None
) -> Program:
    specs = [mb.TensorSpec(shape, dtype=dtype) for shape in shapes or ((2, 8),)]
    made: Program = mb.program(input_specs=specs, opset_version=target or ct.target.iOS16)(body)
    return made


def kinds(program: Program, *op_types: str) -> list[Operation]:
    return [op for op in walk_ops(program) if op.op_type in op_types]


def check(program: Program, edges: int | None = None, step: PadLastAxis = STEP, rtol: float = RTOL) -> Program:
    """Padded, checked, the same numbers, nothing left to do; `edges` values are cut, each once."""
    slices = len(kinds(program, "slice_by_index"))
    after, session = apply_pass(step, program)
    assert session.changes, reasons(session)
    assert all(c.proof is not None for c in session.changes), session.changes
    assert_same_numbers(program, after, rtol=rtol)
    assert not apply_pass(step, after)[1].changes, to_text(after)
    cuts = kinds(after, "slice_by_index")[:]
    assert len({id(op.x) for op in cuts}) == len(cuts), to_text(after)
    if edges is not None:
        assert len(cuts) - slices == edges, to_text(after)
    return after


def lengths(program: Program, *op_types: str) -> list[int]:
    return [op.outputs[0].shape[-1] for op in kinds(program, *op_types)]


def hidden(x: Var, length: int = ODD, seed: int = 0, **names: str) -> Var:
    made: Var = mb.linear(
        x=x, weight=weight(length, x.shape[-1], seed=seed), bias=weight(length, seed=seed), **names
    )
    return made


def taken(x: Var, length: int = EVEN) -> Var:
    made: Var = mb.linear(x=x, weight=weight(length, x.shape[-1], seed=9), bias=weight(length))
    return made


# Regions without a cut


def test_an_mlp_of_odd_width_needs_no_cut() -> None:
    after = check(program_of(lambda x: taken(mb.gelu(x=hidden(x), mode="EXACT"))), 0)
    assert lengths(after, "linear", "gelu") == [EVEN] * 3
    assert kinds(after, "linear")[1].weight.shape == (EVEN, EVEN)


@pytest.mark.parametrize("multiple", [1, 2, 16, 32, 37, 48, 64, 100])
def test_the_multiple_is_an_option(multiple: int) -> None:
    program = program_of(lambda x: taken(mb.relu(x=hidden(x)), 3200))
    step = PadLastAxis(multiple=multiple)
    if multiple == 1:
        assert not apply_pass(step, program)[1].changes
        return
    after = check(program, int(3200 % multiple > 0), step)
    assert lengths(after, "relu") == [-(-ODD // multiple) * multiple]


@pytest.mark.parametrize("multiple", [0, -64, 1.5, "64", None, True])
def test_the_multiple_must_be_a_positive_integer(multiple: Any) -> None:
    with pytest.raises(PassError, match=r"multiple=.* must be a positive integer"):
        PadLastAxis(multiple=multiple)


@pytest.mark.parametrize("up_first", [False, True])
def test_a_gated_mlp_in_either_order(up_first: bool) -> None:
    def body(x: Var) -> Any:
        up = hidden(x, seed=1) if up_first else None
        gate = mb.silu(x=hidden(x, seed=2))
        return taken(mb.mul(x=gate, y=up if up is not None else hidden(x, seed=1)))

    check(program_of(body), 0)


def test_a_partner_behind_other_carriers() -> None:
    def body(x: Var) -> Any:
        first, second = (hidden(x, seed=s) for s in (1, 2))
        other = mb.tanh(x=mb.mul(x=mb.sigmoid(x=second), y=np.float32(3)))
        return taken(mb.add(x=mb.relu(x=first), y=other))

    check(program_of(body), 0)


def test_a_residual_around_an_mlp_of_the_same_width() -> None:
    def body(x: Var) -> Any:
        h = hidden(x)
        inner = hidden(mb.gelu(x=hidden(h, ODD, 3), mode="EXACT"), ODD, 4)
        return taken(mb.add(x=h, y=inner))

    after = check(program_of(body), 0)
    assert {op.weight.shape for op in kinds(after, "linear")} == {(64, 8), (64, 64)}


def test_a_residual_around_two_products_and_nothing_else() -> None:
    """The second product reads what replaces a result of the region, not the old result."""

    def body(x: Var) -> Any:
        h = hidden(x)
        inner = hidden(taken(h), ODD, 4)
        return mb.softmax(x=mb.add(x=h, y=inner), axis=-1), mb.mul(x=h, y=hidden(h, 1, 5))

    check(program_of(body), 2)


def test_the_same_value_twice() -> None:
    check(program_of(lambda x: taken(mb.mul(x=(h := hidden(x)), y=h))), 0)


def test_a_square_product_takes_up_and_makes_padding() -> None:
    after = check(program_of(lambda x: taken(hidden(mb.relu(x=hidden(x)), ODD, 2))), 0)
    assert len(kinds(after, "linear")) == 3


def test_linear_without_a_bias_and_a_long_chain() -> None:
    def body(x: Var) -> Any:
        x = mb.linear(x=x, weight=weight(ODD, 8))
        for _ in range(1500):
            x = mb.relu(x=x)
        return taken(x)

    program = program_of(body)
    after, session = apply_pass(STEP, program, prove=False)
    assert len(session.changes) == 1
    assert lengths(after, "relu") == [EVEN] * 1500
    assert not kinds(after, "slice_by_index")


# matmul


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("shape", [(2, 8), (3, 2, 8), (1, 3, 2, 8)])
def test_matmul_and_its_flag(shape: tuple[int, ...], flag: bool) -> None:
    def body(x: Var) -> Any:
        first = weight(ODD, 8) if flag else weight(8, ODD)
        second = weight(EVEN, ODD) if flag else weight(ODD, EVEN)
        h = mb.sigmoid(x=mb.matmul(x=x, y=first, transpose_y=flag))
        return mb.matmul(x=h, y=second, transpose_y=flag)

    after = check(program_of(body, shape), 0)
    assert lengths(after, "matmul") == [EVEN, EVEN]


def test_matmul_of_a_batch_of_weights() -> None:
    def body(x: Var) -> Any:
        h = mb.relu(x=mb.matmul(x=x, y=weight(3, 8, ODD)))
        return mb.matmul(x=h, y=weight(3, ODD, EVEN))

    check(program_of(body, (3, 2, 8)), 0)


def test_a_transposed_x_is_an_edge() -> None:
    """The padded axis of h becomes rows of the result, which must not be seen."""

    def body(x: Var) -> Any:
        h = hidden(x)
        return mb.matmul(x=h, y=weight(2, EVEN), transpose_x=True)

    check(program_of(body), 1)


def test_a_transposed_x_inside_its_own_region() -> None:
    def body(x: Var) -> Any:
        h = hidden(x)
        turned = mb.matmul(x=h, y=weight(ODD, ODD), transpose_x=True)
        return mb.softmax(x=mb.add(x=h, y=turned), axis=-1)

    check(program_of(body, (ODD, 8)), 2)


def test_attention_of_one_head() -> None:
    """Scores sum over the padding of queries and keys; values carry it through the product with weights."""

    def body(x: Var) -> Any:
        q, k, v = (hidden(x, seed=s) for s in (1, 2, 3))
        scores = mb.matmul(x=mb.mul(x=q, y=np.float32(0.2)), y=k, transpose_y=True)
        return taken(mb.matmul(x=mb.softmax(x=scores, axis=-1), y=v))

    after = check(program_of(body, (1, 5, 8)), 0)
    assert lengths(after, "matmul") == [5, EVEN]


def test_scores_whose_keys_are_not_padded_are_an_edge() -> None:
    def body(x: Var, k: Var) -> Any:
        return mb.matmul(x=hidden(x), y=k, transpose_y=True)

    check(program_of(body, (5, 8), (6, ODD)), 1)


def test_scores_of_lanes_that_are_not_zero_are_an_edge() -> None:
    def body(x: Var) -> Any:
        q, k = (mb.exp(x=hidden(x, seed=s)) for s in (1, 2))
        return mb.matmul(x=q, y=k, transpose_y=True)

    check(program_of(body, (5, 8)), 2)


MIXED: dict[str, Callable[[Var], Var]] = {
    "bias of each channel": lambda h: conv(h, 4),
    "sums of ones": lambda h: mb.matmul(x=weight(3, 5), y=mb.exp(x=h)),
    "sums of the unknown": lambda h: mb.matmul(x=weight(3, 5), y=conv(h, 4)),
}


@pytest.mark.parametrize("name", MIXED)
def test_scores_of_lanes_that_are_not_known_are_an_edge(name: str) -> None:
    def body(x: Var) -> Any:
        q, k = (MIXED[name](hidden(x, seed=s)) for s in (1, 2))
        return mb.matmul(x=q, y=k, transpose_y=True)

    check(program_of(body, (2, 4, 5, 8)), 2)


def test_scores_of_transposed_queries_are_an_edge() -> None:
    def body(x: Var, y: Var) -> Any:
        return mb.matmul(x=hidden(x), y=hidden(y), transpose_x=True, transpose_y=True)

    check(program_of(body, (ODD, 8), (5, 8)), 2)


def test_run_time_products_alone_are_left() -> None:
    program = program_of(lambda x, y: mb.matmul(x=x, y=y), (5, 8), (8, ODD))
    after, session = apply_pass(STEP, program)
    assert not session.changes
    assert not session.refusals
    assert to_text(after) == to_text(program)


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


def test_each_edge_value_is_cut_once() -> None:
    def body(x: Var) -> Any:
        h = hidden(x)
        g, t = mb.gelu(x=h, mode="EXACT"), mb.tanh(x=h)
        ends = [mb.softmax(x=v, axis=-1) for v in (h, g, t, h, g)]
        return (*ends, taken(mb.add(x=g, y=t)))

    check(program_of(body), 3)


def test_a_value_of_the_run_time_of_the_same_length_is_an_edge() -> None:
    check(program_of(lambda x, y: mb.add(x=hidden(x), y=y), (2, 8), (2, ODD)), 1)


def test_a_vocabulary_is_cut_before_the_output() -> None:
    def body(x: Var) -> Any:
        return mb.linear(x=x, weight=weight(50257, 4), name="logits")

    after = check(program_of(body, (1, 4)), 1)
    assert lengths(after, "linear", "slice_by_index") == [50304, 50257]
    assert list(run(after, {"x": np.ones((1, 4), np.float32)})) == ["logits"]


# Operands that broadcast


@pytest.mark.parametrize(
    "shape", [(), (1,), (1, 1), (ODD,), (1, ODD), (2, 1), (2, ODD), (3, 1, ODD), (3, 2, 1)]
)
@pytest.mark.parametrize("op", ["add", "sub", "mul", "real_div", "maximum", "minimum"])
def test_constants_that_broadcast(op: str, shape: tuple[int, ...]) -> None:
    value: Any = np.asarray(weight(*shape, 1)[..., 0] + np.float32(3), np.float32)

    def body(x: Var) -> Any:
        return taken(getattr(mb, op)(x=mb.sigmoid(x=hidden(x)), y=value))

    check(program_of(body), 0)


@pytest.mark.parametrize("shape", [(2, 1), (1, 1), (3, 1, 1), (1,)])
@pytest.mark.parametrize("op", ["add", "mul"])
def test_values_of_the_run_time_that_broadcast(op: str, shape: tuple[int, ...]) -> None:
    def body(x: Var, y: Var) -> Any:
        return taken(mb.tanh(x=getattr(mb, op)(x=y, y=hidden(x))))

    check(program_of(body, (2, 8), shape), 0)


def test_a_factor_that_a_reduction_of_the_region_made() -> None:
    def body(x: Var) -> Any:
        h = hidden(x)
        return taken(mb.sub(x=h, y=mb.reduce_max(x=h, axes=[-1], keep_dims=True)))

    check(program_of(body), 1)


def test_a_number_divided_by_lanes_that_are_not_zero() -> None:
    def body(x: Var) -> Any:
        return taken(mb.real_div(x=np.float32(1), y=mb.exp(x=hidden(x))))

    check(program_of(body), 0)


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


@pytest.mark.parametrize("name", UNSOUND)
def test_no_infinity_or_nan_meets_a_zero_weight(name: str) -> None:
    def body(x: Var) -> Any:
        return taken(UNSOUND[name](hidden(x, seed=1), hidden(x, seed=2)))

    after = check(program_of(body))
    last = kinds(after, "linear")[-1]
    assert last.x.shape[-1] == ODD
    assert last.weight.shape == (EVEN, ODD)


def test_an_operand_padded_for_an_op_that_is_refused_is_cut() -> None:
    def body(x: Var) -> Any:
        a, b = hidden(x, seed=1), hidden(x, seed=2)
        return mb.real_div(x=a, y=b), taken(mb.relu(x=b))

    check(program_of(body), 2)


def test_lanes_are_tracked_as_numbers() -> None:
    """exp(0) = 1 is taken up by zeros; sqrt(exp(0) - 1) = 0 too; pow(0, 2) too."""

    def body(x: Var) -> Any:
        e = mb.exp(x=hidden(x))
        r = mb.sqrt(x=mb.relu(x=mb.sub(x=e, y=np.float32(1))))
        return taken(mb.add(x=mb.pow(x=r, y=np.float32(2)), y=mb.square(x=e)))

    check(program_of(body), 0)


# Convolutions


def conv(x: Var, out: int, **more: Any) -> Var:
    shape = (out, x.shape[1], *[1] * (x.rank - 2))
    made: Var = mb.conv(x=x, weight=weight(*shape), bias=weight(out), **more)
    return made


@pytest.mark.parametrize("shape", [(1, 4, ODD), (1, 4, 1, ODD), (1, 4, 2, 2, ODD)])
def test_a_chain_of_pointwise_convolutions(shape: tuple[int, ...]) -> None:
    after = check(program_of(lambda x: conv(mb.relu(x=conv(x, 8)), 4), shape), 1)
    assert lengths(after, "pad", "conv", "relu") == [EVEN] * 4
    assert [op.op_type for op in kinds(after, "pad", "conv", "slice_by_index")] == (
        ["pad", "conv", "conv", "slice_by_index"]
    )


def test_a_residual_of_convolutions() -> None:
    def body(x: Var) -> Any:
        x = mb.sigmoid(x=x)
        return mb.add(x=x, y=conv(mb.gelu(x=conv(x, 8), mode="EXACT"), 4))

    after = check(program_of(body, (1, 4, 1, ODD)), 1)
    assert len(kinds(after, "pad")) == 1


def test_convolutions_behind_a_product_carry_its_padding() -> None:
    def body(x: Var) -> Any:
        return taken(conv(mb.relu(x=conv(hidden(x), 8)), 4))

    after = check(program_of(body, (1, 4, 8)), 0)
    assert not kinds(after, "pad")


@pytest.mark.parametrize("ends", [1, 3])
def test_refuses_convolutions_that_do_not_pay(ends: int) -> None:
    program = program_of(
        lambda x: tuple(mb.softmax(x=conv(x, 4 + i), axis=1) for i in range(ends)), (1, 4, 1, ODD)
    )
    assert_refuses(STEP, program, f"1 pad and {ends} cuts for {ends} convolutions")


@pytest.mark.parametrize(
    "form",
    [
        {"strides": [1, 2]},
        {"pad_type": "custom", "pad": [0, 0, 1, 1]},
        {"weight": weight(4, 4, 1, 3), "pad_type": "same"},
        {"weight": weight(4, 4, 1, 3)},
    ],
    ids=["strided", "padded", "same", "wide"],
)
def test_other_convolutions_are_none_of_its_business(form: dict[str, Any]) -> None:
    def body(x: Var) -> Any:
        return mb.conv(
            **{
                "x": mb.conv(**{"x": x, "weight": weight(4, 4, 1, 1), **form}),
                "weight": weight(4, 4, 1, 1),
                **form,
            }
        )

    program = program_of(body, (1, 4, 3, ODD))
    _, session = apply_pass(STEP, program)
    assert not session.changes
    assert not session.refusals


# Refusals


def test_refuses_a_last_axis_of_one() -> None:
    program = program_of(lambda x: mb.linear(x=x, weight=weight(1, 8)))
    assert_refuses(STEP, program, "has length 1; padding makes it 64 times as long")


def test_refuses_a_symbolic_shape() -> None:
    program = program_of(lambda x: hidden(x), (get_new_symbol(), 8))
    assert_refuses(STEP, program, "the result has the symbolic shape (")


@pytest.mark.parametrize("op", ["linear", "matmul"])
def test_a_compressed_weight_is_padded_in_its_form(op: str) -> None:
    def body(x: Var) -> Any:
        table = mb.constexpr_affine_dequantize(
            quantized_data=np.arange(ODD * 8, dtype=np.int8).reshape(ODD, 8) % 5,
            zero_point=np.int8(2),
            scale=np.float32(0.1),
            axis=0,
        )
        made = mb.linear(x=x, weight=table) if op == "linear" else mb.matmul(x=x, y=table, transpose_y=True)
        return mb.softmax(x=made, axis=-1)

    (made,) = kinds(check(program_of(body), 1), "constexpr_affine_dequantize")
    assert made.quantized_data.val.shape == (EVEN, 8)
    assert (made.quantized_data.val[ODD:] == 2).all()


def test_a_compressed_weight_takes_up() -> None:
    def body(x: Var) -> Any:
        table = mb.constexpr_affine_dequantize(
            quantized_data=np.ones((EVEN, ODD), np.int8), zero_point=np.int8(0), scale=np.float32(0.1), axis=0
        )
        return mb.linear(x=hidden(x), weight=table)

    check(program_of(body), 0)


def test_a_full_palette_without_zero_is_refused() -> None:
    def body(x: Var) -> Any:
        table = mb.constexpr_lut_to_dense(
            indices=np.resize(np.arange(256, dtype=np.uint8), ODD * 8),
            lut=np.linspace(1, 2, 256).astype(np.float32),
            shape=np.array([ODD, 8], np.uint32),
        )
        return mb.softmax(x=mb.linear(x=x, weight=table), axis=-1)

    assert_refuses(STEP, program_of(body), "has 256 entries, and none is 0")


@pytest.mark.parametrize("length", [32, 64, 128])
def test_multiples_are_left(length: int) -> None:
    program = program_of(lambda x: mb.relu(x=hidden(x, length)))
    _, session = apply_pass(PadLastAxis(multiple=32), program)
    assert not session.changes
    assert not session.refusals


# Sharing


def test_a_tied_weight_is_padded_once() -> None:
    table = weight(101, 8)

    def body(x: Var, y: Var) -> Any:
        held = mb.const(val=table, name="table")
        return mb.linear(x=x, weight=held), mb.softmax(x=mb.linear(x=y, weight=held), axis=-1)

    after = check(program_of(body, (1, 8), (3, 8)), 2)
    first, second = kinds(after, "linear")
    assert first.weight is second.weight
    assert first.weight.shape == (128, 8)


def test_the_embedding_and_the_head_share_one_padded_table() -> None:
    table = weight(2500, 64)

    def body(ids: Var) -> Any:
        held = mb.const(val=table, name="table")
        return mb.linear(x=mb.gather(x=held, indices=ids, axis=0), weight=held, name="logits")

    program: Program = mb.program(
        input_specs=[mb.TensorSpec((1, 5), dtype=types.int32)], opset_version=ct.target.iOS17
    )(body)
    after, session = apply_pass(Pipeline(steps=(EmbeddingMatmul(pad_tied=True), STEP)), program)
    assert {c.pass_name for c in session.changes} == {"embedding_matmul", "pad_last_axis"}
    big = [op for op in kinds(after, "const") if np.size(op.val.val) > 5000]
    assert [op.outputs[0].shape for op in big] == [(2560, 64)]
    ids: dict[str, Any] = {"ids": np.array([[0, 3, 2499, 2048, 7]], np.int32)}
    assert_same_numbers(program, after, ids, rtol=RTOL)


def test_constants_that_others_read_stay_for_them() -> None:
    row = weight(ODD)

    def body(x: Var, y: Var) -> Any:
        held = mb.const(val=row, name="row")
        return taken(mb.add(x=hidden(x), y=held)), mb.mul(x=y, y=held)

    check(program_of(body, (2, 8), (2, ODD)), 0)


# Blocks


def test_nested_blocks_have_regions_of_their_own() -> None:
    @mb.program(input_specs=[mb.TensorSpec((2, 8)), mb.TensorSpec((1,), dtype=types.bool)])
    def program(x: Var, flag: Var) -> Any:
        h = hidden(x)
        return mb.cond(
            pred=mb.squeeze(x=flag),
            _true_fn=lambda: mb.add(x=mb.relu(x=hidden(x, seed=1)), y=h),
            _false_fn=lambda: mb.relu(x=mb.mul(x=h, y=hidden(x, seed=2))),
        )

    check(program, 3)


def test_the_body_of_a_loop() -> None:
    @mb.program(input_specs=[mb.TensorSpec((2, 8))])
    def program(x: Var) -> Any:
        return mb.while_loop(
            _cond=lambda i, h: mb.greater(x=i, y=np.int32(0)),
            _body=lambda i, h: (mb.sub(x=i, y=np.int32(1)), taken(mb.tanh(x=hidden(h)), 8)),
            loop_vars=(np.int32(3), x),
        )[1]

    step = PadLastAxis(multiple=8)
    check(program, 0, step)


def test_a_convolution_in_a_branch_reads_a_value_from_outside() -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 4, 1, ODD)), mb.TensorSpec((1,), dtype=types.bool)])
    def program(x: Var, flag: Var) -> Any:
        h = mb.relu(x=x)
        return mb.cond(
            pred=mb.squeeze(x=flag),
            _true_fn=lambda: conv(mb.relu(x=conv(h, 8)), 4),
            _false_fn=lambda: conv(mb.relu(x=conv(x, 8)), 4),
        )

    check(program, 2)


def test_a_partner_outside_the_block_stays_as_it_is() -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 4, 1, ODD)), mb.TensorSpec((1,), dtype=types.bool)])
    def program(x: Var, flag: Var) -> Any:
        outside = conv(x, 4)
        return mb.cond(
            pred=mb.squeeze(x=flag),
            _true_fn=lambda: mb.add(x=conv(mb.relu(x=conv(x, 8)), 4), y=outside),
            _false_fn=lambda: mb.relu(x=outside),
        )

    check(program, 1)


# fp16, versions, the default pipeline


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_fp16_weights_stay_fp16(precision: str) -> None:
    def body(x: Var) -> Any:
        h = mb.linear(x=x, weight=weight(ODD, 8, dtype=np.float16), bias=weight(ODD, dtype=np.float16))
        h = mb.mul(x=mb.gelu(x=h, mode="EXACT"), y=weight(ODD, dtype=np.float16))
        return mb.linear(x=h, weight=weight(EVEN, ODD, dtype=np.float16)), mb.softmax(x=h, axis=-1)

    program = program_of(body, dtype=FP16)
    after = check(program, 1)
    assert_same_numbers(program, after, rtol=1e-3, precision=precision)
    assert {op.weight.dtype for op in kinds(after, "linear")} == {FP16}


@pytest.mark.parametrize("version", [15, 16, 17, 18])
def test_stays_after_the_default_pipeline(version: int, settled: Callable[[Program], Program]) -> None:
    def body(x: Var) -> Any:
        h = mb.matmul(x=mb.add(x=x, y=np.float32(1)), y=weight(8, ODD))
        h = mb.add(x=h, y=weight(ODD))
        g = mb.gelu(x=h, mode="EXACT")
        y = mb.add(x=g, y=mb.mul(x=mb.matmul(x=x, y=weight(8, ODD, seed=3)), y=np.float32(2)))
        return mb.softmax(x=g, axis=-1), taken(y), mb.transpose(x=y, perm=[1, 0])

    program = program_of(body, target=getattr(ct.target, f"iOS{version}"))
    after = check(program, 2)
    later = settled(after)
    assert_same_numbers(program, later, rtol=RTOL)
    assert not apply_pass(STEP, later)[1].changes, to_text(later)
    assert len(kinds(later, "slice_by_index")) == 2


# Any program


CARRIERS: dict[str, Callable[[Var], Var]] = {
    "relu": lambda v: mb.relu(x=v),
    "tanh": lambda v: mb.tanh(x=v),
    "gelu": lambda v: mb.gelu(x=v, mode="TANH_APPROXIMATION"),
    "exp": lambda v: mb.exp(x=mb.tanh(x=v)),
    "square": lambda v: mb.square(x=mb.sigmoid(x=v)),
    "clip": lambda v: mb.clip(x=v, alpha=-1.0, beta=2.0),
    "half": lambda v: mb.mul(x=v, y=np.float32(0.5)),
    "row": lambda v: mb.add(x=v, y=weight(v.shape[-1])),
    "from one": lambda v: mb.sub(x=np.float32(1), y=v),
    "cube": lambda v: mb.pow(x=mb.tanh(x=v), y=np.float32(3)),
    "divided": lambda v: mb.real_div(x=mb.tanh(x=v), y=mb.add(x=mb.exp(x=mb.tanh(x=v)), y=np.float32(1))),
    "mean": lambda v: mb.add(x=v, y=mb.reduce_mean(x=v, axes=[-1], keep_dims=True)),
    "softmax": lambda v: mb.softmax(x=v, axis=-1),
    "log": lambda v: mb.log(x=mb.add(x=mb.abs(x=v), y=np.float32(1))),
    "norm": lambda v: mb.layer_norm(x=v, axes=[-1], epsilon=1e-3),
}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_graph_of_products_and_elementwise_ops(data: st.DataObject) -> None:
    multiple = data.draw(st.sampled_from([4, 8, 32]))
    widths = data.draw(st.lists(st.integers(2, 19), min_size=1, max_size=2))
    lead = data.draw(st.sampled_from([(2,), (1, 3)]))
    steps = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from([*CARRIERS, *["linear", "matmul", "add", "mul", "scores"] * 3]),
                st.integers(0, 30),
                st.integers(0, 30),
                st.sampled_from(widths),
            ),
            min_size=2,
            max_size=14,
        )
    )
    outputs = data.draw(st.sets(st.integers(0, 30), min_size=1, max_size=3))

    def body(x: Var) -> Any:
        pool = [hidden(x, widths[0])]
        for n, (kind, i, j, width) in enumerate(steps):
            a, b = pool[i % len(pool)], pool[j % len(pool)]
            if kind in CARRIERS:
                pool.append(CARRIERS[kind](a))
            elif kind == "linear":
                pool.append(hidden(a, width, n))
            elif kind == "matmul":
                y = weight(width, a.shape[-1], seed=n)
                pool.append(mb.matmul(x=a, y=y, transpose_y=True))
            elif a.shape != b.shape:
                pool.append(mb.mul(x=a, y=mb.reduce_mean(x=b, axes=[-1], keep_dims=True)))
            elif kind == "scores":
                pool.append(mb.tanh(x=mb.matmul(x=mb.matmul(x=a, y=b, transpose_y=True), y=b)))
            else:
                pool.append(getattr(mb, kind)(x=a, y=mb.tanh(x=b)))
        return tuple(mb.identity(x=pool[k]) for k in {o % len(pool) for o in outputs})

    program = program_of(body, (*lead, 8))
    step = PadLastAxis(multiple=multiple)
    after, session = apply_pass(step, program)
    assert_same_numbers(program, after, rtol=RTOL)
    assert not apply_pass(step, after)[1].changes, to_text(after)
    assert all(c.proof is not None for c in session.changes)
    cuts = kinds(after, "slice_by_index")
    assert len({id(op.x) for op in cuts}) == len(cuts), to_text(after)
    for op in slice_back(after.functions["main"].outputs, set()):
        if op.op_type == "linear" or (op.op_type == "matmul" and op.y.op.op_type == "const"):
            assert op.outputs[0].shape[-1] % multiple == 0, to_text(after)


# Converted models


class Mlp(torch.nn.Module):
    """Odd widths, a gate, a residual, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.gate = torch.nn.Linear(12, 45), torch.nn.Linear(45, 77)
        self.up, self.down = torch.nn.Linear(45, 77), torch.nn.Linear(77, 45)
        self.norm, self.head = torch.nn.LayerNorm(45), torch.nn.Linear(45, 101)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.gelu(self.start(x))
        x = x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))
        return self.head(self.norm(x))


class Gpt(torch.nn.Module):
    """One block of nanoGPT with an odd vocabulary and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(101, 24), torch.nn.Embedding(6, 24)
        self.norm, self.qkv = torch.nn.LayerNorm(24), torch.nn.Linear(24, 72)
        self.fc, self.proj = torch.nn.Linear(24, 96), torch.nn.Linear(96, 24)
        self.register_buffer("mask", torch.tril(torch.ones(6, 6)) == 0)
        self.register_buffer("positions", torch.arange(6))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(self.positions)
        q, k, v = (t.view(1, 6, 2, 12).transpose(1, 2) for t in self.qkv(self.norm(x)).split(24, 2))
        scores = (q @ k.transpose(2, 3) / 12**0.5).masked_fill(self.mask, -1e4)
        x = x + (torch.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(1, 6, 24)
        x = x + self.proj(torch.nn.functional.gelu(self.fc(self.norm(x))))
        return torch.nn.functional.linear(self.norm(x), self.wte.weight)


@cache
def converted(model: str, how: str, ios: int, precision: str) -> tuple[Program, Any, Any]:
    torch.manual_seed(0)
    module = (Mlp() if model == "mlp" else Gpt()).eval()
    example = torch.randn(2, 12) if model == "mlp" else torch.tensor([[0, 100, 64, 7, 99, 1]])
    program = convert(module, {"x": example}, how, f"iOS{ios}", precision)._mil_program
    (name,) = program.functions["main"].inputs
    values = example.numpy().astype(np.int32 if model == "gpt" else np.float32)
    return program, {name: values}, module(example).detach().numpy()


SPELLINGS = [
    (how, ios, precision)
    for how in ("trace", "export")
    for ios, precision in ((15, "FLOAT32"), (16, "FLOAT16"), (17, "FLOAT16"), (18, "FLOAT32"))
]


@pytest.mark.parametrize("model", ["mlp", "gpt"])
@pytest.mark.parametrize(("how", "ios", "precision"), SPELLINGS)
def test_converted_models(model: str, how: str, ios: int, precision: str) -> None:
    program, inputs, expected = converted(model, how, ios, precision)
    after, _ = apply_pass(STEP, program)
    assert_same_numbers(program, after, inputs, rtol=RTOL)
    assert_same_numbers(program, after, inputs, rtol=2e-3, precision="fp16")
    (found,) = run(after, inputs).values()
    half = precision == "FLOAT16"
    assert_close(found, expected, rtol=3e-3 if half else 1e-5)
    assert not apply_pass(STEP, after)[1].changes
    assert all(n % 64 == 0 for n in lengths(after, "linear")), to_text(after)
    added = len(kinds(after, "slice_by_index")) - len(kinds(program, "slice_by_index"))
    # mlp: before the norm and before the output; gpt: qkv, into the residual sum, the vocabulary.
    assert added == (2 if model == "mlp" else 3), to_text(after)
    head = kinds(after, "linear")[-1]
    assert head.outputs[0].shape[-1] == 128


def test_a_converted_model_stays_after_the_default_pipeline(settled: Callable[[Program], Program]) -> None:
    program, inputs, _ = converted("mlp", "trace", 17, "FLOAT16")
    after, _ = apply_pass(STEP, program)
    later = settled(after)
    assert_same_numbers(program, later, inputs, rtol=RTOL)
    assert not apply_pass(STEP, later)[1].changes
    assert len(kinds(later, "slice_by_index")) == 2
