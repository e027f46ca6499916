"""Core ML's own estimate of each op, as far as its formula was found; microseconds.

Re-derived from plans and analysis files of 482 models on an M4 (macOS 27.0.1, coremltools 9.0, fp16), published
in 751K/Apple-Neural-Engine-Microarchitecture-Study-M6. An op of the memory class costs its bytes at one rate, a
sum of products its operations at a rate that depends on its class. The rates of the memory class and of relu
are the
same in a published dump of an M1 (macOS 14.6); those of convolutions differ there. By these numbers Core ML
chooses; they are no run times. Where cases disagree, or none lies near, an estimate says how far it may be off
(`Estimate.off`), and a choice that hangs on it is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from anesurgery.mil import Operation, constant, is_stored, np_dtype
from anesurgery.ops import names
from anesurgery.placement.corrections import UNITS, Correction
from anesurgery.placement.inspection import Estimate
from anesurgery.placement.target import Target
from anesurgery.regions.heads import SCORES, SUM
from anesurgery.semantics.reading import shape_of, size_of
from anesurgery.semantics.rows import Work, read_results, runtime

GB, T = 1e9 / 1e6, 1e12 / 1e6
"""Per microsecond."""

MEMORY, SLOWER = 73.01 * GB, 1.2
"""The rate of the memory class on the ANE, and how many times longer the CPU takes."""

CPU_SUMS = 0.7545 * T

GPU_MEMORY, GPU_SUMS = 120 * GB, 4 * T
"""A guess: with these, SigLIP, DistilBERT, ResNet-50 and MobileNetV2 divide between ANE and GPU about as was
measured with ALL on an M4 Pro (macOS 26.5.1, erwinzhang7/coreml-compute-placement). Any rate from 113 to
252 GB/s would do."""

SEEN_ON_GPU = frozenset({"add", "sub", "mul", "transpose", "matmul", "softmax", "reshape"})
"""Ops that went there although the ANE may run them: what stands between the linear ops of attention, and the
large additions of ResNet-50."""

SUMS = frozenset({"conv", "conv_transpose", "linear"})
"""Not seen to leave the ANE for the GPU where the ANE is allowed."""


MEMORY_CLASS = names(
    "abs acos asin atan atanh acosh asinh cast ceil clip cos cosh elu erf exp exp2 floor gelu inverse "
    "leaky_relu linear_activation log prelu relu6 round rsqrt scaled_tanh sigmoid sigmoid_hard sign silu sin "
    "sinh softplus softplus_parametric softsign sqrt square tan tanh thresholded_relu "
    "equal not_equal greater greater_equal less less_equal logical_and logical_not logical_or logical_xor "
    "floor_div maximum minimum mod pow real_div select "
    "softmax layer_norm batch_norm instance_norm l2_norm local_response_norm "
    "reduce_argmax reduce_argmin reduce_l1_norm reduce_l2_norm reduce_log_sum reduce_log_sum_exp reduce_max "
    "reduce_mean reduce_min reduce_prod reduce_sum reduce_sum_square avg_pool l2_pool max_pool "
    "argsort batch_to_space cumsum depth_to_space expand_dims fill_like gather_along_axis gather_nd pad "
    "pixel_shuffle pixel_unshuffle reshape reverse scatter scatter_along_axis scatter_nd slice_by_index "
    "slice_by_size sliding_windows space_to_batch space_to_depth split squeeze tile topk "
    "affine crop_resize dequantize quantize random_normal random_uniform resample resize resize_bilinear "
    "resize_nearest_neighbor rnn upsample_nearest_neighbor"
)
"""Ops that cost the bytes they move at run time."""


@dataclass(frozen=True)
class Rates:
    """The rates of a sum of products from one value of its feature on.

    Attributes:
        cut: the least value of the feature.
        edge: how many times above or below the cut the class is open, because no case lies there.
        ane: operations per microsecond on the ANE; the least and the most that were seen.
        cpu: the same on the CPU.
    """

    cut: float
    edge: float
    ane: tuple[float, float]
    cpu: tuple[float, float]


ABOUT = 1.1
"""Both cuts of convolutions were published as "about 64" and "about 10"; the cases nearest to them lie at 52
and 126, 9 and 17 operations per byte."""

CONV_RATES = (
    Rates(64, ABOUT, (16.15 * T, 16.15 * T), (0.7545 * T, 0.7545 * T)),
    Rates(10, ABOUT, (7.16 * T, 7.16 * T), (0.388 * T, 0.388 * T)),
    Rates(0, 1, (0.471 * T, 0.471 * T), (0.0271 * T, 0.0271 * T)),
)
"""By operations per byte, weights included."""

LINEAR_RATES = (
    Rates(23.7e6, 1.41, (5.29 * T, 10.58 * T), (0.168 * T, 0.3355 * T)),
    Rates(0.262e6, 2, (0.58 * T, 0.58 * T), (0.0225 * T, 0.0225 * T)),
    Rates(0, 1, (0.58 * T, 0.58 * T), (0.0675 * T, 0.0675 * T)),
)
"""By operations. On the CPU one case of the first class was seen, at 0.3355; the lower rate is what the ratio
of
both units in the other classes gives for the slower cases of the ANE."""

LINEAR_APART = LINEAR_RATES[0].ane[1] / LINEAR_RATES[1].ane[0]
"""How many times the classes of linear differ at most, on the ANE."""

LARGEST_LINEAR = 33.6e6
"""Operations of the largest linear whose estimate on the CPU was published; beyond it the rate may be that of
other large products."""

ELSEWHERE = (1.1, 1.2)
"""(ANE, CPU): how many times the rates may differ off a base M4 with macOS 27. In the dump of an M1 those of
convolutions differ so much."""

SAME_MEMORY = frozenset({"M1", "M4", "M5"})
"""Chips on which the memory class was seen to be the same: published of an M1 (macOS 14.6) and an M4 (27.0.1);
and five models ended on an M5 Max as it says (macOS 26.6, erwinzhang7/coreml-compute-placement)."""

SEEN_ELSEWHERE = MEMORY_CLASS | {"relu"}
"""Ops whose rates were the same there; sums, transpositions and what else has a formula of its own were not in
these data."""

FEW_ROWS, UP_TO = 16, 13
"""Rows of a linear below which no rate was seen, and the last family on which it may then cost what it moves:
on an M1 a single row stayed on the CPU at each width (thisisthepy/torchnative: ANEDECODE.md)."""

STORED_FACTOR = (1.5, 2.5)
"""The same of a matmul with a constant: none is among the cases, and an M4 Max (macOS 26.6) kept one on the CPU
that the formula gives to the ANE (eyalamirmusic/eacp)."""

OF_STATES = names("read_state slice_update coreml_update_state")
"""Ops of which no estimate was published. They were on the engine in models that were (reported, A19 on iOS 18
and M4: john-rocky/CoreML-LLM), so they are taken to be where the ops are that they pass values between."""

SEEN_ATTENTION = 64
"""Operations per byte of the one fused attention whose estimate was published."""

Formula = Callable[[Operation, Work], Estimate | None]


def estimate(op: Operation, work: Work, target: Target) -> Estimate | None:
    """The estimates of an op on both units; None where no formula is known."""
    formula = FORMULAS.get(op.op_type)
    if formula is None and op.op_type not in MEMORY_CLASS:
        return None
    times = formula(op, work) if formula is not None else _memory(work.moved)
    if times is None:
        return None
    if op.op_type == "linear" and not target.on_measured_chip:
        times = _of_other_classes(times, work.flop)
    if op.op_type == "linear" and min(target.families) <= UP_TO and _rows(op) < FEW_ROWS:
        moved = _memory(work.moved + work.constant)
        times = replace(times, or_else=(*times.or_else, (moved.ane or 0.0, moved.cpu or 0.0)))
    if target.extrapolated and not (op.op_type in SEEN_ELSEWHERE and SAME_MEMORY.issuperset(target.chips)):
        times = _wider(times, ELSEWHERE)
    if target.rates is not None:
        times = _corrected(times, target.rates.rates.get(op.op_type, {}))
    return replace(times, gpu=_gpu(op, work))


def _corrected(formula_says: Estimate, learned: Mapping[str, Correction]) -> Estimate:
    """What plans of the user's own device say takes the place of what is not known of it."""
    times, off = (
        dict(zip(UNITS, (formula_says.ane, formula_says.cpu), strict=True)),
        dict(zip(UNITS, formula_says.off, strict=True)),
    )
    for unit, correction in learned.items():
        if unit in times and (formula := times[unit]) is not None:
            times[unit], off[unit] = formula * correction.factor, correction.off
    left = () if learned else formula_says.or_else
    return replace(formula_says, ane=times["ane"], cpu=times["cpu"], off=(off["ane"], off["cpu"]), or_else=left)


