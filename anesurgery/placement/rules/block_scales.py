"""Weights scaled by blocks: the ANE takes one scale for the tensor, or one for each output channel."""

from __future__ import annotations

from anesurgery.mil import Operation, static_shape
from anesurgery.ops import PRODUCTS, names
from anesurgery.placement.evidence import Grade, Rule, Scope
from anesurgery.placement.rules.slow import makers
from anesurgery.placement.target import Target
from anesurgery.semantics.reading import flag, number, shape_in_words

BLOCKS = names("constexpr_blockwise_shift_scale constexpr_sparse_blockwise_shift_scale")
AFFINE = "constexpr_affine_dequantize"


def _scales(maker: Operation, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The number of scales along each axis of a weight; None for an op that does not scale."""
    if maker.op_type in BLOCKS:
        return tuple(int(n) for n in maker.scale.shape)
    if maker.op_type != AFFINE:
        return None
    axis = (number(maker.axis) or 0) % len(shape)
    count = int(maker.scale.shape[0]) if maker.scale.shape else 1
    return tuple(count if i == axis else 1 for i in range(len(shape)))


def output_axis(op: Operation, rank: int) -> int:
    """The axis of the weight along which the output channels of a product lie."""
    if op.op_type != "matmul" or rank < 2:
        return 0
    return rank - 2 if flag(op, "transpose_y") else rank - 1


def block_scales(op: Operation, target: Target) -> str:
    """A weight whose scales are neither one for the tensor nor one for each output channel."""
    for maker in makers(op):
        shape = static_shape(maker.outputs[0])
        scales = _scales(maker, shape) if shape else None
        if not shape or scales is None or all(n == 1 for n in scales):
            continue
        axis = output_axis(op, len(shape))
        if scales != tuple(d if i == axis else 1 for i, d in enumerate(shape)):
            return f"{shape_in_words(scales)} scales for {shape_in_words(shape)} weights"
    return ""


RULE = Rule(
    "comp-blockwise",
    PRODUCTS,
    'Core ML refuses it: "ANE only support per-cout/per-tensor quantization"',
    "cadamcat/llms-on-apple-neural-engine: findings; NagaYu/coreml-compression-pipeline: README",
    legal=False,
    test=block_scales,
    grade=Grade.REPORTED,
    scope=Scope(os="seen on M5 Pro, macOS 27.0, and M2"),
    advice="one scale for each output channel, a palette, or plain fp16 weights",
    remedy="channel_scales",
)
