"""Show what a compression did: the weights, their forms with the evidence, and what it cost."""

from __future__ import annotations

from rich import box
from rich.console import Group
from rich.table import Table

from anesurgery.byte_counts import byte_words
from anesurgery.compressing.compression import INSTEAD, CompressedWeight, Compression
from anesurgery.display import short_name
from anesurgery.show.console import plain, shows
from anesurgery.show.summary import counted
from anesurgery.show.weight_costs import ROWS

NEWER = "iPhone16/iOS18"
"""A target that has int4."""


@shows("Compression")
def compression_group(compression: Compression) -> Group:
    """A row for each weight, then the whole."""
    table = Table("weight", "read by", "form", "size", "error", "rounded", box=box.SIMPLE_HEAD)
    for row in compression.compressed[:ROWS]:
        before, after = map(byte_words, row.bytes)
        numbers = f"{before} -> {after}", f"{row.error:.2g}", f"{row.rounded:.2g}"
        table.add_row(plain(short_name(row.weight)), ", ".join(row.readers), row.form, *numbers)
    count = len(compression.compressed)
    more = [plain(f"... and {count - ROWS} more")] if count > ROWS else []
    first, *lines = whole_lines(compression)
    return Group(plain(first, style="bold"), table, *more, *map(plain, lines))


def whole_lines(compression: Compression) -> list[str]:
    """What holds for the whole, the first a sentence."""
    before, after = compression.bytes
    where = "any chip" if compression.target == "any" else compression.target
    lines = [
        *_not_as_asked(compression),
        f"weights: {byte_words(before)} -> {byte_words(after)}; {len(compression.compressed)} compressed for "
        f"{compression.purpose} on {where}, corrected by {counted(compression.samples[0], 'sample')}",
        "error: the squared error of the products, as a share; rounded: without correction",
    ]
    if compression.loss is not None:
        words = compression.loss.words(compression.chooses)
        lines.append(f"on {compression.samples[1]} samples held out: {words}")
        lines += [
            f"coremltools' {one.mode}: {byte_words(one.bytes)}, {one.loss.words(compression.chooses)}"
            for one in compression.points
        ]
    lines.append(f"ops expected on the ANE: {compression.on_engine[0]:.1%} -> {compression.on_engine[1]:.1%}")
    if compression.time is not None:
        lines.append(str(compression.time))
    reasons = {(row.form, row.why): row for row in compression.weights}
    lines += [
        _reason(row, sum(1 for r in compression.weights if (r.form, r.why) == key))
        for key, row in reasons.items()
    ]
    lines += [*_inputs(compression), *_balanced(compression), *_norms(compression)]
    return [*lines, *(f"note: {words}" for words in compression.notes)]


def _not_as_asked(compression: Compression) -> list[str]:
    """That weights have more bits than were asked for, why, and what gives as few."""
    if not (wider := compression.wider):
        return []
    forms, asked = ", ".join(dict.fromkeys(str(one.form) for one in wider)), compression.asked
    count = f"{len(wider)} of {len(compression.compressed)} weights"
    older = any(INSTEAD in note for note in compression.notes)
    why = (
        f"int4 needs iOS 18: name a target that has it (--target {NEWER})"
        if older
        else f"forms of {asked} bits are slower on {compression.target}"
    )
    return [f"Not {asked} bits: {count} became {forms}. {why}; --for size takes {asked} bits anyway."]


def _inputs(compression: Compression) -> list[str]:
    """What the ops read, where 8 bits were asked for."""
    asked = [row for row in compression.weights if row.inputs]
    if not asked:
        return []
    kept = [row for row in asked if row.scales]
    least = min((row.cosine for row in kept if row.cosine is not None), default=1.0)
    lines = [f"inputs of 8 bits: of {len(kept)} weights, whose products keep a cosine of at least {least:.4f}"]
    return (
        lines
        + [f"inputs unchanged: of {short_name(row.weight)}: {row.inputs}" for row in asked if not row.scales][
            :ROWS
        ]
    )


def _balanced(compression: Compression) -> list[str]:
    """Where scales went from a value into the weights that read it."""
    taken = [row for row in compression.balanced if not row.why]
    lines = [
        f"channels balanced: of {short_name(row.value)}: error {row.error[0]:.2g} -> {row.error[1]:.2g}"
        for row in taken[:ROWS]
    ]
    return (
        lines
        if not compression.balanced
        else [f"{len(taken)} of {len(compression.balanced)} values balanced", *lines]
    )


def _norms(compression: Compression) -> list[str]:
    """How many norms were corrected, and what that did where it is judged."""
    if not (tried := compression.norms):
        return []
    kept = [one for one in tried if one.kept]
    lines = [f"{len(kept)} of {len(tried)} norms corrected, by what samples lose that they were not fitted to"]
    for one in kept[:ROWS]:
        before, after = one.loss or (0.0, 0.0)
        lines.append(f"norm corrected: {short_name(one.norm)}: loss at the outputs {before:.3g} -> {after:.3g}")
    worse = sum(one.loss is not None and not one.kept for one in tried)
    return [*lines, f"norms unchanged, since the outputs would not lose less: {worse}"] if worse else lines


def _reason(row: CompressedWeight, count: int) -> str:
    """Why some weights have the form that they have."""
    weights = "1 weight" if count == 1 else f"{count} weights"
    return f"{weights} as {row.form}: {row.why}" if row.form else f"{weights} unchanged: {row.why}"
