"""Runs of an edit beside the drawn ones: every value of a small domain, and every magnitude in fp16.

Both may be the same function of real numbers: a mean is a sum over n, but the sum leaves fp16 first, and the
root of a sum of squares is no small number, although each square is 0. That is a precondition of an edit, which
its report names. A new side that loses digits of ordinary numbers which the old one keeps is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from anesurgery.checking.adversarial import ADDRESSES, Drawing, aimed, targets, weights
from anesurgery.checking.counterexample import written
from anesurgery.checking.grades import Promise
from anesurgery.checking.lengths import drawn_shape, evaluator
from anesurgery.checking.numbers import (
    DRAWS,
    OWN,
    SLACK,
    BothSides,
    Difference,
    Numbers,
    Pairs,
    apart_at,
    as_tensor,
    difference,
    drawn_numbers,
    measured,
    rows_read,
)
from anesurgery.checking.proofs import Site
from anesurgery.errors import InterpretError
from anesurgery.interpret import Evaluator
from anesurgery.interpret.arithmetic.double import Double
from anesurgery.interpret.sampling import LOOKUPS
from anesurgery.mil import Operation, Var, any_symbolic, constant, ct, np_dtype, types
from anesurgery.semantics.intervals import stored_interval

WHOLE = 1024
"""Combinations of values up to which all are tried: ten booleans, or two integers of five bits. A choice."""
MOST_SWEPT = 1 << 25
"""Numbers read, over all rounds, up to which each value of a range is tried once: 128 MiB of fp32. A choice,
between certainty and the time of a check."""
INTEGER_DRAWS = 16
"""How often the integers of a pass are drawn to see their range: one that every second draw has is missed at
one site in 65,536."""
ENDS = 0.1
"""Share of these from which the least and the largest are the ends of a range: of numbers that are spread over
ten values and more, fewer are ends by chance."""


def values_of(var: Var, drawing: Drawing) -> range | None:
    """The values that each element may have, for conditions and integers with known ends; else None."""
    dtype = np_dtype(var) if types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type) else None
    if dtype is None or dtype.kind not in "biu" or drawing.sample(var, np.random.default_rng(0)) is not None:
        return None
    if dtype.kind == "b":
        return range(2)
    info = np.iinfo(dtype)
    low, high = (drawing.bounds or {}).get(var, stored_interval(var))
    if np.ndim(low) or np.ndim(high):
        return None  # each has ends of its own
    return range(int(max(low, info.min)), int(min(high, info.max)) + 1)


def combinations(drawn: Sequence[Var], drawing: Drawing, ops: Sequence[Operation]) -> Iterator[Numbers] | None:
    """All values of what a site reads; None where these are too many, or not known."""
    choices = [values_of(var, drawing) for var in drawn]
    countable = [c for c in choices if c is not None]
    if not drawn or len(countable) < len(drawn):
        return None
    if any(any_symbolic(v.shape or ()) for v in drawn) or any(map(_partly_drawn, ops)):
        return None
    sizes = [math.prod(drawn_shape(var)) for var in drawn]
    elements = [c for c, size in zip(countable, sizes, strict=True) for _ in range(size)]
    total = math.prod(map(len, elements)) if len(elements) <= WHOLE else math.inf
    return _each(drawn, elements, int(total)) if total <= WHOLE else None


def _partly_drawn(op: Operation) -> bool:
    """Does it read integers of which a part is drawn: dynamic places, ids that may be negative?"""
    for name, value in op.inputs.items():
        if name in ADDRESSES and not isinstance(value, (list, tuple)) and constant(value) is None:
            return True
    if op.op_type not in LOOKUPS:
        return op.op_type.startswith("scatter")
    index, table = (op.inputs[name] for name in LOOKUPS[op.op_type])
    counts_back = op.opset_version < ct.target.iOS17 and stored_interval(index)[0] < 0
    return constant(index) is None and (counts_back or any_symbolic(table.shape))


def _each(drawn: Sequence[Var], elements: Sequence[range], total: int) -> Iterator[Numbers]:
    for index in range(total):
        chosen = []
        for choice in elements:
            index, at = divmod(index, len(choice))
            chosen.append(choice[at])
        numbers: Numbers = {}
        for var in drawn:
            shape = drawn_shape(var)
            here, chosen = chosen[: math.prod(shape)], chosen[math.prod(shape) :]
            numbers[var] = as_tensor(np.array(here).reshape(shape).astype(np_dtype(var)))
        yield numbers


def compare_all(sides: BothSides, every: Iterator[Numbers], promise: Promise) -> Difference:
    """The worst difference over all combinations, or up to the first that breaks the promise."""
    worst = Difference()
    for numbers in every:
        parts = [
            difference(old, new, _undefined(old), finite_only=not promise.tolerates_nonfinite)
            for old, new in sides.run(numbers)
        ]
        worst.add(parts, numbers)
        if not worst.within(promise):
            break
    return worst


def sweep(
    sides: BothSides, drawing: Drawing, worst: Difference, rng: np.random.Generator, promise: Promise
) -> None:
    """Let integers with a known range take each of its values once, at some place, where that costs little."""
    drawn = sides.drawn
    cost = sum(math.prod(drawn_shape(v)) for v in drawn) + weights([*sides.old_ops, *sides.new_ops])
    for var in drawn:
        count = math.prod(drawn_shape(var))
        values: Sequence[int] = _span(var, drawing, rng) if np_dtype(var).kind in "iu" and count else ()
        values = values or (
            rows_read([*sides.old_ops, *sides.new_ops]) if _is_free(var, drawing) and count else ()
        )
        rounds = -(-len(values) // max(count, 1))
        if rounds * cost > MOST_SWEPT:  # then those alone that tell both sides apart
            values = _apart_at(sides, drawing, var, values, rng)
            rounds = -(-len(values) // count)
        if not rounds:
            continue
        every = np.resize(np.array(values, np_dtype(var)), (rounds, *drawn_shape(var)))
        for values_here in every:
            _meet(
                sides,
                drawn_numbers(drawn, drawing, "normal", rng) | {var: as_tensor(values_here)},
                worst,
                promise,
            )
            if not worst.within(promise):
                return


def _is_free(var: Var, drawing: Drawing) -> bool:
    """Is it an integer of which nothing is known?"""
    unknown = np_dtype(var).kind in "iu" and var not in (drawing.bounds or {})
    return unknown and drawing.sample(var, np.random.default_rng(0)) is None


def _apart_at(
    sides: BothSides, drawing: Drawing, var: Var, values: Sequence[int], rng: np.random.Generator
) -> list[int]:
    """The integers of a range at which both sides differ, beside one draw of all else that they read."""
    others = drawn_numbers([v for v in sides.drawn if v is not var], drawing, "normal", rng)
    assert isinstance(values, range)
    return apart_at(lambda x: sides.run(others | {var: x}), var, values, [*sides.old_ops, *sides.new_ops])


def aim(
    sides: BothSides, drawing: Drawing, worst: Difference, rng: np.random.Generator, promise: Promise
) -> None:
    """Let floats and free integers take each constant of both sides, where that costs little."""
    constants = targets([*sides.old_ops, *sides.new_ops])
    cost = sum(math.prod(drawn_shape(v)) for v in sides.drawn) + weights([*sides.old_ops, *sides.new_ops])
    spent = 0
    for values in aimed(sides.drawn, drawing, constants, rng, apart=promise.tolerance.rtol > 0):
        spent += cost
        if spent > MOST_SWEPT:
            worst.untried = (*worst.untried, "each constant")
            return
        numbers = drawn_numbers(sides.drawn, drawing, "normal", rng)
        _meet(sides, numbers | {v: as_tensor(x) for v, x in values.items()}, worst, promise)
        if not worst.within(promise):
            return


def _meet(sides: BothSides, numbers: Numbers, worst: Difference, promise: Promise) -> None:
    """One more round on these numbers, unless the old side overflows and the pass promises only a tolerance."""
    pairs = sides.run(numbers)
    if promise.tolerance.rtol and any(bool(torch.isinf(old).any()) for old, _ in pairs):
        return  # a sum in another order may overflow elsewhere
    worst.add(measured(sides, numbers, pairs, [_undefined(old) for old, _ in pairs], promise), numbers)


def _span(var: Var, drawing: Drawing, rng: np.random.Generator) -> range:
    """The integers from the least to the largest that are drawn for a value; none where these are unknown."""
    bounds = (drawing.bounds or {}).get(var)
    samples = [drawing.sample(var, rng) for _ in range(INTEGER_DRAWS)]
    if all(g is None for g in samples):
        return range(0) if bounds is None or np.ndim(bounds[1]) else range(int(bounds[0]), int(bounds[1]) + 1)
    drawn = np.stack([np.asarray(g) for g in samples])
    if drawn.size == 0 or drawn.dtype.kind not in "iu":
        return range(0)
    spans = drawn.max(0).astype(np.int64) - drawn.min(0)
    low, high = int(drawn.min()), int(drawn.max())
    if 2 * int(spans.min()) < high - low or low == high:
        return range(0)  # each has a range of its own, or they belong to another value
    least, most = (low, high) if bounds is None or np.ndim(bounds[1]) else (int(bounds[0]), int(bounds[1]))
    if min(float((drawn == end).mean()) for end in (low, high)) > ENDS:
        return range(low, high + 1)  # its ends come again and again: it is a range that somebody promises
    if least <= low and high <= most and 2 * (high - low) >= most - least:
        low, high = least, most  # drawn from all that may be asked for
    return range(low, high + 1)


def _undefined(old: torch.Tensor) -> torch.Tensor | None:
    return torch.isnan(old) if old.is_floating_point() else None


ORDINARY, BOTH_SIGNS, ONE_SIGN, ALIKE = 1.0, (-1.0, 1.0), (0.5, 1.0), (0.98, 1.0)
"""The magnitude at which no digits may be lost; shares of a magnitude between which numbers lie."""
TRIED = (
    *((ORDINARY, ends) for ends in (BOTH_SIGNS, ONE_SIGN, ALIKE)),
    *((64.0, ends) for ends in (ONE_SIGN, BOTH_SIGNS)),
    (250.0, BOTH_SIGNS),  # fp16 holds squares of such numbers, and not of their differences
    (1024.0, ONE_SIGN),
    *((magnitude, ends) for magnitude in (16384.0, 60000.0) for ends in (ONE_SIGN, BOTH_SIGNS)),
    *((magnitude, ONE_SIGN) for magnitude in (1e-2, 1e-3, 1e-4, 1e-6)),
)
"""Magnitudes, from ordinary numbers on to the largest and then the smallest, and where numbers lie."""
HALF_ULP = float(np.finfo(np.float16).eps) / 2
"""What fp16 rounds off, as a share."""
LEAST_NORMAL = float(np.finfo(np.float16).tiny)
"""The smallest number that fp16 holds with all its digits."""
LOST = 1 / 8
"""Share of the largest number by which a side is off that has lost most of its digits: three binary digits of
eleven are right then."""
MOST = 1 << 16
"""Numbers read, weights among them, up to which it is tried: a choice, as it runs both sides several times
more."""


@dataclass(frozen=True)
class InHalves:
    """What only the new side does in fp16."""

    overflow: float = math.inf
    """The first magnitude at which it overflows."""
    underflow: float = 0.0
    """The largest magnitude, below ordinary numbers, at which it loses most digits."""
    loses: float = 0.0
    """The first magnitude, from ordinary numbers on, at which it loses digits."""
    off: float = 0.0
    """How far off it is from ordinary numbers, as a share of the largest; 0 if it loses nothing there."""
    numbers: Numbers = field(default_factory=dict)
    """Ordinary numbers at which it does."""
    pairs: Pairs = field(default_factory=list)
    """What both sides make of these."""

    @property
    def example(self) -> str:
        """Ordinary numbers at which it loses digits, as Python; empty if it does not."""
        return f"# in fp16\n{written(self.numbers, self.pairs)}" if self.off else ""


def in_halves(site: Site, drawing: Drawing, seed: int, promise: Promise) -> InHalves:
    """What only the new side does in fp16; nothing for sites without fp16, or with more numbers than `MOST`."""
    halves = [v for v in site.drawn if np_dtype(v) == np.float16]
    size = sum(math.prod(drawn_shape(v)) for v in site.drawn) + weights([*site.old_ops, *site.new_ops])
    shown, rng = InHalves(), np.random.default_rng(seed)
    if not halves or size > MOST:
        return shown
    sides = _Stored(site)
    for magnitude, ends in TRIED:
        if shown.underflow if magnitude < ORDINARY else math.isfinite(shown.overflow):
            continue
        numbers = drawn_numbers(site.drawn, drawing, "normal", rng)
        most = {v: min(magnitude, promise.limits.get(v, promise.magnitude)) for v in halves}
        numbers |= {v: _of_magnitude(v, most[v], ends, rng) for v in halves}
        try:
            shown = _more(shown, sides, numbers, magnitude, promise)
        except InterpretError:
            return shown
        if shown.off:
            return shown
    return shown


def _more(shown: InHalves, sides: _Stored, numbers: Numbers, magnitude: float, promise: Promise) -> InHalves:
    """What one more run shows."""
    pairs = sides.run(numbers)
    if magnitude < ORDINARY:
        return replace(shown, underflow=magnitude * any(_lost(a, b) for a, b in pairs))
    if any(_only_new(a, b) for a, b in pairs):
        return replace(shown, overflow=magnitude)
    if shown.loses or not (off := sides.digits_lost(numbers, pairs, promise)):
        return shown
    if magnitude > ORDINARY:
        return replace(shown, loses=magnitude)
    return replace(shown, loses=magnitude, off=off, numbers=numbers, pairs=pairs)


class _Stored:
    """Both sides in fp16 as stored, and in fp64."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._old, self._new = self._sides("fp16")

    def _sides(self, arithmetic: str | Double) -> tuple[Evaluator, Evaluator]:
        site = self.site
        old = evaluator(site.old_ops, [*(old for old, _ in site.replaced), *site.carried], arithmetic)
        return old, evaluator(site.new_ops, [new for _, new in site.replaced], arithmetic)

    def run(self, numbers: Numbers) -> Pairs:
        """The pairs (old value, new value)."""
        values = self._old(numbers)
        inner = dict(zip(self.site.carried, values[len(self.site.replaced) :], strict=True))
        return list(zip(values, self._new({**numbers, **inner}), strict=False))

    def digits_lost(self, numbers: Numbers, pairs: Pairs, promise: Promise) -> float:
        """The error of the new side, as a share of the largest value, where none of the old one is near it.

        The old side errs by what it rounds, and by what half a unit in the last place of each operand does.
        """
        least = max(promise.tolerance.rtol, SLACK * HALF_ULP)
        far = [i for i, (a, b) in enumerate(pairs) if _share(a, b) > least]
        if not far or promise.tolerance.rtol == 0:
            return 0.0
        exact = self._sides(Double())[0](numbers)
        rounded = self._sides(Double(HALF_ULP))[0]
        draws = [rounded(numbers) for _ in range(DRAWS)]
        worst = 0.0
        for i in far:
            old, new = pairs[i]
            rounds = max(_share(exact[i], old), *(_share(exact[i], draw[i]) for draw in draws))
            off = _share(exact[i], new)
            worst = max(worst, off) if off > max(least, OWN * rounds) else worst
        return worst


