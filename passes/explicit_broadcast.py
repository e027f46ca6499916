"""Give all operands of an elementwise op the same rank and, on request, the same shape.

Before::

    main(%x: 2x3x4, %row: 3x4) {
      %s: 2x3x4 = add(x=%x, y=%row)
      %y: 2x3x4 = mul(x=%s, y=[1, 2, 3, 4])
      return %y
    }

After::

    main(%x: 2x3x4, %row: 3x4) {
      %s_explicit_broadcast_expand_dims: 1x3x4 = expand_dims(x=%row, axes=[0])
      %s: 2x3x4 = add(x=%x, y=%s_explicit_broadcast_expand_dims)
      %y: 2x3x4 = mul(x=%s, y=[[[1, 2, 3, 4]]])
      return %y
    }

A constant is reshaped once for all ops that read it at that rank; a run-time value gets an `expand_dims`.
Options make the pass repeat values to the full shape. That costs memory: each of GPT-2's 24 biases of 768
numbers would become 512x768. Constant scalars stay, since even the legacy layers multiply and add scalars. For
ranks above `max_rank`, or with `rank4`, the pass `rerank` does its part of the work.

Refuses when a shape is symbolic, when an operand of `select` is wider than the result, or when the repeated
constant is larger than `materialize_limit`.

Why it helps: the legacy NeuralNetwork layers that broadcast or take any rank were reported off the ANE (iOS 13
to 15; obsolete for ML Programs). In ML Programs every kind of broadcast is legal (measured: M4, macOS 27), so
there a common rank is a normal form and no speed-up; the full shapes are for the legacy form. Rank above 5 does
leave the ANE (measured, all chips).

Grade: bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Program, Refusal, Rewrite, Session, Var, mb
from anesurgery.passes.rerank import Rerank
from anesurgery.regions.small_builds import again


@dataclass(frozen=True)
class ExplicitBroadcast(Rewrite):
    """Elementwise operands get the rank of the result; on request its shape, and rank 4 everywhere."""

    name = "explicit_broadcast"
    kinds = an.ops.BROADCASTING
    # it aligns what they make, too
    follows = ("embedding_matmul", "negate_subtract")
    materialize_limit: int = 0
    """Constants are repeated to the full shape when that has at most so many elements."""
    tile: bool = False
    """Whether values of the run time are repeated to the full shape as well (`tile`)."""
    scalars: bool = False
    """Whether scalars are treated like other operands; they keep rank 0 otherwise."""
    rank4: bool = False
    """Whether float ops of lower rank get rank 4, by `expand_dims` and `squeeze` at the ends of regions."""
    max_rank: int = 5
    """Ops of more axes are brought down to this rank."""

    def run(self, program: Program, session: Session) -> None:
        """Bring ranks down, align the operands, and bring ranks up."""
        Rerank(at_most=self.max_rank).run(program, session)
        super().run(program, session)
        if self.rank4:
            Rerank(at_most=self.max_rank, at_least=4).run(program, session)

    def check(self, m: Match) -> Match | Refusal:
        """Match an op with operands that need another shape; binds `changes`: parameter -> that shape."""
        operands = _operands(m.root)
        out, shapes = an.static_shape(m.root.outputs[0]), [an.static_shape(v) for v in operands.values()]
        if out is None or None in shapes:
            return self._symbolic(m)
        if np.broadcast_shapes(*(s for s in shapes if s is not None)) != out:
            return Refusal(f"an operand is wider than the result {an.shape_in_words(out)}", m.root)
        wanted = {k: self.shape_for(v, out) for k, v in operands.items()}
        changes = {k: shape for k, shape in wanted.items() if shape != tuple(operands[k].shape)}
        if changes:
            return m.bind(changes=changes)
        return self._above_limit(m, out)

    def shape_for(self, var: Var, out: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that an operand should have."""
        shape = tuple(int(d) for d in var.shape or ())
        if shape == out or (not shape and not self.scalars):
            return shape
        fixed = an.constant(var) is not None
        full = math.prod(out) <= self.materialize_limit if fixed else self.tile
        return out if full else (1,) * (len(out) - len(shape)) + shape

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the op on operands of the right shapes."""
        changed = {k: _in_shape(mb, m.root.inputs[k], shape) for k, shape in m.changes.items()}
        return again(mb, m.root, **changed)

    def _symbolic(self, m: Match) -> Refusal:
        """Refuse a symbolic shape; match nothing if the operands have one rank, so that none is to change."""
        ranks = {len(v.shape or ()) for v in _operands(m.root).values() if v.shape or self.scalars}
        if len(ranks) < 2 and not self.tile:
            return an.NO_MATCH
        shapes = ", ".join(an.shape_in_words(v.shape or ()) for v in _operands(m.root).values())
        return Refusal(f"a shape is symbolic: {shapes}", m.root)

    def _above_limit(self, m: Match, out: tuple[int, ...]) -> Refusal:
        """Refuse a constant that would be too large; match nothing if repeating was not asked for."""
        narrow = [
            v
            for v in _operands(m.root).values()
            if v.shape and tuple(v.shape) != out and an.constant(v) is not None
        ]
        if not narrow or not self.materialize_limit:
            return an.NO_MATCH
        return Refusal(
            f"%{narrow[0].name} as {an.shape_in_words(out)} has {math.prod(out)} elements, above "
            f"materialize_limit={self.materialize_limit}",
            m.root,
        )


def _operands(op: an.Operation) -> dict[str, Var]:
    return {k: op.inputs[k] for k in ("cond", "a", "b", "x", "y") if op.inputs.get(k) is not None}


def _in_shape(mb: Builder, var: Var, shape: tuple[int, ...]) -> Var:
    """Build the operand with leading axes of length 1, repeated where it is still too short."""
    value = an.constant(var)
    if value is not None:
        key = ("explicit_broadcast", var, shape)
        return mb.shared(key, lambda: np.broadcast_to(value, shape), f"{var.name}_broadcast")
    new = len(shape) - len(var.shape or ())
    if new:
        var = mb.expand_dims(x=var, axes=list(range(new)))
    repeats = [to // int(now) for to, now in zip(shape, var.shape, strict=True)]
    return var if set(repeats) == {1} else mb.tile(x=var, reps=repeats)


@an.example((2, 3, 4), (3, 4))
def example(x: Var, row: Var) -> Var:
    """A run-time matrix and a constant row meet a tensor of rank 3."""
    s = mb.add(x=x, y=row, name="s")
    return mb.mul(x=s, y=np.arange(1, 5, dtype=np.float32), name="y")
