"""The arithmetic of the interpreter: the dtypes of a run, how results are rounded, and what a cast loses.

Floats are torch float32 while a program runs; only in `Double` they are fp64. "fp32" reads fp16 exactly
and never rounds to fp16 (the reference). "fp16" rounds the result of each op to the dtype that the program
says, with sums in fp32. "ane", or "ane:M1" for a chip, estimates what was measured on Neural Engines
(`properties.PROPERTIES`). Integers of every width run as int32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import torch

from anesurgery.errors import InterpretError
from anesurgery.interpret.arithmetic import neural_engine
from anesurgery.interpret.table import Implementation, to_int32
from anesurgery.mil import Operation, Var, constant, np_dtype, operands, producer, types
from anesurgery.ops import CARRIERS, UNROUNDED, names

PRECISIONS = ("fp32", "fp16", "ane")
SUMMING = names(
    """
    avg_pool conv conv_quantized conv_transpose cumsum einsum gru instance_norm l2_norm l2_pool layer_norm
    linear local_response_norm lstm matmul rnn scaled_dot_product_attention softmax
    """
)
"""Ops that sum, besides reductions. torch sums in the order of the memory, which a transpose upstream changes:
`dense` orders their operands, so that the bits do not depend on how a value came about or where a model is
split."""
LARGE_RESULT = 1 << 16
"""Results of as many elements are rounded in their own memory: a choice, for less memory at the peak."""
Rounding = Callable[[torch.Tensor], torch.Tensor]
"""Rounds a result."""

PLAIN = (torch.Tensor, bool, int, float, str, type(None))
"""Types of the arguments of ops, but for states and lists."""


class Arithmetic(Protocol):
    """An arithmetic of its own, in place of a name: it says how each op is computed.

    An attribute `floats` may give the dtype of floats in a run, as in `Double`; float32 by default.
    """

    def meaning(self, op: Operation, row: Implementation) -> Callable[..., Any]:
        """Return the function that computes an op."""


def checked_precision(precision: str | Arithmetic) -> str | Arithmetic:
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
    """Return the arithmetic of one op: in a mixed program the engine runs no op whose floats are all fp32.

    A cast belongs to the dtype that it makes, whatever it reads.
    """
    if not mixed or not isinstance(precision, str) or not precision.startswith("ane"):
        return precision
    read = [] if op.op_type == "cast" else [v for _, v in operands(op)]
    floats = [v for v in (*read, *op.outputs) if _is_float(v)]
    return "fp32" if floats and all(np_dtype(v) == np.float32 for v in floats) else precision


def _is_float(var: Var) -> bool:
    """Is a value a tensor or scalar of floats?"""
    return (types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type)) and np_dtype(var).kind == "f"


def is_mixed(ops: Iterable[Operation]) -> bool:
    """Return whether an op reads or computes fp16.

    In a program without fp16, fp32 only means "float", which the engine computes in fp16; in a mixed program
    it means fp32. Constants do not count.
    """
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
    function = row.function
    if precision not in ("fp32", "fp16"):
        function = neural_engine.meaning(op, function, row.moves, neural_engine.chip_of(precision))
    summing = op.op_type in SUMMING or op.op_type.startswith("reduce_")
    return _on_dense(function) if summing else function


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the strides of a new one; `contiguous` keeps those of axes of length 1."""
    return x.reshape(-1).view(x.shape) if 1 in x.shape else x.contiguous()


