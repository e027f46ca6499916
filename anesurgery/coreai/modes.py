"""The forms in which ops are written to avoid faults of Apple's compiler and runtime, each with its source.

A Core AI program is written in one of two modes: "ship", for Apple's devices, or "check", to be run by Apple's
runtime on Linux. Code asks `mode.has("take argmax in fp32")` for a form of `FORMS` that belongs to one mode
only. Forms of both modes are always used; their rows say why, and a comment where they are written names them.
"""

from __future__ import annotations

from dataclasses import dataclass

from anesurgery.errors import UnknownName

MODES = ("ship", "check")
LINUX = "seen on Linux with coreai-core 1.0.0b3"


@dataclass(frozen=True)
class Form:
    """One form in which ops are written."""

    name: str
    """The name by which lowerings ask for it."""
    modes: tuple[str, ...]
    """The modes in which the form is used."""
    why: str
    source: str


FORMS = (
    Form(
        "compute fp16 models in fp32",
        ("check",),
        "the runtime on Linux adds the terms of an fp16 product or running sum in fp16, one after the other: "
        "4,096 ones give 2,048; and what rounds differently at each op cannot be told from what is wrong",
        LINUX,
    ),
    Form(
        "write images as tensors",
        ("check",),
        "the runtime on Linux takes only tensors; an image is a `CVPixelBuffer`",
        LINUX,
    ),
    Form(
        "take argmax in fp32",
        ("ship",),
        "argmax of fp16 values gives a wrong class map on the A19 Pro, iOS 27.0; of fp32 values it is right",
        "https://github.com/apple/coreai-torch/issues/116",
    ),
    Form(
        "write `x - m` as `x + (-m)`",
        MODES,
        "when a program is made, (conv(x) - m) * s of constants m and s is rewritten as conv(x) * s + m * s: "
        "the sign of m is lost, on every device; the sum with -m is right",
        LINUX,
    ),
    Form(
        "keep constants separate",
        MODES,
        "when a program is made, (x + a) + b of constants becomes x + (a + b), (x * a) * b becomes x * (a * b) "
        "and a scale becomes a part of the weight: in fp16 a * b overflows where the values do not",
        LINUX,
    ),
    Form(
        "compute floor with round",
        MODES,
        "there is no floor op; a floor_divide by 1 was reported to give x itself on the GPU, and gives NaN "
        "for infinity on Linux",
        "https://github.com/apple/coreai-torch/issues/10",
    ),
    Form(
        "round before a cast",
        MODES,
        "Apple's builder removes a cast from float to integer and back: 1.5 stays 1.5",
        "https://github.com/apple/coreai-torch/issues/9",
    ),
    Form(
        "shift exponentials",
        MODES,
        "softplus and logsumexp overflow fp16 from 11.09 on if computed by definition",
        "https://github.com/apple/coreai-torch/issues/105",
    ),
    Form(
        "pack constants",
        MODES,
        "Apple's builder does not pack numbers of less than 8 bits: wrong values, or SIGSEGV",
        LINUX,
    ),
    Form("reverse before slice", MODES, "a slice with stride -1 does not reach index 0", LINUX),
    Form(
        "keep weights as stored",
        MODES,
        "when a program is made, a transpose of a weight is folded into a second copy of it; here only a few "
        "numbers are folded",
        LINUX,
    ),
)
"""Every form that differs from the plain one."""


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
        return any(self.name in row.modes for row in FORMS if row.name == form)
