"""Embeddings, cosines and sines that are inputs: `generate` looks them up, with a cache and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import Decoder as Small

import anesurgery as ane
from anesurgery.checking.output_comparison import compare_arrays
from anesurgery.errors import InterpretError, PassError
from anesurgery.interpret.decoding import Decoder, generate
from anesurgery.mil import Array, Program, Var, ct, mb, types
from anesurgery.passes.add_cache import AddCache
from anesurgery.passes.embedding_matmul import EmbeddingMatmul
from anesurgery.passes.rotary_tables import RotaryTables
from anesurgery.testing import apply_pass, assert_refuses, reasons

ROWS = RotaryTables(form="inputs")
STEPS: dict[str, tuple[Any, ...]] = {
    "rows": (ROWS,),
    "rows and a cache": (ROWS, AddCache(prefill=5)),
    "rows and a shorter cache in inputs": (ROWS, AddCache(prefill=5, context=21, cache="io")),
    "embeddings": (EmbeddingMatmul(mode="input"),),
    "embeddings, rows and a cache": (EmbeddingMatmul(mode="input"), ROWS, AddCache(prefill=5)),
}
SHAPES = {"usual": Small(), "as many tokens as numbers of a head": Small(tokens=24, width=24, layers=1)}


@pytest.mark.quick_cases(
    "rows-as many tokens as numbers of a head",
    "rows and a cache-as many tokens as numbers of a head",
    "rows and a shorter cache in inputs-as many tokens as numbers of a head",
    "embeddings-usual",
    "embeddings, rows and a cache-usual",
)
@pytest.mark.one_of(6)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", STEPS)
def test_rows_are_looked_up(name: str, shape: str, tmp_path: Path) -> None:
    program = SHAPES[shape].program()
    surgery = ane.apply(program, STEPS[name], prove="model", quiet=True)
    saved = surgery.save(tmp_path / "made.mlpackage")
    prompt = [3, 1, 4, 1, 5, 9]
    expected = generate(program, prompt, 16).written
    assert generate(saved, prompt, 16).written == expected
    assert generate(surgery.program, prompt, 16, tables=surgery.artifacts).written == expected


def test_a_table_that_is_off_by_one_would_be_found() -> None:
    program = Small().program()
    surgery = ane.apply(program, STEPS["rows and a cache"], quiet=True)
    expected = Decoder(program).feed(range(20))
    for shift, same in ((0, True), (1, False)):
        tables = {name: np.roll(rows, shift, 0) for name, rows in surgery.artifacts.items()}
        found = Decoder(surgery.program, tables=tables).feed(range(20))
        assert (compare_arrays("logits", expected, found).psnr >= 90) == same


def test_tables_may_have_the_axes_of_the_input() -> None:
    surgery = ane.apply(Small().program(), STEPS["rows and a cache"], quiet=True)
    turned = {name: rows[None, None] for name, rows in surgery.artifacts.items()}
    found, expected = (
        Decoder(surgery.program, tables=tables).feed([1, 2, 3]) for tables in (turned, surgery.artifacts)
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_a_missing_table_is_an_error_in_words(tmp_path: Path) -> None:
    surgery = ane.apply(Small().program(), STEPS["embeddings, rows and a cache"], quiet=True)
    with pytest.raises(InterpretError, match=r"ids_embeds needs a table with a row for each token: give it as"):
        generate(surgery.program, [1], 2)
    saved = surgery.save(tmp_path / "made.mlpackage")
    (tmp_path / "made.cos.npy").unlink()
    with pytest.raises(InterpretError, match=r"cos needs a table .* each position.*there is no made.cos.npy"):
        generate(saved, [1], 2)
    wrong = {**surgery.artifacts, "sin": np.ones((24, 3))}
    with pytest.raises(InterpretError, match=r"the table of sin has the shape \(24, 3\); the input"):
        generate(surgery.program, [1], 2, tables=wrong)
    with pytest.raises(InterpretError, match="31 is no token of the model; tokens are from 0 to 30"):
        generate(surgery.program, [31], 2, tables=surgery.artifacts)


def test_a_short_table_ends_the_context() -> None:
    surgery = ane.apply(Small().program(), STEPS["rows and a cache"], quiet=True)
    short = {name: rows[:9] for name, rows in surgery.artifacts.items()}
    with pytest.raises(InterpretError, match="8 tokens and 3 steps do not fit into the context of 9"):
        generate(surgery.program, [1] * 8, 3, tables=short)
    assert generate(surgery.program, [1] * 8, 2, tables=short).written


def given_rows(make: Callable[[Var, Var], Var], second: Any = None) -> Program:
    """A model of 8 tokens with a second input."""
    specs = [mb.TensorSpec((1, 8), types.int32), second or mb.TensorSpec((1, 8, 4))]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(ids: Var, more: Var) -> Var:
        x = mb.gather(x=np.eye(8, 4, dtype=np.float32), indices=ids, axis=0)
        x = make(x, more)
        mask = np.triu(np.full((8, 8), -1e4, np.float32), 1)
        weights = mb.softmax(x=mb.add(x=mb.matmul(x=x, y=x, transpose_y=True), y=mask))
        return mb.matmul(x=weights, y=x, name="y")

    return program


def test_embeddings_may_be_what_is_kept() -> None:
    program = given_rows(lambda x, more: x)
    steps = [EmbeddingMatmul(mode="input"), AddCache(prefill=3, cache="io", fixed={"more": 0})]
    surgery = ane.apply(program, steps, quiet=True)
    ids = np.arange(8, dtype=np.int32)[None]
    (expected,) = ane.run(program, {"ids": ids, "more": np.zeros((1, 8, 4), np.float32)}).values()
    found = Decoder(surgery.program, tables=surgery.artifacts).feed(ids)
    assert compare_arrays("y", expected[0], found).psnr >= 90


def test_an_input_that_sees_other_positions_is_refused() -> None:
    program = given_rows(lambda x, more: mb.add(x=x, y=mb.reduce_mean(x=more, axes=[1], keep_dims=True)))
    assert_refuses(AddCache(), program, "There are %ids, %more; make the others constants by `fixed`")
    (reason,) = reasons(apply_pass(AddCache(), program)[1])
    assert "it mixes tokens" in reason


def test_positions_that_are_an_input_become_constants() -> None:
    def learned(x: Var, places: Var) -> Var:
        table: Array = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
        return mb.add(x=x, y=mb.gather(x=table, indices=places, axis=0))

    program = given_rows(learned, mb.TensorSpec((1, 8), types.int32))
    assert_refuses(AddCache(), program, "which input holds the tokens? There are %ids, %more")
    after, session = apply_pass(AddCache(prefill=3, fixed={"more": range(8)}), program)
    assert session.changes
    ids = np.arange(8, dtype=np.int32)[None]
    (expected,) = ane.run(program, {"ids": ids, "more": ids}).values()
    assert compare_arrays("y", expected[0], Decoder(after).feed(ids)).psnr >= 90
    for wrong in (range(7), "all", 0.5):
        with pytest.raises(PassError, match="fixed gives %more"):
            apply_pass(AddCache(fixed={"more": wrong}), program)


def test_an_encoder_does_not_write() -> None:
    encoder, decoder = (Small(mask=mask, layers=1).program() for mask in ("none", "added"))
    assert generate(decoder, [1, 2, 3], 2).written
    with pytest.raises(InterpretError, match="is no causal decoder: with other tokens after these"):
        generate(encoder, [1, 2, 3], 2)
