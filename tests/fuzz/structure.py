"""What is done to the structure of a model: its protobuf stays readable, and says what no converter would say.

A mutation changes a specification in place with the help of a random number generator, and gives None; one that
finds nothing to change raises `UnfitError`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

Mutation = Callable[[random.Random, Any], object]
T = TypeVar("T")

INTEGERS = (0, 1, -1, 3, 7, 99, 2**31 - 1, -(2**31), 2**40, 2**63 - 1, -(2**63))
FLOATS = (0.0, -1.0, float("nan"), float("inf"), -1e38, 1e-40)
STRINGS = ("", "zzz", "x/\0y", "a" * 5000, "../../up", "int32", "same", "ü")


class UnfitError(Exception):
    """The model has nothing that the mutation changes."""


def pick(rng: random.Random, of: Sequence[T]) -> T:
    """One of some.

    Raises:
        UnfitError: there is none.
    """
    if not of:
        raise UnfitError
    return rng.choice(of)


def two(rng: random.Random, of: Sequence[T]) -> tuple[T, T]:
    """Two different ones."""
    if len(of) < 2:
        raise UnfitError
    first, second = rng.sample(of, 2)
    return first, second


# ML Programs


def functions(spec: Any) -> list[Any]:
    return [spec.mlProgram.functions[name] for name in sorted(spec.mlProgram.functions)]


def blocks(spec: Any) -> list[Any]:
    return [f.block_specializations[name] for f in functions(spec) for name in sorted(f.block_specializations)]


def ops(spec: Any) -> list[Any]:
    """The ops of all functions, those of nested blocks too."""

    def inside(block: Any) -> Iterator[Any]:
        for op in block.operations:
            yield op
            for nested in op.blocks:
                yield from inside(nested)

    return [op for block in blocks(spec) for op in inside(block)]


def makers(spec: Any) -> list[Any]:
    return [op for op in ops(spec) if op.outputs]


def swap_op_types(rng: random.Random, spec: Any) -> None:
    one, other = two(rng, ops(spec))
    one.type, other.type = other.type, one.type


def unknown_op_type(rng: random.Random, spec: Any) -> None:
    pick(rng, ops(spec)).type = rng.choice(STRINGS)


def drop_input(rng: random.Random, spec: Any) -> None:
    op = pick(rng, [op for op in ops(spec) if op.inputs])
    del op.inputs[rng.choice(sorted(op.inputs))]


def exchange_inputs(rng: random.Random, spec: Any) -> None:
    """Values go to other parameters."""
    op = pick(rng, [op for op in ops(spec) if len(op.inputs) > 1])
    one, other = two(rng, sorted(op.inputs))
    kept = op.inputs[one].SerializeToString()
    op.inputs[one].CopyFrom(op.inputs[other])
    op.inputs[other].ParseFromString(kept)


def drop_op(rng: random.Random, spec: Any) -> None:
    block = pick(rng, blocks(spec))
    del block.operations[pick(rng, range(len(block.operations)))]


def change_dtype(rng: random.Random, spec: Any) -> None:
    output = pick(rng, makers(spec)).outputs[0]
    output.type.tensorType.dataType = rng.choice([0, 1, 2, 10, 11, 12, 21, 22, 23, 24, 31, 99])


def change_shape(rng: random.Random, spec: Any) -> None:
    tensor = pick(rng, makers(spec)).outputs[0].type.tensorType
    if not tensor.dimensions or rng.random() < 0.2:
        tensor.rank = rng.choice([0, 3, 9, -1])
    else:
        rng.choice(tensor.dimensions).constant.size = rng.choice([0, 1, 7, 2**40, 2**63])


def duplicate_name(rng: random.Random, spec: Any) -> None:
    one, other = two(rng, makers(spec))
    one.outputs[0].name = other.outputs[0].name


def cycle(rng: random.Random, spec: Any) -> None:
    """An op reads a value that is made later, or its own."""
    op = pick(rng, [op for op in ops(spec) if op.inputs])
    arguments = op.inputs[rng.choice(sorted(op.inputs))].arguments
    pick(rng, arguments).name = pick(rng, makers(spec)).outputs[0].name


def odd_constant(rng: random.Random, spec: Any) -> None:
    constant = pick(rng, [op for op in ops(spec) if op.type == "const" and "val" in op.attributes])
    tensor = constant.attributes["val"].immediateValue.tensor
    kind = tensor.WhichOneof("value")
    values = getattr(tensor, kind).values if kind in ("ints", "floats", "bools", "strings") else ()
    if not values:
        raise UnfitError
    choices = {
        "ints": (-(2**31), 2**31 - 1, 0, -1),
        "floats": FLOATS,
        "bools": (True, False),
        "strings": STRINGS,
    }
    how = rng.random()
    if how < 0.2:
        del values[:]
    elif how < 0.4:
        values.append(rng.choice(choices[kind]))
    else:
        values[rng.randrange(len(values))] = rng.choice(choices[kind])


def odd_weight_place(rng: random.Random, spec: Any) -> None:
    blobs = [v.blobFileValue for op in ops(spec) for v in op.attributes.values() if v.HasField("blobFileValue")]
    blob = pick(rng, blobs)
    if rng.random() < 0.3:
        blob.fileName = rng.choice(STRINGS)
    else:
        blob.offset = rng.choice([0, 1, 64, 65, 2**40, 2**64 - 1])


def unknown_opset(rng: random.Random, spec: Any) -> None:
    function = pick(rng, functions(spec))
    opset = rng.choice(["", "CoreML99", "coreml6", "CoreML5", "CoreML7"])
    kept = next(iter(function.block_specializations.values()))
    function.block_specializations[opset].CopyFrom(kept)
    if rng.random() < 0.7:
        function.opset = opset


def function_name(rng: random.Random, spec: Any) -> None:
    table = spec.mlProgram.functions
    name = pick(rng, sorted(table))
    table[rng.choice(STRINGS)].CopyFrom(table[name])
    del table[name]


def lost_output(rng: random.Random, spec: Any) -> None:
    block = pick(rng, blocks(spec))
    if rng.random() < 0.5:
        del block.outputs[:]
    else:
        block.outputs[pick(rng, range(len(block.outputs)))] = rng.choice(["nobody", ""])


def lost_block(rng: random.Random, spec: Any) -> None:
    del pick(rng, [op for op in ops(spec) if op.blocks]).blocks[-1]


# Neural networks


def network(spec: Any) -> Any:
    return getattr(spec, spec.WhichOneof("Type"))


def layers(spec: Any) -> list[Any]:
    return list(network(spec).layers)


def swap_layer_kinds(rng: random.Random, spec: Any) -> None:
    """The inputs and outputs of two layers are exchanged, as if each were of the kind of the other."""
    one, other = two(rng, layers(spec))
    for field in ("input", "output", "inputTensor", "outputTensor"):
        mine, theirs = getattr(one, field), getattr(other, field)
        kept = list(mine)
        del mine[:]
        mine.extend(theirs)
        del theirs[:]
        theirs.extend(kept)


def drop_layer_input(rng: random.Random, spec: Any) -> None:
    del pick(rng, [layer for layer in layers(spec) if layer.input]).input[-1]


def drop_layer(rng: random.Random, spec: Any) -> None:
    del network(spec).layers[pick(rng, range(len(network(spec).layers)))]


def duplicate_layer_name(rng: random.Random, spec: Any) -> None:
    one, other = two(rng, layers(spec))
    if rng.random() < 0.5:
        one.name = other.name
    elif other.output:
        one.output[:] = other.output


def layer_cycle(rng: random.Random, spec: Any) -> None:
    one, other = two(rng, layers(spec))
    if one.input and other.output:
        one.input[0] = other.output[0]


def layer_kind_is_unknown(rng: random.Random, spec: Any) -> None:
    layer = pick(rng, layers(spec))
    layer.ClearField(layer.WhichOneof("layer"))


# Any model


def spec_version(rng: random.Random, spec: Any) -> None:
    spec.specificationVersion = rng.choice([0, 1, 4, 5, 6, 99, -1])


def interface(rng: random.Random, spec: Any) -> None:
    """The description says something else than the model."""
    features = rng.choice([spec.description.input, spec.description.output])
    at = pick(rng, range(len(features)))
    how = rng.random()
    if how < 0.3:
        del features[at]
    elif how < 0.5:
        features.add().CopyFrom(features[at])
    elif how < 0.7:
        features[at].name = rng.choice(STRINGS)
    elif features[at].type.HasField("multiArrayType"):
        array = features[at].type.multiArrayType
        if rng.random() < 0.5:
            array.dataType = rng.choice([0, 65568, 65600, 131104, 65552])
        else:
            array.shape.append(rng.choice(INTEGERS))
    else:
        features[at].type.Clear()


def messages(message: Any) -> Iterator[tuple[Any, Any]]:
    """Every field that is set, with the message that holds it."""
    for field, value in message.ListFields():
        yield message, field
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            inside = list(value.values()) if field.message_type.fields_by_name["value"].message_type else []
        else:
            inside = [value] if hasattr(value, "ListFields") else list(value)
        for nested in inside:
            yield from messages(nested)


def any_field(rng: random.Random, spec: Any) -> None:
    """Any field of any message is cleared, repeated, shortened or has another value."""
    message, field = pick(rng, list(messages(spec)))
    value = getattr(message, field.name)
    if hasattr(value, "extend") and len(value):
        at = rng.randrange(len(value))
        if rng.random() < 0.4:
            del value[at]
        elif field.message_type is not None:
            value.add().CopyFrom(value[at])
        else:
            value[at] = another(rng, field, value[at])
    elif field.message_type is not None or rng.random() < 0.3:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, another(rng, field, value))


def another(rng: random.Random, field: Any, value: Any) -> Any:
    """Another value of a field's type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return rng.choice(STRINGS)
    if isinstance(value, bytes):
        return value[: rng.randrange(len(value) + 1)]
    if isinstance(value, float):
        return rng.choice(FLOATS)
    if field.enum_type is not None:
        return rng.choice([v.number for v in field.enum_type.values])
    return rng.choice(INTEGERS)


