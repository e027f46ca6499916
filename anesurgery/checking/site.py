"""Check one edit: both sides are compared before the old ops are removed, and the result carries its grade.

What it costs is the size of the edit, not of the model: the values that both sides read from outside stand for
themselves, or are drawn.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from anesurgery.checking.adversarial import (
    AS_DRAWN,
    PEAKS,
    Bounds,
    Drawing,
    Sampler,
    address_bounds,
    constants_of,
    looked_up,
    places_taken,
    rows_apart,
)
from anesurgery.checking.grades import EXACT, PLAIN, REASSOCIATED, Grade, Promise, SiteCheck, Tolerance, weaker
from anesurgery.checking.lengths import (
    NOTHING,
    Declared,
    Lengths,
    drawn_shape,
    evaluator,
    symbols_of,
    with_lengths,
)
from anesurgery.checking.proofs import Site, on_fewer_rows, site_of
from anesurgery.checking.trial_lengths import plan_of, span
from anesurgery.errors import InterpretError, Refusal, Refused
from anesurgery.mil import Operation, Var, np_dtype, types
from anesurgery.semantics.fingerprint import fingerprint
from anesurgery.semantics.intervals import stored_interval

if TYPE_CHECKING:
    from anesurgery.checking.numbers import BothSides
    from anesurgery.checking.proofs import Proof

__all__ = ["EXACT", "LARGEST_SITE", "REASSOCIATED", "Tolerance", "check_site"]

LARGEST_SITE = 400
"""Ops on the old side above which an edit is not checked by itself (`prove="model"` covers it)."""


PLACED = frozenset({"slice_by_size", "slice_by_index", "slice_update"})
"""Ops that make places fit that lie outside; others make values as large as a number says."""
LARGE_VALUE = 1 << 20
"""Elements of a value of an edit above which memory is given back after its check: 4 MiB of fp32; to ask for it
costs more than it gives where values are small."""
TRIES = 4
"""How often such places are drawn to see that the old side takes them. A choice: a place that is out of range
is drawn at once where most are."""


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
        sample: gives values for a boundary var whose range matters (ids), or None for the default.
        seed: of the random numbers.
        matched: the ops of the match; what they make is computed, even where the new side reads it.
        memo: checks of this pass by fingerprint; an edit that is the same computation is not run again.
        promise: what the pass says about its edits.
        declared: the lengths that the model declares for dynamic axes.
    """
    site = site_of(replaced, new_ops, matched)
    if len(site.old_ops) > LARGEST_SITE:
        return Refusal(f"depends on {len(site.old_ops)} ops")
    memo = {} if memo is None else memo
    proof = _for_any_weights(site, seed, promise, memo)
    if isinstance(proof, SiteCheck):
        return proof
    result = _with_memo(site, sample, seed, promise, declared, memo)
    if isinstance(result, SiteCheck) and result.ranged and (left := _left_range(site, seed)):
        return dataclasses.replace(result, max_abs=np.inf, max_rel=np.inf, counterexample=f"# {left}")
    return result


def _with_memo(
    site: Site,
    sample: Sampler,
    seed: int,
    promise: Promise,
    declared: Declared,
    memo: dict[Hashable, SiteCheck | Refusal],
) -> SiteCheck | Refusal:
    """The check of the edit, or that of an earlier one that is the same computation."""
    limits = tuple(promise.limits.get(v) for v in site.drawn)
    key = (fingerprint(site.replaced, site.old_ops, site.new_ops), _facts(site, sample, declared), limits)
    if key not in memo:
        try:
            with _trimmed(site):
                memo[key] = _on_few(site, sample, seed, promise) or _checked(
                    site, sample, seed, promise, declared
                )
        except Refused as reason:
            return Refusal(str(reason))
    return memo[key]


def _on_few(site: Site, sample: Sampler, seed: int, promise: Promise) -> SiteCheck | None:
    """The check of a large site on fewer rows, where these stand for all; None where it does not pass."""

    def few(var: Var, rng: np.random.Generator) -> Any:
        values = sample(var, rng)
        return None if values is None else np.asarray(values)[tuple(map(slice, drawn_shape(var)))]

    with on_fewer_rows(site) as cut, suppress(InterpretError, Refused):
        result = _checked(site, few, seed, promise, NOTHING) if cut else None
        if isinstance(result, SiteCheck) and result.within(promise.tolerance):
            return result
    return None


