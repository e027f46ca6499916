"""Compare the interfaces of two models, declare changes of an interface, and update a model's description.

A pass that changes inputs or outputs on purpose declares an `InterfaceChange`. To compare both models, the old
one gets the old inputs; `adapt_inputs` turns these into the inputs of the new model, and `adapt_outputs` turns
the old model's outputs into those expected of the new model. `describe` updates the description that is saved.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from anesurgery.errors import LoadError, UnknownName, warn
from anesurgery.files import protobuf
from anesurgery.files.copying import copy_program
from anesurgery.files.protobuf import proto
from anesurgery.files.writing import temporary_files
from anesurgery.mil import (
    Array,
    Function,
    Program,
    Var,
    ct,
    dtype_name,
    exclusive,
    is_symbolic,
    silent_host,
    types,
)


@dataclass(frozen=True)
class Port:
    """One input, output or state."""

    name: str
    kind: str
    """The dtype as MIL prints it, with "state" or "list" before it for these: "fp16", "state fp16"."""
    shape: tuple[int | None, ...]
    """The sizes; None for a dynamic one."""

    def __str__(self) -> str:
        dims = "x".join("?" if d is None else str(d) for d in self.shape)
        return f"{self.name} ({dims or 'scalar'} {self.kind})"


@dataclass(frozen=True)
class Signature:
    """Inputs (states included) and outputs of a function, in order."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


VERSION = "specification version"
"""The name in a declared change that raises the specification version, so that a newer OS is needed."""


@dataclass(frozen=True)
class Interface:
    """Everything about a model that its callers depend on."""

    functions: dict[str, Signature]
    description: Mapping[str, bytes] = field(default_factory=dict)
    """The saved description in parts, as `description_parts` returns them."""
    specification_version: int = 0

    @property
    def images(self) -> frozenset[str]:
        """The names of the inputs and outputs that are images."""
        ports = [data for part, data in self.description.items() if _read_part(part)[1] in ("input", "output")]
        features = map(proto.Model_pb2.FeatureDescription.FromString, ports)
        return frozenset(f.name for f in features if f.type.WhichOneof("Type") == "imageType")

    def difference(self, other: Interface, ignore: Collection[str] = ()) -> str:
        """Return the differences of `other` in words; "" if there are none.

        Args:
            other: the interface after.
            ignore: names of inputs, outputs and functions that may differ.
        """
        only_one_has = self.functions.keys() ^ other.functions.keys()
        words = [
            f"function {name!r} {'is gone' if name in self.functions else 'is new'}"
            for name in sorted(only_one_has - set(ignore))
        ]
        for name, a in self.functions.items():
            if (b := other.functions.get(name)) is not None:
                found = _port_differences("input", a.inputs, b.inputs, ignore)
                found += _port_differences("output", a.outputs, b.outputs, ignore)
                words += [f"{name}: {w}" for w in found] if len(self.functions) > 1 else found
        if self.description and other.description:
            words += _description_differences(self.description, other.description, ignore)
        if self.specification_version != other.specification_version and VERSION not in ignore:
            words.append(f"{VERSION} {self.specification_version} became {other.specification_version}")
        return "; ".join(words)


def _description_differences(
    a: Mapping[str, bytes], b: Mapping[str, bytes], ignore: Collection[str]
) -> list[str]:
    """Return the differences of two descriptions in words."""
    ignored = {part for part in (*a, *b) if set(_read_part(part)[::2]) & set(ignore)}
    old, new = ([part for part in description if part not in ignored] for description in (a, b))
    words = [f"the description of {part} is gone" for part in old if part not in b]
    words += [f"the description of {part} is new" for part in new if part not in a]
    words += [f"the description of {part} changed" for part in old if part in b and a[part] != b[part]]
    if not words and old != new:
        words.append(f"the description of {', '.join(old)} became that of {', '.join(new)}")
    return words


def _port_differences(
    word: str, a: tuple[Port, ...], b: tuple[Port, ...], ignore: Collection[str]
) -> list[str]:
    old = {p.name: p for p in a if p.name not in ignore}
    new = {p.name: p for p in b if p.name not in ignore}
    words = [f"{word} {p} is gone" for n, p in old.items() if n not in new]
    words += [f"{word} {p} is new" for n, p in new.items() if n not in old]
    words += [f"{word} {old[n]} became {new[n]}" for n in old if n in new and old[n] != new[n]]
    if not words and list(old) != list(new):
        words.append(f"the order of {word}s {', '.join(old)} became {', '.join(new)}")
    return words


