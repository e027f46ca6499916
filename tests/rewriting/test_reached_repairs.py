"""Repairs that the inputs at hand ask for: only where outputs are wrong, and only those that are right."""

from __future__ import annotations

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.files.package import Loaded
from anesurgery.mil import Array, Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.fuse_exponential import FuseExponential
from anesurgery.passes.scale_powers import ScalePowers
from anesurgery.placement.target import Target
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.checks import WRONG, Outputs, repairs_of
from anesurgery.rewriting.ml_program import MLProgram
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.pattern import Match
from anesurgery.rewriting.session import Session
from anesurgery.rewriting.step_trials import Trial, Trials
from anesurgery.surgery import Recipe

LOUD, QUIET = (np.full((2, 8), size, np.float16) for size in (300, 2))


class _TenthMore(ScalePowers):
    name = "a_tenth_more"

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Finite, and wrong."""
        more: Var = mb.mul(x=super().rewrite(mb, m), y=1.1)
        return more


def small_square() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 8), dtype=types.fp16)])(
        lambda x: mb.mul(x=mb.square(x=x), y=np.float16(1e-3), name="y")
    )


def names(steps: tuple[Pass, ...], x: Array) -> list[str] | None:
    """The repairs that stay."""
    session = Session(target="M1/macOS 14", inputs={"x": x})
    start = Trial(MLProgram(Loaded(small_square())), Target.parse(session.target), session)
    reached = list(repairs_of(steps, start, Trials(session), Outputs.of(start, session, WRONG, seeds=1)))
    return [step.name for one in reached for step in one.steps] if reached else None


def test_right_outputs_ask_for_nothing() -> None:
    assert names((ScalePowers(),), QUIET) is None


def test_what_changes_nothing_does_not_stay() -> None:
    assert names((FuseExponential(), ScalePowers()), LOUD) == ["scale_powers"]


def test_a_repair_whose_check_fails_is_left_out() -> None:
    """The wrong version looks at no site: a finite number is nearer than an infinite one, right or wrong."""
    assert names((_TenthMore(),), LOUD) == ["a_tenth_more"]
    recipe = Recipe("own", (), repairs=(_TenthMore(),))
    done = ane.apply(small_square(), recipe, inputs={"x": LOUD}, target="M1/macOS 14", quiet=True)
    assert not done.changes
    assert any("it failed" in refusal.reason for name, refusal in done.refusals if name == "a_tenth_more")


class _StillInfinite(ScalePowers):
    name = "still_infinite"

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Finite, and then infinite again."""
        large: Var = mb.mul(x=mb.mul(x=super().rewrite(mb, m), y=np.float16(6e4)), y=np.float16(6e4))
        return large


def test_what_leaves_outputs_that_are_not_finite_repairs_nothing() -> None:
    assert names((_StillInfinite(),), LOUD) == []


def softplus(most: float = 30.0) -> Program:
    """A softplus of values up to a limit, and an argmax, whose report is of another chip."""

    @mb.program(input_specs=[mb.TensorSpec((2, 8), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> tuple[Var, Var]:
        best = mb.reduce_argmax(x=x, axis=-1, name="best")
        return mb.softplus(x=mb.minimum(x=x, y=np.float16(most)), name="y"), best

    return program


@pytest.mark.parametrize(
    ("target", "most", "inputs", "repaired"),
    [
        ("M3 Max/macOS 26", 30.0, None, True),
        ("M3 Max/macOS 26", 30.0, QUIET, False),
        ("M3 Max/macOS 26", 30.0, LOUD, True),
        ("M3 Max/macOS 26", 10.0, None, False),
        ("M2/macOS 26", 30.0, LOUD, False),
    ],
    ids=["may be reached", "not reached", "reached", "out of reach", "another chip"],
)
@pytest.mark.filterwarnings("ignore::anesurgery.errors.SurgeryWarning")
def test_what_was_reported_of_the_target_is_repaired(
    target: str, most: float, inputs: Array | None, repaired: bool
) -> None:
    given = None if inputs is None else {"x": inputs}
    done = ane.apply(softplus(most), "auto", target=target, inputs=given)
    assert [change.pass_name for change in done.changes] == ["replace_faulty_ops"] * repaired
    said = [note for note in done.notes if "fault-softplus-cliff was reported on this target" in note]
    assert bool(said) == (repaired and inputs is None)
    assert not any(op.op_type == "cast" for op in walk_ops(done.program)), "the argmax is of another target"


@pytest.mark.filterwarnings("ignore::anesurgery.errors.SurgeryWarning")
def test_a_repair_may_cost_digits_that_are_to_spare() -> None:
    """The wrong version: 2 dB on the engine stay, as fp16 would fall from 78 to 73."""

    @mb.program(input_specs=[mb.TensorSpec((1, 64, 4096), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        return mb.reduce_log_sum_exp(x=x, axes=[1], name="y")

    inputs = {"x": np.tile(np.linspace(6, 10, 4096).astype(np.float16), (1, 64, 1))}
    done = ane.apply(program, "auto", target="M3/macOS 26", inputs=inputs, quiet=True)
    assert [change.pass_name for change in done.changes] == ["replace_faulty_ops"]
    before, after = done.plan.outputs
    assert before is not None
    assert after is not None
    assert before["ane:M3"] < WRONG < 60 < after["ane:M3"]
    assert after["fp16"] < before["fp16"] - 1


def test_what_no_repair_helps_is_said_first() -> None:
    @mb.program(input_specs=[mb.TensorSpec((2, 8), dtype=types.fp16)])
    def program(x: Var) -> Var:
        return mb.mul(x=mb.pow(x=mb.add(x=x, y=np.float16(1)), y=np.float16(9)), y=np.float16(1e-3), name="y")

    wrong = ane.apply(program, "auto", target="M1/macOS 14", inputs={"x": LOUD})
    assert wrong.wrong.startswith("outputs are wrong still on the inputs at hand")
    assert wrong.wrong in " ".join(str(wrong).split())
    right = ane.apply(program, "auto", target="M1/macOS 14", inputs={"x": QUIET / 8})
    assert not right.wrong
