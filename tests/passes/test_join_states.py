"""Joined states: what was apart stays apart, and what cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from decoders import Decoder
from pass_cases import refuses, table
from state_programs import EDITED, NESTED, SHAPE, stream

from anesurgery.interpret import Predictor
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.passes.join_states import JoinStates
from anesurgery.passes.pad_state import PadState
from anesurgery.testing import apply_pass, assert_refuses, reasons


def two_states(order: str = "kkvv") -> Program:
    """Two states of other heights; `order` says when each is read and written."""
    specs = [mb.TensorSpec((1, 4), types.fp16), mb.TensorSpec((1,), types.int32)]
    states = [mb.StateTensorSpec((n, 4), dtype=types.fp16) for n in (5, 3)]

    @mb.program(input_specs=[*specs, *states], opset_version=ct.target.iOS18)
    def program(n: Var, at: Var, k: Var, v: Var) -> Var:
        b = mb.concat(values=(at, np.array([0], np.int32)), axis=0)
        e = mb.add(x=b, y=np.array([1, 4], np.int32))
        held: dict[str, Var] = {}
        for name in order:
            state, factor = {"k": (k, 1), "v": (v, 2)}[name]
            if name not in held:
                held[name] = mb.read_state(input=state)
                continue
            new = mb.mul(x=n, y=np.float16(factor))
            value = mb.slice_update(x=held[name], update=new, begin=b, end=e, end_mask=[False, name == "k"])
            held[name] = mb.coreml_update_state(state=state, value=value)
        total = mb.reduce_sum(x=held["k"], axes=[0], keep_dims=True)
        return mb.add(x=total, y=mb.reduce_sum(x=held["v"], axes=[0], keep_dims=True), name="y")

    return program


def steps(program: Program) -> np.ndarray[Any, Any]:
    """Three calls with one state."""
    predictor = Predictor(program)
    state, rng = predictor.make_state(), np.random.default_rng(0)
    calls = [
        {"n": rng.standard_normal((1, 4)).astype(np.float16), "at": np.array([i], np.int32)} for i in range(3)
    ]
    return np.stack([predictor(values, state=state)["y"] for values in calls])


@pytest.mark.parametrize("order", ["kkvv", "vvkk", "kvkv", "kvvk"])
def test_joined_states_keep_apart(order: str) -> None:
    program = two_states(order)
    after, session = apply_pass(JoinStates(), program)
    assert session.changes
    np.testing.assert_array_equal(steps(after), steps(program))
    padded, _ = apply_pass(PadState(), after)
    np.testing.assert_array_equal(steps(padded), steps(program))


def test_refusals() -> None:
    assert_refuses(JoinStates(), Decoder(half=True).program(), "no two states agree")
    _, session = apply_pass(JoinStates(), two_states("kkkvv"))
    assert reasons(session) == []
    _, session = apply_pass(JoinStates(), late())
    assert reasons(session) == ["it updates what is not in the state at that time"]


def late() -> Program:
    """An update of what was read before another write."""
    states = [mb.StateTensorSpec((2, 4), dtype=types.fp16) for _ in range(2)]

    @mb.program(input_specs=[mb.TensorSpec((1, 4), types.fp16), *states], opset_version=ct.target.iOS18)
    def program(n: Var, k: Var, v: Var) -> Var:
        held = mb.read_state(input=k)
        for row in range(2):
            value = mb.slice_update(x=held, update=n, begin=[row, 0], end=[row + 1, 4])
            made = mb.coreml_update_state(state=k, value=value)
        return mb.add(x=made, y=mb.read_state(input=v), name="y")

    return program


def beside_another(body: Callable[..., Any]) -> Program:
    """A program with its state, and another one."""
    specs = [mb.TensorSpec(SHAPE, types.fp16), *(mb.StateTensorSpec(SHAPE, dtype=types.fp16) for _ in "st")]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(x: Var, s: Var, t: Var) -> tuple[Var, ...]:
        sums = mb.coreml_update_state(state=t, value=mb.add(x=mb.read_state(input=t), y=x))
        outputs = body(x, s)
        return (*(outputs if isinstance(outputs, tuple) else (outputs,)), mb.add(x=sums, y=x, name="z"))

    made: Program = program
    return made


@pytest.mark.parametrize("body", EDITED)
def test_a_stream_goes_on(body: Callable[..., Any]) -> None:
    before = beside_another(body)
    after, session = apply_pass(JoinStates(), before)
    assert session.changes
    for wanted, given in zip(stream(before), stream(after), strict=True):
        assert all(np.array_equal(wanted[n], given[n]) for n in wanted)


test_cases, test_surroundings = table(
    JoinStates(), *(refuses("the state s is used inside a", beside_another, body) for body in NESTED)
)
