"""What a Core AI program is written for: to be shipped, or to be run by Apple's runtime on Linux as a check.

The two differ in single forms of ops, each a row with its source; what is needed for both stands in the
lowering of the op.
"""

from __future__ import annotations

from dataclasses import dataclass

from anesurgery.errors import UnknownName


@dataclass(frozen=True)
class Difference:
    """One form in which the modes differ."""

    form: str
    """What a lowering asks for."""
    mode: str
    """The mode that has it."""
    why: str
    source: str


DIFFERENCES = (
    Difference(
        "fp16 products in fp32",
        "check",
        "the runtime on Linux adds the terms of an fp16 product or running sum in fp16, one after the other: "
        "4,096 ones give 2,048; the Neural Engine and the GPU do not, and would lose their fp16 units",
        "run on Linux with coreai-core 1.0.0b3",
    ),
    Difference(
        "argmax of fp32",
        "ship",
        "argmax of fp16 values gives a wrong class map on the A19 Pro, iOS 27.0; of fp32 values it is right",
        "https://github.com/apple/coreai-torch/issues/116",
    ),
)
"""Every difference between the modes."""

MODES = ("ship", "check")


@dataclass(frozen=True)
class Mode:
    """The forms that a program is written in."""

    name: str

    def __post_init__(self) -> None:
        """See that there is such a mode."""
        if self.name not in MODES:
            raise UnknownName("mode", self.name, MODES)

    def has(self, form: str) -> bool:
        """Is an op written in a form of the table?"""
        return any(row.mode == self.name for row in DIFFERENCES if row.form == form)
