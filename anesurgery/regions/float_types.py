"""Values in another float type, and scores made again in the type of a new operand."""

from __future__ import annotations

import numpy as np

from anesurgery.mil import Maker, Operation, Var, constant, consumers, is_output, np_dtype


def for_readers(mb: Maker, old: Var, new: Var) -> dict[Var, Var]:
    """Replace a value by one that may be narrower; a reader that made it as narrow is not needed any more."""
    readers = consumers(old)
    if len(readers) == 1 and not is_output(old) and np_dtype(old) != np_dtype(new):
        narrowed: Var = readers[0].outputs[0]
        if readers[0].op_type == "cast" and np_dtype(narrowed) == np_dtype(new):
            return {narrowed: new}
    return {old: as_dtype(mb, new, np_dtype(old))}


def dtype_word(dtype: np.dtype[np.generic]) -> str:
    """A float type as `cast` names it."""
    return "fp16" if dtype == np.float16 else "fp32"


def as_dtype(mb: Maker, var: Var, dtype: np.dtype[np.generic]) -> Var:
    """A value in a float type."""
    if np_dtype(var) == dtype:
        return var
    return mb.cast(x=var, dtype=dtype_word(dtype))


def again(mb: Maker, op: Operation, x: Var) -> Var:
    """An op that stood between the mask and the softmax, on the new operand."""
    if op.op_type == "cast":
        return as_dtype(mb, x, np_dtype(op.outputs[0]))
    if op.op_type in ("mul", "real_div"):
        scale = op.y if constant(op.y) is not None else op.x
        x = as_dtype(mb, x, np_dtype(scale))
        copy: Var = getattr(mb, op.op_type)(x=x, y=scale)
    elif op.op_type == "reshape":
        copy = mb.reshape(x=x, shape=op.shape)
    else:
        copy = x
    return copy
