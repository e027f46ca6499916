"""Bring the weight of any op into one layout, rows of matrices that are multiplied with what the op reads.

Weights of linear, matmul, conv (any groups, strides and dilations), conv_transpose and gather become rows
[groups, rows, columns]: each row makes one channel of the result, and each column meets one input. So the
correction and the balancing of weights need not know the op. For a conv with weight [64, 32, 3, 3] the rows are
[1, 64, 288], and its inputs are the patches [1, places, 288].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from anesurgery.interpret.ops.windows import cuts, pad_axes, padding, steps
from anesurgery.mil import Array, Operation, Var, is_symbolic

Tensor = torch.Tensor


@dataclass(frozen=True)
class WeightRows:
    """The rows of one weight, as one op reads it."""

    op: Operation
    shape: tuple[int, ...]
    """The shape of the weight."""
    groups: int
    """The number of matrices; each meets inputs of its own."""
    order: tuple[int, ...]
    """The axes of the weight: first that of the rows, then those of the columns."""
    inputs: Callable[[Mapping[str, Any]], Tensor | None]
    """(arguments of the op) -> its inputs [groups, number, columns]; None for a table, from which rows are
    read."""
    splits_columns: bool = False
    """Do the groups split the first axis of the columns, and not that of the rows? Those of conv_transpose do,
    which share the scales of their channels."""

    @property
    def layout(self) -> tuple[Any, ...]:
        """What must be equal for two ops to share one correction of their weight."""
        return self.groups, self.order, self.splits_columns

    @property
    def channel_axis(self) -> int:
        """The axis of the weight along which the output channels lie."""
        return self.order[0]

    @property
    def channel_count(self) -> int:
        """The number of output channels along `channel_axis`."""
        return self.shape[self.channel_axis]

    @property
    def rows_per_group(self) -> int:
        """The number of rows of each group."""
        return self.channel_count // (1 if self.splits_columns else self.groups)

    @property
    def op_channels(self) -> Array:
        """[groups, rows]: the output channel of the op that each row contributes to."""
        return np.arange(self.groups * self.rows_per_group).reshape(self.groups, -1)

    @property
    def channels(self) -> Array:
        """[groups, rows]: the index of each row along `channel_axis`."""
        return self.op_channels % self.channel_count

    def to_rows(self, weight: Array) -> Array:
        """Return an array of the weight's shape as [groups, rows, columns]."""
        ordered = weight.transpose(self.order)
        if self.splits_columns:
            ordered = np.moveaxis(ordered.reshape(len(ordered), self.groups, -1, *ordered.shape[2:]), 1, 0)
        return ordered.reshape(self.groups, self.rows_per_group, -1)

    def from_rows(self, rows: Array) -> Array:
        """Return rows [groups, rows, columns] as an array of the weight's shape: the inverse of `to_rows`."""
        if self.splits_columns:
            rows = np.moveaxis(rows, 0, 1)
        ordered = rows.reshape([self.shape[axis] for axis in self.order])
        return ordered.transpose(np.argsort(self.order))


Reader: TypeAlias = "Callable[[Operation, tuple[int, ...]], WeightRows | str]"
"""(op, shape of the weight) -> its rows, or the reason why it has none."""


def weight_rows_of(op: Operation, name: str) -> WeightRows | str:
    """Return the rows of the weight that an op reads as its input `name`, or why it has none."""
    weight = op.inputs[name]
    assert isinstance(weight, Var)
    shape = tuple(int(n) for n in weight.shape)
    reader = READERS.get((op.op_type, name))
    if reader is None:
        return f"{op.op_type} reads it as {name}, which is no product"
    return reader(op, shape)


def _flatten(x: Tensor) -> Tensor:
    """Return x [..., columns] as one group of inputs [1, number, columns]."""
    return x.reshape(1, -1, x.shape[-1])


def _linear(op: Operation, shape: tuple[int, ...]) -> WeightRows:
    """Return the rows of a weight [outputs, inputs]."""
    return WeightRows(op, shape, 1, (0, 1), lambda given: _flatten(given["x"]))


def _matmul(weight: str) -> Reader:
    """Return the reader of a matmul with weight "x" or "y": columns of y, or rows of x, are output channels."""
    other = {"x": "y", "y": "x"}[weight]

    def read(op: Operation, shape: tuple[int, ...]) -> WeightRows | str:
        if len(shape) != 2:
            return f"it is a product of {len(shape)} axes"
        transposed = {"x": bool(op.transpose_x.val), "y": bool(op.transpose_y.val)}
        # x has its inputs on the last axis unless it is transposed, y only if it is
        inputs_last = {"x": not transposed["x"], "y": transposed["y"]}

        def inputs(given: Mapping[str, Any]) -> Tensor:
            return _flatten(given[other] if inputs_last[other] else given[other].transpose(-1, -2))

        return WeightRows(op, shape, 1, (0, 1) if inputs_last[weight] else (1, 0), inputs)

    return read


