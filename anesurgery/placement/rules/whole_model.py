"""Rules about a function as a whole: whether the ANE runs anything of it, and whether its first load ends.

`inspect` passes the findings of `doubts` and `failing` to `verdicts.choose`, which then also computes the units
without the ANE. An op keeps a unit only if it is the same with and without it; no op is said to prefer the ANE.

`slow_loads` finds functions whose first load takes minutes, fails to compile, or is killed. None of these
findings is a prediction: each names a report, with the chip and OS on which it was seen. Rules about the widths
of states are in `shapes.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from anesurgery.display import byte_words
from anesurgery.errors import Refusal
from anesurgery.facts.moves import computed_cuts
from anesurgery.interpret.attentions import Attention, recognise
from anesurgery.mil import (
    Function,
    Operation,
    any_symbolic,
    is_stored,
    operands,
    producer,
    static_shape,
    types,
    walk_ops,
)
from anesurgery.ops import CARRIERS, CONTRACTIONS, NORMS, POINTWISE, names
from anesurgery.placement.evidence import Finding, Grade, Rule, Scope, general
from anesurgery.placement.flexible import Flexible
from anesurgery.placement.inspection import Memory
from anesurgery.placement.rules.conditions import CHANNELS, is_lookup
from anesurgery.placement.rules.loading import EMPTY_SLICE, STATE_IN_RANGE
from anesurgery.placement.target import CHIPS, SOURCES, Target
from anesurgery.semantics.inference import dynamic_inputs
from anesurgery.semantics.reading import elements, is_tensor, shape_in_words, shape_of

Messages = Iterator[tuple[Rule, str]]
"""Rules that apply, each with what it found in words."""

# The first load: minutes, a failed compile, or a killed process.

_large = partial(general, kind="memory", grade=Grade.REPORTED)
"""A rule about memory."""

_MINUTES_FROM = 330_000_000
"""Bytes of weights from which a load was reported to take over a minute: 335 MB took 1.6, 667 MB took 2, 754 MB
and 1.4 GB took 4."""
_NO_MEMORY = frozenset({(128, 1024), (32, 512), (64, 512), (128, 512), (1, 2048)})
"""(Queries, keys) of attention at which the compile of a Llama with 1B parameters ran out of memory; (130,
1024), (64, 1024), (256, 512) and (64, 2048) ran."""
_LONG_HISTORY = 32768
"""Keys with which a prefill did not compile; with 8,192 it did."""
_NORM_BLOCK = (64, 64)
"""The shape at which two transformer blocks did not compile, and one did."""
_KEEPS_LENGTHS = POINTWISE | NORMS | CONTRACTIONS
"""Ops that make no new dynamic length: the lengths of the result follow from those of the operands."""
_JOINING = CARRIERS | names("concat mul cast")
"""Ops between phases and the transposed convolution of an inverse Fourier transform."""
_PALETTE_OF_4_BITS, _PALETTE_OF_8_BITS = 16, 256
"""The numbers of values of palettes."""

_MINUTES = _large(
    "load-minutes",
    "the first load compiles the model for the engine. Whisper large-v3 turbo took 440 s (M4 Pro) and 560 s "
    "(M2 Pro); later loads took 3 to 5 s (macOS 15.3.1). On an A19 Pro, models of 1.4 GB, and of 754 MB with "
    "int8 weights, took 4 minutes. On an unnamed Mac, a model of 667 MB failed to compile after 140 s, and the "
    "first prediction was killed. An A16 loaded a model of more than 1 GB; on an A18, the same model did not "
    "compile, took 5 to 6 GB of memory, and the app was killed. On an A15 (iOS 17 beta), an app with a "
    "palettized text encoder of SDXL was killed after 9 minutes. On an A16, a CLIP of 335 MB took 97 s. The OS "
    "compiles a model again after an update of the app, and after it drops its cache",
    "argmaxinc/argmax-oss-swift issue 309; john-rocky/CoreML-LLM: QWEN35_LESSONS.md; coremltools issues 2758, "
    "2503, 1814; apple/ml-stable-diffusion issue 255",
    scope=Scope(os="seen on M4 Pro and M2 Pro, macOS 15.3.1, A19 Pro, iOS 26, A18, A16 and A15"),
    advice=(
        "load it once, when the user is not waiting; a virtual Mac without an engine (GitHub's macos-15) hung "
        "for 27 minutes in that compilation: use CPU_ONLY there (soniqo/speech-swift pull request 286)"
    ),
)
_OUT_OF_MEMORY = _large(
    "compile-memory",
    "at some shapes the compiler runs out of memory, though it can compile larger ones. With 1,024 keys, 128 "
    "queries failed, 130 ran in 83 ms, and 64 in 46 ms. With 2,048 keys, one query failed and 64 ran. "
    "Elsewhere, stateful attention with 128 queries over 1,024 keys did not run on the engine, but with 32 "
    "queries it did",
    "pytorch/executorch issue 8439; Anemll/Anemll issue 27, coremltools issue 2553",
    scope=Scope(frozenset({16}), "seen on A17 Pro, iOS 18, a Llama with 1B parameters"),
    advice="process a different number of tokens in one call (130 instead of 128), and load it on the device "
    "first",
)
_HISTORY = _large(
    "compile-history",
    "a prefill with a history of 32,768 tokens did not compile for the engine, so it took 380 s instead of "
    "17 s; with 8,192 tokens it compiled. For Gemma 4, neither a prefill with 32,768 or more tokens nor a "
    "decode step with two caches of this length compiled; with 16,384 tokens, both did",
    "Pummelchen/NVMAI issue 7; kasper0406/gemma-coreml-chat: README.md",
    scope=Scope(frozenset({16, 17}), "seen on M5, macOS 26.5, and M4 Pro, macOS 27"),
    advice="keep a shorter history, or a window",
)
_LATE_SHAPE = general(
    "compile-late-shape",
    "the compilers of the engine and of the CPU refuse a shape that depends on a computed value "
    '("Data-dependent shapes were disabled"), so only the GPU ran the model',
    "ironblock/sidekick: docs/DECISIONS.md D15",
    kind="shape",
    grade=Grade.REPORTED,
    scope=Scope(os="seen on M1 Max, macOS 26 and 27"),
    advice="give the length as a constant, and mask the rest",
)
_LATE_CUT = replace(
    _LATE_SHAPE,
    id="compile-late-cut",
    because="coremltools gives a slice between computed ends a dynamic length even if its size is constant, "
    "and the compilers refuse such shapes",
    advice="slice a constant number of elements from the computed start",
    remedy="slice_of_size",
)
_NORM_VALUES = _large(
    "compile-norm-values",
    "of three instances of a transformer block at 64x64, two failed to compile and one compiled: it depended "
    'on the values of four LayerNorm vectors ("failed create split by input channel"). This was with Core AI',
    "apple/coreai-models issue 138",
    scope=Scope(frozenset({14, 17}), "seen on M5 Max, macOS 27.0, and M2 Pro"),
    advice="load the trained model on the device: one with random weights proves nothing",
)
_PALETTE_STATE = _large(
    "state-palette",
    "a stateful decoder with 4-bit palettes crashed after 100 to 200 predictions; the same decoder, converted "
    "by coremltools 8.3 instead of 9.0, did not crash",
    "coremltools issue 2716",
    scope=Scope(os="seen on an M5 Max, macOS 26.5, CPU_AND_NE, Whisper large-v3 turbo"),
    advice="run a few hundred predictions on the device before you ship it, or keep the cache as inputs and "
    "outputs",
)
_WAVEFORM = _large(
    "crash-waveform",
    "the inverse Fourier transform at the end of Kokoro crashed in libBNNS, on the CPU, mostly after "
    "the first prediction: one app ran 40 times on one day and never on the next",
    "FluidInference/FluidAudio: issues 667, 844, 889, pull request 818",
    scope=Scope(
        frozenset({17}),
        "seen on M5 Pro, macOS 26.5 (not 26.6), and A19 Pro, iOS 26.6 and 27.0",
        since=(("macOS", 26), ("iOS", 26)),
        until=(("macOS", 26), ("iOS", 27)),
    ),
    advice="run a few hundred predictions on the device before you ship it; on the M5 it ran with CPU_AND_GPU",
)
_PHONE = _large(
    "size-phone",
    "weights are expanded to fp16 when they are loaded: 0.8 billion weights take 1.6 GB of memory, "
    "whether they are stored as fp16 or as int8. An app with an int8 package of 1.88 GB was killed at about "
    "5 GB; an fp16 package of 1.4 GB ran",
    "john-rocky/CoreML-LLM: QWEN35_LESSONS.md, QWEN35_2B_CHUNKED_HANDOFF.md",
    scope=Scope(frozenset({17}), "seen on A19 Pro, iOS 26"),
    advice="load it in chunks, each below the size limit for one program (`anesurgery chips`), and measure "
    "phys_footprint",
)
_COARSE_TABLE = _large(
    "num-coarse-table",
    "an embedding model (Qwen3-Embedding-0.6B) with palettes of 4 bits, one for each weight, had a cosine of "
    "0.63 to fp16 on the engine and 0.03 on the CPU; int8 had 0.9992. Which weight caused it is not known",
    "apple/coremltools: issue 2716",
    kind="numeric",
    scope=Scope(os="seen on M4, macOS 26.6.2, coremltools 9.0"),
    advice="compress the fp16 model to int8, or with a palette for each group of channels, and compare",
)
SLOW_LOADS = (
    _MINUTES,
    _OUT_OF_MEMORY,
    _HISTORY,
    _LATE_SHAPE,
    _LATE_CUT,
    _NORM_VALUES,
    _PALETTE_STATE,
    _WAVEFORM,
    _PHONE,
)
"""The rules of `slow_loads`; the list of known loads in the docs is made from them."""


def slow_loads(function: Function, memory: Memory, target: Target) -> tuple[Finding, ...]:
    """Return the findings about the load of a function, and the palette of a table; none without the engine."""
    if not target.uses_ane:
        return ()
    ops = [op for op in walk_ops(function) if op.op_type != "const"]
    messages = [
        *_loaded_size(memory, target),
        *_attention_sizes(ops),
        *_dynamic_shapes(function, ops),
        *_weighted_norms(ops),
        *_palettes_beside_state(function, ops),
        *_coarse_tables(ops),
        *_waveforms(ops),
    ]
    return tuple(rule.finding(message) for rule, message in messages if rule.scope.concerns(target))


def _loaded_size(memory: Memory, target: Target) -> Messages:
    if memory.weights >= _MINUTES_FROM:
        yield _MINUTES, f"{byte_words(memory.weights)} of weights in one program"
    if memory.left is not None and memory.left < 0:
        wide = f" are {byte_words(memory.expanded)} expanded" if memory.expanded else ""
        words = f"{byte_words(memory.weights)} of weights{wide}; with activations and states"
        yield _PHONE, f"{words} {byte_words(memory.needed)}, of {byte_words(memory.app or 0)} for an app"


def _attention_sizes(ops: list[Operation]) -> Messages:
    sizes = [size for op in ops if (a := recognise(op)) is not None and (size := _size_of(a)) is not None]
    for size in sorted(_NO_MEMORY.intersection(sizes)):
        yield _OUT_OF_MEMORY, f"attention of {size[0]} queries over {size[1]} keys"
    if (most := max((keys for _, keys in sizes), default=0)) >= _LONG_HISTORY:
        yield _HISTORY, f"attention over {most} keys"


def _size_of(attention: Attention) -> tuple[int, int] | None:
    """Return (queries, keys) of attention; None where they are dynamic, or where the heads are split."""
    product, fused = attention.product, attention.weights
    if product is None:
        shapes = [static_shape(v) for v in (fused.query, fused.key)]
        return None if None in shapes else (shapes[0][-2], shapes[1][-2])  # type: ignore[index]
    shape = static_shape(product.outputs[0])
    return None if product.op_type != "matmul" or shape is None or len(shape) < 2 else (shape[-2], shape[-1])


def _dynamic_shapes(function: Function, ops: list[Operation]) -> Messages:
    """Report the first op of a function with fixed inputs whose result has a dynamic length."""
    if dynamic_inputs(function):
        return
    for op in (op for op in ops if op.op_type not in _KEEPS_LENGTHS):
        if any(is_tensor(v) and any_symbolic(v.shape or ()) for v in op.outputs):
            dynamic = [v.name for _, v in operands(op) if not is_stored(v)]
            words = shape_in_words(op.outputs[0].shape)
            if op.op_type == "slice_by_index" and not isinstance(computed_cuts(op), Refusal):
                yield (
                    _LATE_CUT,
                    f"%{op.outputs[0].name} is {words}: its ends are computed, but its size is constant",
                )
                return
            yield _LATE_SHAPE, f"%{op.outputs[0].name} is {words}, made of %{[op.name, *dynamic][-1]}"
            return


def _weighted_norms(ops: list[Operation]) -> Messages:
    """Report four norms or more (two transformer blocks) with weights at the shape that failed."""
    norms = [op for op in ops if op.op_type == "layer_norm" and op.gamma is not None]
    at_shape = [op for op in norms if tuple(static_shape(op.x) or ())[-2:] == _NORM_BLOCK]
    if len(at_shape) >= 4:
        yield _NORM_VALUES, f"{len(at_shape)} layer_norm with weights at {shape_in_words(_NORM_BLOCK)}"


def _palettes_beside_state(function: Function, ops: list[Operation]) -> Messages:
    """Report palettes of 4 bits in a function with a state."""
    states = [n for n, v in function.inputs.items() if types.is_state(v.sym_type)]
    if states and any(_palette_size(op) == _PALETTE_OF_4_BITS for op in ops):
        yield _PALETTE_STATE, f"palettes of {_PALETTE_OF_4_BITS} values beside the state %{states[0]}"


def _coarse_tables(ops: list[Operation]) -> Messages:
    """Report a palette of 4 bits, one for the whole weight, from which rows are looked up."""
    for op in (op for op in ops if op.op_type == "gather"):
        palette = producer(op.x, "constexpr_lut_to_dense")
        if palette is None or _palette_size(palette) != _PALETTE_OF_4_BITS:
            continue
        if set(palette.lut.shape[:-2]) <= {1}:  # one palette, not one for each group of channels
            rows = shape_in_words(op.x.shape)
            words = f"{_PALETTE_OF_4_BITS} different numbers"
            yield _COARSE_TABLE, f"the {rows} table %{op.x.name} has {words}"


def _waveforms(ops: list[Operation]) -> Messages:
    """Report the inverse Fourier transform of a vocoder: magnitudes (exp) times sines and cosines of phases."""
    if "exp" in {op.op_type for op in ops}:
        yield from (
            (_WAVEFORM, f"%{op.outputs[0].name} makes a waveform of its spectrum")
            for op in ops
            if _reads_phases(op)
        )


def _reads_phases(op: Operation) -> bool:
    """Is it a transposed convolution of sines or cosines, apart from products, concats and moves?"""
    pending, seen = [op.x.op] if op.op_type == "conv_transpose" else [], set[Operation | None]()
    while pending:
        source = pending.pop()
        if source is None or source in seen:
            continue
        if source.op_type in ("sin", "cos"):
            return True
        seen.add(source)
        if source.op_type in _JOINING:
            pending += [v.op for _, v in operands(source)]
    return False


def _palette_size(op: Operation) -> int:
    """Return the number of values of a palette; 0 for other ops."""
    shape = op.lut.shape if op.op_type == "constexpr_lut_to_dense" else (0, 0)
    return int(shape[-2] if len(shape) > 1 else shape[0])


# Doubts: whether the ANE runs anything of a function.

_reported = partial(general, grade=Grade.REPORTED)

LARGE_TABLE = _reported(
    "embedding-rows",
    "with a table of 151669 rows inside, one model ran on the CPU as a whole (an unnamed Mac), and without it "
    "on the ANE; on an M5 Pro a prefill with such a table had 1918 of 1919 ops there, on an M1 Max an encoder "
    "with 262144 rows 2015 of 2024 (macOS 27.0), and an iPhone and a Mac decoded one token at a time there "
    "with 248,000 rows",
    "joeblau/voice: convert_coreml.py; FluidInference/mobius pull request 77; ironblock/sidekick: "
    "docs/MODELS.md; john-rocky/CoreML-LLM: QWEN35_LESSONS.md, QWEN35_2B_CHUNKED_HANDOFF.md",
    scope=Scope(os="seen on an unnamed Mac, and not on M1 Max, M5 Pro, A19"),
    advice='look the rows up on the host, and make the embeddings an input: embedding_matmul(mode="input")',
)
WITH_TABLE = frozenset({"M1", "M5"})
"""Chips whose ANE was seen to run models that read many rows of a large table."""

DISPUTED_LIST = _reported(
    "dyn-enumerated-disputed",
    "an encoder with enumerated shapes failed to compile for the ANE and ran on the CPU, 86 against 2.4 ms (M1 "
    "Max, macOS 26 and 27), one on an M4 Pro took 236 to 240 ms there and 13.6 ms with a fixed shape, one "
    "failed when it ran; others stayed on the ANE (M4 Max, macOS 26.6; macOS 15: 77 % at the default "
    "shape, and 2 % where each call had another one)",
    "ironblock/sidekick: docs/DECISIONS.md D15; coremltools issues 2730, 2370; eyalamirmusic/eacp",
    scope=Scope(os="seen on M1 Max, M4 Pro, M4 Max, macOS 15, 26 and 27", since=(("macOS", 15), ("iOS", 18))),
    advice="a function for each shape (`ane.sizes`), or look at the compute plan on the device",
)
DISPUTED_RANGE = _reported(
    "dyn-range-disputed",
    "ranges kept whole models on the CPU (M2 Max, macOS 15.6.1, with a state; M5 Pro, macOS 26.5; M2 Ultra, "
    "1561 against 49.7 ms of the fixed model; an unnamed Mac in February 2023), while others took the time of "
    "the fixed model (July 2023), or were on the ANE to 75 to 78 % at the default shape (macOS 15). Through "
    "ONNX Runtime, a detector aborted in the GPU back end (M4 Max, macOS 26), and predictions of a speech "
    "encoder failed (error code -1; Mac model not given); with fixed shapes, both ran",
    "coremltools issues 2600, 2370, 1909, 1764; FluidInference/FluidAudio: ANE_Profiler.md; "
    "mattmireles/kokoro-coreml; docling-project/docling.rs: issue 324; ekhodzitsky/gigastt: pull request 43",
    scope=Scope(os="seen on M2 Max, M2 Ultra, M5 Pro, macOS 13, 15 and 26"),
    advice="fix the shape, or make a few sizes as functions that share their weights (`ane.sizes`)",
)
RANGE_ELSEWHERE = general(
    "dyn-range-unknown",
    "from iOS 18 on no report says what the ANE of an iPhone or iPad runs of a model with a range of shapes: "
    "up to iOS 17.3 the default shape ran there, and on Macs some such models stayed on the CPU as a whole",
    f"developer.apple.com/forums/thread/724930; {DISPUTED_RANGE.source}",
    grade=Grade.GUESS,
    scope=Scope(os="later systems were seen on Macs alone", since=(("iOS", 18),)),
    advice=DISPUTED_RANGE.advice,
)
NORM_IN_LIST = _reported(
    "dyn-enum-norm",
    "a model of one layer_norm of rank 3 left the ANE with enumerated shapes (175 against 20 ms), and stayed "
    "there with a fixed one; norms of rank 4 stayed. Later systems were not tried",
    "coremltools issue 1909; smpanaro/more-ane-transformers: NOTES.md",
    scope=Scope(os="seen on M1 Max, macOS 13"),
    advice="expand to rank 4 around the norms, or one function for each shape",
)
LARGEST_COMPRESSED = 950_000_000
"""Bytes of compressed weights that were seen to run although they exceed the limit when expanded: 899 MB of
int4 ran, 1.88 GB of int8 did not."""
TOO_LARGE = _reported(
    "size-leaves",
    "packages above the limit had no op on the ANE: 3.77 GB of fp16 (an unnamed Mac) and these weights as 1.88 "
    "GB of int8 (A19 Pro, killed while it loaded), GPT-2 XL of 3.1 GB (M1 Max), while 1.4 GB of fp16 and 899 "
    "MB of int4 ran there. It may be the file: 3.2 GB of int4 in one weight.bin had no op there, and in four "
    "files of 1 GB all 192 (an unnamed Mac)",
    "kasper0406/gemma-coreml-chat: weight_shards.py; "
    f"john-rocky/CoreML-LLM: QWEN35_2B_CHUNKED_HANDOFF.md; smpanaro/more-ane-transformers: NOTES.md; limits: "
    f"{SOURCES['program']}",
    scope=Scope(os="seen on A19 Pro, iOS 26, and M1 Max, macOS 13"),
    advice="split it into chunks below the limit, compress it, or write the weights into files below 2.1 GB",
)
LISTED_PALETTE = _reported(
    "crash-enumerated",
    "an encoder (Parakeet) with palettes of 8 bits and enumerated shapes crashed at load, in "
    "bnns::GraphCompile; with ALL, and on an M4, it ran without the engine, and with one shape it ran there",
    "soniqo/speech-swift: issue 313, pull requests 290, 314",
    scope=Scope(frozenset({17}), "seen on M5 Max and M5 Pro, macOS 26.5, CPU_AND_NE"),
    kind="load",
    advice="a package or a function for each shape (`ane.sizes`), or load it with ALL",
)
RULES = (
    LARGE_TABLE,
    DISPUTED_LIST,
    DISPUTED_RANGE,
    RANGE_ELSEWHERE,
    EMPTY_SLICE,
    NORM_IN_LIST,
    LISTED_PALETTE,
    STATE_IN_RANGE,
    TOO_LARGE,
)


def doubts(function: Function, shapes: Flexible | None, memory: Memory, target: Target) -> tuple[Finding, ...]:
    """Return the findings that make it uncertain what the ANE runs of a function; none without the ANE."""
    if not target.uses_ane:
        return ()
    return _findings(
        [*_tables(function, target), *_shapes(function, shapes, target), *_size(memory, target)], target
    )


def doubts_about_shapes(function: Function, shapes: Flexible | None, target: Target) -> tuple[Finding, ...]:
    """Return the findings of `doubts` that are about dynamic lengths."""
    return _findings(_shapes(function, shapes, target), target) if target.uses_ane else ()


def _findings(messages: Iterable[tuple[Rule, str]], target: Target) -> tuple[Finding, ...]:
    return tuple(rule.finding(message) for rule, message in messages if rule.scope.concerns(target))


FAILING: dict[str, frozenset[str]] = {
    "abort-int8-gpu": frozenset(),
    "compile-memory": frozenset({"A17"}),
    "compile-history": frozenset({"M5"}),
    "compile-late-cut": frozenset(),
    "compile-late-shape": frozenset(),
    "hang-nearest-pool": frozenset(),
    "refused-cache-scatter": frozenset(),
    "refused-deconv-stride": frozenset(),
    "refused-long-sound": frozenset(),
    "size-big-image": frozenset(),
    "state-width-32": frozenset(),
}
"""Id of a finding that says that the engine's compiler failed -> chips on which it did; empty for any chip."""


