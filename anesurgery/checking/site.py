"""Check one edit (`check_site`): compare both sides before the old ops are removed, and grade the result.

In order: a proof (bit for bit, or over a prime field), all values of a small domain, adversarial numbers. The
cost is that of the edit, not of the model: values that both sides read from outside are drawn, or stand for any
value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from anesurgery import fp16
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
from anesurgery.checking.edit_sites import Site, on_fewer_rows, site_of
from anesurgery.checking.grades import (
    EXACT,
    PLAIN,
    REASSOCIATED,
    AtMost,
    Grade,
    Promise,
    SiteCheck,
    Tolerance,
    combined_check,
)
from anesurgery.checking.lengths import (
    NOTHING,
    Declared,
    Lengths,
    drawn_shape,
    evaluator,
    symbols_of,
    with_lengths,
)
from anesurgery.checking.trial_lengths import plan_of, span
from anesurgery.errors import InterpretError, Refusal, Refused
from anesurgery.mil import Operation, Var, np_dtype, types
from anesurgery.semantics.fingerprint import fingerprint
from anesurgery.semantics.intervals import stored_interval

if TYPE_CHECKING:
    from anesurgery.checking.numbers import BothSides
    from anesurgery.checking.proofs import Proof


from dataclasses import dataclass, field, replace
from itertools import product

import torch

from anesurgery.checking.adversarial import ADDRESSES, aimed, targets, weights
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
from anesurgery.facts.dependence import slice_back
from anesurgery.interpret import Evaluator
from anesurgery.interpret.arithmetic.fp64 import Double
from anesurgery.interpret.sampling import LOOKUPS
from anesurgery.mil import Array, any_symbolic, constant, ct, reads
from anesurgery.ops import CONTRACTIONS, CONTROL, LISTS, RANDOM, STATEFUL
from anesurgery.semantics.bounds import ANY
from anesurgery.semantics.intervals import STEPS
from anesurgery.semantics.reading import is_tensor

__all__ = ["EXACT", "LARGEST_SITE", "REASSOCIATED", "Tolerance", "check_site"]

LARGEST_SITE = 400
"""Ops on the old side above which an edit is not checked by itself (`prove="model"` covers it)."""


PLACED = frozenset({"slice_by_size", "slice_by_index", "slice_update"})
"""Ops that make places fit that lie outside; others make values as large as a number says."""
LARGE_VALUE = 1 << 20
"""Elements of a value of an edit above which memory is given back after its check: 4 MB of fp32; to ask for it
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
    limits = tuple((type(limit), limit) for limit in map(promise.limits.get, site.drawn))
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
    """The check of a large site on fewer rows, where these stand for all; None where it does not pass.

    Integers keep theirs: each is another place of a table. So does what a pass draws by itself.
    """
    rng = np.random.default_rng(seed)
    whole = {v for v in site.drawn if np_dtype(v).kind != "f" or sample(v, rng) is not None}
    with on_fewer_rows(site, whole) as cut, suppress(InterpretError, Refused):
        result = _checked(site, sample, seed, promise, NOTHING) if cut else None
        if isinstance(result, SiteCheck) and result.within(promise.tolerance):
            return result
    return None


def _left_range(site: Site, seed: int) -> str:
    """A number outside of a range that the check rests on, in words; empty where none was found."""
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
    from anesurgery.interpret.arithmetic.constant_memory import trim_heap

    yield
    results = (v for op in (*site.old_ops, *site.new_ops) for v in op.outputs)
    values = (v for v in results if types.is_tensor(v.sym_type))
    if any(math.prod(drawn_shape(v)) > LARGE_VALUE for v in values):
        trim_heap()


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
            weakest = result if weakest is None else combined_check(weakest, result)
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
    from anesurgery.interpret.table import Unsupported

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
    from anesurgery.checking.numbers import compare_numbers, shrunk

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
    return high <= most and (isinstance(most, AtMost) or -most <= low)


# Try the ranges on which an edit rests: run the ops upstream, as stored, on numbers made to leave them.
#
# The interval analysis says where a value lies. The ops that it looked at are run in fp16 and fp32 as the
# program says, on numbers whose squares vanish or overflow, on rows with one number that is not 0, and on rows
# that do not vary. A number outside of the range is an error of the analysis, and nothing may rest on it.


UNFOLLOWED = CONTROL | LISTS | RANDOM | STATEFUL
"""Ops that are not run again: what they make stands for itself."""
FORMS = ("any", "one of each row", "one of all", "alike")
"""Which numbers are not 0, and how they differ."""
FEW_UPSTREAM = 1 << 20
"""Elements of all values upstream up to which every magnitude and form is tried: 24 runs of such ops take less
than a second. Of more, numbers whose squares vanish are tried alone."""


