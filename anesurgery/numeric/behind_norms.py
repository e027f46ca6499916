"""Estimate how large values behind a norm get, where the strict bound is far above what inputs reach.

A norm over n numbers bounds each by sqrt(n): by 700 for half a million, which needs one number to hold all the
energy. The estimate here assumes the worst input that is still natural, a click in silence: one place of a
picture or of a time holds all the energy, spread over all channels. With p places each number there is
sqrt(p). A product behind it adds such numbers like random ones, up to the length of a row of weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from anesurgery.mil import Operation, Var, producer, static_shape
from anesurgery.numeric.forms import ROOTS, centred
from anesurgery.numeric.squares import norm_of
from anesurgery.ops import PRODUCTS
from anesurgery.semantics.analysis_cache import cached
from anesurgery.semantics.bounds import Interval, constant_range, norm_gain_and_offset, weight_norms
from anesurgery.semantics.intervals import Intervals
from anesurgery.semantics.reading import ints

NUMBERS = 4096
"""A norm over at most so many numbers gives at most 64 (their root) whatever it reads; it needs no estimate."""
SPREAD = 4.0
"""How many times their root mean square the numbers of one place reach. A choice: one normal number in 16,000
does. Weights that match the click itself reach more."""
SEARCH_STEPS = 200
"""The most ops that are followed upstream: a residual stream has a few in each block."""


@cached
def far_end(var: Var) -> float:
    """Return the estimated largest magnitude of a value behind norms; infinite for other values."""
    return max(map(abs, _BehindNorms(assume={}).of(var)))


class _BehindNorms(Intervals):
    """Intervals of values in which norms and products have the bounds of a click."""

    def of(self, var: Var) -> Interval:
        """Return the interval of a value."""
        self.steps = SEARCH_STEPS
        return self.at(var)

    def result(self, op: Operation, var: Var) -> Interval:
        """Return the interval of a result; norms and products have bounds of their own here."""
        most = math.inf
        if (normalised := _norm(op)) is not None:
            scale, shift = norm_gain_and_offset(op)
            most = max(math.sqrt(NUMBERS), _largest_behind(*normalised)) * scale + shift
        elif op.op_type in PRODUCTS and (rows := weight_norms(op)) is not None:
            bias = op.inputs.get("bias")
            start = 0.0 if bias is None else max(map(abs, constant_range(bias)))
            low, high = self.at(op.x)
            most = max(abs(low), abs(high)) * rows.length + start if math.isfinite(high - low) else math.inf
        elif (left := centred(var)) is not None:  # the mean of a click is nearly 0
            most = max(map(abs, self.at(left[0])))
        else:
            return super().result(op, var)
        return -most, most


def _norm(op: Operation) -> tuple[Var, Sequence[int]] | None:
    """Return the value and axes of a norm, which is one op or written with several; None for other ops."""
    if op.op_type in ("layer_norm", "instance_norm"):
        return op.x, list(range(2, op.x.rank)) if op.op_type == "instance_norm" else ints(op, "axes")
    form = norm_of(op)
    if form is None or not form.axes:
        return None
    inside = next(of.x for of in form.ops if of.op_type in ROOTS and of.x in form.gains)
    return (next(iter(form.rows)), form.axes) if form.gains[inside] >= 1 else None


def _largest_behind(var: Var, axes: Sequence[int]) -> float:
    """Return the largest number behind a norm, for a root mean square of 1; infinite for unknown lengths."""
    shape = static_shape(var)
    if shape is None:
        return math.inf
    count = math.prod(shape[axis] for axis in axes)
    return 0.0 if count <= NUMBERS else SPREAD * math.sqrt(_count_places(var, shape, axes, count))


def _count_places(var: Var, shape: tuple[int, ...], axes: Sequence[int], count: int) -> int:
    """Return how many places a norm spans; channels are axis 1, also before a reshape into groups."""
    centre = producer(var, "sub")
    moved = producer(var if centre is None else centre.x, "reshape")
    before = None if moved is None else static_shape(moved.x)
    if before is not None and len(before) > 2:
        return math.prod(before[2:])
    beyond = [axis % len(shape) for axis in axes]
    if moved is not None or beyond == [len(shape) - 1]:
        return count
    return math.prod(shape[axis] for axis in beyond if axis > 1)
