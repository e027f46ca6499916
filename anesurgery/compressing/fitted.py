"""The grids of forms, fitted to the rows of a weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from anesurgery.compressing.grids import Grid, scaled
from anesurgery.compressing.second_order import Shares
from anesurgery.compressing.tables import numbers, of_numbers, table, weighed
from anesurgery.compressing.weight_forms import WeightForm, read_form
from anesurgery.compressing.zeros import Masked, Plain, pruned
from anesurgery.mil import Array
from anesurgery.regions.clusters import Totals


@dataclass(frozen=True)
class Fitting:
    """Rows, to which forms are fitted.

    Args:
        rows: [groups, rows, columns].
        hessians: [groups, columns, columns].
        channels: [groups, rows]: the output channel of each row.
        axis: of the weight along which the channels lie.
        rank: of the weight.
        dtype: of its numbers.
        shares: of the Hessians, where they are factored already; only zeros ask for them.
    """

    rows: Array
    hessians: Array
    channels: Array
    axis: int
    rank: int
    dtype: Any
    shares: Sequence[Shares] | None = None

    @cached_property
    def _numbers(self) -> Totals:
        """All numbers, which every table of the whole weight is of."""
        return numbers(self.rows, weighed(self.rows, self.hessians))

    def grid(self, name: str) -> Grid:
        """The grid of a form.

        Raises:
            SurgeryError: there is no such form.
        """
        form = read_form(name)
        if not form.zeros:
            return self._dense(form, self.rows, None)
        shares = [Shares.of(h) for h in self.hessians] if self.shares is None else self.shares
        kept, left = pruned(self.rows, shares, form.zeros)
        inner = self._dense(form, left, kept) if form.kind else Plain(self.dtype)
        return Masked(inner, kept, form.stored)

    def _dense(self, form: WeightForm, rows: Array, kept: Array | None) -> Grid:
        if form.kind == "int":
            return scaled(rows, self.hessians, self.channels, self.axis, self.rank, form.bits, self.dtype)
        if kept is None and not form.group and form.vector == 1:
            whole = np.zeros_like(self.channels)
            return of_numbers([self._numbers], whole, form, self.axis, self.rank, self.dtype)
        weights = weighed(rows, self.hessians) * (1 if kept is None else kept)
        return table(rows, weights, self.channels, form, self.axis, self.rank, self.dtype)


def grid_of(name: str, rows: Array, hessians: Array, channels: Array, axis: int, rank: int, dtype: Any) -> Grid:
    """The grid of one form: see `Fitting`."""
    return Fitting(rows, hessians, channels, axis, rank, dtype).grid(name)


__all__ = ["Fitting", "grid_of"]
