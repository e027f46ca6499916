"""Find the region between values that are squared and a small result: a root, a logarithm, a cosine or a norm.

Such a region is a form. For `rsqrt(mean(x * x) + 1e-5)` the row is x, the root is the rsqrt, and the guard is
1e-5. The search goes from the last op upstream to what is squared. Each op between must scale with a power of
what it reads (`semantics.degrees`): x * x has the degree 2 in x, the rsqrt the degree -1.

A unit is a number by which a repair divides all rows of one group. The end then changes by a known power of the
unit, so `units` can build the form on smaller numbers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from anesurgery import fp16
from anesurgery.mil import Array, Operation, Var, constant, is_stored, operands, producer, static_shape
from anesurgery.ops import PRODUCTS, names
from anesurgery.semantics import degrees
from anesurgery.semantics.analysis_cache import cached
from anesurgery.semantics.bounds import MOST_READ, squared_operand
from anesurgery.semantics.reading import axes_of, flag, guard_of, ints, number, scaled
from anesurgery.semantics.rows import reduced_size

SQUARES = names("reduce_sum_square reduce_l2_norm")
REDUCED = SQUARES | names("reduce_sum reduce_mean")
ROOTS = names("sqrt rsqrt pow")
DIVISIONS = names("mul real_div")
BETWEEN = names("add maximum clip") | DIVISIONS | REDUCED | ROOTS | PRODUCTS
"""Ops that may stand between squares and the end of a form."""
ENDS = DIVISIONS | ROOTS | {"log"}
MOST_OPS = 24
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
    """Value that is squared, or multiplied with another row -> its unit, from 0 on; added rows share one."""
    same: Mapping[Var, Var]
    """A second `x - mean(x)` of the same x -> the first one, which is a row."""
    steps: tuple[Operation, ...]
    """All ops of the region, each after those that it reads; the root is the last."""
    powers: Mapping[Var, tuple[float, ...]]
    """Row or result of a step -> its degree in each unit: (1, 1) for a * b if a and b have units of their own.

    A logarithm has none."""
    guards: tuple[Guard, ...]
    gains: Mapping[Var, float]
    """Result of a step -> its largest magnitude if all numbers of the rows are 1, without guards."""
    axes: tuple[int, ...]
    """The axes along which a row lies: those that are summed over."""
    averaged: float
    """The number of squares that a mean divides by; 1 for sums, infinite where a length is dynamic."""

    @cached_property
    def units(self) -> list[list[Var]]:
        """The rows of each unit."""
        groups = [list[Var]() for _ in {*self.rows.values()}]
        for row, unit in self.rows.items():
            groups[unit].append(row)
        return groups

    @property
    def is_centred(self) -> bool:
        """Is there one row, and is it `x - mean(x)` over the same axes?"""
        (row, *others) = self.rows
        difference = centred(row)
        return not others and difference is not None and difference.axes == self.axes

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
    def largest_square_sum(self) -> float:
        """The largest sum of squares if all numbers of the rows are 1: 64 for the length of 64 numbers.

        A step of another degree counts as the square that has its size: the length is 8, and has degree 1.
        """
        degree_of = {var: sum(self.powers.get(var, ())) for var in self.gains}
        return max(self.gains[var] ** (2 / degree) for var, degree in degree_of.items() if degree > 0)

    def largest_value(self, bound: Callable[[Var], float]) -> float:
        """Return the largest value between rows and end, without guards, from bounds of the rows."""
        bounds = [max(map(bound, rows)) for rows in self.units]
        peaks = [0.0]
        for op in self.steps[:-1]:  # the end fits fp16, or no form could help
            powers, gain = self.powers[op.outputs[0]], self.gains[op.outputs[0]]
            if min(powers) >= 0:  # a reciprocal is largest for the smallest rows, which have no bound
                used = (most**power for most, power in zip(bounds, powers, strict=True) if power)
                peak = math.prod(used, start=gain)
                peaks.append(peak**2 if op.op_type == "reduce_l2_norm" else peak)  # it adds squares up inside
        return max(peaks)


class Mix(NamedTuple):
    """A product with stored weights, none of them negative, such as mel filters: it mixes numbers of a row."""

    operand: str
    """The parameter that reads the row."""
    axis: int
    """The axis that it sums over; it has the same place in the result."""
    largest_sum: float
    """The largest sum of weights of one output."""


@cached
def form_of(op: Operation) -> Form | None:
    """Return the form that ends with an op; None where there is none."""
    if op.op_type not in ENDS or (op.op_type in DIVISIONS and any(is_stored(v) for _, v in operands(op))):
        return None
    return _Search(op).form()


class _Search:
    """One search upstream from the end of a form.

    Every op that it visits belongs to the form, or there is none. So `MOST_OPS` bounds its visits, too.
    """

    def __init__(self, root: Operation) -> None:
        self.root = root
        self.units: dict[Var, int] = {}
        """Row -> its unit so far; numbers are left out where two units became one."""
        self.same: dict[Var, Var] = {}
        self.visited: dict[Var, frozenset[Var]] = {}
        """Value -> the rows that it is computed of; none during the search, and where there is no form."""
        self.steps: list[Operation] = []

    def rows_of(self, var: Var) -> frozenset[Var]:
        """Return the rows that a value is computed of; none if there is no form."""
        if (row := self.row(var)) is not None:
            return frozenset({row})
        op = producer(var, *BETWEEN, "square")
        if op is None or var in self.visited or len(self.visited) >= MOST_OPS - 1:  # the root is the last one
            return self.visited.get(var, frozenset())
        self.visited[var] = frozenset()
        squared = op.x if op.op_type in SQUARES else squared_operand(op)
        self.visited[var] = self.rows_of_operands(op) if squared is None else self.new_row(squared)
        if self.visited[var]:
            self.steps.append(op)
        return self.visited[var]

    def row(self, var: Var) -> Var | None:
        """Return the row that a value is: a known one, or a second `x - mean(x)` of the same x."""
        if var not in self.units and (difference := centred(var)) is not None:
            again = next((row for row in self.units if centred(row) == difference), None)
            if again is not None:
                self.same[var] = again
        return self.same.get(var, var if var in self.units else None)

    def new_row(self, squared: Var) -> frozenset[Var]:
        """Make a value that is squared a row with a unit of its own, if it is none yet."""
        row = self.row(squared) or squared
        self.units.setdefault(row, len(self.units))
        return frozenset({row})

    def rows_of_operands(self, op: Operation) -> frozenset[Var]:
        """Return the rows of all operands of an op, and let the rows of a sum share a unit."""
        values = [v for _, v in operands(op) if not is_stored(v)]
        if not values or not self.may_stand_here(op, values):
            return frozenset()
        if op.op_type == "real_div" or (op.op_type == "mul" and producer(values[-1], *ROOTS) is not None):
            values.reverse()  # in x / sqrt(sum(x * x)), x is a row only once the root was searched
        parts = [self.rows_of(v) for v in values]
        if not all(parts):
            return frozenset()
        rows = frozenset(row for part in parts for row in part)
        if op.op_type in ("add", "maximum") and len(values) == 2:
            shared = {self.units[row] for row in rows}
            self.units |= {row: min(shared) for row, unit in self.units.items() if unit in shared}
        return rows

    def may_stand_here(self, op: Operation, values: Sequence[Var]) -> bool:
        """May an op with these computed operands be a step?"""
        if op.op_type in PRODUCTS and self.root.op_type in DIVISIONS:
            return False  # weights are read for roots and logarithms only
        if len(values) == 1:
            return _keeps_scale(op, values[0])
        if op.op_type == "real_div":
            return op is self.root  # between, a quotient could be of any size
        return op.op_type not in PRODUCTS  # a product of two values mixes their rows

    def form(self) -> Form | None:
        """Return the form; None if there is none, an op does not scale, or rows lie along different axes."""
        if not self.rows_of_operands(self.root):
            return None
        self.steps.append(self.root)
        sums = [op for op in self.steps if op.op_type in REDUCED]
        mixes = [mix for op in self.steps if (mix := mixing(op)) is not None]
        axes = {tuple(sorted(axes_of(op))) for op in sums} | {(mix.axis,) for mix in mixes}
        keep_dims = {flag(op, "keep_dims") for op in sums}
        if len(axes) > 1 or len(keep_dims) > 1 or not self.has_one_shape_per_unit():
            return None
        numbers = {unit: k for k, unit in enumerate(sorted({*self.units.values()}))}
        rows = {row: numbers[unit] for row, unit in self.units.items()}
        scales = _scales_of(self.steps, rows, self.same)
        if scales is None:
            return None
        return Form(
            root=self.root,
            rows=rows,
            same=self.same,
            steps=tuple(self.steps),
            powers=scales.powers,
            guards=scales.guards,
            gains=_gains(self.steps),
            axes=next(iter(axes), ()),
            averaged=math.prod(reduced_size(op) for op in sums if op.op_type == "reduce_mean"),
        )

    def has_one_shape_per_unit(self) -> bool:
        """Do all rows of a unit have the same shape?"""
        shapes = {(unit, *row.shape) for row, unit in self.units.items()}
        return len(shapes) == len({*self.units.values()})


class _Scales(NamedTuple):
    """How the values and the guards of a form scale with its units."""

    powers: dict[Var, tuple[float, ...]]
    guards: tuple[Guard, ...]


def _scales_of(steps: Sequence[Operation], rows: Mapping[Var, int], same: Mapping[Var, Var]) -> _Scales | None:
    """Return the degree of each value in each unit, and the guards; None if an op does not scale.

    For sum(a * b) with a unit for each row, a has the degrees (1, 0), b (0, 1), and product and sum (1, 1).
    """
    units, guards = range(len({*rows.values()})), list[Guard]()
    powers = {row: tuple(float(unit == own) for unit in units) for row, own in rows.items()}
    powers |= {var: powers[row] for var, row in same.items()}
    for op in steps:
        if op.op_type == "log":  # always the root; its epsilon is added to what it reads
            constants = {"epsilon": powers[op.x]}
        else:
            # values without a degree, such as constants, do not scale
            in_units = [defaultdict(float, {v: power[unit] for v, power in powers.items()}) for unit in units]
            scales = [s for known in in_units if (s := degrees.scaled(op, known.__getitem__)) is not None]
            if len(scales) < len(units):
                return None
            powers[op.outputs[0]] = tuple(scale.result for scale in scales)
            constants = {name: tuple(s.constants[name] for s in scales) for name in scales[0].constants}
        for name, degree in constants.items():
            least = number(op.inputs.get(name)) or 0.0
            if UNGUARDED < least < fp16.LARGEST:  # the upper end of a clip is at least fp16's largest number
                guards.append(Guard(op, least, degree))
    return _Scales(powers, tuple(guard for guard in guards if not _is_hidden(guard, guards)))


def _is_hidden(guard: Guard, guards: Sequence[Guard]) -> bool:
    """Is the epsilon of an op lost beside what was added to its input?"""
    added = [g.number for g in guards if g.op.op_type == "add" and g.op.outputs[0] is guard.op.inputs.get("x")]
    return guard.number <= HIDDEN * sum(added)


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
        return times is not None and times.factor > 0 and value.shape == op.outputs[0].shape
    guard = guard_of(op)
    if guard is None or guard.most < fp16.LARGEST:
        return False
    return guard.least > 0 or op.op_type == "add"  # maximum(x, 0) does not scale for x below 0; x + 0 does


def _gains(ops: Sequence[Operation]) -> dict[Var, float]:
    """Return the largest result of each op if all numbers of the rows are 1, without guards."""
    gains: dict[Var, float] = {}
    for op in ops:
        inputs = [gains.get(v, 1.0) for _, v in operands(op) if not is_stored(v)]
        gain = COMBINED.get(op.op_type, math.prod)(inputs)
        if op.op_type in REDUCED and op.op_type != "reduce_mean":
            gain *= math.sqrt(reduced_size(op)) if op.op_type == "reduce_l2_norm" else reduced_size(op)
        elif (mix := mixing(op)) is not None:
            gain *= mix.largest_sum
        elif op.op_type in DIVISIONS and (times := scaled(op)) is not None:
            gain *= times.factor
        elif op.op_type in ROOTS and squared_operand(op) is None:
            gain **= 0.5 if op.op_type == "sqrt" or number(op.inputs.get("y")) == 0.5 else -0.5
        gains[op.outputs[0]] = gain
    return gains


COMBINED: Mapping[str, Callable[[Sequence[float]], float]] = {
    "add": sum,
    "maximum": max,
    "real_div": lambda gains: gains[0] / math.prod(gains[1:]),
}
"""Op type -> how it combines the gains of its one or two computed operands; the others multiply them."""


class Centred(NamedTuple):
    """A value `x - mean(x)`."""

    x: Var
    axes: tuple[int, ...]
    """The axes of the mean."""


def centred(var: Var) -> Centred | None:
    """Return x and the axes of the mean where a value is `x - mean(x)`, else None."""
    op = producer(var, "sub")
    mean = None if op is None else producer(op.y, "reduce_mean")
    if op is None or mean is None or mean.x is not op.x or not flag(mean, "keep_dims"):
        return None
    return Centred(op.x, tuple(sorted(axes_of(mean))))


@cached
def mixing(op: Operation) -> Mix | None:
    """Return what a product with stored weights mixes; None for other ops, and where a weight is negative."""
    product = _weighted_sum(op) if op.op_type in PRODUCTS and _has_no_bias(op) else None
    if product is None:
        return None
    weights = product.weights
    if weights.size == 0 or weights.size > MOST_READ or weights.min() < 0:
        return None
    return Mix(product.operand, product.axis, float(weights.astype(np.float64).sum(axis=0).max()))


class _WeightedSum(NamedTuple):
    """What a product with stored weights reads, and along which axis it sums."""

    operand: str
    axis: int
    weights: Array
    """The weights with the summed axis first: (16, 5) for a linear layer from 16 numbers to 5."""


def _weighted_sum(op: Operation) -> _WeightedSum | None:
    """Return the sum that a matmul, linear or pointwise conv with stored weights computes; else None."""
    if op.op_type == "matmul":
        first, second = constant(op.x), constant(op.y)
        if second is not None and second.ndim == 2 and not flag(op, "transpose_x"):
            weights = second.T if flag(op, "transpose_y") else second
            return _WeightedSum("x", op.x.rank - 1, weights)
        if first is not None and first.ndim == 2 and op.y.rank >= 2 and not flag(op, "transpose_y"):
            weights = first if flag(op, "transpose_x") else first.T
            return _WeightedSum("y", op.y.rank - 2, weights)
        return None
    weights = constant(op.weight)
    if weights is None:
        return None
    if op.op_type == "linear":
        return _WeightedSum("x", op.x.rank - 1, weights.T)
    is_pointwise = (
        set(weights.shape[2:]) == {1} and set(ints(op, "strides")) <= {1} and not any(ints(op, "pad"))
    )
    if not is_pointwise or (number(op.inputs.get("groups")) or 1) != 1:
        return None
    return _WeightedSum("x", 1, weights.reshape(weights.shape[:2]).T)  # (out, in, 1, 1) -> (in, out)


def _has_no_bias(op: Operation) -> bool:
    bias = op.inputs.get("bias")
    return bias is None or ((value := constant(bias)) is not None and not np.any(value))
