"""Attention sinks: columns beside the scores that take their share of a softmax, and are dropped after it.

Their scores do not depend on what is looked at, so that they are no keys. They stand behind those of the
tokens; the maximum of each row may be taken away before the softmax, which changes nothing.
"""

from __future__ import annotations

from anesurgery.mil import Operation, Var, consumers, producer
from anesurgery.semantics.reading import flag, ints


def is_maximum_of(op: Operation, axis: int) -> bool:
    """Is it the maximum along an axis that is only taken away before a softmax along it?"""
    along = [a % op.x.rank for a in ints(op, "axes") or ()]
    if op.op_type != "reduce_max" or along != [axis] or not flag(op, "keep_dims"):
        return False
    shifted = consumers(op.outputs[0])
    return bool(shifted) and all(_shifts(s, op) and _only_weighed(s, axis) for s in shifted)


def _shifts(op: Operation, maximum: Operation) -> bool:
    """Does it take the maximum away from what it is the maximum of?"""
    return op.op_type == "sub" and op.x is maximum.x and op.y is maximum.outputs[0]


def _only_weighed(op: Operation, axis: int) -> bool:
    """Do only softmaxes along an axis read it, perhaps in another type?"""
    readers = consumers(op.outputs[0])
    return bool(readers) and all(
        _only_weighed(r, axis)
        if r.op_type == "cast"
        else r.op_type == "softmax" and (ints(r, "axis") or [-1])[0] % r.x.rank == axis
        for r in readers
    )


def shifted_by_maximum(op: Operation) -> bool:
    """Is it a value from which its own maximum is taken away, which softmaxes alone read?"""
    maximum = producer(op.y, "reduce_max") if op.op_type == "sub" else None
    if maximum is None or op.x is not maximum.x:
        return False
    along = [a % maximum.x.rank for a in ints(maximum, "axes") or ()]
    return len(along) == 1 and is_maximum_of(maximum, along[0])


def masked_scores(softmax: Operation) -> Var:
    """The scores of tokens that a softmax weighs: what it reads, without sinks and maxima."""
    end = found = softmax.x
    while (op := producer(end, "cast", "sub", "concat")) is not None:
        if op.op_type == "concat":
            return op.values[0]
        if op.op_type == "sub" and not shifted_by_maximum(op):
            break
        end = op.x
        found = end if op.op_type == "sub" else found
    return found
