"""The command `chips`: what is known of each chip's Neural Engine, in one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table

from anesurgery.commands.options import Json, Quiet, show
from anesurgery.facts.reading import in_words
from anesurgery.placement.target import CHIPS, SOURCES, Chip, Target

COLUMNS: dict[str, Callable[[Chip], Any]] = {
    "chip": lambda c: c.name,
    "engine": lambda c: f"H{c.family}",
    "cores": lambda c: c.cores,
    "GB/s": lambda c: c.bandwidth,
    "axis": lambda c: c.axis,
    "kernel": lambda c: f"{c.kernel_h}x{c.kernel_w}",
    "program": lambda c: in_words(c.program),
    "address space": lambda c: None if c.address_space is None else in_words(c.address_space),
    "working set": lambda c: in_words(c.working_set),
    "since": lambda c: f"{c.platform} {c.first_os}",
}
"""Heading -> what stands below it."""


def chips(
    target: Annotated[str | None, typer.Option(help='Some of them, as in inspect: "M1-M3".')] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What is known of each chip: engine, cores, bandwidth, limits, oldest OS, and from where."""
    chosen = [CHIPS[name] for name in Target.parse(target).chips]
    plain = {"chips": [asdict(chip) for chip in chosen], "sources": SOURCES}
    sources = "\n".join(f"{name}: {source}" for name, source in SOURCES.items())
    show(plain, Group(_table(chosen), sources), as_json, quiet)


def _table(chosen: list[Chip]) -> Table:
    table = Table(*COLUMNS, box=None)
    for chip in chosen:
        found = [value(chip) for value in COLUMNS.values()]
        table.add_row(*("?" if value is None else str(value) for value in found))
    return table
