"""States as inputs and outputs: a decoder goes on writing what it wrote."""

from __future__ import annotations

import pytest
from decoders import Decoder, cached

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
