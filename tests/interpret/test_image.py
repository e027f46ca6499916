"""Image ops against coremltools' own op tests, torch, and loops written from the documentation."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from anesurgery.errors import InterpretError
from anesurgery.interpret import TABLE, evaluate, run
from anesurgery.mil import Array, Var, ct, mb, types

RNG = np.random.default_rng(0)
MODES = ["STRICT_ALIGN_CORNERS", "ALIGN_CORNERS", "DEFAULT", "OFFSET_CORNERS", "UNALIGN_CORNERS"]
IOS15, IOS16, IOS17 = ct.target.iOS15, ct.target.iOS16, ct.target.iOS17


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


X = floats(2, 3, 5, 7)
T = torch.from_numpy(X)


def call(op_type: str, opset: Any = IOS16, **inputs: Any) -> Array:
    """The numbers of one op, whose shape must be the one that coremltools infers."""
    made: list[Var] = []

    @mb.program(input_specs=[mb.TensorSpec((1,))], opset_version=opset)
    def program(unused: Var) -> Var:
        made.append(getattr(mb, op_type)(**inputs))
        return mb.identity(x=unused)

    found: Array = evaluate([made[0].op], {}, made)[0].numpy()  # type: ignore[list-item]
    assert found.shape == tuple(int(n) for n in made[0].shape)
    return found


def close(found: Array, expected: Any, atol: float = 2e-5) -> None:
    assert found.shape == tuple(expected.shape)
    np.testing.assert_allclose(found, np.asarray(expected), rtol=0, atol=atol)


def compare(
    build: Any,
    input_placeholders: Any,
    input_values: Any,
    expected_output_types: Any,
    expected_outputs: Any,
    *,
    backend: Any,
    **more: Any,
) -> Any:
    """Stands in for the function with which those tests run a program on a Mac."""
    mil = importlib.import_module("coremltools.converters.mil.mil")
    program = mil.Program()
    with mil.Function(input_placeholders, opset_version=backend.opset_version) as function:
        outputs = build(**function.inputs)
        outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        function.set_outputs(outputs)
    program.add_function("main", function)
    expected = expected_outputs if isinstance(expected_outputs, list) else [expected_outputs]
    found = run(program, input_values)
    for var, wanted in zip(outputs, expected, strict=True):
        close(found[var.name], wanted, atol=1e-3 * max(1.0, float(np.abs(wanted).max())))
    return SimpleNamespace(_mil_program=program)


def parameters(function: Any) -> Iterator[dict[str, Any]]:
    """The cases of a test, on one computer."""
    marks = [m for m in getattr(function, "pytestmark", []) if m.name == "parametrize"]
    lists: list[list[dict[str, Any]]] = []
    for mark in marks:
        names = [n.strip() for n in mark.args[0].split(",")]
        rows = [row if len(names) > 1 else [row] for row in mark.args[1]]
        lists.append([dict(zip(names, row, strict=True)) for row in rows])
    seen: list[dict[str, Any]] = []
    for chosen in itertools.product(*lists):
        case = {k: v for one in chosen for k, v in one.items() if k not in ("compute_unit", "backend")}
        if case not in seen and case.get("is_symbolic") is not True:
            seen.append(case)
            yield case


THEIRS = [
    ("iOS14", "TestResizeNearestNeighbor.test_builder_to_backend_smoke", IOS15),
    ("iOS14", "TestResizeBilinear.test_builder_to_backend_smoke", IOS15),
    ("iOS14", "TestUpsampleBilinear.test_builder_to_backend_smoke", IOS15),
    ("iOS14", "TestUpsampleBilinear.test_builder_to_backend_stress", IOS15),
    ("iOS14", "TestUpsampleNearestNeighbor.test_builder_to_backend_smoke", IOS15),
    ("iOS14", "TestCrop.test_builder_to_backend_smoke", IOS15),
    ("iOS14", "TestCrop.test_builder_to_backend_stress", IOS15),
    ("iOS14", "TestCropResize.test_builder_to_backend_smoke", IOS15),
    ("iOS15", "TestAffine.test_builder_to_backend_smoke", IOS15),
    ("iOS15", "TestUpsampleNearestNeighborFractionalScales.test_builder_to_backend_smoke", IOS15),
    ("iOS15", "TestResizeBilinear.test_builder_to_backend_smoke", IOS15),
    ("iOS15", "TestCropResize.test_builder_to_backend_smoke", IOS15),
    ("iOS16", "TestUpsampleBilinear.test_builder_to_backend_smoke_iOS16", IOS16),
    ("iOS16", "TestCropResize.test_builder_to_backend_ios16", IOS16),
    ("iOS17", "TestCropResize.test_builder_to_backend_ios17", IOS17),
    ("iOS17", "TestResize.test_resize_nearest_neighbor", IOS17),
    ("iOS17", "TestResize.test_resize_nearest_neighbor_dynamic_shape", IOS17),
    ("iOS17", "TestResize.test_resize_linear", IOS17),
    ("iOS17", "TestResize.test_resize_linear_dynamic_shape", IOS17),
]


def their_module(version: str) -> Any:
    return importlib.import_module(f"coremltools.converters.mil.mil.ops.tests.{version}.test_image_resizing")


@pytest.mark.parametrize(("version", "name", "opset"), THEIRS, ids=[f"{v}-{n}" for v, n, _ in THEIRS])
def test_what_coremltools_tests_expect(
    version: str, name: str, opset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = their_module(version)
    monkeypatch.setattr(module, "run_compare_builder", compare)
    cls, method = name.split(".")
    test = getattr(getattr(module, cls)(), method)
    fixed: dict[str, Any] = {
        "backend": SimpleNamespace(backend="any", precision="fp32", opset_version=opset),
        "compute_unit": ct.ComputeUnit.CPU_ONLY,
    }
    ran = 0
    for case in parameters(test):
        try:
            test(**fixed, **case)
            ran += 1
        except (pytest.skip.Exception, pytest.xfail.Exception):
            continue  # forms that coremltools refuses
    assert ran


@pytest.mark.parametrize("opset", [IOS15, IOS16, IOS17])
@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_what_coremltools_tests_expect_of_resample(
    opset: Any, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = their_module("iOS15")
    monkeypatch.setattr(module, "run_compare_builder", compare)
    backend = SimpleNamespace(backend="any", precision="fp32", opset_version=opset)
    module.TestResample._test_builder_to_backend_smoke(ct.ComputeUnit.CPU_ONLY, backend, dtype, 0)


def place(mode: str, size: float, n: int, i: int) -> float:
    """The documented place of sample i of n in an axis of a size."""
    if mode == "ALIGN_CORNERS" and n == 1:
        at = (size - 1) / 2
    elif mode in ("STRICT_ALIGN_CORNERS", "ALIGN_CORNERS"):
        at = float(np.linspace(0, size - 1, n)[i])
    elif mode == "DEFAULT":
        at = float(np.linspace(0, size - size / n, n)[i])
    elif mode == "OFFSET_CORNERS":
        delta = max(1, size - 1) / n
        at = float(np.linspace(delta / 2, delta / 2 + (n - 1) * delta, n)[i])
    else:
        at = i * size / n + 0.5 * size / n - 0.5
    return min(size - 1, max(0, at))


def blend(image: Array, h: float, w: float) -> Array:
    """[..., height, width] at a place inside: the four pixels around it."""
    top, left = int(np.floor(h)), int(np.floor(w))
    bottom, right = min(top + 1, image.shape[-2] - 1), min(left + 1, image.shape[-1] - 1)
    a, b = h - top, w - left
    return (1 - a) * ((1 - b) * image[..., top, left] + b * image[..., top, right]) + a * (
        (1 - b) * image[..., bottom, left] + b * image[..., bottom, right]
    )


def pick(image: Array, h: float, w: float) -> Array:
    rows, columns = image.shape[-2:]
    return image[..., min(int(h + 0.5 + 1e-9), rows - 1), min(int(w + 0.5 + 1e-9), columns - 1)]


def resized(image: Array, height: int, width: int, mode: str, nearest: bool = False) -> Array:
    made = np.zeros((*image.shape[:-2], height, width))
    for i, j in np.ndindex(height, width):
        h, w = place(mode, image.shape[-2], height, i), place(mode, image.shape[-1], width, j)
        made[..., i, j] = pick(image, h, w) if nearest else blend(image, h, w)
    return made


SIZES = [(11, 16), (3, 4), (9, 3), (5, 7), (1, 1), (1, 9), (10, 14)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", SIZES)
def test_resize_bilinear(mode: str, size: tuple[int, int]) -> None:
    h, w = size
    found = call("resize_bilinear", x=X, target_size_height=h, target_size_width=w, sampling_mode=mode)
    close(found, resized(X, h, w, mode))


@pytest.mark.parametrize("mode", MODES)
def test_a_single_pixel_fills_every_size(mode: str) -> None:
    x = X[..., :1, :1]
    found = call("resize_bilinear", x=x, target_size_height=3, target_size_width=2, sampling_mode=mode)
    close(found, np.broadcast_to(x, (2, 3, 3, 2)))


@pytest.mark.parametrize("size", SIZES)
def test_resize_nearest_neighbor(size: tuple[int, int]) -> None:
    h, w = size
    found = call("resize_nearest_neighbor", x=X, target_size_height=h, target_size_width=w)
    # as tf.image.resize: floor((i + 1/2) * old / new)
    rows, columns = (2 * np.arange(h) + 1) * 5 // (2 * h), (2 * np.arange(w) + 1) * 7 // (2 * w)
    np.testing.assert_array_equal(found, X[..., rows, :][..., columns])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("nearest", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_resize(mode: str, nearest: bool, size: tuple[int, int]) -> None:
    found = call(
        "resize",
        IOS17,
        x=X,
        shape=np.array([9, *size], np.int32),
        resized_dims=np.uint32(2),
        interpolation_mode="NEAREST_NEIGHBOR" if nearest else "LINEAR",
        sampling_mode=mode,
    )
    half = nearest and mode == "DEFAULT"  # the nearest of pixels, as tf.image.resize
    close(found, resized(X, *size, "UNALIGN_CORNERS" if half else mode, nearest))


@pytest.mark.parametrize(("size", "torch_size"), [([0, 0], (5, 7)), ([9, 0], (9, 7)), ([0, 3], (5, 3))])
def test_a_size_of_zero_is_that_of_the_input(size: list[int], torch_size: tuple[int, int]) -> None:
    found = call(
        "resize",
        IOS17,
        x=X,
        shape=np.array([4, *size], np.int32),
        resized_dims=np.uint32(2),
        sampling_mode="UNALIGN_CORNERS",
    )
    close(found, F.interpolate(T, size=torch_size, mode="bilinear"))


def test_resizes_one_axis_or_three() -> None:
    one = call(
        "resize",
        IOS17,
        x=X,
        shape=np.array([3], np.int32),
        resized_dims=np.uint32(1),
        sampling_mode="STRICT_ALIGN_CORNERS",
    )
    close(one, F.interpolate(T, size=(5, 3), mode="bilinear", align_corners=True))
    three = call(
        "resize",
        IOS17,
        x=X,
        shape=np.array([5, 4, 9], np.int32),
        resized_dims=np.uint32(3),
        sampling_mode="UNALIGN_CORNERS",
    )
    close(three, F.interpolate(T[None], size=(5, 4, 9), mode="trilinear")[0])


def test_resizes_integers() -> None:
    x = np.array([[[0, 10, 2**24 + 1]]], np.int32)
    shape = np.array([1, 6], np.int32)
    nearest = call(
        "resize", IOS17, x=x, shape=shape, resized_dims=np.uint32(2), interpolation_mode="NEAREST_NEIGHBOR"
    )
    np.testing.assert_array_equal(nearest, x.repeat(2, axis=-1))
    linear = call("resize", IOS17, x=x, shape=shape, resized_dims=np.uint32(2))
    halfway = (10 + 2**24 + 1) // 2
    np.testing.assert_array_equal(linear, [[[0, 5, 10, halfway, 2**24 + 1, 2**24 + 1]]])


def test_resizes_to_a_size_that_is_computed() -> None:
    @mb.program(
        input_specs=[mb.TensorSpec(X.shape), mb.TensorSpec((2,), dtype=types.int32)], opset_version=IOS17
    )
    def program(x: Var, size: Var) -> Var:
        return mb.resize(
            x=x, shape=size, resized_dims=np.uint32(2), sampling_mode="STRICT_ALIGN_CORNERS", name="y"
        )

    found = run(program, {"x": X, "size": np.array([8, 3], np.int32)})["y"]
    close(found, F.interpolate(T, size=(8, 3), mode="bilinear", align_corners=True))


FACTORS: list[tuple[Any, Any]] = [
    (2, 3),
    (1, 1),
    (np.float32(1.6), np.float32(2.5)),
    (np.float32(0.5), np.float32(0.43)),
    (np.float32((9 + 1e-4) / 5), np.float32((4 + 1e-4) / 7)),
]


@pytest.mark.parametrize("factors", FACTORS)
def test_upsample_nearest_neighbor(factors: tuple[Any, Any]) -> None:
    h, w = factors
    found = call("upsample_nearest_neighbor", x=X, scale_factor_height=h, scale_factor_width=w)
    size = (int(5 * h), int(7 * w))
    np.testing.assert_array_equal(found, F.interpolate(T, size=size))
    flat = call("upsample_nearest_neighbor", x=X[0], scale_factor_height=h, scale_factor_width=w)
    np.testing.assert_array_equal(flat, found[0])


@pytest.mark.parametrize("factors", FACTORS)
@pytest.mark.parametrize("align", [True, False])
def test_upsample_bilinear(factors: tuple[Any, Any], align: bool) -> None:
    h, w = factors
    size = (int(5 * h), int(7 * w))
    expected = F.interpolate(T, size=size, mode="bilinear", align_corners=align)
    for opset, more in ((IOS15, {}), (IOS16, {"half_pixel_centers": not align})):
        found = call(
            "upsample_bilinear",
            opset,
            x=X,
            scale_factor_height=h,
            scale_factor_width=w,
            align_corners=align,
            **more,
        )
        close(found, expected)
    found = call(
        "upsample_bilinear",
        x=X,
        scale_factor_height=h,
        scale_factor_width=w,
        align_corners=False,
        half_pixel_centers=False,
    )
    close(found, resized(X, *size, "DEFAULT"))


def test_a_factor_rounds_as_coremltools_infers_the_shape() -> None:
    x = floats(1, 1, 10, 10)  # 10 times fp32 0.7 is 7 in fp32, and less than 7 in fp64
    found = call("upsample_nearest_neighbor", x=x, scale_factor_height=np.float32(0.7))
    np.testing.assert_array_equal(found, x[..., np.arange(7) * 10 // 7, :])


@pytest.mark.parametrize("size", SIZES)
def test_the_ops_of_the_torch_front_end(size: tuple[int, int]) -> None:
    h, w = torch.tensor(size[0]), torch.tensor([size[1]])
    nearest = TABLE["torch_upsample_nearest_neighbor"].function(T, h, w)
    close(nearest, F.interpolate(T, size=size))
    for align in (True, False):
        found = TABLE["torch_upsample_bilinear"].function(T, h, w, align_corners=align)
        close(found, F.interpolate(T, size=size, mode="bilinear", align_corners=align))


@pytest.mark.parametrize("x", [X, X[0]])
def test_crop(x: Array) -> None:
    found = call("crop", x=x, crop_height=[1, 2], crop_width=[0, 3])
    np.testing.assert_array_equal(found, x[..., 1:3, :4])


BOX = np.array([[0.1, 0.3, 1.3, 1.0], [0.5, 1.8, 1.0, 0.3], [0.0, 0.4, 0.6, 0.7], [1, 1, 0, 0]], np.float32)
OF = np.array([1, 0, 1, 1], np.int32)


def crops(boxes: Array, of: Any, size: tuple[int, int], mode: str, pad: float = 0.0) -> Array:
    """Boxes [top, left, bottom, right] in pixels out of X, each place on its own."""
    made = np.zeros((len(boxes), X.shape[1], *size))
    for n, (top, left, bottom, right) in enumerate(boxes.astype(np.float64)):
        for i, j in np.ndindex(*size):
            h = top + np.sign(bottom - top) * place(mode, abs(bottom - top) + 1, size[0], i)
            w = left + np.sign(right - left) * place(mode, abs(right - left) + 1, size[1], j)
            outside = not (-1e-9 <= h <= 4 + 1e-9 and -1e-9 <= w <= 6 + 1e-9)
            made[n, :, i, j] = pad if outside else blend(X[of[n]], min(max(h, 0), 4), min(max(w, 0), 6))
    return made


PIXELS = np.array([4, 6, 4, 6], np.float32)


@pytest.mark.parametrize("mode", MODES[:4])
@pytest.mark.parametrize("size", [(2, 3), (1, 1), (6, 9), (1, 8)])
def test_crop_resize_of_normalized_boxes(mode: str, size: tuple[int, int]) -> None:
    found = call(
        "crop_resize",
        IOS17,
        x=X,
        boxes=BOX,
        box_indices=OF,
        target_height=size[0],
        target_width=size[1],
        normalized_coordinates=True,
        sampling_mode=mode,
        pad_value=np.float32(7),
    )
    close(found, crops(BOX.astype(np.float64) * PIXELS, OF, size, mode, 7.0))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [(2, 3), (1, 1), (8, 9)])
def test_crop_resize_of_the_whole_image_is_resize(mode: str, size: tuple[int, int]) -> None:
    found = call(
        "crop_resize",
        IOS17,
        x=X,
        boxes=np.array([[0, 0, 1, 1]] * 2, np.float32),
        target_height=size[0],
        target_width=size[1],
        normalized_coordinates=True,
        sampling_mode=mode,
    )
    close(found, resized(X, *size, mode))


WRITTEN = {
    "CORNERS_HEIGHT_FIRST": [0.5, 1, 3.5, 5],
    "CORNERS_WIDTH_FIRST": [1, 0.5, 5, 3.5],
    "CENTER_SIZE_HEIGHT_FIRST": [2, 3, 3, 4],
    "CENTER_SIZE_WIDTH_FIRST": [3, 2, 4, 3],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("box_mode", WRITTEN)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_crop_resize_of_every_image(mode: str, box_mode: str, scale: float) -> None:
    box = np.array([WRITTEN[box_mode]] * 2, np.float32)
    box[1] = (box[1] * 2 + 0.25) / 4  # another box
    known = np.array([WRITTEN["CORNERS_HEIGHT_FIRST"]] * 2, np.float32)
    known[1] = (known[1] * 2 + 0.25) / 4
    if box_mode.startswith("CENTER"):
        box[1, 2:] -= 0.0625  # a size does not move
    for opset in (IOS15, IOS16):
        found = call(
            "crop_resize",
            opset,
            x=X,
            roi=(box / scale).reshape(2, 1, 4, 1, 1),
            target_height=2,
            target_width=6,
            spatial_scale=np.float32(scale),
            box_coordinate_mode=box_mode,
            sampling_mode=mode,
        )
        assert found.shape == (2, 2, 3, 2, 6)
        for image in (0, 1):
            close(found[:, image], crops(known, [image] * 2, (2, 6), mode))


def test_crop_resize_of_the_image_that_leads_a_box() -> None:
    boxes = BOX * PIXELS
    roi = np.concatenate([OF[:, None], boxes], 1).astype(np.float32).reshape(4, 1, 5, 1, 1)
    made = TABLE["crop_resize"].function(
        T, torch.from_numpy(roi), target_height=3, target_width=2, sampling_mode="ALIGN_CORNERS"
    )
    close(made, crops(boxes, OF, (3, 2), "ALIGN_CORNERS")[:, None])
    first = roi.copy()
    first[:, :, 0] = 0
    found = call(
        "crop_resize", IOS15, x=X[:1], roi=first, target_height=3, target_width=2, sampling_mode="ALIGN_CORNERS"
    )
    close(found, crops(boxes, [0] * 4, (3, 2), "ALIGN_CORNERS")[:, None])


def test_crop_resize_of_boxes_of_integers() -> None:
    boxes = np.array([[1, 2, 3, 6], [0, 0, 4, 4]], np.uint16)
    found = call(
        "crop_resize",
        IOS17,
        x=X,
        boxes=boxes,
        target_height=3,
        target_width=5,
        sampling_mode="STRICT_ALIGN_CORNERS",
    )
    close(found[0], X[0, :, 1:4, 2:7])
    close(found[1], X[1, :, ::2, :5])


PADDED = {"constant": "constant", "border": "edge", "reflection": "reflect", "symmetric": "symmetric"}
AT = RNG.uniform(-1.9, 1.9, (2, 4, 6, 2)).astype(np.float32)
"""Places in [-1, 1] and around it, as (width, height)."""


def resampled(at: Array, padding: str, value: float, nearest: bool) -> Array:
    """X at pixels, out of an image that is made large by padding."""
    more = {"constant_values": value} if padding == "constant" else {}
    around = ((0, 0), (0, 0), (20, 20), (20, 20))
    large = np.pad(X.astype(np.float64), around, mode=PADDED[padding], **more)  # type: ignore[call-overload]
    made = np.zeros((2, 3, *at.shape[1:3]))
    for n, i, j in np.ndindex(*at.shape[:3]):
        w, h = at[n, i, j].astype(np.float64) + 20
        made[n, :, i, j] = large[n, :, round(h), round(w)] if nearest else blend(large[n], h, w)
    return made


@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize("mode", ["unnormalized", "normalized_minus_one_to_one", "normalized_zero_to_one"])
@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize("sampling", ["bilinear", "nearest"])
@pytest.mark.parametrize("value", [0.0, -2.5])
def test_resample(padding: str, mode: str, align: bool, sampling: str, value: float) -> None:
    unit = (AT.astype(np.float64) + 1) / 2
    pixels = unit * [6, 4] if align else unit * [7, 5] - 0.5
    given: dict[str, Array] = {
        "unnormalized": pixels,
        "normalized_minus_one_to_one": AT,
        "normalized_zero_to_one": unit,
    }
    for opset in (IOS15, IOS16, IOS17):
        found = call(
            "resample",
            opset,
            x=X,
            coordinates=given[mode].astype(np.float32),
            sampling_mode=sampling,
            padding_mode=padding,
            padding_value=np.float32(value),
            coordinates_mode=mode,
            align_corners=align,
        )
        close(found, resampled(pixels, padding, value, sampling == "nearest"))


@pytest.mark.parametrize("sampling", ["bilinear", "nearest"])
@pytest.mark.parametrize(
    ("padding", "same"), [("constant", "zeros"), ("border", "border"), ("reflection", "reflection")]
)
@pytest.mark.parametrize("align", [True, False])
def test_resample_is_what_the_torch_front_end_makes_of_grid_sample(
    sampling: str, padding: str, same: str, align: bool
) -> None:
    expected = F.grid_sample(T, torch.from_numpy(AT), sampling, same, align)
    padding = "symmetric" if padding == "reflection" and not align else padding
    for mode, at in (("normalized_minus_one_to_one", AT), ("normalized_zero_to_one", (AT + 1) / 2)):
        found = call(
            "resample",
            x=X,
            coordinates=at,
            sampling_mode=sampling,
            padding_mode=padding,
            padding_value=np.float32(0),
            coordinates_mode=mode,
            align_corners=align,
        )
        close(found, expected)


@pytest.mark.parametrize("padding", PADDED)
def test_resample_of_one_pixel_and_of_no_number(padding: str) -> None:
    at = torch.tensor([[[[5.0, -3.0], [0.0, 0.0], [1e30, -1e30], [float("nan"), 0.0]]]])
    found = TABLE["resample"].function(
        torch.full((1, 1, 1, 1), 3.0), at, "bilinear", padding, 9.0, "unnormalized", True
    )
    assert found[0, 0, 0, 1] == 3
    assert found[0, 0, 0, 0] == (9 if padding == "constant" else 3)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("size", [(5, 7), (3, 2), (8, 11)])
def test_affine(batch: int, size: tuple[int, int]) -> None:
    matrix = floats(batch, 6)
    found = call(
        "affine",
        x=X,
        transform_matrix=matrix,
        output_height=size[0],
        output_width=size[1],
        sampling_mode="bilinear",
        padding_mode="constant",
        padding_value=np.float32(0),
        coordinates_mode="normalized_minus_one_to_one",
        align_corners=True,
    )
    w, h = np.meshgrid(np.linspace(-1, 1, size[1]), np.linspace(-1, 1, size[0]))
    a = np.broadcast_to(matrix.astype(np.float64), (2, 6))[..., None, None]
    at = np.stack([a[:, 0] * w + a[:, 1] * h + a[:, 2], a[:, 3] * w + a[:, 4] * h + a[:, 5]], -1)
    close(found, resampled(np.clip((at + 1) / 2 * [6, 4], -15, 20), "constant", 0.0, False), atol=1e-4)
    grid = F.affine_grid(torch.from_numpy(matrix).expand(2, 6).reshape(2, 2, 3), [2, 3, *size], True)
    close(found, F.grid_sample(T, grid, align_corners=True))


class Resizing(torch.nn.Module):
    def forward(self, x: torch.Tensor, grid: torch.Tensor) -> list[torch.Tensor]:
        theta = torch.tensor([[[0.9, 0.1, 0.2], [-0.2, 1.1, -0.1]]]).expand(2, 2, 3)
        moved = F.affine_grid(theta, [2, 3, 6, 4], align_corners=True)
        return [
            F.interpolate(x, size=(9, 4)),
            F.interpolate(x, scale_factor=2),
            F.interpolate(x, size=(9, 4), mode="bilinear"),
            F.interpolate(x, scale_factor=3, mode="bilinear", align_corners=True),
            F.interpolate(x[:, :, 0], size=11, mode="linear"),
            F.interpolate(x[:, :, 0], size=4),
            F.grid_sample(x, grid, padding_mode="reflection", align_corners=False),
            F.grid_sample(x, grid, mode="nearest", padding_mode="border", align_corners=True),
            F.grid_sample(x, moved, align_corners=True),
        ]


@pytest.mark.filterwarnings("ignore")
def test_a_converted_model() -> None:
    grid = torch.from_numpy(AT)
    model = Resizing().eval()
    program = ct.convert(
        torch.jit.trace(model, (T, grid), strict=False),  # type: ignore[no-untyped-call]
        convert_to="milinternal",
        inputs=[ct.TensorType("x", T.shape), ct.TensorType("grid", grid.shape)],
        minimum_deployment_target=IOS16,
        compute_precision=ct.precision.FLOAT32,
    )
    found = run(program, {"x": X, "grid": AT})
    for value, expected in zip(found.values(), model(T, grid), strict=True):
        close(value, expected)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("resize_bilinear", {"sampling_mode": "CORNERS"}, "sampling_mode 'CORNERS'"),
        ("upsample_bilinear", {"align_corners": True, "half_pixel_centers": True}, "is not known"),
        ("resize", {"shape": [2], "resized_dims": 1, "interpolation_mode": "CUBIC"}, "'CUBIC'"),
        ("crop_resize", {}, "neither roi nor boxes"),
        ("crop_resize", {"boxes": torch.zeros(1, 4), "box_coordinate_mode": "?"}, "box_coordinate_mode"),
    ],
)
def test_says_what_it_does_not_know(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InterpretError, match=message):
        TABLE[name].function(T, **arguments)
