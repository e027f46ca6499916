"""Divide numbers by a unit, so that fp16 holds their squares, and build a form on the quotients.

Squares of fp16 numbers above 255 overflow, and those of numbers below 2^-12 are 0. The unit of a row is 1 where
its largest number is neither so large nor so small: then each number is what it was, and no digit is lost.
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
"""The largest magnitude is taken for no less, since it is divided by; smaller numbers square to 0 in fp16."""


@dataclass(frozen=True)
class Quiet:
    """Largest magnitudes of which no square is lost: such numbers are squared as they are."""

    least: float
    """A power of two. The square of it, or a mean of squares with it, is no subnormal number."""
    most: float
    """A power of two. So many squares of it add up to a quarter of the largest number of fp16 at most."""

    @classmethod
    def of(cls, form: Form) -> Quiet:
        """Of the sums of a form; of mixed squares a row below 1 is not quiet, since its small ones vanish."""
        most = 2.0 ** math.floor(math.log2(fp16.LARGEST / 4 / form.added) / 2)
        least = 1.0 if form.mixes else 2.0 ** math.ceil(math.log2(fp16.NORMAL * form.averaged) / 2)
        return cls(min(least, most), most)

    def unit(self, mb: Maker, largest: Var) -> Var:
        """What numbers with this largest magnitude are divided by: 1 where it is quiet.

        Louder numbers come down to `most`, smaller ones up to `least`.
        """
        return mb.real_div(x=largest, y=mb.clip(x=largest, alpha=self.least, beta=self.most))


def is_divided(x: Var) -> bool:
    """Is a value divided already: by the largest magnitude, or by as much as that is not quiet?"""
    if (division := producer(x, "real_div")) is None:
        return False
    unit = producer(division.y, "real_div")
    largest = division.y if unit is None or clipped_divisor(unit) is None else unit.x
    return producer(largest, "maximum") is not None


@dataclass(frozen=True)
class Units:
    """The rows of a form over their units."""

    values: Mapping[Var, Var]
    """Row -> what is left of it."""
    units: tuple[Var, ...]
    least: float
    """What no unit is below."""
    share: float = 1.0
    """The rows themselves were multiplied with it first."""

    def power(self, mb: Maker, powers: Sequence[float], number: float) -> Var:
        """A positive number divided by powers of the units; by shares of them, so that nothing overflows."""
        first, degree = min(self.least, 1.0), sum(powers)
        used = [(unit, power) for unit, power in zip(self.units, powers, strict=True) if power]
        shares = [(mb.real_div(x=first, y=unit), power) for unit, power in used]
        factors = [mb.square(x=share) if power == 2 else share for share, power in shares]
        whole = functools.reduce(lambda a, b: mb.mul(x=a, y=b), factors)
        return mb.mul(x=whole, y=number * self.share**degree / first**degree)


def divided(mb: Maker, form: Form, centre: bool = False) -> Units:
    """The rows of a form over a unit each; with `centre`, after their mean was taken away once more.

    A mean is taken of halves, so that no difference overflows, and then of what is left, which is what rounding
    did to the first: of a mean of 60 fp16 keeps steps of 1/32.
    """
    quiet, over = Quiet.of(form), {"axes": list(form.axes), "keep_dims": True}
    share = 0.5 if centre else 1.0
    floor = floor_of(form.guards, share)
    values, units = dict[Var, Var](), list[Var]()
    for rows in form.units:
        numbers = rows
        if centre:
            half = mb.mul(x=form.source, y=share)
            for _ in range(2):
                half = mb.sub(x=half, y=mb.reduce_mean(x=half, **over))
            numbers = [half]
        sizes = [mb.abs(x=row) for row in numbers]
        size: Var = functools.reduce(lambda a, b: mb.maximum(x=a, y=b), sizes)
        largest = mb.reduce_max(x=size, **over) if form.axes else size
        unit = quiet.unit(mb, mb.maximum(x=largest, y=floor))
        values |= {row: mb.real_div(x=number, y=unit) for row, number in zip(rows, numbers, strict=True)}
        units.append(unit)
    return Units(values, tuple(units), floor / quiet.least, share)


def floor_of(guards: Sequence[Guard], share: float = 1.0) -> float:
    """The least number that is divided by: a power of two, below what guards leave of a share of numbers."""
    least = (share * guard.number ** (1 / sum(guard.powers)) for guard in guards)
    return max([LEAST, *(2.0 ** math.floor(math.log2(number)) for number in least)])


def rebuilt(mb: Maker, form: Form, units: Units) -> Var:
    """What a form makes of numbers over units, times the powers of the units."""
    made = {**units.values, **{var: units.values[row] for var, row in form.same.items()}}
    guards = {guard.op: guard for guard in form.guards}
    for op in form.steps:
        made[op.outputs[0]] = _again(mb, op, made, guards.get(op), units)
    out, (unit,) = form.root.outputs[0], units.units
    if form.root.op_type == "log":
        result = plus_logarithm(mb, made[out], unit, form.powers[form.root.x][0])
    else:
        result = times_power(mb, made[out], unit, form.powers[out][0])
    return mb.squeeze(x=result, axes=list(form.axes)) if result.rank > out.rank else result


def _again(mb: Maker, op: Operation, made: Mapping[Var, Var], guard: Guard | None, units: Units) -> Var:
    """An op on smaller numbers: its guard is divided, too, and axes that it sums over stay."""
    inputs: dict[str, object] = {n: made[v] for n, v in op.inputs.items() if isinstance(v, Var) and v in made}
    if op.op_type in REDUCED:
        inputs["keep_dims"] = True
    if "epsilon" in op.inputs:
        inputs["epsilon"] = 0.0
    if guard is None:
        return again(mb, op, **inputs)
    share = units.power(mb, guard.powers, guard.number)
    if "epsilon" in op.inputs:
        return again(mb, op, **{**inputs, "x": mb.add(x=inputs["x"], y=share)})
    (value,) = inputs.values()
    return mb.maximum(x=value, y=share) if guard.clips else mb.add(x=value, y=share)


def times_power(mb: Maker, value: Var, unit: Var, degree: float) -> Var:
    """A value times a unit, its root, or the inverse of either."""
    if degree in (0.5, -0.5):
        root = mb.sqrt(x=unit) if degree > 0 else mb.rsqrt(x=unit, epsilon=0.0)
        return mb.mul(x=value, y=root)
    if degree == -1:
        return mb.real_div(x=value, y=unit)
    assert degree in (0, 1), degree
    return mb.mul(x=unit, y=value) if degree else value


def plus_logarithm(mb: Maker, value: Var, unit: Var, degree: float) -> Var:
    """A logarithm, plus that of a power of the unit."""
    more = mb.log(x=unit, epsilon=0.0)
    return mb.add(x=value, y=more if degree == 1 else mb.mul(x=more, y=degree))


def cosine_of(mb: Maker, form: Form, units: Units) -> Var:
    """A cosine of rows over units, each divided by the length of its own."""
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
