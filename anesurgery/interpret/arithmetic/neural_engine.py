"""An estimate of the Neural Engine's arithmetic ("ane", "ane:M1"), put together from measurements on chips.

`precision.meaning` calls `meaning` for each op. `properties.PROPERTIES` lists what is known, and says of each
row if and how it is modelled here. Without a chip, only rows that were found on every measured chip apply, and
the faults of any chip (`engine_faults.FAULTS`), since an app meets all of them.

The largest part is the ceiling: a sum of products becomes infinite as soon as a partial sum reaches 32768.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from anesurgery import fp16
from anesurgery.interpret.arithmetic import engine_faults
from anesurgery.interpret.arithmetic.properties import CHIPS, applies
from anesurgery.interpret.ops.constexpr import codes
from anesurgery.interpret.ops.windows import CONV, pad_axes, padding
from anesurgery.interpret.table import TABLE, Unsupported, ints
from anesurgery.mil import Operation, constant, consumers, is_output, producer

Tensor = torch.Tensor
Function = Callable[..., Any]

AT_ONCE = 1 << 22
"""The number of products that are summed up together: 17 MB of fp32."""

RESULTS = frozenset({"conv_transpose", "einsum", "conv_quantized"})
"""Ops of which only the result is compared with the ceiling, not the partial sums."""


@dataclass(frozen=True)
class Sum:
    """A sum of products for each element of a result, and bounds of its partial sums, from cheap to exact."""

    total: Callable[[], Tensor]
    """Computes the result, in fp32."""
    roughly: Callable[[], float]
    """Computes a number that no partial sum of any element exceeds."""
    magnitudes: Callable[[], Tensor]
    """Computes for each element the sum of the magnitudes of its terms, which no partial sum exceeds."""
    risky: Callable[[], Tensor]
    """Computes for each element if a partial sum may reach the ceiling."""
    terms: Callable[[Tensor], Tensor]
    """Places [count, rank] of elements -> their terms in order, [count, terms]."""
    length: int
    """The number of products; a bias is one more term. A single product has no ceiling ("one_term")."""


def overflowed(total: Tensor) -> Tensor:
    """Return a result that is infinite where its magnitude reaches the ceiling."""
    if total.numel() == 0 or float(total.abs().amax()) < fp16.CEILING:
        return total
    infinities = torch.copysign(torch.full_like(total, math.inf), total)
    return torch.where(total.abs() >= fp16.CEILING, infinities, total)


def limited(op_type: str, flush: float = 0.0) -> Callable[..., Tensor]:
    """Return the function of an op as the engine computes it: infinite once a partial sum reaches the ceiling.

    Operands below the magnitude `flush` count as 0.
    """
    sum_of = SUMS[op_type]

    def compute(**arguments: Any) -> Tensor:
        if not arguments["x"].is_floating_point():
            return TABLE[op_type].function(**arguments)
        if flush:
            arguments = {k: _flushed(v, flush) for k, v in arguments.items()}
        return with_ceiling(sum_of(**arguments))

    return compute


def with_ceiling(summed: Sum) -> Tensor:
    """Return the result of a sum; elements of which a partial sum reaches the ceiling are infinite.

    The terms of an element are added one by one only if the bounds do not rule that out.
    """
    total = summed.total()
    if summed.length < 2 or total.numel() == 0 or summed.roughly() < fp16.CEILING:
        return total
    risky = summed.risky().nonzero()
    for places in torch.split(risky, max(1, AT_ONCE // summed.length)):
        if len(places):
            partial = summed.terms(places).cumsum(-1)
            is_over = partial.abs() >= fp16.CEILING
            first = partial.gather(-1, is_over.int().argmax(-1, keepdim=True))[:, 0]
            infinities = torch.copysign(torch.full_like(first, math.inf), first)
            index = tuple(places.T)
            total[index] = torch.where(is_over.any(-1), infinities, total[index])
    return total


def bound(op_type: str, arguments: dict[str, Any]) -> float:
    """Return the largest magnitude that a partial sum of an op can reach, in any order of its terms."""
    magnitudes = SUMS[op_type](**arguments).magnitudes()
    return float(magnitudes.amax()) if magnitudes.numel() else 0.0


def _flushed(value: Any, least: float) -> Any:
    """Return floats with magnitudes below a limit replaced by 0."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return torch.where(value.abs() < least, 0.0, value)


