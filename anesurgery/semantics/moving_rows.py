"""Rows of ops that move numbers: views, slices, joins, lookups, and those that make numbers of shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from anesurgery.mil import Operation, any_symbolic, constant, static_shape
from anesurgery.ops import MOVING, names
from anesurgery.semantics.constant_ends import ANY, Interval
from anesurgery.semantics.meaning import (
    MIXED,
    Axes,
    Meaning,
    Operand,
    Place,
    Ranges,
    axes_given,
    mixing,
    only,
    same,
    union,
)
from anesurgery.semantics.reading import each_axis, ints, number, permutation


def _transpose(op: Operation) -> Axes | None:
    perm = permutation(op)
    return only(op, [perm.index(a) for a in range(op.x.rank)]) if perm or not op.x.rank else None


def _expand_dims(op: Operation) -> Axes:
    rank = op.outputs[0].rank
    new = axes_given(op, "axes", rank)
    return only(op, [a for a in range(rank) if a not in new])


def squeezed(op: Operation) -> list[int]:
    """The axes that a squeeze takes away: those it names, or all of length 1."""
    if op.inputs.get("axes") is None:
        return [a for a, d in enumerate(op.x.shape) if d == 1]
    return sorted(axes_given(op, "axes", op.x.rank))


def _squeeze(op: Operation) -> Axes:
    gone = squeezed(op)
    return only(op, [MIXED if a in gone else a - sum(b < a for b in gone) for a in range(op.x.rank)])


def reshaped(op: Operation) -> Axes | None:
    """An axis stays the same where as many elements as before stand before it, and it is as long."""
    old, new = static_shape(op.x), static_shape(op.outputs[0])
    if old is None or new is None or not math.prod(new):
        return None
    starts = {(math.prod(new[:a]), length): a for a, length in enumerate(new)}
    return only(op, [starts.get((math.prod(old[:a]), length), MIXED) for a, length in enumerate(old)])


def staying(op: Operation) -> list[int]:
    """The axes of what is sliced that the result has."""
    single = each_axis(op, "squeeze_mask", False) if op.op_type == "slice_by_index" else [False] * op.x.rank
    return [a for a in range(op.x.rank) if not single[a]]


def _slice(op: Operation) -> Axes | None:
    """All of an axis, from its start."""
    places = {a: i for i, a in enumerate(staying(op))}
    whole = [a in places and _takes_all(op, a, op.outputs[0].shape[places[a]]) for a in range(op.x.rank)]
    return only(op, [places[a] if whole[a] else MIXED for a in range(op.x.rank)])


def _takes_all(op: Operation, axis: int, length: object) -> bool:
    """Does a slice take all of an axis, in order?"""
    if op.inputs.get("stride") is not None and each_axis(op, "stride", 0)[axis] != 1:
        return False
    masked = [each_axis(op, name, False)[axis] for name in ("begin_mask", "end_mask")]
    known = static_shape(op.x) is not None or not any_symbolic([op.x.shape[axis]])
    begins = constant(op.inputs.get("begin"))
    start = masked[0] or (begins is not None and int(begins[axis]) in (0, _minus(op.x.shape[axis])))
    return start and (all(masked) or (known and bool(length == op.x.shape[axis])))


def _minus(length: object) -> int:
    return -length if isinstance(length, int) else 0


def _slice_by_size(op: Operation) -> Axes | None:
    shape = op.outputs[0].shape
    return only(op, [a if shape[a] == op.x.shape[a] else MIXED for a in range(op.x.rank)])


def _slice_update(op: Operation) -> Axes | None:
    """What is written is as long as an axis, and goes there in order."""
    plain = not any(each_axis(op, "squeeze_mask", False)) and op.update.rank == op.x.rank
    if not plain or any(constant(op.inputs[name]) is None for name in ("begin", "end")):
        return None
    stride = each_axis(op, "stride", 1)
    places: list[Place] = [
        a if op.update.shape[a] == n and stride[a] == 1 else MIXED for a, n in enumerate(op.x.shape)
    ]
    return Operand("x", op.x, tuple(places)), Operand("update", op.update, tuple(places))


def _unrepeated(op: Operation) -> Axes | None:
    reps = ints(op, "reps")
    return mixing(op, {a for a, n in enumerate(reps) if n != 1}) if reps else None


def _unpadded(op: Operation) -> Axes | None:
    pad = ints(op, "pad")
    if not pad:
        return None
    first = op.x.rank - len(pad) // 2
    return mixing(op, {first + i for i in range(len(pad) // 2) if any(pad[2 * i : 2 * i + 2])})


def _unturned(op: Operation) -> Axes | None:
    default: Sequence[int] = range(op.x.rank) if op.inputs.get("axes") is None else ()
    return mixing(op, axes_given(op, "axes", op.x.rank, default)) if op.x.rank else None


def _concat(op: Operation) -> Axes | None:
    mixed = axes_given(op, "axis", op.values[0].rank)
    places = [MIXED if a in mixed else a for a in range(op.values[0].rank)]
    return tuple(Operand("values", v, tuple(places)) for v in op.values)


def _stack(op: Operation) -> Axes:
    (axis,) = axes_given(op, "axis", op.outputs[0].rank)
    return tuple(
        Operand("values", v, tuple(a if a < axis else a + 1 for a in range(v.rank))) for v in op.values
    )


def _gather(op: Operation) -> Axes | None:
    """Rows of `x` by indices."""
    if ints(op, "batch_dims") not in ([], [0]) or not op.x.rank:
        return None
    axis, more = (ints(op, "axis") or [0])[0] % op.x.rank, op.indices.rank - 1
    kept = [MIXED if a == axis else a if a < axis else a + more for a in range(op.x.rank)]
    picks = Operand("indices", op.indices, tuple(a + axis for a in range(op.indices.rank)))
    return Operand("x", op.x, tuple(kept)), picks


def _gather_along_axis(op: Operation) -> Axes | None:
    axis = (ints(op, "axis") or [0])[0] % op.x.rank
    if any(op.x.shape[a] != op.indices.shape[a] for a in range(op.x.rank) if a != axis):
        return None
    x = Operand("x", op.x, tuple(MIXED if a == axis else a for a in range(op.x.rank)))
    return x, Operand("indices", op.indices, tuple(range(op.indices.rank)))


def _scatter_along_axis(op: Operation) -> Axes | None:
    """Rows are written by themselves, where data, places and updates have the same ones."""
    axis = (ints(op, "axis") or [0])[0] % op.data.rank
    given = [(name, op.inputs[name]) for name in ("data", "indices", "updates")]
    if any(v.shape[a] != op.data.shape[a] for _, v in given for a in range(v.rank) if a != axis):
        return None
    places: tuple[Place, ...] = tuple(MIXED if a == axis else a for a in range(op.data.rank))
    return tuple(Operand(name, var, places) for name, var in given)


def _one_hot(op: Operation) -> Axes:
    (axis,) = axes_given(op, "axis", op.outputs[0].rank, (-1,))
    return only(op, [a if a < axis else a + 1 for a in range(op.indices.rank)], "indices")


def _leading(count: int, mixed: int) -> Meaning:
    """The first axes of four by themselves, the others mixed."""
    return Meaning(same, lambda op: mixing(op, {*range(count, count + mixed)}))


def _padded(op: Operation, ranges: Ranges) -> Interval:
    fill = op.inputs.get("constant_val")
    return ANY if fill is None else union([op.x, fill], ranges)


def _zero_padded(op: Operation, ranges: Ranges) -> Interval:
    low, high = ranges.at(op.x)
    return min(low, 0.0), max(high, 0.0)


def _joined(op: Operation, ranges: Ranges) -> Interval:
    return union(list(op.inputs["values"]), ranges)


def _range(op: Operation, ranges: Ranges) -> Interval:
    step = number(op.step)
    return (ranges.at(op.start)[0], ranges.at(op.end)[1]) if step is not None and step > 0 else ANY


def _filled(op: Operation, ranges: Ranges) -> Interval:
    """One number everywhere, 0 by default."""
    return (0.0, 0.0) if op.inputs.get("value") is None else ranges.at(op.value)


AXES: dict[str, Callable[[Operation], Axes | None]] = {
    "transpose": _transpose,
    "expand_dims": _expand_dims,
    "squeeze": _squeeze,
    "reshape": lambda op: None if constant(op.shape) is None else reshaped(op),
    "reverse": _unturned,
    "slice_by_index": _slice,
    "slice_by_size": _slice_by_size,
    "split": lambda op: mixing(op, axes_given(op, "axis", op.x.rank)),
    "tile": _unrepeated,
    "gather": _gather,
    "gather_along_axis": _gather_along_axis,
}

ROWS: dict[str, Meaning] = {
    **{op_type: Meaning(same, AXES.get(op_type)) for op_type in sorted(MOVING - {"identity"})},
    **dict.fromkeys(names("depth_to_space space_to_depth pixel_shuffle pixel_unshuffle"), _leading(1, 3)),
    "crop": _leading(2, 2),
    "pad": Meaning(_padded, _unpadded),
    "space_to_batch": Meaning(_zero_padded),
    "concat": Meaning(_joined, _concat),
    "stack": Meaning(_joined, _stack),
    "slice_update": Meaning(axes=_slice_update),
    "band_part": Meaning(axes=lambda op: mixing(op, {op.x.rank - 2, op.x.rank - 1})),
    "scatter_along_axis": Meaning(axes=_scatter_along_axis),
    "one_hot": Meaning(lambda op, ranges: union([op.on_value, op.off_value], ranges), _one_hot),
    "range_1d": Meaning(_range),
    **dict.fromkeys(names("fill fill_like"), Meaning(_filled)),
    **dict.fromkeys(names("non_zero shape"), Meaning(positions=0)),
}
