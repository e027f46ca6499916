"""Rules about loading: the OS release that a model's version needs, and loads that were reported to fail.

A `LoadReport` describes one load that crashed, hung, or failed. On its chips, OS and units it becomes
a claim; elsewhere a warning of a lower grade, since such a load may succeed on another chip. A claim that
nothing loads has the kind "load", which `inspect` shows first. Unlike other tables, this one covers the GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

import numpy as np

from anesurgery.interpret.arithmetic.engine_faults import WIDEST_HEAD, wide_attention
from anesurgery.mil import (
    Function,
    Operation,
    Var,
    constant,
    consumers,
    ct,
    dtype_name,
    is_output,
    is_symbolic,
    producer,
    static_shape,
    walk_ops,
)
from anesurgery.ops import ATTENTION, MOVING, names
from anesurgery.placement.evidence import Finding, Grade, Rule, Scope, general
from anesurgery.placement.target import CHIPS, Target
from anesurgery.semantics.reading import axes_of, counts_back_over_one, readers_after, value_before

KIND = "load"
"""The kind of findings that say that the model does not load; each is an error, and shown first."""

TOO_NEW = general(
    "opset",
    "an OS refuses a model with a newer specification, so nothing runs there",
    "coremltools: minimum_deployment_target (AvailableTarget)",
    grade=Grade.DOCUMENTED,
    kind=KIND,
    advice="convert for the oldest OS that you support, without ops of newer ones, or require a newer OS",
)


def releases(platform: str) -> dict[int, int]:
    """Return {major release: its specification version} of "iOS" or "macOS", as coremltools lists them."""
    named = {n: re.fullmatch(rf"{platform}(\d+)(_\d+)?", n) for n in ct.target.__members__}
    return {int(m[1]): int(ct.target[name].value) for name, m in named.items() if m and not m[2]}


def of_version(version: int, target: Target) -> tuple[Finding, ...]:
    """Return a finding if the OS of a target cannot load a specification version; none if it names no OS.

    Args:
        version: the version of the model's specification, or the newest opset of its functions.
        target: chips and OS.
    """
    if target.platform is None or target.os is None:
        return ()
    newest = _newest(target.platform, target.os)
    if newest is None or version <= newest:
        return ()
    version_of = releases(target.platform)
    first = min((release for release, value in version_of.items() if value >= version), default=None)
    needs = "a newer release" if first is None else f"{target.platform} {first}"
    return (
        TOO_NEW.finding(
            f"{target.platform} {target.os} cannot load it: specification {version} needs {needs}, and "
            f"{target.platform} {target.os} takes up to {newest}"
        ),
    )


def newest_for(target: Target) -> int:
    """Return the newest specification version that loads on a target's OS, or else its chips' first OS."""
    systems = {(CHIPS[chip].platform, CHIPS[chip].first_os) for chip in target.chips}
    if target.platform is not None and target.os is not None:
        systems = {(target.platform, target.os)}
    newest = [_newest(*each) for each in systems]
    return min((n for n in newest if n is not None), default=max(releases("iOS").values()))


def _newest(platform: str, os: int) -> int | None:
    """Return the newest specification version of a release; None for a release unknown to coremltools."""
    version_of = releases(platform)
    if os > max(version_of):
        return None
    return max(value for release, value in version_of.items() if release <= os)


def refusal(findings: Sequence[Finding]) -> str:
    """Return why the model does not load, in words; "" if no finding says so."""
    return next((f.message for f in findings if f.kind == KIND), "")


STATE_IN_RANGE = general(
    "state-range",
    "a model with a state was aborted at load if one input had a fixed size and another a range "
    '(EnumeratedWithRangeInputsException: "a mixture of enumerated and range shape flexibility"). Without the '
    "state it ran; other mixtures with a state failed in other ways",
    "apple/coremltools: issue 2548",
    grade=Grade.REPORTED,
    scope=Scope(os="seen on an unnamed Mac"),
    kind="memory",
    advice="fix all sizes (fix_shapes), or keep the state as an input and an output (cache_as_io)",
)
"""The rule about a mixture of inputs; `whole_model` finds it, since ops do not tell a range from a list."""
EMPTY_SLICE = general(
    "dyn-range-empty",
    "a model compiled and failed at run time, with a slice of an input whose range starts at length 0, even "
    "along another axis; with a range from 1 on it ran",
    "apple/coremltools: issue 2516",
    grade=Grade.REPORTED,
    kind="memory",
    scope=Scope(os="seen on an unnamed Mac in May 2025"),
    advice="let the range start at 1 (lower_bound=1), or fix the sizes",
)
"""The rule about a range from 0 on; `whole_model` finds it."""

ENGINE, GPU, BOTH = frozenset({"ANE"}), frozenset({"GPU"}), frozenset({"ANE", "GPU"})
ALL = BOTH | {"CPU"}


class Outcome(Enum):
    """What was seen of a model; the value completes "reported to"."""

    UNIT_FAILED = "fail"  # other units may run it
    FAILED_EVERYWHERE = "fail on every unit"
    ABORTED = "abort"  # the process ended, so that no unit ran it
    REFUSED_BY_PARSER = "be refused by Core ML"  # the specification itself, on every chip and OS


@dataclass(frozen=True)
class LoadReport:
    """One report of a load that failed, with the form of program that caused it."""

    id: str
    what: str
    """What happened, as a sentence without a full stop."""
    source: str
    seen: str
    """Chip, OS and units, as the report names them."""
    units: frozenset[str]
    """The report applies only if Core ML may use one of these units; it may always use the CPU."""
    form: Callable[[list[Operation]], str]
    """Returns which of a function's ops have the form, in words; "" where none has it."""
    advice: str
    chips: tuple[str, ...] = ()
    """The chips of `seen`, without Pro or Max; empty where the report names none."""
    systems: tuple[tuple[str, int], ...] = ()
    """The (platform, release) pairs of `seen`; empty where the report names none."""
    remedy: str | None = None
    outcome: Outcome = Outcome.UNIT_FAILED
    common: bool = False
    """Whether many models have the form. Then the row speaks only for a target that names this chip and OS."""
    loaded_on: tuple[tuple[str, int], ...] = ()
    """The (platform, release) pairs on which somebody else's model of this form ran, on the same chips."""
    of_varying_sizes: bool = False
    """Is the form about symbolic sizes, which are fixed for the other forms?"""

    def is_relevant(self, target: Target) -> bool:
        """May Core ML use a unit of the report?"""
        used = {"CPU"} | ({"ANE"} if target.uses_ane else set()) | ({"GPU"} if target.uses_gpu else set())
        return bool(self.units & used)

    def is_claim(self, target: Target) -> bool:
        """Are all chips and the OS of the target in the report?

        A report without either makes no claim, unless the parser refuses the model. Where a model of the form
        ran, there is none either.
        """
        if (target.platform, target.os) in self.loaded_on:
            return False
        on_chips = not self.chips or set(target.chips) <= set(self.chips)
        on_system = not self.systems or (target.platform, target.os) in self.systems
        return on_chips and on_system and self.makes_claims

    def may_be_claim(self, target: Target) -> bool:
        """Are all chips of a target without an OS in the report? Then it is a claim on an OS of the target."""
        return bool(self.chips) and target.os is None and set(target.chips) <= set(self.chips)

    @property
    def makes_claims(self) -> bool:
        """Does it name a chip or an OS, or did the parser refuse the model, on whatever chip?"""
        return bool(self.chips or self.systems) or self.outcome is Outcome.REFUSED_BY_PARSER

    def rule(self, target: Target) -> Rule:
        """Return the rule of the report: a claim or a warning, and of the kind "load" if nothing loads.

        If the GPU alone fails, a target with the engine may still load, and so may a target without an OS on
        other releases. Then the load may fail, as that of a model which needs too much memory, and the finding
        is of that kind.
        """
        families = frozenset(CHIPS[name].family for name in self.chips)
        is_claim = self.is_claim(target)
        is_seen = is_claim or self.may_be_claim(target)
        another_unit = self.outcome is Outcome.UNIT_FAILED or (target.uses_ane and "ANE" not in self.units)
        return general(
            self.id if is_seen else f"{self.id}-elsewhere",
            self.what,
            self.source,
            kind="memory" if another_unit or not is_claim else KIND,
            grade=Grade.REPORTED if is_seen else Grade.GUESS,
            scope=Scope(families if is_seen else frozenset(), f"seen on {self.seen}"),
            remedy=self.remedy,
            advice=self.advice,
        )