def _matmul(
    x: Tensor, y: Tensor, transpose_x: bool = False, transpose_y: bool = False, start: float = 0.0
) -> Sum:
    """Return the sum of a matmul; `start` is the largest magnitude of the bias that a sum starts from."""
    transpose_y = transpose_y and y.ndim > 1
    columns = cached(y, ("columns", transpose_y), lambda: _columns(y, transpose_y))
    x = x.transpose(-1, -2) if transpose_x and x.ndim > 1 else x
    y = y.transpose(-1, -2) if transpose_y else y
    left, right = (x[None] if x.ndim == 1 else x), (y[:, None] if y.ndim == 1 else y)
    batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    shape = torch.matmul(torch.empty(x.shape, device="meta"), torch.empty(y.shape, device="meta")).shape

    def terms(places: Tensor) -> Tensor:
        # x (2, 3, 4), y (4, 5): the place (b, i, j) of (2, 3, 5) has the terms x[b, i, :] * y[:, j]
        full = [*batch, left.shape[-2], right.shape[-1]]
        flat = torch.zeros(len(places), dtype=torch.long)
        for axis, size in enumerate(shape):
            flat = flat * size + places[:, axis]
        *lead, i, j = torch.unravel_index(flat, full)
        rows = left.expand(*batch, *left.shape[-2:])[(*lead, i)]
        columns = right.expand(*batch, *right.shape[-2:]).transpose(-1, -2)[(*lead, j)]
        return rows * columns

    def risky() -> Tensor:
        # columns whose magnitudes, times the largest of x, stay below the ceiling need no other look
        if y.ndim == 1:
            return torch.matmul(x.abs(), y.abs()) + start >= fp16.CEILING
        risk = torch.zeros(shape, dtype=torch.bool)
        suspects = (largest_of(x) * columns + start >= fp16.CEILING).nonzero()[:, 0]
        risk[..., suspects] = torch.matmul(x.abs(), y[..., suspects].abs()) + start >= fp16.CEILING
        return risk

    return Sum(
        total=lambda: TABLE["matmul"].function(x=x, y=y),
        roughly=lambda: largest_of(left) * largest_of(columns) + start,
        magnitudes=lambda: torch.matmul(x.abs(), y.abs()),
        risky=risky,
        terms=terms,
        length=left.shape[-1],
    )


def _columns(y: Tensor, transposed: bool) -> Tensor:
    """Return the sum of magnitudes of each column, the largest of all batches."""
    if y.ndim == 1:
        return y.abs().sum()[None]
    sums = torch.linalg.vector_norm(y, 1, -1 if transposed else -2)
    return sums if sums.ndim == 1 or not sums.numel() else sums.flatten(0, -2).amax(0)


_CACHE: Any = WeakTensorKeyDictionary()


def cached(tensor: Tensor, key: Any, compute: Callable[[], Any]) -> Any:
    """Compute a result of a tensor once, as long as the tensor lives; nobody writes into tensors here."""
    results = _CACHE.setdefault(tensor, {})
    if key not in results:
        results[key] = compute()
    return results[key]


def largest_of(value: Tensor) -> float:
    """Return the largest magnitude of some numbers; 0 of none."""
    return float(torch.linalg.vector_norm(value, math.inf)) if value.numel() else 0.0


def _linear(x: Tensor, weight: Tensor, bias: Any = None) -> Sum:
    start = torch.zeros(weight.shape[0]) if bias is None else torch.as_tensor(bias).to(weight.dtype)
    product = _matmul(x, weight, transpose_y=True, start=largest_of(start))

    def terms(places: Tensor) -> Tensor:  # the bias is the value that the sum starts from
        return torch.cat([start[places[:, -1]][:, None], product.terms(places)], -1)

    return Sum(
        total=lambda: TABLE["linear"].function(x=x, weight=weight, bias=bias),
        roughly=product.roughly,
        magnitudes=lambda: product.magnitudes() + start.abs(),
        risky=product.risky,
        terms=terms,
        length=product.length,
    )


