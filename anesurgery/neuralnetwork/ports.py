"""Inputs and outputs: from what the description of a model says to blobs, and back.

Inputs keep the shape and type of the description, except 64 bit floats, which are 32 bit ones in an ML Program.
In the rank 5 mapping [C] becomes (1, C, 1, 1) and [C, H, W] becomes (1, C, H, W), with a sequence and a batch
of 1. An output has the shape that the description states where that differs from its blob's by axes of 1 only
(coremltools' own tests, `test_model.py`, expect it of Core ML). Otherwise it has the shape of its blob in the
exact mapping; in the rank 5 mapping [C] where all other axes are 1, else [C, H, W] where the sequence and
the batch are 1, else all five axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from anesurgery.errors import LoadError, NotExpressible
from anesurgery.files.interface import IDENTIFIERS
from anesurgery.files.protobuf import proto
from anesurgery.mil import Array, Function, Var, is_symbolic, mb, quiet_host, static_shape, types
from anesurgery.neuralnetwork.context import Context
from anesurgery.neuralnetwork.spec import DAMAGED, EXACT

with quiet_host():
    from coremltools.converters.mil.mil import get_new_symbol

_FEATURES = proto.FeatureTypes_pb2
ARRAYS: dict[str, Any] = {"INT32": types.int32, "FLOAT16": types.fp16, "INT8": types.int8}
"""Type of a multi-array -> type in the program; any other is fp32."""
CHANNELS = {"GRAYSCALE": 1, "GRAYSCALE_FLOAT16": 1, "RGB": 3, "BGR": 3}
BIASES = {
    "GRAYSCALE": ("grayBias",),
    "GRAYSCALE_FLOAT16": ("grayBias",),
    "RGB": ("redBias", "greenBias", "blueBias"),
    "BGR": ("blueBias", "greenBias", "redBias"),
}
"""Colour space -> fields of the scaler, in the order of the channels."""
LEGACY_AXES = {1: [0, 2, 3], 3: [0], 5: []}
"""Number of axes of an array in the rank 5 mapping -> the axes that are added."""


def placeholder(feature: Any) -> Any:
    """Return the input of a function for a `FeatureDescription` message.

    Raises:
        LoadError: it is neither an image nor an array of known rank.
    """
    kind = feature.type.WhichOneof("Type")
    if kind == "imageType":
        space = _space(feature)
        half = space == "GRAYSCALE_FLOAT16"
        return mb.placeholder(_image_shape(feature), dtype=types.fp16 if half else types.fp32)
    if kind != "multiArrayType":
        raise LoadError(f"input {feature.name!r} is of type {kind}; a network takes images and multi-arrays")
    shape = _array_shape(feature.type.multiArrayType)
    if not shape:
        raise LoadError(f"input {feature.name!r} has no shape; state one in the description of the model")
    return mb.placeholder(shape, dtype=ARRAYS.get(array_type(feature), types.fp32))


def array_type(feature: Any) -> str:
    """Return the element type of a multi-array, as the specification names it; "" for one without."""
    kinds = _FEATURES.ArrayFeatureType.ArrayDataType
    code = feature.type.multiArrayType.dataType
    return str(kinds.Name(code)) if code else ""


def _space(feature: Any) -> str:
    code = feature.type.imageType.colorSpace
    space = str(_FEATURES.ImageFeatureType.ColorSpace.Name(code))
    if space not in CHANNELS:
        raise LoadError(f"the image {feature.name!r} has no colour space; expected {', '.join(CHANNELS)}")
    return space


def _size(low: int, high: int) -> Any:
    return low if low == high else get_new_symbol()


def _image_shape(feature: Any) -> tuple[Any, ...]:
    image = feature.type.imageType
    sizes: list[Any] = [image.height, image.width]
    flexible = image.WhichOneof("SizeFlexibility")
    if flexible == "imageSizeRange":
        ranges = (image.imageSizeRange.heightRange, image.imageSizeRange.widthRange)
        sizes = [_size(r.lowerBound, r.upperBound) for r in ranges]
    elif flexible == "enumeratedSizes":
        listed = [(s.height, s.width) for s in image.enumeratedSizes.sizes]
        sizes = [_size(min(axis), max(axis)) for axis in zip(*listed, strict=True)]
    return (1, CHANNELS[_space(feature)], *sizes)


def _array_shape(array: Any) -> tuple[Any, ...]:
    flexible = array.WhichOneof("ShapeFlexibility")
    if flexible == "shapeRange" and array.shapeRange.sizeRanges:
        return tuple(_size(r.lowerBound, r.upperBound) for r in array.shapeRange.sizeRanges)
    if flexible == "enumeratedShapes" and array.enumeratedShapes.shapes:
        listed = [tuple(s.shape) for s in array.enumeratedShapes.shapes]
        if len({len(shape) for shape in listed}) > 1:
            raise NotExpressible("shapes of different ranks are listed for one input; keep those of one rank")
        return tuple(_size(min(axis), max(axis)) for axis in zip(*listed, strict=True))
    return tuple(array.shape)


def read(ctx: Context, network: Any, feature: Any, var: Var) -> Var:
    """Return the blob of an input: the value that the layers see.

    Raises:
        LoadError: its shape does not suit the rank 5 mapping, or the preprocessing does not suit the image.
    """
    if var.dtype != types.fp32:
        var = mb.cast(x=var, dtype="fp32")
    if feature.type.WhichOneof("Type") == "imageType":
        var = _preprocess(network, feature, var)
        rank4 = int(network.imageInputShapeMapping) == EXACT
        if ctx.legacy and rank4:
            ctx.exact.add(feature.name)
        five = not ctx.legacy and not rank4
        return mb.expand_dims(x=var, axes=[0]) if five else var
    if any(step.featureName == feature.name for step in network.preprocessing):
        ctx.notes.append(f"the preprocessing of {feature.name!r} was left out: it is an array, no image")
    if not ctx.legacy:
        return var
    if var.rank not in LEGACY_AXES:
        raise LoadError(
            f"input {feature.name!r} has {var.rank} axes; in the rank 5 mapping of this model an array has 1 "
            "(C), 3 (C, H, W) or 5; change the description of the model"
        )
    axes = LEGACY_AXES[var.rank]
    ctx.one_step |= bool(axes)
    return ctx.blob(mb.expand_dims(x=var, axes=axes) if axes else var)


def _preprocess(network: Any, feature: Any, var: Var) -> Var:
    for step in network.preprocessing:
        if step.featureName not in (feature.name, ""):
            continue
        kind = step.WhichOneof("preprocessor")
        if kind == "scaler":
            var = _scale(step.scaler, feature, var)
        elif kind == "meanImage":
            var = mb.sub(x=var, y=_mean(step.meanImage, feature))
    return var


def _scale(scaler: Any, feature: Any, var: Var) -> Var:
    space = _space(feature)
    names = BIASES[space]
    biases = np.array([getattr(scaler, n) for n in names], np.float32)
    others = {n for fields in BIASES.values() for n in fields} - set(names)
    if not biases.any() and any(getattr(scaler, n) for n in others):  # beside its own, others do no harm
        raise LoadError(
            f"the preprocessing of {feature.name!r} sets {', '.join(sorted(others))}, which an image of colour "
            f"space {space} has not; set {', '.join(names)}"
        )
    if scaler.channelScale != 1:
        var = mb.mul(x=var, y=np.float32(scaler.channelScale))
    return mb.add(x=var, y=biases.reshape(1, -1, 1, 1)) if biases.any() else var


def _mean(message: Any, feature: Any) -> Array:
    image = feature.type.imageType
    shape = (1, CHANNELS[_space(feature)], image.height, image.width)
    mean = np.array(message.meanImage, np.float32)
    if mean.size != math.prod(shape):
        raise LoadError(
            f"the mean image of {feature.name!r} has {mean.size} numbers, expected {math.prod(shape)} "
            f"({'x'.join(map(str, shape[1:]))}); {DAMAGED}"
        )
    return mean.reshape(shape)


def give(ctx: Context, feature: Any, var: Var) -> Var:
    """Return the output of the function for a blob, in the shape and type that the caller gets.

    Raises:
        LoadError: an image whose blob has no such shape.
    """
    if feature.type.WhichOneof("Type") == "imageType":
        image, _ = ctx.images(var)
        return image
    stated = tuple(feature.type.multiArrayType.shape)
    shape = _output_shape(ctx, var, stated)
    if stated and stated != shape and static_shape(var) is not None:
        ctx.notes.append(
            f"output {feature.name!r} has the shape {_text(shape)}; the model stated {_text(stated)}"
        )
    shaped = _reshaped(ctx, var, shape)
    kind = array_type(feature)
    return mb.cast(x=shaped, dtype=kind.lower().replace("float", "fp")) if kind in ARRAYS else shaped


def _output_shape(ctx: Context, var: Var, stated: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the shape of an output; axes of 1 are no difference to what is stated."""
    own = static_shape(var)
    if stated and own is not None and _without_ones(own) == _without_ones(stated):
        return stated
    if not ctx.legacy:
        return tuple(var.shape) or (1,)
    return as_array((1,) * (5 - var.rank) + tuple(var.shape))


