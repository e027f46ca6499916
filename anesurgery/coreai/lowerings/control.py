"""Lower control flow, recurrent layers, states, and lists, which become tensors of their elements along axis 0.

A recurrent layer is the interpreter's formula, with its steps written out or, if they are many, as a loop. Of a
lowering's parameters, `op`, `writer` and `mode` are passed by name (`table`); the others are inputs of the op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from anesurgery.coreai.lowerings import TABLE, Mode, as_interpreted, lowers
from anesurgery.coreai.lowerings.indexing import replace_slice, take
from anesurgery.coreai.toolkit import ops
from anesurgery.coreai.values import TORCH, Value, array, call, concat, known_ints, stack
from anesurgery.coreai.values import indices as as_indices
from anesurgery.errors import NotExpressible
from anesurgery.interpret.ops import recurrent
from anesurgery.mil import Operation

Values = list[Value]


def _yield(values: Sequence[Value], types: Sequence[Any]) -> None:
    """End a block with results in the types that the op needs."""
    ops.yield_([value.refined(kind.shape).node for value, kind in zip(values, types, strict=True)])


def _as_values(results: Any, count: int) -> Values:
    return [Value(results)] if count == 1 else [Value(node) for node in results]  # a single one comes bare


def loop(
    initial: Sequence[Value], goes_on: Callable[[Values], Value], step: Callable[[Values], Values]
) -> Values:
    """Write a loop: `step` runs while `goes_on` of the values is true; return the last values."""
    nodes = [value.node for value in initial]
    types = [node.type for node in nodes]
    results, (before, after) = ops.while_(results=types, inits=nodes)
    with before:
        test = goes_on([Value(v) for v in before.arguments])
        ops.condition(test.as_scalar().node, *before.arguments)
    with after:
        _yield(step([Value(v) for v in after.arguments]), types)
    return _as_values(results, len(types))


@lowers("while_loop")
def while_loop(op: Operation, writer: Any, loop_vars: Sequence[Value]) -> Values:
    """Write both blocks of a loop: the condition and the body."""
    goes_on, body = op.blocks
    return loop(loop_vars, lambda v: writer.block(goes_on, v)[0], lambda v: writer.block(body, v))


@lowers("cond")
def cond(op: Operation, writer: Any, pred: Value) -> Values:
    """Write both branches."""
    types = [writer.type_of(var) for var in op.outputs]
    test = pred.cast("bool").as_scalar()
    results, sides = ops.if_(results=types, condition=test.node)
    for side, block in zip(sides, op.blocks, strict=True):
        with side:
            _yield(writer.block(block, []), types)
    return _as_values(results, len(types))


@lowers("coreml_update_state", "write_state")
def update_state(op: Operation, writer: Any, state: Any, value: Value) -> Value:
    """Note the new value of a state (`op.state`), which the function returns at its end."""
    if writer.depth:
        raise NotExpressible("a state that is written inside of a condition or a loop")
    writer.states[op.state] = value
    return value


@lowers("make_list")
def make_list(
    mode: Mode, init_length: Any = 1, elem_shape: Any = (), dtype: str = "fp32", dynamic_length: bool = True
) -> Value:
    """Write a list as zeros, one row for each element, whether its length may grow or not.

    `elem_shape` is one value, a list of values and numbers, or () for scalars.
    """
    parts = elem_shape if isinstance(elem_shape, (list, tuple)) else [elem_shape]
    shape = [length for part in (init_length, *parts) for length in known_ints(part, "the shape of a list")]
    return array(0, mode.dtype(dtype)).broadcast(shape)


@lowers("list_scatter")
def list_scatter(ls: Value, indices: Value, value: Value) -> Value:
    """Write a list with other elements at some places."""
    return call("scatter_nd", ls, indices.cast("int32").expand([1]), value)


TABLE |= {
    "list_write": lambda ls, index, value: list_scatter(ls, index.reshape([1]), value.expand([0])),
    "list_read": lambda ls, index: take(ls, index.cast("int32").as_scalar(), 0),
    "list_gather": lambda ls, indices: take(ls, indices.cast("int32"), 0),
    "list_length": lambda ls: ls.lengths().along(0, 0, 1).squeeze([0]),
    "read_state": lambda op, writer, input: writer.states[op.input],
}


WRITTEN_OUT = 32
"""The most steps that are written out. A choice: no engine runs a loop, and a step takes about 12 ops."""

Step = Callable[[Value, Values], Values]


def _all_steps(rows: Value, states: Values, step: Step) -> tuple[Value, Values]:
    """Return (outputs of all steps, in order; last states)."""
    if not 0 <= rows.shape[0] <= WRITTEN_OUT:  # a dynamic length is -1
        return _loop(rows, states, step)
    outputs = []
    for row in rows.chunk(rows.shape[0]):
        states = step(row.squeeze([0]), states)
        outputs.append(states[0])
    return stack(outputs, 0), states


def _loop(rows: Value, states: Values, step: Step) -> tuple[Value, Values]:
    """Write the steps as a loop that stores each output in a buffer."""
    length = rows.lengths().along(0, 0, 1)
    shape: Any = [rows.shape[0], *states[0].shape]  # gives the buffer a static type
    if rows.shape[0] < 0:
        shape = concat([length, as_indices(states[0].fixed_lengths())], 0)
    buffer = array(0, states[0].dtype).broadcast(shape)

    def advance(values: Values) -> Values:
        at, written, *inner = values
        inner = step(take(rows, at, 0), inner)
        return [at + 1, replace_slice(written, at, inner[0].expand([0])), *inner]

    initial = [array(0, "int32"), buffer, *states]
    _, outputs, *last = loop(initial, lambda v: length.squeeze([0]) > v[0], advance)
    return outputs, last


TORCH[recurrent.walk] = _all_steps  # what a call of the interpreter's loop over steps writes instead
as_interpreted("rnn", "gru", "lstm")
