"""Scales of channels move out of what products read into their weights, so that both round better.

Before::

    x = layer_norm(x=h, gamma=g, beta=b)
    y = linear(x=x, weight=w)

After::

    x = layer_norm(x=h, gamma=g / s, beta=b / s)
    y = linear(x=x, weight=w * s)

with one s for each channel of x. Each s is a power of two, so only numbers below the normal ones of their type
are rounded otherwise, by less than the largest of their channel is rounded by anyway: without compression the
model computes the same. Trials are those of AWQ (by how
large a channel is) and of SmoothQuant (by that over how large its weights are), at several strengths; the one
with the least error of the products, as weights and inputs will be rounded, is taken where it gains.

The values of an attention are scaled by the rows of their projection, and its output projection takes the
scales back: each channel of what is looked at is a weighted sum of that channel of the values.

Refuses where anything else reads x or one of the weights, as a cache reads values that it keeps, or where x is
not made by constants of its channels: a norm, a product, or a product of two values, behind relu or by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from anesurgery import fp16
from anesurgery.compressing.correcting import op_by_op
from anesurgery.compressing.fitting import grid_of
from anesurgery.compressing.second_order import moments
from anesurgery.compressing.storing import Key, hold, key_of
from anesurgery.compressing.weight_forms import read_form
from anesurgery.compressing.weight_rows import READERS, Rows, rows_of
from anesurgery.files.package import Loaded
from anesurgery.interpret.core import Executable, Step
from anesurgery.interpret.ops.constexpr import dequantize, quantize
from anesurgery.mil import Array, Function, Operation, Program, Var, constant, is_output, static_shape

STRENGTHS = (0.25, 0.5, 0.75, 1.0)
"""Exponents of the size of a channel; 0 is the model as it is."""
GAIN = 0.95
"""Share of the error that is left at most where scales are taken: less is within what samples vary by."""
REACH = 6
"""The largest exponent of two, either way: numbers of fp16 near 1 stay normal."""
NEAR = 2.0**-12
"""Of the largest number of a channel: what fp16 rounds it by at most."""
ROWS = 1024
"""Positions of all samples together that trials are measured on: a choice, as each trial multiplies them by the
weights."""
COMMUTES = ("relu", "identity")
"""Ops that a positive factor goes through."""
MOVES = ("transpose", "reshape", "expand_dims", "squeeze")
"""Ops that keep numbers, and may keep an axis whole."""

MIXERS = {"matmul": "y", "scaled_dot_product_attention": "value"}
"""Products of two values -> the input whose last axis they hand on: rows are weighted sums of its rows."""

Axes = tuple[int, ...]
"""Along which the channels of a value lie, the outermost first: those of an attention lie along two."""
Quantize = Callable[[Array], float]
"""The sizes of what a product reads -> the range that its 8 bits hold."""


@dataclass(frozen=True)
class Held:
    """A constant that scales along one of its axes."""

    op: Operation
    """That reads it."""
    name: str
    """Of the input."""
    axis: int
    """Of the constant, along which the channels lie."""

    @property
    def var(self) -> Var:
        """The constant."""
        var = self.op.inputs[self.name]
        assert isinstance(var, Var)
        return var

    @property
    def key(self) -> tuple[str, int, Key]:
        """What the same place in another function has in common with it."""
        return self.name, self.axis, key_of(self.var)


@dataclass(frozen=True)
class Group:
    """A value, the products that read it, and the constants that make it."""

    x: Var
    axis: int
    """Of the value, along which the channels lie."""
    readers: tuple[Rows, ...]
    sources: tuple[Held, ...]

    @property
    def weights(self) -> tuple[Held, ...]:
        """The weights of the readers."""
        return tuple(Held(r.op, _weight_name(r.op), _inputs_axis(r.op)) for r in self.readers)

    @property
    def key(self) -> tuple[Any, ...]:
        """What the same group of another function has in common with it."""
        return tuple(sorted(map(repr, (h.key for h in (*self.weights, *self.sources)))))


@dataclass(frozen=True)
class Balanced:
    """What became of one value that products read."""

    value: str
    readers: tuple[str, ...]
    """Names of the products."""
    error: tuple[float, float]
    """Of the products, squared, as a share: as the model was, and with the scales that were taken."""
    why: str = ""
    """The reason where it stays."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"value": self.value, "readers": list(self.readers), "error": list(self.error), "why": self.why}


