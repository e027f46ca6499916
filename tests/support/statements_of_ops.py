"""Statements about single ops: their types, shapes and windows."""

from __future__ import annotations

import numpy as np
from coremltools.converters.mil.mil import get_new_symbol
from statement import (
    A12,
    A13,
    A14,
    A19,
    ANY,
    LONG,
    LONGER,
    M1,
    M2,
    M3,
    M4,
    M6,
    Statement,
    attention,
    conv,
    half,
    ints,
    legal,
    linear,
    lookup,
    of,
    op,
    pool,
    product,
    says,
    states,
    unit,
)

from anesurgery.mil import mb, types

RESAMPLE = of(
    lambda x, c: mb.resample(
        x=x,
        coordinates=c,
        sampling_mode="bilinear",
        padding_mode="constant",
        padding_value=np.float16(0),
        coordinates_mode="unnormalized",
        align_corners=True,
    ),
    (1, 4, 16, 16),
    (1, 4, 4, 2),
)
TYPES = [
    Statement("dtype-fp32-compute", of(op("relu"), dtype=types.fp32), ANY, legal, False),
    Statement(
        "dtype-fp32-compute: a product", of(linear(64, 64), (128, 64), dtype=types.fp32), "M1", legal, False
    ),
    Statement("dtype-fp32-io: casts on M4", of(op("cast", dtype="fp16"), dtype=types.fp32), M4, legal, True),
    Statement("dtype-fp32-io: casts on M1", of(op("cast", dtype="fp16"), dtype=types.fp32), M1, legal, False),
    Statement("dtype-int32-op: add", ints(op("add", y=1), (1, 8)), ANY, legal, False),
    Statement("dtype-int32-op: a comparison", ints(op("greater", y=1), (1, 8)), M4, legal, False),
    Statement("dtype-int-cast: fp16 to int32", of(op("cast", dtype="int32")), ANY, legal, False),
    Statement("dtype-int-cast: int32 to fp16", ints(op("cast", dtype="fp16"), (1, 8)), ANY, legal, False),
    Statement(
        "dtype-int-cast: bool to fp16",
        of(lambda x: mb.cast(x=mb.greater(x=x, y=np.float16(0)), dtype="fp16")),
        M4,
        legal,
        True,
    ),
    Statement("dtype-int16-indices: int32 to int16", ints(op("cast", dtype="int16"), (1, 8)), M4, legal, False),
    Statement("dtype-int-input: said", lookup(16), ANY, says("dtype-int-input"), True),
    Statement(
        "dtype-bool: logical_and",
        of(lambda x: mb.logical_and(x=mb.greater(x=x, y=np.float16(0)), y=mb.less(x=x, y=np.float16(1)))),
        M4,
        legal,
        True,
    ),
    Statement(
        "dtype-bool: elsewhere",
        of(lambda x: mb.logical_and(x=mb.greater(x=x, y=np.float16(0)), y=mb.less(x=x, y=np.float16(1)))),
        "M2",
        legal,
        False,
        sure=False,
    ),
]
"""Section 3.1: types."""

