"""New numbers in the compressed form that a weight has: blocks, tables and bits like those of the old ones.

For passes that compute with the values of a weight. Scales follow from the largest numbers of their blocks; the
values of a table are found by k-means. Numbers that the form does not hold are rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from anesurgery.errors import Refused
from anesurgery.files import weights
from anesurgery.interpret.ops.constexpr import DECODERS
from anesurgery.mil import Array, Operation, Var, is_compressed, operands, types
from anesurgery.regions.clusters import clustered
from anesurgery.regions.compressed_weights import Form, Part, Result, decoded, edited
from anesurgery.regions.weight_edits import Edit


def encoded(var: Var, numbers: Array, edit: Edit | None = None) -> Part:
    """Numbers in the form in which a weight is stored; as they are where it is not compressed.

    Args:
        var: the weight.
        numbers: of its shape, or of that after the edit.
        edit: says which axes of the numbers stand for which ones of the weight.

    Raises:
        Refused: that form cannot hold them, and why.
    """
    if not is_compressed(var):
        kind = _range(var)
        whole = numbers if kind is None else np.clip(np.rint(numbers), *kind)
        return whole.astype(types.nptype_from_builtin(var.dtype))
    assert var.op is not None
    if var.op.op_type not in FORMS:
        raise Refused(f"%{var.name} is stored as {var.op.op_type}, in which no numbers are encoded again")
    edit = Edit.of(tuple(int(n) for n in var.shape)) if edit is None else edit
    if np.shape(numbers) != edit.result:
        raise Refused(f"%{var.name} of shape {edit.shape} became {np.shape(numbers)}")
    form = FORMS[var.op.op_type](var.op, np.asarray(numbers, np.float64), edit)
    return Result(form, var.op.outputs.index(var))


def numbers_of(part: Part) -> Array:
    """What an encoded weight decodes to."""
    if not isinstance(part, Result):
        return part
    inputs = {k: numbers_of(v) if isinstance(v, Result) else v for k, v in part.form.inputs.items()}
    numbers = DECODERS[part.form.op_type](**inputs)
    return np.asarray(numbers[part.number] if isinstance(numbers, tuple) else numbers)


def stored_bytes(weight: Var) -> int:
    """Bytes of a weight as a package holds it: of all that a compressed one is decoded from."""
    return sum(_bytes_of(var) for var in _stored(weight))


def _stored(weight: Var) -> dict[Var, None]:
    """The constants that a weight is decoded from; one that is read twice counts once."""
    if not is_compressed(weight):
        return {weight: None}
    assert weight.op is not None
    return {var: None for _, each in operands(weight.op) for var in _stored(each)}


def _bytes_of(var: Var) -> int:
    value = np.asarray(var.val)
    if value.dtype.kind in "US":
        return 0
    bits = int(var.dtype.get_bitwidth()) if types.is_int(var.dtype) else 8 * value.itemsize
    return -(-value.size * bits // 8)


def _range(var: Var) -> tuple[int, int] | None:
    """The least and the largest number of an integer type; None for floats."""
    if not types.is_int(var.dtype):
        return None
    ends = types.type_mapping.builtin_to_range(var.dtype)
    return int(ends.low), int(ends.high)


def _cells(numbers: Array, blocks: tuple[int, ...]) -> Array:
    """[block, numbers of the block], for a number of blocks along each axis."""
    split = [n for pair in zip(blocks, numbers.shape, strict=True) for n in (pair[0], pair[1] // pair[0])]
    order = [*range(0, len(split), 2), *range(1, len(split), 2)]
    return numbers.reshape(split).transpose(order).reshape(int(np.prod(blocks)), -1)


def _joined(cells: Array, blocks: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """The numbers of which `_cells` made cells."""
    sizes = [n // b for n, b in zip(shape, blocks, strict=True)]
    order = [
        i for pair in zip(range(len(blocks)), range(len(blocks), 2 * len(blocks)), strict=True) for i in pair
    ]
    return cells.reshape([*blocks, *sizes]).transpose(order).reshape(shape)


def _quantized(
    cells: Array, kind: tuple[int, int], zeros: Array | None, dtype: Any
) -> tuple[Array, Array, Array]:
    """The numbers of each block as integers, the scale and the zero point of each.

    Zero points that were in the middle of the range, or absent, stay there.
    """
    low, high = kind
    middle = 0 if low < 0 or zeros is None else (high + 1) // 2
    if zeros is None or bool((zeros == middle).all()):
        span = min(high - middle, middle - low) or high - middle
        if middle == low and bool((cells < 0).any()):
            raise Refused("its form holds no negative numbers")
        scale = _positive(np.abs(cells).max(axis=1) / span, dtype)
        zero = np.full(len(cells), middle)
    else:
        least, most = np.minimum(cells.min(axis=1), 0), np.maximum(cells.max(axis=1), 0)
        scale = _positive((most - least) / (high - low), dtype)
        zero = np.clip(np.rint(low - least / scale.astype(np.float64)), low, high)
    wide = scale.astype(np.float64)[:, None]
    return np.clip(np.rint(cells / wide + zero[:, None]), low, high), scale, zero


def _stretched(
    cells: Array, old: tuple[Array, Array, Array], new: tuple[Array, Array, Array]
) -> tuple[Array, Array, Array]:
    """Of each block the old integers with another scale, where they come nearer than the new ones."""
    held, scale, zero = (np.asarray(v, np.float64) for v in old)
    before = (held - zero[:, None]) * scale[:, None]
    norms = (before**2).sum(axis=1)
    ratio = np.where(norms > 0, (cells * before).sum(axis=1) / np.where(norms > 0, norms, 1), 1)
    kept = (held, _positive(scale * ratio, new[1].dtype), zero)
    errors = [_error(cells, *pair) for pair in (kept, new)]
    better = (errors[0] <= errors[1]) & (ratio > 0)
    chosen = [np.where(better[:, None] if a.ndim > 1 else better, a, b) for a, b in zip(kept, new, strict=True)]
    return chosen[0], chosen[1].astype(new[1].dtype), chosen[2]


def _or_kept(
    cells: Array, kind: tuple[int, int], scale: Array, zero: Array, new: tuple[Array, Array, Array]
) -> tuple[Array, Array, Array]:
    """The numbers of each block with the scale and zero point that it had, where they come as near."""
    wide = scale.astype(np.float64)[:, None]
    held = np.clip(np.rint(cells / wide + zero[:, None]), *kind), scale, zero
    better = _error(cells, *held) <= _error(cells, *new)
    chosen = [np.where(better[:, None] if a.ndim > 1 else better, a, b) for a, b in zip(held, new, strict=True)]
    return chosen[0], chosen[1].astype(new[1].dtype), chosen[2]


def _error(cells: Array, data: Array, scale: Array, zero: Array) -> Array:
    """The squared error of each block."""
    reached = (data.astype(np.float64) - zero[:, None]) * scale.astype(np.float64)[:, None]
    return ((cells - reached) ** 2).sum(axis=1)


def _positive(scale: Array, dtype: Any) -> Array:
    """Scales of a type, none of which is 0."""
    positive = np.where(scale > 0, scale, 1).astype(dtype)
    positive[positive == 0] = np.finfo(dtype).smallest_subnormal
    if not np.isfinite(positive).all():
        raise Refused(f"a scale of {scale.max():.3g} is beyond {np.dtype(dtype)}")
    return positive


def _affine(op: Operation, numbers: Array, edit: Edit) -> Form:
    """IOS 16: one scale and zero point for all, or for each place along an axis."""
    zeros, scales = np.asarray(op.zero_point.val), np.asarray(op.scale.val)
    kind, axis = _range(op.quantized_data), int(op.axis.val) % len(edit.shape)
    at = next(i for i, new in enumerate(edit.axes) if axis in new.sources)
    blocks = tuple(n if scales.ndim and i == at else 1 for i, n in enumerate(edit.result))
    assert kind is not None
    cells = _cells(numbers, blocks)
    data, scale, zero = _quantized(cells, kind, zeros, scales.dtype)
    if edit.keeps:
        held = _cells(np.asarray(op.quantized_data.val), blocks)
        old = (held, np.broadcast_to(scales, scale.shape), np.broadcast_to(zeros, zero.shape))
        data, scale, zero = _stretched(cells, old, (data, scale, zero))
    elif edit.axes[at].sources == (axis,) and not edit.pads:
        each = [v[edit.axes[at].index] if v.ndim else v for v in (scales, zeros)]
        before, old_zero = (np.broadcast_to(v, scale.shape) for v in each)
        data, scale, zero = _or_kept(cells, kind, before, old_zero, (data, scale, zero))
    stored_type = np.asarray(op.quantized_data.val).dtype
    shape = (-1,) if scales.ndim else ()
    return Form(
        op.op_type,
        {
            "quantized_data": _joined(data, blocks, edit.result).astype(stored_type),
            "zero_point": zero.astype(zeros.dtype).reshape(shape),
            "scale": scale.reshape(shape),
            "axis": np.int32(at),
        },
    )


def _blockwise(op: Operation, numbers: Array, edit: Edit) -> Form:
    """A scale, and perhaps an offset, for each block."""
    if is_compressed(op.data):
        return _scaled(op, numbers, edit)
    data, parts = _in_blocks(op, op.data, numbers, edit)
    return Form(op.op_type, {"data": data, **parts})


def _in_blocks(op: Operation, data: Var, numbers: Array, edit: Edit) -> tuple[Array, dict[str, Part]]:
    """Numbers as integers, with the scales and offsets of their blocks."""
    kind, offset = _range(data), op.inputs.get("offset")
    if kind is None or is_compressed(op.scale) or (offset is not None and is_compressed(offset)):
        raise Refused(f"the numbers of %{op.outputs[0].name} are no integers with plain scales")
    blocks, scales = edit.of_blocks(op.scale.shape).result, np.asarray(op.scale.val)
    zeros, wanted = None if offset is None else np.asarray(offset.val), _cells(numbers, blocks)
    cells, scale, zero = _quantized(wanted, kind, zeros, scales.dtype)
    if edit.keeps and np.size(data.val) == numbers.size:  # and no sparse one
        old = np.zeros_like(zero) if zeros is None else zeros.ravel()
        whole = _cells(np.asarray(data.val).astype(np.float64), blocks)
        cells, scale, zero = _stretched(wanted, (whole, scales.ravel(), old), (cells, scale, zero))
    elif not (by_block := edit.of_blocks(op.scale.shape)).pads:
        before = by_block.apply(scales).ravel()
        old = np.zeros(len(before)) if zeros is None else by_block.apply(zeros).ravel()
        cells, scale, zero = _or_kept(wanted, kind, before, old, (cells, scale, zero))
    parts: dict[str, Part] = {"scale": scale.reshape(blocks)}
    if zeros is not None:
        parts["offset"] = zero.reshape(blocks).astype(zeros.dtype).view(zeros.dtype)
    held = np.asarray(data.val).dtype
    return _joined(cells, blocks, edit.result).astype(held).view(held), parts


def _scaled(op: Operation, numbers: Array, edit: Edit) -> Form:
    """Scales over another form: they grow as the largest number of their block does."""
    blocks = edit.of_blocks(op.scale.shape)
    if edit.pads or is_compressed(op.scale):
        raise Refused(
            f"the scales of %{op.outputs[0].name} stand over another form, which is not encoded again"
        )
    old = edit.apply(np.asarray(decoded(op.outputs[0]), np.float64))
    before, after = (np.abs(_cells(v, blocks.result)).max(axis=1) for v in (old, numbers))
    grown = np.where((before > 0) & (after > 0), after / np.where(before > 0, before, 1), 1)
    scales = np.asarray(op.scale.val)
    scale = blocks.apply(scales).astype(np.float64) * grown.reshape(blocks.result)
    parts: dict[str, Part] = {"scale": scale.astype(scales.dtype)}
    inner = numbers / _spread(parts["scale"], edit.result)
    if (offset := op.inputs.get("offset")) is not None:
        parts["offset"] = edited(offset, blocks)
        inner = inner + _spread(numbers_of(parts["offset"]), edit.result)
    return Form(op.op_type, {"data": encoded(op.data, inner, edit), **parts})


def _spread(values: Any, shape: tuple[int, ...]) -> Array:
    """Values of blocks, one for each element."""
    spread = np.asarray(values, np.float64)
    for axis, n in enumerate(shape):
        spread = np.repeat(spread, n // spread.shape[axis], axis)
    return spread


def _palette(op: Operation, numbers: Array, edit: Edit) -> Form:
    """Indices into tables, one for each block."""
    if op.inputs.get("shape") is not None:
        return _packed_palette(op, numbers, edit)
    indices, tables, vector = _looked_up(op, op.indices, numbers, edit, np.ones(numbers.shape, bool))
    return Form(op.op_type, {"indices": indices, "lut": tables, **vector})


def _packed_palette(op: Operation, numbers: Array, edit: Edit) -> Form:
    """IOS 16: one table for all, the indices packed."""
    table = np.asarray(op.lut.val)
    bits = int(table.size).bit_length() - 1
    tables, (places,) = clustered([numbers.reshape(-1, 1)], int(table.size))
    lut = tables.reshape(-1).astype(table.dtype)
    shape = np.array(edit.result, np.uint32)
    return Form(
        op.op_type, {"indices": weights.pack(places.astype(np.uint8), bits), "lut": lut, "shape": shape}
    )


def _looked_up(
    op: Operation, indices: Var, numbers: Array, edit: Edit, mask: Array
) -> tuple[Array, Part, dict[str, Any]]:
    """The index of each number, or vector of numbers, where a mask is set; the tables; the axis of vectors."""
    entries, width = (int(n) for n in op.lut.shape[-2:])
    vector_axis = op.inputs.get("vector_axis")
    axis = (
        next((i for i, a in enumerate(edit.axes) if _at(vector_axis, edit) in a.sources), 0) if width > 1 else 0
    )
    blocks = edit.of_blocks(op.lut.shape[:-2]).result
    shape = tuple(n // width if i == axis else n for i, n in enumerate(edit.result))
    if edit.result[axis] % width or any(n % b for n, b in zip(shape, blocks, strict=True)):
        raise Refused(f"{edit.result} is no multiple of the vectors and tables of %{op.outputs[0].name}")
    sides = [_cells(part, blocks) for part in _lanes(numbers, axis, width)]
    masks = _cells(np.any([*_lanes(mask, axis, width)], axis=0), blocks)
    rows = [np.stack([s[i][masks[i]] for s in sides], axis=1) for i in range(len(masks))]
    tables, _ = clustered(rows, entries)
    lut = encoded(op.lut, tables.reshape(*blocks, entries, width))
    held = np.asarray(numbers_of(lut), np.float64).reshape(-1, entries, width)
    _, places = clustered(rows, entries, held)
    cells = np.zeros(masks.shape, np.uint8)
    for at, some in enumerate(places):
        cells[at][masks[at]] = some
    packed = _joined(cells, blocks, shape).view(np.asarray(indices.val).dtype)
    return packed, lut, {} if vector_axis is None else {"vector_axis": np.int32(axis)}


def _at(axis: Var | None, edit: Edit) -> int:
    return 0 if axis is None else int(axis.val) % len(edit.shape)


def _lanes(values: Array, axis: int, width: int) -> list[Array]:
    """The first number of each vector, the second of each, and so on."""
    return [values.take(range(i, values.shape[axis], width), axis) for i in range(width)]


def _sparse(op: Operation, numbers: Array, edit: Edit) -> Form:
    """Numbers where they are not 0."""
    inner = op.nonzero_data
    if is_compressed(inner):
        if not is_compressed(op.mask) or inner.op.op_type not in MASKED:
            raise Refused(f"the numbers of %{op.outputs[0].name} are compressed apart from their mask")
        encoded = MASKED[inner.op.op_type](inner.op, numbers, edit)
        return Form(op.op_type, {"nonzero_data": Result(encoded, 1), "mask": Result(encoded, 0)})
    data = numbers.astype(np.asarray(inner.val).dtype)
    mask, data = data != 0, data[data != 0]
    if op.inputs.get("shape") is None:
        return Form(
            op.op_type, {"nonzero_data": data, "mask": mask.astype(np.uint8).view(types.np_uint1_dtype)}
        )
    shape = np.array(edit.result, np.uint32)
    packed = weights.pack(mask.astype(np.uint8), 1)
    return Form(op.op_type, {"nonzero_data": data, "mask": packed, "shape": shape})


def _sparse_palette(op: Operation, numbers: Array, edit: Edit) -> Form:
    """Indices of a palette where a mask is set."""
    width, vector_axis = int(op.lut.shape[-1]), op.inputs.get("vector_axis")
    indices, tables, vector = _looked_up(op, op.indices_nonzero_data, numbers, edit, numbers != 0)
    axis = int(vector.get("vector_axis", 0))
    mask = (
        np.any(_lanes(numbers != 0, axis, width), axis=0)
        if vector_axis is not None and width > 1
        else numbers != 0
    )
    parts = {"indices_mask": mask.astype(np.uint8).view(types.np_uint1_dtype)}
    held = np.asarray(op.indices_nonzero_data.val).dtype
    return Form(
        op.op_type, {**parts, "indices_nonzero_data": indices[mask].view(held), "lut": tables, **vector}
    )


def _sparse_blockwise(op: Operation, numbers: Array, edit: Edit) -> Form:
    """Quantized numbers where a mask is set."""
    if is_compressed(op.nonzero_data):
        raise Refused(f"the quantized numbers of %{op.outputs[0].name} are compressed once more")
    mask = numbers != 0
    data, parts = _in_blocks(op, op.nonzero_data, numbers, edit)
    flags = mask.astype(np.uint8).view(types.np_uint1_dtype)
    return Form(op.op_type, {"data_mask": flags, "nonzero_data": data[mask].view(data.dtype), **parts})


FORMS: dict[str, Callable[[Operation, Array, Edit], Form]] = {
    "constexpr_affine_dequantize": _affine,
    "constexpr_blockwise_shift_scale": _blockwise,
    "constexpr_lut_to_dense": _palette,
    "constexpr_sparse_to_dense": _sparse,
}
"""Op type -> what encodes numbers in its form."""

MASKED: dict[str, Callable[[Operation, Array, Edit], Form]] = {
    "constexpr_lut_to_sparse": _sparse_palette,
    "constexpr_sparse_blockwise_shift_scale": _sparse_blockwise,
}
"""The same for ops that make a mask and the numbers where it is set."""
