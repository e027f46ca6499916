"""One small program for each op, through Core ML and through our interpreter: `make conformance-mac`.

The programs are the sketches of the passes, before and after, so that what passes write is measured too. Every
value becomes an output, both compute it from the same numbers, and the table has for each op type the largest
difference relative to the largest value, on the CPU and with the Neural Engine. Needs macOS.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import anesurgery as ane
from anesurgery import registry
from anesurgery.errors import SurgeryError
from anesurgery.interpret.sampling import sample_inputs
from anesurgery.loading import clone
from anesurgery.mil import Array, Operation, Program, Var, ct, function_of, types
from anesurgery.testing import apply_pass

UNITS = ("CPU_ONLY", "CPU_AND_NE")
Predict = Callable[[Path, str, Mapping[str, Array]], dict[str, Array]]
"""Package, compute units and inputs -> outputs."""


@dataclass(frozen=True)
class Difference:
    """One value of one program, in both."""

    op_type: str
    program: str
    units: str
    relative: float
    """Largest difference over the largest finite value; infinite where only one side is finite."""
    why: str = ""
    """Why there is no number."""


def core_ml(package: Path, units: str, values: Mapping[str, Array]) -> dict[str, Array]:
    """What Core ML computes; macOS only."""
    model = ct.models.MLModel(str(package), compute_units=ct.ComputeUnit[units])
    described = model.get_spec().description
    states = [*described.stateDescription, *(s for f in described.functions for s in f.stateDescription)]
    return dict(model.predict(dict(values), model.make_state() if states else None))


def programs() -> Iterator[tuple[str, Program]]:
    """The sketches of all passes over ML Programs, before and after."""
    for name in registry.op_pass_names():
        module = sys.modules[type(registry.make_pass(name)).__module__]
        before = module.example()
        yield f"{name}, before", before
        yield f"{name}, after", apply_pass(registry.make_pass(name), before)[0]


def shown(program: Program) -> tuple[Program, dict[str, str]]:
    """A copy whose outputs are the values of all ops that an output may hold, and the op type of each."""
    copy: Program = clone(program).program
    function = function_of(copy, None)
    made = {var.name: op.op_type for op in function.operations if op.op_type != "const" for var in _values(op)}
    known = {var.name: var for op in function.operations for var in op.outputs}
    function.set_outputs([known[name] for name in made])
    return copy, made


def _values(op: Operation) -> list[Var]:
    """The outputs of an op that a model may give: tensors of fp16, fp32 or int32 with an axis."""
    kinds = (types.fp16, types.fp32, types.int32)
    return [var for var in op.outputs if types.is_tensor(var.sym_type) and var.dtype in kinds and var.rank]


def differences(name: str, program: Program, predict: Predict, folder: Path) -> Iterator[Difference]:
    """Each value of a program, by both, with each of the compute units."""
    try:
        copy, made = shown(program)
        package = ane.save(ane.load(copy), folder / "one.mlpackage", overwrite=True)
        values = sample_inputs(copy)
        ours = ane.run(package, values, precision="fp16")
    except (SurgeryError, ValueError, RuntimeError) as error:
        yield Difference("", name, "", float("nan"), f"{type(error).__name__}: {error}".splitlines()[0])
        return
    for units in UNITS:
        try:
            theirs = predict(package, units, values)
        except Exception as error:
            yield Difference("", name, units, float("nan"), f"{type(error).__name__}: {error}".splitlines()[0])
            continue
        for key, op_type in made.items():
            if key in ours and key in theirs:
                yield Difference(op_type, name, units, relative(np.asarray(ours[key]), np.asarray(theirs[key])))


def relative(ours: Array, theirs: Array) -> float:
    """Largest difference over the largest finite value; infinite where shapes or finiteness differ."""
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    finite = np.isfinite(a)
    if a.shape != b.shape or not np.array_equal(finite, np.isfinite(b)):
        return float("inf")
    if not finite.any():
        return 0.0
    apart, scale = np.abs(a[finite] - b[finite]).max(), np.abs(a[finite]).max()
    return float(apart / scale if scale else apart)


def report(found: list[Difference]) -> str:
    """A line for each op type, the worst program beside it, and what could not be measured."""
    lines = [f"{'op':28} {'programs':>8} {'CPU_ONLY':>10} {'CPU_AND_NE':>10}  worst in"]
    for op_type in sorted({d.op_type for d in found if d.op_type}):
        here = [d for d in found if d.op_type == op_type]
        most = [max((d.relative for d in here if d.units == units), default=float("nan")) for units in UNITS]
        worst = max(here, key=lambda d: d.relative)
        count = len({d.program for d in here})
        lines.append(f"{op_type:28} {count:8} {most[0]:10.2g} {most[1]:10.2g}  {worst.program}")
    failed = [f"not measured: {d.program} {d.units}: {d.why}" for d in found if d.why]
    return "\n".join([*lines, *failed])


def main(predict: Predict = core_ml) -> None:
    """Measure and print; an exit code of 1 where an op is off by more than the gate on the CPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gate", type=float, default=1e-2, help="largest relative difference on the CPU")
    given = parser.parse_args()
    if predict is core_ml and sys.platform != "darwin":
        raise SystemExit(
            "Core ML runs on macOS only; on Linux `make conformance` compares with recorded numbers"
        )
    with TemporaryDirectory() as folder:
        found = [d for name, p in programs() for d in differences(name, p, predict, Path(folder))]
    print(report(found))
    if any(d.relative > given.gate for d in found if d.units == "CPU_ONLY"):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
