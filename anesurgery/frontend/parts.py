"""Convert operations on parts of tensors: overlapping windows, and writes at positions in a tensor or mask.

Which elements `as_strided` reads depends on the layout of x in memory. torch's graphs state the strides, but
coremltools drops them: each such node is made to keep the strides of its operand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np

from anesurgery.frontend.arguments import (
    Convert,
    Wrap,
    argument,
    converted,
    dtype_of,
    inputs_of,
    known_value,
    option,
    promoted,
    wrapper,
)
from anesurgery.frontend.resampling import FIXED
from anesurgery.mil import Var, is_symbolic, mb, np_dtype, types

MOST_SLICES = 64
"""Above this many windows that do not overlap by whole steps, one gather replaces the slices."""
STRIDES = "strides_of_operand"
"""The entry of a node's `meta` that holds the strides of its operand."""


def unfold(context: Any, node: Any) -> None:
    """Convert `x.unfold(axis, size, step)`: windows along an axis; their elements become the last axis."""
    x = inputs_of(context, node)[0]
    axis, size, step = (int(known_value(v)) for v in inputs_of(context, node)[1:4])
    shape = _static_shape(x, node)
    axis %= len(shape)
    count = (shape[axis] - size) // step + 1
    before, after = shape[:axis], shape[axis + 1 :]
    rows = mb.reshape(x=x, shape=[math.prod(before), shape[axis], math.prod(after)])
    windows = mb.transpose(x=_windows(rows, count, size, step), perm=[0, 1, 3, 2])
    context.add(mb.reshape(x=windows, shape=[*before, count, *after, size], name=node.name))


