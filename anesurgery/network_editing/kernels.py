"""Kernels of convolutions that every engine takes, and convolutions of each channel by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from anesurgery.errors import Refusal
from anesurgery.mil import Array
from anesurgery.network_editing.layer_pass import Site
from anesurgery.network_editing.spatial_axes import CHANNEL, Margins, borders
from anesurgery.neuralnetwork.making import weights
from anesurgery.placement.target import Target

WIDE, HIGH = (Target.parse(None, None).least(side)[0] for side in ("kernel_w", "kernel_h"))
"""The widest and the highest kernel that all chips take; where the numbers come from: `target.SOURCES`."""
IMAGE = 4
"""Axes that a convolution takes at least in Core ML's own check."""


def takes(height: int, width: int) -> bool:
    """Is a kernel one that all chips take? One that is high too was seen to work only if it is 1 wide."""
    return width <= WIDE and height <= (HIGH if width == 1 else WIDE)


def no_image(site: Site) -> Refusal | None:
    """Why the input of a layer cannot be that of a convolution with stored weights, if it cannot."""
    shape = site.shape(site.inputs[0])
    if len(shape) < IMAGE:
        return Refusal(
            f"a convolution takes {IMAGE} axes or more in Core ML's own check, but the blob has {len(shape)}"
        )
    if shape[CHANNEL] is None:
        return Refusal("the number of channels is dynamic")
    return None


def depthwise(
    site: Site,
    x: str,
    kernel: Array,
    strides: Sequence[int],
    cuts: tuple[Margins, Margins] | None = None,
    outputs: Sequence[str] | None = None,
) -> str:
    """Put a convolution there that treats each channel of the site's input alike and by itself.

    Args:
        site: where.
        x: the blob, with the channels of the site's input.
        kernel: (height, width).
        strides: along height and width.
        cuts: makes it a deconvolution, and is what its result loses at both ends of both axes.
        outputs: the blob that it makes; a new one by default.
    """
    channels = int(site.shape(site.inputs[0])[CHANNEL] or 0)
    amounts = {"paddingAmounts": borders(*cuts)} if cuts and any(map(any, cuts)) else {}
    form: dict[str, Any] = {"kernelChannels": 1}
    if cuts is not None:
        form = {"kernelChannels": channels, "isDeconvolution": True}
    return site.emit(
        "convolution",
        [x],
        outputs,
        outputChannels=channels,
        nGroups=channels,
        kernelSize=kernel.shape,
        stride=strides,
        valid=amounts,
        weights=weights(np.broadcast_to(kernel, (channels, *kernel.shape))),
        **form,
    )
