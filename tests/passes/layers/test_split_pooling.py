"""`split_pooling`: windows of every size and padding, and what steps cannot make."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from closeness import assert_close
from one_layer import floats
from pass_cases import ignores, refuses, rewrites, table
from two_sided import with_any_batch, with_sizes

import anesurgery as ane
from anesurgery.mil import Array
from anesurgery.neuralnetwork.importing import import_network
from anesurgery.neuralnetwork.making import make_layer, make_network
from anesurgery.passes.layers.pooling import SplitPooling
from anesurgery.placement.rules.layer_rules import POOL_KERNEL, POOL_STRIDE
from anesurgery.testing import apply_pass

STEP = SplitPooling()
Pair = tuple[int, int]


def valid(*pads: int) -> dict[str, Any]:
    """Padding of [top, bottom, left, right]."""
    edges = [{"startEdgeSize": a, "endEdgeSize": b} for a, b in (pads[:2], pads[2:])]
    return {"valid": {"paddingAmounts": {"borderAmounts": edges}}}


def pooled(
    size: Pair, kernel: Pair, stride: Pair, kind: str = "MAX", rank5: bool = False, **padding: Any
) -> Any:
    form = {"kernelSize": kernel, "stride": stride, "type": kind} | (padding or {"valid": {}})
    layers = [make_layer("pooling", ["x"], ["y"], **form)]
    shape = (2, *size) if rank5 else (1, 2, *size)
    return make_network({"x": shape}, layers, ["y"], rank5=rank5)


def both(spec: Any, x: Array) -> tuple[Array, Array, list[str]]:
    """The output before and after, and the kinds after; no pooling is beyond the limits."""
    after, session = apply_pass(STEP, spec)
    assert session.changes, session.refusals
    for layer in after.neuralNetwork.layers:
        p = layer.pooling
        if layer.WhichOneof("layer") == "pooling" and not p.globalPooling:
            assert max(p.kernelSize) <= POOL_KERNEL
            assert max(p.stride) <= POOL_STRIDE
    old, new = (ane.run(import_network(s), {"x": x})["y"] for s in (spec, after))
    assert_close(new, old, rtol=1e-5)
    return old, new, [layer.WhichOneof("layer") for layer in after.neuralNetwork.layers]


def whole(*shape: int) -> Array:
    """Small whole numbers, multiples of 16 so that means over 16 elements are whole too."""
    return 16 * np.random.default_rng(0).integers(-9, 9, shape).astype(np.float32)


@pytest.mark.one_of(60)
@pytest.mark.parametrize(
    ("kernel", "stride"),
    [
        *itertools.product([1, 2, 3, 4, 5, 6, 12, 14, 15, 26, 27], [3, 4, 6, 12]),
        *itertools.product([14, 15, 26, 27], [1, 2]),
    ],
)
def test_maxima_are_bit_exact(kernel: int, stride: int) -> None:
    """Every kernel and stride, with much and little padding, on an axis that they do not divide."""
    for begin, end in {(0, 0), (kernel // 2, kernel // 3), (kernel - 1, kernel - 1), (1, 0)}:
        if max(begin, end) >= kernel:
            continue
        spec = pooled((37, 7), (kernel, 2), (stride, 1), **valid(begin, end, 0, 1))
        old, new, _ = both(spec, floats(1, 2, 37, 7) - 10)  # a zero of the padding would win
        np.testing.assert_array_equal(new, old)


@pytest.mark.one_of(10)
@pytest.mark.parametrize(
    "padding",
    [
        {"same": {}},
        {"same": {"asymmetryMode": "TOP_LEFT_HEAVY"}},
        {"includeLastPixel": {}},
        {"includeLastPixel": {"paddingAmounts": [1, 2]}},
        {"includeLastPixel": {"paddingAmounts": [2, 0]}},
    ],
)
@pytest.mark.parametrize(
    ("size", "kernel", "stride"), [((16, 17), 4, 4), ((17, 7), 7, 3), ((30, 17), 15, 1), ((31, 17), 16, 2)]
)
def test_other_paddings_of_maxima(size: Pair, kernel: int, stride: int, padding: dict[str, Any]) -> None:
    spec = pooled(size, (kernel,) * 2, (stride,) * 2, **padding)
    old, new, _ = both(spec, floats(1, 2, *size) - 10)
    np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("padding", [{"same": {}}, {"includeLastPixel": {}}])
@pytest.mark.parametrize("exclude", [False, True])
def test_means_may_name_a_padding_that_adds_nothing(padding: dict[str, Any], exclude: bool) -> None:
    form = padding | {"avgPoolExcludePadding": exclude}
    spec = pooled((16, 16), (4, 4), (4, 4), "AVERAGE", **form)
    old, new, kinds = both(spec, whole(1, 2, 16, 16))
    assert kinds == ["pooling"] * 2
    np.testing.assert_array_equal(new, old)


EXCLUDED = valid(1, 1, 0, 2) | {"avgPoolExcludePadding": True}
test_cases, test_surroundings = table(
    STEP,
    refuses(
        "it counts or leaves out padding",
        lambda: pooled((2, 2), (4, 4), (4, 4), "AVERAGE", **valid(1, 1, 1, 1)),
        id="one window of a mean with its padding is refused",
    ),
    *(
        rewrites(pooled, size, kernel, stride, kind, rank5, rtol=0 if kind == "MAX" else 1e-5)
        for size, kernel, stride in [
            ((80, 80), (80, 80), (80, 80)),  # global
            ((4, 4), (4, 4), (4, 4)),
            ((5, 14), (5, 14), (1, 1)),
            ((16, 16), (4, 4), (4, 4)),
            ((18, 17), (4, 4), (4, 4)),  # a rest is not read
            ((16, 16), (8, 4), (8, 4)),
            ((52, 26), (26, 13), (2, 1)),
            ((12, 12), (3, 3), (3, 3)),
            ((14, 12), (6, 2), (6, 2)),
            ((14, 14), (13, 13), (5, 1)),
            ((9, 9), (1, 1), (3, 3)),
            ((54, 4), (27, 1), (27, 1)),
            ((9, 9), (2, 3), (1, 4)),
        ]
        for kind in ("MAX", "AVERAGE", "L2")
        for rank5 in (False, True)
    ),
    *(
        refuses(words, pooled, (size, size), (kernel, kernel), (stride, stride), kind, **padding)
        for size, kernel, stride, padding, words in [
            (30, 15, 1, {}, "a kernel of 15 at steps of 1 is not made of windows of at most 13"),
            (90, 29, 29, {}, "a kernel of 29 at steps of 29 is not made of windows"),
            (17, 4, 4, {"same": {}}, "it counts or leaves out padding"),
            (17, 4, 4, valid(1, 1, 1, 1), "it counts or leaves out padding"),
            (18, 4, 4, {"includeLastPixel": {}}, "it counts or leaves out padding"),
        ]
        for kind in ("AVERAGE", "L2")
    ),
    # The second has a window of padding only after the last pixel, as the format's formula says.
    refuses("a window of 3 lies in the padding only", pooled, (16, 16), (3, 3), (3, 3), **valid(3, 0, 0, 0)),
    refuses("a window of 3 lies in the padding only", pooled, (16, 16), (3, 3), (4, 4), includeLastPixel={}),
    rewrites(
        lambda: pooled((2, 2), (4, 4), (4, 4), "AVERAGE", **EXCLUDED),
        rtol=1e-5,
        id="a mean without its padding",
    ),
    refuses(
        "height or width of 'x' is dynamic",
        with_sizes,
        pooled((16, 16), (4, 4), (4, 4)),
        *[(1, 1), (2, 2), (16, 64), (16, 16)],
    ),
    rewrites(
        with_any_batch,
        pooled((18, 16), (12, 4), (12, 4)),
        inputs={"x": np.random.default_rng(0).standard_normal((3, 2, 18, 16)).astype(np.float32)},
        rtol=0,
    ),
    ignores(pooled, (32, 32), (13, 13), (2, 2)),
    ignores(pooled, (32, 32), (), (), valid={}, globalPooling=True),
)
