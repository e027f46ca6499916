"""Round the rows of a weight so that its products change least: an error is taken up by the columns after it.

The error of a product is that of the weight, weighed by how the inputs vary together: their second moments are
the Hessian of the squared error. Columns are rounded one by one, those that vary most first, and what rounding
takes away is given to the columns that are still open, by the Cholesky factor of the inverse Hessian (GPTQ).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from anesurgery.mil import Array

BLOCKS = (128, 16)
"""Columns whose errors are handed on together, to the rest of the weight and to that of a block; only times
depend on them."""
STRIPE = 256
"""Columns of which moments are found together; only times depend on it."""
DAMPING = 0.01
"""Of the mean of the diagonal, added to it: few samples leave directions in which no input was seen."""
SLAB = 3360
"""Rows that are rounded together, which take memory beside those that are there: a multiple of the length that
each vector of a table may have."""
MOST_DAMPING = 1.0
"""What is tried at most where rounding makes the matrix not positive: as much as the mean of the diagonal
itself, beyond which inputs count no more."""

Nearest = Callable[[Array, int], Array]
"""Numbers of a column, one for each row, and which column it is -> the nearest numbers that the form holds."""
Before = Callable[[torch.Tensor, Array, torch.Tensor], None]
"""Called before a block with what is left of its columns [columns, rows], which they are, and the diagonal of
the factor [columns]."""


def moments(inputs: torch.Tensor) -> Array:
    """[groups, columns, columns]: the sum of the products of inputs [groups, number, columns].

    Sums are made in fp32, each within some parts in a million of the two columns that it is of; the damping of
    the Hessian is ten thousand times as large.
    """
    wide = inputs.float()
    columns = wide.shape[-1]
    found = wide.new_empty(len(wide), columns, columns)
    for start in range(0, columns, STRIPE):  # half of it is the other half, transposed
        part = slice(start, start + STRIPE)
        found[:, part, start:] = wide[:, :, part].transpose(1, 2) @ wide[:, :, start:]
        found[:, start + STRIPE :, part] = found[:, part, start + STRIPE :].transpose(1, 2)
    return np.asarray(found.double())


def objective(difference: Array, hessian: Array) -> float:
    """The squared error of the products of all rows, for a difference of weights [rows, columns].

    Products are made in fp32, and of the Hessian one half counts twice.
    """
    wide, total = torch.from_numpy(np.ascontiguousarray(difference, np.float32)), 0.0
    for start in range(0, len(hessian), STRIPE):
        part, before = slice(start, start + STRIPE), slice(start + STRIPE)
        some = hessian[before, part].astype(np.float32)
        some[:start] *= 2
        met = wide[:, before] @ torch.from_numpy(some)
        total += float(met.mul_(wide[:, part]).sum(dtype=torch.float64))
    return total


def unit_of(hessians: Array) -> float:
    """What Hessians [groups, columns, columns] are divided by, so that fp32 holds products with them."""
    mean = float(np.diagonal(hessians, axis1=1, axis2=2).mean())
    return mean if mean > 0 else 1.0


@dataclass(frozen=True)
class Shares:
    """What the columns of a weight hand on; one for all roundings by the same Hessian."""

    order: Array
    """[columns]: those that vary most first."""
    factor: torch.Tensor
    """[columns, columns], upper, in that order and in fp32: of the inverse of the damped Hessian."""
    damping: float = 0.0
    """What the diagonal was increased by."""

    @classmethod
    def of(cls, hessian: Array, damping: float = DAMPING, dtype: torch.dtype = torch.float64) -> Shares:
        """Factor a Hessian [columns, columns].

        Args:
            hessian: of the squared error.
            damping: of the mean of its diagonal.
            dtype: in which it is factored; fp32 is enough for an estimate.
        """
        order = np.argsort(-np.diag(hessian), kind="stable")
        turned = order[::-1]
        factor, added = _factor(torch.from_numpy(hessian[np.ix_(turned, turned)]).to(dtype), damping)
        return cls(order, factor, added)

    def solved(self, rows: Array) -> Array:
        """Rows [rows, columns] times the inverse of the damped Hessian, in fp32."""
        turned = torch.from_numpy(np.ascontiguousarray(rows[:, self.order], np.float32))
        half, whole = torch.empty_like(turned), torch.empty_like(turned)
        for start in range(0, len(self.order), STRIPE):  # the factor is upper: the rest of it is 0
            part = slice(start, start + STRIPE)
            half[:, part] = turned[:, start:] @ self.factor[part, start:].T
        for start in range(0, len(self.order), STRIPE):
            part, before = slice(start, start + STRIPE), slice(start + STRIPE)
            whole[:, part] = half[:, before] @ self.factor[before, part]
        numbers = np.empty(rows.shape, np.float32)
        numbers[:, self.order] = whole.numpy()
        return numbers


@dataclass(frozen=True)
class Rounded:
    """Rows of rounded numbers."""

    rows: Array
    """[rows, columns], in fp32. Columns whose input was always 0 are rounded to the nearest."""
    error: float
    """Of the products, squared: the sum of what the columns handed on, less what the damping adds to it."""


def corrected(rows: Array, shares: Shares, nearest: Nearest, before: Before | None = None) -> Rounded:
    """Rows rounded column by column with the error handed on.

    Args:
        rows: [rows, columns].
        shares: of the Hessian.
        nearest: rounds a column.
        before: what looks at each block of columns before it is rounded.
    """
    order = shares.order
    left = torch.from_numpy(rows.T[order].astype(np.float32))  # columns first: each is read in one piece
    made, errors = torch.empty_like(left), torch.empty_like(left)
    work = _Work(shares, left, made, errors, nearest)
    if before is None:
        work.hand_on(range(len(order)), BLOCKS)
    else:
        for start in range(0, len(order), BLOCKS[0]):
            block = range(start, min(start + BLOCKS[0], len(order)))
            some = slice(block.start, block.stop)
            before(left[some], order[some], shares.factor.diagonal()[some])
            work.hand_on(block, BLOCKS[1:])
            work.after(block.start, block.stop, len(order))
    found = np.empty(rows.shape, np.float32)
    found[:, order] = made.numpy().T
    damped = float(errors.square_().sum(dtype=torch.float64))
    lost = damped - shares.damping * float(np.square(found - rows).sum(dtype=np.float64))
    return Rounded(found, max(0.0, lost))


@dataclass
class _Work:
    """The columns of a weight, in their order, while they are rounded."""

    shares: Shares
    left: torch.Tensor
    """[columns, rows], what is to be rounded, given what was handed on."""
    made: torch.Tensor
    """[columns, rows], the rounded numbers."""
    errors: torch.Tensor
    """[columns, rows], what each column hands on."""
    nearest: Nearest

    def hand_on(self, columns: range, blocks: tuple[int, ...]) -> None:
        """Round columns in blocks, each of which hands its errors on to those after it.

        Args:
            columns: that are rounded.
            blocks: sizes of blocks, and of the blocks in these.
        """
        size, *rest = (*blocks, 1)
        for start in columns[::size]:
            end = min(start + size, columns.stop)
            if rest:
                self.hand_on(range(start, end), blocks[1:])
            else:
                self._round(start)
            self.after(start, end, columns.stop)

    def _round(self, at: int) -> None:
        self.made[at] = torch.from_numpy(self.nearest(self.left[at].numpy(), int(self.shares.order[at])))
        torch.sub(self.left[at], self.made[at], out=self.errors[at]).div_(self.shares.factor[at, at])

    def after(self, start: int, end: int, stop: int) -> None:
        """The columns up to `stop` take the errors of a block."""
        if end < stop:
            after = slice(end, stop)
            self.left[after].addmm_(self.shares.factor[start:end, after].T, self.errors[start:end], alpha=-1)


def _factor(turned: torch.Tensor, damping: float) -> tuple[torch.Tensor, float]:
    """The upper Cholesky factor, in fp32, of the inverse of a damped Hessian, and what its diagonal gained.

    Given is the matrix with its rows and columns turned round: its lower factor is inverted, and turned round.
    """
    mean = float(turned.diagonal().mean())
    if not mean > 0:
        return torch.eye(len(turned)), 1.0
    total = 0.0
    while True:
        turned.diagonal().add_(damping * mean - total)
        total = damping * mean
        lower, failed = torch.linalg.cholesky_ex(turned)
        if not failed:
            return _inverse(lower).float().flip(0, 1), total
        if damping >= MOST_DAMPING:
            raise ValueError("the second moments of the inputs are no positive matrix")
        damping *= 10


def _inverse(lower: torch.Tensor) -> torch.Tensor:
    """Of a lower triangular matrix, quarter by quarter."""
    count = len(lower)
    if count <= STRIPE:
        return torch.linalg.solve_triangular(lower, torch.eye(count, dtype=lower.dtype), upper=False)
    half, found = count // 2, torch.zeros_like(lower)
    first, last = _inverse(lower[:half, :half]), _inverse(lower[half:, half:])
    found[:half, :half], found[half:, half:] = first, last
    found[half:, :half] = last @ (lower[half:, :half] @ first).neg_()
    return found
