"""`llm_ane`: the one line from a stateless decoder to one that writes with a cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import Decoder as Small

import anesurgery as ane
from anesurgery import recipes
from anesurgery.checking.output_comparison import compare_arrays
from anesurgery.errors import InterpretError, PassError, SurgeryError
from anesurgery.interpret import Predictor
from anesurgery.mil import Program, Var, ct, mb, types


@pytest.mark.slow
@pytest.mark.parametrize("target", [None, "M1/macOS 15", "A17/iOS 18"])
def test_it_keeps_the_cache_on_every_target(target: str | None) -> None:
    program = Small(half=True, mask="selected", heads=2, width=32, words=64).program()
    recipe = recipes.llm_ane.with_options(prefill=4)
    surgery = ane.apply(program, recipe, target=target, prove="model", quiet=True)
    assert set(surgery.program.functions) == {"prefill", "decode", "prefill_inputs", "decode_inputs"}
    assert surgery.proof is not None
    assert surgery.proof.psnr > 60


def test_a_converted_model(converted: Callable[..., Any], tmp_path: Path) -> None:
    model = converted("llama", attn="sdpa", target="iOS18").model
    made = recipes.llm_ane(model, context=12, target="M4/macOS 15", quiet=True)
    made.save(str(tmp_path / "llm.mlpackage"))
    assert ane.generate(made, [5, 6, 7], 9).written == ane.generate(model, [5, 6, 7], 9).written


@pytest.mark.slow
def test_with_an_attention_mask(converted: Callable[..., Any]) -> None:
    model = converted("llama", mask=True, target="iOS18", precision="fp32")
    made = recipes.llm_ane(model.model, fixed={"attention_mask": 1}, prefill=4, quiet=True)
    ids = model.inputs["input_ids"]
    ones = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    (expected,) = ane.run(model.model, ones).values()
    found = ane.interpret.decoding.Decoder(made).feed(ids)
    assert compare_arrays("logits", expected[0], found).psnr >= 90


def test_it_fails_where_there_is_no_cache() -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 8), types.int32)], opset_version=ct.target.iOS18)
    def program(ids: Var) -> Var:
        x = mb.gather(x=np.eye(5, 4, dtype=np.float16), indices=ids, axis=0)
        mask = np.triu(np.full((8, 8), -1e4, np.float16), 1)
        shares = mb.softmax(x=mb.add(x=mb.matmul(x=x, y=x, transpose_y=True), y=mask))
        return mb.cumsum(x=mb.matmul(x=shares, y=x), axis=1, name="running")

    with pytest.raises(PassError, match="running: it mixes tokens"):
        recipes.llm_ane(program, quiet=True)
    encoder: Program = Small(mask="none", positions="learned").program()
    with pytest.raises(SurgeryError, match="as in an encoder"):
        recipes.llm_ane(encoder, quiet=True)


def test_bad_input_is_an_error_in_words() -> None:
    program = Small(half=True, layers=1).program()
    with pytest.raises(PassError, match="context=25 is longer than the 24 positions of the model"):
        recipes.llm_ane(program, context=25, quiet=True)
    recipe = recipes.llm_ane.with_options(prefill=4, context=16, position_function=False)
    made = ane.apply(program, recipe, quiet=True).program
    with pytest.raises(InterpretError, match="17 tokens and 1 step do not fit into the context of 16"):
        ane.generate(made, [1] * 17, 1)
    decode = Predictor(made, function="decode")
    step = {"ids": np.array([[3]], np.int32), "position": [5]}
    with pytest.raises(
        InterpretError, match="position is 5, but the state holds no tokens yet: first read those before"
    ):
        decode(step, state=decode.make_state())
    longer = recipes.llm_ane.with_options(position_function=False)
    other = ane.apply(Small(half=True, layers=2).program(), longer, quiet=True).program
    with pytest.raises(InterpretError, match="the state is of another model"):
        decode(step, state=Predictor(other, function="decode").make_state())
    state = decode.make_state()
    prefill = Predictor(made, function="prefill")
    prefill({"ids": np.array([[1, 2, 3, 4]], np.int32), "position": [0]}, state=state)
    assert decode({**step, "position": [4]}, state=state)
