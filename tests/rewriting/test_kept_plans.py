"""Plans read again and applied, to the model they were made for and to others; inputs that do not fit."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from one_layer import network
from small_rewrites import small_rewrite

import anesurgery as ane
from anesurgery.display import finite
from anesurgery.errors import InterpretError, LoadError, SurgeryError, SurgeryWarning, UnknownName
from anesurgery.mil import Program, ct, mb, types
from anesurgery.network_editing.neural_network import NeuralNetwork
from anesurgery.rewriting.edit_plan import Plan
from anesurgery.rewriting.passes import Pass
from anesurgery.surgery import Recipe

TARGET = "M1/macOS 14"


def powers() -> Program:
    """Large numbers leave fp16 here, and nothing that is tried helps."""

    return mb.program(input_specs=[mb.TensorSpec((2, 8), dtype=types.fp16)])(
        lambda x: mb.mul(
            x=mb.pow(x=mb.sub(x=x, y=np.float16(1)), y=np.float16(9)), y=np.float16(1e-3), name="y"
        )
    )


def other() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 8), dtype=types.fp16)])(lambda x: mb.relu(x=x, name="y"))


def large() -> dict[str, Any]:
    return {"x": np.full((2, 8), 300, np.float16)}


def written(plan: Plan) -> Any:
    """As the command line writes it."""
    return json.loads(json.dumps(finite(plan.to_json()), allow_nan=False))


@pytest.fixture(scope="module")
def data() -> Any:
    return written(ane.plan(powers(), "auto", target=TARGET, inputs=large()))


@pytest.mark.parametrize(
    "part",
    [
        "recipe",
        "target",
        "steps",
        "left_out",
        "notes",
        "warnings",
        "gain",
        "wrong",
        "outputs",
        "figures",
        "ops",
    ],
)
def test_a_plan_without_a_part_is_refused(data: Any, part: str) -> None:
    """The wrong version: a KeyError."""
    with pytest.raises(LoadError, match=f"'{part}' is missing"):
        Plan.from_json({name: value for name, value in data.items() if name != part})


@pytest.mark.parametrize("change", [{"steps": None}, {"steps": ["auto"]}, {"outputs": [None]}, {"target": 3}])
def test_a_plan_with_a_part_of_another_kind_is_refused(data: Any, change: Any) -> None:
    with pytest.raises(SurgeryError, match=r"not a plan|it takes a string"):
        Plan.from_json({**data, **change})


def test_a_deep_file_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("[" * 100_000)
    with pytest.raises(LoadError, match="is no plan, as it is no JSON"):
        Plan.read(tmp_path / "plan.json")


def test_outputs_that_are_not_finite_survive_the_file(data: Any) -> None:
    """The wrong version: "-inf" stays a string, which the gate is compared with."""
    plan = Plan.from_json(data)
    assert -math.inf in (plan.outputs[1] or {}).values()
    assert ane.apply(powers(), plan, quiet=True).below(40)


def test_a_plan_brings_its_target(data: Any) -> None:
    plan = Plan.from_json(data)
    direct = ane.apply(powers(), "auto", target=TARGET, inputs=large(), quiet=True)
    assert ane.apply(powers(), plan, quiet=True).details == direct.details
    with pytest.raises(UnknownName, match="M99"):
        ane.apply(powers(), Plan.from_json({**data, "target": "M99"}), quiet=True)


@pytest.mark.parametrize(
    ("model", "target", "words"),
    [(other, TARGET, "for another model"), (powers, "M4/macOS 15", f"for {TARGET}")],
)
def test_a_plan_for_another_model_or_target_says_so(data: Any, model: Any, target: str, words: str) -> None:
    """The wrong version: the reasons and the outputs of the first model are those of the second."""
    with pytest.warns(SurgeryWarning, match=f"the plan was made {words}"):
        done = ane.apply(model(), Plan.from_json(data), target=target, quiet=True)
    assert not done.below(40)
    assert not any("at hand" in note for note in done.notes)


def test_a_plan_of_a_neural_network_leaves_one(tmp_path: Path) -> None:
    """The wrong version: an ML Program, as a plan without steps edits ops."""
    model = tmp_path / "m.mlmodel"
    spec = network(lambda b: b.add_activation("r", "RELU", "x", "y"), np.zeros((1, 8, 8, 8)))
    model.write_bytes(spec.SerializeToString())
    plan = ane.plan(model, "auto", target="A15/iOS 16")
    assert not plan.steps
    direct, planned = (ane.apply(model, how, target="A15/iOS 16", quiet=True) for how in ("auto", plan))
    assert isinstance(planned.subject, NeuralNetwork)
    assert str(planned) == str(direct)
    assert "cannot load it" not in str(direct)


@dataclass(frozen=True)
class Fails(Pass):
    """A step that fails."""

    name: ClassVar[str] = "fails_here"

    def run(self, program: Any, session: Any) -> None:
        raise SurgeryError("it fails")


def test_a_step_that_fails_is_the_error_of_a_plan() -> None:
    """The wrong version: a plan of the steps as they are, "was asked for"."""
    with pytest.raises(SurgeryError, match="it fails"):
        ane.plan(powers(), Recipe("own", (Fails(),)), target=TARGET)


@pytest.mark.parametrize("how", ["auto", "negate_subtract"])
@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        ({"z": np.zeros((2, 8))}, UnknownName),
        ("inputs.npz", InterpretError),
        (5, InterpretError),
        ([large(), 3], InterpretError),
    ],
)
def test_inputs_that_the_model_does_not_take_are_refused(how: str, inputs: Any, error: Any) -> None:
    """The wrong version: the model is judged as if none were given."""
    for call in (ane.plan, ane.apply):
        with pytest.raises(error):
            call(ane.load(powers()), how, inputs=inputs)


def test_a_shape_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = ane.save(ane.load(powers()), tmp_path / "m.mlpackage")
    with pytest.raises(InterpretError, match="has shape"):
        ane.plan(path, "auto", inputs={"x": np.zeros(3)})
    with pytest.raises(InterpretError, match="missing input 'x'"):
        ane.plan(path, "auto", inputs={})


def test_a_gate_is_a_number() -> None:
    with pytest.raises(SurgeryError, match="gate=nan"):
        ane.plan(powers(), "auto", inputs=large(), gate=math.nan)


def test_outputs_are_held_to_the_gate_after_passes_by_name() -> None:
    """The wrong version: only recipes look at outputs on the inputs given."""
    done = ane.apply(powers(), "negate_subtract", target=TARGET, inputs=large(), prove=None, quiet=True)
    assert done.below(40)
    assert "outputs are wrong still" in done.details.split("\n\n")[0].replace("\n", " ")


AbsToExp = small_rewrite("abs_to_exp", lambda op: op.abs(), lambda mb, m: mb.exp(x=m.root.x))
"""One op for another, which gains nothing."""


def test_a_classifier_is_planned(tmp_path: Path) -> None:
    """The wrong version: its label is asked for a dtype."""

    program = mb.program(input_specs=[mb.TensorSpec((1, 4), dtype=types.fp16)], opset_version=ct.target.iOS17)(
        lambda x: mb.mul(x=mb.abs(x=x), y=mb.softplus(x=x), name="p")
    )

    how: Any = {
        "convert_to": "mlprogram",
        "minimum_deployment_target": ct.target.iOS17,
        "skip_model_load": True,
    }
    model = ct.convert(program, classifier_config=ct.ClassifierConfig(list("abcd")), **how)
    model.save(str(tmp_path / "m.mlpackage"))
    plan = ane.plan(tmp_path / "m.mlpackage", Recipe("own", (AbsToExp(),)))
    assert plan.gain.startswith("nothing to gain on ")
