"""Rows of ops that sum or reduce: products, convolutions, reductions, sums so far, orders, norms."""

from __future__ import annotations

import math

import numpy as np

from anesurgery.mil import (
    Operation,
    Var,
    constant,
    is_stored,
    is_symbolic,
    np_dtype,
    operands,
    producer,
    static_shape,
)
from anesurgery.ops import ALONG, REDUCTIONS, names
from anesurgery.semantics.constant_ends import ANY, CORRECT, NORMAL, Interval, gain, of_constant
from anesurgery.semantics.meaning import (
    BROADCAST,
    CONTRACTED,
    MIXED,
    OF_WHOLE,
    Axes,
    Meaning,
    Operand,
    Place,
    Ranges,
    axes_given,
    mixing,
    only,
    same,
    times,
    unless_summed,
)
from anesurgery.semantics.reading import axis_of, channels, elements, flag, ints, number, shape_of
from anesurgery.semantics.row_lengths import epsilon_of, longest, norms, row_length

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


PRODUCT_ROWS: dict[str, Meaning] = {
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


def _softmax(op: Operation, ranges: Ranges) -> Interval:
    """Of scores that lie near each other no share is near 0."""
    (low, high), shape, axis = ranges.at(op.x), static_shape(op.x), number(op.axis)
    if not shape or axis is None or not math.isfinite(high - low):
        return 0.0, 1.0
    least = math.exp(min(low - high, 0.0)) / shape[int(axis)] / 2  # half of it is left to rounding
    return (least if least >= NORMAL else 0.0), 1.0


def _reduced(op: Operation, word: str = CONTRACTED) -> Axes | None:
    """Axes that become one number each; of the others, the order stays."""
    name = "axes" if op.op_type in REDUCTIONS else "axis"
    if op.inputs.get(name) is not None and not ints(op, name):
        return None
    default = range(op.x.rank) if name == "axes" else (-1,)
    gone = axes_given(op, name, op.x.rank, default) if op.x.rank else set()
    places: list[Place] = []
    for axis in range(op.x.rank):
        before = 0 if flag(op, "keep_dims") else sum(a < axis for a in gone)
        places.append(word if axis in gone else axis - before)
    return only(op, places)


def _along(op: Operation) -> Axes | None:
    """Each place of the axes that are not named works by itself; by default the last is."""
    name = ALONG[op.op_type]
    if op.inputs.get(name) is not None and not ints(op, name):
        return None
    default = range(op.x.rank) if name == "axes" else (0 if op.op_type == "cumsum" else -1,)
    return mixing(op, axes_given(op, name, op.x.rank, default)) if op.x.rank else None


def _normalized(op: Operation) -> Axes | None:
    """A norm with a factor and an offset for each element of the axes that it takes together."""
    x = _along(op)
    stored = [op.inputs.get(k) for k in ("gamma", "beta")]
    return x and (*x, *(Operand("gamma", v, (MIXED,) * v.rank) for v in stored if v is not None))


def _channels(op: Operation) -> Axes:
    """Parameters for each channel; an instance norm takes each plane together."""
    rank, mixed = op.x.rank, op.op_type == "instance_norm"
    x = Operand("x", op.x, (0, 1, *(MIXED if mixed else a for a in range(2, rank))))
    stored = [(k, op.inputs.get(k)) for k in ("mean", "variance", "gamma", "beta")]
    return x, *(Operand(k, v, (1,)) for k, v in stored if v is not None)


def _pictures(op: Operation) -> Axes:
    """The last three axes are taken together."""
    return mixing(op, {*range(op.x.rank - 3, op.x.rank)})


def summed(op: Operation) -> float:
    """How many elements a reduction takes together; infinite where the shape is symbolic."""
    shape, axes = static_shape(op.x), ints(op, "axes")
    if shape is None:
        return math.inf
    return float(math.prod(shape[a] for a in axes) if axes else math.prod(shape))


def _sum(op: Operation, ranges: Ranges) -> Interval:
    low, high = times(summed(op), ranges.at(op.x))
    return (max(low, 0.5), high) if _holds_a_one(op) else (low, high)  # half of it is left to rounding


def _length(op: Operation, ranges: Ranges) -> Interval:
    """Of the sum of squares the root, unless the sum itself is asked for; squares of integers start again."""
    if np_dtype(op.x).kind != "f":
        return ANY
    low, high = ranges.at(op.x)
    least = 0.0 if low <= 0 <= high else min(abs(low), abs(high))
    squares = ranges.rounded(op, (least**2, max(low * low, high * high)), CORRECT)
    ends = times(summed(op), squares)
    if op.op_type == "reduce_sum_square":
        return ends
    low, high = ranges.rounded(op, ends, 2 * summed(op))
    return math.sqrt(low), math.sqrt(high)


def _log_sum_exp(op: Operation, ranges: Ranges) -> Interval:
    """As much above the numbers as the logarithm of their count; a step of fp16 is added on either side."""
    count = summed(op)
    if math.isinf(count):
        return ANY
    low, high = (end + math.log(count) for end in ranges.at(op.x))
    return low - ROUNDED * max(abs(low), 1.0), high + ROUNDED * max(abs(high), 1.0)


ROUNDED = 2.0**-10
"""A step of fp16 at 1."""


def _holds_a_one(op: Operation) -> bool:
    """Is one of the numbers exp(0), since they are exponentials of what is left without the largest?"""
    exponential = producer(op.x, "exp")
    left = None if exponential is None else producer(exponential.x, "sub")
    largest = None if left is None else producer(left.y, "reduce_max")
    if left is None or largest is None or largest.x is not left.x or not flag(largest, "keep_dims"):
        return False
    axes = [axes_given(of, "axes", of.x.rank, range(of.x.rank)) for of in (largest, op)]
    return axes[0] <= axes[1]


def _product(op: Operation, ranges: Ranges) -> Interval:
    """Numbers that are not negative have such a product; that of others has no known sign."""
    (low, high), count = ranges.at(op.x), summed(op)
    if low < 0 or math.isinf(count):
        return ANY
    with np.errstate(over="ignore"):
        ends = np.float64(low) ** count, np.float64(high) ** count
    return float(ends[0]), float(ends[1])


def _running(op: Operation, ranges: Ranges) -> Interval:
    """Sums of none up to all elements of an axis."""
    numbers = ranges.at(op.x)
    length = (static_shape(op.x) or (math.inf,) * op.x.rank)[int(number(op.inputs.get("axis")) or 0)]
    low, high = times(length, numbers)
    first = numbers[0] if numbers[0] > 0 and not flag(op, "exclusive") else 0.0
    return min(low, numbers[0], first), max(high, numbers[1], 0.0)


def _mean(op: Operation, ranges: Ranges) -> Interval:
    return unless_summed(op, ranges.at(op.x), summed(op), ranges)


def _axis_length(op: Operation) -> float:
    """How long the axis is that an op works along; infinite where that is symbolic."""
    shape = static_shape(op.x)
    return math.inf if not shape else float(shape[axis_of(op)])


def _l2_norm(op: Operation, ranges: Ranges) -> Interval:
    """No number is above the length of all."""
    most = longest(op.x, 1, epsilon_of(op), stored=ranges.stored)
    return -most, most


def _layer_norm(op: Operation, ranges: Ranges) -> Interval:
    """A normalised element is at most sqrt(n - 1), for n elements; rounded means leave sqrt(n)."""
    shape, axes = static_shape(op.x), ints(op, "axes") or [-1]
    if op.op_type == "instance_norm":
        axes = list(range(2, op.x.rank))
    if shape is None:
        return ANY
    count = math.prod(shape[a] for a in axes)
    scale, shift = gain(op)
    together = count if ranges.stored else max(count - 1, 1)
    normal = longest(op.x, together, epsilon_of(op), stored=ranges.stored)
    most = normal * scale + shift if math.isfinite(normal) else math.inf
    return -most, most


ROWS: dict[str, Meaning] = {
    **dict.fromkeys(REDUCTIONS, Meaning(axes=_reduced)),
    **dict.fromkeys(names("reduce_max reduce_min"), Meaning(same, _reduced, whole=OF_WHOLE)),
    "reduce_mean": Meaning(_mean, _reduced, terms=summed),
    "reduce_sum": Meaning(_sum, _reduced, whole=OF_WHOLE, terms=summed),
    **dict.fromkeys(names("reduce_sum_square reduce_l2_norm"), Meaning(_length, _reduced, terms=summed)),
    "reduce_prod": Meaning(_product, _reduced, terms=summed),
    "reduce_log_sum_exp": Meaning(_log_sum_exp, _reduced),
    **dict.fromkeys(
        names("reduce_argmax reduce_argmin"), Meaning(axes=lambda op: _reduced(op, MIXED), positions=0)
    ),
    "argsort": Meaning(axes=_along, positions=0),
    "topk": Meaning(same, _along, positions=1),
    "cumsum": Meaning(_running, _along, whole=OF_WHOLE, terms=_axis_length),
    "softmax": Meaning(_softmax, _along, terms=_axis_length, limits=(0.0, 1.0)),
    "layer_norm": Meaning(_layer_norm, _normalized),
    "batch_norm": Meaning(axes=_channels),
    "instance_norm": Meaning(_layer_norm, _channels),
    "l2_norm": Meaning(_l2_norm, _pictures),
}
