"""Ask Core ML itself where each op runs, on a Mac, and add the answer to the prediction.

Core ML's compute plan (`MLComputePlan`, macOS 14.4) names a preferred unit for each op of a compiled model. It
holds for this Mac, not for other chips of the target. Making it compiles the model for the engine, which took
minutes for convolutions of 16x16 (751K, M4, macOS 27.0.1). `inspect(..., measured=True)` calls `plan` and
`with_plan`; `record` and `replay` carry a plan to another machine as JSON.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from anesurgery.errors import DAMAGED, LoadError, SurgeryError
from anesurgery.mil import ct, quiet_host
from anesurgery.placement.inspection import UNITS, Inspection, OpRow
from anesurgery.placement.target import COMPUTE_UNITS, Target

FIRST_MACOS = (14, 4)
"""The first macOS with the compute plan."""

NOT_HERE = "not measured: Core ML's plan needs macOS 14.4 or later"
NO_ANSWER = "not measured: Core ML's plan names no unit for any op of this model"
DEVICES = {"MLNeuralEngineComputeDevice": "ane", "MLGPUComputeDevice": "gpu", "MLCPUComputeDevice": "cpu"}
"""Name of a device class in coremltools -> unit."""


@dataclass(frozen=True)
class Plan:
    """Core ML's own plan for a model."""

    units: dict[str, str] = field(default_factory=dict)
    """Name of an op (of its first output) or layer -> "ane", "gpu" or "cpu". In a pipeline the index of the
    part comes first: "1/conv". Ops without an answer are absent; empty if Core ML was not asked."""
    host: str = ""
    """Chip and OS of the Mac: "Apple M4, macOS 15.3"."""
    compute_units: str = ""
    """The setting that the plan was made for."""


def plan(model: Any, target: Target, function: str | None = None) -> Plan:
    """Return Core ML's plan for a model on this machine.

    Args:
        model: path of a package or `.mlmodel`, or an MLModel.
        target: only its compute units are used; the plan is for the chip and OS of this Mac.
        function: the function of a model that has several; `main`, or the first, by default.

    Returns:
        The plan; an empty one on other machines than Macs, and before macOS 14.4.

    Raises:
        LoadError: Core ML does not compile or load the model.
    """
    if not available():
        return Plan()
    return Plan(read(ask(model, target), function), host(), target.compute_units)


def ask(model: Any, target: Target) -> Any:
    """Return the `MLComputePlan` of a model on this Mac.

    Raises:
        LoadError: Core ML does not compile or load the model.
    """
    with quiet_host():
        from coremltools.models.compute_plan import MLComputePlan
    try:
        return MLComputePlan.load_from_path(_compiled(model), ct.ComputeUnit[target.compute_units])
    except Exception as error:
        raise LoadError(f"Core ML made no plan for the model: {error}; inspect it without measuring") from error


def available() -> bool:
    """Is this a Mac whose Core ML makes compute plans?"""
    if sys.platform != "darwin":
        return False
    version = tuple(int(n) for n in re.findall(r"\d+", platform.mac_ver()[0])[:2])
    return version >= FIRST_MACOS


def host() -> str:
    """Return chip and OS of this Mac, in words: "Apple M4, macOS 15.3"."""
    brand = subprocess.run(
        ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
    )
    return f"{brand.stdout.strip() or platform.machine()}, macOS {platform.mac_ver()[0]}"


def _compiled(model: Any) -> str:
    """Return the folder of the compiled model; compile it if needed."""
    if isinstance(model, ct.models.MLModel):
        try:
            return str(model.get_compiled_model_path())
        except Exception:  # coremltools raises plain Exception for a model that was not loaded
            model = model.package_path or model.get_spec()
    if isinstance(model, (str, os.PathLike)):
        model = os.path.expanduser(model)
        if str(model).rstrip(os.sep).endswith(".mlmodelc"):
            return str(model)
    return str(ct.models.utils.compile_model(model))


def read(compiled: Any, function: str | None = None) -> dict[str, str]:
    """Return the units in an `MLComputePlan`, by name of op or layer, nested blocks included."""
    return dict(_named_units(compiled, compiled.model_structure, function, ""))


def _named_units(compiled: Any, structure: Any, function: str | None, prefix: str) -> Iterator[tuple[str, str]]:
    if structure.pipeline is not None:
        for index, (_, part) in enumerate(structure.pipeline.sub_models):
            yield from _named_units(compiled, part, None, f"{prefix}{index}/")
    elif structure.neuralnetwork is not None:
        for layer in structure.neuralnetwork.layers:
            usage = compiled.get_compute_device_usage_for_neuralnetwork_layer(layer)
            if unit := _unit(usage):
                yield prefix + layer.name, unit
    elif structure.program is not None:
        for operation in _operations_of_program(structure.program, function):
            if unit := _unit(compiled.get_compute_device_usage_for_mlprogram_operation(operation)):
                yield prefix + operation.outputs[0].name, unit


@dataclass(frozen=True)
class PlannedOp:
    """What a plan says about one op."""

    name: str
    """The name of its first output."""
    op: str
    """Its type, without the opset."""
    unit: str | None
    """The preferred unit; None if the plan names none."""
    supported: tuple[str, ...]
    """The units that can run it."""
    cost: float | None
    """Its share of the cost of the whole model; None if the plan does not say it."""


