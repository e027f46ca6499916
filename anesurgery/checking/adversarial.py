"""Draw inputs that tell two computations apart: numbers of every kind and scale, and indices into tables.

Among them are both zeros, subnormals, ties, the whole range of integers, infinities and NaN. A round is one
draw for all values that both sides read; `schedule` lists the kinds of rounds. What is known of a value bounds
it: its interval, or the table that it indexes. A condition such as x = 5 holds for a single number, so each
constant of both sides is hit on purpose, together with constants of its size: beside much larger numbers a
difference there would vanish below any tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from anesurgery.checking.grades import AtMost
from anesurgery.checking.lengths import drawn_shape, evaluator, length_of
from anesurgery.errors import InterpretError
from anesurgery.interpret.sampling import LOOKUPS, is_guard
from anesurgery.mil import (
    Array,
    Operation,
    Var,
    constant,
    consumers,
    ct,
    is_symbolic,
    np_dtype,
    operands,
    reads,
    types,
)
from anesurgery.ops import JOINING, MOVING, PADDING, POINTWISE, REARRANGING, names
from anesurgery.semantics.intervals import stored_interval
from anesurgery.semantics.reading import is_tensor, number

Sampler = Callable[[Var, np.random.Generator], "Array | None"]

ROUNDS = ("normal", "special", "nonfinite", "ties", "offset", "cancelling", "large", "small", "rows", "largest")
"""The kinds of rounds, the most telling first. In small sites "channels" follow: rows along another axis than
the last, as channels are."""
PEAKS = {"peak": 1, "dip": -1}
"""Kinds of rows with one number, and its sign."""
AGAIN, IN_TURN = 2, ("offset", "cancelling", "rows")
"""Rounds after which these kinds give way to small numbers, among which are the edges of floats: a site of few
numbers has no room for all edges in less."""
CALLED = {"nonfinite": "infinities and NaN", "ties": "ties", "large": "large numbers"}
CALLED |= {"small": "small numbers", "largest": "the largest numbers"}
CALLED |= {"offset": "means far above the spread", "cancelling": "terms that cancel"}
"""Kinds of rounds as reports say them."""
FEW = 3
"""Rounds of a site with many numbers: the first kinds, as each is a run of both sides."""
MANY = 1 << 20
"""Numbers in a round above which a site gets few rounds: 4 MB of fp32, more than a core keeps in its cache."""
PERIOD = 262_139
"""Floats of a large value after which they come again: a prime, so that rows and columns differ."""
SEVERAL, IN_SMALL = 1 << 14, ("rows",)
"""Numbers in a round above which a site does without some kinds."""
FEW_ROWS = 8
"""Rows at which two tables differ that are looked at: one would show it, and each is one more row to draw."""
HUGE = 1 << 24
"""Numbers read, weights among them, above which a site gets one round, or two if it reads floats: a round reads
67 MB of fp32 then, and the time of a check is that of its rounds."""
NUMBERS = 4096
"""How many numbers a small site is checked on at least, the rounds being repeated up to `REPEATS` times: so few
cost hardly more than the ops themselves."""
REPEATS = 5
"""A choice: from one number on, five rounds have drawn each kind of number several times."""
LARGEST = float(np.finfo(np.float32).max)
"""The largest number that is drawn: what the interpreter computes with."""
BEYOND_FLOATS = (2**11, 2**11 + 1, *(2**24, 2**24 + 1) * 3)
"""Neighbouring integers that are one number in fp16 or in fp32; the latter more often."""
OFFSET, OFFSET_HALF = 3000.0, 1000.0
"""How many times its spread the mean of a value is: in fp16 the spread has to be more than rounding, too."""
SCALES = {"zeros": 0.0, "small": 1e-4, "large": 64.0}
SHARES = (0.1, 0.5)
"""Shares of infinities and NaN: few, so that a row is left finite, or so many that two values meet in one."""
MODERATE = (8.0, 1e4)
"""Magnitudes of constants whose neighbours are drawn without larger numbers beside them: at 8 a sigmoid of fp16
still differs from 1, and 1e4 is large and within fp16."""
TRUE = {"near": 1.0, "largest": 1.0, "small": 0.0}
"""Share of conditions that hold, in rounds where it is not half: sums of masks reach their ends there."""
FEW_PLACES = 8
"""Integers of a vector of up to this many elements may have a range each: begins and ends of slices have one
for each axis, of which there are five at most."""
SMALL_CONSTANT = 64
"""Constants of up to this many elements are aimed at: limits, slopes and ends are few, weights many."""
IMPLIED: dict[str, tuple[float, ...]] = {"relu6": (6.0,), "softsign": (1.0,), "sigmoid_hard": (-2.5, 2.5)}
"""Constants that an op type has by itself; a cast has the ends of narrow integers."""


@dataclass(frozen=True)
class Drawing:
    """What to know for drawing at one site."""

    sample: Sampler
    """Gives values for a var whose range matters (ids, for example), or None."""
    constants: tuple[float, ...] = ()
    """The small constants of both sides: numbers at and around them are drawn."""
    bounds: Bounds | None = None
    """Where integers must lie, since they address something: all of them, or each."""
    ordinary: bool = False
    """Stay between the roots of the smallest and largest numbers, so that products stay normal?"""
    subnormals: bool = True
    """Draw them? Not where a pass promises equal bits unless numbers overflow or vanish."""

    magnitude: float = math.inf
    """The largest magnitude of floats."""
    limits: Mapping[Var, float] = field(default_factory=dict)
    """The largest magnitude of single values, in its place."""
    rows: Mapping[Var, Sequence[int]] = field(default_factory=dict)
    """Index -> rows at which tables of both sides differ; see `rows_apart`."""

    def draw(self, var: Var, kind: str, rng: np.random.Generator) -> Array:
        """Values for one var in one kind of round.

        Raises:
            ValueError: the var is not a plain tensor.
        """
        if not (types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type)):
            raise ValueError(f"%{var.name} is not a tensor")
        sampled = self.sample(var, rng)
        if sampled is not None:
            return self._aimed(var, np.asarray(sampled), kind, rng)
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
            return self.bounded(var, self.of(var).floats(shape, dtype, kind, rng), dtype)
        few = self.bounded(var, self.of(var).floats((PERIOD,), dtype, kind, rng), dtype)
        return np.resize(few, shape)

    def of(self, var: Var) -> Drawing:
        """What to know for drawing one value."""
        limit = self.limits.get(var)
        return self if limit is None or isinstance(limit, AtMost) else replace(self, magnitude=limit, limits={})

    def _aimed(self, var: Var, sampled: Array, kind: str, rng: np.random.Generator) -> Array:
        """Integers that a pass draws from a range, some of them constants or their neighbours in the range."""
        if sampled.dtype.kind not in "iu" or kind not in ("special", "ties") or not sampled.size:
            return sampled
        again = np.asarray(self.sample(var, rng))
        if np.array_equal(sampled, again):
            return sampled  # always the same: it belongs to another value
        low, high = (int(end(np.concatenate([sampled.ravel(), again.ravel()]))) for end in (np.min, np.max))
        near = {0, 1, -1, *(int(c) + d for c in self.constants if abs(c) < 2**31 for d in (-1, 0, 1))}
        if sampled.ndim == 1 and sampled.size <= FEW_PLACES:
            return self._aimed_each(var, sampled, near, rng)
        beside = [n for n in near if low <= n <= high]
        aimed = rng.choice(sorted(beside) or [low], sampled.shape)
        return np.where(rng.random(sampled.shape) < 0.7, aimed, sampled).astype(sampled.dtype)

    def _aimed_each(self, var: Var, sampled: Array, near: set[int], rng: np.random.Generator) -> Array:
        """The same where each element may have a range of its own, as the places of a slice have."""
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
        """Floats of one kind of round."""
        largest = self.ends(dtype)[1]
        normal = np.asarray(rng.standard_normal(shape, np.float32))
        if kind in SCALES:
            return normal * np.float32(SCALES[kind])
        if kind in ("offset", "cancelling"):
            return self._far(normal, dtype, alternating=kind == "cancelling")
        if kind == "largest":
            return _some(rng, _uniform(rng, shape, -1, 1) * np.float32(largest), 0.5, self._far_edges(dtype))
        if kind == "ties":
            return rng.integers(-1, 2, shape, np.int8).astype(np.float32)
        if kind in ("rows", "channels"):
            return _flat_rows(rng, normal, turned=kind == "channels" and normal.ndim > 1)
        if kind in PEAKS:
            axes = int(rng.integers(1, normal.ndim)) if normal.ndim > 1 else 0
            return PEAKS[kind] * _alone(rng, np.abs(normal), axes)
        if kind == "near":
            special = self._special(dtype, min(largest, rng.choice(MODERATE))).astype(np.float32)
            scaled = normal * np.float32(10) ** _uniform(rng, shape, -4, 0)
            chosen = each(rng, special, shape)
            return np.where(rng.random(shape) < 0.5, chosen + scaled, chosen)  # -0.0 stays what it is
        if kind == "special":
            decades = _uniform(rng, shape, -4, min(4.0, math.log10(largest)))
            scaled = normal * np.exp(decades * np.float32(math.log(10)))
            return _some(rng, scaled, 0.5, self._special(dtype, largest))
        if kind == "nonfinite":
            return _some(rng, normal, rng.choice(SHARES), np.array([np.inf, -np.inf, np.nan]))
        return normal

    def ends(self, dtype: np.dtype[Any]) -> tuple[float, float]:
        """The smallest magnitude of what is aimed at, but 0, and the largest of all."""
        largest = min(float(np.finfo(dtype).max), LARGEST)
        if self.ordinary and largest > 1e5:
            largest = math.sqrt(largest)
        return 1 / largest if self.ordinary else 0.0, min(largest, self.magnitude)

    def _far(self, normal: Array, dtype: np.dtype[Any], *, alternating: bool) -> Array:
        """Numbers whose mean is far above their spread; alternating, neighbours cancel."""
        times = OFFSET_HALF if dtype == np.float16 else OFFSET
        mean = min(times, self.magnitude / 2)  # the same for all values: their differences are small too
        far = np.float32(mean) + normal * np.float32(mean / times)
        return far * (1 - 2 * (np.indices(normal.shape).sum(0) % 2)) if alternating else far

    def _far_edges(self, dtype: np.dtype[Any]) -> Array:
        """The largest magnitude and its neighbour inside, of both signs."""
        most = dtype.type(self.ends(dtype)[1])
        return signs(np.array([most, np.nextafter(most, dtype.type(0))], np.float64))

    def _special(self, dtype: np.dtype[Any], largest: float) -> Array:
        """Zeros, subnormals, ties, the largest numbers, and each constant with its neighbours."""
        fixed = np.array([0.0, 0.0, 0.0, 0.5, 1.0, 1.5, 2.5, 1e-4, largest], np.float64)  # 0 is met most often
        with np.errstate(over="ignore", invalid="ignore"):
            around = np.array([c for c in self.constants if abs(c) <= largest], np.float64).astype(dtype)
            up, down = (np.nextafter(around, dtype.type(end)) for end in (np.inf, -np.inf))
            numbers = np.concatenate([fixed, around, up, down, around + 1.0, around - 1.0])
        both = signs(numbers.astype(np.float64))
        least = self.ends(dtype)[0]
        kept = np.isfinite(both) & (np.abs(both) <= largest) & ((np.abs(both) >= least) | (both == 0))
        far = self._far_edges(dtype)
        return np.concatenate([both[kept], self.near_edges(dtype), far[np.abs(far) <= largest]])

    def near_edges(self, dtype: np.dtype[Any]) -> Array:
        """The small edges of floats that are drawn; see `near_edges`."""
        edges = near_edges(dtype)
        return edges[self.subnormals | (edges == 0) | (np.abs(edges) >= float(np.finfo(dtype).tiny))]

    def _integers(self, var: Var, kind: str, rng: np.random.Generator) -> Array:
        shape, info = drawn_shape(var), np.iinfo(np_dtype(var))
        low, high = info.min, info.max
        if self.bounds is not None and var in self.bounds:
            least, most = (np.asarray(b).astype(np.int64) for b in self.bounds[var])
            anywhere = rng.integers(least, most, shape, endpoint=True)
            known = self._near(int(least.min()), int(most.max()))
            ends = [] if kind != "special" or least.ndim or most.ndim else [int(least), int(most)]
            special = np.array([*ends, *(known if kind != "normal" else ())], np.int64)
            hit = rng.random(shape) < 0.5
            if not special.size:
                return np.asarray(anywhere)
            return np.where(hit, np.clip(rng.choice(special, shape), least, most), anywhere)
        special = np.array([0, -1, low, low + 1, high, *self._near(low, high)], np.int64)
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

    def _near(self, low: int, high: int) -> list[int]:
        """The constants of both sides and their neighbours, as far as they lie between two integers."""
        near = [int(c) + d for c in self.constants if abs(c) < 2**31 for d in (-1, 0, 1)]
        return [n for n in near if low <= n <= high]

    def bounded(self, var: Var, values: Array, dtype: np.dtype[Any]) -> Array:
        """Inside what is known of the var."""
        low, high = stored_interval(var)
        with np.errstate(over="ignore", invalid="ignore"):
            if math.isfinite(low) or math.isfinite(high):
                if math.isfinite(low) and math.isfinite(high):
                    values = np.where(np.isfinite(values), values, low)
                values = np.clip(values, low, high)
            top = min(float(np.finfo(dtype).max), self.of(var).magnitude) if dtype.kind == "f" else math.inf
            least, limit = -top, self.limits.get(var)
            top = min(top, limit) if isinstance(limit, AtMost) else top
            values = np.asarray(values)
            if not (least <= values.min(initial=0) and values.max(initial=0) <= top):
                values = np.where(np.isfinite(values), np.clip(values, least, top), values)
            return values.astype(dtype)


def _flat_rows(rng: np.random.Generator, values: Array, *, turned: bool) -> Array:
    """Values with rows of zeros, rows that do not vary, and rows of one number: the ends of norms.

    Where there are several rows, some are of each kind; turned, they stand along another axis than the last.
    """
    if not values.ndim or not values.size:
        return values * 0
    if turned:
        axis = int(rng.integers(values.ndim - 1))
        return np.moveaxis(_flat_rows(rng, np.moveaxis(values, axis, -1), turned=False), -1, axis)
    several = [a for a in range(1, values.ndim) if math.prod(values.shape[:a]) > 1]
    axes = int(rng.choice([0, *several * 2]))
    shape = (*values.shape[:axes], *(1,) * (values.ndim - axes))
    kinds = np.arange(math.prod(shape)) % 4 if math.prod(shape) > 1 else rng.integers(0, 3, 1)
    kind = rng.permutation(kinds).reshape(shape)
    first = values[(slice(None),) * axes + (slice(0, 1),) * (values.ndim - axes)]
    first = np.round(first * 8) / 8  # sums of equal numbers round all in one direction, but not these
    alone = _alone(rng, values, axes)
    return np.select([kind == 0, kind == 1, kind == 2], [np.zeros_like(values), first, alone], values)


def _alone(rng: np.random.Generator, values: Array, axes: int) -> Array:
    """Values of which each row beyond some axes has one number: where norms and shares tell how long it is."""
    alone = np.zeros_like(values)
    if values.size:
        at = (slice(None),) * axes + tuple(int(rng.integers(n)) for n in values.shape[axes:])
        alone[at] = values[at]
    return alone


def _uniform(rng: np.random.Generator, shape: tuple[int, ...], low: float, high: float) -> Array:
    """Floats between two numbers."""
    return np.asarray(rng.random(shape, np.float32) * np.float32(high - low) + np.float32(low))


def signed(rng: np.random.Generator, sizes: Array) -> Array:
    """Numbers of these sizes, of either sign."""
    numbers: Array = sizes * rng.choice([-1, 1], sizes.shape)
    return numbers


def signs(numbers: Array) -> Array:
    """Numbers and their negatives."""
    return np.concatenate([numbers, -numbers])


def near_edges(dtype: np.dtype[Any]) -> Array:
    """Both zeros, and of both signs where subnormals begin and end, and what rounds to 0 in fp16."""
    infos: list[Any] = [np.finfo(np.float16), *([np.finfo(np.float32)] if dtype != np.float16 else [])]
    least = [float(i.smallest_subnormal) for i in infos]
    ends = [end for i in infos for end in (float(i.tiny), float(np.nextafter(i.tiny, i.dtype.type(0))))]
    lost = [least[0] * share for share in (1 / 3, 1 / 2, 3 / 4)] if dtype != np.float16 else []
    return signs(np.array([0.0, *least, *ends, *lost], np.float64))


def between(
    low: float, high: float, shape: tuple[int, ...], dtype: np.dtype[Any], rng: np.random.Generator
) -> Array:
    """Floats from one number to another, both of these and the small edges of floats among them."""
    ends = np.array([low, high], dtype)
    edges = np.concatenate([ends, np.nextafter(ends, ends[::-1]), near_edges(dtype)])
    inside = edges[(low <= edges) & (edges <= high)]
    return _some(rng, rng.uniform(low, high, shape).astype(np.float32), 0.5, inside).astype(dtype)


def _some(rng: np.random.Generator, values: Array, share: float, choices: Array) -> Array:
    """Values of which a share, at least one, is drawn from what is known."""
    hit = np.asarray(rng.random(values.shape, np.float32) < share)
    if hit.size and not hit.any():
        hit.flat[rng.integers(hit.size)] = True
    values = values.copy()
    values[hit] = each(rng, choices.astype(np.float32), (int(hit.sum()),))
    return values


def each(rng: np.random.Generator, numbers: Array, shape: tuple[int, ...]) -> Array:
    """Known numbers in any order: each of them, where there is room for all."""
    return np.resize(rng.permutation(numbers), math.prod(shape)).reshape(shape)


def constants_of(ops: Iterable[Operation]) -> tuple[float, ...]:
    """The distinct finite numbers in the small constants that some ops read."""
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
    """The numbers by which an op decides although it reads no such constant."""
    dtype = np_dtype(op.outputs[0]) if op.op_type == "cast" else None
    if dtype is None or dtype.kind not in "iu" or dtype.itemsize >= np.dtype(np.int32).itemsize:
        return IMPLIED.get(op.op_type, ())
    return float(np.iinfo(dtype).min), float(np.iinfo(dtype).max)


def rows_apart(old: Var, old_ops: Sequence[Operation], new: Var, new_ops: Sequence[Operation]) -> list[int]:
    """Some rows at which a table that one value indexes differs from its counterpart: few of many may.

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
    """The constant tables that a value indexes, with their rows first."""
    reached, tables = {index}, []
    for op in ops:
        where, table = LOOKUPS.get(op.op_type, ("", ""))
        if where and op.inputs[where] in reached:
            value, axis = constant(op.inputs[table]), constant(op.inputs.get("axis"))
            plain = not op.op_type.endswith("_nd") and np.ndim(value)
            tables += [np.moveaxis(np.asarray(value), int(axis or 0), 0)] if plain else []
        elif any(among(value, reached) for value in op.inputs.values()):
            reached.update(v for v in op.outputs if np_dtype(v).kind in "iu")
    return tables


