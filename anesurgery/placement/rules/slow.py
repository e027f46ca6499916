"""Ops that the engine can run and runs slowly: convolutions, weights and their compression, views.

Attention, norms and heads are in `patterns`; `RULES` holds both. Lengths are in elements, kernels are height x
width. Each figure belongs to the chip and OS that it is given with.
"""

from __future__ import annotations

import math
from functools import partial

from anesurgery.errors import Refusal
from anesurgery.facts.constant_indices import taken
from anesurgery.mil import (
    Operation,
    Var,
    constant,
    consumers,
    dtype_name,
    is_constexpr,
    is_output,
    is_stored,
    producer,
    static_shape,
)
from anesurgery.ops import PRODUCTS, names
from anesurgery.placement.evidence import Grade, Rule, Scope, general
from anesurgery.placement.rules import patterns
from anesurgery.placement.target import Target
from anesurgery.semantics.byte_sizes import size_of
from anesurgery.semantics.reading import channels, in_words, ints, number, shape_in_words, weight

_slow = partial(Rule, kind="speed")
"""A rule about time."""

MIB = 1 << 20
NOTCH = 16 << 10
"""How near to a multiple of 1 MiB a payload must be; one that is just so far away was fast."""
CORES = 16
MOST_PARTS = 8
EFFICIENT = frozenset({1, 2, 3, 4, 6, 8, 9, 12, 16, 24, 32})
"""Strides that Apple calls efficient."""
WIDE, WIDEST = 9, 16
"""Kernel widths that the compiler rewrites; wider ones are not legal."""
LARGE_DILATION = 4
"""Apple names no number; a chain of dilations of 2 and 3 is its advice."""
LANES = 4
LEAST_GROUP = 4
LARGE_PATCH = 14
MOVED = 256 << 10
"""Bytes below which a transposition is not worth a word."""


def _payload(outputs: int, inputs: int, taps: int) -> int:
    """Bytes of fp16 weights that one of the cores reads."""
    return math.ceil(outputs / CORES) * inputs * taps * 2


def _in_notch(payload: int) -> bool:
    near = round(payload / MIB) * MIB
    return near > 0 and abs(payload - near) < NOTCH


def notch_payload(op: Operation) -> int:
    """Bytes of plain fp16 weights that a core reads, if they lie at a multiple of 1 MiB; else 0."""
    var, shape = weight(op), channels(op)
    groups = number(op.inputs.get("groups")) or 1
    if producer(var, "const") is None or var is None or shape is None or groups != 1:
        return 0
    payload = _payload(*shape)
    return payload if dtype_name(var) == "fp16" and _in_notch(payload) else 0


def dma_notch(op: Operation, target: Target) -> str:
    """Plain fp16 weights whose payload per core lies at a multiple of 1 MiB."""
    payload, shape = notch_payload(op), channels(op)
    if not payload or shape is None:
        return ""
    outputs, inputs, taps = shape
    parts = next(
        (p for p in range(2, MOST_PARTS + 1) if not _in_notch(_payload(outputs, math.ceil(inputs / p), taps))),
        None,
    )
    cure = f"{parts} parts along the inputs miss it" if parts else "no split into 8 parts misses it"
    near = round(payload / MIB)
    off = abs(payload - near * MIB)
    return f"{outputs}x{inputs}: {payload} bytes per core, {off} from {near} MiB; {cure}"


def wide_kernel(op: Operation, target: Target) -> str:
    """A kernel of a width that the compiler rewrites."""
    shape = static_shape(op.weight) or ()
    if len(shape) < 3 or not WIDE <= shape[-1] <= WIDEST:
        return ""
    return f"the kernel is {shape_in_words(shape[2:])}, {shape[-1]} wide"


def odd_stride(op: Operation, target: Target) -> str:
    """A stride that is not a product of 2 and 3, or a mix that Apple does not name."""
    strides = ints(op, "strides")
    odd = [s for s in strides if s not in EFFICIENT]
    mixed = len(set(strides)) > 1 and 1 not in strides and 2 not in strides
    if not odd and not mixed:
        return ""
    return f"the stride is {shape_in_words(strides)}"


def _groups(op: Operation) -> tuple[int, int]:
    """Groups of a convolution, and its inputs."""
    shape = static_shape(op.weight) or (0, 0)
    groups = int(number(op.inputs.get("groups")) or 1)
    return groups, groups * shape[1]


def odd_groups(op: Operation, target: Target) -> str:
    """Groups that do not divide the lanes, but for one channel each."""
    groups, inputs = _groups(op)
    if groups == 1 or groups == inputs or LANES % groups == 0:
        return ""
    return f"{groups} groups of {inputs // groups} channels on {LANES} lanes"


def large_dilation(op: Operation, target: Target) -> str:
    """A dilation beyond those that Apple advises to chain."""
    dilations, shape = ints(op, "dilations"), static_shape(op.weight) or ()
    wide = [d for d, k in zip(dilations, shape[2:], strict=False) if k > 1 and d >= LARGE_DILATION]
    return f"the dilation is {shape_in_words(dilations)}" if wide else ""


