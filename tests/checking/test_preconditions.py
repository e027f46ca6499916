"""What an edit needs is named, and said to be shown where the interval analysis shows it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from both_sides import checked, side_by_side

import anesurgery as ane
from anesurgery.checking.edit_sites import Site, limits_of, site_of
from anesurgery.checking.grades import REASSOCIATED, Grade, Promise, SiteCheck, Tolerance, summary
from anesurgery.interpret import TABLE, run
from anesurgery.interpret.sampling import sample_inputs
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.rewriting import needs
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.pattern import Match, OpPattern, Ops, var
from anesurgery.rewriting.rewrite import Rewrite
from anesurgery.testing import apply_pass

NEAR = Promise(REASSOCIATED)


@dataclass(frozen=True)
class ReluUpToFour(Rewrite):
    """A relu that is 0 from 4 on."""

    name: ClassVar[str] = "relu_up_to_four"
    magnitude: ClassVar[float] = 3.5
    tolerates_nonfinite: ClassVar[bool] = False

    def pattern(self, op: Ops) -> OpPattern:
        return op.relu(x=var("x"))

    def rewrite(self, mb: Builder, m: Match) -> Any:
        small = mb.less(x=m.x, y=np.float32(4))
        return mb.select(cond=small, a=mb.maximum(x=m.x, y=np.float32(0)), b=np.float32(0))


def upper(body: Any) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((2, 4))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        return mb.relu(x=body(x))

    made: Program = program
    return made


def test_a_magnitude_that_is_shown_is_no_precondition() -> None:
    _, session = apply_pass(ReluUpToFour(), upper(lambda x: mb.sigmoid(x=x)))
    (change,) = session.changes
    assert change.proof is not None
    assert change.proof.ranged
    assert change.proof.preconditions == "finite numbers"
    assert "rests on ranges that the interval analysis shows" in summary([change.proof])
    assert change.needs is None
    assert not session.notes


def test_a_magnitude_that_a_run_shows_is_named_with_what_was_seen() -> None:
    program = upper(lambda x: mb.mul(x=x, y=np.float32(0.25), name="quarter"))
    _, session = apply_pass(ReluUpToFour(), program)
    (change,) = session.changes
    assert change.proof is not None
    assert not change.proof.ranged
    assert change.proof.preconditions == "finite numbers of magnitude up to 3.5"
    assert "1 holds for finite numbers of magnitude up to 3.5 only" in summary([change.proof])
    assert change.needs is not None
    largest = np.abs(next(iter(sample_inputs(program).values()))).max() / 4
    assert change.needs.reached == pytest.approx(float(largest))
    words = f"holds up to 3.5; on drawn inputs %quarter reaches {largest:.4g}"
    assert session.notes == [f"relu_up_to_four: {words}"]


def test_a_value_of_a_branch_that_is_not_taken_needs_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    @mb.program(input_specs=[mb.TensorSpec((2, 4))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        def relus() -> Var:
            double = mb.mul(x=x, y=np.float32(2))
            return mb.add(x=mb.relu(x=double), y=mb.relu(x=double))

        never = mb.less(x=mb.reduce_max(x=mb.abs(x=x)), y=np.float32(0))
        return mb.cond(pred=never, _true_fn=relus, _false_fn=lambda: mb.identity(x=x))

    runs = []
    monkeypatch.setattr(needs, "run", lambda *given, **more: runs.append(run(*given, **more)))
    _, session = apply_pass(ReluUpToFour(), program)
    assert [change.needs.reached for change in session.changes if change.needs] == [0.0, 0.0]
    assert len(runs) == 1


def with_inputs(number: float, prove: str | None) -> ane.Surgery:
    values = {"x": np.full((2, 4), number, np.float32)}
    program = upper(lambda x: mb.mul(x=x, y=np.float32(1), name="same"))
    return ane.apply(program, [ReluUpToFour()], prove=prove, inputs=values, quiet=True)


@pytest.mark.parametrize("prove", ["sites", None])
@pytest.mark.parametrize("number", [3.5, -3.5, 0.0])
def test_the_text_of_a_report_says_what_inputs_have_shown(number: float, prove: str | None) -> None:
    text = " ".join(with_inputs(number, prove).details.split())
    words = f"holds up to 3.5; on 1 given set of inputs %same reaches {abs(number):g}"
    assert f"note: relu_up_to_four: {words}" in text


@pytest.mark.parametrize("prove", ["sites", None])
@pytest.mark.parametrize("number", [3.6, -3.6, np.inf, np.nan])
def test_inputs_that_break_a_precondition_leave_the_op_as_it_is(number: float, prove: str | None) -> None:
    surgery = with_inputs(number, prove)
    assert not surgery.changes
    words = f"%same reaches {abs(number):.4g} on 1 given set of inputs; the rewrite holds up to 3.5"
    assert [refusal.reason for _, refusal in surgery.refusals] == [words]
    assert words in " ".join(surgery.details.split())


def test_a_value_that_cannot_be_computed_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(TABLE, "cos")
    program = upper(lambda x: mb.add(x=mb.cos(x=x), y=np.float32(7)))
    _, session = apply_pass(ReluUpToFour(), program)
    assert not session.changes
    assert "could not be computed" in session.refusals[0][1].reason


def test_halves_are_no_larger_than_their_type_holds() -> None:
    """A magnitude that is the largest number of fp16 is no precondition of values of fp16."""
    assert not limits_of(site("fp16"), Promise(magnitude=65504.0))
    assert list(limits_of(site("fp32"), Promise(magnitude=65504.0)).values()) == [65504.0]


def site(dtype: str) -> Site:
    kind = {"fp16": types.fp16, "fp32": types.fp32}[dtype]
    _, olds, news, made = side_by_side(lambda x: mb.relu(x=x), lambda x: mb.abs(x=x), (kind, (2, 4)))
    return site_of(list(zip(olds, news, strict=True)), made, ())


def mean(x: Var) -> Any:
    return mb.reduce_mean(x=x, axes=[1])


def share(dtype: Any) -> Any:
    return lambda x: mb.mul(x=mb.reduce_sum(x=x, axes=[1]), y=dtype(1 / 8))


def test_a_sum_that_leaves_fp16_before_its_mean_is_named() -> None:
    found = checked(mean, share(np.float16), (types.fp16, (2, 8)), promise=NEAR)
    assert isinstance(found, SiteCheck)
    assert found.within(REASSOCIATED)
    assert found.overflow == 16384
    assert "1 overflows fp16 where the old side does not, for numbers of about 16384" in summary([found])


def squared_deviations(x: Var) -> Any:
    z = mb.sub(x=x, y=mb.reduce_mean(x=x, axes=[1], keep_dims=True))
    return mb.reduce_mean(x=mb.square(x=z), axes=[1])


def difference_of_means(x: Var) -> Any:
    square = mb.reduce_mean(x=mb.square(x=x), axes=[1])
    return mb.sub(x=square, y=mb.square(x=mb.reduce_mean(x=x, axes=[1])))


def test_an_overflow_between_squares_and_squares_of_differences_is_named() -> None:
    """Numbers of both signs up to 250 have squares in fp16, and differences of up to 500 have none."""
    found = checked(
        difference_of_means, squared_deviations, (types.fp16, (2, 8)), promise=Promise(Tolerance(0.1))
    )
    assert isinstance(found, SiteCheck)
    assert found.overflow == 250


def test_what_does_not_overflow_is_not_named() -> None:
    for old, new, dtype in ((mean, share(np.float32), types.fp32), (share(np.float16), mean, types.fp16)):
        found = checked(old, new, (dtype, (2, 8)), promise=NEAR)
        assert isinstance(found, SiteCheck)
        assert math.isinf(found.overflow)
        assert "overflow" not in summary([found])


def test_underflow_is_named() -> None:
    """A root of a sum of squares is no small number where each square is 0 in fp16."""

    def pooled(x: Var) -> Any:
        return mb.l2_pool(x=x, kernel_sizes=[2, 2], strides=[2, 2], pad_type="valid")

    def squares(x: Var) -> Any:
        mean = mb.avg_pool(x=mb.square(x=x), kernel_sizes=[2, 2], strides=[2, 2], pad_type="valid")
        return mb.sqrt(x=mb.mul(x=mean, y=np.float16(4)))

    image = (types.fp16, (1, 2, 4, 4))
    lost = checked(pooled, squares, image, promise=Promise(REASSOCIATED))
    assert isinstance(lost, SiteCheck)
    assert lost.underflow == 1e-4
    assert "1 underflows fp16 where the old side does not, for numbers of about 0.0001" in summary([lost])
    kept = checked(pooled, pooled, image, promise=Promise(REASSOCIATED))
    assert isinstance(kept, SiteCheck)
    assert not kept.underflow


def times_less(x: Var, times: float) -> Any:
    """X as so many times it less one fewer."""
    return mb.sub(x=mb.mul(x=x, y=np.float16(times)), y=mb.mul(x=x, y=np.float16(times - 1)))


ROWS = (types.fp16, (2, 8))
FINITE = Promise(REASSOCIATED, tolerates_nonfinite=False)


@pytest.mark.parametrize("times", [40.0, 100.0])
def test_digits_that_fp16_loses_of_ordinary_numbers_are_a_difference(times: float) -> None:
    """In fp32 both are alike within the tolerance, in the arithmetic that the edit has they are not."""
    lost = checked(lambda x: times_less(x, 1), lambda x: times_less(x, times), ROWS, promise=FINITE)
    assert isinstance(lost, SiteCheck)
    assert not lost.within(REASSOCIATED)
    assert lost.grade is Grade.NUMBERS
    assert lost.counterexample.startswith("# in fp16")
    back = checked(lambda x: times_less(x, times), lambda x: times_less(x, 1), ROWS, promise=FINITE)
    assert isinstance(back, SiteCheck)
    assert back.within(REASSOCIATED)
    assert back.grade is Grade.PROVED
    assert not back.loses


def test_digits_that_fp16_loses_of_large_numbers_are_named() -> None:
    """A sum with a square is a step of 2 apart from the next one near 64, of 1/1024 for ordinary numbers."""

    def there_and_back(x: Var) -> Any:
        square = mb.mul(x=mb.square(x=x), y=np.float16(0.5))
        return mb.sub(x=mb.add(x=x, y=square), y=square)

    promise = Promise(Tolerance(1e-2), tolerates_nonfinite=False)
    named = checked(lambda x: mb.mul(x=x, y=np.float16(1)), there_and_back, ROWS, promise=promise)
    assert isinstance(named, SiteCheck)
    assert named.within(promise.tolerance)
    assert named.loses == 64
    assert "1 loses digits in fp16 that the old side keeps, for numbers of about 64" in summary([named])
    kept = checked(there_and_back, there_and_back, ROWS, promise=promise)
    assert isinstance(kept, SiteCheck)
    assert "loses" not in summary([kept])
