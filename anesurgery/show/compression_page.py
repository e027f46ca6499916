"""A compression as one HTML file that needs no network, and as a plot of size against loss.

The plot is drawn by matplotlib, with the modes of coremltools that were measured on the same samples as points;
the page holds it where matplotlib is installed. Names are escaped by jinja2.
"""

from __future__ import annotations

import math
from typing import Any

from anesurgery.byte_counts import byte_words
from anesurgery.compressing.compression import Compression
from anesurgery.compressing.costs import Cost
from anesurgery.display import draws
from anesurgery.errors import SurgeryError
from anesurgery.show.compressions import whole_lines
from anesurgery.show.page import environment
from anesurgery.show.plots import can_plot, picture

LEAST = 1e-9
"""What is drawn for a loss of less, on an axis of logarithms."""


@draws("Compression", "page")
def compression_page(compression: Compression) -> str:
    """A compression as an HTML document."""
    first, *lines = whole_lines(compression)
    plot = svg(compression) if compression.loss is not None and can_plot() else None
    losses = [
        (point.mode, byte_words(point.bytes), point.loss.words(compression.chooses))
        for point in compression.points
    ]
    template = environment().get_template("compression.html")
    return template.render(
        compression=compression, first=first, lines=lines, plot=plot, losses=losses, size=byte_words
    )


@draws("Compression", "plot")
def compression_plot(compression: Compression, kind: str = "png") -> bytes:
    """Size against loss as a picture.

    Args:
        compression: with points of coremltools, or without.
        kind: "png", "svg" or "pdf".

    Raises:
        SurgeryError: no sample was held out, or matplotlib is not installed.
    """
    if compression.loss is None:
        raise SurgeryError("no sample was held out, so there is no loss to draw; give some dozens of samples")
    loss = compression.loss
    return picture(lambda axes: _draw(axes, compression, loss), kind)


def svg(compression: Compression) -> str:
    """The plot as an element of a page."""
    text = compression_plot(compression, "svg").decode()
    return text[text.index("<svg") :]


def _draw(axes: Any, compression: Compression, loss: Cost) -> None:
    theirs = [
        (point.bytes, _height(point.loss, compression.chooses), point.mode) for point in compression.points
    ]
    ours = [(compression.bytes[1], _height(loss, compression.chooses), f"compress, for {compression.purpose}")]
    for rows, marker, label in ((theirs, "o", "coremltools, no data"), (ours, "*", "anesurgery")):
        if rows:
            axes.scatter(
                [x / 1e6 for x, _, _ in rows], [y for _, y, _ in rows], marker=marker, s=70, label=label
            )
        for x, y, name in rows:
            axes.annotate(name, (x / 1e6, y), xytext=(6, 4), textcoords="offset points", fontsize=8)
    what = "KL, nats" if compression.chooses and loss.rows else "noise over the largest number, squared"
    axes.set(
        xlabel="MB of weights", ylabel=f"{what}, of {compression.samples[1]} samples held out", yscale="log"
    )
    axes.axvline(compression.bytes[0] / 1e6, linestyle=":", color="grey", label="as given")
    axes.legend()


def _height(loss: Cost, chooses: bool) -> float:
    """What is drawn of a loss: the KL divergence of a choice, else the noise."""
    value = loss.kl if chooses and loss.rows else 10 ** (-loss.psnr / 10)
    return max(LEAST, value) if math.isfinite(value) else 1.0
