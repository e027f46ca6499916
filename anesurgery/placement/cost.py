"""Repeat Core ML's own estimate of each op, in microseconds, as far as its formula is known.

Core ML chooses units by these numbers; they are not run times. `verdicts` calls `estimate` for each op. An op
of the memory class (`MEMORY_CLASS`) costs its bytes at one rate. A sum of products costs its operations, at a
rate that depends on how many there are, or on how many per byte. `FORMULAS` has the ops with a formula of
their own. `Work.moved` counts bytes of run time, of which `Work.written` are results; `Work.constant` those of
constants.

The formulas were derived from plans and analysis files of 482 models on an M4 (macOS 27.0.1, coremltools 9.0,
fp16), published in 751K/Apple-Neural-Engine-Microarchitecture-Study-M6. A published dump of an M1 (macOS
14.6) has the same rates for the memory class and relu, and others for convolutions. Where the cases disagree,
an estimate says how far it may be off (`Estimate.off`); near the cut between two classes it has the times of
both (`Estimate.or_else`). A choice that hangs on either is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from anesurgery.mil import Operation, constant, is_stored, np_dtype
from anesurgery.ops import names
from anesurgery.placement.corrections import UNITS, Correction
from anesurgery.placement.inspection import Estimate
from anesurgery.placement.target import Target
from anesurgery.regions.heads import SCORES, SUM
from anesurgery.semantics.reading import shape_of, size_of
from anesurgery.semantics.rows import Work, read_results, runtime

GB, T = 1e9 / 1e6, 1e12 / 1e6
"""A gigabyte per second in bytes per microsecond, and a teraflop per second in operations per microsecond."""

ANE_MEMORY_RATE, CPU_MEMORY_RATIO = 73.01 * GB, 1.2
"""The rate of the memory class on the ANE (bytes per microsecond), and how many times longer the CPU takes."""

CPU_SUMS = 0.7545 * T
"""The highest rate of sums of products on the CPU."""

GPU_MEMORY, GPU_SUMS = 120 * GB, 4 * T
"""A guess: with these, SigLIP, DistilBERT, ResNet-50 and MobileNetV2 divide between ANE and GPU about as was
measured with ALL on an M4 Pro (macOS 26.5.1, erwinzhang7/coreml-compute-placement). Any rate from 113 to
252 GB/s would do."""

SEEN_ON_GPU = frozenset({"add", "sub", "mul", "transpose", "matmul", "softmax", "reshape"})
"""Ops that ran on the GPU although the ANE may run them: those between the linear ops of attention, and the
large additions of ResNet-50."""

WEIGHT_PRODUCTS = frozenset({"conv", "conv_transpose", "linear"})
"""Sums of products with weights, which were never seen to run on the GPU where the ANE is allowed."""

MEMORY_CLASS = names(
    "abs acos asin atan atanh acosh asinh cast ceil clip cos cosh elu erf exp exp2 floor gelu inverse "
    "leaky_relu linear_activation log prelu relu6 round rsqrt scaled_tanh sigmoid sigmoid_hard sign silu sin "
    "sinh softplus softplus_parametric softsign sqrt square tan tanh thresholded_relu "
    "equal not_equal greater greater_equal less less_equal logical_and logical_not logical_or logical_xor "
    "floor_div maximum minimum mod pow real_div select "
    "softmax layer_norm batch_norm instance_norm l2_norm local_response_norm "
    "reduce_argmax reduce_argmin reduce_l1_norm reduce_l2_norm reduce_log_sum reduce_log_sum_exp reduce_max "
    "reduce_mean reduce_min reduce_prod reduce_sum reduce_sum_square "
    "argsort batch_to_space cumsum depth_to_space expand_dims fill_like gather_along_axis gather_nd pad "
    "pixel_shuffle pixel_unshuffle reshape reverse scatter scatter_along_axis scatter_nd slice_by_index "
    "slice_by_size sliding_windows space_to_batch space_to_depth split squeeze tile topk "
    "affine crop_resize dequantize quantize random_normal random_uniform resample resize resize_bilinear "
    "resize_nearest_neighbor rnn upsample_nearest_neighbor"
)
"""Ops whose cost is the bytes that they move at run time, at the rate `ANE_MEMORY_RATE`."""

POOLING = frozenset({"avg_pool", "l2_pool", "max_pool"})
"""Ops of the memory class on the ANE, whose windows the CPU counts too."""


@dataclass(frozen=True)
class Rates:
    """The rates of one size class of sums of products.

    The class is chosen by a feature: operations for `linear`, operations per byte for `conv`.
    """

    cut: float
    """The least value of the feature in this class."""
    edge: float
    """The class is uncertain from cut / edge to cut * edge: the cut is rounded, or no case lies there."""
    ane: float
    """Operations per microsecond on the ANE."""
    cpu: float
    """Operations per microsecond on the CPU."""
    off: tuple[float, float] = (1.0, 1.0)
    """(ANE, CPU): how many times the rates that were seen are higher or lower."""

    def times(self, flop: float) -> tuple[float, float]:
        """Return the microseconds of so many operations on (ANE, CPU)."""
        return flop / self.ane, flop / self.cpu


CONV_CUT_ERROR = 1.1
"""Edge of the classes of convolutions: what "about" may mean in their published cuts, "about 64" and "about
10". The nearest cases, at 52 and 126, and at 9 and 17 operations per byte, do not say more."""

