"""Infer the types of ops anew: of one op, or of a function whose dynamic inputs get static shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery.errors import PassError, Refusal
from anesurgery.mil import (
    Block,
    Function,
    Operation,
    Var,
    any_symbolic,
    dtype_name,
    is_symbolic,
    np_dtype,
    types,
    walk_ops,
)
from anesurgery.semantics.reading import shape_in_words

PASS = "fix_shapes"
"""The pass that errors name."""


def widen_choices(function: Function) -> None:
    """Correct the types of all `select` ops between two scalars: see `widen_choice`."""
    for op in function.operations:
        widen_choice(op)


def widen_choice(op: Operation) -> None:
    """Give the result of a `select` between two scalars the shape of its condition.

    coremltools types it as a scalar. It would not read the right type back from a file, so only the ops of a
    program that is thrown away are corrected.
    """
    if _selects_scalars(op) and not op.outputs[0].rank:
        set_type(op.outputs[0], types.tensor(op.outputs[0].dtype, op.cond.shape))


def _selects_scalars(op: Operation) -> bool:
    """Does a `select` choose between two scalars by a condition that is no scalar?"""
    return bool(op.op_type == "select" and op.cond.rank and not op.a.rank and not op.b.rank)


def set_type(var: Var, sym_type: Any) -> None:
    """Change the type of a value, which coremltools sets only once."""
    setattr(var, "_sym_type", sym_type)  # noqa: B010 - the stub has no private members


def infer(op: Operation) -> None:
    """Infer the types and values of the results of an op from its operands; no result may change its dtype.

    Raises:
        PassError: the shapes do not fit, or a dtype would change.
    """
    if _selects_scalars(op) and all(v.val is not None for v in (op.cond, op.a, op.b)):  # coremltools fails
        widen_choice(op)
        chosen = np.where(op.cond.val, op.a.val, op.b.val).astype(np_dtype(op.outputs[0]))
        setattr(op.outputs[0], "_sym_val", types.numpy_val_to_builtin_val(chosen)[0])  # noqa: B010
        return
    dtypes = [np_dtype(v) if types.is_tensor(v.sym_type) else None for v in op.outputs]
    for block in op.blocks:
        _infer_block(op, block)
    try:
        with _ends_kept(op):
            op.type_value_inference(overwrite_output=True)
    except Exception as error:
        words = f"the shapes do not fit {op.op_type} {op.name}: {error}"
        raise PassError(words) from error
    for var, dtype in zip(op.outputs, dtypes, strict=True):
        if dtype is not None and types.is_tensor(var.sym_type) and np_dtype(var) != dtype:
            raise PassError(f"%{var.name} would become {dtype_name(var)}")


@contextmanager
def _ends_kept(op: Operation) -> Iterator[None]:
    """Keep the ends of a slice: coremltools overwrites negative ones with what they mean at one length."""
    names = ("begin", "end") if op.op_type == "slice_by_index" else ()
    arrays = [op.inputs[n].val for n in names if op.inputs[n].val is not None]
    held = [(array, array.copy()) for array in arrays if array.flags.writeable]
    try:
        yield
    finally:
        for array, before in held:
            array[...] = before


def _infer_block(op: Operation, block: Block) -> None:
    """Infer the types in a block of an op. Of a loop, the inputs of the block are its loop variables.

    Raises:
        PassError: the shapes do not fit, or a loop variable has another shape after a round.
    """
    begins = op.loop_vars if block.inputs else ()
    for var, value in zip(block.inputs, begins, strict=True):
        set_type(var, value.sym_type)
    with block:
        for inner in block.operations:
            if inner.op_type != "const":
                infer(inner)
    after = block.outputs if len(block.outputs) == len(begins) and block is op.blocks[-1] else begins
    for var, value in zip(after, begins, strict=True):
        if types.is_tensor(value.sym_type) and tuple(var.shape) != tuple(value.shape):
            shapes = (
                f"{shape_in_words(value.shape)} before a round of {op.name} and {shape_in_words(var.shape)}"
            )
            raise PassError(f"%{var.name} is {shapes} after it")


@dataclass(frozen=True)
class FixedShapes:
    """The static shapes that inputs shall have."""

    given: Mapping[str, Sequence[int]]
    """Input -> its shape."""
    length: int
    """The length of a dynamic axis if no given shape tells it; the first axis, the batch, then has 1."""

    def sizes(self, function: Function) -> dict[Any, int]:
        """Return the length of each dynamic size of the inputs, by its symbol.

        Raises:
            PassError: a shape that is given does not fit.
        """
        lengths: dict[Any, int] = {}
        for name, var in function.inputs.items():
            shape = self.given.get(name)
            if shape is None:
                continue
            if len(shape) != len(var.shape):
                raise PassError(f"{PASS}: {name} has {len(var.shape)} axes, the shape given {len(shape)}")
            for size, wanted in zip(var.shape, shape, strict=True):
                length = lengths.setdefault(size, int(wanted)) if is_symbolic(size) else int(size)
                if length != wanted or wanted < 1:
                    words = f"{shape_in_words(var.shape)}, not {shape_in_words(shape)}"
                    raise PassError(f"{PASS}: the shape of {name} is {words}")
        given_sizes = [(axis, int(size)) for shape in self.given.values() for axis, size in enumerate(shape)]
        likely = {0: 1, **dict(reversed(given_sizes))}  # of several inputs, the first one counts
        for var in function.inputs.values():
            for axis, size in enumerate(var.shape or ()):
                if is_symbolic(size):
                    lengths.setdefault(size, likely.get(axis, self.length))
        return lengths

    def fix(self, function: Function) -> None:
        """Give the inputs of a function their shapes; where one does not fit, the function stays as it was.

        Raises:
            PassError: a shape does not fit the input, another input or an op.
        """
        values = [*function.inputs.values(), *(v for op in walk_ops(function) for v in op.outputs)]
        values += [v for op in walk_ops(function) for block in op.blocks for v in block.inputs]
        before = [(v, v.sym_type, getattr(v, "_sym_val", None)) for v in values]
        sizes = self.sizes(function)
        try:
            with function:  # some ops build others to infer their shapes
                for var in dynamic_inputs(function).values():
                    set_type(var, types.tensor(var.dtype, [sizes.get(d, d) for d in var.shape]))
                for op in function.operations:
                    if op.op_type != "const":
                        infer(op)
        except PassError as error:
            for var, sym_type, value in before:
                set_type(var, sym_type)
                setattr(var, "_sym_val", value)  # noqa: B010
            raise PassError(f"{PASS}: {error}") from error


def dynamic_inputs(function: Function) -> dict[str, Var]:
    """Return the inputs with a dynamic length, by name."""
    return {name: var for name, var in function.inputs.items() if any_symbolic(var.shape or ())}


def barred(function: Function, images: frozenset[str]) -> Refusal | None:
    """Return why the shapes of a function cannot be fixed."""
    if pictures := [name for name in dynamic_inputs(function) if name in images]:
        return Refusal(f"%{pictures[0]} is an image of dynamic size; fix it when converting")
    return None
