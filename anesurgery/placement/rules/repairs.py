"""Ops that nothing forbids and that cost time, each with the pass that takes them away."""

from __future__ import annotations

import math
from functools import partial

from anesurgery.mil import Operation, is_stored, np_dtype, producer, static_shape
from anesurgery.ops import POINTWISE, REDUCTIONS, UNARY, VIEWS, WEIGHTED, names
from anesurgery.placement.cost import UP_TO
from anesurgery.placement.evidence import Grade, Rule, Scope
from anesurgery.placement.rules.slow import LARGE_DILATION
from anesurgery.placement.target import CHIPS, SOURCES, Target
from anesurgery.regions.channel_products import weight_of
from anesurgery.semantics.reading import ints, readers_after, shape_in_words, shape_of, weight

_slow = partial(Rule, kind="speed")


def absorbed(op: Operation, target: Target) -> str:
    """A product with a weight, or a reduction, that alone reads what was transposed."""
    shape = static_shape(op.outputs[0])
    readers = list(readers_after(op.outputs[0], UNARY | VIEWS)) if shape is not None else []
    if len(readers) != 1 or not (readers[0].op_type in REDUCTIONS or weight(readers[0]) is not None):
        return ""
    if readers[0].op_type not in REDUCTIONS | {"linear", "matmul"}:
        return ""
    if readers[0].op_type not in REDUCTIONS and readers[0].x.rank >= len(shape or ()):
        return ""
    return f"{shape_in_words(shape)} is read by {readers[0].op_type} %{readers[0].outputs[0].name} alone"


BETWEEN = POINTWISE | {"conv", "batch_norm"}
"""What may stand between the two ends."""


def dealt(op: Operation, target: Target) -> str:
    """The blocks of a space_to_batch that is undone after convolutions."""
    between = readers_after(op.outputs[0], BETWEEN)
    if not any(reader.op_type == "batch_to_space" for reader in between):
        return ""
    if max(ints(op, "block_shape")) >= LARGE_DILATION:
        return ""  # a dilation as large as that is slow itself
    return f"blocks of {shape_in_words(ints(op, 'block_shape'))} become images, and are put together again"


def cast_indices(op: Operation, target: Target) -> str:
    """The cast that makes the indices, from which type to which."""
    cast = producer(op.indices, "cast")
    if cast is None or np_dtype(cast.x).kind not in "iu":
        return ""
    return f"%{op.indices.name} is {np_dtype(cast.outputs[0])}, made of {np_dtype(cast.x)}"


def long_input(op: Operation, target: Target) -> str:
    """Only the input is longer than the target takes, and the convolution steps along it."""
    limit, chip = target.least("axis")
    before, after = (shape_of(v)[2:] for v in (op.x, op.outputs[0]))
    steps = ints(op, "strides") or [1] * len(before)
    for length, result, step in zip(before, after, steps, strict=True):
        if length > limit >= result and step > 1 and is_stored(op.weight):
            return f"{length} elements become {result}; {chip} takes {limit}"
    return ""


def single_row(op: Operation, target: Target) -> str:
    """A product of one row with a stored weight."""
    stored, shape = weight_of(op), shape_of(op.x)
    if stored is None or not is_stored(stored[0]) or math.prod(shape[:-1]) != 1:
        return ""
    return f"one row of {shape[-1]} gives {shape_of(op.outputs[0])[-1]}"


def rare(op: Operation, target: Target) -> str:
    """The op, whatever it reads."""
    return f"%{op.outputs[0].name} is a {op.op_type}"


def long_rows(op: Operation, target: Target) -> str:
    """Rows beyond the limit of an axis."""
    limit, chip = target.least("axis")
    length = (shape_of(op.x) or (0,))[-1]
    return f"rows of {length}; {chip} takes {limit}" if length > limit else ""


def long_result(op: Operation, target: Target) -> str:
    """Only the result is longer than the target takes."""
    limit, chip = target.least("axis")
    before, after = (max(shape_of(v)[-2:], default=0) for v in (op.x, op.outputs[0]))
    return f"{before} elements become {after}; {chip} takes {limit}" if before <= limit < after else ""


RULES = (
    _slow(
        "transpose-absorbed",
        names("transpose"),
        "moving the last axis writes the whole value anew; what reads it can name other axes, or have its "
        "weights in another order",
        "smpanaro/more-ane-transformers: NOTES.md",
        test=absorbed,
        grade=Grade.REPORTED,
        scope=Scope(os="seen on M1 Max, macOS 13 to 14"),
        remedy="absorb_transpose",
    ),
    _slow(
        "space-to-batch",
        names("space_to_batch"),
        "a dilated convolution does the same without moving each pixel twice",
        "by the definition of the ops; what it gains in time was not measured",
        test=dealt,
        grade=Grade.GUESS,
        remedy="dilated_convolution",
    ),
    _slow(
        "index-cast",
        names("gather"),
        "a cast of the indices is one more op on the CPU",
        "751K: integer arithmetic stays on the CPU (M4, macOS 27.0.1)",
        test=cast_indices,
        grade=Grade.MEASURED,
        remedy="index_casts",
    ),
    _slow(
        "conv-input",
        names("conv"),
        "the products can be those of frames, of which there are as few as results",
        SOURCES["axis"],
        test=long_input,
        grade=Grade.REPORTED,
        scope=Scope(os="seen on M1 Max, M4"),
        remedy="long_convolution",
    ),
    _slow(
        "single-row",
        names("linear matmul"),
        "a linear of one row stayed on the CPU at each width, while 1x1 convolutions of one pixel went to the "
        "ANE from 4.7 million weights on",
        "thisisthepy/torchnative: ANEDECODE.md",
        test=single_row,
        grade=Grade.REPORTED,
        scope=Scope(frozenset(c.family for c in CHIPS.values() if c.family <= UP_TO), "seen on M1"),
        remedy="pointwise_convolution",
    ),
    _slow(
        "rare-op",
        names("crop flatten2d reshape_like clamped_relu"),
        "nothing is known of where it runs, while the slices, reshapes or minima that do the same were placed",
        "751K: slices, reshapes, leaky_relu and minimum on the ANE (M4, macOS 27.0.1)",
        test=rare,
        grade=Grade.GUESS,
        remedy="replace_rare_ops",
    ),
    _slow(
        "long-rows",
        WEIGHTED,
        "rows that are cut in parts, of which the products are added, are within the limit of an axis",
        SOURCES["axis"],
        test=long_rows,
        grade=Grade.REPORTED,
        scope=Scope(os="seen on M1 Max, M4"),
        remedy="split_inner_axis",
    ),
    _slow(
        "deconv-result",
        names("conv_transpose"),
        "the products can be those of a convolution on the short axis",
        "by the definition of the ops; what it gains in time was not measured",
        test=long_result,
        grade=Grade.GUESS,
        remedy="subpixel_convolution",
    ),
)
