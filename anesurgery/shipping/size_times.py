"""Estimate how long one call of a model takes at each input length, so that `choose_sizes` can pick sizes.

`size_times` makes the model at up to 8 lengths, inspects each on the target chip, and returns a `SizeTimes`: a
function of the length that interpolates between these 8. The user calls it before `choose_sizes(time=...)`.
"""

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
"""Lengths at which the model is made and estimated: each costs a conversion; times between change little."""


@dataclass(frozen=True)
class SizeTimes:
    """The expected milliseconds of one call, as a function of the length: `times(300)`.

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
        """Return the largest size, in bytes, of a package with this many sizes."""
        return self.weights + count * self.program

    def __call__(self, length: int) -> float:
        """Return the expected milliseconds at a length.

        Interpolates linearly between the estimated lengths; beyond them, takes the time of the nearest one.
        """
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
    probes = _probe_lengths(read_lengths(lengths), multiple)
    sized = sizes(
        model,
        {name: [tuple(n or length for n in shape) for length in probes] for name, shape in shapes.items()},
        dtypes=dtypes,
    )
    inspections = dict(zip(probes, sized.inspect(device).values(), strict=True))
    milliseconds = {
        length: inspection.time.ms
        for length, inspection in inspections.items()
        if inspection.time and inspection.time.measurements
    }
    if not milliseconds:
        why = _no_time_reason(inspections[probes[-1]])
        raise SurgeryError(f"no length has an estimated time on {device}: {why}")
    return SizeTimes(milliseconds, inspections, *_stored_bytes(sized))


def _stored_bytes(sized: SizedModel) -> tuple[int, int]:
    """Return the bytes that `save` writes: (all weights, the program of one size)."""
    with TemporaryDirectory(prefix="anesurgery-") as scratch:
        folder = sized.save(Path(scratch) / "sized")
        # sizes link to one file of weights, which counts once
        weights = {file.stat().st_ino: file.stat().st_size for file in folder.rglob("*.bin")}
        programs = sum(file.stat().st_size for file in folder.rglob("*.mlmodel"))
    return sum(weights.values()), programs // len(sized.models)


def _probe_lengths(share_of_length: Mapping[int, float], multiple: int) -> list[int]:
    """Return rising lengths between the shortest and the longest call, evenly spaced on a log scale."""
    first, last = (-(-n // multiple) * multiple for n in (min(share_of_length), max(share_of_length)))
    spread = np.geomspace(first, last, PROBES).round().astype(int).tolist()
    return sorted({min(-(-n // multiple) * multiple, last) for n in spread})


def _no_time_reason(inspection: Inspection) -> str:
    """Return the note of an inspection that says why it has no time."""
    return next((note for note in inspection.notes if note.startswith("no time")), "no time is known")
