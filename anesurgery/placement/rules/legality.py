"""What the Neural Engine can run, as rows: op types known to be legal, and conditions that forbid an op.

`verdicts.py` reads `LEGAL` and `FORBIDDEN`. The first row of `FORBIDDEN` whose test finds something is the
verdict, so the most specific come first. A row with `legal=None` raises a doubt: if no other row forbids the
op, its verdict is "unknown".

Most rows were measured through Core ML on an M4 (751K/Apple-Neural-Engine-Microarchitecture-Study-M6,
macOS 27.0.1, coremltools 9.0, opset iOS 18, fp16) and are extrapolated to other chips. Rows of the private
compiler (ane-guide, ANEForge) add what is known of a generation; none of them forbids anything on the chip
that was measured through Core ML.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

from anesurgery.mil import Operation, dtype_name, is_stored, np_dtype, producer, static_shape
from anesurgery.ops import PRODUCTS, names
from anesurgery.placement.evidence import Grade, RemedyFor, Rule, Scope
from anesurgery.placement.rules import conditions as when
from anesurgery.placement.rules import faulty_ops
from anesurgery.placement.rules.slow import lookup_table, remedy_for_control, weight_decoders
from anesurgery.placement.target import SOURCES, Target
from anesurgery.regions.heads import SCORES, SUM
from anesurgery.semantics.reading import flag, number, shape_in_words, shape_of

PLAN = "look at the compute plan on the device"
ANEMLL = "ANEMLL: tests/dev/MB_GRAPH_ISSUES.md"
STUDY = "751K/Apple-Neural-Engine-Microarchitecture-Study-M6"
GUIDE = "sbryngelson/ane-guide, ANEForge (tables of the compiler)"
OLDER = "hollance/neural-engine, smpanaro/more-ane-transformers"
STRINGS = "strings of the compiler"
UNSIGNED = Scope(os="seen on a Mac, macOS 15; int16 was refused on M4, macOS 27.0.1")


def _with_uint16(test: when.Condition, wanted: bool) -> when.Condition:
    """Return a test that reports an op only if its indices are uint16, or only if they are not."""
    return lambda op, target: test(op, target) if (dtype_name(op.indices) == "uint16") is wanted else ""


ROWS_OUTSIDE = 'accept it, or look the rows up on the host: embedding_matmul(mode="input")'

# Rows that rest on one report, or on tables of the compiler alone: they make the verdict "unknown".

_reported = partial(Rule, grade=Grade.REPORTED)

EMBEDDING = _reported(
    "embedding-uint16",
    names("gather"),
    "a gather at uint16 indices of run time was reported on the engine, while one at int16 was refused",
    ANEMLL,
    test=_with_uint16(when.lookup, True),
    scope=UNSIGNED,
    advice=ROWS_OUTSIDE,
    remedy="embedding_matmul",
    remedy_for=when.remedy_for_lookup,
)
GATHER = _reported(
    "gather-uint16",
    names("gather"),
    EMBEDDING.because,
    ANEMLL,
    test=_with_uint16(when.runtime_indices, True),
    scope=UNSIGNED,
    advice="make the indices constant, or gather on the host",
    remedy="one_hot_lookup",
)
FLOOR = _reported(
    "op-floor",
    names(
        "softmax layer_norm instance_norm reduce_mean reduce_sum reduce_max reduce_min reduce_l1_norm "
        "reduce_l2_norm reduce_sum_square reduce_log_sum reduce_log_sum_exp resize resize_bilinear "
        "resize_nearest_neighbor upsample_bilinear upsample_nearest_neighbor quantize dequantize"
    ),
    "the compiler's tables give this op to H13 (A14, M1) and later; no measurement through Core ML was found",
    GUIDE,
    scope=Scope(frozenset({12}), via="compiler"),
    advice=PLAN,
)
MIRROR = _reported(
    "pad-mirror",
    names("pad"),
    "this generation mirrors edges in software, if at all",
    GUIDE,
    test=when.mirrored_padding,
    scope=Scope(frozenset({12, 13}), via="compiler"),
    advice="pad with a constant, or concat reversed slices",
    remedy="reflect_pad_slices",
)
LLM = "john-rocky/CoreML-LLM: {}"
MANY_GROUPS = 1024
"""Groups of the convolutions that were seen on the CPU; nothing was reported for fewer."""


def depthwise_step(op: Operation, target: Target) -> str:
    """Report a depthwise convolution of many channels with a single output position."""
    groups, result = number(op.inputs.get("groups")) or 1, shape_of(op.outputs[0])
    if groups < MANY_GROUPS or groups != result[1] or math.prod(result[2:]) > 1:
        return ""
    return f"{groups:.0f} groups, kernel {shape_in_words(shape_of(op.weight)[2:])}, one position"


DEPTHWISE = _reported(
    "conv-depthwise-step",
    names("conv"),
    "ten such convolutions of one decoder ran on the CPU, while smaller ones over images were placed on an M4",
    LLM.format("LFM2_CONVERSION_FINDINGS.md"),
    test=depthwise_step,
    scope=Scope(os="seen on an unnamed Mac, by a script that reads the compute plan of one model"),
    advice="multiply with the kernel and sum over the positions",
    remedy="depthwise_sum",
)


def dynamic_weights(op: Operation, target: Target) -> str:
    """Report a convolution of several images with dynamic weights."""
    batch = shape_of(op.x)[0]
    return "" if is_stored(op.weight) or batch < 2 else f"dynamic weights %{op.weight.name}, batch {batch}"


DYNAMIC_WEIGHTS = _reported(
    "conv-dynamic-weight",
    names("conv"),
    "weights computed at run time and more than one image made the compiler crash on M1, and were ignored on "
    "M3 Max; through Core ML a single image was placed on an M4",
    GUIDE,
    test=dynamic_weights,
    scope=Scope(frozenset({13, 15}), via="compiler"),
    advice="one convolution for each image, or a matmul of the unfolded image",
    remedy="convolve_each_image",
)


def tables_of_blocks(op: Operation, target: Target) -> str:
    """Report look-up tables that change along two axes of a weight."""
    table = lookup_table(op)
    counts = () if table is None else shape_of(table.lut)[:-2]
    return f"{shape_in_words(counts)} look-up tables" if sum(n > 1 for n in counts) > 1 else ""


BLOCK_TABLES = _reported(
    "comp-lut-axis",
    PRODUCTS,
    "tables for each row and block did not compile for the engine (-14)",
    LLM.format("DECODE_STATE_LAYOUTS.md (section 8), TERNARY_BONSAI.md"),
    test=tables_of_blocks,
    scope=Scope(os="seen on an unnamed Mac, coremltools 9.0, for iOS 18"),
    advice="one table for the tensor, or one for each group of channels",
)


def quantized_table(op: Operation, target: Target) -> str:
    """Report a look-up table whose values are quantized."""
    table = lookup_table(op)
    if table is None or producer(table.lut, "const") is not None:
        return ""
    return f"the look-up table %{table.lut.name} is quantized"


QUANTIZED_TABLE = _reported(
    "comp-joint",
    PRODUCTS,
    "tables of 8 bits add ops that dequantize them, and these alone had no place on the engine: 73 of 1101, "
    "while the same 955 others stayed; the model took 4.72 instead of 4.56 ms, and its cosine fell to 0.83",
    LLM.format("SESSION_2026_04_26_ROUND8_INT8_LUT_PROBE.md"),
    test=quantized_table,
    kind="speed",
    scope=Scope(os="seen on M3 Air, macOS 26.0.1"),
    remedy="fold_palette_scales",
    advice="a palette of fp16 values",
)


def quantized_activation(op: Operation, target: Target) -> str:
    """Report activations that are quantized at run time, on the one chip (A19) where that failed."""
    if "A19" not in target.chips or producer(op.input, "const") is not None:
        return ""
    return f"%{op.input.name} is quantized at run time"


ACTIVATIONS = _reported(
    "comp-w8a8",
    names("quantize dequantize"),
    "a language model with activations of 8 bits did not compile for the engine; classifiers did on A17 Pro "
    "and M4",
    LLM.format("EXPERIMENTS.md"),
    test=quantized_activation,
    scope=Scope(frozenset({17}), "seen on A19"),
    advice="keep activations fp16 and compress the weights alone",
)
SORT = _reported(
    "topk-disputed",
    names("topk"),
    "the tables of the compiler have it from M2 on, while the plan of RF-DETR named the CPU",
    f"{GUIDE}; roboflow/rf-detr PR 1495",
    scope=Scope(frozenset({15}), "seen on M3 Pro, macOS 27"),
    advice="choose on the host",
)
SPEED = (QUANTIZED_TABLE,)
"""Rules about speed only; they say nothing about where a product runs."""


# Weights with scales per block: the ANE takes one scale for the tensor, or one for each output channel.

BLOCKWISE_SCALES = names("constexpr_blockwise_shift_scale constexpr_sparse_blockwise_shift_scale")
AFFINE = "constexpr_affine_dequantize"


def _scale_counts(maker: Operation, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the number of scales along each axis of a weight of `shape`; None for an op without scales."""
    if maker.op_type in BLOCKWISE_SCALES:
        return tuple(int(n) for n in maker.scale.shape)
    if maker.op_type != AFFINE:
        return None
    axis = (number(maker.axis) or 0) % len(shape)
    count = int(maker.scale.shape[0]) if maker.scale.shape else 1
    return tuple(count if i == axis else 1 for i in range(len(shape)))


