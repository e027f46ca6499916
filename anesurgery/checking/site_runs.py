"""Run both sides of one edit on chosen inputs, beside the random ones: used by `site`.

Four kinds of runs: the ops upstream, on inputs that may leave the ranges on which the edit relies
(`leaves_range`); all values of a small domain (`combinations`, `compare_all`); each value of an integer range
and each constant of both sides (`sweep`, `aim`); and every magnitude in fp16 (`fp16_behavior`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.checking.addresses import ADDRESSES
from anesurgery.checking.adversarial import Drawing, largest_constant
from anesurgery.checking.aiming import aimed, targets
from anesurgery.checking.edit_sites import Site
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
    written,
)
from anesurgery.errors import InterpretError
from anesurgery.facts.dependence import slice_back
from anesurgery.interpret import Evaluator
from anesurgery.interpret.arithmetic.fp64 import Double
from anesurgery.interpret.sampling import LOOKUPS
from anesurgery.mil import Array, Operation, Var, any_symbolic, constant, ct, np_dtype, reads, types
from anesurgery.ops import CONTRACTIONS, CONTROL, LISTS, RANDOM, STATEFUL
from anesurgery.semantics.bounds import ANY
from anesurgery.semantics.intervals import STEPS, stored_interval
from anesurgery.semantics.reading import is_tensor

# -- ranges -----------------------------------------------------------------------------------------------
#
# The interval analysis says where a value lies. The ops upstream are run as stored, in fp16 and fp32, on
# inputs made to leave that range: numbers whose squares vanish or overflow, rows with a single nonzero element,
# and rows that do not vary. An element outside the range shows an error of the analysis.

UNFOLLOWED = CONTROL | LISTS | RANDOM | STATEFUL
"""Ops that are not run again; their results are drawn."""
FORMS = ("any", "one of each row", "one of all", "alike")
"""Forms of inputs: all elements random, one nonzero element in each row or in all, equal rows."""
FEW_UPSTREAM = 1 << 20
"""The most elements upstream for which every magnitude and form is tried: 24 runs then take less than a second.
Above, only numbers whose squares vanish are tried."""


def leaves_range(var: Var, seed: int) -> str:
    """Return an element that a value takes outside its range, in words; "" where none was found."""
    low, high = stored_interval(var)
    ops, boundary = _ops_upstream(var)
    if not ops or (low, high) == ANY:
        return ""
    run = Evaluator(ops, [var], "fp16")
    for numbers in _range_inputs(boundary, ops, seed):
        try:
            (values,) = run(numbers)
        except InterpretError:
            continue  # places or lengths that do not go together
        held = values.double()[~torch.isnan(values)]
        beyond = held[(held < low) | (held > high)]
        if beyond.numel():
            return f"%{var.name} is {float(beyond[0]):.9g}, outside of {low:.9g} to {high:.9g}"
    return ""


def _ops_upstream(var: Var) -> tuple[list[Operation], list[Var]]:
    """Return the nearest ops that compute a value, in order, and the values that they read."""
    near, level = dict[Operation, None](), [var]
    while level and len(near) < STEPS:
        makers = dict.fromkeys(v.op for v in level if v.op is not None and _is_followed(v.op))
        level = [v for op in makers if op not in near for v in reads(op)]
        near |= makers
    inside = {v for op in near for v in op.outputs}
    read = dict.fromkeys(v for op in near for v in reads(op) if v not in inside)
    ops = slice_back([var], set(read))
    return ops, [v for v in read if v.op is None or v.op.op_type != "const"]


def _is_followed(op: Operation) -> bool:
    if op.op_type == "const" or op.op_type in UNFOLLOWED or op.blocks:
        return False
    return op.op_type not in CONTRACTIONS or any(stored_interval(v) != ANY for v in op.outputs)


def _range_inputs(boundary: Sequence[Var], ops: Sequence[Operation], seed: int) -> Iterator[Numbers]:
    """Yield inputs that may leave the range, round by round."""
    if not all(is_tensor(v) for v in boundary):
        return
    drawing, rng = Drawing(lambda var, rng: None), np.random.default_rng(seed)
    values = (v for op in ops for v in op.outputs if types.is_tensor(v.sym_type))
    is_small = sum(math.prod(drawn_shape(v)) for v in values) <= FEW_UPSTREAM
    for magnitude_index, form in product(
        range(len(_magnitudes(np.dtype(np.float16)))) if is_small else (0,), FORMS
    ):
        numbers: Numbers = {}
        for var in boundary:
            dtype = np_dtype(var)
            if dtype.kind != "f":
                numbers[var] = as_tensor(drawing.draw(var, "normal", rng))
                continue
            drawn = _numbers_of_form(form, drawn_shape(var), rng) * _magnitudes(dtype)[magnitude_index]
            with np.errstate(over="ignore"):
                numbers[var] = as_tensor(drawing.bounded(var, drawn, dtype))
        yield numbers


def _magnitudes(dtype: np.dtype[np.floating]) -> tuple[float, ...]:
    """Return the magnitudes to try for a dtype, those whose squares vanish first, up to the largest."""
    info = np.finfo(dtype)
    least, normal, most = (float(v) for v in (info.smallest_subnormal, info.tiny, info.max))
    return math.sqrt(least), math.sqrt(normal), 1.0, 64.0, math.sqrt(most), most


def _numbers_of_form(form: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Return numbers of magnitude 1 to 2 in one of `FORMS`."""
    numbers = np.asarray(rng.uniform(0.25, 2.0, shape) * rng.choice([-1.0, 1.0], shape))
    if not numbers.size or form == "any":
        return numbers
    rows = numbers.reshape(-1, shape[-1] if shape else 1)
    if form == "alike":
        return np.broadcast_to(rows[:, :1], rows.shape).reshape(shape)
    alone = np.zeros_like(rows)
    kept = len(rows) if form == "one of each row" else 1
    at = np.arange(kept), rng.integers(rows.shape[1], size=kept)
    alone[at] = rows[at]
    return alone.reshape(shape)


