"""Values that depend on no input: which become constants, with which numbers, and which stay computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from closeness import assert_close
from pass_cases import refuses, rewrites, stays, table

import anesurgery as ane
from anesurgery.errors import ProofError
from anesurgery.files import sub_byte
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes import fold_constants
from anesurgery.passes.fold_constants import FoldConstants
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers


def built(build: Callable[[Var], Any], dtype: Any = types.fp16) -> Program:
    return mb.program(input_specs=[mb.TensorSpec((1, 4), dtype=dtype)], opset_version=ct.target.iOS17)(
        lambda x: build(x)
    )


def kinds(program: Program) -> list[str]:
    return [op.op_type for op in walk_ops(program) if op.op_type != "const"]


def counted() -> Var:
    """One more than 2,048, less 2,048: 1, and 0 where fp16 rounds after each op."""
    more = mb.add(x=np.full(4, 2048, np.float16), y=np.float16(1))
    return mb.sub(x=more, y=np.float16(2048), name="one")


def test_the_numbers_are_what_the_ops_mean() -> None:
    program = built(lambda x: mb.mul(x=x, y=counted(), name="y"))
    after, session = apply_pass(FoldConstants(), program)
    assert kinds(after) == ["mul"]
    (held,) = [v.val for op in walk_ops(after) for v in op.outputs if np.shape(v.val) == (4,)]
    assert held.dtype == np.float16
    np.testing.assert_array_equal(held, np.ones(4))
    assert_same_numbers(program, after)
    (change,) = session.changes
    assert change.proof is None  # coremltools infers 0, which proves nothing of 1
    assert "after each op, as coremltools has it" in change.unchecked
    assert "holds 1.0, and 0.0 by coremltools" in change.unchecked


def test_positions_beyond_2048_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the wrong version, which rounds after each op, is found by whole models."""

    @mb.program(input_specs=[mb.TensorSpec((1, 5000), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def waves(x: Var) -> Var:
        place = mb.cumsum(x=mb.fill_like(ref_tensor=x, value=np.float16(1)), axis=1)
        return mb.mul(x=x, y=mb.cos(x=mb.mul(x=place, y=np.float16(0.5))), name="y")

    after = ane.apply(waves, FoldConstants(), prove="both", quiet=True).program
    assert kinds(after) == ["mul"]
    (last,) = [op for op in walk_ops(after) if op.op_type == "mul"]
    assert_close(last.y.val[0], np.cos(np.arange(1, 5001) / 2), 2**-11)
    rounding = partial(fold_constants.compute, precision="fp16")
    monkeypatch.setattr(
        fold_constants, "compute", lambda ops, wanted, outside=(): rounding(ops, wanted, outside)
    )
    with pytest.raises(ProofError, match="give another y"):
        ane.apply(waves, FoldConstants(), prove="both", quiet=True)


def test_a_static_shape_is_known_and_a_dynamic_one_is_not() -> None:
    def scaled(x: Var) -> Var:
        rows = mb.gather(x=mb.shape(x=x), indices=np.int32(1), axis=0)
        return mb.mul(x=x, y=mb.cast(x=rows, dtype="fp16"), name="y")

    after, _ = apply_pass(FoldConstants(), built(scaled))
    assert kinds(after) == ["mul"]
    from coremltools.converters.mil.mil import get_new_symbol

    dynamic = mb.program(
        input_specs=[mb.TensorSpec((1, get_new_symbol()), dtype=types.fp16)], opset_version=ct.target.iOS17
    )(lambda x: scaled(x))

    assert kinds(apply_pass(FoldConstants(), dynamic)[0]) == kinds(dynamic)


def test_what_is_too_large_stays_and_what_it_reads_is_folded() -> None:
    def wide(x: Var) -> Var:
        row = mb.exp(x=np.arange(4, dtype=np.float16).reshape(1, 4))
        return mb.matmul(x=x, y=mb.tile(x=row, reps=[64, 1], name="wide"), transpose_y=True, name="y")

    program = built(wide)
    assert kinds(apply_pass(FoldConstants(), program)[0]) == ["matmul"]
    after, session = apply_pass(FoldConstants(most_growth=100), program)
    assert kinds(after) == ["tile", "matmul"]
    (refusal,) = session.refusals
    assert "%wide would grow the weights by 496 bytes" in refusal[1].reason
    assert_same_numbers(program, after, precision="fp16")


def test_random_numbers_are_no_constants() -> None:
    program = built(
        lambda x: mb.add(x=x, y=mb.random_normal(shape=[4], mean=np.float16(0), stddev=np.float16(1)))
    )
    assert kinds(apply_pass(FoldConstants(), program)[0]) == ["random_normal", "add"]


VIEWS: dict[str, Callable[[Var], Var]] = {
    "transposed": lambda w: mb.transpose(x=w, perm=[1, 0]),
    "merged": lambda w: mb.reshape(x=w, shape=[48]),
    "as a kernel": lambda w: mb.expand_dims(x=mb.transpose(x=w, perm=[1, 0]), axes=[2]),
    "cut": lambda w: mb.slice_by_index(x=w, begin=[2, 0], end=[8, 6], stride=[2, 1]),
    "one row": lambda w: mb.slice_by_index(x=w, begin=[3, 0], end=[4, 6], squeeze_mask=[True, False]),
}


def with_palette(opset: Any, make: Callable[[Var], Var]) -> Program:
    """What is made of a stored palette, added to an input."""
    indices = np.arange(48, dtype=np.uint8) % 16
    table = np.linspace(-1, 1, 16).astype(np.float16)

    @mb.program(input_specs=[mb.TensorSpec((1,), dtype=types.fp16)], opset_version=opset)
    def program(x: Var) -> Var:
        if opset == ct.target.iOS16:
            packed, shape = sub_byte.pack(indices.reshape(8, 6), 4), np.array([8, 6], np.uint32)
            w = mb.constexpr_lut_to_dense(indices=packed, lut=table, shape=shape)
        else:
            lut = np.stack([table, table[::-1]]).reshape(2, 1, 16, 1)
            w = mb.constexpr_lut_to_dense(indices=indices.reshape(8, 6).astype(types.np_uint4_dtype), lut=lut)
        return mb.add(x=mb.reshape(x=x, shape=[1]), y=make(w), name="y")

    return program


def test_a_product_of_a_compressed_weight_is_folded_where_that_is_allowed() -> None:
    program = with_palette(ct.target.iOS18, lambda w: mb.mul(x=w, y=np.float16(0.5)))
    assert_refuses(FoldConstants(), program, 'compressed="reencode", or "decode", allows it')
    found = ane.apply(program, "fold_constants", compressed="reencode", quiet=True)
    assert [n for n in found.notes if "without error" in n]  # a power of two, in a table
    assert sum(op.op_type == "constexpr_lut_to_dense" for op in walk_ops(found.program)) == 1
    assert_same_numbers(program, found.program, rtol=0)


def looked_up(table: Any) -> Program:
    def body(x: Var) -> Var:
        places = mb.cast(x=x, dtype="int32")
        kinds_ = mb.gather_along_axis(x=table, indices=places, axis=1)
        rows = np.arange(8, dtype=np.float16).reshape(2, 4)
        return mb.add(x=x, y=mb.gather(x=rows, indices=mb.squeeze(x=kinds_, axes=[0]), axis=0), name="y")

    return built(body)


def counted_ids(padding: int) -> Program:
    """RoBERTa's positions: the ids that are no padding are counted."""

    @mb.program(input_specs=[mb.TensorSpec((1, 4), dtype=types.int32)], opset_version=ct.target.iOS17)
    def program(ids: Var) -> Any:
        kept = mb.cast(x=mb.not_equal(x=ids, y=np.int32(padding)), dtype="int32")
        places = mb.mul(x=mb.cumsum(x=kept, axis=1), y=kept)
        rows = np.arange(10, dtype=np.float16).reshape(5, 2)
        words = mb.gather(x=np.eye(9, 2, dtype=np.float16), indices=mb.minimum(x=ids, y=np.int32(8)), axis=0)
        return mb.add(x=words, y=mb.gather(x=rows, indices=places, axis=0), name="y")

    return program


def test_without_padding_positions_are_constant() -> None:
    program = counted_ids(padding=1)
    assert "cumsum" in kinds(ane.apply(program, [FoldConstants()], quiet=True).program)
    surgery = ane.apply(program, [FoldConstants()], assume={"ids": (2, 8)}, quiet=True)
    assert kinds(surgery.program) == ["minimum", "gather", "add"]
    assert any("by their ranges %ids never equals" in note for note in surgery.notes)
    assert_same_numbers(program, surgery.program, {"ids": np.array([[2, 8, 3, 5]], np.int32)})


def test_a_range_with_the_padding_in_it_decides_nothing() -> None:
    surgery = ane.apply(counted_ids(padding=2), [FoldConstants()], assume={"ids": (2, 8)}, quiet=True)
    assert "cumsum" in kinds(surgery.program)


def test_a_remainder_of_a_negative_number_may_be_negative() -> None:
    @mb.program(input_specs=[mb.TensorSpec((4,), dtype=types.int32)])
    def program(x: Var) -> Any:
        rest = mb.mod(x=x, y=np.int32(-3))
        return mb.cast(x=mb.equal(x=rest, y=np.int32(-1)), dtype="fp32"), mb.cast(
            x=mb.equal(x=rest, y=np.int32(-3)), dtype="fp32"
        )

    folded = ane.apply(program, ["fold_constants"])
    assert len(folded.changes) == 1, "that it is never -3 is known"
    for before in (program, folded.program):
        found = list(ane.run(before, {"x": np.array([1, 2, 3, -1], np.int32)}).values())
        assert [v.tolist() for v in found] == [[0, 0, 0, 1], [0, 0, 0, 0]]


def test_one_other_row_is_enough_to_keep_it() -> None:
    program = looked_up(np.array([[1, 1, 1, 0, 1, 1, 1, 1, 1]], np.int32))
    after, _ = apply_pass(FoldConstants(), program)
    assert kinds(after) == kinds(program)


def test_an_op_that_the_interpreter_does_not_know_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from anesurgery.interpret import TABLE

    program = built(lambda x: mb.add(x=x, y=mb.exp(x=np.ones(4, np.float16)), name="y"))
    monkeypatch.delitem(TABLE, "exp")
    assert_refuses(FoldConstants(), program, "not computed: ")


@pytest.mark.parametrize("prove", ["sites", "both"])
@pytest.mark.parametrize(("op_type", "number"), [("equal", -1), ("not_equal", -2), ("equal", 0)])
def test_a_fold_on_a_wrong_range_is_caught(
    op_type: str, number: int, prove: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a table says of an op, the fold is compared with it."""

    @mb.program(input_specs=[mb.TensorSpec((2, 4), dtype=types.int32)])
    def program(x: Var) -> Any:
        rest = mb.mod(x=x, y=np.int32(-3))
        met = mb.cast(x=getattr(mb, op_type)(x=rest, y=np.int32(number)), dtype="int32")
        return mb.add(x=met, y=x)

    monkeypatch.setattr("anesurgery.facts.dependence.never_equal", lambda op, numbers: True)
    with pytest.raises(ProofError, match="old and new differ"):
        ane.apply(program, [FoldConstants()], prove=prove, quiet=True)


@pytest.mark.parametrize("prove", ["sites", "both"])
@pytest.mark.parametrize("padding", [3, 9000])
def test_the_ends_of_an_assumed_range_are_met(
    padding: int, prove: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anesurgery.facts.dependence.never_equal", lambda op, numbers: True)
    with pytest.raises(ProofError, match="old and new differ"):
        ane.apply(counted_ids(padding), [FoldConstants()], assume={"ids": (3, 9000)}, prove=prove, quiet=True)


def test_a_fold_on_a_right_range_has_a_grade() -> None:
    surgery = ane.apply(counted_ids(1), [FoldConstants()], assume={"ids": (2, 8)}, prove="both", quiet=True)
    graded = [change.proof for change in surgery.changes if change.proof is not None]
    assert len(graded) == 1
    assert graded[0].max_abs == 0


def values_of_equal_content_are_stored_once(x: Var) -> Var:
    a, b = (mb.exp(x=np.arange(4, dtype=np.float16), name=n) for n in "ab")
    return mb.add(x=mb.mul(x=x, y=a), y=b, name="y")


def compressed(x: Var) -> Var:
    table = mb.constexpr_lut_to_dense(
        indices=np.arange(4, dtype=np.uint8),
        lut=np.arange(256, dtype=np.float16),
        shape=np.array([4], np.uint32),
    )
    return mb.add(x=x, y=mb.exp(x=table))


def rows_that_differ_in_the_sign_of_zero_are_not_equal() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2,), types.int32)], opset_version=ct.target.iOS17)(
        lambda ids: mb.inverse(
            x=mb.gather(x=np.array([[0.0], [-0.0]], np.float32), indices=ids, axis=0), epsilon=0.0
        )
    )


test_cases, test_surroundings = table(
    FoldConstants(),
    rewrites(built, values_of_equal_content_are_stored_once, rtol=1e-3),
    refuses(
        "the output %fixed depends on no input",
        built,
        lambda x: (mb.relu(x=x), mb.exp(x=np.ones(4, np.float16), name="fixed")),
    ),
    stays(built, compressed),
    *(
        rewrites(with_palette, opset, VIEWS[view])
        for view in VIEWS
        for opset in [ct.target.iOS16, ct.target.iOS18]
    ),
    stays(with_palette, ct.target.iOS18, lambda w: mb.reshape(x=w, shape=[2, 4, 6])),
    stays(rows_that_differ_in_the_sign_of_zero_are_not_equal),
    # RoBERTa's token types, which are 0 at every position.
    rewrites(looked_up, np.ones((1, 9), np.int32), inputs={"x": np.array([[0, 8, 3, 1]], np.float16)}),
)
