"""Where an op of Core ML gives other numbers than the function of PyTorch of the same name.

The interpreter follows Core ML. Each row has a call that shows the difference; tests compute it on both sides,
and docs/interpreter.md prints the table. Where the texts of Core ML do not decide, the row says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MIL = "coremltools, docstring of the MIL op"
"""The docstrings of `coremltools.converters.mil.mil.ops.defs`."""


@dataclass(frozen=True)
class Difference:
    """One op in one form.

    Attributes:
        name: of the row.
        op: MIL op type.
        core_ml: what Core ML does, as a sentence without a full stop.
        torch: what PyTorch does.
        source: who says what Core ML does.
        x: the numbers that the example reads, nested lists of floats; integers for ops of integers.
        inputs: the other inputs of the op.
        gives: what Core ML makes of it, flat.
        torch_gives: what PyTorch makes of it, flat.
        decided: does a text or a measurement say what Core ML does? Else the interpreter chose.
    """

    name: str
    op: str
    core_ml: str
    torch: str
    source: str
    x: Any
    gives: tuple[float, ...]
    torch_gives: tuple[float, ...]
    inputs: Mapping[str, Any] = field(default_factory=dict)
    decided: bool = True


DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "avg_pool, ceil_mode",
        "avg_pool",
        core_ml="the part of the last window that lies past the end counts as padding: the sum is divided by "
        "the full kernel size unless `exclude_padding_from_average` is set",
        torch="never counts this part",
        source="apple/coremltools: issue 2772",
        x=[[[[1.0, 1.0, 1.0]]]],
        gives=(1.0, 0.5),
        torch_gives=(1.0, 1.0),
        inputs={"kernel_sizes": [1, 2], "strides": [1, 2], "pad_type": "valid", "ceil_mode": True},
    ),
    Difference(
        "cast to int8",
        "cast",
        core_ml="floats out of range are clamped to the limits of int8",
        torch="they wrap around (undefined: depends on the processor)",
        source="Apple's Core AI runtime, run on Linux",
        x=[300.0, -300.0, 1.5, -1.5],
        gives=(127.0, -128.0, 1.0, -1.0),
        torch_gives=(44.0, -44.0, 1.0, -1.0),
        inputs={"dtype": "int8"},
    ),
    Difference(
        "cast to uint8",
        "cast",
        core_ml="floats out of range are clamped to 0 and 255",
        torch="they wrap around (undefined: depends on the processor)",
        source="Apple's Core AI runtime, run on Linux",
        x=[300.0, -1.0, 255.9],
        gives=(255.0, 0.0, 255.0),
        torch_gives=(44.0, 255.0, 255.0),
        inputs={"dtype": "uint8"},
    ),
    Difference(
        "cast to int32",
        "cast",
        core_ml="floats out of range are clamped to the limits of int32, and NaN becomes 0, as on ARM",
        torch="on x86, all of them become -2147483648",
        source="not measured in Core ML",
        x=[3e9, -3e9, math.nan],
        gives=(2147483647.0, -2147483648.0, 0.0),
        torch_gives=(-2147483648.0, -2147483648.0, -2147483648.0),
        inputs={"dtype": "int32"},
        decided=False,
    ),
    Difference(
        "log",
        "log",
        core_ml="adds an epsilon to x, 1e-45 by default: log(0) is -103.28",
        torch="log(0) is -inf",
        source=MIL,
        x=[0.0, 1.0],
        gives=(-103.27893, 0.0),
        torch_gives=(-math.inf, 0.0),
    ),
    Difference(
        "rsqrt",
        "rsqrt",
        core_ml="adds an epsilon to x, 1e-12 by default: rsqrt(0) is 1e6",
        torch="rsqrt(0) is inf",
        source=MIL,
        x=[0.0, 4.0],
        gives=(1e6, 0.5),
        torch_gives=(math.inf, 0.5),
    ),
    Difference(
        "inverse",
        "inverse",
        core_ml="adds an epsilon to x, 1e-4 by default: 1 / 0.01 is 99.01",
        torch="reciprocal(0.01) is 100",
        source=MIL,
        x=[0.01, 1.0],
        gives=(99.009901, 0.99990001),
        torch_gives=(100.0, 1.0),
    ),
    Difference(
        "mod",
        "mod",
        core_ml="the result has the sign of the dividend, like torch.fmod. When coremltools folds constants, "
        "the result has the sign of the divisor",
        torch="the result of torch.remainder has the sign of the divisor",
        source="apple/coremltools: pull request 2778; kasper0406/stablehlo-coreml: pull request 70",
        x=[-1.0, 5.0],
        gives=(-1.0, 2.0),
        torch_gives=(2.0, 2.0),
        inputs={"y": 3.0},
    ),
    Difference(
        "real_div of integers",
        "real_div",
        core_ml="gives an integer, truncated toward 0",
        torch="gives a float",
        source=MIL,
        x=[7, -7],
        gives=(3.0, -3.0),
        torch_gives=(3.5, -3.5),
        inputs={"y": 2},
    ),
    Difference(
        "upsample_bilinear",
        "upsample_bilinear",
        core_ml="with align_corners=False and no half_pixel_centers, pixel i of the result lies at i / scale",
        torch="pixel i of the result lies at (i + 0.5) / scale - 0.5",
        source=f"{MIL}; coremltools' own tests, which check this on a Mac",
        x=[[[[0.0, 1.0]]]],
        gives=(0.0, 0.5, 1.0, 1.0),
        torch_gives=(0.0, 0.25, 0.75, 1.0),
        inputs={
            "scale_factor_height": 1,
            "scale_factor_width": 2,
            "align_corners": False,
            "half_pixel_centers": False,
        },
    ),
    Difference(
        "softplus",
        "softplus",
        core_ml="is log(1 + exp(x)) everywhere",
        torch="is x itself above `threshold` (20 by default; our test uses 0.5)",
        source=MIL,
        x=[1.0],
        gives=(1.3132616,),
        torch_gives=(1.0,),
    ),
)
"""Rows by op; `torch_gives` is PyTorch with its defaults, unless `torch` says otherwise."""