# -- small domains, ranges of integers, and constants -----------------------------------------------------

WHOLE = 1024
"""The most combinations of values that are all tried: ten booleans, or two integers of five bits. A choice."""
MOST_SWEPT = 1 << 25
"""The most numbers read, over all rounds, to try each value of a range once: 134 MB of fp32. A choice between
certainty and the time of a check."""
INTEGER_DRAWS = 16
"""How often a pass's integers are drawn to see their range. A value in every second draw is missed with a
probability of 1 in 65,536."""
ENDS = 0.1
"""Share of draws that must be the least and the largest value for these to count as ends of a range: of
integers spread over ten values or more, fewer are ends by chance."""


def values_of(var: Var, drawing: Drawing) -> range | None:
    """Return the values that each element of a boolean or integer input may have; None where unknown."""
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
    """Return all combinations of input values of a site; None where these are too many, or unknown."""
    choices = [values_of(var, drawing) for var in drawn]
    countable = [c for c in choices if c is not None]
    if not drawn or len(countable) < len(drawn):
        return None
    if any(any_symbolic(v.shape or ()) for v in drawn) or any(map(_draws_some_integers, ops)):
        return None
    sizes = [math.prod(drawn_shape(var)) for var in drawn]
    elements = [c for c, size in zip(countable, sizes, strict=True) for _ in range(size)]
    total = math.prod(map(len, elements)) if len(elements) <= WHOLE else math.inf
    return _all_combinations(drawn, elements, int(total)) if total <= WHOLE else None


def _draws_some_integers(op: Operation) -> bool:
    """Return whether an op reads integers of which only some are drawn, such as positions or indices."""
    for name, value in op.inputs.items():
        if name in ADDRESSES and not isinstance(value, (list, tuple)) and constant(value) is None:
            return True
    if op.op_type not in LOOKUPS:
        return op.op_type.startswith("scatter")
    index, table = (op.inputs[name] for name in LOOKUPS[op.op_type])
    counts_back = op.opset_version < ct.target.iOS17 and stored_interval(index)[0] < 0
    return constant(index) is None and (counts_back or any_symbolic(table.shape))


