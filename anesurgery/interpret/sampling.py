"""Bind the inputs of a function before a run, or draw random ones that the function can run on.

`Binder` checks shapes, dtypes and the position of a decoder, and converts arrays to tensors. `sample_inputs`
draws inputs: for that it follows integer inputs to the tables that they index, so that ids are rows of these.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from anesurgery.errors import InterpretError, SurgeryError
from anesurgery.interpret import state
from anesurgery.interpret.arithmetic import constant_memory, precision
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
from anesurgery.ops import JOINING, LOOKUPS, MOVING, REARRANGING

_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxtuple = 8


def describe(value: Any) -> str:
    """Return the shape and dtype of a value, for messages."""
    if isinstance(value, torch.Tensor):
        return f"{'x'.join(map(str, value.shape)) or 'scalar'} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return f"[{', '.join(map(describe, value))}]"
    return f"state {describe(value.value)}" if isinstance(value, state.Box) else _SHORT.repr(value)


class Binder:
    """Checks and converts the inputs of a function; what the function needs is looked up once for all runs."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._states = state.shapes(function)
        self._vars = {n: v for n, v in function.inputs.items() if n not in self._states}
        self._inputs = {name: _Input(name, var) for name, var in self._vars.items()}
        position = self._vars.get(state.POSITION)
        is_input = position is not None and np_dtype(position).kind != "f"
        self._limit = state.context_limit(position) if position is not None and is_input else None

    def __call__(
        self, values: Mapping[str, Any], states: state.States | None, exact: Collection[str] = ()
    ) -> dict[Var, Any]:
        """Return the first environment of a run: see `bind`."""
        check_names(self._vars, values)
        if missing := [n for n in self._vars if n not in values]:
            raise InterpretError(
                f"missing inputs: {', '.join(missing)}; the model takes {', '.join(self._vars)}"
            )
        if states is not None:
            state.check(self._states, states)
        boxes = state.make(self._function) if states is None else states
        env: dict[Var, Any] = {self._function.inputs[name]: box for name, box in boxes.items()}
        symbols: dict[Any, int] = {}
        for name, port in self._inputs.items():
            env[port.var] = port.convert(values[name], symbols, name in exact)
        if self._limit is not None and states is not None:
            state.check_position(env[self._vars[state.POSITION]], self._limit, states)
        return env


def bind(
    function: Function, values: Mapping[str, Any], states: state.States | None, exact: Collection[str] = ()
) -> dict[Var, Any]:
    """Return the first environment of a run: the inputs and states of a function.

    Args:
        function: the function.
        values: its inputs by name.
        states: what lives on between calls; None for new ones.
        exact: inputs whose floats are not rounded to the type of the input, since another part of the same
            model computed them and would not have rounded them either.

    Raises:
        InterpretError: an input is missing, or has a wrong shape or dtype.
        UnknownName: an input that the function does not have.
    """
    return Binder(function)(values, states, exact)


class _Input:
    """One input of a function."""

    def __init__(self, name: str, var: Var) -> None:
        self.name, self.var = name, var
        self._shape, self._dtype = tuple(var.shape or ()), np_dtype(var)
        self._run_dtype = precision.run_dtype(var)
        self._static = not any(is_symbolic(d) for d in self._shape)

    def convert(self, value: Any, symbols: dict[Any, int], exact: bool) -> torch.Tensor:
        """Check a value, and return it as the program reads it.

        Args:
            value: what the caller gave.
            symbols: the lengths of symbolic dimensions that are known so far; it gains those of this input.
            exact: keep floats unrounded?
        """
        array = as_array(self.name, value)
        if not self._shape and array.shape == (1,):  # Core ML hands over a scalar so
            array = array.reshape(())
        if not (self._static and array.shape == self._shape) and not self._allows(array.shape, symbols):
            expected = tuple(symbols.get(d, "any") if is_symbolic(d) else int(d) for d in self._shape)
            words = f"({', '.join(map(str, expected))}{',' if len(expected) == 1 else ''})"
            raise InterpretError(f"input {self.name!r} has shape {array.shape}, expected {words}")
        if not (exact and array.dtype.kind == self._dtype.kind == "f"):
            array = _cast(self.name, array, self._dtype)
        return precision.in_run_dtype(constant_memory.as_tensor(array), self._run_dtype, None)

    def _allows(self, shape: Sequence[int], symbols: dict[Any, int]) -> bool:
        """Is this a shape of the input? The lengths of new symbols are added."""
        pairs = zip(self._shape, shape, strict=True) if len(shape) == len(self._shape) else None
        return pairs is not None and all(_fits(d, n, symbols) for d, n in pairs)


def _cast(name: str, array: Array, dtype: np.dtype[Any]) -> Array:
    """Return an array in the dtype of an input; as in Core ML, whole floats are accepted for integers."""
    kind = "text" if array.dtype.kind in "US" else array.dtype
    words = f"input {name!r} holds {kind}, expected {dtype}"
    if array.dtype.kind not in "fiub":
        raise InterpretError(words)
    with np.errstate(invalid="ignore", over="ignore"):  # a large float becomes infinite in fp16
        cast = array.astype(dtype)
    if dtype.kind != "f" and not np.array_equal(cast, array):
        raise InterpretError(f"{words}; numbers such as {array[cast != array][0]} do not fit into {dtype}")
    return cast


