"""Continue a constant table to another length, where its numbers show how.

`length_edits` asks this for a table that was folded for one length, such as position embeddings, a mask or the
distances of ALiBi. Its rows may be the first rows of a longer table: then a shorter size cuts it, and a longer
size continues it if the rows follow a known formula (counting up, sines and cosines, slopes). Or they depend on
the length itself (distances from the end, steps of 1/n, windows): then the table is refused.
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
"""Bases of rotary and sinusoidal positions in published models."""

SLOW = 1e-3
"""Turns per position below which a wave cannot be told from a straight line in fp16."""


@dataclass(frozen=True)
class Table:
    """A table that is long enough for every size.

    Attributes:
        whole: each size reads its first rows.
        assumed: whether it is only assumed that shorter sizes read its first rows, as for learned positions.
    """

    whole: Array
    assumed: bool = False


def continued_table(table: Array, most: Mapping[int, int], adds: bool) -> Table | Refusal:
    """Return a table at least as long as the largest size, whose first rows are those at each shorter length.

    Args:
        table: the table at the length of the model.
        most: axis -> the largest length; one axis of positions, or two.
        adds: whether an op adds the table or looks rows up in it, as with learned positions.
    """
    constant_axes, whole = {a for a in most if (table == table.take([0], a)).all()}, table
    for axis in constant_axes:
        whole = np.repeat(whole.take([0], axis), max(most[axis], table.shape[axis]), axis)
    other_axes = {a: max(n, table.shape[a]) for a, n in most.items() if a not in constant_axes}
    if not other_axes:
        return Table(whole)
    if len(other_axes) > 1:
        return _by_distance(whole, other_axes)
    ((axis, length),) = other_axes.items()
    rows = np.moveaxis(whole, axis, 0)
    has_formula = _continued_by_formula(rows, rows.shape[0]) is not None or _is_wavy(rows)
    if not has_formula and (why := _dependence_on_length(rows)) is not None:
        return Refusal(why)
    if length > rows.shape[0]:
        longer = _continued_by_formula(rows, length)
        if longer is None:
            return Refusal(
                f"its {rows.shape[0]} rows follow no formula for {length} could be made; give the module, "
                "or a model of the largest size"
            )
        return Table(np.ascontiguousarray(np.moveaxis(longer, 0, axis)))
    if has_formula:
        return Table(whole)
    if not adds:
        return Refusal("its rows follow no formula, so that those of another length may be others")
    return Table(whole, assumed=True)


def _dependence_on_length(rows: Array) -> str | None:
    """Return why the rows at another length would differ; None if nothing shows it. rows: (positions, ...)."""
    numbers = rows.astype(np.float64).reshape(rows.shape[0], -1)
    if rows.dtype.kind == "b" or (numbers <= MASKED).any():
        return "it hides some places, and those of another length may be others"
    if (numbers == numbers[::-1]).all() or (len(rows) > 3 and (numbers[1:] == numbers[:0:-1]).all()):
        return "it is the same from both ends, as a window is that is made for its length"
    steps = np.diff(numbers, axis=0)
    even = _linear_columns(numbers)
    if len(rows) > 2 and even.any():
        step = steps.mean(0)[even]
        if ((step < 0) & (np.abs(numbers[-1, even]) <= 1)).any():
            return "it counts down to its end"
        if (np.abs(step - np.round(step)) > 1e-3).any():
            return _slope_reason(float(step[0]))
    return None


def _linear_columns(numbers: Array) -> Array:
    """Return which columns rise by the same step from row to row. numbers: (positions, columns)."""
    with np.errstate(invalid="ignore"):  # what masks is infinite in neighbouring places
        steps = np.diff(numbers, axis=0)
    return np.abs(steps - steps.mean(0)).max(0) <= 2e-3 * (np.abs(numbers).max() or 1.0)


def _slope_reason(step: float) -> str:
    """Return the reason for a refusal of rows that rise by a fraction."""
    return f"it rises by {step:g} from place to place, as what is made of a length does"


def _single_slope_reason(rows: Array) -> str | None:
    """Return why distances may be counted in parts of the length; None if slopes differ between heads."""
    numbers = rows.astype(np.float64).reshape(rows.shape[0], -1)
    if rows.dtype.kind == "b" or len(rows) < 3 or not _linear_columns(numbers).all():
        return None
    slopes = {round(float(n), 4) for n in np.diff(numbers, axis=0).mean(0)}
    return _slope_reason(min(slopes)) if len(slopes) == 1 and min(slopes) % 1 else None


def _continued_by_formula(rows: Array, length: int) -> Array | None:
    """Return `length` rows by a formula that gives all known rows bit for bit; None without one."""
    for formula in (_counting_rows, _sinusoidal_rows, _alibi_rows):
        longer: Array | None = formula(rows, length)
        if longer is not None:
            return longer
    return None


def _counting_rows(rows: Array, length: int) -> Array | None:
    """Rows that count up by one in every element."""
    places = np.arange(length).reshape([-1] + [1] * (rows.ndim - 1))
    longer = (rows[:1].astype(np.int64) + places).astype(rows.dtype)
    return longer if (longer[: len(rows)] == rows).all() else None


def _alibi_rows(rows: Array, length: int) -> Array | None:
    """Rows that rise by 2 ** (-8 k / heads) for head k, as in ALiBi."""
    flat = rows.reshape(rows.shape[0], -1)
    heads = flat.shape[1]
    if rows.dtype.kind != "f" or heads < 2 or heads & (heads - 1):
        return None
    slopes = 2.0 ** (-8 / heads * np.arange(1, heads + 1))
    longer: Array = np.outer(np.arange(length), slopes).astype(rows.dtype)
    return longer.reshape(length, *rows.shape[1:]) if (longer[: len(rows)] == flat).all() else None


def _angles(length: int, width: int, base: float) -> torch.Tensor:
    """Return the angles of rotary positions: (positions, width / 2)."""
    inverse = 1.0 / (base ** (torch.arange(0, width, 2).float() / width))
    return torch.arange(length).float()[:, None] * inverse[None]


POSITION_FORMULAS: Sequence[Callable[[torch.Tensor], torch.Tensor]] = (
    lambda angles: torch.cat([angles, angles], 1).cos(),
    lambda angles: torch.cat([angles, angles], 1).sin(),
    lambda angles: torch.cat([angles.sin(), angles.cos()], 1),
    lambda angles: torch.stack([angles.sin(), angles.cos()], 2).flatten(1),
    torch.cos,
    torch.sin,
)
"""How tables of positions are computed from angles; the last two hold each angle once."""


def _sinusoidal_rows(rows: Array, length: int) -> Array | None:
    """Sines and cosines of positions, as in rotary and sinusoidal embeddings."""
    flat = rows.reshape(rows.shape[0], -1)
    if rows.dtype.kind != "f" or not 2 <= flat.shape[1] == max(rows.shape[1:], default=0):
        return None
    for base in BASES:
        for i, formula in enumerate(POSITION_FORMULAS):
            angles = _angles(length, flat.shape[1] * (2 if i > 3 else 1), base)
            longer: Array = formula(angles).numpy().astype(rows.dtype)
            if longer.shape[1] == flat.shape[1] and (longer[: len(rows)] == flat).all():
                return longer.reshape(length, *rows.shape[1:])
    return None


def _is_wavy(rows: Array) -> bool:
    """Return whether each column is a wave whose period no length explains.

    For a wave, x[i-1] + x[i+1] = 2 cos(angle) x[i], so that a fit gives the angle of each column.
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
    """Continue a table that depends only on the distance between row and column, as causal masks do."""
    first, second = sorted(most)
    square = np.moveaxis(table, (first, second), (0, 1))
    rows, columns = square.shape[:2]
    if (square[1:, 1:] != square[:-1, :-1]).any():
        return Refusal("its elements are not the same at equal distances between two places")
    for side in (square[:, 0], square[0]):
        if (why := _single_slope_reason(side)) is not None:
            return Refusal(why)
    if most[first] <= rows and most[second] <= columns:
        return Table(table)
    far, near = square[rows // 2 :, 0], square[0, columns // 2 :]
    if (far != far[-1:]).any() or (near != near[-1:]).any():
        return Refusal(f"what it holds at distances from {max(rows, columns)} on follows no formula")
    distance = np.arange(most[second])[None] - np.arange(most[first])[:, None]
    behind = square[np.clip(-distance, 0, rows - 1), 0]
    ahead = square[0, np.clip(distance, 0, columns - 1)]
    chosen = (distance >= 0).reshape(*distance.shape, *[1] * (square.ndim - 2))
    longer = np.where(chosen, ahead, behind).astype(table.dtype)
    return Table(np.ascontiguousarray(np.moveaxis(longer, (0, 1), (first, second))))