def _all_combinations(drawn: Sequence[Var], elements: Sequence[range], total: int) -> Iterator[Numbers]:
    """Yield all combinations of element values, counting through them."""
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


def compare_all(sides: BothSides, combinations: Iterator[Numbers], promise: Promise) -> Difference:
    """Return the worst difference over all combinations, or up to the first that breaks the promise."""
    worst = Difference()
    for numbers in combinations:
        parts = [
            difference(old, new, _nan_mask(old), finite_only=not promise.tolerates_nonfinite)
            for old, new in sides.run(numbers)
        ]
        worst.add(parts, numbers)
        if not worst.within(promise):
            break
    return worst


def sweep(
    sides: BothSides, drawing: Drawing, worst: Difference, rng: np.random.Generator, promise: Promise
) -> None:
    """Run with each value of an integer range once, at some position, where that costs little."""
    drawn = sides.drawn
    cost = sum(math.prod(drawn_shape(v)) for v in drawn) + largest_constant([*sides.old_ops, *sides.new_ops])
    for var in drawn:
        count = math.prod(drawn_shape(var))
        values: Sequence[int] = _drawn_range(var, drawing, rng) if np_dtype(var).kind in "iu" and count else ()
        values = values or (
            rows_read([*sides.old_ops, *sides.new_ops]) if _is_free(var, drawing) and count else ()
        )
        rounds = -(-len(values) // max(count, 1))
        if rounds * cost > MOST_SWEPT:  # then those alone that tell both sides apart
            values = _differing_values(sides, drawing, var, values, rng)
            rounds = -(-len(values) // count)
        if not rounds:
            continue
        every = np.resize(np.array(values, np_dtype(var)), (rounds, *drawn_shape(var)))
        for values_here in every:
            _add_round(
                sides,
                drawn_numbers(drawn, drawing, "normal", rng) | {var: as_tensor(values_here)},
                worst,
                promise,
            )
            if not worst.within(promise):
                return


def _is_free(var: Var, drawing: Drawing) -> bool:
    """Return whether a value is an integer without a known range."""
    unknown = np_dtype(var).kind in "iu" and var not in (drawing.bounds or {})
    return unknown and drawing.sample(var, np.random.default_rng(0)) is None


def _differing_values(
    sides: BothSides, drawing: Drawing, var: Var, values: Sequence[int], rng: np.random.Generator
) -> list[int]:
    """Return the integers of a range at which both sides differ, beside one draw of all other inputs."""
    others = drawn_numbers([v for v in sides.drawn if v is not var], drawing, "normal", rng)
    assert isinstance(values, range)
    return apart_at(lambda x: sides.run(others | {var: x}), var, values, [*sides.old_ops, *sides.new_ops])


def aim(
    sides: BothSides, drawing: Drawing, worst: Difference, rng: np.random.Generator, promise: Promise
) -> None:
    """Run with floats and integers set to each constant of both sides, where that costs little."""
    constants = targets([*sides.old_ops, *sides.new_ops])
    cost = sum(math.prod(drawn_shape(v)) for v in sides.drawn) + largest_constant(
        [*sides.old_ops, *sides.new_ops]
    )
    spent = 0
    for values in aimed(sides.drawn, drawing, constants, rng, apart=promise.tolerance.rtol > 0):
        spent += cost
        if spent > MOST_SWEPT:
            worst.untried = (*worst.untried, "each constant")
            return
        numbers = drawn_numbers(sides.drawn, drawing, "normal", rng)
        _add_round(sides, numbers | {v: as_tensor(x) for v, x in values.items()}, worst, promise)
        if not worst.within(promise):
            return


def _add_round(sides: BothSides, numbers: Numbers, worst: Difference, promise: Promise) -> None:
    """Run one more round, unless the old side overflows and the pass promises only a tolerance."""
    pairs = sides.run(numbers)
    if promise.tolerance.rtol and any(bool(torch.isinf(old).any()) for old, _ in pairs):
        return  # a sum in another order may overflow elsewhere
    worst.add(measured(sides, numbers, pairs, [_nan_mask(old) for old, _ in pairs], promise), numbers)


def _drawn_range(var: Var, drawing: Drawing, rng: np.random.Generator) -> range:
    """Return the range of the integers that are drawn for a value; empty where it is unknown."""
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


def _nan_mask(old: torch.Tensor) -> torch.Tensor | None:
    return torch.isnan(old) if old.is_floating_point() else None


# -- fp16 -------------------------------------------------------------------------------------------------
#
# Two sides can be the same function of real numbers and behave differently in fp16: a mean may be a sum
# divided by n, but the sum overflows first; the root of a sum of squares is not 0 although each square
# underflows. Such a magnitude is a precondition of the edit, which its report names. But a new side that loses
# digits of ordinary numbers, where the old side keeps them, is wrong.

ORDINARY, BOTH_SIGNS, ONE_SIGN, ALIKE = 1.0, (-1.0, 1.0), (0.5, 1.0), (0.98, 1.0)
"""The magnitude at which no digits may be lost; and between which shares of a magnitude numbers are drawn."""
TRIED = (
    *((ORDINARY, ends) for ends in (BOTH_SIGNS, ONE_SIGN, ALIKE)),
    *((64.0, ends) for ends in (ONE_SIGN, BOTH_SIGNS)),
    (250.0, BOTH_SIGNS),  # fp16 holds squares of such numbers, and not of their differences
    (1024.0, ONE_SIGN),
    *((magnitude, ends) for magnitude in (16384.0, 60000.0) for ends in (ONE_SIGN, BOTH_SIGNS)),
    *((magnitude, ONE_SIGN) for magnitude in (1e-2, 1e-3, 1e-4, 1e-6)),
)
"""Magnitudes to try, from ordinary numbers up, then small ones, each with the shares between which to draw."""
LOST = 1 / 8
"""Error, as a share of the largest number, at which most digits are lost: 3 of 11 bits are right then."""
FEW_NUMBERS = 1 << 16
"""The most numbers read, weights included, of a site that is tried. A choice: both sides run several times."""


@dataclass(frozen=True)
class Fp16Behavior:
    """What only the new side does in fp16."""

    overflow: float = math.inf
    """The first magnitude at which it overflows."""
    underflow: float = 0.0
    """The largest magnitude, below ordinary numbers, at which it loses most digits."""
    loses: float = 0.0
    """The first magnitude, from ordinary numbers on, at which it loses digits."""
    off: float = 0.0
    """Its error on ordinary numbers, as a share of the largest; 0 if it loses nothing there."""
    numbers: Numbers = field(default_factory=dict)
    """Ordinary inputs on which it loses digits."""
    pairs: Pairs = field(default_factory=list)
    """The results of both sides on these."""

    @property
    def example(self) -> str:
        """Ordinary inputs on which it loses digits, as Python; "" if it does not."""
        return f"# in fp16\n{written(self.numbers, self.pairs)}" if self.off else ""


def fp16_behavior(site: Site, drawing: Drawing, seed: int, promise: Promise) -> Fp16Behavior:
    """Return what only the new side does in fp16; nothing for sites without fp16 inputs, or large ones."""
    halves = [v for v in site.drawn if np_dtype(v) == np.float16]
    size = sum(math.prod(drawn_shape(v)) for v in site.drawn) + largest_constant([*site.old_ops, *site.new_ops])
    behavior, rng = Fp16Behavior(), np.random.default_rng(seed)
    if not halves or size > FEW_NUMBERS:
        return behavior
    sides = _SidesAsStored(site)
    for magnitude, ends in TRIED:
        if behavior.underflow if magnitude < ORDINARY else math.isfinite(behavior.overflow):
            continue
        numbers = drawn_numbers(site.drawn, drawing, "normal", rng)
        most = {v: min(magnitude, promise.limits.get(v, promise.magnitude)) for v in halves}
        numbers |= {v: _numbers_of_magnitude(v, most[v], ends, rng) for v in halves}
        try:
            behavior = _with_run(behavior, sides, numbers, magnitude, promise)
        except InterpretError:
            return behavior
        if behavior.off:
            return behavior
    return behavior


def _with_run(
    behavior: Fp16Behavior, sides: _SidesAsStored, numbers: Numbers, magnitude: float, promise: Promise
) -> Fp16Behavior:
    """Add what one more run shows."""
    pairs = sides.run(numbers)
    if magnitude < ORDINARY:
        return replace(behavior, underflow=magnitude * any(_loses_most_digits(a, b) for a, b in pairs))
    if any(_only_new_overflows(a, b) for a, b in pairs):
        return replace(behavior, overflow=magnitude)
    if behavior.loses or not (off := sides.digits_lost(numbers, pairs, promise)):
        return behavior
    if magnitude > ORDINARY:
        return replace(behavior, loses=magnitude)
    return replace(behavior, loses=magnitude, off=off, numbers=numbers, pairs=pairs)


class _SidesAsStored:
    """Both sides in fp16 as stored; and the old side in fp64."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._old, self._new = self._evaluators("fp16")

    def _evaluators(self, arithmetic: str | Double) -> tuple[Evaluator, Evaluator]:
        site = self.site
        old = evaluator(site.old_ops, [*(old for old, _ in site.replaced), *site.carried], arithmetic)
        return old, evaluator(site.new_ops, [new for _, new in site.replaced], arithmetic)

    def run(self, numbers: Numbers) -> Pairs:
        """Return the pairs (old value, new value)."""
        values = self._old(numbers)
        inner = dict(zip(self.site.carried, values[len(self.site.replaced) :], strict=True))
        return list(zip(values, self._new({**numbers, **inner}), strict=False))

    def digits_lost(self, numbers: Numbers, pairs: Pairs, promise: Promise) -> float:
        """Return the new side's error, as a share of the largest value, where the old side has no such error.

        The old side's error is that of its roundings, and that of half a unit in the last place of each
        operand.
        """
        least = max(promise.tolerance.rtol, SLACK * fp16.HALF_STEP)
        far = [i for i, (a, b) in enumerate(pairs) if _relative_error(a, b) > least]
        if not far or promise.tolerance.rtol == 0:
            return 0.0
        exact = self._evaluators(Double())[0](numbers)
        rounded = self._evaluators(Double(fp16.HALF_STEP))[0]
        draws = [rounded(numbers) for _ in range(DRAWS)]
        worst = 0.0
        for i in far:
            old, new = pairs[i]
            rounds = max(
                _relative_error(exact[i], old), *(_relative_error(exact[i], draw[i]) for draw in draws)
            )
            off = _relative_error(exact[i], new)
            worst = max(worst, off) if off > max(least, OWN * rounds) else worst
        return worst


def _numbers_of_magnitude(
    var: Var, magnitude: float, ends: tuple[float, float], rng: np.random.Generator
) -> torch.Tensor:
    """Return numbers around a magnitude within a value's range: the magnitude itself first, none near 0."""
    low, high = ends
    drawn = np.asarray(rng.uniform(max(low, 0.5), high, drawn_shape(var)) * magnitude)
    drawn.flat[:1] = magnitude
    signed = drawn * rng.choice([-1, 1], drawn.shape) if low < 0 else drawn
    return as_tensor(np.clip(signed, *stored_interval(var)).astype(np.float16))


def _only_new_overflows(old: torch.Tensor, new: torch.Tensor) -> bool:
    if old.shape != new.shape or not old.is_floating_point():
        return False
    return bool((torch.isfinite(old) & ~torch.isfinite(new)).any())


def _loses_most_digits(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Return whether numbers in the normal range of fp16 are off by more than rounding explains."""
    if old.shape != new.shape or not old.is_floating_point() or not old.numel():
        return False
    most = float(old.abs().max())
    return most >= fp16.NORMAL and bool(((old - new).abs() > LOST * most).any())


def _relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest number of `a`; 0 where that shows nothing."""
    if a.shape != b.shape or not a.is_floating_point() or not a.numel():
        return 0.0
    most, off = float(a.abs().max()), float((a.double() - b.double()).abs().max())
    return off / most if fp16.NORMAL <= most < math.inf and math.isfinite(off) else 0.0
