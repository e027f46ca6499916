"""Fold a last axis that is too long for the chip into two axes.

Elementwise ops then work on rows of equal length. A convolution also reads a few numbers of the previous and
the next row; the pass puts these beside each row, and zeros at both ends, like the padding before. A
convolution with a stride, or a pool that does not overlap, works on separate rows if the stride divides their
length. Neighbouring ops share the rows: reshapes remain only where a long value enters or leaves a region.

Refuses when the axis has no divisor that gives rows of at most half the limit, when padding and stride do not
change the length exactly by the stride, when the stride does not divide a row, and for dynamic weights.

Why it helps: axes beyond 16384 (M1 to M3) or 65536 (M4 on) keep an op off the engine (reported on M1 Max,
measured on M4, macOS 27.0.1). What the pass gains in time was not measured.

Grade: bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb
from anesurgery.facts import windows
from anesurgery.mil import any_symbolic
from anesurgery.regions.small_builds import joined

POOLS = frozenset({"max_pool", "avg_pool"})
BY_CHANNEL = frozenset({"batch_norm", "instance_norm"})
"""Ops that take another axis after the channels as it is."""
TENSORS = frozenset({"x", "y", "a", "b", "cond"})
"""Operands of pointwise ops that may be long."""


class _Beyond(NamedTuple):
    """How many numbers a convolution reads beyond its row: 1 and 1 for a kernel of 3 with a stride of 1."""

    before: int
    after: int


@dataclass(frozen=True)
class FoldLongAxis(Rewrite):
    """Ops over an axis that is too long work on rows."""

    name = "fold_long_axis"
    kinds = an.ops.BY_ROWS
    tolerance = an.REASSOCIATED
    static = True
    limit: int = an.option(16384, least=2, of_target="axis")
    """The longest last axis that the chip takes (65536 from M4 on)."""

    def check(self, m: Match) -> Match | Refusal:
        """Match an op on a long operand that can work on rows."""
        op, length = m.root, _longest(m.root)
        if length <= self.limit:
            return an.NO_MATCH
        width = self.width(length)
        if width is None:
            bounds = f"{self.limit // 16} to {self.limit // 2}"
            return Refusal(f"{length} cannot be cut into equal rows of {bounds}", op)
        if op.op_type not in POOLS | {"conv"}:
            rank = op.outputs[0].rank
            fits = rank == 3 if op.op_type in BY_CHANNEL else rank <= 4
            return m.bind(width=width, beyond=None) if fits else Refusal(f"it has {rank} axes", op)
        beyond = _read_beyond(op, length, width)
        if isinstance(beyond, Refusal):
            return beyond
        if width + sum(beyond) > self.limit or max(beyond) > width:
            return Refusal(f"the kernel reads {sum(beyond)} numbers of other rows", op)
        return m.bind(width=width, beyond=beyond)

    def width(self, length: int) -> int | None:
        """Return the longest row that divides the axis and leaves room for what a kernel reads beside it."""
        least = -(-length // (self.limit // 2))
        return next((length // n for n in range(least, 8 * least) if length % n == 0), None)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        """Build the op on rows, and a reshape back."""
        op, width = m.root, m.width
        if op.op_type == "conv":
            rows = _convolved(mb, op, _rows(mb, op.x, width), m.beyond)
        elif op.op_type in POOLS:
            rows = _pooled(mb, op, _rows(mb, op.x, width))
        else:
            length = _longest(op)
            inputs = {
                name: _aligned(mb, value, width, length) if name in TENSORS else value
                for name, value in an.op_inputs(op).items()
            }
            rows = getattr(mb, op.op_type)(name=f"{op.outputs[0].name}_rows", **inputs)
        return mb.reshape(x=rows, shape=list(op.outputs[0].shape))


def _longest(op: an.Operation) -> int:
    """Return the longest last axis of the run-time values that an op reads."""
    read = [v for _, v in an.operands(op) if an.constant(v) is None]
    return max((int(v.shape[-1]) for v in read if v.rank and not any_symbolic(v.shape)), default=0)


def _read_beyond(op: an.Operation, length: int, width: int) -> _Beyond | Refusal:
    """Return what a convolution or a pool reads beyond a row, or why it cannot work on rows."""
    if op.x.rank != 3:
        return Refusal(f"%{op.x.name} has {op.x.rank} axes; one dimension is folded", op)
    stride, size = (an.ints(op, "strides") or [1])[0], int(op.outputs[0].shape[-1])
    if width % stride or size != length // stride:
        return Refusal(f"a stride of {stride} makes {size} of {length} in rows of {width}", op)
    if op.op_type in POOLS:
        apart = an.ints(op, "kernel_sizes")[0] == stride and not any(an.ints(op, "pad"))
        return _Beyond(0, 0) if apart else Refusal("the pool overlaps or is padded", op)
    if not an.is_stored(op.weight):
        return Refusal("the weight is dynamic", op)
    reach = (an.ints(op, "dilations") or [1])[0] * (int(op.weight.shape[-1]) - 1)
    left = windows.window_pads(op)[0]
    return _Beyond(left, max(reach - left - stride + 1, 0))


def _rows(mb: Builder, var: Var, width: int) -> Var:
    """Return a value with its last axis in rows; rows that were joined before are read again."""
    shape = [*var.shape[:-1], int(var.shape[-1]) // width, width]
    source = an.producer(var, "reshape")
    if source is not None and list(source.x.shape) == shape:
        return source.x
    name = f"{var.name}_rows"
    return mb.shared_value((name, var, width), [var], lambda mb: mb.reshape(x=var, shape=shape, name=name))


def _aligned(mb: Builder, value: Any, width: int, length: int) -> Any:
    """Return an operand that broadcasts with rows as it did with the long axis."""
    if not isinstance(value, Var) or not value.rank:
        return value
    last, held = int(value.shape[-1]), an.constant(value)
    folded = [*value.shape[:-1], *([last // width, width] if last == length else [1, 1])]
    if held is not None:
        return np.asarray(held).reshape(folded)
    return _rows(mb, value, width) if last == length else mb.reshape(x=value, shape=folded)


def _pooled(mb: Builder, op: an.Operation, x: Var) -> Var:
    """Pool along the rows."""
    kernel = [1, an.ints(op, "kernel_sizes")[0]]
    options = {k: v for k, v in op.inputs.items() if k == "exclude_padding_from_average" and v is not None}
    options |= {"kernel_sizes": kernel, "strides": kernel, "pad_type": "valid"}
    return getattr(mb, op.op_type)(x=x, name=f"{op.outputs[0].name}_rows", **options)


def _convolved(mb: Builder, op: an.Operation, x: Var, beyond: _Beyond) -> Var:
    """Convolve along the rows, with the ends of the neighbours beside each."""
    edit, weight = an.Edit.of(op.weight.shape).expanded(2), op.weight
    inputs = an.op_inputs(op, "pad", "pad_type")
    inputs |= {name: [1, an.ints(op, name)[0]] for name in ("strides", "dilations") if name in inputs}
    inputs["x"] = _with_neighbours(mb, x, beyond, op.x.name)
    inputs["weight"] = an.edit_weight(mb, weight, edit, f"{weight.name}_rows")
    return mb.conv(**inputs, pad_type="valid", name=f"{op.outputs[0].name}_rows")


def _with_neighbours(mb: Builder, x: Var, beyond: _Beyond, name: str) -> Var:
    """Return rows with the end of the row before and the beginning of the row after.

    Example: the rows 1 2 3 and 4 5 6, with one number before and one after, are 0 1 2 3 4 and 3 4 5 6 0.
    """
    n, c, rows, width = (int(d) for d in x.shape)
    values = [x]
    if beyond.before:
        begin, end = [0, 0, 0, width - beyond.before], [n, c, rows - 1, width]
        ends = mb.slice_by_index(x=x, begin=begin, end=end, name=f"{name}_ends")
        before = [_zeros(mb, x, beyond.before), ends]
        values.insert(0, mb.concat(values=before, axis=2, name=f"{name}_before"))
    if beyond.after:
        begin, end = [0, 0, 1, 0], [n, c, rows, beyond.after]
        starts = mb.slice_by_index(x=x, begin=begin, end=end, name=f"{name}_starts")
        after = [starts, _zeros(mb, x, beyond.after)]
        values.append(mb.concat(values=after, axis=2, name=f"{name}_after"))
    return joined(mb, values, 3, name=f"{name}_around")


def _zeros(mb: Builder, x: Var, width: int) -> Var:
    """Return a row of padding."""
    shape, kind = (int(x.shape[0]), int(x.shape[1]), 1, width), an.np_dtype(x)
    return mb.shared(("padding", *shape, kind.str), lambda: np.zeros(shape, kind), "padding")


@an.example((1, 1, 32768), dtype="fp16", opset="iOS17")
def example(x: Var) -> Var:
    """A blur over 32768 samples."""
    weight = np.array([1, 2, 1], np.float16).reshape(1, 1, 3)
    return mb.conv(x=x, weight=weight, pad_type="custom", pad=[1, 1], name="y")
