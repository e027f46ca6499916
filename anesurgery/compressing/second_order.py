"""GPTQ: round a weight column by column, and let the columns after each take up its error.

`fitting` calls it for each slab of rows, also to choose which numbers become 0. The squared error of the
products x @ (w - rounded) has the second moments of the inputs, the sum of x^T x, as its Hessian. Columns whose
inputs are largest are rounded first. The Cholesky factor of the inverse Hessian says by how much each later
column must change to take up the error of one that is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from anesurgery.mil import Array

BLOCKS = (128, 16)
"""Sizes of the nested blocks of columns whose errors are applied in one matrix product. They change the time,
not the result, but that zeros are chosen within a block of the first size."""
STRIPE = 256
"""Columns of a matrix that are multiplied together. It changes the time, not the result."""
DAMPING = 0.01
"""The share of the diagonal's mean that is added to the diagonal. With few samples the Hessian is singular."""
SLAB = 3360
"""Rows that are rounded together, to bound the memory. A multiple of 1 to 8, the widths that the vectors of a
table may have."""
MOST_DAMPING = 1.0
"""The damping beyond which factoring gives up: the diagonal's mean itself, next to which inputs hardly
count."""

RoundColumn = Callable[[Array, int], Array]
"""(numbers of a column [rows], its number) -> the nearest numbers that the form can store [rows]."""
BeforeBlock = Callable[[torch.Tensor, Array, torch.Tensor], None]
"""Called before a block of columns is rounded, with their numbers [columns, rows] after the errors so far,
their positions in the weight [columns], and the diagonal of the factor [columns]."""


def second_moments(inputs: torch.Tensor) -> Array:
    """Return x^T x [groups, columns, columns], in fp64, of inputs x [groups, number, columns].

    It is summed in fp32, with a relative error of some 1e-6: the damping is 10,000 times as large.
    """
    x = inputs.float()
    columns = x.shape[-1]
    sums = x.new_empty(len(x), columns, columns)
    for start in range(0, columns, STRIPE):  # the matrix is symmetric: compute half of it, copy the other
        stripe = slice(start, start + STRIPE)
        sums[:, stripe, start:] = x[:, :, stripe].transpose(1, 2) @ x[:, :, start:]
        sums[:, start + STRIPE :, stripe] = sums[:, stripe, start + STRIPE :].transpose(1, 2)
    return np.asarray(sums.double())


def squared_error(difference: Array, hessian: Array) -> float:
    """Return the squared error of the products of all rows: the sum over rows d of d H d^T, in fp32 products.

    Args:
        difference: of the weights, [rows, columns].
        hessian: [columns, columns], symmetric: entries above the diagonal are read once and count twice.
    """
    difference_fp32, total = torch.from_numpy(np.ascontiguousarray(difference, np.float32)), 0.0
    for start in range(0, len(hessian), STRIPE):
        part, before = slice(start, start + STRIPE), slice(start + STRIPE)
        columns = hessian[before, part].astype(np.float32)
        columns[:start] *= 2
        products = difference_fp32[:, before] @ torch.from_numpy(columns)
        total += float(products.mul_(difference_fp32[:, part]).sum(dtype=torch.float64))
    return total


def mean_diagonal(hessians: Array) -> float:
    """Return the mean of the diagonals of Hessians, or 1 if it is 0. Divided by it, they fit fp32."""
    mean = float(np.diagonal(hessians, axis1=1, axis2=2).mean())
    return mean if mean > 0 else 1.0


@dataclass(frozen=True)
class HessianFactor:
    """The Cholesky factor of the inverse of a damped Hessian; one for all roundings with that Hessian."""

    order: Array
    """[columns]: the columns in the order of rounding, the largest inputs first."""
    upper: torch.Tensor
    """[columns, columns], in that order, fp32: the upper U with U^T U = the inverse of the damped Hessian."""
    damping: float = 0.0
    """What was added to each entry of the diagonal."""

    @classmethod
    def of(cls, hessian: Array, damping: float = DAMPING, dtype: torch.dtype = torch.float64) -> HessianFactor:
        """Factor a Hessian [columns, columns].

        Args:
            hessian: of the squared error.
            damping: as a share of the mean of its diagonal.
            dtype: of the factoring; fp32 is enough for an estimate.
        """
        order = np.argsort(-np.diag(hessian), kind="stable")
        reverse = order[::-1]
        reversed_hessian = torch.from_numpy(hessian[np.ix_(reverse, reverse)]).to(dtype)
        factor, added = _factor_of_inverse(reversed_hessian, damping)
        return cls(order, factor, added)

    def times_inverse(self, rows: Array) -> Array:
        """Return rows [rows, columns] @ inverse of the damped Hessian = rows @ U^T U, in fp32."""
        ordered = torch.from_numpy(np.ascontiguousarray(rows[:, self.order], np.float32))
        by_transpose, product = torch.empty_like(ordered), torch.empty_like(ordered)
        for start in range(0, len(self.order), STRIPE):  # the factor is upper: skip its zeros
            stripe = slice(start, start + STRIPE)
            by_transpose[:, stripe] = ordered[:, start:] @ self.upper[stripe, start:].T
        for start in range(0, len(self.order), STRIPE):
            stripe, before = slice(start, start + STRIPE), slice(start + STRIPE)
            product[:, stripe] = by_transpose[:, before] @ self.upper[before, stripe]
        result = np.empty(rows.shape, np.float32)
        result[:, self.order] = product.numpy()
        return result


