"""Readers of ops and values that rules, passes and findings share.

Sections: types and sizes; parameters (axes, slices, numbers); small algebraic forms such as `x * c` and
`exp(x)`; words for reports; and the consumers of a value, followed through other ops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from anesurgery.mil import (
    Operation,
    Var,
    constant,
    consumers,
    is_output,
    is_stored,
    is_symbolic,
    np_dtype,
    producer,
    static_shape,
    types,
)
from anesurgery.ops import CARRIERS


@dataclass(frozen=True)
class TypeFacts:
    """What the type of a value says: is it a tensor (or scalar) of numbers, its dtype, shape and itemsize."""

    is_tensor: bool
    dtype: str
    shape: tuple[int, ...]
    itemsize: float
    """Bytes of an element: half a byte for "uint4", one for "bool"."""


@lru_cache(maxsize=4096)
def _kind(sym_type: Any) -> TypeFacts:
    wrapped = sym_type.wrapped_type() if types.is_state(sym_type) else sym_type
    has_shape = types.is_tensor(wrapped)
    element = wrapped.get_primitive() if has_shape else wrapped
    if not (has_shape or types.is_scalar(wrapped)) or types.is_str(element):
        return TypeFacts(is_tensor=False, dtype="", shape=(), itemsize=0)
    lengths = wrapped.get_shape() if has_shape else ()
    shape = tuple(1 if is_symbolic(d) else int(d) for d in lengths)
    dtype = str(types.builtin_to_string(element))
    bits = int("".join(filter(str.isdigit, dtype)) or 8)  # "bool" has no digits
    is_state = wrapped is not sym_type
    return TypeFacts(is_tensor=not is_state, dtype=dtype, shape=shape, itemsize=bits / 8)


def kind_of(var: Var) -> TypeFacts:
    """Return what the type of a value says; a state is no tensor, but has the shape of the tensor it holds."""
    return _kind(var.sym_type)


def is_tensor(var: Var) -> bool:
    """Is a value a tensor or a scalar of numbers (and not a list, a state or a string)?"""
    return kind_of(var).is_tensor


def is_float(var: Var) -> bool:
    """Does a value hold floats?"""
    return np_dtype(var).kind == "f"


def shape_of(var: Var) -> tuple[int, ...]:
    """Return the shape of a tensor, or of the tensor that a state holds, with 1 for dynamic lengths."""
    return kind_of(var).shape


def size_of(var: Var) -> int:
    """Return the size of a value in bytes, without padding; 0 for what is not a tensor."""
    kind = kind_of(var)
    return math.ceil(math.prod(kind.shape) * kind.itemsize) if kind.is_tensor else 0


def elements(var: Var) -> int:
    """Return the number of elements; dynamic lengths count as 1."""
    return math.prod(shape_of(var))


def weight(op: Operation) -> Var | None:
    """Return the stored weight of a conv, linear or matmul; None where it is computed."""
    var = op.inputs.get("y" if op.op_type == "matmul" else "weight")
    return var if isinstance(var, Var) and is_stored(var) else None


class Channels(NamedTuple):
    """The sizes of a product with a stored weight."""

    outputs: int
    inputs: int
    """Channels of x that one output reads: those of one group."""
    taps: int
    """Elements of a convolution's kernel; 1 for other products."""


def channels(op: Operation) -> Channels | None:
    """Return the channels of a product with a stored weight; None for other ops."""
    var = weight(op)
    shape = static_shape(var) if var is not None else None
    if shape is None or len(shape) < 2:
        return None
    if op.op_type != "matmul":
        return Channels(shape[0], shape[1], taps=math.prod(shape[2:]))
    if len(shape) > 2 and math.prod(shape[:-2]) > 1:
        return None
    rows, columns = shape[-2:]
    return Channels(rows, columns, 1) if flag(op, "transpose_y") else Channels(columns, rows, 1)


