"""Lints for conversions that are known to be wrong, on the package alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from anesurgery.mil import Function, Operation
from anesurgery.ops import names
from anesurgery.placement import conversion_losses as lost
from anesurgery.placement.evidence import Finding, Grade, Rule, general
from anesurgery.placement.target import Target

_lint = partial(Rule, kind="conversion", grade=Grade.REPORTED)
RESTORE = "restore_meaning"


def remainder(op: Operation, target: Target) -> str:
    """A value less itself."""
    return lost.lost_remainder(op)


def epsilon(op: Operation, target: Target) -> str:
    """The epsilon of a norm that counts more than it should."""
    grown = lost.grown_epsilon(op)
    if grown is None or grown.most_change < lost.LEAST_CHANGE:
        return ""
    where = f"%{grown.epsilon.name} is added after the division by %{grown.scale.name}"
    return f"{where}, which changes a row with a spike by up to {grown.most_change:.1%}"


def branch(op: Operation, target: Target) -> str:
    """An atan2 that is wrong on the negative half of the axis."""
    return "" if lost.lost_branch(op) is None else f"%{op.outputs[0].name} is 0, not pi, where y is 0 and x < 0"


RULES = (
    _lint(
        "lost-remainder",
        names("sub"),
        "x % 1 was converted without its floor: coremltools 9 drops a division by 1, and x - x is left",
        "FluidInference/mobius: pull request 58; found when rebuilt with coremltools 9.0",
        test=remainder,
        remedy=RESTORE,
        advice="write x - torch.floor(x) and convert again",
    ),
    _lint(
        "lost-epsilon",
        names("add"),
        "the converted rms_norm divides by the largest magnitude first and adds the same epsilon then: it has "
        "grown by the square of that, in fp32 too",
        "apple/coremltools: issue 2821 (M3 Max, CPU_ONLY)",
        test=epsilon,
        remedy=RESTORE,
        advice="divide the epsilon by the square of the scale",
    ),
    _lint(
        "lost-branch",
        names("add sub mul select atan"),
        "torch.atan2 was converted without the branch y = 0: bins of DC and Nyquist get the phase 0 for pi",
        "FluidInference/mobius: pull request 50",
        test=branch,
        remedy=RESTORE,
        advice="compare y with greater_equal",
    ),
    _lint(
        "lost-int16",
        names("gather gather_along_axis gather_nd"),
        "the converter casts the data of a gather to int16, and larger numbers wrap around",
        "apple/coremltools: issue 2222",
        test=lambda op, target: lost.narrowed_data(op),
        remedy=RESTORE,
        advice="gather int32",
    ),
    _lint(
        "lost-digits",
        names("mul real_div add sub pow"),
        "fp16 has 11 binary digits down to 6.1e-5, fewer below, and none below 6e-8",
        "coremltools: passes/defs/quantization.py (casts constants to fp16); IEEE 754: binary16",
        test=lambda op, target: lost.rounded_away(op),
        grade=Grade.DOCUMENTED,
        advice="convert again in fp32 and let compute_fp16 choose, or multiply by two larger factors",
    ),
    _lint(
        "lost-average",
        names("avg_pool"),
        "Core ML divides such a window by the whole kernel, and torch by what lies inside",
        "apple/coremltools: issue 2772",
        test=lambda op, target: lost.overhanging_mean(op),
        remedy=RESTORE,
        advice="exclude the padding from the average, where there is no other",
    ),
    _lint(
        "lost-mask",
        names("add"),
        "a triangle aligned at the first key hides the newest keys from every query, which a cache needs",
        "PyTorch: scaled_dot_product_attention (is_causal aligns at the upper left)",
        test=lambda op, target: lost.short_causal_mask(op),
        grade=Grade.GUESS,
        advice="give the mask as an input, aligned at the last key",
    ),
)
"""Each form, and the pass that writes what was meant."""

UNMOVED = general(
    "lost-output",
    "what is the same for every input is no result; most often the conversion has lost a part",
    "the graph itself, by the definition of its ops",
    kind="conversion",
    grade=Grade.MEASURED,
    advice="compare with the model before the conversion: against_torch",
)


def of_function(function: Function) -> Iterator[Finding]:
    """The outputs that nothing moves."""
    for name, why in lost.unmoved_outputs(function).items():
        yield UNMOVED.finding(f"{name} is the same whatever the inputs are: {why}", name)
