"""Find what must change in an op when axes get other lengths.

`resized` follows a function of fixed shapes at several sizes at once, and calls `edits_of` on each op in
order. Each axis then has a tuple of lengths: in the function as it is, and at each size wanted, such as (64,
128, 256); an axis of fixed length has (8, 8, 8), so that a channel count that happens to be 64 is never taken
for the length. Axes of an op's operands that must have the same length (`_equal_axes`) are those that it
aligns, as an `add` of (1, 64, 8) and (64, 8) does, or sums over.

An op can hold lengths in its parameters (shapes, ends of slices, repetitions) and in constant tables with a
row for each position. Both are found from where the axes of its operands go. Example: `reshape(x, shape=[64,
8])` of an x whose 64 varies becomes `shape=[-1, 8]`. What can be read in two ways is refused with a `Refusal`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from anesurgery.errors import Refusal, Refused
from anesurgery.facts.masks import evaluate_static
from anesurgery.facts.windows import window_pads
from anesurgery.mil import Array, Operation, Var, constant, consumers, dtype_name, operands, types
from anesurgery.ops import BINARY, NORMS, POINTWISE, RECURRENT, REDUCTIONS, names
from anesurgery.semantics.reading import each_axis, flag, ints, number
from anesurgery.semantics.rows import places_of, reshape_axes
from anesurgery.shipping.position_tables import continued_table


class Operand(NamedTuple):
    """A place at which an op reads a value: ("values", 1) is the second value of a `concat`."""

    name: str
    """The name of the parameter."""
    position: int = 0
    """Which of several values it is; 0 for a single one."""


class _OperandAxis(NamedTuple):
    """One axis of a value that an op reads."""

    var: Var
    operand: Operand
    axis: int


class EqualAxes(NamedTuple):
    """Axes of an op's operands that must have one length."""

    axes: list[_OperandAxis]
    summed: bool = False
    """Whether the op sums over them."""


def _operand_of(op: Operation, operand: Operand) -> Var:
    """Return the value that an op reads at an operand."""
    value = op.inputs[operand.name]
    return value[operand.position] if isinstance(value, (list, tuple)) else value


def _indexed_operands(op: Operation) -> list[tuple[Operand, Var]]:
    """Return the op's operands in order, with the value of each."""
    return [
        (Operand(name, i), var)
        for name, value in op.inputs.items()
        for i, var in enumerate(value if isinstance(value, (list, tuple)) else (value,))
        if isinstance(var, Var)
    ]


def _axes_of(op: Operation, **axis_of: int) -> list[_OperandAxis]:
    """Return an axis of each named parameter that the op has: `_axes_of(op, x=1, weight=1)`; -1 is the last."""
    given = [(Operand(name), op.inputs.get(name), axis) for name, axis in axis_of.items()]
    return [_OperandAxis(var, o, axis % var.rank) for o, var, axis in given if var is not None and var.rank]


def _equal_axes(op: Operation) -> list[EqualAxes]:
    """Return the axes of the op's operands that must have equal lengths, in groups."""
    rule = GROUPS.get(op.op_type)
    if rule is not None:
        return rule(op)
    rank = op.outputs[0].rank
    return _broadcast_axes(op, ("x", "y", "a", "b", "cond"), rank, rank) if op.op_type in POINTWISE else []


def _broadcast_axes(
    op: Operation, parameters: Sequence[str], rank: int, count: int, *, summed: bool = False
) -> list[EqualAxes]:
    """Align the first `count` of `rank` axes from the last one, as broadcasting does.

    Axes of length 1 are left out. An `add` of (1, 64, 8) and (64, 8) has the groups [], [x 1, y 0], [x 2, y 1].
    """
    groups = [EqualAxes([], summed) for _ in range(count)]
    for operand, var in _indexed_operands(op):
        if operand.name not in parameters:
            continue
        missing = rank - var.rank
        for axis in range(missing, count):
            if var.shape[axis - missing] != 1:
                groups[axis].axes.append(_OperandAxis(var, operand, axis - missing))
    return groups


def _matmul_axes(op: Operation) -> list[EqualAxes]:
    """The columns of x equal the rows of y; the axes before them broadcast."""
    row = -2 if flag(op, "transpose_x") and op.x.rank > 1 else -1
    column = -1 if flag(op, "transpose_y") or op.y.rank < 2 else -2
    rank = max(op.x.rank, op.y.rank)
    inner = EqualAxes(_axes_of(op, x=row, y=column), summed=True)
    return [inner, *_broadcast_axes(op, ("x", "y"), rank, rank - 2, summed=True)]


def _channel_axes(op: Operation) -> list[EqualAxes]:
    """The channels of x equal those of the weight, or else those of the per-channel parameters."""
    if op.inputs.get("weight") is not None:
        return [EqualAxes(_axes_of(op, x=1, weight=1), summed=True)]
    return [EqualAxes(_axes_of(op, x=1, mean=-1, gamma=-1, beta=-1, bias=-1), summed=True)]


