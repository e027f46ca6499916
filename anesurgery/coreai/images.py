"""Images at the interface of a model: which of Core ML's become images of Core AI, and their pixels.

`translating` uses it. Core AI has images of bytes in the order blue, green, red, alpha; MIL has
arrays [1, 3, height, width].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from anesurgery.coreai.names import FROM_IMAGE, TO_IMAGE
from anesurgery.coreai.toolkit import composite, image, ops
from anesurgery.coreai.values import Value, array, call, concat, indices
from anesurgery.mil import Var, static_shape

COLORS = ("RGB", "BGR")
"""Colour spaces of Core ML for which Core AI has a format; it has none for gray."""
PREFIX = "image."
"""Prefix in the metadata: "image." and the name of an image -> its colour space."""


def color_space(feature: Any) -> str:
    """Return the colour space of an image feature of Core ML; "" for other features."""
    if feature.type.WhichOneof("Type") != "imageType":
        return ""
    return str(feature.type.imageType.ColorSpace.Name(feature.type.imageType.colorSpace))


def images_of(description: Any) -> dict[str, str]:
    """Return name -> colour space, of all inputs and outputs that are images in a Core ML description."""
    if description is None:
        return {}
    parts = [description, *description.functions]
    features = [feature for part in parts for feature in (*part.input, *part.output)]
    return {feature.name: space for feature in features if (space := color_space(feature))}


def convertible_images(spaces: Mapping[str, str], values: Mapping[str, Var]) -> dict[str, str]:
    """Return the images that stay images in Core AI: those of three channels and a fixed size."""
    shapes = {name: static_shape(var) for name, var in values.items() if spaces.get(name) in COLORS}
    return {n: spaces[n] for n, shape in shapes.items() if shape is not None and (shape[0], shape[1]) == (1, 3)}


def from_image(node: Any, colors: str, dtype: str) -> Value:
    """Return the pixels of an image as an array [1, 3, height, width]."""

    def body(nodes: Any) -> list[Any]:
        pixels = Value(nodes[0]).cast("fp32").along(2, 0, 3)
        pixels = pixels if colors == "BGR" else call("reverse", pixels, indices([2]))
        return [pixels.permute([2, 0, 1]).expand([0]).cast(dtype).node]

    (made,) = composite(FROM_IMAGE, {"x": ops.image_to_tensor(node)}, {"colors": colors}, body)
    return Value(made)


def to_image(x: Value, colors: str) -> Any:
    """Return an image of an array [1, 3, height, width], rounded to bytes: a choice, as Core ML states none."""
    height, width = x.shape[2:]

    def body(nodes: Any) -> list[Any]:
        levels = call("round", Value(nodes[0]).cast("fp32")).maximum(0.0).minimum(255.0)
        pixels = levels.squeeze([0]).permute([1, 2, 0])
        pixels = pixels if colors == "BGR" else call("reverse", pixels, indices([2]))
        opaque = array(np.full((height, width, 1), 255.0), "fp32")
        return [concat([pixels, opaque], 2).cast("uint8").node]

    (made,) = composite(TO_IMAGE, {"x": x.node}, {"colors": colors}, body)
    return ops.tensor_to_image(image(height, width), made)