def as_array(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the shape of the array outside of a network that stands for a blob of five axes."""
    if shape[:2] != (1, 1):
        return shape
    return shape[2:3] if shape[3:] == (1, 1) else shape[2:]


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [d for d in shape if d != 1]


def _reshaped(ctx: Context, var: Var, shape: tuple[Any, ...]) -> Var:
    """`var` in a shape of as many numbers; by squeezing where that is enough."""
    if tuple(var.shape) == shape:
        return var
    ones = [i for i, d in enumerate(var.shape) if not is_symbolic(d) and d == 1]
    extra = var.rank - len(shape)  # axes to take out: the first `first` ones, and the last ones
    for first in range(extra + 1):
        axes = [*ones[:first], *ones[len(ones) - (extra - first) :]] if extra <= len(ones) else []
        kept = tuple(d for i, d in enumerate(var.shape) if i not in axes)
        if axes and kept == shape:
            return mb.squeeze(x=var, axes=axes)
    return ctx.reshape(var, shape)


def vector(ctx: Context, var: Var, count: int, name: str) -> Var:
    """Return the scores of a classifier as [classes].

    Raises:
        LoadError: they are of another count.
    """
    own = static_shape(var)
    if own is None or math.prod(own) != count:
        raise LoadError(
            f"the classifier has {count} labels, but its blob {name!r} has the shape {_text(var.shape)}; "
            f"{DAMAGED}"
        )
    return _reshaped(ctx, var, (count,))


def describe(description: Any, names: dict[str, str], notes: list[str]) -> None:
    """Bring a description into the form of an ML Program's.

    Args:
        description: changed in place.
        names: old name of an input or output -> new name; those that are absent stay.
        notes: what changed is added here.
    """
    doubles = []
    for feature in [*description.input, *description.output]:
        is_array = feature.type.WhichOneof("Type") == "multiArrayType"
        if is_array and array_type(feature) in ("DOUBLE", ""):
            doubles += [feature.name] if array_type(feature) else []
            feature.type.multiArrayType.dataType = _FEATURES.ArrayFeatureType.FLOAT32
    if doubles:
        notes.append(f"64 bit floats became 32 bit floats: {', '.join(doubles)}")
    for feature in description.input:
        kind, array = feature.type, feature.type.multiArrayType
        if kind.isOptional and kind.WhichOneof("Type") == "imageType":
            kind.isOptional = False
            notes.append(f"input {feature.name!r} must be given: an image has no default in an ML Program")
        elif kind.isOptional and array.WhichOneof("defaultOptionalValue") is None:
            array.floatDefaultValue = 0.0
            notes.append(f"input {feature.name!r} is optional: when it is absent, it is 0")
    for feature in [*description.input, *description.output]:
        new = names.get(feature.name, feature.name)
        if new != feature.name:
            notes.append(f"{feature.name!r} is called {new!r}: {IDENTIFIERS}")
            feature.name = new
    for field in ("predictedFeatureName", "predictedProbabilitiesName"):
        old = getattr(description, field)
        setattr(description, field, names.get(old, old))


def mapping_note(description: Any, names: dict[str, str], function: Function) -> list[str]:
    """Return what to say of the arrays of a network in the rank 5 mapping; nothing where it has none.

    Args:
        description: of the network.
        names: old name of an input or output -> new name.
        function: made of the network.
    """
    features = [*description.input, *description.output]
    arrays = [names[f.name] for f in features if f.type.WhichOneof("Type") == "multiArrayType"]
    if not arrays:
        return []
    values = dict(function.inputs) | {var.name: var for var in function.outputs}
    words = ", ".join(f"{name} {_text(values[name].shape)}" for name in arrays)
    return [
        "the rank 5 mapping (sequence, batch, channel, height, width) has ended; arrays have the shapes "
        + words
    ]


def _text(shape: Sequence[Any]) -> str:
    return "[" + ", ".join("?" if is_symbolic(d) else str(d) for d in shape) + "]"
