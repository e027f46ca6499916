"""Operations of which coremltools' conversion loses a part: `x % 1`, `atan2`, circular padding, means.

Each converter here gives torch's numbers. `inspect` names what the host's own leave (`lost-...`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from anesurgery.frontend.arguments import Convert, argument, inputs_of, known_value, promoted
from anesurgery.mil import Var, mb, np_dtype


def remainder(host: Convert) -> Convert:
    """`x % 1`, of which the host's optimiser drops the division by 1, and with it the floor."""

    def convert(context: Any, node: Any) -> None:
        x, by = inputs_of(context, node)[:2]
        divisor = known_value(by)
        if divisor is None or np.size(divisor) != 1 or float(np.ravel(divisor)[0]) != 1:
            host(context, node)
            return
        x, _ = promoted([x, by])
        context.add(mb.sub(x=x, y=mb.floor(x=x), name=node.name))

    return convert


def angle_of_two(context: Any, node: Any) -> None:
    """`torch.atan2(y, x)` in all four quadrants and on the axes; -0.0 counts as 0.0."""
    y, x = promoted(inputs_of(context, node)[:2])
    one = np_dtype(x).type
    sizes = [mb.abs(x=v) for v in (y, x)]
    most = mb.maximum(x=mb.maximum(x=sizes[0], y=sizes[1]), y=one(np.finfo(one).tiny))
    angle = mb.atan(x=mb.real_div(x=mb.minimum(x=sizes[0], y=sizes[1]), y=most))
    steep = mb.greater(x=sizes[0], y=sizes[1])
    angle = mb.select(cond=steep, a=mb.sub(x=one(math.pi / 2), y=angle), b=angle)
    angle = mb.select(cond=mb.less(x=x, y=one(0)), a=mb.sub(x=one(math.pi), y=angle), b=angle)
    below = mb.less(x=y, y=one(0))
    context.add(mb.select(cond=below, a=mb.mul(x=angle, y=one(-1)), b=angle, name=node.name))


def circular(host: Convert) -> Convert:
    """Padding with what lies at the other end, which MIL's `pad` has no mode for."""

    def convert(context: Any, node: Any) -> None:
        mode = known_value(argument(context, node, 2, "mode", "constant"))
        if mode != "circular":
            host(context, node)
            return
        x, pads = inputs_of(context, node)[:2]
        amounts = np.ravel(known_value(pads)).astype(int).reshape(-1, 2).tolist()
        for i, (before, after) in enumerate(amounts):
            x = _wrapped(x, x.rank - 1 - i, before, after)
        context.add(mb.identity(x=x, name=node.name))

    return convert


def _wrapped(x: Var, axis: int, before: int, after: int) -> Var:
    """A value with its last elements in front, and its first ones at the end; negative amounts cut."""
    if min(before, after) < 0:
        x = _part(x, axis, max(-before, 0), min(after, 0) or None)
    parts = [_part(x, axis, -before, None)] * (before > 0) + [x] + [_part(x, axis, 0, after)] * (after > 0)
    joined: Var = mb.concat(values=parts, axis=axis) if len(parts) > 1 else x
    return joined


def _part(x: Var, axis: int, begin: int, end: int | None) -> Var:
    """Some elements of an axis."""
    first, last = [0] * x.rank, [0] * x.rank
    first[axis], last[axis] = begin, end or 0
    ends = [a != axis or end is None for a in range(x.rank)]
    begins = [a != axis for a in range(x.rank)]
    part: Var = mb.slice_by_index(x=x, begin=first, end=last, begin_mask=begins, end_mask=ends)
    return part


def within_ends(host: Convert) -> Convert:
    """A mean whose last windows reach beyond the end, which torch does not count."""

    def convert(context: Any, node: Any) -> None:
        host(context, node)
        mean = context[node.name]
        op = mean.op
        if op is None or op.op_type != "avg_pool" or op.ceil_mode is None or not op.ceil_mode.val:
            return
        if op.exclude_padding_from_average.val:
            return
        x, pads = op.x, [] if op.pad is None or op.pad_type.val != "custom" else list(op.pad.val)
        if any(pads):
            x = mb.pad(x=x, pad=[0] * 4 + pads, constant_val=np_dtype(x).type(0))
        inside = mb.avg_pool(
            x=x,
            kernel_sizes=op.kernel_sizes,
            strides=op.strides,
            pad_type="valid",
            ceil_mode=True,
            exclude_padding_from_average=True,
        )
        if inside.shape != mean.shape:  # a window that begins in the padding is none
            size = [-1 if a < 2 else int(n) for a, n in enumerate(mean.shape)]
            inside = mb.slice_by_size(x=inside, begin=[0] * inside.rank, size=size)
        context.add(mb.identity(x=inside, name=f"{node.name}_inside"), torch_name=node.name, override=True)

    return convert


def running_log_sum(context: Any, node: Any) -> None:
    """`torch.logcumsumexp(x, dim)` without the largest number, as exponentials above 11.09 overflow in fp16."""
    x = inputs_of(context, node)[0]
    axis = int(known_value(argument(context, node, 1, "dim", 0))) % x.rank
    most = mb.reduce_max(x=x, axes=[axis], keep_dims=True)
    total = mb.cumsum(x=mb.exp(x=mb.sub(x=x, y=most)), axis=axis)
    context.add(mb.add(x=mb.log(x=total), y=most, name=node.name))
