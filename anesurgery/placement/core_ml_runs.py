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
from anesurgery.placement.calibration import features_of
from anesurgery.placement.inspection import OpRow
from anesurgery.placement.inspector import inspect
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
    progress: Callable[[str], object] = lambda words: None,
) -> dict[str, Any]:
    """Load and run a model on this Mac, ask Core ML where its ops run, and put beside it what is expected.

    Args:
        model: path of a package or `.mlmodel`.
        target: what is expected is said for its chips and OS.
        function: of a model that has several.
        settings: names of compute units to measure.
        runs: number of timed predictions for each setting.
        progress: called with what is being done.

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
    place, seconds = compiled(str(Path(model).expanduser()))
    rows = []
    for units in settings:
        progress(units)
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
        timing = timed(place, units, inputs, function=function, stateful=stateful, runs=runs)
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


# How long Core ML takes on this Mac to compile, load and run a model, for one setting of compute units.

CLOCK: Callable[[], float] = time.perf_counter
"""Seconds since some moment."""

LOADS = 3
"""The first is the one in which the engine's program is made; the median of the others is a later load."""
WARM = 5
"""Predictions before those that count: the first ones wake the engine."""
LEAST = 10
"""Predictions below which a spread says nothing; so many are made whatever they take."""


@dataclass(frozen=True)
class Predictions:
    """Times of single predictions, in milliseconds.

    Attributes:
        count: of predictions, those to warm up left out.
        median: of their times.
        least: the shortest.
        low: nine of ten took longer.
        high: nine of ten took less.
    """

    count: int
    median: float
    least: float
    low: float
    high: float


@dataclass(frozen=True)
class Timing:
    """One setting of compute units.

    Attributes:
        first_load: seconds of the first load in this process. The system keeps what it made for the engine, so
            that this is a first load only on a machine that never loaded the model.
        later_load: seconds, the median of the loads after it.
        predictions: with one set of sampled inputs.
    """

    first_load: float
    later_load: float
    predictions: Predictions

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def compiled(model: str) -> tuple[str, float]:
    """The folder of the compiled model, and the seconds that compiling took.

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


def timed(
    place: str,
    compute_units: str,
    inputs: Mapping[str, Any],
    *,
    function: str | None = None,
    stateful: bool = False,
    runs: int = 50,
    seconds: float = 20.0,
) -> Timing:
    """Load a compiled model and run it.

    Args:
        place: folder of the compiled model.
        compute_units: a name of `coremltools.ComputeUnit`.
        inputs: as Core ML takes them, by name.
        function: of a model that has several.
        stateful: does it keep states? One set of states then serves all predictions.
        runs: predictions that count, after those that warm up.
        seconds: after which no further prediction is made, once there are `LEAST`.

    Raises:
        LoadError: Core ML does not load or run it so.
    """
    own = {} if function is None else {"function_name": function}
    loads = list[float]()
    try:
        for _ in range(LOADS):
            start = CLOCK()
            model = ct.models.CompiledMLModel(place, ct.ComputeUnit[compute_units], **own)
            loads.append(CLOCK() - start)
        state = {"state": model.make_state()} if stateful else {}
        taken = list(_taken(lambda: model.predict(dict(inputs), **state), runs, seconds))
    except Exception as error:
        raise LoadError(f"{compute_units}: {error}") from error
    return Timing(loads[0], statistics.median(loads[1:]), _spread(taken))


def _taken(predict: Callable[[], Any], runs: int, seconds: float) -> Iterator[float]:
    """Milliseconds of each prediction that counts."""
    for _ in range(WARM):
        predict()
    begin = CLOCK()
    for count in range(runs):
        start = CLOCK()
        if count >= LEAST and start - begin > seconds:
            return
        predict()
        yield 1000 * (CLOCK() - start)


def _spread(taken: list[float]) -> Predictions:
    tenths = statistics.quantiles(taken, n=10, method="inclusive") if len(taken) > 1 else taken * 9
    return Predictions(len(taken), statistics.median(taken), min(taken), tenths[0], tenths[-1])
