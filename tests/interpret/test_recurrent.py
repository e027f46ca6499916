"""Recurrent ops: against torch's modules, and against loops written from the formulas of the documentation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close

import anesurgery as ane
from anesurgery.mil import Array, Var, ct, mb

RNG = np.random.default_rng(0)
S, B, IN, H = 5, 2, 3, 4
OneOp = Callable[..., list[Array]]

ACT: dict[str, Callable[[Array], Array]] = {
    "tanh": np.tanh,
    "scaled_tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "hard_sigmoid": lambda x: np.minimum(np.maximum(0.2 * x + 0.5, 0), 1),
    "sigmoid_hard": lambda x: np.minimum(np.maximum(0.2 * x + 0.5, 0), 1),
    "relu": lambda x: np.maximum(x, 0),
    "linear": lambda x: x,
}
DIRECTIONS = ["forward", "reverse"]
OPSETS = [ct.target.iOS15, ct.target.iOS17, ct.target.iOS18]


def floats(*shape: int) -> Array:
    return RNG.uniform(-1, 1, shape).astype(np.float32)


def weights(gates: int, suffix: str = "") -> dict[str, Array]:
    named = {"weight_ih": (gates * H, IN), "weight_hh": (gates * H, H), "bias": (gates * H,)}
    return {k + suffix: floats(*shape) for k, shape in named.items()}


def ordered(array: Array, gates: int, order: list[int]) -> torch.Tensor:
    """The gates of a weight in another order."""
    parts = np.split(array, gates)
    return torch.from_numpy(np.concatenate([parts[i] for i in order]))


def assert_all_close(found: list[Array], expected: list[Any], rtol: float = 1e-6) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, rtol)


def loop(x: Array, states: list[Array], step: Any, direction: str) -> list[Array]:
    """Every output in the order in which it was made, then the last states."""
    made = []
    for row in x[::-1] if direction == "reverse" else x:
        states = step(row.astype(np.float64), *states)
        made.append(states[0])
    return [np.stack(made), *states]


def last_only(expected: list[Array], output_sequence: bool) -> list[Array]:
    return expected if output_sequence else [expected[0][-1:], *expected[1:]]


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("output_sequence", [True, False])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rnn_as_torch_has_it(one_op: OneOp, direction: str, output_sequence: bool, opset: Any) -> None:
    x, h, w = floats(S, B, IN), floats(B, H), weights(1)
    for activation in ("tanh", "relu"):
        module = torch.nn.RNN(IN, H, nonlinearity=activation)
        state = {"weight_ih_l0": w["weight_ih"], "weight_hh_l0": w["weight_hh"]}
        state |= {"bias_ih_l0": w["bias"], "bias_hh_l0": 0 * w["bias"]}
        module.load_state_dict({k: torch.from_numpy(v) for k, v in state.items()})
        t = torch.from_numpy(x)
        with torch.no_grad():
            y, last = module(t.flip(0) if direction == "reverse" else t, torch.from_numpy(h)[None])
        found = one_op(
            "rnn",
            opset,
            x=x,
            initial_h=h,
            direction=direction,
            output_sequence=output_sequence,
            activation=activation,
            **w,
        )
        assert_all_close(found, last_only([y, last[0]], output_sequence))


@pytest.mark.parametrize("activation", ACT)
def test_rnn_with_every_activation(one_op: OneOp, activation: str) -> None:
    x, h, w = floats(S, B, IN), floats(B, H), weights(1)
    del w["bias"]

    def step(row: Array, h: Array) -> list[Array]:
        return [ACT[activation](row @ w["weight_ih"].T + h @ w["weight_hh"].T)]

    found = one_op("rnn", x=x, initial_h=h, activation=activation, output_sequence=True, **w)
    assert_all_close(found, loop(x, [h], step, "forward"), 1e-5)


@pytest.mark.parametrize("length", [1, S])
@pytest.mark.parametrize("output_sequence", [True, False])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gru_with_the_reset_gate_after_is_that_of_torch(
    one_op: OneOp, direction: str, output_sequence: bool, length: int
) -> None:
    x, h, w, input_bias = floats(length, B, IN), floats(B, H), weights(3), floats(3 * H)
    module = torch.nn.GRU(IN, H)  # torch orders the gates reset, update, new and MIL r, o, z
    state = {"weight_ih_l0": w["weight_ih"], "weight_hh_l0": w["weight_hh"]}
    state |= {"bias_ih_l0": input_bias, "bias_hh_l0": w["bias"]}
    module.load_state_dict({k: ordered(v, 3, [0, 2, 1]) for k, v in state.items()})
    t = torch.from_numpy(x)
    with torch.no_grad():
        y, last = module(t.flip(0) if direction == "reverse" else t, torch.from_numpy(h)[None])
    found = one_op(
        "gru",
        x=x,
        initial_h=h,
        reset_after=True,
        input_bias=input_bias,
        direction=direction,
        output_sequence=output_sequence,
        **w,
    )
    assert_all_close(found, last_only([y, last[0]], output_sequence))


def gru_step(w: dict[str, Array], gate: str, act: str) -> Any:
    """The documented step: the reset gate multiplies h before the product."""
    (ir, io, iz), (hr, ho, hz) = np.split(w["weight_ih"], 3), np.split(w["weight_hh"], 3)
    br, bo, bz = np.split(w.get("bias", np.zeros(3 * H)), 3)

    def step(x: Array, h: Array) -> list[Array]:
        r = ACT[gate](x @ ir.T + h @ hr.T + br)
        z = ACT[gate](x @ iz.T + h @ hz.T + bz)
        o = ACT[act](x @ io.T + (r * h) @ ho.T + bo)
        return [(1 - z) * o + z * h]

    return step


SIZES = {"lstm": 4, "gru": 3, "rnn": 1, "matmul": 1, "linear": 1}


@pytest.mark.parametrize("precision", ["fp32", "fp16", "ane"])
@pytest.mark.parametrize("kind", SIZES)
def test_the_layout_of_an_operand_changes_no_bit(kind: str, precision: str) -> None:
    """torch adds in the order of the memory, which a transpose upstream changes, also one of an axis of 1."""
    draw = np.random.default_rng(0)
    rows, fed_back = (
        draw.standard_normal((SIZES[kind] * 65, n)).astype(np.float16).astype(np.float32) for n in (33, 65)
    )
    x = draw.standard_normal((5, 1, 33)).astype(np.float16).astype(np.float32)

    def compute(x: Var) -> Var:
        if kind == "linear":
            return mb.linear(x=x, weight=rows, name="y")
        if kind == "matmul":
            return mb.matmul(x=x, y=rows.T.copy(), name="y")
        states = dict.fromkeys(["initial_h", *["initial_c"] * (kind == "lstm")], np.zeros((1, 65), np.float32))
        return getattr(mb, kind)(
            x=x, **states, weight_ih=rows, weight_hh=fed_back, output_sequence=True, name="y"
        )[0]

    def run(perm: tuple[int, int, int]) -> Array:
        turned = x.transpose(perm).copy()
        program = mb.program(input_specs=[mb.TensorSpec(turned.shape)], opset_version=ct.target.iOS17)(
            lambda x: compute(mb.transpose(x=x, perm=np.argsort(perm)))
        )
        return next(iter(ane.run(program, {"x": turned}, precision=precision).values()))

    straight = run((0, 1, 2))
    for perm in ((1, 0, 2), (2, 1, 0)):
        np.testing.assert_array_equal(run(perm), straight)


@pytest.mark.one_of(5)
@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("gate", ["sigmoid", "tanh", "hard_sigmoid"])
@pytest.mark.parametrize("act", ["tanh", "sigmoid", "relu", "scaled_tanh"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gru_as_documented(one_op: OneOp, opset: Any, gate: str, act: str, direction: str) -> None:
    x, h = floats(S, B, IN), floats(B, H)
    for w in (weights(3), {k: v for k, v in weights(3).items() if k != "bias"}):
        expected = loop(x, [h], gru_step(w, gate, act), direction)
        for output_sequence in (True, False):
            found = one_op(
                "gru",
                opset,
                x=x,
                initial_h=h,
                direction=direction,
                recurrent_activation=gate,
                activation=act,
                output_sequence=output_sequence,
                **w,
            )
            assert_all_close(found, last_only(expected, output_sequence), 1e-5)


def test_gru_adds_both_biases_where_the_reset_gate_comes_before(one_op: OneOp) -> None:
    x, h, w, extra = floats(S, B, IN), floats(B, H), weights(3), floats(3 * H)
    found = one_op("gru", x=x, initial_h=h, input_bias=extra, output_sequence=True, **w)
    both = w | {"bias": w["bias"] + extra}
    assert_all_close(found, loop(x, [h], gru_step(both, "sigmoid", "tanh"), "forward"), 1e-5)


def lstm_step(w: dict[str, Array], acts: tuple[str, str, str], clip: float | None) -> Any:
    """The documented step; peephole weights read c before, for the output gate after, and c is clipped."""
    (ii, fi, oi, zi), (ih, fh, oh, zh) = np.split(w["weight_ih"], 4), np.split(w["weight_hh"], 4)
    bi, bf, bo, bz = np.split(w.get("bias", np.zeros(4 * H)), 4)
    pi, pf, po = np.split(w.get("peephole", np.zeros(3 * H)), 3)
    gate, cell, out = (ACT[a] for a in acts)

    def step(x: Array, h: Array, c: Array) -> list[Array]:
        i = gate(x @ ii.T + h @ ih.T + bi + pi * c)
        f = gate(x @ fi.T + h @ fh.T + bf + pf * c)
        z = cell(x @ zi.T + h @ zh.T + bz)
        c = f * c + i * z
        c = c if clip is None else np.clip(c, -clip, clip)
        o = gate(x @ oi.T + h @ oh.T + bo + po * c)
        return [o * out(c), c]

    return step


def lstm_expected(
    x: Array,
    h: Array,
    c: Array,
    w: dict[str, Array],
    acts: tuple[str, str, str],
    clip: float | None,
    direction: str,
) -> list[Array]:
    """Sequence, h, c; in both directions the backward half is in the order of time."""
    if direction != "bidirectional":
        return loop(x, [h, c], lstm_step(w, acts, clip), direction)
    back = {k.removesuffix("_back"): v for k, v in w.items() if k.endswith("_back")}
    ahead = loop(x, [h[:, :H], c[:, :H]], lstm_step(w, acts, clip), "forward")
    behind = loop(x, [h[:, H:], c[:, H:]], lstm_step(back, acts, clip), "reverse")
    behind[0] = behind[0][::-1]
    return [np.concatenate(pair, -1) for pair in zip(ahead, behind, strict=True)]


@pytest.mark.one_of(5)
@pytest.mark.parametrize("direction", [*DIRECTIONS, "bidirectional"])
@pytest.mark.parametrize("form", ["plain", "no bias", "peephole", "clip", "peephole and clip"])
@pytest.mark.parametrize("length", [1, S])
@pytest.mark.parametrize("opset", OPSETS)
def test_lstm_as_documented(one_op: OneOp, direction: str, form: str, length: int, opset: Any) -> None:
    ways = 2 if direction == "bidirectional" else 1
    x, h, c = floats(length, B, IN), floats(B, ways * H), floats(B, ways * H)
    w = weights(4) | (weights(4, "_back") if ways == 2 else {})
    if "peephole" in form:
        w |= {k.replace("bias", "peephole"): floats(3 * H) for k in list(w) if "bias" in k}
    w = {k: v for k, v in w.items() if form != "no bias" or "bias" not in k}
    clip = {"clip": np.float32(0.2)} if "clip" in form else {}
    acts = ("sigmoid", "tanh", "tanh")
    y, last_h, last_c = lstm_expected(x, h, c, w, acts, 0.2 if clip else None, direction)
    given = {"x": x, "initial_h": h, "initial_c": c, "direction": direction, **w, **clip}
    whole = one_op("lstm", opset, output_sequence=True, **given)
    assert_all_close(whole, [y, last_h, last_c])
    assert_all_close(one_op("lstm", opset, **given), [last_h[None], last_h, last_c])


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("activation", [a for a in ACT if a != "sigmoid_hard"])
def test_lstm_with_every_activation_in_every_place(one_op: OneOp, activation: str, place: int) -> None:
    names = ["sigmoid", "tanh", "tanh"]
    names[place] = activation
    x, h, c, w = floats(S, B, IN), floats(B, H), floats(B, H), weights(4)
    gate, cell, out = names
    expected = lstm_expected(x, h, c, w, (gate, cell, out), None, "forward")
    found = one_op(
        "lstm",
        x=x,
        initial_h=h,
        initial_c=c,
        recurrent_activation=gate,
        cell_activation=cell,
        activation=out,
        output_sequence=True,
        **w,
    )
    assert_all_close(found, expected, 1e-5)
