"""Read the description of a compiled model: features, metadata, states and functions.

`describe_compiled` takes it from `coremldata.bin`. In the part that is read here this file has the field number
of the model's kind in the protobuf `Model`, a target name with its length before it, the specification version,
and the `ModelDescription` of the package with its length before it. If it cannot be read, the description is
built from `metadata.json` and the program's types; the notes then say what is missing.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from anesurgery.errors import DAMAGED, LoadError
from anesurgery.files.mil_text import opset_text
from anesurgery.files.mil_types import NAMES
from anesurgery.files.protobuf import proto

KIND = struct.Struct("<I")
LENGTH = struct.Struct("<Q")
TARGET = 0x1C
"""The offset of the target name."""
BYTES_BEFORE_DESCRIPTION = 28
"""Bytes between the specification version and the description."""
FLEXIBLE = "FlexibleShapeInformation"
"""The attribute of a function in which the compiler repeats the flexible shapes of the description."""
NO_RANGES = (
    "{}: its inputs vary in size, and the file has no FlexibleShapeInformation: iOS 27 and macOS 27 were "
    "reported not to run such a file (FluidInference/FluidAudio: issue 738, pull request 858); compile its "
    "package again"
)
ABSENT = (
    "metadata.json, which has no defaults of optional inputs and no flexible sizes of images",
    "the types of the program, for metadata.json cannot be read either: options, images, metadata and the "
    "order of inputs are lost",
)
"""The source of an interface without `coremldata.bin`, and what it lacks: [with, without metadata.json]."""

ARRAYS = {"Float16": "FLOAT16", "Float32": "FLOAT32", "Double": "DOUBLE", "Int32": "INT32", "Int8": "INT8"}
"""Element type in `metadata.json` -> in the protobuf."""
TENSORS = {"fp16": "FLOAT16", "fp32": "FLOAT32", "fp64": "DOUBLE", "int32": "INT32", "int8": "INT8"}
"""Element type of MIL -> in the protobuf."""
COLORS = {"RGB": "RGB", "BGR": "BGR", "Grayscale": "GRAYSCALE", "Grayscale16Half": "GRAYSCALE_FLOAT16"}
SIMPLE = {"String": "stringType", "Int64": "int64Type", "Double": "doubleType"}
LARGEST_IMAGE_SIDE = 16384
"""The largest side of an image that is accepted from `metadata.json`, the longest axis of the engine up to H15.
Damaged numbers are larger."""


@dataclass(frozen=True)
class CompiledDescription:
    """The description of a model, and notes on its source."""

    kind: str
    """The kind of model, as its field of the protobuf `Model` is named."""
    version: int
    """Specification version."""
    description: Any
    """Model_pb2.ModelDescription."""
    notes: tuple[str, ...] = ()


def read_container(data: bytes) -> CompiledDescription | str:
    """Return the description in `coremldata.bin`, or in words why it cannot be understood."""
    try:
        (code,) = KIND.unpack_from(data, 0)
        (length,) = LENGTH.unpack_from(data, TARGET)
        at = TARGET + LENGTH.size + length
        (version,) = KIND.unpack_from(data, at)
        at += KIND.size + BYTES_BEFORE_DESCRIPTION
        (size,) = LENGTH.unpack_from(data, at)
    except struct.error:
        return "it is cut short"
    field = proto.Model_pb2.Model.DESCRIPTOR.fields_by_number.get(code)
    at += LENGTH.size
    if field is None or at + size > len(data) or not 0 < version < 1000:
        return "its layout is not known"
    description = proto.Model_pb2.ModelDescription()
    try:
        description.ParseFromString(data[at : at + size])
    except Exception as error:  # what protobuf raises differs between its implementations
        return f"its description is damaged ({error})"
    return CompiledDescription(field.name, version, description)


def describe_compiled(
    program: Any, container: CompiledDescription | str, metadata: Mapping[str, Any], where: str
) -> CompiledDescription:
    """Return the description of a compiled program, and adapt the program to it.

    The inputs of every function are put in the order of the description. Flexible shapes, which the compiler
    repeats at the functions, are moved into the description.

    Args:
        program: MIL_pb2.Program; changed.
        container: the result of `read_container`.
        metadata: the content of `metadata.json`; empty if there is none.
        where: the name of the model in errors.

    Raises:
        LoadError: program and description do not belong together.
    """
    if isinstance(container, CompiledDescription) and _has_features(container.description):
        described = container
    else:
        reason = container if isinstance(container, str) else "it describes no features"
        described = _from_metadata(program, metadata, reason)
    for name, function in program.functions.items():
        features = next((f for f in described.description.functions if f.name == name), described.description)
        _check_same_names(name, function, features, where)
        order = {f.name: at for at, f in enumerate([*features.input, *features.state])}
        inputs = sorted(function.inputs, key=lambda value: order[value.name])
        copied = [_copy_message(value) for value in inputs]
        del function.inputs[:]
        function.inputs.extend(copied)
        if FLEXIBLE in function.attributes:
            _restore_flexible_shapes(features.input, _python_value(function.attributes[FLEXIBLE]))
            del function.attributes[FLEXIBLE]
        elif any(_varies(value) for value in function.inputs):
            described = replace(described, notes=(*described.notes, NO_RANGES.format(name)))
    return described


def _varies(value: Any) -> bool:
    """Has an input a dimension of unknown size?"""
    return any(d.WhichOneof("dimension") == "unknown" for d in value.type.tensorType.dimensions)


def _has_features(description: Any) -> bool:
    return bool(description.output or description.functions)


def _copy_message(value: Any) -> Any:
    twin = type(value)()
    twin.CopyFrom(value)
    return twin


def _check_same_names(name: str, function: Any, features: Any, where: str) -> None:
    block = function.block_specializations[function.opset]
    pairs = (
        ("inputs", [v.name for v in function.inputs], [f.name for f in [*features.input, *features.state]]),
        ("outputs", list(block.outputs), [f.name for f in features.output]),
    )
    for word, ours, theirs in pairs:
        if sorted(ours) != sorted(theirs):
            raise LoadError(
                f"{where}: function {name!r} has the {word} {', '.join(ours) or 'none'}, its description has "
                f"{', '.join(theirs) or 'none'}; the files are of two models or damaged, copy them again"
            )


def _from_metadata(program: Any, metadata: Mapping[str, Any], reason: str) -> CompiledDescription:
    """Return a description built from `metadata.json` and the types of the program."""
    description = proto.Model_pb2.ModelDescription()
    note = f"coremldata.bin was not used ({reason}); the interface comes from {ABSENT[not metadata]}"
    several = len(program.functions) > 1
    for name in sorted(program.functions):
        features = description.functions.add(name=name) if several else description
        schema = _feature_entries(metadata, name)
        _fill_features(features, program.functions[name], schema)
    if several:
        description.defaultFunctionName = _text(metadata, "defaultFunctionName") or sorted(program.functions)[0]
    _fill_metadata(description.metadata, metadata)
    version = metadata.get("specificationVersion")
    least = max(_least_version(f.opset) for f in program.functions.values())
    return CompiledDescription(
        "mlProgram", version if isinstance(version, int) and version > 0 else least, description, (note,)
    )


def _least_version(opset: str) -> int:
    """Return the specification version of an opset: 6 for ios15."""
    digits = opset.removeprefix("CoreML")
    return int(digits) + 1 if digits.isdecimal() and opset_text(opset) != opset else 6


def _text(entry: Mapping[str, Any], key: str) -> str:
    text = entry.get(key, "")
    return text if isinstance(text, str) else ""


def _fill_metadata(about: Any, metadata: Mapping[str, Any]) -> None:
    about.shortDescription = _text(metadata, "shortDescription")
    about.author = _text(metadata, "author")
    about.license = _text(metadata, "license")
    about.versionString = _text(metadata, "version")
    user = metadata.get("userDefinedMetadata")
    for key, value in user.items() if isinstance(user, dict) else ():
        about.userDefined[key] = str(value)


def _feature_entries(metadata: Mapping[str, Any], function: str) -> dict[str, Mapping[str, Any]]:
    """Return {feature: its entry in `metadata.json`} for the features of a function."""
    functions = [f for f in _dict_entries(metadata, "functions") if f.get("name") == function]
    entry = functions[0] if functions else metadata
    kinds = ("inputSchema", "outputSchema", "stateSchema")
    return {_text(e, "name"): e for kind in kinds for e in _dict_entries(entry, kind)}


def _dict_entries(entry: Mapping[str, Any], key: str) -> Iterator[Mapping[str, Any]]:
    entries = entry.get(key)
    yield from (e for e in entries if isinstance(e, dict)) if isinstance(entries, list) else ()


def _fill_features(features: Any, function: Any, schema: Mapping[str, Mapping[str, Any]]) -> None:
    order = {name: at for at, name in enumerate(schema)}
    for value in sorted(function.inputs, key=lambda value: order.get(value.name, len(order))):
        entry = schema.get(value.name, {})
        if value.type.WhichOneof("type") == "stateType":
            feature = features.state.add(name=value.name)
            wrapped = value.type.stateType.wrappedType
            _fill_array(feature.type.stateType.arrayType, wrapped)
        else:
            feature = features.input.add(name=value.name)
            _fill_type(feature.type, entry, value.type)
            feature.type.isOptional = str(entry.get("isOptional")) in ("1", "True")
        feature.shortDescription = _text(entry, "shortDescription")
    block = function.block_specializations[function.opset]
    kinds = {v.name: v.type for v in function.inputs} | {
        v.name: v.type for op in block.operations for v in op.outputs
    }
    for name in block.outputs:
        feature = features.output.add(name=name)
        _fill_type(feature.type, schema.get(name, {}), kinds[name])
        feature.shortDescription = _text(schema.get(name, {}), "shortDescription")


def _fill_type(feature_type: Any, entry: Mapping[str, Any], value: Any) -> None:
    """Set the type of a feature: image or simple value by `metadata.json`, else an array as in the program."""
    kind = _text(entry, "type")
    if kind in SIMPLE:
        getattr(feature_type, SIMPLE[kind]).SetInParent()
    elif kind == "Dictionary":
        keys = "int64KeyType" if "Int64" in _text(entry, "formattedType") else "stringKeyType"
        getattr(feature_type.dictionaryType, keys).SetInParent()
    elif kind == "Image" and _fill_image(feature_type.imageType, entry):
        return
    else:
        _fill_array(feature_type.multiArrayType, value)
        if _text(entry, "dataType") in ARRAYS:
            feature_type.multiArrayType.dataType = _data_type(ARRAYS[_text(entry, "dataType")])
        if not feature_type.multiArrayType.shape:
            feature_type.multiArrayType.shape.extend(_shape(entry))


def _fill_image(image: Any, entry: Mapping[str, Any]) -> bool:
    sides = [str(entry.get(key, "")) for key in ("width", "height")]
    color = COLORS.get(_text(entry, "colorspace"))
    if color is None or not all(s.isdecimal() and 0 < int(s) <= LARGEST_IMAGE_SIDE for s in sides):
        return False
    image.width, image.height = map(int, sides)
    image.colorSpace = proto.FeatureTypes_pb2.ImageFeatureType.ColorSpace.Value(color)
    return True


def _data_type(name: str) -> int:
    return int(proto.FeatureTypes_pb2.ArrayFeatureType.ArrayDataType.Value(name))


def _fill_array(array: Any, value: Any) -> None:
    array.SetInParent()
    tensor = value.tensorType
    array.dataType = _data_type(TENSORS.get(NAMES.get(tensor.dataType, ""), "FLOAT32"))
    if all(d.WhichOneof("dimension") == "constant" for d in tensor.dimensions):
        array.shape.extend(d.constant.size for d in tensor.dimensions)


def _shape(entry: Mapping[str, Any]) -> list[int]:
    """Return the default shape of a feature, which `metadata.json` has as "[1, 4]"; [] if there is none."""
    try:
        shape = json.loads(_text(entry, "shape") or "[]")
    except ValueError:
        return []
    fits = isinstance(shape, list) and all(type(d) is int and 0 <= d < 2**31 for d in shape)
    return shape if fits else []


def _python_value(value: Any) -> Any:
    """Return a MIL value of dictionaries, lists, tuples and integers as Python objects."""
    content = value.immediateValue
    kind = content.WhichOneof("value")
    if kind == "tensor":
        field = content.tensor.WhichOneof("value")
        values = list(getattr(content.tensor, field).values) if field else []
        return values if value.type.tensorType.rank else values[0]
    if kind == "dictionary":
        return {_python_value(p.key): _python_value(p.value) for p in content.dictionary.values}
    return [_python_value(v) for v in getattr(content, kind).values]


def _restore_flexible_shapes(features: Any, attribute: Any) -> None:
    """Put the flexible shapes in a function's attribute into the features that have none."""
    try:
        named = dict(attribute)
        for feature in features:
            array = feature.type.multiArrayType
            kind = feature.type.WhichOneof("Type")
            if kind != "multiArrayType" or array.WhichOneof("ShapeFlexibility") is not None:
                continue
            ranges = named.get("RangeDims", {}).get(feature.name, [])
            for low, high in ranges:
                array.shapeRange.sizeRanges.add(lowerBound=low, upperBound=high)
            for shapes in named.get("EnumeratedShapes", {}).values():
                if feature.name in shapes and list(shapes[feature.name]) not in [
                    list(s.shape) for s in array.enumeratedShapes.shapes
                ]:
                    array.enumeratedShapes.shapes.add(shape=shapes[feature.name])
            if feature.name in named.get("DefaultShapes", {}):
                array.shape[:] = named["DefaultShapes"][feature.name]
    except DAMAGED as error:
        raise LoadError(f"the {FLEXIBLE} of the program cannot be understood: {error}") from error