def failing(findings: Iterable[Finding], target: Target) -> tuple[Finding, ...]:
    """Return the findings after which the ANE may run nothing on a target."""
    chips = frozenset(target.chips)
    return tuple(f for f in findings if f.rule in FAILING and (not FAILING[f.rule] or FAILING[f.rule] & chips))


def doubts_among(findings: Iterable[Finding], target: Target) -> tuple[Finding, ...]:
    """Return those of a model's findings that make it uncertain what the ANE runs of it."""
    named, findings = {rule.id for rule in RULES}, tuple(findings)
    return (*(f for f in findings if f.rule in named), *failing(findings, target))


def _has_mac(target: Target) -> bool:
    """Is there a Mac among the chips? Most reports are about Macs."""
    return target.platform != "iOS" and any(CHIPS[n].platform == "macOS" for n in target.chips)


def _tables(function: Function, target: Target) -> Messages:
    if not _has_mac(target) or set(target.chips) <= WITH_TABLE:
        return
    for op in walk_ops(function):
        if op.op_type == "gather" and _reads_large_table(op):
            words = shape_in_words(shape_of(op.x))
            yield (LARGE_TABLE, f"%{op.outputs[0].name} reads a table of {words}, more than {CHANNELS} rows")
            return


def _reads_large_table(op: Operation) -> bool:
    """Does a gather read several rows of a large uncompressed table? Reading one row was seen to run."""
    large = is_lookup(op) and shape_of(op.x)[0] > CHANNELS and producer(op.x, "const") is not None
    return large and elements(op.indices) > 1


