"""Ask Core ML itself where each op runs, on a Mac, and put the answer beside the prediction.

Core ML's compute plan (`MLComputePlan`, macOS 14.4) names a preferred unit for each op of a compiled model. It
speaks about the Mac at hand, and not about other chips of the target. Making it compiles the model for the
engine, which took minutes for convolutions of 16x16 (751K, M4, macOS 27.0.1). A plan can be recorded as JSON on
one machine and shown on another.
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

from anesurgery.errors import LoadError, SurgeryError
from anesurgery.mil import ct, quiet_host
from anesurgery.placement.inspection import UNITS, Inspection, OpRow
from anesurgery.placement.target import COMPUTE_UNITS, Target

FIRST = (14, 4)
"""The macOS in which the compute plan appeared."""

NOT_HERE = "not measured: Core ML's plan needs macOS 14.4 or later"
NO_ANSWER = "not measured: Core ML's plan names no unit for any op of this model"
DEVICES = {"MLNeuralEngineComputeDevice": "ane", "MLGPUComputeDevice": "gpu", "MLCPUComputeDevice": "cpu"}
"""Class of a device in coremltools -> unit."""


@dataclass(frozen=True)
class Plan:
    """Core ML's own plan for a model.

    Attributes:
        units: name of an op (of its first output) or layer -> "ane", "gpu" or "cpu"; a part of a pipeline
            puts its place before the name: "1/conv". Ops without an answer are absent. Empty: not asked.
        host: chip and OS that were asked.
        compute_units: those that the plan was made for.
    """

    units: dict[str, str] = field(default_factory=dict)
    host: str = ""
    compute_units: str = ""


def plan(model: Any, target: Target, function: str | None = None) -> Plan:
    """Ask Core ML on this machine.

    Args:
        model: path of a package or `.mlmodel`, or an MLModel.
        target: its compute units are used; its chips and OS are not, the plan is for this Mac.
        function: of a model that has several; `main`, or the first, by default.

    Returns:
        An empty plan where the machine is no Mac, or its macOS is older than 14.4.

    Raises:
        LoadError: Core ML does not compile or load the model.
    """
    if not available():
        return Plan()
    return Plan(read(ask(model, target), function), host(), target.compute_units)


def ask(model: Any, target: Target) -> Any:
    """The `MLComputePlan` of a model on this Mac.

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
    """Is this a Mac whose Core ML can be asked?"""
    if sys.platform != "darwin":
        return False
    version = tuple(int(n) for n in re.findall(r"\d+", platform.mac_ver()[0])[:2])
    return version >= FIRST


def host() -> str:
    """Chip and OS of this Mac, in words: "Apple M4, macOS 15.3"."""
    asked = subprocess.run(
        ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
    )
    return f"{asked.stdout.strip() or platform.machine()}, macOS {platform.mac_ver()[0]}"


def _compiled(model: Any) -> str:
    """The folder of the compiled model."""
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
    """The units in an `MLComputePlan`, by name of op or layer, nested blocks included."""
    return dict(_read(compiled, compiled.model_structure, function, ""))


def _read(compiled: Any, structure: Any, function: str | None, place: str) -> Iterator[tuple[str, str]]:
    if structure.pipeline is not None:
        for index, (_, part) in enumerate(structure.pipeline.sub_models):
            yield from _read(compiled, part, None, f"{place}{index}/")
    elif structure.neuralnetwork is not None:
        for layer in structure.neuralnetwork.layers:
            usage = compiled.get_compute_device_usage_for_neuralnetwork_layer(layer)
            if unit := _unit(usage):
                yield place + layer.name, unit
    elif structure.program is not None:
        functions = structure.program.functions
        name = function or ("main" if "main" in functions else next(iter(functions)))
        for operation in _operations(functions[name].block):
            if operation.operator_name.rpartition(".")[2] == "const" or not operation.outputs:
                continue
            if unit := _unit(compiled.get_compute_device_usage_for_mlprogram_operation(operation)):
                yield place + operation.outputs[0].name, unit


@dataclass(frozen=True)
class Answer:
    """What a plan says about one op.

    Attributes:
        name: of its first output.
        op: its type, without the opset.
        unit: that it prefers; None: none is named.
        supported: the units that can run it.
        cost: its share of the cost of the whole; None: not said.
    """

    name: str
    op: str
    unit: str | None
    supported: tuple[str, ...]
    cost: float | None


