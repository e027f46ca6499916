"""Squares that overflow in fp16 on the way to a small result, and the numbers behind a norm.

A norm over half a million numbers bounds each by 700, and sums of products behind it by more, which they reach
where one number holds the energy of all. What is reckoned here is a click in silence instead: one place of a
picture, or of a time, holds all energy, and all channels have a part in it. Of p places each number there is
the root of p; products add such numbers up as if the weights did not know them, to the length of their row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from anesurgery import fp16
from anesurgery.facts.written_exponentials import MOST_GUARD
from anesurgery.mil import Maker, Operation, Var, np_dtype, producer, static_shape
from anesurgery.numeric.forms import DIVISIONS, ROOTS, Form, centred, form_of
from anesurgery.numeric.hazard import Hazard, Size, in_words
from anesurgery.numeric.units import cosine_of, divided, is_divided, rebuilt
from anesurgery.ops import PRODUCTS
from anesurgery.semantics.analysis_cache import cached
from anesurgery.semantics.bounds import Interval, gain, norms, of_constant
from anesurgery.semantics.intervals import Intervals
from anesurgery.semantics.reading import flag, ints, readers_after


def _form(op: Operation, kinds: frozenset[str]) -> Form | None:
    """The form that an op ends, of static shapes, unless its rows are divided already."""
    form = form_of(op) if op.op_type in kinds else None
    return form if form is not None and form.is_static and not all(map(is_divided, form.rows)) else None


def root(op: Operation) -> Form | None:
    """The root, or the logarithm, of added squares that an op is; a norm has its reciprocal root to itself."""
    form = _form(op, ROOT.kinds)
    if form is None or form.powers[op.x] != (2.0,) or (op.op_type == "log" and not _is_energy(form)):
        return None
    if not (form.axes or len(form.rows) > 1 or any(not g.clips for g in form.guards)):
        return None
    return None if op.op_type == "rsqrt" and _ends_norm(op, form) else form


def _is_energy(form: Form) -> bool:
    """Is a logarithm taken of squares, and of guards that are small enough to be no part of them?"""
    return not form.mixes and all(guard.number < MOST_GUARD for guard in form.guards)


def _ends_norm(op: Operation, form: Form) -> bool:
    """Is what a root makes multiplied with one of the rows?"""
    readers = readers_after(op.outputs[0])
    return any(r.op_type == "mul" and any(v in (r.x, r.y) for v in form.rows) for r in readers)


def spectrum(op: Operation) -> Form | None:
    """The logarithm of bands of a power, which stored weights mix, that an op is."""
    form = _form(op, SPECTRUM.kinds)
    return form if form is not None and form.mixes and form.powers[op.x] == (2.0,) else None


def cosine(op: Operation) -> Form | None:
    """The sum of products of two rows, by the lengths of both, that a division is."""
    form = _form(op, COSINE.kinds)
    total = None if form is None else producer(op.x, "reduce_sum")
    product = None if total is None else producer(total.x, "mul")
    if form is None or product is None or len(form.units) != 2 or len(form.rows) != 2:
        return None
    plain = all(guard.clips and guard.powers[0] == guard.powers[1] > 0 for guard in form.guards)
    return form if plain and form.powers[op.outputs[0]] == (0.0, 0.0) else None


def _overflow(form: Form, size: Size) -> str:
    most = in_words(max(map(size, form.rows)))
    return f"%{next(iter(form.rows)).name} {most}, and its squares overflow above {math.sqrt(fp16.LARGEST):.0f}"


def _build(mb: Maker, form: Form) -> Var:
    return rebuilt(mb, form, divided(mb, form))


ROOT = Hazard(
    ROOTS | {"log"},
    root,
    _overflow,
    _build,
    reach=Form.reaches,
    limit=fp16.LARGEST,
    safe="the squares add up to at most {most:g}, and do not overflow",
)
SPECTRUM = replace(
    ROOT,
    kinds=frozenset({"log"}),
    match=spectrum,
    safe="the powers and bands are at most {most:g}, and no band overflows",
)
COSINE = Hazard(
    frozenset({"real_div"}),
    cosine,
    "%{at.root.x.op.x.op.x.name} and %{at.root.x.op.x.op.y.name} are multiplied before they are divided by "
    "their lengths",
    lambda mb, form: cosine_of(mb, form, divided(mb, form)),
    reach=Form.reaches,
    limit=fp16.LARGEST,
    safe="what is summed is at most {most:g}, and does not overflow",
)


def norm_of(op: Operation) -> Form | None:
    """A row over its own length, or over the root of the mean of its squares, that an op makes."""
    form = form_of(op) if op.op_type in DIVISIONS else None
    if form is None or len(form.rows) != 1 or form.powers[op.outputs[0]] != (0.0,):
        return None
    return form if any(v in form.rows or v in form.same for v in (op.x, op.y)) else None


def root_norm(op: Operation) -> Form | None:
    """The norm `n / sqrt(mean(n * n) + epsilon)`, of x or of x less its mean, that an op ends."""
    form = norm_of(op)
    if form is None or form.gains[op.outputs[0]] != 1 or any(g.clips for g in form.guards):
        return None
    means = [o for o in form.ops if o.op_type == "reduce_mean"]
    return form if means and flag(means[0], "keep_dims") else None


def _written_norm(centred: bool, op: Operation) -> Form | str | None:
    """A norm that takes the mean away, or one that does not."""
    norm = root_norm(op)
    if norm is None or norm.is_centred != centred:
        return None
    kind = np_dtype(norm.source)
    return norm if kind == np.float16 else f"%{norm.source.name} holds {kind}, whose squares do not overflow"


def _unguarded(norm: Form) -> str:
    """Can numbers not be divided by a unit?"""
    if norm.epsilon <= 0:
        return "the epsilon is 0 in fp16"
    shape = tuple(map(str, norm.source.shape))
    return "" if norm.is_static else f"%{norm.source.name} has the dynamic shape {shape}"


RMS_NORM = Hazard(
    DIVISIONS,
    partial(_written_norm, False),
    _overflow,
    lambda mb, norm: rebuilt(mb, norm, divided(mb, norm)),
    reach=lambda norm, size: size(norm.source),
    limit=math.sqrt(fp16.LARGEST),
    safe="%{at.source.name} is at most {most:g}: its squares do not overflow",
    unable=_unguarded,
    half=False,
)
GROUP_NORM = replace(
    RMS_NORM,
    match=partial(_written_norm, True),
    build=lambda mb, norm: rebuilt(mb, norm, divided(mb, norm, centre=True)),
    reach=lambda norm, size: 2 * size(norm.source),  # less the mean
)


NUMBERS = 4096
"""Over no more of them a norm gives nothing beyond 64, whatever it reads, and so does a product with rows of
length 1: no place is asked for."""
SPREAD = 4.0
"""How far numbers of one place go beyond their root mean square. A choice: of drawn ones one in 16,000 does;
products whose rows of weights are turned to the very numbers of the click go further."""
SEARCH_STEPS = 200
"""Ops that are looked at: a residual stream has a few in each block."""


@cached
def far_end(var: Var) -> float:
    """The magnitude that a value behind norms does not exceed, as reckoned; infinite for others."""
    return max(map(abs, _BehindNorms(assume={}).of(var)))


class _BehindNorms(Intervals):
    """Intervals in which the result of a norm ends where a click brings it, and that of a product likewise."""

    def of(self, var: Var) -> Interval:
        """The answer to a question."""
        self.steps = SEARCH_STEPS
        return self.at(var)

    def result(self, op: Operation, var: Var) -> Interval:
        """Return the interval of a result; norms and products have bounds of their own here."""
        most = math.inf
        if (normalised := _norm(op)) is not None:
            scale, shift = gain(op)
            most = max(math.sqrt(NUMBERS), _far(*normalised)) * scale + shift
        elif op.op_type in PRODUCTS and (rows := norms(op)) is not None:
            bias = op.inputs.get("bias")
            start = 0.0 if bias is None else max(map(abs, of_constant(bias)))
            low, high = self.at(op.x)
            most = max(abs(low), abs(high)) * rows.length + start if math.isfinite(high - low) else math.inf
        elif (left := centred(var)) is not None:  # of a click, the mean is next to 0
            most = max(map(abs, self.at(left[0])))
        else:
            return super().result(op, var)
        return -most, most


def _norm(op: Operation) -> tuple[Var, Sequence[int]] | None:
    """The value and axes of a norm: an op, or a division by the root of the mean, or the sum, of squares."""
    if op.op_type in ("layer_norm", "instance_norm"):
        return op.x, list(range(2, op.x.rank)) if op.op_type == "instance_norm" else ints(op, "axes")
    form = norm_of(op)
    if form is None or not form.axes:
        return None
    inside = next(of.x for of in form.ops if of.op_type in ROOTS and of.x in form.gains)
    return (next(iter(form.rows)), form.axes) if form.gains[inside] >= 1 else None


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
