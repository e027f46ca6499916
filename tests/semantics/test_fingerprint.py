"""Edits are one computation where ops, shapes and constants are the same, wherever these lie."""

from __future__ import annotations

import gc
from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
from both_sides import side_by_side

from anesurgery.mil import Array, Var, mb, types
from anesurgery.semantics import fingerprint as module
from anesurgery.semantics.fingerprint import fingerprint


def of_added(table: Array) -> Hashable:
    """The fingerprint of adding a table; the program is gone afterwards."""
    return of(lambda x: mb.add(x=x, y=table), (2, 4))


def of(body: Any, shape: tuple[int, ...]) -> Hashable:
    program, olds, news, made = side_by_side(body, lambda x: mb.identity(x=x), (types.fp32, shape))
    old = [op for op in program.functions["main"].operations if op not in set(made)]
    return fingerprint(list(zip(olds, news, strict=True)), old, made)


def test_a_large_constant_is_not_one_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INLINE", 0)
    found = []
    for i in range(12):
        found.append(of_added(np.full((2, 4), i, np.float32)))
        gc.collect()
    assert len(set(found)) == 12


def test_equal_small_constants_are_one() -> None:
    one, other = (of_added(np.arange(8, dtype=np.float32).reshape(2, 4)) for _ in range(2))
    assert one == other != of_added(np.zeros((2, 4), np.float32))


@pytest.mark.parametrize("other", [2.0, 3.0])
def test_nested_blocks_are_known_by_what_they_hold(other: float) -> None:
    def branches(number: float) -> Any:
        def body(x: Var) -> Var:
            some = mb.greater(x=mb.reduce_max(x=x, keep_dims=False), y=np.float32(0))
            made: Var = mb.cond(
                pred=some,
                _true_fn=lambda: mb.mul(x=x, y=np.float32(number)),
                _false_fn=lambda: mb.identity(x=x),
            )
            return made

        return body

    assert (of(branches(2.0), (2, 4)) == of(branches(other), (2, 4))) == (other == 2.0)
