"""Element types: the names of MIL (`fp16`, `int32`), as Core AI prints them (`f16`, `si32`), and numpy's."""

from __future__ import annotations

from typing import Any

import numpy as np

PRINTED = {"f16": "fp16", "f32": "fp32", "f64": "fp64", "i1": "bool"}
"""How Core AI prints an element type -> its name; integers are `si32` and `ui8` there."""


def name_of(printed: str) -> str:
    """The name of an element type that Core AI prints; `bf16` and what MIL has not keep theirs."""
    return PRINTED.get(printed) or printed.replace("si", "int").replace("ui", "uint")


def bits_of(name: str) -> int:
    """How many bits an element has in a file; a truth value has a byte."""
    return int("".join(filter(str.isdigit, name)) or 8)


def numpy_of(name: str) -> np.dtype[Any]:
    """The numpy type of the elements; those of few bits take a byte each, `bf16` is the upper half of fp32."""
    if name == "bool":
        return np.dtype(np.bool_)
    kind = "f" if name.startswith("fp") else "i" if name.startswith("int") else "u"
    return np.dtype(f"<{kind}{max(bits_of(name) // 8, 1)}")
