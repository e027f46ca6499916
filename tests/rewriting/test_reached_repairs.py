"""Repairs that the inputs at hand ask for: only where outputs are wrong, and only those that are right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from anesurgery.mil import Array, Program, Var, mb, types
from anesurgery.passes.fuse_exponential import FuseExponential
from anesurgery.passes.scale_powers import ScalePowers
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.exact_steps import yardstick
from anesurgery.rewriting.passes import Pass
from anesurgery.rewriting.pattern import Match
from anesurgery.rewriting.reached_repairs import reached_repairs
from anesurgery.rewriting.session import Session

LOUD, QUIET = (np.full((2, 8), size, np.float16) for size in (300, 2))


class _TenthMore(ScalePowers):
    name = "a_tenth_more"

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Finite, and wrong."""
        more: Var = mb.mul(x=super().rewrite(mb, m), y=1.1)
        return more


def small_square() -> Program:
    @mb.program(input_specs=[mb.TensorSpec((2, 8), dtype=types.fp16)])
    def program(x: Var) -> Var:
        return mb.mul(x=mb.square(x=x), y=np.float16(1e-3), name="y")

    return program


def names(steps: tuple[Pass, ...], x: Array, *, prove_sites: bool = True) -> list[str] | None:
    """The repairs that stay."""
    session = Session(target="M1/macOS 14", inputs={"x": x}, prove_sites=prove_sites)
    program = small_square()
    reached = reached_repairs(steps, program, session, replace(yardstick(program, session), seeds=1))
    return None if reached is None else [step.name for step in reached.steps]


def test_right_outputs_ask_for_nothing() -> None:
    assert names((ScalePowers(),), QUIET) is None


def test_what_changes_nothing_does_not_stay() -> None:
    assert names((FuseExponential(), ScalePowers()), LOUD) == ["scale_powers"]


def test_a_repair_whose_check_fails_is_left_out() -> None:
    """The wrong version looks at no site: a finite number is nearer than an infinite one, right or wrong."""
    assert names((_TenthMore(),), LOUD, prove_sites=False) == ["a_tenth_more"]
    assert names((_TenthMore(),), LOUD) is None
    assert names((_TenthMore(), ScalePowers()), LOUD) == ["scale_powers"]