def planned_ops(compiled: Any, function: str | None = None) -> list[PlannedOp]:
    """Return what an `MLComputePlan` says about each op of an ML Program, except constants.

    Raises:
        SurgeryError: it is the plan of another kind of model.
    """
    program = compiled.model_structure.program
    if program is None:
        raise SurgeryError("only plans of ML Programs are recorded; convert the model to one")
    return [_planned_op(compiled, op) for op in _operations_of_program(program, function)]


def _operations_of_program(program: Any, function: str | None) -> Iterator[Any]:
    """Yield the operations of a function (`main`, or the first, by default), without constants."""
    name = function or ("main" if "main" in program.functions else next(iter(program.functions)))
    for operation in _operations(program.functions[name].block):
        if operation.outputs and _op_type(operation) != "const":
            yield operation


def _op_type(operation: Any) -> str:
    """Return the op type of an operation that is named "ios18.conv"."""
    return str(operation.operator_name.rpartition(".")[2])


def _planned_op(compiled: Any, operation: Any) -> PlannedOp:
    usage = compiled.get_compute_device_usage_for_mlprogram_operation(operation)
    cost = compiled.get_estimated_cost_for_mlprogram_operation(operation)
    devices = () if usage is None else usage.supported_compute_devices
    supported = [DEVICES.get(type(device).__name__) for device in devices]
    return PlannedOp(
        name=operation.outputs[0].name,
        op=_op_type(operation),
        unit=_unit(usage),
        supported=tuple(unit for unit in supported if unit),
        cost=None if cost is None else float(cost.weight),
    )


def by_spelling(rows: Iterable[OpRow]) -> dict[str, OpRow]:
    """Return the rows by every name that a plan may give their op."""
    return {spelling: row for row in rows for spelling in reversed(_spellings(row.name))}


def _operations(block: Any) -> Iterator[Any]:
    for operation in block.operations:
        yield operation
        for inner in operation.blocks:
            yield from _operations(inner)


def _unit(usage: Any) -> str | None:
    return None if usage is None else DEVICES.get(type(usage.preferred_compute_device).__name__)


def with_plan(inspection: Inspection, plan: Plan) -> Inspection:
    """Return an inspection with Core ML's unit in each row, and a note on how far prediction and plan agree.

    Args:
        inspection: a prediction.
        plan: the result of `plan` or `replay`; for an empty one only a note is added.
    """
    if not plan.units:
        note = NO_ANSWER if plan.host else NOT_HERE
        return replace(inspection, notes=(*inspection.notes, note))
    with_units = _with_units(inspection, plan.units, "")
    rows = list(_all_rows(with_units))
    answered = [row for row in rows if row.measured is not None]
    agreeing = sum(row.measured == row.preferred for row in answered)
    host_words = f" ({plan.host})" if plan.host else ""
    notes = [f"measured{host_words}: the plan agrees on {agreeing} of {len(answered)} ops"]
    if len(answered) < len(rows):
        notes.append(f"the plan says nothing about {len(rows) - len(answered)} ops")
    if plan.compute_units not in ("", inspection.target.compute_units):
        notes.append(f"the plan was made for {plan.compute_units}")
    return replace(with_units, notes=(*with_units.notes, *notes))


def _with_units(inspection: Inspection, units: dict[str, str], prefix: str) -> Inspection:
    """Fill the `measured` field of each row; `prefix` is the place in a pipeline, such as "1/"."""
    ops = tuple(replace(row, measured=_unit_of(units, prefix, row.name)) for row in inspection.ops)
    parts = {
        name: _with_units(part, units, f"{prefix}{index}/")
        for index, (name, part) in enumerate(inspection.parts.items())
    }
    return replace(inspection, ops=ops, parts=parts, measured=True)


def _unit_of(units: dict[str, str], prefix: str, name: str) -> str | None:
    return next((units[prefix + s] for s in _spellings(name) if prefix + s in units), None)


def _spellings(name: str) -> list[str]:
    """Return the names that a plan may give an op.

    The first of several outputs ends in _0, and compiling replaces characters that no identifier has by _.
    """
    names = [name, f"{name}_0"]
    return [s for n in names for s in (n, re.sub(r"\W", "_", n, flags=re.ASCII))]


def _all_rows(inspection: Inspection) -> Iterator[OpRow]:
    """Yield the rows of an inspection and of its parts."""
    yield from inspection.ops
    for part in inspection.parts.values():
        yield from _all_rows(part)


def record(plan: Plan) -> str:
    """Return a plan as JSON, to be shown on another machine."""
    return json.dumps(vars(plan), indent=1)


def replay(text: str) -> Plan:
    """Return the plan that `record` wrote.

    Raises:
        SurgeryError: it is no such JSON, or names a unit that does not exist.
    """
    try:
        content = json.loads(text)
        replayed = Plan(dict(content["units"]), str(content["host"]), str(content["compute_units"]))
    except DAMAGED as error:
        raise SurgeryError(f"no recorded plan: {error!r}; write one with record(plan(...))") from error
    unknown = sorted({str(u) for u in replayed.units.values()} - {str(u) for u in UNITS if u})
    if unknown or replayed.compute_units not in ("", *COMPUTE_UNITS):
        what = f"unit {unknown[0]!r}" if unknown else f"compute units {replayed.compute_units!r}"
        raise SurgeryError(f"no recorded plan: {what} does not exist; record it again")
    return replayed