def _normalized_axes(op: Operation) -> list[EqualAxes]:
    """Each normalised axis equals the matching axis of gamma and beta."""
    axes = [a % op.x.rank for a in ints(op, "axes")] or [*range(op.x.rank)]
    return [EqualAxes(_axes_of(op, x=a, gamma=i, beta=i), summed=True) for i, a in enumerate(axes)]


def _einsum_axes(op: Operation) -> list[EqualAxes]:
    """Axes of one letter are equal; those of a letter that the result has not are summed."""
    read, result = str(op.equation.val).replace(" ", "").split("->")
    by_letter: dict[str, list[_OperandAxis]] = {}
    for i, (letters, var) in enumerate(zip(read.split(","), op.values, strict=True)):
        for axis, letter in enumerate(letters):
            by_letter.setdefault(letter, []).append(_OperandAxis(var, Operand("values", i), axis))
    return [EqualAxes(axes, letter not in result) for letter, axes in by_letter.items()]


def _attention_axes(op: Operation) -> list[EqualAxes]:
    """Queries equal the rows of the mask, and keys and values its columns; the axes before them broadcast."""
    query, keys = _axes_of(op, query=-2), _axes_of(op, key=-2, value=-2)
    mask, rank = op.inputs.get("attn_mask"), op.outputs[0].rank
    if mask is not None:
        query += _axes_of(op, attn_mask=-2) if mask.rank > 1 and mask.shape[-2] != 1 else []
        keys += _axes_of(op, attn_mask=-1) if mask.shape[-1] != 1 else []
    batch = _broadcast_axes(op, ("query", "key", "value", "attn_mask"), rank, rank - 2)
    return [EqualAxes(query), EqualAxes(keys), *batch]


def _concat_axes(op: Operation) -> list[EqualAxes]:
    """All axes are equal but the one that a `concat` joins along."""
    (axis,) = ints(op, "axis") or [0]
    rank = op.values[0].rank
    equal = [a for a in range(rank) if op.op_type == "stack" or a != axis % rank]
    return [
        EqualAxes([_OperandAxis(v, Operand("values", i), a) for i, v in enumerate(op.values)]) for a in equal
    ]


def _recurrent_axes(op: Operation) -> list[EqualAxes]:
    """The batch of x equals that of the first states."""
    states = _axes_of(op, initial_h=0, initial_c=0)
    return [EqualAxes([*_axes_of(op, x=1), *(state for state in states if state.var.rank > 1)])]


def _gather_along_axes(op: Operation) -> list[EqualAxes]:
    """All axes of x and of the indices are equal but the one that is gathered along."""
    axis = (ints(op, "axis") or [0])[0] % op.x.rank
    return [EqualAxes(_axes_of(op, x=a, indices=a)) for a in range(op.x.rank) if a != axis]


GROUPS: dict[str, Callable[[Operation], list[EqualAxes]]] = {
    "matmul": _matmul_axes,
    "linear": lambda op: [EqualAxes(_axes_of(op, x=-1, weight=1), summed=True)],
    **dict.fromkeys(names("conv conv_transpose batch_norm instance_norm"), _channel_axes),
    "prelu": lambda op: [EqualAxes(_axes_of(op, x=1, alpha=0), summed=True)],
    "layer_norm": _normalized_axes,
    "einsum": _einsum_axes,
    "scaled_dot_product_attention": _attention_axes,
    **dict.fromkeys(names("concat stack"), _concat_axes),
    **dict.fromkeys(RECURRENT, _recurrent_axes),
    "gather_along_axis": _gather_along_axes,
}
"""Op type -> its rule, for ops that are not element-wise."""


AxisLengths: TypeAlias = tuple[int, ...]
"""The lengths of one axis: in the function as it is, then at each size wanted, in the same order everywhere. It
is called a column here: a table of the sizes has a row for each size, and a column for each axis."""


@dataclass(frozen=True)
class NumberEdit:
    """A parameter of integers, or of booleans, some of which are lengths."""

    values: tuple[int | AxisLengths, ...]
    scalar: bool = False


@dataclass(frozen=True)
class TableEdit:
    """A constant table, cut to the lengths of some axes."""

    table: Array
    """Long enough for the largest size."""
    axes: Mapping[int, AxisLengths]
    """Axis -> the number of rows to keep at each size."""


@dataclass(frozen=True)
class FactorEdit:
    """A scalar factor that is computed from a length n."""

    length: AxisLengths
    dtype: str
    form: str = "part"
    """"part" for 1 / n, "number" for n, "corrected" for n / (n - 1), which corrects a variance."""

    def at(self, count: int) -> float:
        """Return the factor at a length."""
        return {"part": 1 / count, "number": float(count), "corrected": count / max(count - 1, 1)}[self.form]


@dataclass(frozen=True)
class RemovedParameter:
    """A parameter that is removed, because the other parameters imply it."""


NewValue: TypeAlias = "NumberEdit | TableEdit | FactorEdit"
Edits: TypeAlias = "dict[Operand, NewValue | RemovedParameter]"


class LengthsFound(Exception):  # noqa: N818 - not an error
    """Raised where parameters of earlier ops turn out to be lengths: (op, operand, axis) -> lengths.

    The walk in `resized` notes them, and goes back to the first of these ops.
    """

    def __init__(self, marks: Mapping[tuple[Operation, Operand, int], AxisLengths]) -> None:
        super().__init__()
        self.marks = marks


