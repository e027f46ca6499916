"""Replace a slice update at a run-time position by a blend with a mask.

If several rows are written at once, a product with one-hot rows first moves them to their positions. That
product is exact, since each sum has one non-zero term. Constant parts of the position, such as the layer in a
shared cache, become part of the mask.

Refuses when more than one axis or none has a dynamic position, when the position or the size cannot be read,
when several rows are written along another axis than the last but one, and when several rows are integers.

Why it helps: the ANE takes a slice_update only as the write of a state (reported: M4, macOS 27.0, and macOS 15,
by 4rg0naut/silicon-ledger-public); a selection is legal anywhere. What the pass gains in time was not measured.

Grade: checked: it rests on the index being in range.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var
from anesurgery.rewriting.passes import cache_example


@dataclass(frozen=True)
class MaskedWrite(Rewrite):
    """`slice_update` at a dynamic place as a selection."""

    name = "masked_write"
    kinds = frozenset({"slice_update"})
    follows = ("add_cache",)
    tolerates_nonfinite = False
    """Rows that are brought to their places are multiplied by 0 elsewhere."""

    def check(self, m: Match) -> Match | Refusal:
        """Match one dynamic axis, and floats if several rows are moved."""
        part = _dynamic_slice(m.root)
        if isinstance(part, Refusal):
            return part
        if part.size > 1 and part.axis != m.x.rank - 2:
            return Refusal(f"{part.size} rows are written along axis {part.axis}", m.root)
        if part.size > 1 and an.np_dtype(m.x).kind != "f":
            return Refusal(f"%{m.x.name} holds {an.np_dtype(m.x)}", m.root)
        return m.bind(part=part)

    def sample(self, m: Match, var: Var, rng: np.random.Generator) -> an.Array | None:
        """Draw places that exist."""
        part: _DynamicSlice = m.part
        if var is not part.place:
            return None
        return np.asarray(rng.integers(0, part.length - part.size + 1, var.shape), np.int32)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Select the new rows at their places, and the old ones elsewhere."""
        part: _DynamicSlice = m.part
        name = m.root.name
        at = part.place
        along = [-1 if a == part.axis else 1 for a in range(m.x.rank)]
        places = np.arange(part.length, dtype=np.int32).reshape(along)
        update: Var = m.update
        if part.size > 1:
            # Row j of the update goes to row i if the first one goes to row i - j.
            first = np.arange(part.length)[:, None] - np.arange(part.size)
            first = first.astype(np.int32).reshape([1] * (m.x.rank - 2) + list(first.shape))
            one_hot = mb.cast(x=mb.equal(x=first, y=at), dtype=an.dtype_name(m.x), name=f"{name}_rows")
            update = mb.matmul(x=one_hot, y=update, name=f"{name}_placed")
            last = mb.add(x=at, y=np.array([part.size], np.int32))
            here = mb.logical_and(x=mb.greater_equal(x=places, y=at), y=mb.less(x=places, y=last))
        else:
            here = mb.equal(x=places, y=at, name=f"{name}_here")
        if part.around:
            update = mb.pad(x=update, pad=list(part.around), constant_val=an.np_dtype(m.x).type(0))
            here = mb.logical_and(x=here, y=part.inside, name=f"{name}_inside")
        return mb.select(cond=here, a=update, b=m.x)


@dataclass(frozen=True)
class _DynamicSlice:
    """What a `slice_update` writes, where one axis has a dynamic place."""

    shape: tuple[int, ...]
    """The shape of the value that is updated."""
    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    """Where the update begins; 0 on the dynamic axis."""
    axis: int
    """The dynamic one."""
    place: Var
    """Where it begins along this axis."""

    @property
    def length(self) -> int:
        """The length of the dynamic axis."""
        return self.shape[self.axis]

    @property
    def size(self) -> int:
        """The size of the slice along the dynamic axis."""
        return self.sizes[self.axis]

    @property
    def around(self) -> tuple[int, ...]:
        """The elements around the slice on the other axes, as `pad` takes them; empty if there are none."""
        pad: list[int] = []
        for axis, (start, size, length) in enumerate(zip(self.starts, self.sizes, self.shape, strict=True)):
            pad += [0, 0] if axis == self.axis else [start, length - start - size]
        return tuple(pad) if any(pad) else ()

    @property
    def inside(self) -> an.Array:
        """A mask of the elements that lie in the slice on all axes but the dynamic one, to be broadcast."""
        mask: an.Array = np.ones([1] * len(self.shape), bool)
        for axis, (start, size, length) in enumerate(zip(self.starts, self.sizes, self.shape, strict=True)):
            if axis != self.axis and size != length:
                within = (np.arange(length) >= start) & (np.arange(length) < start + size)
                mask = mask & within.reshape([-1 if a == axis else 1 for a in range(len(self.shape))])
        return mask


