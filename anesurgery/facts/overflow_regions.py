"""Find intermediate values that overflow or underflow fp16, or cancel, although the result fits.

`wide_region(op)` returns the ops between inputs and a result that both fit fp16, when a value between them does
not; passes then widen these ops to fp32, and findings name them. Two kinds:

* Too large or small: `(a * b) * c`, `x^2 / (1 + x^2)`, the sums of linear attention, roots of means of cubes.
  `_Search` follows sizes upstream. A size is a power of 65504: 1 is the largest number of fp16, an unbounded
  value is assumed to be `UNKNOWN`, a product has the sum of its factors' sizes, a root half of its operand's.
* Without digits: nearly equal numbers cancel, or a large number is rounded; `lost_digits` has these forms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from typing import NamedTuple

import numpy as np

from anesurgery import fp16
from anesurgery.facts.lost_digits import (
    HALF,
    MAY_BE_NEAR_ONE,
    MOST,
    RULES,
    computes_in,
    covariance,
    floats_of,
    inexact_angle,
    inexact_points,
    lost_digits,
    reciprocals,
)
from anesurgery.mil import (
    Operation,
    Var,
    constant,
    consumers,
    is_stored,
    is_symbolic,
    np_dtype,
    operands,
    producer,
)
from anesurgery.ops import MOVING, names
from anesurgery.semantics import degrees
from anesurgery.semantics.analysis_cache import cached
from anesurgery.semantics.bounds import weight_norms
from anesurgery.semantics.intervals import Intervals, interval, magnitude
from anesurgery.semantics.reading import exponential, flag, number, scaled, value_and_number
from anesurgery.semantics.rows import reduced_size

UNKNOWN = 0.7
"""Assumed size of an unbounded value, 2^11: its square overflows, the value itself does not."""
BITS = 16.0
"""log2 of the largest fp16 number, which has size 1."""
OVER, UNDER = 1.0, -1.0
"""Sizes beyond which fp16 cannot hold a value with all its digits."""
FITS, LEAST = 1.25, -0.9
"""Results between these sizes count as ordinary numbers; the length of a row is somewhat above 1. A choice."""
BLOW_UP = 1024.0
"""Constant factors below this do not count. A choice: models turn values within 1 into their units with factors
such as 100 and 255, and 1024 times a value above 64 overflows.
"""
THROUGH = (
    MOVING
    | names("add sub mul maximum minimum clip abs relu select pow reduce_sum reduce_mean reduce_max reduce_min")
    | names("square sqrt rsqrt inverse real_div exp matmul linear concat stack reduce_prod cumsum")
    | names("reduce_sum_square reduce_l2_norm reduce_log_sum log avg_pool")
)
"""Ops that a region may hold."""
ENDS = names(
    "real_div mul sqrt rsqrt inverse pow log sub add sin cos reduce_argmin reduce_argmax cast reduce_l2_norm "
    "resample"
) | frozenset(RULES)
"""Ops that may end a region, since their result may fit again."""
FIXED_SIZES = {"exp": 0.0, "log": 0.1}
"""Ops whose result always has one size (of an exponential, where it does not overflow)."""
NEVER_SMALLER = frozenset({"add", "sub", "sin", "cos"})
"""Ends that bring no large value back into range: they cancel, or read an angle."""
NEXT = 12
"""The most downstream ops that are looked at for another end: ops further away have a region of their own."""


@dataclass(frozen=True)
class WideRegion:
    """The ops between values that fp16 holds and a result that it holds."""

    ops: tuple[Operation, ...]
    """All ops, the last one first."""
    widest: Operation
    """The op whose value fp16 cannot hold, or which cancels."""
    why: str
    """What is wrong with that value, in words."""
    cancels: bool = False
    """Is the reason a small difference of large numbers, and not the size of a value?"""

    @property
    def is_angle(self) -> bool:
        """Is it the angle of a sine or cosine?"""
        return self.ops[0].op_type in ("sin", "cos")

    @property
    def is_points(self) -> bool:
        """Are these the points at which an image is sampled?"""
        return self.ops[0].op_type == "resample"


class _Size(NamedTuple):
    """The size of one value and, if it is beyond fp16, the ops since the last values that fit."""

    size: float
    ops: tuple[Operation, ...] = ()
    widest: Operation | None = None
    why: str = ""


@cached
def wide_region(op: Operation, bits: int = HALF) -> WideRegion | None:
    """Return the region that ends with an op, which computes with floats of `bits` bits; None without one.

    For fp32 it is the region that fp16 could not hold.
    """
    if op.op_type not in ENDS or not computes_in(op, bits):
        return None
    if op.op_type == "resample":
        points = inexact_points(op, bits)
        return None if points is None else WideRegion(points.ops, op, points.why)
    if (loss := lost_digits(op, bits)) is not None:
        region: WideRegion | None = WideRegion(_with_wide(loss.ops, bits), loss.widest, loss.why, cancels=True)
    elif (angle := inexact_angle(op, bits)) is not None:
        region = WideRegion(angle.ops, op, angle.why)
    else:
        region = _Search(bits).ending(op)
    return region if region is not None and len(region.ops) <= MOST else None


def is_inside_later_region(op: Operation) -> bool:
    """Is an op inside a region that ends further downstream?"""
    pending, seen = [op], {op}
    while pending and len(seen) < NEXT:
        for var in pending.pop().outputs:
            for reader in consumers(var):
                if reader in seen:
                    continue
                seen.add(reader)
                region = wide_region(reader)
                if region is not None and op in region.ops:
                    return True
                if reader.op_type in THROUGH:
                    pending.append(reader)
    return False


@dataclass
class _Search:
    """One search upstream from the end of a region, with the sizes found so far."""

    bits: int
    seen: dict[Var, _Size] = field(default_factory=dict)
    ranges: Intervals = field(default_factory=cached(partial(Intervals, assume={})))
    """Intervals of values, each computed once."""
    reciprocals: Sequence[Operation] = ()
    """Reciprocals that the end sums up and inverts again: they may be of any size."""
    depth: int = 0
    """The number of ops between the end and the current value; further than `MOST` is in no region."""

    def ending(self, op: Operation) -> WideRegion | None:
        """Return the region that an op ends if its result fits and an operand does not; else None."""
        if op.op_type in NEVER_SMALLER:
            return None
        values = floats_of(op)
        self.reciprocals = reciprocals(op)
        sizes = [self.at(v) for v in values]
        worst = _widest(sizes)
        if worst is None or worst.widest is None or not self._fits(op, values, sizes):
            return None
        scaled = is_stored(op.y) if op.op_type == "real_div" else op.op_type == "mul" and len(values) == 1
        if scaled and not _no_pass_scales_before(worst.widest):
            return None  # other passes scale before it: `scale_scores`, `scale_powers`, ...
        return WideRegion(_with_wide_ops_before(op, sizes), worst.widest, worst.why)

    def _fits(self, op: Operation, values: Sequence[Var], sizes: list[_Size]) -> bool:
        """Does the result of an op fit fp16 although an operand does not?"""
        if op.op_type in ("log", "reduce_argmin", "reduce_argmax"):
            return True
        if op.op_type == "cast":
            return np_dtype(op.outputs[0]).kind in "iu"
        if op.op_type == "real_div" and len(sizes) == 2 and all(r.widest is not None for r in sizes):
            return True
        if op.op_type == "mul" and len(values) == 2 and _may_shrink_product(values, sizes):
            return True
        return LEAST <= self.size(op) <= FITS and _is_ratio(op)

    def at(self, var: Var) -> _Size:
        """Return the size of a value."""
        if var not in self.seen:
            self.seen[var] = _Size(0.0)  # ends the recursion if the graph had a loop
            self.depth += 1
            self.seen[var] = self._compute(var)
            self.depth -= 1
        return self.seen[var]

    def _compute(self, var: Var) -> _Size:
        """Compute the size of a value from the op that makes it."""
        if self.bits == HALF and (narrowed := _narrowed(var)) is not None:
            return narrowed
        op = var.op
        if op is None or self._ends_before(op):
            return _Size(_size_from_interval(var))
        weight = {"matmul": "y", "linear": "weight"}.get(op.op_type, "")
        if weight and is_stored(op.inputs.get(weight)):
            one = self.at(op.x)
            if one.widest is None:
                return _overflow_by_weights(op, one.size) or _Size(_size_from_interval(var))
            return _Size(one.size, _with_wide_ops_before(op, [one]), one.widest, one.why)
        return self._size_of_step(op, var)

    def _ends_before(self, op: Operation) -> bool:
        """Does a region begin behind an op, as it is far away, stored, or computes something else?"""
        is_far = len(self.seen) > 4 * MOST or self.depth > MOST
        return is_far or is_stored(op.outputs[0]) or op.op_type not in THROUGH or not computes_in(op, self.bits)

    def _size_of_step(self, op: Operation, var: Var) -> _Size:
        """Return the size of a result from those of the operands, with all ops that are wide up to here."""
        size = min(self.size(op), _size_of(max(map(abs, self.ranges.of(var)))))
        sizes = [_term_size(op, self.at(v), size) for v in floats_of(op)]
        if (loss := covariance(op)) is not None:
            sizes.append(_Size(0.0, loss.ops, loss.widest, loss.why))
        why = _why_it_leaves_fp16(op, size, sizes)
        if op in self.reciprocals and not why:
            why = f"%{var.name}, a reciprocal of what may be below {1 / fp16.LARGEST:.2g}, overflows"
        ops = _with_wide_ops_before(op, sizes)
        if why:
            maker = producer(op.x, *MAY_BE_NEAR_ONE) if op.op_type == "reduce_prod" else None
            return _Size(size, ops if maker is None else (*ops, maker), op, why)
        wide = _widest(sizes)
        return _Size(size) if wide is None or op.op_type == "log" else _Size(size, ops, wide.widest, wide.why)

    def size(self, op: Operation) -> float:
        """Return the size of an op's result from those of its operands."""
        return _result_size(op, lambda v: 0.0 if is_stored(v) else self.at(v).size)