def _counted(ops: Iterable[Operation], what: str) -> str:
    """Return words such as "2 pads of an axis, first %y" for ops with the result %y; "" for none.

    Args:
        ops: the ops.
        what: the words for one, with a star where several have an s: "pad* of an axis".
    """
    return _named((op.outputs[0] for op in ops), what)


def _named(values: Iterable[Var], what: str) -> str:
    """Return such words for values."""
    different = list(dict.fromkeys(v.name for v in values))
    words = what.replace("*", "s" * (len(different) > 1))
    return f"{len(different)} {words}, first %{different[0]}" if different else ""


def _int8_weights(ops: list[Operation]) -> str:
    """Find weights of 8 bits with scales."""
    data = {"constexpr_affine_dequantize": "quantized_data", "constexpr_blockwise_shift_scale": "data"}
    stored = ((op, op.inputs[data[op.op_type]]) for op in ops if op.op_type in data)
    int8 = (op for op, v in stored if isinstance(v, Var) and dtype_name(v) in ("int8", "uint8"))
    return _counted(int8, "weight* of 8 bits")


def _scaled_palettes(ops: list[Operation]) -> str:
    """Find palettes with scales, either of the tables or of the looked-up weights."""
    lookup, scale = "constexpr_lut_to_dense", "constexpr_blockwise_shift_scale"
    tables = [op for op in ops if op.op_type == lookup and producer(op.lut, scale) is not None]
    after = [op for op in ops if op.op_type == scale and producer(op.data, lookup) is not None]
    return _counted([*tables, *after], "palette* with scales")