def signatures(program: Program) -> dict[str, Signature]:
    """Return the signature of every function."""
    return {
        name: Signature(
            inputs=tuple(port(key, var) for key, var in function.inputs.items()),
            outputs=tuple(port(var.name, var) for var in function.outputs),
        )
        for name, function in program.functions.items()
    }


def port(name: str, var: Var) -> Port:
    """Return a value as a caller sees it."""
    if types.is_state(var.sym_type):
        wrapped = var.sym_type.wrapped_type()
        kind = f"state {types.builtin_to_string(wrapped.get_primitive())}"
        return Port(name, kind, _sizes(wrapped.get_shape()))
    if not (types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type)):
        return Port(name, str(var.sym_type.__type_info__()), ())
    return Port(name, dtype_name(var), _sizes(var.shape or ()))


def _sizes(shape: tuple[object, ...]) -> tuple[int | None, ...]:
    return tuple(None if is_symbolic(d) else int(str(d)) for d in shape)


Values = Mapping[str, Array]


def _unchanged(values: Values) -> Values:
    return values


def _unchanged_outputs(outputs: Values, inputs: Values) -> Values:
    return outputs


@dataclass(frozen=True)
class InterfaceChange:
    """One declared change of inputs or outputs."""

    words: str
    """A sentence that says what the caller must change."""
    names: tuple[str, ...]
    """The inputs and outputs that are added, dropped or changed."""
    inputs: Callable[[Values], Values] = _unchanged
    """Turns the old model's inputs into the new model's (name -> numpy array)."""
    outputs: Callable[[Values, Values], Values] = _unchanged_outputs
    """Turns (outputs, inputs) of the old model into the outputs expected of the new one."""
    retypes: bool = False
    """Does only the dtype change, while the numbers stay the same?"""
    call: Callable[[Any, Values, str], Values] | None = None
    """If one call becomes several: turns (new model, old inputs, precision) into outputs like the old ones."""


def adapt_inputs(changes: Iterable[InterfaceChange], inputs: Values) -> Values:
    """Return the new model's inputs for inputs of the old model."""
    for change in changes:
        inputs = change.inputs(inputs)
    return inputs


def call_of(changes: Iterable[InterfaceChange]) -> Callable[[Any, Values, str], Values] | None:
    """Return the `call` of the last change that has one: how the new model is called; None if once."""
    return next((change.call for change in reversed(list(changes)) if change.call is not None), None)


def adapt_outputs(changes: Iterable[InterfaceChange], outputs: Values, inputs: Values) -> Values:
    """Return the outputs expected of the new model, for outputs and inputs of the old model."""
    for change in changes:
        outputs = change.outputs(outputs, inputs)
    return outputs


IDENTIFIERS = "MIL takes identifiers only"
"""Why an input or output is renamed: coremltools accepts only [a-zA-Z_][a-zA-Z0-9_]* in ML Programs."""


def warn_of_names(notes: Iterable[str]) -> None:
    """Warn about inputs and outputs that were renamed, by the notes of a network's import."""
    if renamed := [words for words in notes if words.endswith(IDENTIFIERS)]:
        warn(f"the interface changes; give and read the new names: {'; '.join(renamed)}")


_IMAGE, _ARRAY = proto.FeatureTypes_pb2.ImageFeatureType, proto.FeatureTypes_pb2.ArrayFeatureType


@exclusive()
def new_spec(program: Program, version: int) -> Any:
    """Return the specification that coremltools makes for a program, without weights.

    Raises:
        LoadError: the temporary folder has no room.
    """
    from coremltools.converters.mil.converter import mil_convert

    protobuf.check_depth(program)
    copy: Any = copy_program(program)
    for name, function in program.functions.items():
        copy.functions[name].input_types = function.input_types
        copy.functions[name].output_types = function.output_types
        _without_labels(copy.functions[name])
    if copy.default_function_name not in copy.functions:
        copy.default_function_name = next(iter(program.functions))  # a copy sorts them
    copy.export_as_multifunction = len(copy.functions) > 1
    with temporary_files(), silent_host(), protobuf.without_weights():
        model = mil_convert(
            copy,
            convert_to="mlprogram",
            convert_from="milinternal",
            skip_model_load=True,
            compute_units=ct.ComputeUnit.ALL,
            specification_version=version,
            pass_pipeline=ct.PassPipeline.EMPTY,
        )
    spec = model.get_spec()
    for part in spec.description.functions or [spec.description]:
        name = part.name if spec.description.functions else copy.default_function_name
        _describe_classes(part, program.functions[name])
    return spec