def leaves_range(var: Var, seed: int) -> str:
    """A number that a value takes outside of its range, in words; empty where none was found."""
    low, high = stored_interval(var)
    ops, boundary = _upstream(var)
    if not ops or (low, high) == ANY:
        return ""
    run = Evaluator(ops, [var], "fp16")
    for numbers in _tried(boundary, ops, seed):
        try:
            (values,) = run(numbers)
        except InterpretError:
            continue  # places or lengths that do not go together
        held = values.double()[~torch.isnan(values)]
        beyond = held[(held < low) | (held > high)]
        if beyond.numel():
            return f"%{var.name} is {float(beyond[0]):.9g}, outside of {low:.9g} to {high:.9g}"
    return ""


def _upstream(var: Var) -> tuple[list[Operation], list[Var]]:
    """The nearest ops that compute a value, in order, and the values that they read."""
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


def _tried(boundary: Sequence[Var], ops: Sequence[Operation], seed: int) -> Iterator[Numbers]:
    """Numbers for all that is read from outside, round by round."""
    if not all(is_tensor(v) for v in boundary):
        return
    drawing, rng = Drawing(lambda var, rng: None), np.random.default_rng(seed)
    values = (v for op in ops for v in op.outputs if types.is_tensor(v.sym_type))
    few = sum(math.prod(drawn_shape(v)) for v in values) <= FEW_UPSTREAM
    for share, form in product(range(len(_magnitudes(np.dtype(np.float16)))) if few else (0,), FORMS):
        numbers: Numbers = {}
        for var in boundary:
            dtype = np_dtype(var)
            if dtype.kind != "f":
                numbers[var] = as_tensor(drawing.draw(var, "normal", rng))
                continue
            drawn = _of_form(form, drawn_shape(var), rng) * _magnitudes(dtype)[share]
            with np.errstate(over="ignore"):
                numbers[var] = as_tensor(drawing.bounded(var, drawn, dtype))
        yield numbers


def _magnitudes(dtype: np.dtype[np.floating]) -> tuple[float, ...]:
    """About which numbers: those whose squares vanish first, then to the largest."""
    info = np.finfo(dtype)
    least, normal, most = (float(v) for v in (info.smallest_subnormal, info.tiny, info.max))
    return math.sqrt(least), math.sqrt(normal), 1.0, 64.0, math.sqrt(most), most


def _of_form(form: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Numbers of about 1, none of them above 2."""
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


# Runs of an edit beside the drawn ones: every value of a small domain, and every magnitude in fp16.
#
# Both may be the same function of real numbers: a mean is a sum over n, but the sum leaves fp16 first, and
# the root of a sum of squares is no small number, although each square is 0. That is a precondition of an
# edit, which its report names. A new side that loses digits of ordinary numbers which the old one keeps is
# wrong.


WHOLE = 1024
"""Combinations of values up to which all are tried: ten booleans, or two integers of five bits. A choice."""
MOST_SWEPT = 1 << 25
"""Numbers read, over all rounds, up to which each value of a range is tried once: 134 MB of fp32. A choice,
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
LOST = 1 / 8
"""Share of the largest number by which a side is off that has lost most of its digits: three binary digits of
eleven are right then."""
FEW_NUMBERS = 1 << 16
"""Sites that read more numbers, weights included, are not tried. A choice: both sides run several times."""


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
    """What only the new side does in fp16; nothing for sites without it, or of more than `FEW_NUMBERS`."""
    halves = [v for v in site.drawn if np_dtype(v) == np.float16]
    size = sum(math.prod(drawn_shape(v)) for v in site.drawn) + weights([*site.old_ops, *site.new_ops])
    shown, rng = InHalves(), np.random.default_rng(seed)
    if not halves or size > FEW_NUMBERS:
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
        least = max(promise.tolerance.rtol, SLACK * fp16.HALF_STEP)
        far = [i for i, (a, b) in enumerate(pairs) if _share(a, b) > least]
        if not far or promise.tolerance.rtol == 0:
            return 0.0
        exact = self._sides(Double())[0](numbers)
        rounded = self._sides(Double(fp16.HALF_STEP))[0]
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
    return most >= fp16.NORMAL and bool(((old - new).abs() > LOST * most).any())


def _share(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference as a share of the largest number of the first; 0 where that shows nothing."""
    if a.shape != b.shape or not a.is_floating_point() or not a.numel():
        return 0.0
    most, off = float(a.abs().max()), float((a.double() - b.double()).abs().max())
    return off / most if fp16.NORMAL <= most < math.inf and math.isfinite(off) else 0.0