def _wider(estimated: Estimate, factors: tuple[float, float]) -> Estimate:
    (ane, cpu), (more_ane, more_cpu) = estimated.off, factors
    return replace(estimated, off=(ane * more_ane, cpu * more_cpu))


def _gpu(op: Operation, work: Work) -> float | None:
    if op.op_type not in SEEN_ON_GPU | SUMS or np_dtype(op.outputs[0]).kind != "f":
        return None
    return max((work.moved + work.constant) / GPU_MEMORY, work.flop / GPU_SUMS)


def _memory(moved: float) -> Estimate:
    return Estimate(moved / MEMORY, SLOWER * moved / MEMORY)


def _rates(ane: float, cpu: float, what: str) -> Formula:
    """The time of what `Work` calls so, at two rates."""
    return lambda op, work: Estimate(getattr(work, what) / ane, getattr(work, what) / cpu)


def _stepped(rates: tuple[Rates, ...], flop: float, feature: float) -> Estimate:
    own = next(row for row in rates if feature >= row.cut)
    open_ = {r for i, row in enumerate(rates[:-1]) if _between(row, feature) for r in (row, rates[i + 1])}
    (ane, off_ane), (cpu, off_cpu) = _middle(own.ane), _middle(own.cpu)
    others = tuple((flop / _middle(r.ane)[0], flop / _middle(r.cpu)[0]) for r in open_ if r is not own)
    return Estimate(flop / ane, flop / cpu, off=(off_ane, off_cpu), or_else=others)


