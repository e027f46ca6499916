"""The ANE segments of a model in the form in which ANECompat prints them on a Mac, one key for each.

ANECompat (fredyshox/ANECompat, MIT) prints for each segment that the engine evaluates:
`{"isegment": 0, "inputs": {"image": {"shape": [416, 416, 1, 3, 1]}}, "outputs": {...}}`. A shape is five
numbers: width, height, depth, channels, batch. Its published examples fix this order: an RGB image of 416x416
is [416, 416, 1, 3, 1]; a package with NHWC pixels shows [12, 1280, 1, 720, 1] for (1, 720, 1280, 12); the ten
scores of a neural network are [1, 1, 1, 10, 1].

What is not certain. No published example shows a tensor of an ML Program with fewer than four axes: here they
are aligned to the right, as they are stored, so that (8, 16) is [16, 8, 1, 1, 1]; and none shows five axes,
here (N, C, D, H, W). All published keys have `isegment` 0, so that it may count all segments or those on the
ANE: here it counts those on the ANE. Which values a segment shows at its borders is Core ML's choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anesurgery.placement.inspection import Inspection, Segment


def model_keys(inspection: Inspection) -> list[dict[str, Any]]:
    """The ANE segments of a model, in file order; those of a pipeline part after part, each counted from 0.

    A value of which not all lengths are known (a flexible shape, most inner values of a neural network) has
    the shape [].
    """
    keys = [_key(index, segment) for index, segment in enumerate(_on_ane(inspection))]
    return keys + [key for part in inspection.parts.values() for key in model_keys(part)]


def _on_ane(inspection: Inspection) -> Iterator[Segment]:
    return (segment for segment in inspection.segments if segment.unit == "ane")


def _key(index: int, segment: Segment) -> dict[str, Any]:
    ports = {"inputs": segment.inputs, "outputs": segment.outputs}
    return {
        "isegment": index,
        **{
            side: {name: {"shape": five(shape)} for name, shape in values.items()}
            for side, values in ports.items()
        },
    }


def five(shape: tuple[int, ...]) -> list[int]:
    """A shape as width, height, depth, channels, batch.

    Args:
        shape: as the program has it, the last axis is the width.

    Returns:
        [] for an unknown length or more than five axes.
    """
    if len(shape) > 5 or any(not isinstance(d, int) or d < 0 for d in shape):
        return []
    if len(shape) == 5:
        return list(reversed(shape))
    batch, channels, height, width = (1,) * (4 - len(shape)) + shape
    return [width, height, 1, channels, batch]
