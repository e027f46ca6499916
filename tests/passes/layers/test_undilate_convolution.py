"""`undilate_convolution`: zeros between the taps, phases, and when neither is to be had."""

from __future__ import annotations

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
from anesurgery.neuralnetwork.making import border_amounts, make_layer, make_network, weights
from anesurgery.passes.layers.dilation import UndilateConvolution
from anesurgery.testing import apply_pass

STEP = UndilateConvolution()
Pair = tuple[int, int]
ZEROS = ["convolution"]
PHASES = ["reorganizeData", "convolution", "reorganizeData"]
PADDINGS: dict[str, dict[str, Any]] = {
    "valid": {"valid": {}},
    "amounts": {"valid": {"paddingAmounts": border_amounts((2, 1), (0, 3))}},
    "same": {"same": {}},
    "same_lower": {"same": {"asymmetryMode": "TOP_LEFT_HEAVY"}},
}


def whole(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def dilated(
    kernel: Pair,
    dilation: Pair,
    size: Pair = (19, 22),
    *,
    channels: Pair = (4, 6),
    groups: int = 1,
    padding: str = "valid",
    rank5: bool = False,
    half: bool = False,
    bias: bool = True,
    **fields: Any,
) -> Any:
    """A convolution with small whole weights."""
    read, made = channels
    numbers = whole(made, read // groups, *kernel, seed=1)
    form = {
        "outputChannels": made,
        "kernelChannels": read // groups,
        "nGroups": groups,
        "kernelSize": kernel,
        "dilationFactor": dilation,
        "weights": weights(numbers, half),
        **PADDINGS[padding],
        **fields,
    }
    if bias:
        form |= {"hasBias": True, "bias": weights(whole(made, seed=2), half)}
    shape = (read, *size) if rank5 else (1, read, *size)
    return make_network({"x": shape}, [make_layer("convolution", ["x"], ["y"], **form)], ["y"], rank5=rank5)


def both(spec: Any, step: UndilateConvolution = STEP, batch: int = 1) -> tuple[Any, list[str]]:
    """The specification after, and its kinds; the same numbers, bit for bit on whole ones."""
    after, session = apply_pass(step, spec)
    assert session.changes, session.refusals
    old, new = (import_network(s) for s in (spec, after))
    shape = [int(d) for d in spec.description.input[0].type.multiArrayType.shape]
    if len(shape) == 4:
        shape[0] = batch
    x = whole(*shape)
    np.testing.assert_array_equal(ane.run(new, {"x": x})["y"], ane.run(old, {"x": x})["y"])
    x = floats(*shape)
    found, wanted = (ane.run(loaded, {"x": x})["y"] for loaded in (new, old))
    assert_close(found, wanted, rtol=1e-5)
    for layer in after.neuralNetwork.layers:
        assert max(layer.convolution.dilationFactor, default=1) == 1
    return after, [layer.WhichOneof("layer") for layer in after.neuralNetwork.layers]


@pytest.mark.one_of(30)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("rank5", [False, True])
@pytest.mark.parametrize(
    ("kernel", "dilation", "fields", "size"),
    [
        ((3, 3), (2, 2), {}, [5, 5]),
        ((3, 3), (2, 1), {}, [5, 3]),
        ((2, 3), (3, 2), {"stride": [2, 3]}, [4, 5]),
        ((3, 1), (8, 1), {}, [17, 1]),  # a column may be higher
        ((1, 5), (7, 3), {}, [1, 13]),  # one tap has no distance
        ((3, 3), (2, 2), {"groups": 2}, [5, 5]),
    ],
)
def test_zeros(
    kernel: Pair, dilation: Pair, fields: dict[str, Any], size: list[int], padding: str, rank5: bool
) -> None:
    step = UndilateConvolution(factor=6)
    after, kinds = both(dilated(kernel, dilation, padding=padding, rank5=rank5, **fields), step)
    assert kinds == ZEROS
    assert list(after.neuralNetwork.layers[0].convolution.kernelSize) == size


@pytest.mark.one_of(18)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("rank5", [False, True])
@pytest.mark.parametrize(
    ("kernel", "dilation", "fields"),
    [
        ((3, 3), (4, 4), {}),
        ((3, 3), (3, 3), {"groups": 2}),
        ((2, 3), (7, 7), {"bias": False}),
        ((1, 3), (1, 7), {"size": (14, 21)}),
        ((3, 3), (4, 4), {"channels": (4, 8), "groups": 4, "size": (16, 20)}),
    ],
)
def test_phases(kernel: Pair, dilation: Pair, fields: dict[str, Any], padding: str, rank5: bool) -> None:
    after, kinds = both(dilated(kernel, dilation, padding=padding, rank5=rank5, **fields))
    assert [kind for kind in kinds if kind not in ("padding", "crop")] == PHASES
    (conv,) = [n.convolution for n in after.neuralNetwork.layers if n.HasField("convolution")]
    assert conv.nGroups == fields.get("groups", 1) * max(dilation) ** 2


def test_an_image_of_whole_blocks_needs_no_padding() -> None:
    _, kinds = both(dilated((3, 3), (4, 4), (16, 20)))
    assert kinds == PHASES


def test_the_price_that_zeros_may_have() -> None:
    """81/9 times the multiplications for a distance of 4, 25/9 times for one of 2."""
    for factor, distance, kinds in ((9, 4, ZEROS), (8.9, 4, PHASES), (4, 2, ZEROS), (2.7, 2, PHASES)):
        step = UndilateConvolution(factor=factor)
        assert both(dilated((3, 3), (distance, distance), (16, 20)), step)[1] == kinds


@pytest.mark.parametrize("dilation", [(2, 2), (4, 4)])
def test_fp16_stays_fp16(dilation: Pair) -> None:
    after, _ = both(dilated((3, 3), dilation, half=True))
    (conv,) = [n.convolution for n in after.neuralNetwork.layers if n.HasField("convolution")]
    assert conv.weights.float16Value
    assert conv.bias.float16Value
    assert not conv.weights.floatValue


def test_quantized_weights_become_fp32() -> None:
    table = {"floatValue": [-1.0, 0.0, 2.0, 3.0]}
    packed = {
        "rawValue": bytes(range(256))[: 4 * 6 * 9 // 4],
        "quantization": {"numberOfBits": 2, "lookupTableQuantization": table},
    }
    after, _ = both(dilated((3, 3), (2, 2), half=True, weights=packed))
    conv = after.neuralNetwork.layers[0].convolution
    assert len(conv.weights.floatValue) == 4 * 6 * 25
    assert len(conv.bias.floatValue) == 6  # Core ML's own check wants one precision for both


TRAINED = {**weights(whole(6, 4, 3, 3, seed=1)), "isUpdatable": True}
test_cases, test_surroundings = table(
    STEP,
    refuses("cost 7.0 times the multiplications, more than 4; by phases: the", dilated, (3, 3), (4, 3)),
    refuses("by phases: the dilation is 4 along the height and 3 along the width", dilated, (3, 3), (4, 3)),
    refuses("the kernel is 15x15, more than 13 (29 if 1 wide); by", dilated, (3, 3), (7, 7), stride=[2, 1]),
    refuses("by phases: the stride is 2x1, not 1x1", dilated, (3, 3), (4, 4), stride=[2, 1]),
    refuses("by phases: the kernel is 30x1, more than 13", dilated, (30, 1), (2, 2), (60, 4)),
    refuses("by phases: the kernel is 1x14, more than 13", dilated, (1, 14), (2, 2), (2, 60)),
    refuses("20x20 phases of 164 channels are", dilated, (3, 3), (20, 20), (64, 64), channels=(4, 164)),
    refuses("20x20 times 44100 weights are more", dilated, (3, 3), (20, 20), (64, 64), channels=(70, 70)),
    refuses("it is a deconvolution", dilated, (3, 3), (2, 2), isDeconvolution=True, channels=(4, 4)),
    *(rewrites(with_any_batch, dilated((3, 3), dilation)) for dilation in [(2, 2), (4, 4)]),
    ignores(dilated, (3, 3), (1, 1)),
    *(
        refuses(
            "height or width of 'x' is dynamic",
            with_sizes,
            dilated((3, 3), (distance, distance)),
            *[(1, 1), (4, 4), (19, 64), (22, 22)],
        )
        for distance in (2, 4)
    ),
    refuses("its weights may be trained", dilated, (3, 3), (2, 2), weights=TRAINED),
    refuses(
        "its weights are computed",
        make_network,
        {"x": (1, 2, 8, 8), "w": (2, 2, 3, 3)},
        [
            make_layer(
                "convolution",
                ["x", "w"],
                ["y"],
                outputChannels=2,
                kernelChannels=2,
                dilationFactor=[2, 2],
                valid={},
            )
        ],
        ["y"],
    ),
)
