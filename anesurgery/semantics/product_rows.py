"""Rows of sums of products: linear, matmul, einsum, attention, convolutions, recurrent ops."""

from __future__ import annotations

import math

import numpy as np

from anesurgery.mil import Operation, Var, constant, is_stored, is_symbolic, operands
from anesurgery.semantics.constant_ends import ANY, Interval, of_constant
from anesurgery.semantics.meaning import (
    BROADCAST,
    CONTRACTED,
    MIXED,
    Axes,
    Meaning,
    Operand,
    Place,
    Ranges,
    times,
)
from anesurgery.semantics.reading import channels, elements, flag, ints, shape_of
from anesurgery.semantics.row_lengths import norms, row_length

GUARD = 1024.0
"""A value that is only known to be within more than this is guarded by a clip, and not described by it: clips
that bound what a network computes (relu6, hard sigmoids, coordinates) end lower."""


def reach(op: Operation, ranges: Ranges) -> float:
    """The largest magnitude of a sum: by the length of what is multiplied, or by its largest element."""
    if channels(op) is None or flag(op, "transpose_x"):
        return math.inf
    x = op.inputs.get("x")
    length = row_length(x, stored=ranges.stored) if op.op_type != "conv" else math.inf
    low, high = ranges.at(x) if math.isinf(length) else (0.0, length)
    most = max(abs(low), abs(high))
    weight = norms(op) if most <= GUARD else None
    if weight is None:
        return math.inf
    bias = op.inputs.get("bias")
    start = 0.0 if bias is None else max(map(abs, of_constant(bias)))
    return most * (weight.length if math.isfinite(length) else weight.sum) + start


def _bounded(op: Operation, ranges: Ranges) -> Interval:
    """By stored weights, through as many products as the question allows."""
    if ranges.products <= 0:
        return -math.inf, math.inf
    ranges.products -= 1
    most = reach(op, ranges)
    return -most, most


def _of_values(op: Operation, ranges: Ranges) -> Interval:
    """A stored weight bounds it; two values do by the largest of both and the number of terms."""
    if is_stored(op.x) or is_stored(op.y):
        return _bounded(op, ranges)
    length = op.x.shape[-2 if flag(op, "transpose_x") else -1]
    if is_symbolic(length):
        return ANY
    ends = [a * b for a in ranges.at(op.x) for b in ranges.at(op.y)]
    return ANY if any(map(math.isnan, ends)) else times(int(length), (min(ends), max(ends)))


def _terms(op: Operation) -> float:
    """How many products are added up for one result, and the bias."""
    if op.op_type == "matmul":
        length = op.x.shape[-2 if flag(op, "transpose_x") else -1]
        return math.inf if is_symbolic(length) else int(length)
    size = channels(op)
    return math.inf if size is None else size[1] * size[2] + 1


def _linear_axes(op: Operation) -> Axes:
    last = op.outputs[0].rank - 1
    bias = op.inputs.get("bias")
    return (
        Operand("x", op.x, (*range(op.x.rank - 1), CONTRACTED)),
        Operand("weight", op.weight, (last, CONTRACTED)),
        *([] if bias is None else [Operand("bias", bias, (last,))]),
    )


def _batched(var: Var, out: Var, last: tuple[Place, ...]) -> tuple[Place, ...]:
    """Axes aligned at the end, before the last two, of which one of length 1 broadcasts."""
    shift = out.rank - var.rank
    batch = [
        a + shift if n == out.shape[a + shift] else BROADCAST
        for a, n in enumerate(var.shape[: -len(last) or None])
    ]
    return (*batch, *last)


def _matmul_axes(op: Operation) -> Axes | None:
    out, rank = op.outputs[0], op.outputs[0].rank
    if min(op.x.rank, op.y.rank) < 2:
        return None
    rows: tuple[Place, ...] = (rank - 2, CONTRACTED)
    columns: tuple[Place, ...] = (CONTRACTED, rank - 1)
    return (
        Operand("x", op.x, _batched(op.x, out, rows[::-1] if flag(op, "transpose_x") else rows)),
        Operand("y", op.y, _batched(op.y, out, columns[::-1] if flag(op, "transpose_y") else columns)),
    )


def _einsum_axes(op: Operation) -> Axes | None:
    read, result = _letters(op)
    if any(len(set(letters)) < len(letters) for letters in (*read, result)):
        return None
    values = []
    for letters, var in zip(read, op.values, strict=True):
        places: list[Place] = []
        for letter, length in zip(letters, var.shape, strict=True):
            at = result.find(letter)
            same = at < 0 or length == op.outputs[0].shape[at]
            places.append(CONTRACTED if at < 0 else at if same else BROADCAST)
        values.append(Operand("values", var, tuple(places)))
    return tuple(values)


def _letters(op: Operation) -> tuple[list[str], str]:
    """The letters of each operand and of the result."""
    read, result = str(op.equation.val).replace(" ", "").split("->")
    return read.split(","), result


