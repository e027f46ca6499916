"""Let a lookup read its indices directly, without casts to shorter integers and back.

Before::

    main(%ids: 1x4xint32) {
      %short: 1x4xint16 = cast(x=%ids, dtype="int16")
      %y: 1x4x2 = gather(x=const<9x2>, indices=%short)
      return %y
    }

After::

    main(%ids: 1x4xint32) {
      %y: 1x4x2 = gather(x=const<9x2>, indices=%ids)
      return %y
    }

coremltools makes the indices of short tables 16 bits wide: once for the guard of negative ids and once for the
lookup. A cast is removed if its type can hold every valid index: from -length to length - 1, or from 0 if the
lookup reads unsigned integers. Indices outside that range are undefined both before and after, but may give
different results.

Refuses when the axis is longer than the type of a cast can count, and when its length is dynamic.

Why it helps: casts of integers stay on the CPU (measured: M4, macOS 27.0.1, through Core ML), up to three
before each lookup of a small vocabulary. What they cost in time was not measured.

Grade: checked: it rests on the range of the ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb
from anesurgery.facts import whole_numbers

INDEX_TYPES = (np.dtype("int32"), np.dtype("uint16"), np.dtype("int16"))
"""What the indices of a gather may be, in every opset that has 16-bit indices."""


@dataclass(frozen=True)
class IndexCasts(Rewrite):
    """Gather at the indices as they were before casts that change none of them."""

    name = "index_casts"
    kinds = frozenset({"gather"})
    follows = ("token_id_guard",)
    precedes = ("select_last_token", "embedding_matmul")  # they look for gathers that read ids directly
    shares_inner = True  # other readers of the casts keep them

    def check(self, m: Match) -> Match | Refusal:
        """Are there casts of integers that keep every index?"""
        cast = an.producer(m.indices, "cast")
        if cast is None or an.np_dtype(cast.x).kind not in "iu":
            return an.NO_MATCH
        length = m.x.shape[int(an.constant(m.root.axis))]
        if an.is_symbolic(length):
            return Refusal(f"the axis that %{m.indices.name} counts has a dynamic length", m.root)
        low = 0 if an.np_dtype(m.indices).kind == "u" else -int(length)
        source = whole_numbers.before_casts(m.indices, low, int(length))
        if source is m.indices:
            span = f"from {low} to {int(length) - 1}"
            return Refusal(f"{an.np_dtype(source)} does not hold the indices {span}", m.root)
        if an.np_dtype(source) not in INDEX_TYPES:
            return Refusal(f"%{source.name} is {an.np_dtype(source)}, which no gather takes as indices", m.root)
        valid = {source: (low, int(length) - 1)}  # the check draws from this range, ends included
        return m.bind(source=source, within=valid)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Look up at the integers as they were."""
        inputs = an.op_inputs(m.root, "indices")
        return mb.gather(**inputs, indices=m.source)


@an.example((1, 4), dtype="int32", opset="iOS17")
def example(ids: Var) -> Var:
    """A table of nine rows, read at ids that were made shorter."""
    table = np.arange(18, dtype=np.float32).reshape(9, 2)
    short = mb.cast(x=ids, dtype="int16", name="short")
    return mb.gather(x=table, indices=short, axis=0, name="y")
