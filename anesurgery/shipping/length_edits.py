"""What of an op says how long an axis is, and what it says at other lengths.

A function of fixed shapes is followed at several lengths at once. Each axis then has a column: its length in
the function that is there, and at each size that is wanted. What is fixed has one length all along, so that a
channel count that happens to be equal to the length is never taken for it. An op says lengths in its parameters
(shapes, ends of slices, repetitions) and in tables with a row for each place. These are found by where the axes
of its operands go; what may be read in two ways is a refusal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from anesurgery.errors import Refusal, Refused
from anesurgery.facts.attention import MASKED
from anesurgery.facts.masks import evaluate_static
from anesurgery.facts.windows import window_pads
from anesurgery.mil import Array, Operation, Var, constant, consumers, dtype_name, operands, types
from anesurgery.ops import BINARY, NORMS, POINTWISE, RECURRENT, REDUCTIONS, names
from anesurgery.semantics.reading import each_axis, ints, number
from anesurgery.semantics.rows import places_of, reshape_axes
from anesurgery.shipping.meeting_axes import Operand, OperandAxis, equal_axes, indexed_operands, operand_of

Column: TypeAlias = tuple[int, ...]
"""The lengths of an axis: in the function that is there, then at each size."""


@dataclass(frozen=True)
class Numbers:
    """Whole numbers, of which some are lengths."""

    values: tuple[int | Column, ...]
    scalar: bool = False


@dataclass(frozen=True)
class Rows:
    """The first rows of a table."""

    whole: Array
    axes: Mapping[int, Column]


@dataclass(frozen=True)
class Share:
    """One part of as many as there are places."""

    length: Column
    dtype: str
    form: str = "part"
    """A part, 1 / n; their number, n; or what corrects a variance, n / (n - 1)."""

    def of(self, count: int) -> float:
        """The number at a length."""
        return {"part": 1 / count, "number": float(count), "corrected": count / max(count - 1, 1)}[self.form]


@dataclass(frozen=True)
class Absent:
    """A parameter that says what the others say too."""


Edit: TypeAlias = "Numbers | Rows | Share | Absent"
Edits: TypeAlias = "dict[Operand, Edit]"


class Unmarked(Exception):  # noqa: N818 - no error: the numbers that turn out to be lengths
    """Numbers of earlier ops are lengths: (op, operand, axis) -> column."""

    def __init__(self, marks: Mapping[tuple[Operation, Operand, int], Column]) -> None:
        super().__init__()
        self.marks = marks


@dataclass
class Lengths:
    """What is known of lengths so far."""

    column_of: Callable[[Var, int], Column]
    count: int
    """How many lengths each column holds."""
    marks: dict[str, dict[tuple[Operand, int], Column]] = field(default_factory=dict)
    """By op, numbers and axes of tables that are lengths, since what they make meets what is as long."""
    still: set[Var] = field(default_factory=set)
    """Values that depend on no input."""
    merged: dict[Column, tuple[Column, ...]] = field(default_factory=dict)
    """Lengths that are made of several axes or of parts of one: of which, in their order; or unknown."""
    sums: dict[Var, set[Column]] = field(default_factory=dict)
    """Values that are sums or means over places, times numbers: over how many."""
    factors: dict[Var, set[float]] = field(default_factory=dict)
    """Numbers that a value was multiplied with."""
    bases: set[int] = field(default_factory=set)
    """The lengths, in the function that is there, of all axes that vary."""
    assumed: dict[str, str] = field(default_factory=dict)
    """By op, what the numbers do not show."""
    open: dict[tuple[Var, int], Refusal] = field(default_factory=dict)
    """Axes whose length is a number that may be one of the inputs', and why to refuse if it is none."""

    def columns(self, var: Var) -> list[Column]:
        """The lengths of all axes of a value; none of what is no tensor, as the labels of classes."""
        if not types.is_tensor(var.sym_type):
            return []
        if var in self.still:
            return [(int(n),) * self.count for n in var.shape]
        return [self.column_of(var, a) for a in range(var.rank)]

    def varying(self, var: Var) -> dict[int, Column]:
        """The axes of a value whose length differs between sizes."""
        return {a: c for a, c in enumerate(self.columns(var)) if varies(c)}

    def marked(self, op: Operation) -> dict[tuple[Operand, int], Column]:
        """What is known of an op's own numbers."""
        return self.marks.get(op.name, {})


def varies(column: int | Column) -> bool:
    """Is it another length at some size?"""
    return isinstance(column, tuple) and len(set(column)) > 1


def edits(op: Operation, lengths: Lengths) -> Edits:
    """What of an op is other at other lengths.

    Raises:
        Refused: it cannot have another length, or that cannot be told; says why.
        Unmarked: numbers of earlier ops turn out to be lengths.
    """
    read = [v for _, v in operands(op)]
    _check_counts(op, lengths)
    if not any(lengths.varying(v) or v in lengths.sums for v in read) and not lengths.marked(op):
        return {}
    rule = RULES.get(op.op_type)
    if rule is None:
        raise Refused(Refusal(f"whether {op.op_type} is the same at another length is not known", op))
    changes = _meetings(op, lengths)
    changes.update(rule(op, lengths))
    _follow_sums(op, lengths)
    return changes


