"""How large numbers behind a norm are, where bounds by weights alone say too much.

A norm over half a million numbers bounds each by 700, and sums of products behind it by more, which they reach
where one number holds the energy of all. What is reckoned here is a click in silence instead: one place of a
picture, or of a time, holds all energy, and all channels have a part in it. Of p places each number there is
the root of p; products add such numbers up as if the weights did not know them, to the length of their row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from anesurgery.mil import Operation, Var, producer, static_shape
from anesurgery.numeric.forms import ROOTS, centred
from anesurgery.numeric.squares import norm_of
from anesurgery.ops import PRODUCTS
from anesurgery.semantics.analysis_cache import cached
from anesurgery.semantics.bounds import Interval, gain, norms, of_constant
from anesurgery.semantics.intervals import Intervals
from anesurgery.semantics.reading import ints

NUMBERS = 4096
"""Over no more of them a norm gives nothing beyond 64, whatever it reads, and so does a product with rows of
length 1: no place is asked for."""
SPREAD = 4.0
"""How far numbers of one place go beyond their root mean square. A choice: of drawn ones one in 16,000 does;
products whose rows of weights are turned to the very numbers of the click go further."""
SEARCH_STEPS = 200
"""Ops that are looked at: a residual stream has a few in each block."""


@cached
def far_end(var: Var) -> float:
    """The magnitude that a value behind norms does not exceed, as reckoned; infinite for others."""
    return max(map(abs, _BehindNorms(assume={}).of(var)))


class _BehindNorms(Intervals):
    """Intervals in which the result of a norm ends where a click brings it, and that of a product likewise."""

    def of(self, var: Var) -> Interval:
        """The answer to a question."""
        self.steps = SEARCH_STEPS
        return self.at(var)

    def result(self, op: Operation, var: Var) -> Interval:
        """Return the interval of a result; norms and products have bounds of their own here."""
        most = math.inf
        if (normalised := _norm(op)) is not None:
            scale, shift = gain(op)
            most = max(math.sqrt(NUMBERS), _far(*normalised)) * scale + shift
        elif op.op_type in PRODUCTS and (rows := norms(op)) is not None:
            bias = op.inputs.get("bias")
            start = 0.0 if bias is None else max(map(abs, of_constant(bias)))
            low, high = self.at(op.x)
            most = max(abs(low), abs(high)) * rows.length + start if math.isfinite(high - low) else math.inf
        elif (left := centred(var)) is not None:  # of a click, the mean is next to 0
            most = max(map(abs, self.at(left[0])))
        else:
            return super().result(op, var)
        return -most, most


def _norm(op: Operation) -> tuple[Var, Sequence[int]] | None:
    """The value and axes of a norm: an op, or a division by the root of the mean, or the sum, of squares."""
    if op.op_type in ("layer_norm", "instance_norm"):
        return op.x, list(range(2, op.x.rank)) if op.op_type == "instance_norm" else ints(op, "axes")
    form = norm_of(op)
    if form is None or not form.axes:
        return None
    inside = next(of.x for of in form.ops if of.op_type in ROOTS and of.x in form.gains)
    return (next(iter(form.rows)), form.axes) if form.gains[inside] >= 1 else None


def _far(var: Var, axes: Sequence[int]) -> float:
    """Root mean squares that a number behind a norm comes to; infinite where no length is known."""
    shape = static_shape(var)
    if shape is None:
        return math.inf
    count = math.prod(shape[axis] for axis in axes)
    return 0.0 if count <= NUMBERS else SPREAD * math.sqrt(_places(var, shape, axes, count))


def _places(var: Var, shape: tuple[int, ...], axes: Sequence[int], count: int) -> int:
    """Over how many places a norm goes: channels are axis 1, also before a reshape into groups of them."""
    centre = producer(var, "sub")
    moved = producer(var if centre is None else centre.x, "reshape")
    before = None if moved is None else static_shape(moved.x)
    if before is not None and len(before) > 2:
        return math.prod(before[2:])
    beyond = [axis % len(shape) for axis in axes]
    if moved is not None or beyond == [len(shape) - 1]:
        return count
    return math.prod(shape[axis] for axis in beyond if axis > 1)
