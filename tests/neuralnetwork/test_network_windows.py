"""Convolutions, deconvolutions and poolings of the first specification, against numpy and torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F  # noqa: N812 - the usual name
from layer_case import LayerCase as Case
from layer_case import assert_near, check, shaped, t
from one_layer import floats

import anesurgery as ane
from anesurgery.errors import NotExpressible
from anesurgery.mil import Array, quiet_host
from anesurgery.neuralnetwork.importing import import_network

with quiet_host():
    from coremltools.models import datatypes
    from coremltools.models.neural_network import NeuralNetworkBuilder
    from coremltools.models.neural_network.flexible_shape_utils import set_multiarray_ndshape_range


def same(size: int, kernel: int, stride: int, top: bool, dilation: int = 1) -> tuple[int, int]:
    """Padding of one axis as the specification counts it."""
    total = max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
    small, large = total // 2, total - total // 2
    return (large, small) if top else (small, large)


def convolution(
    mode: str = "valid",
    kernel: tuple[int, int] = (3, 3),
    stride: tuple[int, int] = (1, 1),
    groups: int = 1,
    dilation: tuple[int, int] = (1, 1),
    pad: tuple[int, int, int, int] = (0, 0, 0, 0),
    top: bool = False,
    bias: bool = True,
    shape: tuple[int, ...] = (4, 9, 10),
    exact: bool = False,
    blob: bool = False,
) -> Case:
    weight, shift = floats(6, shape[-3] // groups, *kernel, seed=3), floats(6, seed=4)

    def fill(b: Any) -> None:
        b.add_convolution(
            "l",
            shape[-3] // groups,
            6,
            *kernel,
            *stride,
            mode,
            groups,
            None if blob else weight.transpose(2, 3, 1, 0),
            shift if bias else None,
            bias,
            input_name=["x", "y"] if blob else "x",
            output_name="out",
            dilation_factors=list(dilation),
            padding_top=pad[0],
            padding_bottom=pad[1],
            padding_left=pad[2],
            padding_right=pad[3],
            same_padding_asymmetry_mode="TOP_LEFT_HEAVY" if top else "BOTTOM_RIGHT_HEAVY",
        )

    def expected(x: Array, _: Any = None) -> Array:
        image = t(x).reshape(-1, *x.shape[-3:])
        amounts = list(pad)
        if mode == "same":
            amounts = [
                n for i in range(2) for n in same(x.shape[i - 2], kernel[i], stride[i], top, dilation[i])
            ]
        image = F.pad(image, [amounts[2], amounts[3], amounts[0], amounts[1]])
        y = F.conv2d(image, t(weight), t(shift) if bias else None, stride, 0, dilation, groups)
        return y.reshape(*x.shape[:-3], *y.shape[1:]).numpy()

    name = f"{mode}_{kernel}_{stride}_{groups}_{dilation}_{pad}_{top}_{len(shape)}"
    values = {"y": weight} if blob else {}
    return Case(name, fill, expected, (shape, weight.shape) if blob else (shape,), exact or blob, values)


CONVOLUTIONS = [
    convolution(),
    convolution(bias=False),
    convolution(pad=(1, 2, 0, 3)),
    convolution(stride=(2, 3)),
    convolution(groups=2),
    convolution(groups=2, dilation=(2, 1), pad=(2, 2, 2, 2)),
    convolution("same"),
    convolution("same", (4, 2)),
    convolution("same", (4, 2), top=True),
    convolution("same", (3, 3), (2, 2)),
    convolution("same", (3, 3), (2, 2), top=True),
    convolution("same", (3, 3), (2, 2), dilation=(2, 3)),
    convolution("same", (1, 1), (2, 2)),
    convolution(shape=(2, 4, 9, 10), exact=True),
    convolution(shape=(3, 2, 4, 9, 10), exact=True),
    convolution(shape=(1, 2, 4, 9, 10), exact=True),
    convolution(shape=(3, 2, 4, 9, 10)),
    convolution(shape=(2, 4, 9, 10), blob=True, bias=False),
]


def deconvolution(
    mode: str = "valid",
    kernel: tuple[int, int] = (3, 3),
    stride: tuple[int, int] = (2, 2),
    groups: int = 1,
    pad: tuple[int, int, int, int] = (0, 0, 0, 0),
    top: bool = False,
    output: tuple[int, int] | None = None,
    bias: bool = True,
    dilation: tuple[int, int] = (1, 1),
) -> Case:
    weight, shift = floats(4, 6 // groups, *kernel, seed=3), floats(6, seed=4)

    def fill(b: Any) -> None:
        b.add_convolution(
            "l",
            4,
            6,
            *kernel,
            *stride,
            mode,
            groups,
            weight.transpose(2, 3, 0, 1),
            shift if bias else None,
            bias,
            is_deconv=True,
            output_shape=output,
            input_name="x",
            output_name="out",
            padding_top=pad[0],
            padding_bottom=pad[1],
            padding_left=pad[2],
            padding_right=pad[3],
            same_padding_asymmetry_mode="TOP_LEFT_HEAVY" if top else "BOTTOM_RIGHT_HEAVY",
            dilation_factors=list(dilation),
        )

    def expected(x: Array) -> Array:
        y = F.conv_transpose2d(t(x)[None], t(weight), None, stride, 0, 0, groups, dilation)[0]
        cuts = list(pad)
        if mode == "same" or output:
            wanted = output or [n * s for n, s in zip(x.shape[1:], stride, strict=True)]
            cuts = []
            for size, out in zip(y.shape[1:], wanted, strict=True):
                total = size - out
                small, large = max(total, 0) // 2, total - max(total, 0) // 2
                cuts += [large, small] if top else [small, large]
        y = F.pad(y, [-cuts[2], -cuts[3], -cuts[0], -cuts[1]])
        return (y + (t(shift)[:, None, None] if bias else 0)).numpy()

    name = f"{mode}_{kernel}_{stride}_{groups}_{pad}_{output}_{dilation}"
    return Case(name, fill, expected, ((4, 5, 6),))


DECONVOLUTIONS = [
    deconvolution(),
    deconvolution(groups=2),
    deconvolution(pad=(1, 2, 2, 1)),
    deconvolution(bias=False),
    deconvolution("same"),
    deconvolution("same", (4, 4)),
    deconvolution("same", top=True),
    deconvolution("same", (2, 2), (3, 3)),
    deconvolution("same", (2, 2), (3, 3), bias=False),
    deconvolution(output=(9, 11)),
    deconvolution(output=(10, 12)),
    deconvolution("same", output=(10, 13)),
    deconvolution(dilation=(2, 3)),
    deconvolution(groups=2, stride=(1, 1), dilation=(2, 1)),
    deconvolution(dilation=(3, 2), pad=(1, 2, 2, 1)),
    deconvolution("same", dilation=(2, 3)),
    deconvolution(output=(12, 13), dilation=(2, 2)),
]


def pooling(
    kind: str = "MAX",
    mode: str = "VALID",
    kernel: tuple[int, int] = (3, 3),
    stride: tuple[int, int] = (2, 2),
    pad: tuple[int, int, int, int] = (0, 0, 0, 0),
    exclude: bool = False,
    top: bool = False,
    whole: bool = False,
    shape: tuple[int, ...] = (4, 9, 10),
    exact: bool = False,
) -> Case:
    def fill(b: Any) -> None:
        b.add_pooling(
            "l",
            *kernel,
            *stride,
            kind,
            mode,
            "x",
            "out",
            exclude_pad_area=exclude,
            is_global=whole,
            padding_top=pad[0],
            padding_bottom=pad[1],
            padding_left=pad[2],
            padding_right=pad[3],
            same_padding_asymmetry_mode="TOP_LEFT_HEAVY" if top else "BOTTOM_RIGHT_HEAVY",
        )

    def expected(x: Array) -> Array:
        made = np.stack([windows(c) for c in x.reshape(-1, *x.shape[-2:])])
        made = made.reshape(*x.shape[:-2], *made.shape[1:])
        return made if exact else shaped(made)

    def windows(c: Array) -> Array:
        """By the definition, window by window; places beyond the padding never count."""
        ranges = [axis(i, c.shape[i]) for i in range(2)]
        out = np.zeros([len(r) for r in ranges], np.float32)
        for i, (h0, h1, hn) in enumerate(ranges[0]):
            for j, (w0, w1, wn) in enumerate(ranges[1]):
                values = c[h0:h1, w0:w1]
                count = values.size if exclude else hn * wn
                of_kind: dict[str, Callable[[], Any]] = {
                    "MAX": values.max,
                    "AVERAGE": partial(np.sum, values / count),
                    "L2": partial(np.linalg.norm, values),
                }
                out[i, j] = of_kind[kind]()
        return out

    def axis(i: int, size: int) -> list[tuple[int, int, int]]:
        if whole:
            return [(0, size, size)]
        k, s, (begin, end) = kernel[i], stride[i], pad[2 * i : 2 * i + 2]
        if mode == "SAME":
            begin, end = same(size, k, s, top)
        count = (size + begin + end - k) // s + 1
        if mode == "INCLUDE_LAST_PIXEL":
            count = -(-(size + 2 * begin - k) // s) + 1
            count -= int(any(pad) and (count - 1) * s >= size + begin)
        first = [n * s - begin for n in range(count)]
        return [(max(f, 0), min(f + k, size), min(f + k, size + end) - f) for f in first]

    return Case(
        f"{kind}_{mode}_{kernel}_{stride}_{pad}_{exclude}_{top}_{whole}", fill, expected, (shape,), exact
    )


POOLINGS = [
    *(pooling(kind) for kind in ("MAX", "AVERAGE", "L2")),
    *(pooling(kind, whole=True) for kind in ("MAX", "AVERAGE", "L2")),
    *(pooling(kind, pad=(1, 0, 0, 2)) for kind in ("MAX", "AVERAGE", "L2")),
    *(pooling("AVERAGE", m, pad=p, exclude=True) for m, p in (("VALID", (1, 1, 1, 1)), ("SAME", (0, 0, 0, 0)))),
    *(pooling(kind, "SAME", (4, 3)) for kind in ("MAX", "AVERAGE", "L2")),
    *(pooling(kind, "SAME", (4, 3), top=True) for kind in ("MAX", "AVERAGE", "L2")),
    *(pooling(kind, "INCLUDE_LAST_PIXEL", (3, 4), (2, 2)) for kind in ("MAX", "AVERAGE")),
    *(pooling(kind, "INCLUDE_LAST_PIXEL", (3, 3), (2, 2), (1, 1, 1, 1)) for kind in ("MAX", "AVERAGE")),
    *(pooling("MAX", "INCLUDE_LAST_PIXEL", (3, 3), (2, 2), shape=(4, n, n + 1)) for n in (6, 7, 8)),
    pooling("MAX", "INCLUDE_LAST_PIXEL", (2, 2), (3, 3), (1, 1, 1, 1), shape=(4, 10, 11)),
    pooling("AVERAGE", "INCLUDE_LAST_PIXEL", (3, 3), (2, 2), (1, 1, 1, 1), exclude=True),
    pooling(shape=(2, 3, 4, 9, 10), exact=True),
    pooling(shape=(2, 4, 9, 10), exact=True),
    pooling(shape=(2, 3, 4, 9, 10), exact=True, whole=True),
]


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=lambda c: c.name)
def test_convolutions(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", DECONVOLUTIONS, ids=lambda c: c.name)
def test_deconvolutions(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", POOLINGS, ids=lambda c: c.name)
def test_poolings(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("mode", ["valid", "custom", "same"])
@pytest.mark.parametrize("dilation", [(1, 1, 1), (2, 1, 3)])
def test_deconvolution_of_volumes(mode: str, dilation: tuple[int, int, int]) -> None:
    weight, shift, stride = floats(4, 3, 2, 3, 2), floats(6), (1, 2, 1)
    builder = NeuralNetworkBuilder([("x", datatypes.Array(1, 4, 4, 5, 6))], [("out", None)])
    sizes = dict(zip(("depth", "height", "width"), zip(stride, dilation, strict=True), strict=True))
    builder.add_convolution3d(
        "l",
        4,
        6,
        2,
        3,
        2,
        weight.transpose(1, 0, 2, 3, 4),
        shift,
        True,
        groups=2,
        is_deconv=True,
        padding_mode=mode,
        padding_top=1,
        padding_right=1,
        input_name="x",
        output_name="out",
        **{f"stride_{n}": s for n, (s, _) in sizes.items()},
        **{f"dilation_{n}": d for n, (_, d) in sizes.items()},
    )
    x = floats(1, 4, 4, 5, 6, seed=5)
    y = F.conv_transpose3d(t(x), t(weight), t(shift), stride, 0, 0, 2, dilation)[0].numpy()
    if mode == "custom":
        y = y[:, :, 1:, :-1]
    elif mode == "same":
        for axis, (n, s) in enumerate(zip(x.shape[2:], stride, strict=True), 1):
            y = np.take(y, np.arange(n * s) + (y.shape[axis] - n * s) // 2, axis)
    found = ane.run(import_network(builder.spec), {"x": x})["out"]
    assert_near(found.reshape(y.shape), y)


def test_a_dilated_deconvolution_is_told() -> None:
    fill = deconvolution(dilation=(2, 1)).fill
    builder = NeuralNetworkBuilder([("x", datatypes.Array(4, 5, 6))], [("out", None)])
    fill(builder)
    assert "dilated deconvolution" in import_network(builder.spec).notes[0]


@pytest.mark.parametrize(("most", "pad"), [((3, 2, 6, 6), 0), ((1, 2, 9, 6), 0), ((3, 2, 6, 6), 1)])
def test_the_last_means_of_a_flexible_image_count_no_pixel_beyond_it(
    most: tuple[int, ...], pad: int, tmp_path: Path
) -> None:
    path, values = tmp_path / "pool.mlmodel", {"x": floats(1, 2, 6, 6)}
    path.write_bytes(flexible_means((1, 2, 6, 6), pad).SerializeToString())
    expected = ane.run(path, values)["y"]
    path.write_bytes(flexible_means(most, pad).SerializeToString())
    assert_near(ane.run(path, values)["y"], expected)


def test_padded_last_means_of_a_dynamic_height_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pool.mlmodel"
    path.write_bytes(flexible_means((1, 2, 9, 6), 1).SerializeToString())
    with pytest.raises(NotExpressible, match="give the input one fixed shape"):
        ane.run(path, {"x": floats(1, 2, 6, 6)})


def flexible_means(most: tuple[int, ...], pad: int) -> Any:
    with quiet_host():
        b = NeuralNetworkBuilder(
            [("x", datatypes.Array(1, 2, 6, 6))], [("y", None)], disable_rank5_shape_mapping=True
        )
    pads = dict.fromkeys(("padding_top", "padding_bottom", "padding_left", "padding_right"), pad)
    b.add_pooling("p", 3, 3, 2, 2, "AVERAGE", "INCLUDE_LAST_PIXEL", "x", "y", exclude_pad_area=False, **pads)
    b.spec.description.output[0].type.multiArrayType.dataType = 65568
    if most != (1, 2, 6, 6):
        set_multiarray_ndshape_range(b.spec, "x", [1, 2, 6, 6], list(most))
    return b.spec
