"""Tensors of a Core AI program that is being written: arithmetic on a `Value` writes ops.

Lowerings compute with `Value`s as with torch tensors: `x * 2 + bias` writes a mul and an add. A `Value` also
stands in for a tensor in the interpreter's own formulas, whose torch functions the table `TORCH` maps to ops. A
number beside a tensor becomes a constant of the tensor's element type. A length of -1 is dynamic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partialmethod
from typing import Any

import numpy as np
import torch

from anesurgery.coreai.names import OWN, name_of, numpy_of
from anesurgery.coreai.toolkit import composite, constant, constant_attribute, ir, ops, tensor
from anesurgery.errors import NotExpressible
from anesurgery.mil import Array
from anesurgery.ops import names


class Dynamic(int):
    """An unknown length, -1; it stays unknown whatever is added to it or multiplied by it."""

    def __add__(self, other: Any) -> Dynamic:
        return self

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __add__


DYNAMIC = Dynamic(-1)
LONGEST = 2**31 - 1
"""The end of a slice to the end of an axis of any length."""


def unary_op(op: str) -> Callable[[Value], Value]:
    """Return the function that writes an op of one operand."""
    return lambda x: call(op, x)


def binary_op(op: str) -> Callable[[Value, Any], Value]:
    """Return the function that writes an op of two operands."""
    return lambda x, y: x.binary(op, y)


def _reversed(op: str) -> Callable[[Value, Any], Value]:
    return lambda x, y: x.like(y).binary(op, x)


class Value:
    """A tensor of the program; operators broadcast, and methods are those of torch."""

    known: Any = None
    """The numbers of a constant; None for other tensors."""

    def __init__(self, node: Any) -> None:
        self._node = node

    @property
    def node(self) -> Any:
        """The value that Apple's builders take."""
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
        """Whether the elements are floating-point numbers."""
        return self.dtype.startswith("fp")

    def fixed_lengths(self, first: int = 0) -> list[int]:
        """Return the lengths of the axes from one on, which must be known."""
        if -1 in self.shape[first:]:
            raise NotExpressible(f"the shape {self.shape} is dynamic")
        return self.shape[first:]

    def length(self, axis: int) -> int:
        """Return the length of one axis, which must be known."""
        if self.shape[axis] < 0:
            raise NotExpressible(f"axis {axis} of the shape {self.shape} is dynamic")
        return self.shape[axis]

    def tolist(self) -> list[int]:
        """Return the integers of a constant."""
        return known_ints(self, "a parameter")

    def like(self, number: Any) -> Value:
        """Return a number as a scalar of the same element type."""
        return number if isinstance(number, Value) else scalar(number, self.dtype)

    def binary(self, op: str, other: Any) -> Value:
        """Write an op of two operands, which broadcast; a composite where Apple's builder would fuse it."""
        builder = getattr(ops, f"broadcasting_{op}")
        x, y = self.node, self.like(other).node
        if not (self.is_float and _would_be_fused(op, x, y)):
            return Value(builder(x, y))
        (made,) = composite(OWN + FUSED_BY_APPLE[op][1], {"x": x, "y": y}, {}, lambda nodes: [builder(*nodes)])
        return Value(made)

    __add__ = __radd__ = binary_op("add")
    __mul__ = __rmul__ = binary_op("mul")
    __truediv__, __rtruediv__ = binary_op("divide"), _reversed("divide")
    __gt__, __lt__ = binary_op("greater"), _reversed("greater")
    __or__, __and__, __xor__ = binary_op("or"), binary_op("and"), binary_op("xor")
    equal, maximum, minimum = binary_op("equal"), binary_op("maximum"), binary_op("minimum")
    abs, tanh, round, __invert__ = unary_op("abs"), unary_op("tanh"), unary_op("round"), unary_op("not")

    def __sub__(self, other: Any) -> Value:
        """Subtract; of a constant, add its negative: Apple's builder makes (conv(x) - m) * s wrong."""
        known = other.known if isinstance(other, Value) else other
        if known is None or not self.is_float:
            return self.binary("sub", other)
        return self + array(-known, self.dtype)

    __rsub__ = _reversed("sub")

    def __neg__(self) -> Value:
        return self * -1

    def __ge__(self, other: Any) -> Value:
        return (self > other) | self.equal(other)

    def __le__(self, other: Any) -> Value:
        return (self < other) | self.equal(other)

    def __matmul__(self, other: Value) -> Value:
        """The matrix product over the last two axes; the others broadcast."""
        rank = max(self.ndim, other.ndim)
        return call("broadcasting_batch_matmul", *(v.expand(list(range(rank - v.ndim))) for v in (self, other)))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Write what a formula of the interpreter computes with torch, by the row of `TORCH`."""
        return TORCH[function](*args, **(kwargs or {}))

    def clamp(self, min: Any = None, max: Any = None) -> Value:
        """Clip to limits."""
        above = self if min is None else self.maximum(min)
        return above if max is None else above.minimum(max)

    def floor(self) -> Value:
        """Round down; a floor_divide by 1 gives NaN for infinity, and was reported to do nothing on the GPU."""
        near = self.round()
        return near - (near > self).cast(self.dtype)

    def fmod(self, other: Any) -> Value:
        """Return the remainder with the sign of the dividend."""
        return self.binary("modulo", other)

    def cast(self, dtype: str) -> Value:
        """Cast to another element type."""
        if dtype == self.dtype:
            return self
        cast = Value(ops.cast(self.node, tensor(self.shape, dtype)))
        cast.known = self.known if self.is_float and cast.is_float else None
        return cast

    to = cast
    float = double = partialmethod(cast, "fp32")  # the widest float in which Core AI computes
    long = partialmethod(cast, "int32")

    def refined(self, shape: Sequence[int]) -> Value:
        """State lengths that are known where Core AI infers none; the runtime checks them."""
        if all(a == b or b < 0 for a, b in zip(self.shape, shape, strict=True)):
            return self
        known = [b if a < 0 else a for a, b in zip(self.shape, shape, strict=True)]
        return Value(ops.cast(self.node, tensor(known, self.dtype)))

    def reshape(self, *lengths: Any) -> Value:
        """Reshape to lengths, a list or a value; one length may be -1."""
        shape = lengths[0] if len(lengths) == 1 else list(lengths)
        if isinstance(shape, Value):
            return Value(ops.reshape(self.node, shape.node))
        if list(shape).count(-1) > 1:
            raise NotExpressible(f"more than one length of {list(shape)} is dynamic")
        same = list(shape) == self.shape and -1 not in shape
        return self if same else Value(ops.reshape(self.node, np.array(shape, np.int32)))

    def flatten(self, first: int) -> Value:
        """Merge the axes from one on."""
        return self.reshape([*self.shape[:first], math.prod(self.fixed_lengths(first))])

    def expand(self, axes: Sequence[int]) -> Value:
        """Insert axes of length 1, numbered in the result."""
        return Value(ops.expand_dims(self.node, indices(axes).node)) if axes else self

    def squeeze(self, axes: int | Sequence[int]) -> Value:
        """Drop axes of length 1."""
        axes = [axes] if isinstance(axes, int) else axes
        return Value(ops.shrink_dims(self.node, indices(axes).node)) if axes else self

    def as_scalar(self) -> Value:
        """Drop all axes, each of length 1."""
        return self.squeeze(list(range(self.ndim)))

    def permute(self, *perm: Any) -> Value:
        """Permute the axes, given as a list or one by one."""
        order = list(perm[0] if len(perm) == 1 else perm)
        return self if order == sorted(order) else Value(ops.transpose(self.node, unsigned(order).node))

    @property
    def mT(self) -> Value:  # noqa: N802 - torch's name
        """The last two axes exchanged."""
        return self.permute(*range(self.ndim - 2), self.ndim - 1, self.ndim - 2)

    def chunk(self, count: int, dim: int = 0) -> list[Value]:
        """Split an axis into equal pieces."""
        size = self.length(dim) // count
        return [self.along(dim, i * size, (i + 1) * size) for i in range(count)]

    def flip(self, axes: int | Sequence[int]) -> Value:
        """Reverse one axis or several."""
        axes = [axes] if isinstance(axes, int) else axes
        return call("reverse", self, indices([axis % self.ndim for axis in axes]))

    def unsqueeze(self, axis: int) -> Value:
        """Insert an axis of length 1."""
        return self.expand([axis])

    def slice(self, begin: Any, end: Any, strides: Any = None) -> Value:
        """Slice each axis; begins and ends are lists or values, strides are positive."""
        steps = [1] * self.ndim if strides is None else strides
        return call("slice", self, indices(begin), indices(end), indices(steps))

    def along(self, axis: int, begin: int, end: int) -> Value:
        """Slice one axis."""
        begins, ends = [0] * self.ndim, self.ends()
        begins[axis], ends[axis] = begin, end
        return self.slice(begins, ends)

    def __getitem__(self, places: tuple[Any, ...]) -> Value:
        """Slice each axis, or an ellipsis for several; an axis that is cut must have a known length."""
        at = places.index(...) if ... in places else len(places)
        whole = [slice(None)] * (self.ndim - len(places) + (... in places))
        bounds = []
        for axis, place in enumerate([*places[:at], *whole, *places[at + 1 :]]):
            is_whole = place == slice(None)
            bounds.append((0, self.ends()[axis], 1) if is_whole else place.indices(self.length(axis)))
        return self.slice(*zip(*bounds, strict=True))

    def ends(self) -> list[int]:
        """Return the lengths of the axes as ends of slices."""
        return [length if length >= 0 else LONGEST for length in self.shape]

    def pad(self, pairs: Sequence[tuple[int, int]], value: Any = 0.0, mode: str = "constant") -> Value:
        """Pad the last axes at both ends."""
        if not any(map(any, pairs)):
            return self
        amounts = [0, 0] * (self.ndim - len(pairs)) + [amount for pair in pairs for amount in pair]
        return Value(ops.pad(self.node, unsigned(amounts).node, self.like(value).node, mode))

    def broadcast(self, shape: Sequence[int] | Value) -> Value:
        """Repeat along axes of length 1."""
        if isinstance(shape, Value):
            return Value(ops.broadcast_to(self.node, shape.cast("uint32").node))
        return self if list(shape) == self.shape else Value(ops.broadcast_to(self.node, unsigned(shape).node))

    def reduce(self, op: str, axes: Sequence[int]) -> Value:
        """Return the sum, mean, max, min or product over axes, which keep length 1."""
        return Value(getattr(ops, f"reduce_{op}")(self.node, indices(axes).node)) if axes else self

    def lengths(self) -> Value:
        """Return the shape as an int32 tensor."""
        return call("get_shape", self).cast("int32")


def _padded(x: Value, ends: Sequence[int], mode: str = "constant", value: Any = None) -> Value:
    """Pad as torch does: `ends` are (begin, end) of the last axis first, and then of those before it."""
    return x.pad(list(zip(ends[::2], ends[1::2], strict=True))[::-1], value or 0.0, mode)


TORCH: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.tanh: Value.tanh,
    torch.sigmoid: unary_op("sigmoid"),
    torch.relu: unary_op("relu"),
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
    torch.isnan: lambda x: x.binary("not_equal", x),
    torch.ones_like: lambda x: array(np.ones(x.shape), x.dtype),
    torch.zeros_like: lambda x: array(np.zeros(x.shape), x.dtype),
}
"""Torch function -> what writes it, where a formula of the interpreter is given `Value`s."""
FUSED_BY_APPLE = {
    "add": ("sum", "add"),
    "sub": ("sum", "sub"),
    "mul": ("product", "mul"),
    "divide": ("product", "real_div"),
}
"""Core AI op of two operands -> (kind, its name in MIL). Apple's compiler fuses neighbours of one kind: it
makes `x + (a + b)` of `(x + a) + b`, and a product after a convolution a part of the weight."""
RESHAPES = names("shrink_dims expand_dims reshape")


def _op_kind(node: Any) -> str:
    """Return the op that made a value, as the file names it; "" for an argument of a block."""
    name = getattr(node.owner, "name", "")
    return str(name).removeprefix("coreai.").removeprefix("decomposable.").removeprefix("broadcasting_")


def _is_constant(node: Any) -> bool:
    """Return whether a value is a constant, perhaps reshaped."""
    kind = _op_kind(node)
    return kind == "constant" or (kind in RESHAPES and _is_constant(node.owner.operands[0]))


def _would_be_fused(op: str, *nodes: Any) -> bool:
    """Return whether Apple's compiler would fuse an op of a constant with the op before it."""
    computed = [node for node in nodes if not _is_constant(node)]
    return op in FUSED_BY_APPLE and len(computed) == 1 and _absorbs(computed[0], FUSED_BY_APPLE[op][0])


