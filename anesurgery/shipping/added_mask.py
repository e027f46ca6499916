"""A mask that is added as an input to attention that has none, so that what is filled up can be hidden."""

from __future__ import annotations

import numpy as np

from anesurgery.errors import SurgeryError
from anesurgery.files.joining import default_function
from anesurgery.files.package import Loaded
from anesurgery.mil import (
    Function,
    Operation,
    Var,
    add_input,
    any_symbolic,
    constant,
    dtype_name,
    function_of,
    is_symbolic,
    mb,
    types,
    walk_ops,
)
from anesurgery.rewriting.ml_program import MLProgram

HIDING = 1e4
"""What is taken from scores that are hidden: two such masks are still numbers of fp16."""


def with_mask(loaded: Loaded, mask: str, source: str, axis: int) -> Loaded:
    """A copy of a model with one more input, 1 where a place counts and 0 where it is hidden.

    Its shape is (1, length), its type fp32. Each softmax over a last axis of dynamic length has 10,000 taken
    from the scores of places that are hidden.

    Args:
        loaded: a model of dynamic shapes.
        mask: the name of the new input.
        source: an input whose length the mask has.
        axis: of that input.

    Raises:
        SurgeryError: the name is taken, or there is no such softmax, or it is fused or over another axis.
    """
    copied = MLProgram(loaded).clone().loaded
    function = function_of(copied.program, default_function(copied))
    if mask in function.inputs:
        raise SurgeryError(f"sizes: the model has an input {mask!r} already; give its shapes instead of mask=")
    length = function.inputs[source].shape[axis]
    if not is_symbolic(length):
        raise SurgeryError(f"sizes: axis {axis} of {source} is fixed, so that a mask has nothing to hide")
    softmaxes = _softmaxes(function)
    given = add_input(function, mask, (1, length), types.fp32)
    with function:
        first = next(op for op in function.operations if op.op_type != "const")
        less = mb.sub(x=given, y=np.float32(1), before_op=first, name=f"{mask}_hidden")
        bias = mb.mul(x=less, y=np.float32(HIDING), before_op=first, name=f"{mask}_bias")
        for op in softmaxes:
            _hide(function, op, bias)
    return copied


def _softmaxes(function: Function) -> list[Operation]:
    """Those over keys.

    Raises:
        SurgeryError: there are none, or some that a mask cannot be added to.
    """
    found = list[Operation]()
    for op in walk_ops(function):
        if op.op_type == "scaled_dot_product_attention":
            raise SurgeryError(
                f"sizes: {op.name} is fused attention, to which no mask is added; convert for iOS 17, "
                "or with a mask"
            )
        if op.op_type == "softmax" and any_symbolic([op.x.shape[constant(op.axis)]]):
            if constant(op.axis) not in (-1, op.x.rank - 1):
                raise SurgeryError(f"sizes: {op.name} is a softmax over axis {constant(op.axis)}, not the last")
            found.append(op)
    if not found:
        raise SurgeryError("sizes: no softmax goes over the length of the inputs, so that a mask hides nothing")
    return found


def _hide(function: Function, op: Operation, bias: Var) -> None:
    """Add the mask to the scores of one softmax."""
    scores, wide = op.x, bias
    if scores.rank > 2:
        new = list(range(1, scores.rank - 1))
        wide = mb.expand_dims(x=bias, axes=new, before_op=op, name=f"{op.name}_bias")
    if dtype_name(scores) != "fp32":
        wide = mb.cast(x=wide, dtype=dtype_name(scores), before_op=op, name=f"{op.name}_bias_cast")
    masked = mb.add(x=scores, y=wide, before_op=op, name=f"{op.name}_masked")
    function.replace_uses_of_var_after_op(anchor_op=masked.op, end_op=op, old_var=scores, new_var=masked)
