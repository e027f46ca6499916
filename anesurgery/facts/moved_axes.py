"""What an op would read if a transpose before it went: a reduction other axes, a product other columns."""

from __future__ import annotations

import math

from anesurgery.mil import Operation, static_shape
from anesurgery.semantics.reading import axes_of, flag, permutation


def reduced_before(op: Operation, turn: Operation) -> list[int] | None:
    """The axes of a reduction before a transpose; None where those that are left stand in another order."""
    perm, axes = permutation(turn), axes_of(op)
    kept = [perm[axis] for axis in range(len(perm)) if axis not in axes]
    if flag(op, "keep_dims") or kept != sorted(kept):
        return None
    return sorted(perm[axis] for axis in axes)


def flattened_from(op: Operation, turn: Operation) -> int | None:
    """The first axis that a product reads as part of its rows; None where a row takes from axes that moved.

    Args:
        op: reads in `x` what was transposed, through views that make rows of the last axes.
        turn: the transpose, of a static shape.
    """
    perm, turned = permutation(turn), static_shape(turn.outputs[0]) or ()
    shape = static_shape(op.x) or (0,)
    whole = next((n for n, axis in enumerate(perm) if axis != n), len(perm))  # axes before it stay
    flat = next((n for n in range(whole + 1) if math.prod(turned[n:]) == shape[-1]), None)
    return flat if flat is not None and math.prod(turned[:flat]) == math.prod(shape[:-1]) else None
