"""Rules for models of Core AI alone, op by op, and `anesurgery.lint`, which lists their findings.

`inspect` applies them to the ops that `reading` makes of an `.aimodel`. A fault that was reported of Core AI
counts as a finding here; one that was reported of Core ML only as a warning. For an `.mlpackage` it is the
other way round.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery.coreai.asset import SUFFIX
from anesurgery.doors import door
from anesurgery.errors import LoadError
from anesurgery.mil import Operation, is_constant, np_dtype, producer, static_shape
from anesurgery.ops import names
from anesurgery.placement.evidence import Finding, Grade, Rule, Scope, general
from anesurgery.placement.inspector import inspect
from anesurgery.placement.rules.faulty_ops import FIRST_CORE_AI, rules_of
from anesurgery.placement.target import Target
from anesurgery.semantics.reading import ints, shape_in_words

NOTE = (
    "where ops run and how long they take is said by Core ML's rules for the same ops, carried over with a "
    "lower grade: Apple publishes no plan of Core AI's. What Apple wrote for Core AI keeps its grade, and "
    "`anesurgery lint` lists what is known of Core AI alone"
)
APPLES = ("neural_engine_rules.md", "apple/coreai-torch", "apple/coreai-models")
"""Names in the source of a rule that speaks of Core AI itself."""
LOWER = {Grade.MEASURED: Grade.REPORTED, Grade.DOCUMENTED: Grade.REPORTED, Grade.REPORTED: Grade.GUESS}
"""Grade of a rule about Core ML -> its grade for Core AI, which uses the same engine."""
OVER = "carried over from Core ML"
TORCH = "apple/coreai-torch: {}"
RUN = "run on Linux with coreai-core 1.0.0b3"


def _integer_round_trip(op: Operation, target: Target) -> str:
    """Name a cast to integers and back, or an output that is an input."""
    if op.op_type == "identity":
        return f"the output %{op.outputs[0].name} is the input %{op.x.name}" if op.x.op is None else ""
    if producer(op.x, "cast") is None or np_dtype(op.x).kind not in "iu":
        return ""
    floats = np_dtype(op.x.op.x).kind == "f" and np_dtype(op.outputs[0]).kind == "f"
    return f"%{op.x.op.x.name} becomes an integer and a float again" if floats else ""


def _floor(op: Operation, target: Target) -> str:
    """Name an op that rounds down; coreai-torch writes it as a floor division by 1."""
    if np_dtype(op.x).kind != "f" or (op.op_type == "floor_div" and not is_constant(op.y, 1.0)):
        return ""
    return f"%{op.x.name} is rounded down"


def _uncounted_padding(op: Operation, target: Target) -> str:
    """Name a mean over windows that leaves padding out."""
    padded = op.inputs.get("pad") is not None and np.any(op.pad.val)
    return (
        f"%{op.outputs[0].name} leaves its padding out"
        if padded and op.exclude_padding_from_average.val
        else ""
    )


def _long_kernel(op: Operation, target: Target) -> str:
    """Name a transposed convolution with a kernel or a stride that the CPU was reported to get wrong."""
    kernel, strides = op.weight.shape[2:], ints(op, "strides")
    if op.inputs.get("output_shape") is not None or (max(kernel) < 8 and max(strides, default=1) < 16):
        return ""
    form = f"the kernel {shape_in_words(kernel)} and the stride {shape_in_words(strides)}"
    return f"%{op.outputs[0].name} has {form}"


def _computed_update(op: Operation, target: Target) -> str:
    """Name a slice update at computed positions."""
    if op.inputs.get("begin") is None or op.begin.val is not None:
        return ""
    return f"reported to crash: %{op.x.name} is written at places that are computed"


def _empty(op: Operation, target: Target) -> str:
    """Name an empty value."""
    empty = next((v for v in op.outputs if 0 in (static_shape(v) or ())), None)
    if empty is None or not (target.uses_ane or target.uses_gpu):
        return ""
    return f"reported to end the process: an empty value (%{empty.name} is {shape_in_words(empty.shape)})"


def _uneven_heads(op: Operation, target: Target) -> str:
    """Name fused attention whose values are wider or narrower than its queries."""
    widths = [(static_shape(v) or (0,))[-1] for v in (op.query, op.value)]
    if not target.uses_gpu or len({*widths}) == 1:
        return ""
    return f"reported to end the process: a query of {widths[0]} and a value of {widths[1]} columns"


def _topk_words(op: Operation, target: Target) -> str:
    """Name a topk."""
    return f"%{op.outputs[0].name} is a topk"


OWN = (
    Rule(
        "coreai-folded-cast",
        names("cast identity"),
        "Core AI folds a cast to integers and back when the file is made: 1.5 stays 1.5. What was folded "
        "leaves no trace but an output that is an input",
        f"{TORCH.format('issue 9')}; {RUN}",
        test=_integer_round_trip,
        scope=Scope(os=RUN),
        kind="conversion",
        advice="round with floor and sign before the cast, and compare with the source: against_torch",
    ),
    Rule(
        "coreai-floor",
        names("floor floor_div"),
        "the GPU was reported to leave floor, trunc and ceil out, and an infinity becomes NaN (run on Linux)",
        f"{TORCH.format('issue 10')}; {RUN}",
        test=_floor,
        grade=Grade.REPORTED,
        scope=Scope(os="the GPU; chip not given"),
        kind="numeric",
        advice="run the model on the CPU or the engine, or round on the host",
    ),
    Rule(
        "coreai-avg-pool",
        names("avg_pool"),
        "the file says that padding is left out, and its ops, which Apple's runtime runs on Linux, count it: "
        "14 dB from PyTorch at a window of 3 with padding 1",
        f"coreai-torch 0.4.3, {RUN}",
        test=_uncounted_padding,
        scope=Scope(os=RUN),
        kind="conversion",
        advice="pool with count_include_pad=True, and divide by a constant map of counts",
    ),
    Rule(
        "coreai-long-kernel",
        names("conv_transpose"),
        "with CPU only, a transposed convolution was wrong by as much as its values, at kernels of 8 or more, "
        "and at strides of 16 or more; on the GPU it was correct, as it is on Linux",
        "john-rocky/coreai-model-zoo: pull request 18 (coreai-torch 0.4.1 and 0.4.2); run on Linux with "
        "coreai-core 1.0.0b3",
        test=_long_kernel,
        grade=Grade.REPORTED,
        scope=Scope(os="macOS 27, CPU only; chip not given"),
        kind="numeric",
        remedy="subpixel_convolution",
        advice="run the model on the GPU or the engine, or write the transposed convolution as a convolution",
    ),
    Rule(
        "coreai-computed-place",
        names("slice_update"),
        "an update at a computed place crashed at the first run, on the GPU and the engine; at a place from "
        "the length of an input, it ran",
        f"{TORCH.format('issue 6')}; apple/coreai-models: issue 5",
        test=_computed_update,
        grade=Grade.REPORTED,
        scope=Scope(os="seen on an iPhone 17 Pro and a Mac Studio, betas of iOS 27 and macOS 27"),
        kind="memory",
        remedy="masked_write",
        advice="blend with a mask, or write along the last axis on the host",
    ),
    Rule(
        "coreai-empty",
        names("split slice_by_index slice_by_size"),
        "a value without elements ended the process on the GPU and the engine: a section of a split at load, "
        "though nothing read it, and an output at the first run; with CPU only, both ran",
        f"{TORCH.format('issue 68')}; ultralytics/ultralytics: pull request 25926",
        test=_empty,
        grade=Grade.REPORTED,
        scope=Scope(os="M4 Max, macOS 27.0"),
        kind="memory",
        remedy="drop_empty_parts",
        advice="leave the empty part out of the split, or the output out of the model",
    ),
    Rule(
        "coreai-uneven-heads",
        names("scaled_dot_product_attention"),
        'the GPU back end ended the process at load ("query and value must have matching inner dimension but '
        'have 192 and 128"); with values padded to the width of the queries, it ran',
        "john-rocky/coreai-model-zoo: knowledge/coreai-error-index.md",
        test=_uneven_heads,
        grade=Grade.REPORTED,
        scope=Scope(os="macOS 27 beta, coreai-torch 0.4.2; chip not given"),
        kind="memory",
        remedy="decompose_attention",
        advice="pad the values with zeros to the width of the queries, and cut the result",
    ),
    Rule(
        "coreai-topk-time",
        names("topk"),
        "a topk of 8,400 scores behind a network on the engine cost 1.75 ms whatever else was there (1.23 ms "
        "-> 2.99 ms), and 0.05 ms on the GPU",
        TORCH.format("issue 66"),
        test=_topk_words,
        grade=Grade.MEASURED,
        scope=Scope(os="iPhone 17 Pro, iOS 27.0 beta 6, YOLO26n in fp16"),
        kind="speed",
        advice="give the scores out, and choose on the host",
    ),
)
"""Rules that concern Core AI alone."""
FAULTS = rules_of("Core AI")
RULES = (*FAULTS, *OWN)
"""The rules that `inspect` adds for a Core AI model."""
CARRIED = {
    "num-exp": f"softplus and its kin overflow in fp16 ({TORCH.format('issues 105, 106')})",
    "num-softmax": f"sums of exponentials overflow in fp16 ({TORCH.format('issue 106')})",
    "state-width-32": "states of other widths failed on the engine",
    "comp-blockwise": "Core AI refuses block scales as Core ML does (cadamcat/llms-on-apple-neural-engine)",
}
"""Rule of Core ML that also holds for Core AI -> why."""
RELEASE = general(
    "coreai-release",
    "iOS and macOS 27 brought Core AI",
    "Apple: Core AI",
    grade=Grade.DOCUMENTED,
    kind="load",
    advice="ship the package that `anesurgery to-coreml` writes beside it",
)


@cache
def carried(rule: Rule) -> Rule:
    """Return a rule of Core ML for Core AI: with a lower grade, unless its source speaks of Core AI."""
    if rule.kind == "conversion" or any(name in rule.source for name in APPLES):
        return rule
    where = f"{OVER}, where it was {rule.grade.value}" if rule.grade is not Grade.GUESS else OVER
    scope = replace(rule.scope, os="; ".join(filter(None, (rule.scope.os, where))))
    return replace(rule, grade=LOWER.get(rule.grade, rule.grade), scope=scope)


def model_findings(target: Target) -> tuple[Finding, ...]:
    """Return findings about any Core AI model: that the target's OS has no Core AI."""
    if target.os is None or target.os >= FIRST_CORE_AI:
        return ()
    return (RELEASE.finding(f"{target.platform} {target.os} has no Core AI"),)