def _of_other_classes(estimated: Estimate, flop: float) -> Estimate:
    """Off an M4 nobody knows where the classes of linear end: it may be of each neighbour of its own.

    The classes differ 9 to 18 times on the ANE, so a product of that many times the operations of a cut is
    beyond doubt.
    """
    own = next(i for i, row in enumerate(LINEAR_RATES) if flop >= row.cut)
    near = [r for i, r in enumerate(LINEAR_RATES) if abs(i - own) == 1 and _is_near(i, own, flop)]
    others = tuple((flop / _middle(r.ane)[0], flop / _middle(r.cpu)[0]) for r in near)
    return replace(estimated, or_else=(*estimated.or_else, *(o for o in others if o not in estimated.or_else)))


def _is_near(other: int, own: int, flop: float) -> bool:
    cut = LINEAR_RATES[min(other, own)].cut
    return cut / LINEAR_APART < flop < cut * LINEAR_APART


def _between(row: Rates, feature: float) -> bool:
    return row.cut / row.edge < feature < row.cut * row.edge


def _middle(ends: tuple[float, float]) -> tuple[float, float]:
    """The middle of a range, and how many times its ends are away from it."""
    middle = math.sqrt(ends[0] * ends[1])
    return middle, ends[1] / middle


def _conv(op: Operation, work: Work) -> Estimate:
    dilations = op.dilations.val if op.dilations is not None else (1,)
    flop = work.flop / math.prod(int(d) for d in dilations)
    weight = size_of(op.weight) if is_stored(op.weight) else 0
    return _stepped(CONV_RATES, flop, flop / max(work.moved + weight, 1))


def _linear(op: Operation, work: Work) -> Estimate:
    stepped = _stepped(LINEAR_RATES, work.flop, work.flop)
    if work.flop <= LARGEST_LINEAR:
        return stepped
    return replace(stepped, or_else=(*stepped.or_else, (stepped.ane or 0.0, work.flop / CPU_SUMS)))


def _rows(op: Operation) -> int:
    return math.prod(shape_of(op.x)[:-1])


def _matmul(op: Operation, work: Work) -> Estimate:
    moved = work.moved + work.constant
    plain = _memory(moved)
    estimated = Estimate(plain.ane, work.flop / CPU_SUMS if work.flop >= 32 * moved else plain.cpu)
    return estimated if len(runtime(op)) > 1 else _wider(estimated, STORED_FACTOR)


