"""Loops whose round is a step of a recurrent network, recognised by the gates of the step."""

from __future__ import annotations

from fractions import Fraction

from anesurgery.mil import Operation, Var, is_stored, np_dtype, reads
from anesurgery.ops import PRODUCTS, names
from anesurgery.semantics.reading import elements

GATES = names("sigmoid sigmoid_hard")
NEW_VALUES = names("tanh scaled_tanh relu")
GATED = {Fraction(2): "a GRU", Fraction(3, 2): "an LSTM"}
"""Numbers of gates for each new value: a GRU has two gates and a new state, an LSTM three, a new cell and the
tanh of the cell. Layers of one kind in one loop have the ratio of one."""
HANDED_ON = {
    **dict.fromkeys(("cast", "expand_dims", "squeeze", "reshape", "identity"), "x"),
    **dict.fromkeys(("scatter", "scatter_nd"), "updates"),
    "list_write": "value",
}
"""Ops that hand a new state on to the next round -> the operand that holds it."""


def recurrent_step(op: Operation) -> str:
    """The network of which a round of a `while_loop` is a step, as "a GRU"; "" where it is none."""
    if op.op_type != "while_loop":
        return ""
    body = op.blocks[1]
    if any(inner.blocks for inner in body.operations):  # a step has no loop of its own
        return ""
    of_state = {v for v in body.inputs if np_dtype(v).kind == "f"}
    summed, gates, new = set[Var](), 0, 0
    for inner in body.operations:
        read = set(reads(inner))
        if not read & of_state:
            continue
        of_state |= set(inner.outputs)
        if read & summed or (inner.op_type in PRODUCTS and any(map(is_stored, read))):
            summed |= set(inner.outputs)
        if inner.op_type in GATES | NEW_VALUES and inner.x in summed:
            count = elements(inner.outputs[0])
            gates, new = (gates + count, new) if inner.op_type in GATES else (gates, new + count)
    if not new or not summed & set(body.outputs):
        return ""
    if gates:
        return GATED.get(Fraction(gates, new), "")
    return "a simple RNN" if any(_is_new(v) for v in body.outputs) else ""


def _is_new(var: Var) -> bool:
    """Is a value that the next round gets an activation, as it is?"""
    while (op := var.op) is not None and op.op_type in HANDED_ON:
        var = op.inputs[HANDED_ON[op.op_type]]
    return op is not None and op.op_type in NEW_VALUES