@dataclass
class LengthFacts:
    """What is known about lengths so far, while a function is followed."""

    column_of: Callable[[Var, int], AxisLengths]
    count: int
    """How many lengths each tuple holds."""
    marks: dict[str, dict[tuple[Operand, int], AxisLengths]] = field(default_factory=dict)
    """Name of an op -> its parameters and table axes that are lengths, as their results meet axes that vary."""
    still: set[Var] = field(default_factory=set)
    """Values that depend on no input."""
    merged: dict[AxisLengths, tuple[AxisLengths, ...]] = field(default_factory=dict)
    """Lengths of an axis that a reshape merged -> the axes that it merged, in order; () where unknown."""
    sums: dict[Var, set[AxisLengths]] = field(default_factory=dict)
    """Value that is a sum or mean over positions, times factors -> the lengths of the summed axes."""
    factors: dict[Var, set[float]] = field(default_factory=dict)
    """Value -> the constant factors in it."""
    bases: set[int] = field(default_factory=set)
    """The lengths, in the function as it is, of all axes that vary."""
    assumed: dict[str, str] = field(default_factory=dict)
    """Name of an op -> an assumption about it that the numbers do not prove."""
    open: dict[tuple[Var, int], Refusal] = field(default_factory=dict)
    """Axis that a slice cut to a number which may be a length -> the refusal, unless it turns out to be one."""

    def columns(self, var: Var) -> list[AxisLengths]:
        """Return the lengths of each axis of a value; [] for values other than tensors."""
        if not types.is_tensor(var.sym_type):
            return []
        if var in self.still:
            return [(int(n),) * self.count for n in var.shape]  # the same at each size
        return [self.column_of(var, a) for a in range(var.rank)]

    def varying(self, var: Var) -> dict[int, AxisLengths]:
        """Return the axes of a value whose length differs between sizes."""
        return {a: c for a, c in enumerate(self.columns(var)) if varies(c)}

    def marked(self, op: Operation) -> dict[tuple[Operand, int], AxisLengths]:
        """Return the parameters and table axes of an op that are known to be lengths."""
        return self.marks.get(op.name, {})


def refused(reason: str, op: Operation | None = None) -> Refused:
    """Return the exception for a refusal."""
    return Refused(Refusal(reason, op))


def varies(column: int | AxisLengths) -> bool:
    """Return whether the length differs between sizes."""
    return isinstance(column, tuple) and len(set(column)) > 1


def edits_of(op: Operation, lengths: LengthFacts) -> Edits:
    """Return the changes that an op needs at other lengths.

    Raises:
        Refused: the op cannot have another length, or can be read in several ways.
        LengthsFound: parameters of earlier ops turn out to be lengths.
    """
    read = [v for _, v in operands(op)]
    _check_counts(op, lengths)
    if not any(lengths.varying(v) or v in lengths.sums for v in read) and not lengths.marked(op):
        return {}
    rule = RULES.get(op.op_type)
    if rule is None:
        raise refused(f"whether {op.op_type} is the same at another length is not known", op)
    changes = _edits_of_equal_axes(op, lengths)
    changes.update(rule(op, lengths))
    _note_sums(op, lengths)
    return changes


def _check_counts(op: Operation, lengths: LengthFacts) -> None:
    """Check that an op of fixed shape has no constant as large as a length, which it may count."""
    if op.op_type not in BINARY | {"clip"} or any(lengths.varying(v) for _, v in operands(op)):
        return
    for name in ("x", "y", "alpha", "beta"):
        if (factor := number(op.inputs.get(name))) is not None and factor > 2 and factor in lengths.bases:
            words = f"the number {factor:g} may be a length; convert the model at a size that is no such number"
            raise refused(words, op)


def _no_edits(op: Operation, lengths: LengthFacts) -> Edits:
    """The rule of ops that hold no length themselves."""
    return {}


# ---------------------------------------------------------------- axes that meet


def _edits_of_equal_axes(op: Operation, lengths: LengthFacts) -> Edits:
    """Give axes that must be equal one length: constant tables get as many rows.

    Raises:
        Refused: axes differ, or an axis that the op sums over is stored with a number for each position.
        LengthsFound: axes differ unless parameters of earlier ops are lengths.
    """
    table_axes: dict[Operand, dict[int, AxisLengths]] = {}
    marks: dict[tuple[Operation, Operand, int], AxisLengths] = {}
    for equal in _equal_axes(op):
        axis_lengths = _common_lengths(op, equal.axes, lengths)
        if axis_lengths is None:
            continue
        for var, operand, axis in equal.axes:
            if lengths.columns(var)[axis] == axis_lengths:
                continue
            if var not in lengths.still:
                marks |= dict.fromkeys(_parameters_behind(op, var, axis, lengths), axis_lengths)
            elif equal.summed:
                raise refused(f"{op.op_type} has a stored number for each place", op)
            else:
                table_axes.setdefault(operand, {})[axis] = axis_lengths
    for (operand, axis), axis_lengths in lengths.marked(op).items():
        var = _operand_of(op, operand)
        if var in lengths.still and op.op_type in POINTWISE | {"gather_nd"}:
            table_axes.setdefault(operand, {})[axis] = axis_lengths
    if marks:
        raise LengthsFound(marks)
    return {operand: _table_edit(op, operand, axes, lengths) for operand, axes in table_axes.items()}


