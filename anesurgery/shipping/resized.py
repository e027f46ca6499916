"""Turn a function of fixed shapes into one of dynamic shapes that takes all sizes asked for.

`sizes` calls `lengthened` for a model that was converted at one size. Copies of the function are followed op by
op, one at each size: `length_edits` says what to change in an op, and the change is applied to each copy, so
that coremltools infers the shapes there (`_Walk`). Then the same changes are written once, for any length, into
the function that is returned: lengths are read from the shapes of its inputs, and tables are sliced from those
of the largest size (`_Emitter`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from anesurgery.errors import PassError, Refused, SurgeryError
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
from anesurgery.semantics.inference import infer, set_type
from anesurgery.shipping.length_edits import (
    AxisLengths,
    Edits,
    FactorEdit,
    LengthFacts,
    LengthsFound,
    NewValue,
    NumberEdit,
    Operand,
    RemovedParameter,
    TableEdit,
    edits_of,
    refused,
    varies,
)

MOST_MARKS = 1000
"""How often the walk may go back because a number turned out to be a length: more than any model needs."""


@dataclass
class FollowedFunction:
    """What was found by following a function at all sizes."""

    columns: dict[str, list[AxisLengths]] = field(default_factory=dict)
    """Name of a value -> the lengths of each of its axes."""
    edits: dict[str, Edits] = field(default_factory=dict)
    """Name of an op -> what changes in it at other lengths."""
    assumed: tuple[str, ...] = ()
    """Assumptions that the numbers of the model do not prove, in words."""


class _Walk:
    """One walk through the function at all sizes at once, op by op, which finds what must change for them.

    Args:
        copies: copies of the function; the first stays as it is, the others are edited.
        sizes: for each of the other copies, input -> its shape.
    """

    def __init__(self, copies: Sequence[Function], sizes: Sequence[Mapping[str, Sequence[int]]]) -> None:
        self.copies = copies
        for function in copies[1:]:
            as_scratch(function)
        for function, shapes in zip(copies[1:], sizes, strict=True):
            for name, shape in shapes.items():
                var = function.inputs[name]
                set_type(var, types.tensor(var.dtype, [int(n) for n in shape]))
        self.vars = [
            {v.name: v for v in (*f.inputs.values(), *(o for op in f.operations for o in op.outputs))}
            for f in copies
        ]
        self.ops = [list(f.operations) for f in copies]
        self.position_of_op = {op: i for i, op in enumerate(self.ops[0])}
        self.facts = LengthFacts(self.column, count=len(copies))
        self.edits: dict[str, Edits] = {}

    def column(self, var: Var, axis: int) -> AxisLengths:
        """Return the lengths of an axis, in all copies."""
        return tuple(int(there[var.name].shape[axis]) for there in self.vars)

    def result(self) -> FollowedFunction:
        """Follow all ops.

        Raises:
            Refused: an op cannot have another length.
        """
        base = self.copies[0]
        for var in base.inputs.values():
            self._check_single(var)
        i = marks = 0
        while i < len(self.ops[0]):
            try:
                self._step(i)
                i += 1
            except LengthsFound as unmarked:
                marks += 1
                i = self._mark(unmarked)
            if marks > MOST_MARKS:
                raise refused("too many of its numbers turn out to be lengths", self.ops[0][i])
        for refusal in self.facts.open.values():
            raise Refused(refusal)
        values = [*base.inputs.values(), *(v for op in base.operations for v in op.outputs)]
        columns = {v.name: self.facts.columns(v) for v in values}
        return FollowedFunction(
            columns, {n: e for n, e in self.edits.items() if e}, tuple(self.facts.assumed.values())
        )

    def _mark(self, unmarked: LengthsFound) -> int:
        """Note parameters that are lengths; return the index of the first op that has one."""
        for (op, operand, axis), column in unmarked.marks.items():
            held = self.facts.marks.setdefault(op.name, {})
            if held.setdefault((operand, axis), column) != column:
                raise refused("one of its numbers stands for several lengths", op)
        return min(self.position_of_op[op] for op, _, _ in unmarked.marks)

    def _step(self, i: int) -> None:
        """Follow one op in all copies."""
        op = self.ops[0][i]
        if is_stored(op.outputs[0]) or is_constexpr(op):
            self.facts.still.update(op.outputs)
            return
        if op.op_type in CONTROL | LISTS | STATEFUL | RANDOM:
            raise refused(f"{op.op_type} is not followed at another length", op)
        if all(v in self.facts.still for _, v in operands(op)):
            self.facts.still.update(op.outputs)
            return
        self.edits[op.name] = edits_of(op, self.facts)
        for w in range(1, len(self.copies)):
            self._apply(self.copies[w], self.ops[w][i], self.edits[op.name], w)
        for var in op.outputs:
            self._check_single(var)

    def _apply(self, function: Function, op: Operation, changes: Edits, size_index: int) -> None:
        """Apply an op's changes to one copy, and infer the types of its results there."""
        with function:
            _change_inputs(op, changes, lambda _, edit: _operand_at_size(op, edit, size_index))
            try:
                infer(op)
            except PassError as error:
                if why := [r for (v, _), r in self.facts.open.items() if v.name == op.outputs[0].name]:
                    raise Refused(why[0]) from error
                shapes = " and ".join("x".join(map(str, v.shape)) for _, v in operands(op) if v.rank)
                raise refused(f"it cannot read {shapes}: {error.__cause__}", op) from error
        result = op.outputs[0]
        for var, axis in self.facts.open:
            if var.name == result.name:  # as long as it says, until it turns out to be a length
                shape = (*result.shape[:axis], var.shape[axis], *result.shape[axis + 1 :])
                set_type(result, types.tensor(result.dtype, shape))

    def _check_single(self, var: Var) -> None:
        """Check that no axis that varies is 1 long here: it could not be told from a broadcast axis."""
        for axis, column in self.facts.varying(var).items():
            self.facts.bases.add(column[0])
            if column[0] == 1:
                raise refused(
                    f"axis {axis} of %{var.name} is 1 long, and cannot be told from one that is repeated; "
                    "convert the model at a larger size"
                )