def _no_pass_scales_before(op: Operation) -> bool:
    """Is an op a running sum, or a product of two values, before which no other pass scales?"""
    return op.op_type == "cumsum" or (op.op_type == "mul" and op.x is not op.y and len(floats_of(op)) == 2)


@cached
def _narrowed(var: Var) -> _Size | None:
    """Return the size of an fp32 product with a number beyond fp16 that is cast to fp16; None for other values.

    coremltools leaves such products when it converts to fp16.
    """
    cast = producer(var, "cast")
    maker = producer(cast.x, "mul", "real_div") if cast is not None else None
    if cast is None or maker is None or np_dtype(cast.x) != np.float32 or np_dtype(var) != np.float16:
        return None
    _, times = scaled(maker) or (None, 0.0)
    if not fp16.LARGEST < abs(times) < math.inf or magnitude(cast.x, products=1) <= fp16.LARGEST:
        return None
    why = f"%{cast.x.name}, which is multiplied by {times:.3g} in fp32, is cast to fp16, where it overflows"
    return _Size(UNKNOWN + math.log2(abs(times)) / BITS, (), cast, why)


def _term_size(op: Operation, one: _Size, size: float) -> _Size:
    """Return the size of a term; one that is small beside the rest of a sum may vanish, and needs no region."""
    vanishes = op.op_type in ("add", "sub", "maximum") and one.size < min(size, 0.0)
    return _Size(one.size) if vanishes else one


