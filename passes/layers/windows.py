"""Poolings, upsamplings and dilated convolutions whose windows the engine takes, and gates as large as images.

A window is described along one axis, whatever way its padding was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from anesurgery.authoring import REASSOCIATED, Array, Refusal, Refused, Target
from anesurgery.network_editing.layer_pass import LayerRewrite, Site
from anesurgery.network_editing.steps import (
    CHANNEL,
    HEIGHT,
    WIDTH,
    Margins,
    Step,
    border_amounts,
    constant_padding,
    edge_padding,
    slicing,
)
from anesurgery.neuralnetwork import spec
from anesurgery.neuralnetwork.layers.window_layers import pairs
from anesurgery.neuralnetwork.making import weights
from anesurgery.placement.rules.conditions import CHANNELS as MOST_CHANNELS
from anesurgery.placement.rules.layer_rules import POOL_KERNEL, POOL_STRIDE, UPSAMPLE

LATER = 1
"""`asymmetryMode` of "same" padding that puts what is over before the first element."""


@dataclass(frozen=True)
class _Windows:
    """The windows along one axis, in elements."""

    size: int
    """The length of the axis that they read."""
    count: int
    kernel: int
    stride: int
    begin: int
    """How far the first window reaches beyond the axis."""

    @property
    def end(self) -> int:
        """How far the last window reaches beyond the axis; negative where elements at the end are not read."""
        return (self.count - 1) * self.stride + self.kernel - self.size - self.begin

    @property
    def inside(self) -> bool:
        """Does no window reach beyond the axis?"""
        return self.begin == 0 and self.end <= 0


def height_and_width(site: Site, blob: str) -> list[int]:
    """Return the last two sizes of a blob.

    Raises:
        Refused: one is dynamic.
    """
    extent = [d for d in site.shape(blob)[-2:] if d is not None]
    if len(extent) != 2:
        raise Refused(f"height or width of {blob!r} is dynamic")
    return extent


def _windows_of(site: Site, kernel: Sequence[int], strides: Sequence[int]) -> list[_Windows]:
    """The windows of a `pooling` or `convolution` along height and width; a kernel includes its dilation."""
    sizes, counts = (height_and_width(site, blob) for blob in (site.inputs[0], site.outputs[0]))
    begins = _begins(site, sizes, kernel, strides)
    rows = zip(sizes, counts, kernel, strides, begins, strict=True)
    return [_Windows(*row) for row in rows]


def _begins(site: Site, sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The padding before the first element of both axes."""
    params = site.params
    if params.HasField("same"):
        later = params.same.asymmetryMode == LATER
        totals = [max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in zip(sizes, kernel, strides, strict=True)]
        return [t - t // 2 if later else t // 2 for t in totals]
    if site.node.kind == "pooling" and params.HasField("includeLastPixel"):
        return pairs(params.includeLastPixel.paddingAmounts, 0)
    edges = params.valid.paddingAmounts.borderAmounts
    return [int(edge.startEdgeSize) for edge in edges] or [0, 0]


WIDE, HIGH = (Target.parse(None, None).least(side)[0] for side in ("kernel_w", "kernel_h"))
"""The widest and the highest kernel that all chips take; where the numbers come from: `target.SOURCES`."""
IMAGE = 4
"""Axes that a convolution takes at least in Core ML's own check."""


def _takes(height: int, width: int) -> bool:
    """Is a kernel one that all chips take? One that is high too was seen to work only if it is 1 wide."""
    return width <= WIDE and height <= (HIGH if width == 1 else WIDE)


def _no_image(site: Site) -> Refusal | None:
    """Why the input of a layer cannot be that of a convolution with stored weights, if it cannot."""
    shape = site.shape(site.inputs[0])
    if len(shape) < IMAGE:
        return Refusal(
            f"a convolution takes {IMAGE} axes or more in Core ML's own check, but the blob has {len(shape)}"
        )
    if shape[CHANNEL] is None:
        return Refusal("the number of channels is dynamic")
    return None


def _depthwise(
    site: Site, kernel: Array, strides: Sequence[int], cuts: tuple[Margins, Margins] | None = None
) -> Step:
    """The convolution that treats each channel of the site's input alike and by itself.

    `cuts` makes it a deconvolution, and is what its result loses at both ends of both axes.
    """
    channels = int(site.shape(site.inputs[0])[CHANNEL] or 0)
    amounts = {"paddingAmounts": border_amounts(*cuts)} if cuts and any(map(any, cuts)) else {}
    form: dict[str, Any] = {"kernelChannels": 1}
    if cuts is not None:
        form = {"kernelChannels": channels, "isDeconvolution": True}
    form |= {"outputChannels": channels, "nGroups": channels, "kernelSize": kernel.shape, "stride": strides}
    stored = weights(np.broadcast_to(kernel, (channels, *kernel.shape)))
    return "convolution", {**form, "valid": amounts, "weights": stored}


MAX, AVERAGE, L2 = range(3)
"""By `type`."""


class _Pool(NamedTuple):
    """A pooling along one axis, in elements; the default changes nothing."""

    kernel: int = 1
    stride: int = 1
    begin: int = 0
    end: int = 0


@dataclass(frozen=True)
class SplitPooling(LayerRewrite):
    """Pool with windows of at most 13 at steps of at most 2, or over the whole image.

    Tried in this order:

    1. One window that covers the whole image is a global pooling.
    2. Else each axis is pooled in steps. A maximum is one of maxima whose windows overlap or touch: of two
       steps with the kernels a and b, the first at steps of s, the kernel is a + s (b - 1). A mean is one of
       means over windows that lie side by side, so kernel and stride are divided by common factors; a root of a
       sum of squares likewise. Padding of a maximum is shared out among the steps.
    3. A stride of more than 2 that is left becomes a pooling at steps of 1 and a `slice`.

    Refuses when a mean or a root of squares reads padding, or has a kernel of more than 13 that shares no
    factor with the stride; when a window of a maximum lies in the padding only; when height or width is
    dynamic.

    Why it helps: a kernel of more than 13 or a stride of more than 2 was reported off the ANE, global pooling
    was not (hollance/neural-engine, unsupported-layers; through Core ML, iOS 11 to 15). In ML Programs on M4
    the stride is free, but the windows of maxima end at a width of 8. Not measured otherwise. Maxima are
    bit-exact; means and sums are taken in another order, exact where fp32 holds them.

    Grade: proved.
    """

    name = "split_pooling"
    kinds = frozenset({"pooling"})
    tolerance = REASSOCIATED

    def rewrite(self, site: Site) -> None:
        """Globally if it is that, else in steps."""
        p = site.params
        kernel, strides = pairs(p.kernelSize, 3), pairs(p.stride, 1)
        if p.globalPooling or (max(kernel) <= POOL_KERNEL and max(strides) <= POOL_STRIDE):
            return
        windows = _windows_of(site, kernel, strides)
        if _is_whole(p, windows):
            x, outputs = site.inputs, site.outputs
            site.emit("pooling", x, outputs, type=p.type, valid={}, globalPooling=True)
            return
        plan = _maxima if p.type == MAX else _side_by_side
        _emit_pools(site, windows, [plan(along) for along in windows])


def _is_whole(params: Any, windows: Sequence[_Windows]) -> bool:
    """Is there one window, which covers the image, and does no padding count?"""
    if any(along.count > 1 or along.end < 0 for along in windows):
        return False
    if params.type != AVERAGE or all(along.inside for along in windows):
        return True
    return bool(params.avgPoolExcludePadding) and not params.HasField("includeLastPixel")


def _maxima(along: _Windows) -> list[_Pool]:
    """The steps of a maximum, whose windows may overlap."""
    if max(along.begin, along.end) >= along.kernel:
        raise Refused(f"a window of {along.kernel} lies in the padding only")
    steps = []
    while (first := _first(along)) is not None:
        step, along = _apart(along, *first)
        steps.append(step)
    return [*steps, _Pool(along.kernel, along.stride, along.begin, max(along.end, 0))]


def _first(along: _Windows) -> tuple[int, int] | None:
    """Kernel and stride of a step to be taken before the rest, or None where the rest is one step."""
    if along.stride > POOL_STRIDE and along.stride % 2 == 0 and along.kernel > 1:
        return 2 + along.kernel % 2, 2
    return (POOL_KERNEL, 1) if along.kernel > POOL_KERNEL else None


def _apart(along: _Windows, kernel: int, stride: int) -> tuple[_Pool, _Windows]:
    """A first step, and the windows that are left over its maxima.

    Each first window touches the axis, and they reach from the beginning to the end that is read.
    """
    begin = min(along.begin, kernel - 1)
    begin -= (begin - along.begin) % stride  # the rest is shared out in strides
    rest = _Windows(
        0,
        along.count,
        (along.kernel - kernel) // stride + 1,
        along.stride // stride,
        (along.begin - begin) // stride,
    )
    read = rest.end  # beyond an axis of no elements: that many maxima are read
    count = min(read, (along.size - 1 + begin) // stride + 1)
    end = max((count - 1) * stride + kernel - along.size - begin, 0)
    windows = (along.size + begin + end - kernel) // stride + 1
    left = _Windows(windows, rest.count, rest.kernel, rest.stride, rest.begin)
    return _Pool(kernel, stride, begin, end), left


def _side_by_side(along: _Windows) -> list[_Pool]:
    """The steps of a mean, or of a root of a sum of squares: windows side by side, then the rest."""
    if not along.inside:
        raise Refused("it counts or leaves out padding, which steps would weigh otherwise")
    kernel, stride = along.kernel, along.stride
    steps = []
    while kernel > POOL_KERNEL or stride > POOL_STRIDE:
        common = math.gcd(kernel, stride)
        factor = next((n for n in range(2, POOL_KERNEL + 1) if common % n == 0), None)
        if factor is None:
            break
        steps.append(_Pool(factor, factor))
        kernel, stride = kernel // factor, stride // factor
    if kernel > POOL_KERNEL:
        raise Refused(
            f"a kernel of {along.kernel} at steps of {along.stride} is not made of windows of at most "
            f"{POOL_KERNEL} that lie side by side"
        )
    return [*steps, _Pool(kernel, stride)]


def _emit_pools(site: Site, windows: Sequence[_Windows], plans: Sequence[Sequence[_Pool]]) -> None:
    """The layers of both axes side by side; the last makes the output."""
    same = (_Pool(), _Pool())
    sizes = [along.size for along in windows]
    layers: list[Step] = []
    for row in zip_longest(*plans, fillvalue=_Pool()):
        pool = tuple(s._replace(stride=s.stride if s.stride <= POOL_STRIDE else 1) for s in row)
        if pool != same or (row != same and site.params.type == L2):  # the root of x squared is not x
            layers.append(_pooling(site, pool))
        for i, (axis, s) in enumerate(zip((HEIGHT, WIDTH), row, strict=True)):
            sizes[i] = (sizes[i] + s.begin + s.end - s.kernel) // s.stride + 1
            if s.stride > POOL_STRIDE:
                layers.append(slicing(axis, range(0, (sizes[i] - 1) * s.stride + 1, s.stride)))
    site.chain(layers)


def _pooling(site: Site, steps: Sequence[_Pool]) -> Step:
    """One pooling, by a step along each axis."""
    high, wide = ((s.begin, s.end) for s in steps)
    sizes = {"kernelSize": [s.kernel for s in steps], "stride": [s.stride for s in steps]}
    valid = {"paddingAmounts": border_amounts(high, wide)} if any((*high, *wide)) else {}
    return "pooling", {"type": site.params.type, **sizes, "valid": valid}


NEAREST = 0
"""By `mode`."""
ALIGNED, CENTERED = 1, 2
"""By `linearUpsampleMode`: ALIGN_CORNERS_TRUE and ALIGN_CORNERS_FALSE; with 0 the samples begin on pixel 0."""


@dataclass(frozen=True)
class SplitUpsampling(LayerRewrite):
    """Upsample by more than 2 in steps of 2, or by deconvolutions.

    The nearest pixel: a factor is split into twos, each an `upsample` by 2, and an odd rest, a deconvolution of
    each channel with a kernel of ones at steps of its size.

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
        if not factors or max(factors) <= UPSAMPLE:
            return None
        whole = [int(f) for f in factors]
        if whole != factors:
            words = "x".join(f"{f:g}" for f in factors)
            return Refusal(f"the factor {words} is fractional, which no whole steps make")
        height_and_width(site, site.inputs[0])
        layers = _nearest(site, whole) if p.mode == NEAREST else _bilinear(site, whole)
        if isinstance(layers, Refusal):
            return layers
        site.chain(layers)
        return None


def _nearest(site: Site, factors: Sequence[int]) -> list[Step] | Refusal:
    """An odd factor by a deconvolution, then twos."""
    odd = [f // (f & -f) for f in factors]
    layers: list[Step] = []
    if max(odd) > 1:
        if not _takes(*odd):
            return Refusal(
                f"the factor {factors[0]}x{factors[1]} leaves a kernel of {odd[0]}x{odd[1]} to a "
                f"deconvolution, which may not be larger than {WIDE}"
            )
        if (words := _no_image(site)) is not None:
            return words
        layers.append(_depthwise(site, np.ones(odd), odd, ((0, 0), (0, 0))))
    twos = [(f // n).bit_length() - 1 for f, n in zip(factors, odd, strict=True)]
    for steps in zip_longest(*([2] * n for n in twos), fillvalue=1):
        layers.append(("upsample", {"scalingFactor": steps}))
    return layers


class _Grid(NamedTuple):
    """The samples along one axis: `up` times denser than the pixels, of which each `step`-th is taken."""

    up: int
    step: int
    repeated: Margins
    """Pixels that are repeated beyond the image."""
    shift: float
    """The samples from the first one that lies between two pixels to the one on the first pixel."""

    @property
    def first(self) -> int:
        """The dense sample of pixel 0 that has a weight and lies most before it."""
        return math.floor(self.shift - self.up) + 1

    @property
    def tent(self) -> Array:
        """The weights of a pixel for the dense samples around it."""
        places = np.arange(self.first, math.ceil(self.shift + self.up))
        return np.asarray(1 - np.abs(places - self.shift) / self.up)

    @property
    def cuts(self) -> Margins:
        """What a deconvolution with the tent makes too much."""
        before, after = self.repeated
        begin = self.up * before - self.first
        wanted = self.up if before + after else 1  # of the last pixel
        return begin, (before + after) * self.up + len(self.tent) - begin - wanted

    @property
    def neighbours(self) -> Array:
        """The weights of the dense samples around one, each a repeated pixel, that interpolate there."""
        shares = np.full(self.up + int(self.shift % 1 > 0), 1 / self.up)
        if self.shift % 1:
            shares[[0, -1]] /= 2
        return shares

    @property
    def around(self) -> Margins:
        """Dense samples beyond the image that are read."""
        if not any(self.repeated):
            return 0, 0
        return math.ceil(self.shift), self.up - 1 - math.floor(self.shift)


def _bilinear(site: Site, factors: Sequence[int]) -> list[Step] | Refusal:
    """The first form whose kernels are small enough."""
    if (words := _no_image(site)) is not None:
        return words
    mode = int(site.params.linearUpsampleMode)
    sizes = height_and_width(site, site.inputs[0])
    grids = [_grid(mode, f, n) for f, n in zip(factors, sizes, strict=True)]
    for form in (_tents, _neighbour_means):
        if (layers := form(site, grids)) is not None:
            return layers
    high, wide = (grid.up for grid in grids)
    return Refusal(
        f"it interpolates at each 1/{high} of the height and 1/{wide} of the width of a pixel, which takes "
        f"kernels of more than {WIDE}"
    )


def _grid(mode: int, factor: int, size: int) -> _Grid:
    if mode == ALIGNED and size > 1:
        common = math.gcd(size - 1, factor * size - 1)
        return _Grid((factor * size - 1) // common, (size - 1) // common, (0, 0), 0)
    shift = (factor - 1) / 2 if mode == CENTERED else 0
    repeated = (0, 0) if factor == 1 else (1, 1) if mode == CENTERED else (0, 1)
    return _Grid(factor, 1, repeated, shift)


def _tents(site: Site, grids: Sequence[_Grid]) -> list[Step] | None:
    """A deconvolution over the image with a repeated border, then slices."""
    high, wide = grids
    kernel = np.outer(high.tent, wide.tent)
    if not _takes(*kernel.shape):
        return None
    layers = _repeat(high.repeated, wide.repeated)
    layers.append(_depthwise(site, kernel, [high.up, wide.up], (high.cuts, wide.cuts)))
    for axis, grid in zip((HEIGHT, WIDTH), grids, strict=True):
        if grid.step > 1:
            size = site.sizes(site.outputs[0])[axis]
            layers.append(slicing(axis, range(0, (size - 1) * grid.step + 1, grid.step)))
    return layers


def _neighbour_means(site: Site, grids: Sequence[_Grid]) -> list[Step] | None:
    """Repeated pixels, then means of neighbours."""
    high, wide = grids
    kernel = np.outer(high.neighbours, wide.neighbours)
    layers = _nearest(site, [high.up, wide.up])
    if not _takes(*kernel.shape) or isinstance(layers, Refusal):
        return None
    mean = _depthwise(site, kernel, [high.step, wide.step])
    return [*layers, *_repeat(high.around, wide.around), mean]


def _repeat(high: Margins, wide: Margins) -> list[Step]:
    """A border of repeated pixels, if there is one."""
    return [edge_padding(high, wide)] if any((*high, *wide)) else []


WEIGHTS = 2**24
"""The most weights of a layer with a group for each phase: 67 MB in fp32, which are read each time."""


@dataclass(frozen=True)
class _Dilated:
    """A dilated convolution."""

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
    def spread(self) -> list[int]:
        """The kernel with zeros between its taps."""
        return [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True)]

    @property
    def cost(self) -> float:
        """How many times more the spread kernel multiplies."""
        return math.prod(self.spread) / math.prod(self.kernel)


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
        found = _read(p)
        if (dear := self._no_zeros(found)) is None:
            _spread(site, found)
            return
        if (apart := _no_phases(site, found)) is not None:
            raise Refused(f"{dear}; by phases: {apart}")
        _by_phases(site, found)

    def _no_zeros(self, found: _Dilated) -> Refusal | None:
        """Why zeros between the taps are not wanted, if they are not."""
        high, wide = found.spread
        if not _takes(high, wide):
            most = f"{WIDE} ({HIGH} if 1 wide)"
            return Refusal(f"with zeros between its taps the kernel is {high}x{wide}, more than {most}")
        if found.cost > self.factor:
            price = f"{found.cost:.1f} times the multiplications"
            return Refusal(f"zeros between its taps cost {price}, more than {self.factor:g}")
        return None


def _read(params: Any) -> _Dilated:
    kernel, groups = pairs(params.kernelSize, 3), int(params.nGroups) or 1
    high, wide = pairs(params.dilationFactor, 1)
    # Along an axis of one tap, any distance does.
    dilation = [wide if kernel[0] == 1 else high, high if kernel[1] == 1 else wide]
    shape = [int(params.outputChannels), int(params.kernelChannels), *kernel]
    stored = [params.weights, *([params.bias] if params.hasBias else [])]
    return _Dilated(
        kernel,
        pairs(params.stride, 1),
        dilation,
        groups,
        spec.weights(params.weights, shape, "weights"),
        spec.weights(params.bias, shape[:1], "bias") if params.hasBias else None,
        all(one.float16Value for one in stored),
    )


def _store(params: Any, found: _Dilated, weight: Array, bias: Array | None) -> None:
    """Put weights into a message, as precise as they were."""
    for field, values in (("weights", weight), ("bias", bias)):
        if values is not None:
            stored = getattr(params, field)
            stored.Clear()
            stored.MergeFrom(type(stored)(**weights(values, found.half)))


def _spread(site: Site, found: _Dilated) -> None:
    """Build the layer with zeros between the taps; its padding is that of the spread kernel already."""
    params = site.copy(site.node, site.inputs, site.outputs).convolution
    high, wide = found.dilation
    spread = np.zeros((*found.weight.shape[:2], *found.spread), np.float32)
    spread[..., ::high, ::wide] = found.weight
    params.kernelSize[:] = found.spread
    del params.dilationFactor[:]
    _store(params, found, spread, found.bias)


def _no_phases(site: Site, found: _Dilated) -> Refusal | None:
    """Why the phases cannot be convolved by themselves, if they cannot."""
    high, wide = found.dilation
    if high != wide:
        return Refusal(f"the dilation is {high} along the height and {wide} along the width")
    if max(found.stride) > 1:
        return Refusal(f"the stride is {found.stride[0]}x{found.stride[1]}, not 1x1")
    if not _takes(*found.kernel):
        return Refusal(f"the kernel is {found.kernel[0]}x{found.kernel[1]}, more than {WIDE}")
    if (no := _no_image(site)) is not None:
        return no
    channels = max(site.shape(blob)[CHANNEL] or 0 for blob in (site.inputs[0], site.outputs[0]))
    if channels * high**2 > MOST_CHANNELS:
        return Refusal(f"{high}x{high} phases of {channels} channels are more than {MOST_CHANNELS}")
    if found.weight.size * high**2 > WEIGHTS:
        return Refusal(f"{high}x{high} times {found.weight.size} weights are more than {WEIGHTS}")
    return None


def _by_phases(site: Site, found: _Dilated) -> None:
    """Padding up to whole blocks, blocks to channels, convolution, and back."""
    d = found.dilation[0]
    margins = []
    for along in _windows_of(site, found.spread, found.stride):
        padded = along.size + along.begin + along.end
        margins.append((along.begin, along.end, -padded % d))
    high, wide = ((begin, end + over) for begin, end, over in margins)
    layers = [constant_padding(high, wide, 0.0)] if any((*high, *wide)) else []
    layers.append(("reorganizeData", {"blockSize": d, "mode": "SPACE_TO_DEPTH"}))
    layers.append(("convolution", _phases(site, found)))
    layers.append(("reorganizeData", {"blockSize": d, "mode": "DEPTH_TO_SPACE"}))
    if any(over for *_, over in margins):
        layers.append(("crop", {"cropAmounts": border_amounts(*((0, over) for *_, over in margins))}))
    site.chain(layers)


def _phases(site: Site, found: _Dilated) -> dict[str, Any]:
    """Each phase, of which the channels lie side by side, by groups of its own."""
    count = found.dilation[0] ** 2
    params = type(site.params)()
    params.CopyFrom(site.params)
    params.outputChannels *= count
    params.nGroups = found.groups * count
    del params.dilationFactor[:]
    params.valid.Clear()
    params.valid.SetInParent()
    bias = None if found.bias is None else np.tile(found.bias, count)
    _store(params, found, np.tile(found.weight, (count, 1, 1, 1)), bias)
    return {field.name: value for field, value in params.ListFields()}


@dataclass(frozen=True)
class SpreadChannels(LayerRewrite):
    """Repeat one number for each channel over the image before two blobs are multiplied.

    `padding` that replicates the border makes an image of one pixel as large as the other side; so gates of
    squeeze-and-excitation networks are written. It writes a blob as large as the result.

    Refuses when a size of the two blobs is dynamic. A constant side is for `legacy_add_multiply`, which makes
    it a `scale`.

    Why it helps: the product of (C, H, W) and (C, 1, 1) was reported off the ANE, layers of the first releases
    mostly on it (hollance/neural-engine, unsupported-layers; through Core ML, iOS 11 to 15). Whether the
    padding costs less than the switch was not measured. Exact: the same numbers are multiplied.

    Grade: bit for bit.
    """

    name = "spread_channels"
    kinds = frozenset({"multiply"})

    def rewrite(self, site: Site) -> None:
        """Only for two computed blobs, one with a single pixel."""
        if len(site.inputs) != 2 or any(site.constant(b) is not None for b in site.inputs):
            return
        image, gate = site.inputs
        if site.shape(image)[-2:] == (1, 1):
            image, gate = gate, image
        if site.shape(gate)[-2:] != (1, 1) or site.shape(image)[-2:] == (1, 1):
            return
        whole, single = site.sizes(image), site.sizes(gate)
        if len(whole) != len(single) or len(whole) < 3 or whole[:-2] != single[:-2]:
            return
        spread = site.put(edge_padding((0, whole[-2] - 1), (0, whole[-1] - 1)), gate)
        site.emit("multiply", [image, spread], site.outputs)
