"""Layers that move, cut, repeat or make numbers, against numpy, in both mappings of shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from one_layer import Case, Fill, assert_close, floats, network, run

import anesurgery as ane
from anesurgery.errors import LoadError
from anesurgery.mil import Array
from anesurgery.neuralnetwork.importing import import_network


def triangle(method: str, **how: int) -> Fill:
    return lambda n: getattr(n, method)("l", "x", "y", **how)


def band(x: Array, lower: int, upper: int) -> Array:
    y = x if upper < 0 else np.tril(x, upper)
    return y if lower < 0 else np.triu(y, -lower)


def numbers(*values: float) -> Array:
    return np.array(values, np.float32)


IMAGE, CUBE, ONES = floats(2, 3, 4, 5), floats(2, 3, 4), floats(1, 3, 1, 2)
STATIC = {"begin_ids": [0, 1, -1], "end_ids": [2, 3, -4], "strides": [1, 1, -2]}
MASKED = {"begin_masks": [False, True, True], "end_masks": [True, False, True]}

CASES: dict[str, Case] = {
    "transpose": Case(lambda n: n.add_transpose("l", [2, 0, 1], "x", "y"), lambda x: x.transpose(2, 0, 1)),
    "reshape_static": Case(lambda n: n.add_reshape_static("l", "x", "y", (4, -1)), lambda x: x.reshape(4, 6)),
    "reshape_like": Case(
        lambda n: n.add_reshape_like("l", ["x", "z"], "y"),
        lambda x, z: x.reshape(z.shape),
        (CUBE, floats(6, 4)),
    ),
    "reshape_dynamic": Case(
        lambda n: n.add_reshape_dynamic("l", ["x", "z"], "y"),
        lambda x, z: x.reshape(8, 3),
        (CUBE, numbers(8, -1)),
    ),
    "rank_preserving_reshape": Case(
        lambda n: n.add_rank_preserving_reshape("l", "x", "y", (0, -1, 2)), lambda x: x.reshape(2, 6, 2)
    ),
    "squeeze": Case(lambda n: n.add_squeeze("l", "x", "y", axes=[0, -2]), lambda x: x.reshape(3, 2), (ONES,)),
    "squeeze_all": Case(
        lambda n: n.add_squeeze("l", "x", "y", squeeze_all=True), lambda x: x.reshape(3, 2), (ONES,)
    ),
    "squeeze_to_one": Case(
        lambda n: n.add_squeeze("l", "x", "y", squeeze_all=True), lambda x: x.reshape(1), (floats(1, 1),)
    ),
    "expand_dims": Case(
        lambda n: n.add_expand_dims("l", "x", "y", axes=[0, -1]), lambda x: x.reshape(1, 2, 3, 4, 1)
    ),
    "flatten_0": Case(lambda n: n.add_flatten_to_2d("l", "x", "y", axis=0), lambda x: x.reshape(1, 24)),
    "flatten_1": Case(lambda n: n.add_flatten_to_2d("l", "x", "y", axis=-2), lambda x: x.reshape(2, 12)),
    "flatten_3": Case(lambda n: n.add_flatten_to_2d("l", "x", "y", axis=3), lambda x: x.reshape(24, 1)),
    "get_shape": Case(lambda n: n.add_get_shape("l", "x", "y"), lambda x: numbers(*x.shape)),
    "concat": Case(
        lambda n: n.add_concat_nd("l", ["x", "z"], "y", axis=-2),
        lambda x, z: np.concatenate([x, z], 1),
        (CUBE, floats(2, 5, 4)),
    ),
    "concat_interleaved": Case(
        lambda n: n.add_concat_nd("l", ["x", "z"], "y", axis=1, interleave=True),
        lambda x, z: np.stack([x, z], 2).reshape(2, 6, 4),
        (CUBE, floats(2, 3, 4, seed=1)),
    ),
    "stack": Case(
        lambda n: n.add_stack("l", ["x", "z"], "y", axis=1),
        lambda x, z: np.stack([x, z], 1),
        (CUBE, floats(2, 3, 4, seed=1)),
    ),
    "tile": Case(lambda n: n.add_tile("l", "x", "y", reps=[2, 1, 3]), lambda x: np.tile(x, (2, 1, 3))),
    "tile_fewer": Case(lambda n: n.add_tile("l", "x", "y", reps=[3]), lambda x: np.tile(x, 3)),
    "tile_dynamic": Case(
        lambda n: n.add_tile("l", ["x", "z"], "y"), lambda x, z: np.tile(x, (1, 2, 2)), (CUBE, numbers(1, 2, 2))
    ),
    "reverse": Case(
        lambda n: n.add_reverse("l", "x", "y", reverse_dim=[True, False, True]), lambda x: x[::-1, :, ::-1]
    ),
    "reverse_sequence": Case(
        lambda n: n.add_reverse_sequence("l", ["x", "z"], "y", batch_axis=0, seq_axis=-1),
        lambda x, z: np.stack([x[0][:, [2, 1, 0, 3]], x[1]]),
        (CUBE, numbers(3, 1)),
    ),
    "band": Case(
        lambda n: n.add_matrix_band_part("l", "x", "y", num_lower=1, num_upper=-1), lambda x: band(x, 1, -1)
    ),
    **{
        f"lower_{k}": Case(triangle("add_lower_triangular", k=k), lambda x, k=k: np.tril(x, k))
        for k in (-2, -1, 0, 1)
    },
    **{
        f"upper_{k}": Case(triangle("add_upper_triangular", k=k), lambda x, k=k: np.triu(x, k))
        for k in (-1, 0, 1, 2)
    },
    "slice_static": Case(
        lambda n: n.add_slice_static("l", "x", "y", **STATIC, begin_masks=[False] * 3, end_masks=[False] * 3),
        lambda x: x[0:2, 1:3, -1:-4:-2],
    ),
    "slice_masked": Case(
        lambda n: n.add_slice_static("l", "x", "y", **STATIC, **MASKED), lambda x: x[0:, :3, ::-2]
    ),
    "slice_squeezed": Case(
        lambda n: n.add_slice_static("l", "x", "y", **STATIC, **MASKED, squeeze_masks=[True, False, True]),
        lambda x: x[0, :3, -1],
    ),
    "slice_dynamic": Case(
        lambda n: n.add_slice_dynamic(
            "l", ["x", "z", "w"], "y", strides=[1, 1, -2], **MASKED, squeeze_masks=[False] * 3
        ),
        lambda x, z, w: x[0:, :3, ::-2],
        (CUBE, numbers(0, 1, -1), numbers(2, 3, -4)),
    ),
    "slice_with_flags_of_five_axes": Case(
        lambda n: n.add_slice_dynamic("l", ["x", "z", "w"], "y", strides=[1, 2, 1, 1, 1]),
        lambda x, z, w: x[0:2, 0:3:2, 1:3],
        (CUBE, numbers(0, 0, 1), numbers(2, 3, 3)),
    ),
    "slice_dynamic_squeezed": Case(
        lambda n: n.add_slice_dynamic(
            "l",
            ["x", "z"],
            "y",
            end_ids=[2, 3, -4],
            strides=[1, 1, -2],
            **MASKED,
            squeeze_masks=[True, False, True],
        ),
        lambda x, z: x[1, :3, -1],
        (CUBE, numbers(1, 1, 0)),
    ),
    "slice_by_size": Case(
        lambda n: n.add_slice_by_size("l", ["x", "z"], "y", axis=1, size=2),
        lambda x, z: x[:, 1:3],
        (CUBE, numbers(1)),
    ),
    "sliding_windows": Case(
        lambda n: n.add_sliding_windows("l", "x", "y", axis=-1, window_size=3, step=2),
        lambda x: np.stack([x[..., 0:3], x[..., 2:5]], -2),
        (IMAGE,),
    ),
    "pad": Case(
        lambda n: n.add_constant_pad("l", ["x"], "y", value=7, pad_amounts=[0, 1, 2, 0, 1, 1]),
        lambda x: np.pad(x, ((0, 1), (2, 0), (1, 1)), constant_values=7),
    ),
    "pad_dynamic": Case(
        lambda n: n.add_constant_pad("l", ["x", "z"], "y", value=7),
        lambda x, z: np.pad(x, ((0, 1), (2, 0), (1, 1)), constant_values=7),
        (CUBE, numbers(0, 1, 2, 0, 1, 1)),
    ),
    "pad_to": Case(
        lambda n: n.add_constant_pad(
            "l", ["x"], "y", value=7, pad_amounts=[0, 4, 5, 0, 0, 0], pad_to_given_output_size_mode=True
        ),
        lambda x: np.pad(x, ((0, 2), (2, 0), (0, 0)), constant_values=7),
    ),
    "pad_to_dynamic": Case(
        lambda n: n.add_constant_pad("l", ["x", "z"], "y", value=7, pad_to_given_output_size_mode=True),
        lambda x, z: np.pad(x, ((0, 2), (2, 0), (0, 0)), constant_values=7),
        (CUBE, numbers(0, 4, 5, 0, 0, 0)),
    ),
    "fill_like": Case(lambda n: n.add_fill_like("l", "x", "y", value=3), lambda x: np.full(x.shape, 3.0)),
    "fill_dynamic": Case(
        lambda n: n.add_fill_dynamic("l", "x", "y", value=3), lambda x: np.full((2, 5), 3.0), (numbers(2, 5),)
    ),
    "broadcast_like": Case(
        lambda n: n.add_broadcast_to_like("l", ["x", "z"], "y"),
        lambda x, z: np.broadcast_to(x, (4, 2, 3)),
        (floats(2, 1), floats(4, 1, 3)),
    ),
    "broadcast_static": Case(
        lambda n: n.add_broadcast_to_static("l", "x", "y", (4, 2, 3)),
        lambda x: np.broadcast_to(x, (4, 2, 3)),
        (floats(2, 1),),
    ),
    "broadcast_dynamic": Case(
        lambda n: n.add_broadcast_to_dynamic("l", ["x", "z"], "y"),
        lambda x, z: np.broadcast_to(x, (4, 2, 3)),
        (floats(2, 1), numbers(4, 2, 3)),
    ),
    "range_1": Case(
        lambda n: n.add_range_dynamic("l", ["x"], "y", start=2, step=1.5),
        lambda x: np.arange(2, 7.2, 1.5),
        (numbers(7.2),),
    ),
    "range_2": Case(
        lambda n: n.add_range_dynamic("l", ["x", "z"], "y", step=-2),
        lambda x, z: np.arange(5, -6, -2.0),
        (numbers(-6), numbers(5)),
    ),
    "range_3": Case(
        lambda n: n.add_range_dynamic("l", ["x", "z", "w"], "y"),
        lambda x, z, w: np.arange(1, 9, 3.0),
        (numbers(9), numbers(1), numbers(3)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_layer_agrees_with_numpy(name: str) -> None:
    case = CASES[name]
    assert_close(run(case.fill, *case.inputs), case.expected(*case.inputs))


@pytest.mark.parametrize(
    ("how", "parts"),
    [({"num_splits": 3}, [3, 3, 3]), ({"num_splits": 2}, [5, 4]), ({"split_sizes": [2, 6, 1]}, [2, 6, 1])],
)
def test_split(how: dict[str, Any], parts: list[int]) -> None:
    x = floats(2, 9, 3)
    names = tuple(f"y{i}" for i in range(len(parts)))
    found = run(lambda n: n.add_split_nd("l", "x", names, axis=-2, **how), x, outputs=names)
    for each, expected in zip(found, np.split(x, np.cumsum(parts)[:-1], 1), strict=True):
        assert_close(each, expected)


SOURCES: dict[str, tuple[Fill, Any]] = {
    "load_constant": (
        lambda n: n.add_load_constant_nd("l", "c", np.arange(6.0), (2, 3)),
        np.arange(6.0).reshape(2, 3),
    ),
    "fill_static": (lambda n: n.add_fill_static("l", "c", (2, 3), value=4), np.full((2, 3), 4.0)),
    "range_static": (
        lambda n: n.add_range_static("l", "c", input_names=[], end=9, start=0.5, step=2.5),
        np.arange(0.5, 9, 2.5),
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_layers_without_inputs(name: str) -> None:
    fill, expected = SOURCES[name]

    def both(n: Any) -> None:
        fill(n)
        n.add_add_broadcastable("s", ["x", "c"], "y")

    assert_close(run(both, numbers(1)), 1 + expected)


def test_a_shape_made_of_a_shape_stays_known() -> None:
    def fill(n: Any) -> None:
        n.add_get_shape("s", "x", "s")
        n.add_load_constant_nd("order", "order", np.array([2, 0, 1]), (3,))
        n.add_gather("g", ["s", "order"], "g")
        n.add_reshape_dynamic("r", ["x", "g"], "y")

    spec = network(fill, CUBE)
    function = import_network(spec).program.functions["main"]
    assert tuple(function.outputs[0].shape) == (4, 2, 3)
    assert_close(run(fill, CUBE), CUBE.reshape(4, 2, 3))


FLEXIBLE: dict[str, tuple[Fill, Callable[[Array], Array]]] = {
    "flatten": (lambda n: n.add_flatten_to_2d("l", "x", "y", axis=2), lambda x: x.reshape(-1, x.shape[2])),
    "rank_preserving_reshape": (
        lambda n: n.add_rank_preserving_reshape("l", "x", "y", (0, -1, 1)),
        lambda x: x.reshape(x.shape[0], -1, 1),
    ),
    "lower": (lambda n: n.add_lower_triangular("l", "x", "y", k=-1), lambda x: np.tril(x, -1)),
    "upper": (lambda n: n.add_upper_triangular("l", "x", "y", k=1), lambda x: np.triu(x, 1)),
    "fill_like": (lambda n: n.add_fill_like("l", "x", "y", value=2), lambda x: np.full(x.shape, 2.0)),
    "tile": (lambda n: n.add_tile("l", "x", "y", reps=[1, 2, 1]), lambda x: np.tile(x, (1, 2, 1))),
    "pad_to": (
        lambda n: n.add_constant_pad(
            "l", ["x"], "y", pad_amounts=[0, 7, 0, 0, 0, 0], pad_to_given_output_size_mode=True
        ),
        lambda x: np.pad(x, ((0, max(7 - x.shape[0], 0)), (0, 0), (0, 0))),
    ),
    "slice": (
        lambda n: n.add_slice_static(
            "l", "x", "y", [0, 1, -2], [9, -1, 9], [1] * 3, [False] * 3, [True, False, True]
        ),
        lambda x: x[:, 1:-1, -2:],
    ),
    "windows": (
        lambda n: n.add_sliding_windows("l", "x", "y", axis=1, window_size=2),
        lambda x: np.stack([x[:, i : i + 2] for i in range(x.shape[1] - 1)], 1),
    ),
}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("shape", [(5, 5, 5), (1, 4, 3)])
@pytest.mark.parametrize("name", FLEXIBLE)
def test_shapes_may_be_dynamic(name: str, shape: tuple[int, ...]) -> None:
    fill, expected = FLEXIBLE[name]
    spec = network(fill, CUBE)
    for _ in shape:
        sizes = spec.description.input[0].type.multiArrayType.shapeRange.sizeRanges.add()
        sizes.lowerBound, sizes.upperBound = 1, 9
    x = floats(*shape)
    assert_close(ane.run(import_network(spec), {"x": x})["y"], expected(x))


LEGACY: dict[str, tuple[Fill, Callable[[Array], Array]]] = {
    "transpose": (lambda n: n.add_transpose("l", [0, 1, 4, 2, 3], "x", "y"), lambda x: x.transpose(2, 0, 1)),
    "slice": (
        lambda n: n.add_slice_static(
            "l", "x", "y", [0, 0, 1, 0, 0], [1, 1, 2, 9, 9], [1] * 5, [False] * 5, [False] * 5
        ),
        lambda x: x[1:2],
    ),
    "concat": (lambda n: n.add_concat_nd("l", ["x", "x"], "y", axis=2), lambda x: np.concatenate([x, x])),
    "reshape": (lambda n: n.add_reshape_static("l", "x", "y", (1, 1, 4, 3, 2)), lambda x: x.reshape(4, 3, 2)),
    "pad": (
        lambda n: n.add_constant_pad("l", ["x"], "y", value=1, pad_amounts=[0, 0, 0, 0, 1, 0, 0, 2, 0, 0]),
        lambda x: np.pad(x, ((1, 0), (0, 2), (0, 0)), constant_values=1),
    ),
    "three_axes": (lambda n: n.add_transpose("l", [1, 2, 0], "x", "y"), lambda x: x.transpose(1, 2, 0)),
    "four_axes": (lambda n: n.add_transpose("l", [0, 2, 3, 1], "x", "y"), lambda x: x.transpose(1, 2, 0)),
    "slice_of_three": (
        lambda n: n.add_slice_static("l", "x", "y", [0, 1, 2], [2, 3, 4], [1] * 3, [False] * 3, [False] * 3),
        lambda x: x[:2, 1:3, 2:4],
    ),
    "flatten": (lambda n: n.add_flatten_to_2d("l", "x", "y", axis=3), lambda x: x.reshape(1, 2, 12)),
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", LEGACY)
def test_axes_of_the_rank_5_mapping_count_the_sequence(name: str) -> None:
    fill, expected = LEGACY[name]
    assert_close(run(fill, CUBE, legacy=True), expected(CUBE))


@pytest.mark.parametrize(
    ("fill", "words"),
    [
        (lambda n: n.add_reshape_static("l", "x", "y", (5, 5)), r"layer 'l' \(reshapeStatic\): does not fit"),
        (lambda n: n.add_transpose("l", [0, 1], "x", "y"), r"layer 'l' \(transpose\): orders 2 axes of 3"),
        (lambda n: n.add_rank_preserving_reshape("l", "x", "y", (0, -1)), "states 2 sizes for an input of 3"),
        (lambda n: n.add_range_dynamic("l", ["x"], "y", step=1), "takes one number, but its input is of"),
        (lambda n: n.add_squeeze("l", "x", "y", axes=[1]), "removes axis 1, whose size is 3"),
    ],
)
def test_wrong_layers_are_explained(fill: Fill, words: str) -> None:
    with pytest.raises(LoadError, match=words):
        import_network(network(fill, CUBE))


def test_dynamic_strides_are_explained() -> None:
    def fill(n: Any) -> None:
        n.add_slice_dynamic("l", ["x", "z", "z", "w"], "y")

    spec = network(fill, floats(5), numbers(1), numbers(1))
    with pytest.raises(LoadError, match="layer 'l' .*takes its strides from a dynamic blob"):
        import_network(spec)


def test_a_range_of_steps_of_0_is_explained() -> None:
    spec = network(lambda n: n.add_range_dynamic("l", ["x"], "y", step=0), numbers(3))
    with pytest.raises(LoadError, match="layer 'l' .*counts in steps of 0"):
        import_network(spec)


def test_a_constant_of_another_length_is_explained() -> None:
    spec = network(lambda n: n.add_load_constant_nd("l", "y", np.arange(6.0), (2, 3)), numbers(1))
    spec.neuralNetwork.layers[0].loadConstantND.shape[0] = 4
    with pytest.raises(LoadError, match="layer 'l' .*data has 6 numbers, expected 12"):
        import_network(spec)