CONV_RATES = (
    Rates(64, CONV_CUT_ERROR, 16.15 * T, 0.7545 * T),
    Rates(10, CONV_CUT_ERROR, 7.16 * T, 0.388 * T),
    Rates(0, 1, 0.471 * T, 0.0271 * T),
)
"""The classes of convolutions, by operations per byte with weights."""

LINEAR_RATES = (
    Rates(23.7e6, 1.41, math.sqrt(5.29 * 10.58) * T, math.sqrt(0.168 * 0.3355) * T, (1.4142, 1.4132)),
    Rates(0.262e6, 2, 0.58 * T, 0.0225 * T),
    Rates(0, 1, 0.58 * T, 0.0675 * T),
)
"""The classes of linear ops, by operations. In the first, rates from 5.29 to 10.58 were seen on the ANE. On the
CPU one case was seen, at 0.3355; the lower rate, 0.168, assumes that the CPU is as many times slower than the
ANE (31.5) in the ANE's slower cases."""

LINEAR_CLASS_RATIO = 10.58 / 0.58
"""The largest ratio of the ANE's rates in two classes of linear ops."""

LARGEST_LINEAR = 33.6e6
"""Operations of the largest linear op whose estimate on the CPU was published; a larger one may have the rate
of other large products."""

OTHER_CHIP_ERROR = (1.1, 1.2)
"""(ANE, CPU): how many times the rates may differ on chips other than a base M4 with macOS 27. Those of
convolutions differ so much on an M1."""

SAME_MEMORY_CHIPS = frozenset({"M1", "M4", "M5"})
"""Chips on which the memory class has the same rate: published for an M1 (macOS 14.6) and an M4 (27.0.1). On
an M5 Max, five models were placed as it says (macOS 26.6, erwinzhang7/coreml-compute-placement)."""

SEEN_ELSEWHERE = MEMORY_CLASS | POOLING | {"relu"}
"""Ops whose rates were the same on those chips; the data have no other op with a formula of its own."""

UNSEEN_ROWS = 16
"""A linear op with fewer rows may cost what it moves: no rate was published for so few rows, and on an M1 one
row stayed on the CPU at each width (thisisthepy/torchnative: ANEDECODE.md)."""
LAST_FEW_ROWS_FAMILY = 13
"""The last generation of the engine for which that is assumed."""

STORED_MATMUL_ERROR = (1.5, 2.5)
"""(ANE, CPU): how many times the estimate of a matmul with a constant may be off. No case is published, and
an M4 Max (macOS 26.6) kept one on the CPU that the formula gives to the ANE (eyalamirmusic/eacp)."""

OF_STATES = names("read_state slice_update coreml_update_state")
"""Ops of states, which cost nothing here, so that they get the unit of their neighbours. No estimate was
published; in models on the engine they were there too (reported, A19 on iOS 18 and M4:
john-rocky/CoreML-LLM)."""

SEEN_ATTENTION = 64
"""Operations per byte of the one fused attention whose estimate was published."""

Formula = Callable[[Operation, Work], Estimate | None]


def estimate(op: Operation, work: Work, target: Target) -> Estimate | None:
    """Return the estimates of an op on each unit; None if no formula is known."""
    formula = FORMULAS.get(op.op_type, _moving if op.op_type in MEMORY_CLASS else None)
    times = None if formula is None else formula(op, work)
    if times is None:
        return None
    if op.op_type == "linear":
        doubts = _doubts_of_linear(op, work, target)
        times = replace(times, or_else=tuple(dict.fromkeys((*times.or_else, *doubts))))
    if target.extrapolated and not (
        op.op_type in SEEN_ELSEWHERE and SAME_MEMORY_CHIPS.issuperset(target.chips)
    ):
        times = _with_larger_error(times, OTHER_CHIP_ERROR)
    if target.rates is not None:
        times = _with_corrections(times, target.rates.rates.get(op.op_type, {}))
    return replace(times, gpu=_gpu_guess(op, work))


