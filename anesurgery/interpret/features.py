"""Convert inputs and outputs between a caller of Core ML and a program, as the description of the model says.

The description knows images, optional inputs with defaults, and flexible shapes. An image reaches a program as
Core ML hands it over: [1, channels, height, width], 0 to 255, in the colour order that the description names.
Scale and bias are ops of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from anesurgery.errors import InterpretError, UnknownName
from anesurgery.files.protobuf import proto
from anesurgery.mil import Array

_COLORS = proto.FeatureTypes_pb2.ImageFeatureType.ColorSpace
PIXELS: dict[str, tuple[str, bool]] = {
    "RGB": ("RGB", False),
    "BGR": ("RGB", True),
    "GRAYSCALE": ("L", False),
    "GRAYSCALE_FLOAT16": ("F", False),
}
"""Colour space -> (mode of a PIL image, is the order of the channels reversed?)."""


def bind(features: Iterable[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a program, from what a caller gives to the model.

    Args:
        features: `FeatureDescription` messages of the inputs.
        values: arrays, tensors, or PIL images by input name.

    Raises:
        InterpretError: an input is missing, or has a shape, size or colour mode that the description rules out.
        UnknownName: an input that the model does not have.
    """
    wanted = {f.name: f for f in features}
    check_names(wanted, values)
    return {
        name: _BIND[feature.type.WhichOneof("Type")](name, feature.type, values.get(name))
        for name, feature in wanted.items()
    }


def check_names(wanted: Iterable[str], inputs: Any) -> None:
    """Check that inputs are a dictionary by name, and that the model has all of them.

    Raises:
        InterpretError: it is not a dictionary, or a key is not a name.
        UnknownName: with the names that come near.
    """
    names = list(wanted)
    if not isinstance(inputs, Mapping):
        takes = f"; the model takes {', '.join(names)}" if names else ""
        raise InterpretError(f"inputs are a dictionary of arrays by name, not a {type(inputs).__name__}{takes}")
    if strange := [key for key in inputs if not isinstance(key, str)]:
        raise InterpretError(f"the names of inputs are strings, not {strange[0]!r}")
    for name in inputs:
        if name not in names:
            raise UnknownName("input", name, names)


def as_array(name: str, value: Any) -> Array:
    """Return an array from what a caller may give: an array, tensor, number, or nested lists.

    Raises:
        InterpretError: nested lists of different lengths, or a tensor that holds no plain numbers.
    """
    if isinstance(value, torch.Tensor):
        return _tensor_as_array(name, value)
    try:
        return np.asarray(value)
    except ValueError as error:
        raise InterpretError(f"input {name!r} is not an array: its rows differ in length") from error


