"""See that calibration samples say something, and keep some of them apart to judge by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery.errors import SurgeryError

HELD_OUT = 4
"""Of so many samples one is kept out of the calibration."""
FEW = 8
"""Samples below which a calibration is doubted."""

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Samples:
    """What weights are corrected by, and what the result is judged by."""

    calibration: Sequence[Values]
    held_out: Sequence[Values]
    doubts: tuple[str, ...]
    """What the samples lack, in words."""


def read_samples(inputs: Any) -> Samples:
    """Samples shared out: every fourth, at least one, is held out.

    Raises:
        SurgeryError: there are none, or one holds NaN or infinity.
    """
    if inputs is None:
        raise SurgeryError(
            "compressing is corrected by what the model sees: give inputs=[{name: array}, ...], some dozens of "
            "real samples; random ones say little about a trained model"
        )
    given: list[Values] = [inputs] if isinstance(inputs, Mapping) else list(inputs)
    if not given:
        raise SurgeryError("inputs has no sample; give some dozens of real ones")
    for number, values in enumerate(given):
        _check(number, values)
    if len(given) == 1:
        return Samples(
            given, (), ("one sample only: none is held out, so no loss is stated; give some dozens",)
        )
    apart = [i % HELD_OUT == HELD_OUT - 1 or len(given) - 1 == i < HELD_OUT - 1 for i in range(len(given))]
    rest, held = ([v for v, out in zip(given, apart, strict=True) if out == side] for side in (False, True))
    return Samples(rest, held, tuple(_doubts(given)))


def _check(number: int, values: Any) -> None:
    if not isinstance(values, Mapping):
        raise SurgeryError(
            f"sample {number} is a {type(values).__name__}; give a dictionary of arrays by input name"
        )
    for name, value in values.items():
        array = np.asarray(value) if not hasattr(value, "detach") else np.asarray(value.detach())
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise SurgeryError(
                f"sample {number}: {name!r} holds NaN or infinity; leave it out or mend what made it"
            )


def _doubts(given: Sequence[Values]) -> Iterable[str]:
    """What is missing in samples."""
    if len(given) < FEW:
        yield f"{len(given)} samples only: give some dozens, which differ as real inputs do"
    for name in given[0]:
        arrays = [np.asarray(values[name]) for values in given if name in values]
        if all(np.array_equal(arrays[0], other) for other in arrays[1:]):
            yield f"the input {name!r} is the same in all samples; give it as it varies in use"
