"""What is written into a slice at constant places is joined to what stays: slices and concatenations.

It takes the dtype of what it is written into, and an empty slice changes nothing, as in torch.
Before iOS 18 coremltools flattens the tensor and scatters, which was placed on the Neural Engine in no form
(measured: M4, macOS 27). From iOS 18 on it writes `slice_update`, which is kept: caches are read from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from anesurgery.frontend.arguments import dtype_of, known_value
from anesurgery.mil import Var, is_symbolic, mb

Ranges = list[tuple[int, int]]


def register() -> None:
    """Let every write into a slice pass here first; doing it again changes nothing."""
    from coremltools.converters.mil.frontend.torch import ops

    host = ops._translate_torch_tensor_assign
    if host.__module__ != __name__:
        ops._translate_torch_tensor_assign = _joining(host)


def _joining(host: Callable[..., Var]) -> Callable[..., Var]:
    def translate(x: Var, updates: Var, begin: Any, end: Any, **options: Any) -> Var:
        name, ranges = options.get("name"), _ranges(x, begin, end, options)
        region = [last - first for first, last in ranges or ()]
        if name is not None and 0 in region:
            return mb.identity(x=x, name=name)
        if updates.dtype != x.dtype:
            updates = mb.cast(x=updates, dtype=dtype_of(x))
        if (
            ranges is None
            or name is None
            or any(map(is_symbolic, updates.shape))
            or math.prod(updates.shape) != math.prod(region)
            or _has_slice_update()
        ):
            return host(x=x, updates=updates, begin=begin, end=end, **options)
        if list(updates.shape) != region:
            updates = mb.reshape(x=updates, shape=region)
        return mb.identity(x=_written(x, updates, ranges, 0), name=name)

    return translate


def _ranges(x: Var, begin: Any, end: Any, options: dict[str, Any]) -> Ranges | None:
    """The first place and the one after the last, on each axis; None where they are dynamic or apart."""
    begin, end, stride = (known_value(v) for v in (begin, end, options.get("stride")))
    if begin is None or end is None:
        return None
    if any(map(is_symbolic, x.shape)) or not (stride is None or (np.asarray(stride) == 1).all()):
        return None
    masks = [options.get(f"{kind}_mask") for kind in ("begin", "end", "squeeze")]
    from_start, to_end, one = (np.resize(False if m is None else known_value(m), x.rank) for m in masks)
    spans = []
    for axis, length in enumerate(map(int, x.shape)):
        first, _, _ = slice(None if from_start[axis] else int(begin[axis]), None).indices(length)
        _, last, _ = slice(None, None if to_end[axis] else int(end[axis])).indices(length)
        spans.append((first, first + 1 if one[axis] else max(first, last)))
    return spans


def _has_slice_update() -> bool:
    from coremltools.converters.mil._deployment_compatibility import AvailableTarget
    from coremltools.converters.mil.frontend.torch.ops import is_current_opset_version_compatible_with

    return bool(is_current_opset_version_compatible_with(AvailableTarget.iOS18))


def _written(x: Var, updates: Var, ranges: Ranges, axis: int) -> Var:
    """X with the updates in those ranges; on the axes before this one it is cut to them."""
    while axis < x.rank and ranges[axis] == (0, x.shape[axis]):
        axis += 1
    if axis == x.rank:
        return updates
    (first, last), length = ranges[axis], int(x.shape[axis])
    inner = updates if axis + 1 == x.rank else _written(_part(x, axis, first, last), updates, ranges, axis + 1)
    joined = [_part(x, axis, 0, first)] if first else []
    joined += [inner, _part(x, axis, last, length)] if last < length else [inner]
    return mb.concat(values=joined, axis=axis)


def _part(x: Var, axis: int, first: int, last: int) -> Var:
    begin, end = [0] * x.rank, [int(n) for n in x.shape]
    begin[axis], end[axis] = first, last
    return mb.slice_by_index(x=x, begin=begin, end=end)
