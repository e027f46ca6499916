"""Find the ops between squares and a small result that they end in: a root, a logarithm, a cosine or a norm.

Such a region is a form. For `rsqrt(mean(x * x) + 1e-5)` the row is x, the root is the rsqrt, and the guard is
1e-5. The search goes from the last op upstream to what is squared. Each op between must scale with a power of
what it reads (`semantics.degrees`): x * x has the degree 2 in x, the rsqrt the degree -1. So if the rows are
divided by a unit, the end changes by a known power of it, and `units` can build the form on smaller numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from anesurgery import fp16
from anesurgery.mil import Array, Operation, Var, constant, is_stored, operands, producer, static_shape
from anesurgery.ops import PRODUCTS, names
from anesurgery.semantics import degrees
from anesurgery.semantics.analysis_cache import cached
from anesurgery.semantics.bounds import MOST as LARGE
from anesurgery.semantics.bounds import squared_operand
from anesurgery.semantics.reading import axes_of, flag, guard_of, ints, number, scaled
from anesurgery.semantics.rows import reduced_size

SQUARES = names("reduce_sum_square reduce_l2_norm")
REDUCED = SQUARES | names("reduce_sum reduce_mean")
ROOTS = names("sqrt rsqrt pow")
DIVISIONS = names("mul real_div")
BETWEEN = names("add maximum clip") | DIVISIONS | REDUCED | ROOTS | PRODUCTS
"""Ops that may stand between squares and the end of a form."""
ENDS = DIVISIONS | ROOTS | {"log"}
MOST = 24
"""The most ops of a form. A choice: torch's cosine has nine."""
UNGUARDED = 1e-37
"""The largest epsilon that guards nothing: fp32 hardly holds it, and fp16 makes 0 of it."""
HIDDEN = 2.0**-18
"""An epsilon of this share of what was added just before guards nothing: a converted rsqrt has 1e-12."""


class Guard(NamedTuple):
    """A positive number that keeps a value from 0: an epsilon that is added, or a least value of a clip."""

    op: Operation
    number: float
    powers: tuple[float, ...]
    """The degree of the guarded value in each unit."""

    @property
    def clips(self) -> bool:
        """Is it a least value, rather than an addend?"""
        return self.op.op_type in ("maximum", "clip")