def output_axis(op: Operation, rank: int) -> int:
    """Return the axis of the weight (of `rank` axes) that holds the output channels of a product."""
    if op.op_type != "matmul" or rank < 2:
        return 0
    return rank - 2 if flag(op, "transpose_y") else rank - 1


def block_scales(op: Operation, target: Target) -> str:
    """Report a weight whose scales are neither one for the tensor nor one for each output channel."""
    for maker in weight_decoders(op):
        shape = static_shape(maker.outputs[0])
        scales = _scale_counts(maker, shape) if shape else None
        if not shape or scales is None or all(n == 1 for n in scales):
            continue
        axis = output_axis(op, len(shape))
        if scales != tuple(d if i == axis else 1 for i, d in enumerate(shape)):
            return f"{shape_in_words(scales)} scales for {shape_in_words(shape)} weights"
    return ""


BLOCK_SCALES = Rule(
    "comp-blockwise",
    PRODUCTS,
    'Core ML refuses it: "ANE only support per-cout/per-tensor quantization"',
    "cadamcat/llms-on-apple-neural-engine: findings; NagaYu/coreml-compression-pipeline: README",
    legal=False,
    test=block_scales,
    grade=Grade.REPORTED,
    scope=Scope(os="seen on M5 Pro, macOS 27.0, and M2"),
    advice="one scale for each output channel, a palette, or plain fp16 weights",
    remedy="channel_scales",
)


