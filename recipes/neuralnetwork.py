"""Models of the older format (`.mlmodel`): every layer in the form of iOS 11 and 12, which the ANE runs.

`neuralnetwork_ane` rewrites the layers of a neural network, a classifier, a regressor, or of the networks in a
pipeline; an `.mlmodel` goes in and comes out. The passes are sorted by what each declares (`precedes`,
`follows`).
"""

from __future__ import annotations

from anesurgery import passes
from anesurgery.surgery import Recipe

neuralnetwork_ane = Recipe(
    name="neuralnetwork_ane",
    steps=(
        passes.SwishLayers(),
        passes.FoldLayerConstants(),
        passes.LegacyAddMultiply(),
        passes.LegacySubtract(),
        passes.LegacyDivide(),
        passes.LegacyPower(),
        passes.LegacyClip(),
        passes.FuseClip(),
        passes.FuseLinear(),
        passes.LegacyInnerProduct(),
        passes.LegacyRearrange(),
        passes.LegacyGather(),
        passes.LegacyEmbedding(),
        passes.LegacySlice(),
        passes.LegacySplit(),
        passes.LegacyConcat(),
        passes.LegacyPad(),
        passes.LegacySoftmax(),
        passes.LegacyConstant(),
        passes.SpreadChannels(),
        passes.SplitPooling(),
        passes.SplitUpsampling(),
        passes.UndilateConvolution(),
        passes.FoldBatchnorm(),
        passes.RemoveUnreadLayers(),
    ),
    psnr=100.0,
)
