"""Decide how inputs between two sizes are padded and outputs cropped, where this provably changes nothing.

`sizes` calls `padding_between`. A model at lengths 64 and 128 gets an input of 100: it is padded to 128, and
the outputs are cropped to 100. That is right only if what is padded does not reach the first 100 rows of any
output. `padded_rows` proves this for one length that stands for all; here the lengths, fill values and
multiples are chosen that it is asked about, and values that depend on the length alone are computed at every
length.
"""

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
from anesurgery.facts.windows import stride_along
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
from anesurgery.shipping.padded_rows import prove_padding

HIDING = -1e4
"""Fill value of an additive mask: it hides in fp16, and does not overflow when two masks are added."""
TRIED = 81
"""The most combinations of fill values that are tried: three values for four inputs."""

MOST_ELEMENTS = 10**9
"""The most elements computed to check that a value is the same at every length: some seconds."""

MOST_RUNS = 20_000
"""The most pairs of lengths at which a value is computed for that check: some seconds."""

FEW = 8
"""Integer constants of at most this size may hold lengths of axes: shapes, ends of slices."""

InputShapes = Mapping[str, tuple[int, ...]]


def free_length(function: Function, shapes: Iterable[int], least: int = 11) -> int:
    """Return the least prime, from `least` up, that divides no axis or shape constant of a function."""
    lengths = {n for n in shapes if n}
    for value in (v for op in walk_ops(function) for v in op.outputs if types.is_tensor(v.sym_type)):
        lengths.update(int(n) for n in value.shape or () if not is_symbolic(n) and n)
        if (
            np_dtype(value).kind == "i"
            and (value_of_constant := constant(value)) is not None
            and np.size(value_of_constant) <= FEW
        ):
            lengths.update(int(n) for n in np.ravel(value_of_constant) if n)
    length = max(least, 11)  # smaller primes divide too many usual sizes
    while any(length % d == 0 for d in range(2, length)) or any(n % length == 0 for n in lengths):
        length += 1
    return length


@dataclass(frozen=True)
class Length:
    """A length by which the sizes differ.

    Attributes:
        axes: input -> its axis of this length.
        least: the shortest length among the sizes.
        most: the longest.
    """

    axes: Mapping[str, int]
    least: int
    most: int


@dataclass(frozen=True)
class _Question:
    """The question whether inputs may be padded along one length, whatever the other lengths are.

    Attributes:
        loaded: a model of dynamic shapes.
        one: the length along which inputs are padded.
        others: the lengths that stay as they are.
        largest: input -> its shape where all lengths are longest.
    """

    loaded: Loaded
    one: Length
    others: Sequence[Length]
    largest: InputShapes

    @property
    def name(self) -> str | None:
        """The name of the function that the model runs."""
        return default_function(self.loaded)

    @property
    def function(self) -> Function:
        """That function, with dynamic shapes."""
        return function_of(self.loaded.program, self.name)

    def shapes_at(self, shapes: InputShapes, length: Length, size: int) -> dict[str, tuple[int, ...]]:
        """Return `shapes` with another size along one length."""
        return {
            key: tuple(size if length.axes.get(key) == a else n for a, n in enumerate(shape))
            for key, shape in shapes.items()
        }


def padding_between(loaded: Loaded, wanted: Sequence[InputShapes]) -> Padding:
    """Return how inputs between two sizes are padded, for each length by which the sizes differ.

    Each length is proved by itself: padded along it, the model gives the same whatever the other lengths are.
    So the lengths may be padded one after the other.

    Args:
        loaded: a model of dynamic shapes.
        wanted: for each size, input -> its shape; in rising order.
    """
    try:
        lengths = lengths_of(loaded, wanted)
    except SurgeryError as error:
        return Padding({}, {}, str(error))
    if not lengths:
        return Padding({}, {}, "the sizes do not differ by a length")
    each = [padding_along(loaded, wanted, one) for one in lengths]
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
    """Return the lengths by which the sizes of a dynamic model differ.

    Axes of different inputs share a length where they are equal at each size, or have the same symbol.

    Raises:
        SurgeryError: one input has the same length along several axes, so that none can be padded by itself.
    """
    inputs = function_of(loaded.program, default_function(loaded)).inputs
    groups = list[tuple[tuple[int, ...], dict[str, int], set[Any]]]()
    for name, shape in wanted[0].items():
        for axis in range(len(shape)):
            column, symbol = tuple(size[name][axis] for size in wanted), inputs[name].shape[axis]
            if len(set(column)) == 1:
                continue
            equal_columns = [group for group in groups if group[0] == column]
            same = [group for group in equal_columns if symbol in group[2]] or [
                g for g in equal_columns if name not in g[1]
            ]
            if not same:
                groups.append((column, {name: axis}, {symbol}))
            elif name in same[0][1]:
                raise SurgeryError(
                    f"{name} has one length along several axes, and cannot be padded along any of them; give "
                    "sizes at which these axes differ"
                )
            else:
                same[0][1][name] = axis
                same[0][2].add(symbol)
    return [Length(axes, min(column), max(column)) for column, axes, _ in groups]


