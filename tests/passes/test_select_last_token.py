"""One row through the final norm and the head gives what the whole product gave in that row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from closeness import assert_close
from pass_cases import refuses, rewrites, stays, table

from anesurgery.errors import UnknownName
from anesurgery.facts import row_tails
from anesurgery.interpret import run
from anesurgery.mil import Program, ct, mb, new_symbol, walk_ops
from anesurgery.passes.select_last_token import SelectLastToken
from anesurgery.rewriting.passes import run_pass
from anesurgery.rewriting.session import Session
from anesurgery.testing import apply_pass, assert_refuses, random_inputs

RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((11, 6)).astype(np.float32)
SQUARE = RNG.standard_normal((6, 6)).astype(np.float32)
GAMMA = RNG.standard_normal(6).astype(np.float32)
CLOSE = 1e-6


def layer_norm(x: Any) -> Any:
    return mb.layer_norm(x=x, axes=[-1], gamma=GAMMA, name="normed")


def rms_norm(x: Any) -> Any:
    wide = mb.cast(x=x, dtype="fp32")
    mean = mb.reduce_mean(x=mb.pow(x=wide, y=2.0), axes=[-1], keep_dims=True)
    scaled = mb.mul(x=wide, y=mb.rsqrt(x=mb.add(x=mean, y=1e-5)))
    return mb.mul(x=GAMMA, y=scaled, name="normed")


def rms_norm_by_layer_norm(x: Any) -> Any:
    """The spelling that ANE ports use: the layer norm of [x, -x] has no mean to take away."""
    both = mb.concat(values=[x, mb.mul(x=x, y=-1.0)], axis=-1)
    normed = mb.layer_norm(x=both, axes=[-1])
    half = mb.slice_by_index(x=normed, begin=[0, 0, 0], end=[0, 0, 6], end_mask=[True, True, False])
    return mb.mul(x=half, y=GAMMA, name="normed")


def spelled_layer_norm(x: Any) -> Any:
    centred = mb.sub(x=x, y=mb.reduce_mean(x=x, axes=[-1], keep_dims=True))
    variance = mb.reduce_mean(x=mb.square(x=centred), axes=[2], keep_dims=True)
    return mb.real_div(x=centred, y=mb.sqrt(x=mb.add(x=variance, y=1e-5)), name="normed")


NORMS = {
    "layer_norm": layer_norm,
    "rms": rms_norm,
    "rms_by_layer_norm": rms_norm_by_layer_norm,
    "spelled": spelled_layer_norm,
    "none": lambda x: x,
}


def head_2d(x: Any) -> Any:
    """As `torch.export` writes it: rows and batch in one axis."""
    flat = mb.reshape(x=x, shape=[-1, 6])
    return mb.reshape(x=mb.linear(x=flat, weight=WEIGHT), shape=[1, -1, 11], name="logits")


def capped(x: Any) -> Any:
    scores = mb.linear(x=x, weight=WEIGHT)
    return mb.mul(x=mb.tanh(x=mb.real_div(x=scores, y=3.0)), y=3.0, name="logits")


def compressed() -> Any:
    data = np.arange(66, dtype=np.int8).reshape(11, 6)
    scale, zero = np.float32(0.05), np.int8(30)
    return mb.constexpr_affine_dequantize(quantized_data=data, zero_point=zero, scale=scale, axis=np.int32(0))


HEADS = {
    "linear": lambda x: mb.linear(x=x, weight=WEIGHT, bias=np.arange(11.0, dtype=np.float32)),
    "matmul": lambda x: mb.matmul(x=x, y=WEIGHT, transpose_y=True),
    "matmul_bias": lambda x: mb.add(x=mb.matmul(x=x, y=WEIGHT.T.copy()), y=np.ones((1, 1, 11), "f")),
    "compressed": lambda x: mb.linear(x=x, weight=compressed()),
    "flat": head_2d,
    "capped": capped,
    "cast": lambda x: mb.cast(
        x=mb.linear(x=mb.cast(x=x, dtype="fp16"), weight=WEIGHT.astype(np.float16)), dtype="fp32"
    ),
    "cut": lambda x: mb.slice_by_index(x=mb.linear(x=x, weight=WEIGHT), begin=[0, 0, 0], end=[1, 5, 9]),
    "probabilities": lambda x: mb.softmax(x=mb.linear(x=x, weight=WEIGHT), axis=-1),
}


def model(norm: Any = layer_norm, head: Any = HEADS["linear"], ios: int = 16, batch: int = 1) -> Program:
    """Attention over 5 positions, an MLP, a norm and a head."""

    @mb.program(input_specs=[mb.TensorSpec((batch, 5, 6))], opset_version=ct.target.iOS16)
    def program(x: Any) -> Any:
        scores = mb.softmax(x=mb.matmul(x=x, y=x, transpose_y=True), axis=-1)
        first = mb.add(x=x, y=mb.matmul(x=scores, y=x), name="first")
        mlp = mb.linear(x=mb.gelu(x=mb.linear(x=first, weight=SQUARE)), weight=SQUARE)
        stream = mb.add(x=first, y=mlp, name="stream")
        return mb.identity(x=head(norm(stream)), name="y")

    return program


def selected(step: SelectLastToken, program: Program) -> tuple[Program, Session]:
    """The program after the pass, which the pass then leaves alone, and which gathers nothing."""
    after, session = apply_pass(step, program)
    assert session.changes, session.refusals
    assert not apply_pass(step, after)[1].changes
    assert "gather" not in [op.op_type for op in walk_ops(after)]
    return after, session


def rows_of(program: Program, op_type: str) -> list[int]:
    """How many positions the ops of one type still compute."""
    ops = [op for op in walk_ops(program) if op.op_type == op_type]
    return [int(np.prod(op.outputs[0].shape[:-1])) for op in ops]


@pytest.mark.parametrize("head", ["linear", "matmul"])
@pytest.mark.parametrize("picked", [[0, 3], [4, 1]])
def test_the_one_hot_input_picks_a_position_for_each_row_of_the_batch(head: str, picked: list[int]) -> None:
    program = model(head=HEADS[head], batch=2)
    after, _ = selected(SelectLastToken(position="input", input_name="at"), program)
    assert after.functions["main"].inputs["at"].shape == (2, 5)
    inputs = random_inputs(program)
    whole = np.asarray(run(program, inputs)["y"])
    one_hot = np.eye(5, dtype=np.float32)[picked]
    found = np.asarray(run(after, {**inputs, "at": one_hot})["y"])
    expected = np.stack([whole[b, [at]] for b, at in enumerate(picked)])
    assert_close(found, expected, rtol=CLOSE)
    wrong = np.asarray(run(after, {**inputs, "at": np.eye(5, dtype=np.float32)[[2, 2]]})["y"])
    assert np.abs(wrong - expected).max() > 1e-3


def own_selection(how: str) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((1, 5, 6))])
    def program(x: Any) -> Any:
        normed = layer_norm(mb.cumsum(x=x, axis=1, name="stream"))
        if how == "gather before the head":
            row = mb.gather(x=normed, indices=np.array([-1], np.int32), axis=1)
            return mb.linear(x=row, weight=WEIGHT, name="y")
        logits = mb.linear(x=normed, weight=WEIGHT)
        if how == "gather after the head":
            return mb.gather(x=logits, indices=np.int32(4), axis=1, name="y")
        ends = {"end": [0, 0, 0], "end_mask": [True] * 3, "begin_mask": [True, False, True]}
        squeeze = [False, how == "squeezed slice", False]
        last = mb.slice_by_index(x=logits, begin=[0, -1, 0], squeeze_mask=squeeze, **ends)
        return mb.softmax(x=last, axis=-1, name="y")

    return program


def test_the_last_of_some_positions_is_known_whatever_the_batch() -> None:
    """The wrong version asked whether any size is dynamic, so that only index -1 was the last."""

    def chosen(position: int, length: Any = 8) -> bool:
        @mb.program(input_specs=[mb.TensorSpec((new_symbol(), length, 6))], opset_version=ct.target.iOS17)
        def program(x: Any) -> Any:
            return mb.gather(x=x, indices=np.int32(position), axis=1, name="y")

        op = next(op for op in walk_ops(program) if op.op_type == "gather")
        return row_tails.takes_last_position(op, 1)

    assert [chosen(7), chosen(-1), chosen(-1, new_symbol())] == [True] * 3
    assert [chosen(6), chosen(7, new_symbol())] == [False] * 2


def two_outputs() -> Program:
    small = WEIGHT[:4].copy()

    @mb.program(input_specs=[mb.TensorSpec((1, 5, 6))])
    def program(x: Any) -> Any:
        stream = mb.cumsum(x=x, axis=1, name="stream")
        states = mb.identity(x=stream, name="states")
        tags = mb.linear(x=stream, weight=small, name="tags")
        return mb.linear(x=layer_norm(stream), weight=WEIGHT, name="y"), tags, states

    return program


def test_a_wider_output_of_one_position_counts_as_the_logits() -> None:
    after, _ = selected(SelectLastToken(), two_outputs())
    assert_refuses(SelectLastToken(), after, "%y is wider and has one position already")


def test_an_output_that_does_not_exist() -> None:
    with pytest.raises(UnknownName, match=r"tag.*tags"):
        apply_pass(SelectLastToken(output="tag"), two_outputs())


def one_output(make: Any, shape: tuple[int, ...] = (1, 5, 6)) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape)])(lambda x: make(x))


def scored(x: Any) -> Any:
    return mb.linear(x=x, weight=WEIGHT, name="scores")


def read_inside(x: Any) -> Any:
    logits = scored(x)
    return logits, mb.reduce_max(x=logits, axes=[1])


def read_twice(x: Any) -> Any:
    scores = scored(x)
    return mb.relu(x=scores, name="y"), mb.reduce_max(x=scores, axes=[1])


def row_constants(x: Any) -> Any:
    """A bias of its own for each position: no row like another."""
    return mb.add(x=scored(x), y=np.arange(5, dtype=np.float32).reshape(1, 5, 1), name="y")


def test_an_fp16_norm_with_the_fp32_default_epsilon_can_be_rebuilt() -> None:
    """Such a program exists only before it is saved, so it is edited in place."""

    @mb.program(input_specs=[mb.TensorSpec((1, 5, 6))], opset_version=ct.target.iOS16)
    def program(x: Any) -> Any:
        normed = mb.layer_norm(x=mb.cast(x=x, dtype="fp16"), axes=[-1])
        return mb.linear(x=normed, weight=WEIGHT.astype(np.float16), name="y")

    session = Session()
    run_pass(SelectLastToken(), program, session)
    assert session.changes
    assert rows_of(program, "layer_norm") == [1]


def half(ios: int) -> Program:
    """The one-hot input is of fp16 where inputs can be."""

    @mb.program(input_specs=[mb.TensorSpec((1, 5, 6))], opset_version=getattr(ct.target, f"iOS{ios}"))
    def program(x: Any) -> Any:
        stream = mb.cumsum(x=mb.cast(x=x, dtype="fp16"), axis=1)
        return mb.cast(x=mb.linear(x=stream, weight=WEIGHT.astype(np.float16)), dtype="fp32", name="y")

    return program


def summed(length: Any) -> Program:
    return mb.program(input_specs=[mb.TensorSpec((1, length, 6))])(
        lambda x: mb.linear(x=layer_norm(mb.cumsum(x=x, axis=1)), weight=WEIGHT, name="y")
    )


def normed_output() -> Program:
    """The normed state is an output, too: the way ends there."""
    return one_output(lambda x: (mb.linear(x=(normed := layer_norm(x)), weight=WEIGHT, name="y"), normed))


test_cases, test_surroundings = table(
    SelectLastToken(),
    refuses("no head leads to", one_output, lambda x: mb.relu(x=x)),
    refuses("(softmax) mixes positions", one_output, lambda x: mb.softmax(x=scored(x), axis=1)),
    refuses("mixes positions", one_output, lambda x: mb.layer_norm(x=scored(x), axes=[1, 2])),
    refuses("mixes positions", one_output, lambda x: mb.matmul(x=x, y=x, transpose_y=True)),
    refuses("(add) mixes positions", one_output, row_constants),
    refuses("%scores is read elsewhere", one_output, read_twice),
    refuses("%scores is read inside the model too", one_output, read_inside),
    *(stays(one_output, scored, shape) for shape in [(1, 1, 6), (5, 6), (1, 2, 5, 6)]),
    refuses("there is an input named x already", model, step=SelectLastToken(position="input", input_name="x")),
    *(
        rewrites(
            model,
            NORMS[norm],
            HEADS[head],
            step=SelectLastToken(position=position),
            rtol=CLOSE,
            id=f"{norm}, {head}, {position}",
        )
        for position in ("last", "input")
        for norm, head in [
            *((norm, "linear") for norm in NORMS),
            *(("layer_norm", head) for head in HEADS),
            ("rms", "capped"),
        ]
    ),
    *(
        rewrites(half, ios, step=SelectLastToken(position=position), rtol=CLOSE)
        for ios in (15, 16)
        for position in ("last", "input")
    ),
    rewrites(model, batch=3, step=SelectLastToken(position="input"), rtol=CLOSE),
    rewrites(model, step=SelectLastToken(depth="block"), rtol=CLOSE),
    rewrites(summed, new_symbol(), rtol=CLOSE, inputs={"x": np.ones((1, 7, 6), np.float32)}, id="any length"),
    refuses("has the symbolic shape", summed, new_symbol(), step=SelectLastToken(position="input")),
    *(
        rewrites(own_selection, how, rtol=CLOSE)
        for how in ("gather before the head", "gather after the head", "squeezed slice", "slice")
    ),
    rewrites(two_outputs, rtol=CLOSE),
    rewrites(two_outputs, step=SelectLastToken(output="tags"), rtol=CLOSE),
    rewrites(normed_output, rtol=CLOSE),
    rewrites(model),
)
