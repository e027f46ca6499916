"""The arithmetic of the interpreter: the dtypes of a run, how results are rounded, and what a cast loses.

Floats are torch float32 while a program runs; only in `Double` they are fp64. "fp32" reads fp16 exactly and
never rounds to fp16 (the reference). "fp16" rounds the result of each op to the dtype that the program says,
with sums in fp32. "ane", or "ane:M1" for a chip, estimates what was measured on Neural Engines
(`measured.ELEMENTS`). Integers of every width run as int32.

In fp64 a difference that is only rounding is 2^-29 of what it is in fp32; any other difference stays. With
operands that are off by a share, a run shows what errors of that size do to a result, also where sums cancel.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from anesurgery.errors import InterpretError
from anesurgery.interpret.arithmetic import neural_engine
from anesurgery.interpret.table import Implementation, to_int32
from anesurgery.mil import Operation, Var, np_dtype, operands, producer, quiet_host, types
from anesurgery.ops import CARRIERS, UNROUNDED, names

PRECISIONS = ("fp32", "fp16", "ane")
SUMMING = names(
    """
    avg_pool conv conv_quantized conv_transpose cumsum einsum instance_norm l2_norm l2_pool layer_norm linear
    local_response_norm matmul scaled_dot_product_attention softmax
    """
)
"""Ops that sum, besides reductions. torch sums in the order of the memory, which a transpose upstream changes:
their operands are made contiguous, so that the bits do not depend on how a value came about or where a model is
split."""
Rounding = Callable[[torch.Tensor], torch.Tensor]
"""Rounds a result."""

CACHED = 1 << 16
"""Constants of up to this many elements are always kept in fp32; larger ones are widened when an op needs
them."""

PLAIN = (torch.Tensor, bool, int, float, str, type(None))
"""Types of the arguments of ops, but for states and lists."""

CACHE_LIMIT = 1 << 30
"""The most bytes of large constants that a plan keeps in fp32, from its second run on."""


SMALL_CACHE_LIMIT = 1 << 26
"""The same for a few ops that run a few times: keeping more costs memory and saves nothing."""


def cache_limit_for_many_runs() -> int:
    """Return a limit for a program that will run many times: half of the memory that is available."""
    with suppress(OSError, IndexError, ValueError):  # Linux says what it can take back from its file cache
        kilobytes = Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]
        return max(CACHE_LIMIT, 1024 * int(kilobytes) // 2)
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not on every system
        return CACHE_LIMIT
    return max(CACHE_LIMIT, free // 2)


class Arithmetic(Protocol):
    """An arithmetic of its own, in place of a name: it says how each op is computed."""

    def meaning(self, op: Operation, row: Implementation) -> Callable[..., Any]:
        """Return the function that computes an op."""


def check(precision: str | Arithmetic) -> str | Arithmetic:
    """Return a precision if it exists.

    Raises:
        InterpretError: it does not, or nothing is known of the chip.
    """
    if hasattr(precision, "meaning"):
        return precision
    if isinstance(precision, str) and precision.startswith("ane:"):
        neural_engine.chip_of(precision)
    elif precision not in PRECISIONS:
        raise InterpretError(f"precision={precision!r}; it may be {' or '.join(map(repr, PRECISIONS))}")
    return precision


def run_dtype(var: Var, precision: str | Arithmetic = "fp32") -> torch.dtype | None:
    """Return the dtype of a value in a run; None for strings, lists and states."""
    if not (types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type)) or types.is_str(var.dtype):
        return None
    kind = np_dtype(var).kind
    floats = getattr(precision, "floats", torch.float32)
    return {"f": floats, "b": torch.bool}.get(kind, torch.int32)


def computes_in(op: Operation, precision: str | Arithmetic, mixed: bool) -> str | Arithmetic:
    """Return the arithmetic of one op: where types are mixed, the engine runs no op that computes in fp32."""
    if not mixed or not isinstance(precision, str) or not precision.startswith("ane"):
        return precision
    read = [] if op.op_type == "cast" else [v for _, v in operands(op)]
    floats = [v for v in (*read, *op.outputs) if _is_float(v)]
    return "fp32" if floats and all(np_dtype(v) == np.float32 for v in floats) else precision


def _is_float(var: Var) -> bool:
    """Is a value a tensor or scalar of floats?"""
    return (types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type)) and np_dtype(var).kind == "f"


def is_mixed(ops: Iterable[Operation]) -> bool:
    """Does an op read or compute fp16? Then the fp32 types of a program mean fp32."""
    computing = (op for op in ops if op.op_type != "const")
    values = (v for op in computing for v in (*(v for _, v in operands(op)), *op.outputs))
    return any(_is_float(v) and np_dtype(v) == np.float16 and producer(v, "const") is None for v in values)


def rounding(var: Var, precision: str | Arithmetic) -> Rounding | None:
    """Return how a value is rounded when it is computed; None if it is not."""
    if run_dtype(var) != torch.float32 or precision == "fp32" or not isinstance(precision, str):
        return None
    if precision == "fp16":
        return torch.Tensor.half if np_dtype(var) == np.float16 else None
    return neural_engine.rounding(neural_engine.chip_of(precision), var.op.op_type if var.op else "")


def meaning(op: Operation, row: Implementation, precision: str | Arithmetic) -> Callable[..., Any]:
    """Return the function that computes an op in an arithmetic."""
    if not isinstance(precision, str):
        return precision.meaning(op, row)
    if precision in ("fp32", "fp16"):
        summing = op.op_type in SUMMING or op.op_type.startswith("reduce_")
        return _on_dense(row.function) if summing else row.function
    chip = neural_engine.chip_of(precision)
    return neural_engine.meaning(op, row.function, row.moves, chip)


def _on_dense(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes its operands contiguous first, so that equal numbers give equal sums."""

    def compute(**operands: Any) -> Any:
        return function(
            **{k: v.contiguous() if isinstance(v, torch.Tensor) else v for k, v in operands.items()}
        )

    compute.on_dense = function  # type: ignore[attr-defined]
    return compute


