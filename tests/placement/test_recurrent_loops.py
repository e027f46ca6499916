"""Loops of recurrent networks are named with what was reported of them, and straight code has their numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import anesurgery as ane
from anesurgery.checking.grades import Grade
from anesurgery.facts.loops import MOST_UNROLLED
from anesurgery.mil import Program, Var, ct, mb, quiet_host, types, walk_ops
from anesurgery.placement.rules import slow
from anesurgery.placement.rules.slow import recurrent_step

WIDTH = 16
RNG = np.random.default_rng(0)
Step = Callable[[Var, Var, Var], tuple[Var, Var]]
"""(a row of the input, the state, the cell) -> the state and the cell."""


class Last(nn.Module):
    """All outputs of a GRU, through a product."""

    def __init__(self, **form: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gru = nn.GRU(8, WIDTH, batch_first=True, **form)
        self.head = nn.Linear(WIDTH * (1 + self.gru.bidirectional), 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both."""
        return self.head(self.gru(x)[0])


def converted(net: nn.Module, x: torch.Tensor) -> Any:
    with quiet_host(), torch.no_grad():
        traced = torch.jit.trace(net.eval(), x)  # type: ignore[no-untyped-call]
        return ct.convert(
            traced,
            inputs=[ct.TensorType("x", x.shape)],
            minimum_deployment_target=ct.target.iOS17,
            skip_model_load=True,
        )


def stored(*shape: int) -> np.ndarray[Any, Any]:
    return (RNG.standard_normal(shape) * 0.3).astype(np.float16)


def lstm(row: Var, h: Var, c: Var) -> tuple[Var, Var]:
    both = mb.linear(x=mb.concat(values=[row, h], axis=-1), weight=stored(4 * WIDTH, 8 + WIDTH))
    gates, new = mb.split(x=both, split_sizes=[3 * WIDTH, WIDTH], axis=-1)
    i, f, o = mb.split(x=mb.sigmoid(x=gates), num_splits=3, axis=-1)
    c = mb.add(x=mb.mul(x=f, y=c), y=mb.mul(x=i, y=mb.tanh(x=new)))
    return mb.mul(x=o, y=mb.tanh(x=c)), c


def rnn(row: Var, h: Var, c: Var) -> tuple[Var, Var]:
    return mb.tanh(x=mb.linear(x=mb.concat(values=[row, h], axis=-1), weight=stored(WIDTH, 8 + WIDTH))), c


def feed_forward(row: Var, h: Var, c: Var) -> tuple[Var, Var]:
    """No recurrent network: layers of a perceptron beside a residual stream."""
    inner = mb.relu(x=mb.linear(x=h, weight=stored(2 * WIDTH, WIDTH)))
    return mb.add(x=h, y=mb.linear(x=inner, weight=stored(WIDTH, 2 * WIDTH))), c


def gates_of_the_input(row: Var, h: Var, c: Var) -> tuple[Var, Var]:
    """No recurrent network: the gates do not read the state."""
    gates = mb.sigmoid(x=mb.linear(x=row, weight=stored(2 * WIDTH, 8)))
    keep, _ = mb.split(x=gates, num_splits=2, axis=-1)
    new = mb.tanh(x=mb.linear(x=row, weight=stored(WIDTH, 8)))
    return mb.add(x=h, y=mb.mul(x=keep, y=new)), c


def loop(step: Step, rounds: int = 6) -> Program:
    specs = [mb.TensorSpec((rounds, 8), dtype=types.fp16)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        def body(i: Var, h: Var, c: Var) -> tuple[Var, Var, Var]:
            row = mb.gather(x=x, indices=i, axis=0)
            return mb.add(x=i, y=np.int32(1)), *step(mb.reshape(x=row, shape=(1, 8)), h, c)

        state = mb.mul(x=np.zeros((1, WIDTH), np.float16), y=mb.reduce_sum(x=x))
        test = lambda i, h, c: mb.less(x=i, y=np.int32(rounds))  # noqa: E731
        start = (np.int32(0), state, state)
        return mb.while_loop(_cond=test, _body=body, loop_vars=start, name="loop")[1]

    return program


def steps(program: Program) -> list[str]:
    ops = [op for op in walk_ops(program) if op.op_type == "while_loop"]
    assert ops
    return [recurrent_step(op) for op in ops]


TORCH: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "one way": ({}, (1, 12, 8)),
    "both ways": ({"bidirectional": True}, (1, 5, 8)),
    "a batch": ({}, (3, 7, 8)),
    "two layers": ({"num_layers": 2}, (1, 4, 8)),
}