def _absorbs(node: Any, kind: str) -> bool:
    """Return whether the op that made a value absorbs a following sum or product (`kind`) with a constant."""
    op = _op_kind(node)
    operands = list(node.owner.operands) if op else []
    if op in RESHAPES:
        return _absorbs(operands[0], kind)
    if op.startswith("conv"):
        return True
    if op == "batch_matmul":
        return kind == "sum"
    computed = [operand for operand in operands if not _is_constant(operand)]
    if op not in FUSED_BY_APPLE or len(computed) == len(operands):
        return False
    return FUSED_BY_APPLE[op][0] == kind or any(_op_kind(n).startswith("conv") for n in computed)


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


class Dense(Value):
    """A sparse weight that is dense already; MIL's next op still reads it as a mask and data."""


def call(op: str, *values: Value) -> Value:
    """Write a Core AI op whose operands are all values."""
    builder = getattr(ops, f"{op}_", None) or getattr(ops, op)  # where Python has the name, Apple's has a dash
    return Value(builder(*(value.node for value in values)))


def array(numbers: Any, dtype: str) -> Value:
    """Write a constant; in fp16, a number beyond its range becomes infinity."""
    with np.errstate(over="ignore"):
        known = np.asarray(numbers).astype(numpy_of(dtype))
    made = Value(constant(constant_attribute(known, dtype)))
    made.known = known
    return made