def unwrap_dense(function: Callable[..., Any]) -> tuple[Callable[..., Any], bool]:
    """The function itself, and whether its operands must have the order of their axes in memory."""
    inner = getattr(function, "on_dense", None)
    return (function, False) if inner is None else (inner, True)


def finish(
    value: Any, dtype: torch.dtype | None, rounding: Rounding | None, arguments: Iterable[Any] | None = None
) -> Any:
    """Return a result in the dtype in which the run goes on.

    Args:
        value: the result.
        dtype: of the run.
        rounding: how it is rounded.
        arguments: of the op, if a large result may be rounded in its own memory.
    """
    if dtype is None or not isinstance(value, torch.Tensor):
        return value
    if rounding is torch.Tensor.half and arguments is not None and _is_large_and_own(value, arguments):
        return value.copy_(value.half())
    if rounding is not None and value.dtype != torch.float16:
        value = rounding(value)
    if dtype == torch.int32 and value.is_floating_point():
        return to_int32(value)
    return value if value.dtype == dtype else value.to(dtype)


def _is_large_and_own(value: torch.Tensor, arguments: Iterable[Any]) -> bool:
    """Is it a large float32 result whose memory is not shared with an argument?"""
    if value.dtype != torch.float32 or value.numel() <= CACHED or not value.is_contiguous():
        return False
    each = [
        x for argument in arguments for x in (argument if isinstance(argument, tuple | list) else (argument,))
    ]
    if not all(isinstance(x, PLAIN) for x in each):  # a state holds values of its own
        return False
    held = {x.untyped_storage().data_ptr() for x in each if isinstance(x, torch.Tensor)}
    return value.untyped_storage().data_ptr() not in held


def widen(value: Any) -> Any:
    """Return fp16 as float32, and everything else as it is."""
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.float16 else value


def needs_widening(value: Any) -> bool:
    """Must a constant be widened before use, or is it so large that its memory is given back after it?"""
    if not isinstance(value, torch.Tensor):
        return False
    return value.dtype == torch.float16 or (value.dtype == torch.float32 and value.numel() > CACHED)


