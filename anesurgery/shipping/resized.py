"""A function of fixed shapes becomes one of dynamic shapes, which takes the sizes that are wanted.

It is followed at all these sizes at once, op by op. What an op says of lengths is found by
`length_edits`, and put right at each size, so that the types of all results can be inferred there. Then
the same is done to the function that is given back, where lengths are read from the shapes of the inputs, and
tables are cut from those of the largest size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from anesurgery.errors import PassError, Refusal, Refused, SurgeryError
from anesurgery.files.joining import default_function
from anesurgery.files.package import Loaded
from anesurgery.loading import clone
from anesurgery.mil import (
    Function,
    Operation,
    Var,
    as_scratch,
    function_of,
    is_constexpr,
    is_stored,
    mb,
    new_symbol,
    operands,
    remove_operand,
    types,
)
from anesurgery.ops import CONTROL, LISTS, RANDOM, STATEFUL
from anesurgery.rewriting.graph_edits import infer, set_type
from anesurgery.shipping.length_edits import (
    Absent,
    Column,
    Edits,
    Lengths,
    Numbers,
    Rows,
    Share,
    Unmarked,
    edits,
    varies,
)
from anesurgery.shipping.meeting_axes import Operand

MOST_MARKS = 1000
"""Numbers that turn out to be lengths, one after the other: more than models have, so that an error ends."""


@dataclass
class Resized:
    """What was found at all sizes.

    Attributes:
        columns: value -> the lengths of each axis.
        edits: op -> what it says at other lengths.
        assumed: what the numbers of the model do not show.
    """

    columns: dict[str, list[Column]] = field(default_factory=dict)
    edits: dict[str, Edits] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()


def followed(worlds: Sequence[Function], wanted: Sequence[Mapping[str, Sequence[int]]]) -> Resized | Refusal:
    """What of a function says lengths, by following it at several sizes at once.

    Args:
        worlds: copies of the function; the first stays as it is, the others are edited.
        wanted: for each of the others, the shapes of the inputs that are given.
    """
    try:
        return _Walk(worlds, wanted).result()
    except Refused as refused:
        return _reason(refused)


class _Walk:
    """One walk through the copies."""

    def __init__(self, worlds: Sequence[Function], wanted: Sequence[Mapping[str, Sequence[int]]]) -> None:
        self.worlds = worlds
        for function in worlds[1:]:
            as_scratch(function)
        for function, shapes in zip(worlds[1:], wanted, strict=True):
            for name, shape in shapes.items():
                var = function.inputs[name]
                set_type(var, types.tensor(var.dtype, [int(n) for n in shape]))
        self.vars = [
            {v.name: v for v in (*f.inputs.values(), *(o for op in f.operations for o in op.outputs))}
            for f in worlds
        ]
        self.ops = [list(f.operations) for f in worlds]
        self.place = {op: i for i, op in enumerate(self.ops[0])}
        self.follows = Lengths(self.column, count=len(worlds))
        self.edits: dict[str, Edits] = {}

    def column(self, var: Var, axis: int) -> Column:
        """The lengths of an axis."""
        return tuple(int(there[var.name].shape[axis]) for there in self.vars)

    def result(self) -> Resized:
        """Follow all ops.

        Raises:
            Refused: one cannot have another length.
        """
        base = self.worlds[0]
        for var in base.inputs.values():
            self._check_single(var)
        i = marks = 0
        while i < len(self.ops[0]):
            try:
                self._step(i)
                i += 1
            except Unmarked as unmarked:
                marks += 1
                i = self._mark(unmarked)
            if marks > MOST_MARKS:
                raise Refused(Refusal("too many of its numbers turn out to be lengths", self.ops[0][i]))
        for refusal in self.follows.open.values():
            raise Refused(refusal)
        columns = {v.name: self.follows.columns(v) for v in (*base.inputs.values(), *_results(base))}
        return Resized(
            columns, {n: e for n, e in self.edits.items() if e}, tuple(self.follows.assumed.values())
        )

    def _mark(self, unmarked: Unmarked) -> int:
        """Note numbers that are lengths; the place of the first op that says one."""
        for (op, operand, axis), column in unmarked.marks.items():
            held = self.follows.marks.setdefault(op.name, {})
            if held.setdefault((operand, axis), column) != column:
                raise Refused(Refusal("one of its numbers stands for several lengths", op))
        return min(self.place[op] for op, _, _ in unmarked.marks)

    def _step(self, i: int) -> None:
        """Follow one op in all copies."""
        op = self.ops[0][i]
        if is_stored(op.outputs[0]) or is_constexpr(op):
            self.follows.still.update(op.outputs)
            return
        if op.op_type in CONTROL | LISTS | STATEFUL | RANDOM:
            raise Refused(Refusal(f"{op.op_type} is not followed at another length", op))
        if all(v in self.follows.still for _, v in operands(op)):
            self.follows.still.update(op.outputs)
            return
        self.edits[op.name] = edits(op, self.follows)
        for w in range(1, len(self.worlds)):
            self._apply(self.worlds[w], self.ops[w][i], self.edits[op.name], w)
        for var in op.outputs:
            self._check_single(var)

    def _apply(self, function: Function, op: Operation, changes: Edits, world: int) -> None:
        with function:
            kept = {operand: edit for operand, edit in changes.items() if not isinstance(edit, Absent)}
            _change(op, changes, {operand: _fixed(op, edit, world) for operand, edit in kept.items()})
            try:
                infer(op)
            except PassError as error:
                if why := [r for (v, _), r in self.follows.open.items() if v.name == op.outputs[0].name]:
                    raise Refused(why[0]) from error
                shapes = " and ".join("x".join(map(str, v.shape)) for _, v in operands(op) if v.rank)
                raise Refused(Refusal(f"it cannot read {shapes}: {error.__cause__}", op)) from error
        for var, axis in self.follows.open:
            if var.name == op.outputs[0].name:  # as long as it says, until it turns out to be a length
                shape = op.outputs[0].shape
                set_type(
                    op.outputs[0],
                    types.tensor(op.outputs[0].dtype, (*shape[:axis], var.shape[axis], *shape[axis + 1 :])),
                )

    def _check_single(self, var: Var) -> None:
        """An axis of length 1 is repeated where it meets a longer one, so that it cannot be followed."""
        for axis, column in self.follows.varying(var).items():
            self.follows.bases.add(column[0])
            if column[0] == 1:
                raise Refused(
                    Refusal(
                        f"axis {axis} of %{var.name} is 1 long, and cannot be told from one that is repeated; "
                        "convert the model at a larger size"
                    )
                )


def _results(function: Function) -> list[Var]:
    return [v for op in function.operations for v in op.outputs]


def _fixed(op: Operation, edit: Numbers | Rows | Share, world: int) -> Var:
    """What an op reads at one size."""
    if isinstance(edit, Rows):
        cut = [slice(edit.axes[a][world] if a in edit.axes else None) for a in range(edit.whole.ndim)]
        return mb.const(val=np.ascontiguousarray(edit.whole[tuple(cut)]), before_op=op)
    if isinstance(edit, Share):
        value = np.float32(edit.of(edit.length[world]))
        return mb.const(
            val=value.astype(types.nptype_from_builtin(types.string_to_builtin(edit.dtype))), before_op=op
        )
    return mb.const(
        val=_numbers(edit, [n if isinstance(n, int) else n[world] for n in edit.values]), before_op=op
    )


def _numbers(edit: Numbers, values: Sequence[int]) -> Any:
    """A parameter of whole numbers, or of booleans."""
    return (
        np.int32(values[0])
        if edit.scalar
        else np.array(values, bool if values and type(values[0]) is bool else np.int32)
    )


def _change(op: Operation, changes: Edits, new: Mapping[Operand, Var]) -> None:
    """Give an op other inputs, and take away those that say what the others say."""
    for (name, _), edit in changes.items():
        if isinstance(edit, Absent) and op.inputs.get(name) is not None:
            remove_operand(op, name)
    if new:
        op.set_inputs(no_check_var_types=True, **_replaced(op, new))


def _replaced(op: Operation, new: Mapping[Operand, Var]) -> dict[str, Any]:
    """The inputs of an op with others in some places."""
    changed: dict[str, Any] = {}
    for (name, i), var in new.items():
        value = changed.get(name, op.inputs.get(name))
        changed[name] = (*value[:i], var, *value[i + 1 :]) if isinstance(value, (list, tuple)) else var
    return changed


def resize(function: Function, resized: Resized) -> Refusal | None:
    """Let a function take all sizes at which it was followed; a reason where a length is not there in time."""
    try:
        _Emitter(function, resized).run()
    except Refused as refused:
        return _reason(refused)
    return None


def _reason(refused: Refused) -> Refusal:
    """The reason that was raised."""
    return refused.args[0]


class _Emitter:
    """What writes how lengths are read."""

    def __init__(self, function: Function, resized: Resized) -> None:
        self.function, self.resized = function, resized
        self.symbols: dict[Column, Any] = {}
        self.holders: dict[Column, tuple[Var, int]] = {}
        self.lengths: dict[Column, Var] = {}

    def run(self) -> None:
        """Write all edits, and give every value its type."""
        for var in self.function.inputs.values():
            self._type(var)
        with self.function:  # once: coremltools follows the whole function each time that it is left
            for op in list(self.function.operations):
                changes = self.resized.edits.get(op.name, {})
                kept = {o: edit for o, edit in changes.items() if not isinstance(edit, Absent)}
                _change(op, changes, {o: self._built(op, o, edit) for o, edit in kept.items()})
                for var in op.outputs:
                    self._type(var)

    def _type(self, var: Var) -> None:
        """A symbol for each length that differs between sizes."""
        columns = self.resized.columns.get(var.name, [])
        longer = {a: c for a, c in enumerate(columns) if varies(c)}
        if not longer:
            return
        shape = [self._symbol(longer[a]) if a in longer else int(n) for a, n in enumerate(var.shape)]
        set_type(var, types.tensor(var.dtype, shape))
        for axis, column in longer.items():
            self.holders.setdefault(column, (var, axis))

    def _symbol(self, column: Column) -> Any:
        return self.symbols.setdefault(column, new_symbol())

    def _built(self, op: Operation, operand: Operand, edit: Numbers | Rows | Share) -> Var:
        """What an op reads, at whatever length."""
        name = f"{op.name}_{operand[0]}_{operand[1]}_at_length"
        if isinstance(edit, Rows):
            return self._cut(op, edit, name)
        if isinstance(edit, Share):
            number = mb.cast(x=self._length(op, edit.length), dtype="fp32", before_op=op, name=f"{name}_n")
            if edit.form != "number":
                number = self._part(op, number, edit.form, name)
            return mb.cast(x=number, dtype=edit.dtype, before_op=op, name=f"{name}_cast")
        if edit.scalar and not isinstance(edit.values[0], int):
            return self._length(op, edit.values[0])
        if not any(map(varies, edit.values)):
            return mb.const(
                val=_numbers(edit, [n for n in edit.values if isinstance(n, int)]), before_op=op, name=name
            )
        return self._vector(op, edit.values, name)

    def _part(self, op: Operation, number: Var, form: str, name: str) -> Var:
        """The number 1 / n, or n / (n - 1)."""
        if form == "part":
            return mb.real_div(x=np.float32(1), y=number, before_op=op, name=f"{name}_part")
        less = mb.sub(x=number, y=np.float32(1), before_op=op, name=f"{name}_less")
        return mb.real_div(x=number, y=less, before_op=op, name=f"{name}_corrected")

    def _cut(self, op: Operation, edit: Rows, name: str) -> Var:
        """The first rows of a table."""
        ends = [edit.axes.get(a, n) for a, n in enumerate(edit.whole.shape)]
        rows = mb.slice_by_index(
            x=edit.whole,
            begin=np.zeros(edit.whole.ndim, np.int32),
            end=self._vector(op, ends, f"{name}_end"),
            end_mask=[a not in edit.axes for a in range(edit.whole.ndim)],
            before_op=op,
            name=f"{name}_rows",
        )
        shape = [self._symbol(edit.axes[a]) if a in edit.axes else n for a, n in enumerate(edit.whole.shape)]
        set_type(rows, types.tensor(rows.dtype, shape))
        return rows

    def _vector(self, op: Operation, values: Sequence[int | Column], name: str) -> Var:
        """Numbers side by side, some of them lengths."""
        parts = [self._length(op, n) if isinstance(n, tuple) and varies(n) else _first(n) for n in values]
        return mb.concat(values=tuple(parts), axis=0, before_op=op, name=name)

    def _length(self, op: Operation, column: Column) -> Var:
        """A length, read from the first value that has it.

        Raises:
            Refused: no value before the op has it.
        """
        if column in self.lengths:
            return self.lengths[column]
        if column not in self.holders:
            self.lengths[column] = self._derived(op, column)
            return self.lengths[column]
        var, axis = self.holders[column]
        shape = mb.shape(x=var, before_op=op, name=f"{op.name}_shape_{len(self.lengths)}")
        length = mb.gather(
            x=shape, indices=np.int32(axis), axis=0, before_op=op, name=f"{op.name}_length_{len(self.lengths)}"
        )
        self.lengths[column] = length
        return length

    def _derived(self, op: Operation, column: Column) -> Var:
        """A length that is another one times or by a number, and some more.

        Raises:
            Refused: there is none.
        """
        name = f"{op.name}_length_of"
        for other in self.holders:
            for times in range(1, column[0] // other[0] + 1):
                more = column[0] - times * other[0]
                if tuple(times * n + more for n in other) == column:
                    length = self._length(op, other)
                    if times > 1:
                        length = mb.mul(x=length, y=np.int32(times), before_op=op, name=f"{name}_times")
                    return mb.add(x=length, y=np.int32(more), before_op=op, name=name) if more else length
            for part in range(2, other[0] // column[0] + 2):
                if tuple(n // part for n in other) == column:
                    return mb.floor_div(x=self._length(op, other), y=np.int32(part), before_op=op, name=name)
        raise Refused(Refusal(f"it needs a length, {column[0]} here, that no value before it has", op))


def _first(number: int | Column) -> Any:
    return np.int32(number if isinstance(number, int) else number[0])


# A model of one fixed size, made to take the sizes that are wanted.

REFUSED = "sizes: this model of one size cannot be made another"
REMEDY = (
    "give the PyTorch module, a function that converts it at each size, or a model that was converted with a "
    "range of lengths"
)


def lengthened(
    loaded: Loaded, wanted: Sequence[Mapping[str, tuple[int, ...]]]
) -> tuple[Loaded, tuple[str, ...]]:
    """A copy of a model that has dynamic axes where the sizes differ from its own.

    Args:
        loaded: a model of fixed shapes.
        wanted: the shapes of inputs at each size.

    Returns:
        The copy, and what is assumed of numbers that may be read in several ways.

    Raises:
        SurgeryError: an op cannot be another size, or that cannot be told; says which and why.
    """
    name = default_function(loaded)
    copies = [function_of(clone(loaded).program, name) for _ in range(len(wanted) + 1)]
    for shapes in wanted:
        _check_ranks(copies[0], shapes)
    resized = followed(copies, wanted)
    if isinstance(resized, Refusal):
        raise SurgeryError(f"{REFUSED}: {resized}; {REMEDY}")
    copied = replace(clone(loaded), spec=_ranged(loaded.spec, wanted))
    refusal = resize(function_of(copied.program, name), resized)
    if refusal is not None:
        raise SurgeryError(f"{REFUSED}: {refusal}; {REMEDY}")
    return copied, resized.assumed


def _ranged(spec: Any, wanted: Sequence[Mapping[str, tuple[int, ...]]]) -> Any:
    """A specification whose inputs take all sizes between the least and the largest; None for none."""
    if spec is None:
        return None
    ranged = type(spec)()
    ranged.CopyFrom(spec)
    for feature in ranged.description.input:
        ends = [
            (min(axis), max(axis))
            for axis in zip(*(s[feature.name] for s in wanted if feature.name in s), strict=True)
        ]
        if ends and feature.type.WhichOneof("Type") == "multiArrayType":
            sizes = feature.type.multiArrayType.shapeRange.sizeRanges
            for low, high in ends:
                sizes.add(lowerBound=low, upperBound=high)
        elif ends and feature.type.WhichOneof("Type") == "imageType":
            pixels = feature.type.imageType.imageSizeRange
            for side, (low, high) in zip((pixels.heightRange, pixels.widthRange), ends[-2:], strict=True):
                side.lowerBound, side.upperBound = low, high
    for feature in ranged.description.output:
        if feature.type.WhichOneof("Type") == "multiArrayType":
            feature.type.multiArrayType.ClearField("shape")
    return ranged


def _check_ranks(function: Function, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Each input keeps its number of axes.

    Raises:
        SurgeryError: one does not.
    """
    for name, shape in shapes.items():
        own = tuple(function.inputs[name].shape)
        if len(own) != len(shape):
            raise SurgeryError(
                f"sizes: {name} has {len(own)} axes, as in {own}, and the shape given is {shape}"
            )
