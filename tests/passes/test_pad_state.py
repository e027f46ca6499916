"""Padded states: wide enough, and a decoder goes on writing what it wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from decoders import cached
from pass_cases import refuses, table
from state_programs import EDITED, NESTED, program, read, stream, total, write

from anesurgery.interpret.decoding import generate
from anesurgery.mil import Var, mb
from anesurgery.passes.pad_state import PadState
from anesurgery.rewriting.stored_states import shared_shapes
from anesurgery.testing import apply_pass


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


@pytest.mark.parametrize("body", EDITED)
def test_a_stream_goes_on(body: Callable[..., Any]) -> None:
    before = program(body)
    after, session = apply_pass(PadState(), before)
    assert session.changes
    assert shared_shapes(list(after.functions.values())) == {"s": (2, 32)}
    for wanted, given in zip(stream(before), stream(after), strict=True):
        assert wanted.keys() == given.keys()
        assert all(np.array_equal(wanted[n], given[n]) for n in wanted)


test_cases, test_surroundings = table(
    PadState(),
    refuses("a write covers a part of the last axis", program, written_in_parts),
    *(refuses("the state s is used inside a", program, body) for body in NESTED),
)