def _table(op: Operation, shape: tuple[int, ...]) -> WeightRows | str:
    """Return the rows of a table of embeddings, each of which is read as it is."""
    if len(shape) != 2:
        return f"it is a table of {len(shape)} axes"
    if _int_input(op, "axis", 0) % 2:
        return "it is looked up along another axis than the first"
    return WeightRows(op, shape, 1, (0, 1), lambda given: None)


def _conv(op: Operation, shape: tuple[int, ...]) -> WeightRows | str:
    """Return the rows of a weight [outputs, inputs of a group, taps ...], whose inputs are patches."""
    groups = _int_input(op, "groups", 1)

    def inputs(given: Mapping[str, Any]) -> Tensor:
        x, (strides, dilations) = given["x"], _strides_and_dilations(given, len(shape) - 2)
        pad_type, pad = given.get("pad_type", "valid"), given.get("pad")
        pads = padding(pad_type, pad, list(x.shape[2:]), list(shape[2:]), strides, dilations)
        return _patches(pad_axes(x, pads), shape[2:], strides, dilations, groups)

    return WeightRows(op, shape, groups, tuple(range(len(shape))), inputs)


def _conv_transpose(op: Operation, shape: tuple[int, ...]) -> WeightRows | str:
    """Return the rows of a weight [inputs, outputs of a group, taps ...].

    The op is a convolution of the input with zeros between its elements, with the taps in reverse order.
    """
    groups = _int_input(op, "groups", 1)
    if any(is_symbolic(n) for n in op.x.shape):
        return "its input has no fixed shape"

    def inputs(given: Mapping[str, Any]) -> Tensor:
        x, (strides, dilations) = given["x"], _strides_and_dilations(given, len(shape) - 2)
        sizes, kernel = list(x.shape[2:]), list(shape[2:])
        output_shape = given.get("output_shape")
        output_sizes = None if output_shape is None else [int(n) for n in output_shape][2:]
        pad_type, pad = given.get("pad_type", "valid"), given.get("pad")
        _, ends = cuts(pad_type, pad, zip(sizes, kernel, strides, dilations, strict=True), output_sizes)
        lengths = [(n - 1) * stride + 1 for n, stride in zip(sizes, strides, strict=True)]
        spread = x.new_zeros(*x.shape[:2], *lengths)
        spread[(..., *[slice(None, None, stride) for stride in strides])] = x
        reach = [(k - 1) * dilation for k, dilation in zip(kernel, dilations, strict=True)]
        pads = [(r - first, r - last) for r, (first, last) in zip(reach, ends, strict=True)]
        patches = _patches(pad_axes(spread, pads), shape[2:], [1] * len(strides), dilations, groups)
        taps = patches.reshape(*patches.shape[:2], shape[0] // groups, *kernel)
        return taps.flip(list(range(3, taps.ndim))).reshape(patches.shape)

    return WeightRows(op, shape, groups, (1, 0, *range(2, len(shape))), inputs, splits_columns=groups > 1)


def _strides_and_dilations(given: Mapping[str, Any], axes: int) -> tuple[list[int], list[int]]:
    """Return both for each of so many spatial axes."""
    return steps(given.get("strides"), axes), steps(given.get("dilations"), axes)


def _patches(
    x: Tensor, kernel: tuple[int, ...], strides: list[int], dilations: list[int], groups: int
) -> Tensor:
    """Return the patches of a padded input, [groups, batch * places, channels of a group * taps]."""
    for axis, (length, stride, dilation) in enumerate(zip(kernel, strides, dilations, strict=True), 2):
        x = x.unfold(axis, (length - 1) * dilation + 1, stride)[..., ::dilation]
    batch, channels = x.shape[:2]  # of batch, channels, places ..., taps ...
    parts = x.reshape(batch, groups, channels // groups, -1, math.prod(kernel))
    return parts.permute(1, 0, 3, 2, 4).reshape(groups, -1, channels // groups * math.prod(kernel))


def _int_input(op: Operation, name: str, default: int) -> int:
    """Return an integer input of an op, or the default where the op has none."""
    value = op.inputs.get(name)
    return default if value is None else int(value.val)


READERS: dict[tuple[str, str], Reader] = {
    ("linear", "weight"): _linear,
    ("matmul", "y"): _matmul("y"),
    ("matmul", "x"): _matmul("x"),
    ("gather", "x"): _table,
    ("conv", "weight"): _conv,
    ("conv_transpose", "weight"): _conv_transpose,
}
"""(op type, name of the input with the weight) -> reads the rows of that weight."""
