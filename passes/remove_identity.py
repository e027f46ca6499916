"""Remove an op that moves nothing: its readers read its operand.

Before::

    main(%x: 1x4) {
      %r: 1x4 = relu(x=%x)
      %same: 1x4 = identity(x=%r)
      %last: 4 = slice_by_index(x=%same, begin=[-1, 0], end=[0, 4], squeeze_mask=[True, False])
      %y: 4 = tanh(x=%last)
      return %y
    }

After::

    main(%x: 1x4) {
      %r: 1x4 = relu(x=%x)
      %last: 4 = squeeze(x=%r, axes=[0])
      %y: 4 = tanh(x=%last)
      return %y
    }

An identity goes, and so does a slice of everything; if the slice drops axes of length 1, it becomes a squeeze.
PyTorch's `x[:, -1]` is such a slice where the axis has one element. A slice that counts from the end of an axis
of length 1 and cuts another axis counts from 0 instead.

Refuses when the op makes an output of the model, since outputs have names of their own.

Why it helps: patterns of other passes match across the place where the op stood. The index -1 of an axis of
length 1 crashed on the GPU of an iPhone (reported).

Grade: bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Operation, Refusal, Rewrite, Var, mb
from anesurgery.semantics.reading import counts_back_over_one, slice_places, sliced


@dataclass(frozen=True)
class RemoveIdentity(Rewrite):
    """`identity(x)` becomes `x`, and so does a slice of everything."""

    name = "remove_identity"
    kinds = frozenset({"identity", "slice_by_index"})

    def check(self, m: Match) -> Match | Refusal:
        """Does it move nothing, and make no output?"""
        op = m.root
        dropped = []
        if op.op_type == "slice_by_index":
            if (places := slice_places(op)) is None or not (_takes_all(op, places) or counts_back_over_one(op)):
                return an.NO_MATCH
            dropped = [axis for axis, along in enumerate(sliced(op)) if along.single]
            if not _takes_all(op, places):
                return m.bind(places=places, dropped=dropped)
        if an.is_output(op.outputs[0]) and not dropped:
            return Refusal(f"it makes the output %{op.outputs[0].name}", op)
        return m.bind(places=None, dropped=dropped)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Return the operand, without the axes that were dropped."""
        x: Var = m.root.x
        if m.places is not None:
            strides = [along.stride for along in sliced(m.root)]
            x = mb.slice_by_index(x=x, begin=m.places[0], end=m.places[1], stride=strides)
        return mb.squeeze(x=x, axes=m.dropped) if m.dropped else x


def _takes_all(op: Operation, places: tuple[list[int], list[int]]) -> bool:
    return not any(places[0]) and places[1] == list(op.x.shape) and all(a.stride == 1 for a in sliced(op))


@an.example((1, 4))
def example(x: Var) -> Var:
    """An identity, and the last row of one, between two activations."""
    same = mb.identity(x=mb.relu(x=x, name="r"), name="same")
    last = mb.slice_by_index(x=same, begin=[-1, 0], end=[0, 4], squeeze_mask=[True, False], name="last")
    return mb.tanh(x=last, name="y")
