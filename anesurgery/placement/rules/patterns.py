"""Attention, norms and heads of language models in forms that cost time."""

from __future__ import annotations

import math
from functools import partial

from anesurgery.facts.attention import attention_of
from anesurgery.facts.logits import AFTER_HEADS
from anesurgery.mil import Operation, is_stored, is_symbolic, producer, static_shape
from anesurgery.ops import ATTENTION, PRODUCTS, WEIGHTED
from anesurgery.placement.evidence import Grade, Rule, Scope
from anesurgery.placement.target import SOURCES, Target
from anesurgery.semantics.byte_sizes import elements, size_of
from anesurgery.semantics.reading import channels, in_words, reaches_output, readers_after, shape_in_words
from anesurgery.semantics.row_lengths import squared

_slow = partial(Rule, kind="speed")
"""A rule about time."""

AXIS = 16384
"""The longest last axis up to H15."""
LATER_AXIS = 65536
"""From H16 on."""
PREFERRED = 2 << 20
"""Elements of a query from which fused attention was preferred to the CPU."""
BRANCHES = 12
"""As the source of the rule has it."""


def small_fused(op: Operation, target: Target) -> str:
    """Fused attention that is too small to be preferred."""
    count = elements(op.query)
    if count >= PREFERRED or static_shape(op.query) is None:
        return ""
    return f"the query {shape_in_words(op.query.shape)} has {count} elements"


def fused_on_26(op: Operation, target: Target) -> str:
    """Fused attention on an OS that computes it wrong."""
    if target.os not in (None, 26):
        return ""
    return f"fused attention of {shape_in_words(op.query.shape)}" + (
        "" if target.os else "; the target names no OS"
    )


def long_scores(op: Operation, target: Target) -> str:
    """Scores of attention that do not fit the on-chip memory."""
    if attention_of(op) is None:
        return ""
    room, chip = target.least("working_set")
    size = size_of(op.outputs[0])
    if size <= room:
        return ""
    return f"scores {shape_in_words(op.outputs[0].shape)} take {in_words(size)}; {chip} holds {in_words(room)}"


def wide_head(op: Operation, target: Target) -> str:
    """A product with more outputs than an axis may have."""
    shape = channels(op)
    most = LATER_AXIS if op.op_type == "conv" else AXIS  # a convolution has them as channels
    if shape is None or shape[0] <= most:
        return ""
    return f"{shape[0]} outputs: {math.ceil(shape[0] / most)} parts of at most {most}"


def widest_head(op: Operation, target: Target) -> str:
    """A product with more outputs than any op may read on later chips."""
    shape = channels(op)
    if shape is None or shape[0] <= LATER_AXIS:
        return ""
    return f"{shape[0]} outputs; only what reads them needs pieces of at most {LATER_AXIS}"


def all_tokens(op: Operation, target: Target) -> str:
    """A head that is computed for every position."""
    shape, var = channels(op), op.outputs[0]
    if shape is None or var.rank != 3 or shape[0] < 2 * shape[1]:
        return ""
    length = var.shape[1]
    if not (is_symbolic(length) or int(length) > 1) or not reaches_output(var, AFTER_HEADS):
        return ""
    return f"{shape[0]} logits for each of {length} positions"


def written_softmax(op: Operation, target: Target) -> str:
    """exp(x) / sum(exp(x))."""
    top = producer(op.x, "exp")
    under = producer(op.y, "reduce_sum")
    if top is None or under is None or under.x is not op.x:
        return ""
    return f"%{op.outputs[0].name} is a softmax, written as exp, reduce_sum and real_div"


def written_norm(op: Operation, target: Target) -> str:
    """(x - mean) / sqrt(mean((x - mean)^2) + epsilon)."""
    inner = producer(op.x)
    if inner is not None and inner.op_type == "add":
        inner = producer(inner.x, "reduce_mean") or producer(inner.y, "reduce_mean")
    if inner is None or inner.op_type != "reduce_mean":
        return ""
    centred = producer(squared(producer(inner.x)), "sub")
    mean = producer(centred.y, "reduce_mean") if centred is not None else None
    if centred is None or mean is None or mean.x is not centred.x:
        return ""
    return f"the layer norm of %{centred.x.name} is written out"


def repeated_heads(op: Operation, target: Target) -> str:
    """Keys or values that are repeated for the heads of a group."""
    if not any(r.op_type in ATTENTION for r in readers_after(op.outputs[0])) or is_stored(op.x):
        return ""
    before, after = elements(op.x), elements(op.outputs[0])
    if after <= before:
        return ""
    return f"{shape_in_words(op.x.shape)} is repeated {after // before} times for attention"


def wide_concat(op: Operation, target: Target) -> str:
    """Many branches that meet in one op."""
    makers = {v.op for v in op.inputs["values"] if not is_stored(v) and v.op is not None}
    return f"{len(makers)} branches meet" if len(makers) >= BRANCHES else ""


def largest_few(op: Operation, target: Target) -> str:
    """A topk of the logits."""
    return f"topk of {shape_in_words(op.x.shape)}"


NOTES = "smpanaro/more-ane-transformers: NOTES.md"
STUDY = "751K/Apple-Neural-Engine-Microarchitecture-Study-M6: notes/coreml_dispatch.md"
FUSED = frozenset({"scaled_dot_product_attention"})