def as_strided(context: Any, node: Any) -> None:
    """Convert `x.as_strided(size, stride)` of an x that fills its memory: windows of that memory.

    The memory is reshaped to axes such that each stride runs along one of them; two strides along one axis are
    windows.
    """
    x, *numbers = inputs_of(context, node)[:3]
    size, stride = ([int(known_value(v)) for v in _each(values)] for values in numbers)
    shape, strides = _static_shape(x, node), (node.meta or {}).get(STRIDES)
    offset = option(context, node, 3, "storage_offset")
    if strides is None or offset is not None:
        how = "" if offset is None else f" with storage_offset {offset}"
        words = f"as_strided{how} of what lies in memory in a way that is not known"
        raise NotImplementedError(f"{node.name}: {words}")
    order = sorted(range(len(shape)), key=lambda axis: (-strides[axis], axis))
    widths = [math.prod(shape[b] for b in order[i + 1 :]) for i in range(len(order))]
    fills_memory = all(shape[a] == 1 or strides[a] == width for a, width in zip(order, widths, strict=True))
    if not fills_memory:
        raise NotImplementedError(
            f"{node.name}: as_strided of shape {shape} with strides {list(strides)}: a view of a part"
        )
    groups = _axes_of_memory(math.prod(shape), size, stride)
    if groups is None:
        raise NotImplementedError(f"{node.name}: as_strided to size {size} with strides {stride}")
    x = mb.reshape(x=mb.transpose(x=x, perm=order), shape=[length for length, _, _ in groups])
    in_memory: list[int] = []  # the axes of the result, in their order in memory
    for length, unit, axes in groups:
        taken = [(size[a], stride[a] // unit) for a in axes] or [(1, 1)]
        x = _windows_along(x, len(in_memory), length, taken)
        in_memory += axes
    rest = [a for a in range(len(size)) if a not in in_memory]  # of length 1
    x = mb.reshape(x=x, shape=[size[a] for a in in_memory + rest])
    perm = [(in_memory + rest).index(a) for a in range(len(size))]
    context.add(mb.transpose(x=x, perm=perm, name=node.name))


class _MemoryAxis(NamedTuple):
    """An axis of the memory, reshaped."""

    length: int
    stride: int
    result_axes: list[int]
    """The axes of the result that run along it, widest stride first."""


def _axes_of_memory(total: int, size: Sequence[int], stride: Sequence[int]) -> list[_MemoryAxis] | None:
    """Return a shape for `total` elements, such that each axis of the result runs along one of its axes.

    For 12 elements, size (2, 3) and stride (4, 1): [(3, 4, [0]), (4, 1, [1])]. None where no such shape exists.
    """
    groups: list[_MemoryAxis] = []
    unit, extent, axes = 1, 1, list[int]()  # of the axis that grows: its stride, elements reached, result axes
    for axis in sorted((a for a, n in enumerate(size) if n > 1), key=lambda a: stride[a]):
        step, partial = divmod(stride[axis], unit)
        if partial or not step:
            return None
        if axes and step >= extent and total % stride[axis] == 0:
            groups.insert(0, _MemoryAxis(step, unit, axes))
            unit, extent, axes, step = stride[axis], 1, [], 1
        axes = [axis, *axes]
        extent += (size[axis] - 1) * step
    length, rest = divmod(total, unit)
    return None if rest or extent > length else [_MemoryAxis(length, unit, axes), *groups]


def _windows_along(x: Var, at: int, length: int, taken: list[tuple[int, int]]) -> Var:
    """Return the windows along an axis; `taken` has (count, step) pairs, the last one inside a window."""
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
    """Return the windows of the middle of three axes: (before, window, element, after)."""
    before, _, after = (int(n) for n in x.shape)

    def part(x: Var, first: int, last: int) -> Var:
        return x if (first, last) == (0, x.shape[1]) else slice_of_axis(x, 1, first, last)

    if size % step == 0:  # whole steps, which neighbours share
        steps = count - 1 + size // step
        x = mb.reshape(x=part(x, 0, steps * step), shape=[before, steps, step * after])
        shifted = [part(x, first, first + count) for first in range(size // step)]
        whole = shifted[0] if len(shifted) == 1 else mb.concat(values=shifted, axis=2)
        return mb.reshape(x=whole, shape=[before, count, size, after])
    if count <= MOST_SLICES:
        windows = [part(x, first * step, first * step + size) for first in range(count)]
        whole = windows[0] if count == 1 else mb.concat(values=windows, axis=1)
    else:
        places = np.add.outer(np.arange(count) * step, np.arange(size))
        whole = mb.gather(x=x, indices=places.ravel().astype(np.int32), axis=1)
    return mb.reshape(x=whole, shape=[before, count, size, after])


def slice_of_axis(x: Var, axis: int, begin: int, end: int | None, **named: Any) -> Var:
    """Return the elements `x[begin:end]` along an axis; `named` is the name of the op, if it needs one."""
    others = [a != axis for a in range(x.rank)]
    first, last = ([0 if other else n for other in others] for n in (begin, end or 0))
    to_end = [other or end is None for other in others]
    return mb.slice_by_index(x=x, begin=first, end=last, begin_mask=others, end_mask=to_end, **named)


def _need_static(node: Any, *values: Var) -> None:
    """Refuse a node that reads a value of dynamic shape."""
    for x in values:
        if any(map(is_symbolic, x.shape)):
            raise NotImplementedError(
                f"{node.name}: {node.kind} of a value of dynamic shape {x.shape}; {FIXED}; a selection "
                "(`x[mask]`) makes a shape dynamic too: leave it to the app"
            )


def _static_shape(x: Var, node: Any) -> list[int]:
    """Return the shape of a value that a node reads; refuse a dynamic one."""
    _need_static(node, x)
    return [int(n) for n in x.shape]


def _each(values: Any) -> Any:
    """Return the elements of a list of values, or of a constant vector."""
    return values if isinstance(values, (list, tuple)) else known_value(values)


def with_strides_in_trace(host: Any) -> Any:
    """Wrap the reader of a trace's nodes: `as_strided` keeps the strides of its operand, None if unknown."""
    return _keeping_strides(host, lambda node: next(iter(node.inputs())).type().strides())


def with_strides_in_export(host: Any) -> Any:
    """Wrap the reader of torch.export's nodes likewise: None where the operand begins inside its memory."""
    return _keeping_strides(host, _strides_in_export)


def _keeping_strides(host: Any, strides: Callable[[Any], Any]) -> Any:
    def make(kind: Any, node: Any, *args: Any, **options: Any) -> Any:
        node_made = host(node, *args, **options)
        if node_made.kind in ("as_strided", "as_strided_copy"):
            node_made.meta = dict(node_made.meta or {}) | {STRIDES: strides(node)}
        return node_made

    return make


def _strides_in_export(node: Any) -> Any:
    value = node.args[0].meta["val"]
    return None if value.storage_offset() else value.stride()


REDUCTIONS = {"sum": "add", "mean": "add", "prod": "mul", "amax": "max", "amin": "min"}
"""Reduction of torch -> mode of MIL's scatter; a mean is divided afterwards."""
NEUTRAL = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "amax": -np.inf, "amin": np.inf}
"""Reduction of torch -> the number that changes no result."""
MEAN, LARGEST = 1, 2
"""Torch's numbers for bags of embeddings by their mean and by their maximum; 0 is for the sum."""


def _index_write(mode: str) -> Convert:
    """Return the converter of `x.index_copy(axis, at, source)`, `index_fill` or `index_add`."""

    def convert(context: Any, node: Any) -> None:
        x, axis, at, source = inputs_of(context, node)[:4]
        x, source = promoted([x, source])
        alpha = float(option(context, node, 4, "alpha", 1))
        if alpha != 1:
            source = mb.mul(x=source, y=types.nptype_from_builtin(source.dtype)(alpha))
        context.add(_scattered(x, int(known_value(axis)) % x.rank, at, source, mode, node))

    return convert


def _scattered(x: Var, axis: int, at: Var, source: Var, mode: str, node: Any) -> Var:
    """Return x after a write at positions of one axis; the source is broadcast to them."""
    at = mb.reshape(x=at, shape=[1]) if at.rank == 0 else at
    _need_static(node, x, at)
    shape = [*x.shape[:axis], at.shape[0], *x.shape[axis + 1 :]]
    at, source = _without_negative(at, int(x.shape[axis])), _broadcast(source, tuple(shape))
    return mb.scatter(data=x, indices=at, updates=source, axis=axis, mode=mode, name=node.name)


@wrapper
def with_index_put(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `x[:, at] = y` and `x[:, at] += y`, to write at positions on one axis."""
    x, by_axis, source = inputs_of(context, node)[:3]
    added = bool(option(context, node, 3, "accumulate", False))
    axes = [axis for axis, at in enumerate(by_axis) if at is not None] if isinstance(by_axis, list) else []
    indices = [by_axis[axis] for axis in axes]
    is_mask = len(axes) == 1 and types.is_bool(indices[0].dtype)
    if is_mask and not added and math.prod(source.shape) == 1:
        context.add(_filled_where(x, indices[0], source, axes[0], node.name))
    elif is_mask and axes[0] > 0:
        _write_in_front(host, context, node, axes[0])
    elif axes == [0] and not added and (chosen := _selected_by(indices[0], source)) is not None:
        context.add(_chosen_where(x, indices[0], chosen, node.name))
    elif axes == list(range(len(axes))) and _need_broadcast(x, indices):
        context.add(_written_at_several(x, indices, source, added, node.name))
    elif len(axes) == 1 and _needs_scatter(x, axes[0], indices[0], added):
        x, source = promoted([x, source])
        after = x.rank - 1 - axes[0]
        if indices[0].rank == 0 and source.rank > after:  # a plain index removes its axis
            source = mb.expand_dims(x=source, axes=[source.rank - after])
        context.add(_scattered(x, axes[0], indices[0], source, "add" if added else "update", node))
    else:
        host(context, node)


def _write_in_front(host: Convert, context: Any, node: Any, axis: int) -> None:
    """Convert `x[:, mask] = y`: the axes of the mask stand in front meanwhile, for the host takes no others."""
    x, by_axis, source = inputs_of(context, node)[:3]
    _need_static(node, x)
    mask, is_bool = by_axis[axis], types.is_bool(x.dtype)
    x, source = (mb.cast(x=v, dtype="int32") if is_bool else v for v in (x, source))
    order = [*range(axis, axis + mask.rank), *range(axis), *range(axis + mask.rank, x.rank)]
    chosen = [1 if a == axis else n for a, n in enumerate(x.shape) if not axis < a < axis + mask.rank]
    source = mb.add(x=source, y=np.zeros(chosen, np_dtype(source)))  # broadcast
    source = mb.transpose(x=source, perm=[axis, *(a for a in range(source.rank) if a != axis)])
    names = [f"{node.name}_{part}" for part in ("x", "at", "y")]
    moved, values = copy(node), (mb.transpose(x=x, perm=order), [mask], source)
    moved.inputs = [*names, *node.inputs[3:]]
    (written,) = converted(host, context, moved, dict(zip(names, values, strict=True)))
    written = mb.transpose(x=written, perm=np.argsort(order))
    context.add(mb.cast(x=written, dtype="bool") if is_bool else written, torch_name=node.name)


def _needs_scatter(x: Var, axis: int, at: Var, added: bool) -> bool:
    """Return whether a write at positions of one axis is one that coremltools does not convert, or not well.

    It converts writes at one position, and at those of the first axis, unless they are added.
    """
    left_to_host = not added and (axis == 0 or at.shape in ((), (1,)))
    return (
        not left_to_host and at.rank <= 1 and np_dtype(at).kind in "iu" and not any(map(is_symbolic, x.shape))
    )


def _filled_where(x: Var, mask: Var, number: Var, axis: int, name: str) -> Var:
    """Return x with one number where a mask from an axis on is true, whose count no load has to know."""
    x, number = promoted([x, mb.reshape(x=number, shape=[1] * x.rank) if x.rank else number])
    others = [a for a in range(x.rank) if not axis <= a < axis + mask.rank]
    mask = mb.expand_dims(x=mask, axes=others) if others else mask
    return mb.select(cond=mask, a=number, b=x, name=name)


def _selected_by(mask: Var, source: Var) -> Var | None:
    """Return x where the source is `x[mask]`, of a mask over all axes of x; None for another source."""
    read: Any = source.op
    if read is not None and read.op_type == "transpose" and source.rank == 1:
        read = read.x.op
    found = read.indices.op if read is not None and read.op_type == "gather_nd" else None
    whole = found is not None and found.op_type == "non_zero" and found.x is mask and mask.rank == read.x.rank
    return read.x if whole else None


def _chosen_where(x: Var, mask: Var, chosen: Var, name: str) -> Var:
    """Return x with the elements of another value where a mask is true: no count of them, which may be 0."""
    x, chosen = promoted([x, chosen])
    return _on_numbers(lambda a, b, name: mb.select(cond=mask, a=a, b=b, name=name), [chosen, x], name)


def _need_broadcast(x: Var, indices: list[Var]) -> bool:
    """Return whether indices have different static shapes, which coremltools cannot broadcast."""
    static = not any(map(is_symbolic, (*x.shape, *(d for at in indices for d in at.shape))))
    whole = all(np_dtype(at).kind in "iu" for at in indices) and not types.is_bool(x.dtype)
    return static and whole and len({tuple(at.shape) for at in indices}) > 1


def _written_at_several(x: Var, indices: list[Var], source: Var, added: bool, name: str) -> Var:
    """Return x after a write at positions of its first axes, broadcast to a common shape."""
    shape = np.broadcast_shapes(*(tuple(at.shape) for at in indices))
    found = [_without_negative(at, int(size)) for at, size in zip(indices, x.shape, strict=False)]
    at = mb.stack(values=[_broadcast(one, shape) for one in found], axis=-1)
    x, source = promoted([x, source])
    source = _broadcast(source, (*shape, *x.shape[len(indices) :]))
    return mb.scatter_nd(data=x, indices=at, updates=source, mode="add" if added else "update", name=name)


def _broadcast(x: Var, shape: tuple[int, ...]) -> Var:
    """Repeat a value to a static shape."""
    if tuple(x.shape) == shape:
        return x
    x = mb.reshape(x=x, shape=[1] * (len(shape) - x.rank) + list(x.shape))
    return mb.tile(x=x, reps=[n // m for n, m in zip(shape, x.shape, strict=True)])


def _without_negative(at: Var, size: int) -> Var:
    """Return positions without negative ones, which no scatter takes since iOS 17."""
    if at.val is not None:
        return mb.const(val=np.where(at.val < 0, at.val + size, at.val).astype(np.int32))
    n = np_dtype(at).type(size)
    return mb.select(cond=mb.less(x=at, y=np_dtype(at).type(0)), a=mb.add(x=at, y=n), b=at)


def _places(mask: Var) -> list[Var]:
    """Return the positions at which a mask is true, along each of its axes."""
    places = mb.non_zero(x=mask)
    columns = mb.split(x=places, num_splits=mask.rank, axis=1) if mask.rank > 1 else [places]
    return [mb.squeeze(x=column, axes=[1]) for column in columns]


@wrapper
def with_masks_among_indices(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `x[mask, at]`: beside a mask, coremltools drops the other indices."""
    indices = inputs_of(context, node)[1]
    masks = [at for at in indices if at is not None and types.is_bool(at.dtype)]
    if not masks or sum(at is not None for at in indices) == 1:
        host(context, node)
        return
    values: list[Any] = []
    for at in indices:
        values += _places(at) if at is not None and types.is_bool(at.dtype) else [at]
    names = [None if v is None else f"{node.name}_index_{i}" for i, v in enumerate(values)]
    read, listed = copy(node), f"{node.name}_indices"
    read.inputs = [node.inputs[0], listed if isinstance(node.inputs[1], str) else names]
    given = {name: v for name, v in zip(names, values, strict=True) if name is not None}
    (result,) = converted(host, context, read, {listed: values, **given})
    context.add(result, torch_name=node.name)


@wrapper
def with_scatter(host: Convert, context: Any, node: Any) -> None:
    """Wrap the converter of `x.scatter(axis, at, value)`: numbers are cast to x's dtype, bools to int32."""
    x, _, at, value = inputs_of(context, node)[:4]
    if types.is_bool(x.dtype):
        value = mb.cast(x=value, dtype="int32")
        value = value if value.rank else mb.fill(shape=mb.shape(x=at), value=value)
        axis = int(option(context, node, 1, "dim"))
        whole = mb.cast(x=x, dtype="int32")
        scattered = mb.scatter_along_axis(data=whole, indices=at, updates=value, axis=axis, mode="update")
        context.add(mb.cast(x=scattered, dtype="bool", name=node.name))
        return
    if isinstance(value, Var) and value.rank == 0 and value.dtype != x.dtype:
        name = f"{node.name}_number"
        context.add(mb.cast(x=value, dtype=dtype_of(x), name=name))
        node.inputs = [*node.inputs[:3], name, *node.inputs[4:]]
    host(context, node)


def scatter_reduce(context: Any, node: Any) -> None:
    """Convert `x.scatter_reduce(axis, at, source, "sum", include_self=True)`; also mean, prod, amax, amin."""
    x, axis, at, source = inputs_of(context, node)[:4]
    how, axis = str(option(context, node, 4, "reduce")), int(known_value(axis))
    with_self = bool(option(context, node, 5, "include_self", True))
    number = np_dtype(x).type

    def scattered(data: Any, updates: Any, mode: str, **named: Any) -> Var:
        return mb.scatter_along_axis(data=data, indices=at, updates=updates, axis=axis, mode=mode, **named)

    if with_self and how != "mean":
        context.add(scattered(x, source, REDUCTIONS[how], name=node.name))
        return
    _need_static(node, x, at)
    if np_dtype(x).kind != "f":
        words = f"scatter_reduce by {how}, include_self={with_self}, of {dtype_of(x)}"
        raise NotImplementedError(f"{node.name}: {words}")
    count = scattered(np.zeros(x.shape, number), np.ones(at.shape, number), "add")
    if not with_self:  # what is written begins at the number that changes nothing
        x = mb.select(cond=mb.greater(x=count, y=number(0)), a=number(NEUTRAL[how]), b=x)
    made = scattered(x, source, REDUCTIONS[how])
    if how == "mean":
        count = mb.add(x=count, y=number(1)) if with_self else mb.maximum(x=count, y=number(1))
        made = mb.real_div(x=made, y=count)
    context.add(mb.identity(x=made, name=node.name))


def embedding_bag(context: Any, node: Any) -> None:
    """Convert `embedding_bag(weight, ids, offsets, ...)`: the sum, mean or maximum of each bag of rows.

    Bags of one known length are reshaped to (bags, length, width). For others, each bag masks the rows of all
    ids. Only the first of torch's four results is given; the others serve gradients.
    """
    weight, ids, offsets = inputs_of(context, node)[:3]
    number, mode = np_dtype(weight).type, int(option(context, node, 4, "mode", 0))
    _need_static(node, ids, offsets)
    to_end = bool(option(context, node, 7, "include_last_offset", False))
    count, bags = int(ids.shape[0]), int(offsets.shape[0]) - to_end
    even = offsets.val is not None and np.array_equal(offsets.val * bags, np.arange(bags + to_end) * count)
    shape = [bags, count // bags] if even else [1, count]

    def by_bag(x: Var) -> Var:
        return mb.reshape(x=x, shape=[*shape, -1])

    inside: Any = np.ones((*shape, 1), np.bool_)
    if not even:
        inside = _inside_bags(offsets, bags, count)
    padding = option(context, node, 8, "padding_idx")
    if padding is not None and padding >= 0:
        inside = mb.logical_and(x=inside, y=by_bag(mb.not_equal(x=ids, y=np.int32(padding))))
    rows, kept = by_bag(mb.gather(x=weight, indices=ids, axis=0)), mb.cast(x=inside, dtype=dtype_of(weight))
    share = argument(context, node, 6, "per_sample_weights")
    found = mb.reduce_sum(x=kept, axes=[1], keep_dims=False)
    if mode == LARGEST:
        zeros = np.zeros(inside.shape, number)
        outside = mb.select(cond=inside, a=zeros, b=zeros - number(np.inf))
        made = mb.reduce_max(x=mb.add(x=rows, y=outside), axes=[1], keep_dims=False)
        made = mb.select(cond=mb.greater(x=found, y=number(0)), a=made, b=number(0))
    else:
        kept = kept if share is None else mb.mul(x=kept, y=by_bag(share))
        made = mb.reduce_sum(x=mb.mul(x=rows, y=kept), axes=[1], keep_dims=False)
        made = mb.real_div(x=made, y=mb.maximum(x=found, y=number(1))) if mode == MEAN else made
    if len(node.outputs) == 1:  # in an export other nodes select from the four; a trace names each
        context.add((made, None, None, None), torch_name=node.name)
    else:
        context.add(made, torch_name=node.outputs[0])


def _inside_bags(offsets: Var, bags: int, count: int) -> Var:
    """Return which of `count` ids are in each bag, (bags, count, 1); a bag ends where the next one begins."""
    ends = mb.concat(values=[offsets, np.full(1, count, np.int32)], axis=0)
    first, after = (mb.slice_by_index(x=ends, begin=[i], end=[i + bags]) for i in (0, 1))
    first, after = (mb.reshape(x=v, shape=[bags, 1, 1]) for v in (first, after))
    place = np.arange(count, dtype=np.int32)[None, :, None]
    return mb.logical_and(x=mb.less_equal(x=first, y=place), y=mb.greater(x=after, y=place))


def _on_numbers(convert: Callable[..., Var], values: Sequence[Var], name: str) -> Var:
    """Return `convert(*values, name=name)`; bools become int32 for it, since no gather takes them."""
    if not types.is_bool(values[0].dtype):
        return convert(*values, name=name)
    made = convert(*(mb.cast(x=v, dtype="int32") for v in values), name=f"{name}_number")
    return mb.cast(x=made, dtype="bool", name=name)


def masked_scatter(context: Any, node: Any) -> None:
    """Convert `x.masked_scatter(mask, source)`: true positions take the source's elements, in order."""
    x, mask, source = inputs_of(context, node)[:3]
    _need_static(node, x, mask, source)
    shape = np.broadcast_shapes(tuple(x.shape), tuple(mask.shape))
    flags = _broadcast(mb.cast(x=mask, dtype="int32"), shape)
    so_far = mb.cumsum(x=mb.reshape(x=flags, shape=[-1]), axis=0)
    at = mb.maximum(x=mb.sub(x=so_far, y=np.int32(1)), y=np.int32(0))
    last = np.int32(np.prod(source.shape) - 1)  # torch raises where a mask has more true places
    at, flags = mb.minimum(x=at, y=last), mb.cast(x=flags, dtype="bool")

    def convert(x: Var, source: Var, name: str) -> Var:
        taken = mb.gather(x=mb.reshape(x=source, shape=[-1]), indices=at, axis=0)
        x, taken = promoted([_broadcast(x, shape), mb.reshape(x=taken, shape=shape)])
        return mb.select(cond=flags, a=taken, b=x, name=name)

    context.add(_on_numbers(convert, [x, source], node.name))


def masked_select(context: Any, node: Any) -> None:
    """Convert `x.masked_select(mask)`: the elements at true positions, in a vector of dynamic length."""
    x, mask = inputs_of(context, node)[:2]
    _need_static(node, x, mask)
    shape = np.broadcast_shapes(tuple(x.shape), tuple(mask.shape))
    places = mb.non_zero(x=_broadcast(mb.cast(x=mask, dtype="int32"), shape))
    x = _broadcast(x, shape)
    context.add(_on_numbers(lambda x, name: mb.gather_nd(x=x, indices=places, name=name), [x], node.name))


CONVERSIONS: dict[str, Convert] = {
    **dict.fromkeys(("index_add", "index_add.int"), _index_write("add")),
    **dict.fromkeys(
        ("index_copy", "index_fill", "index_fill.int_scalar", "index_fill.int_tensor"), _index_write("update")
    ),
    **dict.fromkeys(("scatter_reduce", "scatter_reduce.two"), scatter_reduce),
    **dict.fromkeys(("embedding_bag", "embedding_bag.padding_idx"), embedding_bag),
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), embedding_bag),
    "unfold": unfold,
    "as_strided": as_strided,
    "masked_scatter": masked_scatter,
    "masked_select": masked_select,
}
WRAPPERS: dict[str, Wrap] = {
    "index": with_masks_among_indices,
    "index_put": with_index_put,
    **dict.fromkeys(("scatter", "scatter.value", "scatter.src"), with_scatter),
}
