"""`safe_numbers` says first which hazards it repairs; of a model without any it says nothing of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, types

TARGET = "M4/macOS 15"
REPAIRED = "Numbers that may go wrong in fp16 are repaired (num-square"


def of(body: Callable[[Var], Var]) -> Program:
    made: Program = mb.program(
        input_specs=[mb.TensorSpec((2, 64), dtype=types.fp16)], opset_version=ct.target.iOS17
    )(lambda x: body(x))
    return made


def norm(x: Var) -> Var:
    mean = mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[-1], keep_dims=True)
    made: Var = mb.mul(x=x, y=mb.rsqrt(x=mean, epsilon=np.float16(1e-4)), name="y")
    return made


def test_the_first_line_names_what_is_repaired() -> None:
    done = ane.apply(of(norm), "safe_numbers", target=TARGET, quiet=True)
    assert done.summary.startswith(REPAIRED)
    assert [step.why.startswith("repairs what may go wrong: num-square") for step in done.plan.steps] == [True]
    assert "num-square" not in {f.rule for f in ane.inspect(done.program, TARGET).all_findings}


@pytest.mark.parametrize("body", [lambda x: mb.relu(x=x, name="y"), lambda x: norm(mb.tanh(x=x))])
def test_nothing_is_said_of_what_cannot_go_wrong(body: Callable[[Var], Var]) -> None:
    done = ane.apply(of(body), "safe_numbers", target=TARGET, quiet=True)
    assert bool(done.changes) == done.summary.startswith("Numbers that may go wrong")


def test_a_pass_by_name_claims_no_hazard() -> None:
    done = ane.apply(of(norm), ["rms_norm"], target=TARGET, quiet=True)
    assert done.changes
    assert "may go wrong" not in done.summary
