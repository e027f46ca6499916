"""Decoders whose masks, tables and places come from a function write what they wrote before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from closeness import assert_close
from decoders import Decoder as Small

import anesurgery as ane
from anesurgery.checking.comparison import compare
from anesurgery.checking.output_comparison import compare_arrays
from anesurgery.interpret.decoding import Decoder, generate
from anesurgery.interpret.sampling import index_range
from anesurgery.mil import Array, Program, Var, ct, mb, np_dtype, types
from anesurgery.passes.add_cache import AddCache
from anesurgery.passes.position_function import PositionFunction
from anesurgery.passes.split_head import SplitHead
from anesurgery.rewriting.session import Session
from anesurgery.testing import apply_pass, assert_refuses, reasons

SPELLINGS = {
    "llama": Small(),
    "gpt": Small(positions="learned", groups=4, keys_turned=True),
    "window": Small(mask="window"),
    "window then whole": Small(tokens=80, mask="windows"),
    "biased by distance": Small(mask="distance", positions="none"),
    "any bias": Small(mask="given", positions="none"),
    "one group": Small(groups=1, keys_turned=True),
    "keys written in parts": Small(written=True),
}
WINDOW = Small(tokens=100, mask="window", layers=1)


def hoisted(program: Program, **options: Any) -> tuple[Program, Session]:
    cached, first = apply_pass(AddCache(**{"writes": "blend", **options}), program)
    after, session = apply_pass(PositionFunction(), cached)
    assert session.changes, session.refusals
    session.contract = [*first.contract, *session.contract]
    return after, session


@pytest.mark.one_of(16)
@pytest.mark.parametrize("cache", ["state", "io"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_gives_what_it_gave(name: str, cache: str) -> None:
    program = SPELLINGS[name].program()
    after, session = hoisted(program, prefill=5, cache=cache)
    assert compare(program, after, contract=session.contract, gate=100).ok
    for word in ("prefill", "decode"):
        function = after.functions[word]
        whole = [op for op in function.operations if op.op_type != "const" and op.op_type != "gather"]
        assert not [op.name for op in whole if any(np_dtype(v).kind == "i" for v in op.outputs)]
        assert "position" not in function.inputs


@pytest.mark.slow
@pytest.mark.parametrize("prefill", [1, 5, 8])
def test_a_ring_is_blended_around_its_end(prefill: int) -> None:
    program = WINDOW.program()
    after, session = hoisted(program, prefill=prefill)
    assert compare(program, after, contract=session.contract, gate=100).ok
    tokens = np.random.default_rng(0).integers(0, 31, 100)
    expected, decoder = Decoder(program).feed(tokens), Decoder(after)
    parts = np.split(tokens, [3, 4, 11, 36, 37, 50, 83, 99])
    found = np.concatenate([decoder.feed(part) for part in parts])
    assert compare_arrays("logits", expected, found).psnr >= 90


def test_slices_at_a_place_keep_their_integers_as_inputs() -> None:
    """What `writes="slice"` leaves: a ring that is run over passes its choice as numbers."""
    program = WINDOW.program()
    after, session = hoisted(program, prefill=5, writes="slice")
    assert compare(program, after, contract=session.contract, gate=100).ok
    given = after.functions["prefill"].inputs
    assert {np_dtype(v).kind for n, v in given.items() if n != "ids" and not types.is_state(v.sym_type)} == {
        *"if"
    }


def test_a_package_writes_the_same_and_shares_its_weights(tmp_path: Path) -> None:
    program = Small(layers=1, words=4000).program()
    before = ane.apply(program, [], quiet=True).save(tmp_path / "before.mlpackage")
    steps = [AddCache(prefill=4, writes="blend"), PositionFunction()]
    after = ane.apply(before, steps, prove="model", quiet=True).save(tmp_path / "after.mlpackage")
    sizes = [sum(f.stat().st_size for f in p.rglob("weight.bin")) for p in (before, after)]
    assert sizes[1] < 1.1 * sizes[0]
    assert generate(after, [1, 2], 3).written == generate(before, [1, 2], 3).written
    assert Decoder(after).context == 24


def test_no_warning_compares_calls_of_another_kind(recwarn: pytest.WarningsRecorder) -> None:
    program = Small(half=True, layers=1).program()
    ane.apply(
        program, [AddCache(prefill=4, writes="blend"), PositionFunction()], target="M4/macOS 15", quiet=True
    )
    assert not [w for w in recwarn if issubclass(w.category, ane.SurgeryWarning)]


@pytest.mark.parametrize("dtype", ["uint16", "int16", "int32"])
def test_places_of_fewer_bits_pass_as_integers_that_a_package_takes(dtype: str, tmp_path: Path) -> None:
    """The wrong version: an input of uint16, which no model on disk can have."""
    table = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float16)

    @mb.program(
        input_specs=[mb.TensorSpec((1, 4), types.fp16), mb.TensorSpec((1,), types.int32)],
        opset_version=ct.target.iOS18,
    )
    def program(x: Var, position: Var) -> Any:
        place = mb.cast(x=mb.mod(x=mb.add(x=position, y=np.int32(3)), y=np.int32(8)), dtype=dtype)
        wide = mb.add(x=x, y=mb.cast(x=place, dtype="fp16"))
        return mb.mul(x=wide, y=mb.gather(x=mb.relu(x=mb.mul(x=table, y=x)), indices=place, axis=0))

    surgery = ane.apply(program, "position_function", quiet=True)
    kinds = {np_dtype(v) for f in surgery.program.functions.values() for v in (*f.inputs.values(), *f.outputs)}
    assert kinds <= {np.dtype(np.float16), np.dtype(np.int32)}
    saved = surgery.save(tmp_path / "model.mlpackage")
    assert compare(program, saved, contract=surgery.contract, gate=100).ok


def test_refuses_models_without_a_position() -> None:
    assert_refuses(PositionFunction(), Small().program(), "no function has an input 'position'")
    after, _ = hoisted(Small(layers=1).program())
    assert "no function has an input 'position'" in reasons(apply_pass(PositionFunction(), after)[1])[0]


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["state", "io"])
def test_chunks_write_the_same(cache: str, tmp_path: Path) -> None:
    program = Small(layers=4, words=97).program()
    after, session = hoisted(program, prefill=5, chunks=3, cache=cache)
    chain = ane.split(after, 3)
    held = [set(chunk.program.functions) for chunk in chain.chunks]
    assert held == [{"prefill", "decode", "prefill_inputs", "decode_inputs"}, *2 * [{"prefill", "decode"}]]
    saved = chain.save(tmp_path / "chain")
    assert compare(program, saved, contract=session.contract, gate=100).ok
    tokens = np.random.default_rng(0).integers(0, 97, 24)
    rows = [Decoder(model).feed(tokens) for model in (program, chain, saved)]
    assert compare_arrays("logits", rows[0], rows[1]).psnr >= 90
    np.testing.assert_array_equal(rows[1], rows[2])


TABLE = np.random.default_rng(0).standard_normal((200, 4)).astype(np.float16)


def tied(head: Array = TABLE) -> Program:
    """Embeddings, a row for the position, and a head."""

    @mb.program(
        input_specs=[mb.TensorSpec((1, 3), types.int32), mb.TensorSpec((1,), types.int32)],
        opset_version=ct.target.iOS18,
    )
    def main(ids: Var, position: Var) -> Var:
        begin = mb.concat(values=(position, np.zeros(1, np.int32)), axis=0)
        row = mb.slice_by_size(x=TABLE[:9], begin=begin, size=np.array([1, 4], np.int32))
        rows = mb.gather(x=TABLE, indices=ids, axis=0)
        return mb.linear(x=mb.add(x=rows, y=row), weight=head, name="logits")

    return main


@pytest.mark.parametrize("most", [64, 128, 200])
def test_embeddings_are_looked_up_in_the_parts_of_the_head(most: int) -> None:
    program = tied()
    cut, _ = apply_pass(SplitHead(most=most), program)
    after, session = apply_pass(PositionFunction(lookup=True), cut)
    assert session.changes
    assert "ids" not in after.functions["main"].inputs
    maker = after.functions["main_inputs"]
    assert maker.inputs.keys() == {"ids", "position"}
    tables = [op.x.shape for op in maker.operations if op.op_type == "gather"]
    assert len(tables) == -(-200 // most)
    assert sum(shape[0] for shape in tables) == 200  # no table beside the parts
    assert index_range(maker.inputs["ids"]) == 200
    for ids in ([0, 63, 64], [199, 127, 128], [65, 1, 198]):
        values = {"ids": np.array([ids], np.int32), "position": np.array([5], np.int32)}
        made = ane.run(after, values, function="main_inputs")
        expected = ane.run(program, values)["logits"]
        assert_close(ane.run(after, made, function="main")["logits"], expected, 1e-5)


def test_packed_embeddings_are_looked_up_in_the_packed_parts() -> None:
    """Tables of 8 bits, with one scale for each row."""
    data, scale = (TABLE * 20).astype(np.int8), np.full((200, 1), 0.05, np.float16)

    @mb.program(
        input_specs=[mb.TensorSpec((1, 3), types.int32), mb.TensorSpec((1,), types.int32)],
        opset_version=ct.target.iOS18,
    )
    def program(ids: Var, position: Var) -> Var:
        table = mb.constexpr_blockwise_shift_scale(data=data, scale=scale)
        row = mb.slice_by_size(
            x=TABLE[:9],
            begin=mb.concat(values=(position, np.zeros(1, np.int32)), axis=0),
            size=np.array([1, 4], np.int32),
        )
        rows = mb.gather(x=table, indices=ids, axis=0)
        return mb.linear(x=mb.add(x=rows, y=row), weight=table, name="logits")

    cut, _ = apply_pass(SplitHead(most=64), program)
    after, _ = apply_pass(PositionFunction(lookup=True), cut)
    lookups = [op for op in after.functions["main_inputs"].operations if op.op_type == "gather"]
    assert sorted(op.x.shape[0] for op in lookups) == [8, 64, 64, 64]
    assert not any(op.op_type == "gather" for op in after.functions["main"].operations)
    values = {"ids": np.array([[0, 130, 199]], np.int32), "position": np.array([5], np.int32)}
    made = ane.run(after, values, function="main_inputs")
    assert_close(ane.run(after, made, function="main")["logits"], ane.run(program, values)["logits"], 1e-5)


def test_a_head_of_its_own_leaves_the_table_whole() -> None:
    cut, _ = apply_pass(SplitHead(most=64), tied(TABLE[::-1].copy()))
    after, _ = apply_pass(PositionFunction(lookup=True), cut)
    (lookup,) = [op for op in after.functions["main_inputs"].operations if op.op_type == "gather"]
    assert lookup.x.shape == (200, 4)
