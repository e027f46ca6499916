"""Findings about a function whose first load takes minutes, fails to compile, or is killed.

`inspect` calls `of_function`. None of the findings is a prediction: each names a report, with the chip and OS
on which it was seen. Rules about the widths of states are in `shapes.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from anesurgery.byte_counts import byte_words
from anesurgery.interpret.attentions import Attention, recognise
from anesurgery.mil import Function, Operation, any_symbolic, is_stored, operands, static_shape, types, walk_ops
from anesurgery.ops import CARRIERS, CONTRACTIONS, NORMS, POINTWISE, names
from anesurgery.placement.evidence import Finding, Grade, Rule, Scope, general
from anesurgery.placement.flexible import dynamic_inputs
from anesurgery.placement.inspection import Memory
from anesurgery.placement.target import Target
from anesurgery.semantics.reading import is_tensor, shape_in_words

Message = Iterator[tuple[Rule, str]]
"""Each rule that applies, and what it found in words."""

_large = partial(general, kind="memory", grade=Grade.REPORTED)
"""A rule about memory."""

MINUTES_FROM = 650_000_000
"""Bytes of weights from which a load was reported to take minutes: 667 MB took 2, 754 MB and 1.4 GB took 4."""
NO_MEMORY = frozenset({(128, 1024), (32, 512), (64, 512), (128, 512), (1, 2048)})
"""(Queries, keys) of attention at which the compile of a Llama of 1 billion weights ran out of memory; (130,
1024), (64, 1024), (256, 512) and (64, 2048) ran."""
LONG_HISTORY = 32768
"""Keys with which a prefill did not compile; with 8,192 it did."""
NORM_BLOCK = (64, 64)
"""The shape at which two transformer blocks did not compile, and one did."""
KEEPS_LENGTHS = POINTWISE | NORMS | CONTRACTIONS
"""Ops that make no new dynamic length: the lengths of the result follow from those of the operands."""
JOINING = CARRIERS | names("concat mul cast")
"""Ops between phases and the transposed convolution of an inverse Fourier transform."""
PALETTE_OF_4_BITS = 16
"""The number of values of a palette of 4 bits."""

MINUTES = _large(
    "load-minutes",
    "the first load compiles for the engine: Whisper large-v3 turbo took 440 s (M4 Pro) and 560 s (M2 Pro), "
    "later 3 to 5 s (macOS 15.3.1); 1.4 GB, and 754 MB of int8, took 4 minutes on an A19 Pro; 667 MB took "
    "140 s, did not compile, and the first prediction was killed (a Mac, not named). It is compiled anew "
    "after an update of the app, and where the OS drops its cache",
    "argmaxinc/argmax-oss-swift issue 309; john-rocky/CoreML-LLM: QWEN35_LESSONS.md; coremltools issue 2758",
    scope=Scope(os="seen on M4 Pro and M2 Pro, macOS 15.3.1, and A19 Pro, iOS 26"),
    advice=(
        "load it once, when the user is not waiting; a virtual Mac without an engine (GitHub's macos-15) "
        "hung 27 minutes in that compile: use CPU_ONLY there (soniqo/speech-swift pull request 286)"
    ),
)
OUT_OF_MEMORY = _large(
    "compile-memory",
    "at some shapes the compiler runs out of memory, in no monotonic way: 128 queries over 1,024 keys did, 130 "
    "ran in 83 ms, and 64 in 46 ms; one query over 2,048 did, 64 ran",
    "pytorch/executorch issue 8439",
    scope=Scope(frozenset({16}), "seen on A17 Pro, iOS 18, a Llama of 1 billion weights"),
    advice="take another number of tokens in one call (130 for 128), and load it on the device first",
)
HISTORY = _large(
    "compile-history",
    "a prefill over a history of 32,768 did not compile for the engine, and took 380 s instead of 17; one of "
    "8,192 compiled",
    "Pummelchen/NVMAI issue 7",
    scope=Scope(frozenset({17}), "seen on M5, macOS 26.5"),
    advice="keep a shorter history, or a window",
)
LATE_SHAPE = general(
    "compile-late-shape",
    'a shape that depends on a value of the run is refused by the compiler of the engine and of the CPU ("Data-'
    'dependent shapes were disabled"), and only a GPU took the model',
    "ironblock/sidekick: docs/DECISIONS.md D15",
    kind="shape",
    grade=Grade.REPORTED,
    scope=Scope(os="seen on M1 Max, macOS 26 and 27"),
    advice="give the length as a constant, and mask what is beyond it",
)
NORM_VALUES = _large(
    "compile-norm-values",
    "two instances of a transformer block at 64x64 failed to compile and one did, and it depended on the "
    'values of four vectors of LayerNorm ("failed create split by input channel"); through Core AI',
    "apple/coreai-models issue 138",
    scope=Scope(frozenset({14, 17}), "seen on M5 Max, macOS 27.0, and M2 Pro"),
    advice="load the trained model on the device: one with random weights proves nothing",
)
PALETTE_STATE = _large(
    "state-palette",
    "a decoder with a state and palettes of 4 bits crashed after 100 to 200 predictions; the same one, "
    "converted by coremltools 8.3 and not by 9.0, did not",
    "coremltools issue 2716",
    scope=Scope(os="seen on a device, not named, Whisper large-v3 turbo"),
    advice="predict some hundred times on the device before you ship it, or keep the cache as inputs and "
    "outputs",
)
WAVEFORM = _large(
    "crash-waveform",
    "the inverse Fourier transform at the end of Kokoro ended the process in libBNNS, on the CPU, mostly after "
    "the first prediction: one app ran 40 times on one day and never on the next",
    "FluidInference/FluidAudio: issues 667, 844, 889, pull request 818",
    scope=Scope(
        frozenset({17}),
        "seen on M5 Pro, macOS 26.5 (not 26.6), and A19 Pro, iOS 26.6 and 27.0",
        since=(("macOS", 26), ("iOS", 26)),
        until=(("macOS", 26), ("iOS", 27)),
    ),
    advice="predict some hundred times on the device before you ship it; on the M5 it ran with CPU_AND_GPU",
)
PHONE = _large(
    "size-phone",
    "weights are expanded to fp16 where they are loaded (0.8 billion weights: 1.6 GB of memory as fp16 and as "
    "int8), and a package of 1.88 GB of int8 was killed at about 5 GB, while one of fp16 of 1.4 GB ran",
    "john-rocky/CoreML-LLM: QWEN35_LESSONS.md, QWEN35_2B_CHUNKED_HANDOFF.md",
    scope=Scope(frozenset({17}), "seen on A19 Pro, iOS 26"),
    advice="load it in chunks, each below the limit of a program, and measure phys_footprint",
)
RULES = (MINUTES, OUT_OF_MEMORY, HISTORY, LATE_SHAPE, NORM_VALUES, PALETTE_STATE, WAVEFORM, PHONE)
"""All rules of this file; the list of known loads in the docs is made from them."""


def of_function(function: Function, memory: Memory, target: Target) -> tuple[Finding, ...]:
    """Return the findings about the load of a function on a target with the engine; none without it."""
    if not target.uses_ane:
        return ()
    ops = [op for op in walk_ops(function) if op.op_type != "const"]
    messages = [
        *_loaded_size(memory, target),
        *_attention_sizes(ops),
        *_dynamic_shapes(function, ops),
        *_weighted_norms(ops),
        *_palettes_beside_state(function, ops),
        *_waveforms(ops),
    ]
    return tuple(rule.finding(message) for rule, message in messages if rule.scope.concerns(target))


def _loaded_size(memory: Memory, target: Target) -> Message:
    if memory.weights >= MINUTES_FROM:
        yield MINUTES, f"{byte_words(memory.weights)} of weights in one program"
    if memory.left is not None and memory.left < 0:
        wide = f" are {byte_words(memory.expanded)} expanded" if memory.expanded else ""
        words = f"{byte_words(memory.weights)} of weights{wide}; with activations and states"
        yield PHONE, f"{words} {byte_words(memory.needed)}, of {byte_words(memory.app or 0)} for an app"


def _attention_sizes(ops: list[Operation]) -> Message:
    sizes = [size for op in ops if (a := recognise(op)) is not None and (size := _size_of(a)) is not None]
    for size in sorted(NO_MEMORY.intersection(sizes)):
        yield OUT_OF_MEMORY, f"attention of {size[0]} queries over {size[1]} keys"
    if (most := max((keys for _, keys in sizes), default=0)) >= LONG_HISTORY:
        yield HISTORY, f"attention over {most} keys"


def _size_of(attention: Attention) -> tuple[int, int] | None:
    """Return (queries, keys) of attention; None where they are dynamic, or where the heads are split."""
    product, fused = attention.product, attention.weights
    if product is None:
        shapes = [static_shape(v) for v in (fused.query, fused.key)]
        return None if None in shapes else (shapes[0][-2], shapes[1][-2])  # type: ignore[index]
    shape = static_shape(product.outputs[0])
    return None if product.op_type != "matmul" or shape is None or len(shape) < 2 else (shape[-2], shape[-1])


def _dynamic_shapes(function: Function, ops: list[Operation]) -> Message:
    """Report the first op of a function with fixed inputs whose result has a dynamic length."""
    if dynamic_inputs(function):
        return
    for op in (op for op in ops if op.op_type not in KEEPS_LENGTHS):
        if any(is_tensor(v) and any_symbolic(v.shape or ()) for v in op.outputs):
            dynamic = [v.name for _, v in operands(op) if not is_stored(v)]
            words = shape_in_words(op.outputs[0].shape)
            yield LATE_SHAPE, f"%{op.outputs[0].name} is {words}, made of %{[op.name, *dynamic][-1]}"
            return


def _weighted_norms(ops: list[Operation]) -> Message:
    """Report four norms or more (two transformer blocks) with weights at the shape that failed."""
    norms = [op for op in ops if op.op_type == "layer_norm" and op.gamma is not None]
    at_shape = [op for op in norms if tuple(static_shape(op.x) or ())[-2:] == NORM_BLOCK]
    if len(at_shape) >= 4:
        yield NORM_VALUES, f"{len(at_shape)} layer_norm with weights at {shape_in_words(NORM_BLOCK)}"


def _palettes_beside_state(function: Function, ops: list[Operation]) -> Message:
    """Report palettes of 4 bits in a function with a state."""
    states = [n for n, v in function.inputs.items() if types.is_state(v.sym_type)]
    if states and any(_palette_size(op) == PALETTE_OF_4_BITS for op in ops):
        yield PALETTE_STATE, f"palettes of {PALETTE_OF_4_BITS} values beside the state %{states[0]}"


def _waveforms(ops: list[Operation]) -> Message:
    """Report the inverse Fourier transform of a vocoder: magnitudes (exp) times sines and cosines of phases."""
    if "exp" in {op.op_type for op in ops}:
        yield from (
            (WAVEFORM, f"%{op.outputs[0].name} makes a waveform of its spectrum")
            for op in ops
            if _reads_phases(op)
        )


def _reads_phases(op: Operation) -> bool:
    """Is it a transposed convolution of sines or cosines, apart from products, concats and moves?"""
    pending = [op.x] if op.op_type == "conv_transpose" else []
    while pending:
        source = pending.pop().op
        if source is not None and source.op_type in ("sin", "cos"):
            return True
        if source is not None and source.op_type in JOINING:
            pending += [v for _, v in operands(source)]
    return False


def _palette_size(op: Operation) -> int:
    """Return the number of values of a palette; 0 for other ops."""
    shape = op.lut.shape if op.op_type == "constexpr_lut_to_dense" else (0, 0)
    return int(shape[-2] if len(shape) > 1 else shape[0])
