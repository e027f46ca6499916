"""A weight as the rows of matrices that are multiplied with what an op reads, whatever the op is.

Each row makes one number of the results, and each column meets one input. So linear, matmul, conv (any groups,
strides and dilations), conv_transpose and gather have one form, in which weights are corrected.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from anesurgery.interpret.ops.windows import cuts, pad_axes, padding, steps
from anesurgery.mil import Array, Operation, Var, is_symbolic

Tensor = torch.Tensor


@dataclass(frozen=True)
class Rows:
    """How one op reads one weight."""

    op: Operation
    shape: tuple[int, ...]
    """Of the weight."""
    groups: int
    """Matrices, each of which meets inputs of its own."""
    order: tuple[int, ...]
    """The axes of the weight: that of the rows, then those of the columns."""
    channel: int
    """The axis of the weight along which the output channels lie."""
    inputs: Callable[[Mapping[str, Any]], Tensor | None]
    """The arguments of a run -> [groups, number, columns]; None where every row counts alike (a table)."""
    cut: int = 0
    """Which axis of `order` is cut into the groups: the rows, or (1) the first of the columns, as a
    conv_transpose has it, whose groups share the scales of their channels."""

    @property
    def layout(self) -> tuple[Any, ...]:
        """What two ops must have in common to be served by one correction."""
        return self.groups, self.order, self.channel, self.cut

    @property
    def count(self) -> int:
        """Output channels along `channel`."""
        return self.shape[self.channel]

    @property
    def in_group(self) -> int:
        """Rows of a group."""
        return self.shape[self.order[0]] // (1 if self.cut else self.groups)

    @property
    def outputs(self) -> Array:
        """[groups, rows]: the output channel of the op that each row makes a part of."""
        return np.arange(self.groups * self.in_group).reshape(self.groups, -1) if self.cut else self.channels

    @property
    def channels(self) -> Array:
        """[groups, rows]: the output channel along `channel` of each row."""
        along = [-1 if axis == self.channel else 1 for axis in range(len(self.shape))]
        numbers = np.arange(self.shape[self.channel]).reshape(along)
        return self.of(np.broadcast_to(numbers, self.shape))[:, :, 0]

    def of(self, weight: Array) -> Array:
        """[groups, rows, columns] of an array of the shape of the weight."""
        moved = weight.transpose(self.order)
        if self.cut:
            moved = np.moveaxis(moved.reshape(len(moved), self.groups, -1, *moved.shape[2:]), 1, 0)
        return moved.reshape(self.groups, self.in_group, -1)

    def back(self, rows: Array) -> Array:
        """An array of the shape of the weight, of its rows."""
        if self.cut:
            rows = np.moveaxis(rows, 0, 1)
        moved = rows.reshape([self.shape[axis] for axis in self.order])
        return moved.transpose(np.argsort(self.order))


Reader: TypeAlias = "Callable[[Operation, tuple[int, ...]], Rows | str]"


def rows_of(op: Operation, name: str) -> Rows | str:
    """How an op reads the weight that is its input of a name; or why that has no rows."""
    weight = op.inputs[name]
    assert isinstance(weight, Var)
    shape = tuple(int(n) for n in weight.shape)
    reader = READERS.get((op.op_type, name))
    if reader is None:
        return f"{op.op_type} reads it as {name}, which is no product"
    return reader(op, shape)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(1, -1, x.shape[-1])


def _product(weight: str) -> Reader:
    """X times y, one of which is the weight: of y the columns are output channels, of x the rows."""
    second = weight == "y"

    def read(op: Operation, shape: tuple[int, ...]) -> Rows | str:
        if len(shape) != 2:
            return f"it is a product of {len(shape)} axes"
        x_turned, y_turned = bool(op.transpose_x.val), bool(op.transpose_y.val)
        order = (0, 1) if (y_turned if second else not x_turned) else (1, 0)
        other, turned = ("x", x_turned) if second else ("y", not y_turned)

        def inputs(given: Mapping[str, Any]) -> Tensor:
            return _flat(given[other].transpose(-1, -2) if turned else given[other])

        return Rows(op, shape, 1, order, order[0], inputs)

    return read


def _table(op: Operation, shape: tuple[int, ...]) -> Rows | str:
    """Rows of a table, each of which is read as it is."""
    axis = 0 if op.inputs.get("axis") is None else int(op.axis.val)
    if axis % len(shape) or len(shape) != 2:
        return "it is looked up along another axis than the first"
    return Rows(op, shape, 1, (0, 1), 0, lambda given: None)


def _conv(op: Operation, shape: tuple[int, ...]) -> Rows | str:
    groups, axes = _number(op, "groups", 1), tuple(range(len(shape)))

    def inputs(given: Mapping[str, Any]) -> Tensor:
        x, (s, d) = given["x"], _windows(given, len(shape) - 2)
        pads = padding(
            given.get("pad_type", "valid"), given.get("pad"), list(x.shape[2:]), list(shape[2:]), s, d
        )
        return _patches(pad_axes(x, pads), shape[2:], s, d, groups)

    return Rows(op, shape, groups, axes, 0, inputs)


def _conv_transpose(op: Operation, shape: tuple[int, ...]) -> Rows | str:
    """The convolution of an input with zeros between its elements, its taps from the last to the first."""
    groups = _number(op, "groups", 1)
    if any(is_symbolic(n) for n in op.x.shape):
        return "its input has no fixed shape"

    def inputs(given: Mapping[str, Any]) -> Tensor:
        x, (s, d) = given["x"], _windows(given, len(shape) - 2)
        sizes, kernel = list(x.shape[2:]), list(shape[2:])
        full = [(n - 1) * t + (k - 1) * e + 1 for n, t, k, e in zip(sizes, s, kernel, d, strict=True)]
        wanted = given.get("output_shape")
        wanted = None if wanted is None else [int(n) for n in wanted][2:]
        same = [n * t for n, t in zip(sizes, s, strict=True)]
        ends = cuts(given.get("pad_type", "valid"), given.get("pad"), full, wanted, same)
        spread = x.new_zeros(*x.shape[:2], *[(n - 1) * t + 1 for n, t in zip(sizes, s, strict=True)])
        spread[(..., *[slice(None, None, t) for t in s])] = x
        reach = [(k - 1) * e for k, e in zip(kernel, d, strict=True)]
        pads = [(r - a, r - b) for r, (a, b) in zip(reach, ends, strict=True)]
        patches = _patches(pad_axes(spread, pads), shape[2:], [1] * len(s), d, groups)
        taps = patches.reshape(*patches.shape[:2], shape[0] // groups, *kernel)
        return taps.flip(list(range(3, taps.ndim))).reshape(patches.shape)

    order = (1, 0, *range(2, len(shape)))
    return Rows(op, shape, groups, order, 1, inputs, cut=int(groups > 1))


def _windows(given: Mapping[str, Any], axes: int) -> tuple[list[int], list[int]]:
    return steps(given.get("strides"), axes), steps(given.get("dilations"), axes)


def _patches(
    x: Tensor, kernel: tuple[int, ...], strides: list[int], dilations: list[int], groups: int
) -> Tensor:
    """[groups, places, channels of a group times taps] of a padded input."""
    lengths = [
        (n - (k - 1) * d - 1) // s + 1
        for n, k, d, s in zip(x.shape[2:], kernel, dilations, strides, strict=True)
    ]
    taps = []
    for at in itertools.product(*map(range, kernel)):
        cut = tuple(
            slice(i * d, i * d + (n - 1) * s + 1, s)
            for i, d, n, s in zip(at, dilations, lengths, strides, strict=True)
        )
        taps.append(x[(slice(None), slice(None), *cut)])
    found = torch.stack(taps, dim=2)  # batch, channels, taps, places ...
    batch, channels = found.shape[:2]
    parts = found.reshape(batch, groups, channels // groups, len(taps), -1)
    return parts.permute(1, 0, 4, 2, 3).reshape(groups, -1, channels // groups * len(taps))


def _number(op: Operation, name: str, default: int) -> int:
    given = op.inputs.get(name)
    return default if given is None else int(given.val)


READERS: dict[tuple[str, str], Reader] = {
    ("linear", "weight"): lambda op, shape: Rows(op, shape, 1, (0, 1), 0, lambda given: _flat(given["x"])),
    ("matmul", "y"): _product("y"),
    ("matmul", "x"): _product("x"),
    ("gather", "x"): _table,
    ("conv", "weight"): _conv,
    ("conv_transpose", "weight"): _conv_transpose,
}
"""(op type, input) -> how it reads a weight there."""
