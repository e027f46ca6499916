"""Ops that were reported wrong on the Neural Engine, in Core ML or in Core AI, although fp16 holds the result.

No interval and no run in fp16 finds such a fault, only a report does. Each row says: which op in which form,
where it was seen, what comes out, and who says so. The engine's arithmetic computes the rows that say how
(`simulate`), `inspect` names them, edits must not write such an op, and `chips` lists them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.interpret.ops.windows import transposed_cuts
from anesurgery.mil import (
    Operation,
    Var,
    constant,
    consumers,
    dtype_name,
    is_output,
    is_stored,
    np_dtype,
    operands,
    producer,
    static_shape,
)
from anesurgery.ops import CARRIERS, POINTWISE, PRODUCTS, WEIGHTED, names

Function = Callable[..., Any]
Form = Callable[[Operation], str]


@dataclass(frozen=True)
class Fault:
    """One op that gives wrong numbers."""

    name: str
    ops: frozenset[str]
    what: str
    """What happens, as a sentence without a full stop."""
    source: str
    seen: str
    """The chip, OS and units, as the report names them."""
    chips: tuple[str, ...] = ()
    """The chips of `seen`, without Pro or Max; none where no report names one."""
    systems: tuple[tuple[str, int], ...] = ()
    """The releases of `seen`; none where no report names one."""
    since: tuple[tuple[str, int], ...] = ()
    """The first releases that are warned of; older ones of these platforms are not. None: all are."""
    runtime: Literal["Core ML", "Core AI"] = "Core ML"
    """"Core AI" where it was seen only in that runtime: for Core ML such a row is a warning."""
    units: Literal["engine", "engine alone", "gpu", "any"] = "engine"
    """Where it was seen: "gpu" if the engine was right; "any" if the CPU or the GPU was wrong, too; "engine
    alone" if it was right with ALL."""
    form: Form | None = None
    """Returns, in words, what of an op has the faulty form, "" where nothing has. None: every op of the type
    has it."""
    fp16_only: bool = False
    """Is only an op of fp16 concerned? A layer of a neural network has no dtype; it is always concerned."""
    common: bool = False
    """Does nearly every model have the form? Then only a target with this chip and OS is warned."""
    least_input: Callable[[Operation], float] | None = None
    """Returns the input from which on the result is wrong; None where that does not depend on the input."""
    simulate: Callable[[Operation, Function], Function] | None = None
    """(op, function that computes it exactly) -> function that computes it wrongly; None where no report says
    how."""
    ends_process: bool = False
    """Does the process end, rather than numbers being wrong?"""
    remedy: str | None = None
    """The pass that rewrites the op."""
    advice: str = ""

    def found(self, op: Operation, layer: bool = False) -> str:
        """Return, in words, what of an op has the form of this row; "" where it has not.

        `layer` says that the op is that of a neural network's layer, which has no dtype.
        """
        if op.op_type not in self.ops:
            return ""
        if self.fp16_only and not layer and np_dtype(op.outputs[0]) != np.float16:
            return ""
        return f"%{op.outputs[0].name} is a {op.op_type}" if self.form is None else self.form(op)


def _numbers_of(op: Operation, name: str) -> list[Any]:
    """Return a constant input as a list of numbers; empty where it has none."""
    value = constant(op.inputs.get(name))
    return [] if value is None else np.asarray(value).ravel().tolist()


SOFTPLUS_CLIFF = 10.408
"""From this input on softplus was 0; just below it was right (coremltools issue 2687)."""


def _softplus(op: Operation, function: Function) -> Function:
    return lambda x: torch.where(x >= SOFTPLUS_CLIFF, torch.zeros_like(x), function(x=x))


def _terms(op: Operation) -> int:
    """Return how many numbers are reduced to one result; dynamic lengths count as 1."""
    shape = op.x.shape
    axes = _numbers_of(op, "axes") or range(len(shape))
    sizes = [shape[axis] for axis in axes]
    return math.prod(n for n in sizes if isinstance(n, int)) or 1


def _log_sum(op: Operation, function: Function) -> Function:
    """Return the function that gives 0 where the sum of exponentials, without a maximum, exceeds fp16."""

    def compute(**arguments: Any) -> Any:
        right = function(**arguments)
        return torch.where(right >= fp16.LARGEST_EXPONENT, torch.zeros_like(right), right)

    return compute


