"""Public statements about the Neural Engine, each with a model of its own: `inspect` says so, or does not know.

A row names the statement (the id of the project's table of evidence), builds what it speaks about, and gives
the chip, the OS and what was seen. Where `sure` is set, "unknown" is no answer. What is known of single ops on
an M4 is scored by `make placement`, and the open reports have a file of their own (`test_reports.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil.mil import get_new_symbol

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement import Inspection
from anesurgery.placement.legal import Legality

Read = Callable[[Inspection], Any]
Build = Callable[..., Any]


@dataclass(frozen=True)
class Statement:
    """What somebody saw, and the model to ask about.

    Attributes:
        name: id in the table of evidence, and what is said, in words.
        build: makes the program.
        target: chip and OS.
        read: takes the answer out of an inspection.
        seen: the answer of the statement.
        sure: "unknown" does not do.
        units: compute units.
        inputs: of a run, for what depends on numbers.
    """

    name: str
    build: Callable[[], Program]
    target: str
    read: Read
    seen: Any
    sure: bool = True
    units: str = "CPU_AND_NE"
    inputs: Any = None


def legal(found: Inspection) -> Any:
    """Of the last op."""
    return found.ops[-1].legal


def unit(found: Inspection) -> Any:
    """Of the last op."""
    return found.ops[-1].preferred


def all_on(found: Inspection) -> Any:
    """The unit of every op, where it is one."""
    units = {row.preferred for row in found.ops}
    return units.pop() if len(units) == 1 else None if None in units else tuple(sorted(map(str, units)))


def says(rule: str) -> Read:
    """Is there a finding of a rule?"""
    return lambda found: rule in {f.rule for f in found.all_findings}


def half(*shape: int) -> Any:
    return np.full(shape, 0.01, np.float16)


def program(
    build: Build, *shapes: tuple[Any, ...], dtype: Any = types.fp16, states: tuple[Any, ...] = ()
) -> Program:
    inputs = [mb.TensorSpec(shape, dtype=dtype) for shape in shapes]
    inputs += [mb.StateTensorSpec(shape, types.fp16) for shape in states]
    made: Program = mb.program(input_specs=inputs, opset_version=ct.target.iOS18)(build)
    return made


def of(build: Build, *shapes: tuple[Any, ...], **more: Any) -> Callable[[], Program]:
    return lambda: program(build, *(shapes or ((1, 64, 32, 32),)), **more)


def conv(outputs: int, inputs: int, *kernel: int, **more: Any) -> Build:
    options = {"pad_type": "same", **more}
    groups = options.get("groups", 1)
    return lambda x: mb.conv(x=x, weight=half(outputs, inputs // groups, *kernel), **options)


def pool(kind: str, *window: int) -> Build:
    return lambda x: getattr(mb, kind)(x=x, kernel_sizes=list(window), strides=[1, 1], pad_type="same")


def op(kind: str, **more: Any) -> Build:
    return lambda x: getattr(mb, kind)(x=x, **more)


def linear(outputs: int, inputs: int) -> Build:
    return lambda x: mb.linear(x=x, weight=half(outputs, inputs))


def chained(width: int, count: int) -> Build:
    """1x1 convolutions of one width, one after the other."""

    def body(x: Var) -> Var:
        for _ in range(count):
            x = mb.conv(x=x, weight=half(width, width, 1, 1))
        return x

    return body


def repeated(width: int, count: int) -> Build:
    """Linear ops of one width, one after the other."""

    def body(x: Var) -> Var:
        for _ in range(count):
            x = mb.linear(x=x, weight=half(width, width))
        return x

    return body


def product(rows: int, inner: int, columns: int) -> Callable[[], Program]:
    """A product of two inputs."""
    return of(lambda x, y: mb.matmul(x=x, y=y), (rows, inner), (inner, columns))


def attention(*shape: int) -> Callable[[], Program]:
    return of(lambda q, k, v: mb.scaled_dot_product_attention(query=q, key=k, value=v), shape, shape, shape)


def masked(mask_of: Callable[[Var], Any]) -> Callable[[], Program]:
    """Fused attention with a mask that is made of the second input."""
    shape = (1, 2, 8, 16)

    def body(q: Var, m: Var) -> Var:
        return mb.scaled_dot_product_attention(query=q, key=q, value=q, attn_mask=mask_of(m))

    return of(body, shape, (1, 1, 8, 8))


def ints(build: Build, *shapes: tuple[int, ...], dtype: Any = types.int32) -> Callable[[], Program]:
    return of(build, *shapes, dtype=dtype)


def lookup(rows: int, dtype: Any = types.int32) -> Callable[[], Program]:
    return ints(
        lambda x: mb.gather(x=half(rows, 4), indices=x, axis=0, validate_indices=False), (1, 8), dtype=dtype
    )


def palette(bits: int, *shape: int, groups: int = 1) -> Var:
    """Weights out of 2^bits values, with tables for groups of outputs."""
    kinds = {1: types.np_uint1_dtype, 2: types.np_uint2_dtype, 4: types.np_uint4_dtype, 6: types.np_uint6_dtype}
    tables = half(groups, *[1] * (len(shape) - 1), 2**bits, 1)
    return mb.constexpr_lut_to_dense(indices=np.zeros(shape, kinds[bits]), lut=tables)


def blocks(kind: Any, shape: tuple[int, ...], *scales: int) -> Var:
    return mb.constexpr_blockwise_shift_scale(data=np.ones(shape, kind), scale=half(*scales))


def sparse(*shape: int) -> Var:
    mask = np.zeros(shape, types.np_uint1_dtype)
    mask.reshape(-1)[::4] = 1
    return mb.constexpr_sparse_to_dense(nonzero_data=half(int(np.asarray(mask, np.int32).sum())), mask=mask)


def quantized(x: Var) -> Var:
    """Activations of 8 bits around a convolution."""
    scale = np.float16(0.1)
    small = mb.dequantize(input=mb.quantize(input=x, scale=scale, output_dtype="int8"), scale=scale)
    return mb.conv(x=small, weight=blocks(np.int8, (64, 64, 3, 3), 64, 1, 1, 1), pad_type="same")


def states(*shapes: tuple[int, ...]) -> Callable[[], Program]:
    def total(x: Var, *kept: Var) -> Var:
        for state in kept:
            x = mb.add(x=x, y=mb.reduce_sum(x=mb.read_state(input=state)))
        return x

    bodies: dict[int, Build] = {  # the builder counts the names
        1: lambda x, a: total(x, a),
        2: lambda x, a, b: total(x, a, b),
        3: lambda x, a, b, c: total(x, a, b, c),
    }
    return of(bodies[len(shapes)], (1, 64), states=shapes)


def updated(update: Callable[[Var, Var], Var]) -> Callable[[], Program]:
    """A state is read, changed and written."""

    def body(x: Var, state: Var) -> Var:
        new = update(mb.read_state(input=state), x)
        return mb.relu(x=mb.coreml_update_state(state=state, value=new))

    return of(body, (1, 64), states=((32, 64),))


def written(old: Var, x: Var) -> Var:
    return mb.slice_update(x=old, update=x, begin=[0, 0], end=[1, 64])


def weighing(megabytes: int) -> Callable[[], Program]:
    """A program with so many bytes of weights, which nobody reads from memory."""
    return of(lambda x: mb.linear(x=x, weight=np.zeros((megabytes << 6, 8192), np.float16)), (1, 8192))


def convolutions(spec: Any) -> Callable[[], Program]:
    """Eight convolutions over images of many sizes."""

    def build() -> Program:
        import torch

        layers = [torch.nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1) for i in range(8)]
        traced: Any = torch.jit.trace(torch.nn.Sequential(*layers).eval(), torch.zeros(1, 3, 256, 256))  # type: ignore[no-untyped-call]
        model = ct.convert(
            traced,
            inputs=[ct.TensorType("x", shape=spec)],
            skip_model_load=True,
            minimum_deployment_target=ct.target.iOS16,
        )
        made: Program = model._mil_program
        return made

    return cache(build)


SIDES = ct.RangeDim(64, 512, default=256)
RANGED = convolutions((1, 3, SIDES, SIDES))
LISTED = convolutions(ct.EnumeratedShapes([(1, 3, n, n) for n in (128, 256)], default=(1, 3, 256, 256)))

M4, M1, M2, M3, M6 = "M4/macOS 27", "M1/macOS 14", "M2/macOS 15", "M3/macOS 15", "M6/macOS 27"
ANY = "any"
A12, A13, A14, A19 = "A12/iOS 16", "A13/iOS 17", "A14/iOS 17", "A19/iOS 26"
LONG, LONGER = (1, 1, 1, 16385), (1, 1, 1, 65537)

PLACED = [
    Statement("decide-breakeven: 512^3 goes to the ANE", product(512, 512, 512), M4, unit, "ane"),
    Statement("decide-breakeven: 384^3 stays", product(384, 384, 384), M4, unit, "cpu"),
    Statement("decide-breakeven: 4x4 stays", product(4, 4, 4), M4, unit, "cpu"),
    Statement(
        "decide-breakeven: a row by 4992x4992",
        of(lambda x: mb.matmul(x=x, y=half(4992, 4992)), (1, 4992)),
        M4,
        unit,
        "ane",
        sure=False,
    ),
    Statement("sdpa-op: 2 million elements", attention(1, 16, 2048, 64), M4, unit, "ane", sure=False),
    Statement("sdpa-op: small", attention(1, 8, 128, 64), M4, unit, "cpu"),
    Statement("perf-elementwise: no island of one op", of(op("relu")), M4, unit, "cpu"),
    Statement(
        "linear-vs-conv: 1x1 of 2.4 M weights", of(conv(4096, 576, 1, 1), (1, 576, 1, 1)), "M1", unit, "cpu"
    ),
    Statement(
        "linear-vs-conv: 1x1 of 4.7 M weights", of(conv(8192, 576, 1, 1), (1, 576, 1, 1)), "M1", unit, "ane"
    ),
    Statement("linear-vs-conv: 8 chained", of(chained(576, 8), (1, 576, 1, 1)), "M1", all_on, "cpu"),
    Statement("linear-vs-conv: 16 chained", of(chained(576, 16), (1, 576, 1, 1)), "M1", all_on, "ane"),
    *[
        Statement(
            f"linear: 64 chained, {rows} rows on {chip}",
            of(repeated(576, 64), (rows, 576)),
            chip,
            all_on,
            seen,
            sure,
        )
        for rows, chip, seen, sure in (
            (1, "M1", "cpu", False),
            (128, "M1", "ane", True),
            (1, "M4", "ane", False),
        )
    ],
    Statement(
        "matmul against linear: 448 rows stay", of(linear(384, 384), (448, 384)), "M4", unit, "cpu", sure=False
    ),
    Statement("linear: 576 to 576, one row", of(linear(576, 576), (1, 576)), "M1", unit, "cpu"),
    Statement("linear: 576 to 576, 128 rows", of(linear(576, 576), (128, 576)), "M1", unit, "ane", sure=False),
    Statement(
        "conv_transpose: preferred even alone",
        of(lambda x: mb.conv_transpose(x=x, weight=half(64, 64, 2, 2), strides=[2, 2])),
        M4,
        unit,
        "ane",
    ),
]
"""Where Core ML's own choice was published."""

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
    Statement(
        "resample on M1",
        of(
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
        ),
        "M1",
        legal,
        False,
    ),
    Statement(
        "resample on M4",
        of(
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
        ),
        M4,
        legal,
        True,
    ),
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

