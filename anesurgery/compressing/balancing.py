"""Balance channels (AWQ, SmoothQuant): move a scale of each channel of an input into the weight that reads it.

Before::

    x = layer_norm(x=h, gamma=g, beta=b)
    y = linear(x=x, weight=w)

After::

    x = layer_norm(x=h, gamma=g / s, beta=b / s)
    y = linear(x=x, weight=w * s)

with one s for each channel of x. Rounding then loses less, as large channels get finer steps in the weight, or
smaller numbers in 8-bit inputs. Each s is a power of two, so without compression the model computes the same,
but for numbers that become subnormal. Scales follow AWQ (how large a channel is) and SmoothQuant (that over how
large its weights are), at several strengths; the one with the least error of the products is taken if it gains.

The values of an attention are scaled in the rows of their projection, and the output projection takes the
scales back: each channel of the attention's result is a weighted sum of that channel of the values.

Refuses where anything else reads x or one of the weights, as a cache reads values, or where no constant scales
the channels of x. Such constants have a norm, a product with a weight, a mul or an add, also behind relu.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.compressing.fitting import fit_form
from anesurgery.compressing.running_samples import run_op_by_op
from anesurgery.compressing.second_order import second_moments
from anesurgery.compressing.storing import Key, key_of, replace_constant
from anesurgery.compressing.weight_forms import read_form
from anesurgery.compressing.weight_rows import READERS, WeightRows, weight_rows_of
from anesurgery.files.package import Loaded
from anesurgery.interpret.core import Executable
from anesurgery.interpret.ops.constexpr import dequantize, quantize
from anesurgery.interpret.steps import Step
from anesurgery.mil import Array, Function, Operation, Program, Var, constant, is_output, static_shape

STRENGTHS = (0.25, 0.5, 0.75, 1.0)
"""The exponents of a channel's size that are tried as its scale; 0 would be the model as it is."""
GAIN = 0.95
"""Scales are taken if at most this share of the error is left. Samples vary by the rest."""
REACH = 6
"""Scales are 2^-6 to 2^6, so that numbers of fp16 near 1 stay normal."""
NEAR = 2.0**-12
"""The most that scaling may change a number, as a share of the largest of its channel: half a step of fp16."""
ROWS = 1024
"""The number of positions, of all samples together, on which trials are measured. A choice: each trial
multiplies them by the weights."""
COMMUTES = ("relu", "identity")
"""Ops that a positive factor commutes with."""
MOVES = ("transpose", "reshape", "expand_dims", "squeeze")
"""Ops that only move numbers, and may keep an axis."""

MIXERS = {"matmul": "y", "scaled_dot_product_attention": "value"}
"""Products of two values -> the input whose channels stay apart: rows of the result are sums of its rows."""

Axes = tuple[int, ...]
"""The axes along which the channels of a value lie, the outermost first; those of an attention lie along
two."""
RangeOf = Callable[[Array], float]
"""Magnitudes of what a product reads -> the range that its 8-bit codes cover."""


@dataclass(frozen=True)
class ChannelConstant:
    """A constant that scales the channels of a value along one of its axes."""

    op: Operation
    """The op that reads it."""
    name: str
    """The name of the op's input."""
    axis: int
    """The axis of the constant along which the channels lie."""

    @property
    def var(self) -> Var:
        """The constant."""
        var = self.op.inputs[self.name]
        assert isinstance(var, Var)
        return var

    @property
    def key(self) -> tuple[str, int, Key]:
        """A key that is equal for the same constant in another function."""
        return self.name, self.axis, key_of(self.var)


