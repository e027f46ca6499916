"""Core ML of a Mac that is not there: plans, compiling, loads and predictions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement import compute_plan, core_ml_runs


def convolutions(side: int = 64) -> Program:
    weight = np.ones((64, 64, 3, 3), np.float16)

    @mb.program(
        input_specs=[mb.TensorSpec((1, 64, side, side), dtype=types.fp16)], opset_version=ct.target.iOS16
    )
    def program(x: Var) -> Var:
        for _ in range(3):
            x = mb.conv(x=mb.relu(x=x), weight=weight, pad_type="same")
        return x

    return program


class FakePlan:
    """Core ML's answers: the unit, the supported units and the share by name of an op."""

    def __init__(self, program: Program, unit: str, share: float) -> None:
        from coremltools.models import compute_device
        from coremltools.models import compute_plan as host

        kinds = {"ane": "MLNeuralEngineComputeDevice", "cpu": "MLCPUComputeDevice"}
        made = {u: object.__new__(getattr(compute_device, kind)) for u, kind in kinds.items()}
        self.usage = host.MLComputePlanDeviceUsage(made[unit], list(made.values()))
        self.cost = host.MLComputePlanCost(share)
        value = host.MLModelStructureProgramNamedValueType
        ops = [
            host.MLModelStructureProgramOperation(
                {}, f"ios16.{o.op_type}", [value(o.outputs[0].name, None)], [], None
            )
            for o in program.functions["main"].operations
        ]
        block = host.MLModelStructureProgramBlock([], [], ops)
        block = replace(block, operations=ops)
        function = host.MLModelStructureProgramFunction([], block)
        self.model_structure = host.MLModelStructure(
            None, host.MLModelStructureProgram({"main": function}), None
        )

    def get_compute_device_usage_for_mlprogram_operation(self, operation: Any) -> Any:
        return self.usage

    def get_estimated_cost_for_mlprogram_operation(self, operation: Any) -> Any:
        return self.cost


class FakeModel:
    """A compiled model whose every load and prediction takes a known time of a clock that only it moves."""

    now = 0.0
    loads: ClassVar[dict[str, int]] = {}
    given: ClassVar[list[Any]] = []

    def __init__(self, place: str, units: Any, **own: Any) -> None:
        if units == ct.ComputeUnit.CPU_AND_GPU:
            raise RuntimeError("the GPU is taken")
        self.seconds = {"CPU_AND_NE": 0.002, "ALL": 0.004, "CPU_ONLY": 0.008}[units.name]
        count = FakeModel.loads[units.name] = FakeModel.loads.get(units.name, 0) + 1
        FakeModel.now += 100.0 if count == 1 else 3.0
        self.calls = 0

    def predict(self, values: dict[str, Any]) -> dict[str, Any]:
        """The first five are slow, and of the others every tenth."""
        FakeModel.given.append(values)
        self.calls += 1
        slow = self.calls <= core_ml_runs.WARM_UP or self.calls % 10 == 0
        FakeModel.now += self.seconds * (50 if slow else 1)
        return {}


def install(monkeypatch: pytest.MonkeyPatch) -> Program:
    """Put it in the place of Core ML; the program is the model of which it answers."""
    program = convolutions()
    FakeModel.now, FakeModel.loads, FakeModel.given = 0.0, {}, []
    monkeypatch.setattr(compute_plan, "available", lambda: True)
    monkeypatch.setattr(compute_plan, "host", lambda: "Apple M4, macOS 15.3")
    monkeypatch.setattr(compute_plan, "ask", lambda model, target: FakePlan(program, "ane", 1 / 6))
    monkeypatch.setattr(ct.models.utils, "compile_model", lambda path: f"{path}c")
    monkeypatch.setattr(ct.models, "CompiledMLModel", FakeModel)
    monkeypatch.setattr(core_ml_runs, "CLOCK", lambda: FakeModel.now)
    return program
