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
    can,
    cannot,
    conv,
    half,
    ints,
    legal,
    linear,
    lookup,
    no_warning,
    of,
    op,
    pool,
    product,
    states,
    unit,
    warns,
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
    cannot("dtype-fp32-compute", of(op("relu"), dtype=types.fp32), ANY),
    cannot("dtype-fp32-compute: a product", of(linear(64, 64), (128, 64), dtype=types.fp32), "M1"),
    can("dtype-fp32-io: casts on M4", of(op("cast", dtype="fp16"), dtype=types.fp32), M4),
    cannot("dtype-fp32-io: casts on M1", of(op("cast", dtype="fp16"), dtype=types.fp32), M1),
    cannot("dtype-int32-op: add", ints(op("add", y=1), (1, 8)), ANY),
    cannot("dtype-int32-op: a comparison", ints(op("greater", y=1), (1, 8)), M4),
    cannot("dtype-int-cast: fp16 to int32", of(op("cast", dtype="int32")), ANY),
    cannot("dtype-int-cast: int32 to fp16", ints(op("cast", dtype="fp16"), (1, 8)), ANY),
    can(
        "dtype-int-cast: bool to fp16",
        of(lambda x: mb.cast(x=mb.greater(x=x, y=np.float16(0)), dtype="fp16")),
        M4,
    ),
    cannot("dtype-int16-indices: int32 to int16", ints(op("cast", dtype="int16"), (1, 8)), M4),
    warns("dtype-int-input", "dtype-int-input: said", lookup(16), ANY),
    can(
        "dtype-bool: logical_and",
        of(lambda x: mb.logical_and(x=mb.greater(x=x, y=np.float16(0)), y=mb.less(x=x, y=np.float16(1)))),
        M4,
    ),
    cannot(
        "dtype-bool: elsewhere",
        of(lambda x: mb.logical_and(x=mb.greater(x=x, y=np.float16(0)), y=mb.less(x=x, y=np.float16(1)))),
        "M2",
        sure=False,
    ),
]
"""Section 3.1: types."""

SHAPES = [
    cannot("rank-max5", of(op("relu"), (1, 2, 2, 2, 2, 2)), ANY),
    can("rank-max5: five are taken", of(op("relu"), (1, 2, 2, 2, 2)), M4),
    cannot("rank-linear", of(linear(4, 8), (1, 2, 2, 4, 8)), ANY, sure=False),
    cannot("rank-sdpa", attention(1, 2, 2, 8, 16), ANY, sure=False),
    *[
        cannot(f"dim-max-16384: {chip}", of(op("relu"), LONG), chip)
        for chip in ("M1", "M2", "M3", "A14", "A15", "A16")
    ],
    *[can(f"dim-max-65536: {chip}", of(op("relu"), LONG), chip) for chip in ("M4", "M5", "A17", "A19")],
    *[
        cannot(f"dim-max-65536: too long for {chip}", of(op("relu"), LONGER), chip)
        for chip in ("M1", "M4", "M6")
    ],
    can("dim-max-16384: channels", of(op("relu"), (1, 65536, 1, 1)), "M1"),
    cannot("dim-max-65536: channels", of(op("relu"), (1, 65537, 1, 1)), "M1"),
    can("dim-conv-cout: the convolution stays", of(conv(262144, 8, 1, 1), (1, 8, 1, 1)), A19),
    cannot(
        "dim-conv-cout: its reader leaves",
        of(lambda x: mb.tanh(x=mb.conv(x=x, weight=half(262144, 8, 1, 1))), (1, 8, 1, 1)),
        A19,
    ),
    cannot("dim-conv-cout: a linear head on M2", of(linear(32000, 8), (1, 8)), "M2"),
    cannot("head size: 742 MB of fp16", of(linear(151936, 16), (1, 16)), "M4 Pro"),
    can("matmul-inner: 32768", product(16, 32768, 16), M4),
    cannot("matmul-inner: 40000", product(16, 40000, 16), M4),
    cannot("matmul-inner: 20000 on M1", product(16, 20000, 16), M1),
    cannot("matmul-inner: linear", of(linear(2, 40000), (1, 40000)), M4),
    cannot("dim-lopsided", of(op("relu"), (50000,)), "M1"),
    Statement("dim-small-total", of(op("add", y=np.float16(1)), (1, 8)), ANY, unit, "cpu"),
    warns("last-axis-align", "last-axis-align: said", of(linear(33, 1024), (1, 512, 1024)), ANY),
    warns("state-width-32", "state-width-32: 270 fails", states((1, 270)), "M4/macOS 15"),
    no_warning("state-width-32", "state-width-32: 256 runs", states((1, 256)), "M4/macOS 15"),
    warns("rank5-kv", "rank5-kv: said", states((1, 2, 2, 8, 64)), "M5"),
    warns("working-set", "working-set: said", of(op("relu"), (1, 64, 256, 256)), "M1"),
]
"""Section 3.2: ranks and lengths."""

