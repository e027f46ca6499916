"""How long Core ML takes on this Mac to compile, load and run a model, for one setting of compute units."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from anesurgery.errors import LoadError
from anesurgery.mil import ct, quiet_host

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
