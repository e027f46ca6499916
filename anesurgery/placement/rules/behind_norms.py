"""How large numbers behind a norm are, where bounds by weights alone say too much.

A norm over half a million numbers bounds each by 700, and sums of products behind it by more, which they reach
where one number holds the energy of all. What is reckoned here is their root mean square instead, as if what a
sum adds up were unrelated: 1 behind a norm, the length of a row of weights behind a product with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from anesurgery.facts.sums_of_squares import sum_of_squares
from anesurgery.mil import Operation, Var, is_stored, operands, producer
from anesurgery.ops import REARRANGING, names
from anesurgery.semantics.constant_ends import of_constant
from anesurgery.semantics.row_lengths import norms

FAR = 64.0
"""Root mean squares that count as the end: all that a number behind a norm over 4,096 can reach. Behind a norm
over more, an impulse in silence may go further, of which nothing is said."""
STEPS = 200
"""Ops that are looked at: a residual stream has a few in each block."""
BENT = names("relu leaky_relu prelu relu6 elu gelu silu sigmoid tanh erf softsign")
"""Activations of which no result is further from 0 than the number is, than a slope of it, or than 1."""
MOVED = REARRANGING | names("slice_by_index slice_by_size split identity cast")


def far_end(var: Var) -> float:
    """The magnitude that a value behind norms does not exceed, short of an impulse; infinite for others."""
    return FAR * _Search().of(var)


class _Search:
    """One question; what several ops read is looked at once."""

    def __init__(self) -> None:
        self.seen: dict[Var, float] = {}

    def of(self, var: Var) -> float:
        """The root mean square of a value; infinite where nothing is known."""
        if is_stored(var):
            return max(map(abs, of_constant(var)))
        if var not in self.seen:
            self.seen[var] = math.inf  # of a loop, which no program has, and of what lies too far away
            if var.op is not None and len(self.seen) < STEPS:
                self.seen[var] = self._made_by(var.op)
        return self.seen[var]

    def _made_by(self, op: Operation) -> float:
        rule = RULES.get(op.op_type)
        if rule is not None:
            return rule(op, self)
        if op.op_type in MOVED:
            return self.of(op.x)
        return _bent(op, self) if op.op_type in BENT else math.inf


def _bent(op: Operation, search: _Search) -> float:
    slope = op.inputs.get("alpha")
    return max(search.of(op.x), 1.0) * max(1.0, 0.0 if slope is None else search.of(slope))


def _sum(op: Operation, search: _Search) -> float:
    """Both terms; of a number less a mean of its like, the number alone."""
    mean = producer(op.y, "reduce_mean") if op.op_type == "sub" else None
    if mean is not None and mean.x is op.x:
        return search.of(op.x)
    return search.of(op.x) + search.of(op.y)


def _product(op: Operation, search: _Search) -> float:
    """A norm, or a number times a stored one."""
    if _ends_norm(op):
        return 1.0
    values = [v for _, v in operands(op) if not is_stored(v)]
    return search.of(op.x) * search.of(op.y) if len(values) == 1 else math.inf


def _ends_norm(op: Operation) -> bool:
    """Is a value divided by the root of the mean, or of the sum, of its squares, or by more?"""
    if op.op_type == "real_div":
        pairs = [(op.x, producer(op.y, "sqrt"))]
    else:
        pairs = [(one, producer(other, "rsqrt")) for one, other in ((op.x, op.y), (op.y, op.x))]
    squares = [(x, sum_of_squares(root.x)) for x, root in pairs if root is not None]
    return any(
        s is not None and s.total is not None and s.values == (x,) and s.factor * s.count >= 1
        for x, s in squares
    )


def _divided(op: Operation, search: _Search) -> float:
    """A norm, or a number over a stored one."""
    if _ends_norm(op):
        return 1.0
    least = min(map(abs, of_constant(op.y))) if is_stored(op.y) else 0.0
    return search.of(op.x) / least if least and of_constant(op.y)[0] > 0 else math.inf


def _normalised(op: Operation, search: _Search) -> float:
    gamma, beta = op.inputs.get("gamma"), op.inputs.get("beta")
    return (1.0 if gamma is None else search.of(gamma)) + (0.0 if beta is None else search.of(beta))


def _weighted(op: Operation, search: _Search) -> float:
    """The length of the longest row of weights, and the bias."""
    size = search.of(op.x)
    row = norms(op) if math.isfinite(size) else None
    bias = op.inputs.get("bias")
    return math.inf if row is None else size * row.length + (0.0 if bias is None else search.of(bias))


RULES: dict[str, Callable[[Operation, _Search], float]] = {
    **dict.fromkeys(("add", "sub"), _sum),
    "mul": _product,
    "real_div": _divided,
    **dict.fromkeys(("layer_norm", "instance_norm"), _normalised),
    **dict.fromkeys(("conv", "linear", "matmul"), _weighted),
}
"""Op type -> the root mean square of its result."""
