"""Where the interpreter computes: on the processor, or on a GPU that torch has."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from anesurgery.errors import InterpretError
from anesurgery.interpret.state import Box

CPU = "cpu"


def check(device: str) -> str:
    """The device, if torch has it.

    Raises:
        InterpretError: it does not.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        said = str(error).splitlines()[0]
        raise InterpretError(
            f"device={device!r} cannot be used ({said}); leave it out for the processor"
        ) from error
    return device


def move(value: Any, device: str) -> Any:
    """A tensor, or the value of a state, on a device."""
    if device == CPU:
        return value
    if isinstance(value, Box):
        value.value = value.value.to(device)
        return value
    return value.to(device) if isinstance(value, torch.Tensor) else value


def default(device: str) -> AbstractContextManager[Any]:
    """While it lasts, new tensors are made on the device."""
    return nullcontext() if device == CPU else torch.device(device)
