"""Rules about the layers of the older neural-network models (`.mlmodel`): can the engine run them?

`networks.py` calls `judge` for each layer. The statements date from 2018 to 2022 and were made through Core ML,
mostly by people who watched which engine a model woke up; later systems were not measured. A rule that only
rests on a measurement of the same op in an ML Program says so, and is graded as a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from anesurgery.mil import MOST_AXES
from anesurgery.ops import names
from anesurgery.placement.evidence import Finding, Grade, RemedyFor, Rule, Scope, general
from anesurgery.placement.rules.loading import KIND
from anesurgery.placement.target import SOURCES, Target

HOLLANCE = "hollance/neural-engine, unsupported-layers"
ANECOMPAT = "fredyshox/ANECompat, README"
PROGRAMS = "751K/Apple-Neural-Engine-Microarchitecture-Study-M6 (ML Programs, M4, macOS 27.0.1)"

WATCHED = Scope(os="seen on iOS 11 to 15", model_type="neuralnetwork")
CARRIED_OVER = Scope(os="seen on M4, macOS 27.0.1, in ML Programs", model_type="neuralnetwork")
_watched = partial(Rule, legal=False, grade=Grade.REPORTED, scope=WATCHED)
"""A rule about a layer that people saw run elsewhere than on the engine."""

POOL_KERNEL, POOL_STRIDE, UPSAMPLE, LOOKUP_ROWS = 13, 2, 2, 32768
"""The largest sizes by the old reports: pooling kernel and stride, upsampling factor, rows of a table."""
LONGEST = 16384
"""The longest height and width with which networks loaded; vectors of more channels did, too."""

BROADCASTABLE = names(
    """
    modBroadcastable minBroadcastable maxBroadcastable addBroadcastable powBroadcastable divideBroadcastable
    floorDivBroadcastable multiplyBroadcastable subtractBroadcastable whereBroadcastable
    """
)
RANK_FREE = frozenset({"concatND", "splitND", "loadConstantND", "softmaxND", "embeddingND"})
RECURRENT = frozenset({"simpleRecurrent", "gru", "uniDirectionalLSTM", "biDirectionalLSTM"})
GATHERS = frozenset({"gather", "gatherND", "gatherAlongAxis"})
CONTROL = frozenset({"branch", "loop", "loopBreak", "loopContinue"})
CPU_IN_PROGRAMS = names(
    """
    tan asin acos sinh cosh asinh acosh atanh argMin argMax argSort cumSum scatter scatterND scatterAlongAxis
    oneHot matrixBandPart lowerTriangular upperTriangular whereNonZero slidingWindows reverseSeq
    NonMaximumSuppression cropResize reduceProd rangeStatic rangeDynamic getShape sliceDynamic randomNormalLike
    randomNormalStatic randomNormalDynamic randomUniformLike randomUniformStatic randomUniformDynamic
    randomBernoulliLike randomBernoulliStatic randomBernoulliDynamic categoricalDistribution
    """
)
LEGAL_IN_PROGRAMS = names(
    """
    clip constantPad expandDims flattenTo2D rankPreservingReshape reshapeStatic reverse sliceStatic squeeze
    stack tile transpose
    """
)
"""Layers that clip or move numbers. The other layers of their release depend on the chip, or broadcast."""
SEEN = names(
    """
    convolution pooling activation innerProduct batchnorm softmax add concat upsample
    """
)
FIRST_LAYERS = names(
    """
    multiply scale bias average max min dot padding crop slice split flatten permute reshape reduce
    reorganizeData l2normalize lrn mvn unary loadConstant
    """
)
"""The other layers of the first two releases, which are said to run mostly on the engine."""


def _repaired(rule: Rule, *, only: Mapping[str, RemedyFor] | None = None, **kinds: str) -> Iterator[Rule]:
    """Yield copies of a rule with their remedies: one per pass, and one without for the other layer types.

    Args:
        rule: the rule that forbids all these layer types.
        only: pass -> a function that gives the pass, or None, for one layer, if the pass repairs only some.
        kinds: pass -> the layer types that it repairs, separated by spaces.
    """
    for remedy, ops in kinds.items():
        yield replace(rule, ops=names(ops), remedy=remedy, remedy_for=(only or {}).get(remedy))
    if rest := rule.ops - names(" ".join(kinds.values())):
        yield replace(rule, ops=rest)


@dataclass(frozen=True)
class Described:
    """A layer with the shapes of its inputs, as the tests of the rules take it."""

    spec: Any
    """The `NeuralNetworkLayer`."""
    inputs: tuple[tuple[int, ...], ...] = ()
    """One shape for each input; () where it is unknown."""
    constants: frozenset[str] = frozenset()
    """The names of the inputs that come from a `loadConstantND`."""

    @property
    def kind(self) -> str:
        """The layer type."""
        return str(self.spec.WhichOneof("layer"))


def _window(values: Any) -> tuple[int, int]:
    """Return (height, width) of a repeated field of one or two sizes; (1, 1) if it is empty."""
    sizes = [int(v) for v in values]
    return (sizes[0], sizes[-1]) if sizes else (1, 1)


def _many_axes(layer: Described, target: Target) -> str:
    """Report a value with more axes; Core ML did not load a network that reshapes to six."""
    ranks = [len(shape) for shape in layer.inputs]
    if layer.kind in ("reshapeStatic", "rankPreservingReshape"):
        ranks.append(len(getattr(layer.spec, layer.kind).targetShape))
    return f"{max(ranks)} axes, more than {MOST_AXES}" if max(ranks, default=0) > MOST_AXES else ""


def _large_pool(layer: Described, target: Target) -> str:
    pool = layer.spec.pooling
    if pool.globalPooling:
        return ""
    kernel, stride = _window(pool.kernelSize), _window(pool.stride)
    words = []
    if max(kernel) > POOL_KERNEL:
        words.append(f"kernel {kernel[0]}x{kernel[1]}, more than {POOL_KERNEL}")
    if max(stride) > POOL_STRIDE:
        words.append(f"stride {stride[0]}x{stride[1]}, more than {POOL_STRIDE}")
    return "; ".join(words)


def _long_axis(layer: Described, target: Target) -> str:
    limit, chip = target.least("axis")
    found = long_axis(layer.inputs, limit)
    return f"{found}: an axis above {limit} ({chip})" if found else ""


def long_axis(shapes: Iterable[tuple[int, ...]], limit: int = LONGEST) -> str:
    """Return the first shape with a height or a width above the limit, in words; "" without one."""
    return next(("x".join(map(str, s)) for s in shapes if len(s) > 2 and max(s[-2:]) > limit), "")


def _dilated(layer: Described, target: Target) -> str:
    height, width = _window(layer.spec.convolution.dilationFactor)
    return f"dilated by {height}x{width}" if max(height, width) > 1 else ""


def _wide_kernel(layer: Described, target: Target) -> str:
    if layer.spec.convolution.isDeconvolution:
        return ""
    height, width = _window(layer.spec.convolution.kernelSize)
    for what, size, name in (("width", width, "kernel_w"), ("height", height, "kernel_h")):
        limit, chip = target.least(name)
        if size > limit:
            return f"kernel {height}x{width}; {what} {size} is more than {limit} ({chip})"
    return ""


def _large_upsampling(layer: Described, target: Target) -> str:
    params = layer.spec.upsample
    factors = list(params.fractionalScalingFactor) or list(params.scalingFactor)
    if not factors or max(factors) <= UPSAMPLE:
        return ""
    return f"factor {'x'.join(f'{f:g}' for f in factors)}, more than {UPSAMPLE}"


def _large_table(layer: Described, target: Target) -> str:
    is_old = layer.kind == "embedding"
    rows = int(layer.spec.embedding.inputDim if is_old else layer.spec.embeddingND.vocabSize)
    return f"{rows:,} rows, more than {LOOKUP_ROWS:,}" if rows > LOOKUP_ROWS else ""


def _remedy_for_constant(layer: Described, target: Target) -> str | None:
    """Return the pass for a constant of shape (1, 1, C, H, W); others go with their consumers."""
    shape = tuple(layer.spec.loadConstantND.shape)
    return "legacy_constant" if len(shape) == 5 and shape[:2] == (1, 1) else None


def _broadcast_channels(layer: Described, target: Target) -> str:
    shapes = [shape[-3:] for shape in layer.inputs]
    if len(shapes) < 2 or any(len(s) < 3 or min(s) < 1 for s in shapes):
        return ""
    single = [s for s in shapes if s[1:] == (1, 1)]
    spatial = [s for s in shapes if s[1:] != (1, 1)]
    if not single or not spatial or spatial[0][0] != single[0][0]:
        return ""
    return " times ".join("x".join(map(str, s)) for s in (spatial[0], single[0]))


RULES: tuple[Rule, ...] = (
    _watched(
        "nn-axis",
        SEEN | FIRST_LAYERS | LEGAL_IN_PROGRAMS,
        "the engine takes no longer height or width; a compiler of an unnamed chip refused a width of 240000: "
        '"Tensor dimensions are not within supported range [...] H[1-16384]W[1-16384]"',
        f"FluidInference/FluidAudio issue 121; {SOURCES['axis']}",
        test=_long_axis,
        grade=Grade.GUESS,
        scope=Scope(os="seen on macOS 26 and iOS 26, in ML Programs", model_type="neuralnetwork"),
        advice="cut the axis into pieces, or fold it into rows",
    ),
    _watched(
        "nn-custom",
        frozenset({"custom"}),
        "a custom layer has code for the CPU, and perhaps the GPU; nobody can write it for the ANE",
        HOLLANCE,
        advice="write it with built-in layers, or split the model there so that the rest stays on the ANE",
    ),
    _watched(
        "nn-swish",
        frozenset({"custom"}),
        "a custom layer of this name is x * sigmoid(x) by custom, which built-in layers can compute",
        HOLLANCE,
        test=lambda layer, target: "class Swish" if layer.spec.custom.className == "Swish" else "",
        remedy="swish_layers",
        advice="write it as a sigmoid and a multiply",
    ),
    _watched(
        "nn-recurrent",
        RECURRENT,
        "recurrent layers do not run on the ANE",
        HOLLANCE,
        advice="unroll it into products and sigmoids, or split the model there",
    ),
    *_repaired(
        _watched(
            "nn-gather",
            GATHERS,
            "gathering does not run on the ANE",
            HOLLANCE,
            advice="use slices where the indices are constant, or gather before the model",
        ),
        legacy_gather="gather",
    ),
    *_repaired(
        _watched(
            "nn-broadcastable",
            BROADCASTABLE,
            "layers of the Broadcastable kind do not run on the ANE",
            HOLLANCE,
            advice="use the first layers (add, multiply, scale, a linear activation); "
            "or convert to an ML Program, where broadcasting is legal",
        ),
        legacy_add_multiply="addBroadcastable multiplyBroadcastable",
        legacy_subtract="subtractBroadcastable",
        legacy_divide="divideBroadcastable",
        legacy_clip="minBroadcastable maxBroadcastable",
        legacy_power="powBroadcastable",
    ),
    *_repaired(
        _watched(
            "nn-rank-free",
            RANK_FREE,
            "layers of the ND kind do not run on the ANE",
            HOLLANCE,
            advice="use the layer of the same name without ND on (C, H, W); "
            "or convert to an ML Program, where the op is legal",
        ),
        only={"legacy_constant": _remedy_for_constant},
        legacy_concat="concatND",
        legacy_split="splitND",
        legacy_constant="loadConstantND",
        legacy_softmax="softmaxND",
        legacy_embedding="embeddingND",
    ),
    _watched(
        "nn-dilated",
        frozenset({"convolution"}),
        "dilated convolutions were seen off the ANE in 2020; DeepLabV3, which has them, ran there later",
        f"{HOLLANCE}; {ANECOMPAT}",
        test=_dilated,
        remedy="undilate_convolution",
        advice="measure it; or convert to an ML Program, where dilation is legal",
    ),
    Rule(
        "nn-rank",
        LEGAL_IN_PROGRAMS,
        'a network that reshapes to six axes did not load: "ANE does not support blob with rank: 6", and '
        '"Error in declaring network". A pixel shuffle by reshapes loaded on an A13, and not on an A14',
        "microsoft/onnxruntime: issue 14212; apple/coremltools: issue 1318",
        legal=False,
        test=_many_axes,
        grade=Grade.REPORTED,
        scope=Scope(os="seen on a Mac in 2023 and an A14 in 2021", model_type="neuralnetwork"),
        advice="merge axes, or convert to an ML Program, where rerank merges them",
    ),
    Rule(
        "nn-conv-kernel",
        frozenset({"convolution"}),
        "the engine's kernels end here; said of ML Programs and of the compiler, not of neural networks",
        SOURCES["kernel"],
        legal=False,
        test=_wide_kernel,
        grade=Grade.GUESS,
        scope=CARRIED_OVER,
        advice="lay the long side along the height, or split the kernel into shifted smaller ones",
    ),
    _watched(
        "nn-pool",
        frozenset({"pooling"}),
        "pooling beyond these sizes does not run on the ANE",
        HOLLANCE,
        test=_large_pool,
        remedy="split_pooling",
        advice="pool twice with smaller windows, or globally where the window is the whole image",
    ),
    _watched(
        "nn-upsample",
        frozenset({"upsample"}),
        "upsampling by more than 2 does not run on the ANE; DeepLabV3 left it before its last resize by 8",
        f"{HOLLANCE}; {ANECOMPAT}",
        test=_large_upsampling,
        remedy="split_upsampling",
        advice="upsample by 2 several times, or deconvolve",
    ),
    _watched(
        "nn-channel-broadcast",
        frozenset({"multiply"}),
        "multiplying a CxHxW tensor with a Cx1x1 tensor does not run on the ANE",
        HOLLANCE,
        test=_broadcast_channels,
        remedy="spread_channels",
        remedy_for=lambda layer, _: "legacy_add_multiply" if layer.constants else "spread_channels",
        advice="use a scale layer where the factors are constant",
    ),
    Rule(
        "nn-lookup",
        frozenset({"embedding", "embeddingND"}),
        "Core ML refuses lookups in tables of more than 32768 rows on the ANE",
        "smpanaro/more-ane-transformers, NOTES",
        legal=False,
        test=_large_table,
        scope=Scope(os="seen on M1 Max, macOS 13", model_type="neuralnetwork"),
        advice="look up before the model, or split the table",
    ),
    _watched(
        "nn-control",
        CONTROL,
        "the engine has no control flow",
        "smpanaro/more-ane-transformers, NOTES",
        advice="unroll it, or compute both sides and select",
    ),
    Rule(
        "nn-as-in-programs",
        CPU_IN_PROGRAMS,
        "the same op of an ML Program ran on the CPU; nobody measured the layer",
        PROGRAMS,
        legal=False,
        grade=Grade.GUESS,
        scope=CARRIED_OVER,
    ),
    Rule(
        "nn-as-legal-in-programs",
        LEGAL_IN_PROGRAMS,
        "the same op of an ML Program ran on the ANE; nobody measured the layer",
        PROGRAMS,
        legal=True,
        grade=Grade.GUESS,
        scope=CARRIED_OVER,
    ),
    Rule(
        "nn-seen",
        SEEN,
        "Apple's MNIST, YOLOv3 and DeepLabV3 ran on the ANE up to their last layers",
        ANECOMPAT,
        legal=True,
        grade=Grade.REPORTED,
        scope=Scope(os="seen on Macs, macOS 12 or later", model_type="neuralnetwork"),
    ),
    Rule(
        "nn-first-layers",
        FIRST_LAYERS,
        "layers of the first two releases mostly run on the ANE",
        HOLLANCE,
        legal=True,
        grade=Grade.GUESS,
        scope=WATCHED,
    ),
)
"""Rules that forbid come before those that allow. Every rule that forbids a layer is reported."""

OLD_FORMAT = general(
    "nn-format",
    "broadcasting and concatenation of any rank are legal on the ANE in ML Programs, not in neural networks",
    PROGRAMS,
    scope=Scope(os="seen on M4, macOS 27.0.1"),
    advice="convert the original again with minimum_deployment_target=ct.target.iOS15 or later",
)
"""The rule about the format as a whole."""


LONG_AXIS = general(
    "nn-axis-load",
    'a network with an input of 37920 values did not load ("Error in declaring network"), one of 16384 did; '
    "widths of 16900 and 44100 aborted the process on the GPU; ONNX Runtime gives Core ML no longer input, and "
    "a network of PP-OCRv5 failed at prediction all the same",
    "apple/coremltools: issues 283, 324, 1003; onnxruntime: coreml/builders/helper.cc; immich issue 23391",
    kind="memory",
    grade=Grade.REPORTED,
    scope=Scope(
        os="seen on macOS 10.14 to 11 and iPhone X; macOS with ONNX Runtime", model_type="neuralnetwork"
    ),
    advice="cut the axis into pieces, or convert the original again with "
    "minimum_deployment_target=ct.target.iOS15, to an ML Program",
)
"""The rule about a height or width above `LONGEST`, which `networks.py` finds."""
REFUSED = general(
    "nn-refused",
    "Core ML checks each layer before it compiles a network, and refuses the whole network",
    "coremltools: mlmodel/src/Validation/NeuralNetwork, read; apple/coremltools: issues 643, 1043, 1048, 1198, "
    "1330, 1635, 1723",
    grade=Grade.DOCUMENTED,
    kind=KIND,
)


def refusal(layer: Any) -> str:
    """Return why Core ML refuses a layer that builders let pass, and what to do; "" if nothing is known."""
    kind = layer.WhichOneof("layer")
    params: Any = getattr(layer, str(kind), None)
    computed = len(layer.input) > 1
    match kind:
        case "convolution" if computed and params.isDeconvolution:
            return "is a deconvolution of computed weights; use a convolution, or stored weights"
        case "convolution" if computed and max(params.dilationFactor, default=1) > 1:
            return "is a dilated convolution of computed weights; leave the dilation out, or store the weights"
        case "batchedMatmul" if computed and params.hasBias:
            return "multiplies two computed values and adds a bias; add it in a layer of its own"
        case "batchedMatmul" if computed and params.int8DynamicQuantize:
            return "multiplies two computed values in int8; only stored weights can be int8"
        case "upsample" if params.mode == params.NN and params.linearUpsampleMode != params.DEFAULT:
            return "takes the nearest pixel, with a linear mode; leave linearUpsampleMode out"
        case "upsample" if params.fractionalScalingFactor and params.linearUpsampleMode == params.DEFAULT:
            return "upsamples by a fraction; use BILINEAR with ALIGN_CORNERS_TRUE or ALIGN_CORNERS_FALSE"
        case "argSort" if params.axis < 0:
            return f"sorts along the axis {params.axis}, counted from the end; count it from the front"
        case "reshapeStatic" if len(params.targetShape) > MOST_AXES:
            return (
                f"makes {len(params.targetShape)} axes of at most {MOST_AXES}; merge some, or split the reshape"
            )
    return _without_effect(layer, str(kind))


def _without_effect(layer: Any, kind: str) -> str:
    """Return why Core ML refuses a layer that does nothing; "" if it does something."""
    if kind in ("split", "splitND") and len(layer.output) < 2:
        return "splits into a single part; leave it out"
    if kind == "copy" and layer.input[0] == layer.output[0]:
        return "copies a value to its own name; leave it out"
    if kind == "loadConstantND" and 0 in layer.loadConstantND.shape:
        return "holds a constant without elements; leave it out of what reads it"
    return ""


UNTRAINABLE = general(
    "nn-training",
    "training a network failed that had a batchnorm after a layer that learns (its gradient needs two inputs). "
    "Another was aborted where only the last layer learned, and an LSTM came before it (a rank above 5)",
    "apple/coremltools: issues 492 (iOS 13), 2074 (coremltools 7.0)",
    grade=Grade.REPORTED,
    kind="interface",
    advice="split the network, and train only the last part; fold batchnorms into the layers before them",
)
PASSING_GRADIENTS = names("convolution innerProduct uniDirectionalLSTM flatten pooling batchnorm")
PASSING_ACTIVATIONS = names("ReLU sigmoid tanh")


def layers_before_a_loss(network: Any) -> Iterator[Any]:
    """Yield the layers between those that learn and a loss, the last first; not the softmax of a loss."""
    taught = set[str]()
    for layer in network.layers:
        if layer.isUpdatable or taught.intersection(layer.input):
            taught.update(layer.output)
    losses = [getattr(loss, loss.WhichOneof("LossLayerType")) for loss in network.updateParams.lossLayers]
    read = {loss.input for loss in losses}
    for layer in reversed(network.layers):
        if read.intersection(layer.output):
            ends = layer.WhichOneof("layer") == "softmax" and any(n.input == layer.output[0] for n in losses)
            read.update(layer.input)
            if taught.intersection(layer.input) and not ends:
                yield layer


def passes_gradients(layer: Any) -> bool:
    """Does Core ML train the layers before this one?"""
    if layer.WhichOneof("layer") == "activation":
        return layer.activation.WhichOneof("NonlinearityType") in PASSING_ACTIVATIONS
    return layer.WhichOneof("layer") in PASSING_GRADIENTS


def of_training(network: Any) -> Iterator[Finding]:
    """Yield the findings about layers through which an updatable network cannot be trained."""
    for layer in layers_before_a_loss(network):
        if not passes_gradients(layer):
            words = f"{layer.name} ({layer.WhichOneof('layer')}) passes no gradients to a layer that learns"
            yield REFUSED.finding(f"Core ML does not load it: {words}", layer.name)
        elif layer.WhichOneof("layer") == "batchnorm" and not layer.batchnorm.instanceNormalization:
            yield UNTRAINABLE.finding(f"training may fail: batchnorm {layer.name} is after a layer that learns")
    if recurrent := [layer for layer in network.layers if layer.WhichOneof("layer") in RECURRENT]:
        words = f"{recurrent[0].WhichOneof('layer')} {recurrent[0].name}"
        yield UNTRAINABLE.finding(f"training may fail: the network has the {words}")


class LayerVerdict(NamedTuple):
    """Whether the ANE can run a layer."""

    legal: bool | None
    """None where nothing is known."""
    against: list[tuple[Rule, str]]
    """The rules that forbid it, each with what it found in words."""


def judge(layer: Described, target: Target) -> LayerVerdict:
    """Say whether the ANE can run a layer, and which rules forbid it.

    Args:
        layer: the layer, with the shapes of its inputs.
        target: the chips whose limits count.
    """
    against: list[tuple[Rule, str]] = []
    allowed: bool | None = None
    for rule in RULES:
        if layer.kind not in rule.ops:
            continue
        if rule.legal:
            allowed = True
        elif rule.test is None:
            against.append((rule, f"layer type {layer.kind}"))
        elif words := rule.test(layer, target):
            against.append((rule, words))
    return LayerVerdict(False if against else allowed, against)
