"""Recurrent ops step by step: every kind, direction, activation and state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.checking.grades import Grade
from anesurgery.errors import ProofError
from anesurgery.mil import Program, Var, ct, mb, walk_ops
from anesurgery.ops import RECURRENT
from anesurgery.passes import unroll_recurrent
from anesurgery.passes.unroll_recurrent import UnrollRecurrent
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers, random_inputs

STEPS, BATCH, INPUT, HIDDEN = 5, 2, 3, 4
GATES = {"lstm": 4, "gru": 3, "rnn": 1}


def floats(*shape: int, seed: int = 0) -> Any:
    return (np.random.default_rng((seed, *shape)).standard_normal(shape) * 0.7).astype(np.float32)


def recurrent(kind: str, steps: Any = STEPS, constant_state: bool = False, **more: Any) -> Program:
    """An op with random weights, all its results as outputs."""
    gates, ways = GATES[kind], 2 if more.get("direction") == "bidirectional" else 1
    width = ways * HIDDEN

    def body(x: Var, h: Var, c: Var) -> Any:
        states = {"initial_h": floats(BATCH, width) if constant_state else h}
        states |= {"initial_c": np.zeros((BATCH, width), np.float32) if constant_state else c}
        states = states if kind == "lstm" else {"initial_h": states["initial_h"]}
        sides = [""] if ways == 1 else ["", "_back"]
        weights = {f"weight_ih{s}": floats(gates * HIDDEN, INPUT, seed=len(s)) for s in sides}
        weights |= {f"weight_hh{s}": floats(gates * HIDDEN, HIDDEN, seed=len(s)) for s in sides}
        return tuple(getattr(mb, kind)(x=x, **states, **weights, **more, name="y"))

    shapes = ((steps, BATCH, INPUT), (BATCH, width), (BATCH, width))
    specs = [mb.TensorSpec(shape) for shape in shapes]
    built: Program = mb.program(input_specs=specs)(body)
    return built


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lstm": ("lstm", {}),
    "lstm sequence": ("lstm", {"output_sequence": True, "bias": floats(4 * HIDDEN)}),
    "lstm one step": ("lstm", {"steps": 1, "output_sequence": True}),
    "lstm reverse": ("lstm", {"direction": "reverse", "output_sequence": True}),
    "lstm both": (
        "lstm",
        {
            "direction": "bidirectional",
            "output_sequence": True,
            "bias": floats(4 * HIDDEN),
            "bias_back": floats(4 * HIDDEN, seed=1),
            "peephole": floats(3 * HIDDEN),
            "peephole_back": floats(3 * HIDDEN, seed=1),
        },
    ),
    "lstm both, last only": ("lstm", {"direction": "bidirectional"}),
    "lstm peephole and clip": ("lstm", {"peephole": floats(3 * HIDDEN), "clip": np.float32(0.3)}),
    "lstm other activations": (
        "lstm",
        {"recurrent_activation": "hard_sigmoid", "cell_activation": "relu", "activation": "linear"},
    ),
    "lstm constant states": ("lstm", {"constant_state": True, "peephole": floats(3 * HIDDEN)}),
    "gru": ("gru", {"bias": floats(3 * HIDDEN), "output_sequence": True}),
    "gru reverse": ("gru", {"direction": "reverse", "output_sequence": True}),
    "gru other activations": ("gru", {"recurrent_activation": "hard_sigmoid", "activation": "scaled_tanh"}),
    "gru constant state": ("gru", {"constant_state": True}),
    "rnn": ("rnn", {"output_sequence": True, "bias": floats(HIDDEN)}),
    "rnn reverse": ("rnn", {"direction": "reverse", "activation": "relu"}),
}


@pytest.mark.quick_cases(
    "lstm one step",
    "lstm reverse",
    "lstm peephole and clip",
    "gru reverse",
    "gru other activations",
    "rnn",
    "rnn reverse",
)
@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", CASES)
def test_each_kind_keeps_its_numbers(name: str) -> None:
    kind, options = CASES[name]
    program = recurrent(kind, **options)
    after, session = apply_pass(UnrollRecurrent(), program)
    assert not any(op.op_type in RECURRENT for op in walk_ops(after)), session.refusals
    assert all(c.proof is not None and c.proof.grade is Grade.PROVED for c in session.changes)
    assert_same_numbers(program, after, random_inputs(program, seed=1), rtol=1e-5)


def test_a_state_of_zeros_costs_no_product() -> None:
    zeros: dict[str, Any] = {"steps": 1, "constant_state": True}
    with_state, without = recurrent("rnn", **zeros), recurrent("lstm", **zeros)
    counts = [
        sum(op.op_type == "linear" for op in walk_ops(apply_pass(UnrollRecurrent(), p)[0]))
        for p in (with_state, without)
    ]
    assert counts == [2, 2]
    zero_cell = [op.op_type for op in walk_ops(apply_pass(UnrollRecurrent(), without)[0])]
    assert zero_cell.count("mul") == 2


def test_refusals_name_the_value() -> None:
    assert_refuses(UnrollRecurrent(max_steps=4), recurrent("gru"), "the sequence has 5 steps; max_steps is 4")
    from coremltools.converters.mil.mil import get_new_symbol

    dynamic = recurrent("lstm", steps=get_new_symbol())
    assert_refuses(UnrollRecurrent(), dynamic, "%x has the symbolic shape")
    with pytest.raises(ane.SurgeryError, match="max_steps=0; it must be a positive integer"):
        UnrollRecurrent(max_steps=0)


def test_a_gru_with_compressed_weights_keeps_them_so() -> None:
    lut = np.linspace(-1, 1, 16).astype(np.float32)

    @mb.program(input_specs=[mb.TensorSpec((1, 1, 4))], opset_version=ct.target.iOS16)
    def program(x: Var) -> Any:
        weight = mb.constexpr_lut_to_dense(
            indices=np.arange(24, dtype=np.uint8), lut=lut, shape=np.array([12, 4], np.uint32)
        )
        return mb.gru(x=x, initial_h=floats(1, 4), weight_ih=floats(12, 4), weight_hh=weight)[1]

    after, _ = apply_pass(UnrollRecurrent(), program)
    assert [op.op_type for op in walk_ops(after)].count("constexpr_lut_to_dense") == 2
    assert_same_numbers(program, after, rtol=1e-5)


def test_gates_in_a_wrong_order_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: cell and output gate exchanged."""
    right = unroll_recurrent.STEPS["gru"]

    def wrong(mb: Any, op: Any, suffix: str) -> Any:
        step = right(mb, op, suffix)
        return lambda row, states: step(mb.reverse(x=row, axes=[-1]), states)

    monkeypatch.setitem(unroll_recurrent.STEPS, "gru", wrong)
    with pytest.raises(ProofError, match="old and new differ"):
        apply_pass(UnrollRecurrent(), recurrent("gru"))


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    "name",
    ["silero_unified.mlpackage", "silero_unified_palette_4bit.mlpackage", "mlt_es2en_char_decoder16.mlmodel"],
)
def test_real_models_have_no_recurrent_op_left(name: str, corpus: Path) -> None:
    path = corpus / name
    model = path if path.suffix == ".mlpackage" else ane.upgrade(path, precision="fp32")
    surgery = ane.apply(model, "unroll_recurrent", quiet=True)
    assert not RECURRENT & {op.op_type for op in walk_ops(surgery.program)}
    comparison = ane.compare(model, surgery.program, gate=100)
    assert all(o.max_rel <= 1e-5 for o in comparison.outputs), comparison
    found = ane.inspect(surgery.program, target="M4/macOS 15")
    assert not any(f.rule == "op-lstm" for row in found.ops for f in row.findings)