SHAPES = [
    Statement("rank-max5", of(op("relu"), (1, 2, 2, 2, 2, 2)), ANY, legal, False),
    Statement("rank-max5: five are taken", of(op("relu"), (1, 2, 2, 2, 2)), M4, legal, True),
    Statement("rank-linear", of(linear(4, 8), (1, 2, 2, 4, 8)), ANY, legal, False, sure=False),
    Statement("rank-sdpa", attention(1, 2, 2, 8, 16), ANY, legal, False, sure=False),
    *[
        Statement(f"dim-max-16384: {chip}", of(op("relu"), LONG), chip, legal, False)
        for chip in ("M1", "M2", "M3", "A14", "A15", "A16")
    ],
    *[
        Statement(f"dim-max-65536: {chip}", of(op("relu"), LONG), chip, legal, True)
        for chip in ("M4", "M5", "A17", "A19")
    ],
    *[
        Statement(f"dim-max-65536: too long for {chip}", of(op("relu"), LONGER), chip, legal, False)
        for chip in ("M1", "M4", "M6")
    ],
    Statement("dim-max-16384: channels", of(op("relu"), (1, 65536, 1, 1)), "M1", legal, True),
    Statement("dim-max-65536: channels", of(op("relu"), (1, 65537, 1, 1)), "M1", legal, False),
    Statement(
        "dim-conv-cout: the convolution stays", of(conv(262144, 8, 1, 1), (1, 8, 1, 1)), A19, legal, True
    ),
    Statement(
        "dim-conv-cout: its reader leaves",
        of(lambda x: mb.tanh(x=mb.conv(x=x, weight=half(262144, 8, 1, 1))), (1, 8, 1, 1)),
        A19,
        legal,
        False,
    ),
    Statement("dim-conv-cout: a linear head on M2", of(linear(32000, 8), (1, 8)), "M2", legal, False),
    Statement("head size: 742 MB of fp16", of(linear(151936, 16), (1, 16)), "M4 Pro", legal, False),
    Statement("matmul-inner: 32768", product(16, 32768, 16), M4, legal, True),
    Statement("matmul-inner: 40000", product(16, 40000, 16), M4, legal, False),
    Statement("matmul-inner: 20000 on M1", product(16, 20000, 16), M1, legal, False),
    Statement("matmul-inner: linear", of(linear(2, 40000), (1, 40000)), M4, legal, False),
    Statement("dim-lopsided", of(op("relu"), (50000,)), "M1", legal, False),
    Statement("dim-small-total", of(op("add", y=np.float16(1)), (1, 8)), ANY, unit, "cpu"),
    Statement("last-axis-align: said", of(linear(33, 64), (1, 8, 64)), ANY, says("last-axis-align"), True),
    Statement("state-width-32: 270 fails", states((1, 270)), "M4/macOS 15", says("state-width-32"), True),
    Statement("state-width-32: 256 runs", states((1, 256)), "M4/macOS 15", says("state-width-32"), False),
    Statement("rank5-kv: said", states((1, 2, 2, 8, 64)), "M5", says("rank5-kv"), True),
    Statement("working-set: said", of(op("relu"), (1, 64, 256, 256)), "M1", says("working-set"), True),
]
"""Section 3.2: ranks and lengths."""

