"""Variants and refusals of `index_casts`, and what coremltools writes before a lookup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, rewrites, table

import anesurgery as ane
from anesurgery.errors import NO_MATCH, Refusal, SurgeryError
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes.index_casts import IndexCasts
from anesurgery.passes.token_id_guard import TokenIdGuard
from anesurgery.rewriting.pattern import Match
from anesurgery.testing import apply_pass


def lookup(rows: int, *dtypes: str) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((1, 4), dtype=types.int32)], opset_version=ct.target.iOS17)
    def program(ids: Var) -> Var:
        for dtype in dtypes:
            ids = mb.cast(x=ids, dtype=dtype)
        table = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
        return mb.gather(x=table, indices=ids, axis=0, name="y")

    return program


class Anyway(IndexCasts):
    """Wrong: whatever the table's length is."""

    def check(self, m: Match) -> Match | Refusal:
        cast = m.indices.op
        rows = int(m.table.shape[0])
        return NO_MATCH if cast is None else m.bind(source=cast.x, low=-rows, length=rows)


def test_the_check_of_sites_catches_a_cast_that_wraps() -> None:
    with pytest.raises(SurgeryError, match="index_casts"):
        apply_pass(Anyway(), lookup(40000, "int16"))


def test_without_the_promise_a_remainder_stays(converted: Callable[..., Any]) -> None:
    surgery = ane.apply(converted("llama").model, [TokenIdGuard(), IndexCasts()], quiet=True)
    assert [op.x.op.x.name for op in walk_ops(surgery.program) if op.op_type == "mod"] == ["input_ids"]


def codes_as_indices() -> Program:
    """Look up at the codes of a quantized value, which are int8."""

    @mb.program(input_specs=[mb.TensorSpec((1, 4))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        codes = mb.quantize(input=x, scale=np.float32(1), output_dtype="int8", name="codes")
        table = np.arange(256, dtype=np.float32).reshape(128, 2)
        return mb.gather(x=table, indices=mb.cast(x=codes, dtype="int32"), axis=0, name="y")

    return program


test_cases, test_surroundings = table(
    IndexCasts(),
    *(
        rewrites(lookup, 9, *dtypes, inputs={"ids": np.array([[0, 8, 3, 1]], np.int32)})
        for dtypes in [("int16",), ("int16", "int32"), ("int16", "int32", "int16")]
    ),
    refuses("%codes is int8, which no gather takes as indices", codes_as_indices),
    refuses("int16 does not hold the indices from -40000 to 39999", lookup, 40000, "int16"),
    *(
        rewrites(lookup, 32000, *dtypes, inputs={"ids": np.array([[0, 31999, 3, 1]], np.int32)})
        for dtypes in [("uint16",), ("int16", "uint16")]
    ),
    refuses("uint16 does not hold the indices from 0 to 69999", lookup, 70000, "uint16"),
)
