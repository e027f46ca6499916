"""How large numbers behind a norm are, where bounds by weights alone say too much.

A norm over half a million numbers bounds each by 700, and sums of products behind it by more, which they reach
where one number holds the energy of all. What is reckoned here is a click in silence instead: one place of a
picture, or of a time, holds all energy, and all channels have a part in it. Of p places each number there is
the root of p; products add such numbers up as if the weights did not know them, to a few lengths of their row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anesurgery.facts.sums_of_squares import SumOfSquares, sum_of_squares
from anesurgery.mil import Operation, Var, is_stored, operands, producer, static_shape
from anesurgery.ops import REARRANGING, names
from anesurgery.semantics.bounds import norms, of_constant
from anesurgery.semantics.reading import ints

NUMBERS = 4096
"""Over no more of them a norm gives nothing beyond 64, whatever it reads, and so does a product with rows of
length 1: no place is asked for."""
SPREAD = 4.0
"""How far numbers of one place go beyond their root mean square. A choice: of drawn ones one in 16,000 does;
products whose rows of weights are turned to the very numbers of the click go further."""
STEPS = 200
"""Ops that are looked at: a residual stream has a few in each block."""
BENT = names("relu leaky_relu prelu relu6 elu gelu silu")
"""Activations of which no result is further from 0 than the number is, or than a slope of it."""
BOUNDED = names("sigmoid tanh erf softsign")
"""Activations between -1 and 1."""
MOVED = REARRANGING | names("slice_by_index slice_by_size split identity cast")


@dataclass(frozen=True)
class _Size:
    """What a value is at most: so many root mean squares of a norm's result, and a number beside them."""

    times: float
    beside: float = 0.0

    def scaled(self, factor: float, of_numbers: float | None = None) -> _Size:
        """Both multiplied; the number by another factor where products add it up."""
        return _Size(self.times * factor, self.beside * (factor if of_numbers is None else of_numbers))

    def plus(self, other: _Size) -> _Size:
        """Both added."""
        return _Size(self.times + other.times, self.beside + other.beside)


UNKNOWN = _Size(math.inf, math.inf)


def far_end(var: Var) -> float:
    """The magnitude that a value behind norms does not exceed, as reckoned; infinite for others."""
    search = _Search()
    size = search.of(var)
    end = search.far * size.times + size.beside
    return end if math.isfinite(end) else math.inf


class _Search:
    """One question; what several ops read is looked at once."""

    def __init__(self) -> None:
        self.seen: dict[Var, _Size] = {}
        self.far = math.sqrt(NUMBERS)
        """Root mean squares that a number behind the norms on the way comes to."""

    def of(self, var: Var) -> _Size:
        """The size of a value."""
        if is_stored(var):
            return _Size(0.0, max(map(abs, of_constant(var))))
        if var not in self.seen:
            self.seen[var] = UNKNOWN  # of a loop, which no program has, and of what lies too far away
            if var.op is not None and len(self.seen) < STEPS:
                self.seen[var] = self._made_by(var.op)
        return self.seen[var]

    def norm(self, var: Var, axes: Sequence[int]) -> _Size:
        """The result of a norm of a value over axes."""
        self.far = max(self.far, _far(var, axes))
        return _Size(1.0)

    def _made_by(self, op: Operation) -> _Size:
        rule = RULES.get(op.op_type)
        if rule is not None:
            return rule(op, self)
        if op.op_type in MOVED:
            return self.of(op.x)
        if op.op_type in BOUNDED:
            return _Size(0.0, 1.0)
        return _bent(op, self) if op.op_type in BENT else UNKNOWN


def _far(var: Var, axes: Sequence[int]) -> float:
    """Root mean squares that a number behind a norm comes to; infinite where no length is known."""
    shape = static_shape(var)
    if shape is None:
        return math.inf
    count = math.prod(shape[axis] for axis in axes)
    return 0.0 if count <= NUMBERS else SPREAD * math.sqrt(_places(var, shape, axes, count))


