"""Lift ops that move, cut, join and resize tensors, and ops on shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from anesurgery.coreai.lifts import (
    TABLE,
    LiftedOp,
    Unliftable,
    Value,
    as_var,
    cast,
    dtype_of,
    kind_of,
    lift,
    like,
    made_by,
    static_sizes,
)
from anesurgery.coreai.names import bits_of, name_of
from anesurgery.interpret.ops.image import GRIDS
from anesurgery.mil import Array, Var, any_symbolic, is_stored, is_symbolic, mb, types


@lift("reshape")
def _reshape(o: LiftedOp) -> Value:
    if None not in o.shape:
        return (
            _before_reshape(o)
            or _linear_of_reshaped(o)
            or _product_without_axes(o)
            or mb.reshape(x=o[0], shape=np.array(o.shape, np.int32))
        )
    return mb.reshape(x=o[0], shape=np.array(o.ints(1), np.int32) if o.known(1) else o[1])


def _before_reshape(o: LiftedOp) -> Value | None:
    """Return what was reshaped before, if it has the shape of the result; None for constants."""
    op = made_by(o[0], "expand_dims", "reshape", "squeeze")
    return op.x if op is not None and list(op.x.shape) == o.shape else None


def _linear_of_reshaped(o: LiftedOp) -> Value | None:
    """Build a linear layer on reshaped rows: Apple's compiler moves such a reshape behind the layer."""
    op = made_by(o[0], "linear")
    if op is None or len(o.shape) not in (2, 3) or o.shape[-1] != o[0].shape[-1]:
        return None
    rows = mb.reshape(x=op.x, shape=np.array([*o.shape[:-1], op.x.shape[-1]], np.int32))
    return mb.linear(**op.inputs | {"x": rows})


def _product_without_axes(o: LiftedOp) -> Value | None:
    """Build a product, scaled or not, at the rank of its result, which is that of matrices at least.

    Apple's compiler drops axes of size 1 in front of the factors only behind the product.
    """
    scaling = made_by(o[0], "mul")
    scale = None if scaling is None or scaling.y.val is None or np.size(scaling.y.val) > 1 else scaling.y
    op = made_by(o[0] if scaling is None or scale is None else scaling.x, "matmul")
    dropped = 0 if op is None else op.outputs[0].rank - len(o.shape)
    if op is None or dropped <= 0 or len(o.shape) < 2:
        return None
    if list(op.outputs[0].shape) != [1] * dropped + o.shape:
        return None
    extra = {name: op.inputs[name].rank - len(o.shape) for name in ("x", "y")}
    lower = {k: mb.squeeze(x=op.inputs[k], axes=list(range(n))) for k, n in extra.items() if n > 0}
    product = mb.matmul(**op.inputs | lower)
    return product if scale is None else mb.mul(x=product, y=scale)


@lift("concat")
def _concat(o: LiftedOp) -> Value:
    parts = [o[i] for i in range(1, len(o.operands))]
    axis = o.integer(0) % len(o.shape)
    return mb.concat(values=parts, axis=axis) if len(parts) > 1 else parts[0]


@lift("split")
def split(o: LiftedOp) -> Sequence[Value]:
    """Build pieces along an axis, whose sizes the results state."""
    axis = o.axes(2)[0]
    sizes = [result["shape"][axis] for result in o.op["results"]]
    if len(sizes) == 1:
        return [o[0]]
    if None in sizes:
        raise Unliftable("the sizes of its pieces are not fixed")
    return list(mb.split(x=o[0], split_sizes=sizes, axis=axis))


@lift("tile")
def _tile(o: LiftedOp) -> Value:
    if o.known(1) and set(o.ints(1)) == {1}:
        return o[0]
    return mb.tile(x=o[0], reps=o.ints(1) if o.known(1) else o[1])


@lift("pad")
def pad(o: LiftedOp) -> Value:
    """Build padding: constant, reflected, replicated or circular."""
    sides, mode = o.ints(1), o.attribute("padding_mode")
    if not any(sides):
        return o[0]
    if mode in ("circular", "symmetric"):
        return _wrapped(as_var(o[0]), sides, mode == "circular")
    if mode == "constant":
        value = o.numbers(2).astype(dtype_of(o[0])).reshape(())
        return mb.pad(x=o[0], pad=sides, mode=mode, constant_val=value)
    return _mirrored(as_var(o[0]), sides, mode)


