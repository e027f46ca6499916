"""Run both sides of an edit on the same adversarial numbers, and measure how far apart they are.

`checking.site.check_site` calls `compare_numbers` for edits that no proof covers. Small differences may be
rounding: `rounding` runs the old side in fp64 with its operands slightly off to see. A difference that remains
is shrunk to a small counterexample and written as Python (`shrunk`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.checking.adversarial import Drawing, largest_constant, schedule, untried_in_words
from anesurgery.checking.aiming import crossed, edged
from anesurgery.checking.grades import REASSOCIATED, Promise
from anesurgery.checking.lengths import drawn_shape, evaluator
from anesurgery.errors import InterpretError, Refused, SurgeryError
from anesurgery.interpret import Evaluator
from anesurgery.interpret.arithmetic.precision import Double, narrows
from anesurgery.mil import Array, Operation, Var, constant, is_constexpr, np_dtype
from anesurgery.ops import CARRIERS, LOOKUPS, MOVING, PADDING, names
from anesurgery.semantics.intervals import stored_interval
from anesurgery.semantics.reading import is_tensor

Numbers = dict[Var, torch.Tensor]
Pairs = list[tuple[torch.Tensor, torch.Tensor]]
Undefined = Sequence[torch.Tensor | None]

FINER = float(np.finfo(np.float64).eps / np.finfo(np.float32).eps)
"""What is left in fp64 of a difference that is only rounding in fp32."""
UNCOUNTED = CARRIERS | MOVING | PADDING | {"const"}
"""Ops that do not round by themselves; rounding by casts is counted separately."""
HALF, WIDEST = 2, 8
"""Bytes of fp16, and of the widest floats."""
ROUNDED_OFF = float(np.finfo(np.float32).eps)
"""The share of typical values that counts as no difference in the smallest row: fp32 rounds as much."""
ROW = 8
"""The least length of a row that is judged by itself: in shorter ones the largest may be near 0 by chance."""
FAITHFUL = (
    CARRIERS | MOVING | PADDING | names("const add sub mul real_div linear matmul conv reduce_sum reduce_mean")
)
"""Ops whose results are off by a share of their terms if operands are: nothing in them is approximated."""
FEW_NUMBERS = 1 << 14
"""Up to this many numbers each element is looked at by itself, which runs the old side `DRAWS` times more."""
SLACK = 16.0
"""A difference counts only if it is so many times what rounding did on `DRAWS` draws: the largest of more draws
would be larger, and an error that matters is larger by far."""
OWN = 4.0
"""The new side may be off by so many times what the old side itself loses by rounding. Both round, each in its
own order, and the sum of two such errors is at most twice either; twice that is left for chance."""
DRAWS = 8
"""How often the old side runs with slightly wrong operands, to see what rounding can do to it. A choice: each
draw costs a run."""


@dataclass
class BothSides:
    """The old and the new ops of one edit, ready to run on the same numbers.

    Raises:
        Unsupported: an op of the old side is not known to the interpreter.
    """

    replaced: Sequence[tuple[Var, Var]]
    old_ops: Sequence[Operation]
    new_ops: Sequence[Operation]
    drawn: Sequence[Var]
    """The values that both sides read from outside."""
    carried: Sequence[Var]
    """The values that the new side reads from inside the old side: computed, not drawn."""
    exact: bool = False
    """Whether equal bits are promised."""
    precision: str = ""
    """fp32 or fp16; by default fp16 where what it loses may differ between both sides."""

    def __post_init__(self) -> None:
        # fp32 reads fp16 exactly and never rounds to it, so what fp16 loses shows only where it is computed in
        old, new = self.old_ops, self.new_ops
        if not self.precision:
            casts_differ = any(map(_is_lossy_cast, old)) != any(map(_is_lossy_cast, new))
            loses = casts_differ or _narrowest(new) < _narrowest(old)
            self.precision = "fp16" if loses or (self.exact and _narrowest(self.ops) == HALF) else "fp32"
        self._old, self._new = self.evaluators(self.precision)

    @property
    def ops(self) -> list[Operation]:
        """The ops of both sides."""
        return [*self.old_ops, *self.new_ops]

    @property
    def numbers_read(self) -> int:
        """How many numbers one run reads: what is drawn, and the largest constant."""
        return sum(math.prod(drawn_shape(v)) for v in self.drawn) + largest_constant(self.ops)

    def evaluators(self, precision: str | Double) -> tuple[Evaluator, Evaluator]:
        """Return both sides, ready to run in an arithmetic."""
        old = evaluator(self.old_ops, [*(old for old, _ in self.replaced), *self.carried], precision)
        return old, evaluator(self.new_ops, [new for _, new in self.replaced], precision)

    def run(self, numbers: Numbers) -> Pairs:
        """Return pairs (old value, new value)."""
        return self._pairs(self._old, self._new, numbers)

    def run_double(self, numbers: Numbers) -> Pairs:
        """Run both sides in fp64."""
        return self._pairs(*self.evaluators(Double()), numbers)

    def spread(self, numbers: Numbers, rtol: float) -> list[list[torch.Tensor]]:
        """Return the old values in fp64 `DRAWS` times, with the operands of each op off by up to `rtol`."""
        old = self.evaluators(Double(rtol))[0]
        return [old(numbers)[: len(self.replaced)] for _ in range(DRAWS)]

    @property
    def rounds_sums(self) -> bool:
        """Whether both sides are computed in fp32, so that fp64 tells what rounding does."""
        return self.precision == "fp32"

    def _pairs(self, old: Evaluator, new: Evaluator, numbers: Numbers) -> Pairs:
        values = old(numbers)
        olds, inner = values[: len(self.replaced)], values[len(self.replaced) :]
        news = new({**numbers, **dict(zip(self.carried, inner, strict=True))})
        return list(zip(olds, news, strict=True))


def _is_lossy_cast(op: Operation) -> bool:
    """Return whether an op casts to a float that cannot hold all of its operand."""
    if op.op_type != "cast" or np_dtype(op.inputs["x"]).kind not in "iu":
        return narrows(op)
    low, high = stored_interval(op.inputs["x"])
    return np_dtype(op.outputs[0]) == np.float16 and max(-low, high) > fp16.LAST_INTEGER


def _narrowest(ops: Sequence[Operation]) -> int:
    """Return the bytes of the narrowest floats in which some ops compute."""
    counted = (op for op in ops if op.op_type not in UNCOUNTED and not is_constexpr(op))
    dtypes = (np_dtype(v) for op in counted for v in op.outputs)
    return min((dtype.itemsize for dtype in dtypes if dtype.kind == "f"), default=WIDEST)


class Apart(NamedTuple):
    """How far apart two values are."""

    max_abs: float
    max_rel: float
    """`max_abs` over the largest finite magnitude of the old value, or of what flows through the old side where
    that cancels and the difference is rounding (`rounding`); infinite for integers that are not equal."""
    values: int
    """Elements that were compared."""
    left_out: int
    """Elements that differ but were not compared, since the old ones mean nothing."""


@dataclass
class Difference:
    """The worst difference over the rounds so far."""

    max_abs: float = 0.0
    max_rel: float = 0.0
    values: int = 0
    left_out: int = 0
    untried: tuple[str, ...] = ()
    """Kinds of numbers that were not tried."""
    numbers: Numbers = field(default_factory=dict)
    """The numbers of the worst round, when anything differed."""

    def within(self, promise: Promise) -> bool:
        """Return whether the promise is kept."""
        rtol = promise.tolerance.rtol
        return self.max_abs == 0 if rtol == 0 else self.max_rel <= rtol

    def add(self, parts: Sequence[Apart], numbers: Numbers) -> None:
        """Add one more round."""
        max_abs, max_rel = max(p.max_abs for p in parts), max(p.max_rel for p in parts)
        self.values += sum(p.values for p in parts)
        self.left_out += sum(p.left_out for p in parts)
        if max_rel > self.max_rel or max_abs > self.max_abs:
            self.numbers = numbers
        self.max_abs, self.max_rel = max(self.max_abs, max_abs), max(self.max_rel, max_rel)


def compare_numbers(
    sides: BothSides, drawing: Drawing, rng: np.random.Generator, promise: Promise, more: Iterable[str] = ()
) -> Difference:
    """Return the worst difference over all rounds, or over those up to the first that breaks the promise.

    Where finite inputs give NaN, the old side defines nothing. Where inputs that are not finite give NaN, so
    must the new side, unless the pass declares that it holds for finite numbers only.

    Args:
        sides: the old and the new ops.
        drawing: what is known about the values to be drawn.
        rng: the source of random numbers.
        promise: the promise that differences are compared with.
        more: kinds of rounds beside those of the schedule.

    Raises:
        Refused: no numbers can be drawn for a value.
    """
    worst = Difference()
    size = sum(math.prod(drawn_shape(v)) for v in sides.drawn if is_tensor(v))
    weight = largest_constant(sides.ops)
    floats = any(np_dtype(v).kind == "f" for v in sides.drawn)
    tried = Counter[str]()
    for kind in (*schedule(size, promise.tolerates_nonfinite, weight, floats), *(more if floats else ())):
        # a source of its own, so that the rounds after it draw the same numbers as without it
        source = np.random.default_rng(tried[kind]) if kind == "channels" else rng
        numbers = drawn_numbers(sides.drawn, drawing, kind, source)
        combine = {"small": edged, "nonfinite": crossed if tried[kind] % 2 == 0 else None}.get(kind)
        if combine is not None:
            plain = {v: x.numpy() for v, x in numbers.items()}
            at = tried[kind] * max(map(np.size, plain.values()), default=0)
            numbers |= {v: as_tensor(x) for v, x in combine(sides.drawn, drawing, plain, at).items()}
        pairs = sides.run(numbers)
        if promise.tolerance.rtol and kind != "nonfinite" and _overflows(pairs):
            numbers = _without_overflows(numbers, pairs)
            pairs = sides.run(numbers)
        undefined = [torch.isnan(old) if old.is_floating_point() else None for old, _ in pairs]
        if kind == "nonfinite":
            finite = {v: _without_nonfinite(t) for v, t in numbers.items()}
            if all(t is numbers[v] for v, t in finite.items()):
                tried[kind] += 1  # none can occur here
                continue
            undefined = [torch.isnan(o) if o.is_floating_point() else None for o, _ in sides.run(finite)]
        elif promise.tolerance.rtol and _overflows(pairs):
            continue  # a sum in another order may overflow elsewhere
        tried[kind] += 1
        worst.add(measured(sides, numbers, pairs, undefined, promise), numbers)
        if not worst.within(promise):
            break
    kinds = untried_in_words(tried, promise.tolerates_nonfinite, floats)
    worst.untried = kinds + _edges_untried(sides.drawn, drawing)
    return worst


def _overflows(pairs: Pairs) -> bool:
    """Return whether an old value is infinite."""
    return any(bool(torch.isinf(old).any()) for old, _ in pairs)


def _without_overflows(numbers: Numbers, pairs: Pairs) -> Numbers:
    """Return the numbers with 1 where an old value of the same shape is infinite, to try the other elements."""
    calm = dict(numbers)
    for (var, values), (old, _) in itertools.product(numbers.items(), pairs):
        if values.is_floating_point() and values.shape == old.shape:
            calm[var] = torch.where(torch.isinf(old), torch.ones_like(values), calm[var])
    return calm


def _edges_untried(drawn: Sequence[Var], drawing: Drawing) -> tuple[str, ...]:
    """Return the edges of floats that are not drawn, in words."""
    floats = [v for v in drawn if np_dtype(v).kind == "f"]
    own = [[drawing.sample(v, np.random.default_rng(seed)) for seed in range(2)] for v in floats]
    chosen = [(one, other) for one, other in own if one is not None and other is not None]
    varied = [np.stack(two) for two in chosen if not np.array_equal(*two)]
    both = any((values < 0).any() and (values > 0).any() and values.all() for values in varied)
    zeros = ("zeros",) if both else ()
    return zeros + (("subnormals",) if floats and not drawing.subnormals else ())


def drawn_numbers(drawn: Sequence[Var], drawing: Drawing, kind: str, rng: np.random.Generator) -> Numbers:
    """Draw numbers for all inputs of both sides.

    Raises:
        Refused: there are none for a value.
    """
    try:
        return {v: as_tensor(drawing.draw(v, kind, rng)) for v in drawn}
    except ValueError as reason:
        raise Refused(str(reason)) from reason


def as_tensor(values: Array) -> torch.Tensor:
    """Return drawn values as the interpreter takes them."""
    values = np.asarray(values)
    if values.dtype.kind == "u" and values.dtype.itemsize > 1:
        values = values.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(values)).reshape(values.shape)


def _without_nonfinite(values: torch.Tensor) -> torch.Tensor:
    """Replace elements that are not finite by 1."""
    if not values.is_floating_point() or bool(torch.isfinite(values).all()):
        return values
    return torch.where(torch.isfinite(values), values, torch.ones_like(values))


def measured(
    sides: BothSides, numbers: Numbers, pairs: Pairs, undefined: Undefined, promise: Promise
) -> list[Apart]:
    """Return how far apart both sides are; beyond the tolerance, fp64 shows whether that is rounding."""
    parts = _differences(pairs, undefined, promise)
    rtol = promise.tolerance.rtol
    if rtol == 0 or any(math.isinf(p.max_abs) for p in parts):
        return parts
    try:
        if sides.rounds_sums and any(p.max_rel > rtol for p in parts):
            parts = rounding(sides, numbers, pairs, parts, undefined, promise)
        if any(p.max_rel > rtol for p in parts):
            return parts
        return hidden(sides, numbers, pairs, parts, undefined, promise)  # no element excuses another one
    except InterpretError:
        return parts


def rounding(
    sides: BothSides,
    numbers: Numbers,
    pairs: Pairs,
    parts: Sequence[Apart],
    undefined: Undefined,
    promise: Promise,
) -> list[Apart]:
    """Return the differences relative to what rounding does to the old side, where they are only rounding.

    Sums that cancel round by a share of their terms, not of the result. What that share is shows in how far the
    old values move when each operand is off by the tolerance (no more than another order of a sum may be), and
    in how far they are from what fp64 gives. A difference counts as rounding if it is `FINER` in fp64, where
    that of a wrong rewrite is as large as in fp32, or if what is left in fp64 is within the tolerance.
    """
    rtol = promise.tolerance.rtol
    share = min(rtol, REASSOCIATED.rtol)
    finer = sides.run_double(numbers)
    draws = sides.spread(numbers, share)
    relative = []
    for i, (part, exact) in enumerate(zip(parts, _differences(finer, undefined, promise), strict=True)):
        old, left_out = finer[i][0], undefined[i : i + 1]
        moved = (_differences([(old, draw[i])], left_out, promise)[0].max_abs for draw in draws)
        off = max(filter(math.isfinite, moved), default=0.0)  # off by a little, the arccosine of 1 is no number
        allowed = max(off, OWN * _differences([(old, pairs[i][0])], left_out, promise)[0].max_abs)
        left = FINER * allowed if old.is_floating_point() else 0.0
        if (exact.max_abs <= left or exact.max_rel <= rtol) and 0 < allowed < math.inf:
            part = part._replace(max_rel=min(part.max_rel, rtol * part.max_abs / allowed))
        relative.append(part)
    return relative


def hidden(
    sides: BothSides, numbers: Numbers, pairs: Pairs, parts: list[Apart], undefined: Undefined, promise: Promise
) -> list[Apart]:
    """Return differences that are small beside the largest value, but large beside their row.

    Only what fp64 shows to be no rounding counts, beyond what errors of the tolerance in the operands do to the
    same row. In small sites each element is looked at too, unless a function may be approximated there.
    """
    rtol, is_small = promise.tolerance.rtol, sum(t.numel() for t in numbers.values()) <= FEW_NUMBERS
    share = ROUNDED_OFF if all(op.op_type in FAITHFUL for op in sides.old_ops) else rtol
    each = share if is_small and share <= REASSOCIATED.rtol else None
    views = [_values_by_rows(old, left_out, each) for (old, _), left_out in zip(pairs, undefined, strict=True)]
    suspicious = [
        [view for view in here if bool(view.differs(old, new, rtol).any())]
        for here, (old, new) in zip(views, pairs, strict=True)
    ]
    if not any(suspicious):
        return parts
    finer, draws = sides.run_double(numbers), sides.spread(numbers, rtol)
    judged = []
    for i, part in enumerate(parts):
        for view in suspicious[i]:
            in_double, as_run = (view.largest(a.double() - b.double()) for a, b in (finer[i], pairs[i]))
            rounding_error = torch.stack([view.largest(finer[i][0] - draw[i]) for draw in draws]).amax(0)
            slack = SLACK if view.axis is None else OWN  # a row shows what rounding can do in many numbers
            wrong = view.differs(*pairs[i], rtol) & (in_double > as_run / 2)
            wrong &= (in_double > slack * rounding_error) & (in_double > view.least)
            if bool(wrong.any()):
                worst = max(rtol * SLACK, float((rtol * in_double / rounding_error)[wrong].max()))
                part = part._replace(max_rel=max(part.max_rel, worst))
        judged.append(part)
    return judged


def _constant_rows(old: torch.Tensor, axis: int) -> torch.Tensor:
    """Return a mask of rows of equal numbers, where an approximation near 0 is off by a large share."""
    rows = rows_along(old, axis)
    return (rows.amax(1) == rows.amin(1)).reshape([-1 if at == axis else 1 for at in range(old.ndim)])


def row_axes(values: torch.Tensor) -> list[int]:
    """Return the axes along which a value has rows of several elements."""
    return [axis for axis, length in enumerate(values.shape) if length > 1 and values.numel() // length >= ROW]


def rows_along(values: torch.Tensor, axis: int) -> torch.Tensor:
    """Return a value as [rows, elements]: one row for each position of an axis."""
    return values.movedim(axis, 0).flatten(1)


class _RowsOfValue(NamedTuple):
    """The values row by row along an axis, or one by one."""

    axis: int | None
    left_out: torch.Tensor
    least: float
    """A difference up to this counts as none, however small a row is."""

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitude in each row."""
        sizes = values.abs().masked_fill(self.left_out, 0)
        return sizes if self.axis is None else rows_along(sizes, self.axis).amax(1)

    def differs(self, old: torch.Tensor, new: torch.Tensor, rtol: float) -> torch.Tensor:
        """Return where values differ by more than a share of the largest in the row."""
        return self.largest(old - new) > (rtol * self.largest(old)).clamp(min=self.least)


