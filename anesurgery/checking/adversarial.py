"""Draw adversarial inputs that tell two computations apart.

`numbers` (for one edit) and `trials` (for a whole model) draw round by round; `schedule` lists the kinds of
rounds. Together they hold both zeros, subnormals, ties, the whole range of integers, infinities and NaN. What
is known of an input bounds it: its interval, or the table that it indexes (`addresses`). A condition such as x
= 5 holds for a single number, so each constant of both sides is drawn on purpose too, together with constants
of similar size: beside much larger numbers a difference there would vanish below any tolerance (`aiming`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from anesurgery.checking.addresses import FEW_PLACES, Bounds, is_among
from anesurgery.checking.grades import UpperLimit
from anesurgery.checking.lengths import drawn_shape
from anesurgery.mil import Array, Operation, Var, constant, np_dtype, reads, types
from anesurgery.ops import LOOKUPS
from anesurgery.semantics.intervals import stored_interval

Sampler = Callable[[Var, np.random.Generator], "Array | None"]

ROUNDS = ("normal", "special", "nonfinite", "ties", "offset", "cancelling", "large", "small", "rows", "largest")
"""The kinds of rounds, the most telling first. Small sites also get "channels": rows along an axis other than
the last."""
PEAKS = {"peak": 1, "dip": -1}
"""Kinds of rounds with one nonzero number in each row -> its sign."""
AGAIN, IN_TURN = 2, ("offset", "cancelling", "rows")
"""After this many rounds of each kind, these kinds are replaced by "small": small sites need several rounds to
draw all edges of floats, which are small numbers."""
CALLED = {"nonfinite": "infinities and NaN", "ties": "ties", "large": "large numbers"}
CALLED |= {"small": "small numbers", "largest": "the largest numbers"}
CALLED |= {"offset": "means far above the spread", "cancelling": "terms that cancel"}
"""Kind of round -> its name in reports."""
FEW = 3
"""Rounds of a site with many numbers: only the first kinds, since each round runs both sides."""
MANY = 1 << 20
"""Above this many numbers a site gets few rounds: 4 MB of fp32, more than a core's cache."""
PERIOD = 262_139
"""Floats of a large value repeat after this many: a prime, so that rows and columns differ."""
SEVERAL, IN_SMALL = 1 << 14, ("rows",)
"""Above this many numbers a site is drawn without these kinds."""
FEW_ROWS = 8
"""The most rows at which two tables differ that are drawn: one shows the difference."""
HUGE = 1 << 24
"""Above this many numbers, weights included, a site gets one round, or two if it reads floats: each then reads
67 MB of fp32, and a check takes as long as its rounds."""
NUMBERS = 4096
"""A small site is checked on at least this many numbers, by repeating rounds up to `REPEATS` times: so few cost
hardly more than starting the ops."""
REPEATS = 5
"""A choice: even for a single number, five repetitions draw each kind of number several times."""
LARGEST = float(np.finfo(np.float32).max)
"""The largest number that is drawn, as the interpreter computes in fp32."""
BEYOND_FLOATS = (2**11, 2**11 + 1, *(2**24, 2**24 + 1) * 3)
"""Pairs of integers that round to one number in fp16, or, drawn more often, in fp32."""
OFFSET, OFFSET_HALF = 3000.0, 1000.0
"""Mean divided by spread in "offset" rounds; smaller in fp16, where the spread must exceed rounding."""
SCALES = {"zeros": 0.0, "small": 1e-4, "large": 64.0}
SHARES = (0.1, 0.5)
"""Shares of infinities and NaN in a round: few, so that some rows stay finite; or so many that two meet in one
op."""
MODERATE = (8.0, 1e4)
"""Limits for constants whose neighbours are drawn without larger numbers beside them. Up to 8, a sigmoid in
fp16 still differs from 1; 1e4 is large, and within fp16."""
TRUE = {"near": 1.0, "largest": 1.0, "small": 0.0}
"""Kind of round -> share of conditions that are true, where it is not half: sums of masks reach their ends
there."""
SMALL_CONSTANT = 64
"""Constants of up to this many elements are drawn on purpose: limits, slopes and ends are that small."""
IMPLIED: dict[str, tuple[float, ...]] = {"relu6": (6.0,), "softsign": (1.0,), "sigmoid_hard": (-2.5, 2.5)}
"""Op type -> constants built into it; a cast to a narrow integer has its range (`implied`)."""


