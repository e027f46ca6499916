"""Check the samples that a compression is given, and hold some of them out to measure its loss."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery.errors import SurgeryError

HELD_OUT = 4
"""Every n-th sample is held out: of eight samples, two remain to measure the loss."""
FEW = 8
"""With fewer samples there is a warning. A choice: among fewer, one unusual sample decides ranges."""

Sample = Mapping[str, Any]


@dataclass(frozen=True)
class Samples:
    """The samples that correct the weights, and those that measure the loss."""

    calibration: Sequence[Sample]
    held_out: Sequence[Sample]
    doubts: tuple[str, ...]
    """What the samples lack, in words."""


def read_samples(inputs: Any) -> Samples:
    """Check samples, and hold out every fourth, at least one of several.

    Args:
        inputs: one sample (a mapping of input names to arrays) or several.

    Raises:
        SurgeryError: there are none, or one is no sample, or holds NaN or infinity.
    """
    if inputs is None:
        raise SurgeryError(
            "compress corrects weights with samples: give inputs=[{name: array}, ...], some dozens of "
            "real samples; random ones say little about a trained model"
        )
    if isinstance(inputs, (str, bytes, os.PathLike, np.ndarray)) or not isinstance(inputs, Iterable):
        raise SurgeryError(
            f"inputs is a {type(inputs).__name__}; give a list of samples, each a dictionary of arrays by name"
        )
    several = [inputs] if isinstance(inputs, Mapping) else inputs
    samples = [_checked_sample(number, values) for number, values in enumerate(several)]
    if not samples:
        raise SurgeryError("inputs has no sample; give some dozens of real ones")
    if len(samples) == 1:
        doubt = "only one sample: none is held out, so the loss is not measured; give some dozens"
        return Samples(samples, (), (doubt,))
    period = min(HELD_OUT, len(samples))
    calibration = [each for number, each in enumerate(samples) if number % period != period - 1]
    held_out = samples[period - 1 :: period]
    return Samples(calibration, held_out, (*_doubts(samples), *_repeated(calibration, held_out)))


def _checked_sample(number: int, values: Any) -> Sample:
    """Return a sample whose torch tensors are detached.

    Raises:
        SurgeryError: it is no dictionary of arrays, or one holds NaN, infinity or masked numbers.
    """
    if not isinstance(values, Mapping):
        raise SurgeryError(
            f"sample {number} is a {type(values).__name__}; give a dictionary of arrays by input name"
        )
    sample = {name: value.detach() if hasattr(value, "detach") else value for name, value in values.items()}
    for name, value in sample.items():
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
    return sample


def _repeated(calibration: Sequence[Sample], held_out: Sequence[Sample]) -> Iterable[str]:
    """Yield a doubt if samples held out are in the calibration too: the loss on them says nothing."""
    seen = set(map(_digest, calibration))
    count = sum(_digest(sample) in seen for sample in held_out)
    if count:
        yield (
            f"{count} of the {len(held_out)} samples held out are in the calibration too, so the loss on them "
            "is less than on others; give each sample once"
        )


def _digest(sample: Sample) -> frozenset[tuple[str, tuple[int, ...], bytes]]:
    """Return a key that is equal for equal samples."""
    arrays = {name: np.asarray(value) for name, value in sample.items()}
    return frozenset(
        (name, array.shape, hashlib.blake2b(array.tobytes(), digest_size=16).digest())
        for name, array in arrays.items()
    )


def _doubts(samples: Sequence[Sample]) -> Iterable[str]:
    """Yield what the samples lack: there are few, or an input never changes."""
    if len(samples) < FEW:
        yield f"{len(samples)} samples only: give some dozens, which differ as real inputs do"
    for name in samples[0]:
        arrays = [np.asarray(sample[name]) for sample in samples if name in sample]
        if all(np.array_equal(arrays[0], other) for other in arrays[1:]):
            yield f"the input {name!r} is the same in all samples; give it as it varies in use"


__all__ = ["Samples", "read_samples"]
