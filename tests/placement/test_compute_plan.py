"""Core ML's own plan beside the prediction, on objects of coremltools' classes without a Mac."""

from __future__ import annotations

import json
import platform
import sys
from typing import Any

import pytest

from anesurgery.errors import LoadError, SurgeryError
from anesurgery.mil import ct, quiet_host
from anesurgery.placement import Inspection, OpRow, Target
from anesurgery.placement import compute_plan as plans
from anesurgery.placement.compute_plan import NO_ANSWER, NOT_HERE, Plan, plan, read, record, replay, with_plan

with quiet_host():
    from coremltools.models import compute_device, compute_plan

DEVICES = {
    "ane": compute_device.MLNeuralEngineComputeDevice,
    "gpu": compute_device.MLGPUComputeDevice,
    "cpu": compute_device.MLCPUComputeDevice,
}


class FakePlan:
    """What Core ML would say: the unit of an op by the name of its first output, or of a layer."""

    def __init__(self, structure: Any, units: dict[str, str]) -> None:
        self.model_structure, self.units = structure, units

    def _usage(self, name: str) -> Any:
        if name not in self.units:
            return None
        kind = DEVICES[self.units[name]]
        device = object.__new__(kind)  # its constructor wants a Mac
        return compute_plan.MLComputePlanDeviceUsage(device, [device])

    def get_compute_device_usage_for_mlprogram_operation(self, operation: Any) -> Any:
        return self._usage(operation.outputs[0].name)

    def get_compute_device_usage_for_neuralnetwork_layer(self, layer: Any) -> Any:
        return self._usage(layer.name)


def op(kind: str, *outputs: str, blocks: tuple[Any, ...] = ()) -> Any:
    named = [compute_plan.MLModelStructureProgramNamedValueType(name, None) for name in outputs]
    return compute_plan.MLModelStructureProgramOperation({}, kind, named, list(blocks), None)


def block(*ops: Any) -> Any:
    return compute_plan.MLModelStructureProgramBlock([], list(ops), [])


def program(**functions: Any) -> Any:
    made = {n: compute_plan.MLModelStructureProgramFunction([], b) for n, b in functions.items()}
    inner = compute_plan.MLModelStructureProgram(made)
    return compute_plan.MLModelStructure(None, inner, None)


def network(*names: str) -> Any:
    layers = [compute_plan.MLModelStructureNeuralNetworkLayer(n, "relu", [], [], None) for n in names]
    inner = compute_plan.MLModelStructureNeuralNetwork(layers)
    return compute_plan.MLModelStructure(inner, None, None)


def pipeline(*parts: Any) -> Any:
    inner = compute_plan.MLModelStructurePipeline([(f"part{i}", p) for i, p in enumerate(parts)])
    return compute_plan.MLModelStructure(None, None, inner)


def predicted(*rows: tuple[str, str | None], **more: Any) -> Inspection:
    made = [OpRow(i, name, "relu", "1", "fp16", True, unit, 0) for i, (name, unit) in enumerate(rows)]
    return Inspection("a model", Target.parse("M4"), tuple(made), **more)


def test_a_program_is_read_with_its_nested_blocks() -> None:
    inside = block(op("ios17.relu", "in"))
    structure = program(
        main=block(
            op("const", "k"),
            op("ios17.conv", "a"),
            op("ios17.cond", "b", blocks=(inside, block())),
            op("ios17.exp", "silent"),
            op("print"),
        )
    )
    units = {"k": "cpu", "a": "ane", "b": "cpu", "in": "gpu"}
    assert read(FakePlan(structure, units)) == {"a": "ane", "b": "cpu", "in": "gpu"}


def test_the_function_is_chosen() -> None:
    units = {"a": "ane", "b": "cpu"}
    first, second = block(op("relu", "a")), block(op("relu", "b"))
    assert read(FakePlan(program(other=first, main=second), units)) == {"b": "cpu"}
    assert read(FakePlan(program(other=first, main=second), units), "other") == {"a": "ane"}
    assert read(FakePlan(program(other=first, more=second), units)) == {"a": "ane"}


def test_networks_and_pipelines_are_read() -> None:
    units = {"l": "gpu", "a": "ane"}
    assert read(FakePlan(network("l", "unsaid"), units)) == {"l": "gpu"}
    inner = pipeline(program(main=block(op("relu", "a"))), network("l"))
    assert read(FakePlan(pipeline(network("l"), inner), units)) == {
        "0/l": "gpu",
        "1/0/a": "ane",
        "1/1/l": "gpu",
    }


def test_a_model_of_another_kind_has_no_plan() -> None:
    assert read(FakePlan(compute_plan.MLModelStructure(None, None, None), {})) == {}


def test_the_plan_is_put_beside_the_prediction() -> None:
    before = predicted(("a", "ane"), ("b", "ane"), ("c", None), ("d", "cpu"), notes=("old",))
    made = Plan({"a": "ane", "b": "gpu", "c": "cpu"}, "Apple M4, macOS 15.3", "ALL")
    after = with_plan(before, made)
    assert [r.measured for r in after.ops] == ["ane", "gpu", "cpu", None]
    assert [r.preferred for r in after.ops] == [r.preferred for r in before.ops]
    assert after.measured
    assert after.notes == (
        "old",
        "measured (Apple M4, macOS 15.3): the plan agrees on 1 of 3 ops",
        "the plan says nothing about 1 ops",
        "the plan was made for ALL",
    )
    assert not before.measured


