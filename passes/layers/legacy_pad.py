"""Pad rows, columns and channels with the layers of the first releases.

Before::

    network(%x: 1x4x8x8) {
      %p: 1x4x9x10 = constantPad(%x, padAmounts=[0, 0, 0, 0, 0, 1, 1, 1])
      %y: 1x6x9x10 = constantPad(%p, padAmounts=[0, 0, 0, 2, 0, 0, 0, 0])
      return %y
    }

After::

    network(%x: 1x4x8x8) {
      %p: 1x4x9x10 = padding(%x, constant={}, paddingAmounts={borderAmounts=[{endEdgeSize=1}, {startEdgeSize=1, endEdgeSize=1}]})
      %y_slice: 1x2x9x10 = slice(%p, endIndex=2, stride=1)
      %y_activation: 1x2x9x10 = activation(%y_slice, linear={})
      %y: 1x6x9x10 = concat(%p, %y_activation)
      return %y
    }

Rows and columns are a `padding`. More channels are some channels of the blob, times 0 plus the number, after
or before it: no weights, at the cost of writing the blob again. The channels that are there stay bit for bit;
the new ones are exact as long as those that they are made of are finite (NaN else). Switch that off with
`channels=False`. Where nothing is padded, the input is passed on. Amounts from a second input must be constant;
sizes of the result (padToGivenOutputSizeMode) become amounts.

Refuses when the batch or the sequence is padded, when the channels become more than eight times as many at
either end, when amounts or sizes that count are dynamic, and where Core ML's own check
wants more axes: two for `padding`, three for `concat`.

Why it helps: `padding`, `slice` and linear activations are of the first releases, which mostly run on the ANE,
`concat` was seen there (hollance/neural-engine, unsupported-layers; fredyshox/ANECompat; through Core ML, iOS 11
to 15); of `constantPad` nothing was reported. Not measured on later systems.

Grade: proved.
"""  # noqa: E501 - the sketch is as the printer prints it

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anesurgery import authoring as an
from anesurgery.authoring import LayerRewrite, Refusal, Site

JOINED, PADDED = 3, 2
"""Axes that `concat` and `padding` take at least."""
PIECES = 8
"""Copies of all channels that are made at most on one side: each is one more input of a concat. A choice."""
NONE = (0, 0)
"""No margin at either end."""


@dataclass(frozen=True)
class LegacyPad(LayerRewrite):
    """`constantPad` becomes `padding`, and a `concat` with a number where channels are padded."""

    name = "legacy_pad"
    tolerates_nonfinite = False
    """A padding that is a product with zeros makes NaN of an infinity."""
    kinds = frozenset({"constantPad"})
    channels: bool = True
    """Also channels?"""

    def rewrite(self, site: Site) -> Refusal | None:
        """Channels first, so that the larger blob is written last."""
        margins = _margins(site)
        if isinstance(margins, Refusal):
            return margins
        rank = len(site.shape(site.inputs[0]))
        if (refusal := self._refused(site, margins, rank)) is not None:
            return refusal
        height, width = (margins.get(axis, NONE) for axis in (an.spatial_axes.HEIGHT, an.spatial_axes.WIDTH))
        x, planar = site.inputs[0], height != NONE or width != NONE
        if an.spatial_axes.CHANNEL in margins:
            x = _widened(site, x, margins[an.spatial_axes.CHANNEL], None if planar else site.outputs)
        if planar:
            an.spatial_axes.border(site, x, height, width, site.params.value, site.outputs)
        elif not margins:
            site.forward(x)
        return None

    def _refused(self, site: Site, margins: dict[int, an.spatial_axes.Margins], rank: int) -> Refusal | None:
        if front := [axis for axis in margins if axis < an.spatial_axes.CHANNEL]:
            return Refusal(
                f"it pads axis {front[0]} of {rank}; the layers of the first releases pad rows, columns and "
                "channels"
            )
        if margins and rank < PADDED:
            return Refusal(f"the blob has {rank} axis; Core ML's own check wants {PADDED} or more")
        if an.spatial_axes.CHANNEL not in margins:
            return None
        if not self.channels:
            return Refusal("it pads the channels, which `channels` is switched off for")
        count, most = site.sizes(site.inputs[0])[an.spatial_axes.CHANNEL], max(margins[an.spatial_axes.CHANNEL])
        if most > PIECES * count:
            return Refusal(f"it adds {most} channels to {count}, more than {PIECES} times as many")
        return None


def _margins(site: Site) -> dict[int, an.spatial_axes.Margins] | Refusal:
    """Axis from the end -> what it is padded by, where it is."""
    amounts = [int(n) for n in site.params.padAmounts]
    if len(site.inputs) > 1:
        value = site.constant(site.inputs[1])
        if value is None:
            return Refusal("its amounts are dynamic")
        amounts = [int(n) for n in value.flat]
    rank = len(site.shape(site.inputs[0]))
    if len(amounts) != 2 * rank:
        return Refusal(f"it states {len(amounts)} amounts for a blob of {rank} axes")
    pairs = list(zip(amounts[::2], amounts[1::2], strict=True))
    if site.params.padToGivenOutputSizeMode:
        pairs = _lacking(site, pairs)
    return {i - rank: pair for i, pair in enumerate(pairs) if any(pair)}


def _lacking(site: Site, wanted: list[an.spatial_axes.Margins]) -> list[an.spatial_axes.Margins]:
    """What lacks of the wanted sizes on either side; 0 wants nothing."""
    if not any(map(any, wanted)):
        return wanted
    sizes = site.sizes(site.inputs[0])
    return [(max(a - size, 0), max(b - size, 0)) for (a, b), size in zip(wanted, sizes, strict=True)]


def _widened(site: Site, x: str, margins: an.spatial_axes.Margins, outputs: tuple[str, ...] | None) -> str:
    """`x` between channels that hold the number."""
    count = site.sizes(x)[an.spatial_axes.CHANNEL]
    before, after = (
        [_number(site, x, min(count, n - at), count) for at in range(0, n, count)] for n in margins
    )
    return site.emit("concat", [*before, x, *after], outputs)


def _number(site: Site, x: str, width: int, count: int) -> str:
    """As many channels of `x` as wanted, times 0 plus the number."""
    if width < count:
        x = an.spatial_axes.cut(site, x, an.spatial_axes.CHANNEL, range(width))
    return site.linear(x, 0.0, site.params.value)


def example() -> Any:
    """A border of zeros, then two channels of them."""
    layers = [
        an.make_layer("constantPad", ["x"], ["p"], padAmounts=[0, 0, 0, 0, 0, 1, 1, 1]),
        an.make_layer("constantPad", ["p"], ["y"], padAmounts=[0, 0, 0, 2, 0, 0, 0, 0]),
    ]
    return an.make_network({"x": (1, 4, 8, 8)}, layers, ["y"])