def _fits(dimension: Any, size: int, symbols: dict[Any, int]) -> bool:
    """Is a length that of a dimension? A symbol that is not known yet takes it."""
    if not is_symbolic(dimension):
        return int(dimension) == size
    return symbols.setdefault(dimension, size) == size


KEEPS_INDEX = MOVING | JOINING | {"cast", "add", "sub", "select", "maximum", "minimum", "clip"}
KEEPS_INDEX |= {"floor", "ceil", "round", "tile", "identity"}
"""Ops through which an id is followed to the table that it indexes (guards included)."""
FARTHEST = 1 << 20
"""An index that is shifted by more is not followed: no table has so many rows."""
WHOLE = REARRANGING | JOINING | {"cast", "tile"}
"""Ops that pass every number of a value on."""


def sample_inputs(program: Program, *, function: str | None = None, **options: Any) -> dict[str, Array]:
    """Draw inputs for a function of a program, the only or first one by default: see `sample_function`."""
    return sample_function(function_of(program, function), **options)


def check_seed(seed: int) -> None:
    """Check the seed of a generator.

    Raises:
        SurgeryError: it is not a whole number from 0 up.
    """
    if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool) or seed < 0:
        raise SurgeryError(f"seed={seed!r}; it must be a whole number from 0 up")


def generator(seed: int) -> np.random.Generator:
    """Return a generator of random numbers.

    Raises:
        SurgeryError: the seed is not a whole number from 0 up.
    """
    check_seed(seed)
    return np.random.default_rng(int(seed))


def sample_function(
    function: Function,
    *,
    seed: int = 0,
    length: int = 4,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    images: Collection[str] = (),
) -> dict[str, Array]:
    """Draw inputs for a function.

    Floats are standard normal, those of images whole numbers from 0 to 255. An input that indexes a table is
    drawn from the table's rows, as whole numbers where it holds floats; any other integer is 1 for the first
    part of its last axis and 0 after it, like a mask of padded text.
    States are left out: a run begins with new ones.

    Args:
        function: the function.
        seed: of the random numbers.
        length: what a symbolic dimension becomes.
        shapes: shapes by input name, in place of the declared ones.
        images: the inputs that are images (`features.images`).
    """
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
    """Draw one input that is no image."""
    dtype = np_dtype(var)
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    if (rows := index_range(var, one_hot=True)) is not None:
        return rng.integers(0, _distinct_numbers(rows, dtype), shape).astype(dtype)
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    mask = np.ones(shape, dtype)
    if shape:
        mask[..., shape[-1] - shape[-1] // 4 :] = 0
    return mask


def _distinct_numbers(rows: int, dtype: np.dtype[Any]) -> int:
    """Return how many row numbers a dtype can represent: fp16 has no odd number above 2048."""
    return min(rows, 2 ** (np.finfo(dtype).nmant + 1)) if dtype.kind == "f" else rows


def index_range(var: Var, *, one_hot: bool = False) -> int | None:
    """Return the rows of the smallest constant table that a value indexes, less what is added to it; or None.

    With `one_hot`, the size of a one_hot counts as rows too. It gives zeros beyond, where a table has nothing.
    """
    seen, stack, rows = {(var, 0)}, [(var, 0)], list[int]()
    while stack:
        value, shift = stack.pop()
        for op in consumers(value):
            if op.op_type in LOOKUPS:
                if op.indices is value and op.x.shape and op.x.op is not None:
                    axis = op.inputs.get("axis")
                    size = op.x.shape[int(axis.val) if axis is not None else 0]
                    rows += [] if is_symbolic(size) or size <= shift else [int(size) - shift]
            elif one_hot and op.op_type == "one_hot" and op.indices is value:
                depth = constant(op.one_hot_vector_size)
                rows += [] if depth is None else [int(depth)]
            elif op.op_type in KEEPS_INDEX:
                shifted = [(v, min(shift + _largest_addend(op), FARTHEST)) for v in op.outputs]
                new = [pair for pair in shifted if pair not in seen]
                seen.update(new)
                stack += new
    return min(rows, default=None)


def indexed_rows(var: Var) -> int | None:
    """Return the rows of the smallest table that every number of a value indexes, guarded or not; or None."""
    seen, stack, rows = {var}, [var], []
    while stack:
        value = stack.pop()
        for op in consumers(value):
            if op.op_type in ("gather", "gather_along_axis") and op.indices is value:
                axis = constant(op.inputs.get("axis"))
                size = op.x.shape[int(axis or 0)]
                rows += [] if is_symbolic(size) else [int(size)]
            elif (op.op_type in WHOLE and op.inputs.get("x", value) is value) or is_guard(op):
                new = [v for v in op.outputs if v not in seen]
                seen.update(new)
                stack += new
    return min(rows, default=None)


def is_guard(op: Operation) -> bool:
    """Is it a select that counts negative ids from the end of their table: where(ids >= 0, ids, ids + rows)?"""
    cond = producer(op.cond, "greater_equal", "less") if op.op_type == "select" else None
    zero = None if cond is None else constant(cond.y)
    return zero is not None and not np.any(zero) and any(producer(v, "add") for v in (op.a, op.b))


def _largest_addend(op: Operation) -> int:
    """Return the most that an add shifts an index. A guard adds all rows only to one that is out of range."""
    addends = [constant(v) for v in (op.x, op.y)] if op.op_type == "add" else []
    largest = [float(np.max(v)) for v in addends if v is not None and np.size(v)]
    return max((math.ceil(n) if math.isfinite(n) else FARTHEST for n in largest), default=0)
