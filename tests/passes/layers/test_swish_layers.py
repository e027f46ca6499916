"""`swish_layers`: the class by its name, its beta, and what the name does not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_layer import floats
from pass_cases import refuses, table

import anesurgery as ane
from anesurgery.files.package import read_spec
from anesurgery.mil import mb
from anesurgery.neuralnetwork.importing import import_network
from anesurgery.neuralnetwork.making import make_layer, make_network, weights
from anesurgery.passes.layers.folding import SwishLayers
from anesurgery.testing import apply_pass, text_of

STEP = SwishLayers()


def swish(shape: tuple[int, ...] = (1, 2, 4, 4), rank5: bool = False, **fields: Any) -> Any:
    layers = [make_layer("custom", ["x"], ["y"], **({"className": "Swish"} | fields))]
    return make_network({"x": shape}, layers, ["y"], rank5=rank5)


def as_defined(ctx: Any, params: Any, inputs: list[Any]) -> Any:
    """The formula of the paper, for a network that is still as it was."""
    given = params.parameters.get("beta", None)
    beta = 1.0 if given is None else float(getattr(given, given.WhichOneof("value")))
    return mb.mul(x=inputs[0], y=mb.sigmoid(x=mb.mul(x=inputs[0], y=np.float32(beta))))


def ran(spec: Any, x: Any) -> Any:
    return ane.run(import_network(spec, custom={"Swish": as_defined}), {"x": x})["y"]


@pytest.mark.parametrize("rank5", [False, True])
@pytest.mark.parametrize(
    ("parameters", "kinds"),
    [
        ({}, ["activation", "multiply"]),
        ({"beta": {"doubleValue": 1.0}}, ["activation", "multiply"]),
        ({"beta": {"doubleValue": 0.5}}, ["activation", "activation", "multiply"]),
        ({"beta": {"intValue": 2}}, ["activation", "activation", "multiply"]),
        ({"beta": {"longValue": -1}}, ["activation", "activation", "multiply"]),
    ],
)
def test_numbers(parameters: dict[str, Any], kinds: list[str], rank5: bool) -> None:
    spec = swish((2, 4, 4) if rank5 else (1, 2, 4, 4), rank5, parameters=parameters)
    after, session = apply_pass(STEP, spec)
    assert [layer.WhichOneof("layer") for layer in after.neuralNetwork.layers] == kinds
    (change,) = session.changes
    assert change.proof is None
    assert "whose code is not in the file" in change.unchecked
    x = 4 * floats(*((2, 4, 4) if rank5 else (1, 2, 4, 4)))
    np.testing.assert_array_equal(ran(after, x), ran(spec, x))


def test_other_classes_stay_and_may_be_named() -> None:
    spec = swish(className="SiLU")
    after, session = apply_pass(STEP, spec)
    assert after == spec
    assert not session.refusals
    named = SwishLayers(class_names=("SiLU",))
    text = """
network(%x: 1x2x4x4) {
  %y_activation: 1x2x4x4 = activation(%x, sigmoid={})
  %y: 1x2x4x4 = multiply(%x, %y_activation)
  return %y
}
"""
    after, _ = apply_pass(named, spec)
    assert text_of(after) == text.strip("\n")


def test_a_real_network(corpus: Path) -> None:
    """Its Swish has a beta of 0.01; the shapes after it become known, and it runs."""
    path = corpus / "custom_swish_mcneural.mlmodel"
    surgery = ane.apply(str(path), "swish_layers", prove="both")
    assert [change.where for change in surgery.changes] == ["swish_1"]
    old = import_network(read_spec(path), custom={"Swish": as_defined})
    image = np.random.default_rng(0).integers(0, 256, (1, 3, 256, 256)).astype(np.uint8)
    found, wanted = (
        ane.run(import_network(surgery.subject.spec), {"image": image}),
        ane.run(old, {"image": image}),
    )
    np.testing.assert_array_equal(found["output"], wanted["output"])


UNLIKE: list[tuple[dict[str, Any], str]] = [
    ({"weights": [weights(np.ones(2))]}, "it has 1 weights"),
    ({"parameters": {"alpha": {"doubleValue": 1.0}}}, "it has the parameters alpha"),
    ({"parameters": {"beta": {"intValue": 1}, "axis": {"intValue": 1}}}, "it has the parameters axis"),
    ({"parameters": {"beta": {"stringValue": "1"}}}, "its parameter beta is stringValue"),
    ({"parameters": {"beta": {}}}, "its parameter beta is empty"),
]
test_cases, test_surroundings = table(
    STEP,
    refuses(
        "it reads 2 blobs and makes 1",
        make_network,
        {"x": (1, 2), "z": (1, 2)},
        [make_layer("custom", ["x", "z"], ["y"], className="Swish")],
        ["y"],
    ),
    *(refuses(words, swish, **fields) for fields, words in UNLIKE),
)
