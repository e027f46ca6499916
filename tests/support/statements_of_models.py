"""Statements about graphs: what is preferred, attention, dynamic values, sizes, compressed weights."""

from __future__ import annotations

import numpy as np
from statement import (
    A19,
    ANY,
    LISTED,
    M1,
    M2,
    M4,
    RANGED,
    Statement,
    all_on,
    attention,
    blocks,
    can,
    cannot,
    chained,
    conv,
    half,
    linear,
    masked,
    no_warning,
    of,
    op,
    palette,
    product,
    quantized,
    repeated,
    sparse,
    states,
    unit,
    updated,
    warns,
    weighing,
    written,
)

from anesurgery.mil import mb, types

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

ATTENTION = [
    warns("lmhead-split", "lmhead-split: said on M1", of(linear(32000, 16), (1, 16)), "M1"),
    no_warning("lmhead-split", "lmhead-split: not on A19", of(conv(262144, 8, 1, 1), (1, 8, 1, 1)), A19),
    warns("lmhead-whole", "lmhead-split-harm: said", of(conv(262144, 8, 1, 1), (1, 8, 1, 1)), A19),
    can("lmhead-axis: a convolution with channels first", of(conv(32000, 16, 1, 1), (1, 16, 1, 1)), "M1"),
    warns("lmhead-last-token", "lmhead-last-token: said", of(linear(5000, 16), (1, 8, 16)), ANY),
    can("sdpa: legal", attention(1, 8, 128, 64), M4),
    cannot("sdpa: no device on M1 Max", attention(1, 12, 128, 32), "M1 Max/macOS 27", sure=False),
    warns("sdpa-os26", "sdpa-os26: said", attention(1, 8, 128, 64), "M4/macOS 26"),
    warns(
        "fault-attention-mask", "fused attention: a mask from outside", masked(lambda m: m), "M1 Max/macOS 27"
    ),
    no_warning(
        "fault-attention-mask",
        "fused attention: a mask made beside it",
        masked(lambda m: mb.mul(x=m, y=np.float16(-1e4))),
        "M1 Max/macOS 27",
    ),
    no_warning(
        "fault-attention-mask", "fused attention: not said of OS 18", masked(lambda m: m), "M1/macOS 15"
    ),
    warns("num-silu", "num-silu: said", of(op("silu")), "M1 Max/macOS 27"),
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
    warns("dyn-range", "dyn-range: said", RANGED, "iPhone/iOS 17"),
    Statement(
        "dyn-range: the default is on the ANE",
        RANGED,
        "Mac/macOS 15",
        lambda f: f.ops[2].preferred,
        "ane",
        sure=False,
    ),
    Statement("dyn-range: the CPU, M5 Pro", RANGED, "M5 Pro/macOS 26", lambda f: f.counts.get("ane", 0), 0),
    Statement(
        "dyn-range: of an iPhone it is sure", RANGED, "iPhone/iOS 17", lambda f: f.ops[2].preferred, "ane"
    ),
    Statement(
        "dyn-enumerated: the CPU, M4 Pro", LISTED, "M4 Pro/macOS 26", lambda f: f.counts.get("ane", 0), 0
    ),
    warns("dyn-enumerated-disputed", "dyn-enumerated: reports conflict", LISTED, "M1 Max/macOS 27"),
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
    Statement(
        "dyn-enumerated: on M4 Max", LISTED, "M4 Max/macOS 26", lambda f: f.ops[2].preferred, "ane", sure=False
    ),
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
    warns("state-max-types", "state-max-types: three", states((1, 64), (1, 64), (1, 64)), A19),
    warns("state-two", "two states on a Mac", states((1, 64), (1, 64)), "M4/macOS 26"),
    no_warning("state-two", "two states on A19", states((1, 64), (1, 64)), A19),
    warns("opset", "opset: states on macOS 14", states((1, 64)), M1),
    no_warning("opset", "opset: states on macOS 15", states((1, 64)), M2),
    Statement(
        "opset: an op of iOS 18 on iOS 15",
        attention(1, 2, 8, 16),
        "A12/iOS 15",
        lambda f: (f.findings[0].rule, f.status),
        ("opset", 2),
    ),
    cannot(
        "ctrl-flow",
        of(
            lambda x: mb.cond(
                pred=mb.less(x=mb.reduce_sum(x=x), y=np.float16(1)),
                _true_fn=lambda: mb.relu(x=x),
                _false_fn=lambda: mb.exp(x=x),
            )
        ),
        ANY,
    ),
]
"""Section 3.6: shapes, states, control flow; and what an OS can load."""