def _check_counts(op: Operation, lengths: Lengths) -> None:
    """What has no axis of places meets no number that is as large as a length: shares of it may be counted so.

    Raises:
        Refused: it does.
    """
    if op.op_type not in BINARY | {"clip"} or any(lengths.varying(v) for _, v in operands(op)):
        return
    for name in ("x", "y", "alpha", "beta"):
        if (factor := number(op.inputs.get(name))) is not None and factor > 2 and factor in lengths.bases:
            words = f"the number {factor:g} may be a length; convert the model at a size that is no such number"
            raise Refused(Refusal(words, op))


def _plain(op: Operation, lengths: Lengths) -> Edits:
    """Nothing but its operands says a length."""
    return {}


# ---------------------------------------------------------------- axes that meet


def _meetings(op: Operation, lengths: Lengths) -> Edits:
    """Axes that meet have one length; tables get rows for it.

    Raises:
        Refused: they have not.
        Unmarked: they will, where numbers of earlier ops are lengths.
    """
    wanted: dict[Operand, dict[int, Column]] = {}
    marks: dict[tuple[Operation, Operand, int], Column] = {}
    for places, summed in equal_axes(op):
        column = _shared(op, places, lengths)
        if column is None:
            continue
        for var, operand, axis in places:
            if lengths.columns(var)[axis] == column:
                continue
            if var not in lengths.still:
                marks |= dict.fromkeys(_origins(op, var, axis, lengths), column)
            elif summed:
                raise Refused(Refusal(f"{op.op_type} has a stored number for each place", op))
            else:
                wanted.setdefault(operand, {})[axis] = column
    for (operand, axis), column in lengths.marked(op).items():
        var = operand_of(op, operand)
        if var in lengths.still and op.op_type in POINTWISE | {"gather_nd"}:
            wanted.setdefault(operand, {})[axis] = column
    if marks:
        raise Unmarked(marks)
    return {operand: _rows(op, operand, axes, lengths) for operand, axes in wanted.items()}


def _shared(op: Operation, places: Sequence[OperandAxis], lengths: Lengths) -> Column | None:
    """The one length of axes that meet, if it differs between sizes.

    Raises:
        Refused: they have several.
    """
    columns = {lengths.columns(var)[axis]: var for var, _, axis in places}
    longer = {column: var for column, var in columns.items() if varies(column)}
    if len(longer) > 1:
        one, other = list(longer.values())[:2]
        raise Refused(
            Refusal(f"%{one.name} and %{other.name} meet, and are not of one length at each size", op)
        )
    return next(iter(longer), None)


def _origins(op: Operation, var: Var, axis: int, lengths: Lengths) -> list[tuple[Operation, Operand, int]]:
    """The numbers of ops that made an axis which meets one that varies.

    Raises:
        Refused: none can be told.
    """
    origins, pending = [], [(op, var, axis, None)]
    why = Refusal(f"%{var.name} is as long as what it meets at one size only", op)
    while pending:
        _, value, at, _ = pending.pop()
        maker = value.op
        if maker is None:
            raise Refused(Refusal(f"the input {value.name} has this length too; give its shapes as well", op))
        if (own := _literal(maker, at, lengths)) is not None:
            origins.append((maker, own, at))
            continue
        axes = reshape_axes(maker) if maker.op_type == "reshape" else places_of(maker)
        if axes is None:
            raise Refused(why)
        length, before = value.shape[at], len(pending) + len(origins)
        for operand, source in indexed_operands(maker):
            places = next((o.places for o in axes if o.var is source and o.name == operand[0]), ())
            if at not in places or source.shape[places.index(at)] != length:
                continue
            if source in lengths.still:
                origins.append((maker, operand, places.index(at)))
            else:
                pending.append((maker, source, places.index(at), None))
        if len(pending) + len(origins) == before:
            raise Refused(why)
    return origins


def _literal(maker: Operation, axis: int, lengths: Lengths) -> Operand | None:
    """The parameter in which an op says how long an axis is that it makes."""
    if maker.op_type == "tile" and maker.x.shape[axis] == 1:
        return "reps", 0
    if maker.op_type == "slice_by_index" and not any(each_axis(maker, "squeeze_mask", False)):
        return "end", 0
    if maker.op_type == "gather_nd" and maker.indices in lengths.still and axis < maker.indices.rank - 1:
        return "indices", 0
    if maker.op_type in ("resize_bilinear", "resize_nearest_neighbor") and axis >= maker.x.rank - 2:
        return ("target_size_height", "target_size_width")[axis - maker.x.rank + 2], 0
    return None


# ---------------------------------------------------------------- tables

ADDED = names("add sub gather select")
"""Ops that read learned rows: positions are added."""


def _rows(op: Operation, operand: Operand, axes: Mapping[int, Column], lengths: Lengths) -> Rows:
    """The rows of a table at each length.

    Raises:
        Refused: they are not lengths.
    """
    var = operand_of(op, operand)
    value = evaluate_static(var)
    name = var.name
    if value is None:
        raise Refused(Refusal(f"%{name} has a row for each place, and its numbers are not known", op))
    if any(c in lengths.merged for c in axes.values()) and not _all_steady(np.asarray(value), axes):
        words = "has a row for each of several axes together, as interpolated positions of pictures have"
        raise Refused(Refusal(f"%{name} {words}", op))
    table = continued(np.asarray(value), {a: max(c) for a, c in axes.items()}, op.op_type in ADDED)
    if isinstance(table, Refusal):
        raise Refused(Refusal(f"the table %{name} cannot be another size: {table.reason}", op))
    if table.assumed:
        lengths.assumed[name] = f"the rows of %{name} are learned, and cut to its first ones"
    return Rows(table.whole, dict(axes))


