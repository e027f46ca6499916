"""One-hot rows times the table are the rows of the table: every id, both dtypes, every opset."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, rewrites, stays, table

from anesurgery.errors import PassError
from anesurgery.files.interface import adapt_inputs
from anesurgery.interpret import run
from anesurgery.mil import Array, Program, ct, mb, new_symbol, types, walk_ops
from anesurgery.passes.embedding_matmul import EmbeddingMatmul, example
from anesurgery.rewriting.session import Session
from anesurgery.testing import apply_pass, assert_same_numbers

IOS = {15: ct.target.iOS15, 16: ct.target.iOS16, 17: ct.target.iOS17, 18: ct.target.iOS18}


def numbers(rows: int, width: int = 3, dtype: Any = np.float16) -> Array:
    """A table in which no two rows are equal, with the largest and the smallest numbers of its dtype."""
    table = np.random.default_rng(rows).standard_normal((rows, width)).astype(dtype)
    table[0, 0], table[-1, -1] = np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal
    return table


def lookup(table: Array, shape: tuple[int, ...] = (1, 4), ios: int = 17, **how: Any) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape, dtype=types.int32)], opset_version=IOS[ios])(
        lambda ids: mb.gather(x=table, indices=guarded(ids, len(table), **how), axis=0, name="y")
    )


def guarded(ids: Any, rows: int, guard: bool = False, to: str | None = None) -> Any:
    """The ids as coremltools hands them to a gather: with its guard and its narrowing."""
    if to is not None:
        ids = mb.cast(x=mb.cast(x=ids, dtype=to), dtype="int32")
    if guard:
        wrapped = mb.add(x=ids, y=np.int32(rows))
        ids = mb.select(cond=mb.greater_equal(x=ids, y=np.int32(0)), a=ids, b=wrapped)
    return ids if to is None else mb.cast(x=ids, dtype=to)


def rewritten(step: EmbeddingMatmul, program: Program) -> tuple[Program, Session]:
    """The program after the pass, which has no gather, and which the pass leaves alone."""
    after, session = apply_pass(step, program)
    assert session.changes, session.refusals
    assert all(change.proof is not None for change in session.changes), session.changes
    assert not apply_pass(step, after)[1].changes
    assert "gather" not in kinds(after)
    return after, session


def kinds(program: Program) -> list[str]:
    return [op.op_type for op in walk_ops(program) if op.op_type != "const"]


def looked_up(program: Program, ids: Array, precision: str = "fp32") -> Array:
    return np.asarray(run(program, {"ids": ids.astype(np.int32)}, precision=precision)["y"])


def test_comparing_fp16_ids_would_be_wrong() -> None:
    """The trap that the digits avoid: 2049 and 2048 are the same fp16 number."""
    table = numbers(5003)

    @mb.program(input_specs=[mb.TensorSpec((1, 3), dtype=types.int32)], opset_version=IOS[17])
    def naive(ids: Any) -> Any:
        number = mb.expand_dims(x=mb.cast(x=ids, dtype="fp16"), axes=[-1])
        same = mb.equal(x=number, y=np.arange(5003).astype(np.float16).reshape(1, 1, -1))
        return mb.matmul(x=mb.cast(x=same, dtype="fp16"), y=table, name="y")

    ids = np.array([[2047, 2049, 4999]])
    wrong = looked_up(naive, ids, "fp16")
    assert (wrong[0, 0] == table[2047]).all()
    assert (wrong[0, 1] != table[2049]).any()
    assert (wrong[0, 2] != table[4999]).any()


def test_pieces_are_multiples_of_the_base_and_nearly_equal() -> None:
    after, _ = rewritten(EmbeddingMatmul(max_inner=16384), lookup(numbers(50257, 2), (1, 2)))
    inner = [op.y.shape[-2] for op in walk_ops(after) if op.op_type == "matmul"]
    assert sum(inner) == 50304
    assert all(n % 64 == 0 and n <= 16384 for n in inner)
    assert max(inner) - min(inner) <= 64


@pytest.mark.slow
@pytest.mark.parametrize("ios", [15, 16])
def test_negative_ids_count_from_the_end_where_the_gather_says_so(ios: int) -> None:
    table, ids = numbers(2500), np.array([[-1, -2500, 0, 2499]])
    after, _ = rewritten(EmbeddingMatmul(), lookup(table, ios=ios))
    assert "select" in kinds(after)
    np.testing.assert_array_equal(looked_up(after, ids), table[ids])
    trusting, _ = rewritten(EmbeddingMatmul(nonnegative_ids=True), lookup(table, ios=ios))
    assert "select" not in kinds(trusting)


@pytest.mark.slow
@pytest.mark.parametrize("to", [None, "int16"])
def test_a_guard_stays_unless_the_caller_promises(to: str | None) -> None:
    table, ids = numbers(2500), np.array([[-1, -2500, 0, 2499]])
    program = lookup(table, guard=True, to=to)
    after, _ = rewritten(EmbeddingMatmul(), program)
    assert kinds(after).count("select") == 1
    np.testing.assert_array_equal(looked_up(after, ids), table[ids])
    trusting, _ = rewritten(EmbeddingMatmul(nonnegative_ids=True), program)
    assert not {"select", "greater_equal"} & set(kinds(trusting))
    np.testing.assert_array_equal(looked_up(trusting, abs(ids) // 2), table[abs(ids) // 2])


SURE = {
    "clip": lambda ids: mb.cast(x=mb.clip(x=mb.cast(x=ids, dtype="fp32"), alpha=0.0, beta=99.0), dtype="int32"),
    "maximum": lambda ids: mb.maximum(x=ids, y=np.int32(0)),
    "mod": lambda ids: mb.mod(x=ids, y=np.int32(64)),
    "argmax": lambda ids: mb.reduce_argmax(x=mb.cast(x=ids, dtype="fp32"), axis=1),
    "moved": lambda ids: mb.reshape(x=mb.maximum(x=ids, y=np.int32(0)), shape=[4]),
}
UNSURE = {
    "minimum": lambda ids: mb.minimum(x=ids, y=np.int32(7)),
    "subtraction": lambda ids: mb.sub(x=ids, y=np.int32(1)),
    "sum": lambda ids: mb.add(x=mb.abs(x=ids), y=np.int32(1)),
    "another guard": lambda ids: mb.select(
        cond=mb.greater_equal(x=ids, y=np.int32(-3)), a=ids, b=np.zeros((1, 4), np.int32)
    ),
}


def tied(rows: int) -> Program:
    table = numbers(rows, 8)
    table[0, 0] = 1

    @mb.program(input_specs=[mb.TensorSpec((1, 4), dtype=types.int32)], opset_version=IOS[17])
    def program(ids: Any) -> Any:
        shared = mb.const(val=table, name="table")
        hidden = mb.gather(x=shared, indices=ids, axis=0)
        return mb.linear(x=mb.tanh(x=hidden), weight=shared, name="y")

    return program


@pytest.mark.slow
def test_a_table_of_its_own_is_padded_and_not_stored_twice() -> None:
    after, _ = rewritten(EmbeddingMatmul(), lookup(numbers(5003)))
    large = [op for op in walk_ops(after) if op.op_type == "const" and np.size(op.val.val) > 5003]
    assert [op.val.val.shape for op in large] == [(5056, 3)]


def gather_of(x: Array, shape: tuple[int, ...] = (1, 4), axis: int = 0, **more: Any) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape, dtype=types.int32)], opset_version=IOS[17])(
        lambda ids: mb.gather(x=x, indices=ids, axis=axis, **more)
    )


def poisoned() -> Array:
    table = numbers(2500)
    table[1234, 1] = -np.inf
    return table


def test_refuses_options_that_do_not_exist() -> None:
    with pytest.raises(PassError, match="mode='host'; it may be 'matmul' or 'input'"):
        EmbeddingMatmul(mode="host")
    with pytest.raises(PassError, match="max_inner=64; it must be an integer of at least 2048"):
        EmbeddingMatmul(max_inner=64)


@pytest.mark.parametrize(("ios", "held"), [(15, np.float32), (16, np.float16), (18, np.float16)])
def test_the_rows_as_an_input(ios: int, held: Any) -> None:
    table = numbers(300)
    program = lookup(table, ios=ios, guard=ios >= 17)
    after, session = rewritten(EmbeddingMatmul(mode="input"), program)
    inputs = after.functions["main"].inputs
    assert list(inputs) == ["ids_embeds"]
    assert inputs["ids_embeds"].shape == (1, 4, 3)
    assert types.nptype_from_builtin(inputs["ids_embeds"].dtype) == held
    assert_same_numbers(program, after, {"ids": np.array([[0, 299, 7, 7]], np.int32)}, session=session)
    np.testing.assert_array_equal(session.artifacts["ids_embeds"], table)
    assert "give ids_embeds in place of ids" in session.contract[0].words


def test_two_functions_agree_about_the_input() -> None:
    table = numbers(300)
    program = Program()
    for name, length in (("main", 1), ("prefill", 4)):
        one = lookup(table, (1, length)).functions["main"]
        program.add_function(name, one)
    after, session = rewritten(EmbeddingMatmul(mode="input"), program)
    assert list(session.artifacts) == ["ids_embeds"]
    for name, length in (("main", 1), ("prefill", 4)):
        ids = np.full((1, length), 299, np.int32)
        given = adapt_inputs(session.contract, {"ids": ids})
        found = run(after, given, function=name)["y"]
        np.testing.assert_array_equal(found, table[ids])


def test_ids_that_something_else_reads_stay_an_input() -> None:
    first, second = numbers(300), numbers(2500, 2)

    @mb.program(input_specs=[mb.TensorSpec((1, 4), dtype=types.int32)], opset_version=IOS[17])
    def program(ids: Any) -> Any:
        mask = mb.cast(x=mb.not_equal(x=ids, y=np.int32(0)), dtype="fp16")
        a = mb.reduce_sum(x=mb.gather(x=first, indices=ids, axis=0), axes=[-1])
        b = mb.reduce_sum(x=mb.gather(x=second, indices=ids, axis=0), axes=[-1])
        return mb.mul(x=mb.add(x=a, y=b), y=mask, name="y")

    after, session = rewritten(EmbeddingMatmul(mode="input"), program)
    assert list(after.functions["main"].inputs) == ["ids", "ids_embeds", "ids_embeds_1"]
    assert {k: v.shape for k, v in session.artifacts.items()} == {
        "ids_embeds": (300, 3),
        "ids_embeds_1": (2500, 2),
    }
    inputs = {"ids": np.array([[0, 299, 7, 7]], np.int32)}
    assert_same_numbers(program, after, inputs, session=session)


def test_an_id_outside_the_table_gives_zeros() -> None:
    after, _ = rewritten(EmbeddingMatmul(), example())
    found = looked_up(after, np.array([[2500, 2559, 5000, -1, 0]]))
    assert not found[0, :4].any()


def refuses_symbolic_ids() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((1, new_symbol()), dtype=types.int32)])(
        lambda ids: mb.gather(x=numbers(9), indices=ids, axis=0)
    )


def does_not_apply_to_constant_ids_and_dynamic_tables() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((5, 2)), mb.TensorSpec((3,), dtype=types.int32)])(
        lambda x, ids: (mb.gather(x=x, indices=ids, axis=0), mb.gather(x=x, indices=[0, 2], axis=0))
    )


def computed_ids_cannot_leave() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((1, 4), dtype=types.int32)])(
        lambda ids: mb.gather(x=numbers(9), indices=mb.mod(x=ids, y=np.int32(9)), axis=0)
    )


LIMITED = EmbeddingMatmul(max_inner=2048)


def guarded_ids(make: Any) -> Program:
    """The guard goes where the ids cannot be negative."""
    return mb.program(input_specs=[mb.TensorSpec((1, 4), dtype=types.int32)], opset_version=IOS[17])(
        lambda ids: mb.gather(x=numbers(2500), indices=guarded(make(ids), 2500, guard=True), axis=0, name="y")
    )


def two_lookups() -> Program:
    """One table, two lookups of it, of which one has two readers."""

    @mb.program(input_specs=[mb.TensorSpec((1, 4), dtype=types.int32)], opset_version=IOS[17])
    def program(ids: Any) -> Any:
        shared = mb.const(val=numbers(2500), name="table")
        one = mb.gather(x=shared, indices=ids, axis=0)
        two = mb.gather(x=shared, indices=mb.mod(x=ids, y=np.int32(7)), axis=0)
        return mb.mul(x=one, y=two, name="y"), mb.relu(x=one, name="z")

    return program


def compressed_table() -> Program:
    @mb.program(input_specs=[mb.TensorSpec((1, 4), dtype=types.int32)], opset_version=IOS[16])
    def program(ids: Any) -> Any:
        table = mb.constexpr_affine_dequantize(
            quantized_data=np.arange(66, dtype=np.int8).reshape(11, 6),
            zero_point=np.int8(0),
            scale=np.float32(0.1),
            axis=np.int32(0),
        )
        return mb.gather(x=table, indices=ids, axis=0)

    return program


test_cases, test_surroundings = table(
    EmbeddingMatmul(),
    # int16 does not hold 40000; the cast, wrong as it is, belongs to the model.
    rewrites(lookup, numbers(40000, 1), to="int16"),
    rewrites(lookup, numbers(40000, 1), to="uint16"),
    refuses("the table holds int32", gather_of, np.ones((9, 2), np.int32)),
    refuses("the table has rank 1, not 2", gather_of, np.ones(9, np.float32)),
    refuses("the lookup is along axis 1, not 0", gather_of, np.ones((9, 2), np.float32), axis=1),
    refuses("the ids have rank 4, not 1 to 3", gather_of, np.ones((9, 2), np.float32), (1, 2, 1, 2)),
    refuses("the table holds infinities or NaN", gather_of, poisoned()),
    refuses("the table holds infinities or NaN", gather_of, np.full((9, 2), np.nan, np.float32)),
    refuses("the ids have the symbolic shape", refuses_symbolic_ids),
    stays(does_not_apply_to_constant_ids_and_dynamic_tables),
    refuses("are computed, not an input", computed_ids_cannot_leave, step=EmbeddingMatmul(mode="input")),
    refuses(
        "the table has 65 rows, above 64", lookup, numbers(65), guard=True, step=EmbeddingMatmul(most_rows=64)
    ),
    rewrites(lookup, numbers(65), guard=True, step=EmbeddingMatmul(most_rows=65)),
    *(
        rewrites(
            lookup,
            numbers(rows, dtype=dtype),
            (1, rows),
            step=LIMITED,
            inputs={"ids": np.arange(rows, dtype=np.int32)[None]},
        )
        for rows in (2048, 2049, 5003)
        for dtype in (np.float16, np.float32)
    ),
    *(
        rewrites(lookup, numbers(rows), shape, ios, step=LIMITED, inputs={"ids": (0, rows)})
        for rows, shape, ios in (
            (7, (50,), 15),
            (2500, (8, 9), 16),
            (4096, (8, 1, 9), 17),
            (2500, (50,), 18),
            (4096, (8, 9), 15),
        )
    ),
    rewrites(
        lookup,
        numbers(140001, 1, np.float32),
        inputs={"ids": np.array([[0, 131072, 131073, 140000]], np.int32)},
    ),
    *(
        rewrites(
            guarded_ids, {**SURE, **UNSURE}[name], inputs={"ids": np.array([[1, 2, 3, 5]], np.int32)}, id=name
        )
        for name in (*SURE, *UNSURE)
    ),
    *(
        rewrites(tied, rows, step=LIMITED, inputs={"ids": np.array([[0, 1, rows // 2, rows - 1]], np.int32)})
        for rows in (300, 2500, 2560, 5003)
    ),
    rewrites(two_lookups, inputs={"ids": np.array([[0, 1, 2, 2499]], np.int32)}),
    rewrites(compressed_table, rtol=0),
)