RULES: tuple[Rule, ...] = (
    _slow(
        "sdpa-op",
        FUSED,
        "Core ML estimates fused attention at 0.8 of the CPU's time, so it prefers the engine only from about "
        "2 million elements for each of query, key and value; legal here, while Apple's Core AI rules know no "
        "fused path and ANEForge found bounds (64 heads, 496 positions)",
        f"{STUDY}; vx-lang/Vx issues 435 to 437",
        test=small_fused,
        scope=Scope(os="seen on M4, macOS 27.0.1"),
        advice="write it as matmul, softmax, matmul: convert for iOS 17, or with the math kernel of torch",
    ),
    Rule(
        "sdpa-os26",
        FUSED,
        "fused attention gave infinities and NaN on the engine under OS 26.1",
        "pytorch/executorch issue 15833",
        test=fused_on_26,
        kind="numeric",
        grade=Grade.REPORTED,
        scope=Scope(os="iOS and macOS 26.1", until=(("iOS", 26), ("macOS", 26))),
        remedy="decompose_attention",
    ),
    _slow(
        "attn-query-tile",
        frozenset({"matmul"}),
        "scores beyond the on-chip memory are streamed: tiles of the query were 3 times as fast at 1500 "
        "positions (2 MB is what ane-guide measured on M1; another study puts the edge near 32 MB)",
        "sbryngelson/ane-guide; coremltools: scaled_dot_product_attention_sliced_q; maderix/ANE",
        test=long_scores,
        scope=Scope(os="seen on M1, M5"),
        advice="cut the query into blocks; coremltools does so for fused attention from 1280 positions, on "
        "request",
    ),
    _slow(
        "lmhead-split",
        PRODUCTS,
        "above 16384 outputs the head and what reads it leave the engine of H13 to H15; in pieces GPT-2 large "
        "went from 140 to 100 ms, small models became a little slower",
        f"{NOTES}; Anemll/Anemll",
        test=wide_head,
        scope=Scope(frozenset({13, 14, 15}), "seen on M1 Max, macOS 13 to 14"),
        remedy="split_head",
        advice="split the outputs and put the logits together last, or return the pieces; a 1x1 convolution "
        "with channels first may hold 65536 outputs unsplit (a guess from the limits of its axes). From H16 on "
        "leave it whole: 16 pieces cost 4.6 % of the tokens per second (A19)",
    ),
    _slow(
        "lmhead-axis",
        WEIGHTED,
        "above 65536 outputs the logits are longer than the engine takes",
        SOURCES["axis"],
        test=widest_head,
        scope=Scope(frozenset({16, 17, 18}), "seen on M4, macOS 27.0.1"),
        remedy="split_head",
        advice="split the outputs in as few pieces as the limit allows, and put the logits together last",
    ),
    _slow(
        "lmhead-whole",
        frozenset({"conv"}),
        "a convolution with so many outputs stayed on the engine, and splitting it did harm: 16 pieces of "
        "262144 cost 4.6 % of the tokens per second; what reads more than 65536 outputs leaves the engine",
        "john-rocky/CoreML-LLM: SESSION_2026_04_28_LMSPLIT_FINALISE.md",
        test=widest_head,
        scope=Scope(frozenset({16, 17, 18}), "seen on A19"),
        advice="leave the head whole, unless ops after it need the pieces",
    ),
    _slow(
        "lmhead-last-token",
        WEIGHTED,
        "generation reads one row and throws the others away: GPT-2 medium went from 95 to 52 ms, GPT-2 XL by "
        "30 %",
        NOTES,
        test=all_tokens,
        remedy="select_last_token",
        scope=Scope(os="seen on M1 Max, macOS 13 to 14"),
        advice="not where every position is read (training, masked language models, transcription by CTC)",
    ),
    _slow(
        "perf-softmax",
        frozenset({"real_div"}),
        "Apple's rules ask for softmax as one op; in one model the decomposed form was as fast (A19)",
        "apple/coreai-models: neural_engine_rules.md; john-rocky/CoreML-LLM: NATIVE_SOFTMAX_PROBE.md",
        test=written_softmax,
        grade=Grade.DOCUMENTED,
        advice="use softmax",
    ),
    _slow(
        "perf-norm",
        frozenset({"rsqrt", "sqrt"}),
        "Apple's rules ask for layer_norm as one op; more-ane-transformers measured no difference",
        f"apple/coreai-models: neural_engine_rules.md; {NOTES}",
        test=written_norm,
        grade=Grade.DOCUMENTED,
        advice="use layer_norm; coremltools fuses forms that keep the axes, channels first among them",
    ),
    _slow(
        "gqa-repeat",
        frozenset({"tile"}),
        "the cache is written out once for each head of a group (one report)",
        "john-rocky/CoreML-LLM",
        test=repeated_heads,
        grade=Grade.REPORTED,
        scope=Scope(os="seen on A19"),
        advice="let matmul broadcast one key over the queries of its group, or multiply group by group",
    ),
    _slow(
        "compile-fanin",
        frozenset({"concat"}),
        "12 or more branches that meet in one op take the compiler up to 9 s each time",
        "sbryngelson/ane-guide",
        test=wide_concat,
        scope=Scope(frozenset({13}), via="compiler"),
        advice="put fewer heads together at once",
    ),
    _slow(
        "topk-slow",
        frozenset({"topk"}),
        "legal on M4, but it cost 1.75 ms beside an engine graph (A19), and an M3 Pro ran that of RF-DETR on "
        "the CPU (macOS 27)",
        "apple/coreai-torch issue 66; roboflow/rf-detr PR 1495",
        test=largest_few,
        grade=Grade.REPORTED,
        scope=Scope(frozenset({15, 17}), "seen on A19, M3 Pro"),
        advice="return the logits and pick on the host",
    ),
)
"""By op type."""