@dataclass(frozen=True)
class Drawing:
    """How to draw the inputs of one site."""

    sample: Sampler
    """Returns values for a var whose range matters (ids, for example), or None."""
    constants: tuple[float, ...] = ()
    """The small constants of both sides; numbers at and around them are drawn."""
    bounds: Bounds | None = None
    """Ranges of integers that address something."""
    ordinary: bool = False
    """Whether magnitudes stay between the square roots of the smallest and largest floats, so that products are
    normal numbers."""
    subnormals: bool = True
    """Whether subnormals are drawn. Not where a pass promises equal bits unless numbers overflow or vanish."""

    magnitude: float = math.inf
    """The largest magnitude of floats."""
    limits: Mapping[Var, float] = field(default_factory=dict)
    """Value -> its largest magnitude, where it is not `magnitude`."""
    rows: Mapping[Var, Sequence[int]] = field(default_factory=dict)
    """Index -> rows at which tables of both sides differ (`rows_apart`)."""

    def draw(self, var: Var, kind: str, rng: np.random.Generator) -> Array:
        """Return values for one var in one kind of round.

        Raises:
            ValueError: the var is not a plain tensor.
        """
        if not (types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type)):
            raise ValueError(f"%{var.name} is not a tensor")
        sampled = self.sample(var, rng)
        if sampled is not None:
            return self._sampled_near_constants(var, np.asarray(sampled), kind, rng)
        shape, dtype = drawn_shape(var), np_dtype(var)
        if dtype.kind == "b":
            return rng.random(shape) < TRUE.get(kind, 0.5)
        if dtype.kind not in "fiu":
            raise ValueError(f"%{var.name} holds {dtype}")
        if dtype.kind != "f":
            numbers, rows = self._integers(var, kind, rng), self.rows.get(var, ())
            if len(rows) and kind != "normal":
                numbers = np.where(rng.random(shape) < 0.5, rng.choice(rows, shape), numbers)
            return self.bounded(var, numbers, dtype)
        if math.prod(shape) <= 2 * PERIOD or kind in PEAKS:
            return self.bounded(var, self.for_value(var).floats(shape, dtype, kind, rng), dtype)
        few = self.bounded(var, self.for_value(var).floats((PERIOD,), dtype, kind, rng), dtype)
        return np.resize(few, shape)

    def for_value(self, var: Var) -> Drawing:
        """Return the drawing of one value, with its own limit."""
        limit = self.limits.get(var)
        if limit is None or isinstance(limit, UpperLimit):
            return self
        return replace(self, magnitude=limit, limits={})

    def _sampled_near_constants(self, var: Var, sampled: Array, kind: str, rng: np.random.Generator) -> Array:
        """Move some of a pass's own integers to constants, or their neighbours, within the sampled range."""
        if sampled.dtype.kind not in "iu" or kind not in ("special", "ties") or not sampled.size:
            return sampled
        again = np.asarray(self.sample(var, rng))
        if np.array_equal(sampled, again):
            return sampled  # always the same: it belongs to another value
        low, high = (int(end(np.concatenate([sampled.ravel(), again.ravel()]))) for end in (np.min, np.max))
        near = {0, 1, -1, *(int(c) + d for c in self.constants if abs(c) < 2**31 for d in (-1, 0, 1))}
        if sampled.ndim == 1 and sampled.size <= FEW_PLACES:
            return self._vector_near_constants(var, sampled, near, rng)
        beside = [n for n in near if low <= n <= high]
        aimed = rng.choice(sorted(beside) or [low], sampled.shape)
        return np.where(rng.random(sampled.shape) < 0.7, aimed, sampled).astype(sampled.dtype)

    def _vector_near_constants(
        self, var: Var, sampled: Array, near: set[int], rng: np.random.Generator
    ) -> Array:
        """The same where each element may have its own range, such as the ends of a slice."""
        drawn = np.stack([sampled, *(np.asarray(self.sample(var, rng)) for _ in range(32))])
        aimed = sampled.copy()
        for i, (low, high) in enumerate(zip(drawn.min(0).tolist(), drawn.max(0).tolist(), strict=True)):
            within = sorted(n for n in near if low <= n <= high)
            if within and rng.random() < 0.7:
                aimed[i] = rng.choice(within)
        return aimed

    def floats(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], kind: str, rng: np.random.Generator
    ) -> Array:
        """Return floats of one kind of round."""
        largest = self.ends(dtype)[1]
        normal = np.asarray(rng.standard_normal(shape, np.float32))
        if kind in SCALES:
            return normal * np.float32(SCALES[kind])
        if kind in ("offset", "cancelling"):
            return self._offset_numbers(normal, dtype, alternating=kind == "cancelling")
        if kind == "largest":
            return _mixed_in(
                rng, _uniform(rng, shape, -1, 1) * np.float32(largest), 0.5, self._largest_numbers(dtype)
            )
        if kind == "ties":
            return rng.integers(-1, 2, shape, np.int8).astype(np.float32)
        if kind in ("rows", "channels"):
            return _degenerate_rows(rng, normal, turned=kind == "channels" and normal.ndim > 1)
        if kind in PEAKS:
            axes = int(rng.integers(1, normal.ndim)) if normal.ndim > 1 else 0
            return PEAKS[kind] * _single_numbers(rng, np.abs(normal), axes)
        if kind == "near":
            special = self._special_numbers(dtype, min(largest, rng.choice(MODERATE))).astype(np.float32)
            scaled = normal * np.float32(10) ** _uniform(rng, shape, -4, 0)
            chosen = shuffled_to_shape(rng, special, shape)
            return np.where(rng.random(shape) < 0.5, chosen + scaled, chosen)  # -0.0 stays what it is
        if kind == "special":
            decades = _uniform(rng, shape, -4, min(4.0, math.log10(largest)))
            scaled = normal * np.exp(decades * np.float32(math.log(10)))
            return _mixed_in(rng, scaled, 0.5, self._special_numbers(dtype, largest))
        if kind == "nonfinite":
            return _mixed_in(rng, normal, rng.choice(SHARES), np.array([np.inf, -np.inf, np.nan]))
        return normal

    def ends(self, dtype: np.dtype[Any]) -> tuple[float, float]:
        """Return the smallest nonzero magnitude of special numbers, and the largest magnitude of all."""
        largest = min(float(np.finfo(dtype).max), LARGEST)
        if self.ordinary and largest > 1e5:
            largest = math.sqrt(largest)
        return 1 / largest if self.ordinary else 0.0, min(largest, self.magnitude)

    def _offset_numbers(self, normal: Array, dtype: np.dtype[Any], *, alternating: bool) -> Array:
        """Return numbers whose mean is far above their spread; alternating, neighbours cancel."""
        times = OFFSET_HALF if dtype == np.float16 else OFFSET
        mean = min(times, self.magnitude / 2)  # the same for all values: their differences are small too
        far = np.float32(mean) + normal * np.float32(mean / times)
        return far * (1 - 2 * (np.indices(normal.shape).sum(0) % 2)) if alternating else far

    def _largest_numbers(self, dtype: np.dtype[Any]) -> Array:
        """Return the largest magnitude and its lower neighbour, of both signs."""
        most = dtype.type(self.ends(dtype)[1])
        return with_negatives(np.array([most, np.nextafter(most, dtype.type(0))], np.float64))

    def _special_numbers(self, dtype: np.dtype[Any], largest: float) -> Array:
        """Return zeros, subnormals, ties, the largest numbers, and each constant with its neighbours."""
        fixed = np.array([0.0, 0.0, 0.0, 0.5, 1.0, 1.5, 2.5, 1e-4, largest], np.float64)  # 0 is met most often
        with np.errstate(over="ignore", invalid="ignore"):
            around = np.array([c for c in self.constants if abs(c) <= largest], np.float64).astype(dtype)
            up, down = (np.nextafter(around, dtype.type(end)) for end in (np.inf, -np.inf))
            numbers = np.concatenate([fixed, around, up, down, around + 1.0, around - 1.0])
        both = with_negatives(numbers.astype(np.float64))
        least = self.ends(dtype)[0]
        kept = np.isfinite(both) & (np.abs(both) <= largest) & ((np.abs(both) >= least) | (both == 0))
        far = self._largest_numbers(dtype)
        return np.concatenate([both[kept], self.near_edges(dtype), far[np.abs(far) <= largest]])

    def near_edges(self, dtype: np.dtype[Any]) -> Array:
        """Return the small edges of floats that may be drawn; see `near_edges`."""
        edges = near_edges(dtype)
        return edges[self.subnormals | (edges == 0) | (np.abs(edges) >= float(np.finfo(dtype).tiny))]

    def _integers(self, var: Var, kind: str, rng: np.random.Generator) -> Array:
        """Return integers of one kind of round, within the bounds of a value that addresses something."""
        shape, info = drawn_shape(var), np.iinfo(np_dtype(var))
        low, high = info.min, info.max
        if self.bounds is not None and var in self.bounds:
            least, most = (np.asarray(b).astype(np.int64) for b in self.bounds[var])
            anywhere = rng.integers(least, most, shape, endpoint=True)
            known = self._near_constants(int(least.min()), int(most.max()))
            ends = [] if kind != "special" or least.ndim or most.ndim else [int(least), int(most)]
            special = np.array([*ends, *(known if kind != "normal" else ())], np.int64)
            hit = rng.random(shape) < 0.5
            if not special.size:
                return np.asarray(anywhere)
            return np.where(hit, np.clip(rng.choice(special, shape), least, most), anywhere)
        special = np.array([0, -1, low, low + 1, high, *self._near_constants(low, high)], np.int64)
        special = special[(special >= low) & (special <= high)]
        few: Array = rng.integers(max(low, -8), 9, shape)
        if kind in ("large", "largest"):
            return rng.integers(low, high, shape, endpoint=True)
        if kind == "special":
            return np.where(rng.random(shape) < 0.7, rng.choice(special, shape), few)
        if kind == "ties":
            held = np.array([n for n in BEYOND_FLOATS if low <= n <= high], np.int64)
            return np.where(rng.random(shape) < 0.9, rng.choice(held, shape), few) if held.size else few
        return few

    def _near_constants(self, low: int, high: int) -> list[int]:
        """Return the constants of both sides and their neighbours between two integers."""
        near = [int(c) + d for c in self.constants if abs(c) < 2**31 for d in (-1, 0, 1)]
        return [n for n in near if low <= n <= high]

    def bounded(self, var: Var, values: Array, dtype: np.dtype[Any]) -> Array:
        """Clip values to what is known of the var, and convert them to its dtype."""
        low, high = stored_interval(var)
        with np.errstate(over="ignore", invalid="ignore"):
            if math.isfinite(low) or math.isfinite(high):
                if math.isfinite(low) and math.isfinite(high):
                    values = np.where(np.isfinite(values), values, low)
                values = np.clip(values, low, high)
            top = math.inf
            if dtype.kind == "f":
                top = min(float(np.finfo(dtype).max), self.for_value(var).magnitude)
            least, limit = -top, self.limits.get(var)
            top = min(top, limit) if isinstance(limit, UpperLimit) else top
            values = np.asarray(values)
            if not (least <= values.min(initial=0) and values.max(initial=0) <= top):
                values = np.where(np.isfinite(values), np.clip(values, least, top), values)
            return values.astype(dtype)


