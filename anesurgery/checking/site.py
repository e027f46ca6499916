"""Check one edit (`check_site`): compare both sides before the old ops are removed, and grade the result.

The rewriting engine calls it for each edit that a pass makes. It tries, in order: a proof (bit for bit, or over
a prime field, `proofs`), all values of a small domain, and adversarial numbers (`numbers`). The cost is that of
the edit, not of the model: values that both sides read from outside are drawn at random, or stand for any
value.

Beside random inputs both sides run on chosen ones. There are four kinds of runs: the ops upstream, on inputs
that may leave the ranges on which the edit relies (`range_violation`); all values of a small domain
(`_compare_all`); each value of an integer range and each constant of both sides (`_sweep`, `_aim`); and every
magnitude in fp16 (`fp16_behavior`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from anesurgery.checking.addresses import (
    LARGEST_UNTESTED,
    Bounds,
    address_bounds,
    is_looked_up,
    largest_accepted,
)
from anesurgery.checking.adversarial import PEAKS, Drawing, Sampler, constants_of, rows_apart
from anesurgery.checking.aiming import aimed, all_combinations, drawn_range, targets
from anesurgery.checking.edit_sites import Site, lies_within, limits_of, on_fewer_rows, range_violation, site_of
from anesurgery.checking.fp16_behavior import Fp16Behavior, fp16_behavior
from anesurgery.checking.grades import PLAIN, EarlierChecks, Grade, Promise, SiteCheck, combined_check
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
    BothSides,
    Difference,
    Numbers,
    apart_at,
    as_tensor,
    compare_numbers,
    difference,
    drawn_numbers,
    measured,
    nan_mask,
    overflows,
    rows_read,
    shrunk,
)
from anesurgery.checking.proofs import AT_ONCE, MOST, NoProof, Proof, StandIns, prove, prove_for_any_weights
from anesurgery.checking.trial_lengths import lengths_to_try
from anesurgery.errors import InterpretError, Refusal, Refused
from anesurgery.interpret.arithmetic.constant_memory import trim_heap
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
MOST_SWEPT = 1 << 25
"""The most numbers read, over all rounds, to try each value of a range once: 134 MB of fp32. A choice between
certainty and the time of a check."""


@dataclass(frozen=True)
class _Request:
    """An edit to check, and how."""

    site: Site
    sample: Sampler
    seed: int
    promise: Promise
    declared: Declared

    def bounds(self) -> Bounds:
        """Return where the integers that address something must lie, at the lengths of the context."""
        return address_bounds(self.site.drawn, self.site.old_ops, set(self.site.new_ops))


def check_site(
    replaced: Sequence[tuple[Var, Var]],
    new_ops: Sequence[Operation],
    sample: Sampler,
    seed: int = 0,
    matched: Sequence[Operation] = (),
    earlier: EarlierChecks | None = None,
    promise: Promise = PLAIN,
    declared: Declared = NOTHING,
) -> SiteCheck | Refusal:
    """Compare each old value with its replacement; a refusal says why this edit cannot be compared.

    Args:
        replaced: pairs (old value, new value) of equal shape.
        new_ops: the ops that the rewrite made, in order.
        sample: returns values for a boundary var whose range matters (ids), or None for the default.
        seed: the seed of the random numbers.
        matched: the ops that the pass matched; what the new side reads of their results is computed, not drawn.
        earlier: checks of this pass; an edit that is the same computation is not run again.
        promise: what the pass promises about its edits.
        declared: the lengths that the model declares for dynamic axes.
    """
    site = site_of(replaced, new_ops, matched)
    if len(site.old_ops) > LARGEST_SITE:
        return Refusal(f"depends on {len(site.old_ops)} ops")
    earlier = EarlierChecks() if earlier is None else earlier
    request = _Request(site, sample, seed, promise, declared)
    if (proof := _proof_for_any_weights(request, earlier)) is not None:
        return proof
    result = _check_or_earlier_one(request, earlier)
    if isinstance(result, SiteCheck) and result.ranged and (violation := range_violation(site, seed)):
        return replace(result, max_abs=np.inf, max_rel=np.inf, counterexample=f"# {violation}")
    return result


def _check_or_earlier_one(request: _Request, earlier: EarlierChecks) -> SiteCheck | Refusal:
    """Return the check of the edit, or that of an earlier edit that is the same computation."""
    site, promise, results = request.site, request.promise, earlier.results
    limits = tuple((type(limit), limit) for limit in map(promise.limits.get, site.drawn))
    key = (fingerprint(site.replaced, site.old_ops, site.new_ops), _input_facts(request), limits)
    if key not in results:
        try:
            with _freeing_memory(site):
                results[key] = _check_on_fewer_rows(request) or _check_at_all_lengths(request)
        except Refused as reason:
            return Refusal(str(reason))
    return results[key]


def _check_on_fewer_rows(request: _Request) -> SiteCheck | None:
    """Check a large site on fewer rows, where these stand for all; None where that does not pass.

    Integers keep all their rows, since each is another position in a table. So do values that the pass samples.
    """
    site, rng = request.site, np.random.default_rng(request.seed)
    whole = {v for v in site.drawn if np_dtype(v).kind != "f" or request.sample(v, rng) is not None}
    # within the context, `drawn_shape` gives the smaller shapes; such a site has no symbols, so no lengths
    with on_fewer_rows(site, whole) as is_cut, suppress(InterpretError, Refused):
        result = _check_at_all_lengths(replace(request, declared=NOTHING)) if is_cut else None
        if isinstance(result, SiteCheck) and result.within(request.promise.tolerance):
            return result
    return None


def _proof_for_any_weights(request: _Request, earlier: EarlierChecks) -> SiteCheck | None:
    """Return the proof of the same edit with any weights; None where there is none."""
    site, seed = request.site, request.seed
    stand_ins = StandIns(site.old_ops, site.new_ops, seed)
    if not 0 < stand_ins.size <= MOST or symbols_of(site.drawn):
        return None
    if stand_ins.size > AT_ONCE:
        shape = fingerprint(site.replaced, site.old_ops, site.new_ops, dict.fromkeys(stand_ins.weights, 0))
        # only the first of many like edits is compared by numbers; from the second on, one proof is for all
        if shape not in earlier.shapes:
            earlier.shapes.add(shape)
            return None
    elif len(site.new_ops) > LARGEST_SITE:  # an unrolled loop: hardly a second one differs only in weights
        return None
    if not stand_ins.numbers:
        return None
    key = fingerprint(site.replaced, site.old_ops, site.new_ops, stand_ins.numbers)
    if key not in earlier.proofs:
        with _freeing_memory(site):
            proof = prove_for_any_weights(site, seed, stand_ins, finite=not request.promise.tolerates_nonfinite)
        earlier.proofs[key] = _bitwise_check(proof, seed) if isinstance(proof, Proof) else None
    return earlier.proofs[key]


@contextmanager
def _freeing_memory(site: Site) -> Iterator[None]:
    """Within the context, the check of a large edit runs; its memory is given back afterwards."""
    yield
    values = (v for op in site.ops for v in op.outputs if types.is_tensor(v.sym_type))
    if any(math.prod(drawn_shape(v)) > LARGE_VALUE for v in values):
        trim_heap()


def _bitwise_check(proof: Proof, seed: int) -> SiteCheck:
    """Return the result of a proof bit for bit."""
    check = SiteCheck(max_abs=0.0, max_rel=0.0, values=proof.elements, grade=Grade.BITS, bound=proof.bound)
    return replace(check, seed=seed, finite_only=proof.finite_only, ranged=proof.ranged)


def _input_facts(request: _Request) -> Hashable:
    """Return what a check depends on besides the ops: the ranges of what both sides read."""
    site, declared = request.site, request.declared
    drawable = [v for v in site.drawn if types.is_tensor(v.sym_type) or types.is_scalar(v.sym_type)]
    bounds = request.bounds()
    samples = (request.sample(v, np.random.default_rng(0)) for v in drawable)
    symbols = symbols_of(site.drawn)
    ranges = tuple(declared.range_of(s) for s in symbols)
    listed = tuple(tuple(lengths.values()) for lengths in declared.together(symbols))
    inputs = zip(drawable, samples, strict=True)
    of_inputs = tuple((stored_interval(v), _as_key(bounds.get(v)), _as_key(g)) for v, g in inputs)
    return ranges, listed, of_inputs


def _as_key(numbers: Any) -> Hashable:
    """Return numbers as a hashable key."""
    return None if numbers is None else np.asarray(numbers, np.float64).tobytes()


def _check_at_all_lengths(request: _Request) -> SiteCheck | Refusal:
    """Return the weakest result over the lengths tried for symbolic dimensions.

    Raises:
        InterpretError: the old side runs at no lengths, or the new side fails at the first ones.
    """
    site, checks = request.site, _ChecksByLength(request)
    results = [v for pair in site.replaced for v in pair]
    plan = lengths_to_try(site.drawn, (site.old_ops, site.new_ops), results, request.declared)
    for lengths in plan.first:
        if (result := checks.add(lengths, thorough=True)) is not None:
            return result
    if plan.alike and checks.weakest is not None and checks.can_improve:
        return checks.weakest  # proved at the first lengths, so at all
    for lengths in plan.others:
        if (result := checks.add(lengths, thorough=False)) is not None:
            return result
    if checks.weakest is None:
        assert checks.first_error is not None
        raise checks.first_error
    compared = [n for lengths in checks.compared_at for n in lengths.values()]
    return checks.weakest.on_lengths(min(compared), max(compared), plan.gap) if plan.gap else checks.weakest


@dataclass
class _ChecksByLength:
    """The checks of an edit at one length of its dynamic axes after the other."""

    request: _Request
    weakest: SiteCheck | None = None
    first_error: InterpretError | None = None
    compared_at: list[Lengths] = field(default_factory=list)

    @property
    def can_improve(self) -> bool:
        """Whether proofs decide the grade: no length has been checked by numbers alone."""
        return self.weakest is None or self.weakest.grade > Grade.NUMBERS

    def add(self, lengths: Lengths, *, thorough: bool) -> SiteCheck | Refusal | None:
        """Check the edit at some lengths.

        Returns:
            The result for all lengths: a difference, or why the sides cannot be compared; None to go on.

        Raises:
            InterpretError: the new side cannot be computed at the first lengths at which the old side can.
        """
        result: SiteCheck | Refusal | None
        with with_lengths(lengths):
            try:
                result = _strongest_check(self.request, proving=self.can_improve, thorough=thorough)
            except InterpretError as error:
                self.first_error = self.first_error or error
                old_side_runs = _old_side_runs(self.request)
                if old_side_runs and self.weakest is None:
                    raise
                result = self._failure_of_new_side(lengths, error) if old_side_runs else None
        if isinstance(result, SiteCheck):
            self.compared_at.append(lengths)
            self.weakest = result if self.weakest is None else combined_check(self.weakest, result)
            return None if self.weakest.within(self.request.promise.tolerance) else self.weakest
        if self.weakest is None:
            return None if self.first_error is not None else result
        if thorough:
            self.weakest = replace(self.weakest, untried=(*self.weakest.untried, "other sizes"))
        return None

    def _failure_of_new_side(self, lengths: Lengths, error: InterpretError) -> SiteCheck | None:
        """Return the difference that an error of the new side alone shows.

        Dimensions that were given different lengths may always be equal in the model; then it shows nothing.
        """
        if len(set(lengths.values())) > 1:
            return None
        size = next(iter(lengths.values()))
        why = f"# the new side cannot be computed where dynamic sizes are {size}: {str(error).splitlines()[0]}"
        return SiteCheck(np.inf, np.inf, 0, seed=self.request.seed, counterexample=why)


def _index_bounds(request: _Request) -> Bounds:
    """Return where integers must lie; for positions, up to where the old side accepts them."""
    site = request.site
    bounds = request.bounds()
    dynamic = {v for v in bounds if not is_looked_up(v, set(site.new_ops))}
    if not dynamic:
        return bounds
    if any(op.op_type in CLAMPING for op in site.old_ops):
        bounds = _widened_bounds(request, bounds)
    known = not any(np.max(bounds[v][1]) <= LARGEST_UNTESTED for v in dynamic)
    if known and _old_side_runs(request, bounds, TRIES):
        return bounds
    return bounds | largest_accepted(dynamic, lambda places: _old_side_runs(request, bounds | places))


def _widened_bounds(request: _Request, bounds: Bounds) -> Bounds:
    """Widen the bounds of integers that the old side clamps: to any integer, or to any from 0 up."""
    widened = dict(bounds)
    for var in bounds:
        if is_looked_up(var, set(request.site.new_ops)):
            continue
        largest = float(np.iinfo(np_dtype(var)).max)
        for least in (-largest, 0.0):
            if _old_side_runs(request, widened | {var: (least, largest)}, TRIES):
                widened[var] = least, largest
                break
    return widened


def _old_side_runs(request: _Request, bounds: Bounds | None = None, draws: int = 1) -> bool:
    """Return whether the old side can be computed on each of some draws within the bounds."""
    site = request.site
    drawing = Drawing(request.sample, (), request.bounds() if bounds is None else bounds)
    try:
        for seed in range(request.seed, request.seed + draws):
            numbers = drawn_numbers(site.drawn, drawing, "normal", np.random.default_rng(seed))
            evaluator(site.old_ops, [old for old, _ in site.replaced])(numbers)
    except InterpretError:
        return False
    return True


def _strongest_check(request: _Request, *, proving: bool, thorough: bool) -> SiteCheck | Refusal:
    """Return the strongest check that the site passes; without a proof of bits, numbers are compared too.

    Args:
        request: the edit, and how it is checked.
        proving: whether a proof can still raise the grade.
        thorough: whether all kinds of numbers are tried.
    """
    site, seed, promise = request.site, request.seed, request.promise
    try:
        sides = BothSides(
            site.replaced, site.old_ops, site.new_ops, site.drawn, site.carried, promise.tolerance.is_exact
        )
        proof: Proof | NoProof = NoProof("")
        if proving:
            proof = prove(site, seed, finite=not promise.tolerates_nonfinite)
        if isinstance(proof, Proof) and proof.grade is Grade.BITS and not proof.ranged:
            return _bitwise_check(proof, seed)
        check = _check_on_numbers(request, sides, thorough=thorough)
    except Unsupported as reason:
        return Refusal(str(reason))
    if isinstance(proof, NoProof):
        return replace(check, no_proof=proof.reason)
    if not check.within(promise.tolerance):
        return check
    if proof.grade is Grade.BITS:  # on ranges that the numbers did not contradict
        return _bitwise_check(proof, seed)
    return replace(check, grade=proof.grade, bound=proof.bound)


def _check_on_numbers(request: _Request, sides: BothSides, *, thorough: bool) -> SiteCheck:
    """Compare both sides on numbers: all values of a small domain, or adversarial ones."""
    site, seed, promise = request.site, request.seed, request.promise
    drawing = _drawing(request)
    all_values = all_combinations(site.drawn, drawing, site.ops)
    if all_values is not None:
        worst = _compare_all(sides, all_values, promise)
    else:
        rng = np.random.default_rng(seed)
        # where `_aim` and `_sweep` do not run, rows with a single number show what one place alone does
        worst = compare_numbers(sides, drawing, rng, promise, () if thorough else PEAKS)
        for extra_runs in (_aim, _sweep) if thorough else ():
            if worst.within(promise):
                extra_runs(sides, drawing, worst, rng, promise)
    passed = worst.within(promise)
    example = "" if passed else shrunk(sides, worst.numbers, promise)
    in_fp16 = fp16_behavior(sides, drawing, seed, promise) if passed and thorough else Fp16Behavior()
    example = example or in_fp16.example
    range_limits = limits_of(site, promise)
    unshown = {v: most for v, most in range_limits.items() if not lies_within(v, most)}
    return SiteCheck(
        worst.max_abs,
        max(worst.max_rel, in_fp16.error_on_ordinary),
        worst.values,
        Grade.NUMBERS if all_values is None or example else Grade.EXHAUSTIVE,
        seed=seed,
        finite_only=not promise.tolerates_nonfinite,
        magnitude=min(unshown.values(), default=np.inf),
        ranged=bool(range_limits) and not unshown,
        overflow=in_fp16.overflow,
        underflow=in_fp16.underflow,
        loses=in_fp16.loses_digits_at,
        left_out=worst.left_out,
        untried=worst.untried,
        counterexample=example,
    )


def _drawing(request: _Request) -> Drawing:
    """Return how numbers are drawn for a site."""
    site, promise = request.site, request.promise
    return Drawing(
        request.sample,
        constants_of(site.ops),
        _index_bounds(request),
        ordinary=not promise.tolerance.is_exact or not promise.tolerates_nonfinite,
        subnormals=not promise.tolerance.is_exact or promise.tolerates_nonfinite,
        magnitude=promise.magnitude,
        limits=promise.limits,
        rows={v: rows_apart(v, site.old_ops, v, site.new_ops) for v in site.drawn if np_dtype(v).kind in "iu"},
    )


# Small domains, ranges of integers, and constants.


def _compare_all(sides: BothSides, combinations: Iterator[dict[Var, Array]], promise: Promise) -> Difference:
    """Return the worst difference over all combinations, or up to the first that breaks the promise."""
    worst = Difference()
    for arrays in combinations:
        numbers: Numbers = {var: as_tensor(values) for var, values in arrays.items()}
        parts = [
            difference(old, new, nan_mask(old), finite_only=not promise.tolerates_nonfinite)
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
        is_unbounded = not in_range and var not in (drawing.bounds or {})
        if is_unbounded and drawing.sample(var, np.random.default_rng(0)) is None:
            in_range = rows_read(sides.ops)
        values: Sequence[int] = in_range
        rounds = -(-len(values) // count)
        if rounds * sides.numbers_read > MOST_SWEPT:  # then those alone that tell both sides apart
            values = _differing_values(sides, drawing, var, in_range, rng)
            rounds = -(-len(values) // count)
        if not rounds:
            continue
        # `resize` repeats values from the beginning until the last round is full
        for values_of_round in np.resize(np.array(values, np_dtype(var)), (rounds, *drawn_shape(var))):
            numbers = drawn_numbers(drawn, drawing, "normal", rng) | {var: as_tensor(values_of_round)}
            _add_round(sides, numbers, worst, promise)
            if not worst.within(promise):
                return


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
    for values in aimed(sides.drawn, drawing, targets(sides.ops), rng, apart=not promise.tolerance.is_exact):
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
    if not promise.tolerance.is_exact and overflows(pairs):
        return  # a sum in another order may overflow elsewhere
    worst.add(measured(sides, numbers, pairs, [nan_mask(old) for old, _ in pairs], promise), numbers)
