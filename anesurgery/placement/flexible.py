"""Models whose input shapes may vary: which shapes they name, and a copy of the program at one of them.

What runs where is estimated at the default shape and at each enumerated one. Of the other shapes of a range
nothing is said: up to iOS 17.3 only the default was for the engine, and later systems were seen to do the same.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from anesurgery.errors import LoadError
from anesurgery.files import protobuf
from anesurgery.mil import Function, Program, Var, any_symbolic, static_shape
from anesurgery.semantics.reading import shape_in_words

Shapes = Mapping[str, tuple[int, ...]]
"""Input -> its shape."""


@dataclass(frozen=True)
class Flexible:
    """The shapes that a function may be called with.

    Attributes:
        default: of each dynamic input; empty where the model does not say.
        listed: each enumerated combination, the default first; empty for a range.
    """

    default: dict[str, tuple[int, ...]]
    listed: tuple[dict[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class AtShape:
    """An enumerated shape, and where the ops run at it.

    Attributes:
        shape: in words: "x 1x3x256x256".
        counts: number of ops by preferred unit, "unknown" among them.
    """

    shape: str
    counts: dict[str, int]

    def __str__(self) -> str:
        named = ", ".join(f"{count} {unit}" for unit, count in self.counts.items())
        return f"at {self.shape}: {named}"


def dynamic_inputs(function: Function) -> dict[str, Var]:
    """The inputs with a dynamic length."""
    return {n: v for n, v in function.inputs.items() if any_symbolic(v.shape or ())}


def flexible(function: Function, description: Any = None) -> Flexible | None:
    """The shapes of a function with dynamic inputs; None where all are fixed.

    Args:
        function: a MIL function; one that was just converted tells its shapes by itself.
        description: of the function, in the specification of its model.
    """
    dynamic = dynamic_inputs(function)
    if not dynamic:
        return None
    told = [
        s for s in (*_described(description), *_converted(function)) if s[0] in dynamic and _fits(s, dynamic)
    ]
    default = {name: shape for name, shape, _ in told}
    if default.keys() != dynamic.keys():
        return Flexible({})
    lists = {name: listed for name, _, listed in told}
    count = min(map(len, lists.values()))
    listed = tuple({n: shapes[i] for n, shapes in lists.items()} for i in range(count))
    return Flexible(default, tuple(sorted(listed, key=lambda s: s != default)))


Told = tuple[str, tuple[int, ...], list[tuple[int, ...]]]
"""Name, default shape, enumerated shapes."""


def _fits(told: Told, dynamic: Mapping[str, Var]) -> bool:
    return len(told[1]) == len(dynamic[told[0]].shape) and all(told[1])


def _described(description: Any) -> Iterator[Told]:
    for feature in getattr(description, "input", ()):
        array, image = feature.type.multiArrayType, feature.type.imageType
        if feature.type.WhichOneof("Type") == "multiArrayType":
            yield feature.name, _ints(array.shape), [_ints(s.shape) for s in array.enumeratedShapes.shapes]
        elif feature.type.WhichOneof("Type") == "imageType":
            channels = 1 if "GRAYSCALE" in type(image).ColorSpace.Name(image.colorSpace) else 3
            sizes = [_ints((1, channels, s.height, s.width)) for s in image.enumeratedSizes.sizes]
            yield feature.name, _ints((1, channels, image.height, image.width)), sizes


def _converted(function: Function) -> Iterator[Told]:
    for declared in getattr(function, "input_types", None) or ():
        shape = declared.shape
        listed = [_ints(s.shape) for s in getattr(shape, "shapes", ())]
        default = getattr(shape, "default", None)
        yield str(declared.name), _ints(default or ()), listed


def _ints(lengths: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in lengths)


def description_of(description: Any, function: str | None) -> Any:
    """The part of a description that is of one function; None without a description."""
    if description is None:
        return None
    named = {f.name: f for f in description.functions}
    return named.get(function or description.defaultFunctionName) or description


def at(program: Program, name: str, shapes: Shapes) -> Function | None:
    """A copy of a function whose inputs have fixed shapes, its constants shared; None where it has none there.

    The ops are those of the function, in their order; what they make is inferred anew.
    """
    alone = Program()
    alone.add_function(name, program.functions[name])
    held, version = protobuf.HeldWeights(), protobuf.version_of(alone)
    spec = protobuf.to_proto(alone, version, held.store)
    for port in spec.functions[name].inputs:
        for axis, length in enumerate(shapes.get(port.name, ())):
            port.type.tensorType.dimensions[axis].constant.size = length
    try:
        program_there = protobuf.from_proto(spec, version, held.read)
    except LoadError:
        return None
    function = program_there.functions[name]
    return function if all(static_shape(v) is not None for v in function.inputs.values()) else None


def in_words(shapes: Shapes) -> str:
    """The shapes by name: x 1x3x256x256, y 1x8."""
    return ", ".join(f"{name} {shape_in_words(shape)}" for name, shape in shapes.items())


def fixing(shapes: Flexible | None, model: str) -> str:
    """The command that fixes the shapes of a model that takes a range of them; "" for other models."""
    if shapes is None or shapes.listed:
        return ""
    sizes = json.dumps({name: list(shape) for name, shape in shapes.default.items()})
    chosen = f" --set {shlex.quote(f'shapes={sizes}')}" if shapes.default else ""
    return f"anesurgery fix {shlex.quote(model)} fix_shapes fixed.mlpackage{chosen}"