def _degenerate_rows(rng: np.random.Generator, values: Array, *, turned: bool) -> Array:
    """Mix in the edge cases of norms: rows of zeros, constant rows, and rows with one nonzero number.

    If there are several rows, some are of each kind. With `turned`, rows lie along an axis other than the last.
    """
    if not values.ndim or not values.size:
        return values * 0
    if turned:
        axis = int(rng.integers(values.ndim - 1))
        return np.moveaxis(_degenerate_rows(rng, np.moveaxis(values, axis, -1), turned=False), -1, axis)
    several = [a for a in range(1, values.ndim) if math.prod(values.shape[:a]) > 1]
    axes = int(rng.choice([0, *several * 2]))
    shape = (*values.shape[:axes], *(1,) * (values.ndim - axes))
    kinds = np.arange(math.prod(shape)) % 4 if math.prod(shape) > 1 else rng.integers(0, 3, 1)
    kind = rng.permutation(kinds).reshape(shape)
    first = values[(slice(None),) * axes + (slice(0, 1),) * (values.ndim - axes)]
    first = np.round(first * 8) / 8  # sums of equal numbers round all in one direction, but not these
    alone = _single_numbers(rng, values, axes)
    return np.select([kind == 0, kind == 1, kind == 2], [np.zeros_like(values), first, alone], values)


