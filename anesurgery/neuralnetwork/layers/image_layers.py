"""Layers over the spatial axes of images, the last two: move, cut, pad, resize, and choose among boxes.

`ctx.images` gives the images, and `back`, which restores the leading axes of a result.

MIL's non-maximum suppression of iOS 17 has no score threshold and gives no count. Boxes come out of it best
first and suppress worse ones only; so what the threshold rejects is the end of its list, and is cut off there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anesurgery.mil import Var, is_symbolic, mb, types
from anesurgery.neuralnetwork.context import Context, layer, layer_nd
from anesurgery.neuralnetwork.layers import window_layers
from anesurgery.neuralnetwork.layers.blob_axes import Numbers, joined, known, lengths, of_rank, scalar
from anesurgery.neuralnetwork.spec import DAMAGED

F = np.float32
ONE = np.ones(1, np.int32)
PAD = {"constant": "constant", "reflection": "reflect", "replication": "replicate"}
UPSAMPLE = ((False, False), (True, False), (False, True))
"""(align_corners, half_pixel_centers) by `linearUpsampleMode`."""
NEAREST, TO_DEPTH = 0, 0
"""The `mode` of an `upsample` that repeats pixels, and of `reorganizeData` that makes channels of pixels."""
SAMPLING = ("STRICT_ALIGN_CORNERS", "ALIGN_CORNERS", "DEFAULT", "OFFSET_CORNERS")
"""MIL's sampling mode by `samplingMethod`."""
BOXES = ("CORNERS_HEIGHT_FIRST", "CORNERS_WIDTH_FIRST", "CENTER_SIZE_HEIGHT_FIRST", "CENTER_SIZE_WIDTH_FIRST")
"""MIL's box coordinates mode by `boxMode`."""


