"""What a trial costs: ops that an edit left are not judged again, and their verdicts are those judged anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar

import pytest

from anesurgery import registry
from anesurgery.files.package import Loaded
from anesurgery.mil import Operation, Program, Var, ct, mb, types
from anesurgery.placement.score import Score, placed
from anesurgery.placement.target import Target
from anesurgery.placement.verdicts import Known
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.ml_program import MLProgram
from anesurgery.rewriting.pattern import Match, OpPattern, Ops
from anesurgery.rewriting.rewrite import Rewrite
from anesurgery.rewriting.session import Session
from anesurgery.rewriting.step_trials import Trial, Trials

TARGET = Target.parse("M4/macOS 15")


def tried(program: Program, step: Any) -> tuple[Trial, Trial] | None:
    """The model as given and after a step, both scored; None where the step changes nothing."""
    start, trials = Trial(MLProgram(Loaded(program)), TARGET, Session()), Trials(Session())
    assert start.score_if_any is not None
    new = trials.after(start, step)
    return (start, new) if isinstance(new, Trial) else None


@dataclass(frozen=True)
class TanhToExp(Rewrite):
    """At one site, or at all."""

    name: ClassVar[str] = "tanh_to_exp"
    only: str = ""

    def pattern(self, op: Ops) -> OpPattern:
        return op.tanh()

    def check(self, m: Match) -> Match | None:
        return m if self.only in ("", m.root.outputs[0].name) else None

    def rewrite(self, mb: Builder, m: Match) -> Var:
        return mb.exp(x=m.root.x)


def layers(count: int) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((1, 8, 4, 4), types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        for i in range(count):
            x = mb.relu(x=mb.tanh(x=x, name=f"tanh_{i}"))
        return x

    return program


@pytest.mark.parametrize(("only", "most"), [("tanh_96", 3), ("", 384)])
def test_an_edit_costs_its_neighbours(only: str, most: int) -> None:
    """The wrong version: an edit at one of 192 sites costs as much as one at all."""
    both = tried(layers(192), TanhToExp(only))
    assert both is not None
    known = both[0].known
    assert known.judged == 384
    assert both[1].score.ops == 384
    assert known.judged - 384 <= most
    assert known.judged > 384


def differing() -> Iterator[str]:
    """The passes after whose example a score differs from that of the same model judged anew."""
    for name in registry.op_pass_names():
        step = registry.pass_class(name)
        if (
            step.asked_for
            or step.costly
            or (both := tried(import_module(step.__module__).example(), step())) is None
        ):
            continue
        anew = Score.of(placed(both[1].subject.program, TARGET))
        if replace(both[1].score, findings=0) != replace(anew, findings=0):
            yield name


def test_what_is_reused_is_what_would_be_judged_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: verdicts by op alone, whose operands and readers an edit may have changed."""
    assert not list(differing())

    def by_op(self: Known, op: Operation) -> Iterator[Any]:
        yield self.origins.get(op, op)

    monkeypatch.setattr(Known, "_cache_key_parts", by_op)
    assert list(differing())
