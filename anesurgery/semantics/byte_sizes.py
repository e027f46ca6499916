"""How large values are: element types, lengths, bytes. Dynamic lengths count as 1."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from anesurgery.mil import Var, is_symbolic, types


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