def float_offset(op: Operation, target: Target) -> str:
    """Report a weight whose offset is a float, and not an integer as its data are."""
    for maker in weight_decoders(op):
        offset = maker.inputs.get("offset") if maker.op_type in BLOCKWISE_SCALES else None
        if offset is not None and np_dtype(offset).kind == "f":
            return f"the offset %{offset.name} of the weights is {dtype_name(offset)}"
    return ""


FLOAT_OFFSET = _reported(
    "comp-offset",
    PRODUCTS,
    'a product with int4 weights and an fp16 offset stayed off the engine ("Failed to retrieved zero_point"); '
    "with an offset of the dtype of the weights it ran there",
    "Apple Developer Forums: thread 759608",
    test=float_offset,
    scope=Scope(os="seen on macOS 15 beta 2 and 3, coremltools 8.0b1"),
    remedy="channel_scales",
    advice="an offset of the dtype of the weights, as linear_quantize_weights writes, or a palette",
)


DOUBTS = (
    EMBEDDING,
    GATHER,
    FLOOR,
    MIRROR,
    DEPTHWISE,
    DYNAMIC_WEIGHTS,
    BLOCK_TABLES,
    ACTIVATIONS,
    SORT,
    FLOAT_OFFSET,
)


# The table: legal op types, and the rows that forbid.

