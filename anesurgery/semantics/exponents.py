"""How a power of two goes through ops: what an op gives when its operands are scaled by 2^e.

Scaling by a power of two is exact in fp16, up to underflow. An op that knows it hands it on: sums of values
scaled alike, products, roots. A norm takes it away, if its epsilon is scaled too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from anesurgery.mil import Operation, Var, consumers, np_dtype, operands, producer
from anesurgery.ops import JOINING, MOVING, WEIGHTED, names
from anesurgery.semantics.reading import number

TIED = (
    (MOVING - names("gather gather_nd gather_along_axis"))
    | JOINING
    | names("add sub abs relu identity maximum minimum")
)
"""Ops whose float operands and results must all be scaled alike."""

ALIKE = TIED | names("gather reduce_mean reduce_sum reduce_max reduce_min leaky_relu reduce_l2_norm cast")
"""Ops that hand on the scale of their operand."""

SUMS_OF_PRODUCTS = WEIGHTED | {"conv"}


@dataclass(frozen=True)
class Scaled:
    """What comes of scaled operands."""

    result: int
    """The exponent of the results."""
    constants: Mapping[str, int] = field(default_factory=dict)
    """Parameters with a constant that must be scaled too, and by what."""


Exponents: TypeAlias = "Callable[[Var], int]"


def is_float(var: Var) -> bool:
    """Does a value hold floats?"""
    return np_dtype(var).kind == "f"


def scaled(op: Operation, of: Exponents) -> Scaled | None:
    """What an op makes of operands that are scaled; None where it does not hand a scale on.

    Args:
        op: the op.
        of: the exponent of a value; 0 of constants.
    """
    rule = RULES.get(op.op_type)
    return None if rule is None or not all(map(is_float, op.outputs)) else rule(op, of)


def _alike(op: Operation, of: Exponents) -> Scaled | None:
    floats = [(name, v) for name, v in operands(op) if is_float(v) and name in ("x", "y", "values")]
    found = {of(v) for _, v in floats if producer(v, "const") is None}
    if len(found) != 1:
        return None
    (exponent,) = found
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
    if op.op_type == "square":
        return Scaled(2 * of(op.x))
    power = number(op.y)
    return None if power is None or (power * of(op.x)) % 1 else Scaled(int(power * of(op.x)))


def _root(op: Operation, of: Exponents) -> Scaled | None:
    exponent = of(op.x)
    if exponent % 2:
        return None
    return Scaled(-exponent // 2, {"epsilon": exponent}) if op.op_type == "rsqrt" else Scaled(exponent // 2)


RULES: dict[str, Callable[[Operation, Exponents], Scaled | None]] = {
    **dict.fromkeys(ALIKE, _alike),
    **dict.fromkeys(SUMS_OF_PRODUCTS, _product),
    **dict.fromkeys(("square", "pow"), _power),
    **dict.fromkeys(("sqrt", "rsqrt"), _root),
    "layer_norm": lambda op, of: Scaled(0, {"epsilon": 2 * of(op.x)}),
    "mul": lambda op, of: Scaled(of(op.x) + of(op.y)),
    "real_div": lambda op, of: Scaled(of(op.x) - of(op.y)),
}
"""Op type -> what a scale becomes."""


def tied_to(start: Var) -> set[Var]:
    """The values that must be scaled as one is, through sums and moves: a residual stream, say."""
    found, queue = {start}, deque([start])
    while queue:
        var = queue.popleft()
        near = [op for op in (var.op, *consumers(var)) if op is not None and op.op_type in TIED]
        for op in near:
            fresh = [v for v in _floats(op) if v not in found and producer(v, "const") is None]
            found.update(fresh)
            queue.extend(fresh)
    return found


def _floats(op: Operation) -> Iterable[Var]:
    return [v for v in (*(v for _, v in operands(op)), *op.outputs) if is_float(v)]


__all__ = ["Scaled", "is_float", "scaled", "tied_to"]
