"""The stored weights and bias of a convolution or inner product, to be multiplied and shifted by channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery.errors import Refusal
from anesurgery.mil import Array
from anesurgery.network_editing.network import Node
from anesurgery.neuralnetwork import spec
from anesurgery.neuralnetwork.making import weights

KINDS = frozenset({"convolution", "innerProduct"})
STORED = {"floatValue": "<f4", "float16Value": "<f2"}
"""Field of `WeightParams` that holds floats as they are -> their type."""


@dataclass(frozen=True)
class Affine:
    """What a layer multiplies by and adds, in fp64.

    Attributes:
        weights: (groups, before, channels / groups, after), in the order in which they are stored; the output
            channels are the first axis together with the third.
        bias: of the output channels; None if the layer adds nothing.
        dtype: of both, as they are stored: "<f4" or "<f2".
    """

    weights: Array
    bias: Array | None
    dtype: str

    @property
    def channels(self) -> int:
        """The number of output channels."""
        return int(self.weights.shape[0] * self.weights.shape[2])

    @property
    def largest(self) -> float:
        """The largest magnitude among weights and bias; infinite if a number is undefined."""
        magnitudes = [np.abs(v).max(initial=0.0) for v in (self.weights, self.bias) if v is not None]
        return float(np.nan_to_num(np.max(magnitudes), nan=np.inf, posinf=np.inf))

    def times(self, factor: Array) -> Affine:
        """With what the layer gives multiplied by a factor for each output channel, or one for all."""
        each = np.broadcast_to(factor, self.channels)
        groups, _, part, _ = self.weights.shape
        bias = None if self.bias is None else self.bias * each
        return Affine(self.weights * each.reshape(groups, 1, part, 1), bias, self.dtype)

    def plus(self, offset: Array) -> Affine:
        """With an offset for each output channel, or one for all, added to what the layer gives."""
        bias = np.zeros(self.channels) if self.bias is None else self.bias
        return Affine(self.weights, bias + offset, self.dtype)

    def write(self, params: Any) -> bool:
        """Store them in the message of a layer type; do they stay as they are, or are they rounded?"""
        exact = _write(params.weights, self.weights, self.dtype)
        if self.bias is not None:
            params.hasBias = True
            exact &= _write(params.bias, self.bias, self.dtype)
        return exact


def read(node: Node) -> Affine | Refusal:
    """The weights and bias of a layer that is one of `KINDS`; a refusal if they are not stored as floats."""
    params = node.params
    if len(node.inputs) > 1:
        return Refusal(f"the weights of the {node.kind} are computed")
    stored = [params.weights, *([params.bias] if params.hasBias else [])]
    fields = {next((f for f in STORED if getattr(p, f)), "") for p in stored}
    if "" in fields:
        return Refusal(f"the weights of the {node.kind} are quantized; new ones would be rounded")
    if len(fields) > 1:
        return Refusal(f"the {node.kind} has weights of fp32 and of fp16")
    if node.message.isUpdatable or any(p.isUpdatable for p in stored):
        return Refusal(f"the weights of the {node.kind} are trainable")
    kernel, *bias = (np.array(spec.weights(p, [_count(p)], f"layer {node.name!r}"), np.float64) for p in stored)
    groups = int(params.nGroups) or 1 if _transposed(node) else 1
    before = int(params.kernelChannels) // groups if _transposed(node) else 1
    shape = [groups, before, int(params.outputChannels) // groups, -1]
    return Affine(kernel.reshape(shape), bias[0] if bias else None, STORED[fields.pop()])


def _transposed(node: Node) -> bool:
    """Do the weights have the channels in first? Else those out."""
    return node.kind == "convolution" and bool(node.params.isDeconvolution)


def _count(params: Any) -> int:
    return len(params.floatValue) or len(params.float16Value) // 2


def _write(params: Any, values: Array, dtype: str) -> bool:
    with np.errstate(over="ignore"):
        rounded = np.ravel(values).astype(dtype)
    params.CopyFrom(type(params)(**weights(rounded, half=dtype == STORED["float16Value"])))
    return bool((rounded == np.ravel(values)).all())
