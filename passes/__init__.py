"""Passes by class name: `passes.PadLastAxis(multiple=32)`. A pass is imported when it is first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anesurgery import registry

if TYPE_CHECKING:
    from anesurgery.passes.apply_remedies import ApplyRemedies
    from anesurgery.passes.causal_mask_tensor import CausalMaskTensor
    from anesurgery.passes.embedding_matmul import EmbeddingMatmul
    from anesurgery.passes.explicit_broadcast import ExplicitBroadcast
    from anesurgery.passes.layers.fold_batchnorm import FoldBatchnorm
    from anesurgery.passes.layers.fold_layer_constants import FoldLayerConstants
    from anesurgery.passes.layers.fuse_clip import FuseClip
    from anesurgery.passes.layers.fuse_linear import FuseLinear
    from anesurgery.passes.layers.legacy_add_multiply import LegacyAddMultiply
    from anesurgery.passes.layers.legacy_clip import LegacyClip
    from anesurgery.passes.layers.legacy_concat import LegacyConcat
    from anesurgery.passes.layers.legacy_constant import LegacyConstant
    from anesurgery.passes.layers.legacy_divide import LegacyDivide
    from anesurgery.passes.layers.legacy_embedding import LegacyEmbedding
    from anesurgery.passes.layers.legacy_gather import LegacyGather
    from anesurgery.passes.layers.legacy_inner_product import LegacyInnerProduct
    from anesurgery.passes.layers.legacy_pad import LegacyPad
    from anesurgery.passes.layers.legacy_power import LegacyPower
    from anesurgery.passes.layers.legacy_rearrange import LegacyRearrange
    from anesurgery.passes.layers.legacy_slice import LegacySlice
    from anesurgery.passes.layers.legacy_softmax import LegacySoftmax
    from anesurgery.passes.layers.legacy_split import LegacySplit
    from anesurgery.passes.layers.legacy_subtract import LegacySubtract
    from anesurgery.passes.layers.remove_unread_layers import RemoveUnreadLayers
    from anesurgery.passes.layers.split_pooling import SplitPooling
    from anesurgery.passes.layers.split_upsampling import SplitUpsampling
    from anesurgery.passes.layers.spread_channels import SpreadChannels
    from anesurgery.passes.layers.swish_layers import SwishLayers
    from anesurgery.passes.layers.undilate_convolution import UndilateConvolution
    from anesurgery.passes.negate_subtract import NegateSubtract
    from anesurgery.passes.pad_last_axis import PadLastAxis
    from anesurgery.passes.rerank import Rerank
    from anesurgery.passes.select_last_token import SelectLastToken

    __all__ = [
        "ApplyRemedies",
        "CausalMaskTensor",
        "EmbeddingMatmul",
        "ExplicitBroadcast",
        "FoldBatchnorm",
        "FoldLayerConstants",
        "FuseClip",
        "FuseLinear",
        "LegacyAddMultiply",
        "LegacyClip",
        "LegacyConcat",
        "LegacyConstant",
        "LegacyDivide",
        "LegacyEmbedding",
        "LegacyGather",
        "LegacyInnerProduct",
        "LegacyPad",
        "LegacyPower",
        "LegacyRearrange",
        "LegacySlice",
        "LegacySoftmax",
        "LegacySplit",
        "LegacySubtract",
        "NegateSubtract",
        "PadLastAxis",
        "RemoveUnreadLayers",
        "Rerank",
        "SelectLastToken",
        "SplitPooling",
        "SplitUpsampling",
        "SpreadChannels",
        "SwishLayers",
        "UndilateConvolution",
    ]


def __getattr__(name: str) -> Any:
    known = {registry.camel(n): n for n in registry.pass_names()}
    if name in known:
        return registry.pass_class(known[name])
    raise AttributeError(f"there is no pass {name!r}; known: {', '.join(known)}")


def __dir__() -> list[str]:
    return [registry.camel(n) for n in registry.pass_names()]