def weights(ops: Iterable[Operation]) -> int:
    """How many numbers the largest constant holds that some ops read."""
    read = {v for op in ops for v in reads(op) if v.op is not None and v.op.op_type == "const"}
    return max((int(np.size(constant(v))) for v in read if np_dtype(v).kind in "fiub"), default=0)


def schedule(numbers: int, nonfinite: bool, weight: int = 0, floats: bool = True) -> list[str]:
    """The kinds of the rounds.

    Args:
        numbers: how many numbers a site reads from outside.
        nonfinite: may they be infinite or NaN?
        weight: how many numbers its largest constant holds.
        floats: does it read floats?
    """
    kinds = [kind for kind in ROUNDS if nonfinite or kind != "nonfinite"]
    if numbers + weight > HUGE:
        return kinds[:2] if floats else ["special"]
    if numbers > MANY:
        return kinds[:FEW]
    if numbers > SEVERAL:
        return [kind for kind in kinds if kind not in IN_SMALL]
    again = max(1, min(REPEATS, -(-NUMBERS // max(numbers * len(kinds), 1))))
    late = ["small" if kind in IN_TURN else kind for kind in kinds] * (again - AGAIN)
    return kinds * min(again, AGAIN) + late + ["channels"] * (again if floats else 0)


def untried(kinds: Collection[str], nonfinite: bool, floats: bool) -> tuple[str, ...]:
    """What was not tried, in words, when only rounds of some kinds were; see `schedule`."""
    useful = [k for k in CALLED if nonfinite or k != "nonfinite"] if floats else ["large"]
    return tuple(CALLED[k] for k in useful if k not in kinds)


DECIDING = POINTWISE & names(
    "equal not_equal greater greater_equal less less_equal select maximum minimum clip threshold floor_div mod"
)
"""Ops that may decide by each number of a small vector; of other ops only single numbers are aimed at."""
ALWAYS = (0.0, 0.5, 1.0, 1.5, 2.5)
"""Numbers that are special by themselves: zeros, ties of rounding."""
SPAN = 32.0
"""How many times the smallest of the constants that are met together the largest may be: among numbers up to a
far larger one, few would fall between the small ones."""
NONFINITE = (0.0, math.inf, -math.inf, math.nan)
"""What a value is in turn; in the place of 0, what was drawn."""
MOST_CROSSED = 3
"""Values of which all combinations of these are met; more take the patterns of the first ones, since each value
more takes several times as many numbers."""
SIGNS = 4
"""What a value is in turn where signs are crossed: a number, its negative, 0 and -0."""
COMBINED = 8
"""Constants up to which sums, differences, products and quotients of two are aimed at where there is room:
eight have 28 pairs already."""

DISTINCT = 2**18
"""Numbers near to what is aimed at that are drawn for a tensor; larger ones repeat them. Drawing and shuffling
the 16 million scores of 4,096 keys took longer than the comparison."""


def targets(ops: Iterable[Operation]) -> tuple[float, ...]:
    """The distinct finite constants that ops may decide by: numbers they compute with, not places or sizes."""
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
    """Values for the floats and the free integers that are read, round by round.

    Args:
        drawn: what is read.
        drawing: what is known of it.
        constants: what is aimed at; see `targets`.
        rng: for the order, and for what is left.
        apart: are constants of different sizes met in different rounds? Where equal bits are promised, a
            difference beside larger numbers shows too.
    """
    free = [v for v in drawn if _is_free(v, drawing)]
    for band in _bands({*constants, *ALWAYS, *(c + d for c in constants for d in (-1, 1))}, apart):
        wanted = {v: _around(v, band, set(constants), drawing) for v in free}
        wanted = {v: values for v, values in wanted.items() if values.size}
        rounds = max((-(-len(values) // _count(v)) for v, values in wanted.items()), default=0)
        filled = {v: _filled(v, values, rounds, constants, rng) for v, values in wanted.items()}
        for i in range(rounds):
            here = ((v, values[i * _count(v) : (i + 1) * _count(v)]) for v, values in filled.items())
            yield {v: drawing.bounded(v, x.reshape(drawn_shape(v)), np_dtype(v)) for v, x in here}


def _is_free(var: Var, drawing: Drawing) -> bool:
    """Is it a float, or an integer that says nothing about a place, that the pass does not draw itself?"""
    if not is_tensor(var) or not _count(var) or var in (drawing.bounds or {}):
        return False
    return np_dtype(var).kind in "fiu" and drawing.sample(var, np.random.default_rng(0)) is None


def _count(var: Var) -> int:
    return math.prod(drawn_shape(var))


def _bands(constants: Iterable[float], apart: bool) -> list[list[float]]:
    """Constants of about one size together; 0 with those of about 1."""
    ordered = sorted(constants, key=_size)
    if not apart:
        return [ordered]
    first, bands = 0.0, list[list[float]]()
    for one in ordered:
        if not bands or _size(one) > SPAN * first:
            first = _size(one)
            bands.append([])
        bands[-1].append(one)
    return bands


def _size(number: float) -> float:
    return abs(number) or 1.0


def _around(var: Var, band: Sequence[float], constants: set[float], drawing: Drawing) -> Array:
    """The numbers of a band and the neighbours of the constants in it, with their negatives."""
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
    least, most = drawing.of(var).ends(dtype)
    return numbers[
        np.isfinite(numbers) & (np.abs(numbers) <= most) & ((np.abs(numbers) >= least) | (numbers == 0))
    ]


def _filled(
    var: Var, wanted: Array, rounds: int, constants: Sequence[float], rng: np.random.Generator
) -> Array:
    """What is wanted, what two constants make where there is room, and numbers near to what is wanted."""
    whole = rounds * _count(var)
    more = rng.permutation([n for n in _combined(constants) if _size(n) <= SPAN * float(np.abs(wanted).max())])
    more = more[: whole - len(wanted)]
    near = np.resize(rng.permutation(wanted), min(whole - len(wanted) - len(more), DISTINCT))
    if np_dtype(var).kind == "f":
        near = near * (1 + rng.standard_normal(len(near)) * 10 ** rng.uniform(-4, 0, len(near)))
    return np.resize(rng.permutation(np.concatenate([wanted, more, near])), whole)


def _combined(constants: Sequence[float]) -> list[float]:
    """What two constants make by one operation: where x + 1 is compared with 6, 5 counts."""
    if len(constants) > COMBINED:
        return []
    numbers = {n for a, b in product(constants, repeat=2) for n in (a + b, a - b, a * b, a / b if b else a)}
    return sorted(n for n in numbers if math.isfinite(n))


def crossed(drawn: Sequence[Var], drawing: Drawing, numbers: Mapping[Var, Array], at: int) -> dict[Var, Array]:
    """Values of which each meets infinities and NaN where the others do and where they do not.

    Args:
        drawn: what is read.
        drawing: what is known of it.
        numbers: finite values for it.
        at: where the pattern begins; the number of places that earlier rounds had.
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
    """Values that meet zeros of both signs beside both signs of the others, and then small edges of floats.

    Args:
        drawn: what is read.
        drawing: what is known of it.
        numbers: finite values for it.
        at: where the pattern begins; the number of places that earlier rounds had.
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


# Where integers must lie since they say which element, how many, or where.
#
# Only the numbers that address something are bounded by it: where a slice of the ids is looked up, the others
# may be anything. Numbers are followed through ops that move them; what is computed of them bounds nothing.


Bounds = dict[Var, tuple[Any, Any]]
"""Value -> the least and the largest number of all its elements, or of each."""

ADDRESSES = names(
    """
    shape begin end stride size reps pad axis axes k one_hot_vector_size start step lengths init_length index
    num_splits split_sizes begins ends pred elem_shape
    """
)
"""Parameters whose numbers say where or how many: any large number there is an error, not a test."""
WHOLE = REARRANGING | JOINING | PADDING | {"tile"}
"""Ops whose results hold every number that they read."""
MOST_FOLLOWED = 1 << 20
"""Elements of a value that are followed one by one: ids are fewer; of larger values only the whole is."""
AS_DRAWN = 1
"""The largest of numbers that say how many: drawn so, and tried further by the check of the site."""


class _Reached(NamedTuple):
    """A value that holds numbers of another one."""

    value: Var
    at: torch.Tensor | None
    """Which ones, in their places; -1 for numbers of no concern. None: all of them, in some order."""
    shift: int = 0
    """What was added to them."""
    guarded: bool = False
    """Were negative ones made to count from the end?"""


class _Asked(NamedTuple):
    """What an op asks of some numbers."""

    at: torch.Tensor | None
    least: int
    most: int


def address_bounds(
    inputs: Iterable[Var], ops: Sequence[Operation], new_ops: Collection[Operation] = ()
) -> Bounds:
    """Where integers must lie that say which element, or how many; old lookups count back from the end too.

    Args:
        inputs: what a site reads.
        ops: the old ops, and other ops that read the integers.
        new_ops: what these ask does not count: it has to hold for whatever the old ones take.
    """
    bounds: Bounds = {}
    for var in inputs:
        if not is_tensor(var) or np_dtype(var).kind not in "iu":
            continue
        asked = list(_asked(var, new_ops))
        if _says_how_many(var, ops):
            asked.append(_Asked(None, 0, AS_DRAWN))
        if asked:
            bounds[var] = _joint(var, asked)
    return bounds


def looked_up(var: Var, new_ops: Collection[Operation] = ()) -> bool:
    """Does a lookup bound some numbers of a value?"""
    return next(_asked(var, new_ops), None) is not None


def _joint(var: Var, asked: Sequence[_Asked]) -> tuple[Any, Any]:
    """The least and the largest number: of all elements where all are asked for, else of each."""
    info = np.iinfo(np_dtype(var))
    low, high = (float(min(max(end, info.min), info.max)) for end in stored_interval(var))
    least, most = np.full(drawn_shape(var), low), np.full(drawn_shape(var), high)
    for one in asked:
        at = slice(None) if one.at is None else one.at[one.at >= 0].long().numpy()
        least.reshape(-1)[at] = np.maximum(least.reshape(-1)[at], one.least)
        most.reshape(-1)[at] = np.minimum(most.reshape(-1)[at], one.most)
    most = np.maximum(most, least)
    if least.size and np.ptp(least) == 0 and np.ptp(most) == 0:
        return float(least.flat[0]), float(most.flat[0])
    return least, most


def _says_how_many(var: Var, ops: Sequence[Operation]) -> bool:
    """Do some ops compute places or lengths of a value?"""
    reached = {var}
    for op in ops:
        for name, value in op.inputs.items():
            if not among(value, reached):
                continue
            if name in ADDRESSES:
                return True
            if op.op_type not in LOOKUPS or name != LOOKUPS[op.op_type][0]:
                reached.update(v for v in op.outputs if np_dtype(v).kind in "iu")
    return False


def among(value: Any, reached: set[Var]) -> bool:
    """Is a parameter, or one value of several, among those reached?"""
    return any(v in reached for v in (value if isinstance(value, (list, tuple)) else (value,)) if v is not None)


def _asked(var: Var, without: Collection[Operation]) -> Iterator[_Asked]:
    """What the lookups of a program ask of the numbers of a value."""
    size = math.prod(drawn_shape(var))
    first = torch.arange(size).reshape(drawn_shape(var)) if 0 < size <= MOST_FOLLOWED else None
    seen, stack = {var}, [_Reached(var, first)]
    while stack:
        reached = stack.pop()
        for op in consumers(reached.value):
            if op in without or not _runs_with(op, var):
                continue
            yield from _bounds_of(op, reached)
            fresh = [further for further in _further(op, reached) if further.value not in seen]
            seen.update(further.value for further in fresh)
            stack += fresh


def _runs_with(op: Operation, var: Var) -> bool:
    """Does an op run whenever the value is there? A branch or a loop may not."""
    block = op.enclosing_block
    if var.op is not None:
        return block is var.op.enclosing_block
    return block is not None and (block.outer_op is None or var in block.inputs)


def _bounds_of(op: Operation, reached: _Reached) -> Iterator[_Asked]:
    """What an op asks of the numbers that it reads as indices."""
    scatters = op.op_type.startswith("scatter")
    index, table = ("indices", "data") if scatters else LOOKUPS.get(op.op_type, ("", ""))
    if not index or op.inputs.get(index) is not reached.value:
        return
    back = reached.guarded or (not scatters and op.opset_version < ct.target.iOS17)
    for at, rows in _indexed(op, op.inputs[table], reached):
        yield _Asked(at, (-rows if back else 0) - reached.shift, rows - 1 - reached.shift)


def _indexed(op: Operation, table: Var, reached: _Reached) -> list[tuple[torch.Tensor | None, int]]:
    """Which numbers index an axis of a table, and how long it is."""
    if not op.op_type.endswith("_nd"):
        axis = int(constant(op.inputs.get("axis")) or 0)
        return [(reached.at, length_of(table.shape[axis]))] if table.rank else []
    first = int(constant(op.inputs.get("batch_dims")) or 0)
    count = reached.value.shape[-1]
    lengths = [] if is_symbolic(count) else [length_of(n) for n in table.shape[first : first + int(count)]]
    if reached.at is None:  # each may be of the longest axis
        return [(None, max(lengths))] if lengths else []
    return [(reached.at[..., i], rows) for i, rows in enumerate(lengths)]


def _further(op: Operation, reached: _Reached) -> list[_Reached]:
    """The results of an op that hold the numbers."""
    if op.op_type in ("cast", "identity") or is_guard(op, reached.value):
        guarded = reached.guarded or op.op_type == "select"
        return [reached._replace(value=op.outputs[0], guarded=guarded)]
    if op.op_type == "add":
        added = number(op.y if op.x is reached.value else op.x)
        alike = op.outputs[0].shape == reached.value.shape and added is not None and added % 1 == 0
        return [reached._replace(value=op.outputs[0], shift=reached.shift + int(added or 0))] if alike else []
    if op.op_type not in MOVING | WHOLE or op.inputs.get("indices") is reached.value:
        return []
    moved = _moved(op, reached)
    whole = op.op_type in WHOLE and (reached.at is None or bool((reached.at >= 0).all()))
    places: Sequence[torch.Tensor | None] = moved if moved else [None] * len(op.outputs) if whole else []
    return [reached._replace(value=v, at=at) for v, at in zip(op.outputs, places, strict=False)]


def _moved(op: Operation, reached: _Reached) -> list[torch.Tensor]:
    """Which number is where in each result; nothing where that cannot be said."""
    others = [v for name, v in operands(op) if v is not reached.value and constant(v) is None]
    if reached.at is None or (others and op.op_type not in JOINING):
        return []
    numbers = {v: torch.full(drawn_shape(v), -1, dtype=torch.int32) for v in others}
    try:
        return list(evaluator([op], op.outputs)(numbers | {reached.value: reached.at.int()}))
    except InterpretError:
        return []


# Find up to where the old side takes integers that say where or how many: they are drawn from 0 to there.


FARTHEST = 1 << 10
"""Up to where places are tried. A choice: caches are longer, but nothing else happens farther on."""


def places_taken(values: Iterable[Var], taken: Callable[[Bounds], bool]) -> Bounds:
    """The largest place that is taken for each number of some values, beside zeros for all others.

    Args:
        values: integers that say where or how many.
        taken: can the old side be computed with these?
    """
    none: Bounds = {var: (np.zeros(drawn_shape(var)),) * 2 for var in values}
    ends: Bounds = {}
    for var in none:
        most = np.zeros(drawn_shape(var))
        for at in np.ndindex(most.shape) if most.size <= FEW_PLACES else ():
            least, beyond = 0, FARTHEST
            while beyond - least > 1:
                place = min(2 * least + 1, (least + beyond) // 2)
                tried = np.zeros(drawn_shape(var))
                tried[at] = place
                least, beyond = (place, beyond) if taken(none | {var: (tried, tried)}) else (least, place)
            most[at] = least
        ends[var] = 0, most
    return ends
