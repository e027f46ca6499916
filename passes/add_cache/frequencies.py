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

import numpy as np

from anesurgery.mil import Array

LEAST_PAIRS = 4
"""Through fewer speeds goes a ramp of any form."""
FINE, HALF = 1e-6, 2.0**-12
"""How far off a cosine is that was rounded to fp32, its angle included, and to fp16."""
STEEP = 0.3
"""The least sine of an angle that a cosine tells well: an error of the cosine is at most 3.3 times as large in
the angle."""
READ = 0.02
"""The largest relative error with which a speed counts as read: speeds of neighbouring pairs differ by several
per cent."""
DIGITS = np.outer(10.0 ** np.arange(2, 9), np.arange(10, 100) / 10).ravel()
"""Bases of two digits, as published models have them, from 100 on."""
A_LONGROPE = "as those of a longrope, which has two sets, chosen by the length of the text"


@dataclass(frozen=True)
class Speeds:
    """How far each pair of a head turns from one position to the next, in radians, the fastest first."""

    turns: Array
    errors: Array
    """The relative errors of the frequencies."""
    places: Array
    """Which pair each is, by the number of all: 0 to less than 1."""
    pairs: int
    """The number of pairs, with those that turn too slowly to be read."""
    scale: float
    """The factor of the cosines."""


def speeds(rows: Array) -> Speeds:
    """Return the speeds of a table of cosines of shape (positions, columns)."""
    columns = _pairs(rows.astype(np.float64))
    rounding = HALF if np.array_equal(columns, columns.astype(np.float16)) else FINE
    scale = float(np.abs(columns[0]).max())
    cosines = np.clip(columns / columns[0], -1, 1)
    turns = np.arccos(cosines[1])
    errors = rounding / np.maximum(np.sin(turns), np.sqrt(rounding))
    for p in sorted({round(2 ** (step / 2)) for step in range(2, 64) if 2 ** (step / 2) < len(columns)}):
        angle, expected = np.arccos(cosines[p]), p * turns
        seen = np.stack(
            [s * angle + 2 * np.pi * np.round((expected - s * angle) / (2 * np.pi)) for s in (1, -1)]
        )
        nearest = np.take_along_axis(seen, np.abs(seen - expected).argmin(0)[None], 0)[0]
        finer = rounding / (p * np.maximum(np.sin(angle), np.sqrt(rounding)))
        told = (np.sin(angle) > STEEP) & (p * errors < STEEP) | (p * (turns + errors) < 3)  # of the half turn
        better = told & (finer < errors)
        turns, errors = np.where(better, nearest / p, turns), np.where(better, finer, errors)
    relative = errors / np.maximum(turns, FINE) + FINE
    read, pairs = relative < READ, columns.shape[1]
    return Speeds(turns[read], relative[read], np.flatnonzero(read) / pairs, pairs, scale)


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
    """Why the frequencies of a table of cosines may be those of one length only; None where nothing says so."""
    of = speeds(rows)
    if of.pairs < LEAST_PAIRS or len(of.turns) < LEAST_PAIRS:
        return None
    (base, slower), error = _geometric(of)
    if error is None:
        listed = ", ".join(f"{turn:.4g}" for turn in of.turns[:4])
        return None if _is_ramp(of) else f"its frequencies follow no base, {A_LONGROPE}: {listed}, ..."
    if not _is_round(base, error):
        return (
            f"its frequencies have the base {base:,.6g}, as one has that is computed from the length of the "
            'text ("dynamic")'
        )
    if abs(slower - 1) > 4 * error and abs(of.scale - 1) > HALF:
        return (
            f"its frequencies are {slower:.4g} times slower than those of the base {base:,.6g}, and its "
            f"cosines scaled by {of.scale:.4g}, {A_LONGROPE}"
        )
    return None


def _geometric(of: Speeds) -> tuple[tuple[float, float], float | None]:
    """The base, how much slower all are, and the relative error of the base; None where there is no base."""
    lines = np.stack([np.ones_like(of.places), of.places], 1)
    logs, weights = np.log(of.turns), 1 / of.errors
    inverse = np.linalg.inv((lines * weights[:, None] ** 2).T @ lines)
    offset, slope = inverse @ (lines.T @ (logs * weights**2))
    off = np.abs(logs - lines @ [offset, slope])
    numbers = float(np.exp(-slope)), float(np.exp(-offset))
    return numbers, float(2 * np.sqrt(inverse[1, 1])) if (off <= 3 * of.errors).all() else None


def _is_round(number: float, error: float) -> bool:
    """Has a number two digits, and zeros, or is it a power of two?"""
    unit = 10.0 ** (np.floor(np.log10(number)) - 1)
    written = round(number / unit) * unit, 2.0 ** np.round(np.log2(number))
    return any(abs(number / one - 1) <= error + FINE for one in written)


def _is_ramp(of: Speeds) -> bool:
    """Are the first as a base has them, and the others slower along a ramp, up to one factor?"""
    near = 4 * of.errors + 4 * FINE
    for base in DIGITS:
        plain = base**-of.places
        kept = of.turns / plain
        falls = abs(kept[0] - 1) <= near[0] and (np.diff(kept) <= near[1:]).all()
        falls &= len(kept) < of.pairs or _is_round(1 / kept[-1], near[-1])
        inner = (kept < 1 - near) & (kept * (1 - near) > kept[-1] * (1 + near[-1]))
        if falls and any(_is_line(along[inner], kept[inner], near[inner]) for along in (of.places, plain)):
            return True
    return False


def _is_line(along: Array, numbers: Array, near: Array) -> bool:
    """Do numbers lie on a straight line?"""
    if len(numbers) < 3:
        return True
    off = numbers - np.polyval(np.polyfit(along, numbers, 1), along)
    return bool((np.abs(off) <= near).all())
