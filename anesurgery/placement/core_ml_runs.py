"""Measure a model with Core ML on a Mac and record the prediction beside it, so that rates can be learned.

`anesurgery measure` calls `measure` and writes its result as JSON, without weights:

* `format`: "anesurgery.measurement/1"; `host`: chip and OS; `coremltools`: its version;
* `model`: name of the file; `function`: null for the default one; `compile_s`: seconds that compiling took;
* `asks`: the work of the ops of an ML Program on this chip, from which times are fitted (`timing.OpLoad`, in
  the order of its fields, equal ops merged); null for other models;
* `settings`, one for each setting of compute units: `compute_units`; `timing` (`stopwatch.Timing`: seconds of
  the first and of a later load, milliseconds of predictions), null where Core ML does not load or run it so;
  `ops`, Core ML's plan, null where it makes none; `error`: why something is null, in words.

Each op has `name`, `op` (its type), `unit` (chosen; null: none named), `supported` (units), `cost` (its share
of the whole), and the prediction: `legal`, `expected`, `ane_us`, `cpu_us`, `flop`, `bytes`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from anesurgery.errors import LoadError, SurgeryError
from anesurgery.interpret.features import present
from anesurgery.interpret.predictor import Predictor, program_of
from anesurgery.mil import ct, quiet_host
from anesurgery.placement import compute_plan
from anesurgery.placement.calibration import MEASUREMENT_FORMAT, features_of
from anesurgery.placement.inspection import OpRow
from anesurgery.placement.inspector import inspect
from anesurgery.placement.target import Target

SETTINGS = ("CPU_AND_NE", "CPU_AND_GPU", "ALL", "CPU_ONLY")
"""The settings of compute units, in the order in which they are measured."""


def measure(
    model: Any,
    target: Target,
    function: str | None = None,
    *,
    settings: Sequence[str] = SETTINGS,
    runs: int = 50,
    progress: Callable[[str], object] = lambda words: None,
) -> dict[str, Any]:
    """Load and run a model on this Mac, ask Core ML where its ops run, and add the prediction.

    Args:
        model: path of a package or `.mlmodel`.
        target: the chips and OS of the prediction.
        function: the function of a model that has several.
        settings: names of compute units to measure.
        runs: number of timed predictions for each setting.
        progress: called with the name of each step.

    Raises:
        SurgeryError: this is no Mac with macOS 14.4 or later, or no setting could be measured.
        LoadError: the model cannot be read or compiled.
    """
    if not compute_plan.available():
        raise SurgeryError(f"{compute_plan.NOT_HERE}; run this on such a Mac, and take the file along")
    predictor = Predictor(model, function=function)
    inputs = predictor.sample()
    inputs = present(predictor.inputs, inputs) if predictor.inputs else inputs
    progress("compiling")
    place, seconds = compile_model(str(Path(model).expanduser()))
    rows = []
    for units in settings:
        progress(units)
        rows.append(
            _measured_setting(
                model, place, replace(target, compute_units=units), inputs, function, runs, predictor
            )
        )
    if all(row["timing"] is None and row["ops"] is None for row in rows):
        raise SurgeryError(f"Core ML measures nothing of {model}: {rows[0]['error']}")
    return {
        "format": MEASUREMENT_FORMAT,
        "host": compute_plan.host(),
        "coremltools": str(ct.__version__),
        "model": Path(str(model)).name,
        "function": function,
        "compile_s": seconds,
        "asks": _work_of_ops(predictor, function),
        "settings": rows,
    }


def _work_of_ops(predictor: Predictor, function: str | None) -> dict[str, Any] | None:
    """Return the work of the ops of an ML Program on this chip; None for other models. Reads no file again."""
    program = program_of(predictor)
    return None if program is None else features_of(program, function, compute_plan.host())


def _measured_setting(
    model: Any,
    place: str,
    target: Target,
    inputs: dict[str, Any],
    function: str | None,
    runs: int,
    predictor: Predictor,
) -> dict[str, Any]:
    """Return the row of one setting; what could not be measured is null, and `error` says why."""
    row: dict[str, Any] = {"compute_units": target.compute_units, "timing": None, "ops": None, "error": None}
    stateful = bool(predictor.make_state())
    try:
        units = target.compute_units
        timing = time_model(place, units, inputs, function=function, stateful=stateful, runs=runs)
        row["timing"] = timing.to_json()
        planned = compute_plan.planned_ops(compute_plan.ask(place, target), function)
        expected = compute_plan.by_spelling(inspect(model, target, function=function).ops)
        ops = [_plan_beside_prediction(op, expected.get(op.name)) for op in planned]
        row["ops"] = ops if any(op["unit"] for op in ops) else None
    except (LoadError, SurgeryError) as error:
        row["error"] = str(error)
    return row


def _plan_beside_prediction(planned: compute_plan.PlannedOp, row: OpRow | None) -> dict[str, Any]:
    estimate = None if row is None else row.estimate
    return {
        **vars(planned),
        "supported": list(planned.supported),
        "legal": None if row is None else row.legal,
        "expected": None if row is None else row.preferred,
        "ane_us": None if estimate is None else estimate.ane,
        "cpu_us": None if estimate is None else estimate.cpu,
        "flop": None if row is None else row.flop,
        "bytes": None if row is None else row.bytes,
    }


# The time that Core ML takes on this Mac to compile, load and run a model with one setting of compute units.

CLOCK: Callable[[], float] = time.perf_counter
"""Returns seconds since a fixed moment; tests replace it."""

LOADS = 3
"""How often a model is loaded. The first load makes the engine's program; of the rest the median counts."""
WARM_UP = 5
"""Predictions before the timed ones: the first ones wake the engine."""
LEAST_PREDICTIONS = 10
"""Predictions that are timed however long they take: a spread over fewer says nothing."""


