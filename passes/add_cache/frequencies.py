"""Do the frequencies of rotary positions hold for texts of every length, as far as their table shows it?

A table of cosines shows with which speed each pair of a head turns from position to position. Static forms have
speeds that anyone can write down: `base ** (-i / pairs)` for a base of two digits (Llama) or 2^n, all of them
slower by one factor (`linear`), or the first as they are, the last slower by one factor, and a ramp in between
(`yarn`, `llama3`). What a model of Python chooses by the length of the text does not look so: `dynamic` has a
base that was computed from the length, and each of the two sets of a `longrope` has a factor of its own for
each pair. Both are decided when a model is converted, and leave nothing but these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from anesurgery.mil import Array

LEAST_PAIRS = 4
"""Fewer speeds than this would fit a ramp of any form."""
FINE, HALF = 1e-6, 2.0**-12
"""The errors of a cosine that was rounded to fp32, its angle included, and to fp16."""
STEEP = 0.3
"""The least sine of an angle that is computed from its cosine: the error of the angle is then at most 3.3 times
that of the cosine."""
MOST_ERROR = 0.02
"""The largest relative error of a speed that is used: neighbouring pairs differ by several per cent."""
DIGITS = np.outer(10.0 ** np.arange(2, 9), np.arange(10, 100) / 10).ravel()
"""Bases of two digits, as published models have them, from 100 on."""
A_LONGROPE = "as those of a longrope, which has two sets, chosen by the length of the text"


@dataclass(frozen=True)
class Speeds:
    """How far each pair of a head turns from one position to the next, in radians, the fastest first."""

    turns: Array
    errors: Array
    """The relative error of each speed."""
    places: Array
    """The index of each pair over the number of all pairs: 0 to less than 1."""
    pairs: int
    """The number of pairs, with those that turn too slowly for a speed."""
    scale: float
    """The factor of the cosines."""


def speeds(rows: Array) -> Speeds:
    """Return the speeds of a table of cosines of shape (positions, columns).

    The cosine at position 1 gives a first estimate. Cosines at later positions p, about 1.4 times as far each
    time, give p times the speed up to full turns and the sign, which the estimate so far decides.
    """
    columns = _pairs(rows.astype(np.float64))
    rounding = HALF if np.array_equal(columns, columns.astype(np.float16)) else FINE
    scale = float(np.abs(columns[0]).max())
    cosines = np.clip(columns / columns[0], -1, 1)
    turns = np.arccos(cosines[1])
    errors = rounding / np.maximum(np.sin(turns), np.sqrt(rounding))
    for p in sorted({round(2 ** (step / 2)) for step in range(2, 64) if 2 ** (step / 2) < len(columns)}):
        angle, expected = np.arccos(cosines[p]), p * turns
        candidates = np.stack(
            [s * angle + 2 * np.pi * np.round((expected - s * angle) / (2 * np.pi)) for s in (1, -1)]
        )
        nearest = np.take_along_axis(candidates, np.abs(candidates - expected).argmin(0)[None], 0)[0]
        new_errors = rounding / (p * np.maximum(np.sin(angle), np.sqrt(rounding)))
        below_half_turn = p * (turns + errors) < 3
        decided = (np.sin(angle) > STEEP) & (p * errors < STEEP) | below_half_turn
        better = decided & (new_errors < errors)
        turns, errors = np.where(better, nearest / p, turns), np.where(better, new_errors, errors)
    relative = errors / np.maximum(turns, FINE) + FINE
    used, pairs = relative < MOST_ERROR, columns.shape[1]
    return Speeds(turns[used], relative[used], np.flatnonzero(used) / pairs, pairs, scale)


def _pairs(rows: Array) -> Array:
    """Return one column for each pair: halves, heads and neighbours have the same cosines."""
    while rows.shape[1] % 2 == 0:
        first, second = np.split(rows, 2, 1)
        if not np.array_equal(first, second):
            break
        rows = first
    even = rows.shape[1] % 2 == 0 and np.array_equal(rows[:, ::2], rows[:, 1::2])
    return rows[:, ::2] if even else rows


def of_one_length(rows: Array) -> str | None:
    """Return why the frequencies of a table may hold for one length only; None if nothing shows it."""
    measured = speeds(rows)
    if measured.pairs < LEAST_PAIRS or len(measured.turns) < LEAST_PAIRS:
        return None
    powers = _powers(measured)
    if powers is None:
        listed = ", ".join(f"{turn:.4g}" for turn in measured.turns[:4])
        return None if _is_ramp(measured) else f"its frequencies follow no base, {A_LONGROPE}: {listed}, ..."
    if not _is_round(powers.base, powers.error):
        return (
            f"its rotary base is {powers.base:,.6g}, which was probably computed from the length of the text "
            '("dynamic")'
        )
    if abs(powers.slower - 1) > 4 * powers.error and abs(measured.scale - 1) > HALF:
        return (
            f"its frequencies are {powers.slower:.4g} times slower than those of the base {powers.base:,.6g}, "
            f"and its cosines scaled by {measured.scale:.4g}, {A_LONGROPE}"
        )
    return None


class _Powers(NamedTuple):
    """Speeds of the form base ** -place / slower."""

    base: float
    slower: float
    error: float
    """The relative error of the base."""


def _powers(measured: Speeds) -> _Powers | None:
    """Fit a line through the logarithms of the speeds, by their errors; None if they lie on no line."""
    lines = np.stack([np.ones_like(measured.places), measured.places], 1)
    logs, weights = np.log(measured.turns), 1 / measured.errors
    inverse = np.linalg.inv((lines * weights[:, None] ** 2).T @ lines)
    offset, slope = inverse @ (lines.T @ (logs * weights**2))
    if not (np.abs(logs - lines @ [offset, slope]) <= 3 * measured.errors).all():
        return None
    return _Powers(float(np.exp(-slope)), float(np.exp(-offset)), float(2 * np.sqrt(inverse[1, 1])))


def _is_round(number: float, error: float) -> bool:
    """Is a number one of two digits and zeros, or a power of two, within a relative error?"""
    unit = 10.0 ** (np.floor(np.log10(number)) - 1)
    rounded = round(number / unit) * unit, 2.0 ** np.round(np.log2(number))
    return any(abs(number / value - 1) <= error + FINE for value in rounded)


def _is_ramp(measured: Speeds) -> bool:
    """Are the first speeds those of a base, and the later ones slower along a ramp, up to one factor?"""
    near = 4 * measured.errors + 4 * FINE
    for base in DIGITS:
        plain = base**-measured.places
        ratio = measured.turns / plain  # 1 at first, less along the ramp, then constant
        falls = abs(ratio[0] - 1) <= near[0] and (np.diff(ratio) <= near[1:]).all()
        falls &= len(ratio) < measured.pairs or _is_round(1 / ratio[-1], near[-1])
        inner = (ratio < 1 - near) & (ratio * (1 - near) > ratio[-1] * (1 + near[-1]))
        ramps = (_is_line(along[inner], ratio[inner], near[inner]) for along in (measured.places, plain))
        if falls and any(ramps):
            return True
    return False


def _is_line(along: Array, numbers: Array, near: Array) -> bool:
    """Do numbers lie on a straight line?"""
    if len(numbers) < 3:
        return True
    off = numbers - np.polyval(np.polyfit(along, numbers, 1), along)
    return bool((np.abs(off) <= near).all())
