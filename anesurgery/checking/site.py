"""Check one edit: both sides are compared before the old ops are removed, and the result carries its grade.

What it costs is the size of the edit, not of the model: the values that both sides read from outside stand for
themselves, or are drawn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from anesurgery.checking.adversarial import Drawing, Sampler, address_bounds, constants_of
from anesurgery.checking.both import Site, site_of
from anesurgery.checking.fingerprint import fingerprint
from anesurgery.checking.grades import EXACT, PLAIN, REASSOCIATED, Grade, Promise, SiteCheck, Tolerance
from anesurgery.mil import Operation, Var

if TYPE_CHECKING:
    from anesurgery.checking.numbers import BothSides

__all__ = ["EXACT", "LARGEST_SITE", "REASSOCIATED", "Tolerance", "check_site"]

LARGEST_SITE = 400
"""Ops on the old side above which an edit is not checked by itself (`prove="model"` covers it)."""


def check_site(
    replaced: Sequence[tuple[Var, Var]],
    new_ops: Sequence[Operation],
    sample: Sampler,
    seed: int = 0,
    matched: Sequence[Operation] = (),
    known: dict[Hashable, SiteCheck | str] | None = None,
    promise: Promise = PLAIN,
) -> SiteCheck | str:
    """Compare each old value with its replacement; a string says why this edit cannot be compared.

    Args:
        replaced: pairs (old value, new value) of equal shape.
        new_ops: the ops that the rewrite made, in order.
        sample: gives values for a boundary var whose range matters (ids), or None for the default.
        seed: of the random numbers.
        matched: the ops of the match; what they make is computed, even where the new side reads it.
        known: checks of this pass by fingerprint; an edit that is the same computation is not run again.
        promise: what the pass says about its edits.
    """
    site = site_of(replaced, new_ops, matched)
    if len(site.old_ops) > LARGEST_SITE:
        return f"depends on {len(site.old_ops)} ops"
    known = {} if known is None else known
    from anesurgery.checking.numbers import Undrawable

    key = fingerprint(replaced, site.old_ops, site.new_ops)
    if key not in known:
        try:
            known[key] = _checked(site, sample, seed, promise)
        except Undrawable as reason:
            return str(reason)
    return known[key]


def _checked(site: Site, sample: Sampler, seed: int, promise: Promise) -> SiteCheck | str:
    """The result of the strongest check that the site passes; what is not bit for bit also meets numbers."""
    from anesurgery.checking.numbers import BothSides
    from anesurgery.checking.proofs import Proof, prove
    from anesurgery.interpret import Unsupported

    try:
        sides = BothSides(site.replaced, site.old_ops, site.new_ops, site.drawn, site.carried)
        proof = prove(site, seed, finite=not promise.tolerates_nonfinite)
        if isinstance(proof, Proof) and proof.grade is Grade.BITS:
            found = SiteCheck(0.0, 0.0, proof.elements, Grade.BITS, proof.bound, seed, proof.finite_only)
            return dataclasses.replace(found, ranged=proof.ranged)
        found = _on_numbers(site, sides, sample, seed, promise)
    except Unsupported as reason:
        return str(reason)
    if not isinstance(proof, Proof):
        return dataclasses.replace(found, no_proof=proof.reason)
    if not found.within(promise.tolerance):
        return found
    return dataclasses.replace(found, grade=proof.grade, bound=proof.bound)


def _on_numbers(site: Site, sides: BothSides, sample: Sampler, seed: int, promise: Promise) -> SiteCheck:
    from anesurgery.checking.counterexample import shrunk
    from anesurgery.checking.domains import combinations, compare_all
    from anesurgery.checking.numbers import compare_numbers

    ops = [*site.old_ops, *site.new_ops]
    ordinary = promise.tolerance.rtol > 0 or not promise.tolerates_nonfinite
    bounds = address_bounds(site.drawn, ops)
    drawing = Drawing(sample, constants_of(ops), bounds, ordinary, promise.magnitude)
    every = combinations(site.drawn, drawing, ops)
    if every is not None:
        worst = compare_all(sides, every, promise)
    else:
        worst = compare_numbers(sides, drawing, np.random.default_rng(seed), promise)
    example = "" if worst.within(promise) else shrunk(sides, worst.numbers, promise)
    return SiteCheck(
        worst.max_abs,
        worst.max_rel,
        worst.values,
        Grade.NUMBERS if every is None or example else Grade.EXHAUSTIVE,
        seed=seed,
        finite_only=not promise.tolerates_nonfinite,
        magnitude=promise.magnitude,
        left_out=worst.left_out,
        untried=worst.untried,
        counterexample=example,
    )