@dataclass(frozen=True)
class Predictions:
    """Times of single predictions, in milliseconds.

    Attributes:
        count: number of timed predictions.
        median: their median.
        least: the shortest.
        low: the first decile: nine of ten took longer.
        high: the last decile: nine of ten took less.
    """

    count: int
    median: float
    least: float
    low: float
    high: float


@dataclass(frozen=True)
class Timing:
    """The times of one setting of compute units.

    Attributes:
        first_load: seconds of the first load in this process. The system caches the engine's program, so this
            is a true first load only on a machine that never loaded the model.
        later_load: seconds, the median of the loads after it.
        predictions: times of predictions with one set of sampled inputs.
    """

    first_load: float
    later_load: float
    predictions: Predictions

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def compile_model(model: str) -> tuple[str, float]:
    """Compile a model; return the folder of the compiled model, and the seconds that it took.

    Raises:
        LoadError: Core ML does not compile it.
    """
    start = CLOCK()
    try:
        with quiet_host():
            place = str(ct.models.utils.compile_model(model))
    except Exception as error:
        raise LoadError(f"Core ML does not compile {model}: {error}") from error
    return place, CLOCK() - start


def time_model(
    place: str,
    compute_units: str,
    inputs: Mapping[str, Any],
    *,
    function: str | None = None,
    stateful: bool = False,
    runs: int = 50,
    seconds: float = 20.0,
) -> Timing:
    """Load a compiled model several times and time its predictions.

    Args:
        place: folder of the compiled model.
        compute_units: a name of `coremltools.ComputeUnit`.
        inputs: name -> value, as Core ML takes them.
        function: the function of a model that has several.
        stateful: does it keep states? All predictions then share one set of states.
        runs: number of timed predictions, after those that warm up.
        seconds: no further prediction starts after this time, once there are `LEAST_PREDICTIONS`.

    Raises:
        LoadError: Core ML does not load or run it so.
    """
    options = {} if function is None else {"function_name": function}
    loads = list[float]()
    try:
        for _ in range(LOADS):
            start = CLOCK()
            model = ct.models.CompiledMLModel(place, ct.ComputeUnit[compute_units], **options)
            loads.append(CLOCK() - start)
        state = {"state": model.make_state()} if stateful else {}
        durations = list(_prediction_times(lambda: model.predict(dict(inputs), **state), runs, seconds))
    except Exception as error:
        raise LoadError(f"{compute_units}: {error}") from error
    return Timing(loads[0], statistics.median(loads[1:]), _summary(durations))


def _prediction_times(predict: Callable[[], Any], runs: int, seconds: float) -> Iterator[float]:
    """Warm up, then yield the milliseconds of each timed prediction."""
    for _ in range(WARM_UP):
        predict()
    begin = CLOCK()
    for count in range(runs):
        start = CLOCK()
        if count >= LEAST_PREDICTIONS and start - begin > seconds:
            return
        predict()
        yield 1000 * (CLOCK() - start)


def _summary(times: list[float]) -> Predictions:
    deciles = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else times * 9
    return Predictions(len(times), statistics.median(times), min(times), deciles[0], deciles[-1])
