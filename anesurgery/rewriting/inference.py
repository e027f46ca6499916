"""Types inferred anew, where what an op reads has another shape than before."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from anesurgery.errors import PassError
from anesurgery.mil import Block, Function, Operation, Var, dtype_name, is_symbolic, np_dtype, operands, types
from anesurgery.semantics.reading import shape_in_words


def widen_choices(function: Function) -> None:
    """Choices between two scalars are as wide as what decides, which coremltools types as scalars."""
    for op in function.operations:
        widen_choice(op)


def widen_choice(op: Operation) -> None:
    """The same for one op; not for one that is kept, which coremltools would not read back."""
    if _chooses_numbers(op) and not op.outputs[0].rank:
        set_type(op.outputs[0], types.tensor(op.outputs[0].dtype, op.cond.shape))


def _chooses_numbers(op: Operation) -> bool:
    """Is it a choice between two scalars by what is none?"""
    return bool(op.op_type == "select" and op.cond.rank and not op.a.rank and not op.b.rank)


def set_type(var: Var, sym_type: Any) -> None:
    """The type of a value, which coremltools sets once."""
    setattr(var, "_sym_type", sym_type)  # noqa: B010 - the stub has no private members


def infer(op: Operation) -> None:
    """The types and values of the results, from those of the operands.

    Raises:
        PassError: the shapes do not fit.
    """
    if _chooses_numbers(op) and all(v.val is not None for v in (op.cond, op.a, op.b)):  # coremltools fails
        widen_choice(op)
        chosen = np.where(op.cond.val, op.a.val, op.b.val).astype(np_dtype(op.outputs[0]))
        setattr(op.outputs[0], "_sym_val", types.numpy_val_to_builtin_val(chosen)[0])  # noqa: B010
        return
    held = [np_dtype(v) if types.is_tensor(v.sym_type) else None for v in op.outputs]
    for block in op.blocks:
        _infer_block(op, block)
    try:
        with _ends_kept(op):
            op.type_value_inference(overwrite_output=True)
    except Exception as error:
        words = f"the shapes do not fit {op.op_type} {op.name}: {error}"
        raise PassError(words) from error
    for var, kind in zip(op.outputs, held, strict=True):
        if kind is not None and types.is_tensor(var.sym_type) and np_dtype(var) != kind:
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
    """The same for what stands in a block of an op, from the values that it begins with.

    Raises:
        PassError: the shapes do not fit, or a value has another one after a round.
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


def infer_readers(function: Function, values: Iterable[Var]) -> None:
    """Infer all that is computed from some values, as far as shapes change; not what stands in blocks.

    Raises:
        PassError: the shapes do not fit.
    """
    changed = set(values)
    if not changed:  # nearly every edit: leaving a function walks all its ops
        return
    with function:  # some ops build others to infer their shapes
        for op in function.operations:
            if op.blocks or changed.isdisjoint(v for _, v in operands(op)):
                continue
            before = {v: v.shape for v in op.outputs if types.is_tensor(v.sym_type)}
            infer(op)
            tensors = [v for _, v in operands(op) if types.is_tensor(v.sym_type)]
            sizes = {size for v in tensors for size in v.shape}
            for var, shape in before.items():
                keep_sizes(var, shape, sizes)
            changed |= {v for v, shape in before.items() if v.shape != shape}


def keep_sizes(var: Var, shape: Sequence[Any], alive: Collection[Any]) -> None:
    """A size that inference makes up anew keeps the symbol it had: of two dynamic sizes that are added, say."""
    if len(shape) == len(var.shape):
        kept = [o if is_symbolic(n) and n not in alive else n for o, n in zip(shape, var.shape, strict=True)]
        set_type(var, types.tensor(var.dtype, kept))
