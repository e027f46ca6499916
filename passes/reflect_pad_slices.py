"""A pad that mirrors or repeats edges becomes slices of the edges and a concatenation.

Before::

    main(%x: 1x1x4) {
      %y: 1x1x6 = pad(x=%x, pad=[2, 0], mode="reflect")
      return %y
    }

After::

    main(%x: 1x1x4) {
      %y_reflect_pad_slices_slice_by_size: 1x1x2 = slice_by_size(x=%x, begin=[0, 0, 1], size=[-1, -1, 2])
      %y_reflect_pad_slices_reverse: 1x1x2 = reverse(x=%y_reflect_pad_slices_slice_by_size, axes=[2])
      %y: 1x1x6 = concat(values=(%y_reflect_pad_slices_reverse, %x), axis=2)
      return %y
    }

The pass works axis by axis. A mirrored edge is a slice without the outermost element, reversed; a repeated edge
is the outermost element, as often as needed.

Refuses when the amounts are dynamic, when a padded axis is symbolic, and when an edge is repeated more than
`most_repeats` times.

Why it helps: the tables of the compiler mirror edges from M2 on only (M1 and A14 have no such op; reported,
compiler path); slices, reversals and concatenations were placed on the ANE of an M4, macOS 27, through Core ML,
and no table forbids them on M1. The rewrite moves numbers and computes none: proved, bit-exact.

Grade: bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb


@dataclass(frozen=True)
class ReflectPadSlices(Rewrite):
    """`pad(mode="reflect")` and `pad(mode="replicate")` become slices and a concat."""

    name = "reflect_pad_slices"
    kinds = frozenset({"pad"})
    most_repeats: int = 16
    """How often an edge may be repeated on one side."""

    def check(self, m: Match) -> Match | Refusal:
        """Match constant amounts along axes of known length."""
        mode, stated = an.constant(m.root.inputs.get("mode")), an.constant(m.pad)
        if mode in (None, "constant"):
            return an.NO_MATCH
        if stated is None:
            return Refusal(f"the amounts %{m.pad.name} are dynamic", m.root)
        amounts = [int(n) for n in stated]
        first = m.x.rank - len(amounts) // 2
        edges = {first + i: (amounts[2 * i], amounts[2 * i + 1]) for i in range(len(amounts) // 2)}
        edges = {axis: sides for axis, sides in edges.items() if any(sides)}
        for axis, sides in edges.items():
            if an.is_symbolic(m.x.shape[axis]):
                return Refusal(
                    f"%{m.x.name} has the symbolic length {m.x.shape[axis]} along axis {axis}", m.root
                )
            if mode == "replicate" and max(sides) > self.most_repeats:
                return Refusal(f"an edge is repeated {max(sides)} times, above {self.most_repeats}", m.root)
        return m.bind(edges=edges, mirrored=mode == "reflect") if edges else an.NO_MATCH

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build one concatenation for each padded axis."""
        padded: Var = m.x
        for axis, (before, after) in m.edges.items():
            length = int(padded.shape[axis])
            if m.mirrored:
                left = [_mirrored(mb, padded, axis, 1, before + 1)] if before else []
                right = [_mirrored(mb, padded, axis, length - after - 1, length - 1)] if after else []
            else:
                left = [_cut(mb, padded, axis, 0, 1)] * before if before else []
                right = [_cut(mb, padded, axis, length - 1, length)] * after if after else []
            padded = mb.concat(values=(*left, padded, *right), axis=axis)
        return padded


def _cut(mb: Builder, x: Var, axis: int, start: int, stop: int) -> Var:
    begin, size = [0] * x.rank, [-1] * x.rank
    begin[axis], size[axis] = start, stop - start
    return mb.slice_by_size(x=x, begin=begin, size=size)


def _mirrored(mb: Builder, x: Var, axis: int, start: int, stop: int) -> Var:
    edge = _cut(mb, x, axis, start, stop)
    return mb.reverse(x=edge, axes=[axis]) if stop - start > 1 else edge


@an.example((1, 1, 4))
def example(x: Var) -> Var:
    """Two elements mirrored on the left."""
    return mb.pad(x=x, pad=[2, 0], mode="reflect", name="y")
