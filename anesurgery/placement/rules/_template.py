"""Where a pass helps: what `inspect` says, and the pass that it names.

(A template: copy it to anesurgery/placement/rules/finds_<pass>.py; it is found by its name.)
"""

from __future__ import annotations

from anesurgery.mil import Operation, producer
from anesurgery.ops import names
from anesurgery.placement.evidence import Grade, Rule
from anesurgery.placement.target import Target


def repeated_relu(op: Operation, target: Target) -> str:
    """Return what was found, with its value; "" where there is nothing to report."""
    inner = producer(op.x, "relu")
    return "" if inner is None else f"%{inner.outputs[0].name} is rectified already"


RULES = (
    Rule(
        "template-twice",
        names("relu"),
        "the second relu computes nothing new",
        "who measured or said it, with chip and OS",
        test=repeated_relu,
        kind="speed",
        grade=Grade.GUESS,
        remedy="template",
    ),
)
