"""Compute everything that depends only on the position in a function of its own, once for each call.

The masks, cosines, sines and indices of a decoder become inputs of `prefill` and `decode`. The function
`decode_inputs` reads `position` and returns all of them, under the names of those inputs; `anesurgery.generate`
calls it before `decode`. A boolean is passed as 0 or 1, and a shorter integer as int32.

`lookup=True` moves the embedding lookup there as well: `decode_inputs` also reads the tokens, and `decode` gets
their rows. In a model cut into chunks, this function is placed in the chunk of the head, which reads the same
table if both are tied, so the table is stored once. If that head was cut by vocabulary, each part is looked up,
and the row of the part that holds the token is taken.

Refuses when no function has an input `position`, when no op depends on the position only, and below iOS 18,
where a model has a single function.

Why it helps: int32 arithmetic and slices at a run-time position run on the CPU (measured, M4, macOS 27.0.1, by
751K/Apple-Neural-Engine-Microarchitecture-Study-M6); between the layers of a decoder each of them costs two
switches. What the pass gains in time was not measured.

Grade: none: the interface changes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery import interpret
from anesurgery.authoring import Function, Pass, Program, Refusal, Session, Var, mb
from anesurgery.files.copying import copy_program
from anesurgery.interpret.decoder_calls import INPUTS
from anesurgery.interpret.decoding import replay
from anesurgery.interpret.state import POSITION


@dataclass(frozen=True)
class PositionFunction(Pass):
    """Masks, tables and places at a position as inputs, and a function that makes them."""

    name = "position_function"
    essential = True
    follows = ("add_cache", "masked_write", "one_hot_lookup", "cache_as_io")
    lookup: bool = False
    """Look the embeddings of tokens up there too?"""

    def requires(self, program: Program) -> Refusal | None:
        """Refuse programs without a position, or older than iOS 18."""
        functions = list(program.functions.values())
        if not any(POSITION in f.inputs for n, f in program.functions.items() if not n.endswith(INPUTS)):
            return Refusal(f"no function has an input {POSITION!r}; add_cache makes one")
        if any(f.opset_version < an.ct.target.iOS18 for f in functions):
            return Refusal("several functions came with iOS 18; convert with minimum_deployment_target=iOS18")
        return None

    def run(self, program: Program, session: Session) -> None:
        """Add, for each function that reads a position, one that computes its inputs."""
        copies = copy_program(program).functions
        for name, function in [(n, f) for n, f in program.functions.items() if not n.endswith(INPUTS)]:
            moved = _moved_values(function, self.lookup)
            new_name = f"{name}{INPUTS}"
            if not moved:
                session.refuse(self.name, f"no op of {name} depends on the position only")
                continue
            names = [v.name for v in moved]
            with an.GraphEdits(self, session, copies[name]) as edits:
                _look_up_in_parts(edits, names)
                _return_only(edits, names)
            read = list(copies[name].inputs)
            program.add_function(new_name, copies[name])
            with an.GraphEdits(self, session, function) as edits:
                _turn_into_inputs(edits, moved)
            words = f"call {new_name} with {' and '.join(read)}, and give what it returns to {name}"
            change = an.InterfaceChange(words, (*read, new_name, *names), call=_call)
            session.declare(self.name, name, change, (), (new_name,))


def _call(model: Any, values: an.Values, precision: str) -> an.Values:
    """Call both functions at a position; without a position, call them for all tokens, one by one."""
    if POSITION not in values:
        return replay(model, values, precision)
    name, function = next((n, f) for n, f in model.functions.items() if not n.endswith(INPUTS))
    first = model.functions[f"{name}{INPUTS}"]
    given = {name: value for name, value in values.items() if name in first.inputs}
    outputs = interpret.run(model, given, function=f"{name}{INPUTS}", precision=precision)
    inputs = {n: v for n, v in {**values, **outputs}.items() if n in function.inputs}
    return interpret.run(model, inputs, function=name, precision=precision)


def _moved_values(function: Function, lookup: bool) -> list[Var]:
    """Return the values that depend only on the position and constants, and that other ops or the caller read.

    With `lookup`, these values may depend on integer inputs (tokens) too, if a gather looks rows up with them.
    """
    position = function.inputs.get(POSITION)
    if position is None:
        return []
    of_position, of_tokens, rows = {position}, set[Var](), set[Var]()
    if lookup:
        of_tokens = {v for v in function.inputs.values() if v is not position and an.np_dtype(v).kind in "iu"}
    for op in function.operations:
        sources = {v for _, v in an.operands(op) if an.constant(v) is None and not an.is_stored(v)}
        if not sources or op.blocks or op.op_type in an.ops.IMPURE:
            continue
        if sources <= of_position:
            of_position |= set(op.outputs)
        elif sources <= of_position | of_tokens and all(an.np_dtype(v).kind in "iub" for v in op.outputs):
            of_tokens |= set(op.outputs)
        elif sources <= of_position | of_tokens and op.op_type == "gather":
            rows |= set(op.outputs)
    inside = of_position | of_tokens | rows if rows else of_position
    computed = [v for op in function.operations for v in op.outputs if v in inside]
    return [v for v in computed if an.is_output(v) or any(r.outputs[0] not in inside for r in an.consumers(v))]


def _look_up_in_parts(edits: an.GraphEdits, names: Collection[str]) -> None:
    """Let these lookups read the parts of a table that products read, where they together are the table."""
    for op in [op for op in edits.function.operations if op.op_type == "gather"]:
        old = op.outputs[0]
        if old.name not in names or not an.is_stored(op.x) or op.x.rank != 2 or int(op.axis.val):
            continue
        table = an.decoded(op.x)
        if parts := _parts_of(edits.function, table):
            edits.take_name(old, _joined(edits.last(), op.indices, parts))


def _parts_of(function: Function, table: an.Array) -> list[Any]:
    """Return the weights of products that together are the rows of a table; empty if some are missing."""
    parts, rows = [], 0
    for op in function.operations:
        if op.op_type not in ("linear", "conv") or not an.is_stored(op.weight):
            continue
        weight, plain = op.weight, an.constant(op.weight)
        count, *columns = map(int, weight.shape)
        if np.prod(columns) != table.shape[1] or rows + count > len(table) or count == len(table):
            continue
        if weight.rank > 2 and plain is None:  # packed, in the shape of a kernel
            continue
        if np.array_equal(an.decoded(weight).reshape(count, -1), table[rows : rows + count]):
            parts.append(weight if weight.rank == 2 else plain.reshape(count, -1))
            rows += count
    return parts if rows == len(table) else []


def _joined(mb: an.Builder, tokens: Var, parts: Sequence[Any]) -> Var:
    """Build the rows of tokens, each from the part that holds it; others from the last part."""
    *others, last = parts
    tokens = mb.cast(x=tokens, dtype="int32")
    start = sum(int(part.shape[0]) for part in others)
    in_last = mb.maximum(x=mb.add(x=tokens, y=np.int32(-start)), y=np.int32(0))
    rows: Var = mb.gather(x=last, indices=in_last, axis=0)
    for part in reversed(others):
        count = int(part.shape[0])
        start -= count
        place = mb.add(x=tokens, y=np.int32(-start))
        after = mb.greater_equal(x=place, y=np.int32(0))
        own = mb.logical_and(x=after, y=mb.less(x=place, y=np.int32(count)))
        index = mb.mul(x=place, y=mb.cast(x=own, dtype="int32"))  # 0 for tokens of other parts
        own_rows = mb.gather(x=part, indices=index, axis=0)
        rows = mb.select(cond=mb.expand_dims(x=own, axes=[-1]), a=own_rows, b=rows)
    return rows


def _return_only(edits: an.GraphEdits, names: Collection[str]) -> None:
    """Let a function return these values, and nothing else."""
    function = edits.function
    values = {v.name: v for op in function.operations for v in op.outputs}
    for old in list(function.outputs):
        edits.replace_output(old)
    for name in names:
        edits.new_output(name, _number(edits, values[name]))
    edits.remove_unread()
    for name in [n for n, v in function.inputs.items() if n != POSITION and not an.consumers(v)]:
        edits.drop_input(name)


def _number(edits: an.GraphEdits, var: Var) -> Var:
    """Build a value that a model can return: of a type of outputs, and of one axis at least."""
    number = var
    if (dtype := _passed_as(var)) != an.dtype_name(var):
        number = edits.last().cast(x=var, dtype=dtype, name=f"{var.name}_number")
    if not var.rank:
        number = edits.last().expand_dims(x=number, axes=[0], name=f"{var.name}_axis")
    if number is not var:
        edits.take_name(var, number)
    return number


def _passed_as(var: Var) -> str:
    """Return the type in which a value passes: a boolean as fp16, a shorter integer as int32."""
    dtype, kind = an.dtype_name(var), an.np_dtype(var).kind
    return {"b": "fp16", "i": "int32", "u": "int32"}.get(kind, dtype)


def _turn_into_inputs(edits: an.GraphEdits, values: Collection[Var]) -> None:
    """Let a function read these values as inputs, and drop integer inputs that nothing reads any more."""
    mb = edits.first()
    for old in values:
        dtype, passed, output = an.dtype_name(old), _passed_as(old), an.is_output(old)
        entry = edits.new_input(old.name, old.shape or (1,), an.types.string_to_builtin(passed))
        value = entry if old.rank else mb.squeeze(x=entry, axes=[0], name=f"{old.name}_scalar")
        if passed != dtype:
            word = "truth" if dtype == "bool" else dtype
            value = mb.cast(x=value, dtype=dtype, name=f"{old.name}_{word}")
        edits.replace(old, value)
        if not output:
            edits.take_name(old, entry)
    edits.remove()
    for name, var in list(edits.function.inputs.items()):
        if an.np_dtype(var).kind in "iu" and not an.consumers(var):
            edits.drop_input(name)


@an.example(mb.TensorSpec((1, 4), an.types.fp16), mb.TensorSpec((1,), an.types.int32), opset="iOS18")
def example(x: Var, position: Var) -> Var:
    """A row of learned positions is added."""
    table = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float16)
    begin = mb.concat(values=(position, np.array([0], np.int32)), axis=0, name="begin")
    row = mb.slice_by_size(x=table, begin=begin, size=np.array([1, 4], np.int32), name="row")
    return mb.add(x=x, y=row, name="y")
