"""See that calibration samples say something, and keep some of them apart to judge by."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery.errors import SurgeryError

HELD_OUT = 4
"""Of so many samples one is kept out of the calibration: a quarter, so that of eight two are left to judge by.
"""
FEW = 8
"""Samples below which a calibration is doubted. A choice: of fewer, one unusual sample decides ranges."""

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
        SurgeryError: there are none, or one is no sample, or holds NaN or infinity.
    """
    if inputs is None:
        raise SurgeryError(
            "compressing is corrected by what the model sees: give inputs=[{name: array}, ...], some dozens of "
            "real samples; random ones say little about a trained model"
        )
    if isinstance(inputs, (str, bytes, os.PathLike, np.ndarray)) or not isinstance(inputs, Iterable):
        raise SurgeryError(
            f"inputs is a {type(inputs).__name__}; give a list of samples, each a dictionary of arrays by name"
        )
    given = [_read(*each) for each in enumerate([inputs] if isinstance(inputs, Mapping) else inputs)]
    if not given:
        raise SurgeryError("inputs has no sample; give some dozens of real ones")
    if len(given) == 1:
        return Samples(
            given, (), ("one sample only: none is held out, so no loss is stated; give some dozens",)
        )
    apart = [i % HELD_OUT == HELD_OUT - 1 or len(given) - 1 == i < HELD_OUT - 1 for i in range(len(given))]
    rest, held = ([v for v, out in zip(given, apart, strict=True) if out == side] for side in (False, True))
    return Samples(rest, held, (*_doubts(given), *_seen(rest, held)))


def _read(number: int, values: Any) -> Values:
    """A sample that was looked at.

    Raises:
        SurgeryError: it is no dictionary of arrays, or one holds NaN or infinity, or numbers that are masked.
    """
    if not isinstance(values, Mapping):
        raise SurgeryError(
            f"sample {number} is a {type(values).__name__}; give a dictionary of arrays by input name"
        )
    read = {name: value.detach() if hasattr(value, "detach") else value for name, value in values.items()}
    for name, value in read.items():
        try:
            array = np.asarray(value)
        except (ValueError, TypeError, RuntimeError) as error:
            raise SurgeryError(f"sample {number}: {name!r} is no array: {error}") from error
        if np.ma.is_masked(value):
            raise SurgeryError(f"sample {number}: {name!r} holds masked numbers; fill them in, or leave it out")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise SurgeryError(
                f"sample {number}: {name!r} holds NaN or infinity; leave it out or mend what made it"
            )
    return read


def _seen(calibration: Sequence[Values], held_out: Sequence[Values]) -> Iterable[str]:
    """Samples held out that are in the calibration too, by which nothing can be judged."""
    seen = set(map(_digest, calibration))
    count = sum(_digest(values) in seen for values in held_out)
    if count:
        yield (
            f"{count} of the {len(held_out)} samples held out are in the calibration too, so the loss on them "
            "is less than on others; give each sample once"
        )


def _digest(values: Values) -> frozenset[tuple[str, tuple[int, ...], bytes]]:
    """What equal samples have in common."""
    arrays = {name: np.asarray(value) for name, value in values.items()}
    return frozenset(
        (name, array.shape, hashlib.blake2b(array.tobytes(), digest_size=16).digest())
        for name, array in arrays.items()
    )


def _doubts(given: Sequence[Values]) -> Iterable[str]:
    """What is missing in samples."""
    if len(given) < FEW:
        yield f"{len(given)} samples only: give some dozens, which differ as real inputs do"
    for name in given[0]:
        arrays = [np.asarray(values[name]) for values in given if name in values]
        if all(np.array_equal(arrays[0], other) for other in arrays[1:]):
            yield f"the input {name!r} is the same in all samples; give it as it varies in use"
