"""Hazards of squares that overflow fp16 although the result is small: roots, log spectra, cosines and norms.

An example is `sqrt(reduce_sum(x * x))`: from x = 256 on the square overflows, while the root would be 256. The
repair divides x by a unit first (see `units`). Which ops make up such a site is found by `forms`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np

from anesurgery import fp16
from anesurgery.errors import Refusal
from anesurgery.facts.written_exponentials import MOST_GUARD
from anesurgery.mil import Maker, Operation, Var, np_dtype, producer
from anesurgery.numeric.forms import DIVISIONS, ROOTS, Form, form_of
from anesurgery.numeric.hazard import Hazard, MagnitudeBound, magnitude_words
from anesurgery.numeric.units import build_cosine, divide_rows, is_divided, rebuild
from anesurgery.semantics.reading import flag, readers_after


def _unrepaired_form(op: Operation, kinds: frozenset[str]) -> Form | None:
    """Return the form that ends with an op, if its shapes are static and its rows are not yet divided."""
    form = form_of(op) if op.op_type in kinds else None
    return form if form is not None and form.is_static and not all(map(is_divided, form.rows)) else None


def root(op: Operation) -> Form | None:
    """Match sqrt, rsqrt or log of a sum of squares; the rsqrt inside a norm belongs to the norm's own row."""
    form = _unrepaired_form(op, ROOT.kinds)
    if form is None or form.powers[op.x] != (2.0,) or (op.op_type == "log" and not _is_energy(form)):
        return None
    if not (form.axes or len(form.rows) > 1 or any(not g.clips for g in form.guards)):
        return None  # the root of one square is |x|
    return None if op.op_type == "rsqrt" and _ends_norm(op, form) else form


def _is_energy(form: Form) -> bool:
    """Is it the logarithm of an energy: of squares, with guards that are small beside them?"""
    return not form.mixes and all(guard.number < MOST_GUARD for guard in form.guards)


def _ends_norm(op: Operation, form: Form) -> bool:
    """Is the root multiplied with one of the rows that were squared, as in x * rsqrt(mean(x * x))?"""
    readers = readers_after(op.outputs[0])
    return any(r.op_type == "mul" and any(v in (r.x, r.y) for v in form.rows) for r in readers)


def spectrum(op: Operation) -> Form | None:
    """Match a log-mel spectrum: log(weights @ (re ** 2 + im ** 2))."""
    form = _unrepaired_form(op, SPECTRUM.kinds)
    return form if form is not None and form.mixes and form.powers[op.x] == (2.0,) else None


def cosine(op: Operation) -> Form | None:
    """Match a cosine: sum(a * b) / (|a| * |b|)."""
    form = _unrepaired_form(op, COSINE.kinds)
    total = None if form is None else producer(op.x, "reduce_sum")
    product = None if total is None else producer(total.x, "mul")
    if form is None or product is None or len(form.units) != 2 or len(form.rows) != 2:
        return None
    plain = all(guard.clips and guard.powers[0] == guard.powers[1] > 0 for guard in form.guards)
    return form if plain and form.powers[op.outputs[0]] == (0.0, 0.0) else None


def _overflow_words(form: Form, bound: MagnitudeBound) -> str:
    most, name = magnitude_words(max(map(bound, form.rows))), next(iter(form.rows)).name
    least, largest = math.sqrt(fp16.LEAST), math.sqrt(fp16.LARGEST)
    return f"the square of %{name} overflows from {largest:.0f} on, and is 0 below {least:.1g}; it {most}"


def _rebuild_on_quotients(mb: Maker, form: Form) -> Var:
    return rebuild(mb, form, divide_rows(mb, form))


ROOT = Hazard(
    kinds=ROOTS | {"log"},
    match=root,
    message=_overflow_words,
    repair=_rebuild_on_quotients,
    largest=Form.largest_value,
    limit=fp16.LARGEST,
    harmless="the squares add up to at most {most:g}, and do not overflow",
)
SPECTRUM = replace(
    ROOT,
    kinds=frozenset({"log"}),
    match=spectrum,
    harmless="the powers and bands are at most {most:g}, and no band overflows",
)
COSINE = replace(
    ROOT,
    kinds=frozenset({"real_div"}),
    match=cosine,
    message="%{at.root.x.op.x.op.x.name} and %{at.root.x.op.x.op.y.name} are multiplied before they are "
    "divided by their lengths",
    repair=lambda mb, form: build_cosine(mb, form, divide_rows(mb, form)),
    harmless="what is summed is at most {most:g}, and does not overflow",
)


def norm_of(op: Operation) -> Form | None:
    """Return the form of x / |x| or x / sqrt(mean(x * x)) that ends with an op."""
    form = form_of(op) if op.op_type in DIVISIONS else None
    if form is None or len(form.rows) != 1 or form.powers[op.outputs[0]] != (0.0,):
        return None
    return form if any(v in form.rows or v in form.same for v in (op.x, op.y)) else None


def root_norm(op: Operation) -> Form | None:
    """Return the form of n / sqrt(mean(n * n) + epsilon) that ends with an op, where n is x or x - mean(x)."""
    form = norm_of(op)
    if form is None or form.gains[op.outputs[0]] != 1 or any(g.clips for g in form.guards):
        return None
    means = [o for o in form.ops if o.op_type == "reduce_mean"]
    return form if means and flag(means[0], "keep_dims") else None


def _written_norm(centred: bool, op: Operation) -> Form | str | None:
    """Match a norm that subtracts the mean (centred), or one that does not."""
    norm = root_norm(op)
    if norm is None or norm.is_centred != centred:
        return None
    kind = np_dtype(norm.source)
    return norm if kind == np.float16 else f"%{norm.source.name} holds {kind}, whose squares do not overflow"


def _cannot_divide(norm: Form) -> str:
    """Return why the numbers of a norm cannot be divided by a unit; "" where they can."""
    if norm.epsilon <= 0:
        return "the epsilon is 0 in fp16"
    shape = tuple(map(str, norm.source.shape))
    return "" if norm.is_static else f"%{norm.source.name} has the dynamic shape {shape}"


RMS_NORM = Hazard(
    kinds=DIVISIONS,
    match=partial(_written_norm, False),
    message=_overflow_words,
    repair=_rebuild_on_quotients,
    largest=lambda norm, bound: bound(norm.source),
    limit=math.sqrt(fp16.LARGEST),
    harmless="%{at.source.name} is at most {most:g}: its squares do not overflow",
    not_repairable=_cannot_divide,
    fp16_only=False,
)
GROUP_NORM = replace(
    RMS_NORM,
    match=partial(_written_norm, True),
    repair=lambda mb, norm: rebuild(mb, norm, divide_rows(mb, norm, centre=True)),
    largest=lambda norm, bound: 2 * bound(norm.source),
    harmless="%{at.source.name} less its mean is at most {most:g}: its squares do not overflow",
)
NORMS = ((RMS_NORM, "rms_norm"), (GROUP_NORM, "group_norm"))
"""Norms that are written out, each with the pass that divides before it squares, which stays on the engine."""


def repair_of_norm(op: Operation) -> str | None:
    """Return the pass for the norm that ends with an op; None where it ends none that can be repaired."""
    repairs = (name for norm, name in NORMS if not isinstance(norm.site_to_repair(op), Refusal))
    return next(repairs, None)
