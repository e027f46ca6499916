"""How inputs between two sizes are filled up, and outputs cropped, where that is proved to change nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Any

import numpy as np
import torch

from anesurgery.errors import PassError, Refusal, SurgeryError
from anesurgery.facts.attention import MASKED
from anesurgery.facts.dependence import slice_back
from anesurgery.facts.masks import static_value
from anesurgery.facts.padded_ends import (
    DEEPEST,
    TABLE,
    UNKNOWN,
    End,
    end_of_constant,
    end_of_result,
    end_of_table,
    stays_finite,
    unknown_end,
)
from anesurgery.facts.windows import (
    begins_at_zero,
    is_cut_to_input,
    is_pad_of_convs,
    stride_along,
    unpadded,
    windows_kept,
)
from anesurgery.files.joining import default_function
from anesurgery.files.package import Loaded
from anesurgery.files.size_index import Padding, axes_in_words
from anesurgery.interpret.core import Evaluator
from anesurgery.mil import (
    Array,
    Function,
    Operation,
    Var,
    constant,
    consumers,
    function_of,
    is_output,
    is_stored,
    is_symbolic,
    np_dtype,
    operands,
    producer,
    reads,
    static_shape,
    types,
    walk_ops,
)
from anesurgery.ops import names
from anesurgery.rewriting.fixed_shapes import Shapes, barred
from anesurgery.rewriting.graph_edits import widen_choices
from anesurgery.rewriting.ml_program import MLProgram
from anesurgery.semantics.reading import each_axis, ints, sliced
from anesurgery.semantics.rows import CONTRACTED, Axes, places_of, reshape_axes

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
                    f"{name} has one length along several axes, and cannot be padded along any of them; give "
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


# Find out whether the first rows of every output depend on the first rows of the inputs alone.
#
# Then a shorter input may be filled up at its end, and the outputs cropped. The function is followed at a
# length that no other axis has, before the arithmetic of shapes is folded. Of each value it is shown that,
# cropped, it is what the function computes at the shorter length: slice i depends on slice i of what is filled
# up, or on slices up to i. Where an op reads across (a softmax over keys, a product with values, a sum), what
# was filled up must count for nothing: hidden by a mask, or multiplied by zeros. Masks are those of an input,
# whose filling is followed through the ops that make the mask of it, and those in tables, whose values are
# read at the largest size.

COUNTING = names("cast concat expand_dims gather identity mul reshape slice_by_index squeeze")
"""Ops by which shapes are put together; what else is computed from lengths may differ from one to the next."""
RECURRENT = names("gru lstm rnn")
SUMS = names("einsum matmul reduce_sum")
"""Ops to which what is zero adds nothing."""
VANISHING = 104.0
"""exp of less than minus this is 0 in fp32."""


@dataclass(frozen=True)
class Rows:
    """What is known of a value that is as long as the inputs.

    Attributes:
        axes: those of the length. Cropped along them, the value is that of the shorter input.
        ends: by axis, what lies beyond the length; `UNKNOWN` where it is left out.
        finite: is what lies beyond the length finite?
        table: all elements at the largest size, of what depends on the length alone.
        varies: does it depend on what is filled up?
    """

    axes: frozenset[int]
    ends: Mapping[int, End] = field(default_factory=dict)
    finite: bool = True
    table: Array | None = None
    varies: bool = True


@dataclass(frozen=True)
class Kept:
    """What was shown.

    Attributes:
        crops: output -> its axis to crop, of those that are as long as the inputs, or a part of that.
        shares: output -> how many places of the inputs one of its own stands for.
        hiding: input that hides what is filled up -> must its first place count, or is any enough?
        spread: how far apart attention scores of a row may be, for what is hidden to weigh nothing; None: any.
    """

    crops: Mapping[str, int]
    shares: Mapping[str, int]
    hiding: Mapping[str, bool]
    spread: float | None
    claims: frozenset[str] = frozenset()
    """Values that depend on the length alone, of which the first places must be the same at every length."""


def rows_kept(
    function: Function,
    largest: Function,
    axes: Mapping[str, int],
    length: int,
    fill: Mapping[str, float],
    multiple: int = 1,
) -> Kept | Refusal:
    """Whether inputs may be filled up.

    Args:
        function: of static shapes, whose arithmetic of shapes is not folded.
        largest: the same at the largest size.
        axes: input -> its axis that is filled up.
        length: which divides no other length of the function than those of these axes (`filling.free_length`),
            which are `multiple` times that.
        fill: what each input is filled up with.
        multiple: of which all lengths are multiples, so that convolutions that move by more than 1 make parts.
    """
    walk = _Walk(function, largest, length, multiple)
    for name, var in function.inputs.items():
        if name not in axes and walk.long(var):
            return Refusal(f"the input {name} follows the length of the others, and is not among the sizes")
    for name, axis in axes.items():
        end = End(fill[name], fill[name], sources=frozenset({name}))
        walk.held[function.inputs[name]] = Rows(frozenset({axis}), {axis: end})
    for op in function.operations:
        told = is_stored(op.outputs[0]) or walk.waits(op)
        if not told and (refusal := walk.step(op)) is not None:
            return refusal
    return walk.result()


class _Walk:
    """One walk through a function."""

    def __init__(self, function: Function, largest: Function, length: int, multiple: int) -> None:
        self.function, self.length, self.multiple = function, length, multiple
        self.largest = {v.name: v for op in walk_ops(largest) for v in op.outputs}
        self.held: dict[Var, Rows] = {}
        self.counts: set[Var] = set()
        self.of_length: set[Var] = set()
        """A value computed only from the sequence length: neither an array of that length nor a constant."""
        self.claims: set[str] = set()
        self.hiding: dict[str, bool] = {}
        self.highest = -np.inf

    def long(self, var: Var) -> frozenset[int]:
        """The axes whose length is a multiple of the one that is followed."""
        if not types.is_tensor(var.sym_type):
            return frozenset()
        return frozenset(a for a, n in enumerate(var.shape or ()) if n % self.length == 0)

    def share(self, var: Var, axes: Iterable[int]) -> int | None:
        """How many places of the inputs one stands for along some axes; None where that differs, or is none."""
        shares = {self.length * self.multiple / var.shape[a] for a in axes}
        share = shares.pop() if len(shares) == 1 else 0.0
        return int(share) if share >= 1 and share.is_integer() else None

    def result(self) -> Kept | Refusal:
        """What was shown, once every op was followed."""
        crops, shares = dict[str, int](), dict[str, int]()
        for var in self.function.outputs:
            if var in self.counts or var in self.of_length:
                return Refusal(f"the output {var.name} is computed from the length of the input")
            axes = self.held[var].axes if var in self.held else frozenset()
            if len(axes) > 1:
                return Refusal(f"the output {var.name} is as long as the input along several axes")
            if axes:
                crops[var.name] = next(iter(axes))
                shares[var.name] = self.share(var, axes) or 1
        spread = None if np.isinf(self.highest) else -self.highest - VANISHING
        return Kept(crops, shares, self.hiding, spread, frozenset(self.claims))

    def step(self, op: Operation) -> Refusal | None:
        """Follow one op; a reason where it reads across, or computes with the length."""
        vars_ = [var for _, var in operands(op)]
        if op.op_type == "conv":
            vars_.append(unpadded(op))
        if any(v in self.of_length for v in vars_):
            why = Refusal(f"{op.op_type} computes with the length of the input", op)
            return None if self._by_value(op) else why
        if (conv := self._cut(op)) is not None:
            cut = self._first_places(conv)
            return cut if isinstance(cut, Refusal) else self._keep(op, cut)
        counted = any(v in self.counts for v in vars_)
        if op.op_type == "shape" and self.long(op.x):
            self.counts.update(op.outputs)
            return None
        rows = self._made(op) if counted or op.op_type == "fill_like" else None
        if rows is None and counted and self._counts(op):
            self._count(op)
            return None
        if rows is None and not any(v in self.held for v in vars_):
            if counted and self._by_value(op):
                return None
            if counted or any(self.long(v) for v in op.outputs):
                return Refusal(f"{op.op_type} computes with the length of the input", op)
            return None
        followed = rows or self._followed(op)
        if isinstance(followed, Refusal):
            return None if self._by_value(op) else followed
        return self._keep(op, followed)

    def waits(self, op: Operation) -> bool:
        """Do ops behind it tell: convolutions behind an edge, or slices behind a convolution?"""
        return (is_pad_of_convs(op) and op.x in self.held) or (
            is_cut_to_input(op) and unpadded(op) in self.held
        )

    def _cut(self, op: Operation) -> Operation | None:
        """The convolution that pads both ends of whose places a slice takes the first."""
        conv = producer(op.x, "conv") if op.op_type == "slice_by_index" else None
        return conv if conv is not None and self.waits(conv) else None

    def _first_places(self, conv: Operation) -> Rows | Refusal:
        if (axis := self._axis_of_windows(conv)) is None:
            return Refusal(f"{conv.op_type} reads across the padded axis", conv)
        return self._windows(conv, axis)

    def _by_value(self, op: Operation) -> bool:
        """Does an op read nothing that varies? Then its value is known at every length, and is looked at."""
        known = [
            v in self.counts or v in self.of_length or (v in self.held and not self.held[v].varies)
            for _, v in operands(op)
            if not self._is_number(v)
        ]
        if not known or not all(known) or any(self._both(v) is None for v in op.outputs):
            return False
        for var in op.outputs:
            axes = self.long(var)
            if axes and self.share(var, axes) is not None:
                self.held[var] = self._with_table(var, Rows(axes, varies=False))
                self.claims.add(var.name)
            else:
                self.of_length.add(var)
        return True

    def _pure(self, op: Operation) -> bool:
        """Does an op read lengths and numbers only?"""
        return all(v in self.counts or self._is_number(v) for _, v in operands(op))

    def _is_number(self, var: Var) -> bool:
        """Does it hold the same numbers at every length?"""
        if is_stored(var) or var in self.counts or var in self.held or var in self.of_length:
            return is_stored(var)
        both = self._both(var)
        return both is not None and np.array_equal(both[0], both[1])

    def _counts(self, op: Operation) -> bool:
        """Is it arithmetic of shapes, whose result is the same at all lengths or rises with them?"""
        if op.op_type == "equal":  # is an axis -1, which stands for "as it is"? Lengths are not.
            negative = constant(op.y) is not None and bool(np.all(op.y.val < 0))
            return negative and op.x in self.counts and self._is_steady_or_positive(op.x)
        if op.op_type == "real_div":  # how often is an axis repeated? Axes of length 1 are, and others once
            return self._pure(op) and self._is_steady_or_over_one(op)
        return self._pure(op) and (
            op.op_type in COUNTING or (op.op_type == "select" and op.cond not in self.counts)
        )

    def _is_steady_or_positive(self, var: Var) -> bool:
        both = self._both(var)
        return both is not None and bool(np.all((both[0] == both[1]) | ((both[0] > 0) & (both[1] > 0))))

    def _is_steady_or_over_one(self, op: Operation) -> bool:
        over, result = self._both(op.y), self._both(op.outputs[0])
        if over is None or result is None:
            return False
        return bool(np.all((result[0] == result[1]) | ((over[0] == 1) & (over[1] == 1))))

    def _both(self, var: Var) -> tuple[Any, Any] | None:
        """What is known of a value at the length that is followed, and at the largest."""
        if is_stored(var):
            return var.val, var.val
        there = self.largest[var.name].val if var.op is not None else None
        return None if var.val is None or there is None else (var.val, there)

    def _count(self, op: Operation) -> None:
        """What is the same at both lengths is a number like any other."""
        for var in op.outputs:
            both = self._both(var)
            same = both is not None and np.array_equal(both[0], both[1])
            if not same:
                self.counts.add(var)

    def _keep(self, op: Operation, rows: Rows) -> Refusal | None:
        read = {self.share(v, self.held[v].axes) for v in self._read(op) if self.held[v].axes}
        step = self._step(op)
        for var in op.outputs[:1] if op.op_type in RECURRENT else op.outputs:
            share = self.share(var, rows.axes) if rows.axes else 1
            one = not rows.axes or not read or read == {share and share / step}
            if self.long(var) != rows.axes or share is None or not one:
                return Refusal(f"{op.op_type} gives the axis another length", op)
            self.held[var] = self._with_table(var, rows)
        return None

    def _read(self, op: Operation) -> list[Var]:
        """What an op reads that is as long as the inputs."""
        vars_ = [*(var for _, var in operands(op)), *([unpadded(op)] if op.op_type == "conv" else [])]
        return [v for v in vars_ if v in self.held]

    def _step(self, op: Operation) -> int:
        """By how much windows or slices move along the length."""
        source = unpadded(op) if op.op_type == "conv" else op.inputs.get("x")
        rows = self.held.get(source) if isinstance(source, Var) else None
        if rows is None or len(rows.axes) != 1 or op.op_type not in ("conv", "slice_by_index"):
            return 1
        (axis,) = rows.axes
        if op.op_type == "conv":
            return stride_along(op, axis) if axis > 1 else 1
        return abs(each_axis(op, "stride", 1)[axis])

    def _with_table(self, var: Var, rows: Rows) -> Rows:
        """The ends of a table are read from its elements at the largest size."""
        if rows.varies:
            return rows
        there = self.largest[var.name]
        value = static_value(there, {}) if there.val is None else there.val
        if value is None:
            return rows
        table = np.asarray(value)
        return replace(rows, table=table, ends={a: end_of_table(table, rows.axes, a) for a in rows.axes})

    def _made(self, op: Operation) -> Rows | None:
        """A table of the length: of places, of one number, or the first rows of a longer one."""
        out = op.outputs[0]
        lengths = {name for name, var in operands(op) if var in self.counts}
        axes, stored = self.long(out), self._pure(op)
        if op.op_type == "range_1d" and lengths == {"end"} and stored:
            return Rows(axes, varies=False)
        if op.op_type == "fill" and lengths == {"shape"} and stored:
            return Rows(axes, varies=False)
        if op.op_type == "fill_like" and op.ref_tensor in self.held:
            return Rows(self.held[op.ref_tensor].axes, varies=False)
        if op.op_type == "tile" and lengths == {"reps"}:
            return self._tiled(op)
        if op.op_type == "slice_by_index" and lengths == {"end"} and is_stored(op.x):
            begins = constant(op.begin)
            steps = constant(op.inputs.get("stride"))
            first = begins is not None and all(begins[a] == 0 for a in axes) and out.rank == op.x.rank
            return Rows(axes, varies=False) if first and (steps is None or np.all(steps == 1)) else None
        return None

    def _tiled(self, op: Operation) -> Rows | None:
        """Axes of length 1 are repeated as often as the inputs are long, and others stay."""
        rows = self.held.get(op.x, Rows(frozenset(), varies=not (self._pure(op) or op.x in self.held)))
        both = self._both(op.reps)
        if both is None:
            return None
        steady, new = (both[0] == 1) & (both[1] == 1), frozenset(self.long(op.outputs[0]) - rows.axes)
        if not all(steady[a] or (op.x.shape[a] == 1 and a in new) for a in range(op.x.rank)):
            return None
        return replace(rows, axes=rows.axes | new, table=None)

    def _looked_up(self, op: Operation) -> Rows | None:
        """`gather_nd` by a table that names, for each place, none beyond that place."""
        rows, table = self.held.get(op.x), self.held.get(op.indices)
        depth = op.indices.shape[-1]
        if (
            rows is None
            or table is None
            or table.table is None
            or len(rows.axes) != 1
            or ints(op, "batch_dims") not in ([], [0])
        ):
            return None
        (axis,) = rows.axes
        if axis >= depth or depth != op.x.rank or table.varies:
            return None
        named = table.table[..., axis].astype(np.int64)
        for along in sorted(table.axes):
            places = np.arange(named.shape[along]).reshape([-1 if a == along else 1 for a in range(named.ndim)])
            if (named == places).all():
                return replace(rows, axes=table.axes, ends={along: self._of(op.x, axis)}, table=None)
        return None

    def _followed(self, op: Operation) -> Rows | Refusal:
        """An op that reads what is as long as the inputs."""
        if any(v in self.counts for name, v in operands(op) if (op.op_type, name) not in PLACED):
            return Refusal(f"{op.op_type} computes with the length of the input", op)
        read = {v: self.held[v] for _, v in operands(op) if v in self.held}
        varies, finite = any(r.varies for r in read.values()), all(r.finite for r in read.values())
        if op.op_type in RECURRENT:
            return self._recurrent(op, read)
        forward = op.op_type == "cumsum" and not _says(op, "reverse")
        if forward or (op.op_type == "band_part" and is_stored(op.lower) and is_stored(op.upper)):
            return Rows(read[op.x].axes, finite=finite, varies=varies)
        if (axis := self._axis_of_windows(op)) is not None:
            return self._windows(op, axis)
        kinds: dict[str, Callable[[Operation], Rows | None]] = {
            "gather_nd": self._looked_up,
            "tile": self._tiled,
            "slice_by_index": self._every,
        }
        if op.op_type in kinds and (rows := kinds[op.op_type](op)) is not None:
            return rows
        if op.op_type == "softmax" and (refusal := self._hidden(op, op.x, _axis(op), op.x.rank)) is not None:
            return refusal
        if op.op_type == "scaled_dot_product_attention" and self.long(op.key) & {op.key.rank - 2}:
            return self._attention(op, read)
        axes = reshape_axes(op) if op.op_type == "reshape" else places_of(op)
        if axes is None or not set(read) <= {o.var for o in axes}:
            return Refusal(f"it is not known whether {op.op_type} reads across the padded axis", op)
        kept = self._placed(op, axes)
        if isinstance(kept, Refusal):
            return kept
        ends = {a: self._end(op, axes, a) for a in kept}
        return Rows(kept, ends, finite and stays_finite(op), varies=varies)

    def _placed(self, op: Operation, axes: Axes) -> frozenset[int] | Refusal:
        """The axes of the result to which those go that are as long as the inputs."""
        kept = set[int]()
        for operand in axes:
            for axis in self.held[operand.var].axes if operand.var in self.held else ():
                place = operand.places[axis]
                if op.op_type == "softmax" and axis == _axis(op):
                    place = axis
                if isinstance(place, int):
                    kept.add(place)
                elif not _takes_first(op, axis) and not (place == CONTRACTED and self._adds_nothing(op, axes)):
                    return Refusal(f"{op.op_type} reads across the padded axis", op)
        return frozenset(kept)

    def _adds_nothing(self, op: Operation, axes: Axes) -> bool:
        """Is what lies beyond the length multiplied by zeros, along the axis that is summed over?"""
        if op.op_type not in SUMS:
            return False
        held = [o for o in axes if o.var in self.held]
        zero = [
            self._of(o.var, a).is_zero for o in held for a in self.held[o.var].axes if o.places[a] == CONTRACTED
        ]
        return any(zero) and len(zero) == len(held) and all(self.held[o.var].finite for o in held)

    def _of(self, var: Var, axis: int) -> End:
        return self.held[var].ends.get(axis, unknown_end(var))

    def _end(self, op: Operation, axes: Axes, axis: int) -> End:
        """What lies beyond the length along an axis of the result."""
        if op.op_type == "softmax":
            return End(0.0, 0.0) if axis == _axis(op) else UNKNOWN
        read = dict[str, End]()
        for operand in axes:
            var, at = operand.var, operand.places.index(axis) if axis in operand.places else None
            if is_stored(var):
                read[operand.name] = end_of_constant(var)
            elif var in self.held and at in self.held[var].axes:
                read[operand.name] = self._of(var, at)
            else:
                read[operand.name] = unknown_end(var)
        finite = all(self.held[o.var].finite for o in axes if o.var in self.held)
        return end_of_result(op, read) if finite or op.op_type == "select" else unknown_end(op.outputs[0])

    def _hidden(self, op: Operation, scores: Var, axis: int, rank: int) -> Refusal | None:
        """Why a softmax gives weight to what lies beyond the length; None where it does not."""
        rows = self.held.get(scores)
        if rows is None or axis not in rows.axes:
            return None
        end = self._of(scores, axis)
        if not end.hides:
            return Refusal(f"{op.op_type} reads across the padded axis: no mask hides what is filled up", op)
        if not rows.finite and end.loose:
            return Refusal(f"what {op.op_type} reads beyond the length may be no number", op)
        others = [self._of(scores, a) for a in rows.axes if a != axis]
        if any(other.hides and other.low < DEEPEST for other in others):
            return Refusal(f"the mask hides whole rows of {op.op_type}, which may be no numbers", op)
        if rows.table is not None and not (rows.table > MASKED).any(axis % rank).all():
            return Refusal(f"the mask hides whole rows of {op.op_type}", op)
        for name in end.sources - {TABLE}:
            self.hiding[name] = self.hiding.get(name, False) or TABLE in end.sources
        self.highest = max(self.highest, end.high)
        return None

    def _attention(self, op: Operation, read: Mapping[Var, Rows]) -> Rows | Refusal:
        """Fused attention, whose mask hides the keys that were filled up."""
        mask, keys = op.inputs.get("attn_mask"), op.key.rank - 2
        if mask is None or mask not in read:
            return Refusal(f"{op.op_type} reads across the padded axis: no mask hides what is filled up", op)
        whole = {op.key: {keys}, op.value: {op.value.rank - 2}, op.query: {op.query.rank - 2}}
        if any(read[v].axes - wanted for v, wanted in whole.items() if v in read):
            return Refusal(f"it is not known whether {op.op_type} reads across the padded axis", op)
        hidden = read[mask]
        if np_dtype(mask).kind == "b":
            ends = {a: _as_bias(self._of(mask, a)) for a in hidden.axes}
            table = None if hidden.table is None else np.where(hidden.table, 0.0, -np.inf)
            self.held[mask] = replace(hidden, ends=ends, table=table)
        refusal = self._hidden(op, mask, mask.rank - 1, mask.rank)
        self.held[mask] = hidden
        if mask.rank - 1 not in hidden.axes or not all(r.finite for r in read.values()):
            return Refusal(f"{op.op_type} reads across the padded axis: no mask hides what is filled up", op)
        rows = frozenset({op.outputs[0].rank - 2}) if self.long(op.query) else frozenset[int]()
        return Rows(rows) if refusal is None else refusal

    def _axis_of_windows(self, op: Operation) -> int | None:
        """The axis along which a convolution reads several places of the length; None where no op does."""
        source = unpadded(op) if op.op_type == "conv" else None
        rows = None if source is None else self.held.get(source)
        if rows is None or not is_stored(op.weight) or len(rows.axes) != 1:
            return None
        (axis,) = rows.axes
        alone = source is op.x and (axis < 2 or op.weight.shape[axis] == 1)
        return None if alone else axis

    def _windows(self, op: Operation, axis: int) -> Rows | Refusal:
        """What the rows of a convolution along the length are, or why padding would change them."""
        source = unpadded(op)
        rows = self.held[source]
        refusal = windows_kept(op, axis, self._of(source, axis))
        return Rows(rows.axes, finite=rows.finite) if refusal is None else refusal

    def _every(self, op: Operation) -> Rows | None:
        """Every second place, or third, from the first on; None where it takes others."""
        rows, step = self.held.get(op.x), self._step(op)
        if rows is None or step == 1 or op.outputs[0].rank != op.x.rank or not _from_first(op, rows.axes):
            return None
        whole = [a in rows.axes or op.outputs[0].shape[a] == n for a, n in enumerate(op.x.shape)]
        return replace(rows, table=None) if all(whole) else None

    def _recurrent(self, op: Operation, read: Mapping[Var, Rows]) -> Rows | Refusal:
        """The steps of a recurrent layer that runs forward; its last states are those of the padding."""
        alone = set(read) == {op.x} and read[op.x].axes == {0}
        if not alone or _says(op, "direction", "forward") != "forward":
            return Refusal(f"{op.op_type} reads across the padded axis", op)
        if not _says(op, "output_sequence") or any(consumers(v) or is_output(v) for v in op.outputs[1:]):
            return Refusal(f"the last state of {op.op_type} is that of the padding", op)
        return Rows(frozenset({0}), finite=read[op.x].finite)


PLACED = {("reshape", "shape"), ("slice_by_index", "end")}
"""Operands that may be counted from the length, where the shape of the result shows what they are."""


def _as_bias(end: End) -> End:
    """What a boolean mask adds."""
    if end.low == end.high == 0:
        return replace(end, low=-np.inf, high=-np.inf)
    return replace(end, low=0.0, high=0.0)


def _axis(op: Operation) -> int:
    return int(_says(op, "axis", -1)) % int(op.x.rank)


def _says(op: Operation, name: str, default: Any = False) -> Any:
    """A parameter that is no tensor; the default where it is absent."""
    return default if op.inputs.get(name) is None else constant(op.inputs[name])


def _from_first(op: Operation, axes: Iterable[int]) -> bool:
    """Does a slice take places from the first to the end of some axes?"""
    steps, ends = each_axis(op, "stride", 1), each_axis(op, "end_mask", False)
    return begins_at_zero(op, axes) and all(steps[a] > 0 and ends[a] for a in axes)


def _takes_first(op: Operation, axis: int) -> bool:
    """Is only the first place of an axis of `x` read? Every input has that one."""
    if op.op_type == "gather":
        picked = constant(op.indices)
        return picked is not None and not np.any(picked) and (ints(op, "axis") or [0])[0] % op.x.rank == axis
    if op.op_type != "slice_by_index":
        return False
    part = sliced(op)[axis]
    return part.begin == 0 and (part.single or part.end == 1)