@dataclass(frozen=True)
class Lint:
    """The result of `lint`."""

    findings: tuple[Finding, ...]
    """The findings in the order of the ops, each with its scope, grade and source."""
    target: Target
    """The chips and the OS of the question."""

    @property
    def ok(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"target": str(self.target), "findings": [f.to_json() for f in self.findings]}

    def __str__(self) -> str:
        if self.ok:
            return f"no known problem of Core AI concerns this model on {self.target.words}"
        return "\n".join(line for finding in self.findings for line in _lines(finding))


def _lines(finding: Finding) -> list[str]:
    repair = f"anesurgery apply with {finding.remedy}" if finding.remedy else finding.advice
    why = CARRIED.get(finding.rule, finding.because)
    return [
        f"{finding.op or 'the model'}: {finding.message} [{finding.rule}]",
        f"  {why}",
        f"  {finding.grade.value}, {finding.scope}; {finding.source}",
        *([f"  repair: {repair}"] if repair else []),
    ]


@door()
def lint(model: str | os.PathLike[str], target: Target | str | None = None) -> Lint:
    """List known faults of the ops of a Core AI model, with the repair.

    Args:
        model: path of an `.aimodel`.
        target: chips and OS, as "iPhone 17 Pro/iOS 27"; every chip when absent.

    Returns:
        A finding for each op that Core AI was reported, documented or seen to get wrong.

    Raises:
        LoadError: the model cannot be read.
        SurgeryError: an argument is not what the call takes.
        UnknownName: an unknown chip or OS.
    """
    path = Path(model).expanduser()
    if path.suffix.lower() != SUFFIX:
        raise LoadError(f"{path} is no {SUFFIX}; `anesurgery see` reports on other models")
    inspection = inspect(path, target)
    ids = {rule.id for rule in (*RULES, RELEASE)} | CARRIED.keys()
    found = tuple(finding for finding in inspection.all_findings if finding.rule in ids)
    return Lint(found, inspection.target)