@dataclass(frozen=True)
class Form:
    """A region of ops from rows that are squared to an end, and how each value scales with the rows."""

    root: Operation
    rows: Mapping[Var, int]
    """Value that is squared, or multiplied with another row -> number of its unit; added rows share one."""
    same: Mapping[Var, Var]
    """A second `x - mean(x)` of the same x -> the first one, which is a row."""
    steps: tuple[Operation, ...]
    """All ops of the region, each after those that it reads; the root is the last."""
    powers: Mapping[Var, tuple[float, ...]]
    """Row or value between -> its degree in each unit."""
    guards: tuple[Guard, ...]
    gains: Mapping[Var, float]
    """Value between -> its largest magnitude if no number of a row is above 1, without guards."""
    axes: tuple[int, ...]
    """The axes along which a row lies: those that are summed over."""
    averaged: float
    """The number of squares that a mean divides by; 1 for sums, infinite where a length is dynamic."""

    @cached_property
    def units(self) -> list[list[Var]]:
        """The rows of each unit."""
        return [[row for row, of in self.rows.items() if of == unit] for unit in sorted({*self.rows.values()})]

    @property
    def is_centred(self) -> bool:
        """Is there one row, and is it `x - mean(x)` over the same axes?"""
        (row, *others) = self.rows
        found = centred(row)
        return not others and found is not None and found[1] == self.axes

    @property
    def source(self) -> Var:
        """The first row; of a centred one, the value from which the mean is subtracted."""
        row = next(iter(self.rows))
        return row.op.x if self.is_centred and row.op is not None else row

    @property
    def ops(self) -> tuple[Operation, ...]:
        """Its ops, the last one first."""
        return self.steps[::-1]

    @property
    def all_ops(self) -> tuple[Operation, ...]:
        """Its ops, the last one first, and those that subtract the mean."""
        differences = [v.op for v in (*self.rows, *self.same) if self.is_centred and v.op is not None]
        return (*self.ops, *(op for difference in differences for op in (difference, difference.y.op)))

    @property
    def is_static(self) -> bool:
        """Are all lengths known?"""
        return all(static_shape(row) is not None for row in self.rows)

    @property
    def epsilon(self) -> float:
        """The sum of the guards that are added."""
        return sum(guard.number for guard in self.guards if not guard.clips)

    @property
    def mixes(self) -> bool:
        """Are squares summed with stored weights?"""
        return any(op.op_type in PRODUCTS for op in self.ops)

    @property
    def added(self) -> float:
        """The largest sum of squares, if no number of a row is above 1."""
        rising = ((gain, sum(self.powers[v])) for v, gain in self.gains.items() if v in self.powers)
        return max(gain ** (2 / degree) for gain, degree in rising if degree > 0)

    def largest_value(self, bound: Callable[[Var], float]) -> float:
        """Return the largest value between rows and end, without guards, from bounds of the rows."""
        most = [max(map(bound, rows)) for rows in self.units]
        peaks = [0.0]
        for op in self.steps[:-1]:
            powers, gain = self.powers[op.outputs[0]], self.gains[op.outputs[0]]
            if min(powers) >= 0:
                peak = math.prod((m**p for m, p in zip(most, powers, strict=True) if p), start=gain)
                peaks.append(peak**2 if op.op_type == "reduce_l2_norm" else peak)  # of its sum
        return max(peaks)


class Mix(NamedTuple):
    """A product with stored weights, none of them negative, such as mel filters: it mixes numbers of a row."""

    operand: str
    """The parameter that reads the row."""
    axis: int
    """The axis that it sums over; it has the same place in the result."""
    most: float
    """The largest sum of weights of one output."""


@cached
def form_of(op: Operation) -> Form | None:
    """Return the form that ends with an op; None where there is none."""
    if op.op_type not in ENDS or (op.op_type in DIVISIONS and any(is_stored(v) for _, v in operands(op))):
        return None
    search = _Search(op)
    return search.form() if search.rows_of(op.outputs[0]) else None