def _shapes(function: Function, shapes: Flexible | None, target: Target) -> Messages:
    dynamic = dynamic_inputs(function)
    if shapes is None or not dynamic:
        return
    if not shapes.listed:
        rule = DISPUTED_RANGE if _has_mac(target) else RANGE_ELSEWHERE
        yield rule, f"the length of %{next(iter(dynamic))} may vary"
        slices = (op for op in walk_ops(function) if op.op_type == "slice_by_index")
        varying = next((op for op in slices if any_symbolic(op.x.shape)), None)
        if shapes.maybe_empty and varying is not None:
            words = f"slice %{varying.outputs[0].name} of a model whose %{shapes.maybe_empty[0]} may be empty"
            yield EMPTY_SLICE, f"reported to fail: {words}"
        states = [n for n, v in function.inputs.items() if types.is_state(v.sym_type)]
        if states and (fixed := function.inputs.keys() - dynamic.keys() - set(states)):
            words = f"%{next(iter(dynamic))} has a range, %{min(fixed)} one size"
            yield STATE_IN_RANGE, f"reported to abort beside the state %{states[0]}: {words}"
        return
    if _has_mac(target):
        yield DISPUTED_LIST, f"{len(shapes.listed)} enumerated shapes kept some models on the CPU"
    if _crashed_with_palettes(function, target):
        yield LISTED_PALETTE, f"reported to crash: 8-bit palettes with {len(shapes.listed)} enumerated shapes"
    norms = [op for op in walk_ops(function) if op.op_type == "layer_norm" and op.x.rank == 3]
    if norms:
        first = norms[0].outputs[0].name
        yield NORM_IN_LIST, f"{len(norms)} layer_norm of rank 3, first %{first}, with enumerated shapes"


def _crashed_with_palettes(function: Function, target: Target) -> bool:
    """Are there palettes of 8 bits, on the chip, the OS and the units of the report?"""
    is_seen = set(target.chips) <= {"M5"} and (target.platform, target.os) == ("macOS", 26)
    sizes = (_palette_size(op) for op in walk_ops(function))
    return is_seen and not target.uses_gpu and _PALETTE_OF_8_BITS in sizes


def _size(memory: Memory, target: Target) -> Messages:
    if memory.limit is None:
        return
    chip, limit = target.least("program")[1], byte_words(memory.limit)
    if memory.weights > memory.limit:
        yield (
            TOO_LARGE,
            f"{byte_words(memory.weights)} of weights in one program, above the {limit} of {chip}",
        )
    elif memory.weights > LARGEST_COMPRESSED and memory.expanded > memory.limit:
        words = f"{byte_words(memory.weights)} of weights, {byte_words(memory.expanded)} expanded"
        yield TOO_LARGE, f"{words}, in one program, above the {limit} of {chip}"
