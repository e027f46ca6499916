"""The remedies of an inspection: which are kept, which are not, and what is said of the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.apply_remedies import ApplyRemedies, _worse, example
from anesurgery.testing import apply_pass

HALF = types.fp16


def built(build: Callable[[Var], Any], shape: tuple[int, ...]) -> Program:
    @mb.program(input_specs=[mb.TensorSpec(shape, dtype=HALF)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Any:
        return build(x)

    return program


def masked(x: Var) -> Any:
    keep = np.tril(np.ones((1, 1, 64, 64), bool))
    return mb.softmax(x=mb.select(cond=keep, a=mb.relu(x=x), b=np.float16(-np.inf)), axis=-1)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("target", ["M1/macOS 14", "M4/macOS 27"])
def test_the_estimate_never_rises(converted: Callable[..., Any], name: str, target: str) -> None:
    model = converted(name).model
    before = ane.inspect(model, target)
    surgery = ane.apply(model, "auto", target=target, quiet=True)
    after = ane.inspect(surgery.program, target)
    assert before.cost is not None
    assert after.cost is not None
    assert after.cost <= before.cost
    assert after.residency["ops"] >= before.residency["ops"] or after.cost < before.cost
    again = ane.apply(surgery.program, "auto", target=target, quiet=True)
    assert not again.changes


def test_a_decoder_is_repaired_and_proven(converted: Callable[..., Any]) -> None:
    surgery = ane.apply(converted("gpt2").model, "auto", target="M4/macOS 27", prove="both", quiet=True)
    assert "select_last_token" in {change.pass_name for change in surgery.changes}
    assert surgery.proof is not None
    assert surgery.proof.ok
    assert "  select_last_token" in str(surgery)


def test_a_remedy_that_costs_more_is_reported_and_left_out() -> None:
    program = built(masked, (1, 1, 64, 64))
    after, session = apply_pass(ApplyRemedies(target="M4/macOS 27"), program)
    before_cost = ane.inspect(program, "M4/macOS 27").cost
    after_cost = ane.inspect(after, "M4/macOS 27").cost
    assert before_cost is not None
    assert after_cost is not None
    assert after_cost <= before_cost
    kept = {c.pass_name for c in session.changes}
    said = {name for name, refusal in session.refusals if "the estimate would rise" in refusal.reason}
    assert kept | said
    assert not kept & said


def test_what_no_pass_repairs_is_told_with_the_op() -> None:
    program = built(lambda x: mb.relu(x=mb.cumsum(x=x, axis=-1), name="y"), (1, 8, 4, 4))
    after, session = apply_pass(ApplyRemedies(), program)
    assert not session.changes
    (reason,) = {str(r) for _, r in session.refusals}
    assert "cumsum stays off the ANE: the ANE has no running sum" in reason
    assert "multiply with a triangular matrix" in reason
    assert [op.op_type for op in walk_ops(after) if op.op_type != "const"] == ["cumsum", "relu"]


def test_nothing_is_wrong_and_nothing_changes() -> None:
    program = built(lambda x: mb.relu(x=x, name="y"), (1, 64, 32, 32))
    _, session = apply_pass(ApplyRemedies(), program)
    assert not session.changes
    assert not session.refusals


def encoder(x: Var) -> Any:
    """Every position sees every other, and logits come out for each."""
    weight = np.random.default_rng(0).standard_normal((96, 32)).astype(np.float16)
    shares = mb.softmax(x=mb.matmul(x=x, y=x, transpose_y=True), axis=-1)
    return mb.linear(x=mb.matmul(x=shares, y=x), weight=weight, name="logits")


def test_results_that_are_read_at_every_position_are_not_cut() -> None:
    program = built(encoder, (1, 8, 32))
    findings = ane.inspect(program, "M1").row("logits").findings
    assert "select_last_token" in {f.remedy for f in findings}
    after, session = apply_pass(ApplyRemedies(target="M1"), program)
    assert after.functions["main"].outputs[0].shape == (1, 8, 96)
    (said,) = (r.reason for name, r in session.refusals if name == "select_last_token")
    assert "no causal mask" in said
    assert "logits holds the last position alone" in said


def test_a_pass_that_hides_the_cost_is_not_kept() -> None:
    """An op without an estimate costs nothing in the sum."""
    before = ane.inspect(built(lambda x: mb.relu(x=mb.exp(x=x)), (1, 4)))
    after = ane.inspect(built(lambda x: mb.identity(x=x), (1, 4)))
    refusal = _worse([before], [after])
    assert refusal is not None
    assert refusal.reason == "ops without an estimate or verdict: 1, 0 now"


def test_every_function_counts() -> None:
    program = built(lambda x: mb.relu(x=x, name="y"), (1, 8, 4, 4))
    other = built(lambda x: mb.cumsum(x=x, axis=-1, name="sums"), (1, 8, 4, 4))
    program.add_function("other", other.functions["main"])
    _, session = apply_pass(ApplyRemedies(), program)
    assert any("cumsum stays off the ANE" in r.reason for _, r in session.refusals)


def test_rounds_are_limited() -> None:
    _, session = apply_pass(ApplyRemedies(rounds=0), example())
    assert not session.changes
