"""Layers whose numbers contradict their inputs or the format: each is refused, next to a whole one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.errors import LoadError
from anesurgery.neuralnetwork.importing import import_network
from anesurgery.neuralnetwork.making import make_layer, make_network, weights

SHAPE = (1, 4, 8, 6)
AGAIN = "the file is damaged, export it again"
Fields = dict[str, Any]


@dataclass(frozen=True)
class Damaged:
    """A layer that is whole with some fields, and damaged with others in their place."""

    kind: str
    whole: Fields
    spoilt: Fields
    words: str
    """What is said of the damaged one."""
    inputs: tuple[str, ...] = ("x",)
    outputs: tuple[str, ...] = ("y",)
    extra: tuple[Any, ...] = field(default=())
    """Layers before it."""

    def network(self, fields: Fields, inputs: tuple[str, ...] = ()) -> Any:
        made = make_layer(self.kind, inputs or self.inputs, self.outputs, name="bad", **fields)
        return make_network({"x": SHAPE, "z": (1, 4, 8, 6)}, [*self.extra, made], self.outputs)


def ones(*shape: int) -> Fields:
    return weights(np.ones(shape))


def constant(*values: float) -> Any:
    return make_layer("loadConstantND", [], ["i"], shape=[len(values)], data=weights(np.array(values)))


def edges(top: int, bottom: int) -> Fields:
    """Height with a border, width without."""
    return {"borderAmounts": [{"startEdgeSize": top, "endEdgeSize": bottom}, {}]}


def norm(channels: int) -> Fields:
    stored = {name: ones(channels) for name in ("gamma", "beta", "mean", "variance")}
    return {"channels": channels, **stored}


def conv(**other: Any) -> Fields:
    form = {"outputChannels": 4, "kernelChannels": 4, "kernelSize": [3, 3], "weights": ones(4, 4, 3, 3)}
    return {**form, "valid": {}, **other}


def without(fields: Fields, name: str) -> Fields:
    return {n: value for n, value in fields.items() if n != name}


def part(begin: int, end: int, stride: int = 1, drop: bool = False) -> Fields:
    """A slice of the channels."""
    others = [True, False, True, True]
    return {
        "beginIds": [0, begin, 0, 0],
        "endIds": [0, end, 0, 0],
        "strides": [1, stride, 1, 1],
        "beginMasks": others,
        "endMasks": others,
        "squeezeMasks": [False, drop, False, False],
    }


def axis(kind: str, bad: int, words: str, **other: Any) -> Damaged:
    """A layer whose axis does not exist."""
    inputs = other.pop("inputs", ("x",))
    extra = (constant(0.0),) if "i" in inputs else ()
    return Damaged(kind, {"axis": 1, **other}, {"axis": bad, **other}, words, inputs, extra=extra)


AXES = [
    axis("softmaxND", 4, "has axis 4, expected -4 to 3"),
    axis("softmaxND", -5, "has axis -5, expected -4 to 3"),
    axis("concatND", 4, "has axis 4, expected -4 to 3", inputs=("x", "z")),
    axis("stack", 5, "has axis 5, expected -5 to 4", inputs=("x", "z")),
    axis("gather", 4, "has axis 4, expected -4 to 3", inputs=("x", "i")),
    axis("argMax", 4, "has axis 4, expected -4 to 3"),
    axis("argMin", -5, "has axis -5, expected -4 to 3"),
    axis("argSort", 4, "has axis 4, expected -4 to 3"),
    axis("topK", 4, "has axis 4, expected -4 to 3", K=2),
    axis("cumSum", 4, "has axis 4, expected -4 to 3"),
    axis("flattenTo2D", 5, "has axis 5, expected -4 to 3"),
    axis("slidingWindows", 4, "has axis 4, expected -4 to 3", windowSize=2, step=1),
    axis("sliceBySize", 4, "has axis 4, expected -4 to 3", inputs=("x", "i"), size=2),
    axis("oneHot", 5, "has axis 5, expected -2 to 1", inputs=("i",), oneHotVectorSize=3),
    Damaged("reduceMax", {"axes": [-4, 3]}, {"axes": [0, 4]}, "has axis 4, expected -4 to 3"),
    Damaged("expandDims", {"axes": [4]}, {"axes": [5]}, "has axis 5, expected -5 to 4"),
    Damaged("reduceMax", {"axes": [0, 1]}, {"axes": [0, -4]}, "has the axes [0, -4], expected each once"),
    Damaged("expandDims", {"axes": [0, 1]}, {"axes": [1, 1]}, "has the axes [1, 1], expected each once"),
    Damaged("squeeze", {"axes": [0]}, {"axes": [0, 0]}, "has the axes [0, 0], expected each once"),
    Damaged("transpose", {"axes": [3, 2, 1, 0]}, {"axes": [0, 1, 2, 2]}, "has the axes [0, 1, 2, 2], expected"),
    Damaged("transpose", {"axes": [2, 1, 0]}, {"axes": [1, 0]}, "orders 2 axes of 4, expected all"),
    Damaged(
        "reverse",
        {"reverseDim": [True] * 4},
        {"reverseDim": [True] * 2},
        "has 2 flags for an input of 4 axes, expected one each",
    ),
    Damaged("topK", {"axis": 1, "K": 1}, {"axis": 1, "K": 0}, "takes the 0 largest, expected at least 1"),
    Damaged("squeeze", {"axes": [0]}, {"axes": [4]}, "has axis 4, expected -4 to 3"),
    Damaged("squeeze", {"axes": [-4]}, {"axes": [1]}, "removes axis 1, whose size is 4, not 1"),
    Damaged(
        "splitND",
        {"axis": 1, "numSplits": 2},
        {"axis": 7, "numSplits": 2},
        "has axis 7, expected -4 to 3",
        outputs=("y", "w"),
    ),
    Damaged(
        "reverseSeq",
        {"sequenceAxis": 1},
        {"sequenceAxis": 4},
        "has sequence axis 4, expected -4 to 3",
        ("x", "i"),
        extra=(constant(2.0),),
    ),
]

PARTS = [
    Damaged(
        "splitND",
        {"axis": 1, "splitSizes": [1, 3]},
        {"axis": 1, "splitSizes": [1, 2]},
        "splits axis 1 into parts of 1, 2, expected numbers from 1 up that add up to 4",
        outputs=("y", "w"),
    ),
    Damaged(
        "splitND",
        {"axis": 1, "splitSizes": [1, 3]},
        {"axis": 1, "splitSizes": [0, 4]},
        "splits axis 1 into parts of 0, 4, expected numbers from 1 up",
        outputs=("y", "w"),
    ),
    Damaged(
        "splitND",
        {"axis": 3, "numSplits": 2},
        {"axis": 0, "numSplits": 2},
        "splits axis 0 into parts of 1, 0, expected",
        outputs=("y", "w"),
    ),
    Damaged("slice", {"endIndex": 2, "stride": 1}, {"endIndex": 2}, "has a stride of 0, expected at least 1"),
    Damaged(
        "slice",
        {"startIndex": 1, "endIndex": 3, "stride": 1},
        {"startIndex": 3, "endIndex": 1, "stride": 1},
        "takes [3:1] of axis -3, whose size is 4: expected a part that is not empty",
    ),
    Damaged(
        "slice",
        {"startIndex": 3, "endIndex": 9, "stride": 1},
        {"startIndex": 4, "endIndex": 9, "stride": 1},
        "takes [4:9] of axis -3, whose size is 4",
    ),
    Damaged("sliceStatic", part(3, 9), part(4, 9), "takes [4:9:1] of axis 1, whose size is 4"),
    Damaged("sliceStatic", part(3, 1, -1), part(1, 3, -1), "takes [1:3:-1] of axis 1"),
    Damaged("sliceStatic", part(0, 3, 2), part(0, 3, 0), "has the strides [1, 0, 1, 1], expected none"),
    Damaged("sliceStatic", part(-4, 0, 1, True), part(4, 5, 1, True), "takes [4] of axis 1"),
    Damaged(
        "sliceStatic",
        part(0, 1),
        {**part(0, 1), "endIds": [1, 1]},
        "has the end [1, 1] for an input of 4 axes, expected one number each",
    ),
    Damaged(
        "sliceBySize",
        {"axis": 1, "size": 2},
        {"axis": 1, "size": 3},
        "takes 3 numbers of an axis of 4 from place 2 on, expected a part of it",
        ("x", "i"),
        extra=(constant(-2.0),),
    ),
    Damaged(
        "slidingWindows",
        {"axis": 1, "windowSize": 4},
        {"axis": 1, "windowSize": 5},
        "has windows of 5 numbers on an axis of 4, expected 1 to 4",
    ),
    Damaged(
        "constantPad",
        {"padAmounts": [0, 0, 0, 0, 0, 0, 1, 1]},
        {"padAmounts": [1, 1]},
        "has 2 amounts for an input of 4 axes, expected 8",
    ),
    Damaged("constantPad", {"padAmounts": [0, 1] * 4}, {}, "has 0 amounts for an input of 4 axes, expected 8"),
    Damaged(
        "constantPad",
        {"padAmounts": [0, 9] * 4, "padToGivenOutputSizeMode": True},
        {"padAmounts": [0, 9], "padToGivenOutputSizeMode": True},
        "has 2 amounts for an input of 4 axes",
    ),
    *(
        Damaged(
            "gather",
            {"axis": 1},
            {"axis": 0},
            f"has the index {place} on an axis of 1, expected -1 to 0",
            ("x", "i"),
            extra=(constant(float(place)),),
        )
        for place in (3, -4)
    ),
]
"""Pieces: their sizes, beginnings and ends, margins, and places to read."""

IMAGES = [
    Damaged(
        "crop",
        {"cropAmounts": edges(4, 3)},
        {"cropAmounts": edges(4, 4)},
        "crops axis -2 of 8 pixels, expected at least 9",
    ),
    Damaged("crop", {}, {"offset": [0, 1]}, "crops axis -1 of 6 pixels, expected at least 7", ("x", "z")),
    Damaged(
        "upsample",
        {"scalingFactor": [2, 1]},
        {"scalingFactor": [2, 0]},
        "has the factors 2, 0, expected 2 numbers above 0",
    ),
    Damaged("upsample", {}, {"scalingFactor": [2]}, "has the factors 2, expected 2 numbers above 0"),
    Damaged(
        "resizeBilinear",
        {"targetSize": [1, 1]},
        {"targetSize": [0, 1]},
        "has the targetSize [0, 1], expected 2 numbers from 1 up",
    ),
    Damaged("reorganizeData", {"blockSize": 2}, {"blockSize": 1}, "has the block size 1, expected at least 2"),
    Damaged(
        "reorganizeData", {"blockSize": 2}, {"blockSize": 3}, "has axis -2 of size 8, expected a multiple of 3"
    ),
    Damaged(
        "reorganizeData", {"blockSize": 2}, {"blockSize": 4}, "has axis -1 of size 6, expected a multiple of 4"
    ),
    *(
        Damaged(
            "reorganizeData",
            {"blockSize": 2, "mode": mode},
            {"blockSize": 3, "mode": mode},
            "has axis -3 of size 4, expected a multiple of 9",
        )
        for mode in ("DEPTH_TO_SPACE", "PIXEL_SHUFFLE")
    ),
    Damaged("batchnorm", norm(4), norm(3), "normalizes 3 channels, but its input has 4"),
    Damaged(
        "convolution", conv(), without(conv(), "valid"), "has no padding type, expected one of valid, same"
    ),
    Damaged(
        "convolution",
        conv(kernelChannels=2, nGroups=2, weights=ones(4, 2, 3, 3)),
        conv(kernelChannels=2, nGroups=2, outputChannels=3, weights=ones(3, 2, 3, 3)),
        "has 3 output channels, expected a multiple of its 2 groups",
    ),
    *(
        Damaged(
            "convolution",
            conv(isDeconvolution=back),
            conv(isDeconvolution=back, kernelChannels=3, weights=ones(4, 3, 3, 3)),
            "takes 3 channels, but its input has 4",
        )
        for back in (False, True)
    ),
    Damaged(
        "padding",
        {"constant": {}, "paddingAmounts": edges(1, 1)},
        {"paddingAmounts": edges(1, 1)},
        "has no padding type, expected one of constant, reflection, replication",
    ),
    Damaged(
        "padding",
        {"reflection": {}, "paddingAmounts": edges(0, 7)},
        {"reflection": {}, "paddingAmounts": edges(0, 8)},
        "reflects axis -2 of 8 pixels, expected at least 9",
    ),
    Damaged("convolution", conv(), conv(stride=[1, 0]), "has the stride [1, 0], expected 2 numbers from 1 up"),
    Damaged("convolution", conv(), conv(kernelSize=[3]), "has the kernelSize [3], expected 2 numbers"),
    Damaged(
        "convolution", conv(), conv(dilationFactor=[0, 1]), "has the dilationFactor [0, 1], expected 2 numbers"
    ),
    Damaged(
        "convolution",
        conv(isDeconvolution=True, valid={"paddingAmounts": edges(4, 5)}),
        conv(isDeconvolution=True, valid={"paddingAmounts": edges(5, 5)}),
        "makes 0 numbers along an axis of 8 (kernel 3, stride 1, cut off 10), expected at least 1",
    ),
    Damaged(
        "convolution",
        conv(isDeconvolution=True, outputShape=[1, 1]),
        conv(isDeconvolution=True, outputShape=[1, 0]),
        "makes 0 numbers along an axis of 6",
    ),
    Damaged(
        "pooling",
        {"kernelSize": [2, 2], "valid": {}},
        {"kernelSize": [2, 2]},
        "has no padding type, expected one of valid, same, includeLastPixel",
    ),
    Damaged("pooling", {"globalPooling": True, "valid": {}}, {"globalPooling": True}, "has no padding type"),
    Damaged(
        "pooling",
        {"kernelSize": [1, 1], "same": {}},
        {"kernelSize": [0, 1], "same": {}},
        "has the kernelSize [0, 1], expected 2 numbers from 1 up",
    ),
]
"""Layers of images: their sizes, channels, kernels and paddings."""

DAMAGED = [*AXES, *PARTS, *IMAGES]
PAIRS = [
    f"{op}Broadcastable"
    for op in ("add", "multiply", "subtract", "divide", "min", "max", "mod", "pow", "floorDiv")
]


def named(case: Damaged) -> str:
    return f"{case.kind}: {case.words}"


def refused(spec: Any) -> str:
    with pytest.raises(LoadError) as caught:
        import_network(spec)
    return str(caught.value)


@pytest.mark.parametrize("case", DAMAGED, ids=named)
def test_a_whole_layer_is_taken_and_a_damaged_one_refused(case: Damaged) -> None:
    import_network(case.network(case.whole))
    said = refused(case.network(case.spoilt))
    assert f"layer 'bad' ({case.kind}): {case.words}" in said
    assert said.endswith((AGAIN, "not 1"))


@pytest.mark.parametrize(
    ("kind", "count", "takes"),
    [
        *((kind, count, "2") for kind in PAIRS for count in (1, 3)),
        ("concatND", 1, "at least 2"),
        ("stack", 1, "at least 2"),
        ("concat", 1, "at least 2"),
    ],
)
def test_a_layer_of_another_number_of_inputs_is_refused(kind: str, count: int, takes: str) -> None:
    case = Damaged(kind, {}, {}, f"has {count} inputs, takes {takes}; {AGAIN}")
    import_network(case.network({}, ("x", "z")))
    assert f"layer 'bad' ({kind}): {case.words}" in refused(case.network({}, ("x",) * count))


@pytest.mark.parametrize("case", [AXES[0], PARTS[0], IMAGES[0]], ids=named)
def test_a_damaged_layer_is_refused_before_anything_is_done(case: Damaged, tmp_path: Path) -> None:
    path = tmp_path / "bad.mlmodel"
    path.write_bytes(case.network(case.spoilt).SerializeToString())
    for use in (ane.upgrade, ane.Predictor, lambda p: ane.apply(p, "neuralnetwork_ane")):
        with pytest.raises(LoadError) as caught:
            use(path)
        assert case.words in str(caught.value)


@pytest.mark.parametrize("spoilt", [{"axis": 1, "numSplits": 3}, {"axis": 1, "splitSizes": [2, 1, 1]}])
def test_parts_need_not_be_equal(spoilt: Fields) -> None:
    """coremltools' tests of the layer share out 4 numbers as 2, 1 and 1."""
    names = ("y", "w", "v")
    case = Damaged("splitND", {}, spoilt, "", outputs=names)
    found = ane.run(
        import_network(case.network(spoilt)), {"x": np.ones(SHAPE, np.float32), "z": np.ones(SHAPE, np.float32)}
    )
    assert [found[name].shape[1] for name in names] == [2, 1, 1]


def test_dynamic_sizes_are_not_checked() -> None:
    spec = Damaged("crop", {}, {"cropAmounts": edges(4, 4)}, "").network({"cropAmounts": edges(4, 4)})
    array = spec.description.input[0].type.multiArrayType
    for low, high in ((1, 1), (4, 4), (8, 20), (6, 6)):
        array.shapeRange.sizeRanges.add(lowerBound=low, upperBound=high)
    values = {"x": np.ones((1, 4, 12, 6), np.float32), "z": np.ones(SHAPE, np.float32)}
    assert ane.run(import_network(spec), values)["y"].shape == (1, 4, 4, 6)
