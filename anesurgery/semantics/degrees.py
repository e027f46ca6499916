"""How results scale when operands do: the degree of each op, and which of its constants scale with it.

Operands times `u ** e` give results times `u ** scaled(op, ...).result`, if the constants of the op are
multiplied by their own powers of u. Scaling by a power of two is exact in fp16, up to underflow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from anesurgery.mil import Operation, Var, np_dtype, operands, producer
from anesurgery.ops import JOINING, MOVING, WEIGHTED, names
from anesurgery.semantics.reading import number

TIED = (
    (MOVING - names("gather gather_nd gather_along_axis"))
    | JOINING
    | names("add sub abs relu identity maximum minimum")
)
"""Ops whose float operands and results must all be scaled alike."""

ALIKE = TIED | names("gather reduce_mean reduce_sum reduce_max reduce_min leaky_relu reduce_l2_norm cast clip")
"""Ops that hand on the scale of their operand."""

SUMS_OF_PRODUCTS = WEIGHTED | {"conv"}


@dataclass(frozen=True)
class Scaled:
    """What comes of scaled operands."""

    result: float
    """The exponent of the results."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Parameters with a constant that must be scaled too, and by what."""


Exponents: TypeAlias = "Callable[[Var], float]"


def is_float(var: Var) -> bool:
    """Does a value hold floats?"""
    return np_dtype(var).kind == "f"


def scaled(op: Operation, of: Exponents) -> Scaled | None:
    """What an op makes of operands that are scaled; None where it does not hand a scale on.

    Args:
        op: the op.
        of: the exponent of a value; 0 of constants.
    """
    degree = DEGREES.get(op.op_type)
    return None if degree is None or not all(map(is_float, op.outputs)) else degree(op, of)


def _alike(op: Operation, of: Exponents) -> Scaled | None:
    floats = [
        (name, v)
        for name, v in operands(op)
        if is_float(v) and (name in ("x", "y", "values") or op.op_type == "clip")
    ]
    exponents = {of(v) for _, v in floats if producer(v, "const") is None}
    if len(exponents) != 1:
        return None
    (exponent,) = exponents
    fixed = [name for name, v in floats if producer(v, "const") is not None]
    return None if "values" in fixed else Scaled(exponent, dict.fromkeys(fixed, exponent))


def _product(op: Operation, of: Exponents) -> Scaled | None:
    """A sum of products; its bias is scaled as the result."""
    if op.op_type == "matmul":
        return Scaled(of(op.x) + of(op.y))
    if producer(op.inputs.get("weight"), "const") is None:
        return None
    biased = op.inputs.get("bias") is not None
    return Scaled(of(op.x), {"bias": of(op.x)} if biased else {})


def _power(op: Operation, of: Exponents) -> Scaled | None:
    exponent = number(op.y)
    return None if exponent is None else Scaled(exponent * of(op.x))


DEGREES: dict[str, Callable[[Operation, Exponents], Scaled | None]] = {
    **dict.fromkeys(ALIKE, _alike),
    **dict.fromkeys(SUMS_OF_PRODUCTS, _product),
    **dict.fromkeys(("square", "reduce_sum_square"), lambda op, of: Scaled(2 * of(op.x))),
    "pow": _power,
    "sqrt": lambda op, of: Scaled(of(op.x) / 2),
    "rsqrt": lambda op, of: Scaled(-of(op.x) / 2, {"epsilon": of(op.x)}),
    "inverse": lambda op, of: Scaled(-of(op.x), {"epsilon": of(op.x)}),
    "layer_norm": lambda op, of: Scaled(0, {"epsilon": 2 * of(op.x)}),
    "mul": lambda op, of: Scaled(of(op.x) + of(op.y)),
    "real_div": lambda op, of: Scaled(of(op.x) - of(op.y)),
}
"""Op type -> what a scale becomes."""
