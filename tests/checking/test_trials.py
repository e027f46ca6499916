"""Whole models are compared on adversarial inputs too: these tell apart what no sample does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil.mil import get_new_symbol

from anesurgery.checking import trials
from anesurgery.checking.comparison import Comparison, compare
from anesurgery.checking.grades import Grade
from anesurgery.mil import Program, Var, ct, mb, types

N = get_new_symbol()
F, INT = types.fp32, types.int32
X = ((F, (4, 4)),)
ONE, TWO = ((INT, (6,)),), ((INT, (6,)), (INT, (6,)))
ROWS = ((F, (N, 4)),)
TALL = ((F, (16, 4)),)
CHANNELS = np.random.default_rng(3).standard_normal((4, 4)).astype(np.float32)
CHANNELS[:3] *= 1e4
OFFSET = np.full((4, 4), 1e3, np.float32)
TABLE = np.random.default_rng(0).standard_normal((7, 3)).astype(np.float32)
f = np.float32


def model(inputs: Any, body: Callable[..., Any]) -> Program:
    """A program of one output."""
    specs = [mb.TensorSpec(shape, dtype=dtype) for dtype, shape in inputs]
    if len(inputs) == 1:
        return mb.program(input_specs=specs, opset_version=ct.target.iOS17)(
            lambda x: mb.identity(x=body(x), name="y")
        )

    return mb.program(input_specs=specs, opset_version=ct.target.iOS17)(
        lambda x, z: mb.identity(x=body(x, z), name="y")
    )


def compared(inputs: Any, old: Callable[..., Any], new: Callable[..., Any]) -> Comparison:
    return compare(model(inputs, old), model(inputs, new), prove=True)


def cast(x: Var, dtype: str) -> Any:
    return mb.cast(x=x, dtype=dtype)


def chosen(x: Var, compare_by: Any) -> Any:
    """One of two branches, by the sign of the sum."""
    total = compare_by(x=mb.reduce_sum(x=x, axes=[0, 1]), y=f(0))
    return mb.cond(pred=total, _true_fn=lambda: mb.mul(x=x, y=f(2)), _false_fn=lambda: mb.add(x=x, y=f(1)))


def ratio(x: Var) -> Any:
    e = mb.exp(x=x)
    return mb.real_div(x=e, y=mb.reduce_sum(x=e, axes=[-1], keep_dims=True))


WRONG: dict[str, tuple[Any, Callable[..., Any], Callable[..., Any]]] = {
    "relu6 without its bound": (X, lambda x: mb.relu6(x=x), lambda x: mb.relu(x=x)),
    "a clip that the sample does not reach": (X, lambda x: mb.clip(x=x, alpha=f(-8), beta=f(8)), lambda x: x),
    "halves away from zero": (X, lambda x: mb.round(x=x), lambda x: mb.floor(x=mb.add(x=x, y=f(0.5)))),
    "ties of a threshold": (
        X,
        lambda x: mb.thresholded_relu(x=x, alpha=f(1)),
        lambda x: mb.select(cond=mb.greater(x=x, y=f(1)), a=x, b=f(0)),
    ),
    "the last of equal ones": (
        X,
        lambda x: mb.reduce_argmax(x=x, axis=1),
        lambda x: mb.sub(x=3, y=mb.reduce_argmax(x=mb.reverse(x=x, axes=[1]), axis=1)),
    ),
    "a branch at zero": (X, lambda x: chosen(x, mb.greater), lambda x: chosen(x, mb.greater_equal)),
    "epsilon": (
        X,
        lambda x: mb.layer_norm(x=x, axes=[1], epsilon=f(1e-5)),
        lambda x: mb.layer_norm(x=x, axes=[1], epsilon=f(1e-6)),
    ),
    "softmax that overflows": (X, lambda x: mb.softmax(x=x, axis=-1), ratio),
    "0 and -0": (
        X,
        lambda x: mb.real_div(x=f(1), y=mb.mul(x=x, y=f(1))),
        lambda x: mb.real_div(x=f(1), y=mb.add(x=x, y=f(0))),
    ),
    "a remainder of negative numbers": (
        ONE,
        lambda i: mb.mod(x=i, y=3),
        lambda i: mb.sub(x=i, y=mb.mul(x=cast(mb.real_div(x=cast(i, "fp32"), y=f(3)), "int32"), y=3)),
    ),
    "twice and half": (ONE, lambda i: mb.floor_div(x=mb.mul(x=i, y=2), y=2), lambda i: i),
    "integers beyond fp32": (ONE, lambda i: cast(cast(i, "fp32"), "int32"), lambda i: i),
    "a sum that wraps": (
        TWO,
        lambda i, j: cast(mb.add(x=i, y=j), "fp32"),
        lambda i, j: mb.add(x=cast(i, "fp32"), y=cast(j, "fp32")),
    ),
    "larger by a difference": (
        TWO,
        lambda i, j: mb.greater(x=i, y=j),
        lambda i, j: mb.greater(x=mb.sub(x=i, y=j), y=0),
    ),
    "equal after rounding": (
        TWO,
        lambda i, j: mb.equal(x=i, y=j),
        lambda i, j: mb.equal(x=cast(i, "fp32"), y=cast(j, "fp32")),
    ),
    "ids that are cut off": (
        ONE,
        lambda i: mb.gather(x=TABLE, indices=i, axis=0),
        lambda i: mb.gather(x=TABLE, indices=mb.minimum(x=i, y=5), axis=0),
    ),
    "half of a channel beside larger ones": (
        TALL,
        lambda x: mb.linear(x=x, weight=CHANNELS),
        lambda x: mb.linear(x=x, weight=CHANNELS * np.array([[1], [1], [1], [0.5]], f)),
    ),
    "a shift of a channel beside larger ones": (
        TALL,
        lambda x: mb.linear(x=x, weight=CHANNELS, bias=np.array([1e4, 1e4, 1e4, 1], f)),
        lambda x: mb.linear(x=x, weight=CHANNELS, bias=np.array([1e4, 1e4, 1e4, 0.7], f)),
    ),
    "the first 48 rows": (
        ROWS,
        lambda x: mb.reduce_sum(x=x, axes=[0]),
        lambda x: mb.reduce_sum(x=mb.slice_by_index(x=x, begin=[0, 0], end=[48, 4]), axes=[0]),
    ),
}

RIGHT: dict[str, tuple[Any, Callable[..., Any], Callable[..., Any]]] = {
    "a running sum as a product": (
        X,
        lambda x: mb.cumsum(x=x, axis=0),
        lambda x: mb.matmul(x=np.tril(np.ones((4, 4), f)), y=x),
    ),
    "softmax of a difference": (
        X,
        lambda x: mb.softmax(x=x, axis=-1),
        lambda x: mb.softmax(x=mb.sub(x=x, y=mb.reduce_max(x=x, axes=[-1], keep_dims=True)), axis=-1),
    ),
    "twice": (ONE, lambda i: mb.mul(x=i, y=2), lambda i: mb.add(x=i, y=i)),
    "there and back": (ONE, lambda i: mb.sub(x=mb.add(x=i, y=3), y=3), lambda i: i),
    "not smaller": (
        TWO,
        lambda i, j: mb.greater_equal(x=i, y=j),
        lambda i, j: mb.logical_not(x=mb.less(x=i, y=j)),
    ),
    "channels of many sizes": (
        TALL,
        lambda x: mb.linear(x=x, weight=CHANNELS),
        lambda x: mb.transpose(x=mb.matmul(x=CHANNELS, y=x, transpose_y=True), perm=[1, 0]),
    ),
    "a channel that cancels": (
        TALL,
        lambda x: mb.sub(x=mb.linear(x=x, weight=CHANNELS + OFFSET), y=mb.linear(x=x, weight=OFFSET)),
        lambda x: mb.linear(x=x, weight=CHANNELS),
    ),
    "a mean of all rows": (
        ROWS,
        lambda x: mb.reduce_mean(x=x, axes=[0]),
        lambda x: mb.real_div(
            x=mb.reduce_sum(x=x, axes=[0]), y=cast(mb.gather(x=mb.shape(x=x), indices=0), "fp32")
        ),
    ),
}


@pytest.mark.one_of(5)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_model_is_told_apart(name: str) -> None:
    found = compared(*WRONG[name])
    assert found.proof is not None
    assert found.proof.trial is not None
    assert not found.ok
    assert found.proof.grade is None
    assert found.proof.trial.counterexample
    assert "adversarial inputs give another y" in found.proof.words


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_model_stays_the_same(name: str) -> None:
    found = compared(*RIGHT[name])
    assert found.ok, found.proof
    assert found.proof is not None
    assert found.proof.grade is not None, found.proof.lines


def test_an_integer_in_fp16_is_not_proved() -> None:
    found = compared(ONE, lambda i: cast(i, "fp32"), lambda i: cast(cast(i, "fp16"), "fp32"))
    assert found.proof is not None
    assert found.proof.grade is Grade.NUMBERS


def test_a_float_that_was_widened_is_narrowed_without_loss() -> None:
    half = ((types.fp16, (4,)),)
    turned = ((types.fp16, (2, 3)),)
    there = compared(half, lambda x: cast(cast(x, "fp32"), "fp16"), lambda x: x)
    around = compared(
        turned,
        lambda x: cast(mb.transpose(x=cast(x, "fp32"), perm=[1, 0]), "fp16"),
        lambda x: mb.transpose(x=x, perm=[1, 0]),
    )
    summed = compared(
        half, lambda x: cast(mb.add(x=cast(x, "fp32"), y=f(1)), "fp16"), lambda x: mb.add(x=x, y=np.float16(1))
    )
    for result, grade in ((there, Grade.BITS), (around, Grade.BITS), (summed, Grade.NUMBERS)):
        assert result.proof is not None
        assert result.proof.grade is grade


def test_what_holds_for_finite_numbers_only_is_said_so() -> None:
    found = compared(X, lambda x: mb.sub(x=x, y=x), lambda x: mb.mul(x=x, y=f(0)))
    same = compared(X, lambda x: mb.mul(x=x, y=f(2)), lambda x: mb.add(x=x, y=x))
    zero = compared(X, lambda x: mb.sub(x=x, y=x), lambda x: mb.fill(shape=[4, 4], value=f(0)))
    for result, only in ((found, False), (same, False), (zero, True)):
        assert result.proof is not None
        assert result.proof.trial is not None
        assert result.proof.trial.finite_only is only


def test_states_are_drawn_too() -> None:
    def clipped(bound: float) -> Program:
        state = mb.StateTensorSpec((4,), dtype=types.fp16)

        @mb.program(input_specs=[mb.TensorSpec((4,), dtype=types.fp16), state], opset_version=ct.target.iOS18)
        def program(x: Var, cache: Var) -> Var:
            total = mb.add(x=mb.read_state(input=cache), y=x)
            kept = mb.clip(x=total, alpha=np.float16(-bound), beta=np.float16(bound))
            mb.coreml_update_state(state=cache, value=kept)
            return mb.add(x=x, y=np.float16(1), name="y")

        return program

    found = compare(clipped(8), clipped(9), prove=True).proof
    assert found is not None
    assert found.trial is not None
    assert "state cache" in found.trial.failure
    assert compare(clipped(8), clipped(8), prove=True).ok


def test_a_long_loop_is_tried_on_fewer_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(count: int) -> Program:
        def body(i: Var, h: Var) -> tuple[Var, Var]:
            return mb.add(x=i, y=np.int32(1)), mb.clip(x=h, alpha=f(-1), beta=f(1))

        test = lambda i, h: mb.less(x=i, y=np.int32(count))  # noqa: E731
        return model(X, lambda x: mb.while_loop(_cond=test, _body=body, loop_vars=(np.int32(0), x))[1])

    def tried(count: int) -> int:
        proof = compare(loop(count), loop(count), prove=True).proof
        assert proof is not None
        assert proof.trial is not None
        return proof.trial.values

    monkeypatch.setattr(trials, "MOST_EFFORT", trials.MOST_EFFORT >> 6)
    assert 0 < tried(40) < tried(2)


def test_every_function_is_proved() -> None:
    def several(factor: float) -> Program:
        both = model(X, lambda x: mb.mul(x=x, y=f(2)))
        both.add_function("other", model(X, lambda x: mb.mul(x=x, y=f(factor))).functions["main"])
        return both

    same, wrong = (compare(several(3), several(factor), prove=True) for factor in (3, 4))
    assert same.proof is not None
    assert same.proof.grade is Grade.BITS
    assert set(same.proof.outputs) == {"y", "other: y"}
    assert wrong.proof is not None
    assert wrong.proof.grade is None
    assert not wrong.ok
    named = compare(several(3), several(4), prove=True, function="main").proof
    assert named is not None
    assert named.grade is Grade.BITS