def _all_steady(value: Array, axes: Mapping[int, Column]) -> bool:
    return all((value == value.take([0], a)).all() for a in axes)


# ---------------------------------------------------------------- parameters


def _reshape(op: Operation, lengths: Lengths) -> Edits:
    """Each new axis is made of whole old ones, in their order, and of parts of fixed ones."""
    new = [int(n) for n in op.outputs[0].shape]
    old = [part for column in lengths.columns(op.x) for part in lengths.merged.get(column) or (column,)]
    dims: list[Column] = []
    starts = np.cumprod([1, *(c[0] for c in old)])
    ends = np.cumprod([1, *new])
    taken = set[int]()
    for j, size in enumerate(new):
        low, high = int(ends[j]), int(ends[j + 1])
        inside = [a for a, c in enumerate(old) if varies(c) and starts[a] >= low and starts[a + 1] <= high]
        taken.update(inside)
        whole = [old[a] for a in inside]
        part = size // math.prod(c[0] for c in whole)
        column = tuple(part * math.prod(c[i] for c in whole) for i in range(lengths.count))
        if len(whole) > 1 or (whole and part > 1):
            digits = _digits(old, low, high)
            lengths.merged[column] = digits if lengths.merged.get(column, digits) == digits else ()
        dims.append(column)
    if lost := [a for a, c in enumerate(old) if varies(c) and a not in taken]:
        words = f"takes apart axis {lost[0]}, of {old[lost[0]][0]}; which part is the length is not known"
        raise Refused(Refusal(f"{op.op_type} {words}", op))
    longer = [j for j, c in enumerate(dims) if varies(c)]
    if not longer:
        return {}
    products = [j for j in longer if dims[j] in lengths.merged]
    free = (products or longer)[0]
    values = tuple(-1 if j == free else c if varies(c) else c[0] for j, c in enumerate(dims))
    return {("shape", 0): Numbers(values)}


def _digits(old: Sequence[Column], low: int, high: int) -> tuple[Column, ...]:
    """The axes, and parts of fixed ones, of which an axis is made, by the elements before and behind it."""
    digits, start = list[Column](), 1
    for column in old:
        end = start * column[0]
        inside = min(end, high) // max(start, low)
        if end > low and start < high and inside > 1:
            digits.append(column if varies(column) else (inside,) * len(column))
        start = end
    return tuple(digits)


def _slice(op: Operation, lengths: Lengths) -> Edits:
    """All from a place on, up to a place from the end, or one place."""
    begins, ends = each_axis(op, "begin", 0), each_axis(op, "end", 0)
    if constant(op.begin) is None or constant(op.end) is None:
        raise Refused(Refusal("where it begins or ends is computed", op))
    masks = {n: each_axis(op, n, False) for n in ("begin_mask", "end_mask", "squeeze_mask")}
    flags, kept = {n: list(m) for n, m in masks.items()}, list[int | Column](ends)
    marked, firsts = {a: c for (_, a), c in lengths.marked(op).items()}, list(begins)
    for a, column in lengths.varying(op.x).items():
        begin = 0 if masks["begin_mask"][a] else begins[a]
        if _takes_last_step(op, a, begin, column, lengths):
            firsts[a], flags["end_mask"][a] = -1, masks["end_mask"][a] or not masks["squeeze_mask"][a]
        elif masks["squeeze_mask"][a]:
            _one_place(op, begin, column)
        elif a in marked:
            lengths.open.pop((op.outputs[0], a), None)
            kept[a] = tuple(n + max(begin, 0) for n in marked[a])
        else:
            flags["end_mask"][a] = _is_whole(op, a, begin, ends[a], column, lengths) or masks["end_mask"][a]
    result: Edits = {("end", 0): Numbers(tuple(kept))} if kept != ends else {}
    if firsts != begins:
        result["begin", 0] = Numbers(tuple(firsts))
    if flags["end_mask"] != masks["end_mask"]:
        result["end_mask", 0] = Numbers(tuple(flags["end_mask"]))
    return result


def _takes_last_step(op: Operation, axis: int, begin: int, column: Column, lengths: Lengths) -> bool:
    """Does a slice take the last place of what a recurrent layer makes forward, its last state?"""
    if begin != column[0] - 1 or each_axis(op, "stride", 1)[axis] < 0:
        return False
    layer = steps_of(op.x, axis)
    if layer is not None:
        lengths.assumed[op.name] = f"{op.name} takes the last step of {layer.name} at each size"
    return layer is not None