ON_M4 = Scope(os="seen on M4, macOS 27.0.1")
LATER = frozenset({16, 17, 18})
OLDER_CHIPS = frozenset({12, 13, 14, 15})
ALL_FAMILIES = OLDER_CHIPS | LATER
NOT_M4 = ALL_FAMILIES - {16}


LEGAL = names(
    "abs ceil floor round sign sqrt rsqrt square inverse log exp exp2 erf clip relu relu6 leaky_relu prelu elu "
    "sigmoid sigmoid_hard silu tanh scaled_tanh softplus softsign thresholded_relu linear_activation gelu atan "
    "sin cos add sub mul real_div floor_div pow maximum minimum equal not_equal greater greater_equal less "
    "less_equal select logical_and cast conv conv_transpose linear matmul scaled_dot_product_attention "
    "avg_pool l2_pool max_pool softmax layer_norm instance_norm batch_norm l2_norm local_response_norm "
    "reduce_sum reduce_mean reduce_max reduce_min reduce_l1_norm reduce_l2_norm reduce_log_sum "
    "reduce_log_sum_exp reduce_sum_square topk reshape expand_dims squeeze transpose concat split stack "
    "slice_by_index slice_by_size reverse tile space_to_depth depth_to_space space_to_batch batch_to_space "
    "pixel_shuffle pixel_unshuffle pad gather gather_nd gather_along_axis upsample_nearest_neighbor "
    "upsample_bilinear resize resize_nearest_neighbor resize_bilinear resample affine quantize dequantize "
    "fill_like"
)
"""Placed on the ANE of an M4 through Core ML (`STUDY`), where no row of `FORBIDDEN` fires."""

WITH_STATE = names("read_state coreml_update_state slice_update")
"""Seen on the ANE in models with a state: A19 on iOS 18, M4 (john-rocky/CoreML-LLM)."""

SPLIT_ATTENTION = frozenset({SCORES, SUM})
"""Equations of an `einsum` in models that were on the ANE: DistilBERT on an M1 Max and an iPhone 13
(apple/ml-ane-transformers), the UNet of Stable Diffusion (apple/ml-stable-diffusion, "split einsum")."""


class NeverRuns(NamedTuple):
    """Op types that the ANE refused in every form that was tried."""

    ops: str
    because: str
    advice: str
    source: str
    remedy: str | None = None
    """The pass that repairs them."""
    remedy_for: RemedyFor | None = None
    """Returns the pass for one op, if that depends on the op."""


