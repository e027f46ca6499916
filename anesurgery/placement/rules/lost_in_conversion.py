"""Rules about what coremltools got wrong in a conversion, and what it would change when it saves the program.

Conversions known to be wrong are recognised by the ops that they leave. Example: coremltools 9 converts `x % 1`
to `sub(x, x)`. `inspect` reports such a form, and the pass `restore_meaning` repairs it. `of_function` reports
outputs that are the same for every input.

`save_changes` reports ops that passes of the default pipeline would rewrite. `ct.convert` of a MIL program runs
these passes; this library's own writer does not. Each finding names the pass, how many ops it changes, and how
to leave it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.facts.attention import softmaxes_after
from anesurgery.facts.dependence import ROW_LOOKUPS, looks_up_equal_rows
from anesurgery.facts.quotient_angles import quotient_angle, results_at_points
from anesurgery.facts.whole_numbers import is_whole
from anesurgery.facts.windows import window_axes
from anesurgery.mil import (
    Array,
    Function,
    Operation,
    Program,
    Var,
    constant,
    consumers,
    is_constexpr,
    is_stored,
    is_symbolic,
    nested_ops,
    np_dtype,
    operands,
    producer,
    static_shape,
    types,
    walk_ops,
)
from anesurgery.ops import CARRIERS, PRODUCTS, STATEFUL, UNARY, names
from anesurgery.placement.evidence import Finding, Grade, Rule, general
from anesurgery.placement.target import Target
from anesurgery.semantics.bounds import squared_operand
from anesurgery.semantics.intervals import interval
from anesurgery.semantics.reading import (
    axes_of,
    axis_of,
    elements,
    flag,
    number,
    readers_after,
    value_before,
    weight,
)

_GUARDED_FROM = 8
"""The specification version (8 is iOS 17) from which a gather no longer handles negative indices itself."""
_SOURCE = "coremltools 9.0: {}, read and run"
_ADVICE = (
    "save with this library, which runs no pass, or take the pass out of the pipeline: "
    'pipeline.remove_passes({{"{}"}})'
)


@dataclass(frozen=True)
class _DefaultPass:
    """A pass of coremltools' default pipeline and the ops that it would change."""

    name: str
    ops: frozenset[str]
    because: str
    changes: Callable[[Operation], bool]

    def rule(self) -> Rule:
        """Return the rule that the findings cite."""
        return Rule(
            f"save-{self.name.rsplit('::')[-1].replace('_', '-')}",
            self.ops,
            self.because,
            _SOURCE.format(self.name),
            kind="interface",
            grade=Grade.MEASURED,
            advice=_ADVICE.format(self.name),
        )


def _is_one_hot_product(op: Operation) -> bool:
    """Is a one_hot the first operand of a matmul?"""
    return any(r.op_type == "matmul" and r.x is op.outputs[0] for r in consumers(op.outputs[0]))


def _is_written_dilation(op: Operation) -> bool:
    """Is a space_to_batch followed by conv and batch_to_space?"""
    convolutions = [r for r in consumers(op.outputs[0]) if r.op_type == "conv"]
    return any(r.op_type == "batch_to_space" for c in convolutions for r in consumers(c.outputs[0]))


def _has_signed_indices(op: Operation) -> bool:
    """Are the dynamic indices of a gather signed, in an opset in which it does not handle negative ones?"""
    indices = op.inputs.get("indices")
    if indices is None or is_stored(indices) or int(op.opset_version.value) < _GUARDED_FROM:
        return False
    return np_dtype(indices).kind == "i"


def _widens_constant(op: Operation) -> bool:
    """Does a cast widen a stored tensor?"""
    before, after = op.x, op.outputs[0]
    wider = np_dtype(after).itemsize > np_dtype(before).itemsize
    return is_stored(before) and wider and elements(before) > 1


TRANSPOSABLE = (UNARY - {"cast", "inverse", "silu"}) | {"pow", "softplus_parametric"}
"""Ops that coremltools moves a transpose past."""


def _is_transposed_back(op: Operation) -> bool:
    """Does a chain of at most 8 elementwise ops lead from a transpose to one that undoes it?"""
    readers = consumers(op.outputs[0])
    for _ in range(8):
        if len(readers) != 1:
            return False
        if readers[0].op_type == "transpose":
            there, back = (constant(one.perm) % one.x.rank for one in (op, readers[0]))
            return bool((there[back] == np.arange(len(there))).all())
        if any(is_stored(v) and v.rank > 0 for _, v in operands(readers[0])):
            return False
        if readers[0].op_type not in TRANSPOSABLE:
            return False
        readers = consumers(readers[0].outputs[0])
    return False


