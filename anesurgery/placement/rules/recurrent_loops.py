"""Loops that are recurrent networks: what was reported of them, and what straight code is estimated to take."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from anesurgery.facts.dependence import rounds
from anesurgery.mil import Operation, Var, is_stored, is_weight, np_dtype, reads
from anesurgery.ops import POINTWISE, PRODUCTS, names
from anesurgery.placement import cost
from anesurgery.placement.evidence import Grade, Rule, Scope
from anesurgery.placement.inspection import Estimate
from anesurgery.placement.target import Target
from anesurgery.semantics.reading import elements
from anesurgery.semantics.rows import work_of

STAYING = (PRODUCTS | POINTWISE | names("split concat")) - {"cast"}
"""Ops of a round that straight code has too; others count rounds, or read and write rows by their number."""


def stepwise(op: Operation, target: Target) -> str:
    """The network of a loop, its rounds, and the estimates of the loop and of straight code."""
    if not (network := recurrent_step(op)):
        return ""
    if (count := rounds(op)) is None:
        return f"%{op.name} steps through {network}, as often as an input says"
    ops = [inner for block in op.blocks for inner in block.operations if not is_weight(inner)]
    staying = [o for o in ops if o.op_type in STAYING and np_dtype(o.outputs[0]).kind == "f"]
    before, after = _estimated(ops, count, target), _estimated(staying, count, target)
    words = f"%{op.name} steps through {network} in {count} rounds, {before.cpu:.3g} µs on the CPU as estimated"
    on_engine = f", {after.ane:.3g} on the ANE" * target.uses_ane
    return f"{words}; the same steps in straight code {after.cpu:.3g}{on_engine}"


def _estimated(ops: Sequence[Operation], count: int, target: Target) -> Estimate:
    """The sum of so many rounds, of what has an estimate on a unit."""
    each = [one for op in ops if (one := cost.estimate(op, work_of(op), target)) is not None]
    return Estimate(sum(e.ane or 0.0 for e in each), sum(e.cpu or 0.0 for e in each)).times(count)


RULES = (
    Rule(
        "recurrent-loop",
        names("while_loop"),
        "loops ran neither on the ANE nor on the GPU (a Mac, its chip not named), and Core ML's own recurrent "
        "ops are no way out: they stay on the CPU (M4, macOS 27.0.1; iPhone XS), and the op gru gave wrong "
        "numbers on every unit (Chromium on a Mac)",
        "webmachinelearning/webnn: issue 689; coremltools issues 2208 and 337; "
        "751K/Apple-Neural-Engine-Microarchitecture-Study-M6",
        test=stepwise,
        grade=Grade.REPORTED,
        scope=Scope(os="seen on M4, macOS 27.0.1, iPhone XS, and a Mac, not named"),
        kind="speed",
        remedy="unroll_loop",
        advice="make the steps straight code; beyond 64 rounds, unroll_loop(max_rounds=...)",
    ),
)
"""The one rule of loops."""


# Loops whose round is a step of a recurrent network, recognised by the gates of the step.

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