def _single_numbers(rng: np.random.Generator, values: Array, axes: int) -> Array:
    """Set all but one number of each row to 0: norms and softmaxes then depend on the row length."""
    alone = np.zeros_like(values)
    if values.size:
        at = (slice(None),) * axes + tuple(int(rng.integers(n)) for n in values.shape[axes:])
        alone[at] = values[at]
    return alone


def _uniform(rng: np.random.Generator, shape: tuple[int, ...], low: float, high: float) -> Array:
    """Return floats between two numbers."""
    return np.asarray(rng.random(shape, np.float32) * np.float32(high - low) + np.float32(low))


def with_random_signs(rng: np.random.Generator, sizes: Array) -> Array:
    """Return numbers with random signs."""
    numbers: Array = sizes * rng.choice([-1, 1], sizes.shape)
    return numbers


def with_negatives(numbers: Array) -> Array:
    """Return numbers and their negatives."""
    return np.concatenate([numbers, -numbers])


def near_edges(dtype: np.dtype[Any]) -> Array:
    """Return both zeros, the ends of the subnormals of both signs, and numbers that round to 0 in fp16."""
    infos: list[Any] = [np.finfo(np.float16), *([np.finfo(np.float32)] if dtype != np.float16 else [])]
    least = [float(i.smallest_subnormal) for i in infos]
    ends = [end for i in infos for end in (float(i.tiny), float(np.nextafter(i.tiny, i.dtype.type(0))))]
    lost = [least[0] * share for share in (1 / 3, 1 / 2, 3 / 4)] if dtype != np.float16 else []
    return with_negatives(np.array([0.0, *least, *ends, *lost], np.float64))


