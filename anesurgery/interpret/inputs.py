"""Check the inputs of a function and bring them into the form in which it runs."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from anesurgery.errors import InterpretError
from anesurgery.interpret import state
from anesurgery.interpret.arithmetic import precision
from anesurgery.interpret.features import as_array, check_names
from anesurgery.mil import Array, Function, Var, is_symbolic, np_dtype, types

_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = 8


def describe(value: Any) -> str:
    """Shape and dtype of a value, for messages."""
    if isinstance(value, torch.Tensor):
        return f"{'x'.join(map(str, value.shape)) or 'scalar'} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return f"[{', '.join(map(describe, value))}]"
    return f"state {describe(value.value)}" if isinstance(value, state.Box) else _SHORT.repr(value)


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
    wanted = {n: v for n, v in function.inputs.items() if not types.is_state(v.sym_type)}
    check_names(wanted, values)
    if missing := [n for n in wanted if n not in values]:
        raise InterpretError(f"missing inputs: {', '.join(missing)}; the model takes {', '.join(wanted)}")
    env: dict[Var, Any] = dict(state.bind(function, states))
    symbols: dict[Any, int] = {}
    for name, var in wanted.items():
        env[var] = _input(name, var, values[name], symbols, name in exact)
        if name == state.POSITION and states is not None and not env[var].is_floating_point():
            state.check_position(env[var], var, states)
    return env


def _input(name: str, var: Var, value: Any, symbols: dict[Any, int], exact: bool) -> torch.Tensor:
    array = as_array(name, value)
    shape = tuple(var.shape or ())
    if not shape and array.shape == (1,):  # how Core ML hands over a scalar
        array = array.reshape(())
    if array.ndim != len(shape) or not all(
        _fits(d, n, symbols) for d, n in zip(shape, array.shape, strict=True)
    ):
        expected = tuple(symbols.get(d, "any") if is_symbolic(d) else int(d) for d in shape)
        words = f"({', '.join(map(str, expected))}{',' if len(expected) == 1 else ''})"
        raise InterpretError(f"input {name!r} has shape {array.shape}, expected {words}")
    if not (exact and array.dtype.kind == np_dtype(var).kind == "f"):
        array = _cast(name, array, np_dtype(var))
    return precision.finish(precision.as_tensor(array), precision.run_dtype(var), None)


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
