"""Networks of one layer of two sides, for the tests of the passes that write such layers otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anesurgery.mil import Array
from anesurgery.network_editing.layer_pass import LayerPass
from anesurgery.neuralnetwork.making import make_layer, make_network, weights
from anesurgery.testing import apply_pass, assert_same_numbers

Shape = tuple[int, ...]


def two(kind: str, x: Shape, z: Shape, rank5: bool = False) -> Any:
    """Two inputs, x first."""
    layers = [make_layer(kind, ["x", "z"], ["y"])]
    return make_network({"x": x, "z": z}, layers, ["y"], rank5=rank5)


def with_constant(kind: str, x: Shape, value: Array, first: bool = False, rank5: bool = False) -> Any:
    """The input x and a constant; `first`: the constant is the first side."""
    constant = make_layer("loadConstantND", [], ["c"], shape=value.shape, data=weights(value))
    layer = make_layer(kind, ["c", "x"] if first else ["x", "c"], ["y"])
    return make_network({"x": x}, [constant, layer], ["y"], rank5=rank5)


def with_any_batch(spec: Any) -> Any:
    """A copy of the network with inputs whose first size is dynamic."""
    given, spec = spec, type(spec)()
    spec.CopyFrom(given)
    for feature in spec.description.input:
        array = feature.type.multiArrayType
        array.shapeRange.sizeRanges.add(lowerBound=1, upperBound=-1)
        for size in array.shape[1:]:
            array.shapeRange.sizeRanges.add(lowerBound=size, upperBound=size)
    return spec


def with_sizes(spec: Any, *ranges: tuple[int, int]) -> Any:
    """A copy of the network whose first input has sizes from one number to another along each axis."""
    given, spec = spec, type(spec)()
    spec.CopyFrom(given)
    for low, high in ranges:
        spec.description.input[0].type.multiArrayType.shapeRange.sizeRanges.add(lowerBound=low, upperBound=high)
    return spec


def with_output(spec: Any, blob: str) -> Any:
    """A copy of the network of which a blob is an output too."""
    given, spec = spec, type(spec)()
    spec.CopyFrom(given)
    spec.description.output.add(name=blob).type.multiArrayType.dataType = 65568
    return spec


def with_reader(spec: Any, blob: str) -> Any:
    """A copy of the network in which another layer reads a blob too."""
    spec = with_output(spec, "z")
    spec.neuralNetwork.layers.append(make_layer("activation", [blob], ["z"], tanh={}))
    return spec


def layers_after(step: LayerPass, spec: Any, inputs: Mapping[str, Array] | None = None) -> list[Any]:
    """The layers after a pass, which gives the same numbers as it promises."""
    after, session = apply_pass(step, spec)
    assert session.changes, session.refusals
    assert_same_numbers(spec, after, inputs=inputs, rtol=step.tolerance.rtol)
    return list(after.neuralNetwork.layers)


def kinds_after(step: LayerPass, spec: Any, inputs: Mapping[str, Array] | None = None) -> list[str]:
    """The types of `layers_after`."""
    return [layer.WhichOneof("layer") for layer in layers_after(step, spec, inputs)]
