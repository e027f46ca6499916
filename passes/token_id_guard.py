"""The guard that lets negative indices count from the end goes where ids are never negative.

Before::

    main(%x: 1x4xint32) {
      %ids: 1x4xint32 = abs(x=%x)
      %inside: 1x4xbool = greater_equal(x=%ids, y=0)
      %wrapped: 1x4xint32 = add(x=%ids, y=9)
      %guarded: 1x4xint32 = select(cond=%inside, a=%ids, b=%wrapped)
      %y: 1x4x9xint32 = one_hot(indices=%guarded, one_hot_vector_size=9)
      return %y
    }

After::

    main(%x: 1x4xint32) {
      %ids: 1x4xint32 = abs(x=%x)
      %y: 1x4x9xint32 = one_hot(indices=%ids, one_hot_vector_size=9)
      return %y
    }

Ids that the program computes are never negative where that follows from the ops (an argmax, a clip at 0). Of
inputs the caller must say so: `assume={"input_ids": (0, 50256)}`, or `--assume input_ids=0:50256`. The notes of
the surgery repeat the assumption: ids outside of it then give other results, or none.

Refuses when nothing shows that the ids are not negative, and when a range that is assumed begins below 0.

Why it helps: integer arithmetic stays on the CPU (measured: M4, macOS 27.0.1), and coremltools writes the three
ops before each lookup of a table. What they cost in time was not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from anesurgery.errors import PassError, Refusal
from anesurgery.facts.token_ids import never_negative
from anesurgery.mil import (
    Array,
    Program,
    Var,
    constant,
    is_constant,
    mb,
    np_dtype,
    producer,
    static_shape,
    types,
)
from anesurgery.ops import MOVING
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.pattern import Match, OpPattern, Ops, var
from anesurgery.rewriting.pattern import op as op_pattern
from anesurgery.rewriting.rewrite import Rewrite
from anesurgery.rewriting.session import Session

Range = tuple[int, int]


@dataclass(frozen=True)
class TokenIdGuard(Rewrite):
    """`select(ids >= 0, ids, ids + rows)` becomes the ids."""

    name: ClassVar[str] = "token_id_guard"
    shares_inner: ClassVar[bool] = True
    assume: Mapping[str, Range] | None = None
    """Input -> the least and the largest value that the caller will give; those of the surgery by default."""

    def __post_init__(self) -> None:
        for name, given in (self.assume or {}).items():
            low, high = given
            if low > high:
                raise PassError(f"{self.name}: the range of {name} ends at {high}, before it begins at {low}")

    def pattern(self, op: Ops) -> OpPattern:
        """A guard: the condition and both sides come from the same ids."""
        test = op_pattern.greater_equal(x=var("ids"), y=var("zero"))
        return op.select(cond=test, a=var("kept"), b=op.add(x=var("added_to"), y=var("rows"), commutes=True))

    def check(self, m: Match) -> Match | Refusal | None:
        """Are the ids known to be 0 or more?"""
        rows = constant(m.rows)
        if np_dtype(m.kept).kind not in "iu" or not is_constant(m.zero, 0) or rows is None or np.ndim(rows):
            return None
        source = _source(m.ids)
        if any(_source(v) is not source for v in (m.kept, m.added_to)):
            return None
        known = (self.assume or {}).get(source.name) if source.op is None else None
        if known is not None and known[0] < 0:
            return Refusal(f"%{source.name} is assumed to be as low as {known[0]}", m.root)
        if known is not None or never_negative(m.ids):
            return m.bind(source=source)
        which = (
            f"the input %{source.name} may be negative"
            if source.op is None
            else f"%{m.ids.name} may be negative"
        )
        return Refusal(f'{which}; say assume={{"{source.name}": (0, {int(rows) - 1})}} if it never is', m.root)

    def sample(self, m: Match, var: Var, rng: np.random.Generator) -> Array | None:
        """Ids of the range that is assumed; others that are not negative."""
        if np_dtype(var).kind not in "iu":
            return None
        low, high = (self.assume or {}).get(m.source.name, (0, int(constant(m.rows)) - 1))
        return rng.integers(low, high + 1, static_shape(var) or ()).astype(np_dtype(var))

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """The ids themselves."""
        kept: Var = m.kept
        return kept

    def run(self, program: Program, session: Session) -> None:
        """Apply it with what the surgery assumes."""
        assume = {**session.assume, **(self.assume or {})}
        known = {name for function in program.functions.values() for name in function.inputs}
        if strangers := sorted(set(assume) - known):
            raise PassError(
                f"{self.name}: the model has no input {strangers[0]!r}; it has {', '.join(sorted(known))}"
            )
        edits = len(session.changes)
        Rewrite.run(replace(self, assume=assume), program, session)
        if len(session.changes) > edits:
            said = [f"{name} in [{low}, {high}]" for name, (low, high) in assume.items()]
            session.notes += [f"assumed of the inputs: {', '.join(said)}"] if said else []


def _source(ids: Var) -> Var:
    """Where ids come from, before casts to integers and moves."""
    while (op := producer(ids, "cast", *MOVING)) is not None and np_dtype(op.x).kind in "iu":
        ids = op.x
    return ids


def example() -> Program:
    """Guarded ids that cannot be negative, and what reads them."""

    @mb.program(input_specs=[mb.TensorSpec((1, 4), dtype=types.int32)])
    def program(x: Var) -> Var:
        ids = mb.abs(x=x, name="ids")
        inside = mb.greater_equal(x=ids, y=np.int32(0), name="inside")
        wrapped = mb.add(x=ids, y=np.int32(9), name="wrapped")
        guarded = mb.select(cond=inside, a=ids, b=wrapped, name="guarded")
        return mb.one_hot(indices=guarded, one_hot_vector_size=9, name="y")

    return program
