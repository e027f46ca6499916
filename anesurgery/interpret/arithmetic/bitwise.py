"""The arithmetic of bits: an element is a hash of how it is computed, rounding included.

Equal hashes mean equal bits, also for infinities and NaN, if equal sums are added in the same order. A sum of
products is a hash of its ordered terms, whichever op spells it; operands that commute are sorted; the sign of a
product is taken out, since IEEE arithmetic does so too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from anesurgery.interpret.arithmetic import bit_rules, field, list_rules
from anesurgery.interpret.arithmetic.bit_rules import Bitwise
from anesurgery.interpret.arithmetic.field import Image
from anesurgery.interpret.arithmetic.lattice import MOST_MEMBERS
from anesurgery.interpret.arithmetic.symbolic import Rule
from anesurgery.interpret.ops.conv import pad_axes
from anesurgery.interpret.ops.pooling import Windows, counted, windows
from anesurgery.interpret.table import ints
from anesurgery.mil import Operation, np_dtype


def _side_by_side(a: Bitwise, x: Any, y: Any) -> Image:
    """Two operands along a new last axis."""
    first, second = a.image(x), a.image(y)
    shape = np.broadcast_shapes(first.shape, second.shape)
    return field.together([first, second], lambda each: torch.stack([v.expand(shape) for v in each], -1))


def _maximum(a: Bitwise, op: Operation, x: Any, y: Any) -> Image:
    return a.extremes(op).largest(_side_by_side(a, x, y))


def _minimum(a: Bitwise, op: Operation, x: Any, y: Any) -> Image:
    return a.extremes(op).smallest(_side_by_side(a, x, y))


def _clip(a: Bitwise, op: Operation, x: Any, alpha: float, beta: float) -> Image:
    return _minimum(a, op, _maximum(a, op, x, _bound(a, op, alpha)), _bound(a, op, beta))


def _bound(a: Bitwise, op: Operation, value: float) -> float:
    """A bound of a clip; none, where every finite number of the dtype keeps it."""
    dtype = np_dtype(op.outputs[0])
    none = a.finite and dtype.kind == "f" and abs(value) >= np.finfo(dtype).max
    return float(np.copysign(np.inf, value)) if none else float(value)


def _extreme(a: Bitwise, op: Operation, x: Any, axes: Any = None, keep_dims: bool = False) -> Image:
    """The largest or the smallest of some elements, in whichever order."""
    image = a.image(x)
    chosen = list(range(image.ndim)) if axes is None else [i % image.ndim for i in ints(axes)]
    width = int(np.prod([image.shape[i] for i in chosen]))
    if width > MOST_MEMBERS:
        return a.function(op.op_type, field.summed(a.hashed(image), chosen, bool(keep_dims)))
    others = [i for i in range(image.ndim) if i not in chosen]
    shape = (
        [1 if i in chosen else n for i, n in enumerate(image.shape)]
        if keep_dims
        else [image.shape[i] for i in others]
    )
    rows = image.map(lambda v: v.permute(*others, *chosen).reshape(-1, width))
    sets = a.extremes(op)
    extreme = sets.largest(rows) if op.op_type == "reduce_max" else sets.smallest(rows)
    return extreme.map(lambda v: v.reshape(shape))


def _max_pool(a: Bitwise, op: Operation, x: Any, ceil_mode: bool = False, **how: Any) -> Image:
    """The largest element of each window, axis by axis; what lies outside is -inf, which never wins."""
    image = a.image(x)
    w = _windows_of(image, ceil_mode, how)
    if int(np.prod(w.kernel)) > MOST_MEMBERS:
        return a.uninterpreted(op, {"x": x, "ceil_mode": ceil_mode, **how})
    for axis in range(len(w.kernel)):
        one = _along(w, axis)
        image = a.lattice.largest(_spread(image, one, one.used, a.lift(-np.inf)))
    return image


def _along(w: Windows, axis: int) -> Windows:
    """The windows of one axis, with those of one element on the others."""
    kernel, strides = (
        [n if i == axis else 1 for i, n in enumerate(counts)] for counts in (w.kernel, w.strides)
    )
    used = [pad if i == axis else (0, 0) for i, pad in enumerate(w.used)]
    return replace(w, kernel=kernel, strides=strides, used=used)


def _windows_of(image: Image, ceil_mode: Any, how: dict[str, Any]) -> Windows:
    options = (how.get(k) for k in ("strides", "pad_type", "pad"))
    strides, pad_type, pad = options
    return windows(image.lanes[0], how["kernel_sizes"], strides, pad_type or "valid", pad, bool(ceil_mode))


def _spread(image: Image, w: Windows, pads: list[tuple[int, int]], outside: Image) -> Image:
    """The elements of each window along a new last axis."""
    values = (float(v.reshape(-1)[0]) for v in outside.lanes)
    return image.with_lanes([_unfolded(lane, w, pads, v) for lane, v in zip(image.lanes, values, strict=True)])


def _unfolded(lane: torch.Tensor, w: Windows, pads: list[tuple[int, int]], outside: float) -> torch.Tensor:
    """The numbers of each window along a new last axis."""
    rank, lane = lane.ndim, pad_axes(lane, pads, outside)
    for axis, (width, step) in enumerate(zip(w.kernel, w.strides, strict=True)):
        lane = lane.unfold(2 + axis, width, step)
    return lane.reshape(*lane.shape[:rank], -1)


def _avg_pool(
    a: Bitwise,
    op: Operation,
    x: Any,
    exclude_padding_from_average: bool = False,
    ceil_mode: bool = False,
    **how: Any,
) -> Image:
    """A function of the elements of each window in their order, and of how many count."""
    image = a.image(x)
    w = _windows_of(image, ceil_mode, how)
    counts = counted(w, list(image.shape[2:]), bool(exclude_padding_from_average)).to(torch.int64)
    terms = _spread(image, w, w.used, a.lift(0.0))
    return a.function(
        ("avg_pool", a.rounds_to(op)),
        a.digest(terms, [-1]).map(lambda v: v.squeeze(-1)),
        a.lift(counts.numpy()),
    )


RULES: dict[str, Rule] = {
    "maximum": _maximum,
    "minimum": _minimum,
    "relu": lambda a, op, x: _maximum(a, op, x, 0.0),
    "threshold": lambda a, op, x, alpha: _maximum(a, op, x, float(alpha)),
    "relu6": lambda a, op, x: _clip(a, op, x, 0.0, 6.0),
    "clip": _clip,
    **dict.fromkeys(("reduce_max", "reduce_min"), _extreme),
    "max_pool": _max_pool,
    "avg_pool": _avg_pool,
}

Bitwise.rules = bit_rules.RULES | RULES | list_rules.RULES

__all__ = ["Bitwise"]
