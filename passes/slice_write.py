"""A row that is blended in by a mask of its place is written as a slice: the reverse of `masked_write`.

A mask takes any place and writes nothing outside; a slice must lie inside. So the place must be known to: by
what it is made of, or by `assume={"at": (0, 7)}`, which the notes repeat.

Refuses when the place may lie outside, when the mask does not compare it with 0, 1, ... along one axis, and
when what is written is not one row.

Why it helps: a state that is read, updated by `slice_update` and written back stays on the ANE (reported: M4,
macOS 27.0, and macOS 15, by 4rg0naut/silicon-ledger-public), and only the row is written. What it gains in time
was not measured.

Grade: checked: it rests on the place lying inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, OpPattern, Ops, Refusal, Rewrite, Var, mb, var


@dataclass(frozen=True)
class SliceWrite(Rewrite):
    """A selection of one row as `slice_update`."""

    name = "slice_write"
    shares_inner = True
    assume: Mapping[str, tuple[int, int]] | None = None
    """Input -> the least and the largest value that the caller will give; those of the surgery by default."""

    def pattern(self, op: Ops) -> OpPattern:
        """A row where its number is the place."""
        here = op.equal(x=var("rows"), y=var("at"))
        return op.select(cond=here, a=var("update"), b=var("x"))

    def check(self, m: Match) -> Match | Refusal:
        """One row, at a place that lies inside."""
        if an.constant(m.rows) is None:
            m = m.bind(rows=m.at, at=m.rows)
        rows, shape = an.constant(m.rows), an.static_shape(m.x)
        if rows is None or np.asarray(rows).dtype.kind not in "iu" or an.np_dtype(m.at).kind not in "iu":
            return an.NO_MATCH
        if shape is None or int(np.prod(an.static_shape(m.at) or (1,))) != 1 or any(d < 1 for d in m.at.shape):
            return Refusal(f"%{m.at.name} is not one number, or a shape is dynamic", m.root)
        axis = next((a for a, d in enumerate(shape) if _counts(np.asarray(rows), a, shape)), None)
        if axis is None:
            return Refusal(f"%{m.rows.name} does not count the rows of one axis", m.root)
        wanted = tuple(1 if a == axis else d for a, d in enumerate(shape))
        if an.static_shape(m.update) != wanted:
            return Refusal(f"%{m.update.name} has the shape {m.update.shape}, not that of one row", m.root)
        low, high = an.interval(m.at)[:2]
        if m.at.op is None:
            low, high = (self.assume or {}).get(m.at.name, (low, high))
        if not 0 <= low <= high < shape[axis]:
            last = shape[axis] - 1
            return Refusal(
                f"%{m.at.name} may lie outside of 0 to {last}; assume={{...: (0, {last})}} says not", m.root
            )
        return m.bind(axis=axis, sizes=wanted, within={m.at: (0, int(high))})

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """The slice at the place."""
        name, rank = m.root.name, m.x.rank
        at = m.at if m.at.rank == 1 else mb.reshape(x=m.at, shape=[1])
        begin = an.caches.place(mb, [0] * m.axis, at, [0] * (rank - 1 - m.axis), name=f"{name}_begin")
        end = mb.add(x=begin, y=np.array(m.sizes, np.int32), name=f"{name}_end")
        return mb.slice_update(x=m.x, update=m.update, begin=begin, end=end)


def _counts(rows: an.Array, axis: int, shape: tuple[int, ...]) -> bool:
    """Is it 0, 1, ... along one axis, and broadcast along the others?"""
    counted = np.expand_dims(np.arange(shape[axis]), [a for a in range(len(shape)) if a != axis])
    return np.array_equal(rows.reshape((1,) * (len(shape) - rows.ndim) + rows.shape), counted)


@an.example(*an.cache_inputs, opset="iOS18")
def example(n: Var, at: Var, cache: Var) -> Var:
    """A cache of four numbers for each of eight tokens."""
    h = mb.read_state(input=cache, name="h")
    row = mb.minimum(x=mb.maximum(x=at, y=np.int32(0), name="low"), y=np.int32(7), name="row")
    here = mb.equal(x=np.arange(8, dtype=np.int32)[:, None], y=row, name="here")
    a = mb.coreml_update_state(state=cache, value=mb.select(cond=here, a=n, b=h, name="u"), name="a")
    return mb.reduce_sum(x=a, axes=[0], keep_dims=True, name="sum")
