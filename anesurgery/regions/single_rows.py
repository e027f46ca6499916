"""Row-wise ops again, on one position."""

from __future__ import annotations

from typing import Any

from anesurgery.facts.rowwise import Tail
from anesurgery.mil import Maker, Operation, Var, any_symbolic, op_inputs
from anesurgery.semantics.moving_rows import squeezed, staying
from anesurgery.semantics.reading import each_axis


def rebuild(mb: Maker, tail: Tail, row: Var) -> Var:
    """The ops of a tail again, with `row` (one position of its source) in the place of the source."""
    new: dict[Var, Var] = {tail.source: row}

    def swap(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [swap(v) for v in value]
        return new.get(value, value)

    for op, axis in tail.ops:
        inputs = {name: swap(v) for name, v in op_inputs(op).items()}
        if op.op_type == "reshape":
            inputs["shape"] = [1 if a == axis else d for a, d in enumerate(op.outputs[0].shape)]
        if op.op_type == "squeeze":  # not the axis of the rows, which has become one long
            inputs["axes"] = squeezed(op)
        if op.op_type == "slice_by_index":
            inputs |= _all_of(op, axis)
        new[op.outputs[0]] = getattr(mb, op.op_type)(**inputs, name=f"{op.name}_row")
    return new[tail.ops[-1][0].outputs[0]] if tail.ops else row


def _all_of(op: Operation, axis: int) -> dict[str, list[bool]]:
    """Masks that make a slice take all of an axis of its result, whatever its length has become."""
    whole = staying(op)[axis]
    return {
        name: [m or a == whole for a, m in enumerate(each_axis(op, name, False))]
        for name in ("begin_mask", "end_mask")
    }


def last_row(mb: Maker, value: Var, axis: int) -> Var:
    """The last position of an axis, by a slice whose bounds are known before the model runs."""
    shape = list(value.shape)
    here = [a == axis for a in range(len(shape))]
    if any_symbolic(shape):
        begin, others = [-1 if h else 0 for h in here], [not h for h in here]
        ends = {"end": [0] * len(shape), "begin_mask": others, "end_mask": [True] * len(shape)}
    else:
        begin, ends = [shape[axis] - 1 if h else 0 for h in here], {"end": shape}
    return mb.slice_by_index(x=value, begin=begin, name=f"{value.name}_last", **ends)