def makers(op: Operation) -> list[Operation]:
    """The ops that decompress a weight, the last one first."""
    decoders: list[Operation] = []
    var = weight(op)
    while var is not None and var.op is not None and is_constexpr(var.op):
        decoders.append(var.op)
        var = next(
            (v for n in ("data", "indices", "nonzero_data") if (v := decoders[-1].inputs.get(n)) is not None),
            None,
        )
    return decoders


def lut(op: Operation) -> Operation | None:
    """The look-up table of a palettized weight."""
    return next((m for m in makers(op) if m.op_type == "constexpr_lut_to_dense"), None)


def small_groups(op: Operation, target: Target) -> str:
    """A look-up table for each channel, or for each two or three."""
    table = lut(op)
    shape = static_shape(table.outputs[0]) if table is not None else None
    if table is None or shape is None or len(table.lut.shape) != len(shape) + 2:
        return ""
    counts = [int(n) for n in table.lut.shape[: len(shape)]]
    groups = [d // n for d, n in zip(shape, counts, strict=True) if n > 1]
    if not groups or min(groups) >= LEAST_GROUP:
        return ""
    return f"{max(counts)} look-up tables, one for each {min(groups)} channels"


def few_bits(op: Operation, target: Target) -> str:
    """A palette of one or two bits."""
    table = lut(op)
    if table is None:
        return ""
    shape = [int(n) for n in table.lut.shape]
    colours = shape[-2] if len(shape) > 1 else shape[0]
    return f"a palette of {colours} values" if colours <= 4 else ""


def palette_scale(op: Operation) -> Var | None:
    """The scales by which a palette is multiplied before the product."""
    decoders = makers(op)
    kinds = [m.op_type for m in decoders]
    if kinds[:2] != ["constexpr_blockwise_shift_scale", "constexpr_lut_to_dense"]:
        return None
    return decoders[0].scale


def moved_last_axis(op: Operation, target: Target) -> str:
    """A transposition that writes each row anew."""
    shape, order = static_shape(op.x), ints(op, "perm")
    if shape is None or not order or order[-1] % len(shape) == len(shape) - 1:
        return ""
    long_axes = [p % len(shape) for p in order if shape[p % len(shape)] > 1]
    if long_axes == sorted(long_axes) or size_of(op.x) < MOVED:
        return ""
    if all(r.op_type == "matmul" for r in consumers(op.outputs[0])):
        return ""
    return f"the last axis of {shape_in_words(shape)} is moved, {in_words(size_of(op.x))}"


def named_twice(op: Operation, target: Target) -> str:
    """An identity that does not make an output."""
    var = op.outputs[0]
    return "" if is_output(var) else f"%{var.name} is %{op.x.name}"


def large_patches(op: Operation, target: Target) -> str:
    """A convolution whose strides are its kernel, from 14x14 on: the first that the M1 does not take."""
    kernel, strides = [int(k) for k in op.weight.shape[2:]], list(ints(op, "strides"))
    if len(kernel) != 2 or kernel != strides or max(kernel) < LARGE_PATCH:
        return ""
    return f"patches of {shape_in_words(kernel)}"


def constant_rows(op: Operation, target: Target) -> str:
    """A gather at constant indices from a value of the run."""
    if constant(op.indices) is None or is_stored(op.x):
        return ""
    rows = taken(op)
    return "" if isinstance(rows, Refusal) else f"%{op.outputs[0].name} takes rows at constant indices"


KAS = "kasper0406/stablehlo-coreml: avoid_ane_dma_notch.py"
RULES_OF_APPLE = "apple/coreai-models: neural_engine_rules.md (written for Core AI, 2026)"
STUDY = "751K/Apple-Neural-Engine-Microarchitecture-Study-M6: notes/coreml_dispatch.md"
CONV = frozenset({"conv"})

FIXED = general(
    "fixed-values",
    "it depends on no input, and coremltools leaves it to be computed in every run",
    "coremltools 9.0: gather_nd and what reads it is not folded (seen on converted masks of transformers 5.23)",
    scope=Scope(),
    remedy="fold_constants",
    advice="compute it before the conversion, and register it as a buffer",
    kind="speed",
)
"""Of ops that compute the same numbers in every run."""

RULES: tuple[Rule, ...] = (
    _slow(
        "identity",
        names("identity"),
        "an identity computes nothing, and nothing is known of where it runs",
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
        "inputs * taps * 2 bytes, is less than 16 KiB from a multiple of 1 MiB: 2048x4096 took 840 us, 430 in "
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
        "as a 2 with another; all from 2 to 8 are legal (M4)",
        f"{RULES_OF_APPLE}; {STUDY}",
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
    *patterns.RULES,
)
"""What is slow, by op type."""