@pytest.mark.one_of(15)
@pytest.mark.parametrize("still", [False, True], ids=["state", "zeros"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    "more",
    [
        {"reset_after": True, "bias": floats(3 * HIDDEN)},
        {"reset_after": True},
        {"input_bias": floats(3 * HIDDEN, seed=2)},
        {"reset_after": True, "bias": floats(3 * HIDDEN), "input_bias": floats(3 * HIDDEN, seed=2)},
    ],
    ids=["reset after", "no bias", "input bias", "both"],
)
def test_what_only_the_gru_of_ios_18_has(more: Any, sequence: bool, still: bool) -> None:
    @mb.program(
        input_specs=[mb.TensorSpec((STEPS, BATCH, INPUT)), mb.TensorSpec((BATCH, HIDDEN))],
        opset_version=ct.target.iOS18,
    )
    def program(x: Var, h: Var) -> Any:
        weights = {"weight_ih": floats(3 * HIDDEN, INPUT), "weight_hh": floats(3 * HIDDEN, HIDDEN)}
        state = np.zeros((BATCH, HIDDEN), np.float32) if still else h
        made = mb.gru(x=x, initial_h=state, output_sequence=sequence, **weights, **more)
        return (*made, mb.relu(x=h))

    after, session = apply_pass(UnrollRecurrent(), program)
    assert not RECURRENT & {op.op_type for op in walk_ops(after)}, session.refusals
    assert session.changes[0].proof is not None
    assert_same_numbers(program, after, random_inputs(program, seed=1), rtol=1e-5)