def between(
    low: float, high: float, shape: tuple[int, ...], dtype: np.dtype[Any], rng: np.random.Generator
) -> Array:
    """Return floats between two numbers, with both ends and the small edges of floats among them."""
    ends = np.array([low, high], dtype)
    edges = np.concatenate([ends, np.nextafter(ends, ends[::-1]), near_edges(dtype)])
    inside = edges[(low <= edges) & (edges <= high)]
    return _mixed_in(rng, rng.uniform(low, high, shape).astype(np.float32), 0.5, inside).astype(dtype)


def _mixed_in(rng: np.random.Generator, values: Array, share: float, choices: Array) -> Array:
    """Replace a share of the values, at least one, by numbers from a list."""
    hit = np.asarray(rng.random(values.shape, np.float32) < share)
    if hit.size and not hit.any():
        hit.flat[rng.integers(hit.size)] = True
    values = np.array(values)  # a copy; numpy gives a bare number for one of rank 0
    values[hit] = shuffled_to_shape(rng, choices.astype(np.float32), (int(hit.sum()),))
    return values


def shuffled_to_shape(rng: np.random.Generator, numbers: Array, shape: tuple[int, ...]) -> Array:
    """Return the given numbers in random order; each occurs where there is room for all."""
    return np.resize(rng.permutation(numbers), math.prod(shape)).reshape(shape)


