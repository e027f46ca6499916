"""The few ops that many rewrites build: an op again, a part of an axis, parts side by side, another shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anesurgery.mil import Maker, Operation, Var, op_inputs


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
