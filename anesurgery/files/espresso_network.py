"""Read a compiled neural network (`model.espresso.net`) back into the specification that it was compiled from.

`package.read_spec` calls `read_espresso`. Sections: the three files; the specification; the layers, with one
function for each EspressoNetwork layer type in `LAYERS`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery.errors import DAMAGED, LoadError
from anesurgery.files.compiled_interface import CompiledDescription, read_container
from anesurgery.files.protobuf import proto
from anesurgery.files.source import SourceFile, system_failed
from anesurgery.mil import Array
from anesurgery.ops import names

# The three files: `model.espresso.net`, `.shape`, `.weights`.
#
# The format is Apple's own and not documented. What is read here is what public files show, each by at least
# one whole model; anything else is an error that names it:
#
# ========================= ==================================================================================
# `model.espresso.net`      JSON: `layers` in the order in which they run, each with `type`, `bottom` and `top`
#                           (names of blobs with commas between them) and numbers
# `model.espresso.shape`    JSON: `layer_shapes`, for each blob `n`, `k`, `h`, `w`, of which the
#                           last `_rank` are its axes
# `model.espresso.weights`  64-bit count, then as many pairs of a number and a size in bytes, then the blobs
# ========================= ==================================================================================
#
# Sources: compiled models published with their parts (a classifier in ameeSun/Chiron-Swift-Student-Challenge,
# NeuralHash in blackicedbear/NeuralHash2ONNX, a text recogniser in dcsijan/model-dump).

NET, SHAPES = "model.espresso.net", "model.espresso.shape"
VERSION = 200
"""The `format_version` that can be read."""
PAIR = struct.Struct("<QQ")
COUNT = struct.Struct("<Q")
AXES = ("seq", "n", "k", "h", "w")
"""Axes of a blob, from the outermost."""
MOST_BLOBS = 1 << 20
"""The most weight blobs that a file may list: more than any network has, to refuse a damaged count."""


@dataclass(frozen=True)
class EspressoNetwork:
    """The content of the three files of a compiled network."""

    layers: tuple[dict[str, Any], ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Blob -> shape, outermost axis first, at the default size of the inputs."""
    blobs: Mapping[int, bytes] = field(repr=False)
    """Number of a weight blob -> its bytes; the end may be padding."""

    def numbers(self, blob: int, shape: tuple[int, ...], dtype: str = "<f4") -> Array:
        """Return a weight blob as an array of `shape`.

        Raises:
            LoadError: there is no such blob, or it is too short.
        """
        count = math.prod(shape)
        content = self.blobs.get(blob, b"")
        needed = count * np.dtype(dtype).itemsize
        if len(content) < needed:
            raise LoadError(f"weight blob {blob} has {len(content)} bytes, and {needed} are needed")
        return np.frombuffer(content, dtype, count).reshape(shape)


def read_files(folder: Path) -> EspressoNetwork:
    """Read the three files of a compiled network.

    Raises:
        LoadError: they are damaged.
    """
    net = _json(folder / NET)
    if net.get("format_version") != VERSION or not isinstance(net.get("layers"), list):
        raise LoadError(f"{NET} has format_version {net.get('format_version')!r}; {VERSION} is read")
    storage = net.get("storage")
    if not isinstance(storage, str) or "/" in storage or storage in ("", ".", ".."):
        raise LoadError(f"{NET} names the weight file {storage!r}, which is not a file beside it")
    return EspressoNetwork(tuple(net["layers"]), _shapes(folder / SHAPES), _blobs(folder / storage))


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
    """Return {blob: shape, outermost axis first}."""
    shapes = {}
    for name, sizes in _json(file)["layer_shapes"].items():
        rank = sizes.get("_rank", 4)
        shape = tuple(sizes.get(axis, 1) for axis in AXES)[len(AXES) - rank :]
        if not all(isinstance(size, int) and 0 < size < 1 << 31 for size in shape):
            raise LoadError(f"the shape of the blob {name!r} is {sizes}")
        shapes[name] = shape
    return shapes