def constants_of(ops: Iterable[Operation]) -> tuple[float, ...]:
    """Return the distinct finite numbers in the small constants that some ops read."""
    numbers: set[float] = set()
    for op in ops:
        numbers.update(implied(op))
        for var in reads(op):
            value = constant(var)
            if value is None or isinstance(value, str):
                continue
            array = np.asarray(value)
            if array.dtype.kind in "fiu" and array.size <= SMALL_CONSTANT:
                numbers.update(float(v) for v in array.ravel() if np.isfinite(v))
    return tuple(sorted(numbers))


def implied(op: Operation) -> tuple[float, ...]:
    """Return the constants built into an op."""
    dtype = np_dtype(op.outputs[0]) if op.op_type == "cast" else None
    if dtype is None or dtype.kind not in "iu" or dtype.itemsize >= np.dtype(np.int32).itemsize:
        return IMPLIED.get(op.op_type, ())
    return float(np.iinfo(dtype).min), float(np.iinfo(dtype).max)


def rows_apart(old: Var, old_ops: Sequence[Operation], new: Var, new_ops: Sequence[Operation]) -> list[int]:
    """Return a few rows at which a table that one value indexes differs between both sides.

    Args:
        old: the index on the old side.
        old_ops: the ops of the old side, in order.
        new: the same index on the new side.
        new_ops: the ops of the new side, in order.
    """
    rows: dict[int, None] = {}
    for one in _tables(old, old_ops):
        for other in _tables(new, new_ops):
            if one is not other and one.shape == other.shape:
                apart = (one != other).reshape(len(one), -1).any(-1)
                rows.update(dict.fromkeys(np.flatnonzero(apart)[-FEW_ROWS:].tolist()))
    return list(rows)


def _tables(index: Var, ops: Sequence[Operation]) -> list[Array]:
    """Return the constant tables that a value indexes, rows first."""
    reached, tables = {index}, []
    for op in ops:
        if op.op_type in LOOKUPS and op.indices in reached:
            value, axis = constant(op.x), constant(op.inputs.get("axis"))
            plain = not op.op_type.endswith("_nd") and np.ndim(value)
            tables += [np.moveaxis(np.asarray(value), int(axis or 0), 0)] if plain else []
        elif any(is_among(value, reached) for value in op.inputs.values()):
            reached.update(v for v in op.outputs if np_dtype(v).kind in "iu")
    return tables


def largest_constant(ops: Iterable[Operation]) -> int:
    """Return how many numbers the largest constant holds that some ops read."""
    read = {v for op in ops for v in reads(op) if v.op is not None and v.op.op_type == "const"}
    return max((int(np.size(constant(v))) for v in read if np_dtype(v).kind in "fiub"), default=0)


def schedule(numbers: int, nonfinite: bool, weight: int = 0, floats: bool = True) -> list[str]:
    """Return the kinds of the rounds, in order.

    Args:
        numbers: how many numbers a site reads from outside.
        nonfinite: whether they may be infinite or NaN.
        weight: how many numbers its largest constant holds.
        floats: whether it reads floats.
    """
    kinds = [kind for kind in ROUNDS if nonfinite or kind != "nonfinite"]
    if numbers + weight > HUGE:
        return kinds[:2] if floats else ["special"]
    if numbers > MANY:
        return kinds[:FEW]
    if numbers > SEVERAL:
        return [kind for kind in kinds if kind not in IN_SMALL]
    repeats = max(1, min(REPEATS, -(-NUMBERS // max(numbers * len(kinds), 1))))
    late = ["small" if kind in IN_TURN else kind for kind in kinds] * (repeats - AGAIN)
    return kinds * min(repeats, AGAIN) + late + ["channels"] * (repeats if floats else 0)


def untried_in_words(kinds: Collection[str], nonfinite: bool, floats: bool) -> tuple[str, ...]:
    """Return the kinds of numbers that a schedule leaves out, in words."""
    useful = [k for k in CALLED if nonfinite or k != "nonfinite"] if floats else ["large"]
    return tuple(CALLED[k] for k in useful if k not in kinds)
