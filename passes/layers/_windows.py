"""What poolings and convolutions of a network read along one axis, and which kernels every chip takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anesurgery.authoring import Refusal, Refused, Target
from anesurgery.network_editing.layer_pass import Site
from anesurgery.neuralnetwork.layers.window_layers import pairs
from anesurgery.neuralnetwork.making import CHANNEL

TOP_LEFT_HEAVY = 1
"""`asymmetryMode` of "same" padding whose odd element stands before the first element of the axis."""
WIDEST, HIGHEST = (Target.parse(None, None).least(side)[0] for side in ("kernel_w", "kernel_h"))
"""The widest and the highest kernel that all chips take; where the numbers come from: `target.SOURCES`."""
IMAGE_AXES = 4
"""Axes that a convolution takes at least in Core ML's own check."""


@dataclass(frozen=True)
class Windows:
    """The windows that a layer reads along one axis, in elements.

    Example: 3 windows of 4 elements, 2 apart, over an axis of 7 elements with 1 of padding in front begin at
    -1, 1 and 3. The last one ends with the axis, so `end` is 0.
    """

    size: int
    """The length of the axis."""
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


def windows_of(site: Site, kernel: Sequence[int], strides: Sequence[int]) -> list[Windows]:
    """Return the windows of a `pooling` or `convolution` along height and width.

    Args:
        site: the layer.
        kernel: height and width of the kernel, its dilation included.
        strides: along height and width.
    """
    sizes, counts = (height_and_width(site, blob) for blob in (site.inputs[0], site.outputs[0]))
    begins = _padding_in_front(site, sizes, kernel, strides)
    return [Windows(sizes[i], counts[i], kernel[i], strides[i], begins[i]) for i in range(2)]


def _padding_in_front(
    site: Site, sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int]
) -> list[int]:
    params = site.params
    if params.HasField("same"):
        totals = [max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in zip(sizes, kernel, strides, strict=True)]
        odd_in_front = params.same.asymmetryMode == TOP_LEFT_HEAVY
        return [(total + odd_in_front) // 2 for total in totals]
    if site.node.kind == "pooling" and params.HasField("includeLastPixel"):
        return pairs(params.includeLastPixel.paddingAmounts, 0)
    edges = params.valid.paddingAmounts.borderAmounts
    return [int(edge.startEdgeSize) for edge in edges] or [0, 0]


def every_chip_takes(height: int, width: int) -> bool:
    """Do all chips take a kernel? One that is higher than `WIDEST` was seen to work only if it is 1 wide."""
    return width <= WIDEST and height <= (HIGHEST if width == 1 else WIDEST)


def why_not_convolvable(site: Site) -> Refusal | None:
    """Return why a convolution with stored weights cannot read the input of a layer; None if it can."""
    shape = site.shape(site.inputs[0])
    if len(shape) < IMAGE_AXES:
        words = f"a convolution takes {IMAGE_AXES} axes or more in Core ML's own check"
        return Refusal(f"{words}, but the blob has {len(shape)}")
    return Refusal("the number of channels is dynamic") if shape[CHANNEL] is None else None