def groups_of(function: Function) -> tuple[list[Group], dict[Var, str]]:
    """The values of a function whose channels can be scaled, and why those of other products cannot."""
    groups: list[Group] = []
    why: dict[Var, str] = {}
    asked = dict.fromkeys(op.x for op in function.operations if (op.op_type, _weight_name(op)) in READERS)
    for x in asked:
        if constant(x) is None:
            group = _group(x)
            if isinstance(group, Group):
                groups.append(group)
            else:
                why[x] = group
    return groups, why


def _group(x: Var) -> Group | str:
    """The group of a value, or why it has none."""
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
        read = rows_of(op, name)
        if not isinstance(read, Rows):
            return read
        if any(other not in x.child_ops for other in weight.child_ops):
            return f"the weight of {op.name!r} is read elsewhere too"
        readers.append(read)
        axes.add(axis)
    if len(axes) != 1:
        return "its readers multiply along different axes"
    (axis,) = axes
    sources = _sources(x, (axis,))
    return sources if isinstance(sources, str) else Group(x, axis, tuple(readers), sources)


def _weight_name(op: Operation) -> str:
    return "y" if op.op_type == "matmul" else "weight"


def _channel_axis(op: Operation) -> int | None:
    """The axis of x that a product sums over; None of an op that is none, or sums over another."""
    if op.op_type == "conv":
        return 1
    if op.op_type == "linear" or (op.op_type == "matmul" and not op.transpose_x.val):
        return len(op.x.shape) - 1
    return None


def _inputs_axis(op: Operation) -> int:
    """The axis of the weight that meets the channels of x."""
    return 0 if op.op_type == "matmul" and not op.transpose_y.val else 1


def _sources(var: Var, axes: Axes) -> tuple[Held, ...] | str:
    """The constants that scale a value along the axes of its channels, or why there are none."""
    op = var.op
    if op is None:
        return "it is an input"
    if op.op_type in COMMUTES:
        return _only(op, "x", axes)
    if op.op_type in MOVES and (before := _moved_from(op, axes)) is not None:
        return _only(op, "x", before)
    if (mixed := _mixed_from(op, axes)) is not None:
        return _only(op, *mixed)
    if op.op_type in ("mul", "add"):
        return _of_two(op, axes)
    row = MAKERS.get(op.op_type)
    places = None if row is None or len(axes) > 1 else row(op, axes[0])
    if places is None:
        return f"{op.op_type} {op.name!r} makes it, which has no constant for each of its channels"
    return _stored(op, places, int(var.shape[axes[0]]))


def _stored(op: Operation, places: Mapping[str, int], channels: int) -> tuple[Held, ...] | str:
    """Constants of an op that nothing else reads."""
    for name, axis in places.items():
        held = op.inputs.get(name)
        if not isinstance(held, Var) or constant(held) is None:
            return f"{op.op_type} {op.name!r} makes it, whose {name} is not stored"
        if any(other is not op for other in held.child_ops):
            return f"{name} of {op.name!r}, which makes it, is read elsewhere too"
        if not -len(held.shape) <= axis < len(held.shape) or held.shape[axis] != channels:
            return f"{op.op_type} {op.name!r} makes it, whose {name} has no number for each channel"
    return tuple(Held(op, name, axis) for name, axis in places.items())


