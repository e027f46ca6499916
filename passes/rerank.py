"""Rewrite an op with too many axes, or too few, at a supported rank.

Before::

    main(%x: 2x2x3x4x5x6) {
      %y: 2x2x3x4x5x6 = relu(x=%x)
      %z: 2x2x3x4x1x6 = reduce_max(x=%y, axes=[4], keep_dims=True)
      return %z
    }

After::

    main(%x: 2x2x3x4x5x6) {
      %y_rerank_reshape: 4x3x4x5x6 = reshape(x=%x, shape=[4, 3, 4, 5, 6])
      %y_rerank_relu: 4x3x4x5x6 = relu(x=%y_rerank_reshape)
      %z_rerank_reduce_max: 4x3x4x1x6 = reduce_max(x=%y_rerank_relu, axes=[3], keep_dims=True)
      %z: 2x2x3x4x1x6 = reshape(x=%z_rerank_reduce_max, shape=[2, 2, 3, 4, 1, 6])
      return %z
    }

Above `at_most` axes, neighbouring axes that stay together are merged: those that are broadcast alike, reduced
alike, or stay neighbours in a transpose. A transpose in which no two axes stay neighbours becomes several
transposes, without axes of length 1. Below `at_least` axes, axes of length 1 are added in front, for float ops
only: integers of few axes are indices and shapes. Reshapes of reshapes are skipped, so that the changes of rank
stand at the edge of a region and not around each op.

Refuses when a shape is symbolic, when no merge that the op allows brings the rank down, or when a slice starts
or ends at a run-time position. An op of an unknown kind with too many axes is reported.

Why it helps: a model with more than five axes cannot be converted (coremltools refuses to write it; as a pass
of the conversion this one makes such models convertible), or runs on the CPU (measured, all chips). The rank-4
forms are those of the legacy NeuralNetwork layers, whose ND kinds were reported off the ANE on iOS 13 to 15; ML
Programs do not need them (measured: M4, macOS 27), so `at_least` is 0.

Grade: bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Program, Refusal, Rewrite, Session, Var, mb
from anesurgery.mil import walk_ops
from anesurgery.regions import views


@dataclass(frozen=True)
class Rerank(Rewrite):
    """Ops of more than `at_most` or fewer than `at_least` axes get that many.

    Sums keep their terms; a kernel may add them in another order when their axes are merged.
    """

    name = "rerank"
    kinds = frozenset({*views.FRAMES, *an.ops.VIEWS})
    tolerance = an.REASSOCIATED
    at_most: int = 5
    """Largest rank; axes are merged above it."""
    at_least: int = 0
    """Smallest rank of float ops; axes of length 1 are put in front below it."""

    def check(self, m: Match) -> Match | Refusal:
        """Is the rank wrong, and is there a view of the right rank?"""
        op = m.root
        if op.op_type in an.ops.VIEWS:
            return self.check_view(m)
        tensors = views.tensors(op)
        shapes = [an.shape_in_words(v.shape or ()) for v in tensors]
        rank = max(len(v.shape or ()) for v in tensors)
        high, low = rank > self.at_most, 0 < rank < self.at_least
        if not high and not (low and any(an.np_dtype(v).kind == "f" for v in tensors)):
            return an.NO_MATCH
        if any(an.static_shape(v) is None for v in tensors):
            return Refusal(f"a shape is symbolic: {', '.join(shapes)}", op)
        frame = views.frame(op)
        if not isinstance(frame, views.Frame):
            return Refusal(f"{op.op_type} of rank {rank}: {frame}", op)
        groups = frame.merged(self.at_most) if high else frame.lifted(self.at_least)
        if groups is None and op.op_type != "transpose":
            words = f"{op.op_type} of {' and '.join(shapes)} cannot be brought to rank {self.at_most}"
            return Refusal(f"{words}: no neighbours among its axes travel together", op)
        return m.bind(frame=frame, groups=groups)

    def check_view(self, m: Match) -> Match | Refusal:
        """Match a view of a view that can skip the middle value, whose rank is wrong."""
        source = m.root.x
        while (view := an.producer(source, *an.ops.VIEWS)) is not None and an.static_shape(view.x):
            source = view.x
        middle, first = len(m.root.x.shape or ()), len(source.shape or ())
        skips = middle > self.at_most >= first or middle < self.at_least <= first <= self.at_most
        return m.bind(source=source) if skips and an.static_shape(m.root.outputs[0]) else an.NO_MATCH

    def rewrite(self, mb: Builder, m: Match) -> dict[Var, Var]:
        """Build the op on the view, and view its results in the old shapes."""
        outs = m.root.outputs
        if m.root.op_type in an.ops.VIEWS:
            return {outs[0]: views.seen_as(mb, m.source, outs[0].shape)}
        by_blocks = m.groups is None
        results = (
            [views.transpose_by_blocks(mb, m.root, self.at_most)] if by_blocks else m.frame.build(mb, m.groups)
        )
        return {old: views.seen_as(mb, new, old.shape) for old, new in zip(outs, results, strict=True)}

    def run(self, program: Program, session: Session) -> None:
        """Apply it, then report what still has too many axes."""
        super().run(program, session)
        for op in walk_ops(program):
            if op.op_type not in self.kinds | {"const"} and not op.blocks:
                tensors = [v for v in op.outputs if an.types.is_tensor(v.sym_type)]
                if wide := [v for v in tensors if v.rank > self.at_most]:
                    rank, shape = wide[0].rank, an.shape_in_words(wide[0].shape)
                    session.refuse(self.name, f"{op.op_type} makes rank {rank} ({shape})", op)


@an.example((2, 2, 3, 4, 5, 6))
def example(x: Var) -> Var:
    """An activation and a maximum of rank 6."""
    y = mb.relu(x=x, name="y")
    return mb.reduce_max(x=y, axes=[4], keep_dims=True, name="z")
