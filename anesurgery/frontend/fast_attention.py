"""Encoder layers and attention of torch.nn in inference, which torch runs as one operation each.

A trace made without gradients records these operations, which coremltools does not have.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anesurgery.frontend.arguments import argument, inputs_of, known_value
from anesurgery.mil import Var, mb

ENCODER_LAYER = (
    *("x", "width", "heads", "qkv_weight", "qkv_bias", "weight", "bias", "gelu", "norm_first", "eps"),
    *("gamma_1", "beta_1", "gamma_2", "beta_2", "weight_1", "bias_1", "weight_2", "bias_2"),
)
"""The arguments of `_transformer_encoder_layer_fwd`, but for the mask."""
ATTENTION = ("query", "key", "value", "width", "heads", "qkv_weight", "qkv_bias", "weight", "bias")
"""Those of `_native_multi_head_attention`."""
QUERIES = 0
"""The type of a mask of rank 2 that is of queries and keys; another is of images and keys."""


def encoder_layer(context: Any, node: Any) -> None:
    """`_transformer_encoder_layer_fwd`: attention and two products, each with a norm before or after it."""
    g = dict(zip(ENCODER_LAYER, inputs_of(context, node), strict=False))
    heads, gelu, first = (known_value(g[n]) for n in ("heads", "gelu", "norm_first"))
    eps = np.float32(known_value(g["eps"]))

    def normed(x: Var, which: int) -> Var:
        scales = {"gamma": g[f"gamma_{which}"], "beta": g[f"beta_{which}"]}
        return mb.layer_norm(x=x, axes=[-1], epsilon=eps, **scales)

    def attended(x: Var) -> Var:
        mixed, _ = _attention([x] * 3, g, int(heads), _keep(context, node, len(ENCODER_LAYER)))
        return mixed

    def forward(x: Var) -> Var:
        x = mb.linear(x=x, weight=g["weight_1"], bias=g["bias_1"])
        x = mb.gelu(x=x, mode="EXACT") if gelu else mb.relu(x=x)
        return mb.linear(x=x, weight=g["weight_2"], bias=g["bias_2"])

    x: Var = g["x"]
    if first:
        x = mb.add(x=x, y=attended(normed(x, 1)))
        context.add(mb.add(x=x, y=forward(normed(x, 2)), name=node.name))
    else:
        x = normed(mb.add(x=x, y=attended(x)), 1)
        context.add(mb.identity(x=normed(mb.add(x=x, y=forward(x)), 2), name=node.name))


def multi_head_attention(context: Any, node: Any) -> None:
    """`_native_multi_head_attention`: the attended values, and the weights, averaged over heads by default."""
    g = dict(zip(ATTENTION, inputs_of(context, node), strict=False))
    keep = _keep(context, node, len(ATTENTION), between=2)
    rows = [g["query"], g["key"], g["value"]]
    mixed, weights = _attention(rows, g, int(known_value(g["heads"])), keep)
    average = known_value(argument(context, node, len(ATTENTION) + 2, "average_attn_weights", True))
    weights = mb.reduce_mean(x=weights, axes=[1], keep_dims=False) if average else weights
    for name, value in zip(node.outputs, (mixed, weights), strict=True):
        context.add(value, torch_name=name)


def _attention(rows: list[Var], g: dict[str, Any], heads: int, keep: Var | None) -> tuple[Var, Var]:
    """The values mixed by heads, and the weights of each."""
    width = int(known_value(g["width"]))
    weights = mb.split(x=g["qkv_weight"], num_splits=3, axis=0)
    biases = mb.split(x=g["qkv_bias"], num_splits=3, axis=0)
    batch = int(rows[0].shape[0])

    def by_head(x: Var, weight: Var, bias: Var) -> Var:
        mixed_rows = mb.reshape(
            x=mb.linear(x=x, weight=weight, bias=bias), shape=[batch, -1, heads, width // heads]
        )
        return mb.transpose(x=mixed_rows, perm=[0, 2, 1, 3])

    q, k, v = (by_head(*part) for part in zip(rows, weights, biases, strict=True))
    scores = mb.matmul(x=mb.mul(x=q, y=np.float32((width // heads) ** -0.5)), y=k, transpose_y=True)
    scores = scores if keep is None else mb.select(cond=keep, a=scores, b=np.float32(-np.inf))
    share = mb.softmax(x=scores, axis=-1)
    mixed = mb.transpose(x=mb.matmul(x=share, y=v), perm=[0, 2, 1, 3])
    mixed = mb.reshape(x=mixed, shape=[batch, -1, width])
    return mb.linear(x=mixed, weight=g["weight"], bias=g["bias"]), share


def _keep(context: Any, node: Any, position: int, between: int = 0) -> Var | None:
    """Which scores are kept: where the mask is 0, of images, heads, queries and keys."""
    mask = argument(context, node, position, "mask")
    if mask is None:
        return None
    kind = known_value(argument(context, node, position + 1 + between, "mask_type"))
    if mask.rank == 2:
        mask = mb.expand_dims(x=mask, axes=[0, 1] if kind == QUERIES else [1, 2])
    elif mask.rank != 4:
        raise NotImplementedError(f"{node.name}: a mask of rank {mask.rank}; of rank 2 and 4 it is covered")
    zero = np.float32(0)
    return mb.equal(x=mb.cast(x=mask, dtype="fp32"), y=zero)