def _operand_at_size(op: Operation, edit: NewValue, size_index: int) -> Var:
    """Return the changed operand of an op at one size, as a constant."""
    if isinstance(edit, TableEdit):
        cut = [slice(edit.axes[a][size_index] if a in edit.axes else None) for a in range(edit.table.ndim)]
        value = np.ascontiguousarray(edit.table[tuple(cut)])
    elif isinstance(edit, FactorEdit):
        dtype = types.nptype_from_builtin(types.string_to_builtin(edit.dtype))
        value = np.float32(edit.at(edit.length[size_index])).astype(dtype)
    else:
        value = _as_parameter(edit, [n if isinstance(n, int) else n[size_index] for n in edit.values])
    return mb.const(val=value, before_op=op)


def _as_parameter(edit: NumberEdit, values: Sequence[int]) -> Any:
    """Return integers or booleans as the value of a parameter: a scalar or a vector."""
    if edit.scalar:
        return np.int32(values[0])
    return np.array(values, bool if values and type(values[0]) is bool else np.int32)


def _change_inputs(op: Operation, changes: Edits, operand_of: Callable[[Operand, NewValue], Var]) -> None:
    """Give an op other inputs, which `operand_of` builds, and remove the parameters that the others imply."""
    changed: dict[str, Any] = {}
    for operand, edit in changes.items():
        name, i = operand
        if isinstance(edit, RemovedParameter):
            if op.inputs.get(name) is not None:
                remove_operand(op, name)
            continue
        value, var = changed.get(name, op.inputs.get(name)), operand_of(operand, edit)
        changed[name] = (*value[:i], var, *value[i + 1 :]) if isinstance(value, (list, tuple)) else var
    if changed:
        op.set_inputs(no_check_var_types=True, **changed)