def _uneven_kernel(op: Operation) -> str:
    """Find a strided convolution with padding of which one side of the kernel is even and another odd."""
    kernel, strides = list(op.weight.shape[2:]), _numbers_of(op, "strides")
    pad_type = str(constant(op.inputs.get("pad_type")) or "valid")
    is_padded = any(_numbers_of(op, "pad")) if pad_type == "custom" else pad_type != "valid"
    is_uneven = len({int(k) % 2 for k in kernel if isinstance(k, int)}) > 1
    has_one_channel = op.x.shape[1] == 1  # the report is about two channels
    if not (is_uneven and is_padded and any(s > 1 for s in strides)) or has_one_channel:
        return ""
    return f"kernel {'x'.join(map(str, kernel))}, stride {'x'.join(map(str, strides))}, with padding"


def _cut_by_output_shape(op: Operation) -> str:
    """Find a transposed convolution whose output_shape cuts more from one end than from the other.

    coremltools writes an output_shape into every conversion from PyTorch, mostly the one that even padding
    gives anyway; no report is about that.
    """
    if op.inputs.get("output_shape") is None:
        return ""
    name = op.outputs[0].name
    if static_shape(op.x) is None or static_shape(op.outputs[0]) is None:
        return f"%{name} is a conv_transpose with output_shape"
    ends = transposed_cuts(op)
    is_uneven = any(begin != end for begin, end in ends)
    return f"the output_shape of %{name} cuts {ends} from the ends of each axis" if is_uneven else ""


def _unnormalized(op: Operation) -> str:
    mode = str(constant(op.inputs.get("coordinates_mode")))
    return "the coordinates are pixels" if mode == "unnormalized" else ""


LEAST_CHANNELS = 1600
"""The channels of the only depthwise convolution behind a concat that was reported."""


def _many_channels_depthwise(op: Operation) -> str:
    """Find a depthwise convolution of many channels that a concat joined."""
    concat = producer(op.x, "concat")
    groups = constant(op.inputs.get("groups"))
    channels = op.x.shape[1]
    if concat is None or groups is None or not isinstance(channels, int) or int(groups) != channels:
        return ""
    return f"{channels} channels of a concat, depthwise" if channels >= LEAST_CHANNELS else ""


def _fp32_images(op: Operation) -> str:
    """Find the cast to fp32 that gives an output of images: the report was about a segmentation."""
    out = op.outputs[0]
    cast = is_output(out) and np_dtype(out) == np.float32 and np_dtype(op.x) == np.float16
    return f"the images %{out.name} are fp32, computed in fp16" if cast and len(out.shape or ()) == 4 else ""


def _rank_2_hard_swish(op: Operation) -> str:
    """Find the sigmoid of a hard swish behind a product of rank 2, as in sigmoid_hard(mul(linear(x), 1/6)).

    The ops between are those with which a hard swish is written.
    """
    product = op.x
    while (before := producer(product, "thresholded_relu", "clip", "add", "mul")) is not None:
        product = before.inputs.get("y") if is_stored(before.x) else before.x
    source = producer(product, *sorted(WEIGHTED))
    is_swish = any(reader.op_type in ("mul", "real_div") for reader in consumers(op.outputs[0]))
    if source is None or len(product.shape or ()) != 2 or not is_swish:
        return ""
    return f"the hard swish reads the {source.op_type} %{product.name} of rank 2"


def _fp16_scores(op: Operation) -> str:
    """Find an op that chooses among scores of fp16."""
    scores: Var = op.x
    return f"%{scores.name} holds scores in fp16" if np_dtype(scores) == np.float16 else ""


MOST_READ = 16
"""The most values that are followed from a topk to a gather: a pose head has five views, with casts between."""


def _gathered_places(op: Operation) -> str:
    """Find a topk of fp16 scores whose indices a gather reads."""
    words = _fp16_scores(op)
    pending = list(op.outputs[1:]) if words else []
    for _ in range(MOST_READ):
        for reader in consumers(pending.pop()) if pending else ():
            if reader.op_type.startswith("gather"):
                return f"{words}, and a gather takes rows at the places"
            pending += [v for v in reader.outputs if np_dtype(v).kind in "iu"]
    return ""


NEAR = 256
"""The most ops that are looked at upstream of places; a choice."""


def _chosen_places(op: Operation) -> str:
    """Find a resampling at places that follow from a topk, as in a DETR with deformable attention."""
    pending, seen = [op.coordinates], set[Operation]()
    for value in pending:
        if value.op is None or value.op in seen or len(seen) >= NEAR:
            continue
        if value.op.op_type == "topk":
            return f"boxes of a detector, where %{op.outputs[0].name} reads at places that a topk chose"
        seen.add(value.op)
        pending += [v for _, v in operands(value.op) if not is_stored(v)]
    return ""


