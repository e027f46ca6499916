"""Lower recurrent layers: the interpreter's formulas, with steps written out or, if many, as a loop."""

from __future__ import annotations

from collections.abc import Callable

from anesurgery.coreai.lowerings.control import Values, loop
from anesurgery.coreai.lowerings.indexing import replace_slice, take
from anesurgery.coreai.table import as_interpreted
from anesurgery.coreai.values import TORCH, Value, array, concat, indices, stack
from anesurgery.interpret.ops import recurrent

WRITTEN_OUT = 32
"""The most steps that are written out. A choice: no engine runs a loop, and a step takes about 12 ops."""

Step = Callable[[Value, Values], Values]


def _all_steps(rows: Value, states: Values, step: Step) -> tuple[Value, Values]:
    """Return (outputs of all steps, in order; last states)."""
    if not 0 <= rows.shape[0] <= WRITTEN_OUT:
        return _loop(rows, states, step)
    outputs = []
    for row in rows.chunk(rows.shape[0]):
        states = step(row.squeeze([0]), states)
        outputs.append(states[0])
    return stack(outputs, 0), states


def _loop(rows: Value, states: Values, step: Step) -> tuple[Value, Values]:
    """Write the steps as a loop that stores each output in a buffer."""
    length = rows.lengths().along(0, 0, 1)
    shape = concat([length, indices(states[0].fixed_lengths())], 0)
    buffer = array(0, states[0].dtype).broadcast(
        shape if rows.shape[0] < 0 else [rows.shape[0], *states[0].shape]
    )

    def advance(values: Values) -> Values:
        at, written, *inner = values
        inner = step(take(rows, at, 0), inner)
        return [at + 1, replace_slice(written, at, inner[0].expand([0])), *inner]

    _, outputs, *last = loop(
        [array(0, "int32"), buffer, *states], lambda v: length.squeeze([0]) > v[0], advance
    )
    return outputs, last


TORCH[recurrent.walk] = _all_steps
as_interpreted("rnn", "gru", "lstm")