@dataclass(frozen=True)
class Group:
    """A value, the products that read it, and the constants that scale it."""

    x: Var
    axis: int
    """The axis of the value along which the channels lie."""
    readers: tuple[WeightRows, ...]
    sources: tuple[ChannelConstant, ...]
    """The constants to divide by the scales."""

    @property
    def weights(self) -> tuple[ChannelConstant, ...]:
        """The weights of the readers, to multiply by the scales."""
        return tuple(ChannelConstant(r.op, _weight_name(r.op), _inputs_axis(r.op)) for r in self.readers)

    @property
    def key(self) -> tuple[Any, ...]:
        """A key that is equal for the same group of another function."""
        return tuple(sorted(repr(constant.key) for constant in (*self.weights, *self.sources)))


@dataclass(frozen=True)
class Balanced:
    """What was done with one value that products read."""

    value: str
    readers: tuple[str, ...]
    """The names of the products."""
    error: tuple[float, float]
    """The squared error of the products over their squares, before, and with the scales that were taken."""
    why: str = ""
    """The reason where the value stays as it is."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"value": self.value, "readers": list(self.readers), "error": list(self.error), "why": self.why}


def find_groups(function: Function) -> tuple[list[Group], dict[Var, str]]:
    """Find the values of a function whose channels can be scaled.

    Returns:
        The groups, and for other values that products read: value -> reason.
    """
    groups: list[Group] = []
    reasons: dict[Var, str] = {}
    inputs = dict.fromkeys(op.x for op in function.operations if (op.op_type, _weight_name(op)) in READERS)
    for x in inputs:
        if constant(x) is None:
            group = _find_group(x)
            if isinstance(group, Group):
                groups.append(group)
            else:
                reasons[x] = group
    return groups, reasons


def _find_group(x: Var) -> Group | str:
    """Return the group of a value, or why it has none."""
    if is_output(x):
        return "the model returns it"
    readers, axes = [], set()
    for op in x.child_ops:
        name = _weight_name(op)
        axis = _channel_axis(op)
        weight = op.inputs.get(name)
        if axis is None or op.inputs.get("x") is not x or constant(weight) is None:
            return f"{op.op_type} {op.name!r} reads it, which is no product with a stored weight"
        assert isinstance(weight, Var)
        rows = weight_rows_of(op, name)
        if not isinstance(rows, WeightRows):
            return rows
        if any(other not in x.child_ops for other in weight.child_ops):
            return f"the weight of {op.name!r} is read elsewhere too"
        readers.append(rows)
        axes.add(axis)
    if len(axes) != 1:
        return "its readers multiply along different axes"
    (axis,) = axes
    sources = _sources(x, (axis,))
    return sources if isinstance(sources, str) else Group(x, axis, tuple(readers), sources)


def _weight_name(op: Operation) -> str:
    """Return the name of the input that is the weight of a product."""
    return "y" if op.op_type == "matmul" else "weight"


def _channel_axis(op: Operation) -> int | None:
    """Return the axis of x that a product sums over; None for other ops, and for a transposed x."""
    if op.op_type == "conv":
        return 1
    if op.op_type == "linear" or (op.op_type == "matmul" and not op.transpose_x.val):
        return len(op.x.shape) - 1
    return None


def _inputs_axis(op: Operation) -> int:
    """Return the axis of the weight that meets the channels of x."""
    return 0 if op.op_type == "matmul" and not op.transpose_y.val else 1


def _sources(var: Var, axes: Axes) -> tuple[ChannelConstant, ...] | str:
    """Return the constants that scale the channels of a value, along `axes`, or why there are none."""
    op = var.op
    if op is None:
        return "it is an input"
    if op.op_type in COMMUTES:
        return _sources_of_input(op, "x", axes)
    if op.op_type in MOVES and (before := _axes_before_move(op, axes)) is not None:
        return _sources_of_input(op, "x", before)
    if (mixed := _mixed_input(op, axes)) is not None:
        return _sources_of_input(op, *mixed)
    if op.op_type in ("mul", "add"):
        return _sources_of_elementwise(op, axes)
    scaling_inputs = SCALING_INPUTS.get(op.op_type)
    inputs = None if scaling_inputs is None or len(axes) > 1 else scaling_inputs(op, axes[0])
    if inputs is None:
        return f"{op.op_type} {op.name!r} makes it, which has no constant for each of its channels"
    return _channel_constants(op, inputs, int(var.shape[axes[0]]))


def _channel_constants(
    op: Operation, inputs: Mapping[str, int], channels: int
) -> tuple[ChannelConstant, ...] | str:
    """Return inputs (name -> axis of channels) as constants that only this op reads, or why they are not."""
    for name, axis in inputs.items():
        var = op.inputs.get(name)
        if not isinstance(var, Var) or constant(var) is None:
            return f"{op.op_type} {op.name!r} makes it, whose {name} is not stored"
        if any(other is not op for other in var.child_ops):
            return f"{name} of {op.name!r}, which makes it, is read elsewhere too"
        if not -len(var.shape) <= axis < len(var.shape) or var.shape[axis] != channels:
            return f"{op.op_type} {op.name!r} makes it, whose {name} has no number for each channel"
    return tuple(ChannelConstant(op, name, axis) for name, axis in inputs.items())


def _axes_before_move(op: Operation, axes: Axes) -> Axes | None:
    """Return the axes of x that an op moves to axes of its result.

    None where a reshape splits them off others or joins them with others: a run of axes of x must have as many
    numbers together, and as many behind it.
    """
    if op.op_type == "transpose":
        return tuple(int(op.perm.val[axis]) % len(op.perm.val) for axis in axes)
    before, after = static_shape(op.x), static_shape(op.outputs[0])
    if before is None or after is None or list(axes) != list(range(axes[0], axes[-1] + 1)):
        return None
    size, inner = math.prod(after[a] for a in axes), math.prod(after[axes[-1] + 1 :])
    runs = [range(first, last + 1) for last in range(len(before)) for first in range(last + 1)]
    for run in sorted(runs, key=len):  # the shortest run: axes of size 1 beside it are not of the channels
        if (math.prod(before[a] for a in run), math.prod(before[run[-1] + 1 :])) == (size, inner):
            return tuple(run)
    return None


def _mixed_input(op: Operation, axes: Axes) -> tuple[str, Axes] | None:
    """Return the values of an attention, from its last product, and the axes of their channels; else None."""
    name = MIXERS.get(op.op_type)
    value = op.inputs.get(name or "")
    if name is None or not isinstance(value, Var) or constant(value) is not None:
        return None
    shape, result = static_shape(value), static_shape(op.outputs[0])
    if shape is None or result is None or len(shape) != len(result):
        return None
    last, rows = len(result) - 1, len(result) - 2
    if last not in axes or rows in axes or any(shape[a] != result[a] for a in axes if a != last):
        return None
    transposed = op.op_type == "matmul" and bool(op.transpose_y.val)
    return name, tuple(rows if a == last and transposed else a for a in axes)


def _sources_of_input(op: Operation, name: str, axes: Axes) -> tuple[ChannelConstant, ...] | str:
    """Return the constants that scale an input of an op, if that op alone reads it; or why not."""
    var = op.inputs[name]
    assert isinstance(var, Var)
    if is_output(var) or any(other is not op for other in var.child_ops):
        return f"{var.name!r}, its source, is read elsewhere too"
    if sum(each is var for each in op.inputs.values()) > 1:
        return f"{op.op_type} {op.name!r} makes it of one value twice"
    return _sources(var, axes)


def _sources_of_elementwise(op: Operation, axes: Axes) -> tuple[ChannelConstant, ...] | str:
    """Return the constants that scale a mul or an add, or why there are none.

    Of a mul one factor is scaled, a constant if it has one. Of an add both terms are, of which one must be a
    constant.
    """
    if op.x is op.y:
        return f"{op.op_type} {op.name!r} makes it of one value twice"
    names = sorted(("x", "y"), key=lambda name: constant(op.inputs[name]) is None)
    first, second = (_sources_of_operand(op, name, axes) for name in names)
    if op.op_type == "mul":
        return second if isinstance(first, str) else first
    if constant(op.inputs[names[0]]) is None:
        return f"add {op.name!r} makes it of two values"
    if isinstance(first, str):
        return first
    return second if isinstance(second, str) else (*first, *second)


def _sources_of_operand(op: Operation, name: str, axes: Axes) -> tuple[ChannelConstant, ...] | str:
    """Return the constants that scale one operand of a mul or an add, or why there are none."""
    var, shape = op.inputs[name], op.outputs[0].shape
    assert isinstance(var, Var)
    sizes = [int(shape[axis]) for axis in axes]
    if constant(var) is not None:
        if len(axes) > 1:
            return f"the channels of {var.name!r} lie along several axes"
        return _channel_constants(op, {name: axes[0] - len(shape) + len(var.shape)}, sizes[0])
    if len(var.shape) != len(shape) or [var.shape[axis] for axis in axes] != sizes:
        return f"{var.name!r}, its source, is spread over its channels"
    return _sources_of_input(op, name, axes)


def _with_bias(inputs: dict[str, int], op: Operation) -> dict[str, int]:
    """Add the bias, whose only axis is that of the channels, where the op has one."""
    return inputs if op.inputs.get("bias") is None else {**inputs, "bias": 0}


def _weight_inputs(op: Operation, axis: int) -> dict[str, int] | None:
    return _with_bias({"weight": 0}, op) if axis == _channel_axis(op) else None


def _layer_norm_inputs(op: Operation, axis: int) -> dict[str, int] | None:
    rank = len(op.x.shape)
    axes = None if op.inputs.get("axes") is None else [int(a) % rank for a in op.axes.val]
    if axes != [axis] or op.inputs.get("gamma") is None:
        return None
    return {"gamma": 0} if op.inputs.get("beta") is None else {"gamma": 0, "beta": 0}


def _batch_norm_inputs(op: Operation, axis: int) -> dict[str, int] | None:
    has_both = op.inputs.get("gamma") is not None and op.inputs.get("beta") is not None
    return {"gamma": 0, "beta": 0} if axis == 1 and has_both else None


def _matmul_inputs(op: Operation, axis: int) -> dict[str, int] | None:
    if axis != len(op.outputs[0].shape) - 1 or len(op.y.shape) != 2:
        return None
    return {"y": 0 if op.transpose_y.val else 1}


def _conv_transpose_inputs(op: Operation, axis: int) -> dict[str, int] | None:
    is_grouped = op.inputs.get("groups") is not None and int(op.groups.val) > 1
    return _with_bias({"weight": 1}, op) if axis == 1 and not is_grouped else None


SCALING_INPUTS: dict[str, Callable[[Operation, int], dict[str, int] | None]] = {
    "layer_norm": _layer_norm_inputs,
    "batch_norm": _batch_norm_inputs,
    "linear": _weight_inputs,
    "matmul": _matmul_inputs,
    "conv": _weight_inputs,
    "conv_transpose": _conv_transpose_inputs,
}
"""Op type -> returns, for an axis of the op's result, the inputs that scale it (name -> their axis), or
None."""


def balance_channels(
    loaded: Loaded,
    name: str,
    samples: Sequence[Mapping[str, Any]],
    forms: Mapping[Var, str | None],
    range_of: RangeOf | None = None,
) -> list[Balanced]:
    """Scale channels where the products lose less by it when weights are compressed.

    Args:
        loaded: the model; all its functions are edited.
        name: of the function that takes the samples.
        samples: inputs of the function.
        forms: weight -> the form that it will get; one that is missing stays as it is.
        range_of: the range of 8-bit inputs; None where inputs are not quantized.

    Returns:
        A row for each value that products with one of these weights read.
    """
    program = loaded.program
    function = program.functions[name]
    groups, reasons = find_groups(function)
    kept, others = [], _OtherFunctions(program, function)
    for group in groups:
        if not any(forms.get(weight.var) for weight in group.weights):
            continue
        reason = _palette_reason(group, forms) or others.reason(group)
        if reason:
            reasons[group.x] = reason
        else:
            kept.append(group)
    trials = {group.x: _Trials(group, forms, range_of) for group in kept}
    by_op = {r.op: (trials[group.x], r) for group in kept for r in group.readers}

    def measure(step: Step, arguments: Sequence[Mapping[str, Any]]) -> Step:
        op_trials, rows = by_op[step.op]
        op_trials.measure(rows, arguments)
        return step

    if kept:
        run_op_by_op(Executable(program, function=name, fuse=False), samples, measure, set(by_op))
    balanced = [trials[group.x].result() for group in kept]
    for group in kept:
        exponents = trials[group.x].best
        for same in (group, *others.same_groups(group)):
            apply_scales(same, exponents)
    return [*balanced, *_unbalanced(reasons, forms)]


def _unbalanced(reasons: Mapping[Var, str], forms: Mapping[Var, str | None]) -> Iterator[Balanced]:
    """Yield a row for each value that stays, if a product with a weight to compress reads it."""
    for x, reason in reasons.items():
        weights = (op.inputs.get(_weight_name(op)) for op in x.child_ops)
        if any(forms.get(weight) for weight in weights if weight is not None):
            yield Balanced(x.name, tuple(op.name for op in x.child_ops), (0.0, 0.0), reason)


def _palette_reason(group: Group, forms: Mapping[Var, str | None]) -> str:
    """Return why constants that scale a value must stay (one will be a palette); empty if they may change."""
    for source in group.sources:
        form = forms.get(source.var)
        if form is not None and read_form(form).kind == "palette":
            return f"the weight of {source.op.name!r}, which makes it, has one table, which scales would spread"
    return ""


class _OtherFunctions:
    """The groups of the other functions, which must get the same scales where they share the numbers."""

    def __init__(self, program: Program, function: Function) -> None:
        self.functions = {n: f for n, f in program.functions.items() if f is not function}
        self.groups = {n: {g.key: g for g in find_groups(f)[0]} for n, f in self.functions.items()}

    def same_groups(self, group: Group) -> Iterator[Group]:
        """Yield the same group of each other function that has it."""
        if self.functions:
            key = group.key
            yield from (groups[key] for groups in self.groups.values() if key in groups)

    def reason(self, group: Group) -> str:
        """Return why a group cannot be scaled in all functions; empty where it can."""
        if not self.functions:
            return ""
        key, weights = group.key, {key_of(weight.var) for weight in group.weights}
        shapes = {shape for shape, _, _ in weights}
        for name, function in self.functions.items():
            consts = (op.outputs[0] for op in function.operations if op.op_type == "const")
            similar = (v for v in consts if isinstance(v.val, np.ndarray) and v.val.shape in shapes)
            if key not in self.groups[name] and any(key_of(var) in weights for var in similar):
                return f"the function {name!r} reads one of the weights otherwise"
        return ""


@dataclass
class _Trials:
    """The scales that are tried for one group, and the error with each."""

    group: Group
    forms: Mapping[Var, str | None]
    range_of: RangeOf | None
    exponents: list[Array] = field(default_factory=list)
    """For each trial the scales' exponents of two, [channels]; the first trial is all 0."""
    errors: Array = field(default_factory=lambda: np.zeros(0))
    """The error of each trial, added over the readers."""

    def measure(self, rows: WeightRows, arguments: Sequence[Mapping[str, Any]]) -> None:
        """Add the error of each trial at one reader, given its arguments in each sample."""
        if not self.exponents:
            self.exponents = self._candidates([values["x"] for values in arguments])
            self.errors = np.zeros(len(self.exponents))
        inputs = _sampled_inputs(rows, arguments)
        for number, exponents in enumerate(self.exponents):
            self.errors[number] += _error(rows, inputs, exponents, self.forms, self.range_of)

    @property
    def best(self) -> Array:
        """The exponents with the least error; 0 if that is not enough of a gain."""
        number = int(self.errors.argmin())
        return self.exponents[number if self.errors[number] < GAIN * self.errors[0] else 0]

    def result(self) -> Balanced:
        """Return the row of the report."""
        is_scaled = bool(self.best.any())
        number, count = int(self.errors.argmin()) if is_scaled else 0, len(self.group.readers)
        why = "" if is_scaled else f"no scales leave less than {GAIN:.0%} of the error"
        error = float(self.errors[0]) / count, float(self.errors[number]) / count
        return Balanced(self.group.x.name, tuple(r.op.name for r in self.group.readers), error, why)

    def _candidates(self, values: Sequence[torch.Tensor]) -> list[Array]:
        """Return the exponents to try, from the group's value in each sample."""
        axis = self.group.axis
        magnitudes = [x.double().abs().movedim(axis, -1).reshape(-1, x.shape[axis]) for x in values]
        largest = np.asarray(torch.stack([m.amax(0) for m in magnitudes]).amax(0))
        sizes = np.asarray(torch.cat(magnitudes).mean(0)) if self.range_of is None else largest
        weights = np.max([_largest_by_channel(w, len(largest)) for w in self.group.weights], axis=0)
        candidates = [np.zeros(len(largest), np.int64)]
        for strength in STRENGTHS:
            awq = sizes**strength
            smooth_quant = awq / np.maximum(weights, 1e-30) ** (1 - strength)
            for scales in (awq, smooth_quant):
                exponents = _powers_of_two(np.where((largest > 0) & (weights > 0), scales, 0.0))
                candidates.append(self._without_loss(exponents, largest))
        return candidates

    def _without_loss(self, exponents: Array, largest: Array) -> Array:
        """Set exponents to 0 where they would change a constant's numbers, or bring the value near overflow."""
        is_finite = largest * np.exp2(-exponents) < fp16.LARGEST / 2
        exponents = np.where(is_finite, exponents, 0)
        for scaled, sign in _signed_constants(self.group):
            exponents = np.where(_stays_exact(scaled, sign * exponents), exponents, 0)
        return exponents


