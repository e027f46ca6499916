"""Slices that begin at a dynamic place of one axis, as those that a cache is written with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery.errors import Refusal
from anesurgery.mil import Array, Operation, Var, constant, static_shape
from anesurgery.semantics.reading import ints


@dataclass(frozen=True)
class DynamicSlice:
    """What a `slice_update` writes, where one axis has a dynamic place."""

    shape: tuple[int, ...]
    """Of what is updated."""
    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    """Where it begins; 0 on the dynamic axis."""
    axis: int
    """The dynamic one."""

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
        """What stands before and after the slice on the other axes, as `pad` takes it; empty for all."""
        found: list[int] = []
        for axis, (start, size, length) in enumerate(zip(self.starts, self.sizes, self.shape, strict=True)):
            found += [0, 0] if axis == self.axis else [start, length - start - size]
        return tuple(found) if any(found) else ()

    @property
    def inside(self) -> Array:
        """Which elements lie in the slice as far as the other axes say, by broadcasting."""
        made: Array = np.ones([1] * len(self.shape), bool)
        for axis, (start, size, length) in enumerate(zip(self.starts, self.sizes, self.shape, strict=True)):
            if axis != self.axis and size != length:
                within = (np.arange(length) >= start) & (np.arange(length) < start + size)
                made = made & within.reshape([-1 if a == axis else 1 for a in range(len(self.shape))])
        return made


def dynamic_slice(op: Operation) -> DynamicSlice | Refusal:
    """The slice that a `slice_update` writes, or why it is not one with a single dynamic place."""
    shape, sizes = static_shape(op.x), static_shape(op.update)
    if shape is None or sizes is None or len(shape) != len(sizes):
        return Refusal("a shape is dynamic, or an axis is dropped", op)
    if set(ints(op, "stride")) - {1} or any(ints(op, "squeeze_mask")):
        return Refusal("it has strides, or drops an axis", op)
    places, added = entries(op.begin), _added(op)
    if places is None or added is None:
        return Refusal(
            "the place is not a concat of constants and one dynamic number, or its size is not read", op
        )
    masks = [ints(op, name) or [0] * len(shape) for name in ("begin_mask", "end_mask")]
    starts = [0 if masked else place for place, masked in zip(places, masks[0], strict=True)]
    dynamic = [axis for axis, start in enumerate(starts) if isinstance(start, Var)]
    if len(dynamic) != 1:
        return Refusal(f"{len(dynamic) or 'no'} axes have a dynamic place", op)
    axis = dynamic[0]
    if masks[1][axis] or added[axis] != sizes[axis]:
        return Refusal(f"the slice is not as long as the {sizes[axis]} rows that are written", op)
    known = tuple(0 if isinstance(s, Var) else s for s in starts)
    for a, (start, size, length) in enumerate(zip(known, sizes, shape, strict=True)):
        end = length if masks[1][a] else start + added[a] if not masks[0][a] else None
        if a != axis and (end != start + size or start < 0 or start + size > length):
            return Refusal(f"what is written along axis {a} cannot be read", op)
    return DynamicSlice(shape, sizes, known, axis)


def entries(var: Var) -> list[int | Var] | None:
    """The numbers of a vector of places, a dynamic one as its value; None if they cannot be told."""
    if (value := constant(var)) is not None:
        return [int(v) for v in np.ravel(value)]
    if var.op is None or var.op.op_type != "concat":
        return [var] if static_shape(var) == (1,) else None
    found: list[int | Var] = []
    for part in var.op.inputs["values"]:
        inner = entries(part)
        if inner is None:
            return None
        found += inner
    return found


def _added(op: Operation) -> list[int] | None:
    """What is added to the begin of a slice for its end."""
    made = op.end.op
    if made is None or made.op_type != "add" or op.begin not in (made.x, made.y):
        return None
    size = constant(made.y if made.x is op.begin else made.x)
    return None if size is None else [int(v) for v in np.broadcast_to(size, static_shape(op.begin) or ())]
