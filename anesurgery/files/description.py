"""The description of a model: brought up to date with its program, and remembered beside it.

What a program by itself does not tell of the model that it was read from is kept for as long as it lives, so
that `load(path).program` is inspected as the path is.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from anesurgery.errors import LoadError, UnknownName
from anesurgery.files import protobuf
from anesurgery.files.copying import copied
from anesurgery.files.interface import port
from anesurgery.files.protobuf import proto
from anesurgery.files.writing import temporary_files
from anesurgery.mil import Program, Var, ct, dtype_name, exclusive, quiet_host, types

_IMAGE, _ARRAY = proto.FeatureTypes_pb2.ImageFeatureType, proto.FeatureTypes_pb2.ArrayFeatureType


@exclusive()
def new_spec(program: Program, version: int) -> Any:
    """The specification that coremltools makes for a bare program, which stays as it is; weights are left out.

    Raises:
        LoadError: the temporary folder has no room for it.
    """
    from coremltools.converters.mil.converter import mil_convert

    protobuf.check_depth(program)
    copy: Any = copied(program)
    for name, function in program.functions.items():
        copy.functions[name].input_types = function.input_types
        copy.functions[name].output_types = function.output_types
    if copy.default_function_name not in copy.functions:
        copy.default_function_name = next(iter(program.functions))  # a copy sorts them
    copy.export_as_multifunction = len(copy.functions) > 1
    silent = contextlib.redirect_stderr(io.StringIO())  # its progress bars
    with temporary_files(), quiet_host(), silent, protobuf.without_weights():
        model = mil_convert(
            copy,
            convert_to="mlprogram",
            convert_from="milinternal",
            skip_model_load=True,
            compute_units=ct.ComputeUnit.ALL,
            specification_version=version,
            pass_pipeline=ct.PassPipeline.EMPTY,
        )
    return model.get_spec()


def check_features(spec: Any, where: object) -> None:
    """See that the inputs and outputs of a model are of kinds that coremltools knows.

    Raises:
        LoadError: a colour space or an element type is none that it knows; or an ML Program's image has none.
    """
    program = spec.WhichOneof("Type") == "mlProgram"
    for description in (spec.description, *spec.description.functions):
        for feature in (*description.input, *description.output):
            image, array = feature.type.imageType, feature.type.multiArrayType
            if feature.type.WhichOneof("Type") == "imageType" and (program or image.colorSpace):
                kind, code, choices = "colour space", image.colorSpace, _IMAGE.ColorSpace
            elif feature.type.WhichOneof("Type") == "multiArrayType" and array.dataType:
                kind, code, choices = "element type", array.dataType, _ARRAY.ArrayDataType
            else:
                continue
            if not code or code not in choices.values():
                raise LoadError(
                    f"{where}: {feature.name!r} has the {kind} {code}, which this coremltools does not know; "
                    "the file is damaged, or upgrade coremltools"
                )


FEATURE_TYPES = {"fp16": "FLOAT16", "fp32": "FLOAT32", "int32": "INT32", "int8": "INT8"}


def describe(spec: Any, program: Program) -> None:
    """Bring the description of a package up to date with a program whose interface was changed on purpose."""
    description = spec.description
    described = {f.name: f for f in description.functions}
    if len(program.functions) > 1 and set(described) != set(program.functions):
        described = _describe_functions(description, program)
    for name, function in program.functions.items():
        place = described.get(name, description)
        inputs = [v for v in function.inputs.items() if not types.is_state(v[1].sym_type)]
        _features(place.input, inputs)
        _features(place.output, [(v.name, v) for v in function.outputs])
        _states(place.state, [v for v in function.inputs.items() if types.is_state(v[1].sym_type)])


def _describe_functions(description: Any, program: Program) -> dict[str, Any]:
    """An entry for each function of a program; the first is the default."""
    for name in ("input", "output", "state", "functions"):
        description.ClearField(name)
    entries = {name: description.functions.add(name=name) for name in program.functions}
    description.defaultFunctionName = next(iter(entries))
    return entries


def _states(features: Any, wanted: list[tuple[str, Var]]) -> None:
    """The entries of states, where they are others than before."""
    stated = {f.name: list(f.type.stateType.arrayType.shape) for f in features}
    if stated == {name: list(port(name, var).shape) for name, var in wanted}:
        return
    del features[:]
    for name, var in wanted:
        array = features.add(name=name).type.stateType.arrayType
        array.dataType = _feature_type(var)
        array.shape.extend(port(name, var).shape)


def saved(spec: Any, program: Program) -> dict[str, bytes]:
    """The parts of the description that will be saved with a program; none for a bare program."""
    if spec is None:
        return {}
    spec_saved = proto.Model_pb2.Model()
    spec_saved.description.CopyFrom(spec.description)
    describe(spec_saved, program)
    return parts(spec_saved.description)


def parts(description: Any, where: str = "") -> dict[str, bytes]:
    """A description in parts: each feature of each function, the default, and the rest, "metadata"."""
    rest = type(description)()
    rest.CopyFrom(description)
    pieces: dict[str, bytes] = {}
    for kind in ("input", "output", "state"):
        for feature in getattr(rest, kind, ()):
            pieces[f"{where}{kind} {feature.name}"] = feature.SerializeToString(deterministic=True)
        rest.ClearField(kind)
    for function in getattr(rest, "functions", ()):
        pieces |= parts(function, f"{function.name}: ")
    if where == "":
        rest.ClearField("functions")
        if rest.defaultFunctionName:
            pieces[f"default {rest.defaultFunctionName}"] = b""
            rest.ClearField("defaultFunctionName")
    pieces[f"{where}metadata"] = rest.SerializeToString(deterministic=True)
    return pieces


def _features(features: Any, wanted: list[tuple[str, Var]]) -> None:
    """Drop, change and add the entries of a list of features; those that fit stay as they are."""
    names = {name for name, _ in wanted}
    for feature in [f for f in features if f.name not in names]:
        features.remove(feature)
    by_name = {f.name: f for f in features}
    for name, var in wanted:
        if name in by_name and by_name[name].type.WhichOneof("Type") != "multiArrayType":
            _picture(by_name[name].type, port(name, var).shape)
            continue
        if name not in by_name:
            by_name[name] = features.add(name=name)
            by_name[name].type.multiArrayType.dataType = _feature_type(var)
            by_name[name].type.multiArrayType.shape.extend(d or 1 for d in port(name, var).shape)
        array = by_name[name].type.multiArrayType
        if dtype_name(var) == "fp16":
            array.dataType = _feature_type(var)
        shape = port(name, var).shape
        if None not in shape and _admits_others(array, shape):  # it was fixed by a pass
            array.ClearField(array.WhichOneof("ShapeFlexibility"))
        fixed = array.shape and array.WhichOneof("ShapeFlexibility") is None and None not in shape
        if fixed and list(array.shape) != list(shape):
            array.shape[:] = [int(d or 1) for d in shape]


def _picture(kind: Any, shape: Sequence[int | None]) -> None:
    """An image that was fixed has the size of its value, (1, channels, height, width), and no other."""
    if kind.WhichOneof("Type") != "imageType" or len(shape) != 4 or None in shape:
        return
    image, (height, width) = kind.imageType, shape[2:]
    flexible = image.WhichOneof("SizeFlexibility")
    if flexible is not None and len(_sizes_of(image)) > 1:
        image.ClearField(flexible)
    if image.WhichOneof("SizeFlexibility") is None and (image.height, image.width) != (height, width):
        image.height, image.width = int(height or 1), int(width or 1)


def _sizes_of(image: Any) -> set[tuple[int, int]]:
    """Some of the sizes that a flexible image may have: all that are named, or the least and the largest."""
    if image.WhichOneof("SizeFlexibility") == "enumeratedSizes":
        return {(s.height, s.width) for s in image.enumeratedSizes.sizes}
    high, wide = image.imageSizeRange.heightRange, image.imageSizeRange.widthRange
    return {(high.lowerBound, wide.lowerBound), (high.upperBound, wide.upperBound)}


def _admits_others(array: Any, shape: Sequence[int | None]) -> bool:
    """Does a flexible feature allow shapes other than this one?"""
    if array.WhichOneof("ShapeFlexibility") == "enumeratedShapes":
        return any(list(s.shape) != list(shape) for s in array.enumeratedShapes.shapes)
    ranges = array.shapeRange.sizeRanges
    return any(r.lowerBound != r.upperBound for r in ranges)


def _feature_type(var: Var) -> int:
    name = types.builtin_to_string(var.dtype)
    if name not in FEATURE_TYPES:
        raise UnknownName("type of an input or output", name, FEATURE_TYPES)
    return int(proto.FeatureTypes_pb2.ArrayFeatureType.ArrayDataType.Value(FEATURE_TYPES[name]))


@dataclass(frozen=True)
class Origin:
    """The model of a program.

    Attributes:
        description: `ModelDescription` message, with the default shapes of the inputs.
        version: of its specification.
        network: is the program the translation of a neural network?
    """

    description: Any
    version: int
    network: bool = False


_ORIGINS: WeakKeyDictionary[Program, Origin] = WeakKeyDictionary()


def remember(program: Program, spec: Any) -> None:
    """Note the model of a program; whether it was a neural network is kept."""
    description = proto.Model_pb2.ModelDescription()
    description.CopyFrom(spec.description)
    before = _ORIGINS.get(program)
    network = before is not None and before.network
    _ORIGINS[program] = Origin(description, int(spec.specificationVersion), network)


def translated(program: Program) -> None:
    """Note that a program, of which the model is known, is the translation of a neural network."""
    _ORIGINS[program] = replace(_ORIGINS[program], network=True)


def origin_of(program: Program) -> Origin | None:
    """The model that a program was read from; None for one that was built or converted."""
    return _ORIGINS.get(program)