ATTENTION = [
    Statement("lmhead-split: said on M1", of(linear(32000, 16), (1, 16)), "M1", says("lmhead-split"), True),
    Statement(
        "lmhead-split: not on A19", of(conv(262144, 8, 1, 1), (1, 8, 1, 1)), A19, says("lmhead-split"), False
    ),
    Statement(
        "lmhead-split-harm: said", of(conv(262144, 8, 1, 1), (1, 8, 1, 1)), A19, says("lmhead-whole"), True
    ),
    Statement(
        "lmhead-axis: a convolution with channels first",
        of(conv(32000, 16, 1, 1), (1, 16, 1, 1)),
        "M1",
        legal,
        True,
    ),
    Statement("lmhead-last-token: said", of(linear(512, 16), (1, 8, 16)), ANY, says("lmhead-last-token"), True),
    Statement("sdpa: legal", attention(1, 8, 128, 64), M4, legal, True),
    Statement(
        "sdpa: no device on M1 Max", attention(1, 12, 128, 32), "M1 Max/macOS 27", legal, False, sure=False
    ),
    Statement("sdpa-os26: said", attention(1, 8, 128, 64), "M4/macOS 26", says("sdpa-os26"), True),
    Statement(
        "fused attention: a mask from outside", masked(lambda m: m), "M1 Max/macOS 27", says("sdpa-mask"), True
    ),
    Statement(
        "fused attention: a mask made beside it",
        masked(lambda m: mb.mul(x=m, y=np.float16(-1e4))),
        "M1 Max/macOS 27",
        says("sdpa-mask"),
        False,
    ),
    Statement(
        "fused attention: not said of OS 18", masked(lambda m: m), "M1/macOS 15", says("sdpa-mask"), False
    ),
    Statement("num-silu: said", of(op("silu")), "M1 Max/macOS 27", says("num-silu"), True),
    Statement(
        "matmul with a constant stays on the CPU",
        of(lambda x: mb.matmul(x=x, y=half(384, 384)), (1500, 384)),
        "M4 Max/macOS 26",
        unit,
        "cpu",
        sure=False,
    ),
    Statement("the same as linear does not", of(linear(384, 384), (1500, 384)), "M4 Max/macOS 26", unit, "ane"),
]
"""Section 3.5: products, attention, heads."""

