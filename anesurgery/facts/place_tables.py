"""How a table with a row for each place goes on at another length, as far as its numbers show that.

A table of positions, a mask or a band that was folded for one length is the beginning of that of a longer one,
or is made of its length in another way: distances from the end, steps of one over the length, windows. The
first may be cut, and goes on where it follows a formula; the others may not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from anesurgery.errors import Refusal
from anesurgery.facts.attention import MASKED
from anesurgery.mil import Array

BASES = (10000.0, 500000.0, 1000000.0, 100000.0)
"""Of the wave lengths of published models."""

SLOW = 1e-3
"""Turns from place to place below which a wave is told from a straight line by no table in fp16."""


@dataclass(frozen=True)
class Table:
    """A table that is long enough for the lengths that are wanted.

    Attributes:
        whole: of which the first rows are read.
        assumed: are the rows those of a longer table only by the look of it, as learned positions are?
    """

    whole: Array
    assumed: bool = False


def continued(table: Array, most: Mapping[int, int], adds: bool) -> Table | Refusal:
    """A table, at least as long as is wanted, whose first rows are those at each shorter length.

    Args:
        table: at the length that is known.
        most: axis -> the largest length that is wanted; one axis of places, or two.
        adds: are its numbers added, or read as words are? Learned positions are.
    """
    steady, whole = {a for a in most if (table == table.take([0], a)).all()}, table
    for axis in steady:
        whole = np.repeat(whole.take([0], axis), max(most[axis], table.shape[axis]), axis)
    rest = {a: max(n, table.shape[a]) for a, n in most.items() if a not in steady}
    if not rest:
        return Table(whole)
    if len(rest) > 1:
        return _by_distance(whole, rest)
    ((axis, length),) = rest.items()
    rows = np.moveaxis(whole, axis, 0)
    follows = _longer(rows, rows.shape[0]) is not None or _is_wavy(rows)
    if not follows and (why := _made_of_length(rows)) is not None:
        return Refusal(why)
    if length > rows.shape[0]:
        longer = _longer(rows, length)
        if longer is None:
            return Refusal(
                f"its {rows.shape[0]} rows follow no formula by which {length} could be made; give the module, "
                "or a model of the largest size"
            )
        return Table(np.ascontiguousarray(np.moveaxis(longer, 0, axis)))
    if follows:
        return Table(whole)
    if not adds:
        return Refusal("its rows follow no formula, so that those of another length may be others")
    return Table(whole, assumed=True)


def _made_of_length(rows: Array) -> str | None:
    """Why the rows of another length would be others; None where nothing says so. rows: (places, ...)."""
    numbers = rows.astype(np.float64).reshape(rows.shape[0], -1)
    if rows.dtype.kind == "b" or (numbers <= MASKED).any():
        return "it hides some places, and those of another length may be others"
    if (numbers == numbers[::-1]).all() or (len(rows) > 3 and (numbers[1:] == numbers[:0:-1]).all()):
        return "it is the same from both ends, as a window is that is made for its length"
    steps = np.diff(numbers, axis=0)
    even = _even(numbers)
    if len(rows) > 2 and even.any():
        step = steps.mean(0)[even]
        if ((step < 0) & (np.abs(numbers[-1, even]) <= 1)).any():
            return "it counts down to its end"
        if (np.abs(step - np.round(step)) > 1e-3).any():
            return _rises(float(step[0]))
    return None


def _even(numbers: Array) -> Array:
    """Which columns rise by the same from place to place? numbers: (places, columns)."""
    steps = np.diff(numbers, axis=0)
    return np.abs(steps - steps.mean(0)).max(0) <= 2e-3 * (np.abs(numbers).max() or 1.0)


def _rises(step: float) -> str:
    return f"it rises by {step:g} from place to place, as what is made of a length does"


def _one_slope(rows: Array) -> str | None:
    """Why distances may be counted in parts of the length; slopes that differ from head to head are none."""
    numbers = rows.astype(np.float64).reshape(rows.shape[0], -1)
    if rows.dtype.kind == "b" or len(rows) < 3 or not _even(numbers).all():
        return None
    slopes = {round(float(n), 4) for n in np.diff(numbers, axis=0).mean(0)}
    return _rises(min(slopes)) if len(slopes) == 1 and min(slopes) % 1 else None


def _longer(rows: Array, length: int) -> Array | None:
    """More rows, by the formula that gives all that are there, bit for bit; None where there is none."""
    for way in (_counted, _waves, _slopes):
        longer: Array | None = way(rows, length)
        if longer is not None:
            return longer
    return None


def _counted(rows: Array, length: int) -> Array | None:
    """Rows that count up by one, at every element alike."""
    places = np.arange(length).reshape([-1] + [1] * (rows.ndim - 1))
    longer = (rows[:1].astype(np.int64) + places).astype(rows.dtype)
    return longer if (longer[: len(rows)] == rows).all() else None


def _slopes(rows: Array, length: int) -> Array | None:
    """Rows that rise by 2 ** (-8 / heads) and its powers, a power for each head, as ALiBi has it."""
    flat = rows.reshape(rows.shape[0], -1)
    heads = flat.shape[1]
    if rows.dtype.kind != "f" or heads < 2 or heads & (heads - 1):
        return None
    slopes = 2.0 ** (-8 / heads * np.arange(1, heads + 1))
    longer: Array = np.outer(np.arange(length), slopes).astype(rows.dtype)
    return longer.reshape(length, *rows.shape[1:]) if (longer[: len(rows)] == flat).all() else None


def _turned(length: int, width: int, base: float) -> torch.Tensor:
    """The angles of places: (places, width / 2)."""
    inverse = 1.0 / (base ** (torch.arange(0, width, 2).float() / width))
    return torch.arange(length).float()[:, None] * inverse[None]


WAYS: Sequence[Callable[[torch.Tensor], torch.Tensor]] = (
    lambda angles: torch.cat([angles, angles], 1).cos(),
    lambda angles: torch.cat([angles, angles], 1).sin(),
    lambda angles: torch.cat([angles.sin(), angles.cos()], 1),
    lambda angles: torch.stack([angles.sin(), angles.cos()], 2).flatten(1),
    torch.cos,
    torch.sin,
)
"""How tables of positions are made of angles; the last two hold each angle once."""


def _waves(rows: Array, length: int) -> Array | None:
    """Sines and cosines of places, as rotary and sinusoidal positions are."""
    flat = rows.reshape(rows.shape[0], -1)
    if rows.dtype.kind != "f" or not 2 <= flat.shape[1] == max(rows.shape[1:], default=0):
        return None
    for base in BASES:
        for i, way in enumerate(WAYS):
            angles = _turned(length, flat.shape[1] * (2 if i > 3 else 1), base)
            longer: Array = way(angles).numpy().astype(rows.dtype)
            if longer.shape[1] == flat.shape[1] and (longer[: len(rows)] == flat).all():
                return longer.reshape(length, *rows.shape[1:])
    return None


def _is_wavy(rows: Array) -> bool:
    """Does each column turn by an angle of its own from place to place, which no length has made?

    Of such a column, the sum of two neighbours is the one between, times twice the cosine of the angle.
    """
    if rows.dtype.kind != "f" or len(rows) < 5:
        return False
    x = rows.astype(np.float64).reshape(len(rows), -1)
    middle, sums = x[1:-1], x[2:] + x[:-2]
    factor = (middle * sums).sum(0) / np.maximum((middle**2).sum(0), 1e-30)
    if np.abs(sums - middle * factor).max() > 4e-3 * np.abs(x).max():
        return False
    turns = np.arccos(np.clip(factor / 2, -1, 1)) / (2 * np.pi)
    whole = [np.abs(turns * n - np.round(turns * n)) < 1e-3 for n in (len(rows), len(rows) - 1)]
    return bool((turns > SLOW).any()) and not ((turns > SLOW) & (whole[0] | whole[1])).any()


def _by_distance(table: Array, most: Mapping[int, int]) -> Table | Refusal:
    """A table of rows and columns that depend on the distance between them alone, as causal masks do."""
    first, second = sorted(most)
    square = np.moveaxis(table, (first, second), (0, 1))
    rows, columns = square.shape[:2]
    if (square[1:, 1:] != square[:-1, :-1]).any():
        return Refusal("its elements are not the same at equal distances between two places")
    for side in (square[:, 0], square[0]):
        if (why := _one_slope(side)) is not None:
            return Refusal(why)
    if most[first] <= rows and most[second] <= columns:
        return Table(table)
    far, near = square[rows // 2 :, 0], square[0, columns // 2 :]
    if (far != far[-1:]).any() or (near != near[-1:]).any():
        return Refusal(f"what it holds at distances from {max(rows, columns)} on follows no formula")
    apart = np.arange(most[second])[None] - np.arange(most[first])[:, None]
    behind = square[np.clip(-apart, 0, rows - 1), 0]
    ahead = square[0, np.clip(apart, 0, columns - 1)]
    chosen = (apart >= 0).reshape(*apart.shape, *[1] * (square.ndim - 2))
    longer = np.where(chosen, ahead, behind).astype(table.dtype)
    return Table(np.ascontiguousarray(np.moveaxis(longer, (0, 1), (first, second))))
