"""`certify` of choices, of many calls, and of outputs that show nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anesurgery as ane
from anesurgery.errors import SurgeryError
from anesurgery.mil import Program, Var, ct, mb, types

HALF = np.float16
RNG = np.random.default_rng(0)


def program(body: Any, *shapes: tuple[int, ...]) -> Program:
    specs = [mb.TensorSpec(shape, dtype=types.fp16) for shape in shapes]
    arguments = ", ".join("abcd"[: len(shapes)])
    scope: dict[str, Any] = {"body": body}
    exec(f"def function({arguments}):\n    return body({arguments})", scope)  # the builder reads the names
    return mb.program(input_specs=specs, opset_version=ct.target.iOS17)(scope["function"])


WEIGHT = (RNG.standard_normal((64, 16)) / 4).astype(HALF)


def head(choose: Any, spread: float) -> Program:
    """Scores of 64 anchors that lie as close as `spread` says, and a choice among them."""

    def body(a: Var) -> Any:
        deep = mb.tanh(x=mb.linear(x=a, weight=WEIGHT, name="deep"), name="bent")
        scores = mb.add(x=mb.mul(x=deep, y=HALF(spread), name="small"), y=HALF(10), name="scores")
        return choose(scores)

    return program(body, (4, 16))


CHOICES: dict[str, Callable[[Var], Any]] = {
    "topk": lambda scores: mb.topk(x=scores, k=5, axis=1, name="best"),
    "argmax": lambda scores: mb.reduce_argmax(x=scores, axis=1, name="best"),
    "argsort": lambda scores: mb.argsort(x=scores, axis=1, ascending=False, name="best"),
    "comparison": lambda scores: mb.cast(
        x=mb.greater(x=scores, y=mb.reduce_mean(x=scores, axes=[1], keep_dims=True), name="best"), dtype="int32"
    ),
}
X = {"a": RNG.standard_normal((4, 16)).astype(HALF)}


@pytest.mark.parametrize("kind", CHOICES)
def test_close_scores_lose_choices_and_fp32_keeps_them(kind: str) -> None:
    model = head(CHOICES[kind], 0.01)
    found = ane.certify(model, X)
    assert found.verdict == "fails"
    choice = found.choices[0]
    assert choice.worst > 0
    assert choice.margin[0] < max(choice.error.values())
    assert "of choices change" in found.why
    assert choice.exact_ops, "fp32 from the product on keeps them"
    assert "scores" in choice.exact_ops
    kept = ane.apply(model, ane.passes.WidenToFp32(ops=choice.exact_ops), quiet=True)
    again = ane.certify(kept.program, X)
    assert [c.changed["fp16"] for c in again.choices] == [0.0]


@pytest.mark.parametrize("kind", CHOICES)
def test_scores_far_apart_keep_their_choices(kind: str) -> None:
    scores = np.linspace(-8, 8, 64, dtype=HALF)
    rows = np.stack([np.roll(scores, k) for k in range(4)])
    model = program(lambda a: CHOICES[kind](mb.mul(x=a, y=HALF(2), name="scores")), (4, 64))
    found = ane.certify(model, {"a": rows})
    assert [c.worst for c in found.choices] == [0.0]
    assert not found.choices[0].exact_ops


def test_a_comparison_inside_a_computation_is_no_choice() -> None:
    def body(a: Var) -> Any:
        scores = mb.mul(x=mb.add(x=mb.mul(x=a, y=HALF(0.01)), y=HALF(10)), y=HALF(0.3), name="scores")
        above = mb.greater(x=scores, y=mb.reduce_mean(x=scores, axes=[1], keep_dims=True))
        return mb.select(cond=above, a=mb.mul(x=scores, y=HALF(1.001)), b=scores, name="y")

    assert not ane.certify(program(body, (4, 16)), X).choices


def test_of_a_topk_the_set_counts_and_not_the_order() -> None:
    from anesurgery.mil import walk_ops
    from anesurgery.placement.choices import changed_share

    model: Program = head(CHOICES["topk"], 1.0)
    (op,) = [op for op in walk_ops(model.functions["main"]) if op.op_type == "topk"]
    places = torch.tensor([[1, 2, 3]])
    assert changed_share(op, places, torch.tensor([[3, 1, 2]])) == 0
    assert changed_share(op, places.to(torch.uint16), torch.tensor([[3, 1, 2]], dtype=torch.uint16)) == 0
    assert changed_share(op, places, torch.tensor([[1, 2, 4]])) == pytest.approx(1 / 3)


def test_a_topk_without_indices_chooses_nothing() -> None:
    model = program(lambda a: mb.topk(x=mb.relu(x=a), k=3, axis=1, return_indices=False), (4, 16))
    found = ane.certify(model, X)
    assert (found.verdict, found.choices) == ("holds", ())


def test_the_set_of_a_long_topk_is_compared_in_little_memory() -> None:
    from anesurgery.placement.choices import changed_share

    model = program(lambda a: mb.topk(x=a, k=250_000, axis=1), (1, 250_001))
    places = torch.arange(250_000)[None]  # each with each would be 58 GiB
    (op,) = [op for op in model.functions["main"].operations if op.op_type == "topk"]
    assert changed_share(op, places, places.flip(1)) == 0
    assert changed_share(op, places, places + 1) == pytest.approx(1 / 250_000)


@pytest.mark.parametrize(("ascending", "margin"), [(True, 10), (False, 40)])
def test_the_margin_lies_at_the_end_that_a_topk_takes(ascending: bool, margin: float) -> None:
    scores = {"a": np.array([[0, 10, 10.5, 20, 40, 80]], HALF)}
    how = {"k": 1, "axis": 1, "ascending": ascending}
    model = program(lambda a: mb.topk(x=mb.mul(x=a, y=HALF(1)), **how), (1, 6))
    (choice,) = ane.certify(model, scores).choices
    assert choice.margin.least == margin


def test_of_a_topk_of_all_the_order_counts() -> None:
    model = head(lambda scores: mb.topk(x=scores, k=64, axis=1, name="best"), 0.01)
    found = ane.certify(model, X)
    (choice,) = found.choices
    assert found.verdict == "fails"
    assert choice.changed["fp16"] > 0
    assert 0 <= choice.margin.least < choice.error["fp16"]


def test_an_output_that_nothing_moves_does_not_hold() -> None:
    still = program(lambda a: (mb.sub(x=a, y=a, name="gone"), mb.relu(x=a, name="y")), (4, 16))
    found = ane.certify(still, X)
    assert (found.verdict, found.ok) == ("at risk", False)
    assert "gone: the same whatever the inputs are" in found.why
    assert ane.certify(program(lambda a: mb.relu(x=a, name="y"), (4, 16)), X).ok


@pytest.mark.parametrize("given", [X, {"a": np.zeros((4, 16), HALF)}, None])
def test_it_is_told_for_any_inputs(given: Any) -> None:
    still = program(lambda a: mb.sub(x=mb.mod(x=a, y=HALF(1)), y=mb.mod(x=a, y=HALF(1)), name="gone"), (4, 16))
    assert not ane.certify(still, given).ok


def test_an_output_that_is_partly_not_a_number_fails() -> None:
    model = program(lambda a: mb.sqrt(x=a, name="y"), (4, 16))
    found = ane.certify(model, X)
    assert found.verdict == "fails"
    share = float((X["a"] < 0).mean())
    assert f"y is NaN or infinite in {share:.0%} of its elements" in found.why


def test_infinities_by_design_hold() -> None:
    mask = np.triu(np.full((4, 16), -np.inf, HALF), 8)
    assert ane.certify(program(lambda a: mb.add(x=a, y=mask, name="y"), (4, 16)), X).ok


def streaming(entry: str, leaves: str) -> Program:
    specs = [mb.TensorSpec((1, 8), dtype=types.fp16), mb.TensorSpec((1, 16), dtype=types.fp16)]
    scope: dict[str, Any] = {"step": step, "leaves": leaves}
    exec(f"def function(frame, {entry}):\n    return step(frame, {entry}, leaves)", scope)
    return mb.program(input_specs=specs, opset_version=ct.target.iOS17)(scope["function"])


def step(frame: Var, state: Var, leaves: str) -> Any:
    added = mb.concat(values=[frame, frame], axis=1)
    new = mb.add(x=mb.mul(x=state, y=HALF(0.999)), y=added, name=leaves)
    return new, mb.tanh(x=mb.mul(x=mb.reduce_mean(x=new, axes=[1], keep_dims=True), y=HALF(0.02)), name="y")


@pytest.mark.parametrize(
    ("entry", "leaves", "guessed"),
    [("state_in", "state_out", False), ("past_h", "present_h", False), ("h0", "hn", True)],
)
def test_outputs_feed_inputs_by_name_or_by_shape(entry: str, leaves: str, guessed: bool) -> None:
    model = streaming(entry, leaves)
    given = {"frame": np.full((1, 8), 0.3, HALF), entry: np.zeros((1, 16), HALF)}
    found = ane.certify(model, given, steps=60)
    assert found.over is not None
    assert (found.over.feedback, found.over.guessed) == ({leaves: entry}, guessed)
    assert found.over.count == 60
    first, last = (found.over.decibels["fp16"][k] for k in (0, -1))
    assert last < first - 6
    assert json.loads(json.dumps(found.to_json()))["over_steps"]["steps"] == 60
    assert ("guessed" in found.why) == guessed


def test_it_says_when_the_error_passes_the_gate() -> None:
    model = streaming("state_in", "state_out")
    given = {"frame": np.full((1, 8), 0.3, HALF), "state_in": np.zeros((1, 16), HALF)}
    first = ane.certify(model, given, steps=40, gate=0.0).over
    assert first is not None
    gate = 0.5 + min(first.decibels["fp16"])
    found = ane.certify(model, given, steps=40, gate=gate)
    assert found.over is not None
    assert found.verdict == "fails"
    at = found.over.below(gate)["fp16"]
    assert 1 < at <= 40
    assert f"below {gate:g} dB from step {at} on in fp16" in found.why


def test_states_live_on_from_call_to_call() -> None:
    specs = [mb.TensorSpec((1, 16), dtype=types.fp16), mb.StateTensorSpec((1, 16), dtype=types.fp16)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def model(frame: Var, state: Var) -> Any:
        old = mb.read_state(input=state)
        new = mb.add(x=mb.mul(x=old, y=HALF(0.999)), y=frame)
        mb.coreml_update_state(state=state, value=new)
        return mb.relu(x=new, name="y")

    found = ane.certify(model, {"frame": np.full((1, 16), 0.3, HALF)}, steps=30)
    assert found.over is not None
    assert found.over.states == ("state",)
    assert found.over.decibels["fp16"][-1] < found.over.decibels["fp16"][0]


@pytest.mark.parametrize(
    ("feedback", "words"),
    [
        (None, "none is like an input by name or shape"),
        ({"y": "a"}, "y is"),
        ({"z": "a"}, "feedback: no output 'z'"),
        ({"y": "b"}, "feedback: no input 'b'"),
    ],
)
def test_what_cannot_be_fed_back(feedback: Any, words: str) -> None:
    model = program(lambda a: mb.reduce_sum(x=a, axes=[1], name="y"), (4, 16))
    with pytest.raises(SurgeryError, match=words):
        ane.certify(model, X, steps=3, feedback=feedback)


def test_the_command_takes_steps_and_feedback(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from anesurgery.commands.app import app

    ane.save(ane.load(streaming("h0", "hn")), tmp_path / "m.mlpackage")
    np.savez(tmp_path / "in.npz", frame=np.full((1, 8), 0.3, HALF), h0=np.zeros((1, 16), HALF))
    words = ["certify", str(tmp_path / "m.mlpackage"), "--inputs", str(tmp_path / "in.npz"), "--steps", "20"]
    said = CliRunner().invoke(app, [*words, "--feedback", "hn=h0"])
    assert said.exit_code == 0, said.output
    assert "20 steps, fed back: hn -> h0" in " ".join(said.output.split())
    wrong = CliRunner().invoke(app, [*words, "--feedback", "hn"])
    assert wrong.exit_code != 0
