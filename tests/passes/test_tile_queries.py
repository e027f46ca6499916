"""Blocks of queries: of each form of attention, with masks of every shape, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from pass_cases import ignores, refuses, table

from anesurgery.checking.grades import Grade
from anesurgery.errors import PassError
from anesurgery.mil import Program, Var, ct, mb, walk_ops
from anesurgery.passes.split_heads import SplitHeads
from anesurgery.passes.tile_queries import TileQueries
from anesurgery.rewriting.passes import Pipeline
from anesurgery.testing import apply_pass, assert_same_numbers

RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return RNG.standard_normal(shape).astype(np.float32)


def kinds(program: Program) -> Counter[str]:
    return Counter(op.op_type for op in walk_ops(program) if op.op_type != "const")


def attention(mask: tuple[int, ...], tokens: int = 10, dynamic: bool = False) -> Program:
    """Two heads of four channels; queries, keys and values are one value."""
    specs = [mb.TensorSpec((1, 2, tokens, 4)), mb.TensorSpec(mask)]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS17)
    def program(x: Var, mask: Var) -> Var:
        scores = mb.matmul(x=x, y=x, transpose_y=True)
        scores = mb.add(x=scores, y=mask if dynamic else floats(*mask.shape))
        return mb.matmul(x=mb.softmax(x=scores, axis=-1), y=x)

    return program


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("mask", [(10, 10), (1, 1, 1, 10), (2, 10, 10), (1, 2, 10, 1), (10,)])
def test_masks_of_every_shape(mask: tuple[int, ...], dynamic: bool) -> None:
    program = attention(mask, dynamic=dynamic)
    after, session = apply_pass(TileQueries(block=4), program)
    assert [c.proof.grade for c in session.changes if c.proof] == [Grade.BITS]
    assert kinds(after)["softmax"] == 3
    assert_same_numbers(program, after, rtol=1e-6)


def test_after_split_heads() -> None:
    steps = Pipeline(steps=(TileQueries(block=4), SplitHeads()))
    after, session = apply_pass(steps, program := attention((10, 10)))
    assert [c.pass_name for c in session.changes] == ["split_heads", "tile_queries", "tile_queries"]
    assert (kinds(after)["einsum"], kinds(after)["softmax"]) == (12, 6)
    assert all(c.proof and c.proof.grade >= Grade.PROVED for c in session.changes)
    assert_same_numbers(program, after, rtol=1e-5)


def test_a_block_of_nothing_is_an_error() -> None:
    with pytest.raises(PassError, match="it must be a positive integer"):
        TileQueries(block=0)


def refuses_weights_that_are_read_elsewhere() -> Program:
    @mb.program(input_specs=[mb.TensorSpec((1, 2, 10, 4))])
    def program(x: Var) -> tuple[Var, Var]:
        weights = mb.softmax(x=mb.matmul(x=x, y=x, transpose_y=True), axis=-1, name="weights")
        return mb.matmul(x=weights, y=x), weights

    return program


def refuses_other_einsums() -> Program:
    @mb.program(input_specs=[mb.TensorSpec((1, 10, 2, 4)), mb.TensorSpec((1, 10, 2, 4))])
    def program(x: Var, y: Var) -> Var:
        scores = mb.einsum(values=(x, mb.transpose(x=y, perm=[0, 3, 2, 1])), equation="nchw,nwhu->nchu")
        return mb.einsum(values=(mb.softmax(x=scores, axis=-1), x), equation="nchw,nwhu->nchu")

    return program


test_cases, test_surroundings = table(
    TileQueries(block=4),
    refuses("%weights is read elsewhere", refuses_weights_that_are_read_elsewhere),
    refuses("einsums nchw,nwhu->nchu", refuses_other_einsums),
    ignores(attention, (10, 10), step=TileQueries(block=10)),
)
