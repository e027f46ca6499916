"""Models of the older format (`.mlmodel`): every layer in the form of the first releases, which the ANE runs.

`neuralnetwork_ane` rewrites the layers of a neural network, a classifier, a regressor, or of the networks in a
pipeline; an `.mlmodel` goes in and comes out. The passes are sorted by what each declares (`precedes`,
`follows`).
"""

from __future__ import annotations

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
from anesurgery.surgery import Recipe

neuralnetwork_ane = Recipe(
    name="neuralnetwork_ane",
    steps=(
        SwishLayers(),
        FoldLayerConstants(),
        LegacyAddMultiply(),
        LegacySubtract(),
        LegacyDivide(),
        LegacyPower(),
        LegacyClip(),
        FuseClip(),
        FuseLinear(),
        LegacyInnerProduct(),
        LegacyRearrange(),
        LegacyGather(),
        LegacyEmbedding(),
        LegacySlice(),
        LegacySplit(),
        LegacyConcat(),
        LegacyPad(),
        LegacySoftmax(),
        LegacyConstant(),
        SpreadChannels(),
        SplitPooling(),
        SplitUpsampling(),
        UndilateConvolution(),
        FoldBatchnorm(),
        RemoveUnreadLayers(),
    ),
    psnr=100.0,
)
