"""Gather, scatter, sorting, blocks, detection, quantization, random numbers: each against its definition."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from closeness import assert_close
from computed_ops import OneOp, computed

from anesurgery.errors import InterpretError
from anesurgery.mil import Array, ct

RNG = np.random.default_rng(0)


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def whole(low: int, high: int, *shape: int) -> Array:
    return RNG.integers(low, high, shape).astype(np.int32)


# Scatter and gather -------------------------------------------------------------------------------

COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "update": lambda old, new: new,
    "add": lambda old, new: old + new,
    "sub": lambda old, new: old - new,
    "mul": lambda old, new: old * new,
    "div": lambda old, new: old / new if old.dtype.kind == "f" else np.trunc(old / new),
    "max": np.maximum,
    "min": np.minimum,
}


def data_of(kind: str, *shape: int) -> Array:
    return floats(*shape) + 2 if kind == "f" else whole(1, 9, *shape)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("opset", [ct.target.iOS15, ct.target.iOS17])
@pytest.mark.parametrize("kind", ["f", "i"])
@pytest.mark.parametrize("mode", COMBINE)
def test_scatter_one_slice_after_the_other(one_op: OneOp, mode: str, kind: str, opset: Any) -> None:
    for axis, count in itertools.product((0, 1, -1), (0, 1, 7)):
        data = data_of(kind, 4, 3, 5)
        length = data.shape[axis]
        index = whole(0 if opset == ct.target.iOS17 else -length, length, count)
        shape = list(data.shape)
        shape[axis] = count
        updates = data_of(kind, *shape)
        expected = np.moveaxis(data.copy(), axis, 0)
        for place, row in zip(index, np.moveaxis(updates, axis, 0), strict=True):
            expected[place] = COMBINE[mode](expected[place], row)
        (found,) = one_op("scatter", opset, data=data, indices=index, updates=updates, axis=axis, mode=mode)
        assert_close(found, np.moveaxis(expected, 0, axis))


@pytest.mark.parametrize("kind", ["f", "i"])
@pytest.mark.parametrize("mode", COMBINE)
def test_scatter_along_an_axis_one_element_after_the_other(one_op: OneOp, mode: str, kind: str) -> None:
    if mode != "update" and kind == "i":
        return
    for axis, count in itertools.product((0, 1, -1), (1, 7)):
        data = data_of(kind, 4, 3, 5)
        shape = list(data.shape)
        shape[axis] = count
        index, updates = whole(0, data.shape[axis], *shape), data_of(kind, *shape)
        expected = data.copy()
        for place in itertools.product(*map(range, shape)):
            at = list(place)
            at[axis] = index[place]
            expected[tuple(at)] = COMBINE[mode](expected[tuple(at)], updates[place])
        given = {"data": data, "indices": index, "updates": updates}
        (found,) = computed("scatter_along_axis", given, axis=axis, mode=mode)
        assert_close(found, expected)


@pytest.mark.parametrize("mode", COMBINE)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_scatter_nd_one_slice_after_the_other(one_op: OneOp, mode: str, depth: int) -> None:
    data = floats(3, 2, 4) + 3
    index = np.stack([whole(0, n, 5, 2) for n in data.shape[:depth]], -1)
    updates = floats(5, 2, *data.shape[depth:]) + 3
    expected = data.copy()
    for place in itertools.product(range(5), range(2)):
        at = tuple(index[place])
        expected[at] = COMBINE[mode](expected[at], updates[place])
    (found,) = one_op("scatter_nd", data=data, indices=index, updates=updates, mode=mode)
    assert_close(found, expected, 1e-5)


def test_many_updates_of_one_place_are_fast_enough() -> None:
    data, index = np.zeros((50, 8), np.float32), whole(0, 50, 100_000)
    updates = floats(100_000, 8)
    given = {"data": data, "indices": index, "updates": updates}
    for mode, reduce in (("max", np.maximum), ("add", np.add)):
        expected = data.copy()
        reduce.at(expected, index, updates)
        assert_close(computed("scatter", given, mode=mode)[0], expected, 1e-4)
    (found,) = computed("scatter", given, mode="update")
    last = {int(place): i for i, place in enumerate(index)}
    assert_close(found, np.stack([updates[last[i]] for i in range(50)]))


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_gather_with_batches(one_op: OneOp, batch: int) -> None:
    x = floats(2, 3, 4, 5)
    for axis, inner in itertools.product(range(batch, 4), [(), (2,), (2, 1)]):
        index = whole(0, x.shape[axis], *x.shape[:batch], *inner)
        expected = np.empty((*x.shape[:axis], *inner, *x.shape[axis + 1 :]), np.float32)
        for lead in itertools.product(*map(range, x.shape[:batch])):
            expected[lead] = np.take(x[lead], index[lead], axis - batch)
        (found,) = one_op("gather", x=x, indices=index, axis=axis, batch_dims=batch)
        assert_close(found, expected)


@pytest.mark.parametrize("opset", [ct.target.iOS15, ct.target.iOS16])
def test_negative_indices_count_from_the_end(opset: Any) -> None:
    x = floats(3, 4)
    index = np.array([-1, 0, -3], np.int32)
    assert_close(computed("gather", {"x": x, "indices": index}, opset)[0], x[index])
    pairs = np.stack([index, index], -1)
    found = computed("gather_nd", {"x": x, "indices": pairs}, opset)[0]
    assert_close(found, x[index, index])
    rows = np.stack([index] * 4, -1)
    found = computed("gather_along_axis", {"x": x, "indices": rows}, opset, axis=0)[0]
    assert_close(found, np.take_along_axis(x, rows, 0))


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_gather_nd_with_batches(one_op: OneOp, batch: int) -> None:
    x = floats(2, 3, 4, 5)
    for depth in range(1, 5 - batch):
        parts = [whole(0, n, *x.shape[:batch], 6) for n in x.shape[batch : batch + depth]]
        index = np.stack(parts, -1)
        expected = np.empty((*x.shape[:batch], 6, *x.shape[batch + depth :]), np.float32)
        for place in itertools.product(*map(range, (*x.shape[:batch], 6))):
            expected[place] = x[(*place[:-1], *index[place])]
        (found,) = one_op("gather_nd", x=x, indices=index, batch_dims=batch)
        assert_close(found, expected)


OUTSIDE = np.array([0, 3, -1], np.int32)
VALIDATED: dict[str, dict[str, Array]] = {
    "gather": {"x": floats(3, 4), "indices": OUTSIDE},
    "gather_nd": {"x": floats(3, 4), "indices": OUTSIDE[:, None]},
    "gather_along_axis": {"x": floats(3, 4), "indices": np.stack([OUTSIDE] * 4, -1)},
    "scatter": {"data": floats(3, 4), "indices": OUTSIDE, "updates": floats(3, 4)},
    "scatter_nd": {"data": floats(3, 4), "indices": OUTSIDE[:, None], "updates": floats(3, 4)},
    "scatter_along_axis": {
        "data": floats(3, 4),
        "indices": np.stack([OUTSIDE] * 4, -1),
        "updates": floats(3, 4),
    },
}


@pytest.mark.parametrize("op_type", VALIDATED)
def test_indices_outside(op_type: str) -> None:
    inputs = VALIDATED[op_type]
    with pytest.raises(InterpretError, match=r"an index is outside \[0, 3\)"):
        computed(op_type, inputs, validate_indices=True)
    (found,) = computed(op_type, inputs)  # undefined, but no error
    if op_type.startswith("scatter"):
        assert_close(found[0], inputs["data"][0] + inputs["updates"][0])
        assert_close(found[1:], inputs["data"][1:])
    else:
        assert_close(found, inputs["x"][[0, 2, 0]])


def test_nothing_to_gather_and_nothing_to_scatter() -> None:
    x, none = floats(3, 4), np.zeros((0,), np.int32)
    assert computed("gather", {"x": x, "indices": none}, axis=1)[0].shape == (3, 0)
    empty = {"data": x, "indices": none, "updates": np.zeros((0, 4), np.float32)}
    for mode in COMBINE:
        assert_close(computed("scatter", empty, mode=mode)[0], x)