@layer("padding")
def pad(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Height and width with a border of a constant, of reflected or of repeated values."""
    window_layers.needs_type(ctx, params)
    ctx.needs_rank(inputs[0], 2)
    kind = params.WhichOneof("PaddingType")
    amounts = window_layers.borders(ctx, params.paddingAmounts)
    if kind == "reflection":
        least = {-2: max(amounts[:2]) + 1, -1: max(amounts[2:]) + 1}
        _check_least(ctx, inputs[0], least, "reflects")
    value = F(params.constant.value)
    return mb.pad(x=inputs[0], pad=amounts, mode=PAD[kind], constant_val=value)


@layer("crop", inputs=(1, 2), axes="first")
def crop(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Height and width without a border; of two inputs, the first in the size of the second."""
    x = inputs[0]
    ctx.needs_rank(x, 2)
    if len(inputs) == 1:
        top, bottom, left, right = window_layers.borders(ctx, params.cropAmounts)
        _check_least(ctx, x, {-2: top + bottom + 1, -1: left + right + 1}, "crops")
        return window(x, {-2: (top, -bottom or None), -1: (left, -right or None)})
    high, wide = ctx.shape(inputs[1], [-2, -1])
    top, left = window_layers.pairs(params.offset, 0)
    _check_least(ctx, x, {-2: top + high, -1: left + wide}, "crops")
    return window(x, {-2: (top, top + high), -1: (left, left + wide)})


def _check_least(ctx: Context, x: Var, needed: dict[int, int], verb: str) -> None:
    """Refuse an image that is smaller than is needed: axis (from the end) -> least size."""
    for axis, least in needed.items():
        size = x.shape[axis]
        if not is_symbolic(size) and size < least:
            raise ctx.error(f"{verb} axis {axis} of {size} pixels, expected at least {least}; {DAMAGED}")


def window(x: Var, ranges: dict[int, tuple[int, int | None]], stride: int = 1) -> Var:
    """Return a part of some axes: axis (from the end) -> (begin, end); None ends after the last place."""
    begin, end, steps = [0] * x.rank, [0] * x.rank, [1] * x.rank
    open_begin, open_end = [True] * x.rank, [True] * x.rank
    for axis, (first, last) in ranges.items():
        begin[axis], open_begin[axis] = first, first == 0
        end[axis], open_end[axis] = last or 0, last is None
        steps[axis] = stride
    return mb.slice_by_index(x=x, begin=begin, end=end, stride=steps, begin_mask=open_begin, end_mask=open_end)


@layer("slice")
def slice_axis(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Build a part of the channels, rows or columns."""
    axis = params.axis - 3  # 0, 1, 2 are channel, height, width
    ctx.needs_rank(inputs[0], -axis)
    first, last = int(params.startIndex), int(params.endIndex)
    size, stride = inputs[0].shape[axis], int(params.stride)
    if stride < 1:
        raise ctx.error(f"has a stride of {stride}, expected at least 1; {DAMAGED}")
    if not is_symbolic(size) and not range(*slice(first, last).indices(size)):
        raise ctx.error(
            f"takes [{first}:{last}] of axis {axis}, whose size is {size}: expected a part that is not empty; "
            f"{DAMAGED}"
        )
    return window(inputs[0], {axis: (first, last)}, stride)


@layer("upsample")
def upsample(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Height and width times a factor, by repeating or by interpolating."""
    x, back = ctx.images(inputs[0])
    factors: list[Any] = [int(f) for f in params.scalingFactor]
    factors += [F(f) for f in params.fractionalScalingFactor]
    factors = factors or [1, 1]
    if len(factors) != 2 or min(factors) <= 0:
        stated = ", ".join(map(str, factors))
        raise ctx.error(f"has the factors {stated}, expected 2 numbers above 0; {DAMAGED}")
    form = {"scale_factor_height": factors[0], "scale_factor_width": factors[1]}
    if params.mode == NEAREST:
        return back(mb.upsample_nearest_neighbor(x=x, **form))
    align, half = UPSAMPLE[params.linearUpsampleMode]
    return back(mb.upsample_bilinear(x=x, align_corners=align, half_pixel_centers=half, **form))


@layer("resizeBilinear")
def resize_bilinear(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Height and width in a given size, by interpolating."""
    x, back = ctx.images(inputs[0])
    high, wide = window_layers.positive(ctx, params, "targetSize", 1)
    mode = SAMPLING[params.mode.samplingMethod]
    return back(mb.resize_bilinear(x=x, target_size_height=high, target_size_width=wide, sampling_mode=mode))


@layer("cropResize", inputs=2)
def crop_resize(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Boxes cut from images and resized: (boxes, batch, channel, height, width).

    The second input has 4 coordinates for each box, which is cut from every image, or 5, of which the first is
    the place of the image in the batch. Of 4, the images are cut as channels of one, as each is cut alike.
    """
    x, _ = ctx.images(inputs[0])
    rois = ctx.five(inputs[1])
    count, numbers = ctx.shape(rois, [0, 2])
    boxes = mb.reshape(x=rois, shape=[count, numbers])
    height, width = window_layers.positive(ctx, params, "targetSize", 1)
    form = {
        "target_height": height,
        "target_width": width,
        "normalized_coordinates": params.normalizedCoordinates,
        "spatial_scale": F(params.spatialScale or 1),
        "sampling_mode": SAMPLING[params.mode.samplingMethod],
        "box_coordinate_mode": BOXES[params.boxIndicesMode.boxMode],
    }
    if numbers == 5:
        where: Numbers = ctx.whole(mb.squeeze(x=_columns(boxes, 0, 1), axes=[1]))
        if is_symbolic(x.shape[0]):  # MIL's op compares constant places with the size of the batch
            x, where = mb.gather(x=x, indices=where, axis=0), np.arange(count, dtype=np.int32)
        crops = mb.crop_resize(x=x, boxes=_columns(boxes, 1, 5), box_indices=where, **form)
        return mb.expand_dims(x=crops, axes=[1])
    leading = lengths(x, 0, 1)  # batch and channels, which are merged below
    if x.shape[0] != 1:
        x = mb.reshape(x=x, shape=joined(ONE, -ONE, lengths(x, 2, 3)))
    crops = mb.crop_resize(x=x, boxes=boxes, box_indices=np.zeros(count, np.int32), **form)
    shape = joined(np.array([count], np.int32), leading, np.array([height, width], np.int32))
    return mb.reshape(x=crops, shape=shape)


def _columns(x: Var, begin: int, end: int) -> Var:
    """Return some columns of a matrix."""
    return mb.slice_by_index(x=x, begin=[0, begin], end=[0, end], end_mask=[True, False])


@layer("reorganizeData")
def reorganize_data(ctx: Context, params: Any, inputs: list[Var]) -> Var:
    """Blocks of pixels into channels, or back."""
    x, back = ctx.images(inputs[0])
    size = int(params.blockSize)
    if size < 2:
        raise ctx.error(f"has the block size {size}, expected at least 2; {DAMAGED}")
    divided = {-2: size, -1: size} if params.mode == TO_DEPTH else {-3: size**2}
    for axis, by in divided.items():
        if not is_symbolic(x.shape[axis]) and x.shape[axis] % by:
            raise ctx.error(f"has axis {axis} of size {x.shape[axis]}, expected a multiple of {by}; {DAMAGED}")
    op, name = (
        (mb.space_to_depth, "block_size"),
        (mb.depth_to_space, "block_size"),
        (mb.pixel_shuffle, "upscale_factor"),
    )[params.mode]
    return back(op(x=x, **{name: size}))


@layer_nd("NonMaximumSuppression", inputs=(2, 5))
def non_maximum_suppression(ctx: Context, params: Any, inputs: list[Var]) -> list[Var]:
    """Boxes [b, n, 4] and scores [b, n, classes] to those of `maxBoxes`, their indices [b, m], the counts [b].

    The inputs after the scores are the thresholds of overlap and of scores, and the number of boxes. Missing
    boxes are 0, missing indices -1. Where no score reaches the threshold, the best box alone stays.
    """
    boxes, scores = (of_rank(x, 3) for x in inputs[:2])
    # MIL asks for a static overlap and count; the score may be computed
    iou = known(ctx, inputs[2], "iouThreshold")[0] if len(inputs) > 2 else params.iouThreshold
    least = scalar(ctx, inputs[3]) if len(inputs) > 3 else F(params.scoreThreshold)
    most = known(ctx, inputs[4], "maxBoxes")[0] if len(inputs) > 4 else params.maxBoxes
    kept, kept_scores, indices = mb.non_maximum_suppression(
        boxes=_swapped(boxes),
        scores=_swapped(scores),
        iou_threshold=F(iou),
        max_boxes=np.int32(most),
        per_class_suppression=params.perClassSuppression,
    )
    kept, kept_scores = _swapped(kept), _swapped(kept_scores)
    best = mb.reduce_max(x=kept_scores, axes=[-1], keep_dims=False)
    is_first = np.arange(int(most)).reshape(1, -1) == 0
    reaches = mb.logical_or(x=mb.greater_equal(x=best, y=least), y=is_first)
    valid = mb.logical_and(x=reaches, y=mb.greater_equal(x=indices, y=np.int32(0)))
    count = mb.reduce_sum(x=mb.cast(x=valid, dtype="int32"), axes=[-1], keep_dims=False)
    outputs = [_only(valid, kept, 0), _only(valid, kept_scores, 0), _only(valid, indices, -1), count]
    return outputs[: len(ctx.layer.output)]


def _swapped(x: Var) -> Var:
    return mb.transpose(x=x, perm=[0, 2, 1])


def _only(valid: Var, x: Var, absent: int) -> Var:
    """`x` where it is valid, elsewhere a number that says there is nothing."""
    condition = mb.expand_dims(x=valid, axes=[-1]) if x.rank == 3 else valid
    number = np.int32(absent) if x.dtype == types.int32 else F(absent)
    return mb.select(cond=condition, a=x, b=number)