_DEFAULT_PASSES = (
    _DefaultPass(
        "common::fuse_onehot_matmul_to_gather",
        frozenset({"one_hot"}),
        "a one-hot product becomes a gather again, which leaves the engine when its indices are computed",
        _is_one_hot_product,
    ),
    _DefaultPass(
        "common::fuse_dilated_conv",
        frozenset({"space_to_batch"}),
        "space_to_batch, conv and batch_to_space become a dilated convolution",
        _is_written_dilation,
    ),
    _DefaultPass(
        "common::guard_negative_gather_indices",
        frozenset({"gather", "gather_nd"}),
        "a guard for negative indices is put before each gather, also where one stands already: a cast, a "
        "comparison, a sum and a select of integers, on the CPU",
        _has_signed_indices,
    ),
    _DefaultPass(
        "common::const_elimination",
        frozenset({"cast"}),
        "a stored fp16 constant that is widened at run time is stored wide",
        _widens_constant,
    ),
    _DefaultPass(
        "common::reduce_transposes",
        frozenset({"transpose"}),
        "transpositions that cancel each other are taken out, with the layout between them",
        _is_transposed_back,
    ),
)


def save_changes(program: Program) -> Iterator[Finding]:
    """Yield a finding for each default pass of coremltools that would change the program."""
    changed: dict[_DefaultPass, list[Operation]] = {default_pass: [] for default_pass in _DEFAULT_PASSES}
    for op in walk_ops(program):
        for default_pass, ops in changed.items():
            if op.op_type in default_pass.ops and default_pass.changes(op):
                ops.append(op)
    for default_pass, ops in changed.items():
        if ops:
            op = ops[0]
            message = f"{default_pass.name} changes {len(ops)} {op.op_type}, first %{op.outputs[0].name}"
            yield default_pass.rule().finding(message)


LARGEST_INT16 = np.iinfo(np.int16).max
NARROWED = names("gather gather_along_axis gather_nd squeeze topk")
"""Ops whose integers coremltools casts to 16 bits (its pass `add_int16_cast`)."""


def lost_remainder(op: Operation) -> str:
    """Report `sub(x, x)`, which is left of `x % 1`: coremltools 9 drops the floor."""
    is_zero = op.op_type == "sub" and op.x is op.y and not is_stored(op.x) and np_dtype(op.x).kind == "f"
    return f"%{op.outputs[0].name} is %{op.x.name} less itself, which is 0" if is_zero else ""


@dataclass(frozen=True)
class GrownEpsilon:
    """A norm scale * sqrt(mean((x / scale)^2) + epsilon): epsilon counts scale^2 times what it should."""

    scale: Var
    """The largest magnitude of each row, max|x|."""
    mean: Var
    """The mean of the squares of x / scale."""
    epsilon: Var
    count: float
    """The largest number of squares in a mean; infinite where a length is unknown."""

    @property
    def most_change(self) -> float:
        """The largest possible relative error of the norm; its mean is at least 1 / count."""
        return math.sqrt(1 + (number(self.epsilon) or 0.0) * self.count) - 1

    def change(self, scale: torch.Tensor, mean: torch.Tensor) -> float:
        """Return the largest relative error of the norm for measured values of `scale` and `mean`."""
        epsilon, scale, mean = number(self.epsilon) or 0.0, scale.double(), mean.double()
        ratio = (mean + epsilon) / (mean + epsilon / scale.clamp(min=fp16.LEAST) ** 2)
        return float((ratio.sqrt() - 1).abs().max()) if ratio.numel() else 0.0


LEAST_CHANGE = 1e-3
"""The relative error below which a norm counts as right, about that of fp16 (11 binary digits)."""


def grown_epsilon(op: Operation) -> GrownEpsilon | None:
    """Return the norm to which an add adds epsilon, if its values were divided by max|x|; else None."""
    if op.op_type != "add" or not any(r.op_type in ("sqrt", "rsqrt", "pow") for r in consumers(op.outputs[0])):
        return None
    for mean, epsilon in ((op.x, op.y), (op.y, op.x)):
        added, mean_op = number(epsilon), producer(mean, "reduce_mean")
        square = None if mean_op is None else producer(mean_op.x, "square", "mul", "pow")
        if mean_op is None or square is None or added is None or not 0 < added < 1:
            continue
        division = producer(square.x, "real_div")
        if division is not None and _is_largest_of(division.y, division.x) and _is_rescaled(op, division.y):
            lengths = [mean_op.x.shape[axis] for axis in axes_of(mean_op)]
            count = math.prod(math.inf if is_symbolic(n) else n for n in lengths)
            return GrownEpsilon(division.y, mean, epsilon, count)
    return None


def _is_largest_of(scale: Var, x: Var) -> bool:
    """Is `scale` the largest magnitude of each row of x: reduce_max(abs(x))?"""
    maximum = producer(scale, "reduce_max")
    magnitude = None if maximum is None else producer(maximum.x, "abs")
    return magnitude is not None and magnitude.x is x


def _is_rescaled(op: Operation, scale: Var) -> bool:
    """Is the root multiplied by the scale again, so that only epsilon has grown?"""
    roots = [r for r in consumers(op.outputs[0]) if r.op_type in ("sqrt", "rsqrt", "pow")]
    readers = [r for root in roots for r in consumers(root.outputs[0])]
    return any(r.op_type in ("mul", "real_div") and scale in (r.x, r.y) for r in readers)