def answers(compiled: Any, function: str | None = None) -> list[Answer]:
    """What an `MLComputePlan` says about each op of an ML Program, constants left out.

    Raises:
        SurgeryError: it is the plan of another kind of model.
    """
    program = compiled.model_structure.program
    if program is None:
        raise SurgeryError("only plans of ML Programs are recorded; convert the model to one")
    name = function or ("main" if "main" in program.functions else next(iter(program.functions)))
    operations = [op for op in _operations(program.functions[name].block) if op.outputs]
    return [_answer(compiled, op) for op in operations if op.operator_name.rpartition(".")[2] != "const"]


def _answer(compiled: Any, operation: Any) -> Answer:
    usage = compiled.get_compute_device_usage_for_mlprogram_operation(operation)
    cost = compiled.get_estimated_cost_for_mlprogram_operation(operation)
    able = () if usage is None else [DEVICES.get(type(d).__name__) for d in usage.supported_compute_devices]
    return Answer(
        operation.outputs[0].name,
        operation.operator_name.rpartition(".")[2],
        _unit(usage),
        tuple(unit for unit in able if unit),
        None if cost is None else float(cost.weight),
    )


def by_spelling(rows: Iterable[OpRow]) -> dict[str, OpRow]:
    """The rows by each name that a plan may give their op."""
    return {spelled: row for row in rows for spelled in reversed(_spellings(row.name))}


def _operations(block: Any) -> Iterator[Any]:
    for operation in block.operations:
        yield operation
        for inner in operation.blocks:
            yield from _operations(inner)


def _unit(usage: Any) -> str | None:
    return None if usage is None else DEVICES.get(type(usage.preferred_compute_device).__name__)


def beside(inspection: Inspection, recorded: Plan) -> Inspection:
    """The inspection with what Core ML said in each row, and a note on how far both agree.

    Args:
        inspection: a prediction.
        recorded: from `plan` or `replay`; an empty one gives a note and nothing else.
    """
    if not recorded.units:
        said = NO_ANSWER if recorded.host else NOT_HERE
        return replace(inspection, notes=(*inspection.notes, said))
    told = _fill(inspection, recorded.units, "")
    rows = list(_rows(told))
    asked = [r for r in rows if r.measured is not None]
    agree = sum(r.measured == r.preferred for r in asked)
    by = f" ({recorded.host})" if recorded.host else ""
    words = [f"measured{by}: the plan agrees on {agree} of {len(asked)} ops"]
    if len(asked) < len(rows):
        words.append(f"the plan says nothing about {len(rows) - len(asked)} ops")
    if recorded.compute_units not in ("", inspection.target.compute_units):
        words.append(f"the plan was made for {recorded.compute_units}")
    return replace(told, notes=(*told.notes, *words))


def _fill(inspection: Inspection, units: dict[str, str], place: str) -> Inspection:
    ops = tuple(replace(row, measured=_found(units, place, row.name)) for row in inspection.ops)
    parts = {
        name: _fill(part, units, f"{place}{index}/")
        for index, (name, part) in enumerate(inspection.parts.items())
    }
    return replace(inspection, ops=ops, parts=parts, measured=True)


def _found(units: dict[str, str], place: str, name: str) -> str | None:
    """The unit of an op; the first of several outputs ends in _0, and names are compiled to identifiers."""
    return next((units[place + s] for s in _spellings(name) if place + s in units), None)


def _spellings(name: str) -> list[str]:
    written = [name, f"{name}_0"]
    return [s for k in written for s in (k, re.sub(r"\W", "_", k, flags=re.ASCII))]


def _rows(inspection: Inspection) -> Iterator[OpRow]:
    yield from inspection.ops
    for part in inspection.parts.values():
        yield from _rows(part)


def record(recorded: Plan) -> str:
    """A plan as JSON, to be shown on another machine."""
    return json.dumps(vars(recorded), indent=1)


def replay(text: str) -> Plan:
    """A plan that `record` wrote.

    Raises:
        SurgeryError: it is no such JSON, or names a unit that does not exist.
    """
    try:
        content = json.loads(text)
        replayed = Plan(dict(content["units"]), str(content["host"]), str(content["compute_units"]))
    except (ValueError, KeyError, TypeError) as error:
        raise SurgeryError(f"no recorded plan: {error!r}; write one with record(plan(...))") from error
    wrong = sorted({str(u) for u in replayed.units.values()} - {str(u) for u in UNITS if u})
    if wrong or replayed.compute_units not in ("", *COMPUTE_UNITS):
        what = f"unit {wrong[0]!r}" if wrong else f"compute units {replayed.compute_units!r}"
        raise SurgeryError(f"no recorded plan: {what} does not exist; record it again")
    return replayed
