"""States: tensors that a function reads and writes, and that live on between calls."""

from __future__ import annotations

from typing import Any

import torch

from anesurgery.errors import InterpretError
from anesurgery.interpret.table import impl
from anesurgery.mil import Function, Var, types


class Box:
    """One state."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


States = dict[str, Box]


def make(function: Function) -> States:
    """The states of a function, all zero."""
    made = {}
    for name, var in function.inputs.items():
        if types.is_state(var.sym_type):
            wrapped = var.sym_type.wrapped_type()
            made[name] = Box(torch.zeros([int(d) for d in wrapped.get_shape()]))
    return made


def bind(function: Function, states: States | None) -> dict[Var, Box]:
    """The state inputs of a function.

    Raises:
        InterpretError: the states are those of another function.
    """
    fresh = make(function)
    states = fresh if states is None else states
    wanted = _shapes(fresh)
    if not isinstance(states, dict) or not all(isinstance(b, Box) for b in states.values()):
        raise InterpretError(f"a state holds {wanted}, and is made with make_state()")
    given = _shapes(states)
    if given != wanted:
        raise InterpretError(
            f"the state is of another model: {given}, expected {wanted}; make it with make_state()"
        )
    return {function.inputs[name]: box for name, box in states.items()}


def _shapes(states: States) -> dict[str, tuple[int, ...]]:
    return {name: tuple(box.value.shape) for name, box in states.items()}


@impl("read_state")
def read_state(input: Box) -> torch.Tensor:
    """The value that a state holds now."""
    return input.value


@impl("coreml_update_state")
def coreml_update_state(state: Box, value: Any) -> torch.Tensor:
    """Write a state; the result is the value written."""
    state.value = value.clone()
    return state.value