DYNAMIC = [
    Statement("dyn-range: said", RANGED, "iPhone/iOS 17", says("dyn-range"), True),
    Statement(
        "dyn-range: the default is on the ANE", RANGED, "Mac/macOS 15", lambda f: f.ops[2].preferred, "ane"
    ),
    Statement(
        "dyn-enumerated: the default is on the ANE",
        LISTED,
        "iPhone/iOS 17",
        lambda f: f.ops[2].preferred,
        "ane",
    ),
    Statement(
        "dyn-enumerated: none of 362 ops", LISTED, "M1 Max/macOS 26", lambda f: f.counts.get("ane", 0), 0
    ),
    Statement("dyn-enumerated: on M4 Max", LISTED, "M4 Max/macOS 26", lambda f: f.ops[2].preferred, "ane"),
    Statement(
        "state-ok",
        updated(written),
        A19,
        lambda f: [r.legal for r in f.ops if r.op_type == "slice_update"],
        [True],
    ),
    Statement(
        "state updates: only through a slice",
        updated(written),
        M4,
        lambda f: [r.legal for r in f.ops if r.op_type == "slice_update"],
        [True],
    ),
    Statement("state-max-types: three", states((1, 64), (1, 64), (1, 64)), A19, says("state-max-types"), True),
    Statement("two states on a Mac", states((1, 64), (1, 64)), "M4/macOS 26", says("state-two"), True),
    Statement("two states on A19", states((1, 64), (1, 64)), A19, says("state-two"), False),
    Statement("opset: states on macOS 14", states((1, 64)), M1, says("opset"), True),
    Statement("opset: states on macOS 15", states((1, 64)), M2, says("opset"), False),
    Statement(
        "opset: an op of iOS 18 on iOS 15",
        attention(1, 2, 8, 16),
        "A12/iOS 15",
        lambda f: (f.findings[0].rule, f.status),
        ("opset", 2),
    ),
    Statement(
        "ctrl-flow",
        of(
            lambda x: mb.cond(
                pred=mb.less(x=mb.reduce_sum(x=x), y=np.float16(1)),
                _true_fn=lambda: mb.relu(x=x),
                _false_fn=lambda: mb.exp(x=x),
            )
        ),
        ANY,
        legal,
        False,
    ),
]
"""Section 3.6: shapes, states, control flow; and what an OS can load."""

