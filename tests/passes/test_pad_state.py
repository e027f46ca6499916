"""Padded states: wide enough, and a decoder goes on writing what it wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from decoders import cached
from state_programs import EDITED, NESTED, program, read, stream, total, write

from anesurgery.errors import PassError
from anesurgery.interpret.decoding import generate
from anesurgery.mil import Var, mb
from anesurgery.passes.pad_state import PadState
from anesurgery.rewriting.stored_states import shared_shapes
from anesurgery.testing import apply_pass, assert_refuses


def written_in_parts(x: Var, s: Var) -> Var:
    """A row, and then a part of the last axis."""
    row = mb.slice_by_index(x=x, begin=[0, 0], end=[1, 4])
    first = mb.slice_update(x=read(s), update=row, begin=[1, 0], end=[2, 4])
    part = mb.slice_by_index(x=x, begin=[0, 0], end=[2, 2])
    return total(write(s, mb.slice_update(x=first, update=part, begin=[0, 1], end=[2, 3])))


def test_a_decoder_writes_what_it_wrote() -> None:
    program = cached()
    after, session = apply_pass(PadState(), program)
    assert session.changes
    assert generate(after, [3, 1, 4, 1, 5], 19).written == generate(program, [3, 1, 4, 1, 5], 19).written


def test_widths() -> None:
    after, _ = apply_pass(PadState(), cached())
    assert shared_shapes(list(after.functions.values())) == {"cache_0": (4, 2, 24, 32)}
    assert not apply_pass(PadState(), after)[1].changes


def test_refusals() -> None:
    assert_refuses(PadState(), program(written_in_parts), "a write covers a part of the last axis")
    with pytest.raises(PassError, match="multiple=1; it must be an integer of at least 2"):
        PadState(multiple=1)


@pytest.mark.parametrize("body", EDITED)
def test_a_stream_goes_on(body: Callable[..., Any]) -> None:
    before = program(body)
    after, session = apply_pass(PadState(), before)
    assert session.changes
    assert shared_shapes(list(after.functions.values())) == {"s": (2, 32)}
    for wanted, given in zip(stream(before), stream(after), strict=True):
        assert wanted.keys() == given.keys()
        assert all(np.array_equal(wanted[n], given[n]) for n in wanted)


@pytest.mark.parametrize("body", NESTED)
def test_refuses_states_inside_of_branches_and_loops(body: Callable[..., Any]) -> None:
    assert_refuses(PadState(), program(body), "the state s is used inside a")
