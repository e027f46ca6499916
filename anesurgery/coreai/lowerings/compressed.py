"""Lower compressed weights (`constexpr_*`), which stay as stored: palettes, block scales, sparse weights.

In MIL a sparse weight that is looked up or scaled stays a mask and data; here it is made dense first (`Dense`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from anesurgery.coreai.lowerings import TABLE, lowers
from anesurgery.coreai.toolkit import constant, ops, packed_attribute
from anesurgery.coreai.values import Dense, Value, array, call, known_ints
from anesurgery.errors import NotExpressible
from anesurgery.interpret.ops import constexpr


def _unpacked_constant(data: Any, shape: Sequence[int], bits: int) -> Value:
    """Write elements of less than 8 bits, from packed bytes, lowest bits first."""
    numbers = np.asarray(data.known if isinstance(data, Value) else data, np.uint8)
    return Value(constant(packed_attribute(numbers, shape, f"uint{bits}")))


@lowers("constexpr_blockwise_shift_scale")
def shift_scale(data: Value, scale: Value, offset: Value | None = None) -> Value:
    """Write `scale * (data - offset)`, with one scale for each block along an axis."""
    none = array(np.zeros(scale.shape), scale.dtype)
    before = array(np.zeros(scale.shape), data.dtype) if offset is None or offset.is_float else offset
    after = none if offset is None or not offset.is_float else -(scale * offset.cast(scale.dtype))
    return call("blockwise_shift_scale", data, scale, before, after)


@lowers("constexpr_affine_dequantize")
def affine(quantized_data: Value, zero_point: Value, scale: Value, axis: int) -> Value:
    """Write scales and zero points along one axis, as blocks of one element."""
    shape, count = quantized_data.shape, max(np.size(scale.known), np.size(zero_point.known))
    column = [count if a == int(axis) % len(shape) else 1 for a in range(len(shape))]
    scales, zeros = (
        array(np.broadcast_to(np.reshape(v.known, -1), count).reshape(column), dtype)
        for v, dtype in ((scale, scale.dtype), (zero_point, quantized_data.dtype))
    )
    return shift_scale(quantized_data, scales, zeros)


def _table_and_axis(lut: Value, vector_axis: Any, rank: int) -> tuple[Value, Value]:
    """Return a table for each group, [groups..., entries, width], and the axis of its vectors."""
    axis = 0 if vector_axis is None else int(vector_axis) % rank
    table = lut if lut.ndim == rank + 2 else lut.reshape([*[1] * rank, lut.shape[0], 1])
    return table, array(axis, "int16")


@lowers("constexpr_lut_to_dense")
def lut_to_dense(indices: Value, lut: Value, vector_axis: Any = None, shape: Any = None) -> Value:
    """Write a lookup in a table; in the form of iOS 16, indices are packed into bytes."""
    if shape is not None:
        indices = _unpacked_constant(indices, known_ints(shape, "shape"), int(lut.shape[0]).bit_length() - 1)
    return call("lut_to_dense", indices, *_table_and_axis(lut, vector_axis, indices.ndim))


@lowers("constexpr_sparse_to_dense")
def sparse_to_dense(nonzero_data: Value, mask: Value, shape: Any = None) -> Value:
    """Write the data where the mask is set, and zero elsewhere."""
    if isinstance(nonzero_data, Dense):
        return Value(nonzero_data.node)
    if shape is not None:
        mask = _unpacked_constant(mask, known_ints(shape, "shape"), 1)
    return call("sparse_with_bitmask_to_dense", call("build_sparse_with_bitmask", nonzero_data, mask))


@lowers("constexpr_lut_to_sparse")
def lut_to_sparse(
    indices_mask: Value, indices_nonzero_data: Value, lut: Value, vector_axis: Any = None
) -> tuple[Value, Value]:
    """Write a lookup where the mask is set."""
    sparse = call("build_sparse_with_bitmask", indices_nonzero_data, indices_mask)
    table, axis = _table_and_axis(lut, vector_axis, indices_mask.ndim)
    found = call("lut_to_sparse_with_bitmask", sparse, table, axis)
    return indices_mask, Dense(ops.sparse_with_bitmask_to_dense(found.node))


@lowers("constexpr_sparse_blockwise_shift_scale")
def sparse_shift_scale(
    data_mask: Value, nonzero_data: Value, scale: Value, offset: Value | None = None
) -> tuple[Value, Value]:
    """Make the weight dense and scale it: zero stays zero, as there is no offset."""
    if offset is not None and (offset.known is None or np.any(offset.known)):
        raise NotExpressible("a sparse weight with an offset, which would fill its zeros")
    dense = sparse_to_dense(nonzero_data, data_mask)
    return data_mask, Dense(shift_scale(dense, scale).node)


def _with_plain_parameters(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Let a formula of the interpreter compute in fp32, with scales and zero points as numbers."""
    return lambda input, **parts: formula(
        input.float(), **{name: getattr(part, "known", part) for name, part in parts.items()}
    )


TABLE |= {
    "quantize": _with_plain_parameters(constexpr.quantize),
    "dequantize": _with_plain_parameters(constexpr.dequantize),
    "constexpr_cast": lambda source_val, output_dtype: source_val.cast(output_dtype),
}