OPS = [
    *[
        Statement(
            f"sin, cos: {chip}", of(op("sin")), chip, legal, chip in ("M3", "M4", "M5"), sure=chip != "M3"
        )
        for chip in ("M1", "M2", "M3", "M4", "M5")
    ],
    Statement("mod", of(op("mod", y=np.float16(2))), ANY, legal, False),
    Statement("reduce_prod", of(op("reduce_prod", axes=[1])), ANY, legal, False),
    Statement("argmax", of(op("reduce_argmax", axis=1)), ANY, legal, False),
    Statement("topk on M1", of(lambda x: mb.topk(x=x, k=2)[0]), "M1", legal, False),
    Statement("topk on M2", of(lambda x: mb.topk(x=x, k=2)[0]), M2, legal, False),
    Statement(
        "topk of RF-DETR on M3 Pro",
        of(lambda x: mb.topk(x=x, k=300)[0], (1, 1344)),
        "M3 Pro/macOS 27",
        unit,
        "cpu",
    ),
    Statement("topk on M4", of(lambda x: mb.topk(x=x, k=40)[0], (1, 32000)), M4, legal, True),
    Statement("argsort", of(op("argsort", axis=1)), ANY, legal, False),
    Statement("cumsum", of(op("cumsum", axis=1)), ANY, legal, False),
    Statement(
        "slice, dynamic begin",
        of(lambda x, i: mb.slice_by_size(x=x, begin=mb.cast(x=i, dtype="int32"), size=[1, 4]), (8, 4), (2,)),
        ANY,
        legal,
        False,
    ),
    Statement(
        "pad reflect on M1: software, not refused",
        of(op("pad", pad=[1, 1, 1, 1], mode="reflect")),
        "M1",
        legal,
        True,
        sure=False,
    ),
    Statement("pad reflect on M2", of(op("pad", pad=[1, 1, 1, 1], mode="reflect")), "M2", legal, True),
    Statement("pad reflect on M4", of(op("pad", pad=[1, 1, 1, 1], mode="reflect")), M4, legal, True),
    Statement("gather, constant indices", of(op("gather", indices=[0, 3], axis=1)), M4, legal, True),
    *[Statement(f"embedding: {chip}", lookup(512), chip, legal, False) for chip in ("M1", "M4", "A19")],
    Statement("gather, int16 of the run", lookup(512, types.int16), M4, legal, False),
    Statement("gather, uint16 of the run", lookup(512, types.uint16), "any/macOS 15", legal, True, sure=False),
    Statement(
        "scatter",
        of(lambda x, y: mb.scatter(data=x, indices=[0], updates=y), (4, 8), (1, 8)),
        ANY,
        legal,
        False,
    ),
    Statement("one_hot", ints(lambda x: mb.one_hot(indices=x, one_hot_vector_size=8), (4,)), ANY, legal, False),
    Statement("band_part", of(op("band_part", lower=-1, upper=0)), ANY, legal, False),
    Statement(
        "crop_resize",
        of(lambda x, b: mb.crop_resize(x=x, boxes=b, target_height=4, target_width=4), (1, 4, 16, 16), (1, 4)),
        ANY,
        legal,
        False,
    ),
    Statement("resample on M1", RESAMPLE, "M1", legal, False),
    Statement("resample on M4", RESAMPLE, M4, legal, True),
    Statement(
        "quantize, dequantize",
        of(
            lambda x: mb.dequantize(
                input=mb.quantize(input=x, scale=np.float16(1), output_dtype="int8"), scale=np.float16(1)
            )
        ),
        M4,
        legal,
        True,
    ),
    *[
        Statement(f"softmax below the floor: {chip}", of(op("softmax", axis=1)), chip, legal, False, sure=False)
        for chip in (A12, A13)
    ],
    *[
        Statement(f"{kind} below the floor", of(build), A12, legal, False, sure=False)
        for kind, build in {
            "layer_norm": op("layer_norm", axes=[1]),
            "reduce_mean": op("reduce_mean", axes=[1]),
            "resize": op("resize_bilinear", target_size_height=64, target_size_width=64),
        }.items()
    ],
    Statement("softmax on A14", of(op("softmax", axis=1)), A14, legal, True),
    Statement(
        "slice_update alone",
        of(lambda x, u: mb.slice_update(x=x, update=u, begin=[0, 0], end=[2, 8]), (8, 8), (2, 8)),
        M4,
        legal,
        False,
    ),
    *[
        Statement(
            f"conv, weights of the run: batch {batch} on {chip}",
            of(lambda x, w: mb.conv(x=x, weight=w, pad_type="same"), (batch, 8, 16, 16), (8, 8, 3, 3)),
            chip,
            legal,
            seen,
            sure=seen,
        )
        for chip, batch, seen in ((M4, 1, True), (M1, 4, False), (M3, 4, False), (M1, 1, True))
    ],
    Statement(
        "conv3d on M1",
        of(conv(4, 4, 3, 3, 3, pad_type="valid"), (1, 4, 8, 8, 8)),
        "M1",
        legal,
        False,
        sure=False,
    ),
    Statement(
        "logical_not was never tried",
        of(lambda x: mb.logical_not(x=mb.greater(x=x, y=np.float16(0)))),
        M4,
        legal,
        None,
    ),
]
"""Section 3.3: op by op, where a chip or a condition decides."""

