"""What Core ML does for networks of the first specifications, and an ML Program cannot: sequences."""

from __future__ import annotations

from typing import Any

import numpy as np

AXES = 5
"""Sequence, batch, channel, height, width."""


def for_sequences(spec: Any, given: dict[str, Any]) -> Any:
    """The specification for the arrays of a call.

    Where blobs have rank 5, an array that is described as [C] or [C, H, W] may come with a sequence and a batch
    in front.

    Args:
        spec: specification of a model.
        given: arrays by input name.

    Returns:
        A specification that states the shapes of such arrays; None where none is given.
    """
    from anesurgery.neuralnetwork.spec import NETWORKS, is_legacy, network_of

    if spec.WhichOneof("Type") not in NETWORKS or not is_legacy(network_of(spec)):
        return None
    stated = {f.name: len(f.type.multiArrayType.shape) for f in spec.description.input}
    shapes = {k: np.shape(v) for k, v in given.items() if np.ndim(v) == AXES != stated.get(k, AXES)}
    if not shapes:
        return None
    made = type(spec)()
    made.CopyFrom(spec)
    for feature in made.description.input:
        if feature.name in shapes:
            feature.type.multiArrayType.shape[:] = shapes[feature.name]
    return made
