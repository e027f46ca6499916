"""Steps after which a model is less exact are undone, with the figures; others stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from closeness import assert_close

import anesurgery as ane
from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, OpPattern, Ops, Var, var
from anesurgery.checking.exactness import EachInHalf, Yardstick, as_half, less_exact
from anesurgery.files.package import Loaded
from anesurgery.interpret import run
from anesurgery.loading import load
from anesurgery.mil import Program, ct, mb, types
from anesurgery.passes.apply_remedies import ApplyRemedies
from anesurgery.passes.compute_fp16 import ComputeFp16
from anesurgery.passes.scale_roots import ScaleRoots
from anesurgery.placement.evidence import Finding
from anesurgery.placement.target import Target
from anesurgery.rewriting import search
from anesurgery.rewriting.checks import WRONG, Exact, Outputs, without_losses_of_digits
from anesurgery.rewriting.ml_program import MLProgram
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.session import Session
from anesurgery.rewriting.step_trials import Trial, Trials
from anesurgery.surgery import Recipe
from anesurgery.testing import apply_pass

HALF = np.float16
CORPUS = Path(__file__).resolve().parents[3] / "shared" / "corpus"


class Rounding(an.Rewrite):
    """A tangent of a number that lost digits on a detour: right in exact arithmetic."""

    name = "rounding"
    tolerance = an.Tolerance(10.0)

    def pattern(self, op: Ops) -> OpPattern:
        return op.tanh(x=var("x"))

    def check(self, m: Match) -> Match | None:
        return None if m.x.op is not None and m.x.op.op_type == "sub" else m

    def rewrite(self, mb: Builder, m: Match) -> Var:
        shifted = mb.sub(x=mb.add(x=m.x, y=HALF(300)), y=HALF(300))
        tangent: Var = mb.tanh(x=shifted)
        return tangent


def lengths(dtype: type = types.fp16) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((2, 8), dtype=dtype)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        total = mb.reduce_sum(x=mb.square(x=x), axes=[-1], keep_dims=True)
        return mb.tanh(x=mb.sqrt(x=total), name="y")

    return program


def recipe(exact: bool) -> Recipe:
    return Recipe(
        "careful", (ScaleRoots(), Rounding()), chosen=frozenset({"scale_roots", "rounding"}), exact=exact
    )


def test_a_step_that_loses_digits_is_undone_with_the_figures() -> None:
    surgery = ane.apply(lengths(), recipe(exact=True), target="M1/macOS 14", prove=None, quiet=True)
    assert {change.pass_name for change in surgery.changes} == {"scale_roots"}
    (reason,) = (refusal.reason for name, refusal in surgery.refusals if name == "rounding")
    assert reason.startswith("undone: outputs would be less exact in fp16 arithmetic on sampled inputs, ")
    assert "dB -> " in reason


def test_without_the_judgement_it_stays() -> None:
    surgery = ane.apply(lengths(), recipe(exact=False), target="M1/macOS 14", prove=None, quiet=True)
    assert {change.pass_name for change in surgery.changes} == {"scale_roots", "rounding"}


def judged(program: Program, *steps: Pass, session: Session) -> Exact:
    """What is left of some steps on a program."""
    start = Trial(MLProgram(Loaded(program)), Target.parse(session.target), session)
    trials = Trials(session)
    end = trials.after_all(start, steps)
    assert isinstance(end, Trial)
    return without_losses_of_digits(start, end, trials, Outputs.of(start, session, WRONG))


def test_inputs_that_are_given_count() -> None:
    """Of numbers that the detour holds exactly, nothing is lost."""
    rows = [{"x": np.full((2, 8), size, HALF)} for size in (0.0, 2.0**-1)]
    assert not judged(lengths(), Rounding(), session=Session(inputs=rows[:1])).losses
    assert set(judged(lengths(), Rounding(), session=Session()).losses) == {"rounding"}


def test_each_step_runs_once() -> None:
    """What is kept is not made anew for each step after it."""
    ran: list[str] = []

    class Idle(Rounding):
        name = "idle"

        def check(self, m: Match) -> None:
            ran.append(self.name)

    left = judged(lengths(), Rounding(), *(Idle() for _ in range(8)), Rounding(), session=Session())
    assert set(left.losses) == {"rounding"}
    assert not left.end.steps
    assert len(ran) == 1, "equal steps from the same model run once"


@dataclass(frozen=True)
class Sought(ApplyRemedies):
    """A search that finds the step that loses digits."""

    name = "sought"

    def remedies(self, findings: Sequence[Finding], target: Target) -> Sequence[Pass]:
        return [Rounding()]


@pytest.mark.parametrize(("on_ane", "reason"), [(True, "less exact"), (False, "the expected time would rise")])
def test_what_a_search_found_goes_too(monkeypatch: pytest.MonkeyPatch, on_ane: bool, reason: str) -> None:
    """A gain that was measured on the ANE does not count where all ops run on the CPU."""
    monkeypatch.setattr(Rounding, "known_gain", lambda self, graph, target: "measured")
    monkeypatch.setattr(search, "_may_run_on_ane", lambda score: on_ane)
    surgery = ane.apply(lengths(), Recipe("sought", (Sought(),)), target="M1/macOS 14", prove=None, quiet=True)
    assert not surgery.changes
    said = [refusal.reason for name, refusal in surgery.refusals if name == "rounding"]
    assert any(reason in words for words in said), said


def test_a_program_of_fp32_is_rounded_to_stand_for_fp16() -> None:
    half, single = lengths(), lengths(types.fp32)
    assert as_half(half) == "fp16"
    assert isinstance(as_half(single), EachInHalf)
    measured = Yardstick(single).measure(single)
    assert measured is not None
    assert 50 < measured["fp16"] < 100
    (value,) = run(single, {"x": np.full((2, 8), 1e-5, np.float32)}, precision=EachInHalf()).values()  # type: ignore[arg-type]
    assert not value.any()  # squares of 1e-10 are 0 in fp16


@pytest.mark.parametrize("engine", ["ane:M1", "ane:M4"])
def test_slopes_are_those_of_fp16_before_as_after(engine: str) -> None:
    """A program of fp32 is compared with its fp16 form, not with one whose numbers no engine holds."""

    @mb.program(input_specs=[mb.TensorSpec((8, 64))], opset_version=ct.target.iOS17)
    def single(x: Var) -> Var:
        for _ in range(6):
            x = mb.leaky_relu(x=x, alpha=np.float32(0.7))
        return mb.identity(x=x, name="y")

    after, session = apply_pass(ComputeFp16(), single, prove=False)
    measured = Yardstick(single, engine)
    was, now = measured.measure(single), measured.measure(after, session.contract)
    assert was is not None
    assert now is not None
    assert was == pytest.approx(now, rel=1e-3)


def test_a_guard_that_fp16_does_not_hold_stays_in_a_program_of_fp32() -> None:
    single = mb.program(input_specs=[mb.TensorSpec((2, 8))], opset_version=ct.target.iOS17)(
        lambda x: mb.log(x=x, epsilon=np.float32(1e-12), name="y")
    )

    (value,) = run(single, {"x": np.zeros((2, 8), np.float32)}, precision=EachInHalf()).values()  # type: ignore[arg-type]
    assert_close(value, np.full((2, 8), np.log(1e-12)), 1e-3)


def test_an_engine_reads_weights_of_fp16_whatever_the_types_say() -> None:
    """Else what is converted to fp16 would seem less exact, by the rounding of its weights."""
    weight = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)

    def product(dtype: type) -> Program:
        held = np.float16 if dtype is types.fp16 else np.float32

        return mb.program(input_specs=[mb.TensorSpec((8, 64), dtype=dtype)])(
            lambda x: mb.linear(x=x, weight=weight.astype(held), name="y")
        )

    measured = Yardstick(product(types.fp32), "ane:M1")
    wide, half = measured.measure(product(types.fp32)), measured.measure(product(types.fp16))
    assert wide is not None
    assert half is not None
    assert not less_exact(wide, half)
    plain, _ = measured._near(product(types.fp32), "ane:M1", [], [], ("main", 0))
    assert wide["ane:M1"] < plain - 1


@pytest.mark.parametrize(
    ("before", "after", "less"),
    [
        (60.0, 59.5, False),
        (60.0, 58.0, True),
        (150.0, 95.0, False),
        (np.inf, 80.0, True),
        (-np.inf, -np.inf, False),
    ],
)
def test_orders_of_rounding_are_no_loss(before: float, after: float, less: bool) -> None:
    assert bool(less_exact({"fp16": before}, {"fp16": after})) is less


def test_a_speech_model_keeps_every_digit() -> None:
    """The magnitudes of its spectrum may overflow, and do not on what is drawn."""
    path = CORPUS / "silero_unified.mlpackage"
    if not path.exists():
        pytest.skip("the corpus is not here")
    before = load(path).program
    surgery = ane.apply(path, "safe_numbers", target="M1/macOS 14", prove=None, quiet=True)
    assert [change.pass_name for change in surgery.changes] == ["scale_roots"]
    measured = Yardstick(before, "ane:M1")
    assert measured.measure(surgery.program) == measured.measure(before)


def test_names_of_classes_are_no_numbers() -> None:
    path = CORPUS / "mlt_gesture_classifier.mlmodel"
    if not path.exists():
        pytest.skip("the corpus is not here")
    measured = Yardstick(load(path).program)
    assert measured.is_small
    assert measured.measure(measured.program) is not None


def test_a_repair_stays_where_ops_are_named_otherwise_than_values() -> None:
    """As coremltools names them: findings speak of values, and edits of ops."""

    @mb.program(input_specs=[mb.TensorSpec((2, 64), dtype=types.fp16)] * 2, opset_version=ct.target.iOS17)
    def likelihood(x: Var, v: Var) -> Var:
        precision = mb.mul(x=mb.exp(x=mb.mul(x=v, y=HALF(-1))), y=HALF(0.5))
        distance = mb.mul(x=precision, y=mb.pow(x=mb.sub(x=x, y=HALF(0.02)), y=HALF(2)))
        return mb.add(x=distance, y=mb.mul(x=v, y=HALF(0.5)), name="y")

    for op in likelihood.functions["main"].operations:
        op.name = f"op_{op.name}"
    surgery = ane.apply(likelihood, "safe_numbers", prove=None, quiet=True)
    assert {change.pass_name for change in surgery.changes} == {"halve_exponent"}
    assert any("kept, as it repairs what may go wrong: num-exp-range" in note for note in surgery.notes)
    given = {name: HALF(0.5) * np.ones((2, 64), HALF) for name in ("x", "v")}
    plain = ane.apply(likelihood, "safe_numbers", inputs=given, prove=None, quiet=True)
    assert not any("kept, as it repairs" in note for note in plain.notes)


def logarithm_of_shares(epsilon: float) -> Program:
    """As it is converted: an epsilon of fp32 beside values of fp16."""
    specs = [mb.TensorSpec((4, 64), dtype=types.fp16)]
    return mb.program(input_specs=specs, opset_version=ct.target.iOS17)(
        lambda x: mb.log(x=mb.softmax(x=x, axis=-1), epsilon=np.float32(epsilon), name="y")
    )


@pytest.mark.parametrize(("spread", "epsilon"), [(60, 1e-45), (600, 1e-45), (3, 1e-45), (60, 1e-5)])
def test_a_logarithm_of_shares_is_judged_by_what_it_means(spread: float, epsilon: float) -> None:
    """The wrong version: fp32 adds 1.4e-45 to a share of 0, so that the repaired model is "wrong still".

    An epsilon that guards is part of what the model means.
    """
    program = logarithm_of_shares(epsilon)
    x = {"x": (np.linspace(-1, 1, 256).reshape(4, 64) * spread * 4).astype(HALF)}
    apart = x["x"].astype(np.float64) - x["x"].astype(np.float64).max(-1, keepdims=True)
    meant = apart - np.log(np.exp(apart).sum(-1, keepdims=True))
    if epsilon > 1e-40:
        meant = np.log(np.exp(meant) + epsilon)
    (seen,) = Yardstick(program, inputs=[x])._meant(("main", 0)).values()
    assert_close(seen, meant, rtol=1e-4)


def test_a_repaired_logarithm_of_shares_is_not_wrong_still() -> None:
    program = logarithm_of_shares(1e-45)
    x = {"x": (np.random.default_rng(0).standard_normal((4, 64)) * 200).astype(HALF)}
    plan = ane.plan(program, "auto", target="M4/macOS 15", inputs=[x])
    assert [one.step.name for one in plan.steps] == ["fuse_exponential"]
    assert plan.wrong == ""
    assert plan.outputs[1] is not None
    assert min(plan.outputs[1].values()) > 60


def masked(written: str) -> Program:
    """Shares of scores and a mask whose -3.4e38 became infinite in fp16: 0 times it is NaN."""
    specs = [mb.TensorSpec((4, 64), dtype=types.fp16), mb.TensorSpec((1, 64), dtype=types.fp16)]

    def body(x: Var, mask: Var) -> Var:
        hidden = mb.sub(x=HALF(1), y=mask)
        if written == "a product":
            kept = mb.mul(x=hidden, y=HALF(-np.inf))
        else:  # a choice
            seen = mb.cast(x=mask, dtype="bool")
            kept = mb.select(cond=seen, a=HALF(0), b=HALF(-np.inf))
        scores = mb.matmul(x=x, y=np.eye(64, dtype=HALF))
        return mb.matmul(x=mb.softmax(x=mb.add(x=scores, y=kept), axis=-1), y=np.eye(64, dtype=HALF), name="y")

    return mb.program(input_specs=specs, opset_version=ct.target.iOS17)(body)


@pytest.mark.parametrize(("written", "seen"), [("a product", 60), ("a product", 64), ("a choice", 0)])
def test_a_mask_that_became_infinite_is_judged_by_what_it_means(written: str, seen: int) -> None:
    """The wrong version: fp32 gives NaN as well, so that nothing is wrong, and nothing is repaired."""
    program, x = masked(written), np.linspace(-3, 3, 256).reshape(4, 64).astype(HALF)
    inputs = {"x": x, "mask": (np.arange(64)[None] < seen).astype(HALF)}
    assert np.isnan(next(iter(ane.run(program, inputs).values()))).any()
    scores = np.where(inputs["mask"] > 0, x.astype(np.float64), -np.inf) if seen else np.zeros((4, 64))
    meant = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    (found,) = Yardstick(program, inputs=[inputs])._meant(("main", 0)).values()
    assert_close(found, meant, rtol=1e-5)
    plan = ane.plan(program, "auto", target="M4/macOS 15", inputs=[inputs])
    assert [one.step.name for one in plan.steps][:1] == ["padding_mask_tensor"]
    assert plan.wrong == ""
