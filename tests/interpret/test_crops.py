"""Crops, resampling at any places and affine maps, against numpy and torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from images import IOS15, IOS16, IOS17, MODES, T, X, blend, call, close, place, resized

from anesurgery.errors import InterpretError
from anesurgery.interpret import TABLE, run
from anesurgery.mil import Array, ct

RNG = np.random.default_rng(0)


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


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


@pytest.mark.one_of(4)
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


@pytest.mark.one_of(5)
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
    close(found, resampled(np.clip((at + 1) / 2 * [6, 4], -15, 20), "constant", 0.0, False))
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