SIZES = [
    Statement("size-1gb-ios: 900 MB", weighing(900), "A16/iOS 17", says("size-program"), False),
    Statement("size-1gb-ios: 1100 MB", weighing(1100), "A16/iOS 17", says("size-program"), True),
    Statement("size-1.4gb: A19 Pro", weighing(1330), A19, says("size-program"), False),
    Statement("size-2gb-weights: 1.5 GB", weighing(1500), "M5", says("size-program"), False),
    Statement("size-2gb-weights: 3.4 GB", weighing(3300), "M5", says("size-program"), True),
    Statement("size-m1-vm: one program of 3.1 GB", weighing(3000), "M1", says("size-program"), True),
    Statement("size-m1-vm: 4 GB", weighing(3800), "M1", says("size-address-space"), True),
    Statement("size-m1-vm: not on M2", weighing(3000), "M2", says("size-address-space"), False),
    Statement("size-big-image", of(op("relu"), (1, 3, 5568, 5568)), "M4", says("size-big-image"), True),
    Statement(
        "compile-fanin: said",
        of(lambda x: mb.concat(values=[mb.mul(x=x, y=np.float16(n)) for n in range(2, 15)], axis=1)),
        "M1",
        says("compile-fanin"),
        True,
    ),
]
"""Section 3.7: sizes."""

