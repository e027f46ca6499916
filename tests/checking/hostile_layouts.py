"""Wrong rewrites of what moves elements, pads, scales or slides a window: each wrong in one detail."""

from __future__ import annotations

from typing import Any

from wrong_rewrites import IMAGE, KERNEL, NEAR, TWO, F, Wrong, conv, op

from anesurgery.mil import Var, mb

ROW = ((F, (2, 6)),)
SQUARE = ((F, (3, 3)),)
CUBE = ((F, (2, 3, 4)),)


def up(x: Var, **how: Any) -> Var:
    options = {"scale_factor_height": 2.0, "scale_factor_width": 2.0, "align_corners": False} | how
    made: Var = mb.upsample_bilinear(x=x, **options)
    return made


def transposed(x: Var, **how: Any) -> Var:
    options = {"strides": [2, 2], "pad_type": "custom", "pad": [1, 1, 1, 1], "dilations": [1, 1], "groups": 1}
    made: Var = mb.conv_transpose(x=x, weight=KERNEL, **(options | how))
    return made


def pool(x: Var, **how: Any) -> Var:
    options = {"kernel_sizes": [2, 2], "strides": [2, 2], "pad_type": "valid", "ceil_mode": False}
    made: Var = mb.max_pool(x=x, **(options | how))
    return made


MISLAID = [
    Wrong("corners not aligned", up, lambda x: up(x, align_corners=True), IMAGE, NEAR),
    Wrong(
        "nearest for bilinear",
        up,
        op("upsample_nearest_neighbor", scale_factor_height=2, scale_factor_width=2),
        IMAGE,
        NEAR,
    ),
    Wrong(
        "height scaled for width",
        op("upsample_nearest_neighbor", scale_factor_height=1, scale_factor_width=4),
        lambda x: mb.reshape(
            x=mb.upsample_nearest_neighbor(x=x, scale_factor_height=4, scale_factor_width=1),
            shape=[1, 4, 5, 20],
        ),
        IMAGE,
    ),
    Wrong(
        "tiled for repeated",
        op("upsample_nearest_neighbor", scale_factor_height=1, scale_factor_width=2),
        op("tile", reps=[1, 1, 1, 2]),
        IMAGE,
    ),
    Wrong(
        "mirror with the edge",
        op("pad", pad=[0, 0, 2, 2], mode="reflect"),
        op("pad", pad=[0, 0, 2, 2], mode="replicate"),
        ROW,
    ),
    Wrong(
        "padding of another axis",
        op("pad", pad=[0, 1, 1, 0], mode="constant"),
        op("pad", pad=[1, 0, 0, 1], mode="constant"),
        SQUARE,
    ),
    Wrong(
        "same for same_lower",
        lambda x: conv(x, pad_type="same", weight=KERNEL[:, :, :2, :2].copy()),
        lambda x: conv(x, pad_type="same_lower", weight=KERNEL[:, :, :2, :2].copy()),
        IMAGE,
        NEAR,
    ),
    Wrong(
        "dilated along one axis only",
        lambda x: conv(x, dilations=[2, 1], pad=[2, 2, 1, 1]),
        lambda x: conv(x, dilations=[1, 2], pad=[1, 1, 2, 2]),
        IMAGE,
        NEAR,
    ),
    Wrong(
        "stride of the other axis",
        lambda x: conv(x, strides=[1, 2]),
        lambda x: mb.transpose(x=conv(x, strides=[2, 1]), perm=[0, 1, 3, 2]),
        IMAGE,
        NEAR,
    ),
    Wrong(
        "output padding lost",
        lambda x: transposed(x, output_shape=[1, 4, 10, 10]),
        lambda x: mb.pad(x=transposed(x), pad=[0, 1, 0, 1], mode="constant"),
        IMAGE,
        NEAR,
    ),
    Wrong(
        "output padded at the begin",
        lambda x: transposed(x, pad=[1, 0, 1, 0]),
        lambda x: transposed(x, pad=[0, 1, 0, 1]),
        IMAGE,
        NEAR,
    ),
    Wrong(
        "kernel not flipped",
        lambda x: transposed(x, strides=[1, 1]),
        lambda x: conv(x, weight=KERNEL.transpose(1, 0, 2, 3).copy()),
        IMAGE,
        NEAR,
    ),
    Wrong(
        "kernel flipped, not transposed",
        lambda x: transposed(x, strides=[1, 1]),
        lambda x: conv(x, weight=KERNEL[:, :, ::-1, ::-1].copy()),
        IMAGE,
        NEAR,
    ),
    Wrong(
        "window cut at the end",
        lambda x: pool(x, ceil_mode=True),
        lambda x: mb.pad(x=pool(x), pad=[0, 1, 0, 1], mode="replicate"),
        IMAGE,
    ),
    Wrong(
        "squeezed, then reshaped in another order",
        op("reshape", shape=[4, 3, 2]),
        op("transpose", perm=[2, 1, 0]),
        CUBE,
    ),
    Wrong(
        "axes merged in another order",
        op("reshape", shape=[6, 4]),
        lambda x: mb.reshape(x=mb.transpose(x=x, perm=[1, 0, 2]), shape=[6, 4]),
        CUBE,
    ),
    Wrong(
        "depth before block",
        op("depth_to_space", block_size=2),
        op("pixel_shuffle", upscale_factor=2),
        ((F, (1, 8, 2, 2)),),
    ),
    Wrong(
        "crop at the other end",
        op("slice_by_size", begin=[0, 1], size=[3, 2]),
        op("slice_by_index", begin=[0, 0], end=[3, -1]),
        SQUARE,
    ),
    Wrong(
        "band of the other side", op("band_part", lower=0, upper=-1), op("band_part", lower=-1, upper=0), SQUARE
    ),
    Wrong(
        "stacked for concatenated",
        lambda x, y: mb.reshape(x=mb.stack(values=[x, y], axis=1), shape=[4, 4]),
        lambda x, y: mb.concat(values=[x, y], axis=0),
        TWO,
    ),
    Wrong(
        "interleaved for concatenated",
        lambda x, y: mb.concat(values=[x, y], axis=1, interleave=True),
        lambda x, y: mb.concat(values=[x, y], axis=1),
        TWO,
    ),
    Wrong(
        "split into other sizes",
        lambda x: mb.split(x=x, split_sizes=[2, 4], axis=1)[1],
        lambda x: mb.pad(x=mb.split(x=x, num_splits=2, axis=1)[1], pad=[0, 0, 1, 0], mode="reflect"),
        ROW,
    ),
]
"""Each must be caught by default settings."""