SIZES = [
    no_warning("size-program", "size-1gb-ios: 900 MB", weighing(900), "A16/iOS 17"),
    warns("size-program", "size-1gb-ios: 1100 MB", weighing(1100), "A16/iOS 17"),
    no_warning("size-program", "size-1.4gb: A19 Pro", weighing(1330), A19),
    no_warning("size-program", "size-2gb-weights: 1.5 GB", weighing(1500), "M5"),
    warns("size-program", "size-2gb-weights: 3.4 GB", weighing(3300), "M5"),
    warns("size-program", "size-m1-vm: one program of 3.1 GB", weighing(3000), "M1"),
    warns("size-address-space", "size-m1-vm: 4 GB", weighing(3800), "M1"),
    no_warning("size-address-space", "size-m1-vm: not on M2", weighing(3000), "M2"),
    warns("size-big-image", "size-big-image", of(op("relu"), (1, 3, 5568, 5568)), "M4"),
    warns(
        "compile-fanin",
        "compile-fanin: said",
        of(lambda x: mb.concat(values=[mb.mul(x=x, y=np.float16(n)) for n in range(2, 15)], axis=1)),
        "M1",
    ),
]
"""Section 3.7: sizes."""

COMPRESSED = [
    can("comp-palette-ok", of(lambda x: mb.linear(x=x, weight=palette(4, 32, 64)), (1, 64)), ANY),
    warns(
        "comp-group",
        "comp-group: a table for each channel",
        of(lambda x: mb.linear(x=x, weight=palette(4, 32, 64, groups=32)), (1, 64)),
        "A17/iOS 18",
    ),
    no_warning(
        "comp-group",
        "comp-group: groups of 8",
        of(lambda x: mb.linear(x=x, weight=palette(4, 32, 64, groups=4)), (1, 64)),
        "A17/iOS 18",
    ),
    cannot(
        "comp-pcs",
        of(
            lambda x: mb.linear(
                x=x, weight=mb.constexpr_blockwise_shift_scale(data=palette(4, 32, 64), scale=half(32, 1))
            ),
            (1, 64),
        ),
        "A17/iOS 18",
    ),
    warns("comp-bits", "comp-bits: 2", of(lambda x: mb.linear(x=x, weight=palette(2, 32, 64)), (1, 64)), ANY),
    can(
        "comp-int8: per channel",
        of(lambda x: mb.linear(x=x, weight=blocks(np.int8, (32, 64), 32, 1)), (1, 64)),
        M2,
    ),
    can(
        "comp-int4: per channel",
        of(lambda x: mb.linear(x=x, weight=blocks(types.np_int4_dtype, (32, 64), 32, 1)), (1, 64)),
        M2,
    ),
    *[
        cannot(
            f"comp-blockwise: {chip}",
            of(lambda x: mb.linear(x=x, weight=blocks(types.np_int4_dtype, (32, 64), 32, 2)), (1, 64)),
            chip,
        )
        for chip in (M2, "M5 Pro/macOS 27", M4, A19)
    ],
    can("comp-sparse", of(lambda x: mb.linear(x=x, weight=sparse(32, 64)), (1, 64)), ANY),
    cannot(
        "comp-stride",
        of(lambda x: mb.conv(x=x, weight=palette(4, 8, 64, 3, 3), strides=[3, 3])),
        ANY,
        sure=False,
    ),
    cannot(
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
        sure=False,
    ),
    can("comp-w8a8: M4", of(quantized), M4),
    can("comp-w8a8: A17 Pro", of(quantized), "A17/iOS 18"),
    Statement("comp-w8a8-bad: A19", of(quantized), A19, lambda f: f.ops[0].legal, False, sure=False),
    cannot(
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
        sure=False,
    ),
]
"""Section 3.8: compressed weights."""
