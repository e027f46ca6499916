"""Layers that read, write or find by index, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from one_layer import Case, Fill, assert_close, floats, network, run

import anesurgery as ane
from anesurgery.errors import LoadError
from anesurgery.mil import Array, quiet_host, walk_ops
from anesurgery.neuralnetwork.importing import import_network

with quiet_host():
    pass


def numbers(*values: Any) -> Array:
    return np.array(values, np.float32)


CUBE = floats(4, 3, 5)
MATRIX = numbers([0, -1], [3, 1], [-4, 2])


def along(axis: int) -> Case:
    where = np.random.default_rng(axis).integers(-3, 3, (4, 3, 2) if axis == 2 else (4, 2, 5))
    return Case(
        lambda n: n.add_gather_along_axis("l", ["x", "z"], "y", axis=axis),
        lambda x, z: np.take_along_axis(x, z.astype(int), axis),
        (CUBE, where.astype(np.float32)),
    )


GATHERS: dict[str, Case] = {
    "rows": Case(
        lambda n: n.add_gather("l", ["x", "z"], "y", axis=0), lambda x, z: x[z.astype(int)], (CUBE, MATRIX)
    ),
    "last_axis": Case(
        lambda n: n.add_gather("l", ["x", "z"], "y", axis=-1),
        lambda x, z: np.take(x, z.astype(int), 2),
        (CUBE, numbers(4, -5, 0)),
    ),
    "of_a_vector": Case(
        lambda n: n.add_gather("l", ["x", "z"], "y", axis=0),
        lambda x, z: x[z.astype(int)],
        (floats(6), numbers(-1)),
    ),
    "along_1": along(1),
    "along_2": along(2),
    "nd_slices": Case(
        lambda n: n.add_gather_nd("l", ["x", "z"], "y"),
        lambda x, z: x[z[..., 0].astype(int), z[..., 1].astype(int)],
        (CUBE, numbers([[0, -1], [-4, 2]])),
    ),
    "nd_number": Case(
        lambda n: n.add_gather_nd("l", ["x", "z"], "y"), lambda x, z: x[3, 1, -1], (CUBE, numbers(3, 1, -1))
    ),
}


@pytest.mark.parametrize("name", GATHERS)
def test_gather_reads(name: str) -> None:
    case = GATHERS[name]
    assert_close(run(case.fill, *case.inputs), case.expected(*case.inputs))


def test_constant_indices_become_positive_constants() -> None:
    def fill(n: Any) -> None:
        n.add_load_constant_nd("i", "i", numbers(-1, 0), (2,))
        n.add_gather("l", ["x", "i"], "y", axis=0)

    loaded = import_network(network(fill, CUBE))
    assert [op.op_type for op in walk_ops(loaded.program) if op.op_type != "const"][-1] == "gather"
    assert "select" not in {op.op_type for op in walk_ops(loaded.program)}
    assert_close(ane.run(loaded, {"x": CUBE})["y"], CUBE[[-1, 0]])


MODES: dict[str, Any] = {
    "UPDATE": None,
    "ADD": np.add,
    "SUB": np.subtract,
    "MUL": np.multiply,
    "DIV": np.divide,
    "MAX": np.maximum,
    "MIN": np.minimum,
}


def put(x: Array, at: Any, updates: Array, mode: str) -> Array:
    made = x.copy()
    made[at] = updates if mode == "UPDATE" else MODES[mode](x[at], updates)
    return made


@pytest.mark.parametrize("mode", MODES)
def test_scatter_writes(mode: str) -> None:
    rows, updates = numbers(2, -4), floats(4, 2, 5, seed=1)
    rows = numbers(2, -3)
    found = run(lambda n: n.add_scatter("l", ["x", "z", "w"], "y", axis=1, mode=mode), CUBE, rows, updates)
    assert_close(found, put(CUBE, (slice(None), [2, 0]), updates, mode))


@pytest.mark.parametrize("mode", MODES)
def test_scatter_nd_writes(mode: str) -> None:
    at, updates = numbers([0, -1], [3, 1]), floats(2, 5, seed=1)
    found = run(lambda n: n.add_scatter_nd("l", ["x", "z", "w"], "y", mode=mode), CUBE, at, updates)
    assert_close(found, put(CUBE, ([0, 3], [2, 1]), updates, mode))


@pytest.mark.parametrize("mode", MODES)
def test_scatter_along_axis_writes(mode: str) -> None:
    at, updates = np.argsort(floats(4, 3, 5, seed=3), 1)[:, :2], floats(4, 2, 5, seed=1)
    found = run(
        lambda n: n.add_scatter_along_axis("l", ["x", "z", "w"], "y", axis=-2, mode=mode),
        CUBE,
        (at - 3).astype(np.float32),
        updates,
    )
    first, last = np.indices(at.shape)[[0, 2]]
    assert_close(found, put(CUBE, (first, at, last), updates, mode))


@pytest.mark.parametrize("bias", [None, floats(6, seed=2)])
def test_embedding(bias: Array | None) -> None:
    table = floats(6, 4, seed=1)
    indices = numbers([[3], [0], [1]], [[2], [2], [3]])
    found = run(lambda n: n.add_embedding_nd("l", "x", "y", 4, 6, table, b=bias), indices)
    expected = table.T[indices[..., 0].astype(int)]
    assert_close(found, expected if bias is None else expected + bias)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("stated", [True, False])
def test_one_hot(axis: int, stated: bool) -> None:
    indices, inputs = numbers([0, 3], [2, 1], [1, 1]), ["x"] if stated else ["x", "z"]
    size = {"one_hot_vector_size": 4} if stated else {}
    values = (indices,) if stated else (indices, numbers(4))
    found = run(lambda n: n.add_one_hot("l", inputs, "y", axis=axis, on_value=2, off_value=-1, **size), *values)
    expected = np.moveaxis(np.where(indices[..., None] == np.arange(4), 2.0, -1.0), -1, axis)
    assert_close(found, expected)


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("smallest", [True, False])
@pytest.mark.parametrize("axis", [0, -1, 1])
def test_top_k(axis: int, smallest: bool, stated: bool) -> None:
    order = np.argsort(CUBE if smallest else -CUBE, axis)
    at = np.take(order, range(2), axis)
    inputs, how = (["x"], {"k": 2}) if stated else (["x", "z"], {})
    values, indices = run(
        lambda n: n.add_topk("l", inputs, ["v", "i"], axis=axis, use_bottom_k=smallest, **how),
        *((CUBE,) if stated else (CUBE, numbers(2))),
        outputs=("v", "i"),
    )
    assert_close(indices, at.astype(np.float32))
    assert_close(values, np.take_along_axis(CUBE, at, axis))


@pytest.mark.parametrize("descending", [True, False])
def test_arg_sort(descending: bool) -> None:
    found = run(lambda n: n.add_argsort("l", "x", "y", axis=1, descending=descending), CUBE)
    assert_close(found, np.argsort(-CUBE if descending else CUBE, 1).astype(np.float32))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_arg_extreme(name: str, keep: bool) -> None:
    found = run(lambda n: getattr(n, f"add_{name}")("l", "x", "y", axis=-2, keepdims=keep), CUBE)
    assert_close(found, getattr(np, name)(CUBE, axis=1, keepdims=keep).astype(np.float32))


def test_arg_max_of_a_vector_has_one_axis() -> None:
    found = run(lambda n: n.add_argmax("l", "x", "y", axis=0, keepdims=False), numbers(1, 3, 2))
    assert_close(found, numbers(1))


def sums(x: Array, axis: int, exclusive: bool, reverse: bool) -> Array:
    y = np.flip(x, axis) if reverse else x
    y = np.cumsum(y, axis, dtype=np.float64)
    if exclusive:
        y = np.roll(y, 1, axis)
        np.moveaxis(y, axis, 0)[0] = 0
    return np.flip(y, axis) if reverse else y


@pytest.mark.parametrize("axis", [0, 1, -1, -3])
@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
def test_cum_sum(axis: int, exclusive: bool, reverse: bool) -> None:
    how = {"exclusive": exclusive, "reverse": reverse}
    x = np.abs(CUBE)
    stated = run(lambda n: n.add_cumsum("l", ["x"], "y", axis=axis, **how), x)
    assert_close(stated, sums(x, axis, exclusive, reverse))
    asked = run(lambda n: n.add_cumsum("l", ["x", "z"], "y", **how), x, numbers(axis))
    assert_close(asked, sums(x, axis, exclusive, reverse))


NMS_OUTPUTS = ("boxes", "scores", "indices", "count")
BOXES = numbers([[0, 0, 2, 2], [0.2, 0, 2, 2], [5, 5, 2, 2], [5, 5.1, 2, 2], [9, 9, 1, 1]])
SCORES = numbers([[0.6, 0.1], [0.9, 0.2], [0.3, 0.7], [0.8, 0.1], [0.05, 0.1]])


@pytest.mark.parametrize(
    ("by_class", "least", "most", "kept"),
    [
        (False, 0.0, 5, [1, 3, 4]),
        (True, 0.0, 5, [1, 3, 2, 4]),
        (False, 0.2, 5, [1, 3]),
        (False, 0.0, 2, [1, 3]),
        (False, 2.0, 3, [1]),
    ],
)
@pytest.mark.parametrize("asked", [False, True])
def test_non_maximum_suppression(by_class: bool, least: float, most: int, kept: list[int], asked: bool) -> None:
    def fill(n: Any) -> None:
        n.add_load_constant_nd("iou", "iou", numbers(0.4), (1,))
        n.add_load_constant_nd("most", "most", numbers(most), (1,))
        inputs = ["x", "z", "iou", "w", "most"] if asked else ["x", "z"]
        n.add_nms("l", inputs, NMS_OUTPUTS, 0.4, least, most, by_class)

    inputs = (BOXES, SCORES, numbers(least)) if asked else (BOXES, SCORES)
    boxes, scores, indices, count = run(fill, *inputs, outputs=NMS_OUTPUTS)
    gap = most - len(kept)
    assert_close(indices, numbers([*kept, *[-1] * gap]))
    assert_close(count, numbers(len(kept)))
    assert_close(boxes, np.pad(BOXES[:, kept], ((0, 0), (0, gap), (0, 0))))
    assert_close(scores, np.pad(SCORES[:, kept], ((0, 0), (0, gap), (0, 0))))


def unknown_overlap(n: Any) -> None:
    n.add_nms("l", ["x", "z", "w"], NMS_OUTPUTS)


@pytest.mark.parametrize(
    ("fill", "inputs", "outputs", "words"),
    [
        (
            unknown_overlap,
            (BOXES, SCORES, numbers(0.5)),
            NMS_OUTPUTS,
            "layer 'l' .*takes iouThreshold from a dynamic blob",
        ),
        (
            lambda n: n.add_embedding_nd("l", "x", "y", 4, 6, floats(6, 4)),
            (numbers(1, 2),),
            ("y",),
            "layer 'l' .*indices with a last axis of size 1, not 2",
        ),
        (
            lambda n: n.add_embedding_nd("l", "x", "y", 4, 6, floats(6, 3)),
            (numbers([1]),),
            ("y",),
            "layer 'l' .*weights has 18 numbers, expected 24",
        ),
        (
            lambda n: n.add_gather("l", ["x", "z"], "y", axis=3),
            (CUBE, numbers(1)),
            ("y",),
            r"layer 'l' \(gather\): has axis 3, expected -3 to 2",
        ),
        (
            lambda n: n.add_argmax("l", "x", "y", axis=4),
            (CUBE,),
            ("y",),
            r"layer 'l' \(argMax\): has axis 4, expected -3 to 2",
        ),
    ],
)
def test_wrong_layers_are_explained(fill: Fill, inputs: Any, outputs: Any, words: str) -> None:
    with pytest.raises(LoadError, match=words):
        import_network(network(fill, *inputs, outputs=outputs))