def _blobs(file: Path) -> dict[int, bytes]:
    """Return {number of a weight blob: its bytes}."""
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


# The specification.

DATA = "coremldata.bin"
IMAGES = "image inputs are arrays of what the first layer reads: where scale and bias are is not known"
FLOAT32 = proto.FeatureTypes_pb2.ArrayFeatureType.FLOAT32
EXACT_SHAPES_VERSION = 4
"""The first specification version in which arrays have exactly the stated shapes."""
NOTES = "anesurgery.notes"
"""The key of notes in the metadata."""


def read_espresso(folder: Path) -> Any:
    """Return the specification of a compiled neural network.

    Args:
        folder: the `.mlmodelc` folder.

    Returns:
        Model protobuf with a `neuralNetwork`. A classifier has no labels: they are in another file.

    Raises:
        LoadError: it is damaged, or a layer is of a kind that no public file shows.
    """
    try:
        return _specification(read_files(folder), folder)
    except LoadError as error:
        raise LoadError(f"{folder}: {error}") from error
    except DAMAGED as error:
        raise LoadError(f"{folder} is damaged: {error!r}; copy the compiled model again") from error


def _specification(model: EspressoNetwork, folder: Path) -> Any:
    described = _read_description(model, folder)
    spec = proto.Model_pb2.Model(specificationVersion=max(EXACT_SHAPES_VERSION, described.version))
    spec.description.CopyFrom(described.description)
    network = spec.neuralNetwork
    network.arrayInputShapeMapping = proto.NeuralNetwork_pb2.EXACT_ARRAY_MAPPING
    network.imageInputShapeMapping = proto.NeuralNetwork_pb2.RANK4_IMAGE_MAPPING
    for number, entry in enumerate(model.layers):
        layer = Layer(model, entry, number)
        if layer.kind not in LAYERS:
            raise LoadError(f"{layer}: no public file shows what a layer of this type computes")
        network.layers.extend(LAYERS[layer.kind](layer))
    _fit_description(spec.description, model)
    return spec


def _read_description(model: EspressoNetwork, folder: Path) -> CompiledDescription:
    """Return the description in `coremldata.bin`; if it cannot be read, one made from the layers' blobs."""
    try:
        container = read_container(SourceFile(folder / DATA).read())
    except LoadError as error:
        if system_failed(error):
            raise
        container = str(error)
    if isinstance(container, CompiledDescription):
        return container
    results = [name for entry in model.layers for name in entry["top"].split(",")]
    read = [name for entry in model.layers for name in entry.get("bottom", "").split(",") if name]
    marked = [e["top"].split(",") for e in model.layers if e.get("attributes", {}).get("is_output")]
    leaving = [name for names in marked for name in names] or [n for n in results if n not in set(read)]
    description = proto.Model_pb2.ModelDescription()
    for name in dict.fromkeys(n for n in read if n not in set(results)):
        description.input.add(name=name).type.multiArrayType.dataType = FLOAT32
    for name in leaving:
        description.output.add(name=name).type.multiArrayType.dataType = FLOAT32
    description.metadata.userDefined[NOTES] = f"inputs and outputs are those of the layers, for {container}"
    return CompiledDescription("neuralNetwork", EXACT_SHAPES_VERSION, description)


def _fit_description(description: Any, model: EspressoNetwork) -> None:
    """Change the inputs and outputs of a description to the blobs that the layers read and compute."""
    results = {name for entry in model.layers for name in entry["top"].split(",")}
    for feature in description.input:
        kind = feature.type.WhichOneof("Type")
        if feature.name not in model.shapes:
            raise LoadError(f"the input {feature.name!r} has no shape in {SHAPES}")
        shape = model.shapes[feature.name]
        if kind == "imageType":
            description.metadata.userDefined[NOTES] = IMAGES
        if kind == "imageType" or len(feature.type.multiArrayType.shape) != len(shape):
            array = proto.FeatureTypes_pb2.ArrayFeatureType(shape=shape)
            array.dataType = FLOAT32
            feature.type.multiArrayType.CopyFrom(array)
    existing = [f for f in description.output if f.name in results]
    last = model.layers[-1]["top"].split(",")[0] if model.layers else ""
    del description.output[:]
    for feature in existing:
        description.output.add().CopyFrom(feature)
    if not existing:
        array = description.output.add(name=last).type.multiArrayType
        array.dataType = FLOAT32
    for name in ("predictedFeatureName", "predictedProbabilitiesName"):
        description.ClearField(name)


