"""Tensors of a Core AI program that is being written: arithmetic on them writes its ops.

A number beside a tensor is a constant of the tensor's element type. A length of -1 is dynamic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from anesurgery.coreai.dtypes import name_of, numpy_of
from anesurgery.coreai.table import OWN
from anesurgery.coreai.toolkit import composite, constant, ir, ops, stored, tensor
from anesurgery.errors import NotExpressible
from anesurgery.mil import Array
from anesurgery.ops import names


class Dynamic(int):
    """A length that is not known, -1: it stays so whatever is added to it or multiplied."""

    def _same(self, other: Any) -> Dynamic:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = _same


DYNAMIC = Dynamic(-1)


class Value:
    """A tensor of the program; operators broadcast, and methods are called as torch's are."""

    known: Any = None
    """The numbers of a constant."""

    def __init__(self, node: Any) -> None:
        self._node = node

    @property
    def node(self) -> Any:
        """What Apple's builders take."""
        return self._node

    @property
    def shape(self) -> list[int]:
        """The lengths of the axes, -1 for dynamic ones."""
        return [length if length >= 0 else DYNAMIC for length in self.node.type.shape]

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def dtype(self) -> str:
        """The element type by its name in MIL."""
        return name_of(str(self.node.type.element_type))

    @property
    def is_float(self) -> bool:
        """Is it of floating-point numbers?"""
        return self.dtype.startswith("fp")

    def fixed(self, first: int = 0) -> list[int]:
        """The lengths of the axes from one on.

        Raises:
            NotExpressible: one of them is dynamic.
        """
        if -1 in self.shape[first:]:
            raise NotExpressible(f"the shape {self.shape} is dynamic")
        return self.shape[first:]

    def length(self, axis: int) -> int:
        """The length of one axis.

        Raises:
            NotExpressible: it is dynamic.
        """
        if self.shape[axis] < 0:
            raise NotExpressible(f"axis {axis} of the shape {self.shape} is dynamic")
        return self.shape[axis]

    def tolist(self) -> list[int]:
        """The whole numbers of a constant."""
        return known_ints(self, "a parameter")

    def like(self, number: Any) -> Value:
        """A scalar of the same element type."""
        return number if isinstance(number, Value) else scalar(number, self.dtype)

    def with_(self, op: str, other: Any) -> Value:
        """One of Core AI's ops of two operands, which broadcast; by "constants apart" (`modes.FORMS`)."""
        builder = getattr(ops, f"broadcasting_{op}")
        x, y = self.node, self.like(other).node
        if not (self.is_float and _joins(op, x, y)):
            return Value(builder(x, y))
        (made,) = composite(OWN + JOINED[op][1], {"x": x, "y": y}, {}, lambda nodes: [builder(*nodes)])
        return Value(made)

    def __add__(self, other: Any) -> Value:
        return self.with_("add", other)

    def __sub__(self, other: Any) -> Value:
        """Subtract; of a constant, add its negative (`modes.FORMS`, "sums for differences")."""
        known = other.known if isinstance(other, Value) else other
        return (
            self.with_("sub", other) if known is None or not self.is_float else self + array(-known, self.dtype)
        )

    def __rsub__(self, other: Any) -> Value:
        return self.like(other).with_("sub", self)

    def __mul__(self, other: Any) -> Value:
        return self.with_("mul", other)

    def __truediv__(self, other: Any) -> Value:
        return self.with_("divide", other)

    def __rtruediv__(self, other: Any) -> Value:
        return self.like(other).with_("divide", self)

    def __neg__(self) -> Value:
        return self.with_("mul", -1)

    def __gt__(self, other: Any) -> Value:
        return self.with_("greater", other)

    def __lt__(self, other: Any) -> Value:
        return self.like(other).with_("greater", self)

    def __ge__(self, other: Any) -> Value:
        return self.with_("greater", other).with_("or", self.equal(other))

    def __le__(self, other: Any) -> Value:
        return (self < other).with_("or", self.equal(other))

    def __or__(self, other: Value) -> Value:
        return self.with_("or", other)

    def __and__(self, other: Value) -> Value:
        return self.with_("and", other)

    def __xor__(self, other: Value) -> Value:
        return self.with_("xor", other)

    def __invert__(self) -> Value:
        return call("not", self)

    def __matmul__(self, other: Value) -> Value:
        """The matrix product over the last two axes; the others broadcast."""
        rank = max(self.ndim, other.ndim)
        return call("broadcasting_batch_matmul", self.to_rank(rank), other.to_rank(rank))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What a formula of the interpreter computes with torch is written: by the row of `TORCH`."""
        return TORCH[function](*args, **(kwargs or {}))

    __radd__, __rmul__ = __add__, __mul__

    def equal(self, other: Any) -> Value:
        """Where both are the same number."""
        return self.with_("equal", other)

    def maximum(self, other: Any) -> Value:
        """The larger of both."""
        return self.with_("maximum", other)

    def minimum(self, other: Any) -> Value:
        """The smaller of both."""
        return self.with_("minimum", other)

    def clamp(self, min: Any = None, max: Any = None) -> Value:
        """Clip to limits."""
        above = self if min is None else self.maximum(min)
        return above if max is None else above.minimum(max)

    def abs(self) -> Value:
        """Return the magnitude."""
        return call("abs", self)

    def tanh(self) -> Value:
        """The hyperbolic tangent."""
        return call("tanh", self)

    def round(self) -> Value:
        """The nearest whole number; of two the even one."""
        return call("round", self)

    def floor(self) -> Value:
        """The next whole number below, by "floor by round" (`modes.FORMS`); a half may go either way."""
        near = self.round()
        return near - (near > self).cast(self.dtype)

    def remainder(self, other: Any) -> Value:
        """Return the remainder with the sign of the divisor; Core AI's has that of the dividend."""
        rest, by = self.with_("modulo", other), self.like(other)
        other_side = (rest > 0) ^ (by > rest.like(0))
        return where(rest.with_("not_equal", 0) & other_side, rest + by, rest)

    def cast(self, dtype: str) -> Value:
        """Cast to another element type."""
        if dtype == self.dtype:
            return self
        cast = Value(ops.cast(self.node, tensor(self.shape, dtype)))
        cast.known = self.known if self.is_float and cast.is_float else None
        return cast

    def to(self, dtype: str) -> Value:
        """Cast to another element type."""
        return self.cast(dtype)

    def float(self) -> Value:
        """Cast to fp32."""
        return self.cast("fp32")

    def double(self) -> Value:
        """In fp32, the widest floats that Core AI computes in."""
        return self.cast("fp32")

    def long(self) -> Value:
        """Cast whole numbers to integers."""
        return self.cast("int32")

    def refined(self, shape: Sequence[int]) -> Value:
        """State lengths that are known where Core AI infers none; the runtime checks them."""
        if all(a == b or b < 0 for a, b in zip(self.shape, shape, strict=True)):
            return self
        known = [b if a < 0 else a for a, b in zip(self.shape, shape, strict=True)]
        return Value(ops.cast(self.node, tensor(known, self.dtype)))

    def reshape(self, *lengths: Any) -> Value:
        """Another shape, as lengths, a list or a value; one length may be -1: what is left."""
        shape = lengths[0] if len(lengths) == 1 else list(lengths)
        if not isinstance(shape, Value) and list(shape) == self.shape and -1 not in shape:
            return self
        if not isinstance(shape, Value) and list(shape).count(-1) > 1:
            raise NotExpressible(f"more than one length of {list(shape)} is dynamic")
        return Value(
            ops.reshape(self.node, shape.node if isinstance(shape, Value) else np.array(shape, np.int32))
        )

    def flatten(self, first: int) -> Value:
        """The axes from one on as one."""
        return self.reshape([*self.shape[:first], math.prod(self.fixed(first))])

    def expand(self, axes: Sequence[int]) -> Value:
        """New axes of length 1, numbered in the result."""
        return Value(ops.expand_dims(self.node, indices(axes).node)) if axes else self

    def squeeze(self, axes: int | Sequence[int]) -> Value:
        """Without some axes of length 1."""
        axes = [axes] if isinstance(axes, int) else axes
        return Value(ops.shrink_dims(self.node, indices(axes).node)) if axes else self

    def to_rank(self, rank: int) -> Value:
        """New axes of length 1 in front."""
        return self.expand(list(range(rank - self.ndim)))

    def transpose(self, perm: Sequence[int]) -> Value:
        """Axes in another order."""
        if list(perm) == list(range(self.ndim)):
            return self
        return Value(ops.transpose(self.node, unsigned(perm).node))

    def permute(self, *perm: int) -> Value:
        """Axes in another order, as torch takes it."""
        return self.transpose(perm)

    @property
    def mT(self) -> Value:  # noqa: N802 - torch's name
        """The last two axes exchanged."""
        return self.transpose([*range(self.ndim - 2), self.ndim - 1, self.ndim - 2])

    def chunk(self, count: int, dim: int = 0) -> list[Value]:
        """Equal pieces along an axis."""
        axis = dim % self.ndim
        size = self.length(axis) // count
        return [self.along(axis, i * size, (i + 1) * size) for i in range(count)]

    def flip(self, axis: int) -> Value:
        """The elements of an axis in the opposite order."""
        return call("reverse", self, indices([axis]))

    def unsqueeze(self, axis: int) -> Value:
        """A new axis of length 1."""
        return self.expand([axis])

    def slice(self, begin: Any, end: Any, strides: Any = None) -> Value:
        """A part of each axis; begins and ends are lists or values, strides are positive."""
        steps = [1] * self.ndim if strides is None else strides
        return call("slice", self, indices(begin), indices(end), indices(steps))

    def along(self, axis: int, begin: int, end: int, stride: int = 1) -> Value:
        """A part of one axis; a dynamic one may be read up to its end: -1."""
        begins, ends, steps = [0] * self.ndim, self.ends(), [1] * self.ndim
        begins[axis], ends[axis], steps[axis] = begin, self.ends()[axis] if end == -1 else end, stride
        return self.slice(begins, ends, steps)

    def __getitem__(self, places: tuple[Any, ...]) -> Value:
        """A slice of each axis, or an ellipsis for some; an axis that is cut must have a known length."""
        at = places.index(...) if ... in places else len(places)
        whole = [slice(None)] * (self.ndim - len(places) + (... in places))
        found = []
        for axis, place in enumerate([*places[:at], *whole, *places[at + 1 :]]):
            full = place == slice(None)
            found.append((0, self.ends()[axis], 1) if full else place.indices(self.length(axis)))
        return self.slice(*zip(*found, strict=True))

    def ends(self) -> list[int]:
        """The lengths of the axes as ends of slices."""
        return [length if length >= 0 else LONGEST for length in self.shape]

    def pad(self, pairs: Sequence[tuple[int, int]], value: Any = 0.0, mode: str = "constant") -> Value:
        """More elements at both ends of the last axes."""
        if not any(map(any, pairs)):
            return self
        amounts = [0, 0] * (self.ndim - len(pairs)) + [amount for pair in pairs for amount in pair]
        return Value(ops.pad(self.node, unsigned(amounts).node, self.like(value).node, mode))

    def broadcast(self, shape: Sequence[int] | Value) -> Value:
        """Repeated along axes of length 1."""
        if isinstance(shape, Value):
            return Value(ops.broadcast_to(self.node, shape.cast("uint32").node))
        return self if list(shape) == self.shape else Value(ops.broadcast_to(self.node, unsigned(shape).node))

    def reduce(self, op: str, axes: Sequence[int]) -> Value:
        """The sum, mean, max, min or product over axes, which stay with length 1."""
        return Value(getattr(ops, f"reduce_{op}")(self.node, indices(axes).node)) if axes else self

    def lengths(self) -> Value:
        """The shape as int32 numbers."""
        return call("get_shape", self).cast("int32")


