"""Divide each row by a unit, so that fp16 holds its squares, and build a form on the quotients.

In fp16 squares of numbers from 256 on overflow, and those of numbers below 2^-12 are 0. The repair of
`sqrt(sum(x * x))` is `unit * sqrt(sum((x / unit) ** 2))`. The unit of a row follows from its largest magnitude;
it is 1 unless that is too large or too small, so ordinary numbers keep all their digits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anesurgery import fp16
from anesurgery.mil import Maker, Operation, Var, producer
from anesurgery.numeric.forms import REDUCED, Form, Guard
from anesurgery.regions.small_builds import again
from anesurgery.semantics.reading import clipped_divisor, flag

LEAST = 2.0**-12
"""The least divisor, so that a row of zeros is not divided by 0; smaller numbers square to 0 in fp16."""


@dataclass(frozen=True)
class SafeRange:
    """The range of largest magnitudes of a row whose squares fp16 can add up: such a row has the unit 1."""

    least: float
    """A power of two. Its square, and a mean in which only its square is not 0, is no subnormal number."""
    most: float
    """A power of two. The squares of a row of it add up to at most a quarter of the largest number of fp16."""

    @classmethod
    def of(cls, form: Form) -> SafeRange:
        """Return the range for a form; it begins at 1 where weights mix squares, since small ones vanish."""
        most = 2.0 ** math.floor(math.log2(fp16.LARGEST / 4 / form.largest_square_sum) / 2)
        least = 1.0 if form.mixes else 2.0 ** math.ceil(math.log2(fp16.NORMAL * form.averaged) / 2)
        return cls(min(least, most), most)

    def unit(self, mb: Maker, largest: Var) -> Var:
        """Build the divisor of rows with this largest magnitude: 1 inside the range.

        Larger rows come down to `most`, smaller ones up to `least`.
        """
        return mb.real_div(x=largest, y=mb.clip(x=largest, alpha=self.least, beta=self.most))


def is_divided(x: Var) -> bool:
    """Is a value already divided by its largest magnitude, or by a unit as `SafeRange.unit` builds it?"""
    if (division := producer(x, "real_div")) is None:
        return False
    unit = producer(division.y, "real_div")
    largest = division.y if unit is None or clipped_divisor(unit) is None else unit.x
    return producer(largest, "maximum") is not None


@dataclass(frozen=True)
class DividedRows:
    """The rows of a form, divided by their units."""

    values: Mapping[Var, Var]
    """Row -> the row divided by its unit."""
    units: tuple[Var, ...]
    """The unit of each group of rows, in the order of `Form.units`."""
    least: float
    """No unit is smaller."""
    factor: float = 1.0
    """The rows were multiplied with it before they were divided."""

    def power(self, mb: Maker, powers: Sequence[float], number: float) -> Var:
        """Build a positive number divided by powers of the units, in steps of which none overflows."""
        smallest, degree = min(self.least, 1.0), sum(powers)
        used = [(unit, power) for unit, power in zip(self.units, powers, strict=True) if power]
        inverses = [(mb.real_div(x=smallest, y=unit), power) for unit, power in used]
        factors = [mb.square(x=inverse) if power == 2 else inverse for inverse, power in inverses]
        product = functools.reduce(lambda a, b: mb.mul(x=a, y=b), factors)
        return mb.mul(x=product, y=number * self.factor**degree / smallest**degree)


def divide_rows(mb: Maker, form: Form, centre: bool = False) -> DividedRows:
    """Build the rows of a form, each divided by its unit.

    With `centre` the mean is subtracted first: from halves, so that no difference overflows, and twice, since
    fp16 rounds the first mean (one of 60 to steps of 1/32).
    """
    safe_range, over = SafeRange.of(form), {"axes": list(form.axes), "keep_dims": True}
    factor = 0.5 if centre else 1.0
    floor = floor_of(form.guards, factor)
    values, units = dict[Var, Var](), list[Var]()
    for rows in form.units:
        numbers = rows
        if centre:
            half = mb.mul(x=form.source, y=factor)
            for _ in range(2):
                half = mb.sub(x=half, y=mb.reduce_mean(x=half, **over))
            numbers = [half]
        sizes = [mb.abs(x=row) for row in numbers]
        size: Var = functools.reduce(lambda a, b: mb.maximum(x=a, y=b), sizes)
        largest = mb.reduce_max(x=size, **over) if form.axes else size
        unit = safe_range.unit(mb, mb.maximum(x=largest, y=floor))
        values |= {row: mb.real_div(x=number, y=unit) for row, number in zip(rows, numbers, strict=True)}
        units.append(unit)
    return DividedRows(values, tuple(units), floor / safe_range.least, factor)


def floor_of(guards: Sequence[Guard], factor: float = 1.0) -> float:
    """Return the least divisor, a power of two: the squares of smaller rows drown in the guards."""
    least = (factor * guard.number ** (1 / sum(guard.powers)) for guard in guards)
    return max([LEAST, *(2.0 ** math.floor(math.log2(number)) for number in least)])


def rebuild(mb: Maker, form: Form, units: DividedRows) -> Var:
    """Build all ops of a form on the divided rows, and multiply the end with the power of the unit it lacks."""
    built = {**units.values, **{var: units.values[row] for var, row in form.same.items()}}
    guards = {guard.op: guard for guard in form.guards}
    for op in form.steps:
        built[op.outputs[0]] = _rebuild_op(mb, op, built, guards.get(op), units)
    out, (unit,) = form.root.outputs[0], units.units
    if form.root.op_type == "log":
        result = plus_logarithm(mb, built[out], unit, form.powers[form.root.x][0])
    else:
        result = times_power(mb, built[out], unit, form.powers[out][0])
    return mb.squeeze(x=result, axes=list(form.axes)) if result.rank > out.rank else result


def _rebuild_op(
    mb: Maker, op: Operation, built: Mapping[Var, Var], guard: Guard | None, units: DividedRows
) -> Var:
    """Build an op on divided numbers: its guard is divided too, and a reduction keeps its axes."""
    inputs: dict[str, object] = {n: built[v] for n, v in op.inputs.items() if isinstance(v, Var) and v in built}
    if op.op_type in REDUCED:
        inputs["keep_dims"] = True
    if "epsilon" in op.inputs:
        inputs["epsilon"] = 0.0
    if guard is None:
        return again(mb, op, **inputs)
    least = units.power(mb, guard.powers, guard.number)
    if "epsilon" in op.inputs:
        return again(mb, op, **{**inputs, "x": mb.add(x=inputs["x"], y=least)})
    (value,) = inputs.values()
    return mb.maximum(x=value, y=least) if guard.clips else mb.add(x=value, y=least)


def times_power(mb: Maker, value: Var, unit: Var, degree: float) -> Var:
    """Build value * unit ** degree, for the degrees 1, 0.5, 0, -0.5 and -1."""
    if degree in (0.5, -0.5):
        root = mb.sqrt(x=unit) if degree > 0 else mb.rsqrt(x=unit, epsilon=0.0)
        return mb.mul(x=value, y=root)
    if degree == -1:
        return mb.real_div(x=value, y=unit)
    assert degree in (0, 1), degree
    return mb.mul(x=unit, y=value) if degree else value


def plus_logarithm(mb: Maker, value: Var, unit: Var, degree: float) -> Var:
    """Build value + log(unit ** degree)."""
    more = mb.log(x=unit, epsilon=0.0)
    return mb.add(x=value, y=more if degree == 1 else mb.mul(x=more, y=degree))


def build_cosine(mb: Maker, form: Form, units: DividedRows) -> Var:
    """Build the cosine of two divided rows: the units cancel, but for the guards."""
    (a, b), total = units.values.values(), form.root.x.op
    over = {"axes": list(form.axes), "keep_dims": True}
    product = mb.reduce_sum(x=mb.mul(x=a, y=b), **over)
    squares = [mb.reduce_sum(x=mb.square(x=row), **over) for row in (a, b)]
    lengths = mb.mul(x=mb.sqrt(x=squares[0]), y=mb.sqrt(x=squares[1]))
    for guard in form.guards:
        degree = guard.powers[0]
        least = units.power(mb, (1.0, 1.0), guard.number ** (1 / degree))
        lengths = mb.maximum(x=lengths, y=least)
    result = mb.real_div(x=product, y=lengths)
    return result if flag(total, "keep_dims") else mb.squeeze(x=result, axes=list(form.axes))
