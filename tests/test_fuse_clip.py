"""`fuse_clip`: every way to bound a value with layers in a row, and what one layer cannot say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.mil import Array
from anesurgery.neuralnetwork.editing.making import make_layer, make_network
from anesurgery.neuralnetwork.editing.network import Network
from anesurgery.neuralnetwork.editing.testing import (
    apply_layer_pass,
    assert_refuses_layers,
    assert_same_network,
    spec_text,
)
from anesurgery.passes.layers.fuse_clip import FuseClip, example

STEP = FuseClip()
RELU: tuple[str, dict[str, Any]] = ("activation", {"ReLU": {}})
MINUS: tuple[str, dict[str, Any]] = ("activation", {"linear": {"alpha": -1.0}})
SAME: tuple[str, dict[str, Any]] = ("activation", {"linear": {"alpha": 1.0}})
TWICE: tuple[str, dict[str, Any]] = ("activation", {"linear": {"alpha": 2.0}})
LEAST = "minVal=-3.40282e+38"


def above(alpha: float, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "unary", {"type": "THRESHOLD", "alpha": alpha, **fields}


def clip(low: float, high: float) -> tuple[str, dict[str, Any]]:
    return "clip", {"minVal": low, "maxVal": high}


def row(*links: tuple[str, dict[str, Any]], rank5: bool = False, version: int | None = None) -> Any:
    """Layers one behind the other, from x to y."""
    blobs = ["x", *(f"b{i}" for i in range(1, len(links))), "y"]
    layers = [
        make_layer(kind, [blobs[i]], [blobs[i + 1]], **fields)
        for i, (kind, fields) in enumerate(links)
    ]
    shape = (2, 3, 4) if rank5 else (1, 2, 3, 4)
    spec = make_network({"x": shape}, layers, ["y"], rank5=rank5)
    spec.specificationVersion = version or spec.specificationVersion
    return spec


def numbers(spec: Any) -> dict[str, Array]:
    """Whole numbers from -12 to 11, and the same with a half."""
    array = spec.description.input[0].type.multiArrayType
    values = np.arange(-12, 12, dtype=np.float32)
    return {"x": (values + np.arange(24) % 2 / 2).reshape(array.shape).astype(np.float32)}


def layers_after(spec: Any, step: FuseClip = STEP) -> list[str]:
    after, session = apply_layer_pass(step, spec)
    assert session.changes, session.refusals
    assert all(change.proof is not None for change in session.changes)
    assert_same_network(step, spec, after, inputs=numbers(spec))
    return [line.split(" = ")[1] for line in spec_text(after).splitlines()[1:-2]]


@pytest.mark.parametrize("rank5", [False, True])
@pytest.mark.parametrize(
    ("links", "expected"),
    [
        ([RELU, MINUS, above(-6), MINUS], "clip(%x, maxVal=6)"),
        ([RELU, above(-6, scale=-1.0), MINUS], "clip(%x, maxVal=6)"),
        ([RELU, MINUS, above(-6), MINUS, RELU], "clip(%x, maxVal=6)"),
        ([MINUS, above(-6), MINUS, RELU], "clip(%x, maxVal=6)"),
        ([MINUS, above(-5), MINUS, above(-3)], "clip(%x, minVal=-3, maxVal=5)"),
        ([MINUS, above(2), MINUS], f"clip(%x, {LEAST}, maxVal=-2)"),
        ([MINUS, RELU, MINUS], f"clip(%x, {LEAST})"),
        ([clip(-4, 3), MINUS, RELU, MINUS], "clip(%x, minVal=-4)"),
        ([MINUS, clip(-4, 3), MINUS], "clip(%x, minVal=-3, maxVal=4)"),
        ([clip(-4, 3), clip(-1, 9)], "clip(%x, minVal=-1, maxVal=3)"),
        ([RELU, RELU], "activation(%x, ReLU={})"),
        ([SAME, RELU], "activation(%x, ReLU={})"),
        ([above(-2), RELU], "activation(%x, ReLU={})"),
        ([RELU, above(3)], "unary(%x, type=THRESHOLD, alpha=3)"),
        ([MINUS, MINUS], "activation(%x, linear={alpha=1})"),
    ],
)
def test_a_row_becomes_one_layer(links: list[Any], expected: str, rank5: bool) -> None:
    assert layers_after(row(*links, rank5=rank5)) == [expected]


def test_signs_that_cancel_leave_nothing() -> None:
    assert layers_after(row(MINUS, MINUS, ("unary", {"type": "ABS"}))) == ["unary(%x, type=ABS)"]


def test_the_row_begins_where_its_sign_allows() -> None:
    found = layers_after(row(MINUS, above(-7), MINUS, MINUS, above(-2), RELU))
    assert found == [
        f"clip(%x, {LEAST}, maxVal=7)",
        "activation(%b3, linear={alpha=-1})",
        "activation(%b4, ReLU={})",
    ]


@pytest.mark.parametrize(
    "spec",
    [
        row(RELU, TWICE, RELU),
        row(RELU),
        row(MINUS, RELU),
        row(RELU, ("activation", {"linear": {"alpha": -1.0, "beta": 1.0}}), RELU),
        row(RELU, above(1, shift=1.0)),
        row(RELU, above(1, scale=0.5)),
        row(RELU, above(float("nan"))),
        row(RELU, ("unary", {"type": "ABS"})),
        row(RELU, ("activation", {"leakyReLU": {"alpha": 0.5}})),
    ],
)
def test_not_its_business(spec: Any) -> None:
    after, session = apply_layer_pass(STEP, spec)
    assert after == spec
    assert not session.refusals


def test_bounds_of_minus_x() -> None:
    assert_refuses_layers(STEP, row(RELU, MINUS, above(-6)), "bound -x, not x")


def test_bounds_that_leave_one_number() -> None:
    assert_refuses_layers(STEP, row(clip(-4, 3), clip(5, 7)), "both bounds are 5")


@pytest.mark.parametrize("blob", ["above", "minus", "bound"])
def test_a_blob_in_between_that_is_an_output_ends_the_row(blob: str) -> None:
    spec = example()
    spec.description.output.add(name=blob).type.multiArrayType.dataType = 65568
    after, session = apply_layer_pass(STEP, spec)
    assert_same_network(
        STEP,
        spec,
        after,
        inputs={"x": 4 * np.random.default_rng(0).standard_normal((1, 2, 4, 4)).astype(np.float32)},
    )
    assert len(Network(after).nodes) == {"above": 2, "minus": 4, "bound": 4}[blob]
    assert bool(session.changes) == (blob == "above")


def test_a_blob_in_between_that_is_read_twice_ends_the_row() -> None:
    spec = example()
    spec.neuralNetwork.layers.append(make_layer("add", ["y", "minus"], ["z"]))
    spec.description.output[0].name = "z"
    after, _ = apply_layer_pass(STEP, spec)
    assert after == spec


@pytest.mark.parametrize(
    ("version", "newest", "fused"), [(1, 4, 4), (1, 3, 1), (4, 3, 4), (5, 4, 5)]
)
def test_the_version(version: int, newest: int, fused: int) -> None:
    spec = row(RELU, MINUS, above(-6), MINUS, rank5=version < 4, version=version)
    step = FuseClip(newest=newest)
    if fused == version and version < 4:
        assert_refuses_layers(step, spec, "clip needs specification 4; the model has 1")
        return
    assert layers_after(spec, step) == ["clip(%x, maxVal=6)"]
    assert apply_layer_pass(step, spec)[0].specificationVersion == fused
    old = row(RELU, RELU, rank5=True, version=1)
    assert apply_layer_pass(FuseClip(newest=3), old)[0].specificationVersion == 1


def test_pose_cpm(corpus: Path) -> None:
    found = ane.apply(str(corpus / "pose_cpm.mlmodel"), "fuse_clip", prove="sites")
    assert found.before == {
        "activation": 386, "convolution": 145, "batchnorm": 93, "unary": 93, "add": 29, "concat": 6,
        "upsample": 3, "pooling": 2,
    }  # fmt: skip
    assert found.after["clip"] == 93
    assert "unary" not in found.after
    assert sum(found.after.values()) == 426
    assert all(change.proof is not None for change in found.changes)
    assert any("became 4, which needs iOS 13" in note for note in found.notes)
