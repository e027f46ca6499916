"""`legacy_rearrange`: rows of moving layers by what they do, what they may not do, and a real network."""

from __future__ import annotations

from typing import Any

import pytest
from pass_cases import refuses, rewrites, stays, table
from two_sided import with_output, with_reader, with_sizes

from anesurgery.network_editing.network import Network
from anesurgery.neuralnetwork.making import make_layer, make_network
from anesurgery.passes.layers.moving import LegacyRearrange
from anesurgery.testing import apply_pass, assert_same_numbers, network_text

STEP = LegacyRearrange()
Shape = tuple[int, ...]
Row = list[tuple[str, dict[str, Any]]]


def to(*shape: int) -> tuple[str, dict[str, Any]]:
    return "reshapeStatic", {"targetShape": shape}


def axes(*order: int) -> tuple[str, dict[str, Any]]:
    return "transpose", {"axes": order}


def row_of(shape: Shape, row: Row, *, rank5: bool = False, version: int | None = None) -> Any:
    """A network x -> b0 -> b1 ... -> y, followed by a layer that moves nothing."""
    names = ["x", *(f"b{i}" for i in range(len(row)))]
    layers = [make_layer(kind, [names[i]], [names[i + 1]], **fields) for i, (kind, fields) in enumerate(row)]
    layers.append(make_layer("activation", [names[-1]], ["y"], linear={"alpha": -1}))
    spec = make_network({"x": shape}, layers, ["y"], rank5=rank5)
    spec.specificationVersion = version or spec.specificationVersion
    return spec


def written(spec: Any, step: LegacyRearrange = STEP) -> list[str]:
    """The layers afterwards, without the last one; each with its order or mode where it has one."""
    after, session = apply_pass(step, spec)
    assert session.changes, session.refusals
    assert all(change.proof is not None for change in session.changes)
    assert_same_numbers(spec, after, rtol=step.tolerance.rtol)
    again, second = apply_pass(step, after)
    assert not second.changes, network_text(Network(again))
    return [_word(layer) for layer in after.neuralNetwork.layers][:-1]


def _word(layer: Any) -> str:
    kind = layer.WhichOneof("layer")
    params = getattr(layer, kind)
    if kind == "reorganizeData":
        names = type(params).ReorganizationType.Name
        return f"{names(params.mode)} {params.blockSize}"
    if kind in ("reshape", "flatten"):
        last = " last" if params.mode else ""
        return f"{kind}{last}{list(params.targetShape) if kind == 'reshape' else ''}"
    return f"permute{list(params.axis)}" if kind == "permute" else str(kind)


SQUEEZED = [("squeeze", {"axes": [2, 3]}), ("expandDims", {"axes": [2, 3]})]
SHUFFLE = [to(1, 3, 2, 2, 4), axes(0, 2, 1, 3, 4), to(1, 6, 2, 4)]
TO_DEPTH = [to(1, 2, 2, 2, 3, 2), axes(0, 3, 5, 1, 2, 4), to(1, 8, 2, 3)]
UNSHUFFLE = [to(1, 2, 2, 2, 3, 2), axes(0, 1, 3, 5, 2, 4), to(1, 8, 2, 3)]
TO_SPACE = [to(1, 2, 2, 2, 3, 4), axes(0, 3, 4, 1, 5, 2), to(1, 2, 6, 8)]
PIXELS = [to(1, 2, 2, 2, 3, 4), axes(0, 1, 4, 2, 5, 3), to(1, 2, 6, 8)]
TURNED = [to(1, 2, 2, 2, 3, 4), axes(0, 1, 4, 3, 5, 2), to(1, 2, 6, 8)]
KERAS_FLATTEN = [axes(0, 2, 3, 1), to(2, 24, 1, 1)]
"""Keras' order: channels last."""


@pytest.mark.parametrize(
    ("version", "expected"), [(4, ["convolution", "DEPTH_TO_SPACE 2"]), (5, ["PIXEL_SHUFFLE 2"])]
)
def test_a_pixel_shuffle_is_one_layer_where_the_version_has_it(version: int, expected: list[str]) -> None:
    spec = row_of((1, 8, 3, 4), PIXELS, version=version)
    assert written(spec) == expected
    after, _ = apply_pass(STEP, spec)
    assert after.specificationVersion == version