WIDEST_HEAD = 256
"""The width up to which the report found fused attention right."""


def wide_attention(op: Operation) -> str:
    """Find fused attention whose heads are wider than `WIDEST_HEAD`."""
    width = op.query.shape[-1]
    is_wide = isinstance(width, int) and width > WIDEST_HEAD
    return f"the heads of %{op.query.name} are {width} wide" if is_wide else ""


def _wide_heads_of_several_queries(op: Operation) -> str:
    """Find fused attention with wide heads and more than one query."""
    return "" if op.query.shape[-2] == 1 else wide_attention(op)


LEAST_BATCH = 10
"""From this batch on attention with a bias was wrong on the GPU."""


def _biased_attention(op: Operation) -> str:
    """Find attention over a large batch, with a bias or mask that is added to its scores."""
    is_fused = op.op_type == "scaled_dot_product_attention"
    bias = op.inputs.get("attn_mask") if is_fused else producer(op.x, "add")
    scored = op.query if is_fused else op.x
    batch = scored.shape[0]
    if bias is None or not isinstance(batch, int) or batch < LEAST_BATCH:
        return ""
    if not is_fused:
        adds_to_product = any(producer(v, "matmul") for v in (bias.x, bias.y))
        if not adds_to_product or not _feeds_product(op.outputs[0]):
            return ""
    return f"%{op.outputs[0].name} is attention with an added bias, of batch {batch}"


def _feeds_product(var: Var) -> bool:
    """Does a matmul read a value?"""
    return any(reader.op_type == "matmul" for reader in consumers(var))


def decoder_of(op: Operation, op_type: str) -> Operation | None:
    """Return the op of a type, such as constexpr_lut_to_dense, that decodes an operand of an op."""
    producers = (var.op for _, var in operands(op) if var.op is not None)
    return next((decoder for decoder in producers if decoder.op_type == op_type), None)


def _signed_weights(op: Operation) -> str:
    """Find a weight stored as int8 around 0, as `mode="linear_symmetric"` does before iOS 18."""
    decoder = decoder_of(op, "constexpr_affine_dequantize")
    if decoder is None:
        return ""
    data = constant(decoder.quantized_data)
    zero = constant(decoder.zero_point)
    signed = data is not None and zero is not None and np.asarray(data).dtype == np.int8 and not np.any(zero)
    return f"%{decoder.outputs[0].name} is stored as int8 with the zero point 0" if signed else ""


def _palette_with_blocks(op: Operation) -> str:
    """Find the weight of a palette with several scales for one output channel."""
    decoder = decoder_of(op, "constexpr_blockwise_shift_scale")
    if decoder is None or producer(decoder.data, "constexpr_lut_to_dense") is None:
        return ""
    return _several_scales(decoder)


def _bytes_with_blocks(op: Operation) -> str:
    """Find a weight of 8-bit integers, as reported, with several scales for one output channel."""
    decoder = decoder_of(op, "constexpr_blockwise_shift_scale")
    if decoder is None or producer(decoder.data, "constexpr_lut_to_dense") is not None:
        return ""
    return _several_scales(decoder) if decoder.data.dtype.get_bitwidth() == 8 else ""


def _several_scales(decoder: Operation) -> str:
    """Return how many scales a weight has if there are several along two axes, channels and blocks; else ""."""
    if sum(isinstance(n, int) and n > 1 for n in decoder.scale.shape) < 2:
        return ""
    return f"%{decoder.outputs[0].name} has {'x'.join(map(str, decoder.scale.shape))} scales"


def _rank_5(op: Operation) -> str:
    """Find an op on a value of rank 5."""
    shape = static_shape(op.x) or op.x.shape
    return f"%{op.x.name} has rank 5" if len(shape) == 5 else ""


EXACT_IN_FP32 = 2**24
"""Up to this every integer is a number of fp32."""


def _large_integers(op: Operation) -> str:
    """Find arithmetic of integers with a constant beyond 2^24, from where on fp32 skips integers."""
    for _, var in operands(op):
        value = constant(var) if np_dtype(var).kind in "iu" else None
        if value is not None and np.abs(np.asarray(value, float)).max(initial=0.0) > EXACT_IN_FP32:
            return f"%{op.outputs[0].name} computes with the integers %{var.name}"
    return ""


def _fraction(op: Operation) -> str:
    """Report the remainder of a division by 1."""
    return f"%{op.x.name} modulo 1" if _numbers_of(op, "y") == [1] and np_dtype(op.x).kind == "f" else ""


def _power_of_two(op: Operation) -> str:
    """Report 2 to the power of a float."""
    base = _numbers_of(op, "x")
    return f"2 to the power of %{op.y.name}" if base and set(base) == {2} else ""