def _values_by_rows(
    old: torch.Tensor, undefined: torch.Tensor | None, each: float | None
) -> list[_RowsOfValue]:
    """Return the rows along each axis; and with `each`, the elements one by one.

    An element differs by itself from this share of the median of all magnitudes on.
    """
    if not old.is_floating_point() or not old.numel():
        return []
    left_out = ~torch.isfinite(old) if undefined is None else ~torch.isfinite(old) | undefined
    size = float(old[~left_out].abs().median()) if not bool(left_out.all()) else 0.0
    rows = [
        _RowsOfValue(axis, left_out | _constant_rows(old, axis), ROUNDED_OFF * size) for axis in row_axes(old)
    ]
    return rows + ([] if each is None else [_RowsOfValue(None, left_out, each * size)])


def _differences(pairs: Pairs, undefined: Undefined, promise: Promise) -> list[Apart]:
    return [
        difference(old, new, left_out, finite_only=not promise.tolerates_nonfinite)
        for (old, new), left_out in zip(pairs, undefined, strict=True)
    ]


def difference(
    old: torch.Tensor, new: torch.Tensor, undefined: torch.Tensor | None = None, *, finite_only: bool = False
) -> Apart:
    """Return how far apart the old and the new value are.

    Args:
        old: the old values.
        new: the new values.
        undefined: where the old values mean nothing.
        finite_only: leave out where the old values are not finite.
    """
    if tuple(old.shape) != tuple(new.shape):
        return Apart(float("inf"), float("inf"), 0, 0)
    if torch.equal(old, new):
        return Apart(0.0, 0.0, old.numel(), 0)
    a, b = old.double(), new.double()
    left_out = torch.zeros_like(a, dtype=torch.bool) if undefined is None else undefined
    if finite_only:
        left_out = left_out | ~torch.isfinite(a)
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    apart = torch.where(same, 0.0, (a - b).abs()).nan_to_num(torch.inf, torch.inf)[~left_out]
    ignored = int((left_out & ~same).sum())
    a = a[~left_out]
    largest = float(apart.max()) if apart.numel() else 0.0
    if largest and not old.is_floating_point():
        return Apart(largest, math.inf, a.numel(), ignored)  # one id is no better than another one
    finite = a[torch.isfinite(a)].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    return Apart(largest, largest / scale if scale else largest, a.numel(), ignored)


