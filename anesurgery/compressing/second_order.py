"""Round the rows of a weight so that its products change least: an error is taken up by the columns after it.

The error of a product is that of the weight, weighed by how the inputs vary together: their second moments are
the Hessian of the squared error. Columns are rounded one by one, those that vary most first, and what rounding
takes away is given to the columns that are still open, by the Cholesky factor of the inverse Hessian (GPTQ).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from anesurgery.mil import Array

BLOCK = 128
"""Columns whose errors are handed on together: the rest of the weight is touched once for each."""
DAMPING = 0.01
"""Of the mean of the diagonal, added to it: few samples leave directions in which no input was seen."""
MOST_DAMPING = 1.0
"""What is tried at most where rounding makes the matrix not positive."""

Nearest = Callable[[Array], Array]
"""Numbers of a column, one for each row -> the nearest numbers that the form holds."""


def moments(inputs: torch.Tensor) -> Array:
    """[groups, columns, columns]: the sum of the products of inputs [groups, number, columns]."""
    wide = inputs.double()
    return np.asarray(wide.transpose(1, 2) @ wide)


def objective(difference: Array, hessian: Array) -> float:
    """The squared error of the products of all rows, for a difference of weights [rows, columns]."""
    return float(np.einsum("rc,rc->", difference @ hessian, difference, optimize=True))


def corrected(rows: Array, hessian: Array, nearest: Nearest, damping: float = DAMPING) -> Array:
    """Rows rounded column by column with the error handed on.

    Args:
        rows: [rows, columns], float64.
        hessian: [columns, columns].
        nearest: rounds a column.
        damping: of the mean of the diagonal.

    Returns:
        Rows of rounded numbers. Columns whose input was always 0 are rounded to the nearest.
    """
    order = np.argsort(-np.diag(hessian), kind="stable")
    factor = _factor(hessian[np.ix_(order, order)], damping)
    left = torch.from_numpy(np.ascontiguousarray(rows[:, order]))
    made = torch.empty_like(left)
    for start in range(0, len(order), BLOCK):
        end = min(start + BLOCK, len(order))
        errors = torch.zeros(len(left), end - start, dtype=torch.float64)
        for at in range(start, end):
            column = left[:, at]
            made[:, at] = torch.from_numpy(nearest(column.numpy()))
            error = (column - made[:, at]) / factor[at, at]
            left[:, at:end] -= error[:, None] * factor[at, at:end]
            errors[:, at - start] = error
        left[:, end:] -= errors @ factor[start:end, end:]
    found = np.empty_like(rows)
    found[:, order] = made.numpy()
    return found


def _factor(hessian: Array, damping: float) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of a damped Hessian."""
    matrix = torch.from_numpy(np.ascontiguousarray(hessian))
    mean = float(matrix.diagonal().mean())
    if not mean > 0:
        return torch.eye(len(matrix), dtype=torch.float64)
    while True:
        damped = matrix + torch.eye(len(matrix), dtype=torch.float64) * (damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
        if damping >= MOST_DAMPING:
            raise ValueError("the second moments of the inputs are no positive matrix")
        damping *= 10