def moved_divisor(op: Operation) -> str:
    """Report `1 / (x + epsilon)` where x may be so small that epsilon counts."""
    if op.op_type != "inverse":
        return ""
    added, (low, high) = number(op.epsilon) or 0.0, interval(op.x)
    is_default = math.isclose(added, 1e-4, rel_tol=1e-3)  # as fp16 rounds it
    if not is_default or added <= LEAST_CHANGE * max(low, -high, 0.0):
        return ""
    return f"{added:g} is added to %{op.x.name} before 1 is divided by it: {added / 1e-2:.0%} off at 0.01"


def lost_branch(op: Operation) -> Operation | None:
    """Return the comparison `y > 0` by which an atan2 gives 0 instead of pi for y = 0, x < 0; else None."""
    angle = quotient_angle(op)
    if angle is None or not angle.all_quadrants:
        return None
    results = results_at_points(op, angle.y, angle.x, np.array([[0.0], [-1.0]]))
    if results is None or results[0] > 1.0:  # pi where the branch is there, else 0
        return None
    for comparison in angle.ops:
        is_above = comparison.op_type == "greater" and comparison.x is angle.y and number(comparison.y) == 0
        if is_above and any(_is_and_negative(r, angle.x) for r in consumers(comparison.outputs[0])):
            return comparison
    return None


def _is_and_negative(op: Operation, x: Var) -> bool:
    """Is an op a logical_and with x < 0?"""
    if op.op_type != "logical_and":
        return False
    comparisons = [producer(v, "less") for v in (op.x, op.y)]
    return any(less is not None and less.x is x and number(less.y) == 0 for less in comparisons)


def narrowed_data(op: Operation) -> str:
    """Report integers that are cast to int16 before an op that moves them, and may be larger."""
    cast = producer(op.x, "cast") if op.op_type in NARROWED else None
    if cast is None or np_dtype(op.x) != np.int16 or np_dtype(cast.x) != np.int32:
        return ""
    if (sizes := producer(cast.x, "shape")) is not None and static_shape(sizes.x) is None:
        return ""  # known at the default shape, at which the ops are judged, too
    most = max(map(abs, interval(cast.x)))
    if most <= LARGEST_INT16:
        return ""
    reach = "may be any int32" if most >= 2**31 - 1 else f"reaches {most:.0f}"
    return f"%{cast.x.name} {reach}, and int16 ends at {LARGEST_INT16}"


def narrowed_places(op: Operation) -> str:
    """Report a topk whose places are 16 bits wide, along an axis that is longer."""
    places = op.outputs[1] if op.op_type == "topk" and len(op.outputs) > 1 else None
    if places is None or np_dtype(places).itemsize > 2:
        return ""
    length, last = op.x.shape[axis_of(op)], np.iinfo(np_dtype(places)).max
    if not isinstance(length, int) or length - 1 <= last:
        return ""
    return f"the places %{places.name} go to {length - 1}, and {np_dtype(places)} ends at {last}"


LIMITS = names("clip maximum minimum floor_div")
"""Ops on integers that coremltools writes with floats."""
MOST_LIMITED = 24
"""The most values that limits and divisions read behind one cast: two or three ops are usual."""


def rounded_integers(op: Operation) -> str:
    """Report integers that are limited or divided as fp16, and cast back."""
    is_cast_back = (
        op.op_type == "cast" and np_dtype(op.outputs[0]).kind in "iu" and np_dtype(op.x) == np.float16
    )
    if not is_cast_back or producer(op.x, *LIMITS) is None or (sources := integers_behind(op.x)) is None:
        return ""
    wide = [v for v in sources if max(map(abs, interval(v))) > fp16.LAST_INTEGER]
    return f"%{wide[0].name} may be above {fp16.LAST_INTEGER:.0f}, and becomes fp16 on the way" if wide else ""


def integers_behind(var: Var) -> list[Var] | None:
    """Return the integers that a float is computed from by limits and rounded division; None for others."""
    integers, pending, queued = list[Var](), [var], set[Var]()
    while pending:
        if len(queued) > MOST_LIMITED:
            return None
        value = pending.pop()
        cast, limited = producer(value, "cast"), producer(value, *LIMITS)
        if cast is not None and np_dtype(cast.x).kind in "iu":
            integers.append(cast.x)
        elif limited is not None:
            pending += [v for _, v in reversed(list(operands(limited))) if v not in queued]
            queued.update(pending)
        elif not is_stored(value) or not _holds_integers(value):
            return None
    return integers


def _holds_integers(var: Var) -> bool:
    """Are all numbers of a constant integers or infinite?"""
    value = np.asarray(constant(var), float)
    return not np.any(np.isnan(value)) and bool(np.all(value[np.isfinite(value)] % 1 == 0))