def flag(op: Operation, name: str) -> bool:
    """Return a boolean parameter; False when absent."""
    return bool(constant(op.inputs.get(name)))


def ints(op: Operation, name: str) -> list[int]:
    """Return a parameter of integers as a list; empty when it is absent or dynamic."""
    value = constant(op.inputs.get(name))
    return [] if value is None else [int(v) for v in getattr(value, "flat", [value])]


def each_axis(op: Operation, name: str, absent: Any) -> list[Any]:
    """Return a constant parameter of an op on x, such as a slice, as a list with one value for each axis of x.

    Where the parameter is absent, each is `absent`.
    """
    values = constant(op.inputs.get(name))
    return [absent] * op.x.rank if values is None else [type(absent)(value) for value in values]


@dataclass(frozen=True)
class SliceRange:
    """Indices that a slice takes along one axis, as the op states them; negative ones count from the end."""

    begin: int | None
    """The first index, 0 where the op leaves it open (and steps forward); None where it is dynamic."""
    end: int | None
    """The index behind the last; None where it is dynamic or left open."""
    to_end: bool
    """Is the end left open, so that everything from the first index on is taken?"""
    stride: int
    single: bool
    """Is one element taken, and the axis dropped?"""

    def places(self, size: int) -> tuple[int, int] | None:
        """Return (first, behind the last) index for an axis of length `size`; None where one is dynamic."""
        if self.begin is None:
            return None
        begin = _nonnegative_index(self.begin, size)
        if self.single:
            return begin, begin + 1
        if self.end is None:
            return (begin, size) if self.to_end else None
        return begin, _nonnegative_index(self.end, size)


def _nonnegative_index(index: int, size: int) -> int:
    return min(index + size if index < 0 else index, size)


def sliced(op: Operation) -> list[SliceRange]:
    """Return the range that a slice takes along each axis of x."""
    dynamic = [None] * op.x.rank
    axes = zip(
        ints(op, "begin") or dynamic,
        ints(op, "end") or dynamic,
        each_axis(op, "stride", 1),
        *(each_axis(op, f"{name}_mask", False) for name in ("begin", "end", "squeeze")),
        strict=True,
    )
    return [
        SliceRange(
            begin=0 if from_start else begin,
            end=None if to_end else end,
            to_end=to_end,
            stride=stride,
            single=single,
        )
        for begin, end, stride, from_start, to_end, single in axes
    ]


def counts_back_over_one(op: Operation) -> bool:
    """Does a slice count from the end of an axis of length 1, as `x[:, -1]` of (4, 1) does?"""
    return any(
        a.begin is not None and a.begin < 0 and n == 1 for a, n in zip(sliced(op), op.x.shape, strict=True)
    )


def slice_places(op: Operation) -> tuple[list[int], list[int]] | None:
    """Return (begins, ends) of a slice for all axes, none negative; None where one or the shape is dynamic."""
    shape = static_shape(op.x)
    pairs = [] if shape is None else [along.places(n) for along, n in zip(sliced(op), shape, strict=True)]
    known = [pair for pair in pairs if pair is not None]
    if not known or len(known) != len(pairs):
        return None
    return [begin for begin, _ in known], [end for _, end in known]


def axis_of(op: Operation) -> int:
    """Return the axis that an op works along, not negative; the last where it names none."""
    first: Var = op.inputs["values"][0] if "values" in op.inputs else op.x
    axes = first.rank or 1  # scalars are joined into a vector
    return (ints(op, "axis") or [-1])[0] % axes


def axes_of(op: Operation) -> list[int]:
    """Return the axes that an op on x works over, not negative; all where it names none."""
    return [axis % op.x.rank for axis in ints(op, "axes") or range(op.x.rank)]


def permutation(op: Operation) -> list[int]:
    """Return the axes of a transpose, not negative."""
    return [axis % op.x.rank for axis in ints(op, "perm")]