UNROLL = "let the app call the model once for each round; short loops can be unrolled"
NEVER = (
    NeverRuns(
        "asin acos tan sinh cosh atanh",
        "the ANE has no such function",
        "make a table, or write it with sin, cos, exp or atan",
        STUDY,
        "approximate",
    ),
    NeverRuns(
        "asinh acosh",
        "the ANE has no such function",
        "make a table, or write it with sin, cos, exp or atan",
        STUDY,
    ),
    NeverRuns("mod", "the ANE has no remainder", "write it as x - floor_div(x, y) * y", STUDY, "decompose_ops"),
    NeverRuns(
        "reduce_prod",
        "the ANE has no product reduction",
        "sum logarithms, or multiply slices",
        STUDY,
        "decompose_ops",
    ),
    NeverRuns(
        "cumsum",
        "the ANE has no running sum",
        "multiply with a triangular matrix of ones",
        STUDY,
        "decompose_ops",
    ),
    NeverRuns(
        "scatter scatter_along_axis",
        "the ANE cannot write at indices",
        "blend with a mask, or update a state",
        STUDY,
        "replace_scatter",
    ),
    NeverRuns(
        "scatter_nd",
        "the ANE cannot write at indices",
        "blend with a mask, or update a state",
        GUIDE,
        "replace_scatter",
        when.remedy_for_scatter,
    ),
    NeverRuns(
        "band_part", "masks are not built on the ANE", "make the mask a constant", STUDY, "causal_mask_tensor"
    ),
    NeverRuns(
        "one_hot", "the ANE cannot write at indices", "compare with a constant range", STUDY, "decompose_ops"
    ),
    NeverRuns(
        "shape range_1d",
        "it computes shapes or indices",
        "fix the shapes: it then folds",
        STUDY,
        "fold_constants",
    ),
    NeverRuns(
        "non_zero",
        "its shape depends on values",
        "compute all places, and select by the mask",
        STUDY,
        "mask_to_select",
    ),
    NeverRuns(
        "random_normal random_uniform random_bernoulli random_categorical",
        "the ANE has no random numbers",
        "make the noise an input",
        STUDY,
    ),
    NeverRuns("sliding_windows", "the compiler has no converter for it", "use slices", STUDY, "slice_windows"),
    NeverRuns("reverse_sequence", "the compiler has no converter for it", "use slices", GUIDE, "slice_windows"),
    NeverRuns(
        "crop_resize",
        "it ran on the CPU alone, and box indices of int32 are refused",
        "slice, then resize",
        STUDY,
        "resample_matmul",
    ),
    NeverRuns(
        "lstm gru rnn",
        "recurrent ops stay on the CPU",
        "unroll the steps into linear and sigmoid",
        STUDY,
        "unroll_recurrent",
    ),
    NeverRuns(
        "cond while_loop", "control flow stays on the CPU", UNROLL, OLDER, "unroll_loop", remedy_for_control
    ),
    NeverRuns(
        "make_list list_read list_write list_gather list_scatter list_length",
        "lists stay on the CPU",
        "use stack and slices",
        OLDER,
        "unroll_loop",
    ),
    NeverRuns("non_maximum_suppression", "it stays on the CPU", "run it on the host", STUDY),
    NeverRuns("custom", "a custom layer is code for the CPU or GPU", "split the model there", OLDER),
    NeverRuns("classify", "class labels are chosen on the CPU", "", OLDER),
)


def _rule_per_op(row: NeverRuns, test: when.Condition | None = None) -> list[Rule]:
    """Return a rule "op-<type>" for each op type of a row; with a test it forbids some forms only."""
    was_measured = row.source == STUDY
    return [
        Rule(
            f"op-{op}",
            names(op),
            because=row.because,
            source=row.source,
            legal=False,
            test=test,
            grade=Grade.MEASURED if was_measured else Grade.REPORTED,
            scope=ON_M4 if was_measured else Scope(),
            remedy=row.remedy,
            remedy_for=row.remedy_for,
            advice=row.advice,
        )
        for op in row.ops.split()
    ]


def _rules_for_index_ops(ops: str, source: str, remedy: str | None = None) -> list[Rule]:
    """Return rules for ops whose result is indices; they are refused only where that is int32."""
    advice = "leave it last, or return the numbers and choose on the host"
    return _rule_per_op(NeverRuns(ops, "its result is int32", advice, source, remedy), test=when.int32)


def _row(rule: str, ops: str, because: str, test: when.Condition | None = None, **more: Any) -> Rule:
    """Return a rule that forbids ops, measured on an M4 unless `more` says otherwise; ops "" are all types."""
    fields: dict[str, Any] = {"source": STUDY, "scope": ON_M4, "legal": False, **more}
    return Rule(rule, names(ops), because, test=test, **fields)