def kept_sign(op: Operation) -> str:
    """Report a remainder of a negative constant: coremltools means a positive one, Core ML keeps the sign."""
    value = constant(op.x) if op.op_type == "mod" else None
    return f"%{op.x.name} is {np.min(value)}" if value is not None and np.any(value < 0) else ""


class _SmallFactor(NamedTuple):
    """A factor or divisor that rounding has made 0 or subnormal: what is lost, and the digits that it kept."""

    words: str
    digits: int


def rounded_away(op: Operation) -> str:
    """Report a factor or divisor in fp16 that rounding has made 0 or subnormal."""
    factor = _small_factor(op)
    return "" if factor is None else factor.words


def _factor_decibels(op: Operation, target: Target) -> float:
    """Return the PSNR in dB that a small factor leaves of its product."""
    factor = _small_factor(op)
    return 0.0 if factor is None else 20 * math.log10(2) * factor.digits


def _small_factor(op: Operation) -> _SmallFactor | None:
    for name, var in operands(op):
        value = constant(var) if np_dtype(var) == np.float16 and name in ("x", "y") else None
        cast = producer(op.y if name == "x" else op.x, "cast")
        if value is None or np.size(value) != 1 or (cast is not None and np_dtype(cast.x).kind == "b"):
            continue  # a mask may be multiplied by any constant
        size = abs(float(np.asarray(value).item()))
        if size == 0 and op.op_type == "mul":
            return _SmallFactor(f"%{op.outputs[0].name} is multiplied by 0", 0)
        if size == 0 and name == "y":
            return _SmallFactor(f"%{op.outputs[0].name} is divided by 0", 0)
        if 0 < size < fp16.NORMAL:
            digits = 1 + math.floor(math.log2(size / fp16.LEAST))  # subnormal numbers have steps of LEAST
            words = f"the factor %{var.name} is {size:.4g}; fp16 keeps {digits} of its 11 binary digits"
            return _SmallFactor(words, digits)
    return None


LEAST_TERMS, MOST_EXAMINED, ROWS = 64, 1 << 22, 64
"""The fewest terms of a sum that are judged, the most elements of a matrix that is read, and the rows of it."""
ROUNDED_OFF = 2.0**-11
"""What fp16 may round off a number, of its size. Rows of trained layers add up to 0.01 or more."""