POOL_FACTOR = 8
"""The factor by which the reported network pools, and upsamples again."""
NEAREST = names("upsample_nearest_neighbor resize_nearest_neighbor")


def _nearest_beside_pool(ops: list[Operation]) -> str:
    """Find nearest upsamplings by a factor in a function with max pools of that size."""
    n = POOL_FACTOR
    pools = [op for op in ops if op.op_type == "max_pool" and list(op.kernel_sizes.val) == [n, n]]
    large = [op for op in ops if op.op_type in NEAREST and _upsamples_by_factor(op)]
    words = _counted(large, f"nearest upsampling* by {n}")
    return f"{words}, beside max pools of {n}x{n}" if pools and large else ""


def _upsamples_by_factor(op: Operation) -> bool:
    shapes = [static_shape(v) for v in (op.x, op.outputs[0])]
    return all(s is not None for s in shapes) and all(
        new == POOL_FACTOR * old
        for old, new in zip(shapes[0][-2:], shapes[1][-2:], strict=True)  # type: ignore[index]
    )


SCATTERS = names("scatter scatter_along_axis scatter_nd")


def _written_caches(ops: list[Operation]) -> str:
    """Find scatters into an input or a state: a cache."""
    into = [op for op in ops if op.op_type in SCATTERS and _writes_cache(op)]
    return _counted(into, "cache* written by scatter")


def _writes_cache(op: Operation) -> bool:
    data = value_before(op.data)
    return data.op is None or data.op.op_type == "read_state"


def _repeated_heads(ops: list[Operation]) -> str:
    """Find keys or values of rank 5 that are repeated for the heads of a group."""
    tiles = [op for op in ops if op.op_type == "tile" and op.x.rank == 5]
    read = (op for op in tiles if any(r.op_type in ATTENTION for r in readers_after(op.outputs[0])))
    return _counted(read, "value* of rank 5, repeated for the heads of a group")


def _unread_writes(ops: list[Operation]) -> str:
    """Find writes of a state whose result nothing reads: the op gives what the state holds then."""
    writes = (op for op in ops if op.op_type == "coreml_update_state")
    unread = (op for op in writes if not consumers(op.outputs[0]) and not is_output(op.outputs[0]))
    return _counted(unread, "write* of a state that nothing reads")


def _shifted_states(ops: list[Operation]) -> str:
    """Find states that are written with a part of themselves and new values behind it."""
    written = [op.inputs["value"] for op in ops if op.op_type == "coreml_update_state"]
    written = [v.op.inputs["update"] if producer(v, "slice_update") is not None else v for v in written]
    joins = [op for v in written if (op := producer(v, "concat")) is not None]
    parts = [(op, producer(op.inputs["values"][0], "slice_by_index")) for op in joins]
    shifted = (op for op, part in parts if part is not None and producer(part.x, "read_state") is not None)
    return _counted(shifted, "state* shifted and joined to a new value")


def _wide_attentions(ops: list[Operation]) -> str:
    """Find fused attentions with wide heads, if there are at least two."""
    fused = (op for op in ops if op.op_type == "scaled_dot_product_attention")
    wide = [op for op in fused if wide_attention(op)]
    return _counted(wide, f"fused attention* with heads wider than {WIDEST_HEAD}") if len(wide) > 1 else ""


def _flat_attentions(ops: list[Operation]) -> str:
    """Find attention on values of rank 3, where batch and heads share one axis."""
    products = [op for op in ops if op.op_type == "matmul" and len(op.outputs[0].shape) == 3]
    weights = (softmax for op in products if (softmax := producer(op.x, "softmax")) is not None)
    return _counted(weights, "attention* of rank 3")


def _transposed_weights(ops: list[Operation]) -> str:
    """Find values times transposed attention weights, as in C2PSA of YOLO11 and YOLO26."""
    products = []
    for op in (op for op in ops if op.op_type == "matmul"):
        transpose = producer(op.y, "transpose")
        untransposed = op.y if op.transpose_y.val else None
        weights = untransposed if transpose is None else transpose.x
        if producer(weights, "softmax") is not None:
            products.append(op)
    return _counted(products, "product* of values with transposed attention weights")


def _edges_before_last_two(ops: list[Operation]) -> str:
    """Find edges that are mirrored or repeated along an axis before the last two."""
    pads = (op for op in ops if op.op_type == "pad" and constant(op.mode) in ("reflect", "replicate"))
    refused = (op for op in pads if any(constant(op.pad)[:-4]))  # two amounts for each axis, the last axis last
    return _counted(refused, "pad* of an axis before the last two")


