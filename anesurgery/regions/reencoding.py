"""Encode new numbers in the compressed form of a weight, with blocks, tables and bits like the old ones.

Passes that compute with the values of a weight call `encoded`. Scales follow from the largest numbers of their
blocks, tables are found by k-means (`clusters`). Numbers that the form does not hold are rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from anesurgery.errors import Refused
from anesurgery.files import sub_byte
from anesurgery.interpret.ops.constexpr import DECODERS
from anesurgery.mil import Array, Operation, Var, is_compressed, operands, types
from anesurgery.regions.clusters import nearest, tables_of
from anesurgery.regions.compressed_weights import Form, Part, Result, decoded, edited
from anesurgery.regions.weight_edits import Edit


def encoded(var: Var, numbers: Array, edit: Edit | None = None) -> Part:
    """Return numbers in the form in which a weight is stored; plain numbers where it is not compressed.

    Args:
        var: the weight.
        numbers: the new numbers, in the shape of the weight, or of the weight after the edit.
        edit: which axes of the numbers correspond to which axes of the weight; None: the same ones.

    Raises:
        Refused: that form cannot hold them; the message says why.
    """
    if not is_compressed(var):
        integer_range = _integer_range(var)
        rounded = numbers if integer_range is None else np.clip(np.rint(numbers), *integer_range)
        return _cast(rounded, types.nptype_from_builtin(var.dtype))
    assert var.op is not None
    if var.op.op_type not in FORMS:
        raise Refused(f"%{var.name} is stored as {var.op.op_type}, in which no numbers are encoded again")
    edit = Edit.of(tuple(int(n) for n in var.shape)) if edit is None else edit
    if np.shape(numbers) != edit.result:
        raise Refused(f"%{var.name} of shape {edit.shape} became {np.shape(numbers)}")
    form = FORMS[var.op.op_type](var.op, np.asarray(numbers, np.float64), edit)
    return Result(form, var.op.outputs.index(var))


def _cast(numbers: Array, dtype: Any) -> Array:
    """Return numbers in a dtype.

    Raises:
        Refused: a finite number would be infinite.
    """
    with np.errstate(over="ignore"):
        cast = np.asarray(numbers.astype(dtype))
    if not np.isfinite(cast[np.isfinite(numbers)]).all():
        raise Refused(f"a number of {np.abs(numbers[np.isinf(cast)]).max():.3g} is beyond {np.dtype(dtype)}")
    return cast


def numbers_of(part: Part) -> Array:
    """Return what an encoded weight decodes to."""
    if not isinstance(part, Result):
        return part
    inputs = {k: numbers_of(v) if isinstance(v, Result) else v for k, v in part.form.inputs.items()}
    numbers = DECODERS[part.form.op_type](**inputs)
    return np.asarray(numbers[part.number] if isinstance(numbers, tuple) else numbers)


def stored_bytes(weight: Var) -> int:
    """Return the bytes of a weight in a package: of everything that a compressed one is decoded from."""
    return sum(_bytes_of(var) for var in _stored_constants(weight))


def _stored_constants(weight: Var) -> dict[Var, None]:
    """Return the constants that a weight is decoded from, each once."""
    if not is_compressed(weight):
        return {weight: None}
    assert weight.op is not None
    return {var: None for _, operand in operands(weight.op) for var in _stored_constants(operand)}


def _bytes_of(var: Var) -> int:
    value = np.asarray(var.val)
    if value.dtype.kind in "US":
        return 0
    bits = int(var.dtype.get_bitwidth()) if types.is_int(var.dtype) else 8 * value.itemsize
    return -(-value.size * bits // 8)


def _integer_range(var: Var) -> tuple[int, int] | None:
    """Return the least and largest number of an integer type; None for floats."""
    if not types.is_int(var.dtype):
        return None
    ends = types.type_mapping.builtin_to_range(var.dtype)
    return int(ends.low), int(ends.high)


def _split_into_blocks(numbers: Array, blocks: tuple[int, ...]) -> Array:
    """Return [blocks, elements of a block], given the number of blocks along each axis.

    Numbers (4, 6) in (2, 3) blocks are split as (2, 2, 3, 2), ordered as (2, 3, 2, 2), and become (6, 4).
    """
    split = [n for pair in zip(blocks, numbers.shape, strict=True) for n in (pair[0], pair[1] // pair[0])]
    order = [*range(0, len(split), 2), *range(1, len(split), 2)]
    return numbers.reshape(split).transpose(order).reshape(int(np.prod(blocks)), -1)


def _join_blocks(cells: Array, blocks: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """Undo `_split_into_blocks`: return the numbers in their shape."""
    sizes = [n // b for n, b in zip(shape, blocks, strict=True)]
    order = [
        i for pair in zip(range(len(blocks)), range(len(blocks), 2 * len(blocks)), strict=True) for i in pair
    ]
    return cells.reshape([*blocks, *sizes]).transpose(order).reshape(shape)


@dataclass(frozen=True)
class _Quantized:
    """Blocks of numbers as integers: a number is (integer - zero point) * scale of its block."""

    integers: Array
    """[blocks, elements]."""
    scale: Array
    """[blocks], in the type that is stored."""
    zero: Array
    """[blocks]: the zero points."""

    @classmethod
    def of(cls, cells: Array, integer_range: tuple[int, int], scale: Array, zero: Array) -> _Quantized:
        """Round numbers [blocks, elements] with given scales and zero points."""
        steps = cells / scale.astype(np.float64)[:, None]
        return cls(np.clip(np.rint(steps + zero[:, None]), *integer_range), scale, zero)

    @property
    def numbers(self) -> Array:
        """The numbers [blocks, elements] that the integers stand for."""
        return (self.integers.astype(np.float64) - self.zero[:, None]) * self.scale.astype(np.float64)[:, None]

    def errors(self, cells: Array) -> Array:
        """Return the squared error of each block."""
        return ((cells - self.numbers) ** 2).sum(axis=1)

    def or_nearer(self, other: _Quantized, cells: Array, allowed: Array | bool = True) -> _Quantized:
        """Return this form of each block where it is allowed and as near as another one, else the other one."""
        taken = (self.errors(cells) <= other.errors(cells)) & allowed
        return _Quantized(
            np.where(taken[:, None], self.integers, other.integers),
            np.where(taken, self.scale, other.scale).astype(other.scale.dtype),
            np.where(taken, self.zero, other.zero),
        )


def _quantized(cells: Array, integer_range: tuple[int, int], zeros: Array | None, dtype: Any) -> _Quantized:
    """Return numbers [blocks, elements] as integers, with new scales and zero points.

    Zero points that were in the middle of the range, or absent, stay there.
    """
    low, high = integer_range
    middle = 0 if low < 0 or zeros is None else (high + 1) // 2
    if zeros is None or bool((zeros == middle).all()):
        span = min(high - middle, middle - low) or high - middle
        if middle == low and bool((cells < 0).any()):
            raise Refused("its form holds no negative numbers")
        scale = _positive_scales(np.abs(cells).max(axis=1) / span, dtype)
        zero = np.full(len(cells), middle)
    else:
        least, most = np.minimum(cells.min(axis=1), 0), np.maximum(cells.max(axis=1), 0)
        scale = _positive_scales((most - least) / (high - low), dtype)
        zero = np.clip(np.rint(low - least / scale.astype(np.float64)), low, high)
    return _Quantized.of(cells, integer_range, scale, zero)


def _rescaled_or_new(cells: Array, old: _Quantized, new: _Quantized) -> _Quantized:
    """Return the old integers of a block with the best new scale, wherever that is as near as new integers."""
    before = old.numbers
    norms = (before**2).sum(axis=1)
    ratio = np.where(norms > 0, (cells * before).sum(axis=1) / np.where(norms > 0, norms, 1), 1)
    scale = _positive_scales(old.scale.astype(np.float64) * ratio, new.scale.dtype)
    return replace(old, scale=scale).or_nearer(new, cells, allowed=ratio > 0)


def _positive_scales(scale: Array, dtype: Any) -> Array:
    """Return scales in a dtype, none of which is 0."""
    positive = np.where(scale > 0, scale, 1).astype(dtype)
    positive[positive == 0] = np.finfo(dtype).smallest_subnormal
    if not np.isfinite(positive).all():
        raise Refused(f"a scale of {scale.max():.3g} is beyond {np.dtype(dtype)}")
    return positive


def _affine(op: Operation, numbers: Array, edit: Edit) -> Form:
    """Encode the iOS 16 form: one scale and zero point for all, or one for each index along an axis."""
    zeros, scales = np.asarray(op.zero_point.val), np.asarray(op.scale.val)
    integer_range, axis = _integer_range(op.quantized_data), int(op.axis.val) % len(edit.shape)
    at = _new_axis(edit, axis)
    blocks = tuple(n if scales.ndim and i == at else 1 for i, n in enumerate(edit.result))
    assert integer_range is not None
    cells = _split_into_blocks(numbers, blocks)
    new = _quantized(cells, integer_range, zeros, scales.dtype)
    if edit.keeps:
        old_integers = _split_into_blocks(np.asarray(op.quantized_data.val), blocks)
        old_scale, old_zero = (np.broadcast_to(v, new.scale.shape) for v in (scales, zeros))
        new = _rescaled_or_new(cells, _Quantized(old_integers, old_scale, old_zero), new)
    elif edit.axes[at].sources == (axis,) and not edit.pads:
        old_parts = [v[edit.axes[at].index] if v.ndim else v for v in (scales, zeros)]
        old_scale, old_zero = (np.broadcast_to(v, new.scale.shape) for v in old_parts)
        new = _Quantized.of(cells, integer_range, old_scale, old_zero).or_nearer(new, cells)
    stored_type = np.asarray(op.quantized_data.val).dtype
    shape = (-1,) if scales.ndim else ()
    return Form(
        op.op_type,
        {
            "quantized_data": _join_blocks(new.integers, blocks, edit.result).astype(stored_type),
            "zero_point": new.zero.astype(zeros.dtype).reshape(shape),
            "scale": new.scale.reshape(shape),
            "axis": np.int32(at),
        },
    )


def _blockwise(op: Operation, numbers: Array, edit: Edit) -> Form:
    """Encode with a scale, and perhaps an offset, for each block."""
    if is_compressed(op.data):
        return _scales_over_form(op, numbers, edit)
    data, parts = _quantized_blocks(op, op.data, numbers, edit)
    return Form(op.op_type, {"data": data, **parts})


def _quantized_blocks(op: Operation, data: Var, numbers: Array, edit: Edit) -> tuple[Array, dict[str, Part]]:
    """Return numbers as integers, with the scales and offsets of their blocks as inputs."""
    integer_range, offset = _integer_range(data), op.inputs.get("offset")
    if integer_range is None or is_compressed(op.scale) or (offset is not None and is_compressed(offset)):
        raise Refused(f"the numbers of %{op.outputs[0].name} are no integers with plain scales")
    by_block, scales = edit.of_blocks(op.scale.shape), np.asarray(op.scale.val)
    blocks, zeros = by_block.result, None if offset is None else np.asarray(offset.val)
    cells = _split_into_blocks(numbers, blocks)
    new = _quantized(cells, integer_range, zeros, scales.dtype)
    if edit.keeps and np.shape(data.val) == numbers.shape:  # a sparse form has integers in a row
        old_zero = np.zeros_like(new.zero) if zeros is None else zeros.ravel().astype(np.float64)
        old_integers = _split_into_blocks(np.asarray(data.val).astype(np.float64), blocks)
        new = _rescaled_or_new(cells, _Quantized(old_integers, scales.ravel(), old_zero), new)
    elif not by_block.pads:
        old_scale = by_block.apply(scales).ravel()
        old_zero = np.zeros(len(old_scale)) if zeros is None else by_block.apply(zeros).ravel()
        new = _Quantized.of(cells, integer_range, old_scale, old_zero).or_nearer(new, cells)
    parts: dict[str, Part] = {"scale": new.scale.reshape(blocks)}
    if zeros is not None:
        parts["offset"] = as_stored(new.zero.reshape(blocks), zeros.dtype)
    return as_stored(_join_blocks(new.integers, blocks, edit.result), np.asarray(data.val).dtype), parts


def as_stored(values: Array, dtype: Any) -> Array:
    """Return values in the dtype of a constant; the view keeps that one of four bits differs from int8."""
    return values.astype(dtype).view(dtype)


def _new_axis(edit: Edit, axis: int) -> int:
    """Return the axis after an edit of which an old one is a part."""
    return next(i for i, new in enumerate(edit.axes) if axis in new.sources)


def _scales_over_form(op: Operation, numbers: Array, edit: Edit) -> Form:
    """Encode scales over another form: a scale grows as the largest number of its block does."""
    blocks = edit.of_blocks(op.scale.shape)
    if edit.pads or is_compressed(op.scale):
        raise Refused(
            f"the scales of %{op.outputs[0].name} stand over another form, which is not encoded again"
        )
    old = edit.apply(np.asarray(decoded(op.outputs[0]), np.float64))
    before, after = (np.abs(_split_into_blocks(v, blocks.result)).max(axis=1) for v in (old, numbers))
    # of each block of the result, how many times larger its largest number is
    growth = np.where((before > 0) & (after > 0), after / np.where(before > 0, before, 1), 1)
    scales = np.asarray(op.scale.val)
    scale = blocks.apply(scales).astype(np.float64) * growth.reshape(blocks.result)
    parts: dict[str, Part] = {"scale": _cast(scale, scales.dtype)}
    inner = numbers / _repeated_over_blocks(parts["scale"], edit.result)
    if (offset := op.inputs.get("offset")) is not None:  # number = (inner - offset) * scale
        parts["offset"] = edited(offset, blocks)
        inner = inner + _repeated_over_blocks(numbers_of(parts["offset"]), edit.result)
    return Form(op.op_type, {"data": encoded(op.data, inner, edit), **parts})


def _repeated_over_blocks(values: Any, shape: tuple[int, ...]) -> Array:
    """Repeat the values of blocks for each of their elements."""
    spread = np.asarray(values, np.float64)
    for axis, n in enumerate(shape):
        spread = np.repeat(spread, n // spread.shape[axis], axis)
    return spread


def _palette(op: Operation, numbers: Array, edit: Edit) -> Form:
    """Encode as indices into tables, one table for each block."""
    if op.inputs.get("shape") is not None:
        return _packed_palette(op, numbers, edit)
    indices, _, parts = _find_tables(op, op.indices, numbers, edit, np.ones(numbers.shape, bool))
    return Form(op.op_type, {"indices": indices, **parts})


def _packed_palette(op: Operation, numbers: Array, edit: Edit) -> Form:
    """Encode the iOS 16 form: one table for all, and packed indices."""
    table, rows = np.asarray(op.lut.val), numbers.reshape(-1, 1)
    (entries,) = tables_of([rows], int(table.size))
    indices = sub_byte.pack(nearest(rows, entries).astype(np.uint8), int(table.size).bit_length() - 1)
    lut, shape = _cast(entries[:, 0], table.dtype), np.array(edit.result, np.uint32)
    return Form(op.op_type, {"indices": indices, "lut": lut, "shape": shape})


def _find_tables(
    op: Operation, indices: Var, numbers: Array, edit: Edit, mask: Array
) -> tuple[Array, Array, dict[str, Part]]:
    """Return the index of each number (or vector), whether the mask sets it, and the tables with their axis."""
    entries, width = (int(n) for n in op.lut.shape[-2:])
    vector_axis = op.inputs.get("vector_axis")
    axis = 0 if vector_axis is None else _new_axis(edit, int(vector_axis.val) % len(edit.shape))
    blocks = edit.of_blocks(op.lut.shape[:-2]).result
    shape = tuple(n // width if i == axis else n for i, n in enumerate(edit.result))
    if edit.result[axis] % width or any(n % b for n, b in zip(shape, blocks, strict=True)):
        raise Refused(f"{edit.result} is no multiple of the vectors and tables of %{op.outputs[0].name}")
    sides = [_split_into_blocks(part, blocks) for part in _vector_components(numbers, axis, width)]
    is_set = np.asarray(np.any(_vector_components(mask, axis, width), axis=0))
    masks = _split_into_blocks(is_set, blocks)
    rows = [np.stack([s[i][masks[i]] for s in sides], axis=1) for i in range(len(masks))]
    lut = encoded(op.lut, tables_of(rows, entries).reshape(*blocks, entries, width))
    table_values = np.asarray(numbers_of(lut), np.float64).reshape(-1, entries, width)
    cells = np.zeros(masks.shape, np.uint8)
    for group, table in enumerate(table_values):
        cells[group][masks[group]] = nearest(rows[group], table)
    parts: dict[str, Any] = {"lut": lut} | ({} if vector_axis is None else {"vector_axis": np.int32(axis)})
    return as_stored(_join_blocks(cells, blocks, shape), np.asarray(indices.val).dtype), is_set, parts


def _vector_components(values: Array, axis: int, width: int) -> list[Array]:
    """Return the first number of each vector, the second of each, and so on."""
    return [values.take(range(i, values.shape[axis], width), axis) for i in range(width)]


def _sparse(op: Operation, numbers: Array, edit: Edit) -> Form:
    """Encode numbers with a mask of those that are not 0."""
    inner = op.nonzero_data
    if is_compressed(inner):
        if not is_compressed(op.mask) or inner.op.op_type not in MASKED:
            raise Refused(f"the numbers of %{op.outputs[0].name} are compressed apart from their mask")
        inner_form = MASKED[inner.op.op_type](inner.op, numbers, edit)
        return Form(op.op_type, {"nonzero_data": Result(inner_form, 1), "mask": Result(inner_form, 0)})
    data = _cast(numbers, np.asarray(inner.val).dtype)
    mask, data = data != 0, data[data != 0]
    return sparse_form(data, mask, packed=op.inputs.get("shape") is not None)


def sparse_form(data: Array, mask: Array, *, packed: bool) -> Form:
    """Return the op that puts numbers where a mask is set; before iOS 18 its mask is packed into bytes."""
    inputs: dict[str, Part] = {"nonzero_data": data, "mask": as_stored(mask, types.np_uint1_dtype)}
    if packed:
        bits = sub_byte.pack(mask.astype(np.uint8), 1)
        inputs |= {"mask": bits, "shape": np.array(mask.shape, np.uint32)}
    return Form("constexpr_sparse_to_dense", inputs)


def _sparse_palette(op: Operation, numbers: Array, edit: Edit) -> Form:
    """Encode indices of a palette with a mask."""
    indices, mask, parts = _find_tables(op, op.indices_nonzero_data, numbers, edit, numbers != 0)
    flags, kept = as_stored(mask, types.np_uint1_dtype), as_stored(indices[mask], indices.dtype)
    return Form(op.op_type, {"indices_mask": flags, "indices_nonzero_data": kept, **parts})


def _sparse_blockwise(op: Operation, numbers: Array, edit: Edit) -> Form:
    """Encode quantized numbers with a mask."""
    if is_compressed(op.nonzero_data):
        raise Refused(f"the quantized numbers of %{op.outputs[0].name} are compressed once more")
    mask = numbers != 0
    data, parts = _quantized_blocks(op, op.nonzero_data, numbers, edit)
    flags, kept = as_stored(mask, types.np_uint1_dtype), as_stored(data[mask], data.dtype)
    return Form(op.op_type, {"data_mask": flags, "nonzero_data": kept, **parts})


FORMS: dict[str, Callable[[Operation, Array, Edit], Form]] = {
    "constexpr_affine_dequantize": _affine,
    "constexpr_blockwise_shift_scale": _blockwise,
    "constexpr_lut_to_dense": _palette,
    "constexpr_sparse_to_dense": _sparse,
}
"""Op type -> the function that encodes numbers in its form."""

MASKED: dict[str, Callable[[Operation, Array, Edit], Form]] = {
    "constexpr_lut_to_sparse": _sparse_palette,
    "constexpr_sparse_blockwise_shift_scale": _sparse_blockwise,
}
"""The same for ops that give a mask and the numbers where it is set."""
