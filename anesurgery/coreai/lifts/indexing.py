"""Lift ops that read or write parts of a tensor: slices, sorts, gathers, scatters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from anesurgery.coreai.lifts import (
    INT32,
    TABLE,
    LiftedOp,
    Unliftable,
    Value,
    as_var,
    cast,
    lift,
    made_by,
    static_sizes,
)
from anesurgery.mil import MOST_AXES, Var, consumers, is_symbolic, mb, producer
from anesurgery.ops import VIEWS, names


def _bounds(o: LiftedOp) -> dict[str, Any]:
    """Return the begins, ends and strides of a slice, as `slice_by_index` takes them.

    In Core AI a negative position counts from the end, and is then clipped; MIL has no end before the first
    element.
    """
    if not (o.known(1) and o.known(2)):
        return {"begin": o[1], "end": o[2], "stride": o.ints(3)}
    rows = []
    for n, low, high, step in zip(o[0].shape, o.ints(1), o.ints(2), o.ints(3), strict=True):
        if is_symbolic(n):
            rows.append((low, high, low == 0 and step > 0, high == INT32.max))
            continue
        low, high = (place + n if place < 0 else place for place in (low, high))
        least, most = (0, n) if step > 0 else (-1, n - 1)
        low, high = min(max(low, 0), most), min(max(high, least), most)
        rows.append((low, max(high, 0), False, high < 0))
    begin, end, begin_mask, end_mask = map(list, zip(*rows, strict=True))
    return {"begin": begin, "end": end, "stride": o.ints(3), "begin_mask": begin_mask, "end_mask": end_mask}


@lift("argsort", "sort")
def sort(o: LiftedOp) -> Value:
    """Build the sorted elements of an axis, or their order: both are results of one topk."""
    x, axis, ascending, which = as_var(o[0]), o.axes(1)[0], not o.integer(2), int(o.op["kind"] == "argsort")
    return _topk(x, axis, static_sizes(x)[axis], ascending)[which]


def _topk(x: Var, axis: int, k: int, ascending: bool) -> Sequence[Var]:
    """Return (sorted elements, their positions); an equal topk is used again."""
    wanted = (axis, k, ascending)
    for op in consumers(x):
        if op.op_type == "topk" and (op.axis.val, op.k.val, op.ascending.val) == wanted:
            return op.outputs
    return mb.topk(x=x, axis=axis, k=k, ascending=ascending)


def _sliced_topk(o: LiftedOp, bounds: Mapping[str, Any]) -> Var | None:
    """Return a smaller topk, where a slice takes the first elements of a sorted axis."""
    given = o[0]
    op = made_by(given, "topk")
    if op is None or "end_mask" not in bounds or any(bounds["begin"]) or set(bounds["stride"]) != {1}:
        return None
    axis, ends = int(op.axis.val), list(bounds["end"])
    count, ends[axis] = ends[axis], given.shape[axis]
    if ends != list(given.shape):
        return None
    return _topk(op.x, axis, count, bool(op.ascending.val))[op.outputs.index(as_var(given))]


@lift("slice")
def slice_(o: LiftedOp) -> Value:
    """Build a slice."""
    bounds = _bounds(o)
    if (first := _sliced_topk(o, bounds)) is not None:
        return first
    whole = o.shape == list(o[0].shape) and set(bounds["stride"]) == {1}
    return o[0] if whole else mb.slice_by_index(x=o[0], **bounds)


TABLE["slice_update"] = lambda o: mb.slice_update(x=as_var(o[0]), update=as_var(o[4]), **_bounds(o))


def _without_index_axis(indices: Value) -> Value:
    """Return indices without their last axis, of size 1."""
    if isinstance(indices, np.ndarray):
        return indices[..., 0]
    op, last = made_by(indices, "expand_dims"), indices.rank - 1
    return op.x if op is not None and list(op.axes.val) == [last] else mb.squeeze(x=indices, axes=[last])


NEVER_NEGATIVE = names("reduce_argmax reduce_argmin argsort topk shape non_zero")
"""Ops whose integers are positions or sizes."""
PASSED_ON = VIEWS | names("cast gather slice_by_index slice_by_size concat")
"""Ops whose result is not negative if their first operand is not."""


def _from_front(indices: Value, sizes: Sequence[int]) -> Value:
    """Return indices that count from the first element: from iOS 17 on MIL does not define negative ones.

    Inputs of the model, such as token ids, are taken as they are; they must not be negative.
    """
    ahead = np.array(sizes if len(sizes) > 1 else sizes[0], np.int32)
    if isinstance(indices, np.ndarray):
        return np.where(indices < 0, indices + ahead, indices)
    source: Var | None = indices
    while source is not None and (op := producer(source, *PASSED_ON)) is not None:
        source = op.values[0] if op.op_type == "concat" else op.inputs.get("x")
    if source is None or source.op is None or producer(source, *NEVER_NEGATIVE) is not None:
        return indices
    negative = mb.less(x=indices, y=np.int32(0))
    return mb.select(cond=negative, a=mb.add(x=indices, y=ahead), b=indices)


@lift("gather_nd")
def gather_nd(o: LiftedOp) -> Value:
    """Build a gather of rows of a table, or of elements by several indices.

    Windows of `unfold` have six axes; the reshape and transposition behind them are written with fewer.
    """
    sizes = _indexed_sizes(o[0])
    if o[1].shape[-1] == 1:
        return mb.gather(x=o[0], indices=_from_front(_without_index_axis(o[1]), sizes[:1]), axis=0)
    indices = _from_front(o[1], sizes[: o[1].shape[-1]])
    if not isinstance(indices, np.ndarray) or max(indices.ndim, len(o.shape)) <= MOST_AXES:
        return mb.gather_nd(x=o[0], indices=indices)
    rows = mb.gather_nd(x=o[0], indices=indices.reshape(-1, indices.shape[-1]))
    return mb.reshape(x=rows, shape=np.array(o.shape, np.int32))


def _indexed_sizes(x: Value) -> list[int]:
    """Return the sizes of a tensor that is indexed; 0 for dynamic ones, so that indices stay as they are."""
    return [0 if is_symbolic(n) else int(n) for n in x.shape]


@lift("gather_along_axis")
def _gather_along_axis(o: LiftedOp) -> Value:
    axis = o.axes(2)[0]
    indices = _from_front(o[1], [_indexed_sizes(o[0])[axis]])
    return mb.gather_along_axis(x=o[0], indices=indices, axis=axis)


MODES = ("update", "add", "sub", "mul", "div", "max", "min")
"""How a scatter combines a new element with the old one, in both formats."""


@lift("scatter_along_axis")
def _scatter_along_axis(o: LiftedOp) -> Value:
    if (mode := o.attribute("scatter_mode")) not in MODES:
        raise Unliftable(f"it joins elements by {mode!r}, and MIL by one of {', '.join(MODES)}")
    return mb.scatter_along_axis(data=as_var(o[0]), indices=o[1], updates=o[2], axis=o.axes(3)[0], mode=mode)


@lift("scatter_nd")
def scatter_nd(o: LiftedOp) -> Value:
    """Build a scatter by several indices; the op's block says how elements are combined."""
    inner = [op["kind"] for block in o.op["blocks"] for op in block["ops"] if op["kind"] != "yield"]
    words = " ".join(inner) or "update"
    mode = {"maximum": "max", "minimum": "min", "divide": "div"}.get(words, words)
    if mode not in MODES:
        raise Unliftable(f"it joins elements by {words}, and MIL by one of {', '.join(MODES)}")
    return mb.scatter_nd(data=as_var(o[0]), indices=cast(o[1], "int32"), updates=o[2], mode=mode)
