"""Squares that overflow in fp16 on the way to a small result: where they are, what they reach, the repair."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np

from anesurgery import fp16
from anesurgery.facts.written_exponentials import MOST_GUARD
from anesurgery.mil import Maker, Operation, Var, np_dtype, producer
from anesurgery.numeric.forms import DIVISIONS, ROOTS, Form, form_of
from anesurgery.numeric.hazard import Hazard, Size, in_words
from anesurgery.numeric.units import cosine_of, divided, is_divided, rebuilt
from anesurgery.semantics.reading import flag, readers_after


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
