"""Look rows of a constant table up by multiplying one-hot rows with the table.

fp16 holds integers exactly only up to 2048. So a larger id is first split, as an integer, into two digits that
fp16 holds, and the one-hot row of the id is the outer product of the one-hot rows of the digits. Each sum has
one non-zero term, so the result is the row of the table, bit for bit (but -0.0 may become 0.0). An id outside
the table gives zeros. A table with more than `max_inner` rows is read in pieces, and the products are added.

Tables longer than `most_rows` stay lookups on the CPU: the recipes for encoders replace only the lookups of
positions and token types.

A table that a tied head reads too is not padded, so that it is stored only once. With `pad_tied=True` it is
padded as `pad_last_axis` will pad the head's table after this pass, and both read one constant. The guard that
lets negative ids count from the end stays, and a gather that does so by itself (before iOS 17) gets one. The
guard is dropped only if ids cannot be negative: by proof, or by your promise `nonnegative_ids=True`, which the
notes repeat.

`mode="input"` takes the lookup out of the model: the rows become an input named `<ids>_embeds`, and the table
is written beside the package as `<package>.<ids>_embeds.npy`, decoded if it was compressed. In the other mode a
compressed table stays compressed.

Refuses when the table is not float, not of rank 2, has more than `most_rows` rows (2048²), or holds infinities
or NaN (zero times these is NaN); when the lookup is not along axis 0 or has batch dimensions; when the ids have
a symbolic shape or not rank 1 to 3; in mode "input", when the ids are computed.

Why it helps: a gather with run-time int32 indices never runs on the ANE, and neither does its guard (measured:
M4, macOS 27; other chips by other sources); equal, cast, mul and matmul do. The inner axis of a matmul is
limited to 16384 (reported: M1 to M3) or 32768 (measured: M4). The product costs rows x width multiplications
for each id, 20 G for 512 ids of GPT-2; whether that is faster than a lookup on the CPU was not measured.

Grade: checked: it rests on the range of the ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb
from anesurgery.facts import whole_numbers
from anesurgery.mil import is_compressed
from anesurgery.regions import one_hot as one_hot_regions
from anesurgery.regions import padding
from anesurgery.regions.small_builds import cut


@dataclass(frozen=True)
class EmbeddingMatmul(Rewrite):
    """A gather from a constant table by run-time ids becomes one-hot rows times the table: exact."""

    name = "embedding_matmul"
    kinds = frozenset({"gather"})
    # both pad the token table, so that a tied head keeps sharing it
    precedes = ("pad_last_axis",)
    mode: str = an.option("matmul", among=("matmul", "input"))
    """Either "matmul", or "input": the caller looks the rows up."""
    max_inner: int = an.option(16384, least=an.fp16.LAST_INTEGER)
    """Most rows that one matmul reads; at least 2048."""
    most_rows: int = an.option(an.fp16.LAST_INTEGER**2, least=1, most=an.fp16.LAST_INTEGER**2)
    """Longest table that is replaced."""
    nonnegative_ids: bool = False
    """Whether the caller promises that no id is negative."""
    pad_tied: bool = False
    """Pad also a table that a head reads; right when `pad_last_axis` runs afterwards, which pads the head's."""

    def check(self, m: Match) -> Match | Refusal:
        """Match a finite float table of rank 2, read along axis 0 by run-time ids.

        Binds `ids`, the integers that are looked up (a value of shape (batch, tokens), for example), and
        `wraps`, whether negative ones must still be made to count from the end.
        """
        made_by = m.x.op.op_type if m.x.op is not None else "an input"
        if m.indices.val is not None or not (made_by == "const" or "constexpr" in made_by):
            return an.NO_MATCH
        if (unfit := _unfit(m, self.most_rows)) is not None:
            return unfit
        ids, wraps = self.ids(m, m.x.shape[0])
        if self.mode == "input":
            entries = m.block.inputs if isinstance(m.block, an.Function) else {}
            if entries.get(ids.name) is not ids:
                return Refusal(f"the ids %{ids.name} are computed, not an input", m.root)
        elif not one_hot_regions.is_finite(an.decoded(m.x)):
            return Refusal("the table holds infinities or NaN, which poison every sum", m.root)
        return m.bind(ids=ids, wraps=wraps)

    def ids(self, m: Match, rows: int) -> tuple[Var, bool]:
        """Return the ids, as near to their source as is sound, and whether negative ones must be wrapped."""
        trusted = self.nonnegative_ids or self.mode == "input"
        counts_back = m.root.opset_version < an.ct.target.iOS17 and not trusted
        ids = whole_numbers.before_casts(m.indices, -rows if counts_back else 0, rows)
        raw = whole_numbers.before_guard(ids, rows)
        if raw is not None and (trusted or whole_numbers.never_negative(raw)):
            return whole_numbers.before_casts(raw, 0, rows), False
        return ids, counts_back and raw is None and not whole_numbers.never_negative(ids)

    def sample(self, m: Match, var: Var, rng: np.random.Generator) -> an.Array | None:
        """Draw ids of the table; in mode "input", give the rows that belong to the ids."""
        rows = int(m.x.shape[0])
        most = min(rows, int(np.iinfo(an.np_dtype(m.ids)).max) + 1)
        if self.mode == "input":
            ids = np.random.default_rng(0).integers(0, most, m.ids.shape)
            values: an.Array = ids if var is m.ids else an.decoded(m.x)[ids]
            return values.astype(an.np_dtype(var))
        if var is not m.ids:
            return None
        return rng.integers(-most if m.wraps else 0, most, var.shape).astype(an.np_dtype(var))

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Multiply one-hot rows, piece by piece, by their parts of the table; or declare an input."""
        if self.mode == "input":
            return _rows_as_input(mb, m)
        rows = int(m.x.shape[0])
        ids = m.ids if an.np_dtype(m.ids) == np.int32 else mb.cast(x=m.ids, dtype="int32")
        if m.wraps:
            inside = mb.greater_equal(x=ids, y=np.int32(0))
            ids = mb.select(cond=inside, a=ids, b=mb.add(x=ids, y=np.int32(rows)))
        if self.nonnegative_ids and not whole_numbers.never_negative(ids):
            mb.note("assumed of the inputs: token ids are never negative")
        table = _table(mb, m.x, one_hot_regions.one_hot_width(rows), self.pad_tied)
        total: Var | None = None
        for start, one_hot in one_hot_regions.one_hot_pieces(mb, ids, rows, an.np_dtype(m.x), self.max_inner):
            product = _product(mb, one_hot, table, start)
            total = product if total is None else mb.add(x=total, y=product)
        assert total is not None
        return total


def _unfit(m: Match, most_rows: int) -> Refusal | None:
    """Return why this lookup is of another kind, or None."""
    table, ids = m.x, m.indices
    axis, batch_dims = an.constant(m.root.axis), an.constant(m.root.inputs.get("batch_dims"))
    reasons = {
        f"the table holds {an.np_dtype(table)}": an.np_dtype(table).kind != "f",
        f"the table has rank {table.rank}, not 2": table.rank != 2,
        f"the lookup is along axis {axis}, not 0": axis not in (0, -table.rank),
        f"the lookup has {batch_dims} batch dimensions": bool(batch_dims),
        f"the ids have the symbolic shape {tuple(ids.shape)}": an.static_shape(ids) is None,
        f"the ids have rank {ids.rank}, not 1 to 3": not 1 <= ids.rank <= 3,
        f"the table has {table.shape[0]} rows, above {most_rows}": table.shape[0] > most_rows,
    }
    return next((Refusal(reason, m.root) for reason, holds in reasons.items() if holds), None)


def _table(mb: Builder, table: Var, rows: int, shared: bool) -> Var:
    """Return the table padded to `rows` rows, unless that would store it twice."""
    others = any(op.op_type != "gather" for op in an.consumers(table))
    return table if others and not shared else padding.padded_constant(mb, table, 0, rows)


def _product(mb: Builder, one_hot: Var, table: Var, start: int) -> Var:
    """Multiply the one-hot columns from `start` on, as far as the table reaches, by the table's rows."""
    stop = min(start + one_hot.shape[-1], table.shape[0])
    one_hot = cut(mb, one_hot, one_hot.rank - 1, 0, stop - start)
    return mb.matmul(x=one_hot, y=cut(mb, table, 0, start, stop - start))


def _rows_as_input(mb: Builder, m: Match) -> Var:
    """Declare the rows as an input, drop the ids where nothing else reads them, leave the table beside."""
    table = an.decoded(m.x)
    if is_compressed(m.x):
        mb.note(f"the table %{m.x.name} is written as {table.dtype}, not compressed: its rows are read")
    dropped = whole_numbers.serves_only(m.ids, m.root)
    return mb.rows_as_input(table, m.ids, m.root.outputs[0], ("embeds", "ids"), dropped)


@an.example((1, 5), dtype="int32", opset="iOS17")
def example(ids: Var) -> Var:
    """A table of 2500 rows, more than fp16 can count."""
    table = np.arange(2500 * 4, dtype=np.float32).reshape(2500, 4)
    return mb.gather(x=table, indices=ids, axis=0, name="y")