def _classify_op(function: Function) -> Any:
    """Return the op that chooses the label of a classifier; None in other functions."""
    return next((op for op in function.operations if op.op_type == "classify"), None)


def _without_labels(function: Function) -> None:
    """Give out the tensor of a classifier's probabilities alone: coremltools cannot describe the others."""
    if (classify := _classify_op(function)) is not None:
        function.set_outputs(
            [*(v for v in function.outputs if v not in classify.outputs), classify.probabilities]
        )
        function.remove_ops([classify, classify.classes.op])


def _describe_classes(description: Any, function: Function) -> None:
    """Add the label and the probabilities of a classifier to a description, all outputs in their order."""
    if (classify := _classify_op(function)) is None:
        return
    label, probabilities = classify.outputs
    tensors = {feature.name: deepcopy(feature) for feature in description.output}
    kind = "string" if dtype_name(label) == "string" else "int64"
    del description.output[:]
    for var in function.outputs:
        feature = description.output.add(name=var.name)
        if var is label:
            getattr(feature.type, f"{kind}Type").SetInParent()
        elif var is probabilities:
            getattr(feature.type.dictionaryType, f"{kind}KeyType").SetInParent()
        else:
            feature.CopyFrom(tensors[var.name])
    description.predictedFeatureName, description.predictedProbabilitiesName = label.name, probabilities.name


