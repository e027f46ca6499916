"""Which ops must stay fp32 when a program becomes fp16, each with the reason and the value found.

`judge` is called by the passes that convert programs to fp16. Four hazards are looked for:

1. a value overflows 65504, or a mask's fill does (fills are replaced by `FILL` instead);
2. a guard against division by zero, or against the logarithm of zero, is zero in fp16;
3. an integer above 2048 would be rounded;
4. a region was widened to fp32 on purpose (`overflow_regions`).

Readers of such a value stay fp32, too, until an op makes a number that fits again. Values of unknown range are
taken to fit; observed or promised ranges say otherwise. An input that is only moved before a cast to integers
holds whole numbers, such as token ids. An integer input that only masks scores is taken to hold 0 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anesurgery import fp16
from anesurgery.facts.attention import MASKED, MASKING
from anesurgery.facts.integer_masks import fills_scores, masks_scores, only_softmax_reads
from anesurgery.facts.overflow_regions import wide_region
from anesurgery.mil import (
    Operation,
    Var,
    constant,
    dtype_name,
    is_stored,
    np_dtype,
    operands,
    producer,
    static_shape,
)
from anesurgery.ops import CARRIERS, COMPARISONS, CONTROL, LISTS, PRODUCTS, STATEFUL, names
from anesurgery.semantics.bounds import MOST_READ, Interval, constant_range, squared_operand
from anesurgery.semantics.intervals import interval
from anesurgery.semantics.reading import number, readers_after

FILL = 3e4
"""The fp16 fill of a mask: far above any score, and below 32768, the largest sum on the engine."""
ONE_IS_KEPT = (
    "each row of masked scores is assumed to keep one of them: if all of a row are masked by sums, fp16 gives "
    "the shares of fp32 only for scores below 8"
)
"""Beside -3e38 a score vanishes; beside -3e4, where fp16 counts in steps of 16, only one below 8 does."""

NAMED = "it is to stay fp32"
"""The reason for ops that the caller named."""
UNLIMITED = 1e18
"""Limits above this, such as the largest fp32 number or its root, clip nothing."""

EPSILON = 1e-5
"""The epsilon of a batch norm that names none."""
NORMS = names("layer_norm instance_norm l2_norm")
"""Norms whose numerator is zero where their denominator is: a larger epsilon changes small values only."""
GUARDED = {"log": 1e-45, "rsqrt": 1e-12, "inverse": 1e-4}
"""Ops that fail at zero, and the epsilon that they add by default."""
SIZED = frozenset({"add", "sub", "mul", "floor_div", "mod", "minimum", "maximum", "select", "abs"}) | CARRIERS
"""Elementwise ops of integers, and ops that move their operand."""
INTEGER_TO_INTEGER = SIZED | names(
    "concat stack split slice_by_index slice_by_size gather tile reverse reduce_sum cumsum fill"
)
"""Ops that compute integers from integers."""
POSITION_OPS = COMPARISONS | names("add sub minimum maximum")
"""Ops in which a whole number is a position, and not a factor."""
GUARDS = {
    "add": {"x": "y", "y": "x"},
    "maximum": {"x": "y", "y": "x"},
    "clip": {"alpha": "x"},
    "select": {"a": "b", "b": "a"},
}
"""Op type -> each operand that may guard, and the one that it guards against 0."""
HANDS_ON_GUARD = (
    names("add maximum clip select abs square sqrt pow reduce_max reduce_sum tile split")
    | names("slice_by_index slice_by_size")
    | CARRIERS
)
"""Ops that hand a guarded number on."""
SUMS = CARRIERS | names("sqrt square mul pow reduce_sum reduce_mean add")
"""Ops that may stand between squares and a guard."""
LINEAR = (
    SUMS | PRODUCTS | names("abs concat stack split slice_by_index slice_by_size reverse pad reduce_l2_norm")
)
"""Ops that may stand between an input and a logarithm."""
FILLS = MASKING | {"fill", "fill_like"}
"""Ops that make fills, or may stand between a fill and the softmax."""
AS_STORED = CONTROL | STATEFUL | LISTS | {"slice_update"}
"""Ops whose values keep the dtype in which they are stored."""


@dataclass
class Verdicts:
    """What stays fp32, what is replaced, and what was assumed."""

    stays: dict[Operation, str] = field(default_factory=dict)
    """Op -> why it stays fp32."""
    fills: dict[Var, str] = field(default_factory=dict)
    """Constants of masks that are limited to `FILL` -> the reason."""
    assumed: dict[Operation, str] = field(default_factory=dict)
    """Op -> the assumption about its operands that its fp16 form rests on, in words."""
    guards: set[Operation] = field(default_factory=set)
    """Ops whose epsilon is zero in fp16."""
    huge: set[Var] = field(default_factory=set)
    """Values that may be above 65504."""
    tiny: set[Var] = field(default_factory=set)
    """Values that may be 0 in fp16 and must not be."""
    large_integers: set[Var] = field(default_factory=set)
    """Floats that hold integers above 2048."""
    filled: set[Var] = field(default_factory=set)
    """Values between a replaced fill and the softmax."""


def judge(
    ops: Iterable[Operation], ranges: Mapping[str, Interval], keep: frozenset[str] = frozenset()
) -> Verdicts:
    """Judge ops in file order; `ranges` maps names to known ranges, `keep` names values that stay fp32."""
    verdicts = Verdicts()
    for op in ops:
        if op.op_type == "const" or not _uses_fp32(op):
            continue
        reason = _reason(op, ranges, verdicts)
        if keep.intersection(v.name for v in op.outputs):
            reason = NAMED
        if reason:
            verdicts.stays[op] = reason
        _follow_fill(op, verdicts)
        if op in verdicts.guards:
            verdicts.stays = _ops_before_guard(op) | verdicts.stays
        if op.op_type == "cast" and np_dtype(op.outputs[0]).kind in "iu":
            verdicts.stays = _moves_before_integer_cast(op, ranges) | verdicts.stays
        verdicts.stays = _widened_region(op) | verdicts.stays
    return verdicts


def _widened_region(op: Operation) -> dict[Operation, str]:
    """Return op -> reason for the ops of a region that was widened to fp32, as fp16 cannot hold its values."""
    region = wide_region(op, bits=32)
    if region is None:
        return {}
    inside = {v for member in region.ops for v in member.outputs}
    read = [v for member in region.ops for _, v in operands(member) if v not in inside]
    casts = [producer(v, "cast") for v in read if dtype_name(v) == "fp32" and not is_stored(v)]
    if not all(cast is not None and dtype_name(cast.x) != "fp32" for cast in casts):
        return {}
    return dict.fromkeys(region.ops, f"it was widened to fp32: {region.why}")


def _follow_fill(op: Operation, verdicts: Verdicts) -> None:
    """Note which values hold a replaced fill, and which hold the fp32 fill and so must stay fp32."""
    if any(v in verdicts.fills or v in verdicts.filled for _, v in operands(op)):
        if op not in verdicts.stays and op.op_type in FILLS:
            verdicts.filled.update(op.outputs)
        elif op in verdicts.stays and any(_number_beyond_fp16(v) for _, v in operands(op)):
            verdicts.huge.update(op.outputs)


def _moves_before_integer_cast(cast: Operation, ranges: Mapping[str, Interval]) -> dict[Operation, str]:
    """Return op -> reason for the ops that only move an input before it is cast to integers."""
    moves, value = list[Operation](), cast.x
    while value.op is not None and value.op.op_type in CARRIERS and isinstance(value.op.inputs.get("x"), Var):
        moves.append(value.op)
        value = value.op.x
    if value.op is not None or max(map(abs, known_range(value, ranges))) <= fp16.LAST_INTEGER:
        return {}
    reason = f"%{value.name} gives the integers of {cast.name}; fp16 counts to {fp16.LAST_INTEGER:g}"
    return dict.fromkeys(moves, reason)


def _ops_before_guard(op: Operation) -> dict[Operation, str]:
    """Return the ops between squares and a guard -> the reason: squares underflow first.

    Before a logarithm these are all sums: it shows errors that are small beside the largest term.
    """
    before_log = op.op_type == "log" or any(r.op_type == "log" for v in op.outputs for r in v.child_ops)
    why = "squares underflow"
    if before_log:
        why = "the logarithm shows errors that are small against the largest term"
    reason, followed = f"{op.name} guards what it makes against 0: {why}", LINEAR if before_log else SUMS
    stays: dict[Operation, str] = {}
    waiting, seen = [op], dict[Operation, None]()
    while waiting:
        current = waiting.pop()
        seen[current] = None
        if before_log or squared_operand(current) is not None:
            stays |= dict.fromkeys(seen, reason)
        makers = [v.op for _, v in operands(current)]
        waiting += [m for m in makers if m is not None and m not in seen and m.op_type in followed]
    stays.pop(op, None)
    return stays


def _uses_fp32(op: Operation) -> bool:
    """Does an op read or compute fp32?"""
    return any(dtype_name(v) == "fp32" for v in [*(v for _, v in operands(op)), *op.outputs])


def _reason(op: Operation, ranges: Mapping[str, Interval], verdicts: Verdicts) -> str:
    """Return why an op stays fp32, "" if it need not; note the values that its readers must know of."""
    if op.op_type in AS_STORED:
        return f"{op.op_type} carries its values as they are stored"
    return (
        _refuses_fp16(op)
        or _overflow(op, ranges, verdicts)
        or _zero_guard(op, ranges, verdicts)
        or _rounded_integers(op, ranges, verdicts)
    )


def takes_half(op: Operation, name: str) -> bool:
    """Does an op accept fp16 for an operand?"""
    domain = getattr(op.input_spec.input_types[name], "type_domain", None)
    return not domain or "fp16" in [t.__type_info__().name for t in domain]


def _refuses_fp16(op: Operation) -> str:
    """Return a reason if the op accepts a constant only in fp32, such as a scale factor; else ""."""
    for name, var in operands(op):
        if dtype_name(var) == "fp32" and not is_stored(var) and not takes_half(op, name):
            return f"{op.op_type} takes no fp16 as {name}"
    return ""


def known_range(var: Var, ranges: Mapping[str, Interval]) -> Interval:
    """Return the range of a value: as given for it or a view of it, else from the ops that compute it."""
    value: Var | None = var
    while value is not None:
        if value.name in ranges:
            return ranges[value.name]
        if value is var and (cast := producer(var, "cast")) is not None:
            value = var = cast.x
        else:
            moved = producer(value, *(CARRIERS - {"cast"}))
            value = None if moved is None else moved.inputs.get("x")
    low, high = interval(var)
    return low if low > -UNLIMITED else -math.inf, high if high < UNLIMITED else math.inf


def _overflow(op: Operation, ranges: Mapping[str, Interval], verdicts: Verdicts) -> str:
    """Return a reason if an op has constants or results beyond fp16, or reads such values; else ""."""
    if op.op_type == "cast":
        return ""
    reason, read = _large_constant(op, ranges, verdicts), [v for _, v in operands(op) if v in verdicts.huge]
    if not reason and read:
        reason = f"%{read[0].name}, which it reads, may be above {fp16.LARGEST:g}"
    if reason:
        unfit = (v for v in op.outputs if max(map(abs, known_range(v, ranges))) > fp16.LARGEST)
        verdicts.huge.update(unfit)
        return reason
    for var in op.outputs:
        most = max(map(abs, known_range(var, ranges)))
        masked = any(v in verdicts.fills or v in verdicts.filled for _, v in operands(op))
        if fp16.LARGEST < most < math.inf and not (masked and op.op_type in FILLS):
            verdicts.huge.add(var)
            return f"%{var.name} can reach {most:.4g}, above {fp16.LARGEST:g}"
    return ""


def _large_constant(op: Operation, ranges: Mapping[str, Interval], verdicts: Verdicts) -> str:
    """Return a reason if an op has a constant beyond fp16; note fills of masks, which are replaced instead."""
    replaced = () if unit_scale(op) is None else ("variance", "gamma")
    for name, var in operands(op):
        large = _number_beyond_fp16(var)
        if not large or name in replaced or _is_limit_beyond_fp16(op, name, var):
            continue
        if not _is_fill(op, name, var, ranges):
            return f"the constant %{var.name} holds {large:.4g}, above {fp16.LARGEST:g}"
        fill = math.copysign(FILL, large)
        verdicts.fills[var] = f"%{var.name} masks scores with {large:.4g}; {fill:g} in fp16"
        if _adds_to_scores(op) and _fp32_numbers(var).size == 1:
            verdicts.assumed[op] = ONE_IS_KEPT
    return ""


def _is_limit_beyond_fp16(op: Operation, name: str, var: Var) -> bool:
    """Is an operand a clip limit beyond fp16, which may become infinite without changing anything?"""
    low, high = constant_range(var)
    if op.op_type == "minimum" or (op.op_type == "clip" and name == "beta"):
        return low > fp16.LARGEST
    return op.op_type in ("maximum", "clip") and high < -fp16.LARGEST


def _number_beyond_fp16(var: Var) -> float:
    """Return the largest finite number of a constant that fp16 cannot hold; 0 where there is none."""
    value = _fp32_numbers(var)
    if value is None:
        return 0.0
    finite = value[np.isfinite(value)]
    worst = finite[np.abs(finite).argmax()] if finite.size else np.float32(0)
    return float(worst) if abs(worst) > fp16.LARGEST else 0.0


def _fp32_numbers(var: Var) -> Any:
    """Return the numbers of an fp32 constant; None for others, and above `MOST_READ` elements."""
    if dtype_name(var) != "fp32" or math.prod(static_shape(var) or ()) > MOST_READ:
        return None
    value = constant(var)
    return None if value is None or isinstance(value, str) else np.atleast_1d(np.asarray(value))


def _is_fill(op: Operation, name: str, var: Var, ranges: Mapping[str, Interval]) -> bool:
    """Does a constant only mask scores of a softmax, and never a whole row of them?"""
    low, high = constant_range(var)
    if op.op_type not in FILLS or name in ("cond", "shape") or max(-low, high) <= fp16.LARGEST:
        return False
    if low < 0 < high:
        return False
    if not only_softmax_reads(op.outputs[0]) or _masks_whole_row(op, var):
        return False
    if op.op_type != "mul" or fills_scores(op):
        return True
    return max(map(abs, known_range(op.y if op.x is var else op.x, ranges))) <= 1


def _adds_to_scores(op: Operation) -> bool:
    """Are scores added to a fill, rather than replaced by it?"""
    if op.op_type in ("add", "sub"):
        return True
    readers = readers_after(op.outputs[0], through=MASKING - {"add", "sub"})
    return any(reader.op_type != "softmax" for reader in readers)


def _masks_whole_row(op: Operation, var: Var) -> bool:
    """Does an added constant mask a whole row? Scores vanish beside -3e38, but not beside -3e4."""
    value = _fp32_numbers(var) if op.op_type in ("add", "sub", "minimum") else None
    if value is None or value.shape[-1] < 2:
        return False
    return bool((np.abs(value) >= -MASKED).all(-1).any())


def _zero_guard(op: Operation, ranges: Mapping[str, Interval], verdicts: Verdicts) -> str:
    """Return a reason if a guard of an op is 0 in fp16; else ""."""
    if op.op_type in GUARDED:
        epsilon = number(op.inputs.get("epsilon"))
        epsilon = GUARDED[op.op_type] if epsilon is None else epsilon
        if op.x in verdicts.tiny or (epsilon < fp16.LEAST and known_range(op.x, ranges)[0] < fp16.LEAST):
            verdicts.guards.add(op)
            return f"%{op.x.name} may be 0 in fp16, where the epsilon {epsilon:g} is 0 too"
        return ""
    if op.op_type == "batch_norm":
        variance = _least_variance(op)
        is_lost = variance < fp16.LEAST and unit_scale(op) is None
        return f"a variance of {variance:.3g} is 0 in fp16" if is_lost else ""
    for name, var in operands(op):
        least = _same_magnitude(var)
        other = op.inputs.get(GUARDS.get(op.op_type, {}).get(name, ""))
        if other is not None and 0 < least < fp16.LEAST and known_range(other, ranges)[0] < fp16.LEAST:
            verdicts.tiny.update(op.outputs)
            verdicts.guards.add(op)
            return f"the guard {least:.3g} is 0 in fp16"
    return _reads_tiny_value(op, ranges, verdicts)


def _reads_tiny_value(op: Operation, ranges: Mapping[str, Interval], verdicts: Verdicts) -> str:
    """Return a reason if an op reads, or divides by, a value that may be 0 in fp16; else ""."""
    divisor = op.inputs.get("y") if op.op_type in ("real_div", "floor_div", "mod") else None
    if isinstance(divisor, Var) and 0 < known_range(divisor, ranges)[0] < fp16.LEAST and not is_stored(divisor):
        verdicts.tiny.add(divisor)
    guarded = [v for _, v in operands(op) if v in verdicts.tiny]
    if divisor in guarded:
        return f"it divides by %{divisor.name}, which may be 0 in fp16"
    scaled = op.op_type == "mul" and known_range(op.outputs[0], ranges)[0] > 0
    if guarded and (scaled or op.op_type in HANDS_ON_GUARD):
        verdicts.tiny.update(v for v in op.outputs if known_range(v, ranges)[0] < fp16.LEAST)
        return f"%{guarded[0].name}, which it reads, may be 0 in fp16"
    return ""


def _same_magnitude(var: Var) -> float:
    """Return the magnitude of an fp32 constant whose elements are all the same number; 0 for others."""
    value = _fp32_numbers(var)
    is_one = value is not None and value.size and bool((value == value.flat[0]).all())
    return abs(float(value.flat[0])) if is_one else 0.0


def unit_scale(op: Operation) -> Any:
    """Return the gamma of a batch norm for variance 1, if fp16 holds that and not the variance; else None."""
    if op.op_type != "batch_norm":
        return None
    stored, gamma = constant(op.variance), 1.0 if op.inputs.get("gamma") is None else constant(op.gamma)
    if stored is None or gamma is None:
        return None
    variance = np.asarray(stored, np.float64) + (number(op.inputs.get("epsilon")) or EPSILON)
    if variance.min() >= fp16.LEAST and variance.max() <= fp16.LARGEST:
        return None
    with np.errstate(all="ignore"):
        scale = np.asarray(gamma, np.float64) / np.sqrt(variance)
    return scale if bool((np.abs(scale) <= fp16.LARGEST).all()) else None


def _least_variance(op: Operation) -> float:
    """Return the least variance of a batch norm, with its epsilon; infinite where it is dynamic."""
    variance, epsilon = constant(op.variance), number(op.inputs.get("epsilon")) or EPSILON
    return math.inf if variance is None else float(np.min(np.asarray(variance, np.float64))) + epsilon


def _rounded_integers(op: Operation, ranges: Mapping[str, Interval], verdicts: Verdicts) -> str:
    """Return a reason if fp16 would round the integers that an op reads or casts; else ""."""
    if op.op_type == "cast":
        if np_dtype(op.x).kind not in "iu" or dtype_name(op.outputs[0]) != "fp32":
            return ""
        most = max(map(abs, known_range(op.x, ranges)))
        if most <= fp16.LAST_INTEGER:
            return ""
        if masks_scores(op.outputs[0]):
            verdicts.assumed[op] = f"%{op.x.name} only masks scores, so it is taken to hold 0 and 1"
            return ""
        verdicts.large_integers.update(op.outputs)
        size = "of unknown range" if most == math.inf else f"up to {most:g}"
        return f"%{op.x.name} holds integers {size}; fp16 counts to {fp16.LAST_INTEGER:g}"
    floats = [v for _, v in operands(op) if dtype_name(v) == "fp32"]
    if any(v in verdicts.fills for v in floats):
        return ""
    large = [v for v in floats if v in verdicts.large_integers or _is_rounded_integral(v)]
    moves_positions = op.op_type in POSITION_OPS and any(_is_rounded_integral(v) for v in floats)
    reads_integers_only = all(v in large or _is_integral(v) for v in floats)
    if not large or not (moves_positions or reads_integers_only):
        return ""
    if op.op_type in INTEGER_TO_INTEGER:
        verdicts.large_integers.update(
            v for v in op.outputs if max(map(abs, known_range(v, ranges))) > fp16.LAST_INTEGER
        )
    return f"%{large[0].name} holds integers above {fp16.LAST_INTEGER:g}"


def _is_integral(var: Var) -> bool:
    """Is a value an fp32 constant of whole numbers?"""
    value = _fp32_numbers(var)
    return value is not None and bool(np.isfinite(value).all()) and bool((value == np.rint(value)).all())


def _is_rounded_integral(var: Var) -> bool:
    """Is a value a constant of whole numbers, some of which fp16 would round?"""
    if not _is_integral(var):
        return False
    numbers = _fp32_numbers(var)
    return bool((np.abs(numbers) < fp16.LARGEST).all() and (numbers.astype(np.float16) != numbers).any())
