"""Rules about shapes and dtypes that cost memory or keep a model off the engine, and about its whole layout.

`RULES` are about ops that make a last axis of an odd length (not about each op that keeps one). `of_model`
returns the findings about the interface of a function, which are dynamic lengths, inputs, outputs and states;
and about its layout, its attention heads, its length and what it contains (`LAYOUT_RULES`). Each of the latter
names a published measurement that the function resembles.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np

from anesurgery.display import byte_words
from anesurgery.interpret.attentions import recognise
from anesurgery.mil import (
    Function,
    Operation,
    Var,
    constant,
    consumers,
    dtype_name,
    is_stored,
    is_symbolic,
    is_weight,
    np_dtype,
    operands,
    producer,
    static_shape,
    types,
    walk_ops,
)
from anesurgery.ops import CARRIERS, CONTRACTIONS, LOOKUPS, MOVING, PADDING, PRODUCTS, WEIGHTED, names
from anesurgery.placement.evidence import Finding, Grade, Rule, Scope, general
from anesurgery.placement.flexible import Flexible
from anesurgery.placement.target import CHIPS, Target
from anesurgery.semantics.inference import dynamic_inputs
from anesurgery.semantics.intervals import interval
from anesurgery.semantics.reading import (
    channels,
    ints,
    is_tensor,
    readers_after,
    shape_in_words,
    shape_of,
    size_of,
    weight,
)
from anesurgery.semantics.rows import runtime

_slow = partial(general, kind="speed")
"""A rule about speed."""

_CRASHING_CHAIN = 387
"""The length of the shortest chain of ops on which the compiler of M6 crashed."""
_SMALL_MAP = 64
"""The number of positions at which 8x8 and 1x64 were timed."""

_LAYOUT = _slow(
    "linear-vs-conv",
    "1x1 convolutions on (batch, channels, 1, sequence) had about 3 times the throughput of matrix products "
    "(M4, private compiler), and Apple's port of DistilBERT went from 55 to 8.7 ms with them and split heads "
    "(M1 Max); `linear` is legal, and through Core ML four layers of either were on the engine alike (M4)",
    "apple/ml-ane-transformers; maderix/ANE; kasper0406/stablehlo-coreml PR 110",
    grade=Grade.DOCUMENTED,
    scope=Scope(os="seen on M1 Max, M4"),
    advice="put channels first and the sequence last, and use 1x1 convolutions; measure first on newer chips",
)
_HEADS = _slow(
    "attn-split-heads",
    "Apple's ports compute each head by itself: up to 10 times as fast (iPhone 13, sequence 512, batch 8), "
    "the UNet of Stable Diffusion 1040 to 726 ms; SigLIP gained only 10 to 13 % on M4 Pro and M5 Max, and "
    "lost on the GPU",
    "apple/ml-ane-transformers; smpanaro/more-ane-transformers: NOTES.md; erwinzhang7/coreml-compute-placement",
    grade=Grade.DOCUMENTED,
    scope=Scope(os="seen on iPhone 13, M1 Max, M4 Pro, M5 Max"),
    advice="split the heads (einsum bchq,bkhc->bkhq, softmax on axis 1); measure first on newer chips",
)
_SPATIAL = _slow(
    "mlp-spatial-8x8",
    "a 1x1 convolution over 64 positions ran 50 % faster as 8x8 than as 1x64, a whole model 20 %",
    "smpanaro/coreml-llm-cli",
    scope=Scope(frozenset({13, 15}), "seen on M1 Max, M3"),
    advice="reshape around the feed-forward layers only",
)
_CHAIN = _slow(
    "compile-chain",
    "the compiler crashed on chains of 387 layers and more",
    "751K/Apple-Neural-Engine-Microarchitecture-Study-M6: notes/defects.md",
    scope=Scope(frozenset({18}), "seen on M6, macOS 27.0.1"),
    advice="split the model",
)
_ISLAND = _slow(
    "perf-elementwise",
    "elementwise ops and norms are estimated at 0.83 to 1.0 of the CPU's time, and a segment on the engine "
    "costs 0.25 ms at least",
    "751K: notes/coreml_dispatch.md",
    scope=Scope(os="seen on M4, macOS 27.0.1"),
    advice="leave it on the CPU, or make it part of the model it serves",
)
LAYOUT_RULES = (_LAYOUT, _HEADS, _SPATIAL, _CHAIN, _ISLAND)


def _layout_advice(function: Function, target: Target) -> Iterator[Finding]:
    """Yield the findings about a function."""
    ops = [op for op in walk_ops(function) if not is_weight(op)]
    tests = (_channels_last, _joint_heads, _flat_convolutions, _long_chain, _no_products)
    for rule, test in zip(LAYOUT_RULES, tests, strict=True):
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
        and (static_shape(op.outputs[0]) or ())[2:] == (1, _SMALL_MAP)
        and (sizes := channels(op)) is not None
        and sizes.taps == 1
    ]
    return f"{len(flat)} 1x1 convolutions work on 1x{_SMALL_MAP}" if len(flat) > 1 else ""


def _long_chain(ops: list[Operation]) -> str:
    """Report a longest chain of dependent ops on which a compiler may crash."""
    depth: dict[Operation, int] = {}
    for op in ops:
        makers = [producer(v) for _, v in operands(op)]
        depth[op] = 1 + max((depth.get(m, 0) for m in makers if m is not None), default=0)
    most = max(depth.values(), default=0)
    return f"the longest chain has {most} ops" if most >= _CRASHING_CHAIN else ""


def _no_products(ops: list[Operation]) -> str:
    """Report a function without a convolution or matrix product."""
    if not ops or any(op.op_type in CONTRACTIONS for op in ops):
        return ""
    return f"none of the {len(ops)} ops is a convolution or matrix product"


_port = partial(general, kind="interface")
"""A rule about inputs, outputs and states."""

_shaped = partial(general, kind="shape")
"""A rule about shapes."""

ROW_UNIT = 64
"""Rows are stored in units of this many bytes: 32 elements of fp16."""
SAFE_MULTIPLE = 64
"""A multiple of 64 elements on the last axis is right by every source: some say 32 elements, some 64."""
LEAST_WASTE = 1 << 20
"""Bytes of padding from which ops other than products are reported: half of the smallest on-chip memory."""
MOST_STATES = 2
"""The most states with which a model was seen to run (A19); on Macs it was one."""
TWO_STATES_FAIL_FROM = 26
"""The macOS release on which a model of two states failed; nothing was reported of earlier ones."""


def _stored_bytes(shape: tuple[int, ...], var: Var) -> int:
    """Return the bytes that a value of this shape takes with its rows padded to `ROW_UNIT`."""
    row = shape[-1] * np_dtype(var).itemsize
    return math.prod(shape[:-1]) * math.ceil(row / ROW_UNIT) * ROW_UNIT


def _new_odd_shape(op: Operation, var: Var) -> tuple[int, ...] | None:
    """Return the shape of an fp16 result whose last axis has an odd length that no operand has; else None."""
    shape = static_shape(var) if is_tensor(var) and not is_weight(op) else None
    if not shape or len(shape) < 2 or shape[-1] * 2 % ROW_UNIT == 0 or dtype_name(var) != "fp16":
        return None
    lengths = [v.shape[-1] for v in runtime(op) if is_tensor(v) and v.rank]
    return None if shape[-1] in lengths else shape


NOTICED = 1.05
"""Stored bytes for each byte of a value from which padding is worth a word; a choice."""


def _padding_words(shape: tuple[int, ...], var: Var) -> str:
    """Return how much memory the padding of the last axis takes, in words; "" if it is next to none."""
    stored = _stored_bytes(shape, var)
    unit = ROW_UNIT // 2
    wide = math.ceil(shape[-1] / unit) * unit
    ratio = stored / max(size_of(var), 1)
    if ratio < NOTICED:
        return ""
    multiple = math.ceil(shape[-1] / SAFE_MULTIPLE) * SAFE_MULTIPLE
    return (
        f"the last axis of {shape_in_words(shape)} is stored as {wide}: {ratio:.3g} times the memory "
        f"({byte_words(stored)}); the next multiple of {SAFE_MULTIPLE} is {multiple}"
    )


def narrow_product(op: Operation, target: Target) -> str:
    """Report a product with plain weights that makes a last axis of an odd length."""
    var = op.outputs[0]
    shape, has_plain_weight = _new_odd_shape(op, var), producer(weight(op), "const") is not None
    if shape is None or not has_plain_weight or shape[-1] == 1 or channels(op) is None:
        return ""
    return _padding_words(shape, var)


def narrow_value(op: Operation, target: Target) -> str:
    """Report any other op that makes a last axis of an odd length, if the padding is large."""
    for var in op.outputs:
        shape = _new_odd_shape(op, var)
        if shape is None or (op.op_type in WEIGHTED and narrow_product(op, target)):
            continue
        waste = _stored_bytes(shape, var) - size_of(var)
        if waste >= LEAST_WASTE and 4 * waste >= size_of(var):
            return _padding_words(shape, var)
    return ""


LAST = (
    "rows are stored in units of 64 bytes, 32 elements of fp16 (Apple; seen on M3 Max too); other guides say "
    "64 elements, and one measured 16 bytes through the compiler. A multiple of 64 elements is right by each"
)
LAST_SOURCE = (
    "Apple: Deploying Transformers on the Apple Neural Engine; apple/coreai-models: neural_engine_rules.md; "
    "Anemll/Anemll; sbryngelson/ane-guide"
)
OF_LAYOUT = frozenset({"last-axis-align", "last-axis-memory"})
"""Rules about how the engine stores a value, which mean nothing for an op that runs elsewhere."""
RULES: tuple[Rule, ...] = (
    Rule(
        "last-axis-align",
        WEIGHTED,
        LAST,
        LAST_SOURCE,
        test=narrow_product,
        kind="shape",
        grade=Grade.DOCUMENTED,
        remedy="pad_last_axis",
        advice="what it gains in time was not measured",
    ),
    _shaped(
        "last-axis-memory",
        LAST,
        LAST_SOURCE,
        test=narrow_value,
        grade=Grade.DOCUMENTED,
        advice="put the sequence on the last axis (batch, channels, 1, sequence), or another length that fits",
    ),
)

RANGE = _shaped(
    "dyn-range",
    "up to iOS 17.3 only the default shape was for the engine, the others for CPU and GPU; later "
    "reshapeFrequency=.infrequent makes it possible, which slowed one app by 26 % (M5). Strings of the "
    "compiler say that one op off the engine takes all with it",
    "coremltools guide: flexible-inputs; coremltools issues 835, 1764, 2370; FluidInference/FluidAudio",
    grade=Grade.REPORTED,
    advice="fix the shape, or make a few sizes as functions that share their weights (`ane.sizes`)",
)
RANGE_NUMBERS = _shaped(
    "dyn-range-numbers",
    "stages of Kokoro with ranges gave NaN on the beta of iOS 27 (an unnamed iPhone), and a streaming encoder "
    "gave zeros after a cold start on iPadOS 26.5 (M1), not on macOS 26.5 (M1 Pro); the loader warned of "
    "shapes that are not constant",
    "FluidInference/FluidAudio: issues 738, 739, pull request 816",
    grade=Grade.REPORTED,
    kind="numeric",
    scope=Scope(os="seen on an iPhone, iOS 27 beta, and M1, iPadOS 26.5", since=(("iOS", 26),)),
    advice="compare the outputs on the device, from a cold start; fixed sizes (`ane.sizes`) do not have it",
)
ENUMERATED = _shaped(
    "dyn-enumerated",
    "up to 128 enumerated shapes keep the engine, where no layer inside is dynamic",
    "coremltools guide: flexible-inputs",
    grade=Grade.DOCUMENTED,
    advice="fixed sizes, as functions that share their weights (`ane.sizes`), are the safer form",
)
MOST_LISTED = 128
ENUMERATED_MANY = _shaped(
    "dyn-enum-many",
    f"Apple documents up to {MOST_LISTED} enumerated shapes; with 144 sizes of an image, predictions failed, "
    "and with 120 they ran",
    "coremltools guide: flexible-inputs; apple/coremltools: issue 989 (a Mac, macOS 10.15)",
    grade=Grade.DOCUMENTED,
    advice=f"list at most {MOST_LISTED} shapes",
)
ENUMERATED_PAIRS = _port(
    "dyn-enum-pairs",
    "with lists of sizes for two inputs, predictions ran with sizes from the same place in both lists, and "
    "failed with others. Below iOS 18, coremltools refuses a second list, and a network with two failed",
    "apple/coremltools: issues 1115, 2271; pytorch/executorch: issue 9632; coremltools 9.0, its check, read",
    grade=Grade.REPORTED,
    scope=Scope(os="seen on unnamed Macs, in February 2021 and July 2024"),
    advice="a function for each pair that the app needs (`ane.sizes`), or pad one input to one size",
)
POOLS = names("avg_pool max_pool l2_pool")
LEAST_FIXED_WINDOW = 14
"""Windows from this size on are taken for those of an adaptive pooling: networks pool by less in one layer."""
FIXED_WINDOW = _shaped(
    "dyn-fixed-window",
    "the converter writes an adaptive pooling with a window that fits the size it was traced at. At other "
    "sizes, it gives another number of results: traced at 500x500 for 2x2 results, the window stayed 250x250",
    "apple/coremltools: issue 977; its adaptive pooling, read",
    grade=Grade.REPORTED,
    kind="numeric",
    advice="convert once for each size, or pool to 1x1, which is a mean without a window",
)
UNTIL_13 = Scope(os="seen on M1 Max, macOS 13", until=(("iOS", 16), ("macOS", 13)))
ENUMERATED_NORM = _shaped(
    "dyn-enum-ln",
    "layer_norm of rank 3 left the engine with enumerated shapes; rank 4 did not",
    "smpanaro/more-ane-transformers: NOTES.md; coremltools issue 1909",
    scope=UNTIL_13,
    advice="expand to rank 4 around the norms",
)
ENUMERATED_SCORES = _shaped(
    "dyn-enum-qkt",
    "query times key left the engine with enumerated shapes; not on macOS 14",
    "smpanaro/more-ane-transformers: NOTES.md",
    scope=UNTIL_13,
    advice="fix the shape",
)
INTEGERS = _port(
    "dtype-int-input",
    "integers reach the engine through casts and look-ups that run on the CPU (few ops at the head: 4 of 606 "
    "in Apple's DistilBERT); one report of 2022 saw any integer input keep a model off it",
    "751K: notes/coreml_dispatch.md; apple/ml-ane-transformers; eiln/anecc",
    grade=Grade.REPORTED,
    remedy=None,
    advice='accept it, or look embeddings up outside: embedding_matmul with mode="input"',
)
COUNTS = replace(INTEGERS, advice="accept it: few ops at the start read them on the CPU")
"""The rule for integers that are no rows of a table, such as a length."""
GUARDS = names("add select greater_equal")
"""Ops that a converter writes around the rows of a table, so that -1 is the last one."""
DOUBLES = _port(
    "dtype-fp32-io",
    "fp32 values are cast at the edge: on the CPU on M1 (macOS 14.6), on the engine or the CPU on M4 (27.0.1); "
    "between the models of a pipeline the next one left the engine (M1)",
    "freedomtan/coreml_modelc_profling; 751K; smpanaro/more-ane-transformers: NOTES.md",
    scope=Scope(os="seen on M1, M4"),
    advice="declare fp16 inputs and outputs (iOS 16, macOS 13), in buffers of IOSurface: 110 to 73 ms for "
    "GPT-2 large",
)
PIXELS = _port(
    "image-unscaled",
    "an image gives pixels from 0 to 255 unless ct.ImageType has a scale and a bias. Converted so, a generator "
    "of textures gave wrong images, as its module was trained on scaled ones",
    "coremltools: ImageType; apple/coremltools: issue 2438",
    grade=Grade.DOCUMENTED,
    kind="numeric",
    advice="if the module was trained on 0 to 1, convert with ct.ImageType(scale=1/255)",
)
IMAGE_BIAS = _port(
    "image-bias",
    "Core ML multiplies pixels by the scale and then adds the bias. So a bias in units of pixels, as in "
    "bias=[-123, -117, -104], makes all pixels nearly the same number unless it is scaled too",
    "apache/mxnet: issue 7933; coremltools: ImageType",
    grade=Grade.REPORTED,
    kind="conversion",
    advice="multiply the bias by the scale: bias=[-m * scale for m in means]; convert again",
)
IMAGE_TWICE = _port(
    "image-twice",
    "the module scales pixels itself, as EfficientNet and MobileNetV3 of Keras do, and ct.ImageType did before",
    "tensorflow/tensorflow: issues 48412, 48066",
    grade=Grade.REPORTED,
    kind="conversion",
    advice="convert with a plain ct.ImageType(), without scale and bias",
)
IMAGE_ORDER = _port(
    "image-order",
    "the means of ImageNet are 0.485 for red, 0.456 for green and 0.406 for blue. A bias has the order of "
    "color_layout: blue is first in BGR",
    "apache/mxnet: issue 7933; torchvision: its normalization",
    grade=Grade.REPORTED,
    kind="conversion",
    advice="convert with the other color_layout or the bias reversed, unless the module was trained like this",
)
DARK = _port(
    "image-dark",
    "Core ML writes an image output as pixels from 0 to 255, and ct.ImageType has no scale for outputs. "
    "So the normal maps of a generator that ends in 0 to 1 had to be multiplied by 255",
    "apple/coremltools: issues 906, 2449; coremltools: convert takes no scale for outputs, read",
    grade=Grade.REPORTED,
    kind="conversion",
    advice="end the module with 255 * x (from -1 to 1: 127.5 * x + 127.5), and convert again",
)
DARK_IF_SCALED = replace(
    DARK,
    id="image-dark-if-scaled",
    because="Core ML writes an image output as pixels from 0 to 255. Networks such as Real-ESRGAN read and "
    "write numbers from 0 to 1: scaled pixels alone make a black image",
    source=f"{DARK.source}; xinntao/Real-ESRGAN: realesrgan/utils.py",
    grade=Grade.GUESS,
    advice="if the module writes numbers from 0 to 1, end it with 255 * x, and convert again",
)
WIDTHS = _port(
    "io-width",
    f"{LAST}. Core ML gives such outputs with gaps: one of 200 stood in rows of 224 (M5, iPhone 16 Pro), "
    "one of 88 in rows of 96, and one of 504 in rows of 512 (iPhones). An app that copied one as a block spoke "
    "random words; reading it by single numbers took longer than the prediction. From iOS 16 on, coremltools "
    "makes outputs fp16: apps that read them as fp32 crashed, or muted speech by 54 dB",
    f"{LAST_SOURCE}; Desert-Ant-Labs/desert-ant-core: pull request 120; FluidInference/FluidAudio: PR 730; "
    "john-rocky/CoreML-Models: pull requests 75, 78; soniqo/speech-swift: pull request 57; "
    "ultralytics/yolo-ios-app: pull request 303",
    grade=Grade.DOCUMENTED,
    advice="read outputs by the strides and the type (Float16?) of the array; or put a longer axis last",
)
STATES = _port(
    "state-max-types",
    "a plan showed a model of three states on the engine, and its prediction failed (0x1d); two ran",
    "john-rocky/CoreML-LLM: MLSTATE_PATTERN.md",
    scope=Scope(os="seen on A19"),
    advice="pack them into two, or pass some as inputs and outputs",
)
TWO_STATES = _port(
    "state-two",
    "on Macs a model of two states failed at prediction (0x1d), though one of them was only read; one state "
    "ran, and two ran on A19",
    "john-rocky/CoreML-LLM: LFM2_CONVERSION_FINDINGS.md",
    grade=Grade.REPORTED,
    scope=Scope(os="seen on M-series, macOS 26.0.1"),
    advice="pack them into one (join_states), or pass one as input and output (cache_as_io)",
)
STATE_WIDTH = _port(
    "state-width-32",
    "a state 270 wide failed on the engine, one of 256 ran",
    "coremltools issue 2631",
    scope=Scope(os="seen on M4, macOS 15.2"),
    advice="pad its last axis to a multiple of 32 (pad_state)",
)
STATE_RANK = _port(
    "rank5-kv",
    "updates of rank-5 caches were refused, while the same cache of rank 4 stayed on the engine; they were "
    "made by a "
    "scatter, which no engine takes, so the rank alone was not tried",
    "FluidInference/FluidAudio: ANE_Profiler.md",
    grade=Grade.REPORTED,
    scope=Scope(os="seen on M5"),
    advice="fold two axes into one",
)


def of_model(
    function: Function,
    target: Target,
    shapes: Flexible | None = None,
    *,
    advice: bool = True,
    images: Mapping[str, str] | None = None,
) -> tuple[Finding, ...]:
    """Return the findings about the interface of a function, and about its layout as a whole.

    Args:
        function: a MIL function.
        target: chips and OS; findings about others are left out.
        shapes: the shapes that its dynamic inputs may have; None where all are fixed.
        advice: is the layout looked at?
        images: {input or output that is an image of 8 bits: its color space}.
    """
    images = images or {}
    messages = [*_images(function, images), *_interface(function, images), *_states(function, target)]
    kept = [rule.finding(message) for rule, message in messages if rule.scope.concerns(target)]
    lengths = of_lengths(function, shapes, target)
    return (*lengths, *kept, *(_layout_advice(function, target) if advice else ()))


def of_lengths(function: Function, shapes: Flexible | None, target: Target) -> tuple[Finding, ...]:
    """Return the findings about dynamic lengths of inputs; arguments as those of `of_model`."""
    messages = _lengths(function, shapes, target)
    return tuple(rule.finding(message) for rule, message in messages if rule.scope.concerns(target))


Messages = Iterator[tuple[Rule, str]]
"""Rules that apply, each with what it found in words."""


def _lengths(function: Function, shapes: Flexible | None, target: Target) -> Messages:
    dynamic = dynamic_inputs(function)
    listed = shapes is not None and bool(shapes.listed)
    for name, var in dynamic.items():
        words = f"input %{name} has the shape {shape_in_words(var.shape)}"
        yield (ENUMERATED, f"{words}, from a list") if listed else (RANGE, words)
    for op in walk_ops(function) if dynamic else ():
        if op.op_type in POOLS and _has_fixed_window(op):
            window = shape_in_words(ints(op, "kernel_sizes"))
            yield FIXED_WINDOW, f"{op.op_type} %{op.outputs[0].name} keeps a window of {window} at every size"
    if dynamic and not listed and target.platform == "iOS":
        yield RANGE_NUMBERS, f"%{next(iter(dynamic))} has a range; such models gave NaN or zeros here"
    if not dynamic or not listed:
        return
    count = len(shapes.listed) if shapes is not None else 0
    if count > MOST_LISTED:
        yield ENUMERATED_MANY, f"{count} enumerated shapes, more than {MOST_LISTED}"
    if shapes is not None and (pair := _paired_inputs(shapes)):
        first, second = (shape_in_words(shapes.listed[0][name]) for name in pair)
        words = f"the sizes of %{pair[0]} and %{pair[1]} go in pairs: {first} only with {second}"
        yield ENUMERATED_PAIRS, f"{words}, and so on"
    ops = [op for op in walk_ops(function) if not is_weight(op)]
    norms = [op for op in ops if op.op_type == "layer_norm" and op.x.rank == 3]
    if norms:
        yield (ENUMERATED_NORM, f"{len(norms)} layer_norm of rank 3, first %{norms[0].outputs[0].name}")
    scores = [op for op in ops if op.op_type == "matmul" and len(runtime(op)) == 2]
    if scores:
        yield (ENUMERATED_SCORES, f"{len(scores)} products of two values, first %{scores[0].outputs[0].name}")


def _paired_inputs(shapes: Flexible) -> tuple[str, str] | None:
    """Return two inputs whose lists hold different lengths, or the same in another order."""
    lengths: dict[str, list[set[int]]] = {}
    for name, default in shapes.default.items():
        listed = [shape[name] for shape in shapes.listed]
        axes = [axis for axis in range(len(default)) if len({shape[axis] for shape in listed}) > 1]
        lengths[name] = [{shape[axis] for axis in axes} for shape in listed]
    pairs = combinations((name for name, own in lengths.items() if any(own)), 2)
    return next(((a, b) for a, b in pairs if lengths[a] != lengths[b]), None)


def _has_fixed_window(op: Operation) -> bool:
    """Does a pooling of values of varying size take large windows, one beside the other?"""
    window = ints(op, "kernel_sizes")
    is_large = min(window) >= LEAST_FIXED_WINDOW and ints(op, "strides") == window
    return is_large and any(map(is_symbolic, op.x.shape[2:]))


def _interface(function: Function, images: Collection[str]) -> Messages:
    """Find dtypes and widths of arrays that cost something; images come in buffers of pixels."""
    given = {n: v for n, v in function.inputs.items() if n not in images}
    inputs = {n: v for n, v in given.items() if not types.is_state(v.sym_type)}
    ports = [(f"input %{n}", v) for n, v in inputs.items()]
    ports += [(f"output %{v.name}", v) for v in function.outputs if v.name not in images]
    integers = {f"input %{n}": v for n, v in inputs.items() if np_dtype(v).kind in "iu"}
    if integers:
        readers = (op for v in integers.values() for op in readers_after(v, CARRIERS | GUARDS))
        rule = INTEGERS if any(op.op_type in LOOKUPS for op in readers) else COUNTS
        yield rule, f"{_list([*integers])} {_hold([*integers])} integers"
    double = [n for n, v in ports if dtype_name(v) in ("fp32", "fp64")]
    if double:
        yield DOUBLES, f"{_list(double)} {_hold(double)} fp32"
    odd = [
        f"{n} {shape_in_words(shape)}"
        for n, v in sorted(ports, key=lambda port: port[0].startswith("input"))  # an app reads outputs
        if np_dtype(v).kind == "f" and (shape := static_shape(v)) and len(shape) > 1 and shape[-1] % 32
    ]
    if odd:
        yield WIDTHS, f"no multiple of 32 on the last axis: {_list(odd)}"


def _images(function: Function, images: Mapping[str, str]) -> Messages:
    """Find images whose pixels come unscaled or wrongly scaled, and image outputs that are black."""
    for name in [n for n in function.inputs if n in images]:
        yield from _scaled_pixels(name, function.inputs[name], images[name])
        readers = list(readers_after(function.inputs[name], SAME_PIXELS))
        if readers and all(op.op_type in CONTRACTIONS for op in readers):
            yield (
                PIXELS,
                f"image %{name}: {readers[0].op_type} reads pixels from 0 to 255, without scale or bias",
            )
    for var in [v for v in function.outputs if v.name in images]:
        low, high = interval(var)
        if low >= -1 and high <= 1:
            yield (
                DARK,
                f"image output %{var.name}: numbers from {low:.3g} to {high:.3g}, as pixels from 0 to 255",
            )
        elif high == math.inf and (given := _scaled_images(function, images)):
            writer = _writer_of_pixels(var)
            if writer is not None and _writes_units(writer):
                yield (
                    DARK_IF_SCALED,
                    f"image output %{var.name} may be black: %{given[0]} is scaled, and nothing scales it back",
                )


RESIZES = names("upsample_nearest_neighbor upsample_bilinear resize_nearest_neighbor resize_bilinear")
SAME_PIXELS = CARRIERS | MOVING | PADDING | RESIZES
"""Ops whose results are pixels where those of their input are."""


def _scaled_images(function: Function, images: Mapping[str, str]) -> list[str]:
    """Return the image inputs, if constants scale the pixels of each to a few units."""
    given = [name for name in function.inputs if name in images]
    factors = (_scale_and_offset(function.inputs[name])[0] for name in given)
    return given if all(255 * np.max(abs(factor)) < NORMALIZED for factor in factors) else []


WIDE_ROW = 10.0
"""The norm from which the weights of one result scale it up: coremltools folds 255 * x into them."""


def _writes_units(op: Operation) -> bool:
    """Does an op sum products, without weights that scale the result up or a bias that lifts it?"""
    stored, size, bias = constant(weight(op)), channels(op), constant(op.inputs.get("bias"))
    if stored is None or size is None or (bias is not None and np.max(np.abs(bias)) > NORMALIZED):
        return False
    return bool(np.linalg.norm(np.ravel(stored).astype(np.float64)) < WIDE_ROW * size.outputs**0.5)


def _writer_of_pixels(var: Var) -> Operation | None:
    """Return the op before a value that does more than to move it, cut its negative half or resize it."""
    while (op := producer(var)) is not None and op.op_type in SAME_PIXELS | {"relu"}:
        var = op.x
    has_offset = op is not None and op.op_type == "add" and (is_stored(op.x) or is_stored(op.y))
    return None if has_offset else op


PREPARING = names("mul add sub real_div cast transpose")
"""Ops that prepare the pixels of an image."""
MEANS = np.array([0.485, 0.456, 0.406])
"""The means of ImageNet for red, green and blue, of pixels from 0 to 1."""
CLOSE = 0.015
"""How near a mean is to one of these: a scale that is the mean of three moves it by 0.01."""
NARROW = 0.1
"""The width of scaled pixels below which they were scaled twice; once gives 1, 2 or more."""
FAR = 4.0
"""How many widths scaled pixels lie from 0 if their bias is not scaled."""
NORMALIZED = 10.0
"""The largest offset of pixels that are normalized as numbers from 0 to 1."""


def _scaled_pixels(name: str, var: Var, space: str) -> Messages:
    """Find pixels of an image that constants scale or shift by wrong numbers."""
    factor, offset = _scale_and_offset(var)
    ends = (offset, 255 * factor + offset)
    low, high, width = np.min(ends), np.max(ends), 255 * np.max(abs(factor))
    words = f"image %{name}: pixels become {low:.4g} to {high:.4g}"
    if width < NARROW:
        yield IMAGE_TWICE, f"{words}: scaled twice"
        return
    if np.min(np.abs(ends)) > FAR * width:
        yield IMAGE_BIAS, f"{words}: the bias is not scaled"
    elif np.max(abs(factor)) > 1 and 0 < np.max(abs(offset)) < NORMALIZED:
        yield PIXELS, f"{words}: normalized as numbers from 0 to 1"
    means = np.broadcast_to(-offset / (255 * factor), 3) if max(factor.size, offset.size) == 3 else MEANS
    if space == "RGB" and np.all(abs(means - MEANS[::-1]) < CLOSE):
        yield IMAGE_ORDER, f"image %{name} is RGB: the mean of blue is taken from red"
    elif space == "BGR" and offset.size == 3 and np.all(abs(means - MEANS) < CLOSE):
        yield IMAGE_ORDER, f"image %{name} is BGR: the mean of red is taken from blue"


def _scale_and_offset(var: Var) -> tuple[np.ndarray, np.ndarray]:
    """Return the factor and the offset that constants give pixels before other ops, of 1 or 3 elements."""
    factor, offset = np.ones(1), np.zeros(1)
    while len(readers := consumers(var)) == 1 and readers[0].op_type in PREPARING:
        op = readers[0]
        var = op.outputs[0]
        if op.op_type in CARRIERS:
            continue
        stored = constant(op.y if is_stored(op.y) else op.x)
        if (
            stored is None
            or stored.size not in (1, 3)
            or (op.op_type in ("sub", "real_div") and is_stored(op.x))
        ):
            break
        numbers = np.ravel(stored).astype(np.float64)
        if op.op_type in ("add", "sub"):
            offset = offset + numbers if op.op_type == "add" else offset - numbers
        else:
            numbers = numbers if op.op_type == "mul" else 1 / numbers
            factor, offset = factor * numbers, offset * numbers
    return factor, offset


def of_images(function: Function, images: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings about images; arguments as those of `of_model`."""
    return (rule.finding(message) for rule, message in _images(function, images))


def _list(names: list[str]) -> str:
    """Return the first three names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _hold(names: list[str]) -> str:
    return "holds" if len(names) == 1 else "hold"


def two_states_may_fail(target: Target) -> bool:
    """Is there a Mac among the chips, with an OS on which two states may fail?"""
    is_new = target.os is None or target.os >= TWO_STATES_FAIL_FROM
    return target.platform != "iOS" and is_new and any(CHIPS[n].platform == "macOS" for n in target.chips)


def _states(function: Function, target: Target) -> Messages:
    states = {n: shape_of(v) for n, v in function.inputs.items() if types.is_state(v.sym_type)}
    if len(states) > MOST_STATES:
        yield STATES, f"{len(states)} states: {_list([f'%{n}' for n in states])}"
    elif len(states) == MOST_STATES and two_states_may_fail(target):
        yield TWO_STATES, f"2 states: {_list([f'%{n}' for n in states])}"
    for name, shape in states.items():
        if shape and shape[-1] % 32:
            yield STATE_WIDTH, f"state %{name} is {shape_in_words(shape)}: the width is not a multiple of 32"
        if len(shape) > 4:
            yield STATE_RANK, f"state %{name} is {shape_in_words(shape)}, of rank {len(shape)}"
