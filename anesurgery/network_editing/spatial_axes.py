"""Channel, height and width: the axes that layers of the first releases work along, and what they do there.

Axes are counted from the end, as the definition of the format counts them.
"""

from __future__ import annotations

from collections.abc import Sequence

from anesurgery.network_editing.layer_pass import Site

SEQUENCE, BATCH, CHANNEL, HEIGHT, WIDTH = -5, -4, -3, -2, -1
NAMES = {SEQUENCE: "sequence", BATCH: "batch", CHANNEL: "channel", HEIGHT: "height", WIDTH: "width"}
CUT = {CHANNEL: "CHANNEL_AXIS", HEIGHT: "HEIGHT_AXIS", WIDTH: "WIDTH_AXIS"}
"""Axis -> its name in a `slice`, which needs no more axes than come after it."""
SWAPS = {HEIGHT: (0, 2, 1, 3), WIDTH: (0, 3, 2, 1), SEQUENCE: (1, 0, 2, 3)}
"""Axis -> the order of a `permute` that changes places with the channel; it undoes itself."""

Margins = tuple[int, int]
"""Elements before and after."""


def from_end(axis: int, rank: int) -> int:
    """An axis that counts from either end, from the end."""
    return axis - rank if axis >= 0 else axis


def cut(site: Site, x: str, axis: int, span: range, outputs: Sequence[str] | None = None) -> str:
    """Put a `slice` there.

    Args:
        site: where.
        x: the blob.
        axis: from the end, one of `CUT`.
        span: the places that stay, upwards; none lies outside of the axis.
        outputs: the blob that it makes; a new one by default.
    """
    fields = {"startIndex": span.start, "endIndex": span.stop, "stride": span.step}
    return site.emit("slice", [x], outputs, axis=CUT[axis], **fields)


def border(
    site: Site, x: str, height: Margins, width: Margins, value: float, outputs: Sequence[str] | None = None
) -> str:
    """Put a `padding` with one number there, for a blob of two axes or more."""
    return site.emit("padding", [x], outputs, constant={"value": value}, paddingAmounts=borders(height, width))


def borders(height: Margins, width: Margins) -> dict[str, list[dict[str, int]]]:
    """The fields of a `BorderAmounts` message."""
    edges = [{"startEdgeSize": a, "endEdgeSize": b} for a, b in (height, width)]
    return {"borderAmounts": edges}


def swap(site: Site, x: str, axis: int, outputs: Sequence[str] | None = None) -> str:
    """Put a `permute` there that changes places of an axis of `SWAPS` and the channel of five axes."""
    return site.emit("permute", [x], outputs, axis=SWAPS[axis])
