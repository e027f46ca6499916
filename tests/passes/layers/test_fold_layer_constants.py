"""`fold_layer_constants`: layers that change nothing, values that are known, and what is only nearly so."""

from __future__ import annotations

from typing import Any

import numpy as np
from pass_cases import ignores, refuses, rewrites, stays, table

from anesurgery.mil import Array
from anesurgery.neuralnetwork.making import make_layer, make_network, weights
from anesurgery.passes.layers.folding import FoldLayerConstants
from anesurgery.testing import apply_pass, assert_refuses, assert_rewrites, assert_same_numbers

STEP = FoldLayerConstants()
Shape = tuple[int, ...]
ABS = make_layer("unary", ["s"], ["y"], type="ABS")
EDGES = {"borderAmounts": [{"startEdgeSize": 0, "endEdgeSize": 0}] * 2}


def constant(name: str, value: Array, rank5: bool = False) -> Any:
    kind = "loadConstant" if rank5 else "loadConstantND"
    return make_layer(kind, [], [name], shape=value.shape, data=weights(value))


def beside(kind: str, x: Shape, value: Array, first: bool = False, rank5: bool = False, **fields: Any) -> Any:
    """A layer of x and a constant, its result read by a layer that makes the output."""
    layer = make_layer(kind, ["c", "x"] if first else ["x", "c"], ["s"], **fields)
    layers = [constant("c", value, rank5), layer, ABS]
    return make_network({"x": x}, layers, ["y"], rank5=rank5)


def alone(kind: str, **fields: Any) -> Any:
    layers = [make_layer(kind, ["x"], ["s"], **fields), ABS]
    return make_network({"x": (1, 2, 4, 4)}, layers, ["y"])


def kinds_after(spec: Any, step: FoldLayerConstants = STEP) -> list[str]:
    after, session = apply_pass(step, spec)
    assert session.changes, session.refusals
    assert all(change.proof is not None for change in session.changes)
    assert_same_numbers(spec, after, rtol=step.tolerance.rtol)
    return [layer.WhichOneof("layer") for layer in after.neuralNetwork.layers]


def test_the_output_is_an_input() -> None:
    layers = [constant("c", np.ones(4)), make_layer("multiply", ["x", "c"], ["y"])]
    spec = make_network({"x": (4,)}, layers, ["y"])
    assert_rewrites(STEP, spec, "network(%x: 4) {\n  %y: 4 = activation(%x, linear={alpha=1})\n  return %y\n}")
    after, _ = apply_pass(STEP, spec)
    assert_refuses(STEP, after, "has to make an output of the network")


def test_a_blob_that_a_loop_overwrites_is_read_where_it_was() -> None:
    branch = make_layer("branch", ["c"], [])
    branch.branch.ifBranch.layers.append(make_layer("copy", ["c"], ["z"]))
    branch.branch.elseBranch.layers.append(make_layer("copy", ["x"], ["z"]))
    layers = [
        make_layer("unary", ["x"], ["z"], type="ABS"),
        make_layer("activation", ["z"], ["s"], linear={"alpha": 1.0}),
        constant("c", np.ones(1)),
        branch,
        make_layer("add", ["s", "z"], ["y"]),
    ]
    assert_refuses(STEP, make_network({"x": (1,)}, layers, ["y"]), "overwritten, or made in a loop")


def known(*layers: Any, value: Shape = (2, 3)) -> Any:
    """Layers that make s of the constant a, added to x."""
    start = constant("a", np.random.default_rng(0).random(value).astype(np.float32) + 0.5)
    last = make_layer("addBroadcastable", ["x", "s"], ["y"])
    return make_network({"x": (1, 1)}, [start, *layers, last], ["y"])


def test_a_constant_in_the_mapping_to_rank_5() -> None:
    value = np.random.default_rng(0).random((2, 3, 4)).astype(np.float32)
    layers = [
        constant("a", value, rank5=True),
        make_layer("activation", ["a"], ["s"], sigmoid={}),
        make_layer("add", ["x", "s"], ["y"]),
    ]
    spec = make_network({"x": (2, 3, 4)}, layers, ["y"], rank5=True)
    assert kinds_after(spec) == ["loadConstant", "add"]
    assert apply_pass(STEP, spec)[0].specificationVersion == spec.specificationVersion
    layers[1:] = [
        make_layer("permute", ["a"], ["p"], axis=[1, 0, 2, 3]),
        make_layer("permute", ["p"], ["s"], axis=[1, 0, 2, 3]),
        make_layer("add", ["x", "s"], ["y"]),
    ]
    spec = make_network({"x": (2, 3, 4)}, layers, ["y"], rank5=True)
    assert kinds_after(spec) == ["loadConstant", "add"]
    _, session = apply_pass(STEP, spec)
    assert [r.reason for _, r in session.refusals] == [
        "its value has the shape (2, 1, 1, 3, 4), not (1, 1, C, H, W)"
    ]


