"""Check the inputs of a function and bring them into the form in which it runs."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from anesurgery.errors import InterpretError
from anesurgery.interpret import state
from anesurgery.interpret.arithmetic import precision
from anesurgery.interpret.features import as_array, check_names
from anesurgery.mil import Array, Function, Var, is_symbolic, np_dtype

_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = 8


def describe(value: Any) -> str:
    """Shape and dtype of a value, for messages."""
    if isinstance(value, torch.Tensor):
        return f"{'x'.join(map(str, value.shape)) or 'scalar'} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return f"[{', '.join(map(describe, value))}]"
    return f"state {describe(value.value)}" if isinstance(value, state.Box) else _SHORT.repr(value)


class Binder:
    """What a function takes, looked up once for all runs."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._states = state.shapes(function)
        self._wanted = {n: v for n, v in function.inputs.items() if n not in self._states}
        self._ports = {name: _Port(name, var) for name, var in self._wanted.items()}
        position = self._wanted.get(state.POSITION)
        self._room = None if position is None or np_dtype(position).kind == "f" else state.room(position)

    def __call__(
        self, values: Mapping[str, Any], states: state.States | None, exact: Collection[str] = ()
    ) -> dict[Var, Any]:
        """The first environment of a run: see `bind`."""
        check_names(self._wanted, values)
        if missing := [n for n in self._wanted if n not in values]:
            raise InterpretError(
                f"missing inputs: {', '.join(missing)}; the model takes {', '.join(self._wanted)}"
            )
        if states is not None:
            state.check(self._states, states)
        held = state.make(self._function) if states is None else states
        env: dict[Var, Any] = {self._function.inputs[name]: box for name, box in held.items()}
        symbols: dict[Any, int] = {}
        for name, port in self._ports.items():
            env[port.var] = port.bound(values[name], symbols, name in exact)
        if self._room is not None and states is not None:
            state.check_position(env[self._wanted[state.POSITION]], self._room, states)
        return env


def bind(
    function: Function, values: Mapping[str, Any], states: state.States | None, exact: Collection[str] = ()
) -> dict[Var, Any]:
    """The first environment of a run.

    Args:
        function: what is run.
        values: its inputs by name.
        states: what lives on between calls.
        exact: the inputs whose floats are not rounded to the type of the input: what another part of one model
            gave, which would not have been rounded there either.

    Raises:
        InterpretError: an input is missing, has a wrong shape or dtype.
        UnknownName: an input that the function does not have.
    """
    return Binder(function)(values, states, exact)


class _Port:
    """One input."""

    def __init__(self, name: str, var: Var) -> None:
        self.name, self.var = name, var
        self._shape, self._dtype, self._run = tuple(var.shape or ()), np_dtype(var), precision.run_dtype(var)
        self._static = not any(is_symbolic(d) for d in self._shape)

    def bound(self, value: Any, symbols: dict[Any, int], exact: bool) -> torch.Tensor:
        """A value as the program reads it; `symbols` are the lengths that are known so far."""
        array = as_array(self.name, value)
        if not self._shape and array.shape == (1,):  # how Core ML hands over a scalar
            array = array.reshape(())
        if not (self._static and array.shape == self._shape) and not self._takes(array.shape, symbols):
            expected = tuple(symbols.get(d, "any") if is_symbolic(d) else int(d) for d in self._shape)
            words = f"({', '.join(map(str, expected))}{',' if len(expected) == 1 else ''})"
            raise InterpretError(f"input {self.name!r} has shape {array.shape}, expected {words}")
        if not (exact and array.dtype.kind == self._dtype.kind == "f"):
            array = _cast(self.name, array, self._dtype)
        return precision.finish(precision.as_tensor(array), self._run, None)

    def _takes(self, shape: Sequence[int], symbols: dict[Any, int]) -> bool:
        pairs = zip(self._shape, shape, strict=True) if len(shape) == len(self._shape) else None
        return pairs is not None and all(_fits(d, n, symbols) for d, n in pairs)


def _cast(name: str, array: Array, dtype: np.dtype[Any]) -> Array:
    """An array in the dtype of an input: as Core ML does, whole floats are taken for integers."""
    words = f"input {name!r} holds {array.dtype}, expected {dtype}"
    if array.dtype.kind not in "fiub":
        raise InterpretError(words)
    with np.errstate(invalid="ignore", over="ignore"):  # a large float becomes infinite in fp16
        cast = array.astype(dtype)
    if dtype.kind != "f" and not np.array_equal(cast, array):
        raise InterpretError(f"{words}; numbers such as {array[cast != array][0]} do not fit into {dtype}")
    return cast


def _fits(dimension: Any, size: int, symbols: dict[Any, int]) -> bool:
    if not is_symbolic(dimension):
        return int(dimension) == size
    return symbols.setdefault(dimension, size) == size
