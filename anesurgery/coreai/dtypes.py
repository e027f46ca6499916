"""Convert names of element types: MIL's (`fp16`, `int32`), Core AI's (`f16`, `si32`) and numpy's.

Both directions use it: `translating` and `toolkit` to write a file, `reading` and `lifts` to read one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

PRINTED = {"f16": "fp16", "f32": "fp32", "f64": "fp64", "i1": "bool"}
"""How Core AI prints an element type -> its name; integers are `si32` and `ui8` there."""


def name_of(printed: str) -> str:
    """Return MIL's name of an element type that Core AI prints; `bf16`, which MIL has not, keeps its name."""
    return PRINTED.get(printed) or printed.replace("si", "int").replace("ui", "uint")


def bits_of(name: str) -> int:
    """Return how many bits an element has in a file; a bool has a byte."""
    return int("".join(filter(str.isdigit, name)) or 8)


def numpy_of(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of an element type.

    Elements of less than 8 bits take a byte each; `bf16` is the upper half of fp32, as uint16.
    """
    if name == "bool":
        return np.dtype(np.bool_)
    kind = "f" if name.startswith("fp") else "i" if name.startswith("int") else "u"
    return np.dtype(f"<{kind}{max(bits_of(name) // 8, 1)}")
