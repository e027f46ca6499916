"""The degree of each op: how its results scale when its operands do, and which of its constants must scale too.

If operands are multiplied by powers `u ** e`, results are multiplied by `u ** scaled(op, exponent_of).result`,
provided that the constants in `.constants` are multiplied by the powers named there. For example `square` of a
value times u gives its result times u ** 2. Passes scale regions by powers of two, which is exact in fp16 up to
underflow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from anesurgery.mil import Operation, Var, operands, producer
from anesurgery.ops import JOINING, MOVING, WEIGHTED, names
from anesurgery.semantics.reading import is_float, number

TIED = (
    (MOVING - names("gather gather_nd gather_along_axis"))
    | JOINING
    | names("add sub abs relu identity maximum minimum")
)
"""Ops whose float operands and results must all have the same scale."""

ALIKE = TIED | names("gather reduce_mean reduce_sum reduce_max reduce_min leaky_relu reduce_l2_norm cast clip")
"""Ops whose result has the scale of their operand."""

SUMS_OF_PRODUCTS = WEIGHTED | {"conv"}


@dataclass(frozen=True)
class Scaled:
    """The scale of an op's results and of its constants, as exponents of one factor."""

    result: float
    """The exponent of the results."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Parameter that holds a constant -> the exponent of the factor by which that has to be multiplied."""


Exponents: TypeAlias = "Callable[[Var], float]"


def scaled(op: Operation, of: Exponents) -> Scaled | None:
    """Return the scales of an op's results and constants; None where it does not hand a scale on.

    `of` gives the exponent of each value, 0 for constants.
    """
    degree = DEGREES.get(op.op_type)
    return None if degree is None or not all(map(is_float, op.outputs)) else degree(op, of)


def _same_scale(op: Operation, of: Exponents) -> Scaled | None:
    """Return the one exponent that all dynamic operands share, which constants must get as well."""
    floats = [
        (name, v)
        for name, v in operands(op)
        if is_float(v) and (name in ("x", "y", "values") or op.op_type == "clip")
    ]
    exponents = {of(v) for _, v in floats if producer(v, "const") is None}
    if len(exponents) != 1:
        return None
    (exponent,) = exponents
    constants = [name for name, v in floats if producer(v, "const") is not None]
    return None if "values" in constants else Scaled(exponent, dict.fromkeys(constants, exponent))


def _product(op: Operation, of: Exponents) -> Scaled | None:
    """Return the sum of the operands' exponents for a sum of products; the bias scales like the result."""
    if op.op_type == "matmul":
        return Scaled(of(op.x) + of(op.y))
    if producer(op.inputs.get("weight"), "const") is None:
        return None
    biased = op.inputs.get("bias") is not None
    return Scaled(of(op.x), {"bias": of(op.x)} if biased else {})


def _power(op: Operation, of: Exponents) -> Scaled | None:
    """Return the exponent times the power, where that is a constant."""
    exponent = number(op.y)
    return None if exponent is None else Scaled(exponent * of(op.x))


DEGREES: dict[str, Callable[[Operation, Exponents], Scaled | None]] = {
    **dict.fromkeys(ALIKE, _same_scale),
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
"""Op type -> the function that gives the scales of its results and constants."""