def _left_range(site: Site, seed: int) -> str:
    """A number outside of a range that the check rests on, in words; empty where none was found."""
    from anesurgery.checking.upstream import leaves_range

    floats = (v for v in site.drawn if np_dtype(v).kind == "f")
    return next(filter(None, (leaves_range(v, seed) for v in floats)), "")


def _for_any_weights(
    site: Site, seed: int, promise: Promise, memo: dict[Hashable, SiteCheck | Refusal]
) -> SiteCheck | Refusal:
    """The proof of the same edit with any weights, or why there is none."""
    from anesurgery.checking.proofs import AT_ONCE, MOST, NoProof, StandIns, prove_for_any_weights

    stand_ins = StandIns(site.old_ops, site.new_ops, seed)
    if not 0 < stand_ins.size <= MOST or symbols_of(site.drawn):
        return Refusal(f"{stand_ins.size} weights, or shapes that are not static")
    if stand_ins.size > AT_ONCE:
        shape = fingerprint(site.replaced, site.old_ops, site.new_ops, dict.fromkeys(stand_ins.weights, 0))
        if ("met", shape) not in memo:
            return memo.setdefault(("met", shape), Refusal("no other edit is like it so far"))
    if not stand_ins.numbers:
        return Refusal("no weights")
    key = fingerprint(site.replaced, site.old_ops, site.new_ops, stand_ins.numbers)
    if key not in memo:
        with _trimmed(site):
            proof = prove_for_any_weights(site, seed, stand_ins, finite=not promise.tolerates_nonfinite)
        memo[key] = Refusal(proof.reason) if isinstance(proof, NoProof) else _of_bits(proof, seed)
    return memo[key]


@contextmanager
def _trimmed(site: Site) -> Iterator[None]:
    """Give back the memory that the check of a large edit took."""
    from anesurgery.interpret.arithmetic.precision import trim

    yield
    results = (v for op in (*site.old_ops, *site.new_ops) for v in op.outputs)
    values = (v for v in results if types.is_tensor(v.sym_type))
    if any(math.prod(drawn_shape(v)) > LARGE_VALUE for v in values):
        trim()


def _of_bits(proof: Proof, seed: int) -> SiteCheck:
    """What a proof bit for bit says."""
    check = SiteCheck(0.0, 0.0, proof.elements, Grade.BITS, proof.bound, seed, proof.finite_only)
    return dataclasses.replace(check, ranged=proof.ranged)


def _facts(site: Site, sample: Sampler, declared: Declared) -> Hashable:
    """What a check rests on besides the ops: where the values lie that both sides read."""
    drawable = [v for v in site.drawn if types.is_tensor(v.sym_type) or types.is_scalar(v.sym_type)]
    bounds = address_bounds(drawable, site.old_ops, set(site.new_ops))
    samples = (sample(v, np.random.default_rng(0)) for v in drawable)
    symbols = symbols_of(site.drawn)
    ranges = tuple(declared.range_of(s) for s in symbols)
    listed = tuple(tuple(one.values()) for one in declared.together(symbols))
    return (
        ranges,
        listed,
        tuple(
            (stored_interval(v), _exactly(bounds.get(v)), _exactly(g))
            for v, g in zip(drawable, samples, strict=True)
        ),
    )


def _exactly(numbers: Any) -> Hashable:
    """Numbers as a key."""
    return None if numbers is None else np.asarray(numbers, np.float64).tobytes()


