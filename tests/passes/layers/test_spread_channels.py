"""`spread_channels`: gates of one pixel, on either side, in both mappings; nothing else is touched."""

from __future__ import annotations

import numpy as np
import pytest
from pass_cases import refuses, table
from two_sided import Shape, kinds_after, two, with_any_batch, with_constant

from anesurgery.passes.layers.windows import SpreadChannels
from anesurgery.testing import apply_pass

STEP = SpreadChannels()


@pytest.mark.parametrize(
    ("x", "z", "rank5"),
    [
        ((1, 3, 4, 5), (1, 3, 1, 1), False),
        ((1, 3, 1, 1), (1, 3, 4, 5), False),
        ((2, 3, 4, 1), (2, 3, 1, 1), False),
        ((3, 4, 5), (3, 1, 1), False),
        ((3, 4, 5), (3, 1, 1), True),
    ],
)
def test_gates(x: Shape, z: Shape, rank5: bool) -> None:
    assert kinds_after(STEP, two("multiply", x, z, rank5)) == ["padding", "multiply"]


@pytest.mark.parametrize(
    ("x", "z"),
    [
        ((1, 3, 4, 5), (1, 3, 4, 5)),
        ((1, 3, 4, 5), (1, 1, 1, 1)),
        ((1, 3, 1, 1), (1, 3, 1, 1)),
        ((1, 3, 4, 5), (1, 1, 4, 5)),
    ],
)
def test_does_not_apply_to_other_products(x: Shape, z: Shape) -> None:
    spec = two("multiply", x, z)
    after, session = apply_pass(STEP, spec)
    assert after == spec
    assert not session.refusals


def test_a_constant_side_is_left_to_another_pass() -> None:
    spec = with_constant("multiply", (3, 4, 5), np.arange(3, dtype=np.float32).reshape(3, 1, 1))
    assert apply_pass(STEP, spec)[0] == spec


test_cases, test_surroundings = table(
    STEP, refuses("dynamic", with_any_batch, two("multiply", (1, 3, 4, 5), (1, 3, 1, 1)))
)