@dataclass(frozen=True)
class RoundedRows:
    """The rounded rows of a weight, and what that does to their products."""

    rows: Array
    """[rows, columns], in fp32. Columns whose input was always 0 are rounded to the nearest."""
    error: float
    """The squared error of the products: the squares of the column errors, less the part due to damping."""


def round_columns(
    rows: Array, factor: HessianFactor, round_column: RoundColumn, before: BeforeBlock | None = None
) -> RoundedRows:
    """Round rows column by column, and let the columns after each take up its error.

    Args:
        rows: [rows, columns].
        factor: of the Hessian of their inputs.
        round_column: rounds one column.
        before: called before each block of columns.
    """
    order = factor.order
    remaining = torch.from_numpy(rows.T[order].astype(np.float32))  # columns first: each is contiguous
    rounded, errors = torch.empty_like(remaining), torch.empty_like(remaining)
    state = _RoundingState(factor, remaining, rounded, errors, round_column)
    if before is None:
        state.round_blocks(range(len(order)), BLOCKS)
    else:
        for start in range(0, len(order), BLOCKS[0]):
            block = range(start, min(start + BLOCKS[0], len(order)))
            columns = slice(block.start, block.stop)
            before(remaining[columns], order[columns], factor.upper.diagonal()[columns])
            state.round_blocks(block, BLOCKS[1:])
            state.spread_errors(block.start, block.stop, len(order))
    result = np.empty(rows.shape, np.float32)
    result[:, order] = rounded.numpy().T
    damped_error = float(errors.square_().sum(dtype=torch.float64))
    error = damped_error - factor.damping * float(np.square(result - rows).sum(dtype=np.float64))
    return RoundedRows(result, max(0.0, error))


@dataclass
class _RoundingState:
    """The columns of a weight, in the order of rounding, while they are rounded."""

    factor: HessianFactor
    remaining: torch.Tensor
    """[columns, rows], the numbers to round, changed by the errors of the columns before."""
    rounded: torch.Tensor
    """[columns, rows], the rounded numbers."""
    errors: torch.Tensor
    """[columns, rows], the error of each column over its diagonal entry of the factor."""
    round_column: RoundColumn

    def round_blocks(self, columns: range, blocks: tuple[int, ...]) -> None:
        """Round columns block by block; the columns after a block take up its errors.

        Args:
            columns: to round.
            blocks: the size of a block, then that of the blocks within it.
        """
        size, *rest = (*blocks, 1)
        for start in columns[::size]:
            end = min(start + size, columns.stop)
            if rest:
                self.round_blocks(range(start, end), blocks[1:])
            else:
                self._round(start)
            self.spread_errors(start, end, columns.stop)

    def _round(self, at: int) -> None:
        column = int(self.factor.order[at])
        self.rounded[at] = torch.from_numpy(self.round_column(self.remaining[at].numpy(), column))
        torch.sub(self.remaining[at], self.rounded[at], out=self.errors[at]).div_(self.factor.upper[at, at])

    def spread_errors(self, start: int, end: int, stop: int) -> None:
        """Let the columns from `end` to `stop` take up the errors of those from `start` to `end`."""
        if end < stop:
            after, upper = slice(end, stop), self.factor.upper
            self.remaining[after].addmm_(upper[start:end, after].T, self.errors[start:end], alpha=-1)


def _factor_of_inverse(reversed_hessian: torch.Tensor, damping: float) -> tuple[torch.Tensor, float]:
    """Return the upper Cholesky factor, in fp32, of the inverse of a damped Hessian, and the damping added.

    The Hessian comes with rows and columns in reverse order: the inverse of its lower factor, reversed again,
    is the upper factor of the inverse. If factoring fails, the damping grows tenfold.
    """
    mean = float(reversed_hessian.diagonal().mean())
    if not mean > 0:
        return torch.eye(len(reversed_hessian)), 1.0
    total = 0.0
    while True:
        reversed_hessian.diagonal().add_(damping * mean - total)
        total = damping * mean
        lower, failed = torch.linalg.cholesky_ex(reversed_hessian)
        if not failed:
            return _invert_lower(lower).float().flip(0, 1), total
        if damping >= MOST_DAMPING:
            raise ValueError("the second moments of the inputs are no positive matrix")
        damping *= 10


def _invert_lower(lower: torch.Tensor) -> torch.Tensor:
    """Return the inverse of a lower triangular matrix, by halves: so most of the work is matrix products."""
    count = len(lower)
    if count <= STRIPE:
        return torch.linalg.solve_triangular(lower, torch.eye(count, dtype=lower.dtype), upper=False)
    half, inverse = count // 2, torch.zeros_like(lower)
    first, last = _invert_lower(lower[:half, :half]), _invert_lower(lower[half:, half:])
    inverse[:half, :half], inverse[half:, half:] = first, last
    inverse[half:, :half] = last @ (lower[half:, :half] @ first).neg_()
    return inverse