RECURRENT = names("lstm gru rnn")


def _recurrent(ops: list[Operation]) -> str:
    """Find recurrent ops."""
    return _counted((op for op in ops if op.op_type in RECURRENT), "recurrent op*")


def _passed_inputs(ops: list[Operation]) -> str:
    """Find inputs that a function returns as they are."""
    blocks = dict.fromkeys(op.enclosing_block for op in ops)
    functions = [block for block in blocks if block is not None and block.outer_op is None]
    passed = (v for function in functions for v in function.outputs if v.op is None)
    return _named(passed, "input* returned as given")


def _returned_writes(ops: list[Operation]) -> str:
    """Find values that are written to a state, or into one, and are outputs too."""
    values = [op.inputs["value"] for op in ops if op.op_type == "coreml_update_state"]
    values += [v.op.inputs["update"] for v in values if producer(v, "slice_update") is not None]
    return _named((v for v in values if is_output(v)), "output* written to a state")


def _raised_numbers(ops: list[Operation]) -> str:
    """Find outputs that are a computed number, given an axis."""
    reshapes = [op for op in ops if op.op_type in ("expand_dims", "reshape") and is_output(op.outputs[0])]
    raised = (op for op in reshapes if op.x.rank == 0 and op.x.op is not None)
    return _counted(raised, "output* made of a number")


def _vector_products(ops: list[Operation]) -> str:
    """Find products of a vector and a batch of matrices."""
    products = [op for op in ops if op.op_type == "matmul" and min(op.x.rank, op.y.rank) == 1]
    batched = (op for op in products if max(op.x.rank, op.y.rank) > 2)
    return _counted(batched, "product* of a vector and a batch")


def _varying_means(ops: list[Operation]) -> str:
    """Find means of values whose sizes vary."""
    means = [op for op in ops if op.op_type == "reduce_mean" and any(map(is_symbolic, op.x.shape))]
    return _counted(means, "mean* of values whose sizes vary")


GUARDS = MOVING | names("clip maximum add cast")
"""Ops between the count of a mask and the quotient."""


def _masked_means(ops: list[Operation]) -> str:
    """Find means by a mask over an axis whose length varies: a sum is divided by the sum of the mask."""
    quotients = []
    for op in (op for op in ops if op.op_type == "real_div"):
        total, count = producer(op.x, "reduce_sum"), producer(value_before(op.y, GUARDS), "reduce_sum")
        lengths = () if total is None or count is None else [total.x.shape[axis] for axis in axes_of(total)]
        if any(map(is_symbolic, lengths)):
            quotients.append(op)
    return _counted(quotients, "mean* by a mask over a length that varies")


PARTS = names("cast identity slice_by_index split squeeze")
"""Ops between a list of places and the places along one axis."""


def _places(ops: list[Operation]) -> str:
    """Find places along one axis, with a length that depends on the input; a list of all places has two."""
    values = []
    for op in ops:
        if (
            op.op_type in ("squeeze", "slice_by_index")
            and op.outputs[0].rank == 1
            and is_symbolic(op.outputs[0].shape[0])
        ):
            listed = producer(value_before(op.x, PARTS), "non_zero")
            values += [op] * (listed is not None)
    return _counted(values, "list* of places along one axis")


LEAST_SCALES = 1024
"""From this many numbers on the scale of a norm between two reshapes did not compile on M1 and M2."""


def _scaled_between_reshapes(ops: list[Operation]) -> str:
    """Find norms whose scale or shift, of unequal numbers, stands between two reshapes."""
    scales = [op for op in ops if op.op_type in ("mul", "add") and _has_unequal_scales(op)]
    between = (op for op in scales if _is_normed(op.outputs[0]) and _ends_in_reshape(op.outputs[0]))
    return _counted(between, "scale* of a norm between two reshapes")


def _has_unequal_scales(op: Operation) -> bool:
    """Is one operand many constants, of which some differ, along the second axis?"""
    scales = [value for v in (op.x, op.y) if (value := constant(v)) is not None and value.ndim == 4]
    return any(value.shape[1] == value.size >= LEAST_SCALES and np.ptp(value) > 0 for value in scales)


def _is_normed(value: Var) -> bool:
    """Is a value computed by a written norm, of values that a reshape gives?"""
    seen, pending = set[Operation](), [value]
    while pending and len(seen) < LONGEST_NORM:
        op = pending.pop().op
        if op is not None and op not in seen and op.op_type in NORM:
            seen.add(op)
            pending += [v for v in (op.inputs.get("x"), op.inputs.get("y")) if isinstance(v, Var)]
    return {"reshape", "reduce_mean"} <= {op.op_type for op in seen}


NORM = names("reshape reduce_mean sub square mul add rsqrt sqrt real_div pow")
"""Ops of a written norm."""
LONGEST_NORM = 12
"""The most ops of a written norm with its scale, its shift and the reshape before it."""


