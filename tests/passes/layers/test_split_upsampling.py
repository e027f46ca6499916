"""`split_upsampling`: factors by the nearest pixel, and the three ways to interpolate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from closeness import assert_close
from one_layer import floats
from pass_cases import ignores, refuses, rewrites, table
from two_sided import with_sizes

import anesurgery as ane
from anesurgery.mil import Array
from anesurgery.neuralnetwork.importing import import_network
from anesurgery.neuralnetwork.making import make_layer, make_network
from anesurgery.passes.layers.upsampling import SplitUpsampling
from anesurgery.placement.rules.layer_rules import UPSAMPLE
from anesurgery.testing import apply_pass

STEP = SplitUpsampling()
Pair = tuple[int, int]
Pairs = tuple[()] | Pair
MODES = ("DEFAULT", "ALIGN_CORNERS_TRUE", "ALIGN_CORNERS_FALSE")
PAD, CONV, SLICE = "padding", "convolution", "slice"


def upsampled(size: tuple[int, ...], factors: Pairs, rank5: bool = False, **fields: Any) -> Any:
    form = {"scalingFactor": factors} | fields
    layers = [make_layer("upsample", ["x"], ["y"], **form)]
    return make_network({"x": size}, layers, ["y"], rank5=rank5)


def both(spec: Any, x: Array) -> tuple[Array, Array, list[str]]:
    """The output before and after, and the kinds after; kernels and factors are within the limits."""
    after, session = apply_pass(STEP, spec)
    assert session.changes, session.refusals
    for layer in after.neuralNetwork.layers:
        assert max(layer.upsample.scalingFactor, default=1) <= UPSAMPLE
        assert max(layer.convolution.kernelSize, default=1) <= 13 or layer.convolution.kernelSize[1] == 1
    old, new = (ane.run(import_network(s), {"x": x})["y"] for s in (spec, after))
    assert_close(new, old, rtol=STEP.tolerance.rtol)
    return old, new, [layer.WhichOneof("layer") for layer in after.neuralNetwork.layers]


@pytest.mark.one_of(9)
@pytest.mark.parametrize(
    ("size", "factors", "kinds"),
    [
        ((10, 10), (4, 4), [CONV, CONV]),  # at each 3/13 of a pixel
        ((4, 4), (4, 4), [CONV]),  # at each 1/5
        ((3, 4), (2, 4), [CONV, SLICE]),  # at each 2/5 of the height
        ((4, 3), (4, 2), [CONV, SLICE]),
        ((4, 3), (3, 1), [CONV, SLICE]),  # high and 1 wide
        ((3, 4), (1, 3), [CONV, CONV]),
        ((3, 3), (3, 3), [CONV]),
        ((2, 3), (5, 4), [CONV, CONV]),
        ((4, 1), (4, 4), [PAD, CONV]),  # one pixel has no corners
        ((1, 1), (4, 3), [PAD, CONV]),
    ],
)
def test_interpolation_from_corner_to_corner(size: Pair, factors: Pair, kinds: list[str]) -> None:
    form: dict[str, Any] = {"mode": "BILINEAR", "linearUpsampleMode": "ALIGN_CORNERS_TRUE"}
    assert both(upsampled((1, 2, *size), factors, **form), floats(1, 2, *size))[2] == kinds


@pytest.mark.one_of(3)
@pytest.mark.parametrize("mode", ["DEFAULT", "ALIGN_CORNERS_FALSE"])
@pytest.mark.parametrize("factors", [(4, 4), (8, 4), (2, 8)])
def test_interpolation_is_bit_exact_where_fp32_holds_it(mode: str, factors: Pair) -> None:
    """The weights are then multiples of 1/16, so small whole numbers are interpolated without rounding."""
    x = np.random.default_rng(0).integers(-9, 9, (1, 2, 5, 4)).astype(np.float32)
    spec = upsampled(x.shape, factors, mode="BILINEAR", linearUpsampleMode=mode)
    old, new, _ = both(spec, x)
    np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("mode", ["ALIGN_CORNERS_TRUE", "ALIGN_CORNERS_FALSE"])
def test_whole_factors_written_as_fractional_ones(mode: str) -> None:
    form: dict[str, Any] = {"fractionalScalingFactor": [4.0, 4.0], "linearUpsampleMode": mode}
    spec = upsampled((1, 2, 4, 4), (), mode="BILINEAR", **form)
    assert CONV in both(spec, floats(1, 2, 4, 4))[2]


FRACTIONAL: dict[str, Any] = {"fractionalScalingFactor": [2.5, 2.0], "linearUpsampleMode": MODES[2]}
test_cases, test_surroundings = table(
    STEP,
    *(
        rewrites(
            upsampled,
            (2, *size) if rank5 else (1, 2, *size),
            factors,
            rank5,
            mode="BILINEAR",
            linearUpsampleMode=mode,
        )
        for factors in [(4, 4), (3, 3), (1, 4), (5, 2), (6, 3), (8, 8), (11, 4)]
        for mode in ["DEFAULT", "ALIGN_CORNERS_FALSE"]
        for size in [(4, 5), (1, 7), (2, 1)]
        for rank5 in [False, True]
    ),
    # The proof holds on large images: the interpreter takes the places of samples exactly.
    rewrites(upsampled, (1, 1, 1, 2000), (1, 3), mode="BILINEAR", linearUpsampleMode=MODES[2]),
    *(
        rewrites(upsampled, (3, 4, 5) if rank5 else (2, 3, 4, 5), factors, rank5, rtol=0)
        for factors in [(4, 4), (8, 2), (1, 16), (3, 3), (3, 1), (6, 4), (5, 7), (12, 13), (29, 1)]
        for rank5 in (False, True)
    ),
    rewrites(upsampled, (3, 4, 5), (4, 4), rtol=0),
    *(
        refuses(words, upsampled, size, factors, **{"mode": "BILINEAR", **fields})
        for size, factors, fields, words in [
            ((1, 2, 4, 4), (), FRACTIONAL, "the factor 2.5x2 is fractional"),
            ((1, 2, 4, 4), (31, 1), {"mode": "NN"}, "leaves a kernel of 31x1"),
            ((1, 2, 4, 4), (1, 30), {"mode": "NN"}, "leaves a kernel of 1x15 to a deconvolution"),
            ((2, 4, 4), (3, 3), {"mode": "NN"}, "takes 4 axes or more in Core ML's own check"),
            ((2, 4, 4), (4, 4), {}, "takes 4 axes or more in Core ML's own check"),
            ((1, 2, 4, 4), (17, 17), {}, "it interpolates at each 1/17 of the height and 1/17 of the"),
            ((1, 2, 20, 4), (4, 4), {"linearUpsampleMode": MODES[1]}, "at each 1/79 of the height"),
        ]
    ),
    ignores(upsampled, (1, 2, 4, 4), (2, 2), mode="NN"),
    ignores(upsampled, (1, 2, 4, 4), (), mode="NN"),
    ignores(upsampled, (1, 2, 4, 4), (1, 2), mode="BILINEAR"),
    *(
        refuses(
            words,
            with_sizes,
            upsampled((1, 2, 4, 4), (3, 3), mode=mode),
            *((size, 64 if i == axis else size) for i, size in enumerate((1, 2, 4, 4))),
        )
        for axis, words in ((1, "the number of channels"), (2, "height or width"), (3, "height or width"))
        for mode in ("NN", "BILINEAR")
    ),
    *(
        rewrites(
            with_sizes,
            upsampled((1, 2, 4, 4), (6, 4), mode=mode),
            (1, 64),
            (2, 2),
            (4, 4),
            (4, 4),
            id=f"{mode}, any batch",
            inputs={"x": np.random.default_rng(0).standard_normal((3, 2, 4, 4)).astype(np.float32)},
        )
        for mode in ("NN", "BILINEAR")
    ),
)