@pytest.mark.parametrize("name", TORCH)
def test_a_gru_of_torch_is_named_and_right_when_repaired(name: str) -> None:
    form, shape = TORCH[name]
    net, x = Last(**form), torch.randn(shape)
    model = converted(net, x)
    loops = [f for f in ane.inspect(model, "M4").all_findings if f.rule == "recurrent-loop"]
    assert len(loops) == net.gru.num_layers * (1 + net.gru.bidirectional)
    for f in loops:
        assert f"steps through a GRU in {shape[1]} rounds" in f.message
        assert (f.remedy, f.source.split(";")[0]) == ("unroll_loop", "webmachinelearning/webnn: issue 689")
    with torch.no_grad():
        wanted = net(x).numpy()
    repaired = ane.apply(model, "auto", target="M4")
    (got,) = ane.run(repaired.model, {"x": x.numpy()}, precision="fp16").values()
    assert np.abs(got - wanted).max() < 5e-3
    assert not any(op.op_type == "while_loop" for op in walk_ops(repaired.program))


@pytest.mark.parametrize(
    ("step", "wanted"), [(lstm, "an LSTM"), (rnn, "a simple RNN"), (feed_forward, ""), (gates_of_the_input, "")]
)
def test_the_gates_tell_the_network(step: Step, wanted: str) -> None:
    assert steps(loop(step)) == [wanted]


def test_the_estimate_of_straight_code_is_that_of_the_unrolled_program() -> None:
    """Of what both have: slices and the joining of rows are not in the loop."""
    program = loop(lstm)
    (found,) = (f for f in ane.inspect(program, "M4").all_findings if f.rule == "recurrent-loop")
    said = float(re.findall(r"straight code ([\d.]+)", found.message)[0])
    rows = ane.inspect(ane.apply(program, ["unroll_loop"], prove=None).program, "M4").ops
    same = [r for r in rows if r.op_type in slow.OPS_AFTER_UNROLLING and r.dtype == "fp16"]
    assert said == pytest.approx(sum(r.estimate.cpu or 0.0 for r in same if r.estimate), rel=0.02)


@pytest.mark.parametrize(("length", "remedy"), [(MOST_UNROLLED, "unroll_loop"), (MOST_UNROLLED + 1, None)])
def test_unrolling_is_advised_for_loops_that_the_pass_takes(length: int, remedy: str | None) -> None:
    net, x = Last(), torch.randn(1, length, 8)
    model = converted(net, x)
    found = [f for f in ane.inspect(model, "M4").all_findings if f.rule in ("control-flow", "recurrent-loop")]
    assert {f.rule: f.remedy for f in found} == {"control-flow": remedy, "recurrent-loop": remedy}
    assert all("a GRU" in f.message for f in found)
    refusals = ane.apply(model, "unroll_loop", target="M4", quiet=True).refusals
    assert bool(refusals) == (remedy is None)


@pytest.mark.parametrize("both", [False, True])
def test_the_straight_code_of_a_gru_has_the_same_bits(both: bool) -> None:
    """Its first state is 0, its rows are added to zeros, and the loop hands on fp16 values as fp32."""
    model = ane.load(converted(Last(bidirectional=both), torch.zeros(2, 3, 8)))
    made = ane.apply(model, "unroll_loop", quiet=True)
    assert {change.proof and change.proof.grade for change in made.changes} == {Grade.BITS}
