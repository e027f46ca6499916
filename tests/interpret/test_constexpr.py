"""Compressed weights against coremltools' own decompression, form by form, and chained forms in programs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anesurgery.errors import InterpretError
from anesurgery.interpret.core import evaluate
from anesurgery.interpret.ops import constexpr
from anesurgery.mil import Array, Var, ct, mb, quiet_host, types

with quiet_host():
    from coremltools.converters.mil.mil.ops.defs.iOS16 import constexpr_ops as old
    from coremltools.converters.mil.mil.ops.defs.iOS18 import compression as new
    from coremltools.optimize import _utils as utils

RNG = np.random.default_rng(3)


def f(*shape: int, dtype: Any = np.float16) -> Array:
    return RNG.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("blocks", [(1, 1), (4, 1), (2, 3), (4, 6)])
@pytest.mark.parametrize("offset", [True, False])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_blockwise_shift_scale(blocks: tuple[int, int], offset: bool, dtype: Any) -> None:
    data, scale = RNG.integers(0, 100, (4, 6)).astype(dtype), f(*blocks)
    shift = RNG.integers(0, 9, blocks).astype(dtype) if offset else None
    expected = new.constexpr_blockwise_shift_scale.decompress(data, scale, shift)
    np.testing.assert_array_equal(constexpr.shift_scale(data, scale, shift), expected)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("vector", [True, False])
def test_affine(axis: int, vector: bool) -> None:
    data = RNG.integers(-100, 100, (4, 6)).astype(np.int8)
    shape = (data.shape[axis],) if vector else ()
    scale, zero = f(*shape), RNG.integers(0, 9, shape).astype(np.int8)
    expected = utils.dequantize_by_scale_and_zp(data, scale, zero, axis)
    np.testing.assert_array_equal(constexpr.affine(data, zero, scale, axis), expected)


@pytest.mark.parametrize("groups", [(1, 1, 1), (4, 1, 1), (2, 3, 1), (1, 6, 2)])
@pytest.mark.parametrize(("width", "axis"), [(1, None), (2, 0), (3, 1), (2, -1)])
def test_grouped_and_vector_tables(groups: tuple[int, ...], width: int, axis: int | None) -> None:
    indices, lut = RNG.integers(0, 8, (4, 6, 2)).astype(np.uint8), f(*groups, 8, width)
    made = constexpr.lut_to_dense(indices, lut, axis)
    expected = np.empty_like(made)  # entry by entry, as the op's documentation says
    at = 0 if axis is None else axis % 3
    for place in np.ndindex(*indices.shape):
        group = tuple(p * g // n for p, g, n in zip(place, groups, indices.shape, strict=True))
        for i, number in enumerate(lut[(*group, indices[place])]):
            target = list(place)
            target[at] = target[at] * width + i
            expected[tuple(target)] = number
    np.testing.assert_array_equal(made, expected)


@pytest.mark.parametrize("bits", [1, 2, 4, 6, 8])
def test_packed_tables_of_ios16(bits: int) -> None:
    lut, numbers = f(2**bits), RNG.integers(0, 2**bits, 30)
    packed = utils.pack_elements_into_bits(numbers.astype(np.uint8), bits)
    shape = np.array([5, 6], np.uint32)
    made = constexpr.lut_to_dense(packed, lut, shape=shape)
    np.testing.assert_array_equal(made, lut[numbers].reshape(5, 6))
    np.testing.assert_array_equal(made, old.constexpr_lut_to_dense.decompress(lut, packed, shape))


def test_sparse_forms() -> None:
    mask = (RNG.random((5, 6)) < 0.4).astype(np.uint8)
    data = f(int(mask.sum()))
    expected = new.constexpr_sparse_to_dense.decompress(data, mask)
    np.testing.assert_array_equal(constexpr.sparse_to_dense(data, mask), expected)
    packed = np.packbits(mask.reshape(-1), bitorder="little")
    np.testing.assert_array_equal(constexpr.sparse_to_dense(data, packed, np.array([5, 6])), expected)
    numbers, scale = RNG.integers(0, 9, int(mask.sum())).astype(np.int8), f(5, 1)
    for made, wanted in zip(
        constexpr.sparse_shift_scale(mask, numbers, scale),
        new.constexpr_sparse_blockwise_shift_scale.decompress(mask, numbers, scale, None),
        strict=True,
    ):
        np.testing.assert_array_equal(made, wanted)
    lut = f(1, 1, 16, 1)
    for made, wanted in zip(
        constexpr.lut_to_sparse(mask, numbers.astype(np.uint8), lut),
        new.constexpr_lut_to_sparse.decompress(mask, numbers.astype(np.uint8), lut, None),
        strict=True,
    ):
        np.testing.assert_array_equal(made, wanted)


def test_a_table_that_is_quantized_itself() -> None:
    indices = RNG.integers(0, 4, (4, 6)).astype(types.np_uint2_dtype)
    table, scale = RNG.integers(-90, 90, (2, 1, 4, 1)).astype(np.int8), f(1, 1, 1, 1)
    made: list[Var] = []

    @mb.program(input_specs=[mb.TensorSpec((1,))], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        lut = mb.constexpr_blockwise_shift_scale(data=table, scale=scale)
        made.append(mb.constexpr_lut_to_dense(indices=indices, lut=lut))
        return mb.identity(x=x)

    ops = [op for op in program.functions["main"].operations if op.op_type.startswith("constexpr")]
    (found,) = evaluate(ops, {}, made)
    dense = (table * scale)[..., 0]
    rows = np.arange(4)[:, None] // 2
    np.testing.assert_array_equal(found.numpy(), dense[rows, 0, indices.astype(int)].astype(np.float32))


def test_a_damaged_weight_is_named() -> None:
    @mb.program(input_specs=[mb.TensorSpec((1,))], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        weight = mb.constexpr_sparse_to_dense(
            nonzero_data=f(2), mask=np.array([3], np.uint8), shape=np.array([2, 2], np.uint32), name="sparse"
        )
        return mb.identity(x=x) if weight is None else mb.reshape(x=weight, shape=[4])

    op = next(o for o in program.functions["main"].operations if o.name == "sparse")
    op.inputs["nonzero_data"]._sym_val.val = f(3)
    with pytest.raises(InterpretError, match="op sparse: constexpr_sparse_to_dense cannot"):
        constexpr.decompress(op, {})
