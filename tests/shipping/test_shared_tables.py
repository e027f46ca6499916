"""Tables that begin longer ones are cut from them, and no others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anesurgery.interpret import run
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.shipping.shared_tables import share_tables

LONG = np.random.default_rng(0).standard_normal((1, 64, 16)).astype(np.float32)
CHANGED = LONG[:, :32].copy()
CHANGED[0, 31, 15] = np.nextafter(CHANGED[0, 31, 15], np.float32(9))


def added(table: Any) -> Program:
    @mb.program(input_specs=[mb.TensorSpec(table.shape, dtype=types.fp32)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        return mb.add(x=x, y=table, name="y")

    return program


CASES = {
    "its beginning": (LONG[:, :32], 32 * 16 * 4),
    "its end": (LONG[:, 32:], 0),
    "one bit changed": (CHANGED, 0),
    "less than a slice is worth": (LONG[:, :4], 0),
    "the same table": (LONG.copy(), 0),
}


@pytest.mark.parametrize("case", CASES)
def test_a_table(case: str) -> None:
    table, saved = CASES[case]
    short, long = added(table), added(LONG)
    functions = {name: p.functions["main"] for name, p in (("short", short), ("long", long))}
    assert share_tables(functions) == {"short": saved}
    assert ("slice_by_index" in {op.op_type for op in functions["short"].operations}) == (saved > 0)
    x = np.ones(table.shape, np.float32)
    np.testing.assert_array_equal(run(short, {"x": x})["y"], 1 + table)
