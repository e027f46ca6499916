"""How inputs between two sizes are filled up, and outputs cropped, where that is proved to change nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import numpy as np
import torch

from anesurgery.errors import PassError, Refusal, SurgeryError
from anesurgery.facts.dependence import slice_back
from anesurgery.facts.length_padding import rows_kept
from anesurgery.facts.padded_windows import stride_along
from anesurgery.files.joining import default_function
from anesurgery.files.package import Loaded
from anesurgery.files.size_index import Padding, axes_in_words
from anesurgery.interpret.core import Evaluator
from anesurgery.mil import (
    Function,
    Var,
    constant,
    function_of,
    is_symbolic,
    np_dtype,
    reads,
    static_shape,
    types,
    walk_ops,
)
from anesurgery.rewriting.fixed_shapes import Shapes, barred
from anesurgery.rewriting.graph_edits import widen_choices
from anesurgery.rewriting.ml_program import MLProgram

HIDING = -1e4
"""What a mask that is added is filled up with: it hides in fp16, twice too."""
TRIED = 81
"""Ways to fill up: three numbers for four inputs."""

MOST_ELEMENTS = 10**9
"""Elements computed to see whether a value is the same at every length: some seconds."""

MOST_RUNS = 20_000
"""Pairs of two lengths at which a value is computed for the same reason; some seconds."""

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


@dataclass(frozen=True)
class Length:
    """A length by which sizes differ.

    Attributes:
        axes: input -> its axis that is so long.
        least: the shortest of the sizes.
        most: the longest.
    """

    axes: Mapping[str, int]
    least: int
    most: int


@dataclass(frozen=True)
class _Question:
    """Whether inputs may be filled up along one length, whatever the others are.

    Attributes:
        loaded: a model of dynamic shapes.
        one: the length that is filled up.
        others: those that stay as they are.
        largest: the shapes at which all lengths are longest.
    """

    loaded: Loaded
    one: Length
    others: Sequence[Length]
    largest: InputShapes

    @property
    def name(self) -> str | None:
        """The function that the model runs."""
        return default_function(self.loaded)

    @property
    def function(self) -> Function:
        """It has dynamic shapes."""
        return function_of(self.loaded.program, self.name)

    def at(self, shapes: InputShapes, length: Length, places: int) -> dict[str, tuple[int, ...]]:
        """Shapes with another number of places along one length."""
        return {
            key: tuple(places if length.axes.get(key) == a else n for a, n in enumerate(shape))
            for key, shape in shapes.items()
        }


def padding_between(loaded: Loaded, wanted: Sequence[InputShapes]) -> Padding:
    """How inputs between two sizes are run: each that varies is filled up along one length after the other.

    That a model at all lengths filled up gives what it gives at those of the inputs follows length by length:
    filled up along one, it gives the same whatever the others are.

    Args:
        loaded: a model of dynamic shapes.
        wanted: the shapes of each size, in rising order.
    """
    try:
        lengths = lengths_of(loaded, wanted)
    except SurgeryError as error:
        return Padding({}, {}, str(error))
    if not lengths:
        return Padding({}, {}, "the sizes do not differ by a length")
    each = [along(loaded, wanted, one) for one in lengths]
    if len(each) == 1:
        return each[0]
    reasons = [
        f"{axes_in_words(one.axes)}: {padding.why_not}"
        for one, padding in zip(lengths, each, strict=True)
        if padding.why_not
    ]
    proved = [padding for padding in each if not padding.why_not]
    if not proved:
        return Padding({}, {}, "; ".join(reasons))
    return replace(proved[0], more=tuple(proved[1:]), others="; ".join(reasons))


def lengths_of(loaded: Loaded, wanted: Sequence[InputShapes]) -> list[Length]:
    """The lengths by which sizes differ, of a model of dynamic shapes.

    Axes are of one length where they are equal at each size, but for those of one input.

    Raises:
        SurgeryError: an input has one length along several axes, of which none can be filled up by itself.
    """
    inputs = function_of(loaded.program, default_function(loaded)).inputs
    groups = list[tuple[tuple[int, ...], dict[str, int], set[Any]]]()
    for name, shape in wanted[0].items():
        for axis in range(len(shape)):
            column, symbol = tuple(size[name][axis] for size in wanted), inputs[name].shape[axis]
            if len(set(column)) == 1:
                continue
            alike = [group for group in groups if group[0] == column]
            same = [group for group in alike if symbol in group[2]] or [g for g in alike if name not in g[1]]
            if not same:
                groups.append((column, {name: axis}, {symbol}))
            elif name in same[0][1]:
                raise SurgeryError(
                    f"{name} has one length along several axes, and can be filled up along none of them; give "
                    "sizes at which these axes differ"
                )
            else:
                same[0][1][name] = axis
                same[0][2].add(symbol)
    return [Length(axes, min(column), max(column)) for column, axes, _ in groups]


def longest(wanted: Sequence[InputShapes]) -> dict[str, tuple[int, ...]]:
    """The shapes at which all lengths are the longest of all sizes."""
    return {name: tuple(map(max, zip(*(s[name] for s in wanted), strict=True))) for name in wanted[0]}


def along(loaded: Loaded, wanted: Sequence[InputShapes], one: Length) -> Padding:
    """How inputs are filled up along one of the lengths (`lengths_of`), or why not."""
    others = [other for other in lengths_of(loaded, wanted) if other != one]
    question = _Question(loaded, one, others, longest(wanted))
    shapes, function = question.largest, question.function
    fixed = [n for shape in shapes.values() for n in shape]
    elsewhere = shapes
    for other in question.others:  # at a length that no axis has, of which all windows make whole parts
        prime = free_length(function, fixed)
        fixed.append(prime)
        elsewhere = question.at(elsewhere, other, prime * steps_along(function))
    length = free_length(function, fixed, one.least)
    padding = Padding({}, {})
    try:
        steps = _steps(question)
    except PassError as error:
        return Padding({}, {}, str(error))
    for multiple in [n for n in sorted({1, steps}) if n <= one.most]:
        padding = _proved(question, shapes, length, multiple)
        if question.others and not padding.why_not:
            padding = _proved(question, elsewhere, length, multiple, padding)
        if not padding.why_not:
            break
    return padding


def _steps(question: _Question) -> int:
    """The product of what convolutions move by along one length.

    Raises:
        PassError: an op cannot have the lengths at which this is seen.
    """
    function, one = question.function, question.one
    if not question.others:
        return steps_along(function)
    shapes = (question.at(question.largest, one, places) for places in (one.least, one.most))
    shorter, longer = (
        {v.name: v.shape for op in walk_ops(f) for v in reads(op)}
        for f in (unfolded(question.loaded, question.name, at) for at in shapes)
    )
    return steps_along(function, lambda x, a: shorter[x.name][a] != longer[x.name][a])


def steps_along(function: Function, differs: Callable[[Var, int], bool] = lambda x, a: True) -> int:
    """The product of what convolutions move by along axes of dynamic length, or those of them that differ."""
    convs = [op for op in function.operations if op.op_type == "conv"]
    steps = [
        stride_along(op, a)
        for op in convs
        for a in range(2, op.x.rank)
        if is_symbolic(op.x.shape[a]) and differs(op.x, a)
    ]
    return math.prod(steps)


def _proved(
    question: _Question, shapes: InputShapes, length: int, multiple: int, before: Padding | None = None
) -> Padding:
    """How inputs whose lengths are multiples of a number are filled up; else why not.

    Args:
        question: the model, and its lengths.
        shapes: of the inputs, at which the length is longest.
        length: the prime at which the function is followed.
        multiple: of which lengths are multiples.
        before: what was shown where the other lengths are not the same, and is to be shown here.
    """
    one, function, reasons = question.one, question.function, list[Refusal]()
    try:
        followed, whole = (
            unfolded(question.loaded, question.name, question.at(shapes, one, places))
            for places in (length * multiple, one.most)
        )
    except PassError as error:
        return Padding({}, {}, str(error))
    for fill in [before.fill] if before else _fillings(function, one.axes):
        kept = rows_kept(followed, whole, one.axes, length, fill, multiple)
        if not isinstance(kept, Refusal):
            other = _other_at_a_length(question, kept.claims, multiple)
            proved = Padding(one.axes, kept.crops, "", fill, kept.hiding, kept.spread, kept.shares, multiple)
            if before and replace(proved, spread=before.spread) != before:
                other = "what hides what is filled up is not the same at each of the other lengths"
            return Padding({}, {}, other) if other else proved
        reasons.append(kept)
    return Padding({}, {}, str(reasons[0]))


def _other_at_a_length(question: _Question, claims: Collection[str], multiple: int) -> str:
    """Which of some values is at some lengths not the first places of that at the largest; "" where none is.

    They depend on the lengths alone. Each is computed at all of them: of how it is made nothing is known.
    """
    function, largest = question.function, question.largest
    wanted = [v for op in function.operations for v in op.outputs if v.name in claims]
    if not claims:
        return ""
    if lost := set(claims) - {v.name for v in wanted}:
        return f"{min(lost)} is computed from the length, and cannot be computed at each"
    shapes = {name: largest.get(name, static_shape(var)) for name, var in function.inputs.items()}
    if None in shapes.values():
        return f"{wanted[0].name} is computed from the length, and an input has no size that is known"
    known = {name: shape for name, shape in shapes.items() if shape is not None}
    evaluate = Evaluator(slice_back(wanted, set(function.inputs.values())), wanted)

    def at(lengths: Sequence[int]) -> list[torch.Tensor]:
        here: InputShapes = known
        for length, places in zip((question.one, *question.others), lengths, strict=True):
            here = question.at(here, length, places)
        return evaluate({var: torch.zeros(here[name]) for name, var in function.inputs.items()})

    every = [range(multiple, question.one.most + 1, multiple), *(range(1, o.most + 1) for o in question.others)]
    most = [question.one.most, *(other.most for other in question.others)]
    whole, count = at(most), math.prod(map(len, every))
    if count * sum(value.numel() for value in whole) > MOST_ELEMENTS or (len(most) > 1 and count > MOST_RUNS):
        return (
            f"{wanted[0].name} is computed from the length, and is too large to be looked at for every length"
        )
    for lengths in product(*every):
        for var, value, last in zip(wanted, at(lengths), whole, strict=True):
            if not torch.equal(value, last[tuple(slice(n) for n in value.shape)]):
                here, there = ("x".join(map(str, n)) for n in (lengths, most))
                return f"{var.name} is computed from the length, and is another at {here} than at {there}"
    return ""


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
