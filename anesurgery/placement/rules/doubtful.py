"""Rows of legality that rest on one report or on tables of the compiler alone: their verdict is unknown."""

from __future__ import annotations

import math
from functools import partial

from anesurgery.mil import Operation, dtype_name, is_stored, producer
from anesurgery.ops import PRODUCTS, names
from anesurgery.placement.evidence import Grade, Rule, Scope
from anesurgery.placement.rules import conditions as when
from anesurgery.placement.rules.slow import lut
from anesurgery.placement.target import Target
from anesurgery.semantics.reading import number, shape_in_words, shape_of

PLAN = "look at the compute plan on the device"
ANEMLL = "ANEMLL: tests/dev/MB_GRAPH_ISSUES.md"
TABLES = "sbryngelson/ane-guide, ANEForge (tables of the compiler)"
UNSIGNED = Scope(os="seen on a Mac, macOS 15; int16 was refused on M4, macOS 27.0.1")


def _is_unsigned(op: Operation) -> bool:
    return dtype_name(op.indices) == "uint16"


def signed_lookup(op: Operation, target: Target) -> str:
    """Looks up rows of a constant table at indices that may be negative, or of 32 bits."""
    return "" if _is_unsigned(op) else when.lookup(op, target)


def signed_indices(op: Operation, target: Target) -> str:
    """Gathers at such indices of the run."""
    return "" if _is_unsigned(op) else when.runtime_indices(op, target)


_reported = partial(Rule, grade=Grade.REPORTED)

EMBEDDING = _reported(
    "embedding-uint16",
    names("gather"),
    "a gather at uint16 indices of the run was reported on the engine, while one at int16 was refused",
    ANEMLL,
    test=lambda op, target: when.lookup(op, target) if _is_unsigned(op) else "",
    scope=UNSIGNED,
    advice="look the rows up on the host",
    remedy="embedding_matmul",
)
GATHER = _reported(
    "gather-uint16",
    names("gather"),
    EMBEDDING.because,
    ANEMLL,
    test=lambda op, target: when.runtime_indices(op, target) if _is_unsigned(op) else "",
    scope=UNSIGNED,
    advice="make the indices constant, or gather on the host",
    remedy="one_hot_lookup",
)
FLOOR = _reported(
    "op-floor",
    names(
        "softmax layer_norm instance_norm reduce_mean reduce_sum reduce_max reduce_min reduce_l1_norm "
        "reduce_l2_norm "
        "reduce_sum_square reduce_log_sum reduce_log_sum_exp resize resize_bilinear resize_nearest_neighbor "
        "upsample_bilinear upsample_nearest_neighbor quantize dequantize"
    ),
    "the compiler's tables give this op to H13 (A14, M1) and later; no measurement through Core ML was found",
    TABLES,
    scope=Scope(frozenset({12}), via="compiler"),
    advice=PLAN,
)
MIRROR = _reported(
    "pad-mirror",
    names("pad"),
    "this generation mirrors edges in software, if at all",
    TABLES,
    test=when.mirrored,
    scope=Scope(frozenset({12, 13}), via="compiler"),
    advice="pad with a constant, or concat reversed slices",
    remedy="reflect_pad_slices",
)
LLM = "john-rocky/CoreML-LLM: {}"
MANY_GROUPS = 1024
"""Groups of the convolutions that ran on the CPU; of fewer nothing was reported."""


def depthwise_step(op: Operation, target: Target) -> str:
    """A depthwise convolution of many channels that makes one position."""
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
    scope=Scope(os="seen on a Mac, not named, by a script that reads the compute plan of one model"),
    advice="multiply with the kernel and sum over the positions",
    remedy="depthwise_sum",
)


def dynamic_weights(op: Operation, target: Target) -> str:
    """A convolution of several images with weights of the run."""
    batch = shape_of(op.x)[0]
    return "" if is_stored(op.weight) or batch < 2 else f"dynamic weights %{op.weight.name}, batch {batch}"


DYNAMIC_WEIGHTS = _reported(
    "conv-dynamic-weight",
    names("conv"),
    "weights of the run and more than one image made the compiler crash on M1, and were ignored on M3 Max; "
    "through Core ML a single image was placed on an M4",
    TABLES,
    test=dynamic_weights,
    scope=Scope(frozenset({13, 15}), via="compiler"),
    advice="one convolution for each image, or a matmul of the unfolded image",
    remedy="convolve_each_image",
)


def tables_of_blocks(op: Operation, target: Target) -> str:
    """Look-up tables that change along two axes of a weight."""
    table = lut(op)
    counts = () if table is None else shape_of(table.lut)[:-2]
    return f"{shape_in_words(counts)} look-up tables" if sum(n > 1 for n in counts) > 1 else ""


BLOCK_TABLES = _reported(
    "comp-lut-axis",
    PRODUCTS,
    "tables for each row and block did not compile for the engine (-14)",
    LLM.format("DECODE_STATE_LAYOUTS.md (section 8), TERNARY_BONSAI.md"),
    test=tables_of_blocks,
    scope=Scope(os="seen on a Mac, not named, coremltools 9.0, for iOS 18"),
    advice="one table for the tensor, or one for each group of channels",
)


def quantized_table(op: Operation, target: Target) -> str:
    """A look-up table whose values are quantized."""
    table = lut(op)
    if table is None or producer(table.lut, "const") is not None:
        return ""
    return f"the look-up table %{table.lut.name} is quantized"


JOINT = _reported(
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


def quantized_run(op: Operation, target: Target) -> str:
    """Activations that are quantized and read back, on the one chip where that failed."""
    if "A19" not in target.chips or producer(op.input, "const") is not None:
        return ""
    return f"%{op.input.name} is quantized at run time"


ACTIVATIONS = _reported(
    "comp-w8a8",
    names("quantize dequantize"),
    "a language model with activations of 8 bits did not compile for the engine; classifiers did on A17 Pro "
    "and M4",
    LLM.format("EXPERIMENTS.md"),
    test=quantized_run,
    scope=Scope(frozenset({17}), "seen on A19"),
    advice="keep activations fp16 and compress the weights alone",
)
SORT = _reported(
    "topk-disputed",
    names("topk"),
    "the tables of the compiler have it from M2 on, while the plan of RF-DETR named the CPU",
    f"{TABLES}; roboflow/rf-detr PR 1495",
    scope=Scope(frozenset({15}), "seen on M3 Pro, macOS 27"),
    advice="choose on the host",
)
RULES = (EMBEDDING, GATHER, FLOOR, MIRROR, DEPTHWISE, DYNAMIC_WEIGHTS, BLOCK_TABLES, ACTIVATIONS, SORT)
SPEED = (JOINT,)
"""What says nothing of where a product runs."""