# Pipelines


def members(spec: Any) -> Any:
    found = getattr(spec, spec.WhichOneof("Type"))
    return found.pipeline.models if hasattr(found, "pipeline") else found.models


def reorder_members(rng: random.Random, spec: Any) -> None:
    models = members(spec)
    if len(models) < 2:
        raise UnfitError
    kept = models[0].SerializeToString()
    models[0].CopyFrom(models[-1])
    models[-1].ParseFromString(kept)


def drop_member(rng: random.Random, spec: Any) -> None:
    models = members(spec)
    del models[pick(rng, range(len(models)))]


def repeat_member(rng: random.Random, spec: Any) -> None:
    models = members(spec)
    models.add().CopyFrom(pick(rng, list(models)))


def empty_member(rng: random.Random, spec: Any) -> None:
    pick(rng, list(members(spec))).Clear()


def nested_in_itself(rng: random.Random, spec: Any) -> None:
    """The pipeline is a member of itself, a few times over."""
    for _ in range(rng.randint(1, 6)):
        inner = type(spec)()
        inner.CopyFrom(spec)
        members(spec).add().CopyFrom(inner)


def mutate_member(rng: random.Random, spec: Any) -> None:
    member = pick(rng, list(members(spec)))
    rng.choice(MUTATIONS.get(member.WhichOneof("Type"), ANY))(rng, member)


