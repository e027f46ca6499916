"""Which ops must stay fp32 when a program becomes fp16, each with the reason and the value found.

An op stays where a value overflows 65504, where a guard against a division by zero (or a logarithm of zero)
becomes zero, and where an integer above 2048 would be rounded. What reads such a value stays too, until an op
makes a number that fits again. The unknown is taken to fit: give observed or promised ranges to say otherwise.
But inputs that are only moved before they are cast to integers hold whole numbers, such as ids of tokens.
An integer input that only masks scores is taken to hold 0 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anesurgery import fp16
from anesurgery.facts.attention import MASKED
from anesurgery.facts.integer_masks import FILLING, fills_scores, masks_scores, only_softmax_reads
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
from anesurgery.semantics.bounds import MOST, Interval, of_constant, squared
from anesurgery.semantics.intervals import interval
from anesurgery.semantics.reading import number, readers_after

FILL = 3e4
"""What stands for a mask's infinity: far above any score, below the 32768 of the engine's sums."""
KEEPS = (
    "each row of masked scores is assumed to keep one of them: if all of a row are masked by sums, fp16 gives "
    "the shares of fp32 only for scores below 8"
)
"""Beside -3e38 a score vanishes; beside -3e4, where fp16 counts in steps of 16, only one below 8 does."""

KEPT = "it is to stay fp32"
UNLIMITED = 1e18
"""Limits above this, such as the largest fp32 number or its root, clip nothing."""

EPSILON = 1e-5
"""The epsilon of a batch norm that names none."""
NORMS = names("layer_norm instance_norm l2_norm")
"""Norms whose numerator is zero where their denominator is: a larger epsilon changes small values only."""
GUARDED = {"log": 1e-45, "rsqrt": 1e-12, "inverse": 1e-4}
"""Ops that fail at zero, and the epsilon that they add by default."""
SIZED = frozenset({"add", "sub", "mul", "floor_div", "mod", "minimum", "maximum", "select", "abs"}) | CARRIERS
CARRIES = SIZED | names(
    "concat stack split slice_by_index slice_by_size gather tile reverse reduce_sum cumsum fill"
)
"""Ops that make integers of integers."""
OFFSETS = COMPARISONS | names("add sub minimum maximum")
"""Ops at which a whole number is a position, and not a factor."""
HOLDS = (
    names("add maximum clip abs square sqrt reduce_max reduce_sum tile split slice_by_index slice_by_size")
    | CARRIERS
)
"""Ops that hand a guarded number on."""
SUMS = CARRIERS | names("sqrt square mul pow reduce_sum reduce_mean add")
"""What may stand between squares and a guard."""
LINEAR = (
    SUMS | PRODUCTS | names("abs concat stack split slice_by_index slice_by_size reverse pad reduce_l2_norm")
)
"""What may stand between an input and a logarithm."""
FILLS = FILLING | {"fill", "fill_like"}
"""Ops that make fills, and that may stand between one and the softmax."""
AS_STORED = CONTROL | STATEFUL | LISTS | {"slice_update"}
"""Ops whose values keep the type in which they are carried."""


@dataclass
class Verdicts:
    """What stays fp32, and what is replaced."""

    stays: dict[Operation, str] = field(default_factory=dict)
    """Op -> why it stays fp32."""
    fills: dict[Var, str] = field(default_factory=dict)
    """Constants of masks that are limited to `FILL`."""
    taken: dict[Operation, str] = field(default_factory=dict)
    """Casts to floats that rest on what integers are taken to hold, in words."""
    guards: set[Operation] = field(default_factory=set)
    """Ops whose epsilon is zero in fp16."""
    huge: set[Var] = field(default_factory=set)
    tiny: set[Var] = field(default_factory=set)
    whole: set[Var] = field(default_factory=set)
    filled: set[Var] = field(default_factory=set)
    """Values between such a constant and the softmax, which are large where it masks."""


def judge(
    ops: Iterable[Operation], ranges: Mapping[str, Interval], keep: frozenset[str] = frozenset()
) -> Verdicts:
    """Look at ops in file order; `ranges` is what is known of values by name, `keep` names what stays fp32."""
    found = Verdicts()
    for op in ops:
        if op.op_type == "const" or not _is_float(op):
            continue
        reason = _reason(op, ranges, found)
        if keep.intersection(v.name for v in op.outputs):
            reason = KEPT
        if reason:
            found.stays[op] = reason
        _follow_fill(op, found)
        if op in found.guards:
            found.stays = _before_guard(op) | found.stays
        if op.op_type == "cast" and np_dtype(op.outputs[0]).kind in "iu":
            found.stays = _before_integers(op, ranges) | found.stays
        found.stays = _widened(op) | found.stays
    return found


def _widened(op: Operation) -> dict[Operation, str]:
    """The ops that were widened, of values of fp16, since fp16 does not hold what lies between."""
    region = wide_region(op, bits=32)
    if region is None:
        return {}
    inside = {v for o in region.ops for v in o.outputs}
    entries = [v for o in region.ops for _, v in operands(o) if v not in inside and dtype_name(v) == "fp32"]
    casts = [producer(v, "cast") for v in entries if not is_stored(v)]
    if not all(cast is not None and dtype_name(cast.x) != "fp32" for cast in casts):
        return {}
    return dict.fromkeys(region.ops, f"it was widened to fp32: {region.why}")


def _follow_fill(op: Operation, found: Verdicts) -> None:
    """Note what holds a fill: in fp32 as large as it was, so that its readers must not round it to infinity."""
    if any(v in found.fills or v in found.filled for _, v in operands(op)):
        if op not in found.stays and op.op_type in FILLS:
            found.filled.update(op.outputs)
        elif op in found.stays and any(_too_large(v) for _, v in operands(op)):
            found.huge.update(op.outputs)


def _before_integers(cast: Operation, ranges: Mapping[str, Interval]) -> dict[Operation, str]:
    """The ops that do no more than move the whole numbers of an input, which a cast then takes as integers."""
    held, at = list[Operation](), cast.x
    while at.op is not None and at.op.op_type in CARRIERS and isinstance(at.op.inputs.get("x"), Var):
        held.append(at.op)
        at = at.op.x
    if at.op is not None or max(map(abs, known(at, ranges))) <= fp16.LAST_INTEGER:
        return {}
    reason = f"%{at.name} gives the integers of {cast.name}; fp16 counts to {fp16.LAST_INTEGER:g}"
    return dict.fromkeys(held, reason)


def _before_guard(op: Operation) -> dict[Operation, str]:
    """The ops between squares and a guard, since squares underflow first; all sums that a logarithm reads."""
    log = op.op_type == "log" or any(r.op_type == "log" for v in op.outputs for r in v.child_ops)
    why = "the logarithm shows errors that are small against the largest term" if log else "squares underflow"
    reason = f"{op.name} guards what it makes against 0: {why}"
    held: dict[Operation, str] = {}
    waiting, path = [op], dict[Operation, None]()
    while waiting:
        at = waiting.pop()
        path[at] = None
        if log or squared(at) is not None:
            held |= dict.fromkeys(path, reason)
        makers = [v.op for _, v in operands(at)]
        waiting += [
            m for m in makers if m not in path and m is not None and m.op_type in (LINEAR if log else SUMS)
        ]
    held.pop(op, None)
    return held


def _is_float(op: Operation) -> bool:
    """Does an op read or make fp32?"""
    return any(dtype_name(v) == "fp32" for v in [*(v for _, v in operands(op)), *op.outputs])


def _reason(op: Operation, ranges: Mapping[str, Interval], found: Verdicts) -> str:
    """Why an op stays; the values that its readers must know of are noted."""
    if op.op_type in AS_STORED:
        return f"{op.op_type} carries its values as they are stored"
    return (
        _no_form(op) or _overflow(op, ranges, found) or _guard(op, ranges, found) or _integer(op, ranges, found)
    )


def takes_half(op: Operation, name: str) -> bool:
    """Does an op take fp16 as this operand?"""
    domain = getattr(op.input_spec.input_types[name], "type_domain", None)
    return not domain or "fp16" in [t.__type_info__().name for t in domain]


def _no_form(op: Operation) -> str:
    """A constant that the op takes in fp32 alone, such as a scale factor, stays as it is."""
    for name, var in operands(op):
        if dtype_name(var) == "fp32" and not is_stored(var) and not takes_half(op, name):
            return f"{op.op_type} takes no fp16 as {name}"
    return ""


def known(var: Var, ranges: Mapping[str, Interval]) -> Interval:
    """The range of a value: as given, as that of the value it views or casts, or by what makes it."""
    at: Var | None = var
    while at is not None:
        if at.name in ranges:
            return ranges[at.name]
        at = at.op.inputs.get("x") if at.op is not None and at.op.op_type in CARRIERS - {"cast"} else None
    op = var.op
    if op is not None and op.op_type == "cast" and isinstance(op.x, Var):
        return known(op.x, ranges)
    low, high = interval(var)
    return low if low > -UNLIMITED else -math.inf, high if high < UNLIMITED else math.inf


def _overflow(op: Operation, ranges: Mapping[str, Interval], found: Verdicts) -> str:
    """Constants and results beyond fp16, and what reads them."""
    if op.op_type == "cast":
        return ""
    scaled = () if unit_scale(op) is None else ("variance", "gamma")
    for name, var in ((n, v) for n, v in operands(op) if n not in scaled):
        large = 0.0 if _never_cuts(op, name, var) else _too_large(var)
        if large and _is_fill(op, name, var, ranges):
            found.fills[var] = (
                f"%{var.name} masks scores with {large:.4g}; {math.copysign(FILL, large):g} in fp16"
            )
            if _is_added(op) and _numbers(var).size == 1:
                found.taken[op] = KEEPS
        elif large:
            return _note(
                op, found.huge, ranges, f"the constant %{var.name} holds {large:.4g}, above {fp16.LARGEST:g}"
            )
    for _, var in operands(op):
        if var in found.huge:
            return _note(op, found.huge, ranges, f"%{var.name}, which it reads, may be above {fp16.LARGEST:g}")
    for var in op.outputs:
        most = max(map(abs, known(var, ranges)))
        filled = any(v in found.fills or v in found.filled for _, v in operands(op))
        if fp16.LARGEST < most < math.inf and not (filled and op.op_type in FILLS):
            found.huge.add(var)
            return f"%{var.name} can reach {most:.4g}, above {fp16.LARGEST:g}"
    return ""


def _never_cuts(op: Operation, name: str, var: Var) -> bool:
    """Is it a limit beyond fp16, which becomes infinite?"""
    low, high = of_constant(var) if op.op_type in ("clip", "minimum", "maximum") else (0.0, 0.0)
    upper = op.op_type == "minimum" or name == "beta"
    return name != ("alpha" if upper else "beta") and (low > fp16.LARGEST if upper else high < -fp16.LARGEST)


def _note(op: Operation, kind: set[Var], ranges: Mapping[str, Interval], reason: str) -> str:
    """The reason, after noting the results that are not shown to fit."""
    kind.update(v for v in op.outputs if max(map(abs, known(v, ranges))) > fp16.LARGEST)
    return reason


def _too_large(var: Var) -> float:
    """A finite number of a constant that fp16 does not hold; 0 for none."""
    value = _numbers(var)
    if value is None:
        return 0.0
    finite = value[np.isfinite(value)]
    worst = finite[np.abs(finite).argmax()] if finite.size else np.float32(0)
    return float(worst) if abs(worst) > fp16.LARGEST else 0.0


def _numbers(var: Var) -> Any:
    """The numbers of an fp32 constant; None of others, and of large ones that the fp16 form bounds anyway."""
    if dtype_name(var) != "fp32" or math.prod(static_shape(var) or ()) > MOST:
        return None
    value = constant(var)
    return None if value is None or isinstance(value, str) else np.atleast_1d(np.asarray(value))


def _is_fill(op: Operation, name: str, var: Var, ranges: Mapping[str, Interval]) -> bool:
    """Does a constant do nothing but mask scores of a softmax, in no row all of them?"""
    low, high = of_constant(var)
    if op.op_type not in FILLS or name in ("cond", "shape") or max(-low, high) <= fp16.LARGEST:
        return False
    if min(abs(low), abs(high)) > 0 and low * high < 0:
        return False
    if not only_softmax_reads(op.outputs[0]) or _masks_rows(op, var):
        return False
    if op.op_type != "mul" or fills_scores(op):
        return True
    return max(map(abs, known(op.y if op.x is var else op.x, ranges))) <= 1


def _is_added(op: Operation) -> bool:
    """Do scores become sums with what an op masks with, rather than it?"""
    chosen = FILLING - {"add", "sub"}
    readers = readers_after(op.outputs[0], chosen)
    return op.op_type in ("add", "sub") or any(r.op_type != "softmax" for r in readers)


def _masks_rows(op: Operation, var: Var) -> bool:
    """Is a whole row masked by a constant that is added? Scores vanish beside -3e38, and not beside -3e4."""
    value = _numbers(var) if op.op_type in ("add", "sub", "minimum") else None
    if value is None or value.shape[-1] < 2:
        return False
    return bool((np.abs(value) >= -MASKED).all(-1).any())


def _guard(op: Operation, ranges: Mapping[str, Interval], found: Verdicts) -> str:
    """Epsilons that become zero, where something divides by them."""
    if op.op_type in GUARDED:
        epsilon = number(op.inputs.get("epsilon"))
        epsilon = GUARDED[op.op_type] if epsilon is None else epsilon
        if op.x in found.tiny or (epsilon < fp16.LEAST and known(op.x, ranges)[0] < fp16.LEAST):
            found.guards.add(op)
            return f"%{op.x.name} may be 0 in fp16, where the epsilon {epsilon:g} is 0 too"
        return ""
    if op.op_type == "batch_norm":
        spread = _least_variance(op)
        lost = spread < fp16.LEAST and unit_scale(op) is None
        return f"a variance of {spread:.3g} is 0 in fp16" if lost else ""
    for name, var in operands(op):
        least = _least_magnitude(var)
        if op.op_type in ("add", "maximum", "clip") and name in ("x", "y", "alpha") and 0 < least < fp16.LEAST:
            other = op.y if name == "x" else op.x
            if known(other, ranges)[0] < fp16.LEAST:
                found.tiny.update(op.outputs)
                found.guards.add(op)
                return f"the guard {least:.3g} is 0 in fp16"
    return _reads_guard(op, ranges, found)


def _reads_guard(op: Operation, ranges: Mapping[str, Interval], found: Verdicts) -> str:
    divisor = op.inputs.get("y") if op.op_type in ("real_div", "floor_div", "mod", "pow") else None
    if isinstance(divisor, Var) and 0 < known(divisor, ranges)[0] < fp16.LEAST and not is_stored(divisor):
        found.tiny.add(divisor)
    guarded = [v for _, v in operands(op) if v in found.tiny]
    if divisor in guarded:
        return f"it divides by %{divisor.name}, which may be 0 in fp16"
    if guarded and op.op_type in HOLDS:
        found.tiny.update(v for v in op.outputs if known(v, ranges)[0] < fp16.LEAST)
        return f"%{guarded[0].name}, which it reads, may be 0 in fp16"
    return ""


def _least_magnitude(var: Var) -> float:
    """The magnitude of a constant of one element; 0 for others."""
    value = number(var) if dtype_name(var) == "fp32" else None
    return 0.0 if value is None else abs(value)


def unit_scale(op: Operation) -> Any:
    """The gamma of a batch norm at a variance of 1, if fp16 holds it and not the variance; else None."""
    if op.op_type != "batch_norm":
        return None
    given = {n: op.inputs.get(n) for n in ("variance", "gamma")}
    values = {n: 1.0 if var is None else constant(var) for n, var in given.items()}
    if any(value is None for value in values.values()):
        return None
    variance = np.asarray(values["variance"], np.float64) + (number(op.inputs.get("epsilon")) or EPSILON)
    if variance.min() >= fp16.LEAST and variance.max() <= fp16.LARGEST:
        return None
    with np.errstate(all="ignore"):
        scale = np.asarray(values["gamma"], np.float64) / np.sqrt(variance)
    return scale if bool((np.abs(scale) <= fp16.LARGEST).all()) else None


def _least_variance(op: Operation) -> float:
    variance, epsilon = constant(op.variance), number(op.inputs.get("epsilon")) or EPSILON
    return math.inf if variance is None else float(np.min(np.asarray(variance, np.float64))) + epsilon


def _integer(op: Operation, ranges: Mapping[str, Interval], found: Verdicts) -> str:
    """Integers that fp16 would round."""
    if op.op_type == "cast":
        if np_dtype(op.x).kind not in "iu" or dtype_name(op.outputs[0]) != "fp32":
            return ""
        most = max(map(abs, known(op.x, ranges)))
        if most <= fp16.LAST_INTEGER:
            return ""
        if masks_scores(op.outputs[0]):
            found.taken[op] = f"%{op.x.name} only masks scores, so it is taken to hold 0 and 1"
            return ""
        found.whole.update(op.outputs)
        how = "of unknown range" if most == math.inf else f"up to {most:g}"
        return f"%{op.x.name} holds integers {how}; fp16 counts to {fp16.LAST_INTEGER:g}"
    floats = [v for _, v in operands(op) if dtype_name(v) == "fp32"]
    if any(v in found.fills for v in floats):
        return ""
    counted = [v for v in floats if v in found.whole or _rounded(v)]
    offset = op.op_type in OFFSETS and any(_rounded(v) for v in floats)
    if not counted or not (offset or all(v in counted or _integral(v) for v in floats)):
        return ""
    if op.op_type in CARRIES:
        found.whole.update(v for v in op.outputs if max(map(abs, known(v, ranges))) > fp16.LAST_INTEGER)
    return f"%{counted[0].name} holds integers above {fp16.LAST_INTEGER:g}"


def _integral(var: Var) -> bool:
    value = _numbers(var)
    return value is not None and bool(np.isfinite(value).all()) and bool((value == np.rint(value)).all())


def _rounded(var: Var) -> bool:
    """Is it a constant of whole numbers, some of which fp16 does not hold?"""
    return _integral(var) and bool(
        (np.abs(value := _numbers(var)) < fp16.LARGEST).all() and (_half(value) != value).any()
    )


def _half(value: Any) -> Any:
    return value.astype(np.float16).astype(np.float32)
