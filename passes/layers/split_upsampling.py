"""Upsample by more than 2 in steps of 2, or by deconvolutions.

Before::

    network(%x: 1x1x4x4) {
      %a: 1x1x16x4 = upsample(%x, scalingFactor=[4, 1])
      %y: 1x1x16x12 = upsample(%a, scalingFactor=[1, 3], mode=BILINEAR)
      return %y
    }

After::

    network(%x: 1x1x4x4) {
      %a_upsample: 1x1x8x4 = upsample(%x, scalingFactor=[2, 1])
      %a: 1x1x16x4 = upsample(%a_upsample, scalingFactor=[2, 1])
      %y_padding: 1x1x16x5 = padding(%a, replication={}, paddingAmounts={borderAmounts=[{}, {endEdgeSize=1}]})
      %y: 1x1x16x12 = convolution(%y_padding, outputChannels=1, kernelChannels=1, nGroups=1, kernelSize=[1, 5], stride=[1, 3], valid={paddingAmounts={borderAmounts=[{}, {startEdgeSize=2, endEdgeSize=3}]}}, isDeconvolution=True, weights=[0.333333, 0.666667, 1, 0.666667, 0.333333])
      return %y
    }

The nearest pixel: a factor is split into twos, each an `upsample` by 2, and an odd rest, a deconvolution of each
channel with a kernel of ones at steps of its size.

Bilinear: the border is repeated by one pixel, and a deconvolution weighs each pixel by its distance, like a
tent; what it makes too much is cut off by its padding. From corner to corner (ALIGN_CORNERS_TRUE) n pixels are
sampled each p / q = (n - 1) / (factor n - 1) of a pixel: all q places between two pixels are interpolated, and a
`slice` takes each p-th. Where the tent is larger than 13, the pixels are repeated q times as above, and a
convolution of each channel takes the mean of q neighbours, at steps of p.

Refuses when a factor is fractional; when both forms have a kernel of more than 13; when a blob of fewer axes than
4 would meet a convolution, of which Core ML's own check asks for them; when channels, height or width are dynamic.

Why it helps: upsampling by more than 2 was reported off the ANE, deconvolutions on it (hollance/neural-engine,
unsupported-layers; through Core ML, iOS 11 to 15). Not measured, and it is more work: a mean multiplies q q
times for an element where `upsample` does 4 times. The nearest pixel is bit-exact (of finite numbers);
interpolation rounds otherwise.

Grade: checked: the weights of bilinear interpolation are rounded.
"""  # noqa: E501 - the sketch is as the printer prints it

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import LayerRewrite, Refusal, Site

NEAREST = 0
"""By `mode`."""
ALIGNED, CENTERED = 1, 2
"""By `linearUpsampleMode`: ALIGN_CORNERS_TRUE and ALIGN_CORNERS_FALSE; with 0 the samples begin on pixel 0."""

Layers = list[Callable[..., str]]


@dataclass(frozen=True)
class SplitUpsampling(LayerRewrite):
    """Upsampling by more than 2 becomes upsampling by 2, and deconvolutions."""

    name = "split_upsampling"
    tolerates_nonfinite = False
    """A weight of 0 makes NaN of an infinity, in one form and not in the other."""
    kinds = frozenset({"upsample"})
    tolerance = an.REASSOCIATED

    def rewrite(self, site: Site) -> Refusal | None:
        """Take the nearest pixel or interpolate, as the layer does."""
        p = site.params
        factors = [float(f) for f in p.scalingFactor or p.fractionalScalingFactor]
        if not factors or max(factors) <= an.layer_rules.UPSAMPLE:
            return None
        whole = [int(f) for f in factors]
        if whole != factors:
            words = "x".join(f"{f:g}" for f in factors)
            return Refusal(f"the factor {words} is fractional, which no whole steps make")
        an.windows.height_and_width(site, site.inputs[0])
        layers = _nearest(site, whole) if p.mode == NEAREST else _bilinear(site, whole)
        if isinstance(layers, Refusal):
            return layers
        site.chain(layers)
        return None