ONES: dict[str, Any] = {"shapeScale": [1], "scale": weights(np.ones(1))}


KNOWN: list[tuple[str, list[str], dict[str, Any]]] = [
    ("transpose", ["a"], {"axes": [1, 0]}),
    ("multiplyBroadcastable", ["a", "a"], {}),
    ("unary", ["a"], {"type": "LOG"}),
    ("tanh", ["a"], {}),
    ("reduceSum", ["a"], {"axes": [1], "keepDims": True}),
    ("tile", ["a"], {"reps": [5, 1]}),
    ("getShape", ["x"], {}),
]
WITHOUT_EFFECT: list[tuple[str, dict[str, Any]]] = [
    ("activation", {"linear": {"alpha": 1.0}}),
    ("add", {"alpha": 0.0}),
    ("multiply", {"alpha": 1.0}),
    ("unary", {"type": "POWER", "alpha": 1.0}),
    ("scale", ONES),
    ("scale", ONES | {"hasBias": True, "shapeBias": [2], "bias": weights(np.zeros(2))}),
    ("bias", {"shape": [1, 4, 4], "bias": weights(np.zeros(16))}),
    ("padding", {"constant": {"value": 3.0}, "paddingAmounts": EDGES}),
    ("padding", {"reflection": {}}),
    ("crop", {"cropAmounts": EDGES}),
    ("constantPad", {"value": 2.0, "padAmounts": [0] * 8}),
]
test_cases, test_surroundings = table(
    STEP,
    refuses("it holds 1.00000012, not 1", alone, "multiply", alpha=1.0000001),
    refuses("it holds 9.99999975e-06, not 0", alone, "activation", linear={"alpha": 1.0, "beta": 1e-05}),
    refuses("0.999899983, not 1", alone, "scale", shapeScale=[2], scale=weights(np.array([1, 0.9999]))),
    refuses("not 0", alone, "unary", type="POWER", alpha=1.0, shift=0.0001),
    refuses("it holds nan, not 0", beside, "add", (4,), np.array([0, 0, np.nan, 0])),
    refuses("it holds nan, not 1", beside, "multiply", (4,), np.array([1, 1, np.nan, 7])),
    refuses("it makes the shape (3, 4) of (1, 4)", beside, "multiplyBroadcastable", (1, 4), np.ones((3, 4))),
    refuses("it makes the shape (1, 4) of (4,)", beside, "addBroadcastable", (4,), np.zeros((1, 4))),
    *(
        rewrites(
            beside,
            kind,
            (2, 3, 4) if rank5 else (1, 2, 3, 4),
            np.full((2, 3, 4) if rank5 else (1, 2, 3, 4), number),
            first,
            rank5,
        )
        for kind, number, first in [
            ("multiply", 1, False),
            ("multiply", 1, True),
            ("multiplyBroadcastable", 1, True),
            ("add", 0, False),
            ("addBroadcastable", 0, False),
            ("addBroadcastable", -0.0, True),
            ("subtractBroadcastable", 0, False),
            ("divideBroadcastable", 1, False),
            ("powBroadcastable", 1, False),
        ]
        for rank5 in [False, True]
    ),
    rewrites(
        known,
        *[
            make_layer("unary", ["a"], ["b"], type="EXP"),
            make_layer("multiply", ["b"], ["c"], alpha=0.3),
            make_layer("softmaxND", ["c"], ["s"], axis=1),
        ],
    ),
    refuses(
        "its value has 6000 numbers, more than 1024", known, make_layer("tile", ["a"], ["s"], reps=[1000, 1])
    ),
    rewrites(known, make_layer("tile", ["a"], ["s"], reps=[1000, 1]), step=FoldLayerConstants(limit=6000)),
    rewrites(known, make_layer("transpose", ["a"], ["s"], axes=[1, 0]), value=(50, 60)),
    *(rewrites(alone, kind, quick=kind == "crop", **fields) for kind, fields in WITHOUT_EFFECT),
    ignores(beside, "multiply", (4,), np.array([1, 1, 2, 1])),
    ignores(beside, "subtractBroadcastable", (4,), np.zeros(4), first=True),
    ignores(beside, "divideBroadcastable", (4,), np.ones(4), first=True),
    ignores(beside, "powBroadcastable", (4,), np.ones(4), first=True),
    ignores(beside, "floorDivBroadcastable", (4,), np.ones(4)),
    ignores(alone, "activation", linear={"alpha": -1.0}),
    ignores(alone, "activation", ReLU={}),
    ignores(alone, "unary", type="THRESHOLD", alpha=1.0),
    ignores(alone, "padding", constant={}, paddingAmounts={"borderAmounts": [{"endEdgeSize": 1}, {}]}),
    *(
        rewrites(known, make_layer(kind, inputs, ["s"], **fields), id=f"known {kind}")
        for kind, inputs, fields in KNOWN
    ),
    stays(known, make_layer("randomNormalLike", ["a"], ["s"], stdDev=1.0)),
)
