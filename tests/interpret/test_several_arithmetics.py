"""Several arithmetics at once, op by op: the same numbers as runs one by one, and no more runs than needed."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch

from anesurgery.interpret import Executable
from anesurgery.interpret.core import Plan
from anesurgery.interpret.several_arithmetics import SeveralArithmetics, stored
from anesurgery.mil import Program, Var, ct, mb, types

HALF = np.float16


def chain(length: int = 6) -> Program:
    rng = np.random.default_rng(0)

    @mb.program(input_specs=[mb.TensorSpec((4, 300), dtype=types.fp16)])
    def program(x: Var) -> Any:
        for k in range(length):
            weight = (rng.standard_normal((300, 300)) / 17).astype(HALF)
            x = mb.tanh(x=mb.linear(x=x, weight=weight), name=f"t_{k}")
        return x

    return program


def branches() -> Program:
    @mb.program(input_specs=[mb.TensorSpec((4,), dtype=types.fp16)])
    def program(x: Var) -> Any:
        positive = mb.greater(x=mb.reduce_sum(x=x, axes=[0]), y=HALF(0))
        y = mb.cond(
            pred=positive, _true_fn=lambda: mb.mul(x=x, y=HALF(0.1)), _false_fn=lambda: mb.mul(x=x, y=HALF(3))
        )
        count = mb.while_loop(
            _cond=lambda i, v: mb.less(x=i, y=3),
            _body=lambda i, v: (mb.add(x=i, y=1), mb.mul(x=v, y=HALF(0.3), name="in_loop")),
            loop_vars=(0, y),
        )
        return mb.identity(x=count[1], name="out")

    return program


def remembering() -> Program:
    spec = mb.StateTensorSpec((4,), dtype=types.fp16)

    @mb.program(input_specs=[mb.TensorSpec((4,), dtype=types.fp16), spec], opset_version=ct.target.iOS18)
    def program(x: Var, s: Var) -> Any:
        held = mb.read_state(input=s)
        for _ in range(3):
            held = mb.coreml_update_state(state=s, value=mb.add(x=mb.mul(x=held, y=HALF(0.3)), y=x))
        return mb.mul(x=held, y=HALF(1.1), name="out")

    return program


@pytest.mark.parametrize("make", [chain, branches, remembering])
def test_the_outputs_are_those_of_single_runs(make: Any) -> None:
    program = make()
    shape = (4, 300) if make is chain else (4,)
    values = {"x": np.random.default_rng(1).standard_normal(shape).astype(HALF)}
    both = SeveralArithmetics(program, None, ("fp16", "ane"))
    shown = list(both(values))
    for arithmetic in ("fp32", "fp16", "ane"):
        alone = Executable(program, precision=arithmetic, fuse=False)(values)
        for name, value in alone.items():
            assert np.array_equal(both.outputs[arithmetic][name], value), (arithmetic, name)
    assert [s.op for s in shown] == [s.op for s in both.exact.plan.steps]


def test_what_an_op_reads_is_right() -> None:
    """The wrong version reads what its own arithmetic gave: then nothing tells where an error enters."""
    both = SeveralArithmetics(remembering(), None, ("fp16",))
    values = {"x": np.array([0.1, 0.7, 1.3, 2.9], HALF)}
    shown = {s.op.outputs[0].name: s for s in both(values)}
    last = list(shown.values())[-1]
    update = [s for s in shown.values() if s.op.op_type == "coreml_update_state"][-1]
    right = stored(update.op.outputs[0], update.exact[0])
    wanted = (right * float(HALF(1.1))).half().float()
    assert torch.equal(last.own["fp16"][0], wanted)
    assert not torch.equal(right, update.grown["fp16"][0])


def test_what_a_type_cannot_hold_is_no_wrong_operand() -> None:
    @mb.program(input_specs=[mb.TensorSpec((2,), dtype=types.fp16)])
    def program(x: Var) -> Any:
        return mb.sqrt(x=mb.square(x=x, name="square"), name="root")

    shown = {
        s.op.outputs[0].name: s
        for s in SeveralArithmetics(program, None, ("fp16",))({"x": np.full(2, 2000, HALF)})
    }
    assert torch.isinf(shown["square"].own["fp16"][0]).all()
    assert torch.equal(shown["root"].own["fp16"][0], torch.full((2,), 2000.0))
    assert torch.isinf(shown["root"].grown["fp16"][0]).all()


def test_each_op_is_computed_five_times_and_values_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    take = Plan.take

    def counted(self: Plan, step: Any, *rest: Any) -> None:
        taken.append(step.op)
        take(self, step, *rest)

    monkeypatch.setattr(Plan, "take", counted)
    both = SeveralArithmetics(chain(), None, ("fp16", "ane"))
    alive: list[Any] = []
    for shown in both({"x": np.ones((4, 300), HALF)}):
        alive += [weakref.ref(shown.exact[0]), *(weakref.ref(v[0]) for v in shown.grown.values())]
        assert sum(ref() is not None for ref in alive) <= 6  # of this op and of the one before
    assert len(taken) == 5 * len(both.exact.plan.steps)
    assert not any(e.plan.widened for e in (both.exact, *both.others.values()))
