"""Decompress weights (`constexpr_*` ops), and quantize activations to 8-bit integers and back.

`core.Plan` calls `decompress` before a run; it computes in numpy. Forms may be chained: the table of a palette
may be quantized, and its indices sparse. A form with a mask and data as outputs returns both. Quantized
activations run as int32, within the range of their dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from anesurgery.errors import InterpretError
from anesurgery.interpret.table import impl
from anesurgery.mil import Array, Operation, Var

Decoder = Callable[..., Any]
"""Decodes the inputs of a `constexpr_*` op, given by name."""
DTYPES = {"fp16": np.float16, "fp32": np.float32}


def decompress(op: Operation, values: Mapping[Var, Array]) -> list[Array]:
    """Return the values of the outputs of a `constexpr_*` op.

    Args:
        op: the op.
        values: outputs of the `constexpr_*` ops before it.

    Raises:
        InterpretError: the form is not known, or its parts do not fit together.
    """
    if op.op_type not in DECODERS:
        raise InterpretError(f"op {op.name}: {op.op_type} is not known; DECODERS holds the forms that are")
    parts = {k: values.get(v, v.val) for k, v in op.inputs.items() if isinstance(v, Var)}
    try:
        decoded = DECODERS[op.op_type](**parts)
    except (ValueError, IndexError, TypeError) as error:
        shapes = ", ".join(f"{k} {np.shape(v)}" for k, v in parts.items())
        raise InterpretError(
            f"op {op.name}: {op.op_type} cannot be decompressed: {error} ({shapes})"
        ) from error
    return list(decoded) if isinstance(decoded, tuple) else [np.asarray(decoded)]


def _repeat_blocks(values: Array, shape: tuple[int, ...]) -> Array:
    """Repeat the values of blocks, so that there is one for each element of a shape (or 1, to broadcast)."""
    for axis, n in enumerate(shape):
        if values.shape[axis] not in (1, n):
            values = np.repeat(values, n // values.shape[axis], axis)
    return values


def shift_scale(data: Array, scale: Array, offset: Array | None = None) -> Array:
    """Return `scale * (data - offset)`, with a scale and an offset for each block of the data."""
    shifted = np.asarray(data).astype(scale.dtype)
    if offset is not None:
        shifted = shifted - _repeat_blocks(np.asarray(offset), shifted.shape).astype(scale.dtype)
    return shifted * _repeat_blocks(scale, shifted.shape)


def affine(quantized_data: Array, zero_point: Array, scale: Array, axis: int) -> Array:
    """Return `scale * (data - zero_point)`; each is one number, or one for each index along `axis`."""
    across = [-1 if a == int(axis) % np.ndim(quantized_data) else 1 for a in range(np.ndim(quantized_data))]
    scale, zero = (np.reshape(v, across) if np.ndim(v) else np.asarray(v) for v in (scale, zero_point))
    return scale * (np.asarray(quantized_data).astype(scale.dtype) - zero.astype(scale.dtype))


def lut_to_dense(indices: Array, lut: Array, vector_axis: Any = None, shape: Array | None = None) -> Array:
    """Look each index up in the table of its group.

    Args:
        indices: [d0, d1, ...]; with `shape`, the bits of the indices packed into bytes.
        lut: [g0, g1, ..., entries, width], one table for each block of d0/g0 x d1/g1 x ... indices; with
            `shape`, [entries].
        vector_axis: the axis along which the `width` numbers of an entry lie side by side.
        shape: of the result, in the form of iOS 16.
    """
    if shape is not None:
        return lut[_unpacked(indices, int(lut.size).bit_length() - 1, int(np.prod(shape)))].reshape(shape)
    entries, width = lut.shape[-2:]
    places = np.asarray(indices).astype(np.intp)
    stride = entries
    for axis in reversed(range(places.ndim)):
        groups = lut.shape[axis]
        if groups > 1:
            step = np.arange(places.shape[axis]) // (places.shape[axis] // groups) * stride
            places = places + step.reshape([-1 if a == axis else 1 for a in range(places.ndim)])
        stride *= groups
    rows = lut.reshape(-1, width)[places]
    if width == 1:
        return rows[..., 0]
    axis = int(vector_axis) % places.ndim
    size = [n * width if a == axis else n for a, n in enumerate(places.shape)]
    return np.moveaxis(rows, -1, axis + 1).reshape(size)


def _unpacked(packed: Array, bits: int, count: int) -> Array:
    """Return numbers of a few bits each from bytes, the least significant bit first."""
    flags = np.unpackbits(np.asarray(packed, np.uint8), bitorder="little")[: bits * count]
    return np.packbits(flags.reshape(count, bits), axis=1, bitorder="little")[:, 0]


def sparse_to_dense(nonzero_data: Array, mask: Array, shape: Array | None = None) -> Array:
    """Return the data where the mask is set, else zero; with `shape`, the mask is packed into bytes."""
    if shape is not None:
        mask = _unpacked(mask, 1, int(np.prod(shape))).reshape(shape)
    dense = np.zeros(np.shape(mask), nonzero_data.dtype)
    dense[np.asarray(mask) != 0] = nonzero_data
    return dense


def lut_to_sparse(
    indices_mask: Array, indices_nonzero_data: Array, lut: Array, vector_axis: Any = None
) -> tuple[Array, Array]:
    """Return (mask, data) of a sparse tensor whose data are looked up."""
    dense = lut_to_dense(sparse_to_dense(indices_nonzero_data, indices_mask), lut, vector_axis)
    mask = np.asarray(indices_mask)
    if dense.shape != mask.shape:
        mask = np.repeat(mask, lut.shape[-1], int(vector_axis))
    return mask, dense[mask != 0]


def sparse_shift_scale(
    data_mask: Array, nonzero_data: Array, scale: Array, offset: Array | None = None
) -> tuple[Array, Array]:
    """Return (mask, data) of a sparse tensor whose data are quantized in blocks."""
    dense = shift_scale(sparse_to_dense(nonzero_data, data_mask), scale, offset)
    return np.asarray(data_mask), dense[np.asarray(data_mask) != 0]


def cast(source_val: Array, output_dtype: str) -> Array:
    """Return the numbers in another dtype."""
    return np.asarray(source_val).astype(DTYPES[str(output_dtype)])


DECODERS: dict[str, Decoder] = {
    "constexpr_affine_dequantize": affine,
    "constexpr_blockwise_shift_scale": shift_scale,
    "constexpr_cast": cast,
    "constexpr_lut_to_dense": lut_to_dense,
    "constexpr_lut_to_sparse": lut_to_sparse,
    "constexpr_sparse_blockwise_shift_scale": sparse_shift_scale,
    "constexpr_sparse_to_dense": sparse_to_dense,
}
"""Op type -> function whose parameters are the inputs of the op."""


Tensor = torch.Tensor

RANGE = {"int8": (-128, 127), "uint8": (0, 255)}
"""Dtype -> the least and the largest number that it holds."""


def _along(value: Any, axis: int | None, rank: int) -> Tensor:
    """Return a scalar, or one number for each place along an axis, in a shape that broadcasts."""
    tensor = torch.as_tensor(value, dtype=torch.float32)
    if axis is None or tensor.ndim == 0:
        return tensor
    return tensor.reshape([-1 if a == int(axis) % rank else 1 for a in range(rank)])


@impl("quantize")
def quantize(
    input: Tensor, scale: Any, output_dtype: str, zero_point: Any = None, axis: int | None = None
) -> Tensor:
    """Return round(x / scale) + zero_point, within the range of the dtype; halves are rounded to even."""
    return codes(torch.round, input, scale, output_dtype, zero_point, axis)


def codes(
    nearest: Callable[[Tensor], Tensor],
    input: Tensor,
    scale: Any,
    output_dtype: str,
    zero_point: Any = None,
    axis: int | None = None,
) -> Tensor:
    """Return the codes of a value, where `nearest` says which way halves are rounded."""
    level = nearest(input / _along(scale, axis, input.ndim))
    level = level if zero_point is None else level + _along(zero_point, axis, input.ndim)
    return level.clamp(*RANGE[output_dtype])


@impl("dequantize")
def dequantize(input: Tensor, scale: Any, zero_point: Any = None, axis: int | None = None) -> Tensor:
    """Scale * (x - zero_point)."""
    x = input.float()
    x = x if zero_point is None else x - _along(zero_point, axis, input.ndim)
    return x * _along(scale, axis, input.ndim)
