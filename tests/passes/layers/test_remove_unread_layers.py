"""`remove_unread_layers`: what goes, what stays, and that the outputs are what they were."""

from __future__ import annotations

from typing import Any

import numpy as np
from pass_cases import rewrites, stays, table
from sketches import example_of

from anesurgery.neuralnetwork.making import make_layer, make_network, weights
from anesurgery.passes.layers.folding import RemoveUnreadLayers
from anesurgery.testing import apply_pass

STEP = RemoveUnreadLayers()


def test_the_probabilities_of_a_classifier_are_read() -> None:
    layers = [make_layer("softmax", ["x"], ["p"]), make_layer("unary", ["x"], ["z"], type="ABS")]
    spec = make_network({"x": (2, 1, 1)}, layers, [], rank5=True)
    network = spec.neuralNetwork
    spec.neuralNetworkClassifier.layers.extend(network.layers)
    spec.neuralNetworkClassifier.labelProbabilityLayerName = "p"
    after, session = apply_pass(STEP, spec)
    assert [layer.output[0] for layer in after.neuralNetworkClassifier.layers] == ["p"]
    assert len(session.changes) == 1


def read_by_a_branch() -> Any:
    branch = make_layer("branch", ["c"], [])
    for network in (branch.branch.ifBranch, branch.branch.elseBranch):
        network.layers.append(make_layer("add", ["x", "c"], ["y"]))
    data = weights(np.ones(1, np.float32))
    return make_network(
        {"x": (4,)}, [make_layer("loadConstantND", [], ["c"], shape=[1], data=data), branch], ["y"]
    )


test_cases, test_surroundings = table(
    STEP,
    rewrites(example_of, "remove_unread_layers", rtol=STEP.tolerance.rtol, id="example"),
    stays(make_network, {"x": (1, 2, 4, 4)}, [make_layer("split", ["x"], ["y", "rest"], nOutputs=2)], ["y"]),
    stays(read_by_a_branch),
)