def _attention(op: Operation, work: Work) -> Estimate:
    """The memory class at 64 operations per byte, the one case; beyond, the CPU may be charged its products.

    With 2 million elements in each of query, key and value Core ML was reported to choose the ANE (M4), which
    the memory class alone does not give.
    """
    plain = _memory(work.moved)
    measured = work.flop <= SEEN_ATTENTION * work.moved
    return plain if measured else replace(plain, or_else=((work.moved / MEMORY, work.flop / CPU_SUMS),))


def _einsum(op: Operation, work: Work) -> Estimate | None:
    """One head of attention, taken as the matmul that it is: no einsum is among the cases."""
    return _wider(_matmul(op, work), STORED_FACTOR) if constant(op.equation) in (SCORES, SUM) else None


def _pool(op: Operation, work: Work) -> Estimate:
    plain = _memory(work.moved)
    assert plain.cpu is not None
    window = math.prod(int(k) for k in op.kernel_sizes.val) * math.prod(shape_of(op.outputs[0]))
    return Estimate(plain.ane, max(plain.cpu, window / CPU_SUMS))


def _arithmetic(same: tuple[float, float], broadcast: tuple[float, float]) -> Formula:
    """Rates in GB/s for operands of one shape, and for others."""

    def formula(op: Operation, work: Work) -> Estimate:
        alike = len({shape_of(v) for v in runtime(op)}) == 1 and len(runtime(op)) == 2
        ane, cpu = same if alike else broadcast
        moved = work.moved + (0 if alike else work.constant)
        return Estimate(moved / (ane * GB), moved / (cpu * GB))

    return formula


def _transpose(op: Operation, work: Work) -> Estimate:
    perm = [int(p) % len(op.perm.val) for p in op.perm.val]
    ane, cpu = (45.7, 3.75) if perm[-1] == len(perm) - 1 else (68.9, 87.4)
    return Estimate(work.moved / (ane * GB), work.moved / (cpu * GB))


def _gather(op: Operation, work: Work) -> Estimate:
    """A gather at run time is charged the rows that it reads and writes.

    Core ML's plan charges the whole table, at 23 GB/s: 1.7 ms for a row of 772 bytes. Only the CPU runs it, so
    no choice depends on that, and it is not taken over.
    """
    if is_stored(op.indices):
        return Estimate(work.moved / MEMORY, work.moved / (34.5 * GB))
    written = sum(map(size_of, read_results(op)))
    return Estimate(None, (size_of(op.indices) + 2 * written) / (23 * GB))


def _stack(op: Operation, work: Work) -> Estimate:
    """One measured case: as if one operand only were read."""
    return _memory(work.written + max(map(size_of, runtime(op)), default=0))


def _recurrent(op: Operation, work: Work) -> Estimate:
    """The products of all steps at the CPU's rate for `linear`; only the CPU runs it.

    Core ML's plan charges 477 ms for 16 steps of 64, that is 2 MFlop: no choice depends on it, and beside it
    nothing else in a model would count, so it is not taken over.
    """
    (hidden_rows, hidden), steps = shape_of(op.weight_hh), math.prod(shape_of(op.x)[:2])
    flop = 2 * steps * hidden_rows * (hidden + shape_of(op.weight_ih)[-1])
    both = 2 if op.direction is not None and op.direction.val == "bidirectional" else 1
    return Estimate(None, both * flop / LINEAR_RATES[1].cpu[0])


FORMULAS: dict[str, Formula] = {
    "relu": _rates(100 * GB, 100 * GB, "moved"),
    "add": _arithmetic((53.9, 31.7), (71.7, 31.7)),
    "sub": _arithmetic((53.9, 31.7), (71.7, 31.7)),
    "mul": _arithmetic((64.5, 17.3), (71.7, 17.3)),
    "concat": _rates(100 * GB, 11.5 * GB, "written"),
    "conv": _conv,
    "conv_transpose": _rates(15.2 * T, 0.063 * T, "flop"),
    "einsum": _einsum,
    "linear": _linear,
    "matmul": _matmul,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("avg_pool", "l2_pool", "max_pool"), _pool),
    "transpose": _transpose,
    "gather": _gather,
    "stack": _stack,
    "upsample_bilinear": _rates(198.5 * GB, 1.312 * GB, "moved"),
    **dict.fromkeys(("lstm", "gru"), _recurrent),
    **dict.fromkeys(OF_STATES, lambda op, work: Estimate(0.0, 0.0)),
}
"""The ops that are estimated in a way of their own. Where an operand is broadcast, mul is taken as add."""
