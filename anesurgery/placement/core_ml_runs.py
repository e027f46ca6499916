"""Measure a model with Core ML on a Mac, with what was expected beside it, so that others can learn from it.

The file is JSON and holds no weights:

* `format`: "anesurgery.measurement/1"; `host`: chip and OS; `coremltools`: its version;
* `model`: name of the file; `function`: null for the default one; `compile_s`: seconds that compiling took;
* `asks`: what the ops of an ML Program ask for on this chip, from which times are fitted (`demand.OpLoad`, in
  the order of its fields, equal ops merged); null for other models;
* `settings`, one for each setting of compute units: `compute_units`; `timing` (`stopwatch.Timing`: seconds of
  the first and of a later load, milliseconds of predictions), null where Core ML does not load or run it so;
  `ops`, Core ML's plan, null where it makes none; `error`: why something is null, in words.

Each op has `name`, `op` (its type), `unit` (chosen; null: none named), `supported` (units), `cost` (its share
of the whole), and what was expected: `legal`, `expected`, `ane_us`, `cpu_us`, `flop`, `bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from anesurgery.errors import LoadError, SurgeryError
from anesurgery.interpret.features import present
from anesurgery.interpret.predictor import Predictor, program_of
from anesurgery.mil import ct
from anesurgery.placement import compute_plan, stopwatch
from anesurgery.placement.inspection import OpRow
from anesurgery.placement.inspector import inspect
from anesurgery.placement.measured_rows import features_of
from anesurgery.placement.rates_from_plans import MEASURED
from anesurgery.placement.target import Target

SETTINGS = ("CPU_AND_NE", "CPU_AND_GPU", "ALL", "CPU_ONLY")
"""Of compute units, in the order in which they are measured."""


def measure(
    model: Any,
    target: Target,
    function: str | None = None,
    *,
    settings: Sequence[str] = SETTINGS,
    runs: int = 50,
    told: Callable[[str], object] = lambda words: None,
) -> dict[str, Any]:
    """Load and run a model on this Mac, ask Core ML where its ops run, and put beside it what is expected.

    Args:
        model: path of a package or `.mlmodel`.
        target: what is expected is said for its chips and OS.
        function: of a model that has several.
        settings: names of compute units to measure.
        runs: predictions that count, for each setting.
        told: is told what is being done.

    Raises:
        SurgeryError: this is no Mac with macOS 14.4 or later, or no setting could be measured.
        LoadError: the model cannot be read or compiled.
    """
    if not compute_plan.available():
        raise SurgeryError(f"{compute_plan.NOT_HERE}; run this on such a Mac, and take the file along")
    predictor = Predictor(model, function=function)
    inputs = predictor.sample()
    inputs = present(predictor.inputs, inputs) if predictor.inputs else inputs
    told("compiling")
    place, seconds = stopwatch.compiled(str(Path(model).expanduser()))
    rows = []
    for units in settings:
        told(units)
        rows.append(
            _setting(model, place, replace(target, compute_units=units), inputs, function, runs, predictor)
        )
    if all(row["timing"] is None and row["ops"] is None for row in rows):
        raise SurgeryError(f"Core ML measures nothing of {model}: {rows[0]['error']}")
    return {
        "format": MEASURED,
        "host": compute_plan.host(),
        "coremltools": str(ct.__version__),
        "model": Path(str(model)).name,
        "function": function,
        "compile_s": seconds,
        "asks": _asks(predictor, function),
        "settings": rows,
    }


def _asks(predictor: Predictor, function: str | None) -> dict[str, Any] | None:
    """What the ops of an ML Program ask for on this chip; None of other models. The file is not read again."""
    program = program_of(predictor)
    return None if program is None else features_of(program, function, compute_plan.host())


def _setting(
    model: Any,
    place: str,
    target: Target,
    inputs: dict[str, Any],
    function: str | None,
    runs: int,
    predictor: Predictor,
) -> dict[str, Any]:
    """One row: what could be measured, and in words what could not."""
    row: dict[str, Any] = {"compute_units": target.compute_units, "timing": None, "ops": None, "error": None}
    stateful = bool(predictor.make_state())
    try:
        units = target.compute_units
        timing = stopwatch.timed(place, units, inputs, function=function, stateful=stateful, runs=runs)
        row["timing"] = timing.to_json()
        answers = compute_plan.answers(compute_plan.ask(place, target), function)
        expected = compute_plan.by_spelling(inspect(model, target, function=function).ops)
        ops = [_op(answer, expected.get(answer.name)) for answer in answers]
        row["ops"] = ops if any(op["unit"] for op in ops) else None
    except (LoadError, SurgeryError) as error:
        row["error"] = str(error)
    return row


def _op(answer: compute_plan.Answer, row: OpRow | None) -> dict[str, Any]:
    estimate = None if row is None else row.estimate
    return {
        **vars(answer),
        "supported": list(answer.supported),
        "legal": None if row is None else row.legal,
        "expected": None if row is None else row.preferred,
        "ane_us": None if estimate is None else estimate.ane,
        "cpu_us": None if estimate is None else estimate.cpu,
        "flop": None if row is None else row.flop,
        "bytes": None if row is None else row.bytes,
    }