class _Search:
    """One search upstream from the end of a form."""

    def __init__(self, root: Operation) -> None:
        self.root = root
        self.rows: dict[Var, int] = {}
        self.same: dict[Var, Var] = {}
        self.below: dict[Var, frozenset[Var]] = {}
        """Value -> the rows that it is computed of."""
        self.ops: list[Operation] = []

    def rows_of(self, var: Var) -> frozenset[Var]:
        """Return the rows that a value is computed of; none if an op that no form has takes part."""
        if (row := self.row(var)) is not None:
            return frozenset({row})
        op = producer(var, *BETWEEN, "square", "log")
        if op is None or var in self.below or len(self.ops) > MOST:
            return self.below.get(var, frozenset())
        self.below[var] = frozenset()
        source = op.x if op.op_type in SQUARES else squared_operand(op)
        if op is self.root or (source is None and op.op_type != "log"):
            self.below[var] = self.rows_of_operands(op)
        elif source is not None:
            row = self.row(source) or source
            self.rows.setdefault(row, len(self.rows))
            self.below[var] = frozenset({row})
        if self.below[var]:
            self.ops.append(op)
        return self.below[var]

    def row(self, var: Var) -> Var | None:
        """Return the row that a value is: a known one, or a second `x - mean(x)` of the same x."""
        if var not in self.rows and (found := centred(var)) is not None:
            again = next((row for row in self.rows if centred(row) == found), None)
            if again is not None:
                self.same[var] = again
        return self.same.get(var, var if var in self.rows else None)

    def rows_of_operands(self, op: Operation) -> frozenset[Var]:
        """Return the rows of all operands of an op, and let the rows of a sum share a unit."""
        values = [v for _, v in operands(op) if not is_stored(v)]
        if op.op_type == "real_div" or (op.op_type == "mul" and producer(values[-1], *ROOTS) is not None):
            values.reverse()  # the rows are found under the root
        if len(values) == 2 and op.op_type in PRODUCTS | {"real_div"} and op is not self.root:
            return frozenset()
        if op.op_type in PRODUCTS and self.root.op_type in DIVISIONS:
            return frozenset()  # weights are read for roots and logarithms only
        parts = [self.rows_of(v) for v in values]
        if not parts or not all(parts) or (len(values) == 1 and not _keeps_scale(op, values[0])):
            return frozenset()
        rows = frozenset(row for part in parts for row in part)
        if op.op_type in ("add", "maximum") and len(values) == 2:
            shared = {self.rows[row] for row in rows}
            self.rows |= {row: min(shared) for row, unit in self.rows.items() if unit in shared}
        return rows

    def form(self) -> Form | None:
        """Return the form that was found; None if an op does not scale, or rows lie along different axes."""
        sums = [op for op in self.ops if op.op_type in REDUCED]
        mixes = [mix for op in self.ops if (mix := mixing(op)) is not None]
        along = {tuple(sorted(axes_of(op))) for op in sums} | {(mix.axis,) for mix in mixes}
        shapes = {(unit, *row.shape) for row, unit in self.rows.items()}
        same_rank = len({flag(op, "keep_dims") for op in sums}) < 2
        one_shape_per_unit = len(shapes) == len({*self.rows.values()})
        if not (same_rank and one_shape_per_unit) or len(along) > 1:
            return None
        found = self.powers()
        if found is None:
            return None
        averaged = math.prod(reduced_size(op) for op in sums if op.op_type == "reduce_mean")
        ops, axes = tuple(self.ops), next(iter(along), ())
        return Form(self.root, self.rows, self.same, ops, *found, _gains(ops), axes, averaged)

    def powers(self) -> tuple[dict[Var, tuple[float, ...]], tuple[Guard, ...]] | None:
        """Return the degree of each value in each unit, and the guards; None if an op does not scale."""
        units, guards = sorted({*self.rows.values()}), list[Guard]()
        powers = {row: tuple(float(unit == of) for unit in units) for row, of in self.rows.items()}
        powers |= {var: powers[row] for var, row in self.same.items()}
        for op in self.ops:
            if op.op_type == "log":
                constants = {"epsilon": powers[op.x]}
            else:
                given = [{v: power[k] for v, power in powers.items()} for k in range(len(units))]
                each = [scale for of in given if (scale := degrees.scaled(op, partial(_power, of))) is not None]
                if len(each) < len(units):
                    return None
                powers[op.outputs[0]] = tuple(scale.result for scale in each)
                constants = {name: tuple(s.constants[name] for s in each) for name in each[0].constants}
            for name, degree in constants.items():
                least = number(op.inputs.get(name)) or 0.0
                if UNGUARDED < least < fp16.LARGEST:  # a larger one is the upper end of no clip
                    guards.append(Guard(op, least, degree))
        return powers, tuple(guard for guard in guards if not _is_hidden(guard, guards))


def _is_hidden(guard: Guard, guards: Sequence[Guard]) -> bool:
    """Is the epsilon of an op lost beside what was added to its input?"""
    added = [g.number for g in guards if g.op.op_type == "add" and g.op.outputs[0] is guard.op.inputs.get("x")]
    return guard.number <= HIDDEN * sum(added)


def _power(of: Mapping[Var, float], var: Var) -> float:
    return of.get(var, 0.0)