def _dynamic_slice(op: an.Operation) -> _DynamicSlice | Refusal:
    """Return the slice that a `slice_update` writes, or why it has not one single dynamic place."""
    shape, sizes = an.static_shape(op.x), an.static_shape(op.update)
    if shape is None or sizes is None or len(shape) != len(sizes):
        return Refusal("a shape is dynamic, or an axis is dropped", op)
    if set(an.ints(op, "stride")) - {1} or any(an.ints(op, "squeeze_mask")):
        return Refusal("it has strides, or drops an axis", op)
    begins = _entries(op.begin)
    lengths = None if begins is None else _lengths(op, begins)
    if begins is None or lengths is None:
        words = "the place is not a concat of constants and one dynamic number, or its size is not read"
        return Refusal(words, op)
    from_start, to_end = (an.ints(op, name) or [0] * len(shape) for name in ("begin_mask", "end_mask"))
    starts = [0 if masked else begin for begin, masked in zip(begins, from_start, strict=True)]
    dynamic = [(axis, start) for axis, start in enumerate(starts) if isinstance(start, Var)]
    if len(dynamic) != 1:
        return Refusal(f"{len(dynamic) or 'no'} axes have a dynamic place", op)
    axis, place = dynamic[0]
    if to_end[axis] or lengths[axis] != sizes[axis]:
        return Refusal(f"the slice is not as long as the {sizes[axis]} rows that are written", op)
    known = tuple(0 if isinstance(s, Var) else s for s in starts)
    for a, (start, size, length) in enumerate(zip(known, sizes, shape, strict=True)):
        reaches_end = to_end[a] or (not from_start[a] and start + lengths[a] >= length)
        ends_after_size = start + size == length if reaches_end else not from_start[a] and lengths[a] == size
        if a != axis and not (ends_after_size and 0 <= start <= length - size):
            return Refusal(f"what is written along axis {a} cannot be read", op)
    return _DynamicSlice(shape, sizes, known, axis, place)


def _entries(var: Var) -> list[int | Var] | None:
    """Return the numbers of a vector of places, a dynamic one as its value; None if they are not known."""
    if (value := an.constant(var)) is not None:
        return [int(v) for v in np.ravel(value)]
    if var.op is None or var.op.op_type != "concat":
        return [var] if an.static_shape(var) == (1,) else None
    entries: list[int | Var] = []
    for part in var.op.inputs["values"]:
        if (of_part := _entries(part)) is None:
            return None
        entries += of_part
    return entries


def _lengths(op: an.Operation, begins: list[int | Var]) -> list[int] | None:
    """Return how far each end of a slice is from its begin; None where that is not a constant."""
    if (sizes := _added(op.begin, op.end)) is not None:
        return [int(size) for size in np.broadcast_to(sizes, len(begins))]
    ends = _entries(op.end) or []
    lengths = [_distance(begin, end) for begin, end in zip(begins, ends, strict=False)]
    return lengths if len(lengths) == len(begins) and None not in lengths else None  # type: ignore[return-value]


def _distance(begin: int | Var, end: int | Var) -> int | None:
    """Return how far an end is from its begin; None where that is not a constant."""
    if isinstance(begin, int) and isinstance(end, int):
        return end - begin
    sizes = _added(begin, end) if isinstance(begin, Var) and isinstance(end, Var) else None
    return None if sizes is None else int(np.ravel(sizes)[0])


def _added(begin: Var, end: Var) -> an.Array | None:
    """Return the constants that are added to a begin to give an end; None if there are none."""
    add = an.producer(end, "add")
    if add is None or begin not in (add.x, add.y):
        return None
    return an.constant(add.y if add.x is begin else add.x)


example = cache_example