def number(var: Any) -> float | None:
    """Return the value of a constant with one element; None for other values."""
    if not isinstance(var, Var) or math.prod(static_shape(var) or (2,) * var.rank) != 1:
        return None  # a length that is not static counts as 2
    value = constant(var)
    if value is None or isinstance(value, str):
        return None
    return float(value.item() if hasattr(value, "item") else value)


class Times(NamedTuple):
    """A value and the number that an op multiplies it by."""

    value: Any
    factor: float


def scaled(op: Operation) -> Times | None:
    """Return a value and the number that an op multiplies it by; of a division the inverse. Else None."""
    if op.op_type == "real_div" and (divisor := number(op.y)):
        return Times(op.x, 1 / divisor)
    product = value_and_number(op) if op.op_type == "mul" else None
    return None if product is None else Times(*product)


def exponential(op: Operation | None) -> Times | None:
    """Return the t of `exp(t)`; of `pow(base, x)` with a number above 0 as base, x * log(base). Else None."""
    if op is None or op.op_type not in ("exp", "pow"):
        return None
    if op.op_type == "exp":
        return Times(op.x, 1.0)
    base = number(op.x)
    return Times(op.y, math.log(base)) if base is not None and 0 < base < math.inf else None


def value_and_number(op: Operation) -> tuple[Any, float] | None:
    """Return the value and the single number that an op takes as x and y, in either order; None without one."""
    for value, other in ((op.x, op.y), (op.y, op.x)):
        if (single := number(other)) is not None:
            return value, single
    return None


class Limits(NamedTuple):
    """A value that an op keeps away from 0, or clips, and the numbers that it does this with."""

    value: Any
    least: float
    """The number that is added, or the least result."""
    most: float
    """The upper end of a clip, else infinite."""


def clipped_divisor(op: Operation) -> Limits | None:
    """Return the limits of the clip in `m / clip(m)`; None for other divisions."""
    clip = producer(op.y, "clip")
    if clip is None or clip.x is not op.x:
        return None
    low, high = number(clip.alpha), number(clip.beta)
    return None if low is None or high is None else Limits(clip.x, low, high)


def guard_of(op: Operation | None) -> Limits | None:
    """Return the limits of an op that keeps a value away from 0; None for other ops.

    Such ops are `add`, `maximum` and `clip` with a number from 0 on, if the value keeps its shape.
    """
    if op is None or op.op_type not in ("add", "maximum", "clip"):
        return None
    if op.op_type == "clip":
        value, least, most = op.x, number(op.alpha), number(op.beta)
    else:
        value, least = value_and_number(op) or (op.x, None)
        most = math.inf
    if least is None or most is None or least < 0 or value.shape != op.outputs[0].shape:
        return None
    return Limits(value, least, most)


class Scaling(NamedTuple):
    """A value, the factor that a chain of ops multiplies it by, and those ops, the last one first."""

    value: Any
    factor: float
    ops: tuple[Operation, ...]


def scaled_by_all(op: Operation) -> Scaling | None:
    """Return the chain of ops up to `op` that multiplies a value by numbers; None if `op` does not."""
    ops, factors = list[Operation](), list[float]()
    value: Any = None
    inner: Operation | None = op
    while inner is not None and (times := scaled(inner)) is not None:
        ops.append(inner)
        factors.append(times.factor)
        value = times.value
        inner = value.op if consumers(value) == [inner] else None
    return Scaling(value, math.prod(reversed(factors)), tuple(ops)) if ops else None


class Power(NamedTuple):
    """An integer power of a value, with the ops that compute it, the last one first."""

    base: Any
    exponent: int
    ops: tuple[Operation, ...]


def integer_power(var: Any) -> Power | None:
    """Return an integer power from 2 on, written as power or products; else None."""
    if (power := _power_of_one_op(var.op)) is not None:
        return power
    last = producer(var, "mul")
    return None if last is None else _product_of_factors(last, last.y) or _product_of_factors(last, last.x)