def _largest_by_channel(source: ChannelConstant, channels: int) -> Array:
    """Return the largest magnitude of each channel of a constant, [channels]."""
    magnitudes = np.abs(np.asarray(source.var.val, np.float64))
    numbers = np.broadcast_to(_aligned(source, np.arange(channels), magnitudes.shape), magnitudes.shape)
    largest = np.zeros(channels)
    np.maximum.at(largest, numbers.ravel(), magnitudes.ravel())
    return largest


def _powers_of_two(scales: Array) -> Array:
    """Return the rounded log2 of scales over their geometric mean, [channels]; 0 for a scale of 0."""
    positive = scales > 0
    logs = np.log2(np.where(positive, scales, 1.0))
    mean = logs[positive].mean() if positive.any() else 0.0
    return np.where(positive, np.clip(np.rint(logs - mean), -REACH, REACH), 0).astype(np.int64)


def _signed_constants(group: Group) -> Iterator[tuple[ChannelConstant, int]]:
    """Yield the constants of a group, weights with 1 (they are multiplied), sources with -1 (divided)."""
    yield from ((weight, 1) for weight in group.weights)
    yield from ((source, -1) for source in group.sources)


def _aligned(source: ChannelConstant, numbers: Array, shape: tuple[int, ...]) -> Array:
    """Return one number for each channel in a shape that broadcasts to a constant.

    In the weight of a grouped conv the rows of a group meet only the channels of that group.
    """
    if source.op.op_type == "conv" and source.axis == 1:
        groups = len(numbers) // shape[1]
        rows = numbers.reshape(groups, shape[1]).repeat(shape[0] // groups, axis=0)
        return rows.reshape(*rows.shape, *[1] * (len(shape) - 2))
    return numbers.reshape([-1 if axis == source.axis % len(shape) else 1 for axis in range(len(shape))])


def _scale(source: ChannelConstant, exponents: Array) -> Array:
    """Return a constant times 2**exponents of its channels, in its type."""
    value = np.asarray(source.var.val)
    return np.asarray(np.ldexp(value, _aligned(source, exponents, value.shape)).astype(value.dtype))


def _stays_exact(source: ChannelConstant, exponents: Array) -> Array:
    """Return [channels], True if scaling a constant and back changes no number by more than `NEAR`."""
    value, count = np.asarray(source.var.val), len(exponents)
    with np.errstate(over="ignore", under="ignore"):
        scaled = _scale(source, exponents).astype(np.float64)
        difference = np.abs(np.ldexp(scaled, -_aligned(source, exponents, value.shape)) - value)
    largest = _aligned(source, _largest_by_channel(source, count), value.shape)
    is_near = np.isfinite(scaled) & (difference <= NEAR * largest)
    numbers = np.broadcast_to(_aligned(source, np.arange(count), value.shape), value.shape)
    result = np.ones(count, np.bool_)
    np.logical_and.at(result, numbers.ravel(), is_near.ravel())
    return result


def _sampled_inputs(rows: WeightRows, arguments: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Return about `ROWS` of the inputs of an op, spread evenly over the samples, [groups, number, columns]."""
    per_sample = -(-ROWS // len(arguments))
    parts = []
    for values in arguments:
        inputs = rows.inputs(values)
        assert inputs is not None
        parts.append(inputs[:, :: max(1, inputs.shape[1] // per_sample)])
    return torch.cat(parts, dim=1).double()


def _error(
    rows: WeightRows,
    inputs: torch.Tensor,
    exponents: Array,
    forms: Mapping[Var, str | None],
    range_of: RangeOf | None,
) -> float:
    """Return the squared error of the products with scales 2**exponents over their squares.

    `inputs` are those of the op, [groups, number, columns]; the rest is as in `balance_channels`.
    """
    source = ChannelConstant(rows.op, _weight_name(rows.op), _inputs_axis(rows.op))
    weight = np.asarray(source.var.val, np.float64)
    scales = np.broadcast_to(_aligned(source, np.exp2(exponents), weight.shape), weight.shape)
    plain_rows, scaled_rows = rows.to_rows(weight), rows.to_rows(weight * scales)
    scaled_inputs = inputs / torch.from_numpy(rows.to_rows(scales)[:, :1].copy())
    if range_of is not None:
        step = max(range_of(np.asarray(scaled_inputs.abs()).ravel()) / 127, fp16.NORMAL)
        scaled_inputs = dequantize(quantize(scaled_inputs, step, "int8"), step).double()
    form = forms.get(source.var)
    if form is not None:
        dtype, axis = np.asarray(source.var.val).dtype, rows.channel_axis
        hessians = second_moments(scaled_inputs)
        grid = fit_form(form, scaled_rows, hessians, rows.channels, axis, weight.ndim, dtype)
        rounded = [grid.nearest(part, group) for group, part in enumerate(scaled_rows)]
        scaled_rows = np.stack(rounded).astype(np.float64)
    expected = inputs @ torch.from_numpy(plain_rows.copy()).transpose(1, 2)
    difference = scaled_inputs @ torch.from_numpy(scaled_rows.copy()).transpose(1, 2) - expected
    squares = float((expected**2).sum())
    return float((difference**2).sum()) / squares if squares > 0 else 0.0


def apply_scales(group: Group, exponents: Array) -> None:
    """Multiply the weights of a group by 2**exponents, and divide its sources."""
    if not exponents.any():
        return
    for source, sign in _signed_constants(group):
        name = f"{source.var.name}_balanced"
        replace_constant(source.op, source.name, _scale(source, sign * exponents), name)
