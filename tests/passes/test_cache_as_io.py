"""States as inputs and outputs: a decoder goes on writing what it wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from decoders import Decoder, cached
from pass_cases import refuses, table
from state_programs import EDITED, NESTED, program, stream, stream_of_inputs, streaming

from anesurgery.errors import UnknownName
from anesurgery.interpret.decoding import generate
from anesurgery.passes.cache_as_io import CacheAsIo
from anesurgery.rewriting.stored_states import shared_shapes
from anesurgery.testing import apply_pass, assert_refuses


def test_a_decoder_writes_what_it_wrote() -> None:
    program = cached()
    after, session = apply_pass(CacheAsIo(), program)
    assert session.changes
    assert shared_shapes(list(after.functions.values())) == {}
    assert generate(after, [3, 1, 4, 1, 5], 19).written == generate(program, [3, 1, 4, 1, 5], 19).written


def test_refusals() -> None:
    assert_refuses(CacheAsIo(), Decoder(half=True).program(), "the model has no states")
    with pytest.raises(UnknownName, match="unknown state 'cache_1'; did you mean 'cache_0'"):
        apply_pass(CacheAsIo(states=("cache_1",)), cached())


@pytest.mark.parametrize("body", EDITED)
def test_a_stream_goes_on(body: Callable[..., Any]) -> None:
    before = program(body)
    after, session = apply_pass(CacheAsIo(), before)
    assert session.changes
    assert shared_shapes(list(after.functions.values())) == {}
    for wanted, given in zip(stream(before), stream_of_inputs(after), strict=True):
        assert wanted.keys() == given.keys()
        assert all(np.array_equal(wanted[n], given[n]) for n in wanted)


@pytest.mark.parametrize("body", EDITED[:6])
def test_functions_that_share_a_state(body: Callable[..., Any]) -> None:
    before = program(streaming)
    before.add_function("other", program(body).functions["main"])
    after, _ = apply_pass(CacheAsIo(), before)
    for name in ("main", "other"):
        for wanted, given in zip(stream(before, name), stream_of_inputs(after, name), strict=True):
            assert all(np.array_equal(wanted[n], given[n]) for n in wanted)


test_cases, test_surroundings = table(
    CacheAsIo(), *(refuses("the state s is used inside a", program, body) for body in NESTED)
)
