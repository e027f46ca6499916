"""Rescale a guard against 0 that is subnormal in fp16, so that it becomes a normal number.

The guard, and the value that it protects, are divided by a unit `u`. Values from 1/16 on (1/8 or 1/4 if the
guard is larger) do not change in fp16 when the guard is added: their unit is 1, so that they keep every digit.
A smaller value x has the unit 16 x (or 8 x, 4 x), down to that of the least normal number. Roots, reciprocals
and quotients are rewritten too: `a / (x + e)` becomes `(a / (x / u + e / u)) / u`. A guard may be added, or be
a lower limit (`maximum`, `clip`). Its value is what fp16 rounded it to: if a converter wrote 6e-8 for 1e-10,
the smaller number is lost. An epsilon of a norm, or of a bare reciprocal root, that is 0 in fp16 becomes 6e-8,
the smallest fp16 number that is not 0. That changes a variance v by the share 6e-8 / v, which fp16 does not
show from 1.2e-4 on.

Refuses when the protected value is never subnormal, when a divisor may be negative, and when a lower limit is
6e-8, as converters write every smaller one: elementwise ops were seen to hold it. Limits of logarithms are
rescaled all the same.

Why it helps: the multiplier of the A14 and M1 engine (H13) flushes subnormal numbers to 0 (measured through the
private compiler: sbryngelson/ANEForge), and a log-mel front end with a guard of 1e-6 had a cosine of 0.046
(M1 Max: findit-studio/coremlit); which other ops it affects is not known. What the extra ops cost in time was
not measured.

Grade: checked: that a factor goes through a root or a logarithm is no identity of polynomials.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Operation, Refusal, Rewrite, Var, mb
from anesurgery.numeric import units
from anesurgery.regions.small_builds import again
from anesurgery.semantics.intervals import interval

UNCHANGED = 2.0**12
"""A number that is so many times its guard does not change in fp16 when the guard is added."""
LEAST_WITH_UNIT_1 = 2.0**-4
"""The unit is 1 from here on. Then the smallest unit is 2^-14 / 2^-4 = 2^-10, and 6e-8 = 2^-24 divided by it is
2^-14, the least normal number."""
ROUNDED_TO_0 = an.fp16.LEAST / 2
"""Numbers up to this are 0 in fp16."""
POWERS = {0.5: "sqrt", -0.5: "rsqrt", -1.0: "inverse"}
DEGREES = {op_type: degree for degree, op_type in POWERS.items()}
READERS = frozenset({"log", "real_div", "pow", *POWERS.values()})
"""Ops that need a guard."""


@dataclass(frozen=True)
class HoldGuards(Rewrite):
    """`log(x + e)` becomes `log(x / u + e / u) + log(u)`, where u is 1 unless x is small."""

    name = "hold_guards"
    kinds = READERS | an.ops.NORMS
    tolerance = an.Tolerance(1e-3)
    tolerates_nonfinite = False
    """Infinite results of a value near 0 may become finite."""
    shares_inner = True

    def check(self, m: Match) -> Match | Refusal:
        """Match a subnormal guard of a value that may be as small."""
        if not an.intervals.is_half(m.root.outputs[0]):
            return an.NO_MATCH
        if m.root.op_type in an.ops.NORMS:
            return _of_norm(m)
        guarded = _guarded(m.root)
        if guarded is None or guarded.guard >= an.fp16.NORMAL:
            return an.NO_MATCH
        low = interval(guarded.var)[0]
        if low >= an.fp16.NORMAL:
            words = f"%{guarded.var.name} is at least {low:g}, and needs no guard"
            return Refusal(words, m.root, idle=True)
        if low < 0 and not guarded.clips and guarded.function in ("real_div", "inverse"):
            return Refusal(f"%{guarded.var.name} may be negative, and is not kept from 0", m.root)
        is_least = guarded.clips and guarded.guard == an.fp16.LEAST
        if is_least and not guarded.lost and guarded.function != "log":
            return Refusal("6e-8 keeps it from 0 where subnormal numbers are held", m.root, idle=True)
        # Without a guard the old op is compared where it needs none.
        drawn = {guarded.var: (an.fp16.NORMAL, 4.0)} if guarded.lost else {}
        return m.bind(ops=(m.root, *guarded.ops), guarded=guarded, positive=low >= 0, within=drawn)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Do the same with numbers that are divided by the unit."""
        if m.root.op_type in an.ops.NORMS:
            return again(mb, m.root, epsilon=an.fp16.LEAST)
        guarded, value = m.guarded, m.guarded.var
        if guarded.most < an.fp16.LARGEST:
            value = mb.minimum(x=value, y=guarded.most)
        large = max(LEAST_WITH_UNIT_1, 2.0 ** math.ceil(math.log2(guarded.guard * UNCHANGED)))
        size = value if m.positive or guarded.clips else mb.abs(x=value)
        size = mb.clip(x=size, alpha=an.fp16.NORMAL, beta=an.fp16.LARGEST)
        unit = units.SafeRange(large, an.fp16.LARGEST).unit(mb, size)
        smallest = an.fp16.NORMAL / large  # e / u = (smallest / u) * (e / smallest): of normal numbers only
        guard = mb.mul(x=mb.real_div(x=smallest, y=unit), y=guarded.guard / smallest)
        protect = mb.maximum if guarded.clips else mb.add
        divided = protect(x=mb.real_div(x=value, y=unit), y=guard)
        return _applied(mb, m.root, guarded.function, divided, unit)


