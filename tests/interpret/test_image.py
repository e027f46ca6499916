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
from closeness import assert_close
from images import IOS15, IOS16, IOS17, MODES, T, X, call, close, resized

from anesurgery.interpret import TABLE, run
from anesurgery.mil import Array, Var, ct, mb, types

RNG = np.random.default_rng(0)


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


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
        close(found[var.name], wanted, rtol=1e-3)
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


@pytest.mark.one_of(2)
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


@pytest.mark.parametrize("count", [41, 49, 94, 123])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_places_are_exact(size: int, count: int) -> None:
    """Places of fp32 are a little before a pixel at these sizes, and take the one before it."""
    x, at = X[:, :, :1].repeat(2, axis=-1)[..., :size], np.arange(count)
    found = call("resize_nearest_neighbor", x=x, target_size_height=1, target_size_width=count)
    np.testing.assert_array_equal(found, x[..., (2 * at + 1) * size // (2 * count)])
    found = call("upsample_nearest_neighbor", x=x, scale_factor_height=1, scale_factor_width=count)
    np.testing.assert_array_equal(found, x.repeat(count, axis=-1))


def test_a_wide_image_is_interpolated_between_the_right_places() -> None:
    x = np.random.default_rng(0).standard_normal((1, 1, 1, 2000)).astype(np.float32)
    sizes = {"target_size_height": 1, "target_size_width": 3001}
    found = call("resize_bilinear", x=x, **sizes, sampling_mode="STRICT_ALIGN_CORNERS")
    assert_close(found[0, 0, 0], np.interp(np.arange(3001) * 1999 / 3000, np.arange(2000), x[0, 0, 0]))


@pytest.mark.one_of(2)
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