def _checked(
    site: Site, sample: Sampler, seed: int, promise: Promise, declared: Declared
) -> SiteCheck | Refusal:
    """The weakest result over the lengths that symbolic dimensions stand for.

    Raises:
        InterpretError: no lengths suit the old side, or the first that do not the new one.
    """
    plan = plan_of(
        site.drawn, (site.old_ops, site.new_ops), [v for pair in site.replaced for v in pair], declared
    )
    weakest, error, tried = None, None, list[Lengths]()
    for number, lengths in enumerate(plan.all):
        if number == len(plan.first) and plan.alike and weakest is not None and weakest.grade > Grade.NUMBERS:
            return weakest
        with with_lengths(lengths):
            proving = weakest is None or weakest.grade > Grade.NUMBERS
            trial = _Trial(seed, promise, proving, thorough=number < len(plan.first))
            try:
                result = _at_lengths(site, sample, trial)
            except InterpretError as reason:
                error = error or reason
                result = _without_meaning(site, sample, seed, lengths, reason, first=weakest is None)
        if isinstance(result, SiteCheck):
            tried.append(lengths)
            weakest = result if weakest is None else weaker(weakest, result)
            if not weakest.within(promise.tolerance):
                return weakest
        elif weakest is None and error is None:
            return result
        elif trial.thorough and weakest is not None:
            weakest = dataclasses.replace(weakest, untried=(*weakest.untried, "other sizes"))
    if weakest is None:
        assert error is not None
        raise error
    return weakest.on_lengths(*span(tried), plan.gap) if plan.gap else weakest


@dataclasses.dataclass(frozen=True)
class _Trial:
    """How both sides are compared at some lengths."""

    seed: int
    promise: Promise
    proving: bool = True
    """May a proof still raise the grade?"""
    thorough: bool = True
    """Are all kinds of numbers tried?"""


def _without_meaning(
    site: Site, sample: Sampler, seed: int, lengths: Lengths, error: InterpretError, *, first: bool
) -> SiteCheck | Refusal:
    """What an error shows at some lengths: a difference, where the old side can be computed.

    Dimensions with lengths of their own may be equal for a reason upstream, so there a new side that cannot be
    computed shows nothing.

    Raises:
        InterpretError: the new side cannot be computed at the first lengths.
    """
    alike = len(set(lengths.values())) <= 1
    if (first or alike) and _has_meaning(site, sample, seed):
        if first:
            raise error
        size = next(iter(lengths.values()))
        why = f"# the new side cannot be computed where dynamic sizes are {size}: {str(error).splitlines()[0]}"
        return SiteCheck(np.inf, np.inf, 0, seed=seed, counterexample=why)
    return Refusal("the old side has no meaning there")


def _bounds(site: Site, sample: Sampler, seed: int) -> Bounds:
    """Where integers must lie; for places that the old side does not all take, up to where it takes each."""
    bounds = address_bounds(site.drawn, site.old_ops, set(site.new_ops))
    dynamic = {v for v in bounds if not looked_up(v, set(site.new_ops))}
    if not dynamic:
        return bounds
    if any(op.op_type in PLACED for op in site.old_ops):
        bounds = _widened(site, sample, seed, bounds)
    known = not any(np.max(bounds[v][1]) <= AS_DRAWN for v in dynamic)
    if known and all(_has_meaning(site, sample, seed + i, bounds) for i in range(TRIES)):
        return bounds
    return bounds | places_taken(dynamic, lambda places: _has_meaning(site, sample, seed, bounds | places))


def _widened(site: Site, sample: Sampler, seed: int, bounds: Bounds) -> Bounds:
    """The bounds, but for integers that the old side makes fit: these may be any, or any from 0 up."""
    for var in bounds:
        if looked_up(var, set(site.new_ops)):
            continue
        most = float(np.iinfo(np_dtype(var)).max)
        for least in (-most, 0.0):
            wide = bounds | {var: (least, most)}
            if all(_has_meaning(site, sample, seed + i, wide) for i in range(TRIES)):
                bounds = wide
                break
    return bounds


def _has_meaning(site: Site, sample: Sampler, seed: int, bounds: Bounds | None = None) -> bool:
    """Can the old side be computed by itself?"""
    from anesurgery.checking.numbers import drawn_numbers

    if bounds is None:
        bounds = address_bounds(site.drawn, site.old_ops, set(site.new_ops))
    drawing = Drawing(sample, (), bounds)
    try:
        numbers = drawn_numbers(site.drawn, drawing, "normal", np.random.default_rng(seed))
        evaluator(site.old_ops, [old for old, _ in site.replaced])(numbers)
    except InterpretError:
        return False
    return True