# Find the integers at which two sides differ by giving them all at once: one id of 50,000 may tell them
# apart.
#
# An index of three places takes 50,000 numbers in 17,000 rounds. Most ops that read it take any number of
# places, so that one run of a longer index meets all of them. What is found so is then given in a round of
# its own.


Run = Callable[[torch.Tensor], Sequence[tuple[torch.Tensor, torch.Tensor]]]
"""Gives what both sides make of an index."""

FEW = 8
"""Integers that are looked at again, those where both sides are furthest apart: one would show it."""
TOGETHER = 1 << 20
"""Elements of all values at a time: 4.2 MB of fp32, about what a core keeps in its cache."""
MOST = 1 << 25
"""The same for all integers: 134 MB of fp32, a fraction of a second. A choice."""


def apart_at(run: Run, var: Var, values: range, ops: Sequence[Operation]) -> list[int]:
    """Return the integers at which two sides differ; [] where that cannot be tried, or takes too long.

    Args:
        run: computes both sides.
        var: the index.
        values: the integers that it may be.
        ops: of both sides.
    """
    shape = list(drawn_shape(var))
    if not shape or not math.prod(shape) or not values:
        return []
    axis = int(np.argmax(shape))
    made = sum(math.prod(drawn_shape(v)) for op in ops if op.op_type != "const" for v in op.outputs)
    each = max(1, made // shape[axis])
    if each * len(values) > MOST:
        return []
    off = np.zeros(0)
    for first in range(0, len(values), max(2, TOGETHER // each)):
        part = values[first : first + max(2, TOGETHER // each)]
        here = np.array(part, np_dtype(var)).reshape([-1 if a == axis else 1 for a in range(len(shape))])
        index = np.broadcast_to(here, [len(part) if a == axis else n for a, n in enumerate(shape)])
        try:
            pairs = run(torch.from_numpy(np.array(index)))
        except InterpretError:
            return []
        off = np.concatenate([off, np.max([_differences_by_index(a, b, len(part)) for a, b in pairs], axis=0)])
    furthest = np.argsort(-off, kind="stable")[:FEW]
    return [values[int(i)] for i in furthest if off[i] > 0]


def rows_read(ops: Sequence[Operation]) -> range:
    """Return the row numbers of all constant tables that ops index, one table after the other."""
    tables = {op.x for op in ops if op.op_type in LOOKUPS}
    shapes = [np.shape(constant(v)) for v in tables if constant(v) is not None]
    return range(sum(max(shape, default=0) for shape in shapes))


def _differences_by_index(old: torch.Tensor, new: torch.Tensor, count: int) -> Array:
    """Return how far apart both sides are for each integer; empty where no axis has one position for each."""
    axes = [a for a, n in enumerate(old.shape) if n == count]
    if old.shape != new.shape or len(axes) != 1:
        return np.zeros(count)
    apart = (old.double() - new.double()).abs().nan_to_num(torch.inf)
    apart[(old == new) | ((old != old) & (new != new))] = 0
    return np.asarray(apart.movedim(axes[0], 0).reshape(count, -1).amax(1))


# Make a found difference small: fewer numbers, simpler ones, as a text that can be pasted into Python.

TRIES = 200
"""How often both sides are run to make a counterexample smaller. A choice: an error is told a little later, and
never not."""
SHOWN = 8
"""Numbers of an input that are written out: one line of a terminal."""
SIMPLE = (0.0, 1.0, -1.0, 2.0, -2.0)
"""Numbers that are easy to read."""


def shrunk(sides: BothSides, numbers: Numbers, promise: Promise) -> str:
    """Return a small counterexample made from a large one; "" when the difference is gone."""
    if not _is_broken(sides, numbers, promise):
        return ""
    numbers = made_smaller(numbers, lambda candidate: _is_broken(sides, candidate, promise))
    return written(numbers, sides.run(numbers))


def made_smaller(numbers: Numbers, broken: Callable[[Numbers], bool]) -> Numbers:
    """Return fewer and simpler numbers on which both sides still differ."""
    tries = iter(range(TRIES))

    def still(candidate: Numbers) -> bool:
        return next(tries, None) is not None and broken(candidate)

    for var in numbers:
        numbers = _with_more_zeros(numbers, var, still)
        numbers = _with_simpler_numbers(numbers, var, still)
    return numbers


def _is_broken(sides: BothSides, numbers: Numbers, promise: Promise) -> bool:
    try:
        pairs = sides.run(numbers)
    except SurgeryError:
        return False
    rtol = promise.tolerance.rtol
    finite = all(bool(torch.isfinite(t).all()) for t in numbers.values())
    undefined = [torch.isnan(old) if finite and old.is_floating_point() else None for old, _ in pairs]
    parts = measured(sides, numbers, pairs, undefined, promise)
    return any(part.max_abs > 0 and (rtol == 0 or part.max_rel > rtol) for part in parts)


def _with_more_zeros(numbers: Numbers, var: Var, still: Callable[[Numbers], bool]) -> Numbers:
    """Replace as many numbers as possible by zeros: halves first, then smaller parts."""
    for part in _parts(numbers[var].numel()):
        flat = numbers[var].reshape(-1).clone()
        if bool((flat[part] != 0).any()):
            flat[part] = 0
            candidate = {**numbers, var: flat.reshape(numbers[var].shape)}
            numbers = candidate if still(candidate) else numbers
    return numbers


def _parts(count: int) -> Iterator[slice]:
    width = count
    while width >= 1 and count:
        yield from (slice(at, at + width) for at in range(0, count, width))
        if width == 1 or count // width > TRIES:
            return
        width = -(-width // 2)


def _with_simpler_numbers(numbers: Numbers, var: Var, still: Callable[[Numbers], bool]) -> Numbers:
    """Replace numbers by small integers, or drop digits."""
    values = numbers[var]
    if values.dtype == torch.bool:
        return numbers
    for at in torch.nonzero(values.reshape(-1)).reshape(-1).tolist()[:SHOWN]:
        value = float(numbers[var].reshape(-1)[at])
        choices = [*SIMPLE, float(round(value)), round(value, 2)] if np.isfinite(value) else []
        for choice in (n for n in choices if n >= 0 or values.dtype != torch.uint8):
            flat = numbers[var].reshape(-1).clone()
            flat[at] = choice
            candidate = {**numbers, var: flat.reshape(values.shape)}
            if choice != value and still(candidate):
                numbers = candidate
                break
    return numbers


def written(numbers: Numbers, pairs: Pairs) -> str:
    """Return inputs as Python, with the first difference of the pairs (old value, new value)."""
    lines = [_assignment(var.name, values.numpy()) for var, values in numbers.items()]
    for old, new in pairs:
        if old.shape != new.shape:
            lines.append(f"# the shapes differ: old {tuple(old.shape)}, new {tuple(new.shape)}")
            break
        apart = ~((old == new) | ((old != old) & (new != new)))
        if bool(apart.any()):
            at = tuple(torch.nonzero(apart)[0].tolist())
            lines.append(f"# at {list(at)}: old {old[at].item()!r}, new {new[at].item()!r}")
            break
    return "\n".join(lines)


def _assignment(name: str, values: Array) -> str:
    """Return Python that makes an array."""
    name = "".join(c if c.isalnum() else "_" for c in name)
    name = name if name.isidentifier() else f"v_{name}"
    if values.ndim == 0:
        return f"{name} = np.array({_number(values[()])}, np.{values.dtype})"
    lines = [f"{name} = np.zeros({values.shape}, np.{values.dtype})"]
    places = np.argwhere(values != 0)
    for at in places[:SHOWN]:
        lines.append(f"{name}[{', '.join(map(str, at))}] = {_number(values[tuple(at)])}")
    if len(places) > SHOWN:
        lines.append(f"# and {len(places) - SHOWN} numbers more, from the seed")
    return "\n".join(lines)


def _number(value: object) -> str:
    text = repr(getattr(value, "item", lambda: value)())
    return {"inf": "np.inf", "-inf": "-np.inf", "nan": "np.nan"}.get(text, text)
