"""Inputs of a program: made so that it can run on them; or checked, and given the form in which it runs."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from anesurgery.errors import InterpretError, SurgeryError
from anesurgery.interpret import state
from anesurgery.interpret.arithmetic import precision
from anesurgery.interpret.features import as_array, check_names
from anesurgery.mil import (
    Array,
    Function,
    Operation,
    Program,
    Var,
    constant,
    consumers,
    function_of,
    is_symbolic,
    np_dtype,
    producer,
    types,
)
from anesurgery.ops import JOINING, MOVING, REARRANGING

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
    held = "text" if array.dtype.kind in "US" else array.dtype
    words = f"input {name!r} holds {held}, expected {dtype}"
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


LOOKUPS = {"gather": ("indices", "x"), "gather_along_axis": ("indices", "x"), "gather_nd": ("indices", "x")}
KEEPS_INDEX = MOVING | JOINING | {"cast", "add", "sub", "select", "maximum", "minimum", "clip"}
KEEPS_INDEX |= {"floor", "ceil", "round", "tile", "identity"}
"""Ops through which an id is followed to the table that it indexes (guards included)."""
FARTHEST = 1 << 20
"""An index that is moved on by more is lost sight of: no table has so many rows."""
WHOLE = REARRANGING | JOINING | {"cast", "tile"}
"""Ops that hand every number of a value on."""


def sample_inputs(
    program: Program,
    *,
    function: str | None = None,
    seed: int = 0,
    length: int = 4,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    images: Collection[str] = (),
) -> dict[str, Array]:
    """Inputs for one function of a program.

    Floats are standard normal, those of images whole numbers from 0 to 255. An input that indexes a table is
    drawn from the table's rows, as whole numbers where it holds floats; any other integer is 1 for the first
    part of its last axis and 0 after it, as a mask of padded text.
    States are left out: a run begins with fresh ones.

    Args:
        program: the program.
        function: its function; the only or first one by default.
        seed: of the random numbers.
        length: what a symbolic dimension becomes.
        shapes: shapes by input name, in place of the declared ones.
        images: the inputs that are images (`features.images`).
    """
    return sample_function(
        function_of(program, function), seed=seed, length=length, shapes=shapes, images=images
    )


def generator(seed: int) -> np.random.Generator:
    """The source of random numbers of a seed.

    Raises:
        SurgeryError: it is not a whole number from 0 up.
    """
    if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool) or seed < 0:
        raise SurgeryError(f"seed={seed!r}; it must be a whole number from 0 up")
    return np.random.default_rng(int(seed))


def sample_function(
    function: Function,
    *,
    seed: int = 0,
    length: int = 4,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    images: Collection[str] = (),
) -> dict[str, Array]:
    """Inputs for a function: see `sample_inputs`."""
    rng = generator(seed)
    drawn = {}
    for name, var in function.inputs.items():
        if types.is_state(var.sym_type):
            continue
        declared = tuple(length if is_symbolic(d) else int(d) for d in var.shape or ())
        wanted = (shapes or {}).get(name, declared)
        shape = wanted if len(wanted) == len(declared) else declared
        pixels = name in images and np_dtype(var).kind == "f"
        drawn[name] = rng.integers(0, 256, shape).astype(np_dtype(var)) if pixels else _draw(var, shape, rng)
    return drawn


def _draw(var: Var, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    dtype = np_dtype(var)
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    if (rows := index_range(var, one_hot=True)) is not None:
        return rng.integers(0, _held(rows, dtype), shape).astype(dtype)
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    mask = np.ones(shape, dtype)
    if shape:
        mask[..., shape[-1] - shape[-1] // 4 :] = 0
    return mask


def _held(rows: int, dtype: np.dtype[Any]) -> int:
    """The rows that a type tells apart: fp16 holds no odd number above 2048."""
    return min(rows, 2 ** (np.finfo(dtype).nmant + 1)) if dtype.kind == "f" else rows


def index_range(var: Var, without: Collection[Operation] = (), *, one_hot: bool = False) -> int | None:
    """The number of rows of the smallest constant table that a value indexes, or None.

    Args:
        var: the value.
        without: ops that are not looked at.
        one_hot: is the size of a one_hot a number of rows too? It gives zeros beyond, where a table has none.
    """
    seen, stack, rows = {(var, 0)}, [(var, 0)], list[int]()
    while stack:
        value, shift = stack.pop()
        for op in (op for op in consumers(value) if op not in without):
            if op.op_type in LOOKUPS:
                index, table = (op.inputs[k] for k in LOOKUPS[op.op_type])
                if index is value and table.shape and table.op is not None:
                    axis = op.inputs.get("axis")
                    size = table.shape[int(axis.val) if axis is not None else 0]
                    rows += [] if is_symbolic(size) or size <= shift else [int(size) - shift]
            elif one_hot and op.op_type == "one_hot" and op.indices is value:
                depth = constant(op.one_hot_vector_size)
                rows += [] if depth is None else [int(depth)]
            elif op.op_type in KEEPS_INDEX:
                ways = [(v, min(shift + _added(op), FARTHEST)) for v in op.outputs]
                fresh = [way for way in ways if way not in seen]
                seen.update(fresh)
                stack += fresh
    return min(rows, default=None)


def rows_read(var: Var) -> int | None:
    """The rows of the smallest table that a value indexes as a whole, guards of negative ids apart; or None."""
    seen, stack, rows = {var}, [var], []
    while stack:
        value = stack.pop()
        for op in consumers(value):
            if op.op_type in ("gather", "gather_along_axis") and op.indices is value:
                axis = constant(op.inputs.get("axis"))
                size = op.x.shape[int(axis or 0)]
                rows += [] if is_symbolic(size) else [int(size)]
            elif (op.op_type in WHOLE and op.inputs.get("x", value) is value) or is_guard(op, value):
                fresh = [v for v in op.outputs if v not in seen]
                seen.update(fresh)
                stack += fresh
    return min(rows, default=None)


def is_guard(op: Operation, ids: Var) -> bool:
    """Does it count negative ids from the end of their table?"""
    cond = producer(op.cond, "greater_equal", "less") if op.op_type == "select" else None
    zero = None if cond is None else constant(cond.y)
    return zero is not None and not np.any(zero) and any(producer(v, "add") for v in (op.a, op.b))


def _added(op: Operation) -> int:
    """The most that a constant adds to an index; a guard that adds all rows is not met by one in range."""
    addends = [constant(v) for v in (op.x, op.y)] if op.op_type == "add" else []
    most = [float(np.max(v)) for v in addends if v is not None and np.size(v)]
    return max((math.ceil(n) if math.isfinite(n) else FARTHEST for n in most), default=0)
