"""Names that both directions share: of element types, of ops, of composites and in metadata.

Element types have the names of MIL (`fp16`, `int32`), of Core AI (`f16`, `si32`) and of numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from anesurgery.ops import names

F = TypeVar("F", bound=Callable[..., Any])

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


UNARY = names("acos asin atan atanh cos cosh erf exp sin sinh sqrt tan tanh sigmoid silu round abs")
"""Ops of one operand that have one name and one meaning in both formats."""
BINARY = {k: k for k in names("add mul pow maximum minimum equal not_equal greater")} | {
    "real_div": "divide",
    "floor_div": "floor_divide",
    "logical_and": "and",
    "logical_or": "or",
    "logical_xor": "xor",
}
"""MIL op of two operands -> the Core AI op of the same meaning."""
REDUCTIONS = {f"reduce_{k}": k for k in names("sum mean max min")} | {"reduce_prod": "product"}
"""Reduction of MIL -> the word in the name of Core AI's, `reduce_product`."""
GELU = {"EXACT": "none", "TANH_APPROXIMATION": "tanh", "SIGMOID_APPROXIMATION": "sigmoid"}
"""Mode of gelu in MIL -> its name in Core AI."""


CLASSES, LABEL = "classes.", "label."
"""Prefixes in the custom metadata, before the name of an output with probabilities: the labels of a classifier,
and the output that holds the label."""
PREFIX = "image."
"""Prefix in the custom metadata: "image." and the name of an image -> its colour space."""
OWN = "mil."
"""Prefix of the names of composites that stand for MIL ops: "mil.layer_norm"."""
FROM_IMAGE, TO_IMAGE = "anesurgery.from_image", "anesurgery.to_image"
"""Composites that convert between pixels [height, width, BGRA] and an image of MIL [1, 3, height, width]."""


def enters(table: dict[str, Any]) -> Callable[..., Callable[[F], F]]:
    """Return a decorator that enters a function into a table, by some names."""

    def named(*names: str) -> Callable[[F], F]:
        def enter(function: F) -> F:
            table.update(dict.fromkeys(names, function))
            return function

        return enter

    return named
