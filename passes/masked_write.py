"""A slice that is written at a dynamic place is blended in with a mask.

Before::

    main(%n: 1x4xfp16, %at: 1xint32, %cache: state<8x4xfp16>) {
      %b: 2xint32 = concat(values=(%at, [0]), axis=0)
      %e: 2xint32 = add(x=%b, y=[1, 4])
      %h: 8x4xfp16 = read_state(input=%cache)
      %u: 8x4xfp16 = slice_update(x=%h, update=%n, begin=%b, end=%e)
      %a: 8x4xfp16 = coreml_update_state(state=%cache, value=%u)
      %sum: 1x4xfp16 = reduce_sum(x=%a, axes=[0], keep_dims=True)
      return %sum
    }

After::

    main(%n: 1x4xfp16, %at: 1xint32, %cache: state<8x4xfp16>) {
      %b: 2xint32 = concat(values=(%at, [0]), axis=0)
      %h: 8x4xfp16 = read_state(input=%cache)
      %u_at: 1xint32 = slice_by_size(x=%b, begin=[0], size=[1])
      %u_here: 8x1xbool = equal(x=[[0], [1], [2], [3], [4], [5], [6], [7]], y=%u_at)
      %u: 8x4xfp16 = select(cond=%u_here, a=%n, b=%h)
      %a: 8x4xfp16 = coreml_update_state(state=%cache, value=%u)
      %sum: 1x4xfp16 = reduce_sum(x=%a, axes=[0], keep_dims=True)
      return %sum
    }

Several rows that are written at once are brought to their places by a product with one-hot rows first, which
is exact: each sum has one non-zero term. What is constant of the place, as the layer in a shared cache, becomes
part of the mask. `slice_write` is the reverse.

Refuses when more than one axis or none has a dynamic place, when the place or the size cannot be read, when
several rows are written along another axis than the last but one, and when several rows are integers.

Why it helps: the ANE takes a slice_update as the write of a state only (reported: M4, macOS 27.0, and macOS 15,
by 4rg0naut/silicon-ledger-public); a selection is legal anywhere. What it gains in time was not measured.

Grade: checked: it rests on the place lying inside.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, OpPattern, Ops, Refusal, Rewrite, Var, var


@dataclass(frozen=True)
class MaskedWrite(Rewrite):
    """`slice_update` at a dynamic place as a selection."""

    name = "masked_write"
    follows = ("add_cache",)
    shares_inner = True
    tolerates_nonfinite = False
    """Rows that are brought to their places are multiplied by 0 elsewhere."""

    def pattern(self, op: Ops) -> OpPattern:
        """A slice whose end is its begin and a constant."""
        end = op.add(x=var("begin"), y=var("size"), commutes=True)
        return op.slice_update(x=var("x"), update=var("update"), begin=var("begin"), end=end)

    def check(self, m: Match) -> Match | Refusal:
        """One dynamic axis, and floats where rows must be moved."""
        part = an.places.dynamic_slice(m.root)
        if isinstance(part, Refusal):
            return part
        if part.size > 1 and part.axis != m.x.rank - 2:
            return Refusal(f"{part.size} rows are written along axis {part.axis}", m.root)
        if part.size > 1 and an.np_dtype(m.x).kind != "f":
            return Refusal(f"%{m.x.name} holds {an.np_dtype(m.x)}", m.root)
        return m.bind(part=part)

    def sample(self, m: Match, var: Var, rng: np.random.Generator) -> an.Array | None:
        """Places that exist."""
        if var is not m.begin:
            return None
        part: an.places.DynamicSlice = m.part
        first = list(part.starts)
        first[part.axis] = int(rng.integers(0, part.length - part.size + 1))
        return np.array(first, np.int32)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """The new rows, as wide as all, where they belong; else the old ones."""
        part: an.places.DynamicSlice = m.part
        name = m.root.name
        at = mb.slice_by_size(x=m.begin, begin=[part.axis], size=[1], name=f"{name}_at")
        along = [-1 if a == part.axis else 1 for a in range(m.x.rank)]
        places = np.arange(part.length, dtype=np.int32).reshape(along)
        update: Var = m.update
        if part.size > 1:
            each = np.arange(part.length)[:, None] - np.arange(part.size)
            each = each.astype(np.int32).reshape([1] * (m.x.rank - 2) + list(each.shape))
            picked = mb.cast(x=mb.equal(x=each, y=at), dtype=an.dtype_name(m.x), name=f"{name}_rows")
            update = mb.matmul(x=picked, y=update, name=f"{name}_placed")
            last = mb.add(x=at, y=np.array([part.size], np.int32))
            here = mb.logical_and(x=mb.greater_equal(x=places, y=at), y=mb.less(x=places, y=last))
        else:
            here = mb.equal(x=places, y=at, name=f"{name}_here")
        if part.around:
            update = mb.pad(x=update, pad=list(part.around), constant_val=an.np_dtype(m.x).type(0))
            here = mb.logical_and(x=here, y=part.inside, name=f"{name}_inside")
        return mb.select(cond=here, a=update, b=m.x)


example = an.cache_example