def _squeezed_steps(op: Operation) -> str:
    """Report a slice that drops an axis and has a stride."""
    drops, strides = (_numbers_of(op, name) for name in ("squeeze_mask", "stride"))
    step = next((stride for stride in strides if stride != 1), None) if any(drops) else None
    return "" if step is None else f"an axis is dropped beside a stride of {step}"


def _dilated_groups(op: Operation) -> str:
    """Find a dilated convolution of rank 3 with groups of several channels."""
    groups = constant(op.inputs.get("groups"))
    channels = op.x.shape[1]
    dilated = any(n > 1 for n in _numbers_of(op, "dilations"))
    if len(op.x.shape) != 3 or not dilated or groups is None or int(groups) in (1, channels):
        return ""
    return f"%{op.outputs[0].name} has {int(groups)} groups of several channels, dilated"


MASK_STEPS = 32
"""How many ops upstream of a mask are followed; masks of transformers need up to ten."""
MAKES_MASKS = POINTWISE | CARRIERS | names("slice_by_index tile")
"""Light ops, which run on the unit of the op before them."""
ENGINE_READS = frozenset({"fp16", "bool"})


def outside_mask(op: Operation) -> str:
    """Find a mask that no op on the engine computes: an input, a constant, or one computed from a cast.

    Attention in fp32 does not run on the engine.
    """
    mask = op.inputs.get("attn_mask")
    if mask is None or dtype_name(op.query) not in ENGINE_READS:
        return ""
    if mask.op is None:
        return f"it ignores the mask %{mask.name}, an input"
    if is_stored(mask):
        return f"it ignores the mask %{mask.name}, a constant"
    words = cast_mask(op)
    return f"it ignores the mask: {words}" if words else ""


def cast_mask(op: Operation) -> str:
    """Find a mask that light ops compute from integers or fp32, which the engine does not read."""
    mask = op.inputs.get("attn_mask")
    if mask is None or mask.op is None:
        return ""
    pending, path = [mask.op], list[Operation]()
    outside: list[Var] = []  # values of dtypes that the engine does not read
    while pending and len(path) < MASK_STEPS:
        current = pending.pop()
        if current.op_type not in MAKES_MASKS:
            return ""  # an op that may run on the engine contributes
        path.append(current)
        read = dict.fromkeys(v for _, v in operands(current) if not is_stored(v))
        outside += [v for v in read if dtype_name(v) not in ENGINE_READS and v not in outside]
        pending += [v.op for v in read if v.op is not None and v not in outside and v.op not in path]
    if not outside or pending:
        return ""
    steps = ", ".join(dict.fromkeys(maker.op_type for maker in reversed(path)))
    return f"the mask %{mask.name} is made of %{outside[0].name} ({dtype_name(outside[0])}) through {steps}"


MOST_SHUFFLED = 256
"""Up to so many channels a pixel_shuffle of a convolution was right."""


def _biased_shuffle(op: Operation) -> str:
    """Find a pixel_shuffle of many channels of a convolution with a bias; light ops between did not help."""
    var, biased, channels = op.x, False, op.x.shape[1]
    while var.op is not None and var.op.op_type in POINTWISE:
        read = [v for _, v in operands(var.op) if not is_stored(v)]
        if len(read) != 1:
            return ""
        biased |= var.op.op_type in ("add", "sub")
        var = read[0]
    conv = producer(var, "conv")
    if conv is None or not isinstance(channels, int) or channels <= MOST_SHUFFLED:
        return ""
    bias = constant(conv.inputs.get("bias"))
    if not biased and (bias is None or not np.any(bias)):
        return ""
    return f"the bias of %{var.name} goes to the wrong ones of {channels} channels"


def _negative_places(op: Operation) -> str:
    """Find a gather at constant places that are counted from the end, as ops before iOS 17 count them."""
    if "validate_indices" in op.inputs or not any(place < 0 for place in _numbers_of(op, "indices")):
        return ""
    axis = op.x.shape[int(constant(op.axis) or 0)]
    return f"it counts places from the end of {axis}"


MOST_SCORES = 2**20
"""From so many scores of one head on attention was wrong; with 1,023 queries over 1,023 keys it was right."""
WIDE_VALUES = 256
"""The width of the heads of that model; narrower heads were right at 1,024 and 2,048 tokens."""