def _check_known(numbers: Any) -> None:
    """Check that a number, or each of several, is no unknown length."""
    several = numbers if isinstance(numbers, (list, tuple)) else [numbers]
    if any(isinstance(number, Dynamic) for number in several):
        raise NotExpressible("it computes with the length of an axis, which is dynamic")


def scalar(number: Any, dtype: str) -> Value:
    """Write a constant without axes."""
    _check_known(number)
    return array(number, dtype)


def indices(numbers: Any) -> Value:
    """Write axes or positions, as int32."""
    return numbers if isinstance(numbers, Value) else array(numbers, "int32")


def unsigned(numbers: Any) -> Value:
    """Write permutations, strides or paddings, as uint32."""
    _check_known(numbers)
    return array(numbers, "uint32")


def where(condition: Value, x: Any, y: Any) -> Value:
    """Return x where the condition holds, else y; one of them is a value."""
    x, y = (x, x.like(y)) if isinstance(x, Value) else (y.like(x), y)
    return call("broadcasting_where", condition, x, y)


def concat(values: Sequence[Value], axis: int) -> Value:
    """Join tensors along an axis; other lengths that one of them knows hold for all."""
    if len(values) == 1:
        return values[0]
    known = [max(lengths) for lengths in zip(*(value.shape for value in values), strict=True)]
    fitted = [value.refined([-1 if a == axis else n for a, n in enumerate(known)]) for value in values]
    return Value(ops.concat(axis, [value.node for value in fitted]))


def stack(values: Sequence[Value], axis: int) -> Value:
    """Join tensors along a new axis."""
    return concat([value.expand([axis]) for value in values], axis)


def attribute(name: str, value: str) -> Any:
    """Return an attribute of Core AI's dialect that names a mode."""
    return ir.Attribute.parse(f"#coreai.{name}<{value}>")


def per_channel(x: Value, numbers: Value) -> Value:
    """Reshape a vector to one number for each channel of x (axis 1)."""
    return numbers.reshape([1, -1, *[1] * (x.ndim - 2)])


def known_ints(numbers: Any, what: str) -> list[int]:
    """Return integers that must be known, not computed at run time."""
    known = numbers.known if isinstance(numbers, Value) else numbers
    if known is None:
        raise NotExpressible(f"{what} is computed")
    return [int(v) for v in np.asarray(known).reshape(-1)]
