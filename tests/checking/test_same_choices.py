"""Outputs are judged at the same places where ops choose among nearly equal values, and only there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import anesurgery as ane
from anesurgery.checking.exactness import Yardstick, _SameIndices
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.rewriting.checks import WRONG

ROWS = np.random.default_rng(0).standard_normal((1, 64, 8)).astype(np.float16)
SPREAD = {"near": 1e-4, "far": 1.0}


def best_rows(sign: float = 1.0, choice: str = "topk") -> Program:
    """The rows with the highest scores, in their order."""

    @mb.program(input_specs=[mb.TensorSpec((1, 64), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        scores = mb.sigmoid(x=mb.mul(x=x, y=np.float16(sign)))
        if choice == "topk":
            _, places = mb.topk(x=scores, k=8, axis=1, name="best")
        elif choice == "argsort":
            places = mb.argsort(x=scores, axis=1, name="best")
        else:
            places = mb.reduce_argmax(x=scores, axis=1, keep_dims=True, name="best")
        return mb.gather_along_axis(x=ROWS[:, :, 0], indices=places, axis=1, name="y")

    return program


def scores(kind: str) -> dict[str, np.ndarray]:
    return {"x": (np.random.default_rng(1).standard_normal((1, 64)) * SPREAD[kind]).astype(np.float16)}


@pytest.mark.parametrize("choice", ["topk", "argsort", "reduce_argmax"])
def test_nearly_equal_scores_give_other_rows_and_the_rows_are_right(choice: str) -> None:
    program = best_rows(choice=choice)
    near = Yardstick(program, inputs=[scores("near")]).measure(program)
    assert near is not None
    assert near["fp16"] > WRONG
    (note,) = near.notes
    assert note.startswith(f"in fp16 {choice} best gives ")
    assert "of equal values: at the places of fp32 outputs are within " in note


def test_another_choice_among_different_values_is_wrong() -> None:
    """At the places of the first model these outputs are the same, so that they alone would tell nothing."""
    near = Yardstick(best_rows(), inputs=[scores("far")]).measure(best_rows(sign=-1.0))
    assert near is not None
    assert near["fp16"] < WRONG


def test_the_note_says_how_far_apart_the_chosen_values_are() -> None:
    (op,) = best_rows().functions["main"].find_ops(op_type="topk")
    scores = torch.linspace(0, 6.3, 64)[None]
    values, places = torch.topk(scores, 8)
    listener = _SameIndices({op.outputs[1].name: places.flip(1)})
    listener.before(op, {"x": scores, "axis": 1})
    listener.after(op, [values, places.clone()])
    assert listener.moved == ["topk best gives 8 of 8 places otherwise, of values at most 0.7 apart"]


def test_the_first_line_says_so() -> None:
    surgery = ane.apply(best_rows(), "auto", target="M1/macOS 14", inputs=scores("near"), quiet=True)
    assert "wrong still" not in surgery.summary
    assert "in fp16 topk best gives " in surgery.summary


def test_numbers_that_vanish_are_named() -> None:
    """Of weights that were not trained, outputs are often so small that fp16 has no number for them."""

    @mb.program(input_specs=[mb.TensorSpec((1, 64), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        small = mb.mul(x=x, y=np.float16(1e-3), name="small")
        smaller = mb.mul(x=small, y=np.float16(1e-4), name="smaller")
        return mb.tanh(x=mb.mul(x=smaller, y=np.float16(3e4)), name="y")

    surgery = ane.apply(program, "auto", target="M1/macOS 14", inputs=scores("far"), quiet=True)
    assert "outputs are wrong still" in surgery.wrong
    assert "mul smaller is at most " in surgery.wrong


def test_outputs_that_are_nan_in_fp32_too_are_named() -> None:
    """0 / 0: nothing could be compared, and the first line said nothing of it."""

    @mb.program(input_specs=[mb.TensorSpec((1, 64), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        return mb.tanh(x=mb.real_div(x=x, y=x), name="y")

    half = {"x": np.repeat(np.array([[0, 1]], np.float16), 32, axis=1).reshape(1, 64)}
    surgery = ane.apply(program, "auto", target="M1/macOS 14", inputs=half, quiet=True)
    assert surgery.summary.endswith("in fp16 output %y is NaN to 50%, in fp32 too")


def test_outputs_that_an_infinite_mask_made_nan_are_repaired() -> None:
    """The smallest float as the penalty of a padding mask, as coremltools leaves it in fp16: minus infinity."""

    @mb.program(
        input_specs=[
            mb.TensorSpec((1, 4, 8, 8), dtype=types.fp16),
            mb.TensorSpec((1, 1, 1, 8), dtype=types.fp16),
        ],
        opset_version=ct.target.iOS17,
    )
    def program(x: Var, mask: Var) -> Var:
        hidden = mb.sub(x=np.float16(1), y=mask)
        scores = mb.add(x=mb.matmul(x=x, y=x, transpose_y=True), y=mb.mul(x=hidden, y=np.float16(-np.inf)))
        return mb.softmax(x=scores, axis=-1, name="y")

    values = {
        "x": np.random.default_rng(0).standard_normal((1, 4, 8, 8)).astype(np.float16),
        "mask": np.array([1] * 5 + [0] * 3, np.float16).reshape(1, 1, 1, 8),
    }
    surgery = ane.apply(program, "auto", target="M1/macOS 14", inputs=values, quiet=True)
    assert np.isfinite(ane.run(surgery.program, values, precision="fp16")["y"]).all()
    assert surgery.summary.startswith("The outputs in fp16 are repaired: not finite -> ")
    assert "identical" not in surgery.summary


@pytest.mark.parametrize(("low", "named"), [(-120.0, True), (-8.0, False)])
def test_what_is_infinite_in_fp32_and_another_number_now_is_not_called_near(low: float, named: bool) -> None:
    """The logarithm of a sigmoid that is written out: fp16 holds no epsilon, so fp32 gives -inf at -120."""

    @mb.program(input_specs=[mb.TensorSpec((1, 4), dtype=types.fp16)], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        below = mb.add(x=mb.exp(x=mb.mul(x=x, y=np.float16(-1))), y=np.float16(1))
        return mb.log(x=mb.real_div(x=np.float16(1), y=below), name="y")

    x = np.array([[0, low, 5, low]], np.float16)
    surgery = ane.apply(program, "safe_numbers", target="M1/macOS 14", inputs=[{"x": x}], quiet=True)
    words = "50% of output %y is infinite in fp32 and another number now, so that these cannot be compared"
    assert surgery.changes
    assert (words in surgery.summary) is named
