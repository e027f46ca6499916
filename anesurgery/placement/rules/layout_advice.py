"""Findings about a function as a whole: its layout, its attention heads, its length and what it contains.

`shapes.of_model` calls `of_function`; each finding names a published measurement that the function resembles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from anesurgery.interpret.attentions import recognise
from anesurgery.mil import Function, Operation, Var, is_weight, operands, producer, static_shape, walk_ops
from anesurgery.ops import CONTRACTIONS, PRODUCTS
from anesurgery.placement.evidence import Finding, Grade, Scope, general
from anesurgery.placement.target import Target
from anesurgery.semantics.reading import channels, shape_in_words, shape_of

_slow = partial(general, kind="speed")
"""A rule about speed."""

CRASHING_CHAIN = 387
"""The length of the shortest chain of ops on which the compiler of M6 crashed."""
SMALL_MAP = 64
"""The number of positions at which 8x8 and 1x64 were timed."""

LAYOUT = _slow(
    "linear-vs-conv",
    "1x1 convolutions on (batch, channels, 1, sequence) had about 3 times the throughput of matrix products "
    "(M4, private compiler), and Apple's port of DistilBERT went from 55 to 8.7 ms with them and split heads "
    "(M1 Max); `linear` is legal, and through Core ML four layers of either were on the engine alike (M4)",
    "apple/ml-ane-transformers; maderix/ANE; kasper0406/stablehlo-coreml PR 110",
    grade=Grade.DOCUMENTED,
    scope=Scope(os="seen on M1 Max, M4"),
    advice="put channels first and the sequence last, and use 1x1 convolutions; measure first on newer chips",
)
HEADS = _slow(
    "attn-split-heads",
    "Apple's ports compute each head by itself: up to 10 times as fast (iPhone 13, sequence 512, batch 8), "
    "the UNet of Stable Diffusion 1040 to 726 ms; SigLIP gained only 10 to 13 % on M4 Pro and M5 Max, and "
    "lost on the GPU",
    "apple/ml-ane-transformers; smpanaro/more-ane-transformers: NOTES.md; erwinzhang7/coreml-compute-placement",
    grade=Grade.DOCUMENTED,
    scope=Scope(os="seen on iPhone 13, M1 Max, M4 Pro, M5 Max"),
    advice="split the heads (einsum bchq,bkhc->bkhq, softmax on axis 1); measure first on newer chips",
)
SPATIAL = _slow(
    "mlp-spatial-8x8",
    "a 1x1 convolution over 64 positions ran 50 % faster as 8x8 than as 1x64, a whole model 20 %",
    "smpanaro/coreml-llm-cli",
    scope=Scope(frozenset({13, 15}), "seen on M1 Max, M3"),
    advice="reshape around the feed-forward layers only",
)
CHAIN = _slow(
    "compile-chain",
    "the compiler crashed on chains of 387 layers and more",
    "751K/Apple-Neural-Engine-Microarchitecture-Study-M6: notes/defects.md",
    scope=Scope(frozenset({18}), "seen on M6, macOS 27.0.1"),
    advice="split the model",
)
ISLAND = _slow(
    "perf-elementwise",
    "elementwise ops and norms are estimated at 0.83 to 1.0 of the CPU's time, and a segment on the engine "
    "costs 0.25 ms at least",
    "751K: notes/coreml_dispatch.md",
    scope=Scope(os="seen on M4, macOS 27.0.1"),
    advice="leave it on the CPU, or make it part of the model it serves",
)
RULES = (LAYOUT, HEADS, SPATIAL, CHAIN, ISLAND)


def of_function(function: Function, target: Target) -> Iterator[Finding]:
    """Yield the findings about a function."""
    ops = [op for op in walk_ops(function) if not is_weight(op)]
    tests = (_channels_last, _joint_heads, _flat_convolutions, _long_chain, _no_products)
    for rule, test in zip(RULES, tests, strict=True):
        if rule.scope.concerns(target) and (message := test(ops)):
            yield rule.finding(message)


def _channels_last(ops: list[Operation]) -> str:
    """Report that at least half of the products with weights have channels last."""
    products = [op for op in ops if op.op_type in PRODUCTS and channels(op) is not None]
    flat = [op for op in products if op.op_type != "conv" and _has_rows(op.outputs[0])]
    if len(flat) < 2 or 2 * len(flat) < len(products):
        return ""
    shape = shape_in_words(flat[0].outputs[0].shape)
    return f"{len(flat)} of {len(products)} products with weights have channels last ({shape})"


def _has_rows(var: Var) -> bool:
    """Is a value of rank 2 or 3 with several positions?"""
    return var.rank in (2, 3) and math.prod(shape_of(var)[:-1]) > 1


def _joint_heads(ops: list[Operation]) -> str:
    """Report attention that computes all heads as one batch."""
    attentions = (recognise(op) for op in ops)
    products = [a.product for a in attentions if a is not None and a.product is not None]
    shapes = [static_shape(p.outputs[0]) for p in products if p.op_type != "einsum"]
    batched = [s for s in shapes if s is not None and len(s) == 4 and s[1] > 1]
    if not batched:
        return ""
    return (
        f"{len(batched)} attentions take all heads at once, the first with scores {shape_in_words(batched[0])}"
    )


def _flat_convolutions(ops: list[Operation]) -> str:
    """Report 1x1 convolutions over 64 positions in one row."""
    flat = [
        op
        for op in ops
        if op.op_type == "conv"
        and (static_shape(op.outputs[0]) or ())[2:] == (1, SMALL_MAP)
        and (channels(op) or (0, 0, 0))[2] == 1
    ]
    return f"{len(flat)} 1x1 convolutions work on 1x{SMALL_MAP}" if len(flat) > 1 else ""


def _long_chain(ops: list[Operation]) -> str:
    """Report a longest chain of dependent ops on which a compiler may crash."""
    depth: dict[Operation, int] = {}
    for op in ops:
        makers = [producer(v) for _, v in operands(op)]
        depth[op] = 1 + max((depth.get(m, 0) for m in makers if m is not None), default=0)
    most = max(depth.values(), default=0)
    return f"the longest chain has {most} ops" if most >= CRASHING_CHAIN else ""


def _no_products(ops: list[Operation]) -> str:
    """Report a function without a convolution or matrix product."""
    if not ops or any(op.op_type in CONTRACTIONS for op in ops):
        return ""
    return f"none of the {len(ops)} ops is a convolution or matrix product"