@cached
def _float_operands(op: Operation) -> list[Var]:
    """Return the floats that an op computes with, without epsilons and the like."""
    return [
        v for name, v in operands(op) if np_dtype(v).kind == "f" and name not in ("epsilon", "alpha", "beta")
    ]


@cached
def _size_from_interval(var: Var) -> float:
    """Return the size of a value from its interval, at most `UNKNOWN`."""
    return min(UNKNOWN, _size_of(magnitude(var, products=1)))


def _size_of(magnitude: float) -> float:
    """Return the size of a magnitude: 1 for 65504, 0 for all up to 1."""
    return math.log2(max(magnitude, 1.0)) / BITS


def _result_size(op: Operation, of: Callable[[Var], float]) -> float:
    """Return the size of a result from its degree and the sizes of its operands, its constants and terms."""
    if op.op_type in FIXED_SIZES:
        return FIXED_SIZES[op.op_type]
    scale = None if op.op_type == "linear" else degrees.scaled(op, of)
    size = max(map(of, _float_operands(op)), default=0.0) if scale is None else scale.result
    if op.op_type == "reduce_prod":
        return reduced_size(op) * size
    if op.op_type in ("matmul", "cumsum", "reduce_sum", "reduce_sum_square"):
        terms = _summed_terms(op)
        return size + (_size_of(terms) if math.isfinite(terms) else 0.0)
    stored = [v for v in _float_operands(op) if is_stored(v)]
    typical = _median_magnitude(stored[0]) if stored and op.op_type in ("mul", "real_div") else 1.0
    if op.op_type == "real_div":
        return size - _size_of(typical)
    return size + (max(math.log2(typical) / BITS, -UNKNOWN) if 0 < typical < 1 or typical >= BLOW_UP else 0.0)


def _summed_terms(op: Operation) -> float:
    """Return how many numbers or products an op adds up; infinite where a length is dynamic."""
    if op.op_type not in ("matmul", "cumsum"):
        return reduced_size(op)
    along = -2 if flag(op, "transpose_x") else -1
    length = op.x.shape[int(number(op.axis) or 0) if op.op_type == "cumsum" else along]
    return math.inf if is_symbolic(length) else float(length)


@cached
def _median_magnitude(var: Var) -> float:
    """Return the median magnitude of a constant, 1 if it is not read."""
    value = constant(var)
    known = value is not None and np.size(value) > 0
    return float(np.median(np.abs(np.asarray(value, np.float64)))) if known else 1.0