ANY: tuple[Mutation, ...] = (spec_version, interface, any_field, any_field, any_field)
PROGRAM: tuple[Mutation, ...] = (
    *(swap_op_types, unknown_op_type, drop_input, exchange_inputs, drop_op, change_dtype, change_shape),
    *(duplicate_name, cycle, odd_constant, odd_constant, odd_weight_place, unknown_opset, function_name),
    *(lost_output, lost_block),
)
NETWORK: tuple[Mutation, ...] = (
    *(swap_layer_kinds, drop_layer_input, drop_layer, duplicate_layer_name, layer_cycle, layer_kind_is_unknown),
)
PIPELINE: tuple[Mutation, ...] = (
    *(
        reorder_members,
        drop_member,
        repeat_member,
        empty_member,
        nested_in_itself,
        mutate_member,
        mutate_member,
    ),
)
MUTATIONS: dict[str | None, tuple[Mutation, ...]] = {
    "mlProgram": PROGRAM + ANY,
    "neuralNetwork": NETWORK + ANY,
    "neuralNetworkClassifier": NETWORK + ANY,
    "pipeline": PIPELINE + ANY,
}
"""By the type of a model."""


def tried(mutation: Mutation, rng: random.Random, spec: Any) -> bool:
    """Was a mutation done? Not where it finds nothing, and where protobuf takes no such value."""
    try:
        mutation(rng, spec)
    except (UnfitError, ValueError, TypeError):
        return False
    return True


def mutate(rng: random.Random, spec: Any) -> str:
    """Change a specification, once or a few times; what was done, in words."""
    said: list[str] = []
    table = MUTATIONS[spec.WhichOneof("Type")]
    wanted = rng.choice([1, 1, 1, 2, 3])
    for _ in range(50):
        mutation = rng.choice(table)
        if not tried(mutation, rng, spec):
            continue
        said.append(mutation.__name__)
        if len(said) == wanted or spec.WhichOneof("Type") not in MUTATIONS:
            break
    return ", ".join(said)