def _ends_in_reshape(value: Var) -> bool:
    """Does a reshape read a value, directly or after the shift of the norm?"""
    values = [value]
    for one in values:
        values += [r.outputs[0] for r in consumers(one) if r.op_type == "add" and r.outputs[0] not in values]
    return any(r.op_type == "reshape" for one in values for r in consumers(one))


LONG_SOUND = 479_014
"""The samples over which the reported vocoder convolves; shorter ones were not reported."""


def _long_sounds(ops: list[Operation]) -> str:
    """Find convolutions along an axis of very many samples."""
    convolved = (op for op in ops if op.op_type in ("conv", "conv_transpose"))
    long = (op for op in convolved if max((static_shape(op.outputs[0]) or ())[2:], default=0) >= LONG_SOUND)
    return _counted(long, "convolution* over a long sound")


def _rows_of_scores(ops: list[Operation]) -> str:
    """Find labels that are chosen from a varying number of scores."""
    chosen = (op for op in ops if op.op_type == "classify" and any(map(is_symbolic, op.probabilities.shape)))
    return _counted(chosen, "label* for scores of a varying number")


LONG_STEP = 16
"""The stride of the reported transposed convolution; shorter ones were not reported."""


def _uneven_steps(ops: list[Operation]) -> str:
    """Find transposed convolutions with a long stride along one axis and a different one along another."""
    turned = ((op, constant(op.strides)) for op in ops if op.op_type == "conv_transpose")
    uneven = (op for op, steps in turned if steps is not None and max(steps) >= LONG_STEP and np.ptp(steps))
    return _counted(uneven, f"transposed convolution* with a stride of {LONG_STEP} or more along one axis")


STRIDED_LENGTH, VOLUME = 18_001, 128**3
"""The reported length of a strided convolution, and the places of a volume; smaller ones were not reported."""


def _strided_lengths(ops: list[Operation]) -> str:
    """Find convolutions of fp16 with a stride along an axis of many elements."""
    strided = (
        op
        for op in ops
        if op.op_type == "conv" and dtype_name(op.x) == "fp16" and max(constant(op.strides), default=1) > 1
    )
    long = (op for op in strided if max((static_shape(op.x) or ())[2:], default=0) >= STRIDED_LENGTH)
    return _counted(long, "convolution* with a stride over a long axis")


def _last_of_one(ops: list[Operation]) -> str:
    """Find slices that count from the end of an axis of length 1."""
    slices = (op for op in ops if op.op_type == "slice_by_index" and static_shape(op.x) is not None)
    return _counted(
        (op for op in slices if counts_back_over_one(op)), "slice* with the index -1 of an axis of length 1"
    )


def _volumes(ops: list[Operation]) -> str:
    """Find convolutions over large volumes."""
    shapes = ((op, static_shape(op.outputs[0]) or ()) for op in ops if op.op_type == "conv")
    large = (op for op, shape in shapes if len(shape) == 5 and prod(shape[2:]) >= VOLUME)
    return _counted(large, "convolution* over a large volume")