def _mirrored(x: Var, sides: list[int], mode: str) -> Var:
    """Build reflected or replicated padding; MIL does so along the last two axes only."""
    padded = [axis for axis in range(len(sides) // 2) if any(sides[2 * axis : 2 * axis + 2])]
    if padded[0] >= x.rank - 2:
        return mb.pad(x=x, pad=sides[2 * padded[0] :], mode=mode)
    for axis in padded:
        x = _with_axis_last(partial(mb.pad, pad=sides[2 * axis : 2 * axis + 2], mode=mode), x, axis)
    return x


def _with_axis_last(build: Callable[..., Var], x: Var, axis: int) -> Var:
    """Build an op that works along the last axis for another one."""
    order = [*(a for a in range(x.rank) if a != axis), axis]
    return mb.transpose(x=build(x=mb.transpose(x=x, perm=order)), perm=np.argsort(order))


def _wrapped(x: Var, sides: list[int], circular: bool) -> Var:
    """Pad with elements of the other end, or with those of this end in reverse order."""
    for axis, (low, high) in enumerate(zip(sides[::2], sides[1::2], strict=True)):
        n = static_sizes(x)[axis]
        ends = ((n - low, n), (0, high)) if circular else ((0, low), (n - high, n))
        parts = [[_along(x, axis, *end)] if end[0] < end[1] else [] for end in ends]
        if not circular:
            parts = [[mb.reverse(x=piece, axes=[axis]) for piece in part] for part in parts]
        if any(parts):
            x = mb.concat(values=[*parts[0], x, *parts[1]], axis=axis)
    return x


def _along(x: Var, axis: int, begin: int, end: int) -> Var:
    """Build a slice along one axis."""
    sizes = static_sizes(x)
    sizes[axis] = end - begin
    return mb.slice_by_size(x=x, begin=[begin if a == axis else 0 for a in range(len(sizes))], size=sizes)


@lift("where")
def where(o: LiftedOp) -> Value:
    """Build a selection of two values, both broadcast to the shape of the result."""
    if None in o.shape:
        widest = max(o.operands, key=lambda value: len(value.shape))
        shape = mb.shape(x=widest)
        first, second = (
            v if tuple(v.shape) == tuple(widest.shape) else _broadcast_to_computed(v, shape)
            for v in (o[1], o[2])
        )
    else:
        first, second = (_broadcast_to_known(v, [int(n or 0) for n in o.shape]) for v in (o[1], o[2]))
    return mb.select(cond=o[0], a=first, b=second)


@lift("broadcast_in_dims")
def broadcast_in_dims(o: LiftedOp) -> Value:
    """Build a broadcast of some axes of size 1."""
    axes = o.axes(2)
    if o.known(1) and not any_symbolic(o[0].shape):
        sizes: list[int] = static_sizes(o[0])
        for axis, size in zip(axes, o.ints(1), strict=True):
            sizes[axis] = size
        return _broadcast_to_known(o[0], sizes)
    rank, sizes_now, new = len(o.shape), mb.shape(x=o[0]), as_var(o[1])
    pieces = [
        mb.slice_by_size(x=new if a in axes else sizes_now, begin=[axes.index(a) if a in axes else a], size=[1])
        for a in range(rank)
    ]
    return _broadcast_to_computed(o[0], mb.concat(values=pieces, axis=0))


def _broadcast_to_known(value: Value, shape: list[int]) -> Value:
    """Repeat a value until it has a known shape."""
    now = [1] * (len(shape) - len(value.shape)) + list(value.shape)
    if any(is_symbolic(a) and b != a for a, b in zip(now, shape, strict=True)):
        return _broadcast_to_computed(value, mb.const(val=np.array(shape, np.int32)))
    reps = [1 if a == b or is_symbolic(a) else b // a for a, b in zip(now, shape, strict=True)]
    if len(now) != len(value.shape):
        value = mb.reshape(x=value, shape=np.array(now, np.int32))
    return mb.tile(x=value, reps=reps) if set(reps) - {1} else value


def _broadcast_to_computed(value: Value, shape: Var) -> Value:
    """Multiply a value by ones of a computed shape, which is exact also for infinities and NaN."""
    if kind_of(value) == "b":
        return mb.logical_and(x=value, y=mb.fill(shape=shape, value=np.bool_(True)))
    return mb.mul(x=value, y=mb.fill(shape=shape, value=like(value, 1)[()]))


@lift("broadcast_shapes")
def broadcast_shapes(o: LiftedOp) -> Value:
    """Build the common shape of two: the longer one, with the other's size where it has a 1."""
    first, second = (as_var(o[i]) for i in (0, 1))
    length = max(int(first.shape[0]), int(second.shape[0]))
    first, second = _padded_with_ones(first, length), _padded_with_ones(second, length)
    return mb.select(cond=mb.equal(x=first, y=np.int32(1)), a=second, b=first)


def _padded_with_ones(shape: Var, length: int) -> Var:
    short = length - int(shape.shape[0])
    return mb.concat(values=[np.ones(short, np.int32), shape], axis=0) if short else shape


@lift("interpolate")
def interpolate(o: LiftedOp) -> Value:
    """Build a resampling, axis by axis: by a gather for the nearest element, or by a matrix."""
    x, scales, offsets = as_var(o[0]), o.numbers(2).astype(np.float64), o.numbers(3).astype(np.float64)
    nearest = o.attribute("interpolation_mode") == "nearest_neighbor"
    if any_symbolic(x.shape) or not o.known(1):
        return _resized_by_factors(x, scales, offsets, nearest)
    sizes = static_sizes(x)
    places = [
        np.clip((np.arange(new) + 0.5 - offset) / scale - 0.5, 0, old - 1)
        for old, new, scale, offset in zip(sizes, o.ints(1), scales, offsets, strict=True)
    ]
    if not nearest and (resized := _resize_op(x, sizes, places)) is not None:
        return resized
    for axis, (old, at) in enumerate(zip(sizes, places, strict=True)):
        if np.array_equal(at, np.arange(old)):
            continue
        if nearest:
            x = mb.gather(x=x, indices=np.rint(at).astype(np.int32), axis=axis)
        else:
            shares = [np.interp(at, np.arange(old), one) for one in np.eye(old)]  # at 0.25 of 2: 0.75, 0.25
            matrix = np.stack(shares, -1).astype(dtype_of(x))
            x = _with_axis_last(partial(mb.matmul, y=matrix, transpose_y=True), x, axis)
    return x


def _resized_by_factors(x: Var, scales: Array, offsets: Array, nearest: bool) -> Var:
    """Resize an image of dynamic size by whole factors."""
    factors = np.rint(scales)
    at = (np.arange(4)[:, None] * factors + np.arange(1) + 0.5 - offsets) / factors - 0.5
    plain = len(scales) == 4 and np.allclose(scales, factors) and set(factors[:2]) == {1.0}
    if not plain or (np.any(np.rint(at) != np.arange(4)[:, None]) if nearest else np.any(offsets)):
        raise Unliftable("of an image whose size is not fixed MIL takes whole factors")
    how = {"scale_factor_height": int(factors[2]), "scale_factor_width": int(factors[3])}
    if nearest:
        return mb.upsample_nearest_neighbor(x=x, **how)
    return mb.upsample_bilinear(x=x, align_corners=False, **how)


def _resize_op(x: Var, sizes: list[int], places: list[Array]) -> Var | None:
    """Build MIL's resize op, where one samples at these positions; else None."""
    if len(sizes) != 4 or any(
        not np.array_equal(at, np.arange(n)) for at, n in zip(places, sizes[:2], strict=False)
    ):
        return None
    spatial = list(zip(sizes[2:], places[2:], strict=True))
    for mode, grid in GRIDS.items():
        ends = [(*grid(size, len(at)), size, at) for size, at in spatial]
        if all(np.allclose(np.clip((a + b * np.arange(len(at))) / c, 0, n - 1), at) for a, b, c, n, at in ends):
            height, width = (len(at) for _, at in spatial)
            return mb.resize_bilinear(
                x=x, target_size_height=height, target_size_width=width, sampling_mode=mode
            )
    return None


TABLE |= {
    "get_shape": lambda o: mb.shape(x=o[0]) if any_symbolic(o[0].shape) else np.array(o[0].shape, np.int32),
    "broadcast_to": lambda o: (
        _broadcast_to_known(o[0], o.ints(1)) if o.known(1) else _broadcast_to_computed(o[0], as_var(o[1]))
    ),
    "transpose": lambda o: mb.transpose(x=o[0], perm=o.ints(1)),
    "reverse": lambda o: mb.reverse(x=o[0], axes=o.axes(1)) if o.ints(1) else o[0],
    "range": lambda o: mb.range_1d(start=o[0], end=o[1], step=o[2]),
    "non_zero": lambda o: mb.non_zero(x=cast(o[0], "int32") if kind_of(o[0]) == "b" else o[0]),
    "expand_dims": lambda o: (
        mb.expand_dims(x=o[0], axes=sorted(o.axes(1, len(o.shape)))) if o.ints(1) else o[0]
    ),
    "shrink_dims": lambda o: (_before_reshape(o) or mb.squeeze(x=o[0], axes=o.axes(1))) if o.ints(1) else o[0],
}


def _as_stored(o: LiftedOp, i: int) -> Value:
    """Return an operand as it is stored, in the dtype that tells coremltools its bits."""
    value, name = o.operands[i], name_of(o.stored(i)["dtype"])
    if not isinstance(value, np.ndarray):
        if is_stored(value):
            return value
        raise Unliftable(f"operand {i} is computed; MIL decompresses constants alone")
    if bits_of(name) < 8:
        return value.view(types.nptype_from_builtin(types.string_to_builtin(name)))
    return value


@lift("blockwise_shift_scale")
def blockwise_shift_scale(o: LiftedOp) -> Value:
    """Build integers with a scale and an offset for each block."""
    if np.any(o.numbers(3)):
        raise Unliftable("it adds an offset after the scale, which MIL's form has not")
    offset = {"offset": _as_stored(o, 2)} if np.any(o.numbers(2)) else {}
    return mb.constexpr_blockwise_shift_scale(data=_as_stored(o, 0), scale=_as_stored(o, 1), **offset)


@lift("lut_to_dense")
def lut_to_dense(o: LiftedOp) -> Value:
    """Build indices into a table of numbers, or of vectors along an axis."""
    lut = _as_stored(o, 1)
    axis = {"vector_axis": o.integer(2)} if lut.shape[-1] > 1 else {}
    return mb.constexpr_lut_to_dense(indices=_as_stored(o, 0), lut=lut, **axis)


@lift("quantize", "dequantize")
def quantize(o: LiftedOp) -> Value:
    """Build a quantization to 8 bits or back, with one scale or one for each channel."""
    if np.any(o.numbers(3)):
        raise Unliftable("it shifts by a least value, which MIL's form does not")
    scale, point = o.numbers(1), o.operands[2]
    if not isinstance(point, np.ndarray):
        raise Unliftable("its zero point is computed, and MIL takes a constant there")
    per_axis = o.numbers(4).ndim == 0 and scale.ndim == 1
    how: dict[str, Any] = {"scale": scale[()], "axis": o.axes(4)[0] if per_axis else None}
    how |= {"zero_point": point[()]} if np.any(point) else {}
    how = {k: v for k, v in how.items() if v is not None}
    if o.op["kind"] == "dequantize":
        return mb.dequantize(input=as_var(o.operands[0]), **how)
    kind = o.result["dtype"]
    if kind not in ("si8", "ui8") or any_symbolic(o[0].shape):
        raise Unliftable(f"MIL quantizes to 8 bits, and this to {kind}")
    return mb.quantize(input=o[0], output_dtype="int8" if kind == "si8" else "uint8", **how)


TABLE |= {
    "constant": lambda o: o.scope.constant(o.attribute("value")),
    "build_sparse_with_bitmask": lambda o: mb.constexpr_sparse_to_dense(
        nonzero_data=o.numbers(0), mask=_as_stored(o, 1)
    ),
    "sparse_with_bitmask_to_dense": lambda o: o[0],  # it is dense where the sparse form was built
}