def _product_of_factors(last: Operation, base: Any) -> Power | None:
    """Return the power of `base` that ends in the product `last`, as in `(x * x) * x`; else None."""
    ops = list[Operation]()
    op: Operation | None = last
    while op is not None and op.op_type == "mul" and op.x is not op.y and base in (op.x, op.y):
        ops.append(op)
        op = (op.x if op.y is base else op.y).op
    power = _power_of_one_op(op)
    if power is None or power.base is not base:
        return None
    return Power(base, power.exponent + len(ops), (*ops, *power.ops))


def _power_of_one_op(op: Operation | None) -> Power | None:
    """Return the integer power from 2 on that one op computes: `square`, `pow` or x * x; else None."""
    if op is not None and op.op_type == "pow":
        exponent = number(op.y) or 0.0
        return Power(op.x, int(exponent), (op,)) if exponent >= 2 and exponent % 1 == 0 else None
    if op is None or not (op.op_type == "square" or (op.op_type == "mul" and op.x is op.y)):
        return None
    return Power(op.x, 2, (op,))


def in_decibels(value: float, before: str = "", digits: int = 1) -> str:
    """Return how near two results are, in words: "PSNR 41.2 dB", "identical" (inf) or "not finite" (-inf, NaN).

    `before` is the text in front of a number, such as "PSNR ".
    """
    if math.isinf(value) or math.isnan(value):
        return "identical" if value > 0 else "not finite"
    return f"{before}{value:.{digits}f} dB"


def shape_in_words(shape: Any) -> str:
    """Return a shape as text: "1x64x32x32", "1x?x64" with a dynamic length (or None), or "scalar"."""
    return "x".join("?" if d is None or is_symbolic(d) else str(d) for d in shape) or "scalar"


def value_before(var: Var, through: frozenset[str] = CARRIERS) -> Var:
    """Return the value that ops of a type in `through` lead back to by their `x`; for none, the value."""
    while (op := producer(var, *through)) is not None:
        var = op.x
    return var


def readers_after(var: Var, through: frozenset[str] = CARRIERS) -> Iterator[Operation]:
    """Yield the consumers of a value; consumers of a type in `through` are replaced by their own consumers."""
    for value in _values_after(var, through):
        yield from (op for op in consumers(value) if op.op_type not in through)


def reaches_output(var: Var, through: frozenset[str]) -> bool:
    """Is a value an output of its block, either directly or through ops of these types?"""
    return any(map(is_output, _values_after(var, through)))


def _values_after(var: Var, through: frozenset[str]) -> Iterator[Var]:
    """Yield a value, and all that ops of these types compute from it without others in between."""
    stack, seen = [var], {var}
    while stack:
        value = stack.pop()
        yield value
        fresh = [v for op in consumers(value) if op.op_type in through for v in op.outputs if v not in seen]
        seen.update(fresh)
        stack += fresh


@dataclass(frozen=True)
class AxisSlice:
    """The part of one axis that a slice takes."""

    axis: int
    begin: int
    end: int
    stride: int = 1
    dropped: bool = False
    """Is one element taken and the axis removed?"""

    @property
    def size(self) -> int:
        """The number of elements that it takes."""
        return -(-(self.end - self.begin) // self.stride)


def axis_slice(op: Operation) -> AxisSlice | None:
    """Return what a `slice_by_index` takes if that is part of one axis, forward; else None."""
    shape, places = static_shape(op.x), slice_places(op)
    if shape is None or places is None:
        return None
    slices = [
        AxisSlice(axis, begin, end, stride=1 if along.single else along.stride, dropped=along.single)
        for axis, (begin, end, along) in enumerate(zip(*places, sliced(op), strict=True))
    ]
    parts = [part for part, size in zip(slices, shape, strict=True) if part.size != size or part.dropped]
    if len(parts) != 1 or parts[0].stride < 1 or parts[0].size < 1:
        return None
    return parts[0]