def _doubts_of_linear(op: Operation, work: Work, target: Target) -> Iterator[tuple[float, float]]:
    """Yield other times (ANE, CPU) of a linear op that are as likely on some chips.

    The cuts between its classes are known on an M4 only. Their rates differ 9 to 18 times on the ANE, so a
    product that is further than that from a cut is certainly in its own class.
    """
    if not target.on_measured_chip:
        yield from _by_size_class(LINEAR_RATES, work.flop, work.flop, LINEAR_CLASS_RATIO).or_else
    if min(target.families) <= LAST_FEW_ROWS_FAMILY and math.prod(shape_of(op.x)[:-1]) < UNSEEN_ROWS:
        yield _times_of_moving(work.moved + work.constant)


def _with_corrections(estimated: Estimate, learned: Mapping[str, Correction]) -> Estimate:
    """Return an estimate with factors and errors that plans of the user's own device give, where they do."""
    times = dict(zip(UNITS, (estimated.ane, estimated.cpu), strict=True))
    new = {u: time * learned[u].factor for u, time in times.items() if time is not None and u in learned}
    off = dict(zip(UNITS, estimated.off, strict=True)) | {unit: learned[unit].off for unit in new}
    times.update(new)
    rows = [dict(zip(UNITS, row, strict=True)) | new for row in estimated.or_else]
    others = tuple((row["ane"], row["cpu"]) for row in rows if row != times)  # the doubt about the other unit
    return replace(estimated, ane=times["ane"], cpu=times["cpu"], off=(off["ane"], off["cpu"]), or_else=others)


def _with_larger_error(estimated: Estimate, factors: tuple[float, float]) -> Estimate:
    """Return an estimate whose errors (ANE, CPU) are multiplied by factors."""
    (ane, cpu), (more_ane, more_cpu) = estimated.off, factors
    return replace(estimated, off=(ane * more_ane, cpu * more_cpu))


def _gpu_guess(op: Operation, work: Work) -> float | None:
    """Return the guessed microseconds on the GPU; None for op types without a fitted guess.

    `verdicts` does not use it for `WEIGHT_PRODUCTS` that the ANE may run.
    """
    if op.op_type not in SEEN_ON_GPU | WEIGHT_PRODUCTS or np_dtype(op.outputs[0]).kind != "f":
        return None
    return max((work.moved + work.constant) / GPU_MEMORY, work.flop / GPU_SUMS)


def _times_of_moving(moved: float) -> tuple[float, float]:
    """Return the microseconds (ANE, CPU) of an op of the memory class that moves some bytes."""
    return moved / ANE_MEMORY_RATE, CPU_MEMORY_RATIO * moved / ANE_MEMORY_RATE


def _moving(op: Operation, work: Work) -> Estimate:
    return Estimate(*_times_of_moving(work.moved))


def _two_rates(ane: float, cpu: float, what: str) -> Formula:
    """Return the formula of an op that costs one field of `Work` ("moved", "flop") at two rates."""
    return lambda op, work: Estimate(getattr(work, what) / ane, getattr(work, what) / cpu)


def _by_size_class(
    rates: tuple[Rates, ...], flop: float, feature: float, edge: float | None = None
) -> Estimate:
    """Return the estimate of a sum of products by the class of its feature, with classes that are as likely.

    `edge` takes the place of that of each class.
    """
    chosen = next(row for row in rates if feature >= row.cut)
    possible: list[Rates] = []
    for pair in pairwise(rates):  # near the cut between two classes, either may be its own
        cut, error = pair[0].cut, edge or pair[0].edge
        possible += pair if cut / error < feature < cut * error else ()
    others = tuple(row.times(flop) for row in possible if row is not chosen)
    return Estimate(*chosen.times(flop), off=chosen.off, or_else=others)


def _conv(op: Operation, work: Work) -> Estimate:
    """Estimate a convolution; the formula divides its operations by the dilation on each axis."""
    dilations = op.dilations.val if op.dilations is not None else (1,)
    flop = work.flop / math.prod(int(d) for d in dilations)
    weight = size_of(op.weight) if is_stored(op.weight) else 0  # `work.constant` has the bias too
    return _by_size_class(CONV_RATES, flop, flop / max(work.moved + weight, 1))


def _linear(op: Operation, work: Work) -> Estimate:
    stepped = _by_size_class(LINEAR_RATES, work.flop, work.flop)
    if work.flop <= LARGEST_LINEAR:
        return stepped
    ane, _ = LINEAR_RATES[0].times(work.flop)
    return replace(stepped, or_else=(*stepped.or_else, (ane, work.flop / CPU_SUMS)))


def _matmul(op: Operation, work: Work) -> Estimate:
    moved = work.moved + work.constant
    ane, cpu = _times_of_moving(moved)
    is_bound_by_sums = work.flop >= 32 * moved  # on the CPU, from 32 operations per byte on
    estimated = Estimate(ane, work.flop / CPU_SUMS if is_bound_by_sums else cpu)
    return estimated if len(runtime(op)) > 1 else _with_larger_error(estimated, STORED_MATMUL_ERROR)