def check_features(spec: Any, where: object) -> None:
    """Check that coremltools knows the kinds of a model's inputs and outputs.

    Raises:
        LoadError: a colour space or dtype is unknown, or an image of an ML Program has no colour space.
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
    """Update the description in a specification to a program whose interface was changed on purpose."""
    description = spec.description
    described = {f.name: f for f in description.functions}
    if len(program.functions) > 1 and set(described) != set(program.functions):
        described = _describe_functions(description, program)
    for name, function in program.functions.items():
        features = described.get(name, description)
        inputs = [v for v in function.inputs.items() if not types.is_state(v[1].sym_type)]
        _update_features(features.input, inputs)
        _update_features(features.output, [(v.name, v) for v in function.outputs])
        _update_states(features.state, [v for v in function.inputs.items() if types.is_state(v[1].sym_type)])


def _describe_functions(description: Any, program: Program) -> dict[str, Any]:
    """Make an entry for each function of a program, and return them by name; the first is the default."""
    for name in ("input", "output", "state", "functions"):
        description.ClearField(name)
    entries = {name: description.functions.add(name=name) for name in program.functions}
    description.defaultFunctionName = next(iter(entries))
    return entries


def _update_states(features: Any, wanted: list[tuple[str, Var]]) -> None:
    """Replace the entries of states if names or shapes changed."""
    stated = {f.name: list(f.type.stateType.arrayType.shape) for f in features}
    if stated == {name: list(port(name, var).shape) for name, var in wanted}:
        return
    del features[:]
    for name, var in wanted:
        array = features.add(name=name).type.stateType.arrayType
        array.dataType = _feature_type(var)
        array.shape.extend(port(name, var).shape)


def saved_description(spec: Any, program: Program) -> dict[str, bytes]:
    """Return the parts of the description that will be saved with a program; {} if `spec` is None."""
    if spec is None:
        return {}
    spec_saved = proto.Model_pb2.Model()
    spec_saved.description.CopyFrom(spec.description)
    describe(spec_saved, program)
    return description_parts(spec_saved.description)


def description_parts(description: Any, where: str = "") -> dict[str, bytes]:
    """Return a description in parts: {"input x", "decode: output y", "default main", "metadata": message}."""
    rest = type(description)()
    rest.CopyFrom(description)
    pieces: dict[str, bytes] = {}
    for kind in ("input", "output", "state"):
        for feature in getattr(rest, kind, ()):
            pieces[f"{where}{kind} {feature.name}"] = feature.SerializeToString(deterministic=True)
        rest.ClearField(kind)
    for function in getattr(rest, "functions", ()):
        pieces |= description_parts(function, f"{function.name}: ")
    if where == "":
        rest.ClearField("functions")
        if rest.defaultFunctionName:
            pieces[f"default {rest.defaultFunctionName}"] = b""
            rest.ClearField("defaultFunctionName")
    pieces[f"{where}metadata"] = rest.SerializeToString(deterministic=True)
    return pieces


def _read_part(part: str) -> tuple[str, str, str]:
    """Return the function, kind and feature that a part of `description_parts` names; "" for what it lacks."""
    match = re.fullmatch(r"(?:(.*?): )?(input|output|state|metadata|default) ?(.*)", part, re.DOTALL)
    assert match is not None
    return match[1] or "", match[2], match[3]


def _update_features(features: Any, wanted: list[tuple[str, Var]]) -> None:
    """Remove, change and add entries of a list of features; entries that fit are not touched."""
    names = {name for name, _ in wanted}
    for feature in [f for f in features if f.name not in names]:
        features.remove(feature)
    by_name = {f.name: f for f in features}
    for name, var in wanted:
        if name in by_name and by_name[name].type.WhichOneof("Type") != "multiArrayType":
            _fix_image_size(by_name[name].type, port(name, var).shape)
            continue
        if name not in by_name:
            by_name[name] = features.add(name=name)
            by_name[name].type.multiArrayType.dataType = _feature_type(var)
            by_name[name].type.multiArrayType.shape.extend(d or 1 for d in port(name, var).shape)
        array, shape = by_name[name].type.multiArrayType, port(name, var).shape
        if dtype_name(var) == "fp16":
            array.dataType = _feature_type(var)
        if None in shape:
            continue
        if _allows_other_shapes(array, shape):  # a pass fixed it
            array.ClearField(array.WhichOneof("ShapeFlexibility"))
        if array.shape and array.WhichOneof("ShapeFlexibility") is None and list(array.shape) != list(shape):
            array.shape[:] = [int(d or 1) for d in shape]


def _fix_image_size(kind: Any, shape: Sequence[int | None]) -> None:
    """Set the size of an image whose value has the fixed shape (1, channels, height, width)."""
    if kind.WhichOneof("Type") != "imageType" or len(shape) != 4 or None in shape:
        return
    image, (height, width) = kind.imageType, shape[2:]
    flexible = image.WhichOneof("SizeFlexibility")
    if flexible is not None and len(_example_sizes(image)) > 1:
        image.ClearField(flexible)
    if image.WhichOneof("SizeFlexibility") is None and (image.height, image.width) != (height, width):
        image.height, image.width = int(height or 1), int(width or 1)


def _example_sizes(image: Any) -> set[tuple[int, int]]:
    """Return (height, width) sizes that a flexible image may have: all listed, or the least and largest."""
    if image.WhichOneof("SizeFlexibility") == "enumeratedSizes":
        return {(s.height, s.width) for s in image.enumeratedSizes.sizes}
    high, wide = image.imageSizeRange.heightRange, image.imageSizeRange.widthRange
    return {(high.lowerBound, wide.lowerBound), (high.upperBound, wide.upperBound)}


def _allows_other_shapes(array: Any, shape: Sequence[int | None]) -> bool:
    """Does a flexible feature allow other shapes than this one?"""
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
    """The model that a program was read from."""

    description: Any
    """Its `ModelDescription` message, with the default shapes of the inputs."""
    version: int
    """Its specification version."""
    network: bool = False
    """Is the program the translation of a neural network?"""


_ORIGINS: WeakKeyDictionary[Program, Origin] = WeakKeyDictionary()


def remember(program: Program, spec: Any) -> None:
    """Record the model of a program; a program recorded as a translated network stays one."""
    description = proto.Model_pb2.ModelDescription()
    description.CopyFrom(spec.description)
    before = _ORIGINS.get(program)
    network = before is not None and before.network
    _ORIGINS[program] = Origin(description, int(spec.specificationVersion), network)


def mark_as_translated(program: Program) -> None:
    """Record that a program, whose model is recorded, is the translation of a neural network."""
    _ORIGINS[program] = replace(_ORIGINS[program], network=True)


def origin_of(program: Program) -> Origin | None:
    """Return the model that a program was read from; None for one that was built or converted."""
    return _ORIGINS.get(program)
