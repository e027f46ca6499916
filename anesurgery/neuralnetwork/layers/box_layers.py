"""Non-maximum suppression: of boxes that overlap, the one with the best score stays.

MIL's op of iOS 17 has no score threshold and gives no count. Boxes come out of it best first, and a box
suppresses worse ones only; so what the threshold rejects is the end of its list, and is cut off there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anesurgery.mil import Var, mb, types
from anesurgery.neuralnetwork.context import Context
from anesurgery.neuralnetwork.layers.blob_axes import known, of_rank, scalar
from anesurgery.neuralnetwork.layers.layer_table import layer_nd

F = np.float32


@layer_nd("NonMaximumSuppression", inputs=(2, 5))
def non_maximum_suppression(ctx: Context, params: Any, inputs: list[Var]) -> list[Var]:
    """Boxes [b, n, 4] and scores [b, n, classes] to those of `maxBoxes`, their indices [b, m], the counts [b].

    The inputs after the scores are the thresholds of overlap and of scores, and the number of boxes. Missing
    boxes are 0, missing indices -1. Where no score reaches the threshold, the best box alone stays.
    """
    boxes, scores = (of_rank(x, 3) for x in inputs[:2])
    iou = known(ctx, inputs[2], "iouThreshold")[0] if len(inputs) > 2 else params.iouThreshold
    least = scalar(ctx, inputs[3]) if len(inputs) > 3 else F(params.scoreThreshold)
    most = known(ctx, inputs[4], "maxBoxes")[0] if len(inputs) > 4 else params.maxBoxes
    kept, kept_scores, indices = mb.non_maximum_suppression(
        boxes=_swapped(boxes),
        scores=_swapped(scores),
        iou_threshold=F(iou),
        max_boxes=np.int32(most),
        per_class_suppression=params.perClassSuppression,
    )
    kept, kept_scores = _swapped(kept), _swapped(kept_scores)
    best = mb.reduce_max(x=kept_scores, axes=[-1], keep_dims=False)
    first = np.arange(int(most)).reshape(1, -1) == 0
    good = mb.logical_or(x=mb.greater_equal(x=best, y=least), y=first)
    valid = mb.logical_and(x=good, y=mb.greater_equal(x=indices, y=np.int32(0)))
    count = mb.reduce_sum(x=mb.cast(x=valid, dtype="int32"), axes=[-1], keep_dims=False)
    outputs = [_only(valid, kept, 0), _only(valid, kept_scores, 0), _only(valid, indices, -1), count]
    return outputs[: len(ctx.layer.output)]


def _swapped(x: Var) -> Var:
    return mb.transpose(x=x, perm=[0, 2, 1])


def _only(valid: Var, x: Var, absent: int) -> Var:
    """`x` where it is valid, elsewhere a number that says there is nothing."""
    condition = mb.expand_dims(x=valid, axes=[-1]) if x.rank == 3 else valid
    number = np.int32(absent) if x.dtype == types.int32 else F(absent)
    return mb.select(cond=condition, a=x, b=number)
