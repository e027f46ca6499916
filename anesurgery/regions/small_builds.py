"""The few ops that many rewrites build: an op again, a part of an axis, parts side by side, another shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anesurgery.facts.dependence import Tail
from anesurgery.mil import Maker, Operation, Var, any_symbolic, op_inputs
from anesurgery.semantics.reading import each_axis
from anesurgery.semantics.rows import squeezed, staying


def again(mb: Maker, op: Operation, **changed: Any) -> Var:
    """The same op with some inputs changed; `name=` is the wish for its name. An op of one result."""
    return getattr(mb, op.op_type)(**{**op_inputs(op), **changed})


def cut(mb: Maker, x: Var, axis: int, start: int, length: int, stride: int = 1, **named: str) -> Var:
    """What an axis holds from `start` on, `length` far, each `stride`-th; `x` itself where that is all."""
    if length == x.shape[axis] and stride == 1:
        return x
    begin, end = [0] * x.rank, [int(d) for d in x.shape]
    begin[axis], end[axis] = start, start + length
    steps = {} if stride == 1 else {"stride": [stride if a == axis else 1 for a in range(x.rank)]}
    return mb.slice_by_index(x=x, begin=begin, end=end, **steps, **named)


def parted(mb: Maker, x: Var, axis: int, sizes: Sequence[int] | int, **named: str) -> list[Var]:
    """Parts of an axis of these lengths, or so many equal ones; `x` itself where it is one."""
    if (sizes if isinstance(sizes, int) else len(sizes)) == 1:
        return [x]
    form = {"num_splits": sizes} if isinstance(sizes, int) else {"split_sizes": list(sizes)}
    parts: Any = mb.split(x=x, **form, axis=axis, **named)
    return list(parts)


def joined(mb: Maker, parts: Sequence[Var], axis: int, **named: str) -> Var:
    """Values side by side; a single one as it is."""
    return parts[0] if len(parts) == 1 else mb.concat(values=tuple(parts), axis=axis, **named)


def reshaped(mb: Maker, x: Var, shape: Sequence[int], **named: str) -> Var:
    """The same elements in another shape; `x` itself where that is its own."""
    return x if tuple(x.shape) == tuple(shape) else mb.reshape(x=x, shape=list(shape), **named)


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
