"""`split_pooling`: windows of every size and padding, and what steps cannot make."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from closeness import assert_close
from one_layer import floats
from pass_cases import refuses, table
from two_sided import with_any_batch

import anesurgery as ane
from anesurgery.mil import Array
from anesurgery.neuralnetwork.importing import import_network
from anesurgery.neuralnetwork.making import make_layer, make_network
from anesurgery.passes.layers.windows import SplitPooling
from anesurgery.placement.rules.layer_rules import POOL_KERNEL, POOL_STRIDE
from anesurgery.testing import apply_pass, assert_refuses

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


@pytest.mark.one_of(20)
@pytest.mark.parametrize("rank5", [False, True])
@pytest.mark.parametrize("kind", ["MAX", "AVERAGE", "L2"])
@pytest.mark.parametrize(
    ("size", "kernel", "stride", "kinds"),
    [
        ((80, 80), (80, 80), (80, 80), ["pooling"]),  # global
        ((4, 4), (4, 4), (4, 4), ["pooling"]),
        ((5, 14), (5, 14), (1, 1), ["pooling"]),
        ((16, 16), (4, 4), (4, 4), ["pooling"] * 2),
        ((18, 17), (4, 4), (4, 4), ["pooling"] * 2),  # a rest is not read
        ((16, 16), (8, 4), (8, 4), ["pooling"] * 3),
        ((52, 26), (26, 13), (2, 1), ["pooling"] * 2),
        ((12, 12), (3, 3), (3, 3), ["pooling", "slice", "slice"]),
        ((14, 12), (6, 2), (6, 2), ["pooling", "pooling", "slice"]),
        ((14, 14), (13, 13), (5, 1), ["pooling", "slice"]),
        ((9, 9), (1, 1), (3, 3), None),
        ((54, 4), (27, 1), (27, 1), ["pooling", "slice"] * 3),
        ((9, 9), (2, 3), (1, 4), None),
    ],
)
def test_windows_inside(
    kind: str, size: Pair, kernel: Pair, stride: Pair, kinds: list[str] | None, rank5: bool
) -> None:
    spec = pooled(size, kernel, stride, kind, rank5)
    old, new, found = both(spec, floats(*((2, *size) if rank5 else (1, 2, *size))))
    if kinds is not None and kind != "MAX":
        assert found == kinds
    if kind == "MAX":
        np.testing.assert_array_equal(new, old)


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


def test_one_window_of_a_mean_without_its_padding() -> None:
    form = valid(1, 1, 0, 2) | {"avgPoolExcludePadding": True}
    _, _, kinds = both(pooled((2, 2), (4, 4), (4, 4), "AVERAGE", **form), floats(1, 2, 2, 2))
    assert kinds == ["pooling"]


@pytest.mark.parametrize("kind", ["AVERAGE", "L2"])
@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "words"),
    [
        (30, 15, 1, {}, "a kernel of 15 at steps of 1 is not made of windows of at most 13"),
        (90, 29, 29, {}, "a kernel of 29 at steps of 29 is not made of windows"),
        (17, 4, 4, {"same": {}}, "it counts or leaves out padding"),
        (17, 4, 4, valid(1, 1, 1, 1), "it counts or leaves out padding"),
        (18, 4, 4, {"includeLastPixel": {}}, "it counts or leaves out padding"),
    ],
)
def test_means_that_steps_cannot_make(
    kind: str, size: int, kernel: int, stride: int, padding: dict[str, Any], words: str
) -> None:
    spec = pooled((size, size), (kernel, kernel), (stride, stride), kind, **padding)
    assert_refuses(STEP, spec, words)


def test_windows_of_padding_only_are_refused() -> None:
    """The second has one after the last pixel, as the format's formula says."""
    for stride, padding in ((3, valid(3, 0, 0, 0)), (4, {"includeLastPixel": {}})):
        spec = pooled((16, 16), (3, 3), (stride, stride), **padding)
        assert_refuses(STEP, spec, "a window of 3 lies in the padding only")


def test_a_root_of_one_square_stays_a_root() -> None:
    """A kernel of 1 leaves maxima and means to slices, but the sign of a number goes."""
    for kind, kinds in (("MAX", ["slice"] * 2), ("L2", ["pooling", *["slice"] * 2])):
        _, _, found = both(pooled((9, 9), (1, 1), (3, 3), kind), floats(1, 2, 9, 9))
        assert found == kinds


def test_dynamic_sizes_are_refused() -> None:
    spec = pooled((16, 16), (4, 4), (4, 4))
    ranges = spec.description.input[0].type.multiArrayType.shapeRange.sizeRanges
    for low, high in ((1, 1), (2, 2), (16, 64), (16, 16)):
        ranges.add(lowerBound=low, upperBound=high)
    assert_refuses(STEP, spec, "height or width of 'x' is dynamic")


def test_any_batch() -> None:
    spec = with_any_batch(pooled((18, 16), (12, 4), (12, 4)))
    old, new, _ = both(spec, floats(3, 2, 18, 16))
    np.testing.assert_array_equal(new, old)


def test_poolings_within_the_limits_stay() -> None:
    for form in ({"kernelSize": [13, 13], "stride": [2, 2]}, {"globalPooling": True}):
        spec = make_network(
            {"x": (1, 2, 32, 32)}, [make_layer("pooling", ["x"], ["y"], valid={}, **form)], ["y"]
        )
        after, session = apply_pass(STEP, spec)
        assert after == spec
        assert not session.refusals


test_cases, test_surroundings = table(
    STEP,
    refuses(
        "it counts or leaves out padding",
        lambda: pooled((2, 2), (4, 4), (4, 4), "AVERAGE", **valid(1, 1, 1, 1)),
        id="one window of a mean with its padding is refused",
    ),
)