def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    strides: Any = None,
    pad_type: str = "valid",
    pad: Any = None,
    dilations: Any = None,
    groups: int = 1,
) -> Sum:
    n = x.ndim - 2
    s, d = ([1] * n if v is None else ints(v) for v in (strides, dilations))
    padded = pad_axes(x, padding(pad_type, pad, list(x.shape[2:]), list(weight.shape[2:]), s, d))
    start = torch.zeros(weight.shape[0]) if bias is None else bias

    def terms(places: Tensor) -> Tensor:
        # place (n, out, h, w): the window of its group's channels at h * stride, w * stride, times its weights
        per_group, inside = weight.shape[0] // int(groups), weight.shape[1]
        channels = (places[:, 1] // per_group * inside)[:, None] + torch.arange(inside)
        flat = torch.zeros(len(places), 1, dtype=torch.long)
        for axis in range(n):
            taps = torch.arange(weight.shape[2 + axis]) * d[axis]
            along = (places[:, 2 + axis] * s[axis])[:, None] + taps
            flat = flat[:, :, None] * padded.shape[2 + axis] + along[:, None, :]
            flat = flat.flatten(1)
        patches = padded.flatten(2)[places[:, 0][:, None, None], channels[:, :, None], flat[:, None, :]]
        products = (patches * weight.flatten(2)[places[:, 1]]).flatten(1)
        return torch.cat([start[places[:, 1]][:, None], products], -1)

    def magnitudes() -> Tensor:
        return CONV[n](padded.abs(), weight.abs(), start.abs(), s, 0, d, int(groups))

    norm = cached(weight, "norm", lambda: largest_of(torch.linalg.vector_norm(weight.flatten(1), 1, -1)))
    return Sum(
        total=lambda: TABLE["conv"].function(x, weight, bias, strides, pad_type, pad, dilations, groups),
        roughly=lambda: largest_of(x) * norm + largest_of(start),
        magnitudes=magnitudes,
        risky=lambda: magnitudes() >= fp16.CEILING,
        terms=terms,
        length=math.prod(weight.shape[1:]),
    )


SUMS: dict[str, Callable[..., Sum]] = {"matmul": _matmul, "linear": _linear, "conv": _conv}
"""Op type -> returns its sum, from the operands."""


# Rounding, tables and slices: what else the engine computes in its own way.


NON_FINITE = 65536.0
"""The number that an infinity or a NaN counts as inside the engine: the next power of two above fp16."""
WIDTH_LIMIT = 4095.0
"""From this magnitude on, a slice of the last axis becomes infinite on H13 and H14 (M1, M2)."""


def rounding(chip: str | None, op_type: str = "") -> Callable[[Tensor], Tensor]:
    """Return the function that rounds a float32 result of an op to numbers of fp16, in float32."""
    converts = op_type == "cast" and applies("cast_ties", chip)
    return _ties_away if applies("ties", chip) and not converts else _ties_even


def _ties_even(value: Tensor) -> Tensor:
    """Round to fp16, half-way cases to even."""
    return value.half().float()


def _ties_away(value: Tensor) -> Tensor:
    """Round to fp16, half-way cases away from zero."""
    nearest = value.half()
    low = nearest.float()
    beyond = torch.nextafter(nearest, torch.where(value >= 0, torch.inf, -torch.inf).half()).float()
    tie = (value - low).abs() == (beyond - value).abs()
    return torch.where(tie & (value != low), beyond, low)


def meaning(op: Operation, function: Function, moves: bool, chip: str | None) -> Function:
    """Return the function that computes an op as the engine does, from the one that computes it exactly.

    `moves` says that the op only moves numbers; the chip is one such as "M1", or None for any.
    """
    op_type = op.op_type
    if op_type in SUMS:
        function = limited(op_type, flush=fp16.NORMAL if applies("flush", chip) else 0.0)
        if op_type == "matmul" and applies("grid", chip):
            function = _then(function, _to_grid)
    elif op_type in RESULTS:
        function = _then(function, overflowed)
    elif op_type in MEASURED_TABLES and applies("measured_tables", chip):
        function = _from_measured_table(MEASURED_TABLES[op_type])
    elif op_type in TABLES:
        function = _from_table(TABLES[op_type])
    elif op_type in SLICES and applies("width_slice", chip):
        function = _with_width_limit(function, SLICES[op_type])
    elif op_type in EFFECTS and applies(EFFECTS[op_type].of, chip):
        function = EFFECTS[op_type].meaning(op, function)
    function = engine_faults.with_faults(op, function, chip)
    return function if moves else _finite_operands(function)


def _finite_operands(function: Function) -> Function:
    """Return a function for which infinities and NaN count as large numbers."""

    def compute(**arguments: Any) -> Any:
        return function(**{name: _finite(value) for name, value in arguments.items()})

    return compute


def _finite(value: Any) -> Any:
    """Return floats with infinities and NaN replaced by `NON_FINITE`."""
    if isinstance(value, list):
        return [_finite(v) for v in value]
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    # numbers of fp16 do not overflow a sum in fp32
    if cached(value, "finite", lambda: bool(torch.isfinite(value.sum()))):
        return value
    return torch.nan_to_num(value, nan=NON_FINITE, posinf=NON_FINITE, neginf=-NON_FINITE)


def _then(function: Function, change: Callable[[Any], Any]) -> Function:
    """Return a function whose result is changed by another."""
    return lambda **arguments: change(function(**arguments))


LOG_OF_ZERO = -45440.0
"""The logarithm of 0 and of numbers below it, as measured (`properties`, "log_zero")."""


def _log(x: Tensor, epsilon: Any = 1e-45) -> Tensor:
    return torch.where(x + epsilon > 0, torch.log(x + epsilon), LOG_OF_ZERO)


def _nearest_away(value: Tensor) -> Tensor:
    low = value.trunc()  # exact, as is the rest: adding 1/2 first would round
    return low + torch.sign(value) * ((value - low).abs() >= 0.5)


def wrong_scale(op: Operation) -> float:
    """Return the factor by which a quantized product is wrong: the scale of the result over that of its factor.

    1 where no factor is dequantized or both are, where another op reads the product, and where a scale is not
    one number.
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
class Effect:
    """How a property changes an op."""

    of: str
    """The name of the property."""
    meaning: Callable[[Operation, Function], Function]
    """(op, function that computes it exactly) -> function that computes it as the engine does."""


EFFECTS = {
    "sqrt": Effect("sqrt_negative", lambda op, function: lambda x: torch.sqrt(x.clamp_min(0))),
    "log": Effect("log_zero", lambda op, function: _log),
    "quantize": Effect("code_ties", lambda op, function: lambda **arguments: codes(_nearest_away, **arguments)),
    "mul": Effect("code_scale", _wrongly_scaled),
}
"""Op type -> the property that changes it."""


@dataclass(frozen=True)
class Table:
    """A table of an activation: straight lines between 33 points of its remainder, which falls to 0.

    The remainder is what an activation differs by from its limits: 1 - tanh(t), for example.
    """

    rest: Function
    """The remainder at t >= 0, in float64."""
    join: Function
    """(x, remainder at |x|) -> the activation."""
    error: float
    """The largest absolute error measured. The last point is placed so that the lines have this error."""


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
"""Op type -> its table."""
POINTS = 33
"""The points of a table: 32 steps of equal length, as the sources of `properties` have it."""


def _from_table(table: Table) -> Function:
    """Return the function that interpolates an activation in a table."""

    def compute(x: Tensor, **_: Any) -> Tensor:
        last, knots = _knots(table)
        knots = knots.to(x.device)
        place = (x.abs() * ((POINTS - 1) / last)).clamp_max_(POINTS - 1)
        left = place.floor().clamp_max_(POINTS - 2)
        index = left.int()
        rest = torch.lerp(knots[index], knots[index + 1], place - left)
        return table.join(x, torch.where(place < POINTS - 1, rest, 0.0))

    return compute


@cache
def _knots(table: Table) -> tuple[float, Tensor]:
    """Return the place of the last point, and the remainder at all points.

    The last point lies where the remainder falls to the error measured: beyond it, it counts as 0.
    """
    low, high = 0.5, 16.0
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
    """The activation in float64; the points are rounded to fp16."""
    step: float
    """The distance of two points; a power of two."""
    last: float
    """The place of the last point; the table is over [-last, last], or over [0, last] where it is odd."""
    odd: bool
    """Is the function odd, so that the table is of magnitudes?"""
    below: float
    """Below this the result is the limit at negative infinity."""
    above: float
    """From here on it is the limit at infinity."""


MEASURED_TABLES = {
    "sigmoid": MeasuredTable(torch.sigmoid, step=0.5, last=8.0, odd=False, below=-9.9375, above=8.3203125),
    "tanh": MeasuredTable(torch.tanh, step=0.125, last=4.0, odd=True, below=-4.0, above=4.0 + 2.0**-8),
}
"""On M1. Between the last point and the end of the range nothing was published: the last point holds there."""


def _from_measured_table(table: MeasuredTable) -> Function:
    """Return the function that interpolates an activation in a measured table."""

    def compute(x: Tensor, **_: Any) -> Tensor:
        result = _interpolate(table, x.abs()) * torch.sign(x) if table.odd else _interpolate(table, x)
        limits = table.value(torch.tensor([-torch.inf, torch.inf]))
        result = torch.where(x < table.below, limits[0], result)
        return torch.where(x >= table.above, limits[1], result)

    return compute


def _interpolate(table: MeasuredTable, x: Tensor) -> Tensor:
    """Interpolate from the point nearer 0; product and sum are rounded to fp16, ties away from zero."""
    place = x.double().clamp(-table.last, table.last) / table.step
    first = place.abs().floor().clamp_max(table.last / table.step - 1)
    near, far = ((first + n) * torch.where(place < 0, -1.0, 1.0) * table.step for n in (0, 1))
    a0, a1 = (table.value(at).half().float() for at in (near, far))
    fraction = (place.abs() - first).float()
    return _ties_away(a0 + _ties_away(fraction * (a1 - a0)))


GRID = 2.0**-16
"""The step between the results of the ops with the property "grid"."""


def _to_grid(result: Tensor) -> Tensor:
    """Round results to multiples of `GRID`, half-way cases away from zero."""
    if not result.is_floating_point():
        return result
    steps = result.double() / GRID
    return (torch.sign(steps) * (steps.abs() + 0.5).floor() * GRID).to(result.dtype)


def _with_width_limit(function: Function, begins_inside: Callable[..., list[bool]]) -> Function:
    """Return a slice whose outputs that begin inside the last axis are infinite from `WIDTH_LIMIT` on."""

    def compute(**arguments: Any) -> Any:
        result = function(**arguments)
        is_list = isinstance(result, (list, tuple))
        values = result if is_list else [result]
        marks = begins_inside(arguments, len(values))
        limited = [_width_limited(v) if mark else v for v, mark in zip(values, marks, strict=True)]
        return limited if is_list else limited[0]

    return compute


def _width_limited(value: Tensor) -> Tensor:
    """Return floats that are infinite from `WIDTH_LIMIT` on."""
    if not value.is_floating_point():
        return value
    value = value.float()
    return torch.where(value.abs() >= WIDTH_LIMIT, torch.copysign(torch.tensor(torch.inf), value), value)


def _by_begin(arguments: dict[str, Any], _: int) -> list[bool]:
    mask = arguments.get("begin_mask")
    return [(mask is None or not list(mask)[-1]) and ints(arguments["begin"])[-1] != 0]


def _by_part(arguments: dict[str, Any], parts: int) -> list[bool]:
    last = int(arguments["axis"]) % arguments["x"].ndim == arguments["x"].ndim - 1
    return [last and i > 0 for i in range(parts)]


SLICES: dict[str, Callable[..., list[bool]]] = {
    "slice_by_index": _by_begin,
    "slice_by_size": _by_begin,
    "split": _by_part,
}
"""Op type -> (arguments, number of outputs) -> does each output begin inside the last axis?"""


def chip_of(precision: str) -> str | None:
    """Return the chip in "ane:CHIP"; None in "ane".

    Raises:
        Unsupported: a chip of which nothing is known.
    """
    _, named, chip = precision.partition(":")
    if named and chip not in CHIPS:
        raise Unsupported(f"nothing is known of the arithmetic of chip {chip!r}; known: {', '.join(CHIPS)}")
    return chip or None