@dataclass(frozen=True)
class _Guarded:
    """A value that a guard keeps from 0, and the op that reads it."""

    var: Var
    guard: float
    function: str
    """What the op computes of it: "log", "sqrt", "rsqrt", "inverse", or "real_div", whose divisor it is."""
    clips: bool = False
    """Is the guard a lower limit? Otherwise it is added."""
    most: float = math.inf
    """The upper limit of a clip."""
    lost: bool = False
    """Was the guard 0 in fp16?"""
    ops: tuple[Operation, ...] = ()
    """The ops between the value and the op that reads it."""


def _guarded(op: Operation) -> _Guarded | None:
    """Return the value that an op reads with a guard: its own epsilon, or a number in the op before it."""
    function = POWERS.get(an.number(op.y) or 0.0, "") if op.op_type == "pow" else op.op_type
    read = op.y if function == "real_div" else op.x
    if not function or an.is_stored(read):
        return None
    epsilon = an.number(op.inputs.get("epsilon")) if op.op_type in an.ops.SINGULAR else None
    if epsilon is not None and epsilon > ROUNDED_TO_0:
        return _Guarded(read, epsilon, function)
    tile = an.producer(read, "tile")
    if tile is not None and _is_broadcast(tile):
        read = tile.x
    guard = an.producer(read, "add", "maximum", "clip")
    if guard is None:
        is_sum = an.producer(read, "reduce_sum", "reduce_mean", "reduce_sum_square") is not None
        lost = op.op_type == "rsqrt" and is_sum  # a norm by rows, whose epsilon fp16 rounded to 0
        return _Guarded(read, an.fp16.LEAST, function, clips=True, lost=True) if lost else None
    limits = an.reading.guard_of(guard)
    if limits is None or not limits.least > ROUNDED_TO_0:
        return None
    clips, ops = guard.op_type != "add", (guard,) if tile is None else (tile, guard)
    return _Guarded(limits.value, limits.least, function, clips, limits.most, ops=ops)


def _is_broadcast(tile: Operation) -> bool:
    """Are axes of length 1 repeated for a division, which does so by itself?"""
    before, after = an.static_shape(tile.x), tile.outputs[0].shape
    divides = all(r.op_type == "real_div" and r.x.shape == after for r in an.consumers(tile.outputs[0]))
    return divides and before is not None and all(a in (1, b) for a, b in zip(before, after, strict=True))


def _of_norm(m: Match) -> Match | Refusal:
    """Accept a norm whose epsilon is 0 in fp16; of a batch norm the variance is known."""
    epsilon = an.number(m.root.inputs.get("epsilon"))
    if m.root.op_type == "batch_norm" or epsilon is None or epsilon > ROUNDED_TO_0:
        return an.NO_MATCH
    return m.bind(ops=(m.root,), within={m.root.x: (0.5, 4.0)})


def _applied(mb: Builder, op: Operation, function: str, divided: Var, unit: Var) -> Var:
    """Build the result of an op from its guarded operand divided by the unit, and take the unit out of it."""
    if function == "real_div":
        return units.times_power(mb, mb.real_div(x=op.x, y=divided), unit, -1)
    epsilon = {"epsilon": 0.0} if function in an.ops.SINGULAR else {}
    result = getattr(mb, function)(x=divided, **epsilon)
    if function == "log":
        return units.plus_logarithm(mb, result, unit, 1)
    return units.times_power(mb, result, unit, DEGREES[function])


@an.example((2, 8), dtype="fp16")
def example(x: Var) -> Var:
    """The logarithm of a guarded number."""
    guarded = mb.add(x=x, y=np.float16(1e-6), name="sum")
    return mb.log(x=guarded, epsilon=np.float16(0), name="y")
