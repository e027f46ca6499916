"""Check one edit (`check_site`): compare both sides before the old ops are removed, and grade the result.

The rewriting engine calls it for each edit that a pass makes. It tries, in order: a proof (bit for bit, or over
a prime field, `proofs`), all values of a small domain, and adversarial numbers (`numbers`). The cost is that of
the edit, not of the model: values that both sides read from outside are drawn at random, or stand for any
value.

Beside random inputs both sides run on chosen ones. There are four kinds of runs: the ops upstream, on inputs
that may leave the ranges on which the edit relies (`range_violation`); all values of a small domain
(`_compare_all`); each value of an integer range and each constant of both sides (`_sweep`, `_aim`); and every
magnitude in fp16 (`_fp16_behavior`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.checking.addresses import AS_DRAWN, Bounds, address_bounds, is_looked_up, largest_accepted
from anesurgery.checking.adversarial import PEAKS, Drawing, Sampler, constants_of, rows_apart
from anesurgery.checking.aiming import aimed, all_combinations, drawn_range, targets
from anesurgery.checking.edit_sites import Site, on_fewer_rows, range_violation, site_of
from anesurgery.checking.grades import PLAIN, Grade, Promise, SiteCheck, UpperLimit, combined_check
from anesurgery.checking.lengths import (
    NOTHING,
    Declared,
    Lengths,
    drawn_shape,
    evaluator,
    symbols_of,
    with_lengths,
)
from anesurgery.checking.numbers import (
    OWN,
    SLACK,
    BothSides,
    Difference,
    Numbers,
    Pairs,
    apart_at,
    as_tensor,
    compare_numbers,
    difference,
    drawn_numbers,
    measured,
    rows_read,
    shrunk,
    written,
)
from anesurgery.checking.proofs import AT_ONCE, MOST, NoProof, Proof, StandIns, prove, prove_for_any_weights
from anesurgery.checking.trial_lengths import lengths_to_try, shortest_and_longest
from anesurgery.errors import InterpretError, Refusal, Refused
from anesurgery.interpret.arithmetic.constant_memory import trim_heap
from anesurgery.interpret.arithmetic.precision import Double
from anesurgery.interpret.table import Unsupported
from anesurgery.mil import Array, Operation, Var, np_dtype, types
from anesurgery.semantics.fingerprint import fingerprint
from anesurgery.semantics.intervals import stored_interval

LARGEST_SITE = 400
"""The most ops on the old side of an edit that is checked by itself (`prove="model"` covers larger ones)."""
CLAMPING = frozenset({"slice_by_size", "slice_by_index", "slice_update"})
"""Ops that clamp positions which lie outside."""
LARGE_VALUE = 1 << 20
"""Elements of a value above which memory is given back after the check: 4 MB of fp32. For small values the call
costs more than it gives."""
TRIES = 4
"""How often positions are drawn to see that the old side accepts them. A choice: where most positions are out
of range, the first draw shows it."""

# -- small domains, ranges of integers, and constants -----------------------------------------------------

MOST_SWEPT = 1 << 25
"""The most numbers read, over all rounds, to try each value of a range once: 134 MB of fp32. A choice between
certainty and the time of a check."""


def _compare_all(sides: BothSides, combinations: Iterator[dict[Var, Array]], promise: Promise) -> Difference:
    """Return the worst difference over all combinations, or up to the first that breaks the promise."""
    worst = Difference()
    for arrays in combinations:
        numbers: Numbers = {var: as_tensor(values) for var, values in arrays.items()}
        parts = [
            difference(old, new, _nan_mask(old), finite_only=not promise.tolerates_nonfinite)
            for old, new in sides.run(numbers)
        ]
        worst.add(parts, numbers)
        if not worst.within(promise):
            break
    return worst


def _sweep(
    sides: BothSides, drawing: Drawing, worst: Difference, rng: np.random.Generator, promise: Promise
) -> None:
    """Run with each value of an integer range once, at some place, where that costs little; add to `worst`."""
    drawn = sides.drawn
    for var in drawn:
        count = math.prod(drawn_shape(var))
        if np_dtype(var).kind not in "iu" or not count:
            continue
        in_range = drawn_range(var, drawing, rng)
        if not in_range and _is_free(var, drawing):
            in_range = rows_read(sides.ops)
        values: Sequence[int] = in_range
        rounds = -(-len(values) // count)
        if rounds * sides.numbers_read > MOST_SWEPT:  # then those alone that tell both sides apart
            values = _differing_values(sides, drawing, var, in_range, rng)
            rounds = -(-len(values) // count)
        if not rounds:
            continue
        for values_of_round in np.resize(np.array(values, np_dtype(var)), (rounds, *drawn_shape(var))):
            numbers = drawn_numbers(drawn, drawing, "normal", rng) | {var: as_tensor(values_of_round)}
            _add_round(sides, numbers, worst, promise)
            if not worst.within(promise):
                return


def _is_free(var: Var, drawing: Drawing) -> bool:
    """Return whether a value is an integer without a known range."""
    unknown = np_dtype(var).kind in "iu" and var not in (drawing.bounds or {})
    return unknown and drawing.sample(var, np.random.default_rng(0)) is None


def _differing_values(
    sides: BothSides, drawing: Drawing, var: Var, values: range, rng: np.random.Generator
) -> list[int]:
    """Return the integers of a range at which both sides differ, beside one draw of all other inputs."""
    others = drawn_numbers([v for v in sides.drawn if v is not var], drawing, "normal", rng)
    return apart_at(lambda x: sides.run(others | {var: x}), var, values, sides.ops)


def _aim(
    sides: BothSides, drawing: Drawing, worst: Difference, rng: np.random.Generator, promise: Promise
) -> None:
    """Run with numbers set to each constant of both sides, where that costs little; add to `worst`."""
    cost, numbers_read = sides.numbers_read, 0
    for values in aimed(sides.drawn, drawing, targets(sides.ops), rng, apart=promise.tolerance.rtol > 0):
        numbers_read += cost
        if numbers_read > MOST_SWEPT:
            worst.untried = (*worst.untried, "each constant")
            return
        numbers = drawn_numbers(sides.drawn, drawing, "normal", rng)
        _add_round(sides, numbers | {v: as_tensor(x) for v, x in values.items()}, worst, promise)
        if not worst.within(promise):
            return


def _add_round(sides: BothSides, numbers: Numbers, worst: Difference, promise: Promise) -> None:
    """Add one more round to `worst`, unless the old side overflows and the pass promises only a tolerance."""
    pairs = sides.run(numbers)
    if promise.tolerance.rtol and any(bool(torch.isinf(old).any()) for old, _ in pairs):
        return  # a sum in another order may overflow elsewhere
    worst.add(measured(sides, numbers, pairs, [_nan_mask(old) for old, _ in pairs], promise), numbers)


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
class _Fp16Behavior:
    """What only the new side does in fp16."""

    overflow: float = math.inf
    """The first magnitude at which it overflows."""
    underflow: float = 0.0
    """The largest magnitude, below ordinary numbers, at which it loses most digits."""
    loses_digits_at: float = 0.0
    """The first magnitude, from ordinary numbers on, at which it loses digits."""
    error_on_ordinary: float = 0.0
    """Its error on ordinary numbers, as a share of the largest; 0 if it loses nothing there."""
    numbers: Numbers = field(default_factory=dict)
    """Ordinary inputs on which it loses digits."""
    pairs: Pairs = field(default_factory=list)
    """The results of both sides on these."""

    @property
    def example(self) -> str:
        """Ordinary inputs on which it loses digits, as Python; "" if it does not."""
        return f"# in fp16\n{written(self.numbers, self.pairs)}" if self.error_on_ordinary else ""


def _fp16_behavior(sides: BothSides, drawing: Drawing, seed: int, promise: Promise) -> _Fp16Behavior:
    """Return what only the new side does in fp16; nothing for sites without fp16 inputs, or large ones."""
    halves = [v for v in sides.drawn if np_dtype(v) == np.float16]
    behavior, rng = _Fp16Behavior(), np.random.default_rng(seed)
    if not halves or sides.numbers_read > FEW_NUMBERS:
        return behavior
    as_stored = replace(sides, precision="fp16")
    for magnitude, ends in TRIED:
        if magnitude < ORDINARY and behavior.underflow > 0:
            continue  # the first of the small magnitudes is the largest
        if magnitude >= ORDINARY and math.isfinite(behavior.overflow):
            continue
        numbers = drawn_numbers(sides.drawn, drawing, "normal", rng)
        most = {v: min(magnitude, promise.limits.get(v, promise.magnitude)) for v in halves}
        numbers |= {v: _numbers_of_magnitude(v, most[v], ends, rng) for v in halves}
        try:
            behavior = _after_run(behavior, as_stored, numbers, magnitude, promise)
        except InterpretError:
            return behavior
        if behavior.error_on_ordinary:
            return behavior
    return behavior


def _after_run(
    behavior: _Fp16Behavior, sides: BothSides, numbers: Numbers, magnitude: float, promise: Promise
) -> _Fp16Behavior:
    """Return the behavior with what one more run shows."""
    pairs = sides.run(numbers)
    if magnitude < ORDINARY:
        underflows = any(_loses_most_digits(old, new) for old, new in pairs)
        return replace(behavior, underflow=magnitude if underflows else 0.0)
    if any(_only_new_overflows(old, new) for old, new in pairs):
        return replace(behavior, overflow=magnitude)
    if behavior.loses_digits_at or not (error := _error_of_new_side(sides, numbers, pairs, promise)):
        return behavior
    if magnitude > ORDINARY:
        return replace(behavior, loses_digits_at=magnitude)
    return replace(behavior, loses_digits_at=magnitude, error_on_ordinary=error, numbers=numbers, pairs=pairs)


def _error_of_new_side(sides: BothSides, numbers: Numbers, pairs: Pairs, promise: Promise) -> float:
    """Return the new side's error, as a share of the largest value, where the old side has no such error.

    The old side's error is that of its roundings, and that of half a unit in the last place of each operand.
    """
    least = max(promise.tolerance.rtol, SLACK * fp16.HALF_STEP)
    differing = [i for i, (old, new) in enumerate(pairs) if _relative_error(old, new) > least]
    if not differing or promise.tolerance.rtol == 0:
        return 0.0
    exact = sides.evaluators(Double())[0](numbers)
    draws = sides.spread(numbers, fp16.HALF_STEP)
    worst = 0.0
    for i in differing:
        old, new = pairs[i]
        error_of_old = max(_relative_error(exact[i], value) for value in (old, *(draw[i] for draw in draws)))
        error_of_new = _relative_error(exact[i], new)
        if error_of_new > max(least, OWN * error_of_old):
            worst = max(worst, error_of_new)
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


def _are_floats_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two values are floats of one shape that has elements."""
    return a.shape == b.shape and a.is_floating_point() and a.numel() > 0


