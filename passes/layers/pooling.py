"""Poolings whose windows are too large, or too far apart, for the engine: as several poolings in a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from anesurgery.authoring import REASSOCIATED, Refused
from anesurgery.network_editing.layer_pass import LayerRewrite, Site
from anesurgery.neuralnetwork.layers.window_layers import pairs
from anesurgery.neuralnetwork.making import HEIGHT, WIDTH, Step, border_amounts, slicing
from anesurgery.passes.layers._windows import Windows, windows_of
from anesurgery.placement.rules.layer_rules import POOL_KERNEL, POOL_STRIDE

MAX, AVERAGE, L2 = range(3)
"""What the layer computes of a window, by its `type`."""


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
        """Make it a global pooling if it is one, else several poolings."""
        p = site.params
        kernel, strides = pairs(p.kernelSize, 3), pairs(p.stride, 1)
        if p.globalPooling or (max(kernel) <= POOL_KERNEL and max(strides) <= POOL_STRIDE):
            return
        windows = windows_of(site, kernel, strides)
        if _is_global(p, windows):
            site.emit("pooling", site.inputs, site.outputs, type=p.type, valid={}, globalPooling=True)
            return
        steps_of = _overlapping_steps if p.type == MAX else _side_by_side_steps
        _emit_poolings(site, windows, [steps_of(axis) for axis in windows])


def _is_global(params: Any, windows: Sequence[Windows]) -> bool:
    """Is there one window, which covers the image, and does no padding count?"""
    if any(axis.count > 1 or axis.end < 0 for axis in windows):
        return False
    if params.type != AVERAGE or all(axis.inside for axis in windows):
        return True
    return bool(params.avgPoolExcludePadding) and not params.HasField("includeLastPixel")


class _Pool(NamedTuple):
    """A pooling along one axis, in elements; the default changes nothing."""

    kernel: int = 1
    stride: int = 1
    begin: int = 0
    end: int = 0


def _overlapping_steps(windows: Windows) -> list[_Pool]:
    """Return the poolings of a maximum along an axis; their windows may overlap."""
    if max(windows.begin, windows.end) >= windows.kernel:
        raise Refused(f"a window of {windows.kernel} lies in the padding only")
    steps: list[_Pool] = []
    while True:
        if windows.stride > POOL_STRIDE and windows.stride % 2 == 0 and windows.kernel > 1:
            step, windows = _first_step(windows, kernel=2 + windows.kernel % 2, stride=2)
        elif windows.kernel > POOL_KERNEL:
            step, windows = _first_step(windows, kernel=POOL_KERNEL, stride=1)
        else:
            return [*steps, _Pool(windows.kernel, windows.stride, windows.begin, max(windows.end, 0))]
        steps.append(step)


def _first_step(windows: Windows, kernel: int, stride: int) -> tuple[_Pool, Windows]:
    """Return a first pooling, and the windows over its maxima that give the same as the windows before.

    Example: windows of 20 elements are windows of 8 maxima, each over 13 elements: 13 + 1 * (8 - 1) = 20.
    The first windows all touch the axis, and they reach from its beginning to the last element that is read.
    """
    begin = min(windows.begin, kernel - 1)
    begin -= (begin - windows.begin) % stride  # so that the padding that is left is a multiple of the stride
    left_begin = (windows.begin - begin) // stride
    left_kernel, left_stride = (windows.kernel - kernel) // stride + 1, windows.stride // stride
    maxima_read = (windows.count - 1) * left_stride + left_kernel - left_begin
    touching = (windows.size - 1 + begin) // stride + 1
    end = max((min(maxima_read, touching) - 1) * stride + kernel - windows.size - begin, 0)
    maxima = (windows.size + begin + end - kernel) // stride + 1
    left = Windows(maxima, windows.count, left_kernel, left_stride, left_begin)
    return _Pool(kernel, stride, begin, end), left


def _side_by_side_steps(windows: Windows) -> list[_Pool]:
    """Return the poolings of a mean, or of a root of a sum of squares: windows side by side, then the rest.

    Example: windows of 30 elements, 15 apart, are windows of 3, of 5 and, at steps of 1, of 2.
    """
    if not windows.inside:
        raise Refused("it counts or leaves out padding, which steps would weigh otherwise")
    kernel, stride = windows.kernel, windows.stride
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
            f"a kernel of {windows.kernel} at steps of {windows.stride} is not made of windows of at most "
            f"{POOL_KERNEL} that lie side by side"
        )
    return [*steps, _Pool(kernel, stride)]


def _emit_poolings(site: Site, windows: Sequence[Windows], steps: Sequence[Sequence[_Pool]]) -> None:
    """Add a layer for each step of both axes; a stride that is too long is a `slice` after a stride of 1."""
    no_pooling = (_Pool(), _Pool())
    sizes = [axis.size for axis in windows]
    layers: list[Step] = []
    for step in zip_longest(*steps, fillvalue=_Pool()):
        pools = tuple(p._replace(stride=p.stride if p.stride <= POOL_STRIDE else 1) for p in step)
        if pools != no_pooling or (step != no_pooling and site.params.type == L2):  # the root of x^2 is not x
            layers.append(_pooling(site, pools))
        for i, (axis, pool) in enumerate(zip((HEIGHT, WIDTH), step, strict=True)):
            sizes[i] = (sizes[i] + pool.begin + pool.end - pool.kernel) // pool.stride + 1
            if pool.stride > POOL_STRIDE:
                layers.append(slicing(axis, range(0, (sizes[i] - 1) * pool.stride + 1, pool.stride)))
    site.chain(layers)


def _pooling(site: Site, pools: Sequence[_Pool]) -> Step:
    """Return the layer that pools along the height and the width."""
    high, wide = ((pool.begin, pool.end) for pool in pools)
    sizes = {"kernelSize": [pool.kernel for pool in pools], "stride": [pool.stride for pool in pools]}
    valid = {"paddingAmounts": border_amounts(high, wide)} if any((*high, *wide)) else {}
    return "pooling", {"type": site.params.type, **sizes, "valid": valid}
