"""A model of one fixed size, made to take the sizes that are wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from anesurgery.errors import Refusal, SurgeryError
from anesurgery.files.joining import default_function
from anesurgery.files.package import Loaded
from anesurgery.loading import clone
from anesurgery.mil import Function, function_of
from anesurgery.rewriting.loosened import followed, loosen

REFUSED = "sizes: this model of one size cannot be made another"
REMEDY = (
    "give the PyTorch module, a function that converts it at each size, or a model that was converted with a "
    "range of lengths"
)


def lengthened(
    loaded: Loaded, wanted: Sequence[Mapping[str, tuple[int, ...]]]
) -> tuple[Loaded, tuple[str, ...]]:
    """A copy of a model that has dynamic axes where the sizes differ from its own.

    Args:
        loaded: a model of fixed shapes.
        wanted: the shapes of inputs at each size.

    Returns:
        The copy, and what is assumed of numbers that may be read in several ways.

    Raises:
        SurgeryError: an op cannot be another size, or that cannot be told; says which and why.
    """
    name = default_function(loaded)
    copies = [function_of(clone(loaded).program, name) for _ in range(len(wanted) + 1)]
    for shapes in wanted:
        _check_ranks(copies[0], shapes)
    loosened = followed(copies, wanted)
    if isinstance(loosened, Refusal):
        raise SurgeryError(f"{REFUSED}: {loosened}; {REMEDY}")
    copied = replace(clone(loaded), spec=_ranged(loaded.spec, wanted))
    refusal = loosen(function_of(copied.program, name), loosened)
    if refusal is not None:
        raise SurgeryError(f"{REFUSED}: {refusal}; {REMEDY}")
    return copied, loosened.assumed


def _ranged(spec: Any, wanted: Sequence[Mapping[str, tuple[int, ...]]]) -> Any:
    """A specification whose inputs take all sizes between the least and the largest; None for none."""
    if spec is None:
        return None
    ranged = type(spec)()
    ranged.CopyFrom(spec)
    for feature in ranged.description.input:
        ends = [
            (min(axis), max(axis))
            for axis in zip(*(s[feature.name] for s in wanted if feature.name in s), strict=True)
        ]
        if ends and feature.type.WhichOneof("Type") == "multiArrayType":
            sizes = feature.type.multiArrayType.shapeRange.sizeRanges
            for low, high in ends:
                sizes.add(lowerBound=low, upperBound=high)
        elif ends and feature.type.WhichOneof("Type") == "imageType":
            pixels = feature.type.imageType.imageSizeRange
            for side, (low, high) in zip((pixels.heightRange, pixels.widthRange), ends[-2:], strict=True):
                side.lowerBound, side.upperBound = low, high
    for feature in ranged.description.output:
        if feature.type.WhichOneof("Type") == "multiArrayType":
            feature.type.multiArrayType.ClearField("shape")
    return ranged


def _check_ranks(function: Function, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Each input keeps its number of axes.

    Raises:
        SurgeryError: one does not.
    """
    for name, shape in shapes.items():
        own = tuple(function.inputs[name].shape)
        if len(own) != len(shape):
            raise SurgeryError(
                f"sizes: {name} has {len(own)} axes, as in {own}, and the shape given is {shape}"
            )
