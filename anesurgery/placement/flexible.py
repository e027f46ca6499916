"""Models whose input shapes may vary: which shapes they name, and a copy of the program at one of them.

`verdicts.py` estimates where ops run at the default shape and at each enumerated one. It says nothing about
the other shapes of a range: up to iOS 17.3 only the default ran on the engine, and later systems were seen to
do the same.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery.errors import LoadError, PassError
from anesurgery.files import protobuf
from anesurgery.files.copying import copy_program
from anesurgery.mil import Function, Program, Var, static_shape, walk_ops
from anesurgery.semantics.inference import FixedShapes, dynamic_inputs
from anesurgery.semantics.reading import shape_in_words

MOST_PLACES = 10**6
"""The most elements of a mask that is filled: the list of its places takes 4 bytes for each axis of each."""

Shapes = Mapping[str, tuple[int, ...]]
"""Name of an input -> its shape."""


@dataclass(frozen=True)
class Flexible:
    """The shapes that the dynamic inputs of a function may have."""

    default: dict[str, tuple[int, ...]]
    """The default shapes; empty where the model does not say."""
    listed: tuple[dict[str, tuple[int, ...]], ...] = ()
    """Every enumerated combination of shapes, the default first; empty for a range."""
    maybe_empty: tuple[str, ...] = ()
    """The inputs with a range that starts at length 0."""


@dataclass(frozen=True)
class AtShape:
    """Where the ops run at one enumerated shape."""

    shape: str
    """The shapes in words: "x 1x3x256x256"."""
    counts: dict[str, int]
    """Preferred unit, or "unknown" -> number of ops."""

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {unit}" for unit, count in self.counts.items())
        return f"at {self.shape}: {counts}"


def flexible_shapes(function: Function, description: Any = None) -> Flexible | None:
    """Return the shapes of a function with dynamic inputs; None if all inputs are fixed.

    Args:
        function: a MIL function; one that was just converted has its shapes in `input_types`.
        description: its `FunctionDescription` or `ModelDescription`, if it was loaded from a file.
    """
    dynamic = dynamic_inputs(function)
    if not dynamic:
        return None
    inputs = (*_shapes_in_description(description), *_shapes_of_conversion(function))
    declared = [one for one in inputs if one[0] in dynamic and _is_complete(one, dynamic[one[0]])]
    default = {name: shape for name, shape, _ in declared}
    empty = tuple({*_empty_in_description(description), *_empty_in_conversion(function)} & dynamic.keys())
    if default.keys() != dynamic.keys():
        return Flexible({}, maybe_empty=empty)
    enumerated = {name: shapes for name, _, shapes in declared}
    count = min(map(len, enumerated.values()))
    listed = tuple({n: shapes[i] for n, shapes in enumerated.items()} for i in range(count))
    return Flexible(default, tuple(sorted(listed, key=lambda s: s != default)), empty)


DeclaredInput = tuple[str, tuple[int, ...], list[tuple[int, ...]]]
"""(name of an input, its default shape, its enumerated shapes)."""


def _is_complete(declared: DeclaredInput, var: Var) -> bool:
    """Has a default shape a positive length for each axis?"""
    return len(declared[1]) == len(var.shape) and all(declared[1])


def _shapes_in_description(description: Any) -> Iterator[DeclaredInput]:
    for feature in getattr(description, "input", ()):
        array, image = feature.type.multiArrayType, feature.type.imageType
        if feature.type.WhichOneof("Type") == "multiArrayType":
            yield feature.name, _ints(array.shape), [_ints(s.shape) for s in array.enumeratedShapes.shapes]
        elif feature.type.WhichOneof("Type") == "imageType":
            channels = 1 if "GRAYSCALE" in type(image).ColorSpace.Name(image.colorSpace) else 3
            sizes = [_ints((1, channels, s.height, s.width)) for s in image.enumeratedSizes.sizes]
            yield feature.name, _ints((1, channels, image.height, image.width)), sizes


def _shapes_of_conversion(function: Function) -> Iterator[DeclaredInput]:
    for declared in getattr(function, "input_types", None) or ():
        shape = declared.shape
        listed = [_ints(s.shape) for s in getattr(shape, "shapes", ())]
        default = getattr(shape, "default", None)
        yield str(declared.name), _ints(default or ()), listed


def _empty_in_description(description: Any) -> Iterator[str]:
    for feature in getattr(description, "input", ()):
        if any(r.lowerBound == 0 for r in feature.type.multiArrayType.shapeRange.sizeRanges):
            yield feature.name


def _empty_in_conversion(function: Function) -> Iterator[str]:
    for declared in getattr(function, "input_types", None) or ():
        if any(getattr(n, "lower_bound", 1) == 0 for n in getattr(declared.shape, "shape", ())):
            yield str(declared.name)


def _ints(lengths: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in lengths)


def description_of(description: Any, function: str | None) -> Any:
    """Return the description of one function of a model; None without a description."""
    if description is None:
        return None
    functions = {f.name: f for f in description.functions}
    return functions.get(function or description.defaultFunctionName) or description


def function_at(program: Program, name: str, shapes: Shapes) -> Function | None:
    """Return a copy of a function at fixed input shapes; None if its ops do not accept these shapes.

    The ops and their order are the same, and the constants are shared. The shapes of all results are inferred
    again.
    """
    if not dynamic_inputs(program.functions[name]).keys() <= shapes.keys():
        return None
    single = Program()
    single.add_function(name, program.functions[name])
    copied = copy_program(single).functions[name]
    function: Function | None = copied
    try:
        FixedShapes(shapes, length=1).fix(copied)
    except PassError:  # a loop may be typed wrongly; reading it again corrects that, and takes 5 times as long
        function = _function_read_at(program, name, shapes)
    fits = function is not None and all(static_shape(v) is not None for v in function.inputs.values())
    return function if fits else None


def _function_read_at(program: Program, name: str, shapes: Shapes) -> Function | None:
    """Return a function that is read again with fixed input shapes; None if its ops do not accept them."""

    def fix(spec: Any) -> None:
        for port in spec.inputs:
            for axis, length in enumerate(shapes.get(port.name, ())):
                port.type.tensorType.dimensions[axis].constant.size = length

    return _read_again(program, name, fix)


def function_at_all_places(program: Program, name: str) -> Function | None:
    """Return a copy of a function in which every mask whose places are listed is true everywhere.

    So all shapes that depend on these masks are the largest that they can be.

    Returns:
        None for a function that lists no places, or those of more than `MOST_PLACES` elements.
    """
    listings = [op for op in walk_ops(program.functions[name]) if op.op_type == "non_zero"]
    masks = {op.outputs[0].name: static_shape(op.x) for op in listings}
    if not masks or any(shape is None or math.prod(shape) > MOST_PLACES for shape in masks.values()):
        return None

    def fill(spec: Any) -> None:
        blocks = list(spec.block_specializations.values())
        while blocks:
            for op in blocks.pop().operations:
                blocks += op.blocks
                if op.type == "non_zero":
                    full = np.ones(masks[op.outputs[0].name] or (), bool)
                    op.inputs["x"].arguments[0].value.CopyFrom(protobuf.bools_value(full))

    return _read_again(program, name, fill)


def _read_again(program: Program, name: str, edit: Callable[[Any], None]) -> Function | None:
    """Return a function that is read again from its edited protobuf; None if its ops do not accept the edit."""
    single = Program()
    single.add_function(name, program.functions[name])
    weights, version = protobuf.InMemoryWeights(), protobuf.version_of(single)
    spec = protobuf.to_proto(single, version, weights.store)
    edit(spec.functions[name])
    try:
        return protobuf.from_proto(spec, version, weights.read).functions[name]
    except LoadError:
        return None


def in_words(shapes: Shapes) -> str:
    """Return shapes as text: "x 1x3x256x256, y 1x8"."""
    return ", ".join(f"{name} {shape_in_words(shape)}" for name, shape in shapes.items())


def fix_command(shapes: Flexible | None, model: str) -> str:
    """Return the command that fixes the shapes of a model with a range of them; "" for other models."""
    if shapes is None or shapes.listed:
        return ""
    sizes = json.dumps({name: list(shape) for name, shape in shapes.default.items()})
    setting = f" --set {shlex.quote(f'shapes={sizes}')}" if shapes.default else ""
    return f"anesurgery fix {shlex.quote(model)} fix_shapes fixed.mlpackage{setting}"
