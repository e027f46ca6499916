"""Windows that overlap, as `x.unfold` and `x.as_strided` name them: slices that are put together.

Which elements `as_strided` reads depends on how x lies in memory. The graphs of torch say so, but coremltools
drops it: `register` has each such node keep the strides of its operand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from anesurgery.frontend.arguments import argument, inputs_of, known_value
from anesurgery.mil import Var, is_symbolic, mb

MOST_SLICES = 64
"""More windows that do not share their elements evenly are gathered at once: as many slices would be most ops
of a model."""


def unfold(context: Any, node: Any) -> None:
    """`x.unfold(axis, size, step)`: the windows along an axis; the places within one become the last axis."""
    x = inputs_of(context, node)[0]
    axis, size, step = (int(known_value(v)) for v in inputs_of(context, node)[1:4])
    shape = _static(x, node)
    axis %= len(shape)
    count = (shape[axis] - size) // step + 1
    before, after = shape[:axis], shape[axis + 1 :]
    rows = mb.reshape(x=x, shape=[math.prod(before), shape[axis], math.prod(after)])
    windows = mb.transpose(x=_windows(rows, count, size, step), perm=[0, 1, 3, 2])
    context.add(mb.reshape(x=windows, shape=[*before, count, *after, size], name=node.name))


def as_strided(context: Any, node: Any) -> None:
    """`x.as_strided(size, stride)` of an x that fills its piece of memory: windows of that piece.

    Its axes are those of the strides; where two strides run along one axis, they are windows of it.
    """
    x, *numbers = inputs_of(context, node)[:3]
    size, stride = ([int(known_value(v)) for v in _each(values)] for values in numbers)
    shape, strides = _static(x, node), (node.meta or {}).get(STRIDES)
    offset = known_value(argument(context, node, 3, "storage_offset"))
    if strides is None or offset is not None:
        raise NotImplementedError(f"{node.name}: as_strided of what lies in memory in a way that is not known")
    order = sorted(range(len(shape)), key=lambda axis: (-strides[axis], axis))
    if any(
        shape[a] > 1 and strides[a] != math.prod(shape[b] for b in order[i + 1 :]) for i, a in enumerate(order)
    ):
        raise NotImplementedError(
            f"{node.name}: as_strided of shape {shape} with strides {list(strides)}: a view of a part"
        )
    groups = _axes_of_memory(math.prod(shape), size, stride)
    if groups is None:
        raise NotImplementedError(f"{node.name}: as_strided to size {size} with strides {stride}")
    x = mb.reshape(x=mb.transpose(x=x, perm=order), shape=[length for length, _, _ in groups])
    in_memory: list[int] = []  # the axes of the result, in their order in memory
    for length, unit, axes in groups:
        x = _along(x, len(in_memory), length, [(size[a], stride[a] // unit) for a in axes])
        in_memory += axes
    rest = [a for a in range(len(size)) if a not in in_memory]  # of length 1
    x = mb.reshape(x=x, shape=[size[a] for a in in_memory + rest])
    perm = [(in_memory + rest).index(a) for a in range(len(size))]
    context.add(mb.transpose(x=x, perm=perm, name=node.name))


def _axes_of_memory(total: int, size: Sequence[int], stride: Sequence[int]) -> Any:
    """A shape for so many elements, such that each axis of the result lies in one of its axes.

    For each: its length, its unit in memory, and the axes of the result in it, the widest stride first.
    None where there is none.
    """
    groups: list[tuple[int, int, list[int]]] = []
    unit, extent, axes = 1, 1, list[int]()
    for axis in sorted((a for a, n in enumerate(size) if n > 1), key=lambda a: stride[a]):
        step, partial = divmod(stride[axis], unit)
        if partial or not step:
            return None
        if axes and step >= extent and total % stride[axis] == 0:
            groups.insert(0, (step, unit, axes))
            unit, extent, axes, step = stride[axis], 1, [], 1
        axes = [axis, *axes]
        extent += (size[axis] - 1) * step
    return None if total % unit or extent > total // unit else [(total // unit, unit, axes), *groups]


def _along(x: Var, at: int, length: int, taken: list[tuple[int, int]]) -> Var:
    """What is taken along an axis: so many elements, so many apart, and windows of windows."""
    if taken == [(length, 1)]:
        return x
    shape = [int(n) for n in x.shape]
    rows = mb.reshape(x=x, shape=[math.prod(shape[:at]), length, math.prod(shape[at + 1 :])])
    if len(taken) == 2 and taken[1][1] == 1:
        (count, step), (size, _) = taken
        rows = _windows(rows, count, size, step)
    else:
        places = sum(np.ix_(*(np.arange(n) * step for n, step in taken)), np.int64(0))
        rows = mb.gather(x=rows, indices=np.ravel(places).astype(np.int32), axis=1)
    return mb.reshape(x=rows, shape=[*shape[:at], *(n for n, _ in taken), *shape[at + 1 :]])


def _windows(x: Var, count: int, size: int, step: int) -> Var:
    """The windows of the middle of three axes: (before, window, place, after)."""
    before, _, after = (int(n) for n in x.shape)

    def part(first: int, last: int) -> Var:
        return _slice(x, first, last)

    if size % step == 0:  # whole steps, which neighbours share
        steps = count - 1 + size // step
        x = mb.reshape(x=part(0, steps * step), shape=[before, steps, step * after])
        shifted = [part(first, first + count) for first in range(size // step)]
        whole = shifted[0] if len(shifted) == 1 else mb.concat(values=shifted, axis=2)
        return mb.reshape(x=whole, shape=[before, count, size, after])
    if count <= MOST_SLICES:
        windows = [part(first * step, first * step + size) for first in range(count)]
        whole = windows[0] if count == 1 else mb.concat(values=windows, axis=1)
    else:
        places = np.add.outer(np.arange(count) * step, np.arange(size))
        whole = mb.gather(x=x, indices=places.ravel().astype(np.int32), axis=1)
    return mb.reshape(x=whole, shape=[before, count, size, after])


def _slice(x: Var, first: int, last: int) -> Var:
    before, length, after = (int(n) for n in x.shape)
    if (first, last) == (0, length):
        return x
    return mb.slice_by_index(x=x, begin=[0, first, 0], end=[before, last, after])


def _static(x: Var, node: Any) -> list[int]:
    if any(map(is_symbolic, x.shape)):
        raise NotImplementedError(f"{node.name}: {node.kind} of a value of dynamic shape {x.shape}")
    return [int(n) for n in x.shape]


def _each(values: Any) -> Any:
    return values if isinstance(values, (list, tuple)) else known_value(values)


STRIDES = "strides_of_operand"
"""The entry of a node's `meta` that holds them."""


def register() -> None:
    """Let nodes that need the strides of their operand keep them; doing it again changes nothing."""
    from coremltools.converters.mil.frontend.torch.internal_graph import InternalTorchIRNode

    for maker, strides in (("from_torchscript_node", _in_trace), ("from_exir_node", _in_export)):
        host = getattr(InternalTorchIRNode, maker)
        if host.__func__.__module__ != __name__:
            setattr(InternalTorchIRNode, maker, classmethod(_keeping_strides(host.__func__, strides)))


def _keeping_strides(host: Callable[..., Any], strides: Callable[[Any], Any]) -> Callable[..., Any]:
    def make(cls: Any, node: Any, *args: Any, **options: Any) -> Any:
        node_made = host(cls, node, *args, **options)
        if node_made.kind in ("as_strided", "as_strided_copy"):
            node_made.meta = dict(node_made.meta or {}) | {STRIDES: strides(node)}
        return node_made

    return make


def _in_trace(node: Any) -> Any:
    return next(iter(node.inputs())).type().strides()


def _in_export(node: Any) -> Any:
    value = node.args[0].meta["val"]
    return None if value.storage_offset() else value.stride()
