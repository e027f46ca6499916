"""Padded convolutions; what is refused, what is shared, and regions in nested blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from padded_axes import EVEN, ODD, RTOL, STEP, check, conv, hidden, kinds, lengths, program_of, taken, weight
from pass_cases import refuses, rewrites, table

from anesurgery.mil import Program, Var, ct, mb, new_symbol, types
from anesurgery.passes.embedding_matmul import EmbeddingMatmul
from anesurgery.passes.pad_last_axis import PadLastAxis
from anesurgery.rewriting.passes import Pipeline
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers


@pytest.mark.parametrize("shape", [(1, 4, ODD), (1, 4, 1, ODD), (1, 4, 2, 2, ODD)])
def test_a_chain_of_pointwise_convolutions(shape: tuple[int, ...]) -> None:
    after = check(program_of(lambda x: conv(mb.relu(x=conv(x, 8)), 4), shape), 1)
    assert lengths(after, "pad", "conv", "relu") == [EVEN] * 4
    assert [op.op_type for op in kinds(after, "pad", "conv", "slice_by_index")] == (
        ["pad", "conv", "conv", "slice_by_index"]
    )


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
def test_does_not_apply_to_other_convolutions(form: dict[str, Any]) -> None:
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


def a_full_palette_without_zero_is_refused(x: Var) -> Any:
    table = mb.constexpr_lut_to_dense(
        indices=np.resize(np.arange(256, dtype=np.uint8), ODD * 8),
        lut=np.linspace(1, 2, 256).astype(np.float32),
        shape=np.array([ODD, 8], np.uint32),
    )
    return mb.softmax(x=mb.linear(x=x, weight=table), axis=-1)


def a_residual_of_convolutions(x: Var) -> Any:
    x = mb.sigmoid(x=x)
    return mb.add(x=x, y=conv(mb.gelu(x=conv(x, 8), mode="EXACT"), 4))


def convolutions_after_a_product_carry_its_padding(x: Var) -> Any:
    return taken(conv(mb.relu(x=conv(hidden(x), 8)), 4))


def a_compressed_weight_takes_up(x: Var) -> Any:
    table = mb.constexpr_affine_dequantize(
        quantized_data=np.ones((EVEN, ODD), np.int8), zero_point=np.int8(0), scale=np.float32(0.1), axis=0
    )
    return mb.linear(x=hidden(x), weight=table)


def nested_blocks_have_regions_of_their_own() -> Program:
    @mb.program(input_specs=[mb.TensorSpec((2, 8)), mb.TensorSpec((1,), dtype=types.bool)])
    def program(x: Var, flag: Var) -> Any:
        h = hidden(x)
        return mb.cond(
            pred=mb.squeeze(x=flag),
            _true_fn=lambda: mb.add(x=mb.relu(x=hidden(x, seed=1)), y=h),
            _false_fn=lambda: mb.relu(x=mb.mul(x=h, y=hidden(x, seed=2))),
        )

    return program


def the_body_of_a_loop() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 8))])(
        lambda x: mb.while_loop(
            _cond=lambda i, h: mb.greater(x=i, y=np.int32(0)),
            _body=lambda i, h: (mb.sub(x=i, y=np.int32(1)), taken(mb.tanh(x=hidden(h)), 8)),
            loop_vars=(np.int32(3), x),
        )[1]
    )


def a_partner_outside_the_block_stays_as_it_is() -> Program:
    @mb.program(input_specs=[mb.TensorSpec((1, 4, 1, ODD)), mb.TensorSpec((1,), dtype=types.bool)])
    def program(x: Var, flag: Var) -> Any:
        outside = conv(x, 4)
        return mb.cond(
            pred=mb.squeeze(x=flag),
            _true_fn=lambda: mb.add(x=conv(mb.relu(x=conv(x, 8)), 4), y=outside),
            _false_fn=lambda: mb.relu(x=outside),
        )

    return program


test_cases, test_surroundings = table(
    STEP,
    refuses(
        "has length 1; padding makes it 64 times as long",
        program_of,
        lambda x: mb.linear(x=x, weight=weight(1, 8)),
    ),
    refuses("the result has the symbolic shape (", program_of, lambda x: hidden(x), (new_symbol(), 8)),
    refuses("has 256 entries, and none is 0", program_of, a_full_palette_without_zero_is_refused),
    rewrites(program_of, a_residual_of_convolutions, (1, 4, 1, ODD), rtol=RTOL),
    rewrites(program_of, convolutions_after_a_product_carry_its_padding, (1, 4, 8), rtol=RTOL),
    rewrites(program_of, a_compressed_weight_takes_up, rtol=RTOL),
    rewrites(nested_blocks_have_regions_of_their_own, rtol=RTOL),
    rewrites(the_body_of_a_loop, rtol=RTOL, step=PadLastAxis(multiple=8)),
    rewrites(a_partner_outside_the_block_stays_as_it_is, rtol=RTOL),
)