OPS = [
    *[
        Statement(
            f"sin, cos: {chip}", of(op("sin")), chip, legal, chip in ("M3", "M4", "M5"), sure=chip != "M3"
        )
        for chip in ("M1", "M2", "M3", "M4", "M5")
    ],
    cannot("mod", of(op("mod", y=np.float16(2))), ANY),
    cannot("reduce_prod", of(op("reduce_prod", axes=[1])), ANY),
    cannot("argmax", of(op("reduce_argmax", axis=1)), ANY),
    cannot("topk on M1", of(lambda x: mb.topk(x=x, k=2)[0]), "M1"),
    cannot("topk on M2", of(lambda x: mb.topk(x=x, k=2)[0]), M2),
    Statement(
        "topk of RF-DETR on M3 Pro",
        of(lambda x: mb.topk(x=x, k=300)[0], (1, 1344)),
        "M3 Pro/macOS 27",
        unit,
        "cpu",
    ),
    can("topk on M4", of(lambda x: mb.topk(x=x, k=40)[0], (1, 32000)), M4),
    cannot("argsort", of(op("argsort", axis=1)), ANY),
    cannot("cumsum", of(op("cumsum", axis=1)), ANY),
    cannot(
        "slice, dynamic begin",
        of(lambda x, i: mb.slice_by_size(x=x, begin=mb.cast(x=i, dtype="int32"), size=[1, 4]), (8, 4), (2,)),
        ANY,
    ),
    can(
        "pad reflect on M1: software, not refused",
        of(op("pad", pad=[1, 1, 1, 1], mode="reflect")),
        "M1",
        sure=False,
    ),
    can("pad reflect on M2", of(op("pad", pad=[1, 1, 1, 1], mode="reflect")), "M2"),
    can("pad reflect on M4", of(op("pad", pad=[1, 1, 1, 1], mode="reflect")), M4),
    can("gather, constant indices", of(op("gather", indices=[0, 3], axis=1)), M4),
    *[cannot(f"embedding: {chip}", lookup(512), chip) for chip in ("M1", "M4", "A19")],
    cannot("gather, int16 of the run", lookup(512, types.int16), M4),
    can("gather, uint16 of the run", lookup(512, types.uint16), "any/macOS 15", sure=False),
    cannot("scatter", of(lambda x, y: mb.scatter(data=x, indices=[0], updates=y), (4, 8), (1, 8)), ANY),
    cannot("one_hot", ints(lambda x: mb.one_hot(indices=x, one_hot_vector_size=8), (4,)), ANY),
    cannot("band_part", of(op("band_part", lower=-1, upper=0)), ANY),
    cannot(
        "crop_resize",
        of(lambda x, b: mb.crop_resize(x=x, boxes=b, target_height=4, target_width=4), (1, 4, 16, 16), (1, 4)),
        ANY,
    ),
    cannot("resample on M1", RESAMPLE, "M1"),
    can("resample on M4", RESAMPLE, M4),
    can(
        "quantize, dequantize",
        of(
            lambda x: mb.dequantize(
                input=mb.quantize(input=x, scale=np.float16(1), output_dtype="int8"), scale=np.float16(1)
            )
        ),
        M4,
    ),
    *[
        cannot(f"softmax below the floor: {chip}", of(op("softmax", axis=1)), chip, sure=False)
        for chip in (A12, A13)
    ],
    *[
        cannot(f"{kind} below the floor", of(build), A12, sure=False)
        for kind, build in {
            "layer_norm": op("layer_norm", axes=[1]),
            "reduce_mean": op("reduce_mean", axes=[1]),
            "resize": op("resize_bilinear", target_size_height=64, target_size_width=64),
        }.items()
    ],
    can("softmax on A14", of(op("softmax", axis=1)), A14),
    cannot(
        "slice_update alone",
        of(lambda x, u: mb.slice_update(x=x, update=u, begin=[0, 0], end=[2, 8]), (8, 8), (2, 8)),
        M4,
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
    cannot("conv3d on M1", of(conv(4, 4, 3, 3, 3, pad_type="valid"), (1, 4, 8, 8, 8)), "M1", sure=False),
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
    can("conv-kernel-square: 16", of(conv(8, 64, 16, 16)), M4),
    cannot("conv-kernel-square: 17", of(conv(8, 64, 17, 17)), M4),
    can("conv-kernel-1xK: 15", of(conv(8, 64, 1, 15)), M4),
    cannot("conv-kernel-1xK: 16", of(conv(8, 64, 1, 16)), M4),
    can("conv-kernel-1xK: 13 on M1", of(conv(8, 64, 1, 13)), "M1"),
    cannot("conv-kernel-1xK: 14 on M1", of(conv(8, 64, 1, 14)), "M1"),
    can("conv-kernel-Kx1: 31", of(conv(8, 64, 31, 1)), M4),
    cannot("conv-kernel-Kx1: 32", of(conv(8, 64, 32, 1)), M4),
    can("conv-kernel-Kx1: 29 on M1", of(conv(8, 64, 29, 1)), "M1"),
    cannot("conv-kernel-Kx1: 30 on M1", of(conv(8, 64, 30, 1)), "M1"),
    can("conv-kernel: 16 wide on M2", of(conv(8, 64, 1, 16)), "M2"),
    cannot("conv-kernel: 17 wide on M2", of(conv(8, 64, 1, 17)), "M2"),
    cannot("conv-kernel: 16 by 16 on M6", of(conv(8, 64, 16, 16)), M6),
    can("conv-kernel: 9 wide on M6", of(conv(8, 64, 1, 9)), M6),
    warns("conv-kernel-slow", "conv-kernel-slow: said", of(conv(8, 64, 13, 13)), M4),
    *[can(f"conv-stride: {n}", of(conv(8, 64, 3, 3, strides=[n, n])), M4) for n in (2, 3, 5, 8)],
    warns("conv-stride", "conv-stride: 5 is said to be slow", of(conv(8, 64, 3, 3, strides=[5, 5])), M4),
    can("conv-dilated-2020: legal today", of(conv(8, 64, 3, 3, dilations=[2, 2])), M4),
    *[can(f"conv groups: {n}", of(conv(64, 64, 3, 3, groups=n)), M4) for n in (2, 4, 64)],
    cannot(
        "depthwise (1, 3), 1024 groups, one position",
        of(conv(1024, 1024, 1, 3, groups=1024, pad_type="valid"), (1, 1024, 1, 3)),
        A19,
        sure=False,
    ),
    cannot(
        "depthwise (1, 3), 1024 groups, on a Mac",
        of(conv(1024, 1024, 1, 3, groups=1024, pad_type="valid"), (1, 1024, 1, 3)),
        "M4/macOS 26",
        sure=False,
    ),
    cannot(
        "conv-dynamic-dims",
        of(conv(4, 4, 3, 3, strides=[3, 3], pad_type="valid"), (1, 4, get_new_symbol(), 8)),
        ANY,
        sure=False,
    ),
    can("pool-maxw8: 8", of(pool("max_pool", 8, 8)), M4),
    cannot("pool-maxw8: 1x9", of(pool("max_pool", 1, 9)), M4),
    can("pool-maxw8: 9x1", of(pool("max_pool", 9, 1)), M4),
    can("pool-maxw8: 32", of(pool("max_pool", 1, 32)), M4),
    can("avg_pool: 14", of(pool("avg_pool", 14, 14)), M4),
    cannot("avg_pool: 30 on M1", of(pool("avg_pool", 30, 30)), "M1"),
    can(
        "upsample-legacy: 3 times is fine today",
        of(op("upsample_nearest_neighbor", scale_factor_height=3, scale_factor_width=3)),
        M4,
    ),
]
"""Section 3.4: windows and steps."""