def _many_scores(op: Operation) -> str:
    """Find the softmax of attention with many scores and wide heads."""
    shape = static_shape(op.x)
    if shape is None or len(shape) < 3 or shape[-2] * shape[-1] < MOST_SCORES:
        return ""
    products = (r for r in consumers(op.outputs[0]) if r.op_type == "matmul" and r.x is op.outputs[0])
    widths = [r.y.shape[-1] for r in products]
    is_wide = any(isinstance(n, int) and n >= WIDE_VALUES for n in widths)
    return f"{shape[-2]} x {shape[-1]} scores, with heads of {max(widths)}" if is_wide else ""


def _coremltools(what: str) -> str:
    """Cite an issue or pull request of coremltools."""
    return f"apple/coremltools: {what}"


def _coreai_torch(what: str) -> str:
    """Cite an issue of coreai-torch."""
    return f"apple/coreai-torch: {what}"


FAULTS: tuple[Fault, ...] = (
    Fault(
        "softplus-cliff",
        names("softplus"),
        what=f"softplus gives 0 for inputs of {SOFTPLUS_CLIFF:g} or more; mish uses it and is wrong there too",
        source=f"{_coremltools('issues 2687, 2359, pull request 2618')}; sbryngelson/ANEForge: issue 113",
        seen="M1 Pro (through mish) and M3 Max, macOS 26, CPU_AND_NE; M4, ALL; M5, macOS 26.5, through "
        "ANEForge",
        chips=("M1", "M3", "M4", "M5"),
        systems=(("macOS", 26),),
        fp16_only=True,
        least_input=lambda op: SOFTPLUS_CLIFF,
        simulate=_softplus,
        remedy="replace_faulty_ops",
        advice="write softplus(min(x, 10)) + max(x - 10, 0), or max(x, 0) + log(1 + exp(-|x|))",
    ),
    Fault(
        "log-sum-cliff",
        names("reduce_log_sum_exp"),
        what="reduce_log_sum_exp does not subtract the maximum first: if the sum of exponentials exceeds "
        "65504, it gives 0",
        source=f"{_coremltools('issue 2690, pull request 2726')}; rustnn/rustnn: pull request 213; "
        "FluidInference/mobius: models/computer-use/lfm350/coreml/reports/ane-optimization",
        seen="M3 Max, macOS 26, CPU_AND_NE; in the scores of a language model on an unnamed Mac, CPU_AND_NE",
        chips=("M3",),
        systems=(("macOS", 26),),
        fp16_only=True,
        least_input=lambda op: fp16.LARGEST_EXPONENT - math.log(_terms(op)),
        simulate=_log_sum,
        remedy="replace_faulty_ops",
        advice="subtract the maximum before the exponentials",
    ),
    Fault(
        "hard-swish-rank-2",
        names("sigmoid_hard"),
        what="a hard swish after a matrix product of rank 2 was off by 0.2 (3.9 %); after the same product as "
        "1x1xMxN, it was correct",
        source=_coreai_torch("issue 51"),
        seen="a Mac, Core AI, fp16; chip not given",
        runtime="Core AI",
        form=_rank_2_hard_swish,
        remedy="replace_faulty_ops",
        advice="give the matrix product rank 4",
    ),
    Fault(
        "hard-swish-mobile-net",
        names("sigmoid_hard"),
        what="MobileNetV3 Small was off by 0.19 to 0.26 with ALL and by 0.06 to 0.09 on the CPU; ResNet18 was "
        "correct. On Core AI, the cause was the hard swish after a matrix product of rank 2",
        source=f"{_coremltools('issue 2625')}; {_coreai_torch('issue 51')}",
        seen="M4 with ALL, as a whole model; the op alone on a Mac with Core AI, chip not given",
        form=_rank_2_hard_swish,
        fp16_only=True,
        remedy="replace_faulty_ops",
        advice="give the matrix product rank 4",
    ),
    Fault(
        "argmax-narrow",
        names("reduce_argmax"),
        what="argmax of fp16 scores gave a wrong class map, the same one each time; argmax of fp32 scores was "
        "correct",
        source=_coreai_torch("issue 116"),
        seen="iPhone 17 Pro (A19 Pro), iOS 27.0, Core AI, default units",
        chips=("A19",),
        systems=(("iOS", 27),),
        runtime="Core AI",
        form=_fp16_scores,
        remedy="replace_faulty_ops",
        advice="cast the scores to fp32 first, or take the argmax in the app",
    ),
    Fault(
        "topk-gather",
        names("topk"),
        what="a topk of fp16 scores, followed by a gather with its indices, gave confidences of 0; in fp32 "
        "they were correct",
        source=_coreai_torch("issue 115"),
        seen="iPhone 17 Pro (A19 Pro), iOS 27.0, Core AI, default units",
        chips=("A19",),
        systems=(("iOS", 27),),
        runtime="Core AI",
        form=_gathered_places,
        advice="do the topk in the app, or keep the last layers in fp32",
    ),
    Fault(
        "chosen-places",
        names("resample"),
        what="RT-DETR, a detector with deformable attention around its top queries, lost accuracy: mAP 0.485 "
        "with CPU_AND_NE, 0.732 on the CPU, 0.714 with ALL. Detectors without such attention (YOLO26) were "
        "correct. Boxes and masks of RF-DETR were shifted with ALL, and correct with CPU_AND_GPU or in fp32. "
        "Which op is wrong is not known",
        source="ultralytics/ultralytics: pull requests 24510, 24944, 24999; software-mansion/"
        "react-native-executorch: issue 1406",
        seen="M5, macOS 26.5.1, CPU_AND_NE; RF-DETR on iOS, ALL, device not given",
        chips=("M5",),
        systems=(("macOS", 26),),
        units="engine alone",
        form=_chosen_places,
        fp16_only=True,
        advice="load it with CPU_AND_GPU, or keep linear and gather in fp32 when you convert",
    ),
    Fault(
        "conv-uneven-kernel",
        names("conv"),
        what="a convolution with kernel 3x2, padding 1 and stride 2 gave a wrong last value for two channels",
        source=_coremltools("issue 2515"),
        seen="a Mac; chip and compute units not given",
        form=_uneven_kernel,
        units="any",
        remedy="replace_faulty_ops",
        advice="pad the kernel with zeros to 3x3",
    ),
    Fault(
        "conv-transpose-shape",
        names("conv_transpose"),
        what="conv_transpose with an output_shape that crops the two ends unevenly gave different outputs with "
        "ALL than on the CPU, and shifted outputs in fp16",
        source=_coremltools("issues 2281, 2324"),
        seen="a Mac, ALL compared with CPU_ONLY, chip not given; shifted in fp16 on M1, macOS 14.3",
        chips=("M1",),
        systems=(("macOS", 14),),
        form=_cut_by_output_shape,
        units="any",
        remedy="replace_faulty_ops",
        advice="leave output_shape out, and give the padding instead",
    ),
    Fault(
        "resample-pixels",
        names("resample"),
        what="resample gave different results for unnormalized coordinates than for the same points in "
        "normalized coordinates, in fp32 too",
        source=_coremltools("pull request 2752"),
        seen="a Mac, macOS 14 (macOS 15 was correct)",
        systems=(("macOS", 14),),
        form=_unnormalized,
        units="any",
        remedy="replace_faulty_ops",
        advice="normalize the coordinates to [-1, 1]",
    ),
    Fault(
        "depthwise-concat",
        names("conv"),
        what="a depthwise convolution of 1,600 channels after a concat gave a constant (0.2047)",
        source="developer.apple.com/forums/thread/720810",
        seen="iPhone 13 and 14 (A15)",
        chips=("A15",),
        form=_many_channels_depthwise,
        remedy="replace_faulty_ops",
        advice="convolve the parts before the concat",
    ),
    Fault(
        "fp32-output",
        names("cast"),
        what="fp32 outputs were broken on the engine under iOS 18; the same outputs as fp16 were correct",
        source="gist niw/a56d89d70d895dd26f905b90c98f1db4",
        seen="iPhone 15 Pro (A17 Pro), iOS 18",
        chips=("A17",),
        systems=(("iOS", 18),),
        form=_fp32_images,
        common=True,
        remedy="interface_fp16",
        advice="convert with fp16 outputs for iOS 16 or later (for a model for iOS 15, set newer_opset=True)",
    ),
    Fault(
        "gru",
        names("gru"),
        what="the op gru gave wrong results on every unit; with the GPU sandbox off, the CPU was correct",
        source="webmachinelearning/webnn: issue 689",
        seen="a Mac, in Chromium; chip not given",
        units="any",
        remedy="unroll_recurrent",
        advice="write the recurrence with linear, sigmoid and tanh",
    ),
    Fault(
        "attention-wide-heads",
        names("scaled_dot_product_attention"),
        what="fp16 fused attention with a head dimension above 256 and two or more queries crashed on the CPU; "
        "with one query, or a head dimension of 256, it ran",
        source="kasper0406/stablehlo-coreml: pull request 89",
        seen="a Mac, macOS 26.5 and 26.6; chip not given",
        systems=(("macOS", 26),),
        form=_wide_heads_of_several_queries,
        fp16_only=True,
        units="any",
        ends_process=True,
        remedy="decompose_attention",
        advice="write the attention as matmul, softmax and matmul",
    ),
    Fault(
        "attention-mask",
        names("scaled_dot_product_attention"),
        what="fused attention ignored a mask unless an op in the same part of the engine's program computed "
        "it: wrong results, and no error. In OpenELM, each token saw later tokens, with float masks, boolean "
        "masks and is_causal alike. In Gemma 4, tokens saw the empty slots of the cache",
        source="ironblock/sidekick: docs/MODELS.md, docs/DECISIONS.md (D24, D25, D27); "
        "Thiruloksundar/llm-inference-macOS: README.md (F1), evidence/e11; "
        "kasper0406/gemma-coreml-chat: README.md",
        seen="M1 Max, macOS 27.0; M4, macOS 26.6.2, where the mask is a constant; M4 Pro, macOS 27",
        chips=("M1", "M4"),
        systems=(("macOS", 26), ("macOS", 27)),
        since=(("macOS", 26), ("iOS", 26)),
        form=outside_mask,
        remedy="decompose_attention",
        advice="write the attention as matmul, softmax and matmul",
    ),
    Fault(
        "shuffle-bias",
        names("pixel_shuffle"),
        what="a pixel_shuffle after a convolution with a bias and 512 channels was off by 1.09 standard "
        "deviations: the bias was added to the wrong channels. Without a bias, with 256 channels, or on the "
        "CPU, it was correct",
        source="dmlsrc/KinoVSR: scripts/dev/probe_bsvd_ane.py, kinovsr/native/anemil",
        seen="M1 Max, macOS 26, a video denoiser (BSVD)",
        chips=("M1",),
        systems=(("macOS", 26),),
        form=_biased_shuffle,
        remedy="replace_faulty_ops",
        advice="write the shuffle as reshape, transpose and reshape, or add the bias after it",
    ),
    Fault(
        "gather-negative",
        names("gather"),
        what="a gather at index -1 of 288 elements gave different results than on the CPU (correlation 0.03); "
        "at index 287 it was correct. On another Mac, a gather at index -1 of three elements gave the first "
        "one",
        source="zoompilot/jetlink: jetlink/onnx_patch.py, docs/mac-performance.md; rustnn/rustnn: pull request "
        "227",
        seen="M1 Pro, macOS 26.5, through ONNX Runtime; the three elements on an M4, compute units not given",
        chips=("M1",),
        systems=(("macOS", 26),),
        form=_negative_places,
        remedy="replace_faulty_ops",
        advice="use the equivalent index from the front",
    ),
    Fault(
        "attention-scores",
        names("softmax"),
        what="the attention of EmbeddingGemma (head dimension 256) was wrong from 1,024 tokens on (2^20 "
        "scores per head), with and without a mask. With 1,023 tokens, or with two blocks of 512 queries, it "
        "was correct. ModernBERT was correct with 2,048 tokens",
        source="xhighhongo41/eeANE: backends/gemma3.py",
        seen="M2, macOS 26",
        chips=("M2",),
        systems=(("macOS", 26),),
        form=_many_scores,
        remedy="tile_queries",
        advice="compute the queries in blocks",
    ),
    Fault(
        "attention-batch",
        names("softmax scaled_dot_product_attention"),
        what="attention with an additive bias was wrong on the GPU for batches of 10 or more; on the CPU and "
        "the engine it was correct",
        source=_coremltools("issue 2650"),
        seen="a Mac, macOS 26.2, any compute units with the GPU; chip not given",
        systems=(("macOS", 26),),
        form=_biased_attention,
        units="gpu",
        advice="use CPU_AND_NE, or run batches of at most 9",
    ),
    Fault(
        "int8-zero-point",
        PRODUCTS,
        what="MiDaS with int8 weights and zero point 0 (linear_symmetric) gave infinity with CPU_AND_NE and "
        "one constant with CPU_AND_GPU; with CPU_ONLY it was correct",
        source=_coremltools("issue 2114, pull requests 2675, 2677"),
        seen="a Mac, coremltools 7.1; chip not given",
        form=_signed_weights,
        remedy="replace_faulty_ops",
        advice="store the weights as uint8 with zero point 128, or convert for iOS 18",
    ),
    Fault(
        "block-scales",
        PRODUCTS,
        what="8-bit weights with a scale for each block gave wrong outputs (cosine 0.37); on the GPU, and with "
        "a palette on the engine, the outputs were correct",
        source="apple/coreai-models: issue 279",
        seen="iPhone 16 Pro Max (A18 Pro), iOS 27.0, Core AI",
        chips=("A18",),
        systems=(("iOS", 27),),
        runtime="Core AI",
        form=_bytes_with_blocks,
        advice="store one scale for each output channel, or a palette",
    ),
    Fault(
        "palette-block-scales",
        PRODUCTS,
        what="a convolution with a palette and two scales for each output channel used the wrong scales: 1,921 "
        "of 4,096 results were wrong. Two convolutions with one scale each were correct",
        source=_coreai_torch("issue 93"),
        seen="M5 Pro, macOS 27.0, Core AI",
        chips=("M5",),
        systems=(("macOS", 27),),
        runtime="Core AI",
        form=_palette_with_blocks,
        advice="split the convolution where the scales change, or store one scale for each channel",
    ),
    Fault(
        "batch-norm-volume",
        names("batch_norm"),
        what="a batch_norm of rank 5 (BatchNorm3d) crashed",
        source=f"pytorch/executorch: issue 11701; {_coremltools('issues 2276, 2572')}",
        seen="Core ML through ExecuTorch; chip not given",
        form=_rank_5,
        units="any",
        ends_process=True,
        remedy="replace_faulty_ops",
        advice="replace it with a multiplication and an addition, or fold it into the convolution before it",
    ),
    Fault(
        "instance-norm-volume",
        names("instance_norm"),
        what="an instance_norm of rank 5 (InstanceNorm3d) crashed on the GPU, with ALL too; on the CPU it was "
        "correct. Core ML documents ranks 3 and 4",
        source=_coremltools("issue 2667, pull request 2820"),
        seen="a Mac, CPU_AND_GPU and ALL, coremltools 9; chip not given",
        form=_rank_5,
        units="gpu",
        ends_process=True,
        remedy="replace_faulty_ops",
        advice="merge two of the three spatial axes before it, and split them after it",
    ),
    Fault(
        "large-integers",
        names("add sub mul minimum maximum floor_div mod"),
        what="int32 arithmetic ran in fp32: integers near 2^31 lost their last digits",
        source="rustnn/rustnn: pull request 183",
        seen="a Mac, in the tests of WebNN; chip and compute units not given",
        form=_large_integers,
        units="any",
        advice="keep integers below 2^24, or split each integer into two smaller ones",
    ),
    Fault(
        "mod-fraction",
        names("mod"),
        what="the phases of Kokoro (a quotient modulo 1) were wrong: the spectrum had a correlation of 0.67 to "
        "PyTorch, and of 0.996 with x - floor(x)",
        source="john-rocky/CoreML-Models: pull request 74",
        seen="device, OS and compute units not given",
        form=_fraction,
        units="any",
        remedy="decompose_ops",
        advice="write it as x - floor(x)",
    ),
    Fault(
        "power-of-two",
        names("pow"),
        what="pow with the constant base 2 gave the square of the exponent: 2^0 was 0. With other bases, and "
        "with a constant exponent of 2, it was correct",
        source=_coremltools("issue 2628, pull request 2742"),
        seen="a Mac, fp16 and fp32, November 2025 to July 2026; chip and compute units not given",
        form=_power_of_two,
        units="any",
        remedy="replace_faulty_ops",
        advice="write it as exp(x * log(2)), or as torch.exp2(x)",
    ),
    Fault(
        "slice-squeezed-stride",
        names("slice_by_index"),
        what="squeeze_mask was ignored where another axis has a stride: the result kept the axis of length 1",
        source=_coremltools("issue 1710"),
        seen="a Mac, December 2022; chip and compute units not given",
        form=_squeezed_steps,
        units="any",
        advice="leave squeeze_mask out, and squeeze the result",
    ),
    Fault(
        "conv-dilated-groups",
        names("conv"),
        what="a dilated convolution of rank 3 with two groups of several channels crashed",
        source=f"{_coremltools('issue 2574')}; pytorch/executorch: issue 11688",
        seen="M1 Pro, macOS 15, coremltools 8.3 and 9; macOS 15.6, chip not given",
        chips=("M1",),
        systems=(("macOS", 15),),
        form=_dilated_groups,
        ends_process=True,
        remedy="replace_faulty_ops",
        advice="convolve each group by itself, and join the results",
    ),
)


def with_faults(op: Operation, function: Function, chip: str | None) -> Function:
    """Return the function that computes an op with the faults of a chip, or of all chips if none is named.

    A report that names no chip is none about the named one.
    """
    for fault in FAULTS:
        concerns_chip = chip is None or chip in fault.chips
        # the engine computes every op in fp16, whatever its dtype, as it does layers
        if fault.simulate is not None and concerns_chip and fault.found(op, layer=True):
            function = fault.simulate(op, function)
    return function
