"""Small readers that the tables of findings share: sizes, weights, parameters, words, and consumers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from anesurgery.mil import (
    Operation,
    Var,
    constant,
    consumers,
    is_output,
    is_stored,
    is_symbolic,
    producer,
    static_shape,
    types,
)
from anesurgery.ops import CARRIERS


@dataclass(frozen=True)
class Kind:
    """What a type says: is it a tensor or scalar of numbers, of which element type, shape and bytes?"""

    is_tensor: bool
    dtype: str
    shape: tuple[int, ...]
    itemsize: float
    """Bytes of an element: half a byte for "uint4", one for "bool"."""


@lru_cache(maxsize=4096)
def _kind(sym_type: Any) -> Kind:
    wrapped = sym_type.wrapped_type() if types.is_state(sym_type) else sym_type
    tensor = types.is_tensor(wrapped)
    element = wrapped.get_primitive() if tensor else wrapped
    if not (tensor or types.is_scalar(wrapped)) or types.is_str(element):
        return Kind(False, "", (), 0)
    lengths = wrapped.get_shape() if tensor else ()
    shape = tuple(1 if is_symbolic(d) else int(d) for d in lengths)
    dtype = str(types.builtin_to_string(element))
    bits = int("".join(filter(str.isdigit, dtype)) or 8)
    return Kind(wrapped is sym_type, dtype, shape, bits / 8)


def kind_of(var: Var) -> Kind:
    """What the type of a value says; of a state, that it is not a tensor, and the shape of the one it holds."""
    return _kind(var.sym_type)


def is_tensor(var: Var) -> bool:
    """Is it a tensor or a scalar of numbers (and no list, state or string)?"""
    return kind_of(var).is_tensor


def shape_of(var: Var) -> tuple[int, ...]:
    """Lengths of a tensor, 1 for dynamic ones; of a state, those of its tensor."""
    return kind_of(var).shape


def size_of(var: Var) -> int:
    """Bytes, rows not padded; 0 for what is not a tensor."""
    kind = kind_of(var)
    return math.ceil(math.prod(kind.shape) * kind.itemsize) if kind.is_tensor else 0


def elements(var: Var) -> int:
    """Number of elements; dynamic lengths count as one."""
    return math.prod(shape_of(var))


def weight(op: Operation) -> Var | None:
    """The stored weight of a conv, linear or matmul; None where it is computed."""
    var = op.inputs.get("y" if op.op_type == "matmul" else "weight")
    return var if isinstance(var, Var) and is_stored(var) else None


def channels(op: Operation) -> tuple[int, int, int] | None:
    """Outputs, inputs (of one group) and taps of a product with a stored weight of static shape."""
    var = weight(op)
    shape = static_shape(var) if var is not None else None
    if shape is None or len(shape) < 2:
        return None
    if op.op_type != "matmul":
        return shape[0], shape[1], math.prod(shape[2:])
    if len(shape) > 2 and math.prod(shape[:-2]) > 1:
        return None
    rows, columns = shape[-2:]
    return (rows, columns, 1) if flag(op, "transpose_y") else (columns, rows, 1)


def flag(op: Operation, name: str) -> bool:
    """A boolean parameter; False when absent."""
    return bool(constant(op.inputs.get(name)))


def ints(op: Operation, name: str) -> list[int]:
    """A parameter of integers; empty when it is absent or dynamic."""
    value = constant(op.inputs.get(name))
    return [] if value is None else [int(v) for v in getattr(value, "flat", [value])]


def each_axis(op: Operation, name: str, absent: Any) -> list[Any]:
    """A constant parameter of an op on x, a value for each axis of x.

    Args:
        op: the op, as a slice.
        name: the parameter.
        absent: the value for each axis where it is not there.
    """
    values = constant(op.inputs.get(name))
    return [absent] * op.x.rank if values is None else [type(absent)(value) for value in values]


@dataclass(frozen=True)
class Along:
    """What a slice takes along one axis, in places as the op states them: negative ones count from the end."""

    begin: int | None
    """The first place, 0 where the op leaves it open (and steps forward); None where it is dynamic."""
    end: int | None
    """The place behind the last; None where it is dynamic, or left open."""
    to_end: bool
    """Is the end left open, so that all that follows is taken?"""
    stride: int
    single: bool
    """Is one element taken, and the axis dropped?"""

    def places(self, size: int) -> tuple[int, int] | None:
        """The first place and the one behind the last of an axis of a length; None where one is dynamic."""
        begin = None if self.begin is None else _from_front(self.begin, size)
        if begin is None or self.single:
            return None if begin is None else (begin, begin + 1)
        if self.end is None:
            return (begin, size) if self.to_end else None
        return begin, _from_front(self.end, size)


def _from_front(place: int, size: int) -> int:
    return min(place + size if place < 0 else place, size)


def sliced(op: Operation) -> list[Along]:
    """What a slice takes along each axis of x."""
    begins, ends = ints(op, "begin"), ints(op, "end")
    opens, closes, single = (each_axis(op, f"{n}_mask", False) for n in ("begin", "end", "squeeze"))
    return [
        Along(
            0 if opens[axis] else begins[axis] if begins else None,
            ends[axis] if ends and not closes[axis] else None,
            closes[axis],
            stride,
            single[axis],
        )
        for axis, stride in enumerate(each_axis(op, "stride", 1))
    ]


def slice_places(op: Operation) -> tuple[list[int], list[int]] | None:
    """Where a slice begins and ends on each axis, from the front; None where one is dynamic, or the shape."""
    shape = static_shape(op.x)
    pairs = [] if shape is None else [along.places(n) for along, n in zip(sliced(op), shape, strict=True)]
    known = [pair for pair in pairs if pair is not None]
    if not known or len(known) != len(pairs):
        return None
    return [begin for begin, _ in known], [end for _, end in known]


def axis_of(op: Operation) -> int:
    """The axis that an op works along, not negative; the last where it names none."""
    first: Var = op.inputs["values"][0] if "values" in op.inputs else op.x
    return (ints(op, "axis") or [-1])[0] % first.rank


def axes_of(op: Operation) -> list[int]:
    """The axes that an op on x works over, not negative; all where it names none."""
    return [axis % op.x.rank for axis in ints(op, "axes") or range(op.x.rank)]


def permutation(op: Operation) -> list[int]:
    """The axes of a transpose, not negative."""
    return [axis % op.x.rank for axis in ints(op, "perm")]


def number(var: Any) -> float | None:
    """The value of a constant with one element."""
    if not isinstance(var, Var) or math.prod(static_shape(var) or (2,) * var.rank) != 1:
        return None
    value = constant(var)
    if value is None or isinstance(value, str):
        return None
    return float(value if not hasattr(value, "flat") else next(iter(value.flat)))


def clipped_divisor(op: Operation) -> tuple[float, float] | None:
    """The ends of the clip of `m / clip(m)`; None for other divisions."""
    clip = producer(op.y, "clip")
    if clip is None or clip.x is not op.x:
        return None
    low, high = number(clip.alpha), number(clip.beta)
    return None if low is None or high is None else (low, high)


def scaled(op: Operation) -> tuple[Any, float] | None:
    """A value and the number that it is multiplied with, or divided by, by an op; None for all others."""
    if op.op_type == "real_div" and (divisor := number(op.y)):
        return op.x, 1 / divisor
    return beside_number(op) if op.op_type == "mul" else None


def exponential(op: Operation | None) -> tuple[Any, float] | None:
    """The exponent of `exp(x)`, or of a power of a positive number, and the logarithm of that number."""
    if op is None or op.op_type not in ("exp", "pow"):
        return None
    if op.op_type == "exp":
        return op.x, 1.0
    base = number(op.x)
    return (op.y, math.log(base)) if base is not None and 0 < base < math.inf else None


def beside_number(op: Operation) -> tuple[Any, float] | None:
    """The value and the one number that an op takes as x and y, in either order; None without a number."""
    for value, other in ((op.x, op.y), (op.y, op.x)):
        if (single := number(other)) is not None:
            return value, single
    return None


def guard_of(op: Operation | None) -> tuple[Any, float, float] | None:
    """What an op keeps away from 0, the number that it adds or is at least, and the end that it cuts off.

    None for other ops than `add`, `maximum` and `clip` of a value, in its shape, with a number from 0 on.
    """
    if op is None or op.op_type not in ("add", "maximum", "clip"):
        return None
    value, least = (op.x, number(op.alpha)) if op.op_type == "clip" else beside_number(op) or (op.x, None)
    most = number(op.beta) if op.op_type == "clip" else math.inf
    if least is None or most is None or least < 0 or value.shape != op.outputs[0].shape:
        return None
    return value, least, most


def scaled_by_all(op: Operation) -> tuple[Any, float, tuple[Operation, ...]] | None:
    """A value, the number that one or several ops in a row multiply it with, and the ops, the last first."""
    found = scaled(op)
    if found is None:
        return None
    inner = found[0].op
    more = None if inner is None or consumers(found[0]) != [op] else scaled_by_all(inner)
    return (*found, (op,)) if more is None else (more[0], found[1] * more[1], (op, *more[2]))


def whole_power(var: Any) -> tuple[Any, int, tuple[Operation, ...]] | None:
    """The base and the exponent, 2 or more, of a power or of products of one value; and what makes it."""
    op = var.op
    if op is None:
        return None
    if op.op_type == "square":
        return op.x, 2, (op,)
    if op.op_type == "pow":
        exponent = number(op.y) or 0.0
        return (op.x, int(exponent), (op,)) if exponent >= 2 and exponent % 1 == 0 else None
    if op.op_type != "mul":
        return None
    if op.x is op.y:
        return op.x, 2, (op,)
    for inner, other in ((op.x, op.y), (op.y, op.x)):
        found = whole_power(inner)
        if found is not None and found[0] is other:
            return found[0], found[1] + 1, (op, *found[2])
    return None


def in_decibels(value: float, before: str = "", digits: int = 1) -> str:
    """How near two results are, in words: "PSNR 41.2 dB", "identical" or "not finite".

    Args:
        value: in dB; infinite where nothing differs, and less than any number where one side is not finite.
        before: what stands before a number.
        digits: after the point.
    """
    if math.isinf(value) or math.isnan(value):
        return "identical" if value > 0 else "not finite"
    return f"{before}{value:.{digits}f} dB"


def shape_in_words(shape: Any) -> str:
    """A shape for a reader: "1x64x32x32", "1x?x64" with a dynamic length, or "scalar"."""
    return "x".join("?" if is_symbolic(d) else str(d) for d in shape) or "scalar"


def readers_after(var: Var, through: frozenset[str] = CARRIERS) -> Iterator[Operation]:
    """The readers of a value; those of a type in `through` are followed to their readers."""
    stack, seen = [var], {var}
    while stack:
        for op in consumers(stack.pop()):
            if op.op_type not in through:
                yield op
                continue
            fresh = [v for v in op.outputs if v not in seen]
            seen.update(fresh)
            stack += fresh


def reaches_output(var: Var, through: frozenset[str]) -> bool:
    """Is a value an output of its block, as it is or through ops of these types?"""
    stack, seen = [var], {var}
    while stack:
        found = stack.pop()
        if is_output(found):
            return True
        fresh = [v for op in consumers(found) if op.op_type in through for v in op.outputs if v not in seen]
        seen.update(fresh)
        stack += fresh
    return False


@dataclass(frozen=True)
class AxisSlice:
    """Which part of which axis."""

    axis: int
    begin: int
    end: int
    stride: int = 1
    dropped: bool = False
    """Does the result lack the axis (of which one element is taken)?"""

    @property
    def size(self) -> int:
        """How many elements it takes."""
        return -(-(self.end - self.begin) // self.stride)


def axis_slice(op: Operation) -> AxisSlice | None:
    """What a `slice_by_index` takes, where that is part of one axis, forward; else None."""
    shape, places = static_shape(op.x), slice_places(op)
    if shape is None or places is None:
        return None
    rows = enumerate(zip(*places, sliced(op), strict=True))
    each = [AxisSlice(a, b, e, 1 if s.single else s.stride, s.single) for a, (b, e, s) in rows]
    parts = [part for part, size in zip(each, shape, strict=True) if part.size != size or part.dropped]
    if len(parts) != 1 or parts[0].stride < 1 or parts[0].size < 1:
        return None
    return parts[0]