def _keeps_scale(op: Operation, value: Var) -> bool:
    """Does an op of one operand multiply it, add a guard to it, take a root of it or sum it up?"""
    if op.op_type in REDUCED:
        return bool(ints(op, "axes"))
    if op.op_type in PRODUCTS:
        return (mix := mixing(op)) is not None and op.inputs[mix.operand] is value
    if op.op_type == "pow":
        return abs(number(op.y) or 0.0) == 0.5
    if op.op_type in ("log", "sqrt", "rsqrt"):
        return True
    if op.op_type in DIVISIONS:
        times = scaled(op)
        return times is not None and times[1] > 0 and value.shape == op.outputs[0].shape
    guard = guard_of(op)
    return guard is not None and guard[2] >= fp16.LARGEST and (guard[1] > 0 or op.op_type == "add")


def _gains(ops: Sequence[Operation]) -> dict[Var, float]:
    """Return the largest result of each op, if no number of a row is above 1, without guards."""
    gains: dict[Var, float] = {}
    for op in ops:
        of = [gains.get(v, 1.0) for _, v in operands(op) if not is_stored(v)]
        gain = sum(of) if op.op_type == "add" else math.prod(of)
        if op.op_type in REDUCED and op.op_type != "reduce_mean":
            gain *= math.sqrt(reduced_size(op)) if op.op_type == "reduce_l2_norm" else reduced_size(op)
        elif (mix := mixing(op)) is not None:
            gain *= mix.most
        elif op.op_type in DIVISIONS and (times := scaled(op)) is not None:
            gain *= times[1]
        elif op.op_type in ROOTS and squared_operand(op) is None:
            gain **= 0.5 if op.op_type == "sqrt" or number(op.inputs.get("y")) == 0.5 else -0.5
        gains[op.outputs[0]] = gain
    return gains


def centred(var: Var) -> tuple[Var, tuple[int, ...]] | None:
    """Return x and the axes of the mean where a value is `x - mean(x)`, else None."""
    op = producer(var, "sub")
    mean = None if op is None else producer(op.y, "reduce_mean")
    if op is None or mean is None or mean.x is not op.x or not flag(mean, "keep_dims"):
        return None
    return op.x, tuple(sorted(axes_of(mean)))


@cached
def mixing(op: Operation) -> Mix | None:
    """Return what a product with stored weights mixes; None for other ops, and where a weight is negative."""
    found = _operand_and_weights(op) if op.op_type in PRODUCTS and _has_no_bias(op) else None
    if found is None:
        return None
    operand, axis, weights = found
    if weights.size == 0 or weights.size > LARGE or weights.min() < 0:
        return None
    return Mix(operand, axis, float(weights.astype(np.float64).sum(axis=0).max()))


def _operand_and_weights(op: Operation) -> tuple[str, int, Array] | None:
    """Return the parameter that reads the row, the axis that is summed, and the weights, that axis first."""
    if op.op_type == "matmul":
        first, second = constant(op.x), constant(op.y)
        if second is not None and second.ndim == 2 and not flag(op, "transpose_x"):
            return "x", op.x.rank - 1, second.T if flag(op, "transpose_y") else second
        if first is not None and first.ndim == 2 and op.y.rank >= 2 and not flag(op, "transpose_y"):
            return "y", op.y.rank - 2, first if flag(op, "transpose_x") else first.T
        return None
    weights = constant(op.weight)
    if weights is None or op.op_type == "linear":
        return None if weights is None else ("x", op.x.rank - 1, weights.T)
    pointwise = set(weights.shape[2:]) == {1} and set(ints(op, "strides")) <= {1} and not any(ints(op, "pad"))
    ungrouped = (number(op.inputs.get("groups")) or 1) == 1
    return ("x", 1, weights.reshape(weights.shape[:2]).T) if pointwise and ungrouped else None


def _has_no_bias(op: Operation) -> bool:
    bias = op.inputs.get("bias")
    return bias is None or ((value := constant(bias)) is not None and not np.any(value))
