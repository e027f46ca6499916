"""Show the result of `compress`: the weights with their forms, the reasons, and the loss; also as a page.

The page needs no network, and its names are escaped by jinja2. With matplotlib it holds a plot of size against
loss, in which coremltools' own modes, measured on the same samples, are points.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from anesurgery.compressing.compression import INSTEAD, Compression
from anesurgery.compressing.costs import Cost
from anesurgery.display import byte_words, counted, draws, short_name
from anesurgery.errors import SurgeryError
from anesurgery.files.plot_files import can_plot, picture
from anesurgery.show.console import shows
from anesurgery.show.page import render
from anesurgery.show.report import Report, Table, first_rows

LEAST = 1e-9
"""The smallest loss in the plot, which has a logarithmic axis."""
NEWER = "iPhone 16/iOS 18"
"""A target that has int4."""
ROWS = 40
"""The most rows that are shown; JSON has all."""


@shows("Compression")
def compression_report(compression: Compression) -> Report:
    """Report a row for each weight, then the whole model."""
    shown, more = first_rows(compression.compressed, ROWS)
    sizes = [" -> ".join(map(byte_words, row.bytes)) for row in shown]
    errors = [(f"{row.error:.2g}", f"{row.rounded:.2g}") for row in shown]
    rows = [
        (row.weight, ", ".join(row.readers), row.form, size, *both)
        for row, size, both in zip(shown, sizes, errors, strict=True)
    ]
    title, *lines = whole_lines(compression)
    table = Table(("weight", "read by", "form", "size", "error", "rounded"), rows)
    return Report(title, [table, *more, *lines])


def whole_lines(compression: Compression) -> list[str]:
    """Return what holds for the whole model; the first is a sentence."""
    before, after = compression.bytes
    where = "any chip" if compression.target == "any" else compression.target
    weights = counted(len(compression.compressed), "weight")
    lines = [
        *_wider_words(compression),
        f"weights: {byte_words(before)} -> {byte_words(after)}; {weights} compressed "
        f"for {compression.purpose} on {where}, with {counted(compression.samples[0], 'sample')}",
        "error: relative squared error of the layer's output; rounded: the same if weights were only rounded",
    ]
    if compression.loss is not None:
        words = compression.loss.words(compression.chooses)
        lines.append(f"on {compression.samples[1]} held-out samples: {words}")
        lines += [
            f"coremltools' {one.mode}: {byte_words(one.bytes)}, {one.loss.words(compression.chooses)}"
            for one in compression.points
        ]
    lines.append(
        f"ops expected on the Neural Engine: {compression.on_engine[0]:.1%} -> {compression.on_engine[1]:.1%}"
    )
    if compression.time is not None:
        lines.append(str(compression.time))
    if not compression.weights:
        lines.append("no weight to compress: small ones, and compressed ones, stay as they are")
    reasons = Counter((row.form, row.why) for row in compression.weights)
    lines += [
        f"{counted(count, 'weight')} {f'as {form}' if form else 'unchanged'}: {why}"
        for (form, why), count in reasons.items()
    ]
    lines += [*_input_lines(compression), *_balance_lines(compression)]
    return [*lines, *(f"note: {words}" for words in compression.notes)]


def _with_int4(target: str) -> str:
    """Return a target with the first OS that has int4: "iPhone 13 (A15)/iOS 17" -> "iPhone 13/iOS 18"."""
    chips, _, system = target.partition("/")
    if chips == "any":
        return NEWER
    mac = system.startswith("macOS") or (not system and chips.startswith("M"))
    return f"{chips.split(' (')[0]}/{'macOS 15' if mac else 'iOS 18'}"


def _wider_words(compression: Compression) -> list[str]:
    """Say that weights have more bits than were asked for, why, and what would give fewer."""
    if not (wider := compression.wider):
        return []
    forms, asked = ", ".join(dict.fromkeys(str(one.form) for one in wider)), compression.asked
    count = f"{len(wider)} of {len(compression.compressed)} weights"
    older = any(INSTEAD in note for note in compression.notes)
    newer = _with_int4(compression.target)
    why = (
        f'int4 needs {newer.rpartition("/")[2]}: name a target that has it (--target "{newer}")'
        if older
        else f"forms of {asked} bits are slower on {compression.target}"
    )
    return [f"Not {asked} bits: {count} became {forms}. {why}; --for size takes {asked} bits anyway."]


def _input_lines(compression: Compression) -> Iterator[str]:
    """Yield lines on the inputs of ops, where 8 bits were asked for."""
    asked = [row for row in compression.weights if row.inputs]
    kept = [row for row in asked if row.scales]
    least = min((row.cosine for row in kept if row.cosine is not None), default=1.0)
    if asked:
        yield f"inputs of 8 bits: of {len(kept)} weights, whose products keep a cosine of at least {least:.4f}"
    for row in [row for row in asked if not row.scales][:ROWS]:
        yield f"inputs unchanged: of {short_name(row.weight)}: {row.inputs}"


def _balance_lines(compression: Compression) -> Iterator[str]:
    """Yield lines on values whose channel scales were moved into the weights that read them."""
    taken = [row for row in compression.balanced if not row.why]
    if compression.balanced:
        yield f"{len(taken)} of {len(compression.balanced)} values balanced"
    for row in taken[:ROWS]:
        yield f"channels balanced: of {short_name(row.value)}: error {row.error[0]:.2g} -> {row.error[1]:.2g}"


@draws("Compression", "page")
def compression_page(compression: Compression) -> str:
    """Return a compression as an HTML document."""
    first_rows, *lines = whole_lines(compression)
    plot = svg(compression) if compression.loss is not None and can_plot() else None
    losses = [
        (point.mode, byte_words(point.bytes), point.loss.words(compression.chooses))
        for point in compression.points
    ]
    return render(
        "compression.html",
        compression=compression,
        first=first_rows,
        lines=lines,
        plot=plot,
        losses=losses,
        size=byte_words,
    )


@draws("Compression", "plot")
def compression_plot(compression: Compression, kind: str = "png") -> bytes:
    """Return the plot of size against loss as an image.

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
    """Return the plot as an element of a page."""
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
    """Return the height of a point: the KL divergence of a choice, else the noise."""
    value = loss.kl if chooses and loss.rows else 10 ** (-loss.psnr / 10)
    return max(LEAST, value) if math.isfinite(value) else 1.0