def _one_place(op: Operation, place: int, column: Column) -> None:
    """Only the first place, or one from the end, is the same one at each length.

    Raises:
        Refused: it is another.
    """
    length = column[0]
    middle = {length - 1, length // 2, (length - 1) // 2}
    if place > 0 and (place in middle or place >= min(column)):
        raise Refused(Refusal(f"place {place} of {length} may be counted from its end, or be its middle", op))


def _is_whole(op: Operation, axis: int, begin: int, end: int, column: Column, lengths: Lengths) -> bool:
    """Does a slice go to the end of an axis? Otherwise it takes as many places as it says.

    Raises:
        Refused: it may end at a part of the length.
    """
    length, masked = column[0], each_axis(op, "end_mask", False)[axis]
    if begin > 0 and begin in (length - 1, length // 2, (length + 1) // 2):
        raise Refused(Refusal(f"it begins at place {begin} of {length}, which may be a part of the length", op))
    if masked or end >= length:
        return True
    if end < 0:
        return False
    if end >= min(column) or end * 2 >= length or (end > 1 and length % end == 0):
        why = Refusal(f"it ends at place {end} of {length}, which may be a part of the length", op)
        if any(each_axis(op, "squeeze_mask", False)):
            raise Refused(why)
        lengths.open[op.outputs[0], axis] = why
    elif end > 1:
        lengths.assumed[op.name] = f"{op.name} takes the first {end} places at each size"
    return False


def _slice_by_size(op: Operation, lengths: Lengths) -> Edits:
    sizes, longer = ints(op, "size"), lengths.varying(op.x)
    begins = constant(op.begin)
    if not sizes or begins is None:
        raise Refused(Refusal("where it begins, or its size, is computed", op))
    for a, column in longer.items():
        if begins[a] or sizes[a] not in (-1, column[0]):
            raise Refused(
                Refusal(f"it takes {sizes[a]} of {column[0]} places, which may be a part of them", op)
            )
    return {("size", 0): Numbers(tuple(-1 if a in longer else n for a, n in enumerate(sizes)))}


def _split(op: Operation, lengths: Lengths) -> Edits:
    axis = ints(op, "axis")[0] % op.x.rank
    if axis not in lengths.varying(op.x):
        return {}
    raise Refused(Refusal("it splits the length; how long each part is at another size is not known", op))


def _tile(op: Operation, lengths: Lengths) -> Edits:
    reps, marked = ints(op, "reps"), {a: c for (_, a), c in lengths.marked(op).items()}
    if not reps:
        raise Refused(Refusal("how often it repeats is computed", op))
    for a in lengths.varying(op.x):
        if reps[a] != 1:
            lengths.merged[tuple(n * reps[a] for n in lengths.columns(op.x)[a])] = ()
    return {("reps", 0): Numbers(tuple(marked.get(a, n) for a, n in enumerate(reps)))} if marked else {}


def _pad(op: Operation, lengths: Lengths) -> Edits:
    pads = ints(op, "pad")
    first = op.x.rank - len(pads) // 2
    for a, column in lengths.varying(op.x).items():
        before, after = pads[2 * (a - first) : 2 * (a - first) + 2] if a >= first else (0, 0)
        if after > before:
            readers = consumers(op.outputs[0])
            strides = [_stride(reader, a) for reader in readers]
            if not strides or not all(strides):
                words = f"it adds {after} places behind the end, which may be made for a length of {column[0]}"
                raise Refused(Refusal(words, op))
            _same_rest(op, column, max(n for n in strides if n))
    return {}


def _stride(op: Operation, axis: int) -> int | None:
    """By how much windows move along an axis; None for other ops."""
    if op.op_type not in WINDOWED or axis < 2:
        return None
    return (ints(op, "strides") or [1] * (op.x.rank - 2))[axis - 2]


def _same_rest(op: Operation, column: Column, stride: int) -> None:
    """Padding that is made for a length, of which the rest by the stride counts."""
    if any((n - column[0]) % stride for n in column):
        raise Refused(
            Refusal(
                f"its padding is made for a length of {column[0]}; give sizes at which {column[1:]} "
                f"differ from it by multiples of {stride}",
                op,
            )
        )


def _windows(op: Operation, lengths: Lengths) -> Edits:
    if op.op_type == "conv_transpose":
        return _transposed(op, lengths)
    if str(constant(op.inputs.get("pad_type"))) in ("same", "same_lower"):
        return {}
    pads = window_pads(op)
    for a, column in lengths.varying(op.x).items():
        stride = _stride(op, a)
        if stride and pads[2 * (a - 2) + 1] > pads[2 * (a - 2)]:
            _same_rest(op, column, stride)
    return {}


def _transposed(op: Operation, lengths: Lengths) -> Edits:
    """A convolution that makes more places; the shape that it may say is that which follows from the rest."""
    says = ints(op, "output_shape")
    if not says or not lengths.varying(op.x):
        return {}
    pads, spatial = ints(op, "pad"), op.x.rank - 2
    strides, dilations = (ints(op, n) or [1] * spatial for n in ("strides", "dilations"))
    kind = str(constant(op.inputs.get("pad_type")) or "valid")
    if kind == "valid":
        pads = [0] * 2 * spatial
    for i in range(spatial):
        window = dilations[i] * (int(op.weight.shape[2 + i]) - 1) + 1
        follows = (int(op.x.shape[2 + i]) - 1) * strides[i] + window - sum(pads[2 * i : 2 * i + 2])
        if kind not in ("valid", "custom") or says[-spatial + i] != follows:
            raise Refused(
                Refusal(f"it says that it makes {says[-spatial + i]} places, and {follows} follow", op)
            )
    return {("output_shape", 0): Absent()}


def _blocks(op: Operation, lengths: Lengths) -> Edits:
    """Places that go to the batch by blocks, and back; what is added or cropped may be made for a length.

    Raises:
        Refused: lengths leave another rest by the block; or it crops.
    """
    block, axes = ints(op, "block_shape"), lengths.varying(op.x)
    edges = ints(op, "paddings" if op.op_type == "space_to_batch" else "crops")
    for i, size in enumerate(block):
        column = axes.get(op.x.rank - len(block) + i)
        if column is not None and any(edges[2 * i : 2 * i + 2]):
            if op.op_type == "batch_to_space":
                raise Refused(Refusal("it crops, which may be made for a length", op))
            _same_rest(op, column, size)
    return {}


WIDEST = 4
"""Windows that lie side by side and are wider may be made to give a number of places. A choice: narrower ones
are strides of a network."""


def _pool(op: Operation, lengths: Lengths) -> Edits:
    """A window that covers the whole axis, or a large part, may be made for the length."""
    size = ints(op, "kernel_sizes")
    for a, column in lengths.varying(op.x).items():
        if a < 2 or size[a - 2] == 1:
            continue
        stride, wide = _stride(op, a), size[a - 2]
        if wide >= column[0] or (wide == stride and wide > WIDEST and column[0] % wide == 0):
            raise Refused(Refusal(f"its window of {wide} may be made for a length of {column[0]}", op))
        if wide == stride and column[0] % wide == 0:
            lengths.assumed[op.name] = f"{op.name} has a window of {wide} at each size"
    return _windows(op, lengths)


def _upsample(op: Operation, lengths: Lengths) -> Edits:
    """Whole multiples of the length; others are made for a size."""
    for a, n in enumerate(op.x.shape):
        if a in lengths.varying(op.x) and int(op.outputs[0].shape[a]) % int(n):
            raise Refused(Refusal(f"it makes {op.outputs[0].shape[a]} places of {n}, which is no multiple", op))
        if a in lengths.varying(op.x) and op.outputs[0].shape[a] != n:
            times = int(op.outputs[0].shape[a]) // int(n)
            lengths.assumed[op.name] = f"{op.name} makes {times} times as many places at each size"
    return {}


def _resize(op: Operation, lengths: Lengths) -> Edits:
    """To a size that is that of something else, or a multiple of its own."""
    sizes: Edits = {}
    marked = {o[0]: c for (o, _), c in lengths.marked(op).items()}
    for a, name in ((op.x.rank - 2, "target_size_height"), (op.x.rank - 1, "target_size_width")):
        column, target = lengths.columns(op.x)[a], int(op.outputs[0].shape[a])
        if name in marked:
            sizes[name, 0] = Numbers((marked[name],), scalar=True)
        elif varies(column):
            if target % column[0]:
                raise Refused(Refusal(f"it makes {target} places of {column[0]}, which is no multiple", op))
            times = target // column[0]
            sizes[name, 0] = Numbers((tuple(n * times for n in column),), scalar=True)
            lengths.assumed[op.name] = f"{op.name} makes {times} times as many places at each size"
    return sizes


def _gather(op: Operation, lengths: Lengths) -> Edits:
    """Rows by places that are stored: the first, those from the end, or all in order."""
    axis = (ints(op, "axis") or [0])[0] % op.x.rank
    column, picked = lengths.columns(op.x)[axis], constant(op.indices)
    if not varies(column) or picked is None:
        return {}
    for place in np.ravel(picked).tolist():
        _one_place(op, int(place), column)
    return {}


def _gather_along(op: Operation, lengths: Lengths) -> Edits:
    """Places along an axis that are stored are the first ones, or those from the end."""
    axis, picked = (ints(op, "axis") or [0])[0] % op.x.rank, evaluate_static(op.indices)
    column = lengths.columns(op.x)[axis]
    if varies(column) and op.indices in lengths.still and picked is not None:
        for place in np.unique(picked).tolist():
            _one_place(op, int(place), column)
    return {}


def _gather_nd(op: Operation, lengths: Lengths) -> Edits:
    """A grid of stored places: along an axis that is as long, they count it."""
    if op.indices not in lengths.still:
        return {}
    grid = np.asarray(evaluate_static(op.indices))
    along_of: dict[int, Column] = {}
    for a, column in lengths.varying(op.x).items():
        along = _counting(grid, a, column[0])
        if along is None:
            raise Refused(Refusal("the places that it picks are not all, in order", op))
        along_of[along] = column
    along_of |= {a: c for (_, a), c in lengths.marked(op).items()}
    whole = grid
    for a, column in along_of.items():
        more = max(max(column) - whole.shape[a], 0)
        steps = (
            np.diff(whole, axis=a).take([-1], a) if whole.shape[a] > 1 else np.zeros_like(whole.take([0], a))
        )
        last = whole.take([-1], a)
        whole = np.concatenate([whole, *(last + (i + 1) * steps for i in range(more))], a).astype(grid.dtype)
        if (np.diff(whole, 2, axis=a) != 0).any() or (whole.take([0], a) < 0).any():
            raise Refused(Refusal("the places that it picks are not counted up", op))
    return {("indices", 0): Rows(whole, along_of)} if along_of else {}


def _counting(grid: Array, component: int, length: int) -> int | None:
    """The axis of a grid of places along which one component counts all of them."""
    if component >= grid.shape[-1]:
        return None
    part = grid[..., component]
    for a in range(part.ndim):
        counted = np.arange(length).reshape([-1 if b == a else 1 for b in range(part.ndim)])
        if part.shape[a] == length and (part == counted).all():
            return a
    return None


def _topk(op: Operation, lengths: Lengths) -> Edits:
    axis = (ints(op, "axis") or [-1])[0] % op.x.rank
    column, k = lengths.columns(op.x)[axis], constant(op.k)
    if not varies(column):
        return {}
    if k is None or k >= min(column):
        raise Refused(Refusal(f"it takes the first {k} of {column[0]} places", op))
    return {}


def _squeeze(op: Operation, lengths: Lengths) -> Edits:
    if op.inputs.get("axes") is not None:
        return {}
    return {("axes", 0): Numbers(tuple(a for a, d in enumerate(op.x.shape) if d == 1))}


def _concat(op: Operation, lengths: Lengths) -> Edits:
    """What is joined to what is as long as the input makes a length of its own."""
    (axis,) = ints(op, "axis")
    at = axis % op.values[0].rank
    columns = [lengths.columns(v)[at] for v in op.values]
    if any(c in lengths.merged for c in columns):
        lengths.merged[tuple(map(sum, zip(*columns, strict=True)))] = ()
    for var in op.values:
        if any(map(varies, columns)) and var in lengths.still and var.shape[at] > 1:
            value = evaluate_static(var)
            if value is None or not np.any(value):
                raise Refused(Refusal(f"%{var.name} may fill up to a length", op))
    return {}


# ---------------------------------------------------------------- numbers made of a length


def _follow_sums(op: Operation, lengths: Lengths) -> None:
    """Note what is a sum over places, and what is multiplied with which number.

    Raises:
        Refused: a sum over places is multiplied with what may be made of their number.
    """
    out = op.outputs[0]
    over = {
        c
        for places, summed in equal_axes(op)
        if summed
        for v, _, a in places
        if varies(c := lengths.columns(v)[a])
    }
    if op.op_type in REDUCTIONS | {"cumsum"}:
        axes = [a % op.x.rank for a in ints(op, "axes") or ints(op, "axis")] or [*range(op.x.rank)]
        over |= {c for a in axes if varies(c := lengths.columns(op.x)[a])}
    before = {f for _, v in operands(op) for f in lengths.factors.get(v, ())}
    for column in over:
        if any(is_made_of(factor, column[0]) for factor in before):
            raise Refused(Refusal(f"what it sums over {column[0]} places is multiplied by a part of that", op))
    read = (
        {c for _, v in operands(op) for c in lengths.sums.get(v, ())}
        if op.op_type in PASSING
        else set[Column]()
    )
    if over | read:
        lengths.sums[out] = over | read
    own = {factor for factor in (number(op.inputs.get(n)) for n in ("x", "y")) if factor}
    if op.op_type in ("mul", "real_div") and own:
        lengths.factors[out] = before | own
    elif before and op.op_type in PASSING:
        lengths.factors[out] = before


def _product(op: Operation, lengths: Lengths) -> Edits:
    """A sum over n places times 1/n is a mean at each length."""
    sums = {c for v in (op.x, op.y) for c in lengths.sums.get(v, ())}
    for operand, var in indexed_operands(op):
        factor = number(var) if operand[0] in ("x", "y") else None
        near = next((c for c in sums if factor and is_made_of(factor, c[0])), None)
        if near is None or factor is None:
            continue
        share = factor if op.op_type == "mul" else 1 / factor
        if math.isclose(share, 1 / near[0], rel_tol=1e-3) and len(sums) == 1 and op.op_type == "mul":
            return {operand: Share(near, dtype_name(var))}
        if op.op_type == "mul" and len(sums) == 1 and _corrects(factor, near[0]) and min(near) > 1:
            return {operand: Share(near, dtype_name(var), "corrected")}
        if op.op_type == "real_div" and factor == near[0] and operand[0] == "y" and len(sums) == 1:
            return {operand: Share(near, dtype_name(var), "number")}
        raise Refused(
            Refusal(f"the factor {factor:g} of a sum over {near[0]} places may be made of their number", op)
        )
    return {}


def _corrects(factor: float, count: int) -> bool:
    """Is a factor n / (n - 1), which makes the variance of a sample of a mean of squares?"""
    return count > 2 and factor != 1 and math.isclose(factor, count / (count - 1), rel_tol=5e-4)


def is_made_of(factor: float, length: int) -> bool:
    """May a number be numbers of a length: a part, a root, or one that corrects a variance?"""
    n = float(length)
    numbers = [n, math.sqrt(n), n - 1, n + 1]
    wanted = [*numbers, *(1 / m for m in numbers if m), *((n / (n - 1), (n - 1) / n) if n > 1 else ())]
    return any(math.isclose(abs(factor), w, rel_tol=1e-3) for w in wanted if w != 1)


PASSING = names(
    """
    add cast expand_dims identity mul real_div reduce_mean reduce_sum reshape slice_by_index squeeze
    sub transpose
    """
)
"""Ops after which a sum over places is one still."""
WINDOWED = names("avg_pool conv max_pool l2_pool")

Rule: TypeAlias = "Callable[[Operation, Lengths], Edits]"
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(POINTWISE | NORMS | REDUCTIONS | RECURRENT, _plain),
    **dict.fromkeys(
        names(
            """
            argsort band_part cumsum depth_to_space einsum expand_dims linear matmul
            pixel_shuffle pixel_unshuffle prelu reduce_argmax reduce_argmin reverse scaled_dot_product_attention
            shape softmax
            space_to_depth stack transpose
            """
        ),
        _plain,
    ),
    **dict.fromkeys(names("mul real_div"), _product),
    **dict.fromkeys(names("conv conv_transpose"), _windows),
    **dict.fromkeys(names("avg_pool max_pool l2_pool"), _pool),
    **dict.fromkeys(names("space_to_batch batch_to_space"), _blocks),
    **dict.fromkeys(names("upsample_nearest_neighbor upsample_bilinear"), _upsample),
    **dict.fromkeys(names("resize_bilinear resize_nearest_neighbor"), _resize),
    "reshape": _reshape,
    "slice_by_index": _slice,
    "slice_by_size": _slice_by_size,
    "split": _split,
    "tile": _tile,
    "pad": _pad,
    "gather": _gather,
    "gather_along_axis": _gather_along,
    "gather_nd": _gather_nd,
    "topk": _topk,
    "squeeze": _squeeze,
    "concat": _concat,
}
"""What each op type says of lengths."""


# Along which axes of a value the steps of a recurrent layer go.

DEPTH = 16
"""Ops between a recurrent layer and a slice of its steps, which turn them, say, or join both
directions. A choice: two layers on each other have six."""


def steps_of(var: Var, axis: int, depth: int = DEPTH) -> Operation | None:
    """The recurrent layer that runs forward along an axis, so that the last step is its last state; or None."""
    op = var.op
    if op is None or not depth:
        return None
    if op.op_type in RECURRENT:
        forward = op.inputs.get("direction") is None or constant(op.direction) in ("forward", "bidirectional")
        return op if forward and axis == 0 and var is op.outputs[0] else None
    for operand in places_of(op) or ():
        if axis in operand.places:
            layer = steps_of(operand.var, operand.places.index(axis), depth - 1)
            if layer is not None:
                return layer
    return None


# How a table with a row for each place goes on at another length, as far as its numbers show that.
#
# A table of positions, a mask or a band that was folded for one length is the beginning of that of a longer
# one, or is made of its length in another way: distances from the end, steps of one over the length, windows.
# The first may be cut, and goes on where it follows a formula; the others may not.

BASES = (10000.0, 500000.0, 1000000.0, 100000.0)
"""Of the wave lengths of published models."""

SLOW = 1e-3
"""Turns from place to place below which a wave is told from a straight line by no table in fp16."""


@dataclass(frozen=True)
class Table:
    """A table that is long enough for the lengths that are wanted.

    Attributes:
        whole: of which the first rows are read.
        assumed: are the rows those of a longer table only by the look of it, as learned positions are?
    """

    whole: Array
    assumed: bool = False


def continued(table: Array, most: Mapping[int, int], adds: bool) -> Table | Refusal:
    """A table, at least as long as is wanted, whose first rows are those at each shorter length.

    Args:
        table: at the length that is known.
        most: axis -> the largest length that is wanted; one axis of places, or two.
        adds: are its numbers added, or read as words are? Learned positions are.
    """
    steady, whole = {a for a in most if (table == table.take([0], a)).all()}, table
    for axis in steady:
        whole = np.repeat(whole.take([0], axis), max(most[axis], table.shape[axis]), axis)
    rest = {a: max(n, table.shape[a]) for a, n in most.items() if a not in steady}
    if not rest:
        return Table(whole)
    if len(rest) > 1:
        return _by_distance(whole, rest)
    ((axis, length),) = rest.items()
    rows = np.moveaxis(whole, axis, 0)
    follows = _longer(rows, rows.shape[0]) is not None or _is_wavy(rows)
    if not follows and (why := _made_of_length(rows)) is not None:
        return Refusal(why)
    if length > rows.shape[0]:
        longer = _longer(rows, length)
        if longer is None:
            return Refusal(
                f"its {rows.shape[0]} rows follow no formula for {length} could be made; give the module, "
                "or a model of the largest size"
            )
        return Table(np.ascontiguousarray(np.moveaxis(longer, 0, axis)))
    if follows:
        return Table(whole)
    if not adds:
        return Refusal("its rows follow no formula, so that those of another length may be others")
    return Table(whole, assumed=True)


def _made_of_length(rows: Array) -> str | None:
    """Why the rows of another length would be others; None where nothing says so. rows: (places, ...)."""
    numbers = rows.astype(np.float64).reshape(rows.shape[0], -1)
    if rows.dtype.kind == "b" or (numbers <= MASKED).any():
        return "it hides some places, and those of another length may be others"
    if (numbers == numbers[::-1]).all() or (len(rows) > 3 and (numbers[1:] == numbers[:0:-1]).all()):
        return "it is the same from both ends, as a window is that is made for its length"
    steps = np.diff(numbers, axis=0)
    even = _even(numbers)
    if len(rows) > 2 and even.any():
        step = steps.mean(0)[even]
        if ((step < 0) & (np.abs(numbers[-1, even]) <= 1)).any():
            return "it counts down to its end"
        if (np.abs(step - np.round(step)) > 1e-3).any():
            return _rises(float(step[0]))
    return None


def _even(numbers: Array) -> Array:
    """Which columns rise by the same from place to place? numbers: (places, columns)."""
    with np.errstate(invalid="ignore"):  # what masks is infinite in neighbouring places
        steps = np.diff(numbers, axis=0)
    return np.abs(steps - steps.mean(0)).max(0) <= 2e-3 * (np.abs(numbers).max() or 1.0)


def _rises(step: float) -> str:
    return f"it rises by {step:g} from place to place, as what is made of a length does"


def _one_slope(rows: Array) -> str | None:
    """Why distances may be counted in parts of the length; slopes that differ from head to head are none."""
    numbers = rows.astype(np.float64).reshape(rows.shape[0], -1)
    if rows.dtype.kind == "b" or len(rows) < 3 or not _even(numbers).all():
        return None
    slopes = {round(float(n), 4) for n in np.diff(numbers, axis=0).mean(0)}
    return _rises(min(slopes)) if len(slopes) == 1 and min(slopes) % 1 else None


def _longer(rows: Array, length: int) -> Array | None:
    """More rows, by the formula that gives all that are there, bit for bit; None where there is none."""
    for way in (_counted, _waves, _slopes):
        longer: Array | None = way(rows, length)
        if longer is not None:
            return longer
    return None


def _counted(rows: Array, length: int) -> Array | None:
    """Rows that count up by one, at every element alike."""
    places = np.arange(length).reshape([-1] + [1] * (rows.ndim - 1))
    longer = (rows[:1].astype(np.int64) + places).astype(rows.dtype)
    return longer if (longer[: len(rows)] == rows).all() else None


def _slopes(rows: Array, length: int) -> Array | None:
    """Rows that rise by 2 ** (-8 / heads) and its powers, a power for each head, as ALiBi has it."""
    flat = rows.reshape(rows.shape[0], -1)
    heads = flat.shape[1]
    if rows.dtype.kind != "f" or heads < 2 or heads & (heads - 1):
        return None
    slopes = 2.0 ** (-8 / heads * np.arange(1, heads + 1))
    longer: Array = np.outer(np.arange(length), slopes).astype(rows.dtype)
    return longer.reshape(length, *rows.shape[1:]) if (longer[: len(rows)] == flat).all() else None


def _turned(length: int, width: int, base: float) -> torch.Tensor:
    """The angles of places: (places, width / 2)."""
    inverse = 1.0 / (base ** (torch.arange(0, width, 2).float() / width))
    return torch.arange(length).float()[:, None] * inverse[None]


WAYS: Sequence[Callable[[torch.Tensor], torch.Tensor]] = (
    lambda angles: torch.cat([angles, angles], 1).cos(),
    lambda angles: torch.cat([angles, angles], 1).sin(),
    lambda angles: torch.cat([angles.sin(), angles.cos()], 1),
    lambda angles: torch.stack([angles.sin(), angles.cos()], 2).flatten(1),
    torch.cos,
    torch.sin,
)
"""How tables of positions are made of angles; the last two hold each angle once."""


def _waves(rows: Array, length: int) -> Array | None:
    """Sines and cosines of places, as rotary and sinusoidal positions are."""
    flat = rows.reshape(rows.shape[0], -1)
    if rows.dtype.kind != "f" or not 2 <= flat.shape[1] == max(rows.shape[1:], default=0):
        return None
    for base in BASES:
        for i, way in enumerate(WAYS):
            angles = _turned(length, flat.shape[1] * (2 if i > 3 else 1), base)
            longer: Array = way(angles).numpy().astype(rows.dtype)
            if longer.shape[1] == flat.shape[1] and (longer[: len(rows)] == flat).all():
                return longer.reshape(length, *rows.shape[1:])
    return None


def _is_wavy(rows: Array) -> bool:
    """Does each column turn by an angle of its own from place to place, which no length has made?

    Of such a column, the sum of two neighbours is the one between, times twice the cosine of the angle.
    """
    if rows.dtype.kind != "f" or len(rows) < 5:
        return False
    x = rows.astype(np.float64).reshape(len(rows), -1)
    middle, sums = x[1:-1], x[2:] + x[:-2]
    factor = (middle * sums).sum(0) / np.maximum((middle**2).sum(0), 1e-30)
    if np.abs(sums - middle * factor).max() > 4e-3 * np.abs(x).max():
        return False
    turns = np.arccos(np.clip(factor / 2, -1, 1)) / (2 * np.pi)
    whole = [np.abs(turns * n - np.round(turns * n)) < 1e-3 for n in (len(rows), len(rows) - 1)]
    return bool((turns > SLOW).any()) and not ((turns > SLOW) & (whole[0] | whole[1])).any()


def _by_distance(table: Array, most: Mapping[int, int]) -> Table | Refusal:
    """A table of rows and columns that depend on the distance between them alone, as causal masks do."""
    first, second = sorted(most)
    square = np.moveaxis(table, (first, second), (0, 1))
    rows, columns = square.shape[:2]
    if (square[1:, 1:] != square[:-1, :-1]).any():
        return Refusal("its elements are not the same at equal distances between two places")
    for side in (square[:, 0], square[0]):
        if (why := _one_slope(side)) is not None:
            return Refusal(why)
    if most[first] <= rows and most[second] <= columns:
        return Table(table)
    far, near = square[rows // 2 :, 0], square[0, columns // 2 :]
    if (far != far[-1:]).any() or (near != near[-1:]).any():
        return Refusal(f"what it holds at distances from {max(rows, columns)} on follows no formula")
    apart = np.arange(most[second])[None] - np.arange(most[first])[:, None]
    behind = square[np.clip(-apart, 0, rows - 1), 0]
    ahead = square[0, np.clip(apart, 0, columns - 1)]
    chosen = (apart >= 0).reshape(*apart.shape, *[1] * (square.ndim - 2))
    longer = np.where(chosen, ahead, behind).astype(table.dtype)
    return Table(np.ascontiguousarray(np.moveaxis(longer, (0, 1), (first, second))))
