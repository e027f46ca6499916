"""The grid of a form, fitted to the rows of a weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from anesurgery.compressing.grids import Grid, scaled
from anesurgery.compressing.second_order import Shares
from anesurgery.compressing.tables import table
from anesurgery.compressing.weight_forms import WeightForm, read_form
from anesurgery.compressing.zeros import Masked, Plain, pruned
from anesurgery.mil import Array


def grid_of(
    name: str,
    rows: Array,
    hessians: Array,
    channels: Array,
    axis: int,
    rank: int,
    dtype: Any,
    shares: Sequence[Shares] | None = None,
) -> Grid:
    """The grid of a form, fitted to rows.

    Args:
        name: of the form.
        rows: [groups, rows, columns].
        hessians: [groups, columns, columns].
        channels: [groups, rows]: the output channel of each row.
        axis: of the weight along which the channels lie.
        rank: of the weight.
        dtype: of its numbers.
        shares: of the Hessians, where they are factored already; only zeros ask for them.

    Raises:
        SurgeryError: there is no such form.
    """
    form = read_form(name)
    if not form.zeros:
        return _dense(form, rows, hessians, np.ones((1, 1, 1)), channels, axis, rank, dtype)
    factored = [Shares.of(hessian) for hessian in hessians] if shares is None else shares
    kept, left = pruned(rows, factored, form.zeros)
    inner = _dense(form, left, hessians, kept, channels, axis, rank, dtype) if form.kind else Plain(dtype)
    return Masked(inner, kept, form.stored)


def _dense(
    form: WeightForm,
    rows: Array,
    hessians: Array,
    kept: Array,
    channels: Array,
    axis: int,
    rank: int,
    dtype: Any,
) -> Grid:
    if form.kind == "int":
        return scaled(rows, hessians, channels, axis, rank, form.bits, dtype)
    weights = np.stack(
        [np.broadcast_to(np.diag(h), part.shape) for h, part in zip(hessians, rows, strict=True)]
    )
    return table(rows, weights * kept, channels, form, axis, rank, dtype)


__all__ = ["grid_of"]