def _moved_from(op: Operation, axes: Axes) -> Axes | None:
    """The axes of x that an op moves to axes of its result; None where they are cut or joined with others."""
    if op.op_type == "transpose":
        return tuple(int(op.perm.val[axis]) % len(op.perm.val) for axis in axes)
    before, after = static_shape(op.x), static_shape(op.outputs[0])
    if before is None or after is None or list(axes) != list(range(axes[0], axes[-1] + 1)):
        return None
    size, inner = math.prod(after[a] for a in axes), math.prod(after[axes[-1] + 1 :])
    runs = [range(first, last + 1) for last in range(len(before)) for first in range(last + 1)]
    for run in sorted(runs, key=len):  # axes of one number beside them are none of theirs
        if (math.prod(before[a] for a in run), math.prod(before[run[-1] + 1 :])) == (size, inner):
            return tuple(run)
    return None


def _mixed_from(op: Operation, axes: Axes) -> tuple[str, Axes] | None:
    """The input whose channels a product of two values hands on, each by itself: the values of an attention.

    Returns:
        The name of the input and the axes of its channels; None where an op mixes them, or is none such.
    """
    name = MIXERS.get(op.op_type)
    value = op.inputs.get(name or "")
    shape, result = (static_shape(v) if isinstance(v, Var) else None for v in (value, op.outputs[0]))
    if (
        name is None
        or shape is None
        or result is None
        or len(shape) != len(result)
        or constant(value) is not None
    ):
        return None
    last, rows = len(result) - 1, len(result) - 2
    if last not in axes or rows in axes or any(shape[a] != result[a] for a in axes if a != last):
        return None
    turned = op.op_type == "matmul" and bool(op.transpose_y.val)
    return name, tuple(rows if a == last and turned else a for a in axes)


def _only(op: Operation, name: str, axes: Axes) -> tuple[Held, ...] | str:
    """What makes an input of an op, where that op alone reads it."""
    var = op.inputs[name]
    assert isinstance(var, Var)
    if is_output(var) or any(other is not op for other in var.child_ops):
        return f"{var.name!r}, its source, is read elsewhere too"
    if sum(each is var for each in op.inputs.values()) > 1:
        return f"{op.op_type} {op.name!r} makes it of one value twice"
    return _sources(var, axes)


def _of_two(op: Operation, axes: Axes) -> tuple[Held, ...] | str:
    """Of a product one factor is scaled, a stored one first; of a sum both terms, one of which is stored."""
    rank, sizes = len(op.outputs[0].shape), [int(op.outputs[0].shape[axis]) for axis in axes]
    names = sorted(("x", "y"), key=lambda name: constant(op.inputs[name]) is None)
    if op.x is op.y:
        return f"{op.op_type} {op.name!r} makes it of one value twice"
    found: list[tuple[Held, ...] | str] = []
    for name in names:
        var = op.inputs[name]
        if constant(var) is not None and len(axes) == 1:
            found.append(_stored(op, {name: axes[0] - rank + len(var.shape)}, sizes[0]))
        elif constant(var) is not None:
            found.append(f"the channels of {var.name!r} lie along several axes")
        elif len(var.shape) == rank and [var.shape[axis] for axis in axes] == sizes:
            found.append(_only(op, name, axes))
        else:
            found.append(f"{var.name!r}, its source, is spread over its channels")
    first, second = found
    if op.op_type == "mul":
        return second if isinstance(first, str) else first
    if constant(op.inputs[names[0]]) is None:
        return f"add {op.name!r} makes it of two values"
    if isinstance(first, str) or isinstance(second, str):
        return first if isinstance(first, str) else second
    return (*first, *second)


def _with_bias(places: dict[str, int], op: Operation) -> dict[str, int]:
    return places if op.inputs.get("bias") is None else {**places, "bias": 0}


def _of_norm(op: Operation, axis: int) -> dict[str, int] | None:
    rank = len(op.x.shape)
    axes = None if op.inputs.get("axes") is None else [int(a) % rank for a in op.axes.val]
    if axes != [axis] or op.inputs.get("gamma") is None:
        return None
    return {"gamma": 0} if op.inputs.get("beta") is None else {"gamma": 0, "beta": 0}


def _of_batch_norm(op: Operation, axis: int) -> dict[str, int] | None:
    whole = axis == 1 and op.inputs.get("gamma") is not None and op.inputs.get("beta") is not None
    return {"gamma": 0, "beta": 0} if whole else None


