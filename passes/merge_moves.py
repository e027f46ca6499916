"""Replace reshapes and transposes in a row by fewer that move the numbers to the same places.

Before::

    main(%x: 1x4x6) {
      %a: 1x1x2x12 = reshape(x=%x, shape=[1, 1, 2, 12])
      %b: 1x2x1x12 = transpose(x=%a, perm=[0, 2, 1, 3])
      %c: 1x4x2x3 = reshape(x=%b, shape=[1, 4, 2, 3])
      %d: 1x2x4x3 = transpose(x=%c, perm=[0, 2, 1, 3])
      %y: 8x3 = reshape(x=%d, shape=[8, 3])
      return %y
    }

After::

    main(%x: 1x4x6) {
      %y_merge_moves_reshape: 4x2x3 = reshape(x=%x, shape=[4, 2, 3])
      %y_merge_moves_transpose: 2x4x3 = transpose(x=%y_merge_moves_reshape, perm=[1, 0, 2])
      %y: 8x3 = reshape(x=%y_merge_moves_transpose, shape=[8, 3])
      return %y
    }

coremltools writes a transpose of six or more axes, as of windows or patches, as one swap of two axes for each
axis. It does so for axes of length 1 too, and the value may be one long row in between.

Refuses when the transposes would not become fewer. It does not look at values of dynamic shape.

Why it helps: a transpose of the last axis rewrites the whole tensor, which takes tens of microseconds at a few
MB (reported on M1 Max, macOS 13 to 14), and an axis beyond 16384 (M1 to M3) or 65536 (M4 on) keeps a move off
the engine. What the pass gains was not measured.

Grade: bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb
from anesurgery.facts import moves
from anesurgery.regions.small_builds import reshaped


@dataclass(frozen=True)
class MergeMoves(Rewrite):
    """Reshapes and transposes in a row become fewer."""

    name = "merge_moves"
    kinds = an.ops.MOVES

    def check(self, m: Match) -> Match | Refusal:
        """Match the last of several moves if fewer transposes do the same."""
        found = moves.moves_in_a_row(m.root)
        if found is None or (found.transposes < 2 and len(found.turns) == found.transposes):
            return an.NO_MATCH
        if len(found.turns) >= found.transposes:
            words = f"{len(found.turns)} transposes would be needed, and {found.transposes} are there"
            return Refusal(words, m.root)
        return m.bind(ops=found.ops, found=found)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Reshape and transpose the source, and give the result its shape."""
        moved: Var = m.found.source
        for shape, perm in m.found.turns:
            moved = mb.transpose(x=reshaped(mb, moved, shape), perm=list(perm))
        result = m.root.outputs[0]
        if moved is m.found.source and an.is_output(result):
            return mb.reshape(x=moved, shape=list(result.shape))
        return reshaped(mb, moved, result.shape)


@an.example((1, 4, 6))
def example(x: Var) -> Var:
    """Pairs of columns, as coremltools writes a transpose of (1, 1, 4, 2, 3)."""
    a = mb.transpose(x=mb.reshape(x=x, shape=[1, 1, 2, 12], name="a"), perm=[0, 2, 1, 3], name="b")
    c = mb.reshape(x=a, shape=[1, 4, 2, 3], name="c")
    return mb.reshape(x=mb.transpose(x=c, perm=[0, 2, 1, 3], name="d"), shape=[8, 3], name="y")
