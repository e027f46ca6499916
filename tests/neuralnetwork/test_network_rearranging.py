"""Normalizations, products and layers that move numbers: each form against numpy and torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F  # noqa: N812 - the usual name
from layer_case import LayerCase, assert_near, build, check, t
from one_layer import floats

import anesurgery as ane
from anesurgery.errors import LoadError
from anesurgery.mil import Array, quiet_host
from anesurgery.neuralnetwork.importing import import_network

with quiet_host():
    from coremltools.models.neural_network import NeuralNetworkBuilder


@dataclass
class Case(LayerCase):
    """One form of a layer, of a larger image."""

    shapes: tuple[tuple[int, ...], ...] = ((4, 6, 8),)


STATISTICS = {n: floats(4, seed=i) for i, n in enumerate(("gamma", "beta", "mean"))}
STATISTICS["variance"] = np.abs(floats(4, seed=9)) + 0.5


def column(name: str) -> Array:
    return STATISTICS[name].reshape(-1, 1, 1)


def standard(x: Array, axes: Any, epsilon: float) -> Array:
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + epsilon)


def stored(x: Array, epsilon: float = 1e-5) -> Array:
    scale = column("gamma") / np.sqrt(column("variance") + epsilon)
    return (x - column("mean")) * scale + column("beta")


def batchnorm(expected: Callable[[Array], Array], shape: tuple[int, ...] = (4, 6, 8), **options: Any) -> Case:
    exact = len(shape) == 4
    return Case(
        f"batchnorm_{sorted(options)}",
        lambda b: b.add_batchnorm("l", 4, **STATISTICS, input_name="x", output_name="out", **options),
        expected,
        (shape,),
        exact,
    )


def batch_statistics(b: Any) -> None:
    b.add_batchnorm("l", 4, **STATISTICS, input_name="x", output_name="out")
    b.spec.neuralNetwork.layers[-1].batchnorm.computeMeanVar = True


def mvn(across: bool, variance: bool) -> Case:
    axes = (-3, -2, -1) if across else (-2, -1)

    def expected(x: Array) -> Array:
        return standard(x, axes, 1e-3) if variance else x - x.mean(axes, keepdims=True)

    return Case(
        f"mvn_{across}_{variance}", lambda b: b.add_mvn("l", "x", "out", across, variance, 1e-3), expected
    )


def lrn(x: Array) -> Array:
    return F.local_response_norm(t(x)[None], 3, 0.3, 0.7, 1.5)[0].numpy()


GAMMA, SHIFT = floats(6, 8, seed=2), floats(6, 8, seed=3)
NORMALIZATIONS = [
    batchnorm(stored),
    batchnorm(lambda x: stored(x, 0.1), epsilon=0.1),
    batchnorm(stored, epsilon=0),
    batchnorm(stored, (2, 4, 6, 8)),
    batchnorm(
        lambda x: standard(x, (-2, -1), 1e-5) * column("gamma") + column("beta"),
        (2, 4, 6, 8),
        compute_mean_var=True,
        instance_normalization=True,
    ),
    Case(
        "batchnorm_batch",
        batch_statistics,
        lambda x: standard(x, (0, 2, 3), 1e-5) * column("gamma") + column("beta"),
        ((2, 4, 6, 8),),
        True,
    ),
    *(mvn(a, v) for a in (False, True) for v in (False, True)),
    Case("l2", lambda b: b.add_l2_normalize("l", "x", "out", 0.1), lambda x: x / np.sqrt((x * x).sum() + 0.1)),
    Case(
        "l2_default",
        lambda b: b.add_l2_normalize("l", "x", "out", 0),
        lambda x: x / np.sqrt((x * x).sum() + 1e-6),
    ),
    Case("lrn", lambda b: b.add_lrn("l", "x", "out", 0.3, 0.7, 3, 1.5), lrn),
    Case(
        "layer_norm",
        lambda b: b.add_layer_normalization("l", "x", "out", [6, 8], GAMMA, SHIFT, 1e-3),
        lambda x: standard(x, (-2, -1), 1e-3) * GAMMA + SHIFT,
        ((2, 4, 6, 8),),
        True,
    ),
]

W, B = floats(5, 192, seed=4), floats(5, seed=5)
SMALL = floats(5, 8, seed=6)


def product(
    shape: tuple[int, ...], weight: Array, exact: bool, out: tuple[int, ...], bias: bool = True
) -> Case:
    def expected(x: Array) -> Array:
        y = x.reshape(-1, weight.shape[1]) @ weight.T + (B if bias else 0)
        return y.reshape(out)

    return Case(
        f"product_{shape}_{exact}_{bias}",
        lambda b: b.add_inner_product("l", weight, B if bias else None, weight.shape[1], 5, bias, "x", "out"),
        expected,
        (shape,),
        exact,
    )


def matmul(shapes: Any, ta: bool = False, tb: bool = False) -> Case:
    def expected(x: Array, y: Array) -> Array:
        return (x.swapaxes(-1, -2) if ta else x) @ (y.swapaxes(-1, -2) if tb else y)

    return Case(
        f"matmul_{ta}_{tb}",
        lambda b: b.add_batched_mat_mul("l", ["x", "y"], "out", ta, tb),
        expected,
        shapes,
        True,
    )


def matmul_stored(*shape: int) -> Case:
    matrix = floats(8, 5, seed=1)
    return Case(
        f"matmul_stored_{len(shape)}",
        lambda b: b.add_batched_mat_mul(
            "l", ["x"], "out", weight_matrix_rows=8, weight_matrix_columns=5, W=matrix, bias=B
        ),
        lambda x: x @ matrix + B,
        (shape,),
        True,
    )


TABLE = floats(5, 7, seed=7)
PRODUCTS = [
    product((4, 6, 8), W, False, (5,)),
    product((4, 6, 8), W, False, (5,), bias=False),
    product((8,), SMALL, False, (5,)),
    product((8,), SMALL, True, (5,)),
    product((3, 8), SMALL, True, (3, 5)),
    product((2, 3, 8), SMALL, True, (2, 3, 5)),
    product((2, 4, 6, 8), W, True, (2, 5, 1, 1)),
    product((3, 2, 4, 6, 8), W, True, (3, 2, 5, 1, 1)),
    product((3, 2, 4, 6, 8), W, False, (3, 2, 5, 1, 1)),
    matmul(((2, 3, 4), (2, 4, 5))),
    matmul(((2, 4, 3), (2, 5, 4)), True, True),
    matmul(((2, 1, 3, 4), (3, 4, 5))),
    matmul_stored(3, 8),
    matmul_stored(2, 3, 8),
    matmul_stored(2, 2, 3, 8),
    Case(
        "embedding",
        lambda b: b.add_embedding("l", TABLE, B, 7, 5, True, "x", "out"),
        lambda x: TABLE[:, 3] + B,
        ((1,),),
        values={"x": np.array([3.0], np.float32)},
    ),
    Case(
        "embedding_sequence",
        lambda b: b.add_embedding("l", TABLE, None, 7, 5, False, "x", "out"),
        lambda x: TABLE[:, [2, 6, 0]].T.reshape(3, 1, 5, 1, 1),
        ((3, 1, 1, 1, 1),),
        values={"x": np.array([2.0, 6, 0], np.float32).reshape(3, 1, 1, 1, 1)},
    ),
]


def reshaped(mode: int, *target: int) -> Case:
    def expected(x: Array) -> Array:
        if mode == 0:
            return x.reshape(target)
        channel, height, width = target
        return x.transpose(1, 2, 0).reshape(height, width, channel).transpose(2, 0, 1)

    return Case(
        f"reshape_{mode}_{len(target)}", lambda b: b.add_reshape("l", "x", "out", target, mode), expected
    )


def permuted(*order: int) -> Case:
    def expected(x: Array) -> Array:
        y = x[None].transpose(order)
        return y[0] if y.shape[0] == 1 else y[:, None]

    return Case(f"permute_{order}", lambda b: b.add_permute("l", list(order), "x", "out"), expected)


def cut(axis: str, begin: int, end: int, stride: int = 1) -> Case:
    place = {"channel": 0, "height": 1, "width": 2}[axis]
    parts = tuple(slice(begin, end, stride) if i == place else slice(None) for i in range(3))

    def fill(b: Any) -> None:
        b.add_slice("l", "x", "out", axis, max(begin, 0), end, stride)
        b.spec.neuralNetwork.layers[-1].slice.startIndex = begin

    return Case(f"slice_{axis}_{begin}_{end}", fill, lambda x: x[parts])


CHANNELS = np.arange(1, 17, dtype=np.float32).reshape(8, 1, 2)
TO_SPACE = np.array([[[1, 5, 2, 6], [9, 13, 10, 14]], [[3, 7, 4, 8], [11, 15, 12, 16]]], np.float32)
SHUFFLED = np.array([[[1, 3, 2, 4], [5, 7, 6, 8]], [[9, 11, 10, 12], [13, 15, 14, 16]]], np.float32)
CONSTANT = floats(4, 6, 8, seed=8)


def loaded(b: Any) -> None:
    b.add_load_constant("c", "constant", CONSTANT.reshape(-1), [4, 6, 8])
    b.add_elementwise("l", ["x", "constant"], "out", "ADD")


def sequence_concat(b: Any) -> None:
    b.add_elementwise("l", ["x", "y"], "out", "CONCAT")
    b.spec.neuralNetwork.layers[-1].concat.sequenceConcat = True


REARRANGING = [
    Case("flatten_first", lambda b: b.add_flatten("l", 0, "x", "out"), lambda x: x.reshape(-1)),
    Case(
        "flatten_last", lambda b: b.add_flatten("l", 1, "x", "out"), lambda x: x.transpose(1, 2, 0).reshape(-1)
    ),
    Case(
        "flatten_4",
        lambda b: b.add_flatten("l", 0, "x", "out"),
        lambda x: x.reshape(2, -1, 1, 1),
        ((2, 4, 6, 8),),
        True,
    ),
    reshaped(0, 6, 4, 8),
    reshaped(1, 6, 4, 8),
    Case(
        "reshape_sequence",
        lambda b: b.add_reshape("l", "x", "out", [6, 4, 8, 1], 0),
        lambda x: x.reshape(6, 1, 4, 8, 1),
    ),
    Case(
        "reshape_sequence_last",
        lambda b: b.add_reshape("l", "x", "out", [6, 4, 8, 1], 1),
        lambda x: x.transpose(1, 2, 0).reshape(6, 8, 1, 4).transpose(0, 3, 1, 2)[:, None],
    ),
    permuted(0, 1, 2, 3),
    permuted(0, 3, 1, 2),
    permuted(3, 1, 2, 0),
    permuted(0, 3, 2, 1),
    permuted(2, 0, 1, 3),
    Case(
        "permute_5",
        lambda b: b.add_permute("l", [3, 1, 2, 0], "x", "out"),
        lambda x: x.transpose(4, 1, 2, 3, 0),
        ((3, 2, 4, 6, 8),),
        True,
    ),
    Case(
        "concat",
        lambda b: b.add_elementwise("l", ["x", "y"], "out", "CONCAT"),
        lambda x, y: np.concatenate([x, y]),
        ((4, 6, 8), (2, 6, 8)),
    ),
    Case("concat_sequence", sequence_concat, lambda x, y: np.stack([x, y])[:, None], ((4, 6, 8), (4, 6, 8))),
    Case(
        "split",
        lambda b: b.add_split("l", "x", ["out", "other"]),
        lambda x: (x[:2], x[2:]),
        outputs=("out", "other"),
    ),
    Case("repeat", lambda b: b.add_sequence_repeat("l", 3, "x", "out"), lambda x: np.stack([x] * 3)[:, None]),
    cut("channel", 1, 3),
    cut("height", 0, -1),
    cut("width", -5, -1),
    cut("width", 1, 8, 2),
    Case("crop", lambda b: b.add_crop("l", 1, 2, 0, 3, [0, 0], ["x"], "out"), lambda x: x[:, 0:3, 1:6]),
    Case(
        "crop_as",
        lambda b: b.add_crop("l", 0, 0, 0, 0, [1, 2], ["x", "y"], "out"),
        lambda x, y: x[:, 1:4, 2:6],
        ((4, 6, 8), (4, 3, 4)),
    ),
    Case("load_constant", loaded, lambda x: x + CONSTANT),
    Case(
        "depth_to_space",
        lambda b: b.add_reorganize_data("l", "x", "out", "DEPTH_TO_SPACE", 2),
        lambda x: TO_SPACE,
        ((8, 1, 2),),
        values={"x": CHANNELS},
    ),
    Case(
        "space_to_depth",
        lambda b: b.add_reorganize_data("l", "x", "out", "SPACE_TO_DEPTH", 2),
        lambda x: CHANNELS,
        ((2, 2, 4),),
        values={"x": TO_SPACE},
    ),
    Case(
        "pixel_shuffle",
        lambda b: b.add_reorganize_data("l", "x", "out", "PIXEL_SHUFFLE", 2),
        lambda x: SHUFFLED,
        ((8, 1, 2),),
        values={"x": CHANNELS},
    ),
    Case(
        "pixel_shuffle_3",
        lambda b: b.add_reorganize_data("l", "x", "out", "PIXEL_SHUFFLE", 2),
        lambda x: SHUFFLED,
        ((8, 1, 2),),
        True,
        values={"x": CHANNELS},
    ),
]


def padded(kind: str, mode: str) -> Case:
    return Case(
        f"pad_{kind}",
        lambda b: b.add_padding("l", 1, 2, 3, 0, 0.5, "x", "out", kind),
        lambda x: F.pad(t(x)[None], [1, 2, 3, 0], mode, **({"value": 0.5} if mode == "constant" else {}))[0],
    )


def grid(kind: str, size: int, n: int) -> Array:
    """Where samples lie, in the words of the specification."""
    i = np.arange(n)
    found = {
        "DEFAULT": i * size / n,
        "ALIGN_CORNERS_TRUE": i * (size - 1) / max(n - 1, 1),
        "ALIGN_CORNERS_FALSE": (i + 0.5) * size / n - 0.5,
        "STRICT_ALIGN_ENDPOINTS_MODE": np.linspace(0, size - 1, n),
        "ALIGN_ENDPOINTS_MODE": np.linspace(0, size - 1, n) if n > 1 else np.array([(size - 1) / 2]),
        "UPSAMPLE_MODE": np.linspace(0, size - size / n, n),
        "ROI_ALIGN_MODE": (i + 0.5) * max(1, size - 1) / n,
    }[kind]
    return np.clip(found, 0, size - 1)


def sample(x: Array, at: Array, axis: int) -> Array:
    low = np.minimum(np.floor(at).astype(int), x.shape[axis] - 1)
    high = np.minimum(low + 1, x.shape[axis] - 1)
    share = (at - low).reshape([-1 if a == axis % x.ndim else 1 for a in range(x.ndim)])
    return np.take(x, low, axis) * (1 - share) + np.take(x, high, axis) * share


def upsampled(mode: str, factors: tuple[float, float] = (2, 3)) -> Case:
    def expected(x: Array) -> Array:
        sizes = [int(x.shape[i + 1] * factors[i]) for i in range(2)]
        return sample(sample(x, grid(mode, x.shape[1], sizes[0]), 1), grid(mode, x.shape[2], sizes[1]), 2)

    return Case(
        f"upsample_{mode}_{factors}",
        lambda b: b.add_upsample("l", *factors, "x", "out", "BILINEAR", linear_upsample_mode=mode),
        expected,
        exact=True,
    )


def resized(mode: str, high: int = 9, wide: int = 5) -> Case:
    return Case(
        f"resize_{mode}_{high}",
        lambda b: b.add_resize_bilinear("l", "x", "out", high, wide, mode),
        lambda x: sample(sample(x, grid(mode, x.shape[1], high), 1), grid(mode, x.shape[2], wide), 2),
    )


SAMPLING = ("STRICT_ALIGN_ENDPOINTS_MODE", "ALIGN_ENDPOINTS_MODE", "UPSAMPLE_MODE", "ROI_ALIGN_MODE")
BOXES = np.array([[0, 1, 4, 5], [2, 0, 5, 6]], np.float32)


def boxes(mode: str = "ALIGN_ENDPOINTS_MODE", indexed: bool = False, batch: int = 1) -> Case:
    where = [[1.0], [0.0]]
    values = np.concatenate([where, BOXES], 1) if indexed else BOXES
    values = values.astype(np.float32).reshape(2, 1, -1, 1, 1)

    def one(image: Array, box: Array) -> Array:
        h0, w0, h1, w1 = box
        return sample(sample(image, np.linspace(h0, h1, 3), 1), np.linspace(w0, w1, 4), 2)

    def expected(x: Array, _: Array) -> Array:
        if indexed:
            return np.stack([one(x[0, int(where[i][0])], BOXES[i])[None] for i in range(2)])
        return np.stack([np.stack([one(image, box) for image in x[0]]) for box in BOXES])

    return Case(
        f"crop_resize_{indexed}_{batch}",
        lambda b: b.add_crop_resize("l", ["x", "y"], "out", 3, 4, mode),
        expected,
        ((1, batch, 4, 6, 8), values.shape),
        True,
        values={"y": values},
    )


IMAGES = [
    padded("constant", "constant"),
    padded("reflection", "reflect"),
    padded("replication", "replicate"),
    Case(
        "upsample_nearest",
        lambda b: b.add_upsample("l", 2, 3, "x", "out", "NN"),
        lambda x: x.repeat(2, 1).repeat(3, 2),
    ),
    *(upsampled(m) for m in ("DEFAULT", "ALIGN_CORNERS_TRUE", "ALIGN_CORNERS_FALSE")),
    *(resized(m) for m in SAMPLING),
    *(resized(m, 1, 12) for m in SAMPLING[1:]),
    boxes(),
    boxes(batch=2),
    boxes(indexed=True, batch=2),
]


ALL = [*NORMALIZATIONS, *PRODUCTS, *REARRANGING, *IMAGES]


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_layers_give_what_the_specification_says(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("indexed", [False, True])
def test_images_to_crop_may_be_of_any_number(indexed: bool, batch: int) -> None:
    case = boxes(indexed=indexed, batch=batch)
    spec = build(case)
    array = spec.description.input[0].type.multiArrayType
    for low, high in zip((1, 1, 1, 6, 8), (1, 9, 9, 6, 8), strict=True):
        array.shapeRange.sizeRanges.add(lowerBound=low, upperBound=high)
    x, places = floats(1, batch, 4, 6, 8), case.values["y"]
    wanted = case.expected(x, places)
    found = ane.run(import_network(spec), {"x": x, "y": places})["out"]
    assert_near(found, wanted)
    del spec.description.input[1]
    builder = NeuralNetworkBuilder(spec=spec, disable_rank5_shape_mapping=True)
    builder.add_load_constant_nd("places", "y", places, places.shape)
    spec.neuralNetwork.layers.reverse()
    found = ane.run(import_network(spec), {"x": x})["out"]
    assert_near(found, wanted)


def test_a_reduction_to_a_place_needs_one_axis() -> None:
    spec = build(Case("", lambda b: b.add_reduce("l", "x", "out", "CHW", "sum"), lambda x: x))
    spec.neuralNetwork.layers[0].reduce.mode = 9
    with pytest.raises(LoadError, match=r"layer 'l' \(reduce\): takes the place of a maximum over more"):
        import_network(spec)
