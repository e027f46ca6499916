"""Where the windows of a pooling or a convolution lie, whatever way its padding was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anesurgery.errors import Refused
from anesurgery.network_editing.layer_pass import Site
from anesurgery.neuralnetwork.layers.window_padding import pairs

LATER = 1
"""`asymmetryMode` of "same" padding that puts what is over before the first element."""


@dataclass(frozen=True)
class Windows:
    """The windows along one axis, in elements."""

    size: int
    """Of the axis that they read."""
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


def windows_of(site: Site, kernel: Sequence[int], strides: Sequence[int]) -> list[Windows]:
    """The windows of a layer along height and width.

    Args:
        site: of a `pooling` or `convolution`.
        kernel: how far a window reaches, with its dilation.
        strides: from window to window.

    Raises:
        Refused: a size is dynamic.
    """
    sizes, counts = (height_and_width(site, blob) for blob in (site.inputs[0], site.outputs[0]))
    begins = _begins(site, sizes, kernel, strides)
    rows = zip(sizes, counts, kernel, strides, begins, strict=True)
    return [Windows(*row) for row in rows]


def height_and_width(site: Site, blob: str) -> list[int]:
    """The last two sizes of a blob.

    Raises:
        Refused: one is dynamic.
    """
    extent = [d for d in site.shape(blob)[-2:] if d is not None]
    if len(extent) != 2:
        raise Refused(f"height or width of {blob!r} is dynamic")
    return extent


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