def cancelled_rows(op: Operation) -> str:
    """Report a square matrix in fp16, such as an inverse, whose rows add up to less than fp16 has rounded off.

    Rows of a spectrum cancel too, but what they lose is small beside a tone; their matrix is seldom square.
    """
    stored = next((v for name in ("weight", "x", "y") if (v := op.inputs.get(name)) and is_stored(v)), None)
    shape = None if stored is None else static_shape(stored)
    if stored is None or shape is None or np_dtype(stored) != np.float16 or len(shape) != 2:
        return ""
    turned = op.op_type == "matmul" and flag(op, f"transpose_{'x' if stored is op.x else 'y'}")
    turned ^= op.op_type == "matmul" and stored is op.y
    if shape[0] != shape[1] or shape[0] < LEAST_TERMS or math.prod(shape) > MOST_EXAMINED:
        return ""
    if (matrix := constant(stored)) is None:  # compressed
        return ""
    terms = (matrix.T if turned else matrix)[:: 1 + shape[0] // ROWS].astype(np.float32)
    shares = np.abs(terms.sum(1)) / np.maximum(np.abs(terms).sum(1), fp16.LEAST)
    is_lost = 0 < np.median(shares) < ROUNDED_OFF
    return f"fp16 rounds off more of %{stored.name} than its rows add up to" if is_lost else ""


def infinite_factor(op: Operation) -> str:
    """Report a value that is multiplied by an infinity; a rule of its own names the masks of attention."""
    for var in (op.x, op.y):
        value = constant(var) if np_dtype(var) == np.float16 else None
        if value is not None and np.size(value) == 1 and np.isinf(value).any():
            return "" if any(softmaxes_after(op.outputs[0])) else f"the factor %{var.name} is infinite"
    return ""


LONG_PHASE = 4096
"""The fewest steps of a running sum that are judged: one by one, they lose half of 2^-24 of the sum each."""


def long_phase(op: Operation) -> str:
    """Report a running sum in fp32 that is the phase of a sine."""
    if op.op_type != "cumsum" or np_dtype(op.outputs[0]) != np.float32:
        return ""
    length = op.x.shape[axis_of(op)]
    if is_symbolic(length) or length < LONG_PHASE or is_whole(op.x):
        return ""
    through = CARRIERS | names("mul real_div add sub slice_by_index")
    if not any(reader.op_type in ("sin", "cos") for reader in readers_after(op.outputs[0], through)):
        return ""
    return f"{length:,} steps of a phase lose up to {100 * length / 2**25:.2g}%, added one by one"


def not_a_number(op: Operation) -> str:
    """Report a constant that holds NaN, or whose table or scales do."""
    for _, var in operands(op):
        maker = var.op if var.op is not None and is_constexpr(var.op) else None
        if maker is None and op.op_type == "select":
            continue  # NaN may be meant
        for part in [var] if maker is None else [stored for _, stored in operands(maker)]:
            is_read = is_stored(part) and np_dtype(part).kind == "f" and elements(part) <= MOST_EXAMINED
            value = constant(part) if is_read else None
            if value is not None and np.isnan(value).any():
                return f"%{var.name} holds NaN"
    return ""


def kept_matrix(op: Operation) -> str:
    """Report a diagonal that is kept as a matrix, unless sums of its rows or columns follow."""
    if number(op.inputs.get("lower")) != 0 or number(op.inputs.get("upper")) != 0:
        return ""
    readers = consumers(op.outputs[0])
    if readers and all(reader.op_type == "reduce_sum" for reader in readers):
        return ""
    return f"%{op.outputs[0].name} is a matrix, zero beside its diagonal"


def overhanging_mean(op: Operation) -> str:
    """Report an avg_pool whose last window overhangs; Core ML divides it by the whole kernel, unlike torch."""
    if op.op_type != "avg_pool" or not flag(op, "ceil_mode") or flag(op, "exclude_padding_from_average"):
        return ""
    if static_shape(op.x) is None or static_shape(op.outputs[0]) is None:
        return ""
    has_padding = constant(op.inputs.get("pad_type")) == "custom"
    for axis in window_axes(op):
        overhang = axis.after - (axis.before if has_padding else 0)
        if overhang > 0:
            return f"the last window of axis {axis.at} reaches {overhang} beyond the end"
    return ""


def short_causal_mask(op: Operation) -> str:
    """Report a constant causal mask over more keys than queries that is aligned at the first key."""
    for scores, mask in ((op.x, op.y), (op.y, op.x)):
        value = constant(mask) if producer(scores, "matmul") is not None else None
        if value is None or np.ndim(value) < 2:
            continue
        kept: Array = np.asarray(value) > -1e3
        queries, keys = kept.shape[-2:]
        aligned = np.broadcast_to(np.tril(np.ones((queries, keys), bool)), kept.shape)
        if 1 < queries < keys and np.array_equal(kept, aligned):
            return f"the last of {queries} queries sees {queries} of {keys} keys"
    return ""


def rows_of_lengths(op: Operation) -> str:
    """Report an LSTM whose first state has a computed number of rows, while its input has a fixed one."""
    state = op.initial_h
    if static_shape(op.x) is None or state is None or not is_symbolic(state.shape[0]):
        return ""
    return f"%{state.name} has as many rows as the first length of a packed sequence"


def masked_backwards(op: Operation) -> str:
    """Report an LSTM that begins at the end of a sequence, some of whose steps are masked at run time."""
    shape = static_shape(op.x)
    if constant(op.inputs.get("direction")) not in ("bidirectional", "reverse") or shape is None:
        return ""
    source = value_before(op.x, CARRIERS)
    maker = source.op
    if maker is None or maker.op_type not in ("mul", "select"):
        return ""
    steps = math.prod(shape[:2])
    masks = [v for _, v in operands(maker) if math.prod(static_shape(v) or ()) == steps and _may_be_mask(v)]
    if steps == 1 or not masks or math.prod(shape) == steps:
        return ""
    return f"its backward half starts in the steps that %{masks[0].name} may hide"


def _may_be_mask(var: Var) -> bool:
    """Is it an input of the function, a bool, or whole numbers?"""
    is_input = value_before(var, CARRIERS).op is None
    return not is_stored(var) and (is_input or types.is_bool(var.dtype) or is_whole(var))


FEWEST_COLUMNS, MOST_COLUMNS = 16, 256
"""How many columns of a weight are looked at; 16 do not all peak at exactly 1 by chance."""
MOSTLY = 0.9
"""The share of columns with a single 1, and of weights above 0: rounding to fp16 makes some equal, or 0."""


def divided_weight(op: Operation) -> str:
    """Report a weight in which the largest magnitude of each column is exactly 1.

    Tables of sines and cosines reach 1 several times in many columns, and the weights of filters are mostly 0.
    A column of a single weight has no other magnitude.
    """
    var = weight(op)
    value = constant(var)
    if value is None or np.ndim(value) < 2:
        return ""
    rows, columns = {"conv_transpose": (1, 0), "matmul": (-1, -2)}.get(op.op_type, (0, 1))
    if op.op_type == "matmul" and flag(op, "transpose_y"):
        rows, columns = columns, rows
    read = np.moveaxis(value, (rows, columns), (0, 1))
    for some in (FEWEST_COLUMNS, MOST_COLUMNS):  # the first few tell nearly every weight apart
        size = np.abs(read[:, :some].reshape(len(read), -1))
        size = size[:, size.any(axis=0)]  # coremltools divides a column of zeros by 1
        if np.any(size.max(axis=0, initial=0) != 1):
            return ""
    if len(size) == 1 or size.shape[1] < FEWEST_COLUMNS:
        return ""
    is_single = np.mean(np.sum(size == 1, axis=0) == 1) > MOSTLY
    is_dense = np.mean(size > 0) > MOSTLY
    return "the weight is still divided by its scales: each column peaks at 1" if is_single and is_dense else ""


def unmoved_outputs(function: Function) -> dict[str, str]:
    """Return {name of an output: why it is the same for every input}; no state is read."""
    reasons: dict[Var, str] = {}
    for op in function.operations:
        if op.blocks or op.op_type.startswith(("random", "read_state", "coreml_update")):
            continue
        if reason := _why_unmoved(op, reasons):
            reasons |= dict.fromkeys(op.outputs, reason)
    inputs = set(function.inputs.values())
    return {v.name: reasons[v] for v in function.outputs if v in reasons and v not in inputs}


def _why_unmoved(op: Operation, reasons: dict[Var, str]) -> str:
    """Return why the result of an op is the same for all inputs, given the reasons of its operands; else ""."""
    if op.op_type == "const":
        return "it is a constant"
    if lost_remainder(op):
        return f"{op.op_type} %{op.outputs[0].name} takes a value from itself"
    if op.op_type == "mul" and any(is_stored(v) and np.all(constant(v) == 0) for v in (op.x, op.y)):
        return f"mul %{op.outputs[0].name} multiplies by 0"
    if op.op_type in ROW_LOOKUPS and looks_up_equal_rows(op):
        return f"all rows of the table of {op.op_type} %{op.outputs[0].name} are the same"
    read = [v for _, v in operands(op)]
    if not read or not all(v in reasons for v in read):
        return ""
    return next((reasons[v] for v in read if reasons[v] != "it is a constant"), "it is a constant")


AFTER_SCORES = CARRIERS | names("avg_pool reduce_mean")
"""Ops that may stand between the last product of a classifier and its scores."""

_lint = partial(Rule, kind="conversion", grade=Grade.REPORTED)
RESTORE = "restore_meaning"


def unused_inputs(function: Function) -> list[str]:
    """Return the names of the inputs on which no output and no state depends; states are not asked."""
    needed = {*function.outputs}
    for op in reversed(function.operations):
        if op.op_type in STATEFUL or not needed.isdisjoint(op.outputs):
            every = (op, *nested_ops(op))
            needed.update(v for inner in every for _, v in operands(inner))
            needed.update(v for inner in every for block in inner.blocks for v in block.outputs)
    return [n for n, v in function.inputs.items() if v not in needed and not types.is_state(v.sym_type)]


def batch_statistics(op: Operation) -> str:
    """Report the start of a norm of each channel by the mean and spread of a batch, as in training."""
    mean, others = producer(op.y, "reduce_mean"), [axis for axis in range(op.x.rank) if axis != 1]
    if mean is None or mean.x is not op.x or op.x.rank < 2 or sorted(axes_of(mean)) != others:
        return ""
    squares = (r for r in consumers(op.outputs[0]) if squared_operand(r) is op.outputs[0])
    spreads = (r for one in squares for r in consumers(one.outputs[0]) if r.op_type == "reduce_mean")
    is_norm = any(sorted(axes_of(one)) == others for one in spreads)
    return f"a batch norm in training mode: %{mean.outputs[0].name} is of the batch" if is_norm else ""


def raw_scores(op: Operation) -> str:
    """Report a classifier whose scores come from a product, without a softmax."""
    scores = value_before(op.probabilities, AFTER_SCORES)
    if scores.op is None or scores.op.op_type not in PRODUCTS:
        return ""
    return f"{scores.op.op_type} %{scores.name} gives the scores, without a softmax"


def late_epsilon(op: Operation) -> str:
    """Report a norm whose epsilon counts more than it should."""
    norm = grown_epsilon(op)
    if norm is None or norm.most_change < LEAST_CHANGE:
        return ""
    words = f"%{norm.epsilon.name} is added after the division by %{norm.scale.name}"
    most = f"by up to {norm.most_change:.1%}" if math.isfinite(norm.count) else "the more, the longer it is"
    return f"{words}, which changes a row with a spike {most}"


def lost_half_axis(op: Operation) -> str:
    """Report an atan2 that is wrong on the negative half of the x axis."""
    return "" if lost_branch(op) is None else f"%{op.outputs[0].name} is 0, not pi, where y is 0 and x < 0"


SCORES = _lint(
    "lost-softmax",
    names("classify"),
    "a classifier returns its scores as they are, and Vision shows them as confidences: without a softmax, "
    "the label was right and the confidences were not from 0 to 1",
    "ultralytics/ultralytics: pull request 17851; apple/coremltools: issue 724 (XGBoost); the ops in the graph",
    test=lambda op, target: raw_scores(op),
    grade=Grade.MEASURED,
    advice="end the module with a softmax (a sigmoid, if several labels may hold), and convert again",
)
RULES = (
    _lint(
        "lost-remainder",
        names("sub"),
        "x % 1 was converted without its floor: coremltools 9 drops a division by 1, so only x - x remains",
        "FluidInference/mobius: pull request 58; reproduced with coremltools 9.0",
        test=lambda op, target: lost_remainder(op),
        remedy=RESTORE,
        advice="write x - torch.floor(x) and convert again",
    ),
    _lint(
        "lost-epsilon",
        names("add"),
        "the converted rms_norm first divides by the largest magnitude, and then adds the original epsilon. "
        "So the epsilon is too large by a factor of this magnitude squared, in fp32 too",
        "apple/coremltools: issue 2821 (M3 Max, CPU_ONLY)",
        test=lambda op, target: late_epsilon(op),
        remedy=RESTORE,
        advice="divide the epsilon by the square of the scale",
    ),
    _lint(
        "lost-reciprocal",
        names("inverse"),
        "1 / x was converted as 1 / (x + 1e-4): coremltools 9.0 leaves its op inverse the default epsilon",
        "apple/coremltools: pull request 2773; reproduced with coremltools 9.0",
        test=lambda op, target: moved_divisor(op),
        remedy=RESTORE,
        advice="convert with frontend.register(), or write it as torch.ones_like(x) / x",
    ),
    _lint(
        "lost-branch",
        names("add sub mul select atan"),
        "torch.atan2 was converted without the case y = 0: the DC and Nyquist bins get the phase 0 instead "
        "of pi",
        "FluidInference/mobius: pull request 50",
        test=lambda op, target: lost_half_axis(op),
        remedy=RESTORE,
        advice="compare y with greater_equal",
    ),
    _lint(
        "lost-int16",
        NARROWED,
        "the converter casts the data of a gather, squeeze or topk to int16, and the indices of a topk to "
        "uint16: larger values wrap around",
        "apple/coremltools: issue 2222; we read and ran its pass add_int16_cast",
        test=lambda op, target: narrowed_data(op) or narrowed_places(op),
        remedy=RESTORE,
        advice="gather in int32",
    ),
    _lint(
        "lost-integers",
        names("cast"),
        "clamp with one limit, and division with a rounding mode, were converted with floats: fp16 skips "
        "integers above 2048, and its maximum is 65504",
        "apple/coremltools: issues 2570, 2733 (integers divided as floats); clamp: reproduced with "
        "coremltools 9.0",
        test=lambda op, target: rounded_integers(op),
        remedy=RESTORE,
        advice="convert with frontend.register(), or use torch.maximum and minimum",
    ),
    _lint(
        "lost-sign",
        names("mod"),
        "on a device, a remainder has the sign of the dividend; in torch, and where coremltools folds the op "
        "into a constant, it has the sign of the divisor",
        "apple/coremltools: pull request 2778 (torch.roll by a negative shift along a dynamic axis); "
        "kasper0406/stablehlo-coreml: pull request 70",
        test=lambda op, target: kept_sign(op),
        remedy=RESTORE,
        advice="write x - floor_div(x, y) * y",
    ),
    _lint(
        "lost-digits",
        names("mul real_div"),
        "a small constant lost digits in fp16, which has 11 binary digits down to 6.1e-5, fewer below "
        "that, and none below 6e-8",
        "coremltools: passes/defs/quantization.py (casts constants to fp16); IEEE 754: binary16",
        test=lambda op, target: rounded_away(op),
        decibels_for=_factor_decibels,
        grade=Grade.DOCUMENTED,
        advice="convert again in fp32 and let compute_fp16 choose, or split the constant into two larger "
        "factors",
    ),
    _lint(
        "lost-cancelling",
        names("linear matmul"),
        "if the terms of a sum cancel, what fp16 rounded off the weights remains. The inverse of a thin-plate "
        "spline through 961 points was off by 0.085, where the largest result was 0.93, in fp32 arithmetic too",
        "apple/coremltools: issue 1617; its matrix, converted with coremltools 9.0 and run in our interpreter",
        test=lambda op, target: cancelled_rows(op),
        grade=Grade.MEASURED,
        advice="convert this product, and what feeds it, in fp32 (compute_precision)",
    ),
    _lint(
        "lost-infinity",
        names("mul"),
        "a value beyond 65504, such as the lowest value of fp32, became infinite in fp16: a product with it is "
        "infinite, and NaN where the other factor is 0",
        "apple/coremltools: issue 2223, pull request 2669",
        test=lambda op, target: infinite_factor(op),
        advice="convert again with -1e4 instead of the lowest value of fp32, or in fp32",
    ),
    _lint(
        "lost-number",
        PRODUCTS
        | names("add sub mul real_div maximum minimum select gather conv_transpose batch_norm layer_norm"),
        "coremltools stores a mask of -inf as a palette of NaN (mode uniform), and one NaN makes NaN of each "
        "result that it reaches",
        "john-rocky/CoreML-Models: docs/coreml_conversion_notes.md; reproduced with coremltools 9.0",
        test=lambda op, target: not_a_number(op),
        advice="compress the original again with -1e4 instead of -inf, or leave this constant as it is",
    ),
    _lint(
        "lost-phase",
        names("cumsum"),
        "on a CPU, torch adds up fp32 numbers in fp64; Core ML does in fp32. Over 42,000 steps of a "
        "voice's phase, sines had a correlation of 0.954 to torch's, and 0.9999 with a sum for each 300 steps",
        "FluidInference/mobius: pull request 33 (chip not given)",
        test=lambda op, target: long_phase(op),
        remedy=RESTORE,
        advice="sum blocks of some hundred steps, and add up their ends",
    ),
    _lint(
        "lost-scale",
        PRODUCTS | names("conv_transpose"),
        "with enable_per_channel_scale, palettize_weights leaves weights divided by their scales if the group "
        "size does not divide their channels",
        "apple/coremltools: pull request 2777; reproduced with coremltools 9.0",
        test=lambda op, target: divided_weight(op),
        advice="compress the original again, with a group size that divides them",
    ),
    _lint(
        "lost-diagonal",
        names("band_part"),
        "torch.diagonal was converted to a matrix that is 0 off the diagonal. ExecuTorch expected only "
        "the diagonal, so it gave wrong results or crashed",
        "pytorch/executorch: issue 11718, pull request 13023",
        test=lambda op, target: kept_matrix(op),
        advice="convert with frontend.register(), or take the diagonal in the app",
    ),
    _lint(
        "lost-lengths",
        names("lstm"),
        "coremltools converts a packed sequence as if all rows had the full length: the LSTM reads the padding "
        "too, and its last states are those after it",
        _SOURCE.format("_pack_padded_sequence and lstm"),
        test=lambda op, target: rows_of_lengths(op),
        advice="convert with frontend.register(), which ends each row at its length",
    ),
    _lint(
        "lost-lengths-if-packed",
        names("lstm"),
        "an LSTM that reads rows backwards begins in what a mask hides. A speech model that was trained on "
        "packed rows gave other numbers so",
        "soniqo/speech-swift: pull request 173",
        test=lambda op, target: masked_backwards(op),
        grade=Grade.GUESS,
        advice="if it was trained on packed rows, write pack_padded_sequence, and use frontend.register()",
    ),
    _lint(
        "lost-average",
        names("avg_pool"),
        "if the last window reaches past the end, Core ML divides its sum by the kernel size, and torch by "
        "the number of elements inside",
        "apple/coremltools: issue 2772",
        test=lambda op, target: overhanging_mean(op),
        remedy=RESTORE,
        advice="if the pool has no padding, exclude from the average what lies past the end",
    ),
    _lint(
        "lost-statistics",
        names("sub"),
        "a model that was traced in training mode keeps no learned mean and variance: each batch norm takes "
        "those of the input",
        "apple/coremltools: issue 1616, pull request 1640; its batch_norm, read and run",
        test=lambda op, target: batch_statistics(op),
        advice="call model.eval() and convert again, unless the module has track_running_stats=False",
    ),
    SCORES,
    _lint(
        "lost-mask",
        names("add"),
        "a causal mask aligned to the first key hides the newest keys from every query; with a cache, queries "
        "need these keys",
        "PyTorch: scaled_dot_product_attention (is_causal aligns at the upper left)",
        test=lambda op, target: short_causal_mask(op),
        grade=Grade.GUESS,
        advice="give the mask as an input, aligned to the last key",
    ),
)
"""One rule for each form, with the pass, where one repairs it."""

UNMOVED = general(
    "lost-output",
    "an output that never changes is useless; most often, the conversion dropped part of the model",
    "the definitions of the ops in the graph",
    kind="conversion",
    grade=Grade.MEASURED,
    advice="compare with the model before the conversion: against_torch",
)


UNUSED = general(
    "lost-input",
    "the module ignores the input, or the conversion dropped what reads it: coremltools drops some assignments "
    "in place, such as y[:, i] = v after y = x.clone()",
    "the definitions of the ops in the graph; apple/coremltools: issue 2188",
    kind="conversion",
    grade=Grade.MEASURED,
    advice="convert with frontend.register(), which keeps such assignments, or remove the input; compare with "
    "the module: against_torch",
)

MEANT = frozenset({SCORES.id, UNUSED.id})
"""Rules about what may be meant as it is: a report shows them first, but they are no risk to a certificate."""


def of_function(function: Function) -> Iterator[Finding]:
    """Yield a finding for each output that is the same for every input, or else for inputs that change none."""
    for name, why in unmoved_outputs(function).items():
        yield UNMOVED.finding(f"{name} is the same whatever the inputs are: {why}", name)
    if (unused := unused_inputs(function)) and not unmoved_outputs(function):
        yield UNUSED.finding(f"no output depends on input {', '.join(f'%{n}' for n in unused)}")
