"""Concatenate along channels, sequences, rows and columns with the layers of the first releases.

Before::

    network(%x: 1x2x4x4, %z: 1x3x4x4, %w: 1x5x1x4) {
      %xz: 1x5x4x4 = concatND(%x, %z, axis=1)
      %y: 1x5x5x4 = concatND(%xz, %w, axis=-2)
      return %y
    }

After::

    network(%x: 1x2x4x4, %z: 1x3x4x4, %w: 1x5x1x4) {
      %xz: 1x5x4x4 = concat(%x, %z)
      %y_padding: 1x5x5x4 = padding(%xz, constant={}, paddingAmounts={borderAmounts=[{endEdgeSize=1}, {}]})
      %y_padding_1: 1x5x5x4 = padding(%w, constant={}, paddingAmounts={borderAmounts=[{startEdgeSize=4}, {}]})
      %y: 1x5x5x4 = add(%y_padding, %y_padding_1)
      return %y
    }

Along channels (axis -3) and sequences (axis -5) it is `concat`. Along rows and columns each input is put into
zeros of the size of the result, and those are added: exact for all numbers, except that -0 becomes 0. That
writes the result once for each input and reads it again; switch it off with `spatial=False`. Channels that
interleave are a `concat` and a convolution that orders them: exact for finite numbers, it costs C x C products
for each pixel.

Refuses when the inputs differ in the number of axes or in a size besides the axis, along the batch or axes in
front of the sequence, when it interleaves along another axis than the channel or more than 512 channels, and
where Core ML's own check wants more axes: three for `concat`, five along the sequence, two for `padding`, four
for `convolution`.

Why it helps: layers of the ND kind were reported off the ANE, `concat` on it (hollance/neural-engine,
unsupported-layers; through Core ML, iOS 11 to 15). `padding` and `add` are of the first releases, too, which
mostly run there. Not measured on later systems.

Grade: bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anesurgery import authoring as an
from anesurgery.authoring import LayerRewrite, Refusal, Site

LEAST = {
    an.spatial_axes.CHANNEL: 3,
    an.spatial_axes.SEQUENCE: 5,
    an.spatial_axes.HEIGHT: 2,
    an.spatial_axes.WIDTH: 2,
}
"""Axis -> how many axes Core ML's own check wants of the blobs."""
IMAGE = 4
"""Axes that a convolution wants."""


@dataclass(frozen=True)
class LegacyConcat(LayerRewrite):
    """`concatND` becomes `concat`, or a sum of padded inputs along rows and columns."""

    name = "legacy_concat"
    tolerates_nonfinite = False
    """A join that is a product with zeros makes NaN of an infinity."""
    kinds = frozenset({"concatND"})
    spatial: bool = True
    """Also along rows and columns?"""

    def rewrite(self, site: Site) -> Refusal | None:
        """Choose the layer by the axis."""
        rank = len(site.shape(site.outputs[0]))
        axis = an.spatial_axes.from_end(site.params.axis, rank)
        if (unlike := _unlike(site, axis)) is not None:
            return unlike
        if axis not in LEAST:
            return Refusal(
                f"it joins along {_words(axis, rank)}; the layers of the first releases join channels, "
                "sequences, rows and columns"
            )
        if rank < LEAST[axis]:
            return Refusal(
                f"it joins along the {an.spatial_axes.NAMES[axis]} of {rank} axes; "
                f"Core ML's own check wants {LEAST[axis]}"
            )
        if site.params.interleave:
            return _interleaved(site, axis, rank)
        if axis in (an.spatial_axes.HEIGHT, an.spatial_axes.WIDTH):
            return self._padded(site, axis)
        fields = {"sequenceConcat": True} if axis == an.spatial_axes.SEQUENCE else {}
        site.emit("concat", site.inputs, site.outputs, **fields)
        return None

    def _padded(self, site: Site, axis: int) -> Refusal | None:
        """Each input in zeros of the size of the result, and their sum."""
        if not self.spatial:
            return Refusal(
                f"it joins along the {an.spatial_axes.NAMES[axis]}, which `spatial` is switched off for"
            )
        lengths = [site.sizes(x)[axis] for x in site.inputs]
        padded = []
        for i, x in enumerate(site.inputs):
            margins = (sum(lengths[:i]), sum(lengths[i + 1 :]))
            sides = (margins, (0, 0)) if axis == an.spatial_axes.HEIGHT else ((0, 0), margins)
            padded.append(an.spatial_axes.border(site, x, *sides, value=0.0))
        site.emit("add", padded, site.outputs)
        return None


def _unlike(site: Site, axis: int) -> Refusal | None:
    """Why the inputs cannot lie side by side."""
    shapes = [list(site.shape(x)) for x in site.inputs]
    if len({len(shape) for shape in shapes}) > 1 or not shapes[0]:
        return Refusal(f"its inputs have {', '.join(str(len(s)) for s in shapes)} axes")
    for shape in shapes:
        shape[axis] = 0
    if any(shape != shapes[0] for shape in shapes):
        return Refusal("its inputs differ in more sizes than that of the axis")
    return None


def _interleaved(site: Site, axis: int, rank: int) -> Refusal | None:
    if axis != an.spatial_axes.CHANNEL or rank < IMAGE:
        return Refusal(
            f"it interleaves along {_words(axis, rank)}; only channels of {IMAGE} axes or more can be "
            "ordered anew"
        )
    sizes = [site.sizes(x)[axis] for x in site.inputs]
    if len(set(sizes)) > 1 or sum(sizes) > an.channels.CHANNELS:
        return Refusal(
            f"it interleaves {', '.join(map(str, sizes))} channels, not equally many, "
            f"{an.channels.CHANNELS} in all at most"
        )
    count = len(sizes)
    order = [part * sizes[0] + i for i in range(sizes[0]) for part in range(count)]
    joined = site.emit("concat", site.inputs)
    site.emit("convolution", [joined], site.outputs, **an.channels.picking(order, len(order)))
    return None


def _words(axis: int, rank: int) -> str:
    word = an.spatial_axes.NAMES.get(axis)
    return f"axis {axis} of {rank}" + (f", the {word}" if word else "")


def example() -> Any:
    """Two images joined by their channels, and a row more."""
    layers = [
        an.make_layer("concatND", ["x", "z"], ["xz"], axis=1),
        an.make_layer("concatND", ["xz", "w"], ["y"], axis=-2),
    ]
    inputs = {"x": (1, 2, 4, 4), "z": (1, 3, 4, 4), "w": (1, 5, 1, 4)}
    return an.make_network(inputs, layers, ["y"])
