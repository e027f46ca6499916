"""The table of lifts: an op of Core AI -> a function that builds it in MIL.

`reading` lifts an op by calling its function with a `LiftedOp`, which holds the op and its operands: MIL
values, or numpy arrays for constants. Each file here, a family of ops, fills the table.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from anesurgery.coreai.names import enters, name_of
from anesurgery.mil import Array, Operation, Var, any_symbolic, dtype_name, mb, np_dtype, producer, types

Value: TypeAlias = "Var | Array"
"""A value of the program, or a constant that has no op yet."""
TOKEN: Any = object()
"""Stands for a token, which orders reads and writes of states; in MIL the order of the ops does."""
Described: TypeAlias = Mapping[str, Any]
"""An op, a block or a type as the child process describes it (`toolkit.walk_asset`)."""

WIDENED = {"fp16": "fp16", "fp32": "fp32", "bool": "bool", "fp64": "fp32", "bf16": "fp32"}
"""Element type that is no integer -> that of MIL."""
INT32 = np.iinfo(np.int32)
NO_LIMIT = (np.iinfo(np.int64).min, np.iinfo(np.int64).max)


class Unliftable(Exception):  # noqa: N818 - reads as a statement; becomes a LoadError that names the op
    """Raised with the reason why an op has no form in MIL."""


def mil_type(element: str) -> str:
    """Return the MIL dtype of an element type; every integer is int32, in which MIL computes."""
    name = name_of(element)
    if name.startswith(("int", "uint")):
        return "int32"
    if name not in WIDENED:
        raise Unliftable(f"MIL has no numbers of the type {element}")
    return WIDENED[name]


def as_int32(numbers: Array) -> Array:
    """Return a constant with integers as int32; the ends of int64, "no limit", become those of int32."""
    if numbers.dtype.kind not in "iu" or numbers.dtype == np.int32:
        return numbers
    fitting = np.clip(numbers, INT32.min, INT32.max)
    if (lost := numbers[(fitting != numbers) & ~np.isin(numbers, NO_LIMIT)]).size:
        raise Unliftable(f"the constant {lost[0]} does not fit int32, the only integers in which MIL computes")
    return np.asarray(fitting, np.int32)


@dataclass(frozen=True)
class LiftedOp:
    """An op of Core AI that is being lifted, with its operands."""

    op: Described
    operands: Sequence[Value]
    scope: Any
    """The `reading.GraphScope` of the op."""

    def __getitem__(self, i: int) -> Value:
        """Return an operand as a builder takes it."""
        value = self.operands[i]
        return as_int32(value) if isinstance(value, np.ndarray) else value

    def stored(self, i: int) -> Described:
        """Return the type of an operand in the file."""
        return self.scope.types[self.op["operands"][i]]

    def numbers(self, i: int) -> Array:
        """Return the numbers of an operand that must be a constant."""
        if (held := numbers_of(self[i])) is None:
            raise Unliftable(f"operand {i} is computed, and MIL takes a constant there")
        return held

    def ints(self, i: int) -> list[int]:
        """Return the integers of an operand that must be a constant."""
        return [int(n) for n in self.numbers(i).reshape(-1)]

    def integer(self, i: int) -> int:
        """Return the integer, or 0 or 1 for a boolean, of an operand that must be a constant."""
        return self.ints(i)[0]

    def known(self, i: int) -> bool:
        """Return whether an operand is a constant."""
        return numbers_of(self.operands[i]) is not None

    def axes(self, i: int, rank: int | None = None) -> list[int]:
        """Return axes, counted from the first: of operand 0, or of a rank."""
        rank = len(self[0].shape) if rank is None else rank
        return [axis % rank if rank else axis for axis in self.ints(i)]

    @property
    def result(self) -> Described:
        """The type of the first result."""
        return self.op["results"][0]

    @property
    def shape(self) -> list[int | None]:
        """The shape of the first result, None where it is not fixed."""
        return self.result["shape"]

    def attribute(self, name: str) -> Any:
        """Return an attribute."""
        return self.op["attributes"][name]


Lift: TypeAlias = "Callable[[LiftedOp], Value | Sequence[Value]]"
TABLE: dict[str, Lift] = {}
"""Op of Core AI, without "coreai.", "decomposable." and "broadcasting_" -> its lift."""
lift = enters(TABLE)


def static_sizes(value: Value) -> list[int]:
    """Return the shape of a value that must be fixed."""
    if any_symbolic(value.shape):
        raise Unliftable(f"its operand has the shape {tuple(value.shape)}, and MIL takes a fixed one there")
    return [int(n) for n in value.shape]


def dtype_of(value: Value) -> np.dtype[Any]:
    """Return the numpy dtype of a value."""
    return np_dtype(value) if isinstance(value, Var) else value.dtype


def kind_of(value: Value) -> str:
    """Return numpy's letter for the kind of a value's dtype: "b", "f" or "i"."""
    return dtype_of(value).kind


def made_by(value: Value, *op_types: str) -> Operation | None:
    """Return the op that made a value if it is of one of these types; None for others and for constants."""
    return producer(value, *op_types) if isinstance(value, Var) else None


def as_var(value: Value) -> Var:
    """Return a value of the program; a constant becomes one."""
    return value if isinstance(value, Var) else mb.const(val=np.asarray(value)[()])


def cast(value: Value, dtype: str) -> Value:
    """Cast a value to another element type of MIL."""
    if isinstance(value, Var):
        return value if dtype_name(value) == dtype else mb.cast(x=value, dtype=dtype)
    return value.astype(types.nptype_from_builtin(types.string_to_builtin(dtype)))


def like(value: Value, number: float) -> Array:
    """Return a number in the element type of a value."""
    return np.asarray(number, dtype_of(value))


def numbers_of(value: Value) -> Array | None:
    """Return the numbers of a constant, or of a view of one; else None."""
    held = value if isinstance(value, np.ndarray) else value.val
    return None if held is None or isinstance(held, str) else np.asarray(held)


def pad_arguments(sides: list[int]) -> dict[str, Any]:
    """Return padding, (begin, end) of each spatial axis, as parameters of a convolution or pool."""
    return {"pad_type": "custom", "pad": sides} if any(sides) else {"pad_type": "valid"}


IMAGE = re.compile(r"!coreai\.image<<k(\w+)> x (\d+) : i64 x (\d+) : i64.*>")
"""How the type of an image is printed: its format, height and width."""


def image_size(kind: Described) -> tuple[int, int] | None:
    """Return (height, width) if a value of the file is an image."""
    found = IMAGE.fullmatch(kind.get("type", ""))
    return (int(found[2]), int(found[3])) if found else None


for _family in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_family.name}")
