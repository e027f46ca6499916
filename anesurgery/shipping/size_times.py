"""The expected time of a call at each length, for the choice of sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from anesurgery.doors import door
from anesurgery.errors import SurgeryError
from anesurgery.placement.inspection import Inspection
from anesurgery.placement.target import Target
from anesurgery.shipping.several_sizes import SizedModel, sizes
from anesurgery.splitting.size_choice import Lengths, read_lengths

PROBES = 8
"""Lengths at which a model is made; between them times change little, or in steps that no estimate knows."""


@dataclass(frozen=True)
class SizeTimes:
    """The milliseconds of a call. Call it with a length.

    Attributes:
        milliseconds: length -> time, at the lengths that were estimated. Lengths at which the model stays on
            the CPU are left out.
        inspections: length -> where the ops run.
        weights: bytes of the weights of all these lengths, stored once.
        program: bytes that each length adds.
    """

    milliseconds: Mapping[int, float]
    inspections: Mapping[int, Inspection]
    weights: int
    program: int

    def package(self, count: int) -> int:
        """The most bytes of a package with this many sizes."""
        return self.weights + count * self.program

    def __call__(self, length: int) -> float:
        """The time at a length, on a straight line between two that are known; else that of the nearest."""
        return float(np.interp(length, list(self.milliseconds), list(self.milliseconds.values())))


@door("model")
def size_times(
    model: Any,
    shapes: Mapping[str, Sequence[int | None]],
    lengths: Lengths,
    target: Target | str,
    *,
    multiple: int = 1,
    dtypes: Mapping[str, str] | None = None,
) -> SizeTimes:
    """Estimate the time of a call at several lengths, as `time` for `choose_sizes`.

    The model is made at up to 8 lengths between the least and the largest, evenly spread over their logarithms.

    Args:
        model: as for `sizes`: with dynamic shapes, a PyTorch module, or a function that converts at shapes.
        shapes: input -> its shape, with None for the length: {"ids": (1, None)}.
        lengths: as for `choose_sizes`.
        target: of one chip, as "M4/macOS 15".
        multiple: as for `choose_sizes`.
        dtypes: as for `sizes`.

    Returns:
        The `SizeTimes`: called with a length, it gives the expected milliseconds of a call.

    Raises:
        LoadError: the model cannot be read.
        SurgeryError: no shape has a length, the model cannot have one of the lengths, or there is no estimate
            for this target.
        UnknownName: no such target or input.
    """
    device = Target.parse(target)
    if not any(None in shape for shape in shapes.values()):
        raise SurgeryError('size_times: no shape has a length; put None in its place, as {"ids": (1, None)}')
    probes = _probes(read_lengths(lengths), multiple)
    made = sizes(
        model,
        {name: [tuple(n or length for n in shape) for length in probes] for name, shape in shapes.items()},
        dtypes=dtypes,
    )
    inspections = dict(zip(probes, made.inspect(device).values(), strict=True))
    known = {length: one.time.ms for length, one in inspections.items() if one.time and one.time.measurements}
    if not known:
        raise SurgeryError(f"size_times: at no length on {device}: {_why(inspections[probes[-1]])}")
    return SizeTimes(known, inspections, *_stored(made))


def _stored(made: SizedModel) -> tuple[int, int]:
    """Bytes of the weights, once, and of the program of one size, seen where they are written."""
    with TemporaryDirectory(prefix="anesurgery-") as scratch:
        folder = made.save(Path(scratch) / "sized")
        # sizes link to one file of weights, which counts once
        weights = {file.stat().st_ino: file.stat().st_size for file in folder.rglob("*.bin")}
        programs = sum(file.stat().st_size for file in folder.rglob("*.mlmodel"))
    return sum(weights.values()), programs // len(made.models)


def _probes(shares: Mapping[int, float], multiple: int) -> list[int]:
    """Lengths between the shortest and the longest call, at which times are estimated."""
    first, last = (-(-n // multiple) * multiple for n in (min(shares), max(shares)))
    spread = np.geomspace(first, last, PROBES).round().astype(int).tolist()
    return sorted({min(-(-n // multiple) * multiple, last) for n in spread})


def _why(inspection: Inspection) -> str:
    return next((note for note in inspection.notes if note.startswith("no time")), "no time is known")
