"""The site of an edit: what is replaced, the ops of both sides, and the values that they read from outside.

`site_of` finds it; `checking.site.check_site` then compares both sides, and `proofs.prove` proves them equal. A
large site is checked on fewer rows, or on one plane of a picture, if both sides treat all rows or planes alike.
`range_violation` looks for inputs with which a value that the site reads leaves the range shown for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from anesurgery.checking.adversarial import Drawing
from anesurgery.checking.grades import Promise, UpperLimit
from anesurgery.checking.lengths import drawn_shape, symbols_of, with_rows
from anesurgery.checking.numbers import Numbers, as_tensor
from anesurgery.errors import InterpretError
from anesurgery.facts.dependence import slice_back
from anesurgery.interpret import Evaluator
from anesurgery.interpret.arithmetic.precision import narrows
from anesurgery.mil import (
    Array,
    Operation,
    Var,
    is_compressed,
    is_stored,
    np_dtype,
    producer,
    reads,
    static_shape,
    types,
)
from anesurgery.ops import CARRIERS, CONTRACTIONS, CONTROL, LISTS, MOVING, POINTWISE, RANDOM, STATEFUL, names
from anesurgery.semantics.bounds import ANY
from anesurgery.semantics.intervals import STEPS, stored_interval
from anesurgery.semantics.reading import ints, is_tensor
from anesurgery.semantics.rows import places_of, slices_read


@dataclass(frozen=True)
class Site:
    """One edit: what is replaced, the ops of both sides, and what they read from outside."""

    replaced: Sequence[tuple[Var, Var]]
    old_ops: Sequence[Operation]
    new_ops: Sequence[Operation]
    drawn: Sequence[Var]
    carried: Sequence[Var]
    """What the new side reads from inside the old side."""

    @property
    def ops(self) -> list[Operation]:
        """The ops of both sides."""
        return [*self.old_ops, *self.new_ops]


def site_of(
    replaced: Sequence[tuple[Var, Var]], new_ops: Sequence[Operation], matched: Sequence[Operation]
) -> Site:
    """Return the site of an edit; the parameters are those of `checking.site.check_site`."""
    replaced, new_ops = _without_last_casts(replaced, new_ops)
    new_ops = [*_decoders_of(new_ops), *new_ops]  # compressed weights are constants, and no numbers to be drawn
    inside = {v for op in new_ops for v in op.outputs}
    outside = dict.fromkeys(v for op in new_ops for v in reads(op) if v not in inside)
    outside |= dict.fromkeys(new for _, new in replaced if new not in inside)
    boundary = [v for v in outside if v.op is None or v.op.op_type != "const"]
    # Walk back from the old values to what both sides read. What the matched ops make is computed, though the
    # new side may read it too; the walk then ends at what those ops read.
    matched_values = {v for op in matched for v in op.outputs}
    stop = set(boundary) - matched_values
    if stop != set(boundary):
        edge = {v for op in matched for v in reads(op)} - matched_values
        stop = stop | edge if stop <= edge else stop
    old_ops = slice_back([old for old, _ in replaced] + [v for v in boundary if v in matched_values], stop)
    inner = {v for op in old_ops for v in op.outputs}
    inputs = dict.fromkeys([*boundary, *(v for op in old_ops for v in reads(op) if v not in inner)])
    # What the new side reads from inside the old side is computed, so it must not be drawn.
    drawn = [v for v in inputs if v not in inner and not (v.op is not None and v.op.op_type == "const")]
    return Site(replaced, old_ops, new_ops, drawn, [v for v in boundary if v in inner])


def _without_last_casts(
    replaced: Sequence[tuple[Var, Var]], new_ops: Sequence[Operation]
) -> tuple[list[tuple[Var, Var]], list[Operation]]:
    """Return the pairs and new ops without last casts to a dtype in which the old side computes: both round."""
    read = {v for op in new_ops for v in reads(op)}
    pairs, last = [], set[Operation]()
    for old, new in replaced:
        op = producer(new, "cast")
        is_last = op in new_ops and new not in read
        if op is not None and is_last and narrows(op) and _is_computed_in_type_of(old, new):
            last.add(op)
            new = op.x
        pairs.append((old, new))
    return pairs, [op for op in new_ops if op not in last]


def _is_computed_in_type_of(old: Var, new: Var) -> bool:
    """Return whether the old value was computed in the type to which the new one is cast."""
    return old.op is not None and old.op.op_type not in CARRIERS | MOVING and np_dtype(old) == np_dtype(new)


def _decoders_of(ops: Sequence[Operation]) -> list[Operation]:
    """Return the ops that decode compressed weights which some ops read, without these ops themselves."""
    weights = [v for op in ops for v in reads(op) if is_compressed(v)]
    return [op for op in slice_back(weights, set()) if op.op_type != "const" and op not in set(ops)]


# Sites with fewer rows or planes.


ROWS = 2
"""The least rows of an excerpt: a single one would be taken for an axis that broadcasts."""
SHAPED = names("slice_by_index slice_by_size slice_update")
"""Ops that hold the number of rows in a parameter; `lengths.evaluator` adapts reshapes."""

MOST_ELEMENTS = 1 << 18
"""Values with more elements are cut: 1 MB in fp32. A choice."""

Axes = dict[Var, int]
"""Value -> the axis of its rows."""


def row_axes(site: Site) -> Axes | None:
    """Return the row axis of each value with rows, for the longest axis that both sides treat row by row."""
    return next(_all_row_axes(site), None)


def _all_row_axes(site: Site) -> Iterator[Axes]:
    """Yield such row axes for each axis that both sides treat row by row, the longest first."""
    values = [v for pair in site.replaced for v in pair]
    shapes = {static_shape(v) for v in values}
    shape = shapes.pop() if len(shapes) == 1 else None
    if shape is None:
        return
    for axis in sorted(range(len(shape)), key=lambda a: -shape[a]):
        axes = dict.fromkeys(values, axis)
        if shape[axis] > ROWS and _works_row_by_row(site.ops, axes):
            yield axes


@contextmanager
def on_fewer_rows(site: Site, whole: Collection[Var]) -> Iterator[bool]:
    """Let the values of a large site have fewer rows, along axes on which both sides treat all indices alike.

    Args:
        site: the edit.
        whole: values that are drawn whole: neither they nor constants may be cut.

    Yields:
        Whether anything is cut.
    """
    is_large = _largest_value(site) > MOST_ELEMENTS and not symbols_of(site.drawn)
    with ExitStack() as cuts:
        is_cut = False
        for axes in _all_row_axes(site) if is_large else ():
            value, axis = next(iter(axes.items()))
            length = drawn_shape(value)[axis]
            rows = max(ROWS, length * MOST_ELEMENTS // _largest_value(site))
            if rows < length and not any(is_stored(v) or v in whole for v in axes):
                cuts.enter_context(with_rows(axes, rows))
                is_cut = True
        yield is_cut


def _largest_value(site: Site) -> int:
    """Return the elements of the largest value of a site that is not a constant."""
    computed = (v for op in site.ops if op.op_type != "const" for v in op.outputs)
    return max((math.prod(drawn_shape(v)) for v in (*site.drawn, *computed) if is_tensor(v)), default=0)


def _works_row_by_row(ops: Sequence[Operation], axes: Axes) -> bool:
    """Return whether every op treats each row separately, if rows are followed from results to operands."""
    computed = [op for op in ops if op.op_type != "const"]
    for op in reversed(computed):
        rows = _rows_read(op, axes)
        if rows is None or any(axes.setdefault(v, at) != at for v, at in rows.items()):
            return False
    return all(axes.get(v) == _rows_read(op, axes).get(v) for op in computed for v in reads(op))  # type: ignore[union-attr]


def _rows_read(op: Operation, axes: Axes) -> Axes | None:
    """Return the row axes of operands, empty where the result has no rows; None where the op mixes rows."""
    wanted = [axes[v] for v in op.outputs if v in axes]
    if not wanted:
        return {}
    places = places_of(op) if len(op.outputs) == 1 and op.op_type not in SHAPED else None
    rows = None if places is None else slices_read(places, wanted[0])
    whole = rows is not None and (op.op_type in POINTWISE or not any(map(is_stored, rows)))
    return rows if whole else None


def constants_among(axes: Axes) -> Axes:
    """Return the constants that have rows."""
    return {v: at for v, at in axes.items() if producer(v, "const") is not None}


UNCOUNTED = POINTWISE | names("avg_pool l2_pool max_pool reduce_mean pad slice_by_index")
"""Ops without a parameter that says how many planes there are (a slice has masks for that)."""


def treats_planes_alike(site: Site) -> bool:
    """Return whether each op works on each plane of [images, channels, spatial...] separately, and alike.

    Every value has the same images and channels, and no constant differs between them.
    """
    values = [*site.drawn, *(v for pair in site.replaced for v in pair)]
    planes = {shape[:2] if (shape := static_shape(v)) is not None and len(shape) > 2 else None for v in values}
    computed = [op for op in site.ops if op.op_type != "const"]
    if len(planes) != 1 or None in planes or site.carried:
        return False
    return all(_plane_by_plane(op, planes) for op in computed)


def _plane_by_plane(op: Operation, planes: set[tuple[int, ...] | None]) -> bool:
    """Return whether the op treats each plane alike, whatever their number."""
    places = places_of(op) if op.op_type in UNCOUNTED and len(op.outputs) == 1 else None
    if not places or not _have_planes(op.outputs, planes):
        return False
    if op.op_type == "slice_by_index" and any(ints(op, k)[:2] != [1, 1] for k in ("begin_mask", "end_mask")):
        return False
    stored, computed = [o for o in places if is_stored(o.var)], [o for o in places if not is_stored(o.var)]
    same_for_all = not any({0, 1} & {*o.places} for o in stored)
    return same_for_all and all(o.places[:2] == (0, 1) and _have_planes([o.var], planes) for o in computed)


def _have_planes(values: Iterable[Var], planes: set[tuple[int, ...] | None]) -> bool:
    """Return whether values are computed, and have these images and channels and spatial axes."""
    shapes = [None if producer(v, "const") is not None else static_shape(v) for v in values]
    return all(shape is not None and len(shape) > 2 and shape[:2] in planes for shape in shapes)


# -- ranges -----------------------------------------------------------------------------------------------
#
# The interval analysis says where a value lies. The ops upstream are run as stored, in fp16 and fp32, on
# inputs made to leave that range: numbers whose squares vanish or overflow, rows with a single nonzero element,
# and rows that do not vary. An element outside the range shows an error of the analysis.

UNFOLLOWED = CONTROL | LISTS | RANDOM | STATEFUL
"""Ops that are not run again; their results are drawn."""
FORMS = ("any", "one of each row", "one of all", "alike")
"""Forms of inputs: all elements random, one nonzero element in each row or in all, equal rows."""
FEW_UPSTREAM = 1 << 20
"""The most elements upstream for which every magnitude and form is tried: 24 runs then take less than a second.
Above, only numbers whose squares vanish are tried."""


def range_violation(site: Site, seed: int) -> str:
    """Return a number outside a range on which the check relies, in words; "" where none was found."""
    floats = (v for v in site.drawn if np_dtype(v).kind == "f")
    return next(filter(None, (_leaves_range(v, seed) for v in floats)), "")


def _leaves_range(var: Var, seed: int) -> str:
    """Return an element that a value takes outside its range, in words; "" where none was found."""
    low, high = stored_interval(var)
    ops, boundary = _ops_upstream(var)
    if not ops or (low, high) == ANY:
        return ""
    run = Evaluator(ops, [var], "fp16")
    for numbers in _range_inputs(boundary, ops, seed):
        try:
            (values,) = run(numbers)
        except InterpretError:
            continue  # places or lengths that do not go together
        held = values.double()[~torch.isnan(values)]
        beyond = held[(held < low) | (held > high)]
        if beyond.numel():
            return f"%{var.name} is {float(beyond[0]):.9g}, outside of {low:.9g} to {high:.9g}"
    return ""


def _ops_upstream(var: Var) -> tuple[list[Operation], list[Var]]:
    """Return the nearest ops that compute a value, in order, and the values that they read."""
    near, level = dict[Operation, None](), [var]
    while level and len(near) < STEPS:
        makers = dict.fromkeys(v.op for v in level if v.op is not None and _is_followed(v.op))
        level = [v for op in makers if op not in near for v in reads(op)]
        near |= makers
    inside = {v for op in near for v in op.outputs}
    read = dict.fromkeys(v for op in near for v in reads(op) if v not in inside)
    ops = slice_back([var], set(read))
    return ops, [v for v in read if v.op is None or v.op.op_type != "const"]


def _is_followed(op: Operation) -> bool:
    if op.op_type == "const" or op.op_type in UNFOLLOWED or op.blocks:
        return False
    return op.op_type not in CONTRACTIONS or any(stored_interval(v) != ANY for v in op.outputs)


def _range_inputs(boundary: Sequence[Var], ops: Sequence[Operation], seed: int) -> Iterator[Numbers]:
    """Yield inputs that may leave the range, round by round."""
    if not all(is_tensor(v) for v in boundary):
        return
    drawing, rng = Drawing(lambda var, rng: None), np.random.default_rng(seed)
    values = (v for op in ops for v in op.outputs if types.is_tensor(v.sym_type))
    is_small = sum(math.prod(drawn_shape(v)) for v in values) <= FEW_UPSTREAM
    for magnitude_index, form in product(
        range(len(_magnitudes(np.dtype(np.float16)))) if is_small else (0,), FORMS
    ):
        numbers: Numbers = {}
        for var in boundary:
            dtype = np_dtype(var)
            if dtype.kind != "f":
                numbers[var] = as_tensor(drawing.draw(var, "normal", rng))
                continue
            drawn = _numbers_of_form(form, drawn_shape(var), rng) * _magnitudes(dtype)[magnitude_index]
            with np.errstate(over="ignore"):
                numbers[var] = as_tensor(drawing.bounded(var, drawn, dtype))
        yield numbers


def _magnitudes(dtype: np.dtype[np.floating]) -> tuple[float, ...]:
    """Return the magnitudes to try for a dtype, those whose squares vanish first, up to the largest."""
    info = np.finfo(dtype)
    least, normal, most = (float(v) for v in (info.smallest_subnormal, info.tiny, info.max))
    return math.sqrt(least), math.sqrt(normal), 1.0, 64.0, math.sqrt(most), most


def _numbers_of_form(form: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Return numbers of magnitude 1 to 2 in one of `FORMS`."""
    numbers = np.asarray(rng.uniform(0.25, 2.0, shape) * rng.choice([-1.0, 1.0], shape))
    if not numbers.size or form == "any":
        return numbers
    rows = numbers.reshape(-1, shape[-1] if shape else 1)
    if form == "alike":
        return np.broadcast_to(rows[:, :1], rows.shape).reshape(shape)
    alone = np.zeros_like(rows)
    kept = len(rows) if form == "one of each row" else 1
    at = np.arange(kept), rng.integers(rows.shape[1], size=kept)
    alone[at] = rows[at]
    return alone.reshape(shape)


def limits_of(site: Site, promise: Promise) -> dict[Var, float]:
    """Return float inputs -> the largest magnitude that the pass promises, where their dtype holds more."""
    if promise.magnitude == np.inf and not promise.limits:
        return {}
    floats = [v for v in site.drawn if np_dtype(v).kind == "f"]
    magnitudes = {v: promise.limits.get(v, promise.magnitude) for v in floats}
    return {v: most for v, most in magnitudes.items() if most < np.finfo(np_dtype(v)).max}


def lies_within(var: Var, most: float) -> bool:
    """Return whether the interval analysis shows that no element of a value exceeds a magnitude."""
    low, high = stored_interval(var)
    return high <= most and (isinstance(most, UpperLimit) or -most <= low)
