"""On request, restore what a conversion is known to have lost, if the graph still shows it.

Before::

    main(%x: 2x3) {
      %y: 2x3 = sub(x=%x, y=%x)
      return %y
    }

After::

    main(%x: 2x3) {
      %y_restore_meaning_floor: 2x3 = floor(x=%x)
      %y: 2x3 = sub(x=%x, y=%y_restore_meaning_floor)
      return %y
    }

| finding | in the package | becomes |
|---|---|---|
| `lost-remainder` | `x - x` | `x - floor(x)`, as x % 1 |
| `lost-epsilon` | mean((x / s)^2) + e, times s | mean((x / s)^2) + e / s^2 |
| `lost-reciprocal` | 1 / (x + 1e-4) | 1 / x |
| `lost-branch` | `y > 0` in an atan2 | `y >= 0` |
| `lost-int16` | a gather, squeeze or topk of int16 | the same of int32 |
| `lost-integers` | integers limited or divided in fp16 | the same in int32 |
| `lost-sign` | `mod(x, y)` | `x - floor_div(x, y) * y` |
| `lost-average` | a mean of windows beyond the end | the same without what lies beyond |
| `lost-phase` | a long running sum in fp32, for a sine | running sums of blocks, and of their ends |

The outputs change, because the converted model did not mean what the original did. So `auto` never tries this
pass, and no edit is compared with the ops before it; compare the result with the model before the conversion
(`against_torch`).

Refuses when a mean has padding as well, which would then not count either, and when a long running sum has five
axes, runs backwards or leaves out its own term.

Why it helps: the numbers are those of the original model again. Each loss was reported (the findings name the
sources).

Grade: none: the numbers change on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb
from anesurgery.facts import windows
from anesurgery.placement.rules import lost_in_conversion as lost


def _epsilon(mb: Builder, op: an.Operation) -> Var:
    grown = lost.grown_epsilon(op)
    assert grown is not None
    return mb.add(x=grown.mean, y=mb.real_div(x=grown.epsilon, y=mb.square(x=grown.scale)))


def _branch(mb: Builder, op: an.Operation) -> dict[Var, Var]:
    comparison = lost.lost_branch(op)
    assert comparison is not None
    new = mb.before(comparison).greater_equal(x=comparison.x, y=comparison.y)
    return {comparison.outputs[0]: new}


def _wide_op(mb: Builder, op: an.Operation) -> dict[Var, Var]:
    """Build the op on int32 in place of int16: its data before the cast, and its indices."""
    cast, rest = an.producer(op.x, "cast"), an.op_inputs(op, "x", "output_indices_dtype")
    if "output_indices_dtype" in op.inputs:
        rest["output_indices_dtype"] = "int32"
    x = cast.x if cast is not None and lost.narrowed_data(op) else op.x
    results = getattr(mb, op.op_type)(x=x, **rest)
    new = dict[Var, Var]()
    for before, after in zip(op.outputs, results if len(op.outputs) > 1 else [results], strict=True):
        new |= _in_place_of(mb, before, after)
    return new


def _in_place_of(mb: Builder, narrow: Var, wide: Var) -> dict[Var, Var]:
    """Return what takes the place of a narrow value: casts of it become casts of the wide one."""
    readers = an.consumers(narrow)
    if narrow.dtype != wide.dtype and readers and all(r.op_type == "cast" for r in readers):
        return {r.outputs[0]: _cast_like(mb, wide, r.outputs[0]) for r in readers}
    return {narrow: _cast_like(mb, wide, narrow)}


def _cast_like(mb: Builder, var: Var, other: Var) -> Var:
    return var if var.dtype == other.dtype else mb.cast(x=var, dtype=an.dtype_name(other))


def _as_integers(mb: Builder, var: Var) -> Any:
    """Write limits and rounded division of integers in int32."""
    if an.is_stored(var):  # an infinity limits nothing
        ends = np.iinfo(np.int32)
        return np.clip(np.asarray(an.constant(var), float), ends.min, ends.max).astype(np.int32)
    op = var.op
    assert op is not None
    if op.op_type == "cast":
        return op.x if an.dtype_name(op.x) == "int32" else mb.cast(x=op.x, dtype="int32")
    if op.op_type != "clip":
        return getattr(mb, op.op_type)(x=_as_integers(mb, op.x), y=_as_integers(mb, op.y))
    low, high = (_as_integers(mb, v) for v in (op.alpha, op.beta))
    return mb.minimum(x=mb.maximum(x=_as_integers(mb, op.x), y=low), y=high)


def _without_padding(mb: Builder, op: an.Operation) -> Var:
    return mb.avg_pool(**an.op_inputs(op, "exclude_padding_from_average"), exclude_padding_from_average=True)


def _why_not_without_padding(op: an.Operation) -> str:
    padded = any(axis.before for axis in windows.window_axes(op))
    return "the mean counts padding, which would not count then" if padded else ""


def _in_blocks(mb: Builder, op: an.Operation) -> Var:
    """Write a running sum as those of blocks, each begun at the running sum of the ends before it."""
    axis, last = an.reading.axis_of(op), op.x.rank - 1
    order = [*(k for k in range(last + 1) if k != axis), axis]
    x = op.x if axis == last else mb.transpose(x=op.x, perm=order)
    *others, length = an.static_shape(x) or ()
    block = math.isqrt(length - 1) + 1
    if beyond := -length % block:
        x = mb.pad(x=x, pad=[0, 0] * last + [0, beyond], mode="constant", constant_val=np.float32(0))
    shape = [*others, (length + beyond) // block, block]
    within = mb.cumsum(x=mb.reshape(x=x, shape=shape), axis=last + 1, exclusive=False, reverse=False)
    ends = mb.slice_by_index(x=within, begin=[0] * (last + 1) + [block - 1], end=shape)
    sums = mb.add(x=within, y=mb.cumsum(x=ends, axis=last, exclusive=True, reverse=False))
    sums = mb.reshape(x=sums, shape=[*others, length + beyond])
    if beyond:
        sums = mb.slice_by_index(x=sums, begin=[0] * (last + 1), end=[*others, length])
    return sums if axis == last else mb.transpose(x=sums, perm=np.argsort(order))


def _why_not_in_blocks(op: an.Operation) -> str:
    if an.static_shape(op.x) is None or op.x.rank > 4:
        return "the running sum has five axes or an unknown length"
    is_plain = not (an.constant(op.inputs.get("exclusive")) or an.constant(op.inputs.get("reverse")))
    return "" if is_plain else "the running sum runs backwards, or leaves out its own term"


@dataclass(frozen=True)
class _Form:
    """How one finding is recognized and restored."""

    finds: Callable[[an.Operation], object]
    """Is an op written so? Any value that is true means yes."""
    build: Callable[[Builder, an.Operation], Any]
    """Builds what was meant."""
    why_not: Callable[[an.Operation], str] = lambda op: ""
    """Why an op of the form stays; "" if it does not."""


FORMS: dict[str, _Form] = {
    "lost-remainder": _Form(lost.lost_remainder, lambda mb, op: mb.sub(x=op.x, y=mb.floor(x=op.x))),
    "lost-epsilon": _Form(lost.grown_epsilon, _epsilon),
    "lost-reciprocal": _Form(
        lost.moved_divisor, lambda mb, op: mb.real_div(x=an.np_dtype(op.x).type(1), y=op.x)
    ),
    "lost-branch": _Form(lost.lost_branch, _branch),
    "lost-int16": _Form(lambda op: lost.narrowed_data(op) or lost.narrowed_places(op), _wide_op),
    "lost-integers": _Form(
        lost.rounded_integers, lambda mb, op: _cast_like(mb, _as_integers(mb, op.x), op.outputs[0])
    ),
    "lost-sign": _Form(
        lost.kept_sign, lambda mb, op: mb.sub(x=op.x, y=mb.mul(x=mb.floor_div(x=op.x, y=op.y), y=op.y))
    ),
    "lost-average": _Form(lost.overhanging_mean, _without_padding, _why_not_without_padding),
    "lost-phase": _Form(lost.long_phase, _in_blocks, _why_not_in_blocks),
}
"""Finding -> the form that it has in the package, and what was meant."""


@dataclass(frozen=True)
class RestoreMeaning(Rewrite):
    """Forms that converters leave become what the model meant."""

    name = "restore_meaning"
    kinds = an.ops.names(
        "sub add mul select atan gather gather_along_axis gather_nd squeeze topk cast mod avg_pool cumsum "
        "inverse"
    )
    asked_for = True
    caveat = "the outputs change on purpose; compare with the model before the conversion"
    only: tuple[str, ...] = an.option((), among=tuple(FORMS))
    """Names of findings; all of them by default."""

    def check(self, m: Match) -> Match | Refusal:
        """Match one of the forms."""
        for name, form in FORMS.items():
            if (self.only and name not in self.only) or not form.finds(m.root):
                continue
            if why := form.why_not(m.root):
                return Refusal(why, m.root)
            return m.bind(form=name)
        return an.NO_MATCH

    def uncompared(self, m: Match) -> Refusal | None:
        """Compare no results: they change on purpose."""
        return Refusal("the numbers change on purpose: compare with the model before the conversion", m.root)

    def rewrite(self, mb: Builder, m: Match) -> Any:
        """Build the op that was meant."""
        return FORMS[m.form].build(mb, m.root)


@an.example((2, 3))
def example(x: Var) -> Var:
    """What coremltools 9 makes of x % 1."""
    return mb.sub(x=x, y=x, name="y")
