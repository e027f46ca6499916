"""A compiled neural network (`model.espresso.net`, `.shape`, `.weights`) as the network it was compiled from.

The format is Apple's own and not documented. What is read here is what public files show, each by at least one
whole model; anything else is an error that names it:

========================= ==================================================================================
`model.espresso.net`      JSON: `layers` in the order in which they run, each with `type`, `bottom` and `top`
                          (names of blobs with commas between them) and numbers
`model.espresso.shape`    JSON: `layer_shapes`, for each blob `n`, `k`, `h`, `w`, of which the
                          last `_rank` are its axes
`model.espresso.weights`  64-bit count, then as many pairs of a number and a size in bytes, then the blobs
========================= ==================================================================================

Sources: compiled models published with their parts (a classifier in ameeSun/Chiron-Swift-Student-Challenge,
NeuralHash in blackicedbear/NeuralHash2ONNX, a text recogniser in dcsijan/model-dump).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery.errors import LoadError
from anesurgery.files.source import SourceFile
from anesurgery.mil import Array

NET, SHAPES = "model.espresso.net", "model.espresso.shape"
VERSION = 200
"""The `format_version` that is read."""
PAIR = struct.Struct("<QQ")
COUNT = struct.Struct("<Q")
AXES = ("seq", "n", "k", "h", "w")
"""Axes of a blob, from the outermost."""
MOST_BLOBS = 1 << 20
"""Blobs of weights that a file may list: more than any network has, so that a damaged count ends soon."""


@dataclass(frozen=True)
class Espresso:
    """A compiled network as its files have it."""

    layers: tuple[dict[str, Any], ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Blob -> shape, outermost axis first, at the default size of the inputs."""
    blobs: Mapping[int, bytes] = field(repr=False)
    """Number of a weight blob -> its bytes, of which the first ones count; the end may be padding."""

    def numbers(self, blob: int, shape: tuple[int, ...], dtype: str = "<f4") -> Array:
        """A weight blob as an array.

        Raises:
            LoadError: there is no such blob, or it is too short.
        """
        count = math.prod(shape)
        content = self.blobs.get(blob, b"")
        needed = count * np.dtype(dtype).itemsize
        if len(content) < needed:
            raise LoadError(f"weight blob {blob} has {len(content)} bytes, and {needed} are needed")
        return np.frombuffer(content, dtype, count).reshape(shape)


def read_files(folder: Path) -> Espresso:
    """Read the three files.

    Raises:
        LoadError: they are damaged.
    """
    net = _json(folder / NET)
    if net.get("format_version") != VERSION or not isinstance(net.get("layers"), list):
        raise LoadError(f"{NET} has format_version {net.get('format_version')!r}; {VERSION} is read")
    storage = net.get("storage")
    if not isinstance(storage, str) or "/" in storage or storage in ("", ".", ".."):
        raise LoadError(f"{NET} names the weight file {storage!r}, which is not a file beside it")
    return Espresso(tuple(net["layers"]), _shapes(folder / SHAPES), _blobs(folder / storage))


def _json(file: Path) -> dict[str, Any]:
    content = SourceFile(file).read()
    if content[:4] in (b"pbze", b"bvx2", b"bvxn"):
        raise LoadError(f"{file} is compressed (LZFSE), which is not read; compile the .mlmodel yourself")
    try:
        entry = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{file} is not JSON: {error}; copy the compiled model again") from error
    if not isinstance(entry, dict):
        raise LoadError(f"{file} holds a {type(entry).__name__}, not an object; copy the compiled model again")
    return entry


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Blob -> shape."""
    shapes = {}
    for name, sizes in _json(file)["layer_shapes"].items():
        rank = sizes.get("_rank", 4)
        shape = tuple(sizes.get(axis, 1) for axis in AXES)[len(AXES) - rank :]
        if not all(isinstance(size, int) and 0 < size < 1 << 31 for size in shape):
            raise LoadError(f"the shape of the blob {name!r} is {sizes}")
        shapes[name] = shape
    return shapes


def _blobs(file: Path) -> dict[int, bytes]:
    """Number -> bytes."""
    content = SourceFile(file).read()
    if len(content) < COUNT.size:
        raise LoadError(f"{file.name} has {len(content)} bytes; copy the compiled model again")
    (count,) = COUNT.unpack_from(content)
    at = COUNT.size + count * PAIR.size
    if count > MOST_BLOBS or at > len(content):
        raise LoadError(f"{file.name} announces {count} blobs, which do not fit; copy the compiled model again")
    blobs = {}
    for number, size in PAIR.iter_unpack(content[COUNT.size : at]):
        if number in blobs or at + size > len(content):
            raise LoadError(f"{file.name}: blob {number} is there twice, or ends beyond the file")
        blobs[number], at = content[at : at + size], at + size
    return blobs
