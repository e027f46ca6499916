"""Edits of compressed weights: each form, after each edit, decodes bit for bit to the edited weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from anesurgery.errors import Refused
from anesurgery.files import sub_byte
from anesurgery.mil import Array, Program, Var, ct, is_compressed, mb, types
from anesurgery.regions import compressed_weights
from anesurgery.regions.compressed_weights import decoded, edit_weight
from anesurgery.regions.weight_edits import Edit
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.session import Session

SHAPE = (8, 12, 2)
RNG = np.random.default_rng(5)


def halves(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float16)


def scales(*shape: int) -> Array:
    return np.abs(halves(*shape))


def numbers(shape: tuple[int, ...], most: int, dtype: Any = np.uint8) -> Array:
    return RNG.integers(0, most, shape).astype(dtype)


def affine(vector: bool) -> Callable[[], Var]:
    many = (12,) if vector else ()
    return lambda: mb.constexpr_affine_dequantize(
        quantized_data=numbers(SHAPE, 90, np.int8),
        zero_point=numbers(many, 9, np.int8),
        scale=scales(*many),
        axis=np.int32(1 if vector else 0),
    )


def packed_palette(bits: int, named: int) -> Var:
    packed = sub_byte.pack(numbers(SHAPE, named), bits)
    return mb.constexpr_lut_to_dense(indices=packed, lut=halves(2**bits), shape=np.array(SHAPE, np.uint32))


def packed_sparse() -> Var:
    mask = numbers(SHAPE, 2)
    shape = np.array(SHAPE, np.uint32)
    return mb.constexpr_sparse_to_dense(
        nonzero_data=halves(int(mask.sum())), mask=sub_byte.pack(mask, 1), shape=shape
    )


def blockwise(blocks: tuple[int, ...], offset: bool, dtype: Any = np.int8) -> Callable[[], Var]:
    def make() -> Var:
        more = {"offset": numbers(blocks, 7, dtype)} if offset else {}
        return mb.constexpr_blockwise_shift_scale(data=numbers(SHAPE, 7, dtype), scale=scales(*blocks), **more)

    return make


def palette(groups: tuple[int, ...], bits: int = 4, vector: int = 1, axis: int = 0) -> Callable[[], Var]:
    kind = types.nptype_from_builtin(types.string_to_builtin(f"uint{bits}"))
    shape = tuple(n // vector if i == axis else n for i, n in enumerate(SHAPE))
    more = {"vector_axis": np.int32(axis)} if vector > 1 else {}
    return lambda: mb.constexpr_lut_to_dense(
        indices=numbers(shape, 2**bits).astype(kind), lut=halves(*groups, 2**bits, vector), **more
    )


def mask_of(shape: tuple[int, ...] = SHAPE) -> Array:
    return numbers(shape, 2).astype(types.np_uint1_dtype)


def sparse() -> Var:
    mask = mask_of()
    return mb.constexpr_sparse_to_dense(nonzero_data=halves(int(mask.sum())), mask=mask)


def sparse_palette(vector: int = 1) -> Callable[[], Var]:
    def make() -> Var:
        mask = mask_of((SHAPE[0] // vector, *SHAPE[1:]))
        indices = numbers((int(mask.sum()),), 16).astype(types.np_uint4_dtype)
        more = {"vector_axis": np.int32(0)} if vector > 1 else {}
        new_mask, data = mb.constexpr_lut_to_sparse(
            indices_mask=mask, indices_nonzero_data=indices, lut=halves(2, 1, 1, 16, vector), **more
        )
        return mb.constexpr_sparse_to_dense(nonzero_data=data, mask=new_mask)

    return make


def sparse_blockwise() -> Var:
    mask = mask_of()
    data = numbers((int(mask.sum()),), 50, np.int8)
    new_mask, made = mb.constexpr_sparse_blockwise_shift_scale(
        data_mask=mask, nonzero_data=data, scale=scales(4, 3, 1), offset=numbers((4, 3, 1), 5, np.int8)
    )
    return mb.constexpr_sparse_to_dense(nonzero_data=made, mask=new_mask)


def quantized_table() -> Var:
    table = mb.constexpr_blockwise_shift_scale(
        data=numbers((4, 1, 1, 16, 1), 99, np.int8), scale=scales(1, 1, 1, 1, 1)
    )
    return mb.constexpr_lut_to_dense(indices=numbers(SHAPE, 16).astype(types.np_uint4_dtype), lut=table)


def scaled_palette() -> Var:
    data = palette((1, 4, 1))()
    return mb.constexpr_blockwise_shift_scale(data=data, scale=scales(8, 1, 1))


def integer_palette() -> Var:
    table = numbers((2, 1, 1, 16, 1), 100, np.int8)
    data = mb.constexpr_lut_to_dense(indices=numbers(SHAPE, 16).astype(types.np_uint4_dtype), lut=table)
    return mb.constexpr_blockwise_shift_scale(
        data=data, scale=scales(8, 1, 1), offset=np.full((8, 1, 1), 3, np.int8)
    )


def scaled_sparse() -> Var:
    return mb.constexpr_blockwise_shift_scale(data=sparse(), scale=scales(8, 1, 1))


OLD: dict[str, Callable[[], Var]] = {
    "affine, one scale": affine(False),
    "affine, a scale for each channel": affine(True),
    "palette of 4 bits, all named": lambda: packed_palette(4, 16),
    "palette of 4 bits, some named": lambda: packed_palette(4, 9),
    "palette of 2 bits": lambda: packed_palette(2, 4),
    "sparse, packed": packed_sparse,
}
NEW: dict[str, Callable[[], Var]] = {
    "blocks": blockwise((4, 3, 1), False),
    "blocks with offsets": blockwise((8, 2, 2), True),
    "blocks of 4 bits with offsets": blockwise((2, 1, 1), True, types.np_uint4_dtype),
    "one table": palette((1, 1, 1)),
    "a table for each channel": palette((8, 1, 1), bits=2),
    "tables of groups": palette((1, 4, 1), bits=6),
    "a table of 8 bits": palette((1, 1, 1), bits=8),
    "tables of blocks": palette((2, 3, 2), bits=3),
    "vectors": palette((1, 1, 1), vector=2, axis=1),
    "vectors of groups": palette((4, 1, 1), vector=2, axis=0),
    "sparse": sparse,
    "sparse palette": sparse_palette(),
    "sparse palette of vectors": sparse_palette(2),
    "sparse blocks": sparse_blockwise,
    "quantized table": quantized_table,
    "palette with scales": scaled_palette,
    "palette of integers with offsets": integer_palette,
    "sparse with scales": scaled_sparse,
}
FORMS = {
    **{k: (f, ct.target.iOS16) for k, f in OLD.items()},
    **{k: (f, ct.target.iOS18) for k, f in NEW.items()},
}

WHOLE = Edit.of(SHAPE)
EDITS = {
    "transposed": WHOLE.transposed([2, 0, 1]),
    "cut": WHOLE.taken(0, range(3, 8)),
    "cut between blocks": WHOLE.taken(1, range(0, 6)),
    "one index": WHOLE.taken(1, [7]).squeezed(1),
    "reordered": WHOLE.taken(0, [7, 0, 5, 5, 2, 1]),
    "a kernel": WHOLE.transposed([1, 0, 2]).expanded(2).expanded(0),
    "merged": WHOLE.transposed([1, 0, 2]).merged(0, 1),
    "padded rows": WHOLE.padded(0, 16),
    "padded columns": WHOLE.padded(1, 16),
    "padded twice and transposed": WHOLE.padded(1, 16).padded(0, 10).transposed([1, 2, 0]),
    "cut and padded": WHOLE.taken(0, range(0, 6)).padded(0, 8).merged(1, 2),
}

VECTORS_CUT = {
    ("vectors", "one index"), ("vectors", "merged"), ("vectors", "cut and padded"),
    ("vectors of groups", "cut"), ("vectors of groups", "reordered"),
    ("sparse palette of vectors", "cut"), ("sparse palette of vectors", "reordered"),
}  # fmt: skip


def weight_of(make: Callable[[], Var], opset: Any) -> tuple[Program, Var]:
    """A program that decodes a weight, and the weight."""
    made: list[Var] = []

    @mb.program(input_specs=[mb.TensorSpec((1,))], opset_version=opset)
    def program(x: Var) -> Var:
        made.append(make())
        return mb.mul(x=x, y=mb.cast(x=mb.reduce_sum(x=made[0]), dtype="fp32"))

    return program, made[0]


def after(program: Program, weight: Var, edit: Edit) -> Var:
    """The weight after an edit, in the program."""
    function = program.functions["main"]
    root = list(function.operations)[-1]
    with function:
        return edit_weight(Builder(Session(), function, "test", root), weight, edit, "edited")


def bits(values: Array) -> bytes:
    return np.ascontiguousarray(values).tobytes()


def size(var: Var) -> int:
    """Bytes of what a weight is decoded from."""
    assert var.op is not None
    found = 0
    for given in (v for v in var.op.inputs.values() if isinstance(v, Var)):
        kind = types.builtin_to_string(given.dtype)
        digits = int("".join(filter(str.isdigit, kind)) or 0)
        found += size(given) if is_compressed(given) else np.size(given.val) * digits // 8
    return found


@pytest.mark.one_of(8)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("form", FORMS)
def test_an_edited_weight_stays_compressed_and_decodes_to_the_edit(form: str, edit: str) -> None:
    program, weight = weight_of(*FORMS[form])
    expected = EDITS[edit].apply(decoded(weight))
    if (form, edit) in VECTORS_CUT:
        with pytest.raises(Refused, match="cuts vectors of 2 numbers"):
            after(program, weight, EDITS[edit])
        return
    made = after(program, weight, EDITS[edit])
    assert is_compressed(made)
    assert made.op is not None
    assert weight.op is not None
    assert made.op.op_type == weight.op.op_type
    assert made.shape == expected.shape
    found = decoded(made)
    assert bits(found) == bits(expected)
    assert found.dtype == expected.dtype


def test_padding_prefers_an_entry_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    table = halves(16)
    table[5] = 0
    program, weight = weight_of(
        lambda: mb.constexpr_lut_to_dense(
            indices=sub_byte.pack(numbers(SHAPE, 16), 4), lut=table, shape=np.array(SHAPE, np.uint32)
        ),
        ct.target.iOS16,
    )
    made = after(program, weight, EDITS["padded rows"])
    assert made.op is not None
    np.testing.assert_array_equal(made.op.lut.val, table)


def test_a_full_palette_of_256_entries_without_zero_refuses_zeros() -> None:
    table = np.linspace(1, 2, 256).astype(np.float16)
    indices = np.resize(np.arange(256, dtype=np.uint8), (32, 8))
    program, weight = weight_of(
        lambda: mb.constexpr_lut_to_dense(
            indices=indices.ravel(), lut=table, shape=np.array([32, 8], np.uint32)
        ),
        ct.target.iOS16,
    )
    with pytest.raises(Refused, match="has 256 entries, and none is 0"):
        after(program, weight, Edit.of((32, 8)).padded(0, 64))


def test_offsets_that_are_no_whole_numbers_refuse_padding() -> None:
    make = lambda: mb.constexpr_blockwise_shift_scale(  # noqa: E731
        data=numbers(SHAPE, 7, np.int8), scale=scales(1, 1, 1), offset=np.full((1, 1, 1), 0.5, np.float16)
    )
    program, weight = weight_of(make, ct.target.iOS18)
    with pytest.raises(Refused, match="no whole numbers"):
        after(program, weight, EDITS["padded rows"])


def test_a_negative_scale_refuses_padding_that_would_be_minus_zero() -> None:
    make = lambda: mb.constexpr_blockwise_shift_scale(  # noqa: E731
        data=numbers(SHAPE, 7, np.int8), scale=-scales(8, 1, 1)
    )
    program, weight = weight_of(make, ct.target.iOS18)
    with pytest.raises(Refused, match="negative scale"):
        after(program, weight, EDITS["padded rows"])
    assert bits(decoded(after(program, weight, EDITS["cut"]))) == bits(EDITS["cut"].apply(decoded(weight)))


def test_tables_of_groups_grow_no_more_than_they_must() -> None:
    """Cut between two groups, each row keeps its table; padding alone gets tables of its own."""
    program, weight = weight_of(*FORMS["a table for each channel"])
    made = after(program, weight, EDITS["cut"])
    assert made.op is not None
    assert made.op.lut.shape == (5, 1, 1, 4, 1)
    program, weight = weight_of(*FORMS["blocks"])
    made = after(program, weight, Edit.of(SHAPE).taken(0, range(2, 8)))
    assert made.op is not None
    assert made.op.scale.shape == (3, 3, 1)


def test_a_wrong_group_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: scales are cut at the places of the weight's elements."""
    monkeypatch.setattr(Edit, "of_blocks", lambda self, blocks, apart=False: Edit.of(blocks))
    program, weight = weight_of(*FORMS["a table for each channel"])
    made = after(program, weight, Edit.of(SHAPE).taken(0, [7, 6, 5, 4, 3, 2, 1, 0]))
    assert bits(decoded(made)) != bits(decoded(weight)[::-1])


def test_every_form_that_the_interpreter_decodes_is_edited() -> None:
    from anesurgery.interpret.ops.constexpr import DECODERS

    assert set(compressed_weights.FORMS) == set(DECODERS)