COMPRESSED = [
    Statement(
        "comp-palette-ok", of(lambda x: mb.linear(x=x, weight=palette(4, 32, 64)), (1, 64)), ANY, legal, True
    ),
    Statement(
        "comp-group: a table for each channel",
        of(lambda x: mb.linear(x=x, weight=palette(4, 32, 64, groups=32)), (1, 64)),
        "A17/iOS 18",
        says("comp-group"),
        True,
    ),
    Statement(
        "comp-group: groups of 8",
        of(lambda x: mb.linear(x=x, weight=palette(4, 32, 64, groups=4)), (1, 64)),
        "A17/iOS 18",
        says("comp-group"),
        False,
    ),
    Statement(
        "comp-pcs",
        of(
            lambda x: mb.linear(
                x=x, weight=mb.constexpr_blockwise_shift_scale(data=palette(4, 32, 64), scale=half(32, 1))
            ),
            (1, 64),
        ),
        "A17/iOS 18",
        legal,
        False,
    ),
    Statement(
        "comp-bits: 2",
        of(lambda x: mb.linear(x=x, weight=palette(2, 32, 64)), (1, 64)),
        ANY,
        says("comp-bits"),
        True,
    ),
    Statement(
        "comp-int8: per channel",
        of(lambda x: mb.linear(x=x, weight=blocks(np.int8, (32, 64), 32, 1)), (1, 64)),
        M2,
        legal,
        True,
    ),
    Statement(
        "comp-int4: per channel",
        of(lambda x: mb.linear(x=x, weight=blocks(types.np_int4_dtype, (32, 64), 32, 1)), (1, 64)),
        M2,
        legal,
        True,
    ),
    *[
        Statement(
            f"comp-blockwise: {chip}",
            of(lambda x: mb.linear(x=x, weight=blocks(types.np_int4_dtype, (32, 64), 32, 2)), (1, 64)),
            chip,
            legal,
            False,
        )
        for chip in (M2, "M5 Pro/macOS 27", M4, A19)
    ],
    Statement("comp-sparse", of(lambda x: mb.linear(x=x, weight=sparse(32, 64)), (1, 64)), ANY, legal, True),
    Statement(
        "comp-stride",
        of(lambda x: mb.conv(x=x, weight=palette(4, 8, 64, 3, 3), strides=[3, 3])),
        ANY,
        legal,
        False,
        sure=False,
    ),
    Statement(
        "comp-lut-axis: a table for each block of a row",
        of(
            lambda x: mb.linear(
                x=x,
                weight=mb.constexpr_lut_to_dense(
                    indices=np.zeros((32, 64), types.np_uint4_dtype), lut=half(32, 4, 16, 1)
                ),
            ),
            (1, 64),
        ),
        A19,
        legal,
        False,
        sure=False,
    ),
    Statement("comp-w8a8: M4", of(quantized), M4, legal, True),
    Statement("comp-w8a8: A17 Pro", of(quantized), "A17/iOS 18", legal, True),
    Statement("comp-w8a8-bad: A19", of(quantized), A19, lambda f: f.ops[0].legal, False, sure=False),
    Statement(
        "comp-joint: a table of int8 that is scaled",
        of(
            lambda x: mb.linear(
                x=x,
                weight=mb.constexpr_blockwise_shift_scale(
                    data=mb.constexpr_lut_to_dense(
                        indices=np.zeros((32, 64), types.np_uint4_dtype), lut=np.ones((1, 1, 16, 1), np.int8)
                    ),
                    scale=half(1, 1),
                ),
            ),
            (1, 64),
        ),
        A19,
        legal,
        False,
        sure=False,
    ),
]
"""Section 3.8: compressed weights."""


def images(count: int) -> Callable[[], Program]:
    """Convolutions over a batch of images: more work than any launch."""

    def body(x: Var) -> Var:
        for _ in range(count):
            x = mb.conv(x=mb.relu(x=x), weight=half(64, 64, 3, 3), pad_type="same")
        return x

    return of(body, (16, 64, 112, 112))


def encoder(count: int) -> Callable[[], Program]:
    """Feed-forward layers over a batch of sequences."""

    def body(x: Var) -> Var:
        for _ in range(count):
            wide = mb.gelu(x=mb.linear(x=mb.layer_norm(x=x, axes=[-1]), weight=half(1024, 256)))
            x = mb.add(x=x, y=mb.linear(x=wide, weight=half(256, 1024)))
        return x

    return of(body, (16, 128, 256))


