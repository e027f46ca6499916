"""`spread_channels`: gates of one pixel, on either side, in both mappings; nothing else is touched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from two_sided import Shape, kinds_after, two, with_any_batch, with_constant

import anesurgery as ane
from anesurgery.passes.layers.windows import SpreadChannels
from anesurgery.testing import apply_pass, assert_refuses

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


def test_an_unknown_size_is_refused() -> None:
    spec = with_any_batch(two("multiply", (1, 3, 4, 5), (1, 3, 1, 1)))
    assert_refuses(STEP, spec, "dynamic")


@pytest.mark.slow
def test_the_gates_of_a_real_network(corpus: Path) -> None:
    done = ane.apply(corpus / "sinet_portrait_seg.mlmodel", "spread_channels", prove="both", quiet=True)
    assert len(done.changes) == 2
    assert done.proof is not None
    assert done.proof.psnr == float("inf")
