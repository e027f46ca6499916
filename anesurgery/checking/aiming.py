"""Aim at constants: rounds in which each constant of both sides, with its neighbours, is met for certain.

A condition such as x = 5 holds for one number of all. Beside much larger numbers what happens there is below
any tolerance, so that constants of one size are met together, among numbers of this size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

import numpy as np

from anesurgery.checking.adversarial import SMALL_CONSTANT, Drawing, implied
from anesurgery.checking.lengths import drawn_shape
from anesurgery.mil import Array, Operation, Var, constant, np_dtype, operands
from anesurgery.ops import POINTWISE, names
from anesurgery.semantics.byte_sizes import is_tensor

DECIDING = POINTWISE & names(
    "equal not_equal greater greater_equal less less_equal select maximum minimum clip threshold floor_div mod"
)
"""Ops that may decide by each number of a small vector; of other ops only single numbers are aimed at."""
ALWAYS = (0.0, 0.5, 1.0, 1.5, 2.5)
"""Numbers that are special by themselves: zeros, ties of rounding."""
SPAN = 32.0
"""How many times the smallest of the constants that are met together the largest may be: among numbers up to a
far larger one, few would fall between the small ones."""
NONFINITE = (0.0, math.inf, -math.inf, math.nan)
"""What a value is in turn; in the place of 0, what was drawn."""
MOST_CROSSED = 3
"""Values of which all combinations of these are met; more take the patterns of the first ones, since each value
more takes several times as many numbers."""
SIGNS = 4
"""What a value is in turn where signs are crossed: a number, its negative, 0 and -0."""
COMBINED = 8
"""Constants up to which sums, differences, products and quotients of two are aimed at where there is room:
eight have 28 pairs already."""

DISTINCT = 2**18
"""Numbers near to what is aimed at that are drawn for a tensor; larger ones repeat them. Drawing and shuffling
the 16 million scores of 4,096 keys took longer than the comparison."""


def targets(ops: Iterable[Operation]) -> tuple[float, ...]:
    """The distinct finite constants that ops may decide by: numbers they compute with, not places or sizes."""
    numbers: set[float] = set()
    for op in ops:
        numbers.update(implied(op))
        for _, var in operands(op):
            value = constant(var)
            if value is None or isinstance(value, str):
                continue
            array = np.asarray(value)
            counts = array.dtype.kind == "f" or (op.op_type in POINTWISE and array.dtype.kind in "iu")
            if counts and array.size <= (SMALL_CONSTANT if op.op_type in DECIDING else 1):
                numbers.update(float(v) for v in array.ravel() if np.isfinite(v))
    return tuple(sorted(numbers))


def aimed(
    drawn: Sequence[Var], drawing: Drawing, constants: Sequence[float], rng: np.random.Generator, *, apart: bool
) -> Iterator[dict[Var, Array]]:
    """Values for the floats and the free integers that are read, round by round.

    Args:
        drawn: what is read.
        drawing: what is known of it.
        constants: what is aimed at; see `targets`.
        rng: for the order, and for what is left.
        apart: are constants of different sizes met in different rounds? Where equal bits are promised, a
            difference beside larger numbers shows too.
    """
    free = [v for v in drawn if _is_free(v, drawing)]
    for band in _bands({*constants, *ALWAYS, *(c + d for c in constants for d in (-1, 1))}, apart):
        wanted = {v: _around(v, band, set(constants), drawing) for v in free}
        wanted = {v: values for v, values in wanted.items() if values.size}
        rounds = max((-(-len(values) // _count(v)) for v, values in wanted.items()), default=0)
        filled = {v: _filled(v, values, rounds, constants, rng) for v, values in wanted.items()}
        for i in range(rounds):
            here = ((v, values[i * _count(v) : (i + 1) * _count(v)]) for v, values in filled.items())
            yield {v: drawing.bounded(v, x.reshape(drawn_shape(v)), np_dtype(v)) for v, x in here}


def _is_free(var: Var, drawing: Drawing) -> bool:
    """Is it a float, or an integer that says nothing about a place, that the pass does not draw itself?"""
    if not is_tensor(var) or not _count(var) or var in (drawing.bounds or {}):
        return False
    return np_dtype(var).kind in "fiu" and drawing.sample(var, np.random.default_rng(0)) is None


def _count(var: Var) -> int:
    return math.prod(drawn_shape(var))


def _bands(constants: Iterable[float], apart: bool) -> list[list[float]]:
    """Constants of about one size together; 0 with those of about 1."""
    ordered = sorted(constants, key=_size)
    if not apart:
        return [ordered]
    first, bands = 0.0, list[list[float]]()
    for number in ordered:
        if not bands or _size(number) > SPAN * first:
            first = _size(number)
            bands.append([])
        bands[-1].append(number)
    return bands


def _size(number: float) -> float:
    return abs(number) or 1.0


def _around(var: Var, band: Sequence[float], constants: set[float], drawing: Drawing) -> Array:
    """The numbers of a band and the neighbours of the constants in it, with their negatives."""
    dtype = np_dtype(var)
    if dtype.kind != "f":
        info = np.iinfo(dtype)
        near = {int(n) + d for n in band if n in constants and abs(n) < 2**31 for d in (-1, 0, 1)}
        ends = {0, info.min, info.min + 1, info.max, -1} if 0 in band else set()
        whole = near | ends | {-n for n in near}
        return np.array([n for n in sorted(whole) if info.min <= n <= info.max], np.int64)
    with np.errstate(over="ignore", invalid="ignore"):
        here = np.array(band, np.float64).astype(dtype)
        own = here[[n in constants or n == 0 for n in band]]
        beside = [np.nextafter(own, dtype.type(end)) for end in (np.inf, -np.inf)]
    numbers = np.unique(np.concatenate([here, *beside]).astype(np.float64))
    numbers = np.concatenate([numbers, -numbers])
    least, most = drawing.of(var).ends(dtype)
    return numbers[
        np.isfinite(numbers) & (np.abs(numbers) <= most) & ((np.abs(numbers) >= least) | (numbers == 0))
    ]


def _filled(
    var: Var, wanted: Array, rounds: int, constants: Sequence[float], rng: np.random.Generator
) -> Array:
    """What is wanted, what two constants make where there is room, and numbers near to what is wanted."""
    whole = rounds * _count(var)
    more = rng.permutation([n for n in _combined(constants) if _size(n) <= SPAN * float(np.abs(wanted).max())])
    more = more[: whole - len(wanted)]
    near = np.resize(rng.permutation(wanted), min(whole - len(wanted) - len(more), DISTINCT))
    if np_dtype(var).kind == "f":
        near = near * (1 + rng.standard_normal(len(near)) * 10 ** rng.uniform(-4, 0, len(near)))
    return np.resize(rng.permutation(np.concatenate([wanted, more, near])), whole)


def _combined(constants: Sequence[float]) -> list[float]:
    """What two constants make by one operation: where x + 1 is compared with 6, 5 counts."""
    if len(constants) > COMBINED:
        return []
    numbers = {n for a, b in product(constants, repeat=2) for n in (a + b, a - b, a * b, a / b if b else a)}
    return sorted(n for n in numbers if math.isfinite(n))


def crossed(drawn: Sequence[Var], drawing: Drawing, numbers: Mapping[Var, Array], at: int) -> dict[Var, Array]:
    """Values of which each meets infinities and NaN where the others do and where they do not.

    Args:
        drawn: what is read.
        drawing: what is known of it.
        numbers: finite values for it.
        at: where the pattern begins; the number of places that earlier rounds had.
    """
    floats = [v for v in drawn if _is_free(v, drawing) and np_dtype(v).kind == "f"]
    values = {}
    for i, var in enumerate(floats if len(floats) > 1 else []):
        turn = (np.arange(at, at + _count(var)) // len(NONFINITE) ** (i % MOST_CROSSED)) % len(NONFINITE)
        other = np.array(NONFINITE, np.float32)[turn].reshape(drawn_shape(var))
        values[var] = drawing.bounded(
            var, np.where(turn.reshape(other.shape) == 0, numbers[var], other), np_dtype(var)
        )
    return values


def edged(drawn: Sequence[Var], drawing: Drawing, numbers: Mapping[Var, Array], at: int) -> dict[Var, Array]:
    """Values that meet zeros of both signs beside both signs of the others, and then small edges of floats.

    Args:
        drawn: what is read.
        drawing: what is known of it.
        numbers: finite values for it.
        at: where the pattern begins; the number of places that earlier rounds had.
    """
    floats = [v for v in drawn if _is_free(v, drawing) and np_dtype(v).kind == "f"]
    crossings, values = SIGNS ** min(len(floats), MOST_CROSSED), {}
    for i, var in enumerate(floats):
        edges, own = drawing.near_edges(np_dtype(var)), np.abs(numbers[var].ravel())
        cycle, place = np.divmod(np.arange(at, at + own.size), crossings + len(edges))
        sign = place // SIGNS ** (i % MOST_CROSSED) % SIGNS
        turn = np.select([sign == 0, sign == 1, sign == 2], [own, -own, np.zeros_like(own)], -0.0)
        edge = edges[(place - crossings + i * cycle) % len(edges)]
        mixed = np.where(place < crossings, turn, edge).reshape(numbers[var].shape)
        values[var] = drawing.bounded(var, mixed, np_dtype(var))
    return values