def _tensor_as_array(name: str, tensor: torch.Tensor) -> Array:
    """Return the numbers of a tensor; raise `InterpretError` if numpy cannot hold it."""
    if tensor.is_nested:
        raise InterpretError(f"input {name!r} is a nested tensor; give one of one shape, padded")
    if tensor.is_meta:
        raise InterpretError(f"input {name!r} is a meta tensor, which holds no numbers; give a real one")
    if tensor.layout != torch.strided or tensor.is_quantized:
        how = "quantized; give tensor.dequantize()" if tensor.is_quantized else "sparse; give tensor.to_dense()"
        raise InterpretError(f"input {name!r} is a tensor that is {how}")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    try:
        return (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    except TypeError as error:
        raise InterpretError(
            f"input {name!r} holds {plain.dtype}, which numpy lacks; give tensor.float()"
        ) from error


def _bind_array(name: str, kind: Any, value: Any) -> Any:
    """Check an array against its description, and return it; the default where it is missing."""
    if value is None:
        return _default(name, kind)
    array = as_array(name, value)
    shape, allowed = array.shape, _shapes(kind.multiArrayType)
    if not any(_matches(shape, ranges) for ranges in allowed):
        raise InterpretError(f"input {name!r} has shape {shape}, expected {_shapes_text(allowed)}")
    if kind.multiArrayType.dataType == kind.multiArrayType.INT32 and array.dtype.kind == "f":
        strange = array[~np.isfinite(array) | (array != np.round(array))]
        if strange.size:
            raise InterpretError(
                f"input {name!r} holds {strange[0]:g}, and the model takes integers; give int32"
            )
    return value


def _default(name: str, kind: Any) -> Array:
    """Return the default of an optional input."""
    array = kind.multiArrayType
    which = array.WhichOneof("defaultOptionalValue")
    if not kind.isOptional or which is None:
        why = "it is optional, but has no default" if kind.isOptional else "it is not optional"
        raise InterpretError(f"missing input {name!r}: {why}")
    return np.full(tuple(array.shape), getattr(array, which))


def default_shapes(features: Iterable[Any]) -> dict[str, tuple[int, ...]]:
    """Return the default shape of each input, flexible or not; of an image, the shape of its array."""
    shapes: dict[str, tuple[int, ...]] = {}
    for feature in features:
        array, image = feature.type.multiArrayType, feature.type.imageType
        if feature.type.WhichOneof("Type") == "imageType":
            channels = 3 if _pixels(feature.name, image)[1] == "RGB" else 1
            shapes[feature.name] = (1, channels, image.height, image.width)
        else:
            shapes[feature.name] = tuple(array.shape)
    return shapes


def allows(features: Iterable[Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Does the description allow these shapes of the inputs?"""
    return not refused_shape(features, shapes)


def refused_shape(features: Iterable[Any], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Name the first input whose shape the description refuses, with the shapes that it takes; "" for none."""
    features = [feature for feature in features if feature.name in shapes]
    for name, allowed in allowed_shapes(features).items():
        if allowed and not any(_matches(shapes[name], one) for one in allowed):
            given = "x".join(map(str, shapes[name]))
            return f"{name} {given}; it takes {_shapes_text(allowed)}"
    return ""


def allowed_shapes(features: Iterable[Any]) -> dict[str, list[list[Range]]]:
    """Return the shapes that each input may have, a range for each axis; of an image as its program sees it.

    The list is empty for an input that may have any shape.
    """
    shapes = {}
    for feature in features:
        kind = feature.type
        if kind.WhichOneof("Type") == "imageType":
            (_, channels, _, _) = default_shapes([feature])[feature.name]
            front: list[Range] = [(1, 1), (channels, channels)]
            shapes[feature.name] = [[*front, high, wide] for wide, high in _sizes(kind.imageType)]
        elif kind.WhichOneof("Type") == "multiArrayType":
            shapes[feature.name] = [one for one in _shapes(kind.multiArrayType) if one]
    return shapes


def images(features: Iterable[Any]) -> frozenset[str]:
    """Return the names of the features that are images."""
    return frozenset(f.name for f in features if f.type.WhichOneof("Type") == "imageType")


def eight_bit_images(features: Collection[Any]) -> dict[str, str]:
    """Return {image whose pixels are numbers from 0 to 255: its color space}; other images hold fp16."""
    kind, pictures = proto.FeatureTypes_pb2.ImageFeatureType, images(features)
    spaces = {f.name: f.type.imageType.colorSpace for f in features if f.name in pictures}
    return {n: kind.ColorSpace.Name(s) for n, s in spaces.items() if s != kind.GRAYSCALE_FLOAT16}


Range = tuple[int, int]
"""(least, most) of an axis; -1 for no bound."""


def _shapes(array: Any) -> list[list[Range]]:
    """Return the allowed shapes, each as a range for every axis; a shape without axes stands for any shape."""
    flexible = array.WhichOneof("ShapeFlexibility")
    if flexible == "enumeratedShapes":
        return [[(d, d) for d in s.shape] for s in array.enumeratedShapes.shapes]
    if flexible == "shapeRange" and array.shapeRange.sizeRanges:
        return [[(r.lowerBound, r.upperBound) for r in array.shapeRange.sizeRanges]]
    return [[(d, d) for d in array.shape]]


def _matches(shape: tuple[int, ...], allowed: list[Range]) -> bool:
    """Is a shape within the ranges of an allowed one?"""
    if not allowed or (not shape and allowed == [(1, 1)]):  # a scalar is described as one element
        return True
    return len(shape) == len(allowed) and all(
        low <= n and (high < 0 or n <= high) for n, (low, high) in zip(shape, allowed, strict=True)
    )


MOST_SHAPES = 4
"""The most shapes that a message lists."""


def _shapes_text(allowed: list[list[Range]]) -> str:
    """Return allowed shapes for messages, such as "(1, 8) or (1, 16)"; of a long list the first ones."""
    more = [f"{len(allowed) - MOST_SHAPES} others"] if len(allowed) > MOST_SHAPES else []
    return " or ".join([*map(_shape_text, allowed[:MOST_SHAPES]), *more])


def _shape_text(allowed: list[Range]) -> str:
    """Return an allowed shape for messages, such as "(1, 3, 32..512)"."""

    def range_text(low: int, high: int) -> str:
        return str(low) if low == high else f"{low}..{'' if high < 0 else high}"

    return f"({', '.join(range_text(*r) for r in allowed)})"


def _pixels(name: str, image: Any) -> tuple[str, str, bool]:
    """Return the colour space of an image, the mode of a PIL image, and whether its channels are reversed."""
    space = _COLORS.Name(image.colorSpace)
    if space not in PIXELS:
        raise InterpretError(f"the image {name!r} has no known colour space ({space}); export the model again")
    return (space, *PIXELS[space])


def _bind_image(name: str, kind: Any, value: Any) -> Any:
    """Check an image against its description, and return it as [1, channels, height, width], fp32.

    An array of that shape is returned as it is.
    """
    if value is None:
        raise InterpretError(f"missing input {name!r}: the model takes an image")
    space, mode, reverse = _pixels(name, kind.imageType)
    if not isinstance(getattr(value, "mode", None), str):  # torch tensors have a method `mode`
        if np.ndim(value) != 4:
            raise InterpretError(
                f"input {name!r} is an image; give a PIL image of mode {mode!r}, "
                "or an array of shape (1, channels, height, width)"
            )
        _check_size(name, kind.imageType, np.shape(value)[3], np.shape(value)[2])
        return value
    if value.mode != mode:
        raise InterpretError(
            f"input {name!r} is an image of mode {value.mode!r}, expected {mode!r} for {space}"
        )
    _check_size(name, kind.imageType, *value.size)
    pixels = np.atleast_3d(np.asarray(value)).astype(np.float32)
    return np.ascontiguousarray(pixels[..., ::-1] if reverse else pixels).transpose(2, 0, 1)[None]


def _check_size(name: str, image: Any, width: int, height: int) -> None:
    """Check that the description allows the size of an image."""
    allowed = _sizes(image)
    if not any(_matches((width, height), ranges) for ranges in allowed):
        raise InterpretError(
            f"input {name!r} is {width} wide and {height} high, "
            f"expected (width, height) {_shapes_text(allowed)}"
        )


def _sizes(image: Any) -> list[list[Range]]:
    """Return the allowed sizes of an image, each as the ranges of width and height."""
    flexible = image.WhichOneof("SizeFlexibility")
    if flexible == "enumeratedSizes":
        return [[(s.width, s.width), (s.height, s.height)] for s in image.enumeratedSizes.sizes]
    if flexible == "imageSizeRange":
        ranges = image.imageSizeRange
        return [[(r.lowerBound, r.upperBound) for r in (ranges.widthRange, ranges.heightRange)]]
    return [[(image.width, image.width), (image.height, image.height)]]


def _bind_other(name: str, kind: Any, value: Any) -> Any:
    """Return an input of another type as it is."""
    if value is None:
        raise InterpretError(f"missing input {name!r}")
    return value


_BIND: dict[str, Callable[[str, Any, Any], Any]] = {
    "multiArrayType": _bind_array,
    "imageType": _bind_image,
    "int64Type": _bind_other,
    "doubleType": _bind_other,
    "stringType": _bind_other,
    "dictionaryType": _bind_other,
}
"""Type of a feature -> checks and converts what the caller gave: (name, type, value) -> input of the
program."""


def present(features: Iterable[Any], outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the outputs of a model as a caller of Core ML gets them: images as PIL images (no alpha)."""
    kinds = {f.name: f.type for f in features if f.name in outputs}
    return {
        name: _picture(name, kind.imageType, outputs[name])
        if kind.WhichOneof("Type") == "imageType"
        else outputs[name]
        for name, kind in kinds.items()
    }


def _picture(name: str, image: Any, array: Array) -> Any:
    """Return a PIL image of [1, channels, height, width]; 8-bit colours are clamped to 0..255 and rounded."""
    try:
        from PIL import Image
    except ImportError as error:
        raise InterpretError("an output of the model is an image; install pillow") from error
    _, mode, reverse = _pixels(name, image)
    pixels = np.asarray(array, np.float32).reshape(array.shape[-3:]).transpose(1, 2, 0)
    if mode == "F":
        return Image.fromarray(pixels[..., 0])
    eight = np.clip(np.rint(pixels[..., ::-1] if reverse else pixels), 0, 255).astype(np.uint8)
    return Image.fromarray(eight if mode == "RGB" else eight[..., 0])