class _Emitter:
    """Writes the ops that read lengths, and the inputs that depend on them."""

    def __init__(self, function: Function, followed: FollowedFunction) -> None:
        self.function, self.followed = function, followed
        self.symbols: dict[AxisLengths, Any] = {}
        self.holders: dict[AxisLengths, tuple[Var, int]] = {}
        """Lengths of an axis -> the first value with such an axis, and the axis."""
        self.lengths: dict[AxisLengths, Var] = {}
        """Lengths of an axis -> the scalar that holds its length at run time."""

    def run(self) -> None:
        """Write all changes, and give every value its dynamic type."""
        for var in self.function.inputs.values():
            self._type(var)
        with self.function:  # once: coremltools follows the whole function each time that it is left
            for op in list(self.function.operations):
                changes = self.followed.edits.get(op.name, {})
                _change_inputs(op, changes, partial(self._operand_at_any_length, op))
                for var in op.outputs:
                    self._type(var)

    def _type(self, var: Var) -> None:
        """Give a value a symbol for each axis that varies."""
        columns = self.followed.columns.get(var.name, [])
        varying = {a: c for a, c in enumerate(columns) if varies(c)}
        if not varying:
            return
        shape = [self._symbol(varying[a]) if a in varying else int(n) for a, n in enumerate(var.shape)]
        set_type(var, types.tensor(var.dtype, shape))
        for axis, column in varying.items():
            self.holders.setdefault(column, (var, axis))

    def _symbol(self, column: AxisLengths) -> Any:
        return self.symbols.setdefault(column, new_symbol())

    def _operand_at_any_length(self, op: Operation, operand: Operand, edit: NewValue) -> Var:
        """Return the changed operand of an op, computed from lengths."""
        name = f"{op.name}_{operand.name}_{operand.position}_at_length"
        if isinstance(edit, TableEdit):
            return self._first_rows(op, edit, name)
        if isinstance(edit, FactorEdit):
            number = mb.cast(x=self._length(op, edit.length), dtype="fp32", before_op=op, name=f"{name}_n")
            if edit.form != "number":
                number = self._inverse_or_correction(op, number, edit.form, name)
            return mb.cast(x=number, dtype=edit.dtype, before_op=op, name=f"{name}_cast")
        if edit.scalar and not isinstance(edit.values[0], int):
            return self._length(op, edit.values[0])
        if not any(map(varies, edit.values)):
            return mb.const(
                val=_as_parameter(edit, [n for n in edit.values if isinstance(n, int)]), before_op=op, name=name
            )
        return self._vector(op, edit.values, name)

    def _inverse_or_correction(self, op: Operation, number: Var, form: str, name: str) -> Var:
        """Return 1 / n, or n / (n - 1)."""
        if form == "part":
            return mb.real_div(x=np.float32(1), y=number, before_op=op, name=f"{name}_part")
        less = mb.sub(x=number, y=np.float32(1), before_op=op, name=f"{name}_less")
        return mb.real_div(x=number, y=less, before_op=op, name=f"{name}_corrected")

    def _first_rows(self, op: Operation, edit: TableEdit, name: str) -> Var:
        """Slice the first rows of a table."""
        ends = [edit.axes.get(a, n) for a, n in enumerate(edit.table.shape)]
        rows = mb.slice_by_index(
            x=edit.table,
            begin=np.zeros(edit.table.ndim, np.int32),
            end=self._vector(op, ends, f"{name}_end"),
            end_mask=[a not in edit.axes for a in range(edit.table.ndim)],
            before_op=op,
            name=f"{name}_rows",
        )
        shape = [self._symbol(edit.axes[a]) if a in edit.axes else n for a, n in enumerate(edit.table.shape)]
        set_type(rows, types.tensor(rows.dtype, shape))
        return rows

    def _vector(self, op: Operation, values: Sequence[int | AxisLengths], name: str) -> Var:
        """Join integers and lengths to a vector."""
        parts = [self._length(op, n) if isinstance(n, tuple) and varies(n) else _as_int32(n) for n in values]
        return mb.concat(values=tuple(parts), axis=0, before_op=op, name=name)

    def _length(self, op: Operation, column: AxisLengths) -> Var:
        """Return a length, read from the first value that has an axis of it.

        Raises:
            Refused: no value before the op has this length.
        """
        if column in self.lengths:
            return self.lengths[column]
        if column not in self.holders:
            self.lengths[column] = self._derived_length(op, column)
            return self.lengths[column]
        var, axis = self.holders[column]
        shape = mb.shape(x=var, before_op=op, name=f"{op.name}_shape_{len(self.lengths)}")
        length = mb.gather(
            x=shape, indices=np.int32(axis), axis=0, before_op=op, name=f"{op.name}_length_{len(self.lengths)}"
        )
        self.lengths[column] = length
        return length

    def _derived_length(self, op: Operation, column: AxisLengths) -> Var:
        """Return a length computed from another one: times or divided by an integer, plus an integer.

        Raises:
            Refused: no other length gives it.
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
        raise refused(f"it needs a length, {column[0]} here, that no value before it has", op)


def _as_int32(number: int | AxisLengths) -> Any:
    return np.int32(number if isinstance(number, int) else number[0])


REFUSED = "sizes: this model has one fixed size, and cannot be converted to another"
REMEDY = (
    "give the PyTorch module, a function that converts it at each size, or a model that was converted with a "
    "range of lengths"
)


def lengthened(
    loaded: Loaded, sizes: Sequence[Mapping[str, tuple[int, ...]]]
) -> tuple[Loaded, tuple[str, ...]]:
    """Return a copy of a model whose axes are dynamic where the sizes differ.

    Args:
        loaded: a model of fixed shapes.
        sizes: for each size, input -> its shape.

    Returns:
        The copy, and assumptions about numbers that can be read in several ways.

    Raises:
        SurgeryError: an op cannot have another size, or can be read in several ways.
    """
    name = default_function(loaded)
    copies = [function_of(clone(loaded).program, name) for _ in range(len(sizes) + 1)]
    for shapes in sizes:
        _check_ranks(copies[0], shapes)
    copied = replace(clone(loaded), spec=_ranged_spec(loaded.spec, sizes))
    for other in [n for n in copied.program.functions if n != name]:
        del copied.program.functions[other]  # it keeps its one size, and the models of the sizes do not have it
    try:
        followed = _Walk(copies, sizes).result()
        _Emitter(function_of(copied.program, name), followed).run()
    except Refused as refused:
        raise SurgeryError(f"{REFUSED}: {refused.args[0]}; {REMEDY}") from refused
    return copied, followed.assumed


def _ranged_spec(spec: Any, sizes: Sequence[Mapping[str, tuple[int, ...]]]) -> Any:
    """Return a specification whose inputs take all sizes from the least to the largest; None for None."""
    if spec is None:
        return None
    ranged = type(spec)()
    ranged.CopyFrom(spec)
    for feature in ranged.description.input:
        ends = [
            (min(axis), max(axis))
            for axis in zip(*(s[feature.name] for s in sizes if feature.name in s), strict=True)
        ]
        if ends and feature.type.WhichOneof("Type") == "multiArrayType":
            ranges = feature.type.multiArrayType.shapeRange.sizeRanges
            for low, high in ends:
                ranges.add(lowerBound=low, upperBound=high)
        elif ends and feature.type.WhichOneof("Type") == "imageType":
            pixels = feature.type.imageType.imageSizeRange
            for side, (low, high) in zip((pixels.heightRange, pixels.widthRange), ends[-2:], strict=True):
                side.lowerBound, side.upperBound = low, high
    for feature in ranged.description.output:
        if feature.type.WhichOneof("Type") == "multiArrayType":
            feature.type.multiArrayType.ClearField("shape")
    return ranged


def _check_ranks(function: Function, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that each input keeps its number of axes."""
    for name, shape in shapes.items():
        own = tuple(function.inputs[name].shape)
        if len(own) != len(shape):
            raise SurgeryError(
                f"sizes: {name} has {len(own)} axes, as in {own}, and the shape given is {shape}"
            )
