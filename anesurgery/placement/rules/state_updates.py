"""Updates of a state: the ANE takes a slice_update as the write of a state, and not as an op of its own."""

from __future__ import annotations

from anesurgery.mil import Operation, consumers, is_output
from anesurgery.ops import names
from anesurgery.placement.evidence import Grade, Rule, Scope
from anesurgery.placement.target import Target

STATES = names("read_state coreml_update_state")
"""Ops that give the value of a state."""


def standalone(op: Operation, target: Target) -> str:
    """What is updated is not a state, or the result goes elsewhere than into a state."""
    maker = op.x.op
    if maker is None or maker.op_type not in STATES:
        return f"it updates %{op.x.name}, which is not read from a state"
    result = op.outputs[0]
    others = [r for r in consumers(result) if r.op_type != "coreml_update_state"]
    if others:
        return f"%{result.name} is also read by %{others[0].outputs[0].name} ({others[0].op_type})"
    if is_output(result):
        return f"%{result.name} is an output as well"
    return "" if consumers(result) else f"%{result.name} is not written to a state"


RULE = Rule(
    "slice-update-alone",
    names("slice_update"),
    'only read_state, slice_update, coreml_update_state stays: "Cannot support standalone slice_update"',
    "4rg0naut/silicon-ledger-public: EXP-001; Anemll/anemll-profile: README",
    legal=False,
    test=standalone,
    grade=Grade.REPORTED,
    scope=Scope(os="seen on M4, macOS 27.0, and macOS 15"),
    advice="write the update to a state at once, and read the state; otherwise blend with a mask",
)