def largest_shapes(wanted: Sequence[InputShapes]) -> dict[str, tuple[int, ...]]:
    """Return the shapes at which every length is the longest among the sizes."""
    return {name: tuple(map(max, zip(*(s[name] for s in wanted), strict=True))) for name in wanted[0]}


def padding_along(loaded: Loaded, wanted: Sequence[InputShapes], one: Length) -> Padding:
    """Return how inputs are padded along one of the lengths, or why they may not be."""
    others = [other for other in lengths_of(loaded, wanted) if other != one]
    question = _Question(loaded, one, others, largest_shapes(wanted))
    shapes, function = question.largest, question.function
    fixed = [n for shape in shapes.values() for n in shape]
    elsewhere = shapes
    for other in question.others:  # a length that no axis has, and that all strides divide
        prime = free_length(function, fixed)
        fixed.append(prime)
        elsewhere = question.shapes_at(elsewhere, other, prime * total_stride(function))
    length = free_length(function, fixed, one.least)
    padding = Padding({}, {})
    try:
        steps = _total_stride(question)
    except PassError as error:
        return Padding({}, {}, str(error))
    for multiple in [n for n in sorted({1, steps}) if n <= one.most]:
        padding = _proved_padding(question, shapes, length, multiple)
        if question.others and not padding.why_not:
            padding = _proved_padding(question, elsewhere, length, multiple, padding)
        if not padding.why_not:
            break
    return padding


def _total_stride(question: _Question) -> int:
    """Return the product of the strides of convolutions along one length.

    Raises:
        PassError: an op cannot have the least or the largest length.
    """
    function, one = question.function, question.one
    if not question.others:
        return total_stride(function)
    shapes = (question.shapes_at(question.largest, one, places) for places in (one.least, one.most))
    shorter, longer = (
        {v.name: v.shape for op in walk_ops(f) for v in reads(op)}
        for f in (unfolded(question.loaded, question.name, at) for at in shapes)
    )
    return total_stride(function, lambda x, a: shorter[x.name][a] != longer[x.name][a])


def total_stride(function: Function, differs: Callable[[Var, int], bool] = lambda x, a: True) -> int:
    """Return the product of the strides of convolutions along the dynamic axes that differ."""
    convs = [op for op in function.operations if op.op_type == "conv"]
    steps = [
        stride_along(op, a)
        for op in convs
        for a in range(2, op.x.rank)
        if is_symbolic(op.x.shape[a]) and differs(op.x, a)
    ]
    return math.prod(steps)


def _proved_padding(
    question: _Question, shapes: InputShapes, length: int, multiple: int, before: Padding | None = None
) -> Padding:
    """Return how inputs whose length is a multiple of `multiple` are padded; or why they may not be.

    Args:
        question: the model and its lengths.
        shapes: input shapes at which the length is longest.
        length: the prime at which the function is followed.
        multiple: lengths are multiples of this number.
        before: the padding that was proved at other values of the other lengths, which must be confirmed here.
    """
    one, function, reasons = question.one, question.function, list[Refusal]()
    try:
        followed, whole = (
            unfolded(question.loaded, question.name, question.shapes_at(shapes, one, places))
            for places in (length * multiple, one.most)
        )
    except PassError as error:
        return Padding({}, {}, str(error))
    for fill in [before.fill] if before else _fill_values(function, one.axes):
        kept = prove_padding(followed, whole, one.axes, length, fill, multiple)
        if not isinstance(kept, Refusal):
            other = _change_with_length(question, kept.claims, multiple)
            proved = Padding(one.axes, kept.crops, "", fill, kept.hiding, kept.spread, kept.shares, multiple)
            if before and replace(proved, spread=before.spread) != before:
                other = "what hides what is filled up is not the same at each of the other lengths"
            return Padding({}, {}, other) if other else proved
        reasons.append(kept)
    return Padding({}, {}, str(reasons[0]))


def _change_with_length(question: _Question, claims: Collection[str], multiple: int) -> str:
    """Name a value that differs between lengths other than by its size; "" where none does.

    The values depend on lengths alone, by unknown computations, so each is computed at every length and
    compared with the beginning of its value at the largest length.
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
            here = question.shapes_at(here, length, places)
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
    """Return the function at fixed shapes, before the arithmetic on shapes is folded.

    Raises:
        PassError: an op cannot have these shapes.
    """
    function = function_of(MLProgram(loaded).clone().program, name)
    if (refusal := barred(function, frozenset())) is not None:
        raise PassError(str(refusal))
    Shapes(shapes, 1).fix(function)
    widen_choices(function)
    return function


def _fill_values(function: Function, axes: Mapping[str, int]) -> Iterator[dict[str, float]]:
    """Yield input -> fill value: zeros first, then the values with which masks hide."""
    numbers = [
        (0.0, 1.0, HIDING) if np_dtype(function.inputs[name]).kind == "f" else (0.0, 1.0) for name in axes
    ]
    for one in islice(product(*numbers), TRIED):
        yield dict(zip(axes, one, strict=True))
