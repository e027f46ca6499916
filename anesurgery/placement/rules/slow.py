"""Rules about speed: ops that the engine runs slowly, loops, and ops that a pass replaces by faster ones.

A test gets (op, target) and returns what it found in words, which becomes the message, or "". Lengths are in
elements, kernels are height x width. Each figure holds for the chip and OS beside it. Sections: `PATTERNS` of
ops; `RULES` about single ops and compressed weights; `LOOPS`; `REPAIRED`, ops that a pass removes to save time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import partial

from anesurgery.display import byte_words, counted
from anesurgery.errors import Refusal
from anesurgery.facts.attention import attention_of
from anesurgery.facts.loops import is_short, loop_rounds
from anesurgery.facts.makeup import AFTER_HEADS
from anesurgery.facts.moves import flattened_from, gathered_rows, moves_in_a_row, reduced_before
from anesurgery.mil import (
    Operation,
    Var,
    constant,
    consumers,
    dtype_name,
    is_constexpr,
    is_output,
    is_stored,
    is_symbolic,
    is_weight,
    np_dtype,
    producer,
    reads,
    static_shape,
)
from anesurgery.ops import (
    ATTENTION,
    CARRIERS,
    MOVES,
    POINTWISE,
    PRODUCTS,
    REDUCTIONS,
    UNARY,
    VIEWS,
    WEIGHTED,
    names,
)
from anesurgery.placement import cost
from anesurgery.placement.cost import LAST_FEW_ROWS_FAMILY
from anesurgery.placement.evidence import Grade, Rule, Scope, general
from anesurgery.placement.inspection import Estimate
from anesurgery.placement.target import CHIPS, SOURCES, Target
from anesurgery.regions.channel_products import weight_of
from anesurgery.semantics.analysis_cache import cached
from anesurgery.semantics.bounds import squared_operand
from anesurgery.semantics.reading import (
    channels,
    elements,
    ints,
    number,
    permutation,
    reaches_output,
    readers_after,
    shape_in_words,
    shape_of,
    size_of,
    value_before,
    weight,
)
from anesurgery.semantics.rows import work_of

_slow = partial(Rule, kind="speed")
"""A rule about time."""

AXIS = 16384
"""The longest last axis up to H15, in elements."""
LATER_AXIS = 65536
"""The longest last axis from H16 on, in elements."""
PREFERRED_QUERY = 2 << 20
"""Elements of a query from which Core ML preferred the engine to the CPU for fused attention."""
MANY_BRANCHES = 12
"""Operands of a concat from which compiling was reported to be slow (rule `compile-fanin`)."""


def small_fused(op: Operation, target: Target) -> str:
    """Report fused attention that is too small for Core ML to prefer the engine."""
    count = elements(op.query)
    if count >= PREFERRED_QUERY or static_shape(op.query) is None:
        return ""
    return f"the query {shape_in_words(op.query.shape)} has {count:,} elements"


def fused_on_26(op: Operation, target: Target) -> str:
    """Report fused attention on an OS that computes it wrong, or where the target names no OS."""
    if target.os not in (None, 26):
        return ""
    unknown_os = "" if target.os else "; the target names no OS"
    return f"NaN from fused attention of {shape_in_words(op.query.shape)} under OS 26.1{unknown_os}"


def long_scores(op: Operation, target: Target) -> str:
    """Report attention scores that do not fit into the on-chip memory."""
    if attention_of(op) is None:
        return ""
    on_chip, chip = target.least("working_set")
    size = size_of(op.outputs[0])
    if size <= on_chip:
        return ""
    shape = shape_in_words(op.outputs[0].shape)
    return f"scores {shape} take {byte_words(size)}; {chip} holds {byte_words(on_chip)}"


def wide_head(op: Operation, target: Target) -> str:
    """Report a product with more outputs than the last axis may be long."""
    size = channels(op)
    most = LATER_AXIS if op.op_type == "conv" else AXIS  # a convolution has them as channels
    if size is None or size.outputs <= most:
        return ""
    return f"{size.outputs} outputs: {math.ceil(size.outputs / most)} parts of at most {most}"


def widest_head(op: Operation, target: Target) -> str:
    """Report a product with more outputs than any op may read, also on later chips."""
    size = channels(op)
    if size is None or size.outputs <= LATER_AXIS:
        return ""
    return f"{size.outputs} outputs; only what reads them needs pieces of at most {LATER_AXIS}"


LEAST_VOCABULARY = 4096
"""From so many outputs on, a product is a head over words also in a model that reads no ids, as the last of
several chunks. Heads of pose networks (SimCC) have up to 768, lookups by a product as many as a row."""


def _may_generate(op: Operation, inputs: int, outputs: int) -> bool:
    """Does a head choose words: does its model read an id or a hidden state for each position?

    Transcription (CTC) reads an image, a spectrum or sound, and needs the logits of every position.
    """
    block, length = op.enclosing_block, op.outputs[0].shape[1]
    while block is not None and block.outer_op is not None:
        block = block.outer_op.enclosing_block
    read = [] if block is None else [v for v in block.inputs.values() if length in (v.shape or ())]
    has_states = outputs >= LEAST_VOCABULARY and any(inputs in v.shape for v in read)
    return has_states or any(np_dtype(v).kind in "iu" for v in read)


def all_tokens(op: Operation, target: Target) -> str:
    """Report an LM head whose logits are computed for every position."""
    size, var = channels(op), op.outputs[0]
    if size is None or var.rank != 3 or size.outputs < 2 * size.inputs:
        return ""
    length = var.shape[1]
    if not (is_symbolic(length) or int(length) > 1) or not reaches_output(var, AFTER_HEADS):
        return ""
    if not _may_generate(op, size.inputs, size.outputs):
        return ""
    return f"{size.outputs} logits for each of {length} positions; generating text needs one"


def written_softmax(op: Operation, target: Target) -> str:
    """Report exp(x) / sum(exp(x))."""
    numerator = producer(op.x, "exp")
    total = producer(op.y, "reduce_sum")
    if numerator is None or total is None or total.x is not op.x:
        return ""
    return f"%{op.outputs[0].name} is a softmax, written as exp, reduce_sum and real_div"


def written_norm(op: Operation, target: Target) -> str:
    """Report (x - mean) / sqrt(mean((x - mean)^2) + epsilon)."""
    sum_with_epsilon = producer(op.x, "add")
    terms = (op.x,) if sum_with_epsilon is None else (sum_with_epsilon.x, sum_with_epsilon.y)
    variance = next(filter(None, (producer(term, "reduce_mean") for term in terms)), None)
    if variance is None:
        return ""
    centred = producer(squared_operand(producer(variance.x)), "sub")
    mean = producer(centred.y, "reduce_mean") if centred is not None else None
    if centred is None or mean is None or mean.x is not centred.x:
        return ""
    return f"the layer norm of %{centred.x.name} is written out"


def repeated_heads(op: Operation, target: Target) -> str:
    """Report keys or values that are repeated for the heads of a group (grouped-query attention)."""
    if not any(r.op_type in ATTENTION for r in readers_after(op.outputs[0])) or is_stored(op.x):
        return ""
    before, after = elements(op.x), elements(op.outputs[0])
    if after <= before:
        return ""
    return f"{shape_in_words(op.x.shape)} is repeated {after // before} times for attention"


def rewritten_cache(op: Operation, target: Target) -> str:
    """Report an output that is a whole input again, but for the one step that a mask chooses."""
    blended = [op.a, op.b] if op.op_type == "select" else [op.x, op.y]
    if op.op_type == "add":
        products = [product for var in blended if (product := producer(var, "mul")) is not None]
        blended = [max((product.x, product.y), key=elements) for product in products]
    if len(blended) < 2 or not reaches_output(op.outputs[0], CARRIERS):
        return ""
    for cache, step in zip(map(value_before, blended), reversed(blended), strict=True):
        is_whole = cache.op is None and cache.rank > 2 and shape_of(cache) == shape_of(op.outputs[0])
        if is_whole and {a for a, b in zip(shape_of(step), shape_of(cache), strict=False) if a != b} == {1}:
            return f"all {shape_in_words(cache.shape)} of %{cache.name} are written for one step"
    return ""


def wide_concat(op: Operation, target: Target) -> str:
    """Report a concat of many different results."""
    makers = {v.op for v in op.inputs["values"] if not is_stored(v) and v.op is not None}
    return f"{len(makers)} branches meet" if len(makers) >= MANY_BRANCHES else ""


def largest_few(op: Operation, target: Target) -> str:
    """Report a topk."""
    return f"topk of {shape_in_words(op.x.shape)}"


NOTES = "smpanaro/more-ane-transformers: NOTES.md"
STUDY = "751K/Apple-Neural-Engine-Microarchitecture-Study-M6: notes/coreml_dispatch.md"
FUSED = frozenset({"scaled_dot_product_attention"})

PATTERNS: tuple[Rule, ...] = (
    _slow(
        "sdpa-op",
        FUSED,
        "Core ML estimates fused attention at 0.8 of the CPU's time, so it prefers the engine only from about "
        "2 million elements for each of query, key and value; legal here, while Apple's Core AI rules know no "
        "fused path and ANEForge found bounds (64 heads, 496 positions)",
        f"{STUDY}; vx-lang/Vx issues 435 to 437",
        test=small_fused,
        scope=Scope(os="seen on M4, macOS 27.0.1"),
        advice="write it as matmul, softmax and matmul (decompose_attention), or use the math kernel of torch",
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
        "rewritten-cache",
        names("add select"),
        "a decode step that read its cache and returned only the new keys and values took about 40 % less time "
        "than one that blended them into the whole cache and compared positions",
        "FluidInference/mobius: pull request 78",
        test=rewritten_cache,
        grade=Grade.REPORTED,
        scope=Scope(os="seen on M5 Pro, CPU_AND_NE, 12 layers with random weights"),
        advice="return the new key and value, join them to the old ones for attention, and let the app write "
        "them into the cache and give the mask",
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
"""Rules about patterns: attention, heads, norms and softmax."""


# Single ops and compressed weights.

NOTCH_PERIOD = 1 << 20
"""Bytes per core at whose multiples reading weights stalls (rule `perf-dma-notch`)."""
NOTCH_WIDTH = 16 << 10
"""A payload stalls if it is less than this many bytes from a multiple of `NOTCH_PERIOD`."""
CORES = 16
MOST_PARTS = 8
"""How many parts along the inputs are tried in search of a split whose parts do not stall."""
EFFICIENT_STRIDES = frozenset({1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 32})
"""Strides that Apple calls efficient."""
WIDE, WIDEST = 9, 16
"""Kernel widths that the compiler rewrites; wider ones are not legal."""
LARGE_DILATION = 4
"""Apple names no number; a chain of dilations of 2 and 3 is its advice."""
LANES = 4
"""Groups of a convolution that H13 computes side by side."""
LEAST_GROUP = 4
"""Channels that should share a look-up table: with fewer, the time doubled (rule `comp-group`)."""
LARGE_PATCH = 14
"""The smallest kernel that the M1 does not take, in elements of one side."""
LEAST_MOVED = 256 << 10
"""Bytes below which a transpose is not reported."""


def _payload(outputs: int, inputs: int, taps: int) -> int:
    """Return the bytes of fp16 weights that each of the 16 cores reads."""
    return math.ceil(outputs / CORES) * inputs * taps * 2


def _in_notch(payload: int) -> bool:
    """Is a payload so near to a multiple of `NOTCH_PERIOD` that reading it stalls?"""
    nearest = round(payload / NOTCH_PERIOD) * NOTCH_PERIOD
    return nearest > 0 and abs(payload - nearest) < NOTCH_WIDTH


def notch_payload(op: Operation) -> int:
    """Return the bytes of plain fp16 weights that a core reads, if near a multiple of 2^20; else 0."""
    var, size = weight(op), channels(op)
    groups = number(op.inputs.get("groups")) or 1
    if var is None or producer(var, "const") is None or size is None or groups != 1:
        return 0
    payload = _payload(*size)
    return payload if dtype_name(var) == "fp16" and _in_notch(payload) else 0


def dma_notch(op: Operation, target: Target) -> str:
    """Report plain fp16 weights whose payload per core is near a multiple of 2^20 bytes."""
    payload, size = notch_payload(op), channels(op)
    if not payload or size is None:
        return ""
    inner_parts = {n: size._replace(inputs=math.ceil(size.inputs / n)) for n in range(2, MOST_PARTS + 1)}
    parts = next((n for n, largest in inner_parts.items() if not _in_notch(_payload(*largest))), None)
    cure = f"{parts} parts along the inputs miss it" if parts else "no split into 8 parts misses it"
    multiple = round(payload / NOTCH_PERIOD)
    distance = abs(payload - multiple * NOTCH_PERIOD)
    return (
        f"{size.outputs}x{size.inputs}: {payload:,} bytes per core, {distance:,} from {multiple} * 2^20; {cure}"
    )


def wide_kernel(op: Operation, target: Target) -> str:
    """Report a kernel of a width that the compiler rewrites into several convolutions."""
    shape = static_shape(op.weight) or ()
    if len(shape) < 3 or not WIDE <= shape[-1] <= WIDEST:
        return ""
    return f"the kernel is {shape_in_words(shape[2:])}, {shape[-1]} wide"


def odd_stride(op: Operation, target: Target) -> str:
    """Report a stride that is not a product of 2 and 3, or two different strides that Apple does not name."""
    strides = ints(op, "strides")
    odd = [s for s in strides if s not in EFFICIENT_STRIDES]
    mixed = len(set(strides)) > 1 and 1 not in strides and 2 not in strides
    if not odd and not mixed:
        return ""
    return f"the stride is {shape_in_words(strides)}"


def odd_groups(op: Operation, target: Target) -> str:
    """Report a number of groups that does not divide the lanes, except one group per channel."""
    groups = int(number(op.inputs.get("groups")) or 1)
    channels_of_group = (static_shape(op.weight) or (0, 0))[1]
    if channels_of_group == 1 or LANES % groups == 0:
        return ""
    return f"{groups} groups of {channels_of_group} channels on {LANES} lanes"


def large_dilation(op: Operation, target: Target) -> str:
    """Report a dilation beyond 2 and 3, which Apple advises to chain."""
    dilations, shape = ints(op, "dilations"), static_shape(op.weight) or ()
    wide = [d for d, k in zip(dilations, shape[2:], strict=False) if k > 1 and d >= LARGE_DILATION]
    return f"the dilation is {shape_in_words(dilations)}" if wide else ""


def weight_decoders(op: Operation) -> list[Operation]:
    """Return the `constexpr` ops that decompress the weight of a product, the last one first."""
    decoders: list[Operation] = []
    var = weight(op)
    while var is not None and var.op is not None and is_constexpr(var.op):
        decoders.append(var.op)
        encoded = (decoders[-1].inputs.get(name) for name in ("data", "indices", "nonzero_data"))
        var = next((v for v in encoded if v is not None), None)
    return decoders


def lookup_table(op: Operation) -> Operation | None:
    """Return the `constexpr_lut_to_dense` of a palettized weight; None for other weights."""
    return next((d for d in weight_decoders(op) if d.op_type == "constexpr_lut_to_dense"), None)


def small_groups(op: Operation, target: Target) -> str:
    """Report one look-up table for each channel, or for each two or three."""
    table = lookup_table(op)
    shape = static_shape(table.outputs[0]) if table is not None else None
    if table is None or shape is None or len(table.lut.shape) != len(shape) + 2:
        return ""
    # a weight (64, 32) with tables (16, 1, 256, 1): 16 tables along the first axis, for 4 channels each
    counts = [int(n) for n in table.lut.shape[: len(shape)]]
    groups = [length // count for length, count in zip(shape, counts, strict=True) if count > 1]
    if not groups or min(groups) >= LEAST_GROUP:
        return ""
    return f"{max(counts)} look-up tables, one for each {min(groups)} channels"


def few_bits(op: Operation, target: Target) -> str:
    """Report a palette of one or two bits."""
    table = lookup_table(op)
    if table is None:
        return ""
    shape = [int(n) for n in table.lut.shape]
    colours = shape[-2] if len(shape) > 1 else shape[0]  # the last axis is that of vectors
    return f"a palette of {colours} values" if colours <= 4 else ""


def palette_scale(op: Operation) -> Var | None:
    """Return the scales that a palettized weight is multiplied by before the product; None without them."""
    decoders = weight_decoders(op)
    op_types = [decoder.op_type for decoder in decoders]
    if op_types[:2] != ["constexpr_blockwise_shift_scale", "constexpr_lut_to_dense"]:
        return None
    return decoders[0].scale


def moved_last_axis(op: Operation, target: Target) -> str:
    """Report a transpose that moves the last axis, so that the whole value is written again."""
    shape, order = static_shape(op.x), permutation(op)
    if shape is None or not order or order[-1] == len(shape) - 1:
        return ""
    long_axes = [axis for axis in order if shape[axis] > 1]
    if long_axes == sorted(long_axes) or size_of(op.x) < LEAST_MOVED:
        return ""  # axes of length 1 alone move, or few bytes
    if all(r.op_type == "matmul" for r in consumers(op.outputs[0])):
        return ""
    return f"the last axis of {shape_in_words(shape)} is moved, {byte_words(size_of(op.x))}"


def named_twice(op: Operation, target: Target) -> str:
    """Report an identity whose result is not an output."""
    var = op.outputs[0]
    return "" if is_output(var) else f"%{var.name} is %{op.x.name}"


def large_patches(op: Operation, target: Target) -> str:
    """Report a convolution whose strides equal its kernel, from 14x14 on."""
    kernel, strides = [int(k) for k in op.weight.shape[2:]], ints(op, "strides")
    if len(kernel) != 2 or kernel != strides or max(kernel) < LARGE_PATCH:
        return ""
    return f"patches of {shape_in_words(kernel)}"


def constant_rows(op: Operation, target: Target) -> str:
    """Report a gather at constant indices from a dynamic value."""
    if constant(op.indices) is None or is_stored(op.x):
        return ""
    rows = gathered_rows(op)
    return "" if isinstance(rows, Refusal) else f"%{op.outputs[0].name} takes rows at constant indices"


KAS = "kasper0406/stablehlo-coreml: avoid_ane_dma_notch.py"
RULES_OF_APPLE = "apple/coreai-models: neural_engine_rules.md (written for Core AI, 2026)"
CONV = frozenset({"conv"})

FIXED_VALUES = general(
    "fixed-values",
    "it depends on no input, and coremltools leaves it to be computed in every run",
    "coremltools 9.0: gather_nd and what reads it is not folded (seen on converted masks of transformers 5.23)",
    scope=Scope(),
    remedy="fold_constants",
    advice="compute it before the conversion, and register it as a buffer",
    kind="speed",
)
"""The rule about ops that compute the same numbers in every run."""

RULES: tuple[Rule, ...] = (
    _slow(
        "identity",
        names("identity"),
        "an identity computes nothing, and its unit is unknown",
        "by the definition of the op",
        test=named_twice,
        grade=Grade.GUESS,
        remedy="remove_identity",
        advice="leave it out of the model",
    ),
    _slow(
        "patch-embedding",
        CONV,
        "patches that do not overlap are space_to_depth and a 1x1 convolution, which need no large kernel",
        "by the definition of the ops; what it gains in time was not measured",
        test=large_patches,
        grade=Grade.GUESS,
        remedy="patch_convolution",
        advice="cut the image into patches outside",
    ),
    _slow(
        "constant-gather",
        names("gather gather_nd gather_along_axis"),
        "slices and views move rows that are known when the model is compiled; a gather of all in order is a "
        "view",
        "by the definition of the ops; what it gains in time was not measured",
        test=constant_rows,
        grade=Grade.GUESS,
        remedy="gather_to_moves",
        advice="slice and concatenate",
    ),
    _slow(
        "perf-dma-notch",
        PRODUCTS,
        "weights stream at 17 to 25 GB/s instead of 40 to 60 when the payload of a core, ceil(outputs / 16) * "
        "inputs * taps * 2 bytes, is less than 16384 from a multiple of 2^20: 2048x4096 took 840 us, 430 in "
        "two parts, 2016x4096 took 426; 4096x14336 took 3522, then 1989",
        KAS,
        test=dma_notch,
        scope=Scope(frozenset({16}), "seen on M4"),
        advice="split along the input channels and add the parts; on CPU and GPU that gains nothing",
    ),
    _slow(
        "conv-kernel-slow",
        CONV,
        "widths of 9 to 15 are rewritten into several convolutions and are bound by their weights; compiling "
        "13x13 took 2 to 23 s, 16x16 more than 200 s and 11.7 GB",
        STUDY,
        test=wide_kernel,
        scope=Scope(frozenset({16, 18}), "seen on M4 and M6, macOS 27.0.1"),
        advice="a sum of shifted kernels up to 8 wide is exact; a long 1-D kernel belongs on the height",
    ),
    _slow(
        "conv-stride",
        CONV,
        "strides that are products of 2 and 3 are efficient (4, 6, 8, 9, 12, 16, 24, 32), different ones only "
        "as a 2 with another; all from 2 to 8 are legal (M4). To convert and load one on an unnamed Mac took "
        "over 5 minutes for 5 and 7, 30 s for 10 and 11, and less than 10 s for the others from 1 to 18",
        f"{RULES_OF_APPLE}; {STUDY}; coremltools issue 2473",
        test=odd_stride,
        grade=Grade.DOCUMENTED,
        advice="take the step in two convolutions, or fold it into the channels by space_to_depth",
    ),
    _slow(
        "conv-groups-core",
        CONV,
        "groups run on four lanes on H13, so 2 or 4 of them fill these; one channel for each group is a kind "
        "of its own",
        "sbryngelson/ane-guide: part-5-practice",
        test=odd_groups,
        grade=Grade.REPORTED,
        scope=Scope(frozenset({13}), via="compiler"),
        advice="use 2 or 4 groups",
    ),
    _slow(
        "conv-dilation-slow",
        CONV,
        "large dilations are slow (Apple names no number); with large kernels compiler strings call them "
        "unsupported",
        RULES_OF_APPLE,
        test=large_dilation,
        grade=Grade.DOCUMENTED,
        advice="space_to_batch around a plain convolution is exact; a chain of dilations 2 and 3 needs "
        "training",
    ),
    _slow(
        "comp-group",
        PRODUCTS,
        "4-bit OPT-1.3B took 14.8 ms with one table, 15.5, 17.1 and 30.7 with groups of 8, 4 and 2 channels, "
        "and 59 with one for each channel (fp16: 92.2)",
        "coremltools guide: opt-opt1_3",
        test=small_groups,
        grade=Grade.DOCUMENTED,
        scope=Scope(os="seen on A17 Pro, iOS 18"),
        advice="palettize per tensor, or in groups of 8 channels or more",
    ),
    _slow(
        "comp-bits",
        PRODUCTS,
        "coremltools allows 1 and 2 bits, a compiler string refuses both, and 2 bits without training gave "
        "nonsense",
        "coremltools guide; john-rocky/CoreML-LLM; compiler strings",
        test=few_bits,
        grade=Grade.REPORTED,
        advice="use 4 to 8 bits",
    ),
    _slow(
        "perf-reshape",
        frozenset({"transpose"}),
        "moving the last axis writes the whole value anew: tens of microseconds at a few MB; transposed layer "
        "norms cost 15 % of a GPT-2",
        "smpanaro/more-ane-transformers: NOTES.md; apple/coreai-models",
        test=moved_last_axis,
        scope=Scope(os="seen on M1 Max, macOS 13 to 14"),
        advice="keep one layout, channels first, between the ends of the model",
    ),
    *PATTERNS,
)
"""Rules about single ops, after them those about patterns."""


# Loops that are recurrent networks: what was reported of them, and the estimated time of unrolled code.

OPS_AFTER_UNROLLING = (PRODUCTS | POINTWISE | names("split concat")) - {"cast"}
"""Ops of a loop body that unrolled code has too; others count rounds, or read and write rows by index."""


def stepwise(op: Operation, target: Target) -> str:
    """Report a loop that steps through a recurrent network, and its estimated time looped and unrolled."""
    if not (network := recurrent_step(op)):
        return ""
    if (count := loop_rounds(op)) is None:
        return f"%{op.name} steps through {network}, as often as an input says"
    ops = [inner for block in op.blocks for inner in block.operations if not is_weight(inner)]
    remaining = [o for o in ops if o.op_type in OPS_AFTER_UNROLLING and np_dtype(o.outputs[0]).kind == "f"]
    before, after = _estimated_time(ops, count, target), _estimated_time(remaining, count, target)
    words = f"%{op.name} steps through {network} in {count} rounds, {before.cpu:.3g} µs on the CPU as estimated"
    on_engine = f", {after.ane:.3g} on the ANE" if target.uses_ane else ""
    return f"{words}; the same steps in straight code {after.cpu:.3g}{on_engine}"


def _estimated_time(ops: Sequence[Operation], count: int, target: Target) -> Estimate:
    """Return the time of `count` rounds of some ops, in µs per unit; ops without an estimate count as 0."""
    estimates = [e for op in ops if (e := cost.estimate(op, work_of(op), target)) is not None]
    return Estimate(sum(e.ane or 0.0 for e in estimates), sum(e.cpu or 0.0 for e in estimates)).times(count)


def remedy_for_control(op: Operation, target: Target) -> str | None:
    """Return the pass that unrolls control flow, unless it is a long loop, or an input says how long."""
    return "unroll_loop" if op.op_type != "while_loop" or is_short(op) else None


LOOPS = (
    Rule(
        "recurrent-loop",
        names("while_loop"),
        "loops ran neither on the ANE nor on the GPU (a Mac, chip not given), and Core ML's own recurrent ops "
        "are no way out: they stay on the CPU (M4, macOS 27.0.1; iPhone XS), and the op gru gave wrong results "
        "on every unit (Chromium on a Mac)",
        "webmachinelearning/webnn: issue 689; coremltools issues 2208 and 337; "
        "751K/Apple-Neural-Engine-Microarchitecture-Study-M6",
        test=stepwise,
        grade=Grade.REPORTED,
        scope=Scope(os="seen on M4, macOS 27.0.1, iPhone XS, and an unnamed Mac"),
        kind="speed",
        remedy="unroll_loop",
        remedy_for=remedy_for_control,
        advice="make the steps straight code, or let the app call the model once for each step",
    ),
)
"""The rule about loops that are recurrent networks."""


# How a loop is recognised as a recurrent network: by the number of gates in its body.

GATES = names("sigmoid sigmoid_hard")
NEW_VALUES = names("tanh scaled_tanh relu")
NETWORK_OF_GATE_RATIO = {Fraction(2): "a GRU", Fraction(3, 2): "an LSTM"}
"""(Elements of sigmoids) / (elements of tanh or relu) in one round -> the network. A GRU has two gates and one
new state; an LSTM has three gates, a new cell and the tanh of the cell. Layers of one kind keep the ratio."""
STATE_OPERAND = {
    **dict.fromkeys(("cast", "expand_dims", "squeeze", "reshape", "identity"), "x"),
    **dict.fromkeys(("scatter", "scatter_nd"), "updates"),
    "list_write": "value",
}
"""Ops that move a new state on its way to the next round -> the operand that holds it."""


@cached
def recurrent_step(op: Operation) -> str:
    """Return the network that a `while_loop` steps through, such as "a GRU"; "" where it is none."""
    if op.op_type != "while_loop":
        return ""
    body = op.blocks[1]
    if any(inner.blocks for inner in body.operations):  # a step has no loop of its own
        return ""
    from_state = {v for v in body.inputs if np_dtype(v).kind == "f"}
    after_product = set[Var]()  # computed from products of the state with stored weights
    gates = new_values = 0  # elements of activations of such products
    for inner in body.operations:
        read = set(reads(inner))
        if not read & from_state:
            continue
        from_state |= set(inner.outputs)
        if read & after_product or (inner.op_type in PRODUCTS and any(map(is_stored, read))):
            after_product |= set(inner.outputs)
        if inner.op_type in GATES and inner.x in after_product:
            gates += elements(inner.outputs[0])
        elif inner.op_type in NEW_VALUES and inner.x in after_product:
            new_values += elements(inner.outputs[0])
    if not new_values or not after_product & set(body.outputs):
        return ""
    if gates:
        return NETWORK_OF_GATE_RATIO.get(Fraction(gates, new_values), "")
    return "a simple RNN" if any(_is_activation(v) for v in body.outputs) else ""


def _is_activation(var: Var) -> bool:
    """Is a value the result of an activation (tanh, relu), apart from ops that only move it?"""
    while (op := var.op) is not None and op.op_type in STATE_OPERAND:
        var = op.inputs[STATE_OPERAND[op.op_type]]
    return op is not None and op.op_type in NEW_VALUES


# Ops that are legal but cost time, each with the pass that removes them.


def absorbable_transpose(op: Operation, target: Target) -> str:
    """Report a transpose whose only consumer, a weighted product or a reduction, could do without it."""
    shape, readers = static_shape(op.outputs[0]), list(readers_after(op.outputs[0], UNARY | VIEWS))
    if shape is None or len(readers) != 1:
        return ""
    (reader,) = readers
    is_absorbable = False
    if reader.op_type in REDUCTIONS:
        is_absorbable = reader.x.rank == len(shape) and reduced_before(reader, op) is not None
    elif reader.op_type in ("linear", "matmul") and weight(reader) is not None:
        is_absorbable = reader.x.rank < len(shape) and flattened_from(reader, op) is not None
    words = f"{shape_in_words(shape)} is read by {reader.op_type} %{reader.outputs[0].name} alone"
    return words if is_absorbable else ""


def mergeable_moves(op: Operation, target: Target) -> str:
    """Report the last of several reshapes and transposes if fewer transposes do the same."""
    moves = moves_in_a_row(op)
    if moves is None or len(moves.turns) >= moves.transposes:
        return ""
    transposes = counted(moves.transposes, "transpose")
    return f"it ends {len(moves.ops)} moves in a row with {transposes}; {len(moves.turns) or 'none'} would do"


BETWEEN_BLOCKS = POINTWISE | {"conv", "batch_norm"}
"""Ops that may occur between space_to_batch and batch_to_space."""


def blocks_as_batch(op: Operation, target: Target) -> str:
    """Report a space_to_batch that batch_to_space undoes after convolutions."""
    readers = readers_after(op.outputs[0], BETWEEN_BLOCKS)
    if not any(reader.op_type == "batch_to_space" for reader in readers):
        return ""
    if max(ints(op, "block_shape")) >= LARGE_DILATION:
        return ""  # a dilation as large as that is slow itself
    return f"blocks of {shape_in_words(ints(op, 'block_shape'))} become images, and are put together again"


def cast_indices(op: Operation, target: Target) -> str:
    """Report an integer cast that computes the indices of a gather."""
    cast = producer(op.indices, "cast")
    if cast is None or np_dtype(cast.x).kind not in "iu":
        return ""
    return f"%{op.indices.name} is {np_dtype(cast.outputs[0])}, made of {np_dtype(cast.x)}"


def long_input(op: Operation, target: Target) -> str:
    """Report a strided convolution whose input is longer than the target takes while its result is not."""
    limit, chip = target.least("axis")
    before, after = (shape_of(v)[2:] for v in (op.x, op.outputs[0]))
    strides = ints(op, "strides") or [1] * len(before)
    for length, result, stride in zip(before, after, strides, strict=True):
        if length > limit >= result and stride > 1 and is_stored(op.weight):
            return f"{length:,} elements become {result:,}; {chip} takes {limit:,}"
    return ""


def single_row(op: Operation, target: Target) -> str:
    """Report a product of one row with a stored weight."""
    stored, shape = weight_of(op), shape_of(op.x)
    if stored is None or not is_stored(stored[0]) or math.prod(shape[:-1]) != 1:
        return ""
    return f"one row of {shape[-1]} gives {shape_of(op.outputs[0])[-1]}"


def rare_op(op: Operation, target: Target) -> str:
    """Report the op in any form."""
    return f"%{op.outputs[0].name} is a {op.op_type}"


def long_rows(op: Operation, target: Target) -> str:
    """Report rows longer than the target takes."""
    limit, chip = target.least("axis")
    length = (shape_of(op.x) or (0,))[-1]
    return f"rows of {length}; {chip} takes {limit}" if length > limit else ""


def long_result(op: Operation, target: Target) -> str:
    """Report a result that is longer than the target takes while the input is not."""
    limit, chip = target.least("axis")
    before, after = (max(shape_of(v)[-2:], default=0) for v in (op.x, op.outputs[0]))
    return f"{before:,} elements become {after:,}; {chip} takes {limit:,}" if before <= limit < after else ""


REPAIRED = (
    _slow(
        "transpose-absorbed",
        names("transpose"),
        "moving the last axis writes the whole value anew; what reads it can name other axes, or have its "
        "weights in another order",
        "smpanaro/more-ane-transformers: NOTES.md",
        test=absorbable_transpose,
        grade=Grade.REPORTED,
        scope=Scope(os="seen on M1 Max, macOS 13 to 14"),
        remedy="absorb_transpose",
    ),
    _slow(
        "moves-in-a-row",
        MOVES,
        "coremltools writes a transpose of six or more axes as one swap for each axis, also of length 1",
        "coremltools 9.0: expand_high_rank_reshape_and_transpose; what fewer transposes gain was not measured",
        test=mergeable_moves,
        grade=Grade.GUESS,
        remedy="merge_moves",
    ),
    _slow(
        "space-to-batch",
        names("space_to_batch"),
        "a dilated convolution does the same without moving each pixel twice",
        "by the definition of the ops; what it gains in time was not measured",
        test=blocks_as_batch,
        grade=Grade.GUESS,
        remedy="dilated_convolution",
    ),
    _slow(
        "index-cast",
        names("gather"),
        "a cast of the indices is one more op on the CPU",
        "751K: integer arithmetic stays on the CPU (M4, macOS 27.0.1)",
        test=cast_indices,
        grade=Grade.MEASURED,
        remedy="index_casts",
    ),
    _slow(
        "conv-input",
        names("conv"),
        "the products can be those of frames, and there are as few frames as results",
        SOURCES["axis"],
        test=long_input,
        grade=Grade.REPORTED,
        scope=Scope(os="seen on M1 Max, M4"),
        remedy="long_convolution",
    ),
    _slow(
        "single-row",
        names("linear matmul"),
        "a linear of one row stayed on the CPU at each width, while 1x1 convolutions of one pixel went to the "
        "ANE from 4.7 million weights on",
        "thisisthepy/torchnative: ANEDECODE.md",
        test=single_row,
        grade=Grade.REPORTED,
        scope=Scope(
            frozenset(c.family for c in CHIPS.values() if c.family <= LAST_FEW_ROWS_FAMILY), "seen on M1"
        ),
        remedy="pointwise_convolution",
    ),
    _slow(
        "rare-op",
        names("crop flatten2d reshape_like clamped_relu"),
        "its unit is unknown, while the slices, reshapes or minima that do the same were placed",
        "751K: slices, reshapes, leaky_relu and minimum on the ANE (M4, macOS 27.0.1)",
        test=rare_op,
        grade=Grade.GUESS,
        remedy="replace_rare_ops",
    ),
    _slow(
        "softplus-parametric",
        names("softplus_parametric"),
        "its unit is unknown, while softplus and products were placed; that softplus is wrong from 10.4 on was "
        "not reported of this op",
        "751K: softplus and mul on the ANE (M4, macOS 27.0.1)",
        test=rare_op,
        grade=Grade.GUESS,
        remedy="decompose_ops",
    ),
    _slow(
        "long-rows",
        WEIGHTED,
        "rows cut into parts stay within the limit of an axis; the products of the parts are added",
        SOURCES["axis"],
        test=long_rows,
        grade=Grade.REPORTED,
        scope=Scope(os="seen on M1 Max, M4"),
        remedy="split_inner_axis",
    ),
    _slow(
        "deconv-result",
        names("conv_transpose"),
        "the products can be those of a convolution on the short axis",
        "by the definition of the ops; what it gains in time was not measured",
        test=long_result,
        grade=Grade.GUESS,
        remedy="subpixel_convolution",
    ),
)
