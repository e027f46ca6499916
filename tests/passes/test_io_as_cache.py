"""Caches that were handed in and out become states: a decoder goes on writing what it wrote."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from decoders import Decoder

from anesurgery.checking.comparison import compare
from anesurgery.errors import UnknownName
from anesurgery.interpret.decoding import generate
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.add_cache import AddCache
from anesurgery.passes.cache_as_io import CacheAsIo
from anesurgery.passes.io_as_cache import IoAsCache
from anesurgery.rewriting.stored_states import shared_shapes
from anesurgery.testing import apply_pass, assert_refuses


@pytest.mark.slow
def test_a_decoder_writes_what_it_wrote() -> None:
    program, _ = apply_pass(AddCache(prefill=4, cache="io"), Decoder(half=True).program())
    after, session = apply_pass(IoAsCache(), program)
    assert session.changes
    assert list(shared_shapes(list(after.functions.values()))) == ["cache_0"]
    assert generate(after, [3, 1, 4, 1, 5], 19).written == generate(program, [3, 1, 4, 1, 5], 19).written


def test_each_slice_is_written_to_the_state_at_once() -> None:
    """No slice_update is read by another op, which would keep it off the engine."""
    program, _ = apply_pass(AddCache(prefill=4, cache="io"), Decoder(half=True).program())
    after, _ = apply_pass(IoAsCache(), program)
    updates = [op for f in after.functions.values() for op in walk_ops(f) if op.op_type == "slice_update"]
    assert len(updates) == 8
    for op in updates:
        assert [r.op_type for r in op.outputs[0].child_ops] == ["coreml_update_state"]
        assert op.x.op.op_type in ("read_state", "coreml_update_state")


def two(held: Any = types.fp16) -> Program:
    specs = [mb.TensorSpec((2, 4), held), mb.TensorSpec((2, 4), types.fp16), mb.TensorSpec((2, 4), types.fp16)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(k: Var, v: Var, x: Var) -> Any:
        new = mb.cast(x=mb.add(x=mb.cast(x=k, dtype="fp16"), y=x), dtype="fp16", name="k_out")
        kept = mb.mul(x=v, y=x, name="kept")
        return mb.add(x=new, y=kept, name="y"), new, kept

    return program


def test_the_first_call_begins_with_what_was_given() -> None:
    program = two()
    after, session = apply_pass(IoAsCache(pairs={"k": "k_out", "v": "kept"}), program)
    assert sorted(shared_shapes(list(after.functions.values()))) == ["k", "v"]
    assert [v.name for v in after.functions["main"].outputs] == ["y"]
    values = {
        n: np.random.default_rng(i).standard_normal((2, 4)).astype(np.float16) for i, n in enumerate("kvx")
    }
    assert compare(program, after, values, contract=session.contract, gate=120).ok


def test_and_back_again() -> None:
    program = two()
    after, _ = apply_pass(IoAsCache(), program)
    again, _ = apply_pass(CacheAsIo(), after)
    assert list(again.functions["main"].inputs) == ["k", "v", "x"]
    assert [v.name for v in again.functions["main"].outputs] == ["y", "kept", "k_out"]


def test_refusals() -> None:
    assert_refuses(IoAsCache(), Decoder(half=True).program(), "no input comes back as an output: ids")
    assert_refuses(IoAsCache(), two(types.fp32), "%k is fp32 and %k_out is fp16; states hold fp16")
    assert_refuses(IoAsCache(), Decoder(opset=ct.target.iOS17).program(), "states came with iOS 18")
    with pytest.raises(UnknownName, match="unknown output 'kep'; did you mean 'kept'"):
        apply_pass(IoAsCache(pairs={"v": "kep"}), two())
