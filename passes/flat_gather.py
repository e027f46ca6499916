"""Turn a `gather_nd` at run-time indices into a gather along one axis.

The gathered axes are merged into one. The new index is computed in int32: the sum of the coordinates, each
times the number of elements in the axes after it. Negative coordinates count from the end before iOS 17. A
coordinate outside its axis, for which the op defines nothing, is moved to the nearest one inside.

Refuses when a shape is symbolic and for a single index. The pass does not apply to integers or constant
indices.

Why it helps: with run-time indices `gather_nd` gave zeros on the engine, and was correct on the CPU and the GPU
(reported, iPhone 17 Pro: john-rocky/CoreML-LLM). The engine refuses a gather with run-time indices (measured
through Core ML on M4, macOS 27), so it runs where it is right; `one_hot_lookup` makes a product of it where
that is small. What the rewrite costs in time was not measured.

Grade: checked: it rests on the range of the indices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb
from anesurgery.semantics.intervals import interval


@dataclass(frozen=True)
class FlatGather(Rewrite):
    """`gather_nd(x, k)` becomes `gather(reshape(x), sum(k * steps))`."""

    name = "flat_gather"
    kinds = frozenset({"gather_nd"})

    def check(self, m: Match) -> Match | Refusal:
        """Match run-time indices of static shape."""
        op = m.root
        if an.constant(op.indices) is not None or an.np_dtype(op.x).kind != "f":
            return an.NO_MATCH
        for var in (op.x, op.indices):
            if an.static_shape(var) is None:
                return Refusal(f"%{var.name} has the symbolic shape {tuple(var.shape)}", op)
        if op.indices.rank < 2:
            return Refusal("it gathers at one place alone", op)
        return m

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Count the places, and gather along the first axis."""
        op, shape = m.root, [int(d) for d in m.root.x.shape]
        batch = int(an.number(op.inputs.get("batch_dims")) or 0)
        last = batch + int(op.indices.shape[-1])
        steps = [math.prod(shape[axis + 1 : last]) for axis in range(last)]
        places = an.producer(op.indices, "cast")
        source = op.indices if places is None or an.np_dtype(places.x) != np.int32 else places.x
        index = source if an.np_dtype(source) == np.int32 else mb.cast(x=source, dtype="int32")
        lengths = np.array(shape[batch:last], np.int32)
        low, high = interval(index)
        if _wraps(op) and low < 0:
            index = mb.select(cond=mb.less(x=index, y=np.int32(0)), a=mb.add(x=index, y=lengths), b=index)
        if low < 0 or high >= min(lengths):
            index = mb.minimum(x=mb.maximum(x=index, y=np.int32(0)), y=lengths - np.int32(1))
        parts = mb.mul(x=index, y=np.array(steps[batch:], np.int32))
        at = mb.reduce_sum(x=parts, axes=[-1], keep_dims=False)
        if batch:
            at = mb.add(x=at, y=_of_batch(shape[:batch], steps, at.rank))
        rows = mb.reshape(x=op.x, shape=[math.prod(shape[:last]), *shape[last:]])
        return mb.gather(x=rows, indices=at, axis=0)


def _wraps(op: an.Operation) -> bool:
    """Do negative places count from the end, as before iOS 17, where nothing is said of validity?"""
    return op.inputs.get("validate_indices") is None


def _of_batch(lengths: list[int], steps: list[int], rank: int) -> an.Array:
    """Return where each row of a batch begins."""
    first = np.zeros([1] * rank, np.int32)
    for axis, length in enumerate(lengths):
        aligned = [length if a == axis else 1 for a in range(rank)]
        first = first + np.arange(length, dtype=np.int32).reshape(aligned) * np.int32(steps[axis])
    return first


@an.example((3, 4, 2), mb.TensorSpec((5, 2), dtype=an.types.int32))
def example(x: Var, k: Var) -> Any:
    """Five rows of a grid."""
    return mb.gather_nd(x=x, indices=k, name="y")