def _on_dense(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes its operands contiguous first, so that equal numbers give equal sums."""

    def compute(**operands: Any) -> Any:
        return function(**{k: dense(v) if isinstance(v, torch.Tensor) else v for k, v in operands.items()})

    compute.on_dense = function  # type: ignore[attr-defined]
    return compute


def unwrap_dense(function: Callable[..., Any]) -> tuple[Callable[..., Any], bool]:
    """Return the function itself, and whether it needs operands that are contiguous."""
    inner = getattr(function, "on_dense", None)
    return (function, False) if inner is None else (inner, True)


def in_run_dtype(
    value: Any, dtype: torch.dtype | None, rounded: Rounding | None, arguments: Iterable[Any] | None = None
) -> Any:
    """Return a result rounded, and in the dtype in which the run goes on.

    With the arguments of its op, a large result may be rounded to fp16 in its own memory.
    """
    if dtype is None or not isinstance(value, torch.Tensor):
        return value
    if rounded is torch.Tensor.half and arguments is not None and _is_large_and_own(value, arguments):
        return value.copy_(value.half())
    if rounded is not None and value.dtype != torch.float16:  # fp16 is rounded already
        value = rounded(value)
    if dtype == torch.int32 and value.is_floating_point():
        return to_int32(value)
    return value if value.dtype == dtype else value.to(dtype)


def _is_large_and_own(value: torch.Tensor, arguments: Iterable[Any]) -> bool:
    """Is it a large float32 result whose memory is not shared with an argument?"""
    if value.dtype != torch.float32 or value.numel() < LARGE_RESULT or not value.is_contiguous():
        return False
    each = [
        x for argument in arguments for x in (argument if isinstance(argument, tuple | list) else (argument,))
    ]
    if not all(isinstance(x, PLAIN) for x in each):  # a state holds values of its own
        return False
    held = {x.untyped_storage().data_ptr() for x in each if isinstance(x, torch.Tensor)}
    return value.untyped_storage().data_ptr() not in held


def to_numpy(value: Any, var: Var, precision: str | Arithmetic) -> Any:
    """Return an output: fp16 stays float16 except in "fp32", where it is float32; in `Double` it is fp64."""
    if not isinstance(value, torch.Tensor):
        return value
    array = value.detach().cpu().numpy()
    if isinstance(precision, str) and precision != "fp32" and np_dtype(var) == np.float16:
        return array.astype(np.float16)
    return array if array.dtype.kind == "f" else array.astype(np_dtype(var))


def narrows(op: Operation) -> bool:
    """Return whether an op casts floats to floats that do not hold them; integers and booleans do not count."""
    if op.op_type != "cast" or any(np_dtype(v).kind != "f" for v in (op.inputs["x"], op.outputs[0])):
        return False
    size = np_dtype(op.outputs[0]).itemsize
    return not (_fits(op.inputs["x"], size) or _loop_keeps(op, size))


def _loop_keeps(op: Operation, size: int) -> bool:
    """Return whether an op reads what a loop hands on, whose first and later values `size` bytes hold."""
    block, var = op.enclosing_block, op.inputs["x"]
    if block is None or (loop := block.outer_op) is None or loop.op_type != "while_loop":
        return False
    if var not in block.inputs:
        return False
    at = block.inputs.index(var)
    first, later = loop.inputs["loop_vars"][at], loop.blocks[1].outputs[at]
    number = constant(first)
    held = number is not None and np.array_equal(number, np.asarray(number).astype(f"f{size}"))
    return (held or _fits(first, size)) and _fits(later, size)


def _fits(var: Var, size: int) -> bool:
    """Return whether `size` bytes hold a float: its dtype is that narrow, or it was cast up from such a one."""
    if np_dtype(var).kind != "f":
        return False
    if np_dtype(var).itemsize <= size:
        return True
    return var.op is not None and var.op.op_type in CARRIERS and _fits(var.op.inputs["x"], size)


# In fp64 a difference that is only rounding shrinks to 2^-29 of what it is in fp32; any other difference stays.

EXACT = UNROUNDED | CARRIERS
"""Ops that make no float by rounding."""
ROUND_ONCE = names("add sub")
"""Ops that round their result and nothing else: two numbers that are alike have an exact difference."""
EXPONENT = ("pow", "y")
"""An operand that is never off: a negative number has a power for whole exponents only."""


class Double:
    """Floats are fp64 between ops.

    Args:
        relative_error: each float that an op reads is off by this share of it, up or down; of `ROUND_ONCE`,
            the result is.
        seed: of the directions.
    """

    floats = torch.float64

    def __init__(self, relative_error: float = 0.0, seed: int = 0) -> None:
        self.relative_error, self.generator = relative_error, torch.Generator().manual_seed(seed)

    def meaning(self, op: Operation, row: Implementation) -> Callable[..., Any]:
        """Return the function of an op whose operands are off, or whose result is."""
        if op.op_type in ROUND_ONCE:
            return self._with_result_off(row)

        def compute(**operands: Any) -> Any:
            exact = {k: _as_fp64(v) for k, v in operands.items() if (op.op_type, k) == EXPONENT}
            return row.function(**{k: self._off(v) for k, v in operands.items() if k not in exact}, **exact)

        return compute

    def _with_result_off(self, row: Implementation) -> Callable[..., Any]:
        """Return a function that computes on exact operands and puts the error on the result."""
        return lambda **operands: self._off(row.function(**{k: _as_fp64(v) for k, v in operands.items()}))

    def _off(self, value: Any) -> Any:
        """Return floats as fp64, each off by the relative error, up or down by chance."""
        value = _as_fp64(value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._off, value))
        if not self.relative_error or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        up = torch.randint(0, 2, value.shape, generator=self.generator, dtype=torch.int8)
        factor = up.double().mul_(2 * self.relative_error).add_(1 - self.relative_error)
        return factor.mul_(value)


class PerturbedRounding(Double):
    """The arithmetic of fp64 in which the floats that an op makes by rounding are off; what it is given is not.

    A tie among inputs stays a tie, and a bound that they meet is met.
    """

    def meaning(self, op: Operation, row: Implementation) -> Callable[..., Any]:
        """Return the function, whose results are off unless the op only moves or copies numbers."""
        if row.moves or op.op_type in EXACT:
            return Double().meaning(op, row)
        return self._with_result_off(row)


def _as_fp64(value: Any) -> Any:
    """Return floats, those in lists too, as fp64; anything else as it is."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_as_fp64, value))
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.double()