def _places(var: Var, shape: tuple[int, ...], axes: Sequence[int], count: int) -> int:
    """Over how many places a norm goes: channels are axis 1, also before a reshape into groups of them."""
    centre = producer(var, "sub")
    moved = producer(var if centre is None else centre.x, "reshape")
    before = None if moved is None else static_shape(moved.x)
    if before is not None and len(before) > 2:
        return math.prod(before[2:])
    beyond = [axis % len(shape) for axis in axes]
    if moved is not None or beyond == [len(shape) - 1]:
        return count
    return math.prod(shape[axis] for axis in beyond if axis > 1)


def _bent(op: Operation, search: _Search) -> _Size:
    slope = op.inputs.get("alpha")
    return search.of(op.x).scaled(max(1.0, 0.0 if slope is None else search.of(slope).beside))


def _sum(op: Operation, search: _Search) -> _Size:
    """Both terms; of a number less a mean of its like, the number alone."""
    mean = producer(op.y, "reduce_mean") if op.op_type == "sub" else None
    if mean is not None and mean.x is op.x:
        return search.of(op.x).scaled(1.0, of_numbers=2.0)
    return search.of(op.x).plus(search.of(op.y))


def _product(op: Operation, search: _Search) -> _Size:
    """A norm, or a number times a stored one."""
    if (squares := _norm(op)) is not None:
        return search.norm(*squares)
    values = [v for _, v in operands(op) if not is_stored(v)]
    if len(values) != 1:
        return UNKNOWN
    other = op.y if values[0] is op.x else op.x
    return search.of(values[0]).scaled(search.of(other).beside)


def _norm(op: Operation) -> tuple[Var, list[int]] | None:
    """The value and axes of a norm: divided by the root of the mean, or the sum, of its squares, or by more."""
    if op.op_type == "real_div":
        pairs = [(op.x, producer(op.y, "sqrt"))]
    else:
        pairs = [(one, producer(other, "rsqrt")) for one, other in ((op.x, op.y), (op.y, op.x))]
    for x, root in pairs:
        squares = None if root is None else sum_of_squares(root.x)
        if squares is not None and squares.values == (x,) and _is_length(squares):
            assert squares.total is not None
            return x, ints(squares.total, "axes")
    return None


def _is_length(squares: SumOfSquares) -> bool:
    """Is a sum of squares at least their mean?"""
    return squares.total is not None and squares.factor * squares.count >= 1


def _divided(op: Operation, search: _Search) -> _Size:
    """A norm, or a number over a stored one."""
    if (squares := _norm(op)) is not None:
        return search.norm(*squares)
    least = min(map(abs, of_constant(op.y))) if is_stored(op.y) else 0.0
    return search.of(op.x).scaled(1 / least) if least and of_constant(op.y)[0] > 0 else UNKNOWN


def _normalised(op: Operation, search: _Search) -> _Size:
    """By an op; its factors and offsets are for each channel, or each number."""
    spatial = list(range(2, op.x.rank)) if op.op_type == "instance_norm" else ints(op, "axes")
    gamma, beta = op.inputs.get("gamma"), op.inputs.get("beta")
    size = search.norm(op.x, spatial).scaled(1.0 if gamma is None else search.of(gamma).beside)
    return size if beta is None else size.plus(search.of(beta))


def _weighted(op: Operation, search: _Search) -> _Size:
    """The length of the longest row of weights, and the bias."""
    size = search.of(op.x)
    row = norms(op) if math.isfinite(size.times) else None
    if row is None:
        return UNKNOWN
    size, bias = size.scaled(row.length, of_numbers=row.sum), op.inputs.get("bias")
    return size if bias is None else size.plus(search.of(bias))


RULES: dict[str, Callable[[Operation, _Search], _Size]] = {
    **dict.fromkeys(("add", "sub"), _sum),
    "mul": _product,
    "real_div": _divided,
    **dict.fromkeys(("layer_norm", "instance_norm"), _normalised),
    **dict.fromkeys(("conv", "linear", "matmul"), _weighted),
}
"""Op type -> the size of its result."""