def forget(array: Any) -> None:
    """Give back the memory of a view of a mapped file; the file is read again when the view is."""
    owner = array
    while isinstance(getattr(owner, "base", None), np.ndarray):
        owner = owner.base
    mapped: Any = getattr(owner, "base", None)
    if not (isinstance(owner, np.memmap) and owner.mode == "r" and hasattr(mapped, "madvise")):
        return
    begin = array.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (begin + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0:
        mapped.madvise(mmap.MADV_DONTNEED, first, length)


def trim() -> None:
    """Give freed memory back to the system: glibc keeps it, and memory mapped later would come on top."""
    with suppress(OSError, TypeError, AttributeError):  # not on every system
        ctypes.CDLL(None).malloc_trim(0)


def as_tensor(array: Any) -> torch.Tensor:
    """Return a constant as a tensor: a view of the (memory-mapped) array where torch has its dtype."""
    array = np.asarray(array)
    if array.dtype.kind == "u" and array.dtype != np.uint8:
        array = array.astype(np.int64 if array.dtype.itemsize > 2 else np.int32)
    with quiet_host():  # the array is not writable, and nobody writes to it
        tensor = torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape)
    if tensor.dtype.is_floating_point or tensor.dtype == torch.bool:
        tensor = tensor.float() if tensor.dtype == torch.float64 else tensor
        return tensor.float() if tensor.dtype == torch.float16 and tensor.numel() <= CACHED else tensor
    return tensor.to(torch.int32)


def to_numpy(value: Any, var: Var, precision: str | Arithmetic) -> Any:
    """Return an output: fp16 stays float16 but in "fp32", where it is float32; in `Double` it is fp64."""
    if not isinstance(value, torch.Tensor):
        return value
    array = value.detach().cpu().numpy()
    if isinstance(precision, str) and precision != "fp32" and np_dtype(var) == np.float16:
        return array.astype(np.float16)
    return array if array.dtype.kind == "f" else array.astype(np_dtype(var))


def narrows(op: Operation) -> bool:
    """Does an op cast floats to a dtype that does not hold them?"""
    if op.op_type != "cast" or np_dtype(op.inputs["x"]).kind != "f":
        return False
    return not _fits(op.inputs["x"], np_dtype(op.outputs[0]).itemsize)


def _fits(var: Var, size: int) -> bool:
    """Does a float of so many bytes hold a value, as it is no wider, or was only widened before?"""
    if np_dtype(var).kind != "f" or np_dtype(var).itemsize <= size:
        return np_dtype(var).kind == "f"
    before = var.op
    if before is None or before.op_type not in CARRIERS:
        return False
    return _fits(before.inputs["x"], size)


STEADY = UNROUNDED | CARRIERS
"""Ops that make no float by rounding."""
ROUNDED_ONCE = names("add sub")
"""Ops that round their result and nothing else: two numbers that are alike have an exact difference."""
EXPONENT = ("pow", "y")
"""An operand that is not off: a negative number has a power for whole exponents only."""


class Double:
    """Floats are fp64 between ops.

    Args:
        off: each float that an op reads is off by this share of it, up or down; of a sum of two numbers,
            the result is.
        seed: of the directions.
    """

    floats = torch.float64

    def __init__(self, off: float = 0.0, seed: int = 0) -> None:
        self.off, self.generator = off, torch.Generator().manual_seed(seed)

    def meaning(self, op: Operation, row: Implementation) -> Callable[..., Any]:
        """The function on fp64 operands."""
        if op.op_type in ROUNDED_ONCE:
            return lambda **operands: self._wide(row.function(**{k: _double(v) for k, v in operands.items()}))

        def function(**operands: Any) -> Any:
            return row.function(
                **{k: (_double if (op.op_type, k) == EXPONENT else self._wide)(v) for k, v in operands.items()}
            )

        return function

    def _wide(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._wide, value))
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if not self.off:
            return value.double()
        up = torch.randint(0, 2, value.shape, generator=self.generator)
        return value.double() * (1 + self.off * (2 * up - 1))


class Unsteady(Double):
    """The arithmetic of fp64 in which the floats that an op makes by rounding are off; what it is given is not.

    A tie among inputs stays a tie, and a bound that they meet is met.
    """

    def meaning(self, op: Operation, row: Implementation) -> Callable[..., Any]:
        """The function, whose results are off."""
        if row.moves or op.op_type in STEADY:
            return Double().meaning(op, row)
        return lambda **operands: self._wide(row.function(**{k: _double(v) for k, v in operands.items()}))


def _double(value: Any) -> Any:
    return Double()._wide(value)
