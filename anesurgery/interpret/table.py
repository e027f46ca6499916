"""The table of implementations: op type -> a torch function whose parameters are the op's MIL inputs.

`@impl("relu")` enters one; the modules of `interpret.ops` do so for all ops, and a caller may for ops of its
own. Here are also the helpers that these functions share, and `Listener`, which watches a run.
"""

from __future__ import annotations

import importlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from anesurgery.errors import InterpretError
from anesurgery.mil import Operation
from anesurgery.ops import MOVING, PADDING

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Implementation:
    """How an op type is computed."""

    function: Callable[..., Any]
    moves: bool
    """Does it only move numbers? Then it gets stored fp16 weights as they are, and only its result is
    widened."""
    plain: Callable[..., Any] | None = None
    """The same function for operands by position, which `steps` calls directly."""


LARGEST_RESULT = 1 << 30
"""The most bytes of a result that an op makes of a small input, 1.1 GB; a larger one is an error, not a full
memory."""


class _Implementations(MutableMapping[str, Implementation]):
    """A table that imports the modules of ops when it is first asked for an op that it lacks."""

    def __init__(self) -> None:
        self.known: dict[str, Implementation] = {}
        self.filled = False
        self.lock = threading.RLock()

    def fill(self) -> None:
        """Import the modules of ops, once; another thread waits until all are there."""
        if self.filled:
            return
        with self.lock:
            importlib.import_module("anesurgery.interpret.ops").load_implementations()
            self.filled = True

    def __getitem__(self, op_type: str) -> Implementation:
        if op_type not in self.known:
            self.fill()
        return self.known[op_type]

    def __setitem__(self, op_type: str, meaning: Implementation) -> None:
        self.known[op_type] = meaning

    def __delitem__(self, op_type: str) -> None:
        del self.known[op_type]

    def __iter__(self) -> Iterator[str]:
        self.fill()
        return iter(self.known)

    def __len__(self) -> int:
        self.fill()
        return len(self.known)


TABLE = _Implementations()
"""Op type -> its implementation. Control flow is not here: see `core.CONTROL_FLOW`."""


class Unsupported(InterpretError):  # noqa: N818 - reads as a statement
    """An op type, or a form of one, that the interpreter does not know."""


def impl(*op_types: str) -> Callable[[F], F]:
    """Return a decorator that enters a function into the table for some op types."""

    def enter(function: F) -> F:
        for op_type in op_types:
            TABLE[op_type] = Implementation(function, op_type in MOVING | PADDING)
        return function

    return enter


def enter_all(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Enter functions by op type, such as the lambdas of ops that are one expression each."""
    for op_type, function in functions.items():
        impl(op_type)(function)


def ints(value: Any) -> list[int]:
    """Return a list of integers from what an op may be given: a list, a number, an array or a tensor."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [int(v) for v in value] if isinstance(value, (list, tuple)) else [int(value)]


def checked_shape(shape: Sequence[int], itemsize: int = 4) -> list[int]:
    """Check that a result of a given shape fits `LARGEST_RESULT`, and return the shape as a list.

    Args:
        shape: the lengths of its axes.
        itemsize: the bytes of an element.

    Raises:
        InterpretError: it takes more.
    """
    lengths = ints(shape)
    size = math.prod(lengths) * itemsize
    if size > LARGEST_RESULT:
        raise InterpretError(
            f"its result of the shape {lengths} takes {size:,} bytes, more than {LARGEST_RESULT:,}; "
            "give smaller sizes, or raise anesurgery.interpret.table.LARGEST_RESULT"
        )
    return lengths


def to_int32(x: torch.Tensor) -> torch.Tensor:
    """Convert to int32: floats are truncated toward zero and saturate, and NaN becomes 0, as on ARM.

    Integers of more bits wrap.
    """
    if x.is_floating_point():
        x = torch.nan_to_num(x.double(), 0.0).clamp(-(2.0**31), 2.0**31 - 1)
    return x.to(torch.int64).to(torch.int32)


def wrapped(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return integers as one of MIL's integer types holds them: wider ones wrap."""
    bits, is_unsigned = int("".join(filter(str.isdigit, dtype))), dtype.startswith("u")
    if bits < 32:
        span = 1 << bits
        x = x.to(torch.int64) % span
        x = x if is_unsigned else torch.where(x >= span // 2, x - span, x)
    return x.to(torch.int32)


class Listener:
    """Called before and after each op of a run; override what you need."""

    def before(self, op: Operation, inputs: Mapping[str, Any]) -> None:
        """Called before an op runs, with its arguments (torch tensors by parameter name)."""

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """Called after an op ran, with its results in the order of its outputs."""
