"""How inputs between two sizes are filled up, and outputs cropped, where that is proved to change nothing."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice, product

import numpy as np
import torch

from anesurgery.errors import PassError, Refusal
from anesurgery.facts.length_padding import rows_kept
from anesurgery.facts.ops_between import slice_back
from anesurgery.facts.padded_windows import stride_along
from anesurgery.files.joining import default_function
from anesurgery.files.package import Loaded
from anesurgery.files.size_index import Padding
from anesurgery.interpret.core import Evaluator
from anesurgery.mil import (
    Function,
    Var,
    constant,
    function_of,
    is_symbolic,
    np_dtype,
    static_shape,
    types,
    walk_ops,
)
from anesurgery.rewriting.fixed_shapes import Shapes, barred
from anesurgery.rewriting.inference import widen_choices
from anesurgery.rewriting.ml_program import MLProgram

HIDING = -1e4
"""What a mask that is added is filled up with: it hides in fp16, twice too."""
TRIED = 81
"""Ways to fill up: three numbers for four inputs."""

MOST_ELEMENTS = 10**9
"""Elements computed to see whether a value is the same at every length: some seconds."""

FEW = 8
"""A constant of at most so many whole numbers may hold lengths of axes: shapes, ends of slices."""

InputShapes = Mapping[str, tuple[int, ...]]


def free_length(function: Function, shapes: Iterable[int], least: int = 11) -> int:
    """The least prime from a number on (11 or more) that divides no length of a function, and is not in it."""
    lengths = {n for n in shapes if n}
    for value in (v for op in walk_ops(function) for v in op.outputs if types.is_tensor(v.sym_type)):
        lengths.update(int(n) for n in value.shape or () if not is_symbolic(n) and n)
        if np_dtype(value).kind == "i" and (held := constant(value)) is not None and np.size(held) <= FEW:
            lengths.update(int(n) for n in np.ravel(held) if n)
    length = max(least, 11)
    while any(length % d == 0 for d in range(2, length)) or any(n % length == 0 for n in lengths):
        length += 1
    return length


def padding_between(loaded: Loaded, wanted: Sequence[InputShapes]) -> Padding:
    """How inputs between two sizes are run: each input that varies, along its one axis, all of one length.

    Args:
        loaded: a model of dynamic shapes.
        wanted: the shapes of each size, in rising order.
    """
    axes = varying(wanted)
    if isinstance(axes, str):
        return Padding({}, {}, axes)
    name, largest = default_function(loaded), wanted[-1]
    function = function_of(loaded.program, name)
    least, most = (size[next(iter(axes))][next(iter(axes.values()))] for size in (wanted[0], largest))
    length = free_length(function, [n for shape in largest.values() for n in shape], least)
    padding = Padding({}, {})
    for multiple in [n for n in sorted({1, steps_along(function)}) if n <= most]:
        probe = {
            key: tuple(length * multiple if axes.get(key) == a else n for a, n in enumerate(shape))
            for key, shape in largest.items()
        }
        try:
            followed, whole = (unfolded(loaded, name, shapes) for shapes in (probe, largest))
        except PassError as error:
            padding = Padding({}, {}, str(error))
            continue
        padding = _proved(function, followed, whole, largest, axes, length, multiple)
        if not padding.why_not:
            break
    return padding


def steps_along(function: Function) -> int:
    """The product of what convolutions move by along axes of dynamic length."""
    convs = [op for op in function.operations if op.op_type == "conv"]
    steps = [stride_along(op, a) for op in convs for a in range(2, op.x.rank) if is_symbolic(op.x.shape[a])]
    return math.prod(steps)


def _proved(
    function: Function,
    followed: Function,
    whole: Function,
    largest: InputShapes,
    axes: Mapping[str, int],
    length: int,
    multiple: int,
) -> Padding:
    """How inputs whose lengths are multiples of a number are filled up; else why not."""
    reasons = list[Refusal]()
    for fill in _fillings(function, axes):
        kept = rows_kept(followed, whole, axes, length, fill, multiple)
        if not isinstance(kept, Refusal):
            other = _other_at_a_length(function, largest, axes, kept.claims, multiple)
            proved = Padding(axes, kept.crops, "", fill, kept.hiding, kept.spread, kept.shares, multiple)
            return Padding({}, {}, other) if other else proved
        reasons.append(kept)
    return Padding({}, {}, str(reasons[0]))


def _other_at_a_length(
    function: Function, largest: InputShapes, axes: Mapping[str, int], claims: Collection[str], multiple: int
) -> str:
    """Which of some values is at some length not the first places of that at the largest; "" where none is.

    They depend on the length alone. Each is computed at every length: of how it is made nothing is known.
    """
    wanted = [v for op in function.operations for v in op.outputs if v.name in claims]
    if not claims:
        return ""
    if lost := set(claims) - {v.name for v in wanted}:
        return f"{min(lost)} is computed from the length, and cannot be computed at each"
    shapes = {name: largest.get(name, static_shape(var)) for name, var in function.inputs.items()}
    if None in shapes.values():
        return f"{wanted[0].name} is computed from the length, and an input has no size that is known"
    evaluate = Evaluator(slice_back(wanted, set(function.inputs.values())), wanted)

    def at(length: int) -> list[torch.Tensor]:
        given = dict[Var, torch.Tensor]()
        for name, var in function.inputs.items():
            sizes = [length if axes.get(name) == a else n for a, n in enumerate(shapes[name] or ())]
            given[var] = torch.zeros(sizes)
        return evaluate(given)

    most = next(largest[name][axis] for name, axis in axes.items())
    whole = at(most)
    if most * sum(value.numel() for value in whole) > MOST_ELEMENTS:
        return (
            f"{wanted[0].name} is computed from the length, and is too large to be looked at for every length"
        )
    for length in range(multiple, most, multiple):
        for var, value, last in zip(wanted, at(length), whole, strict=True):
            if not torch.equal(value, last[tuple(slice(n) for n in value.shape)]):
                return f"{var.name} is computed from the length, and is another at {length} than at {most}"
    return ""


def varying(wanted: Sequence[InputShapes]) -> dict[str, int] | str:
    """Input -> its axis that differs between sizes; or why they cannot be filled up."""
    axes = dict[str, int]()
    for name, shape in wanted[0].items():
        others = [size[name] for size in wanted]
        differing = [a for a in range(len(shape)) if len({other[a] for other in others}) > 1]
        if len(differing) > 1:
            return f"{name} differs in several axes"
        if differing:
            axes[name] = differing[0]
    if not axes or any(len({size[name][axis] for name, axis in axes.items()}) > 1 for size in wanted):
        return "the sizes do not differ by one length"
    return axes


def unfolded(loaded: Loaded, name: str | None, shapes: InputShapes) -> Function:
    """The function at some shapes, whose arithmetic of shapes is still there.

    Raises:
        PassError: an op cannot have that size.
    """
    function = function_of(MLProgram(loaded).clone().program, name)
    if (refusal := barred(function, frozenset())) is not None:
        raise PassError(str(refusal))
    Shapes(shapes, 1).fix(function)
    widen_choices(function)
    return function


def _fillings(function: Function, axes: Mapping[str, int]) -> Iterator[dict[str, float]]:
    """What inputs may be filled up with: zeros first, then what masks hide with."""
    numbers = [
        (0.0, 1.0, HIDING) if np_dtype(function.inputs[name]).kind == "f" else (0.0, 1.0) for name in axes
    ]
    for one in islice(product(*numbers), TRIED):
        yield dict(zip(axes, one, strict=True))