def _nearest(site: Site, factors: Sequence[int]) -> Layers | Refusal:
    """An odd factor by a deconvolution, then twos."""
    odd = [_odd(f) for f in factors]
    layers: Layers = []
    if max(odd) > 1:
        if not an.kernels.takes(*odd):
            return Refusal(
                f"the factor {factors[0]}x{factors[1]} leaves a kernel of {odd[0]}x{odd[1]} to a "
                f"deconvolution, which may not be larger than {an.kernels.WIDE}"
            )
        if (words := an.kernels.no_image(site)) is not None:
            return words
        layers.append(_deconvolve(site, np.ones(odd), odd, ((0, 0), (0, 0))))
    twos = [(f // n).bit_length() - 1 for f, n in zip(factors, odd, strict=True)]
    for steps in zip_longest(*([2] * n for n in twos), fillvalue=1):
        layers.append(partial(_upsample, site, steps=steps))
    return layers


def _odd(factor: int) -> int:
    return factor // (factor & -factor)


def _upsample(site: Site, x: str, steps: Sequence[int], outputs: Sequence[str] | None = None) -> str:
    return site.emit("upsample", [x], outputs, scalingFactor=steps)


def _deconvolve(
    site: Site,
    kernel: an.Array,
    strides: Sequence[int],
    cuts: tuple[an.spatial_axes.Margins, an.spatial_axes.Margins],
) -> Callable[..., str]:
    return partial(an.kernels.depthwise, site, kernel=kernel, strides=strides, cuts=cuts)


class _Grid(NamedTuple):
    """The samples along one axis: `up` times denser than the pixels, of which each `step`-th is taken."""

    up: int
    step: int
    repeated: an.spatial_axes.Margins
    """Pixels that are repeated beyond the image."""
    shift: float
    """From the first of the dense samples that lie between two pixels to that on the first, in samples."""

    @property
    def first(self) -> int:
        """The dense sample of pixel 0 that has a weight and lies most before it."""
        return math.floor(self.shift - self.up) + 1

    @property
    def tent(self) -> an.Array:
        """The weights of a pixel for the dense samples around it."""
        places = np.arange(self.first, math.ceil(self.shift + self.up))
        return np.asarray(1 - np.abs(places - self.shift) / self.up)

    @property
    def cuts(self) -> an.spatial_axes.Margins:
        """What a deconvolution with the tent makes too much."""
        before, after = self.repeated
        begin = self.up * before - self.first
        wanted = self.up if before + after else 1  # of the last pixel
        return begin, (before + after) * self.up + len(self.tent) - begin - wanted

    @property
    def neighbours(self) -> an.Array:
        """The weights of the dense samples around one, each a repeated pixel, that interpolate there."""
        shares = np.full(self.up + int(self.shift % 1 > 0), 1 / self.up)
        if self.shift % 1:
            shares[[0, -1]] /= 2
        return shares

    @property
    def around(self) -> an.spatial_axes.Margins:
        """Dense samples beyond the image that are read."""
        if not any(self.repeated):
            return 0, 0
        return math.ceil(self.shift), self.up - 1 - math.floor(self.shift)


def _bilinear(site: Site, factors: Sequence[int]) -> Layers | Refusal:
    """The first form whose kernels are small enough."""
    if (words := an.kernels.no_image(site)) is not None:
        return words
    mode = int(site.params.linearUpsampleMode)
    sizes = an.windows.height_and_width(site, site.inputs[0])
    grids = [_grid(mode, f, n) for f, n in zip(factors, sizes, strict=True)]
    for form in (_tents, _means):
        if (layers := form(site, grids)) is not None:
            return layers
    high, wide = (grid.up for grid in grids)
    return Refusal(
        f"it interpolates at each 1/{high} of the height and 1/{wide} of the width of a pixel, which takes "
        f"kernels of more than {an.kernels.WIDE}"
    )


def _grid(mode: int, factor: int, size: int) -> _Grid:
    if mode == ALIGNED and size > 1:
        common = math.gcd(size - 1, factor * size - 1)
        return _Grid((factor * size - 1) // common, (size - 1) // common, (0, 0), 0)
    shift = (factor - 1) / 2 if mode == CENTERED else 0
    repeated = (0, 0) if factor == 1 else (1, 1) if mode == CENTERED else (0, 1)
    return _Grid(factor, 1, repeated, shift)


def _tents(site: Site, grids: Sequence[_Grid]) -> Layers | None:
    """A deconvolution over the image with a repeated border, then slices."""
    high, wide = grids
    kernel = np.outer(high.tent, wide.tent)
    if not an.kernels.takes(*kernel.shape):
        return None
    layers = _repeat(site, high.repeated, wide.repeated)
    layers.append(_deconvolve(site, kernel, [high.up, wide.up], (high.cuts, wide.cuts)))
    for axis, grid in zip((an.spatial_axes.HEIGHT, an.spatial_axes.WIDTH), grids, strict=True):
        if grid.step > 1:
            size = site.sizes(site.outputs[0])[axis]
            span = range(0, (size - 1) * grid.step + 1, grid.step)
            layers.append(partial(an.spatial_axes.cut, site, axis=axis, span=span))
    return layers


def _means(site: Site, grids: Sequence[_Grid]) -> Layers | None:
    """Repeated pixels, then means of neighbours."""
    high, wide = grids
    kernel = np.outer(high.neighbours, wide.neighbours)
    layers = _nearest(site, [high.up, wide.up])
    if not an.kernels.takes(*kernel.shape) or isinstance(layers, Refusal):
        return None
    layers += _repeat(site, high.around, wide.around)
    mean = partial(an.kernels.depthwise, site, kernel=kernel, strides=[high.step, wide.step])
    return [*layers, mean]


def _repeat(site: Site, high: an.spatial_axes.Margins, wide: an.spatial_axes.Margins) -> Layers:
    """A border of repeated pixels, if there is one."""
    if not any((*high, *wide)):
        return []

    def pad(x: str, outputs: Sequence[str] | None = None) -> str:
        return site.emit(
            "padding", [x], outputs, replication={}, paddingAmounts=an.spatial_axes.borders(high, wide)
        )

    return [pad]


def example() -> Any:
    """Four times as high by the nearest pixel, then three times as wide between pixels."""
    layers = [
        an.make_layer("upsample", ["x"], ["a"], scalingFactor=[4, 1]),
        an.make_layer("upsample", ["a"], ["y"], scalingFactor=[1, 3], mode="BILINEAR"),
    ]
    return an.make_network({"x": (1, 1, 4, 4)}, layers, ["y"])
