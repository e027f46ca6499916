"""Upsamplings by more than 2: as upsamplings by 2, deconvolutions and slices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from anesurgery.authoring import REASSOCIATED, Array, Refusal
from anesurgery.network_editing.layer_pass import LayerRewrite, Site
from anesurgery.neuralnetwork.making import (
    CHANNEL,
    HEIGHT,
    WIDTH,
    Margins,
    Step,
    border_amounts,
    edge_padding,
    slicing,
    weights,
)
from anesurgery.passes.layers._windows import WIDEST, every_chip_takes, height_and_width, why_not_convolvable
from anesurgery.placement.rules.layer_rules import UPSAMPLE as WIDEST_UPSAMPLE

NEAREST = 0
"""`mode` of an `upsample` that repeats pixels; others interpolate."""
ALIGN_CORNERS_TRUE, ALIGN_CORNERS_FALSE = 1, 2
"""`linearUpsampleMode`; with 0 the samples begin on pixel 0."""


@dataclass(frozen=True)
class SplitUpsampling(LayerRewrite):
    """Upsample by more than 2 in steps of 2, or by deconvolutions.

    The nearest pixel: a factor is split into an odd number, for which a deconvolution of each channel has a
    kernel of ones at steps of its size, and twos, each an `upsample` by 2.

    Bilinear: the border is repeated by one pixel, and a deconvolution weighs each pixel by its distance, like a
    tent; what it makes too much is cut off by its padding. From corner to corner (ALIGN_CORNERS_TRUE) n pixels
    are sampled each p / q = (n - 1) / (factor n - 1) of a pixel: all q places between two pixels are
    interpolated, and a `slice` takes each p-th. Where the tent is larger than 13, the pixels are repeated q
    times as above, and a convolution of each channel takes the mean of q neighbours, at steps of p.

    Refuses when a factor is fractional; when both forms have a kernel of more than 13; when a blob of fewer
    axes than 4 would meet a convolution, of which Core ML's own check asks for them; when channels, height or
    width are dynamic.

    Why it helps: upsampling by more than 2 was reported off the ANE, deconvolutions on it
    (hollance/neural-engine, unsupported-layers; through Core ML, iOS 11 to 15). Not measured, and it is more
    work: a mean multiplies q q times for an element where `upsample` does 4 times. The nearest pixel is
    bit-exact (of finite numbers); interpolation rounds otherwise.

    Grade: checked: the weights of bilinear interpolation are rounded.
    """

    name = "split_upsampling"
    tolerates_nonfinite = False
    """A weight of 0 makes NaN of an infinity, in one form and not in the other."""
    kinds = frozenset({"upsample"})
    tolerance = REASSOCIATED

    def rewrite(self, site: Site) -> Refusal | None:
        """Take the nearest pixel or interpolate, as the layer does."""
        p = site.params
        factors = [float(f) for f in p.scalingFactor or p.fractionalScalingFactor]
        if not factors or max(factors) <= WIDEST_UPSAMPLE:
            return None
        whole = [int(f) for f in factors]
        if whole != factors:
            words = "x".join(f"{f:g}" for f in factors)
            return Refusal(f"the factor {words} is fractional, which no whole steps make")
        height_and_width(site, site.inputs[0])  # refuses dynamic ones, with which no proof can be had
        layers = _nearest(site, whole) if p.mode == NEAREST else _bilinear(site, whole)
        if isinstance(layers, Refusal):
            return layers
        site.chain(layers)
        return None


def _nearest(site: Site, factors: Sequence[int]) -> list[Step] | Refusal:
    """Return a deconvolution by the odd parts of the factors, then an `upsample` for each 2 in them."""
    odd = [f // (f & -f) for f in factors]  # f & -f is the largest power of two in f: 12 gives 4, so 3 is odd
    layers: list[Step] = []
    if max(odd) > 1:
        if not every_chip_takes(*odd):
            return Refusal(
                f"the factor {factors[0]}x{factors[1]} leaves a kernel of {odd[0]}x{odd[1]} to a "
                f"deconvolution, which may not be larger than {WIDEST}"
            )
        if (refusal := why_not_convolvable(site)) is not None:
            return refusal
        layers.append(_deconvolution(site, np.ones(odd), odd, (0, 0), (0, 0)))
    twos = [(f // n).bit_length() - 1 for f, n in zip(factors, odd, strict=True)]
    for steps in zip_longest(*([2] * n for n in twos), fillvalue=1):
        layers.append(("upsample", {"scalingFactor": steps}))
    return layers


def _deconvolution(
    site: Site, kernel: Array, strides: Sequence[int], cut_high: Margins, cut_wide: Margins
) -> Step:
    """Return the deconvolution of each channel by itself, which cuts the ends of its result off."""
    cuts = {"paddingAmounts": border_amounts(cut_high, cut_wide)} if any((*cut_high, *cut_wide)) else {}
    fields = {"isDeconvolution": True, "valid": cuts, **_depthwise(site, kernel, strides)}
    return "convolution", {"kernelChannels": fields["outputChannels"], **fields}


def _depthwise(site: Site, kernel: Array, strides: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a convolution that treats each channel alike and by itself."""
    channels = site.shape(site.inputs[0])[CHANNEL]
    assert channels is not None  # `why_not_convolvable` refuses a dynamic number
    stored = weights(np.broadcast_to(kernel, (channels, *kernel.shape)))
    sizes = {"kernelSize": kernel.shape, "stride": strides}
    return {"outputChannels": channels, "nGroups": channels, **sizes, "weights": stored}