UNITS = [
    *[
        Statement(f"ALL: {kind} on M5 Max", build, "M5 Max/macOS 26", all_on, "gpu", sure=False, units="ALL")
        for kind, build in {"images": images(4), "an encoder": encoder(2)}.items()
    ],
    *[
        Statement(
            f"CPU_AND_GPU: images on {chip}", images(4), chip, all_on, "gpu", sure=False, units="CPU_AND_GPU"
        )
        for chip in ("M1", "M4 Pro/macOS 26", "M5 Max/macOS 26")
    ],
    Statement("CPU_AND_NE: images on M5 Max", images(4), "M5 Max/macOS 26", all_on, "ane"),
    Statement("ALL: images on M4 Pro stay", images(4), "M4 Pro/macOS 26", all_on, "ane", units="ALL"),
    Statement("CPU_ONLY", images(1), "M4", all_on, "cpu", units="CPU_ONLY"),
    Statement("layout: no rewrite is needed", encoder(2), "M4 Pro/macOS 26", all_on, "ane"),
]
"""Compute units: five models ran on the GPU of an M5 Max with ALL, and on its ANE with CPU_AND_NE."""


def summed(*weights: float) -> Callable[[], Program]:
    """A linear of one output over ones."""
    return of(lambda x: mb.linear(x=x, weight=np.array([weights], np.float16)), (1, len(weights)))


def ones(*shape: int) -> dict[str, Any]:
    return {"x": np.ones(shape, np.float16)}


def saturates(found: Inspection) -> Any:
    """Is a sum of products said to reach the ceiling?"""
    return bool({f.rule for f in found.all_findings} & {"sampled-saturates", "sampled-may-saturate"})


NUMBERS = [
    *[
        Statement(
            f"num-mac-32768: {weights}, {chip}",
            summed(*weights),
            chip,
            saturates,
            seen,
            inputs=ones(1, len(weights)),
        )
        for chip in ("M1", "M2", "M4", "M5")
        for weights, seen in (((16000, 16000), False), ((16500, 16500), True), ((30000, 30000, -60000), True))
    ],
    Statement(
        "num-pe-fp16: products of elements reach 65504",
        of(op("mul", y=np.float16(40000)), (1, 8)),
        "M4",
        saturates,
        False,
        inputs=ones(1, 8),
    ),
    Statement(
        "num-pe-fp16: and no more",
        of(lambda x: mb.mul(x=mb.mul(x=x, y=np.float16(256)), y=np.float16(256)), (1, 8)),
        "M4",
        says("sampled-overflow"),
        True,
        inputs=ones(1, 8),
    ),
    Statement("num-norm-rms: squares", of(op("square"), (1, 8)), ANY, says("num-square"), True),
    Statement(
        "num-eps: 1e-12",
        of(
            lambda x: mb.rsqrt(x=mb.reduce_mean(x=mb.square(x=mb.tanh(x=x)), axes=[1]), epsilon=np.float16(0)),
            (1, 8),
        ),
        ANY,
        says("num-eps"),
        True,
    ),
    *[
        Statement(
            f"num-slice-q4: {chip}",
            of(lambda x: mb.slice_by_index(x=x, begin=[0, 4], end=[1, 8]), (1, 8)),
            chip,
            says("num-slice-q4"),
            seen,
        )
        for chip, seen in (("M1", True), ("M2", True), ("M5", False))
    ],
    Statement(
        "num-int: ids as fp16",
        ints(
            lambda x: mb.mul(
                x=mb.cast(x=mb.range_1d(start=0, end=4096, step=1), dtype="fp16"), y=mb.cast(x=x, dtype="fp16")
            ),
            (1,),
        ),
        ANY,
        says("num-int"),
        True,
    ),
]
"""Section 4: numbers."""

TABLE = [*NUMBERS, *UNITS, *PLACED, *TYPES, *SHAPES, *OPS, *WINDOWS, *ATTENTION, *DYNAMIC, *SIZES, *COMPRESSED]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_a_statement_is_not_contradicted(row: Statement) -> None:
    said = row.read(ane.inspect(row.build(), row.target, compute_units=row.units, inputs=row.inputs))
    assert said == row.seen or (said is None and not row.sure)


def test_no_statement_is_written_twice() -> None:
    assert len({row.name for row in TABLE}) == len(TABLE)


def test_without_the_rules_statements_are_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: every op that a table knows is legal."""
    monkeypatch.setattr(Legality, "verdict", lambda self, op: (True, None))
    limits = [row for row in WINDOWS if row.seen is False and row.sure]
    said = [row.read(ane.inspect(row.build(), row.target)) for row in limits]
    assert len(limits) >= 8
    assert all(said)