def _of_matmul(op: Operation, axis: int) -> dict[str, int] | None:
    if axis != len(op.outputs[0].shape) - 1 or len(op.y.shape) != 2:
        return None
    return {"y": 0 if op.transpose_y.val else 1}


def _of_conv_transpose(op: Operation, axis: int) -> dict[str, int] | None:
    grouped = op.inputs.get("groups") is not None and int(op.groups.val) > 1
    return _with_bias({"weight": 1}, op) if axis == 1 and not grouped else None


MAKERS: dict[str, Callable[[Operation, int], dict[str, int] | None]] = {
    "layer_norm": _of_norm,
    "batch_norm": _of_batch_norm,
    "linear": lambda op, axis: _with_bias({"weight": 0}, op) if axis == len(op.x.shape) - 1 else None,
    "matmul": _of_matmul,
    "conv": lambda op, axis: _with_bias({"weight": 0}, op) if axis == 1 else None,
    "conv_transpose": _of_conv_transpose,
}
"""Op type -> the inputs that scale an axis of its result, and along which of their axes; None where none do."""


def balance_channels(
    loaded: Loaded,
    name: str,
    samples: Sequence[Mapping[str, Any]],
    forms: Mapping[Var, str | None],
    quantized: Quantize | None = None,
) -> list[Balanced]:
    """Move scales of channels into the weights where the products get better by it.

    Args:
        loaded: the model, which is edited, in all functions alike.
        name: of the function whose samples they are.
        samples: as the function takes them.
        forms: what each weight will be; one that is not there stays as it is.
        quantized: the range of inputs of 8 bits; None where they stay as they are.

    Returns:
        A row for each value that products with one of these weights read.
    """
    program = loaded.program
    function = program.functions[name]
    groups, why = groups_of(function)
    asked = [g for g in groups if any(forms.get(h.var) for h in g.weights)]
    kept, others = [], _Others(program, function)
    for group in asked:
        reason = _spread(group, forms) or others.reason(group)
        if reason:
            why[group.x] = reason
        else:
            kept.append(group)
    trials = {group.x: _Trials(group, forms, quantized) for group in kept}
    by_op = {r.op: (trials[g.x], r) for g in kept for r in g.readers}

    def measure(step: Step, given: Sequence[Mapping[str, Any]]) -> Step:
        each, rows = by_op[step.op]
        each.add(rows, given)
        return step

    if kept:
        op_by_op(Executable(program, function=name, fuse=False), samples, measure, set(by_op))
    made = [trials[group.x].result() for group in kept]
    for group in kept:
        exponents = trials[group.x].best
        for alike in (group, *others.of(group)):
            apply(alike, exponents)
    products = [x for x in why if any(forms.get(v) for op in x.child_ops for _, v in _constants(op))]
    return [
        *made,
        *(Balanced(x.name, tuple(op.name for op in x.child_ops), (0.0, 0.0), why[x]) for x in products),
    ]


def _constants(op: Operation) -> Iterator[tuple[str, Var]]:
    for name in ("weight", "y"):
        if isinstance(var := op.inputs.get(name), Var):
            yield name, var


def _spread(group: Group, forms: Mapping[Var, str | None]) -> str:
    """Why the weights that make a value are not to be scaled; empty where they may."""
    for held in group.sources:
        form = forms.get(held.var)
        if form is not None and read_form(form).kind == "palette":
            return f"the weight of {held.op.name!r}, which makes it, has one table, which scales would spread"
    return ""


