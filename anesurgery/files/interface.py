"""The interface and the description of a model: compared, declared to change, and brought up to date.

The old model is fed the old inputs; `adapt_inputs` turns them into the inputs of the new model, and
`adapt_outputs` turns the old model's outputs into what the new model should give.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

from anesurgery.errors import LoadError, UnknownName, warn
from anesurgery.files import protobuf
from anesurgery.files.copying import copied
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
    quiet_host,
    types,
)


@dataclass(frozen=True)
class Port:
    """One input, output or state."""

    name: str
    kind: str
    """Element type as MIL prints it, with "state" or "list" in front where it is one."""
    shape: tuple[int | None, ...]
    """None for a flexible dimension."""

    def __str__(self) -> str:
        dims = "x".join("?" if d is None else str(d) for d in self.shape)
        return f"{self.name} ({dims or 'scalar'} {self.kind})"


@dataclass(frozen=True)
class Signature:
    """Inputs (states included) and outputs of a function, in order."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


VERSION = "specification version"
"""What a declared change names when the model needs a newer OS."""


@dataclass(frozen=True)
class Interface:
    """Everything of a model that its callers depend on."""

    functions: dict[str, Signature]
    description: Mapping[str, bytes] = field(default_factory=dict)
    """The parts of the description that is saved with the model, as `parts` names them."""
    specification_version: int = 0

    @property
    def images(self) -> frozenset[str]:
        """The inputs and outputs that the description calls images."""
        kinds = {k: data for k, data in self.description.items() if k.split(" ")[0] in ("input", "output")}
        features = [proto.Model_pb2.FeatureDescription.FromString(data) for data in kinds.values()]
        return frozenset(f.name for f in features if f.type.WhichOneof("Type") == "imageType")

    def difference(self, other: Interface, ignore: Collection[str] = ()) -> str:
        """What differs in `other`, in words; "" when nothing does.

        Args:
            other: the interface after.
            ignore: names of inputs, outputs and functions that may differ.
        """
        apart = self.functions.keys() ^ other.functions.keys()
        words = [
            f"function {name!r} {'is gone' if name in self.functions else 'is new'}"
            for name in sorted(apart - set(ignore))
        ]
        for name in self.functions.keys() & other.functions.keys():
            a, b = self.functions[name], other.functions[name]
            words += _ports("input", a.inputs, b.inputs, ignore)
            words += _ports("output", a.outputs, b.outputs, ignore)
        if self.description and other.description:
            words += _parts(self.description, other.description, ignore)
        if self.specification_version != other.specification_version and VERSION not in ignore:
            words.append(f"{VERSION} {self.specification_version} became {other.specification_version}")
        return "; ".join(words)


def _parts(a: Mapping[str, bytes], b: Mapping[str, bytes], ignore: Collection[str]) -> list[str]:
    """How two descriptions differ, part by part; the last word of a part is the name of its feature."""
    old, new = ([p for p in parts if not {p.split()[-1], p.split(": ")[0]} & set(ignore)] for parts in (a, b))
    words = [f"the description of {part} is gone" for part in old if part not in b]
    words += [f"the description of {part} is new" for part in new if part not in a]
    words += [f"the description of {part} changed" for part in old if part in b and a[part] != b[part]]
    if not words and old != new:
        words.append(f"the description of {', '.join(old)} became that of {', '.join(new)}")
    return words


def _ports(word: str, a: tuple[Port, ...], b: tuple[Port, ...], ignore: Collection[str]) -> list[str]:
    old = {p.name: p for p in a if p.name not in ignore}
    new = {p.name: p for p in b if p.name not in ignore}
    words = [f"{word} {p} is gone" for n, p in old.items() if n not in new]
    words += [f"{word} {p} is new" for n, p in new.items() if n not in old]
    words += [f"{word} {old[n]} became {new[n]}" for n in old if n in new and old[n] != new[n]]
    if not words and list(old) != list(new):
        words.append(f"the order of {word}s {', '.join(old)} became {', '.join(new)}")
    return words


def signatures(program: Program) -> dict[str, Signature]:
    """The signature of every function."""
    return {name: _signature(f) for name, f in program.functions.items()}


def _signature(function: Function) -> Signature:
    inputs = tuple(port(name, var) for name, var in function.inputs.items())
    return Signature(inputs, tuple(port(v.name, v) for v in function.outputs))


def port(name: str, var: Var) -> Port:
    """A value as a caller sees it."""
    if types.is_state(var.sym_type):
        wrapped = var.sym_type.wrapped_type()
        kind = f"state {types.builtin_to_string(wrapped.get_primitive())}"
        return Port(name, kind, _dims(wrapped.get_shape()))
    if not (types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type)):
        return Port(name, str(var.sym_type.__type_info__()), ())
    return Port(name, dtype_name(var), _dims(var.shape or ()))


def _dims(shape: tuple[object, ...]) -> tuple[int | None, ...]:
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
    """What the caller must change, in a sentence."""
    names: tuple[str, ...]
    """The inputs and outputs that are added, dropped or changed."""
    inputs: Callable[[Values], Values] = _unchanged
    """From the old model's inputs to the new model's (numpy arrays by name)."""
    outputs: Callable[[Values, Values], Values] = _unchanged_outputs
    """From the old model's (outputs, inputs) to the outputs expected of the new model."""
    retypes: bool = False
    """Is the element type all that changes, of numbers that stay the same?"""
    call: Callable[[Any, Values, str], Values] | None = None
    """Where one call becomes several: from (new model, old model's inputs, precision) to the old outputs."""


def adapt_inputs(changes: Iterable[InterfaceChange], inputs: Values) -> Values:
    """The new model's inputs for a set of the old model's."""
    for change in changes:
        inputs = change.inputs(inputs)
    return inputs


def call_of(changes: Iterable[InterfaceChange]) -> Callable[[Any, Values, str], Values] | None:
    """How the new model is called, where one call became several."""
    return next((change.call for change in reversed(list(changes)) if change.call is not None), None)


def adapt_outputs(changes: Iterable[InterfaceChange], outputs: Values, inputs: Values) -> Values:
    """What the new model should give, from what the old model gave for `inputs` (the old model's)."""
    for change in changes:
        outputs = change.outputs(outputs, inputs)
    return outputs


IDENTIFIERS = "MIL takes identifiers only"
"""Why an input or output is renamed: in ML Programs coremltools refuses any but [a-zA-Z_][a-zA-Z0-9_]*."""


def warn_of_names(notes: Iterable[str]) -> None:
    """Warn of the inputs and outputs that got other names, by what the notes of a network's import say."""
    if renamed := [words for words in notes if words.endswith(IDENTIFIERS)]:
        warn(f"the interface changes; give and read the new names: {'; '.join(renamed)}")


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
