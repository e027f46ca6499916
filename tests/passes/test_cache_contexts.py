"""Functions for smaller contexts share weights and cache with the largest, and are used where they fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import Decoder as Small

from anesurgery.checking.comparison import compare
from anesurgery.checking.output_comparison import compare_arrays
from anesurgery.errors import PassError
from anesurgery.interpret.decoder_calls import Call
from anesurgery.interpret.decoding import Decoder
from anesurgery.mil import Program
from anesurgery.passes.add_cache import AddCache
from anesurgery.passes.position_function import PositionFunction
from anesurgery.surgery import apply

PARTS = [3, 4, 9, 10, 11, 13, 20]
"""Calls end there: within 8 tokens, across 8, within 12 and beyond."""
SPELLINGS = {
    "rotary": Small(),
    "any bias": Small(mask="given", positions="none"),
    "window then whole": Small(tokens=80, mask="windows"),
}


def steps(**options: Any) -> list[Any]:
    """The passes that add a cache with contexts of 8 and 12 besides the whole."""
    added = AddCache(**{"contexts": (8, 12), "prefill": 5, "required": True, **options})
    return [added, PositionFunction()] if added.writes == "blend" else [added]


def contexts(program: Program) -> Program:
    return apply(program, steps(), prove=None, quiet=True).program


def rows(model: Any, count: int) -> Any:
    """The logits of tokens that are read in calls of several lengths, with the functions that were called."""
    ids = np.random.default_rng(0).integers(0, 31, count)
    decoder, called = Decoder(model), list[str]()
    run = decoder._run

    def noted(call: Call, *rest: Any, **more: Any) -> Any:
        called.append(call.name)
        return run(call, *rest, **more)

    decoder._run = noted  # type: ignore[method-assign]
    found = np.concatenate([decoder.feed(part) for part in np.split(ids, PARTS)])
    return found, called


@pytest.mark.one_of(6)
@pytest.mark.parametrize(
    ("spelling", "writes", "cache"),
    [
        *((name, "blend", "state") for name in SPELLINGS),
        ("any bias", "slice", "state"),
        ("rotary", "slice", "io"),
        ("rotary", "blend", "io"),
    ],
)
def test_the_smallest_that_fits_gives_what_the_whole_gives(spelling: str, writes: str, cache: str) -> None:
    small = SPELLINGS[spelling]
    program = small.program()
    made = apply(program, steps(writes=writes, cache=cache), prove=None, quiet=True)
    expected, _ = rows(program, small.tokens)
    found, called = rows(made.program, small.tokens)
    assert compare_arrays("logits", expected, found).psnr > 110
    assert called[:3] == ["prefill_8", "decode_8", "prefill_12"]  # 3 tokens, the 4th, and 5 that end at 9
    assert {"decode_12", "prefill"} <= set(called)
    assert compare(program, made.program, contract=made.contract, gate=110).ok


@pytest.mark.slow
def test_a_function_that_is_too_small_is_not_called() -> None:
    """Its context is what its masks reach, whatever it is named."""
    made = contexts(Small().program())
    assert [(c.name, c.context) for c in Decoder(made).calls[:3]] == [
        ("decode_8", 8),
        ("decode_12", 12),
        ("decode", 24),
    ]
    assert Decoder(made).context == 24


@pytest.mark.slow
def test_weights_are_stored_once(tmp_path: Path) -> None:
    size = {}
    for name, more in (("one", ()), ("three", (8, 12))):
        made = apply(
            Small(heads=16, width=16, half=True, words=2000).program(), steps(contexts=more), prove=None
        )
        made.save(tmp_path / f"{name}.mlpackage")
        weights = list((tmp_path / f"{name}.mlpackage").rglob("weight.bin"))
        size[name] = sum(file.stat().st_size for file in weights)
    assert size["three"] < 1.01 * size["one"]


@pytest.mark.parametrize("given", [(24,), (8, 30)])
def test_contexts_that_are_not_smaller_are_an_error(given: tuple[int, ...]) -> None:
    with pytest.raises(PassError, match="must be smaller than the context of 24"):
        apply(Small().program(), steps(contexts=given), prove=None, quiet=True)


def test_contexts_are_numbers() -> None:
    with pytest.raises(PassError, match="positive integers"):
        AddCache(contexts=(0,))
