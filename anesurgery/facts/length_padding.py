"""Find out whether the first rows of every output depend on the first rows of the inputs alone.

Then a shorter input may be padded at its end, and the outputs cropped. Two things are shown. Nothing is
computed from the length but the shapes of reshapes (`length_counted`). At a length that no other axis has,
every op is followed: slice i of its result depends on slice i of what is padded, or on slices up to i
(`rows_kept`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from anesurgery.errors import Refusal
from anesurgery.mil import (
    Function,
    Operation,
    Var,
    any_symbolic,
    constant,
    consumers,
    is_output,
    is_stored,
    operands,
)
from anesurgery.ops import names
from anesurgery.semantics.rows import axes_of, slices_read

COUNTING = names("cast concat expand_dims gather identity mul reshape slice_by_index squeeze")
"""Ops by which shapes are put together; what else is computed from lengths may differ from one to the next."""
RECURRENT = names("gru lstm rnn")


def free_length(taken: Iterable[int]) -> int:
    """The least prime from 11 on that divides none of some lengths."""
    lengths = {n for n in taken if n}
    length = 11
    while any(length % d == 0 for d in range(2, length)) or any(n % length == 0 for n in lengths):
        length += 1
    return length


def length_counted(function: Function) -> Refusal | None:
    """Where a function of dynamic shapes computes with a length, but for shapes of reshapes; None: nowhere."""
    counted: set[Var] = set()
    for op in function.operations:
        if op.op_type == "shape" and any_symbolic(op.x.shape):
            counted.update(op.outputs)
            continue
        read = {name for name, var in operands(op) if var in counted}
        if not read or (op.op_type == "reshape" and read == {"shape"}):
            continue
        if op.op_type not in COUNTING or any(v not in counted and not is_stored(v) for _, v in operands(op)):
            return Refusal(f"{op.op_type} computes with the length of the input", op)
        counted.update(op.outputs)
    named = [v for v in function.outputs if v in counted]
    return Refusal(f"the output {named[0].name} is computed from the length of the input") if named else None


def rows_kept(function: Function, axes: Mapping[str, int], length: int) -> dict[str, int] | Refusal:
    """Output -> its axis to crop, of those that depend on the padded inputs.

    Args:
        function: of static shapes.
        axes: input -> its axis that is padded.
        length: of these axes, which divides no other length of the function (`free_length`).
    """
    for name, var in function.inputs.items():
        if name not in axes and _long(var, length):
            return Refusal(f"the input {name} follows the length of the others, and is not among the sizes")
    held = {function.inputs[name]: axis for name, axis in axes.items()}
    for op in function.operations:
        read = {var for _, var in operands(op) if var in held}
        if not read:
            continue
        if any(_long(var, length) for _, var in operands(op) if var not in held):
            return Refusal(f"{op.op_type} reads a table as long as the input", op)
        kept = _kept(op, {var: held[var] for var in read})
        if isinstance(kept, Refusal):
            return kept
        for var in op.outputs[:1] if op.op_type in RECURRENT else op.outputs:
            if not _alone(var, kept, length):
                return Refusal(f"{op.op_type} gives the axis another length", op)
            held[var] = kept
    long = [v for v in function.outputs if v not in held and _long(v, length)]
    if long:
        return Refusal(f"the output {long[0].name} is a table as long as the input")
    return {v.name: held[v] for v in function.outputs if v in held}


def _alone(var: Var, axis: int, length: int) -> bool:
    """Is the axis of that length, and does the length divide no other?"""
    divided = [n % length == 0 for n in var.shape]
    return axis < var.rank and var.shape[axis] == length and sum(divided) == 1


def _long(var: Var, length: int) -> bool:
    return any(n % length == 0 for n in var.shape or ())


def _says(op: Operation, name: str, default: Any = False) -> Any:
    """A parameter that is no tensor; the default where it is absent."""
    return default if op.inputs.get(name) is None else constant(op.inputs[name])


def _kept(op: Operation, read: Mapping[Var, int]) -> int | Refusal:
    """The axis of the result along which slices depend on no later slices of what is read.

    Args:
        op: the op.
        read: operand that is padded -> its axis.
    """
    if op.op_type in RECURRENT:
        return _recurrent(op, read)
    if op.op_type == "cumsum":
        return Refusal("cumsum reads across the padded axis", op) if _says(op, "reverse") else read[op.x]
    axes = axes_of(op)
    if axes is None:
        return Refusal(f"it is not known whether {op.op_type} reads across the padded axis", op)
    for axis in range(op.outputs[0].rank):
        rows = slices_read(axes, axis) or {}
        if all(rows.get(var) == at for var, at in read.items()):
            return axis
    return Refusal(f"{op.op_type} reads across the padded axis", op)


def _recurrent(op: Operation, read: Mapping[Var, int]) -> int | Refusal:
    """The steps of a recurrent layer that runs forward; its last states are those of the padding."""
    if read != {op.x: 0} or _says(op, "direction", "forward") != "forward":
        return Refusal(f"{op.op_type} reads across the padded axis", op)
    if not _says(op, "output_sequence") or any(consumers(v) or is_output(v) for v in op.outputs[1:]):
        return Refusal(f"the last state of {op.op_type} is that of the padding", op)
    return 0