class _Others:
    """The groups of the other functions, which must be scaled alike where they hold the same numbers."""

    def __init__(self, program: Program, function: Function) -> None:
        self.functions = {n: f for n, f in program.functions.items() if f is not function}
        self.groups = {n: {g.key: g for g in groups_of(f)[0]} for n, f in self.functions.items()}

    def of(self, group: Group) -> Iterator[Group]:
        """The same group elsewhere."""
        if self.functions:
            key = group.key
            yield from (groups[key] for groups in self.groups.values() if key in groups)

    def reason(self, group: Group) -> str:
        """Why a group cannot be scaled in all functions; empty where it can."""
        if not self.functions:
            return ""
        key, held = group.key, {key_of(h.var) for h in group.weights}
        shapes = {shape for shape, _, _ in held}
        for name, function in self.functions.items():
            consts = (op.outputs[0] for op in function.operations if op.op_type == "const")
            alike = (v for v in consts if isinstance(v.val, np.ndarray) and v.val.shape in shapes)
            if key not in self.groups[name] and any(key_of(var) in held for var in alike):
                return f"the function {name!r} reads one of the weights otherwise"
        return ""


@dataclass
class _Trials:
    """The scales that are tried for one group, and the error that each leaves."""

    group: Group
    forms: Mapping[Var, str | None]
    quantized: Quantize | None
    exponents: list[Array] = field(default_factory=list)
    """Of two, for each trial [channels]; the first is all 0."""
    errors: Array = field(default_factory=lambda: np.zeros(0))

    def add(self, rows: Rows, given: Sequence[Mapping[str, Any]]) -> None:
        """Measure the trials on what one reader sees."""
        if not self.exponents:
            self.exponents = self._tried([values["x"] for values in given])
            self.errors = np.zeros(len(self.exponents))
        inputs = _some(rows, given)
        for number, exponents in enumerate(self.exponents):
            self.errors[number] += _error(rows, inputs, exponents, self.forms, self.quantized)

    @property
    def best(self) -> Array:
        """The exponents that are taken."""
        number = int(self.errors.argmin())
        return self.exponents[number if self.errors[number] < GAIN * self.errors[0] else 0]

    def result(self) -> Balanced:
        """What became of the value."""
        taken = bool(self.best.any())
        number, count = int(self.errors.argmin()) if taken else 0, len(self.group.readers)
        why = "" if taken else f"no scales leave less than {GAIN:.0%} of the error"
        error = float(self.errors[0]) / count, float(self.errors[number]) / count
        return Balanced(self.group.x.name, tuple(r.op.name for r in self.group.readers), error, why)

    def _tried(self, values: Sequence[torch.Tensor]) -> list[Array]:
        axis = self.group.axis
        sizes = [x.double().abs().movedim(axis, -1).reshape(-1, x.shape[axis]) for x in values]
        largest = np.asarray(torch.stack([s.amax(0) for s in sizes]).amax(0))
        mean = np.asarray(torch.cat(sizes).mean(0)) if self.quantized is None else largest
        weight = np.max([_largest(h, len(largest)) for h in self.group.weights], axis=0)
        tried = [np.zeros(len(largest), np.int64)]
        for strength in STRENGTHS:
            for size in (mean**strength, mean**strength / np.maximum(weight, 1e-30) ** (1 - strength)):
                exponents = _powers(np.where((largest > 0) & (weight > 0), size, 0.0))
                tried.append(self._exact(exponents, largest))
        return tried

    def _exact(self, exponents: Array, largest: Array) -> Array:
        """Exponents of 0 where others would change a stored number, or overflow."""
        finite = largest * np.exp2(-exponents) < fp16.LARGEST / 2
        exponents = np.where(finite, exponents, 0)
        for held, sign in _signed(self.group):
            exponents = np.where(_kept(held, sign * exponents), exponents, 0)
        return exponents


def _largest(held: Held, channels: int) -> Array:
    """The largest number of each channel."""
    weight = np.abs(np.asarray(held.var.val, np.float64))
    channel = np.broadcast_to(_factor(held, np.arange(channels), weight.shape), weight.shape)
    found = np.zeros(channels)
    np.maximum.at(found, channel.ravel(), weight.ravel())
    return found


def _powers(sizes: Array) -> Array:
    """The nearest exponents of two, about a mean of 0; 0 for a size of 0."""
    known = sizes > 0
    logs = np.log2(np.where(known, sizes, 1.0))
    middle = logs[known].mean() if known.any() else 0.0
    return np.where(known, np.clip(np.rint(logs - middle), -REACH, REACH), 0).astype(np.int64)


