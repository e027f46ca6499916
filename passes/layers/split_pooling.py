"""Pool with windows of at most 13 at steps of at most 2, or over the whole image.

Before::

    network(%x: 1x2x16x16) {
      %a: 1x2x4x4 = pooling(%x, kernelSize=[4, 4], stride=[4, 4], valid={})
      %y: 1x2x1x1 = pooling(%a, type=AVERAGE, kernelSize=[4, 4], stride=[4, 4], valid={})
      return %y
    }

After::

    network(%x: 1x2x16x16) {
      %a_pooling: 1x2x8x8 = pooling(%x, kernelSize=[2, 2], stride=[2, 2], valid={})
      %a: 1x2x4x4 = pooling(%a_pooling, kernelSize=[2, 2], stride=[2, 2], valid={})
      %y: 1x2x1x1 = pooling(%a, type=AVERAGE, valid={}, globalPooling=True)
      return %y
    }

Tried in this order:

1. One window that covers the whole image is a global pooling.
2. Else each axis is pooled in steps. A maximum is one of maxima whose windows overlap or touch: of two steps
   with the kernels a and b, the first at steps of s, the kernel is a + s (b - 1). A mean is one of means over
   windows that lie side by side, so kernel and stride are divided by common factors; a root of a sum of squares
   likewise. Padding of a maximum is shared out among the steps.
3. A stride of more than 2 that is left becomes a pooling at steps of 1 and a `slice`.

Refuses when a mean or a root of squares reads padding, or has a kernel of more than 13 that shares no factor
with the stride; when a window of a maximum lies in the padding only; when height or width is dynamic.

Why it helps: a kernel of more than 13 or a stride of more than 2 was reported off the ANE, global pooling was
not (hollance/neural-engine, unsupported-layers; through Core ML, iOS 11 to 15). In ML Programs on M4 the stride
is free, but the windows of maxima end at a width of 8. Not measured otherwise. Maxima are bit-exact; means and
sums are taken in another order, exact where fp32 holds them.

Grade: proved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

from anesurgery import authoring as an
from anesurgery.authoring import LayerRewrite, Refusal, Site

MAX, AVERAGE, L2 = range(3)
"""By `type`."""


class _Step(NamedTuple):
    """A pooling along one axis, in elements; the default changes nothing."""

    kernel: int = 1
    stride: int = 1
    begin: int = 0
    end: int = 0


@dataclass(frozen=True)
class SplitPooling(LayerRewrite):
    """Large poolings become several small ones, or global ones."""

    name = "split_pooling"
    kinds = frozenset({"pooling"})
    tolerance = an.REASSOCIATED

    def rewrite(self, site: Site) -> Refusal | None:
        """Globally if it is that, else in steps."""
        p = site.params
        kernel, strides = an.window_padding.pairs(p.kernelSize, 3), an.window_padding.pairs(p.stride, 1)
        if p.globalPooling or (
            max(kernel) <= an.layer_rules.POOL_KERNEL and max(strides) <= an.layer_rules.POOL_STRIDE
        ):
            return None
        windows = an.windows.windows_of(site, kernel, strides)
        if _is_whole(p, windows):
            x, outputs = site.inputs, site.outputs
            site.emit("pooling", x, outputs, type=p.type, valid={}, globalPooling=True)
            return None
        plans = [PLANS[p.type](along) for along in windows]
        for plan in plans:
            if isinstance(plan, Refusal):
                return plan
        _emit(site, windows, [plan for plan in plans if not isinstance(plan, Refusal)])
        return None


def _is_whole(params: Any, windows: Sequence[an.windows.Windows]) -> bool:
    """Is there one window, which covers the image, and does no padding count?"""
    if any(along.count > 1 or along.end < 0 for along in windows):
        return False
    if params.type != AVERAGE or all(along.inside for along in windows):
        return True
    return bool(params.avgPoolExcludePadding) and not params.HasField("includeLastPixel")


def _maxima(along: an.windows.Windows) -> list[_Step] | Refusal:
    """The steps of a maximum, whose windows may overlap."""
    if max(along.begin, along.end) >= along.kernel:
        return Refusal(f"a window of {along.kernel} lies in the padding only")
    steps = []
    while (first := _first(along)) is not None:
        step, along = _apart(along, *first)
        steps.append(step)
    return [*steps, _Step(along.kernel, along.stride, along.begin, max(along.end, 0))]


def _first(along: an.windows.Windows) -> tuple[int, int] | None:
    """Kernel and stride of a step to be taken before the rest, or None where the rest is one step."""
    if along.stride > an.layer_rules.POOL_STRIDE and along.stride % 2 == 0 and along.kernel > 1:
        return 2 + along.kernel % 2, 2
    return (an.layer_rules.POOL_KERNEL, 1) if along.kernel > an.layer_rules.POOL_KERNEL else None


def _apart(along: an.windows.Windows, kernel: int, stride: int) -> tuple[_Step, an.windows.Windows]:
    """A first step, and the windows that are left over its maxima.

    Each first window touches the axis, and they reach from the beginning to the end that is read.
    """
    begin = min(along.begin, kernel - 1)
    begin -= (begin - along.begin) % stride  # the rest is shared out in strides
    rest = an.windows.Windows(
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
    left = an.windows.Windows(windows, rest.count, rest.kernel, rest.stride, rest.begin)
    return _Step(kernel, stride, begin, end), left


def _means(along: an.windows.Windows) -> list[_Step] | Refusal:
    """The steps of a mean, or of a root of a sum of squares: windows side by side, then the rest."""
    if not along.inside:
        return Refusal("it counts or leaves out padding, which steps would weigh otherwise")
    kernel, stride = along.kernel, along.stride
    steps = []
    while kernel > an.layer_rules.POOL_KERNEL or stride > an.layer_rules.POOL_STRIDE:
        common = math.gcd(kernel, stride)
        factor = next((n for n in range(2, an.layer_rules.POOL_KERNEL + 1) if common % n == 0), None)
        if factor is None:
            break
        steps.append(_Step(factor, factor))
        kernel, stride = kernel // factor, stride // factor
    if kernel > an.layer_rules.POOL_KERNEL:
        return Refusal(
            f"a kernel of {along.kernel} at steps of {along.stride} is not made of windows of at most "
            f"{an.layer_rules.POOL_KERNEL} that lie side by side"
        )
    return [*steps, _Step(kernel, stride)]


PLANS: dict[int, Callable[[an.windows.Windows], list[_Step] | Refusal]] = {
    MAX: _maxima,
    AVERAGE: _means,
    L2: _means,
}


def _emit(site: Site, windows: Sequence[an.windows.Windows], plans: Sequence[Sequence[_Step]]) -> None:
    """The layers of both axes side by side; the last makes the output."""
    same = (_Step(), _Step())
    sizes = [along.size for along in windows]
    layers: list[Callable[..., str]] = []
    for row in zip_longest(*plans, fillvalue=_Step()):
        pool = tuple(s._replace(stride=s.stride if s.stride <= an.layer_rules.POOL_STRIDE else 1) for s in row)
        if pool != same or (row != same and site.params.type == L2):  # the root of x squared is not x
            layers.append(partial(_pool, site, steps=pool))
        for i, (axis, s) in enumerate(zip((an.spatial_axes.HEIGHT, an.spatial_axes.WIDTH), row, strict=True)):
            sizes[i] = (sizes[i] + s.begin + s.end - s.kernel) // s.stride + 1
            if s.stride > an.layer_rules.POOL_STRIDE:
                span = range(0, (sizes[i] - 1) * s.stride + 1, s.stride)
                layers.append(partial(an.spatial_axes.cut, site, axis=axis, span=span))
    site.chain(layers)


def _pool(site: Site, x: str, steps: Sequence[_Step], outputs: Sequence[str] | None = None) -> str:
    """One pooling, by a step along each axis."""
    high, wide = ((s.begin, s.end) for s in steps)
    return site.emit(
        "pooling",
        [x],
        outputs,
        type=site.params.type,
        kernelSize=[s.kernel for s in steps],
        stride=[s.stride for s in steps],
        valid={"paddingAmounts": an.spatial_axes.borders(high, wide)} if any((*high, *wide)) else {},
    )


def example() -> Any:
    """A maximum over 4 x 4, then a mean over all."""
    form: dict[str, Any] = {"kernelSize": [4, 4], "stride": [4, 4], "valid": {}}
    layers = [
        an.make_layer("pooling", ["x"], ["a"], **form),
        an.make_layer("pooling", ["a"], ["y"], type="AVERAGE", **form),
    ]
    return an.make_network({"x": (1, 2, 16, 16)}, layers, ["y"])
