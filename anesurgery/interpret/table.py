"""The table of meanings: op type -> a function whose parameters are the op's MIL inputs."""

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
    """It only moves data: stored fp16 weights are handed in as they are, and only the result is widened."""


LARGEST_RESULT = 1 << 30
"""Bytes of what an op makes of little: as many as of a value that is computed while a program is read."""


class _Implementations(MutableMapping[str, Implementation]):
    """A table that imports the families of ops when it is first asked for what it lacks."""

    def __init__(self) -> None:
        self.known: dict[str, Implementation] = {}
        self.filled = False
        self.lock = threading.RLock()

    def fill(self) -> None:
        """Import the families, once; another thread waits until all are there."""
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
"""Op type -> meaning. Control flow is not here: see `anesurgery.interpret.ops.control`."""


class Unsupported(InterpretError):  # noqa: N818 - reads as a statement
    """An op type or a form of one that the interpreter does not know."""


def impl(*op_types: str) -> Callable[[F], F]:
    """Enter a function into the table for some op types."""

    def enter(function: F) -> F:
        for op_type in op_types:
            TABLE[op_type] = Implementation(function, op_type in MOVING | PADDING)
        return function

    return enter


def written(meanings: Mapping[str, Callable[..., Any]]) -> None:
    """Enter functions that are one expression each, by op type."""
    for op_type, function in meanings.items():
        impl(op_type)(function)


def ints(value: Any) -> list[int]:
    """Integers from what an op may be given: a list, a number, an array or a tensor."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [int(v) for v in value] if isinstance(value, (list, tuple)) else [int(value)]


def affordable(shape: Sequence[int], itemsize: int = 4) -> list[int]:
    """The shape of a result that is larger than what it is made of.

    Args:
        shape: lengths of its axes.
        itemsize: bytes of an element.

    Raises:
        InterpretError: it takes more memory than a value that is computed while a program is read.
    """
    lengths = ints(shape)
    size, most = math.prod(lengths) * itemsize, LARGEST_RESULT
    if size > most:
        raise InterpretError(
            f"its result of the shape {lengths} takes {size:,} bytes, more than {most:,}; "
            "give smaller sizes, or raise anesurgery.interpret.table.LARGEST_RESULT"
        )
    return lengths


def to_int32(x: torch.Tensor) -> torch.Tensor:
    """Numbers as int32: floats are truncated toward zero and saturate, NaN is 0, as on ARM.

    Integers of more bits wrap.
    """
    if x.is_floating_point():
        x = torch.nan_to_num(x.double(), 0.0).clamp(-(2.0**31), 2.0**31 - 1)
    return x.to(torch.int64).to(torch.int32)


class Listener:
    """Told about each op as it runs; override what you need."""

    def before(self, op: Operation, inputs: Mapping[str, Any]) -> None:
        """An op is about to run on these values (torch tensors by parameter name)."""

    def after(self, op: Operation, outputs: Sequence[Any]) -> None:
        """An op has made these values, in the order of its outputs."""