def _padded(x: Value, ends: Sequence[int], mode: str = "constant", value: Any = None) -> Value:
    return x.pad(list(zip(ends[::2], ends[1::2], strict=True))[::-1], value or 0.0, mode)


TORCH: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.tanh: Value.tanh,
    torch.sigmoid: lambda x: call("sigmoid", x),
    torch.relu: lambda x: call("relu", x),
    torch.clamp: Value.clamp,
    torch.matmul: Value.__matmul__,
    torch.addmm: lambda total, x, y: total + x @ y,
    torch.cat: lambda values, dim=0: concat(values, dim % values[0].ndim),
    torch.nn.functional.pad: _padded,
    torch.round: Value.round,
    torch.add: Value.__add__,
    torch.where: lambda condition, x, y: where(condition, x, y),
    torch.gather: lambda x, axis, index: Value(ops.gather_along_axis(x.node, index.node, axis)),
    torch.broadcast_to: Value.broadcast,
    torch.isnan: lambda x: x.with_("not_equal", x),
    torch.ones_like: lambda x: array(np.ones(x.shape), x.dtype),
    torch.zeros_like: lambda x: array(np.zeros(x.shape), x.dtype),
}
"""Function of torch -> what writes it: the interpreter's formulas write ops where they are given `Value`s."""
JOINED = {
    "add": ("sum", "add"),
    "sub": ("sum", "sub"),
    "mul": ("product", "mul"),
    "divide": ("product", "real_div"),
}
"""Core AI's op of two operands -> what Apple's package joins it with, and its name in MIL."""
RESHAPES = names("shrink_dims expand_dims reshape")


