"""Choose inputs that random draws hardly meet: constants of both sides, combinations, all of a small domain.

`targets` collects the constants by which ops may decide; `aimed` yields rounds of inputs that take each of
them; `crossed` combines infinities and NaN of several inputs; `edged` combines zeros and signs.
`all_combinations` counts through a small domain; `drawn_range` finds the range of the integers that are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

import numpy as np

from anesurgery.checking.addresses import ADDRESSES
from anesurgery.checking.adversarial import SMALL_CONSTANT, Drawing, implied
from anesurgery.checking.lengths import drawn_shape
from anesurgery.mil import Array, Operation, Var, any_symbolic, constant, ct, np_dtype, operands, types
from anesurgery.ops import LOOKUPS, POINTWISE, names
from anesurgery.semantics.intervals import stored_interval
from anesurgery.semantics.reading import is_tensor

DECIDING = POINTWISE & names(
    "equal not_equal greater greater_equal less less_equal select maximum minimum clip threshold floor_div mod"
)
"""Ops that may decide by each element of a small vector; for other ops only scalar constants are targets."""
ALWAYS = (0.0, 0.5, 1.0, 1.5, 2.5)
"""Targets in any case: zero and ties of rounding."""
SPAN = 32.0
"""The largest ratio of constants drawn in one round: beside a far larger one, few numbers fall between the
small ones."""
NONFINITE = (0.0, math.inf, -math.inf, math.nan)
"""What an input is in turn when these are crossed; 0 stands for the number that was drawn."""
MOST_CROSSED = 3
"""The most inputs whose combinations are all drawn; further ones repeat the patterns of the first, since each
more multiplies the numbers needed."""
SIGNS = 4
"""How many cases are crossed for signs: a number, its negative, 0 and -0."""
COMBINED = 8
"""The most constants whose sums, differences, products and quotients are targets too: eight have 28 pairs."""

DISTINCT = 2**18
"""Distinct numbers near targets that are drawn for a tensor; larger tensors repeat them. To draw and shuffle
the 16 million scores of 4,096 keys took longer than the comparison."""


def targets(ops: Iterable[Operation]) -> tuple[float, ...]:
    """Return the distinct finite constants that ops compute with, rather than positions or sizes."""
    numbers: set[float] = set()
    for op in ops:
        numbers.update(implied(op))
        for _, var in operands(op):
            value = constant(var)
            if value is None or isinstance(value, str):
                continue
            array = np.asarray(value)
            counts = array.dtype.kind == "f" or (op.op_type in POINTWISE and array.dtype.kind in "iu")
            if counts and array.size <= (SMALL_CONSTANT if op.op_type in DECIDING else 1):
                numbers.update(float(v) for v in array.ravel() if np.isfinite(v))
    return tuple(sorted(numbers))


def aimed(
    drawn: Sequence[Var], drawing: Drawing, constants: Sequence[float], rng: np.random.Generator, *, apart: bool
) -> Iterator[dict[Var, Array]]:
    """Yield values for the floats and free integers that a site reads, round by round.

    Args:
        drawn: the inputs.
        drawing: how they are drawn.
        constants: the targets; see `targets`.
        rng: for the order, and for the rest of each tensor.
        apart: draw constants of different sizes in different rounds. Not needed where equal bits are promised:
            then a difference shows beside larger numbers too.
    """
    free_inputs = [v for v in drawn if _is_free(v, drawing)]
    for band in _constants_by_size({*constants, *ALWAYS, *(c + d for c in constants for d in (-1, 1))}, apart):
        targets_of = {v: _targets_with_neighbors(v, band, set(constants), drawing) for v in free_inputs}
        targets_of = {v: values for v, values in targets_of.items() if values.size}
        rounds = max((-(-len(values) // _count(v)) for v, values in targets_of.items()), default=0)
        values_of = {v: _filled_rounds(v, values, rounds, constants, rng) for v, values in targets_of.items()}
        for i in range(rounds):
            here = ((v, values[i * _count(v) : (i + 1) * _count(v)]) for v, values in values_of.items())
            yield {v: drawing.bounded(v, x.reshape(drawn_shape(v)), np_dtype(v)) for v, x in here}


def _is_free(var: Var, drawing: Drawing) -> bool:
    """Return whether an input is a float, or an integer that is no position, which the pass does not sample."""
    if not is_tensor(var) or not _count(var) or var in (drawing.bounds or {}):
        return False
    return np_dtype(var).kind in "fiu" and drawing.sample(var, np.random.default_rng(0)) is None


def _count(var: Var) -> int:
    return math.prod(drawn_shape(var))


def _constants_by_size(constants: Iterable[float], apart: bool) -> list[list[float]]:
    """Return constants of similar size in groups; 0 is with those around 1."""
    ordered = sorted(constants, key=_magnitude)
    if not apart:
        return [ordered]
    first, bands = 0.0, list[list[float]]()
    for one in ordered:
        if not bands or _magnitude(one) > SPAN * first:
            first = _magnitude(one)
            bands.append([])
        bands[-1].append(one)
    return bands


def _magnitude(number: float) -> float:
    return abs(number) or 1.0


def _targets_with_neighbors(var: Var, band: Sequence[float], constants: set[float], drawing: Drawing) -> Array:
    """Return the targets of a group, the neighbours of constants, and their negatives."""
    dtype = np_dtype(var)
    if dtype.kind != "f":
        info = np.iinfo(dtype)
        near = {int(n) + d for n in band if n in constants and abs(n) < 2**31 for d in (-1, 0, 1)}
        ends = {0, info.min, info.min + 1, info.max, -1} if 0 in band else set()
        whole = near | ends | {-n for n in near}
        return np.array([n for n in sorted(whole) if info.min <= n <= info.max], np.int64)
    with np.errstate(over="ignore", invalid="ignore"):
        here = np.array(band, np.float64).astype(dtype)
        own = here[[n in constants or n == 0 for n in band]]
        beside = [np.nextafter(own, dtype.type(end)) for end in (np.inf, -np.inf)]
    numbers = np.unique(np.concatenate([here, *beside]).astype(np.float64))
    numbers = np.concatenate([numbers, -numbers])
    least, most = drawing.for_value(var).ends(dtype)
    return numbers[
        np.isfinite(numbers) & (np.abs(numbers) <= most) & ((np.abs(numbers) >= least) | (numbers == 0))
    ]


def _filled_rounds(
    var: Var, wanted: Array, rounds: int, constants: Sequence[float], rng: np.random.Generator
) -> Array:
    """Return numbers for all rounds: the targets, combinations of two constants, and numbers near targets."""
    whole = rounds * _count(var)
    more = rng.permutation(
        [n for n in _combinations_of_two(constants) if _magnitude(n) <= SPAN * float(np.abs(wanted).max())]
    )
    more = more[: whole - len(wanted)]
    near = np.resize(rng.permutation(wanted), min(whole - len(wanted) - len(more), DISTINCT))
    if np_dtype(var).kind == "f":
        near = near * (1 + rng.standard_normal(len(near)) * 10 ** rng.uniform(-4, 0, len(near)))
    return np.resize(rng.permutation(np.concatenate([wanted, more, near])), whole)


def _combinations_of_two(constants: Sequence[float]) -> list[float]:
    """Return what one operation makes of two constants: where x + 1 is compared with 6, 5 is a target."""
    if len(constants) > COMBINED:
        return []
    numbers = {n for a, b in product(constants, repeat=2) for n in (a + b, a - b, a * b, a / b if b else a)}
    return sorted(n for n in numbers if math.isfinite(n))


def crossed(drawn: Sequence[Var], drawing: Drawing, numbers: Mapping[Var, Array], at: int) -> dict[Var, Array]:
    """Return values that combine infinities and NaN of several inputs in every way.

    Args:
        drawn: the inputs.
        drawing: how they are drawn.
        numbers: finite values of the inputs.
        at: where the pattern begins: the number of elements in earlier rounds.
    """
    floats = [v for v in drawn if _is_free(v, drawing) and np_dtype(v).kind == "f"]
    values = {}
    for i, var in enumerate(floats if len(floats) > 1 else []):
        turn = (np.arange(at, at + _count(var)) // len(NONFINITE) ** (i % MOST_CROSSED)) % len(NONFINITE)
        other = np.array(NONFINITE, np.float32)[turn].reshape(drawn_shape(var))
        values[var] = drawing.bounded(
            var, np.where(turn.reshape(other.shape) == 0, numbers[var], other), np_dtype(var)
        )
    return values


def edged(drawn: Sequence[Var], drawing: Drawing, numbers: Mapping[Var, Array], at: int) -> dict[Var, Array]:
    """Return values that combine zeros and signs of several inputs, followed by small edges of floats.

    Args:
        drawn: the inputs.
        drawing: how they are drawn.
        numbers: finite values of the inputs.
        at: where the pattern begins: the number of elements in earlier rounds.
    """
    floats = [v for v in drawn if _is_free(v, drawing) and np_dtype(v).kind == "f"]
    crossings, values = SIGNS ** min(len(floats), MOST_CROSSED), {}
    for i, var in enumerate(floats):
        edges, own = drawing.near_edges(np_dtype(var)), np.abs(numbers[var])
        period = (crossings + len(edges)) * len(edges)  # places after which the pattern begins again
        cycle, place = np.divmod(np.arange(at, at + min(own.size, period)), crossings + len(edges))
        sign = np.array([1, -1, 0, -0.0], own.dtype)[place // SIGNS ** (i % MOST_CROSSED) % SIGNS]
        edge = edges[(place - crossings + i * cycle) % len(edges)].astype(own.dtype)
        crosses, sign, edge = (np.resize(part, own.shape) for part in (place < crossings, sign, edge))
        mixed = np.where(crosses, own * sign, edge)
        values[var] = drawing.bounded(var, mixed, np_dtype(var))
    return values


# -- small domains and ranges of integers ------------------------------------------------------------------

WHOLE = 1024
"""The most combinations of values that are all tried: ten booleans, or two integers of five bits. A choice."""
INTEGER_DRAWS = 16
"""How often a pass's integers are drawn to see their range. A value in every second draw is missed with a
probability of 1 in 65,536."""
ENDS = 0.1
"""Share of draws that must be the least and the largest value for these to count as ends of a range: of
integers spread over ten values or more, fewer are ends by chance."""


def _values_of(var: Var, drawing: Drawing) -> range | None:
    """Return the values that each element of a boolean or integer input may have; None where unknown."""
    dtype = np_dtype(var) if types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type) else None
    if dtype is None or dtype.kind not in "biu" or drawing.sample(var, np.random.default_rng(0)) is not None:
        return None
    if dtype.kind == "b":
        return range(2)
    info = np.iinfo(dtype)
    low, high = (drawing.bounds or {}).get(var, stored_interval(var))
    if np.ndim(low) or np.ndim(high):
        return None  # each has ends of its own
    return range(int(max(low, info.min)), int(min(high, info.max)) + 1)


def all_combinations(
    drawn: Sequence[Var], drawing: Drawing, ops: Sequence[Operation]
) -> Iterator[dict[Var, Array]] | None:
    """Return all combinations of input values of a site; None where these are too many, or unknown."""
    choices = [_values_of(var, drawing) for var in drawn]
    countable = [c for c in choices if c is not None]
    if not drawn or len(countable) < len(drawn):
        return None
    if any(any_symbolic(v.shape or ()) for v in drawn) or any(map(_draws_some_integers, ops)):
        return None
    sizes = [math.prod(drawn_shape(var)) for var in drawn]
    elements = [c for c, size in zip(countable, sizes, strict=True) for _ in range(size)]
    total = math.prod(map(len, elements)) if len(elements) <= WHOLE else math.inf
    return _counted_through(drawn, elements, int(total)) if total <= WHOLE else None


def _draws_some_integers(op: Operation) -> bool:
    """Return whether an op reads integers of which only some are drawn, such as positions or indices."""
    for name, value in op.inputs.items():
        if name in ADDRESSES and not isinstance(value, (list, tuple)) and constant(value) is None:
            return True
    if op.op_type not in LOOKUPS:
        return op.op_type.startswith("scatter")
    counts_back = op.opset_version < ct.target.iOS17 and stored_interval(op.indices)[0] < 0
    return constant(op.indices) is None and (counts_back or any_symbolic(op.x.shape))


def _counted_through(drawn: Sequence[Var], elements: Sequence[range], total: int) -> Iterator[dict[Var, Array]]:
    """Yield all combinations of element values, counting through them."""
    for index in range(total):
        chosen = []
        for choice in elements:
            index, at = divmod(index, len(choice))
            chosen.append(choice[at])
        numbers: dict[Var, Array] = {}
        for var in drawn:
            shape = drawn_shape(var)
            here, chosen = chosen[: math.prod(shape)], chosen[math.prod(shape) :]
            numbers[var] = np.array(here).reshape(shape).astype(np_dtype(var))
        yield numbers


def drawn_range(var: Var, drawing: Drawing, rng: np.random.Generator) -> range:
    """Return the range of the integers that are drawn for a value; empty where it is unknown."""
    bounds = (drawing.bounds or {}).get(var)
    samples = [drawing.sample(var, rng) for _ in range(INTEGER_DRAWS)]
    if all(g is None for g in samples):
        return range(0) if bounds is None or np.ndim(bounds[1]) else range(int(bounds[0]), int(bounds[1]) + 1)
    drawn = np.stack([np.asarray(g) for g in samples])
    if drawn.size == 0 or drawn.dtype.kind not in "iu":
        return range(0)
    spans = drawn.max(0).astype(np.int64) - drawn.min(0)
    low, high = int(drawn.min()), int(drawn.max())
    if 2 * int(spans.min()) < high - low or low == high:
        return range(0)  # each has a range of its own, or they belong to another value
    least, most = (low, high) if bounds is None or np.ndim(bounds[1]) else (int(bounds[0]), int(bounds[1]))
    if min(float((drawn == end).mean()) for end in (low, high)) > ENDS:
        return range(low, high + 1)  # its ends come again and again: it is a range that somebody promises
    if least <= low and high <= most and 2 * (high - low) >= most - least:
        low, high = least, most  # drawn from all that may be asked for
    return range(low, high + 1)