WINDOWS = [
    Statement("conv-kernel-square: 16", of(conv(8, 64, 16, 16)), M4, legal, True),
    Statement("conv-kernel-square: 17", of(conv(8, 64, 17, 17)), M4, legal, False),
    Statement("conv-kernel-1xK: 15", of(conv(8, 64, 1, 15)), M4, legal, True),
    Statement("conv-kernel-1xK: 16", of(conv(8, 64, 1, 16)), M4, legal, False),
    Statement("conv-kernel-1xK: 13 on M1", of(conv(8, 64, 1, 13)), "M1", legal, True),
    Statement("conv-kernel-1xK: 14 on M1", of(conv(8, 64, 1, 14)), "M1", legal, False),
    Statement("conv-kernel-Kx1: 31", of(conv(8, 64, 31, 1)), M4, legal, True),
    Statement("conv-kernel-Kx1: 32", of(conv(8, 64, 32, 1)), M4, legal, False),
    Statement("conv-kernel-Kx1: 29 on M1", of(conv(8, 64, 29, 1)), "M1", legal, True),
    Statement("conv-kernel-Kx1: 30 on M1", of(conv(8, 64, 30, 1)), "M1", legal, False),
    Statement("conv-kernel: 16 wide on M2", of(conv(8, 64, 1, 16)), "M2", legal, True),
    Statement("conv-kernel: 17 wide on M2", of(conv(8, 64, 1, 17)), "M2", legal, False),
    Statement("conv-kernel: 16 by 16 on M6", of(conv(8, 64, 16, 16)), M6, legal, False),
    Statement("conv-kernel: 9 wide on M6", of(conv(8, 64, 1, 9)), M6, legal, True),
    Statement("conv-kernel-slow: said", of(conv(8, 64, 13, 13)), M4, says("conv-kernel-slow"), True),
    *[
        Statement(f"conv-stride: {n}", of(conv(8, 64, 3, 3, strides=[n, n])), M4, legal, True)
        for n in (2, 3, 5, 8)
    ],
    Statement(
        "conv-stride: 5 is said to be slow",
        of(conv(8, 64, 3, 3, strides=[5, 5])),
        M4,
        says("conv-stride"),
        True,
    ),
    Statement("conv-dilated-2020: legal today", of(conv(8, 64, 3, 3, dilations=[2, 2])), M4, legal, True),
    *[Statement(f"conv groups: {n}", of(conv(64, 64, 3, 3, groups=n)), M4, legal, True) for n in (2, 4, 64)],
    Statement(
        "depthwise (1, 3), 1024 groups, one position",
        of(conv(1024, 1024, 1, 3, groups=1024, pad_type="valid"), (1, 1024, 1, 3)),
        A19,
        legal,
        False,
        sure=False,
    ),
    Statement(
        "depthwise (1, 3), 1024 groups, on a Mac",
        of(conv(1024, 1024, 1, 3, groups=1024, pad_type="valid"), (1, 1024, 1, 3)),
        "M4/macOS 26",
        legal,
        False,
        sure=False,
    ),
    Statement(
        "conv-dynamic-dims",
        of(conv(4, 4, 3, 3, strides=[3, 3], pad_type="valid"), (1, 4, get_new_symbol(), 8)),
        ANY,
        legal,
        False,
        sure=False,
    ),
    Statement("pool-maxw8: 8", of(pool("max_pool", 8, 8)), M4, legal, True),
    Statement("pool-maxw8: 1x9", of(pool("max_pool", 1, 9)), M4, legal, False),
    Statement("pool-maxw8: 9x1", of(pool("max_pool", 9, 1)), M4, legal, True),
    Statement("pool-maxw8: 32", of(pool("max_pool", 1, 32)), M4, legal, True),
    Statement("avg_pool: 14", of(pool("avg_pool", 14, 14)), M4, legal, True),
    Statement("avg_pool: 30 on M1", of(pool("avg_pool", 30, 30)), "M1", legal, False),
    Statement(
        "upsample-legacy: 3 times is fine today",
        of(op("upsample_nearest_neighbor", scale_factor_height=3, scale_factor_width=3)),
        M4,
        legal,
        True,
    ),
]
"""Section 3.4: windows and steps."""