REPORTS = (
    LoadReport(
        "refused-edge-pad",
        "Core ML refuses a model with reflect or replicate padding along an axis other than the last two "
        '("Padding for more than two dimensions only supports `constant` mode")',
        source="apple/coremltools: issues 2571, 2576, pull requests 2697, 2701; "
        "pytorch/executorch: issues 11708, 11709",
        seen="Macs, every unit; chips not given",
        units=ALL,
        form=_edges_before_last_two,
        advice="pad with slices and a concat, or move each axis to the end, pad it and move it back",
        remedy="reflect_pad_slices",
        outcome=Outcome.REFUSED_BY_PARSER,
    ),
    LoadReport(
        "refused-number-output",
        "if an output was the mean of all elements, reshaped to rank 1, every prediction failed, on every "
        'unit: "Output rank has changed after reshaping espresso network"; on macOS 15 the model ran',
        source="FluidInference/FluidAudio: issue 836; FluidInference/mobius: pull request 82",
        seen="macOS 14, the vocoder of Kokoro; chip not given",
        units=ALL,
        form=_raised_numbers,
        advice="keep one axis of length 1 in the mean, as in mean(dim=(1, 2)), or drop the output",
        systems=(("macOS", 14),),
        outcome=Outcome.FAILED_EVERYWHERE,
    ),
    LoadReport(
        "refused-passed-input",
        'a model that returned one of its inputs unchanged did not compile for the CPU (BNNS: "as both an '
        'input and output", "Couldn\'t find tensor output with name"), or ran but gave no detections; with an '
        "op between input and output, it worked. One such model loaded in spite of this error",
        source="FluidInference/FluidAudio: issues 265, 294, 726, pull requests 266, 295, 728",
        seen="M2 Pro, macOS 26.2, and unnamed iPhones with iOS 18 and 26",
        units=ALL,
        form=_passed_inputs,
        advice="drop the output, and keep the input in the app",
        systems=(("macOS", 26), ("iOS", 26), ("iOS", 18)),
    ),
    LoadReport(
        "crash-vector-product",
        "coremltools infers a different shape than the device for a matmul of a vector and a batch of "
        "matrices, and the prediction crashes",
        source="apple/coremltools: issue 2263; microsoft/onnxruntime: pull request 21186",
        seen="macOS 14; Mac model not given",
        units=ALL,
        form=_vector_products,
        advice="make the vector a row (expand_dims) before the product, and squeeze its result",
        systems=(("macOS", 14),),
        outcome=Outcome.ABORTED,
    ),
    LoadReport(
        "abort-int8-gpu",
        "a model with 8-bit weights crashed in the GPU back end (an assertion of MPSGraph)",
        source="onnxsim: pull request 1403",
        seen="M4, any compute units with the GPU, OS not given; a decoder with 8-bit weights gave correct "
        "results with ALL and with CPU_AND_GPU on an M4 with macOS 26.6.2 (Thiruloksundar/llm-inference-macOS)",
        units=GPU,
        form=_int8_weights,
        advice="use CPU_AND_NE, or store the weights as fp16 if the GPU must run the model",
        chips=("M4",),
        loaded_on=(("macOS", 26),),
        outcome=Outcome.ABORTED,
    ),
    LoadReport(
        "abort-palette-scale",
        "a model whose palettes have a scale for each channel (enable_per_channel_scale) crashed at load: "
        "an assertion of MPSGraph",
        source="coremltools: pull request 2688",
        seen="M4, macOS 26.6.2",
        units=BOTH,
        form=_scaled_palettes,
        advice="fold the scales into the tables, or multiply by them after the product (scale_after_product)",
        chips=("M4",),
        systems=(("macOS", 26),),
        remedy="fold_palette_scales",
        outcome=Outcome.ABORTED,
    ),
    LoadReport(
        "hang-nearest-pool",
        "a super-resolution network (SAFM) never finished loading with the default units; with CPU_AND_GPU, "
        "it loaded quickly",
        source="coremltools: issue 2367",
        seen="macOS 15; Mac model not given",
        units=ENGINE,
        form=_nearest_beside_pool,
        advice="load it with CPU_AND_GPU",
        systems=(("macOS", 15),),
    ),
    LoadReport(
        "hang-strided-length",
        "a convolution with a stride of 6 over 18,001 elements hung at load: the engine's compiler never "
        "finished. In fp32, or with CPU_AND_GPU, it loaded",
        source="apple/coremltools: issue 2660",
        seen="ALL, fp16; Mac model not given",
        units=ENGINE,
        form=_strided_lengths,
        advice="load it with CPU_AND_GPU, keep this convolution in fp32, or convolve shorter pieces",
    ),
    LoadReport(
        "refused-deconv-stride",
        'a transposed convolution with a kernel and a stride of 16x1 compiled neither for the engine ("Deconv '
        'stride should be 4 on both width and height axis") nor for the CPU (BNNS: "Failed to determine '
        'convolution kernel"); a music-separation model with such layers ran on the CPU and the GPU',
        source="apple/coremltools: issue 2450",
        seen="A17 Pro, CPU_AND_NE; OS not given",
        units=ENGINE,
        form=_uneven_steps,
        advice="write it as a convolution and a reshape",
        chips=("A17",),
        remedy="subpixel_convolution",
    ),
    LoadReport(
        "crash-large-volume",
        "a 3D U-Net over 128x128x128 voxels crashed on the CPU (EXC_BAD_ACCESS in conv3d of Espresso); over "
        "64x64x64 it ran",
        source="apple/coremltools: issue 2000",
        seen="macOS 13, coremltools 7.0; chip not given",
        units=ALL,
        form=_volumes,
        advice="run smaller volumes, or convolve in two dimensions",
        systems=(("macOS", 13),),
        remedy="split_conv3d",
        outcome=Outcome.ABORTED,
    ),
    LoadReport(
        "crash-last-of-one",
        "a slice with the index -1 of an axis of length 1 crashed in the GPU back end "
        '("subRange.start (18446744073709551615)"). The CPU ran it',
        source="john-rocky/CoreML-Models: docs/coreml_conversion_notes.md",
        seen="an iPhone, any compute units with the GPU; chip and OS not given",
        units=GPU,
        form=_last_of_one,
        advice="use the index 0, or squeeze the axis",
        remedy="remove_identity",
        outcome=Outcome.ABORTED,
    ),
    LoadReport(
        "refused-long-sound",
        "the engine's compiler failed after 159 s on a vocoder (Sidon, a DAC decoder). The whole model then "
        "fell back to the CPU, which was 12 times slower than with CPU_ONLY. On another Mac, the "
        "compiler took many minutes and 1 GB of memory",
        source="soniqo/speech-swift: issue 464, pull request 466",
        seen="M5 Pro, macOS 26.5, any compute units with the engine; many minutes on an unnamed Mac",
        units=ENGINE,
        form=_long_sounds,
        advice="load it with CPU_AND_GPU or CPU_ONLY, or decode the audio in shorter chunks",
        chips=("M5",),
        systems=(("macOS", 26),),
    ),
    LoadReport(
        "refused-cache-scatter",
        "ANECCompile refused a scatter into a KV cache, even into a cache of rank 4",
        source="FluidInference/mobius: pull request 67",
        seen="M5 Pro, macOS 26",
        units=ENGINE,
        form=_written_caches,
        advice="write the cache with slices or with a mask",
        chips=("M5",),
        systems=(("macOS", 26),),
        remedy="replace_scatter",
    ),
    LoadReport(
        "refused-repeated-heads",
        "the engine's compiler refused grouped-query attention that repeats its keys and values at rank 5, and "
        "the whole model ran on the CPU; with the repeat at rank 4, the compiler accepted it",
        source="xhighhongo41/eeANE: backends/gemma3.py",
        seen="M2, macOS 26",
        units=ENGINE,
        form=_repeated_heads,
        advice="repeat them at rank 4: run the pass rerank with at_most=4",
        chips=("M2",),
        systems=(("macOS", 26),),
        common=True,
    ),
    LoadReport(
        "refused-state-write",
        "the engine's compiler failed if no op read the result of a write to a state, and the whole model "
        'failed to load ("functionName must be nil unless the model type is ML Program"); if the attention '
        "read the result, it compiled",
        source="kasper0406/gemma-coreml-chat: global_cache_states.py",
        seen="M4 Pro, macOS 27, CPU_AND_NE and ALL",
        units=ENGINE,
        form=_unread_writes,
        advice="let later ops read the updated state instead of the value written into it, or keep the state "
        "as an input and an output (cache_as_io)",
        chips=("M4",),
        systems=(("macOS", 27),),
        common=True,
    ),
    LoadReport(
        "refused-state-shift",
        "the engine's compiler refused decoders that drop the oldest row of a state and join a new one to the "
        "rest (Qwen3, ANECCompile -14, and a speech decoder of 1024 rows); the GPU ran the second one. The "
        "join alone was not tested: each layer also had its own states",
        source="john-rocky/CoreML-LLM; FluidInference/mobius: pull request 87",
        seen="M5 Pro; other M-series Macs; OS not given",
        units=ENGINE,
        form=_shifted_states,
        advice="write one row at the position instead, with slice_update or by a mask, or keep the state as an "
        "input and an output (cache_as_io)",
        chips=("M5",),
    ),
    LoadReport(
        "crash-returned-write",
        "a model crashed at load (a segmentation fault) if it returned the very value that it wrote to a "
        "state; if it multiplied this value by another one first, it loaded",
        source="apple/coremltools: pull request 2713",
        seen="coremltools 9; Mac model not given",
        units=ALL,
        form=_returned_writes,
        advice="return a different value, such as this one times an input that you set to 1",
    ),
    LoadReport(
        "refused-wide-attention",
        'ANECCompile failed for two or more fused attention ops with a head dimension of 512 ("live input '
        'tensor not used in network"), and the whole model ran on the CPU without an error',
        source="kasper0406/stablehlo-coreml: pull request 89",
        seen="macOS 26.5 and 26.6; Mac model not given",
        units=ENGINE,
        form=_wide_attentions,
        advice="write these attention ops as matmul, softmax and matmul",
        systems=(("macOS", 26),),
        remedy="decompose_attention",
    ),
    LoadReport(
        "abort-flat-attention",
        "attention at rank 3 crashed in the GPU back end at the first prediction (the text encoders of older "
        "Stable Diffusion conversions)",
        source="MochiDiffusion/MochiDiffusion: issue 521",
        seen="macOS 27.2, CPU_AND_GPU; Mac model not given",
        units=GPU,
        form=_flat_attentions,
        advice="use CPU_AND_NE, or convert again with rank-4 tensors",
        systems=(("macOS", 27),),
    ),
    LoadReport(
        "abort-turned-attention",
        "values times transposed attention weights (v @ attn.T, in YOLO11 and YOLO26) crashed in the "
        'GPU back end: "MLIR pass manager failed"',
        source="ultralytics/ultralytics: pull requests 24885, 25860",
        seen="M5 Pro, any compute units with the GPU; macOS 26.6.1",
        units=GPU,
        form=_transposed_weights,
        advice="use CPU_AND_NE, or write it with scaled_dot_product_attention",
        chips=("M5",),
        systems=(("macOS", 26),),
        outcome=Outcome.ABORTED,
    ),
    LoadReport(
        "abort-recurrent-gpu",
        "a recurrent network (Kokoro's prosody predictor) crashed in the GPU back end at the second "
        'prediction: "JIT not supported" in GPURNNOps of MPSGraph',
        source="FluidInference/FluidAudio: issue 667, pull requests 671, 818",
        seen="M5 Pro, macOS 26.5 and 26.6, any compute units with the GPU",
        units=GPU,
        form=_recurrent,
        advice="write the steps out, or use CPU_AND_NE",
        chips=("M5",),
        systems=(("macOS", 26),),
        remedy="unroll_recurrent",
    ),
    LoadReport(
        "refused-norm-scale",
        "a layer norm over 1,024 or more values did not compile for the engine (ANECCompile) if a scale or "
        "shift that differs between elements was applied between two reshapes. With the scale and shift after "
        "the second reshape, it compiled; on the M5, both compiled",
        source="sbryngelson/ANEForge: issues 149, 162, pull request 201",
        seen="M1 Max and M2 Pro, macOS 26.5, through E5RT",
        units=ENGINE,
        form=_scaled_between_reshapes,
        advice="multiply by the scale and add the shift after the second reshape, or use layer_norm",
        chips=("M1", "M2"),
        systems=(("macOS", 26),),
    ),
    LoadReport(
        "crash-masked-mean",
        'a masked mean over tokens crashed (SIGSEGV), or failed with "Data-dependent shapes were disabled", if '
        "the sequence length was flexible; with a fixed length, or on the CPU, it ran",
        source="apple/coremltools: issue 2825",
        seen="coremltools 9, any compute units with the GPU or the engine; device not given",
        units=BOTH,
        form=_masked_means,
        advice="fix the length, or take the mean in the app",
        remedy="fix_shapes",
        of_varying_sizes=True,
    ),
    LoadReport(
        "refused-varying-mean",
        "an ML program with a mean and inputs of flexible sizes did not load on iOS 15.4 (MIL->EIR translation "
        "error: std::bad_cast), but loaded on older releases of iOS 15",
        source="apple/coremltools: issue 1420",
        seen="iOS 15.4; device not given",
        units=ALL,
        form=_varying_means,
        advice="fix the sizes, or require iOS 16",
        systems=(("iOS", 15),),
        remedy="fix_shapes",
        outcome=Outcome.FAILED_EVERYWHERE,
        common=True,
        of_varying_sizes=True,
    ),
    LoadReport(
        "refused-label-batch",
        "a Core ML classifier returns one label. coremltools refuses a fixed batch larger than 1, but accepts "
        "a list of batch sizes (1, 4 and 8), and a model converted like this failed at prediction",
        source="apple/coremltools: issue 2764, and the source of its op classify",
        seen="coremltools 9.0; Mac model not given",
        units=ALL,
        form=_rows_of_scores,
        advice="fix the batch to 1, or convert without classifier_config and look labels up in the app",
        of_varying_sizes=True,
    ),
    LoadReport(
        "crash-places",
        "torch.where with one argument crashed: it returns one rank-1 tensor of indices for each axis, and "
        "models with a rank-1 integer tensor crashed. nonzero, which returns one rank-2 tensor, ran",
        source="pytorch/executorch: issue 17537; 0xShug0/opdiff: reprod/executorch_crash_op_where_coreml.py",
        seen="Core ML through ExecuTorch; device not given",
        units=ALL,
        form=_places,
        advice="keep a mask of fixed size, and list the indices in the app",
        remedy="mask_to_select",
        of_varying_sizes=True,
    ),
)


