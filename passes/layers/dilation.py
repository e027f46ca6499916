"""Dilated convolutions as convolutions without dilation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery.authoring import REASSOCIATED, Array, Refusal, Refused
from anesurgery.network_editing.layer_pass import LayerRewrite, Site
from anesurgery.neuralnetwork import spec
from anesurgery.neuralnetwork.layers.window_layers import pairs
from anesurgery.neuralnetwork.making import CHANNEL, border_amounts, constant_padding, weights
from anesurgery.passes.layers._windows import (
    HIGHEST,
    WIDEST,
    every_chip_takes,
    height_and_width,
    why_not_convolvable,
    windows_of,
)
from anesurgery.placement.rules.conditions import CHANNELS as MOST_CHANNELS

MOST_WEIGHTS = 2**24
"""The most weights of a layer with a group for each phase: 67 MB in fp32, which are read each time."""


@dataclass(frozen=True)
class UndilateConvolution(LayerRewrite):
    """Convolve without dilation: zeros between the taps of the kernel, or each phase of the image by itself.

    1. With zeros between its taps, a kernel of k taps at a distance of d has (k - 1) d + 1. All chips take one
       of at most 13, or a column of at most 29. It multiplies that many times more: for 3 x 3 at a distance of
       2 it is 25/9 times the work, of 4 81/9 times. So it is taken if it costs at most `factor` times.
    2. Else the image is padded, and SPACE_TO_DEPTH with blocks of d x d makes channels of its d d phases. A
       group of its own convolves each with the same weights and a distance of 1; DEPTH_TO_SPACE and a crop put
       the results together. It multiplies as often as before, but for padding up to whole blocks; the weights
       are stored d d times.

    Weights that were stored in fp32 or fp16 are again; quantized ones become fp32.

    Refuses when it is a deconvolution, when the weights are computed or may be trained on the device, when
    height or width is dynamic, and when the first form is too large or too costly and the second does not
    apply: that wants one dilation for both axes, a stride of 1, a kernel that all chips take, at most 65536
    channels, and at most 2^24 weights.

    Why it helps: dilated convolutions were seen off the ANE in 2020 (hollance/neural-engine,
    unsupported-layers), but DeepLabV3, which has them, ran there later (fredyshox/ANECompat): measure before
    you keep it. Not measured. The same products are summed in another order, in the first form with zeros among
    them: the results are close, and bit-exact on small whole numbers; infinite inputs give other results.

    Grade: proved.
    """

    name = "undilate_convolution"
    tolerates_nonfinite = False
    """A kernel filled with zeros makes NaN of an infinity."""
    kinds = frozenset({"convolution"})
    tolerance = REASSOCIATED
    factor: float = 4.0
    """The most that zeros between the taps may cost, in multiplications after over before."""

    def rewrite(self, site: Site) -> None:
        """Put zeros between the taps where that is cheap, else compute phases."""
        p = site.params
        if max(p.dilationFactor, default=1) <= 1:
            return
        if p.isDeconvolution:
            raise Refused("it is a deconvolution, and the format ignores its dilation")
        if len(site.inputs) > 1:
            raise Refused("its weights are computed, so they cannot be spread")
        if p.weights.isUpdatable:
            raise Refused("its weights may be trained, and zeros or copies among them would part")
        height_and_width(site, site.inputs[0])  # without them no proof can be had
        site.shape(site.outputs[0])  # a layer that cannot be built is not read either
        dilated = _read(p)
        if (no_zeros := self._why_not_spread(dilated)) is None:
            _spread(site, dilated)
        elif (no_phases := _why_no_phases(site, dilated)) is None:
            _by_phases(site, dilated)
        else:
            raise Refused(f"{no_zeros}; by phases: {no_phases}")

    def _why_not_spread(self, dilated: _Dilated) -> Refusal | None:
        """Return why zeros between the taps are too large or cost too much; None if they do not."""
        high, wide = dilated.spread_kernel
        if not every_chip_takes(high, wide):
            most = f"{WIDEST} ({HIGHEST} if 1 wide)"
            return Refusal(f"with zeros between its taps the kernel is {high}x{wide}, more than {most}")
        cost = math.prod(dilated.spread_kernel) / math.prod(dilated.kernel)
        if cost > self.factor:
            price = f"{cost:.1f} times the multiplications"
            return Refusal(f"zeros between its taps cost {price}, more than {self.factor:g}")
        return None


@dataclass(frozen=True)
class _Dilated:
    """A dilated convolution; each list has a number for the height and one for the width."""

    kernel: list[int]
    stride: list[int]
    dilation: list[int]
    groups: int
    weight: Array
    """[out, in / groups, height, width]."""
    bias: Array | None
    half: bool
    """Are all numbers stored in fp16?"""

    @property
    def spread_kernel(self) -> list[int]:
        """The sizes of the kernel with zeros between its taps: 3 taps at a distance of 2 give 5."""
        return [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True)]


def _read(params: Any) -> _Dilated:
    kernel = pairs(params.kernelSize, 3)
    high, wide = pairs(params.dilationFactor, 1)
    stored = [params.weights, *([params.bias] if params.hasBias else [])]
    channels = [int(params.outputChannels), int(params.kernelChannels)]
    return _Dilated(
        kernel=kernel,
        stride=pairs(params.stride, 1),
        # Along an axis of one tap any distance does, so both axes may have the same.
        dilation=[wide if kernel[0] == 1 else high, high if kernel[1] == 1 else wide],
        groups=int(params.nGroups) or 1,
        weight=spec.weights(params.weights, [*channels, *kernel], "weights"),
        bias=spec.weights(params.bias, channels[:1], "bias") if params.hasBias else None,
        half=all(field.float16Value for field in stored),
    )


def _store(params: Any, dilated: _Dilated, weight: Array, bias: Array | None) -> None:
    """Put weights into a message, as precise as they were."""
    for field, values in (("weights", weight), ("bias", bias)):
        if values is not None:
            stored = getattr(params, field)
            stored.CopyFrom(type(stored)(**weights(values, dilated.half)))


def _spread(site: Site, dilated: _Dilated) -> None:
    """Add the layer with zeros between the taps; its padding is that of the spread kernel already."""
    params = site.copy(site.node, site.inputs, site.outputs).convolution
    high, wide = dilated.dilation
    weight = np.zeros((*dilated.weight.shape[:2], *dilated.spread_kernel), np.float32)
    weight[..., ::high, ::wide] = dilated.weight
    params.kernelSize[:] = dilated.spread_kernel
    del params.dilationFactor[:]
    _store(params, dilated, weight, dilated.bias)


def _why_no_phases(site: Site, dilated: _Dilated) -> Refusal | None:
    """Return why the phases cannot be convolved by themselves; None if they can."""
    high, wide = dilated.dilation
    if high != wide:
        return Refusal(f"the dilation is {high} along the height and {wide} along the width")
    if max(dilated.stride) > 1:
        return Refusal(f"the stride is {dilated.stride[0]}x{dilated.stride[1]}, not 1x1")
    if not every_chip_takes(*dilated.kernel):
        return Refusal(f"the kernel is {dilated.kernel[0]}x{dilated.kernel[1]}, more than {WIDEST}")
    if (refusal := why_not_convolvable(site)) is not None:
        return refusal
    channels = max(site.shape(blob)[CHANNEL] or 0 for blob in (site.inputs[0], site.outputs[0]))
    if channels * high**2 > MOST_CHANNELS:
        return Refusal(f"{high}x{high} phases of {channels} channels are more than {MOST_CHANNELS}")
    if dilated.weight.size * high**2 > MOST_WEIGHTS:
        return Refusal(f"{high}x{high} times {dilated.weight.size} weights are more than {MOST_WEIGHTS}")
    return None


def _by_phases(site: Site, dilated: _Dilated) -> None:
    """Add the layers: padding up to whole blocks, blocks to channels, a convolution, and back."""
    block = dilated.dilation[0]
    windows = windows_of(site, dilated.spread_kernel, dilated.stride)
    fills = [-(axis.size + axis.begin + axis.end) % block for axis in windows]  # up to whole blocks
    high, wide = ((axis.begin, axis.end + fill) for axis, fill in zip(windows, fills, strict=True))
    layers = [constant_padding(high, wide, 0.0)] if any((*high, *wide)) else []
    layers.append(("reorganizeData", {"blockSize": block, "mode": "SPACE_TO_DEPTH"}))
    layers.append(("convolution", _phase_fields(site, dilated)))
    layers.append(("reorganizeData", {"blockSize": block, "mode": "DEPTH_TO_SPACE"}))
    if any(fills):
        layers.append(("crop", {"cropAmounts": border_amounts(*((0, fill) for fill in fills))}))
    site.chain(layers)


def _phase_fields(site: Site, dilated: _Dilated) -> dict[str, Any]:
    """Return the fields of the convolution of all phases, whose channels are groups of their own."""
    phases = dilated.dilation[0] ** 2
    params = type(site.params)()
    params.CopyFrom(site.params)
    params.outputChannels *= phases
    params.nGroups = dilated.groups * phases
    del params.dilationFactor[:]
    params.valid.Clear()
    params.valid.SetInParent()
    bias = None if dilated.bias is None else np.tile(dilated.bias, phases)
    _store(params, dilated, np.tile(dilated.weight, (phases, 1, 1, 1)), bias)
    return {field.name: value for field, value in params.ListFields()}