def _kind(node: Any) -> str:
    """The op that made a value, as the file names it; "" for an argument of a block."""
    name = getattr(node.owner, "name", "")
    return str(name).removeprefix("coreai.").removeprefix("decomposable.").removeprefix("broadcasting_")


def _is_constant(node: Any) -> bool:
    """Is a value a constant, maybe in another shape?"""
    kind = _kind(node)
    return kind == "constant" or (kind in RESHAPES and _is_constant(node.owner.operands[0]))


def _joins(op: str, *nodes: Any) -> bool:
    """Would Apple's package compute an op of a constant together with the op before it?"""
    given = [node for node in nodes if not _is_constant(node)]
    if op not in JOINED or len(given) != 1:
        return False
    return _takes_in(given[0], JOINED[op][0])


def _takes_in(node: Any, family: str) -> bool:
    """Is a value made by an op that a sum with a constant, or a product, becomes a part of?"""
    kind = _kind(node)
    operands = list(node.owner.operands) if kind else []
    if kind in RESHAPES:
        return _takes_in(operands[0], family)
    if kind.startswith("conv"):
        return True
    if kind == "batch_matmul":
        return family == "sum"
    others = [operand for operand in operands if not _is_constant(operand)]
    if kind not in JOINED or len(others) == len(operands):
        return False
    return JOINED[kind][0] == family or any(_kind(n).startswith("conv") for n in others)


