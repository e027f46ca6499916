"""The command `chips`: what is known of each chip's Neural Engine, in one table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table

from anesurgery.commands.options import Json, Quiet, show
from anesurgery.commands.waiting import load_engine


def chips(
    target: Annotated[str | None, typer.Option(help='Some of them, as in inspect: "M1-M3".')] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What is known of each chip: engine, cores, bandwidth, limits, oldest OS, wrong ops, and from where."""
    load_engine(quiet)
    from anesurgery.placement.rules.faulty_ops import faults_on
    from anesurgery.placement.target import CHIPS, SOURCES, Target

    aim = Target.parse(target)
    chosen = [CHIPS[name] for name in aim.chips]
    faults = [_fault(fault) for fault in faults_on(aim)]
    plain = {"chips": [asdict(chip) for chip in chosen], "sources": SOURCES, "faults": faults}
    sources = "\n".join(f"{name}: {source}" for name, source in SOURCES.items())
    words = "\n".join(f"{f['name']}: {f['what']} ({f['seen']}; {f['source']})" for f in faults)
    show(plain, Group(_table(chosen), sources, "", "Ops that were reported wrong:", words), as_json, quiet)


def _fault(fault: Any) -> dict[str, Any]:
    """A row of the table of engine faults as plain data."""
    return {
        "name": fault.name,
        "ops": sorted(fault.ops),
        "what": fault.what,
        "seen": fault.seen,
        "chips": list(fault.chips),
        "format": fault.format,
        "repair": fault.remedy,
        "advice": fault.advice,
        "source": fault.source,
    }


def _cells(chip: Any) -> dict[str, Any]:
    """Heading -> what stands below it; None where nothing is known."""
    from anesurgery.semantics.reading import in_words

    return {
        "chip": chip.name,
        "engine": f"H{chip.family}",
        "cores": chip.cores,
        "GB/s": chip.bandwidth,
        "axis": chip.axis,
        "kernel": f"{chip.kernel_h}x{chip.kernel_w}",
        "program": in_words(chip.program),
        "address space": None if chip.address_space is None else in_words(chip.address_space),
        "working set": in_words(chip.working_set),
        "since": f"{chip.platform} {chip.first_os}",
    }


def _table(chosen: list[Any]) -> Table:
    rows = [_cells(chip) for chip in chosen]
    table = Table(*rows[0], box=None)
    for row in rows:
        table.add_row(*("?" if value is None else str(value) for value in row.values()))
    return table