test_cases, test_surroundings = table(
    STEP,
    refuses(
        "sequence or batch, whose size is dynamic",
        row_of,
        (1, 4, 6),
        [("permute", {"axis": [1, 0, 2, 3]}), ("permute", {"axis": [0, 1, 3, 2]})],
        rank5=True,
    ),
    *(
        stays(row_of, (3, 4, 5), row, rank5=True)
        for row in [[("permute", {"axis": [0, 2, 3, 1]})], [("flatten", {})]]
    ),
    *(
        refuses(words, row_of, shape, row)
        for shape, row, words in [
            ((1, 6, 1, 1), [to(1, 6)], "makes 2 axes of 4 (1x6x1x1 to 1x6)"),
            ((1, 3, 4, 5), [axes(0, 2, 3, 1)], "moves neither whole channels nor blocks"),
            ((1, 3, 4, 4), [axes(0, 1, 3, 2)], "of 4 axes Core ML's own check takes no reshape"),
            ((1, 4, 4, 4), [to(4, 1, 4, 4)], "of 4 axes"),
            ((1, 2, 3, 4, 5), [axes(1, 0, 2, 3, 4)], "nor a permutation around it"),
            ((2, 2, 3, 4, 5), [to(1, 2, 6, 4, 5)], "neither a reshape that keeps the batch"),
            ((8, 3, 4), [to(2, 2, 2, 3, 4), axes(0, 3, 1, 4, 2), to(2, 6, 8)], "wants 4 axes for convolution"),
            ((1, 25, 2, 2), [to(1, 5, 5, 2, 2), axes(0, 3, 1, 4, 2), to(1, 1, 10, 10)], "blocks of 5x5"),
        ]
    ),
    refuses("moves 6 channels, more than 5", row_of, (1, 6, 2, 4), SHUFFLE, step=LegacyRearrange(channels=5)),
    refuses(
        "blocks of 2x2 pixels; `blocks` lists 4",
        row_of,
        (1, 2, 4, 6),
        TO_DEPTH,
        step=LegacyRearrange(blocks=(4,)),
    ),
    *(
        rewrites(row_of, shape, row)
        for shape, row in [
            ((1, 6, 1, 1), [to(1, 6), to(1, 6, 1, 1)]),
            ((1, 6, 1, 1), SQUEEZED),
            ((2, 3, 4, 5), [axes(0, 2, 3, 1), axes(0, 3, 1, 2)]),
            ((2, 3, 4, 5), [("flattenTo2D", {"axis": 2}), to(2, 3, 4, 5)]),
            ((2, 3, 4, 5), [("rankPreservingReshape", {"targetShape": [0, 3, -1, 5]})]),
            ((4, 5), [to(20), to(4, 5)]),
            ((1, 6, 2, 4), SHUFFLE),
            ((1, 6, 1, 1), [to(1, 2, 3, 1, 1), axes(0, 2, 1, 3, 4), to(1, 6, 1, 1)]),
            ((1, 2, 4, 6), TO_DEPTH),
            ((1, 2, 4, 6), UNSHUFFLE),
            ((1, 8, 3, 4), TO_SPACE),
            ((1, 8, 3, 4), TURNED),
            ((8, 3, 4), [to(2, 2, 2, 3, 4), axes(2, 3, 0, 4, 1), to(2, 6, 8)]),
            ((2, 3, 4, 5), [to(2, 60, 1, 1)]),
            ((3, 4, 5), [("rankPreservingReshape", {"targetShape": [60, 1, 1]})]),
            ((2, 3, 2, 4), KERAS_FLATTEN),
            ((1, 2, 3, 4, 5), [to(1, 2, 5, 4, 3)]),
            ((2, 1, 3, 4, 5), [to(3, 1, 2, 4, 5)]),
            ((1, 2, 3, 4, 5), [axes(0, 1, 3, 4, 2)]),
            ((2, 3, 2, 4, 5), [axes(4, 1, 2, 0, 3)]),
            ((1, 2, 3, 4, 5), [axes(0, 1, 3, 4, 2), to(1, 2, 5, 6, 2), axes(0, 1, 4, 2, 3)]),
        ]
    ),
    *(
        rewrites(row_of, shape, row, rank5=True)
        for shape, row in [
            (
                (6, 2, 4),
                [
                    ("reshape", {"targetShape": [2, 3, 2, 4]}),
                    ("permute", {"axis": [1, 0, 2, 3]}),
                    ("reshape", {"targetShape": [1, 6, 2, 4]}),
                ],
            ),
            ((3, 4, 5), [("permute", {"axis": [0, 2, 3, 1]}), ("permute", {"axis": [0, 3, 1, 2]})]),
            ((3, 4, 5), [("permute", {"axis": [0, 1, 2, 3]})]),
            ((3, 4, 5), [("permute", {"axis": [0, 2, 3, 1]}), ("flatten", {})]),
            ((3, 4, 5), [("flatten", {"mode": "CHANNEL_LAST"}), ("reshape", {"targetShape": [4, 5, 3]})]),
            (
                (3, 4, 5),
                [
                    ("reshape", {"targetShape": [5, 4, 3], "mode": "CHANNEL_LAST"}),
                    ("flatten", {"mode": "CHANNEL_LAST"}),
                ],
            ),
            ((3, 4, 5), [axes(0, 1, 3, 4, 2), to(1, 1, 4, 15, 1)]),
            ((6, 1, 1), [to(6, 1), to(1, 1, 6, 1, 1)]),
        ]
    ),
    rewrites(
        row_of,
        (1, 6, 2, 4),
        [*SHUFFLE, axes(0, 2, 3, 1), to(1, 8, 6), to(1, 2, 4, 6), axes(0, 3, 1, 2), *SHUFFLE],
    ),
    rewrites(row_of, (1, 6, 2, 4), [*SHUFFLE, to(1, 8, 6), axes(0, 2, 1)]),
    rewrites(
        make_network,
        {"x": (1, 2, 3, 4), "z": (1, 2, 3, 4)},
        [
            make_layer("reshapeStatic", ["x"], ["b"], targetShape=[6, 4]),
            make_layer("getShape", ["x"], ["s"]),
            make_layer("reshapeDynamic", ["b", "s"], ["c"]),
            make_layer("reshapeLike", ["c", "z"], ["d"]),
            make_layer("activation", ["d"], ["y"], linear={"alpha": -1}),
        ],
        ["y"],
    ),
    refuses(
        "dynamic",
        with_sizes,
        row_of((1, 6, 1, 1), [("expandDims", {"axes": [0]}), ("squeeze", {"axes": [0]})]),
        *[(1, 4), (6, 6), (1, 1), (1, 1)],
    ),
    refuses("makes 2 axes of 4", with_output, row_of((1, 6, 1, 1), SQUEEZED), "b0"),
    rewrites(
        make_network,
        {"x": (2, 3)},
        [make_layer("expandDims", ["x"], ["b"], axes=[0]), make_layer("squeeze", ["b"], ["y"], axes=[0])],
        ["y"],
        id="an output that nothing moves",
    ),
    # The first two keep five axes between them; the last one is a row of its own.
    refuses("makes 5 axes of 4", with_reader, row_of((1, 6, 2, 4), SHUFFLE), "b1"),
)