def _only_new_overflows(old: torch.Tensor, new: torch.Tensor) -> bool:
    return _are_floats_alike(old, new) and bool((torch.isfinite(old) & ~torch.isfinite(new)).any())


def _loses_most_digits(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Return whether numbers in the normal range of fp16 are off by more than rounding explains."""
    if not _are_floats_alike(old, new):
        return False
    most = float(old.abs().max())
    return most >= fp16.NORMAL and bool(((old - new).abs() > LOST * most).any())


def _relative_error(exact: torch.Tensor, value: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest number of `exact`; 0 where that shows nothing."""
    if not _are_floats_alike(exact, value):
        return 0.0
    most, error = float(exact.abs().max()), float((exact.double() - value.double()).abs().max())
    return error / most if fp16.NORMAL <= most < math.inf and math.isfinite(error) else 0.0


# -- the check of an edit ----------------------------------------------------------------------------------


def check_site(
    replaced: Sequence[tuple[Var, Var]],
    new_ops: Sequence[Operation],
    sample: Sampler,
    seed: int = 0,
    matched: Sequence[Operation] = (),
    memo: dict[Hashable, SiteCheck | Refusal] | None = None,
    promise: Promise = PLAIN,
    declared: Declared = NOTHING,
) -> SiteCheck | Refusal:
    """Compare each old value with its replacement; a refusal says why this edit cannot be compared.

    Args:
        replaced: pairs (old value, new value) of equal shape.
        new_ops: the ops that the rewrite made, in order.
        sample: returns values for a boundary var whose range matters (ids), or None for the default.
        seed: the seed of the random numbers.
        matched: the ops of the match; their results are computed, even where the new side reads them.
        memo: checks of this pass by fingerprint; an edit that is the same computation is not run again.
        promise: what the pass promises about its edits.
        declared: the lengths that the model declares for dynamic axes.
    """
    site = site_of(replaced, new_ops, matched)
    if len(site.old_ops) > LARGEST_SITE:
        return Refusal(f"depends on {len(site.old_ops)} ops")
    memo = {} if memo is None else memo
    proof = _proof_for_any_weights(site, seed, promise, memo)
    if isinstance(proof, SiteCheck):
        return proof
    result = _memoized_check(site, sample, seed, promise, declared, memo)
    if isinstance(result, SiteCheck) and result.ranged and (violation := range_violation(site, seed)):
        return replace(result, max_abs=np.inf, max_rel=np.inf, counterexample=f"# {violation}")
    return result


def _memoized_check(
    site: Site,
    sample: Sampler,
    seed: int,
    promise: Promise,
    declared: Declared,
    memo: dict[Hashable, SiteCheck | Refusal],
) -> SiteCheck | Refusal:
    """Return the check of the edit, or that of an earlier edit that is the same computation."""
    limits = tuple((type(limit), limit) for limit in map(promise.limits.get, site.drawn))
    key = (fingerprint(site.replaced, site.old_ops, site.new_ops), _input_facts(site, sample, declared), limits)
    if key not in memo:
        try:
            with _freeing_memory(site):
                memo[key] = _check_on_fewer_rows(site, sample, seed, promise) or _check_at_all_lengths(
                    site, sample, seed, promise, declared
                )
        except Refused as reason:
            return Refusal(str(reason))
    return memo[key]


def _check_on_fewer_rows(site: Site, sample: Sampler, seed: int, promise: Promise) -> SiteCheck | None:
    """Check a large site on fewer rows, where these stand for all; None where that does not pass.

    Integers keep all their rows, since each is another position in a table. So do values that the pass samples.
    """
    rng = np.random.default_rng(seed)
    whole = {v for v in site.drawn if np_dtype(v).kind != "f" or sample(v, rng) is not None}
    with on_fewer_rows(site, whole) as cut, suppress(InterpretError, Refused):
        result = _check_at_all_lengths(site, sample, seed, promise, NOTHING) if cut else None
        if isinstance(result, SiteCheck) and result.within(promise.tolerance):
            return result
    return None


def _proof_for_any_weights(
    site: Site, seed: int, promise: Promise, memo: dict[Hashable, SiteCheck | Refusal]
) -> SiteCheck | Refusal:
    """Return the proof of the same edit with any weights, or why there is none."""
    stand_ins = StandIns(site.old_ops, site.new_ops, seed)
    if not 0 < stand_ins.size <= MOST or symbols_of(site.drawn):
        return Refusal(f"{stand_ins.size} weights, or shapes that are not static")
    if stand_ins.size > AT_ONCE:
        shape = fingerprint(site.replaced, site.old_ops, site.new_ops, dict.fromkeys(stand_ins.weights, 0))
        # only the first of many like edits is compared by numbers; from the second on, one proof is for all
        if ("met", shape) not in memo:
            return memo.setdefault(("met", shape), Refusal("no other edit is like it so far"))
    if not stand_ins.numbers:
        return Refusal("no weights")
    key = fingerprint(site.replaced, site.old_ops, site.new_ops, stand_ins.numbers)
    if key not in memo:
        with _freeing_memory(site):
            proof = prove_for_any_weights(site, seed, stand_ins, finite=not promise.tolerates_nonfinite)
        memo[key] = Refusal(proof.reason) if isinstance(proof, NoProof) else _bitwise_check(proof, seed)
    return memo[key]


@contextmanager
def _freeing_memory(site: Site) -> Iterator[None]:
    """Within the context, the check of a large edit runs; its memory is given back afterwards."""
    yield
    results = (v for op in site.ops for v in op.outputs)
    values = (v for v in results if types.is_tensor(v.sym_type))
    if any(math.prod(drawn_shape(v)) > LARGE_VALUE for v in values):
        trim_heap()


def _bitwise_check(proof: Proof, seed: int) -> SiteCheck:
    """Return the result of a proof bit for bit."""
    return SiteCheck(
        max_abs=0.0,
        max_rel=0.0,
        values=proof.elements,
        grade=Grade.BITS,
        bound=proof.bound,
        seed=seed,
        finite_only=proof.finite_only,
        ranged=proof.ranged,
    )


def _input_facts(site: Site, sample: Sampler, declared: Declared) -> Hashable:
    """Return what a check depends on besides the ops: the ranges of what both sides read."""
    drawable = [v for v in site.drawn if types.is_tensor(v.sym_type) or types.is_scalar(v.sym_type)]
    bounds = address_bounds(drawable, site.old_ops, set(site.new_ops))
    samples = (sample(v, np.random.default_rng(0)) for v in drawable)
    symbols = symbols_of(site.drawn)
    ranges = tuple(declared.range_of(s) for s in symbols)
    listed = tuple(tuple(lengths.values()) for lengths in declared.together(symbols))
    inputs = zip(drawable, samples, strict=True)
    of_inputs = tuple((stored_interval(v), _as_key(bounds.get(v)), _as_key(g)) for v, g in inputs)
    return ranges, listed, of_inputs


def _as_key(numbers: Any) -> Hashable:
    """Return numbers as a hashable key."""
    return None if numbers is None else np.asarray(numbers, np.float64).tobytes()


def _check_at_all_lengths(
    site: Site, sample: Sampler, seed: int, promise: Promise, declared: Declared
) -> SiteCheck | Refusal:
    """Return the weakest result over the lengths tried for symbolic dimensions.

    Raises:
        InterpretError: the old side runs at no lengths, or the new side fails at the first ones.
    """
    plan = lengths_to_try(
        site.drawn, (site.old_ops, site.new_ops), [v for pair in site.replaced for v in pair], declared
    )
    weakest: SiteCheck | None = None
    first_error: InterpretError | None = None
    compared_at = list[Lengths]()
    for number, lengths in enumerate(plan.all):
        if number == len(plan.first) and plan.alike and weakest is not None and weakest.grade > Grade.NUMBERS:
            return weakest
        with with_lengths(lengths):
            proving = weakest is None or weakest.grade > Grade.NUMBERS
            trial = _CheckAtLengths(seed, promise, proving, thorough=number < len(plan.first))
            try:
                result = _strongest_check(site, sample, trial)
            except InterpretError as error:
                first_error = first_error or error
                result = _judge_error(site, sample, seed, lengths, error, first=weakest is None)
        if isinstance(result, SiteCheck):
            compared_at.append(lengths)
            weakest = result if weakest is None else combined_check(weakest, result)
            if not weakest.within(promise.tolerance):
                return weakest
        elif weakest is None and first_error is None:
            return result  # the sides cannot be compared, at whatever lengths
        elif trial.thorough and weakest is not None:
            weakest = replace(weakest, untried=(*weakest.untried, "other sizes"))
    if weakest is None:
        assert first_error is not None
        raise first_error
    return weakest.on_lengths(*shortest_and_longest(compared_at), plan.gap) if plan.gap else weakest


@dataclass(frozen=True)
class _CheckAtLengths:
    """How both sides are compared at some lengths."""

    seed: int
    promise: Promise
    proving: bool = True
    """Whether a proof can still raise the grade."""
    thorough: bool = True
    """Whether all kinds of numbers are tried."""


def _judge_error(
    site: Site, sample: Sampler, seed: int, lengths: Lengths, error: InterpretError, *, first: bool
) -> SiteCheck | Refusal:
    """Return what an error at some lengths shows: a difference, if the old side can be computed there.

    Dimensions that were given different lengths may always be equal in the model, so that a new side which
    cannot be computed there shows nothing.

    Raises:
        InterpretError: the new side cannot be computed at the first lengths.
    """
    alike = len(set(lengths.values())) <= 1
    if (first or alike) and _old_side_runs(site, sample, seed):
        if first:
            raise error
        size = next(iter(lengths.values()))
        why = f"# the new side cannot be computed where dynamic sizes are {size}: {str(error).splitlines()[0]}"
        return SiteCheck(np.inf, np.inf, 0, seed=seed, counterexample=why)
    return Refusal("the old side has no meaning there")


def _index_bounds(site: Site, sample: Sampler, seed: int) -> Bounds:
    """Return where integers must lie; for positions, up to where the old side accepts them."""
    bounds = address_bounds(site.drawn, site.old_ops, set(site.new_ops))
    dynamic = {v for v in bounds if not is_looked_up(v, set(site.new_ops))}
    if not dynamic:
        return bounds
    if any(op.op_type in CLAMPING for op in site.old_ops):
        bounds = _widened_bounds(site, sample, seed, bounds)
    known = not any(np.max(bounds[v][1]) <= AS_DRAWN for v in dynamic)
    if known and all(_old_side_runs(site, sample, seed + i, bounds) for i in range(TRIES)):
        return bounds
    return bounds | largest_accepted(
        dynamic, lambda places: _old_side_runs(site, sample, seed, bounds | places)
    )


def _widened_bounds(site: Site, sample: Sampler, seed: int, bounds: Bounds) -> Bounds:
    """Widen the bounds of integers that the old side clamps: to any integer, or to any from 0 up."""
    for var in bounds:
        if is_looked_up(var, set(site.new_ops)):
            continue
        most = float(np.iinfo(np_dtype(var)).max)
        for least in (-most, 0.0):
            wide = bounds | {var: (least, most)}
            if all(_old_side_runs(site, sample, seed + i, wide) for i in range(TRIES)):
                bounds = wide
                break
    return bounds


def _old_side_runs(site: Site, sample: Sampler, seed: int, bounds: Bounds | None = None) -> bool:
    """Return whether the old side can be computed on numbers within the bounds."""
    if bounds is None:
        bounds = address_bounds(site.drawn, site.old_ops, set(site.new_ops))
    drawing = Drawing(sample, (), bounds)
    try:
        numbers = drawn_numbers(site.drawn, drawing, "normal", np.random.default_rng(seed))
        evaluator(site.old_ops, [old for old, _ in site.replaced])(numbers)
    except InterpretError:
        return False
    return True


def _strongest_check(site: Site, sample: Sampler, trial: _CheckAtLengths) -> SiteCheck | Refusal:
    """Return the strongest check that the site passes; without a proof of bits, numbers are compared too."""
    promise = trial.promise
    try:
        sides = BothSides(
            site.replaced, site.old_ops, site.new_ops, site.drawn, site.carried, promise.tolerance.rtol == 0
        )
        proof: Proof | NoProof = NoProof("")
        if trial.proving:
            proof = prove(site, trial.seed, finite=not promise.tolerates_nonfinite)
        if isinstance(proof, Proof) and proof.grade is Grade.BITS and not proof.ranged:
            return _bitwise_check(proof, trial.seed)
        check = _check_on_numbers(site, sides, sample, trial)
    except Unsupported as reason:
        return Refusal(str(reason))
    if isinstance(proof, NoProof):
        return replace(check, no_proof=proof.reason)
    if not check.within(promise.tolerance):
        return check
    if proof.grade is Grade.BITS:
        return _bitwise_check(proof, trial.seed)
    return replace(check, grade=proof.grade, bound=proof.bound)


def _check_on_numbers(site: Site, sides: BothSides, sample: Sampler, trial: _CheckAtLengths) -> SiteCheck:
    """Compare both sides on numbers: all values of a small domain, or adversarial ones."""
    seed, promise = trial.seed, trial.promise
    drawing = _drawing(site, sample, seed, promise)
    all_values = all_combinations(site.drawn, drawing, site.ops)
    if all_values is not None:
        worst = _compare_all(sides, all_values, promise)
    else:
        rng = np.random.default_rng(seed)
        worst = compare_numbers(sides, drawing, rng, promise, () if trial.thorough else PEAKS)
        for extra_runs in (_aim, _sweep) if trial.thorough else ():
            if worst.within(promise):
                extra_runs(sides, drawing, worst, rng, promise)
    passed = worst.within(promise)
    example = "" if passed else shrunk(sides, worst.numbers, promise)
    halves = _fp16_behavior(sides, drawing, seed, promise) if passed and trial.thorough else _Fp16Behavior()
    example = example or halves.example
    range_limits = limits_of(site, promise)
    unshown = {v: most for v, most in range_limits.items() if not lies_within(v, most)}
    return SiteCheck(
        worst.max_abs,
        max(worst.max_rel, halves.error_on_ordinary),
        worst.values,
        Grade.NUMBERS if all_values is None or example else Grade.EXHAUSTIVE,
        seed=seed,
        finite_only=not promise.tolerates_nonfinite,
        magnitude=min(unshown.values(), default=np.inf),
        ranged=bool(range_limits) and not unshown,
        overflow=halves.overflow,
        underflow=halves.underflow,
        loses=halves.loses_digits_at,
        left_out=worst.left_out,
        untried=worst.untried,
        counterexample=example,
    )


def _drawing(site: Site, sample: Sampler, seed: int, promise: Promise) -> Drawing:
    """Return how numbers are drawn for a site."""
    bounds = _index_bounds(site, sample, seed)
    return Drawing(
        sample,
        constants_of(site.ops),
        bounds,
        ordinary=promise.tolerance.rtol > 0 or not promise.tolerates_nonfinite,
        subnormals=promise.tolerance.rtol > 0 or promise.tolerates_nonfinite,
        magnitude=promise.magnitude,
        limits=promise.limits,
        rows={v: rows_apart(v, site.old_ops, v, site.new_ops) for v in site.drawn if np_dtype(v).kind in "iu"},
    )


def limits_of(site: Site, promise: Promise) -> dict[Var, float]:
    """Return float inputs -> the largest magnitude that the pass promises, where their dtype holds more."""
    if promise.magnitude == np.inf and not promise.limits:
        return {}
    floats = [v for v in site.drawn if np_dtype(v).kind == "f"]
    magnitudes = {v: promise.limits.get(v, promise.magnitude) for v in floats}
    return {v: most for v, most in magnitudes.items() if most < np.finfo(np_dtype(v)).max}


def lies_within(var: Var, most: float) -> bool:
    """Return whether the interval analysis shows that no element of a value exceeds a magnitude."""
    low, high = stored_interval(var)
    return high <= most and (isinstance(most, UpperLimit) or -most <= low)