# The layers: each function returns the layers of a specification that compute the same as an Espresso layer.
#
# A layer with options that are not understood is refused: its entry may have only the keys that the function
# reads, those in `QUIET`, and those in `NEUTRAL` with the value given there.

QUIET = names("name type bottom top weights debug_info attributes nd_mode version")
"""Keys that do not change what a layer computes, or that are read for every layer."""
NEUTRAL: Mapping[str, Any] = {
    "n_parallel": 1, "fused_tanh": 0, "has_batch_norm": 0, "has_tanh": 0, "has_prelu": 0, "pad_fill_mode": 0,
    "pad_value": 0, "dynamic_shape": False, "align_corners": 0, "quantization_mode": 0, "is_lookup": 0,
}  # fmt: skip
"""Key of an option -> the value that switches it off."""
SAME_PADDING, VALID_PADDING = 1, 2
"""Values of `pad_mode`; 0 means the amounts that are given."""
POOLING = {0: "AVERAGE", 1: "MAX"}
"""Value of `avg_or_max` -> the type of a pooling in the specification."""


class Layer:
    """One entry of `layers`, which remembers the keys that were read."""

    def __init__(self, model: EspressoNetwork, entry: dict[str, Any], number: int) -> None:
        self.model, self._entry, self._number = model, entry, number
        self.kind = str(entry["type"])
        self.inputs = [name for name in str(entry.get("bottom", "")).split(",") if name]
        self.outputs = str(entry["top"]).split(",")
        self._read: set[str] = set()

    def __str__(self) -> str:
        return f"layer {self._number} ({self.kind} {self.outputs[0]!r})"

    def error(self, reason: str) -> LoadError:
        """Return an error that names this layer."""
        return LoadError(f"{self}: {reason}")

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key; raise a LoadError if there is neither a value nor a default."""
        self._read.add(key)
        value = self._entry.get(key, default)
        if value is None:
            raise self.error(f"it has no {key!r}")
        return value

    def shape(self, blob: str) -> tuple[int, ...]:
        """Return the shape of a blob, outermost axis first."""
        try:
            return self.model.shapes[blob]
        except KeyError:
            raise self.error(f"the blob {blob!r} has no shape") from None

    def weights(self, key: str, shape: tuple[int, ...]) -> dict[str, Any]:
        """Return the fields of a `WeightParams` for the blob that `key` names (fp32) or `key`_f16 (fp16)."""
        for name, dtype, place in ((key, "<f4", "floatValue"), (f"{key}_f16", "<f2", "float16Value")):
            self._read.add(name)
            if name in self._entry:
                values = self.model.numbers(self._entry[name], shape, dtype)
                return {place: values.tobytes() if dtype == "<f2" else values.ravel().tolist()}
        raise self.error(f"its {key} are stored in a way that no public file explains")

    def check(self, inputs: Sequence[int] = (1,)) -> None:
        """Refuse an entry with keys that were not read.

        Raises:
            LoadError: it has such keys, or another number of inputs.
        """
        if len(self.inputs) not in inputs:
            raise self.error(f"it reads {len(self.inputs)} blobs")
        for key, value in self._entry.items():
            expected = key in QUIET or key in self._read or key.startswith("hint_")
            if not expected and not (key in NEUTRAL and value == NEUTRAL[key]):
                raise self.error(f"it has {key} = {value!r}, and no public file shows what that does")
        if self._entry.get("weights"):
            raise self.error(f"its weights are stored as {', '.join(sorted(self._entry['weights']))}")


def _spec_layers(layer: Layer, kind: str, relu: bool = False, **fields: Any) -> list[Any]:
    """Return a layer of the specification, and a relu after it if the Espresso layer fuses one."""
    out = layer.outputs[0]
    first = f"{out}.before_relu" if relu else out
    layers = [_spec_layer(kind, layer.inputs, [first] if relu else layer.outputs, first, **fields)]
    return [*layers, _spec_layer("activation", [first], [out], out, ReLU={})] if relu else layers


def _spec_layer(kind: str, inputs: Sequence[str], outputs: Sequence[str], name: str, **fields: Any) -> Any:
    layer = proto.NeuralNetwork_pb2.NeuralNetworkLayer(name=name, input=inputs, output=outputs)
    params = getattr(layer, kind)
    params.SetInParent()
    params.MergeFrom(type(params)(**fields))
    return layer


def _padding(layer: Layer) -> dict[str, Any]:
    """Return the padding of a window as fields of the specification."""
    mode = layer.get("pad_mode", 0)
    amounts = [[layer.get(f"pad_{side}", 0) for side in sides] for sides in ("tb", "lr")]
    if mode == SAME_PADDING:
        return {"same": {}}
    if mode not in (0, VALID_PADDING):
        raise layer.error(f"it has pad_mode {mode}, which no public file explains")
    borders = [{"startEdgeSize": a, "endEdgeSize": b} for a, b in amounts] if mode == 0 else [{}, {}]
    return {"valid": {"paddingAmounts": {"borderAmounts": borders}}}


def _window_counts(
    layer: Layer, padding: dict[str, Any], kernel: Sequence[int], stride: Sequence[int]
) -> list[float]:
    """Return the number of windows along (height, width) minus one; a fraction if the last one does not fit."""
    sizes = layer.shape(layer.inputs[0])[-2:]
    if "same" in padding:
        return [math.ceil(n / s) - 1 for n, s in zip(sizes, stride, strict=True)]
    borders = padding["valid"]["paddingAmounts"]["borderAmounts"]
    return [(n + sum(b.values()) - k) / s for n, b, k, s in zip(sizes, borders, kernel, stride, strict=True)]


def _convolution(layer: Layer) -> list[Any]:
    out, inputs, groups = layer.get("C"), layer.get("K"), layer.get("n_groups", 1)
    kernel = (layer.get("Ny"), layer.get("Nx"))
    stride = (layer.get("stride_y", 1), layer.get("stride_x", 1))
    padding = _padding(layer)
    bias = {"bias": layer.weights("blob_biases", (out,))} if layer.get("has_biases", 0) else {}
    weights = layer.weights("blob_weights", (out, inputs // groups, *kernel))
    relu = bool(layer.get("fused_relu", 0))
    layer.check()
    shape = tuple(math.floor(n) + 1 for n in _window_counts(layer, padding, kernel, stride))
    if shape != layer.shape(layer.outputs[0])[-2:]:
        raise layer.error(f"its result is {shape} by its numbers, and another by its shape")
    return _spec_layers(
        layer, "convolution", relu, outputChannels=out, kernelChannels=inputs // groups, nGroups=groups,
        kernelSize=kernel, stride=stride, hasBias=bool(bias), weights=weights, **bias, **padding,
    )  # fmt: skip


def _pool(layer: Layer) -> list[Any]:
    kernel = (layer.get("size_y"), layer.get("size_x"))
    stride = (layer.get("stride_y", 1), layer.get("stride_x", 1))
    if (kind := POOLING.get(number := layer.get("avg_or_max"))) is None:
        raise layer.error(f"it has avg_or_max {number}, which no public file explains")
    excludes_padding = bool(layer.get("average_count_exclude_padding", 0))
    padding, is_global = _padding(layer), bool(layer.get("is_global", 0))
    layer.get("top_shape_style", 0)
    layer.check()
    size = layer.shape(layer.outputs[0])[-2:]
    counts = _window_counts(layer, padding, kernel, stride)
    if not is_global and tuple(math.floor(n) + 1 for n in counts) != size:
        amounts = _symmetric_amounts(padding)
        if amounts is None or tuple(math.ceil(n) + 1 for n in counts) != size:
            raise layer.error("its result has another size than its numbers give")
        padding = {"includeLastPixel": {"paddingAmounts": amounts}}
    return _spec_layers(
        layer, "pooling", type=kind, kernelSize=kernel, stride=stride, globalPooling=is_global,
        avgPoolExcludePadding=excludes_padding, **padding,
    )  # fmt: skip


def _symmetric_amounts(padding: dict[str, Any]) -> list[int] | None:
    """Return the padding along (height, width) if it is the same on both sides; else None."""
    if "same" in padding:
        return None
    pairs = [tuple(border.values()) or (0, 0) for border in padding["valid"]["paddingAmounts"]["borderAmounts"]]
    return [start for start, _ in pairs] if all(start == end for start, end in pairs) else None


def _inner_product(layer: Layer) -> list[Any]:
    inputs, out = layer.get("nB"), layer.get("nC")
    bias = {"bias": layer.weights("blob_biases", (out,))} if layer.get("has_biases", 0) else {}
    weights = layer.weights("blob_weights", (out, inputs))
    relu = bool(layer.get("has_relu", 0))
    layer.check()
    return _spec_layers(
        layer, "innerProduct", relu, inputChannels=inputs, outputChannels=out, hasBias=bool(bias),
        weights=weights, **bias,
    )  # fmt: skip


def _activation(layer: Layer) -> list[Any]:
    mode, alpha, beta = layer.get("mode"), layer.get("alpha", 1), layer.get("beta", 0)
    forms: dict[int, dict[str, Any]] = {
        0: {"ReLU": {}},
        1: {"tanh": {}},
        3: {"sigmoid": {}},
        6: {"linear": {"alpha": alpha, "beta": beta}},
    }
    if mode not in forms:
        raise layer.error(f"it has mode {mode}, which no public file explains")
    layer.check()
    return _spec_layers(layer, "activation", **forms[mode])


def _elementwise(layer: Layer) -> list[Any]:
    operation, alpha, beta = layer.get("operation"), layer.get("alpha", 1), layer.get("beta", 0)
    relu = bool(layer.get("fused_relu", 0))
    single: dict[int, tuple[str, dict[str, Any]]] = {
        2: ("activation", {"linear": {"alpha": 1, "beta": alpha}}),
        3: ("activation", {"linear": {"alpha": alpha, "beta": 0}}),
        24: ("unary", {"type": "ABS"}),
        119: ("clip", {"minVal": alpha, "maxVal": beta}),
    }
    both = {0: "addBroadcastable", 1: "multiplyBroadcastable"}
    layer.check((1, 2))
    if len(layer.inputs) == 2 and operation in both and (alpha, beta) == (1, 0):
        return _spec_layers(layer, both[operation], relu)
    if len(layer.inputs) == 1 and operation in single:
        kind, message = single[operation]
        return _spec_layers(layer, kind, relu, **message)
    raise layer.error(
        f"it has operation {operation} of {len(layer.inputs)} blobs with alpha {alpha} and beta {beta}, "
        "which no public file explains"
    )


def _instance_norm(layer: Layer) -> list[Any]:
    """Translate a batchnorm with mean and variance of each image; the form with fixed ones is unknown."""
    if not (layer.get("training", 0) and layer.get("training_instancenorm", 0)):
        raise layer.error("no public file shows how the parameters of a fixed batch norm are stored")
    channels, epsilon = layer.get("C"), layer.get("training_eps")
    layer.get("training_momentum", 0)
    params = layer.model.numbers(layer.get("blob_batchnorm_params"), (channels, 4))
    layer.check()
    return _spec_layers(
        layer, "batchnorm", channels=channels, computeMeanVar=True, instanceNormalization=True, epsilon=epsilon,
        gamma={"floatValue": params[:, 0].tolist()}, beta={"floatValue": params[:, 1].tolist()},
    )  # fmt: skip


def _transpose(layer: Layer) -> list[Any]:
    """Translate a transpose: `axis_w` is the input axis, counted from the innermost, that becomes the last."""
    rank = len(layer.shape(layer.inputs[0]))
    input_axes = [layer.get(f"axis_{name}") for name in AXES[: -rank - 1 : -1]]
    axes = [rank - 1 - axis for axis in reversed(input_axes)]
    for name in ("n", "seq"):
        layer.get(f"axis_{name}", 0)
    layer.check()
    if sorted(axes) != list(range(rank)):
        raise layer.error(f"its axes {input_axes} are not those of a blob of rank {rank}")
    return _spec_layers(layer, "transpose", axes=axes)


def _reshape(layer: Layer) -> list[Any]:
    """Translate a reshape, expand_dims or squeeze to a reshape to the shape of the result."""
    for key in (
        "mode",
        "nd_axis",
        "size_of_axes",
        "dst_nd_rank",
        *(f"dst_{a}" for a in ("seq", "n", "k", "h", "w")),
    ):
        layer.get(key, 0)
    for number in range(5):
        layer.get(f"axes_{number}", 0)
    layer.check()
    if layer.get("mode", 0) != 0:
        raise layer.error(f"it has mode {layer.get('mode')}, which no public file explains")
    target = layer.shape(layer.outputs[0])
    if math.prod(target) != math.prod(layer.shape(layer.inputs[0])):
        raise layer.error(f"it makes {target} of {layer.shape(layer.inputs[0])}")
    return _spec_layers(layer, "reshapeStatic", targetShape=target)


def _softmax(layer: Layer) -> list[Any]:
    axis = layer.get("nd_axis") if layer.kind == "softmax_nd" else -3
    layer.check()
    return _spec_layers(layer, "softmaxND", axis=axis)


def _concat(layer: Layer) -> list[Any]:
    layer.check(range(1, 1 << 16))
    return _spec_layers(layer, "concatND", axis=-3)


def _split(layer: Layer) -> list[Any]:
    axis = layer.get("nd_axis")
    for number in range(128):
        if layer.get(f"begin_{number}", 0) != 0:
            raise layer.error("it names where its parts begin, which no public file explains")
    layer.check()
    sizes = [layer.shape(name)[axis] for name in layer.outputs]
    return _spec_layers(layer, "splitND", axis=axis, splitSizes=sizes)


def _upsample(layer: Layer) -> list[Any]:
    mode = layer.get("mode", 0)
    factors = [layer.get("scaling_factor_y"), layer.get("scaling_factor_x")]
    layer.check()
    if mode not in (0, 1):
        raise layer.error(f"it has mode {mode}, which no public file explains")
    return _spec_layers(layer, "upsample", scalingFactor=factors, mode="BILINEAR" if mode else "NN")


def _copy(layer: Layer) -> list[Any]:
    layer.check()
    return _spec_layers(layer, "activation", linear={"alpha": 1})


def _constant(layer: Layer) -> list[Any]:
    for key in ("n", "k", "h", "w", "nd_rank"):
        layer.get(key, 1)
    shape = layer.shape(layer.outputs[0])
    values = layer.model.numbers(layer.get("constant_blob"), shape)
    layer.check((0,))
    return _spec_layers(layer, "loadConstantND", shape=shape, data={"floatValue": values.ravel().tolist()})


LAYERS: dict[str, Callable[[Layer], list[Any]]] = {
    "activation": _activation,
    "batchnorm": _instance_norm,
    "concat": _concat,
    "convolution": _convolution,
    "copy": _copy,
    "elementwise": _elementwise,
    "expand_dims": _reshape,
    "inner_product": _inner_product,
    "load_constant": _constant,
    "pool": _pool,
    "reshape": _reshape,
    "softmax": _softmax,
    "softmax_nd": _softmax,
    "split_nd": _split,
    "squeeze": _reshape,
    "transpose": _transpose,
    "upsample": _upsample,
}
"""Type of an Espresso layer -> function that returns the layers of the specification."""
