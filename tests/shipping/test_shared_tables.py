"""Tables that begin longer ones are cut from them, and no others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anesurgery.interpret import run
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.shipping.position_tables import share_tables

LONG = np.random.default_rng(0).standard_normal((1, 64, 16)).astype(np.float32)
CHANGED = LONG[:, :32].copy()
CHANGED[0, 31, 15] = np.nextafter(CHANGED[0, 31, 15], np.float32(9))


def added(table: Any, *more: Any) -> Program:
    """A sum of a table, and of the means of others."""

    @mb.program(input_specs=[mb.TensorSpec(table.shape, dtype=types.fp32)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        y = mb.add(x=x, y=table, name="y")
        for other in more:
            y = mb.add(x=y, y=mb.reduce_mean(x=mb.add(x=mb.reduce_sum(x=x), y=other)))
        return mb.identity(x=y, name="z")

    return program


CASES = {
    "its beginning": (LONG[:, :32], 32 * 16 * 4),
    "its end": (LONG[:, 32:], 0),
    "one bit changed": (CHANGED, 0),
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
    np.testing.assert_array_equal(run(short, {"x": x})["z"], 1 + table)


WIDE = np.random.default_rng(1).standard_normal((64, 512)).astype(np.float32)


@pytest.mark.parametrize(
    ("short", "long", "saved"),
    [
        ((LONG[:, :4],), (LONG,), 256),
        ((LONG[:, :4], WIDE), (LONG, WIDE), 0),
        ((LONG[:, :4], WIDE[:4, :8], LONG[:, :12]), (LONG, WIDE[:8], LONG), 768 + 256),
        ((LONG[:, :4], WIDE[:2, :16], LONG[:, :12]), (LONG, WIDE[:16], LONG), 768),
    ],
    ids=["a small model", "a larger one", "all but one", "the largest is enough"],
)
def test_small_tables_are_cut_where_they_count(
    short: tuple[Any, ...], long: tuple[Any, ...], saved: int
) -> None:
    """The largest first, until what is stored for the short size is 2 % of the weights of the long one."""
    functions = {"short": added(*short), "long": added(*long)}
    assert share_tables({n: p.functions["main"] for n, p in functions.items()}) == {"short": saved}