LONGEST = 2**31 - 1
"""The end of a slice that goes up to the end of an axis, however long it is."""


class Constant(Value):
    """A constant, written where it is used for the first time in a block."""

    def __init__(self, known: Array, dtype: str, write: Callable[[], Any]) -> None:
        self.known, self._name, self._write = known, dtype, write

    @property
    def node(self) -> Any:
        """Its op in the block that is being written."""
        return self._write()

    @property
    def shape(self) -> list[int]:
        """The lengths of the axes."""
        return list(np.shape(self.known))

    @property
    def dtype(self) -> str:
        """The element type by its name in MIL."""
        return self._name

    def reshape(self, *lengths: Any) -> Value:
        """Another shape, of the same numbers."""
        shape = lengths[0] if len(lengths) == 1 else list(lengths)
        reshaped = super().reshape(shape)
        reshaped.known = None if isinstance(shape, Value) else np.reshape(self.known, shape)
        return reshaped


def call(op: str, *values: Value) -> Value:
    """One of Core AI's ops that take values alone."""
    builder = getattr(ops, f"{op}_", None) or getattr(ops, op)  # where Python has the name, Apple's has a dash
    return Value(builder(*(value.node for value in values)))


def array(numbers: Any, dtype: str) -> Value:
    """A constant."""
    known = np.asarray(numbers, numpy_of(dtype))
    made = Value(constant(stored(known, dtype)))
    made.known = known
    return made


def _check_known(*numbers: Any) -> None:
    """See that no number is a length that is not known.

    Raises:
        NotExpressible: one is.
    """
    if any(isinstance(number, Dynamic) for number in numbers):
        raise NotExpressible("it computes with the length of an axis, which is dynamic")


def scalar(number: Any, dtype: str) -> Value:
    """A constant without axes; fp16 holds a number beyond its range as infinity."""
    _check_known(number)
    with np.errstate(over="ignore"):
        return array(np.asarray(number).astype(numpy_of(dtype)), dtype)


def indices(numbers: Any) -> Value:
    """Axes or places, as int32."""
    return numbers if isinstance(numbers, Value) else array(numbers, "int32")


def unsigned(numbers: Any) -> Value:
    """Permutations, strides and paddings, as uint32."""
    _check_known(*numbers) if isinstance(numbers, (list, tuple)) else _check_known(numbers)
    return array(numbers, "uint32")


def where(condition: Value, x: Any, y: Any) -> Value:
    """X where the condition holds, else y; one of them is a value."""
    x, y = (x, x.like(y)) if isinstance(x, Value) else (y.like(x), y)
    return call("broadcasting_where", condition, x, y)


def concat(values: Sequence[Value], axis: int) -> Value:
    """Tensors one after another along an axis; what is known of the other lengths must be known of all."""
    if len(values) == 1:
        return values[0]
    known = [max(lengths) for lengths in zip(*(value.shape for value in values), strict=True)]
    fitted = [value.refined([-1 if a == axis else n for a, n in enumerate(known)]) for value in values]
    return Value(ops.concat(axis, [value.node for value in fitted]))


def stack(values: Sequence[Value], axis: int) -> Value:
    """Tensors joined along a new axis."""
    return concat([value.expand([axis]) for value in values], axis)


def attribute(name: str, value: str) -> Any:
    """An attribute of Core AI's dialect that names a mode."""
    return ir.Attribute.parse(f"#coreai.{name}<{value}>")


def to_fp32(*values: Value) -> list[Value]:
    """Values in fp32 where they are fp16."""
    return [value.cast("fp32") if value.dtype == "fp16" else value for value in values]


def known_ints(numbers: Any, what: str) -> list[int]:
    """Whole numbers that must be known.

    Raises:
        NotExpressible: they are computed.
    """
    known = numbers.known if isinstance(numbers, Value) else numbers
    if known is None:
        raise NotExpressible(f"{what} is computed")
    return [int(v) for v in np.asarray(known).reshape(-1)]