def _of_magnitude(
    var: Var, magnitude: float, ends: tuple[float, float], rng: np.random.Generator
) -> torch.Tensor:
    """A magnitude and numbers around it, inside what is known of the value; of both signs, not near 0."""
    low, high = ends
    drawn = np.asarray(rng.uniform(max(low, 0.5), high, drawn_shape(var)) * magnitude)
    drawn.flat[:1] = magnitude
    signed = drawn * rng.choice([-1, 1], drawn.shape) if low < 0 else drawn
    return as_tensor(np.clip(signed, *stored_interval(var)).astype(np.float16))


def _only_new(old: torch.Tensor, new: torch.Tensor) -> bool:
    if old.shape != new.shape or not old.is_floating_point():
        return False
    return bool((torch.isfinite(old) & ~torch.isfinite(new)).any())


def _lost(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Are numbers that fp16 holds with all digits off by a share of the largest that no rounding explains?"""
    if old.shape != new.shape or not old.is_floating_point() or not old.numel():
        return False
    most = float(old.abs().max())
    return most >= LEAST_NORMAL and bool(((old - new).abs() > LOST * most).any())


def _share(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference as a share of the largest number of the first; 0 where that shows nothing."""
    if a.shape != b.shape or not a.is_floating_point() or not a.numel():
        return 0.0
    most, off = float(a.abs().max()), float((a.double() - b.double()).abs().max())
    return off / most if LEAST_NORMAL <= most < math.inf and math.isfinite(off) else 0.0