def _common_lengths(op: Operation, axes: Sequence[_OperandAxis], lengths: LengthFacts) -> AxisLengths | None:
    """Return the lengths of axes that must be equal; None where they do not vary.

    Raises:
        Refused: two of them vary in different ways.
    """
    columns = {lengths.columns(var)[axis]: var for var, _, axis in axes}
    varying = {column: var for column, var in columns.items() if varies(column)}
    if len(varying) > 1:
        one, other = list(varying.values())[:2]
        raise refused(f"%{one.name} and %{other.name} meet, and are not of one length at each size", op)
    return next(iter(varying), None)


def _parameters_behind(
    op: Operation, var: Var, axis: int, lengths: LengthFacts
) -> list[tuple[Operation, Operand, int]]:
    """Find the parameters of earlier ops that made an axis which meets one that varies.

    For example, if x varies in `add(x, y)`, and y is a `tile` of a single row, this returns the `reps` of that
    tile: they must be a length.

    Returns:
        For each of them the earlier op, the operand, and the axis of its result.

    Raises:
        Refused: the axis cannot be followed back to a parameter.
    """
    origins, pending = list[tuple[Operation, Operand, int]](), [(var, axis)]
    why = Refusal(f"%{var.name} is as long as what it meets at one size only", op)
    while pending:
        value, at = pending.pop()
        maker = value.op
        if maker is None:
            raise refused(f"the input {value.name} has this length too; give its shapes as well", op)
        if (own := _length_parameter(maker, at, lengths)) is not None:
            origins.append((maker, own, at))
            continue
        axes = reshape_axes(maker) if maker.op_type == "reshape" else places_of(maker)
        if axes is None:
            raise Refused(why)
        length, before = value.shape[at], len(pending) + len(origins)
        for operand, source in _indexed_operands(maker):
            places = next((o.places for o in axes if o.var is source and o.name == operand.name), ())
            if at not in places or source.shape[places.index(at)] != length:
                continue
            if source in lengths.still:
                origins.append((maker, operand, places.index(at)))
            else:
                pending.append((source, places.index(at)))
        if len(pending) + len(origins) == before:
            raise Refused(why)
    return origins


TARGET_SIZES = {-2: "target_size_height", -1: "target_size_width"}
"""Axis, counted from the last -> the parameter of a `resize_...` that says how long it becomes."""


def _length_parameter(maker: Operation, axis: int, lengths: LengthFacts) -> Operand | None:
    """Return the parameter of an op that says how long an axis of its result is."""
    if maker.op_type == "tile" and maker.x.shape[axis] == 1:
        return Operand("reps")
    if maker.op_type == "slice_by_index" and not any(each_axis(maker, "squeeze_mask", False)):
        return Operand("end")
    if maker.op_type == "gather_nd" and maker.indices in lengths.still and axis < maker.indices.rank - 1:
        return Operand("indices")
    if maker.op_type in ("resize_bilinear", "resize_nearest_neighbor") and axis >= maker.x.rank - 2:
        return Operand(TARGET_SIZES[axis - maker.x.rank])
    return None


# ---------------------------------------------------------------- tables

ADDED = names("add sub gather select")
"""Ops that read learned rows: positions are added."""


def _table_edit(
    op: Operation, operand: Operand, axes: Mapping[int, AxisLengths], lengths: LengthFacts
) -> TableEdit:
    """Return the table with as many rows as each size needs.

    Raises:
        Refused: the table's numbers are not known, or follow no formula for more rows.
    """
    var = _operand_of(op, operand)
    value = evaluate_static(var)
    name = var.name
    if value is None:
        raise refused(f"%{name} has a row for each place, and its numbers are not known", op)
    if any(c in lengths.merged for c in axes.values()) and not _are_constant_along(np.asarray(value), axes):
        words = "has one row for each cell of a grid, like interpolated positions of an image"
        raise refused(f"%{name} {words}", op)
    table = continued_table(np.asarray(value), {a: max(c) for a, c in axes.items()}, op.op_type in ADDED)
    if isinstance(table, Refusal):
        raise refused(f"the table %{name} cannot be resized: {table.reason}", op)
    if table.assumed:
        lengths.assumed[name] = f"%{name} is a learned table; smaller sizes keep its first rows"
    return TableEdit(table.whole, dict(axes))


def _are_constant_along(value: Array, axes: Mapping[int, AxisLengths]) -> bool:
    """Return whether all rows along these axes are equal."""
    return all((value == value.take([0], a)).all() for a in axes)


# ---------------------------------------------------------------- parameters: one rule for each op type


