"""Make inputs for a program that it can run on: ids inside their table, masks that mask the end."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from anesurgery.errors import SurgeryError
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
