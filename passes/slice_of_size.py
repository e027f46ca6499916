"""Slice a constant number of elements from a computed start, so that all that follows has a static shape.

PyTorch's `x[:, i : i + 8]` is converted so, and so is a crop around a computed centre,
`x[:, :, y - 112 : y + 112]`. coremltools does not see that the ends are a constant distance apart, and
gives every axis a dynamic length. Outputs whose shape becomes static are declared.

A slice whose two ends are negative counts from the end of the axis, before and after. Where the old slice
would leave the tensor, it returned fewer elements. The new one starts at the nearest place from which it fits.
If intervals show that the start fits, it is used as it is.

Refuses when the ends of an axis are not one computed number plus constants, or are parts of a computed vector,
when the slice has strides, when it would take no elements, and when the shape of `x` is dynamic.

Why it helps: the compilers of the engine and of the CPU refused shapes that depend on computed values
(reported: M1 Max, macOS 26 and 27, by ironblock/sidekick: docs/DECISIONS.md D15). What the pass gains in
time was not measured.

Grade: checked: it rests on the slice lying in the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Program, Refusal, Rewrite, Session, Var, mb
from anesurgery.facts.moves import Cut, computed_cuts
from anesurgery.semantics.intervals import interval


@dataclass(frozen=True)
class SliceOfSize(Rewrite):
    """`slice_by_index` between two computed ends as `slice_by_size`."""

    name = "slice_of_size"
    kinds = frozenset({"slice_by_index"})
    refines = True

    def run(self, program: Program, session: Session) -> None:
        """Rewrite, and declare the outputs whose sizes are static now."""
        before = _shapes(program)
        super().run(program, session)
        for name, shape in _shapes(program).items():
            if shape != before.get(name, shape):
                words = f"{name} is {shape}, it was {before[name]}"
                session.contract.append(an.InterfaceChange(words, (name,)))

    def check(self, m: Match) -> Match | Refusal:
        """Match slices with computed ends that are a constant distance apart."""
        if an.constant(m.root.begin) is not None and an.constant(m.root.end) is not None:
            return an.NO_MATCH
        cuts = computed_cuts(m.root)
        return cuts if isinstance(cuts, Refusal) else m.bind(cuts=cuts)

    def sample(self, m: Match, var: Var, rng: np.random.Generator) -> an.Array | None:
        """Draw starts from which the slice fits."""
        for cut, length in zip(m.cuts, m.root.x.shape, strict=True):
            if var is cut.base:
                return (rng.integers(0, length - cut.size + 1, size=var.shape) - cut.shift).astype(np.int32)
        return None

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Join the starts, slice, and drop the axes of which one element is taken."""
        rank = max((cut.base.rank for cut in m.cuts if cut.base is not None), default=0)  # of all in a concat
        starts = [_start(mb, cut, length, rank) for cut, length in zip(m.cuts, m.root.x.shape, strict=True)]
        sizes = [cut.size for cut in m.cuts]
        y = mb.slice_by_size(x=m.root.x, begin=mb.concat(values=starts, axis=0), size=sizes)
        dropped = [axis for axis, cut in enumerate(m.cuts) if cut.single]
        return mb.squeeze(x=y, axes=dropped) if dropped else y


def _shapes(program: Program) -> dict[str, str]:
    """Return the shapes of the outputs in words."""
    outputs = (v for function in program.functions.values() for v in function.outputs)
    return {v.name: an.shape_in_words(v.shape) for v in outputs}


def _least_from_start(cut: Cut) -> int:
    """Return the least start that does not count from the end: below it, both ends are negative."""
    return 0 if cut.single else -cut.size


def _start(mb: Builder, cut: Cut, length: int, rank: int) -> Var | an.Array:
    """Return the first place of a cut, moved into the tensor if the cut may not fit."""
    if cut.base is None:
        return np.full((1,) * rank, cut.shift, np.int32)
    start = mb.add(x=cut.base, y=np.int32(cut.shift)) if cut.shift else cut.base
    low, high = interval(cut.base)
    if low + cut.shift < _least_from_start(cut):
        counts = mb.less(x=start, y=np.int32(_least_from_start(cut)))
        start = mb.select(cond=counts, a=mb.add(x=start, y=np.int32(length)), b=start)
    if low + cut.shift < 0:
        start = mb.maximum(x=start, y=np.int32(0))
    if high + cut.shift > length - cut.size:
        start = mb.minimum(x=start, y=np.int32(length - cut.size))
    return mb.expand_dims(x=start, axes=[0]) if start.rank < rank else start


@an.example((1, 32), mb.TensorSpec((1,), dtype=an.types.int32))
def example(x: Var, place: Var) -> Var:
    """Eight numbers from a place on."""
    start = mb.squeeze(x=place, name="start")
    end = mb.add(x=start, y=np.int32(8), name="end")
    begins = mb.concat(values=(np.int32(0), start), axis=0, name="begins")
    ends = mb.concat(values=(np.int32(1), end), axis=0, name="ends")
    return mb.slice_by_index(x=x, begin=begins, end=ends, name="y")