def _reshape(op: Operation, lengths: LengthFacts) -> Edits:
    """Each new axis is a product of whole old axes, in order, and of parts of fixed ones; one becomes -1.

    Example: (64, 8) becomes (2, 256), and 64 is a length. The products of sizes before each axis are 1, 64, 512
    for the old axes, and 1, 2, 512 for the new ones. No new axis spans 1 to 64, so this is refused. In (512,)
    the axis spans 1 to 512 and holds both old ones: a product of a length and 8.
    """
    new = [int(n) for n in op.outputs[0].shape]
    old = [part for column in lengths.columns(op.x) for part in lengths.merged.get(column) or (column,)]
    dims: list[AxisLengths] = []
    old_products = np.cumprod([1, *(c[0] for c in old)])
    new_products = np.cumprod([1, *new])
    taken = set[int]()
    for j, size in enumerate(new):
        low, high = int(new_products[j]), int(new_products[j + 1])
        inside = [
            a for a, c in enumerate(old) if varies(c) and old_products[a] >= low and old_products[a + 1] <= high
        ]
        taken.update(inside)
        whole = [old[a] for a in inside]
        part = size // math.prod(c[0] for c in whole)
        column = tuple(part * math.prod(c[i] for c in whole) for i in range(lengths.count))
        if len(whole) > 1 or (whole and part > 1):
            digits = _merged_axes(old, low, high)
            lengths.merged[column] = digits if lengths.merged.get(column, digits) == digits else ()
        dims.append(column)
    if lost := [a for a, c in enumerate(old) if varies(c) and a not in taken]:
        words = f"takes apart axis {lost[0]}, of {old[lost[0]][0]}; which part is the length is not known"
        raise refused(f"{op.op_type} {words}", op)
    longer = [j for j, c in enumerate(dims) if varies(c)]
    if not longer:
        return {}
    products = [j for j in longer if dims[j] in lengths.merged]
    free = (products or longer)[0]
    values = tuple(-1 if j == free else c if varies(c) else c[0] for j, c in enumerate(dims))
    return {Operand("shape"): NumberEdit(values)}


def _merged_axes(old: Sequence[AxisLengths], low: int, high: int) -> tuple[AxisLengths, ...]:
    """Return the old axes, and parts of fixed ones, that a new axis merges.

    `low` and `high` are the products of the new sizes before the axis, and up to it.
    """
    digits, start = list[AxisLengths](), 1
    for column in old:
        end = start * column[0]
        inside = min(end, high) // max(start, low)
        if end > low and start < high and inside > 1:
            digits.append(column if varies(column) else (inside,) * len(column))
        start = end
    return tuple(digits)


def _slice(op: Operation, lengths: LengthFacts) -> Edits:
    """A slice may take all from a position on, up to a position from the end, or one position."""
    begins, ends = each_axis(op, "begin", 0), each_axis(op, "end", 0)
    if constant(op.begin) is None or constant(op.end) is None:
        raise refused("where it begins or ends is computed", op)
    begin_mask, end_mask, squeezed = (each_axis(op, f"{n}_mask", False) for n in ("begin", "end", "squeeze"))
    marked = {axis: column for (_, axis), column in lengths.marked(op).items()}
    new_begins, new_ends, new_end_mask = list(begins), list[int | AxisLengths](ends), list(end_mask)
    for a, column in lengths.varying(op.x).items():
        begin = 0 if begin_mask[a] else begins[a]
        if _takes_last_step(op, a, begin, column, lengths):
            new_begins[a], new_end_mask[a] = -1, end_mask[a] or not squeezed[a]
        elif squeezed[a]:
            _check_single_place(op, begin, column)
        elif a in marked:
            lengths.open.pop((op.outputs[0], a), None)
            new_ends[a] = tuple(n + max(begin, 0) for n in marked[a])
        else:
            new_end_mask[a] = _reaches_end(op, a, begin, ends[a], column, lengths) or end_mask[a]
    changes = {"end": (ends, new_ends), "begin": (begins, new_begins), "end_mask": (end_mask, new_end_mask)}
    return {Operand(n): NumberEdit(tuple(new)) for n, (old, new) in changes.items() if list(new) != list(old)}


def _takes_last_step(op: Operation, axis: int, begin: int, column: AxisLengths, lengths: LengthFacts) -> bool:
    """Return whether a slice takes the last step of a forward recurrent layer, which is its last state."""
    if begin != column[0] - 1 or each_axis(op, "stride", 1)[axis] < 0:
        return False
    layer = steps_of(op.x, axis)
    if layer is not None:
        lengths.assumed[op.name] = f"{op.name} takes the last step of {layer.name} at each size"
    return layer is not None


