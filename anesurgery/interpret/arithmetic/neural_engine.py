"""An estimate of the Neural Engine's arithmetic, put together from what has been measured on chips.

`properties.ELEMENTS` lists what is known, and says of each row whether and how it is modelled here. Without a
chip only the rows that were found on every chip measured apply, and the faults of any chip
(`engine_faults.FAULTS`): an app meets all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from anesurgery.interpret.arithmetic import engine_faults
from anesurgery.interpret.arithmetic import saturation as products
from anesurgery.interpret.arithmetic.properties import CHIPS, applies
from anesurgery.interpret.ops.quantization import codes
from anesurgery.interpret.table import Unsupported, ints
from anesurgery.mil import Operation, constant, consumers, is_output, producer

Tensor = torch.Tensor
Function = Callable[..., Any]

NON_FINITE = 65536.0
"""What an infinity or a NaN counts as inside the engine: the next power of two above fp16."""
WIDTH_LIMIT = 4095.0
SMALLEST_NORMAL = 2.0**-14
"""Where a slice of the last axis becomes infinite on H13 and H14, and below which products are 0 on H13."""


def rounding(chip: str | None, op_type: str = "") -> Callable[[Tensor], Tensor]:
    """The function that rounds a float32 result of an op to the numbers of fp16, in float32."""
    converts = op_type == "cast" and applies("cast_ties", chip)
    return _ties_away if applies("ties", chip) and not converts else _ties_even


def _ties_even(value: Tensor) -> Tensor:
    return value.half().float()


def _ties_away(value: Tensor) -> Tensor:
    near = value.half()
    low = near.float()
    beyond = torch.nextafter(near, torch.where(value >= 0, torch.inf, -torch.inf).half()).float()
    tie = (value - low).abs() == (beyond - value).abs()
    return torch.where(tie & (value != low), beyond, low)


def meaning(op: Operation, function: Function, moves: bool, chip: str | None) -> Function:
    """How an op is computed on the engine, from how it is computed exactly."""
    op_type = op.op_type
    if op_type in products.SUMS:
        function = products.limited(op_type, flush=SMALLEST_NORMAL if applies("flush", chip) else 0.0)
        if op_type == "matmul" and applies("grid", chip):
            function = _then(function, _to_grid)
    elif op_type in products.RESULTS:
        function = _then(function, products.overflowed)
    elif op_type in MEASURED_TABLES and applies("measured_tables", chip):
        function = _interpolated(MEASURED_TABLES[op_type])
    elif op_type in TABLES:
        function = _looked_up(TABLES[op_type])
    elif op_type in SLICES and applies("width_slice", chip):
        function = _cropped(function, SLICES[op_type])
    elif op_type in ROWS and applies(ROWS[op_type].row, chip):
        function = ROWS[op_type].meaning(op, function)
    function = engine_faults.computed(op, function, chip)
    return function if moves else _finite_operands(function)


def _finite_operands(function: Function) -> Function:
    """Infinities and NaN count as large numbers."""

    def compute(**arguments: Any) -> Any:
        return function(**{name: _finite(value) for name, value in arguments.items()})

    return compute


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(v) for v in value]
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    if products.remembered(value, "finite", lambda: _all_finite(value)):
        return value
    return torch.nan_to_num(value, nan=NON_FINITE, posinf=NON_FINITE, neginf=-NON_FINITE)


def _all_finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value.sum()))  # numbers of fp16 do not overflow a sum in fp32


def _then(function: Function, change: Callable[[Any], Any]) -> Function:
    """A function whose result is changed."""
    return lambda **arguments: change(function(**arguments))


def _log(x: Tensor, epsilon: Any = 1e-45) -> Tensor:
    return torch.where(x + epsilon > 0, torch.log(x + epsilon), -45440.0)


def _nearest_away(value: Tensor) -> Tensor:
    low = value.trunc()  # exact, as is the rest: adding 1/2 first would round
    return low + torch.sign(value) * ((value - low).abs() >= 0.5)


def wrong_scale(op: Operation) -> float:
    """By how much a product that is quantized is wrong: the scale of the result over that of its factor.

    1 where no factor is dequantized or both are, where another op reads the product, and where a scale or a
    zero point is not one number.
    """
    factors = [f for f in (producer(op.x, "dequantize"), producer(op.y, "dequantize")) if f is not None]
    readers = consumers(op.outputs[0])
    if len(factors) != 1 or [r.op_type for r in readers] != ["quantize"] or is_output(op.outputs[0]):
        return 1.0
    scales = [constant(q.scale) for q in (*readers, *factors)]
    if any(s is None or np.size(s) != 1 or not np.all(s) for s in scales):
        return 1.0
    result, factor = (float(np.asarray(s).item()) for s in scales)
    return result / factor


def _wrongly_scaled(op: Operation, function: Function) -> Function:
    factor = wrong_scale(op)
    return function if factor == 1 else _then(function, lambda value: value * factor)


@dataclass(frozen=True)
class Row:
    """An op that the row of one property is about."""

    row: str
    meaning: Callable[[Operation, Function], Function]
    """(op, how it is computed exactly) -> how it is computed on the engine."""


ROWS = {
    "sqrt": Row("sqrt_negative", lambda op, function: lambda x: torch.sqrt(x.clamp_min(0))),
    "log": Row("log_zero", lambda op, function: _log),
    "quantize": Row("code_ties", lambda op, function: lambda **arguments: codes(_nearest_away, **arguments)),
    "mul": Row("code_scale", _wrongly_scaled),
}


@dataclass(frozen=True)
class Table:
    """An activation as straight lines between 33 points of a rest that falls to 0."""

    rest: Function
    """The rest at t >= 0 (float64)."""
    join: Function
    """(x, rest at |x|) -> the activation."""
    error: float
    """Largest absolute error measured; the last point is placed so that this is the error of the lines."""


def _odd_join(x: Tensor, rest: Tensor) -> Tensor:
    return torch.sign(x) * (1 - rest)


def _ramp_join(x: Tensor, rest: Tensor) -> Tensor:
    return torch.relu(x) + rest


TABLES: dict[str, Table] = {
    "sigmoid": Table(lambda t: torch.sigmoid(-t), lambda x, rest: torch.where(x < 0, rest, 1 - rest), 3.4e-3),
    "tanh": Table(lambda t: 1 - torch.tanh(t), _odd_join, 1.7e-3),
    "erf": Table(lambda t: torch.erfc(t), _odd_join, 8.6e-4),
    "gelu": Table(lambda t: -t * torch.special.ndtr(-t), _ramp_join, 6.2e-3),
    "silu": Table(lambda t: -t * torch.sigmoid(-t), _ramp_join, 1.5e-2),
}
POINTS = 33
"""Points of the tables of activations: 32 steps of equal length, as the sources of `properties` have it."""


def _looked_up(table: Table) -> Function:
    def compute(x: Tensor, **_: Any) -> Tensor:
        last, knots = _knots(table)
        knots = knots.to(x.device)
        place = (x.abs() * ((POINTS - 1) / last)).clamp_max_(POINTS - 1)
        left = place.floor().clamp_max_(POINTS - 2)
        at = left.int()
        rest = torch.lerp(knots[at], knots[at + 1], place - left)
        return table.join(x, torch.where(place < POINTS - 1, rest, 0.0))

    return compute


@cache
def _knots(table: Table) -> tuple[float, Tensor]:
    """The place of the last point, and the rest at all points."""
    low, high = (
        0.5,
        16.0,
    )  # the rest beyond the last point is dropped: its size is what the error measured sets
    for _ in range(60):
        middle = (low + high) / 2
        dropped = float(table.rest(torch.tensor(middle, dtype=torch.float64)).abs())
        low, high = (middle, high) if dropped > table.error else (low, middle)
    points = torch.linspace(0, high, POINTS, dtype=torch.float64)
    return high, table.rest(points).float()


@dataclass(frozen=True)
class MeasuredTable:
    """A table whose points and steps are known bit for bit."""

    value: Function
    """The activation (float64); the points hold it rounded to fp16."""
    step: float
    """Between two points; a power of two."""
    last: float
    """The place of the last point; the table is over [-last, last], or over [0, last] where it is odd."""
    odd: bool
    below: float
    """Below this the result is that of negative infinity."""
    above: float
    """From here on it is that of infinity."""


MEASURED_TABLES = {
    "sigmoid": MeasuredTable(torch.sigmoid, 0.5, 8.0, False, -9.9375, 8.3203125),
    "tanh": MeasuredTable(torch.tanh, 0.125, 4.0, True, -4.0, 4.0 + 2.0**-8),
}
"""On M1. Between the last point and the end of the range nothing was published: the last point holds there."""


def _interpolated(table: MeasuredTable) -> Function:
    def compute(x: Tensor, **_: Any) -> Tensor:
        result = _line(table, x.abs()) * torch.sign(x) if table.odd else _line(table, x)
        ends = table.value(torch.tensor([-torch.inf, torch.inf]))
        result = torch.where(x < table.below, ends[0], result)
        return torch.where(x >= table.above, ends[1], result)

    return compute


def _line(table: MeasuredTable, x: Tensor) -> Tensor:
    """From the point nearer 0 towards the other; product and sum are rounded to fp16, ties away from zero."""
    place = x.double().clamp(-table.last, table.last) / table.step
    first = place.abs().floor().clamp_max(table.last / table.step - 1)
    near, far = ((first + n) * torch.where(place < 0, -1.0, 1.0) * table.step for n in (0, 1))
    a0, a1 = (table.value(at).half().float() for at in (near, far))
    share = (place.abs() - first).float()
    return _ties_away(a0 + _ties_away(share * (a1 - a0)))


GRID = 2.0**-16
"""The step between the numbers that the ops of the property "grid" give."""


def _to_grid(result: Tensor) -> Tensor:
    """Results are multiples of `GRID`; halves are rounded away from zero."""
    if not result.is_floating_point():
        return result
    steps = result.double() / GRID
    return (torch.sign(steps) * (steps.abs() + 0.5).floor() * GRID).to(result.dtype)


def _cropped(function: Function, inner: Callable[..., Any]) -> Function:
    """Slices of the last axis that do not begin at 0 lose magnitudes from `WIDTH_LIMIT` on."""

    def compute(**arguments: Any) -> Any:
        result = function(**arguments)
        values = result if isinstance(result, (list, tuple)) else [result]
        marks = inner(arguments, len(values))
        limited = [_width_limited(v) if mark else v for v, mark in zip(values, marks, strict=True)]
        return limited if isinstance(result, (list, tuple)) else limited[0]

    return compute


def _width_limited(value: Tensor) -> Tensor:
    if not value.is_floating_point():
        return value
    value = value.float()
    return torch.where(value.abs() >= WIDTH_LIMIT, torch.copysign(torch.tensor(torch.inf), value), value)


def _by_index(arguments: dict[str, Any], _: int) -> list[bool]:
    mask = arguments.get("begin_mask")
    kept = mask is not None and bool(list(mask)[-1])
    return [not kept and ints(arguments["begin"])[-1] != 0]


def _by_part(arguments: dict[str, Any], parts: int) -> list[bool]:
    last = int(arguments["axis"]) % arguments["x"].ndim == arguments["x"].ndim - 1
    return [last and i > 0 for i in range(parts)]


SLICES: dict[str, Callable[..., list[bool]]] = {
    "slice_by_index": _by_index,
    "slice_by_size": lambda arguments, _: [ints(arguments["begin"])[-1] != 0],
    "split": _by_part,
}
"""Op type -> (arguments, number of outputs) -> does each output begin inside the last axis?"""


def chip_of(precision: str) -> str | None:
    """The chip in "ane:CHIP"; None in "ane".

    Raises:
        Unsupported: a chip of which nothing is known.
    """
    _, named, chip = precision.partition(":")
    if named and chip not in CHIPS:
        raise Unsupported(f"nothing is known of the arithmetic of chip {chip!r}; known: {', '.join(CHIPS)}")
    return chip or None
