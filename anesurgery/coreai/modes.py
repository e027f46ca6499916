"""The modes in which a program is written: "ship", for Apple's devices, or "check", for its runtime on Linux.

Code asks `mode.has("take argmax in fp32")` for a form that belongs to one mode only. Other workarounds are
always written; a comment beside each says why, and docs/core-ai-problems.md lists all.
"""

from __future__ import annotations

from dataclasses import dataclass

from anesurgery.errors import UnknownName

MODES = ("ship", "check")
FORMS = {
    # the runtime of coreai-core 1.0.0b3 on Linux adds the terms of an fp16 product or running sum in fp16, one
    # after the other: 4,096 ones give 2,048. What rounds differently at each op hides what is wrong.
    "compute fp16 models in fp32": "check",
    # that runtime takes only tensors; an image is a `CVPixelBuffer`
    "write images as tensors": "check",
    # argmax of fp16 values gives a wrong class map on the A19 Pro, iOS 27.0 (reported:
    # https://github.com/apple/coreai-torch/issues/116); of fp32 values it is right
    "take argmax in fp32": "ship",
}
"""Form in which ops are written -> the mode that uses it."""


@dataclass(frozen=True)
class Mode:
    """The mode of a program, which decides the forms of its ops."""

    name: str

    def __post_init__(self) -> None:
        """Check that there is such a mode."""
        if self.name not in MODES:
            raise UnknownName("mode", self.name, MODES)

    def dtype(self, name: str) -> str:
        """Return the element type in which values of a MIL dtype are written."""
        return "fp32" if name == "fp16" and self.has("compute fp16 models in fp32") else name

    def has(self, form: str) -> bool:
        """Return whether ops are written in a form."""
        return FORMS[form] == self.name
