"""Statements about compute units and about numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from statement import ANY, Statement, all_on, half, ints, of, op, says, warns

from anesurgery.mil import Program, Var, mb
from anesurgery.placement import Inspection


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
    warns(
        "sampled-overflow",
        "num-pe-fp16: and no more",
        of(lambda x: mb.mul(x=mb.mul(x=x, y=np.float16(256)), y=np.float16(256)), (1, 8)),
        "M4",
        inputs=ones(1, 8),
    ),
    warns("num-square", "num-norm-rms: squares", of(op("square"), (1, 8)), ANY),
    warns(
        "num-eps",
        "num-eps: 1e-12",
        of(
            lambda x: mb.rsqrt(x=mb.reduce_mean(x=mb.square(x=mb.tanh(x=x)), axes=[1]), epsilon=np.float16(0)),
            (1, 8),
        ),
        ANY,
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
    warns(
        "num-int",
        "num-int: ids as fp16",
        ints(
            lambda x: mb.mul(
                x=mb.cast(x=mb.range_1d(start=0, end=4096, step=1), dtype="fp16"), y=mb.cast(x=x, dtype="fp16")
            ),
            (1,),
        ),
        ANY,
    ),
]
"""Section 4: numbers."""