def _at_lengths(site: Site, sample: Sampler, trial: _Trial) -> SiteCheck | Refusal:
    """The result of the strongest check that the site passes; what is not bit for bit also meets numbers."""
    from anesurgery.checking.numbers import BothSides
    from anesurgery.checking.proofs import NoProof, Proof, prove
    from anesurgery.interpret import Unsupported

    promise = trial.promise
    try:
        sides = BothSides(
            site.replaced, site.old_ops, site.new_ops, site.drawn, site.carried, promise.tolerance.rtol == 0
        )
        proof: Proof | NoProof = NoProof("")
        if trial.proving:
            proof = prove(site, trial.seed, finite=not promise.tolerates_nonfinite)
        bits = isinstance(proof, Proof) and proof.grade is Grade.BITS
        if isinstance(proof, Proof) and bits and not proof.ranged:
            return _of_bits(proof, trial.seed)
        check = _on_numbers(site, sides, sample, trial)
    except Unsupported as reason:
        return Refusal(str(reason))
    if isinstance(proof, Proof) and bits and check.within(promise.tolerance):
        return _of_bits(proof, trial.seed)
    if not isinstance(proof, Proof):
        return dataclasses.replace(check, no_proof=proof.reason)
    if not check.within(promise.tolerance):
        return check
    return dataclasses.replace(check, grade=proof.grade, bound=proof.bound)


def _on_numbers(site: Site, sides: BothSides, sample: Sampler, trial: _Trial) -> SiteCheck:
    from anesurgery.checking.counterexample import shrunk
    from anesurgery.checking.domains import InHalves, aim, combinations, compare_all, in_halves, sweep
    from anesurgery.checking.numbers import compare_numbers

    seed, promise = trial.seed, trial.promise
    drawing = _drawing(site, sample, seed, promise)
    every = combinations(site.drawn, drawing, [*site.old_ops, *site.new_ops])
    if every is not None:
        worst = compare_all(sides, every, promise)
    else:
        rng = np.random.default_rng(seed)
        worst = compare_numbers(sides, drawing, rng, promise, () if trial.thorough else PEAKS)
        for more in (aim, sweep) if trial.thorough else ():
            if worst.within(promise):
                more(sides, drawing, worst, rng, promise)
    kept = worst.within(promise)
    example = "" if kept else shrunk(sides, worst.numbers, promise)
    halves = in_halves(site, drawing, seed, promise) if kept and trial.thorough else InHalves()
    example = example or halves.example
    limits = limits_of(site, promise)
    unshown = {v: most for v, most in limits.items() if not lies_within(v, most)}
    return SiteCheck(
        worst.max_abs,
        max(worst.max_rel, halves.off),
        worst.values,
        Grade.NUMBERS if every is None or example else Grade.EXHAUSTIVE,
        seed=seed,
        finite_only=not promise.tolerates_nonfinite,
        magnitude=min(unshown.values(), default=np.inf),
        ranged=bool(limits) and not unshown,
        overflow=halves.overflow,
        underflow=halves.underflow,
        loses=halves.loses,
        left_out=worst.left_out,
        untried=worst.untried,
        counterexample=example,
    )


def _drawing(site: Site, sample: Sampler, seed: int, promise: Promise) -> Drawing:
    """What to know for drawing at a site."""
    bounds = _bounds(site, sample, seed)
    return Drawing(
        sample,
        constants_of([*site.old_ops, *site.new_ops]),
        bounds,
        ordinary=promise.tolerance.rtol > 0 or not promise.tolerates_nonfinite,
        subnormals=promise.tolerance.rtol > 0 or promise.tolerates_nonfinite,
        magnitude=promise.magnitude,
        limits=promise.limits,
        rows={v: rows_apart(v, site.old_ops, v, site.new_ops) for v in site.drawn if np_dtype(v).kind in "iu"},
    )


def limits_of(site: Site, promise: Promise) -> dict[Var, float]:
    """Floats that a site reads, with the largest magnitude that is promised, where their types hold more."""
    if promise.magnitude == np.inf and not promise.limits:
        return {}
    floats = [v for v in site.drawn if np_dtype(v).kind == "f"]
    limits = {v: promise.limits.get(v, promise.magnitude) for v in floats}
    return {v: most for v, most in limits.items() if most < np.finfo(np_dtype(v)).max}


def lies_within(var: Var, most: float) -> bool:
    """Does the interval analysis show that no number of a value is larger?"""
    low, high = stored_interval(var)
    return -most <= low and high <= most