def test_names_are_found_as_the_compiler_writes_them() -> None:
    before = predicted(("input.1", "ane"), ("halves", "ane"), ("two.halves", "ane"))
    after = with_plan(before, Plan({"input_1": "cpu", "halves_0": "gpu", "two_halves_0": "ane"}))
    assert [r.measured for r in after.ops] == ["cpu", "gpu", "ane"]


def test_parts_of_a_pipeline_are_told_apart() -> None:
    inner = Inspection("", Target.parse("M4"), (), parts={"x": predicted(("a", "ane"))})
    whole = Inspection("", Target.parse("M4"), (), parts={"one": predicted(("a", "ane")), "two": inner})
    after = with_plan(whole, Plan({"0/a": "ane", "1/0/a": "cpu"}))
    assert after.parts["one"].ops[0].measured == "ane"
    assert after.parts["two"].parts["x"].ops[0].measured == "cpu"
    assert after.parts["two"].measured
    assert after.notes == ("measured: the plan agrees on 1 of 2 ops",)


@pytest.mark.parametrize(("host", "note"), [("", NOT_HERE), ("Apple M1, macOS 15.0", NO_ANSWER)])
def test_an_empty_plan_is_a_note(host: str, note: str) -> None:
    before = predicted(("a", "ane"))
    after = with_plan(before, Plan({}, host))
    assert (after.measured, after.notes, after.ops) == (False, (note,), before.ops)


@pytest.mark.parametrize(
    ("system", "version", "expected"),
    [
        ("linux", "", False),
        ("darwin", "14.3.1", False),
        ("darwin", "13.9", False),
        ("darwin", "14.4", True),
        ("darwin", "26.0.1", True),
    ],
)
def test_where_core_ml_can_be_asked(
    monkeypatch: pytest.MonkeyPatch, system: str, version: str, expected: bool
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "mac_ver", lambda: (version, ("", "", ""), "arm64"))
    assert plans.available() is expected


def test_elsewhere_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "available", lambda: False)
    assert plan("nowhere.mlpackage", Target.parse(None)) == Plan()


def test_on_a_mac_the_compiled_model_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(path: str, units: Any) -> FakePlan:
        asked.append((path, units))
        return FakePlan(program(main=block(op("relu", "a"))), {"a": "ane"})

    monkeypatch.setattr(plans, "available", lambda: True)
    monkeypatch.setattr(plans, "host", lambda: "Apple M4, macOS 15.3")
    monkeypatch.setattr(ct.models.utils, "compile_model", lambda path: f"{path}c")
    monkeypatch.setattr(compute_plan.MLComputePlan, "load_from_path", load)
    made = plan("m.mlmodel", Target.parse("M1", "ALL"))
    assert asked == [("m.mlmodelc", ct.ComputeUnit.ALL)]
    assert made == Plan({"a": "ane"}, "Apple M4, macOS 15.3", "ALL")


def test_what_core_ml_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> str:
        raise RuntimeError("Error compiling model")

    monkeypatch.setattr(plans, "available", lambda: True)
    monkeypatch.setattr(ct.models.utils, "compile_model", fail)
    with pytest.raises(LoadError, match=r"made no plan .* Error compiling model; inspect it without"):
        plan("m.mlmodel", Target.parse(None))


@pytest.mark.skipif(not plans.available(), reason="Core ML's plan needs macOS 14.4 or later")
def test_a_real_plan_names_the_ops(tmp_path: Any) -> None:
    from anesurgery.files.package import save
    from anesurgery.loading import load
    from anesurgery.mil import Var, mb

    @mb.program(input_specs=[mb.TensorSpec((1, 4, 8, 8))], opset_version=ct.target.iOS16)
    def made(x: Var) -> Var:
        return mb.relu(x=x, name="y")

    package = save(load(made), tmp_path / "m.mlpackage")
    assert plan(package, Target.parse(None)).units["y"] in DEVICES


def test_a_plan_is_recorded_and_replayed() -> None:
    made = Plan({"a": "ane", "1/b": "cpu"}, "Apple M4, macOS 15.3", "CPU_AND_NE")
    assert replay(record(made)) == made
    assert json.loads(record(made))["units"]["1/b"] == "cpu"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no recorded plan"),
        ("[]", "no recorded plan"),
        ("[" * 100_000, "no recorded plan: RecursionError"),
        ('{"units": {}}', "no recorded plan: KeyError"),
        ('{"units": {"a": "npu"}, "host": "", "compute_units": ""}', "unit 'npu' does not exist"),
        ('{"units": {"a": null}, "host": "", "compute_units": ""}', "unit 'None' does not exist"),
        ('{"units": {}, "host": "", "compute_units": "NPU"}', "compute units 'NPU' does not exist"),
        ('{"units": 3, "host": "", "compute_units": ""}', "no recorded plan"),
    ],
)
def test_what_is_no_recorded_plan(text: str, words: str) -> None:
    with pytest.raises(SurgeryError, match=words):
        replay(text)
