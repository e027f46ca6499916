"""Prove that both sides of an edit are the same computation: bit for bit, or as functions of real numbers.

A proof is a run of both sides in an arithmetic of its own (`interpret.arithmetic`): no numbers are drawn, each
element that both sides read from outside stands for any value. docs/proofs.md says why that is sound and what
it does not say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from anesurgery.checking.adversarial import drawn_shape, weights
from anesurgery.checking.both import Site
from anesurgery.checking.excerpt import ROWS, Axes, row_axes
from anesurgery.checking.grades import Grade
from anesurgery.errors import InterpretError
from anesurgery.interpret import Evaluator
from anesurgery.interpret.arithmetic import field
from anesurgery.interpret.arithmetic.algebraic import Algebraic
from anesurgery.interpret.arithmetic.bitwise import Bitwise
from anesurgery.interpret.arithmetic.field import LANES, Image, P, Zero
from anesurgery.interpret.arithmetic.symbolic import LARGEST, Symbolic
from anesurgery.mil import Operation, Var, types

WANTED = 2.0**-40
"""Bound on the probability of error up to which points are added."""
POINTS = 3
"""Points of `LANES` residues each, at most."""
LARGE = 1 << 16
"""Elements read from outside above which a few rows are looked at first."""


@dataclass(frozen=True)
class Proof:
    """Both sides are the same."""

    grade: Grade
    bound: float
    """Bound on the probability of saying so of two sides that are not."""
    elements: int
    finite_only: bool = False
    """Does it rest on the declaration that only finite numbers count?"""


def prove(site: Site, seed: int = 0, *, finite: bool = False) -> Proof | None:
    """The strongest proof that there is, or None.

    Args:
        site: the edit.
        seed: of the points.
        finite: does the pass declare that it holds for finite numbers only?
    """
    if any(not (types.is_tensor(v.sym_type) or types.is_scalar(v.sym_type)) for v in site.drawn):
        return None
    if weights([*site.old_ops, *site.new_ops]) > LARGEST:
        return None
    bits = (
        _bit_for_bit(site, Bitwise(seed))
        or _bit_for_bit(site, Bitwise(seed, one_zero=True))
        or (_bit_for_bit(site, Bitwise(seed, one_zero=True, finite=True)) if finite else None)
    )
    return bits or _algebraic(site, seed)


def _bit_for_bit(site: Site, arithmetic: Bitwise) -> Proof | None:
    """A false agreement needs a collision somewhere on the way from an element to an input."""
    elements = _agree(site, arithmetic, arithmetic.seed)
    if elements is None:
        return None
    steps = 2 * (len(site.old_ops) + len(site.new_ops)) + 1
    return Proof(Grade.BITS, steps / P**LANES, elements, arithmetic.finite)


def _algebraic(site: Site, seed: int) -> Proof | None:
    return at_points(lambda arithmetic: _agree(site, arithmetic, arithmetic.seed), seed)


def at_points(agree: Callable[[Algebraic], int | None], seed: int) -> Proof | None:
    """Points are added until the bound holds; each has to agree.

    The bound at a point: any two different arguments of random functions may meet, or two different results
    may; each with a probability of degree / P in every lane.

    Args:
        agree: how many elements agree at a point; None where one does not. It may raise `Zero`.
        seed: of the points.
    """
    bound, elements = 1.0, 0
    for point in range(POINTS):
        for draw in range(3):
            arithmetic = Algebraic(seed + 1000 * point + draw)
            try:
                found = agree(arithmetic)
                break
            except Zero:
                found = None
        if found is None:
            return None
        elements = found
        pairs = 1 + arithmetic.evaluations**2 / 2
        bound *= min(1.0, pairs * (arithmetic.degree / P) ** LANES)
        if bound <= WANTED:
            return Proof(Grade.PROVED, bound, elements)
    return None


def _agree(site: Site, arithmetic: Symbolic, seed: int) -> int | None:
    """How many elements agree; None where one does not, or where the arithmetic does not know an op.

    Raises:
        Zero: the point has to be drawn again.
    """
    if sum(math.prod(drawn_shape(v)) for v in site.drawn) > LARGE and (axes := row_axes(site)) is not None:
        with suppress(InterpretError):
            pairs = _pairs(site, type(arithmetic)(arithmetic.seed), seed, axes)
            if not all(a.same(b) for a, b in pairs):
                return None
    try:
        pairs = _pairs(site, arithmetic, seed, {})
    except Zero:
        raise
    except InterpretError:
        return None
    arithmetic.degree = max([arithmetic.degree, *(x.degree for pair in pairs for x in pair)])
    return sum(a.numel() for a, _ in pairs) if all(a.same(b) for a, b in pairs) else None


def _pairs(site: Site, arithmetic: Symbolic, seed: int, axes: Axes) -> list[tuple[Image, Image]]:
    """The old and the new values, `ROWS` rows of them along the given axes."""
    generator = torch.Generator().manual_seed(seed + 1)
    shapes = {v: list(drawn_shape(v)) for v in site.drawn}
    for v in shapes.keys() & axes.keys():
        shapes[v][axes[v]] = ROWS
    images: dict[Var, Image] = {v: field.random(shapes[v], generator) for v in site.drawn}
    olds = [old for old, _ in site.replaced]
    found = _run(site.old_ops, images, [*olds, *site.carried], arithmetic)
    images |= dict(zip(site.carried, found[len(olds) :], strict=True))
    news = _run(site.new_ops, images, [new for _, new in site.replaced], arithmetic)
    return [(arithmetic.image(a), arithmetic.image(b)) for a, b in zip(found, news, strict=False)]


def _run(
    ops: Sequence[Operation], images: dict[Var, Image], wanted: Sequence[Var], arithmetic: Symbolic
) -> list[Image]:
    values: list[Image] = Evaluator(ops, wanted, arithmetic)(images)  # type: ignore[arg-type,assignment]
    return values


def words(bound: float) -> str:
    """A bound as reports say it."""
    return f"2^{math.ceil(math.log2(bound))}" if bound > 0 else "0"
