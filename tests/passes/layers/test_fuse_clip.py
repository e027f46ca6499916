"""`fuse_clip`: every way to bound a value with layers in a row, in old networks and in new ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pass_cases import ignores, rewrites, stays, table
from sketches import example_of
from two_sided import with_output, with_reader

from anesurgery.interpret import run
from anesurgery.mil import Array
from anesurgery.network_editing.network import Network
from anesurgery.neuralnetwork.importing import import_network
from anesurgery.neuralnetwork.making import make_layer, make_network
from anesurgery.passes.layers.fusing import FuseClip, FuseLinear
from anesurgery.testing import apply_pass, assert_same_numbers, text_of

STEP = FuseClip()
RELU: tuple[str, dict[str, Any]] = ("activation", {"ReLU": {}})
MINUS: tuple[str, dict[str, Any]] = ("activation", {"linear": {"alpha": -1.0}})
SAME: tuple[str, dict[str, Any]] = ("activation", {"linear": {"alpha": 1.0}})
TWICE: tuple[str, dict[str, Any]] = ("activation", {"linear": {"alpha": 2.0}})


def above(alpha: float, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "unary", {"type": "THRESHOLD", "alpha": alpha, **fields}


def clip(low: float, high: float) -> tuple[str, dict[str, Any]]:
    return "clip", {"minVal": low, "maxVal": high}


def row(*links: tuple[str, dict[str, Any]], rank5: bool = False, version: int | None = None) -> Any:
    """Layers in a row, from x to y."""
    blobs = ["x", *(f"b{i}" for i in range(1, len(links))), "y"]
    layers = [make_layer(kind, [blobs[i]], [blobs[i + 1]], **fields) for i, (kind, fields) in enumerate(links)]
    shape = (2, 3, 4) if rank5 else (1, 2, 3, 4)
    spec = make_network({"x": shape}, layers, ["y"], rank5=rank5)
    spec.specificationVersion = version or spec.specificationVersion
    return spec


def numbers(spec: Any) -> dict[str, Array]:
    """Whole numbers from -12 to 11, and the same with a half."""
    array = spec.description.input[0].type.multiArrayType
    values = np.arange(-12, 12, dtype=np.float32)
    return {"x": (values + np.arange(24) % 2 / 2).reshape(array.shape).astype(np.float32)}


def layers_after(spec: Any) -> list[str]:
    after, session = apply_pass(STEP, spec)
    assert session.changes, session.refusals
    assert all(change.proof is not None for change in session.changes)
    assert_same_numbers(spec, after, inputs=numbers(spec), rtol=STEP.tolerance.rtol)
    assert not apply_pass(STEP, after)[1].changes
    return [line.split(" = ")[1] for line in text_of(after).splitlines()[1:-2]]


def test_a_long_row_is_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    maker = Network.maker

    def counted(network: Network, blob: str) -> Any:
        looked.append(blob)
        return maker(network, blob)

    monkeypatch.setattr(Network, "maker", counted)
    counts = []
    for length in (20, 40):
        looked.clear()
        apply_pass(FuseClip(), row(*[RELU] * length))
        counts.append(len(looked))
    assert counts[1] < 2.5 * counts[0]


UPPER: list[list[tuple[str, dict[str, Any]]]] = [
    [RELU, MINUS, above(-6), MINUS],
    [RELU, above(-6, scale=-1.0), MINUS],
    [RELU, MINUS, above(-6), MINUS, RELU],
    [MINUS, above(-6), MINUS, RELU],
    [MINUS, above(-5), MINUS, above(-3)],
    [MINUS, above(2), MINUS],
    [MINUS, RELU, MINUS],
]
"""They bound from above: a `clip`, or two layers in iOS 11 and 12."""


def test_minus_infinity() -> None:
    """Two layers keep it; `clip` makes the least number of it."""
    values = np.array([-np.inf, -3, 3, np.inf], np.float32).reshape(1, 1, 4)
    for rank5, least in ((True, -np.inf), (False, np.finfo(np.float32).min)):
        spec = row(MINUS, above(-2), MINUS, rank5=rank5)
        shape = (1, 1, 4) if rank5 else (1, 1, 1, 4)
        spec.description.input[0].type.multiArrayType.ClearField("shape")
        spec.description.input[0].type.multiArrayType.shape.extend(shape)
        after, session = apply_pass(STEP, spec)
        assert session.changes
        program = import_network(after, keep_names=True).program
        (found,) = run(program, {"x": values.reshape(shape)}).values()
        assert found.ravel().tolist() == [least, -3, 2, 2]


@pytest.mark.parametrize("links", UPPER)
def test_two_layers_stay_as_they_are(links: list[Any]) -> None:
    after, _ = apply_pass(STEP, row(*links, rank5=True, version=1))
    assert len(after.neuralNetwork.layers) == 2
    for step in (STEP, FuseLinear()):
        again, session = apply_pass(step, after)
        assert again == after, text_of(again)
        assert not session.changes


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("version", "rank5", "kinds"),
    [(1, True, ["unary", "unary"]), (5, True, ["unary", "unary"]), (4, False, ["clip"]), (5, False, ["clip"])],
)
def test_the_version_stays(version: int, rank5: bool, kinds: list[str]) -> None:
    spec = row(RELU, MINUS, above(-6), MINUS, rank5=rank5, version=version)
    assert [text.split("(")[0] for text in layers_after(spec)] == kinds
    assert apply_pass(STEP, spec)[0].specificationVersion == version


def test_a_row_whose_end_a_branch_overwrites_is_shorter() -> None:
    spec = row(RELU, RELU, MINUS, RELU)
    for name in ("z", "c"):
        spec.description.input.add(name=name).CopyFrom(spec.description.input[0])
        spec.description.input[-1].name = name
    branch = make_layer("branch", ["c"], [])
    branch.branch.ifBranch.layers.append(make_layer("activation", ["z"], ["y"], ReLU={}))
    spec.neuralNetwork.layers.append(branch)
    after, session = apply_pass(STEP, spec)
    kinds = [node.kind for node in Network(after).nodes]
    assert kinds == ["activation", "activation", "activation", "branch"]  # one less
    assert len(session.changes) == 1


QUADRUPLE = {"x": 4 * np.random.default_rng(0).standard_normal((2, 4, 4)).astype(np.float32)}
test_cases, test_surroundings = table(
    STEP,
    *(
        rewrites(row, *links, rank5=rank5)
        for links in [
            [RELU, RELU],
            [SAME, RELU],
            [above(-2), RELU],
            [above(-0.0), SAME],
            [RELU, above(3)],
            [above(3), above(float("-inf"))],
            [above(3, scale=-1.0), above(5)],
            [MINUS, RELU],
            [MINUS, above(-7), MINUS, MINUS, above(-2), RELU],
            [MINUS, MINUS],
            [MINUS, MINUS, MINUS],
        ]
        for rank5 in [False, True]
    ),
    *(rewrites(row, *links) for links in UPPER),
    *(rewrites(row, *links, rank5=True, version=1) for links in UPPER),
    *(
        rewrites(row, *links, rank5=rank5)
        for links in [[RELU, MINUS, above(-6)], [RELU, RELU, MINUS], [above(-3), MINUS, above(-6)]]
        for rank5 in [False, True]
    ),
    *(
        rewrites(row, MINUS, above(4), MINUS, above(5), rank5=rank5, alone={"mutated": "one number is left: 5"})
        for rank5 in [False, True]
    ),
    rewrites(row, MINUS, MINUS, ("unary", {"type": "ABS"})),
    rewrites(row, *[above(-6, scale=-1.0), above(0, scale=-1.0)]),
    *(
        rewrites(row, *links, rank5=rank5, version=4 if rank5 else 5)
        for links in (
            [clip(-4, 3), MINUS, RELU, MINUS],
            [MINUS, clip(-4, 3), MINUS],
            [clip(-4, 3), clip(-1, 9)],
        )
        for rank5 in (False, True)
    ),
    *(
        ignores(row, *links, rank5=rank5)
        for links in [
            [RELU],
            [RELU, TWICE, RELU],
            [RELU, MINUS],
            [RELU, above(-6, scale=-1.0)],
            [MINUS, clip(-4, 3)],
            [clip(-4, 3), clip(5, 7)],
            [RELU, ("activation", {"linear": {"alpha": -1.0, "beta": 1.0}}), RELU],
            [RELU, above(1, shift=1.0)],
            [RELU, above(1, scale=0.5)],
            [RELU, above(float("nan"))],
            [RELU, ("unary", {"type": "ABS"})],
            [RELU, ("activation", {"leakyReLU": {"alpha": 0.5}})],
        ]
        for rank5 in (False, True)
    ),
    *(
        rewrites(with_output, example_of("fuse_clip"), blob, inputs=QUADRUPLE, id=f"{blob} is an output")
        for blob in ("above", "bound")
    ),
    stays(with_output, example_of("fuse_clip"), "minus"),
    stays(with_reader, example_of("fuse_clip"), "minus"),
)
