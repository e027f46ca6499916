"""Decide how inputs between two sizes are padded and outputs cropped, where this provably changes nothing.

`sizes` calls `padding_between`. A model at lengths 64 and 128 gets an input of 100: it is padded to 128, and
the outputs are cropped to 100. That is right only if what is padded does not reach the first 100 rows of any
output. `padded_rows` proves this for one length that stands for all; here the lengths, fill values and
multiples are chosen that it is asked about, and values that depend on the length alone are computed at every
length.

A model without a mask may be given one (`sizes(mask=...)`, the first half of the file). The new input has
shape (1, length) and dtype fp32: 1 at real positions, 0 at padding. It is subtracted from the scores of every
softmax over the length, and multiplied with the input of every convolution whose window goes along the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any, NamedTuple

import numpy as np
import torch

from anesurgery.errors import PassError, Refusal, SurgeryError
from anesurgery.facts.dependence import slice_back
from anesurgery.files.joining import default_function
from anesurgery.files.package import Loaded
from anesurgery.files.size_index import Padding, axes_in_words
from anesurgery.interpret.core import Evaluator
from anesurgery.mil import (
    Function,
    Operation,
    Var,
    add_input,
    constant,
    dtype_name,
    function_of,
    is_symbolic,
    mb,
    np_dtype,
    replace_uses,
    static_shape,
    types,
    walk_ops,
)
from anesurgery.rewriting.ml_program import MLProgram
from anesurgery.semantics.inference import FixedShapes, barred, widen_choices
from anesurgery.shipping.padded_ends import stride_along, unpadded
from anesurgery.shipping.padded_rows import prove_padding

_InputShapes = Mapping[str, tuple[int, ...]]
"""Input -> its shape."""
MASK_BIAS = 1e4
"""What is subtracted from hidden scores: the sum of two such masks is still finite in fp16."""


def with_mask(loaded: Loaded, mask: str, axes: Mapping[str, int], largest: _InputShapes) -> Loaded:
    """Return a copy of a model with a mask input.

    Downstream of a convolution with stride 2, every second position of the mask is used.

    Args:
        loaded: a model of dynamic shapes.
        mask: the name of the new input.
        axes: input -> its axis that is as long as the mask.
        largest: the shapes of the inputs at the largest size.

    Raises:
        PassError: an op cannot have other lengths.
        SurgeryError: the name is taken, there is nothing to hide, attention is fused, or a softmax is over
            another axis, or over an axis that is no part of the length.
    """
    source, axis = next(iter(axes.items()))
    copied = MLProgram(loaded).clone().loaded
    function = function_of(copied.program, default_function(copied))
    if mask in function.inputs:
        raise SurgeryError(f"sizes: the model has an input {mask!r} already; give its shapes instead of mask=")
    length = function.inputs[source].shape[axis]
    if not is_symbolic(length):
        raise SurgeryError(f"sizes: axis {axis} of {source} is fixed, so that a mask has nothing to hide")
    two_lengths = _TwoLengths(loaded, function, axes, largest)
    softmaxes, windows = _softmaxes(function, two_lengths), _convs_along_length(function, two_lengths)
    if not softmaxes and not windows:
        raise SurgeryError(
            "sizes: no softmax goes over the length of the inputs, nor does a window of a convolution, so "
            "that a mask hides nothing"
        )
    masks = _Masks(function, add_input(function, mask, (1, length), types.fp32))
    with function:
        for op in softmaxes:
            _mask_scores(function, op, masks.bias(two_lengths.stride(op.x, op.x.rank - 1)))
        for op, along in windows:
            _mask_input(function, op, along, masks.of(two_lengths.stride(unpadded(op), along)))
    return copied


class _TwoLengths:
    """The shapes of all values at two lengths of the inputs, to see which axes depend on the length.

    One is the largest length, the other a prime that no axis has, times the strides.

    Raises:
        PassError: an op cannot have one of these two lengths.
    """

    def __init__(
        self, loaded: Loaded, function: Function, axes: Mapping[str, int], largest: _InputShapes
    ) -> None:
        self.multiple = total_stride(function)
        self.length = self.multiple * _free_length(function, [n for shape in largest.values() for n in shape])
        probe = _shapes_at(largest, axes, self.length)
        self.probe_sizes, self.largest_sizes = (
            _shapes_by_name(_unfolded(loaded, shapes)) for shapes in (probe, largest)
        )

    def differs(self, var: Var, axis: int) -> bool:
        """Return whether an axis depends on the length of the inputs."""
        return bool(self.probe_sizes[var.name][axis] != self.largest_sizes[var.name][axis])

    def stride(self, var: Var, axis: int) -> int:
        """Return how many input positions one position along an axis stands for, downstream of strides.

        Raises:
            SurgeryError: the axis is no whole part of the length.
        """
        places = int(self.probe_sizes[var.name][axis])
        if self.length % places or self.multiple % (self.length // places):
            words = (
                f"{places} long where the inputs have {self.length} places, so that a mask has none for each"
            )
            raise SurgeryError(f"sizes: axis {axis} of %{var.name} is {words}")
        return self.length // places


def _shapes_at(shapes: _InputShapes, axes: Mapping[str, int], size: int) -> dict[str, tuple[int, ...]]:
    """Return `shapes` with another size along one axis of some inputs."""
    return {
        key: tuple(size if axes.get(key) == a else n for a, n in enumerate(shape))
        for key, shape in shapes.items()
    }


def _shapes_by_name(function: Function) -> dict[str, Sequence[int]]:
    """Return name -> shape, of all values of a function."""
    made = (v for op in walk_ops(function) for v in op.outputs if types.is_tensor(v.sym_type))
    return {v.name: v.shape for v in (*function.inputs.values(), *made)}


class _Masks:
    """The mask at each stride, and as a bias; each is built once, at the beginning of the function."""

    def __init__(self, function: Function, given: Var) -> None:
        self.first = next(op for op in function.operations if op.op_type != "const")
        self.given, self.ready = given, dict[tuple[str, int], Var]()

    def of(self, share: int) -> Var:
        """Return the mask at every `share`-th position."""
        if share == 1:
            return self.given
        if ("mask", share) not in self.ready:
            self.ready["mask", share] = mb.slice_by_index(
                x=self.given,
                begin=[0, 0],
                end=[0, 0],
                stride=[1, share],
                begin_mask=[True, True],
                end_mask=[True, True],
                before_op=self.first,
                name=f"{self.given.name}_each_{share}",
            )
        return self.ready["mask", share]

    def bias(self, share: int) -> Var:
        """Return 0 at real positions and a large negative number at hidden ones."""
        if ("bias", share) not in self.ready:
            mask = self.of(share)
            less = mb.sub(x=mask, y=np.float32(1), before_op=self.first, name=f"{mask.name}_hidden")
            self.ready["bias", share] = mb.mul(
                x=less, y=np.float32(MASK_BIAS), before_op=self.first, name=f"{mask.name}_bias"
            )
        return self.ready["bias", share]


def _softmaxes(function: Function, two_lengths: _TwoLengths) -> list[Operation]:
    """Return the softmax ops over the length.

    Raises:
        SurgeryError: a mask cannot be added to one of them.
    """
    found = list[Operation]()
    for op in walk_ops(function):
        fused = op.op_type == "scaled_dot_product_attention"
        if fused and two_lengths.differs(op.key, op.key.rank - 2):
            raise SurgeryError(
                f"sizes: {op.name} is fused attention, and cannot get a mask; convert for iOS 17, "
                "or with a mask"
            )
        if op.op_type == "softmax" and two_lengths.differs(op.x, constant(op.axis)):
            if constant(op.axis) not in (-1, op.x.rank - 1):
                raise SurgeryError(f"sizes: {op.name} is a softmax over axis {constant(op.axis)}, not the last")
            found.append(op)
    return found


def _convs_along_length(function: Function, two_lengths: _TwoLengths) -> list[tuple[Operation, int]]:
    """Return convolutions whose window goes along the length, each with that axis."""
    found = list[tuple[Operation, int]]()
    for op in (op for op in walk_ops(function) if op.op_type == "conv"):
        windows = [axis for axis in range(2, op.x.rank) if op.weight.shape[axis] != 1]
        axes = [axis for axis in windows if two_lengths.differs(unpadded(op), axis)]
        found += [(op, axes[0])] if len(axes) == 1 else []
    return found


def _mask_input(function: Function, op: Operation, axis: int, given: Var) -> None:
    """Multiply the input of a convolution by the mask, upstream of its padding."""
    x = unpadded(op)
    before = op if x is op.x else op.x.op
    new = [a for a in range(x.rank) if a not in (0, axis)]
    wide = mb.expand_dims(x=given, axes=new, before_op=before, name=f"{given.name}_{op.name}_mask")
    if dtype_name(x) != "fp32":
        wide = mb.cast(x=wide, dtype=dtype_name(x), before_op=before, name=f"{wide.name}_cast")
    kept = mb.mul(x=x, y=wide, before_op=before, name=f"{given.name}_{op.name}_masked")
    replace_uses(function, anchor_op=kept.op, end_op=before, old_var=x, new_var=kept)


def _mask_scores(function: Function, op: Operation, bias: Var) -> None:
    """Add the bias to the scores of one softmax."""
    scores, wide = op.x, bias
    if scores.rank > 2:
        new = list(range(1, scores.rank - 1))
        wide = mb.expand_dims(x=bias, axes=new, before_op=op, name=f"{op.name}_bias")
    if dtype_name(scores) != "fp32":
        wide = mb.cast(x=wide, dtype=dtype_name(scores), before_op=op, name=f"{op.name}_bias_cast")
    masked = mb.add(x=scores, y=wide, before_op=op, name=f"{op.name}_masked")
    replace_uses(function, anchor_op=masked.op, end_op=op, old_var=scores, new_var=masked)


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

LEAST_PRIME = 11
"""The least length at which a function is followed: smaller primes divide too many usual sizes."""


def _free_length(function: Function, shapes: Iterable[int], least: int = LEAST_PRIME) -> int:
    """Return the least prime, from `least` up, that divides no axis or shape constant of a function."""
    lengths = {n for n in shapes if n}
    for value in (v for op in walk_ops(function) for v in op.outputs if types.is_tensor(v.sym_type)):
        lengths.update(int(n) for n in value.shape or () if not is_symbolic(n) and n)
        numbers = constant(value) if np_dtype(value).kind == "i" else None
        if numbers is not None and np.size(numbers) <= FEW:
            lengths.update(int(n) for n in np.ravel(numbers) if n)
    length = max(least, LEAST_PRIME)
    while any(length % d == 0 for d in range(2, length)) or any(n % length == 0 for n in lengths):
        length += 1
    return length


@dataclass(frozen=True)
class Length:
    """A length by which the sizes differ."""

    axes: Mapping[str, int]
    """Input -> its axis of this length."""
    least: int
    """The shortest length among the sizes."""
    most: int
    """The longest."""


@dataclass(frozen=True)
class _Question:
    """The question whether inputs may be padded along one length, whatever the other lengths are."""

    loaded: Loaded
    """A model of dynamic shapes."""
    one: Length
    """The length along which inputs are padded."""
    others: Sequence[Length]
    """The lengths that stay as they are."""
    largest: _InputShapes
    """Input -> its shape where all lengths are longest."""

    @property
    def function(self) -> Function:
        """The function that the model runs, with dynamic shapes."""
        return function_of(self.loaded.program, default_function(self.loaded))

    def unfolded(self, shapes: _InputShapes, size: int) -> Function:
        """Return that function at fixed shapes, with another size along the length."""
        return _unfolded(self.loaded, _shapes_at(shapes, self.one.axes, size))


def padding_between(loaded: Loaded, wanted: Sequence[_InputShapes]) -> Padding:
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


class _EqualAxes(NamedTuple):
    """Axes of inputs that are equal at each size."""

    lengths: tuple[int, ...]
    """Their length at each size."""
    axes: dict[str, int]
    """Input -> its axis."""
    symbols: set[Any]
    """The symbols of these axes."""


def lengths_of(loaded: Loaded, wanted: Sequence[_InputShapes]) -> list[Length]:
    """Return the lengths by which the sizes of a dynamic model differ.

    Axes of different inputs share a length where they are equal at each size, or have the same symbol.

    Raises:
        SurgeryError: one input has the same length along several axes, so that none can be padded by itself.
    """
    inputs = function_of(loaded.program, default_function(loaded)).inputs
    groups = list[_EqualAxes]()
    for name, shape in wanted[0].items():
        for axis in range(len(shape)):
            lengths, symbol = tuple(size[name][axis] for size in wanted), inputs[name].shape[axis]
            if len(set(lengths)) == 1:
                continue
            equal = [group for group in groups if group.lengths == lengths]
            same = [group for group in equal if symbol in group.symbols]
            same = same or [group for group in equal if name not in group.axes]
            if not same:
                groups.append(_EqualAxes(lengths, {name: axis}, {symbol}))
            elif name in same[0].axes:
                raise SurgeryError(
                    f"several axes of {name} have the same length, so none of them can be padded; "
                    "give sizes at which these axes differ"
                )
            else:
                same[0].axes[name] = axis
                same[0].symbols.add(symbol)
    return [Length(group.axes, min(group.lengths), max(group.lengths)) for group in groups]


def largest_shapes(wanted: Sequence[_InputShapes]) -> dict[str, tuple[int, ...]]:
    """Return the shapes at which every length is the longest among the sizes."""
    return {name: tuple(map(max, zip(*(s[name] for s in wanted), strict=True))) for name in wanted[0]}


def padding_along(loaded: Loaded, wanted: Sequence[_InputShapes], one: Length) -> Padding:
    """Return how inputs are padded along one of the lengths, or why they may not be."""
    others = [other for other in lengths_of(loaded, wanted) if other != one]
    question = _Question(loaded, one, others, largest_shapes(wanted))
    shapes, function = question.largest, question.function
    fixed = [n for shape in shapes.values() for n in shape]
    elsewhere = shapes
    for other in question.others:  # a length that no axis has, and that all strides divide
        prime = _free_length(function, fixed)
        fixed.append(prime)
        elsewhere = _shapes_at(elsewhere, other.axes, prime * total_stride(function))
    length = _free_length(function, fixed, one.least)
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
    shorter, longer = (
        _shapes_by_name(question.unfolded(question.largest, places)) for places in (one.least, one.most)
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
    question: _Question, shapes: _InputShapes, length: int, multiple: int, before: Padding | None = None
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
        followed, whole = (question.unfolded(shapes, places) for places in (length * multiple, one.most))
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
        here: _InputShapes = known
        for length, places in zip((question.one, *question.others), lengths, strict=True):
            here = _shapes_at(here, length.axes, places)
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


def _unfolded(loaded: Loaded, shapes: _InputShapes) -> Function:
    """Return the function that a model runs at fixed shapes, before the arithmetic on shapes is folded.

    Raises:
        PassError: an op cannot have these shapes.
    """
    function = function_of(MLProgram(loaded).clone().program, default_function(loaded))
    if (refusal := barred(function, frozenset())) is not None:
        raise PassError(str(refusal))
    FixedShapes(shapes, 1).fix(function)
    widen_choices(function)
    return function


def _fill_values(function: Function, axes: Mapping[str, int]) -> Iterator[dict[str, float]]:
    """Yield input -> fill value: zeros first, then the values with which masks hide."""
    numbers = [
        (0.0, 1.0, HIDING) if np_dtype(function.inputs[name]).kind == "f" else (0.0, 1.0) for name in axes
    ]
    for one in islice(product(*numbers), TRIED):
        yield dict(zip(axes, one, strict=True))