def _signed(group: Group) -> Iterator[tuple[Held, int]]:
    """The constants of a group: weights get the scales, what makes the value loses them."""
    yield from ((held, 1) for held in group.weights)
    yield from ((held, -1) for held in group.sources)


def _factor(held: Held, numbers: Array, shape: tuple[int, ...]) -> Array:
    """Numbers of channels in a shape that broadcasts to a constant; those of a group meet its rows only."""
    if held.op.op_type == "conv" and held.axis == 1:
        groups = len(numbers) // shape[1]
        rows = numbers.reshape(groups, shape[1]).repeat(shape[0] // groups, axis=0)
        return rows.reshape(*rows.shape, *[1] * (len(shape) - 2))
    return numbers.reshape([-1 if axis == held.axis % len(shape) else 1 for axis in range(len(shape))])


def _scaled(held: Held, exponents: Array) -> Array:
    """A constant, scaled, in its type."""
    value = np.asarray(held.var.val)
    return np.asarray(np.ldexp(value, _factor(held, exponents, value.shape)).astype(value.dtype))


def _kept(held: Held, exponents: Array) -> Array:
    """[channels]: do the numbers of a constant come back, as near as their largest is rounded?"""
    value = np.asarray(held.var.val)
    with np.errstate(over="ignore", under="ignore"):
        scaled = _scaled(held, exponents).astype(np.float64)
        off = np.abs(np.ldexp(scaled, -_factor(held, exponents, value.shape)) - value)
    fine = np.isfinite(scaled) & (off <= NEAR * _factor(held, _largest(held, len(exponents)), value.shape))
    channel = np.broadcast_to(_factor(held, np.arange(len(exponents)), value.shape), value.shape)
    kept = np.ones(len(exponents), np.bool_)
    np.logical_and.at(kept, channel.ravel(), fine.ravel())
    return kept


def _some(rows: Rows, given: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """[groups, number, columns]: some of what an op reads, spread evenly over the samples."""
    each = -(-ROWS // len(given))
    found = []
    for values in given:
        inputs = rows.inputs(values)
        assert inputs is not None
        found.append(inputs[:, :: max(1, inputs.shape[1] // each)])
    return torch.cat(found, dim=1).double()


def _error(
    rows: Rows,
    inputs: torch.Tensor,
    exponents: Array,
    forms: Mapping[Var, str | None],
    quantized: Quantize | None,
) -> float:
    """Of the products with rounded weights and inputs, squared, as a share of their squares."""
    held = Held(rows.op, _weight_name(rows.op), _inputs_axis(rows.op))
    weight = np.asarray(held.var.val, np.float64)
    factor = np.broadcast_to(_factor(held, np.exp2(exponents), weight.shape), weight.shape)
    plain, scaled = rows.of(weight), rows.of(weight * factor)
    read = inputs / torch.from_numpy(rows.of(factor)[:, :1].copy())
    if quantized is not None:
        scale = max(quantized(np.asarray(read.abs()).ravel()) / 127, fp16.NORMAL)
        coded = dequantize(quantize(read, scale, "int8"), scale).double()
    else:
        coded = read
    form = forms.get(held.var)
    if form is not None:
        dtype = np.asarray(held.var.val).dtype
        grid = grid_of(form, scaled, moments(coded), rows.channels, rows.channel, weight.ndim, dtype)
        scaled = np.stack([grid.nearest(part, group) for group, part in enumerate(scaled)]).astype(np.float64)
    expected = inputs @ torch.from_numpy(plain.copy()).transpose(1, 2)
    off = coded @ torch.from_numpy(scaled.copy()).transpose(1, 2) - expected
    whole = float((expected**2).sum())
    return float((off**2).sum()) / whole if whole > 0 else 0.0


def apply(group: Group, exponents: Array) -> None:
    """Scale the constants of a group."""
    if not exponents.any():
        return
    for held, sign in _signed(group):
        hold(held.op, held.name, _scaled(held, sign * exponents), f"{held.var.name}_balanced")