def _why_it_leaves_fp16(op: Operation, size: float, sizes: list[_Size]) -> str:
    """Return how a value first leaves fp16 at this op, in words; "" where it does not."""
    out = op.outputs[0]
    is_wide_before = any(r.widest is not None for r in sizes)
    if (power := exponential(op)) is not None:
        most = max(end * power.factor for end in interval(power.value))
        return f"%{out.name}, an exponential without a bound, overflows" if most > fp16.LARGEST_EXPONENT else ""
    if op.op_type == "reduce_prod" and reduced_size(op) >= 4:
        return f"%{out.name} is a product of {reduced_size(op):g} numbers" if interval(op.x)[0] < 0.5 else ""
    if op.op_type in ("real_div", "inverse") and not is_wide_before:
        return _small_divisor(op)
    if op.op_type == "matmul" and any(producer(v, "softmax") is not None for v in (op.x, op.y)):
        return ""
    if size > OVER and not any(r.size > OVER for r in sizes) and op.op_type not in ("add", "sub"):
        return f"%{out.name} overflows above {fp16.LARGEST:.0f}"
    if size < UNDER and not any(r.size < UNDER for r in sizes):
        return f"%{out.name} is too small for fp16"
    return ""


def _overflow_by_weights(op: Operation, size: float) -> _Size | None:
    """Return the size of a product that overflows since its weights are as large as those of a camera."""
    rows = weight_norms(op)
    if rows is None or rows.length < BLOW_UP or magnitude(op.outputs[0], products=1) <= fp16.LARGEST:
        return None
    grown = size + math.log2(rows.length) / BITS
    why = f"%{op.outputs[0].name} overflows: its weights make numbers {rows.length:.3g} times larger"
    return _Size(grown, (op,), op, why) if grown > OVER else None


def _small_divisor(op: Operation) -> str:
    """Return a reason if a guard keeps a divisor from 0, but so near to it that the quotient overflows."""
    divisor = op.y if op.op_type == "real_div" else op.x
    guard = producer(divisor, "add", "maximum", "clip")
    if guard is None:
        return ""
    least = number(guard.alpha) if guard.op_type == "clip" else (value_and_number(guard) or (None, None))[1]
    if least is None or not 0 < least < 1 / fp16.LARGEST or interval(divisor)[0] > 1 / fp16.LARGEST:
        return ""
    return f"%{op.outputs[0].name}, a quotient by {least:.2g} or more, overflows"


def _widest(sizes: Sequence[_Size]) -> _Size | None:
    """Return the size furthest from 0 of those beyond fp16; None where there is none."""
    return max((s for s in sizes if s.widest is not None), key=lambda s: abs(s.size), default=None)


def _with_wide_ops_before(op: Operation, sizes: list[_Size]) -> tuple[Operation, ...]:
    """Return an op and the wide ops upstream of it, each once."""
    return tuple(dict.fromkeys((op, *(o for r in sizes if r.widest is not None for o in r.ops))))


def _may_shrink_product(values: Sequence[Var], sizes: list[_Size]) -> bool:
    """Is an overflowing product of two values multiplied with a third, which may be small?"""
    for (size, var), (other_size, other) in permutations(zip(sizes, values, strict=True), 2):
        maker = producer(var, "mul")
        if maker is None or size.widest is not maker or other_size.widest is not None:
            continue
        if other not in (maker.x, maker.y) and maker.x is not maker.y and not _is_mask(other):
            return True
    return False


def _is_mask(var: Var) -> bool:
    """Was a value cast from a boolean or an integer?"""
    cast = producer(var, "cast")
    return cast is not None and np_dtype(cast.x).kind in "biu"


def _is_ratio(op: Operation) -> bool:
    """Does a division or a root make the result smaller than what it is computed from?"""
    if op.op_type == "mul":
        makers = [producer(v, "inverse", "rsqrt", "real_div", "pow") for v in (op.x, op.y)]
        return any(m is not None for m in makers) or any(is_stored(v) for v in (op.x, op.y))
    if op.op_type == "pow":
        exponent = number(op.y)
        return exponent is not None and exponent < 1
    if op.op_type == "real_div":
        return not is_stored(op.x) or number(op.x) is not None
    return True


def _with_wide(ops: tuple[Operation, ...], bits: int) -> tuple[Operation, ...]:
    """Return ops together with those that make their operands, where these are beyond fp16."""
    own, search = {v for op in ops for v in op.outputs}, _Search(bits)
    entries = dict.fromkeys(v for op in ops for v in floats_of(op) if v not in own)
    return tuple(dict.fromkeys((*ops, *(o for v in entries if (at := search.at(v)).widest for o in at.ops))))