def _check_single_place(op: Operation, place: int, column: AxisLengths) -> None:
    """Check that a single position is the same one at each length: the first ones, or from the end.

    Raises:
        Refused: it may be the middle, or be counted from the end.
    """
    length = column[0]
    middle = {length - 1, length // 2, (length - 1) // 2}
    if place > 0 and (place in middle or place >= min(column)):
        raise refused(f"place {place} of {length} may be counted from its end, or be its middle", op)


def _reaches_end(
    op: Operation, axis: int, begin: int, end: int, column: AxisLengths, lengths: LengthFacts
) -> bool:
    """Return whether a slice goes to the end of an axis; otherwise it takes a fixed number of positions.

    Raises:
        Refused: it begins or ends at a number that may be a part of the length.
    """
    length, masked = column[0], each_axis(op, "end_mask", False)[axis]
    if begin > 0 and begin in (length - 1, length // 2, (length + 1) // 2):
        raise refused(f"it begins at place {begin} of {length}, which may be a part of the length", op)
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


def _slice_by_size(op: Operation, lengths: LengthFacts) -> Edits:
    """A slice along a length must take the whole axis."""
    sizes, longer = ints(op, "size"), lengths.varying(op.x)
    begins = constant(op.begin)
    if not sizes or begins is None:
        raise refused("where it begins, or its size, is computed", op)
    for a, column in longer.items():
        if begins[a] or sizes[a] not in (-1, column[0]):
            raise refused(f"it takes {sizes[a]} of {column[0]} places, which may be a part of them", op)
    return {Operand("size"): NumberEdit(tuple(-1 if a in longer else n for a, n in enumerate(sizes)))}


def _split(op: Operation, lengths: LengthFacts) -> Edits:
    """A split along a length is refused."""
    axis = ints(op, "axis")[0] % op.x.rank
    if axis not in lengths.varying(op.x):
        return {}
    raise refused("it splits the length; how long each part is at another size is not known", op)


def _tile(op: Operation, lengths: LengthFacts) -> Edits:
    """Repetitions that are known to be lengths are replaced."""
    reps = ints(op, "reps")
    marked = {axis: column for (_, axis), column in lengths.marked(op).items()}
    if not reps:
        raise refused("how often it repeats is computed", op)
    for a in lengths.varying(op.x):
        if reps[a] != 1:
            lengths.merged[tuple(n * reps[a] for n in lengths.columns(op.x)[a])] = ()
    return {Operand("reps"): NumberEdit(tuple(marked.get(a, n) for a, n in enumerate(reps)))} if marked else {}


def _pad(op: Operation, lengths: LengthFacts) -> Edits:
    """Padding at the end must be that of a convolution or pooling whose stride divides the change of length."""
    pads = ints(op, "pad")
    first = op.x.rank - len(pads) // 2
    for a, column in lengths.varying(op.x).items():
        before, after = pads[2 * (a - first) : 2 * (a - first) + 2] if a >= first else (0, 0)
        if after > before:
            readers = consumers(op.outputs[0])
            strides = [_window_stride(reader, a) for reader in readers]
            if not strides or not all(strides):
                words = f"it pads {after} places at the end, which may come from the length, {column[0]}"
                raise refused(words, op)
            _check_remainder(op, column, max(n for n in strides if n))
    return {}


def _window_stride(op: Operation, axis: int) -> int | None:
    """Return the stride of an op's window along an axis; None for ops without windows."""
    if op.op_type not in WINDOWED or axis < 2:
        return None
    return (ints(op, "strides") or [1] * (op.x.rank - 2))[axis - 2]


def _check_remainder(op: Operation, column: AxisLengths, stride: int) -> None:
    """Check that all lengths leave the same remainder by a stride, for which the padding was made."""
    if any((n - column[0]) % stride for n in column):
        raise refused(
            f"its padding is made for a length of {column[0]}; give sizes at which {column[1:]} "
            f"differ from it by multiples of {stride}",
            op,
        )


def _windows(op: Operation, lengths: LengthFacts) -> Edits:
    """Padding of a convolution that is larger at the end was made for the remainder of a length."""
    if op.op_type == "conv_transpose":
        return _conv_transpose(op, lengths)
    if str(constant(op.inputs.get("pad_type"))) in ("same", "same_lower"):
        return {}
    pads = window_pads(op)
    for a, column in lengths.varying(op.x).items():
        stride = _window_stride(op, a)
        if stride and pads[2 * (a - 2) + 1] > pads[2 * (a - 2)]:
            _check_remainder(op, column, stride)
    return {}


def _conv_transpose(op: Operation, lengths: LengthFacts) -> Edits:
    """A transposed convolution's `output_shape` is removed, if it follows from the other parameters."""
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
            raise refused(f"it says that it makes {says[-spatial + i]} places, and {follows} follow", op)
    return {Operand("output_shape"): RemovedParameter()}


def _blocks(op: Operation, lengths: LengthFacts) -> Edits:
    """Blocks that move to the batch and back: what is padded was made for the remainder of a length.

    Raises:
        Refused: lengths leave another remainder by the block size, or the op crops.
    """
    block, axes = ints(op, "block_shape"), lengths.varying(op.x)
    edges = ints(op, "paddings" if op.op_type == "space_to_batch" else "crops")
    for i, size in enumerate(block):
        column = axes.get(op.x.rank - len(block) + i)
        if column is not None and any(edges[2 * i : 2 * i + 2]):
            if op.op_type == "batch_to_space":
                raise refused("it crops, which may depend on the length", op)
            _check_remainder(op, column, size)
    return {}


WIDEST = 4
"""Pooling windows that do not overlap and are wider than this may have been chosen to give a number of outputs.
A choice: narrower ones are usual strides."""


def _pool(op: Operation, lengths: LengthFacts) -> Edits:
    """A window that covers the whole axis, or a large part of it, may have been made for the length."""
    size = ints(op, "kernel_sizes")
    for a, column in lengths.varying(op.x).items():
        if a < 2 or size[a - 2] == 1:
            continue
        stride, wide = _window_stride(op, a), size[a - 2]
        if wide >= column[0] or (wide == stride and wide > WIDEST and column[0] % wide == 0):
            raise refused(f"its window of {wide} may come from the length, {column[0]}", op)
        if wide == stride and column[0] % wide == 0:
            lengths.assumed[op.name] = f"{op.name} has a window of {wide} at each size"
    return _windows(op, lengths)


def _upsample(op: Operation, lengths: LengthFacts) -> Edits:
    """Only whole multiples of the length can be the same factor at each size."""
    for a in lengths.varying(op.x):
        before, after = int(op.x.shape[a]), int(op.outputs[0].shape[a])
        if after % before:
            raise refused(f"it makes {after} places of {before}, which is no multiple", op)
        if after != before:
            words = f"{op.name} makes {after // before} times as many places at each size"
            lengths.assumed[op.name] = words
    return {}


def _resize(op: Operation, lengths: LengthFacts) -> Edits:
    """The target size is that of another axis, or a whole multiple of its own."""
    sizes: Edits = {}
    marked = {operand.name: column for (operand, _), column in lengths.marked(op).items()}
    for a, name in TARGET_SIZES.items():
        column, target = lengths.columns(op.x)[a], int(op.outputs[0].shape[a])
        if name in marked:
            sizes[Operand(name)] = NumberEdit((marked[name],), scalar=True)
        elif varies(column):
            if target % column[0]:
                raise refused(f"it makes {target} places of {column[0]}, which is no multiple", op)
            times = target // column[0]
            sizes[Operand(name)] = NumberEdit((tuple(n * times for n in column),), scalar=True)
            lengths.assumed[op.name] = f"{op.name} makes {times} times as many places at each size"
    return sizes


def _gather(op: Operation, lengths: LengthFacts) -> Edits:
    """Constant indices along a length must be the same positions at each length."""
    axis, picked = (ints(op, "axis") or [0])[0] % op.x.rank, evaluate_static(op.indices)
    column = lengths.columns(op.x)[axis]
    if varies(column) and op.indices in lengths.still and picked is not None:
        for place in np.unique(picked).tolist():
            _check_single_place(op, int(place), column)
    return {}


def _gather_nd(op: Operation, lengths: LengthFacts) -> Edits:
    """A grid of constant indices that counts a length gets as many rows as each size needs."""
    if op.indices not in lengths.still:
        return {}
    grid = np.asarray(evaluate_static(op.indices))
    along_of: dict[int, AxisLengths] = {}  # axis of the grid -> the lengths that it counts
    for a, column in lengths.varying(op.x).items():
        along = _axis_that_counts(grid, a, column[0])
        if along is None:
            raise refused("the places that it picks are not all, in order", op)
        along_of[along] = column
    along_of |= {axis: column for (_, axis), column in lengths.marked(op).items()}
    whole = grid
    for a, column in along_of.items():
        more = max(max(column) - whole.shape[a], 0)
        last = whole.take([-1], a)
        steps = last - whole.take([-2], a) if whole.shape[a] > 1 else np.zeros_like(last)
        whole = np.concatenate([whole, *(last + (i + 1) * steps for i in range(more))], a).astype(grid.dtype)
        if (np.diff(whole, 2, axis=a) != 0).any() or (whole.take([0], a) < 0).any():
            raise refused("the places that it picks are not counted up", op)
    return {Operand("indices"): TableEdit(whole, along_of)} if along_of else {}


def _axis_that_counts(grid: Array, component: int, length: int) -> int | None:
    """Return the axis of a grid of indices along which one component counts 0, 1, ... to `length`."""
    if component >= grid.shape[-1]:
        return None
    part = grid[..., component]
    for a in range(part.ndim):
        counted = np.arange(length).reshape([-1 if b == a else 1 for b in range(part.ndim)])
        if part.shape[a] == length and (part == counted).all():
            return a
    return None


def _topk(op: Operation, lengths: LengthFacts) -> Edits:
    """`topk` along a length must take fewer than the shortest length."""
    axis = (ints(op, "axis") or [-1])[0] % op.x.rank
    column, k = lengths.columns(op.x)[axis], constant(op.k)
    if not varies(column):
        return {}
    if k is None or k >= min(column):
        raise refused(f"it takes the first {k} of {column[0]} places", op)
    return {}


def _squeeze(op: Operation, lengths: LengthFacts) -> Edits:
    """Axes are named, because an axis of length 1 may be longer at other sizes."""
    if op.inputs.get("axes") is not None:
        return {}
    return {Operand("axes"): NumberEdit(tuple(a for a, d in enumerate(op.x.shape) if d == 1))}


def _concat(op: Operation, lengths: LengthFacts) -> Edits:
    """A join with what varies makes a length of its own; constants that may fill up to a length are refused."""
    (axis,) = ints(op, "axis")
    at = axis % op.values[0].rank
    columns = [lengths.columns(v)[at] for v in op.values]
    if any(c in lengths.merged for c in columns):
        lengths.merged[tuple(map(sum, zip(*columns, strict=True)))] = ()
    for var in op.values:
        if any(map(varies, columns)) and var in lengths.still and var.shape[at] > 1:
            value = evaluate_static(var)
            if value is None or not np.any(value):
                raise refused(f"%{var.name} may fill up to a length", op)
    return {}


# ---------------------------------------------------------------- factors that are computed from a length


def _note_sums(op: Operation, lengths: LengthFacts) -> None:
    """Note which values are sums over positions, and which constant factors values have.

    Raises:
        Refused: what is summed has a factor already that may be computed from the length.
    """
    out = op.outputs[0]
    summed = [(var, axis) for equal in _equal_axes(op) if equal.summed for var, _, axis in equal.axes]
    if op.op_type in REDUCTIONS | {"cumsum"}:
        axes = [a % op.x.rank for a in ints(op, "axes") or ints(op, "axis")] or [*range(op.x.rank)]
        summed += [(op.x, axis) for axis in axes]
    over = {column for var, axis in summed if varies(column := lengths.columns(var)[axis])}
    before = {f for _, v in operands(op) for f in lengths.factors.get(v, ())}
    for column in over:
        if any(is_made_of(factor, column[0]) for factor in before):
            raise refused(f"what it sums over {column[0]} places is multiplied by a part of that", op)
    if op.op_type in PASSING:
        over |= {column for _, v in operands(op) for column in lengths.sums.get(v, ())}
    if over:
        lengths.sums[out] = over
    own = {factor for factor in (number(op.inputs.get(n)) for n in ("x", "y")) if factor}
    if op.op_type in ("mul", "real_div") and own:
        lengths.factors[out] = before | own
    elif before and op.op_type in PASSING:
        lengths.factors[out] = before


def _factor_edit(op: Operation, lengths: LengthFacts) -> Edits:
    """The factor 1/n, n/(n-1) or n of a sum over n positions changes with n."""
    sums = {column for v in (op.x, op.y) for column in lengths.sums.get(v, ())}
    for operand, var in _indexed_operands(op):
        factor = number(var) if operand.name in ("x", "y") else None
        near = next((column for column in sums if factor and is_made_of(factor, column[0])), None)
        if near is None or factor is None:
            continue
        form = _factor_form(op.op_type, operand, factor, near)
        if not form or len(sums) > 1:
            reason = f"the factor {factor:g} of a sum over {near[0]} places may be made of their number"
            raise refused(reason, op)
        return {operand: FactorEdit(near, dtype_name(var), form)}
    return {}


def _factor_form(op_type: str, operand: Operand, factor: float, length: AxisLengths) -> str:
    """Return which form of `FactorEdit` a factor has, of a sum over n positions; "" for another one."""
    n = length[0]
    if op_type == "real_div":
        return "number" if factor == n and operand.name == "y" else ""
    if math.isclose(factor, 1 / n, rel_tol=1e-3):
        return "part"
    # it turns a mean of squares into a sample variance
    is_correction = n > 2 and factor != 1 and math.isclose(factor, n / (n - 1), rel_tol=5e-4)
    return "corrected" if is_correction and min(length) > 1 else ""


def is_made_of(factor: float, length: int) -> bool:
    """Return whether a number may be computed from a length n: n, 1/n, sqrt(n), n+-1, or n/(n-1)."""
    n = float(length)
    numbers = [n, math.sqrt(n), n - 1, n + 1]
    candidates = [*numbers, *(1 / m for m in numbers if m), *((n / (n - 1), (n - 1) / n) if n > 1 else ())]
    return any(math.isclose(abs(factor), w, rel_tol=1e-3) for w in candidates if w != 1)


PASSING = names(
    "add cast expand_dims identity mul real_div reduce_mean reduce_sum reshape slice_by_index squeeze sub "
    "transpose"
)
"""Ops whose result is a sum over positions if an operand is one."""
WINDOWED = names("avg_pool conv max_pool l2_pool")
WITHOUT_LENGTHS = names(
    "argsort band_part cumsum depth_to_space einsum expand_dims linear matmul pixel_shuffle pixel_unshuffle "
    "prelu reduce_argmax reduce_argmin reverse scaled_dot_product_attention shape softmax space_to_depth stack "
    "transpose"
)
"""Ops that hold no length themselves, with those of whole families."""

Rule: TypeAlias = "Callable[[Operation, LengthFacts], Edits]"
RULES: Mapping[str, Rule] = {
    **dict.fromkeys(POINTWISE | NORMS | REDUCTIONS | RECURRENT | WITHOUT_LENGTHS, _no_edits),
    **dict.fromkeys(names("mul real_div"), _factor_edit),
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
    **dict.fromkeys(names("gather gather_along_axis"), _gather),
    "gather_nd": _gather_nd,
    "topk": _topk,
    "squeeze": _squeeze,
    "concat": _concat,
}
"""Op type -> the rule that returns its edits."""


DEPTH = 16
"""The most ops between a recurrent layer and a slice of its steps, such as transposes and concats. A choice:
two stacked layers have six."""


def steps_of(var: Var, axis: int, depth: int = DEPTH) -> Operation | None:
    """Return the forward recurrent layer whose time steps lie along an axis; None where there is none."""
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