NO_INPUTS = general(
    "refused-no-inputs",
    "a model without inputs did not load through ExecuTorch; with an input that is added to the result, it did",
    "pytorch/executorch: issue 11719",
    grade=Grade.REPORTED,
    kind=KIND,
    advice="give the model an input that its result needs",
)


def of_function(function: Function, target: Target, before_fixing: Function | None = None) -> Iterator[Finding]:
    """Yield a claim or a warning for each report whose form a function has.

    Args:
        function: with sizes that are fixed.
        target: chips, OS and compute units.
        before_fixing: the function before its sizes were fixed; the same function by default.
    """
    if not function.inputs:
        yield NO_INPUTS.finding("reported not to load: the function has no inputs")
    functions = (function, before_fixing or function)
    fixed, varying = ([op for op in walk_ops(f) if op.op_type != "const"] for f in functions)
    for report in REPORTS:
        is_claim = report.is_claim(target)
        is_asked = report.is_relevant(target) and (is_claim or not report.common)
        words = report.form(varying if report.of_varying_sizes else fixed) if is_asked else ""
        if not words:
            continue
        if not is_claim and report.may_be_claim(target):
            message = f"reported to {report.outcome.value} on {report.seen}: {words}"
        else:
            outcome = report.outcome if is_claim else Outcome.UNIT_FAILED
            message = f"reported to {outcome.value}: {words} ({report.seen})"
        yield report.rule(target).finding(message)