class _Grid(NamedTuple):
    """The samples of an interpolation along one axis, each `step`-th of `up` samples for each pixel.

    Example: a factor of 2 with ALIGN_CORNERS_FALSE samples at -1/4, 1/4, 3/4, ... pixels. So `up` is 2, `step`
    is 1, the border is repeated by one pixel, and pixel 0 lies half a sample after sample 0: `shift` is 1/2.
    """

    up: int
    step: int
    repeated: Margins
    """Pixels that are repeated beyond the image."""
    shift: float
    """The place of pixel 0, counted in samples from sample 0."""

    @property
    def first(self) -> int:
        """The first sample to which pixel 0 gives a weight: -1 in the example."""
        return math.floor(self.shift - self.up) + 1

    @property
    def tent(self) -> Array:
        """The weights of a pixel for the samples around it: 1/4, 3/4, 3/4, 1/4 in the example."""
        samples = np.arange(self.first, math.ceil(self.shift + self.up))
        return np.asarray(1 - np.abs(samples - self.shift) / self.up)

    @property
    def surplus(self) -> Margins:
        """The samples that a deconvolution with the tent makes too many: 3 and 3 in the example.

        Of n pixels, with the repeated ones, it makes up (n - 1) + len(tent). Wanted are `up` for each pixel of
        the image, but only 1 for the last one where the border is not repeated (from corner to corner).
        """
        before, after = self.repeated
        begin = self.up * before - self.first  # before the first wanted sample
        of_last_pixel = self.up if before + after else 1
        return begin, (before + after) * self.up + len(self.tent) - begin - of_last_pixel  # behind the last

    @property
    def mean_weights(self) -> Array:
        """The weights by which `up` times repeated pixels interpolate: 1/4, 1/2, 1/4 in the example.

        A shift is a whole number, or one and a half: then the mean reads half a sample at both ends.
        """
        shares = np.full(self.up + int(self.shift % 1 > 0), 1 / self.up)
        if self.shift % 1:
            shares[[0, -1]] /= 2
        return shares

    @property
    def read_beyond(self) -> Margins:
        """The samples beyond the image that these means read: 1 and 1 in the example.

        They are one fewer than `mean_weights`: `shift` of them before the image, the others behind it.
        """
        if not any(self.repeated):
            return 0, 0
        return math.ceil(self.shift), self.up - 1 - math.floor(self.shift)


def _grid(mode: int, factor: int, size: int) -> _Grid:
    """Return the samples along an axis of `size` pixels; a single pixel is repeated by any grid."""
    if mode == ALIGN_CORNERS_TRUE and size > 1:
        common = math.gcd(size - 1, factor * size - 1)
        return _Grid((factor * size - 1) // common, (size - 1) // common, (0, 0), 0)
    if factor == 1:
        return _Grid(up=1, step=1, repeated=(0, 0), shift=0)
    if mode == ALIGN_CORNERS_FALSE:
        return _Grid(up=factor, step=1, repeated=(1, 1), shift=(factor - 1) / 2)
    return _Grid(up=factor, step=1, repeated=(0, 1), shift=0)


def _bilinear(site: Site, factors: Sequence[int]) -> list[Step] | Refusal:
    """Return the layers of the first form whose kernels are small enough."""
    if (refusal := why_not_convolvable(site)) is not None:
        return refusal
    mode = int(site.params.linearUpsampleMode)
    sizes = height_and_width(site, site.inputs[0])
    high, wide = (_grid(mode, factor, size) for factor, size in zip(factors, sizes, strict=True))
    for make in (_by_tents, _by_means):
        if (layers := make(site, high, wide)) is not None:
            return layers
    return Refusal(
        f"it interpolates at each 1/{high.up} of the height and 1/{wide.up} of the width of a pixel, which "
        f"takes kernels of more than {WIDEST}"
    )


def _by_tents(site: Site, high: _Grid, wide: _Grid) -> list[Step] | None:
    """Return a deconvolution over the image with a repeated border, then slices; None for too large a tent."""
    kernel = np.outer(high.tent, wide.tent)
    if not every_chip_takes(*kernel.shape):
        return None
    layers = _repeated_border(high.repeated, wide.repeated)
    layers.append(_deconvolution(site, kernel, [high.up, wide.up], high.surplus, wide.surplus))
    for axis, grid in ((HEIGHT, high), (WIDTH, wide)):
        if grid.step > 1:
            size = site.sizes(site.outputs[0])[axis]
            layers.append(slicing(axis, range(0, (size - 1) * grid.step + 1, grid.step)))
    return layers


def _by_means(site: Site, high: _Grid, wide: _Grid) -> list[Step] | None:
    """Return layers that repeat pixels and take means of neighbours; None if a kernel is too large."""
    kernel = np.outer(high.mean_weights, wide.mean_weights)
    layers = _nearest(site, [high.up, wide.up])
    if not every_chip_takes(*kernel.shape) or isinstance(layers, Refusal):
        return None
    fields = {"kernelChannels": 1, "valid": {}, **_depthwise(site, kernel, [high.step, wide.step])}
    return [*layers, *_repeated_border(high.read_beyond, wide.read_beyond), ("convolution", fields)]


def _repeated_border(high: Margins, wide: Margins) -> list[Step]:
    """Return the padding that repeats the pixels at the edge; nothing if there is none to repeat."""
    return [edge_padding(high, wide)] if any((*high, *wide)) else []