def _compiler_row(rule: str, ops: str, because: str, test: when.Condition | None = None, **more: Any) -> Rule:
    """Return a rule that was found through the private compiler, for chips of `families` (default: all)."""
    scope = Scope(frozenset(more.pop("families", ALL_FAMILIES)), via="compiler")
    fields: dict[str, Any] = {"source": GUIDE, "grade": Grade.REPORTED, **more}
    return _row(rule, ops, because, test, scope=scope, **fields)


KERNELS = "sum shifted smaller convolutions; lay long kernels on the height"

FORBIDDEN: tuple[Rule, ...] = (
    *(rule for row in NEVER for rule in _rule_per_op(row)),
    *_rules_for_index_ops("reduce_argmax", STUDY, "argmax_as_floats"),
    *_rules_for_index_ops("argsort", STUDY),
    *_rules_for_index_ops("reduce_argmin", GUIDE, "argmax_as_floats"),
    BLOCK_SCALES,
    _row(
        "slice-update-alone",
        "slice_update",
        'only read_state, slice_update, coreml_update_state stays: "Cannot support standalone slice_update"',
        when.update_outside_state,
        looks_beyond="any",
        source="4rg0naut/silicon-ledger-public: EXP-001; Anemll/anemll-profile: README",
        grade=Grade.REPORTED,
        scope=Scope(os="seen on M4, macOS 27.0, and macOS 15"),
        advice="write the update to a state at once, and read the state; otherwise blend with a mask",
    ),
    _row(
        "embedding",
        "gather",
        "a gather at indices known only at run time is refused",
        _with_uint16(when.lookup, False),
        advice=ROWS_OUTSIDE,
        remedy="embedding_matmul",
        remedy_for=when.remedy_for_lookup,
    ),
    _row(
        "gather-runtime",
        "gather",
        "a gather at indices known only at run time is refused",
        _with_uint16(when.runtime_indices, False),
        advice="make the indices constant, or gather on the host",
        remedy="one_hot_lookup",
    ),
    _row(
        "index-guard",
        " ".join(sorted(when.GUARD)),
        "integer arithmetic stays on the CPU; this makes the indices of an embedding",
        when.index_guard,
        looks_beyond="integers",
        advice="say that the ids are never negative (assume=), or look the rows up on the host",
        remedy="token_id_guard",
    ),
    _row(
        "slice-runtime",
        "slice_by_index slice_by_size",
        "slices must be known when the model is compiled",
        when.dynamic_slice,
        advice="slice at constants, or use a mask",
        remedy="one_hot_lookup",
    ),
    _row(
        "mask-positions",
        "",
        "integer arithmetic stays on the CPU; this makes a causal mask",
        when.mask_positions,
        looks_beyond="integers",
        advice="make the mask a constant or an input",
        remedy="causal_mask_tensor",
    ),
    _row(
        "int32-product",
        "linear matmul",
        'integers stay on the CPU, and a product with constant weights did not load ("Failed to build the '
        'model execution plan")',
        when.integer_product,
        source=f"{STUDY}; apple/coremltools: issue 2575; pytorch/executorch: issue 11691",
        advice="cast both to floats and convert again: fp32 is exact up to 2^24, fp16 up to 2048",
    ),
    _row(
        "int32",
        "",
        "a 32-bit integer at run time keeps the op on the CPU",
        when.int32,
        advice="fold it into constants, move it to the host, or compute in fp16 up to 2048",
        remedy="integers_as_floats",
        remedy_for=when.remedy_for_integers,
    ),
    _row(
        "fp32",
        "",
        "ops that compute in fp32 stay on the CPU or GPU",
        when.fp32,
        scope=Scope(),
        source="coremltools guide (typed execution); " + STUDY,
        grade=Grade.DOCUMENTED,
        advice="convert with compute_precision=FLOAT16",
        remedy="compute_fp16",
    ),
    _row(
        "fp32-cast",
        "cast",
        "casts between fp32 and fp16 ran on the CPU",
        when.fp32_cast,
        source="freedomtan/coreml_modelc_profling",
        scope=Scope(frozenset({12, 13}), "seen on M1, macOS 14.6", until=(("macOS", 14), ("iOS", 17))),
        advice="declare fp16 inputs and outputs (from iOS 16 on)",
        remedy="interface_fp16",
    ),
    _row(
        "fp32-cast-later",
        "cast",
        "casts between fp32 and fp16 ran on the CPU of an M1 (macOS 14.6), and may run on the ANE of an M4 "
        "(macOS 27.0.1); of this chip with a later system nothing was published",
        when.fp32_cast,
        source=f"freedomtan/coreml_modelc_profling; {STUDY}",
        grade=Grade.REPORTED,
        legal=None,
        scope=Scope(frozenset({12, 13}), "seen on M1, macOS 14.6", since=(("macOS", 15), ("iOS", 18))),
        advice="declare fp16 inputs and outputs (from iOS 16 on)",
    ),
    _row(
        "rank",
        "",
        "tensors have at most 5 axes",
        when.rank_over(5),
        scope=Scope(),
        grade=Grade.DOCUMENTED,
        source="apple/coreai-models (rules for the ANE); " + STUDY,
        advice="merge axes",
        remedy="rerank",
    ),
    _row(
        "head-size",
        "linear",
        "reports conflict: longer outputs were seen on the ANE, while what reads them left it",
        when.long_head,
        source="thisisthepy/torchnative: NPU2.md (M1); shipstuff/mlx-ane-sd (M4 Pro)",
        grade=Grade.REPORTED,
        legal=None,
        scope=Scope(os="seen on M1, and on M4 Pro with a palette"),
        advice="split it where the compute plan of the device says CPU",
        remedy="split_head",
    ),
    _row(
        "axis",
        "",
        "an axis is longer than the ANE takes",
        when.long_axis,
        source=SOURCES["axis"],
        scope=Scope(os="seen on M1 Max, M4"),
        advice="split the axis, and join the pieces last or return them",
        remedy="fold_long_axis",
        remedy_for=when.remedy_for_long_axis,
    ),
    _compiler_row(
        "conv-kernel-old",
        "conv",
        "the kernel is larger than this generation takes",
        when.large_kernel,
        families=OLDER_CHIPS,
        advice=KERNELS,
        remedy="long_convolution",
    ),
    _row(
        "conv-kernel",
        "conv",
        "the kernel is too large (decomposition preconditions)",
        when.large_kernel,
        scope=Scope(LATER, "seen on M4, macOS 27.0.1"),
        advice=KERNELS,
        remedy="long_convolution",
    ),
    _row(
        "max-pool-width",
        "max_pool",
        "the window is too wide",
        when.wide_window,
        advice="chain smaller pools",
        remedy="chain_pools",
    ),
    _row(
        "matmul-inner",
        "matmul linear",
        "a row does not fit into the memory for kernels (65536 bytes)",
        when.long_inner(32768),
        advice="split the inner axis and add the parts",
        remedy="split_inner_axis",
    ),
    _row("prelu-rank", "prelu", "prelu needs three axes", when.rank_under(3), advice="add axes"),
    _row(
        "comp-pcs",
        "conv linear matmul",
        "a palette that is scaled before the product leaves the engine",
        when.scaled_palette,
        source="coremltools: reorder_lut_per_channel_scale",
        grade=Grade.DOCUMENTED,
        scope=Scope(os="iOS 18"),
        advice="coremltools' pass common::reorder_lut_per_channel_scale, which no default pipeline runs, puts "
        "the scale after the product",
        remedy="scale_after_product",
    ),
    _compiler_row(
        "sin-cos",
        "sin cos",
        "this generation has no sine",
        families={12, 13, 14},
        advice="make the table a constant",
        remedy="approximate",
    ),
    _compiler_row(
        "topk-old", "topk", "this generation has no sort", families={12, 13}, advice="choose on the host"
    ),
    _row(
        "topk-m2",
        "topk",
        'the plan refused it ("RCAS isn\'t supported in this architecture"), although the tables of the '
        "compiler have it from M2 on",
        source=f"public notes (k = 2 of 8); against them {GUIDE}: appendix A",
        grade=Grade.REPORTED,
        scope=Scope(frozenset({14}), "seen on M2, macOS 15"),
        advice="choose on the host",
    ),
    _compiler_row(
        "texture-old",
        "resample affine",
        "this generation has no texture unit",
        families={12, 13},
        advice="resample on the host",
        remedy="resample_matmul",
    ),
    *DOUBTS,
    faulty_ops.NO_DEVICE,
    faulty_ops.CAST_MASK,
    _compiler_row(
        "pool-window",
        "avg_pool l2_pool",
        "the window is larger than the tables of the compiler allow; through Core ML (M4) up to 14 was tried",
        when.large_window,
        advice="chain smaller pools",
        remedy="chain_pools",
    ),
    _row(
        "threshold",
        "threshold",
        "no measurement of this op was found, while maximum was placed",
        legal=None,
        scope=Scope(),
        grade=Grade.GUESS,
        advice="write it as maximum",
        remedy="threshold_to_maximum",
    ),
    _compiler_row(
        "conv3d",
        "conv",
        "the tables of the compiler have no 3-D convolution, while Core ML placed one on an M4",
        when.rank_over(4),
        families=NOT_M4,
        legal=None,
        advice="sum 2-D convolutions over the depth",
        remedy="split_conv3d",
    ),
    _compiler_row(
        "logical-and",
        "logical_and",
        "the tables of the compiler have no path for it, while Core ML placed one on an M4",
        families=NOT_M4,
        legal=None,
        advice="take the minimum of 0 and 1 in fp16",
        remedy="integers_as_floats",
    ),
    _compiler_row(
        "linear-rank",
        "linear",
        "a string of the compiler says that linear takes at most 4 axes",
        when.rank_over(4),
        source=STRINGS,
        legal=None,
        advice="merge axes",
        remedy="adapt_rank",
    ),
    _compiler_row(
        "matmul-rank",
        "matmul",
        "a product of two values of rank 5, behind a transposition, failed in the compiler (M1 to M5), while "
        "Core ML placed values of rank 5 on an M4",
        when.product_of_rank(5),
        families=NOT_M4,
        source="sbryngelson/ANEForge: op-quirks (tables of the compiler)",
        legal=None,
        advice="merge two axes of the batch",
    ),
    _compiler_row(
        "sdpa-rank",
        "scaled_dot_product_attention",
        "a string of the compiler says that fused attention takes at most 4 axes",
        when.rank_over(4),
        source=STRINGS,
        legal=None,
        advice="merge batch and heads",
        remedy="adapt_rank",
    ),
    _compiler_row(
        "comp-stride",
        "conv",
        "palettized convolutions with a stride above 2 are not for the engine, by "
        "Apple's rules for Core AI and by strings of the compiler",
        when.palettized_stride,
        source=f"apple/coreai-models: neural_engine_rules.md; {STRINGS}",
        grade=Grade.DOCUMENTED,
        legal=None,
        advice="keep the weights of this convolution fp16",
    ),
    _compiler_row(
        "conv-dynamic",
        "conv max_pool avg_pool",
        "strings of the compiler refuse it with dynamic lengths",
        when.dynamic_window,
        source=STRINGS,
        legal=None,
        advice="fix the shapes, or make a few sizes as functions (`ane.sizes`)",
    ),
    _compiler_row(
        "slice-update-stride",
        "slice_update",
        "a string of the compiler asks for a stride of 1",
        when.strided_update,
        source=STRINGS,
        legal=None,
        advice="write contiguous parts",
    ),
)
"""Conditions under which an op leaves the ANE, and those that make its unit uncertain."""

TAKES_INT16 = names("gather gather_nd gather_along_axis cast topk slice_update")
"""Ops at which 16-bit integers were seen on the ANE."""

TAKES_INT8 = names("dequantize")
"""Ops that were seen to read 8-bit integers there; quantize and cast produce them."""