def _attention_axes(op: Operation) -> Axes:
    out, mask, rank = op.outputs[0], op.inputs.get("attn_mask"), op.outputs[0].rank
    return (
        Operand("query", op.query, _batched(op.query, out, (rank - 2, CONTRACTED))),
        Operand("key", op.key, _batched(op.key, out, (CONTRACTED, CONTRACTED))),
        Operand("value", op.value, _batched(op.value, out, (CONTRACTED, rank - 1))),
        *([] if mask is None else [Operand("attn_mask", mask, _mask_places(mask, op))]),
    )


def _mask_places(mask: Var, op: Operation) -> tuple[Place, ...]:
    rank, rows = op.outputs[0].rank, op.query.shape[-2]
    if mask.rank < 2:
        return (CONTRACTED,) * mask.rank
    last: tuple[Place, ...] = (rank - 2 if mask.shape[-2] == rows else BROADCAST, CONTRACTED)
    return _batched(mask, op.outputs[0], last)


def _conv_axes(op: Operation) -> Axes:
    """Each image by itself; a spatial axis too, where the window is 1 wide and moves by 1."""
    x, out, bias = op.x, op.outputs[0], op.inputs.get("bias")
    strides, pads = ints(op, "strides") or [1] * (x.rank - 2), ints(op, "pad")
    groups = (ints(op, "groups") or [1])[0]
    custom = str(constant(op.inputs.get("pad_type"))) == "custom"
    padded = [custom and any(pads[2 * i : 2 * i + 2]) for i in range(x.rank - 2)]
    alone = [
        a if op.weight.shape[a] == 1 and strides[a - 2] == 1 and not padded[a - 2] else MIXED
        for a in range(2, x.rank)
    ]
    deep = groups == x.shape[1] == out.shape[1]
    summed = 1 if deep else MIXED if groups > 1 else CONTRACTED
    inner: Place = MIXED if groups > 1 else CONTRACTED
    return (
        Operand("x", x, (0, summed, *alone)),
        Operand("weight", op.weight, (1 if deep or groups == 1 else MIXED, inner, *(MIXED for _ in alone))),
        *([] if bias is None else [Operand("bias", bias, (1 if deep or groups == 1 else MIXED,))]),
    )


def _images(op: Operation) -> Axes:
    """Each image by itself; how the rest goes together is not stated."""
    rest = [Operand(k, v, (MIXED,) * v.rank) for k, v in operands(op) if k in ("weight", "bias")]
    return Operand("x", op.x, (0, *(MIXED for _ in range(1, op.x.rank)))), *rest


def _conv(op: Operation) -> int:
    """2 * outputs * channels of a group * kernel; the gaps of a dilated kernel are not counted twice."""
    return 2 * elements(op.outputs[0]) * math.prod(shape_of(op.weight)[1:])


def _conv_transpose(op: Operation) -> int:
    """As the compiler counts it: 2 * outputs * channels of a group * kernel, whatever the strides."""
    weight, groups = shape_of(op.weight), int(np.asarray(op.groups.val)) if op.groups else 1
    return 2 * elements(op.outputs[0]) * max(weight[0] // groups, 1) * math.prod(weight[2:])


def _matmul(op: Operation) -> int:
    shape = shape_of(op.x)
    turned = flag(op, "transpose_x") and len(shape) > 1
    return 2 * elements(op.outputs[0]) * shape[-2 if turned else -1]


def _einsum(op: Operation) -> int:
    """2 * outputs * the lengths that are summed over."""
    read, result = _letters(op)
    lengths = {
        letter: size
        for letters, var in zip(read, op.values, strict=True)
        for letter, size in zip(letters, shape_of(var), strict=True)
    }
    return 2 * elements(op.outputs[0]) * math.prod(n for name, n in lengths.items() if name not in result)


def _attention(op: Operation) -> int:
    query, key, value = map(shape_of, (op.query, op.key, op.value))
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _recurrent(op: Operation) -> int:
    """2 * steps * rows * the numbers of every matrix, in both directions."""
    steps, rows = shape_of(op.x)[:2]
    matrices = [v for name, v in op.inputs.items() if name.startswith("weight") and v is not None]
    return 2 * steps * rows * sum(map(elements, matrices))


ROWS: dict[str, Meaning] = {
    "conv": Meaning(_bounded, _conv_axes, _conv, terms=_terms),
    "conv_transpose": Meaning(axes=_images, work=_conv_transpose),
    "einsum": Meaning(axes=_einsum_axes, work=_einsum),
    "linear": Meaning(
        _bounded, _linear_axes, lambda op: 2 * elements(op.outputs[0]) * shape_of(op.weight)[-1], terms=_terms
    ),
    "matmul": Meaning(_of_values, _matmul_axes, _matmul, terms=_terms),
    "scaled_dot_product_attention": Meaning(axes=_attention_axes, work=_attention),
    **dict.fromkeys(("gru", "lstm", "rnn"), Meaning(work=_recurrent)),
}
