"""Whole models proved against one another: what is the same is shown, what is not is named."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from anesurgery.checking.comparison import Comparison, compare
from anesurgery.checking.grades import Grade
from anesurgery.checking.lockstep import ModelProof, pairs_of_values, prove_models
from anesurgery.checking.matching import layouts
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.surgery import apply

RNG = np.random.default_rng(0)
W = RNG.standard_normal((3, 8, 8)).astype(np.float32)
KERNEL = RNG.standard_normal((8, 8, 1, 1)).astype(np.float32)
ONE = [1, 1]


def proof(a: Program, b: Program, **options: Any) -> ModelProof:
    found = compare(a, b, prove=True, **options).proof
    assert found is not None
    return found


def block(w: Any = W, axis: int = -1, sign: float = 1.0, epsilon: float = 1e-5) -> Program:
    """A small attention block in rows."""

    @mb.program(input_specs=[mb.TensorSpec((1, 5, 8))], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        h = mb.layer_norm(x=x, axes=[2], epsilon=np.float32(epsilon), name="norm")
        q, k, v = (mb.linear(x=h, weight=m, name=n) for m, n in zip(w, ("q", "k", "v"), strict=True))
        scores = mb.matmul(x=q, y=k, transpose_y=True, name="scores")
        weights = mb.softmax(
            x=mb.mul(x=scores, y=np.float32(0.25 * sign), name="scaled"), axis=axis, name="weights"
        )
        mixed = mb.matmul(x=weights, y=v, name="mixed")
        return mb.add(x=x, y=mb.gelu(x=mixed, mode="EXACT", name="act"), name="y")

    return program


def by_columns(w: Any = W, perm: tuple[int, ...] = (0, 2, 1)) -> Program:
    """The same block with channels first: 1x1 convolutions, and the norm spelled out."""

    @mb.program(input_specs=[mb.TensorSpec((1, 5, 8))], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        centered = mb.sub(x=x, y=mb.reduce_mean(x=x, axes=[2], keep_dims=True))
        square = mb.reduce_mean(x=mb.square(x=centered), axes=[2], keep_dims=True)
        h = mb.real_div(x=centered, y=mb.sqrt(x=mb.add(x=square, y=np.float32(1e-5))), name="norm")
        image = mb.expand_dims(x=mb.transpose(x=h, perm=[0, 2, 1]), axes=[2])
        q, k, v = (
            mb.squeeze(x=mb.conv(x=image, weight=m[:, :, None, None], pad_type="valid", name=n), axes=[2])
            for m, n in zip(w, ("q", "k", "v"), strict=True)
        )
        scores = mb.matmul(x=mb.mul(x=q, y=np.float32(0.25)), y=k, transpose_x=True, name="scores")
        weights = mb.softmax(x=scores, axis=-1, name="weights")
        mixed = mb.matmul(x=v, y=weights, transpose_y=True, name="mixed")
        return mb.add(x=mb.transpose(x=mb.gelu(x=mixed, mode="EXACT", name="act"), perm=perm), y=x, name="y")

    return program


def test_the_same_model_is_the_same_bit_for_bit() -> None:
    found = proof(block(), block())
    assert found.proved
    assert dict(found.counts) == {"bit for bit": 10}
    assert found.words.startswith("bit for bit, probability of error below 2^-")


def test_another_layout_is_proved() -> None:
    found = proof(block(), by_columns())
    assert found.proved
    assert found.grade is not None
    assert found.grade.words == "proved"
    assert found.bound < 2**-30
    assert not found.seams


def other_weight() -> Any:
    w = W.copy()
    w[1, 3, 2] *= 1.0001
    return w


def of_growth(factor: float) -> Program:
    """An exponential, a value of it that a limit makes constant, and one that follows it."""

    @mb.program(input_specs=[mb.TensorSpec((8,))], opset_version=ct.target.iOS17)
    def program(x: Var) -> tuple[Var, Var]:
        grown = mb.exp(x=mb.mul(x=x, y=np.float32(factor), name="scaled"), name="grown")
        return mb.clip(x=grown, alpha=0.0, beta=0.001, name="limited"), mb.add(x=grown, y=1.0, name="more")

    return program


def test_an_op_that_was_only_checked_is_named_downstream_of_an_unmatched_one() -> None:
    inputs = {"x": np.linspace(-1, 1, 8, dtype=np.float32)}
    old, new = (of_growth(factor).functions["main"] for factor in (1.0, 1.1))
    found = prove_models(old, new, inputs)
    assert dict(found.outputs) == {"limited": "checked", "more": "not matched"}
    assert [(s.op.split(":")[0], s.grade) for s in found.seams] == [
        ("%scaled", "not matched"),
        ("%limited", "checked"),
    ]
    assert "not proved in 2 places:" in found.lines
    called = found.with_differences(["the input y is missing"])
    assert called.seams[-1].op == "the input y is missing"
    assert called.lines[1] == "not proved in 3 places:"


SWAPPED = W[:, :, [1, 0, *range(2, 8)]]


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("b", "op"),
    [
        (lambda: block(w=other_weight()), "%k"),
        (lambda: block(axis=1), "%weights"),
        (lambda: block(sign=-1.0), "%scaled"),
        (lambda: block(epsilon=2e-5), "%norm"),
        (lambda: by_columns(w=other_weight()), "%k"),
        (lambda: by_columns(w=SWAPPED), "%q"),
        (lambda: by_columns(w=W[[1, 0, 2]]), "%q"),
    ],
    ids=["weight", "axis", "sign", "epsilon", "weight, laid out anew", "inputs swapped", "q and k swapped"],
)
def test_a_wrong_model_is_not_proved_and_the_op_is_named(b: Any, op: str) -> None:
    found = proof(block(), b())
    assert not found.proved
    assert found.seams[0].op.startswith(op + ":"), found.lines
    assert found.seams[0].other.startswith(op + ":")


def test_an_output_in_another_layout_is_not_the_same() -> None:
    square = mb.TensorSpec((4, 4))

    a = mb.program(input_specs=[square])(lambda x: mb.exp(x=x, name="y"))

    b = mb.program(input_specs=[square])(lambda x: mb.transpose(x=mb.exp(x=x, name="e"), perm=[1, 0], name="y"))

    found = proof(a, b)
    assert found.grade is None
    assert found.outputs == {"y": "not matched"}
    assert found.words.startswith("not proved")
    assert "output %y" in found.lines[-1]


def test_two_draws_of_random_numbers_are_not_the_same() -> None:
    def drawing(seed: int) -> Program:
        return mb.program(input_specs=[mb.TensorSpec((4, 4))])(
            lambda x: mb.add(x=x, y=mb.random_uniform(shape=[4, 4], seed=seed, name="r"), name="y")
        )

    assert not proof(drawing(1), drawing(1)).proved
    assert proof(drawing(1), drawing(2)).grade is None


def test_folded_weights_are_checked_and_said_so() -> None:
    kernel = RNG.standard_normal((8, 3, 3, 3)).astype(np.float32)
    mean, gamma = RNG.standard_normal(8).astype(np.float32), RNG.random(8).astype(np.float32)

    @mb.program(input_specs=[mb.TensorSpec((1, 3, 6, 6))])
    def program(x: Var) -> Var:
        c = mb.conv(x=x, weight=kernel, pad_type="valid", name="c")
        n = mb.batch_norm(x=c, mean=mean, variance=gamma + 1, gamma=gamma, beta=mean, name="n")
        return mb.mul(x=mb.relu(x=n, name="r"), y=np.float32(3), name="y")

    found = proof(program, apply(program, ["fold_batch_norm"], prove=None, quiet=True).program)
    assert found.grade is not None
    assert found.grade.words == "checked"
    assert [s.op[:3] for s in found.seams] == ["%n:"]
    assert "PSNR" in found.seams[0].note
    assert found.counts["bit for bit"] == 2


def test_a_declared_change_of_the_outputs_is_followed() -> None:
    head = RNG.standard_normal((11, 8)).astype(np.float32)

    program = mb.program(input_specs=[mb.TensorSpec((1, 5, 8))], opset_version=ct.target.iOS16)(
        lambda x: mb.linear(x=mb.layer_norm(x=x, axes=[2]), weight=head, name="logits")
    )

    done = apply(program, ["select_last_token"], prove=None, quiet=True)
    assert done.contract
    assert proof(program, done.program, contract=done.contract).proved

    @mb.program(input_specs=[mb.TensorSpec((1, 5, 8))], opset_version=ct.target.iOS16)
    def first_token(x: Var) -> Var:
        row = mb.slice_by_index(x=x, begin=[0, 0, 0], end=[1, 1, 8])
        return mb.linear(x=mb.layer_norm(x=row, axes=[2]), weight=head, name="logits")

    assert proof(program, first_token, contract=done.contract).grade is None
    assert proof(program, done.program, last=True).proved


def cached(shift: float = 0.0) -> Program:
    state = mb.StateTensorSpec((2, 3), dtype=types.fp16)

    @mb.program(input_specs=[mb.TensorSpec((2, 3), dtype=types.fp16), state], opset_version=ct.target.iOS18)
    def program(x: Var, cache: Var) -> Var:
        old = mb.read_state(input=cache)
        mb.coreml_update_state(state=cache, value=mb.add(x=old, y=x))
        new = mb.read_state(input=cache)
        last = mb.mul(x=new, y=np.float16(2), name="y")
        mb.coreml_update_state(state=cache, value=mb.add(x=x, y=np.float16(1 + shift)))
        return last

    return program


def test_states_count_as_outputs() -> None:
    assert proof(cached(), cached()).outputs == {"y": "bit for bit", "state cache": "bit for bit"}
    assert proof(cached(), cached(0.5)).outputs == {"y": "bit for bit", "state cache": "not matched"}


def test_programs_without_common_names_are_paired_by_position() -> None:
    a, b = block(), block()
    for op in b.functions["main"].operations:
        for var in op.outputs:
            var.name = var.name + "_" if var.name != "y" else "y"
    assert len(pairs_of_values(a.functions["main"], b.functions["main"])) >= 8
    assert proof(a, b).proved


def test_layouts_are_all_orders_of_long_axes() -> None:
    assert len(list(layouts((1, 2, 3), (3, 1, 2)))) == 1
    assert len(list(layouts((2, 2), (2, 2)))) == 2
    assert not list(layouts((2, 3), (6,)))


def test_it_is_in_every_report() -> None:
    found: Comparison = compare(block(), by_columns(), prove=True)
    assert "proved, probability of error below" in str(found)
    assert "proved, probability of error below" in found._repr_html_()
    data = json.loads(json.dumps(found.to_json()))["proof"]
    assert data["grade"] == "proved"
    assert data["proved"] is True
    wrong = compare(block(), block(axis=1), prove=True)
    assert "not matched: %weights" in str(wrong)
    assert compare(block(), block()).proof is None


def test_nan_on_both_sides_is_not_checked() -> None:
    """Two roots of negative numbers are alike in every number, and show nothing."""

    def root(least: float) -> Program:
        @mb.program(input_specs=[mb.TensorSpec((4, 4))])
        def program(x: Var) -> Var:
            below = mb.sub(x=np.float32(-least), y=mb.square(x=x))
            return mb.sqrt(x=below, name="y")

        return program

    found = compare(root(1), root(2), prove=True)
    assert not found.ok
    assert found.proof is not None
    assert found.proof.grade is None
    assert found.proof.trial is not None
    assert found.proof.trial.values == 0
    assert "no number that shows anything" in found.proof.trial.words
    assert proof(root(1), root(1)).grade is Grade.BITS


def test_numbers_that_are_nan_are_not_counted() -> None:
    def half_a_logarithm(of_root: bool) -> Program:
        @mb.program(input_specs=[mb.TensorSpec((4, 4))])
        def program(x: Var) -> Var:
            z = mb.sub(x=x, y=mb.reduce_mean(x=x, axes=[0, 1]))
            if of_root:
                return mb.log(x=mb.sqrt(x=z), name="y")
            return mb.mul(x=mb.log(x=z), y=np.float32(0.5), name="y")

        return program

    found = compare(half_a_logarithm(False), half_a_logarithm(True), prove=True)
    assert found.proof is not None
    count = 16 - found.outputs[0].undefined
    assert 0 < count < 16
    assert f"on {count} numbers" in found.proof.seams[0].note
