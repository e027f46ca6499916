"""Loops that are recurrent networks: what was reported of them, and what straight code is estimated to take."""

from __future__ import annotations

from collections.abc import Sequence

from anesurgery.facts.dependence import rounds
from anesurgery.facts.recurrences import recurrent_step
from anesurgery.mil import Operation, is_weight, np_dtype
from anesurgery.ops import POINTWISE, PRODUCTS, names
from anesurgery.placement import cost
from anesurgery.placement.evidence import Grade, Rule, Scope
from anesurgery.placement.inspection import Estimate
from anesurgery.placement.target import Target
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
