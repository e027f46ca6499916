"""Which arithmetic the interpreter computes in: the one place that decides about dtypes.

Floats are torch float32 while a program runs. "fp32" reads fp16 numbers exactly and never rounds to fp16 (the
reference); "fp16" rounds the result of each op to the dtype that the program says, sums being made in fp32.
Integers of every width run as int32.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from anesurgery.errors import InterpretError
from anesurgery.mil import Var, np_dtype, types

PRECISIONS = ("fp32", "fp16")

CACHED = 1 << 16
"""Constants of up to this many elements are kept widened; larger ones are widened while an op needs them."""


def check(precision: str) -> str:
    """The precision, if it exists.

    Raises:
        InterpretError: it does not.
    """
    if precision not in PRECISIONS:
        raise InterpretError(
            f"precision={precision!r}; it may be {' or '.join(map(repr, PRECISIONS))}"
        )
    return precision


def run_dtype(var: Var) -> torch.dtype | None:
    """The dtype of a value while it runs; None for strings, lists and states."""
    if not (types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type)) or types.is_str(
        var.dtype
    ):
        return None
    kind = np_dtype(var).kind
    return {"f": torch.float32, "b": torch.bool}.get(kind, torch.int32)


def rounds(var: Var, precision: str) -> bool:
    """Must the value be rounded to fp16 when it is made?"""
    return precision == "fp16" and run_dtype(var) == torch.float32 and np_dtype(var) == np.float16


def finish(value: Any, dtype: torch.dtype | None, rounded: bool) -> Any:
    """A result in the dtype in which it runs on."""
    if dtype is None or not isinstance(value, torch.Tensor):
        return value
    if rounded and value.dtype != torch.float16:
        value = value.to(torch.float16)
    return value if value.dtype == dtype else value.to(dtype)


def widen(value: Any) -> Any:
    """fp16 as float32; everything else as it is."""
    return (
        value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.float16 else value
    )


def as_tensor(array: Any) -> torch.Tensor:
    """A constant as a tensor: a view of the (memory-mapped) array where torch has its dtype."""
    array = np.asarray(array)
    if array.dtype.kind == "u" and array.dtype != np.uint8:
        array = array.astype(np.int64 if array.dtype.itemsize > 2 else np.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the array is not writable, and nobody writes to it
        tensor = torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape)
    if tensor.dtype.is_floating_point or tensor.dtype == torch.bool:
        tensor = tensor.float() if tensor.dtype == torch.float64 else tensor
        return (
            tensor.float() if tensor.dtype == torch.float16 and tensor.numel() <= CACHED else tensor
        )
    return tensor.to(torch.int32)


def to_numpy(value: Any, var: Var, precision: str) -> Any:
    """An output for the user: fp16 outputs stay float16 in "fp16" arithmetic and are float32 in "fp32"."""
    if not isinstance(value, torch.Tensor):
        return value
    array = value.detach().cpu().numpy()
    if rounds(var, precision):
        return array.astype(np.float16)
    return array if array.dtype.kind == "f" else array.astype(np_dtype(var))
