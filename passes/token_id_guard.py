"""Remove the guard that lets negative ids count from the end, or write it with one op less.

Before::

    main(%x: 1x4xint32) {
      %ids: 1x4xint32 = maximum(x=%x, y=0)
      %inside: 1x4xbool = greater_equal(x=%ids, y=0)
      %wrapped: 1x4xint32 = add(x=%ids, y=9)
      %guarded: 1x4xint32 = select(cond=%inside, a=%ids, b=%wrapped)
      %y: 1x4x9xint32 = one_hot(indices=%guarded, one_hot_vector_size=9)
      return %y
    }

After::

    main(%x: 1x4xint32) {
      %ids: 1x4xint32 = maximum(x=%x, y=0)
      %y: 1x4x9xint32 = one_hot(indices=%ids, one_hot_vector_size=9)
      return %y
    }

The guard is removed if no id can be negative. For ids that the program computes, this follows from the ops (an
argmax, a clip at 0). For inputs you must promise it: `assume={"input_ids": (0, 50256)}`, or
`--assume input_ids=0:50256`. The notes of the surgery repeat the promise: other ids then give other results, or
none. Without a promise, a guard that only serves lookups of a table with as many rows becomes
`mod(ids + rows, rows)`, which is the same for every valid id, from -rows to rows - 1. With `nonnegative=True`,
the default in the recipes for language models, such a guard is removed, because ids come from a tokenizer. The
notes say so.

Refuses when an id may be negative and anything other than such a lookup reads it, and when a promised range
begins below 0.

Why it helps: integer arithmetic stays on the CPU (measured: M4, macOS 27.0.1), and coremltools writes the three
ops before each lookup of a table. What they cost in time was not measured.

Grade: checked: it rests on the range of the ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, OpPattern, Ops, Refusal, Rewrite, Var, mb, var
from anesurgery.checking.lengths import drawn_shape
from anesurgery.facts import whole_numbers

Range = tuple[int, int]


@dataclass(frozen=True)
class TokenIdGuard(Rewrite):
    """`select(ids >= 0, ids, ids + rows)` becomes the ids, or `mod(ids + rows, rows)`."""

    name = "token_id_guard"
    follows = ("fold_constants",)
    shares_inner = True
    assume: Mapping[str, Range] | None = None
    """Input -> the least and the largest value that the caller will give; those of the surgery by default."""
    nonnegative: bool = False
    """Is an input that serves lookups alone never negative? So are token ids."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, (low, high) in (self.assume or {}).items():
            if low > high:
                raise an.PassError(
                    f"{self.name}: the range of {name} ends at {high}, before it begins at {low}"
                )

    def pattern(self, op: Ops) -> OpPattern:
        """Look for a guard whose condition and both sides come from the same ids."""
        test = op.greater_equal(x=var("ids"), y=var("zero"))
        return op.select(cond=test, a=var("kept"), b=op.add(x=var("added_to"), y=var("rows"), commutes=True))

    def check(self, m: Match) -> Match | Refusal:
        """Are the ids known to be 0 or more?"""
        rows, of_integers = an.constant(m.rows), an.np_dtype(m.kept).kind in "iu"
        if not of_integers or not an.is_constant(m.zero, 0) or rows is None or np.ndim(rows):
            return an.NO_MATCH
        count = int(rows)
        ids = {whole_numbers.before_casts(v, -count, count) for v in (m.ids, m.kept, m.added_to)}
        if len(ids) != 1:
            return an.NO_MATCH
        source = _source(ids.pop())
        promise = (self.assume or {}).get(source.name) if source.op is None else None
        if promise is not None and promise[0] < 0:
            return Refusal(f"%{source.name} is assumed to be as low as {promise[0]}", m.root)
        if promise is not None or whole_numbers.never_negative(m.ids):
            return m.bind(range=promise or (0, count - 1), promised=False)
        if _only_looks_up(m.root.outputs[0], count):
            promised = self.nonnegative and source.op is None
            return m.bind(range=(0 if promised else -count, count - 1), promised=promised)
        hint = f'say assume={{"{source.name}": (0, {count - 1})}} if it never is' if source.op is None else ""
        return Refusal(f"%{source.name} may be negative; {hint}".removesuffix("; "), m.root)

    def sample(self, m: Match, var: Var, rng: np.random.Generator) -> an.Array | None:
        """Draw ids of the range that is known, or those that the table has."""
        if an.np_dtype(var).kind not in "iu":
            return None
        low, high = m.range
        return rng.integers(low, high + 1, drawn_shape(var)).astype(an.np_dtype(var))

    def assumes(self, m: Match) -> Mapping[str, Range]:
        """Return the promised range of the ids."""
        return {_source(m.ids).name: m.range} if m.promised else {}

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Return the ids themselves, or build their remainder."""
        if m.promised:
            mb.note("assumed of the inputs: token ids are never negative")
        low, high = m.range
        ids = whole_numbers.before_casts(m.kept, low, high + 1)
        if an.np_dtype(ids) != an.np_dtype(m.root.outputs[0]):
            ids = m.kept
        if low >= 0:
            return ids
        wrapped = mb.add(x=ids, y=an.constant(m.rows))  # the remainder has the sign of what is divided
        return mb.mod(x=wrapped, y=an.constant(m.rows))


def _source(ids: Var) -> Var:
    """Return the ids before moves and casts, those of float ids included: none changes a sign."""
    while (op := an.producer(ids, "cast", *an.ops.MOVING)) is not None and an.np_dtype(op.x).kind in "iuf":
        ids = op.x
    return ids


def _only_looks_up(ids: Var, rows: int) -> bool:
    """Are the ids read by nothing but lookups of that many rows?"""
    values = [ids]
    for value in values:
        readers = list(an.consumers(value))
        if an.is_output(value) or not readers:
            return False
        for op in readers:
            if op.op_type == "cast" and an.np_dtype(op.outputs[0]).kind in "iu":
                values.append(op.outputs[0])
            elif op.op_type != "gather" or op.x is value or op.x.shape[int(an.constant(op.axis))] != rows:
                return False
    return True


@an.example((1, 4), dtype="int32")
def example(x: Var) -> Var:
    """Guarded ids that cannot be negative, and what reads them."""
    ids = mb.maximum(x=x, y=np.int32(0), name="ids")
    inside = mb.greater_equal(x=ids, y=np.int32(0), name="inside")
    wrapped = mb.add(x=ids, y=np.int32(9), name="wrapped")
    guarded = mb.select(cond=inside, a=ids, b=wrapped, name="guarded")
    return mb.one_hot(indices=guarded, one_hot_vector_size=9, name="y")