def _attention(op: Operation, work: Work) -> Estimate:
    """Estimate fused attention by the memory class; the CPU may cost more above 64 operations per byte.

    The one published case has 64 operations per byte. With 2 million elements in each of query, key and
    value, Core ML was reported to choose the ANE (M4), which the memory class alone does not give.
    """
    ane, cpu = _times_of_moving(work.moved)
    measured = work.flop <= SEEN_ATTENTION * work.moved
    return Estimate(ane, cpu, or_else=() if measured else ((ane, work.flop / CPU_SUMS),))


def _einsum(op: Operation, work: Work) -> Estimate | None:
    """Estimate the einsum of one head of attention as the equal matmul: no case of an einsum was published."""
    if constant(op.equation) not in (SCORES, SUM):
        return None
    return _with_larger_error(_matmul(op, work), STORED_MATMUL_ERROR)


def _pool(op: Operation, work: Work) -> Estimate:
    ane, cpu = _times_of_moving(work.moved)
    window = math.prod(int(k) for k in op.kernel_sizes.val) * math.prod(shape_of(op.outputs[0]))
    return Estimate(ane, max(cpu, window / CPU_SUMS))


def _arithmetic(same: tuple[float, float], broadcast: tuple[float, float]) -> Formula:
    """Return a formula with rates in GB/s on (ANE, CPU) for operands of one shape, and for broadcast ones."""

    def formula(op: Operation, work: Work) -> Estimate:
        same_shape = len({shape_of(v) for v in runtime(op)}) == 1 and len(runtime(op)) == 2
        ane, cpu = same if same_shape else broadcast
        moved = work.moved + (0 if same_shape else work.constant)
        return Estimate(moved / (ane * GB), moved / (cpu * GB))

    return formula


def _transpose(op: Operation, work: Work) -> Estimate:
    perm = [int(p) % len(op.perm.val) for p in op.perm.val]
    ane, cpu = (45.7, 3.75) if perm[-1] == len(perm) - 1 else (68.9, 87.4)
    return Estimate(work.moved / (ane * GB), work.moved / (cpu * GB))


def _gather(op: Operation, work: Work) -> Estimate:
    """Estimate a gather with indices of run time by the rows that it reads and writes.

    Core ML's plan charges the whole table instead, at 23 GB/s: 1.7 ms for a row of 772 bytes. Only the CPU
    runs a gather, so no choice depends on it.
    """
    if is_stored(op.indices):
        return Estimate(work.moved / ANE_MEMORY_RATE, work.moved / (34.5 * GB))
    written = sum(map(size_of, read_results(op)))
    return Estimate(None, (size_of(op.indices) + 2 * written) / (23 * GB))


def _stack(op: Operation, work: Work) -> Estimate:
    """Estimate a stack as if it read its largest operand only, as in the one measured case."""
    return Estimate(*_times_of_moving(work.written + max(map(size_of, runtime(op)), default=0)))


def _recurrent(op: Operation, work: Work) -> Estimate:
    """Estimate a recurrent layer by the products of all its steps, at the CPU's lowest rate for `linear`.

    Only the CPU runs it, so no choice depends on the estimate. Core ML's plan charges 477 ms for 16 steps of
    64, which is 2 MFlop; with that, nothing else in a model would count.
    """
    (hidden_rows, hidden), steps = shape_of(op.weight_hh), math.prod(shape_of(op.x)[:2])
    flop = 2 * steps * hidden_rows * (hidden + shape_of(op.weight_ih)[-1])
    both = 2 if op.direction is not None and op.direction.val == "bidirectional" else 1
    return Estimate(None, both * flop / LINEAR_RATES[1].cpu)


FORMULAS: dict[str, Formula] = {
    "relu": _two_rates(100 * GB, 100 * GB, "moved"),
    **dict.fromkeys(("add", "sub"), _arithmetic((53.9, 31.7), (71.7, 31.7))),
    "mul": _arithmetic((64.5, 17.3), (71.7, 17.3)),
    "concat": _two_rates(100 * GB, 11.5 * GB, "written"),
    "conv": _conv,
    "conv_transpose": _two_rates(15.2 * T, 0.063 * T, "flop"),
    "einsum": _einsum,
    "linear": _linear,
    "matmul": _matmul,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(POOLING, _pool),
    "transpose": _transpose,
    "gather": _gather,
    "stack": _stack,
    "upsample_bilinear": _two_rates(198.5 * GB, 1.312 * GB, "moved"),
    **dict.fromkeys(("lstm", "gru"), _recurrent),
    **dict.fromkeys(OF_STATES, lambda op, work: Estimate(0.0, 0.0)),
}
"""Op type -> its own formula. A mul with a broadcast operand has the ANE's rate of an add."""
