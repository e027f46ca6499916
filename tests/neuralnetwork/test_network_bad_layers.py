"""Each layer type with empty parameters and with choices that have no name: an error that names the layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from anesurgery.errors import LoadError
from anesurgery.files.protobuf import proto
from anesurgery.neuralnetwork.importing import import_network

Layer = proto.NeuralNetwork_pb2.NeuralNetworkLayer
KINDS = [field.name for field in Layer.DESCRIPTOR.oneofs_by_name["layer"].fields]
SHAPES = [(True, (3,)), (True, (3, 4, 5)), (False, (3,)), (False, (2, 3)), (False, (2, 3, 4, 5))]
"""(rank 5 mapping?, shape of all inputs)"""


def one_layer(kind: str, count: int, legacy: bool, shape: tuple[int, ...]) -> Any:
    """A network of one layer, its parameters empty."""
    spec = proto.Model_pb2.Model(specificationVersion=5)
    spec.neuralNetwork.arrayInputShapeMapping = 0 if legacy else 1
    for i in range(count):
        spec.description.input.add(name=f"x{i}").type.multiArrayType.shape.extend(shape)
    spec.description.output.add(name="y").type.multiArrayType.SetInParent()
    layer = spec.neuralNetwork.layers.add(name="bad")
    layer.input.extend(f"x{i}" for i in range(count))
    layer.output.append("y")
    getattr(layer, kind).SetInParent()
    return spec


def parameters(spec: Any, kind: str) -> Any:
    return getattr(spec.neuralNetwork.layers[0], kind)


def choices(kind: str) -> list[tuple[str, ...]]:
    """The ways to the fields of the parameters that are choices."""

    def walk(descriptor: Any, way: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for field in descriptor.fields:
            if field.enum_type is not None:
                yield (*way, field.name)
            elif field.message_type is not None and field.message_type.name.endswith(("Mode", "SamePadding")):
                yield from walk(field.message_type, (*way, field.name))

    return list(walk(Layer.DESCRIPTOR.fields_by_name[kind].message_type, ()))


CHOICES = [(kind, way) for kind in KINDS for way in choices(kind)]


@pytest.mark.one_of(10)
@pytest.mark.parametrize("kind", KINDS)
def test_empty_parameters_are_taken_or_refused_by_name(kind: str) -> None:
    said = []
    for legacy, shape in SHAPES:
        for count in range(5):
            try:
                import_network(one_layer(kind, count, legacy, shape))
            except LoadError as error:
                said.append(str(error))
    assert said, "no layer type takes any number of inputs"
    assert [s for s in said if "layer 'bad'" not in s and "output 'y'" not in s] == []


@pytest.mark.parametrize(("kind", "way"), CHOICES)
def test_a_choice_without_a_name_is_refused(kind: str, way: tuple[str, ...]) -> None:
    said = ""
    for count in range(1, 4):
        spec = one_layer(kind, count, False, (2, 3, 4, 5))
        place = parameters(spec, kind)
        for name in way[:-1]:
            place = getattr(place, name)
        setattr(place, way[-1], 99)
        with pytest.raises(LoadError) as caught:
            import_network(spec)
        said += str(caught.value)
    assert f"layer 'bad' ({kind}): has {way[-1]} = 99" in said
    assert "upgrade coremltools" in said
